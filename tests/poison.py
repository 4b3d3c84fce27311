"""Makes reads of memory that nobody has written to visible, which holds NaN, and writes beyond a tensor's end.

What a kernel finds there is otherwise left to chance, and mostly harmless: zeros, or finite numbers of an earlier
kernel that a zero gradient hides. And what it writes there mostly ends in what netcl's pool has rounded up.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.opencl.device import capabilities
from clamp.opencl.host_steps import unrecorded

_NAN_BYTE = np.uint8(0xFF)  # NaN in float32, float16 and bfloat16, where every byte is this
LOOKED_AT = 4096  # bytes behind a tensor
_GROUPS = 8  # for each core, so that every thread of the driver takes some

_allocate = bridge.empty
_read = cl.enqueue_copy  # that no test which counts reads sees


class Poison:
    """Memory that holds NaN until a kernel writes to it, of the tensors of one test."""

    def __init__(self) -> None:
        self._living: list[weakref.finalize[..., Any]] = []
        self._found: list[str] = []

    def empty(self, queue: cl.CommandQueue, shape: Sequence[int], dtype: str) -> bridge.Tensor:
        """As `bridge.empty`; the tensor's memory and the private memory of kernels that follow hold NaN."""
        tensor = _allocate(queue, shape, dtype)
        memory = tensor.buffer
        with unrecorded():
            if bridge.on_device(tensor) and tensor.size:
                is_shared = isinstance(memory, cl.SVM)
                if is_shared:
                    cl.enqueue_svm_memfill(queue, memory, _NAN_BYTE, memory.size)
                else:
                    cl.enqueue_fill_buffer(queue, memory, _NAN_BYTE, 0, memory.size)
                if memory.size > (end := bridge.nbytes(tensor)):
                    array = tensor.pool_handle._arr if is_shared else None
                    self._living.append(weakref.finalize(tensor, self._look, queue, memory, array, end))
            poison_private_memory(queue)
        return tensor

    def require_nothing_beyond(self) -> None:
        """Fails if something was written to what netcl's pool has rounded up, behind the end of a tensor."""
        for look in self._living:
            look()  # those that are gone were looked at when they went, before their memory was another's
        assert not self._found, self._found[0]

    def _look(self, queue: cl.CommandQueue, memory: Any, array: Any, end: int) -> None:
        if array is None:
            beyond = np.empty(min(memory.size - end, LOOKED_AT), np.uint8)
            if beyond.size:
                _read(queue, beyond, memory, src_offset=end)
        else:
            queue.finish()
            beyond = array.view(np.uint8)[end : end + LOOKED_AT]
        if (written := np.flatnonzero(beyond != _NAN_BYTE)).size:
            self._found.append(f"written {written[0]} bytes behind the end of a tensor of {end} bytes")


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
