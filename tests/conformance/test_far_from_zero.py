"""Rows of one sign, far from zero: what stands beyond the end of a row is neither the largest of it nor counted.

Numbers around zero hide it: a 0 beyond the end changes no sum, and is rarely the maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from tests.conformance import attention, indexing, long_axes, loss, pool, reduce
from tests.conformance.long_axes import result_of
from tests.conformance.table import Array
from tests.reference import NUMPY, integers, to_device, to_numpy

_SHORT, _LONG = 37, 5001  # of both the last vector is not whole


@dataclass(frozen=True)
class Case:
    """A call: the shape of its first argument, whose values are far from zero, and its other ones."""

    name: str
    reference: Any
    shape: tuple[int, ...]
    others: tuple[Any, ...] = ()
    slack: float = 1.0
    """allowed error, in 1e-5 of the largest element"""

    def __str__(self) -> str:
        return f"{self.name}-{'x'.join(map(str, self.shape))}"


def _ones(*shape: int) -> Array:
    return np.linspace(0.5, 1.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def _classes(n: int) -> Array:
    return np.array([5, n - 1, 0], np.int32)


_PARAMETERS = _ones(5), _ones(5)

CASES = [
    *(
        case
        for n in (_SHORT, _LONG)
        for case in (
            Case("sum", result_of(reduce.sum_), (3, n), (1,)),
            Case("mean", result_of(reduce.mean), (3, n), (1,)),
            Case("softmax", long_axes._softmax, (3, n), slack=3),
            Case("softmax", long_axes._softmax, (n, 19), (0,), slack=3),
            Case("layer_norm", long_axes._layer_norm, (3, n), (_ones(n), _ones(n), 1e-5), slack=20),
            Case("rms_norm", long_axes._rms_norm, (3, n), (_ones(n), 1e-6)),
            Case("l2_normalize", long_axes._l2_normalize, (3, n)),
            Case("cross_entropy", long_axes._cross_entropy, (3, n), (_classes(n),), slack=3),
            Case("cross_entropy", long_axes._cross_entropy, (3, n), (np.full((3, n), 1 / n),), slack=3),
            Case("argmax", result_of(indexing.argmax), (3, n), (1,)),
            Case("argmax", result_of(indexing.argmax), (n, 19), (0,)),
            Case("topk", result_of(lambda x, k: indexing.topk(x, k)[0]), (3, n), (3,)),
        )
    ),
    Case("batch_norm2d", long_axes._batch_norm, (3, 5, 7, 9), (*_PARAMETERS, None, None), slack=20),
    Case("batch_norm2d", long_axes._batch_norm, (2, 5, 43, 41), (*_PARAMETERS, None, None), slack=20),
    Case("group_norm", long_axes._group_norm, (3, 5, 7, 9), (*_PARAMETERS, 1, 1e-5), slack=20),
    Case("group_norm", long_axes._group_norm, (2, 5, 43, 41), (*_PARAMETERS, 5, 1e-5), slack=20),
    Case("global_avg_pool2d", result_of(pool.global_avg_pool2d), (2, 3, 41, 43)),
    *(Case(f"{kind}_pool2d", result_of(reference), (2, 3, 21, 23), (size, stride))
      for kind, reference in {"max": pool.max_pool2d, "avg": pool.avg_pool2d}.items()
      for size, stride in ((2, 2), (3, 2), (3, 1))),
    Case("flash_attention", result_of(attention.flash_attention), (1, 2, 67, 5),
         (_ones(1, 2, 67, 5), _ones(1, 2, 67, 5), False), slack=50),
    Case("info_nce_loss", result_of(loss.info_nce), (37, 5), (_ones(37, 5), 4.0, False), slack=50),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def amp_on() -> Iterator[None]:
    with amp.init(dtype="float16"):
        yield


def _argument(queue: cl.CommandQueue, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return integers(queue, value) if value.dtype == np.int32 else to_device(queue, value)


def _assert_near(actual: Tensor, expected: Any, slack: float) -> None:
    want, magnitude = expected if isinstance(expected, tuple) else (expected, np.abs(expected))
    bound = slack * 1e-5 * magnitude.max()
    if actual.dtype in NUMPY:
        info = ml_dtypes.finfo(NUMPY[actual.dtype])
        bound += float(info.eps) * magnitude.max() + float(info.smallest_subnormal)
    got = to_numpy(actual).reshape(want.shape)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= bound


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("middle", [-200, 200])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_far_from_zero(queue: cl.CommandQueue, case: Case, middle: int, dtype: str) -> None:
    values = middle + np.arange(np.prod(case.shape)) * 5 % 7.0  # exact in every type
    x = to_device(queue, values.reshape(case.shape), dtype)
    x.requires_grad = True
    out = getattr(ag, case.name)(Node(value=x), *[_argument(queue, other) for other in case.others])
    first = out[0] if isinstance(out, tuple) else out
    value = getattr(first, "value", first)
    incoming = _ones(*value.shape).astype(NUMPY.get(value.dtype, np.float32))
    others = [each.astype(float) if getattr(each, "dtype", None) == np.float32 else each for each in case.others]
    want, gradients = case.reference(incoming.astype(float), to_numpy(x), *others)
    if want is not None:
        _assert_near(value, want, case.slack)
    if gradients:
        Tape().backward(first, to_device(queue, incoming.astype(np.float32), value.dtype))
        _assert_near(x.grad, gradients[0], case.slack)
