"""Matrix multiplication: 16-bit or fp32 storage, fp32 sums, bias and relu in the store.

On CPU devices both operands are packed into panels for a register-blocked loop (small ones as they are read), or for
the processor's matrix unit or its fast dot product of bfloat16, which read what lies right where it is; every other
device gets tiles in local memory, and the matrix units of GPUs where these are verified to compute right (engines.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, cast

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Prepared
from clamp.ops.cast import cast_into, tell
from clamp.ops.gemm import dot_bf16
from clamp.ops.gemm.amx import expect
from clamp.ops.gemm.engines import GemmEngine, Runs, binds, choose, packs, problem_on
from clamp.ops.gemm.packed import Panels
from clamp.ops.gemm.problem import DTYPES, Epilogue, Matrix, Problem, operand_a, operand_b

#: by all that a product depends on besides the content of its operands: the result's shape, and the launch
_bound = Prepared(1024)
_are_packed = Prepared(1024)
_are_rounded = Prepared(1024)


@dataclass(frozen=True)
class PackedB:
    """The right-hand operand of `gemm`, ready for its engine; made by `pack_b` and good for any number of calls.

    It holds the values that b had when it was packed (where the engine reads b in place, b itself).
    """

    problem: Problem
    engine: GemmEngine
    matrix: Panels | Matrix

    @cached_property
    def layout(self) -> tuple[Any, ...]:
        """All that a product depends on of it, besides its content."""
        extents = [value for name, value in vars(self.matrix).items() if name != "tensor"]
        return self.engine.NAME, self.problem.b_dtype, type(self.matrix), self.matrix.tensor.dtype, *extents

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the panels take (of b itself, where the engine reads it in place)."""
        return bridge.nbytes(self.matrix.tensor)


def gemm(
    a: Tensor, b: Tensor | PackedB,
    *, transpose_a: bool = False, transpose_b: bool = False, out_dtype: str, bias: Tensor | None = None,
    relu: bool = False, engine: str | None = None, reads: str | None = None, b_copy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``relu(op(a) @ op(b) + bias)``, summed in fp32 and rounded to ``out_dtype`` once, at the end.

    Args:
        a: (…, M, K), or (…, K, M) with ``transpose_a``; float32, float16 or bfloat16.
        b: (…, K, N), or (…, N, K) with ``transpose_b``; any of the three as well, or what `pack_b` returned. The
            leading dimensions of a and b are equal, or one of the two has none and serves the other's whole batch.
        bias: (N,), read in its own storage type.
        relu: replaces negative results by zero; NaN stays.
        reads: ``"float16"`` or ``"bfloat16"``: what is float32 of a and b is rounded to that as it is read, with the
            bits of `clamp.ops.cast.cast`. Only where `rounds_as_it_reads` says so.
        b_copy: gets what b, which is float32, is rounded to: of its shape, and the dtype ``reads``.

    Returns:
        Tensor (…, M, N). With K = 0 it is the epilogue of zeros.

    Raises:
        ValueError: shapes that do not fit, an unknown dtype, tensors of different queues, an engine that does not fit.
    """
    if isinstance(b, PackedB):
        if transpose_b or engine not in (None, b.engine.NAME):
            raise ValueError("gemm: b is packed already; give transpose and engine to pack_b instead")
        right, of_b, reads, b_copy = b.matrix.tensor, b.layout, None, None
    else:
        right, of_b = b, (tuple(b.shape), b.dtype)
    # Many engines launch the same kernels for all products like this one.
    how = transpose_a, transpose_b, out_dtype, relu, engine, None if bias is None else (*bias.shape, bias.dtype)
    key = (a.context.int_ptr, tuple(a.shape), a.dtype, of_b, *how, reads, b_copy is None)
    bound = _bound.known.get(key)
    if bound is None or a.queue is not right.queue or not (bias is None or bias.queue is a.queue):
        return _product(a, b, transpose_a, transpose_b, out_dtype, bias, relu, engine, reads, b_copy, key)
    shape, launch = bound
    c = bridge.empty(a.queue, shape, out_dtype)
    launch(a, right, c, c if bias is None else bias, c if b_copy is None else b_copy)
    if b_copy is not None:
        tell(right, b_copy)
    return c


def _product(
    a: Tensor, b: Tensor | PackedB, transpose_a: bool, transpose_b: bool, out_dtype: str, bias: Tensor | None,
    relu: bool, engine: str | None, reads: str | None, b_copy: Tensor | None, key: tuple[Any, ...],
) -> Tensor:  # fmt: skip
    """`gemm`, step by step.

    Args:
        key: under which the launch is kept.
    """
    left = _matrix("gemm", "a", a, transpose_a, operand_a)
    right = b.matrix if isinstance(b, PackedB) else _matrix("gemm", "b", b, transpose_b, operand_b)
    _check(left, right, out_dtype, bias)
    queue = bridge.require_same_queue("gemm", a, right.tensor, *([] if bias is None else [bias]))
    c = bridge.empty(queue, (*(left.batch or right.batch), left.rows, right.rows), out_dtype)
    if c.size == 0:
        if b_copy is not None:
            cast_into(right.tensor, b_copy)
        return c
    if left.batch and not right.batch and not transpose_a:
        left = left.as_one_matrix()
    epilogue = Epilogue(out_dtype, bias, relu)
    if isinstance(b, PackedB):
        chosen = b.engine
        if a.dtype != b.problem.a_dtype:
            choose(replace(b.problem, a_dtype=a.dtype), chosen.NAME)
    else:
        assert isinstance(right, Matrix)
        batches = c.size // (left.rows * right.rows)
        problem = _problem(right, a.dtype, left.rows, reads, batches, left.stride_k == 1)
        if dot_bf16.fits(problem):
            problem = replace(problem, pair_launches=dot_bf16.launches(left, right, batches))
        chosen = choose(problem, engine)
    if reads is not None and not _rounds(chosen):
        raise ValueError(
            f"gemm: the engine {chosen.NAME} reads operands as they are stored: cast a and b to {reads} first"
        )
    if binds(chosen):
        launch = chosen.bind(left, right, c, epilogue, reads, b_copy is not None)
        _bound.keep(key, (c.shape, launch))
        launch(a, right.tensor, c, epilogue.bias_or(c), c if b_copy is None else b_copy)
        if b_copy is not None:
            tell(right.tensor, b_copy)
    else:
        cast(Runs, chosen).run(left, _packed(chosen, right), c, epilogue)
    return c


def pack_b(
    b: Tensor, *,
    transpose: bool = False, a_dtype: str | None = None, rows: int | None = None, engine: str | None = None,
) -> PackedB:  # fmt: skip
    """Prepares ``b`` for repeated use in `gemm`: a weight in the steps of an RNN, say.

    Args:
        b: (…, K, N), or (…, N, K) with ``transpose``; float32, float16 or bfloat16.
        a_dtype: storage type of the matrices it will be multiplied with; by default b's own.
        rows: of these matrices, if that is known; others may come nevertheless.

    Raises:
        ValueError: fewer than two dimensions, an unknown dtype, or an engine that does not fit.
    """
    right = _matrix("pack_b", "b", b, transpose, operand_b)
    problem = _problem(right, a_dtype or b.dtype, rows, None)
    chosen = choose(problem, engine)
    return PackedB(problem, chosen, _packed(chosen, right))


def _packed(engine: GemmEngine, right: Matrix | Panels) -> Matrix | Panels:
    """op(B) as the engine takes it, if it is not so already."""
    return engine.pack(right) if isinstance(right, Matrix) and packs(engine) else right


def is_packed(a: Tensor, b: Tensor, *, transpose_b: bool = False) -> bool:
    """Returns whether the engine of the product copies b into another form, so that `pack_b` pays if there are
    several."""
    key = (b.context.int_ptr, tuple(a.shape), a.dtype, tuple(b.shape), b.dtype, transpose_b)
    known: bool | None = _are_packed.known.get(key)
    if known is None:
        right = _matrix("pack_b", "b", b, transpose_b, operand_b)
        problem = problem_on(b.queue, a.dtype, b.dtype, right.k, right.rows, prod(a.shape[:-1]), a_along_k=True)
        chosen = choose(problem)
        known = _are_packed.keep(key, packs(chosen))
    return known


def rounds_as_it_reads(
    a: Tensor, b: Tensor, dtype: str, *, transpose_a: bool = False, transpose_b: bool = False
) -> bool:  # fmt: skip
    """Returns whether `gemm` takes float32 for a or b where ``dtype``, one of 16 bits, is meant, so that no cast is
    launched; and can write b's copy, if b is float32 and not transposed."""
    if dtype not in bridge.HALF_DTYPES or not {a.dtype, b.dtype} <= {"float32", dtype}:
        return False  # it would have to widen, or to change one 16-bit type into the other
    key = (b.context.int_ptr, tuple(a.shape), a.dtype, tuple(b.shape), b.dtype, dtype, transpose_a, transpose_b)
    known: bool | None = _are_rounded.known.get(key)
    if known is None:
        left, right = operand_a(a, transpose_a), operand_b(b, transpose_b)
        if left.batch and not right.batch and not transpose_a:
            left = left.as_one_matrix()
        batches = prod(left.batch or right.batch)
        problem = _problem(right, a.dtype, left.rows, dtype, batches, left.stride_k == 1)
        expect(b.queue, problem)
        chosen = choose(problem)
        # a copy is dense, with neighbouring columns together
        known = _rounds(chosen) and (transpose_b or not right.batch)
        _are_rounded.keep(key, known)
    return known


def _rounds(engine: GemmEngine) -> bool:
    return binds(engine) and engine.ROUNDS


def _problem(
    right: Matrix, a_dtype: str, rows: int | None, reads: str | None, batches: int = 1, a_along_k: bool = False
) -> Problem:
    a_dtype, b_dtype = (reads if reads and x == "float32" else x for x in (a_dtype, right.tensor.dtype))
    return problem_on(right.tensor.queue, a_dtype, b_dtype, right.k, right.rows, rows, batches, a_along_k)


def _matrix(function: str, name: str, x: Tensor, transpose: bool, view: Callable[[Tensor, bool], Matrix]) -> Matrix:
    if len(x.shape) < 2:
        raise ValueError(f"{function}: {name} has shape {x.shape}, but a matrix needs two dimensions; reshape it")
    if x.dtype not in bridge.STORAGE:
        raise ValueError(f"{function}: {name} is {x.dtype}; cast it to one of {', '.join(DTYPES)}")
    return view(x, transpose)


def _check(left: Matrix, right: Matrix | Panels, out_dtype: str, bias: Tensor | None) -> None:
    shapes = f"op(a) {(*left.batch, left.rows, left.k)} @ op(b) {(*right.batch, right.k, right.rows)}"
    if left.k != right.k:
        raise ValueError(
            f"gemm: {shapes}: the inner dimensions {left.k} and {right.k} differ; transpose_a or transpose_b may help"
        )
    if left.batch and right.batch and left.batch != right.batch:
        raise ValueError(
            f"gemm: {shapes}: the leading dimensions {left.batch} and {right.batch} differ; "
            "expand one operand to the other's, or pass one matrix for the whole batch"
        )
    if out_dtype not in bridge.STORAGE:
        raise ValueError(f"gemm: out_dtype is {out_dtype!r}; it must be one of {', '.join(DTYPES)}")
    if bias is None:
        return
    if tuple(bias.shape) != (right.rows,):
        raise ValueError(f"gemm: {shapes}: bias has shape {tuple(bias.shape)}; it must be ({right.rows},)")
    if bias.dtype not in bridge.STORAGE:
        raise ValueError(f"gemm: bias is {bias.dtype}; cast it to one of {', '.join(DTYPES)}")
