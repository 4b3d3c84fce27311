"""The handle that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from clamp import bridge
from clamp.bridge import Node
from clamp.debug.explain import Explanation, not_seen
from clamp.debug.layer_ranges import LayerRanges
from clamp.debug.memory_report import MemoryReport, memory_now
from clamp.patching.user_functions import decorating
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.scaled_loss import OptimWrapper, as_pass
from clamp.scaling.step_report import History, StepReport


class NoOpHandle:
    """The handle of ``amp.init(enabled=False)``: the same methods, and none of them does anything."""

    loss_scale = 1.0
    scalers: Sequence[LossScale] = ()  # none
    last_step: StepReport | None = None
    history = History()

    def is_active(self) -> bool:
        """False: netcl is as it was."""
        return False

    def __repr__(self) -> str:
        return "<NoOpHandle: AMP is off>"

    def summary(self, step: Callable[[], Any] | None = None) -> str:
        """Says that there is nothing to sum up."""
        return "AMP is off: amp.init(enabled=False)"

    def report(self, path: Any, step: Callable[[], Any] | None = None, losses: Sequence[float] | None = None) -> None:
        """Writes nothing."""

    def explain(self, step: Callable[[], Any] | None = None) -> Explanation:
        """No step was skipped."""
        return not_seen(None)

    def ranges(self, step: Callable[[], Any]) -> LayerRanges:
        """None: nothing is cast."""
        return LayerRanges([], 1.0, "float32")

    def memory(self, step: Callable[[], Any] | None = None) -> MemoryReport:
        """Reports what device memory is held for now."""
        return memory_now()

    @as_pass
    def scale_loss(self, loss: Node, optimizer: Any, loss_id: int = 0) -> Generator[Node, None, None]:
        """Yields the loss itself, with a ``backward``."""
        yield bridge.with_backward(loss)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """The optimizer with a ``scale_loss`` that does nothing."""
        return OptimWrapper(optimizer, [], self.scale_loss)

    @decorating
    def disable_casts(self) -> Iterator[None]:
        """Nothing to disable."""
        yield

    def distribute(self, comm: Any, *, reduce_dtype: str | None = None) -> None:
        """Raises RuntimeError: without patches nothing would average the gradients."""
        raise RuntimeError(
            'amp.init(enabled=False) cannot average gradients over ranks: use amp.init(level="O0"), which computes in '
            'float32, or amp.init(dtype="float32")'
        )

    def clear_cache(self) -> None:
        """Nothing is cached."""

    _clear_cache = clear_cache

    def shutdown(self) -> None:
        """Nothing was patched."""

    def __enter__(self) -> NoOpHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        pass
