"""Replicas of a model on several queues of one process: one loss scale for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyopencl as cl

from clamp.scaling.loss_scale import LossScale
from clamp.scaling.step_guard import StepGuard


class QueueScales:
    """Loss scales on several queues. A state lives on one queue; on each further one a scale gets a copy.

    Copies move alike because replicas meet the same gradients, because an overflow of one is made that of all
    (``share_overflow``), and because one that somebody has set is copied anew.
    """

    def __init__(self) -> None:
        # by id: a scale, the queue that it is on, and its copies, each as of so many changes to it
        self._known: dict[int, tuple[LossScale, Any, dict[Any, tuple[LossScale, int]]]] = {}

    def on(self, queue: cl.CommandQueue, scaler: LossScale) -> LossScale:
        """The scaler itself on the first queue it is asked for, on others its copy."""
        _, home, copies = self._known.setdefault(id(scaler), (scaler, queue, {}))
        if queue == home:
            return scaler
        if queue not in copies or copies[queue][1] != scaler.changes:
            copies[queue] = scaler.elsewhere(), scaler.changes
        return copies[queue][0]


def share_overflow(guards: Sequence[StepGuard]) -> None:
    """An overflow of one replica becomes that of all, so that they skip the same step and go on with one scale.

    Args:
        guards: of the optimizers of one model's replicas, each on its own queue, after as many passes.
    """
    for scalers in zip(*(guard.pending for guard in guards), strict=False):
        states = [scaler.read() for scaler in scalers]
        bad = [state for guard, state in zip(guards, states, strict=True) if state.overflow & guard.mask]
        for guard, scaler in zip(guards, scalers, strict=True) if bad else ():
            scaler.follow(bad[0], guard.mask)
