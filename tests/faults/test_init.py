"""Ctrl-C anywhere in ``init``, ``shutdown`` or the first region without them: AMP can be turned on and off after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag

from clamp import amp, session
from clamp.bridge import Parameter
from clamp.handle import active
from clamp.patching.patch import Patches
from tests.faults.check import as_python_does
from tests.faults.inject import Events
from tests.faults.training import changed, is_on, netcl_now
from tests.reference import to_device

_POINTS = 8  # of the thousands of lines of each


def _enter_a_region() -> None:
    with amp.autocast():
        pass


#: what comes before, what is interrupted
ENDS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "init": (lambda: None, amp.init),
    "init that observes": (lambda: None, lambda: amp.init(debug=("attribution", "summary"))),
    "init after a region": (_enter_a_region, amp.init),
    "shutdown": (amp.init, amp.shutdown),
    "shutdown of the handle": (amp.init, lambda: session.require_handle().shutdown()),
    "a region without init": (lambda: None, _enter_a_region),
    "the end of its patches": (_enter_a_region, session.forget_patches),
}


def _off() -> None:
    amp.shutdown()
    session.forget_patches()


def _events(before: Callable[[], object], run: Callable[[], object], events: Events) -> None:
    """Runs both, and counts in the second."""
    before()
    try:
        with as_python_does(), events.counted():
            events.phase = "all"
            run()
    finally:
        events.phase = ""


def _interrupted(name: str, place: int) -> Events:
    """Interrupts it at this place."""
    for _ in range(3):  # as of Python 3.13, code tells from its second traced run on
        events = Events(("all", place))
        try:
            _events(*ENDS[name], events)
        except KeyboardInterrupt:
            return events
        _off()
    pytest.fail(f"not interrupted at {place}")


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.long
def test_amp_can_be_turned_on_and_off_after_it(name: str, queue: cl.CommandQueue) -> None:
    x = ag.tensor(to_device(queue, np.ones((2, 2), np.float32)))
    weight = ag.tensor(Parameter.from_host(queue, np.ones((2, 2), np.float32)))
    netcls, counted = netcl_now(), Events()
    for events in (Events(), counted):  # what the first one finds out is known to the second
        _events(*ENDS[name], events)
        _off()
    for point in range(_POINTS):
        events = _interrupted(name, counted.counts["all"] * (2 * point + 1) // (2 * _POINTS))
        if point % 2:  # else the next init ends what is left
            _off()
            assert not changed(netcls), events.where
        if not is_on():  # shutdown had not begun, or init had ended
            amp.init()
        assert ag.matmul_op(x, weight).value.dtype == "float16", events.where
        _off()
        assert not changed(netcls), events.where
        assert ag.matmul_op(x, weight).value.dtype == "float32", events.where


@pytest.mark.parametrize(("owner", "name"), [(Patches, "remove"), (active, "from_nothing")])
def test_the_end_of_a_with_ends_amp(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody calls ``shutdown`` again."""
    netcls, own, calls = netcl_now(), getattr(owner, name), iter(range(10))

    def interrupted(*args: Any) -> None:
        if next(calls) == 0:
            raise KeyboardInterrupt
        own(*args)

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched, amp.init():
        patched.setattr(owner, name, interrupted)
    assert not changed(netcls)
    assert not is_on()
