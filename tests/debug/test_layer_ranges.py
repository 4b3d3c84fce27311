"""The magnitudes of a step by layers: of which tensors, at which scale, what real casts lose of them; the picture."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Parameter
from clamp.casting.results import RESULTS
from clamp.cli.bench.networks import CNN, LM, MLP, Network, Trainer
from clamp.debug.callsite import NOWHERE
from clamp.debug.layer_ranges import LayerRange, LayerRanges
from clamp.debug.step_graph import StepGraph
from clamp.debug.summary import Summary
from clamp.debug.traces import trace_step
from clamp.report import read_run
from tests.debug.faults import optimize
from tests.debug.test_op_counter import only
from tests.networks import Training, batch, loss_of, mlp, scaled_backward
from tests.ops.test_statistics import expected
from tests.reference import to_device

WIDTHS = (16, 32, 32, 4)
SCALE = 64.0


@pytest.fixture(autouse=True)
def off() -> Any:
    yield
    amp.shutdown()
    assert not RESULTS.observers


def run(queue: cl.CommandQueue, **options: Any) -> tuple[Any, Any, Any]:
    """A network, a handle, and a step of it."""
    training = Training(queue, WIDTHS, **{"loss_scale": SCALE} | options)
    return training.model, training.handle, training.step


def test_each_tensor_has_its_row(queue: cl.CommandQueue) -> None:
    model, handle, once = run(queue)
    ranges = handle.ranges(once)
    assert (ranges.scale, ranges.dtype) == (SCALE, "float16")
    for index, (rows, columns) in ((0, (16, 32)), (2, (32, 32)), (4, (32, 4))):
        name = f"layers.{index}.weight"
        weight = only(ranges.rows, kind="parameter", name=name)
        assert (weight.module, weight.dtype, weight.scale) == (f"layers.{index}", "float16", 1.0)
        assert weight.statistics.count == rows * columns
        assert weight.statistics.largest == np.abs(model.layers[index].weight.to_host()).max()
        gradient = only(ranges.rows, kind="parameter gradient", name=name)
        assert (gradient.module, gradient.dtype, gradient.scale) == (f"layers.{index}", "float32", 1.0)
    hidden = only(ranges.rows, kind="activation", module="layers.2", name="linear_relu")
    assert (hidden.dtype, hidden.scale, hidden.statistics.count) == ("float16", 1.0, 8 * 32)
    behind = only(ranges.rows, kind="gradient", module="layers.2", name="linear_relu")
    assert (behind.dtype, behind.scale, behind.statistics.count) == ("float16", SCALE, 8 * 32)
    assert {row.name for row in ranges.rows} >= {"mse_loss", "matmul_op"}
    assert "scale_loss" not in {row.name for row in ranges.rows}


LOOKS: dict[str, Any] = {
    "ranges": lambda handle, step: handle.ranges(step),
    "explain": lambda handle, step: handle.explain(step),
    "traces": lambda _, step: trace_step(step).values,
}


@pytest.mark.parametrize("look", LOOKS)
def test_passes_of_a_recorded_function_are_looked_at_one_by_one(queue: cl.CommandQueue, look: str) -> None:
    model = mlp(queue, *WIDTHS)
    optimizer = SGD(model.parameters(), lr=1e-30)
    batches = [batch(queue, 8, WIDTHS[0], WIDTHS[-1], seed=i) for i in range(8)]
    handle = amp.init(loss_scale=SCALE)

    def one_pass(x: Tensor, y: Tensor) -> None:
        scaled_backward(handle, ag.mse_loss(model(ag.tensor(x)), ag.tensor(y)), optimizer)

    def accumulated(one_pass: Any) -> None:
        optimizer.zero_grad()
        for x, y in batches:
            one_pass(x, y)
        optimizer.step()

    recorded = amp.record(one_pass)
    expected_rows = str(LOOKS[look](handle, lambda: accumulated(one_pass)))
    for _ in range(2):
        recordings = recorded.recordings
        assert str(LOOKS[look](handle, lambda: accumulated(recorded))) == expected_rows
        assert recorded.recordings == recordings
        accumulated(recorded)
    assert recorded.recordings


def test_gradients_are_those_of_float32_at_the_scale(queue: cl.CommandQueue) -> None:
    model, handle, once = run(queue)
    ranges = handle.ranges(once)
    handle.shutdown()
    with amp.init(dtype="float32"):
        loss_of(model, batch(queue, 8, WIDTHS[0], WIDTHS[-1])).backward()
    for index in (0, 2, 4):
        found = only(ranges.rows, kind="parameter gradient", name=f"layers.{index}.weight").statistics
        wanted = np.abs(model.layers[index].weight.grad.to_host())
        assert found.largest == pytest.approx(wanted.max(), rel=1e-5)
        assert found.smallest == pytest.approx(wanted[wanted > 0].min(), rel=1e-3)
        assert found.zeros == (wanted == 0).sum()


def observed(queue: cl.CommandQueue, gradient: np.ndarray, scale: float) -> LayerRanges:
    """Ranges of a step in which an activation has this gradient, times the scale."""
    weight = Parameter.from_host(queue, np.eye(len(gradient), dtype=np.float32))
    x, factor = to_device(queue, np.ones_like(gradient)), to_device(queue, gradient)
    optimizer, handle = SGD([weight], lr=0.1), amp.init(loss_scale=scale)

    def once() -> None:
        loss = ag.sum(ag.mul(ag.matmul_op(ag.tensor(weight), ag.tensor(x)), ag.tensor(factor)))
        optimize(handle, optimizer, loss)

    with handle:
        return handle.ranges(once)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_what_is_lost_is_what_a_real_cast_loses(queue: cl.CommandQueue, scale: float) -> None:
    rng = np.random.default_rng(0)
    gradient = np.exp2(rng.uniform(-30, 5, (32, 32))).astype(np.float32)
    row = only(observed(queue, gradient, scale).rows, kind="gradient", name="mul")
    assert (row.scale, row.statistics.count) == (scale, gradient.size)
    for other in (2.0**-10, 1.0, 2.0**10, 2.0**14):
        with np.errstate(over="ignore"):
            cast = (gradient * np.float32(other)).astype(np.float16).astype(np.float64)
        lost = row.lost_in("float16", other)
        assert lost.underflow == (cast == 0).mean()
        assert lost.overflow == np.isinf(cast).mean()
        assert row.lost_in("bfloat16", other) == (0.0, 0.0, 0.0)
    with np.errstate(over="ignore"):
        assert row.lost.underflow == ((gradient * np.float32(scale)).astype(np.float16) == 0).mean()


def test_the_suggested_scale_fits_and_hardly_a_larger_one(queue: cl.CommandQueue) -> None:
    gradient = np.linspace(0.5, 3.0, 16, dtype=np.float32).reshape(4, 4)
    for scale in (1.0, 2.0**21):  # the second overflows in float16, and not where this is observed
        ranges = observed(queue, gradient, scale)
        assert ranges.suggested_scale == 2.0**13
        table = ranges.table()
        assert table[ranges.suggested_scale].overflow == 0
        assert table[4 * ranges.suggested_scale].overflow > 0


def test_a_step_that_is_more_than_may_be_held_has_the_same_ranges(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> list[tuple[Any, ...]]:
        found = handle.ranges(once)
        return [
            (row.name, row.module, row.kind, row.dtype, row.statistics.largest / row.scale) for row in found.rows
        ] + [found.suggested_scale]

    _, handle, once = run(queue)
    whole = rows()
    monkeypatch.setattr("clamp.debug.step_recorder._SHARE", 0.0)
    assert rows() == whole


def test_a_tensor_with_the_id_of_one_that_was_released_is_another(queue: cl.CommandQueue) -> None:
    graph = StepGraph()
    for number in range(200):  # of which some have the same
        graph.forward("op", NOWHERE, [], to_device(queue, [number]))
        graph.release()
    assert len(graph.values) == 200


@pytest.mark.slow
def test_ranges_are_printed_and_reported(
    queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clamp.debug.gain._SECONDS", 0.0)
    _, handle, once = run(queue)
    ranges = handle.ranges(once)
    text = str(ranges)
    assert "layers.2  linear_relu" in text
    assert text.endswith(f"loss scale: {SCALE:g}")  # nothing is to be gained by another
    handle.report(tmp_path / "run.json", once)
    content = read_run(tmp_path / "run.json")
    assert content["suggested_scale"] is None
    assert [(one["name"], one["kind"]) for one in content["ranges"]] == [(row.name, row.kind) for row in ranges.rows]
    assert "The loss scale is" not in str(handle.summary(once))


#: dtype and magnitudes of gradients at a loss scale; the one that is suggested; what it gains; what is told else
SCALES: dict[str, tuple[str, list[float], float, float, str, str]] = {
    "nothing is lost": ("float16", [1e-3, 1.0, 10.0], 1024.0, 2.0**21, "", ""),
    "a lower one, that only has more headroom": ("float16", [1e-8, 1.0, 3e4], 65536.0, 2.0**16, "", ""),
    "half of them become 0": (
        "float16", [1e-9, 1e-8, 1e-4, 1e-2], 1.0, 2.0**21, "0 % in place of 50 % of the gradients become 0", ""),
    "one is inf": (
        "float16", [1.0, 1.0, 1.0, 1e5], 4096.0, 1024.0, "0 % in place of 25 % of the gradients become inf", ""),
    "of float16 there is but one": ("float16", [1.0], 1.0, 2.0**14, "", ""),
    "float32": ("float32", [1.0], 1.0, 2.0**14, "", "; suggested for float16: 16384"),
    "bfloat16": ("bfloat16", [1.0], 1.0, 1.0, "", "; bfloat16 needs none, it loses nothing of the gradients"),
    "bfloat16 becomes 0": (
        "bfloat16", [2.0**-140], 1.0, 2.0**24, "0 % in place of 100 % of the gradients become 0", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALES)
def test_another_scale_is_told_of_only_where_it_gains(case: str) -> None:
    dtype, numbers, scale, suggested, gain, told = SCALES[case]
    row = LayerRange("mul", "", "gradient", dtype, scale, expected(np.array(numbers, np.float32)))
    ranges = LayerRanges([row], scale, dtype)
    assert ranges.suggested_scale == suggested
    assert ranges.gain == ((suggested, gain) if gain else None)
    told = f"; better for {dtype}: {suggested:.8g}, at which {gain}" if gain else told
    assert str(ranges).endswith(f"loss scale: {scale:.8g}{told}")
    summary = str(Summary(dtype, 1, 0, [], scale, 0, 0.0, ranges=ranges))
    assert (f"at {suggested:.8g}, {gain}." in summary) if gain else ("The loss scale is" not in summary)


def test_what_shows_the_memory_of_another_takes_no_row(queue: cl.CommandQueue) -> None:
    x = Parameter.from_host(queue, np.ones((4, 6), np.float32))
    handle = amp.init(loss_scale=SCALE)

    def once() -> None:
        scaled_backward(handle, ag.sum(ag.reshape(ag.mul(ag.tensor(x), 2.0), (6, 4))), SGD([x], lr=0.01))

    rows = handle.ranges(once).rows
    assert {row.name for row in rows if row.kind in ("activation", "gradient")} == {"mul", "sum"}


def test_inputs_that_want_no_gradient_take_no_row_of_a_parameter(queue: cl.CommandQueue) -> None:
    square = Parameter.from_host(queue, np.full((8, 8), 0.5, np.float32))
    x = Tensor.from_host(queue, np.ones((8, 8), np.float32))
    optimizer, handle = SGD([square], lr=0.1), amp.init(loss_scale=SCALE)

    def once() -> None:
        optimize(handle, optimizer, ag.sum(ag.matmul_op(ag.tensor(x), ag.tensor(square))))

    rows = [row for row in handle.ranges(once).rows if row.kind == "parameter gradient"]
    assert [(row.statistics.largest, row.scale) for row in rows] == [(8.0, 1.0)]


# ---------------------------------------------------------------------------------------------- the picture


def rows(name: str, activations: Any, gradients: Any, scale: float = 1.0) -> list[LayerRange]:
    kinds = (("activation", 1.0, activations), ("gradient", scale, gradients))
    return [
        LayerRange("op", name, kind, "float16", factor, expected(np.asarray(x, np.float32)))
        for kind, factor, x in kinds
        if x is not None
    ]


def drawn(found: list[LayerRange], monkeypatch: pytest.MonkeyPatch, scale: float = 1.0) -> list[Any]:
    """The two halves of the picture: of activations, and of gradients."""
    figure = Figure()
    monkeypatch.setattr("clamp.debug.page.ranges.empty_figure", lambda *_: nullcontext(figure))
    monkeypatch.setattr("clamp.debug.page.ranges.save", lambda *_: None)
    LayerRanges(found, scale, "float16").draw("of nobody.svg")
    return list(figure.axes)


def outlines(axes: Any) -> list[tuple[float, float, float]]:
    """Of each histogram, the row's lower end, and the exponents at which its highest bar begins and ends."""
    found = []
    for patch in axes.patches:
        if isinstance(patch, StepPatch):
            values, edges, baseline = patch.get_data()
            highest = int(np.argmin(values))
            found.append((float(baseline), float(edges[highest]), float(edges[highest + 1])))
    return found


def words(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_bars_stand_at_their_exponents_and_the_ghost_at_the_suggested_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        *rows("first", [1.5, 1.5, 0.1], [2.0**-5, 1.2 * 2.0**-5, 0.0], 2.0**10),
        *rows("second", [100.0], [2.0**-20] * 3, 2.0**10),
    ]
    activations, gradients = drawn(found, monkeypatch, 2.0**10)
    assert outlines(activations) == [(0, 0, 1), (1, 6, 7)]
    # All of it would fit at larger scales, but none is above 2^24: 14 octaves on.
    assert outlines(gradients) == [(0, -5, -4), (0, 9, 10), (1, -20, -19), (1, -6, -5)]
    assert "times the loss scale" in gradients.get_title(loc="left")
    assert [label.get_text() for label in activations.get_yticklabels()] == ["first", "second"]


def test_float16_is_shaded_and_zeros_and_infs_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    axes, of_gradients = drawn(rows("one", [0.0, 0.0, 1.0, np.inf, 70000.0], [2.0**-30, 1.0]), monkeypatch)
    assert {"float16's normal numbers", "subnormal"} <= set(words(axes))
    spans = {(patch.get_x(), patch.get_width()) for patch in axes.patches if not isinstance(patch, StepPatch)}
    assert {(-14, 30), (-24, 10)} <= spans
    assert "20 %" in words(axes)  # 70000
    assert "50 %" in words(of_gradients)
    low, high = (next(text for text in one.texts if "%" in text.get_text()) for one in (of_gradients, axes))
    assert low.get_position()[0] < -25
    assert high.get_position()[0] > 17


def test_what_is_missing_or_empty_leaves_its_row_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [*rows("empty", [], []), *rows("zeros", [0.0], [0.0])]
    for axes in drawn(found, monkeypatch):
        assert outlines(axes) == []


@pytest.mark.parametrize("count", [1, 3, 60])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written(tmp_path: Path, count: int, suffix: str) -> None:
    rng = np.random.default_rng(0)
    numbers = ((f"layers.{n}", rng.standard_normal(50), rng.standard_normal(50) * 1e-7) for n in range(count))
    found = [row for one in numbers for row in rows(*one)]
    file = tmp_path / f"ranges.{suffix}"
    LayerRanges(found, 1.0, "bfloat16" if count == 3 else "float16").draw(file)
    assert file.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml"}[suffix]
    assert file.stat().st_size > 5000
    if suffix == "svg":
        text = file.read_text("utf-8")
        assert all(f">layers.{n}<" in text for n in range(count))
        assert "#0101" not in text  # colours that stand for those of the page


@pytest.mark.parametrize("name", ["ranges.svg", "ranges.png", "ranges"])
def test_a_picture_that_is_interrupted_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def begin(figure: Figure, file: Any, **_: Any) -> None:
        with nullcontext(file) if hasattr(file, "write") else open(file, "wb") as opened:
            opened.write(b"half of it")
        raise KeyboardInterrupt

    ranges = LayerRanges(rows("one", [1.0], None), 1.0, "float16")
    ranges.draw(tmp_path / name)
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    monkeypatch.setattr(Figure, "savefig", begin)
    with pytest.raises(KeyboardInterrupt):
        ranges.draw(tmp_path / name)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == before
    assert file.name == (name if name != "ranges" else "ranges.png")


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no rows"):
        LayerRanges([], 1.0, "float16").draw("x.svg")
    without = expected(np.ones(3, np.float32), histogram=False)
    with pytest.raises(ValueError, match="histogram=True"):
        LayerRanges([LayerRange("op", "one", "activation", "float32", 1.0, without)], 1.0, "float16").draw("x.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="draw needs matplotlib: pip install matplotlib"):
        LayerRanges(rows("one", [1.0], None), 1.0, "float16").draw("x.svg")


# ---------------------------------------------------------------------------------------------- of real steps


@pytest.mark.parametrize(
    "network", [MLP, pytest.param(CNN, marks=pytest.mark.slow), pytest.param(LM, marks=pytest.mark.slow)], ids=str
)
def test_the_suggested_scale_is_within_a_factor_of_four(queue: cl.CommandQueue, network: Network) -> None:
    trainer = Trainer(queue, network)
    data = trainer.batch()

    def is_finite_at(scale: float) -> bool:
        trainer.optimizer.zero_grad()
        with amp.init(loss_scale=scale) as handle:
            _tape, loss = trainer.forward(*data)  # which holds the graph
            scaled_backward(handle, loss, trainer.optimizer)
        grads = [param.grad.to_host() for param in trainer.model.parameters() if param.grad is not None]
        return all(np.isfinite(grad).all() for grad in grads)

    with amp.init() as handle:
        step = partial(trainer.train, handle, *data)
        for _ in range(15):
            step()
        suggested = handle.ranges(step).suggested_scale
    largest = next(filter(is_finite_at, [2.0**exponent for exponent in range(24, 0, -1)]))
    assert largest / 4 <= suggested <= largest
