"""Which kernels a function of clamp may launch, and how that is chosen on a device, by what it says that it uses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pyopencl as cl

from clamp.casting.owned import USES
from clamp.opencl.program import Kernel


@dataclass(frozen=True)
class Reached:
    """What a function uses, and what that leads to.

    Attributes:
        files: names of kernel files.
        modules: names of modules of clamp.ops.
    """

    files: set[str]
    modules: set[str]


def reached(function: Callable[..., Any]) -> Reached:
    """Kernel files that calls of a function of clamp may build, and the modules of clamp.ops on the way there.

    A module leads to its kernels, and to the modules of clamp.ops which it takes functions from; a package to its
    engines as well.
    """
    kernels: set[Kernel] = set()
    modules: set[str] = set()
    waiting = list(USES[inspect.unwrap(function)])
    while waiting:
        x = waiting.pop()
        if isinstance(x, Kernel):
            kernels.add(x)
        module = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", "")
        if str(module).startswith("clamp.ops.") and module not in modules:
            modules.add(module)
            waiting += _names_in(sys.modules[module])
    return Reached({kernel.file for kernel in kernels}, modules)


def _names_in(module: ModuleType) -> list[Any]:
    """What the names in a module stand for, its tables and lists taken apart; in a package, without its modules."""
    is_package = hasattr(module, "__path__")
    found: list[Any] = [x for x in vars(module).values() if not (is_package and isinstance(x, ModuleType))]
    tables = [x.values() if isinstance(x, dict) else x for x in found if isinstance(x, dict | tuple)]
    return found + [x for table in tables for x in table]


def on_device(found: Reached, queue: cl.CommandQueue, dtype: str) -> list[str]:
    """What modules, or their packages, say of choices on the queue's device: some have ``on_device(queue, dtype)``."""
    names = found.modules | {name.rpartition(".")[0] for name in found.modules}
    speakers = (getattr(sys.modules[name], "on_device", None) for name in sorted(names))
    return [speak(queue, dtype) for speak in speakers if speak is not None]
