"""A run as JSON: everything that a handle knows is in it, there and back; and what is said of files that are none."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.casting.policy_table import default_table
from clamp.casting.regions import Region
from clamp.debug.callsite import NOWHERE
from clamp.debug.explain import Explanation
from clamp.debug.memory_report import Moment
from clamp.debug.op_counter import Point
from clamp.debug.run_log import RunLog, verdict_of
from clamp.debug.step_graph import Frame
from clamp.debug.summary import Summary
from clamp.report import Run, checked, read_run, write_run
from clamp.scaling.step_report import StepReport
from tests.debug.sample import empty_run, sample_run
from tests.debug.test_summary import FAST, SLOW, short
from tests.networks import Training

__all__ = ["short"]  # a fixture

WIDTHS = (16, 32, 4)


def trained(queue: cl.CommandQueue, path: Path, *, spoil: bool = False, with_step: bool = True, **options: Any) -> Run:
    """The run of a small network, whose last weight becomes inf before the last of four steps if it is spoiled."""
    training = Training(queue, WIDTHS, loss_scale=8.0, **options)
    with training.handle as handle:
        for number in range(4):
            if spoil and number == 3:
                weight = training.model.layers[2].weight.to_host()
                weight[0, 0] = np.inf
                training.model.layers[2].weight.write(weight)
            training.step()
        handle.report(path, training.step if with_step else None)
    return read_run(path)


def test_a_counted_run_is_all_there(queue: cl.CommandQueue, tmp_path: Path) -> None:
    run = trained(queue, tmp_path / "run.json", debug="summary")
    assert (run["dtype"], run["level"], run["device"]["name"]) == ("float16", "O1", queue.device.name.strip())
    assert [one["step"] for one in run["steps"]] == [1, 2, 3, 4]
    assert all(one["loss"] and one["gradient_norm"] and one["scale"] == 8.0 for one in run["steps"])
    assert {op["calls"] for op in run["ops"]} == {4}
    assert all(op["milliseconds"] is not None for op in run["ops"])
    assert {op["op"] for op in run["ops"]} >= {"linear_relu", "matmul_op", "mse_loss"}
    assert run["modules"][0] == {"path": "", "class": "Sequential", "parameters": 16 * 32 + 32 + 32 * 4 + 4}
    assert {"path": "layers.2", "class": "Linear", "parameters": 32 * 4 + 4} in run["modules"]
    assert {op["module"] for op in run["ops"]} <= {one["path"] for one in run["modules"]}
    memory = run["memory"]
    assert 0 < memory["activations"] < memory["float32_activations"]
    assert 0 < memory["peak"] < memory["float32_peak"]
    assert memory["weight_copies"] >= 2 * (16 * 32 + 32 * 4)
    most = max(Moment(**one).held for one in memory["timeline"])
    assert most == sum(holder["bytes"] for holder in memory["holders"])
    assert {"layers.0", "layers.2"} <= {moment["module"] for moment in memory["timeline"]}
    assert run["updates"] == {"layers": [], "notes": []}, "its weights are float32"
    assert run["first_bad"] is None
    assert run["verdict"]["kind"] in ("healthy", "slow")


def test_a_run_that_nobody_counted_has_its_steps(queue: cl.CommandQueue, tmp_path: Path) -> None:
    run = trained(queue, tmp_path / "run.json", with_step=False)
    assert len(run["steps"]) == 4
    assert (run["ops"], run["modules"], run["memory"]["peak"]) == ([], [], None)
    assert run["device"]["platform"] == queue.device.platform.name.strip()
    assert run["verdict"] == {
        "headline": "4 of 4 steps were done, 0 skipped", "details": [], "cure": None, "kind": "healthy"
    }  # fmt: skip


@pytest.mark.parametrize("debug", ["attribution", None])
def test_the_first_bad_op_is_named(queue: cl.CommandQueue, tmp_path: Path, debug: str | None) -> None:
    run = trained(queue, tmp_path / "run.json", spoil=True, debug=debug)
    found = run["first_bad"]
    assert (found["op"], found["direction"], found["module"]) == ("matmul_op", "forward", "layers.2")
    assert (found["what"], found["count"], found["dtype"]) == ("inf", 6, "float16")  # of what it gave
    assert {one["name"]: one["infs"] for one in found["inputs"]}["layers.2.weight"] == 1
    assert run["verdict"]["headline"] == "The model's layers.2.weight itself holds 1 inf"
    assert run["verdict"]["kind"] == "not finite"
    assert sum(op["op"] == "matmul_op" and op["direction"] == "forward" for op in run["ops"]) == 1
    assert run["steps"][-1]["parameters"]


# ---------------------------------------------------------------------------------------------- of given numbers


def summary_of(history: list[StepReport], **changes: Any) -> Summary:
    skips = sum(not report.stepped for report in history)
    return Summary("float16", len(history), skips, history, 8.0, 3, 0.5, **changes)


def report(number: int, stepped: bool = True) -> StepReport:
    return StepReport(stepped, "" if stepped else "inf in 3 elements of the gradients of w", 8.0, step=number)


def as_run(summary: Summary, points: Any = None, losses: list[float] | None = None) -> Run:
    scaling = SimpleNamespace(history=[], guards=SimpleNamespace(device=None))
    log = RunLog(Region(True, "float16", default_table(), level="O2"), scaling)
    if points is not None:
        log.counter.curves.read = lambda: points  # type: ignore[method-assign]
    return checked(json.loads(json.dumps(log.run(summary, None, losses))))


def test_losses_of_the_user_take_the_place_of_those_noted() -> None:
    history = [report(number) for number in (5, 6, 7)]
    points = {5: Point(1.0, 2.0), 6: Point(None, None), 7: Point(3.0, 4.0)}
    assert [one["loss"] for one in as_run(summary_of(history), points=points)["steps"]] == [1.0, None, 3.0]
    assert [one["loss"] for one in as_run(summary_of(history), losses=[8.0, 9.0])["steps"]] == [None, 8.0, 9.0]
    many = as_run(summary_of(history), losses=[float(number) for number in range(10)])["steps"]
    assert [one["loss"] for one in many] == [7.0, 8.0, 9.0]


def test_milliseconds_are_those_of_all_calls() -> None:
    (once,) = FAST.amp.rows
    ops = as_run(summary_of([report(1)], rows=[once], trial=FAST))["ops"]
    assert [op["milliseconds"] for op in ops] == [pytest.approx(700.0)]
    counted = [replace(once, calls=5, bytes=320)]
    ops = as_run(summary_of([report(1)], rows=counted, trial=FAST, counted=True))["ops"]
    assert [(op["calls"], op["milliseconds"]) for op in ops] == [(5, pytest.approx(3500.0))]


def test_verdicts_say_what_matters_most() -> None:
    fine, bad = [report(1), report(2)], [report(1), report(2, False), report(3, False)]
    measured = summary_of(fine, trial=FAST)
    assert verdict_of(measured, None)["kind"] == "healthy"
    assert verdict_of(measured, None)["headline"].startswith("float16 is 1.42x as fast as float32 here")
    slow = summary_of(fine, trial=replace(SLOW, amp=replace(SLOW.amp, seconds=2.0)))
    assert verdict_of(slow, None)["kind"] == "slow"
    skipping = verdict_of(summary_of(bad, trial=FAST), None)
    assert skipping["headline"] == "The last 2 steps were skipped: inf in 3 elements of the gradients of w"
    assert 'debug="attribution"' in skipping["cure"]
    unseen = Explanation(bad[-1], "unseen", "Nobody knows.", "")
    assert verdict_of(summary_of(bad), unseen)["kind"] == "unknown"
    assert verdict_of(summary_of([]), None)["headline"] == "No step has been done"


#: which of the steps of a run are skipped, and what the page says without knowing more
SKIPS: dict[str, tuple[list[bool], str]] = {
    "a fourth": ([number % 4 != 0 for number in range(1, 31)], "overflow"),
    "one batch in sixteen": ([number % 16 != 0 for number in range(1, 34)], "overflow"),
    "of a short run": ([True, False, True, False, True], "overflow"),
    "while a scale is looked for": ([False] * 4 + [True] * 10, "healthy"),
    "now and then": ([number % 40 != 0 for number in range(1, 101)], "healthy"),
    "a single one": ([True, True, False, True], "healthy"),
    "the last ones": ([True, True, False, False], "unknown"),
}


@pytest.mark.parametrize("case", SKIPS)
@pytest.mark.parametrize("measured", [True, False])
def test_a_run_that_skips_is_not_called_healthy(case: str, measured: bool) -> None:
    done, kind = SKIPS[case]
    history = [report(number, stepped) for number, stepped in enumerate(done, start=1)]
    found = verdict_of(summary_of(history, trial=FAST) if measured else summary_of(history), None)
    assert found["kind"] == kind, found
    assert ("steps were skipped: inf in 3 elements" in found["headline"]) == (kind != "healthy")
    assert any(f"{done.count(False)} of {len(done)} steps were skipped" in line for line in found["details"])


def explained(kind: str, cure: str, report: StepReport) -> Explanation:
    frame = Frame("mul", "forward", NOWHERE, [], [])
    return Explanation(report, kind, f"Why of {kind}: the rest.", cure, frame)


@pytest.mark.parametrize("case", SKIPS)
def test_what_has_a_cure_is_told_of_any_skip(case: str) -> None:
    done, kind = SKIPS[case]
    history = [report(number, stepped) for number, stepped in enumerate(done, start=1)]
    skipped = next(one for one in reversed(history) if not one.stepped)
    found = verdict_of(summary_of(history, trial=FAST), explained("forward", "do this", skipped))
    assert (found["headline"], found["cure"]) == ("Why of forward", "do this")
    assert found["kind"] != "healthy"
    scale = verdict_of(summary_of(history, trial=FAST), explained("scale", "", skipped))
    assert (scale["kind"] == "healthy") == (kind == "healthy")
    assert "Why of scale" in (scale["headline"] if kind != "healthy" else " ".join(scale["details"]))


# ---------------------------------------------------------------------------------------------- there and back


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    run = sample_run()
    write_run(run, tmp_path / "run.json")
    back = read_run(str(tmp_path / "run.json"))
    losses = [[step["loss"] for step in one["steps"]] for one in (run, back)]
    np.testing.assert_array_equal(*np.array(losses, float))
    for one in (run, back):
        for done in one["steps"]:
            done["loss"] = done["gradient_norm"] = None
    assert back == run
    empty = empty_run()
    write_run(empty, tmp_path / "empty.json")
    assert read_run(tmp_path / "empty.json") == empty


def test_what_json_has_no_numbers_for_is_written_in_words(tmp_path: Path) -> None:
    run = sample_run()
    step = run["steps"][0]
    step["loss"], step["gradient_norm"], step["scale"] = math.nan, -math.inf, math.inf
    write_run(run, tmp_path / "run.json")

    def refuse(text: str) -> None:
        pytest.fail(f"{text} is no JSON")

    written = json.loads((tmp_path / "run.json").read_text("utf-8"), parse_constant=refuse)
    assert [written["steps"][0][key] for key in ("loss", "gradient_norm", "scale")] == ["nan", "-inf", "inf"]
    found = read_run(tmp_path / "run.json")["steps"][0]
    assert math.isnan(found["loss"])
    assert (found["gradient_norm"], found["scale"]) == (-math.inf, math.inf)


def test_numbers_of_numpy_are_as_good() -> None:
    run: Any = sample_run()
    run["steps"][0] |= {"step": np.int64(1), "loss": np.float32(1e30), "scale": 65536}
    step = checked(run)["steps"][0]
    assert (step["step"], step["loss"], step["scale"]) == (1, float(np.float32(1e30)), 65536.0)
    assert [type(step[key]) for key in ("step", "loss", "scale")] == [int, float, float]


def test_keys_of_a_later_clamp_are_left_out() -> None:
    run: Any = sample_run()
    more = copy.deepcopy(run)
    more["more"] = more["ops"][0]["more"] = 1
    assert checked(more)["ops"] == run["ops"]
    assert checked(more).keys() == run.keys()


def test_texts_can_be_written_and_shown(tmp_path: Path) -> None:
    run = empty_run()
    run["verdict"]["headline"] = "a\0b\x1b[1m \ud800 c\nd"
    write_run(run, tmp_path / "run.json")
    assert read_run(tmp_path / "run.json")["verdict"]["headline"] == "a�b�[1m � c\nd"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[1, 2]", "no key 'version'"),
        (b'{"steps": []}', "no key 'version'"),
        (b'{"version": 2}', r"version 2, and this clamp reads version 1"),
        (b'{"version": "1"}', r"version '1', and this"),
        (b'{"version": 1}', "run has no key 'clamp'"),
        (b"[" * 100_000, "recursion|overflow"),
        (b"\x89PNG\r\n\xff", r"run\.json: .*decode"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as found:
        read_run(file)
    assert str(file) in str(found.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["steps", 3, "loss"], "low", r"run\.steps\[3\]\.loss is 'low': write a number"),
        (["steps", 3, "stepped"], 1, r"run\.steps\[3\]\.stepped is 1: write true or false"),
        (["steps", 3, "step"], 1.5, r"run\.steps\[3\]\.step is 1\.5: write a whole number"),
        (["steps", 3, "infs"], -1, r"run\.steps\[3\]\.infs is -1: write a whole number, 0 or more"),
        (["steps", 3, "infs"], 10**400, r"run\.steps\[3\]\.infs is 1000.*\.\.\.: write"),
        (["steps", 3, "loss"], -(10**400), r"run\.steps\[3\]\.loss is -1000.*\.\.\.: write a number"),
        (["steps", 3, "loss"], True, r"run\.steps\[3\]\.loss is True: write a number"),
        (["steps", 3, "step"], True, r"run\.steps\[3\]\.step is True"),
        (["steps", 3, "scale"], None, r"run\.steps\[3\]\.scale is None"),
        (["steps"], {}, r"run\.steps is \{\}: write a list"),
        (["ops", 0], "matmul", r"run\.ops\[0\] is 'matmul': write an object"),
        (["ops", 0, "op"], 5, r"run\.ops\[0\]\.op is 5: write a text"),
        (["ops", 0, "direction"], "sideways", r"'sideways': write one of 'forward', 'backward'"),
        (["verdict", "kind"], ["slow"], r"run\.verdict\.kind is \['slow'\]: write one of 'healthy'"),
        (["ranges", 1, "octaves"], [0] * 41, r"run\.ranges\[1\]\.octaves has 41 counts: write 42"),
        (["first_bad", "inputs"], "x" * 99, r"run\.first_bad\.inputs is 'x{59}\.\.\.: write a list"),
    ],
)
def test_a_wrong_value_is_named(path: list[Any], value: Any, message: str, tmp_path: Path) -> None:
    run: Any = sample_run()
    inside = run
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        write_run(run, tmp_path / "run.json")
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("part", ["device", "steps", "ops", "ranges", "memory", "modules"])
def test_a_missing_key_is_named(part: str) -> None:
    run: Any = sample_run()
    inside = run[part][0] if isinstance(run[part], list) else run[part]
    key = list(inside)[-1]
    del inside[key]
    with pytest.raises(ValueError, match=rf"run\.{part}.* has no key '{key}'"):
        checked(run)
