"""Paddle's debugging names, each by the example of its documentation, translated; and two runs' logs, compared."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Conv2d

from clamp import amp
from clamp.debug.checker import device_name
from clamp.debugging import DebugMode, TensorCheckerConfig, compare_accuracy
from tests.debug.test_checker import leaf, nothing_is_left
from tests.networks import batch, loss_of, mlp
from tests.reference import to_device

__all__ = ["nothing_is_left"]  # a fixture
debugging = amp.debugging


def test_the_tensor_checker(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    """enable_tensor_checker, disable_tensor_checker and TensorCheckerConfig have one example. 0^0.2 has no slope."""
    checker_config = TensorCheckerConfig(enable=True, debug_mode=DebugMode.CHECK_NAN_INF)
    debugging.enable_tensor_checker(checker_config)
    res = ag.pow(leaf(queue, [1, 0, 3]), 0.2)
    res.backward()
    debugging.disable_tensor_checker()
    line, source = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"\[PRECISION\] \[ERROR\] in \[device={device_name(queue.device)}, op=pow_grad, tensor=@GRAD, dtype=fp32\], "
        r"numel=3, num_nan=0, num_inf=1, num_zero=0, max=inf, min=8\.3\d*e-02, mean=inf, num_over_fp16=0, "
        r"num_under_fp16=0, at=test_paddle_names\.py:\d+",
        line,
    )
    assert source.endswith(": res = ag.pow(leaf(queue, [1, 0, 3]), 0.2)")


def test_debug_mode() -> None:
    assert {mode.name: mode.value for mode in DebugMode} == {
        "CHECK_NAN_INF_AND_ABORT": 0,
        "CHECK_NAN_INF": 1,
        "CHECK_ALL_FOR_OVERFLOW": 2,
        "CHECK_ALL": 3,
    }


TABLE = """\
<------------------------------------------------------- op list -------------------------------------------------------->
<--------------- Op Name ---------------- | -- FP16 Calls --- | -- BF16 Calls --- | -- FP32 Calls --- | -- Other Calls -->
  conv2d                                  |  1                |  0                |  0                |  0
<----------------------------------------------------- op count: 1 ------------------------------------------------------>

"""  # noqa: E501


def test_operator_stats(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    """collect_operator_stats, and enable_operator_stats_collection with disable_operator_stats_collection."""
    conv = Conv2d(queue, 3, 2, 3)
    x = ag.tensor(to_device(queue, np.random.default_rng(0).random((2, 3, 8, 8))))
    with debugging.collect_operator_stats(), amp.auto_cast(enable=True, level="O2"):
        conv(x)
    assert capsys.readouterr().out == TABLE
    debugging.enable_operator_stats_collection()
    with amp.auto_cast(enable=True, level="O2"):
        conv(x)
    debugging.disable_operator_stats_collection()
    assert capsys.readouterr().out == TABLE
    debugging.disable_operator_stats_collection()
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------------------- two runs' logs


LINE = (
    "[PRECISION] in [device=gpu:0, op={op}, tensor={tensor}, dtype={dtype}], numel={numel}, num_nan=0, num_inf={infs}, "
    "num_zero=2, max={high}, min={low}, mean=5.000000e-01"
)


def line(
    op: str = "add", tensor: str = "", dtype: str = "fp32", numel: int = 4, infs: int = 0, high: str = "8.000000e+00",
    low: str = "-1.000000e+00",
) -> str:  # fmt: skip
    return LINE.format(op=op, tensor=tensor, dtype=dtype, numel=numel, infs=infs, high=high, low=low)


def compared(folder: Path, first: list[str], second: list[str], **options: Any) -> list[dict[str, str]]:
    for name, lines in (("fp32", first), ("fp16", second)):
        (folder / name).mkdir()
        (folder / name / "worker_gpu.0.log").write_text("\n".join(lines))
    compare_accuracy(folder / "fp32", folder / "fp16", folder / "out.csv", **options)
    with (folder / "out.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = compared(tmp_path, ["noise", line()], [line(dtype="fp16", high="4.000000e+00", low="-2.000000e+00")])
    assert row == {
        "worker": "worker_gpu.0.log", "op_type": "add", "tensor_name": "", "numel": "4", "infinite": "0",
        "fp32_dtype": "fp32", "fp32_max_value": "8.0", "fp32_min_value": "-1.0", "fp32_mean_value": "0.5",
        "fp32_num_zero": "2", "fp32_num_inf": "0", "fp32_num_nan": "0",
        "fp16_dtype": "fp16", "fp16_max_value": "4.0", "fp16_min_value": "-2.0", "fp16_mean_value": "0.5",
        "fp16_num_zero": "2", "fp16_num_inf": "0", "fp16_num_nan": "0",
        "fp16_div_fp32_max_value": "0.5", "fp16_div_fp32_min_value": "2.0", "fp16_div_fp32_mean_value": "1.0",
    }  # fmt: skip
    assert capsys.readouterr().out.splitlines()[0] == "-- OP Types produce infinite outputs: []"


def test_what_belongs_together(tmp_path: Path) -> None:
    first = [line("add"), line("mul", numel=7), line("add", high="9.000000e+00"), line("exp")]
    second = [line("add"), line("cast"), line("add"), line("mul", numel=6)]
    rows = compared(tmp_path, first, second)
    assert [(row["op_type"], row["numel"], row["fp32_max_value"], row["fp16_max_value"]) for row in rows] == [
        ("add", "4", "8.0", "8.0"),
        ("cast", "4", "", "8.0"),
        ("add", "4", "9.0", "8.0"),
        ("mul", "6", "", "8.0"),
        ("mul", "7", "8.0", ""),
        ("exp", "4", "8.0", ""),
    ]


@pytest.mark.parametrize(
    ("first", "second", "loss_scale", "infinite"),
    [
        (line(high="7.000000e+04"), line(), 1, True),
        (line(), line(low="-inf", infs=1), 1, True),
        (line(high="nan"), line(), 1, True),
        (line(), line(high="1.000000e+00"), 1, False),  # of results nobody asks whether they are close
        (line(tensor="x@GRAD"), line(tensor="x@GRAD"), 1, False),
        (line(tensor="x@GRAD"), line(tensor="x@GRAD"), 16, True),
        (line(tensor="x@GRAD"), line(tensor="x@GRAD", high="1.280000e+02", low="-1.600000e+01"), 16, False),
        (line(tensor="x@GRAD"), line(tensor="x@GRAD", high="8.100000e+00"), 1, True),
        (line(tensor="x@GRAD"), line(tensor="x@GRAD", high="8.000000e+00"), 1e5, True),
        (line(tensor="x"), line(tensor="x"), 1e5, False),
    ],
)
def test_infinite(tmp_path: Path, first: str, second: str, loss_scale: float, infinite: bool) -> None:
    (row,) = compared(tmp_path, [first], [second], loss_scale=loss_scale)
    assert row["infinite"] == str(int(infinite))


def test_nothing_is_divided_by_nothing(tmp_path: Path) -> None:
    (row,) = compared(tmp_path, [line(high="0.000000e+00")], [line()])
    assert row["fp16_div_fp32_max_value"] == ""


def test_a_line_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"worker_gpu\.0\.log:2 is not as the tensor checker writes: '\[PREC"):
        compared(tmp_path, [line(), "[PRECISION] in need of repair"], [line()])


def test_what_it_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no log worker_\*: run with TensorCheckerConfig"):
        compare_accuracy(tmp_path, tmp_path, tmp_path / "out.csv")
    with pytest.raises(ValueError, match=r"must end in \.csv"):
        compare_accuracy(tmp_path, tmp_path, "out.xlsx")
    with pytest.raises(NotImplementedError, match="dump_all_tensors"):
        compare_accuracy(tmp_path, tmp_path, "out.csv", dump_all_tensors=True)
    with pytest.raises(TypeError):
        compare_accuracy([], tmp_path, "out.csv")  # no path: what is not Paddle's


def test_logs_of_other_devices(tmp_path: Path) -> None:
    for folder, names in (("a", ["cpu.0", "cpu.1"]), ("b", ["cpu.1", "cpu.2"]), ("c", ["gpu.0"]), ("d", ["cpu.0"])):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"worker_{name}.log").write_text(line())
    with pytest.raises(ValueError, match="not of the same devices"):
        compare_accuracy(tmp_path / "a", tmp_path / "b", tmp_path / "out.csv")
    compare_accuracy(tmp_path / "c", tmp_path / "d", tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 2


def test_a_run_in_float32_and_one_with_amp(queue: cl.CommandQueue, tmp_path: Path) -> None:
    """The op that overflows in float16 alone is called infinite; what is scaled is scaled."""
    data, model = batch(queue, 4, 8, 4), mlp(queue, 8, 16, 4)
    model.layers[2].weight.write(np.full((16, 4), 3e4, np.float32))
    for name, on in (("fp32", False), ("fp16", True)):
        amp.debugging.enable_tensor_checker(TensorCheckerConfig(True, DebugMode.CHECK_ALL, tmp_path / name))
        with amp.auto_cast(enable=on):
            loss = loss_of(model, data)
        loss.backward()
        amp.debugging.disable_tensor_checker()
    compare_accuracy(str(tmp_path / "fp32"), str(tmp_path / "fp16"), str(tmp_path / "out.csv"), loss_scale=1)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    forward = [row for row in rows if "GRAD" not in row["tensor_name"] and row["op_type"] != "cast"]
    assert all(row["fp32_dtype"] and row["fp16_dtype"] for row in forward)
    assert next(row for row in forward if row["infinite"] == "1")["op_type"] == "matmul_op"
    assert forward[0]["op_type"] == "linear_relu"
    assert abs(float(forward[0]["fp16_div_fp32_max_value"]) - 1) < 2e-3
