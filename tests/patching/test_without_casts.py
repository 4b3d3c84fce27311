"""What netcl's functions run where casts are off: netcl's own, unless an input is 16-bit."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd import bf16_ops
from netcl.autograd.engine import Tape

from clamp import amp
from clamp.bridge import Node, Tensor
from tests.reference import HALF_DTYPES, to_device, to_numpy

matmul = import_module("netcl.ops.matmul")  # netcl.ops has the function under the same name
Call = Callable[[Any], Any]

CALLS: dict[str, Call] = {
    "a shape": lambda x: ag.reshape(x, (3, 2)),
    "a list for a shape": lambda x: ag.reshape(x, [6]),
    "a shape by name": lambda x: ag.reshape(x, shape=(6, 1)),
    "no tape": lambda x: ag.unsqueeze(x, 1, tape=None),
    "a tape": lambda x: ag.unsqueeze(x, 1, tape=Tape()),
    "a keyword": lambda x: ag.narrow(x, axis=1, start=1, length=2),
    "a tensor by name": lambda x: ag.add(a=x, b=x),
    "a list": lambda x: ag.stack([x, x], 1),
    "slices": lambda x: ag.getitem(x, (slice(None), 1)),
    "an array": lambda x: ag.contrastive_loss(x, x, np.array([1, 0])),
    "a number": lambda x: ag.pow(x, 2.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_gives_what_netcls_gives_wherever_a_16_bit_input_is_passed(queue: cl.CommandQueue, call: Call) -> None:
    values = [[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]]  # which every type holds
    alone = call(ag.tensor(to_device(queue, values), requires_grad=True))
    for dtype in ("float32", *HALF_DTYPES):
        with amp.init() as handle, handle.disable_casts():
            out = call(ag.tensor(to_device(queue, values, dtype), requires_grad=True))
        assert type(out) is Node
        assert out.value.shape == alone.value.shape
        assert dtype != "float32" or out.op_name == alone.op_name, "it is netcl's own"
        assert out.value.dtype == ("float32" if out.value.size == 1 else dtype), "netcl's function ran; a loss is wide"
        off = 0.0 if dtype == "float32" else 1e-6
        np.testing.assert_allclose(to_numpy(out.value), to_numpy(alone.value), rtol=off)


def test_a_keyword_that_netcls_function_does_not_have_is_its_error(queue: cl.CommandQueue) -> None:
    x = to_device(queue, [[1.0]])
    with amp.init() as handle, handle.disable_casts(), pytest.raises(TypeError, match="tape"):
        matmul.matmul(x, x, tape=None)


def test_netcls_look_for_bfloat16_inputs_finds_them_under_amp(queue: cl.CommandQueue) -> None:
    wide, narrow = (ag.tensor(to_device(queue, [1.0, 2.5], dtype)) for dtype in ("float32", "bfloat16"))
    netcls = bf16_ops.upcast_args.__code__
    with amp.init():
        for args in ((wide, 3.0), (wide, Node(value=None))):
            assert bf16_ops.upcast_args(args, None, None) == (args, None)
        (first, second), gradient = bf16_ops.upcast_args((wide, narrow), None, lambda grad: [grad, narrow.value])
        assert first is wide
        assert second.value.dtype == "float32"
        np.testing.assert_array_equal(to_numpy(second.value), [1.0, 2.5])
        _, shown = gradient(wide.value)  # while it runs, the node shows the copy
        assert isinstance(shown, Tensor)
        assert (shown.dtype, narrow.value.dtype) == ("float32", "bfloat16")
    assert bf16_ops.upcast_args.__code__ is netcls
