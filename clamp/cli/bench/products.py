"""What is timed of matrix products, convolutions and attention: kernels, and both ways as a user's layer runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import pyopencl as cl
from netcl import autograd as ag
from netcl.ops.conv2d import conv2d as netcl_conv2d
from netcl.ops.matmul import matmul
from netcl.ops.transpose import transpose2d

from clamp.bridge import Node, Tape, Tensor
from clamp.cli.bench.peers import PeerProcess, peer_contenders
from clamp.cli.bench.timing import Case, Contender, Turn, dtypes_of, random_tensor, timed, under_amp
from clamp.opencl import amx
from clamp.opencl.device import capabilities
from clamp.ops.conv import Window, conv2d, conv2d_input_grad, conv2d_weight_grad
from clamp.ops.gemm import gemm


def _contenders(netcl: Turn | None, clamp: Mapping[str, Turn], flops: float) -> list[Contender]:
    """netcl, if it does such a thing, and clamp in each dtype."""
    alone = [] if netcl is None else [Contender("netcl", netcl, flops, is_baseline=True)]
    return alone + [Contender(f"clamp {dtype}", turn, flops) for dtype, turn in clamp.items()]


def _as_layers_do(
    forward: Callable[..., Node], data: Mapping[str, Sequence[Tensor]], flops: float, *, backward: bool
) -> list[Contender]:
    """netcl's function of nodes as a layer calls it, alone in float32 and under AMP in each dtype; backward too, to all
    inputs, if it is asked for. ``data`` has its inputs by dtype, and after them a gradient of its result."""

    def call(tensors: Sequence[Tensor]) -> None:
        *inputs, gradient = tensors
        for tensor in inputs if backward else ():
            tensor.requires_grad = True
            tensor.grad = None
        result = forward(*(Node(value=tensor, requires_grad=True) for tensor in inputs))
        if backward:
            Tape().backward(result, gradient)

    turns = {dtype: timed(partial(call, tensors), tensors[0].queue.finish) for dtype, tensors in data.items()}
    return _contenders(turns["float32"], {dtype: under_amp(turn, dtype) for dtype, turn in turns.items()}, flops)


# ---------------------------------------------------------------------------------------------- matrices


def gemm_cases(
    queue: cl.CommandQueue, sizes: Sequence[int], layouts: Sequence[str], peers: Sequence[PeerProcess]
) -> Iterator[Case]:
    """n x n matrices; NT and TN have their second or first operand transposed, as in backward passes."""
    limits = _limits(queue, peers)
    for n in sizes:
        operands = {dtype: [random_tensor(queue, (n, n), dtype, seed) for seed in (0, 1)] for dtype in dtypes_of(queue)}
        flops = 2.0 * n**3
        for layout in layouts:
            multiply = partial(gemm, transpose_a=layout[0] == "T", transpose_b=layout[1] == "T")
            turns = {
                dtype: timed(partial(multiply, a, b, out_dtype=dtype), queue.finish)
                for dtype, (a, b) in operands.items()
            }
            a, b = operands["float32"]
            contenders = _contenders(timed(partial(_netcl_gemm, a, b, layout), queue.finish), turns, flops)
            contenders += peer_contenders(peers, "gemm", layout, n, amount=flops)
            yield Case("gemm", f"{layout} {n}", "GFLOP/s", contenders, limits)


def _limits(queue: cl.CommandQueue, peers: Sequence[PeerProcess]) -> dict[str, float]:
    """GFLOP/s that a processor's matrix unit does at most, by contender; clamp's float16 may take four products."""
    device = capabilities(queue)
    if not device.amx:
        return {}
    limit = amx.limit(queue) / 1e9
    peer_limits = {f"{peer.label} bfloat16": limit for peer in peers}
    return {"clamp bfloat16": limit, "clamp float16": limit if device.amx_fp16 else limit / 4, **peer_limits}


def _netcl_gemm(a: Tensor, b: Tensor, layout: str) -> Tensor:
    """As netcl's own backward does it: its matmul reads operands as they lie, so it transposes them first."""
    return matmul(transpose2d(a) if layout[0] == "T" else a, transpose2d(b) if layout[1] == "T" else b)


# ---------------------------------------------------------------------------------------------- convolutions


class ConvShape(NamedTuple):
    """A convolution of square images without groups."""

    images: int
    channels: int
    height: int
    width: int
    features: int
    kernel: int
    stride: int
    pad: int

    def __str__(self) -> str:
        size = f"{self.images}x{self.channels}x{self.height}x{self.width}->{self.features}"
        return f"{self.kernel}x{self.kernel} stride {self.stride}, {size}"


#: Channels, height, width, features, kernel, stride and padding: of a ResNet's stages; of every convolution of a
#: ResNet-18 on images of 224 x 224, each once; and a small one, to try the command, as netcl compiles and tries a dozen
#: kernels for each shape.
SHAPES = {
    "few": [
        (64, 56, 56, 64, 3, 1, 1), (128, 28, 28, 128, 3, 1, 1), (64, 56, 56, 128, 3, 2, 1), (256, 14, 14, 256, 1, 1, 0),
    ],
    "resnet18": [
        (3, 224, 224, 64, 7, 2, 3),
        (64, 56, 56, 64, 3, 1, 1),
        (64, 56, 56, 128, 3, 2, 1), (64, 56, 56, 128, 1, 2, 0), (128, 28, 28, 128, 3, 1, 1),
        (128, 28, 28, 256, 3, 2, 1), (128, 28, 28, 256, 1, 2, 0), (256, 14, 14, 256, 3, 1, 1),
        (256, 14, 14, 512, 3, 2, 1), (256, 14, 14, 512, 1, 2, 0), (512, 7, 7, 512, 3, 1, 1),
    ],
    "one": [(4, 6, 6, 8, 3, 2, 1)],
}  # fmt: skip


def conv_cases(queue: cl.CommandQueue, shapes: str, images: int, peers: Sequence[PeerProcess]) -> Iterator[Case]:
    """Every direction of convolutions."""
    for shape in (ConvShape(images, *numbers) for numbers in SHAPES[shapes]):
        for name, contenders, flops in _directions(queue, shape):
            contenders += peer_contenders(peers, "conv", name, tuple(shape), amount=flops)
            yield Case("conv", f"{name} {shape}", "GFLOP/s", contenders)


def _directions(queue: cl.CommandQueue, shape: ConvShape) -> Iterator[tuple[str, list[Contender], float]]:
    """Of each direction its name, who computes it here, and the flops of a call."""
    image, kernel = (shape.height, shape.width), (shape.kernel, shape.kernel)
    window = Window((shape.stride, shape.stride), (shape.pad, shape.pad), (1, 1), 1)
    result = (shape.images, shape.features, *window.output(image, kernel))
    sizes = (shape.images, shape.channels, *image), (shape.features, shape.channels, *kernel), result
    data = {
        dtype: [random_tensor(queue, size, dtype, seed) for seed, size in enumerate(sizes)]
        for dtype in dtypes_of(queue)
    }
    flops = 2.0 * prod(result) * shape.channels * shape.kernel**2  # two for each tap of each result
    x, w, _ = data["float32"]
    netcl = timed(partial(netcl_conv2d, x, w, stride=shape.stride, pad=shape.pad), queue.finish)
    directions: dict[str, Callable[..., Tensor]] = {
        "forward": lambda x, w, g, dtype: conv2d(x, w, window, out_dtype=dtype),
        "input-gradient": lambda x, w, g, dtype: conv2d_input_grad(g, w, image, window, out_dtype=dtype),
        "weight-gradient": lambda x, w, g, dtype: conv2d_weight_grad(x, g, kernel, window, out_dtype="float32"),
    }
    for name, compute in directions.items():
        turns = {dtype: timed(partial(compute, *tensors, dtype), queue.finish) for dtype, tensors in data.items()}
        yield name, _contenders(netcl if name == "forward" else None, turns, flops), flops

    def layer(x: Node, w: Node) -> Node:
        return ag.conv2d(x, w, stride=shape.stride, pad=shape.pad)

    yield "forward+backward", _as_layers_do(layer, data, 3 * flops, backward=True), 3 * flops


# ---------------------------------------------------------------------------------------------- attention


def attention_cases(queue: cl.CommandQueue, shape: tuple[int, ...], peers: Sequence[PeerProcess]) -> Iterator[Case]:
    """Causal attention over (B, H, T, D). Two products forward and five backward count, of pairs that are seen."""
    batch, heads, length, width = shape
    product = 2.0 * batch * heads * width * length * (length + 1) / 2
    data = {dtype: [random_tensor(queue, shape, dtype, seed) for seed in range(4)] for dtype in dtypes_of(queue)}

    def layer(q: Node, k: Node, v: Node) -> Node:
        return ag.flash_attention(q, k, v, causal=True)

    for name, flops in (("forward", 2 * product), ("forward+backward", 7 * product)):
        contenders = _as_layers_do(layer, data, flops, backward=name != "forward")
        contenders += peer_contenders(peers, "attention", name, shape, amount=flops)
        yield Case("attention", f"{name} causal, {'x'.join(map(str, shape))}", "GFLOP/s", contenders)
