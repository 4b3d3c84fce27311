"""netcl's tensors under AMP: values of the host on their way in and out, 16-bit tensors that netcl writes to, and word
of every write to a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.casting.arguments import tensors_in
from clamp.casting.regions import called_in
from clamp.opencl.device import require_answer, require_usable
from clamp.ops.arguments import saturated
from clamp.params import delivery, masters
from clamp.params.weight_cache import weight_cache
from clamp.patching.patch_registry import meets, replaces
from clamp.patching.wrap import Wrapper, warn_of_scaled, written, written_places
from clamp.scaling.dynamic_scale import settle_before_use, settle_late

Arguments = tuple[Any, ...]


Keywords = dict[str, Any]


def noting_writes(function: Any, wrapper: Wrapper) -> Wrapper:
    """``wrapper``, and for functions that write into an argument: what was derived from that one is stale after."""
    places = written_places(function)
    if not places:
        return wrapper

    def call(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
        targets = written(places, args, kwargs)
        if any(target is not None for target in targets):
            settle_late()  # a backward that is to be run again reads what its forward has read
        try:
            return wrapper(wrapped, instance, args, kwargs)
        finally:
            for target in targets:
                if target is not None:
                    masters.written(getattr(target, "buffer", target))

    return call


def in_place(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A netcl function that writes, in fp32, into tensors that it is given, or into their gradients.

    While it runs its 16-bit tensors show widened content, that of their masters if they have one; after, they hold the
    result in their own dtype.
    """
    args = tuple(list(x) if isinstance(x, Iterator) else x for x in args)
    given = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
    if not given:
        return wrapped(*args, **kwargs)
    given |= {id(tensor.grad): tensor.grad for tensor in list(given.values()) if tensor.grad is not None}
    try:
        with masters.showing_masters(given.values(), load=True):
            return called_in(None, wrapped, *args, **kwargs)
    finally:
        for tensor in given.values():
            if not bridge.is_in_parts(tensor) or tensor.is_whole:  # asked for its memory, it would take some
                weight_cache.drop_buffer(tensor.buffer)


def as_it_is(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Changes nothing; what a function writes to is noted all the same."""
    return wrapped(*args, **kwargs)


@replaces("netcl.amp.maybe_cast_tensor")
def keep_tensor(own: Any, tensor: Tensor) -> Tensor:
    """In place of netcl's own autocast, which would hand out 16-bit copies that no gradient reaches: clamp's ops cast
    what they read."""
    return tensor


@meets("netcl.core.tensor.Tensor.to_host")
def to_host(wrapped: Any, instance: Tensor, /) -> Any:
    """A tensor's values on the host; of bfloat16 as float32, not netcl's 16-bit words.

    A script that computes with what it reads, an accuracy say, would take the words for numbers.
    """
    _meets_host(instance, "read")
    host = wrapped()
    return bridge.from_words(host, "bfloat16") if instance.dtype == "bfloat16" and host.dtype == np.uint16 else host


@meets("netcl.core.tensor.Tensor.to_host_async")
def to_host_async(wrapped: Any, instance: Tensor, /) -> Any:
    """A tensor's values on the host, when they have come; those of bfloat16 have, as float32, not netcl's words."""
    _meets_host(instance, "read")
    host, event = wrapped()
    if instance.dtype != "bfloat16" or host.dtype != np.uint16:
        return host, event
    if event is not None:
        event.wait()
    return bridge.from_words(host, "bfloat16"), event


@meets("netcl.core.transfer.write_tensor")
def write_tensor(wrapped: Any, instance: None, /, tensor: Tensor, data: Any) -> None:
    """Writes values of the host into a tensor, as ``Tensor.write`` does."""
    _meets_host(tensor, "written")
    wrapped(tensor, data)


def _meets_host(tensor: Tensor, what: str) -> None:
    """Before a tensor is read to the host, or written from there: in a forked process its device has to do something at
    all. Says once for a loss scale that gradients are not the true ones yet."""
    if bridge.on_device(tensor):
        require_answer(tensor.queue)
        settle_before_use([bridge.storage_of(tensor)])
    if delivery.waiting():
        warn_of_scaled([tensor], f"{what} on the host")


@meets("netcl.core.tensor.Tensor.from_host")
def from_host(
    wrapped: Any, instance: None, /, queue: Any, data: Any, dtype: str | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """A tensor of host values; to bfloat16 numbers are rounded, where netcl would cut them to integer words."""
    if not bridge.has_tensors(queue) and isinstance(queue, cl.CommandQueue):
        require_usable(queue)
    if dtype == "bfloat16" and np.asarray(data).dtype != np.uint16:
        data = bridge.to_words(np.asarray(data).astype(np.float32), "bfloat16")
    if not (args or kwargs) and wrapped.__self__ is Tensor:
        made = bridge.from_host(queue, data, dtype or "float32")
        if made is not None:
            return made
    return wrapped(queue, data, dtype, *args, **kwargs)


@meets("netcl.core.tensor.Tensor.from_shape")
def from_shape(
    wrapped: Any, instance: None, /, queue: Any, shape: Any, dtype: str = "float32", pool: Any = None,
    backend: str | None = None, fill: Any = None,
) -> Tensor:  # fmt: skip
    """A new tensor filled with a number: a finite one stays finite, and in bfloat16 it is the number, not a word."""
    if isinstance(queue, cl.CommandQueue):
        require_usable(queue)
        if wrapped.__self__ is Tensor and pool is backend is fill is None and dtype in bridge.ITEMSIZE:
            return bridge.empty(queue, shape, dtype)
    if fill is not None and dtype in bridge.STORAGE and not isinstance(fill, np.uint16):
        fill = saturated(fill, dtype)
        fill = int(bridge.to_words(np.array([fill], np.float32), dtype)[0]) if dtype == "bfloat16" else fill
    return wrapped(queue, shape, dtype, pool, backend, fill)


@meets("netcl.ops.bf16_act.bf16_to_host")
def bf16_to_host(wrapped: Any, instance: None, /, t: Tensor) -> Any:
    """netcl's way to read bfloat16 as float32, which is what ``to_host`` gives already."""
    return t.to_host()


@meets("netcl.core.transfer.write", "netcl.core.transfer.copy", "netcl.core.transfer.fill", "netcl.core.transfer.read")
def transfer(wrapped: Any, instance: None, /, *args: Any, **kwargs: Any) -> Any:
    """netcl's copies and fills: what has become of the pass of a gradient that they read or write is heard before."""
    settle_before_use(x for x in (*args, *kwargs.values()) if isinstance(x, cl.MemoryObjectHolder | cl.SVM))
    return wrapped(*args, **kwargs)
