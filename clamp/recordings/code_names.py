"""Names in code: attributes that it reads or writes, globals and modules that it reads; of a function, of what it
calls, of methods that it may call. And whose code is the user's, which may change, and whose a library's."""

from __future__ import annotations

import dis
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from importlib.util import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from clamp import bridge

#: Packages whose classes and functions are taken for unchanging. Their objects may be settings: a scheduler of netcl's,
#: a namespace, a queue of Python's.
LIBRARIES = frozenset({"clamp", "netcl", "numpy", "pyopencl", "wrapt", *sys.stdlib_module_names})
_NETCLS = frozenset({"netcl", "clamp"})
_INSTALLED = tuple({sysconfig.get_path(scheme) for scheme in ("purelib", "platlib")} | {site.getusersitepackages()})
#: Modules of libraries whose objects are none: they hold what is decided anew in every replay, or what nobody sets.
_OPAQUE = frozenset({"builtins", "clamp", "netcl.amp", "netcl.optim.amp", "numpy", "pyopencl", "wrapt"})
_OPAQUE |= {"abc", "ctypes", "importlib", "inspect", "logging", "re", "typing"}
_BY_TEXT = frozenset({"globals", "vars", "locals", "eval", "exec"})  # what finds globals by names that are values
_ENVIRONMENT = frozenset({"environ", "getenv"})
_IMPORTS_BY_TEXT = frozenset({"modules", "import_module", "__import__"})


class CodeNames:
    """The names of attributes in functions that were found, and in methods that these name."""

    def __init__(self) -> None:
        self._codes: list[CodeType] = []
        self._methods: dict[str, list[CodeType]] = {}
        self._in_classes: set[int] = set()

    def found(self, function: FunctionType) -> None:
        """A function that the code may call."""
        if id(function) not in self._in_classes:
            self._codes.append(function.__code__)

    def found_class(self, cls: type) -> None:
        """A class, whose methods count if they are named somewhere, or called without a name, as ``build`` is."""
        for name, function in vars(cls).copy().items():
            if isinstance(function, FunctionType):
                self._in_classes.add(id(function))
                unnamed = name in ("forward", "build") or (name.startswith("__") and name != "__init__")
                known = self._codes if unnamed else self._methods.setdefault(name, [])
                known.append(function.__code__)

    def used(self) -> set[str]:
        """The names."""
        names: set[str] = set()
        codes = list(self._codes)
        while codes:
            code = codes.pop()
            for name in (names_in(code).attributes | names_in(code).texts) - names:
                names.add(name)
                codes += self._methods.get(name, ())
        return names


class NamesIn(NamedTuple):
    """Names in code, and in what is defined in it."""

    attributes: frozenset[str]  # that it reads or writes, and what it imports from modules
    texts: frozenset[str]  # in its texts: of ``globals()["factor"]``, ``getattr(x, "factor")``, ``eval("2 * factor")``
    globals: frozenset[str]
    imports: frozenset[tuple[str, int]]  # modules, each with how many packages up its name begins


@lru_cache(maxsize=1024)
def names_in(code: CodeType) -> NamesIn:
    """Returns the names in code and in all that is defined in it; each code is looked at once."""
    attributes, texts, named = set[str](), set[str](), set[str]()
    imports, before = set[tuple[str, int]](), list[Any]((0, 0))
    for x in dis.get_instructions(code):
        if x.opname.endswith(("_ATTR", "LOAD_METHOD", "IMPORT_FROM")):
            attributes.add(str(x.argval))
        elif x.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            named.add(str(x.argval))
        elif x.opname == "IMPORT_NAME":
            imports.add((str(x.argval), before[-2]))
        if x.opname != "EXTENDED_ARG":  # of the 257th name, which would stand where the other two are looked for
            before.append(x.argval)
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    for text in code.co_consts:
        if isinstance(text, str) and len(text) < 200:
            texts.add(text)
            with suppress(SyntaxError, ValueError):
                texts.update(compile(text, "", "exec").co_names)
    own = (attributes, texts, named, imports)
    return NamesIn(*(frozenset(found).union(*parts) for found, *parts in zip(own, *inner, strict=True)))


@lru_cache(maxsize=1024)
def variables_of_environment(code: CodeType) -> frozenset[str] | None:
    """Returns the names of the environment's variables that code reads, by ``os.environ`` or ``os.getenv``; None where
    it computes one, or does anything else with these two."""
    parts = [variables_of_environment(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    if None in parts or _ENVIRONMENT & {*code.co_varnames, *code.co_freevars, *names_in(code).texts}:
        return None
    between = ("EXTENDED_ARG", "PRECALL", "PUSH_NULL")
    steps = [x for x in dis.get_instructions(code) if x.opname not in between]
    for index, step in enumerate(steps):
        if str(step.argval) in _ENVIRONMENT:
            found = _variable_at(step, *steps[index + 1 : index + 5])
            if found is None:
                return None
            parts.append(frozenset({found}))
    return frozenset[str]().union(*filter(None, parts))


def _variable_at(step: dis.Instruction, *after: dis.Instruction) -> str | None:
    """The name that stands behind ``os.environ`` or ``os.getenv`` as a constant, followed by a default at most."""
    is_called = step.argval == "getenv"
    if not is_called and after and after[0].argval in ("get", "pop", "setdefault"):
        is_called, after = True, after[1:]
    if len(after) < 2 or after[0].opname != "LOAD_CONST" or not isinstance(after[0].argval, str):
        return None
    if not is_called:
        is_item = after[1].opname.endswith("_SUBSCR") or after[1].argrepr == "[]"
        return after[0].argval if is_item else None
    count = 1 + after[1].opname.startswith("LOAD_")
    is_end = len(after) > count and after[count].opname == "CALL" and after[count].argval == count
    return after[0].argval if is_end else None


def global_names(code: CodeType, scope: Mapping[str, Any]) -> list[str]:
    """Global names that a function reads, and those defined in it: one that is not there may come, in place of one of
    Python's own. Where it reads them by names that it computes, all of them."""
    names = set(names_in(code).globals)
    return sorted(names | _by_text(code, scope) if (names - set(scope)) & _BY_TEXT else names)


def names_of_module(code: CodeType, own: Mapping[str, Any]) -> list[str]:
    """Names of a module's variables that code may read. Where it reads them by names that it computes, all of them."""
    found = names_in(code)
    names = (found.attributes | found.texts | {"__getattr__"}) & set(own)
    is_computed = "getattr" in found.globals and not any(map(str.isidentifier, found.texts))
    by_text = is_computed or found.globals & _BY_TEXT or "__dict__" in found.attributes
    return sorted(names | _by_text(code, own) if by_text else names)


def _by_text(code: CodeType, scope: Mapping[str, Any]) -> set[str]:
    by_text = names_in(code).texts & set(scope)
    return set(by_text) or {name for name in [*scope] if not name.startswith("__")}


def imported(code: CodeType, scope: Mapping[str, Any]) -> Iterator[ModuleType]:
    """The modules that a function imports when it runs, as far as they have been."""
    names, found = set[str](), names_in(code)
    if (found.attributes | found.globals) & _IMPORTS_BY_TEXT:
        names |= found.texts
    for name, level in found.imports:
        if level and scope.get("__package__"):
            name = resolve_name("." * level + name, scope["__package__"])
        names |= {name, name.partition(".")[0]}
    yield from (module for name in sorted(names) if isinstance(module := sys.modules.get(name), ModuleType))


def is_library(x: Any) -> bool:
    """Returns whether a class or function is none of the user's. What ``exec`` makes may have no module; Python's own
    functions are not written in Python."""
    return is_of_library(str(getattr(x, "__module__", None) or ("" if type(x) is FunctionType else "builtins")))


def has_settings(x: Any) -> bool:
    """Returns whether an object's attributes may decide what a pass computes."""
    module = type(x).__module__
    is_opaque = module in _OPAQUE or module.partition(".")[0] in _OPAQUE
    return not is_opaque or "_unwatched" in bridge.own_attributes(x)


def is_of_library(module: str) -> bool:
    """Returns whether a module is none of the user's, by its full name."""
    package = module.partition(".")[0]
    return package in LIBRARIES or _is_installed_beside(package, len(sys.modules))


@lru_cache(maxsize=256)
def _is_installed_beside(package: str, modules: int) -> bool:
    """Returns whether a package was installed, and has nothing to do with netcl: a progress bar, a logger, a test
    runner.

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
