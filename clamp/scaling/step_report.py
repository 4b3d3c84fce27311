"""What one ``optimizer.step()`` did, and why: the words and numbers that a user sees."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from clamp import bridge
from clamp.bridge import Tensor
from clamp.bridge.netcl_functions import is_redirecting
from clamp.ops.statistics import is_measurable, statistics_of
from clamp.params import gradient_marks

_OURS = str(Path(__file__).parents[1])
_NETCLS = str(Path(inspect.getfile(Tensor)).parent)  # where tensors' methods call each other
_BETWEEN = (str(Path(__file__).parents[1] / "patching"), _NETCLS)

HISTORY = 1000  # reports that are kept
_NAMED = 3  # parameters that a reason names


@dataclass(frozen=True)
class StepReport:
    """What one ``optimizer.step()`` did.

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
    """

    stepped: bool
    reason: str
    scale: float
    scale_before: float = field(default=1.0, kw_only=True)
    step: int = field(default=0, kw_only=True)
    infs: int = field(default=0, kw_only=True)
    nans: int = field(default=0, kw_only=True)
    parameters: tuple[str, ...] = field(default=(), kw_only=True)
    absent: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class NonFinite:
    """What is inf and nan in some gradients.

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
        kinds = [f"{kind} in {count} element{'s' * (count > 1)}" for kind, count in self._counts if count]
        if not kinds:
            return ""
        were = f"; those of {_list(self.kept)} were not finite before this pass: {CLEAR}" if self.kept else ""
        return f"{' and '.join(kinds)} of the gradients of {_list(self.names)}{were}"

    @property
    def _counts(self) -> tuple[tuple[str, int], ...]:
        return ("inf", self.infs), ("nan", self.nans)


CLEAR = "call zero_grad() after a step that was skipped, too, or every backward adds to them"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def non_finite(params: Sequence[Tensor], last: object, this: object) -> NonFinite:
    """Counts the inf and nan elements of the parameters' gradients on the device, and waits for it.

    Args:
        last, this: stand for the step of theirs that was skipped last, and for the one that is to be skipped now.
    """
    measured = [param for param in params if param.grad is not None and is_measurable(param.grad)]
    found = statistics_of([param.grad for param in measured], histogram=False)
    bad = [param for param, one in zip(measured, found, strict=True) if not one.is_finite]
    kept = [param for param in bad if gradient_marks.was_kept(bridge.model_parameter(param), last)]
    for param in bad:
        gradient_marks.note_not_finite(param.grad, this)
    infs, nans = sum(one.infs for one in found), sum(one.nans for one in found)
    return NonFinite(infs, nans, tuple(names_among(params, bad)), tuple(names_among(params, kept)))


def names_among(params: Sequence[Tensor], chosen: Sequence[Tensor]) -> list[str]:
    """Names of some of an optimizer's parameters."""
    if not chosen:
        return []
    ids = {id(param) for param in chosen}
    return [name for param, name in zip(params, bridge.parameter_names(params), strict=True) if id(param) in ids]


def is_called_by_user() -> bool:
    """Whether the call of netcl's that clamp's wrapper stands over was not made by clamp itself."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_OURS)


def warn_user(message: str) -> None:
    """A UserWarning that shows the line of the script that called clamp."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_between(frame.f_code):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_between(code: CodeType) -> bool:
    return code.co_filename.startswith((_OURS, _NETCLS)) or is_redirecting(code)
