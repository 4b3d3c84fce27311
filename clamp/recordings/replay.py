"""Replays of a recording (capture.py makes them): the same launches again, on new inputs' memory if need be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import pyopencl as cl
from netcl.core.capabilities import get_device_capabilities
from netcl.runtime.capture import CapturedKernelLaunch, KernelCapture

from clamp import bridge
from clamp.bridge import Tensor, address_of
from clamp.opencl.host_steps import refuse, replaying
from clamp.opencl.launches import Launch, launches_are_watched
from clamp.params.weight_cache import weight_cache
from clamp.patching.patch_registry import meets
from clamp.recordings.capture import recording_of
from clamp.recordings.memory import Dependencies, dependencies_of, stale
from clamp.scaling.dynamic_scale import forget_late, settle_late

#: What is called with the buffers of these numbers; what does the same, if no buffer changes and nobody watches; and
#: what netcl does after it.
_Step: TypeAlias = tuple[Callable[..., Any], tuple[int, ...], Callable[[], Any] | None, Callable[[], Any] | None]


class ReplayPlan:
    """A recording's launches, with the places where input tensors are read.

    An input whose memory the pass also knows by another name (it is a parameter's, a batch norm's statistics) stays
    what it is: the launches do not say by which of the two names they meant it.

    Args:
        inputs: the tensors whose buffers are replaced in a replay.
        state: tensors that the pass knows besides its inputs. Parameters count without being named.
        moving: tensors that the pass made, which lie elsewhere in each replay.

    Raises:
        ValueError: an input that no launch reads.
    """

    def __init__(
        self,
        capture: KernelCapture,
        inputs: Sequence[Tensor],
        state: Iterable[Tensor] = (),
        moving: Sequence[Tensor] = (),
    ) -> None:
        recording = recording_of(capture)
        assert recording is not None
        self.capture = capture  # its launches keep all memory alive
        self._recording = recording
        self.dependencies = dependencies_of(capture)
        self._thread = threading.get_ident()
        self._inputs = [(tuple(x.shape), x.dtype, x.queue) for x in inputs]
        self._recorded = [*inputs, *moving]
        self._together = shared_memory(inputs)
        self._trained = [(index, x) for index, x in enumerate(inputs) if bridge.is_trained(x)]
        state = list(state)
        self._fixed = _fixed(inputs, self.dependencies, state)
        places = {address_of(x.buffer): index for index, x in reversed(list(enumerate([*inputs, *moving])))}
        fixed = {address_of(inputs[index].buffer) for index in self._fixed}
        places = {where: index for where, index in places.items() if where not in fixed}
        for where in places:
            self.dependencies.give_up(where)
        known = {address_of(x.buffer) for x in (*inputs, *state, *moving)}
        # Tensors that the launches use and nobody knows from where, as an iterator's.
        self.unknown_tensors = self.dependencies.unknown_tensors(known)
        # Launch by launch, numbers of its arguments, each with that of the input, or of what moves, that it is.
        self.places: list[dict[int, int]] = [
            {at: places[where] for at, arg in enumerate(launch.args) if (where := address_of(arg)) in places}
            for launch in capture._launches
        ]
        self._steps: list[_Step] = []  # made by the first replay, and whenever memory has moved
        self._moves: int | None = None  # until then
        read = {index for found in self.places for index in found.values()}
        for index in set(places.values()) & set(range(len(inputs))) - read:
            raise ValueError(
                f"inputs[{index}], of shape {self._inputs[index][0]}, is read by no recorded launch, so new data in it "
                f"would change nothing: leave it out, or compute with it on the device"
            )

    def misfit(self, inputs: Sequence[Tensor]) -> str:
        """Why a replay with these inputs would give other results than the pass itself, in words; empty if it fits.

        Args:
            inputs: as many as were recorded, of the same shapes, dtypes and queues.
        """
        for index, tensor in self._fixed.items():
            if address_of(inputs[index].buffer) != address_of(tensor.buffer):
                return (
                    f"inputs[{index}] was recorded in the memory of a tensor of shape {tuple(tensor.shape)} that the "
                    "pass reads besides, and is another now"
                )
        for index, tensor in self._trained:
            if inputs[index] is not tensor:
                return f"inputs[{index}] was recorded as a tensor that is trained, and gets its gradient as that one"
        pairs = [(x.buffer, inputs[first].buffer) for x, first in zip(inputs, self._together, strict=True)]
        if any(address_of(one) != address_of(other) for one, other in pairs if one is not other):
            return "inputs were recorded that share memory, and these do not"
        return self.dependencies.of_tensors()

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Returns whether a replay may use other tensors of the same shapes and dtypes.

        Raises:
            ValueError: there are more or fewer, or a shape, dtype or queue differs.
            RuntimeError: called in another thread than the recording's, whose kernels it uses, or while recording, or
                what the recording depends on has changed.
        """
        _refuse_elsewhere(self._thread)
        if len(inputs) != len(self._inputs):
            raise ValueError(f"the recording has {len(self._inputs)} inputs, got {len(inputs)}")
        for index, (x, (shape, dtype, queue)) in enumerate(zip(inputs, self._inputs, strict=True)):
            if tuple(x.shape) != shape or x.dtype != dtype or x.queue != queue:
                raise ValueError(
                    f"inputs[{index}] was recorded as {dtype} of shape {shape}, got {x.dtype} of shape "
                    f"{tuple(x.shape)}{'' if x.queue == queue else ' on another queue'}: record another graph for it"
                )
        if misfit := self.misfit(inputs) or self.dependencies.change():
            raise stale(misfit)

    def launch(self, inputs: Sequence[Tensor], moved: Sequence[Tensor] = ()) -> None:
        """Replays with inputs that fit, and with what lies elsewhere now."""
        moves = self._recording.rebind()
        if moves != self._moves:
            launches = zip(self.capture._launches, self.places, strict=True)
            self._steps = [_step_of(launch, found) for launch, found in launches]
            self._moves = moves
        now = [*inputs, *moved]
        buffers, watched = [x.buffer for x in now], launches_are_watched()

        def run_all(steps: Sequence[_Step]) -> None:
            for run, indices, unchanged, sync in steps:
                if unchanged is None or watched:
                    run(*map(buffers.__getitem__, indices))
                else:
                    unchanged()
                if sync is not None:
                    sync()

        _run(self._recorded, now, lambda begin, end: run_all(self._steps[begin:end]), lambda: run_all(self._steps))


def shared_memory(inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns which inputs share memory: for each, the number of the first one that lies where it does."""
    first: dict[Any, int] = {}
    return tuple([first.setdefault(address_of(x.buffer), index) for index, x in enumerate(inputs)])


def _fixed(inputs: Sequence[Tensor], known: Dependencies, state: Sequence[Tensor]) -> dict[int, Tensor]:
    """The inputs, by number, whose memory is also that of a tensor that the pass knows, which is the value."""
    named = {address_of(tensor.buffer): tensor for tensor in state if bridge.on_device(tensor)}
    fixed = {}
    for index, x in enumerate(inputs):
        where = address_of(x.buffer)
        value = named[where] if where in named else known.weight_at(where)
        if value is not None:
            fixed[index] = value
    return fixed


def _step_of(launch: CapturedKernelLaunch, found: Mapping[int, int]) -> _Step:
    """A launch, or what stands in its place, ready to be repeated.

    Args:
        found: by the numbers of its arguments, those of the buffers that a replay puts there.
    """
    run: Callable[..., None] = partial(_call, launch, tuple(found))
    unchanged: Callable[[], Any] | None = None
    if not found:
        unchanged = partial(launch.kernel, launch.queue, launch.global_size, launch.local_size, *launch.args)
    if isinstance(launch.kernel, cl.Kernel):
        with suppress(cl.Error):  # a driver that makes no copies of kernels: one is given all of its arguments again
            own = Launch.like(launch.kernel, launch.global_size, launch.local_size, launch.args, found)
            run, unchanged = partial(own, launch.queue), own.unchanged(launch.queue)
    # What netcl does after each node on this device, because the driver needs it.
    mode = "none" if launch.queue is None else get_device_capabilities(launch.queue).inter_kernel_sync
    sync = {"flush": getattr(launch.queue, "flush", None), "finish": getattr(launch.queue, "finish", None)}.get(mode)
    return run, tuple(found.values()), unchanged, sync


def _call(launch: CapturedKernelLaunch, places: Sequence[int], *buffers: Any) -> None:
    args = list(launch.args)
    for place, buffer in zip(places, buffers, strict=True):
        args[place] = buffer
    launch.kernel(launch.queue, launch.global_size, launch.local_size, *args)


@meets("netcl.runtime.capture.KernelCapture.replay")
def replay(wrapped: Any, instance: KernelCapture, /, rebind: Any = None) -> None:
    """``KernelCapture.replay``, whose argument ``rebind`` netcl ignores.

    Raises:
        RuntimeError: as of ``ReplayPlan.check``.
    """
    if rebind is not None:
        raise TypeError(
            "netcl's replay ignores `rebind`: write new data into the recorded tensors, or use CompiledGraph"
        )
    if recording_of(instance) is None:
        wrapped()
        weight_cache.clear()
    else:
        _replay(instance, {})


@meets("netcl.runtime.capture.KernelCapture.replay_with_new_buffers")
def replay_with_new_buffers(wrapped: Any, instance: KernelCapture, /, buffer_map: Mapping[int, Any]) -> None:
    """``KernelCapture.replay_with_new_buffers``, with SVM memory by its address, and no name that means nothing.

    Raises:
        ValueError: a buffer that no launch has.
        RuntimeError: as of ``ReplayPlan.check``.
    """
    if not instance.is_finalized:
        raise RuntimeError("Cannot replay before capture is finalized")
    _replay(instance, buffer_map)


def _replay(capture: KernelCapture, buffers: Mapping[int, Any]) -> None:
    """Replays a capture with other memory in place of that at some addresses."""
    recording = recording_of(capture)
    if recording is not None:
        _refuse_elsewhere(capture._launches.thread)
        if change := dependencies_of(capture).change():
            raise stale(change)
        recording.rebind()
    launches = list(capture._launches)
    found = (address_of(arg) for launch in launches for arg in launch.args) if buffers else ()
    known = {where[1] for where in found if where is not None}
    if missing := [hex(pointer) for pointer in buffers if pointer not in known]:
        raise ValueError(f"no recorded launch has a buffer at {', '.join(missing)}")

    def run(begin: int, end: int) -> None:
        for launch in launches[begin:end]:
            args = launch.args
            if buffers:
                args = tuple([buffers.get(where[1], arg) if (where := address_of(arg)) else arg for arg in args])
            launch.kernel(launch.queue, launch.global_size, launch.local_size, *args)

    _run([], [], run, partial(run, 0, len(launches)))
    weight_cache.clear()


def _refuse_elsewhere(thread: int) -> None:
    """Raises RuntimeError for a replay while something is recorded, or in another thread than its recording's."""
    refuse("A recording was replayed", "Replay it outside, or call the model itself here.")
    if threading.get_ident() != thread:
        raise RuntimeError("a recording replays in the thread that made it, whose kernels it uses: record it here")


def _run(
    recorded: Sequence[Tensor], now: Sequence[Tensor], repeat: Callable[[int, int], None], run: Callable[[], None]
) -> None:
    """A replay, with the tensors that it was recorded with and those in their place; ``repeat``: runs a part anew."""
    try:
        with replaying(recorded, now, repeat):
            run()
            settle_late()
    except BaseException:
        forget_late()  # later there is nothing to repeat
        raise
