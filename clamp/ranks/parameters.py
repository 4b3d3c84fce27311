"""Comparison of the parameters that ranks train: what the header of every pass says of them.

Ranks that have begun with the same bits keep them, because all see the same gradients and skip the same steps. What
parts them is a difference in the script: a layer frozen on one rank, another learning rate, a step too many, a write.
Which parameters are frozen is compared at every pass. Their bits are compared at the first pass of an optimizer, all of
them; after that some at every pass, in turn, so that each is looked at within ``TURNS`` passes: reading all of them
every time would cost as much as the gradients do. (Most differences reach every parameter with the next step, and are
noticed at the next pass.)
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ranks.rendezvous import RankError

Array: TypeAlias = npt.NDArray[Any]

TURNS = 50  #: passes of one optimizer in which each of its parameters has its turn
_MOST_LISTS = 64  # lists of parameters that are remembered; one that was forgotten is compared as a whole


class RankParameters:
    """What headers say of this rank's parameters, and what follows from the others'.

    Args:
        comm: the communicator over which the headers travel.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._compared: dict[tuple[int, ...], int] = {}  # by ids: how often these parameters have been compared
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def name(self, models: Iterable[Any]) -> None:
        """Remembers what the tensors of these models are called."""
        for number, model in enumerate(models):
            if isinstance(model, bridge.Module):
                for name, tensor in bridge.module_tensors(model):
                    self._names[id(tensor)] = weakref.ref(tensor), name if number == 0 else f"{name} of model {number}"

    def header(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """The fields of a pass's header that tell of the parameters. Reads some of them from the device."""
        compared = self._compared.get(_key(params), 0)
        names = [self._name_of(param) for param in params]
        return {
            "layout": digest(shapes_of(params)),
            "names": 0 if None in names else digest(repr(names).encode()) | 1,
            "trained": digest(_flags(params).tobytes()),
            "compared": compared,
            "parameters": _bits(params if compared == 0 else _whose_turn(params, compared)),
            "device": digest(_device(params)),
        }

    def require_alike(self, params: Sequence[Tensor], headers: Array) -> None:
        """Raises RankError, on all ranks, where the ranks' headers tell that they train different parameters.

        It may exchange more messages: all ranks have the same headers, and decide alike.
        """
        key = _key(params)
        compared = self._compared.pop(key, 0)
        self._require_alike_flags(params, headers)
        bits = headers["parameters"]
        if _differ(headers["compared"]):  # new ones on some ranks only: all compare all
            bits = self._gathered(np.array([_bits(params)], np.uint64))
        elif compared and _differ(headers["device"]):
            bits = bits[:1]  # devices of different kinds round differently, and their parameters drift apart
        if _differ(bits):
            raise RankError(self._parted(params, headers, compared))
        self._compared[key] = 1 if _differ(headers["compared"]) else compared + 1
        if len(self._compared) > _MOST_LISTS:
            del self._compared[next(iter(self._compared))]

    def _require_alike_flags(self, params: Sequence[Tensor], headers: Array) -> None:
        if not _differ(headers["trained"]):
            return
        everyones = self._gathered(_flags(params)).reshape(len(headers), len(params), 2)
        for place, what in ((0, "frozen"), (1, "requires_grad=True")):
            columns = everyones[:, :, place]
            odd = np.flatnonzero((columns != columns[0]).any(axis=0))
            if odd.size:
                ranks = np.flatnonzero(columns[:, odd[0]])
                raise RankError(
                    f"{self._listed(params, odd)}: {what} on rank {', '.join(map(str, ranks))} only. All ranks must "
                    "train the same parameters: freeze and unfreeze them on every rank, before the same pass."
                )

    def _parted(self, params: Sequence[Tensor], headers: Array, compared: int) -> str:
        """Returns what differs, for which all ranks compare all parameters one by one."""
        everyones = self._gathered(np.array([_bits([param]) for param in params], np.uint64))
        odd = np.flatnonzero((everyones != everyones[0]).any(axis=0))
        ranks = np.flatnonzero((everyones != everyones[0]).any(axis=1))
        what = f"the parameters differ: {self._listed(params, odd)}, rank {', '.join(map(str, ranks))} from rank 0"
        if compared == 0 or not headers["compared"].all():
            return (
                f"{what}. Call ranks.broadcast(model) after `ranks = handle.distribute(comm)` and before the first "
                "pass, or give every rank the same seed; and build the optimizers in the same order."
            )
        return (
            f"{what}. They were the same before: a rank has done a step, or a write, that the others have not, or with "
            "other settings. ranks.broadcast(model) on all ranks makes them the same again."
        )

    def _gathered(self, mine: Array) -> Array:
        everyones = np.empty((self._comm.size, *mine.shape), mine.dtype)
        self._comm.Allgather(mine, everyones)
        return everyones

    def _listed(self, params: Sequence[Tensor], indexes: Array) -> str:
        shown = [
            self._name_of(params[index]) or f"parameter {index} of shape {tuple(params[index].shape)}"
            for index in indexes[:5]
        ]
        return ", ".join(shown) + (f" and {len(indexes) - 5} more" if len(indexes) > 5 else "")

    def _name_of(self, param: Tensor) -> str | None:
        reference, name = self._names.get(id(param), (None, ""))
        return name if reference is not None and reference() is param else None


def digest(content: bytes) -> int:
    """64 bits that differ where the content does."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def shapes_of(tensors: Iterable[Tensor]) -> bytes:
    """Shapes and dtypes, to be compared."""
    return repr([(tuple(tensor.shape), bridge.canonical_dtype(tensor.dtype)) for tensor in tensors]).encode()


def _whose_turn(params: Sequence[Tensor], compared: int) -> list[Tensor]:
    together = -(-len(params) // TURNS)
    first = (compared - 1) * together
    return [params[index % len(params)] for index in range(first, first + together)]


def _bits(params: Iterable[Tensor]) -> int:
    """A digest of parameters, and of their masters, which hold more bits."""
    found = hashlib.blake2b(digest_size=8)
    for param in params:
        found.update(bridge.read_bytes(param).tobytes())
        master = bridge.master_of(param)
        if master is not None:
            found.update(bridge.read_bytes(master).tobytes())
    return int.from_bytes(found.digest(), "little")


def _flags(params: Sequence[Tensor]) -> Array:
    return np.array([(bridge.is_frozen(param), bool(param.requires_grad)) for param in params], np.bool_)


def _device(params: Sequence[Tensor]) -> bytes:
    """Returns what rounds as this device does."""
    if not params or not bridge.on_device(params[0]):
        return b""
    device = params[0].queue.device
    return repr((device.name, device.version, device.driver_version, device.max_compute_units)).encode()


def _differ(values: Array) -> bool:
    return bool((values != values[0]).any())


def _key(params: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(id(param) for param in params)
