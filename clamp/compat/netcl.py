"""netcl's own face: ``netcl.amp`` as netcl's wiki describes it, while clamp's patches are in; its training on several
queues, ``netcl.distributed``, in which losses are scaled too; and its ``Trainer``, which trains in mixed precision,
whether it was asked for that itself or not.

Methods are wrapped, not classes replaced: scalers made before ``amp.init()`` work too. netcl's scaler keeps its scale
and growth tracker on the host, in attributes that scripts (and netcl's Trainer) read and set; the device's scale
follows them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyopencl as cl

from clamp import bridge, session
from clamp.bridge import Tensor
from clamp.casting.operands import note_numpy_backend
from clamp.casting.regions import casting_region, in_own_region, region_here
from clamp.compat.regions import note_opened, take_opened
from clamp.interrupts import uninterrupted
from clamp.opencl.device import is_float16_supported
from clamp.opencl.host_steps import host_step
from clamp.ops.loss_scale import scale_lock
from clamp.params import gradient_marks, masters
from clamp.patching import collectives
from clamp.patching.collectives import ScaledTape, keep_equal
from clamp.patching.patch_registry import meets
from clamp.scaling.backward_pass import unscale_gradients
from clamp.scaling.loss_scale import LARGEST, SMALLEST, LossScale
from clamp.scaling.passes import PassScaling
from clamp.scaling.scaled_loss import is_scaled, scaled_node
from clamp.scaling.step_guard import StepGuards
from clamp.scaling.step_report import warn_user

# ---------------------------------------------------------------------------------------------- autocast


class _AutocastState(threading.local):
    begins = False  # a Trainer that was not asked for mixed precision has yet to enter its own autocast


_thread = _AutocastState()


@meets("netcl.amp.autocast.__enter__")
def enter(wrapped: Any, instance: Any, /) -> Any:
    """netcl's autocast is a region of this thread, of the dtype around it."""
    queue = instance.device_queue
    enabled = bool(instance.enabled) and (queue is None or is_float16_supported(queue))
    if _asks_for_nothing(instance):
        enabled = region_here().enabled
    region = in_own_region(region_here(enabled=enabled))
    result = wrapped()
    region.__enter__()
    note_opened(instance, region)
    return result


@meets("netcl.amp.autocast.__exit__")
def leave(wrapped: Any, instance: Any, /, *exception: Any) -> Any:
    """Ends the region; one that was entered before clamp was active has none."""
    if (region := take_opened(instance)) is not None:
        region.__exit__(None, None, None)
    return wrapped(*exception)


@meets("netcl.amp.is_autocast_enabled")
def is_autocast_enabled(wrapped: Any, instance: None, /) -> bool:
    """Returns whether ops called here cast; netcl's flag is one for all threads."""
    return casting_region() is not None


@meets("netcl.amp.supports_fp16")
def supports_fp16(wrapped: Any, instance: None, /, queue: Any) -> bool:
    """Returns whether clamp can store halves on the queue's device, which needs no ``cl_khr_fp16``."""
    return is_float16_supported(queue)


# ---------------------------------------------------------------------------------------------- GradScaler


@dataclass
class _Known:
    """The device side of a scaler of netcl's."""

    scaler: weakref.ref[Any]
    scale: LossScale
    last: tuple[float, int]  # netcl's scale when it was last seen, and how often ``scale`` had been set until then
    stuck: tuple[float, int] = 0.0, 0  # the scale at which inf or nan was met last, and how often in a row


_known: dict[int, _Known] = {}  # by id, as scalers compare by value; each goes with its scaler


def _scale_of(scaler: Any, queue: cl.CommandQueue) -> LossScale:
    """The loss scale of a scaler on a queue, set to the scaler's own."""
    value = min(max(float(scaler.scale), SMALLEST), LARGEST)
    bridge.set_host_scale(scaler, value)
    known = _known.get(id(scaler))
    if known is None:
        scale = LossScale(value)
        scale.comes_down = True  # netcl's scaler lowers it
        # All of it in C, which no Ctrl-C ends: the next scaler may have this one's id.
        reference = weakref.ref(scaler, partial(_known.pop, id(scaler)))
        known = _known[id(scaler)] = _Known(reference, scale, (value, scale.changes))
    if known.last != (value, known.scale.changes):  # netcl's is another, or a dry run has put back the one of before
        known.scale.set_scale(value)
        known.last = value, known.scale.changes
    return known.scale.on(queue)


def _note_stuck(scaler: Any, found_inf: bool) -> None:
    """Says so where inf and nan come again and again at a scale that nobody lowers, as ``update`` does not. At the
    smallest nobody can: netcl's Trainer halves it, too, without ``step``."""
    last, count = _known[id(scaler)].stuck
    count = 0 if not found_inf or scaler.scale <= SMALLEST else count + 1 if last == scaler.scale else 1
    _known[id(scaler)].stuck = scaler.scale, count
    if count == StepGuards.max_skips_at_floor:
        warn_user(
            f"unscale_grads() met inf or nan {count} times in a row, at the scale {scaler.scale:g}, which "
            "nothing has lowered: call scaler.step(optimizer, params) for such gradients as well, which skips the step "
            "and lowers the scale. scaler.update() does nothing"
        )


@meets("netcl.amp.GradScaler.scale_loss")
def scale_loss(wrapped: Any, instance: Any, /, loss: Any) -> Any:
    """``loss * scale``, of a node as a node."""
    if not instance.enabled:
        return loss
    if not bridge.on_device(loss.value):
        note_numpy_backend()
        return wrapped(loss)
    return scaled_node(loss, host_step(partial(_scale_of, instance, loss.value.queue)))


@meets("netcl.amp.GradScaler.unscale_grads")
def unscale_grads(wrapped: Any, instance: Any, /, params: Iterable[Tensor]) -> Any:
    """Divides the gradients on the device, each once, and says whether any is inf or nan; one read for each queue.

    Raises:
        ValueError: a 16-bit parameter without fp32 master weights.
        RuntimeError: a gradient is part scaled, part unscaled.
    """
    params = list(params)
    if any(not bridge.on_device(param) for param in params):
        return wrapped(params)
    if not instance.enabled:
        return False
    found = [(bridge.master_of(param) or param, bridge.model_parameter(param)) for param in params]
    with scale_lock, uninterrupted():
        scales, _ = unscale_gradients(found, partial(_scale_of, instance))
        for scale in scales:
            scale.assign(1, fresh=1)
    found_inf = [scale.overflowed(1) for scale in scales]
    if scales:
        _note_stuck(instance, any(found_inf))
    if not any(found_inf):
        gradient_marks.mark_checked(master.grad for master, _ in found if master.grad is not None)
    scaling = session.active_scaling()
    if any(found_inf) and scaling is not None:  # netcl's scaler will let no step be
        guard = scaling.guards.stepping([master for master, _ in found])
        if guard is not None:
            guard.met_non_finite()
    return any(found_inf)


@meets("netcl.amp.GradScaler.step")
def step(wrapped: Any, instance: Any, /, optimizer: Any, params: Any = ()) -> Any:
    """netcl's step, over the parameters given and all that the optimizer steps.

    Gradients that ``unscale_grads`` has divided already are checked and not divided again.
    """
    known = {id(param) for pair in masters.pairs(optimizer) for param in pair}
    more = [param for param in params if id(param) not in known]
    scaling = session.active_scaling()
    if id(instance) in _known:
        _known[id(instance)].stuck = 0.0, 0  # this lowers it, as far as it goes

    def run() -> Any:
        with nullcontext() if scaling is None else scaling.stepped_by(instance, optimizer):
            return wrapped(optimizer, [*optimizer.params, *more])

    with uninterrupted():  # which unscales, steps and moves the scale
        return masters.step_anew(optimizer, run, more)


# ---------------------------------------------------------------------------------------------- replicas


@meets("netcl.distributed.data_parallel.sync_grads")
def sync_grads(wrapped: Any, instance: None, /, param_replicas: Any) -> None:
    """The mean of gradients over replicas, after which an overflow of one counts for all."""
    collectives.sync_grads(wrapped, param_replicas)
    scaling = session.active_scaling()
    if scaling is not None:
        collectives.share_overflows(scaling.guards, param_replicas)


@meets("netcl.distributed.trainer.data_parallel_step")
def data_parallel_step(
    wrapped: Any, instance: None, /, forward_fn: Any, params_replicas: Any, optimizers: Any, batch: Any, **hooks: Any
) -> Any:
    """A step on every replica, with scaled losses: netcl's calls ``forward_fn`` once for each replica, in order, and
    then ``tape.backward`` with what that returned."""
    scaling = session.active_scaling()
    if scaling is None:
        return wrapped(forward_fn, params_replicas, optimizers, batch, **hooks)
    order = iter(optimizers)

    def forward(*inputs: Any) -> tuple[Any, ScaledTape]:
        loss, tape = forward_fn(*inputs)
        return loss, ScaledTape(tape, partial(scaling.pass_for, next(order)))

    result = wrapped(forward, params_replicas, optimizers, batch, **hooks)
    keep_equal(params_replicas)
    return result


# ---------------------------------------------------------------------------------------------- Trainer
#
# ``Trainer(mixed_precision=True)`` has a scaler of netcl's, which rules; the handle shows its scale and its steps.
# Without, ``amp.init()`` is the user's wish: its forward runs in the region around it, and its backward in a
# ``scale_loss`` of the handle's. Without a handle a Trainer is left as it is.

#: what the last forward of a Trainer was given
_batches: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], dict[str, Any]]] = weakref.WeakKeyDictionary()


def _asks_for_nothing(autocast: Any) -> bool:
    """Returns whether this autocast, which is being entered, is a Trainer's own, switched off because nobody switched
    it on.

    Between the beginning of ``Trainer._forward`` and its ``with autocast(...)`` no code of the user's runs, so the
    first one entered is the Trainer's; one inside of the model or the loss is the user's, and means what it says.
    """
    begins, _thread.begins = _thread.begins, False
    return begins and not autocast.enabled


def _scaled_once(scaling: PassScaling, optimizer: Any, loss: Any) -> AbstractContextManager[Any]:
    """A pass of the handle's over a loss; a loss that somebody has scaled already is not scaled again."""
    if any(is_scaled(node) for node in bridge.graph(loss)):
        return nullcontext(loss)
    return scaling.pass_for(optimizer, loss)


def _has_own_scaler(trainer: Any) -> bool:
    return bool(trainer.mixed_precision) and trainer.scaler is not None


@meets("netcl.trainer.trainer.Trainer._forward")
def trainer_forward(wrapped: Any, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A Trainer's forward, in training and in evaluation."""
    scaling = session.active_scaling()
    if scaling is not None:
        _batches[instance] = args, kwargs
    if scaling is None or _has_own_scaler(instance):
        return wrapped(*args, **kwargs)
    _thread.begins = not instance.mixed_precision
    try:
        logits, loss, tape = wrapped(*args, **kwargs)
    finally:
        _thread.begins = False
    return logits, loss, ScaledTape(tape, partial(_scaled_once, scaling, instance.optimizer))


@meets("netcl.trainer.trainer.Trainer._scale_loss_node")
def trainer_scale_loss_node(wrapped: Any, instance: Any, /, loss_node: Any, scale: float) -> Any:
    """The Trainer's product of loss and scale, which would have the scale in a kernel's text, by its scaler.

    What is left of the factor is 1 / accumulation_steps.
    """
    scaler = instance.scaler
    if not _has_own_scaler(instance):
        return wrapped(loss_node, scale)
    factor = scale / float(scaler.scale)
    return scaler.scale_loss(loss_node if factor == 1 else wrapped(loss_node, factor))


@meets("netcl.trainer.trainer.Trainer._step")
def trainer_step(wrapped: Any, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A Trainer's step, which the handle hears of also where the Trainer's own scaler decides."""
    handle = session.active_handle()
    if handle is None:
        return wrapped(*args, **kwargs)
    with (
        handle._scaling.stepped_by(instance.scaler, instance.optimizer) if _has_own_scaler(instance) else nullcontext()
    ):
        result = wrapped(*args, **kwargs)
    if instance in _batches:
        given, named = _batches[instance]
        run_again = partial(bridge.forward_and_backward, instance, *given, **named)
        handle._attribution.look_after_skips(run_again, "handle.explain()")
    return result
