"""What a device did in one training step: every command that was enqueued, and every wait for it.

Seen by wrapping pyopencl: clamp's kernels and netcl's are both launched by calling a ``cl.Kernel``; copies and fills
are functions of pyopencl's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pyopencl as cl
import wrapt

from clamp.interrupts import holding, uninterrupted

NANO = 1e-9  # of a second


@dataclass(frozen=True)
class Wait:
    """A wait of the program for the device.

    Attributes:
        name: ``"read"``, ``"write"``, ``"finish"``, ...
        began, seconds: of the program's clock, since the step began.
    """

    name: str
    began: float
    seconds: float


class Profiler:
    """Records a step, from ``with`` to the end of it.

    What it wraps calls itself by its wrapped names (`cl.enqueue_fill` calls another, say): only the outermost counts.

    Args:
        alone: whether each command runs alone, for queues that take no times: its queue is finished before and after
            it, and what passes between, on the program's clock, is its time.

    Attributes:
        events: of what was enqueued the name, ``"kernel"`` or ``"transfer"``, and the event of OpenCL.
        waits: in the order in which they ended.
        host_seconds: until the program had enqueued all, its waits included.
    """

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        self.events: list[tuple[str, str, Any]] = []
        self._alone_seconds: list[float] = []
        self.waits: list[Wait] = []
        self._began = self.host_seconds = 0.0
        self._depth = threading.local()
        self._stack = ExitStack()

    def __enter__(self) -> Profiler:
        for name in (name for name in vars(cl) if name.startswith("enqueue_")):
            self._wrap(cl, name, self._enqueue)
        self._wrap(cl.Kernel, "__call__", self._enqueue)
        self._wrap(cl.CommandQueue, "finish", self._wait)
        self._wrap(cl.Event, "wait", self._wait)
        self._wrap(cl, "wait_for_events", self._wait)
        self._began = perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.host_seconds = perf_counter() - self._began
        with uninterrupted():
            self._stack.close()

    def __len__(self) -> int:
        return len(self.events)

    @property
    def names(self) -> list[str]:
        """Returns the commands enqueued so far, in order: kernels by their names, else ``"read"``, ``"write"``,
        ``"copy"``, ..."""
        return [name for name, _, _ in self.events]

    @property
    def seconds(self) -> list[float]:
        """Returns how long each of these ran, once the queue has finished; 0.0 of a queue without profiling."""
        return self._alone_seconds if self._alone else [_seconds_of(event) for _, _, event in self.events]

    def _wrap(self, owner: Any, name: str, meet: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def met(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if getattr(self._depth, "inside", False):
                return wrapped(*args, **kwargs)
            self._depth.inside = True
            try:
                return meet(name, wrapped, instance, args, kwargs)
            finally:
                self._depth.inside = False

        self._stack.enter_context(holding(owner, name, wrapt.FunctionWrapper(original, met)))

    def _enqueue(self, name: str, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        queue = args[0] if self._alone and args and isinstance(args[0], cl.CommandQueue) else None
        if queue is not None:
            queue.finish()
        began = perf_counter()
        result = wrapped(*args, **kwargs)
        if queue is not None:
            queue.finish()
        if self._alone:
            self._alone_seconds.append(perf_counter() - began)
        what = _transfer(args) if name == "enqueue_copy" else name.removeprefix("enqueue_")
        if kwargs.get("is_blocking", True) and (what in ("read", "write") or name == "enqueue_map_buffer"):
            self._waited(what, began)
        event = result[1] if isinstance(result, tuple) else result
        kernel = instance if name == "__call__" else args[1] if name == "enqueue_nd_range_kernel" else None
        self.events.append((what, "transfer", event) if kernel is None else (kernel.function_name, "kernel", event))
        return result

    def _wait(self, name: str, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began = perf_counter()
        result = wrapped(*args, **kwargs)
        self._waited(name, began)
        return result

    def _waited(self, name: str, began: float) -> None:
        self.waits.append(Wait(name, began - self._began, perf_counter() - began))


def _seconds_of(event: Any) -> float:
    try:
        return (event.profile.end - event.profile.start) * NANO
    except cl.Error:
        return 0.0


def _transfer(args: tuple[Any, ...]) -> str:
    """Returns which way ``enqueue_copy(queue, dest, src)`` copies."""
    dest, src = (isinstance(side, np.ndarray | np.generic | bytearray | memoryview | bytes) for side in args[1:3])
    return "read" if dest else "write" if src else "copy"
