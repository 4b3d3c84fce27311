"""Recordings that replay right (replay.py): what netcl's ``KernelCapture`` loses while it records launches.

Under AMP, from ``begin`` to ``end``,

* what goes through ``cl.Kernel.__call__`` in this thread is recorded: netcl takes that of all threads;
* copies and fills on the device run as kernels, so that they are recorded, too;
* memory comes from a pool of the recording's own (as of a CUDA graph), so that nobody else is given a buffer that
  the replay will write, and what was there before stays for as long as there may be replays that read it;
* the weight cache is empty at both ends: a recording makes its own 16-bit copies, in every replay anew;
* what the host decides (does the optimizer step? what is dropped out?) is decided anew in every replay;
* what a replay could not repeat, a read to the host or an upload, raises.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pyopencl as cl
import wrapt
from netcl.core import memory as netcls_memory
from netcl.core.memory import PersistentBufferPool
from netcl.runtime.capture import CapturedKernelLaunch, KernelCapture, _tls

from clamp import bridge
from clamp.bridge import Address, Seen, Tensor, address_of, living_tensors
from clamp.interrupts import With, uninterrupted
from clamp.opencl.host_steps import is_host_value, recorder, refuse, set_recorder, unrecorded, value_now
from clamp.ops import transfer
from clamp.params.weight_cache import Together, weight_cache
from clamp.patching.patch_registry import BEFORE_REMOVAL, meets
from clamp.recordings import memory
from clamp.recordings.attempt import Attempt
from clamp.recordings.memory import Dependencies, Launches, ModuleNotes, Pool, dependencies_of
from clamp.recordings.watch import Watch
from clamp.scaling.dynamic_scale import forget_late, settle_late

_INPUT_ADVICE = "Pass data that changes as an input tensor; make constants before the recording."
_READ_ADVICE = "Read it after the recorded part."


class _Recording:
    """One recording, from ``begin`` to ``end``, and its memory after."""

    def __init__(self, capture: KernelCapture) -> None:
        self._capture = weakref.ref(capture)
        self._pools: dict[int, Pool] = {}
        self._kept: list[tuple[PersistentBufferPool, Any]] = []  # memory of others that nobody else uses any more
        self._addresses: set[Any] | None = None  # of all memory in the launches; None until they are known
        self.allocations: list[tuple[int, Address]] = []  # what launches got, with how many there were before
        self._moves = 0
        self._undo: list[tuple[Any, str, Any]] = []
        self.together: Together = getattr(capture, "together", {})  # of `weights`
        self._before: list[Seen] = []  # the tensors that there were when it began
        self._modules = ModuleNotes()  # of one that only this knows; what an attempt reads is watched from its function
        self.begun_by: With | None = None

    def start(self) -> None:
        """Puts the recorder's own versions over launches, and over what netcl and pyopencl do to memory."""
        weight_cache.recorded_by, weight_cache.together = threading.get_ident(), self.together
        weight_cache.clear()
        capture = self._capture()
        if not getattr(capture, "compares", False):  # nobody asks what that depends on
            self._before = living_tensors()
        memory.keepers.add(self.keeps)
        for pool in [*netcls_memory._PERSISTENT_POOLS.values()]:
            memory.watch_pool(pool)
        self._replace(cl.Kernel, "__call__", self._call)
        self._replace(netcls_memory, "get_persistent_pool", self._own_pool)
        self._replace_here(cl, "enqueue_fill_buffer", _fill_buffer)
        self._replace_here(cl, "enqueue_svm_memfill", _fill_svm)
        self._replace_here(cl, "enqueue_copy", _copy)
        for name in ("enqueue_map_buffer", "enqueue_nd_range_kernel"):
            self._replace_here(cl, name, _refused(name, "Launch kernels by calling them; read and write outside."))
        for name in ("to_host", "to_host_async"):
            self._replace_here(Tensor, name, _refused(f"Tensor.{name}", _READ_ADVICE))
        self._replace_here(Tensor, "from_host", self._upload)
        for cls in () if isinstance(capture, Attempt) else bridge.with_subclasses(bridge.Module):
            for name in ("forward", "__call__"):
                if callable(vars(cls).get(name)):
                    self._replace(cls, name, partial(self._modules.noting, is_on=self._is_on))
        set_recorder(self)

    def put_back(self) -> None:
        """Takes the recorder's versions away again. After an interrupt in it, once more does it all."""
        set_recorder(None)
        weight_cache.recorded_by = weight_cache.together = None
        for owner, name, original in reversed(self._undo):
            setattr(owner, name, original)
        self._undo = []

    def stop(self) -> None:
        """Puts everything back, and notes what a replay depends on."""
        self.put_back()
        weight_cache.clear()
        capture = self._capture()
        own = {address for pool in self._pools.values() for address in pool.given}
        if capture is not None and not getattr(capture, "compares", False):
            capture._clamp_dependencies = Dependencies(capture, self._before, own, self._modules)
        self._before, self._modules = [], ModuleNotes()  # what leads back to the capture must not keep its memory
        self._note_addresses()
        released, self._kept = self._kept, []
        for pool, handle in released:
            pool.release(handle)

    def rebind(self) -> int:
        """Before a replay that fits: lets the launches find the tensors that have got other memory since.

        Returns:
            How often there were any so far: who holds launches of an earlier time looks at them again.
        """
        capture = self._capture()
        if capture is not None and dependencies_of(capture).follow():
            self._moves += 1
            self._note_addresses()
        return self._moves

    def refuse(self, why: str) -> None:
        """Raises RuntimeError; an attempt is given up instead, and what it was to record just runs on."""
        capture = self._capture()
        if not isinstance(capture, Attempt) or capture.raises:
            if not self.end_if_left():
                raise RuntimeError(why)
        else:
            capture.give_up(why)

    def end_if_left(self) -> bool:
        """Returns whether the ``with`` that it was begun by was left without its end, as by an interrupt right before
        that; drops it then. (Should its end come yet, it raises.)"""
        capture = self._capture()
        if capture is None or self.begun_by is None or not self.begun_by.is_left():
            return False
        capture.clear()
        capture._clamp_left = True
        return True

    def host_step(self) -> AbstractContextManager[None]:
        """Around the run of a host step, which changes in every replay what it changes now."""
        capture = self._capture()
        if not isinstance(capture, Attempt):
            return nullcontext()
        return Watch.following([capture.watch], capture.moved)

    @property
    def _launches(self) -> list[CapturedKernelLaunch]:
        """Returns the launches recorded so far; none where the capture is gone."""
        capture = self._capture()
        return [] if capture is None else capture._launches

    def position(self) -> int:
        """Returns how many launches and host steps there are so far."""
        return len(self._launches)

    def repeat(self, begin: int, end: int) -> None:
        """Runs those from one position to another once more."""
        launches = self._launches
        if len(launches) < end:
            raise RuntimeError("the launches of the backward to repeat are no longer in the recording")
        for launch in launches[begin:end]:
            launch.kernel(launch.queue, launch.global_size, launch.local_size, *launch.args)

    @property
    def addresses(self) -> frozenset[Address]:
        """Addresses of all memory in the launches, when the recording had ended."""
        return frozenset(self._addresses or ())

    def size_of(self, storage: Any) -> int | None:
        """Returns how many bytes launches may use of memory of the recording's own; None for other memory."""
        where = address_of(storage)
        return next((pool.given[where] for pool in self._pools.values() if where in pool.given), None)

    def _note_addresses(self) -> None:
        self._addresses = {address_of(arg) for launch in self._launches for arg in launch.args} - {None}

    def close(self) -> None:
        """Gives the memory back: there is no replay any more. After an interrupt in it, once more does the rest."""
        memory.keepers.discard(self.keeps)
        try:
            with uninterrupted():  # what a pool was given twice it would give to two
                for pool in self._pools.values():
                    pool.close()
                while self._kept:
                    pool, handle = self._kept.pop()
                    pool.release(handle)
                self._pools = {}
        finally:
            memory.unwatch_pools()

    def keeps(self, pool: PersistentBufferPool, handle: Any) -> bool:
        """Takes memory that is released if a replay may still use it."""
        keep = self._addresses is None or address_of(handle.buffer) in self._addresses
        if keep:
            self._kept.append((pool, handle))
        return keep

    def add(self, launch: Callable[..., Any], queue: Any, global_size: Any, local_size: Any, *args: Any) -> None:
        """Appends what stands in a launch's place: a host step, or a launch whose arguments change."""
        self._launches.append(CapturedKernelLaunch(launch, queue, global_size, local_size, args))

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        self._undo.append((owner, name, original))
        setattr(owner, name, make(original))

    def _replace_here(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Puts ``ours(original, ...)`` over a function, for where this recording is on."""

        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return ours(wrapped, *args, **kwargs) if self._is_on() else wrapped(*args, **kwargs)

        self._replace(owner, name, lambda original: wrapt.FunctionWrapper(original, call))

    def _is_on(self) -> bool:
        return recorder() is self

    def _call(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(kernel: Any, queue: Any, global_size: Any, local_size: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_on() and kwargs.keys() - {"wait_for"}:
                refuse(f"A kernel was called with {', '.join(sorted(kwargs))}", "Pass the sizes alone.")
            event, capture = plain(kernel, queue, global_size, local_size, *args, **kwargs), self._capture()
            is_recorded = self._is_on() and capture is not None and capture.is_recording
            if is_recorded and not getattr(_tls, "disabled", False):  # netcl tries its kernels out
                self.add(kernel, queue, global_size, local_size, *args)
            return event

        return call

    def _own_pool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_persistent_pool(queue: Any) -> Any:
            main = original(queue)
            memory.watch_pool(main)
            if not self._is_on():
                return main
            key = id(main)
            if key not in self._pools:
                self._pools[key] = Pool(main, lambda where: self.allocations.append((len(self._launches), where)))
            return self._pools[key]

        return get_persistent_pool

    def _upload(self, from_host: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        capture: Any = self._capture()
        given: Any = args[1] if len(args) > 1 else kwargs.get("data")
        if isinstance(capture, Attempt) and is_host_value(given):
            with unrecorded():  # each replay brings the array of its call
                return capture.upload(from_host, given, args, kwargs)
        refuse("Tensor.from_host was called", _INPUT_ADVICE)
        return from_host(*args, **kwargs)


def _fill_buffer(_: Any, queue: Any, mem: Any, pattern: Any, offset: int, size: int, wait_for: Any = None) -> Any:
    return transfer.fill(queue, mem, pattern, int(offset), int(size))


def _fill_svm(_: Any, queue: Any, dest: Any, pattern: Any, byte_count: int | None = None, wait_for: Any = None) -> Any:
    dest = dest if isinstance(dest, cl.SVMPointer) else cl.SVM(dest)
    return transfer.fill(queue, dest, pattern, 0, int(dest.size if byte_count is None else byte_count))


def _copy(original: Callable[..., Any], queue: Any, dest: Any, src: Any, **kwargs: Any) -> Any:
    known = kwargs.keys() <= {"byte_count", "src_offset", "dst_offset", "is_blocking", "wait_for"}
    if not (known and all(isinstance(storage, cl.Buffer | cl.SVM) for storage in (dest, src))):
        refuse("A copy between host and device ran", f"{_READ_ADVICE} {_INPUT_ADVICE}")
        return original(queue, value_now(dest), value_now(src), **kwargs)
    begin, to = int(kwargs.get("src_offset") or 0), int(kwargs.get("dst_offset") or 0)
    size = kwargs.get("byte_count")
    size = min(src.size - begin, dest.size - to) if size is None else int(size)
    return transfer.copy(queue, dest, src, size, begin, to)


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refuse(f"{name} was called", instead)
        return original(*args, **kwargs)

    return call


_running: list[KernelCapture] = []  # at most one: what stands over cl.Kernel does so for all threads


def recording_of(capture: KernelCapture) -> _Recording | None:
    """The recording that a capture holds, also while it is made; None if that is without clamp, or not at all."""
    return getattr(capture, "_clamp_recording", None)


@meets("netcl.runtime.capture.KernelCapture.begin")
def begin(wrapped: Any, instance: KernelCapture, /) -> None:
    """Starts a recording.

    Raises:
        RuntimeError: another one is under way.
    """
    under_way = recording_of(_running[0]) if _running else None
    if under_way is not None and not under_way.end_if_left():
        raise RuntimeError("a recording is under way already: end it before you begin another")
    _forget(instance)
    instance._launches, instance._clamp_left = Launches(), False
    recording = _Recording(instance)
    weakref.finalize(instance, recording.close).atexit = False
    try:
        instance._clamp_recording = recording
        _running.append(instance)
        vars(instance).update(_recording=True, _finalized=False)  # as netcl's does
        recording.start()
    except BaseException:
        instance.clear()
        raise


@meets("netcl.runtime.capture.KernelCapture.end")
def end(wrapped: Any, instance: KernelCapture, /) -> int:
    """Ends a recording; from now on it can be replayed."""
    recording = running_of(instance)
    if recording is None:
        if getattr(instance, "_clamp_left", False):
            raise RuntimeError(
                "this recording was given up before its end: another recording began, or a tensor was read to the host"
            )
        return wrapped()
    try:
        with unrecorded():
            settle_late()
        recording.stop()
        launches = wrapped()
        _running.clear()
    except BaseException:
        instance.clear()
        raise
    return launches


def running_of(capture: KernelCapture) -> _Recording | None:
    """The recording of a capture's that is under way."""
    return recording_of(capture) if _running and _running[0] is capture else None


def drop_if_running(capture: KernelCapture) -> None:
    """Ends a recording that is under way, where whoever it was for is gone."""
    if running_of(capture) is not None:
        capture.clear()


def is_free() -> bool:
    """Returns whether a recording may begin: netcl records for one thread at a time."""
    return not _running


@meets("netcl.runtime.capture.KernelCapture.clear")
def clear(wrapped: Any, instance: KernelCapture, /) -> None:
    """Drops what was recorded, and ends a recording that is under way, as after an exception.

    An interrupt anywhere in a recording, or in its end, comes here; one in here has everything done once more.
    """
    try:
        _drop(instance)
    except BaseException:
        _drop(instance)
        raise
    finally:
        wrapped()


def _drop(capture: KernelCapture) -> None:
    recording = running_of(capture)
    if recording is not None:
        forget_late()  # there is nothing to repeat any more
        recording.put_back()
        weight_cache.clear()
        _running.clear()
    _forget(capture)


def _abandon() -> None:
    if _running:
        _running[0].clear()


BEFORE_REMOVAL.append(_abandon)


def _forget(capture: KernelCapture) -> None:
    recording = recording_of(capture)
    if recording is not None:
        capture._launches.clear()
        recording.close()
        capture._clamp_recording = None
