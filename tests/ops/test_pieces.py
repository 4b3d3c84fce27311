"""What GPUs move 16 bytes at a time (kernels/pieces.clh) has the bits of what CPUs move element by element."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.ops import cast as cast_module
from clamp.ops import elementwise as elementwise_module
from clamp.ops import launch, loss, loss_elementwise, multi_tensor, norm_rows, reduce, slots, softmax
from clamp.ops.cast import cast
from clamp.ops.elementwise import elementwise
from tests.ops.test_matrix_units_ptx import Tools, compiled, output_of, tools
from tests.ops.test_reduce import as_gpu
from tests.reference import MIXTURES, SPECIAL, STORAGE_DTYPES, to_device, to_numpy
from tests.sweep import sweep

__all__ = ["tools"]  # a fixture

pytestmark = pytest.mark.kernel

Both = Callable[[Callable[[], Tensor]], None]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    """Compares what a function computes in one way and in the other, the signs of zeros too."""

    def values(compute: Callable[[], Tensor], pieces: int) -> npt.NDArray[Any]:
        for module in (cast_module, elementwise_module, launch, loss_elementwise, reduce, slots):
            monkeypatch.setattr(module, "pieces_for", lambda queue: pieces)
        for module in (elementwise_module, multi_tensor):
            module._plans.known.clear()  # which are kept by shapes and types
        return to_numpy(compute())

    def compare(compute: Callable[[], Tensor]) -> None:
        got, expected = values(compute, 1), values(compute, 0)
        np.testing.assert_array_equal(got, expected)
        is_number = ~np.isnan(expected)  # of two NaNs that are added a compiler may pass either
        np.testing.assert_array_equal(np.signbit(got[is_number]), np.signbit(expected[is_number]))
        elementwise_module._plans.known.clear()

    return compare


def numbers(*shape: int) -> npt.NDArray[Any]:
    """Some of them special."""
    host = np.random.default_rng(shape).standard_normal(shape).astype(np.float32) * 100
    host.reshape(-1)[: SPECIAL.size] = SPECIAL[: host.size]
    return host


@pytest.mark.parametrize(("source", "target"), sweep(product(STORAGE_DTYPES, STORAGE_DTYPES), lambda n: n in (1, 3, 5)))
def test_casts(queue: cl.CommandQueue, both: Both, source: str, target: str) -> None:
    for size in (16, 31, 1000):
        x = to_device(queue, numbers(size), source)
        both(lambda x=x: cast(x, target))  # type: ignore[misc]


@pytest.mark.parametrize(("first", "second", "out_dtype"), sweep(MIXTURES, lambda n: n in (1, 5)))
@pytest.mark.parametrize(
    ("a", "b"),
    sweep(
        [((1000,), (1000,)), ((7, 40), (40,)), ((7, 37), (37,)), ((5, 37), (5, 1)), ((33,), (1,)), ((5, 9, 3), (9, 1))],
        lambda n: n < 3,
    ),
)
def test_functions(
    queue: cl.CommandQueue,
    both: Both,
    first: str,
    second: str,
    out_dtype: str,
    a: tuple[int, ...],
    b: tuple[int, ...],
) -> None:
    x, y = to_device(queue, numbers(*a), first), to_device(queue, numbers(*b), second)
    both(lambda: elementwise("add", out_dtype, x, y))


def test_integers(queue: cl.CommandQueue, both: Both) -> None:
    x = to_device(queue, numbers(50))
    flags = Tensor.from_host(queue, np.arange(50, dtype=np.int32) % 3)
    both(lambda: elementwise("where", "float32", flags, x, 2.0))


def _norm(x: Tensor, other: Tensor) -> Tensor:
    return norm_rows.layer_norm(x, other, other, eps=1e-5, out_dtype=x.dtype)[0]


def _norm_gradient(x: Tensor, other: Tensor) -> Tensor:
    _, mean, var = norm_rows.layer_norm(x, other, other, eps=1e-5, out_dtype="float32")
    arguments = {"dx_dtype": x.dtype, "dgamma_dtype": "float32", "dbeta_dtype": None}
    dx, dgamma, _ = norm_rows.layer_norm_backward(x, other, x, mean, var, eps=1e-5, **arguments)
    assert dgamma is not None
    return elementwise("add", "float32", dx, dgamma)


def _loss(x: Tensor, other: Tensor) -> Tensor:
    return loss.probability_loss(x, x).stats


def _loss_gradient(x: Tensor, other: Tensor) -> Tensor:
    forward = loss.hinge_loss(x, x, 1.0)
    return loss.hinge_gradient(x, forward, forward.loss, 1.0, x.dtype)


def _loss_terms(x: Tensor, other: Tensor) -> Tensor:
    return loss_elementwise.loss_terms("mse", (x, x), x.dtype)


def _unscaled(x: Tensor, other: Tensor) -> Tensor:
    y = cast(x, "float32") if x.dtype != "float32" else elementwise("copy", "float32", x)
    state = to_device(x.queue, np.array([0.5, 0.0]))
    multi_tensor.unscale_([x], [y], state.buffer)
    return y


#: what is computed of rows, and of one more row of as many elements
ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm": _norm,
    "norm_gradient": _norm_gradient,
    "softmax": lambda x, other: softmax.softmax(x, out_dtype=x.dtype),
    "softmax_gradient": lambda x, other: softmax.softmax_backward(x, x, out_dtype=x.dtype),
    "sum": lambda x, other: reduce.reduce_sum(x, 1, out_dtype="float32"),
    "expand": lambda x, other: reduce.expand(other, x.shape, 0, out_dtype=x.dtype),
    "loss": _loss,
    "loss_gradient": _loss_gradient,
    "loss_terms": _loss_terms,
    "unscaled": _unscaled,
}


@pytest.mark.parametrize("name", sweep(ROWS, lambda n: n % 3 == 0))
@pytest.mark.parametrize(("dtype", "n"), sweep([("float16", 56), *product(STORAGE_DTYPES, (37, 600))]))
def test_rows(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, both: Both, name: str, dtype: str, n: int
) -> None:
    as_gpu(monkeypatch, queue, "TREE")
    host = numbers(5, n)
    host[0] = 1.0  # no special ones, which would be in every sum
    x, other = to_device(queue, host, dtype), to_device(queue, np.linspace(-1, 1, n), dtype)
    both(lambda: ROWS[name](x, other))


@pytest.mark.slow
@pytest.mark.parametrize(("x", "y", "loads", "stores"), [("f32", "f16", 4, 2), ("bf16", "f32", 2, 4)])
def test_nvidias_assembler_makes_wide_loads_and_stores(
    tools: Tools, tmp_path: Path, x: str, y: str, loads: int, stores: int
) -> None:
    for pieces in (0, 1):
        macros = {"X_T": x, "Y_T": y, "SPAN": 16, "PIECES": pieces}
        ptx, binary = compiled(tools, tmp_path, cast_module.CAST, "sm_80", macros), tmp_path / "kernel.cubin"
        words = output_of(tools.ptxas, "-v", "-O3", "-arch=sm_80", "-o", binary, ptx)
        code = output_of(tools.cuobjdump, "-sass", binary)
        assert "0 bytes stack frame" in words
        assert (code.count("LDG.E.128"), code.count("STG.E.128")) == (loads * pieces, stores * pieces)
