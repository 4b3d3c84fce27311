"""A training step, timed: a stack of ``Linear(n) + ReLU`` with netcl's layers, tape and optimizer.

netcl alone runs it in float32; clamp runs the same script with its two lines more, in each dtype.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.nn.layers import Linear, ReLU, Sequential
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from clamp.cli.cases import Case, Contender, dtypes_of
from clamp.cli.peers import PeerProcess
from clamp.cli.timing import timed
from clamp.debugging import MemoryMeter
from clamp.handle import AmpHandle, NoOpHandle

_WARM_UP_LIMIT = 40  # a dynamic loss scale of 2^16 needs a few skipped steps to settle


@dataclass(frozen=True)
class StepShape:
    """Layers, their width, and the batch."""

    layers: int
    width: int
    batch: int

    def __str__(self) -> str:
        return f"{self.layers} x Linear({self.width})+ReLU, batch {self.batch}"


class Variant:
    """One variant of the training, with its own model, optimizer and loss scale.

    Args:
        queue: where to train.
        shape: of the network.
        dtype: clamp's AMP dtype; None for netcl alone.
    """

    def __init__(self, queue: cl.CommandQueue, shape: StepShape, dtype: str | None) -> None:
        self._queue = queue
        self._dtype = dtype
        self._scalers: dict[str, Any] | None = None
        self._first_loss: float | None = None
        np.random.seed(0)  # netcl's initializers draw from it: every variant starts from the same weights
        layers: list[Any] = []
        for _ in range(shape.layers):
            layers += [Linear(queue, shape.width, shape.width), ReLU()]
        self._model = Sequential(*layers[:-1])
        rows = (shape.batch, shape.width)
        rng = np.random.default_rng(0)
        self._x, self._y = (Tensor.from_host(queue, rng.standard_normal(rows, dtype=np.float32)) for _ in range(2))
        # netcl's mse_loss sums; this is the rate of 1e-3 on the mean, with which the loss stays finite.
        self._optimizer = SGD(self._model.parameters(), lr=1e-3 / (shape.batch * shape.width))

    def turn(self, calls: int) -> list[float]:
        """Times training steps, each with the loss read at its end."""
        with self._amp() as handle:
            return timed(partial(self._train, handle), self._queue.finish)(calls)

    def figures(self) -> dict[str, float]:
        """The first loss, which is the same for all variants but for rounding, and the loss scale now."""
        loss = {} if self._first_loss is None else {"first_loss": self._first_loss}
        scale = {} if self._scalers is None else {"loss_scale": self._scalers["loss_scaler0"]["loss_scale"]}
        return {**loss, **scale}

    def memory(self) -> dict[str, int]:
        """Bytes of activations at the end of forward, and the peak of a whole step.

        Activations leave out parameters, inputs and the 16-bit copies of weights; the peak includes gradients,
        workspaces and those copies.
        """
        with self._amp() as handle:
            self._forget(handle)
            with MemoryMeter() as meter:
                graph = self._forward()
                activations = meter.activations
            del graph
            self._forget(handle)
            with MemoryMeter() as meter:
                self._train(handle)
            return {"activations": activations, "peak of a step": meter.peak}

    def _forget(self, handle: AmpHandle | NoOpHandle | None) -> None:
        """Frees what earlier steps left behind: gradients, and copies of weights older than a meter."""
        self._optimizer.zero_grad()
        if handle is not None:
            handle.clear_cache()
        gc.collect()

    def _forward(self) -> tuple[Tape, Node]:
        with ag.Tape() as tape:
            loss = ag.mse_loss(self._model(ag.tensor(self._x)), ag.tensor(self._y))
        return tape, loss

    def _train(self, handle: AmpHandle | NoOpHandle | None) -> None:
        self._optimizer.zero_grad()
        tape, loss = self._forward()
        if handle is None:
            tape.backward(loss)
        else:
            with handle.scale_loss(loss, self._optimizer) as scaled_loss:
                tape.backward(scaled_loss)
        self._optimizer.step()
        value = loss.value.to_host().item()
        self._first_loss = value if self._first_loss is None else self._first_loss

    @contextmanager
    def _amp(self) -> Iterator[AmpHandle | NoOpHandle | None]:
        """This variant's AMP, which no other variant may see; its loss scale lives on from turn to turn."""
        if self._dtype is None:
            yield None
            return
        with amp.init(dtype=self._dtype) as handle:
            if self._scalers is None:
                self._settle(handle)
            else:
                amp.load_state_dict(self._scalers)
            try:
                yield handle
            finally:
                self._scalers = amp.state_dict()

    def _settle(self, handle: AmpHandle | NoOpHandle) -> None:
        """Trains until the loss scale has come down to where steps are no longer skipped."""
        for _ in range(_WARM_UP_LIMIT):
            self._train(handle)
            if handle.last_step is not None and handle.last_step.stepped:
                return
        raise FloatingPointError(f"no step of {_WARM_UP_LIMIT} had finite gradients")


def make_variants(queue: cl.CommandQueue, shape: StepShape) -> dict[str, Variant]:
    """netcl alone, and clamp in each dtype."""
    dtypes = {"netcl": None, **{f"clamp {dtype}": dtype for dtype in dtypes_of(queue)}}
    return {name: Variant(queue, shape, dtype) for name, dtype in dtypes.items()}


def step_case(variants: dict[str, Variant], shape: StepShape, peers: Sequence[PeerProcess]) -> Case:
    """The step's time."""
    contenders = [
        Contender(name, variant.turn, is_baseline=name == "netcl", extra=variant.figures)
        for name, variant in variants.items()
    ]
    for peer in peers:
        for dtype in peer.info.works.get("step", []):
            turn = peer.turn("step", dtype, str(shape.layers), str(shape.width), str(shape.batch))
            contenders.append(Contender(f"{peer.info.label} {dtype}", turn, is_baseline=True))
    return Case("step", str(shape), "ms", contenders)
