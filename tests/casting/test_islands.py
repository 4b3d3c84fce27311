"""Where nothing is cast, what netcl gets wrong is clamp's all the same: right values and gradients, in float32."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.ops import elementwise as tensor_ops
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node, Parameter, Tensor
from clamp.casting.policy_table import default_table, netcl_defects
from clamp.casting.registry import OWNED
from tests.conformance import ops
from tests.conformance.runner import (
    arrange,
    error_of,
    filled,
    forward_slack,
    gradient_slack,
    inputs_of,
    netcl_function,
    nodes_of,
    outputs,
    reference,
    reference_gradient,
    run_backward,
    tolerance,
)
from tests.conformance.table import Case, Op
from tests.reference import quantize, to_device
from tests.sweep import sweep

Call = Callable[[], Any]


def _without_casts(call: Call, handle: amp.AmpHandle) -> Any:
    with handle.disable_casts():
        return call()


def _autocast_off(call: Call, handle: amp.AmpHandle) -> Any:
    with amp.autocast(enabled=False):
        return call()


#: ways to keep a stretch of code in float32
ISLANDS: dict[str, Callable[[Call, amp.AmpHandle], Any]] = {
    "float_function": lambda call, handle: amp.float_function(lambda: call())(),
    "promote_function": lambda call, handle: amp.promote_function(lambda: call())(),
    "custom_fwd": lambda call, handle: amp.custom_fwd(lambda: call(), cast_inputs="float32")(),
    "autocast_off": _autocast_off,
    "disable_casts": _without_casts,
    "decorated": lambda call, handle: amp.autocast(enabled=False)(call)(),
    "nested": lambda call, handle: amp.float_function(lambda: _without_casts(call, handle))(),
}


def is_netcls(op: Op, case: Case) -> bool:
    """Returns whether netcl's own function takes a case: its convolutions no pairs, its permute no five dimensions."""
    pairs = [name for name in ("stride", "pad", "dilation") if isinstance(case.kwargs.get(name), tuple)]
    is_long = op.name == "netcl.autograd.permute" and len(case.args[1]) > 4
    return not (is_long or (pairs and op.name.startswith("netcl.autograd.conv")))


SHORT = list(ISLANDS)
#: All of the table: in an island every function is right, whoever's it is. The cases take the islands in turn; what
#: netcl gets wrong is tried every day, and once in every island by the sweep.
CALLS = [
    pytest.param(op, case, island, id=f"{op.name.removeprefix('netcl.')}-{index}-{island}",
                 marks=[pytest.mark.slow] * (island != SHORT[(number + index) % len(SHORT)] or
                                             (index > 0 and op.name not in netcl_defects())))
    for number, op in enumerate(ops.TABLE)
    for index, case in enumerate(op.cases)
    if is_netcls(op, case)
    for island in ISLANDS
    if island == SHORT[(number + index) % len(SHORT)] or (index == 0 and op.name in netcl_defects())
]  # fmt: skip
#: netcl's own may be coarser than what clamp promises of its kernels: so much of each element, and of the largest
_COARSE = (3e-4, 3e-5)


def test_every_function_that_is_wrong_is_clamps_and_listed() -> None:
    table = default_table()
    assert [name for name in netcl_defects() if name not in OWNED or name not in table] == []


def netcls_own(op: Op, want: Any) -> Any:
    """What netcl's own functions, where they stay, may be off."""
    if op.name in netcl_defects():
        return 0.0
    return _COARSE[0] * np.abs(want) + _COARSE[1] * np.abs(want).max(initial=1.0)


@pytest.mark.parametrize(("op", "case", "island"), CALLS)
def test_every_function_is_right_in_a_float32_island(
    queue: cl.CommandQueue, handle: amp.AmpHandle, op: Op, case: Case, island: str
) -> None:
    arrangement = arrange(op, case, "float32", "float32")
    for which, want in enumerate(reference(op, case, "float32", "float32")):
        nodes = nodes_of(queue, case, arrangement)
        args, kwargs = filled(case, nodes)
        out = outputs(ISLANDS[island](lambda: netcl_function(op.name)(*args, **kwargs), handle))[which]  # noqa: B023
        slack = forward_slack(op, case, arrangement, want) + netcls_own(op, want)
        error = error_of(out.value, want, slack, tolerance("float32", 1, op.ulps32))
        assert out.value.dtype in ("float32", "int32")
        assert error.passes, error
        if not op.differentiable:
            return
        run_backward(out, "float32")
        for index, (one, node) in enumerate(zip(inputs_of(case), nodes, strict=True)):
            if isinstance(node, Node) and one.grad:
                want_grad = reference_gradient(op, case, "float32", "float32", which, index, "float32")
                slack = gradient_slack(op, want_grad) + netcls_own(op, want_grad.value)
                allowed = tolerance("float32", 1, op.grad_ulps32)
                error = error_of(node.grad, want_grad.value, slack, allowed, want_grad.smooth)
                assert error.passes, f"gradient of input {index}: {error}"


NAN = np.array([[np.nan, 1.0], [2.0, -3.0]])
KEPT: dict[str, Callable[[Node], Any]] = {
    "relu": lambda x: ag.relu(x),
    "relu of a tensor": lambda x: tensor_ops.relu(x.value),
    "add_relu": lambda x: ag.add_relu(x, x),
    "clamp": lambda x: ag.clamp(x, -1.0, 1.0),
    "clip": lambda x: ag.clip(x, -1.0, 1.0),
    "clamp of a tensor": lambda x: tensor_ops.clamp(x.value, -1.0, 1.0),
    "hard_sigmoid": lambda x: ag.hard_sigmoid(x),
    "hard_tanh": ag.hard_tanh,
    "maximum": lambda x: ag.maximum(x, 0.0),
    "minimum": lambda x: ag.minimum(x, 0.0),
    "linear_relu": lambda x: ag.linear_relu(x, x, ag.sum(x, axis=0)),
    "max_pool2d": lambda x: ag.max_pool2d(ag.reshape(x, (1, 1, 2, 2))),
    "flash_attention": lambda x: ag.flash_attention(*[ag.reshape(x, (1, 1, 2, 2))] * 3),
}


@pytest.mark.parametrize("what", KEPT)
def test_nan_comes_through(queue: cl.CommandQueue, handle: amp.AmpHandle, what: str) -> None:
    island = ISLANDS[SHORT[list(KEPT).index(what) % len(SHORT)]]
    x = ag.tensor(to_device(queue, NAN), requires_grad=True)
    assert np.isnan(island(lambda: KEPT[what](x), handle).value.to_host()).any()


ZEROED: dict[str, Callable[[Node], Node]] = {
    "sum": lambda x: ag.sum(x, axis=1),
    "mean": lambda x: ag.mean(x, axis=1),
    "maximum": lambda x: ag.maximum(x, ag.tensor(to_device(x.value.queue, np.zeros((4, 2, 3))))),
    "where": lambda x: ag.where(to_device(x.value.queue, np.ones((4, 2, 3))), x, 0.0),
}


@pytest.mark.parametrize("what", ZEROED)
def test_gradients_hold_nothing_of_what_was_in_memory(queue: cl.CommandQueue, handle: amp.AmpHandle, what: str) -> None:
    island = ISLANDS[SHORT[list(ZEROED).index(what) % len(SHORT)]]
    x = ag.tensor(Parameter.from_host(queue, np.ones((2, 3), np.float32)), requires_grad=True)
    out = island(lambda: ag.sum(ZEROED[what](x)), handle)
    shapes = [(2, 3), (2, 1), (4, 2, 3), (1,)] * 16
    junk = [Tensor.from_shape(queue, shape, fill=float("nan")) for shape in shapes]
    del junk
    out.backward()
    assert np.isfinite(x.value.grad.to_host()).all()


def test_indices_that_do_not_exist_read_and_write_nothing(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    table = ag.tensor(to_device(queue, [[1.0], [2.0]]))
    beyond = Tensor.from_host(queue, np.array([1, 7], np.int32), dtype="int32")
    with handle.disable_casts():
        for rows in (ag.index_select(table, 0, beyond), ag.embedding(table, beyond)):
            np.testing.assert_array_equal(rows.value.to_host().ravel(), [2.0, np.nan])
        added = ag.index_add(table, 0, beyond, ag.tensor(to_device(queue, [[10.0], [20.0]])))
    assert added.value.to_host().ravel().tolist() == [1.0, 12.0]


def test_calls_that_make_no_sense_raise(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    x = ag.tensor(to_device(queue, np.ones((1, 1, 2, 2))))
    with amp.autocast(enabled=False):
        for call, message in (
            (lambda: ag.max_pool2d(x, kernel_size=3, stride=3), "window"),
            (lambda: ag.avg_pool2d(x, kernel_size=3, stride=3), "window"),
            (lambda: ag.pad2d(x, pad=1, mode="circular"), "mode must be"),
            (lambda: ag.pad2d(x, pad=3, mode="reflect"), "mirrored border"),
        ):
            with pytest.raises(ValueError, match=message):
                call()


@pytest.mark.parametrize("island", sweep(list(ISLANDS)))
def test_what_netcl_gets_right_stays_netcls_own(queue: cl.CommandQueue, handle: amp.AmpHandle, island: str) -> None:
    """Nothing to pay for where nothing is cast: neither kernels to build nor clamp's way to them."""
    x = ag.tensor(to_device(queue, np.ones((3, 4))))
    right = {
        "matmul_op": lambda: ag.matmul_op(x, ag.permute(x, (1, 0))),
        "mul": lambda: ag.mul(x, x),
        "exp": lambda: ag.exp(x),
        "reshape": lambda: ag.reshape(x, (4, 3)),
    }
    for name, call in right.items():
        made = ISLANDS[island](call, handle).grad_fn
        assert inspect.getmodule(made).__name__.startswith("netcl."), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loss_of_the_users_in_float32_trains(queue: cl.CommandQueue, dtype: str) -> None:
    """As a user writes one: the last layer's result is 16-bit, the loss is not."""

    @amp.float_function
    def my_loss(pred: Node, target: Node) -> Node:
        return ag.add(F.l1_loss(pred, target), ag.l2_loss(pred, target))

    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((4, 3)), rng.standard_normal((4, 2))
    weight = Parameter.from_host(queue, quantize(rng.standard_normal((3, 2)), dtype).astype(np.float32))
    before = weight.to_host().astype(np.float64)
    optimizer = SGD([weight], lr=1.0)
    with amp.init(dtype=dtype, loss_scale=256.0) as handle:
        pred = ag.matmul_op(ag.tensor(to_device(queue, x)), ag.tensor(weight, requires_grad=True))
        loss = my_loss(pred, ag.tensor(to_device(queue, target)))
        assert (pred.value.dtype, loss.value.dtype) == (dtype, "float32")
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    d = x @ before - target
    want = x.T @ (np.sign(d) + 2 * d)
    np.testing.assert_allclose(weight.grad.to_host(), want, atol=0.02 if dtype == "float16" else 0.2)
    optimizer.step()
    assert np.abs(weight.to_host() - before).max() > 0.1


def test_soft_targets_have_their_gradient_outside_a_region_without_an_init(queue: cl.CommandQueue) -> None:
    """Outside the region, once the patches are there: AMP is off, netcl's defects are."""
    logits = np.array([[1.0, -1.0, 0.5]])
    soft = np.array([[0.2, 0.3, 0.1]])  # does not sum to 1
    with amp.autocast():
        pass
    x = Parameter.from_host(queue, logits.astype(np.float32))
    loss = ag.cross_entropy(ag.tensor(x, requires_grad=True), ag.tensor(to_device(queue, soft)))
    loss.backward()
    p = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(x.grad.to_host(), p * soft.sum() - soft, rtol=1e-5)
    assert ag.matmul_op(ag.tensor(x), ag.permute(ag.tensor(x), (1, 0))).value.dtype == "float32"


def test_the_numpy_backend_hears_no_word_outside_a_region(recwarn: pytest.WarningsRecorder) -> None:
    with amp.autocast():
        pass
    host = Tensor.from_host(None, np.array([[-1.0, 2.0]], np.float32), backend="cpu")
    assert ag.relu(ag.tensor(host)).value.to_host().tolist() == [[0.0, 2.0]]
    assert not recwarn.list
