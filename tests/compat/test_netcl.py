"""netcl's own recipe, as its wiki writes it, with clamp active; and netcl's Trainer in mixed precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import netcl.amp
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.amp import (  # bound before amp.init(), as in a script
    GradScaler,
    autocast,
    is_autocast_enabled,
    master_param,
    maybe_cast_tensor,
    supports_fp16,
)
from netcl.nn import functional as F
from netcl.optim import SGD, AdamW, ModelEMA, clip_grad_norm
from netcl.trainer import Trainer

from clamp import amp, session
from clamp.bridge import Node, Tensor
from tests.compat.test_scalers import Steps
from tests.networks import batch, loss_of, mlp, scaled_backward, weights_of
from tests.reference import assert_same, to_device, to_numpy
from tests.scaling.test_overflow import plant

DTYPES = ("float16", "bfloat16")


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    """The AMP dtype of an active handle."""
    with amp.init(dtype=request.param):
        yield request.param


# ---------------------------------------------------------------------------------------------- the recipe


def recipe(queue: cl.CommandQueue, scaler: GradScaler, steps: int = 15, with_update: bool = True) -> tuple[Any, Any]:
    """The training step of netcl's wiki. Returns losses, and the dtypes of the predictions."""
    model = mlp(queue, 8, 32, 4)
    x, _ = batch(queue, 16, 8, 4)
    y = to_device(queue, np.eye(4)[np.arange(16) % 4])
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses, dtypes = [], set()
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast(device_queue=queue):
            logits = model(ag.tensor(x))
            loss = F.cross_entropy(logits, ag.tensor(y))
        scaler.scale_loss(loss).backward()
        scaler.step(optimizer, model.parameters())
        if with_update:
            scaler.update()
        losses.append(float(to_numpy(loss.value)[0]))
        dtypes.add(logits.value.dtype)
    return losses, dtypes


@pytest.mark.parametrize("with_update", [True, False])
@pytest.mark.parametrize("half_dtype", DTYPES)
def test_the_recipe_of_the_wiki_trains_as_fp32_does(queue: cl.CommandQueue, half_dtype: str, with_update: bool) -> None:
    losses = {}
    for dtype in (half_dtype, "float32"):
        with amp.init(dtype=dtype):
            assert supports_fp16(queue)
            losses[dtype], dtypes = recipe(queue, GradScaler(), with_update=with_update)
        assert dtypes == {dtype}
    np.testing.assert_allclose(losses[half_dtype], losses["float32"], rtol=0.03, atol=0.01)
    assert losses[half_dtype][-1] < 0.5 * losses[half_dtype][0]


def test_objects_made_before_init_and_names_imported_before_it_work(queue: cl.CommandQueue) -> None:
    scaler, region = GradScaler(init_scale=2.0**10), autocast(device_queue=queue)
    x = ag.tensor(to_device(queue, np.ones((2, 2))))
    with amp.init():
        with region:
            assert ag.matmul(x, x).value.dtype == "float16"
        scaled = scaler.scale_loss(ag.tensor(to_device(queue, [3.0])))
        assert isinstance(scaler, netcl.amp.GradScaler)
        assert isinstance(scaled, Node)
        assert float(to_numpy(scaled.value)[0]) == 3 * 2**10


def test_after_shutdown_netcl_is_as_before(queue: cl.CommandQueue) -> None:
    methods = [GradScaler.scale_loss, GradScaler.unscale_grads, GradScaler.step, autocast.__enter__, autocast.__exit__]
    codes = [method.__code__ for method in methods]
    functions = supports_fp16, maybe_cast_tensor, is_autocast_enabled
    handle = amp.init()
    assert all(method.__code__ is not code for method, code in zip(methods, codes, strict=True))
    scaler = GradScaler(growth_interval=1)
    recipe(queue, scaler, steps=2)
    handle.shutdown()
    assert [method.__code__ for method in methods] == codes
    assert (supports_fp16, maybe_cast_tensor, is_autocast_enabled) == functions
    assert scaler.scale == 2.0**18  # what clamp's steps have made of it stays


# ---------------------------------------------------------------------------------------------- autocast


def test_init_inside_of_netcls_autocast(queue: cl.CommandQueue) -> None:
    x = ag.tensor(to_device(queue, np.ones((2, 2))))
    with autocast(enabled=False):
        handle = amp.init()
    assert ag.matmul(x, x).value.dtype == "float16"
    with autocast(enabled=False):
        handle.shutdown()
    assert ag.matmul(x, x).value.dtype == "float32"
    with amp.init():
        assert ag.matmul(x, x).value.dtype == "float16"


def test_supports_fp16_answers_for_clamp(queue: cl.CommandQueue, dtype: str) -> None:
    assert supports_fp16(queue) is True
    assert netcl.amp.supports_fp16(queue) is True  # on PoCL, without cl_khr_fp16, netcl says False
    assert supports_fp16(None) is False


def test_maybe_cast_tensor_and_master_param_lose_nothing(queue: cl.CommandQueue, dtype: str) -> None:
    tensor = to_device(queue, [1.0, 1e6])
    with autocast(device_queue=queue):
        assert maybe_cast_tensor(tensor) is tensor
    assert master_param(tensor) is tensor
    half = to_device(queue, [1.0, 2.0], dtype)
    master = master_param(half)
    assert (master.dtype, to_numpy(master).tolist()) == ("float32", [1, 2])


# ---------------------------------------------------------------------------------------------- GradScaler


@pytest.fixture
def half() -> Iterator[amp.AmpHandle]:
    with amp.init() as handle:
        yield handle


@pytest.fixture
def setup(queue: cl.CommandQueue) -> Steps:
    return Steps(queue, "netcl")


def test_unscale_grads_says_inf(half: amp.AmpHandle, setup: Steps) -> None:
    setup.backward()
    assert setup.scaler.unscale_grads(setup.model.parameters()) is False
    assert setup.scaler.unscale_grads(iter(setup.params)) is False
    clip_grad_norm(setup.params, 1e-3)
    clipped = setup.gradients()
    setup.scaler.step(setup.optimizer, setup.params)
    assert_same(setup.gradients(), clipped)
    setup.backward()
    plant(setup.params[1])
    assert setup.scaler.unscale_grads(setup.params) is True


def test_a_scale_that_nobody_lowers_is_told_of(half: amp.AmpHandle, setup: Steps) -> None:
    """``update`` does nothing, so a loop that leaves the scaler's ``step`` out for inf and nan would go on for ever."""

    def leave_out(times: int) -> None:
        for _ in range(times):
            setup.backward()
            plant(setup.params[0])
            assert setup.scaler.unscale_grads(setup.params) is True
            setup.scaler.update()

    setup.scaler.backoff_factor = 1.0  # step() is called, and is to leave it
    for _ in range(30):
        leave_out(1)
        setup.scaler.step(setup.optimizer, setup.params)
    setup.scaler.backoff_factor = 0.5
    leave_out(23)
    setup.scaler.step(setup.optimizer, setup.params)  # unscales them, too
    assert setup.scaler.scale == 2.0**15
    leave_out(24)
    with pytest.warns(UserWarning, match=r"25 times in a row, at the scale 32768, .*: call scaler\.step\("):
        leave_out(1)
    leave_out(1)
    setup.scaler._scale = 2.0**-126  # the smallest
    for _ in range(30):
        leave_out(1)
        setup.scaler._scale *= 0.5  # by netcl's Trainer


@pytest.mark.parametrize(("stepped", "named"), [((slice(2), slice(2, 4)), slice(4)), ((slice(4),), slice(1))])
def test_all_parameters_named_or_stepped_are_unscaled_once(
    half: amp.AmpHandle, setup: Steps, stepped: tuple[slice, ...], named: slice
) -> None:
    """Two optimizers with all of the model's named each time, and one with few of its own named."""
    setup.backward()
    scaled = setup.gradients()
    for part in stepped:
        setup.scaler.step(SGD(setup.params[part], lr=0.1), setup.params[named])
    for grad, before in zip(setup.gradients(), scaled, strict=True):
        np.testing.assert_array_equal(grad, before / 2**16)


def test_scale_and_tracker_can_be_read_and_set(half: amp.AmpHandle, setup: Steps) -> None:
    setup.backward()
    at_first = setup.gradients()
    setup.scaler._scale = 2.0**10
    setup.backward()
    for grad, before in zip(setup.gradients(), at_first, strict=True):
        np.testing.assert_allclose(grad, before / 2**6, rtol=2e-2, atol=1e-3)
    setup.scaler.step(setup.optimizer, setup.params)
    assert (setup.scaler.scale, setup.scaler._growth_tracker) == (2.0**10, 1)


def test_the_scale_stays_finite_and_above_zero(queue: cl.CommandQueue, half: amp.AmpHandle, setup: Steps) -> None:
    for scale in (0.0, 1e-300, 1e300):
        setup.scaler._scale = scale
        scaled = setup.scaler.scale_loss(ag.tensor(to_device(queue, [1.0])))
        assert 0 < float(to_numpy(scaled.value)[0]) < np.inf


def test_disabled_it_passes_through(half: amp.AmpHandle, setup: Steps) -> None:
    setup.face.one = setup.scaler = GradScaler(enabled=False)
    setup.backward()
    before = setup.gradients()
    assert setup.scaler.unscale_grads(setup.params) is False
    with pytest.warns(UserWarning, match="not scaled"):
        setup.scaler.step(setup.optimizer, setup.params)
    assert_same(setup.gradients(), before)


def test_a_bare_loss_is_scaled_as_a_bare_tensor(queue: cl.CommandQueue, half: amp.AmpHandle) -> None:
    scaled = GradScaler().scale_loss(to_device(queue, [2.0]))
    assert isinstance(scaled, Tensor)
    assert to_numpy(scaled).tolist() == [2.0**17]


@pytest.mark.filterwarnings("ignore:The 'dest_offset' argument:DeprecationWarning")  # netcl's
@pytest.mark.parametrize("count", [3, 9], ids=["small", "stepped as one"])
def test_adamw_clips_models_of_any_size(queue: cl.CommandQueue, half: amp.AmpHandle, count: int) -> None:
    """As clip_grad_norm and step do; netcl's own forgets max_norm where it steps one parameter at a time."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, count, 2048)).astype(np.float32)
    moved = {}
    for how in ("fused", "apart", "unclipped"):
        params = [to_device(queue, value) for value in values[0]]
        optimizer = AdamW(params, lr=0.1, eps=1.0)
        for param, grad in zip(params, values[1], strict=True):
            param.grad = to_device(queue, grad)
        if how == "apart":
            clip_grad_norm(params, 1.0)
        optimizer.step(**({"max_norm": 1.0} if how == "fused" else {}))
        moved[how] = np.stack([param.to_host() for param in params]) - values[0]
    np.testing.assert_allclose(moved["fused"], moved["apart"], atol=1e-6)
    assert np.abs(moved["unclipped"]).max() > 10 * np.abs(moved["apart"] - -0.1 * 0.01 * values[0]).max()


def test_max_norm_of_adamw_may_be_none_or_zero(queue: cl.CommandQueue, half: amp.AmpHandle) -> None:
    for arguments in ((), (None,), (0.0,)):
        param = to_device(queue, np.zeros(4))
        param.grad = to_device(queue, np.full(4, 1e3))
        AdamW([param], lr=0.5, eps=1.0, weight_decay=0.0).step(*arguments)
        np.testing.assert_allclose(param.to_host(), -0.5, rtol=2e-3)


# ---------------------------------------------------------------------------------------------- Trainer


def batches(count: int, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of a problem that a small network learns."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, rows, 8)).astype(np.float32)
    return list(zip(x, x[:, :, :4].argmax(axis=2), strict=True))


class Watched(Trainer):
    """A Trainer that notes the losses and the dtypes of its predictions."""

    def _forward(self, *args: Any) -> Any:
        logits, loss, tape = super()._forward(*args)
        self.dtypes = {*getattr(self, "dtypes", ()), logits.value.dtype}
        self.losses = [*getattr(self, "losses", ()), float(to_numpy(loss.value)[0])]
        return logits, loss, tape


def fit(queue: cl.CommandQueue, data: Any, **settings: Any) -> tuple[Watched, Any]:
    """A Trainer after two epochs, and its model."""
    model = mlp(queue, 8, 32, 4)
    ema = ModelEMA(model, decay=0.9) if settings.pop("ema", False) else None
    seen_too = data if settings.pop("validate", False) else None
    trainer = Watched(model, SGD(model.parameters(), lr=0.5), device_queue=queue, ema=ema, **settings)
    trainer.fit(data, seen_too, epochs=2)
    return trainer, model


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not asked"])
def test_trainer_trains_in_mixed_precision(queue: cl.CommandQueue, dtype: str, asked: bool) -> None:
    """Also one that nobody asked: amp.init() is the user's wish, in training and in evaluation."""
    handle = session.active_handle()
    trainer, _ = fit(queue, batches(12, 16), **({"mixed_precision": True} if asked else {"validate": True}))
    assert trainer.dtypes == {dtype}
    assert np.mean(trainer.losses[-6:]) < 0.7 * np.mean(trainer.losses[:6])
    assert handle.last_step.stepped
    if asked:
        assert (trainer.scaler.scale, trainer.scaler._growth_tracker) == (2.0**12, 24)
    else:
        assert trainer.scaler is None
        scale = handle.loss_scale, handle.scalers[0].growth_tracker  # the handle's scaler scales
        assert scale == ((2.0**16, 24) if dtype == "float16" else (1.0, 0))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"grad_clip": 0.2},
    "accumulation": {"accumulation_steps": 3},
    "ema": {"ema": True},
    "all": {"grad_clip": 0.2, "accumulation_steps": 2, "ema": True},
}


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not asked"])
@pytest.mark.parametrize("name", SETTINGS)
def test_trainer_gives_the_weights_of_fp32(queue: cl.CommandQueue, name: str, asked: bool) -> None:
    """With accumulation, clipping and averaged weights, each and together; one that nobody asked, those of netcl."""
    data, mixed = batches(6, 16), {"mixed_precision": True} if asked else {}

    def weights(dtype: str) -> np.ndarray:
        trainer, model = fit(queue, data, **mixed, **SETTINGS[name])
        assert trainer.dtypes == {dtype}
        averages = [] if trainer.ema is None else [to_numpy(shadow) for shadow in trainer.ema.shadow]
        losses[dtype] = trainer.losses[-1]
        return np.concatenate([weight.reshape(-1) for weight in (*weights_of(model), *averages)])

    losses: dict[str, float] = {}
    with amp.init(dtype="float32") if asked else nullcontext():
        expected = weights("float32")
        plain, _ = fit(queue, data, **mixed)
    for dtype, tolerance in (("float16", 4e-3), ("bfloat16", 2e-2)):
        with amp.init(dtype=dtype):
            np.testing.assert_allclose(weights(dtype), expected, atol=tolerance)
    matters = not np.allclose(plain.losses[-1], losses["bfloat16"], rtol=1e-2)
    assert matters == (name not in ("plain", "ema")), "the setting matters"


def test_trainer_made_before_init_trains(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 8, 32, 4)
    trainer = Watched(model, AdamW(model.parameters(), lr=1e-2), queue, mixed_precision=True, grad_clip=1.0)
    with amp.init():
        trainer.fit(batches(6, 16), epochs=2)
    assert trainer.dtypes == {"float16"}
    assert trainer.losses[-1] < trainer.losses[0]


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not asked"])
def test_trainer_skips_what_overflows(queue: cl.CommandQueue, asked: bool) -> None:
    with amp.init(loss_scale="dynamic" if asked else 2.0**40) as handle:
        model = mlp(queue, 8, 32, 4)
        trainer = Trainer(model, SGD(model.parameters(), lr=0.1), queue, mixed_precision=asked, grad_clip=1.0)
        if asked:
            trainer.scaler._scale = 2.0**40
        before = weights_of(model)
        trainer.fit(batches(1 if asked else 2, 16))
        assert not handle.last_step.stepped
        assert_same(weights_of(model), before)
        assert not asked or trainer.scaler.scale == 2.0**39


def test_trainer_with_a_small_adamw_clips(queue: cl.CommandQueue, half: amp.AmpHandle) -> None:
    model = mlp(queue, 8, 32, 4)
    optimizer = AdamW(model.parameters(), lr=0.1, eps=1.0, weight_decay=0.0)
    before = weights_of(model)
    Trainer(model, optimizer, queue, grad_clip=1e-3).fit(batches(1, 16))
    moved = max(np.abs(now - then).max() for now, then in zip(weights_of(model), before, strict=True))
    assert 0 < moved <= 1e-4  # lr * g / (g + eps), of gradients that are 1e-3 together


def test_islands_that_a_user_wrote_hold_in_a_trainer(queue: cl.CommandQueue, half: amp.AmpHandle) -> None:
    network = mlp(queue, 8, 32, 4)
    seen: list[str] = []

    class Model:
        def __call__(self, x: Node) -> Node:
            with autocast(enabled=False, device_queue=queue):
                out = network(x)
            seen.append(out.value.dtype)
            return network(x)

    trainer = Watched(Model(), SGD(network.parameters(), lr=0.1), queue)
    trainer.fit(batches(2, 16))
    assert (seen, trainer.dtypes) == (["float32"] * 2, {"float16"})
    around = Watched(network, SGD(network.parameters(), lr=0.1), queue)
    for island in (half.disable_casts(), autocast(enabled=False), amp.autocast(enabled=False)):
        with island:
            around.fit(batches(1, 16))
    assert around.dtypes == {"float32"}


def test_a_forward_that_fails_leaves_no_trace_in_the_next_region(queue: cl.CommandQueue, half: amp.AmpHandle) -> None:
    model = mlp(queue, 8, 32, 4)
    trainer = Trainer(model, SGD(model.parameters(), lr=0.1), queue)
    with pytest.raises(TypeError):
        trainer._forward(object(), None, None)  # ends before its autocast
    with autocast(enabled=False):
        assert not is_autocast_enabled()


def test_a_loss_that_was_scaled_by_the_user_is_not_scaled_again(queue: cl.CommandQueue, half: amp.AmpHandle) -> None:
    model = mlp(queue, 8, 32, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, queue)
    (x, y), grads = batches(1, 16)[0], []
    for by_hand in (False, True):
        optimizer.zero_grad()
        _, loss, tape = trainer._forward(x, y, F.cross_entropy)
        if by_hand:
            with half.scale_loss(loss, optimizer) as scaled_loss:
                tape.backward(scaled_loss)
        else:
            tape.backward(loss)
        grads.append([param.grad.to_host().copy() for param in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert theirs.any()
        np.testing.assert_array_equal(ours, theirs)


def test_trainer_takes_a_wrapped_optimizer(queue: cl.CommandQueue, half: amp.AmpHandle) -> None:
    model = mlp(queue, 8, 32, 4)
    optimizer = half.wrap_optimizer(SGD(model.parameters(), lr=0.5))
    trainer = Watched(model, optimizer, queue)
    trainer.fit(batches(12, 16), epochs=2)
    assert np.mean(trainer.losses[-6:]) < 0.7 * np.mean(trainer.losses[:6])
    assert half.scalers[1].growth_tracker == 24


def test_the_handle_shows_the_scale_and_the_steps_of_a_trainers_scaler(
    queue: cl.CommandQueue, half: amp.AmpHandle
) -> None:
    """As they were: the Trainer clears the gradients before its step ends; the report counts what was in them."""
    model, data = mlp(queue, 8, 32, 4), batches(1, 16)
    optimizer = SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, queue, mixed_precision=True)
    for scale, stepped, after in ((2.0**12, True, 2.0**12), (2.0**40, False, 2.0**39)):
        trainer.scaler._scale = scale
        trainer.fit(data)
        assert half.last_step is not None
        assert (half.last_step.stepped, half.last_step.scale, half.loss_scale) == (stepped, after, after)
        assert (half.last_step.scale_before, half.last_step.absent) == (scale, ())
    assert half.last_step.infs + half.last_step.nans > 0
    assert half.last_step.parameters
    scaled_backward(half, loss_of(model, batch(queue, 8, 8, 4)), optimizer)
    assert half.loss_scale == 2.0**16
    optimizer.step()
    assert (half.last_step.stepped, half.last_step.scale) == (True, 2.0**16)


def test_the_handle_shows_the_steps_of_a_scaler_of_netcls(half: amp.AmpHandle, setup: Steps) -> None:
    for sick in (False, True):
        setup.backward()
        if sick:
            plant(setup.params[0])
        setup.scaler.step(setup.optimizer, setup.params)
        assert half.last_step is not None
        assert (half.last_step.stepped, half.loss_scale) == (not sick, setup.scaler.scale)


def test_a_trainer_without_a_handle_is_left_alone(queue: cl.CommandQueue) -> None:
    amp.init().shutdown()
    with amp.autocast():  # patches without a handle
        trainer, _ = fit(queue, batches(2, 16))
        _, _, tape = trainer._forward(*batches(1, 16)[0], F.cross_entropy)
    assert trainer.dtypes == {"float32"}
    assert type(tape) is ag.Tape
