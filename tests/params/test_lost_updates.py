"""Updates that rounding loses, of weights kept in 16 bits: counted, said once, and by layer in the summary."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD, Adam, AdamW, RMSProp

from clamp import amp, session
from clamp.bridge import Parameter, Tensor
from clamp.debug.layer_ranges import observe_lost_updates
from clamp.params import masters
from clamp.params.lost_updates import percent
from clamp.params.parts import KEEPS
from clamp.report import read_run
from tests.networks import batch, loss_of, mlp, scaled_backward, step
from tests.params.test_parts import OPTIMIZERS
from tests.params.test_whole_steps import state_of, values_of
from tests.reference import HALF_DTYPES, quantize, to_device, to_numpy

pytestmark = [
    pytest.mark.usefixtures("shut_down"),
    pytest.mark.filterwarnings("ignore:The 'dest_offset' argument:DeprecationWarning"),  # netcl's fused AdamW's
]

SHAPES = [(3,), (31, 33), (2048,), (5,)]
AS_ONE = [(2048,)] * 8  # which AdamW steps together
MADE: dict[str, Callable[[Any], Any]] = {
    **OPTIMIZERS,
    "AdamW as one": OPTIMIZERS["AdamW"],
    "Adam8bit": lambda params: amp.optim.Adam8bit(params, lr=1e-3),
    "AdamW8bit": lambda params: amp.optim.AdamW8bit(params, lr=1e-3),
    "RMSProp": lambda params: RMSProp(params, lr=1e-4),
}


class Loop:
    """Weights that are 16-bit numbers, of an optimizer that is given gradients: the same ones in each."""

    def __init__(self, queue: cl.CommandQueue, name: str, dtype: str, keeps: bool | str) -> None:
        self._queue, self._random = queue, np.random.default_rng(0)
        shapes = AS_ONE if name == "AdamW as one" else SHAPES
        values = [quantize(self._random.standard_normal(shape), dtype) for shape in shapes]
        self.params = [Parameter.from_host(queue, value.astype(np.float32)) for value in values]
        self.optimizer = MADE[name](self.params)
        masters.narrow(self.params, dtype, [self.optimizer], keep_master=keeps)

    def draw(self) -> None:
        """Gradients of many magnitudes, some of them 0."""
        for param in self.params:
            grad = self._random.standard_normal(param.shape) * 10.0 ** self._random.integers(-4, 1, param.shape)
            param.grad = to_device(self._queue, np.where(self._random.random(param.shape) < 0.1, 0, grad))

    def values(self) -> list[np.ndarray]:
        return [master.to_host() for master in amp.master_params(self.optimizer)]


def lost(before: Sequence[np.ndarray], after: Sequence[np.ndarray], dtype: str) -> dict[str, tuple[int, int]]:
    """Updates, and those that are lost, by parameter."""
    found = {}
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        moved = new != old
        found[f"params[{index}]"] = int(moved.sum()), int((moved & (quantize(new, dtype) == old)).sum())
    return found


def said(found: Any) -> dict[str, tuple[int, int]]:
    return {row.module: (row.updates, row.lost) for row in found.layers}


def stepped(step: Callable[[], Any]) -> list[str]:
    """Makes a step; returns what it warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        step()
    return [str(one.message) for one in told if one.category is UserWarning]


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("name", MADE)
def test_updates_that_rounding_loses_are_counted(queue: cl.CommandQueue, name: str, dtype: str) -> None:
    """Beside fp32 masters, whose step from the same weights says what it is that is rounded."""
    with amp.init(dtype=dtype):
        loop, exact = Loop(queue, name, dtype, False), Loop(queue, name, dtype, True)
        loop.draw(), exact.draw()
        before = exact.values()
        exact.optimizer.step()
        by_parameter = lost(before, exact.values(), dtype)
        updates, gone = map(sum, zip(*by_parameter.values(), strict=True))
        assert 0 < gone < updates
        (message,) = stepped(loop.optimizer.step)
        worst = max(by_parameter, key=lambda x: by_parameter[x][1] / max(1, by_parameter[x][0]))
        share = 100 * by_parameter[worst][1] / by_parameter[worst][0]
        assert f"{dtype} loses {share:.3g} % of the updates of {worst}, and {100 * gone / updates:.3g} %" in message
        # The next step, which is only looked at, from what the first has made.
        for master, value in zip(amp.master_params(exact.optimizer), loop.values(), strict=True):
            np.testing.assert_array_equal(quantize(master.to_host(), dtype), value)
            master.write(value)
        loop.draw(), exact.draw()
        before = exact.values()
        kept = values_of(loop), state_of(loop)
        found = observe_lost_updates(loop.optimizer.step)
        assert (values_of(loop), state_of(loop)) == kept
        exact.optimizer.step()
        if name == "RMSProp":
            assert found.layers == []
            assert "RMSProp's updates is not measured" in str(found)
        else:
            assert said(found) == lost(before, exact.values(), dtype)
            assert f"updates: {found.layers[0]}" in str(found)
        later, all_later = map(sum, zip(*lost(before, exact.values(), dtype).values(), strict=True))
        assert len(stepped(loop.optimizer.step)) == (all_later / later >= 4 * gone / updates)
        for rounded, parameter in zip(exact.values(), loop.params, strict=True):
            np.testing.assert_array_equal(quantize(rounded, dtype), to_numpy(parameter))


@pytest.mark.parametrize("name", ["AdamW", "AdamW as one"])
def test_moments_that_were_loaded_and_wait_for_a_step_count(queue: cl.CommandQueue, name: str) -> None:
    with amp.init(dtype="bfloat16"):
        earlier = Loop(queue, name, "bfloat16", True)
        earlier.draw()
        earlier.optimizer.step()
        loop, exact = Loop(queue, name, "bfloat16", False), Loop(queue, name, "bfloat16", True)
        for each in (loop, exact):
            each.optimizer.load_state_dict(earlier.optimizer.state_dict())
            each.draw()
        before = exact.values()
        found = observe_lost_updates(loop.optimizer.step)
        exact.optimizer.step()
    assert said(found) == lost(before, exact.values(), "bfloat16")


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("keeps", [keeps for keeps in KEEPS if keeps is not False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_keeps_updates_has_nothing_to_say(
    queue: cl.CommandQueue, name: str, keeps: bool | str, dtype: str
) -> None:
    with amp.init(dtype=dtype):
        loop = Loop(queue, name, dtype, keeps)
        loop.draw()
        assert stepped(loop.optimizer.step) == []
        assert not observe_lost_updates(loop.optimizer.step)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("lr", "warnings"), [(0.25, 0), (1e-6, 1)], ids=["nothing", "all"])
@pytest.mark.parametrize("name", ["Momentum", "Adam", "AdamW8bit"])
def test_a_step_that_loses_nothing_is_not_warned_of(
    queue: cl.CommandQueue, name: str, lr: float, warnings: int, dtype: str
) -> None:
    with amp.init(dtype=dtype):
        loop = Loop(queue, name, dtype, False)
        loop.optimizer.lr = lr
        for master, param in zip(amp.master_params(loop.optimizer), loop.params, strict=True):
            master.write(np.ones(param.shape, np.float32))
            param.grad = to_device(queue, np.ones(param.shape))
        assert len(stepped(loop.optimizer.step)) == warnings


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("name", MADE)
def test_a_scaler_without_a_handle_warns_of_it_once(queue: cl.CommandQueue, name: str, dtype: str) -> None:
    model, scaler, told = mlp(queue, 8, 16, 4), amp.GradScaler(init_scale=2.0**10), []
    optimizer = MADE[name](model.parameters())
    amp.decorate(model, optimizer, dtype=dtype, master_weight=False)
    optimizer.lr = 1e-6
    for _ in range(4):
        optimizer.zero_grad()
        with amp.autocast(dtype=dtype):
            loss = loss_of(model, batch(queue, 4, 8, 4))
        scaler.scale(loss).backward()
        told += stepped(partial(scaler.step, optimizer))
        scaler.update()
    (message,) = told
    assert f"{dtype} loses" in message


@pytest.mark.parametrize("recorded", [False, True])
def test_a_learning_rate_that_falls_is_told_of(queue: cl.CommandQueue, recorded: bool) -> None:
    with amp.init(dtype="bfloat16"):
        loop = Loop(queue, "Momentum", "bfloat16", False)
        loop.optimizer.momentum = 0.0
        step = amp.record(loop.optimizer.step) if recorded else loop.optimizer.step
        said = []
        for rate in [0.25] * 5 + [1e-6] * 12:
            loop.optimizer.lr = rate
            for param in loop.params:
                param.grad = to_device(queue, np.ones(param.shape))
            said.append([message.partition("loses ")[2][:4] for message in stepped(step)])
    lost = [number for number, messages in enumerate(said, start=1) if any(said == "100 " for said in messages)]
    assert lost == [8]  # and not in the 16th


def decorated(queue: cl.CommandQueue, make: Callable[[Any], Any], door: str) -> tuple[Any, Any, Any]:
    """A model in float16 without masters, its optimizer, and the handle."""
    model = mlp(queue, 8, 16, 4)
    optimizer = make(model.parameters())
    if door == "O3":
        model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
        return model, optimizer, session.require_handle()
    model, optimizer = amp.decorate(model, optimizer, master_weight=False)
    return model, optimizer, amp.init(level="O2", loss_scale=8.0)


@pytest.mark.parametrize("door", ["decorate", "O3"])
@pytest.mark.long
def test_layers_are_named_where_rounding_loses_most(
    queue: cl.CommandQueue, door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clamp.debug.gain._SECONDS", 0.0)
    monkeypatch.setattr("clamp.debug.gain._PASSES", 1)
    model, optimizer, handle = decorated(queue, partial(Adam, lr=1e-4), door)
    data = batch(queue, 16, 8, 4)
    with pytest.warns(UserWarning, match=r"float16 loses .* of the updates of layers\.[02], and .* of all"):
        step(handle, model, optimizer, data)
    step(handle, model, optimizer, data)
    found = handle.summary(lambda: step(handle, model, optimizer, data))
    assert {row.module for row in found.updates.layers} == {"layers.0", "layers.2"}
    assert 0 < found.updates.layers[1].share <= found.updates.layers[0].share < 1
    eps = "Adam's eps, 1e-08, is below float16's smallest number, 6e-08: it counts, for the step computes in float32"
    assert found.updates.notes == (eps,)
    for words in (f"updates: float16 loses {percent(found.updates.layers[0].share)} of the updates of layers.", eps):
        assert words in str(found)
    handle.report(tmp_path / "run.json")
    handle.report(tmp_path / "run.html")
    told = read_run(tmp_path / "run.json")["updates"]
    assert told["notes"] == [eps]
    assert [(x["module"], x["dtype"], x["updates"], x["lost"]) for x in told["layers"]] == list(found.updates.layers)
    assert str(found.updates.layers[0]) in (tmp_path / "run.html").read_text("utf-8")


class Holding:
    """A model of one weight."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def parameters(self) -> list[Parameter]:
        return [self.weight]


class Plain:
    """An optimizer of a user's, that steps 16-bit tensors itself."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params, self.eps = list(params), 1e-8

    def step(self) -> None:
        """Does nothing."""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Plain, ["Plain's eps, 1e-08, is below float16's smallest number, 6e-08: it is 0", "Plain's updates is not"]),
        (partial(AdamW, lr=1e-3, eps=1e-6), ["AdamW's updates is not measured: step() is called with arguments"]),
        (partial(SGD, lr=1e-3), ["1 parameters of SGD are not measured: the step is not finite"]),
    ],
)
def test_what_cannot_be_measured_is_said(queue: cl.CommandQueue, make: Callable[[Any], Any], said: list[str]) -> None:
    weight: Any = Parameter.from_host(queue, np.ones(4, np.float32))
    if make is Plain:
        weight = to_device(queue, np.ones(4), "float16")
        weight.requires_grad = True
    optimizer = make([weight])
    if make is not Plain:
        amp.decorate(Holding(weight), optimizer, master_weight=False)
    with amp.init(loss_scale=8.0) as handle:

        def run() -> None:
            scaled_backward(handle, ag.sum(ag.tensor(weight)), optimizer)
            if isinstance(optimizer, SGD):
                weight.grad.write(np.full(4, np.inf, np.float32))
            optimizer.step(**{"max_norm": 1.0} if isinstance(optimizer, AdamW) else {})

        found = observe_lost_updates(run)
    assert found.layers == []
    for words, note in zip(said, found.notes, strict=True):
        assert words in note


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "0 %"), (1e-9, "less than 0.01 %"), (9.9e-5, "less than 0.01 %"), (1e-4, "0.01 %"), (0.4149, "41.5 %"),
     (1.0, "100 %")],
)  # fmt: skip
def test_what_is_more_than_nothing_does_not_look_like_nothing(share: float, shown: str) -> None:
    assert percent(share) == shown
