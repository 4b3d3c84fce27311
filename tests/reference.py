"""What the kernel tests share: moving arrays in and out of storage types, and comparing in ulps.

References are computed in float64 from the values as stored, so that a test measures the kernel and not the
rounding of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp.bridge import Tensor

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
STORAGE_DTYPES = ("float32", "float16", "bfloat16")
HALF_DTYPES = ("float16", "bfloat16")
#: nine of the 27 mixtures of three tensors: each pair of types stands in each pair of places
MIXTURES = [
    (x, y, STORAGE_DTYPES[(i + j) % 3]) for i, x in enumerate(STORAGE_DTYPES) for j, y in enumerate(STORAGE_DTYPES)
]

#: inf, nan, signed zeros, fp16 subnormals, the largest half, values beyond it, fp32-only magnitudes
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 65504.0, -65504.0, 65519.0, 65520.0, 1e5, -1e30, 6e-8, -6e-8, 3e-5,
     2.0**-14, 2.0**-24, 2.0**-25, 0.1, 3.14159, 2047.0, 2049.0],
    dtype=np.float32,
)  # fmt: skip


def quantize(array: npt.ArrayLike, dtype: str) -> npt.NDArray[Any]:
    """The array in a storage type's numpy dtype (rounded to nearest even)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(array).astype(NUMPY[dtype])


def to_device(queue: cl.CommandQueue, array: npt.ArrayLike, dtype: str = "float32") -> Tensor:
    """A device tensor holding the array rounded to ``dtype``."""
    host = np.ascontiguousarray(quantize(array, dtype))
    if host.size == 0:  # netcl makes empty tensors, but moves none between host and device
        return Tensor.from_shape(queue, host.shape, dtype=dtype)
    return Tensor.from_host(queue, host.view(np.uint16) if dtype == "bfloat16" else host, dtype=dtype)


def integers(queue: cl.CommandQueue, values: npt.ArrayLike) -> Tensor:
    """An int32 tensor: indices, labels, positions."""
    return Tensor.from_host(queue, np.asarray(values, np.int32), dtype="int32")


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor's values as float64 (ints stay ints)."""
    if tensor.size == 0:
        return np.empty(tensor.shape)
    host = tensor.to_host()
    if host.dtype == np.uint16:  # netcl's words for bfloat16; under AMP they are read as float32
        host = host.view(ml_dtypes.bfloat16)
    return host.astype(np.float64) if host.dtype.kind != "i" else host


def ulp(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """Distance between neighbouring numbers of ``dtype`` at each value; finite everywhere."""
    info = ml_dtypes.finfo(NUMPY[dtype])
    magnitude = np.clip(np.abs(np.asarray(values, np.float64)), float(info.smallest_normal), float(info.max))
    return np.asarray(2.0 ** (np.floor(np.log2(magnitude)) - info.nmant))


def assert_same(actual: Iterable[npt.ArrayLike], expected: Iterable[npt.ArrayLike]) -> None:
    """As many arrays as expected, each with the expected values; NaN is NaN."""
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(actual: Tensor, expected: npt.ArrayLike, *, ulps: float = 1.0, slack: npt.ArrayLike = 0.0) -> None:
    """The tensor equals the float64 reference to ``ulps`` of its own dtype plus an absolute ``slack``.

    Infinities must agree in place and sign (a reference beyond the type's range counts as infinite; within
    rounding of the largest number either is right), NaNs in place.
    """
    got = to_numpy(actual)
    want = np.asarray(expected, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    largest = float(ml_dtypes.finfo(NUMPY[actual.dtype]).max)
    allowed = ulps * ulp(want, actual.dtype) + np.asarray(slack, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = quantize(want, actual.dtype).astype(np.float64)
        same = (got == rounded) | (np.isnan(got) & np.isnan(want))
        near_limit = np.isfinite(want) & (np.abs(np.abs(want) - largest) <= allowed + ulp(largest, actual.dtype))  # type: ignore[operator]
        clipped = np.where(np.isinf(got) & near_limit, np.sign(got) * largest, got)
        close = np.isfinite(want) & np.isfinite(clipped) & (np.abs(clipped - want) <= allowed + (near_limit * allowed))
    bad = ~(same | close)
    if bad.any():
        index = tuple(np.argwhere(bad)[0])
        error = np.abs(got - want)[bad] / ulp(want, actual.dtype)[bad]
        raise AssertionError(
            f"{bad.sum()} of {bad.size} values of {actual.dtype} differ, first at {index}: "
            f"got {got[index]!r}, expected {want[index]!r}; worst error {np.nanmax(error, initial=0.0):.3g} ulp"
        )
