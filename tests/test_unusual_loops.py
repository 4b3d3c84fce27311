"""Loops that nobody means to write and everybody does: passes without a backward, withs that end out of order, a
shutdown in the middle."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp, session
from clamp.bridge import Parameter
from tests.reference import to_device

LR = 0.125


@pytest.fixture(autouse=True)
def shut_down() -> Iterator[None]:
    yield
    session.shutdown()


class Task:
    """A weight of ones whose loss has a gradient of ``size`` everywhere."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.queue = queue
        self.weight = Parameter.from_host(queue, np.ones((4, 3), np.float32))
        self.optimizer = SGD([self.weight], lr=LR)
        self._x = ag.tensor(to_device(queue, np.ones((2, 4))))

    def loss(self, size: float = 1.0) -> Any:
        return ag.mul(ag.sum(ag.matmul_op(self._x, ag.tensor(self.weight))), size / 2)

    def backward(self, handle: amp.AmpHandle, size: float = 1.0) -> None:
        with handle.scale_loss(self.loss(size), self.optimizer) as scaled_loss:
            scaled_loss.backward()

    @property
    def moved(self) -> float:
        """How far steps have moved the weight, in gradients of 1."""
        weight = self.weight.to_host()
        assert (weight == weight.flat[0]).all()
        return float(1 - weight.flat[0]) / LR


@pytest.fixture
def handle(queue: cl.CommandQueue) -> amp.AmpHandle:
    return amp.init(loss_scale=256.0)


@pytest.fixture
def task(queue: cl.CommandQueue, handle: amp.AmpHandle) -> Task:
    return Task(queue)


# ---------------------------------------------------------------------------------------------- no backward


def test_a_forgotten_outer_backward_is_refused(task: Task, handle: amp.AmpHandle) -> None:
    with (
        pytest.raises(RuntimeError, match="scaled_loss"),
        handle.scale_loss(task.loss(), task.optimizer),
        handle.scale_loss(task.loss(2.0), task.optimizer) as inner,
    ):
        inner.backward()
    assert task.weight.grad is None


def test_a_grad_scalers_backward_inside_is_none_of_the_scaled_loss(task: Task, handle: amp.AmpHandle) -> None:
    scaler = amp.GradScaler(8.0)
    with pytest.raises(RuntimeError, match="scaled_loss"), handle.scale_loss(task.loss(), task.optimizer):
        scaler.scale(task.loss(2.0)).backward()


def test_gradients_cleared_after_backward_are_told_apart_from_none(task: Task, handle: amp.AmpHandle) -> None:
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="not cleared after backward"),
        handle.scale_loss(task.loss(), task.optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        task.optimizer.zero_grad()


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
    errors: list[BaseException] = []

    def end() -> None:
        try:
            next(generator, None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert not errors
    scaler = amp.GradScaler(8.0)
    scaler.scale(task.loss(2.0)).backward()  # adds to what the with has left
    scaler.step(task.optimizer)
    assert task.moved == 3


# ---------------------------------------------------------------------------------------------- the end of AMP


def test_a_shutdown_inside_the_with_says_so(task: Task, handle: amp.AmpHandle) -> None:
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="shut down inside"),
        handle.scale_loss(task.loss(), task.optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        handle.shutdown()
    assert task.weight.grad is None
