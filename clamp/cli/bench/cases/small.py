"""Steps of small networks, whose time is mostly the host's: launches, and what Python does for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyopencl as cl

from clamp import amp
from clamp.cli.bench.cases.contenders import Case, Contender, dtypes_of, peer_contenders
from clamp.cli.bench.cases.small_networks import MLP, README_MLP, SmallNetwork, Trainer
from clamp.cli.bench.cases.unscale import counted_launches
from clamp.cli.bench.peers import PeerProcess
from clamp.cli.bench.timing import timed

_SCALE = 1024.0  # from which no step of these networks is skipped


class _Eager:
    """The loop of the examples on one batch, as that of peers; with clamp in a dtype or, with None, netcl alone."""

    def __init__(self, queue: cl.CommandQueue, network: SmallNetwork, dtype: str | None) -> None:
        self._queue, self._dtype = queue, dtype
        self._trainer = Trainer(queue, network)
        self._batch = self._trainer.batch()
        self._launches = 0

    def turn(self, calls: int) -> list[float]:
        """Times steps, until the device has finished them."""
        if self._dtype is None:
            return self._timed(None, calls)
        with amp.init(dtype=self._dtype, loss_scale=_SCALE if self._dtype == "float16" else 1.0) as handle:
            return self._timed(handle, calls)

    def figures(self) -> dict[str, float]:
        """Launches of a step."""
        return {"launches": float(self._launches)}

    def _timed(self, handle: Any, calls: int) -> list[float]:
        call = partial(self._trainer.train, handle, *self._batch)
        call()
        with counted_launches() as launches:
            call()
        self._launches = len(launches)
        return timed(call, self._queue.finish)(calls)


class _Recorded(_Eager):
    """The same step, recorded."""

    def _timed(self, handle: Any, calls: int) -> list[float]:
        call = partial(amp.record(self._trainer.train), handle, *self._batch)
        for _ in range(3):  # runs, is recorded, is replayed
            call()
        return timed(call, self._queue.finish)(calls)


def small_cases(queue: cl.CommandQueue, peers: Sequence[PeerProcess]) -> Iterator[Case]:
    """README's network and that of the digits, eager and recorded."""
    for network in (README_MLP, MLP):
        eager = {"netcl": _Eager(queue, network, None)}
        eager |= {f"clamp {dtype}": _Eager(queue, network, dtype) for dtype in dtypes_of(queue)}
        contenders = [
            Contender(name, one.turn, is_baseline=name in ("netcl", "clamp float32"), extra=one.figures)
            for name, one in eager.items()
        ]
        contenders += [
            Contender(f"clamp {dtype}, recorded", _Recorded(queue, network, dtype).turn)
            for dtype in dtypes_of(queue)[1:]
        ]
        contenders += peer_contenders(peers, network.work, *network.peer_args)
        yield Case("small", str(network), "ms", contenders)
