"""Paddle's loss scalers, ``GradScaler`` and ``AmpScaler``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyopencl as cl

from clamp import bridge, session
from clamp.bridge import Node, Tensor
from clamp.compat.settings import FaceRule, UncheckedRule, require_number, warn_if_nothing_is_gained
from clamp.scaling.loss_scale import DynamicLossScale, require_state
from clamp.scaling.manual import ManualScaling
from clamp.scaling.step_report import History


class _AtLeastOne(DynamicLossScale):
    """Paddle's scale: an overflow makes it ``max(scale * decr_ratio, 1)``, so one that was set below 1 becomes 1.

    A scale may be set below 1, and then the rule's ``min_scale`` is below 1 until an overflow ends that.
    """

    def adjust(self) -> None:
        before = self.read() if self.rule.min_scale < 1 else None  # reads the device where the scale may be below 1
        self.rule = replace(self.rule, min_scale=1.0)
        super().adjust()
        if before is None:
            return
        after = self.read()
        # The kernel never raises a scale that overflowed. A clean step counts in the tracker, or grows the scale.
        lowered = before.overflow and after[:2] == (before.scale, 0) and after.bad_steps == 0
        if after.scale < 1 and lowered:
            self.set_scale(1.0)
        elif after.scale < 1:
            self.rule = replace(self.rule, min_scale=after.scale)


class _Scaling(ManualScaling):
    """A loss scale that does not sink below 1."""

    _scale_class = _AtLeastOne
    moves = True  # whether it is ever updated

    def _scaler(self, queue: cl.CommandQueue) -> DynamicLossScale:
        scaler = super()._scaler(queue)
        scaler.comes_down = self.moves
        scaler.cure = "" if self.moves else "scaler = GradScaler(use_dynamic_loss_scaling=True)"
        return scaler

    def _make(self, state: Mapping[str, Any]) -> DynamicLossScale:
        scaler = super()._make(state)
        scaler.rule = replace(scaler.rule, min_scale=min(1.0, float(state["loss_scale"])))
        return scaler


def _check_minimize(
    loss: Any = None, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
) -> None:
    if not isinstance(loss, Node | Tensor | None):
        raise TypeError(f"minimize() takes the scaled loss, a node or a tensor, got {type(loss).__name__}")
    if startup_program is not None:
        raise ValueError("minimize(startup_program=...) is for Paddle's static graph: leave it out")
    if parameters is not None or no_grad_set is not None:
        raise ValueError(
            "minimize(parameters=..., no_grad_set=...) cannot choose parameters: the optimizer steps all of its own. "
            "Build one of the parameters that are to be trained, or freeze the others with requires_grad=False."
        )


_STATE_KEYS = (
    "scale",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_count",
    "decr_count",
    "use_dynamic_loss_scaling",
)


class GradScaler:
    """Paddle's loss scaler::

        scaler = GradScaler(init_loss_scaling=1024)
        with auto_cast():
            loss = loss_of(model(x), y)
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.minimize(optimizer, scaled)      # or scaler.step(optimizer) and scaler.update()
        optimizer.zero_grad()

    Args:
        enable: False: every method passes through, and the other arguments may be anything.
        init_loss_scaling: the first scale, finite and positive.
        incr_ratio: above 1: the scale grows by it after ``incr_every_n_steps`` steps without inf or nan.
        decr_ratio: between 0 and 1: the scale shrinks by it, not below 1, after ``decr_every_n_nan_or_inf`` steps in
            a row with inf or nan.
        incr_every_n_steps, decr_every_n_nan_or_inf: at least 1.
        use_dynamic_loss_scaling: False: the scale stays; steps with inf or nan are skipped all the same.

    Raises:
        ValueError: an argument is none of these.
    """

    def __init__(
        self, enable: bool = True, init_loss_scaling: float = 2.0**16, incr_ratio: float = 2.0, decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000, decr_every_n_nan_or_inf: int = 1, use_dynamic_loss_scaling: bool = True,
    ) -> None:  # fmt: skip
        self._enable = bool(enable)
        self._dynamic = bool(use_dynamic_loss_scaling)
        self._init_scale = init_loss_scaling
        settings = incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf
        start, rule = (init_loss_scaling, FaceRule(*settings)) if enable else (1.0, UncheckedRule(*settings))
        self._scaling = _Scaling(start, rule, around_step=session.around_step)
        self._scaling.moves = self._dynamic

    # ------------------------------------------------------------------------------------------ a step

    def scale(self, var: Node | Tensor) -> Any:
        """``var * scale``, float32; run backward from it.

        Raises:
            TypeError: var is no node or tensor, or not float32, float16 or bfloat16.
        """
        if not self._enable:
            return bridge.with_backward(var)
        if not isinstance(var, Node | Tensor):
            raise TypeError(f"scale() takes a node or a tensor, got {type(var).__name__}")
        session.ensure_patched()  # so that what is returned has a backward()
        if isinstance(var.value, Tensor):
            warn_if_nothing_is_gained(var.value, "float16")
        return self._scaling.scale(var)

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients of the optimizer's parameters by the scale, to look at them or clip them.

        Raises:
            RuntimeError: twice since the last update, after ``step``, or before any ``scale``.
        """
        if self._enable:
            self._scaling.unscale_(optimizer)

    def step(self, optimizer: Any) -> Any:
        """``optimizer.step()`` if all gradients are finite; unscales them unless that is done. Call ``update`` after.

        With a scale that stays, ``update`` has nothing to do and may be left out, as in Paddle.

        Raises:
            RuntimeError: twice since the last update, no gradients, or before any ``scale``.
        """
        if not self._enable:
            return optimizer.step()
        result = self._scaling.step(optimizer)
        if not self._dynamic:
            self._scaling.make_ready()
        return result

    def update(self) -> None:
        """Moves the scale by what the steps since the last update met.

        Raises:
            RuntimeError: there was no step, or no gradients.
        """
        if not self._enable:
            return
        if self._dynamic:
            self._scaling.update()
        else:
            self._scaling.make_ready()

    def minimize(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """``step(optimizer)`` and ``update()``.

        Args:
            optimizer: netcl's, or one like it.
            args, kwargs: of Paddle's ``Optimizer.minimize``: ``loss``, the scaled loss, which is not used; and
                ``startup_program``, ``parameters`` and ``no_grad_set``, which must be None.

        Raises:
            RuntimeError: as ``step``.
            TypeError: an argument that Paddle's has not, or a loss that is none.
            ValueError: an argument that chooses parameters: an optimizer steps all of its own.
        """
        _check_minimize(*args, **kwargs)
        result = self.step(optimizer)
        self.update()
        return result

    @property
    def history(self) -> History:
        """What the last 1000 steps did, the newest last; a skipped one says why. Not of a disabled scaler."""
        return self._scaling.history

    # ------------------------------------------------------------------------------------------ settings

    def is_enable(self) -> bool:
        """Whether this scaler does anything."""
        return self._enable

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Whether the scale moves."""
        return self._dynamic

    def get_loss_scaling(self) -> float:
        """The scale now; reads the device. 1.0 if disabled."""
        return float(self._scaling.state_dict()["loss_scale"]) if self._enable else 1.0

    def get_init_loss_scaling(self) -> float:
        """The first scale."""
        return self._init_scale

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Sets the scale."""
        if self._enable:
            self._scaling.set_scale(new_init_loss_scaling)
        self._init_scale = new_init_loss_scaling

    def get_incr_ratio(self) -> float:
        """Factor by which the scale grows."""
        return self._scaling.rule.growth_factor

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Sets the factor by which the scale grows, above 1."""
        self._scaling.rule = replace(self._scaling.rule, growth_factor=new_incr_ratio)

    def get_decr_ratio(self) -> float:
        """Factor by which the scale shrinks."""
        return self._scaling.rule.backoff_factor

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Sets the factor by which the scale shrinks, between 0 and 1."""
        self._scaling.rule = replace(self._scaling.rule, backoff_factor=new_decr_ratio)

    def get_incr_every_n_steps(self) -> int:
        """Steps without inf or nan after which the scale grows."""
        return self._scaling.rule.growth_interval

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int) -> None:
        """Sets the number of steps without inf or nan after which the scale grows."""
        self._scaling.rule = replace(self._scaling.rule, growth_interval=new_incr_every_n_steps)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Steps in a row with inf or nan after which the scale shrinks."""
        return self._scaling.rule.decr_every_n_nan_or_inf

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int) -> None:
        """Sets the number of steps in a row with inf or nan after which the scale shrinks."""
        self._scaling.rule = replace(self._scaling.rule, decr_every_n_nan_or_inf=new_decr_every_n_nan_or_inf)

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Scale, settings and counts under Paddle's keys (``scale`` is an array of one); empty if disabled."""
        if not self._enable:
            return {}
        state, rule = self._scaling.state_dict(), self._scaling.rule
        scale = np.array([state["loss_scale"]], np.float32)
        settings = (rule.growth_factor, rule.backoff_factor, rule.growth_interval, rule.decr_every_n_nan_or_inf)
        counts = (state["unskipped"], state.get("bad_steps", 0))
        return dict(zip(_STATE_KEYS, (scale, *settings, *counts, self._dynamic), strict=True))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a ``state_dict``, Paddle's too. Does nothing if disabled.

        Raises:
            TypeError: it is no dict.
            RuntimeError: it is empty: it was saved by a disabled scaler.
            ValueError: it is malformed. Nothing was changed.
        """
        if not self._enable:
            return
        require_state(state_dict, "state_dict()")
        if not state_dict:
            raise RuntimeError("the state dict is empty: it was saved by a GradScaler that is not enabled")
        if missing := [key for key in _STATE_KEYS if key not in state_dict]:
            raise ValueError(f"a GradScaler's state dict has the keys {', '.join(_STATE_KEYS)}; missing: {missing}")
        scale, *settings, good, bad, dynamic = (state_dict[key] for key in _STATE_KEYS)
        for each in np.ravel(scale):
            require_number("scale", each)
        scale = np.asarray(scale, np.float64)
        if scale.size != 1:
            raise ValueError(f"the scale must be one number, got an array of shape {scale.shape}")
        rule = FaceRule(*settings)
        self._scaling.load_state_dict({"loss_scale": scale.item(), "unskipped": good, "bad_steps": bad})
        self._scaling.rule = rule
        self._scaling.set_scale(scale.item())  # what a static scale's steps have left moves it no more
        self._dynamic = self._scaling.moves = bool(dynamic)
        self._init_scale = scale.item()


class AmpScaler(GradScaler):
    """Paddle's older scaler: ``GradScaler`` with other defaults."""

    def __init__(
        self, enable: bool = True, init_loss_scaling: float = 2.0**15, incr_ratio: float = 2.0, decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000, decr_every_n_nan_or_inf: int = 2, use_dynamic_loss_scaling: bool = True,
    ) -> None:  # fmt: skip
        settings = incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf
        super().__init__(enable, init_loss_scaling, *settings, use_dynamic_loss_scaling)
