"""The summary of a run: what it says, and what it measures but for time; a step that is tried changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import HALF_DTYPES
from clamp.casting.results import RESULTS
from clamp.debug.op_counter import OpCounter
from clamp.opencl.device import capabilities
from clamp.ops.cast import LISTENERS
from clamp.report import read_run
from tests.networks import Task, batch, loss_of, mlp, step, weights_of

ROWS, WIDTHS = 64, (32, 64, 64, 8)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds: what is measured here depends on none of them."""
    monkeypatch.setattr("clamp.debug.gain._SECONDS", 0.0)
    monkeypatch.setattr("clamp.debug.gain._PASSES", 1)


class Run:
    """A small network, three steps of which have been done."""

    def __init__(self, queue: cl.CommandQueue, **options: Any) -> None:
        self.model, self.data = mlp(queue, *WIDTHS), batch(queue, ROWS, WIDTHS[0], WIDTHS[-1])
        self.optimizer = SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.handle = amp.init(**options)
        for _ in range(3):
            self.step()

    def step(self) -> None:
        step(self.handle, self.model, self.optimizer, self.data)


@pytest.fixture(autouse=True)
def off() -> Any:
    yield
    amp.shutdown()
    assert LISTENERS == []
    assert RESULTS.own.__name__ == "_own"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_memory_is_that_of_the_step_in_both_precisions(queue: cl.CommandQueue, dtype: str) -> None:
    run = Run(queue, dtype=dtype)
    trial = run.handle.summary(run.step).trial
    kept = ROWS * sum(WIDTHS[1:])
    # Of the input, which is small; on a CPU the product rounds the input itself as it reads it.
    copy = 0 if capabilities(queue).is_cpu else 2 * ROWS * WIDTHS[0]
    assert 2 * kept + copy <= trial.amp.activations < 2 * kept + copy + 2**12
    assert 4 * kept <= trial.plain.activations < 4 * kept + 2**12
    assert trial.amp.weight_copies >= 2 * sum(param.size for param in run.model.parameters() if len(param.shape) == 2)
    assert trial.amp.peak > trial.amp.activations
    assert trial.plain.peak > trial.plain.activations
    assert f"activations kept when forward is over   {2 * kept / 2**20:.2f}"[:40] in str(run.handle.summary(run.step))


def test_activations_are_known_of_a_loss_that_nobody_scales(queue: cl.CommandQueue) -> None:
    run = Run(queue)

    def once() -> None:
        loss_of(run.model, run.data).backward()

    trial = run.handle.summary(once).trial
    assert trial.amp.activations >= 2 * ROWS * sum(WIDTHS[1:])
    assert trial.plain.activations >= 4 * ROWS * sum(WIDTHS[1:])


def test_nothing_is_measured_where_ranks_would_wait_for_each_other(queue: cl.CommandQueue) -> None:
    run = Run(queue)
    run.handle._scaling.ranks = object()
    with pytest.raises(RuntimeError, match=r"was called after handle\.distribute"):
        run.handle.summary(run.step)
    run.handle._scaling.ranks = None


def test_each_op_is_found_in_both_precisions(queue: cl.CommandQueue) -> None:
    run = Run(queue)
    trial = run.handle.summary(run.step).trial
    assert {row.key for row in trial.amp.rows} == {row.key for row in trial.plain.rows}
    assert all(row.calls == 1 and row.seconds is not None for row in (*trial.amp.rows, *trial.plain.rows))
    assert {row.dtype for row in trial.plain.rows} == {"float32"}
    assert HALF_DTYPES & {row.dtype for row in trial.amp.rows}
    assert trial.plain.casts == []
    assert trial.plain.cast_seconds == 0.0
    (casts,) = trial.amp.casts
    # the three weights, and the input where no product rounds it as it reads it
    calls = 3 if capabilities(queue).is_cpu else 4
    assert (casts.source, casts.target, casts.calls) == ("float32", "float16", calls)


@pytest.mark.slow
def test_a_queue_with_profiling_is_asked_and_another_is_waited_for(queue: cl.CommandQueue) -> None:
    profiling = cl.CommandQueue(queue.context, queue.device, cl.command_queue_properties.PROFILING_ENABLE)
    for one, words in ((profiling, "by profiling events"), (queue, "queue without profiling")):
        run = Run(one)
        summary = run.handle.summary(run.step)
        assert summary.trial.alone == (one is queue)
        assert words in str(summary)
        assert sum(row.seconds for row in summary.trial.amp.rows) > 0
        run.handle.shutdown()


@pytest.mark.slow
def test_what_was_measured_is_not_measured_again_before_another_step(
    queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the clock calls slower is tried on a black list as well: nothing here is.
    monkeypatch.setattr("clamp.debug.gain.slower_functions", lambda amp, plain: [])
    run, calls = Run(queue), 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        run.step()

    first = run.handle.summary(counted)
    measured = calls
    run.handle.report(tmp_path / "run.json", counted)
    run.handle.report(tmp_path / "without.json")
    assert run.handle.summary(counted).trial is first.trial
    assert calls == measured > 0
    assert read_run(tmp_path / "without.json")["memory"]["peak"] == first.trial.amp.peak
    run.step()
    run.handle.report(tmp_path / "run.json", counted)
    assert calls == 2 * measured


def test_a_tried_step_changes_nothing(queue: cl.CommandQueue) -> None:
    run = Run(queue, debug=("attribution", "summary"))
    before = weights_of(run.model), run.handle.loss_scale, list(run.handle.history), run.handle.summary().rows
    grads = [param.grad for param in run.model.parameters()]
    summary = run.handle.summary(run.step)
    assert run.handle.loss_scale == before[1]
    assert list(run.handle.history) == before[2]
    for one, other in zip(weights_of(run.model), before[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(param.grad is grad for param, grad in zip(run.model.parameters(), grads, strict=True))
    assert [(row.key, row.calls, row.bytes) for row in summary.rows] == [
        (row.key, row.calls, row.bytes) for row in before[3]
    ]
    assert all(row.seconds is not None for row in summary.rows if row.dtype != "int32")
    run.step()
    assert {row.calls for row in run.handle.summary().rows} == {4}


def test_no_gradient_of_before_a_tried_step_is_added_to_one_of_after_it(queue: cl.CommandQueue) -> None:
    """Of a 16-bit parameter that was cleared by itself, its master not."""
    model, data = mlp(queue, *WIDTHS), batch(queue, ROWS, WIDTHS[0], WIDTHS[-1])
    model, optimizer = amp.decorate(model, SGD(model.parameters(), lr=0.01), dtype="bfloat16")
    handle = amp.init(dtype="bfloat16", level="O2")
    step(handle, model, optimizer, data)
    handle.ranges(lambda: step(handle, model, optimizer, data))
    for param in model.parameters():
        param.grad = None
    loss_of(model, data).backward()
    expected = [param.grad.to_host() for param in model.parameters()]
    optimizer.step()
    for master, grad in zip(amp.master_params(optimizer), expected, strict=True):
        np.testing.assert_array_equal(master.grad.to_host(), grad)


def test_without_a_step_the_summary_says_how_to_get_the_rest(queue: cl.CommandQueue) -> None:
    run = Run(queue, loss_scale=8.0)
    text = str(run.handle.summary())
    assert text.startswith("AMP float16: 3 steps, 0 skipped, loss scale 8\nkernels: ")
    assert "not measured: handle.summary(step)" in text
    assert 'amp.init(debug="summary")' in text
    assert "ops" not in text.replace("ops, casts and bytes", "")
    run.handle.shutdown()
    counted = Run(queue, debug="summary")
    text = str(counted.handle.summary())
    assert "ops of the run" in text
    assert f"casts: float32 -> float16 {9 if capabilities(queue).is_cpu else 12} (" in text
    assert 'debug="summary"' not in text


def test_skips_are_told_with_their_reasons(queue: cl.CommandQueue) -> None:
    task = Task(queue)
    with amp.init(loss_scale="dynamic") as handle:
        for size in (1.0, 3e38, 1.0):
            task.optimizer.zero_grad()
            task.backward(handle, size)
            task.optimizer.step()
        text = str(handle.summary())
    assert "AMP float16: 3 steps, 1 skipped, loss scale 32768" in text
    assert "1 skipped for inf; the last was step 2: inf in 12 elements of the gradients of params[0]" in text


def test_a_recorded_step_is_measured_as_it_is(queue: cl.CommandQueue) -> None:
    run = Run(queue)

    @amp.record
    def one(x: Any, y: Any) -> Any:
        run.optimizer.zero_grad()
        loss = loss_of(run.model, (x, y))
        with run.handle.scale_loss(loss, run.optimizer) as scaled_loss:
            scaled_loss.backward()
        run.optimizer.step()
        return loss

    for _ in range(4):
        one(*run.data)
    found = run.handle.summary(lambda: one(*run.data))
    assert "matmul_op" in str(found)


def test_a_step_that_fails_leaves_nothing_behind(queue: cl.CommandQueue) -> None:
    run = Run(queue, debug="summary")

    def fails() -> None:
        run.step()
        raise KeyError("gone")

    scale = run.handle.loss_scale
    with pytest.raises(KeyError):
        run.handle.summary(fails)
    assert run.handle.loss_scale == scale
    assert isinstance(run.handle._log.counter, OpCounter)
    assert RESULTS.has(run.handle._log.counter)
    assert len(LISTENERS) == 1
