"""Resizing of images (nearest neighbour, bilinear), and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel, Prepared
from clamp.ops.launch import launch

UPSAMPLE_FORWARD = Kernel("upsample.cl", "upsample_forward", "X Y")
UPSAMPLE_BACKWARD = Kernel("upsample.cl", "upsample_backward", "X Y")

MODES = ("nearest", "bilinear")

_STRIP_CPU, _STRIP_GPU = 256, 32  # columns of a unit
_WORTH_CPU = 4096  # elements that are worth a work-item of their own
_tables = Prepared(1024)  # (context, inputs, outputs, mode, align_corners) -> context and device buffer


def upsample(
    x: Tensor, size: Sequence[int], mode: str = "nearest", align_corners: bool = False, *, out_dtype: str
) -> Tensor:
    """x (N, C, H, W) resized to (N, C, *size).

    Output o of an axis of ``inputs`` elements lies at ``(o + 0.5) * inputs / outputs - 0.5`` (not below 0), with
    ``align_corners`` at ``o * (inputs - 1) / (outputs - 1)``; the nearest neighbour is element
    ``int(o * inputs / outputs)``, computed in float32. PyTorch's conventions, and netcl's.
    """
    _check(x.shape, size, mode)
    out = bridge.empty(x.queue, (*x.shape[:2], *size), out_dtype)
    _run(UPSAMPLE_FORWARD, x, out, tuple(x.shape), tuple(size), out.shape[2:], mode, align_corners)
    return out


def upsample_backward(
    grad: Tensor, shape: Sequence[int], mode: str = "nearest", align_corners: bool = False, *, out_dtype: str
) -> Tensor:
    """Gradient of ``upsample`` of an input of this shape: every input element gathers from the outputs that read it."""
    if len(grad.shape) != 4 or tuple(grad.shape[:2]) != tuple(shape[:2]):
        raise ValueError(f"upsample: gradient of shape {grad.shape} for an input of shape {tuple(shape)}")
    size = tuple(grad.shape[2:])
    _check(shape, size, mode)
    out = bridge.empty(grad.queue, shape, out_dtype)
    _run(UPSAMPLE_BACKWARD, grad, out, tuple(shape), size, out.shape[2:], mode, align_corners)
    return out


def _check(shape: Sequence[int], size: Sequence[int], mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"unsupported upsample mode {mode!r}, expected one of {MODES}")
    if len(shape) != 4:
        raise ValueError(f"upsample expects a 4D NCHW tensor, got shape {tuple(shape)}")
    if len(size) != 2 or min(size) <= 0:
        raise ValueError(f"invalid output size {tuple(size)}: upsample needs a positive height and width")
    if 0 in shape[2:]:
        raise ValueError(f"upsample: an input of shape {tuple(shape)} has no pixels to interpolate")


def _run(
    kernel: Kernel, x: Tensor, y: Tensor, shape: Sequence[int], size: Sequence[int], written: Sequence[int],
    mode: str, align_corners: bool,
) -> None:  # fmt: skip
    """Launches a kernel that reads x and writes y, whose planes have the extents ``written``."""
    if y.size == 0:
        return
    bilinear = mode == "bilinear"
    align_corners = align_corners and bilinear
    (h, w), (oh, ow) = shape[2:], size
    strip, band, bands, strips, each, units = _plan(x.queue, shape[0] * shape[1], *written)
    kernel(
        x.queue, *launch(x.queue, -(-units // each)), x, y,
        _table(x.queue.context, h, oh, mode, align_corners), _table(x.queue.context, w, ow, mode, align_corners),
        h, w, oh, ow, band, bands, strips, each, units,
        STRIP=strip, BILINEAR=int(bilinear), DOUBLE=int(ow == 2 * w and not align_corners),
    )  # fmt: skip


def _plan(queue: cl.CommandQueue, planes: int, rows: int, columns: int) -> tuple[int, int, int, int, int, int]:
    """Division of the planes that a launch writes into units (kernels/upsample.cl): columns of a strip, rows of a band,
    bands, strips, units of a work-item, units."""
    device = capabilities(queue)
    strip, target = (_STRIP_CPU, 4) if device.is_cpu else (_STRIP_GPU, 256)
    target *= device.compute_units
    strips = -(-columns // strip)
    bands = max(1, min(-(-target // (planes * strips)), rows // 4))
    band = -(-rows // bands)
    bands = -(-rows // band)
    units = planes * strips * bands
    each = 1
    if device.is_cpu:
        worth = -(-_WORTH_CPU // (band * min(strip, columns)))
        each = max(1, min(worth, units // target))
    return strip, band, bands, strips, each, units


def _table(context: cl.Context, inputs: int, outputs: int, mode: str, align_corners: bool) -> cl.Buffer:
    """The table of one axis on the device, made once."""
    key = (context.int_ptr, inputs, outputs, mode, align_corners)
    if key not in _tables.known:
        flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
        words = np.concatenate(axis_table(inputs, outputs, mode, align_corners), dtype=np.int32)
        _tables.keep(key, (context, cl.Buffer(context, flags, hostbuf=words)))
    buffer: cl.Buffer = _tables.known[key][1]
    return buffer


def axis_table(
    inputs: int, outputs: int, mode: str, align_corners: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Positions of the outputs of an axis: index, fraction (the bits of a float32) and first (kernels/upsample.cl)."""
    o = np.arange(outputs)
    if mode == "nearest":
        # In float32 like netcl and PyTorch: a quotient rounded otherwise could pick another pixel.
        at = (o.astype(np.float32) * np.float32(inputs / outputs)).astype(np.float64)
    elif align_corners:
        at = o * (inputs - 1) / max(outputs - 1, 1)
    else:
        at = np.maximum((o + 0.5) * (inputs / outputs) - 0.5, 0.0)
    index = np.minimum(np.floor(at), inputs - 1)
    fraction = np.where(index < inputs - 1, at - index, 0.0).astype(np.float32)
    if mode == "nearest":
        fraction[:] = 0.0
    whole = fraction == 1.0  # rounded up
    index, fraction = index + whole, np.where(whole, np.float32(0.0), fraction)
    first = np.searchsorted(index, np.arange(inputs + 1))
    return index.astype(np.int32), fraction.view(np.int32), first.astype(np.int32)
