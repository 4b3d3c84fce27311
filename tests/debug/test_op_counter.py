"""What is counted of a run: ops, bytes and casts by place; loss and gradients of each step; nothing when off."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Linear, Sequential

from clamp import amp
from clamp.casting.results import RESULTS
from clamp.cli.bench.timing import counted_launches
from clamp.debug.op_counter import OpCounter, OpRow
from clamp.debug.profiler import Profiler
from clamp.opencl.device import capabilities
from clamp.ops.cast import LISTENERS, cast
from clamp.scaling.step_report import StepReport
from tests.networks import Task, Training, stepping
from tests.reference import to_device

ROWS, WIDTHS = 8, (16, 32, 4)


Row = TypeVar("Row")


def counter_of(handle: Any) -> OpCounter:
    return handle._log.counter


@pytest.fixture
def run(queue: cl.CommandQueue) -> Any:
    """Ten counted steps of a small network, and their losses."""
    training = Training(queue, WIDTHS, ROWS, debug="summary", loss_scale=4.0)
    with training.handle:
        yield training, [training.step() for _ in range(10)]


def only(rows: Sequence[Row], **wanted: object) -> Row:
    """The one row whose attributes are these."""
    found = [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]
    assert len(found) == 1, (wanted, rows)
    return found[0]


def test_ops_are_counted_by_place_and_dtype(run: Any) -> None:
    rows = run[0].handle.summary().rows
    assert {row.calls for row in rows} == {10}
    forward = only(rows, name="linear_relu", direction="forward")
    assert (forward.policy, forward.module, forward.dtype, forward.shape) == ("half", "layers.0", "float16", (8, 32))
    assert forward.inputs == ("float32", "float32", "float32")
    assert forward.line.startswith("networks.py:")
    read, gave = 4 * (8 * 16 + 16 * 32 + 32), 2 * 8 * 32
    assert forward.bytes == 10 * (read + gave)
    backward = only(rows, name="linear_relu", direction="backward")
    assert (backward.inputs, backward.module) == (("float16",), "layers.0")
    loss = only(rows, name="mse_loss", direction="forward")
    assert (loss.policy, loss.inputs, loss.dtype) == ("float", ("float16", "float32"), "float32")


def test_rows_stay_what_they_were_when_asked_for(run: Any) -> None:
    training, _ = run
    rows = training.handle.summary().rows
    training.step()
    assert {row.calls for row in training.handle.summary().rows} == {11}
    assert {row.calls for row in rows} == {10}


def test_rows_may_be_asked_for_while_another_thread_adds_some(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = counter_of(run[0].handle)
    before = counter.rows

    def copy(row: OpRow) -> OpRow:
        counter._rows[(len(counter._rows),)] = row  # as the other thread would
        return row

    monkeypatch.setattr("clamp.debug.op_counter.replace", copy)
    assert len(counter.rows) == len(before)


def test_casts_are_counted_with_their_bytes(run: Any, queue: cl.CommandQueue) -> None:
    (found,) = [one for one in run[0].handle.summary().casts if one.source == "float32"]
    # Both weights, and the input where no product rounds it as it reads it; four bytes of each six are of the source.
    sizes = [16 * 32, 32 * 4, *([] if capabilities(queue).is_cpu else [ROWS * 16])]
    assert (found.target, found.calls, found.bytes) == ("float16", 10 * len(sizes), 10 * 6 * sum(sizes))


def test_losses_and_gradients_are_noted_for_their_steps(run: Any) -> None:
    training, losses = run
    points = counter_of(training.handle).curves.read()
    assert [points[number + 1].loss for number in range(10)] == losses
    grads = [param.grad.to_host().ravel().astype(np.float64) for param in training.model.parameters()]
    last = np.linalg.norm(np.concatenate(grads))
    assert points[10].gradient_norm == pytest.approx(last, rel=1e-5)


def test_several_losses_of_a_step_have_their_mean(queue: cl.CommandQueue) -> None:
    task = Task(queue)
    with amp.init(debug="summary", loss_scale=2.0) as handle:
        for size in (1.0, 3.0):
            task.backward(handle, size)
        task.optimizer.step()
        (point,) = counter_of(handle).curves.read().values()
    assert point == (24.0, pytest.approx(4.0 * np.sqrt(12)))


def test_a_skipped_step_has_a_norm_that_is_not_finite(queue: cl.CommandQueue) -> None:
    task = Task(queue)
    with amp.init(debug="summary", loss_scale="dynamic") as handle:
        task.step(handle, 3e38)
        (point,) = counter_of(handle).curves.read().values()
        assert not handle.last_step.stepped
    assert not np.isfinite(point.gradient_norm)


def test_a_step_by_another_scaler_is_noted_once(queue: cl.CommandQueue) -> None:
    """Its guard stands around the handle's."""
    task, other = Task(queue), Task(queue)
    scaler = amp.GradScaler(init_scale=2.0)
    with amp.init(debug="summary", loss_scale=4.0) as handle:
        for size in (1.0, 2.0):
            other.optimizer.zero_grad()
            scaler.scale(other.loss(5.0)).backward()
            scaler.step(other.optimizer)
            scaler.update()
            task.optimizer.zero_grad()
            task.step(handle, size)
        points = counter_of(handle).curves.read()
    sizes = [5.0, 1.0, 5.0, 2.0]
    assert [report.step for report in handle.history] == list(points) == [1, 2, 3, 4]
    assert [point.gradient_norm for point in points.values()] == [pytest.approx(size * np.sqrt(12)) for size in sizes]
    assert [point.loss is None for point in points.values()] == [False] * 4


def test_steps_of_another_run_are_left_out() -> None:
    reports = [StepReport(True, "", 1.0, step=number) for number in (1, 1, 2)]
    counter = OpCounter(lambda report: report is not reports[1])
    for report in reports:
        counter.stepped(report)
    assert list(counter.curves.read()) == [1, 2]


def test_a_replay_counts_as_the_steps_that_it_repeats(queue: cl.CommandQueue) -> None:
    training = Training(queue, WIDTHS, ROWS, debug="summary", loss_scale=4.0)
    with training.handle as handle:
        one = amp.record(stepping(handle, training.model, training.optimizer))
        losses = [float(one(*training.data).value.to_host()[0]) for _ in range(8)]
        summary, points = handle.summary(), counter_of(handle).curves.read()
    assert summary.steps == 8
    assert only(summary.rows, name="linear_relu", direction="forward").calls == 8
    assert only(summary.rows, name="linear_relu", direction="backward").calls == 8
    assert [points[number + 1].loss for number in range(8)] == losses
    norms = [points[number + 1].gradient_norm for number in range(8)]
    assert norms == sorted(norms, reverse=True)
    assert len(set(norms)) == 8


def test_a_recording_without_a_backward_is_counted_as_it_is_made(queue: cl.CommandQueue) -> None:
    with amp.init(debug="summary") as handle:
        relu, x = amp.record(ag.relu), ag.tensor(to_device(queue, [1.0]))
        for _ in range(5):  # the first runs it, the next two record it
            relu(x)
        ag.sum(x)
        assert only(handle.summary().rows, name="relu").calls == 3


def test_layers_that_are_made_anew_take_no_more_rows_nor_names_of_those_that_are_gone(queue: cl.CommandQueue) -> None:
    x = ag.tensor(to_device(queue, np.ones((2, 3))))
    with amp.init(debug="summary") as handle:
        for _ in range(20):  # the second has the id of a layer of the first, mostly
            Sequential(Linear(queue, 3, 2))(x)
            gc.collect()
            Linear(queue, 3, 2)(x)
            gc.collect()
        rows = [(row.module, row.calls) for row in counter_of(handle).rows if row.name == "matmul_op"]
    assert rows == [("layers.0", 20), ("", 20)]


def test_what_is_seen_changes_nothing_and_nothing_is_seen_when_off(queue: cl.CommandQueue) -> None:
    enqueued = {}
    for debug in (None, "summary", None):
        training = Training(queue, WIDTHS, ROWS, debug=debug, loss_scale=4.0)
        with training.handle:
            for _ in range(3):
                training.step()
            with Profiler() as recorder:
                training.step()
            assert enqueued.setdefault(debug, recorder.names) == recorder.names
        assert not RESULTS.observers
        assert LISTENERS == []
    notes = ["note", "squares", "total"]
    assert [name for name in enqueued["summary"] if name not in notes] == enqueued[None]
    assert sorted(name for name in enqueued["summary"] if name in notes) == notes


def test_a_counter_that_is_begun_twice_counts_once(queue: cl.CommandQueue) -> None:
    """As where an interrupt has cut short what puts it back."""
    counter = OpCounter()
    counter.start()
    counter.start()
    cast(to_device(queue, [1.0]), "float16")
    counter.stop()
    assert [one.calls for one in counter.casts] == [1]
    assert LISTENERS == []


def test_a_look_at_a_step_launches_nothing_for_another_threads(queue: cl.CommandQueue) -> None:
    with counted_launches() as names:
        OpCounter(of_dry_run=True).stepping([to_device(queue, [1.0])])
    assert names == []


def test_what_was_counted_is_there_after_shutdown(queue: cl.CommandQueue) -> None:
    task = Task(queue)
    with amp.init(debug=("attribution", "summary")) as handle:
        task.step(handle)
    before = handle.summary().rows
    ag.sum(ag.tensor(task.weight))
    assert handle.summary().rows == before
    assert before


@pytest.mark.parametrize("debug", ["summery", ("summary", "all"), ["x"]])
def test_an_unknown_kind_of_debugging_is_named(debug: Any) -> None:
    with pytest.raises(ValueError, match=r'debug must be None, "attribution", "summary" or a tuple of both, got'):
        amp.init(debug=debug)
    assert amp.init(enabled=False).summary() == "AMP is off: amp.init(enabled=False)"
