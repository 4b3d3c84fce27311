"""The command line: structure and exit codes. No test here looks at how fast anything was."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyopencl as cl
import pytest

from clamp import session
from clamp.casting.policy_table import CastPolicy, default_table
from clamp.casting.registry import OWNED
from clamp.cli import doctor, main
from clamp.cli.bench import command, products, steps
from clamp.cli.bench.bandwidth import TENSORS, mixed_sizes
from clamp.cli.bench.networks import MLP
from clamp.cli.bench.peers import PeerError, PeerProcess, blas_settings, installed_peers
from clamp.cli.bench.report import rows_of, write_json
from clamp.cli.bench.timing import (
    Case,
    Contender,
    Effort,
    Race,
    counted_launches,
    interleave,
    random_tensor,
    settle,
    timed,
)
from clamp.cli.devices import UnknownDeviceError, choose_device, describe, is_simulator, slug
from clamp.cli.lists import reached
from clamp.opencl import trials
from clamp.opencl.device import NoDeviceError, capabilities, list_devices
from clamp.ops import verified
from clamp.ops.cast import cast
from clamp.ops.conv import engines as convolutions
from clamp.ops.gemm.engines import usual
from clamp.ops.gemm.matrix_units import MMA, WGMMA
from clamp.ops.gemm.plan import Plan

TINY = [
    "bench", "--quick", "--sizes", "32", "--elements", "20000", "--step", "2x32x8", "--images", "1", "--cnn", "2",
    "--convs", "one", "--attention", "1x2x16x8", "--decoder", "2x8x32", "--resnet", "4x2",
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- bench


@pytest.fixture(scope="module")
def result(queue: cl.CommandQueue, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A tiny run of everything on one device, every contender timed twice. (ResNet-18's step is not for netcl here:
    it compiles and tries a dozen kernels for each shape of convolutions.)"""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "QUICK", Effort(rounds=2, seconds=0.0, least=1, most=1))
        assert main([*TINY, "--device", queue.device.platform.name, "--json", str(folder)]) == 0
    (file,) = folder.iterdir()
    content = json.loads(file.read_text())
    assert file.name == f"{slug(queue.device)}-{content['date'][:10]}.json"
    return content


@pytest.mark.once
@pytest.mark.slow
def test_bench_says_where_it_ran(result: dict, queue: cl.CommandQueue) -> None:
    assert result["device"]["name"] == queue.device.name.strip()
    assert result["device"]["driver"] == queue.device.driver_version.strip()
    assert {"clamp", "netcl", "pyopencl", "numpy", "python"} <= result["versions"].keys()
    assert result["peers"]["threads"] >= 1
    assert [note for note in result["notes"] if not note.startswith("torch")] == []


@pytest.mark.once
@pytest.mark.slow
def test_bench_measures_every_kind_of_work_in_every_dtype(result: dict) -> None:
    found = {(row["work"], row["contender"]) for row in result["rows"]}
    for work in ("gemm", "conv", "attention", "bandwidth", "unscale", "step", "cnn", "memory"):
        for contender in ("netcl", "clamp float32", "clamp float16", "clamp bfloat16"):
            assert (work, contender) in found
    assert {name for work, name in found if work == "cast"} >= {
        "copy kernel", "clamp float32->float16", "clamp float32->bfloat16", "clamp float16->float32",
        "clamp bfloat16->float32",
    }  # fmt: skip
    assert {row["case"] for row in result["rows"] if row["work"] == "gemm"} == {"NN 32", "NT 32", "TN 32"}


Bench = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def bench(queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The benchmark on the device under test, without peers: the rows that it writes to result.json."""
    monkeypatch.setattr(command, "QUICK", Effort(rounds=2, seconds=0.0, least=1, most=1))

    def run(*arguments: str, status: int = 0) -> list[dict[str, Any]]:
        file = tmp_path / "new" / "result.json"
        options = ["--no-peers", "--device", queue.device.platform.name, "--json", str(file)]
        assert main([*TINY, *arguments, *options]) == status
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
        return rows

    return run


@pytest.mark.slow
def test_bench_times_small_steps(queue: cl.CommandQueue, bench: Bench) -> None:
    if is_simulator(queue.device):
        pytest.skip("too slow to simulate")
    rows = bench("--small", "--no-netcl")
    calls = [row["contender"] for row in rows if row["work"] == "calls"]
    assert set(calls) == {"disable_casts()"}, "netcl's own were not asked for"
    assert len(calls) >= 5
    rows = [row for row in rows if row["work"] == "small"]
    assert len({row["case"] for row in rows}) == 2
    assert {"clamp float32", "clamp float16", "clamp float16, recorded"} <= {row["contender"] for row in rows}
    assert all(row["extra"]["launches"] > 10 for row in rows if "recorded" not in row["contender"])


@pytest.mark.once
@pytest.mark.slow
def test_bench_measures_the_memory_of_loops(bench: Bench) -> None:
    rows = bench("--memory", "--no-netcl", "--step", "7x32x8")
    assert len({row["case"] for row in rows if row["work"] == "checkpoint"}) == 3
    bytes_of = {(row["case"], row["contender"]): row["median"] for row in rows if row["work"] == "memory"}
    for (case, name), found in bytes_of.items():
        if case.startswith("peak, loss.backward()"):
            other = case.replace("loss.backward()", "tape.backward(loss)")
            # Both hold one step; a number more or less is where a backward begins.
            assert abs(found - bytes_of[other, name]) * 2**20 <= 64
        if case.startswith("activations") and name.endswith(", checkpoint"):
            assert found < 0.5 * bytes_of[case, name.removesuffix(", checkpoint")]
        if case.startswith("optimizer state") and name.endswith(", 8-bit state"):
            assert 0 < found < 0.35 * bytes_of[case, name.split(",")[0].removesuffix(" O2")]


@pytest.mark.once
@pytest.mark.slow
def test_bench_measures_first_steps(queue: cl.CommandQueue, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """This checkout beside itself: what was compiled, and that a second process finds it."""
    if is_simulator(queue.device):
        pytest.skip("too slow to simulate")
    monkeypatch.setenv("CLAMP_CACHE_LATER", "")
    monkeypatch.setattr(steps, "NETWORKS", {"mlp": MLP})
    monkeypatch.setattr(command, "QUICK", Effort(rounds=1, seconds=0.0, least=1, most=1))
    rows = bench("--first-step", "--against", str(Path(__file__).parents[2]))
    assert [row["contender"] for row in rows] == ["clamp", f"clamp in {Path(__file__).parents[2].name}"] * 2
    assert all(row["extra"]["later"] == 0 for row in rows), "a ragged batch was compiled for"
    cold, second = rows[0], rows[2]
    assert cold["extra"]["programs"] > 10
    assert second["median"] < cold["median"]


@pytest.mark.once
@pytest.mark.slow
def test_bench_compares_with_netcl_and_with_numpy(result: dict) -> None:
    peer = next(label for label in result["peers"] if label not in ("threads", "torch"))
    for row in result["rows"]:
        assert row["median"] > 0
        assert row["samples"] >= 1
        assert all(ratio > 0 for ratio in row["ratios"].values())
        if row["contender"].startswith("clamp"):
            # netcl computes both gradients of a convolution or none.
            alone = row["work"] == "conv" and "-gradient" in row["case"]
            assert alone or ("copy kernel" if row["work"] in ("cast", "bandwidth") else "netcl") in row["ratios"]
            assert (f"{peer} float32" in row["ratios"]) == (row["work"] == "gemm")


@pytest.mark.once
@pytest.mark.slow
def test_bench_counts_the_launches_of_the_scaler(result: dict) -> None:
    launches = {row["contender"]: row["extra"]["launches"] for row in result["rows"] if row["work"] == "unscale"}
    assert launches["netcl"] == TENSORS
    assert all(launches[f"clamp {dtype}"] <= 3 for dtype in ("float32", "float16", "bfloat16"))


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("work", ["step", "cnn"])
def test_every_variant_of_the_step_computes_the_same_loss(result: dict, work: str) -> None:
    rows = {row["contender"]: row for row in result["rows"] if row["work"] == work}
    losses = {name: row["extra"]["first_loss"] for name, row in rows.items() if name.split()[0] in ("netcl", "clamp")}
    assert losses["clamp float32"] == pytest.approx(losses["netcl"], rel=1e-5)
    assert losses["clamp float16"] == pytest.approx(losses["netcl"], rel=1e-2)
    assert losses["clamp bfloat16"] == pytest.approx(losses["netcl"], rel=5e-2)


@pytest.mark.once
@pytest.mark.slow
def test_activations_take_less_memory_in_16_bits(result: dict) -> None:
    rows = [row for row in result["rows"] if row["work"] == "memory" and row["case"].startswith("activations")]
    for network in {row["case"] for row in rows}:
        mib = {row["contender"]: row["median"] for row in rows if row["case"] == network}
        assert mib["clamp float16"] == mib["clamp bfloat16"] < mib["clamp float32"]


def test_bench_measures_only_what_is_asked_for(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {row["work"] for row in bench("--only", "cast")} == {"cast"}
    file = tmp_path / "new" / "result.json"
    assert list(json.loads(file.read_text())["peers"]) == ["threads"]
    out = capsys.readouterr().out
    assert "copy kernel" in out
    assert str(file) in out


def test_bench_compares_the_levels_in_the_network_of_paddles_guide(bench: Bench) -> None:
    rows = [row for row in bench("--only", "guide") if row["work"] == "guide"]
    halves = [f"clamp {dtype} {level}" for dtype in ("float16", "bfloat16") for level in ("O1", "O2")]
    assert [row["contender"] for row in rows] == ["netcl", "clamp float32", *halves]
    losses = [row["extra"]["first_loss"] for row in rows]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=5e-2)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("network", ["resnet", "decoder"])
def test_bench_times_modules_of_netcl(bench: Bench, network: str) -> None:
    rows = [row for row in bench("--only", network, "--no-netcl") if row["work"] == network]
    assert [row["contender"] for row in rows] == ["clamp float32", "clamp float16", "clamp bfloat16"]


def test_bench_writes_what_it_has_after_each_case(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "new" / "result.json"
    written: list[set[str]] = []

    def cut_off(*args: object) -> object:
        written.append({row["case"] for row in json.loads(file.read_text())["rows"]})
        raise MemoryError

    monkeypatch.setattr(command, "unscale_cases", cut_off)
    with pytest.raises(MemoryError):
        bench("--only", "gemm,unscale", "--layouts", "TT", "--no-netcl")
    assert written == [{"TT 32"}]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_results_go_where_a_link_leads_and_into_what_is_no_file(tmp_path: Path) -> None:
    """Neither is replaced: as ``/dev/stdout`` both are nobody's to take away."""
    kept, link, pipe = tmp_path / "kept.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(kept)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for file in (link, pipe):
        write_json(file, {"rows": []})
    assert json.loads(kept.read_text()) == json.loads(os.read(reader, 100)) == {"rows": []}
    os.close(reader)
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"kept.json", "link.json", "pipe"}


def test_bench_starts_over_in_the_environment_that_timings_need(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    environment = {name: value for name, value in os.environ.items() if name != "POCL_AFFINITY"}
    environment["OPENBLAS_NUM_THREADS"] = "2"
    command = [sys.executable, "-m", "clamp", *TINY, "--only", "cast", "--no-peers", "--json", str(file)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert json.loads(file.read_text())["environment"] == {"POCL_AFFINITY": "1", "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("works", "affinity"), [("cast", "1"), ("first-step", "0"), ("small,first-step", "0"), ("small,gemm", "1")]
)
@pytest.mark.long
def test_steps_of_small_networks_are_timed_on_threads_that_are_not_pinned(
    tmp_path: Path, works: str, affinity: str
) -> None:
    seen = tmp_path / "seen.json"
    (tmp_path / "sitecustomize.py").write_text(
        "import json, os, pathlib, sys\n"
        "if 'bench' in sys.orig_argv:\n"
        "    names = ('POCL_AFFINITY', 'OPENBLAS_NUM_THREADS')\n"
        f"    pathlib.Path({str(seen)!r}).write_text(json.dumps([os.environ.get(name) for name in names]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "POCL_AFFINITY"}
    environment |= {"OPENBLAS_NUM_THREADS": "2", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "clamp", "bench", "--only", works, "--device", "no such device"]
    assert subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode == 2
    assert json.loads(seen.read_text()) == [affinity, "1"]


@pytest.mark.parametrize(
    "arguments",
    [
        "--only gemm,cats", "--sizes 64,x", "--sizes 0", "--step 2x32", "--elements -1", "--layouts NX",
        "--attention 2x8x512", "--resnet 64x0",
    ],
)  # fmt: skip
def test_bench_refuses_arguments_that_mean_nothing(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments.split()])
    assert exit_info.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err


def test_bench_prints_what_it_has_when_it_is_interrupted(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "unscale_cases", Mock(side_effect=KeyboardInterrupt))
    rows = bench("--only", "cast,unscale", status=130)
    captured = capsys.readouterr()
    assert "copy kernel" in captured.out
    assert "interrupted" in captured.out
    said = captured.err.splitlines()
    assert [line for line in said if not line.startswith("clamp: compiling")] == []  # which takes long where cores do
    assert {row["work"] for row in rows} == {"cast"}
    assert "interrupted" in json.loads((tmp_path / "new" / "result.json").read_text())["notes"][-1]


def test_bench_keeps_the_case_in_which_it_is_interrupted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(turns: Any, *others: Any) -> Race:
        return Race({"copy kernel": [1.0]}, {}, interrupted=True)

    monkeypatch.setattr(command, "interleave", interrupted)
    assert [row["contender"] for row in bench("--only", "cast,unscale", status=130)] == ["copy kernel"]


@pytest.mark.parametrize("where", ["clamp.cli.lists.default_table", "clamp.cli.resolve_name"])
def test_a_command_ends_in_one_line_when_it_is_interrupted(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while what it needs is imported, which takes longest."""
    monkeypatch.setattr(where, Mock(side_effect=KeyboardInterrupt))
    assert main(["lists"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


#: arguments, the exit status, what is said on standard error; DEVICE is the first of the devices
REFUSED: list[tuple[list[str], int, str]] = [
    *(([command, "--device", "abacus"], 2, "no OpenCL device is called 'abacus'; found:\n  0: DEVICE")
      for command in ("bench", "tune", "warm")),
    ([*TINY, "--only", "cast", "--no-peers", "--json", "file/result.json"], 1, "cannot write file/result.json"),
    (["bench", "--first-step", "--against", "folder"], 2, "there is no clamp in folder"),
    (["bench", "--against", str(Path(__file__).parents[2])], 2, "give --first-step"),
    (["bench", "--plot", "x.png"], 2, "give --timeline"),
    (["bench", "--timeline", "--plot", "/no/such/folder/x.png"], 2, "no such folder"),
    (["bench", "--timeline", "--only", "step,cnn"], 2, "give --only"),
    (["lists", "softmax", "--device", "abacus"], 2, "no OpenCL device is called"),
    (["lists", "softmax", "--policy", "half"], 2, "'softmax' means has the policy 'half' at level O1"),
    (["lists", "matmull"], 2, "netcl.autograd.matmul_op"),
    (["lists", "qqqqqq"], 2, "python -m clamp lists"),
    *((["lists", name], 2, "examples/rnn_cell.py makes an LSTM cell") for name in ("LSTM", "GRUCell", "nn.RNN")),
    (["run", "nowhere.py"], 2, "there is no script nowhere.py"),
    *(([command, *options, "-m", name], 1, f"there is no module {name}\n")
      for command, options in (("run", ()), ("trace", ("-o", "folder"))) for name in ("nowhere", "nowhere.py", "")),
    (["run", "--report", "nowhere/run.html", "there.py"], 1, "there is no folder nowhere"),
    (["run", "--report", "folder", "there.py"], 1, "cannot write folder: it is a folder"),
    (["run", "--report", "run.html", "there.py"], 1, "--report needs jinja2: pip install jinja2, or write JSON"),
    (["warm", "--model", "resnet"], 2, "resnet is none of mlp, cnn, lm, and no script"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "status", "says"), REFUSED)
def test_what_cannot_be_done_is_said_before_anything_is(
    arguments: list[str], status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("there.py").write_text("raise AssertionError", encoding="utf-8")
    Path("file").touch()
    Path("folder").mkdir()
    monkeypatch.setattr("clamp.cli.run.find_spec", lambda name: None)  # jinja2 and matplotlib are not installed
    assert main(arguments) == status
    said = capsys.readouterr()
    assert says.replace("DEVICE", describe(list_devices()[0])) in said.err
    assert said.out == ""
    assert session.active_handle() is None


def test_what_cannot_be_done_is_all_that_is_said_where_nobody_reads() -> None:
    """As in ``warm | head -1``, which prints before it knows."""
    script = (
        "import clamp.cli, clamp.cli.lists\n"
        "def refuse(args):\n"
        "    print('a table')\n"
        "    raise clamp.cli.CommandError('there is none')\n"
        "clamp.cli.lists.run = refuse\n"
        "raise SystemExit(clamp.cli.main(['lists']))\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        ended = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONUNBUFFERED": ""}, stdout=pipe,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (1, "there is none\n")


def test_a_command_without_rich_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("lists", "bench.report"):
        monkeypatch.delitem(sys.modules, f"clamp.cli.{name}", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["lists"]) == 1
    assert "pip install rich" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- timing


def test_contenders_take_turns_and_slow_ones_fewer() -> None:
    order: list[tuple[str, int]] = []

    def contender(name: str, seconds: float) -> object:
        def turn(calls: int) -> list[float]:
            order.append((name, calls))
            return [seconds] * calls

        return turn

    effort = Effort(rounds=5, seconds=1.0, least=3, most=9)
    race = interleave({"fast": contender("fast", 0.001), "slow": contender("slow", 2.0)}, effort)
    assert len(race.seconds["fast"]) == 9
    assert len(race.seconds["slow"]) == 3
    assert [turn for turn in order if turn[0] == "slow"] == [("slow", 1)] * 4  # one of them warms up
    assert order[:4] == [("fast", 1), ("slow", 1)] * 2
    assert [turn for turn in order[4:] if turn[0] == "fast"] == [("fast", 2)] * 4


@pytest.mark.parametrize(("seconds", "calls"), [(1e-9, 40), (0.1, 10), (2.0, 3), (5.0, 2), (100.0, 1)])
def test_the_slower_a_call_the_fewer(seconds: float, calls: int) -> None:
    assert Effort(rounds=5, seconds=1.0, least=3, most=40, patience=12.0).calls(seconds) == calls


def ending(error: BaseException, good_turns: int) -> Callable[[int], list[float]]:
    """A contender of so many turns, and the error."""
    turns = itertools.count()

    def turn(calls: int) -> list[float]:
        if next(turns) == good_turns:
            raise error
        return [0.1] * calls

    return turn


@pytest.mark.parametrize("good_turns", [0, 1, 3])
def test_a_contender_that_fails_leaves_the_race(good_turns: int) -> None:
    bad, good = Mock(side_effect=ending(ValueError("out of\nmemory"), good_turns)), lambda calls: [0.1] * calls
    race = interleave({"bad": bad, "good": good}, Effort(3, 1.0, 3, 9))
    assert race.failures == {"bad": "ValueError: out of"}
    assert list(race.seconds) == ["good"]
    assert bad.call_count == good_turns + 1


def test_who_has_been_timed_keeps_it_when_a_race_is_interrupted() -> None:
    good, slow = lambda calls: [0.1] * calls, ending(KeyboardInterrupt(), 1)
    race = interleave({"good": good, "slow": slow}, Effort(3, 1.0, 3, 9))
    assert race.interrupted
    assert (list(race.seconds), race.failures) == (["good"], {})


def test_a_row_has_a_median_a_best_and_a_slow_call() -> None:
    case = Case("gemm", "NN", "ms", [Contender("netcl", lambda calls: [])])
    (row,) = rows_of(case, Race({"netcl": [3.0, 1.0, 2.0, 4.0, 5.0]}, {}))
    assert (row.median, row.best) == (3000.0, 1000.0)
    assert 4000.0 < row.slow <= 5000.0
    assert rows_of(case, Race({"netcl": [2.0]}, {}))[0].slow == 2000.0


def test_a_turn_of_several_calls_starts_with_an_untimed_one() -> None:
    events: list[str] = []
    seconds = timed(lambda: events.append("call"), lambda: events.append("finish"))(2)
    assert len(seconds) == 2
    assert events == ["call", "finish"] * 3
    settle(limit=0.05)


def test_ratios_above_one_are_faster(queue: cl.CommandQueue) -> None:
    def never(calls: int) -> list[float]:
        raise AssertionError

    race = Race({"netcl": [2.0], "clamp": [0.5]}, {})
    for unit, netcl, clamp in (("ms", 2000.0, 500.0), ("GFLOP/s", 1.0, 4.0)):
        contenders = [Contender("netcl", never, 2e9, is_baseline=True), Contender("clamp", never, 2e9)]
        rows = rows_of(Case("gemm", "NN", unit, contenders), race)
        assert [row.median for row in rows] == [netcl, clamp]
        assert rows[0].ratios == {}
        assert rows[1].ratios == {"netcl": 4.0}
        assert not any("of_limit" in row.extra for row in rows)


def test_bench_says_how_much_of_a_matrix_units_limit_a_product_reaches(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 GFLOP/s, of which float16 may take four for one; where there is no such unit, of none."""
    found = replace(capabilities(queue), amx=True, amx_fp16=False)
    monkeypatch.setattr(products.amx, "limit", lambda queue: 100e9)
    for device, shares in ((found, {"float16": 0.8, "bfloat16": 0.2}), (replace(found, amx=False), {})):
        monkeypatch.setattr(products, "capabilities", lambda queue, device=device: device)
        (case,) = products.gemm_cases(queue, [8], ["NN"], [])
        race = Race({one.name: [2 * 8**3 / 20e9] for one in case.contenders}, {})
        reached = {row.contender.split()[-1]: row.extra["of_limit"] for row in rows_of(case, race) if row.extra}
        assert reached == pytest.approx(shares)


# ---------------------------------------------------------------------------------------------- peers


def test_a_peer_times_what_it_can_and_says_what_it_cannot() -> None:
    with PeerProcess("numpy", threads=1, gpu=False) as peer:
        assert peer.works == {"gemm": ["float32"]}
        for layout in ("NN", "NT", "TN"):
            seconds = peer.turn("gemm", "float32", layout, 16)(3)
            assert len(seconds) == 3
            assert min(seconds) > 0
        with pytest.raises(PeerError, match="TypeError"):
            peer.turn("gemm", "float32", "NN", "many")(1)
        assert len(peer.turn("gemm", "float32", "NN", 16)(1)) == 1  # it goes on after an error


def test_a_peer_that_is_gone_is_an_error() -> None:
    peer = PeerProcess("numpy", threads=1, gpu=False)
    with peer:
        pass
    with pytest.raises((PeerError, ValueError)):
        peer.turn("gemm", "float32", "NN", 16)(1)


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_peer_that_is_left_says_nothing(
    answers: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by Ctrl-C: before it introduces itself, and with what it has said unread."""

    def left(peer: PeerProcess) -> None:
        started.append(peer)
        if answers:
            peer._pipe.poll(None)
        raise KeyboardInterrupt

    started: list[PeerProcess] = []
    if answers == 2:
        with PeerProcess("numpy", threads=1, gpu=False) as peer:
            peer._pipe.send((pickle.dumps(("gemm", "float32", "NN", 16)), 1))
            peer._pipe.poll(None)
        started.append(peer)
    else:
        monkeypatch.setattr(PeerProcess, "_answer", left)
        with pytest.raises(KeyboardInterrupt):
            PeerProcess("numpy", threads=1, gpu=False)
    assert started[0]._process.returncode == 0
    assert capfd.readouterr().err == ""


def test_a_peer_that_does_not_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerError, match="ended with status"):
        PeerProcess("torch", threads=0, gpu=False)  # torch takes no 0 threads, where it is installed at all


def test_a_peer_that_does_not_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clamp.cli.bench.peers.KINDS", ("numpy", "json", "no_such_package"))
    with installed_peers(threads=1, gpu=False) as (peers, failures):
        assert [peer.works for peer in peers] == [{"gemm": ["float32"]}]
        assert list(failures) == ["json"]


def test_blas_settings_name_avx512_kernels_only_where_the_cpu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clamp.cli.bench.peers.host_cpu_flags", lambda: {"avx2"})
    assert "OPENBLAS_CORETYPE" not in blas_settings(2)
    avx512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2"}
    monkeypatch.setattr("clamp.cli.bench.peers.host_cpu_flags", lambda: avx512)
    settings = blas_settings(2)
    assert settings["OPENBLAS_CORETYPE"] == "SKYLAKEX"
    assert settings["OPENBLAS_NUM_THREADS"] == "2"


# ---------------------------------------------------------------------------------------------- cases


def test_launches_are_counted_and_the_kernel_class_is_restored(queue: cl.CommandQueue) -> None:
    original = cl.Kernel.__call__
    x = random_tensor(queue, (64,), "float32")
    capabilities(queue)  # tries the device's halves with a launch, once in a process
    with counted_launches() as launches:
        cast(x, "float16")
        cast(x, "bfloat16")
    cast(x, "float16")
    assert launches == ["cast", "cast"]
    assert cl.Kernel.__call__ is original


def test_gradient_sizes_are_mixed_and_add_up() -> None:
    sizes = mixed_sizes(1_000_000)
    assert len(sizes) == TENSORS
    assert min(sizes) >= 1
    assert sum(sizes) == pytest.approx(1_000_000, rel=1e-3)
    assert max(sizes) > 20 * np.median(sizes)


def test_a_device_is_chosen_by_platform_then_by_name(queue: cl.CommandQueue) -> None:
    device = queue.device
    assert choose_device(device.platform.name.upper()).platform == device.platform
    assert choose_device(device.name) in list_devices()
    assert choose_device(str(list_devices().index(device))) == device
    assert choose_device("pocl" if "Portable" in device.platform.name else device.platform.name[:5]) == device
    with pytest.raises(UnknownDeviceError, match="'99'"):
        choose_device("99")
    assert not is_simulator(choose_device(None)) or all(map(is_simulator, list_devices()))
    with pytest.raises(UnknownDeviceError, match="abacus"):
        choose_device("abacus")


# ---------------------------------------------------------------------------------------------- doctor


@pytest.fixture
def real_devices(monkeypatch: pytest.MonkeyPatch) -> list[cl.Device]:
    """Keeps doctor from the simulator, which takes its time."""
    devices = [device for device in list_devices() if not is_simulator(device)] or list_devices()
    monkeypatch.setattr("clamp.cli.doctor.list_devices", lambda: devices)
    return devices


@pytest.mark.slow
def test_doctor_reports_every_device(real_devices: list[cl.Device], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for device in real_devices:
        assert describe(device) in out
        assert device.driver_version.strip() in out
    assert out.count("AMP dtypes       float16, bfloat16") == len(real_devices)
    assert out.count("ok: products and casts agree with numpy") == len(real_devices)
    # Intel's runtime frees a context under its queue, the others that these tests run on do not.
    freed = ["Intel" in device.platform.name for device in real_devices]
    lines = [line for line in out.splitlines() if line.startswith("  context ")]
    assert ["NOT kept alive" in line and "INVALID_CONTEXT" in line for line in lines] == freed
    assert ["  kept alive" in line for line in lines] == [not lost for lost in freed]
    assert [line.split() for line in out.splitlines() if line.startswith("  queue ")] == [
        ["queue", "in", "order;", "one", "made", "with", "OUT_OF_ORDER_EXEC_MODE_ENABLE", "is", "refused"]
        if device.queue_properties & cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
        else ["queue", "in", "order"]
        for device in real_devices
    ]
    assert "OCL_ICD_VENDORS" in out
    assert "matrix units" not in out, "no CPU is asked for them"


def test_doctor_looks_at_the_device_asked_for(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", queue.device.platform.name]) == 0
    out = capsys.readouterr().out
    assert describe(queue.device) in out
    assert out.count("self-check") == 1
    assert queue.device.extensions.strip() in out
    assert main(["doctor", "--device", "abacus"]) == 2
    last = out.splitlines()[-1]
    assert re.fullmatch(
        rf"{re.escape(describe(queue.device))}: AMP gains (time and memory|memory, and no time): float16 multiplies "
        r"matrices \d+\.\d\dx and adds \d+\.\d\dx as fast as float32, bfloat16 multiplies matrices \d+\.\d\dx and adds "
        r"\d+\.\d\dx as fast as float32; activations take half the bytes in both\.",
        last,
    ), last


def test_doctors_last_sentence_says_whether_time_is_gained(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.in_words("X: Y", {"float16": (1.42, 0.9), "bfloat16": (1.0, 1.0)}) == (
        "X: Y: AMP gains time and memory: float16 multiplies matrices 1.42x and adds 0.90x as fast as float32, "
        "bfloat16 multiplies matrices 1.00x and adds 1.00x as fast as float32; activations take half the bytes in both."
    )
    assert "memory, and no time" in doctor.in_words("X", {"float16": (1.0, 1.05), "bfloat16": (0.5, 1.0)})
    monkeypatch.setattr(doctor, "gemm", lambda *args, **kwargs: 1 / 0)
    assert doctor.sentence(queue.device, 0.1).endswith(
        "what AMP gains could not be measured: a product in float32 failed: ZeroDivisionError: division by zero"
    )
    monkeypatch.setattr(doctor, "is_simulator", lambda device: True)
    assert doctor.sentence(queue.device, 0.1).endswith(": a simulator, on which nothing is gained.")


def test_doctor_says_what_became_of_matrix_units(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = Plan(32, 16, 32, 3, (2, 1)), Plan(16, 32, 16, 2, (1, 1))
    verdicts = {str(large): "RuntimeError: OUT_OF_RESOURCES", str(small): trials.RIGHT}

    def lines(number: tuple[int, int]) -> list[tuple[str, str]]:
        device = replace(capabilities(queue), compute_capability=number)
        for module in (doctor, verified):
            monkeypatch.setattr(module, "capabilities", lambda queue: device)
        return list(doctor._matrix_units(queue))

    unit = replace(MMA, plans=(large, small), emulate=1)
    monkeypatch.setattr(doctor, "MATRIX_UNITS", (WGMMA, unit))
    monkeypatch.setattr(doctor.convolutions, "MATRIX_UNITS", convolutions.MATRIX_UNITS[1:2])
    monkeypatch.setattr(doctor, "_TIMED", 64)
    tried: list[bool] = []
    monkeypatch.setattr(trials, "verdicts", lambda *_, anew=False: tried.append(anew) or verdicts)
    facts, other, refused, used, *others = lines((8, 6))
    assert facts == ("matrix units", "compute capability 8.6")
    assert other == ("  of others", "wgmma")
    assert refused == ("  mma", "32x16x32, 3 stages, 2 warps: NOT used: RuntimeError: OUT_OF_RESOURCES")
    assert used[1].startswith("16x32x16, 2 stages, 1 warps: right, ")
    assert used[1].endswith(" TFLOP/s")
    assert [line[0] for line in others] == ["  mma conv"] * 2 + ["  mma attention"] * 2
    assert [anew for anew in tried if anew] == [True] * 3, "what failed for want of memory is tried again"
    assert "NOT used without the others" not in str(others[:2])
    plans = doctor.attention.MATRIX_UNITS[0].plans
    assert [line[1] for line in others[2:]] == [f"{plan}: NOT used: could not be tried" for plan in plans]
    assert lines((7, 5))[1:] == [("  of others", "wgmma, mma")]
    assert lines((0, 0)) == []


@pytest.mark.parametrize("wrong", ["gemm", "cast"])
@pytest.mark.long
def test_doctor_fails_when_a_result_is_wrong(
    wrong: str, real_devices: list[cl.Device], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = getattr(doctor, wrong)

    def shifted(*args: object, **kwargs: object) -> object:
        result = right(*args, **kwargs)
        host = right_cast(result, "float32").to_host()
        return right_cast(type(result).from_host(result.queue, host + np.float32(0.5)), result.dtype)

    right_cast = doctor.cast
    monkeypatch.setattr(doctor, wrong, shifted)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.count("FAILED: a ") == len(real_devices)


def test_doctor_survives_a_device_that_cannot_be_used(
    real_devices: list[cl.Device], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clamp.cli.doctor.cl.CommandQueue", Mock(side_effect=cl.RuntimeError("driver is gone")))
    monkeypatch.setattr("clamp.cli.doctor.manager.default", lambda: None)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.count("unusable") == len(real_devices)
    assert out.count("FAILED: RuntimeError: driver is gone") == len(real_devices)


def test_doctor_tells_how_to_get_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    none = Mock(side_effect=NoDeviceError)
    monkeypatch.setattr("clamp.cli.doctor.list_devices", none)
    monkeypatch.setattr("clamp.cli.devices.list_devices", none)
    assert main(["doctor"]) == 1
    assert "pip install intel-opencl-rt" in capsys.readouterr().out
    assert main(["bench"]) == 1
    assert "pip install intel-opencl-rt" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- lists


def test_lists_prints_every_function_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lists"]) == 0
    out = capsys.readouterr().out
    for entry in default_table():
        assert entry.function in out or entry.function == "*"
    assert "half" in out.splitlines()[-1]


def test_lists_says_what_clamp_has_no_kernel_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(OWNED, "netcl.autograd.matmul_op")
    assert main(["lists", "matmul_op"]) == 0
    assert "netcl in float32" in capsys.readouterr().out


def test_lists_names_the_kernels_and_what_happens_on_a_device(
    queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    platform = queue.device.platform.name
    assert main(["lists", "netcl.autograd.matmul_op", "--dtype", "bfloat16", "--device", platform]) == 0
    out = capsys.readouterr().out
    assert "gemm_packed.cl" in out
    assert "clamp.functions.matmul.matmul" in out
    kernel = usual(queue, "bfloat16").NAME
    assert platform in out
    assert f"products of bfloat16: {kernel} kernel" in out
    assert "Node.__matmul__" in out
    assert main(["lists", "netcl.autograd.conv2d", "--dtype", "bfloat16", "--device", platform]) == 0
    words = {"dot_bf16": "bfloat16 dot product", "packed": "register-blocked loop"}.get(kernel, "local memory")
    words = "matrix unit" if capabilities(queue).amx else words
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())  # lines of a table
    assert words in out.partition("convolutions of bfloat16: ")[2]
    assert ("Winograd" in out) == (capabilities(queue).is_cpu and not capabilities(queue).amx)
    assert main(["lists", "netcl.autograd.softmax", "--device", platform]) == 0
    assert "softmax.cl" in (out := capsys.readouterr().out)
    assert "gemm" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 0, "modules layers.*: bfloat16\nmodules head: float32\nnetcl's functions, level O1"),
        (["layers.2.norm"], 0, "module layers.2.norm: bfloat16, by the rule 'layers.*'; float16 elsewhere\n"),
        (["head.fc", "--dtype", "bfloat16"], 0, "module head.fc: float32, by the rule 'head'; bfloat16 elsewhere\n"),
        (["softmax"], 0, "netcl.autograd.softmax  level O1"),
        (["haed"], 2, "no list names a function 'haed'"),
        (["--level", "O0"], 2, 'level "O0" computes everything in float32'),
    ],
)
def test_lists_says_which_rule_decides_about_a_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '''[modules]\n"layers.*" = "bfloat16"\n"head" = "float32"\n[half]\n"netcl.autograd.softmax" = "Why."'''
    )
    assert main(["lists", *arguments, "--lists", str(path)]) == code
    said = capsys.readouterr()
    assert (said.err if code else said.out).startswith(says)


@pytest.mark.parametrize(
    ("arguments", "there", "absent"),
    [
        (["Linear"], ("matmul_op", "bias_add"), "conv2d"),
        (["Conv2d"], ("netcl.autograd.conv2d",), "matmul_op"),
        (["BatchNorm"], ("netcl.autograd.batch_norm2d",), "layer_norm"),
        (["DecoderBlock"], ("rms_norm", "flash_attention", "swish", "rope"), "softmax  "),
        (["SiLU"], ("netcl.autograd.swish",), "relu"),
        (["MSELoss"], ("netcl.autograd.mse_loss",), "l1_loss"),
        (["pool2"], ("max_pool2d_backward", "avg_pool2d"), "conv2d"),
        (["--policy", "half"], ("matmul_op", "prelu"), "layer_norm"),
        (["--policy", "half", "--level", "O2"], ("matmul_op", "relu"), "layer_norm"),
        (["conv", "--policy", "half"], ("conv2d_relu", "depthwise_conv2d"), "im2col"),
        (["silu"], ("netcl.autograd.swish",), "relu"),
        # by its own name or its full one, with whose kernel runs
        (["matmul_op", "--dtype", "bfloat16"], ("clamp in bfloat16",), "exp"),
        (["netcl.autograd.matmul_op", "--dtype", "bfloat16"], ("clamp in bfloat16",), "exp"),
        (["netcl.autograd.matmul_op", "--level", "O0"], ("clamp in float32",), "exp"),
        (["netcl.autograd.add", "--level", "O1"], ("clamp in the widest input's dtype",), "exp"),
        (["netcl.autograd.add", "--level", "O2"], ("clamp in float16",), "exp"),
        (["netcl.autograd.add", "--level", "OD"], ("clamp in float32",), "exp"),
        (["netcl.autograd.exp", "--level", "O1"], ("clamp in float32",), "matmul"),
        (["netcl.autograd.relu", "--level", "O1"], ("clamp in its input's dtype",), "exp"),
        (["binary_cross_entropy", "--level", "O1"], ("raises",), "matmul"),
        (["causal_mask", "--level", "O1"], ("netcl, as it is",), "matmul"),
    ],
)
def test_lists_searches_by_name_layer_part_and_policy(
    arguments: list[str], there: tuple[str, ...], absent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lists", *arguments]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in there)
    assert absent not in out


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("name", [None, "pool2", "netcl.autograd.conv2d"])
def test_lists_fits_a_terminal(
    name: str | None, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["lists"] if name is None else ["lists", name]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out


def test_a_closed_standard_output_is_nothing_to_print_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``>&-`` makes it."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["lists", "softmax"]) == 0


def test_lists_needs_no_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("clamp.cli.devices.list_devices", Mock(side_effect=NoDeviceError))
    assert main(["lists", "softmax"]) == 0
    out = capsys.readouterr().out
    assert "no OpenCL device" in out
    assert "softmax.cl" in out


def test_every_function_that_clamp_implements_names_its_kernels() -> None:
    for name, function in OWNED.items():
        found = reached(function)
        assert found.files or {entry.policy for entry in default_table().find(name)} == {CastPolicy.VIEW}, name
        assert all(files("clamp.kernels").joinpath(file).is_file() for file in found.files)


def test_every_kernel_file_is_named_for_a_function() -> None:
    """But for those of loss scaling, optimizers, devices and what is observed, which no function casts for."""
    named = set().union(*(reached(function).files for function in OWNED.values()))
    there = {path.name for path in files("clamp.kernels").iterdir() if path.name.endswith(".cl")}
    observed = {"notes.cl", "numerics.cl", "squares.cl", "statistics.cl"}
    others = {"layer_scale.cl", "loss_scale.cl", "multi_tensor.cl", "optimizer_step.cl", "probe.cl", "transfer.cl"}
    assert there - named == observed | others


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("clamp ")
