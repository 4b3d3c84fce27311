"""PyTorch's face: ``GradScaler``, ``custom_fwd``, ``custom_bwd``. docs/coming-from-pytorch.md has every difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from clamp import bridge, session
from clamp.bridge import DTypeLike, Node, Tensor
from clamp.casting.arguments import mapped, with_items
from clamp.casting.policy_table import check_dtype
from clamp.compat.regions import refuse_device
from clamp.compat.scalers import FaceScaler, setting
from clamp.functions.recompute import checkpointed
from clamp.ops.arguments import shown, yes_or_no
from clamp.patching.user_functions import Backward, CustomBackward, CustomForward, require_function, runs_later


class GradScaler(FaceScaler):
    """PyTorch's gradient scaler::

        scaler = amp.GradScaler()
        for x, y in batches:
            optimizer.zero_grad()
            with amp.autocast():
                loss = loss_of(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)                    # only to look at the gradients, or to clip them
            clip_grad_norm(model.parameters(), 1.0)
            scaler.step(optimizer)                        # does nothing if a gradient is inf or nan
            scaler.update()

    The scale lives on the device, a copy for each queue; ``step`` reads it once. It works with ``amp.autocast``
    alone and under ``amp.init``.

    Args:
        init_scale: the first scale, finite and positive.
        growth_factor: above 1: the scale grows by it after ``growth_interval`` updates without inf or nan.
        backoff_factor: between 0 and 1: the scale is multiplied by it at an update after inf or nan.
        growth_interval: at least 1.
        enabled: False: every method passes through, and the other arguments may be anything but a device.
        device: refused; every queue gets a scale.

    Raises:
        ValueError: an argument is none of these.
        TypeError: ``init_scale`` is PyTorch's device type.
    """

    _names: ClassVar[Mapping[str, str]] = {
        "scale": "loss_scale", "growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "interval",
        "_growth_tracker": "unskipped",
    }  # fmt: skip
    _empty_state = (
        "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
    )

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: None = None,
    ) -> None:
        refuse_device("GradScaler", init_scale if isinstance(init_scale, str) else device)
        settings = {"growth": growth_factor, "backoff": backoff_factor, "interval": growth_interval}
        self._set_up(yes_or_no("amp.GradScaler", "enabled", enabled), init_scale, **settings)
        if self._enabled:
            session.ensure_patched()  # before the first loss: netcl's own mse_loss ignores the scale in backward

    # ------------------------------------------------------------------------------------------ a step

    def scale(self, outputs: Any) -> Any:
        """``outputs * scale``, float32.

        Args:
            outputs: a node or tensor of any shape, or nested iterables of them. Lists and tuples keep their type,
                other iterables become iterators.

        Raises:
            ValueError: something in it is no node or tensor.
            TypeError: a tensor is not float32, float16 or bfloat16.
        """
        if not self._enabled:
            return mapped(outputs, bridge.with_backward) if isinstance(outputs, Node | list | tuple) else outputs
        session.ensure_patched()  # so that what is returned has a backward(), after a handle's shutdown too
        return self._scaled(outputs)

    def _scaled(self, x: Any) -> Any:
        if isinstance(x, Node | Tensor):
            return self._scaling.scale(x)
        if isinstance(x, list | tuple):
            if not x:
                raise ValueError(f"scale() takes a node, a tensor or an iterable of them, not {x!r}, which has none")
            return with_items(x, [self._scaled(item) for item in x])
        if isinstance(x, Iterable) and not isinstance(x, str | bytes | Mapping | np.ndarray):
            return map(self._scaled, x)
        raise ValueError(f"scale() takes a node, a tensor or an iterable of them, not {shown(x)}")

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` if all gradients are finite; unscales them unless that is done.

        Returns:
            What the optimizer's step returns, None if it was skipped.

        Raises:
            RuntimeError: twice since the last update, a closure, no gradients, or before any ``scale``.
            FloatingPointError: many steps in a row were skipped at the smallest scale; names the gradients.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        return self._scaling.step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | Node | None = None) -> None:
        """Lowers the scale if any optimizer's gradients had inf or nan, or counts towards its growth.

        Args:
            new_scale: sets the scale instead; a number, or a tensor of one element. Needs no steps before it.

        Raises:
            RuntimeError: no optimizer was unscaled or stepped since the last update.
            ValueError: ``new_scale`` is not one finite positive number.
        """
        if not self._enabled:
            return
        if new_scale is None:
            self._scaling.update()
        else:
            self._scaling.set_scale(_number(new_scale))

    # ------------------------------------------------------------------------------------------ settings

    def is_enabled(self) -> bool:
        """Returns whether this scaler does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """The scale; reads the device. 1.0 if disabled."""
        return self._scale_now()

    get_growth_factor, set_growth_factor = setting(
        "growth_factor", "growth", "new_factor", "factor by which the scale grows", "above 1"
    )
    get_backoff_factor, set_backoff_factor = setting(
        "backoff_factor", "backoff", "new_factor", "factor by which the scale shrinks", "between 0 and 1"
    )
    get_growth_interval, set_growth_interval = setting(
        "growth_interval", "interval", "new_interval",
        "number of updates without inf or nan after which the scale grows", "at least 1",
    )  # fmt: skip


def _number(new_scale: Any) -> Any:
    """The value of a one-element tensor; anything else as it is."""
    value = getattr(new_scale, "value", new_scale)
    if not isinstance(value, Tensor):
        return new_scale
    if value.size != 1:
        raise ValueError(f"update(new_scale) takes a number or a tensor of one element, not of shape {value.shape}")
    return float(value.to_host().reshape(-1)[0])


# ---------------------------------------------------------------------------------------------- users' own ops


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, cast_inputs: DTypeLike | None = None, device_type: None = None
) -> Any:
    """Decorator for the forward of an op of your own: of its function of nodes, or of what ``apply_op`` calls.

    Args:
        fwd: the function; none where it decorates with arguments.
        cast_inputs: inside a region, floating inputs (nested ones too; float64 never) are cast to this dtype,
            differentiably, and nothing is cast inside. None: the function runs as what is around it does.
        device_type: refused.

    Raises:
        ValueError: there is no such dtype.
        TypeError: what it decorates is no function.

    Example::

        @amp.custom_fwd(cast_inputs="float32")
        def forward(x):                        # tensors
            return my_kernel(x)

        @amp.custom_bwd
        def backward(grad):
            return [my_backward_kernel(grad)]

        y = ag.apply_op(forward, backward, x)  # x: a node, 16-bit or not
    """
    refuse_device("custom_fwd", device_type)
    if cast_inputs is not None:
        cast_inputs = check_dtype(cast_inputs, "dtype for cast_inputs")
    if fwd is None:
        return partial(custom_fwd, cast_inputs=cast_inputs)
    require_function(fwd, "@custom_fwd")
    return CustomForward(fwd, cast_inputs)


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """``function(*args, **kwargs)``, whose activations are not kept: backward computes them again, but for results of
    attention and statistics of batch norms, up to a sixteenth of all bytes.

    What a model of many blocks keeps for backward is then one input a block, for one forward more::

        for block in blocks:
            x = amp.checkpoint(block, x)

    The function runs again as it ran: in the same autocast regions, with the same random numbers and dropout masks;
    running statistics of batch norms move once. Its gradients have the bits that they have without, but for sums over
    uses inside and outside, which come in another order. It may read parameters and nodes from outside, return nested
    containers, be checkpointed inside of another, and be recorded.

    Args:
        function: a function, method or layer that computes the same whenever it is called with the same arguments.
        args, kwargs: its arguments, nodes or anything else. They are kept until backward.
        use_reentrant: PyTorch's; has no effect.
        preserve_rng_state: PyTorch's; random numbers are always those of the forward.

    Returns:
        What the function returns, in nodes of the same values; under ``no_grad`` just that.

    Raises:
        TypeError: ``function`` is none that runs when it is called.
        RuntimeError: in backward, it returns other shapes or dtypes than before, computes other ops, draws more random
            numbers or reads other parameters, or a parameter has been written to meanwhile. Other differences, such as
            another constant, go unnoticed.
    """
    if not callable(function) or runs_later(function):
        raise TypeError(
            f"amp.checkpoint takes a function and its arguments, amp.checkpoint(block, x), got {shown(function)}: pass "
            "the function itself, not what it returns, and none whose body runs later, a generator or coroutine"
        )
    session.ensure_patched()
    return checkpointed(function, args, kwargs)


def custom_bwd(bwd: Backward | None = None, *, device_type: None = None) -> Any:
    """Decorator for the backward of an op of your own: it runs in the region of its forward, casts included.

    Elsewhere backward casts nothing. The region is the one around ``apply_op``, without casts if the forward had
    ``cast_inputs``; for a function that reaches no ``apply_op``, the one in which it was defined. Its gradients are
    returned in the dtypes of the inputs.

    Args:
        bwd: the function; none where it decorates with parentheses.
        device_type: refused.

    Raises:
        TypeError: what it decorates is no function.
    """
    refuse_device("custom_bwd", device_type)
    if bwd is None:
        return custom_bwd
    require_function(bwd, "@custom_bwd")
    return CustomBackward(bwd)
