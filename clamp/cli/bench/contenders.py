"""What a case is: work that several contenders do; and what the files that make cases share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyopencl as cl

from clamp import amp
from clamp.bridge import Tensor
from clamp.cli.bench.peers import PeerProcess
from clamp.cli.bench.timing import Turn
from clamp.debugging import MemoryMeter
from clamp.handle import AmpHandle, NoOpHandle
from clamp.ops.cast import cast

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


def forget(trainer: Any, handle: AmpHandle | NoOpHandle | None) -> None:
    """Frees what earlier steps left behind: gradients, and copies of weights older than a meter."""
    trainer.optimizer.zero_grad()
    if handle is not None:
        handle.clear_cache()
    gc.collect()


def activations_of(trainer: Any, batch: Sequence[Tensor]) -> int:
    """Bytes of activations when the forward of a batch is over."""
    with MemoryMeter() as meter:
        graph = trainer.forward(*batch)
        found = meter.activations
    del graph
    return found


def random_tensor(queue: cl.CommandQueue, shape: Sequence[int], dtype: str, seed: int = 0) -> Tensor:
    """Normally distributed numbers."""
    host = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return cast(Tensor.from_host(queue, host), dtype)


def peer_contenders(peers: Sequence[PeerProcess], work: str, *args: str, amount: float = 0.0) -> list[Contender]:
    """Every peer in every dtype that it does this work in."""
    return [
        Contender(f"{peer.info.label} {dtype}", peer.turn(work, dtype, *args), amount, is_baseline=True)
        for peer in peers
        for dtype in peer.info.works.get(work, [])
    ]
