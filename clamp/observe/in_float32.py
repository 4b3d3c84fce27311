"""Whether an op that gave inf or nan gives finite numbers in float32, so that its dtype is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.policy import default_table
from clamp.casting.regions import Region, casting_in, current_region, no_casts
from clamp.casting.results import untold
from clamp.observe.frames import BACKWARD, Frame
from clamp.observe.identity import INSERTED
from clamp.observe.twins import Call
from clamp.opencl.recording import unrecorded
from clamp.ops.cast import cast
from clamp.ops.statistics import statistics_of
from clamp.patching.netcl_names import owner_of

_CLOSE = 0.02  # of the largest magnitude: what 16 bits may make of a number


def is_finite_in_float32(frame: Frame) -> bool | None:
    """Whether an op, or its gradient, that is not finite would be in float32; None where it cannot be computed again.

    Args:
        frame: whose tensors are held.
    """
    if all(value.dtype != "float16" for value in frame.outputs if not value.is_finite):
        return False  # it has the range of float32 already
    if frame.op in INSERTED:
        return True  # a cast
    forward = frame.forward if frame.direction == BACKWARD else frame
    if forward is None:
        return None
    call = forward.call or _called_with_what_it_read(forward)
    if call is None:
        return None
    try:
        with unrecorded(), untold(), bridge.off_tape(), casting_in(call.region):
            made = _tensors(call.run(*call.copied()))
    except Exception:  # a function that takes more than tensors, a user's kernel that reads 16 bits only
        return None
    if forward.call is None and not _is_the_same(forward, made):
        return None
    if frame.direction != BACKWARD:
        return _are_finite([x.value for x in made])
    return _is_gradient_finite(frame, made)


def _is_gradient_finite(frame: Frame, made: Sequence[TensorLike]) -> bool | None:
    grad = frame.inputs[0].tensor
    ends = [x for x in made if isinstance(x, Node) and x.grad_fn is not None]
    if grad is None or len(ends) != 1 or ends[0].shape != grad.shape:
        return None
    with no_casts(), unrecorded(), untold():
        return _are_finite([x for x in ends[0].grad_fn(cast(grad, "float32")) if x is not None])


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
    if gave is None or len(made) != 1 or tuple(made[0].shape) != tuple(gave.shape):
        return False
    ours, theirs = (cast(x, "float32").to_host() for x in (made[0].value, gave))
    both = np.isfinite(ours) & np.isfinite(theirs)
    return np.allclose(ours[both], theirs[both], rtol=_CLOSE, atol=_CLOSE * np.abs(ours[both]).max(initial=0.0))


def _tensors(made: Any) -> list[TensorLike]:
    """The floating results among what a function has returned."""
    results = made if isinstance(made, list | tuple) else (made,)
    return [x for x in results if isinstance(x, Node | Tensor) and x.value.dtype in bridge.STORAGE]


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return not any(x.infs or x.nans for x in statistics_of(tensors, histogram=False))
