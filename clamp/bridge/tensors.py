"""Tensors: dtypes, memory, what a device holds, and which of them are trained."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import pyopencl as cl
from netcl.core import memory, transfer
from netcl.core.backend.opencl import OpenCLBackend
from netcl.core.memory import PersistentBufferPool
from netcl.core.parameter import Parameter as Parameter
from netcl.core.tensor import Tensor as Tensor
from netcl.core.tensor import reshape as _reshape
from netcl.optim._utils import is_frozen_param
from numpy.typing import NDArray

from clamp.bridge.netcl_functions import own_copy
from clamp.opencl.device import require_usable
from clamp.opencl.program import STORAGE as STORAGE

#: a dtype as users write it; `dtype_name` reads it
DTypeLike: TypeAlias = str | type | np.dtype[Any]
HALF_DTYPES = frozenset({"float16", "half", "bfloat16"})
_CANONICAL = {"float": "float32", "half": "float16", "double": "float64", "int": "int32"}
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
#: bytes of an element
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "float64": 8, "int64": 8}
_BYTES = ITEMSIZE | {alias: ITEMSIZE[name] for alias, name in _CANONICAL.items()}


def canonical_dtype(dtype: str) -> str:
    """netcl's dtype without its aliases: ``"half"`` -> ``"float16"``."""
    return _CANONICAL.get(dtype, dtype)


def dtype_name(dtype: object) -> object:
    """netcl's name of a dtype as users write it: ``np.float16``, ``np.dtype("float16")``, ``"half"``, ``"fp16"``.

    What is no dtype comes back as it is, for the caller to refuse.
    """
    if isinstance(dtype, str):
        return canonical_dtype(_SHORT.get(dtype, dtype))
    if isinstance(dtype, type | np.dtype):
        try:
            return np.dtype(dtype).name
        except TypeError:  # a class that numpy knows nothing of
            return dtype
    return dtype


def from_words(words: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """float32 numbers from the words of devices, files and messages, of 2 bytes (float16, bfloat16) or 4 (float32):
    numpy has no bfloat16.

    Args:
        words: unsigned integers.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    """
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.view(dtype).astype(np.float32, copy=False)


def to_words(numbers: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Words of ``dtype`` from float32 numbers, rounded to nearest even; nan stays nan."""
    if dtype == "float32":
        return numbers.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).view(np.uint16)
    bits = numbers.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements (its pooled buffer may be larger)."""
    return tensor.size * _BYTES[tensor.dtype]


_from_shape = Tensor.from_shape  # netcl's own: a user's goes through clamp/patching/tensors.py
_own_init, _own_pool_of, _fill = Tensor.__init__, memory.get_persistent_pool, own_copy(transfer.fill)


class _Place(NamedTuple):
    """The last queue that a tensor was made on, and what tensors there have in common."""

    queue: cl.CommandQueue | None
    like: Any  # a tensor without memory
    # netcls, pool_code: netcl's function for pools, and its code, which AMP exchanges; only if it finds the same one
    # always, which a recording's does not
    netcls: Any
    pool_code: Any
    pool: Any
    new: list[int]  # how much memory the pool had made anew at the last look


_place = _NOWHERE = _Place(None, None, None, None, None, [0])
_pools_lock = threading.RLock()


def pool_of(queue: cl.CommandQueue, netcls: Callable[[Any], Any] | None = None) -> Any:
    """The pool of a queue: netcl's for the one of a context that has asked first, one of its own for each further one.

    netcl has one for all. What a tensor of one queue frees while a launch still uses it would go to the next tensor
    that asks, on whatever queue: launches of one queue wait for each other, those of two do not. Pools stay, as netcl's
    do: tensors go back to them at any time, and shared virtual memory must not be freed under a launch.

    Args:
        netcls: netcl's function, where its name stands for this one.
    """
    first = (netcls or memory.get_persistent_pool)(queue)
    if first.queue == queue or type(first) is not PersistentBufferPool:  # a recording has a pool of its own
        return first
    # Beside netcl's, whose keys are positive, so that whoever looks at all pools meets these, too.
    key = -queue.int_ptr
    pool = memory._PERSISTENT_POOLS.get(key)
    if pool is None:
        with _pools_lock:
            pool = memory._PERSISTENT_POOLS.setdefault(key, PersistentBufferPool(queue.context, queue))
    return pool


def empty(queue: cl.CommandQueue, shape: Sequence[int], dtype: str) -> Tensor:
    """A device tensor with undefined content, from netcl's pool: as ``Tensor.from_shape``, and much faster."""
    if Tensor.__init__ is not _own_init:  # somebody watches tensors being made: clamp.debugging's meter, say
        return _from_shape(queue, shape, dtype=dtype, pool=pool_of(queue))
    return _in_memory_of(prod(shape) * _BYTES[dtype], queue, tuple(map(int, shape)), dtype)


def _in_memory_of(size: int, queue: cl.CommandQueue, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A tensor in so many bytes of netcl's pool. All that netcl's constructor finds out anew is the same on a queue."""
    place = _place
    netcls = memory.get_persistent_pool
    if place.queue is not queue or place.netcls is not netcls or place.pool_code is not netcls.__code__:
        place = _place_on(queue)
    handle = place.pool.allocate(size)
    if place.pool.stats.misses != place.new[0]:
        place.new[0] = place.pool.stats.misses
        # Shared virtual memory that does not go back to its pool is to be freed in its turn among the launches: the end
        # of a tensor gives it back, in Python, and Ctrl-C in there would free what launches are still using.
        if (shared := getattr(handle, "_arr", None)) is not None:
            shared.base.bind_to_queue(queue)
    tensor = _made_as(place.like)
    tensor.buffer, tensor.pool_handle, tensor.shape, tensor.dtype = handle.buffer, handle, shape, dtype
    return tensor


def from_host(queue: cl.CommandQueue, data: Any, dtype: str) -> Tensor | None:
    """A tensor of values of the host, as netcl's own; None on a queue that is not the last one."""
    place = _place
    if queue is None or place.queue is not queue or Tensor.__init__ is not _own_init:
        return None
    buffer, event, release, host, handle = place.like._backend.from_host(data, dtype, return_handle=True)
    tensor = _made_as(place.like)
    tensor.buffer, tensor.pool_handle, tensor.shape, tensor.dtype = buffer, handle, np.asarray(data).shape, dtype
    tensor.pending_event, tensor.pending_release, tensor.host_ref = event, release, host
    return tensor


def without_dicts(kind: type, *names: str) -> None:
    """Lets objects of a class have these attributes, which clamp adds, without a dict of their own.

    CPython keeps attributes apart from dicts where the first few objects of the class have had all of them, and nobody
    asks for ``vars``; a class has room for 30. Where some objects have dicts and others have none, reading any
    attribute takes several times as long.
    """
    first: Any = object.__new__(kind)
    for name in names:
        setattr(first, name, None)


_NOTED = (
    "_loss_scaling", "_serial", "_base", "_given_by", "_stepped_by", "_shared", "_made_from_gradient", "_has_optimizer",
    "_model_param",
)  # fmt: skip
without_dicts(Tensor, *_NOTED)
without_dicts(Parameter, *_NOTED)


def _made_as(like: Tensor) -> Tensor:
    """A tensor with what another one without memory has in common with all of its queue, as ``without_dicts`` says."""
    tensor: Any = object.__new__(Tensor)
    # one line each, in netcl's order: a loop takes three times as long
    tensor.buffer = tensor.shape = tensor.dtype = None
    tensor.context = like.context
    tensor.queue = like.queue
    tensor.pool_handle = None
    tensor.persistent = tensor.requires_grad = False
    tensor.grad = tensor.grad_fn = tensor.pending_event = tensor.pending_release = tensor.host_ref = None
    tensor.array = None
    tensor._backend = like._backend
    return tensor


def _place_on(queue: cl.CommandQueue) -> _Place:
    global _place
    require_usable(queue)
    netcls = memory.get_persistent_pool
    like = _place.like
    if _place.queue is not queue:
        like = Tensor(None, (), "", queue.context, queue, backend=OpenCLBackend(queue))
    place = _Place(queue, like, netcls, netcls.__code__, pool_of(queue), [-1])
    if netcls is _own_pool_of:
        _place = place
    return place


def _forget_place() -> None:
    global _place
    _place = _NOWHERE


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_place)


def has_tensors(queue: cl.CommandQueue) -> bool:
    """Returns whether the last tensor was made on this queue, which is usable then."""
    return _place.queue is queue


def ones(queue: cl.CommandQueue, shape: Sequence[int]) -> Tensor:
    """A float32 device tensor of ones, from netcl's pool."""
    tensor = empty(queue, shape, "float32")
    if size := nbytes(tensor):
        _fill(queue, tensor.buffer, np.float32(1), 0, size)
    return tensor


def zeros(queue: cl.CommandQueue, shape: Sequence[int], dtype: str) -> Tensor:
    """A device tensor of zeros, from netcl's pool."""
    return _from_shape(queue, shape, dtype=dtype, pool=pool_of(queue), fill=0.0)


def empty_like(tensor: Tensor, size: int) -> Tensor:
    """A device tensor with undefined content, of the shape and dtype of another one, in memory of ``size`` bytes."""
    if Tensor.__init__ is _own_init:
        return _in_memory_of(size, tensor.queue, tuple(tensor.shape), tensor.dtype)
    made = alias(tensor, pool_of(tensor.queue).allocate(size))
    made.buffer = made.pool_handle.buffer
    return made


def alias(tensor: Tensor, handle: Any = None) -> Tensor:
    """Another object for a tensor, which has to outlive it: it does not keep the memory, without a handle for that."""
    return Tensor(
        tensor.buffer, tuple(tensor.shape), tensor.dtype, tensor.context, tensor.queue, handle, backend=tensor._backend
    )


class WithoutMemory(Tensor):  # type: ignore[misc]  # netcl has no types
    """The shape and dtype of a tensor, without its memory.

    Args:
        like: a tensor on its queue; of its shape and dtype, if no others are given.
    """

    def __init__(self, like: Tensor, shape: Sequence[int] | None = None, dtype: str | None = None) -> None:
        self.shape = like.shape if shape is None else tuple(map(int, shape))
        self.dtype = like.dtype if dtype is None else dtype
        self.context, self.queue, self._backend = like.context, like.queue, like._backend


class Late(WithoutMemory):
    """A tensor that is computed when somebody asks for its memory.

    Args:
        make: computes it.
    """

    def __init__(self, make: Callable[[], Tensor], like: Tensor, shape: Sequence[int], dtype: str) -> None:
        super().__init__(like, shape, dtype)
        self._make, self._made = make, list[Tensor]()

    @property
    def buffer(self) -> Any:
        """Its memory, computed now if it has not been yet."""
        if not self._made:
            self._made.append(self._make())
        return self._made[0].buffer


class Freed(WithoutMemory):
    """Placeholder in a graph for a computed tensor whose memory has been freed: its shape and dtype."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.requires_grad, self._frozen = tensor.requires_grad, has_frozen_mark(tensor)

    @property
    def buffer(self) -> Any:
        """Raises RuntimeError: its memory is gone."""
        raise RuntimeError(
            f"the value of a computed node, {self.dtype} of shape {tuple(self.shape)}, has been freed: backward does "
            "not need it, and no variable held the node. Keep the node (or its value) in a variable from the forward "
            "on, or record the forward on a tape that keeps everything, ag.Tape(retain_grads=True)"
        )


class WrittenTo(RuntimeError):
    """What backward would read is not what the forward has read."""


class Overwritten(WithoutMemory):
    """In the place of a tensor that backward would read, and that does not hold any more what the forward has read.

    Args:
        tensor: the one.
        dtype: as it would be read, if not in its own.
    """

    def __init__(self, tensor: Tensor, dtype: str | None = None) -> None:
        super().__init__(tensor, dtype=dtype)
        self._of_weight = is_weight(tensor if base_of(tensor) is None else base_of(tensor))

    @property
    def buffer(self) -> Any:
        """Raises WrittenTo: the gradient would be that of another forward."""
        cure = "Run backward before the tensor of a batch gets the next one, or make the next one a tensor of its own"
        if self._of_weight:
            cure = "Run backward before a step, of any optimizer, moves it, or compute the loss again after that"
        raise WrittenTo(
            f"a {'weight' if self._of_weight else 'tensor'} of shape {tuple(self.shape)} was written to between a "
            f"forward and its backward, which both read it: the gradients would be those of another forward. {cure}"
        )


def view(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The same buffer under another shape of as many elements.

    Raises:
        ValueError: the number of elements differs.
    """
    shape = tuple(map(int, shape))
    if prod(shape) != tensor.size:
        raise ValueError(
            f"cannot view a tensor of shape {tensor.shape} as {shape}: {tensor.size} elements against {prod(shape)}"
        )
    if tensor.queue is not _place.queue or Tensor.__init__ is not _own_init:
        return _reshape(tensor, shape)
    made: Any = _made_as(tensor)
    made.buffer, made.dtype, made.shape, made._base = tensor.buffer, tensor.dtype, shape, tensor
    made.persistent, made.requires_grad, made.grad_fn = tensor.persistent, tensor.requires_grad, tensor.grad_fn
    return made


def storage_of(tensor: Tensor) -> Any:
    """Returns a tensor's memory; None of one that would take, or compute, some if it were asked."""
    return None if hasattr(type(tensor), "buffer") else tensor.buffer


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor whose memory a view shows; None of what is no view."""
    return getattr(tensor, "_base", None)


def read_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A tensor's elements on the host, as they are stored."""
    host = np.empty(nbytes(tensor), np.uint8)
    if not on_device(tensor):
        host[:] = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)
    elif host.size:
        transfer.read(tensor.queue, host, tensor.buffer)
    return host


def write_bytes(tensor: Tensor, host: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Overwrites a tensor with bytes that ``read_bytes`` returned for one of its shape and dtype. Waits for the device.

    Raises:
        ValueError: the number of bytes differs.
    """
    if host.size != nbytes(tensor):
        raise ValueError(f"{host.size} bytes for a {tensor.dtype} tensor of shape {tuple(tensor.shape)}")
    if not on_device(tensor):
        tensor.array[...] = host.view(tensor.array.dtype).reshape(tensor.array.shape)
    elif host.size:
        transfer.write(tensor.queue, tensor.buffer, np.ascontiguousarray(host))


def on_device(tensor: Tensor) -> bool:
    """Returns whether the tensor lives on an OpenCL device (netcl's "cpu" backend computes in numpy)."""
    return isinstance(tensor._backend, OpenCLBackend)


def is_floating(x: object) -> TypeGuard[Tensor]:
    """Returns whether something is a tensor of float32 or 16-bit numbers on an OpenCL device: what kernels of clamp's
    compute with."""
    return isinstance(x, Tensor) and x.dtype in STORAGE and on_device(x)


def require_same_queue(name: str, *tensors: Tensor) -> cl.CommandQueue:
    """The one queue all tensors live on.

    Raises:
        ValueError: they live on different queues or devices.
    """
    queue = tensors[0].queue
    for tensor in tensors[1:]:
        if tensor.queue is not queue and tensor.queue != queue:
            raise ValueError(
                f"{name}: the tensors are on different queues or devices "
                f"({_where(tensors[0])} and {_where(tensor)}); copy one, Tensor.from_host(queue, x.to_host())"
            )
    return queue


def _where(tensor: Tensor) -> str:
    device = getattr(tensor.queue, "device", None)
    return f"{device.name}, queue {tensor.queue.int_ptr:#x}" if device is not None else "numpy backend"


_LINK = "_model_param"  # attribute that netcl's optimizers leave


def is_weight(tensor: Tensor) -> bool:
    """Returns whether a tensor lives from one iteration to the next: a parameter, or a leaf that is trained."""
    return isinstance(tensor, Parameter) or is_trained(tensor)


def is_trained(tensor: Tensor) -> bool:
    """Returns whether a leaf wants a gradient: it requires one, or an optimizer holds it.

    netcl's engine gives a gradient to every leaf, and netcl's own ResNet trains plain tensors that never said that
    they require one. Its optimizers leave a link on every tensor they are given.
    """
    if tensor.requires_grad:
        return True
    return not isinstance(tensor, Parameter) and hasattr(tensor, _LINK) and not has_frozen_mark(tensor)


def is_linked(tensor: Tensor) -> bool:
    """Returns whether an optimizer of netcl's has been given a tensor, or its master."""
    return hasattr(tensor, _LINK)


is_frozen = is_frozen_param


def has_frozen_mark(tensor: Tensor) -> bool:
    """Returns whether netcl's mark is on a tensor that is not to be trained, whatever its ``requires_grad`` says."""
    return bool(getattr(tensor, "_frozen", False))


def mark_trained(tensor: Tensor) -> None:
    """Leaves the link that netcl's optimizers leave, on a tensor that an optimizer of the user's holds."""
    tensor._model_param = tensor
