"""Ctrl-C anywhere in a recording: nothing of the recorder's stays over netcl, and the next recording is right."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import netcl.autograd.graph
import netcl.runtime.capture
import numpy as np
import pyopencl as cl
import pytest
from netcl.autograd.graph import CompiledGraph
from netcl.core import memory
from netcl.nn.layers import Linear

from clamp import amp, bridge, session
from clamp.bridge import Node, Tensor
from clamp.opencl import host_steps
from clamp.recordings import capture, function
from tests.reference import to_device

ROOMS = (*(str(Path(str(module.__file__)).parent) for module in (capture, function)), host_steps.__file__)
ROOMS += (netcl.runtime.capture.__file__, netcl.autograd.graph.__file__)
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    amp.init()
    yield
    amp.shutdown()
    session.forget_patches()


class Interrupt:
    """Raises KeyboardInterrupt at one line, or entry of a function, of clamp's recorder and netcl's capture.

    Args:
        at: which one of all that are met for the first or the third time.
        where: name of a function: only what runs in a call of it counts.
    """

    def __init__(self, at: int, where: str = "") -> None:
        self.left, self._where, self._depth = at, where, 0 if where else 1
        self._seen = Counter[tuple[Any, ...]]()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(ROOMS) or _is_in_a_finalizer(frame):
            return None
        is_where = code.co_name == self._where
        if event == "call" and is_where:
            self._depth += 1
        if event in ("call", "line") and self._depth:
            seen = self._seen[code, frame.f_lineno, event] = self._seen[code, frame.f_lineno, event] + 1
            self.left -= seen in (1, 3)
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        if event == "return" and is_where:
            self._depth -= 1
        return self


def _is_in_a_finalizer(frame: FrameType | None) -> bool:
    """Whether Python swallows what is raised here."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def patched() -> dict[str, Any]:
    """All that a recording puts something in the place of."""
    gc.collect()
    owners = {"cl": cl, "memory": memory, "Kernel": cl.Kernel, "Tensor": Tensor, "Node": Node}
    owners |= {cls.__qualname__: cls for cls in bridge.module_classes()}
    found = {f"{name}.{key}": value for name, owner in owners.items() for key, value in vars(owner).items()}
    pools = {f"pool {key}": vars(pool).get("release") for key, pool in memory._PERSISTENT_POOLS.items()}
    threads = (host_steps.recorder(), host_steps._thread.suspended, function._inside.on, dict(function._waiting))
    return {**found, **pools, "threads": threads, "free": capture.is_free(), "live": len(capture._live)}


def recorded(layer: Linear) -> Callable[[Tensor], Any]:
    return amp.record(lambda x: layer(bridge.Node(value=x)).value)


def graph(layer: Linear) -> Callable[[Tensor], Any]:
    class Forward(amp.Graph):
        def build(self, x: Node) -> Node:
            return layer(x)

    return Forward()


def compiled(layer: Linear) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Tensor:
        made = CompiledGraph([])
        with made:
            out = layer(bridge.Node(value=x)).value
        made.compile([x])
        made.replay([x])
        return out

    return call


CASES = [(make, where, step) for make in (recorded, graph, compiled) for where, step in (("end", 23), ("begin", 11))]
EVERYWHERE = [pytest.param(make, "", 3, marks=pytest.mark.slow) for make in (recorded, graph)]


@pytest.mark.parametrize(("make", "where", "step"), [*CASES, *EVERYWHERE])
def test_an_interrupt_leaves_nothing_over_netcl(queue: cl.CommandQueue, make: Any, where: str, step: int) -> None:
    layer, x = Linear(queue, 6, 5), to_device(queue, X)
    call = make(layer)
    want, _ = call(x).to_host(), call(x)
    before, outer, tried = patched(), sys.gettrace(), 0
    for at in range(0, 10_000, step):
        again = make(layer)
        if make is not compiled:
            again(x)
        sys.settrace(Interrupt(at, where))
        try:
            again(x)
        except KeyboardInterrupt:
            tried += 1
        else:
            break
        finally:
            sys.settrace(outer)
        del again
        now = patched()
        assert {key for key in {*before, *now} if before.get(key) is not now.get(key) != before.get(key)} == set()
        assert capture.is_free()
    assert tried > 5
    for _ in range(3):
        np.testing.assert_array_equal(call(x).to_host(), want)
