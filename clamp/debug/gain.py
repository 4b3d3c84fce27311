"""One step of a user's under AMP and in clamp's float32, turn about: how long each takes, what of it, what memory.

The step is a dry run: optimizers do not step in it, so that what is measured is forward, backward and what the loss
scale takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.regions import InitCall, Region, in_region, init_call, region_here
from clamp.casting.results import GradFn, Gradients
from clamp.debug.dry_run import NothingSeenError, dry_run
from clamp.debug.memory_meter import MemoryMeter
from clamp.debug.op_counter import Casts, OpCounter, OpRow
from clamp.debug.profiler import Profiler
from clamp.interrupts import undoing
from clamp.opencl.host_steps import recorder, replays
from clamp.ops.cast import CAST
from clamp.ops.optimizer_step import COPY
from clamp.params.weight_cache import weight_cache
from clamp.scaling.scaled_loss import SCALE_OP

Step: TypeAlias = Callable[[], Any]

_CASTS = frozenset((CAST.name, COPY.name))  # what only converts; a product that does as well is the op's own


class OpTimer(OpCounter):
    """Counts the ops of one step, and knows what each launched, all since the op before was done, and what memory the
    step takes.

    Args:
        alone: see `Profiler`: for queues that take no times.

    Attributes:
        queues: that it uses.
    """

    def __init__(self, alone: bool) -> None:
        super().__init__(of_dry_run=True)
        self._recorder, self._meter = Profiler(alone), MemoryMeter()
        self._owners: list[OpRow] = []  # of each launch, until the last op was done
        self._cast_launches, self._shared_casts = set[int](), set[int]()  # and those that convert several tensors
        self._told = range(0)  # the launches of the last conversion told of
        self._is_backward = False
        self._activations = 0
        self.queues: list[cl.CommandQueue] = []

    def time(self, step: Step, region: Region, queues: Iterable[cl.CommandQueue]) -> Side:
        """Runs a step in a region, on these queues; how long it takes as a whole is left open."""
        weight_cache.clear()
        _finish(queues)
        with in_region(region), undoing() as undo:
            undo.callback(self.stop)
            self.start()
            for watcher in (self._meter, self._recorder):  # a `with` would not leave one that Ctrl-C has kept it from
                undo.push(watcher).__enter__()
            step()
            _finish(queues)
        seconds = self._recorder.seconds
        for row in self._rows.values():
            row.seconds = 0.0  # also of one without a launch
        for launch, row in enumerate(self._owners):
            if launch not in self._shared_casts:
                row.seconds = (row.seconds or 0.0) + seconds[launch]
        casts, shared = (sum(seconds[x] for x in found) for found in (self._cast_launches, self._shared_casts))
        return Side(
            0.0, self.rows, self.casts, casts, shared, sum(seconds[len(self._owners) :]), len(seconds),
            self._activations, self.weight_copies, self._meter.peak,
        )  # fmt: skip

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Any:
        if recorder() is not None:
            raise NothingSeenError
        value = made.value
        if isinstance(value, Tensor) and bridge.on_device(value):
            self.queues.append(value.queue)
        token = super().result(made, parents)
        if isinstance(made, Node) and made.op_name == SCALE_OP:
            self._forward_is_over()
        return token

    def gradients(self, token: Any, grad: Tensor, grads: Gradients, again: GradFn) -> None:
        self._forward_is_over()  # of a loss that nobody has scaled
        self._is_backward = True
        super().gradients(token, grad, grads, again)

    def _forward_is_over(self) -> None:
        if not self._is_backward:  # several losses: what is kept when the last of them is scaled
            self.weight_copies = weight_cache.nbytes
            self._activations = max(self._activations, self._meter.activations)

    def counted(self, row: OpRow) -> None:
        self._owners += [row] * (len(self._recorder) - len(self._owners))

    def converted(self, source: Tensor, target: Tensor) -> None:
        """Of several weights that are cast together all launches are told of when they have run: for each weight."""
        names = self._recorder.names
        if len(names) == self._told.stop:
            self._shared_casts.update(self._told)
            return
        new = names[max(len(self._owners), self._told.stop) :]
        same = list(takewhile(lambda name: name == new[-1] and name in _CASTS, reversed(new)))
        self._told = range(len(names) - len(same), len(names))
        self._cast_launches.update(self._told)


# ---------------------------------------------------------------------------------------------- in both precisions

NO_DIFFERENCE = 0.05  # ratios of times nearer to 1 than this are none
_SECONDS = 2.0  # that the rounds may take, about
_LEAST, _MOST = 3, 25  # rounds
_CALM = 1.5  # of a machine with nothing else to do, the median is not more than so many times the least
_TIMES = "cast_seconds", "shared_cast_seconds", "after_backward"
_PASSES = 5  # in which ops are timed: the least counts, for what disturbs only adds


@dataclass(frozen=True)
class Side:
    """A step in one precision.

    Attributes:
        seconds: the median of its rounds, until the device had finished; where rounds differ much, the least.
        rows: its ops, their ``seconds`` the least of five passes.
        casts: what was converted.
        cast_seconds: the least of launches that only convert; a part of what the ops that wanted them take, but for
        shared_cast_seconds: of those that convert several weights, for ops to come as well.
        after_backward: the least of what came after the last op: gradients divided by the loss scale, and looked at.
        launches: how many commands were enqueued.
        activations: bytes kept when forward was over, but for copies of weights.
        weight_copies: bytes of those.
        peak: the most bytes of tensors that the step had made and not let go of.
    """

    seconds: float
    rows: list[OpRow]
    casts: list[Casts]
    cast_seconds: float
    shared_cast_seconds: float
    after_backward: float
    launches: int
    activations: int
    weight_copies: int
    peak: int

    @property
    def op_seconds(self) -> float:
        """Returns what all of its ops took on the device."""
        return sum(row.seconds or 0.0 for row in self.rows) + self.shared_cast_seconds + self.after_backward


@dataclass(frozen=True)
class Trial:
    """A step under AMP and in float32.

    Attributes:
        dtype: that of AMP.
        amp, plain: the two; ``plain`` is clamp's float32.
        rounds: how often each has run to be timed.
        busy: whether rounds differed so much that something else was running; then the fastest ones count.
        alone: whether ops were timed one by one, on a queue that takes no times.
        modules: the layers of the models that ran; see ``bridge.module_tree``.
        black_list: functions that are slower in 16 bits than in float32.
        with_black_list: the step's seconds with those in float32; None if there are none.
        black_list_pays: whether that is clearly less than without.
        init_call: the call that turned AMP on.
        is_recorded: whether replays of a recording were timed.
    """

    dtype: str
    amp: Side
    plain: Side
    rounds: int
    alone: bool
    busy: bool = False
    modules: Sequence[tuple[str, str, int]] = ()
    black_list: tuple[str, ...] = ()
    with_black_list: float | None = None
    black_list_pays: bool = False
    init_call: InitCall = field(default_factory=InitCall)
    is_recorded: bool = False


def try_step(step: Step) -> Trial:
    """Runs a step some dozens of times, and puts back what it has changed (see `dry_run`).

    Raises:
        ValueError: no op of the step could be seen, or none ran on a device.
    """
    around = region_here(enabled=True)
    sides = around, replace(around, dtype="float32")
    with dry_run(step):
        first = [OpTimer(alone=False) for _ in sides]
        for timer, region in zip(first, sides, strict=True):
            timer.time(step, region, ())  # builds its kernels, too
        queues = list({id(queue): queue for timer in first for queue in timer.queues}.values())
        alone = not all(queue.properties & cl.command_queue_properties.PROFILING_ENABLE for queue in queues)
        passes = [[OpTimer(alone).time(step, region, queues) for region in sides] for _ in range(_PASSES)]
        if not all(side.rows for one in passes for side in one):
            raise NothingSeenError
        amp, plain = map(_least, zip(*passes, strict=True))
        names = tuple(slower_functions(amp, plain))
        black = replace(around, policies=around.policies.customized((), names))
        before = replays()
        times = _race(step, (*sides, black) if names else sides, queues)
        is_recorded = replays() > before
    busy = any(median(own) > _CALM * min(own) for own in times)
    took = [min(own) if busy else median(own) for own in times]
    return Trial(
        around.dtype,
        replace(amp, seconds=took[0]),
        replace(plain, seconds=took[1]),
        len(times[0]),
        alone,
        busy,
        first[0].modules,
        names,
        took[2] if names else None,
        bool(names) and all(of(times[2]) < (1 - NO_DIFFERENCE) * of(times[0]) for of in (median, min)),
        init_call() or InitCall(),
        is_recorded,
    )


def in_half(amp: Side, plain: Side) -> list[tuple[OpRow, OpRow]]:
    """The ops of the functions that are in half, each with the same op in float32."""
    there = {row.key: row for row in plain.rows}
    return [(row, there[row.key]) for row in amp.rows if row.policy == "half" and row.key in there]


def slower_functions(amp: Side, plain: Side) -> list[str]:
    """Functions that are in half and take longer there, in each pass, than in float32 in any, by what counts."""
    more: dict[str, float] = defaultdict(float)
    for row, other in in_half(amp, plain):
        if row.function.startswith("netcl."):
            more[row.name] += (row.seconds or 0.0) - other.slowest
    return [name for name, seconds in more.items() if seconds > 0.02 * amp.op_seconds]


def _race(step: Step, regions: Sequence[Region], queues: Iterable[cl.CommandQueue]) -> list[list[float]]:
    """Seconds of the step in each region, turn about."""
    for region in regions:
        _seconds(step, region, queues)  # builds its kernels
    times: list[list[float]] = [[] for _ in regions]
    began = perf_counter()
    while len(times[0]) < _LEAST or (perf_counter() - began < _SECONDS and len(times[0]) < _MOST):
        for region, own in zip(regions, times, strict=True):
            own.append(_seconds(step, region, queues))
    return times


def _seconds(step: Step, region: Region, queues: Iterable[cl.CommandQueue]) -> float:
    weight_cache.clear()
    _finish(queues)
    with in_region(region):
        began = perf_counter()
        step()
        _finish(queues)
        return perf_counter() - began


def _finish(queues: Iterable[cl.CommandQueue]) -> None:
    for queue in queues:
        queue.finish()


def _least(passes: Sequence[Side]) -> Side:
    times: dict[tuple[Any, ...], list[float]] = {}
    for row in (row for one in passes for row in one.rows):
        times.setdefault(row.identity, []).append(row.seconds or 0.0)
    rows = [replace(row, seconds=min(times[row.identity]), most=max(times[row.identity])) for row in passes[-1].rows]
    least = {name: min(getattr(one, name) for one in passes) for name in _TIMES}
    return replace(passes[-1], rows=rows, **least)
