"""One pass over many tensors: unscale, widen to float32, find inf and nan, in one launch for 100 tensors.

After NVIDIA apex's ``multi_tensor_apply``; OpenCL has no arrays of pointers, so the tensors are kernel arguments
(kernels/multi_tensor.cl draws it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeAlias

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel, Prepared
from clamp.ops.slots import macros_of, open_slots, require_readable, slots_for, tiles_of

UNSCALE = Kernel("multi_tensor.cl", "unscale")

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
    _run(_distinct(sources, targets), state, multiplier or state, only_check=0)


def check_(tensors: Sequence[Tensor], state: cl.Buffer) -> None:
    """Notes in the state whether any element of any tensor is inf or nan; ``unscale_`` without the division.

    Args:
        tensors: float32, float16 or bfloat16, any shapes, all on one queue.
        state: as for ``unscale_``.

    Raises:
        ValueError, TypeError: as ``unscale_``.
    """
    require_readable("check_", tensors)
    if tensors:
        bridge.require_same_queue("check_", *tensors)
    _run(_distinct(tensors, tensors), state, state, only_check=1)


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


_IS_IN_PLACE = itemgetter(2)  # of a pair


def _run(pairs: Iterable[Pair], state: cl.Buffer, multiplier: cl.Buffer, only_check: int) -> None:
    kinds: dict[str, list[Pair]] = {}
    for pair in pairs:
        kinds.setdefault(bridge.STORAGE[pair[0].dtype], []).append(pair)
    for kind, some in kinds.items():
        # The same storage for source and target is passed once, which leaves room for more tensors.
        in_place = all(map(_IS_IN_PLACE, some))
        slots = slots_for(some[0][0].queue, len(some), 1 if in_place else 2, _OTHER_ARGUMENTS_BYTES)
        for start in range(0, len(some), slots):
            _launch(some[start : start + slots], kind, in_place, only_check, slots, state, multiplier)


def _launch(
    pairs: Sequence[Pair], kind: str, in_place: bool, only_check: int, slots: int, state: cl.Buffer,
    multiplier: cl.Buffer,
) -> None:  # fmt: skip
    targets = [target for _, target, _ in pairs]
    queue = targets[0].queue
    key = (queue.context.int_ptr, kind, slots, in_place, only_check, *[tuple(x.shape) for x in targets])
    bound = _plans.known.get(key)
    if bound is None:
        tiles = tiles_of(queue, tuple([x.size for x in targets]))
        tensors = open_slots(len(targets), slots, tiles) * (1 if in_place else 2)
        bound = UNSCALE.bind(
            queue, *tiles.grid, tiles.table, ..., ..., *tensors,
            IN_PLACE=int(in_place), ONLY_CHECK=only_check, X_T=kind, DECADES=slots // 10, **macros_of(queue),
        )  # fmt: skip
        _plans.keep(key, bound)
    sources = [] if in_place else [source for source, _, _ in pairs]
    bound(queue, state, multiplier, *[x.buffer for x in (*sources, *targets)])
