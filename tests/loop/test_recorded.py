"""Random loops with recorded functions in them: every bit as without recording."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyopencl as cl
import pytest

from tests.loop import SWEEP
from tests.loop.programs import program
from tests.loop.twin_run import run

#: why a function of these may run as it is
REASONS = (
    "adds to gradients that are multiplied by a loss scale of before",
    "gradient was added to one of another loss scale",
    "adds to the gradient that an argument has",
)


def check(queue: cl.CommandQueue, folder: Path, seed: int, **changed: Any) -> int:
    """Runs one program twice, and compares all that it returns, raises and leaves; returns how often it recorded."""
    loop = replace(program(Random(seed)), **changed)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        eager, recorded = (run(queue, loop, folder / str(is_recorded), is_recorded) for is_recorded in (False, True))
    for number, (want, got) in enumerate(zip(eager.turns, recorded.turns, strict=True)):
        assert got == want, f"turn {number} of program {seed}:\n{loop}"
    messages = {str(warning.message) for warning in said}
    assert not [message for message in messages if "computes something else now" in message], f"program {seed}:\n{loop}"
    for message in (message for message in messages if "as it is" in message):
        assert any(reason in message for reason in REASONS), f"program {seed}: {message}\n{loop}"
    return recorded.recordings


@pytest.mark.parametrize("part", range(3))
@pytest.mark.long
def test_recorded_loops_do_what_they_do_unrecorded(queue: cl.CommandQueue, tmp_path: Path, part: int) -> None:
    made = [check(queue, tmp_path / str(seed), seed) for seed in range(12 * part, 12 * part + 12)]
    assert sum(made) >= 4  # most can be recorded, and some always raise


def test_recorded_loops_that_once_went_wrong(queue: cl.CommandQueue, tmp_path: Path) -> None:
    """Skips noted on gradients of an earlier replay; gradients of what another recording was called with; gradients
    that are there before, taken for others."""
    for seed in (60282, 60585, 60317, 60324):
        check(queue, tmp_path / str(seed), seed, master_weight=True, in_blocks=False, retains=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SWEEP)
def test_hundreds_of_recorded_loops_do_what_they_do_unrecorded(
    queue: cl.CommandQueue, tmp_path: Path, seed: int
) -> None:
    for number in range(60):
        check(queue, tmp_path / str(number), 60 * seed + number)
