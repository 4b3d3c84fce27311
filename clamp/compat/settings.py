"""What the faces ask of their arguments before they use them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np

from clamp.bridge import Tensor, on_device
from clamp.casting.operands import note_numpy_backend
from clamp.opencl.device import capabilities
from clamp.scaling.scale_rule import ScaleRule


def require_switch(value: Any, region: str, name: str) -> None:
    """Raises TypeError for a function or a text where a region takes True or False.

    Args:
        region: how the region is written, for the message.
        name: of the argument.
    """
    if callable(value):
        raise TypeError(f"{region} got the function {value!r} as its {name}: write @{region}(), with parentheses")
    if isinstance(value, str):
        raise TypeError(f"{region} got {value!r} as its {name}, which is True or False")


def refuse_device(call: str, device: Any) -> None:
    """Raises TypeError for PyTorch's device, which says nothing here. None: none was given."""
    if device is not None:
        raise TypeError(
            f"{call} takes no device or device type: casts and scales follow each tensor's queue. Leave {device!r} out."
        )


def require_number(name: str, value: Any) -> None:
    """Raises ValueError for True and False, which Python takes for 1 and 0."""
    if isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be a number, not {value!r}")


class FaceRule(ScaleRule):
    """A rule in which True and False are no numbers."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_number(name, value)
        super().__post_init__()


class UncheckedRule(ScaleRule):
    """The settings of a scaler that is not enabled: kept for those who ask for them, and used by nobody."""

    def __post_init__(self) -> None:
        """Anything will do, as in PyTorch and Paddle."""


def warn_if_nothing_is_gained(tensor: Tensor, dtype: str) -> None:
    """Warns, once for a device, where the dtype cannot be stored: nothing becomes smaller or faster there."""
    if not on_device(tensor):
        note_numpy_backend()
    elif dtype == "float16" and not capabilities(tensor.queue).half_storage:
        _warn_of(tensor.queue.device.name)


@cache
def _warn_of(device: str) -> None:
    warnings.warn(
        f"{device} cannot store float16: mixed precision in float16 gains nothing there. Pass dtype='bfloat16'.",
        UserWarning,
        stacklevel=4,
    )
