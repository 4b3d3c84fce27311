"""The scale of one layer's gradient: by which power of two it is multiplied before it is rounded to 16 bits.

After Zhao et al., "Adaptive Loss Scaling for Mixed Precision Training" (2019, arXiv:1910.12385), who find a scale for
each layer in each step. Theirs is found from the statistics of a layer's weights and gradients, and goes on to the next
layer; this one from the largest magnitude of the gradient itself, and is taken off again behind the layer.
"""

from __future__ import annotations

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.elementwise import elementwise
from clamp.ops.launch import parts_of, plan_rows
from clamp.ops.loss_scale import AppliedScale, scale_lock

LARGEST = Kernel("layer_scale.cl", "largest")
FIT = Kernel("layer_scale.cl", "fit")


def fitted(grad: Tensor, dtype: str, scale: AppliedScale) -> tuple[Tensor, Tensor]:
    """A gradient in 16 bits, multiplied by the power of two with which it fits best, and that power's reciprocal.

    Enqueues three launches, and does not wait: what the power is only the device knows.

    Args:
        grad: float32, float16 or bfloat16, any shape.
        dtype: ``"float16"`` or ``"bfloat16"``.
        scale: the loss scale of the pass, which says how much room there is above (kernels/layer_scale.cl).

    Returns:
        The gradient in ``dtype``, of the same shape; a float32, of shape (1,).
    """
    queue, n = grad.queue, grad.size
    count, span = parts_of(queue, 1, n)
    plan = plan_rows(queue, count, min(n, span))
    parts = bridge.empty(queue, (count,), "float32")
    up, down = bridge.empty(queue, (1,), "float32"), bridge.empty(queue, (1,), "float32")
    LARGEST(
        queue, plan.global_size, plan.local_size, grad, parts, n, span, count, plan.each,
        X_T=bridge.STORAGE[grad.dtype], **plan.macros,
    )  # fmt: skip
    with scale_lock:
        FIT(
            queue, (1,), (1,), parts, up, down, scale.buffer(queue), count,
            X_T=bridge.STORAGE[grad.dtype], **plan.macros,
        )  # fmt: skip
    return elementwise("mul", dtype, grad, up), down


def taken_off(grad: Tensor, down: Tensor) -> Tensor:
    """A gradient that came of a ``fitted`` one, in float32, without that one's power of two."""
    return elementwise("mul", "float32", grad, down)
