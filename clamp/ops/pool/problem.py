"""The problem that an engine of pooling is chosen by, and its protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities
from clamp.ops.arguments import require_nchw, whole_number
from clamp.ops.engine import Engine

_SPECIALIZED = ((2, 2), (3, 1), (3, 2))  # (kernel size, stride) that have a program of their own
_SQUARES = "one for both directions (the stride is 2 if you pass none)"


@dataclass(frozen=True)
class Problem:
    """A pooling, or its gradient."""

    planes: int  # images times channels
    height: int
    width: int  # height, width: of a plane of the input
    out_height: int
    out_width: int  # out_height, out_width: how many windows there are
    size: int
    stride: int  # size, stride: of the square windows
    is_max: bool  # whether the maximum of a window is taken, not the mean
    is_gradient: bool  # whether the gradient is wanted, not the result
    # storage types of what is read first (the input, or the gradient of a mean) and of what is written
    storage: tuple[str, str]
    device: Capabilities = field(repr=False)  # what the device can do

    @property
    def extents(self) -> tuple[int, int, int, int, int, int]:
        """Arguments that the kernels of pool_rows.cl and pool_elements.cl take."""
        return self.height, self.width, self.out_height, self.out_width, self.size, self.stride

    @property
    def scale(self) -> float:
        """Factor of the sum of a window, or of the maximum."""
        return 1.0 / self.size**2

    @property
    def margin(self) -> int:
        """Windows before its own that an element may belong to."""
        return (self.size - 1) // self.stride

    @property
    def groups(self) -> int:
        """Groups of ``stride`` columns in a row, the last perhaps incomplete."""
        return -(-self.width // self.stride)

    @property
    def macros(self) -> dict[str, int]:
        """Macros of the kernels that are compiled for common sizes."""
        known = (self.size, self.stride) in _SPECIALIZED
        return {"KERNEL": self.size, "STRIDE": self.stride} if known else {}


class PoolEngine(Engine[Problem], Protocol):
    """An engine of pooling. No tensor that it is given is empty."""

    def forward(self, problem: Problem, x: Tensor, y: Tensor) -> None:
        """Writes the maxima, which are of x's dtype, or the means over y."""

    def max_backward(self, problem: Problem, x: Tensor, grad: Tensor, dx: Tensor) -> None:
        """Writes the gradient of the maxima over dx."""

    def avg_backward(self, problem: Problem, grad: Tensor, dx: Tensor) -> None:
        """Writes the gradient of the means over dx."""


def problem_of(
    shape: tuple[int, ...], kernel_size: int, stride: int, dtypes: tuple[str, str], device: Capabilities,
    *, is_max: bool, is_gradient: bool = False,
) -> tuple[Problem, tuple[int, ...]]:  # fmt: skip
    """The windows that fit into the planes of a tensor of this shape, and the result's shape."""
    name = "max_pool2d" if is_max else "avg_pool2d"
    require_nchw(name, shape)
    kernel_size = whole_number(name, "kernel_size", kernel_size, 1, _SQUARES)
    stride = whole_number(name, "stride", stride, 1, _SQUARES)
    n, c, height, width = shape
    if kernel_size > min(height, width):
        raise ValueError(f"{name}: a window of {kernel_size} x {kernel_size} does not fit into planes of {shape[2:]}")
    out = ((height - kernel_size) // stride + 1, (width - kernel_size) // stride + 1)
    storage = (bridge.STORAGE[dtypes[0]], bridge.STORAGE[dtypes[1]])
    return Problem(n * c, height, width, *out, kernel_size, stride, is_max, is_gradient, storage, device), (n, c, *out)
