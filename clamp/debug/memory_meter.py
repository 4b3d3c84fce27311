"""How much device memory a stretch of a training run takes, and what all that is held now is held for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from typing import Any

from clamp import bridge
from clamp.bridge import Address, Tensor
from clamp.debug.callsite import Place
from clamp.interrupts import uninterrupted
from clamp.ops.arguments import yes_or_no
from clamp.params.parts import MasterInParts
from clamp.params.weight_cache import weight_cache
from clamp.scaling.step_guard import StepGuard

_pool_peak = bridge.PoolPeak()


def max_memory(reset: bool = False) -> int:
    """The most bytes of device memory that tensors have held at a time, as ``torch.cuda.max_memory_allocated``.

    Of all devices and queues together, from netcl's memory pools. What netcl allocates outside of them does not count:
    parameters, and inputs that come from the host. Call it with ``reset=True`` before what is to be measured: what is
    held is counted from the first call on, at a little for each tensor, until AMP is shut down; the first call itself
    returns all that the pools have taken so far.

    Args:
        reset: begin anew, from what is held now: ``torch.cuda.reset_peak_memory_stats``.

    Returns:
        The most since the last reset.

    Example::

        amp.max_memory(reset=True)
        train_step()
        print(f"{amp.max_memory() / 2**20:.1f} MiB")
    """
    return _pool_peak(yes_or_no("amp.max_memory", "reset", reset))


def stop_counting() -> None:
    """Leaves netcl's pools as they were before the first ``max_memory``."""
    _pool_peak.stop()


class MemoryMeter:
    """Counts the bytes of the tensors made since the ``with`` began: live now, and at the peak.

    Bytes are those of the elements, not what a pool rounds them up to; views count with the tensor they show.
    Parameters and inputs made before the ``with`` do not count, so ``activations`` at the end of a forward is
    its activation memory::

        with MemoryMeter() as meter:
            loss = model(x)
            activations = meter.activations
    """

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}  # id of a buffer -> bytes
        self._live = 0
        self.peak = 0
        self._told = ExitStack()

    @property
    def live(self) -> int:
        """Bytes of the tensors made since the ``with`` began that still live; collects garbage first."""
        gc.collect()
        return self._live

    @property
    def activations(self) -> int:
        """``live`` less the 16-bit copies of weights that the cache holds."""
        return self.live - weight_cache.nbytes

    def __enter__(self) -> MemoryMeter:
        gc.collect()
        self._told.enter_context(bridge.listening_to_tensors(self._made))
        return self

    def __exit__(self, *exception: object) -> None:
        with uninterrupted():
            self._told.close()

    def _made(self, tensor: Tensor) -> None:
        key = id(tensor.buffer)
        if tensor.buffer is None or key in self._owners:
            return  # the numpy backend's, or a view of a tensor that is counted
        self._owners[key] = bridge.nbytes(tensor)
        self._live += self._owners[key]
        self.peak = max(self.peak, self._live)
        weakref.finalize(tensor, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self._live -= self._owners.pop(key, 0)


# ---------------------------------------------------------------------------------------------- what for


#: what memory is held for, in words
KINDS = {
    "activations": "activations kept for backward",
    "weights": "weights, and statistics of layers",
    "masters": "masters of 16-bit weights",
    "copies": "16-bit copies and panels of weights",
    "gradients": "gradients",
    "optimizer state": "optimizer state",
    "workspaces": "workspaces and temporaries",
    "other tensors": "inputs, and what the program holds",
    "recordings": "recordings, for their replays",
    "rounding": "what netcl's pool rounds up",
    "free": "free in netcl's pool",
}


@dataclass(eq=False, slots=True)
class Piece:
    """A piece of device memory.

    Attributes:
        size, used: bytes of it, and those that a tensor's elements take.
        kind: of `KINDS`; empty while it is not known.
        place: where it was taken.
        in_op, in_backward: whether that was in an op, and in backward.
        op: the number of the op that was computed then.
        died: the number of the event; inf while it lives.
    """

    size: int
    used: int
    kind: str = ""
    place: Place | None = None
    in_op: bool = False
    in_backward: bool = False
    op: int = -1
    died: float = inf


def by_kind(pieces: Iterable[Piece]) -> dict[str, int]:
    """Their bytes, of each of `KINDS`."""
    found = dict.fromkeys(KINDS, 0)
    for piece in pieces:
        found[piece.kind] += piece.used
        found["rounding"] += piece.size - piece.used
    return found


def gradients_now() -> dict[Address, tuple[Tensor, Tensor]]:
    """The gradients that are trained with, by where they lie, after the tensors that they are of."""
    trained = [x for ref, _ in bridge.living_tensors() if (x := ref()) is not None and bridge.is_weight(x)]
    grads = [(x, x.grad) for x in trained if isinstance(x.grad, Tensor)]
    return {where: pair for pair in grads if (where := bridge.address_of(pair[1].buffer)) is not None}


def pieces_now() -> dict[Address, Piece]:
    """All device memory, by where it lies, and what for. What is held for several things counts for the first."""
    sizes = bridge.held_memory()
    free = bridge.free_memory()
    sizes |= {where: count for where, (count, _) in free.items()}
    kinds: dict[Address, str] = {
        where: "free" if is_netcls else "recordings" for where, (_, is_netcls) in free.items() if where in sizes
    }

    def claim(kind: str, storages: Iterable[Any]) -> None:
        for storage in storages:
            where = bridge.address_of(bridge.whole_of(storage))
            if where in sizes:
                kinds.setdefault(where, kind)

    used: dict[Address, int] = {}
    tensors = [tensor for ref, _ in bridge.living_tensors() if (tensor := ref()) is not None]
    for tensor in tensors:
        where = bridge.address_of(tensor.buffer)
        if where is not None and tensor.pool_handle is not None:
            used[where] = max(used.get(where, 0), bridge.nbytes(tensor))
    trained = [x for x in tensors if bridge.is_weight(x)]
    claim("masters", [x.buffer for x in trained if bridge.model_parameter(x) is not x])
    if MasterInParts.exist:
        claim("masters", [part.buffer for x in bridge.instances_of(MasterInParts) for part in x.held])
    claim("weights", [x.buffer for x in (*trained, *bridge.tensors_of_layers()) if x.buffer is not None])
    claim("gradients", [grad.buffer for _, grad in gradients_now().values()])
    claim("copies", bridge.memory_in(weight_cache.values))
    guarded = [guard.optimizer for guard in bridge.living(StepGuard) if guard.optimizer is not None]
    for optimizer in {id(x): x for x in (*guarded, *bridge.living_optimizers())}.values():
        state = [value for value in bridge.own_attributes(optimizer).values() if not callable(value)]
        claim("optimizer state", bridge.memory_in(state))
    claim("activations", bridge.memory_of_graphs())
    claim("other tensors", [x.buffer for x in tensors])
    return {
        where: Piece(count, min(count, used.get(where, count)), kinds.get(where, "workspaces"))
        for where, count in sizes.items()
    }
