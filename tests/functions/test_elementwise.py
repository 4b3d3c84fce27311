"""Element-wise functions in autograd: gradients against float64, in every dtype and shape of the operands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import netcl.autograd as ag
import numpy as np
import pyopencl as cl
import pytest
from netcl.ops import elementwise as netcl_elementwise
from netcl.ops import elementwise_optimized as netcl_optimized

import clamp.functions.activations
import clamp.functions.arithmetic  # noqa: F401  (registers)
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import NotOwned
from clamp.casting.policies import Float, Match, Promote
from clamp.casting.registry import OWNED
from tests.functions.operands import half, leaf
from tests.reference import STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy

Array = np.ndarray[Any, Any]
HALF = half()


def run(name: str, casting: Any, *args: Any, **kwargs: Any) -> Any:
    return OWNED[f"netcl.autograd.{name}"](casting, *args, **kwargs)


def stored(node: Node) -> Array:
    return to_numpy(node.value)


def backward(out: Node, grad: Any) -> None:
    Tape().backward(out, to_device(out.value.queue, grad, out.value.dtype))


def numeric(f: Callable[..., Array], args: list[Array], k: int, g: Array) -> Array:
    """d sum(g * f) / d args[k] in float64, by central differences of an element-wise f."""
    step = 1e-6 * np.maximum(1.0, np.abs(args[k]))
    up, down = (f(*[np.asarray(a + sign * step if j == k else a) for j, a in enumerate(args)]) for sign in (1.0, -1.0))
    terms = g * (up - down) / (2 * np.broadcast_to(step, up.shape))
    return reduce_to(terms, args[k].shape)


def reduce_to(terms: Array, shape: tuple[int, ...]) -> Array:
    padded = (1,) * (terms.ndim - len(shape)) + shape
    axes = tuple(k for k, (s, t) in enumerate(zip(terms.shape, padded, strict=True)) if t == 1 and s != 1)
    return terms.sum(axis=axes, keepdims=True).reshape(shape)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def hard_sigmoid(x: Array) -> Array:
    return np.clip(0.2 * x + 0.5, 0, 1)


#: name -> arguments after the tensor, reference
UNARY: dict[str, tuple[tuple[Any, ...], Callable[[Array], Array]]] = {
    "relu": ((), lambda x: np.maximum(x, 0)),
    "leaky_relu": ((0.125,), lambda x: np.where(x > 0, x, 0.125 * x)),
    "sigmoid": ((), sigmoid),
    "tanh": ((), np.tanh),
    "gelu": ((True,), lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    "swish": ((), lambda x: x * sigmoid(x)),
    "elu": ((1.5,), lambda x: np.where(x > 0, x, 1.5 * np.expm1(np.minimum(x, 0)))),
    "softplus": ((), lambda x: np.logaddexp(x, 0)),
    "hard_sigmoid": ((), hard_sigmoid),
    "hard_swish": ((), lambda x: x * hard_sigmoid(x)),
    "hard_tanh": ((-0.75, 1.25), lambda x: np.clip(x, -0.75, 1.25)),
    "clamp": ((-0.75, 1.25), lambda x: np.clip(x, -0.75, 1.25)),
    "clip": ((-0.75, 1.25), lambda x: np.clip(x, -0.75, 1.25)),
    "abs": ((), np.abs),
    "square": ((), np.square),
    "exp": ((), np.exp),
    "log": ((), np.log),
    "log1p": ((), np.log1p),
    "sqrt": ((), np.sqrt),
    "rsqrt": ((), lambda x: 1 / np.sqrt(x)),
    "pow": ((3,), lambda x: x**3),
}
POSITIVE = {"log", "log1p", "sqrt", "rsqrt"}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "add_relu": lambda a, b: np.maximum(a + b, 0),
}


def points(name: str = "", shape: tuple[int, ...] = (5, 7), seed: int = 0) -> Array:
    x = np.random.default_rng([seed, len(shape)]).uniform(0.25, 3.0, shape)
    if name not in POSITIVE:
        x *= np.where(np.random.default_rng([seed, 1]).random(shape) < 0.5, -1, 1)
    return x


def tolerance(dtype: str, expected: Array) -> Array:
    # numeric differences are good to 1e-8; what is stored in 16 bits between forward and backward costs an ulp
    relative = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    return 1e-7 + relative * (np.abs(expected) + 0.1)


# ------------------------------------------------------------------------------------------ values, gradients


@pytest.mark.parametrize(
    "dtype",
    ["float16", pytest.param("float32", marks=pytest.mark.slow), pytest.param("bfloat16", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary(queue: cl.CommandQueue, name: str, dtype: str) -> None:
    arguments, f = UNARY[name]
    x = leaf(queue, points(name), dtype)
    out = run(name, Match(), x, *arguments)
    assert out.value.dtype == dtype
    assert_close(out.value, f(stored(x)), ulps=2, slack=4 * 2.0**-24 * np.abs(f(stored(x))))
    g = quantize(points(seed=3), dtype).astype(np.float64)
    backward(out, g)
    expected = numeric(f, [stored(x)], 0, g)
    assert x.grad.dtype == dtype
    assert_close(x.grad, expected, slack=tolerance(dtype, expected))


SAME, BIAS, BOTH = ((5, 7), (5, 7)), ((5, 7), (7,)), ((4, 1, 3), (5, 1))
#: Each way to broadcast and each mixture of dtypes once; all of them together are the slow sweep.
EVERYDAY = [(SAME, ("float16", "float16")), (BIAS, ("float16", "float32")), (BOTH, ("float32", "float32"))]
PAIRS = [("float32", "float32"), ("float16", "float16"), ("float16", "float32"), ("bfloat16", "float16")]
SWEEP = [(shapes, dtypes) for shapes in (SAME, BIAS, BOTH) for dtypes in PAIRS if (shapes, dtypes) not in EVERYDAY]


@pytest.mark.parametrize(
    ("shapes", "dtypes"), EVERYDAY + [pytest.param(*case, marks=pytest.mark.slow) for case in SWEEP]
)
@pytest.mark.parametrize("name", sorted(BINARY))
def test_binary(
    queue: cl.CommandQueue, name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtypes: tuple[str, str]
) -> None:
    f = BINARY[name]
    a, b = (leaf(queue, points(shape=s, seed=k), t) for k, (s, t) in enumerate(zip(shapes, dtypes, strict=True)))
    out = run(name, Promote(), a, b)
    assert out.value.dtype == (dtypes[0] if dtypes[0] == dtypes[1] else "float32")
    values = [stored(a), stored(b)]
    assert_close(out.value, f(*values), slack=2.0**-24 * np.abs(f(*values)))
    g = quantize(points(shape=out.value.shape, seed=3), out.value.dtype).astype(np.float64)
    backward(out, g)
    for k, operand in enumerate((a, b)):
        expected = numeric(f, values, k, g)
        assert operand.grad.dtype == dtypes[k]
        assert operand.grad.shape == operand.value.shape
        assert_close(operand.grad, expected, slack=tolerance(dtypes[k], expected))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum"])
@pytest.mark.parametrize("number", [2, -1.5, np.float32(0.75), np.int64(3)])
def test_numbers_on_either_side(queue: cl.CommandQueue, name: str, number: Any) -> None:
    f = BINARY[name]
    for left in (False, True):
        x = leaf(queue, points(), "float16")
        out = run(name, Promote(), *((number, x) if left else (x, number)))
        assert out.value.dtype == "float16"
        value, constant = stored(x), np.asarray(float(number))
        whole = (lambda v, c=constant: f(c, v)) if left else (lambda v, c=constant: f(v, c))
        assert_close(out.value, whole(value))
        backward(out, np.ones((5, 7)))
        expected = numeric(whole, [value], 0, np.ones((5, 7)))
        assert_close(x.grad, expected, slack=tolerance("float16", expected))


def test_ties_of_maximum(queue: cl.CommandQueue) -> None:
    a, b = leaf(queue, [1.0, 2.0]), leaf(queue, [1.0, 3.0])
    backward(run("maximum", Promote(), a, b), [5.0, 5.0])
    assert (to_numpy(a.grad).tolist(), to_numpy(b.grad).tolist()) == ([5, 0], [0, 5])
    for arguments in ((1.0, x := leaf(queue, [1.0, 0.5])), (x, 1.0)):
        x.grad = x.value.grad = None
        backward(run("maximum", Promote(), *arguments), [5.0, 5.0])
        assert to_numpy(x.grad).tolist() == [5, 0]


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")])
def test_where(queue: cl.CommandQueue, dtypes: tuple[str, str]) -> None:
    condition = Node(value=to_device(queue, (points(shape=(5, 1)) > 0) * 1e-10))  # not zero, though half says so
    a, b = leaf(queue, points(shape=(7,)), dtypes[0]), leaf(queue, points(shape=(5, 7), seed=1), dtypes[1])
    c = stored(condition)
    for casting in (Promote(), HALF):
        a.grad = a.value.grad = b.grad = b.value.grad = None
        out = run("where", casting, condition, a, b)
        assert_close(out.value, np.where(c != 0, stored(a), stored(b)), slack=2.0**-11 * 3)
        g = quantize(points(seed=4), out.value.dtype).astype(np.float64)
        backward(out, g)
        assert_close(a.grad, reduce_to(np.where(c != 0, g, 0), (7,)), slack=1e-6)
        assert_close(b.grad, np.where(c != 0, 0, g))
        assert condition.grad is None


def test_where_with_numbers(queue: cl.CommandQueue) -> None:
    condition = to_device(queue, [1.0, 0.0, np.nan, -0.0])
    x = leaf(queue, [1.0, np.inf, np.nan, 4.0], "float16")
    out = run("where", Promote(), Node(value=condition), 2.0, x)
    np.testing.assert_array_equal(to_numpy(out.value), [2, np.inf, 2, 4])
    backward(out, np.ones(4))
    assert to_numpy(x.grad).tolist() == [0, 1, 0, 1]
    out = run("where", Promote(), condition, x, -1)
    np.testing.assert_array_equal(to_numpy(out.value), [1, -1, np.nan, -1])
    with pytest.raises(ValueError, match="at least one Tensor"):
        run("where", Promote(), condition, 1.0, 2.0)


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge"])
def test_comparisons_are_constant_nodes(queue: cl.CommandQueue, name: str) -> None:
    f = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}[name]
    a, b = np.array([[1.0], [2.0], [3.0]]), np.array([1.0, 2.0, np.nan])
    out = run(name, Promote(), leaf(queue, a, "float16"), to_device(queue, b, "float16"))
    assert isinstance(out, Node)
    assert (out.requires_grad, out.parents, out.value.dtype) == (False, [], "float16")
    np.testing.assert_array_equal(to_numpy(out.value), f(a, b))
    with ag.no_grad():
        np.testing.assert_array_equal(to_numpy(run(name, Promote(), 2.0, to_device(queue, a)).value), f(2.0, a))


# ------------------------------------------------------------------------------------------------- policies


def test_result_and_gradient_dtypes(queue: cl.CommandQueue) -> None:
    for casting, dtype, expected in (
        (Float(), "float16", "float32"),
        (Match(), "bfloat16", "bfloat16"),
        (HALF, "float32", "float16"),
    ):
        x = leaf(queue, points(), dtype)
        out = run("tanh", casting, x)
        assert out.value.dtype == expected
        backward(out, np.ones((5, 7)))
        assert x.grad.dtype == dtype


def test_no_gradient_for_inputs(queue: cl.CommandQueue) -> None:
    x, w = Node(value=to_device(queue, points(), "float16")), leaf(queue, points(shape=(7,)), "float16")
    out = run("mul", Promote(), x, w)
    (gx, gw) = out.grad_fn(to_device(queue, np.ones((5, 7)), "float16"))
    assert gx is None
    assert gw.shape == (7,)
    out = run("add_relu", Promote(), x, w)
    assert out.grad_fn(to_device(queue, np.ones((5, 7)), "float16"))[0] is None
    assert run("relu", Match(), x).grad_fn is None


def test_bare_tensors_give_bare_tensors(queue: cl.CommandQueue) -> None:
    x = to_device(queue, points(), "float16")
    assert isinstance(run("relu", Match(), x), Tensor)
    assert isinstance(run("add", Promote(), x, 1.0), Tensor)
    with ag.no_grad():
        assert isinstance(run("mul", Promote(), leaf(queue, points()), x), Tensor)


def test_a_tensor_beside_a_node(queue: cl.CommandQueue) -> None:
    w = leaf(queue, points())
    backward(run("div", Promote(), to_device(queue, points(seed=1)), w), np.ones((5, 7)))
    assert_close(w.grad, -stored_f32(points(seed=1)) / stored(w) ** 2, ulps=4)


def stored_f32(values: Array) -> Array:
    return quantize(values, "float32").astype(np.float64)


def test_what_is_not_clamps_is_refused(queue: cl.CommandQueue) -> None:
    double = Tensor.from_host(queue, np.ones(3), dtype="float64")
    integers = Tensor.from_host(queue, np.ones(3, np.int32), dtype="int32")
    for x in (double, integers):
        with pytest.raises(NotOwned):
            run("relu", Match(), Node(value=x))
        with pytest.raises(NotOwned):
            run("add", Promote(), Node(value=x), to_device(queue, np.ones(3)))
    with pytest.raises(NotOwned):
        run("add", Promote(), 1.0, 2.0)


@pytest.mark.parametrize("name", sorted([*UNARY, *BINARY, "where", "lt", "le", "gt", "ge", "dropout", "bias_add"]))
def test_signatures_are_netcls(name: str) -> None:
    ours = list(inspect.signature(OWNED[f"netcl.autograd.{name}"]).parameters.values())[1:]
    theirs = list(inspect.signature(getattr(ag, name)).parameters.values())
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


@pytest.mark.parametrize("full_name", sorted(name for name in OWNED if name.startswith("netcl.ops.elementwise")))
def test_tensor_level_signatures_are_netcls(full_name: str) -> None:
    module = netcl_optimized if "optimized" in full_name else netcl_elementwise
    theirs = inspect.signature(getattr(module, full_name.rsplit(".", 1)[1])).parameters.values()
    ours = list(inspect.signature(OWNED[full_name]).parameters.values())[1:]
    expected = [(p.name, p.default) for p in theirs]
    assert [(p.name, p.default) for p in ours][: len(expected)] == expected


# -------------------------------------------------------------------------------------- scaling and summing


@pytest.mark.parametrize("exponent", [-10, 0, 8, 16])
@pytest.mark.parametrize("name", ["sigmoid", "gelu", "swish", "relu", "square", "hard_swish"])
def test_scaled_gradients_scale(queue: cl.CommandQueue, name: str, exponent: int) -> None:
    scale = 2.0**exponent
    g = np.full((5, 7), 2.0**-3 if exponent > 0 else 1.0)  # all half gradients stay in [2^-14, 65504]
    grads = []
    for seed in (g, g * scale):
        x = leaf(queue, points(), "float16")
        backward(run(name, Match(), x), seed)
        grads.append(to_numpy(x.grad))
    np.testing.assert_allclose(grads[1] / scale, grads[0], rtol=2.0**-9, atol=2.0**-14)


def test_broadcast_gradients_do_not_overflow_in_half(queue: cl.CommandQueue) -> None:
    x, w = leaf(queue, np.full((64, 3), 300.0), "float16"), leaf(queue, np.ones(3))
    backward(run("mul", HALF, x, w), np.where(np.arange(64)[:, None] % 2, 300.0, -300.0) * np.ones((64, 3)))
    assert to_numpy(w.grad).tolist() == [0.0, 0.0, 0.0]  # each term is 90000: inf in half, and inf - inf is nan
    assert w.grad.dtype == "float32"


def test_fan_out_adds_up(queue: cl.CommandQueue) -> None:
    x = leaf(queue, points())
    y = run("tanh", Match(), x)
    out = run("add", Promote(), run("mul", Promote(), y, y), y)
    backward(out, np.ones((5, 7)))
    t = np.tanh(stored(x))
    assert_close(x.grad, (2 * t + 1) * (1 - t * t), slack=1e-6)


def test_bias_add(queue: cl.CommandQueue) -> None:
    x, bias = leaf(queue, points(), "float16"), leaf(queue, points(shape=(7,)))
    out = run("bias_add", Match(), x, bias)
    assert out.value.dtype == "float16"
    assert_close(out.value, stored(x) + stored(bias))
    backward(out, np.ones((5, 7)))
    assert to_numpy(bias.grad).tolist() == [5.0] * 7
    assert (x.grad.dtype, bias.grad.dtype) == ("float16", "float32")
    with pytest.raises(ValueError, match="bias dimension mismatch"):
        run("bias_add", Match(), x, leaf(queue, np.ones(5)))
    with pytest.raises(ValueError, match="expects x of shape"):
        run("bias_add", Match(), bias, bias)


def test_a_saturated_half_sigmoid_still_has_a_slope(queue: cl.CommandQueue) -> None:
    x = leaf(queue, [9.0, -9.0], "float16")
    out = run("sigmoid", Match(), x)
    assert to_numpy(out.value)[0] == 1.0
    backward(out, np.full(2, 1024.0))
    np.testing.assert_allclose(to_numpy(x.grad), 1024 * sigmoid(9.0) * sigmoid(-9.0), rtol=1e-3)


# ------------------------------------------------------------------------------------------ dropout and swish


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_dropout_backward_uses_the_mask(queue: cl.CommandQueue, dtype: str) -> None:
    x = leaf(queue, np.ones(500), dtype)
    out = run("dropout", Match(), x, 0.25, 7)
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
        return to_numpy(run("dropout", Match(), x, 0.5, seed)).tolist()

    assert draw(1) == draw(1) != draw(2)
    assert draw(2**70 + 5) == draw(5)
    assert draw(None) != draw(None)
    np.random.seed(11)
    first = draw(None)
    np.random.seed(11)
    assert draw(None) == first
    rate = np.mean(to_numpy(run("dropout", Match(), to_device(queue, np.ones(1 << 16)), 0.3, 3)) == 0)
    assert abs(rate - 0.3) < 0.01


def test_dropout_limits(queue: cl.CommandQueue) -> None:
    x = leaf(queue, points(), "float16")
    assert run("dropout", Match(), x, 0.0) is x
    out = run("dropout", Match(), x, 1.0)
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

    assert_close(of("elementwise.relu", x), np.maximum(v, 0))
    assert_close(of("elementwise.leaky_relu", x, 0.5), np.where(v > 0, v, 0.5 * v))
    assert_close(of("elementwise.clamp", x, -1.0, 1.0), np.clip(v, -1, 1))
    assert_close(of("elementwise.bias_add", x, bias), v + b)
    assert_close(of("elementwise_optimized.fused_bias_relu", x, bias), np.maximum(v + b, 0))
    assert_close(of("elementwise.elementwise_scalar", x, 2.0, "RSUB"), 2 - v)
    assert_close(of("elementwise.elementwise_scalar", x, 2.0, op="DIV"), v / 2)
    assert_close(of("broadcast.broadcast_binary", x, bias, op="MAX"), np.maximum(v, b))
    assert of("elementwise.dropout", x, 0.0) is x
    for refused in (
        lambda: of("elementwise.relu", x, out=x),
        lambda: of("elementwise.dropout", x, return_mask=True),
        lambda: of("elementwise.elementwise_scalar", x, 2.0, "POW"),
        lambda: of("broadcast.broadcast_binary", x, bias, op="XOR"),
    ):
        with pytest.raises(NotOwned):
            refused()
