"""Whether an op that gave inf or nan gives finite numbers in float32, so that its dtype is to blame, or that of an op
before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.policy_table import default_table
from clamp.casting.regions import Region, casting_in, current_region
from clamp.casting.results import untold
from clamp.debug.float32_reference import Call, copy_of
from clamp.debug.identity import INSERTED
from clamp.debug.step_graph import BACKWARD, Frame, Value
from clamp.opencl.host_steps import unrecorded
from clamp.ops.cast import cast
from clamp.ops.statistics import statistics_of
from clamp.patching.patch_registry import owner_of

SMALLEST_FLOAT16 = 2.0**-24

_CLOSE = 0.02  # of the largest magnitude: what 16 bits may make of a number
_BEFORE = 8  # ops in a row that are computed again in float32

Wide: TypeAlias = dict[int, Tensor]  # by the id of a tensor, what it would be in float32


def is_finite_in_float32(frame: Frame) -> bool | None:
    """Whether an op, or its gradient, that is not finite would be in float32; None where it cannot be computed again.

    Args:
        frame: whose tensors are held.
    """
    if all(value.dtype != "float16" for value in frame.outputs if not value.is_finite):
        return False  # it has the range of float32 already
    if frame.op in INSERTED:
        return True  # a cast
    return _is_finite(frame, {})


def largest_in_float32(frame: Frame) -> float | None:
    """The largest magnitude that a forward op would give in float32; None where it cannot be computed again."""
    made = _made(frame, {})
    if not made:
        return None
    return max(one.largest for one in statistics_of([x.value for x in made], histogram=False))


def rounded_to_zero(frame: Frame) -> Frame | None:
    """The op before one whose results 16 bits made 0, so that this one is not finite: in float32, both are.

    Args:
        frame: not finite, and not in float32 either from the numbers that it read; its tensors are held.
    """
    forward = _forward_of(frame)
    if forward is None:
        return None
    wide: Wide = {}
    before = [found for value in forward.inputs for found in _widen(value, wide, _BEFORE)]
    blamed = next((one for one in before if _gave_more_zeros(one, wide)), None)
    return blamed if blamed is not None and _is_finite(frame, wide) else None


def _forward_of(frame: Frame) -> Frame | None:
    return frame.forward if frame.direction == BACKWARD else frame


def _is_finite(frame: Frame, wide: Mapping[int, Tensor]) -> bool | None:
    """Whether an op, or its gradient, is finite in float32, where some of what it reads is what it would be there."""
    forward = _forward_of(frame)
    made = None if forward is None else _made(forward, wide)
    if made is None:
        return None
    if frame.direction != BACKWARD:
        return _are_finite([x.value for x in made])
    grad = frame.inputs[0].tensor
    ends = [x for x in made if isinstance(x, Node) and x.grad_fn is not None]
    if grad is None or len(ends) != 1 or ends[0].shape != grad.shape:
        return None
    with casting_in(None), unrecorded(), untold():
        return _are_finite([x for x in ends[0].grad_fn(cast(grad, "float32")) if x is not None])


def _widen(value: Value, wide: Wide, most: int) -> list[Frame]:
    """Notes what a value would be in float32, and what it is made of, and returns the ops that give them, the last
    first; of what cannot be computed again, nothing."""
    maker, tensor = value.made_by, value.tensor
    if maker is None or tensor is None or maker.direction == BACKWARD or not most:
        return []
    if id(tensor) in wide:
        return []
    before = [frame for one in maker.inputs for frame in _widen(one, wide, most - 1)]
    if maker.op in INSERTED and len(maker.inputs) == 1 and maker.inputs[0].tensor is not None:
        source = maker.inputs[0].tensor
        wide[id(tensor)] = wide[id(source)] if id(source) in wide else cast(source, "float32")
        return before
    made = _made(maker, wide)
    if made is None or len(made) != 1:
        return before
    wide[id(tensor)] = made[0].value
    return [maker, *before]


def _gave_more_zeros(frame: Frame, wide: Wide) -> bool:
    out = frame.outputs[0]
    if out.statistics is None or out.tensor is None or out.dtype not in bridge.HALF_DTYPES:
        return False
    return out.statistics.zeros > statistics_of([wide[id(out.tensor)]], histogram=False)[0].zeros


def _made(frame: Frame, wide: Mapping[int, Tensor]) -> list[TensorLike] | None:
    """What a forward op gives in float32; None where it cannot be computed again."""
    call = frame.call or _called_with_what_it_read(frame)
    made = None if call is None else _run(call, {})
    if call is None or made is None or (len(made) == 1 and not _is_the_same(frame, made)):
        return None
    return _run(call, wide) if wide else made


def _run(call: Call, wide: Mapping[int, Tensor]) -> list[TensorLike] | None:
    def copy(x: TensorLike) -> TensorLike:
        other = wide.get(id(x.value))
        if other is None:
            return copy_of(x)
        return copy_of(Node(value=other, requires_grad=True) if isinstance(x, Node) else other)

    try:
        with unrecorded(), untold(), bridge.off_tape(), casting_in(call.region):
            return _tensors(call.run(*call.copied(copy)))
    except Exception:  # a function that takes more than tensors, a user's kernel that reads 16 bits only
        return None


def _called_with_what_it_read(frame: Frame) -> Call | None:
    """A call of netcl's function with the tensors that the op has read and nothing else, as most are."""
    name, tensors = frame.place.function, [value.tensor for value in frame.inputs]
    if not name.startswith("netcl.") or not tensors:
        return None
    nodes = tuple(Node(value=tensor, requires_grad=True) for tensor in tensors if tensor is not None)
    if len(nodes) != len(tensors):
        return None
    region = current_region() or Region(True, "float32", default_table())

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, attribute = owner_of(name)
        return getattr(owner, attribute)(*args, **kwargs)

    return Call(run, nodes, {}, region.in_float32)


def _is_the_same(frame: Frame, made: Sequence[TensorLike]) -> bool:
    """Whether that was the call: where both are finite, it has made what the op gave."""
    gave = frame.outputs[0].tensor
    if gave is None or tuple(made[0].shape) != tuple(gave.shape):
        return False
    ours, theirs = (cast(x, "float32").to_host() for x in (made[0].value, gave))
    both = np.isfinite(ours) & np.isfinite(theirs)
    near = max(_CLOSE * np.abs(ours[both]).max(initial=0.0), SMALLEST_FLOAT16)
    return np.allclose(ours[both], theirs[both], rtol=_CLOSE, atol=near)


def _tensors(made: Any) -> list[TensorLike]:
    """The floating results among what a function has returned."""
    results = made if isinstance(made, list | tuple) else (made,)
    return [x for x in results if isinstance(x, Node | Tensor) and x.value.dtype in bridge.STORAGE]


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(x.is_finite for x in statistics_of(tensors, histogram=False))
