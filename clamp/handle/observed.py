"""What a handle says of its run: why steps were skipped, what was done, what AMP gains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from clamp.casting.regions import Region
from clamp.debug.attribution import Attribution
from clamp.debug.dry_run import check_step
from clamp.debug.explain import Explanation
from clamp.debug.layer_ranges import LayerRanges, observe_ranges
from clamp.debug.page.page import write_page
from clamp.debug.page.schema import write_run
from clamp.debug.run_log import Record
from clamp.debug.summary import Summary
from clamp.handle.other_scalers import OtherScalers
from clamp.opencl.progress import PROGRESS
from clamp.ranks.mpi import Ranks


class ObservedHandle(OtherScalers):
    """What a handle says of its run."""

    _region: Region
    _ranks: Ranks | None

    def __init__(self) -> None:
        self._record = Record(self._steps)
        self._attribution = Attribution(self._steps, self._record.losses)

    def _observe(self, debug: Iterable[str]) -> None:
        """Begins; see ``AmpHandle``'s ``debug``."""
        if "attribution" in debug:
            self._attribution.arm()
        if "summary" in debug:
            self._record.arm()

    def _observe_no_more(self) -> None:
        self._attribution.disarm()
        self._record.disarm()

    def explain(self, step: Callable[[], Any] | None = None) -> Explanation:
        """Why a step was skipped: the first op whose result stopped being finite, and one cure, as code.

        ``print(handle.explain())`` is one screen. Without ``step`` it tells of the last skipped step, whose ops are
        known after ``amp.init(debug="attribution")``; or of the last step if that was done although its loss was inf or
        nan (its gradients were finite).

        Args:
            step: does what one step of the loop does, with the same batch; it is run once, at the loss scale at which
                the last step was skipped, and optimizers do not step in it. Gradients, loss scales, the statistics of
                layers and random generators are put back. What it writes besides stays.

        Raises:
            TypeError: ``step`` is no function.
            ValueError: no op of the step can be seen.
        """
        return self._attribution.explain(step)

    def look_after_skips(self, step: Callable[[], Any]) -> None:
        """Explains, after many skips in a row, a step that somebody else than the user can run again."""
        self._attribution.look_after_skips(step, "handle.explain()")

    def summary(self, step: Callable[[], Any] | None = None) -> Summary:
        """What the run has done so far: steps and skips, kernels built; ``print`` it, it is one screen.

        After ``amp.init(debug="summary")`` ops, casts and their bytes, too, counted since then.

        Args:
            step: does what one step of the loop does. It is run some dozens of times, in this dtype and in clamp's
                float32, turn about, to take its time, that of each op, and its memory; the summary then ends with what
                AMP gains. As in ``explain``, optimizers do not step in it, and all is put back.

        Raises:
            TypeError: ``step`` is no function.
            ValueError: no op of the step can be seen.
            RuntimeError: with a step, after ``distribute``: ranks would run different numbers of steps.
        """
        if step is not None:
            check_step(step, "handle.summary")
        if step is not None and self._ranks is not None:
            raise RuntimeError(
                "handle.summary(step) was called after handle.distribute: how often the step runs depends on its time, "
                "and ranks would wait for each other's passes. Measure in one process, without distribute"
            )
        scale = self.loss_scale if self._scaler.scales else None
        guards = self._guards
        return self._record.summary(
            self._region.dtype,
            guards.steps,
            list(self._steps()),
            guards.skips,
            scale,
            step,
            lambda: self._scaler.scale,
        )

    def ranges(self, step: Callable[[], Any]) -> LayerRanges:
        """The magnitudes of activations, gradients and parameters of each layer; ``print`` it, or ``.draw(path)`` it.

        It says what float16 and bfloat16 would make zero, or inf, of them at any loss scale, and suggests one.

        Args:
            step: as for ``summary``; it is run twice, in float32, which loses nothing, and under AMP.

        Raises:
            TypeError: ``step`` is no function.
            ValueError: no op of the step can be seen.
        """
        with self._record.unwatched():
            return observe_ranges(step, lambda: self._scaler.scale)

    def report(
        self, path: str | Path, step: Callable[[], Any] | None = None, losses: Sequence[float] | None = None
    ) -> None:
        """Writes the run as one page, which needs nothing besides, or where the path ends in ``.json`` as JSON.

        Args:
            path: where to; ``python -m clamp report run.json`` makes a page of JSON later.
            step: as for ``summary``, which does not measure again what it has measured since the last step; and if
                steps were skipped and nobody knows why, as for ``explain``.
            losses: of the last steps, one for each, the newest last; ``amp.init(debug="summary")`` knows them itself.

        Raises:
            TypeError: ``step`` is no function.
            ValueError: no op of the step can be seen.
            ModuleNotFoundError: matplotlib, which draws a page's pictures, is not installed.
            OSError: the file cannot be written.
        """
        summary = self.summary(step)
        overflows = summary.ranges is not None and any(row.lost.overflow for row in summary.ranges.rows)
        explanation = self._attribution.of_run(step, overflows)
        run = self._record.run(summary, explanation, self._guards.device, self._region.level, losses)
        with PROGRESS.busy(f"writing {path}"):
            (write_run if Path(path).suffix == ".json" else write_page)(run, path)
