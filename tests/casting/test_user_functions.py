"""Decorators and registration: which dtypes a user's function sees."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd.engine import apply_op
from netcl.ops import elementwise as netcl_elementwise
from netcl.optim import SGD

from clamp import amp, bridge
from clamp.bridge import Node, Parameter, Tensor
from clamp.casting.policies import POLICIES
from clamp.casting.policy_table import CastPolicy
from clamp.casting.registry import OWNED
from tests.reference import to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")


def dtypes(*xs: Any, **named: Any) -> list[str]:
    return [x.value.dtype for x in (*xs, *named.values())]


half, full = amp.half_function(dtypes), amp.float_function(dtypes)
promoted = amp.promote_function(dtypes)
half_of = amp.half_function(lambda x: x)


def test_every_policy_has_a_meaning() -> None:
    assert set(POLICIES) == set(CastPolicy)


def test_decorated_before_init_and_inert_without_it(queue: cl.CommandQueue) -> None:
    wide = ag.tensor(to_device(queue, np.ones(3)))
    narrow = ag.tensor(to_device(queue, np.ones(3), "float16"))
    assert half(wide, narrow) == ["float32", "float16"]
    with amp.init():
        assert half(wide, other=narrow) == ["float16", "float16"]
        assert full(wide, narrow) == ["float32", "float32"]
        assert promoted(wide, narrow) == ["float32", "float32"]
        assert promoted(narrow, narrow) == ["float16", "float16"]
        with amp.autocast(enabled=False):
            assert half(wide) == ["float32"]
    assert half(wide) == ["float32"]


def test_what_is_never_cast(queue: cl.CommandQueue) -> None:
    @amp.half_function
    def seen(*xs: Any, **named: Any) -> tuple[Any, Any]:
        return xs, named

    tensor = to_device(queue, np.ones(3))
    array, integer = np.ones(3), bridge.Tensor.from_host(queue, np.ones(3, np.int32), dtype="int32")
    double = bridge.Tensor.from_host(queue, np.ones(3), dtype="float64")
    with amp.init():
        (got_array, got_integer, got_double, number), named = seen(array, integer, double, 2.5, out=tensor)
        assert got_array is array
        assert got_integer is integer
        assert got_double is double
        assert number == 2.5
        assert named["out"] is tensor


def test_gradients_flow_through_the_casts(queue: cl.CommandQueue) -> None:
    weight = Parameter.from_host(queue, np.full((2, 2), 3.0, np.float32))

    @amp.half_function
    def double(x: Node) -> Node:
        assert x.value.dtype == "float16"
        return ag.add(x, x)

    with amp.init():
        ag.sum(double(ag.tensor(weight, requires_grad=True))).backward()
    assert weight.grad.dtype == "float32"
    np.testing.assert_array_equal(weight.grad.to_host(), np.full((2, 2), 2.0))


def test_nested_calls_cast_nothing_more(queue: cl.CommandQueue) -> None:
    @amp.float_function
    def inner(x: Node) -> Node:
        return ag.matmul_op(x, x)

    x = ag.tensor(to_device(queue, np.eye(4), "float16"))
    with amp.init():
        assert inner(x).value.dtype == "float32", "a half op inside a float function stays in fp32"


def test_registered_functions(queue: cl.CommandQueue) -> None:
    module = types.ModuleType("backend_of_a_user")
    module.fru, module.loss = dtypes, lambda x: dtypes(x)  # type: ignore[attr-defined]

    class Layer:
        def forward(self, x: Any) -> list[str]:
            return dtypes(x)

    amp.register_half_function(module, "fru")
    amp.register_float_function(module, "loss")
    amp.register_promote_function(Layer, "forward")
    amp.register(Layer, "forward", amp.CastPolicy.LOWER_PRECISION_FP)
    wide = ag.tensor(to_device(queue, np.ones(3)))
    sys.modules["backend_of_a_user"] = module
    try:
        with amp.init():
            assert module.fru(wide) == ["float16"]  # type: ignore[attr-defined]
            assert module.loss(amp.cast(wide, "float16")) == ["float32"]  # type: ignore[attr-defined]
            assert Layer().forward(wide) == ["float16"]
        assert module.fru is dtypes  # type: ignore[attr-defined]
        assert Layer().forward(wide) == ["float32"]
    finally:
        del sys.modules["backend_of_a_user"]


@pytest.mark.parametrize(
    ("policy", "given", "told"),
    [
        ("FLOAT_SET_DTYPE", {}, ["float32", "float32", "none"]),
        ("FLOAT_SET_DTYPE", {"dtype": None}, ["float32", "float32", None]),
        ("FLOAT_SET_DTYPE", {"dtype": "bfloat16"}, ["float32", "float16", "bfloat16"]),
        ("FLOAT_APPEND_DTYPE", {}, ["float32", "float16", "float32"]),
        ("FLOAT_APPEND_DTYPE", {"dtype": "bfloat16"}, ["float32", "float16", "bfloat16"]),
    ],
)
def test_a_dtype_that_the_caller_passes_stays(
    queue: cl.CommandQueue, policy: str, given: dict[str, Any], told: list[str]
) -> None:
    module: Any = types.ModuleType("backend_of_a_user")
    module.total = lambda x, y, dtype="none": [x.value.dtype, y.value.dtype, dtype]
    amp.register(module, "total", amp.CastPolicy[policy])
    x = ag.tensor(to_device(queue, np.ones(3)))
    y = ag.tensor(to_device(queue, np.ones(3), "float16"))
    with amp.init():
        assert module.total(x, y, **given) == told


def test_a_function_on_no_list_calls_functions_in_half(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that a list keeps in fp32 are so throughout: of a newer netcl's layer nobody has said that."""
    module = types.ModuleType("netcl.newer")
    exec("from netcl import autograd as ag\ndef block(x):\n    return ag.matmul_op(x, x)", vars(module))
    monkeypatch.setitem(sys.modules, "netcl.newer", module)
    x = ag.tensor(to_device(queue, np.eye(4)))
    with amp.init():
        assert hasattr(module.block, "__wrapped__")
        assert module.block(x).value.dtype == "float16"


def test_registration_wins_over_the_lists(queue: cl.CommandQueue) -> None:
    x = ag.tensor(to_device(queue, np.eye(4)))
    amp.register_float_function(ag, "matmul_op")
    with amp.init():
        assert ag.matmul_op(x, x).value.dtype == "float32"


def test_custom_lists_and_levels(queue: cl.CommandQueue) -> None:
    x = ag.tensor(to_device(queue, np.eye(4)))
    with amp.init(custom_white_list=["softmax"], custom_black_list=["matmul_op"]):
        assert ag.softmax(x).value.dtype == "float16"
        assert ag.matmul_op(x, x).value.dtype == "float32"
    with amp.init(level="OD"):
        product = ag.matmul_op(x, x)
        assert product.value.dtype == "float16"
        assert ag.relu(product).value.dtype == "float32"
    with amp.init(level="O2"):
        assert ag.add(x, x).value.dtype == "float16"
        assert ag.softmax(x).value.dtype == "float32"
    with amp.init(level="O0") as handle:
        assert ag.matmul_op(x, x).value.dtype == "float32"
        weight = Parameter.from_host(queue, np.ones((4, 4), np.float32))
        narrow = amp.cast(x, "float16")
        assert [f(narrow).value.dtype for f in (ag.softmax, ag.relu, half_of)] == ["float32"] * 3
        optimizer = SGD([weight])
        loss = ag.sum(ag.matmul_op(x, ag.tensor(weight, requires_grad=True)))
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        np.testing.assert_array_equal(weight.grad.to_host(), np.ones((4, 4)))


def test_verbose_prints_real_casts_only(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    weight = ag.tensor(Parameter.from_host(queue, np.eye(4, dtype=np.float32)), requires_grad=True)
    with amp.init(verbose=True):
        product = ag.matmul_op(weight, weight)
        ag.matmul_op(product, weight)
        ag.relu(product)
        full(product)
    assert capsys.readouterr().out.splitlines() == ["Float->Half (matmul_op)", "Half->Float (dtypes)"]


def test_the_net_under_ops_nobody_declared(queue: cl.CommandQueue) -> None:
    seen = []

    def cube(x: Node) -> Node:
        def forward(t: Any) -> Any:
            seen.append(t.dtype)
            return bridge.Tensor.from_host(t.queue, t.to_host() ** 3)

        def backward(grad: Any) -> list[Any]:
            seen.append(x.value.dtype)
            return [bridge.Tensor.from_host(grad.queue, grad.to_host() * 3 * x.value.to_host() ** 2)]

        return apply_op(forward, backward, x, op_name="cube")

    weight = Parameter.from_host(queue, np.full(3, 2.0, np.float16), dtype="float16")
    with amp.init():
        out = cube(ag.tensor(weight, requires_grad=True))
        ag.sum(out).backward()
        with ag.no_grad():
            cube(ag.tensor(weight))
    assert seen == ["float32"] * 3
    assert weight.grad.dtype == "float16"
    np.testing.assert_array_equal(to_numpy(weight.grad), [12.0, 12.0, 12.0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_netcl_functions_without_a_kernel_of_clamps_run_in_fp32(
    queue: cl.CommandQueue, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("conv2d", "max_pool2d"):
        monkeypatch.delitem(OWNED, f"netcl.autograd.{name}")
    image = np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8) / 8
    narrow = ag.tensor(to_device(queue, image, dtype))
    kernel = Parameter.from_host(queue, np.ones((1, 1, 3, 3), np.float32))
    expected = sum(image[..., i : i + 6, j : j + 6] for i in range(3) for j in range(3))
    with amp.init():
        out = ag.conv2d(narrow, ag.tensor(kernel, requires_grad=True))
        assert out.value.dtype == "float32"
        np.testing.assert_allclose(out.value.to_host(), expected, rtol=1e-5)
        ag.sum(out).backward()
        pooled = ag.max_pool2d(narrow)
        np.testing.assert_array_equal(pooled.value.to_host(), image[..., 1::2, 1::2])
        with ag.no_grad():
            np.testing.assert_allclose(ag.conv2d(narrow, kernel).to_host(), expected, rtol=1e-5)
    want = sum(image[0, 0, i : i + 6, j : j + 6].sum() for i in range(1) for j in range(1))
    assert kernel.grad.to_host()[0, 0, 0, 0] == pytest.approx(want, rel=1e-5)


def test_several_casts_of_one_parameter_add_up(queue: cl.CommandQueue) -> None:
    weight = Parameter.from_host(queue, np.ones(4, np.float32))
    node = ag.tensor(weight, requires_grad=True)
    with amp.init():
        ag.sum(ag.add(amp.cast(node, "float16"), amp.cast(node, "float16"))).backward()
        np.testing.assert_array_equal(weight.grad.to_host(), np.full(4, 2.0))
        weight.grad = None
        ag.Tape().backward(ag.sum(ag.add(half_of(node), ag.mul(half_of(node), 2.0))))
    np.testing.assert_array_equal(weight.grad.to_host(), np.full(4, 3.0))


def test_bare_16_bit_tensors_in_an_op_nobody_declared(queue: cl.CommandQueue) -> None:
    matrix = to_device(queue, np.full(4, 3.0), "float16")
    seen = []

    def backward(grad: Any) -> list[Any]:
        seen.append(matrix.value.dtype)
        return [bridge.Tensor.from_host(grad.queue, grad.to_host() * matrix.value.to_host())]

    def forward(a: Any, b: Any) -> Any:
        seen.append(b.dtype)
        return bridge.Tensor.from_host(a.queue, a.to_host() * b.to_host())

    weight = Parameter.from_host(queue, np.ones(4, np.float32))
    with amp.init():
        ag.sum(apply_op(forward, backward, ag.tensor(weight, requires_grad=True), matrix)).backward()
    assert seen == ["float32", "float32"]
    assert matrix.dtype == "float16"
    np.testing.assert_array_equal(weight.grad.to_host(), np.full(4, 3.0))


def test_an_inherited_method_can_be_registered(queue: cl.CommandQueue) -> None:
    class Base:
        def forward(self, x: Any) -> list[str]:
            return dtypes(x)

    class Derived(Base):
        pass

    amp.register_half_function(Derived, "forward")
    x = ag.tensor(to_device(queue, np.ones(3)))
    with amp.init():
        assert Derived().forward(x) == ["float16"]
        assert Base().forward(x) == ["float32"]
    assert "forward" not in vars(Derived)


def test_nothing_is_written_to_a_widened_copy(queue: cl.CommandQueue) -> None:
    x, narrow = to_device(queue, np.ones(4), "float16"), to_device(queue, np.zeros(4), "float16")
    wide = to_device(queue, np.zeros(4))
    with amp.init():
        for give in (lambda: netcl_elementwise.relu(x, narrow), lambda: netcl_elementwise.relu(x, out=narrow)):
            with pytest.raises(TypeError, match="16-bit tensor to write to"):
                give()
        netcl_elementwise.relu(x, wide)
    np.testing.assert_array_equal(to_numpy(wide), np.ones(4))
    np.testing.assert_array_equal(to_numpy(narrow), np.zeros(4))


_RETURNED: dict[str, tuple[Any, type[Exception] | None, str]] = {  # of the gradient of two float32 nodes' sum
    "a list": (lambda grad: [grad, grad], None, ""),
    "a tuple with None": (lambda grad: (grad, None), None, ""),
    "None for what is no node": (lambda grad: (grad, grad, None), None, ""),
    "16 bits": (lambda grad: [amp.cast(grad, "float16")] * 2, None, ""),
    "one tensor": (lambda grad: grad, TypeError, "one of type Tensor: return a list, .* each of the 2 nodes"),
    "an array": (lambda grad: grad.to_host(), TypeError, "one of type ndarray: return a list"),
    "nothing": (lambda grad: None, TypeError, "one of type NoneType: return a list"),
    "too few": (lambda grad: [grad], ValueError, "1 gradients for the 2 nodes"),
    "too many": (lambda grad: [grad] * 3, ValueError, "3 gradients for the 2 nodes"),
    "arrays": (lambda grad: [grad.to_host()] * 2, TypeError, r"gradient 0 one of type ndarray: .*from_host\(queue"),
    "nodes": (lambda grad: [grad, ag.tensor(grad)], TypeError, r"gradient 1 one of type Node: .* its \.value"),
    "another shape": (lambda grad: [grad, ag.sum(grad)], ValueError, r"gradient 1 one of shape \(1,\), .* \(2, 3, 5\)"),
    "transposed": (
        lambda grad: [grad, _shaped(grad, (2, 5, 3))],
        ValueError,
        r"1 one of shape \(2, 5, 3\), .* \(2, 3, 5\)",
    ),
    "others joined": (
        lambda grad: [_shaped(grad, (10, 3)), grad],
        ValueError,
        r"0 one of shape \(10, 3\), .* \(2, 3, 5\)",
    ),
    "flat": (lambda grad: [_shaped(grad, (30,)), _shaped(grad, (30, 1))], None, ""),
    "joined": (lambda grad: [_shaped(grad, (6, 5)), _shaped(grad, (1, 2, 15))], None, ""),
    "a dimension more": (lambda grad: [_shaped(grad, (2, 1, 3, 5)), grad], None, ""),
    "float64": (lambda grad: [_double(grad), grad], TypeError, "gradient 0 one of float64, of a float32 node"),
}


def _shaped(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ag.reshape(ag.tensor(grad), shape).value


def _double(grad: Tensor) -> Tensor:
    return Tensor.from_host(grad.queue, grad.to_host().astype(np.float64), dtype="float64")


@pytest.mark.parametrize("returns", _RETURNED)
@pytest.mark.parametrize("custom", [False, True], ids=["plain", "custom_bwd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_backward_that_returns_no_gradients_of_its_nodes_is_named(
    queue: cl.CommandQueue, dtype: str, custom: bool, returns: str
) -> None:
    """netcl gave those that were left out none, read beyond the ends of others, and took what was transposed for what
    is not."""
    function, error, message = _RETURNED[returns]
    params = [Parameter.from_host(queue, np.ones((2, 3, 5), np.float32)) for _ in range(2)]
    handle, optimizer = amp.init(dtype=dtype, loss_scale=8.0 if dtype == "float16" else "auto"), SGD(params)

    def added(x: Node, y: Node) -> Any:
        forward = lambda a, b: netcl_elementwise.elementwise_binary(a, b, expression="ADD(v0, v1)")  # noqa: E731
        return apply_op(forward, amp.custom_bwd(function) if custom else function, x, y, op_name="added")

    loss = ag.sum(added(*(ag.relu(ag.tensor(param)) for param in params)))
    refused = pytest.raises(error, match=f"the backward of added returned .*{message}") if error else nullcontext()
    with refused, handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    assert (params[0].grad is None) == (error is not None)
    for grad in [param.grad for param in params if param.grad is not None]:  # of relu's
        np.testing.assert_array_equal(grad.to_host(), np.ones((2, 3, 5)))
