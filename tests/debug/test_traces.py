"""Two runs of a step, in files: the first op whose values part."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag

from clamp import amp
from clamp.debug.traces import Trace, TracedValue
from clamp.debugging import Difference, first_difference, save_trace
from clamp.functions import arithmetic as bound_elementwise
from tests.debug.test_accuracy import broken, step_of, tanhs
from tests.reference import to_device


def dropping_step(queue: cl.CommandQueue) -> Callable[[], Any]:
    model = tanhs(queue)
    return step_of(queue, lambda x: ag.dropout(model(x), 0.2))


@pytest.fixture(params=[".json", ".npz"])
def suffix(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    ("op", "columns", "expected"),
    [("tanh", 24, ("forward", "tanh", "layers.1", "result")),
     ("tanh", 20, ("forward", "tanh", "layers.3", "result")),
     ("tanh_grad", 20, ("backward", "tanh", "layers.3", "gradient of input 0"))],
)  # fmt: skip
def test_names_the_first_op_that_parts(
    queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, op: str, columns: int,
    expected: tuple[str, ...],
) -> None:  # fmt: skip
    step = dropping_step(queue)
    before, after = tmp_path / f"before{suffix}", tmp_path / f"after{suffix}"
    with amp.init():
        count = save_trace(before, step)
        assert save_trace(after, step) == count > 15
        assert first_difference(before, after) is None
        monkeypatch.setattr(bound_elementwise, "elementwise", broken(op, columns))
        save_trace(after, step)
    found = first_difference(before, after)
    assert isinstance(found, Difference)
    assert (found.second.direction, found.second.function, found.second.module, found.second.value) == expected
    assert 0 < found.before < count
    if suffix == ".npz":
        assert found.error == pytest.approx(0.02, rel=0.1)
        assert "relative error 0.0" in str(found)
        assert first_difference(before, after, rtol=0.5) is None
        assert first_difference(before, after, rtol=0.01) is not None
    else:
        assert np.isnan(found.error)
        with pytest.raises(ValueError, match="npz"):
            first_difference(before, after, rtol=0.5)


def test_lines_that_moved_and_ops_that_came(queue: cl.CommandQueue, tmp_path: Path) -> None:
    x, w = (to_device(queue, np.random.default_rng(2).standard_normal((4, 4))) for _ in range(2))
    w.requires_grad = True

    def one() -> None:
        ag.sum(ag.tanh(ag.matmul_op(ag.tensor(x), ag.tensor(w)))).backward()

    def same() -> None:
        hidden = ag.matmul_op(ag.tensor(x), ag.tensor(w))
        hidden = ag.tanh(hidden)
        ag.sum(hidden).backward()

    def more() -> None:
        hidden = ag.exp(ag.matmul_op(ag.tensor(x), ag.tensor(w)))
        ag.sum(ag.tanh(hidden)).backward()

    with amp.autocast():
        for name, step in (("one", one), ("same", same), ("more", more)):
            save_trace(tmp_path / f"{name}.json", step)
    assert first_difference(tmp_path / "one.json", tmp_path / "same.json") is None
    found = first_difference(tmp_path / "one.json", tmp_path / "more.json")
    assert found.first is None
    assert found.second.function == "exp"
    assert found.before == 1
    assert "only the second trace has: forward of exp" in str(found)
    found = first_difference(tmp_path / "more.json", tmp_path / "one.json")
    assert found.second is None
    assert "only the first trace has" in str(found)


def test_an_op_that_came_is_found_among_hundreds_alike() -> None:
    alike = [TracedValue("relu", "forward", "", "", "", "float32", (1,), "bits", 0, 0, 0.0, 0.0)] * 300
    more = replace(alike[0], function="mul")
    found = Trace(alike).first_difference(Trace([more, *alike]))
    assert found is not None
    assert (found.first, found.second, found.before) == (None, more, 0)


def test_float32_against_amp_by_tolerance(queue: cl.CommandQueue, tmp_path: Path) -> None:
    step = dropping_step(queue)
    with amp.autocast(dtype="float32"):
        save_trace(tmp_path / "float32.npz", step)
    with amp.autocast(dtype="float16"):
        save_trace(tmp_path / "float16.npz", step)
    assert first_difference(tmp_path / "float32.npz", tmp_path / "float16.npz", rtol=0.05) is None
    found = first_difference(tmp_path / "float32.npz", tmp_path / "float16.npz")
    assert found.before == 0
    assert "float16" in str(found.second)


def test_inf_nan_and_zeros_are_told(queue: cl.CommandQueue, tmp_path: Path) -> None:
    def step_with(*numbers: float) -> Callable[[], Any]:
        x = ag.tensor(to_device(queue, np.array(numbers, np.float32)))
        return lambda: ag.add(x, x)

    with amp.autocast():
        save_trace(tmp_path / "good.json", step_with(0, 1, -2, 4))
        save_trace(tmp_path / "bad.json", step_with(0, np.inf, np.nan, 4))
        save_trace(tmp_path / "zero.json", step_with(0, 0))
    found = first_difference(tmp_path / "good.json", tmp_path / "bad.json")
    assert (found.second.infs, found.second.nans, found.second.smallest, found.second.largest) == (1, 1, 8, 8)
    assert "8 to 8, 1 inf, 1 nan" in str(found)
    zero = first_difference(tmp_path / "good.json", tmp_path / "zero.json")
    assert (zero.second.smallest, zero.second.largest) == (0, 0)


def test_files_that_are_no_traces(queue: cl.CommandQueue, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.json .* or \.npz"):
        save_trace(tmp_path / "trace.txt", lambda: None)
    with pytest.raises(ValueError, match="no op"):
        save_trace(tmp_path / "trace.json", lambda: None)
    wrong = {"text.json": "no JSON", "list.json": "[]", "format.json": json.dumps({"format": 9, "values": []}),
             "values.json": json.dumps({"format": 1, "values": [{"function": "tanh"}]})}  # fmt: skip
    for name, text in wrong.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="no trace that"):
            first_difference(tmp_path / name, tmp_path / name)
    np.savez(tmp_path / "other.npz", x=np.zeros(2))
    with pytest.raises(ValueError, match="no trace that"):
        first_difference(tmp_path / "other.npz", tmp_path / "other.npz")


@pytest.mark.parametrize("calls", [1, 3])
def test_a_recorded_step_is_looked_at_as_it_is(queue: cl.CommandQueue, tmp_path: Path, calls: int) -> None:
    model, x = tanhs(queue), to_device(queue, np.ones((16, 12)))
    step = amp.record(lambda: ag.sum(model.layers[1](model.layers[0](ag.tensor(x)))).backward())
    with amp.init():
        for _ in range(calls):
            step()
        assert save_trace(tmp_path / "trace.json", step) == save_trace(tmp_path / "plain.json", step.__wrapped__) > 3
