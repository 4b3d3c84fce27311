"""What ``amp.init`` returns: the handle, its do-nothing twin, and the wrapper for optimizers with several losses."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import wrapt

from clamp import bridge
from clamp.autocast import Region, current_region, in_region, set_process_region
from clamp.bridge import HALF_DTYPES, Node, Tape, Tensor
from clamp.cache import weights
from clamp.functions.casting import Operand, note_numpy_backend, record
from clamp.ops.elementwise import elementwise
from clamp.optimizers import StepGuard, StepGuards, StepReport
from clamp.patching.patch import Patches, Registration
from clamp.scaler import LossScale


class AmpHandle:
    """AMP at work: netcl's functions cast, losses are scaled, until ``shutdown``.

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
        on_shutdown: called once when the handle shuts down.
    """

    def __init__(
        self,
        region: Region,
        registrations: Sequence[Registration],
        make_scaler: Callable[[], LossScale],
        max_skips_at_floor: int = 25,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self._region = region
        self._make_scaler = make_scaler
        self._scaler = make_scaler()
        self._wrapped_scalers: list[LossScale] = []
        self._guards = StepGuards(max_skips_at_floor)
        self._on_shutdown = on_shutdown
        self._last: StepGuard | None = None
        self._patches = Patches(region.policies, registrations, self._guards.step)
        self._patches.install()
        set_process_region(region)
        self._active = True

    # ------------------------------------------------------------------------------------------ state

    def is_active(self) -> bool:
        """Whether netcl is patched by this handle and its casts are on."""
        return self._active

    @property
    def loss_scale(self) -> float:
        """The current loss scale; waits for the device and reads a few bytes from it."""
        return self._scaler.scale

    @property
    def scalers(self) -> list[LossScale]:
        """The handle's own scaler, then those of wrapped optimizers in the order they were wrapped."""
        return [self._scaler, *self._wrapped_scalers]

    @property
    def last_step(self) -> StepReport | None:
        """What the last ``optimizer.step()`` of an optimizer with a scaled loss did; None before the first."""
        return self._last.last if self._last is not None else None

    def clear_cache(self) -> None:
        """Forgets the 16-bit copies of weights. A kernel of your own that writes parameters must call it."""
        weights.clear()

    _clear_cache = clear_cache

    def disable_casts(self) -> AbstractContextManager[None]:
        """Inside the ``with``, this thread's ops run in the dtypes they are given."""
        return in_region(replace(current_region() or self._region, enabled=False))

    # ------------------------------------------------------------------------------------------ loss scaling

    def scale_loss(self, loss: Node, optimizer: Any) -> AbstractContextManager[Node]:
        """Scales a loss for backward and, at the end of the ``with``, unscales the gradients.

        Args:
            loss: one element, float32 or 16-bit.
            optimizer: the optimizer, or a list of optimizers, whose parameters this backward reaches.

        Yields:
            The scaled loss, a float32 node; run ``scaled_loss.backward()`` or ``tape.backward(scaled_loss)``.

        An inf or nan in a gradient makes exactly the next ``step()`` of these optimizers do nothing. An
        exception inside the ``with`` leaves gradients, scale and counters as they were before it.

        Raises:
            TypeError: the loss is no node or not floating, or an optimizer has no ``params``.
            ValueError: the loss has more than one element.
            RuntimeError: after ``wrap_optimizer``: call ``optimizer.scale_loss`` instead; or after shutdown.
        """
        self._require_active("scale_loss")
        if self._wrapped_scalers:
            raise RuntimeError(
                "handle.scale_loss cannot be used after handle.wrap_optimizer: call optimizer.scale_loss(loss) "
                "on the wrapped optimizer, for every loss"
            )
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        if not optimizers:
            raise ValueError("scale_loss got an empty list of optimizers: pass the optimizers that will step")
        return self.scaled(loss, optimizers, self._scaler)

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

    def guard(self, optimizer: Any) -> StepGuard:
        """The guard over this optimizer's ``step``."""
        guard = self._guards.of(optimizer)
        self._patches.wrap_step(type(optimizer))
        return guard

    @contextmanager
    def scaled(self, loss: Node, optimizers: Sequence[Any], scaler: LossScale) -> Iterator[Node]:
        """One scaled backward pass: the body of every ``scale_loss``."""
        check_loss(loss)
        if not bridge.on_device(loss.value):
            note_numpy_backend()
            yield loss
            return
        guards = self._guards.sharing([self.guard(optimizer) for optimizer in optimizers])
        gradients = _Gradients(optimizers)
        gradients.set_aside()
        try:
            yield scaled_node(loss, scaler)
            gradients.unscale(scaler)
        except BaseException:
            gradients.put_back()
            raise
        fresh = sum(guard.mask for guard in guards if guard.is_fresh(scaler))
        scaler.update(sum(guard.mask for guard in guards), fresh)
        for guard in guards:
            guard.passed(scaler)
        self._last = guards[len(optimizers) - 1]
        weights.clear()

    # ------------------------------------------------------------------------------------------ end

    def shutdown(self) -> None:
        """Restores netcl to the identical objects it had before ``init``. A second call does nothing."""
        if not self._active:
            return
        self._active = False
        set_process_region(None)
        self._patches.remove()
        weights.clear()
        self._on_shutdown()

    def __enter__(self) -> AmpHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _require_active(self, what: str) -> None:
        if not self._active:
            raise RuntimeError(f"{what} was called on an AMP handle that is shut down: call amp.init() again")


class NoOpHandle:
    """The handle of ``amp.init(enabled=False)``: the same methods, and none of them does anything."""

    loss_scale = 1.0
    last_step: StepReport | None = None

    def is_active(self) -> bool:
        """False: netcl is as it was."""
        return False

    @contextmanager
    def scale_loss(self, loss: Node, optimizer: Any) -> Iterator[Node]:
        """Yields the loss itself, with a ``backward`` for the length of the ``with``."""
        own = "backward" not in vars(loss) and not hasattr(type(loss), "backward")
        if own:
            # netcl's nodes have none; a script written for AMP calls it all the same.
            loss.backward = types.MethodType(lambda node, grad=None: Tape().backward(node, grad), loss)
        try:
            yield loss
        finally:
            if own:
                del loss.backward

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """The optimizer with a ``scale_loss`` that does nothing."""
        return OptimWrapper(optimizer, self, [])

    @contextmanager
    def disable_casts(self) -> Iterator[None]:
        """Nothing to disable."""
        yield

    def clear_cache(self) -> None:
        """Nothing is cached."""

    _clear_cache = clear_cache

    def shutdown(self) -> None:
        """Nothing was patched."""

    def __enter__(self) -> NoOpHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class OptimWrapper(wrapt.ObjectProxy[Any]):
    """An optimizer with ``scale_loss``; everything else is the optimizer's own.

    ``step`` does nothing if any of the losses since the last step overflowed.
    """

    def __init__(self, optimizer: Any, handle: AmpHandle | NoOpHandle, scalers: list[LossScale]) -> None:
        super().__init__(optimizer)
        self._self_handle = handle
        self._self_scalers = scalers
        self._self_losses = 0

    @contextmanager
    def scale_loss(self, loss: Node) -> Iterator[Node]:
        """Scales one loss of this step, as ``AmpHandle.scale_loss`` does. One that ends in an error does not count.

        Raises:
            RuntimeError: more losses than ``num_loss`` since the last step.
        """
        handle = self._self_handle
        if isinstance(handle, NoOpHandle):
            with handle.scale_loss(loss, self.__wrapped__) as unscaled:
                yield unscaled
            return
        if self._self_losses == len(self._self_scalers):
            raise RuntimeError(
                f"scale_loss was called more than num_loss={len(self._self_scalers)} times since the last step(): "
                f"pass the number of backward passes per step to handle.wrap_optimizer(optimizer, num_loss=...)"
            )
        with handle.scaled(loss, [self.__wrapped__], self._self_scalers[self._self_losses]) as scaled_loss:
            yield scaled_loss
        self._self_losses += 1

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, unless a loss overflowed."""
        self._self_losses = 0
        return self.__wrapped__.step(*args, **kwargs)

    @property
    def loss_scale(self) -> float:
        """Loss scale of this optimizer's first loss."""
        return self._self_scalers[0].scale if self._self_scalers else 1.0


# ---------------------------------------------------------------------------------------------- one pass


def check_loss(loss: Any) -> None:
    """A loss that can be scaled is a recorded node of one floating element.

    Raises:
        TypeError, ValueError: it is not; the message says what it is.
    """
    if not isinstance(loss, Node) or not isinstance(loss.value, Tensor):
        hint = (
            " (a bare Tensor: it was computed under no_grad, or from bare Tensors)" if isinstance(loss, Tensor) else ""
        )
        raise TypeError(f"the loss must be an autograd Node, got {type(loss).__name__}{hint}")
    if loss.value.dtype not in bridge.STORAGE:
        raise TypeError(f"the loss must be float32, float16 or bfloat16, got {loss.value.dtype}")
    if loss.value.size != 1:
        raise ValueError(f"the loss must have one element, got shape {tuple(loss.shape)}: sum or average it first")


def scaled_node(loss: Node, scaler: LossScale) -> Node:
    """loss * scale as a float32 node; its gradient stays float32, because 2^16 does not fit into half."""
    operand = Operand(loss, loss.value)
    return record(
        scaler.scale_loss(loss.value),
        lambda grad: [scaler.scale_gradient(grad, "float32")],
        (operand,),
        "scale_loss",
    )


@dataclass
class _Slot:
    """A parameter: ``master`` is what the optimizer steps, ``model`` what backward gives a gradient to."""

    master: Tensor
    model: Tensor
    earlier: Tensor | None = None
    earlier_model: Tensor | None = None


class _Gradients:
    """The gradients that one backward pass delivers to some optimizers' parameters.

    Gradients of earlier passes are set aside before it and added back after it, so that no gradient is ever
    divided by a scale twice.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        slots: dict[int, _Slot] = {}
        for optimizer in optimizers:
            for param in bridge.optimizer_parameters(optimizer):
                slots.setdefault(id(param), _Slot(param, bridge.model_parameter(param)))
        self._slots = list(slots.values())

    def set_aside(self) -> None:
        """Takes the gradients of earlier passes off the parameters."""
        for slot in self._slots:
            slot.earlier, slot.earlier_model = slot.master.grad, slot.model.grad
            slot.master.grad = slot.model.grad = None

    def put_back(self) -> None:
        """Gives the parameters the gradients they had before this pass."""
        for slot in self._slots:
            slot.master.grad = slot.earlier
            slot.model.grad = slot.earlier_model

    def unscale(self, scaler: LossScale) -> None:
        """Divides this pass's gradients by the scale, in fp32, and adds the earlier ones."""
        reached = [slot for slot in self._slots if slot.model.grad is not None]
        # netcl's add hands one gradient to both of its parents: one source, one target.
        sources = {id(slot.model.grad): slot.model.grad for slot in reached}
        targets = {key: _target(grad) for key, grad in sources.items()}
        scaler.unscale_(list(sources.values()), list(targets.values()))
        for slot in reached:
            grad = targets[id(slot.model.grad)]
            if slot.model is not slot.master:
                slot.model.grad = None
            slot.master.grad = grad
        for slot in self._slots:
            if slot.earlier is None:
                continue
            now = slot.master.grad
            slot.master.grad = slot.earlier if now is None else elementwise("add", "float32", slot.earlier, now)


def _target(grad: Tensor) -> Tensor:
    return bridge.empty(grad.queue, grad.shape, "float32") if grad.dtype in HALF_DTYPES else grad
