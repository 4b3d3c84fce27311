"""The InfoNCE loss: cross entropy of the similarities of queries and keys, by this library's matrix product."""

from __future__ import annotations

from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.gemm import gemm
from clamp.ops.launch import launch, plan_rows
from clamp.ops.norm_rows import l2_normalize, l2_normalize_backward
from clamp.ops.reduce import reduce_sum

ROW_LOSS = Kernel("info_nce.cl", "row_loss", "-")
COLUMN_LOSS = Kernel("info_nce.cl", "column_loss", "-")
SIMILARITY_SLOPES = Kernel("info_nce.cl", "similarity_slopes", "- - - G")

_EPSILON = 1e-8  # what netcl adds to a norm before dividing by it


@dataclass(frozen=True)
class Rows:
    """Queries or keys that were normalized before they were multiplied."""

    normalized: Tensor  # (N, n), in float32
    norms: Tensor  # N, float32


@dataclass(frozen=True)
class InfoNCE:
    """The loss, with what backward needs."""

    loss: Tensor  # float32, shape (1,)
    queries: Rows | None
    keys: Rows | None  # queries, keys: None where they are multiplied as they were given
    similarities: Tensor  # (N, N), float32
    tops: Tensor
    totals: Tensor  # tops, totals: of the softmax of every row, and after those, if symmetric, of every column
    temperature: float  # what similarities are divided by
    symmetric: bool  # whether columns count as rows do
    divisor: float  # what the sum of the rows' (and columns') losses was divided by


def info_nce(
    queries: Tensor, keys: Tensor, *, temperature: float, normalize: bool, mean: bool, symmetric: bool
) -> InfoNCE:
    """Cross entropy of ``softmax(q @ k.T / temperature)`` against the diagonal, summed or averaged over the rows.

    Args:
        normalize: rows are divided by their norm plus 1e-8 first.
        symmetric: the average of this loss and that of the transposed similarities.
    """
    n, queue = queries.shape[0], queries.queue
    q, k = (Rows(*l2_normalize(x, eps=_EPSILON, out_dtype="float32")) if normalize else None for x in (queries, keys))
    similarities = gemm(_multiplied(queries, q), _multiplied(keys, k), transpose_b=True, out_dtype="float32")
    sides = 2 if symmetric else 1
    losses, tops, totals = (bridge.empty(queue, (sides, n), "float32") for _ in range(3))
    if n:
        plan = plan_rows(queue, n, n)
        tensors = (similarities, losses, tops, totals)
        ROW_LOSS(queue, *plan.sizes, *tensors, n, plan.each, temperature, **plan.macros)
        if symmetric:
            COLUMN_LOSS(queue, *launch(queue, -(-n // 16)), *tensors, n, n, temperature, WG=1)
    divisor = float(sides * (max(n, 1) if mean else 1))
    loss = reduce_sum(losses, out_dtype="float32", divisor=divisor)
    return InfoNCE(loss, q, k, similarities, tops, totals, temperature, symmetric, divisor)


def _multiplied(given: Tensor, rows: Rows | None) -> Tensor:
    return given if rows is None else rows.normalized


def info_nce_gradients(
    forward: InfoNCE, queries: Tensor, keys: Tensor, grad: Tensor, query_dtype: str | None, key_dtype: str | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients for queries and keys, those of the forward, in these dtypes; None for one whose dtype is None."""
    similarities, q, k = forward.similarities, forward.queries, forward.keys
    n, queue = similarities.shape[0], similarities.queue
    slopes = bridge.empty(queue, (n, n), "float32")
    if n:
        plan = plan_rows(queue, n, n)
        SIMILARITY_SLOPES(
            queue, *plan.sizes, similarities, forward.tops, forward.totals, grad, slopes, n, plan.each,
            forward.temperature, forward.divisor,
            SLOPES=1, **plan.macros, **({"SYMMETRIC": 1} if forward.symmetric else {}),
        )  # fmt: skip
    return (
        None if query_dtype is None else _gradient(slopes, False, _multiplied(keys, k), queries, q, query_dtype),
        None if key_dtype is None else _gradient(slopes, True, _multiplied(queries, q), keys, k, key_dtype),
    )


def _gradient(
    slopes: Tensor, transpose: bool, others: Tensor, given: Tensor, own: Rows | None, out_dtype: str
) -> Tensor:
    """Gradient for one side's rows, as they were given, from the slopes of similarities and the other side."""
    if own is None:
        return gemm(slopes, others, transpose_a=transpose, out_dtype=out_dtype)
    of_normalized = gemm(slopes, others, transpose_a=transpose, out_dtype="float32")
    return l2_normalize_backward(given, of_normalized, own.norms, eps=_EPSILON, dx_dtype=out_dtype)
