"""PyTorch's way of saying it: ``amp.GradScaler``, with its complete state machine, and what scripts do around it.

docs/coming-from-pytorch.md tells the differences. ``amp.autocast`` is in test_autocast.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core.device import CPUQueue
from netcl.nn.layers import Sequential
from netcl.optim import Adam, clip_grad_norm

from clamp import amp, session
from clamp.bridge import Node, Tensor
from tests.compat.test_scalers import Steps, under
from tests.networks import batch, loss_of, mlp
from tests.reference import to_device, to_numpy
from tests.scaling.test_overflow import plant

DTYPES = ("float16", "bfloat16")

__all__ = ["under"]  # a fixture
pytestmark = pytest.mark.usefixtures("shut_down")


def scaled_backward(scaler: amp.GradScaler, model: Sequential, data: Any, dtype: str = "float16") -> Node:
    with amp.autocast(dtype=dtype):
        loss = loss_of(model, data)
    scaler.scale(loss).backward()
    return loss


@pytest.fixture
def setup(queue: cl.CommandQueue) -> Steps:
    return Steps(queue, "pytorch")


# ---------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorchs_loop_trains_as_fp32_does(queue: cl.CommandQueue, under: str, dtype: str) -> None:
    def train(dtype: str) -> list[float]:
        model, data = mlp(queue, 8, 32, 4), batch(queue, 16, 8, 4)
        optimizer, scaler, losses = Adam(model.parameters(), lr=1e-2), amp.GradScaler(), []
        for _ in range(15):
            optimizer.zero_grad()
            loss = scaled_backward(scaler, model, data, dtype)
            scaler.unscale_(optimizer)
            clip_grad_norm(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.value.to_host()[0]))
        return losses

    losses = train(dtype)
    np.testing.assert_allclose(losses, train("float32"), rtol=0.03)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("region", ["none", "disabled"])
def test_without_casts_gradients_are_right_too(queue: cl.CommandQueue, region: str) -> None:
    """netcl's own mse_loss ignores the scaled gradient that arrives."""
    session.forget_patches()
    scaler, weight = amp.GradScaler(), to_device(queue, [[3.0]])
    weight.requires_grad = True
    with amp.autocast(enabled=False) if region == "disabled" else nullcontext():
        loss = ag.mse_loss(ag.tensor(weight, requires_grad=True), ag.tensor(to_device(queue, [[1.0]])))
    scaler.scale(loss).backward()
    optimizer = OwnOptimizer([weight])
    scaler.unscale_(optimizer)
    assert to_numpy(weight.grad).tolist() == [[4.0]]
    assert scaler.step(optimizer) == "stepped"


def test_netcls_numpy_backend_is_left_alone() -> None:
    weight = Tensor.from_host(CPUQueue(), np.ones((1, 1), np.float32), backend="cpu")
    weight.requires_grad = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once in a process it says so
        scaler, optimizer = amp.GradScaler(), OwnOptimizer([weight])
        with amp.autocast():
            loss = ag.sum(ag.mul(ag.tensor(weight, requires_grad=True), 3.0))
        assert scaler.scale(loss) is loss
        loss.backward()
        assert scaler.step(optimizer) == "stepped"
        scaler.update()
    assert weight.grad.to_host().tolist() == [[3.0]]
    assert scaler.get_scale() == 2.0**16


# ---------------------------------------------------------------------------------------------- scale


def test_scale_multiplies_nodes_in_nested_iterables(queue: cl.CommandQueue) -> None:
    class Losses(NamedTuple):
        first: Node
        second: Node

    scaler = amp.GradScaler(init_scale=8.0)
    x, y = (ag.tensor(to_device(queue, [value], dtype)) for value, dtype in ((3.0, "float32"), (5.0, "float16")))
    scaled = scaler.scale([x, (x, y), Losses(x, y)])
    assert isinstance(scaled, list)
    assert isinstance(scaled[1], tuple)
    assert isinstance(scaled[2], Losses)
    values = [scaled[0], *scaled[1], scaled[2].first, scaled[2].second]
    assert [float(to_numpy(value.value)[0]) for value in values] == [24, 24, 40, 24, 40]
    assert {value.value.dtype for value in values} == {"float32"}
    assert [float(to_numpy(value.value)[0]) for value in scaler.scale(node for node in (x, y))] == [24, 40]
    assert float(to_numpy(scaler.scale(x.value))[0]) == 24  # a bare tensor


def test_scale_takes_tensors_of_any_shape(queue: cl.CommandQueue) -> None:
    x = to_device(queue, [[1.0, 2.0], [3.0, 4.0]])
    x.requires_grad = True
    node = amp.GradScaler(init_scale=4.0).scale(ag.tensor(x, requires_grad=True))
    assert to_numpy(node.value).tolist() == [[4, 8], [12, 16]]
    node.backward()
    assert to_numpy(x.grad).tolist() == [[4, 4], [4, 4]]


@pytest.mark.parametrize("output", [1.0, None, "loss", {"loss": 1}, [1.0], ["loss"], np.ones(2)])
def test_scale_of_what_is_no_tensor_raises(output: Any) -> None:
    with pytest.raises(ValueError, match=r"scale\(\) takes a node, a tensor or an iterable"):
        amp.GradScaler().scale(output)


# ---------------------------------------------------------------------------------------------- unscale_


class OwnOptimizer:
    """An optimizer that is not netcl's."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.calls: list[Any] = []

    def step(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "stepped"

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale_of_16_bit_gradients_names_master_weights(queue: cl.CommandQueue, dtype: str) -> None:
    weight = to_device(queue, np.ones((4, 4)), dtype)
    weight.requires_grad = True
    optimizer, scaler = OwnOptimizer([weight]), amp.GradScaler(init_scale=2.0)
    with amp.autocast(dtype=dtype):
        loss = ag.sum(ag.matmul(ag.tensor(to_device(queue, np.ones((2, 4)))), ag.tensor(weight, requires_grad=True)))
    scaler.scale(loss).backward()
    with pytest.raises(ValueError, match="master weights"):
        scaler.unscale_(optimizer)
    assert to_numpy(weight.grad).tolist() == [[4] * 4] * 4  # still scaled


# ---------------------------------------------------------------------------------------------- step


def test_step_passes_arguments_on_and_returns_the_result(queue: cl.CommandQueue, setup: Steps) -> None:
    optimizer = OwnOptimizer(setup.params)
    setup.backward()
    assert setup.scaler.step(optimizer, 1, rate=2) == "stepped"
    assert optimizer.calls == [((1,), {"rate": 2})]


@pytest.mark.parametrize("arguments", [((lambda: None,), {}), ((), {"closure": None}), ((), {"f": lambda: None})])
def test_a_closure_is_rejected(setup: Steps, arguments: Any) -> None:
    setup.backward()
    with pytest.raises(RuntimeError, match="closure"):
        setup.scaler.step(setup.optimizer, *arguments[0], **arguments[1])


def test_an_optimizer_without_inf_steps_when_another_has_one(setup: Steps, under: str) -> None:
    healthy, sick = OwnOptimizer(setup.params[:2]), OwnOptimizer(setup.params[2:])
    setup.backward()
    plant(setup.params[3])
    assert setup.scaler.step(sick) is None
    assert sick.calls == []
    assert setup.scaler.step(healthy) == "stepped"
    setup.scaler.update()
    assert setup.scaler.get_scale() == 2.0**15  # lowered once
    assert setup.scaler.state_dict()["_growth_tracker"] == 0


def test_a_parameter_of_two_optimizers_is_divided_once(setup: Steps, under: str) -> None:
    optimizers = OwnOptimizer(setup.params), OwnOptimizer(setup.params[1:])
    setup.backward()
    scaled = setup.params[1].grad.to_host().copy()
    for optimizer in optimizers:
        assert setup.scaler.step(optimizer) == "stepped"
    np.testing.assert_array_equal(setup.params[1].grad.to_host(), scaled / 2**16)

    setup.scaler.update()
    setup.backward()
    plant(setup.params[1])
    assert [setup.scaler.step(optimizer) for optimizer in optimizers] == [None, None]


def test_two_losses_and_two_optimizers(setup: Steps, under: str) -> None:
    """PyTorch's recipe for several losses."""
    first, second = OwnOptimizer(setup.params[:2]), OwnOptimizer(setup.params[2:])
    with amp.autocast():
        losses = [loss_of(setup.model, setup.data), ag.mul(loss_of(setup.model, setup.data), 2.0)]
    setup.scaler.scale(losses[0]).backward(retain_graph=True)
    setup.scaler.scale(losses[1]).backward()
    setup.scaler.unscale_(first)
    three = setup.params[0].grad.to_host().copy()
    assert [setup.scaler.step(optimizer) for optimizer in (first, second)] == ["stepped"] * 2
    setup.scaler.update()
    setup.backward()
    setup.scaler.unscale_(first)
    np.testing.assert_allclose(three, 3 * setup.params[0].grad.to_host(), rtol=2e-2, atol=1e-6)


# ---------------------------------------------------------------------------------------------- update


@pytest.mark.parametrize("kind", ["float", "int", "tensor", "node"])
def test_update_sets_a_new_scale(queue: cl.CommandQueue, setup: Steps, kind: str) -> None:
    tensor = to_device(queue, [32.0])
    new_scale = {"float": 32.0, "int": 32, "tensor": tensor, "node": ag.tensor(tensor)}[kind]
    setup.scaler.update(new_scale)  # without a step before it, before any tensor was scaled
    assert setup.scaler.get_scale() == 32
    setup.backward()
    plant(setup.params[0])
    setup.scaler.step(setup.optimizer)
    setup.scaler.update(new_scale)  # and the overflow moves it no more
    assert setup.scaler.get_scale() == 32
    setup.backward()
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    assert (setup.scaler.get_scale(), setup.scaler.state_dict()["_growth_tracker"]) == (32, 1)


@pytest.mark.parametrize("new_scale", [0.0, -1.0, np.inf, np.nan, 1e39, "2", True, False, np.True_])
def test_update_refuses_what_is_no_scale(setup: Steps, new_scale: Any) -> None:
    setup.backward()
    with pytest.raises(ValueError, match=r"."):
        setup.scaler.update(new_scale)
    assert setup.scaler.get_scale() == 2.0**16


def test_update_refuses_a_tensor_of_several_elements(queue: cl.CommandQueue) -> None:
    with pytest.raises(ValueError, match="one element"):
        amp.GradScaler().update(to_device(queue, [1.0, 2.0]))


# ---------------------------------------------------------------------------------------------- settings and state


@pytest.mark.parametrize("scale", [2.0**-149, 1e-40, 1e-30, 1.0, 3, 2.0**24, 2.0**60, 3.4e38])
def test_any_finite_positive_init_scale_will_do(scale: float) -> None:
    assert amp.GradScaler(init_scale=scale).get_scale() == np.float32(scale)


def test_a_state_dict_of_pytorchs_loads() -> None:
    saved = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    scaler = amp.GradScaler(1.0)
    scaler.load_state_dict({**saved, "_growth_tracker": 7})
    assert scaler.state_dict() == {**saved, "_growth_tracker": 7}


# ---------------------------------------------------------------------------------------------- clipping


def test_under_scale_loss_clipping_is_right_outside_and_refused_inside(queue: cl.CommandQueue, setup: Steps) -> None:
    for dtype in DTYPES:
        with amp.init(dtype=dtype) as handle:
            setup.optimizer.zero_grad()
            with handle.scale_loss(loss_of(setup.model, setup.data), setup.optimizer) as scaled_loss:
                scaled_loss.backward()
                with pytest.raises(RuntimeError, match=r"after `with handle\.scale_loss"):
                    clip_grad_norm(setup.params, 1.0)
                with pytest.raises(RuntimeError, match=r"leave `with handle\.scale_loss"):
                    setup.optimizer.step()
            grads = [param.grad.to_host().astype(np.float64) for param in setup.params]
            assert clip_grad_norm(setup.params, 1e6) == pytest.approx(np.sqrt(sum((grad**2).sum() for grad in grads)))


# ---------------------------------------------------------------------------------------------- second derivatives


def test_create_graph_is_refused(setup: Steps, under: str) -> None:
    with amp.autocast():
        loss = loss_of(setup.model, setup.data)
    with pytest.raises(NotImplementedError, match="gradient penalty"):
        setup.scaler.scale(loss).backward(create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient penalty"), ag.Tape() as tape:
        tape.backward(loss, create_graph=True)


def test_a_loss_made_from_gradients_is_refused(queue: cl.CommandQueue, setup: Steps, under: str) -> None:
    setup.backward()
    grad = setup.params[0].grad
    setup.optimizer.zero_grad()
    with amp.autocast():
        loss = loss_of(setup.model, setup.data)
        penalized = ag.add(loss, ag.sum(ag.square(ag.tensor(grad))))
        weighted = ag.add(loss, ag.sum(ag.mul(ag.tensor(setup.params[0], requires_grad=True), ag.tensor(grad))))
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            ag.add(loss, ag.sum(ag.square(grad)))  # of bare tensors
    for wrong in (penalized, weighted):
        for loss in (wrong, setup.scaler.scale(wrong)):
            with pytest.raises(NotImplementedError, match="no second derivatives"):
                loss.backward()
    with amp.autocast(), pytest.raises(NotImplementedError, match="no second derivatives"):
        setup.scaler.scale(ag.mean(ag.tensor(ag.sum(ag.square(grad))))).backward()  # of nothing else
    with amp.autocast():  # as a constant it may be part of the loss
        constant = ag.sum(ag.square(ag.tensor(Tensor.from_host(queue, grad.to_host()))))
        loss = ag.add(loss_of(setup.model, setup.data), constant)
    setup.scaler.scale(loss).backward()


#: losses of a sum over each row, trained, and another, made from gradients; and whether they are one that can train
WITH_GRADIENTS: dict[str, tuple[Callable[[Node, Tensor], Node], bool]] = {
    "for each sample": (lambda rows, made: ag.mean(ag.add(rows, ag.tensor(made))), False),
    "of bare tensors": (lambda rows, made: ag.mean(ag.add(rows, made)), False),
    "in a list of losses": (lambda rows, made: ag.sum(ag.stack([rows, ag.tensor(made)])), False),
    "weighted": (lambda rows, made: ag.mul(ag.mean(ag.sub(rows, ag.mul(ag.tensor(made), 0.5))), 0.25), False),
    "accumulated": (lambda rows, made: ag.div(ag.sum(ag.add(rows, ag.tensor(made))), 4.0), False),
    "as weights of samples": (lambda rows, made: ag.mean(ag.mul(rows, ag.tensor(made))), True),
    "as a target": (lambda rows, made: ag.mean(ag.square(ag.sub(rows, ag.tensor(made)))), True),
    "as a step by hand": (lambda rows, made: ag.mean(ag.square(ag.sub(rows, ag.mul(made, 0.1)))), True),
}


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("how", WITH_GRADIENTS)
def test_gradients_that_are_only_added_to_a_loss_are_refused(setup: Steps, under: str, how: str, scaled: bool) -> None:
    """StyleGAN's penalty is one number a sample, averaged with the rest of the loss."""
    loss_with, trains = WITH_GRADIENTS[how]
    setup.backward()
    grad = setup.params[0].grad
    setup.optimizer.zero_grad()
    with amp.autocast():
        made = ag.sum(ag.square(ag.tensor(grad)), axis=1).value
        loss = loss_with(ag.sum(ag.square(ag.tensor(setup.params[0])), axis=1), made)
    loss = setup.scaler.scale(loss) if scaled else loss
    if trains:
        loss.backward()
        return
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        loss.backward()
    assert setup.params[0].grad is None
