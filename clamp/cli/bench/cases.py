"""What is timed: matrix products, casts, and the loss scaler's pass over all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import netcl.amp
import numpy as np
import pyopencl as cl
import wrapt
from netcl.ops.matmul import matmul
from netcl.ops.transpose import transpose2d

from clamp import amp, bridge
from clamp.bridge import Tensor
from clamp.cli.bench.peers import PeerProcess
from clamp.cli.bench.timing import Turn, timed
from clamp.ops.cast import cast, cast_into
from clamp.ops.gemm import gemm
from clamp.scaling.loss_scale import DynamicLossScale

LAYOUTS = ("NN", "NT", "TN")
TENSORS = 100

Extra = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Contender:
    """One way to do a case's work.

    Attributes:
        name: ``"netcl"``, ``"clamp float16"``, ``"OpenBLAS float32"``.
        turn: times it.
        amount: what one call does, in the case's unit without its prefix: flops, bytes; not used for times.
        is_baseline: whether the others are compared with it.
        extra: further figures, asked for after the timing.
    """

    name: str
    turn: Turn
    amount: float = 0.0
    is_baseline: bool = False
    extra: Extra = field(default=dict)


@dataclass(frozen=True)
class Case:
    """Work that several contenders do, turn about.

    Attributes:
        work: kind of work: ``"gemm"``.
        name: which of its kind: ``"NN 1024"``.
        unit: of the results: ``"GFLOP/s"``, ``"GB/s"`` or ``"ms"``.
        contenders: in the order of the table.
    """

    work: str
    name: str
    unit: str
    contenders: Sequence[Contender]


def dtypes_of(queue: cl.CommandQueue) -> tuple[str, ...]:
    """The dtypes that clamp computes in on a device."""
    return ("float32", *amp.get_amp_supported_dtype(queue))


def random_tensor(queue: cl.CommandQueue, shape: Sequence[int], dtype: str, seed: int = 0) -> Tensor:
    """Normally distributed numbers."""
    host = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return cast(Tensor.from_host(queue, host), dtype)


def peer_contenders(peers: Sequence[PeerProcess], work: str, *args: str, amount: float = 0.0) -> list[Contender]:
    """Every peer in every dtype that it does this work in."""
    return [
        Contender(f"{peer.info.label} {dtype}", peer.turn(work, dtype, *args), amount, is_baseline=True)
        for peer in peers
        for dtype in peer.info.works.get(work, [])
    ]


# ---------------------------------------------------------------------------------------------- gemm


def gemm_cases(queue: cl.CommandQueue, sizes: Sequence[int], peers: Sequence[PeerProcess]) -> Iterator[Case]:
    """n x n matrices; NT and TN have their second or first operand transposed, as in backward passes."""
    for n in sizes:
        operands = {
            dtype: (random_tensor(queue, (n, n), dtype), random_tensor(queue, (n, n), dtype, 1))
            for dtype in dtypes_of(queue)
        }
        flops = 2.0 * n**3
        for layout in LAYOUTS:
            netcls = partial(_netcl_gemm, *operands["float32"], layout)
            contenders = [Contender("netcl", timed(netcls, queue.finish), flops, is_baseline=True)]
            for dtype, (a, b) in operands.items():
                call = partial(
                    gemm, a, b, transpose_a=layout[0] == "T", transpose_b=layout[1] == "T", out_dtype=dtype
                )  # fmt: skip
                contenders.append(Contender(f"clamp {dtype}", timed(call, queue.finish), flops))
            contenders += peer_contenders(peers, "gemm", layout, str(n), amount=flops)
            yield Case("gemm", f"{layout} {n}", "GFLOP/s", contenders)


def _netcl_gemm(a: Tensor, b: Tensor, layout: str) -> Tensor:
    """As netcl's own backward does it: its matmul reads operands as they lie, so it transposes them first."""
    return matmul(transpose2d(a) if layout[0] == "T" else a, transpose2d(b) if layout[1] == "T" else b)


# ---------------------------------------------------------------------------------------------- cast


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


# ---------------------------------------------------------------------------------------------- unscale


def unscale_cases(queue: cl.CommandQueue, elements: int) -> Iterator[Case]:
    """The scaler's pass over the gradients of 100 parameters of mixed sizes, with its read of the result."""
    sizes = mixed_sizes(elements)
    holders = [_Holder(random_tensor(queue, (size,), "float32")) for size in sizes]
    # Scales of 1: gradients that are unscaled again and again must not shrink to subnormals.
    theirs = netcl.amp.GradScaler(init_scale=1.0)
    netcls = partial(theirs.unscale_grads, holders)
    contenders = [
        Contender("netcl", timed(netcls, queue.finish), is_baseline=True, extra=partial(_count_launches, netcls))
    ]
    for dtype in dtypes_of(queue):
        gradients = [random_tensor(queue, (size,), dtype) for size in sizes]
        # As scale_loss does it: float32 gradients in place, others into new ones.
        wide = gradients if dtype == "float32" else [bridge.empty(queue, (size,), "float32") for size in sizes]
        call = partial(_scaler_pass, DynamicLossScale(1.0), gradients, wide)
        contenders.append(
            Contender(f"clamp {dtype}", timed(call, queue.finish), extra=partial(_count_launches, call))
        )  # fmt: skip
    yield Case("unscale", f"{TENSORS} gradients, {sum(sizes)} elements", "ms", contenders)


def mixed_sizes(elements: int) -> list[int]:
    """Sizes of `TENSORS` gradients that spread as those of a network do: few large, many small."""
    weights = np.random.default_rng(1).pareto(0.8, TENSORS) + 0.01
    weights = np.minimum(weights, np.sort(weights)[-4])  # no single one outweighs the rest
    return [max(1, int(share * elements)) for share in weights / weights.sum()]


@dataclass
class _Holder:
    """What netcl's scaler takes for a parameter."""

    grad: Tensor


def _scaler_pass(scaler: DynamicLossScale, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    scaler.unscale_(sources, targets)
    scaler.update(1, 1)
    return scaler.overflowed(1)


def _count_launches(call: Callable[[], object]) -> dict[str, float]:
    with counted_launches() as launches:
        call()
    return {"launches": float(len(launches))}


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Collects the names of the kernels launched inside the ``with``, as netcl's capture does."""
    names: list[str] = []
    original = cl.Kernel.__call__

    def count(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names.append(instance.function_name)
        return wrapped(*args, **kwargs)

    setattr(cl.Kernel, "__call__", wrapt.FunctionWrapper(original, count))  # noqa: B010  (mypy: a method)
    try:
        yield names
    finally:
        setattr(cl.Kernel, "__call__", original)  # noqa: B010
