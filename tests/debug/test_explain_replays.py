"""An explanation of a replayed step reads what that replay was given, not what the recording was made with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag

from clamp import amp
from clamp.bridge import Node, Tensor
from clamp.debug.explain import Explanation
from tests.debug.faults import Train, Training
from tests.networks import scaled_backward
from tests.reference import to_device

pytestmark = pytest.mark.usefixtures("shut_down")

SOUND = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
BAD = np.where(np.arange(32).reshape(4, 8) == 21, np.nan, SOUND)
LARGE = np.where(np.arange(32).reshape(4, 8) == 21, 1e30, SOUND)
BAD_BATCH = 6


def on_tensors(queue: cl.CommandQueue, training: Training, handle: Any) -> Callable[[np.ndarray], None]:
    @amp.record
    def step(x: Tensor) -> None:
        one_pass(training, handle, ag.tensor(x))
        training.optimizer.step()

    return lambda x: step(to_device(queue, x))


def on_arrays(queue: cl.CommandQueue, training: Training, handle: Any) -> Callable[[np.ndarray], None]:
    @amp.record
    def step(x: np.ndarray) -> None:
        one_pass(training, handle, ag.tensor(Tensor.from_host(queue, x)))
        training.optimizer.step()

    return step


def step_outside(queue: cl.CommandQueue, training: Training, handle: Any) -> Callable[[np.ndarray], None]:
    recorded = amp.record(lambda x: one_pass(training, handle, ag.tensor(x)))

    def step(x: np.ndarray) -> None:
        recorded(to_device(queue, x))
        training.optimizer.step()

    return step


def as_graph(queue: cl.CommandQueue, training: Training, handle: Any) -> Callable[[np.ndarray], None]:
    train = Train(training, amp.StaticGradScaler(8.0), partial(loss_of, training))
    return lambda x: train(to_device(queue, x))


def loss_of(training: Training, x: Node) -> Node:
    made = ag.add(training.model(x), ag.sum(ag.mul(x, 1e-4)))  # its gradient reads the batch itself
    return ag.mse_loss(made, ag.tensor(training.data[1]))


def one_pass(training: Training, handle: Any, x: Node) -> None:
    training.optimizer.zero_grad()
    scaled_backward(handle, loss_of(training, x), training.optimizer)


WAYS = {"tensors": on_tensors, "arrays": on_arrays, "step outside": step_outside, "graph": as_graph}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("batch", "kind"), [(BAD, "input"), (LARGE, "cast")])
def test_the_batch_that_was_bad_is_blamed(queue: cl.CommandQueue, way: str, batch: np.ndarray, kind: str) -> None:
    training = Training(queue, "none")
    handle = amp.init(debug="attribution", loss_scale=8.0)
    step = WAYS[way](queue, training, handle)
    found: dict[int, Explanation] = {}
    for number in range(1, 9):
        step(batch if number == BAD_BATCH else SOUND)
        found[number] = handle.explain()
    assert found[BAD_BATCH - 1].why == "No step has been skipped."
    explained = found[BAD_BATCH]
    assert explained.kind == kind, explained
    assert explained.first.module == "layers.0"
    assert ("1 nan" if kind == "input" else "1e+30") in str(explained)
    assert found[8].kind == kind  # and those after it went well


def test_passes_that_a_later_replay_has_overwritten_are_not_blamed(queue: cl.CommandQueue) -> None:
    training = Training(queue, "none")
    handle = amp.init(debug="attribution", loss_scale=8.0)

    @amp.record
    def add_up(x: Tensor) -> None:
        scaled_backward(handle, loss_of(training, ag.tensor(x)), training.optimizer)

    for bad in (None, None, 2, 1):
        training.optimizer.zero_grad()
        for number in range(3):  # the last two by one recording: the first has no gradients to add to
            add_up(to_device(queue, BAD if number == bad else SOUND))
        training.optimizer.step()
        kind = handle.explain().kind
        assert kind == ("input" if bad == 2 else "unseen"), handle.explain()
    assert "handle.explain(step)" in str(handle.explain())


def test_the_tensors_of_a_recording_keep_their_memory(queue: cl.CommandQueue) -> None:
    training = Training(queue, "none")
    handle = amp.init(debug="attribution", loss_scale=8.0)

    @amp.record
    def step(x: Tensor) -> None:
        one_pass(training, handle, ag.tensor(x))
        training.optimizer.step()

    batches = [to_device(queue, SOUND + number) for number in range(4)]
    for x in (*batches, to_device(queue, BAD)):
        step(x)
    assert handle.explain().kind == "input"
    for number, x in enumerate(batches):
        np.testing.assert_array_equal(x.to_host(), SOUND + np.float32(number))
