"""What the operating system says of the host's processor."""

from __future__ import annotations

from functools import cache
from pathlib import Path


def host_cpu_flags() -> frozenset[str]:
    """Instruction sets of the host's processor that the operating system lets programs use; empty if unknown."""
    return frozenset(_host_cpu("flags").split())


def host_cpu_vendor() -> str:
    """``"AuthenticAMD"``, ``"GenuineIntel"``; empty if unknown."""
    return _host_cpu("vendor_id").strip()


@cache
def _host_cpu(field: str) -> str:
    """What Linux says of the host's first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith(field)), "")
