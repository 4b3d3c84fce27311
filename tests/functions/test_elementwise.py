"""Element-wise functions in autograd: gradients against float64, in every dtype and shape of the operands."""

from __future__ import annotations

import functools
from typing import Any

import netcl.autograd as ag
import numpy as np
import pyopencl as cl
import pytest

import clamp.functions.activations
import clamp.functions.arithmetic  # noqa: F401  (registers)
from clamp import amp, bridge
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.policies import Match, Promote
from clamp.casting.registry import OWNED
from clamp.functions import activations as functions
from tests.conformance.activations import sigmoid
from tests.functions.operands import call, half, leaf
from tests.reference import STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy

Array = np.ndarray[Any, Any]
HALF = half()


def stored(node: Node) -> Array:
    return to_numpy(node.value)


def backward(out: Node, grad: Any) -> None:
    Tape().backward(out, to_device(out.value.queue, grad, out.value.dtype))


def points(shape: tuple[int, ...] = (5, 7), seed: int = 0) -> Array:
    x = np.random.default_rng([seed, len(shape)]).uniform(0.25, 3.0, shape)
    return x * np.where(np.random.default_rng([seed, 1]).random(shape) < 0.5, -1, 1)


# ------------------------------------------------------------------------------------------ edges


def test_ties_of_maximum(queue: cl.CommandQueue) -> None:
    a, b = leaf(queue, [1.0, 2.0]), leaf(queue, [1.0, 3.0])
    backward(call("maximum", Promote(), a, b), [5.0, 5.0])
    assert (to_numpy(a.grad).tolist(), to_numpy(b.grad).tolist()) == ([5, 0], [0, 5])
    for arguments in ((1.0, x := leaf(queue, [1.0, 0.5])), (x, 1.0)):
        x.grad = x.value.grad = None
        backward(call("maximum", Promote(), *arguments), [5.0, 5.0])
        assert to_numpy(x.grad).tolist() == [5, 0]


def test_numpys_functions_of_nodes_are_their_operators(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    x, y = leaf(queue, [1.0, 2.0]), leaf(queue, [4.0, 8.0])
    found = [np.add(x, y), np.float32(3) * x, np.array(3.0) * x, np.square(x), functools.reduce(np.add, [x, y, x])]
    found += [np.sum([x, y]), *(np.array([x, y], object) * x), 3.0 + np.negative(x)]
    expected = [[5, 10], [3, 6], [3, 6], [1, 4], [6, 12], [5, 10], [1, 4], [4, 16], [2, 1]]
    assert [stored(node).tolist() for node in found] == expected
    backward(np.multiply(x, y), [1.0, 1.0])
    assert to_numpy(x.grad).tolist() == [4, 8]


def test_where_with_numbers(queue: cl.CommandQueue) -> None:
    condition = to_device(queue, [1.0, 0.0, np.nan, -0.0])
    x = leaf(queue, [1.0, np.inf, np.nan, 4.0], "float16")
    out = call("where", Promote(), Node(value=condition), 2.0, x)
    np.testing.assert_array_equal(to_numpy(out.value), [2, np.inf, 2, 4])
    backward(out, np.ones(4))
    assert to_numpy(x.grad).tolist() == [0, 1, 0, 1]
    out = call("where", Promote(), condition, x, -1)
    np.testing.assert_array_equal(to_numpy(out.value), [1, -1, np.nan, -1])


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge"])
def test_comparisons_are_constant_nodes(queue: cl.CommandQueue, name: str) -> None:
    f = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}[name]
    a, b = np.array([[1.0], [2.0], [3.0]]), np.array([1.0, 2.0, np.nan])
    out = call(name, Promote(), leaf(queue, a, "float16"), to_device(queue, b, "float16"))
    assert isinstance(out, Node)
    assert (out.requires_grad, out.parents, out.value.dtype) == (False, [], "float16")
    np.testing.assert_array_equal(to_numpy(out.value), f(a, b))
    with ag.no_grad():
        np.testing.assert_array_equal(to_numpy(call(name, Promote(), 2.0, to_device(queue, a)).value), f(2.0, a))


# -------------------------------------------------------------------------------------- scaling and summing


def test_broadcast_gradients_do_not_overflow_in_half(queue: cl.CommandQueue) -> None:
    x, w = leaf(queue, np.full((64, 3), 300.0), "float16"), leaf(queue, np.ones(3))
    backward(call("mul", HALF, x, w), np.where(np.arange(64)[:, None] % 2, 300.0, -300.0) * np.ones((64, 3)))
    assert to_numpy(w.grad).tolist() == [0.0, 0.0, 0.0]  # each term is 90000: inf in half, and inf - inf is nan
    assert w.grad.dtype == "float32"


def test_a_saturated_half_sigmoid_still_has_a_slope(queue: cl.CommandQueue) -> None:
    x = leaf(queue, [9.0, -9.0], "float16")
    out = call("sigmoid", Match(), x)
    assert to_numpy(out.value)[0] == 1.0
    backward(out, np.full(2, 1024.0))
    np.testing.assert_allclose(to_numpy(x.grad), 1024 * sigmoid(9.0) * sigmoid(-9.0), rtol=1e-3)


# ------------------------------------------------------------------------------------------ dropout and swish


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_dropout_backward_uses_the_mask(queue: cl.CommandQueue, dtype: str) -> None:
    x = leaf(queue, np.ones(500), dtype)
    out = call("dropout", Match(), x, 0.25, 7)
    backward(out, np.ones(500))
    kept = to_numpy(out.value)
    assert set(kept) == {0.0, float(quantize(1 / 0.75, dtype))}
    np.testing.assert_array_equal(to_numpy(x.grad), kept)


def test_dropout_of_netcl_ignores_its_mask(queue: cl.CommandQueue) -> None:
    x = leaf(queue, np.ones(500))
    out = ag.dropout(x, 0.25, 7)
    Tape().backward(out, to_device(queue, np.ones(500)))
    assert (to_numpy(out.value) == 0).any()
    assert not (to_numpy(x.grad) == 0).any()  # what test_dropout_backward_uses_the_mask would catch


def test_dropout_seeds(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.ones(300))

    def draw(seed: int | None) -> list[float]:
        return to_numpy(call("dropout", Match(), x, 0.5, seed)).tolist()

    assert draw(1) == draw(1) != draw(2)
    assert draw(2**70 + 5) == draw(5)
    assert draw(None) != draw(None)
    np.random.seed(11)
    first = draw(None)
    np.random.seed(11)
    assert draw(None) == first
    rate = np.mean(to_numpy(call("dropout", Match(), to_device(queue, np.ones(1 << 16)), 0.3, 3)) == 0)
    assert abs(rate - 0.3) < 0.01


def test_dropout_limits(queue: cl.CommandQueue) -> None:
    x = leaf(queue, points(), "float16")
    assert call("dropout", Match(), x, 0.0) is x
    out = call("dropout", Match(), x, 1.0)
    assert not to_numpy(out.value).any()
    backward(out, np.ones((5, 7)))
    assert not to_numpy(x.grad).any()


def test_swish_of_netcl_has_another_derivative(queue: cl.CommandQueue) -> None:
    x = leaf(queue, points())
    Tape().backward(ag.swish(x), to_device(queue, np.ones((5, 7))))
    s = sigmoid(stored(x))
    assert np.abs(to_numpy(x.grad) - s * (1 + stored(x) * (1 - s))).max() > 0.1


# --------------------------------------------------------------------------------------------- bare tensors


def test_tensor_level_functions(queue: cl.CommandQueue) -> None:
    x, bias = to_device(queue, points(), "float16"), to_device(queue, points(shape=(7,)))
    v, b = to_numpy(x), to_numpy(bias)

    def of(name: str, *args: Any, **kwargs: Any) -> Tensor:
        return OWNED[f"netcl.ops.{name}"](Promote(), *args, **kwargs)

    assert_close(of("elementwise_optimized.fused_bias_relu", x, bias), np.maximum(v + b, 0))
    assert_close(of("elementwise.elementwise_scalar", x, 2.0, "RSUB"), 2 - v)
    assert_close(of("elementwise.elementwise_scalar", x, 2.0, op="DIV"), v / 2)
    assert_close(of("broadcast.broadcast_binary", x, bias, op="MAX"), np.maximum(v, b))
    assert of("elementwise.dropout", x, 0.0) is x


# ------------------------------------------------------------------ PReLU under autograd and as netcl's layer calls it.


def test_a_tensor_without_dimensions(queue: cl.CommandQueue) -> None:
    x, slope = (leaf(queue, value) for value in (-2.0, 0.5))
    x.value, slope.value = (bridge.view(node.value, ()) for node in (x, slope))
    out = functions.prelu(Match(), x, slope)
    Tape().backward(out, bridge.view(to_device(queue, 3.0), ()))
    for result, expected in ((out.value, -1.0), (x.grad, 1.5), (slope.grad, -6.0)):
        assert_close(result, expected)


def test_tensor_level(queue: cl.CommandQueue) -> None:
    x, slope = to_device(queue, [[-2.0, 4.0]], "float16"), to_device(queue, [0.5])
    dx, dslope = functions.tensor_prelu_backward(Match(), x, slope, to_device(queue, [[1.0, 1.0]], "float16"))
    assert_close(dx, [[0.5, 1]])
    assert_close(dslope, [-2.0])
