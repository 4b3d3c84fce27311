"""Reports of each ``optimizer.step()``: the words and numbers that a user sees, to look at and to hand on."""

from __future__ import annotations

import csv
import inspect
import json
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, overload

from clamp import bridge
from clamp.bridge import Tensor
from clamp.bridge.netcl_functions import is_redirecting
from clamp.casting.results import RESULTS
from clamp.interrupts import replacing
from clamp.opencl.progress import PROGRESS
from clamp.ops.statistics import statistics_of
from clamp.params import gradient_marks
from clamp.params.lost_updates import HALF_AN_ULP, part_lost, percent, take
from clamp.scaling.loss_scale import LossScale

_OURS = str(Path(__file__).parents[1])
_NETCLS = str(Path(inspect.getfile(Tensor)).parent)  # where tensors' methods call each other
_BETWEEN = (str(Path(__file__).parents[1] / "patching"), _NETCLS)

HISTORY = 1000  # reports that are kept
_NAMED = 3  # parameters that a reason names


@dataclass(frozen=True)
class StepReport:
    """The report of one ``optimizer.step()``.

    Attributes:
        stepped: whether the parameters were updated; not where none of them had a gradient.
        reason: why not; empty if they were.
        scale: the loss scale after this step.
        scale_before: the loss scale that its gradients were multiplied by: where the scale stood at the first backward
            pass for it, as far as an earlier step had read it.
        step: number of the step, from 1, among those of the same handle or scaler, skipped ones included.
        infs, nans: how many elements of the gradients were inf and nan.
        parameters: the names of the parameters whose gradients they were in, ``"layers.2.weight"``.
        absent: the names of the parameters that are trained and had no gradient.
        repeats: how many backwards were run again for it, at lower scales, because the first had overflowed.
    """

    stepped: bool
    reason: str
    scale: float
    _: KW_ONLY
    scale_before: float = 1.0
    step: int = 0
    infs: int = 0
    nans: int = 0
    parameters: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    repeats: int = 0


class History(Sequence[StepReport]):
    """Reports of steps, the newest last: a sequence of `StepReport`, equal to any other of the same reports.

    A slice is a history, too::

        handle.history[-100:].to_csv("steps.csv")

    Args:
        reports: what is shown. It is not copied: a handle's history grows with its steps.
    """

    def __init__(self, reports: Sequence[StepReport] = ()) -> None:
        self._reports = reports

    @overload
    def __getitem__(self, index: int) -> StepReport: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: int | slice) -> StepReport | History:
        if isinstance(index, slice):
            return History(tuple(self._reports)[index])
        return self._reports[index]

    def __iter__(self) -> Iterator[StepReport]:  # a step meanwhile raises, as with a list's own
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"History({list(self)})"

    def to_csv(self, path: str | Path) -> None:
        """Writes a line for each step under a line of the names of `StepReport`'s attributes.

        Names of parameters are separated by spaces.

        Raises:
            OSError: the file cannot be written.
        """
        with replacing(path) as file:
            writer = csv.DictWriter(file, [column.name for column in fields(StepReport)])
            writer.writeheader()
            for report in self:
                names = {"parameters": " ".join(report.parameters), "absent": " ".join(report.absent)}
                writer.writerow({**asdict(report), **names})

    def to_json(self, path: str | Path) -> None:
        """Writes a list with an object for each step, whose keys are the names of `StepReport`'s attributes.

        Raises:
            OSError: the file cannot be written.
        """
        with replacing(path) as file:
            file.write(json.dumps([asdict(report) for report in self], indent=1) + "\n")

    def to_tensorboard(self, folder: str | Path) -> None:
        """Writes ``amp/loss_scale`` (after the step), ``amp/skipped`` (0 or 1), ``amp/infs`` and ``amp/nans`` of each
        step to a new file of events in a folder.

        Raises:
            ModuleNotFoundError: tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "history.to_tensorboard writes with tensorboardX, which is not installed: pip install tensorboardX",
                name=error.name,
            ) from error
        with SummaryWriter(str(folder)) as writer:
            for report in self:
                writer.add_scalar("amp/loss_scale", report.scale, report.step)
                writer.add_scalar("amp/skipped", float(not report.stepped), report.step)
                writer.add_scalar("amp/infs", float(report.infs), report.step)
                writer.add_scalar("amp/nans", float(report.nans), report.step)


@dataclass(frozen=True)
class NonFinite:
    """Counts of inf and nan in some gradients.

    Attributes:
        infs, nans: how many elements.
        names: of the parameters.
        kept: of those whose gradients made the step before be skipped, and were never cleared.
    """

    infs: int
    nans: int
    names: tuple[str, ...]
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = ("inf", self.infs), ("nan", self.nans)
        kinds = [f"{kind} in {count} element{'s' * (count > 1)}" for kind, count in counts if count]
        if not kinds:
            return ""
        were = f"; those of {listed(self.kept)} were not finite before this pass: {CLEAR}" if self.kept else ""
        return f"{' and '.join(kinds)} of the gradients of {listed(self.names)}{were}"


class Reports:
    """The reports of a handle's or a scaler's steps, numbered; the last ``HISTORY`` are kept."""

    def __init__(self) -> None:
        self._kept: deque[StepReport] = deque(maxlen=HISTORY)
        self.history = History(self._kept)
        self.steps = self.skips = self.repeated = 0
        self.tells = True  # whether observers hear of the steps: not where another's reports tell of them
        self._told_of_kept = False
        self._lock = threading.RLock()  # steps of several threads are numbered one after the other

    def add(self, report: StepReport) -> StepReport:
        """Keeps the report of a step that is over, and numbers it."""
        PROGRESS.end_line()
        with self._lock:
            self.steps += 1
            self.skips += not report.stepped
            self.repeated += bool(report.repeats)
            report = replace(report, step=self.steps)
            self._kept.append(report)
        if self.tells:
            RESULTS.stepped(report)
        return report

    def amend(self, report: StepReport, **changes: Any) -> StepReport:
        """Changes a report, by the number of its step; returns it."""
        with self._lock:
            index = len(self._kept) - 1 - (self.steps - report.step)
            if index >= 0:
                report = self._kept[index] = replace(self._kept[index], **changes)
            return report

    def warn_of_kept(self, bad: NonFinite) -> None:
        """Says once that gradients of a step that was skipped were kept."""
        if bad.kept and not self._told_of_kept:
            self._told_of_kept = True
            warn_user(f"step {self.steps} was skipped: {bad}")


CLEAR = "call zero_grad() after a step that was skipped, too, or every backward adds to them"


def listed(names: Sequence[str]) -> str:
    """Names in a message: the first of them, and how many more there are."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def non_finite(params: Sequence[Tensor], last: object, this: object) -> NonFinite:
    """Counts the inf and nan elements of the parameters' gradients on the device, and waits for it.

    Args:
        last, this: stand for the step of theirs that was skipped last, and for the one that is to be skipped now.
    """
    measured = [param for param in params if param.grad is not None and bridge.is_floating(param.grad)]
    found = statistics_of([param.grad for param in measured], histogram=False)
    bad = [param for param, one in zip(measured, found, strict=True) if not one.is_finite]
    kept = [param for param in bad if gradient_marks.was_kept(bridge.model_parameter(param), last)]
    for param in bad:
        gradient_marks.note_not_finite(param.grad, this)
    infs, nans = sum(one.infs for one in found), sum(one.nans for one in found)
    return NonFinite(infs, nans, tuple(names_among(params, bad)), tuple(names_among(params, kept)))


def skips_error(skips: int, scaler: LossScale | None, scale: float, bad: NonFinite) -> FloatingPointError:
    """The error after so many skips in a row of which no lower scale would have kept any."""
    if bad.kept:
        floor, why = "", f"gradients were not finite before this pass: {CLEAR}"
    elif scaler is None or not scaler.scales or scaler.is_dynamic:
        floor = f" with the loss scale at its floor ({scale:g})" if scaler is not None and scaler.scales else ""
        why = "the gradients are not finite at any scale, so the model itself computes inf or nan"
    else:
        floor = f" at the static loss scale {scale:g}"
        why = (
            "either the scale is too large for the gradients, or the model itself computes inf or nan: pass a "
            'smaller loss_scale, or loss_scale="dynamic", which finds the scale by itself'
        )
    return FloatingPointError(
        f"{skips} steps in a row were skipped{floor}: {why}. Non-finite gradients: "
        f"{', '.join(bad.names) or 'none any more'}. amp.debugging.explain(step) runs a step once more and names the "
        "op where they began."
    )


def names_among(params: Sequence[Tensor], chosen: Sequence[Tensor]) -> list[str]:
    """Names of some of an optimizer's parameters."""
    if not chosen:
        return []
    ids = {id(param) for param in chosen}
    return [name for param, name in zip(params, bridge.parameter_names(params), strict=True) if id(param) in ids]


def is_called_by_user() -> bool:
    """Returns whether the call of netcl's that clamp's wrapper stands over was not made by clamp itself."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_OURS)


def warn_user(message: str) -> None:
    """A UserWarning that shows the line of the script that called clamp."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith((_OURS, _NETCLS)) or is_redirecting(frame.f_code)
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def warn_of_lost_updates(params: Sequence[Tensor]) -> None:
    """Says what rounding loses of the updates of an optimizer's parameters that are kept in 16 bits, where that was
    measured in the step that has just been made."""
    lost = take(params)
    if not lost:
        return
    dtype = lost[0].dtype
    of_all = f", and {percent(part_lost(lost))} of all" if len(lost) > 1 else ""
    warn_user(
        f"in this step {lost[0]}{of_all}: without fp32 masters (master_weight=False, opt_level='O3') parameters "
        f"are rounded to {dtype} after each step, and updates of less than about {HALF_AN_ULP[dtype]} of a parameter "
        'are lost, or are doubled. Keep fp32 masters (master_weight=True), or what is as good: "remainder", "kahan" or '
        '"stochastic"'
    )


def warn_of_lost_bits() -> None:
    """Says that a loss should have been scaled."""
    warn_user(
        "gradients of a loss that was not scaled came through float16, where those below 6e-8 become zero: run "
        "backward inside `with handle.scale_loss(loss, optimizer) as scaled_loss`, or from scaler.scale(loss), or use "
        "bfloat16, which needs no scaling."
    )
