"""A matrix product in float64 of the stored values, and the bound within which `gemm` is compared with it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.ops.engine import always
from clamp.ops.gemm import engines, gemm
from tests.reference import assert_close, quantize, to_device

NN, NT, TN, TT = ({"transpose_a": a, "transpose_b": b} for a in (False, True) for b in (False, True))
TRANSPOSES = pytest.mark.parametrize("transposes", [NN, NT, TN, TT], ids=["NN", "NT", "TN", "TT"])
Array = npt.NDArray[Any]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def laid_out(
    queue: cl.CommandQueue, a: Array, b: Array, dtypes: tuple[str, str], transpose_a: bool = False,
    transpose_b: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operands whose op(a) and op(b) these are."""
    left, right = (
        to_device(queue, np.swapaxes(x, -1, -2) if transpose else x, dtype)
        for x, transpose, dtype in zip((a, b), (transpose_a, transpose_b), dtypes, strict=True)
    )
    return left, right


def stored(x: Array, dtype: str) -> Array:
    return quantize(x, dtype).astype(np.float64)


def by_plan(patch: pytest.MonkeyPatch, unit: Any, plan: Any, slices: int = 1) -> str:
    """Makes gemm know an engine of one plan only, and returns its name.

    Args:
        unit: a matrix unit, or the tiled engine.
    """
    run = partial(unit.compute, plan=plan, slices=slices)
    words = {"NAME": "planned", "TAKES": "anything that it multiplies", "IN_WORDS": "by a plan"}
    engine = SimpleNamespace(**words, fits=always, pays=always, pack=lambda b: b, run=run)
    patch.setattr(engines, "ENGINES", (engine,))
    return "planned"


def check(
    queue: cl.CommandQueue,
    a: Array,
    b: Array,
    types: tuple[str, str, str] = ("float16", "float16", "float16"),
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: tuple[Array, str] | None = None,
    relu: bool = False,
    **options: Any,
) -> Tensor:
    """Runs gemm on op(a) = ``a`` and op(b) = ``b`` and compares it within the promised bound."""
    a_type, b_type, out_dtype = types
    transposes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    result = gemm(
        *laid_out(queue, a, b, (a_type, b_type), **transposes),
        **transposes,
        out_dtype=out_dtype,
        bias=None if bias is None else to_device(queue, *bias),
        relu=relu,
        **options,
    )
    assert result.dtype == out_dtype
    x, y = stored(a, a_type), stored(b, b_type)
    expected, magnitude = x @ y, np.abs(x) @ np.abs(y)
    if bias is not None:
        expected, magnitude = expected + stored(*bias), magnitude + np.abs(stored(*bias))
    if relu:
        expected = np.maximum(expected, 0)
    assert_close(result, expected, slack=(a.shape[-1] + 1) * 2.0**-24 * magnitude)
    return result


def check_special_values(queue: cl.CommandQueue, n: int, types: tuple[str, str], engine: str) -> None:
    """Infinities, NaNs, a negative zero and what is subnormal in half go where numpy puts them."""
    a, b = random(15, 19), random(19, n, seed=1)
    a[2, 3], a[5, 0], a[14, 18], a[7, 7] = np.inf, np.nan, -np.inf, -0.0
    b[4, 6], b[18, n - 1], b[3, 8], b[9, 0] = np.nan, np.inf, 0.0, 6e-8
    x, y = stored(a, types[0]), stored(b, types[1])
    result = gemm(to_device(queue, a, types[0]), to_device(queue, b, types[1]), out_dtype="float32", engine=engine)
    magnitude = np.nan_to_num(np.abs(x), posinf=0) @ np.nan_to_num(np.abs(y), posinf=0)
    with np.errstate(invalid="ignore"):
        assert_close(result, x @ y, slack=19 * 2.0**-24 * magnitude)
