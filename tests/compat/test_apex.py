"""NVIDIA apex's API on netcl: opt_levels, several models, optimizers and losses, checkpoints; and the API of 2018."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn import BatchNorm2d, Conv2d, Flatten, Linear, ReLU, Sequential
from netcl.nn.modules import Sequential as PlainSequential
from netcl.optim import SGD, Adam, AdamW, RMSProp

from clamp import amp, session
from clamp.bridge import Node, Tensor
from clamp.handle import AmpHandle
from tests.networks import LOSS_FACTOR, batch, loss_of, mlp, scaled_backward, weights_of
from tests.reference import assert_same, quantize, to_device, to_numpy
from tests.scaling.test_overflow import optimizer_state, plant

pytestmark = [
    pytest.mark.usefixtures("shut_down"),
    pytest.mark.filterwarnings("ignore:in this step:UserWarning"),  # of O3 (tests/params/test_lost_updates.py)
]


def initialize(models: Any, optimizers: Any = None, **options: Any) -> Any:
    return amp.initialize(models, optimizers, verbosity=0, **options)


def train(model: Any, optimizer: Any, data: tuple[Tensor, Tensor], loss_id: int = 0) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, data)
    with amp.scale_loss(loss, optimizer, loss_id) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return float(loss.value.to_host()[0])


def with_batch_norm(queue: cl.CommandQueue) -> Sequential:
    np.random.seed(0)
    return Sequential(Conv2d(queue, 2, 4, 3, pad=1), BatchNorm2d(queue, 4), ReLU(), Flatten(), Linear(queue, 64, 3))


# ---------------------------------------------------------------------------------------------- opt levels


@pytest.mark.parametrize(
    ("level", "weights", "norms", "casts", "scale"),
    [
        ("O0", "float32", "float32", False, 1.0),
        ("O1", "float32", "float32", True, 2.0**16),
        ("O2", "float16", "float32", False, 2.0**16),
        ("O3", "float16", "float16", False, 1.0),
    ],
)
def test_opt_levels_are_as_apex_documents_them(
    queue: cl.CommandQueue, level: str, weights: str, norms: str, casts: bool, scale: float
) -> None:
    model = with_batch_norm(queue)
    optimizer = SGD(model.parameters(), lr=1e-2)
    assert amp.initialize(model, optimizer, opt_level=level, verbosity=0) == (model, optimizer)
    conv, norm, *_, linear = model.layers
    assert {conv.weight.dtype, conv.bias.dtype, linear.weight.dtype, linear.bias.dtype} == {weights}
    assert {norm.gamma.dtype, norm.beta.dtype} == {norms}
    assert {norm.running_mean.dtype, norm.running_var.dtype} == {"float32"}
    assert amp.is_autocast_enabled() is casts
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": scale, "unskipped": 0, "overflow": 0, "bad_steps": 0}}
    assert {param.dtype for param in optimizer.params} == {"float32"}
    x = to_device(queue, np.random.default_rng(0).standard_normal((8, 2, 4, 4)))
    y = to_device(queue, np.random.default_rng(1).standard_normal((8, 3)))
    out = model(ag.tensor(x))
    assert out.value.dtype == ("float16" if level == "O1" else "float32")
    inside = conv(ag.tensor(to_device(queue, np.ones((1, 2, 4, 4)), weights)))
    assert inside.value.dtype == ("float32" if level == "O0" else "float16")
    losses = [train(model, optimizer, (x, y)) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert norm.running_mean.to_host().any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_o2_inputs_and_outputs(queue: cl.CommandQueue, dtype: str) -> None:
    model = mlp(queue, 16, 32, 8)
    initialize(model, opt_level="O2", dtype=dtype)
    x = to_device(queue, np.ones((4, 16)))
    for given in (ag.tensor(x), x):
        assert model(given).value.dtype == "float32"
        assert model.forward(given).value.dtype == "float32"
    assert model.layers[0](ag.tensor(to_device(queue, np.ones((4, 16)), dtype))).value.dtype == dtype
    assert type(model).__name__ == "Sequential"
    assert isinstance(model, Sequential)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == (2.0**16 if dtype == "float16" else 1.0)


def test_cast_model_outputs(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.ones((4, 16)))
    for level, outputs in (("O2", "float16"), ("O1", "float32")):
        model = PlainSequential(*mlp(queue, 16, 32, 8).layers)
        initialize(model, opt_level=level, cast_model_outputs=outputs)
        assert model(ag.tensor(x)).value.dtype == outputs
        amp.shutdown()


def test_o2_masters_keep_what_16_bits_lose_and_o3_does_not(queue: cl.CommandQueue) -> None:
    for level, moves in (("O2", True), ("O3", False)):
        model = Linear(queue, 4, 3, bias=False)
        model.weight.write(np.ones((4, 3)))
        _, optimizer = initialize(model, SGD(model.parameters(), lr=2.0**-14), opt_level=level, loss_scale=16.0)
        for _ in range(40):  # every update is below half an ulp of 1 in float16
            optimizer.zero_grad()
            loss = ag.sum(model(ag.tensor(to_device(queue, np.ones((2, 4))))))
            scaled_backward(amp, loss, optimizer)
            optimizer.step()
        (master,) = amp.master_params(optimizer)
        expected = 1 - 40 * 2 * 2.0**-14 if moves else 1.0
        np.testing.assert_allclose(master.to_host(), np.full((4, 3), expected), rtol=1e-6)
        np.testing.assert_array_equal(to_numpy(model.weight), quantize(master.to_host(), "float16"))
        amp.shutdown()


def test_levels_train_alike(queue: cl.CommandQueue) -> None:
    data = batch(queue, 32, 16, 8)
    curves = {}
    for level in ("O0", "O1", "O2", "O3"):
        model = mlp(queue, 16, 64, 8)
        _, optimizer = initialize(model, Adam(model.parameters(), lr=3e-3), opt_level=level, loss_scale=128.0)
        curves[level] = [train(model, optimizer, data) for _ in range(25)]
        amp.shutdown()
    assert curves["O0"][-1] < curves["O0"][0] / 3
    for level in ("O1", "O2", "O3"):
        np.testing.assert_allclose(curves[level], curves["O0"], rtol=0.1)


def test_properties_override_the_level(queue: cl.CommandQueue) -> None:
    model = with_batch_norm(queue)
    initialize(
        model, opt_level="O2", cast_model_type="bfloat16", keep_batchnorm_fp32="False", loss_scale="128.0", num_losses=2
    )
    assert {param.dtype for param in model.parameters()} == {"bfloat16"}
    assert [state["loss_scale"] for state in amp.state_dict().values()] == [128.0, 128.0]


@pytest.mark.parametrize(
    ("options", "expected", "scale"),
    [
        ({}, ["float16", "float32", "bfloat16"], 2.0**16),
        ({"dtype": "bfloat16"}, ["bfloat16", "float32", "bfloat16"], 1.0),
        ({"dtype": "bfloat16", "modules": {"layers.2": "float16"}}, ["bfloat16", "bfloat16", "float16"], 2.0**16),
    ],
)
def test_parts_of_a_model_have_dtypes_of_their_own(
    queue: cl.CommandQueue, options: dict[str, Any], expected: list[str], scale: float
) -> None:
    model, data = mlp(queue, 4, 4, 4), batch(queue, 2, 4, 4)
    optimizer = SGD(model.parameters(), lr=1e-3)
    initialize(model, optimizer, **{"modules": {"layers.1": "float32", "layers.2": "bfloat16"}, **options})
    x, dtypes = data[0], []
    for layer in model.layers:
        x = layer(x)
        dtypes.append(x.value.dtype)
    assert dtypes == expected
    scaled_backward(amp, loss_of(model, data), optimizer)
    optimizer.step()
    assert session.require_handle().last_step.scale == scale


def test_limits_of_the_dynamic_scale(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 4, 4), batch(queue, 4, 4, 4)
    _, optimizer = initialize(model, SGD(model.parameters(), lr=0.01), min_loss_scale=256.0, max_loss_scale=512.0)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 512.0
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, data), optimizer) as scaled_loss:
            scaled_loss.backward()
            plant(model.parameters()[0])
        optimizer.step()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 256.0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"opt_level": "02"}, RuntimeError, "the letter O, not the number zero"),
        ({"cast_model_type": "float16"}, RuntimeError, "use opt_level='O2' or 'O3'"),
        ({"master_weights": True}, RuntimeError, "should be None"),
        ({"keep_batchnorm_fp32": True}, RuntimeError, "should be None"),
        ({"opt_level": "O2", "patch_netcl_functions": True}, RuntimeError, "belongs to opt_level='O1'"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, ValueError, "keep_batchnorm_fp32"),
        ({"opt_level": "O2", "cast_model_type": "int8"}, ValueError, "cast_model_type 'int8'"),
        ({"loss_scale": "huge"}, ValueError, "loss_scale must be"),
        ({"loss_scale": -1.0}, ValueError, "loss scale"),
        ({"loss_scale": True}, ValueError, "loss_scale must be a number"),
        ({"num_losses": 0}, ValueError, "num_losses"),
        ({"cast_model_outputs": "half precision"}, ValueError, "cast_model_outputs"),
        ({"modules": {"head": "int8"}}, ValueError, "int8"),
        ({"modules": ["head"]}, TypeError, "modules"),
        ({"modules": {"head": "float32"}, "opt_level": "O2"}, RuntimeError, r"O1.*amp\.decorate"),
        ({"modules": {"head": "float32"}, "patch_netcl_functions": False}, RuntimeError, "modules= belongs to"),
        ({"optimizers": ["adam"]}, TypeError, "an optimizer or a list of them, got str"),
        ({"models": [None]}, TypeError, "a model or a list of them, got NoneType"),
    ],
)
def test_what_contradicts_itself_raises_and_changes_nothing(
    queue: cl.CommandQueue, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = mlp(queue, 4, 4)
    with pytest.raises(error, match=message):
        initialize(**{"models": model, **options})
    assert session.active_handle() is None
    assert {param.dtype for param in model.parameters()} == {"float32"}
    assert type(model) is Sequential


def test_a_second_initialize_raises_clearly(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 4, 4)
    initialize(model)
    with pytest.raises(RuntimeError, match=r"amp\.initialize\(\) was called while a handle is active"):
        initialize(mlp(queue, 4, 4))
    amp.shutdown()
    initialize(model, opt_level="O2")
    amp.shutdown()
    with pytest.raises(ValueError, match=r"is float16, expected float32: amp\.initialize casts the model itself"):
        initialize(model)


def test_disabled_changes_nothing_and_passes_through(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 16, 8), batch(queue, 8, 16, 8)
    optimizer = SGD(model.parameters(), lr=1e-3)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert amp.initialize([model], enabled=False) == [model]
    assert session.active_handle() is None
    loss = loss_of(model, data)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    optimizer.step()
    assert amp.state_dict() == {}
    amp.load_state_dict({})


def test_without_initialize_scale_loss_names_it(queue: cl.CommandQueue) -> None:
    amp.init().shutdown()
    model = mlp(queue, 4, 4)
    with pytest.raises(RuntimeError, match=r"amp\.initialize\(model, optimizer"):
        amp.scale_loss(loss_of(model, batch(queue, 4, 4, 4)), SGD(model.parameters()))
    with pytest.raises(RuntimeError, match="init"):
        amp.state_dict()


def test_verbosity(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(mlp(queue, 4, 4), opt_level="O1", verbosity=0)
    assert capsys.readouterr().out == ""
    amp.shutdown()
    amp.initialize(mlp(queue, 4, 4), opt_level="O2")
    out = capsys.readouterr().out
    assert "Selected optimization level O2" in out
    assert "master_weights         : True" in out


# ---------------------------------------------------------------------------------------------- several of each


def reconstruction(encoder: Any, decoder: Any, data: tuple[Tensor, Tensor]) -> Node:
    return ag.mul(ag.mse_loss(decoder(encoder(ag.tensor(data[0]))), ag.tensor(data[1])), LOSS_FACTOR)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_exactly_the_optimizers_it_reaches(queue: cl.CommandQueue, level: str) -> None:
    """As a GAN: loss 0 reaches the second model, loss 1 reaches both."""
    first, second = mlp(queue, 16, 24, 16, seed=1), mlp(queue, 16, 24, 8, seed=2)
    data = batch(queue, 8, 16, 8)
    models, optimizers = initialize(
        [first, second],
        [Adam(first.parameters(), lr=1e-3), SGD(second.parameters(), lr=1e-3, momentum=0.9)],
        opt_level=level,
        num_losses=2,
    )
    assert models == [first, second]
    a, b = optimizers

    def scales() -> list[float]:
        return [state["loss_scale"] for state in amp.state_dict().values()]

    def iterate(overflow: int | None) -> tuple[bool, bool]:
        before = [[m.to_host().copy() for m in amp.master_params(optimizer)] for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.scale_loss(loss_of(second, data), b, loss_id=0) as scaled_loss:
            scaled_loss.backward()
            if overflow == 0:
                plant(second.parameters()[0])
        with amp.scale_loss(reconstruction(first, second, data), [a, b], loss_id=1) as scaled_loss:
            scaled_loss.backward()
            if overflow == 1:
                plant(first.parameters()[0])
        a.step()
        b.step()
        after = [[m.to_host() for m in amp.master_params(optimizer)] for optimizer in optimizers]
        moved = [
            [not np.array_equal(x, y) for x, y in zip(old, new, strict=True)]
            for old, new in zip(before, after, strict=True)
        ]
        assert all(any(m) == all(m) for m in moved)
        return any(moved[0]), any(moved[1])

    assert iterate(None) == (True, True)
    assert iterate(0) == (True, False), "loss 0 reaches only the second optimizer"
    assert scales() == [2.0**15, 2.0**16]
    assert iterate(1) == (False, False), "loss 1 reaches both"
    assert scales() == [2.0**15, 2.0**15]
    assert iterate(None) == (True, True)


def test_accumulation_with_delay_unscale_gives_the_sum(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 16, 32, 8)
    batches = [batch(queue, 8, 16, 8, seed) for seed in (1, 2)]
    _, optimizer = initialize(model, SGD(model.parameters()), opt_level="O2")
    separate = []
    for data in batches:
        optimizer.zero_grad()
        scaled_backward(amp, loss_of(model, data), optimizer)
        separate.append([param.grad.to_host() for param in amp.master_params(optimizer)])
    optimizer.zero_grad()
    for data, delayed in zip(batches, (True, False), strict=True):
        with amp.scale_loss(
            loss_of(model, data), optimizer, delay_unscale=delayed, delay_overflow_check=delayed, model=model
        ) as scaled_loss:
            scaled_loss.backward()
    for x, y, master in zip(*separate, amp.master_params(optimizer), strict=True):
        np.testing.assert_allclose(master.grad.to_host(), x + y, rtol=1e-6, atol=1e-7)


def test_a_loss_id_that_is_none(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 4, 4)
    _, optimizer = initialize(model, SGD(model.parameters()), num_losses=2)
    with pytest.raises(ValueError, match=r"loss_id must be from 0 to 1, got 2: .*num_losses"):
        amp.scale_loss(loss_of(model, batch(queue, 4, 4, 4)), optimizer, loss_id=2)


@pytest.mark.parametrize("how", ["grows", "new_optimizer"])
@pytest.mark.parametrize("make", [Adam, RMSProp, AdamW], ids=lambda cls: cls.__name__)
def test_parameters_added_later(queue: cl.CommandQueue, how: str, make: Any) -> None:
    model, head, data = mlp(queue, 16, 16), mlp(queue, 16, 8, seed=5), batch(queue, 8, 16, 8)
    (_, _), optimizer = initialize([model, head], make(model.parameters(), lr=1e-2), opt_level="O2")
    train(model, optimizer, (data[0], data[0]))
    kept = optimizer_state(optimizer, queue)
    optimizers = [optimizer]
    if how == "grows":
        optimizer.params.extend(head.parameters())
    else:
        optimizers.append(make(head.parameters(), lr=1e-2))
    before = weights_of(head)
    for each in optimizers:
        each.zero_grad()
    scaled_backward(amp, reconstruction(model, head, data), optimizers)
    for key in ("_m_buf", "_v_buf"):
        if key in kept:
            assert list(optimizer_state(optimizer, queue)[key].values()) == list(kept[key].values())
    for each in optimizers:
        each.step()
    for old, param, master in zip(before, head.parameters(), amp.master_params(optimizers[-1])[-2:], strict=True):
        assert param.dtype == "float16"
        assert not np.array_equal(old, param.to_host())
        np.testing.assert_array_equal(param.to_host(), master.to_host().astype(np.float16))


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_resumed_run_continues_bit_identically(queue: cl.CommandQueue, level: str) -> None:
    data = batch(queue, 32, 16, 8)

    def build(seed: int) -> tuple[Any, Any]:
        model = mlp(queue, 16, 64, 8, seed=seed)
        return initialize(model, AdamW(model.parameters(), lr=1e-3), opt_level=level, num_losses=2)

    def run(model: Any, optimizer: Any, steps: int, overflow_at: int | None = None) -> None:
        for index in range(steps):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, data), optimizer, loss_id=1) as scaled_loss:
                scaled_loss.backward()
                if index == overflow_at:
                    plant(model.parameters()[0])
            optimizer.step()

    model, optimizer = build(0)
    run(model, optimizer, 4, overflow_at=1)
    saved = model.state_dict(), optimizer.state_dict(), amp.state_dict()
    assert [state["loss_scale"] for state in saved[2].values()] == [2.0**16, 2.0**15]
    assert saved[2]["loss_scaler1"]["unskipped"] == 2
    run(model, optimizer, 3)
    expected = [master.to_host().copy() for master in amp.master_params(optimizer)], weights_of(model)
    final = amp.state_dict()
    amp.shutdown()

    model, optimizer = build(7)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    assert amp.state_dict() == saved[2]
    run(model, optimizer, 3)
    assert amp.state_dict() == final
    got = [master.to_host() for master in amp.master_params(optimizer)], weights_of(model)
    assert_same(expected[0] + expected[1], got[0] + got[1])


def arrays(state: Any) -> list[np.ndarray]:
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        return [array for item in state for array in arrays(item)]
    return [state] if isinstance(state, np.ndarray) else []


def test_the_models_state_is_fp32_at_every_level(queue: cl.CommandQueue) -> None:
    for level in ("O0", "O1", "O2", "O3"):
        model = with_batch_norm(queue)
        initialize(model, opt_level=level)
        assert {array.dtype for array in arrays(model.state_dict())} == {np.dtype(np.float32)}
        amp.shutdown()
        assert {array.dtype for array in arrays(model.state_dict())} == {np.dtype(np.float32)}, "after shutdown too"


def with_scales(*scales: float) -> dict[str, dict[str, Any]]:
    return {f"loss_scaler{index}": {"loss_scale": s, "unskipped": index + 5} for index, s in enumerate(scales)}


def scales_now() -> list[tuple[float, int]]:
    return [(state["loss_scale"], state["unskipped"]) for state in amp.state_dict().values()]


def test_a_state_with_fewer_or_more_scalers_warns_and_loads_what_is_there(queue: cl.CommandQueue) -> None:
    initialize(mlp(queue, 4, 4), num_losses=2)
    with pytest.warns(UserWarning, match=r"has 1 loss scalers and this handle 2\. Unchanged here: loss_scaler1; not"):
        amp.load_state_dict(with_scales(512.0))
    assert scales_now() == [(512.0, 5), (2.0**16, 0)]
    with pytest.warns(UserWarning, match=r"has 3 loss scalers .*Unchanged here: none; not loaded: loss_scaler2\. "):
        amp.load_state_dict(with_scales(64.0, 32.0, 16.0))
    assert scales_now() == [(64.0, 5), (32.0, 6)]
    with pytest.warns(UserWarning, match=r"Unchanged here: loss_scaler0; not loaded: none"):
        amp.load_state_dict({"loss_scaler1": {"loss_scale": 8.0, "unskipped": 1}})
    assert scales_now() == [(64.0, 5), (8.0, 1)], "by name"
    assert session.active_handle().loss_scale == 64.0


def test_a_state_that_is_malformed_changes_no_scaler(queue: cl.CommandQueue) -> None:
    initialize(mlp(queue, 4, 4), num_losses=2)
    before = amp.state_dict()
    good = with_scales(512.0, 256.0)
    for bad in (
        {**good, "loss_scaler1": {"loss_scale": -1.0, "unskipped": 0}},
        {**good, "loss_scaler1": 256.0},
        {**good, "model": {}},
        {"loss_scaler": good["loss_scaler0"]},
        {"loss_scaler2": good["loss_scaler0"]},
    ):
        with pytest.raises(ValueError, match=r"."):
            amp.load_state_dict(bad)
        assert amp.state_dict() == before
    with pytest.raises(RuntimeError, match="empty"):
        amp.load_state_dict({})


# ---------------------------------------------------------------------------------------------- the API of 2018


def test_signatures_are_apexs() -> None:
    assert list(inspect.signature(amp.init).parameters)[:4] == ["enabled", "enable_caching", "verbose", "allow_banned"]
    assert list(inspect.signature(AmpHandle.wrap_optimizer).parameters) == ["self", "optimizer", "num_loss"]
    assert list(inspect.signature(amp.scale_loss).parameters) == [
        "loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check",
    ]  # fmt: skip
    assert list(inspect.signature(amp.initialize).parameters)[:14] == [
        "models", "optimizers", "enabled", "opt_level", "cast_model_type", "patch_netcl_functions",
        "keep_batchnorm_fp32", "master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity",
        "min_loss_scale", "max_loss_scale",
    ]  # fmt: skip
    defaults = [one.default for one in inspect.signature(amp.initialize).parameters.values()][1:14]
    assert defaults == [None, True, "O1", *[None] * 6, 1, 1, None, 2.0**24]


def test_init_shows_a_verbose_line_for_each_real_cast(
    queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = Linear(queue, 4, 3, bias=False)
    x = ag.tensor(to_device(queue, np.ones((2, 4))))
    handle = amp.init(verbose=True)
    for lines in (["Float->Half (matmul_op)"] * 2, ["Float->Half (matmul_op)"]):  # the weight is cached
        layer(x)
        assert capsys.readouterr().out.splitlines() == lines
    handle._clear_cache()
    layer(x)
    assert len(capsys.readouterr().out.splitlines()) == 2
    handle.shutdown()
    amp.init(verbose=True, enable_caching=False)
    layer(x)
    capsys.readouterr()
    layer(x)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_wrapped_optimizer_forwards_everything_else(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 4, 4)
    optimizer = SGD(model.parameters(), lr=0.5)
    with amp.init() as handle:
        wrapped = handle.wrap_optimizer(optimizer)
        assert wrapped.params is optimizer.params
        assert wrapped.lr == 0.5
        assert isinstance(wrapped, SGD)
        with pytest.raises(RuntimeError, match=r"optimizer\.scale_loss"):
            amp.scale_loss(loss_of(model, batch(queue, 4, 4, 4)), optimizer)
