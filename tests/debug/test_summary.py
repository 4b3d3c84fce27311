"""The summary of a run: what it says, and measures but for time; what AMP gains, of given times, in a sentence."""

from __future__ import annotations

import gc
import signal
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Linear
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import HALF_DTYPES
from clamp.casting.results import RESULTS
from clamp.debug.gain import Side, Trial, slower_functions
from clamp.debug.op_counter import OpCounter, OpRow
from clamp.debug.profiler import Profiler
from clamp.debug.summary import judge, notes
from clamp.opencl.device import capabilities
from clamp.ops.cast import CAST, LISTENERS
from clamp.ops.optimizer_step import COPY
from clamp.report import read_run
from tests.faults.check import as_python_does
from tests.networks import Task, Training, batch, loss_of, mlp, step, stepping, weights_of
from tests.reference import to_device

ROWS, WIDTHS = 64, (32, 64, 64, 8)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds: what is measured here depends on none of them."""
    monkeypatch.setattr("clamp.debug.gain._SECONDS", 0.0)
    monkeypatch.setattr("clamp.debug.gain._PASSES", 1)


class Run(Training):
    """A small network, three steps of which have been done."""

    def __init__(self, queue: cl.CommandQueue, **options: Any) -> None:
        super().__init__(queue, WIDTHS, ROWS, **options)
        for _ in range(3):
            self.step()


@pytest.fixture(autouse=True)
def off() -> Any:
    yield
    amp.shutdown()
    assert LISTENERS == []
    assert not RESULTS.observers


@pytest.mark.parametrize("name", ["_wrap", "__exit__"])
def test_ctrl_c_leaves_nothing_over_pyopencl(
    queue: cl.CommandQueue, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, own, signals = Run(queue), getattr(Profiler, name), iter([None, None, signal.SIGINT])
    before = {key: id(value) for key, value in vars(cl).items()}

    def interrupted(*given: Any) -> None:
        if (number := next(signals, None)) is not None:
            signal.raise_signal(number)
        own(*given)

    monkeypatch.setattr(Profiler, name, interrupted)
    with as_python_does(), pytest.raises(KeyboardInterrupt):
        run.handle.summary(run.step)
    assert {key: id(value) for key, value in vars(cl).items()} == before


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


def test_what_weights_take_that_are_cast_together_is_not_the_first_ops(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second for each cast, and nothing for all else."""
    monkeypatch.setattr("clamp.ops.gemm.direct._SMALL", 0)  # no product casts what it reads
    seconds = property(lambda seen: [float(name in (CAST.name, COPY.name)) for name in seen.names])
    monkeypatch.setattr("clamp.debug.gain.Profiler.seconds", seconds)
    run = Run(queue)
    x, y = (ag.tensor(to_device(queue, np.ones((4, 4))), requires_grad=True) for _ in range(2))

    def once() -> None:
        run.step()
        ag.sum(ag.matmul_op(x, y)).backward()  # two that are cast one by one

    amp = run.handle.summary(once).trial.amp
    own = sum(row.seconds for row in amp.rows)
    assert sum(row.seconds for row in amp.rows if row.name == "matmul_op" and not row.module) == 2.0
    assert amp.shared_cast_seconds == 1.0
    assert amp.cast_seconds == own + 1.0
    assert amp.op_seconds == own + 1.0


def test_a_step_of_layers_made_in_it_is_timed(queue: cl.CommandQueue) -> None:
    run = Run(queue)
    x = ag.tensor(to_device(queue, np.ones((2, 3))))

    def once() -> None:
        for _ in range(3):
            Linear(queue, 3, 2)(x)
            gc.collect()
        run.step()

    rows = run.handle.summary(once).trial.amp.rows
    assert all(row.seconds is not None for row in rows)
    assert sum(row.calls for row in rows if row.name == "matmul_op" and not row.module) == 3
    assert sum(row.calls for row in rows if row.module == "layers.0") == 2


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
    assert [guard.pending for guard in run.handle._scaling.guards._by_id.values()] == [{}], "no step is due"
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
    text = str(Run(queue, debug="summary").handle.summary())
    assert "ops of the run" in text
    assert f"casts: float32 -> float16 {9 if capabilities(queue).is_cpu else 12} (" in text
    assert 'debug="summary"' not in text


def test_skips_are_told_with_their_reasons(queue: cl.CommandQueue) -> None:
    task = Task(queue)
    with amp.init(loss_scale="dynamic") as handle:
        for size in (1.0, 3e38, 1.0):
            task.optimizer.zero_grad()
            task.step(handle, size)
        text = str(handle.summary())
    assert "AMP float16: 3 steps, 1 skipped, loss scale 32768" in text
    assert "1 skipped for inf; the last was step 2: inf in 12 elements of the gradients of params[0]" in text


def test_a_recorded_step_is_measured_as_it_is(queue: cl.CommandQueue) -> None:
    run = Run(queue)
    one = amp.record(stepping(run.handle, run.model, run.optimizer))
    for _ in range(4):
        one(*run.data)
    found = run.handle.summary(lambda: one(*run.data))
    assert "matmul_op" in str(found)
    run.handle.memory(lambda: one(*run.data))
    one(*run.data)
    assert one.recordings == 1  # those that were made to be measured are gone
    assert found.trial.is_recorded
    assert not run.handle.summary(run.step).trial.is_recorded


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
    assert run.handle._log.counter in RESULTS.observers
    assert len(LISTENERS) == 1


# ---------------------------------------------------------------------------------------------- of given times


def row(name: str, seconds: float, dtype: str = "float16", policy: str = "half", direction: str = "forward") -> OpRow:
    function = f"netcl.autograd.{name}"
    return OpRow(
        name, direction, function, policy, "layers.0", "train.py:3", (dtype,), dtype, (4, 4), 1, 64, seconds
    )  # fmt: skip


def side(seconds: float, *rows: OpRow, casts: float = 0.0, activations: int = 100, launches: int = 10) -> Side:
    return Side(seconds, list(rows), [], casts, 0.0, 0.0, launches, activations, 0, 2 * activations)


FAST = Trial(
    "float16",
    side(1.0, row("matmul_op", 0.7), activations=52),
    side(1.42, row("matmul_op", 1.1, "float32")),
    rounds=9,
    alone=False,
)
SLOW = Trial(
    "float16",
    side(1.05, row("matmul_op", 0.9), row("softmax", 0.1, "float32", "float"), casts=0.11),
    side(1.0, row("matmul_op", 0.79, "float32"), row("softmax", 0.1, "float32", "float")),
    rounds=9,
    alone=True,
)


SLOWER = replace(SLOW, amp=replace(SLOW.amp, seconds=1.06))
SMALL = replace(SLOW, amp=side(0.0011, launches=20), plain=side(0.001, launches=20))
LISTED = replace(SLOW, black_list=("matmul_op",), with_black_list=0.9, black_list_pays=True)

#: a trial; a pattern of the sentence, a part of the details, and how the cure begins
SAID: dict[str, tuple[Trial, str, str, str]] = {
    "faster and smaller": (
        FAST, "float16 is 1.42x as fast as float32 here and keeps 0.52 of its activation memory.",
        "Medians of 9 rounds, turn about: 1 s in float16, 1.42 s in ", ""),
    "only faster": (
        replace(FAST, amp=replace(FAST.amp, activations=98)), "float16 is 1.42x as fast as float32 here.", "", ""),
    "slower": (
        SLOWER, "no gain here: 1.06x slower than float32, because casts take 11% of the step and the functions in half "
        "are as fast in float32 on this device.", "", 'handle = amp.init(dtype="float32")'),
    "slower and smaller": (
        replace(SLOWER, amp=replace(SLOWER.amp, activations=50)),
        "no gain in time here: 1.06x slower than float32, because casts take 11%*"
        "; float16 keeps 0.50 of float32's activation memory.", "", ""),
    **{f"as fast but for {took}": (
        replace(SLOW, amp=replace(SLOW.amp, seconds=took)), "no gain in time here: as fast as float32, because *", "",
        "") for took in (0.97, 1.0, 1.04)},
    "functions are slower in 16 bits": (
        replace(SLOW, amp=side(1.2, row("matmul_op", 1.0)), plain=side(1.0, row("matmul_op", 0.8, "float32"))),
        "*the functions in half take 1.25x as long in float16 on this device*", "", "handle = "),
    "launches dominate": (SMALL, "*a step is bound by its 20 launches, of 55 us each*", "", "@amp.record"),
    "a black list pays": (
        LISTED, "*", "matmul_op. To put them on the black list pays: then a step takes 900 ms.",
        'handle = amp.init(custom_black_list=["matmul_op"])'),
    "a black list does not": (
        replace(LISTED, with_black_list=1.04, black_list_pays=False), "*", "does not pay", ""),
    "float32": (replace(SLOW, dtype="float32"), "AMP computes in float32 here*", "", ""),
    "a busy machine": (
        replace(FAST, busy=True), "*", "The least (the machine has other things to do, too) of 9 rounds", ""),
    "16 bits in the float32 rounds": (
        replace(FAST, plain=side(1.0, row("gelu", 0.5))), "*", "In the float32 rounds, too", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_is_said_of_times(case: str) -> None:
    trial, sentence, detail, cure = SAID[case]
    found, details = judge(trial), "\n".join(judge(trial).details)
    assert fnmatchcase(found.sentence, sentence), found
    assert detail in details
    assert found.cure.startswith(cure), found
    assert bool(found.cure) == bool(cure), found
    assert found.is_slower == ("x slower" in found.sentence)
    assert ("In the float32 rounds, too" in details) == ("rounds" in case)


@pytest.mark.parametrize("times_as_fast", [0.8, 1.0, 2.0])
@pytest.mark.parametrize(("busy", "is_bound"), [(0.3, True), (0.9, False)])
def test_a_step_that_the_device_waits_in_is_told_of_records(times_as_fast: float, busy: float, is_bound: bool) -> None:
    amp = side(0.01, row("softmax", 0.01 * busy, policy="float"), launches=20)
    verdict = judge(Trial("float16", amp, side(0.01 * times_as_fast), rounds=3, alone=False))
    assert any(line.startswith("Bound by launches: 20 of 500 us each") for line in verdict.details) == is_bound
    assert verdict.cure.startswith("@amp.record") == is_bound
    verdict = judge(Trial("float16", amp, side(0.01 * times_as_fast), rounds=3, alone=False, is_recorded=True))
    assert "@amp.record" not in f"{verdict}"


#: seconds in float16, in float32 and of the slowest pass there, and what is noted
WORTH: dict[str, tuple[float, float, float | None, str | None]] = {
    "slower": (0.5, 0.2, None, "2.50x slower than in float32"),
    "as fast": (0.21, 0.2, None, None),
    "faster": (0.1, 0.2, None, None),
    "slower in one pass and not in another": (0.5, 0.05, 0.6, None),
}


@pytest.mark.parametrize("case", WORTH)
def test_ops_that_are_not_worth_it_are_marked(case: str) -> None:
    took, before, most, note = WORTH[case]
    one = row("matmul_op", took, direction="backward")
    there = row("matmul_op", before, "float32", direction="backward")
    there = there if most is None else replace(there, most=most)
    trial = Trial("float16", side(1.0, one, row("softmax", 0.4, policy="float")), side(1.0, there), 3, False)
    assert notes(trial).get(one.key) == note
    assert slower_functions(trial.amp, trial.plain) == (["matmul_op"] if note else [])
