"""Paddle's API on netcl: levels, custom lists, 16-bit parameters with fp32 masters, its loss scaler."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core.device import CPUQueue
from netcl.nn import BatchNorm2d, Conv2d, Flatten, LayerNorm, Linear, ReLU, Sequential
from netcl.nn.resnet import ResNet18
from netcl.nn.state import flatten_state_dict
from netcl.optim import SGD, AdamW, clip_grad_norm

from clamp import amp
from clamp.bridge import Tensor
from clamp.casting.operands import note_numpy_backend
from clamp.compat import regions
from clamp.compat.paddle import AmpScaler, GradScaler
from tests.networks import batch, loss_of, mlp, weights_of
from tests.reference import assert_same, quantize, to_device, to_numpy
from tests.scaling.test_overflow import OPTIMIZERS, WIDTHS

pytestmark = pytest.mark.usefixtures("shut_down")

HALF = ("float16", "bfloat16")


def dtypes(model: Any) -> set[str]:
    return {param.dtype for param in model.parameters()}


def saved_arrays(model: Any) -> dict[str, np.ndarray]:
    return flatten_state_dict(model.state_dict(), arrays_only=True)


def train(scaler: GradScaler, model: Any, optimizer: Any, data: tuple[Tensor, Tensor], **region: Any) -> float:
    """One step as Paddle's documentation writes it."""
    with amp.auto_cast(**region):
        loss = loss_of(model, data)
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.minimize(optimizer, scaled)
    optimizer.zero_grad()
    return float(loss.value.to_host()[0])


# ---------------------------------------------------------------------------------------------- decorate


@pytest.mark.parametrize(("dtype", "master_grad"), [("float16", False), ("bfloat16", True)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_o2_really_trains_16_bit_parameters(queue: cl.CommandQueue, name: str, master_grad: bool, dtype: str) -> None:
    model, data = mlp(queue, *WIDTHS), batch(queue, 32, 16, 8)
    given = model.parameters()
    optimizer = OPTIMIZERS[name](given)
    assert amp.decorate(model, optimizer, level="O2", dtype=dtype, master_grad=master_grad) == (model, optimizer)
    assert all(a is b for a, b in zip(given, model.parameters(), strict=True)), "the same objects"
    assert dtypes(model) == {dtype}
    masters = amp.master_params(optimizer)
    assert {master.dtype for master in masters} == {"float32"}
    with amp.auto_cast(level="O2", dtype=dtype):
        loss_of(model, data).backward()
    assert {param.grad.dtype for param in given} == {"float32" if master_grad else dtype}
    optimizer.zero_grad()
    before = [master.to_host().copy() for master in masters]
    scaler = GradScaler(init_loss_scaling=64.0)
    losses = [train(scaler, model, optimizer, data, level="O2", dtype=dtype) for _ in range(4)]
    assert losses[-1] < losses[0]
    for param, master, old in zip(given, masters, before, strict=False):
        assert not np.array_equal(master.to_host(), old)
        np.testing.assert_array_equal(to_numpy(param), quantize(master.to_host(), dtype).astype(np.float64))


def test_the_form_passed_comes_back(queue: cl.CommandQueue) -> None:
    a, b = mlp(queue, 4, 4), mlp(queue, 4, 4)
    first, second = SGD(a.parameters()), SGD(b.parameters())
    assert amp.decorate(a) is a
    assert amp.decorate([a, b]) == [a, b]
    models, optimizers = amp.decorate([a, b], [first, second])
    assert (models, optimizers) == ([a, b], [first, second])
    model, optimizers = amp.decorate(a, [first])
    assert model is a
    assert optimizers == [first]


@pytest.mark.parametrize("level", ["O0", "OD", "O1"])
def test_other_levels_change_nothing(queue: cl.CommandQueue, level: str) -> None:
    model = mlp(queue, 4, 4)
    assert amp.decorate(model, level=level) is model
    assert dtypes(model) == {"float32"}
    assert "state_dict" not in vars(model)


def test_batch_norm_and_excluded_layers_stay_fp32(queue: cl.CommandQueue) -> None:
    def build() -> Sequential:
        return Sequential(
            Conv2d(queue, 2, 4, 3, pad=1), BatchNorm2d(queue, 4), ReLU(), Flatten(), LayerNorm((64,), queue=queue),
            Linear(queue, 64, 3), Linear(queue, 3, 3),
        )  # fmt: skip

    def layer_dtypes(model: Sequential) -> list[str]:
        return [",".join(sorted(dtypes(layer))) for layer in model.layers if layer.parameters()]

    h, f = "float16", "float32"
    assert layer_dtypes(amp.decorate(build())) == [h, f, h, h, h]
    assert layer_dtypes(amp.decorate(build(), excluded_layers=LayerNorm)) == [h, f, f, h, h]
    model = build()
    amp.decorate(model, excluded_layers=[Conv2d, model.layers[-1]])
    assert layer_dtypes(model) == [f, f, h, h, f]
    assert layer_dtypes(amp.decorate(build(), excluded_layers=Sequential)) == [f] * 5
    with pytest.raises(TypeError, match=r"layers or classes of layers, got 'conv'"):
        amp.decorate(build(), excluded_layers=["conv"])


def test_models_of_bare_tensors(queue: cl.CommandQueue) -> None:
    model = ResNet18(queue, num_classes=3, base_channels=4)
    amp.decorate(model)
    assert model.conv1_w.dtype == model.fc_b.dtype == "float16"
    if model.use_bn:
        assert {tensor.dtype for tensor in model.bn1} == {"float32"}


@pytest.mark.filterwarnings("ignore:.*loss that was not scaled:UserWarning")
def test_without_master_weights_16_bits_are_all_there_is(queue: cl.CommandQueue) -> None:
    for master_weight, expected in ((None, 1 - 40 * 2.0**-13), (True, 1 - 40 * 2.0**-13), (False, 1.0)):
        model = Linear(queue, 4, 3, bias=False)
        model.weight.write(np.ones((4, 3)))
        _, optimizer = amp.decorate(model, SGD(model.parameters(), lr=2.0**-14), master_weight=master_weight)
        told = pytest.warns(UserWarning, match=r"float16 loses 100 % of the updates of weight: .* 1/2048 of a")
        for index in range(40):  # every update is below half an ulp of 1
            optimizer.zero_grad()
            with amp.auto_cast(level="O2"):
                ag.sum(model(ag.tensor(to_device(queue, np.ones((2, 4)))))).backward()
            with told if master_weight is False and not index else nullcontext():
                optimizer.step()
        (master,) = amp.master_params(optimizer)
        np.testing.assert_allclose(master.to_host(), np.full((4, 3), expected), rtol=1e-6)


def test_forward_uses_the_parameters_without_a_cast(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    model = amp.decorate(mlp(queue, 16, 32, 8))
    amp.init(level="O2", verbose=True)
    model(ag.tensor(to_device(queue, np.ones((4, 16)), "float16")))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("dtype", HALF)
def test_state_is_saved_and_loaded_in_fp32(queue: cl.CommandQueue, dtype: str) -> None:
    model = mlp(queue, 16, 32, 8)
    before = weights_of(model)
    amp.decorate(model, dtype=dtype)
    saved = saved_arrays(model)
    for array, exact in zip(saved.values(), before, strict=True):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, exact)
    layer = model.layers[0].state_dict()
    np.testing.assert_array_equal(layer["weight"], before[0])
    other = mlp(queue, 16, 32, 8, seed=3)
    _, optimizer = amp.decorate(other, SGD(other.parameters()), dtype=dtype)
    other.load_state_dict(model.state_dict())
    assert dtypes(other) == {dtype}
    for param, master, exact in zip(other.parameters(), amp.master_params(optimizer), before, strict=True):
        np.testing.assert_array_equal(master.to_host(), exact)
        np.testing.assert_array_equal(to_numpy(param), quantize(exact, dtype).astype(np.float64))
    plain = mlp(queue, 16, 32, 8, seed=4)
    plain.load_state_dict(saved)  # an fp32 model takes it as well
    assert_same(weights_of(plain), before)


def test_a_state_that_does_not_fit_changes_nothing(queue: cl.CommandQueue) -> None:
    model = amp.decorate(mlp(queue, 16, 32, 8))
    before = saved_arrays(model)
    with pytest.raises(ValueError, match="nothing was loaded"):
        model.load_state_dict(mlp(queue, 16, 24, 8).state_dict())
    assert_same(before.values(), saved_arrays(model).values())
    assert dtypes(model) == {"float16"}


def test_save_dtype(queue: cl.CommandQueue) -> None:
    for save_dtype in ("float16", "float64", "bfloat16"):
        model = mlp(queue, 16, 32, 8)
        before = weights_of(model)
        amp.decorate(model, save_dtype=save_dtype)
        for array, exact in zip(saved_arrays(model).values(), before, strict=True):
            rounded = quantize(exact, save_dtype) if save_dtype != "float64" else exact
            assert array.dtype == ("float32" if save_dtype == "bfloat16" else save_dtype)
            np.testing.assert_array_equal(array, rounded.astype(array.dtype))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"level": "O3"}, ValueError, "unknown level 'O3'"),
        ({"dtype": "float8"}, ValueError, "unknown dtype 'float8'"),
        ({"save_dtype": "int8"}, ValueError, "unknown save_dtype 'int8'"),
        ({"models": 3}, TypeError, "a model or a list of them, got int"),
        ({"optimizers": [3]}, TypeError, "an optimizer or a list of them, got int"),
    ],
)
def test_bad_arguments_change_nothing(
    queue: cl.CommandQueue, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = mlp(queue, 4, 4)
    with pytest.raises(error, match=message):
        amp.decorate(**{"models": model, **options})
    assert dtypes(model) == {"float32"}


def test_decorated_again_a_model_takes_the_other_dtype_and_settings(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, *WIDTHS), batch(queue, 32, 16, 8)
    exact = weights_of(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    amp.decorate(model, optimizer, dtype="float16", master_grad=True)
    masters = amp.master_params(optimizer)
    amp.decorate(model, optimizer, dtype="bfloat16")
    assert dtypes(model) == {"bfloat16"}
    for param, master, before in zip(model.parameters(), amp.master_params(optimizer), exact, strict=True):
        np.testing.assert_array_equal(to_numpy(param), quantize(before, "bfloat16").astype(np.float64))
        np.testing.assert_array_equal(master.to_host(), before)
    assert all(a is b for a, b in zip(masters, amp.master_params(optimizer), strict=True)), "the same masters"
    with amp.auto_cast(level="O2", dtype="bfloat16"):
        loss_of(model, data).backward()
    assert {param.grad.dtype for param in model.parameters()} == {"bfloat16"}, "master_grad holds no more"
    optimizer.zero_grad()
    scaler = GradScaler(init_loss_scaling=64.0)
    losses = [train(scaler, model, optimizer, data, level="O2", dtype="bfloat16") for _ in range(4)]
    assert losses[-1] < losses[0]
    for param, master in zip(model.parameters(), masters, strict=True):
        np.testing.assert_array_equal(to_numpy(param), quantize(master.to_host(), "bfloat16").astype(np.float64))
    amp.decorate(model, master_weight=False)
    assert dtypes(model) == {"float16"}
    for param, master in zip(model.parameters(), masters, strict=True):
        np.testing.assert_array_equal(master.to_host(), to_numpy(param), "no precision is kept any more")


def test_a_16_bit_model_of_the_users_gets_masters_and_the_dtype(queue: cl.CommandQueue) -> None:
    model = Linear(queue, 4, 3, bias=False)
    model.weight = to_device(queue, np.full((4, 3), 1 / 3), "float16")
    model.weight.requires_grad = True
    amp.decorate(model, dtype="bfloat16")
    assert model.weight.dtype == "bfloat16"
    assert to_numpy(model.weight)[0, 0] == quantize(np.float16([1 / 3]).astype(np.float32), "bfloat16")[0]


def test_layers_excluded_too_late_are_refused_and_nothing_changes(queue: cl.CommandQueue) -> None:
    first, model = mlp(queue, 4, 4), mlp(queue, 4, 8, 3)
    amp.decorate(model)
    for late in ({"excluded_layers": model.layers[0]}, {"excluded_layers": [Linear]}, {"dtype": "float32"}):
        with pytest.raises(ValueError, match=r"was made float16 earlier and cannot become float32 again"):
            amp.decorate([first, model], **late)
        assert (dtypes(first), dtypes(model)) == ({"float32"}, {"float16"})
    amp.decorate(model, level="O1", excluded_layers=Linear)  # changes nothing at O1
    model = amp.decorate(mlp(queue, 4, 8, 3), excluded_layers=Linear)
    assert dtypes(amp.decorate(model)) == {"float16"}, "excluded once, and not any more"


def test_what_initialize_made_of_a_model_is_not_decorated_to_another_dtype(queue: cl.CommandQueue) -> None:
    model = amp.initialize(mlp(queue, 4, 4), opt_level="O2", verbosity=0)
    amp.shutdown()
    assert amp.decorate(model) is model
    with pytest.raises(ValueError, match=r"casts its inputs to float16 since amp\.initialize: 'bfloat16'"):
        amp.decorate(model, dtype="bfloat16")
    assert dtypes(model) == {"float16"}
    with pytest.raises(ValueError, match=r"expected float32: amp\.initialize casts the model itself"):
        amp.initialize(amp.decorate(mlp(queue, 4, 4)), opt_level="O2")


# ---------------------------------------------------------------------------------------------- auto_cast


@pytest.mark.parametrize("dtype", HALF)
def test_levels(queue: cl.CommandQueue, dtype: str) -> None:
    wide = ag.tensor(to_device(queue, np.ones((4, 4))))
    narrow = ag.tensor(to_device(queue, np.ones((4, 4)), dtype))
    results = {}
    for level in ("O0", "OD", "O1", "O2"):
        with amp.auto_cast(level=level, dtype=dtype):
            assert amp.is_autocast_enabled() is (level != "O0")
            results[level] = [
                node.value.dtype
                for node in (
                    ag.matmul_op(wide, wide), ag.relu(wide), ag.relu(narrow), ag.add(narrow, narrow),
                    ag.add(narrow, wide), ag.softmax(narrow),
                )
            ]  # fmt: skip
    h, f = dtype, "float32"
    assert results == {
        "O0": [f, f, h, h, f, h],
        "OD": [h, f, f, f, f, f],
        "O1": [h, f, h, h, f, f],
        "O2": [h, h, h, h, f, f],
    }
    with amp.auto_cast(level="O2", dtype=dtype, use_promote=False):
        assert ag.add(narrow, wide).value.dtype == h
    assert not amp.is_autocast_enabled()


def test_custom_lists(queue: cl.CommandQueue) -> None:
    x = ag.tensor(to_device(queue, np.ones((4, 4))))
    with amp.auto_cast(custom_white_list={"softmax"}, custom_black_list={"matmul"}):
        assert ag.softmax(x).value.dtype == "float16"
        assert ag.matmul_op(x, x).value.dtype == "float32"
    with amp.auto_cast():
        assert ag.matmul_op(x, x).value.dtype == "float16"
    with pytest.raises(ValueError, match=r"white list and on the custom black list: netcl\.autograd\.softmax"):
        amp.auto_cast(custom_white_list={"softmax"}, custom_black_list={"softmax"})
    with pytest.raises(ValueError, match="no_such_function"):
        amp.auto_cast(custom_white_list=["no_such_function"])
    for bad in ({"level": "O3"}, {"dtype": "float8"}):
        with pytest.raises(ValueError, match="unknown"):
            amp.auto_cast(**bad)


# ---------------------------------------------------------------------------------------------- loss scaling


def test_defaults_are_paddles() -> None:
    for make, scale, good, bad in ((GradScaler, 2.0**16, 2000, 1), (AmpScaler, 2.0**15, 1000, 2)):
        assert make().state_dict() == {
            "scale": np.array([scale], np.float32),
            "incr_ratio": 2.0,
            "decr_ratio": 0.5,
            "incr_every_n_steps": good,
            "decr_every_n_nan_or_inf": bad,
            "incr_count": 0,
            "decr_count": 0,
            "use_dynamic_loss_scaling": True,
        }


def test_minimize_takes_the_arguments_of_paddles(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 16, 8), batch(queue, 8, 16, 8)
    optimizer, scaler = SGD(model.parameters(), lr=1e-3), GradScaler(init_loss_scaling=64.0)

    def scaled_loss() -> Any:
        optimizer.zero_grad()
        with amp.auto_cast():
            scaled = scaler.scale(loss_of(model, data))
        scaled.backward()
        return scaled

    for minimize in (
        lambda loss: scaler.minimize(optimizer, loss=loss),
        lambda loss: scaler.minimize(optimizer, loss, None, parameters=None),
        lambda loss: scaler.minimize(optimizer=optimizer, loss=loss.value),
        lambda loss: scaler.minimize(optimizer),
    ):
        before = weights_of(model)
        minimize(scaled_loss())
        assert not np.array_equal(before[0], weights_of(model)[0])
    loss, before = scaled_loss(), weights_of(model)
    for error, match, arguments in (
        (ValueError, "cannot choose parameters", {"loss": loss, "parameters": model.parameters()[:1]}),
        (ValueError, "cannot choose parameters", {"loss": loss, "no_grad_set": {"w"}}),
        (ValueError, "static graph", {"loss": loss, "startup_program": object()}),
        (TypeError, "unexpected keyword argument 'lose'", {"lose": loss}),
        (TypeError, "takes the scaled loss, a node or a tensor, got float", {"loss": 2.0}),
    ):
        with pytest.raises(error, match=match):
            scaler.minimize(optimizer, **arguments)
    assert_same(weights_of(model), before)


def test_masters_are_clipped_after_unscaling(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 16, 32, 8), batch(queue, 8, 16, 8)
    _, optimizer = amp.decorate(model, SGD(model.parameters(), lr=1.0), level="O2")
    scaler = GradScaler(init_loss_scaling=256.0)
    with amp.auto_cast(level="O2"):
        loss = loss_of(model, data)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm(model.parameters(), 1e-3)
    before = [master.to_host().copy() for master in amp.master_params(optimizer)]
    scaler.step(optimizer)
    moved = np.sqrt(
        sum(((m.to_host() - b) ** 2).sum() for m, b in zip(amp.master_params(optimizer), before, strict=True))
    )
    np.testing.assert_allclose(moved, 1e-3, rtol=1e-2)


def test_settings() -> None:
    assert GradScaler.set_incr_ratio.__doc__ == "Sets the factor by which the scale grows, above 1."
    scaler = GradScaler(use_dynamic_loss_scaling=False)
    assert not scaler.is_use_dynamic_loss_scaling()
    with pytest.raises(ValueError, match="the loss scale must be a finite positive number, not True"):
        scaler.load_state_dict({**scaler.state_dict(), "scale": np.array([True])})
    with pytest.raises(TypeError, match="a node or a tensor"):
        scaler.scale(3.0)


# ---------------------------------------------------------------------------------------------- devices


def test_a_warning_once_where_nothing_is_gained(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Linear(CPUQueue(), 4, 3)
    note_numpy_backend.cache_clear()
    with pytest.warns(UserWarning, match="numpy backend"):
        amp.decorate(model)
    assert dtypes(model) == {"float32"}

    class Incapable:
        half_storage = False

    monkeypatch.setattr(regions, "capabilities", lambda queue: Incapable)
    regions._warn_of.cache_clear()
    with pytest.warns(UserWarning, match=r"cannot store float16.*bfloat16"):
        GradScaler().scale(loss_of(mlp(queue, 4, 4), batch(queue, 4, 4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradScaler().scale(loss_of(mlp(queue, 4, 4), batch(queue, 4, 4, 4)))
