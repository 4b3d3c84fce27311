"""The state of a loss scale on the device: 32 bytes and the kernels that read and move them.

clamp/scaler.py says what the state means, kernels/loss_scale.cl draws it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.program import get_kernel

Words: TypeAlias = np.ndarray[Any, np.dtype[np.void]]

# As in loss_scale.cl.
_WORDS = np.dtype(
    [
        ("multiplier", np.float32),
        ("found_inf", np.int32),
        ("scale", np.float32),
        ("growth_tracker", np.int32),
        ("overflow", np.uint32),
        ("bad_steps", np.int32),
        ("event", np.uint32),
        ("unused", np.uint32),
    ]
)


class ScaleState(NamedTuple):
    """A loss scale at one moment, as read from the device in one piece.

    Attributes:
        scale: the factor on the loss.
        growth_tracker: clean steps since the last overflow or growth of the scale.
        overflow: bits of the optimizers whose gradients have overflowed since their last step.
        bad_steps: overflowed steps in a row that have not lowered the scale yet.
    """

    scale: float
    growth_tracker: int
    overflow: int
    bad_steps: int


class DeviceState:
    """A loss scale's state: on the host until a queue is known, from then on its device.

    Args:
        scale: the first scale, a float32.
    """

    def __init__(self, scale: float) -> None:
        self._initial = np.zeros(1, _WORDS)
        _assign(self._initial, {"scale": scale})
        self._home: tuple[cl.CommandQueue, cl.Buffer] | None = None
        self._lock = threading.Lock()

    def buffer(self, queue: cl.CommandQueue) -> cl.Buffer:
        """The state on the queue's device, made on the first call.

        Raises:
            ValueError: the state is on another queue.
            TypeError: the queue is that of netcl's numpy backend.
        """
        home, buffer = self._home or self._create(queue)
        if home != queue:
            raise ValueError(
                f"this loss scale is used on another queue (of {home.device.name}) than that of the tensor "
                f"({getattr(queue, 'device', queue)}): each queue needs a loss scale of its own"
            )
        return buffer

    def _create(self, queue: cl.CommandQueue) -> tuple[cl.CommandQueue, cl.Buffer]:
        if not isinstance(queue, cl.CommandQueue):
            raise TypeError("loss scaling needs tensors on an OpenCL device, not on netcl's numpy backend")
        with self._lock:
            if self._home is None:
                flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
                self._home = queue, cl.Buffer(queue.context, flags, hostbuf=self._initial)
            return self._home

    def multiply(self, x: Tensor, out_dtype: str) -> Tensor:
        """``x * scale`` in ``out_dtype``, of x's shape; both float32, float16 or bfloat16."""
        state = self.buffer(x.queue)
        y = bridge.empty(x.queue, x.shape, out_dtype)
        if x.size:
            types = {"X_T": bridge.STORAGE[x.dtype], "Y_T": bridge.STORAGE[out_dtype]}
            kernel = get_kernel(x.queue, "loss_scale.cl", "multiply", "ppp", **types)
            kernel(x.queue, (x.size,), (1,), x.buffer, y.buffer, state)
        return y

    def launch(self, kernel: str, args: str, *scalars: float) -> None:
        """Runs ``record``, ``adjust`` or ``update``. Before any tensor was scaled there is nothing to decide."""
        if self._home is not None:
            queue, buffer = self._home
            get_kernel(queue, "loss_scale.cl", kernel, "p" + args)(queue, (1,), (1,), buffer, *scalars)

    def read(self) -> ScaleState:
        """The state now: a blocking read of 32 bytes."""
        words = self._words()[0]
        return ScaleState(
            float(words["scale"]), int(words["growth_tracker"]), int(words["overflow"]), int(words["bad_steps"])
        )

    def write(self, **fields: float) -> None:
        """Sets some fields of the state, and what follows from them. Waits for the device."""
        words = self._words()
        _assign(words, fields)
        if self._home is None:
            self._initial = words
        else:
            queue, buffer = self._home
            cl.enqueue_copy(queue, buffer, words)

    def _words(self) -> Words:
        words = self._initial.copy()
        if self._home is not None:
            queue, buffer = self._home
            cl.enqueue_copy(queue, words, buffer)
        return words


def _assign(words: Words, fields: Mapping[str, float]) -> None:
    for name, value in fields.items():
        words[name] = value
    with np.errstate(over="ignore"):  # of a scale below the normal float32: then every gradient overflows
        words["multiplier"] = 1 / words["scale"].astype(np.float64)
