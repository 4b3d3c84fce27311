"""What is timed of attention: forward, and both ways as a user's layer runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pyopencl as cl
from netcl import autograd as ag

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from clamp.cli.bench.cases.contenders import Case, Contender, dtypes_of, peer_contenders, random_tensor
from clamp.cli.bench.peers import PeerProcess
from clamp.cli.bench.timing import timed

Direction = Callable[[Sequence[Tensor]], object]


def attention_cases(queue: cl.CommandQueue, shape: tuple[int, ...], peers: Sequence[PeerProcess]) -> Iterator[Case]:
    """Causal attention over (B, H, T, D). Two products forward and five backward count, of pairs that are seen."""
    batch, heads, length, width = shape
    product = 2.0 * batch * heads * width * length * (length + 1) / 2
    data = {dtype: [random_tensor(queue, shape, dtype, seed) for seed in range(4)] for dtype in dtypes_of(queue)}
    directions: dict[str, tuple[Direction, float]] = {
        "forward": (_forward, 2 * product),
        "forward+backward": (_forward_and_backward, 7 * product),
    }
    for name, (call, flops) in directions.items():
        netcl = timed(partial(call, data["float32"]), queue.finish)
        contenders = [Contender("netcl", netcl, flops, is_baseline=True)]
        contenders += [
            Contender(f"clamp {dtype}", partial(_turn_under_amp, call, tensors, dtype), flops)
            for dtype, tensors in data.items()
        ]
        contenders += peer_contenders(peers, "attention", name, *map(str, shape), amount=flops)
        yield Case("attention", f"{name} causal, {'x'.join(map(str, shape))}", "GFLOP/s", contenders)


def _forward(tensors: Sequence[Tensor]) -> Node:
    q, k, v = (Node(value=tensor, requires_grad=True) for tensor in tensors[:3])
    return ag.flash_attention(q, k, v, causal=True)


def _forward_and_backward(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.requires_grad = True
        tensor.grad = None
    Tape().backward(_forward(tensors), tensors[3])


def _turn_under_amp(call: Direction, tensors: Sequence[Tensor], dtype: str, calls: int) -> list[float]:
    with amp.init(dtype=dtype):
        return timed(partial(call, tensors), tensors[0].queue.finish)(calls)
