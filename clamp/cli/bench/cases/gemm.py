"""Matrix products, beside netcl's and the peers'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pyopencl as cl
from netcl.ops.matmul import matmul
from netcl.ops.transpose import transpose2d

from clamp.bridge import Tensor
from clamp.cli.bench.cases.contenders import Case, Contender, dtypes_of, peer_contenders, random_tensor
from clamp.cli.bench.peers import PeerProcess
from clamp.cli.bench.timing import timed
from clamp.opencl import amx
from clamp.opencl.device import capabilities
from clamp.ops.gemm import gemm


def gemm_cases(
    queue: cl.CommandQueue, sizes: Sequence[int], layouts: Sequence[str], peers: Sequence[PeerProcess]
) -> Iterator[Case]:
    """n x n matrices; NT and TN have their second or first operand transposed, as in backward passes."""
    limits = _limits(queue, peers)
    for n in sizes:
        operands = {
            dtype: (random_tensor(queue, (n, n), dtype), random_tensor(queue, (n, n), dtype, 1))
            for dtype in dtypes_of(queue)
        }
        flops = 2.0 * n**3
        for layout in layouts:
            netcls = partial(_netcl_gemm, *operands["float32"], layout)
            contenders = [Contender("netcl", timed(netcls, queue.finish), flops, is_baseline=True)]
            for dtype, (a, b) in operands.items():
                call = partial(
                    gemm, a, b, transpose_a=layout[0] == "T", transpose_b=layout[1] == "T", out_dtype=dtype
                )  # fmt: skip
                contenders.append(Contender(f"clamp {dtype}", timed(call, queue.finish), flops))
            contenders += peer_contenders(peers, "gemm", layout, str(n), amount=flops)
            yield Case("gemm", f"{layout} {n}", "GFLOP/s", contenders, limits)


def _limits(queue: cl.CommandQueue, peers: Sequence[PeerProcess]) -> dict[str, float]:
    """GFLOP/s that a processor's matrix unit does at most, by contender; clamp's float16 may take four products."""
    device = capabilities(queue)
    if not device.amx:
        return {}
    limit = amx.limit(queue) / 1e9
    peer_limits = {f"{peer.info.label} bfloat16": limit for peer in peers}
    return {"clamp bfloat16": limit, "clamp float16": limit if device.amx_fp16 else limit / 4, **peer_limits}


def _netcl_gemm(a: Tensor, b: Tensor, layout: str) -> Tensor:
    """As netcl's own backward does it: its matmul reads operands as they lie, so it transposes them first."""
    return matmul(transpose2d(a) if layout[0] == "T" else a, transpose2d(b) if layout[1] == "T" else b)
