"""An op computed once more, in float32, from the very numbers that it was given: what it would have been without AMP.

What differs from it is the op's own error, whatever errors its inputs have brought along; and where it is finite, and
the op is not, the dtype is to blame.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isclose
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.regions import called_in, casting_in
from clamp.casting.results import forward_again, untold
from clamp.debug.callsite import INSERTED, Call, call_here, call_of, is_made_again
from clamp.debug.ranges import FLOAT16, FORMATS
from clamp.debug.step_graph import BACKWARD, BEFORE, Frame, Value, are_finite
from clamp.interrupts import holding
from clamp.opencl.host_steps import unrecorded
from clamp.ops.cast import cast, cast_into
from clamp.ops.statistics import statistics_of


@dataclass(frozen=True, eq=False)
class Reference:
    """The float32 counterpart of a result: of a call's results, that of this number."""

    made: TensorLike
    call: Call
    number: int


class Float32Reference:
    """The float32 counterparts of results, made as an observer is told of these.

    A function is called again with the arguments that it has got, copied, widened and cut from the graph, so that it
    may write into them, and so that its graph ends there.
    """

    def __init__(self) -> None:
        self._open: list[tuple[FrameType, Iterator[Reference]]] = []  # calls that have not ended, innermost last
        self._is_calling = False
        self._found: list[TensorLike] = []

    def takes(self, made: TensorLike) -> bool:
        """Returns whether a result is that of a counterpart being computed: of nobody's interest."""
        if self._is_calling and is_made_again() and getattr(made, "op_name", None) not in INSERTED:
            self._found.append(made)
        return self._is_calling

    def of_result(self) -> Reference | None:
        """The counterpart of what has been made just now; None if the function cannot be called again."""
        frame = call_here()
        self._open = [(one, rest) for one, rest in self._open if _is_running(one)]
        if frame is None:
            return None
        rest = next((rest for one, rest in self._open if one is frame), None)
        if rest is None:
            call = call_of(frame.f_locals)
            rest = iter([] if call is None else self._compute(call, copy_of))
            self._open.append((frame, rest))
        return next(rest, None)

    def of_rounded(self, reference: Reference, dtype: str) -> TensorLike | None:
        """Returns a result's counterpart, had the function's float32 arguments as few digits as a dtype has."""
        found = self._compute(reference.call, partial(copy_of, dtype=dtype))
        return found[reference.number].made if len(found) > reference.number else None

    def gradients_of(self, made: TensorLike | None, grad: Tensor, count: int) -> list[Tensor | None]:
        """Returns what a counterpart gives for the gradient that its op was given, as many as its op; None for each
        where there is no counterpart, or it has no graph."""
        found: list[Tensor | None] = []
        if isinstance(made, Node) and made.grad_fn is not None:
            with holding(self, "_is_calling", True):
                found = list(called_in(None, made.grad_fn, cast(grad, "float32")))
        return found if len(found) == count else [None] * count

    def _compute(self, call: Call, copy: Callable[[TensorLike], TensorLike]) -> list[Reference]:
        """All that a call gives in float32, in its order; nothing if it cannot be made."""
        self._found = []
        try:
            with holding(self, "_is_calling", True), forward_again():
                call(copy)
        except (MemoryError, cl.MemoryError):  # that says nothing of the op
            raise
        except Exception:  # a user's kernels, which read 16 bits only: their op has no counterpart
            return []
        return [Reference(one, call, number) for number, one in enumerate(self._found)]


def _is_running(frame: FrameType) -> bool:
    around: FrameType | None = sys._getframe(1)
    while around is not None and around is not frame:
        around = around.f_back
    return around is frame


def copy_of(x: TensorLike, dtype: str = "float32") -> TensorLike:
    """A leaf with the same numbers, in float32 if they are floating; those of float32 with the digits of ``dtype``."""
    value = x.value
    if not bridge.is_floating(value):
        return x
    copy = bridge.empty(value.queue, value.shape, "float32")
    cast_into(value, copy)
    if dtype != "float32" and value.dtype not in bridge.HALF_DTYPES:
        bridge.write_bytes(copy, with_digits_of(dtype, copy.to_host()).reshape(-1).view(np.uint8))
    copy.requires_grad = bridge.needs_grad(x)
    return Node(value=copy, requires_grad=copy.requires_grad) if isinstance(x, Node) else copy


# ---------------------------------------------------------------------------------------------- whether it is finite


_CLOSE = 0.02  # of the largest magnitude: what 16 bits may make of a number

Wide: TypeAlias = dict[int, Tensor]  # by the id of a tensor, what it would be in float32


def is_finite_in_float32(frame: Frame) -> bool | None:
    """Returns whether an op, or its gradient, that is not finite would be in float32; None where it cannot be computed
    again.

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
    wide: Wide = {}
    forward = frame.forward or frame
    before = [found for value in forward.inputs for found in _widen(value, wide, BEFORE)]
    blamed = next((one for one in before if _gave_more_zeros(one, wide)), None)
    return blamed if blamed is not None and _is_finite(frame, wide) else None


def _is_finite(frame: Frame, wide: Mapping[int, Tensor]) -> bool | None:
    """Returns whether an op, or its gradient, is finite in float32, where some of what it reads is what it would be
    there."""
    made = _made(frame.forward or frame, wide)
    if made is None:
        return None
    if frame.direction != BACKWARD:
        return are_finite([x.value for x in made])
    grad = frame.inputs[0].tensor
    ends = [x for x in made if isinstance(x, Node) and x.grad_fn is not None]
    if grad is None or len(ends) != 1 or ends[0].shape != grad.shape:
        return None
    with casting_in(None), unrecorded(), untold():
        return are_finite([x for x in ends[0].grad_fn(cast(grad, "float32")) if x is not None])


def _widen(value: Value, wide: Wide, most: int) -> list[Frame]:
    """Notes what a value would be in float32, and what it is made of, and returns the ops that give them, the last
    first; of what cannot be computed again, nothing."""
    maker, tensor = value.made_by, value.tensor
    if maker is None or tensor is None or id(tensor) in wide or maker.direction == BACKWARD or not most:
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
    """Returns what a forward op gives in float32; None where it cannot be computed again."""
    call = frame.call
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
        with unrecorded(), untold():
            return _tensors(call(copy))
    except Exception:  # a function that takes more than tensors, a user's kernel that reads 16 bits only
        return None


def _is_the_same(frame: Frame, made: Sequence[TensorLike]) -> bool:
    """Returns whether where both are finite, a call has made what the op gave: it may be one of several ops of it."""
    out, gave = frame.outputs[0], frame.outputs[0].tensor
    if tuple(made[0].shape) != out.shape:
        return False
    if gave is None:  # let go of: it has been measured
        (found,) = statistics_of([made[0].value], histogram=False)
        return out.statistics is not None and isclose(found.largest, out.statistics.largest, rel_tol=_CLOSE)
    ours, theirs = (cast(x, "float32").to_host() for x in (made[0].value, gave))
    both = np.isfinite(ours) & np.isfinite(theirs)
    near = max(_CLOSE * np.abs(ours[both]).max(initial=0.0), FLOAT16.smallest)
    return np.allclose(ours[both], theirs[both], rtol=_CLOSE, atol=near)


def _tensors(made: Any) -> list[TensorLike]:
    """The floating results among what a function has returned."""
    results = made if isinstance(made, list | tuple) else (made,)
    return [x for x in results if isinstance(x, Node | Tensor) and x.value.dtype in bridge.STORAGE]


# ---------------------------------------------------------------------------------------------- errors


Array: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Error:
    """Error of a tensor against another one.

    Attributes:
        relative: the norm of the difference by the norm of the right one; inf where only one of both is inf or nan.
        largest: the largest difference by the largest magnitude of the right one; likewise.
    """

    relative: float
    largest: float


def on_host(tensor: Any) -> Array | None:
    """The numbers of a float32, float16 or bfloat16 tensor on a device, as float32; None of any other."""
    if not bridge.is_floating(tensor):
        return None
    found: Array = cast(tensor, "float32").to_host()
    return found


def error_of(actual: Array, right: Array, largest: float = np.inf) -> Error:
    """The error of numbers, which are as many as the right ones; nan in both is none.

    Args:
        largest: what is beyond it and came out as this, as the -1e9 of a mask does in float16, is left out.
    """
    actual, right = actual.ravel(), right.ravel()
    if (saturated := (np.abs(right) > largest) & (actual == np.copysign(largest, right))).any():
        actual, right = actual[~saturated], right[~saturated]
    differs = ~((actual == right) | (np.isnan(actual) & np.isnan(right)))
    finite = np.isfinite(actual) & np.isfinite(right)
    if (differs & ~finite).any():
        return Error(np.inf, np.inf)
    wanted = right[finite].astype(np.float64)
    difference = actual[finite] - wanted
    if not difference.any():
        return Error(0.0, 0.0)
    return Error(_quotient(np.linalg.norm(difference), np.linalg.norm(wanted)),
                 _quotient(np.abs(difference).max(), np.abs(wanted).max()))  # fmt: skip


def rounding_of(right: Array, dtype: str) -> float:
    """The relative error (``Error.relative``) of the right numbers once they have as many digits as a dtype."""
    return error_of(with_digits_of(dtype, right), right).relative


def with_digits_of(dtype: str, numbers: Array) -> Array:
    """float32 numbers rounded to as many digits as a dtype has, whatever its range, to nearest even."""
    significand, exponent = np.frexp(numbers)
    roundoff = FORMATS[dtype].roundoff
    return np.ldexp(np.rint(significand / roundoff) * roundoff, exponent).astype(np.float32)


def _quotient(error: Any, size: Any) -> float:
    return float(error / size) if size else np.inf
