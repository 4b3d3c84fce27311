"""Observers are told of every result and gradient, whoever computes it, and change no bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd.engine import Node, apply_op
from netcl.optim import Adam

from clamp import amp
from clamp.bridge import Parameter, Tensor
from clamp.casting.results import RESULTS, Observer
from tests.networks import batch, loss_of, mlp, scaled_backward, weights_of
from tests.reference import to_device


class Notes(Observer):
    """An observer that writes down what it is told."""

    def __init__(self, *, gradients: bool = True) -> None:
        self.results: list[str] = []
        self.grads: list[tuple[str, int]] = []
        self.sums = self.backwards = 0
        self.steps: list[Any] = []
        self._gradients = gradients

    def result(self, made: Any, parents: Sequence[Any]) -> str | None:
        op = str(getattr(made, "op_name", "tensor"))
        self.results.append(op)
        return op if self._gradients else None

    def gradients(self, token: str, grad: Tensor, grads: Sequence[Any], again: Callable[[Tensor], Any]) -> None:
        self.grads.append((token, sum(x is not None for x in grads)))

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        assert made is not first
        assert np.array_equal(made.to_host(), first.to_host() + second.to_host())
        self.sums += 1

    def backward_ended(self, loss: Node, grad: Tensor | None) -> None:
        self.backwards += 1

    def stepped(self, report: Any) -> None:
        self.steps.append(report)


def twice(x: Node) -> Node:
    """An op of the user's own."""
    return apply_op(lambda x: ag.add(x, x).value, lambda grad: [ag.add(grad, grad).value], x, op_name="twice")


def by_hand(x: Node) -> Node:
    """A node that nobody makes but the user."""
    return Node(value=x.value, grad_fn=lambda grad: [grad], parents=[x], requires_grad=True, op_name="by hand")


def test_every_op_is_told_forward_and_backward(queue: cl.CommandQueue) -> None:
    weight = Parameter.from_host(queue, np.ones((4, 4), np.float32))
    notes = Notes()
    with amp.init(), RESULTS.attached(notes):
        x = ag.tensor(to_device(queue, np.ones((2, 4))))
        loss = ag.sum(by_hand(twice(ag.relu(ag.matmul_op(x, ag.tensor(weight))))))
        loss.backward()
    named = [op for op in notes.results if op not in ("cast", "tensor")]  # inside of twice there are tensors
    assert named == ["matmul", "relu", "twice", "sum", "by hand"]
    assert [op for op, _ in notes.grads if op != "cast"] == ["sum", "by hand", "twice", "relu", "matmul"]
    assert dict(notes.grads)["matmul"] == 1  # nobody trains x
    assert notes.backwards == 1


def test_results_of_an_inference_are_told(queue: cl.CommandQueue) -> None:
    notes, x = Notes(), to_device(queue, np.ones((2, 4)))
    with amp.init(), RESULTS.attached(notes), ag.no_grad():
        ag.matmul_op(x, to_device(queue, np.ones((4, 4))))
    assert notes.results == ["tensor"]


@pytest.mark.parametrize("gradients", [True, False])
def test_bits_are_the_same_with_an_observer(queue: cl.CommandQueue, gradients: bool) -> None:
    def train(notes: Notes | None) -> list[np.ndarray]:
        model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
        optimizer = Adam(model.parameters(), lr=1e-2)
        with amp.init() as handle:
            for _ in range(3):
                if notes is not None:
                    RESULTS.attach(notes)
                optimizer.zero_grad()
                loss = ag.add(loss_of(model, data), loss_of(model, data))
                scaled_backward(handle, loss, optimizer)
                optimizer.step()
                if notes is not None:
                    RESULTS.detach(notes)
        return weights_of(model)

    notes = Notes(gradients=gradients)
    assert all(np.array_equal(a, b) for a, b in zip(train(None), train(notes), strict=True))
    assert len(notes.steps) == 3
    assert notes.sums
    assert bool(notes.grads) == gradients


def test_two_observers_are_both_told_and_leave_one_by_one(queue: cl.CommandQueue) -> None:
    first, second = Notes(), Notes()
    x = to_device(queue, np.ones((2, 2)))
    with amp.init():
        RESULTS.attach(first)
        RESULTS.attach(first)
        RESULTS.attach(second)
        ag.relu(x)
        RESULTS.detach(first)
        ag.relu(x)
        RESULTS.detach(second)
        ag.relu(x)
    assert (len(first.results), len(second.results)) == (1, 2)
    assert RESULTS.observers == ()


def test_an_observer_of_a_thread_is_told_of_its_ops_sums_and_passes_alone(queue: cl.CommandQueue) -> None:
    def used_twice() -> None:
        x = ag.tensor(Parameter.from_host(queue, np.ones((2, 2), np.float32)))
        ag.sum(ag.mul(ag.relu(x), x)).backward()

    own, every = Notes(), Notes()
    own.thread = threading.get_ident()
    with amp.init(), RESULTS.attached(own), RESULTS.attached(every):
        used_twice()
        other = threading.Thread(target=used_twice)
        other.start()
        other.join()
    assert (every.results, every.sums, every.backwards) == (2 * own.results, 2 * own.sums, 2 * own.backwards)
    assert own.results
    assert own.sums
    assert own.backwards


def test_gradients_are_added_by_no_kernel_of_netcls(queue: cl.CommandQueue) -> None:
    def netcls(first: Tensor, second: Tensor) -> Tensor:
        raise AssertionError("launches 256 work-items a group, and one kernel in all threads")

    first, second = to_device(queue, np.ones((2, 3))), to_device(queue, np.full((2, 3), 2.0))
    np.testing.assert_array_equal(RESULTS.add(netcls, first, second).to_host(), np.full((2, 3), 3.0))
