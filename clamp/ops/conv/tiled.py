"""The convolution of every device but CPUs: tiles in local memory (kernels/conv_tiled.cl)."""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel
from clamp.ops.cast import cast_into
from clamp.ops.conv.geometry import PARTIAL_FLOATS
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.stage import Source, Target, convolve_staged, slices, staged
from clamp.ops.conv.weights import PanelLayout, Weights
from clamp.ops.engine import always
from clamp.ops.gemm.plan import SquarePlan
from clamp.ops.gemm.problem import Epilogue
from clamp.ops.launch import index_type
from clamp.ops.reduce_to_shape import sum_axis

NAME = "tiled"
TAKES = "every convolution"
IN_WORDS = "tiles in local memory"
fits = pays = always  # whatever no other engine takes is computed here

_CONV = Kernel("conv_tiled.cl", "conv", "- X")
_WEIGHT_GRAD = Kernel("conv_tiled.cl", "weight_grad", "X - G")
_PLANS = tuple(SquarePlan(side, 4) for side in (16, 8, 4, 2, 1))
_GROUPS_PER_UNIT = 4  # work-groups that a compute unit should get
_MIN_CHUNK = 1024  # positions that are worth a work-group of their own


def convolve(problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue) -> None:
    """Writes a convolution or an input gradient over ``out``."""
    convolve_staged(_correlate, problem, x, weights, out, epilogue, by_rows=False)


def weight_gradient(problem: Problem, x: Tensor, grad: Tensor, out: Tensor, bias_dtype: str | None) -> Tensor | None:
    """Writes the gradient by the weights over ``out``."""
    queue, shape, groups, rows = x.queue, problem.forward, problem.window.groups, problem.features
    plan = _plan_of(capabilities(queue))
    side, tiles_k, tiles_m = plan.side, -(-problem.channels * shape.taps // plan.columns), -(-rows // plan.rows)
    wanted = _GROUPS_PER_UNIT * capabilities(queue).compute_units
    image = groups * rows * shape.positions  # elements of an image of gradients
    parts = slices(x, shape, x.dtype)
    columns = parts[0][1] * shape.positions
    most = min(wanted // (tiles_k * tiles_m * groups), columns // _MIN_CHUNK, PARTIAL_FLOATS // out.size)
    chunk = -(-columns // max(1, most))
    chunks = -(-columns // chunk)
    partial = bridge.empty(queue, (chunks * out.size,), "float32")
    grid = (tiles_k * side, tiles_m * side, chunks * groups)
    for first, (source,) in staged(x, parts, [shape], x.dtype, groups, problem.channels, by_rows=False):
        _WEIGHT_GRAD(
            queue, grid, (side, side, 1), source.tensor, source.offsets, grad, partial, first * image,
            *source.sizes(rows), image, chunk, groups, first > 0,
            INDEX=index_type(source.columns), **plan.macros,
        )  # fmt: skip
    cast_into(sum_axis(partial, 1, chunks, out.size, out.dtype), out)
    return None


def _plan_of(device: Capabilities) -> SquarePlan:
    """The largest that the device takes and whose tiles, with offsets, its local memory holds."""
    for plan in _PLANS:
        local_bytes = 2 * plan.k * (plan.rows + 1) * 4 + 8 * max(plan.rows, 2 * plan.k)
        if plan.threads <= device.max_work_group and local_bytes <= device.local_memory_bytes:
            return plan
    return _PLANS[-1]


def _correlate(source: Source, weights: Weights, target: Target) -> None:
    out, epilogue = target.out, target.epilogue
    plan = _plan_of(capabilities(out.queue))
    side, layout = plan.side, PanelLayout(plan.rows, 0, plan.k)
    grid = (-(-source.columns // plan.columns) * side, -(-weights.rows // plan.rows) * side, source.groups)
    _CONV(
        out.queue, grid, (side, side, 1), weights.panels(source.shape, layout), source.tensor,
        source.offsets, out, epilogue.bias_or(out), target.begin, *source.sizes(weights.rows),
        target.image, *epilogue.flags,
        INDEX=index_type(source.columns), **plan.macros, **epilogue.macros,
    )  # fmt: skip
