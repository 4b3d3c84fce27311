"""A step run in float32, and run again under AMP: what each op gave in one and the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import HALF_DTYPES, Tensor, TensorLike
from clamp.observe.errors import LARGEST, Array, Error, error_of, on_host, rounding_of
from clamp.observe.twins import Twins
from clamp.observe.watcher import RESULT, Key, Seen, Watcher, trained_parents


@dataclass(eq=False)
class Found:
    """The errors of a value of the AMP run.

    Attributes:
        seen: the op; None of a sum of gradients.
        part: ``RESULT``, or the number of the parent whose gradient it is.
        dtype, shape: of the value.
        own: against the op's counterpart in float32, which read the same; None if it has none.
        rounding: what rounding the right value once to the AMP dtype would make.
        total: against the float32 run; None if that has no such op.
        brought: the worst ``total`` of what the op read.
    """

    seen: Seen | None
    part: int
    dtype: str
    shape: tuple[int, ...]
    own: Error | None
    rounding: float
    total: Error | None
    brought: float


class Float32Side(Watcher):
    """Keeps on the host what every op gave.

    Attributes:
        values: by ``key``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Key, Array] = {}

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Seen | None:
        """See ``Observer``."""
        known = self.ops.of(made) if self.is_mine() else None
        if known is None:
            return None
        seen = Seen(*known)
        self._keep(seen, RESULT, made.value)
        return seen

    def gradients(
        self, token: Seen | None, grad: Tensor, grads: Sequence[Tensor | None], again: Callable[[Tensor], Any]
    ) -> None:
        """See ``Observer``."""
        for part, one in enumerate(grads if token is not None else ()):
            self._keep(token, part, one)

    def _keep(self, seen: Seen | None, part: int, tensor: Any) -> None:
        value = on_host(tensor)
        if seen is not None and value is not None:
            self.values[self.key(seen, part)] = value

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        """See ``Observer``."""


class AmpSide(Watcher):
    """Compares what every op gives with what it would give in float32, and with what it gave in the other run.

    Args:
        right: the other run's values.
        dtype: the AMP dtype.
        scale: by what the gradients of this run are larger than those of the other.

    Attributes:
        found: what it found, in the order of the run.
        unpaired: what the other run did not have.
    """

    def __init__(self, right: dict[Key, Array], dtype: str, scale: float) -> None:
        super().__init__()
        self.found: list[Found] = []
        self.unpaired: list[Key] = []
        self._right, self._dtype, self._scale = right, dtype, scale
        self._paired = set[Key]()
        self._twins = Twins()
        self._totals: dict[int, tuple[Tensor, float]] = {}  # by id; the tensors are held, or others could get it

    # ------------------------------------------------------------------------------------------ what ops tell

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Seen | None:
        """See ``Observer``."""
        if not self.is_mine() or self._twins.takes(made):
            return None
        brought = max((self._total(parent.value) for parent in parents), default=0.0)
        known = self.ops.of(made)
        if known is None:  # a cast: its error is that of what reads it
            self._totals[id(made.value)] = made.value, brought
            return None
        seen = Seen(*known, trained_parents(made), self._twins.of_result(), brought)
        twin = None if seen.twin is None else seen.twin.value
        self._compare(seen, RESULT, made.value, twin, brought)
        return seen

    def gradients(
        self, token: Seen | None, grad: Tensor, grads: Sequence[Tensor | None], again: Callable[[Tensor], Any]
    ) -> None:
        """See ``Observer``."""
        if token is None:
            for one in grads:
                if one is not None:
                    self._totals[id(one)] = one, self._total(grad)
            return
        brought = max(token.brought, self._total(grad))
        twins = self._twins.gradients_of(token.twin, grad)
        for part, one in enumerate(grads):
            if one is not None:
                self._compare(token, part, one, twins[part] if len(twins) == len(grads) else None, brought)

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        """See ``Observer``."""
        actual, one, other = on_host(made), on_host(first), on_host(second)
        if not self.is_mine() or actual is None or one is None or other is None:
            return
        right, brought = one + other, max(self._total(first), self._total(second))
        self._totals[id(made)] = made, brought
        own, rounding = error_of(actual, right), self._rounding(right, made.dtype)
        self.found.append(Found(None, RESULT, made.dtype, tuple(made.shape), own, rounding, None, brought))

    # ------------------------------------------------------------------------------------------ comparing

    @property
    def missing(self) -> list[Key]:
        """What only the other run had."""
        return [key for key in self._right if key not in self._paired]

    @property
    def overflowed_in_backward(self) -> bool:
        """Whether all results were finite where they should be, and some gradients were not."""
        bad = [one.part for one in self.found if one.total is not None and one.total.relative == inf]
        return bool(bad) and RESULT not in bad

    def _compare(self, seen: Seen, part: int, tensor: Any, twin: Any, brought: float) -> None:
        actual = on_host(tensor)
        if actual is None:
            return
        key = self.key(seen, part)
        right, alone = self._right.get(key), on_host(twin)
        self._paired.add(key)
        kind = bridge.canonical_dtype(tensor.dtype)
        true = actual if part == RESULT else actual / np.float32(self._scale)
        total = None if right is None or right.size != actual.size else error_of(true, right, LARGEST[kind])
        own = None if alone is None or alone.size != actual.size else error_of(actual, alone, LARGEST[kind])
        if total is None:
            self.unpaired.append(key)
        self._totals[id(tensor)] = tensor, brought if total is None else total.relative
        nearest = alone if own is not None else right if total is not None else actual
        assert nearest is not None
        rounding = self._rounding(nearest, tensor.dtype)
        self.found.append(Found(seen, part, tensor.dtype, tuple(tensor.shape), own, rounding, total, brought))

    def _rounding(self, right: Array, dtype: str) -> float:
        """What is stored in float32 can be as large as it likes."""
        return rounding_of(right, self._dtype, in_range=dtype not in HALF_DTYPES)

    def _total(self, tensor: Any) -> float:
        return self._totals.get(id(tensor), (None, 0.0))[1]
