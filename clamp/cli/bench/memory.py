"""The memory of training loops: clamp's beside netcl's, by both ways to run backward, and what checkpointing saves."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyopencl as cl
from netcl.nn.layers import Sequential

from clamp import amp
from clamp.cli.bench.contenders import Case, Contender, activations_of, amp_in, dtypes_of, forget
from clamp.cli.bench.networks import Network, Trainer
from clamp.cli.bench.report import Row, memory_rows
from clamp.cli.bench.timing import timed
from clamp.debug.memory_meter import by_kind, pieces_now
from clamp.debugging import MemoryMeter

_STEPS = 3  # of a loop, whose loss stays until the next step has another
_SCALE = 1024.0  # at which no step is skipped
_LAYERS = 6  # of a stack without pools are a block


class Loop:
    """A training loop of a network.

    Args:
        queue: where to train.
        network: what to train.
        dtype: clamp's AMP dtype; None for netcl alone.
        master_weight: of `amp.decorate`, whose 16-bit weights are trained; empty: the weights stay float32.
        in_blocks: whether blocks of the network are checkpointed.
        in_8_bits: whether the moments of its Adam or AdamW are of 8 bits (`amp.optim`).
    """

    def __init__(
        self, queue: cl.CommandQueue, network: Network, dtype: str | None, master_weight: str = "",
        *, in_blocks: bool = False, in_8_bits: bool = False,
    ) -> None:  # fmt: skip
        gc.collect()
        self._before = by_kind(pieces_now().values())  # of loops that are kept to be timed
        self._queue, self._dtype = queue, dtype
        self._trainer = Trainer(queue, network)
        self._batch = self._trainer.batch()
        if in_8_bits:
            kind = getattr(amp.optim, f"{network.optimizer}8bit")
            self._trainer.optimizer = kind(self._trainer.model.parameters(), lr=network.lr)
        if master_weight and dtype is not None:
            model, optimizer = self._trainer.model, self._trainer.optimizer
            amp.decorate(model, optimizer, level="O2", dtype=dtype, master_weight=master_weight)
        self._level = "O2" if master_weight else "O1"
        if in_blocks:
            self._trainer.model = _in_blocks(self._trainer.model)

    def memory(self) -> dict[str, int]:
        """Returns bytes of activations when forward is over, and at the peak of a loop, without parameters and inputs
        (see `MemoryMeter`); of the optimizer's state; and of that peak with state, weights and masters. netcl has one
        way to run backward."""
        with self._amp() as handle:
            self._run(handle, of_loss=False)  # builds its kernels
            forget(self._trainer, handle)
            activations = activations_of(self._trainer, self._batch)
            peaks = {}
            for name, of_loss in (("tape.backward(loss)", False), ("loss.backward()", True)):
                forget(self._trainer, handle)
                with MemoryMeter() as meter:
                    self._run(handle, of_loss=of_loss)
                peaks[f"peak, {name}"] = meter.peak
            forget(self._trainer, handle)
            now = by_kind(pieces_now().values())
        stays = {kind: now[kind] - self._before[kind] for kind in ("weights", "masters", "optimizer state")}
        return {
            "activations": activations,
            **peaks,
            "optimizer state": stays["optimizer state"],
            "peak with weights and state": sum(stays.values()) + max(peaks.values()),
        }

    def turn(self, calls: int) -> list[float]:
        """Times steps."""
        with self._amp() as handle:
            return timed(partial(self._trainer.train, handle, *self._batch), self._queue.finish)(calls)

    @contextmanager
    def _amp(self) -> Iterator[Any]:
        with amp_in(self._dtype, level=self._level, loss_scale=_SCALE) as handle:
            yield handle

    def _run(self, handle: Any, *, of_loss: bool) -> None:
        optimizer, loss = self._trainer.optimizer, None
        for _ in range(_STEPS):
            if handle is None or not of_loss:
                loss = self._trainer.train(handle, *self._batch)
                continue
            optimizer.zero_grad()
            loss = self._trainer.loss(*self._batch)
            with handle.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        del loss
        self._queue.finish()


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


def loops(queue: cl.CommandQueue, network: Network) -> dict[str, Callable[[], Loop]]:
    """Returns what makes the loops, by the names of the contenders; netcl's first."""
    halves = dtypes_of(queue)[1:]
    made: dict[str, Callable[[], Loop]] = {"netcl": partial(Loop, queue, network, None)}
    made |= {f"clamp {dtype}": partial(Loop, queue, network, dtype) for dtype in halves}
    for dtype in halves[-1:]:
        made[f"clamp {dtype} O2, remainder"] = partial(Loop, queue, network, dtype, "remainder")
        made[f"clamp {dtype} O2, stochastic"] = partial(Loop, queue, network, dtype, "stochastic")
    made |= {f"clamp {dtype}, checkpoint": partial(Loop, queue, network, dtype, in_blocks=True) for dtype in halves}
    for dtype in halves[-1:]:
        made[f"clamp {dtype}, 8-bit state"] = partial(Loop, queue, network, dtype, in_8_bits=True)
        for master_weight, level in (("", ""), ("stochastic", " O2, stochastic")):
            made[f"clamp {dtype}{level}, checkpoint, 8-bit state"] = partial(
                Loop, queue, network, dtype, master_weight, in_blocks=True, in_8_bits=True
            )
    return made


def memory_of(queue: cl.CommandQueue, network: Network, left_out: Sequence[str] = ()) -> list[Row]:
    """Returns the memory of all loops of a network, one after the other."""
    found = {name: make().memory() for name, make in loops(queue, network).items() if name not in left_out}
    return memory_rows(str(network), found)


def checkpoint_case(queue: cl.CommandQueue, network: Network) -> Case:
    """Returns the time of a step with checkpointed blocks beside that of one without."""
    dtype = dtypes_of(queue)[-1]
    every = loops(queue, network)
    contenders = [
        Contender(name, every[name]().turn, is_baseline=name == f"clamp {dtype}")
        for name in (f"clamp {dtype}", f"clamp {dtype}, checkpoint")
    ]
    return Case("checkpoint", str(network), "ms", contenders)
