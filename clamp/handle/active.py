"""The handle of AMP at work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from clamp.bridge import Node
from clamp.casting.regions import Region, current_region, in_region, set_process_region
from clamp.debug.dry_run import check_step
from clamp.debug.explain import Attribution, Explanation
from clamp.debug.layer_ranges import LayerRanges, observe_ranges
from clamp.debug.memory_meter import stop_counting
from clamp.debug.memory_report import MemoryReport, memory_now, memory_of_step
from clamp.debug.page.schema import write_run
from clamp.debug.page.sections import write_page
from clamp.debug.run_log import RunLog
from clamp.debug.summary import Summary
from clamp.interrupts import from_nothing
from clamp.opencl.host_steps import refuse
from clamp.opencl.progress import PROGRESS
from clamp.params.weight_cache import weight_cache
from clamp.patching.patch import Patches
from clamp.patching.user_functions import Registration, decorating
from clamp.ranks.mpi import Ranks
from clamp.scaling.dynamic_scale import settle_all
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.passes import PassScaling
from clamp.scaling.scaled_loss import OptimWrapper
from clamp.scaling.step_guard import StepGuards
from clamp.scaling.step_report import History, StepReport


class AmpHandle:
    """AMP at work: netcl's functions cast, losses are scaled, from ``amp.init`` until ``shutdown``.

    Also a context manager that shuts down at its end::

        with amp.init() as handle:
            ...
            with handle.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    Args:
        region: how ops run; holds in every thread.
        registrations: the user's functions to cast.
        make_scaler: makes a loss scaler; one is made for the handle, more for wrapped optimizers.
        on_shutdown: called when the handle has shut down, again by each further ``shutdown``.
        num_losses: how many scalers the handle has of its own.
        check_finite: whether a step looks at gradients that no scaled pass has looked at, and is skipped if one is
            inf or nan.
        debug: ``"attribution"``: the ops of each step are kept until it is done, so that ``explain`` knows them;
            ``"summary"``: they are counted; or both.
        on_overflow: ``"repeat"`` or ``"skip"``, as in ``amp.init``.
    """

    def __init__(
        self,
        region: Region,
        registrations: Sequence[Registration],
        make_scaler: Callable[[], LossScale],
        on_shutdown: Callable[[AmpHandle], None] = lambda _: None,
        num_losses: int = 1,
        check_finite: bool = True,
        debug: Iterable[str] = (),
        on_overflow: str = "skip",
    ) -> None:
        self._region = region
        guards = StepGuards(check_finite=check_finite)
        self._patches = Patches(region.policies, registrations, guards.step, by_module=region.modules is not None)
        self._scaling = PassScaling(make_scaler, num_losses, guards, self._patches.guard, on_overflow)
        guards.wants_scaling = "float16" in region.dtypes and self._scaling.first.scales
        self._log = RunLog(region, self._scaling)
        self._attribution = Attribution(lambda: self._scaling.history, self._log.losses)
        self._debug = debug
        self._on_shutdown = on_shutdown
        self._ended = self._has_left = False
        self._way_out = "call amp.shutdown() first"  # what to do where AMP is to be turned on once more
        self._ending = threading.RLock()

    def _turn_on(self) -> None:
        """Patches netcl and turns casts on. Whatever interrupts it, ``shutdown`` takes off what is there."""
        from_nothing()
        if "attribution" in self._debug:
            self._attribution.arm()
        if "summary" in self._debug:
            self._log.arm()
        self._patches.install()
        set_process_region(self._region)
        self._scaling.is_active = True

    # ------------------------------------------------------------------------------------------ state

    def is_active(self) -> bool:
        """Returns whether netcl is patched by this handle and its casts are on."""
        return self._scaling.is_active

    @property
    def scalers(self) -> list[LossScale]:
        """The handle's own scalers, then those of wrapped optimizers in the order they were wrapped."""
        return [*self._scaling.own, *self._scaling.wrapped]

    @property
    def loss_scale(self) -> float:
        """The current loss scale; waits for the device and reads a few bytes from it.

        After a step by another scaler, a Trainer's or an ``amp.GradScaler``, that one's, until the handle scales a loss
        again.
        """
        return self._scaling.scale

    @property
    def last_step(self) -> StepReport | None:
        """The report of the last ``optimizer.step()``, of whichever optimizer; None before the first."""
        return self.history[-1] if self.history else None

    @property
    def history(self) -> History:
        """Reports of the last 1000 steps, the newest last."""
        refuse("handle.last_step or handle.history was read", "Read it after the recorded part.")
        return self._scaling.history

    def __repr__(self) -> str:
        if not self.is_active():
            return "<AmpHandle, shut down>"
        reports = self._scaling.guards.reports
        steps, skips = reports.steps, reports.skips
        skipped = f", {skips} skipped"
        if skips:
            reason = next((report.reason for report in reversed(self.history) if not report.stepped), "long ago")
            skipped += f" (the last: {reason})"
        skipped += f", {reports.repeated} repeated" if reports.repeated else ""
        scale = f", loss scale {self.loss_scale:g}" if self._scaling.first.scales else ", no loss scaling"
        return f"<AmpHandle {self._region.dtype}: {steps} step{'s' * (steps != 1)}{skipped}{scale}>"

    def __reduce_ex__(self, *given: Any) -> NoReturn:
        raise TypeError(
            "an AMP handle cannot be copied or pickled: it is the AMP of this process. Save and load what it knows by "
            "amp.state_dict() and amp.load_state_dict(); another process calls amp.init() itself"
        )

    def clear_cache(self) -> None:
        """Forgets the 16-bit copies of weights. A kernel of your own that writes parameters must call it."""
        weight_cache.clear()

    _clear_cache = clear_cache

    @decorating
    def disable_casts(self) -> Iterator[None]:
        """Inside the ``with``, this thread's ops run in the dtypes they are given, most of them by netcl's kernels.

        Those are shared by all threads and race: launched from two at a time, one may get the other's arguments, with
        AMP and without. Let one thread at a time be inside, or compute there by ``amp.autocast(dtype="float32")``.
        """
        with in_region(replace(current_region() or self._region, enabled=False)):
            yield

    # ------------------------------------------------------------------------------------------ loss scaling

    def scale_loss(self, loss: Node, optimizer: Any, loss_id: int = 0) -> AbstractContextManager[Node]:
        """Scales a loss for backward and, at the end of the ``with``, unscales the gradients.

        Args:
            loss: one element, float32 or 16-bit.
            optimizer: the optimizer, or a list of optimizers, whose parameters this backward reaches.
            loss_id: which of the handle's scalers; it has more than one after ``amp.initialize(num_losses=...)``.

        Yields:
            The scaled loss, a float32 node; run ``scaled_loss.backward()`` or ``tape.backward(scaled_loss)``.

        Where a gradient has overflowed, backward is run again, at the end of the ``with``, at a scale that lets it be
        (``amp.init(on_overflow="skip")``: is not). An inf or nan that stays makes exactly the next ``step()`` of these
        optimizers do nothing. An exception inside the ``with`` leaves gradients, scale and counters as they were before
        it.

        Raises:
            TypeError: the loss is no node or not floating, or an optimizer has no ``params``.
            ValueError: the loss has more than one element, or there is no such ``loss_id``.
            RuntimeError: after ``wrap_optimizer``: call ``optimizer.scale_loss`` instead; or after shutdown. The loss
                has no graph: its tape is gone, or nothing in it is trained. Inside the ``with``: backward is run from
                the loss itself. At its end: no gradient of the scaled loss has reached a parameter.
        """
        return self._scaling.pass_of(loss, optimizer, loss_id)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """An optimizer with its own loss scalers, one for each of its ``num_loss`` backward passes a step.

        Raises:
            TypeError: the optimizer has no ``params``.
            ValueError: ``num_loss`` is not a positive integer.
        """
        return self._scaling.wrap(optimizer, num_loss)

    # ------------------------------------------------------------------------------------------ several devices

    def distribute(self, comm: Any, *, reduce_dtype: str | None = None) -> Ranks:
        """Makes ``scale_loss`` average gradients over the processes of an MPI communicator.

        Call it on every rank, and then ``broadcast`` with the model (or give every rank the same seed: parameters are
        compared at the first pass)::

            from mpi4py import MPI

            ranks = handle.distribute(MPI.COMM_WORLD)
            ranks.broadcast(model)

        All ranks must do the same passes. A step is skipped on all ranks or on none, and they keep one loss scale and
        the same bits in their parameters (given devices of one kind). The mean over ranks of the gradients is that of
        the global batch where each rank's loss is a mean over a part of the same size. A loss that sums over its
        batch, such as netcl's ``mse_loss``, is to be divided by the number of its rows (or multiplied by
        ``ranks.size``: then the sum over the global batch is trained).

        An exception on one rank, inside ``scale_loss`` or not, ends in an error on all of them.

        Args:
            comm: mpi4py's communicator, ``MPI.COMM_WORLD``; needs ``pip install mpi4py``.
            reduce_dtype: ``"float16"`` or ``"bfloat16"``: gradients travel, multiplied by the loss scale, in 16 bits,
                half the bytes; they are added in float32. One that overflows in float16 skips the step.

        Raises:
            TypeError: comm is no communicator.
            ValueError: unknown ``reduce_dtype``.
            RuntimeError: called twice, or after shutdown.
        """
        self._scaling.require_active("distribute")
        if self._scaling.ranks is not None:
            raise RuntimeError("handle.distribute was called twice: one communicator averages a handle's gradients")
        self._scaling.ranks = ranks = Ranks(comm, reduce_dtype)
        self._scaling.guards.require_scaled = True
        return ranks

    # ------------------------------------------------------------------------------------------ its run

    def explain(self, step: Callable[[], Any] | None = None) -> Explanation:
        """Returns why a step was skipped: the first op whose result stopped being finite, and one cure, as code.

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

    def summary(self, step: Callable[[], Any] | None = None) -> Summary:
        """Sums up the run so far: steps and skips, kernels built; ``print`` it, it is one screen.

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
        if step is not None and self._scaling.ranks is not None:
            raise RuntimeError(
                "handle.summary(step) was called after handle.distribute: how often the step runs depends on its time, "
                "and ranks would wait for each other's passes. Measure in one process, without distribute"
            )
        return self._log.summary(step)

    def ranges(self, step: Callable[[], Any]) -> LayerRanges:
        """The magnitudes of activations, gradients and parameters of each layer; ``print`` it, or ``.draw(path)`` it.

        It says what float16 and bfloat16 would make zero, or inf, of them at any loss scale, and suggests one.

        Args:
            step: as for ``summary``; it is run twice, in float32, which loses nothing, and under AMP.

        Raises:
            TypeError: ``step`` is no function.
            ValueError: no op of the step can be seen.
        """
        with self._log.unwatched():
            return observe_ranges(step, self._scaling.first)

    def memory(self, step: Callable[[], Any] | None = None) -> MemoryReport:
        """Device memory by what it is held for: activations, weights, their copies, gradients, ...; ``print`` it.

        Without a step what is held now, which takes some milliseconds; all kinds together are what pyopencl holds.

        Args:
            step: as for ``summary``; it is run twice, to find the moment when most is held, and by which ops.

        Raises:
            TypeError: ``step`` is no function.
            ValueError: no op of the step can be seen.
        """
        if step is None:
            return memory_now()
        with self._log.unwatched():
            return memory_of_step(step)

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
            ModuleNotFoundError: jinja2 or matplotlib, which make the page, is not installed.
            OSError: the file cannot be written.
        """
        summary = self.summary(step)
        overflows = summary.ranges is not None and any(row.lost.overflow for row in summary.ranges.rows)
        explanation = self._attribution.of_run(step, overflows)
        run = self._log.run(summary, explanation, losses)
        with PROGRESS.busy(f"writing {path}"):
            (write_run if Path(path).suffix == ".json" else write_page)(run, path)

    # ------------------------------------------------------------------------------------------ end

    def shutdown(self) -> None:
        """Restores netcl to the identical objects it had before ``init``. A second call does nothing, but for going on
        where the first was interrupted.

        Raises:
            RankError: after ``distribute``, another rank is still training.
        """
        with self._ending:
            try:
                if self.is_active():
                    settle_all()  # a step that comes after would meet the inf of one that is to be repeated
            finally:
                if not self._ended:  # all of this can be done twice
                    self._scaling.is_active = False
                    self._attribution.disarm()
                    self._log.counter.stop()
                    set_process_region(None)
                    stop_counting()
                    self._patches.remove()
                    weight_cache.clear()
                    from_nothing()
                    self._ended = True
        self._on_shutdown(self)
        if self._scaling.ranks is not None and not self._has_left:
            self._has_left = True
            self._scaling.ranks.leave()

    def __enter__(self) -> AmpHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.shutdown()
        finally:  # once more: nobody else goes on where an interrupt has ended the first
            self.shutdown()
