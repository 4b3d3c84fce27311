"""Which kernels a function of clamp may launch, and how that is chosen on a device: read from its code.

No table has to be kept: the walk starts at a function's code and follows every name that leads to clamp.ops.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import pyopencl as cl

from clamp.opencl.program import Kernel

_FOLLOWED = ("clamp.functions.", "clamp.ops.")


@dataclass
class Reached:
    """What the code of a function leads to.

    Attributes:
        files: names of kernel files.
        modules: names of the modules of clamp.ops.
    """

    files: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)


def reached(function: Callable[..., Any]) -> Reached:
    """Kernel files that calls of a function may build, and the modules of clamp.ops on the way there."""
    found = Reached()
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if inspect.isfunction(x) and x.__module__.startswith(_FOLLOWED):
            if x.__module__.startswith("clamp.ops."):
                found.modules.add(x.__module__)
            for code in _codes(x.__code__):
                found.files.update(text for text in code.co_consts if _is_kernel_file(text))
                waiting += _named(code, x.__globals__)
            waiting += [cell.cell_contents for cell in x.__closure__ or ()]
        elif inspect.isclass(x) and x.__module__.startswith(_FOLLOWED):
            waiting += [getattr(member, "fget", member) for member in vars(x).values()]
        elif is_dataclass(x) and type(x).__module__.startswith(_FOLLOWED):
            waiting += [getattr(x, each.name) for each in fields(x)]
        elif isinstance(x, types.ModuleType):  # of a list of engines
            waiting += [y for y in vars(x).values() if str(getattr(y, "__module__", "")).startswith(_FOLLOWED)]
        elif isinstance(x, Kernel):
            found.files.add(x.file)
        elif isinstance(x, dict):
            waiting += x.values()
        elif isinstance(x, list | tuple | set | frozenset):
            waiting += x
        elif _is_kernel_file(x):
            found.files.add(x)
    return found


def on_device(found: Reached, queue: cl.CommandQueue, dtype: str) -> list[str]:
    """What the modules say of their choices on the queue's device: each may have ``on_device(queue, dtype)``."""
    speakers = (getattr(sys.modules[name], "on_device", None) for name in sorted(found.modules))
    return [speak(queue, dtype) for speak in speakers if speak is not None]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions inside it, such as its backward."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _named(code: types.CodeType, names: dict[str, Any]) -> list[Any]:
    """What the names in a code stand for; of a module, what is taken from it by name."""
    found = [names[name] for name in code.co_names if name in names]
    modules = [x for x in found if isinstance(x, types.ModuleType)]
    taken = [vars(module)[name] for module in modules for name in code.co_names if name in vars(module)]
    return [x for x in found if not isinstance(x, types.ModuleType)] + taken


def _is_kernel_file(x: object) -> bool:
    return isinstance(x, str) and x.endswith(".cl")
