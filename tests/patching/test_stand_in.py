"""What stands for netcl's functions where casts are off: netcl's own, unless an input is 16-bit."""

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
from clamp.bridge import Node, Parameter, Tensor
from clamp.casting.regions import casting_in
from clamp.patching.stand_in import StandIn
from tests.reference import HALF_DTYPES, to_device, to_numpy

matmul = import_module("netcl.ops.matmul")  # netcl.ops has the function under the same name
Call = Callable[[Any], Any]

CALLS: dict[str, Call] = {
    "a shape": lambda x: ag.reshape(x, (3, 2)),
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
def test_a_call_without_casts_gives_what_netcls_gives(queue: cl.CommandQueue, call: Call) -> None:
    x = ag.tensor(to_device(queue, [[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]]), requires_grad=True)
    alone = call(x)
    with amp.init() as handle, handle.disable_casts():
        out = call(x)
        assert type(out) is Node
        assert (out.op_name, out.value.shape, out.value.dtype) == (alone.op_name, alone.value.shape, "float32")
        np.testing.assert_array_equal(to_numpy(out.value), to_numpy(alone.value))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_16_bit_input_is_found_wherever_it_is_passed(queue: cl.CommandQueue, call: Call, dtype: str) -> None:
    values = np.array([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
    alone = call(ag.tensor(to_device(queue, values)))
    with amp.init() as handle, handle.disable_casts():
        out = call(ag.tensor(to_device(queue, values, dtype)))
        assert out.value.dtype == ("float32" if out.value.size == 1 else dtype), "netcl's function ran; a loss is wide"
        np.testing.assert_allclose(to_numpy(out.value), to_numpy(alone.value), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", *HALF_DTYPES])
def test_no_16_bit_input_goes_past_the_wrapper(queue: cl.CommandQueue, dtype: str) -> None:
    def function(*args: Any, **kwargs: Any) -> str:
        return "passed"

    def wrapper(wrapped: Any, instance: None, args: Any, kwargs: Any) -> str:
        return "wrapped"

    stand_in = StandIn(function, wrapper, passes=True)
    wide, x = to_device(queue, [1.0]), to_device(queue, [1.0], dtype)
    node, param = ag.tensor(x), Parameter.from_host(queue, np.ones(1), "float32" if dtype == "float32" else "float16")
    assert stand_in(wide) == "wrapped", "casts are on"
    with casting_in(None):
        for found in (x, node, param, [wide, x], ([node], 1)):
            assert stand_in(found) == stand_in(wide, 2, found) == ("passed" if dtype == "float32" else "wrapped")
            assert stand_in(wide, out=None, y=found) == ("passed" if dtype == "float32" else "wrapped")


def test_what_writes_into_an_argument_goes_by_the_wrapper(queue: cl.CommandQueue) -> None:
    def function(x: Tensor, axis: int, out: Tensor | None = None, *, more: int = 0) -> str:
        return "passed"

    stand_in = StandIn(function, lambda wrapped, instance, args, kwargs: "wrapped", passes=True)
    x, out = to_device(queue, [1.0]), to_device(queue, [0.0])
    with casting_in(None):
        assert stand_in(x, 1) == stand_in(x, axis=1, out=None) == stand_in(x, 1, more=2) == "passed"
        assert stand_in(x, 1, out) == stand_in(x, 1, out=out) == stand_in(x=x, axis=1, out=out) == "wrapped"


def test_a_keyword_that_netcls_function_does_not_have_is_its_error(queue: cl.CommandQueue) -> None:
    x = to_device(queue, [[1.0]])
    with amp.init() as handle, handle.disable_casts(), pytest.raises(TypeError, match="tape"):
        matmul.matmul(x, x, tape=None)


def test_netcls_look_for_bfloat16_inputs_finds_them_under_amp(queue: cl.CommandQueue) -> None:
    wide, narrow = (ag.tensor(to_device(queue, [1.0, 2.5], dtype)) for dtype in ("float32", "bfloat16"))
    netcls = bf16_ops.upcast_args
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
    assert bf16_ops.upcast_args is netcls
