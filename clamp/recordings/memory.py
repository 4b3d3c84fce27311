"""What a recording depends on: its own memory, that of the tensors which its launches read and write, where it is now,
and the modules whose code ran.

A launch names memory, not tensors. If a tensor gets other memory after the recording (fused AdamW moves its parameters
at its first real step; a checkpoint may be loaded so), the launches must go where the tensor went. If the tensor itself
has become another one in what the host decided by (its shape, whether it is trained), there is nothing to go on with.

`Dependencies` are kept on the capture, not with what gives its memory back: they lead to modules, and through host
steps back to the capture itself, so that only the garbage collector can tell when nobody needs it any more.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from netcl.core import memory
from netcl.core.memory import PersistentBufferPool, SVMBufferHandle
from netcl.runtime.capture import CapturedKernelLaunch, KernelCapture

from clamp import bridge
from clamp.bridge import Address, Seen, Tensor, address_of, living_tensors
from clamp.casting.regions import process_region
from clamp.patching.wrap import Installed
from clamp.recordings.watch import Watch
from clamp.recordings.watched_state import is_same

Place: TypeAlias = tuple[CapturedKernelLaunch, int]  # a launch, and the number of one of its arguments


@dataclass(slots=True)
class _Resident:
    """A tensor, and what the launches take it for."""

    ref: weakref.ref[Tensor]
    address: Address  # in the launches as they were recorded
    buffer: Any  # where the launches find it now
    state: tuple[Any, ...]
    was_there: bool  # when the recording began


def _state(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what the host looks at in a tensor when it decides what to launch."""
    is_frozen = bool(getattr(tensor, "_frozen", False))
    return tensor.shape, tensor.dtype, tensor.requires_grad, is_frozen, hasattr(tensor, "_model_param")


_STATE = ("shape", "dtype", "requires_grad", "frozen by freeze()", "held by an optimizer")


class Dependencies:
    """Dependencies of one recording: the tensors in its memory that somebody besides it knows, and the modules.

    Args:
        capture: the recording has ended.
        before: the living tensors when it began.
        own: addresses of its own memory: nobody else gives it to a tensor.
    """

    def __init__(
        self, capture: KernelCapture, before: Sequence[Seen], own: Collection[Address], modules: ModuleNotes
    ) -> None:
        self.places: dict[Address, list[Place]] = {}  # where the launches find the tensors, as they were recorded
        for launch in capture._launches:
            for index, arg in enumerate(launch.args):
                where = address_of(arg)
                if where is not None and where not in own:
                    self.places.setdefault(where, []).append((launch, index))
        self._residents: list[_Resident] = []
        known: set[tuple[int, Address]] = set()
        # Before: an optimizer may have moved a tensor in the recording itself, and launches before that name the old
        # memory. Now: those after it name the new one.
        for number, (ref, buffer) in enumerate((*before, *living_tensors())):
            where, tensor = address_of(buffer), ref()
            if where in self.places and (id(ref), where) not in known:  # a tensor has one without a callback
                known.add((id(ref), where))
                state = () if tensor is None else _state(tensor)
                self._residents.append(_Resident(ref, where, buffer, state, number < len(before)))
        self._modules, self._watch, self._region = modules, modules.watch(), process_region()

    @property
    def now(self) -> set[Address | None]:
        """Returns where the tensors are that were there before, and still live."""
        return {address_of(x.buffer) for x in self._residents if x.was_there and x.ref() is not None}

    @property
    def before(self) -> set[Address | None]:
        """Addresses of the memory in the launches that tensors had when the recording began."""
        return {x.address for x in self._residents if x.was_there}

    def weight_at(self, address: Address | None) -> Tensor | None:
        """The first weight that launches find at this address."""
        found = (resident.ref() for resident in self._residents if resident.address == address)
        return next((tensor for tensor in found if tensor is not None and bridge.is_weight(tensor)), None)

    def unknown_tensors(self, known: Collection[Address | None]) -> list[weakref.ref[Tensor]]:
        """Returns the tensors that were in memory that is not ``known`` when the recording began, but for weights."""
        found = [x.ref for x in self._residents if x.was_there and x.address not in known]
        return [ref for ref in found if (x := ref()) is None or not bridge.is_weight(x)]

    def give_up(self, address: Address | None) -> None:
        """This memory is an input's: every replay brings its own, and what lies in it now does not matter."""
        self._residents = [resident for resident in self._residents if resident.address != address]

    def of_model(self, model: Any, before: dict[str, Any], *ignored: str) -> None:
        """It is a pass of this model: a module, or what else can be called. So it depends on what that reads, too.

        Args:
            before: the model's attributes when the recording began.
            ignored: attributes that do not matter to this pass.
        """
        self._modules.note(model, before)
        self._watch = self._modules.watch(*ignored)

    def change(self) -> str:
        """Why the recording cannot be replayed any more, in words; empty if it can, after ``follow``."""
        if self._region is not None and self._region is not process_region():
            return "AMP has been shut down"
        return self.of_tensors() or ("" if self._watch.holds() else f"{self._watch.change()} has changed")

    def of_tensors(self) -> str:
        """Like ``change``, of the tensors alone."""
        moved = False
        for resident in self._residents:
            tensor = resident.ref()
            if tensor is None:
                continue
            state = _state(tensor)
            if state != resident.state:
                return _difference(tensor, resident.state, state)
            moved = moved or tensor.buffer is not resident.buffer
        if moved and self._no_longer_shared():
            tensor = None  # of the loop, which would hold one
            gc.collect()  # views that nobody holds any more stay where they are
            return self._no_longer_shared()
        return ""

    def follow(self) -> bool:
        """Lets the launches read and write where the tensors are now; whether any had moved."""
        moved: dict[Address, Any] = {}
        for resident in self._residents:
            tensor = resident.ref()
            if tensor is not None and tensor.buffer is not resident.buffer:
                moved[resident.address] = resident.buffer = tensor.buffer
        for address, buffer in moved.items():
            for launch, index in self.places[address]:
                bridge.finish_if_shared(launch.queue, launch.args[index])  # nobody else may hold it
                launch.args = (*launch.args[:index], buffer, *launch.args[index + 1 :])
        return bool(moved)

    def _no_longer_shared(self) -> str:
        """Returns which tensors shared memory and do not any more: no launch says which of them it meant. Empty if
        none."""
        now: dict[Address, tuple[Address | None, Tensor]] = {}
        for resident in self._residents:
            tensor = resident.ref()
            if tensor is None:
                continue
            here = address_of(tensor.buffer)
            there, other = now.setdefault(resident.address, (here, tensor))
            if here != there or here is None:
                shapes = f"{tuple(other.shape)} and {tuple(tensor.shape)}"
                return f"tensors of shapes {shapes} shared memory, and one of them has been given other memory"
        return ""


def _difference(tensor: Tensor, then: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    index = next(index for index, (old, new) in enumerate(zip(then, now, strict=True)) if old != new)
    kind = "parameter" if bridge.is_weight(tensor) else "tensor"
    return f"{_STATE[index]} of a {kind} of shape {then[0]} was {then[index]} and is {now[index]}"


# ---------------------------------------------------------------------------------------------- of its own


class Pool(PersistentBufferPool):  # type: ignore[misc]
    """The memory of one recording: what netcl's own pool has no use for, or new. When the recording is gone, it goes to
    that pool."""

    def __init__(self, main: PersistentBufferPool, note: Callable[[Address], None]) -> None:
        super().__init__(main.context, main.queue, max_cached_bytes=1 << 62, max_buffers_per_bucket=1 << 30)
        self._main, self._note = main, note
        self._closed = False
        self.given: dict[Address, int] = {}  # all that it has ever handed out, with its size in bytes

    def allocate(self, nbytes: int, flags: int | None = None) -> Any:
        handle = self._left_over(nbytes) or super().allocate(nbytes, flags)
        if (address := address_of(handle.buffer)) is not None:
            self.given[address] = handle.bucket_size
            self._note(address)
        return handle

    def _left_over(self, nbytes: int) -> Any:
        """Memory of netcl's pool, of an earlier recording, say: each would add as much to what the process holds."""
        bucket = self._find_bucket(nbytes)
        if _has_free(self, bucket):
            return None
        with self._main._lock:  # and not its own: who waits for that may hold this one
            if not _has_free(self._main, bucket):
                return None
            handle = self._main.allocate(nbytes)
            handle.pool = self
            counted = 0 if isinstance(handle, SVMBufferHandle) else bucket  # of shared virtual memory netcl counts none
            self._main._owned_bytes -= counted
        with self._lock:
            self._owned_bytes += counted
        return handle

    def release(self, handle: Any) -> None:
        if self._closed:
            handle.pool = self._main
            self._main.release(handle)
        else:
            super().release(handle)

    def close(self) -> None:
        """Hands free memory over now, the rest when it is released. On an in-order queue it may be used at once."""
        self._closed = True
        with self._lock, self._main._lock:
            self._main._owned_bytes += self._owned_bytes
            self._main.stats.bytes_cached += self.stats.bytes_cached
            self._main.stats.bytes_allocated += self.stats.bytes_allocated
            for bucket, handles in vars(self)["_free"].items():
                for handle in handles:
                    handle.pool = self._main
                self._main._free.setdefault(bucket, []).extend(handles)
            for bucket, arrays in vars(self)["_svm_free"].items():
                self._main._svm_free.setdefault(bucket, []).extend(arrays)
            self.__dict__.update(_free={}, _svm_free={})


def _has_free(pool: PersistentBufferPool, bucket: int) -> bool:
    return bool(pool._free.get(bucket) or pool._svm_free.get(bucket))


#: of recordings that are under way or can be replayed: take memory that is released, if a replay may still use it
keepers: set[Callable[[PersistentBufferPool, Any], bool]] = set()


def watch_pool(pool: PersistentBufferPool) -> None:
    """Lets a pool of netcl's ask before it gives memory to others that a recording may use."""
    if type(pool) is PersistentBufferPool and "release" not in vars(pool):
        pool.release = partial(_release, pool)


def _release(pool: PersistentBufferPool, handle: Any) -> None:
    for keeps in keepers.copy():  # of each tensor that ends: no generator; tuple() may collect what is in the set
        if keeps(pool, handle):
            return
    PersistentBufferPool.release(pool, handle)


def unwatch_pools() -> None:
    """Lets netcl's pools be as they were, if no recording is left."""
    for pool in () if keepers else [*memory._PERSISTENT_POOLS.values()]:
        vars(pool).pop("release", None)


class Launches(list[CapturedKernelLaunch]):
    """The launches of the thread that makes it.

    netcl's own replays, which come back at ``shutdown``, go through them one by one.

    Raises:
        RuntimeError: they are gone through after ``shutdown``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def __iter__(self) -> Iterator[CapturedKernelLaunch]:
        if not Installed.now:
            raise RuntimeError(
                "this was recorded under AMP, which is shut down: record it again (netcl's compiled forward passes: "
                "model.invalidate_compiled(), then model.compile_forward(x))"
            )
        return super().__iter__()


# ---------------------------------------------------------------------------------------------- all that it depends on


class ModuleNotes:
    """The modules that run, each with what its attributes were when it first did."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, dict[str, Any]]] = {}

    def noting(self, original: Any, is_on: Callable[[], bool]) -> Callable[..., Any]:
        """A module class's ``forward`` or ``__call__``, which notes the module."""

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_on():
                self.note(module, vars(module))
            return original.__get__(module, type(module))(*args, **kwargs)

        return call

    def note(self, module: Any, attributes: dict[str, Any]) -> None:
        """Notes a module, with what its attributes are, if it is none that is noted already."""
        if id(module) not in self._before:
            self._before[id(module)] = module, dict(attributes)

    def watch(self, *ignored: str) -> Watch:
        """The modules' settings as they are now.

        What the modules changed themselves since, and what they keep under a private name, does not count.

        Args:
            ignored: attributes that do not count either.
        """

        def hidden(owner: Any, name: str) -> bool:
            if name in ignored or (name.startswith("_") and name != "_training"):
                return True
            _, before = self._before.get(id(owner), (None, {}))
            return name in before and not is_same(vars(owner).get(name), before[name])

        roots: dict[str, Any] = {}
        for module, _ in reversed(self._before.values()):  # the last root is looked at first: parents before children
            kind = type(module).__name__
            roots[kind if kind not in roots else f"{kind} ({len(roots)})"] = module
        return Watch(roots, hidden, lambda x: not isinstance(x, bridge.Module) or id(x) in self._before)


def dependencies_of(capture: KernelCapture) -> Dependencies:
    """Returns what a recording that was made under AMP depends on."""
    found: Dependencies = capture._clamp_dependencies
    return found


def stale(why: str) -> RuntimeError:
    """The error for a replay that would not give what the pass itself gives now."""
    return RuntimeError(
        f"a recording was replayed that does not fit any more: {why} since it was made. Record the pass again (netcl's "
        "compiled forward passes: model.invalidate_compiled(), then model.compile_forward(x))"
    )
