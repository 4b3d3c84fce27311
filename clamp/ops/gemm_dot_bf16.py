"""The GEMM of bfloat16 by bfloat16 on x86 processors with AVX512_BF16 (kernels/gemm_dot_bf16.cl)."""

from __future__ import annotations

from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities, host_cpu_flags, host_cpu_vendor
from clamp.opencl.program import KernelBuildError, get_kernel
from clamp.opencl.recording import unrecorded
from clamp.ops.gemm_operands import Epilogue, Operand, operand_a, operand_b
from clamp.ops.gemm_panels import Panels, blocks_of, pack

_ROWS, _COLUMNS = 12, 32  # of the register tile
_KC = 256  # pairs of k between two visits to a tile

Matrix: TypeAlias = npt.NDArray[np.float32]

_works: dict[int, bool] = {}


def works(queue: cl.CommandQueue) -> bool:
    """Whether the queue's device runs this kernel and gets the right numbers; tried once per device."""
    device = queue.device
    if device.int_ptr not in _works:
        # An instruction that the processor lacks would end the process: ask before trying.
        has_instruction = capabilities(queue).is_cpu and "avx512_bf16" in host_cpu_flags()
        with unrecorded():
            _works[device.int_ptr] = has_instruction and _trial(queue)
    return _works[device.int_ptr]


def pays_off(queue: cl.CommandQueue) -> bool:
    """Whether this kernel is also faster than the one for floats.

    AMD's processors run the instruction at the rate of a float's multiply-add, on twice the elements (1.7 to 2 times
    as fast on a Zen 5, 1.5 to 2 times on a Zen 4). Intel's run it at half that rate: 187 against 281 and 153 against
    245 GFLOP/s were measured on two Xeons, one of which hid its matrix units (AMX). The choice is no trial's, because
    results must not depend on what else the machine was doing.
    """
    return host_cpu_vendor() == "AuthenticAMD" and works(queue)


def pack_columns(b: Operand) -> Panels:
    """op(B) in the panels that `multiply` takes.

    Raises:
        ValueError: it is not stored as bfloat16.
    """
    return _pack(b, _COLUMNS)


def multiply(a_operand: Operand, b: Panels, c: Tensor, epilogue: Epilogue) -> None:
    """Writes op(A) op(B), through the epilogue, over c (…, M, N), which is not empty.

    Raises:
        ValueError: A is not stored as bfloat16.
    """
    queue = c.queue
    a = _pack(a_operand, _ROWS)
    blocks = blocks_of(a, b, c)
    slot_columns = blocks.panels_b if a.steps > _KC else 1
    slots = prod(blocks.grid) * blocks.panels_a * slot_columns
    sums = bridge.empty(queue, (slots * _ROWS * _COLUMNS,), "float32")
    bias = c if epilogue.bias is None else epilogue.bias  # a kernel's pointer must point somewhere
    kernel = get_kernel(queue, "gemm_dot_bf16.cl", "gemm", "pppppqqqqquuuii", KC=_KC, **epilogue.macros)
    kernel(
        queue, blocks.grid, (1, 1, 1), a.tensor.buffer, b.tensor.buffer, c.buffer, bias.buffer, sums.buffer,
        a.rows, b.rows, a.steps, a.stride_batch, b.stride_batch, blocks.panels_a, blocks.panels_b, slot_columns,
        epilogue.bias is not None, epilogue.relu,
    )  # fmt: skip


def _pack(x: Operand, width: int) -> Panels:
    if x.storage != "bf16":
        raise ValueError(
            f"gemm: this kernel multiplies bfloat16 by bfloat16 only, not {x.tensor.dtype}; "
            "leave the kernel to clamp, and give pack_b the storage type of a as a_dtype"
        )
    return pack(x, width, pairs=True)


def _trial(queue: cl.CommandQueue) -> bool:
    """Multiplies small integers, whose sums are exact: ragged tiles, an odd k, several visits to a tile."""
    rows, columns, k = 2 * _ROWS + 1, 2 * _COLUMNS + 5, 2 * 2 * _KC + 3
    a = np.arange(rows * k, dtype=np.float32).reshape(rows, k) % 15 - 7
    b = np.arange(k * columns, dtype=np.float32).reshape(k, columns) % 13 - 6
    x, y = _upload(queue, a), _upload(queue, b)
    c = bridge.empty(queue, (rows, columns), "float32")
    try:
        multiply(operand_a(x, False), pack_columns(operand_b(y, False)), c, Epilogue("float32"))
        return np.array_equal(c.to_host(), a @ b)
    except (KernelBuildError, cl.Error):
        return False


def _upload(queue: cl.CommandQueue, small_integers: Matrix) -> Tensor:
    bits = (small_integers.view(np.uint32) >> 16).astype(np.uint16)  # the lower half is zero
    return Tensor.from_host(queue, bits, dtype="bfloat16")
