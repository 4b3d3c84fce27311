"""Runs a training with one fault in it, and looks at what is left of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from random import Random

import pyopencl as cl

from clamp import amp
from tests.faults.inject import Calls, Events, Failure
from tests.faults.training import Case, Training, changed, is_on, netcl_now

Weights = list[list[bytes]]  # before the first step, and after each


@contextmanager
def as_python_does() -> Iterator[None]:
    """Inside the ``with``, Ctrl-C raises KeyboardInterrupt; netcl's handler ends the process at the second one."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def undisturbed(
    queue: cl.CommandQueue, case: Case, watch: Callable[[], AbstractContextManager[None]] = nullcontext,
    phase: Callable[[str], None] = lambda _: None,
) -> Weights:  # fmt: skip
    """What the weights are in a run without a fault.

    Args:
        watch: around all that is done under AMP.
    """
    training = Training(queue, case, phase)
    with watch():
        training.init()
        weights = [training.weights()]
        for number in range(training.steps):
            training.step(number)
            weights.append(training.weights())
        assert training.recordings == case.recorded, "one recording, which the last steps replay"
        training.shutdown()
    return weights


@cache
def right(queue: cl.CommandQueue, case: Case) -> Weights:
    """The weights of the undisturbed run."""
    first = undisturbed(queue, case)  # builds what is to be built
    assert first == undisturbed(queue, case)
    assert len({tuple(weights) for weights in first}) == len(first), "each step moves the weights"
    return first


@cache
def count_calls(queue: cl.CommandQueue, case: Case) -> int:
    """How many calls into OpenCL the steps of a run make."""
    right(queue, case)
    calls = Calls()
    training = Training(queue, case, _to(calls))
    training.init()
    with calls.counted():
        for number in range(training.steps):
            training.step(number)
    training.shutdown()
    return calls.count


@cache
def count_events(queue: cl.CommandQueue, case: Case, unit: str) -> dict[str, int]:
    """How many events there are in each phase of a run."""
    right(queue, case)
    events = Events(unit=unit)
    undisturbed(queue, case, events.counted, _to(events))
    return dict(events.counts)


def some_calls(queue: cl.CommandQueue, cases: Sequence[Case], count: int, chance: Random) -> list[tuple[Case, int]]:
    """Calls into OpenCL of some trainings, drawn; all of them for a count of 0."""
    calls = [(case, number) for case in cases for number in range(count_calls(queue, case))]
    return chance.sample(calls, count) if count else calls


def some_events(
    queue: cl.CommandQueue, cases: Sequence[Case], count: int, chance: Random, units: Sequence[str] = ("check",)
) -> Iterator[tuple[Case, str, int, str]]:
    """Arguments for ``check_event``, drawn: no phase is preferred for having more events."""
    for _ in range(count):
        case, unit = chance.choice(cases), chance.choice(units)
        counts = count_events(queue, case, unit)
        phase = chance.choice(sorted(counts))
        yield case, phase, chance.randrange(counts[phase]), unit


def check_call(queue: cl.CommandQueue, case: Case, number: int) -> str:
    """Lets a call into OpenCL fail while a training steps; returns what is wrong after that, or nothing.

    Args:
        number: of the call.
    """
    weights, before = right(queue, case), netcl_now()
    calls = Calls(number)
    training = Training(queue, case, _to(calls))
    training.init()
    try:
        with calls.counted():
            wrong = _train(training, weights, Failure)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    training.shutdown()
    del training  # while there are recordings, netcl's pools ask them
    return _said(f"{case}: call {number}, {calls.failed}", wrong, changed(before))


def check_event(queue: cl.CommandQueue, case: Case, phase: str, number: int, unit: str) -> str:
    """Interrupts a training, from ``init`` to ``shutdown``; returns what is wrong after that, or nothing.

    Args:
        phase, number, unit: at which place of which phase; see ``Events``.
    """
    weights, before = right(queue, case), netcl_now()
    events = Events((phase, number), unit)
    training = Training(queue, case, _to(events))
    try:
        with as_python_does(), events.counted():
            _again(training.init, before_retry=amp.shutdown if number % 2 else lambda: None)
            wrong = _train(training, weights, KeyboardInterrupt)
            _again(training.shutdown)
            wrong = wrong or ("AMP is on after shutdown()" if is_on() else "")
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
        events.phase = ""
        amp.shutdown()
    del training
    return _said(f"{case}: {phase}, {unit} {number}, {events.where}", wrong, changed(before))


def _to(injector: Calls | Events) -> Callable[[str], None]:
    """Tells an injector of the phases of a run."""
    return partial(setattr, injector, "phase")


def _train(training: Training, weights: Weights, fault: type[BaseException]) -> str:
    """Makes all steps, one that fails a second time; returns what is wrong, or nothing."""
    for number in range(training.steps):
        try:
            training.step(number)
        except fault:
            now = training.weights()
            if now not in (weights[number], weights[number + 1]):
                return f"the fault in step {number} has left the weights in between"
            if now == weights[number]:
                training.step(number)
        if training.weights() != weights[number + 1]:
            return f"the weights after step {number} are others"
    return ""


def _again(run: Callable[[], None], before_retry: Callable[[], object] = lambda: None) -> None:
    """Runs something, and once more if it is interrupted."""
    try:
        run()
    except KeyboardInterrupt:
        before_retry()
        run()


def _said(where: str, wrong: str, others: list[tuple[str, str]]) -> str:
    if others:
        wrong = f"{wrong}; after shutdown() these are others: {others[:5]}".removeprefix("; ")
    return wrong and f"{where}: {wrong}"
