"""Replicas of a model on several queues of one process: one loss scale, and the same bits in all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.scaler import LossScale


class QueueScales:
    """Loss scales on several queues. A state lives on one queue; on each further one a scale gets a copy.

    Copies move alike because replicas meet the same gradients, and because an overflow of one is made that of all
    (``clamp.optimizers.share_overflow``).

    Args:
        make: makes a loss scale as the others are.
    """

    def __init__(self, make: Callable[[], LossScale]) -> None:
        self._make = make
        self._copies: dict[int, dict[Any, LossScale]] = {}

    def on(self, queue: cl.CommandQueue, scaler: LossScale) -> LossScale:
        """The scaler itself on the first queue it is asked for, on others its copy."""
        copies = self._copies.setdefault(id(scaler), {})
        if not copies:
            copies[queue] = scaler
        elif queue not in copies:
            copies[queue] = self._make()
            copies[queue].load_state_dict({**scaler.state_dict(), "overflow": 0})
        return copies[queue]

    def forget(self) -> None:
        """The scales have got other states: copies are made anew when they are asked for."""
        for queue, scaler in [next(iter(copies.items())) for copies in self._copies.values()]:
            self._copies[id(scaler)] = {queue: scaler}


class ScaledTape:
    """A tape whose backward runs from the scaled loss.

    Args:
        tape: the tape.
        scale: ``with scale(loss) as scaled_loss`` scales, and unscales the gradients at its end.
    """

    def __init__(self, tape: Any, scale: Callable[[Any], AbstractContextManager[Any]]) -> None:
        self._tape = tape
        self._scale = scale

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """As ``Tape.backward``."""
        with self._scale(loss) as scaled_loss:
            self._tape.backward(scaled_loss, *args, **kwargs)


def keep_equal(param_replicas: Sequence[Sequence[Tensor]]) -> None:
    """Copies the first replica's parameters to replicas on other devices, which round a step differently."""
    if not param_replicas or not all(bridge.on_device(param) for params in param_replicas for param in params):
        return
    first = param_replicas[0]
    for params in param_replicas[1:]:
        for param, source in zip(params, first, strict=True):
            if param.queue.device != source.queue.device:
                for target, origin in zip(_values(param), _values(source), strict=True):
                    bridge.write_bytes(target, bridge.read_bytes(origin))


def _values(param: Tensor) -> list[Tensor]:
    """A parameter, and its master if it has one."""
    other = bridge.master_of(param) or bridge.model_parameter(param)
    return [param] if other is param else [param, other]
