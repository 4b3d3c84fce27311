"""Instructions that NVIDIA's OpenCL compiler cannot write, put in place in what it has written.

A program of its compiler is PTX, as text. It is written for ``sm_90``; the matrix instructions of that very processor
are in PTX for ``sm_90a`` only, which no option of the compiler's asks for. So a kernel has them as comments,
``//@wgmma...``, with operands that the compiler fills in, and the text is loaded again as a binary. (The way is
libxstream's: github.com/hfp/libxstream, samples/ozaki.)
"""

from __future__ import annotations

import re

_TARGET = re.compile(rb"(?m)^(\s*\.target\s+)sm_90\b(?!a)")
_VERSION = re.compile(rb"(?m)^(\s*\.version\s+)(\d+)\.(\d+)")
_MARK = rb"//@"
_FIRST_VERSION = (8, 0)  # of PTX, that has the instructions


def with_marked_instructions(ptx: bytes) -> bytes:
    """The PTX of a program with the instructions behind ``//@`` in place of these comments, for ``sm_90a``.

    Raises:
        ValueError: no instruction is marked, or the PTX is for another processor. A program whose instructions are left
            out would compute zeros.
    """
    marks = ptx.count(_MARK)
    text, targets = _TARGET.subn(rb"\1sm_90a", ptx)
    if not marks or targets != 1:
        found = re.findall(rb"\.target\s+(\S+)", ptx)
        processors = b", ".join(found).decode(errors="replace") or "no processor"
        raise ValueError(
            f"{marks} marked instructions for {processors} in a program of the driver's; "
            "there must be one at least, and sm_90 alone"
        )
    return _VERSION.sub(_at_least_the_first, text, count=1).replace(_MARK, b"")


def _at_least_the_first(version: re.Match[bytes]) -> bytes:
    major, minor = max((int(version[2]), int(version[3])), _FIRST_VERSION)
    return version[1] + f"{major}.{minor}".encode()
