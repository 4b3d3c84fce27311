"""The ops of the step that is under way, kept until it is known whether they are worth a look.

A healthy step is forgotten without a launch: what ops read and gave is held, as far as there is memory for it, and
measured only when the step has been skipped. In a recording, whose memory lives on anyway, measuring is a part of what
is recorded, so that every replay can be asked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.results import Observer
from clamp.observe.frames import BACKWARD, FORWARD, Frame, Trace, Value, distinct
from clamp.observe.place import NOWHERE, Place, here
from clamp.observe.sampling import SUM, Sampler, Sampling
from clamp.observe.twins import call_now
from clamp.opencl.recording import host_step, recorder, unrecorded
from clamp.ops.statistics import PendingStatistics, is_measurable, statistics_of
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.scaled_loss import is_scaled
from clamp.scaling.step_report import StepReport

_SHARE = 0.25  # of a device's memory that may be held


class Journal(Observer):
    """An observer that keeps the ops of one step, of the thread that makes it.

    Args:
        on_trace: called with the trace and the report of each step that ``wants``.
        wants: whether a step is worth a look; by default, whether it was skipped.
        only_training: whether ops without a graph, of a validation, say, are left out.
        histogram: whether histograms are measured, too.
        limit: bytes of tensors held at the most; by default a quarter of the device's memory. Beyond it they are
            measured, and let go, before the step is over.
        at_backward: whether a step is measured when a backward ends, before anybody writes to its gradients.
        calls: whether the calls are kept, too, with all arguments, so that they can be made again.
        sampling: which ops are kept. Of others nothing is, but what an op that is kept reads of them.
    """

    def __init__(
        self, on_trace: Callable[[Trace, StepReport], None], *, wants: Callable[[StepReport], bool] | None = None,
        only_training: bool = True, histogram: bool = False, limit: int | None = None,
        sampling: Sampling | None = None, at_backward: bool = False, calls: bool = False,
    ) -> None:  # fmt: skip
        self._on_trace = on_trace
        self._wants = wants or (lambda report: not report.stepped)
        self._only_training, self._histogram, self._limit = only_training, histogram, limit
        self._lock, self._thread = threading.RLock(), threading.get_ident()
        self._sampler, self._at_backward, self._calls = Sampler(sampling), at_backward, calls
        self._forget()

    def _forget(self) -> None:
        self.frames: list[Frame] = []
        self._values: dict[int, tuple[weakref.ref[Tensor], Value]] = {}  # by the id of a tensor
        self._held = 0
        self._scaler: LossScale | None = None
        self._measured: list[tuple[PendingStatistics, list[Value]]] = []  # in recordings

    def _is_ours(self) -> bool:
        return threading.get_ident() == self._thread

    # ------------------------------------------------------------------------------------------ what ops tell

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Frame | None:
        if not self._is_ours() or (self._only_training and (not isinstance(made, Node) or bridge.is_leaf(made))):
            return None
        op, place = getattr(made, "op_name", None) or "op", self._place()
        if place is None or not self._sampler.takes(op, place):
            return None
        with self._lock:
            read = [self._value(parent.value) for parent in parents if isinstance(parent.value, Tensor)]
            frame = Frame(op, FORWARD, place, read, [], call=call_now() if self._calls else None)
            self._give(frame, [made.value])
        self._keep_within_limit(made.value)
        return frame

    def gradients(
        self, token: Frame | None, grad: Tensor, grads: Sequence[Tensor | None], again: Callable[[Tensor], Any]
    ) -> None:
        if token is None:
            return
        with self._lock:
            frame = Frame(token.op, BACKWARD, token.place, [self._value(grad)], [], token.inputs, token, again=again)
            self._give(frame, [x for x in grads if x is not None])
        self._keep_within_limit(grad)

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        if not (self._is_ours() and self._sampler.looks() and self._sampler.takes(SUM, NOWHERE)):
            return
        with self._lock:
            self._give(
                Frame("sum of gradients", BACKWARD, NOWHERE, [self._value(first), self._value(second)], []), [made]
            )

    def backward_ended(self, loss: Node) -> None:
        if not self._is_ours():
            return
        scaled = next((node for node in bridge.graph(loss) if is_scaled(node)), None)
        self._scaler = self._scaler if scaled is None else scaled.loss_scale
        if recorder() is not None:
            self._measure_in_every_replay()
        elif self._at_backward:
            self._measure()

    def stepped(self, report: StepReport) -> None:
        if not self._is_ours():
            return
        if self._wants(report):
            trace = self.trace()
            trace.scale = report.scale_before
            self._on_trace(trace, report)
        with self._lock:
            self._forget()
        self._sampler.end_step()

    # ------------------------------------------------------------------------------------------ keeping

    def _place(self) -> Place | None:
        """Where the op that is being computed is called; None in a step that is not looked at."""
        return here() if self._sampler.looks() else None

    def _value(self, tensor: Tensor) -> Value:
        ref, value = self._values.get(id(tensor), (None, None))
        if ref is None or value is None or ref() is not tensor:
            value = Value(tensor, bridge.canonical_dtype(tensor.dtype), tuple(tensor.shape))
            self._values[id(tensor)] = weakref.ref(tensor), value
            self._held += bridge.nbytes(tensor)
        return value

    def _give(self, frame: Frame, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            value = self._value(tensor)
            if value.made_by is None:  # netcl's add hands on the gradient that it was given
                value.made_by = frame
            frame.outputs.append(value)
        self.frames.append(frame)

    def _keep_within_limit(self, tensor: Any) -> None:
        if self._limit is None and bridge.on_device(tensor):
            self._limit = int(_SHARE * tensor.queue.device.global_mem_size)
        if self._limit is not None and self._held > self._limit and recorder() is None:
            self._measure()
            self._held = 0
            Trace(self.frames).let_go()

    # ------------------------------------------------------------------------------------------ measuring

    def trace(self) -> Trace:
        """What has been seen since the last step, measured; waits for the device."""
        for pending, values in self._measured:
            _set(values, pending)
        if not self._measured:
            self._measure()
        return Trace(self.frames, scaler=self._scaler)

    def _measurable(self) -> list[Value]:
        values = distinct(value for frame in self.frames for value in (*frame.inputs, *frame.outputs, *frame.parents))
        return [x for x in values if x.statistics is None and x.tensor is not None and is_measurable(x.tensor)]

    def _measure(self) -> None:
        values = self._measurable()
        with unrecorded():
            found = statistics_of([x.tensor for x in values if x.tensor is not None], histogram=self._histogram)
        for value, statistics in zip(values, found, strict=True):
            value.statistics = statistics

    def _measure_in_every_replay(self) -> None:
        values = self._measurable()
        pending = PendingStatistics([x.tensor for x in values if x.tensor is not None], histogram=self._histogram)
        with self._lock:
            frames, self.frames, known = self.frames, [], self._values
            measured = pending, values
        host_step(partial(self._replayed, frames, known, measured, self._scaler))

    def _replayed(
        self,
        frames: list[Frame],
        known: dict[int, tuple[weakref.ref[Tensor], Value]],
        measured: tuple[PendingStatistics, list[Value]],
        scaler: LossScale | None,
    ) -> None:
        if not self._sampler.looks():
            return
        with self._lock:
            self._scaler = scaler
            self.frames = [*self.frames, *frames]
            self._values |= known
            self._measured = [*self._measured, measured]


def _set(values: Sequence[Value], pending: PendingStatistics) -> None:
    for value, statistics in zip(values, pending.read(), strict=True):
        value.statistics = statistics
