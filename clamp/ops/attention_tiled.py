"""The attention of GPUs and of every other device, in tiles of local memory (kernels/attention_tiled.cl)."""

from __future__ import annotations

from math import prod

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import get_kernel

_FILE = "attention_tiled.cl"
_PER_ITEM = 4
_STEP = 16


def _side(queue: cl.CommandQueue) -> int:
    """Work-items on a side of a work-group: 16, or 8 where a device's work-groups or local memory are small."""
    device = capabilities(queue)
    return 16 if device.max_work_group >= 256 and device.local_memory_bytes >= 32768 else 8


def _launch(queue: cl.CommandQueue, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(global size, local size): work-group (tile of columns, tile of rows, head)."""
    side = _side(queue)
    tile = side * _PER_ITEM
    return (-(-shape[3] // tile) * side, -(-shape[2] // tile) * side, prod(shape[:2])), (side, side, 1)


def _macros(queue: cl.CommandQueue, **tensors: Tensor) -> dict[str, object]:
    types = {f"{name}_T": bridge.STORAGE[tensor.dtype] for name, tensor in tensors.items()}
    return {"SIDE": _side(queue), "PER_ITEM": _PER_ITEM, "STEP": _STEP, **types}


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> None:
    """Writes the result over ``out`` and the log-sum-exps over ``lse``. None is empty."""
    queue, shape = q.queue, tuple(q.shape)
    macros = _macros(queue, Q=q, K=k, V=v, Y=out)
    kernel = get_kernel(queue, _FILE, "attention_forward", "pppppqqfi", FORWARD=1, **macros)
    buffers = (q.buffer, k.buffer, v.buffer, out.buffer, lse.buffer)
    kernel(queue, *_launch(queue, shape), *buffers, shape[2], shape[3], scale, causal)


def backward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, grads: tuple[Tensor, Tensor, Tensor],
    causal: bool, scale: float,
) -> None:  # fmt: skip
    """Writes the gradients of q, k and v over ``grads``. None is empty."""
    queue, shape = q.queue, tuple(q.shape)
    dq, dk, dv = grads
    sizes = _launch(queue, shape)
    arguments = (shape[2], shape[3], scale, causal)
    read = (q.buffer, k.buffer, v.buffer, grad.buffer, lse.buffer)
    delta = bridge.empty(queue, shape[:3], "float32")
    kernel = get_kernel(
        queue,
        _FILE,
        "attention_backward_q",
        "pppppppqqfi",
        BACKWARD_Q=1,
        **_macros(queue, Q=q, K=k, V=v, G=grad, DQ=dq),
    )
    kernel(queue, *sizes, *read, dq.buffer, delta.buffer, *arguments)
    macros = _macros(queue, Q=q, K=k, V=v, G=grad, DK=dk, DV=dv)
    kernel = get_kernel(queue, _FILE, "attention_backward_kv", "ppppppppqqfi", BACKWARD_KV=1, **macros)
    kernel(queue, *sizes, *read, delta.buffer, dk.buffer, dv.buffer, *arguments)
