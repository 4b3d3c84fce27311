"""Launches over many tensors (kernels/slots.clh): what they read, how many a launch takes, the tiles that it goes
through, and what is done where some of several launches are made and one is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.launch import pieces_for

T = TypeVar("T")

_SLOTS = 100  # tensors a launch, at most
_TILE_CPU = 65536  # elements a work-group of one work-item
_TILE_CPU_SMALLEST = 1024
_TILES_PER_CORE = 4  # smaller tensors use smaller tiles until every core has this many
_TILE_GPU = 8192  # elements a work-group
GROUP_GPU = 64
_OTHER_ARGUMENTS_BYTES = 24  # of a launch that looks at tensors: tile table, results and where its rows begin
_TILE = np.dtype([("begin", np.uint64), ("tensor", np.uint32), ("count", np.uint32)])


@dataclass(frozen=True)
class TensorTiles:
    """The tiles of tensors of some sizes."""

    table: cl.Buffer  # the tiles on the device
    grid: tuple[tuple[int], tuple[int]]  # global and local size of a launch with a work-group a tile


def slots_for(queue: cl.CommandQueue, count: int, pointers: int, other_bytes: int) -> int:
    """Tensors that a launch takes, a multiple of 10: as many as there are, or as it can take, for all of several.

    A driver is given every argument in every launch, so that a small model pays for those that it does not use.

    Args:
        count: how many there are.
        pointers: arguments a tensor.
        other_bytes: of the arguments besides.
    """
    device = capabilities(queue)
    most = _SLOTS
    # PoCL states the least that OpenCL allows, 1024 bytes, but hands over arguments of any number.
    if not device.is_cpu:
        fitting = (device.max_parameter_bytes - other_bytes) // (8 * pointers)
        most = max(10, min(_SLOTS, fitting // 10 * 10))
    return min(most, -(-count // 10) * 10)


def macros_of(queue: cl.CommandQueue) -> dict[str, object]:
    """Macros by which the queue's device goes through tensors element by element (kernels/slots.clh, pieces.clh)."""
    device = capabilities(queue)
    return {"PIECES": pieces_for(queue), **({"STREAMS": device.streams} if device.is_cpu else {})}


def require_readable(function: str, tensors: Sequence[Tensor]) -> None:
    """Raises TypeError for a tensor that no such launch reads: of no floating dtype, or on netcl's numpy backend."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in bridge.STORAGE:
            raise TypeError(f"{function}: tensors[{index}] is {tensor.dtype}; float32, float16 or bfloat16 is needed")
        if not bridge.on_device(tensor):
            raise TypeError(f"{function}: tensors[{index}] is on netcl's numpy backend; it must be on an OpenCL device")


class Batch(NamedTuple):
    """Tensors of one queue and storage type that one launch reads."""

    indices: list[int]  # which of all they are
    tensors: list[Tensor]
    tiles: TensorTiles
    arguments: list[Tensor]  # of the kernel: the tensors, and one of them again for each slot left over
    macros: dict[str, object]  # storage type, and how many slots

    @property
    def groups(self) -> int:
        """Work-groups of the launch, one a tile."""
        (items,), (group,) = self.tiles.grid
        return items // group

    def run(self, kernel: Kernel, *args: Any, **macros: object) -> None:
        """Launches a kernel that takes the tiles, ``args``, and the tensors."""
        queue, (sizes, (group,)) = self.tensors[0].queue, self.tiles.grid
        built = {**self.macros, "WG": group, "PIECES": pieces_for(queue), **macros}
        kernel(queue, sizes, (group,), self.tiles.table, *args, *self.arguments, **built)


def batches(tensors: Sequence[Tensor]) -> Iterator[Batch]:
    """Yields the tensors of each launch of a kernel that only reads them, and takes few arguments besides."""
    by_storage: dict[tuple[cl.CommandQueue, str], list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_storage.setdefault((tensor.queue, bridge.STORAGE[tensor.dtype]), []).append(index)
    for (queue, storage), same in by_storage.items():
        slots = slots_for(queue, len(same), 1, _OTHER_ARGUMENTS_BYTES)
        for start in range(0, len(same), slots):
            indices = same[start : start + slots]
            these = [tensors[index] for index in indices]
            tiles = tiles_of(queue, tuple([tensor.size for tensor in these]))
            yield Batch(indices, these, tiles, filled(these, slots), {"X_T": storage, "DECADES": slots // 10})


def filled(tensors: Sequence[T], slots: int) -> list[T]:
    """The tensors and, since a kernel wants all of its arguments, the first one again for the slots left over."""
    return [*tensors, *list(tensors[:1]) * (slots - len(tensors))]


def open_slots(count: int, slots: int, tiles: TensorTiles) -> list[Any]:
    """Arguments of a launch that is bound: ``...`` for so many tensors, and any buffer for the slots left over, which
    have no tiles."""
    return [*[...] * count, *[tiles.table] * (slots - count)]


def in_turn(pieces: list[Callable[[], Any]]) -> None:
    """Runs what belongs together, each of which happens or raises, one after the other, and takes it off the list.

    What the first ones have written cannot be undone: a later one that fails is tried once more. If that fails too, the
    error is raised, and the list has what is left to be done. Where the first one fails, nothing has happened.
    """
    has_begun = False
    while pieces:
        try:
            pieces[0]()
        except Exception:
            if not has_begun:
                raise
            pieces[0]()
        del pieces[0]
        has_begun = True


def tiles_of(queue: cl.CommandQueue, sizes: tuple[int, ...]) -> TensorTiles:
    """The tiles of tensors of these sizes, one of which is not 0."""
    table, tiles = _tile_table(queue.context, _tile_elements(queue, sum(sizes)), sizes)
    group = 1 if capabilities(queue).is_cpu else GROUP_GPU
    return TensorTiles(table, ((tiles * group,), (group,)))


def _tile_elements(queue: cl.CommandQueue, total: int) -> int:
    """Elements a tile should have when there are ``total`` in all."""
    device = capabilities(queue)
    if not device.is_cpu:
        return _TILE_GPU
    tile = _TILE_CPU
    while tile > _TILE_CPU_SMALLEST and total < tile * _TILES_PER_CORE * device.compute_units:
        tile //= 2
    return tile


@lru_cache(maxsize=64)  # a model has one set of sizes, or a few; a table is 16 bytes a tile
def _tile_table(context: cl.Context, tile: int, sizes: tuple[int, ...]) -> tuple[cl.Buffer, int]:
    """The tiles of tensors of these sizes on the device, and how many there are."""
    tiles = np.concatenate(list(_tiles(tile, sizes)))
    # Any fixed order does that spreads the tiles of a large tensor.
    tiles = np.random.default_rng(0).permutation(tiles)
    flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
    return cl.Buffer(context, flags, hostbuf=tiles), len(tiles)


def _tiles(tile: int, sizes: tuple[int, ...]) -> Iterator[np.ndarray[Any, np.dtype[np.void]]]:
    for tensor, size in enumerate(sizes):
        begin = np.arange(0, size, tile, dtype=np.uint64)
        tiles = np.empty(len(begin), _TILE)
        tiles["begin"] = begin
        tiles["tensor"] = tensor
        tiles["count"] = np.minimum(np.uint64(size) - begin, np.uint64(tile))
        yield tiles
