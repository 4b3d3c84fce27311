"""Gradients of what a recorded function is given: each call's own, whatever it does with them."""

from __future__ import annotations

import warnings
from random import Random
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Linear
from netcl.optim import SGD

from clamp import amp, session
from clamp.bridge import Node, Tensor
from clamp.recordings.function import RecordedFunction
from tests.reference import to_device

CALLS = 9
CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": (None, "float16", "bfloat16", "float32"),  # None: netcl's own products, whose memory no pool has
    "given": ("tensor", "trained tensor", "node", "trained node"),
    "returns": ("loss", "x.grad", "both", "nothing", "weight.grad", "a step along x.grad"),
    "clears": ("weights before", "weights after", "nothing", "x"),
    "passes": (1, 1, 2),
    "inputs": ((0,) * CALLS, range(CALLS), (0, 1) * 5, (0, 0, 0, 1, 1, 1, 0, 0, 0)),
    "steps": (True, False),
    "reads_x_twice": (True, False),
}


pytestmark = pytest.mark.usefixtures("shut_down")


def bits(x: Any) -> Any:
    if isinstance(x, tuple | list):
        return [bits(item) for item in x]
    value = x.value if isinstance(x, Node) else x
    return value.to_host().tobytes() if isinstance(value, Tensor) else repr(value)


def run(queue: cl.CommandQueue, how: dict[str, Any], *, recorded: bool) -> tuple[list[Any], int]:
    """What calls return and leave, also what of earlier calls is kept; and how many recordings there are."""
    handle = amp.init(dtype=how["dtype"], loss_scale=1024.0) if how["dtype"] else None
    session.ensure_patched()  # as amp.record does: netcl's own defects are mended for both
    np.random.seed(0)
    model = Linear(queue, 4, 3)
    params = list(model.parameters())
    optimizer = SGD(params, lr=0.01)

    def step(x: Any, y: Tensor) -> Any:
        if how["clears"] == "weights before":
            optimizer.zero_grad()
        node = x if isinstance(x, Node) else ag.tensor(x, requires_grad=how["given"] == "trained tensor")
        for _ in range(how["passes"]):
            loss = ag.mean(ag.mul(model(node), ag.tensor(y)))
            if how["reads_x_twice"]:
                loss = ag.add(loss, ag.mean(ag.mul(node, node)))
            if handle is None:
                ag.Tape().backward(loss)
            else:
                with handle.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
        if how["steps"]:
            optimizer.step()
        grad = node.value.grad
        results = {"loss": loss, "x.grad": grad, "both": (loss, grad), "weight.grad": params[0].grad, "nothing": None}
        if grad is not None:
            results["a step along x.grad"] = ag.add(node, ag.tensor(grad))
        result = results.get(how["returns"])
        if how["clears"] == "weights after":
            optimizer.zero_grad()
        if how["clears"] == "x":
            node.value.grad = None
        return result

    function = amp.record(step) if recorded else step
    numbers = np.random.default_rng(1)
    inputs = [to_device(queue, numbers.standard_normal((2, 4)).astype(np.float32)) for _ in range(CALLS)]
    targets = [to_device(queue, numbers.standard_normal((2, 3)).astype(np.float32)) for _ in range(CALLS)]
    for x in inputs:
        x.requires_grad = how["given"] == "trained tensor"
    left, kept = [], []
    for index, y in zip(how["inputs"], targets, strict=False):
        x = inputs[index]
        kept.append(
            function(ag.tensor(x, requires_grad=how["given"] == "trained node") if "node" in how["given"] else x, y)
        )
        for size in (8, 12, 3, 1, 6) * 2:  # writes into memory that nobody holds any more
            Tensor.from_shape(queue, (size,), fill=7.0)
        left.append([bits(kept), bits([x.grad for x in inputs]), bits([p.grad for p in params]), bits(params)])
    recordings = function.recordings if isinstance(function, RecordedFunction) else 0
    amp.shutdown()
    session.forget_patches()
    return left, recordings


def check(queue: cl.CommandQueue, seeds: range) -> int:
    made = 0
    for seed in seeds:
        random = Random(seed)
        how = {name: random.choice(choices) for name, choices in CHOICES.items()}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            (wanted, _), (found, recordings) = (run(queue, how, recorded=recorded) for recorded in (False, True))
        assert found == wanted, f"program {seed}: {how}"
        assert not [x for x in said if "computes something else now" in str(x.message)], f"program {seed}: {how}"
        made += recordings
    return made


@pytest.mark.parametrize("part", range(2))
@pytest.mark.long
def test_the_gradients_of_inputs_are_each_calls_own(queue: cl.CommandQueue, part: int) -> None:
    assert check(queue, range(20 * part, 20 * part + 20)) >= 10


@pytest.mark.slow
@pytest.mark.once  # it asks what the host does, and would build kernels for most of its time elsewhere
def test_the_gradients_of_inputs_are_each_calls_own_in_hundreds_of_programs(queue: cl.CommandQueue) -> None:
    assert check(queue, range(40, 240)) >= 100


@pytest.mark.parametrize("clears", [False, True])
def test_what_is_no_weight_and_no_argument_has_its_gradient_from_replays(queue: cl.CommandQueue, clears: bool) -> None:
    def gradients(recorded: bool) -> list[Any]:
        x, left = to_device(queue, [1.0, 2.0]), []

        def step(y: Tensor) -> Node:
            if clears:
                x.grad = None
            loss = ag.sum(ag.mul(ag.tensor(x, requires_grad=True), ag.tensor(y)))
            loss.backward()
            return loss

        function = amp.record(step) if recorded else step
        for number in range(6):
            function(to_device(queue, [number, 2.0 * number]))
            left.append(bits(x.grad))
        return left

    with amp.init(dtype="float32"):
        assert gradients(recorded=True) == gradients(recorded=False)


def test_a_replay_clears_the_gradient_that_the_function_clears(queue: cl.CommandQueue) -> None:
    @amp.record
    def step(x: Tensor) -> Node:
        x.grad = None
        return ag.mul(ag.tensor(x), 2.0)

    with amp.init(dtype="float32"):
        for number in range(4):
            x, x.grad = to_device(queue, [number]), to_device(queue, [1.0])
            assert step(x).value.to_host() == 2.0 * number
            assert x.grad is None
        assert step.recordings == 1
