"""A training step run once more, only to be looked at: what it would change is put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from clamp import bridge
from clamp.bridge import Tensor
from clamp.params import masters
from clamp.params.weight_cache import weights
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.step_guard import StepGuard, steps_withheld


@contextmanager
def rehearsal(scale_now: float | None = None, scale: float | None = None) -> Iterator[None]:
    """Inside the ``with``, optimizers do not step in this thread; at its end gradients, loss scales, what belongs to
    the next step, the statistics of layers (a batch norm's) and random generators are what they were.

    What a step writes besides, into files, say, or into parameters by hand, stays.

    Args:
        scale_now, scale: loss scales that stand at the first have the second inside.
    """
    with ExitStack() as undo:
        undo.callback(weights.clear)
        undo.callback(np.random.set_state, np.random.get_state())
        undo.callback(random.setstate, random.getstate())
        guards = bridge.living(StepGuard)
        for guard in guards:
            undo.callback(guard.put_back, guard.pending)
        for tensor in _trained(guards):
            undo.callback(_set_gradient, tensor, tensor.grad)
        for tensor in _statistics():
            undo.callback(bridge.write_bytes, tensor, bridge.read_bytes(tensor))
        for scaler in bridge.host_scalers():
            undo.callback(vars(scaler).update, dict(vars(scaler)))
            if scale is not None and scaler.scale == scale_now:
                bridge.set_host_scale(scaler, scale)
        for one in bridge.living(LossScale):
            if one.scales:
                before = one.state_dict()
                undo.callback(one.load_state_dict, before)
                if scale is not None and before["loss_scale"] == scale_now:
                    one.set_scale(scale)
        with steps_withheld():
            yield


def _trained(guards: list[StepGuard]) -> list[Tensor]:
    """All parameters, of optimizers too that nobody has met yet, and masters."""
    optimizers = [guard.optimizer for guard in guards if guard.optimizer is not None]
    stepped = (tensor for optimizer in optimizers for pair in masters.pairs(optimizer) for tensor in pair)
    return list({id(tensor): tensor for tensor in (*bridge.living(bridge.Parameter), *stepped)}.values())


def _statistics() -> list[Tensor]:
    """The tensors of all layers that are not trained."""
    found = (x for root in bridge.living(bridge.Module) for _, x in bridge.module_tensors(root))
    return list({id(x): x for x in found if not bridge.is_weight(x)}.values())


def _set_gradient(tensor: Tensor, grad: Tensor | None) -> None:
    tensor.grad = grad
