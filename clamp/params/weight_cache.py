"""The weight cache: values derived from a parameter, kept until the parameter changes.

It holds values (a 16-bit copy, packed panels), never autograd nodes: a cached node could drag a graph of an
earlier iteration along, which is how apex and PyTorch came to lose or double gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

import pyopencl as cl

from clamp.bridge import Tensor, is_grad_enabled, nbytes
from clamp.ops.cast import cast
from clamp.ops.optimizer_step import cast_all

Value = TypeVar("Value")


class _Entry:
    __slots__ = ("buffer", "dtype", "of_evaluation", "ref", "shape", "values")

    def __init__(self, tensor: Tensor, ref: weakref.ref[Tensor]) -> None:
        self.ref = ref
        self.buffer = tensor.buffer
        self.shape = tuple(tensor.shape)
        self.dtype = str(tensor.dtype)
        self.of_evaluation = not is_grad_enabled()  # no step's end comes after it
        self.values: dict[Hashable, Any] = {}

    def value(self, kind: Hashable) -> Any:
        """The value of a kind, if it is there and lives."""
        value = self.values.get(kind)
        return value() if isinstance(value, weakref.ref) else value

    def is_of(self, tensor: Tensor) -> bool:
        """Returns whether the entry is this tensor's, as it is now."""
        owner = self.ref()
        if owner is None or owner is not tensor or self.buffer is not owner.buffer:
            return False
        return self.shape == tuple(owner.shape) and self.dtype == str(owner.dtype)


#: of a weight's id and a dtype: the weights that are cast with it
Together: TypeAlias = dict[tuple[int, str], list[weakref.ref[Tensor]]]


class WeightCache:
    """Derived values by tensor. Thread-safe; an entry dies with its tensor.

    netcl's tensors are unhashable, so entries are found by ``id`` and checked against a weak reference. They
    also remember the tensor's buffer, shape and dtype: an optimizer that replaces the buffer (fused AdamW does), or
    ``p.shape = ...``, ends the entry. What is written into the buffer by other means than netcl's (a kernel of the
    user's, ``pyopencl.enqueue_copy``) nobody tells clamp of: ``handle.clear_cache()`` does. So a training step begins
    with nothing: what was made under ``no_grad`` goes when an op that is recorded for backward asks.
    """

    def __init__(self) -> None:
        self.clears = 0  # how often all was forgotten
        self.losses = 0  # how often anything was
        self.recorded_by: int | None = None  # the thread whose launches are being recorded, for which it is then alone
        # then: of a weight that is the first to be cast, the others that are cast with it, which must be the same where
        # the recording is compared with an earlier one
        self.together: Together | None = None
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.RLock()  # a collection inside the lock may run a weak reference's callback

    def get(self, tensor: Tensor, kind: Hashable, make: Callable[[Tensor], Value], *, weakly: bool = False) -> Value:
        """The value of this kind derived from ``tensor``: the kept one, or ``make(tensor)``, kept from now on.

        Args:
            weakly: as for ``put``.
        """
        with self._lock:
            value: Value | None = self.known(tensor, kind)
            if value is None:
                value = make(tensor)
                self.put(tensor, kind, value, weakly=weakly)
            return value

    def put(
        self, tensor: Tensor, kind: Hashable, value: object, *, weakly: bool = False, losses: int | None = None
    ) -> None:
        """Keeps a value that was derived from ``tensor`` just now.

        Args:
            weakly: only as long as somebody else holds it.
            losses: the number before it was derived: if something was forgotten since, by another thread's step, it
                is not kept.
        """
        with self._lock:
            if losses in (None, self.losses) and not self._is_anothers():
                self._entry(tensor).values[kind] = weakref.ref(value) if weakly else value

    def loosen(self, tensor: Tensor, kind: Hashable, value: object) -> None:
        """Keeps a value, if it is the kept one, only as long as somebody else holds it."""
        with self._lock:
            if self.known(tensor, kind) is value:
                self.put(tensor, kind, value, weakly=True)

    def known(self, tensor: Tensor, kind: Hashable) -> Any:
        """The value of this kind, if it is there."""
        with self._lock:
            entry = None if self._is_anothers() else self._known_entry(tensor)
            return entry.value(kind) if entry is not None else None

    def take(self, tensor: Tensor, kind: Hashable) -> Any:
        """The value of this kind, which is kept no longer; None if there is none."""
        with self._lock:
            return None if self._is_anothers() else self._entry(tensor).values.pop(kind, None)

    def asked_before(self, tensor: Tensor, kind: Hashable) -> bool:
        """Returns whether this has been asked of ``tensor`` and the kind before.

        For what is large and pays off only if it is used again, such as the packed panels of a weight in a loop: it is
        kept from the second time on.
        """
        with self._lock:
            before = self.known(tensor, ("asked", kind)) is not None
            self.put(tensor, ("asked", kind), True)
            return before

    def _is_anothers(self) -> bool:
        """Returns whether another thread is recorded: a replay finds what its own launches have made, and nothing
        else."""
        return self.recorded_by is not None and self.recorded_by != threading.get_ident()

    def _entry(self, tensor: Tensor) -> _Entry:
        return self._known_entry(tensor) or self._new_entry(tensor)

    def _known_entry(self, tensor: Tensor) -> _Entry | None:
        entry = self._entries.get(id(tensor))
        if entry is not None and entry.of_evaluation and is_grad_enabled():
            self.clear()  # training begins: after an evaluation weights may have been written by means nobody sees
            return None
        return entry if entry is not None and entry.is_of(tensor) else None

    def _new_entry(self, tensor: Tensor) -> _Entry:
        key = id(tensor)

        def forget(ref: weakref.ref[Tensor]) -> None:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None and entry.ref is ref:
                    del self._entries[key]

        entry = self._entries[key] = _Entry(tensor, weakref.ref(tensor, forget))
        return entry

    def drop(self, tensor: Tensor) -> None:
        """Forgets what was derived from ``tensor``: its content is about to change, or has."""
        with self._lock:
            self.losses += 1
            self._entries.pop(id(tensor), None)

    def drop_buffer(self, buffer: Any) -> None:
        """Forgets what was derived from tensors stored in ``buffer``, or in a part of it."""
        with self._lock:
            self.losses += 1
            for key, entry in self._entries.copy().items():  # a collection may end entries at any time
                if _shares_memory(entry.buffer, buffer):
                    self._entries.pop(key, None)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self.losses += 1
            self.clears += 1
            self._entries.clear()

    @property
    def values(self) -> list[Any]:
        """All that is kept."""
        with self._lock:
            return [entry.value(kind) for entry in self._entries.copy().values() for kind in entry.values.copy()]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held: of tensors, and of values that say their ``nbytes``."""
        values = self.values
        return sum(nbytes(value) if isinstance(value, Tensor) else getattr(value, "nbytes", 0) for value in values)

    def __len__(self) -> int:
        return len(self._entries)


def _shares_memory(ours: Any, written: Any) -> bool:
    if ours is written:
        return True
    # Sub-buffers: writing the whole changes the part, and the other way round.
    try:
        roots = [getattr(buffer, "associated_memobject", None) or buffer for buffer in (ours, written)]
    except cl.LogicError:  # Intel's runtime does not name the whole any more once its owner has let go of it
        return True
    return bool(roots[0] == roots[1])


#: The cache of the process.
weight_cache = WeightCache()


# ------------------------------------------------------------------------------------------ 16-bit copies of weights
# They are made together, ten a launch, for all that a forward asks for. The cache is empty when an iteration begins,
# and a forward asks for its weights one after the other. The first brings those along that followed it when it was the
# first before; a weight that is new, or was passed over last time, is cast by itself and comes along from then on. A
# copy that nobody asks for is forgotten with the others.
#
# Copies always get new storage: a graph of an earlier iteration holds the old ones for a backward that may still come.
# They are made in the forward, and not by the optimizer's step, which has the new values at hand: whoever writes
# parameters between step and forward, be it by means that clamp does not see, finds no copy there that would go stale.

_Asked: TypeAlias = list[weakref.ref[Tensor]]  # weights of an iteration, in the order in which they were asked for

_MOST = 64  # weights that were the first to be asked for


class _Iterations(threading.local):
    def __init__(self) -> None:
        self.iterations: dict[str, tuple[int, _Asked]] = {}  # this one, by dtype, and how often the cache was cleared


_thread = _Iterations()
_followers: dict[tuple[int, str], _Asked] = {}  # by id of the weight that was asked for first, and dtype


def weight_cast(weight: Tensor, dtype: str, report: Callable[[str, str], None], *, weakly: bool = False) -> Tensor:
    """A weight's value in another dtype, made once for as long as the weight is not written.

    Args:
        report: called with the two dtypes at the first use of a copy.
        weakly: whether it is kept only as long as somebody holds it.
    """

    def make(source: Tensor) -> Tensor:
        report(source.dtype, dtype)
        return _copy_of(source, dtype) if source.dtype == "float32" else cast(source, dtype)

    return weight_cache.get(weight, ("cast", dtype), make, weakly=weakly)


def _copy_of(weight: Tensor, dtype: str) -> Tensor:
    clears, asked = _thread.iterations.get(dtype, (-1, []))
    together: Sequence[Tensor] = []
    if clears != weight_cache.clears:
        together, asked = _cast_with(weight, dtype), []
        _thread.iterations[dtype] = weight_cache.clears, asked
        _followers[id(weight), dtype] = asked
    asked.append(weakref.ref(weight))
    copy = weight_cache.take(weight, ("brought along", dtype))
    if copy is None:
        copy, *others = cast_all([weight, *together], dtype)
        for follower, other in zip(together, others, strict=True):
            weight_cache.put(follower, ("brought along", dtype), other)
    return copy


def _cast_with(first: Tensor, dtype: str) -> list[Tensor]:
    together = weight_cache.together
    if together is None or weight_cache.recorded_by != threading.get_ident():
        return _followers_of(first, dtype)
    key = id(first), dtype
    if key not in together:
        together[key] = [*map(weakref.ref, _followers_of(first, dtype))]
    return [weight for ref in together[key] if (weight := ref()) is not None]


def _followers_of(first: Tensor, dtype: str) -> list[Tensor]:
    """The weights that were asked for when this one was the first, but for itself."""
    queue, known = first.queue, _followers.get((id(first), dtype), [])
    if not known or known[0]() is not first:  # another tensor had its id
        if len(_followers) >= _MOST:
            _followers.clear()
        return []
    living = {id(weight): weight for ref in known[1:] if (weight := ref()) is not None and weight is not first}
    return [weight for weight in living.values() if weight.dtype == "float32" and weight.queue is queue]
