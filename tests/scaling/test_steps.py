"""What stands between ``step()`` and a bad gradient, in every dtype, and what a user is told of each step."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Linear, ReLU, Sequential
from netcl.optim import SGD, Adam, AdamW

from clamp import amp
from clamp.bridge import Parameter, Tensor
from clamp.cli.bench.timing import counted_launches
from clamp.ops.loss_scale import DeviceState
from clamp.scaling import step_guard
from tests.networks import batch, loss_of, mlp, scaled_backward, weights_of
from tests.reference import to_device
from tests.scaling.test_overflow import plant

pytestmark = pytest.mark.usefixtures("shut_down")

DTYPES = ["float16", "bfloat16", "float32"]


class Training:
    """A small network, its data and its optimizer."""

    def __init__(self, queue: cl.CommandQueue, make: Callable[[list[Tensor]], Any] = Adam) -> None:
        self.model, self.data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
        self.optimizer = make(self.model.parameters())

    def backward(self, handle: Any, bad: float | None = None, param: int = 2) -> None:
        self.optimizer.zero_grad()
        with handle.scale_loss(loss_of(self.model, self.data), self.optimizer) as scaled_loss:
            scaled_loss.backward()
            if bad is not None:
                plant(self.optimizer.params[param], bad)

    def step(self, handle: Any, bad: float | None = None) -> None:
        self.backward(handle, bad)
        self.optimizer.step()

    def weights(self) -> list[Any]:
        return weights_of(self.model)

    def is_unchanged(self, before: list[Any]) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(before, self.weights(), strict=True))


@pytest.fixture
def training(queue: cl.CommandQueue) -> Training:
    return Training(queue)


# ---------------------------------------------------------------------------------------------- every dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("with_scale_loss", [True, False])
def test_a_step_on_bad_gradients_is_skipped(
    training: Training, dtype: str, value: float, with_scale_loss: bool
) -> None:
    handle = amp.init(dtype=dtype, loss_scale=1.0 if dtype == "float16" else "auto")
    for bad in (None, value, None):
        before = training.weights()
        if with_scale_loss:
            training.backward(handle, bad)
        else:
            training.optimizer.zero_grad()
            for param in training.optimizer.params:
                param.grad = to_device(param.queue, np.ones(param.shape, np.float32))
            if bad is not None:
                plant(training.optimizer.params[2], bad)
        training.optimizer.step()
        assert handle.last_step.stepped == (bad is None)
        assert training.is_unchanged(before) == (bad is not None)
        assert training.optimizer.t == len([report for report in handle.history if report.stepped])
    assert [report.step for report in handle.history] == [1, 2, 3]


def test_a_nan_batch_does_not_reach_16_bit_parameters(queue: cl.CommandQueue) -> None:
    training = Training(queue)
    handle = amp.init(dtype="bfloat16")
    amp.decorate(training.model, training.optimizer, dtype="bfloat16")
    training.step(handle)
    before = training.weights()
    training.data = to_device(queue, np.full((4, 8), np.nan, np.float32)), training.data[1]
    training.step(handle)
    assert not handle.last_step.stepped
    assert training.is_unchanged(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_can_be_switched_off_but_for_scaled_losses(training: Training, dtype: str) -> None:
    handle = amp.init(dtype=dtype, check_finite=False)
    training.step(handle, np.nan)
    assert handle.last_step.stepped == np.isnan(training.weights()[2]).any() == (dtype != "float16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_check_is_one_launch_and_one_read(training: Training, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = amp.init(dtype=dtype)
    training.step(handle)
    training.backward(handle)
    copies: list[object] = []
    copy = cl.enqueue_copy
    monkeypatch.setattr(cl, "enqueue_copy", lambda *args, **kwargs: [copies.append(args), copy(*args, **kwargs)][1])
    with counted_launches() as launches:
        training.optimizer.step()
    assert launches == ["unscale", "update"]
    assert len(copies) == 1


def test_gradients_of_a_scaled_pass_are_not_checked_again(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = amp.init(loss_scale=1.0)
    training.backward(handle)
    monkeypatch.setattr(step_guard, "check_", lambda *args: pytest.fail("they are known to be finite"))
    training.optimizer.step()
    assert handle.last_step.stepped


@pytest.mark.parametrize(
    ("scaled", "then", "count"), [(None, np.nan, 1), (np.inf, 1.0, None)], ids=["one is bad", "good after a skip"]
)
def test_a_gradient_that_a_user_puts_in_place_of_a_scaled_one_decides(
    training: Training, scaled: float | None, then: float, count: int | None
) -> None:
    handle = amp.init(loss_scale=1.0)
    training.backward(handle, scaled)
    if scaled is not None:
        training.optimizer.step()
        assert not handle.last_step.stepped
    for param in training.optimizer.params[:count]:
        param.grad = to_device(param.queue, np.full(param.shape, then, np.float32))
    training.optimizer.step()
    assert handle.last_step.stepped == (then == 1.0)


def test_a_static_scale_that_is_too_large_is_called_so(training: Training) -> None:
    handle = amp.init(loss_scale=2.0**15)
    with pytest.raises(FloatingPointError, match=r"at the static loss scale 32768: either the scale is too large"):  # noqa: PT012
        for _ in range(25):
            training.step(handle, np.inf)
    dynamic = amp.GradScaler(2.0**-126)
    with pytest.raises(FloatingPointError, match=r"at its floor .*layers\.0\.weight.* amp\.debugging\.explain"):  # noqa: PT012
        for _ in range(25):
            training.optimizer.zero_grad()
            dynamic.scale(loss_of(training.model, training.data)).backward()
            plant(training.optimizer.params[0], np.nan)
            dynamic.step(training.optimizer)
            dynamic.update()


# ---------------------------------------------------------------------------------------------- reports


@pytest.mark.filterwarnings("ignore:a gradient was:UserWarning")
def test_a_report_has_numbers_names_and_scales(training: Training) -> None:
    handle = amp.init()
    assert handle.last_step is None
    assert len(handle.history) == 0
    training.step(handle)
    training.optimizer.zero_grad()
    with handle.scale_loss(loss_of(training.model, training.data), training.optimizer) as scaled_loss:
        scaled_loss.backward()
        plant(training.optimizer.params[0], np.inf)
        plant(training.optimizer.params[3], np.nan)
        training.optimizer.params[3].grad.write(np.full(4, np.nan, np.float32))
    training.optimizer.step()
    first, second = handle.history
    assert first == amp.StepReport(True, "", 2.0**16, scale_before=2.0**16, step=1)
    assert second == amp.StepReport(
        False,
        "inf in 1 element and nan in 4 elements of the gradients of layers.0.weight, layers.2.bias",
        2.0**15,
        scale_before=2.0**16,
        step=2,
        infs=1,
        nans=4,
        parameters=("layers.0.weight", "layers.2.bias"),
    )
    assert handle.last_step is second


def test_many_parameters_are_counted_and_the_first_named(queue: cl.CommandQueue) -> None:
    training = Training(queue)
    training.model = Sequential(*(Linear(queue, 4, 4) for _ in range(60)))
    training.optimizer = SGD(training.model.parameters())
    training.data = batch(queue, 4, 4, 4)
    handle = amp.init(dtype="float32")
    training.backward(handle)
    for param in training.optimizer.params:
        plant(param, np.nan)
    training.optimizer.step()
    assert handle.last_step.reason == (
        "nan in 120 elements of the gradients of layers.0.weight, layers.0.bias, layers.1.weight and 117 more"
    )
    training.backward(handle)
    for param in training.optimizer.params[:3]:
        plant(param, np.inf)
    training.optimizer.step()
    assert handle.last_step.reason == (
        "inf in 3 elements of the gradients of layers.0.weight, layers.0.bias, layers.1.weight"
    )


def test_parameters_without_a_gradient_are_named_and_frozen_ones_not(queue: cl.CommandQueue) -> None:
    model = Sequential(Linear(queue, 8, 8), ReLU(), Linear(queue, 8, 4))
    optimizer = SGD([*model.parameters(), Parameter.from_host(queue, np.ones(3, np.float32))], lr=1e-3)
    model.layers[0].freeze()
    handle = amp.init(dtype="float32")
    x, y = batch(queue, 4, 8, 4)
    scaled_backward(handle, loss_of(model, (x, y)), optimizer)
    optimizer.step()
    assert handle.last_step.absent == ("params[4]",)
    scaled_backward(handle, ag.sum(model.layers[2](ag.tensor(x))), optimizer)
    optimizer.zero_grad()
    scaled_backward(handle, ag.sum(ag.tensor(model.layers[2].bias)), optimizer)
    optimizer.step()
    assert handle.last_step.absent == ("layers.2.weight", "params[4]")


def test_a_printed_handle_tells_steps_skips_and_scale(training: Training) -> None:
    with amp.init() as handle:
        assert repr(handle) == "<AmpHandle float16: 0 steps, 0 skipped, loss scale 65536>"
        training.step(handle)
        assert repr(handle) == "<AmpHandle float16: 1 step, 0 skipped, loss scale 65536>"
        training.step(handle, np.nan)
        reason = "nan in 1 element of the gradients of layers.2.weight"
        assert repr(handle) == f"<AmpHandle float16: 2 steps, 1 skipped (the last: {reason}), loss scale 32768>"
    assert repr(handle) == "<AmpHandle, shut down>"
    with amp.init(dtype="bfloat16") as handle:
        assert repr(handle) == "<AmpHandle bfloat16: 0 steps, 0 skipped, no loss scaling>"
    assert repr(amp.init(enabled=False)) == "<NoOpHandle: AMP is off>"


def test_history_is_bounded(training: Training) -> None:
    handle = amp.init(dtype="float32")
    for _ in range(1005):
        training.optimizer.step()
    assert len(handle.history) == 1000
    assert [handle.history[0].step, handle.history[-1].step] == [6, 1005]


def test_gradscalers_and_graphs_have_a_history(queue: cl.CommandQueue, training: Training) -> None:
    scaler = amp.GradScaler(init_scale=1.0)
    for bad in (None, np.inf):
        training.optimizer.zero_grad()
        scaler.scale(loss_of(training.model, training.data)).backward()
        if bad is not None:
            plant(training.optimizer.params[0], bad)
        scaler.step(training.optimizer)
        scaler.update()
    assert [report.stepped for report in scaler.history] == [True, False]
    assert scaler.history[-1].parameters == ("layers.0.weight",)

    class Train(amp.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model
            self.add_optimizer(training.optimizer)

        def build(self, x: Any, y: Any) -> Any:
            loss = ag.mse_loss(self.model(x), y)
            loss.backward()
            return loss

    x, y = training.data
    train = Train()
    bad_x = to_device(queue, np.full((4, 8), np.nan, np.float32))
    for rows in (x, x, x, bad_x, x):
        before = training.weights()
        train(rows, y)
        assert training.is_unchanged(before) == (rows is bad_x), "without a scaler, too, it steps on no nan"
    assert [report.stepped for report in train.history] == [True, True, True, False, True]


# ---------------------------------------------------------------------------------------------- line 2 left out


@pytest.mark.parametrize("under", ["init", "autocast"])
def test_a_step_on_unscaled_float16_gradients_warns_once(training: Training, under: str) -> None:
    region = amp.init() if under == "init" else amp.autocast()
    with region:
        for number in range(3):
            training.optimizer.zero_grad()
            loss_of(training.model, training.data).backward()
            if number == 0:
                with pytest.warns(UserWarning, match="not scaled") as caught:
                    training.optimizer.step()
                assert caught[0].filename == __file__
            else:
                training.optimizer.step()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_where_no_bits_are_lost_nothing_is_said(training: Training, dtype: str) -> None:
    with amp.init(dtype=dtype) as handle:
        loss_of(training.model, training.data).backward()
        training.optimizer.step()
        assert handle.last_step.stepped
    with amp.init() as handle, handle.disable_casts():
        training.optimizer.zero_grad()
        loss_of(training.model, training.data).backward()
        training.optimizer.step()


# ---------------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_interrupted_step_is_still_skipped_when_called_again(
    training: Training, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = amp.init(dtype=dtype, on_overflow="skip")  # whose steps read the device themselves
    training.backward(handle, np.inf)
    before = training.weights()
    read = DeviceState.words
    monkeypatch.setattr(DeviceState, "words", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        training.optimizer.step()
    monkeypatch.setattr(DeviceState, "words", read)
    training.optimizer.step()
    assert not handle.last_step.stepped
    assert training.is_unchanged(before)


def test_a_step_that_raises_can_be_called_again(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(SGD):
        fails = True

        def step(self) -> None:
            if self.fails:
                raise KeyError
            super().step()

    training.optimizer = Failing(training.model.parameters(), lr=1.0)
    handle = amp.init(loss_scale=1.0)
    training.backward(handle)
    with pytest.raises(KeyError):
        training.optimizer.step()
    assert handle.last_step is None
    assert len(handle._scaling.guard(training.optimizer).pending) == 1
    training.optimizer.fails = False
    training.optimizer.step()
    assert handle.last_step.stepped


# ---------------------------------------------------------------------------------------------- ways to a step


def skips(handle: Any, training: Training, step: Callable[[], Any]) -> bool:
    """Whether a step on a bad gradient does nothing, by whichever way it is called."""
    training.backward(handle, np.inf)
    before = training.weights()
    step()
    return training.is_unchanged(before) and not handle.last_step.stepped


@pytest.mark.parametrize("make", [Adam, AdamW, SGD])
def test_a_method_bound_before_init_is_guarded(queue: cl.CommandQueue, make: Any) -> None:
    training = Training(queue, make)
    step, function, code = training.optimizer.step, make.step, make.step.__code__
    signature = inspect.signature(step)
    with amp.init(loss_scale=1.0) as handle:
        assert make.step is function
        assert inspect.signature(step) == inspect.signature(training.optimizer.step) == signature
        assert skips(handle, training, step)
        assert skips(handle, training, lambda: make.step(training.optimizer))
        training.backward(handle)
        before = training.weights()
        step()
        assert not training.is_unchanged(before)
        assert pickle.loads(pickle.dumps(make)) is make
    assert make.step.__code__ is code
    assert inspect.signature(step) == signature


def test_a_step_under_another_name_is_guarded_too(queue: cl.CommandQueue) -> None:
    """One that a decorator has made, say, and that a scheduler bound before ``init``."""

    class Decorated(SGD):
        pass

    def timed(self: Any) -> None:
        for param in self.params:
            param.write(param.to_host() - param.grad.to_host())

    Decorated.step = timed  # type: ignore[method-assign]
    training = Training(queue, Decorated)
    held = training.optimizer.step
    with amp.init(loss_scale=1.0) as handle:
        assert skips(handle, training, held)


def test_a_step_on_the_optimizer_itself_is_guarded(training: Training) -> None:
    optimizer, calls = training.optimizer, []

    def own() -> str:
        calls.append("own")
        Adam.step(optimizer)
        return "done"

    optimizer.step = own
    with amp.init(loss_scale=1.0) as handle:
        assert skips(handle, training, lambda: optimizer.step())
        assert calls == []
        training.backward(handle)
        assert optimizer.step() == "done"
        assert optimizer.t == 1
        optimizer.step = types.MethodType(lambda self: calls.append("bound"), optimizer)  # while AMP is active
        assert skips(handle, training, lambda: optimizer.step())
        assert calls == ["own"]
    assert optimizer.step.__func__ is not own


def test_a_class_whose_step_is_no_plain_function_is_guarded(training: Training) -> None:
    class Step:
        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return types.MethodType(lambda optimizer: Adam.step(optimizer), instance)

    class Odd(Adam):
        step = Step()

    class WithSuper(Adam):
        def step(self) -> None:
            super().step()

    for make in (Odd, WithSuper):
        training.optimizer = make(training.model.parameters())
        before = vars(make)["step"]
        with amp.init(loss_scale=1.0) as handle:
            assert skips(handle, training, lambda: training.optimizer.step())
            training.step(handle)
            assert handle.last_step.stepped
            assert training.optimizer.t == 1
        assert vars(make)["step"] is before


def test_a_step_replaced_on_the_class_while_amp_is_active_is_guarded(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    with amp.init(loss_scale=1.0) as handle:
        original = Adam.step
        mine = lambda self: original(self)  # noqa: E731
        monkeypatch.setattr(Adam, "step", mine)
        assert skips(handle, training, lambda: training.optimizer.step())


def test_a_wrapper_kept_after_shutdown_says_so_on_entry(training: Training) -> None:
    handle = amp.init()
    optimizer = handle.wrap_optimizer(training.optimizer)
    loss = loss_of(training.model, training.data)
    handle.shutdown()
    with pytest.raises(RuntimeError, match="shut down"), optimizer.scale_loss(loss):
        pytest.fail("the error comes on entry")


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_cannot_be_copied_says_what_to_do(training: Training, how: Callable[[Any], Any]) -> None:
    handle = amp.init()
    with pytest.raises(TypeError, match=r"handle cannot be copied or pickled: .* amp\.state_dict\(\)"):
        how(handle)
    with pytest.raises(TypeError, match=r"optimizer cannot be copied or pickled: .* wrap the copy"):
        how(handle.wrap_optimizer(training.optimizer))


AFTER_SHUTDOWN: dict[str, Callable[[Any, Any, Any], object]] = {
    "scale_loss": lambda handle, optimizer, loss: handle.scale_loss(loss, optimizer),
    "scale_loss of no optimizer": lambda handle, optimizer, loss: handle.scale_loss(loss, []),
    "scale_loss of no loss there is": lambda handle, optimizer, loss: handle.scale_loss(loss, optimizer, 9),
    "wrap_optimizer": lambda handle, optimizer, loss: handle.wrap_optimizer(optimizer),
    "wrap_optimizer for no loss": lambda handle, optimizer, loss: handle.wrap_optimizer(optimizer, 0),
}


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("call", AFTER_SHUTDOWN)
def test_a_handle_kept_after_shutdown_says_so_whatever_else_is_wrong(
    training: Training, call: str, wrapped: bool
) -> None:
    handle = amp.init()
    if wrapped:
        handle.wrap_optimizer(training.optimizer)
    loss = loss_of(training.model, training.data)
    handle.shutdown()
    with pytest.raises(RuntimeError, match=r"on an AMP handle that is shut down: call amp\.init"):
        AFTER_SHUTDOWN[call](handle, training.optimizer, loss)


def test_only_skips_in_a_row_at_the_floor_raise(training: Training) -> None:
    handle = amp.init(loss_scale="dynamic")
    training.backward(handle)

    def step_on_nan(scaled: bool) -> None:
        if scaled:
            training.backward(handle, np.nan)
        else:
            param = training.optimizer.params[0]
            param.grad = to_device(param.queue, np.full(param.shape, np.nan, np.float32))
        training.optimizer.step()
        assert not handle.last_step.stepped

    for scaled in (*[False] * 24, True, *[False] * 24):  # the one that is scaled lowers the scale
        step_on_nan(scaled)
    with pytest.raises(FloatingPointError, match="25 steps in a row"):
        step_on_nan(scaled=False)


def test_a_clean_step_ends_a_row_of_skips(training: Training) -> None:
    handle = amp.init(dtype="bfloat16")
    for bad in (*[np.nan] * 24, None, *[np.nan] * 24):
        training.step(handle, bad)
        assert handle.last_step.stepped == (bad is None)
    training.backward(handle, np.nan)
    with pytest.raises(FloatingPointError, match=r"25 steps in a row were skipped: .*layers\.2\.weight"):
        training.optimizer.step()


def test_a_skip_reports_the_scale_of_the_last_loss_that_overflowed(training: Training) -> None:
    handle = amp.init()
    optimizer = handle.wrap_optimizer(training.optimizer, num_loss=2)

    def step(first: float | None, second: float | None) -> None:
        training.optimizer.zero_grad()
        for bad in (first, second):
            with optimizer.scale_loss(loss_of(training.model, training.data)) as scaled_loss:
                scaled_loss.backward()
                if bad is not None:
                    plant(training.optimizer.params[2], bad)
        optimizer.step()

    step(np.inf, None)
    step(np.inf, np.inf)
    assert not handle.last_step.stepped
    assert handle.last_step.scale == 2.0**15  # of the second loss; the first one's has been halved twice


@pytest.mark.parametrize("read", [True, False], ids=["read between", "not read"])
@pytest.mark.parametrize("bad", [0, 1, None])
def test_a_report_has_the_scale_before_the_first_pass_of_its_step(
    training: Training, bad: int | None, read: bool
) -> None:
    handle = amp.init()
    for number in range(2):
        with handle.scale_loss(loss_of(training.model, training.data), training.optimizer) as scaled_loss:
            scaled_loss.backward()
            if bad == number:
                plant(training.optimizer.params[2])
        if read:
            assert handle.loss_scale == (2.0**16 if bad is None or bad > number else 2.0**15)
    training.optimizer.step()
    after = 2.0**16 if bad is None else 2.0**15
    assert (handle.last_step.scale_before, handle.last_step.scale) == (2.0**16, after)


def test_bits_of_optimizers_that_are_gone_are_given_to_others(training: Training) -> None:
    handle = amp.init(loss_scale=1.0)
    many = [SGD(training.model.parameters()) for _ in range(step_guard.MAX_OPTIMIZERS)]
    for optimizer in many:
        handle._scaling.guard(optimizer)
    with pytest.raises(RuntimeError, match="more than 32 optimizers"):
        handle._scaling.guard(training.optimizer)
    del optimizer
    many.clear()
    gc.collect()
    assert skips(handle, training, training.optimizer.step)


def test_an_own_step_is_guarded_once(training: Training) -> None:
    optimizer = training.optimizer
    optimizer.step = lambda: Adam.step(optimizer)
    with amp.init(loss_scale=1.0) as handle:
        training.backward(handle)
        step = optimizer.step
        for _ in range(3):
            training.backward(handle)
            assert optimizer.step is step
    training.optimizer.zero_grad()
    before = optimizer.t
    for param in optimizer.params:
        param.grad = to_device(param.queue, np.full(param.shape, np.inf, np.float32))
    step()  # kept after shutdown: nothing guards it any more
    assert optimizer.t == before + 1
    assert len(handle.history) == 0
