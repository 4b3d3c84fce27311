"""Graphs that backward has run through, let go of by the step that uses their gradients.

netcl keeps a graph, and with it all activations, as long as somebody holds one of its nodes: a loop that has last
step's loss or prediction at hand when it runs the next forward holds two steps. Here a pass is over when optimizers
have stepped each parameter of theirs that it gave a gradient to; what nobody needs of its graph goes then, and the
values of nodes that are held stay. A program needs a graph for longer where

- backward was told so: ``retain_graph=True``;
- another backward has run through it since, whose gradients no step has used: a second one, a GAN's;
- something that is still there was computed from it, and no backward has run from that: another optimizer's loss.

Before that, in the forward, values go that no backward reads, as PyTorch never keeps them: a node that only its graph
refers to stays a part of it, without the value.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from sys import getrefcount
from typing import Any

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor
from clamp.interrupts import of_threads
from clamp.opencl import host_steps


class _Backward:
    """A backward that has run: its nodes, as long as they live, and the leaves that have got its gradients and have not
    been stepped since, by id."""

    __slots__ = ("__weakref__", "nodes", "waiting")

    def __init__(self, computed: Iterable[Node], reached: Sequence[Tensor]) -> None:
        self.nodes = [*map(weakref.ref, computed)]
        self.waiting = dict(zip(map(id, reached), reached, strict=True))


_passes: dict[int, weakref.ref[_Backward]] = {}  # a pass lives as long as a node that it was the last to run through
_RETAINED = object()  # in the place of the last pass through a node


def ran(computed: Iterable[Node], reached: Sequence[Tensor], retain_graph: bool) -> None:
    """Notes a backward, the last through its nodes.

    Args:
        computed: the nodes of its graph with parents.
        reached: the leaves that it gave gradients to.
        retain_graph: whether the graph is to stay whoever steps.
    """
    last: Any = _RETAINED
    if not retain_graph:
        last = _Backward(computed, reached)
        key = id(last)
        # of C alone, so that no interrupt is raised, and lost, in it: pop(key, the reference)
        _passes[key] = weakref.ref(last, partial(_passes.pop, key))
    for node in computed:
        node.last_pass = last
    _Backwards.count += 1


def is_over_at_step(computed: Sequence[Node], leaves: Iterable[Any], retain_graph: bool) -> bool:
    """Returns whether a backward that begins is the last through its graph, as far as can be told: the optimizer that
    steps each of its weights is one, nothing else was computed from the graph, and nobody said ``retain_graph``.

    Args:
        computed: the nodes of its graph with parents.
        leaves: values of those without.
    """
    if retain_graph:
        return False
    trained = (x for x in leaves if isinstance(x, Tensor) and bridge.is_weight(x) and not bridge.is_frozen(x))
    steppers = {getattr(leaf, "_stepped_by", None) for leaf in trained}
    if len(steppers) != 1 or None in steppers:
        return False
    inside = {id(node) for node in computed}
    return all(id(child) in inside or hasattr(child, "last_pass") for child in bridge.children(computed))


def stepped(params: Sequence[Tensor], optimizer: Any) -> None:
    """An optimizer has made its step, or skipped it: lets go of what nobody needs any more.

    Args:
        params: the optimizer's.
    """
    for param in params:
        param._stepped_by = id(optimizer)
    if not _passes:
        return
    stepped_ids = {id(x) for param in params for x in (param, bridge.model_parameter(param))}
    for reference in list(_passes.values()):
        over = reference()
        if over is None or stepped_ids.isdisjoint(over.waiting):
            continue
        for key in stepped_ids & over.waiting.keys():
            del over.waiting[key]
        if not any(map(has_optimizer, over.waiting.values())):
            over.waiting.clear()  # a node that is held would hold them
            _passes.pop(id(over), None)  # nor does a later step ask for it
            _free(over)


def has_optimizer(leaf: Tensor) -> bool:
    """Returns whether a leaf is some optimizer's to step: an input that is trained is not, nor what is left out where a
    model is fine-tuned."""
    if bridge.is_frozen(leaf):
        return False
    if bridge.is_linked(leaf) or not isinstance(leaf, bridge.Parameter):
        return bridge.is_linked(leaf)
    if not hasattr(leaf, "_has_optimizer"):  # the user's own leave no link: looked for once
        held = {id(bridge.model_parameter(x)) for each in bridge.optimizers_in_reach() for x in each.params}
        leaf._has_optimizer = id(leaf) in held
    return bool(leaf._has_optimizer)


def _free(over: _Backward) -> None:
    nodes = [node for x in over.nodes if (node := x()) is not None and getattr(node, "last_pass", None) is over]
    needed = {
        id(below)
        for child in bridge.children(nodes)
        if not hasattr(child, "last_pass")
        for below in bridge.graph(child)
    }
    bridge.cut([node for node in nodes if id(node) not in needed], _raise_freed)


def _raise_freed(grad: Tensor) -> list[Tensor | None]:
    raise RuntimeError(
        f"backward reached a node of shape {tuple(grad.shape)} whose graph has been freed: an optimizer has stepped "
        "with the gradients of an earlier backward through it. To run backward through it again after that step, write "
        "loss.backward(retain_graph=True) or tape.backward(loss, retain_graph=True) at the backward before the step; "
        "otherwise compute the loss again, or continue from a value: ag.tensor(node.value)"
    )


# ---------------------------------------------------------------------------------------------- graphs that end early

ENDED = "amp.record"  # the name of a node that stands for what a recorded function computed, without the graph


class _Backwards:
    count = 0  # how many have run


# By id of the node or value: it, and a method, neither of which is kept alive.
_asked: dict[int, tuple[weakref.ref[Node | Tensor], weakref.WeakMethod[Callable[[], None]]]] = {}


def ask_before_backward(x: Node | Tensor, method: Callable[[], None]) -> None:
    """Calls a method, if its object still lives, before a backward runs through a node, or comes to a value."""
    key = id(x)
    _asked[key] = weakref.ref(x, partial(_asked.pop, key)), weakref.WeakMethod(method)


def backward_begins(computed: Iterable[Node], leaves: Iterable[Node], cut: Iterable[Node]) -> None:
    """Tells who has asked for it that a backward is to run through these nodes, and of those without a graph.

    Args:
        computed: nodes with parents.
        leaves: nodes without.
        cut: those of them that an op has computed.

    Raises:
        RuntimeError: one of these stands for what a recorded function computed.
    """
    for x in (*computed, *(leaf.value for leaf in leaves)) if _asked else ():
        if id(x) in _asked and _asked[id(x)][0]() is x and (method := _asked.pop(id(x))[1]()) is not None:
            method()
    for node in cut:
        if node.op_name == ENDED:
            raise RuntimeError(
                f"backward reached the result of a recorded function, of shape {tuple(node.shape)}, which has no "
                "graph: the parameters that it was computed from would get no gradient. Call backward inside the "
                "function, or do not record it (amp.record); to use the result as a constant pass ag.tensor(node.value)"
            )


def is_computed_from_trained(node: Node) -> bool:
    """Returns whether an op has computed a node from something that is trained, on a tape that lives or has died."""
    if not node.parents and node.op_name is None:
        return False
    return any(bridge.needs_grad(x) for x in bridge.graph(node) if not x.parents)


def tape_begins(tape: Tape) -> None:
    """A tape has been made: whether a backward runs while it lives is known from now on."""
    tape.began = _Backwards.count


def tape_ends(tape: Tape) -> None:
    """A tape dies, and cuts the graph of its nodes: which of them is lost, computed from what is trained, is noted.

    Where a backward has run meanwhile, the graph had its use, and what is cut is how a recurrent network's backward is
    truncated.
    """
    if tape.began == _Backwards.count:
        for node in tape.nodes:
            node.is_lost = node.requires_grad


# ---------------------------------------------------------------------------------------------- in the forward

LARGE = 1 << 15  # elements of a value that it is worth to look for who holds it
_FEW = 8  # nodes that are looked at together: the functions that made the first of them have returned
_LAST = 4  # levels of nodes below a loss, which have no large one below them


class _Waiting(threading.local):
    """Nodes with children that are to be looked at, or again, as somebody held them; and how many are too many."""

    def __init__(self) -> None:
        self.nodes: dict[int, weakref.ref[Node]] = {}
        self.most = _FEW


_waiting = of_threads(_Waiting())


def _own_references() -> int:
    """Returns how many references Python counts of its own where a loop counts those to what it is at."""
    (count,) = [getrefcount(x) for x in [object()]]
    return count - 1  # the list's


_OWN = _own_references()


def free_unread_values(made_from: Iterable[Any], watched: bool) -> None:
    """Frees values, of nodes that a new node and others before it were made from, that nothing but the graph can
    reach and no gradient function reads.

    Args:
        made_from: the node's parents; tensors that are no nodes are passed by.
        watched: whether somebody looks at results, some of which are shown in backward only.
    """
    if len(_waiting.nodes) >= _waiting.most:
        _look(bridge.current_tape(), watched)
        _waiting.most = len(_waiting.nodes) + _FEW
    for node in made_from:
        if isinstance(node, Node) and node.parents and prod(node.value.shape) > LARGE:
            _waiting.nodes[id(node)] = weakref.ref(node)


def forward_is_over(loss: Node, tape: Tape, watched: bool) -> None:
    """A backward begins from a node: what its forward has held until now is looked at for the last time.

    Args:
        tape: that it is run by.
    """
    _wait_for_those_above(loss.parents, _LAST)
    if _waiting.nodes:
        _look(tape if tape.nodes else bridge.current_tape() or tape, watched)
        _waiting.nodes.clear()
    _waiting.most = _FEW


def _wait_for_those_above(nodes: Sequence[Node], levels: int) -> None:
    for node in nodes:
        if node.parents:
            if levels > 1:
                _wait_for_those_above(node.parents, levels - 1)
            if prod(node.value.shape) > LARGE:
                _waiting.nodes.setdefault(id(node), weakref.ref(node))


def _look(tape: Tape | None, watched: bool) -> None:
    waiting, _waiting.nodes = _waiting.nodes, {}
    if tape is not None and tape.retain_grads:  # whoever asks for that looks at nodes
        return
    # Those below come first: what shows another's memory keeps that.
    nodes = [node for node in [reference() for reference in waiting.values()] if node is not None]
    while nodes:
        node = nodes.pop()
        value = node.value
        # Whose value others hold, gradient functions before all, would only seem to go.
        if getrefcount(value) - _OWN > 1 or isinstance(value, bridge.Freed):
            continue
        if watched and not all(hasattr(x, "is_observed") for x in (node, *bridge.children([node]))):
            continue
        if getrefcount(node) - _OWN != bridge.references(node, tape) or (
            host_steps.recorder() is None and bridge.memory_is_held(value)  # else the recording's launches hold it
        ):
            _waiting.nodes[id(node)] = weakref.ref(node)
            continue
        node.value = bridge.Freed(value)
        if bridge.base_of(value) is not None:  # who has its memory may have been passed by
            value = None
            nodes += [x for x in node.parents if x.parents and not any(x is other for other in nodes)]


def unread(nodes: Sequence[Node]) -> frozenset[int]:
    """The places of those nodes whose values no gradient function of theirs reads, nor any op that is needed for one:
    a run that is for its gradients alone need not compute them.

    Args:
        nodes: all that a function has computed, in order, before anybody else has got them.
    """
    found, ids = list[int](), set[int]()
    for place in reversed(range(len(nodes))):
        node = nodes[place]
        children, value = bridge.children([node]), node.value
        # A list, not a generator: Python 3.14 counts what it closes over, `value`, in another way.
        views = sum([id(child) in ids and bridge.base_of(child.value) is value for child in children])
        if getrefcount(value) - _OWN - 1 == views and all(id(child) in ids for child in children):
            found.append(place)
            ids.add(id(node))
    return frozenset(found)
