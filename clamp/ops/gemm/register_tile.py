"""The part of a product that CPU devices hold in registers (kernels/register_tile.clh)."""

from __future__ import annotations

from dataclasses import dataclass

import pyopencl as cl

from clamp.opencl.device import capabilities


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
