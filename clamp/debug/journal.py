"""The ops of a step that is run only to be looked at, measured as they really went.

In a recording, whose memory lives on anyway, measuring is a part of what is recorded: every replay can be asked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.results import Observer
from clamp.debug.callsite import NOWHERE, here
from clamp.debug.float32_reference import call_now
from clamp.debug.step_graph import BACKWARD, FORWARD, Frame, Trace, Value
from clamp.opencl.host_steps import host_step, recorder, unrecorded
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.scaled_loss import is_scaled

_SHARE = 0.25  # of a device's memory that may be held


class Journal(Observer):
    """An observer that keeps the ops of a rehearsed step (`clamp.debug.dry_run`), of the thread that makes it.

    Beyond a quarter of the device's memory, tensors are measured, and let go, before the step is over.

    Args:
        only_training: whether ops without a graph, of a validation, say, are left out.
        histogram: whether histograms are measured, too.
        at_backward: whether a step is measured when a backward ends, before anybody writes to its gradients.
        calls: whether the calls are kept, too, with all arguments, so that they can be made again.
    """

    def __init__(
        self, *, only_training: bool = True, histogram: bool = False, at_backward: bool = False, calls: bool = False
    ) -> None:
        self._only_training, self._histogram = only_training, histogram
        self._at_backward, self._calls = at_backward, calls
        self._thread = threading.get_ident()
        self._frames: list[Frame] = []
        self._values: dict[int, tuple[weakref.ref[Tensor], Value]] = {}  # by the id of a tensor
        self._held = 0
        self._scaler: LossScale | None = None
        self._measured: list[Callable[[], None]] = []  # in recordings: reads what has been measured

    def trace(self) -> Trace:
        """What has been seen, measured; waits for the device."""
        for read in self._measured:
            read()
        if not self._measured:
            self._measure()
        return Trace(self._frames, scaler=self._scaler)

    # ------------------------------------------------------------------------------------------ what ops tell

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Frame | None:
        if not self._is_ours() or (self._only_training and (not isinstance(made, Node) or bridge.is_leaf(made))):
            return None
        read = [self._value(parent.value) for parent in parents if isinstance(parent.value, Tensor)]
        op = getattr(made, "op_name", None) or "op"
        frame = Frame(op, FORWARD, here(), read, [], call=call_now() if self._calls else None)
        self._give(frame, [made.value])
        self._keep_within_limit(made.value)
        return frame

    def gradients(
        self, token: Frame, grad: Tensor, grads: Sequence[Tensor | None], again: Callable[[Tensor], Any]
    ) -> None:
        frame = Frame(token.op, BACKWARD, token.place, [self._value(grad)], [], token.inputs, token, again=again)
        self._give(frame, [x for x in grads if x is not None])
        self._keep_within_limit(grad)

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        if self._is_ours():
            read = [self._value(first), self._value(second)]
            self._give(Frame("sum of gradients", BACKWARD, NOWHERE, read, []), [made])

    def backward_ended(self, loss: Node) -> None:
        if not self._is_ours():
            return
        scaled = next((node for node in bridge.graph(loss) if is_scaled(node)), None)
        self._scaler = self._scaler if scaled is None else scaled.loss_scale
        if recorder() is not None:
            self._measure_in_every_replay()
        elif self._at_backward:
            self._measure()

    # ------------------------------------------------------------------------------------------ keeping

    def _is_ours(self) -> bool:
        return threading.get_ident() == self._thread

    def _value(self, tensor: Tensor) -> Value:
        ref, value = self._values.get(id(tensor), (None, None))
        if ref is None or value is None or ref() is not tensor:
            value = Value.of(tensor)
            self._values[id(tensor)] = weakref.ref(tensor), value
            self._held += bridge.nbytes(tensor)
        return value

    def _give(self, frame: Frame, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            value = self._value(tensor)
            if value.made_by is None:  # netcl's add hands on the gradient that it was given
                value.made_by = frame
            frame.outputs.append(value)
        self._frames.append(frame)

    def _keep_within_limit(self, tensor: Tensor) -> None:
        if recorder() is not None or not bridge.on_device(tensor):
            return
        if self._held > _SHARE * tensor.queue.device.global_mem_size:
            self._measure()
            self._held = 0
            Trace(self._frames).let_go()

    # ------------------------------------------------------------------------------------------ measuring

    def _measure(self) -> None:
        with unrecorded():
            Trace(self._frames).measuring(histogram=self._histogram)()

    def _measure_in_every_replay(self) -> None:
        read, scaler = Trace(self._frames).measuring(histogram=self._histogram), self._scaler
        frames, self._frames = self._frames, []

        def replayed() -> None:
            self._scaler = scaler
            self._frames = [*self._frames, *frames]
            self._measured = [*self._measured, read]

        host_step(replayed)
