"""The handle of AMP at work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from clamp import bridge
from clamp.bridge import Node, Tensor
from clamp.casting.operands import note_numpy_backend
from clamp.casting.regions import Region, current_region, in_region, set_process_region
from clamp.handle.observed import ObservedHandle
from clamp.handle.optim_wrapper import OptimWrapper
from clamp.interrupts import from_nothing, uninterrupted
from clamp.opencl.host_steps import host_step, recorder, refuse, undone_by_error
from clamp.ops.loss_scale import scale_lock
from clamp.params import gradient_marks
from clamp.params.weight_cache import weights
from clamp.patching.patch import Patches, Registration
from clamp.ranks.mpi import Ranks
from clamp.scaling.backward_pass import PassGradients, Unnamed, end_pass, tokens
from clamp.scaling.history import History
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.queue_scales import QueueScales, share_overflow
from clamp.scaling.scaled_loss import check_loss, has_run, open_loss, require_graph, scaled_node, scaled_pass
from clamp.scaling.step_guard import StepGuard, StepGuards, StepReport


class AmpHandle(ObservedHandle):
    """AMP at work: netcl's functions cast, losses are scaled, from ``start`` until ``shutdown``.

    Made by ``amp.init``. Also a context manager that shuts down at its end::

        with amp.init() as handle:
            ...
            with handle.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    Args:
        region: how ops run; holds in every thread.
        registrations: the user's functions to cast.
        make_scaler: makes a loss scaler; one is made for the handle, more for wrapped optimizers.
        max_skips_at_floor: consecutive steps skipped at the smallest scale after which ``step`` raises.
        on_shutdown: called when the handle has shut down, again by each further ``shutdown``.
        num_losses: how many scalers the handle has of its own.
        check_finite: whether a step looks at gradients that no scaled pass has looked at, and is skipped if one is
            inf or nan.
        debug: ``"attribution"``: the ops of each step are kept until it is done, so that ``explain`` knows them;
            ``"summary"``: they are counted; or both.
    """

    def __init__(
        self,
        region: Region,
        registrations: Sequence[Registration],
        make_scaler: Callable[[], LossScale],
        max_skips_at_floor: int = 25,
        on_shutdown: Callable[[AmpHandle], None] = lambda _: None,
        num_losses: int = 1,
        check_finite: bool = True,
        debug: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self._region = region
        self._make_scaler = make_scaler
        self._own_scalers = [make_scaler() for _ in range(num_losses)]
        self._scaler = self._own_scalers[0]
        self._wrapped_scalers: list[LossScale] = []
        self._guards = StepGuards(
            max_skips_at_floor,
            check_finite=check_finite,
            wants_scaling=region.dtype == "float16" and self._scaler.scales,
        )
        self._on_shutdown = on_shutdown
        self._scales = QueueScales()
        self._unnamed = Unnamed()
        self._ranks: Ranks | None = None
        self._debug = debug
        self._patches = Patches(region.policies, registrations, self._guards.step)
        self._active = self._ended = self._has_left = False
        self._ending = threading.RLock()

    def start(self) -> None:
        """Patches netcl and turns casts on. Whatever interrupts it, ``shutdown`` takes off what is there."""
        from_nothing()
        self._observe(self._debug)
        self._patches.install()
        set_process_region(self._region)
        self._active = True

    # ------------------------------------------------------------------------------------------ state

    def is_active(self) -> bool:
        """Whether netcl is patched by this handle and its casts are on."""
        return self._active

    @property
    def scalers(self) -> list[LossScale]:
        """The handle's own scalers, then those of wrapped optimizers in the order they were wrapped."""
        return [*self._own_scalers, *self._wrapped_scalers]

    @property
    def last_step(self) -> StepReport | None:
        """What the last ``optimizer.step()`` did, of whichever optimizer; None before the first."""
        return self.history[-1] if self.history else None

    @property
    def history(self) -> History:
        """What the last 1000 steps did, the newest last."""
        refuse("handle.last_step or handle.history was read", "Read it after the recorded part.")
        return self._steps()

    def __repr__(self) -> str:
        if not self._active:
            return "<AmpHandle, shut down>"
        steps, skips = self._guards.steps, self._guards.skips
        skipped = f", {skips} skipped" + (f" (the last: {self._last_reason()})" if skips else "")
        scale = f", loss scale {self.loss_scale:g}" if self._scaler.scales else ", no loss scaling"
        return f"<AmpHandle {self._region.dtype}: {steps} step{'s' * (steps != 1)}{skipped}{scale}>"

    def _last_reason(self) -> str:
        return next((report.reason for report in reversed(self.history) if not report.stepped), "long ago")

    def clear_cache(self) -> None:
        """Forgets the 16-bit copies of weights. A kernel of your own that writes parameters must call it."""
        weights.clear()

    _clear_cache = clear_cache

    def disable_casts(self) -> AbstractContextManager[None]:
        """Inside the ``with``, this thread's ops run in the dtypes they are given, most of them by netcl's kernels.

        Those are shared by all threads and race: launched from two at a time, one may get the other's arguments, with
        AMP and without. Let one thread at a time be inside, or compute there by ``amp.autocast(dtype="float32")``.
        """
        return in_region(replace(current_region() or self._region, enabled=False))

    # ------------------------------------------------------------------------------------------ loss scaling

    def scale_loss(self, loss: Node, optimizer: Any, loss_id: int = 0) -> AbstractContextManager[Node]:
        """Scales a loss for backward and, at the end of the ``with``, unscales the gradients.

        Args:
            loss: one element, float32 or 16-bit.
            optimizer: the optimizer, or a list of optimizers, whose parameters this backward reaches.
            loss_id: which of the handle's scalers; it has more than one after ``amp.initialize(num_losses=...)``.

        Yields:
            The scaled loss, a float32 node; run ``scaled_loss.backward()`` or ``tape.backward(scaled_loss)``.

        An inf or nan in a gradient makes exactly the next ``step()`` of these optimizers do nothing. An
        exception inside the ``with`` leaves gradients, scale and counters as they were before it.

        Raises:
            TypeError: the loss is no node or not floating, or an optimizer has no ``params``.
            ValueError: the loss has more than one element, or there is no such ``loss_id``.
            RuntimeError: after ``wrap_optimizer``: call ``optimizer.scale_loss`` instead; or after shutdown. The loss
                has no graph: its tape is gone, or nothing in it is trained. Inside the ``with``: backward is run from
                the loss itself. At its end: no gradient of the scaled loss has reached a parameter.
        """
        with self._announced():
            optimizers = self._named(optimizer)
            self._check_loss_id(loss_id)
        return self.scaled(loss, optimizers, self._own_scalers[loss_id])

    def _announced(self) -> AbstractContextManager[None]:
        """Around checks before a pass: after ``distribute`` the other ranks wait in theirs, and hear of an error."""
        return nullcontext() if self._ranks is None else self._ranks.checks()

    def _named(self, optimizer: Any) -> list[Any]:
        """The optimizers that ``scale_loss`` was given."""
        self._require_active("scale_loss")
        if self._wrapped_scalers:
            raise RuntimeError(
                "handle.scale_loss cannot be used after handle.wrap_optimizer: call optimizer.scale_loss(loss) "
                "on the wrapped optimizer, for every loss"
            )
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        if not optimizers:
            raise ValueError("scale_loss got an empty list of optimizers: pass the optimizers that will step")
        return optimizers

    def _check_loss_id(self, loss_id: int) -> None:
        if loss_id not in range(len(self._own_scalers)):
            raise ValueError(
                f"loss_id must be from 0 to {len(self._own_scalers) - 1}, got {loss_id!r}: "
                "pass the number of losses to amp.initialize(num_losses=...)"
            )

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """An optimizer with its own loss scalers, one for each of its ``num_loss`` backward passes a step.

        Raises:
            TypeError: the optimizer has no ``params``.
            ValueError: ``num_loss`` is not a positive integer.
        """
        self._require_active("wrap_optimizer")
        if not isinstance(num_loss, int) or isinstance(num_loss, bool) or num_loss < 1:
            raise ValueError(f"num_loss must be a positive integer, got {num_loss!r}")
        self.guard(optimizer)
        scalers = [self._make_scaler() for _ in range(num_loss)]
        self._wrapped_scalers += scalers
        return OptimWrapper(optimizer, self, scalers)

    def scaled_next(
        self, loss: Node, optimizer: Any, scalers: Sequence[LossScale], done: int
    ) -> AbstractContextManager[Node]:
        """The next ``scale_loss`` of a wrapped optimizer, after ``done`` of them since its last step.

        Raises:
            RuntimeError: it has no more scalers than that, or after shutdown.
        """
        with self._announced():
            self._require_active("scale_loss")
            if done >= len(scalers):
                raise RuntimeError(
                    f"scale_loss was called more than num_loss={len(scalers)} times since the last step(): pass the "
                    "number of backward passes per step to handle.wrap_optimizer(optimizer, num_loss=...)"
                )
        return self.scaled(loss, [optimizer], scalers[done])

    @scaled_pass
    def scaled(self, loss: Node, optimizers: Sequence[Any], scaler: LossScale) -> Generator[Node, None, None]:
        """One scaled backward pass: the body of every ``scale_loss``."""
        with nullcontext() if self._ranks is None else self._ranks.one_pass():
            self._require_active("scale_loss")
            check_loss(loss)
            if bridge.on_device(loss.value):
                with self._scaled_on_device(loss, optimizers, scaler) as scaled_loss:
                    yield scaled_loss
                return
            if self._ranks is not None:
                raise ValueError("handle.distribute averages gradients of OpenCL devices, not of netcl's numpy backend")
            note_numpy_backend()
            yield loss

    @contextmanager
    def _scaled_on_device(self, loss: Node, optimizers: Sequence[Any], scaler: LossScale) -> Iterator[Node]:
        guards = [self.guard(optimizer) for optimizer in optimizers]
        require_graph(loss)
        self._shown = None
        scaler = self._scales.on(loss.value.queue, scaler)
        reached = PassGradients(optimizers)
        scaled_loss = scaled_node(loss, scaler)
        with undone_by_error(reached.put_back):
            with gradient_marks.waiting_in(reached), open_loss(loss) if scaler.scales else nullcontext():
                yield scaled_loss
            if not self._active:
                raise RuntimeError(
                    "the AMP handle was shut down inside `with handle.scale_loss(...)`, whose end divides gradients: "
                    "call shutdown() after it. Gradients are as they were before the with"
                )
            if self._ranks is not None:
                reached.average(self._ranks, scaler)
            reached.require_any(scaler, ran=self._ranks is not None or has_run(scaled_loss))
            if others := reached.others:
                self._unnamed.meet(others, self._guards.optimizers)
            with scale_lock, uninterrupted():
                try:
                    reached.unscale(scaler, guards)
                    if recorder() is None:
                        end_pass(guards, scaler)
                    else:
                        host_step(partial(self._passed, guards, tokens(guards), scaler, reached.delivered()))
                except BaseException:
                    scaler.forget_found()
                    raise
        weights.clear()

    def _passed(
        self,
        guards: Sequence[StepGuard],
        then: Sequence[object],
        scaler: LossScale,
        delivered: Iterable[gradient_marks.Held],
    ) -> None:
        """Ends a scaled pass while it is recorded, and each replay of it."""
        self._require_active("the replay of a scaled backward pass")
        self._shown = None
        gradient_marks.restore(delivered, dict(zip(then, tokens(guards), strict=True)))
        end_pass(guards, scaler)

    # ------------------------------------------------------------------------------------------ several devices

    def distribute(self, comm: Any, *, reduce_dtype: str | None = None) -> Ranks:
        """From now on ``scale_loss`` averages gradients over the processes of an MPI communicator.

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
        self._require_active("distribute")
        if self._ranks is not None:
            raise RuntimeError("handle.distribute was called twice: one communicator averages a handle's gradients")
        self._ranks = Ranks(comm, reduce_dtype)
        self._guards.require_scaled = True
        return self._ranks

    def scalers_loaded(self) -> None:
        """The scalers have got new states: what was noted of passes since the last steps is lost."""
        self._guards.forget_heard()

    def tokens(self) -> dict[object, int]:
        """See ``StepGuards.tokens``."""
        return self._guards.tokens()

    def share_overflows(self, param_replicas: Iterable[Sequence[Tensor]]) -> None:
        """An overflow of one replica, whose gradients are part of a mean now, counts for all."""
        guards = [self._guards.stepping(params) for params in param_replicas]
        share_overflow([guard for guard in guards if guard is not None])

    # ------------------------------------------------------------------------------------------ end

    def shutdown(self) -> None:
        """Restores netcl to the identical objects it had before ``init``. A second call does nothing, but for going on
        where the first was interrupted.

        Raises:
            RankError: after ``distribute``, another rank is still training.
        """
        with self._ending:
            if not self._ended:  # all of this can be done twice
                self._active = False
                self._observe_no_more()
                set_process_region(None)
                self._patches.remove()
                weights.clear()
                from_nothing()
                self._ended = True
        self._on_shutdown(self)
        if self._ranks is not None and not self._has_left:
            self._has_left = True
            self._ranks.leave()

    def __enter__(self) -> AmpHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _require_active(self, what: str) -> None:
        if not self._active:
            raise RuntimeError(f"{what} was called on an AMP handle that is shut down: call amp.init() again")

    # ------------------------------------------------------------------------------------------ netcl's own loops

    def scale_loss_for(self, optimizer: Any, loss: Node) -> AbstractContextManager[Node]:
        """``scale_loss`` for a loop that is not the user's: by the wrapper if the optimizer is a wrapped one."""
        if isinstance(optimizer, OptimWrapper):
            return optimizer.scale_loss(loss)
        return self.scaled(loss, [optimizer], self._scaler)
