"""The training of a network: the time of its steps, beside that of peers; its memory, by both ways to run backward; and
what checkpointing takes and saves.

netcl alone runs a step in float32; clamp runs the same script with its two lines more, in each dtype.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyopencl as cl
from netcl.nn.layers import Sequential

from clamp import amp
from clamp.cli.bench.networks import Network, Trainer
from clamp.cli.bench.peers import PeerProcess, peer_contenders
from clamp.cli.bench.report import Row, memory_rows
from clamp.cli.bench.timing import Case, Contender, amp_in, dtypes_of, launches_of, timed
from clamp.debug.memory_meter import by_kind, pieces_now
from clamp.debugging import MemoryMeter
from clamp.handle import AmpHandle, NoOpHandle
from clamp.interrupts import contextmanager
from clamp.opencl.device import capabilities

_WARM_UP = 3
_WARM_UP_LIMIT = 40  # a dynamic loss scale of 2^16 needs a few skipped steps to settle
_STEPS = 3  # of a loop, whose loss stays until the next step has another
_FIXED = {"loss_scale": 1024.0}  # at which no step of such a loop is skipped
_LAYERS = 6  # of a stack without pools are a block


@dataclass
class Variant:
    """One variant of the training, with its own model, optimizer and loss scale."""

    queue: cl.CommandQueue  # where to train
    network: Network  # what to train
    dtype: str | None  # clamp's AMP dtype; None for netcl alone
    # of AMP, O1 if not given; at ``"O2"`` the parameters are 16-bit, as Paddle's ``decorate`` makes them
    level: str | None = None
    master_weight: str | None = None  # of ``decorate``: what is kept of them from step to step
    in_blocks: bool = False  # whether blocks of the network are checkpointed
    is_recorded: bool = False  # whether steps are replayed (`amp.record`)
    reads_loss: bool = True  # whether a step ends with that
    in_8_bits: bool = False  # whether the moments of its Adam or AdamW are of 8 bits (`amp.optim`)
    options: Mapping[str, Any] = field(default_factory=dict)  # more of `amp.init`
    _scalers: dict[str, Any] | None = None
    _first_loss: float | None = None
    _trainer: Any = None
    _step: Any = None
    _handle: AmpHandle | NoOpHandle | None = None  # of its AMP that is on; None for netcl alone

    @property
    def name(self) -> str:
        """The contender's."""
        if self.dtype is None:
            return "netcl"
        parts = [
            f"clamp {self.dtype}" + (f" {self.level}" if self.level else ""),
            self.master_weight,
            self.in_blocks and "checkpoint",
            self.in_8_bits and "8-bit state",
            self.is_recorded and "recorded",
        ]
        return ", ".join(part for part in parts if part)

    def _build(self) -> None:
        """At its first turn: a model that does not fit into memory takes one variant out of the race, not all."""
        trainer = Trainer(self.queue, self.network)
        self._batch = trainer.batch()
        if self.in_8_bits:
            kind = getattr(amp.optim, f"{self.network.optimizer}8bit")
            trainer.optimizer = kind(trainer.model.parameters(), lr=self.network.lr)
        if self.level == "O2" and self.dtype is not None:
            model, optimizer = trainer.model, trainer.optimizer
            amp.decorate(model, optimizer, level="O2", dtype=self.dtype, master_weight=self.master_weight)
        if self.in_blocks:
            trainer.model = _in_blocks(trainer.model)
        self._trainer = trainer

    def turn(self, calls: int) -> list[float]:
        """Times training steps."""
        with self._amp():
            for _ in range(_WARM_UP if self.is_recorded else 0):  # runs, is recorded under this AMP, is replayed
                self._train()
            return timed(self._train, self.queue.finish)(calls)

    @contextmanager
    def steps(self) -> Iterator[Callable[[], None]]:
        """Yields a function that trains one step, after a few: kernels are built, and the loss scale has come down."""
        with self._amp():
            for _ in range(_WARM_UP):
                self._train()
            yield self._train

    def figures(self) -> dict[str, float]:
        """The first loss, which is the same for all variants but for rounding, and the loss scale now."""
        loss = {} if self._first_loss is None else {"first_loss": self._first_loss}
        scale = {} if self._scalers is None else {"loss_scale": self._scalers["loss_scaler0"]["loss_scale"]}
        return {**loss, **scale}

    def launches(self) -> dict[str, float]:
        """How many kernels a step launches."""
        with self.steps() as train:
            return launches_of(train)

    def memory(self) -> dict[str, int]:
        """Bytes of activations at the end of forward, and the peak of a whole step.

        Activations leave out parameters, inputs and the 16-bit copies of weights; the peak includes gradients,
        workspaces and those copies.
        """
        with self._amp():
            return {"activations": self._activations(), "peak of a step": self._peak(self._train)}

    def memory_of_loops(self) -> dict[str, int]:
        """Returns bytes of activations when forward is over, and at the peak of a loop, without parameters and inputs
        (see `MemoryMeter`); of the optimizer's state; and of that peak with state, weights and masters. netcl has one
        way to run backward."""
        gc.collect()
        before = by_kind(pieces_now().values())  # of variants that are kept to be timed
        with self._amp():
            self._loop()  # builds its kernels
            activations = self._activations()
            peaks = {
                "peak, tape.backward(loss)": self._peak(self._loop),
                "peak, loss.backward()": self._peak(partial(self._loop, of_loss=True)),
            }
            self._forget()
            now = by_kind(pieces_now().values())
        stays = {kind: now[kind] - before[kind] for kind in ("weights", "masters", "optimizer state")}
        return {
            "activations": activations,
            **peaks,
            "optimizer state": stays["optimizer state"],
            "peak with weights and state": sum(stays.values()) + max(peaks.values()),
        }

    def _activations(self) -> int:
        self._forget()
        with MemoryMeter() as meter:
            graph = self._trainer.forward(*self._batch)
            found = meter.activations
        del graph
        return found

    def _peak(self, run: Callable[[], None]) -> int:
        self._forget()
        with MemoryMeter() as meter:
            run()
        return meter.peak

    def _forget(self) -> None:
        """Frees what earlier steps left behind: gradients, and copies of weights older than a meter."""
        self._trainer.optimizer.zero_grad()
        if self._handle is not None:
            self._handle.clear_cache()
        gc.collect()

    def _train(self) -> None:
        loss = self._step(self._handle, *self._batch)
        if self.reads_loss:
            value = loss.value.to_host().item()
            self._first_loss = value if self._first_loss is None else self._first_loss

    def _loop(self, *, of_loss: bool = False) -> None:
        loss = None
        for _ in range(_STEPS):
            loss = self._trainer.train(self._handle, *self._batch, of_loss=of_loss and self._handle is not None)
        del loss
        self.queue.finish()

    @contextmanager
    def _amp(self) -> Iterator[None]:
        """This variant's AMP, which no other variant may see; its loss scale lives on from turn to turn."""
        with amp_in(self.dtype, level=self.level or "O1", **self.options) as self._handle:
            if self._trainer is None:
                self._build()
            self._step = amp.record(self._trainer.train) if self.is_recorded else self._trainer.train
            if self._handle is None:
                yield
                return
            if self._scalers is None:
                self._settle(self._handle)
            else:
                amp.load_state_dict(self._scalers)
            try:
                yield
            finally:
                self._scalers = amp.state_dict()

    def _settle(self, handle: AmpHandle | NoOpHandle) -> None:
        """Trains until the loss scale has come down to where steps are no longer skipped."""
        for _ in range(_WARM_UP_LIMIT):
            self._train()
            if handle.last_step is not None and handle.last_step.stepped:
                return
        raise FloatingPointError(f"no step of {_WARM_UP_LIMIT} had finite gradients")


def _in_blocks(model: Any) -> Any:
    """Returns the model with its blocks checkpointed: those that it has, else up to each pool, or six layers."""
    if hasattr(model, "blocks"):
        model.blocks = [partial(amp.checkpoint, block) for block in model.blocks]
        return model
    blocks: list[list[Any]] = [[]]
    has_pools = any("Pool" in type(layer).__name__ for layer in model.layers)
    for layer in model.layers:
        blocks[-1].append(layer)
        if "Pool" in type(layer).__name__ if has_pools else len(blocks[-1]) == _LAYERS:
            blocks.append([])
    head = Sequential(*blocks.pop()) if has_pools else Sequential()  # as a decoder's: it keeps little
    parts = [Sequential(*block) for block in blocks if block]
    for part in (*parts, head):
        part.train()

    def run(x: Any) -> Any:
        for part in parts:
            x = amp.checkpoint(part, x)
        return head(x)

    return run


# ---------------------------------------------------------------------------------------------- a step


def step_variants(queue: cl.CommandQueue, network: Network, levels: Sequence[str | None]) -> Iterator[Variant]:
    """netcl alone, and clamp in each dtype, at each level that makes a difference there; on GPUs recorded as well."""
    yield Variant(queue, network, None)
    yield Variant(queue, network, "float32")
    for dtype in dtypes_of(queue)[1:]:
        for level in levels:
            yield Variant(queue, network, dtype, level)
        if not capabilities(queue).is_cpu:  # which would wait for the host
            yield Variant(queue, network, dtype, is_recorded=True)


def step_case(variants: Sequence[Variant], network: Network, peers: Sequence[PeerProcess]) -> Case:
    """The step's time."""
    contenders = [Contender(x.name, x.turn, is_baseline=x.dtype is None, extra=x.figures) for x in variants]
    return Case(network.work, str(network), "ms", contenders + peer_contenders(peers, network.work, network))


# ---------------------------------------------------------------------------------------------- loops


def loops(queue: cl.CommandQueue, network: Network) -> Iterator[Variant]:
    """The variants whose loops are looked at, netcl's first."""
    halves = dtypes_of(queue)[1:]
    last, small = halves[-1:], {"in_blocks": True, "in_8_bits": True}
    table: list[tuple[Sequence[str | None], dict[str, Any]]] = [
        ((None, *halves), {}),
        (last, {"level": "O2", "master_weight": "remainder"}),
        (last, {"level": "O2", "master_weight": "stochastic"}),
        (halves, {"in_blocks": True}),
        (last, {"in_8_bits": True}),
        (last, small),
        (last, {"level": "O2", "master_weight": "stochastic", **small}),
    ]
    for dtypes, fields in table:
        for dtype in dtypes:
            yield Variant(queue, network, dtype, options=_FIXED, **fields)


def memory_of(queue: cl.CommandQueue, network: Network, *, with_netcl: bool) -> list[Row]:
    """Returns the memory of all loops of a network, one after the other."""
    measured = (x for x in loops(queue, network) if with_netcl or x.dtype is not None)
    return memory_rows(str(network), {x.name: x.memory_of_loops() for x in measured})


def checkpoint_case(queue: cl.CommandQueue, network: Network) -> Case:
    """Returns the time of a step with checkpointed blocks beside that of one without."""
    dtype = dtypes_of(queue)[-1]
    variants = [Variant(queue, network, dtype, options=_FIXED, in_blocks=in_blocks) for in_blocks in (False, True)]
    contenders = [Contender(x.name, x.turn, is_baseline=not x.in_blocks) for x in variants]
    return Case("checkpoint", str(network), "ms", contenders)
