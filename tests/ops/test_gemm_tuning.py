"""Plans that were measured on a device are used there, and change no result. No device of the tests has matrix units:
what the device can do is pretended, and the unit runs in plain C, as in test_verified.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.cli import main, tune
from clamp.cli.devices import slug
from clamp.cli.tune import LAYOUTS
from clamp.opencl import cache, trials
from clamp.opencl.device import capabilities
from clamp.ops.gemm import gemm, tuning
from clamp.ops.gemm.engines import MATRIX_UNITS
from clamp.ops.gemm.matrix_units import MMA, MatrixUnit, cases
from clamp.ops.gemm.plan import Plan
from clamp.ops.gemm.tuning import Tuning, size_class, winner_of
from tests.launches import forget_prepared_launches
from tests.ops.test_verified import pass_for_a_gpu, tried_here
from tests.reference import HALF_DTYPES, to_device, to_numpy

_LARGE, _SMALL, _OTHER = Plan(32, 16, 32, 3, (2, 1)), Plan(16, 32, 16, 2, (1, 1)), Plan(16, 16, 16, 2, (1, 1))
pytestmark = pytest.mark.once

_REFUSED = Plan(32, 32, 16, 2, (1, 1))
_SHAPE = (5, 6, 70)  # of the class 4x8x64


@dataclass(frozen=True)
class _Pretended(MatrixUnit):
    """A unit that notes the plans by which it computes, and refuses one."""

    ran: Any = None

    def bind_by(self, a: Any, b: Any, c: Any, epilogue: Any, plan: Plan, *others: Any) -> Callable[..., None]:
        if plan == _REFUSED:
            raise cl.RuntimeError("clEnqueueNDRangeKernel failed: OUT_OF_RESOURCES")
        compute = super().bind_by(a, b, c, epilogue, plan, *others)
        return lambda *tensors: (self.ran.append(plan), compute(*tensors))[1]


@pytest.fixture
def unit(queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Pretended:
    """Lets the queue's device pass for a GPU with a matrix unit, which is verified and not tuned."""
    unit = _Pretended(**vars(replace(MMA, plans=(_LARGE, _SMALL), more=(_REFUSED, _OTHER), emulate=1)), ran=[])
    pass_for_a_gpu(queue, monkeypatch, unit)
    monkeypatch.setattr(trials, "_tried", lambda device, where, names: dict(_tried(device, where, tuple(names))))
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setenv("CLAMP_CACHE_DIR", str(tmp_path / "cache"))
    assert list(unit.measurable_plans(queue)) == [_LARGE, _SMALL, _OTHER]
    return unit


#: verdicts from this process, in which the tests of this file find the same
_tried = lru_cache(tried_here)


def product(queue: cl.CommandQueue, layout: str = "NN", batch: int = 0, dtype: str = "float16") -> np.ndarray:
    """A product of integers, which every order of adding up makes the same."""
    m, n, k = _SHAPE
    rng, flips, more = np.random.default_rng(0), [side == "T" for side in layout], (batch,) if batch else ()
    a, b = rng.integers(-2, 3, (*more, m, k)), rng.integers(-2, 3, (*more, k, n))
    left, right = (np.swapaxes(x, -1, -2) if flip else x for x, flip in zip((a, b), flips, strict=True))
    out = gemm(
        to_device(queue, left, dtype), to_device(queue, right, dtype), transpose_a=flips[0], transpose_b=flips[1],
        out_dtype="float32",
    )  # fmt: skip
    found = to_numpy(out)
    np.testing.assert_array_equal(found, a @ b)
    return found


def ran(unit: _Pretended, call: Callable[[], object]) -> list[Plan]:
    """The plans by which a call computes."""
    unit.ran.clear()
    call()
    return list(unit.ran)


def keep(queue: cl.CommandQueue, unit: MatrixUnit, winners: dict[str, Plan]) -> bool:
    names = {products: str(plan) for products, plan in winners.items()}
    return tuning.keep(queue.device, unit.where, unit.trial_key, Tuning(names))


@pytest.mark.slow
def test_a_product_runs_by_the_plan_that_was_the_fastest_for_its_class(
    queue: cl.CommandQueue, unit: _Pretended
) -> None:
    untuned = {layout: ran(unit, lambda layout=layout: product(queue, layout)) for layout in ("NN", "NT")}
    assert untuned == {"NN": [_SMALL], "NT": [_SMALL]}
    assert keep(queue, unit, {size_class("NT", *_SHAPE): _OTHER, "NN 8x8x64": _LARGE})
    for dtype in HALF_DTYPES:
        assert ran(unit, lambda dtype=dtype: product(queue, "NT", dtype=dtype)) == [_OTHER]
        assert ran(unit, lambda dtype=dtype: product(queue, "NN", dtype=dtype)) == [_SMALL], "another class"
    assert ran(unit, lambda: product(queue, "NT", batch=3)) == [_SMALL], "several matrices are not measured"


def test_another_process_knows_what_was_measured(
    queue: cl.CommandQueue, unit: _Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keep(queue, unit, {size_class("NN", *_SHAPE): _LARGE})
    assert keep(queue, unit, {size_class("NT", *_SHAPE): _OTHER})
    monkeypatch.setattr(tuning, "_known", {})
    assert ran(unit, lambda: product(queue, "NN")) == [_LARGE]
    assert ran(unit, lambda: product(queue, "NT")) == [_OTHER], "what is measured later is kept beside it"
    monkeypatch.setattr(tuning, "_known", {})
    forget_prepared_launches(monkeypatch)
    monkeypatch.setattr(_Pretended, "trial_key", lambda self: ["another version of the kernel"])
    assert ran(unit, lambda: product(queue, "NN"))[-1] == _SMALL


@pytest.mark.parametrize(
    "content",
    [b"", b"?", b"[]", b"null", b'{"winners": 1}', b'{"winners": {"a": 1}}', b'{"seconds": {"a": {"b": "c"}}}'],
)
def test_other_content_with_a_right_check_sum_is_as_if_nothing_was_measured(
    queue: cl.CommandQueue, unit: _Pretended, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    assert keep(queue, unit, {size_class("NN", *_SHAPE): _LARGE})
    file = tuning._file(queue.device, unit.where, unit.trial_key)
    assert file is not None
    cache.write(file, content)
    monkeypatch.setattr(tuning, "_known", {})
    assert tuning.tuned(queue.device, unit.where, unit.trial_key) == Tuning()
    assert keep(queue, unit, {size_class("NN", *_SHAPE): _LARGE})


@pytest.mark.parametrize("name", [_REFUSED, "no plan"])
def test_a_plan_that_is_not_proved_is_not_used(queue: cl.CommandQueue, unit: _Pretended, name: object) -> None:
    tuning.keep(queue.device, unit.where, unit.trial_key, Tuning({size_class("NN", *_SHAPE): str(name)}))
    assert ran(unit, lambda: product(queue)) == [_SMALL]


@pytest.mark.slow
def test_tune_measures_every_plan_and_keeps_the_winners(
    queue: cl.CommandQueue, unit: _Pretended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "times.json"
    options = ["--device", queue.device.platform.name, "--shapes", "32x16x64,5x6x70", "--json", str(file)]
    assert main(["tune", *options]) == 0
    out = capsys.readouterr().out
    assert f"{_REFUSED} is left out: RuntimeError" in out
    assert "not kept" not in out
    found = json.loads(file.read_text())
    assert found["unit"] == "mma"
    classes = {size_class(layout, *shape) for layout in LAYOUTS for shape in ((32, 16, 64), _SHAPE)}
    plans = {str(plan) for plan in (_LARGE, _SMALL, _OTHER)}
    assert found["seconds"].keys() == found["winners"].keys() == classes
    assert all(times.keys() == plans for times in found["seconds"].values())
    assert set(found["winners"].values()) <= plans
    kept = tuning.tuned(queue.device, unit.where, unit.trial_key)
    assert kept == Tuning(found["winners"], found["seconds"])
    assert [str(plan) for plan in ran(unit, lambda: product(queue))] == [kept.winners[size_class("NN", *_SHAPE)]]


def test_tune_keeps_what_it_has_when_it_is_interrupted(
    queue: cl.CommandQueue, unit: _Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(queue: object, unit: object, shapes: object, found: Tuning, show: object) -> None:
        found.seconds["NN 4x8x64"] = {str(_OTHER): 1.0}
        found.winners["NN 4x8x64"] = str(_OTHER)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "measure", interrupted)
    assert main(["tune", "--device", queue.device.platform.name]) == 130
    assert "interrupted" in capsys.readouterr().out
    assert ran(unit, lambda: product(queue)) == [_OTHER]


def test_tune_says_when_nothing_can_be_kept(
    queue: cl.CommandQueue, unit: _Pretended, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLAMP_CACHE_DIR", "off")
    assert main(["tune", "--device", queue.device.platform.name, "--shapes", "16x16x16"]) == 0
    assert "not kept" in capsys.readouterr().out


def test_tune_says_before_it_measures_where_it_cannot_write(
    queue: cl.CommandQueue, unit: _Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(tune, "measure", lambda *args: None)
    (tmp_path / "file").touch()
    options = ["tune", "--device", queue.device.platform.name, "--json"]
    assert main([*options, str(tmp_path / "file" / "times.json")]) == 1
    said = capsys.readouterr()
    assert f"cannot write {tmp_path / 'file' / 'times.json'}" in said.err
    assert "products" not in said.out
    assert main([*options, str(tmp_path)]) == 0
    assert (tmp_path / f"tune-{slug(queue.device)}.json").is_file(), "of a folder, as bench does"


def test_tune_has_nothing_to_do_on_other_devices(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    if any(unit.may_work(capabilities(queue)) for unit in MATRIX_UNITS):
        pytest.skip("a device with matrix units")
    assert main(["tune", "--device", queue.device.platform.name]) == 0
    assert "there is nothing to tune" in capsys.readouterr().out


def test_the_usual_plan_stays_where_another_is_faster_by_chance() -> None:
    assert winner_of({"usual": 1.0, "other": 0.99}, "usual") == "usual"
    assert winner_of({"usual": 1.0, "other": 0.9, "third": 0.95}, "usual") == "other"
    assert winner_of({"other": 1.0, "third": 0.99}, "usual") == "third"


def test_classes_are_powers_of_two() -> None:
    assert size_class("NT", 2048, 8192, 8000) == "NT 2048x8192x8192"
    assert size_class("TT", 1, 3, 0) == "TT 1x4x1"


@pytest.mark.parametrize("unit", MATRIX_UNITS, ids=lambda unit: unit.NAME)
def test_candidates_are_other_plans_that_a_device_can_be_asked_for(unit: MatrixUnit) -> None:
    assert resolve_name(unit.candidates.where) == unit.candidates
    plans = [*unit.plans, *unit.candidates.plans]
    assert len({str(plan) for plan in plans}) == len(plans), "verdicts and winners go by names"
    for plan in plans:
        assert plan.threads <= 1024
        assert plan.local_memory_bytes <= 227 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "plan"),
    [pytest.param(unit, plan, id=f"{unit.NAME}-{plan}") for unit in MATRIX_UNITS for plan in unit.more],
)
def test_candidates_compute_right_in_plain_c(
    queue: cl.CommandQueue, unit: MatrixUnit, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plan.threads > capabilities(queue).max_work_group or plan.local_memory_bytes > queue.device.local_mem_size:
        pytest.skip("too large for this device")
    monkeypatch.setattr("clamp.ops.gemm.matrix_units.cases", lambda *of: [next(cases(*of))])
    assert replace(unit.candidates, emulate=1).computes_right(plan, queue)
