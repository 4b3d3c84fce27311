"""A training step run once more, only to be looked at: what it would change is put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

import numpy as np
import pyopencl as cl

from clamp import bridge, debug
from clamp.bridge import Tensor
from clamp.interrupts import contextmanager, undoing
from clamp.ops.arguments import shown
from clamp.ops.loss_scale import scale_lock
from clamp.params import masters
from clamp.params.delivery import is_trained_by_another_thread
from clamp.params.gradient_marks import last_shared, note_shared
from clamp.params.weight_cache import weight_cache
from clamp.scaling.dynamic_scale import settle_late
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.step_guard import StepGuard, steps_withheld


class NothingSeenError(ValueError):
    """A step that was run to be looked at ran no op that can be."""

    def __init__(self) -> None:
        super().__init__(
            "no op of this step was seen: it computes nothing on an OpenCL device, or replays a recording, "
            "which shows none. Pass a function that computes the step; of a pass that netcl has captured or compiled, "
            "call the model itself"
        )


def check_step(step: Any, call: str, does: str = "does what one step of the loop does") -> None:
    """Raises TypeError where what is to be run as a step is none.

    Args:
        call: what it was given to, ``"handle.explain"``, for the message.
        does: what it is to do, likewise.
    """
    if not callable(step):
        raise TypeError(
            f"{call} takes a function that {does}, got {shown(step)}: "
            f"pass the function itself, {call}(step), not what it returns, {call}(step())"
        )
    try:
        signature(step.forward if isinstance(step, bridge.Module) else step).bind()
    except TypeError as error:
        raise TypeError(
            f"{call} takes a function that {does}, and calls it without arguments, got {shown(step)}, {error}: "
            f"put all of the step into a function of none, and pass that, {call}(lambda: train_step(x, y)) say"
        ) from None
    except ValueError:
        pass  # a builtin, whose signature is not known


@contextmanager
def same_start(*reached: Any) -> Iterator[None]:
    """At the end of the ``with``, random generators and loss scales are what they were: the next run begins alike.

    Args:
        reached: what a step leads to, whose scalers are meant, too.
    """
    settle_late()  # else a pass is repeated in what is put back
    with undoing() as undo:
        undo.callback(weight_cache.clear)
        undo.callback(np.random.set_state, np.random.get_state())
        undo.callback(random.setstate, random.getstate())
        for scaler in bridge.host_scalers_among(reached):
            undo.callback(vars(scaler).update, dict(vars(scaler)))
        for one in bridge.living(LossScale):
            if one.scales:
                undo.callback(_on_device, _set_back, one, one.state_dict(), one.changes)
        yield


@contextmanager
def dry_run(
    step: Any, scale_now: float | None = None, scale: float | None = None,
    instead: Callable[[Any, bool], Any] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Inside the ``with``, optimizers do not step in this thread; at its end gradients, loss scales, what belongs to
    the next step, the statistics of layers (a batch norm's) and random generators are what they were. Other threads may
    go on training.

    What a step writes besides, into files, say, or into parameters by hand, stays.

    Args:
        step: what is going to run: its models, optimizers and scalers are those that it leads to, or the functions do
            that are running (`clamp.bridge.in_reach`).
        scale_now, scale: loss scales that stand at the first have the second inside.
        instead: called in place of each optimizer's step; see `steps_withheld`.
    """
    debug.session.ensure_patched()  # so that ops are seen, and nodes have a backward(), where AMP is off
    reached = list(bridge.in_reach(step))
    with undoing() as undo:
        undo.enter_context(same_start(*reached))
        guards = bridge.living(StepGuard)
        undo.callback(_hear_anew, {guard: guard.heard() for guard in guards})
        in_modules = [x for root in bridge.modules_met(step) for _, x in bridge.module_tensors(root)]
        for tensor in _trained(guards, [*reached, *in_modules]):
            undo.callback(_give_back, tensor, tensor.grad, last_shared(tensor))
        for tensor in {id(x): x for x in in_modules if not bridge.is_weight(x)}.values():  # the statistics of layers
            undo.callback(_on_device, bridge.write_bytes, tensor, bridge.read_bytes(tensor))
        if scale is not None:
            for scaler in bridge.host_scalers_among(reached):
                if scaler.scale == scale_now:
                    bridge.set_host_scale(scaler, scale)
            for one in bridge.living(LossScale):
                if one.scales and one.state_dict()["loss_scale"] == scale_now:
                    one.set_scale(scale)
        with steps_withheld(instead):
            yield


def _trained(guards: list[StepGuard], reached: list[Any]) -> list[Tensor]:
    """All that backward may give a gradient to, and the masters of optimizers that are known."""
    optimizers = [guard.optimizer for guard in guards if guard.optimizer is not None]
    optimizers += bridge.optimizers_among(reached)
    found = [tensor for optimizer in optimizers for tensor in masters.stepped(optimizer)]
    found += [x for x in reached if issubclass(type(x), Tensor) and bridge.is_weight(x)]
    return list({id(x): x for x in found}.values())


# What another thread trains meanwhile is none of the step's: its gradients, passes and overflows stay.


def _hear_anew(heard: Mapping[StepGuard, Mapping[str, Any]]) -> None:
    """The steps to come are told of the passes of before; of none, where an optimizer has met its first pass since."""
    for guard in bridge.living(StepGuard):
        if not _is_another_threads(guard):
            guard.hear_anew(heard.get(guard))
        if guard.late is None:  # its step looks at the gradients itself, but those that may be repeated yet
            guard.token = object()


def _is_another_threads(guard: StepGuard) -> bool:
    optimizer = guard.optimizer
    return optimizer is not None and any(map(is_trained_by_another_thread, masters.stepped(optimizer)))


def _give_back(tensor: Tensor, grad: Tensor | None, shared: Any) -> None:
    if not is_trained_by_another_thread(bridge.model_parameter(tensor)):
        tensor.grad = grad
        note_shared(tensor, shared)


def _set_back(scaler: LossScale, state: Mapping[str, Any], changes: int) -> None:
    with scale_lock:
        guards = [guard for guard in bridge.living(StepGuard) if scaler in guard.pending]
        kept = sum({guard.mask for guard in guards if _is_another_threads(guard)})
        overflow = state["overflow"] & ~kept | scaler.read().overflow & kept
        scaler.load_state_dict({**state, "overflow": overflow})
        scaler.changes = changes  # for a user, nothing has: another thread's pass is repeated, if it has overflowed


def _on_device(write: Callable[..., object], *args: Any) -> None:
    """Puts something back; where the driver refuses it, it is tried once more."""
    try:
        write(*args)
    except cl.Error:
        write(*args)
