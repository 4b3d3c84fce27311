"""What a graph keeps from the forward: the values that backward reads, and those of nodes that somebody holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn import batchnorm, groupnorm, layernorm
from netcl.nn.layers import Linear, Sequential
from netcl.ops import attention, norm_rope
from netcl.ops.elementwise import elementwise_binary
from netcl.optim import SGD, RMSProp
from netcl.optim.ema import ModelEMA

from clamp import amp, bridge
from clamp.bridge import Node, Parameter, Tensor
from tests.networks import UsersSGD
from tests.reference import assert_same, to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")

SHAPE = (4, 2, 64, 128)  # more elements than it takes to be looked at
Function = Callable[[Node], Node]


def _rope(x: Node) -> Node:
    return ag.rope(x, Tensor.from_host(x.value.queue, np.arange(SHAPE[2], dtype=np.int32), dtype="int32"))


def _parts(x: Node) -> Node:
    first, second = ag.chunk(x, 2, axis=1)
    return ag.cat([second, first], axis=1)


#: functions whose backward reads nothing of their input, by whether it reads their result
UNREAD: dict[str, tuple[Function, bool]] = {
    "reshape": (lambda x: ag.reshape(x, (8, 64, 128)), False),
    "permute": (lambda x: ag.permute(x, (1, 0, 3, 2)), False),
    "cast": (lambda x: amp.cast(x, "float16"), False),
    "chunk": (_parts, False),
    "add": (lambda x: ag.add(x, 1.5), False),
    "sub": (lambda x: ag.sub(1.5, x), False),
    "relu": (ag.relu, True),
    "softmax": (ag.softmax, True),
    "dropout": (lambda x: ag.dropout(x, 0.25, seed=3), False),
    "rope": (_rope, False),
    "pad2d": (lambda x: ag.pad2d(x, 1), False),
    "avg_pool2d": (lambda x: ag.upsample(ag.avg_pool2d(x, 2, 2), scale_factor=2), False),
    "index_select": (lambda x: ag.index_select(x, 2, list(range(63, -1, -1))), False),
    "where": (lambda x: ag.where(ag.gt(Node(x.value), 0.0), x, 0.5), False),
    "masked_fill": (lambda x: ag.masked_fill(x, ag.gt(Node(x.value), 0.0), 0.5), False),
    "add_relu": (lambda x: ag.add_relu(x, ag.mul(x, 0.5)), True),
}
READ: dict[str, Function] = {
    "tanh": ag.tanh,
    "mul": lambda x: ag.mul(x, ag.mul(x, 0.5)),
    "max_pool2d": lambda x: ag.upsample(ag.max_pool2d(x, 2, 2), scale_factor=2),
}


def _leaf(queue: cl.CommandQueue) -> Node:
    host = np.random.default_rng(5).standard_normal(SHAPE, dtype=np.float32)
    return Node(to_device(queue, host), requires_grad=True)


@pytest.mark.parametrize("name", [*UNREAD, *READ])
def test_values_that_no_backward_reads_go_and_change_no_bit(queue: cl.CommandQueue, name: str) -> None:
    function, reads_result = UNREAD[name] if name in UNREAD else (READ[name], False)
    x, seen = _leaf(queue), list[Any]()

    def noted(node: Node) -> Node:
        seen.append(weakref.ref(node.value))
        return node

    def forward() -> Node:
        made = noted(function(noted(ag.mul(x, 0.75))))
        return ag.mean(ag.mul(ag.add(ag.add(made, 1.0), 1.0), 3.0))

    gradients = []
    with amp.init(dtype="float16", loss_scale=1.0):
        for keep in (False, True):
            seen.clear()
            with ag.Tape(retain_grads=keep) as tape:
                loss = forward()
            x.value.grad = None
            tape.backward(loss)  # as it begins, no function of the forward holds anything
            gone = [reference() is None for reference in seen]
            assert gone == [not keep and name in UNREAD, not keep and not reads_result]
            gradients.append(to_numpy(x.value.grad))
    assert np.abs(gradients[0]).max() > 0
    np.testing.assert_array_equal(*gradients)


@pytest.mark.parametrize("how", ["node", "value", "closure", "buffer", "tensor in its memory", "op"])
def test_what_somebody_holds_keeps_its_value(queue: cl.CommandQueue, how: str) -> None:
    x, kept = _leaf(queue), list[Any]()

    def forward() -> Node:
        made = ag.add(x, 0.5)
        value = made.value
        there = Tensor(value.buffer, value.shape, value.dtype, value.context, value.queue)
        ways = {"value": value, "closure": lambda: made, "buffer": value.buffer, "tensor in its memory": there}
        kept.append(ways.get(how, made))
        apart = made
        if how == "op":
            apart = ag.apply_op(lambda t: bridge.view(t, t.shape), lambda grad: [grad], made)
        return ag.mean(ag.add(ag.add(ag.add(apart, 1.0), 1.0), 1.0))

    with amp.init(dtype="float16", loss_scale=1.0):
        loss = forward()
        loss.backward()
    found = kept[0]() if how == "closure" else kept[0]
    if how == "buffer":
        found = Tensor(found, SHAPE, "float32", queue.context, queue)
    np.testing.assert_array_equal(found.value.to_host(), x.value.to_host() + np.float32(0.5))


def test_who_walks_a_graph_is_told_that_a_value_is_gone(queue: cl.CommandQueue) -> None:
    x = _leaf(queue)
    with amp.init(dtype="float16", loss_scale=1.0):
        loss = ag.mean(ag.add(ag.add(ag.add(x, 1.0), 1.0), 1.0))
        loss.backward()
        node = loss.parents[0].parents[0].parents[0]
        assert (node.value.shape, node.value.dtype) == (SHAPE, "float32")
        with pytest.raises(RuntimeError, match="Keep the node"):
            node.value.to_host()
        with pytest.raises(RuntimeError, match="Keep the node"):
            ag.add(node, 1.0)


def _written_to(
    queue: cl.CommandQueue, function: Callable[[Node, Node], Node], dtypes: tuple[str, str], which: int, write: bool
) -> list[Any]:
    """The gradients of two tensors, of which one was written to between forward and backward, or not."""
    rng = np.random.default_rng(0)
    tensors = [to_device(queue, rng.standard_normal((256, 256)), dtype) for dtype in dtypes]
    tensors[which].requires_grad = False
    tensors[1 - which].requires_grad = True
    out = function(*[ag.tensor(x) for x in tensors])
    if write:
        tensors[which].write(np.ones((256, 256), np.float32))
    out.backward(to_device(queue, np.ones(out.value.shape), out.value.dtype))
    return [None if x.grad is None else to_numpy(x.grad) for x in tensors]


@pytest.mark.parametrize(
    ("function", "dtypes"),
    [
        (ag.matmul_op, ("float32", "float32")),  # whose 16-bit copy is made again
        (ag.matmul_op, ("float16", "float16")),
        (ag.mse_loss, ("float32", "float32")),
        (lambda a, b: ag.mul(ag.relu(a), b), ("float16", "float32")),
        (lambda a, b: ag.info_nce_loss(a, b, 100.0, normalize=False), ("float32", "float32")),
    ],
)
def test_what_backward_reads_must_not_be_written_to(queue: cl.CommandQueue, function: Any, dtypes: Any) -> None:
    """The next batch in the last one's memory, before backward, say."""
    with amp.init(), pytest.raises(RuntimeError, match=r"shape \(256, 256\) was written to between a forward and"):
        _written_to(queue, function, dtypes, 1, write=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, index: ag.embedding(x, index),
        lambda x, index: ag.index_add(ag.tensor(x.value), 0, index, x),
        lambda x, index: ag.cross_entropy_indices(x, index),
        lambda x, index: ag.masked_fill(x, index, -1.0),
        lambda x, index: ag.rope(ag.cat([x, x], axis=1), index),
    ],
)
def test_indices_that_backward_reads_must_not_be_written_to(queue: cl.CommandQueue, function: Any) -> None:
    """A batch of words, or of labels, or its mask."""
    index = Tensor.from_host(queue, np.arange(5, dtype=np.int32), dtype="int32")
    x = to_device(queue, np.random.default_rng(0).standard_normal((5, 5)))
    x.requires_grad = True
    with amp.init():
        out = function(ag.tensor(x), index)
        index.write(np.zeros(5, np.int32))
        with pytest.raises(RuntimeError, match=r"shape \(5,\) was written to"):
            out.backward()


def _like(x: Node, seed: int) -> Tensor:
    return to_device(x.value.queue, np.random.default_rng(seed).standard_normal(x.value.shape))


def _image(x: Node) -> Node:
    return ag.reshape(x, (1, 2, 4, 8))


def _filters(x: Node) -> Tensor:
    return to_device(x.value.queue, np.random.default_rng(1).standard_normal((3, 2, 1, 1)))


def _statistics(size: int, x: Node, value: float = 1.0) -> list[Tensor]:
    return [to_device(x.value.queue, np.full(size, value)) for _ in range(2)]


def _moving(x: Node) -> Any:
    return batchnorm.batch_norm2d(_image(x), *_statistics(2, x), *_statistics(2, x, 0.5), training=True)


def _after(x: Node, function: Callable[..., Any], which: int) -> tuple[Node, Tensor]:
    """A function's result, and what is to be written to: one of what it returned."""
    made = function(x)
    every = made if isinstance(made, tuple) else (made,)
    return every[0], every[which].value if which == 0 else every[which]


#: functions whose gradients read what they have returned, and which of it
READ_AGAIN: dict[str, tuple[Callable[[Node], Any], int]] = {
    "relu": (ag.relu, 0),
    "exp": (ag.exp, 0),
    "sqrt": (lambda x: ag.sqrt(ag.square(x)), 0),
    "softmax": (ag.softmax, 0),
    "add_relu": (lambda x: ag.add_relu(x, _like(x, 1)), 0),
    "linear_relu": (lambda x: ag.linear_relu(x, to_device(x.value.queue, np.ones((8, 8)))), 0),
    "conv2d_relu": (lambda x: ag.conv2d_relu(_image(x), _filters(x)), 0),
    "batch_norm2d, mean": (_moving, 1),
    "batch_norm2d, variance": (_moving, 2),
    "group_norm": (lambda x: groupnorm.group_norm(_image(x), *_statistics(2, x), 2), 1),
    "layer_norm": (lambda x: layernorm.layer_norm(x, *_statistics(8, x)), 2),
    "rms_norm": (lambda x: norm_rope.rms_norm(x, _statistics(8, x)[0]), 1),
    "flash_attention": (lambda x: attention.flash_attention(*[_image(x)] * 3), 1),
}
#: and of which they read nothing
READ_NEVER: dict[str, Function] = {
    **{name: getattr(ag, name) for name in ("sigmoid", "tanh", "gelu", "swish", "leaky_relu", "log", "sum", "square")},
    "matmul": lambda x: ag.matmul_op(x, to_device(x.value.queue, np.ones((8, 8)))),
    "conv2d": lambda x: ag.conv2d(_image(x), _filters(x)),
    "batch_norm2d": lambda x: _moving(x)[0],
    "layer_norm": lambda x: layernorm.layer_norm(x, *_statistics(8, x))[0],
    "dropout": lambda x: ag.dropout(x, 0.5, seed=1),
}


def _gradient_after_writing(queue: cl.CommandQueue, function: Callable[[Node], Any], which: int, write: bool) -> Any:
    x = to_device(queue, np.random.default_rng(0).uniform(0.5, 1.5, (8, 8)))
    x.requires_grad = True
    out, written = _after(ag.tensor(x), function, which)
    grad = to_device(queue, np.random.default_rng(2).standard_normal(out.value.shape), out.value.dtype)
    if write:
        written.write(np.full(written.shape, 0.25, np.float32))
    out.backward(grad)
    return to_numpy(x.grad)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", READ_AGAIN)
def test_a_result_that_backward_reads_must_not_be_written_to(queue: cl.CommandQueue, name: str, dtype: str) -> None:
    with amp.init(dtype=dtype), pytest.raises(RuntimeError, match="was written to between a forward and"):
        _gradient_after_writing(queue, *READ_AGAIN[name], write=True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", READ_NEVER)
def test_a_result_that_no_gradient_reads_may_be_written_to(queue: cl.CommandQueue, name: str, dtype: str) -> None:
    with amp.init(dtype=dtype):
        assert_same(*[_gradient_after_writing(queue, READ_NEVER[name], 0, write) for write in (False, True)])


@pytest.mark.parametrize("function", [ag.add, lambda a, b: ag.mul(b, ag.tanh(ag.mul(a, 0.0)))])
def test_what_no_gradient_reads_may_be_written_to(queue: cl.CommandQueue, function: Any) -> None:
    with amp.init():
        for dtype in ("float16", "float32"):
            kinds = (dtype, dtype)
            assert_same(*[_written_to(queue, function, kinds, 0, write)[1:] for write in (False, True)])


#: what reads a weight of shape (8, 8) in backward
WEIGHED: dict[str, Callable[[Node, Tensor], Node]] = {
    "matmul": lambda x, weight: ag.matmul_op(x, ag.tensor(weight)),
    "mul": lambda x, weight: ag.mul(x, ag.tensor(weight)),
    "view": lambda x, weight: ag.mul(ag.reshape(x, (4, 16)), ag.reshape(ag.tensor(weight), (4, 16))),
    "square": lambda x, weight: ag.add(x, ag.square(ag.tensor(weight))),
    "add": lambda x, weight: ag.add(x, ag.tensor(weight)),
}
#: what moves it
MOVES: dict[str, Callable[[Tensor, Any], None]] = {
    "step": lambda weight, optimizer: optimizer.step(),
    "write": lambda weight, optimizer: weight.write(np.ones((8, 8), np.float32)),
    "step by hand": lambda weight, optimizer: _assign(weight, ag.mul(ag.tensor(weight), 0.5).value),
    "average": lambda weight, optimizer: _average(weight).copy_to_model(),
}


def _average(weight: Tensor) -> ModelEMA:
    average = ModelEMA(None, params=[weight])
    average.shadow[0].write(np.ones((8, 8), np.float32))
    return average


def _assign(weight: Tensor, value: Tensor) -> None:
    elementwise_binary(value, value, expression="MUL(v0, 1.0f)", out=weight)


class DerivedSGD(SGD):
    """One whose rule nobody knows."""


def _gradients_after_moving(
    queue: cl.CommandQueue, function: Callable[..., Node], move: str, level: str = "O1", has_gradient: bool = True,
    optimizer_type: Callable[..., Any] = SGD,
) -> list[Any]:  # fmt: skip
    """The gradients of an input and a weight that has moved between forward and backward, if ``move`` says how."""
    rng = np.random.default_rng(0)
    weight = Parameter.from_host(queue, rng.standard_normal((8, 8)).astype(np.float32))
    model = Sequential(Linear(queue, 8, 8))
    model.layers[0].weight = weight
    optimizer = optimizer_type(model.parameters())
    optimizer.lr = 0.5
    if level == "O2":
        amp.decorate(model, optimizer, level="O2")
    x = to_device(queue, rng.standard_normal((8, 8)))
    x.requires_grad = True
    loss = ag.sum(function(ag.tensor(x), weight))
    if move:
        stepped = optimizer.params[0 if has_gradient else 1]
        stepped.grad = to_device(queue, np.ones(stepped.shape))
        before = to_numpy(weight)
        MOVES[move](weight, optimizer)
        assert (to_numpy(weight) == before).all() != has_gradient
        weight.grad = optimizer.params[0].grad = None
    loss.backward()
    return [to_numpy(x.grad), to_numpy(weight.grad)]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", WEIGHED)
def test_a_weight_that_backward_reads_must_not_move(queue: cl.CommandQueue, name: str, move: str) -> None:
    """Another optimizer's, say, whose step comes between a loss and its backward. PyTorch refuses it, too."""
    with amp.init(dtype="float32"):
        if name == "add":
            assert_same(*[_gradients_after_moving(queue, WEIGHED[name], how) for how in ("", move)])
            return
        with pytest.raises(RuntimeError, match=r"a weight of shape \(\d+, \d+\) was written to between a forward and"):
            _gradients_after_moving(queue, WEIGHED[name], move)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("move", ["step", "write", "average"])
def test_a_weight_may_move_whose_copy_backward_reads(queue: cl.CommandQueue, level: str, move: str) -> None:
    with amp.init(loss_scale=1.0):
        before = _gradients_after_moving(queue, WEIGHED["matmul"], "", level)
        with pytest.raises(RuntimeError, match="a weight") if level == "O2" else nullcontext():
            assert_same(_gradients_after_moving(queue, WEIGHED["matmul"], move, level), before)


@pytest.mark.parametrize("optimizer_type", [SGD, RMSProp, DerivedSGD, UsersSGD])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_weight_that_a_step_leaves_as_it_is_has_not_moved(
    queue: cl.CommandQueue, level: str, optimizer_type: Callable[..., Any]
) -> None:
    """It has no gradient: two losses of one optimizer's, in turns."""
    with amp.init(dtype="float32") if level == "O1" else amp.init(loss_scale=1.0):
        before, after = (
            _gradients_after_moving(queue, WEIGHED["matmul"], move, level, False, optimizer_type)
            for move in ("", "step")
        )
        assert_same(after, before)


@pytest.mark.parametrize("optimizer_type", [SGD, RMSProp, DerivedSGD])
def test_a_step_without_gradients_moves_no_weight(queue: cl.CommandQueue, optimizer_type: Callable[..., Any]) -> None:
    weight = Parameter.from_host(queue, np.ones((8, 8), np.float32))
    x = to_device(queue, np.ones((8, 8)))
    x.requires_grad = True
    with amp.init(dtype="float32"):
        loss = ag.sum(ag.matmul_op(ag.tensor(x), ag.tensor(weight)))
        optimizer_type([weight]).step()
        loss.backward()
    assert to_numpy(x.grad).tolist() == np.full((8, 8), 8.0).tolist()
