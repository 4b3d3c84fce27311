"""Adam and AdamW whose moments take two bytes an element instead of eight: public as ``amp.optim``.

Their steps are those of netcl's, in one launch (kernels/optimizer_step.cl), with AMP or without; between steps both
moments are kept in 8 bits, blocks of 256 elements quantised by the greatest of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops.arguments import shown
from clamp.ops.optimizer_step import moments_bytes
from clamp.params import masters, updates

__all__ = ["Adam8bit", "AdamW8bit"]


class _Moments8bit:
    """Base of both: where the moments are, and how they are saved."""

    params: list[Tensor]
    t: int
    _rule: ClassVar[str]

    def _keep_in_8_bits(self) -> None:
        """Takes the place of what netcl's constructor has made."""
        for param in self.params:
            if not bridge.on_device(param):
                raise TypeError(
                    f"{type(self).__name__} steps parameters on OpenCL devices: netcl's numpy backend has none"
                )
        self.m = self.v = None
        setattr(self, bridge.MOMENTS_8BIT, {})

    def _held(self, param: Tensor) -> cl.Buffer:
        held: dict[int, cl.Buffer] = getattr(self, bridge.MOMENTS_8BIT)
        if id(param) not in held:
            held[id(param)] = bridge.placed(param, np.zeros(moments_bytes(max(1, param.size))), np.uint8)
        return held[id(param)]

    def state_dict(self) -> dict[str, Any]:
        """The count of steps, and the moments of each of ``params`` as bytes."""
        moments = []
        for param in self.params:
            buffer = self._held(param)
            moments.append(np.empty(buffer.size, np.uint8))
            cl.enqueue_copy(param.queue, moments[-1], buffer)
        return {"t": int(self.t), "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Goes on where ``state_dict`` left off. Returns the number of parameters whose moments were loaded.

        Raises:
            TypeError: it is no dict.
            ValueError: the moments are not those of as many parameters, of these sizes. Nothing was changed.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict takes the dict that state_dict() returned, got {shown(state)}")
        moments = [np.array(moment, np.uint8) for moment in state.get("moments") or []]
        sizes = [moments_bytes(max(1, param.size)) for param in self.params]
        if [moment.size for moment in moments] != sizes:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: the state has {len(moments)} moments of "
                f"{sum(moment.size for moment in moments)} bytes, these {len(sizes)} parameters have {sum(sizes)} bytes"
            )
        placed = {id(x): bridge.placed(x, moment, np.uint8) for x, moment in zip(self.params, moments, strict=True)}
        self.t = int(state.get("t", 0))
        setattr(self, bridge.MOMENTS_8BIT, placed)
        return len(moments)


class Adam8bit(_Moments8bit, bridge.Adam):  # type: ignore[misc]  # netcl has no types
    """netcl's Adam with moments of 8 bits.

    Args:
        params: float32 parameters, or 16-bit ones, on OpenCL devices.
        lr, betas, eps, weight_decay: as of netcl's ``Adam``.

    Raises:
        TypeError: a parameter is on netcl's numpy backend.
        ValueError: as of netcl's ``Adam``.
    """

    _rule = "adam_8bit"

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay)
        self._keep_in_8_bits()

    def step(self) -> None:
        """Steps all parameters that have gradients.

        Raises:
            TypeError, ValueError: a gradient is not float32, or not of its parameter's size and device.
        """
        _step(self)


class AdamW8bit(_Moments8bit, bridge.AdamW):  # type: ignore[misc]
    """netcl's AdamW with moments of 8 bits.

    Args:
        params: float32 parameters, or 16-bit ones, on OpenCL devices.
        lr, betas, eps, weight_decay: as of netcl's ``AdamW``.

    Raises:
        TypeError: a parameter is on netcl's numpy backend.
        ValueError: as of netcl's ``AdamW``.
    """

    _rule = "adamw_8bit"

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay)
        self._keep_in_8_bits()
        self._fused_enabled = False

    def step(self, max_norm: float | None = None) -> None:
        """Steps all parameters that have gradients.

        Args:
            max_norm: clips the gradients by their norm before.

        Raises:
            TypeError, ValueError: a gradient is not float32, or not of its parameter's size and device.
        """
        if max_norm is not None and max_norm > 0:
            bridge.clip.clip_grad_norm_device(self.params, max_norm)
        _step(self)


def _step(optimizer: Any) -> None:
    """A step where no AMP guards it."""
    updates.make(optimizer, masters.gathered(optimizer), updates.OptimizerStep(None, optimizer))


def _update(optimizer: Any, params: Sequence[Tensor]) -> bridge.Update:
    return bridge.adams(optimizer._rule, optimizer, [[optimizer._held(param) for param in params]])


for _kind in (Adam8bit, AdamW8bit):
    bridge.add_rule(_kind, _update)
