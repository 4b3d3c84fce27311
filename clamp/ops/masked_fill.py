"""Elements replaced by a number where a mask is set, and the gradient of that.

Both are functions of ``clamp.ops.elementwise``: a mask repeated over the leading dimensions is a broadcast.
"""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops.elementwise import elementwise


def masked_fill(x: Tensor, mask: Tensor, fill: float, *, out_dtype: str) -> Tensor:
    """x with ``fill`` wherever the mask is not zero (NaN is not zero).

    Args:
        x: float32, float16 or bfloat16, any shape.
        mask: float32, float16, bfloat16 or int32; repeated over x's leading elements, whatever its own shape.
        fill: rounded to ``out_dtype``, a finite one to a finite one: -1e9 is -65504 in float16.
        out_dtype: dtype of the result.

    Raises:
        ValueError: the mask's size does not divide x's.
    """
    repeats = _repeats(x, mask)
    out = elementwise("where", out_dtype, _row(mask), fill, bridge.view(x, (repeats, mask.size)))
    return bridge.view(out, x.shape)


def masked_fill_backward(grad: Tensor, mask: Tensor, *, out_dtype: str) -> Tensor:
    """The gradient where the mask is zero, 0 elsewhere, whatever the gradient is there.

    Raises:
        ValueError: the mask's size does not divide the gradient's.
    """
    repeats = _repeats(grad, mask)
    out = elementwise("where_grad_b", out_dtype, bridge.view(grad, (repeats, mask.size)), _row(mask))
    return bridge.view(out, grad.shape)


def _repeats(x: Tensor, mask: Tensor) -> int:
    if mask.size == 0 or x.size % mask.size:
        raise ValueError(
            f"masked_fill: a mask of shape {tuple(mask.shape)} does not repeat over a tensor of shape "
            f"{tuple(x.shape)}: {mask.size} elements do not divide {x.size}"
        )
    return x.size // mask.size


def _row(mask: Tensor) -> Tensor:
    return bridge.view(mask, (mask.size,))
