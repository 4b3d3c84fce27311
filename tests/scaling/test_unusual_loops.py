"""Loops that nobody means to write and everybody does: what was noted of a gradient holds for whom it was noted, and
only until somebody writes into it; a step that moves nothing says so."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD, clip_grad_norm

from clamp import amp
from clamp.bridge import Node, Parameter, Tensor
from clamp.ops.multi_tensor import check_
from tests.compat.test_scalers import FACES
from tests.networks import LR, Task, batch, mlp, scaled_backward
from tests.reference import to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")

TOO_LARGE = 1e6  # overflows in float16


@pytest.fixture
def handle(queue: cl.CommandQueue) -> amp.AmpHandle:
    return amp.init(loss_scale=256.0)  # type: ignore[return-value]


@pytest.fixture
def task(queue: cl.CommandQueue, handle: amp.AmpHandle) -> Task:
    return Task(queue)


def _count_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    looks: list[int] = []

    def counted(grads: Any, state: Any) -> None:
        looks.append(len(grads))
        check_(grads, state)

    monkeypatch.setattr("clamp.scaling.step_guard.check_", counted)
    return looks


# ---------------------------------------------------------------------------------------------- used by others


@pytest.mark.parametrize("size", [1.0, TOO_LARGE])
def test_an_optimizer_made_after_the_pass_skips_its_overflow(task: Task, handle: amp.AmpHandle, size: float) -> None:
    task.backward(handle, size)
    SGD([task.weight], lr=LR).step()
    assert task.moved == (size == 1.0)
    assert handle.last_step is not None
    assert handle.last_step.infs == (0 if size == 1.0 else 12)


@pytest.mark.parametrize("face", FACES)
def test_an_overflow_that_a_grad_scaler_noted_skips_a_plain_step(task: Task, face: str) -> None:
    scaler = FACES[face](scale=8.0)
    scaler.scale(task.loss(TOO_LARGE)).backward()
    scaler.unscale(task.optimizer)
    task.optimizer.step()
    assert task.moved == 0


@pytest.mark.parametrize("face", FACES)
def test_a_grad_scalers_step_under_a_handle_looks_at_gradients_once(
    task: Task, monkeypatch: pytest.MonkeyPatch, face: str
) -> None:
    looks, scaler = _count_looks(monkeypatch), FACES[face](scale=8.0)
    scaler.scale(task.loss()).backward()
    scaler.step(task.optimizer)
    assert task.moved == 1
    assert not looks


def test_what_one_optimizer_unscaled_another_may_step_by(queue: cl.CommandQueue) -> None:
    task = Task(queue)
    other = SGD([task.weight], lr=LR)
    scaler = amp.GradScaler(8.0)
    for size, moved in ((1.0, 2), (TOO_LARGE, 2)):
        task.optimizer.zero_grad()
        with amp.autocast():
            loss = task.loss(size)
        scaler.scale(loss).backward()
        scaler.unscale_(task.optimizer)
        scaler.unscale_(other)
        scaler.step(task.optimizer)
        scaler.step(other)
        scaler.update()
        assert task.moved == moved


# ---------------------------------------------------------------------------------------------- states loaded


@pytest.mark.parametrize("size", [1.0, TOO_LARGE])
def test_an_overflow_is_not_forgotten_when_a_scale_is_loaded_before_the_step(
    task: Task, handle: amp.AmpHandle, size: float
) -> None:
    state = amp.state_dict()
    task.backward(handle, size)
    amp.load_state_dict(state)
    task.optimizer.step()
    assert task.moved == (size == 1.0)


# ---------------------------------------------------------------------------------------------- written into


def test_nan_written_into_a_gradient_that_was_checked_skips_the_step(task: Task, handle: amp.AmpHandle) -> None:
    task.backward(handle)
    task.weight.grad.write(np.full((4, 3), np.nan))
    task.optimizer.step()
    assert task.moved == 0
    assert handle.last_step is not None
    assert handle.last_step.nans == 12


def test_an_op_that_writes_into_a_checked_gradient_is_looked_at(task: Task, handle: amp.AmpHandle) -> None:
    from netcl.ops.elementwise import elementwise_binary

    for noise, moved in ((np.inf, 0), (2.0, 3)):
        task.optimizer.zero_grad()
        task.backward(handle)
        grad = task.weight.grad
        elementwise_binary(grad, to_device(task.queue, np.full((4, 3), noise)), expression="ADD(v0, v1)", out=grad)
        task.optimizer.step()
        assert task.moved == moved


def test_a_sum_with_a_gradient_that_was_written_into_is_looked_at(task: Task, handle: amp.AmpHandle) -> None:
    task.backward(handle)
    task.weight.grad.write(np.full((4, 3), np.inf))
    task.step(handle)
    assert task.moved == 0


def test_clipping_and_writes_elsewhere_cost_no_further_look(
    task: Task, handle: amp.AmpHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = _count_looks(monkeypatch)
    other = Tensor.from_host(task.queue, np.zeros(3, np.float32))
    for _ in range(2):
        task.optimizer.zero_grad()
        task.backward(handle)
        clip_grad_norm([task.weight], 1.0)
        other.write(np.ones(3))
        task.optimizer.step()
    assert not looks
    assert task.moved == pytest.approx(2 / 12**0.5)


# ---------------------------------------------------------------------------------------------- no backward


#: what is done inside of the with, and what is said of it
REFUSED: dict[str, tuple[Callable[[Task, Any, Any], object], str]] = {
    "another pass alone": (lambda task, handle, scaled_loss: task.backward(handle, 2.0), "scaled_loss"),
    "a GradScaler's backward": (
        lambda task, handle, scaled_loss: amp.GradScaler(8.0).scale(task.loss(2.0)).backward(), "scaled_loss"
    ),
    "gradients are cleared": (
        lambda task, handle, scaled_loss: (scaled_loss.backward(), task.optimizer.zero_grad()),
        "not cleared after backward",
    ),
    "AMP ends": (lambda task, handle, scaled_loss: (scaled_loss.backward(), handle.shutdown()), "shut down inside"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_leaves_a_scaled_loss_without_its_gradients_is_refused(
    task: Task, handle: amp.AmpHandle, what: str
) -> None:
    run, message = REFUSED[what]
    with pytest.raises(RuntimeError, match=message), handle.scale_loss(task.loss(), task.optimizer) as scaled_loss:
        run(task, handle, scaled_loss)
    assert task.weight.grad is None


@pytest.mark.parametrize("scaled_by", ["a handle", "a new scaler", "a scaler of before"])
def test_a_loss_of_netcls_own_that_ignores_the_scale_is_refused(queue: cl.CommandQueue, scaled_by: str) -> None:
    """Its gradients would be so many times too small, silently."""
    model, data = mlp(queue, 4, 4), batch(queue, 2, 4, 4)
    optimizer, before = SGD(model.parameters()), amp.GradScaler(256.0)
    x, y = map(ag.tensor, data)

    def backward(loss: Node, tape: Any) -> None:
        if scaled_by == "a handle":
            with amp.init().scale_loss(loss, optimizer) as scaled_loss:
                tape.backward(scaled_loss)
        else:
            tape.backward((before if "before" in scaled_by else amp.GradScaler(256.0)).scale(loss))

    amp.shutdown()
    with ag.Tape() as tape:
        loss = ag.mse_loss(model(x), y)
    with pytest.raises(RuntimeError, match=r"mse_loss .* while AMP was not on"):
        backward(loss, tape)
    assert [param.grad for param in model.parameters()] == [None, None]
    before.scale(ag.mse_loss(model(x), y)).backward()  # now it is on
    before.step(optimizer)


def test_a_backward_in_16_bits_after_shutdown_is_refused(queue: cl.CommandQueue) -> None:
    """netcl's own engine would add 16-bit gradients as float32; what is in float32 throughout it adds right."""
    model, data = mlp(queue, 4, 4), batch(queue, 2, 4, 4)
    x, y = map(ag.tensor, data)
    for dtype in ("float16", "bfloat16", "float32"):
        with amp.init(dtype=dtype), ag.Tape() as tape:
            loss = ag.mse_loss(model(x), y)
        if dtype == "float32":
            tape.backward(loss)
        else:
            with pytest.raises(RuntimeError, match=r"AMP was shut down, .* compute the loss again"):
                tape.backward(loss)
        assert (model.parameters()[0].grad is not None) == (dtype == "float32")


def test_a_step_without_any_gradient_is_no_step(task: Task, handle: amp.AmpHandle) -> None:
    task.optimizer.step()
    assert handle.last_step is not None
    assert not handle.last_step.stepped
    assert handle.last_step.reason == "no parameter had a gradient"
    assert "1 skipped" in repr(handle)
    task.weight._frozen = True
    task.weight.grad = to_device(task.queue, np.ones((4, 3)))
    task.optimizer.step()
    assert not handle.last_step.stepped


def test_backward_of_a_dead_tapes_loss_is_refused_by_a_tape_too(queue: cl.CommandQueue) -> None:
    amp.init(dtype="bfloat16")
    task = Task(queue)
    with ag.Tape():
        loss = task.loss()
    gc.collect()
    with pytest.raises(RuntimeError, match="the tape that recorded it is gone"):
        ag.Tape().backward(loss)


@pytest.mark.parametrize("again", ["another tape of the name", "a function that returns", "kept", "a constant"])
def test_a_part_of_the_loss_that_has_lost_its_tape_is_named(task: Task, handle: amp.AmpHandle, again: str) -> None:
    """A tape that dies takes its graph along: the loss trains what was computed since, and nothing before."""
    second = Task(task.queue, (3, 2))

    def features() -> Any:
        with ag.Tape() as tape:
            found = ag.matmul_op(ag.tensor(to_device(task.queue, np.ones((2, 4)))), ag.tensor(task.weight))
        return (found, tape) if again in ("kept", "another tape of the name") else (found, None)

    hidden, tape = features()
    first = tape if again == "kept" else None
    with ag.Tape() as tape:
        hidden = ag.tensor(hidden.value) if again == "a constant" else hidden
        loss = ag.mean(ag.matmul_op(hidden, ag.tensor(second.weight)))
    gc.collect()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with handle.scale_loss(loss, [task.optimizer, second.optimizer]) as scaled_loss:
            tape.backward(scaled_loss)
    told = [str(one.message) for one in said if "the tape that recorded it is gone" in str(one.message)]
    assert (task.weight.grad is None) == (first is None)
    assert len(told) == (again in ("another tape of the name", "a function that returns"))
    assert all("the result of matmul, which" in one for one in told)


@pytest.mark.parametrize("way", ["tape", "loss"])
def test_a_truncated_backward_is_not_taken_for_a_lost_graph(task: Task, handle: amp.AmpHandle, way: str) -> None:
    """A network that gives its output before it computes its next state, which no loss of this pass reaches."""
    step_of_state = Task(task.queue, (4, 4))
    state = ag.tensor(to_device(task.queue, np.ones((2, 4))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with ag.Tape() as tape:
                loss = ag.mean(ag.matmul_op(state, ag.tensor(task.weight)))
                state = ag.tanh(ag.matmul_op(state, ag.tensor(step_of_state.weight)))
            with handle.scale_loss(loss, task.optimizer) as scaled_loss:
                tape.backward(scaled_loss) if way == "tape" else scaled_loss.backward()
            task.optimizer.step()
            assert handle.last_step.stepped


def test_a_tape_that_dies_after_scaling_is_named(task: Task, handle: amp.AmpHandle) -> None:
    with ag.Tape() as tape:
        loss = task.loss()
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="the tape that recorded it is gone"),
        handle.scale_loss(loss, task.optimizer) as scaled_loss,
    ):
        del tape
        gc.collect()
        scaled_loss.backward()


# ---------------------------------------------------------------------------------------------- out of order


def test_withs_that_generators_hold_may_end_in_any_order(task: Task, handle: amp.AmpHandle) -> None:
    other = Task(task.queue)

    def held(of: Task, loss: Any) -> Iterator[Any]:
        with handle.scale_loss(loss, of.optimizer) as scaled_loss:
            yield scaled_loss

    first_loss, second_loss = task.loss(), other.loss(2.0)
    first, second = held(task, first_loss), held(other, second_loss)
    first_scaled, second_scaled = next(first), next(second)
    first_scaled.backward()
    next(first, None)
    with pytest.raises(RuntimeError, match="from the loss itself"):
        second_loss.backward()
    second_scaled.backward()
    next(second, None)
    task.optimizer.step()
    other.optimizer.step()
    assert (task.moved, other.moved) == (1, 2)


def test_a_with_that_another_thread_ends_leaves_no_pass_behind(task: Task, handle: amp.AmpHandle) -> None:
    def held() -> Iterator[Any]:
        with handle.scale_loss(task.loss(), task.optimizer) as scaled_loss:
            yield scaled_loss

    generator = held()
    next(generator).backward()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(next, generator, None).result()
    scaler = amp.GradScaler(8.0)
    scaler.scale(task.loss(2.0)).backward()  # adds to what the with has left
    scaler.step(task.optimizer)
    assert task.moved == 3


# ---------------------------------------------------------------------------------------------- the end of AMP


@pytest.mark.parametrize("size", [1.0, TOO_LARGE])
def test_a_plain_step_under_autocast_alone_skips_what_a_grad_scaler_has_noted(
    queue: cl.CommandQueue, size: float
) -> None:
    task, scaler = Task(queue), amp.GradScaler(8.0)
    with amp.autocast():
        loss = task.loss(size)
    scaler.scale(loss).backward()
    scaler.unscale_(task.optimizer)
    if size == TOO_LARGE:
        with pytest.warns(UserWarning, match="was skipped"):
            task.optimizer.step()
    else:
        task.optimizer.step()
    assert task.moved == (size == 1.0)


# ---------------------------------------------------------------------------------------------- one tensor, two nodes


def _reversed(x: Any) -> Any:
    """A gradient reversal, whose forward hands its input back."""

    def backward(grad: Tensor) -> list[Tensor]:
        return [ag.mul(ag.tensor(grad), -0.5).value]

    return ag.apply_op(amp.custom_fwd(lambda x: x), backward, x)


_SHARED: dict[str, tuple[Any, Any, float]] = {  # on the way to the loss, on what scale_loss gives, and what times 6
    "divided": (lambda x: x, lambda scaled: ag.div(scaled, 4.0), 0.25),
    "divided by Python": (lambda x: x, lambda scaled: scaled / 4, 0.25),
    "added to itself": (lambda x: x, lambda scaled: ag.add(scaled, scaled), 2.0),
    "reversed": (_reversed, lambda scaled: scaled, -0.5),
    "reversed twice": (lambda x: _reversed(_reversed(x)), lambda scaled: scaled, 0.25),
    "beside what it reverses": (lambda x: ag.add(x, _reversed(x)), lambda scaled: scaled, 0.5),
    "checkpointed": (lambda x: amp.checkpoint(lambda x: x, x), lambda scaled: scaled, 1.0),
}


@pytest.mark.parametrize("what", _SHARED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("of", ["a parameter", "a result"])
def test_a_node_that_has_its_parents_tensor_has_its_own_gradient(
    queue: cl.CommandQueue, what: str, dtype: str, of: str
) -> None:
    """netcl's engine keeps gradients on tensors, too: of two nodes of one, it added the one's to the other's."""
    handle = amp.init(dtype=dtype)
    weight = to_device(queue, np.ones((2, 2)))
    weight.requires_grad = True
    inside, outside, factor = _SHARED[what]
    x = ag.mul(ag.tensor(weight), 2.0) if of == "a result" else ag.tensor(weight)
    loss = ag.sum(ag.mul(inside(x), 3.0 if of == "a result" else 6.0))
    with handle.scale_loss(loss, SGD([weight])) as scaled_loss:
        outside(scaled_loss).backward()
    np.testing.assert_array_equal(weight.grad.to_host(), 6 * factor)


# ---------------------------------------------------------------------------------------------- one backward in another


def _run_again(f: Any, from_a_loss: bool = False, by_hand: bool = False) -> Any:
    """An op that keeps nothing, as a reversible block: its backward runs f again, and backward through that."""

    def op(x: Any) -> Any:
        def forward(value: Tensor) -> Tensor:
            with ag.no_grad():
                return f(ag.tensor(value)).value  # type: ignore[no-any-return]

        def backward(grad: Tensor) -> list[Tensor]:
            given = to_device(x.value.queue, to_numpy(x.value))
            given.requires_grad = True
            again = f(ag.tensor(given))
            if from_a_loss:
                ag.sum(ag.mul(again, ag.tensor(grad))).backward()
            else:
                ag.Tape().backward(again, grad)
            return [given.grad]

        if by_hand:
            return Node(forward(x.value), grad_fn=backward, parents=[x], requires_grad=True)
        return ag.apply_op(forward, backward, x)

    return op


_USES: dict[str, tuple[Any, int]] = {  # functions of x and of one that multiplies by the weight; how often that is used
    "alone": (lambda x, f: _run_again(f)(x), 1),
    "between others": (lambda x, f: f(_run_again(f)(f(x))), 3),
    "from a loss": (lambda x, f: f(_run_again(f, from_a_loss=True)(f(x))), 3),
    "in a node made by hand": (lambda x, f: f(_run_again(f, from_a_loss=True, by_hand=True)(f(x))), 3),
    "in another": (lambda x, f: f(_run_again(lambda x: _run_again(f)(f(x)))(f(x))), 4),
}


@pytest.mark.parametrize("uses", _USES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("by", ["scale_loss", "layer by layer", "GradScaler"])
@pytest.mark.filterwarnings("ignore:the loss given to scale_loss")  # reaches what was made in backward, too
def test_what_an_ops_own_backward_hands_on_keeps_its_scale(
    queue: cl.CommandQueue, uses: str, dtype: str, by: str
) -> None:
    """It was taken for the true one, and not divided. What the parameter had of the pass around it was lost."""
    weight, x = Parameter.from_host(queue, np.full((4, 4), 0.25, np.float32)), to_device(queue, np.ones((4, 4)))
    function, count = _USES[uses]

    def loss() -> Any:
        return ag.sum(function(ag.tensor(x), lambda x: ag.matmul_op(x, ag.tensor(weight))))

    if by == "GradScaler":
        scaler = amp.GradScaler(256.0)
        with amp.autocast(dtype=dtype):
            scaler.scale(loss()).backward()
        scaler.unscale_(SGD([weight]))
    else:
        rule = amp.ScaleRule(layerwise=by != "scale_loss") if dtype == "float16" else "auto"
        handle = amp.init(dtype=dtype, loss_scale=rule)
        scaled_backward(handle, loss(), SGD([weight]))
    np.testing.assert_array_equal(weight.grad.to_host(), 4 * count)


@pytest.mark.parametrize("uses", _USES)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore:the loss given to scale_loss")
def test_a_gradient_from_before_stays_beside_what_an_ops_own_backward_gives(
    queue: cl.CommandQueue, uses: str, fails: bool
) -> None:
    """A user's own was divided by the scale with it."""
    weight, x = Parameter.from_host(queue, np.full((4, 4), 0.25, np.float32)), to_device(queue, np.ones((4, 4)))
    function, count = _USES[uses]
    failures = [MemoryError()] if fails else []

    def backward(grad: Tensor) -> list[Tensor]:
        if failures:
            raise failures.pop()
        return [grad]

    first = ag.tensor(x, requires_grad=True)
    handle = amp.init()
    weight.grad = to_device(queue, np.ones((4, 4)))
    started = ag.apply_op(lambda value: value, backward, first)  # its backward runs last
    loss = ag.sum(function(started, lambda x: ag.matmul_op(x, ag.tensor(weight))))
    with handle.scale_loss(loss, SGD([weight])) as scaled_loss:
        if fails:
            with pytest.raises(MemoryError):
                scaled_loss.backward()
        scaled_loss.backward()
    np.testing.assert_array_equal(weight.grad.to_host(), 4 * count + 1)
