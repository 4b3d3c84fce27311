"""What netcl finds out about a device by running kernels on it, where it is known without."""

from __future__ import annotations

from typing import Any

import pyopencl as cl

from clamp.opencl.device import capabilities
from clamp.patching.meets import meets


@meets("netcl.core.capabilities._probe_min_sync")
def min_sync(wrapped: Any, instance: None, /, context: cl.Context, queue: cl.CommandQueue, max_wg: int) -> str:
    """Whether a kernel sees what the one before it wrote. netcl compiles two kernels for that, at the first backward of
    each process, a twentieth of a cold first step. A processor's cores see what other cores wrote."""
    if capabilities(queue).is_cpu:
        return "none"
    return str(wrapped(context, queue, max_wg))
