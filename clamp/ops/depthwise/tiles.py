"""The depthwise convolution of CPU devices in tiles of planes (kernels/depthwise_forward.cl, depthwise_backward.cl)."""

from __future__ import annotations

from dataclasses import dataclass

from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.depthwise.problem import Problem, both_gradients
from clamp.ops.engine import on_cpus
from clamp.ops.launch import plan_rows

FORWARD = Kernel("depthwise_forward.cl", "forward_tiles", "X W B Y")
GRADIENT = Kernel("depthwise_backward.cl", "gradient_tiles", "X G W DX")

NAME = "tiles"
TAKES = "strides 1 and 2, filters of up to 64 taps"
IN_WORDS = "tiles of planes (strides 1 and 2, up to 64 taps)"
pays = on_cpus

_FRAME = 8192  # as FRAME in depthwise.clh
_TAPS = 64  # as TAPS in depthwise.clh
_SPILL = 32  # elements of a phase of the frame for what stores write beyond its end
_SPECIALIZED = (3,)  # filter sizes that have a program of their own
_WIDTHS = (512, 256, 128, 64, 32, 16)  # columns of a tile where a whole row is too long


@dataclass(frozen=True)
class _Tiles:
    """Division of planes into tiles."""

    band: int
    width: int  # band, width: rows and columns of a tile, in outputs or in groups of ``stride`` inputs
    across: int  # tiles beside each other
    pitch: int  # floats of a phase of a row of the frame
    count: int  # tiles altogether


def fits(problem: Problem) -> bool:
    """With short strides and small filters, where a few rows fit into a frame."""
    return _tiles(problem) is not None


def _tiles(problem: Problem) -> _Tiles | None:
    """The widest tiles of at least a few rows, of the result or, in groups of ``stride``, of the input's gradient."""
    stride = problem.stride
    if stride > 2 or problem.taps > _TAPS:
        return None
    height, width = problem.out_height, problem.out_width
    if problem.is_gradient:
        height, width = -(-problem.height // stride), -(-problem.width // stride)
    for columns in (width, *(narrow for narrow in _WIDTHS if narrow < width)):
        pitch = columns + (problem.kernel_width - 1) // stride + 1 + _SPILL
        if problem.is_gradient:
            band = _FRAME // pitch - (problem.kernel_height - 1) // stride - 1
        else:
            band = (_FRAME // (pitch * stride) - problem.kernel_height) // stride + 1
        if band >= min(8, height):
            band = min(band, height)
            across = -(-width // columns)
            count = problem.images * problem.channels * -(-height // band) * across
            return _Tiles(band, columns, across, pitch, count)
    return None


def _needed(problem: Problem) -> _Tiles:
    tiles = _tiles(problem)
    assert tiles is not None, "the engine does not fit"
    return tiles


def _macros(problem: Problem) -> dict[str, object]:
    """The stride, and the filter's size if it is a common one."""
    square = problem.kernel_height == problem.kernel_width in _SPECIALIZED
    return {"STRIDE": problem.stride, **({"KERNEL": problem.kernel_height} if square else {})}


def forward(problem: Problem, x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Writes the result over y."""
    tiles = _needed(problem)
    each = plan_rows(x.queue, tiles.count, tiles.band * tiles.width * problem.stride).each
    FORWARD(
        x.queue, (-(-tiles.count // each),), (1,),
        x, w, w if bias is None else bias, y, x.size, tiles.count, each, *problem.extents, tiles.band, tiles.width,
        tiles.pitch, BIAS=int(bias is not None), **_macros(problem),
    )  # fmt: skip


def backward(
    problem: Problem, x: Tensor, w: Tensor, grad: Tensor, dx: Tensor | None, with_weight: bool
) -> Tensor | None:
    """Writes dx, if there is one; returns partial sums of the weight's gradient, if wanted."""
    tiles = _needed(problem)
    return both_gradients(
        GRADIENT, problem, x, w, grad, dx, with_weight,
        tiles.count // (problem.channels * tiles.across),
        (*problem.extents, tiles.band, tiles.width, tiles.pitch),
        SHIFT=problem.pad % problem.stride, **_macros(problem),
    )  # fmt: skip
