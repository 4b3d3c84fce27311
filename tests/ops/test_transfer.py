"""Fills and copies as launches: every byte that was asked for, and none beside it."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clamp.ops import transfer

pytestmark = pytest.mark.kernel


def device_bytes(queue: cl.CommandQueue, host: np.ndarray) -> cl.Buffer:
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    return cl.Buffer(queue.context, flags, hostbuf=host)


def read(queue: cl.CommandQueue, buffer: cl.Buffer) -> np.ndarray:
    host = np.empty(buffer.size, np.uint8)
    cl.enqueue_copy(queue, host, buffer)
    return host


@pytest.mark.parametrize("pattern", [b"\7", np.float16(1.5), np.float32(-3.25), np.float64(1e300)])
@pytest.mark.parametrize(("offset", "words"), [(0, 1), (8, 3), (16, 1025), (40, 2048), (0, 0)])
def test_fills(queue: cl.CommandQueue, pattern: object, offset: int, words: int) -> None:
    content = np.frombuffer(memoryview(pattern).tobytes(), np.uint8)
    size = words * len(content)
    expected = np.arange(offset + size + 9, dtype=np.uint8)
    buffer = device_bytes(queue, expected)
    transfer.fill(queue, buffer, pattern, offset, size)
    expected[offset : offset + size] = np.tile(content, words)
    np.testing.assert_array_equal(read(queue, buffer), expected)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 1023, 4096, 4100])
@pytest.mark.parametrize(("src_offset", "dst_offset"), [(0, 0), (4, 8), (2, 6), (1, 4), (3, 5)])
def test_copies(queue: cl.CommandQueue, size: int, src_offset: int, dst_offset: int) -> None:
    src = np.random.default_rng(0).integers(0, 256, src_offset + size + 3, dtype=np.uint8)
    expected = np.zeros(dst_offset + size + 5, np.uint8)
    buffer = device_bytes(queue, expected)
    transfer.copy(queue, buffer, device_bytes(queue, src), size, src_offset, dst_offset)
    expected[dst_offset : dst_offset + size] = src[src_offset : src_offset + size]
    np.testing.assert_array_equal(read(queue, buffer), expected)


def test_a_pattern_that_does_not_fit_raises(queue: cl.CommandQueue) -> None:
    buffer = device_bytes(queue, np.zeros(16, np.uint8))
    for pattern, offset, size in ((b"abc", 0, 3), (np.float32(1), 2, 4), (np.float32(1), 0, 6)):
        with pytest.raises(ValueError, match="pattern"):
            transfer.fill(queue, buffer, pattern, offset, size)
