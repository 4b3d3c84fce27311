"""A run as JSON: there and back, and what is said of files that are none."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clamp.report import checked, read_run, write_run
from tests.debug.sample import empty_run, sample_run


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    run = sample_run()
    write_run(run, tmp_path / "run.json")
    back = read_run(str(tmp_path / "run.json"))
    losses = [[step["loss"] for step in one["steps"]] for one in (run, back)]
    np.testing.assert_array_equal(*np.array(losses, float))
    for one in (run, back):
        for step in one["steps"]:
            step["loss"] = step["gradient_norm"] = None
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
        ("", "Expecting value"),
        ("[1, 2]", "no key 'version'"),
        ('{"steps": []}', "no key 'version'"),
        ('{"version": 2}', r"version 2, and this clamp reads version 1"),
        ('{"version": "1"}', r"version '1', and this"),
        ('{"version": 1}', "run has no key 'clamp'"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_other_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message) as found:
        read_run(file)
    assert str(file) in str(found.value)


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"\x89PNG\r\n\xff")
    with pytest.raises(ValueError, match=r"run\.json: .*decode"):
        read_run(tmp_path / "run.json")


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
