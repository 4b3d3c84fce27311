"""A border around the planes of NCHW tensors, and its gradient."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.arguments import require_gradient, require_nchw
from clamp.ops.launch import launch, plan_rows

PAD_ROWS = Kernel("pad.cl", "pad_rows", "X Y")
PAD_ELEMENTS = Kernel("pad.cl", "pad_elements", "X Y")
PAD_ROWS_BACKWARD = Kernel("pad.cl", "pad_rows_backward", "G DX")
PAD_ELEMENTS_BACKWARD = Kernel("pad.cl", "pad_elements_backward", "G DX")

MODES = ("zero", "reflect")


def pad2d(x: Tensor, pad: int, mode: str = "zero", *, out_dtype: str) -> Tensor:
    """x with ``pad`` elements more on each side of its planes: (N, C, H, W) -> (N, C, H + 2 pad, W + 2 pad).

    ``"reflect"`` mirrors the plane with its edge (numpy's ``"symmetric"``).
    """
    n, c, height, width = _check(tuple(x.shape), pad, mode)
    out = bridge.empty(x.queue, (n, c, height + 2 * pad, width + 2 * pad), out_dtype)
    _run((PAD_ROWS, PAD_ELEMENTS), x, out, (height, width, pad), mode)
    return out


def pad2d_backward(grad: Tensor, shape: tuple[int, ...], pad: int, mode: str = "zero", *, out_dtype: str) -> Tensor:
    """Gradient of ``pad2d`` of a tensor of this shape; that of elements that are mirrored is summed in fp32."""
    n, c, height, width = _check(shape, pad, mode)
    require_gradient("pad2d", grad, (n, c, height + 2 * pad, width + 2 * pad))
    out = bridge.empty(grad.queue, shape, out_dtype)
    _run((PAD_ROWS_BACKWARD, PAD_ELEMENTS_BACKWARD), grad, out, (height, width, pad), mode)
    return out


def _check(shape: tuple[int, ...], pad: int, mode: str) -> tuple[int, int, int, int]:
    require_nchw("pad2d", shape)
    if mode not in MODES:
        raise ValueError(f"pad2d: mode must be one of {MODES}, got {mode!r}")
    if pad < 0 or (mode == "reflect" and pad > min(shape[2:])):
        raise ValueError(f"pad2d: a mirrored border is at most as wide as the planes {shape[2:]}, got pad={pad}")
    n, c, height, width = shape
    return n, c, height, width


def _run(kernels: tuple[Kernel, Kernel], source: Tensor, out: Tensor, extents: tuple[int, int, int], mode: str) -> None:
    """Launches the kernel of rows or that of elements."""
    if out.size == 0:
        return
    queue, (by_rows, by_elements), reflect = out.queue, kernels, int(mode == "reflect")
    if capabilities(queue).is_cpu:
        row = out.shape[3]
        rows = out.size // row
        plan = plan_rows(queue, rows, row)
        by_rows(queue, *plan.sizes, source, out, source.size, rows, plan.each, *extents, REFLECT=reflect)
    else:
        by_elements(queue, *launch(queue, out.size), source, out, out.size, 1, *extents, REFLECT=reflect)
