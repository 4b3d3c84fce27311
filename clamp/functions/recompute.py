"""Activation checkpointing: what is computed again in backward, in place of being kept from the forward.

Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost", 2016. A function is run, and what it
recorded for backward is let go of; its results become one node. In backward it runs once more, in the region of its
forward, with the random numbers of its forward, and its gradients are those of that graph. Parameters and other nodes
that it reads from outside are parents of the node, so that whatever holds for gradients (scales, marks, averages over
ranks) holds for theirs. Of ops that take long for the size of what they give (attention, statistics) the first run's
values are kept, as by a policy of PyTorch's selective activation checkpointing.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.arguments import mapped, tensors_in
from clamp.casting.operands import Operand
from clamp.casting.regions import same_around
from clamp.interrupts import contextmanager, holding, of_threads
from clamp.opencl.host_steps import Drawn
from clamp.params import delivery, graphs
from clamp.params.updates import changed_since, moment
from clamp.params.weight_cache import weight_cache

OP = "checkpoint"
_ROOM = 16  # what a forward keeps for its next run has at most this part of the bytes of all that it computes

#: place among a forward's nodes -> what decides on an op's values, the values, and when they were made
_Kept = dict[int, tuple[Hashable, tuple[Tensor, ...], int]]


@dataclass(frozen=True)
class _Forward:
    """A forward that is under way.

    Attributes:
        nodes: what it has recorded, in order; what else is known of them goes by their places there.
        is_again: whether it has run before, in which run ``unread`` and ``kept`` were found; else it notes ``kept``.
        unread: those that need not be computed.
        kept: what is not to be computed again.
    """

    nodes: list[Node]
    is_again: bool
    unread: frozenset[int]
    kept: _Kept


class _RecomputeState(threading.local):
    draws: tuple[list[Drawn], ...] = ()  # of the forwards that are under way, one in another
    again: Iterator[Drawn] | None = None  # the draws of the forward that is being run again
    run: _Forward | None = None  # the innermost


_thread = of_threads(_RecomputeState())


def drawn(draw: Callable[[], int]) -> Drawn:
    """A random number that every replay draws anew; where a forward is run again, the one that it drew."""
    if _thread.again is None:
        made = Drawn(draw)
    else:
        draw()  # whoever draws after it from the same generator gets what followed in the forward
        made = next(_thread.again, None) or _differs("draws more random numbers")
    for draws in _thread.draws:
        draws.append(made)
    return made


def is_checkpointed() -> bool:
    """Returns whether a forward that is run twice runs here, for the first time or again."""
    return bool(_thread.draws) or _thread.again is not None


def is_recomputing() -> bool:
    """Returns whether a forward is run again here: running statistics have moved already."""
    return _thread.again is not None


def computed(make: Callable[[], Tensor], like: Tensor, shape: Sequence[int], dtype: str) -> Tensor:
    """Returns what an op computes. Where a forward is run again, and nothing there reads it, it is not computed unless
    somebody asks for its memory after all.

    Args:
        make: computes it; it may be called later, and reads what was then.
        like: a tensor on the same queue.
        shape, dtype: of the result.
    """
    return bridge.Late(make, like, shape, dtype) if is_needless() else make()


def is_needless() -> bool:
    """Returns whether a forward is run again here, and nothing in it reads the result of the op that is next."""
    run = _thread.run
    return run is not None and len(run.nodes) in run.unread and _records(run)


def _records(run: _Forward) -> bool:
    tape = bridge.current_tape()
    return bridge.is_grad_enabled() and tape is not None and tape.nodes is run.nodes


def kept(make: Callable[[], tuple[Tensor, ...]], key: Hashable, operands: Sequence[Operand]) -> tuple[Tensor, ...]:
    """Returns what an op computes that takes long for its size. A forward that will be run again keeps it until then,
    as far as there is room, unless somebody writes to it.

    Args:
        make: computes it.
        key: the op, and what else than its operands' values decides on what it computes.
        operands: those of the op.
    """
    run = _thread.run
    if run is None or not _records(run) or not any(isinstance(x.parent, Node) and x.needs_grad for x in operands):
        return make()
    place = len(run.nodes)
    if not run.is_again:
        values = make()
        run.kept[place] = key, values, moment()
        return values
    known, values, made = run.kept.get(place, (None, (), 0))
    if known != key or any(changed_since(x, made) for x in values):
        return make()
    return tuple(bridge.view(x, x.shape) for x in values)


def asked_before(weight: Tensor, kind: Hashable) -> bool:
    """Returns whether what is derived from a weight has been asked for before, so that it pays off to keep it. That a
    forward is run again is no other use: it asks for what its first run has asked for."""
    return weight_cache.known(weight, kind) is not None if is_recomputing() else weight_cache.asked_before(weight, kind)


def checkpointed(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns ``function(*args, **kwargs)``, its computed nodes in nested containers replaced by such that compute it
    again in backward. Under no_grad, and where nothing needs a gradient, what it returns."""
    if not bridge.is_grad_enabled():
        return function(*args, **kwargs)
    return Segment(function, args, kwargs).result


class Segment:
    """A function's run, of which only arguments and results are kept.

    Attributes:
        result: what it returned.
        in_half: whether float16 numbers took part in it.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._call = function, args, kwargs
        self._tape = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tape)), None)
        self._generators = np.random.get_state(), random.getstate()
        self._around = same_around()
        self._draws: list[Drawn] = []
        self._unread, self._kept = frozenset[int](), _Kept()
        self._began = moment()
        with holding(_thread, "draws", (*_thread.draws, self._draws)):
            result, nodes = self._run(is_again=False)
        self._ended = moment()  # the function may have written to what it was given
        self._unread = graphs.unread(nodes)
        self._keep_small(nodes)
        self._ends = _ends(nodes.copy())
        outs = _computed(result, nodes) if self._ends else []
        self.in_half = any(bridge.STORAGE.get(node.value.dtype) == "f16" for node in nodes)
        self._kinds = [_kind(node) for node in outs]
        self._ops = _ops_behind(outs, nodes)
        self._grads: dict[int, Tensor] = {}
        made = {id(out): node for out, node in zip(outs, self._nodes(outs), strict=True)}
        self.result = mapped(result, lambda x: made.get(id(x), x)) if made else result
        if made:
            bridge.cut(nodes, _not_returned)

    def begin(self) -> None:
        """A backward pass begins."""
        self._grads.clear()

    def _run(self, *, is_again: bool) -> tuple[Any, list[Node]]:
        function, args, kwargs = self._call
        with (
            bridge.recorded_apart(self._tape) as nodes,
            holding(_thread, "run", _Forward(nodes, is_again, self._unread, self._kept)),
        ):
            result = function(*args, **kwargs)
        return result, [*nodes, *_made_by_hand(result, nodes, (*args, *kwargs.values()))]

    def _keep_small(self, nodes: Sequence[Node]) -> None:
        """Drops those of the results kept from the first run that there is no room for."""
        computed = [x.value for x in nodes if x.value.dtype in bridge.STORAGE] if self._kept else []
        room = sum(map(bridge.nbytes, computed)) // _ROOM
        for place, (_, values, _) in list(self._kept.items()):
            size = sum(map(bridge.nbytes, values))
            if size > room:
                del self._kept[place]
            else:
                room -= size

    def _nodes(self, outs: Sequence[Node]) -> list[Any]:
        """The nodes that stand for computed ones. Several have one parent, whose gradients are computed together, when
        those of all of them are there."""
        ends = list(self._ends.values())

        def backward(grad: Tensor) -> list[Tensor | None]:
            count = len(self._kinds)
            return self._gradients([grad] if count == 1 else [self._grads.get(index) for index in range(count)])

        run: Any = backward
        run.segment = self  # for the engine, which says when a backward begins
        if len(outs) <= 1:
            return [self._node(out, run, ends) for out in outs]
        value = outs[0].value
        together = self._node(Node(bridge.view(value, value.shape)), run, ends)
        token = bridge.zeros(value.queue, (1,), "float32")

        def noting(index: int) -> Callable[[Tensor], list[Tensor | None]]:
            def note(grad: Tensor) -> list[Tensor | None]:
                self._grads[index] = grad
                return [token]

            return note

        return [self._node(out, noting(index), [together]) for index, out in enumerate(outs)]

    def _node(self, out: Node, backward: Callable[[Tensor], list[Tensor | None]], parents: Sequence[Node]) -> Any:
        return bridge.make_node(out.value, backward, parents, OP, self._tape)

    def _gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the function again, and backward through it: gradients of the nodes that it reads from outside."""
        self._require_unwritten()
        with self._as_it_was():
            result, nodes = self._run(is_again=True)
        outs = _computed(result, nodes)
        ops = _ops_behind(outs, nodes)
        ends = _ends(nodes)
        if [_kind(out) for out in outs] != self._kinds:
            _differs(f"returns {_listed(map(_kind, outs))} in place of {_listed(self._kinds)}")
        if not ends.keys() <= self._ends.keys():
            _differs("reads other tensors that need a gradient")
        if ops != self._ops:
            there, here = next(x for x in zip_longest(self._ops, ops, fillvalue="nothing") if x[0] != x[1])
            _differs(f"computes {here} in place of {there}")
        delivery.narrow_for_others(nodes)
        late = [weakref.ref(node.value) for node in nodes if isinstance(node.value, bridge.Late)]
        run = bridge.gradients_between(outs, list(ends.values()), nodes)
        bridge.cut([x for x in nodes if x.grad_fn is not None and not isinstance(x, bridge.OffTape)], _not_returned)
        del result, nodes, outs
        found = dict(zip(ends, run(grads), strict=True))
        for reference in late:  # what somebody holds is to be of now, whenever it is read
            if (value := reference()) is not None:
                value.buffer  # noqa: B018
        return [found.get(key) for key in self._ends]

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Inside the ``with``, regions and random numbers are those of the forward."""
        generators = np.random.get_state(), random.getstate()
        try:
            np.random.set_state(self._generators[0])
            random.setstate(self._generators[1])
            with self._around(), holding(_thread, "again", iter(self._draws)):
                yield
        finally:
            np.random.set_state(generators[0])
            random.setstate(generators[1])

    def _require_unwritten(self) -> None:
        _, args, kwargs = self._call
        read = [(end.value, self._began) for end in self._ends.values()]
        for value, then in [*read, *((x, self._ended) for x in tensors_in((args, kwargs)))]:
            if changed_since(value, then):
                raise RuntimeError(
                    f"a tensor of shape {tuple(value.shape)} that a checkpointed function reads was written to between "
                    "its forward and backward, so that running it again would give the gradients of another forward: "
                    "run backward before optimizer.step(), and before the tensor of a batch gets the next one, or call "
                    "the function without amp.checkpoint"
                )


def _ops_behind(outs: Iterable[Node], nodes: Sequence[Node]) -> list[str]:
    """Returns the names of the ops through which results pass gradients on, the last first. What a function computes
    besides, a table at its first call or a number to print, may differ from run to run.

    Args:
        nodes: those that were recorded, in order.
    """
    behind, found = set(map(id, outs)), list[str]()
    for node in reversed(nodes):
        if id(node) in behind and bridge.needs_grad(node):
            behind.update(map(id, node.parents))
            found.append(str(node.op_name))
    return found


def _ends(nodes: list[Node]) -> dict[Hashable, Node]:
    """The nodes outside that some were computed from and that need a gradient; of the leaves of one tensor the first.

    Args:
        nodes: those that were recorded; nodes between them that are on no tape are added.
    """
    inside = {id(node) for node in nodes}
    found: dict[Hashable, Node] = {}
    for node in nodes:  # grows as it goes
        for parent in node.parents:
            if id(parent) in inside or not bridge.needs_grad(parent):
                continue
            if isinstance(parent, bridge.OffTape):
                inside.add(id(parent))
                nodes.append(parent)
            else:
                found.setdefault(("leaf", id(parent.value)) if bridge.is_leaf(parent) else id(parent), parent)
    return found


def _made_by_hand(result: Any, nodes: Sequence[Node], args: Sequence[Any]) -> list[Node]:
    """The nodes that were computed from some of a function's, and that no op has recorded: the user has made them.

    Args:
        result: the function's, in nested containers.
        nodes: those that were recorded.
        args: the function's, below which none is.
    """
    inside, given, found = {id(node) for node in nodes}, set(map(id, args)), list[Node]()

    def is_another(node: Any) -> bool:
        is_users = isinstance(node, Node) and not getattr(node, "is_clamps", False)
        return is_users and bool(node.parents) and id(node) not in inside and id(node) not in given

    def look(x: Any) -> Any:
        for node in bridge.in_order(x, is_another) if is_another(x) else ():
            if id(node) not in inside and any(id(parent) in inside for parent in node.parents):
                inside.add(id(node))
                found.append(node)
        return x

    mapped(result, look)
    for node in nodes:
        for parent in node.parents:
            look(parent)
    return found


def _computed(result: Any, nodes: Sequence[Node]) -> list[Node]:
    """The nodes in nested containers that were computed, each once."""
    inside, found = {id(node) for node in nodes}, dict[int, Node]()

    def note(x: Any) -> Any:
        if id(x) in inside:
            found[id(x)] = x
        return x

    mapped(result, note)
    return list(found.values())


def _kind(node: Node) -> tuple[str, tuple[int, ...]]:
    return str(node.value.dtype), tuple(node.value.shape)


def _listed(kinds: Any) -> str:
    return ", ".join(f"{dtype} of shape {shape}" for dtype, shape in kinds) or "nothing"


def _not_returned(grad: Tensor) -> list[Tensor | None]:
    raise RuntimeError(
        f"backward reached a node of shape {tuple(grad.shape)} that a checkpointed function did not return, but stored "
        "elsewhere (in an attribute, a list, an object): its graph has been freed. Return it with the other results, "
        "in a tuple, dict or dataclass."
    )


def _differs(what: str) -> Any:
    raise RuntimeError(
        f"a checkpointed function, run again in backward, {what}: it must compute the same whenever it is called with "
        "the same arguments. Pass whatever changes (a counter, a batch) as an argument."
    )
