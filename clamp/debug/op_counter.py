"""What a run has done so far, counted as it goes: ops by place and dtype, casts, the loss and the gradients of steps.

Only counts are kept, a row for each place that ops are called at, so that a long run takes no more memory than a short
one, and nothing waits for the device.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import basename
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.results import RESULTS, GradFn, Gradients, Observer
from clamp.debug.callsite import NOWHERE, Place, here
from clamp.debug.step_graph import BACKWARD, FORWARD
from clamp.opencl.host_steps import host_step, recorder
from clamp.ops.cast import LISTENERS
from clamp.ops.ring_buffers import Elements, Norms
from clamp.params.gradient_marks import scale_of
from clamp.params.weight_cache import weight_cache
from clamp.scaling.scaled_loss import SCALE_OP
from clamp.scaling.step_guard import are_steps_withheld
from clamp.scaling.step_report import HISTORY, StepReport

N = TypeVar("N", Elements, Norms)
_Slot: TypeAlias = tuple[cl.CommandQueue, int]  # where a number was noted: which one of its queue's
_Token: TypeAlias = tuple[str, Place, str]  # an op, where, without modules and folder, and the innermost one's path
_ROWS = 4096  # losses, and norms, that are kept: several of a step


@dataclass(slots=True)
class OpRow:
    """The calls of one op at one place.

    Attributes:
        op: netcl's name of it.
        direction: ``"forward"`` or ``"backward"``.
        function: full name of the function on a list; empty if it is on none.
        policy: its policy where casts were on; empty elsewhere.
        decided: that, and the rule for modules that decided about it, if there was one, ``"half (head.*: float32)"``.
        module: path of the innermost layer, ``"layers.2"``; empty if there is none, or it has none.
        line: ``"train.py:31"``, the nearest line of the user's.
        inputs: dtypes of what it read; of a backward, of the gradient of its result.
        dtype, shape: of its result; of a backward, of its first gradient. The shape is that of the first call.
        calls, bytes: how often, and how many bytes it was given and gave in all: 0 of a view.
        seconds: what its launches took in all, of several passes in the fastest; None where that was not measured.
        most: in the slowest; None where there was one pass.
    """

    op: str
    direction: str
    function: str
    policy: str
    module: str
    line: str
    inputs: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    calls: int = 0
    bytes: int = 0
    seconds: float | None = None
    most: float | None = None
    decided: str = ""

    @property
    def slowest(self) -> float:
        """Seconds in the slowest pass."""
        return max(self.seconds or 0.0, self.most or 0.0)

    @property
    def name(self) -> str:
        """The function's name as the lists have it, ``"matmul_op"``; that of the op where there is none."""
        return self.function.rpartition(".")[2] or self.op

    @property
    def key(self) -> tuple[str, ...]:
        """The op and its place, whatever its dtypes: the same under AMP and in float32."""
        return self.op, self.direction, self.function, self.module, self.line

    @property
    def identity(self) -> tuple[Any, ...]:
        """Returns what it is of: all but counts and shape."""
        return (*self.key, self.policy, self.decided, self.inputs, self.dtype)


class Casts(NamedTuple):
    """Conversions from one dtype to another that were launched: of inputs, results, weights and gradients."""

    source: str
    target: str
    calls: int
    bytes: int


class _Replayed(threading.local):
    """Counts that each replay of this thread's recording adds."""

    def __init__(self) -> None:
        self.adds: list[Callable[[], None]] = []

    def take(self) -> list[Callable[[], None]]:
        taken, self.adds = self.adds, []
        return taken


class OpCounter(Observer):
    """An observer that counts.

    Args:
        is_own: whether a step is one of the run's, and not of another scaler's in the same process.
        of_dry_run: whether it counts a step that is only looked at: nothing of it is noted on the device then, which
            would be launches of its own.

    Attributes:
        curves: loss and gradients of the steps.
        weight_copies: the most bytes of 16-bit copies of weights that there were when a loss was scaled.
    """

    def __init__(self, is_own: Callable[[StepReport], bool] = lambda report: True, *, of_dry_run: bool = False) -> None:
        self._is_own, self._of_dry_run = is_own, of_dry_run
        self.needs_values = of_dry_run
        self.curves = Curves()
        self.weight_copies = 0
        self._lock = threading.RLock()
        self._rows: dict[tuple[Any, ...], OpRow] = {}
        self._casts: dict[tuple[str, str], Casts] = {}
        self._paths = bridge.ModulePaths()
        self._models: dict[int, weakref.ref[Any]] = {}
        self._recording = _Replayed()

    def start(self) -> None:
        """Ops and casts are counted from now on."""
        if self._cast not in LISTENERS:
            LISTENERS.append(self._cast)
        RESULTS.attach(self)

    def stop(self) -> None:
        """They are not."""
        RESULTS.detach(self)
        if self._cast in LISTENERS:
            LISTENERS.remove(self._cast)

    # ------------------------------------------------------------------------------------------ what ops tell

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> _Token | None:
        value = made.value
        if not isinstance(value, Tensor) or self._rests():
            return None
        read = [parent.value for parent in parents if isinstance(parent.value, Tensor)]
        op = getattr(made, "op_name", None) or ""
        if op == SCALE_OP and isinstance(made, Node) and bridge.on_device(read[0]) and not self._of_dry_run:
            self.weight_copies = max(self.weight_copies, weight_cache.nbytes)
            self.curves.loss(read[0])
        place = here()
        path = ""
        if place.modules:
            with self._lock:
                path = self._paths.around(place.modules)
                self._models[id(place.modules[-1])] = weakref.ref(place.modules[-1])
        place = place._replace(modules=(), file=basename(place.file))
        token = op or place.function.rpartition(".")[2] or "op", place, path
        self._count(token, FORWARD, read, [value])
        return token

    def gradients(self, token: _Token, grad: Tensor, grads: Gradients, again: GradFn) -> None:
        found = [x for x in grads if x is not None]
        if found:
            self._count(token, BACKWARD, [grad], found)

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        if self._rests():
            return
        self._count(("sum of gradients", NOWHERE, ""), BACKWARD, [first, second], [made])

    def backward_ended(self, loss: Node, grad: Tensor | None) -> None:
        if recorder() is not None:
            host_step(partial(_run_all, self._recording.take()))

    def stepping(self, gradients: Sequence[Tensor]) -> None:
        if not self._of_dry_run:  # of another thread's step, then
            self.curves.gradients(gradients)

    def stepped(self, report: StepReport) -> None:
        self.curves.stepped(report.step if self._is_own(report) else None)

    # ------------------------------------------------------------------------------------------ counting

    def _count(self, token: _Token, direction: str, read: list[Tensor], gave: list[Tensor]) -> None:
        op, place, path = token
        key = op, direction, place, path, tuple([_dtype(x) for x in read]), _dtype(gave[0])
        row = self._rows.get(key)
        if row is None:
            row = OpRow(
                op, direction, place.function, place.policy, path, place.short_line, *key[-2:], tuple(gave[0].shape),
                decided=place.decided,
            )  # fmt: skip
            row = self._rows.setdefault(key, row)  # but for one of another thread's
        is_view = len(gave) == 1 and any(gave[0].buffer is x.buffer for x in read)
        size = 0 if is_view else sum(map(bridge.nbytes, read)) + sum(map(bridge.nbytes, gave))
        self._now_or_in_replays(partial(self._add, row, size))
        self.counted(row)

    def counted(self, row: OpRow) -> None:
        """An op of such a row has been counted; for who wants to know more of it."""

    def converted(self, source: Tensor, target: Tensor) -> None:
        """A cast has been launched; the same."""

    def _rests(self) -> bool:
        """Returns whether this thread runs a step that is only looked at, which is no part of the run."""
        return are_steps_withheld() and not self._of_dry_run

    def _cast(self, source: Tensor, target: Tensor) -> None:
        if self._rests():
            return
        self.converted(source, target)
        kinds = _dtype(source), _dtype(target)
        self._now_or_in_replays(partial(self._add_cast, kinds, bridge.nbytes(source) + bridge.nbytes(target)))

    def _now_or_in_replays(self, add: Callable[[], None]) -> None:
        if recorder() is not None:
            self._recording.adds.append(add)
            return
        _run_all([*self._recording.take(), add])  # of a recording without a backward: counted when it is recorded

    def _add(self, row: OpRow, size: int) -> None:
        with self._lock:
            row.calls += 1
            row.bytes += size

    def _add_cast(self, kinds: tuple[str, str], size: int) -> None:
        with self._lock:
            before = self._casts.get(kinds, Casts(*kinds, 0, 0))
            self._casts[kinds] = before._replace(calls=before.calls + 1, bytes=before.bytes + size)

    # ------------------------------------------------------------------------------------------ asking

    @property
    def rows(self) -> list[OpRow]:
        """The ops, in the order in which they first ran."""
        rows = list(self._rows.values())  # to which other threads add
        return [replace(row) for row in rows if row.calls]  # a recording has none before it is replayed

    @property
    def modules(self) -> list[tuple[str, str, int]]:
        """The layers of the models that have run, and that there still are; see ``bridge.module_tree``."""
        models = [model for ref in list(self._models.values()) if (model := ref()) is not None]
        return list({found[0]: found for model in models for found in bridge.module_tree(model)}.values())

    @property
    def casts(self) -> list[Casts]:
        """Casts, those of most bytes first."""
        with self._lock:
            return sorted(self._casts.values(), key=lambda one: -one.bytes)


def _dtype(tensor: Tensor) -> str:
    return bridge.canonical_dtype(tensor.dtype)


def _run_all(adds: Sequence[Callable[[], None]]) -> None:
    for add in adds:
        add()


# ---------------------------------------------------------------------------------------------- loss and gradients


class Point(NamedTuple):
    """One step: its loss, of several the mean, and the norm of the gradients that it was made with, or skipped for;
    None where none is known."""

    loss: float | None
    gradient_norm: float | None


class _Book(Generic[N]):
    """Notes of one kind, those of each queue on its own device; the oldest are written over."""

    def __init__(self, kind: type[N]) -> None:
        self._kind: type[N] = kind
        self._notes: dict[cl.CommandQueue, N] = {}
        self._counts: dict[cl.CommandQueue, int] = {}

    def note(self, queue: cl.CommandQueue, numbers: Any) -> _Slot:
        """Notes what ``N.note`` is to, and returns where."""
        if queue not in self._notes:
            self._notes[queue], self._counts[queue] = self._kind(queue, _ROWS), 0
        slot = queue, self._counts[queue]
        self._counts[queue] += 1
        self._notes[queue].note(slot[1] % _ROWS, numbers)
        return slot

    def read(self) -> dict[_Slot, float]:
        """All that is still there, with one read a queue."""
        found = [(queue, notes.read()) for queue, notes in self._notes.items()]
        return {
            (queue, number): float(values[number % _ROWS])
            for queue, values in found
            for number in range(max(0, self._counts[queue] - _ROWS), self._counts[queue])
        }


class Curves:
    """Losses and norms that steps noted. Nothing waits for the device but ``read``; in a recording every replay notes
    anew."""

    def __init__(self) -> None:
        self._losses, self._norms = _Book[Elements](Elements), _Book[Norms](Norms)
        self._since: tuple[list[_Slot], list[_Slot]] = [], []  # noted since the last step: losses, and norms
        self._steps: deque[tuple[int, list[_Slot], list[_Slot]]] = deque(maxlen=HISTORY)

    def loss(self, loss: Tensor) -> None:
        """Notes a loss of one element, on a device."""
        host_step(partial(self._note_loss, loss))

    def _note_loss(self, loss: Tensor) -> None:
        self._since[0].append(self._losses.note(loss.queue, loss))
        del self._since[0][:-_ROWS]  # a program that scales losses, and never steps

    def gradients(self, gradients: Sequence[Tensor]) -> None:
        """Notes the norm of true gradients; does nothing where one is still multiplied by a loss scale."""
        found = [x for x in gradients if x.size and bridge.is_floating(x)]
        if not found or any(scale_of(x) is not None for x in found):
            return
        by_queue: dict[cl.CommandQueue, list[Tensor]] = {}
        for gradient in {id(x): x for x in found}.values():
            by_queue.setdefault(gradient.queue, []).append(gradient)
        for queue, these in by_queue.items():
            self._since[1].append(self._norms.note(queue, these))

    def stepped(self, step: int | None) -> None:
        """Assigns what has been noted since the last step to this one; with None, to none."""
        if step is not None:
            self._steps.append((step, *self._since))
        self._since = [], []

    def read(self) -> dict[int, Point]:
        """The points of the last 1000 steps by their numbers. Waits for the device."""
        losses, norms = self._losses.read(), self._norms.read()
        points = {}
        for step, of_losses, of_norms in self._steps:
            loss = [losses[place] for place in of_losses if place in losses]
            norm = [norms[place] for place in of_norms if place in norms]
            with np.errstate(invalid="ignore"):  # of inf and nan
                points[step] = Point(
                    float(np.mean(loss)) if loss else None, float(np.sqrt(np.square(norm).sum())) if norm else None
                )
        return points
