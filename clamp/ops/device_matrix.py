"""Numbers on a device for what is tried there: as much of a tensor as a launch needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl


@dataclass(frozen=True)
class DeviceMatrix:
    """As much of a tensor as a launch needs; netcl's pools of memory would keep the context of the proof alive."""

    queue: cl.CommandQueue
    buffer: cl.Buffer
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def like(cls, queue: cl.CommandQueue, numbers: npt.NDArray[Any], dtype: str) -> DeviceMatrix:
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
