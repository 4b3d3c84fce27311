"""What AMP gains on a device, in one sentence: a matrix product, and an op that memory bounds, beside float32's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pyopencl as cl

from clamp.bridge import Tensor
from clamp.cli.bench.timing import Effort, interleave, timed
from clamp.cli.devices import describe, is_simulator
from clamp.opencl.device import capabilities
from clamp.ops.cast import cast
from clamp.ops.elementwise import elementwise
from clamp.ops.gemm import gemm

DTYPES = ("float32", "float16", "bfloat16")
SECONDS = 2.0  # that all devices may take together, but for building kernels

_WORKS = ("product", "sum")
_SIDE = {True: 512, False: 4096}  # of matrices, on CPUs and elsewhere
_ELEMENTS = {True: 1 << 21, False: 1 << 25}

Gains = Mapping[str, tuple[float, float]]  # by dtype: how many times as fast as float32 are products, and sums


def measure(device: cl.Device, seconds: float) -> Gains:
    """How many times as fast as in float32 16 bits are.

    Args:
        device: no simulator.
        seconds: that it may take, about.

    Raises:
        RuntimeError: a kernel failed there.
    """
    context = cl.Context([device])
    queue = cl.CommandQueue(context, device)
    is_cpu = capabilities(queue).is_cpu
    host = np.random.default_rng(0).standard_normal(_ELEMENTS[is_cpu], dtype=np.float32)
    side = _SIDE[is_cpu]
    calls = {}
    for dtype in DTYPES:
        x, matrix = (
            cast(Tensor.from_host(queue, values), dtype) for values in (host, host[: side**2].reshape(side, side))
        )
        calls["product", dtype] = partial(gemm, matrix, matrix, out_dtype=dtype)
        calls["sum", dtype] = partial(elementwise, "add", dtype, x, x)
    each = seconds / len(calls) / 2  # the other half is for warming up, and for the first calls
    turns = {f"{work} {dtype}": timed(call, queue.finish) for (work, dtype), call in calls.items()}
    race = interleave(turns, Effort(rounds=4, seconds=each, least=1, most=12, patience=each))
    for name, why in race.failures.items():
        raise RuntimeError(f"a {name.replace(' ', ' in ')} failed: {why}")
    best = {name: timing.best for name, timing in race.timings.items()}
    product, add = ({dtype: best[f"{work} float32"] / best[f"{work} {dtype}"] for dtype in DTYPES} for work in _WORKS)
    return {dtype: (product[dtype], add[dtype]) for dtype in DTYPES[1:]}


def sentence(device: cl.Device, seconds: float) -> str:
    """What AMP gains on a device, or why that is not known."""
    if is_simulator(device):
        return f"{describe(device)}: a simulator, on which nothing is gained."
    try:
        return in_words(describe(device), measure(device, seconds))
    except Exception as error:  # a driver in any state must not keep doctor from the next one
        return f"{describe(device)}: what AMP gains could not be measured: {error}"


def in_words(name: str, gains: Gains) -> str:
    """The sentence.

    Args:
        name: of the device.
        gains: as ``measure`` gives them.
    """
    parts = [
        f"{dtype} multiplies matrices {product:.2f}x and adds {add:.2f}x as fast as float32"
        for dtype, (product, add) in gains.items()
    ]
    fastest = max(number for pair in gains.values() for number in pair)
    gained = "time and memory" if fastest >= 1.1 else "memory, and no time"
    return f"{name}: AMP gains {gained}: {', '.join(parts)}; activations take half the bytes in both."
