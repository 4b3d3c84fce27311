"""A loss on its way into backward: what can be scaled, the node that scales it, what a backward may start from, and
optimizers that scale losses of their own.

A backward pass runs from a scaled loss, or from one that is not scaled, never from a mixture: no division would be
right for the gradients of a sum of both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import wrapt

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.operands import Operand, bound
from clamp.interrupts import Managed, contextmanager
from clamp.opencl.host_steps import host_step
from clamp.params import delivery, penalties
from clamp.scaling.loss_scale import LossScale

SCALE_OP = "scale_loss"  # name of the node that multiplies a loss by a scale


def check_loss(loss: Any) -> None:
    """A loss that can be scaled is a recorded node of one floating element.

    Raises:
        TypeError, ValueError: it is not; the message says what it is.
    """
    if not isinstance(loss, Node) or not isinstance(loss.value, Tensor):
        hint = (
            " (a bare Tensor: it was computed under no_grad, or from bare Tensors)" if isinstance(loss, Tensor) else ""
        )
        raise TypeError(f"the loss must be an autograd Node, got {type(loss).__name__}{hint}")
    if loss.value.dtype not in bridge.STORAGE:
        raise TypeError(f"the loss must be float32, float16 or bfloat16, got {loss.value.dtype}")
    if loss.value.size != 1:
        raise ValueError(f"the loss must have one element, got shape {tuple(loss.shape)}: sum or average it first")


def require_graph(loss: Node) -> None:
    """Raises RuntimeError where a backward from this node would reach nothing; of a loss made from gradients
    NotImplementedError."""
    if not bridge.is_leaf(loss) or (bridge.needs_grad(loss) and not bridge.is_cut(loss)):
        return
    gone = (
        "the tape that recorded it is gone, and netcl cuts the graph with it. Keep the tape until backward has run "
        "(`with ag.Tape() as tape:`), or compute the loss without one"
    )
    if bridge.needs_grad(loss):
        raise RuntimeError(f"the loss has no graph any more: {gone}")
    penalties.refuse_penalty(penalties.is_made_from_gradient(loss.value))
    raise RuntimeError(
        "the loss has no graph: it depends on nothing that is trained (frozen parameters, data, tensors with "
        "requires_grad=False, what a recorded function returned)" + (f", or {gone}" if bridge.is_cut(loss) else "")
    )


def _require_scale_reaches(loss: Node) -> None:
    """Raises RuntimeError where a part of a loss does not hand a scale on: netcl's own mse_loss, of a call while AMP
    was not there, gives the same gradient whatever comes to it."""
    nodes, seen = [loss], {id(loss)}
    for node in nodes:
        grad_fn = node.grad_fn
        if (getattr(grad_fn, "__module__", ""), getattr(grad_fn, "__qualname__", "")) == _DEAF:
            raise RuntimeError(
                "a loss was scaled that netcl's own mse_loss has computed, while AMP was not on (before amp.init() or "
                "the first GradScaler, or after a shutdown(), of another thread it may be): its backward ignores the "
                "loss scale, by which the gradients would be divided all the same. Compute the loss again, under AMP"
            )
        parts = [x for x in node.parents if x.value.size == 1 and id(x) not in seen]  # a loss is of losses
        seen.update(map(id, parts))
        nodes += parts


_DEAF = ("netcl.autograd.ops", "mse_loss.<locals>.grad_fn")


def scaled_node(loss: TensorLike, scaler: LossScale, on_run: Callable[[], None] = lambda: None) -> Any:
    """loss * scale in float32, of a bare tensor as a bare tensor.

    Its gradient stays float32, because 2^16 does not fit into half.

    Args:
        on_run: called when a backward runs through the node.

    Raises:
        RuntimeError: the loss has lost its graph, or does not hand the scale on.
    """
    if isinstance(loss, Node) and loss.requires_grad:
        require_graph(loss)
        if scaler.scales:
            _require_scale_reaches(loss)

    def gradient(grad: Tensor, dtype: str) -> Tensor:  # noqa: ARG001  (it is float32)
        on_run()
        scale = delivery.running.scale or scaler.applied()
        return scale.multiply(grad, "float32")

    value = scaler.scale_loss(loss.value)
    if value is loss.value:  # not scaled. Two nodes of one tensor would each have the other's gradient, too
        value = bridge.view(value, value.shape)
    made = bound(value, {Operand(loss, loss.value): gradient}, SCALE_OP)
    if isinstance(made, Node):
        made.loss_scale = scaler
    return made


# ---------------------------------------------------------------------------------------------- where backward starts


def is_scaled(node: Node) -> bool:
    """Returns whether a node multiplies a loss by a scale."""
    return node.op_name == SCALE_OP and hasattr(node, "loss_scale")


def scaler_of(root: Node, scaled: Sequence[Node]) -> LossScale | None:
    """The loss scale of a backward from ``root``, None if nothing is scaled.

    Args:
        scaled: the nodes of root's graph that multiply by a scale.

    Raises:
        RuntimeError: the gradients would be of several scales, of a scale twice, or scaled in part.
    """
    if not scaled:
        if any(root is around.refused for around in delivery.waiting()):
            raise RuntimeError(
                "backward was run from the loss itself inside `with handle.scale_loss(loss, optimizer) as "
                "scaled_loss`: run it from what the with gives, scaled_loss.backward() or tape.backward(scaled_loss). "
                "The gradients would be divided by a loss scale that they were not multiplied by"
            )
        return None
    scaler: LossScale = scaled[0].loss_scale
    if scaled[0] is root and len(scaled) == 1:
        return scaler
    if any(node.loss_scale is not scaler for node in scaled):
        raise RuntimeError(
            "this backward runs through losses with different loss scales, so that their summed gradients cannot be "
            "unscaled: run one backward for each, or scale the sum of the losses once"
        )
    above = set[int]()
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if id(node) in above or is_scaled(node):
            continue
        above.add(id(node))
        if not node.parents and bridge.needs_grad(node):
            raise RuntimeError(
                "a part of this loss is multiplied by the loss scale and a part is not, so that its gradients cannot "
                "be unscaled: add the losses up first, and scale their sum"
            )
        stack += node.parents
    inner = {id(node) for node in scaled}
    if any(id(below) in inner for node in scaled for parent in node.parents for below in bridge.graph(parent)):
        raise RuntimeError(
            "this loss is multiplied by a loss scale twice: it was scaled already when it was given to scale() or "
            "scale_loss()"
        )
    return scaler


class ScaledPass(Managed[Node]):
    """The result of ``scale_loss``, for a ``with``."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"what scale_loss returns has no {name!r}: it is for a `with`, whose end divides the gradients. Write "
            "`with handle.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
        )


#: ``contextmanager`` for passes over a scaled loss
as_pass = partial(contextmanager, kind=ScaledPass)


# ---------------------------------------------------------------------------------------------- wrapped optimizers


class OptimWrapper(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """An optimizer with ``scale_loss``; everything else is the optimizer's own.

    ``step`` does nothing if any of the losses since the last step overflowed.

    Args:
        scalers: one for each loss of a step.
        begin: begins a pass: of a loss, an optimizer, after so many since its last step.
    """

    def __init__(
        self, optimizer: Any, scalers: list[LossScale], begin: Callable[[Node, Any, int], AbstractContextManager[Node]]
    ) -> None:
        super().__init__(optimizer)
        self._self_scalers = scalers
        self._self_begin = begin
        self._self_losses = 0

    def __reduce_ex__(self, *given: Any) -> NoReturn:
        raise TypeError(
            "a wrapped optimizer cannot be copied or pickled: its loss scales are the handle's. Copy the optimizer "
            "that was given to handle.wrap_optimizer, and wrap the copy; save its state_dict() and amp.state_dict()"
        )

    __copy__ = __deepcopy__ = __reduce_ex__

    @as_pass
    def scale_loss(self, loss: Node) -> Generator[Node, None, None]:
        """Scales one loss of this step, as ``AmpHandle.scale_loss`` does. One that ends in an error does not count.

        Raises:
            RuntimeError: more losses than ``num_loss`` since the last step, or ``zero_grad``.
        """
        with self._self_begin(loss, self.__wrapped__, self._self_losses) as scaled_loss:
            yield scaled_loss
        host_step(self._self_count)

    def _self_count(self) -> None:
        self._self_losses += 1

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own; the next loss is the first of its step again, wherever this one was given up."""
        host_step(partial(setattr, self, "_self_losses", 0))
        return self.__wrapped__.zero_grad(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, unless a loss overflowed."""
        host_step(partial(setattr, self, "_self_losses", 0))
        return self.__wrapped__.step(*args, **kwargs)

    @property
    def loss_scale(self) -> float:
        """Loss scale of this optimizer's first loss."""
        return self._self_scalers[0].scale if self._self_scalers else 1.0
