"""Paddle's debugging names, each by the example of Paddle's documentation, translated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Conv2d, Module
from netcl.optim import Adam

from clamp import amp
from clamp.bridge import Node, Parameter
from clamp.casting.results import RESULTS
from clamp.debug.checker import device_name
from clamp.debugging import DebugMode, TensorCheckerConfig
from tests.reference import to_device

debugging = amp.debugging


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    debugging.disable_tensor_checker()
    assert RESULTS.observers == ()


def leaf(queue: cl.CommandQueue, values: list[float]) -> Node:
    tensor = to_device(queue, np.float32(values))
    tensor.requires_grad = True
    return ag.tensor(tensor, requires_grad=True)


def power(queue: cl.CommandQueue) -> Node:
    """Paddle's example has an exponent for each element; netcl's one for all. 0^0.2 has no slope."""
    return ag.pow(leaf(queue, [1, 0, 3]), 0.2)


def test_check_numerics(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    res = power(queue)
    stats, values = debugging.check_numerics(res, "pow", "res")
    np.testing.assert_array_equal(stats.to_host(), np.int64([0, 0, 1]), strict=True)
    host = res.value.to_host()
    assert values.to_host().dtype == np.float32
    np.testing.assert_allclose(values.to_host(), [host.max(), host.min(), host.mean()], rtol=1e-6)
    assert capsys.readouterr().out == ""


def test_the_tensor_checker(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    """enable_tensor_checker, disable_tensor_checker and TensorCheckerConfig have one example."""
    checker_config = TensorCheckerConfig(enable=True, debug_mode=DebugMode.CHECK_NAN_INF)
    debugging.enable_tensor_checker(checker_config)
    res = power(queue)
    res.backward()
    debugging.disable_tensor_checker()
    power(queue).backward()
    line, source = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"\[PRECISION\] \[ERROR\] in \[device={device_name(queue.device)}, op=pow_grad, tensor=@GRAD, dtype=fp32\], "
        r"numel=3, num_nan=0, num_inf=1, num_zero=0, max=inf, min=8\.3\d*e-02, mean=inf, num_over_fp16=0, "
        r"num_under_fp16=0, at=test_paddle_names\.py:\d+",
        line,
    )
    assert source.endswith(": return ag.pow(leaf(queue, [1, 0, 3]), 0.2)")


def test_the_tensor_checker_aborts(queue: cl.CommandQueue) -> None:
    debugging.enable_tensor_checker(TensorCheckerConfig(enable=True))
    res = power(queue)
    with pytest.raises(FloatingPointError, match=r"pow_grad gave 0 nan and 1 inf .*at test_paddle_names\.py:\d+: "):
        res.backward()


def test_debug_mode() -> None:
    assert {mode.name: mode.value for mode in DebugMode} == {
        "CHECK_NAN_INF_AND_ABORT": 0,
        "CHECK_NAN_INF": 1,
        "CHECK_ALL_FOR_OVERFLOW": 2,
        "CHECK_ALL": 3,
    }


class MyLayer(Module):
    """Of the example of check_layer_numerics."""

    def __init__(self, queue: cl.CommandQueue, divides: bool) -> None:
        self.w = Parameter.from_host(queue, np.ones((2, 3), np.float32))
        self.b = Parameter.from_host(queue, np.ones((3,), np.float32))
        self.divides = divides

    @debugging.check_layer_numerics
    def forward(self, x: Node) -> Node:
        """x @ w + b, or 1/x @ w + b."""
        if self.divides:
            x = ag.div(1.0, x)
        return ag.bias_add(ag.matmul_op(x, ag.tensor(self.w)), ag.tensor(self.b))


def test_check_layer_numerics(queue: cl.CommandQueue) -> None:
    x = np.random.default_rng(0).random((10, 2), np.float32) + 0.5
    x[0] = 0.0
    model = MyLayer(queue, divides=False)
    adam = Adam([model.w, model.b], lr=1e-3)
    ag.sum(model(ag.tensor(to_device(queue, x)))).backward()
    adam.step()
    assert not np.array_equal(model.w.to_host(), np.ones((2, 3)))
    with pytest.raises(FloatingPointError, match=r"div \(MyLayer\) gave 0 nan and 2 inf among 20 elements of float32"):
        MyLayer(queue, divides=True)(ag.tensor(to_device(queue, x)))


TABLE = """\
<------------------------------------------------------- op list -------------------------------------------------------->
<--------------- Op Name ---------------- | -- FP16 Calls --- | -- BF16 Calls --- | -- FP32 Calls --- | -- Other Calls -->
  conv2d                                  |  1                |  0                |  0                |  0
<----------------------------------------------------- op count: 1 ------------------------------------------------------>

"""  # noqa: E501


def test_operator_stats_collection(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    """enable_operator_stats_collection and disable_operator_stats_collection."""
    conv = Conv2d(queue, 3, 2, 3)
    x = ag.tensor(to_device(queue, np.random.default_rng(0).random((2, 3, 8, 8))))
    debugging.enable_operator_stats_collection()
    with amp.auto_cast(enable=True, level="O2"):
        conv(x)
    debugging.disable_operator_stats_collection()
    assert capsys.readouterr().out == TABLE
    debugging.disable_operator_stats_collection()
    assert capsys.readouterr().out == ""


def test_collect_operator_stats(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    conv = Conv2d(queue, 3, 2, 3)
    x = ag.tensor(to_device(queue, np.random.default_rng(0).random((2, 3, 8, 8))))
    with debugging.collect_operator_stats(), amp.auto_cast(enable=True, level="O2"):
        conv(x)
    assert capsys.readouterr().out == TABLE


def test_compare_accuracy(queue: cl.CommandQueue, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "workerlog_log_dir"
    debugging.enable_tensor_checker(TensorCheckerConfig(True, DebugMode.CHECK_ALL, output_dir=str(path)))
    ag.add(leaf(queue, [2, 3, 4, 0]), leaf(queue, [1, 5, 2, 0]))
    debugging.disable_tensor_checker()
    out = tmp_path / "compare_accuracy_out_excel.csv"
    debugging.compare_accuracy(str(path), str(path), str(out), loss_scale=1, dump_all_tensors=False)
    assert "-- OP Types produce infinite outputs: []" in capsys.readouterr().out
    header, row = out.read_text().splitlines()
    found = dict(zip(header.split(","), row.split(","), strict=True))
    assert found["op_type"] == "add"
    assert found["numel"] == "4"
    assert found["infinite"] == "0"
    assert found["fp32_max_value"] == found["fp16_max_value"] == "8.0"
    assert found["fp16_div_fp32_mean_value"] == "1.0"
