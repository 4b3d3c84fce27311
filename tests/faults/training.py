"""The training that faults are put into, and what is looked at after one."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.autograd.engine import Node, Tape
from netcl.core import memory
from netcl.nn.layers import Conv2d, Flatten, Linear, ReLU, Sequential
from netcl.optim import SGD, Adam, AdamW, Momentum, RMSProp

from clamp import amp, bridge, session
from clamp.bridge import Tensor
from tests.networks import LOSS_FACTOR, mlp
from tests.reference import to_device

_BATCH = 8
_KINDS = ("first run", "run", "record", "replay", "replay")  # of the steps of a recorded training
_STORES: dict[type, dict[str, Any]] = {}  # netcl's optimizers build their kernels anew for each object


@dataclass(frozen=True)
class Case:
    """How a network is trained."""

    network: str  # ``"mlp"``, stepped by Adam, or ``"cnn"``, by SGD with momentum
    recorded: bool  # whether its step is an ``amp.record``
    dtype: str
    level: str  # dtype, level: of AMP; at O2 its parameters are 16-bit, with masters

    def __str__(self) -> str:
        return f"{self.network}-{'recorded' if self.recorded else 'eager'}-{self.dtype}-{self.level}"


CASES = [
    Case(network, recorded, dtype, level)
    for network in ("mlp", "cnn")
    for recorded in (False, True)
    for dtype in ("float16", "bfloat16")
    for level in ("O1", "O2")
]


class Training:
    """A network, its optimizer and its batches, the same ones each time.

    Attributes:
        steps: how many make a run: an eager one needs two, a recorded one runs (twice, as its first step makes the
            scale), records and replays.
        phase: told of what comes next, by a word.
    """

    def __init__(self, queue: cl.CommandQueue, case: Case, phase: Callable[[str], None] = lambda _: None) -> None:
        self._case, self.phase = case, phase
        self._unwatched = frozenset({"phase", "_number", "_batches"})  # a recording is none of theirs
        self.steps = len(_KINDS) if case.recorded else 2
        rng = np.random.default_rng(1)
        if case.network == "mlp":
            self.model, shape = mlp(queue, 8, 16, 4), (_BATCH, 8)
            self.optimizer: Any = Adam(self.model.parameters(), lr=0.01)
        else:
            np.random.seed(0)
            layers = [Conv2d(queue, 2, 4, 3, pad=1), ReLU(), Conv2d(queue, 4, 4, 3, pad=1), ReLU(), Flatten()]
            self.model, shape = Sequential(*layers, Linear(queue, 4 * 16, 4)), (_BATCH, 2, 4, 4)
            self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        kept = {name: {} for name in vars(self.optimizer) if bridge.is_kernel_store(name)}
        vars(self.optimizer).update(_STORES.setdefault(type(self.optimizer), kept))
        self._batches = [
            (
                to_device(queue, rng.standard_normal(shape).astype(np.float32)),
                to_device(queue, rng.standard_normal((_BATCH, 4)).astype(np.float32)),
            )
            for _ in range(self.steps)
        ]
        if case.level == "O2":
            amp.decorate(self.model, self.optimizer, level="O2", dtype=case.dtype)
        self.handle: Any = None
        self._step = amp.record(self._run) if case.recorded else self._run

    def init(self) -> None:
        """Turns AMP on."""
        self.phase("init")
        self.handle = amp.init(dtype=self._case.dtype, level=self._case.level, loss_scale=2.0**10)
        self.phase("")

    def step(self, number: int) -> None:
        """One of the steps."""
        self._number = number
        try:
            self.phase(self._kind())
            self._step(*self._batches[number])
        finally:
            self.phase("")

    def _kind(self) -> str:
        return _KINDS[self._number] if self._case.recorded else "eager"

    def _run(self, x: Tensor, y: Tensor) -> Any:
        kind = self._kind()
        self.phase(f"{kind} forward")
        self.optimizer.zero_grad()
        loss = ag.mul(ag.mse_loss(self.model(ag.tensor(x)), ag.tensor(y)), LOSS_FACTOR)
        with self.handle.scale_loss(loss, self.optimizer) as scaled_loss:
            self.phase(f"{kind} backward")
            scaled_loss.backward()
            self.phase(f"{kind} exit")
        self.phase(f"{kind} step")
        self.optimizer.step()
        self.phase(f"{kind} end")
        return loss

    @property
    def recordings(self) -> int:
        """How many recordings of its step there are."""
        return self._step.recordings if self._case.recorded else 0

    def shutdown(self) -> None:
        """Turns AMP off."""
        self.phase("shutdown")
        amp.shutdown()
        self.phase("")

    def weights(self) -> list[bytes]:
        """All that a step changes: the model's parameters, and the masters of 16-bit ones."""
        tensors = {id(x): x for x in (*self.model.parameters(), *self.optimizer.params)}.values()
        return [bridge.read_bytes(x).tobytes() for x in tensors]


def netcl_now() -> dict[tuple[str, str], object]:
    """Every attribute of netcl's modules and classes and of pyopencl, and the code of every function among them."""
    gc.collect()  # recordings that nobody holds
    owners: dict[str, Any] = {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and name.split(".")[0] in ("netcl", "pyopencl")
    }
    owners |= {cls.__qualname__: cls for cls in (Node, Tape, Tensor, SGD, Adam, AdamW, Momentum, RMSProp, cl.Kernel)}
    found = {(name, key): value for name, owner in owners.items() for key, value in list(vars(owner).items())}
    found |= {
        (*place, "code"): value.__code__
        for place, value in list(found.items())
        if isinstance(value, types.FunctionType)
    }
    pools = memory._PERSISTENT_POOLS.values()
    return found | {("pool", str(id(pool))): vars(pool).get("release") for pool in pools}


def changed(before: dict[tuple[str, str], object]) -> list[tuple[str, str]]:
    """What is not the identical object any more, or is new, but for what modules keep for themselves, and for modules
    that were imported meanwhile."""
    known = {key[0] for key in before} | {"pool"}
    after = {key: value for key, value in netcl_now().items() if key[0] in known}
    missing = object()
    return [
        key
        for key in {**before, **after}
        if before.get(key, missing) is not after.get(key, missing) and not _is_state(key, before, after)
    ]


def _is_state(
    key: tuple[str, str], before: dict[tuple[str, str], object], after: dict[tuple[str, str], object]
) -> bool:
    values = [known[key] for known in (before, after) if key in known]
    if key[1].startswith("__") or (key not in before and key[0] == "pool" and values[0] is None):
        return True
    return not any(callable(value) or isinstance(value, types.CodeType) for value in values)


def is_on() -> bool:
    """Whether a handle is active."""
    return session.active_handle() is not None
