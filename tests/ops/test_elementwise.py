"""Every function of OPS against numpy in float64, on every storage type, shape and special value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pyopencl as cl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clamp.ops import elementwise as module
from clamp.ops.dropout import dropout
from clamp.ops.elementwise import OPS, elementwise
from tests.conformance.activations import hard_sigmoid, hard_swish, sigmoid, swish
from tests.reference import SPECIAL, STORAGE_DTYPES, assert_close, quantize, to_device, to_numpy

pytestmark = pytest.mark.kernel

Array = np.ndarray[Any, Any]

_erfc = np.vectorize(math.erfc, otypes=[np.float64])
_K = math.sqrt(2 / math.pi)


def sigmoid_slope(x: Array) -> Array:
    return sigmoid(x) * sigmoid(-x)


def gelu_tanh(x: Array) -> Array:
    return x * sigmoid(2 * _K * (x + 0.044715 * x**3))


def gelu_tanh_slope(x: Array) -> Array:
    u2 = 2 * _K * (x + 0.044715 * x**3)
    return sigmoid(u2) + x * sigmoid_slope(u2) * 2 * _K * (1 + 3 * 0.044715 * x * x)


class Case(NamedTuple):
    """How a function is checked.

    ``ulps``: OpenCL's bound for what the function is made of, in float32. ``amplified``: the result reacts to
    the rounding of an intermediate argument as exp does, so the bound is on that argument's size as well.
    """

    reference: Callable[..., Any]
    parameters: tuple[float, ...] = ()
    ulps: float = 0.5
    positive: bool = False
    amplified: Callable[[Array], Array] | None = None
    terms: Callable[..., Any] | None = None  # the size of what is added up, where it may cancel


def _as_float32(value: float) -> float:
    return float(np.float32(value))


SLOPE, ALPHA, LOW, HIGH, POWER = (_as_float32(v) for v in (0.01, 1.3, -0.7, 1.9, 2.3))

UNARY = {
    "copy": Case(lambda x: x),
    "neg": Case(lambda x: -x),
    "abs": Case(np.abs),
    "square": Case(np.square),
    "exp": Case(np.exp, ulps=3),
    "log": Case(np.log, ulps=3, positive=True),
    "log1p": Case(np.log1p, ulps=3, positive=True),
    "sqrt": Case(np.sqrt, ulps=3, positive=True),
    "rsqrt": Case(lambda x: 1 / np.sqrt(x), ulps=3, positive=True),
    "pow": Case(lambda x: np.power(x, POWER), (POWER,), ulps=16, positive=True),
    "relu": Case(lambda x: np.maximum(x, 0)),
    "sigmoid": Case(sigmoid, ulps=8),
    "tanh": Case(np.tanh, ulps=5),
    "gelu_tanh": Case(gelu_tanh, ulps=10, amplified=lambda x: 2 * _K * (np.abs(x) + 0.05 * np.abs(x) ** 3)),
    "gelu_erf": Case(lambda x: 0.5 * x * _erfc(-x / math.sqrt(2)), ulps=20, amplified=np.square),
    "swish": Case(swish, ulps=9),
    "softplus": Case(lambda x: np.logaddexp(x, 0), ulps=8),
    "hard_sigmoid": Case(hard_sigmoid, ulps=2),
    "hard_swish": Case(hard_swish, ulps=3),
    "leaky_relu": Case(lambda x: np.where(x > 0, x, SLOPE * x), (SLOPE,), ulps=1),
    "elu": Case(lambda x: np.where(x > 0, x, ALPHA * np.expm1(np.minimum(x, 0))), (ALPHA,), ulps=5),
    "clamp": Case(lambda x: np.minimum(np.maximum(x, LOW), HIGH), (LOW, HIGH)),
}

BINARY = {
    "add": Case(np.add),
    "sub": Case(np.subtract),
    "mul": Case(np.multiply),
    "div": Case(np.divide, ulps=2.5),
    "maximum": Case(np.maximum),
    "minimum": Case(np.minimum),
    "lt": Case(np.less),
    "le": Case(np.less_equal),
    "gt": Case(np.greater),
    "ge": Case(np.greater_equal),
    "add_relu": Case(lambda a, b: np.maximum(a + b, 0)),
    "prelu": Case(lambda x, slope: np.where(x > 0, x, slope * x)),
    # g, x
    "prelu_grad_slope": Case(lambda g, x: np.where(x > 0, 0, g * x)),
    "abs_grad": Case(lambda g, x: g * np.sign(x)),
    "square_grad": Case(lambda g, x: 2 * g * x, ulps=2),
    "log1p_grad": Case(lambda g, x: g / (1 + x), ulps=4, positive=True),
    "rsqrt_grad": Case(lambda g, x: -0.5 * g * x**-1.5, ulps=8, positive=True),
    "pow_grad": Case(lambda g, x: g * POWER * x ** (POWER - 1), (POWER,), ulps=20, positive=True),
    "sigmoid_grad": Case(lambda g, x: g * sigmoid_slope(x), ulps=10),
    "tanh_grad": Case(lambda g, x: g * 4 * sigmoid_slope(2 * x), ulps=10),
    "gelu_tanh_grad": Case(
        lambda g, x: g * gelu_tanh_slope(x),
        ulps=16,
        amplified=lambda x: 2 * _K * (np.abs(x) + 0.05 * np.abs(x) ** 3),
        terms=lambda g, x: np.abs(g) * (sigmoid(2 * _K * (x + 0.044715 * x**3)) + np.abs(gelu_tanh_slope(x)) + 0.01),
    ),
    "gelu_erf_grad": Case(
        lambda g, x: g * (0.5 * _erfc(-x / math.sqrt(2)) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)),
        ulps=20,
        amplified=np.square,
        terms=lambda g, x: np.abs(g) * _erfc(-x / math.sqrt(2)) * 2,
    ),
    "swish_grad": Case(
        lambda g, x: g * sigmoid(x) * (1 + x * sigmoid(-x)),
        ulps=12,
        terms=lambda g, x: np.abs(g) * sigmoid(x) * (1 + np.abs(x) * sigmoid(-x)),
    ),
    "softplus_grad": Case(lambda g, x: g * sigmoid(x), ulps=8),
    "hard_sigmoid_grad": Case(lambda g, x: g * 0.2 * (np.abs(x) < 2.5), ulps=2),
    "hard_swish_grad": Case(
        lambda g, x: g * (hard_sigmoid(x) + 0.2 * x * (np.abs(x) < 2.5)), ulps=4, terms=lambda g, x: np.abs(g)
    ),
    "leaky_relu_grad": Case(lambda g, x: g * np.where(x > 0, 1, SLOPE), (SLOPE,), ulps=1),
    "elu_grad": Case(lambda g, x: g * np.where(x > 0, 1, ALPHA * np.exp(np.minimum(x, 0))), (ALPHA,), ulps=6),
    "clamp_grad": Case(lambda g, x: g * ((x >= LOW) & (x <= HIGH)), (LOW, HIGH)),
    "relu_grad": Case(lambda g, y: g * (y > 0)),
    "sqrt_grad": Case(lambda g, y: g / (2 * y), ulps=4, positive=True),
    "where_grad_a": Case(lambda g, c: np.where(c != 0, g, 0)),
    "where_grad_b": Case(lambda g, c: np.where(c != 0, 0, g)),
}

TERNARY = {
    "where": Case(lambda c, a, b: np.where(c != 0, a, b)),
    "prelu_grad": Case(lambda g, x, slope: np.where(x > 0, g, slope * g)),
    "div_grad": Case(lambda g, a, b: -g * a / (b * b), ulps=8),
    "maximum_grad_a": Case(lambda g, a, b: np.where(a >= b, g, 0)),
    "maximum_grad_b": Case(lambda g, a, b: np.where(a >= b, 0, g)),
    "minimum_grad_a": Case(lambda g, a, b: np.where(a <= b, g, 0)),
    "minimum_grad_b": Case(lambda g, a, b: np.where(a <= b, 0, g)),
}

CASES = UNARY | BINARY | TERNARY
#: Functions whose every step is exact or rounded once; the others may be 2 ulp off in a 16-bit type.
EXACT = {name for name, case in CASES.items() if case.ulps <= 0.5}
#: Combinations of operand and result types. Which function runs does not depend on them, so everyday's run meets
#: every function in two of them, and the others on a few functions.
SLOW = [pytest.mark.slow]
TYPES = [
    pytest.param(("float32", "float32", "float32", "float32"), id="f32"),
    pytest.param(("float16", "float16", "float16", "float16"), id="f16"),
    pytest.param(("bfloat16", "bfloat16", "bfloat16", "bfloat16"), id="bf16", marks=SLOW),
]
SPECIAL_DTYPES = ["float32", "float16", pytest.param("bfloat16", marks=SLOW)]


def test_every_function_is_checked() -> None:
    assert set(CASES) == set(OPS)


def check(queue: cl.CommandQueue, op: str, arrays: list[Array], dtypes: tuple[str, ...], out_dtype: str) -> None:
    """op on arrays stored in dtypes against the reference on what was stored."""
    case = CASES[op]
    stored = [quantize(a, t).astype(np.float64) for a, t in zip(arrays, dtypes, strict=False)]
    tensors = [to_device(queue, a, t) for a, t in zip(arrays, dtypes, strict=False)]
    result = elementwise(op, out_dtype, *tensors, parameters=case.parameters)
    assert result.dtype == out_dtype
    with np.errstate(all="ignore"):
        expected = np.asarray(case.reference(*stored), np.float64)
        # fp32 subnormals on the way may be flushed; CL_FP_DENORM says so, OpenCL allows it.
        slack = np.full(expected.shape, 1.2e-38)
        if case.ulps > 0.5:
            size = np.abs(case.terms(*stored)) if case.terms else np.abs(expected)
            amplification = case.amplified(stored[-1]) if case.amplified else 0.0
            slack = slack + np.nan_to_num(size * (case.ulps + 6 * amplification) * 2.0**-24, posinf=0.0)
    half_ulps = 1.0 if op in EXACT else 2.0
    assert_close(result, expected, ulps=0.5 if out_dtype == "float32" else half_ulps, slack=slack)


def samples(op: str, count: int, shape: tuple[int, ...], seed: int = 0) -> list[Array]:
    rng = np.random.default_rng([seed, len(op), count])
    arrays = [rng.standard_normal(shape) * 3 for _ in range(count)]
    if CASES[op].positive:
        arrays[-1] = np.abs(arrays[-1]) + 0.01
    if op.startswith("where"):
        arrays[0 if op == "where" else -1] = (rng.random(shape) < 0.5).astype(float)
    return arrays


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("op", sorted(CASES))
def test_function(queue: cl.CommandQueue, op: str, types: tuple[str, ...]) -> None:
    count = OPS[op][0]
    check(queue, op, samples(op, count, (67,)), types[:count], types[3])


@pytest.mark.parametrize("last", STORAGE_DTYPES)
@pytest.mark.parametrize("first", STORAGE_DTYPES)
@pytest.mark.parametrize("op", ["relu", "sub", "where"])
def test_mixed_types(queue: cl.CommandQueue, op: str, first: str, last: str) -> None:
    count = OPS[op][0]
    check(queue, op, samples(op, count, (35,)), (first, last, first)[:count], last)


@pytest.mark.parametrize("types", [("float16", "float32", "float16"), ("bfloat16",) * 3], ids="+".join)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 32, 63, 1009, 4097])
@pytest.mark.parametrize("op", ["relu", "mul", "where"])
def test_sizes(queue: cl.CommandQueue, op: str, size: int, types: tuple[str, ...]) -> None:
    count = OPS[op][0]
    check(queue, op, samples(op, count, (size,)), types[:count], types[0])


@pytest.mark.unsimulated
def test_products_of_all_bfloat16_are_rounded_to_nearest_even(queue: cl.CommandQueue) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = (x * np.float32(0.71)).astype(ml_dtypes.bfloat16).astype(np.float32)
    actual = to_numpy(elementwise("mul", "bfloat16", to_device(queue, x, "bfloat16"), 0.71))
    kept = ~(np.abs(expected) < 2.0**-126)  # devices may flush subnormal numbers
    np.testing.assert_array_equal(actual[kept], expected[kept])


def test_a_nan_of_all_bits_stays_one(queue: cl.CommandQueue) -> None:
    nan = float(np.array(0x7FFFFFFF, np.uint32).view(np.float32))  # rounded as a number, it would be -0
    assert np.isnan(to_numpy(elementwise("add", "bfloat16", to_device(queue, np.ones(48), "bfloat16"), nan))).all()


@pytest.mark.parametrize("dtype", SPECIAL_DTYPES)
@pytest.mark.parametrize("op", sorted(set(UNARY) - {"gelu_tanh", "gelu_erf", "swish", "hard_swish"}))
def test_special_values_of_one_operand(queue: cl.CommandQueue, op: str, dtype: str) -> None:
    check(queue, op, [SPECIAL], (dtype,), dtype)


@pytest.mark.parametrize("dtype", SPECIAL_DTYPES)
@pytest.mark.parametrize("op", ["gelu_tanh", "gelu_erf", "swish", "hard_swish"])
def test_special_values_of_products(queue: cl.CommandQueue, op: str, dtype: str) -> None:
    check(queue, op, [SPECIAL[~np.isneginf(SPECIAL)]], (dtype,), dtype)  # -inf * 0 is nan in numpy's formula
    (limit,) = to_numpy(elementwise(op, dtype, to_device(queue, [-np.inf], dtype)))
    assert np.isnan(limit)


@pytest.mark.parametrize("dtype", SPECIAL_DTYPES)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "maximum", "minimum", "lt", "le", "gt", "ge", "add_relu"])
def test_special_values_of_two_operands(queue: cl.CommandQueue, op: str, dtype: str) -> None:
    a, b = np.meshgrid(SPECIAL, SPECIAL)
    check(queue, op, [a, b], (dtype, dtype), dtype)


def test_signed_zeros(queue: cl.CommandQueue) -> None:
    zeros = to_device(queue, [0.0, -0.0])
    assert np.signbit(to_numpy(elementwise("neg", "float16", zeros))).tolist() == [True, False]
    assert np.signbit(to_numpy(elementwise("mul", "bfloat16", zeros, -1.0))).tolist() == [True, False]
    assert np.signbit(to_numpy(elementwise("sqrt", "float32", zeros))).tolist() == [False, True]


# --------------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("op", ["sigmoid", "softplus", "swish", "gelu_tanh", "gelu_erf", "tanh", "elu"])
def test_tails_keep_their_relative_accuracy(queue: cl.CommandQueue, op: str) -> None:
    edge = {"gelu_tanh": 5.0, "gelu_erf": 9.0}.get(op, 80.0)
    check(queue, op, [np.linspace(-edge, edge, 97)], ("float32",), "float32")


@pytest.mark.parametrize("op", ["sigmoid_grad", "tanh_grad", "softplus_grad", "swish_grad", "gelu_tanh_grad"])
def test_gradients_do_not_cancel_in_the_tails(queue: cl.CommandQueue, op: str) -> None:
    edge = 5.0 if op.startswith("gelu") else 40.0
    x = np.linspace(-edge, edge, 97)
    check(queue, op, [np.ones(97), x], ("float32", "float32"), "float32")


@pytest.mark.parametrize("op", ["gelu_tanh_grad", "gelu_erf_grad", "swish_grad"])
def test_gradients_have_their_limits_at_infinity(queue: cl.CommandQueue, op: str) -> None:
    x = to_device(queue, [np.inf, -np.inf, 1e30, -1e30, np.nan])
    result = to_numpy(elementwise(op, "float32", to_device(queue, np.ones(5)), x))
    np.testing.assert_array_equal(result, [1, 0, 1, 0, np.nan])


def test_log1p_of_tiny_numbers_is_not_zero(queue: cl.CommandQueue) -> None:
    check(queue, "log1p", [np.array([1e-10, -1e-10, 1e-5, -0.999, 3e38])], ("float32",), "float32")


def test_gradients_at_the_edges(queue: cl.CommandQueue) -> None:
    def grad(op: str, g: float, x: float, *parameters: float) -> float:
        tensors = to_device(queue, [g]), to_device(queue, [x])
        return float(to_numpy(elementwise(op, "float32", *tensors, parameters=parameters))[0])

    assert grad("abs_grad", 3.0, 0.0) == 0.0
    assert grad("sqrt_grad", 1.0, 0.0) == np.inf
    assert grad("relu_grad", np.inf, 0.0) == 0.0  # does not pass, so not inf * 0
    assert grad("pow_grad", 1.0, 0.0, 0.0) == 0.0
    assert grad("pow_grad", 1.0, 0.0, 1.0) == 1.0
    assert grad("clamp_grad", 1.0, 2.0, -1.0, 2.0) == 1.0
    assert grad("hard_sigmoid_grad", 1.0, 2.5) == 0.0
    assert grad("square_grad", 2.0**-8, 2.0**127) == 2.0**120  # twice the number is not finite
    assert grad("pow_grad", 2.0**-8, 2.0**127, 2.0) == 2.0**120


# -------------------------------------------------------------------------------------------- broadcasting

SHAPES = [
    ((5, 33), (33,)),  # bias on rows
    ((33,), (5, 33)),
    ((5, 33), (5, 1)),  # column
    ((5, 33), (1,)),
    ((1,), (1, 1)),
    ((2, 3, 35), (3, 1)),  # channels
    ((7, 3), (3,)),  # rows shorter than a block
    ((4, 1), (1, 5)),
    ((2, 1, 3, 1, 20), (4, 1, 5, 1)),
    ((2, 1, 3, 1, 2, 1), (1, 3, 1, 2, 1, 3)),
    ((2, 1, 2, 1, 2, 1, 2, 1), (1, 3, 1, 3, 1, 3, 1, 3)),
    ((0, 4), (4,)),
    ((3, 1), (3, 0)),
]


@pytest.mark.parametrize("types", [("float32", "float32", "float32"), ("float16", "bfloat16", "float16")])
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_broadcasting(
    queue: cl.CommandQueue, a: tuple[int, ...], b: tuple[int, ...], types: tuple[str, str, str]
) -> None:
    rng = np.random.default_rng(3)
    check(queue, "sub", [rng.standard_normal(a), rng.standard_normal(b)], types[:2], types[2])


def test_many_rows_cross_work_items(queue: cl.CommandQueue) -> None:
    rng = np.random.default_rng(5)
    for a, b in (((211, 7), (7,)), ((43, 33), (43, 1)), ((3, 5, 100), (5, 1))):
        check(queue, "add", [rng.standard_normal(a), rng.standard_normal(b)], ("float16", "float32"), "float32")


@pytest.mark.simulated_elsewhere
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shapes_that_broadcast(queue: cl.CommandQueue, data: st.DataObject) -> None:
    whole = data.draw(st.lists(st.sampled_from([1, 2, 3, 17]), min_size=1, max_size=6), label="whole")
    while math.prod(whole) > 2000:
        whole.pop()
    shapes = []
    for name in "abc":
        keep = data.draw(st.lists(st.booleans(), min_size=len(whole), max_size=len(whole)), label=f"{name} keeps")
        shape = [extent if k else 1 for extent, k in zip(whole, keep, strict=True)]
        shapes.append(tuple(shape[data.draw(st.integers(0, len(whole) - 1), label=f"{name} from") :]))
    rng = np.random.default_rng(len(whole))
    arrays = [rng.integers(0, 2, shapes[0]).astype(float), *(rng.standard_normal(shape) for shape in shapes[1:])]
    check(queue, "where", arrays, ("float32", "float16", "float32"), "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_on_either_side(queue: cl.CommandQueue, dtype: str) -> None:
    values = np.array([0.5, -2.0, 3.0] * 12)
    x = to_device(queue, values, dtype)
    assert_close(elementwise("sub", dtype, x, 2.0), values - 2)
    assert_close(elementwise("sub", dtype, 2.0, x), 2 - values)
    assert_close(elementwise("div", dtype, 1.0, x), 1 / values)
    assert_close(elementwise("lt", dtype, 0.0, x), values > 0)
    assert_close(elementwise("add", dtype, x, 1e300), np.full(36, np.inf))
    assert_close(elementwise("where", dtype, x, -1.0, 7.0), np.full(36, -1.0))


def test_a_new_number_compiles_nothing(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    x = to_device(queue, np.ones(4))
    elementwise("mul", "float32", x, 0.125)
    elementwise("clamp", "float32", x, parameters=(-1.0, 0.5))
    monkeypatch.setattr(module.Kernel, "on", lambda *args, **macros: pytest.fail("asked for another kernel"))
    assert to_numpy(elementwise("mul", "float32", x, 0.375))[0] == 0.375
    assert to_numpy(elementwise("clamp", "float32", x, parameters=(-1.0, 0.25)))[0] == 0.25


def test_a_condition_of_integers(queue: cl.CommandQueue) -> None:
    condition = module.Tensor.from_host(queue, np.array([1, 0, -7, 0] * 5, np.int32), dtype="int32")
    a, b = to_device(queue, np.ones(20), "float16"), to_device(queue, np.zeros(20))
    assert to_numpy(elementwise("where", "float32", condition, a, b)).tolist() == [1, 0, 1, 0] * 5


# ------------------------------------------------------------------------------------------------- dropout


def philox(seed: int, n: int) -> Array:
    """The random words of elements 0 .. n-1: Philox4x32-10 on counters 0, 1, ..., laid out as the kernel says."""
    mask = np.uint64(0xFFFFFFFF)
    counters = np.arange(-(-n // 64) * 16, dtype=np.uint64)
    c = [counters & mask, counters >> np.uint64(32), np.zeros_like(counters), np.zeros_like(counters)]
    keys = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        k0, k1 = np.uint64(keys[0]), np.uint64(keys[1])
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k0, p1 & mask, (p0 >> np.uint64(32)) ^ c[3] ^ k1, p0 & mask]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    words = np.stack(c).reshape(4, -1, 16)  # word, block, lane
    return words.transpose(1, 0, 2).reshape(-1)[:n]


def test_the_reference_is_philox() -> None:
    # The known answer of Random123 for counter 0 and key 0: the first lane of each word.
    assert [hex(int(word)) for word in philox(0, 64)[::16]] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize("size", [1, 63, 64, 1009])
def test_dropout_keeps_what_philox_says(queue: cl.CommandQueue, dtype: str, size: int) -> None:
    seed, p = 0x123456789ABCDEF, 0.3
    values = np.random.default_rng(0).standard_normal(size)
    kept = philox(seed, size) >= round(p * 2**32)
    expected = np.where(kept, quantize(values, dtype).astype(np.float64) / (1 - p), 0)
    assert_close(dropout(to_device(queue, values, dtype), p, seed, dtype), expected)


def test_dropped_infinities_are_zero(queue: cl.CommandQueue) -> None:
    result = to_numpy(dropout(to_device(queue, np.full(256, np.inf), "float16"), 0.5, 1, "float16"))
    assert set(result) == {0.0, np.inf}
