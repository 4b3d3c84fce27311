"""The loss and the norm of the gradients of each step, noted on the device and read when somebody asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.host_steps import host_step
from clamp.ops.ring_buffers import Elements, Norms
from clamp.params.gradient_marks import scale_of
from clamp.scaling.step_report import HISTORY

N = TypeVar("N", Elements, Norms)
_Slot: TypeAlias = tuple[cl.CommandQueue, int]  # and the index of its number there

_ROWS = 4096  # losses, and norms, that are kept: several of a step


class Point(NamedTuple):
    """One step: its loss, of several the mean, and the norm of the gradients that it was made with, or skipped for;
    None where none is known."""

    loss: float | None
    gradient_norm: float | None


class _Book(Generic[N]):
    """Notes of one kind, those of each queue on its own device; the oldest are written over."""

    def __init__(self, kind: type[N]) -> None:
        self._kind: type[N] = kind
        self._notes: dict[cl.CommandQueue, N] = {}
        self._counts: dict[cl.CommandQueue, int] = {}

    def open(self, queue: cl.CommandQueue) -> tuple[N, int]:
        """The notes of a queue, and which number is the next."""
        if queue not in self._notes:
            self._notes[queue], self._counts[queue] = self._kind(queue, _ROWS), 0
        self._counts[queue] += 1
        return self._notes[queue], self._counts[queue] - 1

    def read(self) -> dict[_Slot, float]:
        """All that is still there, with one read a queue."""
        found = [(queue, notes.read()) for queue, notes in self._notes.items()]
        return {
            (queue, number): float(values[number % _ROWS])
            for queue, values in found
            for number in range(max(0, self._counts[queue] - _ROWS), self._counts[queue])
        }


class Curves:
    """Losses and norms that steps noted. Nothing waits for the device but ``read``; in a recording every replay notes
    anew."""

    def __init__(self) -> None:
        self._losses, self._norms = _Book[Elements](Elements), _Book[Norms](Norms)
        self._since: tuple[list[_Slot], list[_Slot]] = [], []  # noted since the last step: losses, and norms
        self._steps: deque[tuple[int, list[_Slot], list[_Slot]]] = deque(maxlen=HISTORY)

    def loss(self, loss: Tensor) -> None:
        """Notes a loss of one element, on a device."""
        host_step(partial(self._note_loss, loss))

    def _note_loss(self, loss: Tensor) -> None:
        notes, number = self._losses.open(loss.queue)
        notes.note(number % _ROWS, loss)
        self._since[0].append((loss.queue, number))
        del self._since[0][:-_ROWS]  # a program that scales losses, and never steps

    def gradients(self, gradients: Sequence[Tensor]) -> None:
        """Notes the norm of true gradients; does nothing where one is still multiplied by a loss scale."""
        found = [x for x in gradients if x.size and bridge.is_floating(x)]
        if not found or any(scale_of(x) is not None for x in found):
            return
        by_queue: dict[cl.CommandQueue, list[Tensor]] = {}
        for gradient in {id(x): x for x in found}.values():
            by_queue.setdefault(gradient.queue, []).append(gradient)
        for queue, these in by_queue.items():
            notes, number = self._norms.open(queue)
            notes.note(number % _ROWS, these)
            self._since[1].append((queue, number))

    def stepped(self, step: int | None) -> None:
        """Assigns what has been noted since the last step to this one; with None, to none."""
        if step is not None:
            self._steps.append((step, *self._since))
        self._since = [], []

    def read(self) -> dict[int, Point]:
        """The points of the last 1000 steps by their numbers. Waits for the device."""
        losses, norms = self._losses.read(), self._norms.read()
        points = {}
        for step, of_losses, of_norms in self._steps:
            loss = [losses[place] for place in of_losses if place in losses]
            norm = [norms[place] for place in of_norms if place in norms]
            with np.errstate(invalid="ignore"):  # of inf and nan
                points[step] = Point(
                    float(np.mean(loss)) if loss else None, float(np.sqrt(np.square(norm).sum())) if norm else None
                )
        return points
