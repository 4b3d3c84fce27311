"""Attributes that code reads or writes by name: of a function, of what it calls, of methods that it may call."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FunctionType


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
        """A class, whose methods count if they are named somewhere, or called without a name."""
        for name, function in vars(cls).items():
            if isinstance(function, FunctionType):
                self._in_classes.add(id(function))
                unnamed = name == "forward" or (name.startswith("__") and name != "__init__")
                known = self._codes if unnamed else self._methods.setdefault(name, [])
                known.append(function.__code__)

    def used(self) -> set[str]:
        """The names."""
        names: set[str] = set()
        codes = list(self._codes)
        while codes:
            for name in _attributes(codes.pop()) - names:
                names.add(name)
                codes += self._methods.get(name, ())
        return names


@lru_cache(maxsize=1024)
def _attributes(code: CodeType) -> frozenset[str]:
    names = {str(x.argval) for x in dis.get_instructions(code) if x.opname.endswith(("_ATTR", "LOAD_METHOD"))}
    inner = (_attributes(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(names.union(*inner))
