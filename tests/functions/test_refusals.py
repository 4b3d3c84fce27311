"""What functions refuse, of every family in one table: an error says what is wrong, or netcl is left to do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Node, Tensor
from clamp.casting.operands import NotOwned
from clamp.casting.policies import Float, Match, Promote
from clamp.functions import (
    activations,
    arithmetic,
    conv,
    indexing,
    loss,
    metric_loss,
    norm,
    reduce,
    shape,
    slicing,
    spatial,
)
from tests.functions import operands
from tests.functions.operands import half, leaf
from tests.reference import to_device

Make = Callable[..., Any]
Call = Callable[[Make, Make], object]


def call(name: str, *args: Any, casting: Any = Match(), **kwargs: Any) -> Any:  # noqa: B008
    return operands.call(name, casting, *args, **kwargs)


I32, F64 = "int32", "float64"
IMAGE = (2, 3, 4, 5)
_LOSSES = (
    loss.mse_loss, loss.l2_loss, loss.l1_loss, loss.smooth_l1_loss, loss.binary_cross_entropy_with_logits,
    loss.cross_entropy, loss.hinge_loss,
)  # fmt: skip
_TRIPLETS = (metric_loss.batch_hard_triplet_loss, metric_loss.batch_all_triplet_loss)
#: beside prediction and target
_WEIGHTED: dict[Callable[..., Any], tuple[Any, ...]] = {
    loss.weighted_smooth_l1_loss: (1,),
    loss.weighted_smooth_l1_elementwise: (1,),
    loss.weighted_bce: (1,),
    loss.weighted_bce_elementwise: (1,),
    loss.fused_weighted_bce_smooth_l1_loss: (1, 1, 0.5, 2.0),
    loss.weighted_box_smooth_l1_loss: (),
    loss.binary_cross_entropy: (),
}


def _weighted(function: Callable[..., Any], n: Make, target: Any) -> Any:
    """A weighted loss of boxes, and this target; its weights are as long as the prediction."""
    return function(Float(), n(6, 4), target, *(n(6, 4) if x == 1 else x for x in _WEIGHTED[function]))


#: what the error says, and a call, which is given what makes tensors of ones, and nodes of them
VALUE_ERRORS: list[tuple[str, Call]] = [
    ("expects x of shape", lambda t, n: arithmetic.bias_add(Match(), n(7), n(7))),
    ("at least one Tensor", lambda t, n: call("where", t(4), 1.0, 2.0)),
    ("match channels", lambda t, n: activations.prelu(Match(), n(2, 3), n(2))),
    ("one shape", lambda t, n: call("flash_attention", x := n(2, 3, 5, 8), x, t(2, 3, 4, 8), casting=half())),
    *((message, lambda t, n, given=given: call(
        "conv2d", n(1, 3, 6, 7), n(4, 3, 3, 3), casting=Float(), **given))
      for given, message in (
          ({"stride": 0}, "stride is 0"), ({"pad": -1}, "pad is -1"), ({"dilation": (1, 2, 3)}, "dilation is"),
          ({"groups": 0}, "groups is 0"), ({"groups": 3}, "channels"), ({"dilation": 9}, "larger than the image"))),
    ("four dimensions", lambda t, n: call("conv2d", n(3, 6, 7), n(4, 3, 3, 3), casting=Float())),
    ("the bias has shape", lambda t, n: call("conv2d", n(1, 3, 6, 7), n(4, 3, 3, 3), n(3), casting=Float())),
    ("has 3 channels", lambda t, n: call("conv_transpose2d", n(1, 3, 6, 7), n(4, 3, 3, 3), casting=Float())),
    ("gives an output of",
     lambda t, n: call("conv_transpose2d", n(1, 4, 0, 1), n(4, 3, 3, 3), casting=Float())),
    ("pass a smaller pad",
     lambda t, n: call("conv_transpose2d", n(1, 4, 1, 1), n(4, 3, 3, 3), casting=Float(), pad=2)),
    ("takes x", lambda t, n: conv.depthwise_conv2d(half(), n(2, 3, 6, 9), n(6, 1, 3, 3))),
    ("bias", lambda t, n: conv.depthwise_conv2d(half(), n(2, 3, 6, 9), n(3, 1, 3, 3), n(2))),
    ("shape", lambda t, n: indexing.index_add(Promote(), x := t(2, 3), 0, [0], x)),
    ("shape", lambda t, n: indexing.index_add(Promote(), t(2, 3), 0, [0, 1], t(2, 4))),
    ("axis", lambda t, n: indexing.tensor_index_add(Match(), x := t(2, 3), 2, [0], x)),
    *((r"\(6, 5\).*\(6, 4\).*(reshape|pass)",
       lambda t, n, function=function: function(Float(), n(6, 5), t(6, 4))) for function in _LOSSES),
    (r"must be \(N, C\)", lambda t, n: loss.cross_entropy(Float(), n(5), [1])),
    ("beta is -1", lambda t, n: loss.smooth_l1_loss(Float(), x := n(6, 5), x, beta=-1.0)),
    ("expected 6 targets, got 1",
     lambda t, n: loss.tensor_cross_entropy_indices(Float(), t(6, 5), t(1, dtype=I32))),
    *((r"pred has shape \(6, 4\), target has shape \(5, 4\)",
       lambda t, n, function=function: _weighted(function, n, n(5, 4))) for function in _WEIGHTED),
    (r"\(6, 3\).*one box a row",
     lambda t, n: loss.weighted_box_smooth_l1_loss(Float(), x := n(6, 3), x)),
    *((message, lambda t, n, function=function, given=given: function(Float(), n(*given[0]), *given[1:]))
      for function in _TRIPLETS
      for message, *given in (
          ("reduction must be", (9, 6), np.ones(9, np.int32), 1.0, "squared", "none"),
          ("3 labels for embeddings of shape", (9, 6), np.ones(3, np.int32)),
          (r"\(N, D\): one embedding a row", (6,), np.ones(9, np.int32)))),
    (r"queries has shape \(9, 6\), keys has shape \(4, 6\)",
     lambda t, n: metric_loss.info_nce_loss(Float(), n(9, 6), n(4, 6))),
    (r"\(N, D\) and \(M, D\)",
     lambda t, n: metric_loss.pairwise_squared_distances(Float(), n(9, 6), n(9, 3))),
    (r"takes x of shape \(N, C, H, W\), got \(3, 4\)",
     lambda t, n: call("batch_norm2d", n(3, 4), n(4), n(4), t(4), t(4))),
    (r"beta of shape \(3,\) for 4 features",
     lambda t, n: call("batch_norm2d", n(3, 4, 5, 3), n(4), t(3), t(4), t(4))),
    ("4 elements are needed", lambda t, n: call("batch_norm2d", n(3, 4, 5, 3), n(4), n(4), t(4), t(3))),
    ("not divisible by groups=3", lambda t, n: call("group_norm", n(3, 4, 5, 3), n(4), n(4), 3)),
    (r"gamma of shape \(3,\) for 4 features", lambda t, n: call("layer_norm", n(3, 4), t(3), n(4))),
    ("axis 2 out of bounds", lambda t, n: norm.l2_normalize(Float(), n(3, 4), dim=2)),
    *(("axis 2 out of bounds", lambda t, n, function=function: function(Float(), n(2, 3), axis=2))
      for function in (reduce.sum, reduce.mean, reduce.softmax)),
    *((r"reshape: (cannot reshape \(2, 3\) into|only one|an extent of shape)",
       lambda t, n, given=given: shape.reshape(Match(), n(2, 3), given))
      for given in ((5,), (-1, -1), (-1, 4), (2, -2), (-1, 0))),
    ("axis 2 out of", lambda t, n: shape.squeeze(Match(), n(2, 1), 2)),
    ("axis -4 out of", lambda t, n: shape.unsqueeze(Match(), n(2, 1), -4)),
    ("transpose2d expects a 2D tensor", lambda t, n: shape.tensor_transpose2d(Match(), t(3))),
    ("cat needs at least one tensor", lambda t, n: shape.cat(Promote(), [])),
    ("stack needs at least one tensor", lambda t, n: shape.stack(Promote(), [])),
    ("cat: .* must agree everywhere but along axis 1", lambda t, n: shape.cat(Promote(), [n(2, 3), n(3, 3)], 1)),
    ("axis 3 out of", lambda t, n: slicing.narrow(Match(), n(4, 6, 5), 3, 0, 1)),
    *(("axis", lambda t, n, given=given: slicing.tensor_write_into(Match(), t(2, 3), t(*given[0]), *given[1:]))
      for given in (((2, 3), 1, 1), ((3, 1), 1, 0), ((2, 1), 2, 0))),
    ("mode must be", lambda t, n: spatial.pad2d(Match(), n(2, 3, 6, 8), 1, "circular")),
    ("exactly one of size or scale_factor", lambda t, n: spatial.upsample(Float(), n(*IMAGE))),
    ("exactly one of size or scale_factor", lambda t, n: spatial.upsample(Float(), n(*IMAGE), 3, 2.0)),
    ("invalid output size", lambda t, n: spatial.upsample(Float(), n(*IMAGE), scale_factor=0.1)),
    ("unsupported upsample mode 'area'", lambda t, n: spatial.upsample(Float(), n(*IMAGE), 3, mode="area")),
    ("4D NCHW", lambda t, n: spatial.upsample(Float(), n(1), 3)),
    ("mode='bilinear'", lambda t, n: spatial.grid_sample(Float(), n(*IMAGE), n(2, 3, 6, 2), mode="nearest")),
    ("padding_mode 'wrap'",
     lambda t, n: spatial.grid_sample(Float(), n(*IMAGE), n(2, 3, 6, 2), padding_mode="wrap")),
    ("4D input", lambda t, n: spatial.rotate_2d_grid(Float(), n(1), 0.1)),
    ("3 angles for 2 images", lambda t, n: spatial.rotate_2d_grid(Float(), n(*IMAGE), [0.1, 0.2, 0.3])),
    ("theta shape", lambda t, n: spatial.affine_grid(Float(), n(2, 3), IMAGE)),
]  # fmt: skip

_HEADS = (2, 3, 5, 8)
OTHER_ERRORS: list[tuple[type[Exception], str, Call]] = [
    *((TypeError, "int32", lambda t, n, function=function: function(Float(), n(6, 5, dtype=I32), t(6, 5)))
      for function in _LOSSES),
    (TypeError, "targets is int32", lambda t, n: loss.cross_entropy(Float(), n(6, 5), n(6, 5, dtype=I32))),
    *((IndexError, f"label {wrong} is no class",
       lambda t, n, wrong=wrong: loss.cross_entropy(Float(), n(6, 5), [0, 1, 2, 3, 4, wrong])) for wrong in (5, -1)),
    *((TypeError, f"{function.__name__}: target is int32",
       lambda t, n, function=function: _weighted(function, n, n(6, 4, dtype=I32))) for function in _WEIGHTED),
    (TypeError, "negative is int32",
     lambda t, n: metric_loss.triplet_loss(Float(), x := n(9, 6), x, n(9, 6, dtype=I32))),
    *((TypeError, f"{function.rpartition('.')[2]}: {wrong} is int32",
       lambda t, n, function=function, given=given, wrong=wrong, more=more: call(
           function, **{x: t(*_HEADS, dtype=I32 if x == wrong else "float32") for x in given.split()}, **more))
      for function, given, more in (
          ("flash_attention", "q k v", {}),
          ("ops.attention.flash_attention_backward", "q k v out lse grad_out", {}),
          ("ops.attention.flash_attention_decode", "q k_cache v_cache", {"cache_len": 1}))
      for wrong in given.split() if wrong != "out"),
    (TypeError, "prelu: alpha is 0.5; .* or call leaky_relu", lambda t, n: activations.prelu(Match(), n(2, 3), 0.5)),
    (TypeError, "prelu: alpha is int32", lambda t, n: activations.prelu(Match(), n(2, 3), t(3, dtype=I32))),
    (TypeError, "prelu_backward: grad_out is int32",
     lambda t, n: call("ops.elementwise.prelu_backward", t(2, 3), t(3), t(2, 3, dtype=I32))),
    *((TypeError, "integer and floating tensors do not go together",
       lambda t, n, function=function: function(Promote(), [n(2, 3), t(2, 3, dtype=I32)]))
      for function in (shape.cat, shape.stack)),
    (TypeError, "do not go together",
     lambda t, n: slicing.tensor_write_into(Match(), t(2, 3), t(2, 1, dtype=I32), 1, 0)),
    *((error, r"ind|step|strided", lambda t, n, key=key: slicing.getitem(Match(), n(2, 3), key))
      for key, error in (
          ((0, 0, 0), IndexError), (2, IndexError), ((0, -4), IndexError), (slice(0, 2, 2), NotImplementedError),
          ([0, 1], TypeError), (None, TypeError), (1.0, TypeError))),
]  # fmt: skip

LEFT_TO_NETCL: list[Call] = [
    lambda t, n: call("ops.elementwise.relu", x := t(5, 7), out=x),
    lambda t, n: call("ops.elementwise.dropout", t(5, 7), return_mask=True),
    lambda t, n: call("ops.elementwise.elementwise_scalar", t(5, 7), 2.0, "POW"),
    lambda t, n: call("ops.broadcast.broadcast_binary", t(5, 7), t(7), op="XOR"),
    lambda t, n: call("ops.elementwise.prelu", x := t(2, 3), t(1), out=x),
    lambda t, n: call("flash_attention", x := n(*_HEADS), x, t(*_HEADS, dtype=F64), casting=half()),
    lambda t, n: call("ops.lm_ops.masked_fill", x := t(5, 8), x, casting=Promote(), out=x),
    lambda t, n: call("ops.conv2d.conv2d", t(2, 3, 6, 7), t(4, 3, 3, 3), casting=half(), out=t(2, 4, 4, 5)),
    lambda t, n: call("ops.depthwise_conv2d.depthwise_conv2d", x := t(2, 3, 6, 9), t(3, 1, 3, 3), out=x),
    lambda t, n: conv.depthwise_conv2d(half(), t(2, 3, 6, 9, dtype=I32), n(3, 1, 3, 3)),
    lambda t, n: indexing.embedding(Match(), n(6, 5), object()),
    lambda t, n: indexing.argmax(Match(), t(1, 2, dtype=I32)),
    lambda t, n: indexing.topk(Match(), t(1, 2, dtype=I32), 1),
    lambda t, n: indexing.index_select(Match(), t(2, 3, dtype=F64), 0, [0]),
    lambda t, n: indexing.index_add(Promote(), t(2, 3), 0, [0], t(1, 3, dtype=I32)),
    lambda t, n: indexing.one_hot(Match(), [0], 2, dtype="float16"),
    lambda t, n: indexing.one_hot(Match(), t(1, dtype=I32), 2, dtype=I32),
    lambda t, n: indexing.tensor_as_index_tensor(Match(), [1, 2]),
    lambda t, n: loss.mse_loss(Float(), n(6, 5), np.ones((6, 5))),
    lambda t, n: call("ops.softmax.softmax_backward", y := t(6, 5), t(6, 5), y),
    *(lambda t, n, function=function: _weighted(function, n, np.ones((6, 4))) for function in _WEIGHTED),
    lambda t, n: metric_loss.contrastive_loss(Float(), np.ones((9, 6)), n(9, 6), np.ones(9)),
    lambda t, n: call("ops.elementwise_optimized.fused_bn_relu", x := t(3, 4, 5, 3), t(4), t(4), out=x),
    lambda t, n: call("batch_norm2d", n(3, 4, 5, 3), n(4), n(4), None, None, training=False),
    lambda t, n: call("layer_norm", t(3, 4, dtype=I32), n(4), n(4), casting=Float()),
    lambda t, n: call("ops.reduction.reduce_sum", x := t(2, 3), casting=Float(), out=x),
    lambda t, n: call("ops.softmax.softmax", x := t(2, 3), casting=Float(), out=x),
    *(lambda t, n, function=function: function(Float(), t(2, 3, dtype=I32))
      for function in (reduce.sum, reduce.mean, reduce.softmax)),
    lambda t, n: shape.reshape(Match(), t(2, 3, dtype=F64), (6,)),
    lambda t, n: shape.permute(Match(), np.ones((2, 3)), (1, 0)),
    lambda t, n: call("ops.permute.permute", x := t(2, 3), (1, 0), out=x),
    lambda t, n: call("ops.transpose.transpose2d", x := t(2, 3), out=x),
    lambda t, n: call("ops.upsample.upsample", x := t(*IMAGE), 3, casting=Float(), out=x),
    lambda t, n: call("ops.grid_sample.grid_sample", x := t(*IMAGE), t(2, 3, 6, 2), casting=Float(), out=x),
    lambda t, n: call("ops.grid_sample.affine_grid", t(2, 2, 3), IMAGE, casting=Float(), out=t(*IMAGE)),
    lambda t, n: spatial.grid_sample(Float(), t(*IMAGE), t(2, 1, 1, 2, dtype=I32)),
]  # fmt: skip

REFUSALS = [
    *((ValueError, message, refused) for message, refused in VALUE_ERRORS),
    *OTHER_ERRORS,
    *((NotOwned, None, refused) for refused in LEFT_TO_NETCL),
]


@pytest.mark.parametrize(("error", "message", "refused"), REFUSALS)
def test_what_functions_refuse(
    queue: cl.CommandQueue, error: type[Exception], message: str | None, refused: Call
) -> None:
    def tensor(*extents: int, dtype: str = "float32") -> Tensor:
        if dtype in (I32, F64):
            return Tensor.from_host(queue, np.ones(extents, dtype), dtype=dtype)
        return to_device(queue, np.ones(extents), dtype)

    def node(*extents: int, dtype: str = "float32") -> Node:
        return Node(value=tensor(*extents, dtype=dtype)) if dtype == I32 else leaf(queue, np.ones(extents), dtype)

    with pytest.raises(error, match=message):
        refused(tensor, node)
