"""The wrapper for optimizers with several losses."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import wrapt

from clamp.bridge import Node
from clamp.opencl.host_steps import host_step
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.scaled_loss import scaled_pass


class Scaling(Protocol):
    """What an optimizer's ``scale_loss`` asks of its handle."""

    def scaled_next(
        self, loss: Node, optimizer: Any, scalers: Sequence[LossScale], done: int
    ) -> AbstractContextManager[Node]:
        """One scaled backward pass of an optimizer, after ``done`` of them since its last step."""


class OptimWrapper(wrapt.ObjectProxy[Any]):
    """An optimizer with ``scale_loss``; everything else is the optimizer's own.

    ``step`` does nothing if any of the losses since the last step overflowed.
    """

    def __init__(self, optimizer: Any, handle: Scaling, scalers: list[LossScale]) -> None:
        super().__init__(optimizer)
        self._self_handle = handle
        self._self_scalers = scalers
        self._self_losses = 0

    @scaled_pass
    def scale_loss(self, loss: Node) -> Generator[Node, None, None]:
        """Scales one loss of this step, as ``AmpHandle.scale_loss`` does. One that ends in an error does not count.

        Raises:
            RuntimeError: more losses than ``num_loss`` since the last step.
        """
        scaled = self._self_handle.scaled_next(loss, self.__wrapped__, self._self_scalers, self._self_losses)
        with scaled as scaled_loss:
            yield scaled_loss
        host_step(self._self_count)

    def _self_count(self) -> None:
        self._self_losses += 1

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, unless a loss overflowed."""
        host_step(self._self_count_anew)
        return self.__wrapped__.step(*args, **kwargs)

    def _self_count_anew(self) -> None:
        self._self_losses = 0

    @property
    def loss_scale(self) -> float:
        """Loss scale of this optimizer's first loss."""
        return self._self_scalers[0].scale if self._self_scalers else 1.0
