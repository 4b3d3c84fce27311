"""Names of layers and what a step may change are found where a program keeps its models, not among all objects."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.amp import GradScaler
from netcl.nn.batchnorm import BatchNorm2dModule
from netcl.nn.layers import Linear, Module
from netcl.optim import SGD

from clamp import amp, bridge
from clamp.bridge import Node
from clamp.debug.memory_report import MemoryReport
from clamp.report import read_run
from tests.debug.faults import FAULTS, WAYS, Training, explained, optimize
from tests.debug.test_summary import short
from tests.networks import mlp
from tests.reference import to_device

__all__ = ["short"]  # a fixture
pytestmark = pytest.mark.usefixtures("shut_down")


class Holder(Module):
    """Layers that are called one by one: the model itself never is."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.parts = [Linear(queue, 8, 8), Linear(queue, 8, 8)]
        weight = self.parts[1].weight.to_host()
        weight[0, 0] = np.inf
        self.parts[1].weight.write(weight)
        self.optimizer = SGD(self.parameters(), lr=0.1)
        self.x = to_device(queue, np.ones((2, 8)))

    def part(self, number: int, x: Any) -> Any:
        return self.parts[number](x)


def train(call: Callable[[int, Any], Any], x: Any, optimizer: SGD, handle: Any) -> None:
    optimize(handle, optimizer, ag.mean(call(1, call(0, ag.tensor(x)))))


def in_a_closure(model: Holder) -> Callable[[Any], None]:
    return lambda handle: train(lambda number, x: model.part(number, x), model.x, model.optimizer, handle)


def in_an_object(model: Holder) -> Callable[[Any], None]:
    class Loop:
        def __init__(self) -> None:
            self.models = {"first": model}

        def step(self, handle: Any) -> None:
            train(self.models["first"].part, model.x, model.optimizer, handle)

    return Loop().step


def in_a_partial(model: Holder) -> Callable[[Any], None]:
    return partial(train, model.part, model.x, model.optimizer)


def in_a_default(model: Holder) -> Callable[[Any], None]:
    kept = SimpleNamespace(nets=[model])

    def step(handle: Any, settings: Any = kept) -> None:
        train(lambda number, x: settings.nets[0].parts[number](x), settings.nets[0].x, model.optimizer, handle)

    return step


def as_a_global(model: Holder) -> Callable[[Any], None]:
    globals()["MODEL"] = model
    return lambda handle: train(lambda number, x: MODEL.parts[number](x), MODEL.x, MODEL.optimizer, handle)  # type: ignore[name-defined]  # noqa: F821


KEEPERS = [in_a_closure, in_an_object, in_a_partial, in_a_default, as_a_global]


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test in which all objects of the process are looked at, whoever catches what that raises."""
    search = Mock(side_effect=AssertionError("all objects of the process are looked at"))
    with monkeypatch.context() as patch:
        patch.setattr(gc, "get_referrers", search)
        patch.setattr(gc, "get_objects", search)
        yield
    search.assert_not_called()


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("keeper", KEEPERS, ids=lambda keeper: keeper.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_layers_and_weights_have_their_names(queue: cl.CommandQueue, keeper: Any, way: str) -> None:
    step = keeper(Holder(queue))
    handle, found = explained(lambda handle: lambda: step(handle), way, loss_scale=1.0)
    assert "parts.0.weight" in handle.last_step.parameters
    assert (found.first.module, found.leaf and found.leaf.name) == ("parts.1", "parts.1.weight"), found


class Chained:
    """One of many objects that are reached one by one."""

    def __init__(self, after: Any) -> None:
        self.after = after


def _chain(length: int) -> Any:
    last = None
    for _ in range(length):
        last = Chained(last)
    return last


MUCH: dict[str, Callable[[], Any]] = {
    "lists in a list": lambda: [[{"text": [n]} for n in range(100)] for _ in range(1000)],
    "objects in a list": lambda: [Chained([[]]) for _ in range(60_000)],
    "objects in a dict": lambda: {n: Chained({}) for n in range(60_000)},
    "a long chain": lambda: _chain(60_000),
    "numbers": lambda: list(range(300_000)),
}


class Searched:
    """What a program keeps somewhere."""


NAMES: dict[str, Callable[..., Any]] = {"Namespace": Namespace, "SimpleNamespace": SimpleNamespace, "class": Chained}


def _program(much: Any, where: str, kind: str) -> list[Any]:
    searched = NAMES[kind](after=NAMES[kind](after=Searched()))
    if where == "around":
        return [Chained([much, searched])]
    return [much, Chained([searched])] if where == "before" else [Chained([searched]), much]


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("much", MUCH)
@pytest.mark.parametrize("where", ["before", "behind", "around"])
def test_no_amount_of_data_hides_what_lies_few_names_away(much: str, where: str, kind: str) -> None:
    found = bridge.in_reach(*_program(MUCH[much](), where, kind))
    assert any(isinstance(x, Searched) for x in found)


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.long
def test_nothing_is_searched_for(
    queue: cl.CommandQueue, fault: str, armed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory is what all objects are asked for.
    monkeypatch.setattr("clamp.debug.run_log.memory_of_step", lambda step: MemoryReport({}))
    training = Training(queue, fault)
    scale = 2.0**24 if fault == "scale" else 8.0
    handle = amp.init(debug=("attribution", "summary") if armed else None, loss_scale=scale)
    step = training.step(handle)
    step()
    found = handle.explain(step)
    handle.report(tmp_path / "run.json", step)
    run = read_run(tmp_path / "run.json")
    assert (run["first_bad"]["op"], run["first_bad"]["module"]) == (found.first.function, found.first.module)
    assert {op["module"] for op in run["ops"]} >= {"layers.0", "layers.1.second"}


class Normed(Module):
    """With statistics that each forward moves, and random numbers."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.norm, self.linear = BatchNorm2dModule(queue, 2), Linear(queue, 4, 4)

    def forward(self, x: Node) -> Node:
        return self.linear(ag.dropout(self.norm(x), 0.5))


#: what looks at a step, given a folder
LOOKS: dict[str, Callable[[Any, Callable[[], Any], Path], Any]] = {
    "explain": lambda handle, step, folder: handle.explain(step),
    "ranges": lambda handle, step, folder: handle.ranges(step),
    "compare_accuracy": lambda handle, step, folder: amp.debugging.compare_accuracy(step),
    "save_trace": lambda handle, step, folder: amp.debugging.save_trace(folder / "trace.json", step),
}


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("steps", [0, 1], ids=["before the first step", "after a step"])
@pytest.mark.parametrize(
    ("look", "enabled"), [*((look, True) for look in LOOKS), ("compare_accuracy", False), ("save_trace", False)]
)
def test_a_step_that_is_looked_at_changes_nothing(
    queue: cl.CommandQueue, look: str, enabled: bool, steps: int, tmp_path: Path
) -> None:
    """Also of what nobody has met before it was looked at."""
    model, scaler = Normed(queue), GradScaler(init_scale=2.0**15)
    params, optimizer = model.parameters(), SGD(model.parameters(), lr=0.1)
    x = to_device(queue, np.random.default_rng(0).standard_normal((2, 2, 4, 4), np.float32))
    for param in params:
        param.grad = to_device(queue, np.ones(param.shape))

    def step() -> None:
        loss = ag.mean(model(ag.tensor(x)))
        if enabled:
            optimizer.zero_grad()
            scaler.scale_loss(loss).backward()
            scaler.step(optimizer, params)
            scaler._scale = 3.0
        else:
            optimize(handle, optimizer, loss)

    def everything() -> list[Any]:
        bits = {name: bridge.read_bytes(tensor).tobytes() for name, tensor in bridge.module_tensors(model)}
        drawn = np.random.get_state()[1].tobytes()  # type: ignore[index]
        state = [list(handle.history), amp.state_dict()] if enabled else []
        return [bits, [id(param.grad) for param in params], scaler.scale, drawn, *state]

    handle = amp.init(enabled=enabled)
    for _ in range(steps):
        step()
    before = everything()
    found = LOOKS[look](handle, step, tmp_path)
    assert everything() == before
    if look == "compare_accuracy":
        assert {"dropout", "batch_norm2d"} <= {value.function for value in found}
        assert found.suspects == []
    step()
    assert everything() != before


@pytest.mark.parametrize("look", ["explain", "ranges"])
@pytest.mark.parametrize("params", [list, tuple, lambda params: [1.0]], ids=["list", "tuple", "numbers"])
def test_params_of_what_is_no_optimizer_are_left_alone(
    queue: cl.CommandQueue, look: str, params: Callable[[Any], Any]
) -> None:
    class Loop:
        def __init__(self) -> None:
            self.model = mlp(queue, 8, 8)
            self.optimizer = SGD(self.model.parameters(), lr=0.1)
            amp.decorate(self.model, self.optimizer, level="O2")
            self.params = params(self.model.parameters())

        def step(self) -> None:
            x = to_device(queue, np.ones((2, 8)))
            train(lambda number, x: self.model(x) if number else x, x, self.optimizer, handle)

    handle, loop = amp.init(), Loop()
    held, items = loop.params, [*loop.params]
    getattr(handle, look)(loop.step)
    assert loop.params is held
    assert all(one is other for one, other in zip(held, items, strict=True))
