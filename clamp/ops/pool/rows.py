"""Pooling on CPU devices, row by row, with rows split into phases (kernels/pool_rows.cl)."""

from __future__ import annotations

from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.engine import on_cpus
from clamp.ops.launch import plan_rows
from clamp.ops.pool.problem import Problem

POOL = Kernel("pool_rows.cl", "pool_rows", "X Y")
MAX_BACKWARD = Kernel("pool_rows.cl", "max_pool_tiles_backward", "X G DX")
AVG_BACKWARD = Kernel("pool_rows.cl", "avg_pool_rows_backward", "G DX")

NAME = "rows"
TAKES = "windows that fit a line of 2048 elements"
IN_WORDS = "rows split into phases (windows that fit a line of 2048)"
pays = on_cpus

_LINE = 2048  # as LINE in pool_rows.cl
_LINES = 8  # as LINES in pool_rows.cl
_TILE = 4096  # as TILE in pool_rows.cl
_TILE_ELEMENTS = 16384  # elements of a work-item in the gradient of maxima


def fits(problem: Problem) -> bool:
    """Windows of which 16 beside each other fit into a line; for the gradient of maxima a few rows of them."""
    if not problem.is_gradient:
        return _fits_line(problem, _columns(problem))
    return _maxima_tile(problem) is not None if problem.is_max else _means_tile(problem) >= 16


def forward(problem: Problem, x: Tensor, y: Tensor) -> None:
    """Writes the maxima or means over y."""
    tile = _columns(problem)
    rows = problem.planes * problem.out_height
    plan = plan_rows(x.queue, rows, problem.out_width * problem.stride)
    pitch = tile + problem.margin + 32
    lines = min(_LINES, max(_LINE // (pitch * problem.stride), 1)) if tile >= problem.out_width else 1
    POOL(
        x.queue, (plan.groups,), (1,), x, y, x.size, rows, plan.each, *problem.extents, tile, pitch, lines,
        problem.scale, MAX=int(problem.is_max), **problem.macros,
    )  # fmt: skip


def max_backward(problem: Problem, x: Tensor, grad: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the maxima over dx."""
    found = _maxima_tile(problem)
    assert found is not None, "the engine does not fit"
    band, tile = found
    bands, across = -(-problem.height // band), -(-problem.groups // tile)
    tiles = problem.planes * bands * across
    each = plan_rows(x.queue, tiles, min(band * tile * problem.stride, _TILE_ELEMENTS)).each
    MAX_BACKWARD(
        x.queue, (-(-tiles // each),), (1,), x, grad, dx, x.size, grad.size, tiles, each, *problem.extents, band, tile,
        MAX=1, **problem.macros,
    )  # fmt: skip


def avg_backward(problem: Problem, grad: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the means over dx."""
    tile = _means_tile(problem)
    rows = problem.planes * problem.height
    plan = plan_rows(grad.queue, rows, problem.width)
    pitch = tile + problem.margin + 32
    lines = min(_LINES, max(_LINE // pitch, 1)) if tile >= problem.groups else 1
    AVG_BACKWARD(
        grad.queue, (plan.groups,), (1,), grad, dx, grad.size, rows, plan.each, *problem.extents, tile, pitch, lines,
        problem.scale, MAX=0, **problem.macros,
    )  # fmt: skip


def _columns(problem: Problem) -> int:
    """Windows beside each other that are computed at a time: as many as fit into a line, at least 16."""
    tile = -(-problem.out_width // 16) * 16
    while tile > 16 and not _fits_line(problem, tile):
        tile = tile // 32 * 16
    return tile


def _means_tile(problem: Problem) -> int:
    """Groups of columns of a line of the gradient of means; with fewer than 16 none fits."""
    return min(-(-problem.groups // 16) * 16, (_LINE - problem.margin - 32) // 16 * 16)


def _maxima_tile(problem: Problem) -> tuple[int, int] | None:
    """(rows, groups of columns) of a tile of the gradient of maxima; None where none fits."""
    halo = problem.size - 1
    for tile in (problem.groups, 512, 256, 64, 16):
        step = problem.margin + -(-tile // 16) * 16
        band = problem.height if problem.height * step <= _TILE else _TILE // step - 2 * halo
        has_rows = tile <= problem.groups and band >= min(2 * halo + 1, problem.height)
        if has_rows and _fits_line(problem, tile + problem.margin):
            return band, tile
    return None


def _fits_line(problem: Problem, count: int) -> bool:
    """Returns whether the columns of ``count`` windows, split into phases, fit into a line."""
    return problem.stride * (count + problem.margin + 32) + problem.size <= _LINE
