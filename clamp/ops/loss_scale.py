"""The state of a loss scale on the device: 32 bytes and the kernels that read and move them.

clamp/scaling/loss_scale.py says what the state means, kernels/loss_scale.cl draws it. A gradient keeps the
``AppliedScale`` that it was multiplied by: when the scale moves while somebody still holds one, its value is set aside
for the holder.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import require_answer
from clamp.opencl.host_steps import unrecorded
from clamp.opencl.program import Kernel, Prepared
from clamp.ops.elementwise import elementwise
from clamp.ops.launch import parts_of, plan_rows
from clamp.ops.multi_tensor import unscale_

ASSIGN = Kernel("loss_scale.cl", "assign")
ADJUST = Kernel("loss_scale.cl", "adjust")
UPDATE = Kernel("loss_scale.cl", "update")
MULTIPLY = Kernel("loss_scale.cl", "multiply")

_multiplications = Prepared(64)
_moves = Prepared(64)

Words: TypeAlias = np.ndarray[Any, np.dtype[np.void]]

#: What belongs together on a queue (unscaling and the verdict on it, multiplying and the scale that is kept for it) is
#: enqueued under this, so that threads that share a loss scale do not come between. One lock for all loss scales: a
#: pass may divide by several.
scale_lock = threading.RLock()
_fresh_lock = threading.RLock()  # under which nobody waits; a signal handler may read a scale where one is read

# As in loss_scale.cl.
_WORDS = np.dtype(
    [
        ("multiplier", np.float32),
        ("found", np.int32),
        ("scale", np.float32),
        ("growth_tracker", np.int32),
        ("overflow", np.uint32),
        ("bad_steps", np.int32),
        ("event", np.uint32),
        ("nans", np.uint32),
    ]
)


class ScaleState(NamedTuple):
    """A loss scale at one moment, as read from the device in one piece."""

    scale: float  # the factor on the loss
    growth_tracker: int  # clean steps since the last overflow or growth of the scale
    overflow: int  # bits of the optimizers whose gradients have overflowed since their last step
    bad_steps: int  # overflowed steps in a row that have not lowered the scale yet
    nans: int = 0  # as overflow, of those that have met a nan


class AppliedScale:
    """A loss scale as it was when gradients were multiplied by it: the live one, or a copy once that has moved.

    Made by ``DeviceState.applied``; everything multiplied between two moves of a scale shares one.
    """

    def __init__(self, state: DeviceState) -> None:
        self.state = state  # of the loss scale that this is a value of
        self._copy: cl.Buffer | None = None  # the state before it moved

    def now(self) -> AppliedScale:
        """The same loss scale as it is now."""
        return self.state.applied()

    def multiply(self, x: Tensor, out_dtype: str) -> Tensor:
        """``x * scale`` in ``out_dtype``, of x's shape; both float32, float16 or bfloat16."""
        with scale_lock:
            state, y = self.buffer(x.queue), bridge.empty(x.queue, x.shape, out_dtype)
            if size := x.size:
                key = (x.context.int_ptr, x.dtype, out_dtype, size)
                launch = _multiplications.known.get(key)
                if launch is None:
                    types = {"X_T": bridge.STORAGE[x.dtype], "Y_T": bridge.STORAGE[out_dtype]}
                    launch = _multiplications.keep(key, MULTIPLY.bind(x.queue, (size,), (1,), ..., ..., ..., **types))
                launch(x.queue, x.buffer, y.buffer, state)
            return y

    def divide(self, x: Tensor) -> Tensor:
        """``x / scale`` in float32, elsewhere. Whether anything is inf or nan is noted nowhere."""
        with scale_lock:
            buffer = self.keep(x.queue)
            y = bridge.empty(x.queue, x.shape, "float32")
            unscale_([x], [y], buffer)
            return y

    def buffer(self, queue: cl.CommandQueue) -> cl.Buffer:
        """A state whose multiplier and scale are these. Hold ``scale_lock`` until what reads it is enqueued."""
        return self._copy or self.state.buffer(queue)

    def keep(self, queue: cl.CommandQueue) -> cl.Buffer:
        """The state, in a buffer where it stays when the scale moves."""
        if self._copy is None:
            live = self.state.buffer(queue)
            self._copy = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, _WORDS.itemsize)
            cl.enqueue_copy(queue, self._copy, live)
        return self._copy

    def read(self) -> float:
        """The value; waits for the device."""
        return float(self.state.words(self._copy)["scale"][0])


class DeviceState:
    """A loss scale's state: on the host until a queue is known, from then on its device.

    Args:
        scale: the first scale, a float32.
    """

    def __init__(self, scale: float) -> None:
        self._initial = np.zeros(1, _WORDS)
        _assign(self._initial, {"scale": scale})
        self._home: tuple[cl.CommandQueue, cl.Buffer] | None = None
        self._applied: weakref.ref[AppliedScale] | None = None
        self.seen = float(self._initial["scale"][0])  # the scale when it was last read or set
        self.fresh: ScaleState | None = None  # what was read, as long as nothing moves it
        self._moves = 0  # how often something began to, and did
        self.is_told_of = False  # whether a user has been told that gradients are multiplied by it

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
        with scale_lock:
            if self._home is None:
                flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
                self._home = queue, cl.Buffer(queue.context, flags, hostbuf=self._initial)
            return self._home

    def applied(self) -> AppliedScale:
        """The scale as it is now, for as long as it stays so, and for whoever holds it also after."""
        with scale_lock:
            applied = self._applied() if self._applied is not None else None
            if applied is None:
                applied = AppliedScale(self)
                self._applied = weakref.ref(applied)
            return applied

    def _about_to_move(self) -> None:
        applied = self._applied() if self._applied is not None else None
        if applied is not None and self._home is not None:
            with unrecorded():
                applied.keep(self._home[0])
        self._applied = None

    def _moves_on(self) -> None:
        """Notes that a move begins, or that it is launched."""
        with _fresh_lock:
            self.fresh = None
            self._moves += 1

    def launch(self, kernel: Kernel, *scalars: float) -> None:
        """Runs ``ASSIGN``, ``ADJUST`` or ``UPDATE``. Before any tensor was scaled there is nothing to decide."""
        if self._home is not None:
            queue, buffer = self._home
            with scale_lock:
                self._moves_on()
                try:
                    if kernel is not ASSIGN:
                        self._about_to_move()
                    key = (queue.context.int_ptr, kernel.name, *scalars)
                    launch = _moves.known.get(key) or _moves.keep(key, kernel.bind(queue, (1,), (1,), ..., *scalars))
                    launch(queue, buffer)
                finally:
                    self._moves_on()

    def read(self) -> ScaleState:
        """The state now: a blocking read of 32 bytes.

        It waits for no other thread: one that repeats its backward has ``scale_lock``, and may wait for this one.
        """
        moves = self._moves
        _, _, self.seen, growth_tracker, overflow, bad_steps, _, nans = self.words()[0].item()
        state = ScaleState(self.seen, growth_tracker, overflow, bad_steps, nans)
        with _fresh_lock:
            if moves == self._moves:  # else something has begun to move it meanwhile, or has moved it
                self.fresh = state
        return state

    def take_found(self) -> bool:
        """Returns whether ``unscale_`` or ``check_`` have met an inf or nan since the last call. Waits for the
        device."""
        found = bool(self.words()["found"][0])
        if found:
            self.write(found=0)
        return found

    def write(self, **fields: float) -> None:
        """Sets some fields of the state, and what follows from them. Waits for the device."""
        with scale_lock:
            self._moves_on()
            try:
                words = self.words()
                _assign(words, fields)
                self.seen = float(words["scale"][0])
                if self._home is None:
                    self._initial = words
                else:
                    if "scale" in fields:
                        self._about_to_move()
                    queue, buffer = self._home
                    cl.enqueue_copy(queue, buffer, words)
            finally:
                self._moves_on()

    def words(self, kept: cl.Buffer | None = None) -> Words:
        """The state as it is now, or as it is in a buffer in which it was kept. Waits for the device."""
        words = self._initial.copy()
        if self._home is not None:
            queue, buffer = self._home
            require_answer(queue)
            cl.enqueue_copy(queue, words, kept or buffer)
        return words


def _assign(words: Words, fields: Mapping[str, float]) -> None:
    for name, value in fields.items():
        words[name] = value
    with np.errstate(over="ignore"):  # of a scale below the normal float32: then every gradient overflows
        words["multiplier"] = 1 / words["scale"].astype(np.float64)


# ---------------------------------------------------------------------------------------------- of one layer

# By which power of two a layer's gradient is multiplied before it is rounded to 16 bits. After Zhao et al., "Adaptive
# Loss Scaling for Mixed Precision Training" (2019, arXiv:1910.12385), who find a scale for each layer in each step.
# Theirs is found from the statistics of a layer's weights and gradients, and goes on to the next layer; this one from
# the largest magnitude of the gradient itself, and is taken off again behind the layer.

LARGEST = Kernel("layer_scale.cl", "largest")
FIT = Kernel("layer_scale.cl", "fit")


def fitted(grad: Tensor, dtype: str, scale: AppliedScale) -> tuple[Tensor, Tensor]:
    """A gradient in 16 bits, multiplied by the power of two with which it fits best, and that power's reciprocal.

    Enqueues three launches, and does not wait: what the power is only the device knows.

    Args:
        grad: float32, float16 or bfloat16, any shape.
        dtype: ``"float16"`` or ``"bfloat16"``.
        scale: the loss scale of the pass, which says how much room there is above (kernels/layer_scale.cl).

    Returns:
        The gradient in ``dtype``, of the same shape; a float32, of shape (1,).
    """
    queue, n = grad.queue, grad.size
    count, span = parts_of(queue, 1, n)
    plan = plan_rows(queue, count, min(n, span))
    parts = bridge.empty(queue, (count,), "float32")
    up, down = bridge.empty(queue, (1,), "float32"), bridge.empty(queue, (1,), "float32")
    macros = {"X_T": bridge.STORAGE[grad.dtype], **plan.macros}  # of both: they are in one program
    LARGEST(queue, *plan.sizes, grad, parts, n, span, count, plan.each, **macros)
    with scale_lock:
        FIT(queue, (1,), (1,), parts, up, down, scale.buffer(queue), count, **macros)
    return elementwise("mul", dtype, grad, up), down


def taken_off(grad: Tensor, down: Tensor) -> Tensor:
    """A gradient that came of a ``fitted`` one, in float32, without that one's power of two."""
    return elementwise("mul", "float32", grad, down)
