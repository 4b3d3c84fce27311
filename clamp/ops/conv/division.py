"""How a convolution is divided among the work-items of a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import pyopencl as cl

from clamp.opencl.device import capabilities

PARTIAL_FLOATS = 8 * 2**20  # of partial weight gradients


def deal(
    queue: cl.CommandQueue, panels_j: int, panels_m: int, groups: int, items_per_core: int
) -> tuple[tuple[int, int, int], int]:
    """How the panels of a convolution are dealt out: into how many shares of positions, of weights and of groups, and
    how many panels of weights are the most in a share. Weights are shared out only where there are too few positions,
    whose panels each work-item makes for itself."""
    items = items_per_core * capabilities(queue).compute_units
    shares_j = min(panels_j, max(1, items // groups))
    shares_m = min(panels_m, max(1, items // (panels_j * groups)))
    return (shares_j, shares_m, groups), -(-panels_m // shares_m)


@dataclass(frozen=True)
class Division:
    """How the positions and the panels of a weight gradient are divided among work-items.

    Attributes:
        each: positions of a chunk, whose sums are kept apart until the end.
        chunks: how many there are.
        block: positions that are read at a time; alike, or the last would be few.
        each_k: panels of a work-item.
    """

    each: int
    chunks: int
    block: int
    each_k: int


def divide(items: int, groups: int, columns: int, most: int, panels_k: int, floats: int, parts: int = 1) -> Division:
    """Into about ``items`` work-items.

    Args:
        columns: positions, of which ``most`` are read at a time.
        panels_k: panels, in at least so many ``parts``.
        floats: sums of a chunk.
    """
    chunks = max(1, min(-(-columns // most), -(-items // groups), PARTIAL_FLOATS // floats))
    each = -(-columns // chunks)
    chunks = -(-columns // each)
    parts = max(parts, min(panels_k, items // (groups * chunks)))
    return Division(each, chunks, -(-each // -(-each // most)), -(-panels_k // parts))
