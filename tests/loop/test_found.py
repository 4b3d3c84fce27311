"""Failures that random loops have found, each shrunk to a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.optim import SGD

from clamp import amp
from tests.networks import batch, loss_of, mlp, scaled_backward, weights_of

Data = tuple[Any, Any]


@pytest.fixture
def model(queue: cl.CommandQueue) -> Any:
    return mlp(queue, 4, 4, 2)


@pytest.fixture
def good(queue: cl.CommandQueue) -> Data:
    return batch(queue, 4, 4, 2)


@pytest.fixture
def bad(queue: cl.CommandQueue) -> Data:
    x, y = batch(queue, 4, 4, 2)
    content = x.to_host()
    content[0, 0] = np.inf
    x.write(content)
    return x, y


@pytest.fixture
def before(model: Any) -> Iterator[list[np.ndarray]]:
    """The weights, which must be the same in the end."""
    kept = weights_of(model)
    yield kept
    for old, new in zip(kept, weights_of(model), strict=True):
        np.testing.assert_array_equal(new, old)


def train(handle: amp.AmpHandle, model: Any, optimizer: Any, data: Data) -> None:
    """One pass, and no step."""
    scaled_backward(handle, loss_of(model, data), optimizer)


SKIPPED = {
    "an optimizer that no loss was scaled for": "bad first, step second",
    "a second step on what overflowed": "bad first, step first, step first",
    "what was not cleared, after the next pass": "bad first, step first, good first, step first",
    "a gradient of two optimizers, from the pass of the other": "bad first, good second, step second",
}


@pytest.mark.usefixtures("before")
@pytest.mark.filterwarnings("ignore:step . was skipped:UserWarning")
@pytest.mark.parametrize("loop", SKIPPED.values(), ids=SKIPPED)
def test_an_overflow_skips_all_steps_until_it_is_cleared(model: Any, bad: Data, good: Data, loop: str) -> None:
    data = {"bad": bad, "good": good}
    optimizers = {"first": SGD(model.parameters(), lr=0.1), "second": SGD(model.parameters()[:1], lr=0.1)}
    with amp.init() as handle:
        for what, which in map(str.split, loop.split(", ")):
            if what == "step":
                optimizers[which].step()
            else:
                train(handle, model, optimizers[which], data[what])
        assert [report.stepped for report in handle.history] == [False] * loop.count("step")


@pytest.mark.usefixtures("before")
def test_an_overflow_is_not_forgotten_with_the_handle(model: Any, bad: Data) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    with amp.init() as handle:
        train(handle, model, optimizer, bad)
    with amp.init() as handle:
        optimizer.step()
        assert not handle.last_step.stepped


@pytest.mark.usefixtures("before")
def test_a_step_inside_the_with_does_not_use_up_the_overflow_of_the_pass_before(
    model: Any, bad: Data, good: Data
) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    with amp.init() as handle:
        train(handle, model, optimizer, bad)
        with handle.scale_loss(loss_of(model, good), optimizer) as scaled_loss:
            scaled_loss.backward()
            optimizer.step()
        optimizer.step()
        assert [report.stepped for report in handle.history] == [False, False]


def test_an_overflow_that_is_cleared_inside_the_with_neither_skips_nor_lowers_the_scale(
    model: Any, bad: Data, good: Data, queue: cl.CommandQueue
) -> None:
    other = mlp(queue, 4, 4, 2, seed=1)
    first, second = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    with amp.init() as handle:
        amp.GradScaler().scale(loss_of(model, bad)).backward()
        with handle.scale_loss(loss_of(other, good), [first, second]) as scaled_loss:
            first.zero_grad()
            scaled_loss.backward()
        second.step()
        assert handle.last_step.stepped
        assert handle.loss_scale == 2.0**16


@pytest.mark.usefixtures("before")
def test_a_grad_scalers_overflow_skips_a_plain_step_with_the_same_weight(model: Any, bad: Data) -> None:
    first, second = SGD(model.parameters(), lr=0.1), SGD(model.parameters()[:1], lr=0.1)
    scaler = amp.GradScaler()
    with amp.init() as handle:
        scaler.scale(loss_of(model, bad)).backward()
        scaler.step(first)
        second.step()
        assert not handle.last_step.stepped


def test_a_pass_that_reaches_frozen_parameters_only_raises_without_casts_too(model: Any, good: Data) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    for param in optimizer.params:
        param.requires_grad = False
    with amp.init() as handle:
        with handle.disable_casts():
            loss = loss_of(model, good)
        with pytest.raises(RuntimeError, match="frozen"):
            scaled_backward(handle, loss, optimizer)
        assert handle.last_step is None
