"""The host's processor, by the operating system: its instruction sets, and registers that must be asked for."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from functools import cache
from pathlib import Path

# arch_prctl of Linux on x86-64, two of its commands, and the number of the tile registers' state (asm/prctl.h)
_ARCH_PRCTL, _GET_SUPPORTED, _REQUEST, _TILE_DATA = 158, 0x1021, 0x1023, 18


def host_cpu_flags() -> frozenset[str]:
    """Instruction sets of the host's processor that the operating system lets programs use; empty if unknown."""
    return frozenset(_host_cpu("flags").split())


def host_cpu_vendor() -> str:
    """``"AuthenticAMD"``, ``"GenuineIntel"``; empty if unknown."""
    return _host_cpu("vendor_id").strip()


def refusal_of_tiles() -> str:
    """Asks for the tile registers of AMX, for all threads of this process; why they are refused, or nothing.

    Processes that are forked have the permission, too; a program that is started has not.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return "only Linux on x86-64 gives out tile registers"
    supported = ctypes.c_ulong(0)
    failed = _arch_prctl(_GET_SUPPORTED, ctypes.byref(supported))
    if failed or not supported.value >> _TILE_DATA & 1:
        return "the operating system does not know of tile registers (Linux does from 5.16 on)"
    failed = _arch_prctl(_REQUEST, ctypes.c_ulong(_TILE_DATA))
    if failed == errno.ENOSPC:
        return (
            "a thread of this process has an alternate signal stack that has no room for tile registers: its "
            "sigaltstack needs more than 8 KB (16 do), or must come after the first product"
        )
    return f"the operating system refuses the tile registers: {os.strerror(failed)}" if failed else ""


def _arch_prctl(command: int, argument: object) -> int:
    """The error number; 0 if there was none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_ulong(command), argument) else 0


@cache
def _host_cpu(field: str) -> str:
    """Returns a field of the host's first processor, by Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith(field)), "")
