"""Gradients that were not finite before a pass, or that the host meets too early: what a loop is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Parameter
from tests.compat.test_scalers import FACES
from tests.networks import batch, loss_of, mlp
from tests.scaling.test_overflow import plant
from tests.scaling.test_shared import parameter, scaled, summed

pytestmark = pytest.mark.usefixtures("shut_down")


# ---------------------------------------------------------------------------------------------- a forgotten zero_grad


@pytest.fixture
def param(queue: cl.CommandQueue) -> Parameter:
    return parameter(queue)


@pytest.fixture
def optimizer(param: Parameter) -> SGD:
    return SGD([param], lr=1.0)


class Handled:
    """The two lines."""

    def __init__(self, **options: Any) -> None:
        self.handle = amp.init(**options)

    def step(self, param: Any, optimizer: Any, bad: bool) -> None:
        scaled(self.handle, summed(param), optimizer, bad=param if bad else None)
        optimizer.step()


class ByScaler:
    """A GradScaler."""

    def __init__(self, face: str) -> None:
        self.handle = amp.init()
        self._scaler = FACES[face]()

    def step(self, param: Any, optimizer: Any, bad: bool) -> None:
        self._scaler.scale(summed(param)).backward()
        if bad:
            plant(param)
        self._scaler.step(optimizer)
        self._scaler.one.update()


class Alone:
    """No scaling."""

    def __init__(self) -> None:
        self.handle = amp.init(dtype="bfloat16")

    def step(self, param: Any, optimizer: Any, bad: bool) -> None:
        summed(param).backward()
        if bad:
            plant(param)
        optimizer.step()


LOOPS: dict[str, Callable[[], Any]] = {
    "float16": Handled,
    "a static scale": lambda: Handled(loss_scale=8.0),
    "bfloat16": lambda: Handled(dtype="bfloat16"),
    "no scaling": Alone,
    "GradScaler": lambda: ByScaler("pytorch"),
    "Paddle's": lambda: ByScaler("paddle"),
}
TOLD = "were not finite before this pass: call zero_grad"


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.long
def test_a_forgotten_zero_grad_after_an_overflow_is_named(param: Parameter, optimizer: SGD, name: str) -> None:
    loop = LOOPS[name]()
    loop.step(param, optimizer, True)
    assert "before this pass" not in loop.handle.last_step.reason
    with pytest.warns(UserWarning, match=TOLD):
        loop.step(param, optimizer, False)
    assert TOLD in loop.handle.last_step.reason

    def go_on() -> None:
        for _ in range(25):
            loop.step(param, optimizer, False)

    with pytest.raises(FloatingPointError, match=TOLD):
        go_on()
    assert loop.handle.history[-1].step <= 27
    if not isinstance(loop, ByScaler):
        param.grad = None
        loop.step(param, optimizer, False)
        assert loop.handle.last_step.stepped


def test_a_forgotten_zero_grad_is_named_where_netcls_scaler_decides(param: Parameter, optimizer: SGD) -> None:
    loop = ByScaler("netcl")
    loop.step(param, optimizer, True)
    with pytest.warns(UserWarning, match=TOLD):
        loop.step(param, optimizer, False)
    assert TOLD in loop.handle.last_step.reason


MENDED: dict[str, Callable[[Any, Any], object]] = {
    "zero_grad": lambda param, optimizer: optimizer.zero_grad(),
    "None": lambda param, optimizer: setattr(param, "grad", None),
    "written": lambda param, optimizer: param.grad.write(np.zeros(param.grad.shape, np.float32)),
}


@pytest.mark.parametrize("how", MENDED)
@pytest.mark.parametrize("name", LOOPS)
def test_what_overflows_anew_was_not_kept(param: Parameter, optimizer: SGD, name: str, how: str) -> None:
    loop = LOOPS[name]()
    for _ in range(3):
        loop.step(param, optimizer, True)
        assert not loop.handle.last_step.stepped
        assert "before this pass" not in loop.handle.last_step.reason
        MENDED[how](param, optimizer)


# ---------------------------------------------------------------------------------------------- used too early

MEETINGS: dict[str, Callable[[Any], object]] = {
    "read": lambda grad: grad.to_host(),
    "read later": lambda grad: grad.to_host_async(),
    "written": lambda grad: grad.write(np.clip(np.ones(grad.shape, np.float32), -1, 1)),
    "added to": lambda grad: grad + grad,
    "a function's": lambda grad: ag.square(ag.tensor(grad)),
}


@pytest.mark.parametrize("how", MEETINGS)
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"loss_scale": 1.0}], ids=str)
def test_no_warning_of_a_scale_where_there_is_none(queue: cl.CommandQueue, settings: dict[str, Any], how: str) -> None:
    model, data = mlp(queue, 4, 4), batch(queue, 2, 4, 4)
    optimizer = SGD(model.parameters())
    with amp.init(**settings) as handle, handle.scale_loss(loss_of(model, data), optimizer) as scaled_loss:
        scaled_loss.backward()
        for param in model.parameters():
            MEETINGS[how](param.grad)


@pytest.mark.parametrize("how", MEETINGS)
def test_a_gradient_that_is_used_while_it_is_scaled_is_worth_one_warning(queue: cl.CommandQueue, how: str) -> None:
    model, data = mlp(queue, 4, 4), batch(queue, 2, 4, 4)
    optimizer = SGD(model.parameters())
    handle = amp.init()

    def meet_all() -> None:
        for param in model.parameters():
            MEETINGS[how](param.grad)

    def run() -> None:
        with handle.scale_loss(loss_of(model, data), optimizer) as scaled_loss:
            scaled_loss.backward()
            meet_all()
        meet_all()

    with pytest.warns(UserWarning, match="multiplied by the loss scale") as met:
        run()
    assert len(met) == 1
    assert met[0].filename == __file__
