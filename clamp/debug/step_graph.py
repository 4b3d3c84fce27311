"""One op as it was seen, forward or backward: what it read, what it gave, where it was called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from clamp import bridge
from clamp.bridge import Tensor
from clamp.debug.callsite import Place
from clamp.debug.float32_reference import Call
from clamp.ops.statistics import PendingStatistics, Statistics, is_measurable
from clamp.scaling.loss_scale import LossScale

FORWARD, BACKWARD = "forward", "backward"


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that an op read or gave.

    Attributes:
        tensor: as long as it is held; what is measured may be let go.
        dtype, shape: of it.
        made_by: the op that gave it; None of parameters and inputs.
        name: of a tensor of the model's, ``"layers.2.weight"``; empty else, and until somebody asks (`Trace.name`).
        statistics: once they have been measured.
    """

    tensor: Tensor | None
    dtype: str
    shape: tuple[int, ...]
    made_by: Frame | None = None
    name: str = ""
    statistics: Statistics | None = None

    @classmethod
    def of(cls, tensor: Tensor, made_by: Frame | None = None) -> Value:
        """That of a tensor, which is held."""
        return cls(tensor, bridge.canonical_dtype(tensor.dtype), tuple(tensor.shape), made_by)

    @property
    def is_finite(self) -> bool:
        """Whether nothing of it is inf or nan, as far as it has been measured."""
        return self.statistics is None or self.statistics.is_finite

    @property
    def source(self) -> str:
        """What it is, in words: a parameter's name, the op that made it, or "input"."""
        if self.name:
            return self.name
        if self.made_by is None:
            return "input"
        where = f" in {self.made_by.module}" if self.made_by.module else ""
        return f"{'gradient from ' if self.made_by.direction == BACKWARD else ''}{self.made_by.op}{where}"


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
        module: path of the innermost layer, ``"layers.2"``; empty if there is none, and until somebody asks.
        again: computes the gradients from that of the result, as long as it is held.
        call: of a forward, the call that made it, as long as it is held; None where nobody has kept it.
    """

    op: str
    direction: str
    place: Place
    inputs: list[Value]
    outputs: list[Value]
    parents: list[Value] = field(default_factory=list)
    forward: Frame | None = None
    module: str = ""
    again: Callable[[Tensor], Any] | None = None
    call: Call | None = None

    @property
    def function(self) -> str:
        """Name of netcl's function as the lists have it, ``"matmul_op"``; that of the op where there is none."""
        return self.place.function.rpartition(".")[2] or self.op

    @property
    def is_finite(self) -> bool:
        """Whether nothing that it gave is inf or nan."""
        return all(value.is_finite for value in self.outputs)

    def __str__(self) -> str:
        shapes = ", ".join(f"{value.dtype} {value.shape}" for value in self.outputs) or "nothing"
        where = f" in {self.module}" if self.module else ""
        return f"{self.direction} of {self.function}{where}: {shapes}"


@dataclass(eq=False)
class Trace:
    """The ops of one step, in their order, measured.

    Attributes:
        frames: they are.
        scale: the loss scale of the step.
        scaler: whose it is; None where the loss was not scaled.
        is_cut: whether ops of earlier passes were let go.
    """

    frames: list[Frame]
    scale: float = 1.0
    scaler: LossScale | None = None
    is_cut: bool = False

    @property
    def values(self) -> list[Value]:
        """Every tensor of it once: parameters and inputs too."""
        return distinct(value for frame in self.frames for value in (*frame.inputs, *frame.outputs, *frame.parents))

    def measuring(self, *, histogram: bool = False) -> Callable[[], None]:
        """Has those measured that can be, and have not been; returns what reads the statistics, which waits."""
        held = [(x, x.tensor) for x in self.values if x.tensor is not None and x.statistics is None]
        values = [(value, tensor) for value, tensor in held if is_measurable(tensor)]
        pending = PendingStatistics([tensor for _, tensor in values], histogram=histogram)

        def read() -> None:
            for (value, _), statistics in zip(values, pending.read(), strict=True):
                value.statistics = statistics

        return read

    def let_go(self) -> None:
        """Holds no memory of the device any more."""
        for frame in self.frames:
            frame.again = frame.call = None
        for value in self.values:
            value.tensor = None

    def name(self) -> None:
        """Finds the names of layers and parameters."""
        places = [frame.place.modules for frame in self.frames if frame.place.modules]
        modules = {id(inside[0]): inside[0] for inside in places}
        around = {id(inside[-1]): inside[-1] for inside in places}
        names = dict(zip(modules, bridge.module_names(list(modules.values()), around.values()), strict=True))
        for frame in self.frames:
            if frame.place.modules:
                frame.module = names[id(frame.place.modules[0])]
        leaves = [x for x in self.values if x.made_by is None and x.tensor is not None]
        for value, name in zip(leaves, bridge.parameter_names([x.tensor for x in leaves if x.tensor]), strict=True):
            if not name.startswith("params["):
                value.name = name
            elif value.tensor is not None and bridge.is_trained(value.tensor):
                value.name = "a trained tensor"


def distinct(values: Iterable[Value]) -> list[Value]:
    """Each once."""
    return list({id(value): value for value in values}.values())
