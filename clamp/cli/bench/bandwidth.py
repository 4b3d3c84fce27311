"""What is timed of what memory bounds: functions and casts, beside a copy kernel, and the loss scaler's pass.

A function is credited with the bytes that it must move: every input read and every result written once, and an input
that is needed twice, because a statistic of all of it comes before the result, read twice. The caches are emptied
before each call, as Triton's ``do_bench`` does: what is measured is the memory's bandwidth, also on a machine whose
last-level cache would hold all that a call reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import netcl.amp
import numpy as np
import pyopencl as cl
from netcl import autograd as ag

from clamp import bridge
from clamp.bridge import Node, Tensor
from clamp.cli.bench.timing import Case, Contender, amp_in, dtypes_of, launches_of, random_tensor, timed
from clamp.ops.cast import cast_into
from clamp.scaling.dynamic_scale import DynamicLossScale

TENSORS = 100  # that the scaler's pass is over
_FLUSHED_BYTES = 2**27  # read, and half as many written, to empty the caches: several times what they hold


@dataclass(frozen=True)
class Work:
    """A function whose time is that of its memory traffic."""

    name: str  # of the function, and its size
    shape: tuple[int, ...]  # of the input
    call: Callable[..., Any]  # ``call(x, *parameters)`` on nodes
    parameters: Sequence[tuple[int, ...]] = ()  # shapes of its float32 parameters
    reads: int = 1  # how often forward reads its input
    # how often backward reads its input (or result, which has its size) and the gradient
    backward_reads: tuple[int, int] = (1, 1)


def works(images: int) -> list[Work]:
    """The functions of convolutional networks and of transformers, at their usual sizes."""
    image, rows = (images, 64, 56, 56), (images * 128, 1024)

    def batch_norm(x: Node, gamma: Node, beta: Node, mean: Node, variance: Node) -> Node:
        return ag.batch_norm2d_relu(x, gamma, beta, mean.value, variance.value, training=True)

    # Lambdas find the functions when they are called: AMP cannot reach what a partial holds.
    return [
        Work("depthwise_conv2d 3x3", image, lambda x, w: ag.depthwise_conv2d(x, w, pad=1), [(64, 1, 3, 3)]),
        Work("max_pool2d 2x2", image, lambda x: ag.max_pool2d(x, kernel_size=2, stride=2)),
        Work("avg_pool2d 2x2", image, lambda x: ag.avg_pool2d(x, kernel_size=2, stride=2), backward_reads=(0, 1)),
        Work("batch_norm2d_relu", image, batch_norm, [(64,)] * 4, reads=2, backward_reads=(2, 2)),
        Work("layer_norm", rows, lambda x, gamma, beta: ag.layer_norm(x, gamma, beta), [(1024,)] * 2),
        Work("rms_norm", rows, lambda x, gamma: ag.rms_norm(x, gamma), [(1024,)]),
        Work("softmax", rows, lambda x: ag.softmax(x)),
    ]


def bandwidth_cases(queue: cl.CommandQueue, images: int) -> Iterator[Case]:
    """Forward and backward of every function, beside a copy of as many bytes."""
    source = bridge.zeros(queue, (_FLUSHED_BYTES // 4,), "float32")
    flush = partial(cast_into, source, bridge.empty(queue, source.shape, "float16"))
    for work in works(images):
        for backward in (False, True):
            runs = [_contender(queue, work, dtype, backward, flush) for dtype in (None, *dtypes_of(queue))]
            half = max(1, int(runs[1].amount) // 16)  # of the elements: a 16-bit run moves as many bytes, about
            contenders = [_copy_kernel(random_tensor(queue, (half,), "float32"), flush), *runs]
            direction = "backward" if backward else "forward"
            yield Case("bandwidth", f"{work.name} {direction}, {'x'.join(map(str, work.shape))}", "GB/s", contenders)


def _copy_kernel(source: Tensor, flush: Callable[[], object] | None = None) -> Contender:
    """A copy, which moves bytes as fast as a kernel can."""
    target = bridge.empty(source.queue, source.shape, "float32")
    turn = timed(partial(cast_into, source, target), source.queue.finish, flush)
    return Contender("copy kernel", turn, 8.0 * source.size, is_baseline=True)


def cast_cases(queue: cl.CommandQueue, elements: int) -> Iterator[Case]:
    """Casts beside a copy. netcl's own cast goes through the host."""
    tensors = {dtype: random_tensor(queue, (elements,), dtype) for dtype in dtypes_of(queue)}
    contenders = [_copy_kernel(tensors["float32"])]
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


def _contender(
    queue: cl.CommandQueue, work: Work, dtype: str | None, backward: bool, flush: Callable[[], object]
) -> Contender:
    """A function in one direction, in one AMP dtype or (None) by netcl alone, with the bytes that a call must move."""
    x = random_tensor(queue, work.shape, dtype or "float32")
    rng = np.random.default_rng(0)
    parameters = [Tensor.from_host(queue, rng.uniform(0.5, 1.5, shape).astype(np.float32)) for shape in work.parameters]
    for tensor in (x, *parameters):
        tensor.requires_grad = True

    def forward() -> Any:
        return work.call(*(Node(value=tensor, requires_grad=True) for tensor in (x, *parameters)))

    def turn(calls: int) -> list[float]:
        with amp_in(dtype):
            call: Callable[[], object] = forward
            if backward:
                out = forward()
                call = partial(out.grad_fn, random_tensor(queue, out.value.shape, out.value.dtype, 1))
            return timed(call, queue.finish, flush)(calls)

    with amp_in(dtype):
        given, made = bridge.nbytes(x), bridge.nbytes(forward().value)
    of_input, of_gradient = work.backward_reads
    moved = of_input * given + of_gradient * made + given if backward else work.reads * given + made
    return Contender("netcl" if dtype is None else f"clamp {dtype}", turn, float(moved), is_baseline=dtype is None)


# ---------------------------------------------------------------------------------------------- the scaler's pass


def unscale_cases(queue: cl.CommandQueue, elements: int) -> Iterator[Case]:
    """The scaler's pass over the gradients of 100 parameters of mixed sizes, with its read of the result."""
    sizes = mixed_sizes(elements)
    holders = [SimpleNamespace(grad=random_tensor(queue, (size,), "float32")) for size in sizes]
    # Scales of 1: gradients that are unscaled again and again must not shrink to subnormals.
    theirs = netcl.amp.GradScaler(init_scale=1.0)
    calls: dict[str, Callable[[], object]] = {"netcl": partial(theirs.unscale_grads, holders)}
    for dtype in dtypes_of(queue):
        gradients = [random_tensor(queue, (size,), dtype) for size in sizes]
        # As scale_loss does it: float32 gradients in place, others into new ones.
        wide = gradients if dtype == "float32" else [bridge.empty(queue, (size,), "float32") for size in sizes]
        calls[f"clamp {dtype}"] = partial(_scaler_pass, DynamicLossScale(1.0), gradients, wide)
    contenders = [
        Contender(name, timed(call, queue.finish), is_baseline=name == "netcl", extra=partial(launches_of, call))
        for name, call in calls.items()
    ]
    yield Case("unscale", f"{TENSORS} gradients, {sum(sizes)} elements", "ms", contenders)


def mixed_sizes(elements: int) -> list[int]:
    """Sizes of `TENSORS` gradients that spread as those of a network do: few large, many small."""
    weights = np.random.default_rng(1).pareto(0.8, TENSORS) + 0.01
    weights = np.minimum(weights, np.sort(weights)[-4])  # no single one outweighs the rest
    return [max(1, int(share * elements)) for share in weights / weights.sum()]


def _scaler_pass(scaler: DynamicLossScale, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    scaler.unscale_(sources, targets)
    scaler.update(1, 1)
    return scaler.overflowed(1)
