"""Rules on the run as a whole: checkpoints, another handle, other parameters, recorded steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from clamp import amp
from tests.loop.device import step_graph
from tests.loop.machine import RAISES, Loop, bools, networks, numbers, poisons, quarters
from tests.loop.model import Array, Loss, Optimizer, Param, Scale, backward

HANDLES: tuple[tuple[str, float | None, bool], ...] = (
    ("float16", None, False),
    ("float16", 2.0**6, False),
    ("float16", None, True),
    ("bfloat16", None, False),
    ("bfloat16", 2.0**4, False),
    ("float32", None, False),
    ("float32", 2.0**6, True),
)


@dataclass
class Saved:
    """What a checkpoint has, in the model."""

    handle: Any
    values: dict[str, Array]
    optimizers: list[tuple[int, dict[Param, tuple[Array, Array]]]]
    scales: list[tuple[float, int, set[Optimizer]]]


class WholeRun(Loop):
    """What surrounds a training loop."""

    folder: TemporaryDirectory[str] | None = None
    saved: Saved | None = None

    def teardown(self) -> None:
        super().teardown()
        if self.folder is not None:
            self.folder.cleanup()

    @initialize()
    def no_graphs(self) -> None:
        self.graphs: dict[tuple[int, bool], tuple[Any, Scale]] = {}

    @rule(how=st.sampled_from(HANDLES))
    def begin_again(self, how: tuple[str, float | None, bool]) -> None:
        """Another handle: gradients stay, and know what they are multiplied by."""
        self.handle.shutdown()
        self.start(*how)

    # ------------------------------------------------------------------------------------------ parameters

    @rule(net=networks, layer=st.integers(0, 1), part=st.integers(0, 1))
    def replace_parameter(self, net: int, layer: int, part: int) -> None:
        old = self.layers[net][layer % len(self.layers[net])][part]
        if old.ulp:
            return  # a new one would be in float32
        self.seed += 1
        new = Param(old.name, quarters(self.seed, *old.value.shape))
        for layers in self.layers:
            for index, pair in enumerate(layers):
                layers[index] = tuple(new if param is old else param for param in pair)  # type: ignore[assignment]
        for optimizer in self.optimizers:
            optimizer.params = [new if param is old else param for param in optimizer.params]
        self.real.replace(old, new)

    @rule()
    def swap_values(self) -> None:
        """Writes one layer's numbers into another, and the other's into it."""
        first, second = self.layers[0][1][0], self.layers[1][1][0]
        first.value, second.value = second.value.copy(), first.value.copy()
        for param in (first, second):
            self.real.params[param].write(param.value.astype(np.float32))

    # ------------------------------------------------------------------------------------------ checkpoints

    @rule()
    def save(self) -> None:
        if self.folder is None:
            self.folder = TemporaryDirectory()
        amp.save_checkpoint(self.file(), self.real.nets, list(self.real.optimizers.values()))
        self.saved = Saved(
            self.handle,
            {param.name: param.value.copy() for param in self.all_params()},
            [(optimizer.steps, self.state_of(optimizer)) for optimizer in self.optimizers],
            [(scale.scale, scale.tracker, set(scale.overflow)) for scale in self.own_scales],
        )

    def file(self) -> Path:
        return Path(self.folder.name) / "run.npz"  # type: ignore[union-attr]

    def state_of(self, optimizer: Optimizer) -> dict[Any, tuple[Array, Array]]:
        return {param.name: tuple(x.copy() for x in pair) for param, pair in optimizer.state.items()}  # type: ignore[misc]

    @rule()
    def load(self) -> None:
        if self.saved is None or self.saved.handle is not self.handle:
            return
        amp.load_checkpoint(self.file(), self.real.nets, list(self.real.optimizers.values()))
        for param in self.all_params():
            param.value = self.saved.values[param.name].copy()
        for optimizer, (steps, state) in zip(self.optimizers, self.saved.optimizers, strict=True):
            optimizer.steps = steps
            optimizer.state = {
                param: tuple(x.copy() for x in state[param.name])  # type: ignore[misc, index]
                for param in optimizer.params
                if param.name in state
            }
        for scale, (value, tracker, overflow) in zip(self.own_scales, self.saved.scales, strict=True):
            scale.scale, scale.tracker, scale.overflow = value, tracker, set(overflow)

    # ------------------------------------------------------------------------------------------ recorded steps

    @rule(net=networks, squares=bools, seed=numbers, poison=poisons, times=st.integers(1, 4))
    def graph(self, net: int, squares: bool, seed: int, poison: float | None, times: int) -> None:
        """A step as an ``amp.Graph``, which is recorded at its second call and replayed from the third on."""
        optimizer = self.optimizers[net]
        known = self.graphs.get((net, squares))
        if known is None or known[1].scale > 2.0**6:
            made = step_graph(self.real.nets[net], [self.real.optimizers[optimizer]], squares, 2.0**4)
            known = self.graphs[net, squares] = made, Scale(2.0**4, interval=2)
        for number in range(times):
            self.keep_in_range()
            self.run_graph(*known, self.loss_of(net, squares, seed + number, poison))
            self.everything_is_as_it_must_be()
            poison = None

    def loss_of(self, net: int, squares: bool, seed: int, poison: float | None) -> Loss:
        return Loss(net, squares, *self.batch(net, seed, poison), self.dtype_of(net, self.dtype))

    def run_graph(self, graph: Any, scale: Scale, loss: Loss) -> None:
        optimizer = self.optimizers[loss.net]
        inputs = self.real.tensor(loss.x), self.real.tensor(loss.y)
        optimizer.pending = set()
        for param in optimizer.params:
            param.grad = None
        value, slack, passed = backward(self.layers[loss.net], loss)
        if not passed:
            self.raises(RAISES, lambda: graph(*inputs))
            return
        shown = float(graph(*inputs).to_host()[0])
        assert not np.isfinite(value) or abs(shown - value) <= slack, f"the loss is {shown} and must be {value}"
        self.add(passed)
        scale.adjust(optimizer.has_bad())
        assert graph.loss_scale == scale.scale
        if not optimizer.has_bad():
            self.written |= optimizer.step()
