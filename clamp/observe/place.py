"""Where in a program an op is called: in which function of netcl's, under which policy, in which modules, on which line
of the user's.

Read from Python's stack when somebody observes, so that calls carry nothing of it when nobody does.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import wrapt

from clamp import bridge
from clamp.patching.wrap import netcl_wrapper, owned_wrapper, user_wrapper

_LIBRARIES = bridge.NETCLS_FOLDER, str(Path(str(wrapt.__file__)).parent)
_STANDARD = str(Path(types.__file__).parent)
_OURS = str(Path(__file__).parents[1])
CAST = "cast"  # the op that changes a dtype
_USERS = 8  # functions of the user's among which a model is looked for


def _calls_of(*wrappers: Any) -> set[CodeType]:
    """The code of what these wrappers make."""
    return {
        constant
        for wrapper in wrappers
        for constant in wrapper.__code__.co_consts
        if isinstance(constant, CodeType) and constant.co_name == "call"
    }


_LISTED, _REGISTERED = _calls_of(owned_wrapper, netcl_wrapper), _calls_of(user_wrapper)


class Place(NamedTuple):
    """Where an op is called.

    Attributes:
        function: full name of the function on a list, or the name of a user's registered one; empty if there is none.
        policy: its policy where casts are on, by its value; empty if there is none.
        modules: layers and models around it, the innermost first.
        file, line: the nearest line of the user's; an empty file if there is none.
    """

    function: str = ""
    policy: str = ""
    modules: tuple[Any, ...] = ()
    file: str = ""
    line: int = 0

    def name_of(self, op: str) -> str:
        """What netcl's op of this name, called here, is called: as the lists call its function, ``"matmul_op"``, but
        for a cast that a function makes of its input."""
        return op if op == CAST else self.function.rpartition(".")[2] or op

    @property
    def short_line(self) -> str:
        """``"train.py:31"``."""
        return f"{Path(self.file).name}:{self.line}" if self.file else ""


NOWHERE = Place()


def here() -> Place:
    """The place of the op that is being computed in this thread."""
    function = policy = file = ""
    line = users = 0
    modules: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(id(code)) or _kind(code)
        if kind == "listed" and not function:
            function, policy = _entry_of(frame.f_locals)
        elif kind == "registered" and not function:
            function, policy = frame.f_locals["name"], frame.f_locals["policy"].value
        elif kind != "library":
            itself = frame.f_locals.get("self") if kind.endswith("method") else None
            is_module = bridge.is_module(itself)
            if is_module and (not modules or modules[-1] is not itself):
                modules.append(itself)
            if kind.startswith("user"):
                file, line = (file, line) if file else (code.co_filename, frame.f_lineno)
                users += 1
                if not is_module and (modules or users >= _USERS):
                    break  # what called the model
        frame = frame.f_back
    return Place(function, policy, tuple(modules), file, line)


def call_here() -> FrameType | None:
    """The innermost call around this point of a function that is wrapped, as the frame of its wrapper; None if there is
    none: the op is the user's own, and no list or registration has it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _LISTED and frame.f_code not in _REGISTERED:
        frame = frame.f_back
    return frame


def _entry_of(names: dict[str, Any]) -> tuple[str, str]:
    entry, region = names["entry"], names.get("region")
    return entry.name, "" if region is None else region.policies.policy_of(entry).value


#: what a frame of some code may say, by the code's id: its hash is formed anew each time, of all that is in it
_kinds: dict[int, str] = {}
_codes: list[CodeType] = []  # they live on, and keep their ids


def _kind(code: CodeType) -> str:
    _codes.append(code)
    _kinds[id(code)] = kind = _find_kind(code)
    return kind


def _find_kind(code: CodeType) -> str:
    if code in _LISTED:
        return "listed"
    if code in _REGISTERED:
        return "registered"
    file = code.co_filename
    is_method = code.co_argcount > 0 and code.co_varnames[0] == "self"
    if file.startswith(_LIBRARIES):
        return "method" if is_method else "library"
    is_standard = file.startswith((_STANDARD, "<frozen")) and "site-packages" not in file
    if is_standard or file.startswith(_OURS):
        return "library"
    return "user method" if is_method else "user"
