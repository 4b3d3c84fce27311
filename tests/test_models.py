"""Every layer and ready-made model of netcl trains a step under AMP."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import netcl.nn as nn
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.batchnorm import BatchNorm2dModule
from netcl.nn.layers import Sequential
from netcl.optim import SGD
from netcl.runtime.graph_fusion import optimize_model
from netcl.ssl import methods

from clamp import amp
from tests.networks import scaled_backward
from tests.recipes import NO_RECIPE, RECIPES, Recipe, classes, loss_of, make, training_fusion, values
from tests.reference import to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")

#: a gradient's error, in the norm, relative to the fp32 step's; in networks, where rounding decides about a relu or
#: a maximum here and there, it grows with the root of the rounding (Recipe.slack)
TOLERANCE = {"float16": 0.01, "bfloat16": 0.06}
LOSS_SCALE = 2.0**10


def step(recipe: Recipe, queue: cl.CommandQueue, dtype: str) -> tuple[float, list[Any], list[Any]]:
    """Loss, gradients and changes of the parameters of one step."""
    with amp.init(dtype=dtype, loss_scale=LOSS_SCALE) as handle:
        made = make(recipe, queue)
        before = [param.to_host().copy() for param in made.trained]
        optimizer = SGD(made.trained, lr=0.5)
        loss = loss_of(recipe, made)
        scaled_backward(handle, loss, optimizer)
        assert all(param.grad is not None for param in made.trained)
        assert {param.grad.dtype for param in made.trained} | {param.dtype for param in made.trained} == {"float32"}
        gradients = [param.grad.to_host().copy() for param in made.trained]
        optimizer.step()
        changes = [param.to_host() - old for param, old in zip(made.trained, before, strict=True)]
        return float(loss.value.to_host()[0]), gradients, changes


def check(recipe: Recipe, queue: cl.CommandQueue, dtype: str, reference: tuple[float, list[Any], list[Any]]) -> None:
    """The step in 16 bits is the fp32 step, but for rounding."""
    loss, gradients, changes = step(recipe, queue, dtype)
    want_loss, want_gradients, _ = reference
    tolerance = TOLERANCE[dtype] * recipe.slack
    assert loss == pytest.approx(want_loss, rel=tolerance, abs=tolerance)
    largest = max(np.linalg.norm(gradient) for gradient in want_gradients)
    errors = []
    for number, (gradient, want, change) in enumerate(zip(gradients, want_gradients, changes, strict=True)):
        assert np.isfinite(gradient).all(), number
        assert np.any(change) or not np.any(want), f"parameter {number} did not change"
        # what is zero but for rounding, as a bias before batch norm, is measured against the largest
        errors.append(np.linalg.norm(gradient - want) / max(np.linalg.norm(want), 0.02 * largest))
    assert np.median(errors) <= tolerance
    assert max(errors) <= 3 * tolerance, f"the gradient of parameter {int(np.argmax(errors))} is off by {max(errors)}"


_REFERENCES: dict[tuple[str, int], Any] = {}


def reference(name: str, queue: cl.CommandQueue) -> tuple[float, list[Any], list[Any]]:
    """The step in fp32, by clamp's kernels."""
    key = (name, queue.int_ptr)
    if key not in _REFERENCES:
        _REFERENCES[key] = step(RECIPES[name], queue, "float32")
    return _REFERENCES[key]


#: each recipe in both dtypes; the big ones, and all in bfloat16, in the full sweep only
CASES = [
    pytest.param(name, dtype, marks=[pytest.mark.slow] if recipe.slow or dtype == "bfloat16" else [])
    for dtype in TOLERANCE
    for name, recipe in RECIPES.items()
]


def test_every_class_has_a_recipe() -> None:
    made = {name.partition(":")[0] for name in RECIPES} | set(NO_RECIPE)
    assert not classes() - made, "write a recipe for these classes in tests/recipes.py"
    assert not made - classes(), "this release of netcl has no such class"


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_trains_in_16_bits(queue: cl.CommandQueue, name: str, dtype: str) -> None:
    check(RECIPES[name], queue, dtype, reference(name, queue))


def test_bfloat16_trains_in_a_network_and_an_attention(queue: cl.CommandQueue) -> None:
    for name in ("layers.Sequential", "layers.MultiheadAttention"):
        check(RECIPES[name], queue, "bfloat16", reference(name, queue))


def test_training_fusion_changes_nothing(queue: cl.CommandQueue) -> None:
    """With dilation and groups too, which netcl's fused convolution drops."""
    with training_fusion(False):
        loss, gradients, _ = step(RECIPES["layers.Sequential"], queue, "float32")
    with training_fusion(True):
        fused_loss, fused_gradients, _ = step(RECIPES["layers.Sequential"], queue, "float32")
        check(RECIPES["layers.Sequential"], queue, "float16", (loss, gradients, []))
    assert fused_loss == pytest.approx(loss, rel=1e-4)
    for gradient, fused in zip(gradients, fused_gradients, strict=True):
        np.testing.assert_allclose(fused, gradient, rtol=1e-3, atol=1e-5 * max(np.abs(gradient).max(), 1))


def test_a_model_that_optimize_model_has_fused_is_the_model(queue: cl.CommandQueue) -> None:
    """netcl's drops dilation, groups, batch norm, and the graph."""

    class BatchNorm2d(BatchNorm2dModule):
        """Has the name that netcl looks for."""

    norm = BatchNorm2d(queue, 4)
    model = Sequential(
        nn.Conv2d(queue, 4, 4, 3, pad=2, dilation=2, groups=2), nn.ReLU(),
        nn.Conv2d(queue, 4, 4, 3, pad=1), norm, nn.ReLU(),
    )  # fmt: skip
    x = to_device(queue, values(2, 4, 8, 8, seed=1))

    def results() -> list[Any]:
        found = []
        norm.running_mean.write(np.full(4, 0.5, np.float32))
        norm.running_var.write(np.full(4, 2.0, np.float32))
        for mode, given in ((model.eval, x), (model.train, x), (model.train, ag.tensor(x))):
            mode()
            found.append(to_numpy(getattr(out := model(given), "value", out)))
        ag.sum(out).backward()
        grads = [param.grad.to_host().copy() for param in params]
        for param in params:
            param.grad = None
        return [*found, *grads]

    params = list(model.parameters())
    with amp.init(dtype="float32"):
        wanted = results()
        optimize_model(model)
        assert len(model.layers) == 2
        for found, want in zip(results(), wanted, strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_the_banned_loss_says_what_to_use(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.full((2, 2), 0.5))
    with amp.init(), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        nn.BCELoss()(x, x)


# ------------------------------------------------------------------------------------------ self-supervision


def method(name: str, queue: cl.CommandQueue) -> methods.SSLMethod:
    """One of netcl's self-supervised methods over a small encoder; the same at every call."""
    np.random.seed(0)
    cls = getattr(methods, name)
    targets = "target_encoder" in inspect.signature(cls).parameters
    encoders = [nn.Linear(queue, 8, 6) for _ in range(1 + targets)]
    return cls(*encoders, 6, 4, queue=queue)


def method_steps(name: str, queue: cl.CommandQueue, dtype: str) -> list[float]:
    """Losses of two steps."""
    with amp.init(dtype=dtype, loss_scale=LOSS_SCALE) as handle:
        model = method(name, queue)
        optimizer = SGD(model.parameters(), lr=0.02)
        views = [to_device(queue, values(6, 8, seed=seed)) for seed in (1, 2)]
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model.training_step(views)
            scaled_backward(handle, loss, optimizer)
            for param in model.parameters():
                assert param.grad.dtype == "float32"
                assert np.isfinite(param.grad.to_host()).all()
            optimizer.step()
            model.on_step_end()
            losses.append(loss.value.to_host().item())
        return losses


METHODS = sorted(name for name, x in vars(methods).items() if inspect.isclass(x) and methods.SSLMethod in x.__mro__[1:])


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", METHODS)
def test_self_supervised_methods_train(queue: cl.CommandQueue, name: str, dtype: str) -> None:
    expected = method_steps(name, queue, "float32")
    losses = method_steps(name, queue, dtype)
    np.testing.assert_allclose(losses, expected, rtol=3 * TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])


class _Scaled(nn.Module):  # type: ignore[misc]
    """A layer that compares by its shape, as a dataclass does, and so has no hash."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Scaled)

    __hash__ = None  # type: ignore[assignment]

    def forward(self, x: Any) -> Any:
        return ag.mul(x, self.factor)


class _Unhashed(Sequential):  # type: ignore[misc]
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unhashed)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Sequential, _Unhashed])
def test_a_sequential_computes_with_the_layers_that_it_has(queue: cl.CommandQueue, kind: Any) -> None:
    x = ag.tensor(to_device(queue, [[1.0, 2.0]]))
    with amp.init(dtype="bfloat16"), ag.no_grad():
        model = kind(_Scaled(2.0), nn.ReLU())
        for train in (model.train, model.eval):
            train()
            np.testing.assert_array_equal(model(x).value.to_host(), [[2.0, 4.0]])
            model.layers[0] = _Scaled(3.0)  # equal to the one before
            np.testing.assert_array_equal(model(x).value.to_host(), [[3.0, 6.0]])
            model.layers = _Scaled(2.0), nn.ReLU()
            np.testing.assert_array_equal(model(x).value.to_host(), [[2.0, 4.0]])
            model.layers = [*model.layers]


def test_a_sequential_to_which_a_layer_leads_is_freed(queue: cl.CommandQueue) -> None:
    with amp.init():
        model = Sequential(_Scaled(2.0))
        model.layers[0].parent = model
        model(ag.tensor(to_device(queue, [[1.0]])))
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
