"""Joining and cutting along an axis are numpy's, bit for bit; what no part covers is zero."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.ops import concat, launch
from clamp.ops.concat import Part, assemble, cat, overwrite, split, widest_word, write_into
from tests.ops.plans import plans_of
from tests.reference import SPECIAL, assert_close, quantize, to_device, to_numpy

pytestmark = pytest.mark.kernel

#: rows, the inner extent, and the parts' lengths: one long row, tiny rows, rows that are not whole vectors, many parts
LAYOUTS = [
    (1, 1, (37, 1, 100)),
    (40, 1, (1, 3)),
    (3, 5, (7, 20, 1, 2)),
    (5, 16, (1, 2)),
    (2, 3, (1, 2, 0, 3, 4, 5, 6, 7, 8, 9, 10)),
]


plan = plans_of(concat, launch)


def words(queue: cl.CommandQueue, shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[Tensor, np.ndarray]:
    """A tensor of random bits (NaNs with payloads, infinities, subnormals among them), and its bits on the host."""
    rng = np.random.default_rng(seed)
    bits: np.ndarray
    if dtype in ("float16", "bfloat16"):
        bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
        host = bits.view(np.float16) if dtype == "float16" else bits
    else:
        bits = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
        host = bits.view(np.int32 if dtype == "int32" else np.float32)
    if bits.size == 0:
        return Tensor.from_shape(queue, shape, dtype=dtype), bits
    return Tensor.from_host(queue, host, dtype=dtype), bits


def bits_of(x: Tensor) -> np.ndarray:
    host = x.to_host()
    return host.view(np.uint16 if host.itemsize == 2 else np.uint32)


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
@pytest.mark.parametrize(("rows", "inner", "lengths"), LAYOUTS)
def test_bits_are_joined_and_cut(
    queue: cl.CommandQueue, rows: int, inner: int, lengths: tuple[int, ...], dtype: str
) -> None:
    parts = [words(queue, (rows, length, inner), dtype, seed) for seed, length in enumerate(lengths)]
    joined = np.concatenate([bits for _, bits in parts], axis=1)
    whole = cat([x for x, _ in parts], 1, out_dtype=dtype)
    assert whole.dtype == dtype
    np.testing.assert_array_equal(bits_of(whole), joined)
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    pieces = split(whole, -2, list(zip(starts, lengths, strict=True)), out_dtypes=[dtype] * len(lengths))
    for piece, (_, bits) in zip(pieces, parts, strict=True):
        assert piece.shape == bits.shape
        if bits.size:
            np.testing.assert_array_equal(bits_of(piece), bits)


@pytest.mark.usefixtures("plan")
def test_mixed_dtypes_are_converted(queue: cl.CommandQueue) -> None:
    values = np.tile(SPECIAL, 3)[None].repeat(2, 0)
    parts = [to_device(queue, values, dtype) for dtype in ("float16", "float32", "bfloat16", "float16")]
    whole = cat(parts, 1, out_dtype="float32")
    np.testing.assert_array_equal(to_numpy(whole), np.concatenate([to_numpy(x) for x in parts], 1))
    n = values.shape[1]
    dtypes = ["bfloat16", "float16", "float32", "float16"]
    for number, piece in enumerate(split(whole, 1, [(k * n, n) for k in range(4)], out_dtypes=dtypes)):
        assert piece.dtype == dtypes[number]
        assert_close(piece, to_numpy(parts[number]), ulps=0.51)


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_no_part_covers_is_zero(queue: cl.CommandQueue, dtype: str) -> None:
    for inner in (1, 3, 18):
        expected = np.zeros((3, 30, inner))
        parts = []
        for start, length, stored in ((21, 4, dtype), (2, 7, dtype), (9, 1, "bfloat16"), (29, 1, dtype)):
            x = to_device(queue, np.random.default_rng(start).integers(-9, 9, (3, length, inner)), stored)
            parts.append(Part(start, length, x))
            expected[:, start : start + length] = to_numpy(x)
        whole = assemble(queue, expected.shape, 1, parts, dtype)
        assert whole.dtype == dtype
        np.testing.assert_array_equal(to_numpy(whole), expected)


@pytest.mark.usefixtures("plan")
def test_writing_in_place(queue: cl.CommandQueue) -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        target = to_device(queue, np.arange(60).reshape(3, 5, 4), "float16")
        expected = to_numpy(target)
        write_into(target, to_device(queue, np.full((3, 2, 4), -0.1), dtype), 1, 3)
        expected[:, 3:] = quantize(quantize(-0.1, dtype), "float16")
        np.testing.assert_array_equal(to_numpy(target), expected)
    overwrite(target, None)
    np.testing.assert_array_equal(to_numpy(target), np.zeros((3, 5, 4)))


@pytest.mark.unsimulated
@pytest.mark.slow
@pytest.mark.usefixtures("plan")
def test_large_tensors(queue: cl.CommandQueue) -> None:
    for rows, lengths in ((1, (300_007, 5)), (200_003, (1, 2, 5)), (301, (1000, 17))):
        parts = [words(queue, (rows, length), "float16", length) for length in lengths]
        whole = cat([x for x, _ in parts], 1, out_dtype="float16")
        np.testing.assert_array_equal(bits_of(whole), np.concatenate([bits for _, bits in parts], 1))


def test_the_widest_word_divides_every_stretch() -> None:
    assert widest_word(2, 1, 7, (3,), is_cpu=False) == 2
    assert widest_word(2, 2, 7, (3,), is_cpu=False) == 4
    assert widest_word(2, 8, 7, (3,), is_cpu=False) == 16
    assert widest_word(4, 8, 7, (3,), is_cpu=True) == 4
    assert widest_word(2, 1, 4, (0, 4), is_cpu=False) == 8
