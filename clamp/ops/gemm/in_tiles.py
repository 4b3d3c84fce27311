"""Products whose work-groups compute a tile of C each: how their kernels are launched, whole or in slices of k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
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
    """A launch of a kernel that computes in tiles."""

    a: Matrix
    b: Matrix
    c: Tensor
    epilogue: Epilogue  # a, b, c, epilogue: as an engine's `run` has them
    plan: Tiling  # what it is cut into
    slice_k: int  # steps of k that are summed by themselves; whole tiles
    slices: int  # how many such there are; c has a matrix for each

    @property
    def is_full(self) -> bool:
        """Returns whether every tile lies inside of the matrices, at every step."""
        a, b, plan = self.a, self.b, self.plan
        return a.k > 0 and a.rows % plan.rows == b.rows % plan.columns == a.k % self.slice_k == 0

    def __call__(self, kernel: Kernel, **macros: object) -> None:
        """Launches it, built with ``macros`` beside those that say how the operands lie."""
        a, b, c, plan, epilogue = self.a, self.b, self.c, self.plan, self.epilogue
        lines_a, lines_b = Lines.of(a), Lines.of(b)
        groups = tiles_of(plan, a.rows, b.rows) * (c.size // (a.rows * b.rows))
        kernel(
            c.queue, (groups * plan.threads,), (plan.threads,), a.tensor, b.tensor, c, epilogue.bias_or(c),
            a.rows, b.rows, a.k, lines_a.pitch, a.stride_batch, lines_b.pitch, b.stride_batch,
            self.slice_k, self.slices, *epilogue.flags,
            A_K_MAJOR=int(lines_a.k_major), B_K_MAJOR=int(lines_b.k_major), A_ALIGNED=int(lines_a.aligned),
            B_ALIGNED=int(lines_b.aligned), **macros, **plan.macros, **epilogue.macros,
        )  # fmt: skip


def compute(
    launch: Callable[[TileRun], None], a: Matrix, b: Matrix, c: Tensor, epilogue: Epilogue, plan: Tiling, slices: int
) -> None:
    """Computes a product by one launch; by one for sums of at most ``slices`` parts of k, and one that adds these."""
    slice_k = max(-(-a.k // (slices * plan.k)), 1) * plan.k
    slices = max(-(-a.k // slice_k), 1)
    if slices == 1:
        launch(TileRun(a, b, c, epilogue, plan, slice_k, slices))
        return
    partial_sums = bridge.empty(c.queue, (slices * c.size,), "float32")
    launch(TileRun(a, b, partial_sums, Epilogue("float32"), plan, slice_k, slices))
    add_slices(partial_sums, c, a.rows * b.rows, b.rows, slices, epilogue)


def add_slices(partial_sums: Tensor, c: Tensor, elements: int, columns: int, slices: int, epilogue: Epilogue) -> None:
    """Adds each matrix's slices up in their order and writes them, through the epilogue, over c.

    Args:
        partial_sums: (matrices, slices, elements), float32.
        elements, columns: of a matrix.
    """
    _ADD_SLICES(
        c.queue, (-(-elements // _ADDERS) * _ADDERS, c.size // elements), (_ADDERS, 1), partial_sums, c,
        epilogue.bias_or(c), elements, columns, slices, *epilogue.flags, **epilogue.macros,
    )  # fmt: skip
