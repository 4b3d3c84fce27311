"""Cures as code: the user's own call with a change, or what fits a loop that has no handle. They cure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import netcl
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.amp import GradScaler as NetclScaler

from clamp import amp, session
from clamp.bridge import Node
from clamp.casting.regions import InitCall
from clamp.compat.paddle import GradScaler as PaddleScaler
from tests.debug.faults import Small, Train, Training

TOO_HIGH = 2.0**24


pytestmark = pytest.mark.usefixtures("shut_down")


def beyond_float16(h: Node) -> Node:
    """300^2, of what a layer gives."""
    h = ag.add(ag.sub(h, h), 300.0)
    return ag.mul(h, h)


OPTIONS: list[dict[str, Any]] = [
    {},
    {
        "level": "O2",
        "loss_scale": 0.5,
        "custom_black_list": ("tanh",),
        "custom_white_list": ["mul"],
        "debug": "summary",
    },
    {"dtype": np.float16, "loss_scale": 0.5, "check_finite": False},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_black_list_is_told_with_all_that_init_was_given(queue: cl.CommandQueue, options: dict[str, Any]) -> None:
    training = Small(queue, beyond_float16)
    handle = amp.init(**options)
    training.step(handle)()
    found = handle.explain(training.step(handle))
    handle.shutdown()
    assert (found.kind, found.first.function) == ("forward", "mul"), found
    code, _, or_else = found.cure.partition("  # or ")
    assert or_else == 'dtype="bfloat16"'
    names: dict[str, Any] = {"amp": amp}
    exec(code, names)  # what the user is told to write
    asked = names["handle"]._region.init_call.given
    kept = {name: value for name, value in options.items() if name not in ("dtype", "custom_black_list")}
    for name, value in kept.items():
        if name != "custom_white_list":
            assert asked[name] == value
    assert set(asked["custom_black_list"]) == {*options.get("custom_black_list", ()), "mul"}
    assert not asked.get("custom_white_list")
    for _ in range(20):
        training.step(names["handle"])()
    assert names["handle"].last_step.stepped


def test_paths_and_names_are_code() -> None:
    init_call = InitCall(given={"lists": Path("my lists.toml"), "custom_black_list": ("a",), "dtype": np.float16})
    expected = 'handle = amp.init(lists="my lists.toml", custom_black_list=["a", "b"], dtype="float16")'
    assert init_call.in_float32(["b"]) == expected
    assert InitCall(given={"debug": "summary"}).explaining() == 'handle = amp.init(debug=["attribution", "summary"])'


def test_a_static_scale_of_init_is_told_with_all_that_it_was_given(queue: cl.CommandQueue) -> None:
    training = Training(queue, "none")
    handle = amp.init(level="O2", loss_scale=TOO_HIGH)
    training.step(handle)()
    found = handle.explain(training.step(handle))
    assert (found.kind, found.cure) == ("scale", 'handle = amp.init(level="O2", loss_scale="dynamic")')


def test_apex_has_no_lists_and_is_told_of_registration(queue: cl.CommandQueue) -> None:
    training = Small(queue, beyond_float16)
    layer, optimizer = amp.initialize(training.layer, training.optimizer, verbosity=0, loss_scale=1.0)

    def step() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(training.loss(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    step()
    found = amp.debugging.explain(step)
    assert found.cure == 'amp.register_float_function(netcl.autograd, "mul")  # before amp.initialize(...)'
    session.shutdown()
    exec(found.cure, {"amp": amp, "netcl": netcl})
    amp.initialize(layer, optimizer, verbosity=0, loss_scale=1.0)
    step()
    handle = session.require_handle()
    assert handle.last_step.stepped, handle.last_step


def test_a_static_scale_of_apex(queue: cl.CommandQueue) -> None:
    training = Training(queue, "none")
    amp.initialize(training.model, training.optimizer, verbosity=0, loss_scale=TOO_HIGH, opt_level="O1")
    found = amp.debugging.explain(training.step(session.require_handle()))
    assert found.kind == "scale"
    assert found.cure == 'model, optimizer = amp.initialize(model, optimizer, loss_scale="dynamic", verbosity=0)'


def test_a_graphs_static_scale(queue: cl.CommandQueue) -> None:
    training = Training(queue, "none")
    train = Train(training, amp.StaticGradScaler(TOO_HIGH))
    train(*training.data)
    found = train.explain(*training.data)
    assert (found.kind, found.cure) == ("scale", "graph.set_grad_scaler(amp.GradScaler())")


def loop(training: Training | Small, scaler: Any) -> Callable[[], None]:
    def step() -> None:
        training.optimizer.zero_grad()
        with amp.autocast():
            loss = training.loss()
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()

    return step


@pytest.mark.parametrize("dynamic", [True, False])
def test_paddles_scaler_comes_down_only_if_it_is_dynamic(queue: cl.CommandQueue, dynamic: bool) -> None:
    scaler = PaddleScaler(init_loss_scaling=TOO_HIGH, use_dynamic_loss_scaling=dynamic)
    found = amp.debugging.explain(loop(Training(queue, "none"), scaler))
    assert found.kind == "scale"
    assert found.cure == ("" if dynamic else "scaler = GradScaler(use_dynamic_loss_scaling=True)")
    assert ("comes down by itself" in found.why) == dynamic


def test_netcls_scaler_comes_down(queue: cl.CommandQueue) -> None:
    training, scaler = Training(queue, "none"), NetclScaler(init_scale=TOO_HIGH)

    def step() -> None:
        training.optimizer.zero_grad()
        scaler.scale_loss(training.loss()).backward()
        scaler.step(training.optimizer, training.model.parameters())

    handle = amp.init()
    found = handle.explain(step)
    assert (found.kind, found.cure) == ("scale", ""), found
    assert len(handle.history) == 0


def test_a_loop_without_a_handle_is_told_of_a_region(queue: cl.CommandQueue) -> None:
    cure = amp.debugging.explain(loop(Small(queue, beyond_float16), amp.GradScaler(init_scale=1.0))).cure
    assert cure.startswith('with amp.autocast(dtype="float32"):')


def test_a_loss_that_was_not_scaled(queue: cl.CommandQueue) -> None:
    training = Training(queue, "none")
    amp.init()

    def step() -> None:
        training.optimizer.zero_grad()
        ag.mul(training.loss(), TOO_HIGH).backward()
        training.optimizer.step()

    with pytest.warns(UserWarning, match="not scaled"):
        found = amp.debugging.explain(step)
    assert found.kind == "scale", found
    assert found.cure.startswith("with handle.scale_loss(loss, optimizer) as scaled_loss:")
