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
from clamp.ops.cast import cast
from clamp.ops.elementwise import elementwise
from tests.ops.test_matrix_units_ptx import Tools, compiled, output_of, tools
from tests.reference import SPECIAL, STORAGE_DTYPES, to_device
from tests.sweep import sweep

__all__ = ["tools"]  # a fixture

pytestmark = pytest.mark.kernel

Both = Callable[[Callable[[], Tensor]], None]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    """Compares the bits of what a function computes in one way and in the other."""

    def bits(compute: Callable[[], Tensor], pieces: int) -> npt.NDArray[Any]:
        for module in (cast_module, elementwise_module):
            monkeypatch.setattr(module, "pieces_for", lambda queue: pieces)
        elementwise_module._plans.known.clear()  # which are kept by shapes and types
        host: npt.NDArray[Any] = compute().to_host()
        return host.view(np.uint8)

    def compare(compute: Callable[[], Tensor]) -> None:
        np.testing.assert_array_equal(bits(compute, 1), bits(compute, 0))
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


@pytest.mark.parametrize(
    ("types", "out_dtype"),
    sweep(product(product(STORAGE_DTYPES, STORAGE_DTYPES), STORAGE_DTYPES), lambda n: n in (5, 12)),
)
@pytest.mark.parametrize(
    ("a", "b"),
    sweep([((1000,), (1000,)), ((7, 40), (40,)), ((7, 37), (37,)), ((5, 37), (5, 1)), ((33,), (1,))], lambda n: n < 3),
)
def test_functions(
    queue: cl.CommandQueue,
    both: Both,
    types: tuple[str, str],
    out_dtype: str,
    a: tuple[int, ...],
    b: tuple[int, ...],
) -> None:
    x, y = to_device(queue, numbers(*a), types[0]), to_device(queue, numbers(*b), types[1])
    both(lambda: elementwise("add", out_dtype, x, y))


def test_integers(queue: cl.CommandQueue, both: Both) -> None:
    x = to_device(queue, numbers(50))
    flags = Tensor.from_host(queue, np.arange(50, dtype=np.int32) % 3)
    both(lambda: elementwise("where", "float32", flags, x, 2.0))


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
