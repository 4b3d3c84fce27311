"""netcl's engine under AMP: seeds and sums of 16-bit gradients, backward without casts, a net under ops that nobody
patched."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from netcl import autograd as ag

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor, TensorLike
from clamp.casting.arguments import reporter
from clamp.casting.operands import cast_node
from clamp.casting.regions import around_here, called_in, current_region
from clamp.casting.results import RESULTS
from clamp.functions import recompute
from clamp.interrupts import holding, undoing
from clamp.ops.cast import cast
from clamp.ops.loss_scale import AppliedScale
from clamp.params import delivery, graphs, penalties
from clamp.patching import user_functions
from clamp.patching.patch_registry import meets, replaces
from clamp.patching.wrap import is_half
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.scaled_loss import is_scaled, require_graph, scaler_of
from clamp.scaling.step_report import warn_user

_FLOAT16 = ("float16", "half")


@meets("netcl.autograd.engine.ones_like")
def ones_like(wrapped: Any, instance: None, /, t: Tensor) -> Tensor:
    """The engine's seed gradient, for 16-bit losses as well."""
    if not bridge.is_floating(t):
        return wrapped(t)
    return cast(bridge.ones(t.queue, t.shape), t.dtype)


@meets("netcl.autograd.engine.add_inplace", "netcl.autograd.engine.add_out_of_place")
def add_gradients(wrapped: Any, instance: None, first: Tensor, second: Tensor, /) -> Tensor:
    """The engine's sum of two gradients of one node, in the first one's dtype."""
    return RESULTS.add(wrapped, first, second)


_serials = itertools.count()


@replaces("netcl.autograd.engine._gradient_storage_key")
def gradient_storage_key(own: Any, tensor: Tensor) -> tuple[Any, ...]:
    """Returns the key by which the engine knows a gradient, to see whether it may add to it in place.

    netcl takes the id of the tensor, which a later one of the same pass may have again, so that the same pass adds in
    place or not as Python's memory has it; a recording would be compared with one of other launches.
    """
    if not bridge.on_device(tensor):
        return own(tensor)
    while (base := getattr(tensor, "_base", None)) is not None:
        tensor = base
    if not hasattr(tensor, "_serial"):
        tensor._serial = next(_serials)
    return "cl", tensor._serial


@meets("netcl.autograd.engine.Tape.__init__")
def make_tape(wrapped: Any, instance: Tape, /, retain_grads: bool = False) -> None:
    """A tape whose ``backward`` keeps the gradients of computed nodes only if told so, as that of a node does."""
    wrapped(retain_grads)
    graphs.tape_begins(instance)


@meets("netcl.autograd.engine.Tape.__del__")
def end_tape(wrapped: Any, instance: Tape, /) -> None:
    """The end of a tape, which cuts its graph.

    One that a script still holds at its end dies when Python has cleared modules: these are None then.
    """
    if graphs is not None and hasattr(instance, "began"):  # not made before AMP was
        graphs.tape_ends(instance)
    wrapped()


@replaces("netcl.autograd.engine.Node.grad")
class NotRetained:
    """Gradient of a computed node that backward has not kept: None, with a warning.

    It is no data descriptor: what a node has itself comes first.
    """

    def __init__(self, own: None) -> None:
        self._own = own

    def __get__(self, node: Node | None, owner: type[Node]) -> None:
        if node is not None and sys._getframe(1).f_code.co_name != "__repr__":  # who prints a node looks at none
            warnings.warn(
                "this node's .grad is None: backward keeps the gradients of leaves only, and this node was computed. "
                "To read its gradient, record the forward on a tape that keeps them all, ag.Tape(retain_grads=True)",
                UserWarning,
                stacklevel=2,
            )
        return self._own


@meets("netcl.autograd.engine.Tape.backward")
def tape_backward(
    wrapped: Any, instance: Tape, /, loss: Node, grad: Tensor | None = None, *,
    retain_graph: bool | None = None, create_graph: bool = False,
) -> None:  # fmt: skip
    """Backward with all casts off, from a graph without gradients of an earlier backward.

    The graph is let go when the optimizers of what has got gradients have stepped (params/graphs.py), unless
    ``retain_graph`` is true.

    The engine adds to ``Node.grad`` whatever it finds there: what an earlier backward left in a shared part of
    the graph would be propagated a second time, and a parameter's node that outlives ``zero_grad`` (which clears
    only ``Tensor.grad``) would bring its old gradient back.

    Raises:
        NotImplementedError: the loss was made from a gradient.
        TypeError: the loss is no node, or the gradient no tensor.
        ValueError: the gradient has another shape than the loss.
        RuntimeError: the loss has lost its graph, or a part of it (what a recorded function returned), or the gradients
            would be of several scales. Nothing was changed.
    """
    penalties.refuse_penalty(create_graph)
    _require_node(loss)
    grad = None if grad is None else _seed(loss, grad)
    graphs.forward_is_over(loss, instance, bool(RESULTS.observers))
    computed, leaves, cut, scaled, starts, in_half = [], [], [], [], [loss], False
    recomputed = False
    for node in bridge.graph(loss):  # of every node of every step: short
        node.grad = None
        if node.parents:
            node.value.grad = None
            computed.append(node)
            in_half = in_half or node.value.dtype in _FLOAT16
            if is_scaled(node):
                scaled.append(node)
                starts += node.parents
            elif node.op_name == recompute.OP:
                recomputed = True
                in_half = _begins_in_half(node) or in_half
        else:
            leaves.append(node)
            if node.op_name is not None:
                cut.append(node)
    for start in starts:
        if start.requires_grad and bridge.is_cut(start):
            require_graph(start)
    graphs.backward_begins(computed, leaves, cut)
    _warn_of_dead_tapes([node for node in cut if node is not loss and getattr(node, "is_lost", False)])
    penalties.refuse_penalties_in(loss, computed, leaves)
    scaler = scaler_of(loss, scaled)
    values = list({id(leaf.value): leaf.value for leaf in leaves}.values())
    replaced = bridge.merge_leaves(leaves, computed) if len(values) < len(leaves) else {}
    scale, layerwise = _scale_of(scaler, grad, values)
    run = _let_overflow(partial(RESULTS.backward, wrapped, loss, grad))
    again = partial(tape_backward, wrapped, instance, loss, grad, retain_graph=retain_graph)
    is_last = cache(partial(graphs.is_over_at_step, computed, values, bool(retain_graph)))
    if recomputed:
        is_last()  # asked later, it would meet the nodes of a forward that is run again
    reached = called_in(None, delivery.deliver, run, values, scale, in_half, layerwise, loss, again, is_last)
    for leaf in leaves if replaced else ():
        leaf.grad = leaf.value.grad
    graphs.ran(computed, reached, bool(retain_graph))
    for node in () if instance.retain_grads else computed:
        if node is not loss:
            del node.grad


def _let_overflow(run: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a backward that netcl's ``detect_anomaly`` does not end where another one, at a lower scale, will follow:
    what is inf at the smallest, too, is an anomaly."""
    if bridge.detects_anomalies() and any(x.may_overflow() for x in delivery.waiting()):
        return partial(bridge.without_anomaly_checks, run)
    return run


def _require_node(loss: Any) -> None:
    if not isinstance(loss, Node):
        raise TypeError(
            f"backward runs from the node of a loss, got {type(loss).__name__}: what is computed under no_grad, "
            "or from bare tensors, has no graph. Begin the forward with nodes, ag.tensor(x)"
        )


def _seed(loss: Node, grad: Any) -> Tensor:
    """The gradient that backward begins with, on the loss's queue, in its shape; one element is one element in any.
    That of a float32 loss is float32: in an op's own backward nothing is cast, and what comes to it may be 16-bit."""
    if not isinstance(grad, Tensor):
        raise TypeError(
            f"backward begins with a gradient that is a tensor, got {type(grad).__name__}: pass "
            "Tensor.from_host(queue, array), and of a node its .value"
        )
    shape = tuple(loss.value.shape)
    if tuple(grad.shape) != shape and not grad.size == loss.value.size == 1:
        raise ValueError(f"backward: a gradient of shape {tuple(grad.shape)} for a result of shape {shape}")
    if bridge.on_device(loss.value):
        bridge.require_same_queue("backward", loss.value, grad)
        if grad.dtype in bridge.HALF_DTYPES and loss.value.dtype == "float32":
            grad = cast(grad, "float32")
    return grad if tuple(grad.shape) == shape else bridge.view(grad, shape)


def _scale_of(scaler: LossScale | None, seed: Tensor | None, leaves: list[Any]) -> tuple[AppliedScale | None, bool]:
    """Returns what a backward multiplies by, and whether each layer has a scale of its own besides. What has come to an
    op's own backward that runs this one is scaled already."""
    if scaler is not None:
        return scaler.applied(), scaler.layerwise
    if delivery.goes_on(seed, leaves):
        return delivery.running.scale, delivery.running.layerwise
    return None, False


def _warn_of_dead_tapes(cut: list[Node]) -> None:
    """Says that parts of a loss were computed from what is trained, and have lost their graph."""
    if cut:
        warn_user(
            f"backward reached the result of {cut[0].op_name}, which has no graph any more: the tape that recorded it "
            "is gone, and netcl frees the graph with it. The parameters that it was computed from get no gradient "
            "here. Keep the tape until backward has run, or compute it without one; to use it as a constant pass "
            "ag.tensor(node.value)"
        )


def _begins_in_half(node: Node) -> bool:
    """A backward through a block that is run again begins; returns whether float16 numbers take part in it."""
    segment = getattr(node.grad_fn, "segment", None)
    if segment is None:
        return False
    segment.begin()
    return bool(segment.in_half)


@replaces("netcl.autograd.engine.Node.backward")
def node_backward(
    self: Node, grad: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False
) -> None:
    """Runs backward from this node, as ``Tape().backward(node)`` does; only leaves keep their gradients.

    Args:
        grad: gradient of this node, of its shape; ones if not given.
        retain_graph: whether the graph stays when the optimizers of what gets gradients have stepped. Before their
            steps, backward may run through it as often as wanted in any case.
        create_graph: refused, netcl has no second derivatives.

    Raises:
        NotImplementedError: ``create_graph``, or the loss was made from a gradient.
        TypeError, ValueError: ``grad`` is no tensor, or has another shape.
        RuntimeError: the node has no graph, or its gradients would be of several loss scales.
    """
    penalties.refuse_penalty(create_graph)
    require_graph(self)
    Tape(retain_grads=False).backward(self, grad, retain_graph=retain_graph)


@replaces("netcl.autograd.engine.Node.__array_ufunc__")
@replaces("netcl.core.tensor.Tensor.__array_ufunc__")
def numpy_function(self: TensorLike, function: np.ufunc, method: str, *given: Any, **options: Any) -> Any:
    """numpy's functions of nodes, or of tensors, and numbers, ``np.add(node, node)`` or ``np.float32(2) * node``, are
    their operators. Of an array and a node numpy would make an array of nodes, and of a comparison one of True.

    Raises:
        TypeError: an array stands beside the node, or the tensor; or the function asks whether one is true.
    """
    for x in given:
        if isinstance(x, np.ndarray) and x.ndim and x.dtype != object:
            is_node = isinstance(self, Node)
            instead = "ag.tensor(Tensor.from_host(queue, array))" if is_node else "Tensor.from_host(queue, array)"
            raise TypeError(
                f"numpy.{function.__name__} was given a numpy array where the other is a "
                f"{'node' if is_node else 'tensor'}: pass {instead}"
            )
    if function.__name__ in _BY_TRUTH:
        raise TypeError(
            f"numpy.{function.__name__} would ask whether the whole {'node' if isinstance(self, Node) else 'tensor'} "
            "is true, and not each element: use netcl's own function, ag.maximum or ag.clamp say"
        )
    if function.__name__ in _COMPARING:
        options.setdefault("dtype", object)  # else numpy asks whether the node of the result is true
    return getattr(function, method)(*map(_number_or_object, given), **options)


@replaces("netcl.autograd.engine.Node.__array_function__")
@replaces("netcl.core.tensor.Tensor.__array_function__")
def numpy_routine(self: TensorLike, function: Any, types: Any, given: Any, options: Any) -> Any:
    """numpy's functions of arrays, ``np.mean(node)`` or ``np.clip(node, 0, 1)``, take a node for an array of a single
    object, which is its own mean and its own sum, and which nothing clips.

    Raises:
        TypeError: the function is another one than ``np.shape``, ``np.ndim`` and ``np.size``.
    """
    if function in (np.shape, np.ndim, np.size):  # of a, and of which of its axes
        axis = {name: x for name, x in options.items() if name != "a"}
        return function(np.broadcast_to(0.0, self.shape), *given[1:], **axis)
    name, is_node = function.__name__, isinstance(self, Node)
    own = f"use netcl's own function, ag.{name}, or " if is_node and hasattr(ag, name) else ""
    what, numbers = ("node", "node.value.to_host()") if is_node else ("tensor", "tensor.to_host()")
    raise TypeError(f"numpy.{name} takes arrays, and was given a {what}: {own}read its numbers first, {numbers}")


_COMPARING = frozenset({"greater", "greater_equal", "less", "less_equal"})
_BY_TRUTH = frozenset({"maximum", "minimum", "fmax", "fmin", "clip", "sign"})
_BY_TRUTH |= {"logical_and", "logical_or", "logical_xor", "logical_not"}


def _number_or_object(x: Any) -> Any:
    """Returns an operand for Python's operators in numpy's functions: a number, an array, or a node in an array."""
    if isinstance(x, np.generic | np.ndarray):
        return x
    boxed = np.empty((), object)
    boxed[()] = x
    return boxed


@meets("netcl.autograd.engine.apply_op")
def apply_op(wrapped: Any, instance: None, forward: Any, backward: Any, /, *nodes: Any, **kwargs: Any) -> Any:
    """The net under every recorded op that is neither clamp's nor wrapped: its 16-bit inputs are widened.

    Inside a function that a user declared half, the user's kernels do read 16 bits; there nothing is widened. A
    forward function may name the dtype that it wants its inputs in (clamp/patching/user_functions.py).
    """
    name = kwargs["op_name"] = kwargs.get("op_name") or _name_of(forward)
    dtype = user_functions.input_dtype(forward)
    given = nodes
    if dtype is not None or (not around_here.get().in_op and any(map(is_half, nodes))):
        region = current_region()
        report, use_cache = reporter(region, name), region is None or region.cache_enabled
        cast_one = partial(cast_node, dtype=dtype or "float32", report=report, use_cache=use_cache)
        given = tuple(
            cast_one(x) if is_half(x) or (dtype and bridge.is_floating(getattr(x, "value", None))) else x for x in nodes
        )
    swaps = [(x, wide) for x, wide in zip(nodes, given, strict=True) if x is not wide]
    backward = user_functions.bound(backward, forward, given, name)
    if swaps and backward is not None:
        backward = _reading_widened(backward, swaps)
    return RESULTS.foreign(_known_to_parents(wrapped(forward, backward, *given, **kwargs)), given)


def _known_to_parents(made: Any) -> Any:
    """Returns the result of netcl's ``apply_op``, noted by the nodes that it was computed from.

    A forward that hands its input back (a gradient reversal) would have two nodes share one tensor, and the engine
    takes the gradient that it left there for the other one's.
    """
    if isinstance(made, Node):
        if any(made.value is parent.value for parent in made.parents):
            made.value = bridge.view(made.value, made.value.shape)
        bridge.note_child(made)
    return made


def _name_of(forward: Any) -> str:
    """The function that a forward is defined in, or else its own name; netcl means to find the caller's, and cannot."""
    name = getattr(forward, "__qualname__", type(forward).__qualname__)
    name = name.partition(".<locals>")[0].rpartition(".")[2]
    return "apply_op" if name == "<lambda>" else str(name)


def _reading_widened(
    backward: Callable[[Tensor], list[Tensor | None]], swaps: list[tuple[Any, Any]]
) -> Callable[[Tensor], list[Tensor | None]]:
    """``backward`` with what it closes over, nodes and bare tensors, showing widened values while it runs."""

    def with_swapped_values(grad: Tensor) -> list[Tensor | None]:
        with undoing() as undo:
            for x, wide in swaps:
                is_node = isinstance(x, Node)
                undo.enter_context(holding(x, "value", wide.value) if is_node else bridge.showing(x, wide.value))
            return backward(grad)

    return with_swapped_values


@replaces("netcl.autograd.bf16_ops.upcast_args")
def upcast_args(own: Any, args: tuple[Any, ...], tape: Tape | None, grad_fn: Any) -> Any:
    """netcl's float32 copies of bfloat16 inputs, which it looks for at each of its ops: in less than half the time."""
    for x in args:
        if isinstance(x, Node) and getattr(x.value, "dtype", None) == "bfloat16":
            return own(args, tape, grad_fn)
    return args, grad_fn
