"""Products whose work-groups compute a tile of C each: how their kernels are launched, whole or in slices of k."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.launches import Launch
from clamp.opencl.program import Kernel
from clamp.ops.gemm.plan import Tiling, cut, tiles_of
from clamp.ops.gemm.problem import Epilogue, Matrix

_ADD_SLICES = Kernel("gemm_slices.cl", "add_slices")
_ADDERS = 256  # work-items of a group that adds slices
_PIECE_BYTES = 16  # of a load


@dataclass(frozen=True)
class Lines:
    """Layout of an operand in memory."""

    k_major: bool  # in lines that run along k; otherwise along its rows
    pitch: int  # elements from one line to the next
    aligned: bool  # lines are whole pieces of 16 bytes (memory of its own always begins at one)

    @classmethod
    def of(cls, x: Matrix) -> Lines:
        """Those of an operand."""
        k_major = x.stride_k == 1
        pitch = x.stride_row if k_major else x.stride_k
        piece = _PIECE_BYTES // (4 if x.storage == "f32" else 2)
        return cls(k_major, pitch, pitch % piece == x.stride_batch % piece == 0)


def bind(
    kernel: Kernel, macros: Mapping[str, object], a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, plan: Tiling,
    slices: int,
) -> Callable[..., None]:  # fmt: skip
    """Products of operands that lie as these do, called as `clamp.ops.gemm.engines.Binds` says: by one launch, or by
    one for sums of at most ``slices`` parts of k, and one that adds these.

    Args:
        macros: of the kernel, beside those that say how the operands lie.
    """
    slice_k, slices = cut(a.k, slices, plan.k)
    elements = a.rows * b.rows
    groups = tiles_of(plan, a.rows, b.rows) * (c.size // elements) * slices
    lines_a, lines_b = Lines.of(a), Lines.of(b)
    store = epilogue if slices == 1 else Epilogue("float32")
    product = kernel.bind(
        c.queue, (groups * plan.threads,), (plan.threads,), ..., ..., ..., ...,
        a.rows, b.rows, a.k, lines_a.pitch, a.stride_batch, lines_b.pitch, b.stride_batch,
        slice_k, slices, *store.flags,
        A_K_MAJOR=int(lines_a.k_major), B_K_MAJOR=int(lines_b.k_major), A_ALIGNED=int(lines_a.aligned),
        B_ALIGNED=int(lines_b.aligned), **macros, **plan.macros, **store.macros,
    )  # fmt: skip
    add = None if slices == 1 else bind_adding(c, elements, b.rows, slices, epilogue)

    def run(a: Tensor, b: Tensor, c: Tensor, bias: Tensor, copy: Tensor) -> None:
        if add is None:
            product(c.queue, a.buffer, b.buffer, c.buffer, bias.buffer)
            return
        sums = bridge.empty(c.queue, (slices * c.size,), "float32")
        product(c.queue, a.buffer, b.buffer, sums.buffer, sums.buffer)
        add(c.queue, sums.buffer, c.buffer, bias.buffer)

    return run


def bind_adding(c: Tensor, elements: int, columns: int, slices: int, epilogue: Epilogue) -> Launch:
    """Returns the launch that adds each matrix's slices up in their order and writes them, through the epilogue, over
    such a C.

    It leaves open the sums (matrices, slices, elements), float32; C; and the bias.

    Args:
        elements, columns: of a matrix.
    """
    return _ADD_SLICES.bind(
        c.queue, (-(-elements // _ADDERS) * _ADDERS, c.size // elements), (_ADDERS, 1), ..., ..., ...,
        elements, columns, slices, *epilogue.flags, **epilogue.macros,
    )  # fmt: skip
