"""What ops refuse, of every family in one table: an error that names the shapes, or what is wrong with an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.ops import attention, conv, depthwise, grid, indexing, norm_planes, norm_rows, pad, pool, prelu, upsample
from clamp.ops.arguments import axis_of
from clamp.ops.concat import cat, split
from clamp.ops.conv import Window, engines
from clamp.ops.elementwise import elementwise, masked_fill, masked_fill_backward
from clamp.ops.gemm import gemm, pack_b
from clamp.ops.reduce import expand, reduce_sum
from clamp.ops.reduce_to_shape import sum_to_shape
from clamp.ops.rope import rope
from clamp.ops.shape import permute
from clamp.ops.softmax import softmax, softmax_backward
from tests.ops.conv_reference import storage_of
from tests.reference import integers, to_device

F32: Any = {"out_dtype": "float32"}
_GRADS: Any = {"out_dtypes": ("float32",) * 3}

#: what the error says, and a call; ``ones`` makes tensors
Ones = Callable[..., Tensor]
REFUSALS: list[tuple[str, Callable[[Ones], object]]] = [
    ("needs a gradient", lambda ones: attention.attention_backward(
        q := ones(1, 2, 3, 4), q, q, ones(1, 2, 3), ones(1, 2, 5, 4), True, None, **_GRADS)),
    ("exceeds capacity 5",
     lambda ones: attention.attention_decode(ones(1, 2, 1, 4), k := ones(1, 2, 5, 4), k, 6, None, **F32)),
    ("flash_attention_decode takes",
     lambda ones: attention.attention_decode(ones(1, 2, 3, 4), k := ones(1, 2, 5, 4), k, 1, None, **F32)),
    ("at least one", lambda ones: cat([], 0, **F32)),
    ("axis 2 out of", lambda ones: cat([ones(2, 3)], 2, **F32)),
    ("output tensor shape/dtype mismatch", lambda ones: cat([ones(2, 3)] * 2, 0, **F32, out=ones(2, 3))),
    *((r"slice .* out of range for axis 1 of size 3",
       lambda ones, part=part: split(ones(2, 3), 1, [part], out_dtypes=["float32"]))
      for part in ((-1, 1), (0, 4), (2, 2), (1, -1))),
    ("larger than the padded image", lambda ones: conv.conv2d(ones(1, 2, 3, 3), ones(4, 2, 5, 5), Window(), **F32)),
    ("do not fit",
     lambda ones: conv.conv2d(ones(1, 2, 3, 3), ones(4, 2, 5, 5), Window(groups=2, pad=(2, 2)), **F32)),
    ("winograd", lambda ones: conv.conv2d(
        ones(1, 2, 3, 3), ones(4, 2, 5, 5), Window(pad=(2, 2)), **F32, engine="winograd")),
    ("do not fit", lambda ones: conv.conv2d_input_grad(
        ones(1, 2, 3, 3), ones(4, 2, 5, 5), (3, 3), Window(pad=(2, 2)), **F32)),
    ("do not fit", lambda ones: conv.conv2d_weight_grad(*[ones(1, 2, 3, 3)] * 2, (5, 5), Window(), **F32)),
    *((r"image \(5, 5\) do not fit", lambda ones, name=engine.NAME: conv.conv2d_input_grad(
        ones(1, 4, 1, 300, dtype=storage_of(name)), ones(4, 2, 5, 5), (5, 5), Window(), **F32, engine=name))
      for engine in engines.ENGINES),
    ("stride", lambda ones: depthwise.depthwise_conv2d(ones(1, 2, 4, 4), ones(2, 1, 3, 3), None, 0, **F32)),
    ("gradient of shape", lambda ones: depthwise.gradients(
        ones(1, 2, 4, 4), ones(2, 1, 3, 3), ones(1, 2, 4, 4), 1, 0, dx_dtype="float32")),
    (r"add: the shapes \(2, 3\) and \(2,\) do not broadcast",
     lambda ones: elementwise("add", "float32", ones(2, 3), ones(2))),
    ("no function 'cosine'", lambda ones: elementwise("cosine", "float32", ones(2))),
    ("at least one tensor", lambda ones: elementwise("add", "float32", 1.0, 2.0)),
    ("4 elements do not divide 6", lambda ones: masked_fill_backward(ones(2, 3), ones(4), **F32)),
    ("0 elements", lambda ones: masked_fill(ones(2, 3), ones(0), 0.0, **F32)),
    (r"gemm: op\(a\) \(2, 3\) @ op\(b\) \(4, 5\).*3 and 4 differ.*transpose_b",
     lambda ones: gemm(ones(2, 3), ones(4, 5), **F32)),
    (r"gemm.*leading dimensions \(2,\) and \(3,\) differ", lambda ones: gemm(ones(2, 4, 3), ones(3, 3, 5), **F32)),
    (r"gemm: a has shape \(3,\).*reshape", lambda ones: gemm(ones(3), ones(3, 4), **F32)),
    (r"gemm.*bias has shape \(5,\); it must be \(4,\)",
     lambda ones: gemm(ones(2, 3), ones(3, 4), bias=ones(5), **F32)),
    ("gemm: out_dtype is 'float64'", lambda ones: gemm(ones(2, 3), ones(3, 4), out_dtype="float64")),
    ("gemm: b is packed already",
     lambda ones: gemm(ones(2, 3), pack_b(ones(4, 3), transpose=True), transpose_b=True, **F32)),
    ("gemm: b is int32; cast", lambda ones: gemm(ones(2, 3), ones(3, 4, dtype="int32"), **F32)),
    ("4D input", lambda ones: grid.grid_sample(ones(3, 3, 3), ones(3, 2, 2, 2), **F32)),
    ("grid shape", lambda ones: grid.grid_sample(ones(1, 1, 3, 3), ones(2, 2, 2, 2), **F32)),
    ("no pixels", lambda ones: grid.grid_sample(ones(1, 1, 0, 3), ones(1, 2, 2, 2), **F32)),
    ("batch size", lambda ones: grid.affine_grid(ones(1, 2, 3), (2, 1, 3, 3), **F32)),
    ("4D target", lambda ones: grid.affine_grid(ones(1, 2, 3), (3, 3), **F32)),
    ("axis", lambda ones: indexing.index_select(ones(2, 3), 2, ones(2, dtype="int32"), **F32)),
    ("axis", lambda ones: indexing.index_select(ones(0, 3), 0, ones(2, dtype="int32"), **F32)),
    ("shape", lambda ones: indexing.index_select(ones(2, 3), 0, ones(2, dtype="int32"), **F32, out=ones(3, 3))),
    ("in the memory of x",
     lambda ones: indexing.index_select(x := ones(2, 3), 0, ones(2, dtype="int32"), **F32, out=x)),
    ("or of the indices",
     lambda ones: indexing.index_select(i := ones(2, dtype="int32"), 0, i, out_dtype="int32", out=i)),
    ("gradient of shape", lambda ones: norm_planes.batch_norm_backward(
        ones(2, 3, 4, 5), *[ones(3)] * 5, eps=1e-5, dx_dtype=None)),
    ("gradient of shape", lambda ones: norm_rows.rms_norm_backward(
        ones(2, 3, 4, 3), *[ones(3)] * 3, dx_dtype="float32", dgamma_dtype=None)),
    ("mirrored border", lambda ones: pad.pad2d(ones(1, 1, 2, 3), 3, "reflect", **F32)),
    ("shape", lambda ones: pad.pad2d(ones(2, 3), 1, **F32)),
    ("gradient of shape", lambda ones: pad.pad2d_backward(ones(1, 1, 2, 3), (1, 1, 2, 3), 1, **F32)),
    ("shape", lambda ones: pool.global_avg_pool2d(ones(2, 2), **F32)),
    ("shape", lambda ones: pool.max_pool2d(ones(2, 2), 1, 1, **F32)),
    ("gradient of shape", lambda ones: pool.max_pool2d_backward(*[ones(1, 1, 4, 4)] * 2, 2, 2, **F32)),
    ("gradient of shape", lambda ones: pool.avg_pool2d_backward((1, 1, 4, 4), ones(1, 1, 4, 4), 2, 2, **F32)),
    ("gradient of shape", lambda ones: pool.global_avg_pool2d_backward((1, 1, 4, 4), ones(1, 1, 4, 4), **F32)),
    ("gradient of shape", lambda ones: prelu.prelu_backward(
        ones(4), ones(2, 3, 4), ones(1), dx_dtype="float32", slope_dtype=None)),
    ("axis 2 out of bounds", lambda ones: reduce_sum(ones(2, 3), 2, **F32)),
    ("axis -3 out of bounds", lambda ones: reduce_sum(ones(2, 3), -3, **F32)),
    ("cannot expand a tensor of shape", lambda ones: expand(ones(4), (3, 5), 0, **F32)),
    ("does not broadcast", lambda ones: sum_to_shape(ones(3, 4), (3,), "float32")),
    ("even D", lambda ones: rope(ones(3, 5), ones(3, dtype="int32"), **F32)),
    ("takes 3 positions, got 2", lambda ones: rope(ones(3, 4), ones(2, dtype="int32"), **F32)),
    ("positive base", lambda ones: rope(ones(3, 4), ones(3, dtype="int32"), 0.0, **F32)),
    *(("dims must be a permutation", lambda ones, dims=dims: permute(ones(2, 3), dims))
      for dims in ((0,), (0, 0), (0, 2), (0, 1, 2))),
    ("axis 2 out of bounds", lambda ones: softmax(ones(2, 3), 2, **F32)),
    ("0 dimensions; reshape it", lambda ones: axis_of("softmax", -1, 0)),
    ("gradient of shape", lambda ones: softmax_backward(ones(2, 3), ones(3), **F32)),
    ("4D NCHW", lambda ones: upsample.upsample(ones(3, 2, 2), (4, 4), **F32)),
    ("no pixels", lambda ones: upsample.upsample(ones(1, 3, 0, 2), (4, 4), **F32)),
    ("gradient of shape", lambda ones: upsample.upsample_backward(ones(1, 2, 4, 4), (1, 3, 2, 2), **F32)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), REFUSALS)
def test_what_ops_refuse(queue: cl.CommandQueue, message: str, call: Callable[[Ones], object]) -> None:
    def ones(*shape: int, dtype: str = "float32") -> Tensor:
        if dtype == "int32":
            return integers(queue, np.ones(shape))
        return to_device(queue, np.ones(shape), dtype)

    with pytest.raises(ValueError, match=message):
        call(ones)
