"""The problem that an engine of depthwise convolution is chosen by, and its protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel
from clamp.ops.arguments import whole_number
from clamp.ops.engine import Engine

_BLOCK = 16  # as BLOCK in depthwise.clh
_UNITS_SUMMED = 256  # images, or bands of them, that a work-item adds up one by one, at most
_BLOCK_ELEMENTS = 32768  # elements of x that are worth reading in one go


@dataclass(frozen=True)
class Problem:
    """A depthwise convolution, or its gradients."""

    images: int
    channels: int  # images, channels: of input and result
    height: int
    width: int  # height, width: of the input's planes
    out_height: int
    out_width: int  # out_height, out_width: of the result's planes
    kernel_height: int
    kernel_width: int  # kernel_height, kernel_width: of the filters
    stride: int
    pad: int  # stride, pad: alike in both directions
    is_gradient: bool  # whether the gradients are wanted, not the result
    storage: tuple[str, str]  # storage types of input and filters
    device: Capabilities = field(repr=False)  # what the device can do

    @property
    def extents(self) -> tuple[int, ...]:
        """Arguments that every kernel takes."""
        return (
            self.channels, self.height, self.width, self.out_height, self.out_width,
            self.kernel_height, self.kernel_width, self.pad,
        )  # fmt: skip

    @property
    def taps(self) -> int:
        """Elements of a filter."""
        return self.kernel_height * self.kernel_width

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of the result."""
        return self.images, self.channels, self.out_height, self.out_width

    @property
    def channel_block(self) -> int:
        """Channels that a work-item of gradients takes: enough for long reads, and work for every core."""
        fair = self.channels // (4 * self.device.compute_units)
        return max(1, min(_BLOCK, fair, _BLOCK_ELEMENTS // (self.height * self.width)))

    def parts(self, units: int, sums: int) -> tuple[int, int]:
        """(units of a part, parts): the spans that units adding to ``sums`` sums are cut into, for every core."""
        wanted = -(-(4 if self.device.is_cpu else 16) * self.device.compute_units // sums)
        each = min(-(-units // min(max(wanted, 1), units)), _UNITS_SUMMED)
        return each, -(-units // each)


class DepthwiseEngine(Engine[Problem], Protocol):
    """An engine of depthwise convolution. No tensor that it is given is empty."""

    def forward(self, problem: Problem, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """Writes the result over y."""

    def backward(
        self, problem: Problem, x: Tensor, w: Tensor, grad: Tensor, dx: Tensor | None, with_weight: bool
    ) -> Tensor | None:
        """Writes dx, if there is one; returns the sums of each part of the weight's gradient, if wanted.

        Returns:
            (parts, channels, taps) in float32.
        """


def problem_of(x: Tensor, w: Tensor, stride: int, pad: int, *, is_gradient: bool) -> Problem:
    """The convolution of x with the filters w, or its gradients."""
    of_x, of_w = tuple(x.shape), tuple(w.shape)
    if len(of_x) != 4 or len(of_w) != 4 or of_w[0] != of_x[1] or of_w[1] != 1:
        raise ValueError(f"depthwise_conv2d takes x (N, C, H, W) and w (C, 1, KH, KW), got {of_x} and {of_w}")
    instead = "one number for both directions; conv2d with groups takes two"
    stride = whole_number("depthwise_conv2d", "stride", stride, 1, instead)
    pad = whole_number("depthwise_conv2d", "pad", pad, 0, instead)
    height, width = (extent + 2 * pad - size for extent, size in zip(of_x[2:], of_w[2:], strict=True))
    if min(height, width) < 0 or min(of_w[2:]) < 1:
        raise ValueError(
            f"depthwise_conv2d: filters of {of_w[2:]} do not fit into planes of {of_x[2:]} padded by {pad}"
        )
    extents = (*of_x, height // stride + 1, width // stride + 1, *of_w[2:])
    storage = (bridge.STORAGE[x.dtype], bridge.STORAGE[w.dtype])
    return Problem(*extents, stride, pad, is_gradient, storage, capabilities(x.queue))


def both_gradients(
    kernel: Kernel, problem: Problem, x: Tensor, w: Tensor, grad: Tensor, dx: Tensor | None, with_weight: bool,
    units: int, numbers: tuple[int, ...], **macros: object,
) -> Tensor | None:  # fmt: skip
    """Launches a kernel that computes the gradients by input and weight in one pass; see `DepthwiseEngine.backward`.

    Args:
        units: images, or bands of them, each of which a work-item goes through as a whole.
        numbers: what the kernel takes after its common arguments.
    """
    each, parts = problem.parts(units, problem.channels)
    block = problem.channel_block
    sums = bridge.empty(x.queue, (parts, problem.channels, problem.taps), "float32") if with_weight else None
    kernel(
        x.queue, (-(-problem.channels // block) * parts,), (1,),
        x, grad, w, grad if dx is None else dx, x if sums is None else sums,
        x.size, grad.size, units, each, block, *numbers,
        INPUT_GRADIENT=int(dx is not None), WEIGHT_GRADIENT=int(with_weight), **macros,
    )  # fmt: skip
    return sums
