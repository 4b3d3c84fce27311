"""``amp.debugging.compare_accuracy``: the same step in float32 and under AMP, and which op loses how much by itself."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from inspect import signature
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from clamp import bridge, debug
from clamp.bridge import DTypeLike, Node, Tensor
from clamp.casting.policy_table import check_dtype, default_table
from clamp.casting.regions import Region, changed_regions, current_region, in_own_region
from clamp.casting.results import RESULTS, Observer
from clamp.debug.dry_run import NothingSeenError, dry_run
from clamp.debug.ranges import FORMATS
from clamp.debug.watcher import RESULT, AmpSide, Float32Side, Key, ValueAccuracy
from clamp.debug.words import aligned, placed
from clamp.interrupts import replacing
from clamp.ops.arguments import number, shown
from clamp.ops.cast import cast

_SHOWN = 30  # rows of a table
_FAR_OFF, _AMPLIFIED = 0.02, 20.0  # a result, relatively, and how many times as far as what it was made of
_HIGHEST, _LOWER = 2.0**16, 16.0  # loss scales: the first that is tried, and by how much the next is lower


@dataclass(frozen=True)
class Accuracy(Sequence[ValueAccuracy]):
    """Errors that AMP makes in the numbers of one step, the worst first: suspects, then by ``own``. ``print`` it.

    Attributes:
        values: of each op its result and its gradients.
        unpaired: in words, what only one of both runs had.
        dtype: the AMP dtype.
        tolerance: see ``compare_accuracy``.
        loss, loss_in_float32: what the step returned in both runs; nan if that was no number.
    """

    values: tuple[ValueAccuracy, ...]
    unpaired: tuple[str, ...]
    dtype: str
    tolerance: float
    loss: float
    loss_in_float32: float

    @property
    def suspects(self) -> list[ValueAccuracy]:
        """Those whose own error is more than ``tolerance`` times that of rounding."""
        return [value for value in self.values if value.times > self.tolerance]

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)

    def to_csv(self, path: str | Path) -> None:
        """Writes all values to a file, a row each, under their attributes' names."""
        with replacing(path) as file:
            writer = csv.writer(file)
            writer.writerow(field.name for field in fields(ValueAccuracy))
            writer.writerows(astuple(value) for value in self.values)

    def __str__(self) -> str:
        left = len(self.values) - _SHOWN
        more = [f"... and {left} more, which err less: to_csv(path) writes all"] if left > 0 else []
        unpaired = [f"not compared: {one}" for one in self.unpaired]
        return "\n".join([*self._head(), "", *_table(self.values[:_SHOWN]), *more, *unpaired])

    __repr__ = __str__

    def _head(self) -> list[str]:
        loss = f"loss {self.loss:.6g} in {self.dtype}, {self.loss_in_float32:.6g} in float32"
        suspects = self.suspects
        if not suspects:
            verdict = f"No op errs by more than {self.tolerance:g} times what rounding to {self.dtype} costs."
        else:
            ops = {(value.function, value.module): str(value) for value in reversed(suspects)}
            verdict = "\n".join([f"{len(ops)} of the ops err by more than {self.tolerance:g} times what rounding to "
                                 f"{self.dtype} costs:", *(f"  {one}" for one in reversed(ops.values()))])  # fmt: skip
        has_loss = not (np.isnan(self.loss) and np.isnan(self.loss_in_float32))
        return [*([loss] if has_loss else []), verdict, *([] if suspects else self._of_amplified())]

    @property
    def amplified(self) -> ValueAccuracy | None:
        """Of the results that are far off although the op is right, the one that has made most of the errors of what it
        has read, as the difference of nearly equal numbers does; None if no result is."""
        least = FORMATS[self.dtype].roundoff
        grown = [
            (value.total / max(value.brought, least), value)
            for value in self.values
            if value.direction == "forward" and value.times <= self.tolerance and value.total > _FAR_OFF
        ]
        factor, worst = max(grown, key=itemgetter(0), default=(0.0, None))
        return worst if factor > _AMPLIFIED else None

    def _of_amplified(self) -> list[str]:
        worst = self.amplified
        if worst is None:
            return []
        made, read = (f"{100 * x:.2g} %" for x in (worst.total, max(worst.brought, FORMATS[self.dtype].roundoff)))
        result = placed(worst.function, worst.module, worst.line)
        return [
            f"Each op is right, and yet the result of {result} is off by {made}: what it reads is off by {read}, as "
            f"{self.dtype} is, and nearly cancels in it. Compute what it reads in float32, too: "
            'with amp.autocast(dtype="float32"): around both.'
        ]


def compare_step(
    step: Any,
    batch: Sequence[Any] = (),
    *,
    loss: Callable[..., Any] | None = None,
    dtype: DTypeLike | None = None,
    level: str | None = None,
    custom_white_list: Iterable[str] = (),
    custom_black_list: Iterable[str] = (),
    loss_scale: float | None = None,
    tolerance: float = 8.0,
) -> Accuracy:
    """Runs one training step in float32 and once more under AMP, and compares what each op gave, forward and backward.

    ::

        print(amp.debugging.compare_accuracy(model, (x, y), loss=F.cross_entropy))

    An op's ``own`` error is told from what its inputs bring along: the op is computed once more, in float32, from the
    very inputs that it had under AMP. Both runs are clamp's kernels. Nothing is trained: optimizers do not step, and
    gradients, loss scales, the statistics of layers and random generators are put back. Takes the memory of a float32
    step on the host, and of one more on the device.

    Args:
        step: a netcl model; or a function without arguments that does forward and backward as the loop does, with
            ``handle.scale_loss`` and ``optimizer.step()`` if it likes, and may return the loss.
        batch: with a model, what it is called with, and last what the loss compares its output with: numpy arrays,
            tensors or nodes.
        loss: with a model, ``loss(output, target)``. None: the whole batch goes to the model, which returns the loss.
        dtype: the AMP dtype. By default, as all that follow up to the lists, as it is around the call: of the active
            handle, or else float16 and level O1.
        level, custom_white_list, custom_black_list: as for ``amp.init``.
        loss_scale: with a model, what the loss is multiplied by. By default that of the active handle; without one
            65536 in float16, or as much less as keeps the gradients finite.
        tolerance: how many times the error of rounding an op may make before it is one of the ``suspects``.

    Raises:
        TypeError: ``step`` is neither a model nor a function, or a model has no batch.
        ValueError: an unknown dtype, level or function; the step ran no op on a device.
        RuntimeError: the step makes a recording of netcl's own (``runtime.capture``, ``ForwardCompiler``,
            ``CompiledGraph``), whose ops have no values. Recorded functions and graphs run as they are meanwhile.
        OutOfMemoryError: an op cannot be computed once more for want of device memory.
    """
    if dtype is not None:
        dtype = check_dtype(dtype)
    tolerance = number("compare_accuracy", "tolerance", tolerance)
    around = current_region() or Region(True, "float16", default_table())
    policies = around.policies if level is None else debug.session.policies_for(level)
    policies = policies.customized(custom_white_list, custom_black_list)
    chosen = "float32" if level == "O0" else dtype or around.dtype
    amp = replace(around, enabled=True, dtype=chosen, policies=policies)
    run = _step_of(step, batch, loss, loss_scale)
    scale = floor = 1.0 if loss_scale is None else loss_scale
    if loss_scale is None and isinstance(step, bridge.Module) and amp.dtype == "float16":
        handle = debug.session.active_handle()
        scale = _HIGHEST if handle is None else handle.loss_scale
    in_float32 = Float32Side()
    with changed_regions(lambda region: region.in_float32 if region.enabled else region):
        right_loss = _run(run, 1.0, amp, in_float32)
    if not in_float32.values:
        raise NothingSeenError
    while True:
        under_amp = AmpSide(in_float32.values, amp.dtype, scale, tolerance)
        amp_loss = _run(run, scale, amp, under_amp)
        if scale <= floor or not under_amp.overflowed_in_backward:
            break
        scale = max(floor, scale / _LOWER)
    values = sorted(under_amp.named(), key=partial(_rank, tolerance=tolerance))
    missing = [f"{_words(key, in_float32.ops.paths())}, in float32 only" for key in under_amp.missing]
    extra = [f"{_words(key, under_amp.ops.paths())}, under AMP only" for key in under_amp.unpaired]
    return Accuracy(tuple(values), (*missing, *extra), amp.dtype, tolerance, amp_loss, right_loss)


# ---------------------------------------------------------------------------------------------- the step


def _step_of(
    step: Any, batch: Sequence[Any], loss: Callable[..., Any] | None, scale: float | None
) -> Callable[[float], Any]:
    """Returns what runs the step with a loss scale, and returns the loss."""
    if not isinstance(step, bridge.Module):
        if not callable(step) or len(batch) or loss is not None or scale is not None:
            raise TypeError(
                "compare_accuracy takes a netcl model with a batch and a loss, or a function without arguments that "
                f"does forward and backward, alone; got {type(step).__name__}"
            )
        return lambda scale: step()
    if not isinstance(batch, list | tuple):
        raise TypeError(f"compare_accuracy takes a batch as a tuple of arrays, (x,) or (x, y), got {shown(batch)}")
    if not batch:
        raise TypeError(f"compare_accuracy needs a batch for a model: compare_accuracy({type(step).__name__}(...), "
                        "(x, y), loss=F.cross_entropy)")  # fmt: skip
    _require_taken(step, batch, loss)
    queue = next((tensor.queue for _, tensor in bridge.module_tensors(step)), None)
    inputs = [_input(x, queue) for x in batch]

    def forward_and_backward(scale: float) -> Any:
        found = step(*inputs) if loss is None else loss(step(*inputs[:-1]), inputs[-1])
        value = found.value
        seed = Tensor.from_host(value.queue, np.full(value.shape, scale, np.float32))
        found.backward(cast(seed, bridge.canonical_dtype(value.dtype)))
        return found

    return forward_and_backward


def _require_taken(model: Any, batch: Sequence[Any], loss: Any) -> None:
    """Raises TypeError where a model cannot be called with a batch, or with all but the last of it for the loss."""
    taken = batch if loss is None else batch[:-1]
    try:
        signature(model.forward).bind(*taken)
    except TypeError as error:
        more = "; for a loss of the model and the last array, pass loss=F.cross_entropy, say" if loss is None else ""
        raise TypeError(
            f"compare_accuracy calls {type(model).__name__} with {len(taken)} of the {len(batch)} arrays of the batch, "
            f"which its forward does not take: {error}{more}"
        ) from None


def _input(x: Any, queue: Any) -> Any:
    """Returns what a model, or a loss, is called with: a node of what is floating, or else the tensor."""
    if isinstance(x, Node):
        return x
    if not isinstance(x, Tensor):
        array = np.asarray(x)
        kind = np.float32 if np.issubdtype(array.dtype, np.floating) else np.int32
        x = Tensor.from_host(queue, np.ascontiguousarray(array, kind))
    return Node(value=x) if x.dtype in bridge.STORAGE else x


def _run(step: Callable[[float], Any], scale: float, region: Region, observer: Observer) -> float:
    with dry_run(step), in_own_region(region):
        with RESULTS.attached(observer):
            loss = step(scale)
        loss = loss if isinstance(loss, float) else getattr(loss, "value", None)
        if isinstance(loss, Tensor) and loss.size == 1:
            return float(loss.to_host().reshape(-1)[0])
        return loss if isinstance(loss, float) else float("nan")


# ---------------------------------------------------------------------------------------------- in words


def _rank(value: ValueAccuracy, tolerance: float) -> tuple[bool, float]:
    """Suspects first, by how much more they err than rounding; then the others by how much they err."""
    is_suspect = value.times > tolerance
    size = value.times if is_suspect else value.own
    return not is_suspect, np.inf if np.isnan(size) else -size


def _words(key: Key, paths: dict[str, str]) -> str:
    op, part, _ = key
    what = "result" if part == RESULT else f"gradient {part}"
    return f"{what} of {placed(op.function, paths.get(op.layer, ''))} ({op.line}), call {op.call}"


def _table(values: Sequence[ValueAccuracy]) -> list[str]:
    rows = [("x rounding", "own error", "rounding", "all errors", "op", "value", "layer", "line", "dtype")]
    rows += [
        (f"{'~' if one.is_estimate else ''}{one.times:.3g}", f"{one.own:.2e}", f"{one.rounding:.2e}",
         f"{one.total:.2e}", f"{one.direction} {one.function}", one.value, one.module, one.line, one.dtype)
        for one in values
    ]  # fmt: skip
    return aligned(rows, numbers=range(4), indent="")
