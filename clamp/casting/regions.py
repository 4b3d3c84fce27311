"""Regions where AMP is on: the state of the process, of this thread, and of the op that is running.

``init`` sets the region of the process, which knows the user's call. ``autocast`` and ``disable_casts`` set one for the
calling thread alone, of which a task of asyncio is one here, and nest. Inside an op, and during backward, nested calls
do not cast again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

from clamp.casting.module_rules import ModuleRule, ModuleRules
from clamp.casting.policy_table import CastPolicy, Entry, PolicyTable, default_table
from clamp.interrupts import contextmanager, of_tasks, undoing
from clamp.params.weight_cache import weight_cache

LAST_USE = "last_use"
Caching: TypeAlias = bool | str  # whether 16-bit copies of weights are kept: True, False or LAST_USE


def check_caching(name: str, caching: Caching) -> Caching:
    """Checks an argument about the copies of weights, and returns it.

    Raises:
        ValueError: it is a text other than ``"last_use"``.
    """
    if isinstance(caching, str) and caching != LAST_USE:
        raise ValueError(f"{name} must be True, False or {LAST_USE!r}, got {caching!r}")
    return caching


@dataclass(frozen=True)
class InitCall:
    """The call by which a user turned AMP on, to be told with a change: nothing else of it is to be lost.

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
        arguments = (f"{name}={_as_code(value)}" for name, value in {**self.given, **changes}.items())
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


def _as_code(value: Any) -> str:
    if isinstance(value, str | Path):
        return '"' + repr(str(value))[1:-1] + '"'
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(map(_as_code, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_as_code(key)}: {_as_code(part)}' for key, part in value.items())}}}"
    return f'"{value.__name__}"' if isinstance(value, type) else repr(value)  # numpy's dtypes


@dataclass(frozen=True, eq=False)
class Region:
    """Settings of the ops inside a region.

    Attributes:
        enabled: whether ops cast at all.
        dtype: the AMP dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"`` (clamp's kernels, no casting gain).
        policies: which function runs in which precision.
        cache_enabled: whether 16-bit copies of weights are kept; ``LAST_USE``: until backward has read them.
        allow_banned: whether banned functions run in fp32 instead of raising.
        verbose: whether each cast prints a line.
        level: of which level the policies are, for people.
        init_call: the user's call that it is of; None of a region that no handle has.
        modules: the rules for modules that hold in it; None without any.
        rule: the one that it is of; None outside of the modules that rules are for.
        is_wide: whether, where the dtype is ``"float32"``, every function is of policy float.
        castings: how each function casts here, by name; filled as functions are called.
    """

    enabled: bool
    dtype: str
    policies: PolicyTable
    cache_enabled: Caching = True
    allow_banned: bool = False
    verbose: bool = False
    level: str = "O1"
    init_call: InitCall | None = field(default=None, repr=False)
    modules: ModuleRules | None = None
    rule: ModuleRule | None = None
    is_wide: bool = False
    castings: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _ruled: dict[ModuleRule, Region] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def in_float32(self) -> Region:
        """This region with every function in float32, on clamp's kernels still."""
        return replace(self, dtype="float32", allow_banned=True)

    @property
    def dtypes(self) -> frozenset[str]:
        """The AMP dtypes here and in the modules that rules are for."""
        return frozenset([self.dtype, *(rule.dtype for rule in (self.modules.rules if self.modules else ()))])

    def policy_of(self, entry: Entry) -> CastPolicy:
        """The policy of a listed function here."""
        policy = self.policies.entry_like(entry).policy
        is_float = self.is_wide and self.dtype == "float32" and policy is not CastPolicy.NONE
        return CastPolicy.FLOAT if is_float else policy

    def inside(self, module: Any) -> Region:
        """The region of the ops in a module that is called here: its rule's, if that is another one's than around. So
        what a thread enters inside of a rule's modules holds in all of them."""
        rule = None if self.modules is None else self.modules.rule_of(module)
        return self if rule is None or rule is self.rule else self.under(rule)

    def under(self, rule: ModuleRule) -> Region:
        """This region as a rule changes it."""
        if rule not in self._ruled:
            self._ruled[rule] = replace(self, dtype=rule.dtype, rule=rule, is_wide=rule.dtype == "float32")
        return self._ruled[rule]


class Around:
    """Surroundings of a point of a thread: never changed, but replaced as a whole by another.

    Attributes:
        region: set by a region of this thread; None: the process's region holds.
        in_op: whether the point is inside an op or a backward pass.
        casts_off: whether it is, or the thread's own region is one without casts.
        outer: what was around before, and will be again; None outside of all.
    """

    __slots__ = ("casts_off", "in_op", "outer", "region")

    def __init__(self, region: Region | None, in_op: bool, outer: Around | None) -> None:
        self.region, self.in_op, self.outer = region, in_op, outer
        self.casts_off = in_op or (region is not None and not region.enabled)

    def leave(self) -> None:
        """This is around no more, nor what was entered inside of it; does nothing if that is so already."""
        around = around_here.get()
        while around is not self and around.outer is not None:
            around = around.outer
        if around is self and self.outer is not None:
            around_here.set(self.outer)


around_here = of_tasks("around_here", Around(None, False, None))
_process: Region | None = None
_process_as_set: Region | None = None
_change: Callable[[Region], Region] | None = None  # what becomes of every region, for now


def set_process_region(region: Region | None) -> None:
    """Sets (or with None removes) the region that holds in every thread outside a thread's own regions."""
    global _process, _process_as_set
    _process_as_set, _process = region, _changed(region)


def process_region() -> Region | None:
    """The region that ``init`` set; None without one."""
    return _process


def init_call() -> InitCall | None:
    """The user's call that turned AMP on in this process; None without one."""
    return None if _process is None else _process.init_call


def current_region() -> Region | None:
    """The region around this point, enabled or not; None where there is none."""
    return around_here.get().region or _process


def casting_region() -> Region | None:
    """The region whose casts apply to an op called here; None where ops do not cast."""
    around = around_here.get()
    if around.in_op:
        return None
    region = around.region or _process
    return region if region is not None and region.enabled else None


def thread_region() -> Region | None:
    """The innermost region of this thread around this point; None where there is none."""
    return around_here.get().region


def called_in(region: Region | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function, inside which ops cast as in ``region``, within an op and in backward too; with None they run in
    the dtypes that they are given. Returns what it returns."""
    outer = around_here.get()
    try:
        try:
            around_here.set(Around(_changed(region) or outer.region, region is None, outer))
            return function(*args, **kwargs)
        finally:
            around_here.set(outer)
    finally:  # once more: an interrupt may be raised right before the line above
        around_here.set(outer)


def same_around() -> Callable[[], AbstractContextManager[None]]:
    """A ``with`` for later, inside of which ops cast as here."""
    region, in_op = current_region(), around_here.get().in_op
    return lambda: _entered(partial(Around, region, in_op))


def casting_in(region: Region | None) -> AbstractContextManager[None]:
    """Inside the ``with``, ops cast as inside of ``called_in``."""
    return in_region(region, region is None)


def in_region(region: Region | None, in_op: bool | None = None) -> AbstractContextManager[None]:
    """Makes ``region`` hold for this thread inside the ``with``; within an op, ops still do not cast.

    Args:
        region: None: the one around.
        in_op: whether the inside counts as that of an op; as around if not given.
    """

    def inside(outer: Around) -> Around:
        return Around(_changed(region) or outer.region, outer.in_op if in_op is None else in_op, outer)

    return _entered(inside)


@contextmanager
def _entered(inside: Callable[[Around], Around]) -> Iterator[None]:
    """Makes of what is around, at the beginning of the ``with``, what is inside of it."""
    inner = inside(around_here.get())
    try:
        try:
            around_here.set(inner)
            yield
        finally:
            inner.leave()
    finally:  # once more: an interrupt may be raised right before the line above
        inner.leave()


@contextmanager
def changed_regions(change: Callable[[Region], Region]) -> Iterator[None]:
    """Inside the ``with``, every region is what ``change`` makes of it: this thread's and the process's, and those that
    are opened or set meanwhile, in every thread. For runs that are made only to be compared, one at a time.

    Args:
        change: makes of a region that it has changed already an equal one.

    Raises:
        RuntimeError: regions are changed already.
    """
    if _change is not None:
        raise RuntimeError(
            "a function that is being compared or bisected called compare_accuracy or bisect itself: call it outside"
        )
    with undoing() as undo:
        undo.callback(weight_cache.clear)
        undo.callback(_change_by, None)
        _change_by(change)
        with in_region(thread_region()):
            yield


def _change_by(change: Callable[[Region], Region] | None) -> None:
    global _change
    _change = change
    set_process_region(_process_as_set)


def _changed(region: Region | None) -> Region | None:
    return region if region is None or _change is None else _change(region)


def region_here(**changes: Any) -> Region:
    """The region around this point with other settings; one without casts where there is none."""
    around = current_region() or Region(enabled=False, dtype="float16", policies=default_table())
    if all(getattr(around, name) == value for name, value in changes.items()):
        return around
    return replace(around, **changes)


@contextmanager
def in_own_region(region: Region) -> Iterator[None]:
    """As ``in_region``; the end of the outermost region of a thread also empties the weight cache."""
    try:
        with in_region(region):
            yield
    finally:
        if thread_region() is None:
            weight_cache.clear()
