"""What an explanation says of faults that look like another: the right words, and a cure that cures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd.engine import apply_op
from netcl.optim import SGD, Adam

from clamp import amp, session
from clamp.bridge import Node, Tensor
from clamp.debug.explain import Explanation
from clamp.ops.elementwise import elementwise
from tests.debug.faults import WAYS, Small, explained, optimize
from tests.networks import batch, loss_of, mlp, scaled_backward
from tests.reference import to_device

pytestmark = pytest.mark.usefixtures("shut_down")


def cured(cure: str) -> Any:
    """The handle of the call that a cure is."""
    session.shutdown()
    names: dict[str, Any] = {"amp": amp}
    exec(cure.partition("  # ")[0], names)
    return names["handle"]


# ---------------------------------------------------------------------------------------------- what became 0

#: of the numbers 1e-5: what float16 makes 0, and another function has no value for
UNDERFLOWS: dict[str, tuple[Callable[[Node], Node], str, str]] = {
    "root of a square": (lambda h: ag.sqrt(ag.mul(h, h)), "sqrt", "backward"),
    "one over a square": (lambda h: ag.div(1e-14, ag.mul(h, h)), "div", "forward"),
    "logarithm of a square": (lambda h: ag.log(ag.mul(h, h)), "log", "forward"),
}


@pytest.mark.parametrize("case", UNDERFLOWS)
@pytest.mark.parametrize("way", WAYS)
def test_what_float16_made_0_is_told_from_what_has_no_value(queue: cl.CommandQueue, case: str, way: str) -> None:
    loss, function, direction = UNDERFLOWS[case]
    small = Small(queue, loss, 1e-5)
    _, found = explained(small.step, way, loss_scale=1.0)
    assert found.first is not None, found
    assert (found.first.function, found.first.direction) == (function, direction), found
    assert "became 0 in float16: mul at test_causes.py" in found.why, found
    assert "float32 either" not in found.why
    handle = cured(found.cure)
    for _ in range(2):
        small.step(handle)()
        assert handle.last_step.stepped, handle.last_step


@pytest.mark.parametrize("case", UNDERFLOWS)
def test_true_zeros_have_no_value_in_any_dtype(queue: cl.CommandQueue, case: str) -> None:
    loss, function, _ = UNDERFLOWS[case]
    _, found = explained(Small(queue, loss, 0.0).step, "armed", loss_scale=1.0)
    assert found.first.function == function
    assert "It has no finite value in float32 either" in found.why, found


# ---------------------------------------------------------------------------------------------- what divided away


def like(h: Node, numbers: Any) -> Tensor:
    return to_device(h.value.queue, np.broadcast_to(numbers, h.value.shape))


DIVIDED: dict[str, Callable[[Node], Node]] = {
    "a quotient": lambda h: ag.div(60000.0, ag.mul(h, h)),
    "a quotient of nodes": lambda h: ag.div(h, ag.mul(h, h)),
    "a root below the line": lambda h: ag.rsqrt(ag.mul(h, h)),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_an_overflow_that_a_division_made_0_is_named(queue: cl.CommandQueue, case: str) -> None:
    small = Small(queue, DIVIDED[case], 300.0)
    handle, found = explained(small.step, "run again", loss_scale=1.0)
    assert handle.last_step.stepped
    assert (found.kind, found.first.function) == ("forward", "mul"), found
    assert "8 inf of its results are beyond 65504" in found.why
    assert "divides by them, which gives 0" in found.why
    handle = cured(found.cure)
    again = handle.explain(small.step(handle))
    assert (again.kind, again.why) == ("finite", "Every result and every gradient of its ops is finite."), again


@pytest.mark.parametrize(
    ("op", "function"),
    {
        "saturated": (lambda h: ag.tanh(ag.mul(h, 3e5)), "mul"),
        "masked": (lambda h: ag.softmax(ag.masked_fill(h, like(h, np.eye(4)[0]), -np.inf)), "masked_fill"),
    }.values(),
    ids=["saturated", "masked"],
)
def test_inf_that_comes_to_nothing_is_told(queue: cl.CommandQueue, op: Callable[[Node], Node], function: str) -> None:
    handle, found = explained(Small(queue, op, 1.0).step, "run again", loss_scale=1.0)
    assert handle.last_step.stepped
    assert found.kind == "finite"
    assert "Its loss and the gradients of what is trained are finite." in found.why
    assert f"The forward of {function} at " in found.why, found


# ---------------------------------------------------------------------------------------------- another step


def test_a_step_that_went_well_is_told_so(queue: cl.CommandQueue) -> None:
    small = Small(queue, ag.square, 1.0)
    handle = amp.init(loss_scale=1.0)
    step = small.step(handle)
    good, small.x = small.x, to_device(queue, np.full((2, 4), np.nan))
    step()
    small.x = good
    found = handle.explain(step)
    assert found.kind == "finite"
    assert found.why.startswith("This step went well"), found
    assert "step 1 was skipped. Pass the step with the batch that failed" in found.why
    assert 'debug="attribution"' in found.cure


@pytest.mark.parametrize("way", WAYS)
def test_what_was_put_into_a_gradient_is_told(queue: cl.CommandQueue, way: str) -> None:
    small = Small(queue, ag.square, 1.0)

    def step(handle: Any) -> None:
        small.optimizer.zero_grad()
        scaled_backward(handle, small.loss(), small.optimizer)
        small.layer.weight.grad.write(np.full((4, 4), np.nan, np.float32))
        small.optimizer.step()

    _, found = explained(lambda handle: partial(step, handle), way, loss_scale=1.0)
    assert found.kind == "finite"
    assert "has come into the gradients after backward" in found.why, found


# ---------------------------------------------------------------------------------------------- a rate too high


def losing(queue: cl.CommandQueue, optimizer: str, rate: float) -> tuple[Any, Any, Any]:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 16, 8, 4)
    chosen = SGD(model.parameters(), lr=rate) if optimizer == "SGD" else Adam(model.parameters(), lr=rate)
    return model, data, chosen


def one_step(handle: Any, model: Any, data: Any, optimizer: Any) -> float:
    loss = loss_of(model, data)
    optimize(handle, optimizer, loss)
    return float(loss.value.to_host().reshape(-1)[0])


@pytest.mark.parametrize(("optimizer", "rate"), [("SGD", 30.0), ("Adam", 300.0)])
@pytest.mark.parametrize("debug", ["attribution", ("attribution", "summary"), None])
def test_a_rate_that_is_too_high_is_blamed_for_what_grew(
    queue: cl.CommandQueue, optimizer: str, rate: float, debug: Any
) -> None:
    model, data, steps = losing(queue, optimizer, rate)
    handle = amp.init(debug=debug, loss_scale=8.0)
    for _ in range(60):
        one_step(handle, model, data, steps)
        if not handle.last_step.stepped:
            break
    assert not handle.last_step.stepped
    found: Explanation = handle.explain(None if debug else lambda: one_step(handle, model, data, steps))
    assert found.kind == "diverged", found
    assert found.why.startswith(f"The run diverges, in float32 as well, because the learning rate, {rate:g}, is too")
    assert "the numbers of layers." in found.why
    assert ("the loss grew from" in found.why) == (debug is not None and "summary" in debug and optimizer == "SGD")
    handle.shutdown()
    model, data, steps = losing(queue, optimizer, rate)
    exec(found.cure.partition("  # ")[0], {"optimizer": steps})
    assert steps.lr < rate
    with amp.init(loss_scale=8.0) as handle:
        losses = [one_step(handle, model, data, steps) for _ in range(30)]
        assert handle.last_step.stepped
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("optimizer", "rate"), [("SGD", 1e-9), ("SGD", 1e-2), ("Adam", 1e-2)])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_rate_is_not_blamed_for_weights_that_were_large(
    queue: cl.CommandQueue, optimizer: str, rate: float, steps: int
) -> None:
    """As T5's are, and boxes in pixels: so few steps at such a rate cannot have made them."""
    model, data, chosen = losing(queue, optimizer, rate)
    handle = amp.init(loss_scale=8.0)
    for _ in range(steps):
        one_step(handle, model, data, chosen)
    weight = model.layers[0].weight
    weight.write(3e4 * np.sign(weight.to_host()))
    found: Explanation = handle.explain(lambda: one_step(handle, model, data, chosen))
    assert found.kind != "diverged", found
    assert "learning rate" not in f"{found.why} {found.cure}"
    assert "65504, the largest number of float16" in found.why


@pytest.mark.parametrize("debug", [("attribution", "summary"), "summary"])
@pytest.mark.parametrize("factors", [(1e-4, 1.0, 1e-4, 1.0, 1.0), (1.0, 1.0, 1e-5, 1.0, 1.0)], ids=["noisy", "one"])
def test_a_rate_is_not_blamed_for_losses_of_easy_batches(
    queue: cl.CommandQueue, factors: tuple[float, ...], debug: Any
) -> None:
    """A loss far above the least of all is that of its batch, where most are like it, or no weight has grown."""
    model, data, optimizer = losing(queue, "SGD", 1e-6)
    handle = amp.init(debug=debug, loss_scale=8.0)

    large = to_device(queue, 1e5 * data[0].to_host()), data[1]

    def step(factor: float, data: Any) -> None:
        optimize(handle, optimizer, ag.mul(loss_of(model, data), factor))

    for factor in factors:
        step(factor, data)
    step(1.0, large)
    assert not handle.last_step.stepped
    found: Explanation = handle.explain(None if "attribution" in debug else lambda: step(1.0, large))
    assert found.kind != "diverged", found


# ---------------------------------------------------------------------------------------------- what has no value


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
    "mask": ("masked_fill", lambda h: h, lambda h: (like(h, 1.0), -np.inf), "forward", "it writes the inf that it was"),
    "branch": ("where", lambda h: ag.tensor(like(h, 0.0)), lambda h: (h, -np.inf), "forward", "it writes the inf that"),
    "power": ("pow", negative, lambda h: 0.5, "forward", "has no such power"),
}


def verdict(queue: cl.CommandQueue, op: Callable[[Node], Node], way: str, dtype: str = "float16") -> Explanation:
    handle, found = explained(Small(queue, op).step, way, dtype=dtype, loss_scale=8.0)
    handle.shutdown()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_the_verdict_and_its_cure(queue: cl.CommandQueue, name: str, dtype: str, way: str) -> None:
    op, x, y, direction, words = CASES[name]

    def called(h: Node) -> Node:
        others = y(h) if isinstance(y(h), tuple) else (y(h),)
        return getattr(ag, op)(*[value for value in (x(h), *others) if value is not None])

    found = verdict(queue, called, way, dtype)
    assert (found.kind, found.first.direction, found.first.function) == (direction, direction, op), found
    assert words in found.why
    assert "no finite value in float32 either" in found.why
    assert "black_list" not in found.cure
    assert found.cure.endswith(f"  # at {found.first.place.short_line}")
    code = found.cure.partition("  #")[0]

    def cured(h: Node) -> Node:
        other = y(h)[0] if isinstance(y(h), tuple) else y(h)
        return eval(code, {"ag": ag, "x": x(h), "y": other})  # what the user is told to write

    handle = amp.init(dtype=dtype)
    step = Small(queue, cured).step(handle)
    for _ in range(20):  # the scale comes down
        step()
    assert handle.last_step.stepped, handle.last_step


#: name -> an op of what a layer gives, (2, 4), with an index that does not exist; words of the verdict
BEYOND: dict[str, tuple[Callable[[Node, Tensor], Node], str]] = {
    "cross_entropy_indices": (ag.cross_entropy_indices, "a label is no class"),
    "cross_entropy": (lambda h, labels: ag.cross_entropy(h, ag.tensor(labels)), "a label is no class"),
    "index_select": (lambda h, indices: ag.index_select(h, 0, indices), "an index does not exist"),
    "embedding": (ag.embedding, "an index does not exist"),
    "gather": (lambda h, indices: ag.gather(h, 0, indices), "an index does not exist"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BEYOND)
def test_an_index_that_does_not_exist_is_told(queue: cl.CommandQueue, name: str, way: str) -> None:
    op, words = BEYOND[name]
    labels = np.where(np.arange(16) == 3, 16, 0).astype(np.int32)
    found = verdict(queue, lambda h: op(h, Tensor.from_host(queue, labels, dtype="int32")), way)
    assert found.first.function == name
    assert words in found.why, found
    exec(found.cure.partition("  #")[0], {"np": np, "y": labels})


@pytest.mark.parametrize("way", WAYS)
def test_what_is_finite_in_float32_is_told_so(queue: cl.CommandQueue, way: str) -> None:
    found = verdict(queue, lambda h: ag.div(h, ag.add(zeros(h), 1e-6)), way)
    assert "60 of its results are beyond 65504, the largest number of float16, and so inf: the loss" in found.why
    assert found.why.endswith("In float32 they are finite.")
    assert 'custom_black_list=["div"]' in found.cure


@amp.half_function
def users(x: Node, divisor: float) -> Node:
    """A function of the user's own, ``x / divisor`` in the dtype of x."""

    return apply_op(lambda x: elementwise("div", x.dtype, x, divisor), lambda dy: [dy], x)


@pytest.mark.parametrize("way", WAYS)
def test_numbers_that_a_call_was_given_count(queue: cl.CommandQueue, way: str) -> None:
    assert "float32 either" in verdict(queue, lambda h: ag.div(h, 0.0), way).why
    assert "float32 either" in verdict(queue, lambda h: users(h, 0.0), way).why
    small = verdict(queue, lambda h: users(h, 1e-7), way)
    assert small.why.endswith("In float32 they are finite.")
    assert small.cure.startswith("@amp.float_function")


@pytest.mark.parametrize("way", WAYS)
def test_where_an_op_cannot_be_computed_again_both_are_told(queue: cl.CommandQueue, way: str) -> None:
    @amp.half_function
    def of_halves(x: Node) -> Node:
        if x.value.dtype != "float16":
            raise TypeError("a kernel that reads half")
        return apply_op(lambda x: elementwise("div", x.dtype, x, 1e-7), lambda dy: [dy], x)

    found = verdict(queue, of_halves, way)
    assert found.why.endswith("(Or they have no value, as x / 0.)")
