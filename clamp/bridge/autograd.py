"""Nodes, tapes and the graphs that they are of."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

from netcl.autograd import engine
from netcl.autograd import no_grad as no_grad
from netcl.autograd.engine import Node as Node
from netcl.autograd.engine import Tape as Tape
from netcl.autograd.graph import CompiledGraph as CompiledGraph

from clamp.bridge.netcl_functions import is_redirecting, own_copy
from clamp.bridge.tensors import Tensor, has_frozen_mark, is_trained, without_dicts
from clamp.interrupts import contextmanager, holding, undoing

TensorLike: TypeAlias = Node | Tensor

_engine = own_copy(Tape.backward)  # that no patch meets
current_tape = engine.get_current_tape


def is_leaf(x: TensorLike) -> bool:
    """Returns whether x was not computed by a recorded op: a bare tensor, a parameter's node, an input's node."""
    return not isinstance(x, Node) or (x.grad_fn is None and not x.parents)


def needs_grad(x: TensorLike) -> bool:
    """Returns whether backward must deliver a gradient to x: a computed node, or a leaf that requires one."""
    if not isinstance(x, Node):
        return is_trained(x)
    return x.grad_fn is not None or x.requires_grad or (isinstance(x.value, Tensor) and is_trained(x.value))


without_dicts(Node, "is_clamps", "place_on_tape", "children", "last_pass", "is_lost")


class _WithBackward(Node):  # type: ignore[misc]
    """A node with PyTorch's ``backward``, which netcl's have only while patches are installed."""

    def backward(self, grad: Tensor | None = None, *_: Any, **__: Any) -> None:
        """Runs backward from this node."""
        Tape().backward(self, grad)


class OffTape(Node):  # type: ignore[misc]
    """A node between others that no tape records, because it may be of several iterations."""

    is_clamps = True


class Comparison(Node):  # type: ignore[misc]
    """A node that a comparison made, of which ``if loss < best:`` asks for a truth that no single element has.

    Raises:
        TypeError: by ``bool``: any other object is true.
    """

    def __bool__(self) -> bool:
        raise TypeError(
            "a comparison of nodes is a node, of 1 and 0 for its elements, and neither true nor false: compare "
            "numbers, loss.value.to_host()[0] < best say"
        )


def with_backward(x: Any) -> Any:
    """x; a node of netcl's without a ``backward`` has one then, for scripts that call it with AMP off as well."""
    if type(x) is Node and not hasattr(x, "backward"):
        x.__class__ = _WithBackward
    return x


def is_cut(node: Node) -> bool:
    """Returns whether a node was computed by a recorded op whose tape is gone: netcl cuts a tape's graph when it dies.

    One that was computed from nothing that is trained looks alike, unless its ``requires_grad`` tells.
    """
    return is_leaf(node) and node.op_name is not None


def is_patched() -> bool:
    """Returns whether clamp stands over netcl's backward."""
    return is_redirecting(Tape.backward.__code__)


#: Whether ops are recorded in a thread, or a task, and how often such modes had ended when it said so. Where it has
#: not, or they have ended since, netcl's mode, that of the process, holds.
_grad_mode: ContextVar[tuple[bool, int]] = ContextVar("grad_mode", default=(True, -1))
_ended = 0


def is_grad_enabled() -> bool:
    """Returns whether ops are recorded for backward here."""
    on, then = _grad_mode.get()
    return on if then == _ended else bool(engine._GRAD_MODE)


def set_thread_grad_enabled(mode: bool) -> None:
    """Sets whether ops are recorded in this thread, or task, and in no other."""
    if mode:  # the end of a no_grad() that was entered before AMP: nobody else turns netcl's mode off
        engine._GRAD_MODE = True
    _grad_mode.set((bool(mode), _ended))


def end_thread_grad_modes() -> None:
    """Lets netcl's own mode hold in every thread; it is this thread's from now on."""
    global _ended
    engine._GRAD_MODE = is_grad_enabled()
    _ended += 1


def make_node(
    value: Tensor,
    backward: Callable[[Tensor], list[Tensor | None]],
    parents: Sequence[TensorLike],
    op_name: str,
    tape: Tape | None = None,
) -> TensorLike:
    """Records a computed value, as netcl's ``apply_op`` would.

    ``backward`` takes the gradient of value and returns one gradient (or None) for each of ``parents``.
    Where nothing needs a gradient the node is a plain leaf, so no backward runs for input batches. Without
    grad mode, or when every parent is a bare tensor, the value itself is returned, as netcl does.
    """
    nodes = [parent for parent in parents if isinstance(parent, Node)]
    if not nodes or not is_grad_enabled():
        return value
    if len(nodes) != len(parents):
        backward = _only_for_nodes(backward, [isinstance(parent, Node) for parent in parents])
    if not any(map(needs_grad, nodes)):
        return Node(value=value, op_name=op_name)
    node = Node(value=value, grad_fn=backward, parents=nodes, requires_grad=True, op_name=op_name)
    node.is_clamps = True
    if engine._detect_anomaly:
        node.creation_trace = traceback.format_stack()
    tape = tape or current_tape()
    if tape is not None:
        node.place_on_tape = len(tape.nodes)
        tape.record(node)
    note_child(node)
    return node


def note_child(node: Node) -> None:
    """Lets the computed nodes that a new one was computed from know of it, as long as it lives."""
    child = weakref.ref(node)
    for parent in node.parents:
        if parent.parents:
            if not hasattr(parent, "children"):
                parent.children = []
            parent.children.append(child)


def children(nodes: Iterable[Node]) -> list[Node]:
    """The nodes that were computed from these, as ``note_child`` was told, and live."""
    return [child for node in nodes for x in getattr(node, "children", ()) if (child := x()) is not None]


def references(node: Node, tape: Tape | None) -> int:
    """Returns how many references to a computed node its graph holds: those of the nodes computed from it, of the
    operands that their ``grad_fn`` names (an attribute), and of a tape."""
    count, counted = 0, list[int]()
    for child in children([node]):
        if id(child) in counted:  # it was computed from this one twice
            continue
        counted.append(id(child))
        for parent in child.parents:
            count += parent is node
        for operand in getattr(child.grad_fn, "operands", ()):
            if operand.parent is node and id(operand) not in counted:  # several may share one
                counted.append(id(operand))
                count += 1
    place = getattr(node, "place_on_tape", None)
    if tape is not None and place is not None and place < len(tape.nodes):
        count += tape.nodes[place] is node
    return count


def detects_anomalies() -> bool:
    """Returns whether netcl's engine raises where a gradient is inf or NaN."""
    return bool(engine._detect_anomaly)


def without_anomaly_checks(call: Callable[[], Any]) -> Any:
    """Makes a call, in which netcl's engine looks for no inf and NaN, as it did before, and returns what it does."""
    try:
        engine._detect_anomaly = False  # of all threads, of which another may be here as well
        return call()
    finally:
        engine._detect_anomaly = True


@contextmanager
def on_tape(tape: Tape | None) -> Iterator[None]:
    """Inside the ``with``, nodes go to this tape; None: to none, and what is computed lives as long as it is held."""
    around = current_tape()
    try:
        engine.set_current_tape(tape)
        yield
    finally:
        engine.set_current_tape(around)


@contextmanager
def recorded_apart(tape: Tape | None = None) -> Iterator[list[Node]]:
    """Inside the ``with``, computed nodes are recorded, and go into a list in place of the tape around, or of one that
    ops are given."""
    around, apart = current_tape(), Tape()
    recorded = apart.nodes
    with undoing() as undo:
        undo.callback(setattr, apart, "nodes", [])  # a tape that dies cuts its nodes
        undo.callback(engine.set_current_tape, around)
        undo.callback(engine.set_grad_enabled, engine.is_grad_enabled())
        for each in {id(x): x for x in (around, tape) if x is not None}.values():
            undo.enter_context(holding(each, "nodes", recorded))
        engine.set_current_tape(apart)
        engine.set_grad_enabled(True)
        yield recorded


def cut(nodes: Iterable[Node], backward: Callable[[Tensor], list[Tensor | None]]) -> None:
    """Lets go of what computed nodes keep for backward.

    Args:
        backward: called with the gradient of a node that a backward comes to all the same.
    """
    for node in nodes:
        node.grad_fn, node.parents = backward, []


def gradients_between(
    outs: Sequence[Node], ends: Sequence[Node], nodes: Sequence[Node]
) -> Callable[[Sequence[Tensor | None]], list[Any]]:
    """Returns what finds the gradients of some nodes of a graph, once, by those, not all None, of others that were
    computed from them. Nothing else changes. It holds none of the nodes, and lets go of what they keep for backward as
    it uses it: of their values, unless somebody else holds them, those stay that are still to be read.

    Args:
        outs: computed nodes.
        ends: what is below these is not looked at.
        nodes: all that were computed between.
    """
    stands: dict[tuple[bool, int], Node] = {}  # for nodes, without their values; one for all leaves of a tensor

    def stand_of(node: Node) -> Node:
        if isinstance(node, OffTape):  # others know it, too
            return node
        key = (True, id(node.value)) if is_leaf(node) else (False, id(node))
        return stands.setdefault(key, Node(_NoValue(node), op_name=node.op_name))

    off_tape = [
        (node, node.parents, [stand_of(parent) for parent in node.parents])
        for node in nodes
        if isinstance(node, OffTape)
    ]
    for node in nodes:
        if node.grad_fn is not None and not isinstance(node, OffTape):
            stand_of(node).grad_fn = _once(node.grad_fn)
            stand_of(node).parents = [stand_of(parent) for parent in node.parents]
    between, wanted = [stand_of(out) for out in outs], [stand_of(end) for end in ends]
    value = _NoValue(outs[0])

    def run(grads: Sequence[Tensor | None]) -> list[Any]:
        root = Node(value, lambda _: list(grads), between)
        try:
            for node, _, parents in off_tape:
                node.parents = parents
            _engine(Tape(retain_grads=False), root, next(grad for grad in grads if grad is not None))
        finally:
            for node, parents, _ in off_tape:
                node.parents = parents
        return [end.grad for end in wanted]

    return run


class _NoValue:
    """Stand-in for a node's value with what the engine reads of it."""

    def __init__(self, node: Node) -> None:
        self.queue, self.grad = node.value.queue, None
        self._frozen = has_frozen_mark(node) or has_frozen_mark(node.value)


def _once(backward: Callable[[Tensor], list[Tensor | None]]) -> Callable[[Tensor], list[Tensor | None]]:
    left = [backward]
    return lambda grad: left.pop()(grad)


def _only_for_nodes(
    backward: Callable[[Tensor], list[Tensor | None]], is_node: list[bool]
) -> Callable[[Tensor], list[Tensor | None]]:
    """netcl pairs gradients with parent nodes; bare tensors among the inputs have no place in that list."""

    def node_gradients(grad: Tensor) -> list[Tensor | None]:
        return [g for g, keep in zip(backward(grad), is_node, strict=True) if keep]

    vars(node_gradients).update(getattr(backward, "__dict__", {}))
    return node_gradients


def graph(root: Node) -> list[Node]:
    """Every node below root, root included, in no particular order."""
    found = [root]
    seen = {id(root)}
    for node in found:  # which grows
        for parent in node.parents:
            if id(parent) not in seen:
                seen.add(id(parent))
                found.append(parent)
    return found


def in_order(root: Node, goes_on: Callable[[Node], bool] = lambda _: True) -> list[Node]:
    """Every node below root, root included and last: each after those that it was computed from.

    Args:
        goes_on: returns whether what is below a node is looked at.
    """
    found: list[Node] = []
    seen = {id(root)}
    stack: list[tuple[Node, Iterator[Node]]] = [(root, iter(root.parents))]
    while stack:
        node, parents = stack[-1]
        parent = next((parent for parent in parents if id(parent) not in seen), None)
        if parent is None:
            found.append(node)
            stack.pop()
        else:
            seen.add(id(parent))
            stack.append((parent, iter(parent.parents if goes_on(parent) else ())))
    return found


def merge_leaves(leaves: Sequence[Node], nodes: Iterable[Node]) -> dict[int, Node]:
    """One node for each tensor among the leaves of a graph: the first.

    The engine adds up gradients by node, and prefers what it finds on a node to what is on its tensor: of two nodes of
    one parameter, each visited in turn, one would lose what came to the other.

    Args:
        leaves: the nodes without parents; those that have a backward all the same (``cut``) stay.
        nodes: all nodes with parents; those that have one of several leaves get the first in its place.

    Returns:
        For the ids of the leaves that were replaced, what stands for them.
    """
    first: dict[int, Node] = {}
    replaced = {
        id(leaf): kept
        for leaf in leaves
        if leaf.grad_fn is None
        and not has_frozen_mark(leaf)
        and (kept := first.setdefault(id(leaf.value), leaf)) is not leaf
    }
    if replaced:
        for node in nodes:
            if any(id(parent) in replaced for parent in node.parents):
                node.parents = [replaced.get(id(parent), parent) for parent in node.parents]
    return replaced
