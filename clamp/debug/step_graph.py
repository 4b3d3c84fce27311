"""The ops of a step as they were seen, forward and backward: what each read and gave, where it was called, and from
which of them inf and nan came."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from clamp import bridge
from clamp.bridge import Tensor
from clamp.casting.results import GradFn
from clamp.debug.callsite import INSERTED, NOWHERE, Call, Place
from clamp.debug.words import placed
from clamp.opencl.host_steps import unrecorded
from clamp.ops.statistics import Statistics, statistics_of
from clamp.scaling.loss_scale import LossScale

FORWARD, BACKWARD = "forward", "backward"
BEFORE = 8  # ops in a row before one that is not finite, among which one may be to blame


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that an op read or gave.

    Attributes:
        tensor: as long as it is held; what is measured may be let go.
        made_by: the op that gave it; None of parameters and inputs.
        name: of a tensor of the model's, ``"layers.2.weight"``; empty else, and until somebody asks (`StepGraph.name`).
        statistics: once they have been measured.
        is_cut_off: whether an op gave it that has been let go, and not the user.
    """

    tensor: Tensor | None
    dtype: str
    shape: tuple[int, ...]
    made_by: Frame | None = None
    name: str = ""
    statistics: Statistics | None = None
    is_cut_off: bool = False

    @property
    def is_finite(self) -> bool:
        """Returns whether nothing of it is inf or nan, as far as it has been measured."""
        return self.statistics is None or self.statistics.is_finite

    @property
    def largest(self) -> float:
        """The greatest finite magnitude; 0 where it has not been measured, too."""
        return 0.0 if self.statistics is None else self.statistics.largest

    @property
    def bad(self) -> tuple[int, int]:
        """How many elements are inf, and nan, as far as it has been measured."""
        return (0, 0) if self.statistics is None else (self.statistics.infs, self.statistics.nans)

    @property
    def source(self) -> str:
        """Returns what it is, in words: a parameter's name, the op that made it, or "input"."""
        if self.name:
            return self.name
        if self.made_by is None:
            return "input"
        made = placed(self.made_by.op, self.made_by.module)
        return f"gradient from {made}" if self.made_by.direction == BACKWARD else made


@dataclass(eq=False, slots=True)
class Frame:
    """One op.

    Attributes:
        op: netcl's name of it, ``"matmul"``.
        direction: ``"forward"`` or ``"backward"``.
        place: where it was called; of a backward, its forward.
        inputs: what it read; of a backward, the gradient of its result.
        outputs: what it gave; of a backward, a gradient for each parent that wants one.
        parents: of a backward, what its forward read; of a forward, whose gradients ``again`` gives.
        forward: of a backward, the op that it is of.
        module: path of the innermost layer, ``"layers.2"``; empty if there is none.
        again: computes the gradients from that of the result, as long as it is held.
        call: of a forward, the call that made it, as long as it is held; None where nobody has kept it.
        is_view: whether it gave the memory that it read.
    """

    op: str
    direction: str
    place: Place
    inputs: list[Value]
    outputs: list[Value]
    parents: list[Value] = field(default_factory=list)
    forward: Frame | None = None
    module: str = ""
    again: GradFn | None = None
    call: Call | None = None
    is_view: bool = False

    @property
    def function(self) -> str:
        """Name of netcl's function as the lists have it, ``"matmul_op"``; that of the op where there is none."""
        return self.place.function.rpartition(".")[2] or self.op

    @property
    def is_finite(self) -> bool:
        """Returns whether nothing that it gave is inf or nan."""
        return all(value.is_finite for value in self.outputs)

    def __str__(self) -> str:
        shapes = ", ".join(f"{value.dtype} {value.shape}" for value in self.outputs) or "nothing"
        return f"{self.direction} of {placed(self.function, self.module)}: {shapes}"


@dataclass(eq=False)
class StepGraph:
    """The ops of one step, in their order, as they are told of; measured when somebody asks.

    Attributes:
        scale: the loss scale of the step.
        scaler: whose it is; None where the loss was not scaled.
        is_cut: whether ops of earlier passes were let go.
        held: bytes of the tensors that have been told of.
        awaited: ops whose backward is to come, by their ids: their calls are kept.
    """

    frames: list[Frame] = field(default_factory=list)
    scale: float = 1.0
    scaler: LossScale | None = None
    is_cut: bool = False
    held: int = 0
    awaited: dict[int, Frame] = field(default_factory=dict)
    _paths: bridge.ModulePaths = field(default_factory=bridge.ModulePaths)
    _known: dict[int, tuple[weakref.ref[Tensor], Value]] = field(default_factory=dict)  # by the id of a tensor

    def forward(
        self, op: str, place: Place, read: Sequence[Tensor], gave: Tensor, call: Call | None = None,
        wanted: Iterable[Tensor] = (), again: GradFn | None = None,
    ) -> Frame:  # fmt: skip
        """Adds an op; the arguments are what its frame has."""
        parents, module = list(map(self._value, wanted)), self._paths.around(place.modules)
        return self._add(Frame(op, FORWARD, place, [], [], parents, None, module, again, call), read, [gave])

    def backward(self, of: Frame, grad: Tensor, grads: Iterable[Tensor | None], again: GradFn) -> Frame:
        """Adds the backward of an op, which gave ``grads`` for ``grad``."""
        self.awaited.pop(id(of), None)
        frame = Frame(of.op, BACKWARD, of.place, [], [], of.inputs, of, of.module, again)
        return self._add(frame, [grad], [x for x in grads if x is not None])

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        """Adds a sum of two gradients of one result."""
        self._add(Frame("sum of gradients", BACKWARD, NOWHERE, [], []), [first, second], [made])

    def _add(self, frame: Frame, read: Sequence[Tensor], gave: Sequence[Tensor]) -> Frame:
        frame.inputs.extend(map(self._value, read))
        frame.is_view = bool(gave) and any(x.buffer is gave[0].buffer for x in read)
        for value in map(self._value, gave):
            if value.made_by is None:  # netcl's add hands on the gradient that it was given
                value.made_by = frame
            frame.outputs.append(value)
        self.frames.append(frame)
        return frame

    def _value(self, tensor: Tensor) -> Value:
        ref, value = self._known.get(id(tensor), (None, None))
        if ref is None or value is None or ref() is not tensor:
            value = Value(tensor, bridge.canonical_dtype(tensor.dtype), tuple(tensor.shape))
            self._known[id(tensor)] = weakref.ref(tensor), value
            self.held += bridge.nbytes(tensor)
        return value

    @property
    def values(self) -> list[Value]:
        """Every tensor of it once: parameters and inputs too."""
        return distinct(value for frame in self.frames for value in (*frame.inputs, *frame.outputs, *frame.parents))

    @property
    def leaves(self) -> list[tuple[Value, Tensor]]:
        """Parameters and inputs, with their tensors, as long as they are held."""
        return [(x, x.tensor) for x in self.values if x.made_by is None and x.tensor is not None]

    def measure(self, *, histogram: bool = False) -> None:
        """Finds the statistics of what can be measured, and has not been. Waits for the device."""
        held = [(x, x.tensor) for x in self.values if x.tensor is not None and x.statistics is None]
        values = [(value, tensor) for value, tensor in held if bridge.is_floating(tensor)]
        with unrecorded():
            found = statistics_of([tensor for _, tensor in values], histogram=histogram)
        for (value, _), statistics in zip(values, found, strict=True):
            value.statistics = statistics

    def release(self, kept: Iterable[Frame] | None = None) -> None:
        """Holds no memory of the device any more.

        Args:
            kept: ops of which all is kept, and with them parameters and inputs, which live on in any case.
        """
        frames = {id(frame): frame for frame in kept or ()}
        tensors = {id(x) for frame in frames.values() for x in (*frame.inputs, *frame.outputs, *frame.parents)}
        for frame in self.frames:
            if id(frame) not in frames and (kept is None or id(frame) not in self.awaited):
                frame.again = frame.call = None
        for value in self.values:
            if kept is None or (value.made_by is not None and id(value) not in tensors):
                value.tensor = None
        self.held = 0

    def suspects(self) -> list[Frame]:
        """The ops that have made inf or nan of finite numbers, those that they are the backward of, and some that come
        before, whose results may be to blame; and the last, whose results the next may make something of."""
        found = [frame for frame in self.frames if not frame.is_finite and all(x.is_finite for x in frame.inputs)]
        found += [frame.forward for frame in found if frame.forward is not None]
        last = found
        for _ in range(BEFORE):
            last = list({id(x.made_by): x.made_by for frame in last for x in frame.inputs if x.made_by}.values())
            found += last
        return [*found, *self.frames[-BEFORE:]]

    def name(self) -> None:
        """Finds the names of parameters."""
        found = bridge.parameter_names([tensor for _, tensor in self.leaves])
        for (value, tensor), name in zip(self.leaves, found, strict=True):
            if not name.startswith("params["):
                value.name = name
            elif bridge.is_trained(tensor):
                value.name = "a trained tensor"


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Returns whether nothing of them is inf or nan. Waits for the device."""
    with unrecorded():
        return all(found.is_finite for found in statistics_of(tensors, histogram=False))


def distinct(values: Iterable[Value]) -> list[Value]:
    """Each once."""
    return list({id(value): value for value in values}.values())


# ---------------------------------------------------------------------------------------------- origins


def find_origin(trace: StepGraph) -> tuple[Frame | None, Value | None]:
    """The earliest op from which inf or nan has come to a gradient of what is trained, or to the loss; None if all is
    finite. With it, what was not finite before any op, a parameter or an input that it read; None if the op made it.

    What goes nowhere, the -inf of a mask that softmax makes zeros of, is nobody's fault.
    """
    # By what each has read, not by the order: a node that was made by hand is told of when backward begins.
    stack, seen, origins = _ends(trace), set[int](), list[tuple[Frame, Value | None]]()
    while stack:
        frame = stack.pop()
        if id(frame) in seen:
            continue
        seen.add(id(frame))
        bad = [value for value in frame.inputs if not value.is_finite]
        makers = [value.made_by for value in bad if value.made_by is not None]
        # The gradient of an op whose result was bad already is no news.
        if frame.direction == BACKWARD and not bad and frame.forward is not None and not frame.forward.is_finite:
            makers = [frame.forward]
        stack += makers
        leaf = next((value for value in bad if value.made_by is None), None)
        if leaf is not None or not makers:
            origins.append((frame, leaf))
    return min(origins, key=lambda one: trace.frames.index(one[0]), default=(None, None))


def _ends(trace: StepGraph) -> list[Frame]:
    """The ops that gave what is bad at the end: gradients of leaves, or else the results that no op has read."""
    leaves = [
        frame
        for frame in trace.frames
        if frame.direction == BACKWARD
        and not frame.is_finite
        and any(parent.made_by is None for parent in frame.parents)
    ]
    if leaves:
        return leaves
    read = {id(value) for frame in trace.frames for value in frame.inputs}
    # Where there is a backward, what it did not come from, a metric, trains nothing.
    trained = {id(frame.forward) for frame in trace.frames if frame.forward is not None}
    return [
        frame
        for frame in trace.frames
        if not frame.is_finite
        and not any(id(value) in read for value in frame.outputs)
        and (not trained or frame.direction == BACKWARD or id(frame) in trained)
    ]


_DIVIDING = frozenset({"div", "rsqrt", "pow"})  # which make 0 of an inf, and a number of what it stands for


def find_divided(trace: StepGraph) -> tuple[Frame, Frame] | None:
    """The first op whose float16 result is not finite, as what it read is, and the one that has made finite numbers of
    it by dividing; None if there are none."""
    for frame in trace.frames:
        bad = [value for value in frame.inputs if not value.is_finite]
        if frame.direction == BACKWARD or frame.function not in _DIVIDING or not bad or not frame.is_finite:
            continue
        maker = bad[-1].made_by
        while maker is not None and maker.op in INSERTED and not maker.inputs[0].is_finite:
            maker = maker.inputs[0].made_by
        if maker is not None and all(value.is_finite for value in maker.inputs) and not maker.is_finite:
            return maker, frame
    return None
