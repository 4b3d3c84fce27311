"""``AdamW.step(max_norm=)``, which netcl forgets where it steps one parameter at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

from netcl.optim import clip

from clamp import bridge
from clamp.patching.wrap import Installed, Wrapper


def clipping(step: Wrapper) -> Wrapper:
    """A wrapper of optimizers' ``step`` inside of which netcl's AdamW clips models of any size.

    Args:
        step: what stands around the optimizer's own step; it decides whether that runs.
    """

    def call(wrapped: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_adamws = (wrapped.__module__, wrapped.__qualname__) == ("netcl.optim.adamw", "AdamW.step")
        own = partial(_clipped, wrapped, optimizer) if is_adamws and (args or kwargs) else wrapped
        return step(own, optimizer, args, kwargs)

    return call


def _clipped(own: Any, optimizer: Any, max_norm: float | None = None) -> Any:
    if max_norm is None or max_norm <= 0 or not Installed.now or bridge.steps_as_one(optimizer):
        return own(max_norm)
    clip.clip_grad_norm_device(optimizer.params, max_norm)  # clamp's, while patches are installed
    return own()
