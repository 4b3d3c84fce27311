"""Records the ops of a step: of one that is run only to be looked at, each as it really went; or of each step of a run,
at next to no cost, what forward read and gave, so that backward can be run again if the step was skipped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.regions import casting_in
from clamp.casting.results import GradFn, Gradients, Observer
from clamp.debug.callsite import Trail, call_of, place_of, trail
from clamp.debug.step_graph import Frame, StepGraph, are_finite
from clamp.interrupts import contextmanager
from clamp.opencl.host_steps import host_step, moved, recorder, unrecorded
from clamp.ops.elementwise import elementwise
from clamp.ops.statistics import PendingStatistics
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.scaled_loss import SCALE_OP, is_scaled
from clamp.scaling.step_guard import are_steps_withheld
from clamp.scaling.step_report import StepReport

T = TypeVar("T")

_SHARE = 0.25  # of a device's memory that passes before the last one may hold
_OFTEN = 256  # ops after which that is looked at


class _Op(NamedTuple):
    """An op of forward.

    Attributes:
        read: the tensors that it read.
        wanted: those whose gradients ``again`` gives.
        again: computes them from that of ``gave``; None where nothing is trained.
    """

    op: str
    trail: Trail
    gave: Tensor
    read: list[Tensor]
    wanted: list[Tensor]
    again: GradFn | None


class _RecordedBackward(NamedTuple):
    """A backward that was run.

    Attributes:
        ops: how many ops came before it.
        loss: where it began.
        grad: with which gradient; None: with ones.
        scaler: whose scale multiplied it; None where nobody's did.
    """

    ops: int
    loss: Tensor
    grad: Tensor | None
    scaler: LossScale | None


class _Step(threading.local):
    """The step that a thread is in: what it has seen of it.

    Attributes:
        moved: of replays, the tensors that they were recorded with, each with the one in its place.
        is_cut: whether ops of earlier passes were let go.
        gone: what ops gave that were let go for want of memory.
        report: of the last ``optimizer.step()``, after which the next op is one of the next step; None before any.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.ops: list[_Op] = []
        self.passes: list[_RecordedBackward] = []
        self.moved: list[tuple[Tensor, Tensor]] = []
        self.is_cut = False
        self.gone: list[weakref.ref[Tensor]] = []
        self.report: StepReport | None = None


class OverflowRecorder(Observer):
    """An observer that hands on the trace of each skipped step.

    Args:
        on_trace: called with the trace of a skipped step, and its report.
    """

    def __init__(self, on_trace: Callable[[StepGraph, StepReport], None]) -> None:
        self._on_trace = on_trace
        self._step = _Step()
        self._first: tuple[list[weakref.ref[Tensor]], PendingStatistics] | None = None  # of weights, in the first pass

    # ------------------------------------------------------------------------------------------ what ops tell

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> None:
        if not isinstance(made, Node) or not made.parents or not isinstance(made.value, Tensor):
            return  # of a validation, or of what nobody trains
        if are_steps_withheld():
            return  # a step that is only looked at is no part of the run
        if self._step.report is not None:
            self._step.forget()
        read = [parent.value for parent in parents if isinstance(parent.value, Tensor)]
        wanted = [parent.value for parent in made.parents]
        ops = self._step.ops
        ops.append(_Op(made.op_name or "op", trail(), made.value, read, wanted, made.grad_fn))
        if not len(ops) % _OFTEN:
            self._keep_within_limit()

    def backward_ended(self, loss: Node, grad: Tensor | None) -> None:
        if are_steps_withheld():
            return
        step = self._step
        if self._first is None:
            self._look_at_weights()
        scaled = loss if is_scaled(loss) else next((node for node in bridge.graph(loss) if is_scaled(node)), None)
        step.passes.append(
            _RecordedBackward(len(step.ops), loss.value, grad, None if scaled is None else scaled.loss_scale)
        )
        if recorder() is not None:
            ops, passes = step.ops, step.passes
            step.forget()
            host_step(partial(self._replayed, ops, passes))
        else:
            self._keep_within_limit()

    def _look_at_weights(self) -> None:
        """Notes what the weights are before any step: later it tells whether they have grown."""
        read = {id(x): x for op in self._step.ops for x in op.read if bridge.is_trained(x) and bridge.is_floating(x)}
        if read:
            with unrecorded():
                pending = PendingStatistics(list(read.values()), histogram=False)
            self._first = [weakref.ref(x) for x in read.values()], pending

    @property
    def first_magnitudes(self) -> dict[int, float]:
        """The largest magnitude of each weight before the first step, by the id of its tensor. Waits for the device."""
        if self._first is None:
            return {}
        refs, pending = self._first
        with unrecorded():
            found = pending.read()
        return {id(x): one.largest for ref, one in zip(refs, found, strict=True) if (x := ref()) is not None}

    def _replayed(self, ops: list[_Op], passes: list[_RecordedBackward]) -> None:
        """A recorded pass has been run: what it gave lies in the recording's memory, what it read is this replay's."""
        step = self._step
        if step.report is not None:
            step.forget()
        if ops and any(one is ops[0] for one in step.ops):  # of the same recording: what those gave is overwritten
            step.forget()
            step.is_cut = True
        before = len(step.ops)
        step.ops = [*step.ops, *ops]
        step.passes += [one._replace(ops=one.ops + before) for one in passes]
        step.moved += moved()

    def stepped(self, report: StepReport) -> None:
        if not report.stepped:
            self._hand_on(self._on_trace, report, report.scale_before)
        self._step.report = report  # but another optimizer may step on the same passes

    def with_bad_loss(self, on_trace: Callable[[StepGraph, StepReport | None], T]) -> T | None:
        """Hands on the forward ops of this thread's last step, measured, and its report, if there is one yet: if it was
        not skipped and its loss is inf or nan. Waits for the device."""
        report = self._step.report
        if report is not None and not report.stepped:
            return None
        losses = [one.loss for one in self._step.passes if bridge.is_floating(one.loss)]
        with self._in_replays_memory():
            if are_finite(losses):
                return None
        return self._hand_on(on_trace, report, 1.0, backward=False)

    def _hand_on(
        self, on_trace: Callable[[StepGraph, Any], T], report: Any, scale: float, *, backward: bool = True
    ) -> T:
        with self._in_replays_memory():
            trace = self._trace(scale, backward=backward)
            found = on_trace(trace, report)
        trace.release()
        return found

    @contextmanager
    def _in_replays_memory(self) -> Iterator[None]:
        """Inside the ``with``, tensors that a recording was made with are those that its replay was given: a gradient
        function that is run again reads these."""
        recorded = {id(one): (one, one.buffer) for one, _ in self._step.moved}
        try:
            for one, now in self._step.moved:
                one.buffer = now.buffer
            yield
        finally:
            for one, buffer in recorded.values():
                one.buffer = buffer

    def _keep_within_limit(self) -> None:
        """Lets the ops of earlier passes go if they hold too much: those of the last one live anyway."""
        step = self._step
        first = step.passes[-2].ops if len(step.passes) > 1 else 0 if step.passes else len(step.ops)
        if not first or not bridge.on_device(step.ops[0].gave):
            return
        held = sum({id(op.gave.buffer): bridge.nbytes(op.gave) for op in step.ops[:first]}.values())
        if held > _SHARE * step.ops[0].gave.queue.device.global_mem_size:
            step.gone = [ref for ref in step.gone if ref() is not None]
            step.gone += [weakref.ref(op.gave) for op in step.ops[:first]]
            step.ops, step.is_cut = step.ops[first:], True
            step.passes = [one._replace(ops=one.ops - first) for one in step.passes if one.ops > first]

    # ------------------------------------------------------------------------------------------ a skipped step

    def _trace(self, scale: float, *, backward: bool) -> StepGraph:
        trace, ops = StepGraph(scale=scale, is_cut=self._step.is_cut), self._step.ops
        frames = [
            trace.forward(one.op, place_of(one.trail), one.read, one.gave, call_of(one.trail[0]), one.wanted, one.again)
            for one in ops
        ]
        gone = {id(x) for ref in self._step.gone if (x := ref()) is not None}
        for value in trace.values:
            value.is_cut_off = value.made_by is None and id(value.tensor) in gone
        with casting_in(None), unrecorded():
            for one in self._step.passes if backward else ():
                trace.scaler = one.scaler
                _run_again(one, frames[: one.ops], trace)
        trace.measure()
        trace.name()
        return trace


def _run_again(one: _RecordedBackward, forward: Sequence[Frame], trace: StepGraph) -> None:
    """Runs a backward once more; what it leaves behind is in the trace alone.

    Args:
        forward: its ops, each after those whose results it read.
        trace: its scale is the one that held: that on the device has moved on.
    """
    ones = np.ones(one.loss.shape, np.float32)
    grads = {id(one.loss): Tensor.from_host(one.loss.queue, ones) if one.grad is None else one.grad}
    for frame in reversed(forward):
        grad = grads.get(id(frame.outputs[0].tensor))
        if frame.again is None or grad is None:
            continue
        found = [elementwise("mul", "float32", grad, trace.scale)] if frame.op == SCALE_OP else frame.again(grad)
        trace.backward(frame, grad, found, frame.again)
        for parent, given in zip(frame.parents, found, strict=True):
            earlier = grads.get(id(parent.tensor))
            if given is not None and earlier is not None:
                both = elementwise("add", bridge.canonical_dtype(earlier.dtype), earlier, given)
                trace.added(both, earlier, given)
                grads[id(parent.tensor)] = both
            elif given is not None:
                grads[id(parent.tensor)] = given


# ---------------------------------------------------------------------------------------------- a dry run


class StepRecorder(Observer):
    """An observer that keeps the ops of a dry run (`clamp.debug.dry_run`), of the thread that makes it.

    Beyond a quarter of the device's memory, results are measured, and let go, before the step is over: but those in
    which a cause is looked for.

    Args:
        of_ranges: whether it is asked for magnitudes, with histograms, as they are when the pass is over: gradients are
            divided by the loss scale then. Else for what went wrong: when a backward ends, before anybody writes to its
            gradients; with ops that nobody trains, and with calls, which can be made again.
    """

    needs_values = True

    def __init__(self, *, of_ranges: bool) -> None:
        self._of_ranges = of_ranges
        self.thread = threading.get_ident()
        self._graph = StepGraph()

    def trace(self) -> StepGraph:
        """Returns what has been recorded, measured and named; waits for the device."""
        self._graph.measure(histogram=self._of_ranges)
        self._graph.name()
        return self._graph

    # ------------------------------------------------------------------------------------------ what ops tell

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Frame | None:
        if self._of_ranges and (not isinstance(made, Node) or bridge.is_leaf(made)):
            return None
        read = [parent.value for parent in parents if isinstance(parent.value, Tensor)]
        seen = trail()
        call = None if self._of_ranges else call_of(seen[0])
        frame = self._graph.forward(getattr(made, "op_name", None) or "op", place_of(seen), read, made.value, call)
        if isinstance(made, Node) and made.grad_fn is not None:
            self._graph.awaited[id(frame)] = frame
        self._keep_within_limit(made.value)
        return frame

    def gradients(self, token: Frame, grad: Tensor, grads: Gradients, again: GradFn) -> None:
        self._graph.backward(token, grad, grads, again)
        self._keep_within_limit(grad)

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        self._graph.added(made, first, second)

    def backward_ended(self, loss: Node, grad: Tensor | None) -> None:
        scaled = next((node for node in bridge.graph(loss) if is_scaled(node)), None)
        if scaled is not None:
            self._graph.scaler = scaled.loss_scale
        self._graph.awaited.clear()
        if not self._of_ranges:
            self._graph.measure()

    def _keep_within_limit(self, tensor: Tensor) -> None:
        if bridge.on_device(tensor) and self._graph.held > _SHARE * tensor.queue.device.global_mem_size:
            self._graph.measure(histogram=self._of_ranges)
            self._graph.release(() if self._of_ranges else self._graph.suspects())
