"""What the elements of tensors are as numbers: nan, inf, zeros, what float16 has no room for, extremes and mean.

A launch for 100 tensors of a dtype, of which kernels/numerics.cl has the layout. (ops/statistics.py has magnitudes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.host_steps import refuse
from clamp.opencl.program import Kernel
from clamp.ops.launch import group_macros
from clamp.ops.slots import GROUP_GPU, filled, slots_for, tiles_of

NUMERICS = Kernel("numerics.cl", "numerics")

_ROW = 10  # words
_OTHER_ARGUMENTS_BYTES = 16  # tile table and results
_NAN = float("nan")


@dataclass(frozen=True)
class Numerics:
    """What the elements of one tensor are.

    Attributes:
        count: elements.
        nans, infs, zeros: how many of them are nan, inf and 0, of either sign.
        beyond: how many are finite, and larger than 65504 in magnitude.
        below: how many are not 0, and smaller than 2^-24 in magnitude.
        greatest, least: of those that are not nan; nan if there is none.
        mean: of all, of float32 sums; inf and nan where elements are; nan of none.
    """

    count: int
    nans: int
    infs: int
    zeros: int
    beyond: int
    below: int
    greatest: float
    least: float
    mean: float

    @property
    def is_finite(self) -> bool:
        """Whether nothing of it is inf or nan."""
        return not (self.nans or self.infs)


_EMPTY = Numerics(0, 0, 0, 0, 0, 0, _NAN, _NAN, _NAN)


class PendingNumerics:
    """Numerics that the device forms meanwhile; each ``read`` gives what the last run, or replay, of them found.

    Does not wait. The tensors may change after that, and are not kept.

    Args:
        tensors: float32, float16 or bfloat16, any shapes, on any queues.

    Raises:
        TypeError: a dtype is not one of the above, or a tensor is on netcl's numpy backend.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds: dict[tuple[cl.CommandQueue, str], list[int]] = {}
        for index, tensor in enumerate(tensors):
            _check(tensor)
            if tensor.size:
                kinds.setdefault((tensor.queue, bridge.STORAGE[tensor.dtype]), []).append(index)
        self._counts = [tensor.size for tensor in tensors]
        self._launches: list[tuple[list[int], Tensor]] = []
        for (queue, kind), indices in kinds.items():
            slots = slots_for(queue, len(indices), 1, _OTHER_ARGUMENTS_BYTES)
            for start in range(0, len(indices), slots):
                these = indices[start : start + slots]
                self._launches.append((these, _launch(queue, kind, [tensors[index] for index in these], slots)))

    def read(self) -> list[Numerics]:
        """The numerics of each tensor, in their order. Waits for the device, with one read a launch.

        Raises:
            RuntimeError: launches are being recorded.
        """
        refuse("Numbers were read", "Read them after the recorded part.")
        found = [_EMPTY] * len(self._counts)
        for indices, words in self._launches:
            rows = words.to_host().view(np.uint32).reshape(-1, _ROW)
            for slot, index in enumerate(indices):
                found[index] = _put_together(self._counts[index], rows[rows[:, 0] == slot])
        return found


def numerics_of(tensor: Tensor) -> Numerics:
    """The numerics of a tensor. Waits for the device.

    Raises:
        TypeError, RuntimeError: as ``PendingNumerics`` and its ``read``.
    """
    return PendingNumerics([tensor]).read()[0]


def can_measure(tensor: object) -> bool:
    """Whether something is a tensor that numerics are formed of: floating, on an OpenCL device."""
    return isinstance(tensor, Tensor) and tensor.dtype in bridge.STORAGE and bridge.on_device(tensor)


def _check(tensor: Tensor) -> None:
    if tensor.dtype not in bridge.STORAGE:
        raise TypeError(f"numerics of a tensor of {tensor.dtype}; float32, float16 or bfloat16 is needed")
    if not bridge.on_device(tensor):
        raise TypeError("numerics of a tensor on netcl's numpy backend; it must be on an OpenCL device")


def _launch(queue: cl.CommandQueue, kind: str, tensors: Sequence[Tensor], slots: int) -> Tensor:
    tiles = tiles_of(queue, tuple(tensor.size for tensor in tensors))
    (items,), (group,) = tiles.grid
    words = bridge.empty(queue, (_ROW * items // group,), "int32")
    macros = group_macros(queue, 1 if capabilities(queue).is_cpu else GROUP_GPU)
    NUMERICS(queue, *tiles.grid, tiles.table, words, *filled(tensors, slots),
             X_T=kind, DECADES=slots // 10, **macros)  # fmt: skip
    return words


def _put_together(count: int, rows: NDArray[np.uint32]) -> Numerics:
    """The numerics of a tensor from the rows of its tiles."""
    not_zero, normal, beyond, bad, nans = (int(x) for x in rows[:, 1:6].sum(0, dtype=np.uint64))
    greatest, least, sums, factors = rows[:, 6:].view(np.float32).astype(np.float64).T
    extremes = (_NAN, _NAN) if nans == count else (float(greatest.max()), float(least.min()))
    with np.errstate(invalid="ignore"):  # inf - inf is nan
        mean = float((sums * factors).sum() / count)
    return Numerics(count, nans, bad - nans, count - not_zero, beyond - bad, not_zero - normal, *extremes, mean)
