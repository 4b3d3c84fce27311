"""Timing contenders against each other: turn about, in one run, compared by their medians; what a case is; and what the
files that make cases share.

A machine's speed drifts by more than the differences that matter. Contenders that take turns drift together, so
their ratios stay true even where the figures themselves do not repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pyopencl as cl
import wrapt

from clamp import amp
from clamp.bridge import Tensor
from clamp.handle import AmpHandle, NoOpHandle
from clamp.interrupts import contextmanager, holding
from clamp.ops.cast import cast

Turn = Callable[[int], list[float]]
"""One contender's turn: takes the number of calls to time and returns the seconds of each."""
Extra = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Contender:
    """One way to do a case's work."""

    name: str  # ``"netcl"``, ``"clamp float16"``, ``"OpenBLAS float32"``
    turn: Turn  # times it
    amount: float = 0.0  # what one call does, in the case's unit without its prefix: flops, bytes; not used for times
    is_baseline: bool = False  # whether the others are compared with it
    extra: Extra = field(default=dict)  # further figures, asked for after the timing


@dataclass(frozen=True)
class Case:
    """Work that several contenders do, turn about."""

    work: str  # kind of work: ``"gemm"``
    name: str  # which of its kind: ``"NN 1024"``
    unit: str  # of the results: ``"GFLOP/s"``, ``"GB/s"`` or ``"ms"``
    contenders: Sequence[Contender]  # in the order of the table
    # what a contender's matrix unit does at most, in the unit, by the contender's name
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Effort:
    """Duration of a measurement, and its rounds."""

    rounds: int  # turns that a fast contender gets; a slow one's fewer calls are spread over them
    seconds: float  # time for each contender, all its timed calls together
    least: int
    most: int  # least, most: bounds on the number of its calls
    patience: float = 12.0  # seconds after which a contender gets fewer than ``least``, though one at the least

    def calls(self, seconds_per_call: float) -> int:
        """Returns how many calls to time in all."""
        seconds_per_call = max(seconds_per_call, 1e-9)
        least = max(1, min(self.least, int(self.patience / seconds_per_call)))
        return max(least, min(self.most, int(self.seconds / seconds_per_call)))


NORMAL = Effort(rounds=6, seconds=1.0, least=3, most=40)
QUICK = Effort(rounds=3, seconds=0.2, least=2, most=10, patience=4.0)


@dataclass(frozen=True)
class Race:
    """Results of `interleave`: the seconds of each timed call, or the reason for having none, for each contender.

    After an interrupt (Ctrl-C) those have seconds who have had a timed turn.
    """

    seconds: dict[str, list[float]]
    failures: dict[str, str]
    interrupted: bool = False


def interleave(
    turns: Mapping[str, Turn], effort: Effort, before_turn: Callable[[str], None] = lambda name: None
) -> Race:
    """Times the contenders in rounds, each taking its turn in every round.

    The first, untimed turn warms up: it compiles kernels and fills pools. Round 0 times one call each and so
    tells how many more each contender gets. A contender that raises leaves the race; the others go on.
    """
    samples: dict[str, list[float]] = {name: [] for name in turns}
    failures: dict[str, str] = {}
    interrupted = False
    try:
        for number, name in product(range(-1, effort.rounds), turns):
            calls = 1 if number < 1 else _calls_in(number, effort, samples[name])
            if name in failures or calls == 0:
                continue
            before_turn(name)
            try:
                taken = turns[name](calls)
            except Exception as error:  # a driver or library that fails is a result, too
                failures[name] = f"{type(error).__name__}: {error}".split("\n", 1)[0]
                continue
            if number >= 0:
                samples[name] += taken
    except KeyboardInterrupt:
        interrupted = True
    seconds = {name: samples[name] for name in turns if samples[name] and name not in failures}
    return Race(seconds, failures, interrupted)


def _calls_in(number: int, effort: Effort, samples: list[float]) -> int:
    """Calls in round ``number``, from 1 on, such that all rounds together make the number that round 0 led to."""
    if not samples:
        return 0
    rest = effort.calls(samples[0]) - 1
    last = effort.rounds - 1
    return rest * number // last - rest * (number - 1) // last


def timed(
    call: Callable[[], object], finish: Callable[[], object], prepare: Callable[[], object] | None = None
) -> Turn:
    """A turn that times ``call`` until ``finish``.

    ``prepare`` is called before each timed call. Without it, a turn of several calls starts with an untimed one,
    because the caches still hold the data of the contender before.
    """

    def turn(calls: int) -> list[float]:
        if calls > 1 and prepare is None:
            call()
            finish()
        seconds = []
        for _ in range(calls):
            if prepare is not None:
                prepare()
                finish()
            start = time.perf_counter()
            call()
            finish()
            seconds.append(time.perf_counter() - start)
        return seconds

    return turn


def settle(limit: float = 1.0) -> None:
    """Waits, for at most ``limit`` seconds, until this process is idle.

    Threads of BLAS, OpenMP and OpenCL libraries spin for a while after their last call; whoever is timed next
    would share the cores with them.
    """
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        wall, busy = time.perf_counter(), time.process_time()
        time.sleep(0.005)
        if time.process_time() - busy < 0.2 * (time.perf_counter() - wall):
            return


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Collects the names of the kernels launched inside the ``with``, as netcl's capture does."""
    names: list[str] = []

    def count(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names.append((args[0] if instance is None else instance).function_name)  # bound, or by a recording
        return wrapped(*args, **kwargs)

    with holding(cl.Kernel, "__call__", wrapt.FunctionWrapper(vars(cl.Kernel)["__call__"], count)):
        yield names


def launches_of(call: Callable[[], object]) -> dict[str, float]:
    """How many kernels a call launches, as a contender's figure."""
    with counted_launches() as names:
        call()
    return {"launches": float(len(names))}


# ---------------------------------------------------------------------------------------------- what cases share


def dtypes_of(queue: cl.CommandQueue) -> tuple[str, ...]:
    """The dtypes that clamp computes in on a device."""
    return ("float32", *amp.get_amp_supported_dtype(queue))


def amp_in(dtype: str | None, **options: Any) -> AbstractContextManager[AmpHandle | NoOpHandle | None]:
    """`amp.init` with a dtype; with None nothing, for netcl alone."""
    return nullcontext() if dtype is None else amp.init(dtype=dtype, **options)


def under_amp(turn: Turn, dtype: str) -> Turn:
    """A turn, taken where AMP is on."""

    def taken(calls: int) -> list[float]:
        with amp_in(dtype):
            return turn(calls)

    return taken


def random_tensor(queue: cl.CommandQueue, shape: Sequence[int], dtype: str, seed: int = 0) -> Tensor:
    """Normally distributed numbers."""
    host = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return cast(Tensor.from_host(queue, host), dtype)
