"""16-bit parameters with fp32 masters: every netcl optimizer updates the masters and the model follows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.cluster.ops import scale_
from netcl.core import transfer
from netcl.distributed.collectives import all_reduce, broadcast
from netcl.distributed.data_parallel import broadcast_params
from netcl.evo.genome import inherit_weights
from netcl.evo.population import Population, load_flat_into_module
from netcl.nn import BatchNorm2d, init
from netcl.nn.layers import Linear
from netcl.nn.state import flatten_state_dict
from netcl.ops.elementwise import elementwise_binary
from netcl.optim import SGD, Adam, AdamW, Momentum, clip_grad_norm, clip_grad_norm_device
from netcl.optim.ema import ModelEMA
from netcl.ssl.heads import MomentumEncoder

from clamp import amp, session
from clamp.bridge import Parameter, Tensor
from clamp.cli.bench.timing import counted_launches
from clamp.params import masters
from clamp.params.parts import KEEPS
from tests.networks import LOSS_FACTOR, UsersSGD, batch, loss_of, mlp, scaled_backward, step, weights_of
from tests.reference import HALF_DTYPES, assert_same, quantize, to_device, to_numpy
from tests.scaling.test_overflow import OPTIMIZERS, WIDTHS, optimizer_state

pytestmark = [
    pytest.mark.usefixtures("shut_down"),
    pytest.mark.filterwarnings("ignore:.*loss that was not scaled:UserWarning"),  # most have numbers that need no scale
]


def master_values(params: list[Tensor]) -> list[np.ndarray]:
    return [masters.master_for(param).to_host().copy() for param in params]


def assert_model_follows(params: list[Tensor], dtype: str) -> None:
    for param in params:
        assert param.dtype == dtype
        np.testing.assert_array_equal(
            to_numpy(param), quantize(masters.master_for(param).to_host(), dtype).astype(np.float64)
        )


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_masters_are_clipped_by_value_after_a_plain_backward(queue: cl.CommandQueue, dtype: str) -> None:
    model, data = mlp(queue, 8, 4), batch(queue, 4, 8, 4)
    with amp.init(dtype=dtype, level="O2"):
        optimizer = SGD(model.parameters(), lr=1.0)
        model, optimizer = amp.decorate(model, optimizer, level="O2", dtype=dtype)
        once: list[np.ndarray] = []
        for passes in (1, 2):
            optimizer.zero_grad()
            for _ in range(passes):  # the second adds to what the masters show by then
                loss_of(model, data).backward()
                found = [master.grad.to_host() for master in amp.master_params(optimizer)]
            once = once or found
            for master, grad, one in zip(amp.master_params(optimizer), found, once, strict=True):
                np.testing.assert_allclose(grad, passes * one, rtol=2**-7)
                master.grad = Tensor.from_host(queue, np.clip(grad, -(2.0**-20), 2.0**-20))
        start = [master.to_host().copy() for master in amp.master_params(optimizer)]
        optimizer.step()
        for master, was, one in zip(amp.master_params(optimizer), start, once, strict=True):
            np.testing.assert_allclose(was - master.to_host(), np.clip(one, -(2.0**-20), 2.0**-20), atol=2.0**-23)


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_updates_the_masters_and_the_model(queue: cl.CommandQueue, name: str, built: str) -> None:
    data = batch(queue, 32, 16, 8)
    dtype = "bfloat16" if name in ("sgd", "adamw_per_parameter") else "float16"
    model = mlp(queue, *WIDTHS)
    before = weights_of(model)
    params = model.parameters()
    handle = amp.init(dtype=dtype, loss_scale=64.0)
    if built == "before":
        optimizer = OPTIMIZERS[name](params)
        masters.narrow(params, dtype, [optimizer], gradient_dtype="float32")
    else:
        masters.narrow(params, dtype, gradient_dtype="float32")
        optimizer = OPTIMIZERS[name](params)
    assert_same(before, master_values(params))
    losses = [step(handle, model, optimizer, data) for _ in range(4)]
    assert losses[-1] < losses[0]
    stepped = len(optimizer.params)
    for old, master in zip(before[:stepped], master_values(params)[:stepped], strict=True):
        assert not np.array_equal(old, master)
    assert all(param.dtype == "float32" for param in optimizer.params)
    assert_model_follows(params[:stepped], dtype)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_survive_narrowing(queue: cl.CommandQueue, name: str) -> None:
    """Three fp32 steps, then three with 16-bit parameters: the optimizer does what its own continued state says."""
    data = batch(queue, 32, 16, 8)
    model = mlp(queue, *WIDTHS)
    optimizer = OPTIMIZERS[name](model.parameters())
    handle = amp.init(loss_scale=64.0)
    for _ in range(3):
        step(handle, model, optimizer, data)
    state, values = optimizer_state(optimizer, queue), weights_of(model)
    masters.narrow(model.parameters(), "float16", [optimizer])
    after = optimizer_state(optimizer, queue)
    for key in ("velocity", "vel", "m", "v", "square_avg", "_m_buf", "_v_buf", "params"):
        if key in state:
            as_lists = [list(x.values()) if isinstance(x, dict) else x for x in (state[key], after[key])]
            assert sorted(as_lists[0]) == sorted(as_lists[1]), key
    assert_same(values, master_values(model.parameters()))


def weight_and_input(queue: cl.CommandQueue, dtype: str = "float16") -> tuple[Parameter, Any]:
    weight = Parameter.from_host(queue, np.ones((4, 3), np.float32))
    masters.narrow([weight], dtype)
    return weight, ag.tensor(to_device(queue, np.ones((2, 4))))


def backward(weight: Parameter, x: Any) -> None:
    ag.sum(ag.matmul_op(x, ag.tensor(weight, requires_grad=True))).backward()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_step_without_scale_loss_uses_plain_16_bit_gradients(queue: cl.CommandQueue, dtype: str) -> None:
    weight, x = weight_and_input(queue, dtype)
    amp.init(dtype=dtype)
    optimizer = SGD([weight], lr=2.0**-6)
    is_told = pytest.warns(UserWarning, match="loss that was not scaled")
    for expected, told in ((1 - 2 * 2.0**-6, is_told), (1 - 4 * 2.0**-6, nullcontext())):
        optimizer.zero_grad()
        backward(weight, x)
        assert weight.grad.dtype == dtype
        with told if dtype == "float16" else nullcontext():
            optimizer.step()
        np.testing.assert_array_equal(to_numpy(weight), np.full((4, 3), expected))
    with session.active_handle().disable_casts():
        optimizer.zero_grad()
        optimizer.step()
    np.testing.assert_array_equal(to_numpy(weight), np.full((4, 3), expected))


def test_step_in_a_region_without_a_handle(queue: cl.CommandQueue) -> None:
    weight, x = weight_and_input(queue)
    optimizer = Momentum([weight], lr=2.0**-6)
    with amp.autocast():
        backward(weight, x)
    optimizer.step()
    np.testing.assert_array_equal(to_numpy(weight), np.full((4, 3), 1 - 2 * 2.0**-6))


@pytest.mark.parametrize("how", ["its gradient is cleared", "it is frozen"])
def test_what_is_cleared_or_frozen_stays(queue: cl.CommandQueue, how: str) -> None:
    weight, x = weight_and_input(queue)
    amp.init()
    optimizer = SGD([weight], lr=1.0)
    backward(weight, x)
    if how == "it is frozen":
        weight.requires_grad, weight._frozen = False, True
    else:
        optimizer.zero_grad()
        assert weight.grad is None
    optimizer.step()
    np.testing.assert_array_equal(to_numpy(weight), np.ones((4, 3)))


def test_one_gradient_on_model_and_master(queue: cl.CommandQueue) -> None:
    weight, x = weight_and_input(queue)
    handle = amp.init(loss_scale=64.0)
    optimizer = SGD([weight], lr=2.0**-6)

    def scaled_pass() -> None:
        scaled_backward(handle, ag.sum(ag.matmul_op(x, ag.tensor(weight))), optimizer)

    scaled_pass()
    (master,) = amp.master_params(optimizer)
    assert weight.grad is master.grad
    np.testing.assert_array_equal(master.grad.to_host(), np.full((4, 3), 2.0))
    scaled_pass()  # accumulates
    np.testing.assert_array_equal(weight.grad.to_host(), np.full((4, 3), 4.0))
    backward(weight, x)  # an unscaled pass adds to it
    scaled_pass()
    np.testing.assert_array_equal(master.grad.to_host(), np.full((4, 3), 8.0))
    clip_grad_norm([weight], float(np.sqrt(12.0)))  # norm 8 sqrt(12) -> every element 1
    with pytest.warns(UserWarning, match="not scaled"):
        optimizer.step()
    np.testing.assert_allclose(master.to_host(), np.full((4, 3), 1 - 2.0**-6), rtol=1e-6)
    weight.grad = None  # cleared by hand, on the model
    optimizer.step()
    np.testing.assert_allclose(master.to_host(), np.full((4, 3), 1 - 2.0**-6), rtol=1e-6)


@pytest.mark.parametrize("where", ["model", "master", "both", "one on each"])
def test_a_scaler_divides_a_gradient_wherever_it_is(queue: cl.CommandQueue, where: str) -> None:
    weight, _ = weight_and_input(queue)
    optimizer, scaler = SGD([weight], lr=1.0), amp.GradScaler(init_scale=4.0)
    with amp.init():
        (master,) = amp.master_params(optimizer)
        scaler.scale(to_device(queue, np.ones(1)))
        ours, theirs = (to_device(queue, np.full((4, 3), value)) for value in (8.0, 16.0))
        master.grad = None if where == "model" else ours
        weight.grad = {"master": None, "both": ours}.get(where, theirs)
        scaler.unscale_(optimizer)
        expected = {"model": 4.0, "master": 2.0, "both": 2.0, "one on each": 6.0}[where]
        np.testing.assert_array_equal(master.grad.to_host(), np.full((4, 3), expected))
        assert weight.grad is master.grad


def test_a_scaler_widens_a_gradient_as_it_divides_it(queue: cl.CommandQueue) -> None:
    weight, x = weight_and_input(queue)
    optimizer, scaler = SGD([weight], lr=1.0), amp.GradScaler(init_scale=4.0)
    with amp.init():
        for _ in range(2):  # in the first the weight becomes a master's
            optimizer.zero_grad()
            scaler.scale(ag.sum(ag.matmul_op(x, ag.tensor(weight)))).backward()
            with counted_launches() as names:
                scaler.unscale_(optimizer)
            scaler.update()
    assert names == ["unscale", "assign"]


def test_an_exception_leaves_both_gradients(queue: cl.CommandQueue) -> None:
    weight, x = weight_and_input(queue)
    handle = amp.init(loss_scale=64.0)
    optimizer = SGD([weight], lr=2.0**-6)
    for before in (None, to_device(queue, np.ones((4, 3)))):
        (master,) = amp.master_params(optimizer)
        master.grad = weight.grad = before
        loss = ag.sum(ag.matmul_op(x, ag.tensor(weight)))
        with pytest.raises(KeyError), handle.scale_loss(loss, optimizer) as scaled_loss:  # noqa: PT012
            scaled_loss.backward()
            raise KeyError
        assert weight.grad is before
        assert master.grad is before


def test_clipping_masters_is_refused_while_the_parameters_gradients_are_scaled(queue: cl.CommandQueue) -> None:
    weight, x = weight_and_input(queue)
    handle = amp.init(loss_scale=64.0)
    optimizer = SGD([weight], lr=2.0**-6)
    with handle.scale_loss(ag.sum(ag.matmul_op(x, ag.tensor(weight))), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match="still multiplied by the loss scale"):
            clip_grad_norm(list(amp.master_params(optimizer)), 1.0)


def test_gradients_in_the_parameters_dtype_or_in_fp32(queue: cl.CommandQueue) -> None:
    data = batch(queue, 8, 16, 8)
    amp.init()
    in_parts = [(keeps, None, "float32") for keeps in ("remainder", "kahan", "stochastic")]
    for keeps, gradient_dtype, expected in ((True, None, "float16"), (True, "float32", "float32"), *in_parts):
        model = mlp(queue, 16, 32, 8)
        masters.narrow(model.parameters(), "float16", keep_master=keeps, gradient_dtype=gradient_dtype)
        loss_of(model, data).backward()
        assert {param.grad.dtype for param in model.parameters()} == {expected}


@pytest.mark.parametrize("make", [Adam, Momentum, AdamW], ids=lambda cls: cls.__name__)
def test_parameters_added_later(queue: cl.CommandQueue, make: Any) -> None:
    model, more, data = mlp(queue, *WIDTHS), mlp(queue, 8, 8), batch(queue, 32, 16, 8)
    handle = amp.init(loss_scale=64.0)
    masters.narrow(model.parameters(), "float16")
    optimizer = make(model.parameters(), lr=1e-3)
    step(handle, model, optimizer, data)
    moments = optimizer.state_dict()["moments"] if make is AdamW else None
    masters.narrow(more.parameters(), "float16")
    optimizer.params += more.parameters()  # the 16-bit parameters themselves
    before = weights_of(more)
    if moments is not None:
        for (m, v), (new_m, new_v) in zip(moments, optimizer.state_dict()["moments"][: len(moments)], strict=True):
            np.testing.assert_array_equal(m, new_m)
            np.testing.assert_array_equal(v, new_v)
    x, y = data
    optimizer.zero_grad()
    loss = ag.mul(ag.mse_loss(more(model(ag.tensor(x))), ag.tensor(y)), LOSS_FACTOR)
    scaled_backward(handle, loss, optimizer)
    optimizer.step()
    assert {param.dtype for param in optimizer.params} == {"float32"}
    assert any(not np.array_equal(a, b) for a, b in zip(before, weights_of(more), strict=True))
    assert_model_follows(model.parameters() + more.parameters(), "float16")


def test_two_optimizers_of_one_parameter_share_its_master(queue: cl.CommandQueue) -> None:
    weight = Parameter.from_host(queue, np.ones((4, 3), np.float16), dtype="float16")
    made_by_netcl = [SGD([weight]), SGD([weight])]
    assert made_by_netcl[0].params[0] is not made_by_netcl[1].params[0]
    amp.init()
    later = SGD([weight])
    (master,) = amp.master_params(later)
    for optimizer in made_by_netcl:
        assert amp.master_params(optimizer)[0] is master


def test_frozen_parameters_thaw_under_another_handle(queue: cl.CommandQueue) -> None:
    """Their masters are plain tensors with netcl's mark then, and still know whose they are."""
    model, data = mlp(queue, 16, 32, 8), batch(queue, 32, 16, 8)
    model.layers[0].freeze()
    optimizer = SGD(model.parameters(), lr=0.01)
    masters.narrow(model.parameters(), "bfloat16", [optimizer])
    with amp.init(dtype="bfloat16") as handle:
        step(handle, model, optimizer, data)
    with amp.init(dtype="bfloat16") as handle:
        step(handle, model, optimizer, data)
        before = weights_of(model)
        model.layers[0].unfreeze()
        step(handle, model, optimizer, data)
    assert not any(np.array_equal(one, other) for one, other in zip(before, weights_of(model), strict=True))


@pytest.mark.parametrize("order", ["decorate", "decorate, init", "init, decorate", "initialize"])
def test_optimizers_of_the_users_step_masters_without_a_scaled_pass(queue: cl.CommandQueue, order: str) -> None:
    model, data = mlp(queue, 16, 32, 8), batch(queue, 32, 16, 8)
    optimizer = UsersSGD(model.parameters())
    for call in order.split(", "):
        if call == "init":
            amp.init(dtype="bfloat16")
        elif call == "decorate":
            amp.decorate(model, optimizer, dtype="bfloat16")
        else:
            amp.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
    for _ in range(2):
        before = master_values(model.parameters())
        optimizer.zero_grad()
        assert [param.grad for param in model.parameters()] == [None] * 4
        ag.mul(loss_of(model, data), 2.0**-10).backward()
        optimizer.step()
        for one, other in zip(before, master_values(model.parameters()), strict=True):
            assert not np.array_equal(one, other)
        assert_model_follows(model.parameters(), "bfloat16")


@pytest.mark.parametrize("clip", [clip_grad_norm, clip_grad_norm_device])
@pytest.mark.parametrize("is_thawed", [False, True])
def test_clipping_finds_what_masters_are_about_to_be_stepped_by(
    queue: cl.CommandQueue, clip: Callable[..., Any], is_thawed: bool
) -> None:
    """A gradient that is on the parameter yet; and that of one whose master has the mark of the frozen yet."""
    model, data = mlp(queue, 16, 32, 8), batch(queue, 32, 16, 8)
    optimizer = SGD(model.parameters(), lr=1.0)
    masters.narrow(model.parameters(), "bfloat16", [optimizer])
    before = master_values(model.parameters())
    with amp.init(dtype="bfloat16"):
        if is_thawed:
            model.layers[0].freeze()
            optimizer.step()
            model.layers[0].unfreeze()
        loss_of(model, data).backward()
        clip(optimizer.params, 2.0**-7)
        optimizer.step()
    moved = zip(before, master_values(model.parameters()), strict=True)
    assert np.linalg.norm([np.linalg.norm(one - other) for one, other in moved]) == pytest.approx(2.0**-7, rel=1e-3)


@pytest.mark.filterwarnings("ignore:in this step:UserWarning")
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_without_masters_no_precision_is_kept(queue: cl.CommandQueue, dtype: str) -> None:
    weight = Parameter.from_host(queue, np.ones((4, 3), np.float32))
    amp.init(dtype=dtype)
    masters.narrow([weight], dtype, keep_master=False)
    optimizer = SGD([weight], lr=2.0**-14)
    x = ag.tensor(to_device(queue, np.ones((2, 4))))
    for _ in range(40):  # each update is below half an ulp of 1
        optimizer.zero_grad()
        backward(weight, x)
        optimizer.step()
    np.testing.assert_array_equal(to_numpy(weight), np.ones((4, 3)))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_state_is_the_masters_and_comes_back_to_both(queue: cl.CommandQueue, dtype: str) -> None:
    model = mlp(queue, 16, 32, 8)
    params, before = model.parameters(), weights_of(model)
    masters.narrow(params, dtype)
    with masters.showing_masters(params):
        state = model.state_dict()
    assert {param.dtype for param in params} == {dtype}
    saved = list(flatten_state_dict(state, arrays_only=True).values())
    assert {array.dtype for array in saved} == {np.dtype(np.float32)}
    assert sorted(array.tobytes() for array in saved) == sorted(array.tobytes() for array in before)
    other = mlp(queue, 16, 32, 8, seed=3)
    masters.narrow(other.parameters(), dtype)
    with masters.showing_masters(other.parameters(), load=True):
        other.load_state_dict(state)
    assert_same(before, master_values(other.parameters()))
    assert_model_follows(other.parameters(), dtype)


def test_batch_norm_trains_with_16_bit_neighbours(queue: cl.CommandQueue) -> None:
    norm = BatchNorm2d(queue, 3)
    amp.init()
    x = ag.tensor(to_device(queue, np.random.default_rng(0).standard_normal((2, 3, 4, 4)), "float16"))
    ag.sum(ag.square(norm(x))).backward()
    assert norm.gamma.grad.dtype == "float32"


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_what_a_user_writes_into_a_parameter_is_not_lost(queue: cl.CommandQueue, dtype: str) -> None:
    weight, x = weight_and_input(queue, dtype)
    amp.init(dtype=dtype)
    optimizer = SGD([weight], lr=2.0**-6)
    weight.write(np.full((4, 3), 2.0, np.float32))
    np.testing.assert_array_equal(amp.master_params(optimizer)[0].to_host(), np.full((4, 3), 2.0))
    backward(weight, x)
    optimizer.step()
    np.testing.assert_array_equal(to_numpy(weight), np.full((4, 3), 2 - 2 * 2.0**-6))


#: ways to give a tensor other numbers
WRITES: dict[str, Callable[[Tensor, np.ndarray], Any]] = {
    "write": lambda tensor, numbers: tensor.write(numbers),
    "transfer.write": lambda tensor, numbers: transfer.write(tensor.queue, tensor.buffer, numbers),
    "out=": lambda tensor, numbers: elementwise_binary(
        (source := to_device(tensor.queue, numbers)), source, expression="MUL(v0, 1.0f)", out=tensor
    ),
}


@pytest.mark.filterwarnings("ignore:in this step:UserWarning")
@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize("how", WRITES)
def test_what_a_user_writes_into_a_master_reaches_its_parameter(queue: cl.CommandQueue, how: str, keeps: Any) -> None:
    other, weight = (Parameter.from_host(queue, np.ones((4, 3), np.float32)) for _ in "12")
    optimizer = SGD([weight], lr=2.0**-6)
    x = ag.tensor(to_device(queue, np.ones((2, 4))))
    with amp.init(dtype="bfloat16"):
        masters.narrow([other, weight], "bfloat16", [optimizer], keep_master=keeps)
        backward(weight, x)  # of what is derived from the weight nothing may stay
        with masters.showing_masters([other]):
            WRITES[how](optimizer.params[0], np.full((4, 3), 2.0, np.float32))
        np.testing.assert_array_equal(to_numpy(weight), np.full((4, 3), 2.0))
        np.testing.assert_array_equal(to_numpy(ag.matmul_op(x, ag.tensor(weight)).value), np.full((2, 3), 8.0))
        optimizer.step()
    np.testing.assert_array_equal(optimizer.params[0].to_host(), np.full((4, 3), 2 - 2 * 2.0**-6))


@pytest.mark.parametrize("keeps", [True, "remainder"])
def test_what_a_user_writes_into_a_master_is_what_ops_read(queue: cl.CommandQueue, keeps: bool | str) -> None:
    """Not panels that were packed of the parameter before."""
    amp.init()
    layer, optimizer = amp.decorate(layer := Linear(queue, 512, 512), SGD(layer.parameters()), master_weight=keeps)
    x = ag.tensor(to_device(queue, np.ones((256, 512)), "float16"))
    with ag.no_grad():
        for _ in range(3):  # kept from the second time on
            layer(x)
        for master in amp.master_params(optimizer):
            master.write(np.zeros(master.shape, np.float32))
        assert not to_numpy(layer(x)).any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_weight_that_is_stepped_twice_follows_both_times(queue: cl.CommandQueue, name: str) -> None:
    """Tied layers: ``model.parameters()`` has their weight twice, and netcl steps it twice."""
    weight, x = weight_and_input(queue)
    amp.init()
    optimizer = OPTIMIZERS[name]([weight, weight])
    backward(weight, x)
    optimizer.step()
    assert_model_follows([weight], "float16")
    assert not np.array_equal(to_numpy(weight), np.ones((4, 3)))


def test_clipping_keeps_the_masters_precision(queue: cl.CommandQueue) -> None:
    weight, x = weight_and_input(queue)
    amp.init()
    optimizer = SGD([weight], lr=2.0**-10)
    for _ in range(3):
        optimizer.zero_grad()
        backward(weight, x)
        clip_grad_norm([weight], 1e-3)
        optimizer.step()
    values = amp.master_params(optimizer)[0].to_host()
    assert ((values < 1) & (values > 1 - 2e-6)).all(), "updates far below an ulp of float16 add up"


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_another_thread_computes_with_a_parameter_while_its_master_is_shown(queue: cl.CommandQueue, dtype: str) -> None:
    """As one evaluates, or trains, while another one averages, or saves."""
    with amp.init(dtype=dtype, level="O2"), ThreadPoolExecutor(1) as thread:
        model, (x, _) = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
        amp.decorate(model, SGD(model.parameters(), lr=0.1), level="O2", dtype=dtype)

        def evaluate() -> tuple[list[str], np.ndarray]:
            return [param.dtype for param in model.parameters()], model(ag.tensor(x)).value.to_host()

        expected, seen = evaluate(), []
        with masters.showing_masters(model.parameters(), load=True):
            seen.append(thread.submit(evaluate).result())
            for _ in range(2):  # also after what is inside of it
                assert {param.dtype for param in model.parameters()} == {"float32"}
                with masters.showing_masters(model.parameters()):
                    pass
        seen.append(evaluate())
        for dtypes, value in seen:
            assert dtypes == expected[0] == [dtype] * len(dtypes)
            assert_same(value, expected[1])
        assert {type(param) for param in model.parameters()} == {Parameter}


def test_moving_averages_of_two_threads_take_turns(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """netcl has one kernel for both, and would launch it in one with the arguments of the other."""
    at_once, met = threading.Barrier(2), []

    def launched(*args: Any, **kwargs: Any) -> Tensor:
        with suppress(threading.BrokenBarrierError):  # nobody else has come
            met.append(at_once.wait(0.1))
        return elementwise_binary(*args, **kwargs)

    with amp.init():
        averages = [ModelEMA(mlp(queue, 4, 4), decay=0.5) for _ in range(2)]
        monkeypatch.setattr("netcl.optim.ema.elementwise_binary", launched)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ModelEMA.update, averages))
    assert met == []


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_moving_averages_are_of_the_masters(queue: cl.CommandQueue, dtype: str) -> None:
    model, data = mlp(queue, 16, 32, 8), batch(queue, 8, 16, 8)
    handle = amp.init(dtype=dtype, loss_scale=64.0)
    masters.narrow(model.parameters(), dtype)
    optimizer = SGD(model.parameters(), lr=1e-3)
    ema = ModelEMA(model, decay=0.5, warmup=False)
    expected = master_values(model.parameters())
    for _ in range(2):
        step(handle, model, optimizer, data)
        ema.update()
        expected = [(a + b) / 2 for a, b in zip(expected, master_values(model.parameters()), strict=True)]
    own = master_values(model.parameters())
    with ema.averaged():
        for param, average in zip(model.parameters(), expected, strict=True):
            np.testing.assert_allclose(masters.master_for(param).to_host(), average, rtol=1e-6, atol=1e-8)
        assert_model_follows(model.parameters(), dtype)
    assert_same(own, master_values(model.parameters()))


@pytest.mark.parametrize("narrowed", ["student", "teacher", "both"])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_teachers_average_the_masters(queue: cl.CommandQueue, dtype: str, narrowed: str) -> None:
    student, teacher = mlp(queue, 5, 4, 3), mlp(queue, 5, 4, 3, seed=1)
    amp.init(dtype=dtype)
    for model, name in ((student, "student"), (teacher, "teacher")):
        if narrowed in (name, "both"):
            masters.narrow(model.parameters(), dtype)
    follows = MomentumEncoder(student, teacher, momentum=0.5)
    expected = master_values(student.parameters())
    assert_same(master_values(teacher.parameters()), expected)
    for param in student.parameters():
        param.write(np.zeros(param.shape, np.float32))
    follows.update()
    assert_same(master_values(teacher.parameters()), [values / 2 for values in expected])
    if narrowed != "student":
        assert_model_follows(teacher.parameters(), dtype)


@pytest.mark.filterwarnings("ignore:Kernel 'netcl_copy_u32'")
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_evolution_takes_the_masters_for_genes(queue: cl.CommandQueue, dtype: str) -> None:
    model, child = mlp(queue, 5, 4, 3), mlp(queue, 5, 4, 3, seed=1)
    amp.init(dtype=dtype)
    for one in (model, child):
        masters.narrow(one.parameters(), dtype)
    population = Population.from_module(model, 3, sigma=0.5)
    first, _, last = population.to_host()
    np.testing.assert_array_equal(first, flat(model))
    population.load_into(model, 2)
    np.testing.assert_array_equal(flat(model), last)
    assert_model_follows(model.parameters(), dtype)
    population.store_from(model, 1)
    np.testing.assert_array_equal(population.individual(1), last)
    inherit_weights(child, model)
    np.testing.assert_array_equal(flat(child), last)
    load_flat_into_module(child, first)
    np.testing.assert_array_equal(flat(child), first)
    assert_model_follows(child.parameters(), dtype)


@pytest.mark.parametrize(
    "fill", [init.xavier_uniform, init.kaiming_uniform, init.normal, partial(init.constant, val=0.1)]
)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_initial_values_are_the_masters(queue: cl.CommandQueue, dtype: str, fill: Callable[[Tensor], None]) -> None:
    weights = [Parameter.from_host(queue, np.ones((4, 3), np.float32)) for _ in range(2)]
    masters.narrow(weights[1:], dtype)
    amp.init(dtype=dtype)
    for weight in weights:
        np.random.seed(0)
        fill(weight)
    np.testing.assert_array_equal(masters.master_for(weights[1]).to_host(), weights[0].to_host())
    assert_model_follows(weights[1:], dtype)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_functions_that_write_in_place_write_masters(queue: cl.CommandQueue, dtype: str) -> None:
    models = [mlp(queue, 5, 4, 3, seed=seed) for seed in (0, 1)]
    values = weights_of(models[0])
    amp.init(dtype=dtype)
    for model in models:
        masters.narrow(model.parameters(), dtype)
    first, second = (model.parameters() for model in models)
    broadcast_params(first, [first, second])
    for pair in zip(first, second, strict=True):
        scale_(pair[1], 3.0)
        all_reduce(pair, op="mean")
        scale_(pair[0], 0.5)
        broadcast(list(pair))
    for params in (first, second):
        assert_same(master_values(params), values)
        assert_model_follows(params, dtype)
    for param in second:
        scale_(param, 0.25)
    assert_same(master_values(second), [x / 4 for x in values])
    assert_model_follows(second, dtype)


def flat(model: Any) -> np.ndarray:
    return np.concatenate([values.ravel() for values in master_values(model.parameters())])
