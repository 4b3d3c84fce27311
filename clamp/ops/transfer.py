"""Fills and copies of device memory as kernel launches, which can be recorded; OpenCL's own commands cannot."""

from __future__ import annotations

import sys
from typing import Any

import pyopencl as cl

from clamp.opencl.program import Kernel
from clamp.ops.launch import launch

FILL = Kernel("transfer.cl", "fill", "-")
COPY = Kernel("transfer.cl", "copy")

_SPAN = 1024  # words a work-item
_WORDS = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"}


def fill(queue: cl.CommandQueue, dst: Any, pattern: Any, offset: int, size: int) -> None:
    """Fills ``size`` bytes of ``dst``, from byte ``offset`` on, with a pattern of 1, 2, 4 or 8 bytes.

    Args:
        dst: a ``cl.Buffer`` or ``cl.SVM``.
        pattern: a numpy scalar or bytes.

    Raises:
        ValueError: a pattern of another length, or bytes that are no multiple of it.
    """
    content = memoryview(pattern).tobytes()
    unit = len(content)
    if unit not in _WORDS or offset % unit or size % unit:
        raise ValueError(f"cannot fill bytes {offset} to {offset + size} with a pattern of {unit} bytes")
    if size:
        words = size // unit
        value = int.from_bytes(content, sys.byteorder)
        sizes = launch(queue, -(-words // _SPAN))
        FILL(queue, *sizes, dst, offset // unit, value, words, WORD=_WORDS[unit], SPAN=_SPAN)


def copy(queue: cl.CommandQueue, dst: Any, src: Any, size: int, src_offset: int = 0, dst_offset: int = 0) -> None:
    """Copies ``size`` bytes between two places of device memory that do not overlap.

    Args:
        dst, src: ``cl.Buffer`` or ``cl.SVM``, in any combination.
        src_offset, dst_offset: where to begin, in bytes.
    """
    if not size:
        return
    unit = next(unit for unit in (4, 2, 1) if not (size % unit or src_offset % unit or dst_offset % unit))
    words = size // unit
    COPY(
        queue, *launch(queue, -(-words // _SPAN)), src, src_offset // unit, dst, dst_offset // unit, words,
        WORD=_WORDS[unit], SPAN=_SPAN,
    )  # fmt: skip
