"""Selecting, adding and comparing by index under autograd and on bare tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl import nn
from netcl.ops import indexing as netcl_indexing
from netcl.ops import lm_ops, norm_rope

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.policies import Float, Match, Promote
from clamp.functions import indexing as F
from tests.functions.operands import half, leaf
from tests.reference import HALF_DTYPES, STORAGE_DTYPES, integers, to_device, to_numpy

RNG = np.random.default_rng(0)
VALUES = RNG.standard_normal((4, 6, 5))


def test_indices_come_in_many_forms(queue: cl.CommandQueue) -> None:
    x = leaf(queue, VALUES[0], "float16")
    expected = to_numpy(x.value)[[2, 0, 5]]
    for index in (
        [2, 0, -1], np.array([2, 0, 5]), (2, 0, 5), integers(queue, [[2, 0, 5]]),
        Node(value=integers(queue, [2, 0, 5])),
        to_device(queue, [2.0, 0.0, 5.0]), to_device(queue, [2.0, 0.0, 5.0], "bfloat16"), np.array([2.0, 0.0, 5.0]),
    ):  # fmt: skip
        np.testing.assert_array_equal(to_numpy(F.embedding(Match(), x, index).value), expected)
    assert F.embedding(Match(), x, []).value.shape == (0, 5)
    for wrong in ([6], [-7], [2**40]):
        with pytest.raises(IndexError, match="out of range for axis 0 of size 6"):
            F.embedding(Match(), x, wrong)


def test_a_wrong_index_on_the_device_is_nan_and_gives_nothing_back(queue: cl.CommandQueue) -> None:
    x = leaf(queue, np.ones((3, 2)), "float16")
    out = F.embedding(Match(), x, integers(queue, [0, 3, -4, 100_000]))
    np.testing.assert_array_equal(np.isnan(to_numpy(out.value)[:, 0]), [False, True, True, True])
    Tape().backward(out, to_device(queue, np.ones((4, 2)), "float16"))
    np.testing.assert_array_equal(to_numpy(x.grad), [[1, 1], [0, 0], [0, 0]])


def test_integers_are_selected_too(queue: cl.CommandQueue) -> None:
    host = np.arange(6, dtype=np.int32).reshape(3, 2)
    out = F.index_select(Match(), Tensor.from_host(queue, host, dtype="int32"), 0, [2, 0])
    assert out.dtype == "int32"
    np.testing.assert_array_equal(out.to_host(), host[[2, 0]])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_an_embedding_trains_in_both_precisions(queue: cl.CommandQueue, dtype: str, handle: amp.AmpHandle) -> None:
    layer = nn.Embedding(10, 4, queue=queue)
    index = integers(queue, [1, 7, 1, 1])
    ag.Tape().backward(ag.sum(layer(index)))
    assert layer.weight.grad.dtype == "float32"
    np.testing.assert_array_equal(to_numpy(layer.weight.grad)[[1, 7, 0], 0], [3, 1, 0])
    table = leaf(queue, to_numpy(layer.weight), dtype)  # 16-bit parameters, as amp.decorate makes them
    out = ag.embedding(table, index)
    assert out.value.dtype == dtype
    Tape().backward(out, to_device(queue, np.full((4, 4), 2.0**-9), dtype))
    assert table.grad.dtype == dtype
    np.testing.assert_array_equal(to_numpy(table.grad)[[1, 7, 0], 0], [3 * 2.0**-9, 2.0**-9, 0])
    with ag.no_grad():
        assert isinstance(layer(index), Tensor)


def test_positions_and_tied_projections(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    positions = nn.PositionalEmbedding(8, 4, queue=queue)
    out = positions(3)
    np.testing.assert_array_equal(to_numpy(out.value), to_numpy(positions.weight)[:3])
    ag.Tape().backward(ag.sum(out))
    np.testing.assert_array_equal(to_numpy(positions.weight.grad)[:, 0], [1, 1, 1, 0, 0, 0, 0, 0])
    table = nn.Embedding(10, 4, queue=queue)
    logits = nn.TiedLinear(table.weight)(table(integers(queue, [1, 2])))
    assert logits.value.dtype == "float16"
    ag.Tape().backward(ag.sum(logits))
    rows = to_numpy(table.weight)
    expected = np.tile(rows[1] + rows[2], (10, 1))
    expected[[1, 2]] += rows.sum(0)
    np.testing.assert_allclose(to_numpy(table.weight.grad), expected, rtol=5e-3, atol=5e-3)


def test_what_is_added_beyond_the_end(queue: cl.CommandQueue) -> None:
    to, source = leaf(queue, VALUES), leaf(queue, VALUES[:, :1])
    out = F.index_add(Promote(), to, 1, integers(queue, [99]), source)
    np.testing.assert_array_equal(to_numpy(out.value), to_numpy(to.value))
    Tape().backward(out, to_device(queue, VALUES))
    np.testing.assert_array_equal(to_numpy(source.grad), 0)


def test_argmax_and_topk(queue: cl.CommandQueue) -> None:
    x = leaf(queue, VALUES, "bfloat16")
    values = to_numpy(x.value)
    place = F.argmax(Match(), x, 1)
    assert isinstance(place, Tensor)
    np.testing.assert_array_equal(place.to_host(), values.argmax(1))
    np.testing.assert_array_equal(F.argmax(Match(), x.value, keepdims=True).to_host(), values.argmax(-1)[..., None])
    largest, places = F.topk(Match(), x, 2, axis=0)
    assert (largest.dtype, places.dtype) == ("bfloat16", "int32")
    np.testing.assert_array_equal(to_numpy(largest), -np.sort(-values, 0)[:2])
    assert F.topk(Float(), x, 2)[0].dtype == "float32"


def test_an_embedding_under_policy_half_keeps_fp32_gradients(queue: cl.CommandQueue) -> None:
    x = leaf(queue, VALUES[0])
    out = F.embedding(half(), x, [1, 1])
    assert out.value.dtype == "float16"
    Tape().backward(out, to_device(queue, np.full((2, 5), 2049.0 - 1), "float16"))
    assert x.grad.dtype == "float32"
    np.testing.assert_array_equal(to_numpy(x.grad)[1], np.full(5, 4096.0))


# -------------------------------------------------------------------------------------------- tensor level


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_tensor_level_functions(queue: cl.CommandQueue, dtype: str, handle: amp.AmpHandle) -> None:
    x, index = to_device(queue, VALUES[0], dtype), integers(queue, [2, 2, 0])
    out = to_device(queue, np.zeros((3, 5)), dtype)
    assert netcl_indexing.index_select(x, 0, index, out=out) is out
    np.testing.assert_array_equal(to_numpy(out), to_numpy(x)[[2, 2, 0]])
    gradient = netcl_indexing.index_select_backward(out, (6, 5), 0, index)
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(to_numpy(gradient)[2], 2 * to_numpy(x)[2])
    np.testing.assert_array_equal(to_numpy(ag.one_hot(index, 3, dtype=dtype)), np.eye(3)[[2, 2, 0]])
    np.testing.assert_array_equal(to_numpy(netcl_indexing.one_hot(index, 3, dtype)), np.eye(3)[[2, 2, 0]])
    on_host = [1, 0, 2**32 + 1, -(2**32)]  # no index is another one's, cut to 32 bits
    expected = [[0, 1], [1, 0], [0, 0], [0, 0]]
    np.testing.assert_array_equal(to_numpy(ag.one_hot(on_host, 2, queue=queue, dtype=dtype)), expected)
    whole = netcl_indexing.as_index_tensor(to_device(queue, [[1.0, 2.0]], dtype))
    np.testing.assert_array_equal(whole.to_host(), [1, 2])


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_adding_in_place_keeps_the_targets_dtype(queue: cl.CommandQueue, dtype: str, handle: amp.AmpHandle) -> None:
    for function in (netcl_indexing.index_add, netcl_indexing.scatter_add):
        target, source = to_device(queue, np.ones((3, 2)), dtype), to_device(queue, np.full((300, 2), 0.25))
        assert function(target, 0, integers(queue, np.full(300, 1)), source) is target
        assert target.dtype == dtype
        np.testing.assert_array_equal(to_numpy(target), [[1, 1], [76, 76], [1, 1]])


def test_adding_in_place_outside_of_amp_and_to_a_cached_weight(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    weight = nn.Linear(queue=queue, in_features=3, out_features=2).weight
    x = to_device(queue, np.eye(3), "float16")
    with ag.no_grad():
        before = to_numpy(ag.matmul_op(x, weight))
        netcl_indexing.index_add(weight, 0, [1], to_device(queue, np.ones((1, 2)), "float16"))
        np.testing.assert_allclose(to_numpy(ag.matmul_op(x, weight)) - before, [[0, 0], [1, 1], [0, 0]], atol=1e-3)
    with amp.autocast(enabled=False):
        target = to_device(queue, np.ones((3, 2)), "float16")
        netcl_indexing.index_add(target, 0, [1], to_device(queue, np.ones((1, 2))))
        np.testing.assert_array_equal(to_numpy(target), [[1, 1], [2, 2], [1, 1]])


_PLACES, _MASK, _LABELS = [1, 5, -3], VALUES[0] > 0, [0, 0, 1, 1, 2, 2]
_WHOLE: dict[str, Any] = {  # what takes whole numbers: of x (6, 5), of their tensor, and the numbers
    "index_select": (lambda x, at: ag.index_select(x, 0, at), _PLACES),
    "gather": (lambda x, at: ag.gather(x, 0, at), _PLACES),
    "embedding": (ag.embedding, _PLACES),
    "index_add": (lambda x, at: ag.index_add(x, 0, at, ag.narrow(x, 0, 0, 3)), _PLACES),
    "one_hot": (lambda x, at: ag.one_hot(at, 6), [1, 5, 0]),
    "rope": (lambda x, at: ag.rope(ag.narrow(x, 1, 0, 4), at), [0, 1, 70_001, 5, 3, -2]),
    "masked_fill": (lambda x, at: ag.masked_fill(x, at, -5.0), _MASK),
    "where": (lambda x, at: ag.where(ag.tensor(at), x, 0.0), _MASK),
    "cross_entropy_indices": (ag.cross_entropy_indices, [0, 4, 2, -100, 1, 1]),
    "batch_hard_triplet_loss": (ag.batch_hard_triplet_loss, _LABELS),
    "batch_all_triplet_loss": (ag.batch_all_triplet_loss, _LABELS),
    "rope of tensors": (lambda x, at: norm_rope.rope(ag.narrow(x, 1, 0, 4).value, at), [0, 1, 70_001, 5, 3, -2]),
    "masked_fill of tensors": (lambda x, at: lm_ops.masked_fill(x.value, at, -5.0), _MASK),
    "index_select of tensors": (lambda x, at: netcl_indexing.index_select(x.value, 0, at), _PLACES),
    "its gradient": (lambda x, at: netcl_indexing.index_select_backward(x.value, (9, 5), 0, at), [1, 5, 8, 3, 3, 0]),
}


def test_int64_beyond_int32_is_no_index_and_not_zero(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    numbers = np.array([1, 2**32 + 1, -(2**32), 2**31, -(2**31) - 1, 0])
    given, x = Tensor.from_host(queue, numbers, dtype="int64"), leaf(queue, np.ones((6, 1)), "float16")
    is_one = np.array([[1], [np.nan], [np.nan], [np.nan], [np.nan], [1]])
    np.testing.assert_array_equal(to_numpy(ag.index_select(x, 0, given).value), is_one)
    np.testing.assert_array_equal(to_numpy(ag.one_hot(given, 2))[:, 1], [1, 0, 0, 0, 0, 0])
    condition = ag.tensor(Tensor.from_host(queue, numbers[:, None], dtype="int64"))
    np.testing.assert_array_equal(to_numpy(ag.where(condition, x, 5.0).value)[:, 0], [1, 1, 1, 1, 1, 5])
    np.testing.assert_array_equal(to_numpy(ag.masked_fill(x, condition.value, 5.0).value)[:, 0], [5, 5, 5, 5, 5, 1])


@pytest.mark.parametrize("what", _WHOLE)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_int64_is_read_as_int32(queue: cl.CommandQueue, dtype: str, what: str, handle: amp.AmpHandle) -> None:
    """numpy's and PyTorch's integers are of 64 bits; netcl's kernels read these as twice as many of 32."""
    function, numbers = _WHOLE[what]
    results = []
    for kind in ("int32", "int64"):
        x = leaf(queue, VALUES[0], dtype)
        made = function(x, Tensor.from_host(queue, np.asarray(numbers).astype(kind), dtype=kind))
        out = made.value if isinstance(made, Node) else made
        if isinstance(made, Node):
            ag.sum(made).backward()
        results.append((out.dtype, to_numpy(out), to_numpy(x.value.grad) if isinstance(made, Node) else 0))
    (dtype_32, value_32, grad_32), (dtype_64, value_64, grad_64) = results
    assert dtype_64 == dtype_32
    np.testing.assert_array_equal(value_64, value_32)
    np.testing.assert_array_equal(grad_64, grad_32)
