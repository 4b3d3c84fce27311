"""Products whose work-groups compute a tile of C each: how their kernels are launched, whole or in slices of k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.launches import Launch
from clamp.opencl.program import Kernel
from clamp.ops.gemm.plan import Tiling, tiles_of
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


@dataclass(frozen=True)
class TileRun:
    """Launches of a kernel that computes in tiles, of operands that lie as these do."""

    a: Matrix
    b: Matrix
    queue: cl.CommandQueue
    matrices: int  # of C; where k is summed in slices, of sums
    epilogue: Epilogue  # a, b, epilogue: as an engine's `run` has them
    plan: Tiling  # what it is cut into
    slice_k: int  # steps of k that are summed by themselves; whole tiles
    slices: int  # how many such there are of a matrix

    @property
    def is_full(self) -> bool:
        """Returns whether every tile lies inside of the matrices, at every step."""
        a, b, plan = self.a, self.b, self.plan
        return a.k > 0 and a.rows % plan.rows == b.rows % plan.columns == a.k % self.slice_k == 0

    def bind(self, kernel: Kernel, **macros: object) -> Launch:
        """The launch that leaves A, B, C and the bias open, built with ``macros`` beside those that say how the
        operands lie."""
        a, b, plan, epilogue = self.a, self.b, self.plan, self.epilogue
        lines_a, lines_b = Lines.of(a), Lines.of(b)
        groups = tiles_of(plan, a.rows, b.rows) * self.matrices
        return kernel.bind(
            self.queue, (groups * plan.threads,), (plan.threads,), ..., ..., ..., ...,
            a.rows, b.rows, a.k, lines_a.pitch, a.stride_batch, lines_b.pitch, b.stride_batch,
            self.slice_k, self.slices, *epilogue.flags,
            A_K_MAJOR=int(lines_a.k_major), B_K_MAJOR=int(lines_b.k_major), A_ALIGNED=int(lines_a.aligned),
            B_ALIGNED=int(lines_b.aligned), **macros, **plan.macros, **epilogue.macros,
        )  # fmt: skip


def bind(
    launch: Callable[[TileRun], Launch], a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, plan: Tiling, slices: int
) -> Callable[..., None]:
    """Products of operands that lie as these do, called as `clamp.ops.gemm.engines.Binds` says: by one launch, or by
    one for sums of at most ``slices`` parts of k, and one that adds these."""
    slice_k = max(-(-a.k // (slices * plan.k)), 1) * plan.k
    slices = max(-(-a.k // slice_k), 1)
    elements = a.rows * b.rows
    of_all = partial(TileRun, a, b, c.queue, c.size // elements * slices)
    if slices == 1:
        product = launch(of_all(epilogue, plan, slice_k, slices))

        def run(a: Tensor, b: Tensor, c: Tensor, bias: Tensor, copy: Tensor) -> None:
            product(c.queue, a.buffer, b.buffer, c.buffer, bias.buffer)

        return run

    sums = launch(of_all(Epilogue("float32"), plan, slice_k, slices))
    add = bind_adding(c, elements, b.rows, slices, epilogue)

    def run_in_slices(a: Tensor, b: Tensor, c: Tensor, bias: Tensor, copy: Tensor) -> None:
        partial_sums = bridge.empty(c.queue, (slices * c.size,), "float32")
        sums(c.queue, a.buffer, b.buffer, partial_sums.buffer, partial_sums.buffer)
        add(c.queue, partial_sums.buffer, c.buffer, bias.buffer)

    return run_in_slices


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
