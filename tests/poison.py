"""Makes reads of memory that nobody has written to visible: it holds NaN.

What a kernel finds there is otherwise left to chance, and mostly harmless: zeros, or finite numbers of an earlier
kernel that a zero gradient hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.opencl.device import capabilities
from clamp.opencl.host_steps import unrecorded

_NAN_BYTE = np.uint8(0xFF)  # NaN in float32, float16 and bfloat16, where every byte is this
_GROUPS = 8  # for each core, so that every thread of the driver takes some

_allocate = bridge.empty


def poisoned_empty(queue: cl.CommandQueue, shape: Sequence[int], dtype: str) -> bridge.Tensor:
    """As `bridge.empty`; the tensor's memory and the private memory of kernels that follow hold NaN."""
    tensor = _allocate(queue, shape, dtype)
    with unrecorded():
        if bridge.on_device(tensor) and tensor.size:
            if isinstance(tensor.buffer, cl.SVM):
                cl.enqueue_svm_memfill(queue, tensor.buffer, _NAN_BYTE, bridge.nbytes(tensor))
            else:
                cl.enqueue_fill_buffer(queue, tensor.buffer, _NAN_BYTE, 0, bridge.nbytes(tensor))
        poison_private_memory(queue)
    return tensor


def poison_private_memory(queue: cl.CommandQueue) -> None:
    """Leaves NaN in the private memory of a CPU device. (PoCL's next kernel meets it; Intel's runtime clears it.)"""
    if capabilities(queue).is_cpu:
        kernel, out = _kernel(queue.context)
        kernel.set_args(out, np.uint32(0))
        # Not by calling the kernel: tests that count launches count calls.
        cl.enqueue_nd_range_kernel(queue, kernel, (_GROUPS * queue.device.max_compute_units,), (1,))


@cache
def _kernel(context: cl.Context) -> tuple[cl.Kernel, cl.Buffer]:
    text = Path(__file__).with_suffix(".cl").read_text(encoding="utf-8")
    units = context.devices[0].max_compute_units
    out = cl.Buffer(context, cl.mem_flags.WRITE_ONLY, 4 * _GROUPS * units)
    return cl.Kernel(cl.Program(context, text).build(), "poison"), out
