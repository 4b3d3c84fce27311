"""Joining and slicing under autograd: numpy's results, and one gradient for all slices of a tensor."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.ops import tensor_ops

from clamp import amp
from clamp.bridge import Node, Tape, Tensor, view
from clamp.casting.policies import Match, Promote
from clamp.cli.bench.timing import counted_launches
from clamp.functions import shape as joining
from clamp.functions import slicing
from clamp.ops.concat import Part
from tests.functions.operands import leaf
from tests.reference import HALF_DTYPES, assert_close, to_device, to_numpy

VALUES = np.random.default_rng(0).standard_normal((4, 6, 5))


# ------------------------------------------------------------------------------------------------- joining


def test_cat_of_eight_is_one_launch_forward_and_one_backward(queue: cl.CommandQueue) -> None:
    parts = [leaf(queue, VALUES[k], "float16") for k in (0, 1, 2, 3, 0, 1, 2, 3)]
    tape = Tape()
    with counted_launches() as launches:
        out = joining.cat(Promote(), parts, 0, tape)
    assert len(launches) == 1
    grad = to_device(queue, np.ones((48, 5)), "float16")
    with counted_launches() as launches:
        tape.backward(out, grad)
    assert len(launches) == 1


def test_integers_are_joined_too(queue: cl.CommandQueue) -> None:
    integers = Tensor.from_host(queue, np.ones((2, 3), np.int32), dtype="int32")
    np.testing.assert_array_equal(joining.cat(Promote(), [integers, integers], 1).to_host(), np.ones((2, 6)))


# ------------------------------------------------------------------------------------------------- slicing


def test_an_index_that_cuts_nothing_off(queue: cl.CommandQueue) -> None:
    x = leaf(queue, VALUES)
    for key in (slice(None), ..., (slice(0, 4), ...)):
        assert slicing.getitem(Match(), x, key) is x
    x = leaf(queue, np.ones((1, 3)))
    out = slicing.getitem(Match(), x, 0)
    assert out.value.shape == (3,)
    assert out.value.buffer is x.value.buffer
    Tape().backward(out, to_device(queue, [1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(to_numpy(x.grad), [[1, 2, 3]])
    assert slicing.getitem(Match(), x, (0, slice(2, 2))).value.shape == (0,)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_slices_of_nothing_have_a_gradient(queue: cl.CommandQueue, shape: tuple[int, int]) -> None:
    for cut in (
        lambda x: slicing.narrow(Match(), x, 1, 0, 0),
        lambda x: slicing.split(Match(), x, 2, int(shape[0] == 0))[0],
        lambda x: slicing.getitem(Match(), x, slice(0, 0)),
    ):
        x = leaf(queue, np.ones(shape), "float16")
        out = cut(x)
        if out is not x:
            Tape().backward(out, out.value)
            assert (x.grad.shape, x.grad.dtype) == (shape, "float16")


def test_operators_reach_clamp(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    x = leaf(queue, VALUES, "bfloat16")
    out = x[:, 1]
    assert out.value.dtype == "bfloat16"
    assert out.op_name == "getitem"
    assert out.parents[0].op_name == "slices"


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_slices_that_overlap_and_the_tensor_itself_add_up(
    queue: cl.CommandQueue, dtype: str, handle: amp.AmpHandle
) -> None:
    x = leaf(queue, VALUES, dtype)
    cuts = [x[:, 0], x[:, 3], ag.narrow(x, 1, 2, 3), x[1], x, *ag.split(x, 2, axis=2)]
    loss = ag.sum(ag.mul(cuts[0], cuts[0]))
    for cut in cuts[1:]:
        loss = ag.add(loss, ag.sum(ag.mul(cut, cut)))
    weight = np.full(VALUES.shape, 2.0)
    weight[:, [0, 3]] += 1
    weight[:, 2:5] += 1
    weight[1] += 1
    for _ in range(2):  # a second backward pass starts from nothing
        x.grad = x.value.grad = None
        ag.Tape().backward(loss)
        assert x.grad.dtype == dtype
        assert_close(x.grad, 2 * to_numpy(x.value) * weight, ulps=4)


def test_the_gradient_of_all_chunks_is_one_launch(queue: cl.CommandQueue) -> None:
    x = leaf(queue, VALUES, "float16")
    with counted_launches() as launches:
        parts = slicing.chunk(Match(), x, 3, axis=1)
    assert len(launches) == 1
    joined = joining.cat(Promote(), [parts[2], parts[0]], 1)  # the second has no gradient
    grad = to_device(queue, np.ones((4, 4, 5)), "float16")
    with counted_launches() as launches:
        Tape().backward(joined, grad)
    assert len(launches) == 2
    np.testing.assert_array_equal(to_numpy(x.grad)[0, :, 0], [1, 1, 0, 0, 1, 1])


def test_a_loop_over_time_steps_writes_the_gradient_once(queue: cl.CommandQueue) -> None:
    x = leaf(queue, np.arange(16 * 6.0).reshape(2, 16, 3), "float16")
    steps = [slicing.getitem(Match(), x, (slice(None), t)) for t in range(16)]
    joined = joining.stack(Promote(), steps, 1)
    with counted_launches() as launches:
        Tape().backward(joined, x.value)
    assert len(launches) == 4  # two for the steps, two for x
    np.testing.assert_array_equal(to_numpy(x.grad), to_numpy(x.value))


def test_slices_outlive_the_tape_of_an_earlier_iteration(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    x = leaf(queue, VALUES)
    kept = []
    for _ in range(3):
        x.grad = x.value.grad = None
        with ag.Tape() as tape:
            kept.append(x[1])
            tape.backward(ag.sum(kept[-1]))
        del tape
        np.testing.assert_array_equal(to_numpy(x.grad)[:, 0, 0], [0, 1, 0, 0])


def test_slices_leave_nothing_behind(queue: cl.CommandQueue) -> None:
    x = leaf(queue, VALUES)
    gc.disable()  # reference counts must do
    try:
        out = slicing.getitem(Match(), x, 1)
        watched = [weakref.ref(out), weakref.ref(out.parents[0])]
        Tape().backward(out, to_device(queue, np.ones((6, 5))))
        del out
        assert [watch() for watch in watched] == [None, None]
    finally:
        gc.enable()
    assert to_numpy(x.grad)[1].sum() == 30


def test_a_failed_backward_leaves_nothing_for_the_next(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    x = leaf(queue, VALUES, "float16")
    first, second = ag.chunk(x, 2, axis=1)
    failing = [True]

    def grad_fn(grad: Tensor) -> list[Tensor]:
        if failing:
            raise RuntimeError("stop")
        return [grad]

    troubled = Node(value=view(second.value, second.value.shape), grad_fn=grad_fn, parents=[second], requires_grad=True)
    loss = ag.sum(ag.add(troubled, first))
    with pytest.raises(RuntimeError, match="stop"):
        ag.Tape().backward(loss)
    failing.clear()
    ag.Tape().backward(loss)
    np.testing.assert_array_equal(to_numpy(x.grad), np.ones(VALUES.shape))


# -------------------------------------------------------------------------------------------- tensor level


def test_tensor_level_functions(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    x, y = to_device(queue, VALUES, "float16"), to_device(queue, VALUES, "bfloat16")
    out = to_device(queue, np.zeros((8, 6, 5)), "float16")
    assert tensor_ops.cat([x, x], out=out) is out
    np.testing.assert_array_equal(to_numpy(out), np.tile(to_numpy(x), (2, 1, 1)))
    small = to_device(queue, np.zeros((4, 2, 5)), "float16")
    assert tensor_ops.narrow(x, 1, -2, 2, out=small) is small
    np.testing.assert_array_equal(to_numpy(small), to_numpy(x)[:, 4:])
    elsewhere = Tensor.from_shape(cl.CommandQueue(queue.context, queue.device), small.shape, dtype=small.dtype)
    with pytest.raises(ValueError, match="out is on another queue than the inputs"):
        tensor_ops.narrow(x, 1, -2, 2, out=elsewhere)
    with pytest.raises(ValueError, match="output tensor shape/dtype mismatch"):
        tensor_ops.narrow(y, 1, 0, 2, out=small)
    assert tensor_ops.write_into(x, to_device(queue, np.ones((4, 1, 5))), 1, 2) is x
    np.testing.assert_array_equal(to_numpy(x)[:, 2], 1)
    assert tensor_ops.zeros_like(y).dtype == "bfloat16"
    np.testing.assert_array_equal(to_numpy(tensor_ops.zeros_like(y, (2, 3))), np.zeros((2, 3)))


def test_many_parts_are_laid_side_by_side(queue: cl.CommandQueue) -> None:
    """Overlapping gradients are added, the others share one tensor."""
    parts = [(1, Part(start, 2, to_device(queue, [[1.0, 2.0]]))) for start in (4, 0, 1, 2)]
    out = slicing.gradient_of_slices((6,), "float32", parts)
    np.testing.assert_array_equal(to_numpy(out), [1, 3, 3, 2, 1, 2])
