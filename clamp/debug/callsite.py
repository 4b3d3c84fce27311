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
from clamp.bridge.netcl_functions import is_redirecting
from clamp.patching.wrap import netcl_wrapper, owned_wrapper, user_wrapper

_LIBRARIES = bridge.NETCLS_FOLDER, str(Path(str(wrapt.__file__)).parent)
_STANDARD = str(Path(types.__file__).parent)
_OURS = str(Path(__file__).parents[1])
CAST = "cast"  # the op that changes a dtype
_MODULE_CALL = bridge.Module.__call__.__code__
_USERS = 8  # functions of the user's among which a model is looked for


def _calls_of(*wrappers: Any) -> set[CodeType]:
    """The code of what these wrappers make."""
    return {
        constant
        for wrapper in wrappers
        for constant in wrapper.__code__.co_consts
        if isinstance(constant, CodeType) and constant.co_name == "call"
    }


_WRAPPERS = _calls_of(owned_wrapper, netcl_wrapper, user_wrapper)


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

#: What the frames around an op say, read and not yet understood: the variables of the function's wrapper; the modules;
#: the code and the line of the user's.
Trail = tuple[dict[str, Any] | None, tuple[Any, ...], CodeType | None, int]


def here() -> Place:
    """The place of the op that is being computed in this thread."""
    return place_of(trail())


def trail() -> Trail:
    """What has to be read while the op is being computed: of an armed step that is done for each, and nothing else."""
    called: dict[str, Any] | None = None
    users_code: CodeType | None = None
    line = users = 0
    modules: list[Any] = []
    frame: FrameType | None = sys._getframe(2)  # the caller is no user's
    while frame is not None:
        code, caller = frame.f_code, frame.f_back
        kind = _kinds.get(id(code)) or _kind(code)
        if kind == "wrapper":
            called = called or dict(frame.f_locals)
        elif kind != "library":
            is_module = caller is not None and caller.f_code is _MODULE_CALL  # of the same module, looked at next
            if not is_module and kind != "user":
                itself = frame.f_locals.get("self")
                is_module = bridge.is_module(itself)
                if is_module and (not modules or modules[-1] is not itself):
                    modules.append(itself)
            if kind != "method":
                if users_code is None:
                    users_code, line = code, frame.f_lineno
                users += 1
                if not is_module and (modules or users >= _USERS):
                    break  # what called the model
        frame = caller
    return called, tuple(modules), users_code, line


def place_of(seen: Trail) -> Place:
    """What a trail says."""
    called, modules, code, line = seen
    function = policy = ""
    if called is not None and "entry" in called:
        entry, region = called["entry"], called.get("region")
        function = entry.name
        policy = "" if region is None else region.policies.policy_of(entry).value
    elif called is not None:
        function, policy = called["name"], called["policy"].value
    return Place(function, policy, modules, code.co_filename if code else "", line)


def call_here() -> FrameType | None:
    """The innermost call around this point of a function that is wrapped, as the frame of its wrapper; None if there is
    none: the op is the user's own, and no list or registration has it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _WRAPPERS:
        frame = frame.f_back
    return frame


#: what a frame of some code may say, by the code's id: its hash is formed anew each time, of all that is in it
_kinds: dict[int, str] = {}
_codes: list[CodeType] = []  # they live on, and keep their ids


def _kind(code: CodeType) -> str:
    _codes.append(code)
    _kinds[id(code)] = kind = _find_kind(code)
    return kind


def _find_kind(code: CodeType) -> str:
    if code in _WRAPPERS:
        return "wrapper"
    if is_redirecting(code):
        return "library"
    file = code.co_filename
    is_method = code.co_argcount > 0 and code.co_varnames[0] == "self"
    if file.startswith(_LIBRARIES):
        return "method" if is_method else "library"
    is_standard = file.startswith((_STANDARD, "<frozen")) and "site-packages" not in file
    if is_standard or file.startswith(_OURS):
        return "library"
    return "user method" if is_method else "user"
