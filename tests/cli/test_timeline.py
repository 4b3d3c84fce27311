"""The timeline of a step: its structure, never how long anything took."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.cli import main
from clamp.cli.bench.networks import mlp
from clamp.cli.bench.timeline import Command, Gap, Timeline, timeline
from clamp.cli.bench.timing import counted_launches
from clamp.cli.bench.training import Variant
from clamp.debug.profiler import Profiler, Wait
from clamp.ops.cast import cast

STEP = ["bench", "--timeline", "--step", "2x32x8"]


@pytest.fixture
def profiling(queue: cl.CommandQueue) -> cl.CommandQueue:
    """A queue of the device under test that takes times."""
    return cl.CommandQueue(queue.context, queue.device, properties=cl.command_queue_properties.PROFILING_ENABLE)


@pytest.mark.parametrize("what", ["float16", "netcl"])
def test_a_timeline_shows_every_command_of_a_step(
    what: str, queue: cl.CommandQueue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "step.json", tmp_path / "step.png"
    options = ["--device", queue.device.platform.name, "--json", str(file), "--plot", str(picture)]
    assert main(["bench", "--timeline", what, *STEP[2:], *options]) == 0
    found = json.loads(file.read_text())
    for one in found["commands"]:
        assert 0 <= one["queued"] <= one["submitted"] <= one["start"] <= one["end"]
    figures = found["summary"]
    assert figures["launches"] + figures["transfers"] == len(found["commands"])
    assert figures["unseen"] == 0
    assert 0 < figures["busy"] <= figures["queue_full"] <= 1 + 1e-9
    assert figures["gap_seconds_for_host"] <= figures["gap_seconds"] <= figures["span_seconds"]
    assert figures["waits"] == len(found["waits"]) >= 1, "the loss is read"
    names = {one["name"] for one in found["commands"] if one["kind"] == "kernel"}
    assert ("sgd_update" if what == "netcl" else "update") in names
    assert ("gemm" in names) == (what == "float16")
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "queue full: " in out
    assert "waits for the device inside the step: " in out


def test_a_recorder_sees_as_many_launches_as_there_are(profiling: cl.CommandQueue) -> None:
    with Variant(profiling, mlp(2, 32, 8), "float16").steps() as train:
        with counted_launches() as launches:
            train()
        with Profiler() as recorder:
            train()
        profiling.finish()
    found = [one.name for one in timeline(recorder, 1.0).commands if one.kind == "kernel"]
    assert sorted(found) == sorted(launches)


def test_a_recorder_tells_launches_from_transfers_and_counts_waits(profiling: cl.CommandQueue) -> None:
    buffer, host = cl.Buffer(profiling.context, cl.mem_flags.READ_WRITE, 64), np.zeros(16, np.float32)
    x = Tensor.from_host(profiling, host)
    cast(x, "float16")
    with Profiler() as recorder:
        cl.enqueue_fill_buffer(profiling, buffer, np.float32(1), 0, 64)
        cast(x, "float16").queue.finish()
        cl.enqueue_copy(profiling, host, buffer)
        cl.enqueue_copy(profiling, buffer, host, is_blocking=False).wait()
    profiling.finish()
    seen = timeline(recorder, 1.0)
    assert [one.name for one in seen.commands] == ["fill_buffer", "cast", "read", "write"]
    assert [one.kind for one in seen.commands] == ["transfer", "kernel", "transfer", "transfer"]
    assert [wait.name for wait in seen.waits] == ["finish", "read", "wait"]
    np.testing.assert_array_equal(host, np.ones(16))


def test_a_recorder_takes_off_what_it_has_put_on() -> None:
    def names() -> dict[str, int]:
        owners = (cl, cl.Kernel, cl.CommandQueue, cl.Event)
        return {f"{owner.__name__}.{name}": id(value) for owner in owners for name, value in vars(owner).items()}

    def interrupted() -> None:
        with Profiler():
            assert names() != before
            raise KeyboardInterrupt

    before = names()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names() == before


def test_a_queue_without_times_is_an_error(queue: cl.CommandQueue) -> None:
    x = Tensor.from_host(queue, np.zeros(16, np.float32))
    with Profiler() as recorder:
        cast(x, "float16")
    queue.finish()
    with pytest.raises(ValueError, match="PROFILING_ENABLE"):
        timeline(recorder, 1.0)


def test_the_figures_of_a_timeline() -> None:
    commands = (
        Command("a", "kernel", 0.0, 0.5, 1.0, 2.0),
        Command("b", "kernel", 0.0, 0.5, 2.0, 4.0),
        Command("c", "kernel", 0.0, 0.5, 2.5, 3.0),  # beside it
        Command("a", "kernel", 1.0, 1.5, 5.0, 6.0),  # enqueued long before: the device was late
        Command("read", "transfer", 8.0, 8.5, 9.0, 10.0),  # enqueued late
    )
    step = Timeline(commands, (Wait("read", 8.0, 2.0),), step_seconds=11.0, host_seconds=10.5)
    assert step.span == 10.0
    assert step.busy == pytest.approx(0.5)
    assert step.full == pytest.approx(0.8)
    assert step.gaps == [Gap("a", "read", 3.0, 2.0), Gap("b", "a", 1.0, 0.0)]
    assert list(step.seconds_of.items())[:2] == [("a", [1.0, 1.0]), ("b", [2.0])]
    figures = step.summary()
    assert (figures["launches"], figures["transfers"], figures["waits"], figures["waited_seconds"]) == (4, 1, 1, 2.0)
    assert (figures["gap_seconds"], figures["gap_seconds_for_host"]) == (4.0, 2.0)
