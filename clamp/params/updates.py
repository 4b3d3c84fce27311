"""The steps of netcl's SGD, Momentum, Adam and AdamW, which update all parameters, and the 16-bit copies of those that
are masters, in one launch for 100 of them; and what holds for every optimizer's step: all of it is made or nothing.

The bits are those of netcl's own step, and so is the state, which stays where netcl keeps it: ``state_dict``,
checkpoints, schedulers, and netcl's step after AMP has ended, find what they would find. What is not as these launches
need it (RMSProp, a class derived from netcl's, parameters that share memory) is stepped by netcl, one by one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from itertools import chain, pairwise
from operator import is_
from typing import Any, NamedTuple

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops.arguments import shown
from clamp.ops.optimizer_step import Copy, MultiUpdate, mixed
from clamp.ops.slots import in_turn
from clamp.params import lost_updates, masters
from clamp.params.parts import MasterInParts, buffers_of
from clamp.params.weight_cache import weight_cache
from clamp.params.writes import writes


class _Prepared(NamedTuple):
    """An optimizer's launches, for as long as parameters, state and copies are the same objects.

    Attributes:
        places: what ``_places_of`` the parameters gave.
        key: rule, state and copies.
        written: the parameters' buffers, by their ids.
        held: what else is known by its id.
    """

    launches: MultiUpdate
    places: list[int]
    key: list[Any]
    written: Mapping[int, Any]
    held: Any


_prepared: weakref.WeakKeyDictionary[Any, _Prepared] = weakref.WeakKeyDictionary()


_NOT_IN_ONE_LAUNCH = (
    "{0}.step() cannot be made by clamp's kernel for all parameters, and netcl's own step does not support {1}: "
)
_WHAT_IT_TAKES = (
    "pass the optimizer Python's numbers (float(lr), not numpy.float64), and keep parameters and their float32 "
    "gradients on one queue, each in memory of its own"
)


_DERIVED = "its class is derived from one that clamp supports. Use that class itself"


class OptimizerStep:
    """A step of an optimizer of netcl's; called, it is made, all of it or nothing.

    Args:
        own: netcl's step, ``bridge.is_netcls_step``; None of an optimizer of clamp's own.
        optimizer: whose it is.
    """

    def __init__(self, own: Callable[..., Any] | None, optimizer: Any) -> None:
        self._own, self._optimizer, self._has_rule = own, optimizer, bridge.has_rule(optimizer)
        self._ready: _Ready | None = None

    def prepare(self) -> None:
        """Finds out what there is to do, while the device is at work on the gradients, and nobody knows yet whether the
        step is to be made. It is not counted, and no number of parameters or state changes."""
        if self._has_rule and self._optimizer in _prepared:  # else state is made, which a skipped step does not need
            self._ready = self._found(bridge.stepped(self._optimizer))

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Steps the optimizer, or raises: it was given something, a gradient is none that netcl's step could read, or
        the step is netcl's to make and parameters consist of parts. Nothing was changed then."""
        if given or named:
            raise TypeError(
                f"{type(self._optimizer).__name__}.step() takes no arguments, got "
                f"{', '.join(map(shown, (*given, *named.values())))}: the loss goes to backward"
            )
        params = bridge.stepped(self._optimizer)
        try:
            _whole(self._optimizer, self._pieces(params))
        finally:
            masters.were_rewritten(params)

    def _pieces(self, params: Sequence[Tensor]) -> list[Callable[[], Any]]:
        """Returns calls that step these parameters and rewrite their 16-bit ones; the last one counts the step."""
        ready = self._ready
        if ready is None or not ready.is_for(params):
            ready = self._found(params)
        if ready is None and masters.widen_gradients(params):
            ready = self._found(params)
        if ready is not None:
            return self._launches_of(ready)
        for param in params:
            bridge.require_readable_gradient(self._optimizer, param)
            unknown = "moments of 8 bits" if hasattr(self._optimizer, bridge.MOMENTS_8BIT) else ""
            if isinstance(param, MasterInParts):
                unknown = f"master_weight={param.parts.keeps!r}"
            if unknown:
                why = _twice(self._optimizer) or (_WHAT_IT_TAKES if self._has_rule else _DERIVED)
                raise TypeError(_NOT_IN_ONE_LAUNCH.format(type(self._optimizer).__name__, unknown) + why)
        pieces: list[Callable[[], Any]] = []
        for stepped, piece in bridge.own_pieces(self._own or self._optimizer.step, self._optimizer, params):
            pieces += [piece, *masters.rewriting(stepped, self._optimizer)]
        return pieces

    def _launches_of(self, ready: _Ready) -> list[Callable[[], Any]]:
        optimizer, launches = self._optimizer, ready.launches
        last: list[Callable[[], Any]] = masters.rewriting(lost_updates.expected(ready.params), optimizer)
        if ready.update.counted is not None:
            last.append(partial(setattr, optimizer, "t", ready.update.counted))
        if not launches.has_parts:
            return [*launches.pieces(ready.update.numbers, ready.grads), *last]
        turn = bridge.roundings(optimizer) + 1
        if launches.by_chance:
            last.append(partial(setattr, optimizer, bridge.ROUNDINGS, turn))
        first = [param.split for param in ready.params if type(param) is MasterInParts and param.is_whole]
        return [*first, *launches.pieces(ready.update.numbers, ready.grads, mixed(turn)), *last]

    def _found(self, params: Sequence[Tensor]) -> _Ready | None:
        """Returns the step that is ready for these parameters; None if it is netcl's to make."""
        if not self._has_rule or not params:
            return None
        places, prepared = _places_of(params), _prepared.get(self._optimizer)
        if prepared is not None and prepared.places != places:
            prepared = None
        written = _written(params) if prepared is None else prepared.written
        if written is None or not all(map(partial(_has_gradient, written), params)):
            return None
        update = bridge.next_update(self._optimizer, params)
        if update is None:
            return None
        copies = masters.copies_of(params)
        key = _key_of(update, copies)
        if prepared is None or prepared.key != key:
            launches = MultiUpdate(update.rule, len(update.numbers), params, update.states, copies)
            held = list(params), update.states, copies
            prepared = _prepared[self._optimizer] = _Prepared(launches, places, key, written, held)
        return _Ready(prepared.launches, update, copies, params, [param.grad for param in params])


class _Unfinished(NamedTuple):
    """Remainder of a step of which the first launches were made and one was not."""

    optimizer: weakref.ref[Any]
    grads: Sequence[Any]
    pieces: list[Callable[[], Any]]


_unfinished: dict[int, _Unfinished] = {}  # by id of the optimizer: a user's may have no hash


def moment() -> int:
    """Now, for ``changed_since``."""
    return writes.now


def changed_since(tensor: Tensor, then: int, *, surely: bool = False) -> bool:
    """Returns whether a tensor was written to since a moment, or stepped by an optimizer.

    Args:
        surely: not one of which nothing is known any more.
    """
    if writes.now == then:  # of every op: short
        return False
    is_written = writes.surely_since if surely else writes.since
    base = bridge.base_of(tensor)
    master = bridge.master_of(tensor if base is None else base)
    memory = master.memory if isinstance(master, MasterInParts) else None if master is None else master.buffer
    return any(is_written(buffer, then) for buffer in (tensor.buffer, memory) if buffer is not None)


def make(optimizer: Any, found: Sequence[masters.Pair], run: Callable[[], Any]) -> Any:
    """Makes a step of an optimizer: ``run()``, and what 16-bit parameters need around it.

    A step of netcl's optimizers is made as a whole. If the driver refuses some of its launches, twice, the rest is made
    when the step is called again, or before the next one.

    Args:
        found: what ``masters.gathered`` returned.

    Raises:
        TypeError: as ``masters.require_steppable``.
    """
    for master, _ in found:
        if isinstance(master, MasterInParts):
            masters.require_steppable([optimizer], master.parts.keeps)
    left = _unfinished.get(id(optimizer))
    if left is not None and left.optimizer() is optimizer:
        try:
            masters.stepping(found, partial(in_turn, left.pieces))
        finally:
            masters.were_rewritten([master for master, _ in found])
        del _unfinished[id(optimizer)]
        weight_cache.clear()
        now = _grads_of(optimizer)
        if len(left.grads) == len(now) and all(map(is_, left.grads, now)):
            return None
    stepped = [master for master, _ in found]
    moved = _moved_by(optimizer)
    try:
        result = masters.stepping(found, run)
    except BaseException:
        in_turn(_rewriting(stepped, optimizer))
        raise
    finally:
        weight_cache.clear()
        for param in moved:
            for buffer in buffers_of(param):
                writes.note(buffer)
    _whole(optimizer, _rewriting(stepped, optimizer), has_begun=True)
    return result


def _moved_by(optimizer: Any) -> Sequence[Tensor]:
    """The parameters that a step is to move. An optimizer that nobody knows leaves alone those without a gradient,
    unless it gets its gradients elsewhere."""
    if bridge.has_rule(optimizer) or bridge.is_netcls_step(unwrap(optimizer.step)):
        return bridge.stepped(optimizer)
    params = [param for param in getattr(optimizer, "params", ()) if isinstance(param, Tensor)]
    return [param for param in params if param.grad is not None] or params


def _rewriting(stepped: Sequence[Tensor], optimizer: Any) -> list[Callable[[], None]]:
    try:
        return masters.rewriting([*{id(master): master for master in stepped}.values()], optimizer)
    finally:
        masters.were_rewritten(stepped)


def _whole(optimizer: Any, pieces: list[Callable[[], Any]], *, has_begun: bool = False) -> None:
    """Makes the pieces of a step, all of them or none; some may have been made already."""
    total = len(pieces)
    try:
        in_turn(pieces)
    except BaseException:
        if has_begun or len(pieces) < total:
            _unfinished[id(optimizer)] = _Unfinished(weakref.ref(optimizer), _grads_of(optimizer), pieces)
        raise


def _grads_of(optimizer: Any) -> list[Any]:
    return [param.grad for param in getattr(optimizer, "params", ())]


class _Ready(NamedTuple):
    launches: MultiUpdate
    update: bridge.Update
    copies: Sequence[Copy | None]
    params: Sequence[Tensor]
    grads: Sequence[Any]

    def is_for(self, params: Sequence[Tensor]) -> bool:
        """Returns whether these parameters, with the gradients that they have now, are those of the step, and no copy
        of them is to be written that was not then."""
        grads = [param.grad for param in params]
        same = len(params) == len(self.params) and all(map(is_, (*params, *grads), (*self.params, *self.grads)))
        return same and [*map(bool, masters.copies_of(params))] == [*map(bool, self.copies)]


def _places_of(params: Sequence[Tensor]) -> list[int]:
    return [
        id(x)
        for param in params
        for x in (param, param.parts if type(param) is MasterInParts else param.buffer, param.queue)
    ]


def _key_of(update: bridge.Update, copies: Sequence[Copy | None]) -> list[Any]:
    written = [copy and (id(copy.tensor), id(copy.tensor.buffer), copy.tensor.dtype, copy.keeps) for copy in copies]
    return [update.rule, *map(id, chain.from_iterable(update.states)), *written]


def _written(params: Sequence[Tensor]) -> dict[int, Any] | None:
    """The buffers, by their ids, that launches for all of these parameters write to; None if these do not take them."""
    if not (all(map(bridge.can_update, params)) and all(param.queue is params[0].queue for param in params)):
        return None
    buffers = [buffer for param in params for buffer in buffers_of(param)]
    return {id(buffer): buffer for buffer in buffers} if _are_apart(buffers) else None


def _has_gradient(written: Mapping[int, Any], param: Tensor) -> bool:
    grad: Any = param.grad
    return (
        isinstance(grad, Tensor)
        and grad.dtype == "float32"
        and grad.buffer is not None
        and id(grad.buffer) not in written
        and (grad.shape == param.shape or grad.size == param.size)
    )


def _twice(optimizer: Any) -> str:
    """Words for parameters that an optimizer was given more than once, a tied weight say; nothing if none was."""
    # While a step runs, masters are not linked to the parameters of the model, which have the names.
    named = [param.parts.tensor if type(param) is MasterInParts else param for param in optimizer.params]
    names = bridge.parameter_names(named)
    known: dict[int, tuple[str, list[int]]] = {}
    for place, (param, name) in enumerate(zip(optimizer.params, names, strict=True)):
        known.setdefault(id(param), (name, []))[1].append(place)
    found = [f"{name} (params{places})" for name, places in known.values() if len(places) > 1]
    if not found:
        return ""
    return (
        f"it was given {', '.join(found)} more than once, and would step it as often. Give each parameter once: "
        "list({id(param): param for param in model.parameters()}.values())"
    )


def _are_apart(storages: Sequence[Any]) -> bool:
    """Returns whether no two of these share memory: netcl's step would update it twice, one after the other."""
    spans: dict[int, list[list[int]]] = {}
    try:
        for storage in storages:
            whole, *span = bridge.span_of(storage)
            spans.setdefault(whole, []).append(span)
    except cl.LogicError:  # Intel's runtime does not name the whole any more once its owner has let go of it
        return False
    ordered = [sorted(of_whole) for of_whole in spans.values()]
    return all(end <= begin for of_whole in ordered for (_, end), (begin, _) in pairwise(of_whole))
