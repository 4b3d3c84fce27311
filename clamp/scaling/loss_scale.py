"""Loss scales: keep 16-bit gradients away from zero and infinity by scaling the loss.

Three classes with one interface, so that nobody asks which one it holds (after jmp's loss scales); the one that moves,
and ``make_loss_scale``, are in ``dynamic_scale``:

    scale = make_loss_scale("auto", "float16")
    scaled = scale.scale_loss(loss)                 # backward starts here
    scale.unscale_(gradients, gradients)            # after backward, for all optimizers' gradients
    scale.update(mask=1, fresh=1)                   # the pass is over; the scale may move
    if not scale.overflowed(mask=1):                # the only line that waits for the device
        optimizer.step()

The scale and all that decides about it live in 32 bytes on the device (kernels/loss_scale.cl). No kernel has the
scale built in or passed as an argument: nothing is compiled when it changes, and a recorded graph replays with
the live one.

An optimizer is a bit, chosen by the caller: ``mask`` has the bits of the optimizers that a backward pass reached,
``fresh`` those among them for which it was the first pass since their last step.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.interrupts import contextmanager, holding, of_threads
from clamp.ops.arguments import shown
from clamp.ops.cast import cast
from clamp.ops.loss_scale import ASSIGN, AppliedScale, DeviceState, ScaleState, scale_lock
from clamp.ops.multi_tensor import check_, unscale_

MAX_OPTIMIZERS = 32  # one bit each in a mask
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)  # its reciprocal is finite, so that a scale down there can recover


def positive(name: str, value: Any) -> float:
    """The value rounded to float32, which the device computes with."""
    try:
        with np.errstate(over="ignore"):
            rounded = float(np.float32(value))
    except (TypeError, ValueError):
        rounded = 0.0
    if isinstance(value, str) or not 0 < rounded <= LARGEST:
        raise ValueError(f"{name} must be a finite positive number, not {shown(value)}")
    return rounded


def count(name: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """The value as an integer of the device's."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}, not {shown(value)}")
    return number


def check_masks(mask: int, fresh: int) -> None:
    """Raises ValueError where mask has no bit or more than 32, or fresh has one that mask has not."""
    if not 0 < mask < 1 << MAX_OPTIMIZERS:
        raise ValueError(f"mask must have between 1 and {MAX_OPTIMIZERS} bits, not {mask:#b}")
    if fresh & ~mask:
        raise ValueError(f"fresh {fresh:#b} has bits that mask {mask:#b} has not")


def parse_state(state: Mapping[str, Any], called: Mapping[str, str] = MappingProxyType({})) -> ScaleState:
    """What ``state_dict`` returned; the errors are those of ``load_state_dict``.

    Args:
        called: what messages call an entry, where its user has given it another name.
    """
    require_state(state, "state_dict()")
    if not state:
        raise RuntimeError("the state dict is empty: it was saved while loss scaling was disabled")
    known = {"loss_scale", "unskipped", "overflow", "bad_steps"}
    if not {"loss_scale", "unskipped"} <= state.keys() <= known:
        raise ValueError(f"a loss scale's state dict has the keys {sorted(known)}, not {sorted(state)}")
    return ScaleState(
        positive(called.get("loss_scale", "loss_scale"), state["loss_scale"]),
        count(called.get("unskipped", "unskipped"), state["unskipped"]),
        count("overflow", state.get("overflow", 0), most=2**MAX_OPTIMIZERS - 1),
        count(called.get("bad_steps", "bad_steps"), state.get("bad_steps", 0)),
    )


def require_state(state: Any, made_by: str) -> None:
    """Raises TypeError for what no ``load_state_dict`` can load: it is no dict."""
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict takes the dict that {made_by} returned, got {shown(state)}")


class _Apart(threading.local):
    """What stands in this thread for the states of loss scales, see ``LossScale.apart``."""

    def __init__(self) -> None:
        self.states: Mapping[LossScale, DeviceState] = {}


_thread = of_threads(_Apart())


class LossScale(bridge.Listed):
    """The interface of all loss scales, and one that never changes by itself. Overflows are noticed all the same,
    so that their steps are skipped.

    Args:
        scale: finite and positive.

    Raises:
        ValueError: it is not.
    """

    #: Whether the scale moves by itself.
    is_dynamic: bool = False
    #: Whether losses are multiplied at all.
    scales: bool = True
    #: Whether overflows lower it: by itself, or by whoever it is the copy of.
    comes_down: bool = False
    #: What its user writes to have one that does, as code, where it is not the handle's.
    cure: str = ""
    #: Whether its user has been told of gradients that it does not divide, since their loss was not scaled.
    told_of_plain: bool = False

    def __init__(self, scale: float) -> None:
        self._own_state = DeviceState(positive("the loss scale", scale))
        self.changes = 0  # how often somebody has set the scale, or loaded a state; of a copy, how often before it
        self._queue: cl.CommandQueue | None = None  # the first that it was asked for
        self._copies: dict[cl.CommandQueue, LossScale] = {}  # on others; a copy has the same ones

    @property
    def _state(self) -> DeviceState:
        return _thread.states.get(self, self._own_state)

    @contextmanager
    def apart(self, state: ScaleState) -> Iterator[None]:
        """Inside the ``with``, this scale is one of this thread alone, which begins with a state, without overflows.
        Passes of other threads go on by the one that all share, so that what runs here may wait for them. Overflows
        that are left at the end are known to the optimizers' steps also after it."""
        apart = DeviceState(1.0)
        apart.write(**state._replace(overflow=0, nans=0)._asdict())
        apart.is_told_of = self._own_state.is_told_of
        try:
            with holding(_thread, "states", {**_thread.states, self: apart}):
                yield
        finally:
            self._note(apart)

    @contextmanager
    def held(self, _: ScaleState) -> Iterator[None]:
        """As ``apart``, for a replay: its launches name the state that all share, so that passes of other threads wait.
        None of them is waited for, since a replay runs no code of a user's."""
        with scale_lock:
            before = self.read()
            try:
                yield
            finally:
                met = self.read()
                overflow, nans = before.overflow | met.overflow, before.nans | met.nans
                self._state.write(**before._replace(overflow=overflow, nans=nans)._asdict(), event=0, found=0)

    def _note(self, apart: DeviceState) -> None:
        """Adds the overflows of a state, which waits for the device only where that has it, to those of this one."""
        met = apart.words()[0]
        if met["overflow"]:
            with scale_lock:
                now = self.read()
                overflow, nans = now.overflow | int(met["overflow"]), now.nans | int(met["nans"])
                self._state.write(overflow=overflow, nans=nans)

    def on(self, queue: cl.CommandQueue) -> LossScale:
        """The scale on a queue: itself on the first one that it is asked for, a copy on each further one.

        A copy goes on from where this one is, and moves by its rule, also by one that it is given later. Overflows that
        it takes along end with each optimizer's first pass there. Copies move alike because replicas meet the same
        gradients, because who shares overflows lets them ``follow``, and because they do that, too, where somebody has
        set this one.
        """
        with scale_lock:  # of threads that ask for the same one both get it
            self._queue = self._queue or queue
            if queue == self._queue:
                return self
            if queue not in self._copies:
                self._copies[queue] = self._elsewhere()
            elif self._copies[queue].changes != self.changes:
                self._copies[queue].follow(self.read(), 0)
            self._copies[queue].changes = self.changes
            return self._copies[queue]

    def _elsewhere(self) -> LossScale:
        other = copy.copy(self)
        other._own_state = DeviceState(1.0)
        other.load_state_dict(self.state_dict())
        return other

    @property
    def copies(self) -> list[LossScale]:
        """Those on other queues than the first."""
        return list(self._copies.values())

    def follow(self, state: ScaleState, mask: int) -> None:
        """Goes on from where the scale of another queue is, on which the optimizers in ``mask`` have overflowed; what
        was assigned since the last ``adjust`` moves it no more."""
        own = self.read()
        self._state.write(**state._replace(overflow=own.overflow | mask, nans=own.nans)._asdict(), event=0)

    @property
    def last_seen(self) -> float:
        """The scale when it was last read or set; does not read the device."""
        return self._state.seen

    def applied(self) -> AppliedScale:
        """The scale as gradients keep it that are multiplied by it now."""
        return self._state.applied()

    def made(self, scale: AppliedScale) -> bool:
        """Returns whether a scale is this one's, now or earlier."""
        return scale.state is self._state

    @property
    def layerwise(self) -> bool:
        """Returns whether each layer has a scale of its own besides."""
        return False

    @property
    def floor(self) -> float:
        """The scale that overflows cannot lower any further."""
        return self.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss * scale`` as a float32 tensor of the loss's shape.

        Args:
            loss: float32, float16 or bfloat16.

        Raises:
            TypeError: the loss has another dtype.
            ValueError: it is on another queue than before.
        """
        if loss.dtype not in bridge.STORAGE:
            raise TypeError(f"scale_loss: {loss.dtype} cannot be scaled; float32, float16 or bfloat16 is needed")
        return self.applied().multiply(loss, "float32")

    def unscale_(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], applied: AppliedScale | None = None
    ) -> None:
        """``targets[i] = sources[i] / scale`` in float32 (``clamp.ops.multi_tensor.unscale_``); remembers whether any
        result is inf or nan.

        Args:
            applied: the scale to divide by where it is not this one's as it is now: an earlier one, or another's.
        """
        if sources or targets:
            queue = (*sources, *targets)[0].queue
            multiplier = None if applied is None else applied.buffer(queue)
            unscale_(sources, targets, self._state.buffer(queue), multiplier)

    def check_(self, gradients: Sequence[Tensor]) -> None:
        """Remembers whether any unscaled gradient is inf or nan, as ``unscale_`` does, and changes none."""
        if gradients and self.scales:
            check_(gradients, self._state.buffer(gradients[0].queue))

    def note_overflow(self) -> None:
        """Remembers an inf or nan that was met elsewhere: on another queue or machine. Waits for the device."""
        if self.scales:
            self._state.write(found=1)

    def forget_found(self) -> None:
        """Forgets what ``unscale_`` met since the last pass ended: this one is given up. Waits for the device."""
        if self.scales:
            self._state.write(found=0)

    def assign(self, mask: int, fresh: int) -> None:
        """Ends a backward pass: what ``unscale_`` met since the last one counts for the optimizers in ``mask``.

        The scale stays, so that several optimizers' gradients can be unscaled one after the other; ``adjust``
        moves it.

        Args:
            mask: bits of the optimizers whose gradients the pass reached, 1 to 2**32 - 1.
            fresh: those among them that this was the first pass for since their last step.

        Raises:
            ValueError: mask has no bit or more than 32, or fresh has one that mask has not.
        """
        check_masks(mask, fresh)
        if self.scales:
            self._state.launch(ASSIGN, mask, fresh)

    def adjust(self) -> None:
        """Moves the scale by what was assigned since the last call."""

    def update(self, mask: int, fresh: int) -> None:
        """``assign`` and ``adjust`` in one launch."""
        self.assign(mask, fresh)

    def read(self) -> ScaleState:
        """The state now, by one small blocking read. Not cached: a replayed graph changes it unseen."""
        return self._state.read()

    def verdict(self) -> ScaleState:
        """Returns the state, read only if something that moves it has been launched or written since it was read.

        A pass whose end has read it leaves nothing to read to the steps. Passes end on the host in replays, too.
        """
        return self._state.fresh or self.read()

    def set_scale(self, value: float) -> None:
        """Sets the scale; what was assigned since the last ``adjust`` moves it no more. Waits for the device.

        Raises:
            ValueError: the value is not finite and positive as a float32, or beyond the limits of the scale.
        """
        self._own_state.write(scale=self._check_scale(value), event=0)
        self.changes += 1

    def _check_scale(self, value: float) -> float:
        return positive("the loss scale", value)

    @property
    def scale(self) -> float:
        """The factor on the loss; reads the device."""
        return self.read().scale

    @property
    def growth_tracker(self) -> int:
        """Clean steps since the last overflow or growth of the scale; reads the device."""
        return self.read().growth_tracker

    def overflowed(self, mask: int) -> bool:
        """Returns whether the gradients of any optimizer in ``mask`` overflowed since its last step; reads the
        device."""
        return bool(self.read().overflow & mask)

    def state_dict(self) -> dict[str, Any]:
        """A state from which ``load_state_dict`` goes on identically: apex's two keys and two more."""
        scale, growth_tracker, overflow, bad_steps, _ = self.read()
        return {"loss_scale": scale, "unskipped": growth_tracker, "overflow": overflow, "bad_steps": bad_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a ``state_dict``; apex's, which has only ``loss_scale`` and ``unskipped``, will do.

        Raises:
            TypeError: it is no dict.
            RuntimeError: the dict is empty (it was saved while loss scaling was disabled).
            ValueError: it is malformed, or its scale is beyond the limits. Nothing was changed.
        """
        saved = parse_state(state)
        self._own_state.write(**saved._replace(scale=self._check_scale(saved.scale))._asdict())
        self.changes += 1


class _One(AppliedScale):
    """A scale of 1, which multiplies and divides nothing."""

    def now(self) -> AppliedScale:
        return self

    def multiply(self, x: Tensor, out_dtype: str) -> Tensor:
        return cast(x, out_dtype)

    def divide(self, x: Tensor) -> Tensor:
        return cast(x, "float32")


class NoLossScale(LossScale):
    """No scaling, for float32 and bfloat16: the scale is 1, and gradients stay as they are.

    Nothing overflows here: an inf or nan in them is found by the optimizer's step.
    """

    scales = False

    def __init__(self) -> None:
        super().__init__(1.0)
        self._one = _One(self._state)

    def _elsewhere(self) -> LossScale:
        return NoLossScale()

    def applied(self) -> AppliedScale:
        return self._one

    def unscale_(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], applied: AppliedScale | None = None
    ) -> None:
        if applied is not None and not isinstance(applied, _One) and sources:
            queue = sources[0].queue
            unscale_(sources, targets, self._state.buffer(queue), applied.buffer(queue))
            return
        # Gradients that become others' are still to be widened; a division by 1 is the fused way.
        pairs = [(source, target) for source, target in zip(sources, targets, strict=True) if source is not target]
        if pairs:
            widened, wide = zip(*pairs, strict=True)
            unscale_(widened, wide, self._state.buffer(widened[0].queue))

    def read(self) -> ScaleState:
        return ScaleState(1.0, 0, 0, 0)

    def set_scale(self, value: float) -> None:
        if value != 1:
            raise ValueError(f"loss scaling is off: the scale is 1 and cannot become {value!r}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parse_state(state)  # a float16 run's, continued in bfloat16, is as good as any
