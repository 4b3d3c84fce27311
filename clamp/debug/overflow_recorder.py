"""A watch that costs a healthy step next to nothing: what ops read and gave in forward is held until the step is done,
and only of one that was skipped backward is run again, and everything measured.

What is held lives as long anyway: the loss keeps its graph until the loop has another loss.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.regions import casting_in
from clamp.casting.results import Observer
from clamp.debug.callsite import NOWHERE, Trail, place_of, trail
from clamp.debug.float32_reference import call_of
from clamp.debug.step_graph import BACKWARD, FORWARD, Frame, Trace, Value
from clamp.opencl.host_steps import host_step, moved, recorder, unrecorded
from clamp.ops.elementwise import elementwise
from clamp.ops.statistics import PendingStatistics, is_measurable, statistics_of
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.scaled_loss import SCALE_OP, is_scaled
from clamp.scaling.step_guard import are_steps_withheld
from clamp.scaling.step_report import StepReport

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
    again: Callable[[Tensor], Any] | None


class _Pass(NamedTuple):
    """A backward that was run.

    Attributes:
        ops: how many ops came before it.
        loss: where it began.
        scaler: whose scale multiplied it; None where nobody's did.
    """

    ops: int
    loss: Tensor
    scaler: LossScale | None


class _Step(threading.local):
    """The step that a thread is in: what it has seen of it.

    Attributes:
        moved: of replays, the tensors that they were recorded with, each with the one in its place.
        is_cut: whether ops of earlier passes were let go.
        report: of the last ``optimizer.step()``, after which the next op is one of the next step; None before any.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Another one begins."""
        self.ops: list[_Op] = []
        self.passes: list[_Pass] = []
        self.moved: list[tuple[Tensor, Tensor]] = []
        self.is_cut = False
        self.report: StepReport | None = None


class Vigil(Observer):
    """An observer that hands on the trace of each skipped step.

    Args:
        on_trace: called with the trace of a skipped step, and its report.
    """

    def __init__(self, on_trace: Callable[[Trace, StepReport], None]) -> None:
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

    def backward_ended(self, loss: Node) -> None:
        if are_steps_withheld():
            return
        step = self._step
        if self._first is None:
            self._look_at_weights()
        scaled = loss if is_scaled(loss) else next((node for node in bridge.graph(loss) if is_scaled(node)), None)
        step.passes.append(_Pass(len(step.ops), loss.value, None if scaled is None else scaled.loss_scale))
        if recorder() is not None:
            ops, passes = step.ops, step.passes
            step.forget()
            host_step(partial(self._replayed, ops, passes))
        else:
            self._keep_within_limit()

    def _look_at_weights(self) -> None:
        """Notes what the weights are before any step: later it tells whether they have grown."""
        read = {id(x): x for op in self._step.ops for x in op.read if bridge.is_trained(x) and is_measurable(x)}
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

    def _replayed(self, ops: list[_Op], passes: list[_Pass]) -> None:
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
            with self._in_replays_memory():
                self._on_trace(self._trace(report.scale_before), report)
        self._step.report = report  # but another optimizer may step on the same passes

    def look_at_loss(self, on_trace: Callable[[Trace, StepReport | None], None]) -> None:
        """Hands on the forward ops of this thread's last step, measured, and its report, if there is one yet: if it was
        not skipped and its loss is inf or nan. Waits for the device."""
        report = self._step.report
        if report is not None and not report.stepped:
            return
        losses = [one.loss for one in self._step.passes if is_measurable(one.loss)]
        with self._in_replays_memory():
            with unrecorded():
                found = statistics_of(losses, histogram=False)
            if not all(x.is_finite for x in found):
                on_trace(self._trace(1.0, backward=False), report)

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
            step.ops, step.is_cut = step.ops[first:], True
            step.passes = [one._replace(ops=one.ops - first) for one in step.passes if one.ops > first]

    # ------------------------------------------------------------------------------------------ a skipped step

    def _trace(self, scale: float, *, backward: bool = True) -> Trace:
        values: dict[int, Value] = {}

        def value(tensor: Tensor) -> Value:
            known = values.get(id(tensor))
            if known is None:
                known = values[id(tensor)] = Value.of(tensor)
            return known

        forward = []
        for op in self._step.ops:
            read, wanted = list(map(value, op.read)), list(map(value, op.wanted))
            call = None if op.trail[0] is None else call_of(op.trail[0])
            frame = Frame(op.op, FORWARD, place_of(op.trail), read, [value(op.gave)], wanted, again=op.again, call=call)
            frame.outputs[0].made_by = frame.outputs[0].made_by or frame
            forward.append(frame)
        trace = Trace(forward, scale, is_cut=self._step.is_cut)
        with casting_in(None), unrecorded():
            for one in self._step.passes if backward else ():
                trace.scaler = one.scaler
                trace.frames = [*trace.frames, *gradients_of(forward[: one.ops], value(one.loss), scale)]
            trace.measuring()()
        return trace


# ---------------------------------------------------------------------------------------------- backward, run once more


def gradients_of(forward: Sequence[Frame], loss: Value, scale: float) -> list[Frame]:
    """The ops of a backward, run now; what they leave behind is in these frames alone.

    Args:
        forward: ops with ``again``, each after those whose results it read, and with what ``again`` gives gradients for
            in ``parents``.
        loss: where backward begins, with a gradient of ones.
        scale: the loss scale that held; the one on the device has moved on.
    """
    frames: list[Frame] = []
    grads: dict[int, Value] = {}
    assert loss.tensor is not None
    grads[id(loss)] = Value.of(_filled(loss.tensor, 1.0))
    for frame in reversed(forward):
        grad = grads.get(id(frame.outputs[0]))
        if frame.again is None or grad is None or grad.tensor is None:
            continue
        found = [_filled(grad.tensor, scale)] if frame.op == SCALE_OP else frame.again(grad.tensor)
        backward = Frame(frame.op, BACKWARD, frame.place, [grad], [], frame.inputs, frame, again=frame.again)
        frames.append(backward)
        for parent, tensor in zip(frame.parents, found, strict=True):
            if tensor is None:
                continue
            given = grad if tensor is grad.tensor else Value.of(tensor, backward)
            backward.outputs.append(given)
            earlier = grads.get(id(parent))
            grads[id(parent)] = given if earlier is None else _added(earlier, given, frames)
    return frames


def _filled(like: Tensor, number: float) -> Tensor:
    wide = bridge.empty(like.queue, like.shape, "float32")
    bridge.write_bytes(wide, np.full(like.size, number, np.float32).view(np.uint8))
    return wide


def _added(first: Value, second: Value, frames: list[Frame]) -> Value:
    assert first.tensor is not None
    assert second.tensor is not None
    frame = Frame("sum of gradients", BACKWARD, NOWHERE, [first, second], [])
    made = Value.of(elementwise("add", first.dtype, first.tensor, second.tensor), frame)
    frame.outputs.append(made)
    frames.append(frame)
    return made
