"""netcl's ``Trainer`` while AMP is active: it trains in mixed precision, whether it was asked for that itself or not.

``Trainer(mixed_precision=True)`` has a scaler of netcl's, which rules; the handle shows its scale and its steps.
Without, ``amp.init()`` is the user's wish: its forward runs in the region around it, and its backward in a
``scale_loss`` of the handle's. Without a handle a Trainer is left as it is.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from typing import Any

import wrapt

from clamp import bridge, session
from clamp.patching.meets import meets
from clamp.patching.wrap import Installed
from clamp.scaling.passes import PassScaling
from clamp.scaling.scaled_loss import is_scaled


class _Forward(threading.local):
    begins = False  # a Trainer that was not asked for mixed precision has yet to enter its own autocast


_forward = _Forward()
#: what the last forward of a Trainer was given
_batches: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], dict[str, Any]]] = weakref.WeakKeyDictionary()


def asks_for_nothing(autocast: Any) -> bool:
    """Whether this autocast, which is being entered, is a Trainer's own, switched off because nobody switched it on.

    Between the beginning of ``Trainer._forward`` and its ``with autocast(...)`` no code of the user's runs, so the
    first one entered is the Trainer's; one inside of the model or the loss is the user's, and means what it says.
    """
    begins, _forward.begins = _forward.begins, False
    return begins and not autocast.enabled


class _ScaledTape(wrapt.ObjectProxy[Any]):
    """The tape of a Trainer's forward, whose backward runs from the loss as the handle scales it."""

    def __init__(self, tape: Any, scaling: PassScaling, optimizer: Any) -> None:
        super().__init__(tape)
        self._self_scaling = scaling
        self._self_optimizer = optimizer

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """As ``Tape.backward``; a loss that somebody has scaled already is not scaled again."""
        if any(is_scaled(node) for node in bridge.graph(loss)):
            self.__wrapped__.backward(loss, *args, **kwargs)
            return
        with self._self_scaling.pass_for(self._self_optimizer, loss) as scaled_loss:
            self.__wrapped__.backward(scaled_loss, *args, **kwargs)


def _has_own_scaler(trainer: Any) -> bool:
    return bool(trainer.mixed_precision) and trainer.scaler is not None


@meets("netcl.trainer.trainer.Trainer._forward")
def forward(wrapped: Any, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A Trainer's forward, in training and in evaluation."""
    scaling = session.active_scaling()
    if scaling is not None:
        _batches[instance] = args, kwargs
    if scaling is None or _has_own_scaler(instance):
        return wrapped(*args, **kwargs)
    _forward.begins = not instance.mixed_precision
    try:
        logits, loss, tape = wrapped(*args, **kwargs)
    finally:
        _forward.begins = False
    return logits, loss, _ScaledTape(tape, scaling, instance.optimizer)


@meets("netcl.trainer.trainer.Trainer._scale_loss_node")
def scale_loss_node(wrapped: Any, instance: Any, /, loss_node: Any, scale: float) -> Any:
    """The Trainer's product of loss and scale, which would have the scale in a kernel's text, by its scaler.

    What is left of the factor is 1 / accumulation_steps.
    """
    scaler = instance.scaler
    if not Installed.now or not _has_own_scaler(instance):
        return wrapped(loss_node, scale)
    factor = scale / float(scaler.scale)
    return scaler.scale_loss(loss_node if factor == 1 else wrapped(loss_node, factor))


@meets("netcl.trainer.trainer.Trainer._step")
def step(wrapped: Any, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
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
        handle._look_after_skips(lambda: bridge.forward_and_backward(instance, *given, **named))
    return result
