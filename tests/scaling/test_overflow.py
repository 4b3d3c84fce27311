"""An overflow skips exactly one step, bit for bit, halves the scale once, and costs nothing else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.optim import SGD, Adam, AdamW, Momentum, RMSProp

from clamp import amp
from clamp.bridge import Tensor
from clamp.params import gradient_marks
from tests.networks import batch, loss_of, mlp, scaled_backward, step, weights_of
from tests.reference import assert_same

WIDTHS = (16, 128, 128, 64, 8)  # 8 parameters, 26,000 elements: enough for AdamW's fused path

OPTIMIZERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "sgd": lambda params: SGD(params, lr=1e-3),
    "sgd_momentum": lambda params: SGD(params, lr=1e-3, momentum=0.9),
    "momentum": lambda params: Momentum(params, lr=1e-3),
    "adam": lambda params: Adam(params, lr=1e-3),
    "adamw_fused": lambda params: AdamW(params, lr=1e-3),
    "adamw_per_parameter": lambda params: _one_by_one(AdamW(params, lr=1e-3)),
    "rmsprop": lambda params: RMSProp(params, lr=1e-3),
}


def _one_by_one(optimizer: AdamW) -> AdamW:
    optimizer._fused_enabled = False
    return optimizer


def state_of(value: Any, queue: cl.CommandQueue) -> Any:
    """Everything an optimizer holds, as bytes and plain values."""
    if isinstance(value, cl.Buffer):
        host = np.empty(value.size, np.uint8)
        cl.enqueue_copy(queue, host, value)
        return host.tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Tensor):
        return value.to_host().tobytes()
    if isinstance(value, dict):
        return {str(key): state_of(item, queue) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [state_of(item, queue) for item in value]
    return value if isinstance(value, int | float | str | bool | None) else type(value).__name__


def optimizer_state(optimizer: Any, queue: cl.CommandQueue) -> Any:
    return state_of(vars(optimizer), queue)


def plant(param: Tensor, value: float = np.inf) -> None:
    """Writes a non-finite value into the middle of a parameter's gradient."""
    mark = gradient_marks.mark_of(param.grad)
    gradient_marks.set_mark(param.grad, None)  # who reads a scaled one on the host is warned
    grad = param.grad.to_host().copy()
    grad.reshape(-1)[grad.size // 2] = value
    param.grad.write(grad)
    gradient_marks.set_mark(param.grad, mark)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_no_bit(queue: cl.CommandQueue, handle: amp.AmpHandle, name: str, value: float) -> None:
    model, data = mlp(queue, *WIDTHS), batch(queue, 32, 16, 8)
    optimizer = OPTIMIZERS[name](model.parameters())
    step(handle, model, optimizer, data)
    assert handle.last_step == amp.StepReport(True, "", 2.0**16, scale_before=2.0**16, step=1)
    weights, state = weights_of(model), optimizer_state(optimizer, queue)

    optimizer.zero_grad()
    with handle.scale_loss(loss_of(model, data), optimizer) as scaled_loss:
        scaled_loss.backward()
        plant(optimizer.params[2], value)
    assert optimizer.step() is None

    assert_same(weights_of(model), weights)
    assert optimizer_state(optimizer, queue) == state
    assert handle.loss_scale == 2.0**15, "the scale halves once"
    assert handle.last_step is not None
    assert not handle.last_step.stepped
    kind, count = ("nan" if np.isnan(value) else "inf"), (handle.last_step.infs, handle.last_step.nans)
    assert handle.last_step.reason == f"{kind} in 1 element of the gradients of {handle.last_step.parameters[0]}"
    assert count == ((0, 1) if np.isnan(value) else (1, 0))
    assert (handle.last_step.scale_before, handle.last_step.scale) == (2.0**16, 2.0**15)

    step(handle, model, optimizer, data)
    assert handle.last_step.stepped
    assert handle.loss_scale == 2.0**15
    changed = [not np.array_equal(a, b) for a, b in zip(weights, weights_of(model), strict=True)]
    assert all(changed[: len(optimizer.params)]), "the next step works"


def test_a_real_overflow_is_found(queue: cl.CommandQueue) -> None:
    model, (x, y) = mlp(queue, 16, 32, 8), batch(queue, 32, 16, 8)
    y.write(y.to_host() * 1e4)  # 2 (p - y) / 1024 * 2^16 leaves half's range in the backward pass
    optimizer = SGD(model.parameters(), lr=1e-9)
    with amp.init(on_overflow="skip") as handle:
        before = weights_of(model)
        step(handle, model, optimizer, (x, y))
        assert not handle.last_step.stepped
        assert_same(weights_of(model), before)
        skips = 1
        while not handle.last_step.stepped and skips < 30:
            step(handle, model, optimizer, (x, y))
            skips += 1
        assert handle.last_step.stepped, "the scale comes down to where the gradients fit"
        assert handle.loss_scale == 2.0 ** (16 - (skips - 1))


def test_any_overflow_since_the_last_step_skips_it_and_halves_once(
    queue: cl.CommandQueue, handle: amp.AmpHandle
) -> None:
    model, data = mlp(queue, 16, 32, 8), batch(queue, 32, 16, 8)
    optimizer = SGD(model.parameters(), lr=1e-3)
    before = weights_of(model)
    for overflows in (False, True, True, False):
        with handle.scale_loss(loss_of(model, data), optimizer) as scaled_loss:
            scaled_loss.backward()
            if overflows:
                plant(optimizer.params[0])
    optimizer.step()
    assert not handle.last_step.stepped
    assert handle.loss_scale == 2.0**15
    assert_same(weights_of(model), before)
    optimizer.zero_grad()
    step(handle, model, optimizer, data)
    assert handle.last_step.stepped


def test_the_scale_grows_after_clean_steps(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 4, 4), batch(queue, 4, 4, 4)
    optimizer = SGD(model.parameters(), lr=1e-6)
    with amp.init() as handle:
        for _ in range(9):
            step(handle, model, optimizer, data)
        state = amp.state_dict()
        state["loss_scaler0"]["unskipped"] += 1980
        amp.load_state_dict(state)
        for _ in range(10):
            step(handle, model, optimizer, data)
        assert handle.loss_scale == 2.0**16
        step(handle, model, optimizer, data)
        assert handle.loss_scale == 2.0**17


def test_a_model_that_computes_nan_raises_instead_of_stalling(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 4, 4), batch(queue, 4, 4, 4)
    optimizer = SGD(model.parameters())
    with amp.init() as handle, pytest.raises(FloatingPointError, match=r"layers\.0\.bias"):  # noqa: PT012
        for _ in range(100):
            optimizer.zero_grad()
            with handle.scale_loss(loss_of(model, data), optimizer) as scaled_loss:
                scaled_loss.backward()
                plant(optimizer.params[1], np.nan)
            optimizer.step()
    assert handle.loss_scale == 2.0**-14, "the floor"


def test_step_keeps_its_signature_and_refuses_a_closure(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    model, data = mlp(queue, *WIDTHS), batch(queue, 32, 16, 8)
    optimizer = AdamW(model.parameters())
    assert optimizer.step.__self__ is optimizer
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)
    assert optimizer.t == 0
    scaled_backward(handle, loss_of(model, data), optimizer)
    optimizer.step(max_norm=1.0)
    queue.finish()  # AdamW's shared memory for max_norm dies with it, and kernels may still be using it
    assert optimizer.t == 1
    assert "step" not in vars(optimizer), "nothing unpicklable is left on the optimizer"
    assert pickle.loads(pickle.dumps(copy.copy(vars(optimizer)["lr"]))) == optimizer.lr


def test_a_failed_loss_does_not_count(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    model, data = mlp(queue, 16, 32, 8), batch(queue, 32, 16, 8)
    optimizer = handle.wrap_optimizer(SGD(model.parameters(), lr=1e-3))
    for _ in range(3):
        with pytest.raises(KeyError), optimizer.scale_loss(loss_of(model, data)):
            raise KeyError
        with pytest.raises(TypeError), optimizer.scale_loss(None):
            pass
    with optimizer.scale_loss(loss_of(model, data)) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert handle.last_step.stepped
