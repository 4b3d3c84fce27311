"""Casts, beside a copy kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import netcl.amp
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.cli.bench.cases.contenders import Case, Contender, dtypes_of, random_tensor
from clamp.cli.bench.timing import timed
from clamp.ops.cast import cast_into


def cast_cases(queue: cl.CommandQueue, elements: int) -> Iterator[Case]:
    """Casts beside a copy, which moves bytes as fast as a kernel can. netcl's own cast goes through the host."""
    tensors = {dtype: random_tensor(queue, (elements,), dtype) for dtype in dtypes_of(queue)}
    target = bridge.empty(queue, (elements,), "float32")
    copy = timed(partial(cast_into, tensors["float32"], target), queue.finish)
    contenders = [Contender("copy kernel", copy, 8.0 * elements, is_baseline=True)]
    if netcl.amp.supports_fp16(queue):
        through_host = timed(partial(_netcl_cast, tensors["float32"]), queue.finish)
        contenders.append(Contender("netcl float32->float16", through_host, 6.0 * elements, is_baseline=True))
    halves = dtypes_of(queue)[1:]
    for source, result in [("float32", half) for half in halves] + [(half, "float32") for half in halves]:
        out = bridge.empty(queue, (elements,), result)
        turn = timed(partial(cast_into, tensors[source], out), queue.finish)
        contenders.append(Contender(f"clamp {source}->{result}", turn, 6.0 * elements))
    yield Case("cast", f"{elements} elements", "GB/s", contenders)


def _netcl_cast(x: Tensor) -> Tensor:
    with netcl.amp.autocast(device_queue=x.queue):
        return netcl.amp.maybe_cast_tensor(x)
