"""Errors where device memory is short, told with what holds the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pyopencl as cl


class OutOfMemoryError(cl.MemoryError, cl.RuntimeError, cl.LogicError):
    """Device memory is short; the message says what holds it, and what would save some.

    It is an error of each kind by which pyopencl tells of that: drivers differ.
    """

    def __str__(self) -> str:
        return "\n".join(self.args[1:])


_SHORT = (
    cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE,
    cl.status_code.OUT_OF_RESOURCES,
    cl.status_code.OUT_OF_HOST_MEMORY,
    cl.status_code.INVALID_BUFFER_SIZE,
)
#: what says what holds device memory, in words
SAYS_WHAT_HOLDS_MEMORY: list[Callable[[], str]] = []


def explain_shortage(error: cl.Error, doing: str) -> None:
    """Raises an error that says more in place of one that a driver raises where device memory is short; of others
    nothing.

    Args:
        doing: what has failed, ``"allocating 4096 bytes"``.

    Raises:
        OutOfMemoryError: it was one.
    """
    if isinstance(error, OutOfMemoryError) or getattr(error, "code", None) not in _SHORT:
        return
    said = []
    with suppress(Exception):  # whatever is wrong there, the user is told of the memory
        said = [say() for say in SAYS_WHAT_HOLDS_MEMORY]
    raise OutOfMemoryError(error.args[0], f"{error}, while {doing}.", *said) from error
