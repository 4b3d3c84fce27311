"""The steps of a run in a row, to look at, and to hand to other programs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import overload

from clamp.scaling.step_report import StepReport

_COLUMNS = [field.name for field in fields(StepReport)]


class History(Sequence[StepReport]):
    """What steps did, the newest last: a sequence of `StepReport`, equal to any other of the same reports.

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

    def __len__(self) -> int:
        return len(self._reports)

    def __iter__(self) -> Iterator[StepReport]:
        return iter(self._reports)

    def __reversed__(self) -> Iterator[StepReport]:
        return reversed(self._reports)

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
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            for report in self:
                names = {"parameters": " ".join(report.parameters), "absent": " ".join(report.absent)}
                writer.writerow({**asdict(report), **names})

    def to_json(self, path: str | Path) -> None:
        """Writes a list with an object for each step, whose keys are the names of `StepReport`'s attributes.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(json.dumps([asdict(report) for report in self], indent=1) + "\n", encoding="utf-8")

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
                scalars = {
                    "loss_scale": report.scale,
                    "skipped": not report.stepped,
                    "infs": report.infs,
                    "nans": report.nans,
                }
                for name, value in scalars.items():
                    writer.add_scalar(f"amp/{name}", float(value), report.step)
