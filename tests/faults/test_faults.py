"""A sample of the faults of ``python -m tests.faults``: another one each week would do as well as this one."""

from __future__ import annotations

import os
from random import Random

import pyopencl as cl
import pytest

from tests.faults.check import check_call, check_event, count_calls, count_events
from tests.faults.training import CASES, Case

#: Calls that fail, and interrupts, for each case; an everyday run has the first of the sweep's.
_CALLS, _INTERRUPTS = (20, 20) if os.environ.get("CLAMP_TEST_SLOW") else (6, 8)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.long
def test_a_failing_call_leaves_a_step_whole(queue: cl.CommandQueue, case: Case) -> None:
    for number in Random(str(case)).sample(range(count_calls(queue, case)), 20)[:_CALLS]:
        assert check_call(queue, case, number) == ""


@pytest.mark.parametrize("case", CASES[::5], ids=str)
@pytest.mark.long
def test_an_interrupt_leaves_a_step_whole(queue: cl.CommandQueue, case: Case) -> None:
    chance, counts = Random(str(case)), count_events(queue, case, "check")
    for _ in range(_INTERRUPTS):
        phase = chance.choice(sorted(counts))
        assert check_event(queue, case, phase, chance.randrange(counts[phase]), "check") == ""
