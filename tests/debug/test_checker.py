"""The tensor checker: what each mode says, forward, backward and in replays; its lists, steps and files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core.device import CPUQueue
from netcl.nn.layers import Linear, Module
from netcl.optim import SGD

from clamp import amp, bridge
from clamp.bridge import Node, Tensor
from clamp.casting.results import RESULTS
from clamp.debugging import DebugMode, Sampling, TensorCheckerConfig
from tests.debug.faults import Train, Training
from tests.faults.check import as_python_does
from tests.faults.inject import Events
from tests.networks import batch, loss_of, mlp, step, stepping
from tests.ops.test_multi_tensor import launches
from tests.reference import STORAGE_DTYPES, integers, quantize, to_device

__all__ = ["launches"]  # a fixture
debugging = amp.debugging

Lines = Callable[[], list[dict[str, str]]]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    debugging.disable_tensor_checker()
    assert RESULTS.observers == ()


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """What the checker has printed since, a dict of its fields a line."""

    def read() -> list[dict[str, str]]:
        printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[PRECISION]")]
        return [{"error": str("[ERROR]" in line), **dict(re.findall(r"(\w+)=([^,\]]*)", line))} for line in printed]

    return read


def check(mode: DebugMode = DebugMode.CHECK_ALL, **config: Any) -> TensorCheckerConfig:
    made = TensorCheckerConfig(True, mode, **config)
    debugging.enable_tensor_checker(made)
    return made


def leaf(queue: cl.CommandQueue, values: Any, dtype: str = "float32") -> Node:
    tensor = to_device(queue, quantize(values, dtype), dtype)
    tensor.requires_grad = True
    return ag.tensor(tensor, requires_grad=True)


# ---------------------------------------------------------------------------------------------- modes


def beyond_float16(queue: cl.CommandQueue) -> None:
    for numbers in ([1.0, 11.0], [1.0, 12.0, 13.0], [1.0, -20.0]):
        ag.exp(leaf(queue, numbers))
    with amp.auto_cast(level="O2", custom_white_list=["exp"]):
        ag.exp(leaf(queue, [1.0, -20.0]))  # in float16: 0


def used_twice(queue: cl.CommandQueue) -> None:
    x = leaf(queue, [1.0, 2.0])
    ag.mul(ag.exp(x), x).backward()


def of_two(queue: cl.CommandQueue) -> None:
    ag.matmul_op(ag.exp(leaf(queue, np.ones((2, 2)))), leaf(queue, np.ones((2, 2)))).backward()


def of_integers(queue: cl.CommandQueue) -> None:
    ag.reshape(ag.tensor(integers(queue, [0, 2])), (2, 1))
    ag.reshape(leaf(queue, [0, 2]), (2, 1))


#: the configuration, what is computed, which fields of the lines are looked at, and what they are
TOLD: dict[str, tuple[dict[str, Any], Callable[[cl.CommandQueue], Any], str, list[str]]] = {
    "only bad tensors": (
        {"mode": DebugMode.CHECK_NAN_INF}, lambda queue: [ag.exp(leaf(queue, [1.0, x])) for x in (2.0, 200.0)],
        "op error num_inf", ["exp True 1"]),
    "all tensors": (
        {}, lambda queue: ag.exp(ag.log(leaf(queue, [1.0, 2.0]))).backward(), "op tensor error",
        ["log  False", "exp  False", "exp_grad @GRAD False", "log_grad @GRAD False"]),
    "what float16 does not hold": (
        {"mode": DebugMode.CHECK_ALL_FOR_OVERFLOW}, beyond_float16, "num_over_fp16 num_under_fp16 error",
        ["2 0 False", "0 1 False"]),
    "sums of gradients": (
        {"checked_op_list": ["grad_add"]}, used_twice, "op tensor numel", ["grad_add @GRAD 2"]),
    "floating tensors only": ({}, of_integers, "dtype", ["fp32"]),
    "listed ops": ({"checked_op_list": ["exp"]}, of_two, "op", ["exp", "exp_grad"]),
    "all but listed ops": (
        {"skipped_op_list": ("exp",)}, of_two, "op", ["matmul_op", "matmul_op_grad", "matmul_op_grad"]),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_what_is_told(queue: cl.CommandQueue, lines: Lines, case: str) -> None:
    config, compute, fields, expected = TOLD[case]
    check(**config)
    compute(queue)
    assert [" ".join(line[field] for field in fields.split()) for line in lines()] == expected


def test_the_error_says_where(queue: cl.CommandQueue, lines: Lines) -> None:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    model.layers[2].weight.write(np.full((16, 4), 1e30, np.float32))
    check(DebugMode.CHECK_NAN_INF_AND_ABORT)
    message = (
        r"^matmul_op in layers\.2 \(Linear\) gave \d+ nan and \d+ inf among 16 elements of float16 \(4, 4\), "
        r"at networks\.py:\d+: return ag\.mul\(ag\.mse_loss\(model"
    )
    with amp.auto_cast(), pytest.raises(FloatingPointError, match=message):
        loss_of(model, data)
    (line,) = lines()
    assert (line["op"], line["tensor"], line["dtype"]) == ("matmul_op", "layers.2", "fp16")


def test_a_backward_that_is_ended_can_be_run_again(queue: cl.CommandQueue) -> None:
    x = leaf(queue, [0.0, 4.0])
    loss = ag.sum(ag.sqrt(x))
    check(DebugMode.CHECK_NAN_INF_AND_ABORT)
    root = ag.sqrt(x)
    message = r"^sqrt_grad gave 0 nan and 1 inf among 2 elements of float32 \(2,\), at test_checker\.py:\d+: root = ag"
    with pytest.raises(FloatingPointError, match=message):
        root.backward()
    debugging.disable_tensor_checker()
    loss.backward()
    np.testing.assert_array_equal(x.value.grad.to_host(), np.float32([np.inf, 0.25]))


def test_an_interrupted_end_has_ended_all_or_nothing(queue: cl.CommandQueue, lines: Lines) -> None:
    def interrupted(events: Events) -> Node:
        check()
        root = ag.sqrt(leaf(queue, [0.0, 4.0]))
        lines()
        with as_python_does(), suppress(KeyboardInterrupt), events.counted():
            events.phase = "end"
            debugging.disable_tensor_checker()
        events.phase = ""
        return root

    counted = Events(unit="line")
    interrupted(counted)
    for place in range(counted.counts["end"]):
        root = interrupted(Events(("end", place), "line"))
        is_on = bool(RESULTS.observers)
        root.backward()
        assert bool(lines()) == is_on, place
        debugging.disable_tensor_checker()


def test_the_source_line(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    for height, expected in ((1, 2), (0, 1)):
        check(DebugMode.CHECK_NAN_INF, stack_height_limit=height)
        ag.exp(leaf(queue, [200.0]))
        assert len(capsys.readouterr().out.splitlines()) == expected


@pytest.mark.parametrize("amp_is_on", [True, False])
def test_the_same_ops_with_amp_and_without(queue: cl.CommandQueue, lines: Lines, amp_is_on: bool) -> None:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    check()
    with amp.auto_cast(enable=amp_is_on):
        loss = loss_of(model, data)
    loss.backward()
    ops = [(line["op"], line["tensor"]) for line in lines()]
    forward = [("linear_relu", "layers.0"), ("matmul_op", "layers.2"), ("bias_add", "layers.2"), ("mse_loss", ""),
               ("mul", "")]  # fmt: skip
    assert [op for op in ops if op[0] != "cast" and "GRAD" not in op[1]] == forward
    assert {op for op in ops if "GRAD" in op[1]} == {(f"{op}_grad", f"{tensor}@GRAD") for op, tensor in forward}


# ---------------------------------------------------------------------------------------------- when, and what


def test_disabled_before_backward(queue: cl.CommandQueue, lines: Lines) -> None:
    check()
    y = ag.exp(leaf(queue, [1.0]))
    debugging.disable_tensor_checker()
    y.backward()
    ag.exp(leaf(queue, [1.0]))
    assert [line["op"] for line in lines()] == ["exp"]


@pytest.mark.parametrize("config", [(False, DebugMode.CHECK_ALL), (True, DebugMode.CHECK_NAN_INF)])
def test_another_configuration_takes_over(queue: cl.CommandQueue, lines: Lines, config: Any) -> None:
    check()
    debugging.enable_tensor_checker(TensorCheckerConfig(*config))
    ag.exp(leaf(queue, [1.0]))
    assert lines() == []


@pytest.mark.parametrize("steps", [True, False])
def test_steps_by_enabling(queue: cl.CommandQueue, lines: Lines, steps: bool) -> None:
    """As Paddle counts; an optimizer's step inside is of the same one."""
    config = TensorCheckerConfig(True, DebugMode.CHECK_ALL, debug_step=(0, 2))
    x = leaf(queue, [1.0])
    optimizer = SGD([x.value], lr=1e-3)
    counts = []
    for _ in range(4):
        debugging.enable_tensor_checker(config)
        ag.exp(x).backward()
        if steps:
            optimizer.step()
        debugging.disable_tensor_checker()
        optimizer.zero_grad()
        counts.append(len(lines()))
    assert counts == [2, 2, 0, 0]


def test_a_sampling_in_place_of_lists(queue: cl.CommandQueue, lines: Lines, tmp_path: Path) -> None:
    file = tmp_path / "sampling.toml"
    file.write_text('modules = ["layers.2"]\nevery = 2\n')
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    optimizer = SGD(model.parameters(), lr=1e-3)
    for sampling in (file, str(file), Sampling(modules=("layers.2",), every=2)):
        check(sampling=sampling)
        counts = []
        for _ in range(3):
            loss_of(model, data)
            optimizer.step()
            counts.append([line["tensor"] for line in lines()])
        assert counts == [["layers.2"] * 2, [], ["layers.2"] * 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"debug_mode": 1}, r"debug_mode must be one of DebugMode\.CHECK_NAN_INF_AND_ABORT, .*, got 1"),
        ({"checked_op_list": "matmul_op"}, "checked_op_list must be list or tuple, got 'matmul_op'"),
        ({"skipped_op_list": {"exp"}}, "skipped_op_list must be list or tuple"),
        ({"debug_step": 5}, "debug_step must be list or tuple, got 5"),
        ({"debug_step": []}, "steps must be"),
        ({"stack_height_limit": "1"}, "stack_height_limit must be int"),
        ({"checked_op_list": ["matmul_v2"]}, r"no function is called 'matmul_v2' \(near: matmul_op\)"),
        ({"checked_op_list": ["exp"], "sampling": Sampling()}, "sampling was given beside checked_op_list"),
        ({"sampling": "none.toml"}, r"cannot read the sampling none\.toml"),
    ],
)
def test_what_a_configuration_does_not_take(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorCheckerConfig(True, **values)
    with pytest.raises(TypeError, match="takes a TensorCheckerConfig, got dict"):
        debugging.enable_tensor_checker(values)


# ---------------------------------------------------------------------------------------------- files


def test_a_log_begins_anew_with_its_configuration(queue: cl.CommandQueue, tmp_path: Path, lines: Lines) -> None:
    folder = tmp_path / "of" / "a run"
    for _ in range(2):
        config = check(output_dir=folder)
        ag.exp(leaf(queue, [1.0]))
        debugging.disable_tensor_checker()
        debugging.enable_tensor_checker(config)
        ag.log(leaf(queue, [0.0]))
        debugging.disable_tensor_checker()
    (log,) = folder.iterdir()
    assert re.fullmatch(r"worker_[cg]pu\.\d+\.log", log.name)
    written = log.read_text().splitlines()
    assert [re.search(r"op=(\w+)", line)[1] for line in written[:2]] == ["exp", "log"]
    assert re.fullmatch(r"    test_checker\.py:\d+: ag\.log\(leaf\(queue, \[0\.0\]\)\)", written[2])
    assert len(written) == 3
    check(DebugMode.CHECK_NAN_INF, output_dir=folder)
    assert list(folder.iterdir()) == []
    assert lines() == []


# ---------------------------------------------------------------------------------------------- replays


def test_replays_are_checked(queue: cl.CommandQueue, lines: Lines) -> None:
    exp = amp.record(lambda x: ag.exp(x))
    good, bad = to_device(queue, [1.0]), to_device(queue, [200.0])
    check(DebugMode.CHECK_NAN_INF)
    found = []
    for x in (good, good, good, bad, good, bad):
        exp(ag.tensor(x))
        found.append([line["num_inf"] for line in lines()])
    assert exp.recordings == 1
    assert found == [[], [], [], ["1"], [], ["1"]]


@pytest.mark.parametrize("before", [0, 1, 3], ids=["run", "recorded", "replayed"])
def test_a_recorded_function_is_ended(queue: cl.CommandQueue, before: int) -> None:
    exp = amp.record(lambda x: ag.exp(x))
    good, bad = to_device(queue, [1.0]), to_device(queue, [200.0])
    check(DebugMode.CHECK_NAN_INF_AND_ABORT)
    for _ in range(before):
        exp(ag.tensor(good))
    with pytest.raises(FloatingPointError, match="exp gave 0 nan and 1 inf"):
        exp(ag.tensor(bad))
    np.testing.assert_allclose(exp(ag.tensor(good)).value.to_host(), np.exp([1.0]), rtol=1e-6)


def test_what_was_recorded_before_is_checked_too(queue: cl.CommandQueue, lines: Lines, launches: list[str]) -> None:
    exp = amp.record(lambda x: ag.exp(x))
    x = ag.tensor(to_device(queue, [200.0]))
    for _ in range(3):
        exp(x)
    check(DebugMode.CHECK_NAN_INF)
    for _ in range(4):
        exp(x)
        assert [line["op"] for line in lines()] == ["exp"]
    debugging.disable_tensor_checker()
    launches.clear()
    for _ in range(3):
        exp(x)
    assert lines() == []
    assert "numerics" not in launches


def test_recorded_steps(queue: cl.CommandQueue, lines: Lines) -> None:
    """Forward, backward and steps, of which every second one is looked at."""
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    optimizer = SGD(model.parameters(), lr=1e-3)
    check(sampling=Sampling(every=2, ops=["mse_loss"]))
    with amp.init() as handle:
        train = amp.record(stepping(handle, model, optimizer))
        counts = []
        for _ in range(6):
            loss = train(*data)
            found = lines()
            counts.append([line["op"] for line in found])
            if found:
                assert float(found[0]["mean"]) == pytest.approx(float(loss.value.to_host()[0]) * 1024, rel=1e-3)
        assert train.recordings == 1
    assert counts == [["mse_loss", "mse_loss_grad"], []] * 3


def test_a_graph(queue: cl.CommandQueue, lines: Lines) -> None:
    training = Training(queue, "none")
    graph = Train(training, amp.StaticGradScaler(8.0))
    x, y = training.data
    check(DebugMode.CHECK_NAN_INF, checked_op_list=["mse_loss"])
    for _ in range(4):
        graph(x, y)
    lines()
    graph(to_device(queue, np.full((4, 8), np.nan)), y)
    assert [line["op"] for line in lines()] == ["mse_loss", "mse_loss_grad"]


# ---------------------------------------------------------------------------------------------- beside the checker


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_check_numerics(queue: cl.CommandQueue, lines: Lines, dtype: str) -> None:
    tensor = to_device(queue, quantize([1.0, np.inf, np.nan, 0.0, -3.0], dtype), dtype)
    stats, values = debugging.check_numerics(tensor, "op", "x", DebugMode.CHECK_NAN_INF)
    np.testing.assert_array_equal(stats.to_host(), np.int64([1, 1, 1]), strict=True)
    np.testing.assert_array_equal(values.to_host(), np.float32([np.inf, -3.0, np.nan]), strict=True)
    (line,) = lines()
    assert (line["op"], line["tensor"], line["numel"], line["error"]) == ("op", "x", "5", "True")
    with pytest.raises(FloatingPointError, match=r"^x of op has 1 nan and 1 inf among 5 elements of"):
        debugging.check_numerics(tensor, "op", "x")
    lines()
    _, values = debugging.check_numerics(ag.tensor(to_device(queue, [1.0, 0.0, 3.5])), "op", "x")
    np.testing.assert_array_equal(values.to_host(), [3.5, 0.0, 1.5])
    assert lines() == []


def test_what_check_numerics_does_not_take(queue: cl.CommandQueue) -> None:
    with pytest.raises(TypeError, match="takes a Node or a Tensor, got ndarray"):
        debugging.check_numerics(np.ones(3), "op", "x")
    with pytest.raises(TypeError, match="int32"):
        debugging.check_numerics(integers(queue, [1]), "op", "x")
    with pytest.raises(TypeError, match="numpy backend"):
        debugging.check_numerics(Tensor.from_host(CPUQueue(), np.ones(3, np.float32)), "op", "x")
    with pytest.raises(ValueError, match="debug_mode"):
        debugging.check_numerics(to_device(queue, [1.0]), "op", "x", 3)


class Halving(Module):
    """A layer whose forward is checked; its backward divides by 0 where it is given 0."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.linear = Linear(queue, 2, 2)

    @debugging.check_layer_numerics
    def forward(self, x: Node, power: float = 0.5) -> Node:
        """x to a power."""
        return ag.pow(x, power)


def test_a_layers_input_and_backward(queue: cl.CommandQueue) -> None:
    layer = Halving(queue)
    assert layer.forward.__doc__ == "x to a power."
    x = leaf(queue, [0.0, 1.0])
    y = layer(x)
    with pytest.raises(FloatingPointError, match=r"^pow_grad \(Halving\) gave 0 nan and 1 inf"):
        y.backward()
    with pytest.raises(FloatingPointError, match=r"^pow \(Halving\) gave 1 nan and 0 inf among 1 elements of float32"):
        layer(leaf(queue, [-1.0]))
    with pytest.raises(FloatingPointError, match=r"^Halving\.input.* gave 1 nan and 0 inf among 1 "):
        layer(leaf(queue, [np.nan]))
    ag.exp(leaf(queue, [200.0]))  # outside of it nothing is checked
    for args in ((), (np.ones(3),)):
        with pytest.raises(RuntimeError, match="the first input of Halving must be a node or tensor"):
            layer(*args)


def test_a_layer_is_checked_in_its_own_thread(queue: cl.CommandQueue) -> None:
    class Slow(Module):
        @debugging.check_layer_numerics
        def forward(self, x: Node) -> Node:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(ag.exp, x).result()

    assert np.isinf(Slow()(leaf(queue, [200.0])).value.to_host()).all()


def test_operator_stats_of_a_step_and_its_replays(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    forward = amp.record(lambda x: model(x))
    with debugging.collect_operator_stats():
        with amp.auto_cast(dtype="bfloat16"):
            for _ in range(5):
                forward(ag.tensor(data[0]))
        ag.reshape(ag.tensor(integers(queue, [1, 2])), (2, 1))
        loss_of(model, data).backward()
    table = {line.split("|")[0].strip(): line.split("|")[1:] for line in capsys.readouterr().out.splitlines()[2:-2]}
    assert {op: [int(x) for x in calls] for op, calls in table.items()} == {
        "bias_add": [0, 5, 1, 0],
        "linear_relu": [0, 5, 1, 0],
        "matmul_op": [0, 5, 1, 0],
        "mse_loss": [0, 0, 1, 0],
        "mul": [0, 0, 1, 0],
        "reshape": [0, 0, 0, 1],
    }


def test_operator_stats_are_printed_after_an_error(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with debugging.collect_operator_stats():
            ag.exp(leaf(queue, [1.0]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "op count: 1" in capsys.readouterr().out


def test_nothing_is_paid_without(queue: cl.CommandQueue, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step after everything was on and off again has the launches and the reads of a step before."""
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    optimizer = SGD(model.parameters(), lr=1e-3)
    reads: list[Any] = []
    to_host = Tensor.to_host
    monkeypatch.setattr(Tensor, "to_host", lambda self: (reads.append(self), to_host(self))[1])

    def counted(handle: Any) -> tuple[list[str], int]:
        launches.clear()
        reads.clear()
        step(handle, model, optimizer, data)
        return launches[:], len(reads)

    with amp.init() as handle:
        step(handle, model, optimizer, data)
        before = counted(handle)
        check(DebugMode.CHECK_NAN_INF)
        debugging.enable_operator_stats_collection()
        assert counted(handle) != before
        debugging.disable_tensor_checker()
        debugging.disable_operator_stats_collection()
        assert counted(handle) == before
    assert bridge.is_grad_enabled()
