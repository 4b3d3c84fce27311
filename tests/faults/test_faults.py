"""A sample of the faults of ``python -m tests.faults``: another one each week would do as well as this one."""

from __future__ import annotations

from random import Random

import pyopencl as cl
import pytest

from tests.faults.check import check_call, check_event, count_calls, count_events
from tests.faults.training import CASES, Case

_SAMPLE = {"everyday": (6, 8), "sweep": (20, 20)}  # calls that fail, and interrupts, for each case


@pytest.mark.parametrize("size", [pytest.param(name, marks=[pytest.mark.slow] * (name == "sweep")) for name in _SAMPLE])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.long
def test_a_failing_call_leaves_a_step_whole(queue: cl.CommandQueue, case: Case, size: str) -> None:
    chance = Random(f"{case}{size}")
    for number in chance.sample(range(count_calls(queue, case)), _SAMPLE[size][0]):
        assert check_call(queue, case, number) == ""


@pytest.mark.parametrize("size", [pytest.param(name, marks=[pytest.mark.slow] * (name == "sweep")) for name in _SAMPLE])
@pytest.mark.parametrize("case", CASES[::5], ids=str)
@pytest.mark.long
def test_an_interrupt_leaves_a_step_whole(queue: cl.CommandQueue, case: Case, size: str) -> None:
    chance, counts = Random(f"{case}{size}"), count_events(queue, case, "check")
    for _ in range(_SAMPLE[size][1]):
        phase = chance.choice(sorted(counts))
        assert check_event(queue, case, phase, chance.randrange(counts[phase]), "check") == ""
