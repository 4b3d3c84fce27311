"""What is timed of convolutions: forward, each gradient, and both ways as a user's layer runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import pyopencl as cl
from netcl import autograd as ag
from netcl.ops.conv2d import conv2d as netcl_conv2d

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from clamp.cli.bench.cases.contenders import Case, Contender, dtypes_of, peer_contenders, random_tensor
from clamp.cli.bench.peers import PeerProcess
from clamp.cli.bench.timing import Turn, timed
from clamp.ops.conv import Window, conv2d, conv2d_input_grad, conv2d_weight_grad


@dataclass(frozen=True)
class ConvShape:
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

    @property
    def window(self) -> Window:
        """The geometry, for `clamp.ops.conv`."""
        return Window((self.stride, self.stride), (self.pad, self.pad), (1, 1), 1)

    @property
    def output(self) -> tuple[int, int]:
        """Height and width of the result."""
        return self.window.output((self.height, self.width), (self.kernel, self.kernel))

    @property
    def flops(self) -> float:
        """Of one direction: a multiplication and an addition for each tap of each result."""
        taps = self.channels * self.kernel**2
        return 2.0 * self.images * self.features * self.output[0] * self.output[1] * taps


def resnet_shapes(images: int) -> tuple[ConvShape, ...]:
    """The convolutions of a ResNet's stages."""
    return (
        ConvShape(images, 64, 56, 56, 64, 3, 1, 1),
        ConvShape(images, 128, 28, 28, 128, 3, 1, 1),
        ConvShape(images, 64, 56, 56, 128, 3, 2, 1),
        ConvShape(images, 256, 14, 14, 256, 1, 1, 0),
    )


def resnet18_shapes(images: int) -> Iterator[ConvShape]:
    """Every convolution of a ResNet-18 on images of 224 x 224, each once."""
    yield ConvShape(images, 3, 224, 224, 64, 7, 2, 3)
    yield ConvShape(images, 64, 56, 56, 64, 3, 1, 1)
    for channels, size in ((64, 56), (128, 28), (256, 14)):
        yield ConvShape(images, channels, size, size, 2 * channels, 3, 2, 1)
        yield ConvShape(images, channels, size, size, 2 * channels, 1, 2, 0)
        yield ConvShape(images, 2 * channels, size // 2, size // 2, 2 * channels, 3, 1, 1)


def one_shape(images: int) -> tuple[ConvShape, ...]:
    """A small one, to try the command: netcl compiles and tries a dozen kernels for each shape."""
    return (ConvShape(images, 4, 6, 6, 8, 3, 2, 1),)


SHAPES = {"few": resnet_shapes, "resnet18": resnet18_shapes, "one": one_shape}


def conv_cases(queue: cl.CommandQueue, shapes: Iterable[ConvShape], peers: Sequence[PeerProcess]) -> Iterator[Case]:
    """Every direction of convolutions."""
    for shape in shapes:
        yield from _directions(queue, shape, peers)


def _directions(queue: cl.CommandQueue, shape: ConvShape, peers: Sequence[PeerProcess]) -> Iterator[Case]:
    data = {dtype: _tensors(queue, shape, dtype) for dtype in dtypes_of(queue)}
    x, w, g = data["float32"]
    image, window = (shape.height, shape.width), shape.window
    both = timed(partial(_forward_and_backward, x, w, g, shape), queue.finish)
    netcls: dict[str, Turn] = {
        "forward": timed(partial(netcl_conv2d, x, w, stride=shape.stride, pad=shape.pad), queue.finish),
        "forward+backward": both,
    }
    directions: dict[str, Callable[[Tensor, Tensor, Tensor, str], Callable[[], object]]] = {
        "forward": lambda x, w, g, dtype: partial(conv2d, x, w, window, out_dtype=dtype),
        "input-gradient": lambda x, w, g, dtype: partial(conv2d_input_grad, g, w, image, window, out_dtype=dtype),
        "weight-gradient": lambda x, w, g, dtype: partial(
            conv2d_weight_grad, x, g, (shape.kernel, shape.kernel), window, out_dtype="float32"
        ),
    }
    for name, make in directions.items():
        contenders = [Contender("netcl", netcls[name], shape.flops, is_baseline=True)] if name in netcls else []
        for dtype, tensors in data.items():
            turn = timed(make(*tensors, dtype), queue.finish)
            contenders.append(Contender(f"clamp {dtype}", turn, shape.flops))
        contenders += _peers(peers, name, shape, shape.flops)
        yield Case("conv", f"{name} {shape}", "GFLOP/s", contenders)
    contenders = [Contender("netcl", both, 3 * shape.flops, is_baseline=True)]
    contenders += [
        Contender(f"clamp {dtype}", partial(_turn_under_amp, x, w, tensors[2], shape, dtype), 3 * shape.flops)
        for dtype, tensors in data.items()
    ]
    contenders += _peers(peers, "forward+backward", shape, 3 * shape.flops)
    yield Case("conv", f"forward+backward {shape}", "GFLOP/s", contenders)


def _tensors(queue: cl.CommandQueue, shape: ConvShape, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Images, weights and a gradient of the result."""
    x = random_tensor(queue, (shape.images, shape.channels, shape.height, shape.width), dtype)
    w = random_tensor(queue, (shape.features, shape.channels, shape.kernel, shape.kernel), dtype, 1)
    return x, w, random_tensor(queue, (shape.images, shape.features, *shape.output), dtype, 2)


def _peers(peers: Sequence[PeerProcess], direction: str, shape: ConvShape, flops: float) -> list[Contender]:
    numbers = (shape.images, shape.channels, shape.height, shape.width, *astuple(shape)[4:])
    return peer_contenders(peers, "conv", direction, *map(str, numbers), amount=flops)


def _forward_and_backward(x: Tensor, w: Tensor, g: Tensor, shape: ConvShape) -> None:
    """As a layer does it: a node, then its gradients for the images and for the weights."""
    for tensor in (x, w):
        tensor.requires_grad = True
        tensor.grad = None
    images, weights = (Node(value=tensor, requires_grad=True) for tensor in (x, w))
    Tape().backward(ag.conv2d(images, weights, stride=shape.stride, pad=shape.pad), g)


def _turn_under_amp(x: Tensor, w: Tensor, g: Tensor, shape: ConvShape, dtype: str, calls: int) -> list[float]:
    with amp.init(dtype=dtype):
        return timed(partial(_forward_and_backward, x, w, g, shape), x.queue.finish)(calls)
