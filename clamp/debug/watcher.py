"""Looks at the values of a step, op by op, while it runs: once, or in float32 and again under AMP."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, nan
from typing import Any, TypeAlias

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.results import GradFn, Gradients, Observer
from clamp.debug.callsite import NOWHERE, OpName, OpNames, Place
from clamp.debug.float32_reference import (
    Array,
    Error,
    Float32Reference,
    Reference,
    error_of,
    on_host,
    rounding_of,
)
from clamp.debug.ranges import FORMATS
from clamp.debug.words import placed
from clamp.opencl.host_steps import recorder

Key: TypeAlias = tuple[OpName, int, int]  # an op, which of its values, and in which of its backward passes

RESULT = -1  # where a gradient has its number, which is that of the parent that it is of
SUM = OpName("sum of gradients", "", "", 0)  # of a result that several ops read


@dataclass(frozen=True)
class OpValue:
    """One result of an op, or one of its gradients.

    Attributes:
        function: netcl's name of the op, ``"matmul_op"``.
        direction: ``"forward"`` or ``"backward"``.
        value: ``"result"``, ``"gradient of layers.0.weight"``, ``"gradient of input 0"``.
        module: path of the innermost layer, ``"layers.0"``; empty if there is none.
        line: the nearest line of the user's, ``"train.py:31"``.
    """

    function: str
    direction: str
    value: str
    module: str
    line: str


@dataclass(eq=False)
class Seen:
    """An op that has been seen, as the token of its backward.

    Attributes:
        op, place: which it is, and where it was called.
        trained: by the number of a gradient, the parameter that it is of.
        reference: its float32 counterpart, of the AMP run.
        brought: the worst error, against the float32 run, of what it read.
    """

    op: OpName
    place: Place
    trained: dict[int, Tensor]
    reference: Reference | None = None
    brought: float = 0.0


class Watcher(Observer):
    """An observer of a step in the thread that made it, which looks at its values.

    Attributes:
        ops: names them.
        found: the values that were looked at, in the order of the run: the op, which of its values, and what is known
            of that but for an `OpValue`'s attributes, which need the names that layers have after the run.
    """

    needs_values = True

    def __init__(self) -> None:
        self.ops = OpNames()
        self.thread = threading.get_ident()
        self._times = Counter[tuple[OpName, int]]()
        self.found: list[tuple[Seen, int, partial[Any]]] = []

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Seen | None:
        seen = self.see(made)
        if seen is not None:
            self.keep(seen, RESULT, made.value)
        return seen

    def see(self, made: TensorLike) -> Seen | None:
        """The op that has made this just now; None of what clamp has inserted.

        Raises:
            RuntimeError: it is being recorded.
        """
        if recorder() is not None:
            raise RuntimeError(
                "the step is being recorded, and ops in a recording have no values yet: pass a function that calls the "
                "model itself, outside of netcl's capture, ForwardCompiler or CompiledGraph; of an amp.record or an "
                "amp.Graph that records now, its function or build()"
            )
        known = self.ops.of(made)
        parents = made.parents if isinstance(made, Node) else []
        trained = {part: x.value for part, x in enumerate(parents) if getattr(x.value, "requires_grad", False)}
        return None if known is None else Seen(*known, trained)

    def gradients(self, token: Any, grad: Tensor, grads: Gradients, again: GradFn) -> None:
        for part, one in enumerate(grads):
            self.keep(token, part, one)

    def keep(self, seen: Seen, part: int, tensor: Any) -> None:
        """Called with every result and gradient of the step; ``part`` as in `Key`. A gradient may be None."""

    def key(self, seen: Seen, part: int) -> Key:
        """Returns what this value is in every run; to be asked once for each."""
        self._times[seen.op, part] += 1
        return seen.op, part, self._times[seen.op, part]

    def named(self) -> list[Any]:
        """Returns what it has found, with the names that layers and parameters have now."""
        paths = self.ops.paths()
        trained = {id(x): x for seen, _, _ in self.found for x in seen.trained.values()}
        parameters = dict(zip(trained, bridge.parameter_names(list(trained.values())), strict=True))

        def with_names(seen: Seen, part: int, make: partial[Any]) -> Any:
            is_forward, op = part == RESULT and seen.op is not SUM, seen.op
            name = parameters.get(id(seen.trained.get(part)), "params[")
            what = f"gradient of {f'input {part}' if name.startswith('params[') else name}"
            what, direction = "result" if part == RESULT else what, "forward" if is_forward else "backward"
            return make(op.function, direction, what, paths.get(op.layer, ""), op.line)

        return [with_names(*one) for one in self.found]


# ---------------------------------------------------------------------------------------------- in both precisions


@dataclass(frozen=True)
class ValueAccuracy(OpValue):
    """Accuracy of one result of an op, or of one of its gradients, under AMP.

    Errors are relative: the norm of the difference by the norm of the right value; ``largest_`` ones, the largest
    difference by the largest magnitude. They are inf where AMP gave inf or nan and float32 did not. Gradients are
    compared without the loss scale.

    Attributes:
        function, direction, value, module, line: of which op, and which of its values; see `OpValue`.
        call: of calls alike in function, layer and line, which.
        policy: of the function, ``"half"``; empty for what is on no list.
        dtype, shape: of the value under AMP.
        times: how many times as large ``own`` is as the error that rounding to the AMP dtype makes in any case.
        own: what the op itself has added, whatever was wrong with its inputs: against the same function in float32 of
            the same inputs.
        largest_own: likewise.
        rounding: the error that the right value has once it is rounded to as many digits as the AMP dtype has. (What is
            beyond its range, inf or 0 there, is an error of the op's own.) Where that does not account for ``own``: the
            error that the function in float32 makes of inputs that are so rounded, if it is larger.
        total: against the float32 run, with all that was brought along; nan of an op that it did not have.
        largest_total: likewise.
        is_estimate: whether the function could not be called again, a user's own, say; ``own`` is then by how much
            ``total`` is larger than those of its inputs.
        brought: the largest ``total`` of what the op has read.
    """

    call: int
    policy: str
    dtype: str
    shape: tuple[int, ...]
    times: float
    own: float
    largest_own: float
    rounding: float
    total: float
    largest_total: float
    is_estimate: bool = False
    brought: float = 0.0

    def __str__(self) -> str:
        about = "about " if self.is_estimate else ""
        error = f"{about}{self.times:.3g}x rounding" if np.isfinite(self.times) else "inf or nan, and finite in float32"
        return f"{self.direction} of {placed(self.function, self.module, self.line)}, {self.value}: {error}"


class Float32Side(Watcher):
    """Keeps on the host what every op gave.

    Attributes:
        values: by ``key``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Key, Array] = {}

    def keep(self, seen: Seen, part: int, tensor: Any) -> None:
        value = on_host(tensor)
        if value is not None:
            self.values[self.key(seen, part)] = value


class AmpSide(Watcher):
    """Compares what every op gives with what it would give in float32, and with what it gave in the other run.

    Args:
        right: the other run's values.
        dtype: the AMP dtype.
        scale: by what the gradients of this run are larger than those of the other.
        tolerance: of an error that is so many times that of rounding its result, it is asked what rounding its inputs
            makes of it. (Rounding can take a number to the other side of 0, where the slope of a relu is another one.)

    Attributes:
        usual: what rounding costs at the least: numbers that need none are no measure.
        missing, unpaired: what only the other run had, and what it did not have.
    """

    def __init__(self, right: dict[Key, Array], dtype: str, scale: float, tolerance: float) -> None:
        super().__init__()
        self.usual = FORMATS[dtype].roundoff / 4
        self.missing, self.unpaired = dict(right), list[Key]()
        self._dtype, self._scale, self._tolerance = dtype, scale, tolerance
        self._references = Float32Reference()
        self._totals: dict[int, tuple[Tensor, float]] = {}  # by id; the tensors are held, or others could get it

    # ------------------------------------------------------------------------------------------ what ops tell

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Seen | None:
        if self._references.takes(made):
            return None
        brought = max((self._total(parent.value) for parent in parents), default=0.0)
        seen = self.see(made)
        if seen is None:  # a cast: its error is that of what reads it
            self._totals[id(made.value)] = made.value, brought
            return None
        seen.reference, seen.brought = self._references.of_result(), brought
        alone = None if seen.reference is None else seen.reference.made.value
        self._compare(seen, RESULT, made.value, alone, brought, lambda: getattr(self._rounded(seen), "value", None))
        return seen

    def gradients(self, token: Seen, grad: Tensor, grads: Gradients, again: GradFn) -> None:
        brought = max(token.brought, self._total(grad))
        gradients_of = partial(self._references.gradients_of, grad=grad, count=len(grads))
        references = gradients_of(token.reference and token.reference.made)

        def rounded(part: int) -> Tensor | None:
            return gradients_of(self._rounded(token))[part]

        for part, one in enumerate(grads):
            if one is not None:
                self._compare(token, part, one, references[part], brought, partial(rounded, part))

    def _rounded(self, seen: Seen) -> TensorLike | None:
        """The counterpart of the result, of rounded inputs; None where AMP rounds none."""
        if seen.reference is None or seen.place.policy != "half":
            return None
        return self._references.of_rounded(seen.reference, seen.place.dtype(self._dtype))

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        actual, one, other = on_host(made), on_host(first), on_host(second)
        if actual is None or one is None or other is None:
            return
        right, brought = one + other, max(self._total(first), self._total(second))
        self._totals[id(made)] = made, brought
        own, rounding = error_of(actual, right), rounding_of(right, self._dtype)
        self._note(Seen(SUM, NOWHERE, {}), RESULT, made, own, rounding, None, brought)

    @property
    def overflowed_in_backward(self) -> bool:
        """Returns whether all results were finite where they should be, and some gradients were not."""
        bad = [part for _, part, one in self.found if one.keywords["total"] == inf]
        return bool(bad) and RESULT not in bad

    def _compare(
        self, seen: Seen, part: int, tensor: Any, reference: Any, brought: float, rounded: Callable[[], Any]
    ) -> None:
        actual = on_host(tensor)
        if actual is None:
            return
        key = self.key(seen, part)
        right, alone = self.missing.pop(key, None), on_host(reference)
        true = actual if part == RESULT else actual / np.float32(self._scale)
        total, own = _error_if_known(true, right, tensor.dtype), _error_if_known(actual, alone, tensor.dtype)
        if total is None:
            self.unpaired.append(key)
        self._totals[id(tensor)] = tensor, brought if total is None else total.relative
        nearest = actual if right is None or total is None else right
        nearest = nearest if alone is None or own is None else alone
        rounding = rounding_of(nearest, seen.place.dtype(self._dtype))
        if own is not None and own.relative > self._tolerance * max(rounding, self.usual):
            of_inputs = _error_if_known(nearest, on_host(rounded()), "float32")
            rounding = max(rounding, 0.0 if of_inputs is None else of_inputs.relative)
        self._note(seen, part, tensor, own, rounding, total, brought)

    def _note(
        self, seen: Seen, part: int, tensor: Any, own: Error | None, rounding: float, total: Error | None,
        brought: float,
    ) -> None:  # fmt: skip
        of_all = total or Error(nan, nan)
        grown = max(0.0, of_all.relative - brought) if total is not None and isfinite(brought) else nan
        errors = own or Error(grown, grown)
        times = inf if errors.relative == inf else errors.relative / max(rounding, self.usual)
        self.found.append((seen, part, partial(
            ValueAccuracy, call=seen.op.call, policy=seen.place.policy, dtype=tensor.dtype, shape=tuple(tensor.shape),
            times=times, own=errors.relative, largest_own=errors.largest, rounding=rounding, total=of_all.relative,
            largest_total=of_all.largest, is_estimate=own is None, brought=brought,
        )))  # fmt: skip

    def _total(self, tensor: Any) -> float:
        return self._totals.get(id(tensor), (None, 0.0))[1]


def _error_if_known(actual: Array, right: Array | None, dtype: str) -> Error | None:
    """The error of a value of some dtype; None if there is nothing to compare it with."""
    if right is None or right.size != actual.size:
        return None
    name = bridge.canonical_dtype(dtype)
    return error_of(actual, right, FORMATS[name].largest if name in bridge.HALF_DTYPES else inf)
