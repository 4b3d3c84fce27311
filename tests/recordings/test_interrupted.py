"""Ctrl-C anywhere in a recording: nothing of the recorder's stays over netcl, and the next recording is right."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from clamp.recordings.memory import keepers
from tests.faults.check import as_python_does
from tests.faults.inject import Events, is_in_a_finalizer
from tests.reference import to_device

ROOMS = (*(str(Path(str(module.__file__)).parent) for module in (capture, function)), host_steps.__file__)
ROOMS += (netcl.runtime.capture.__file__, netcl.autograd.graph.__file__)
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)

pytestmark = pytest.mark.usefixtures("interrupted_anywhere")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    amp.init()
    yield
    amp.shutdown()
    session.forget_patches()


class Interrupt:
    """Raises KeyboardInterrupt at one line, or entry of a function, of clamp's recorder and netcl's capture.

    Args:
        at: which one of all that are met for the first or the third time, or the next that is not in a finalizer,
            which swallows it.
        where: name of a function: only what runs in a call of it counts.
    """

    def __init__(self, at: int, where: str = "") -> None:
        self.left, self._where, self._depth = at, where, 0 if where else 1
        self._seen = Counter[tuple[Any, ...]]()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(ROOMS):
            return None
        is_where = code.co_name == self._where
        if event == "call" and is_where:
            self._depth += 1
        if event in ("call", "line") and self._depth:
            seen = self._seen[code, frame.f_lineno, event] = self._seen[code, frame.f_lineno, event] + 1
            self.left -= seen in (1, 3)
            if self.left < 0 and not is_in_a_finalizer(frame):
                sys.settrace(None)
                raise KeyboardInterrupt
        if event == "return" and is_where:
            self._depth -= 1
        return self


def patched() -> dict[str, Any]:
    """All that a recording puts something in the place of."""
    gc.collect()
    owners = {"cl": cl, "memory": memory, "Kernel": cl.Kernel, "Tensor": Tensor, "Node": Node}
    owners |= {cls.__qualname__: cls for cls in bridge.with_subclasses(bridge.Module)}
    found = {f"{name}.{key}": value for name, owner in owners.items() for key, value in vars(owner).items()}
    pools = {f"pool {key}": vars(pool).get("release") for key, pool in memory._PERSISTENT_POOLS.items()}
    threads = (host_steps.recorder(), host_steps._thread.suspended, function._inside.on, dict(function._waiting))
    return {**found, **pools, "threads": threads, "free": capture.is_free(), "live": len(keepers)}


def assert_as(before: dict[str, Any]) -> None:
    now = patched()
    assert {key for key in {*before, *now} if before.get(key) is not now.get(key) != before.get(key)} == set()


def recorded(layer: Linear) -> Callable[[Tensor], Any]:
    return amp.record(lambda x: layer(bridge.Node(value=x)).value)


def graph(layer: Linear) -> Callable[[Tensor], Any]:
    class Forward(amp.Graph):
        def build(self, x: Node) -> Node:
            return layer(x)

    return Forward()


def _compiled_in(made: CompiledGraph, layer: Linear, x: Tensor) -> Any:
    with made:
        out = layer(bridge.Node(value=x)).value
    made.compile([x])
    made.replay([x])
    return out


def compiled(layer: Linear) -> Callable[[Tensor], Any]:
    return lambda x: _compiled_in(CompiledGraph([]), layer, x)


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
        assert_as(before)
        assert capture.is_free()
    assert tried > 5
    for _ in range(3):
        np.testing.assert_array_equal(call(x).to_host(), want)


class Cut(CompiledGraph):
    """A recording in whose end an interrupt comes before its first line, where nothing can catch it."""

    left = 1

    def __exit__(self, *exception: Any) -> bool:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return bool(super().__exit__(*exception))


def _cut(made: CompiledGraph, layer: Linear, x: Tensor) -> BaseException:
    try:
        with made:
            layer(bridge.Node(value=x))
    except KeyboardInterrupt as error:
        return error
    raise AssertionError("no interrupt came")


def _recorded_in(made: CompiledGraph, layer: Linear, x: Tensor) -> Any:
    call = recorded(layer)
    return [call(x) for _ in range(3)][-1]


NEXT: dict[str, Callable[..., Any]] = {
    "nothing": lambda made, layer, x: layer(bridge.Node(value=x)).value,
    "the same graph": _compiled_in,
    "another graph": lambda made, layer, x: _compiled_in(CompiledGraph([]), layer, x),
    "a function": _recorded_in,
}


@pytest.mark.parametrize("kept", ["graph", "traceback", "nothing"])
@pytest.mark.parametrize("after", NEXT)
def test_a_recording_that_never_ended_is_over(queue: cl.CommandQueue, after: str, kept: str) -> None:
    layer, x = Linear(queue, 6, 5), to_device(queue, X)
    compiled(layer)(x)
    before = patched()
    made: Any = Cut([])
    held = made if kept == "graph" else None
    error: Any = _cut(made, layer, x)
    if kept != "traceback":
        error = None
    if after != "the same graph" and held is None:
        made = None
    out = NEXT[after](made, layer, x)
    np.testing.assert_array_equal(out.to_host(), layer(bridge.Node(value=x)).value.to_host())
    del made, held, error
    assert_as(before)


@contextmanager
def _under(made: CompiledGraph) -> Iterator[None]:
    with made:
        yield


def test_a_graph_that_is_gone_ends_its_recording(queue: cl.CommandQueue) -> None:
    layer, x = Linear(queue, 6, 5), to_device(queue, X)
    compiled(layer)(x)
    before = patched()
    _cut(Cut([]), layer, x)
    assert_as(before)


def test_memory_of_a_recording_is_handed_over_once(queue: cl.CommandQueue) -> None:
    """An interrupted end is made once more: what is handed over twice would be two tensors' at a time."""
    layer, x = Linear(queue, 6, 5), to_device(queue, X)
    pool, place, where = bridge.empty(queue, (64,), "float32").pool_handle.pool, 0, ""
    while where is not None:
        made, events = CompiledGraph([]), Events(("end", place), "line")
        with made:
            out = layer(bridge.Node(value=x))
            del out
        with suppress(KeyboardInterrupt), as_python_does(), events.counted():
            events.phase = "end"
            made.capture.clear()
        events.phase, where, place = "", events.where, place + 1
        free = [id(one) for known in (pool._free, pool._svm_free) for held in known.values() for one in held]
        assert len({*free}) == len(free), where
    assert place > 20


class _Holder:
    def __init__(self, made: CompiledGraph) -> None:
        self._made = made

    def __enter__(self) -> None:
        self._made.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._made.__exit__(*exception)


@pytest.mark.parametrize("opened", [lambda made: made, _under, _Holder], ids=["with", "generator", "another's"])
def test_a_with_that_is_under_way_is_not_taken_for_left(queue: cl.CommandQueue, opened: Any) -> None:
    layer, x = Linear(queue, 6, 5), to_device(queue, X)
    made = CompiledGraph([])
    with opened(made):
        out = layer(bridge.Node(value=x)).value
        with pytest.raises(RuntimeError, match="under way already"), CompiledGraph([]):
            pass
        with pytest.raises(RuntimeError, match="to_host was called"):
            x.to_host()
    made.compile([x])
    made.replay([to_device(queue, 2 * X)])
    np.testing.assert_array_equal(out.to_host(), layer(bridge.Node(value=to_device(queue, 2 * X))).value.to_host())


def test_one_that_was_given_up_says_so_at_its_end(queue: cl.CommandQueue) -> None:
    layer, x = Linear(queue, 6, 5), to_device(queue, X)
    made = CompiledGraph([])

    def enter() -> None:
        made.__enter__()

    enter()
    _compiled_in(CompiledGraph([]), layer, x)
    with pytest.raises(RuntimeError, match="given up before its end"):
        made.__exit__(None, None, None)
    assert capture.is_free()


def test_the_same_with_may_come_again(queue: cl.CommandQueue) -> None:
    layer, x, made = Linear(queue, 6, 5), to_device(queue, X), Cut([])
    for _ in range(2):
        with suppress(KeyboardInterrupt), made:
            layer(bridge.Node(value=x))
        assert capture.is_free() == made.is_compiled
    assert made.is_compiled
