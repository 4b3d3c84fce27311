"""Names of netcl's: which modules it has, what a full name means, and word of modules that are imported later."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import netcl
import wrapt


@cache
def netcl_modules() -> tuple[str, ...]:
    """Names of all modules of the installed netcl, loaded or not."""
    folder = Path(netcl.__file__).parent
    paths = (path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py"))
    return tuple(".".join(path.parts).removesuffix(".__init__") for path in paths)


@cache
def module_of(full_name: str) -> str:
    """``package.module`` of ``package.module.function`` or ``package.module.Class.method``."""
    return max((name for name in netcl_modules() if full_name.startswith(f"{name}.")), key=len)


def owner_of(full_name: str) -> tuple[Any, str]:
    """The loaded module or class that has what a full name means, and the last part of the name."""
    module = module_of(full_name)
    # sys.modules: netcl.ops.matmul, the module, is hidden behind netcl.ops.matmul, the function.
    *classes, name = full_name.removeprefix(f"{module}.").split(".")
    owner = sys.modules[module]
    return (wrapt.resolve_path(owner, ".".join(classes))[2] if classes else owner), name


# ---------------------------------------------------------------------------------------------- late imports

_listener: list[Callable[[types.ModuleType], None]] = []  # at most one: the patches that are in place
_hooked: set[str] = set()


def listen(listener: Callable[[types.ModuleType], None] | None) -> None:
    """Names who hears of modules that are imported from now on; None: nobody."""
    _listener[:] = [] if listener is None else [listener]


def when_imported(module: str) -> None:
    """Meets a module when it is imported. wrapt's hooks cannot be taken off, so there is one for each name."""
    if module not in _hooked:
        _hooked.add(module)
        wrapt.register_post_import_hook(_imported, module)


def _imported(module: types.ModuleType) -> None:
    _hooked.discard(module.__name__)  # wrapt drops a hook that it has called
    for listener in _listener:
        listener(module)
