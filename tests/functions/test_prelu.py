"""PReLU under autograd and as netcl's layer calls it."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.containers import PReLU

from clamp import amp
from clamp.bridge import Tape, Tensor
from clamp.casting.operands import NotOwned
from clamp.casting.policies import Float, Match
from clamp.casting.registry import OWNED
from clamp.functions import prelu as functions
from tests.functions.operands import half, leaf
from tests.reference import STORAGE_DTYPES, assert_close, to_device, to_numpy

RNG = np.random.default_rng(0)
EPS = 2.0**-24


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize("slope_dtype", ["float32", "float16"])
def test_every_policy(queue: cl.CommandQueue, dtype: str, slope_dtype: str) -> None:
    for casting, expected in ((Match(), dtype), (half(), "float16"), (Float(), "float32")):
        x = leaf(queue, RNG.integers(-8, 8, (2, 3, 4, 5)) / 4, dtype)
        slope = leaf(queue, [0.25, -0.5, 0.125], slope_dtype)
        tape = Tape()
        out = functions.prelu(casting, x, slope, tape)
        grad = to_device(queue, RNG.standard_normal(out.value.shape), expected)
        tape.backward(out, grad)
        values, alpha, g = to_numpy(x.value), to_numpy(slope.value).reshape(3, 1, 1), to_numpy(grad)
        assert out.value.dtype == expected
        assert_close(out.value, np.where(values > 0, values, alpha * values))
        assert (x.grad.dtype, slope.grad.dtype) == (dtype, slope_dtype)
        assert_close(x.grad, np.where(values > 0, g, alpha * g))
        terms = np.where(values > 0, 0, g * values)
        slack = 48 * EPS * np.abs(terms).sum((0, 2, 3))
        assert_close(slope.grad, terms.sum((0, 2, 3)), slack=slack)


def test_gradients_only_where_wanted(queue: cl.CommandQueue) -> None:
    for wanted in ((True, False), (False, True), (False, False)):
        x = leaf(queue, -np.ones((2, 3)), requires_grad=wanted[0])
        slope = leaf(queue, [0.5], requires_grad=wanted[1])
        tape = Tape()
        out = functions.prelu(Match(), x, slope, tape)
        if any(wanted):
            tape.backward(out, to_device(queue, np.ones((2, 3))))
        assert (x.grad is not None, slope.grad is not None) == wanted


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_layer_trains_and_infers(queue: cl.CommandQueue, dtype: str) -> None:
    host = RNG.standard_normal((2, 4, 3, 5))
    with amp.init(dtype=dtype, loss_scale=1024.0):
        layer = PReLU(4, queue=queue)
        x = leaf(queue, host)
        tape = Tape()
        ag.set_current_tape(tape)
        out = layer(x)
        loss = ag.sum(out)
        ag.set_current_tape(None)
        tape.backward(loss)
        assert out.value.dtype == dtype
        assert layer.alpha.grad.dtype == "float32"
        rounded = to_numpy(to_device(queue, host, dtype))
        terms = np.minimum(rounded, 0).sum((0, 2, 3))
        np.testing.assert_allclose(to_numpy(layer.alpha.grad), terms, rtol=1e-5)
        with ag.no_grad():
            assert_close(layer(x), np.where(rounded > 0, rounded, 0.25 * rounded))
        assert layer(to_device(queue, host, dtype)).dtype == dtype


def test_tensor_level(queue: cl.CommandQueue) -> None:
    x, slope = to_device(queue, [[-2.0, 4.0]], "float16"), to_device(queue, [0.5])
    out = OWNED["netcl.ops.elementwise.prelu"](Match(), x, slope)
    assert isinstance(out, Tensor)
    assert_close(out, [[-1, 4]])
    dx, dslope = functions.tensor_prelu_backward(Match(), x, slope, to_device(queue, [[1.0, 1.0]], "float16"))
    assert_close(dx, [[0.5, 1]])
    assert_close(dslope, [-2.0])
    with pytest.raises(NotOwned):
        OWNED["netcl.ops.elementwise.prelu"](Match(), x, slope, out=x)


def test_wrong_arguments(queue: cl.CommandQueue) -> None:
    x = leaf(queue, np.ones((2, 3)))
    with pytest.raises(ValueError, match="match channels"):
        functions.prelu(Match(), x, leaf(queue, [1.0, 2.0]))
    integers = Tensor.from_host(queue, np.ones(3, np.int32), dtype="int32")
    for wrong in (0.5, integers):
        with pytest.raises(NotOwned):
            functions.prelu(Match(), x, wrong)
