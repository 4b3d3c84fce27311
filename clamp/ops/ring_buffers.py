"""Numbers of each step that a device writes down without a wait, and that the host reads together, much later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.host_steps import refuse, unrecorded
from clamp.opencl.program import Kernel
from clamp.ops.slots import batches, in_turn

NOTE = Kernel("notes.cl", "note")
TOTAL = Kernel("notes.cl", "total")
SQUARES = Kernel("squares.cl", "squares")
CLIP = Kernel("squares.cl", "clip")

_LIFT = 90  # by which exponents squares.cl lifts what is small, and lowers what is large


class Notes:
    """Numbers on a queue's device, ``rows`` of them; what was noted in a row stays until it is noted there again.

    Args:
        queue: of the tensors that are noted.
        rows: how many numbers.
        width: words of each.
    """

    width = 1

    def __init__(self, queue: cl.CommandQueue, rows: int) -> None:
        with unrecorded():
            self._words = bridge.zeros(queue, (rows * self.width,), "float32")

    def _read(self) -> NDArray[np.float64]:
        refuse("Notes were read", "Read them after the recorded part.")
        return np.asarray(self._words.to_host(), np.float64).reshape(-1, self.width)


class Elements(Notes):
    """Notes of single elements."""

    def note(self, row: int, x: Tensor) -> None:
        """Notes the first element of ``x``, float32, float16 or bfloat16. Enqueues one launch."""
        NOTE(x.queue, (1,), (1,), x, self._words, row, X_T=bridge.STORAGE[x.dtype])

    def read(self) -> NDArray[np.float64]:
        """The numbers, shape ``(rows,)``. Waits for the device."""
        return self._read()[:, 0]


class Norms(Notes):
    """Notes of Euclidean norms.

    Squares are summed in float32, by exponents, so that neither a small nor a large element is lost.
    """

    width = 3

    def note(self, row: int, tensors: Sequence[Tensor]) -> None:
        """Notes the norm of all elements of all tensors together.

        Enqueues ``ceil(n / 100)`` launches a dtype, and one besides.

        Args:
            tensors: float32, float16 or bfloat16, on one queue, with elements.
        """
        parts, queue = list(batches(tensors)), tensors[0].queue
        counts = [part.groups for part in parts]
        sums = bridge.empty(queue, (3 * sum(counts),), "float32")
        for index, part in enumerate(parts):
            part.run(SQUARES, sums, sum(counts[:index]))
        TOTAL(queue, (1,), (1,), sums, sum(counts), self._words, row, X_T="f32")

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Norms:
        """One note, of the norm of these."""
        norms = cls(tensors[0].queue, 1)
        norms.note(0, tensors)
        return norms

    def clip(self, tensors: Sequence[Tensor], longest: float) -> Tensor:
        """Makes the norm that is noted in row 0, of these tensors, not larger than ``longest``, in place.

        Enqueues ``ceil(n / 100)`` launches. An inf or nan makes all elements nan or 0.

        Args:
            tensors: float32, on one queue, with elements, no two of which share memory.

        Returns:
            The square of the norm before, float32, shape ``(1,)``; inf where that is too large for it.
        """
        total = bridge.empty(tensors[0].queue, (1,), "float32")
        in_turn([partial(part.run, CLIP, self._words, longest, total, CLIP=1, WG=1) for part in batches(tensors)])
        return total

    def read(self) -> NDArray[np.float64]:
        """The norms, shape ``(rows,)``; inf or nan where an element was. Waits for the device."""
        low, mid, high = self._read().T
        return np.sqrt(np.ldexp(low, -2 * _LIFT) + mid + np.ldexp(high, 2 * _LIFT))
