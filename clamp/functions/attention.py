"""Attention and rotary positions, under autograd and for bare tensors, with netcl's decoding from a cache."""

from __future__ import annotations

from typing import Any

from clamp import bridge
from clamp.bridge import Tape, Tensor, TensorLike
from clamp.casting.operands import Casting, Gradients, Operand, as_is, bound, float_operands, require_floats
from clamp.casting.registry import implements
from clamp.functions.indexing import whole_value
from clamp.functions.recompute import kept
from clamp.ops import attention as ops
from clamp.ops.arguments import number, whole_number, yes_or_no
from clamp.ops.rope import rope as rotate


@implements("netcl.autograd.flash_attention", whole="netcl.ops.attention.flash_attention", uses=ops.ENGINES)
def flash_attention(
    casting: Casting, q: TensorLike, k: TensorLike, v: TensorLike, causal: bool = True,
    scale: float | None = None, tape: Tape | None = None,
) -> tuple[Any, Tensor]:  # fmt: skip
    """softmax(q k' scale) v for q, k and v of one shape (B, H, T, D); see ``clamp.ops.attention.attention``.

    Backward keeps q, k, v and a float a query, neither the weights nor the result; a checkpointed block keeps both the
    result and the float, which take longer than all else to compute again and have no more bytes than a projection.

    Returns:
        The result, and the log-sum-exp of each query's scores, (B, H, T) in float32.
    """
    operands = qo, ko, vo = casting.operands(q, k, v)
    require_floats("flash_attention", q=qo, k=ko, v=vo)
    causal = yes_or_no("flash_attention", "causal", causal)
    dtype = casting.result_dtype(*operands)
    out, lse = kept(
        lambda: ops.attention(qo.value, ko.value, vo.value, causal, scale, out_dtype=dtype),
        ("attention", qo.shape, ko.shape, vo.shape, causal, scale, dtype), operands,
    )  # fmt: skip

    sums = Operand(lse, lse)
    gradients: Gradients = {operands: lambda grad, *_: _gradients(qo, ko, vo, sums, grad, causal, scale)}
    return bound(out, gradients, "flash_attention", tape, besides=(sums,)), lse


def _gradients(
    q: Operand, k: Operand, v: Operand, lse: Operand, grad: Tensor, causal: bool, scale: float | None
) -> ops.Gradients:
    dtypes = (q.grad_dtype, k.grad_dtype, v.grad_dtype)
    return ops.attention_backward(q.value, k.value, v.value, lse.value, grad, causal, scale, out_dtypes=dtypes)


@implements("netcl.ops.attention.flash_attention_backward", uses=ops.ENGINES)
def tensor_flash_attention_backward(
    casting: Casting, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    causal: bool = True, scale: float | None = None,
) -> ops.Gradients:  # fmt: skip
    """Gradients of q, k and v, each in the dtype of its tensor. ``out`` is not needed."""
    qo, ko, vo = casting.operands(q, k, v)
    grad, sums = as_is(grad_out), as_is(lse)
    require_floats("flash_attention_backward", q=qo, k=ko, v=vo, lse=sums, grad_out=grad)
    bridge.require_same_queue("flash_attention_backward", qo.value, grad.value, sums.value)
    return _gradients(qo, ko, vo, sums, grad.value, causal, scale)


@implements("netcl.ops.attention.flash_attention_decode", uses=(ops.DECODE,))
def flash_attention_decode(
    casting: Casting, q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_len: int, scale: float | None = None
) -> Tensor:
    """One query a head, (B, H, 1, D), against the first ``cache_len`` positions of the caches (B, H, capacity, D).

    The caches are read in the dtype they have: casting them would copy all of them for every new token.

    Raises:
        ValueError: shapes that do not fit, or ``cache_len`` beyond the capacity.
        TypeError: a tensor of integers.
    """
    (qo,) = casting.operands(q)
    ko, vo = as_is(k_cache), as_is(v_cache)
    require_floats("flash_attention_decode", q=qo, k_cache=ko, v_cache=vo)
    bridge.require_same_queue("flash_attention_decode", qo.value, ko.value, vo.value)
    dtype = casting.result_dtype(qo)
    cache_len = whole_number("flash_attention_decode", "cache_len", cache_len, 0)
    return ops.attention_decode(qo.value, ko.value, vo.value, cache_len, scale, out_dtype=dtype)


@implements("netcl.autograd.rope", "netcl.ops.norm_rope.rope", uses=(rotate,))
def rope(
    casting: Casting, x: TensorLike, positions: TensorLike, base: float = 10000.0, tape: Tape | None = None,
    inverse: bool = False,
) -> Any:  # fmt: skip
    """x (..., T, D), each pair of elements rotated by its angle at ``positions`` (T,); see ``clamp.ops.rope.rope``.

    Backward turns the gradient back by the same angles.

    Args:
        inverse: whether by the negated angles.

    Raises:
        ValueError: D is odd, or there are not T positions.
    """
    (operand,) = float_operands(casting, x)
    where = whole_value(positions)
    bridge.require_same_queue("rope", operand.value, where)
    places = Operand(where, where)
    dtype, base = casting.result_dtype(operand), number("rope", "base", base)
    out = rotate(operand.value, where, base, inverse=bool(inverse), out_dtype=dtype)
    gradients: Gradients = {
        operand: lambda grad, dtype: rotate(grad, places.value, base, inverse=not inverse, out_dtype=dtype)
    }
    return bound(out, gradients, "rope", tape, unread=(operand,), besides=(places,))
