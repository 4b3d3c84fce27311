"""One pass over many tensors: unscale, widen to float32, find and count inf and nan, in one launch for 100 tensors.

After NVIDIA apex's ``multi_tensor_apply``; OpenCL has no arrays of pointers, so the tensors are kernel arguments
(kernels/multi_tensor.cl draws it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel, Prepared
from clamp.ops.launch import pieces_for
from clamp.ops.slots import open_slots, slots_for, tiles_of

UNSCALE = Kernel("multi_tensor.cl", "unscale")
COUNT = Kernel("multi_tensor.cl", "count")

_plans = Prepared(1024)

Pair: TypeAlias = tuple[Tensor, Tensor, bool]  # source, target, whether they are one storage

_OTHER_ARGUMENTS_BYTES = 24  # tile table, state and multiplier


def unscale_(
    sources: Sequence[Tensor], targets: Sequence[Tensor], state: cl.Buffer, multiplier: cl.Buffer | None = None
) -> None:
    """``targets[i] = sources[i] / scale`` in float32, for every i, and notes in the state whether any is inf or nan.

    The scale's reciprocal is read on the device; the check looks at each element after the multiplication. All
    elements of all tensors are written, bad ones included. Storage that occurs several times (netcl hands one gradient
    buffer to both parents of an addition) is unscaled once. Enqueues ``ceil(n / 100)`` launches a source dtype and does
    not wait; a GPU whose launches take few argument bytes (1024 on some) needs ``ceil(n / 60)`` where targets are not
    the sources.

    Args:
        sources: float32, float16 or bfloat16, any shapes, all on one queue.
        targets: float32, of the same shapes; ``targets[i]`` may be ``sources[i]`` or share its buffer.
        state: a loss scale's state, in the queue's context. In word 1 bit 0 is set if a result is inf, bit 1 if
            one is nan.
        multiplier: word 0 is the float to multiply by; that of the state if not given.

    Raises:
        ValueError: the lengths, a shape, or the queues differ, or one target would get two results.
        TypeError: a dtype is not one of the above, or a tensor is on netcl's numpy backend.
            Nothing was changed if anything is raised.
    """
    _check(sources, targets)
    for kind, pairs in _by_kind(_distinct(sources, targets)).items():
        # The same storage for source and target is passed once, which leaves room for more tensors.
        in_place = all(same for _, _, same in pairs)
        slots = _slots(pairs[0][0].queue, in_place, len(pairs))
        for start in range(0, len(pairs), slots):
            _launch(pairs[start : start + slots], kind, in_place, slots, state, multiplier or state)


def check_(tensors: Sequence[Tensor], state: cl.Buffer) -> None:
    """Notes in the state whether any element of any tensor is inf or nan; ``unscale_`` without the division.

    Args:
        tensors: float32, float16 or bfloat16, any shapes, all on one queue.
        state: as for ``unscale_``.

    Raises:
        ValueError: the queues differ.
        TypeError: a dtype is not one of the above, or a tensor is on netcl's numpy backend.
    """
    _check_sources(tensors, "check_")
    for launch in _readings(tensors):
        _run(UNSCALE, launch, state, state, IN_PLACE=1, ONLY_CHECK=1)


def count_non_finite(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """How many elements of each tensor are inf, and how many nan. Waits for the device.

    Args:
        tensors: as for ``check_``.

    Raises:
        ValueError, TypeError: as ``check_``.
    """
    _check_sources(tensors, "count_non_finite")
    found: dict[int, tuple[int, int]] = {}
    for launch in _readings(tensors):
        counts = bridge.zeros(launch.queue, (2 * launch.slots,), "int32")
        _run(COUNT, launch, counts, IN_PLACE=1, ONLY_CHECK=1)
        numbers = counts.to_host().reshape(-1, 2)
        for tensor, (inf, nan) in zip(launch.targets, numbers, strict=False):
            found[id(tensor.buffer)] = int(inf), int(nan)
    return [found.get(id(tensor.buffer), (0, 0)) for tensor in tensors]


def _check(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Raises as ``unscale_`` says. Runs for every gradient of every step: keep the loop short."""
    if len(sources) != len(targets):
        raise ValueError(f"unscale_: {len(sources)} sources and {len(targets)} targets; each source needs one target")
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.dtype not in bridge.STORAGE:
            raise TypeError(f"unscale_: sources[{index}] is {source.dtype}; float32, float16 or bfloat16 is needed")
        if source is target and source.dtype == "float32":
            continue
        if bridge.STORAGE.get(target.dtype) != "f32":
            raise TypeError(f"unscale_: targets[{index}] is {target.dtype}; unscaled gradients are float32")
        if source.shape != target.shape:
            raise ValueError(f"unscale_: sources[{index}] has shape {source.shape}, its target {target.shape}")
    if sources:
        if not bridge.on_device(sources[0]):
            raise TypeError("unscale_: the tensors are on netcl's numpy backend; they must be on an OpenCL device")
        bridge.require_same_queue("unscale_", *sources)
        if targets is not sources:
            bridge.require_same_queue("unscale_", sources[0], *targets)


def _distinct(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterable[Pair]:
    """The pairs with elements, each target's storage once. netcl's views share the very buffer object.

    Raises:
        ValueError: two sources have one target, or a source is another one's target.
    """
    written: dict[int, Pair] = {}
    moved: dict[int, int] = {}  # of targets elsewhere: where the source is
    for source, target in zip(sources, targets, strict=True):
        place = id(target.buffer)
        origin = place if source is target else id(source.buffer)
        known = written.get(place)
        if known is None:
            if 0 not in target.shape:
                written[place] = source, target, origin == place
                if origin != place:
                    moved[place] = origin
        elif moved.get(place, place) != origin:
            raise ValueError("unscale_: two different sources have the same target")
        elif known[1].size < target.size:
            written[place] = source, target, origin == place
    if moved and not written.keys().isdisjoint(moved.values()):
        raise ValueError("unscale_: a source is the target of another one")
    return written.values()


def _check_sources(tensors: Sequence[Tensor], name: str) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in bridge.STORAGE:
            raise TypeError(f"{name}: tensors[{index}] is {tensor.dtype}; float32, float16 or bfloat16 is needed")
        if not bridge.on_device(tensor):
            raise TypeError(f"{name}: tensors[{index}] is on netcl's numpy backend; it must be on an OpenCL device")
    if tensors:
        bridge.require_same_queue(name, *tensors)


def _by_kind(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    kinds: dict[str, list[Pair]] = {}
    for pair in pairs:
        kinds.setdefault(bridge.STORAGE[pair[0].dtype], []).append(pair)
    return kinds


def _slots(queue: cl.CommandQueue, in_place: bool, count: int) -> int:
    return slots_for(queue, count, 1 if in_place else 2, _OTHER_ARGUMENTS_BYTES)


class _Launch(NamedTuple):
    """The tensors of one launch; ``sources`` is empty where they are the targets, or nothing is written."""

    kind: str
    slots: int
    targets: list[Tensor]
    sources: list[Tensor]

    @property
    def queue(self) -> cl.CommandQueue:
        return self.targets[0].queue

    @property
    def buffers(self) -> list[Any]:
        return [x.buffer for x in (*self.sources, *self.targets)]


def _readings(tensors: Sequence[Tensor]) -> Iterator[_Launch]:
    """Launches that read each tensor's storage once."""
    for kind, pairs in _by_kind(_distinct(tensors, tensors)).items():
        slots = _slots(pairs[0][0].queue, True, len(pairs))
        for start in range(0, len(pairs), slots):
            yield _Launch(kind, slots, [tensor for tensor, _, _ in pairs[start : start + slots]], [])


def _launch(
    pairs: Sequence[Pair], kind: str, in_place: bool, slots: int, state: cl.Buffer, multiplier: cl.Buffer
) -> None:
    sources = [] if in_place else [source for source, _, _ in pairs]
    launch = _Launch(kind, slots, [target for _, target, _ in pairs], sources)
    _run(UNSCALE, launch, state, multiplier, IN_PLACE=int(in_place), ONLY_CHECK=0)


def _run(kernel: Kernel, launch: _Launch, *results: Any, **macros: Any) -> None:
    queue, how = launch.queue, (launch.kind, launch.slots, *macros, *macros.values())
    key = (queue.context.int_ptr, kernel.name, *how, *[tuple(x.shape) for x in launch.targets])
    bound = _plans.known.get(key)
    if bound is None:
        macros |= {"X_T": launch.kind, "DECADES": launch.slots // 10, "PIECES": pieces_for(queue)}
        tiles = tiles_of(queue, tuple([x.size for x in launch.targets]))
        slots = open_slots(len(launch.targets), launch.slots, tiles)
        bound = kernel.bind(
            queue, *tiles.grid, tiles.table, *[...] * len(results), *slots * (2 if launch.sources else 1), **macros
        )
        _plans.keep(key, bound)
    bound(queue, *[getattr(x, "buffer", x) for x in results], *launch.buffers)
