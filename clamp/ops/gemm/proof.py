"""The proof of engines that are used only on devices where they have computed right: built, run, compared with numpy.

A driver may refuse inline PTX, compile it to something else, or lack the local memory that it promised. Whatever goes
wrong in a proof means that the engine is not used; nobody hears of it but `python -m clamp doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import release_programs
from clamp.opencl.recording import unrecorded
from clamp.ops.gemm import mma
from clamp.ops.gemm.mma import Plan
from clamp.ops.gemm.problem import Epilogue, operand_a, operand_b

_FIRST_CAPABILITY = (8, 0)  # has mma.m16n8k16 of both storage types, and cp.async


def proved(queue: cl.CommandQueue) -> frozenset[str]:
    """Names of the engines that are proved on the queue's device; tried once a process, where they may work."""
    return frozenset({mma.NAME}) if may_work(capabilities(queue)) and is_proved(queue.device) else frozenset()


def may_work(device: Capabilities) -> bool:
    """Whether the device is of a kind that has the instructions of mma.py."""
    return device.compute_capability >= _FIRST_CAPABILITY


@cache
def is_proved(device: cl.Device) -> bool:
    """Whether mma.py computes right on a device, by every plan, in each storage type and layout.

    The proof has a context of its own: what a launch that failed leaves of a context, nobody else should live with.
    """
    try:
        context = cl.Context([device])
        try:
            with unrecorded():
                queue = cl.CommandQueue(context, device)
                return all(_is_right(queue, *case) for case in _cases())
        finally:
            release_programs(context)
    except Exception:
        return False


def _cases() -> Iterator[tuple[Plan, str, tuple[bool, bool], tuple[int, int, int]]]:
    """Plans, types, transposes, and shapes (M, N, K): whole tiles; rows of whole pieces of 16 bytes; any rows."""
    for (plan, dtype), over in zip(product(mma.PLANS, mma.DTYPES), (0, 8, 8, 3), strict=True):
        shape = plan.rows + over, plan.columns + over, plan.k * plan.stages + over
        for transposes in product((False, True), (False, True)):
            yield plan, dtype, transposes, shape


def _is_right(
    queue: cl.CommandQueue, plan: Plan, dtype: str, transposes: tuple[bool, bool], shape: tuple[int, int, int]
) -> bool:
    m, n, k = shape
    numbers = np.random.default_rng(0)
    a, b = numbers.integers(-1, 2, (m, k)), numbers.integers(-1, 2, (k, n))  # their sums are exact in every type
    out_dtype = dtype if plan is mma.PLANS[0] else "float32"
    c = _DeviceMatrix.like(queue, np.full((m, n), 99), out_dtype)
    left = operand_a(_DeviceMatrix.like(queue, a.T if transposes[0] else a, dtype), transposes[0])
    right = operand_b(_DeviceMatrix.like(queue, b.T if transposes[1] else b, dtype), transposes[1])
    mma.compute(left, right, c, Epilogue(out_dtype), plan)
    return np.array_equal(c.to_host(), a @ b)


@dataclass(frozen=True)
class _DeviceMatrix:
    """As much of a tensor as a launch needs; netcl's pools of memory would keep the context of the proof alive."""

    queue: cl.CommandQueue
    buffer: cl.Buffer
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def like(cls, queue: cl.CommandQueue, numbers: npt.NDArray[Any], dtype: str) -> _DeviceMatrix:
        """Numbers that the type has, on the device."""
        host = np.ascontiguousarray(numbers, np.float16 if dtype == "float16" else np.float32)
        if dtype == "bfloat16":
            host = (host.view(np.uint32) >> 16).astype(np.uint16)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        return cls(queue, cl.Buffer(queue.context, flags, hostbuf=host), dtype, numbers.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def to_host(self) -> npt.NDArray[Any]:
        host = np.empty(self.shape, np.uint16 if self.dtype == "bfloat16" else self.dtype)
        cl.enqueue_copy(self.queue, host, self.buffer)
        return (host.astype(np.uint32) << 16).view(np.float32) if self.dtype == "bfloat16" else host
