"""Where in a program an op is called: in which function of netcl's, under which policy, in which modules, on which line
of the user's; and which op of another run of the step it is.

Read from Python's stack when somebody observes, so that calls carry nothing of it when nobody does.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os.path import basename
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import wrapt

from clamp import bridge
from clamp.bridge import Tape, TensorLike
from clamp.bridge.netcl_functions import is_redirecting
from clamp.casting.arguments import mapped
from clamp.casting.module_rules import ModuleRule
from clamp.casting.policy_table import default_table
from clamp.casting.regions import Region, casting_in, current_region
from clamp.functions.activations import LAST_SEED
from clamp.patching.wrap import netcl_wrapper, owned_wrapper, user_wrapper

_LIBRARIES = bridge.NETCLS_FOLDER, str(Path(str(wrapt.__file__)).parent)
_STANDARD = str(Path(types.__file__).parent)
_OURS = str(Path(__file__).parents[1])
CAST = "cast"  # the op that changes a dtype
_MODULE_CALL = bridge.Module.__call__.__code__
_USERS = 8  # functions of the user's among which a model is looked for


#: the code of the wrappers that these make
_WRAPPERS = {
    constant
    for make in (owned_wrapper, netcl_wrapper, user_wrapper)
    for constant in make.__code__.co_consts
    if isinstance(constant, CodeType) and constant.co_name == "call"
}


class Place(NamedTuple):
    """Place where an op is called.

    Attributes:
        function: full name of the function on a list, or the name of a user's registered one; empty if there is none.
        policy: its policy where casts are on, by its value; empty if there is none.
        modules: layers and models around it, the innermost first.
        file, line: the nearest line of the user's; an empty file if there is none.
        rule: the rule for modules that decides about it; None if there is none.
    """

    function: str = ""
    policy: str = ""
    modules: tuple[Any, ...] = ()
    file: str = ""
    line: int = 0
    rule: ModuleRule | None = None

    @property
    def decided(self) -> str:
        """The policy, and the rule for modules, in words."""
        return f"{self.policy} ({self.rule})" if self.policy and self.rule else self.policy

    def dtype(self, elsewhere: str) -> str:
        """The AMP dtype here, where it is another one elsewhere."""
        return elsewhere if self.rule is None else self.rule.dtype

    def name_of(self, op: str) -> str:
        """Returns the name of netcl's op called here: as the lists call its function, ``"matmul_op"``, but for a cast
        that a function makes of its input."""
        return op if op == CAST else self.function.rpartition(".")[2] or op

    @property
    def short_line(self) -> str:
        """``"train.py:31"``."""
        return f"{basename(self.file)}:{self.line}" if self.file else ""

    @property
    def at(self) -> str:
        """``" at train.py:31"``; empty if there is no such line."""
        return f" at {self.short_line}" if self.file else ""

    @property
    def source(self) -> str:
        """The text of the line; empty if there is none."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def layer_kind(self) -> str:
        """``" (Linear)"``, the class of the innermost layer around it; empty if there is none."""
        return f" ({type(self.modules[0]).__name__})" if self.modules else ""


NOWHERE = Place()

#: What the frames around an op say, read and not yet understood: the variables of the function's wrapper; the modules;
#: the code and the line of the user's.
Trail = tuple[dict[str, Any] | None, tuple[Any, ...], CodeType | None, int]


def here() -> Place:
    """The place of the op that is being computed in this thread."""
    return place_of(trail())


def trail() -> Trail:
    """Call site of an op, read while it is being computed: of an armed step that is done for each, and nothing else."""
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
                is_module = isinstance(itself, bridge.Module)
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
    """Returns what a trail says."""
    called, modules, code, line = seen
    function = policy = ""
    region = None if called is None else called.get("region")
    if called is not None and "entry" in called:
        entry = called["entry"]
        function = entry.name
        policy = "" if region is None else region.policy_of(entry).value
    elif called is not None:
        function, policy = called["name"], called["policy"].value
    rule = None if region is None else region.rule
    return Place(function, policy, modules, code.co_filename if code else "", line, rule)


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


# ---------------------------------------------------------------------------------------------- the call


_SEED = 2  # where dropout takes its seed


#: Makes the call of a function again, in float32 and behind its wrapper, with what it is given makes of its tensors.
Call = Callable[[Callable[[TensorLike], TensorLike]], Any]


def _again(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], region: Region,
    copy: Callable[[TensorLike], TensorLike],
) -> Any:  # fmt: skip
    with bridge.on_tape(None), casting_in(region):
        return run(mapped(args, copy), mapped(kwargs, copy))


def is_made_again() -> bool:
    """Returns whether the op that is being computed is one of a `Call`, and not of a function inside of that."""
    frame = call_here()
    return frame is not None and frame.f_back is not None and frame.f_back.f_code is _again.__code__


def call_of(names: Mapping[str, Any] | None) -> Call | None:
    """The call that a wrapper's variables are of; None without any, or of one that writes into its arguments."""
    if names is None:
        return None
    entry, args, kwargs = names.get("entry"), names["args"], names["kwargs"]
    if entry is None:
        wrapper = user_wrapper(names["name"], names["policy"])
    elif entry.in_place:
        return None
    else:
        wrapper = (
            owned_wrapper(entry, names["function"]) if "function" in names else netcl_wrapper(entry, names["listed"])
        )
    args = tuple(None if isinstance(x, Tape) else x for x in args)
    kwargs = {name: None if isinstance(x, Tape) else x for name, x in kwargs.items()}
    if entry is not None and entry.function == "dropout" and args[_SEED] is None:
        args = (*args[:_SEED], LAST_SEED.value, *args[_SEED + 1 :])
    region = current_region() or Region(True, "float32", default_table())
    return partial(_again, partial(wrapper, names["wrapped"], names["instance"]), args, kwargs, region.in_float32)


# ---------------------------------------------------------------------------------------------- another run's ops


#: names of nodes that clamp inserts: casts, and the one that gathers the gradients of slices
INSERTED = frozenset({"cast", "slices"})


@dataclass(frozen=True, slots=True)
class OpName:
    """One op of a step; the same op of another run is equal to it.

    Attributes:
        function: netcl's name of it, ``"matmul_op"``; that of its node, where no list has it.
        layer: the innermost layer around it, by class and the order of first calls, ``"Linear 2"``; empty if none is.
        line: the nearest line of the user's, ``"train.py:31"``.
        call: the number of the call, among those alike.
    """

    function: str
    layer: str
    line: str
    call: int


class OpNames:
    """Names the ops of one run, in their order."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Any, str]] = {}  # the layers are held, or another one could get a number
        self._of_class = Counter[str]()
        self._calls = Counter[tuple[str, str, str]]()

    def of(self, made: TensorLike) -> tuple[OpName, Place] | None:
        """The op that has made this just now; None of what clamp has inserted, which other runs need not have."""
        name = getattr(made, "op_name", None) or "op"
        if name in INSERTED:
            return None
        place = here()
        kind = place.function.rpartition(".")[2] or name, self.layer(place.modules), place.short_line
        self._calls[kind] += 1
        return OpName(*kind, self._calls[kind]), place

    def layer(self, modules: tuple[Any, ...]) -> str:
        """The name, in every run, of the first of some modules; empty without any."""
        if not modules:
            return ""
        module = modules[0]
        if id(module) not in self._layers:
            kind = type(module).__name__
            self._of_class[kind] += 1
            self._layers[id(module)] = module, f"{kind} {self._of_class[kind]}"
        return self._layers[id(module)][1]

    def paths(self) -> dict[str, str]:
        """Returns the path of each layer in its model, ``{"Linear 2": "layers.2"}``; its name here, where it is in
        none."""
        modules = [module for module, _ in self._layers.values()]
        found = dict(zip((name for _, name in self._layers.values()), bridge.module_names(modules), strict=True))
        twice = {path for path, count in Counter(found.values()).items() if count > 1}  # in two models
        return {name: f"{path} ({name})" if path in twice and path else path or name for name, path in found.items()}
