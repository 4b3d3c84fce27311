"""What a recording keeps apart from what others do meanwhile: its memory, and the launches of its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from netcl.core.memory import PersistentBufferPool, SVMBufferHandle
from netcl.runtime.capture import CapturedKernelLaunch

from clamp.patching.recordings.residents import Address, address_of


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
            for bucket, handles in vars(self)["_free"].items():
                for handle in handles:
                    handle.pool = self._main
                self._main._free.setdefault(bucket, []).extend(handles)
            for bucket, arrays in vars(self)["_svm_free"].items():
                self._main._svm_free.setdefault(bucket, []).extend(arrays)
            self.__dict__.update(_free={}, _svm_free={})


def _has_free(pool: PersistentBufferPool, bucket: int) -> bool:
    return bool(pool._free.get(bucket) or pool._svm_free.get(bucket))


class Launches(list[CapturedKernelLaunch]):
    """The launches of the thread that makes it: netcl takes those of all before a recording begins and when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def append(self, launch: CapturedKernelLaunch) -> None:
        if threading.get_ident() == self._thread:
            super().append(launch)
