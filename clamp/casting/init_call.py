"""The call by which a user turned AMP on, to be told with a change: nothing else of it is to be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class InitCall:
    """A call of ``amp.init``, or of another face's like it.

    Attributes:
        call: as far as its bracket, with what it returns, ``"handle = amp.init"``.
        first: arguments without a name.
        given: the others, by name, where they are not the defaults.
        takes_lists: whether ``custom_black_list`` and ``debug`` are among its arguments.
    """

    call: str = "handle = amp.init"
    first: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    takes_lists: bool = True

    def changed(self, **changes: Any) -> str:
        """The call with other values of these arguments, as code."""
        arguments = (f"{name}={_code(value)}" for name, value in {**self.given, **changes}.items())
        return f"{self.call}({', '.join([*self.first, *arguments])})"

    def in_float32(self, functions: Iterable[str]) -> str:
        """The call with more functions on the black list, as code."""
        functions = list(functions)
        black = [*self.given.get("custom_black_list", ()), *functions]
        white = self.given.get("custom_white_list", ())
        left = {"custom_white_list": [name for name in white if name not in functions]} if white else {}
        return self.changed(**left, custom_black_list=list(dict.fromkeys(black)))

    def explaining(self) -> str:
        """The call with the ops of skipped steps looked at, as code."""
        debug = self.given.get("debug", ())
        return self.changed(debug=("attribution", "summary") if "summary" in debug else "attribution")


def given_to(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a call's arguments, by name, that have a default and are not it."""
    defaults = [
        (name, one.default) for name, one in signature(function).parameters.items() if one.default is not one.empty
    ]
    return {name: arguments[name] for name, default in defaults if arguments[name] != default}


def _code(value: Any) -> str:
    if isinstance(value, str | Path):
        return '"' + repr(str(value))[1:-1] + '"'
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(map(_code, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_code(key)}: {_code(part)}' for key, part in value.items())}}}"
    return f'"{value.__name__}"' if isinstance(value, type) else repr(value)  # numpy's dtypes
