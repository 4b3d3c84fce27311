"""Replicas of a model on several queues of one process: one loss scale for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyopencl as cl

from clamp.scaling.loss_scale import LossScale
from clamp.scaling.step_guard import StepGuard


class QueueScales:
    """Loss scales on several queues. A state lives on one queue; on each further one a scale gets a copy.

    Copies move alike because replicas meet the same gradients, and because an overflow of one is made that of all
    (``share_overflow``).

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


def share_overflow(guards: Sequence[StepGuard]) -> None:
    """An overflow of one replica becomes that of all, so that they skip the same step and go on with one scale.

    Args:
        guards: of the optimizers of one model's replicas, each on its own queue, after as many passes.
    """
    for scalers in zip(*(guard.pending for guard in guards), strict=False):
        states = [scaler.read() for scaler in scalers]
        bad = [state for guard, state in zip(guards, states, strict=True) if state.overflow & guard.mask]
        for guard, scaler in zip(guards, scalers, strict=True) if bad else ():
            scaler.load_state_dict(
                {
                    "loss_scale": bad[0].scale,
                    "unskipped": bad[0].growth_tracker,
                    "overflow": scaler.read().overflow | guard.mask,
                    "bad_steps": bad[0].bad_steps,
                }
            )
