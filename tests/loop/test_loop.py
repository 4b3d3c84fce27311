"""Random training loops against a model in float64: right numbers, or an error with nothing changed."""

from __future__ import annotations

import hypothesis
import pyopencl as cl
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test

from clamp import session
from tests.loop import SWEEP
from tests.loop.rules import Basics
from tests.loop.run_rules import WholeRun
from tests.loop.scaler_rules import WithScalers

# A loop that does not clear gradients after a skipped step is told so.
pytestmark = pytest.mark.filterwarnings("ignore:step .* was skipped:UserWarning")


class Loops(Basics, WithScalers, WholeRun):
    """All rules."""


def run(queue: cl.CommandQueue, seed: int, sequences: int, steps: int) -> None:
    """Runs so many sequences of rules. A failure is shrunk to the shortest that fails, and printed."""
    settings = hypothesis.settings(
        max_examples=sequences,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    on_this_queue = type("Loops", (Loops,), {"queue": queue})
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(on_this_queue), settings=settings)
    finally:
        session.shutdown()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.long
def test_random_loops_do_what_the_model_says(queue: cl.CommandQueue, seed: int) -> None:
    run(queue, seed, sequences=60, steps=12)


@pytest.mark.slow
@pytest.mark.once  # it asks what the host does, and would build kernels for most of its time elsewhere
@pytest.mark.parametrize("seed", SWEEP)
def test_hundreds_of_random_loops_do_what_the_model_says(queue: cl.CommandQueue, seed: int) -> None:
    run(queue, seed, sequences=75, steps=20)
