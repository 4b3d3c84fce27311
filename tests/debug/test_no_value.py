"""What has no finite value in float32 either: no dtype is the cure, and the cure that is told is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd.engine import apply_op
from netcl.nn.layers import Linear
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node, Tensor
from clamp.debug.explain import Explanation
from clamp.ops.elementwise import elementwise
from tests.reference import to_device

pytestmark = pytest.mark.usefixtures("shut_down")

WAYS = ("armed", "run again")


def zeros(x: Node) -> Node:
    return ag.mul(x, 0.0)


def negative(x: Node) -> Node:
    return ag.sub(zeros(x), 1.0)


#: name -> the op, of x and y; x and y, of what a layer gives; direction and words of the verdict
CASES: dict[str, tuple[str, Callable[[Node], Node], Callable[[Node], Any], str, str]] = {
    "0 / 0": ("div", zeros, zeros, "forward", "it divides by 0."),
    "x / 0": ("div", lambda h: h, zeros, "forward", "it divides by 0."),
    "root of -1": ("sqrt", negative, lambda h: None, "forward", "negative numbers have no root"),
    "slope of a root at 0": ("sqrt", zeros, lambda h: None, "backward", "the slope of a root is infinite at 0"),
    "logarithm of 0": ("log", zeros, lambda h: None, "forward", "numbers up to 0 have no logarithm"),
    "e^100": ("exp", lambda h: ag.add(zeros(h), 100.0), lambda h: None, "forward", "above 88"),
    "power": ("pow", negative, lambda h: 0.5, "forward", "has no such power"),
}


def training(queue: cl.CommandQueue, op: Callable[[Node], Node], dtype: str, **options: Any) -> tuple[Any, Any]:
    """A handle, and a step that runs an op on what a layer gives."""
    np.random.seed(0)
    layer = Linear(queue, 8, 16)
    optimizer = SGD(layer.parameters(), lr=1e-6)
    x = to_device(queue, np.random.default_rng(1).standard_normal((4, 8), np.float32))
    handle = amp.init(dtype=dtype, **options)

    def step() -> None:
        optimizer.zero_grad()
        loss = ag.mean(op(layer(ag.tensor(x))))
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return handle, step


def explained(queue: cl.CommandQueue, op: Callable[[Node], Node], dtype: str, way: str) -> Explanation:
    handle, step = training(queue, op, dtype, loss_scale=8.0, debug="attribution" if way == "armed" else None)
    step()
    found: Explanation = handle.explain() if way == "armed" else handle.explain(step)
    handle.shutdown()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_the_verdict_and_its_cure(queue: cl.CommandQueue, name: str, dtype: str, way: str) -> None:
    op, x, y, direction, words = CASES[name]

    def called(h: Node) -> Node:
        return getattr(ag, op)(*[value for value in (x(h), y(h)) if value is not None])

    found = explained(queue, called, dtype, way)
    assert found.first is not None
    assert (found.kind, found.first.direction, found.first.function) == (direction, direction, op), found
    assert words in found.why
    assert "no finite value in float32 either" in found.why
    assert "black_list" not in found.cure
    assert found.cure.endswith(f"  # at {found.first.place.short_line}")
    code = found.cure.partition("  #")[0]

    def cured(h: Node) -> Node:
        return eval(code, {"ag": ag, "x": x(h), "y": y(h)})  # what the user is told to write

    handle, step = training(queue, cured, dtype)
    for _ in range(20):  # the scale comes down
        step()
    assert handle.last_step.stepped, handle.last_step


@pytest.mark.parametrize("way", WAYS)
def test_what_is_finite_in_float32_is_told_so(queue: cl.CommandQueue, way: str) -> None:
    found = explained(queue, lambda h: ag.div(h, ag.add(zeros(h), 1e-6)), "float16", way)
    assert "62 of its results are beyond 65504, the largest number of float16, and so inf: the loss" in found.why
    assert found.why.endswith("In float32 they are finite.")
    assert 'custom_black_list=["div"]' in found.cure


@amp.half_function
def users(x: Node, divisor: float) -> Node:
    """A function of the user's own, ``x / divisor`` in the dtype of x."""

    def compute(x: Tensor) -> Tensor:
        return elementwise("div", x.dtype, x, divisor)

    def gradient(dy: Tensor) -> list[Tensor]:
        return [dy]

    return apply_op(compute, gradient, x)


@pytest.mark.parametrize("way", ["run again", "armed"])
def test_numbers_that_a_call_was_given_count(queue: cl.CommandQueue, way: str) -> None:
    assert "float32 either" in explained(queue, lambda h: ag.div(h, 0.0), "float16", way).why
    assert "float32 either" in explained(queue, lambda h: users(h, 0.0), "float16", way).why
    small = explained(queue, lambda h: users(h, 1e-7), "float16", way)
    assert small.why.endswith("In float32 they are finite.")
    assert small.cure.startswith("@amp.float_function")


@pytest.mark.parametrize("way", ["run again", "armed"])
def test_where_an_op_cannot_be_computed_again_both_are_told(queue: cl.CommandQueue, way: str) -> None:
    @amp.half_function
    def of_halves(x: Node) -> Node:
        if x.value.dtype != "float16":
            raise TypeError("a kernel that reads half")
        return apply_op(lambda x: elementwise("div", x.dtype, x, 1e-7), lambda dy: [dy], x)

    found = explained(queue, of_halves, "float16", way)
    assert found.why.endswith("(Or they have no value, as x / 0.)")
