"""What one ``optimizer.step()`` did, and why: the words and numbers that a user sees."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops.multi_tensor import count_non_finite

_OURS = str(Path(__file__).parents[1])

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
    """What is inf and nan in some gradients."""

    infs: int
    nans: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        kinds = [f"{kind} in {count} element{'s' * (count > 1)}" for kind, count in self._counts if count]
        if not kinds:
            return ""
        more = len(self.names) - _NAMED
        named = ", ".join(self.names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"{' and '.join(kinds)} of the gradients of {named}"

    @property
    def _counts(self) -> tuple[tuple[str, int], ...]:
        return ("inf", self.infs), ("nan", self.nans)


def non_finite(params: Sequence[Tensor]) -> NonFinite:
    """Counts the inf and nan elements of the parameters' gradients on the device, and waits for it."""
    by_queue: dict[Any, list[Tensor]] = {}
    for param in params:
        grad = param.grad
        if grad is not None and bridge.on_device(grad) and grad.dtype in bridge.STORAGE:
            by_queue.setdefault(grad.queue, []).append(param)
    infs, nans, bad = 0, 0, []
    for found in by_queue.values():
        for param, (inf, nan) in zip(found, count_non_finite([param.grad for param in found]), strict=True):
            infs, nans = infs + inf, nans + nan
            if inf or nan:
                bad.append(param)
    return NonFinite(infs, nans, tuple(names_among(params, bad)))


def names_among(params: Sequence[Tensor], chosen: Sequence[Tensor]) -> list[str]:
    """Names of some of an optimizer's parameters."""
    if not chosen:
        return []
    ids = {id(param) for param in chosen}
    return [name for param, name in zip(params, bridge.parameter_names(params), strict=True) if id(param) in ids]


def warn_user(message: str) -> None:
    """A UserWarning that shows the line of the script that called clamp."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
