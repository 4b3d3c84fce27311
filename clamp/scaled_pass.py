"""One scaled backward pass: the loss times its scale, backward, the gradients divided by the scale.

Everything that scales a loss is made of these steps (``AmpHandle.scaled``, a graph's ``backward``)::

    check_loss(loss)
    reached = PassGradients(optimizers)
    reached.set_aside()              # gradients of earlier passes come off the parameters
    ... backward of scaled_node(loss, scaler) ...
    reached.unscale(scaler)          # this pass's are divided by the scale, the earlier ones added back
    end_pass(guards, scaler)         # the scale moves; the optimizers know which scale their step depends on
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clamp import bridge, gradients, masters
from clamp.bridge import HALF_DTYPES, Node, Tensor, TensorLike
from clamp.distributed import Ranks
from clamp.functions.casting import Operand, record
from clamp.ops.elementwise import elementwise
from clamp.optimizers import StepGuard
from clamp.scaler import LossScale


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


def scaled_node(loss: TensorLike, scaler: LossScale) -> Any:
    """loss * scale in float32, of a bare tensor as a bare tensor.

    Its gradient stays float32, because 2^16 does not fit into half.
    """
    operand = Operand(loss, loss.value)
    return record(
        scaler.scale_loss(loss.value),
        lambda grad: [scaler.scale_gradient(grad, "float32")],
        (operand,),
        gradients.SCALE_OP,
    )


@dataclass
class _Slot:
    """A parameter: ``master`` is what the optimizer steps, ``model`` what backward gives a gradient to."""

    master: Tensor
    model: Tensor
    earlier: Tensor | None = None


class PassGradients:
    """The gradients that one backward pass delivers to some optimizers' parameters.

    Gradients of earlier passes are set aside before it and added back after it, so that no gradient is ever
    divided by a scale twice.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        slots: dict[int, _Slot] = {}
        for optimizer in optimizers:
            for master, model in masters.pairs(optimizer):
                slots.setdefault(id(master), _Slot(master, model))
        self._slots = list(slots.values())

    def set_aside(self) -> None:
        """Takes the gradients of earlier passes off the parameters."""
        for slot in self._slots:
            if slot.model is not slot.master:
                masters.gather(slot.master, slot.model)
            slot.earlier = slot.master.grad
            slot.master.grad = slot.model.grad = None

    def average(self, ranks: Ranks, scaler: LossScale) -> None:
        """Replaces this pass's gradients, still multiplied by the scale, by their means over the ranks."""
        models = [slot.model for slot in self._slots]
        averages = ranks.average(models, [model.grad for model in models], scaler)
        for model, average in zip(models, averages, strict=True):
            model.grad = average

    def put_back(self) -> None:
        """Gives the parameters the gradients they had before this pass."""
        for slot in self._slots:
            slot.master.grad = slot.earlier
            masters.share_gradient(slot.master, slot.model)

    def delivered(self) -> list[gradients.Held]:
        """Parameters, and masters, with the gradients they have now."""
        return gradients.snapshot(tensor for slot in self._slots for tensor in (slot.master, slot.model))

    def unscale(self, scaler: LossScale) -> None:
        """Divides this pass's gradients by the scale, in fp32, and adds the earlier ones."""
        reached = [slot for slot in self._slots if slot.model.grad is not None]
        # netcl's add hands one gradient to both of its parents: one source, one target.
        sources = {id(slot.model.grad): slot.model.grad for slot in reached}
        targets = {key: _target(grad) for key, grad in sources.items()}
        scaler.unscale_(list(sources.values()), list(targets.values()))
        for grad in targets.values():
            gradients.mark_unscaled(grad)
        for slot in reached:
            slot.master.grad = targets[id(slot.model.grad)]
        for slot in self._slots:
            if slot.earlier is not None:
                now = slot.master.grad
                slot.master.grad = slot.earlier if now is None else elementwise("add", "float32", slot.earlier, now)
            masters.share_gradient(slot.master, slot.model)


def _target(grad: Tensor) -> Tensor:
    return bridge.empty(grad.queue, grad.shape, "float32") if grad.dtype in HALF_DTYPES else grad


def end_pass(guards: Sequence[StepGuard], scaler: LossScale) -> None:
    """Moves the scale, and tells the guards of the optimizers that the pass has reached."""
    fresh = sum(guard.mask for guard in guards if guard.is_fresh(scaler))
    scaler.update(sum(guard.mask for guard in guards), fresh)
    for guard in guards:
        guard.passed(scaler)
