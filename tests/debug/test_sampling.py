"""Which ops are looked at: names, modules, steps; and that of others nothing is held."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Linear, ReLU, Sequential
from netcl.optim import SGD

from clamp import amp, bridge, session
from clamp.bridge import Node, Tensor
from clamp.casting.results import RESULTS, Observer
from clamp.debug.checker import Checker, DebugMode, Sampling
from clamp.scaling.step_report import StepReport
from tests.networks import batch, loss_of, mlp, step
from tests.reference import to_device

# ---------------------------------------------------------------------------------------------- what it takes


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"modules": "layers.2"}, TypeError, r"modules must be a list of names, got 'layers\.2'"),
        ({"ops": [1]}, TypeError, "ops must be a list"),
        ({"ops": ["matmul_v2"]}, ValueError, r"no function is called 'matmul_v2' \(near: matmul_op\)"),
        ({"ops": ["elementwise_add"]}, ValueError, r"\(near: add\)"),
        ({"skip_ops": ["reduce_mean"]}, ValueError, r"\(near: mean\)"),
        ({"skip_ops": ["softmx"]}, ValueError, r"near: .*softmax"),
        ({"ops": ["xyzzy"]}, ValueError, r"called 'xyzzy'\. .* lists` prints all names.*'xyzzy\*'"),
        ({"every": 0}, ValueError, "every must be a whole number from 1 on, got 0"),
        ({"every": 2.0}, ValueError, "every"),
        ({"steps": (3, 2)}, ValueError, r"like \(1, 5\), got \(3, 2\)"),
        ({"steps": (0, 2)}, ValueError, "steps"),
        ({"steps": 5}, ValueError, "steps"),
        ({"steps": (1, 2, 3)}, ValueError, "steps"),
    ],
)
def test_what_it_does_not_take(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Sampling(**values)


@pytest.mark.parametrize("name", ["matmul_op", "matmul", "softmax", "cast", "scale_loss", "grad_add", "silu", "my_*"])
def test_names_that_there_are(name: str) -> None:
    assert Sampling(ops=[name]).ops == (name,)


def test_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "sampling.toml"
    file.write_text('modules = ["layers.*"]\nops = ["matmul_op"]\nskip_ops = ["cast"]\nevery = 10\nsteps = [9, 99]\n')
    assert Sampling.read(file) == Sampling(("layers.*",), ("matmul_op",), ("cast",), 10, (9, 99))
    file.write_text("")
    assert Sampling.read(str(file)) == Sampling()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('op = ["matmul_op"]', r"sampling\.toml: unknown key 'op' \(near: ops\); known are modules, ops"),
        ("every = 0", r"sampling\.toml: every must be"),
        ('modules = "layers.2"', r"sampling\.toml: modules must be a list"),
        ('ops = ["conv2"]', r"sampling\.toml: no function is called 'conv2' \(near: .*conv2d"),
        ("ops = [", r"cannot read the sampling .*sampling\.toml"),
        (None, r"cannot read the sampling .*sampling\.toml"),  # there is none
    ],
)
def test_a_file_that_makes_no_sense(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "sampling.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        Sampling.read(file)


@pytest.mark.parametrize(
    ("sampling", "steps"),
    [
        (Sampling(), [1, 2, 3, 4, 5, 6, 7, 8]),
        (Sampling(every=3), [1, 4, 7]),
        (Sampling(steps=(3, 5)), [3, 4, 5]),
        (Sampling(steps=(2, 2)), [2]),
        (Sampling(every=2, steps=(3, 7)), [3, 5, 7]),
    ],
)
def test_steps(sampling: Sampling, steps: list[int]) -> None:
    assert [number for number in range(1, 9) if sampling.takes_step(number)] == steps


# ---------------------------------------------------------------------------------------------- a checker that samples


class Watching(Checker):
    """A checker that notes the ops and the tensors that it tells of, a list a step."""

    def __init__(self, **sampling: Any) -> None:
        super().__init__(DebugMode.CHECK_ALL, self._note, Sampling(**sampling))
        self.steps: list[list[tuple[str, ...]]] = [[]]
        RESULTS.attach(self)

    def _note(self, device: str, line: str) -> None:
        self.steps[-1] += re.findall("op=(.*), tensor=(.*), dtype=", line)

    def stepped(self, report: StepReport) -> None:
        super().stepped(report)
        self.steps.append([])

    @property
    def functions(self) -> set[str]:
        """Those of the first step, forward and backward."""
        return {op for op, _ in self.steps[0]}

    @property
    def modules(self) -> set[str]:
        """Those of the first step."""
        return {tensor.removesuffix("@GRAD") for _, tensor in self.steps[0]}


@pytest.fixture(autouse=True)
def nobody_looks_after() -> Iterator[None]:
    yield
    for observer in RESULTS.observers:
        RESULTS.detach(observer)


def train(queue: cl.CommandQueue, steps: int = 1) -> Sequential:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    optimizer = SGD(model.parameters(), lr=1e-3)
    with amp.init() as handle:
        for _ in range(steps):
            step(handle, model, optimizer, data)
    return model


@pytest.mark.parametrize(
    ("sampling", "functions"),
    [
        ({"ops": ["mse_loss", "bias_add"]}, ["mse_loss", "bias_add"]),
        ({"ops": ["m*"], "skip_ops": ["mse_loss"]}, ["matmul_op", "mul"]),  # those that are skipped win
        ({"modules": ["layers.2"]}, ["matmul_op", "bias_add"]),
    ],
)
def test_ops(queue: cl.CommandQueue, sampling: dict[str, Any], functions: list[str]) -> None:
    seen = Watching(**sampling)
    train(queue)
    assert seen.functions == {*functions, *(f"{name}_grad" for name in functions)}
    assert "modules" not in sampling or seen.modules == {"layers.2"}


def test_a_module_takes_those_inside_it(queue: cl.CommandQueue) -> None:
    model = Sequential(Sequential(Linear(queue, 8, 8), ReLU()), Linear(queue, 8, 4))
    seen = Watching(modules=["layers.0"])
    with amp.init() as handle:
        step(handle, model, SGD(model.parameters(), lr=1e-3), batch(queue, 4, 8, 4))
    assert seen.modules == {"layers.0.layers.0"}


def test_steps_of_a_run(queue: cl.CommandQueue) -> None:
    seen = Watching(every=2, steps=(2, 5))
    train(queue, 6)
    assert [bool(told) for told in seen.steps[:6]] == [False, True, False, True, False, False]


def test_modules_are_searched_for_once(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []
    names = bridge.module_names
    monkeypatch.setattr(
        "clamp.bridge.modules.module_names", lambda modules: (searched.extend(modules), names(modules))[1]
    )
    seen = Watching(modules=["layers.2"])
    train(queue, 4)
    assert all(seen.steps[:4])
    assert 0 < len(searched) == len({id(module) for module in searched})


def test_of_others_nothing_is_held(queue: cl.CommandQueue) -> None:
    Watching(ops=["mse_loss"])
    with amp.init():
        left_out = ag.exp(ag.tensor(Tensor.from_host(queue, np.ones(3, np.float32)), requires_grad=True))
        value = weakref.ref(left_out.value)
        del left_out
        gc.collect()
        assert value() is None


def test_a_pattern_that_meets_nothing(queue: cl.CommandQueue) -> None:
    Watching(modules=["layer.2", "layers.0"])
    with pytest.warns(UserWarning, match="no op of step 1") as warned:
        train(queue, 3)
    (message,) = (str(warning.message) for warning in warned)
    assert message == "no op of step 1 was in a module of the path 'layer.2' (near: layers.2, layers.0)"


# ---------------------------------------------------------------------------------------------- netcl's own ops


class Seen(Observer):
    """An observer that notes what it is told."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.steps: list[StepReport] = []

    def result(self, made: Any, parents: Any) -> None:
        self.made.append(made)

    def stepped(self, report: StepReport) -> None:
        self.steps.append(report)


@pytest.fixture
def seen() -> Iterator[Seen]:
    observer = Seen()
    session.ensure_patched()
    with RESULTS.attached(observer):
        yield observer


def names(seen: Seen) -> list[str]:
    return [made.op_name if isinstance(made, Node) else "tensor" for made in seen.made]


def test_without_amp_each_op_is_told_once(queue: cl.CommandQueue, seen: Seen) -> None:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    optimizer = SGD(model.parameters(), lr=1e-3)
    loss_of(model, data).backward()
    optimizer.step()
    assert names(seen) == ["linear_relu", "matmul", "bias_add", "mse_loss", "mul_scalar_right"]
    assert [report.stepped for report in seen.steps] == [True]


def test_what_an_observer_computes_in_backward_is_told(queue: cl.CommandQueue, seen: Seen) -> None:
    """An observer may compute an op again; what a gradient is computed with is no op of anybody's."""

    class Again(Seen):
        def result(self, made: Any, parents: Any) -> Any:
            super().result(made, parents)
            return made.op_name

        def gradients(self, token: Any, grad: Any, grads: Any, again: Any) -> None:
            if token == "sqrt":
                ag.exp(ag.tensor(grad))

    x = ag.tensor(to_device(queue, np.ones((2, 3))), requires_grad=True)
    with RESULTS.attached(Again()):
        ag.matmul_op(ag.sqrt(x), ag.tensor(to_device(queue, np.ones((3, 2))))).backward()
    assert names(seen) == ["sqrt", "matmul", "exp"]


def test_bare_tensors(queue: cl.CommandQueue, seen: Seen) -> None:
    x = ag.tensor(to_device(queue, np.ones((2, 3))))
    with bridge.no_grad():
        result = ag.exp(x)
    assert isinstance(result, Tensor)
    assert seen.made == [result]


@pytest.mark.parametrize("made", ["a function made of others", "layers of bare tensors"])
def test_what_is_made_of_others_is_told_once(queue: cl.CommandQueue, seen: Seen, made: str) -> None:
    x = to_device(queue, np.ones((2, 8)))
    layers = Sequential(Linear(queue, 8, 4), ReLU(), Linear(queue, 4, 2))
    result = layers(x) if made == "layers of bare tensors" else ag.mean(ag.tensor(x, requires_grad=True))
    assert seen.made[-1] is result
    assert x not in seen.made
    assert len({id(one) for one in seen.made}) == len(seen.made)


def test_who_looks_goes_on_when_a_handle_ends(queue: cl.CommandQueue, seen: Seen) -> None:
    x = ag.tensor(to_device(queue, np.ones((2, 3))), requires_grad=True)
    with amp.init():
        first = ag.exp(x)
    second = ag.exp(x)
    assert seen.made == [first, second]


def test_recordings_hold_nobody_who_looked(queue: cl.CommandQueue) -> None:
    exp = amp.record(lambda x: ag.exp(x))
    x = ag.tensor(to_device(queue, np.ones(3)))
    for _ in range(3):
        exp(x)
    observer = Seen()
    with RESULTS.attached(observer):
        exp(x)
    assert len(observer.made) == 1
    ref = weakref.ref(observer)
    del observer
    gc.collect()
    assert ref() is None
    assert exp.recordings == 1
