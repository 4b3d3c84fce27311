"""Device memory: all that pyopencl holds in this process, what of it netcl's pools keep free and let go, and word of
what these hand out and take back."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from sys import getrefcount
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeAlias

import pyopencl as cl
import wrapt
from netcl import optim
from netcl.core.memory import _PERSISTENT_POOLS, PersistentBufferPool

from clamp.bridge.autograd import Node, Tape
from clamp.bridge.modules import Module
from clamp.bridge.objects import content_of, own_attributes, slots_of, values_in, with_subclasses
from clamp.bridge.optimizers import is_optimizer
from clamp.bridge.tensors import Tensor, empty
from clamp.interrupts import holding

Address: TypeAlias = tuple[str, int]
Seen: TypeAlias = tuple[weakref.ref[Tensor], Any]  # a tensor and its memory


def address_of(storage: Any) -> Address | None:
    """Returns where memory lies, the same for every object that stands for it; None for what is no memory."""
    if isinstance(storage, cl.Buffer):
        return "buffer", storage.int_ptr
    if isinstance(storage, cl.SVM | cl.SVMAllocation):
        return "svm", storage.svm_ptr
    return None


def whole_of(storage: Any) -> Any:
    """The memory that some is a part of; itself, if it is none."""
    try:
        return getattr(storage, "associated_memobject", None) or storage
    except cl.LogicError:  # Intel's runtime does not name the whole any more once its owner has let go of it
        return storage


def span_of(storage: Any) -> tuple[int, int, int]:
    """The memory that some is a part of, and its bytes in there, from one to before another; shared virtual memory is
    one.

    Raises:
        cl.LogicError: a runtime does not name the whole, whose owner has let go of it (Intel's).
    """
    size = storage.size
    if isinstance(storage, cl.SVM | cl.SVMAllocation):
        return 0, storage.svm_ptr, storage.svm_ptr + size
    whole: Any = storage.get_info(cl.mem_info.ASSOCIATED_MEMOBJECT) or storage
    return whole.int_ptr, storage.offset, storage.offset + size


_count_set_aside = gc.get_freeze_count


def instances_of(*kinds: type) -> list[Any]:
    """All objects of some classes, and of those derived from them. Takes milliseconds: it looks at every object there
    is.

    What ``gc.freeze()`` has set aside shows in no list of objects, so it is brought back first, as ``gc.unfreeze()``
    does: later collections take as long as they did before the freeze. Freezing again would set aside what is young
    now, too, and its memory would never be freed.

    Nobody asks for all objects: among them are tuples that other threads are making just now, and Python raises
    SystemError there if somebody else holds one. What refers to a class is its instances, and little besides.
    """
    if _count_set_aside():
        gc.unfreeze()
    classes = {*with_subclasses(*kinds)}
    # Not isinstance: it asks x.__class__, and proxies run code of their own at that.
    return [x for x in gc.get_referrers(*classes) if type(x) in classes]


def living_tensors() -> list[Seen]:
    """All tensors of the process that lie in device memory."""
    lying = [x for x in instances_of(Tensor) if not hasattr(type(x), "buffer")]  # else computed when it is asked for
    return [(weakref.ref(x), buffer) for x in lying if (buffer := getattr(x, "buffer", None)) is not None]


def held_memory() -> dict[Address, int]:
    """All device memory that pyopencl holds, with its bytes; a part of a buffer counts with the whole."""
    found: dict[Address, int] = {}
    for one in instances_of(cl.MemoryObjectHolder, cl.SVMAllocation):
        if isinstance(one, cl.SVMAllocation) and hasattr(one, "__dict__") and not vars(one):
            continue  # shared memory that there was no room for, in a frame of the error's
        with suppress(cl.Error):  # it was released by hand
            whole = whole_of(one)
            address = address_of(whole)
            if address is not None:
                found[address] = whole.size
    return found


# ---------------------------------------------------------------------------------------------- netcl's pools


def memory_is_held(tensor: Tensor) -> bool:
    """Returns whether somebody has a pooled tensor's memory without the tensor: its buffer, to launch with or to make
    another tensor of, or the numbers in it, shown in place."""
    kind = type(tensor.pool_handle)
    if tensor.pool_handle is None:
        return False
    if kind not in _own_holders:
        _own_holders[kind] = _holders(empty(tensor.queue, (1,), "float32"))
    return _holders(tensor) > _own_holders[kind]


_own_holders: dict[type, int] = {}  # by kind of memory: how many references there are to that of a new tensor


def _holders(tensor: Tensor) -> int:
    handle = tensor.pool_handle
    memory = [tensor.buffer, handle]
    if (shared := getattr(handle, "_arr", None)) is not None:
        memory.append(shared)
    return sum(map(getrefcount, memory))


def free_memory() -> dict[Address, tuple[int, bool]]:
    """Returns the free memory of pools: its bytes, and whether the pool is netcl's; else it is a recording's, whose
    launches use it in each replay."""
    found: dict[Address, tuple[int, bool]] = {}
    netcls = {*map(id, _PERSISTENT_POOLS.values())}
    for pool in instances_of(PersistentBufferPool):
        with pool._lock:
            kept = [handle.buffer for handles in pool._free.values() for handle in handles]
            kept += [array.base for arrays in (*pool._svm_free.values(), pool._svm_deferred) for array in arrays]
        found |= {
            where: (storage.size, id(pool) in netcls) for storage in kept if (where := address_of(storage)) is not None
        }
    return found


def free_bytes() -> int:
    """Returns the bytes that are free in netcl's pools."""
    return sum(
        pool.stats.bytes_cached + sum(array.nbytes for array in pool._svm_deferred)
        for pool in list(_PERSISTENT_POOLS.values())
    )


def free_in_turn(context: cl.Context) -> None:
    """Frees the shared virtual memory that pools keep no more, after the launches so far, which may use it.

    netcl holds it until somebody waits for the whole queue, which no training loop need do: a model that has more
    tensors of one size than a pool keeps, 96, would take more memory in each step. Nor should it be made anew in each
    step, so such a pool keeps more from now on, as netcl's do of memory that is not shared.
    """
    for pool in list(_PERSISTENT_POOLS.values()):
        if pool._svm_deferred and pool.context == context:
            with pool._lock:
                for array in pool._svm_deferred:
                    array.base.bind_to_queue(pool.queue)
                pool.release_deferred_svm()
                _kept_by_netcl.setdefault(pool, pool.max_buffers_per_bucket)
                pool.max_buffers_per_bucket = sys.maxsize


#: pools that keep more than netcl lets them: how much of each size that was
_kept_by_netcl: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def keep_as_netcl() -> None:
    """Lets pools keep as much memory as they did before AMP."""
    for pool, number in [*_kept_by_netcl.items()]:
        pool.max_buffers_per_bucket = number
        _kept_by_netcl.pop(pool, None)


def living_optimizers() -> list[Any]:
    """All optimizers of netcl's classes, and of those derived from them."""
    classes = [x for x in vars(optim).values() if isinstance(x, type) and callable(getattr(x, "step", None))]
    return [x for x in instances_of(*classes) if is_optimizer(x)]


def tensors_of_layers() -> list[Tensor]:
    """The tensors that all layers hold: parameters, and statistics."""
    return [x for layer in instances_of(Module) for x in vars(layer).values() if isinstance(x, Tensor)]


def memory_of_graphs() -> list[Any]:
    """The memory that the nodes of all graphs keep for backward: that of their values, and what gradients are computed
    from."""
    computed = [node for node in instances_of(Node) if vars(node).get("parents")]
    return memory_in([x for node in computed for x in (node.value, node.grad_fn)])


def memory_in(x: Any) -> list[Any]:
    """The memory that an object leads to, by what netcl and clamp keep tensors in; not beyond a node or layer."""
    return list(_memory_in(x, set()))


def _memory_in(x: Any, seen: set[int]) -> Iterator[Any]:
    if id(x) in seen or isinstance(x, Node):
        return
    seen.add(id(x))
    kind = type(x)
    if isinstance(x, Tensor):
        if (buffer := vars(x).get("buffer")) is not None:  # a master in parts would make itself one
            yield buffer
        parts: Iterable[Any] = ()
    elif isinstance(x, cl.Buffer | cl.SVM):
        yield x
        return
    elif kind is dict:
        parts = list(x.values())
    elif kind in (list, tuple, set, frozenset):
        parts = list(x)
    elif kind is partial:
        parts = (x.func, x.args, x.keywords)
    elif kind is MethodType:
        parts = (x.__self__,)
    elif kind is FunctionType:
        parts = [*map(content_of, x.__closure__ or ())]
    elif kind.__module__.startswith(("netcl.", "clamp.")) and not isinstance(x, type | Module | Tape):
        parts = [*own_attributes(x).values(), *values_in(x, slots_of(kind)).values()]
    else:
        parts = ()
    for part in parts:
        yield from _memory_in(part, seen)


class PoolListener(Protocol):
    """Listener to what pools do."""

    def taken(self, handle: Any, nbytes: int) -> None:
        """Somebody has asked for so many bytes, and got a handle."""

    def given_back(self, handle: Any) -> None:
        """A handle is about to go back."""


_listeners: list[PoolListener] = []
_own: dict[str, Any] = {}  # netcl's functions, while somebody listens


def listen_to_pools(listener: PoolListener) -> None:
    """Tells ``listener`` of all pools, until ``stop_listening_to_pools``."""
    _listeners.append(listener)
    if isinstance(vars(PersistentBufferPool)["allocate"], wrapt.FunctionWrapper):
        return
    for name, told in (("allocate", _allocate), ("release", _release)):
        _own[name] = vars(PersistentBufferPool)[name]
        setattr(PersistentBufferPool, name, wrapt.FunctionWrapper(_own[name], told))


def stop_listening_to_pools(listener: PoolListener) -> None:
    """Stops telling ``listener``; without any listener netcl's pools are as they were."""
    if listener in _listeners:
        _listeners.remove(listener)
    for name in list(_own) if not _listeners else ():
        setattr(PersistentBufferPool, name, _own[name])
        del _own[name]


def _allocate(wrapped: Any, _pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handle = wrapped(*args, **kwargs)
    for listener in _listeners:
        listener.taken(handle, args[0] if args else kwargs["nbytes"])
    return handle


def _release(wrapped: Any, _pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in _listeners:
        listener.given_back(*args, **kwargs)
    wrapped(*args, **kwargs)


def listening_to_tensors(made: Any) -> AbstractContextManager[None]:
    """Inside the ``with``, ``made(tensor)`` is called with every tensor that is made."""

    def init(wrapped: Any, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        made(tensor)

    return holding(Tensor, "__init__", wrapt.FunctionWrapper(vars(Tensor)["__init__"], init))


class PoolPeak:
    """The most bytes that tensors have held of netcl's pools at a time. Counting begins with a question, and ends with
    ``stop``, which leaves netcl's pools as they were."""

    def __init__(self) -> None:
        self._counts = False
        self._sizes: dict[int, int] = {}  # by the id of a handle
        self._held = 0
        self._peak: int | None = None  # None: nobody has asked yet

    def __call__(self, reset: bool) -> int:
        """The most since the last reset. Before the first question nobody counted: all that pools have taken."""
        if not self._counts:
            pools = _PERSISTENT_POOLS.values()
            taken = sum(pool.stats.bytes_allocated for pool in pools)
            self._held = taken - sum(pool.stats.bytes_cached for pool in pools)
            self._peak = taken if self._peak is None else max(self._peak, self._held)
            self._counts = True
            listen_to_pools(self)
        peak = self._peak or 0
        if reset:
            self._peak = self._held
        return peak

    def taken(self, handle: Any, nbytes: int) -> None:
        """See `PoolListener`."""
        self._sizes[id(handle)] = nbytes
        self._held += nbytes
        self._peak = max(self._peak or 0, self._held)

    def given_back(self, handle: Any) -> None:
        """See `PoolListener`."""
        self._held -= self._sizes.pop(id(handle), handle.bucket_size)

    def stop(self) -> None:
        """Ends the counting. The next question is told what was counted until now, and counts on."""
        stop_listening_to_pools(self)
        self._counts = False
        self._sizes.clear()
