"""Sampling of images on a grid, affine grids and rotations, and their gradients.

PyTorch's ``grid_sample`` and ``affine_grid`` conventions, as netcl has them: bilinear, coordinates -1 .. 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.arguments import require_gradient
from clamp.ops.cast import cast
from clamp.ops.launch import launch
from clamp.ops.reduce import reduce_sum

GRID_SAMPLE = Kernel("grid.cl", "grid_sample", "X GRID Y")
GRID_SAMPLE_BACKWARD_GRID = Kernel("grid.cl", "grid_sample_backward_grid", "G X GRID Y")
GRID_SAMPLE_BACKWARD_INPUT = Kernel("grid.cl", "grid_sample_backward_input", "G GRID")
AFFINE_GRID = Kernel("grid.cl", "affine_grid", "X Y")
AFFINE_GRID_BACKWARD = Kernel("grid.cl", "affine_grid_backward", "G")
ROTATION = Kernel("grid.cl", "rotation", "X")
ROTATION_BACKWARD = Kernel("grid.cl", "rotation_backward", "G X Y")

PADDING_MODES = ("zeros", "border")

_WORTH_CPU = 1024  # positions times channels that are worth a work-item of their own
_SUMMED = 1024  # positions that may fall on one pixel before their sum is moved on
_CHANNELS_CPU = 8  # channels that share the search for the taps, where one work-item owns them


def grid_sample(
    x: Tensor, grid: Tensor, padding_mode: str = "zeros", align_corners: bool = False, *, out_dtype: str
) -> Tensor:
    """The image x (N, C, H, W) at the places that grid (N, OH, OW, 2) names, between its four neighbouring pixels.

    Places go across and down, -1 .. 1 from edge to edge of the image (with ``align_corners`` from centre to centre of
    its outer pixels). NaN samples NaN; what lies outside, however far, samples the padding.
    """
    positions, span, macros = _sampling(x.queue, x.shape, grid.shape, padding_mode)
    n, c, h, w = x.shape
    out = bridge.empty(x.queue, (n, c, *grid.shape[1:3]), out_dtype)
    if out.size == 0:
        return out
    spans = -(-positions // span)
    block = _block(x.queue, n * spans, c)
    blocks = -(-c // block)
    units = n * blocks * spans
    each = _each(x.queue, units, span * block)
    GRID_SAMPLE(
        x.queue, *launch(x.queue, -(-units // each)), x, grid, out, c, h, w, positions, int(align_corners), block,
        blocks, spans, each, units, **macros,
    )  # fmt: skip
    return out


def grid_sample_backward_grid(
    grad: Tensor, x: Tensor, grid: Tensor, padding_mode: str = "zeros", align_corners: bool = False, *, out_dtype: str
) -> Tensor:
    """Gradient of ``grid_sample`` with respect to its grid; summed over channels in fp32."""
    positions, span, macros = _sampling(x.queue, x.shape, grid.shape, padding_mode)
    require_gradient("grid_sample", grad, (*x.shape[:2], *grid.shape[1:3]))
    out = bridge.empty(x.queue, grid.shape, out_dtype)
    if out.size == 0:
        return out
    n, c, h, w = x.shape
    spans = -(-positions // span)
    each = _each(x.queue, n * spans, span * max(c, 1))
    GRID_SAMPLE_BACKWARD_GRID(
        x.queue, *launch(x.queue, -(-n * spans // each)), grad, x, grid, out, c, h, w, positions, int(align_corners),
        spans, each, n * spans, **macros,
    )  # fmt: skip
    return out


def grid_sample_backward_input(
    grad: Tensor, grid: Tensor, shape: Sequence[int], padding_mode: str = "zeros", align_corners: bool = False,
    *, out_dtype: str,
) -> Tensor:  # fmt: skip
    """Gradient of ``grid_sample`` with respect to its image, of this shape.

    Each band of rows of a few channels belongs to one work-item, which adds all positions up in their order: the
    same bits every time, without atomics, and nothing to sort. (Sorting positions by pixel would give a GPU more
    work-items, but needs several launches and room for every position.)
    """
    positions, _, macros = _sampling(grad.queue, shape, grid.shape, padding_mode)
    require_gradient("grid_sample", grad, (*shape[:2], *grid.shape[1:3]))
    out = bridge.empty(grad.queue, shape, "float32")
    if out.size:
        n, c, h, w = shape
        block, band = _ownership(grad.queue, n, c, h)
        blocks, bands = -(-c // block), -(-h // band)
        interval = max(_SUMMED, h * w)  # moving the sums on takes no longer than forming them
        if positions <= 2 * interval:
            interval, recent = positions, out
        else:
            recent = bridge.empty(grad.queue, shape, "float32")
        GRID_SAMPLE_BACKWARD_INPUT(
            grad.queue, *launch(grad.queue, n * blocks * bands), grad, grid, out, recent, interval, c, h, w, positions,
            int(align_corners), block, blocks, band, bands, n * blocks * bands,
            X_T=bridge.STORAGE[grad.dtype], **macros,
        )  # fmt: skip
    return cast(out, out_dtype)


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool = False, *, out_dtype: str) -> Tensor:
    """The grid that samples an image under affine maps theta, (N, 2, 3): each place is theta @ (across, down, 1).

    Args:
        size: (N, C, OH, OW) of what will be sampled; C does not count.
    """
    if len(theta.shape) != 3 or tuple(theta.shape[1:]) != (2, 3):
        raise ValueError(f"affine_grid expects theta shape (N, 2, 3), got {theta.shape}")
    if len(size) != 4:
        raise ValueError(f"affine_grid expects 4D target size (N, C, OH, OW), got {tuple(size)}")
    n, _, oh, ow = size
    if theta.shape[0] != n:
        raise ValueError(f"affine_grid: theta batch size {theta.shape[0]} != size[0] {n}")
    out = bridge.empty(theta.queue, (n, oh, ow, 2), out_dtype)
    if out.size == 0:
        return out
    each = _each(theta.queue, n * oh, 2 * ow)
    sizes = launch(theta.queue, -(-n * oh // each))
    AFFINE_GRID(theta.queue, *sizes, theta, out, oh, ow, int(align_corners), each, n * oh)
    return out


def affine_grid_backward(grad: Tensor, align_corners: bool = False, *, out_dtype: str) -> Tensor:
    """Gradient of ``affine_grid`` with respect to theta, (N, 2, 3); summed in fp32 in a fixed order."""
    if len(grad.shape) != 4 or grad.shape[3] != 2:
        raise ValueError(f"affine_grid: gradient of shape {grad.shape}, expected (N, OH, OW, 2)")
    n, oh, ow, _ = grad.shape
    if grad.size == 0:
        return bridge.zeros(grad.queue, (n, 2, 3), out_dtype)
    device = capabilities(grad.queue)
    parts = min(oh, max(1, (4 if device.is_cpu else 64) * device.compute_units // n))
    rows = -(-oh // parts)
    parts = -(-oh // rows)
    sums = bridge.empty(grad.queue, (n, parts, 6), "float32")
    sizes = launch(grad.queue, n * parts)
    AFFINE_GRID_BACKWARD(grad.queue, *sizes, grad, sums, oh, ow, int(align_corners), rows, parts, n * parts)
    return bridge.view(reduce_sum(sums, 1, out_dtype=out_dtype), (n, 2, 3))


def rotation(angles: Tensor, n: int) -> Tensor:
    """The maps (N, 2, 3), float32, that turn n images about their centres by one angle in radians, or n of them."""
    if angles.size not in (1, n):
        raise ValueError(f"rotate_2d_grid: {angles.size} angles for {n} images; pass one, or one for each")
    theta = bridge.empty(angles.queue, (n, 2, 3), "float32")
    if n:
        ROTATION(angles.queue, *launch(angles.queue, n), angles, theta, angles.size, n)
    return theta


def rotation_backward(grad: Tensor, angles: Tensor, *, out_dtype: str) -> Tensor:
    """Gradient of ``rotation`` with respect to its angles, in their shape."""
    out = bridge.empty(angles.queue, angles.shape, out_dtype)
    if out.size:
        sizes = launch(angles.queue, angles.size)
        ROTATION_BACKWARD(angles.queue, *sizes, grad, angles, out, angles.size, grad.shape[0])
    return out


# ---------------------------------------------------------------------------------------------------- plans


def _sampling(
    queue: cl.CommandQueue, shape: Sequence[int], grid: Sequence[int], padding_mode: str
) -> tuple[int, int, dict[str, int]]:
    """Positions of an image, those that a work-item takes at a time, and macros of the kernels.

    Raises:
        ValueError: what cannot be sampled.
    """
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"unsupported padding_mode {padding_mode!r}, expected one of {PADDING_MODES}")
    if len(shape) != 4:
        raise ValueError(f"grid_sample expects 4D input (N, C, IH, IW), got {tuple(shape)}")
    if len(grid) != 4 or grid[3] != 2 or grid[0] != shape[0]:
        raise ValueError(f"grid_sample expects grid shape ({shape[0]}, OH, OW, 2), got {tuple(grid)}")
    if 0 in shape[2:] and 0 not in grid:
        raise ValueError(f"grid_sample: an input of shape {tuple(shape)} has no pixels to sample")
    if shape[2] * shape[3] >= 2**31:
        raise ValueError(f"grid_sample: planes of {shape[2]} x {shape[3]} elements are too large")
    span = 16 if capabilities(queue).is_cpu else 1
    return prod(grid[1:3]), span, {"BORDER": PADDING_MODES.index(padding_mode), "SPAN": span}


def _block(queue: cl.CommandQueue, spans: int, channels: int) -> int:
    """Channels of a unit of the forward pass: all, unless the positions alone leave work-items idle."""
    device = capabilities(queue)
    target = (4 if device.is_cpu else 1024) * device.compute_units
    return max(1, channels // max(1, min(channels, -(-target // spans))))


def _each(queue: cl.CommandQueue, units: int, size: int) -> int:
    """Units of ``size`` elements that a work-item takes one after the other."""
    device = capabilities(queue)
    if not device.is_cpu:
        return 1
    return max(1, min(-(-_WORTH_CPU // max(size, 1)), units // (4 * device.compute_units)))


def _ownership(queue: cl.CommandQueue, n: int, channels: int, rows: int) -> tuple[int, int]:
    """(channels, rows) that one work-item owns of the image's gradient.

    Every band of an image goes through all positions again, so there are no more bands than keep the device busy.
    """
    device = capabilities(queue)
    target = (2 if device.is_cpu else 64) * device.compute_units
    block = max(1, min(_CHANNELS_CPU, n * channels // target)) if device.is_cpu else 1
    bands = max(1, min(rows, -(-target // (n * -(-channels // block)))))
    return block, -(-rows // bands)
