"""What is known of the content of device memory ends when somebody writes there."""

from __future__ import annotations

import pytest

from clamp.params import writes as module
from clamp.params.writes import Writes


def test_what_was_checked_lately_stays_known_however_many_buffers_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 8)
    writes, checked = Writes(), object()
    others = [object() for _ in range(50)]
    for other in others:
        time = writes.now
        writes.note(other)
        assert not writes.since(checked, time)
        assert writes.since(other, time)
    assert len(writes._last) <= 8
    assert writes.since(checked, 0), "what is no longer remembered counts as written to"
    time = writes.now
    writes.note(checked)
    assert writes.since(checked, time)
    assert not writes.since(checked, writes.now)
