"""Permission to use the matrix unit of x86 processors, AMX (kernels/amx.clh), on an OpenCL device.

The processor must list it, the operating system must grant its registers to this process, and it must have computed
right (trials.py): compilers take an instruction that their assembler does not know, drop it, and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import TypeAlias

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

import clamp
from clamp.opencl import trials
from clamp.opencl.processor import host_cpu_flags, refusal_of_tiles
from clamp.opencl.program import Kernel, source
from clamp.opencl.trials import Trial

Bits: TypeAlias = NDArray[np.uint16]

PROBE = Kernel("probe.cl", "amx")
_LIMIT = Kernel("probe.cl", "amx_limit")
_WAYS = 5  # in which the kernel multiplies
_STEPS, _SIDE, _K = 2, 32, 64

#: Trials by what is multiplied, and the flags of a processor that can.
FLAGS = {"bfloat16": frozenset({"amx_tile", "amx_bf16"}), "float16": frozenset({"amx_tile", "amx_fp16"})}


class _Trials:
    """One for each instruction; ``bfloat16`` tries the products of float16's two parts as well."""

    def trials(self) -> Iterator[Trial]:
        for dtype, flags in FLAGS.items():
            if flags <= host_cpu_flags():
                yield dtype, partial(computes_right, dtype)

    def trial_key(self) -> list[str]:
        return [clamp.__version__, source("common.clh"), source(PROBE.file), *sorted(host_cpu_flags())]


TRIALS = _Trials()
_WHERE = f"{__name__}:TRIALS"


def is_listed(dtype: str) -> bool:
    """Returns whether the processor says that its matrix unit multiplies bfloat16, or float16 as it is (AMX-FP16)."""
    return FLAGS[dtype] <= host_cpu_flags()


def begin_trials(device: cl.Device) -> None:
    """Has the instructions that the processor lists tried on a CPU device beside what this process does meanwhile."""
    if is_listed("bfloat16") or is_listed("float16"):
        trials.begin(device, _WHERE)


def is_being_tried(device: cl.Device) -> bool:
    """Returns whether to ask `why_not` is to wait: what will probably be needed may be built before."""
    return trials.are_under_way(device, _WHERE)


def why_not(device: cl.Device, dtype: str, *, anew: bool = False) -> str:
    """Returns why a CPU device's kernels must not use the matrix unit, or nothing.

    Asks for the registers, and has the instruction tried where that is not remembered. A process that never multiplies
    16-bit matrices should not ask: it may want small signal stacks.

    Args:
        dtype: ``"bfloat16"`` or ``"float16"``, what the instruction multiplies.
        anew: tries whatever is remembered.
    """
    if not is_listed(dtype):
        return f"the processor does not list {' and '.join(sorted(FLAGS[dtype]))}"
    if refusal := refusal_of_tiles():
        return refusal
    verdict = trials.verdicts(device, _WHERE, anew=anew).get(dtype, "it could not be tried")
    return "" if verdict == trials.RIGHT else verdict


def computes_right(dtype: str, queue: cl.CommandQueue, *, emulate: bool = False) -> bool:
    """Returns whether products of small integers are right, over memory and registers that held others.

    Args:
        emulate: tries the same in plain C, which needs no such processor.

    Raises:
        RuntimeError: the registers are refused.
    """
    parts = 2 if dtype == "bfloat16" else 1
    numbers = np.random.default_rng(0)
    a, b = (numbers.integers(-7, 8, (parts, _SIDE, _K)) for _ in range(2))
    found = multiplied(queue, _bits(a, dtype), _bits(b, dtype), dtype, emulate=emulate)
    whole = a.sum(0) @ b.sum(0).T
    return np.array_equal(found, np.stack([whole, whole, whole, whole, a[0] @ b[0].T]))


def multiplied(queue: cl.CommandQueue, a: Bits, b: Bits, dtype: str, *, emulate: bool = False) -> NDArray[np.float32]:
    """Sums (5, 32, 32): the rows of a by those of b, in the five ways of the kernel; the last by upper parts alone.

    Args:
        a, b: bits (parts, 32, 64) of numbers; of float16 (``dtype``) 1 part, of bfloat16 2.
    """
    if not emulate and (refusal := refusal_of_tiles()):
        raise RuntimeError(refusal)
    parts = len(a)
    a_panel = a.reshape(parts, _SIDE, _STEPS, 32).transpose(2, 0, 1, 3)
    b_panel = b.reshape(parts, _SIDE, _STEPS, 16, 2).transpose(2, 0, 3, 1, 4)
    offsets = np.arange(_STEPS, dtype=np.uint64) * (2048 * parts)
    found = np.full((_WAYS, _SIDE, _SIDE), 99, np.float32)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers = [
        cl.Buffer(queue.context, flags, hostbuf=np.ascontiguousarray(x)) for x in (a_panel, b_panel, offsets, found)
    ]
    PROBE(queue, (1,), (1,), *buffers, PROBE_AMX=1, PARTS=parts, DOT_F16=int(dtype == "float16"), EMULATE=int(emulate))
    cl.enqueue_copy(queue, found, buffers[-1])
    return found


def limit(queue: cl.CommandQueue) -> float:
    """Operations a second that the matrix units of a device do at most, on bfloat16 in registers: measured.

    Only where `why_not` has no reason.
    """
    items, rounds = queue.device.max_compute_units, 20_000
    numbers = np.random.default_rng(0).standard_normal(2048, np.float32).view(np.uint32) >> 16
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    operands = cl.Buffer(queue.context, flags, hostbuf=numbers.astype(np.uint16))
    sums = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 4 * items)
    seconds = []
    for _ in range(6):  # the first builds the kernel
        began = perf_counter()
        _LIMIT(queue, (items,), (1,), operands, sums, rounds, PROBE_AMX_LIMIT=1, PARTS=1, DOT_F16=0, EMULATE=0)
        queue.finish()
        seconds.append(perf_counter() - began)
    return items * rounds * 16 * (2 * 16 * 16 * 32) / min(seconds)


def _bits(x: NDArray[np.int64], dtype: str) -> Bits:
    """Of small integers."""
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
