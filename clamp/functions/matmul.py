"""Matrix products: forward and backward of netcl's matmul, bmm and linear_relu.

A product's gradients are products again, with one operand transposed; the GEMM reads transposed operands as
they lie, so nothing is transposed in memory. A weight's gradient is stored in the weight's own dtype straight
from the fp32 accumulators.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Gradients, Operand, as_is, bound
from clamp.casting.policies import WeightOperand
from clamp.casting.registry import implements
from clamp.functions.arithmetic import through_relu
from clamp.functions.recompute import asked_before, computed
from clamp.ops.elementwise import elementwise
from clamp.ops.gemm import gemm, is_packed, pack_b, rounds_as_it_reads
from clamp.ops.reduce_to_shape import sum_to_shape
from clamp.ops.shape import permute

Shape = tuple[int, ...]


@implements("netcl.autograd.matmul_op", "netcl.ops.matmul.matmul", uses=(gemm, permute))
def matmul_op(casting: Casting, a: TensorLike, b: TensorLike, tape: Tape | None = None) -> Any:
    """a @ b for (M, K) @ (K, N), (..., M, K) @ (K, N), (M, K) @ (B, K, N) and (B, M, K) @ (B, K, N).

    Raises:
        ValueError: shapes that do not fit, or that netcl's matmul does not take.
    """
    x, w = casting.operands(a, b)
    _check_matmul_shapes(x.shape, w.shape)
    return _product(casting, x, w, "matmul", tape)


@implements("netcl.autograd.bmm", "netcl.ops.bmm.bmm", uses=(gemm, permute))
def bmm(casting: Casting, a: TensorLike, b: TensorLike, tape: Tape | None = None) -> Any:
    """(..., M, K) @ (..., K, N) with equal leading dimensions."""
    x, w = casting.operands(a, b)
    if len(x.shape) < 3 or len(x.shape) != len(w.shape) or x.shape[:-2] != w.shape[:-2] or x.shape[-1] != w.shape[-2]:
        raise ValueError(
            f"bmm takes (..., M, K) and (..., K, N) with equal leading dimensions, got {x.shape} and {w.shape}"
        )
    return _product(casting, x, w, "bmm", tape)


def _check_matmul_shapes(a: Shape, b: Shape) -> None:
    supported = len(b) == 2 <= len(a) or (len(b) == 3 and (len(a) == 2 or (len(a) == 3 and a[0] == b[0])))
    if not supported:
        raise ValueError(
            f"matmul does not take shapes {a} @ {b}: pass (..., M, K) @ (K, N), (M, K) @ (B, K, N) "
            f"or (B, M, K) @ (B, K, N)"
        )
    if a[-1] != b[-2]:
        raise ValueError(f"matmul shape mismatch: {a} @ {b}, {a[-1]} columns against {b[-2]} rows")


def _product(casting: Casting, x: Operand, w: Operand, op_name: str, tape: Tape | None) -> Any:
    """x @ w: with a matrix w all leading dimensions of x are rows of one product; a matrix x is shared by the whole
    batch of w."""
    dtype = casting.result_dtype(x, w)
    gradients: Gradients = {x: partial(_grad_of_left, x, w), w: partial(_grad_of_right, x, w)}
    if len(w.shape) > 2:
        return bound(_forward(x, w, out_dtype=dtype), gradients, op_name, tape)
    shape = (*x.shape[:-1], w.shape[1])
    out = computed(lambda: _seen_as(_forward(x, w, out_dtype=dtype), shape), x.parent.value, shape, dtype)
    return bound(out, gradients, op_name, tape, first=_flat)


def _forward(x: Operand, w: Operand, **epilogue: Any) -> Tensor:
    """x @ w. A small product rounds what is float32 as it reads it, and makes a weight's 16-bit copy by the way: there
    is no cast before it."""
    # Of a weight on the left only a cast makes the copy; backward is to find what it was in this forward.
    a, b, dtype = x.value if isinstance(x, WeightOperand) else x.source, w.source, w.dtype
    if (a.dtype != dtype or b.dtype != dtype) and x.dtype == dtype and rounds_as_it_reads(a, b, dtype):
        late = w if isinstance(w, WeightOperand) and b.dtype != dtype else None
        copy = bridge.empty(b.queue, b.shape, dtype) if late is not None else None
        out = gemm(_rows(a, w), b, reads=dtype, b_copy=copy, **epilogue)
        if late is not None and copy is not None:
            late.was_made(copy)
        return out
    return _times(_rows(x.value, w), w, **epilogue)


def _grad_of_right(x: Operand, w: Operand, grad: Tensor, dtype: str) -> Tensor:
    """The gradient of w; as it does in the forward, a small product rounds x as it reads it."""
    a, reads = _rows(x.source, w), None
    if a.dtype != x.dtype:
        if grad.dtype == x.dtype and rounds_as_it_reads(a, grad, x.dtype, transpose_a=True):
            reads = x.dtype
        else:
            a = _rows(x.value, w)
    return gemm(a, grad, transpose_a=True, out_dtype=dtype, reads=reads)


def _times(a: Tensor, w: Operand, *, transpose: bool = False, **epilogue: Any) -> Tensor:
    """a @ w. A weight that is multiplied with again and again, as in a loop over time, is packed once."""
    value, rows = w.value, prod(a.shape[:-1])
    if w.weight is None or len(w.shape) != 2 or not is_packed(a, value, transpose_b=transpose):
        return gemm(a, value, transpose_b=transpose, **epilogue)
    kind = ("panels", transpose, value.dtype, a.dtype, rows)
    if not asked_before(w.weight, kind):  # an engine may pack what it reads better than a launch of its own
        return gemm(a, value, transpose_b=transpose, **epilogue)
    packed = w.derived(kind, lambda _: pack_b(value, transpose=transpose, a_dtype=a.dtype, rows=rows))
    return gemm(a, packed, **epilogue)


def _grad_of_left(x: Operand, w: Operand, grad: Tensor, dtype: str) -> Tensor:
    if len(w.shape) == 2 or len(x.shape) == len(w.shape):
        return _seen_as(_times(grad, w, transpose=True, out_dtype=dtype), x.shape)
    # One x for a batch of w: the sum over the batch is part of the contraction, (M, B N) @ (B N, K).
    batch, k, n = w.shape
    m = x.shape[0]
    wide_grad = bridge.view(permute(grad, (1, 0, 2)), (m, batch * n))
    wide_w = bridge.view(permute(w.value, (1, 0, 2)), (k, batch * n))
    return gemm(wide_grad, wide_w, transpose_b=True, out_dtype=dtype)


def _rows(x: Tensor, w: Operand) -> Tensor:
    return _flat(x) if len(w.shape) == 2 else x


def _flat(x: Tensor) -> Tensor:
    return _seen_as(x, (prod(x.shape[:-1]), x.shape[-1]))


def _seen_as(x: Tensor, shape: Shape) -> Tensor:
    return x if x.shape == shape else bridge.view(x, shape)


@implements("netcl.autograd.linear_relu", uses=(gemm, elementwise, sum_to_shape))
def linear_relu(
    casting: Casting, x: TensorLike, w: TensorLike, bias: TensorLike | None = None, tape: Tape | None = None
) -> Any:
    """relu(x @ w + bias) for x (M, K), w (K, N), bias (N,): one GEMM, bias and relu in its store."""
    xo, wo = casting.operands(x, w)
    # A bias is read in its own dtype (policy match), so it takes no part in the casting.
    bo = None if bias is None else as_is(bias)
    if bo is not None:
        bridge.require_same_queue("linear_relu", xo.parent.value, bo.value)
    if len(xo.shape) != 2 or len(wo.shape) != 2:
        raise ValueError(f"linear_relu takes x (M, K) and w (K, N), got {xo.shape} and {wo.shape}")
    if xo.shape[1] != wo.shape[0]:
        raise ValueError(
            f"linear_relu: x {xo.shape} and w {wo.shape} do not fit: {xo.shape[1]} columns against {wo.shape[0]} rows"
        )
    if bo is not None and bo.shape != wo.shape[1:]:
        raise ValueError(f"linear_relu: the bias has shape {bo.shape}; w {wo.shape} needs {wo.shape[1:]}")
    dtype = casting.result_dtype(xo, wo)
    out = _forward(xo, wo, out_dtype=dtype, bias=None if bo is None else bo.value, relu=True)

    gradients: Gradients = {
        xo: partial(_grad_of_left, xo, wo),
        wo: partial(_grad_of_right, xo, wo),
    }
    if bo is not None:
        gradients[bo] = lambda grad, dtype: sum_to_shape(grad, bo.shape, dtype)
    result = Operand(out, out)
    return bound(out, gradients, "linear_relu", tape, first=partial(through_relu, result), besides=(result,))
