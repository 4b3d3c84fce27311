"""A product: by values, for the choice of an engine; and by its operands and its store, for the engine."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import Capabilities

#: what matrices may be stored as
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Problem:
    """A product as it is known when B is packed, whichever A will come."""

    a_dtype: str
    b_dtype: str  # a_dtype, b_dtype: storage types
    k: int
    columns: int  # k, columns: of op(B)
    device: Capabilities  # what the device can do
    verified: frozenset[str] = frozenset()  # names of the engines that must be verified on the device, and are
    rows: int | None = None  # of op(A), if that is known
    batches: int = 1  # pairs of matrices multiplied at once
    a_along_k: bool = False  # whether the numbers of a row of op(A) lie side by side, as far as that is known
    # launches that the processor's dot product takes for operands that lie as these do, if that is known
    pair_launches: int | None = None

    def __str__(self) -> str:
        return f"{self.a_dtype} by {self.b_dtype}"


@dataclass(frozen=True)
class Matrix:
    """op(A) or op(B) in a tensor: for each of ``batch`` matrices, ``rows`` vectors of length ``k``.

    For A a row is a row of op(A); for B it is a column of op(B): both are walked along k. Strides are in elements.
    """

    tensor: Tensor
    batch: tuple[int, ...]
    rows: int
    k: int
    stride_row: int
    stride_k: int

    @property
    def storage(self) -> str:
        """The storage type's name in kernels."""
        return bridge.STORAGE[self.tensor.dtype]

    @property
    def stride_batch(self) -> int:
        """Elements from one matrix to the next; 0 where one matrix serves a whole batch."""
        return self.rows * self.k if self.batch else 0

    def as_one_matrix(self) -> Matrix:
        """The rows of the whole batch below one another. Rows must be contiguous."""
        return Matrix(self.tensor, (), prod(self.batch) * self.rows, self.k, self.k, 1)


def operand_a(a: Tensor, transpose: bool) -> Matrix:
    """``a`` (…, M, K), or (…, K, M) if transposed, by rows of op(A)."""
    *batch, first, second = a.shape
    rows, k, strides = (second, first, (1, second)) if transpose else (first, second, (second, 1))
    return Matrix(a, tuple(batch), rows, k, *strides)


def operand_b(b: Tensor, transpose: bool) -> Matrix:
    """``b`` (…, K, N), or (…, N, K) if transposed, by columns of op(B)."""
    return operand_a(b, not transpose)


@dataclass(frozen=True)
class Epilogue:
    """The store of a sum: adds ``bias`` (N,), applies relu, rounds to ``out_dtype``, in this order."""

    out_dtype: str
    bias: Tensor | None = None
    relu: bool = False

    @property
    def macros(self) -> dict[str, str]:
        """Storage types of the output and of the bias, for the kernel."""
        bias_dtype = self.bias.dtype if self.bias is not None else "float32"
        return {"OUT_T": bridge.STORAGE[self.out_dtype], "BIAS_T": bridge.STORAGE[bias_dtype]}

    @property
    def types(self) -> tuple[int, int]:
        """The same for kernels whose arguments they are (kernels/store_tile.clh)."""
        bias_dtype = self.bias.dtype if self.bias is not None else "float32"
        return DTYPES.index(self.out_dtype), DTYPES.index(bias_dtype)

    @property
    def flags(self) -> tuple[bool, bool]:
        """Returns whether there is a bias, and a relu."""
        return self.bias is not None, self.relu

    def bias_or(self, other: Tensor) -> Tensor:
        """The bias; ``other`` if there is none, because a kernel's pointer must point somewhere."""
        return other if self.bias is None else self.bias
