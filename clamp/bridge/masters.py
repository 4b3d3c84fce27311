"""The links between 16-bit parameters and their fp32 masters, and what netcl's optimizers make of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pyopencl as cl

from clamp.bridge.tensors import Parameter, Tensor, alias, is_frozen, mark_trained
from clamp.interrupts import contextmanager, holding, of_threads


def model_parameter(param: Tensor) -> Tensor:
    """The tensor that the model reads and backward gives a gradient to; for an fp32 parameter, itself.

    For a 16-bit parameter netcl's optimizers update an fp32 master instead and keep a link to the model's.
    """
    return getattr(param, "_model_param", param)


def link_master(master: Tensor, model: Tensor) -> None:
    """Makes an fp32 tensor the master of a 16-bit parameter, with the link that netcl's optimizers know."""
    model._master = master
    master._model_param = model
    if not isinstance(model, Parameter):
        mark_trained(model)


def master_of(model: Tensor) -> Tensor | None:
    """The fp32 master of a 16-bit parameter, None if it has none."""
    return getattr(model, "_master", None)


def is_in_parts(master: Tensor) -> bool:
    """Returns whether a master consists of 16-bit parts, the parameter among them, and has no memory of its own."""
    return getattr(type(master), "is_in_parts", False)


def freeze_like(master: Tensor, model: Tensor) -> None:
    """Puts netcl's mark on a master, or takes it off, as its 16-bit parameter is frozen or not."""
    master._frozen = is_frozen(model)


def gradient_dtype(tensor: Tensor) -> str:
    """Dtype of a tensor's gradient: its own, unless ``set_gradient_dtype`` chose another."""
    return getattr(tensor, "_gradient_dtype", None) or str(tensor.dtype)


def set_gradient_dtype(tensor: Tensor, dtype: str | None) -> None:
    """Lets backward deliver a parameter's gradient in another dtype than the parameter's; None: in its own again."""
    tensor._gradient_dtype = dtype


def finish_if_shared(queue: cl.CommandQueue, memory: Any) -> None:
    """Waits for the queue's launches before memory is let go of that they do not keep: shared virtual memory."""
    if isinstance(memory, cl.SVM):
        queue.finish()


def give_storage(tensor: Tensor, source: Tensor) -> None:
    """Puts another tensor's storage and dtype under ``tensor``; ``source`` must not be used any more."""
    tensor.wait()
    finish_if_shared(tensor.queue, tensor.buffer)
    handle, source.pool_handle = source.pool_handle, None  # of two owners, where Ctrl-C comes, both would give it back
    vars(tensor).update(buffer=source.buffer, dtype=source.dtype, pool_handle=handle)


def take_storage(tensor: Tensor) -> Tensor:
    """A new tensor that owns the storage of ``tensor``, which needs another one then."""
    tensor.wait()
    taken = alias(tensor)
    taken.persistent, taken.host_ref, tensor.host_ref = tensor.persistent, tensor.host_ref, None
    taken.pool_handle, tensor.pool_handle = tensor.pool_handle, None  # at once, as above
    return taken


@contextmanager
def showing(tensor: Tensor, other: Tensor) -> Iterator[None]:
    """Inside the ``with``, ``tensor`` reads from and writes to another one's storage, in its dtype; what other storage
    it is given there is the other one's. All that in this thread: others, which may compute with it, do not notice."""
    buffer = other.buffer  # which may be made of the tensor's own
    shown = {"buffer": buffer, "dtype": other.dtype}
    try:
        _count_shown(tensor, 1)
        with holding(_thread, "shown", {**_thread.shown, id(tensor): shown}):
            yield
        if shown["buffer"] is not buffer:
            other.buffer = shown["buffer"]
    finally:
        _count_shown(tensor, -1)


class _Showing(threading.local):
    """What this thread sees of tensors, by their ids, in place of what they have."""

    def __init__(self) -> None:
        self.shown: dict[int, dict[str, Any]] = {}


_thread = of_threads(_Showing())
_lock = threading.RLock()
_shown: dict[int, int] = {}  # in how many places some thread sees another tensor in place of one, by id


def _count_shown(tensor: Tensor, more: int) -> None:
    with _lock:
        kind, count = type(tensor), _shown.pop(id(tensor), 0) + more
        own = kind.__base__ if hasattr(kind, "is_by_thread") else kind
        if count > 0:
            _shown[id(tensor)] = count
        tensor.__class__ = _by_thread(own) if count > 0 else own


@cache
def _by_thread(kind: type) -> type:
    """A class of tensors whose memory and dtype are those of what is shown in a thread in their place."""

    def attribute(name: str) -> property:
        def read(tensor: Tensor) -> Any:
            return _thread.shown.get(id(tensor), vars(tensor))[name]

        def write(tensor: Tensor, value: Any) -> None:
            _thread.shown.get(id(tensor), vars(tensor))[name] = value

        return property(read, write)

    members = {"buffer": attribute("buffer"), "dtype": attribute("dtype"), "is_by_thread": True}
    return type(kind.__name__, (kind,), members)


@contextmanager
def without_write_back(masters: Sequence[Tensor]) -> Iterator[None]:
    """Inside the ``with``, netcl's optimizers do not know what model parameters these are the masters of.

    Their own way back from the master is missing (Momentum), goes through the host, or takes bfloat16 for float16.
    """
    models = [master._model_param for master in masters]
    try:
        for master in masters:
            master._model_param = master
        yield
    finally:
        for master, model in zip(masters, models, strict=True):
            master._model_param = model
