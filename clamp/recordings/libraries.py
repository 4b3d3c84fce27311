"""Tells code of the user's, which may change from call to call, from a library's."""

from __future__ import annotations

import re
import site
import sys
import sysconfig
from functools import lru_cache
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any

from clamp import bridge

#: Packages whose classes and functions are taken for unchanging. Their objects may be settings: a scheduler of netcl's,
#: a namespace, a queue of Python's.
LIBRARIES = frozenset({"clamp", "netcl", "numpy", "pyopencl", "wrapt", *sys.stdlib_module_names})
_NETCLS = frozenset({"netcl", "clamp"})
_INSTALLED = tuple({sysconfig.get_path(scheme) for scheme in ("purelib", "platlib")} | {site.getusersitepackages()})


def is_library(x: Any) -> bool:
    """Returns whether a class or function is none of the user's."""
    return is_of_library(str(getattr(x, "__module__", None) or "builtins"))


def is_of_library(module: str) -> bool:
    """Returns whether a module is none of the user's, by its full name."""
    package = module.partition(".")[0]
    return package in LIBRARIES or _is_installed_beside(package, len(sys.modules))


@lru_cache(maxsize=256)
def _is_installed_beside(package: str, modules: int) -> bool:
    """Whether a package was installed, and has nothing to do with netcl: a progress bar, a logger, a test runner.

    Through one function of theirs, a walk would come to all that they hold, at each recording and before each replay.

    Args:
        modules: how many have been imported: another may use netcl.
    """
    root = sys.modules.get(package)
    place = str(getattr(root, "__file__", None) or next(iter(getattr(root, "__path__", ())), ""))
    if not place.startswith(_INSTALLED):
        return False
    own = [x for name, x in sys.modules.copy().items() if f"{name}.".startswith(f"{package}.")]
    values = [value for x in own for value in bridge.own_attributes(x).copy().values()]
    if any(_name_of(x).partition(".")[0] in _NETCLS for x in values):
        return False
    try:
        required = metadata.requires(package) or ()
    except metadata.PackageNotFoundError:  # it has another name than what was installed
        return True
    return not _NETCLS & {re.split(r"[^\w.-]", each)[0].partition("-")[0] for each in required}


def _name_of(x: Any) -> str:
    """The module that something is, is defined in, or is an object of a class of."""
    if issubclass(type(x), ModuleType):
        return str(bridge.own_attributes(x).get("__name__"))
    return str(getattr(x if issubclass(type(x), FunctionType | type) else type(x), "__module__", ""))
