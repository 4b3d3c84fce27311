"""compare_accuracy: which op loses how much by itself, in words; and nothing is disturbed by asking."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.nn.containers import Embedding
from netcl.nn.layers import Dropout, LayerNorm, Linear, Module, ReLU, Sequential, Tanh
from netcl.nn.transformer import TransformerBlock

from clamp import amp
from clamp.bridge import HALF_DTYPES, Node, Tensor
from clamp.debug.float32_reference import error_of, rounding_of, with_digits_of
from clamp.debugging import Accuracy, ValueAccuracy, bisect, compare_accuracy
from clamp.functions import arithmetic as bound_elementwise
from clamp.functions import matmul as bound_matmul
from clamp.ops.elementwise import elementwise
from tests.networks import batch, mlp
from tests.reference import quantize, to_device

RNG = np.random.default_rng(0)


def tanhs(queue: cl.CommandQueue) -> Sequential:
    np.random.seed(0)
    return Sequential(Linear(queue, 12, 24), Tanh(), Linear(queue, 24, 20), Tanh(), Linear(queue, 20, 5))


def data() -> tuple[np.ndarray, np.ndarray]:
    return RNG.standard_normal((16, 12)).astype(np.float32), RNG.integers(0, 5, 16)


def step_of(queue: cl.CommandQueue, forward: Callable[[Node], Node]) -> Callable[[], Node]:
    """Forward and backward of what a model, say, makes of some numbers, with its loss."""
    x, y = data()

    def step() -> Node:
        out = forward(ag.tensor(to_device(queue, x)))
        loss = F.cross_entropy(out, ag.tensor(to_device(queue, np.eye(out.value.shape[-1])[y])))
        loss.backward()
        return loss

    return step


def where(found: list[ValueAccuracy]) -> set[tuple[str, str, str]]:
    return {(value.direction, value.function, value.module) for value in found}


# ------------------------------------------------------------------------------------------ the op that is broken


def breaking(wrapped: Callable[..., Any], is_broken: Callable[..., bool]) -> Callable[..., Any]:
    """Makes some results in 16 bits, or of 16 bits, two percent too large."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = wrapped(*args, **kwargs)
        tensors = [out, *(x for x in args if isinstance(x, Tensor))]
        if is_broken(*args, **kwargs) and any(x.dtype in HALF_DTYPES for x in tensors):
            return elementwise("mul", out.dtype, out, to_device(out.queue, np.full(out.shape, 1.02, np.float32)))
        return out

    return call


def broken(op: str, columns: int | None) -> Callable[..., Any]:
    """clamp's elementwise, with such results of one op, of so many columns."""
    return breaking(elementwise, lambda name, _, *values, **__: name == op and columns in (None, values[0].shape[-1]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "columns", "expected"),
    [
        ("tanh", 20, {("forward", "tanh", "layers.3")}),
        ("tanh_grad", 24, {("backward", "tanh", "layers.1")}),
        ("tanh", None, {("forward", "tanh", "layers.1"), ("forward", "tanh", "layers.3")}),
    ],
)
@pytest.mark.long
def test_finds_the_broken_op_and_only_it(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, dtype: str, op: str, columns: int | None, expected: Any
) -> None:
    model = tanhs(queue)
    assert compare_accuracy(model, data(), loss=F.cross_entropy, dtype=dtype).suspects == []
    monkeypatch.setattr(bound_elementwise, "elementwise", broken(op, columns))
    found = compare_accuracy(model, data(), loss=F.cross_entropy, dtype=dtype, tolerance=3.0)
    assert where(found.suspects) == expected
    assert found[0] == found.suspects[0]
    assert found[0].own == pytest.approx(0.02, rel=0.25)
    assert found[0].line.startswith("test_accuracy.py:") or found[0].line.startswith("accuracy.py:")
    assert f"{found[0].direction} of {found[0].function} in {found[0].module}" in str(found)


def test_finds_a_broken_gradient_of_a_weight_and_no_other(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_broken(*values: Any, transpose_a: bool = False, **options: Any) -> bool:
        return transpose_a and values[0].shape[-1] == 20

    monkeypatch.setattr(bound_matmul, "gemm", breaking(bound_matmul.gemm, is_broken))
    found = compare_accuracy(tanhs(queue), data(), loss=F.cross_entropy)
    assert [value.value for value in found.suspects] == ["gradient of layers.4.weight"]
    assert where(found.suspects) == {("backward", "matmul_op", "layers.4")}


def test_finds_the_op_that_overflows_and_not_what_reads_it(queue: cl.CommandQueue) -> None:
    x = ag.tensor(to_device(queue, np.full((4, 8), 300.0)))
    w = to_device(queue, RNG.standard_normal((8, 3)))
    w.requires_grad = True

    def step() -> Node:
        wide = ag.mul(ag.matmul_op(x, ag.tensor(w)), 3e4)  # beyond 65504
        loss = ag.mean(ag.add(wide, wide))
        loss.backward()
        return loss

    found = compare_accuracy(step)
    assert where(found.suspects) == {("forward", "mul", "")}
    assert found[0].own == found[0].times == np.inf
    assert compare_accuracy(step, dtype="bfloat16").suspects == []
    assert compare_accuracy(step, custom_black_list=["mul", "add"]).suspects == []


@pytest.mark.parametrize(("size", "expected"), [(1e5, np.inf), (1.0, None), (1e-9, 1.0)])
def test_input_without_room_in_float16_is_found(queue: cl.CommandQueue, size: float, expected: float | None) -> None:
    x, w = RNG.standard_normal((4, 8)) * size, np.eye(8)

    def step() -> Node:
        return ag.matmul_op(ag.tensor(to_device(queue, x)), ag.tensor(to_device(queue, w)))

    found = compare_accuracy(step).suspects
    assert [value.own for value in found] == ([] if expected is None else [pytest.approx(expected)])


def test_slope_of_a_relu_on_the_other_side_of_zero_is_no_fault(queue: cl.CommandQueue) -> None:
    np.random.seed(0)
    model = Sequential(Linear(queue, 64, 128), ReLU(), Linear(queue, 128, 10))
    x, y = RNG.standard_normal((32, 64)), RNG.integers(0, 10, 32)
    found = compare_accuracy(model, (x, y), loss=F.cross_entropy, dtype="bfloat16")
    assert found.suspects == []
    assert found[0].own > 10 * 2.0**-9  # slopes of inputs near 0, which rounding has taken to the other side
    assert found[0].rounding > found[0].own / 8
    assert (found[0].direction, found[0].function) == ("backward", "linear_relu")


def test_op_of_the_users_own_is_estimated(queue: cl.CommandQueue) -> None:
    model = tanhs(queue)

    def own(node: Node, factor: float) -> Node:
        value = node.value
        out = to_device(queue, value.to_host().astype(np.float32) * (factor if value.dtype == "float16" else 1.0))
        return Node(value=out, parents=[node], grad_fn=lambda grad: [elementwise("copy", value.dtype, grad)],
                    requires_grad=True, op_name="own")  # fmt: skip

    def step(factor: float) -> Callable[[], Node]:
        return step_of(queue, lambda x: model.layers[2](own(ag.tanh(model.layers[0](x)), factor)))

    with amp.init():
        assert compare_accuracy(step(1.0)).suspects == []
        found = compare_accuracy(step(1.1)).suspects
    assert {(value.function, value.is_estimate) for value in found} == {("own", True)}


def test_a_lack_of_memory_is_no_estimate(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clamp.debug.float32_reference.cast_into", Mock(side_effect=cl.MemoryError("no more")))
    with amp.init(), pytest.raises(cl.MemoryError, match="no more"):
        compare_accuracy(step_of(queue, tanhs(queue)))


# ------------------------------------------------------------------------------------------ sound models


class Language(Module):
    def __init__(self, queue: cl.CommandQueue) -> None:
        np.random.seed(0)
        self.embedding = Embedding(11, 16, queue=queue)
        self.block = TransformerBlock(16, 2, dropout=0.1, queue=queue)
        self.norm = LayerNorm((16,), queue=queue)
        self.drop = Dropout(0.25)
        self.head = Linear(queue, 16, 11)

    def forward(self, x: Any) -> Any:
        x = ag.reshape(self.embedding(x), (4, 6, 16))
        x = self.drop(self.norm(self.block(x)))
        return self.head(ag.reshape(x, (-1, 16)))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sound_model_has_no_suspect(queue: cl.CommandQueue, dtype: str, level: str) -> None:
    model = Language(queue)
    x, y = RNG.integers(0, 11, (4, 6)), RNG.integers(0, 11, 24)
    found = compare_accuracy(model, (x, y), loss=F.cross_entropy, dtype=dtype, level=level)
    assert found.suspects == []
    assert found.unpaired == ()
    assert all(param.grad is None for param in model.parameters())
    assert found.loss == pytest.approx(found.loss_in_float32, rel=0.02)
    assert max(value.times for value in found) > 0.5  # rounding shows
    by_function = {value.function for value in found}
    assert {"layer_norm", "gelu", "dropout", "matmul_op", "cross_entropy"} <= by_function
    assert not any(value.is_estimate for value in found)
    assert {value.module for value in found} >= {"block.fc1", "norm", "head"}


def test_all_in_float32_has_no_error(queue: cl.CommandQueue) -> None:
    for how in ({"level": "O0"}, {"dtype": "float32"}):
        found = compare_accuracy(tanhs(queue), data(), loss=F.cross_entropy, **how)
        assert len(found) > 10
        assert all(value.own == value.total == 0 for value in found)


def test_inference_is_compared_as_well(queue: cl.CommandQueue) -> None:
    model, (x, _) = tanhs(queue), data()

    def step() -> Any:
        with ag.no_grad():
            return model(ag.tensor(to_device(queue, x)))

    found = compare_accuracy(step)
    assert {value.direction for value in found} == {"forward"}
    assert found.suspects == []
    assert found[0].total > 0
    assert np.isnan(found.loss)


# ------------------------------------------------------------------------------------------ nothing is disturbed


def test_gradient_of_a_tensor_that_no_layer_has_is_put_back(queue: cl.CommandQueue) -> None:
    w = to_device(queue, np.eye(4))
    w.requires_grad = True
    with amp.autocast():
        found = compare_accuracy(lambda: ag.sum(ag.matmul_op(ag.tensor(w), ag.tensor(w))).backward())
    assert found.suspects == []
    assert w.grad is None


def test_regions_inside_the_step_are_in_float32_too(queue: cl.CommandQueue) -> None:
    model, seen = tanhs(queue), []

    def forward(x: Node) -> Node:
        with amp.autocast(dtype="bfloat16"):
            out = model(x)
        seen.append(out.value.dtype)
        return out

    found = compare_accuracy(step_of(queue, forward), dtype="bfloat16")
    assert seen == ["float32", "bfloat16"]
    assert found.suspects == []
    assert any(value.own > 2.0**-11 for value in found)


def test_what_only_one_run_has_is_named(queue: cl.CommandQueue) -> None:
    model = tanhs(queue)

    def forward(x: Node) -> Node:
        out = model(x)
        return ag.sigmoid(out) if out.value.dtype == "float16" else ag.exp(out)

    found = compare_accuracy(step_of(queue, forward))
    assert any("result of exp" in one and "float32 only" in one for one in found.unpaired)
    assert any("result of sigmoid" in one and "under AMP only" in one for one in found.unpaired)
    assert "not compared: result of sigmoid" in str(found)
    assert found.suspects == []  # sigmoid by itself is right


def test_loss_scale_is_lowered_until_gradients_are_finite(queue: cl.CommandQueue) -> None:
    found = compare_accuracy(
        mlp(queue, 8, 16, 4), batch(queue, 32, 8, 4), loss=lambda out, y: ag.mul(ag.mse_loss(out, y), 100.0)
    )
    assert found.suspects == []
    assert all(np.isfinite(value.total) for value in found)


# ------------------------------------------------------------------------------------------ results and errors


def test_table_and_file(queue: cl.CommandQueue, tmp_path: Path) -> None:
    found = compare_accuracy(tanhs(queue), data(), loss=F.cross_entropy)
    assert isinstance(found, Accuracy)
    own = [value.own for value in found]
    assert own == sorted(own, reverse=True)
    text = str(found)
    assert text.splitlines()[0].startswith("loss ")
    assert "gradient of layers.2.weight" in text
    found.to_csv(tmp_path / "accuracy.csv")
    with open(tmp_path / "accuracy.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found)
    assert [float(row["own"]) for row in rows] == [value.own for value in found]
    assert rows[0]["function"] == found[0].function


def test_what_cannot_be_compared(queue: cl.CommandQueue) -> None:
    model, pair = mlp(queue, 8, 4), batch(queue, 32, 8, 4)
    with pytest.raises(TypeError, match="needs a batch"):
        compare_accuracy(model)
    with pytest.raises(TypeError, match="takes a batch as a tuple of arrays"):
        compare_accuracy(model, pair[0])
    with pytest.raises(TypeError, match=r"with 2 of the 2 arrays .*: too many .*; for a loss .* pass loss="):
        compare_accuracy(model, pair)
    with pytest.raises(TypeError, match=r"with 0 of the 1 arrays .* missing a required argument"):
        compare_accuracy(model, pair[:1], loss=F.mse_loss)
    with amp.init() as handle:
        for call in (bisect, handle.explain, handle.summary, handle.ranges, handle.memory):
            for step in (model, lambda x, y: None):
                with pytest.raises(TypeError, match=r"calls it without arguments, got .* missing a required argument"):
                    call(step)
    with pytest.raises(TypeError, match="got list"):
        compare_accuracy([model])
    with pytest.raises(TypeError, match="alone"):
        compare_accuracy(lambda: None, pair)
    with pytest.raises(ValueError, match="no op"):
        compare_accuracy(lambda: None)
    with pytest.raises(ValueError, match="float13"):
        compare_accuracy(model, pair, dtype="float13")
    with pytest.raises(ValueError, match="no_such"):
        compare_accuracy(model, pair, custom_black_list=["no_such"])
    with pytest.raises(RuntimeError, match="being compared or bisected"):
        compare_accuracy(lambda: compare_accuracy(model, pair, loss=ag.mse_loss))


def test_errors_of_numbers() -> None:
    right = np.array([3.0, -4.0], np.float32)
    assert error_of(np.array([3.0, -4.5], np.float32), right).relative == pytest.approx(0.1)
    assert error_of(np.array([3.0, -4.5], np.float32), right).largest == pytest.approx(0.125)
    assert error_of(right, right).relative == 0
    both = np.array([np.nan, np.inf, 1], np.float32)
    assert error_of(both, both).relative == 0
    assert error_of(both, np.array([np.nan, 2, 1], np.float32)).relative == np.inf
    assert error_of(right, np.zeros(2, np.float32)).relative == np.inf
    assert error_of(np.zeros(0, np.float32), np.zeros(0, np.float32)).largest == 0
    values = RNG.standard_normal(1000).astype(np.float32)
    expected = np.linalg.norm(values - values.astype(np.float16)) / np.linalg.norm(values)
    assert rounding_of(values, "float16") == pytest.approx(expected)
    assert rounding_of(values * 2.0**40, "float16") == pytest.approx(expected)
    masked = np.array([1.0, -1e9], np.float32)
    assert error_of(np.array([1.0, -65504.0], np.float32), masked, 65504.0).relative == 0
    assert error_of(np.array([1.5, -65504.0], np.float32), masked, 65504.0).relative == pytest.approx(0.5)
    assert error_of(np.array([1.0, -65504.0], np.float32), masked).relative == pytest.approx(1, rel=1e-3)
    assert error_of(np.array([1.0, -np.inf], np.float32), masked, 65504.0).relative == np.inf
    for dtype, rounded in (("float16", values.astype(np.float16)), ("bfloat16", quantize(values, "bfloat16"))):
        np.testing.assert_array_equal(with_digits_of(dtype, values), rounded.astype(np.float32))
        np.testing.assert_array_equal(with_digits_of(dtype, values * 2.0**60), rounded.astype(np.float32) * 2.0**60)
    np.testing.assert_array_equal(with_digits_of("float16", both), both)
    assert rounding_of(values, "bfloat16") == pytest.approx(8 * expected, rel=0.1)


# ---------------------------------------------------------------------------------------------- in words


class Shifted(Module):
    """A layer whose results are moved, and multiplied."""

    def __init__(self, queue: cl.CommandQueue, shift: float, factor: float, *, back: bool) -> None:
        np.random.seed(0)
        self.layer = Linear(queue, 8, 4)
        self.shift, self.factor, self.back = shift, factor, back

    def forward(self, x: Node) -> Node:
        h = ag.add(ag.mul(self.layer(x), self.factor), self.shift)
        return ag.sub(h, self.shift) if self.back else h

    __call__ = forward


def found(model: Module, dtype: str = "float16") -> Accuracy:
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    return compare_accuracy(model, (x, np.zeros((4, 4), np.float32)), loss=F.mse_loss, dtype=dtype)


def test_a_loss_that_is_not_finite_is_told(queue: cl.CommandQueue) -> None:
    over = str(found(Shifted(queue, 0.0, 1e6, back=False)))
    assert over.startswith("loss inf in float16, ")
    assert "result: inf or nan, and finite in float32" in over
    assert "infx" not in over
    gone = str(found(Shifted(queue, np.inf, 1e6, back=True)))
    assert "loss" not in gone.splitlines()[0]  # nan in float32 too: there is none to compare


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_where_inputs_cancel_is_told(queue: cl.CommandQueue, dtype: str) -> None:
    cancels = found(Shifted(queue, 300.0, 1.0, back=True), dtype)
    assert cancels.suspects == []
    assert (cancels.amplified.function, cancels.amplified.direction) == ("sub", "forward")
    assert cancels.amplified.total > 20 * cancels.amplified.brought
    assert "Each op is right, and yet the result of sub" in str(cancels)
    assert cancels.amplified.line in str(cancels).splitlines()[2]


def test_where_nothing_cancels_nothing_is_told(queue: cl.CommandQueue) -> None:
    sound = found(Shifted(queue, 1.0, 1.0, back=False))
    assert sound.amplified is None
    assert "Each op is right" not in str(sound)
    assert "Each op is right" not in str(found(Shifted(queue, 0.0, 1e6, back=False)))
