"""Replays of a recording (capture.py makes them): the same launches again, on new inputs' memory if need be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from netcl.core.capabilities import get_device_capabilities
from netcl.runtime.capture import KernelCapture

from clamp.bridge import Tensor
from clamp.cache import weights
from clamp.patching.capture import address_of
from clamp.recording import refuse

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class Plan:
    """A recording's launches, with the places where input tensors are read.

    Args:
        capture: what was recorded.
        inputs: the tensors whose buffers are replaced in a replay.

    Raises:
        ValueError: an input that no launch reads.
    """

    def __init__(self, capture: KernelCapture, inputs: Sequence[Tensor]) -> None:
        self._capture = capture  # its launches keep all memory alive
        self._thread = threading.get_ident()
        self._inputs = [(tuple(x.shape), x.dtype, x.queue) for x in inputs]
        places = {address_of(x.buffer): index for index, x in enumerate(inputs)}
        self._steps = []
        read: set[int] = set()
        for launch in capture._launches:
            found = [(at, places[where]) for at, arg in enumerate(launch.args) if (where := address_of(arg)) in places]
            read.update(index for _, index in found)
            sync = _sync_of(launch.queue)
            self._steps.append(
                (launch.kernel, launch.queue, launch.global_size, launch.local_size, launch.args, found, sync)
            )
        for index in set(places.values()) - read:
            raise ValueError(
                f"inputs[{index}], of shape {self._inputs[index][0]}, is read by no recorded launch, so new data in it "
                f"would change nothing: leave it out, or compute with it on the device"
            )

    def run(self, inputs: Sequence[Tensor]) -> None:
        """Replays with other tensors of the same shapes and dtypes.

        Raises:
            ValueError: there are more or fewer, or a shape, dtype or queue differs.
            RuntimeError: called in another thread than the recording's, whose kernels it uses, or while recording.
        """
        refuse("A recording was replayed", "Replay it outside, or call the model itself here.")
        self._check(inputs)
        buffers = [x.buffer for x in inputs]
        for kernel, queue, global_size, local_size, args, found, sync in self._steps:
            if found:
                args = list(args)
                for at, index in found:
                    args[at] = buffers[index]
            kernel(queue, global_size, local_size, *args)
            if sync is not None:
                sync()

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a recording replays in the thread that made it, whose kernels it uses: record it here")
        if len(inputs) != len(self._inputs):
            raise ValueError(f"the recording has {len(self._inputs)} inputs, got {len(inputs)}")
        for index, (x, (shape, dtype, queue)) in enumerate(zip(inputs, self._inputs, strict=True)):
            if tuple(x.shape) != shape or x.dtype != dtype or x.queue != queue:
                raise ValueError(
                    f"inputs[{index}] was recorded as {dtype} of shape {shape}, got {x.dtype} of shape "
                    f"{tuple(x.shape)}{'' if x.queue == queue else ' on another queue'}: record another graph for it"
                )


def _sync_of(queue: Any) -> Callable[[], Any] | None:
    """What netcl does after each node on this device, because the driver needs it."""
    mode = "none" if queue is None else get_device_capabilities(queue).inter_kernel_sync
    return {"flush": getattr(queue, "flush", None), "finish": getattr(queue, "finish", None)}.get(mode)


def replay(wrapped: Any, instance: KernelCapture, args: Arguments, kwargs: Keywords) -> None:
    """``KernelCapture.replay``, whose argument ``rebind`` netcl ignores."""
    if (args and args[0] is not None) or kwargs.get("rebind") is not None:
        raise TypeError(
            "netcl's replay ignores `rebind`: write new data into the recorded tensors, or use CompiledGraph"
        )
    wrapped()
    weights.clear()


def replay_with_new_buffers(wrapped: Any, instance: KernelCapture, args: Arguments, kwargs: Keywords) -> None:
    """``KernelCapture.replay_with_new_buffers``, with SVM memory by its address, and no name that means nothing.

    Raises:
        ValueError: a buffer that no launch has.
    """
    buffers: Mapping[int, Any] = args[0] if args else kwargs["buffer_map"]
    known = {where[1] for launch in instance._launches for arg in launch.args if (where := address_of(arg))}
    if missing := [hex(pointer) for pointer in buffers if pointer not in known]:
        raise ValueError(f"no recorded launch has a buffer at {', '.join(missing)}")
    if not instance.is_finalized:
        raise RuntimeError("Cannot replay before capture is finalized")
    for launch in instance._launches:
        new = [buffers.get(where[1], arg) if (where := address_of(arg)) else arg for arg in launch.args]
        launch.kernel(launch.queue, launch.global_size, launch.local_size, *new)
    weights.clear()
