"""bisect: the functions, and the layers, that have to run in float32, in few runs of the training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from math import ceil, isfinite, log2
from types import FrameType
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.nn.layers import Dropout, Linear, Module, ReLU, Sequential, Tanh
from netcl.optim import SGD

from clamp import amp, session
from clamp.bridge import Node
from clamp.debug.bisection import HOLDS_UNDER_AMP, find_culprits
from clamp.debugging import Bisection, bisect
from tests.debug.faults import optimize
from tests.faults.check import as_python_does
from tests.faults.inject import Events
from tests.reference import to_device

BIG = 2e4  # a hundred of them, added up, are beyond float16


class Training:
    """Trains a small model for three steps; some of its functions have results beyond float16."""

    def __init__(self, queue: cl.CommandQueue, *culprits: str) -> None:
        self.queue, self.culprits = queue, culprits
        self.runs = 0
        self.draws: list[bytes] = []

    def overflowing(self, name: str, x: Node) -> Node:
        """x, by way of numbers that only ``name`` makes too large for float16, if it is a culprit."""
        factor = BIG if name in self.culprits else 1.0
        if name == "matmul_op":
            weight = np.eye(8) * factor
            out = ag.matmul_op(x, ag.tensor(to_device(self.queue, weight)))
        else:
            weight = np.broadcast_to(np.eye(8) * factor, (1, 8, 8))
            out = ag.bmm(ag.reshape(x, (1, -1, 8)), ag.tensor(to_device(self.queue, weight)))
            out = ag.reshape(out, (-1, 8))
        return ag.log(ag.exp(ag.mul(out, 1 / factor)))

    def __call__(self) -> float:
        self.runs += 1
        self.draws.append(np.random.bytes(4) + random.randbytes(4))
        model = Sequential(Linear(self.queue, 6, 8), Tanh(), Dropout(0.2), Linear(self.queue, 8, 8))
        optimizer = SGD(model.parameters(), lr=0.1)
        x = to_device(self.queue, np.random.standard_normal((16, 6)))
        y = ag.tensor(to_device(self.queue, np.eye(8)[np.random.randint(0, 8, 16)]))
        with amp.init() as handle:
            for _ in range(3):
                hidden = ag.mul(ag.add(ag.sigmoid(model(ag.tensor(x))), 1.0), 4.0)
                hidden = self.overflowing("bmm", self.overflowing("matmul_op", ag.gelu(hidden)))
                loss = F.cross_entropy(hidden, y)
                optimize(handle, optimizer, loss)
        return float(loss.value.to_host()[0])


def most(n: int, culprits: int) -> int:
    """The runs that the search may take, with the two that it begins with."""
    return 2 + culprits * (ceil(log2(n)) + 1)


@pytest.mark.parametrize("metric", [isfinite, None], ids=["bool", "number"])
@pytest.mark.parametrize("culprits", [("matmul_op",), ("bmm",), ("bmm", "matmul_op")])
@pytest.mark.long
def test_finds_the_functions_that_need_float32(queue: cl.CommandQueue, metric: Any, culprits: tuple[str, ...]) -> None:
    training = Training(queue, *culprits)
    state = np.random.get_state()[1].tobytes(), random.getstate()  # type: ignore[index]
    found = bisect(training, metric, tolerance=0.05)
    assert found.verdict == "found"
    assert set(found.functions) == set(culprits)
    assert found.modules == ()
    assert len(found.candidates) >= 8
    assert found.runs == training.runs <= most(len(found.candidates), len(culprits))
    assert len(set(training.draws)) == 1  # each run from the same start
    assert (np.random.get_state()[1].tobytes(), random.getstate()) == state  # type: ignore[index]
    assert str(found).startswith(
        f"amp.init(custom_black_list=[{', '.join(map(repr, found.functions))}])".replace("'", '"')
    )
    with pytest.MonkeyPatch.context() as patch:  # the line does what it says
        patch.setattr("clamp.amp.init", lambda init=amp.init: init(custom_black_list=list(found.functions)))
        assert isfinite(training())


@pytest.mark.parametrize(
    ("culprits", "metric", "verdict", "words"),
    [
        ((), isfinite, "holds under AMP", "holds under AMP"),
        (("bmm",), lambda loss: False, "fails in float32", "does not hold"),
    ],
)
def test_where_nothing_needs_float32_or_that_does_not_help(
    queue: cl.CommandQueue, culprits: tuple[str, ...], metric: Any, verdict: str, words: str
) -> None:
    found = bisect(Training(queue, *culprits), metric, tolerance=0.05)
    assert (found.verdict, found.functions, found.runs) == (verdict, (), 2)
    assert words in str(found)


class Wide(Module):
    """A layer whose result is beyond float16, between others that are not."""

    def __init__(self, queue: cl.CommandQueue, factor: float) -> None:
        self.weight = to_device(queue, np.eye(8) * factor)
        self.inner = Linear(queue, 8, 8)

    def forward(self, x: Any) -> Any:
        inner = self.inner(x)
        self.inner_dtype = inner.value.dtype
        return ag.matmul_op(ag.add(ag.sigmoid(inner), 1.0), ag.tensor(self.weight))


class Log(Module):
    def forward(self, x: Any) -> Any:
        return ag.log(x)


@pytest.mark.parametrize("culprits", [(1,), (3,), (1, 3)])
@pytest.mark.long
def test_finds_the_layers_that_need_float32(queue: cl.CommandQueue, culprits: tuple[int, ...]) -> None:
    def step_fn() -> Any:
        layers: list[Any] = [Linear(queue, 8, 8), ReLU()]
        for number in range(5):
            layers += [Wide(queue, 3e5 if number in culprits else 1.0), Log(), Linear(queue, 8, 8)]
        model = Sequential(*layers)
        loss = ag.mean(model(ag.tensor(to_device(queue, np.random.standard_normal((4, 8))))))
        loss.backward()
        return loss

    call = Module.__call__
    with amp.init():
        found = bisect(step_fn, lambda loss: bool(np.isfinite(loss.value.to_host()).all()), by="module")
    assert Module.__call__ is call
    assert set(found.modules) == {f"layers.{2 + 3 * number}" for number in culprits}
    assert found.functions == ()
    assert {"layers.0", "layers.2", "layers.2.inner"} <= set(found.candidates)
    assert found.runs <= most(len(found.candidates), len(culprits))
    wide = {f"layers.{2 + 3 * number}" for number in culprits}
    assert found.rules == dict.fromkeys(found.modules, "float32") | {f"{name}.inner": "float16" for name in wide}
    rules = ", ".join(f'"{path}": "{dtype}"' for path, dtype in found.rules.items())
    assert str(found).startswith(f"amp.init(modules={{{rules}}})")
    for passed, holds in [
        (found.rules, True),
        ({}, False),
        *[({one: found.rules[one]}, len(wide) == 1) for one in wide],
    ]:
        with amp.init(modules=passed):  # the line does what it says, and less does not
            assert np.isfinite(step_fn().value.to_host()).all() == holds


@pytest.mark.parametrize("culprit", ["layers.0", "layers.2", "layers.1.inner"])
def test_rules_for_modules_take_part(queue: cl.CommandQueue, culprit: str) -> None:
    """Layers in bfloat16 by a rule are candidates as others are, and the rules that there were stay."""
    rules = {"layers.2": "bfloat16", "layers.1": "bfloat16"}

    class Noting(Module):
        def __init__(self) -> None:
            self.layers = [Linear(queue, 8, 8), Wide(queue, 1.0), Linear(queue, 8, 8)]

        def forward(self, x: Any) -> dict[str, str]:
            seen = {f"layers.{place}": layer(x).value.dtype for place, layer in enumerate(self.layers)}
            return seen | {"layers.1.inner": self.layers[1].inner_dtype}

    def step_fn() -> dict[str, str]:
        with amp.init(modules=rules):
            return Noting()(ag.tensor(to_device(queue, np.ones((2, 8)))))

    found = bisect(step_fn, lambda seen: seen[culprit] == "float32", by="module")
    assert found.modules == (culprit,)
    assert found.rules == {culprit: "float32"} | {name: of for name, of in rules.items() if name != culprit}
    assert next(iter(found.rules)) == culprit


def test_handle_that_a_run_leaves_is_shut_down(queue: cl.CommandQueue) -> None:
    def step_fn() -> Node:
        amp.init(loss_scale=8.0)
        x = ag.tensor(to_device(queue, np.full((2, 8), BIG)))
        return ag.mean(ag.matmul_op(x, ag.tensor(to_device(queue, np.eye(8) * 8))))

    found = bisect(step_fn, lambda loss: bool(np.isfinite(loss.value.to_host()[0])))
    assert found.functions == ("matmul_op",)
    assert session.active_handle() is None


def test_handle_around_is_kept_with_its_loss_scale(queue: cl.CommandQueue) -> None:
    scales = []

    with amp.init() as handle:

        def step_fn() -> bool:
            scales.append(handle.loss_scale)
            session.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
            x = ag.tensor(to_device(queue, np.full((2, 8), BIG)))
            return bool(np.isfinite(ag.matmul_op(x, ag.tensor(to_device(queue, np.eye(8) * 8))).value.to_host()).all())

        assert bisect(step_fn, bool).functions == ("matmul_op",)
        assert session.active_handle() is handle
        assert set(scales) == {handle.loss_scale}


def test_regions_of_the_step_are_switched(queue: cl.CommandQueue) -> None:
    def step_fn() -> bool:
        x, w = (to_device(queue, np.full((8, 8), value)) for value in (BIG, 8.0))
        with amp.autocast(dtype="float16"):
            return bool(np.isfinite(ag.matmul_op(ag.tensor(x), ag.tensor(w)).value.to_host()).all())

    assert bisect(step_fn, bool).functions == ("matmul_op",)


def test_floating_point_error_is_a_failure(queue: cl.CommandQueue) -> None:
    def step_fn() -> float:
        if not np.isfinite(Training(queue, "bmm")()):
            raise FloatingPointError("every step was skipped")
        return 1.0

    assert bisect(step_fn).functions == ("bmm",)


@pytest.mark.parametrize(
    ("step_fn", "options", "error", "message"),
    [
        (lambda: 1.0, {"by": "layer"}, ValueError, "by must be"),
        (lambda: 1.0, {}, ValueError, "computed nothing in 16 bits"),
        (lambda: 1.0, {"by": "module"}, ValueError, "in layers"),
        (lambda: 1.0, {"metric": lambda loss: None}, TypeError, "a bool or a number, got NoneType"),
        (lambda: [1, 2], {}, TypeError, "a bool or a number, got list"),
        (lambda: None, {}, TypeError, "step_fn returned None"),
        (lambda: None, {"metric": lambda loss: loss < 0.3}, TypeError, "step_fn returned None"),
        (0.5, {}, TypeError, r"takes a function that trains for some steps, got 0\.5"),
    ],
)
def test_what_cannot_be_bisected(step_fn: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bisect(step_fn, **options)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 13])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_search_takes_few_runs_and_finds_the_least(n: int, k: int) -> None:
    for culprits in combinations(range(n), k):
        asked: list[tuple[int, ...]] = []

        def holds(these: Sequence[int], culprits: tuple[int, ...] = culprits, asked: Any = asked) -> bool:
            asked.append(tuple(these))
            return set(culprits) <= set(these)

        assert set(find_culprits(range(n), holds)) == set(culprits)
        assert len(asked) <= k * (ceil(log2(n)) + 1)
        if k <= 2:
            assert len(asked) <= 2 * ceil(log2(n)) + k
        assert len(set(asked)) == len(asked)  # none twice


def test_search_where_more_float32_can_hurt() -> None:
    def holds(these: Sequence[int]) -> bool:
        return set(these) in ({2, 5}, set(range(8)), {0, 1, 2, 3, 4, 5})

    found = find_culprits(range(8), holds)
    assert holds(found)  # and {2, 5} alone would do: each step of the search has to go by what it has seen
    assert len(found) == 6


def test_words() -> None:
    found = Bisection("module", "found", ("layers.2", "head"), ("layers.2", "head", "layers.0"), 5)
    assert found.modules == ("layers.2", "head")
    assert "around the call of layers.2, head" in str(found)
    assert "2 of 3 layers, found in 5 runs" in repr(found)


def test_a_metric_of_something_else_than_the_result_is_fine(queue: cl.CommandQueue) -> None:
    def train() -> None:
        x = to_device(queue, np.ones((4, 4), np.float32))
        with amp.autocast():
            ag.matmul_op(x, x)

    assert amp.debugging.bisect(train, lambda nothing: True).verdict == HOLDS_UNDER_AMP


class _AtTheEnds(Events):
    """Counts the places where it is asked which handle is active, and where that is shut down; traces no other."""

    def _entered(self, frame: FrameType, event: str, arg: Any) -> Any:
        every = super()._entered(frame, event, arg)
        return every if self._is_there(frame) else None

    def _pass(self, frame: FrameType) -> None:
        if self._is_there(frame):
            super()._pass(frame)

    def _is_there(self, frame: FrameType) -> bool:
        return frame.f_code in (session.active_handle.__code__, session.shutdown.__code__)


@pytest.mark.long
def test_an_interrupt_leaves_no_handle_of_the_training(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.ones((4, 4), np.float32))

    def train() -> None:
        amp.init()
        ag.matmul_op(x, x)

    for number in range(100):
        events = _AtTheEnds(("all", number))
        with as_python_does(), suppress(KeyboardInterrupt), events.counted():
            events.phase = "all"
            amp.debugging.bisect(train, lambda nothing: True)
        events.phase = ""
        assert session.active_handle() is None, events.where
        amp.init().shutdown()
        if events.where is None:
            break
    assert number > 4
