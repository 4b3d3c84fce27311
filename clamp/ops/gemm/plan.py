"""Tiles of products: for a GPU's matrix units and without, and in the registers of CPUs (kernels/register_tile.clh)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias, TypeVar

import pyopencl as cl

from clamp.opencl.device import capabilities

_LEAST_SLICE = 256  # steps of k, so that adding the slices is little beside summing them (not measured)
_SLAB = 64  # columns that a warp stores at a time


@dataclass(frozen=True)
class Plan:
    """Tiles of a product on matrix units."""

    rows: int
    columns: int
    k: int  # rows, columns, k: the tile of C of a work-group, and the steps of k in local memory at a time
    stages: int  # how many such steps local memory holds
    warps: tuple[int, int]  # of a work-group, by rows and columns of C
    # whether operands must have lines that begin at multiples of 16 bytes: to gather elements takes registers that it
    # does not have
    aligned: bool = False
    lanes: int = 32  # work-items of a warp

    @cached_property
    def _name(self) -> str:
        """Asked for at each product."""
        return f"{self.rows}x{self.columns}x{self.k}, {self.stages} stages, {self.warps[0] * self.warps[1]} warps"

    def __str__(self) -> str:
        return self._name

    @property
    def threads(self) -> int:
        """Work-items of a work-group."""
        return self.lanes * self.warps[0] * self.warps[1]

    @property
    def local_memory_bytes(self) -> int:
        """Local memory of a work-group: the stages, or the slabs in which its warps' sums are put in order."""
        slabs = self.threads // self.lanes * 16 * (min(self.columns // self.warps[1], _SLAB) + 8) * 4
        return max(self.stages * (self.rows + self.columns) * self.k * 2, slabs)

    @property
    def macros(self) -> dict[str, int]:
        """The plan, for the kernel."""
        return {
            "TILE_M": self.rows, "TILE_N": self.columns, "TILE_K": self.k, "STAGES": self.stages,
            "WARPS_M": self.warps[0], "WARPS_N": self.warps[1],
        }  # fmt: skip


@dataclass(frozen=True)
class SquarePlan:
    """A square tile of C for a square work-group."""

    side: int  # work-items on a side of the work-group
    per_item: int  # rows and columns of C that a work-item computes
    k: int = 16  # steps of k in local memory at a time

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.k}, {self.threads} work-items"

    @property
    def rows(self) -> int:
        """Of the tile."""
        return self.side * self.per_item

    columns = rows

    @property
    def threads(self) -> int:
        """Work-items of a work-group."""
        return self.side**2

    @property
    def local_memory_bytes(self) -> int:
        """Local memory of a work-group: two stages of floats."""
        return 2 * (self.rows + self.columns) * self.k * 4

    @property
    def macros(self) -> dict[str, int]:
        """The plan, for the kernel."""
        return {"SIDE": self.side, "PER_ITEM": self.per_item, "TILE_K": self.k}


Tiling: TypeAlias = Plan | SquarePlan
T = TypeVar("T", Plan, SquarePlan)


def tiles_of(plan: Tiling, rows: int, columns: int) -> int:
    """Tiles of a matrix."""
    return -(-rows // plan.rows) * -(-columns // plan.columns)


def best_plan(plans: Sequence[T], rows: int, columns: int, matrices: int, units: int) -> T:
    """The largest that gives every compute unit a tile, if tiles are more than half full; otherwise the smallest."""
    for plan in plans:
        is_full = rows > plan.rows // 2 and columns > plan.columns // 2
        if is_full and tiles_of(plan, rows, columns) * matrices >= units:
            return plan
    return plans[-1]


def slices_of(tiles: int, k: int, units: int) -> int:
    """Into how many slices to cut k: several for a C of few tiles, the gradient of a small weight, say."""
    return max(1, min(units // tiles, k // _LEAST_SLICE))


def cut(k: int, slices: int, step: int) -> tuple[int, int]:
    """Returns the steps of k in a slice, a multiple of ``step``, and how many slices there are: at most ``slices``."""
    slice_k = max(-(-k // (slices * step)), 1) * step
    return slice_k, max(-(-k // slice_k), 1)


@dataclass(frozen=True)
class Tile:
    """The part of C held in registers."""

    rows: int
    columns: int


_TILE_AVX512 = Tile(12, 32)  # 24 sums in 32 registers of 16 floats
_TILE_NARROW = Tile(6, 16)  # 12 sums in 16 registers of 8 floats (AVX2), 24 in 32 of 4 (NEON)


def tile_of(queue: cl.CommandQueue) -> Tile:
    """The register tile for the queue's device."""
    return _TILE_AVX512 if capabilities(queue).float_vector_width >= 16 else _TILE_NARROW


def blocks_of(
    tiles: tuple[int, int], most: tuple[int, int], sides: tuple[int, int], batches: int, enough: int
) -> tuple[int, int, tuple[int, int, int]]:
    """Blocks of tiles of C, one for each work-item: as large as may be, but ``enough`` of them for every core.

    Args:
        tiles: of C, by rows and columns.
        most: of a block.
        sides: of a tile: of two sides of a block that could be halved, the longer one is.

    Returns:
        Tiles of a block by rows and by columns, and the blocks of all matrices.
    """
    (tiles_a, tiles_b), (side_a, side_b) = tiles, sides
    block_a, block_b = min(most[0], tiles_a), min(most[1], tiles_b)
    while True:
        grid = (-(-tiles_a // block_a), -(-tiles_b // block_b), batches)
        if prod(grid) >= enough or block_a * block_b == 1:
            return block_a, block_b, grid
        if block_b > 1 and block_b * side_b >= block_a * side_a:
            block_b = -(-block_b // 2)
        else:
            block_a = -(-block_a // 2)
