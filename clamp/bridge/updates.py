"""The steps of netcl's optimizers: what they compute for each parameter, and where they keep their state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyopencl as cl
from netcl.core import transfer
from netcl.optim import SGD, Adam, AdamW, Momentum, adamw

from clamp.bridge.masters import model_parameter
from clamp.bridge.optimizers import fused_state, steps_as_one
from clamp.bridge.tensors import Tensor, is_frozen

Buffers: TypeAlias = list[Any]


@dataclass(frozen=True)
class Update:
    """The next step of an optimizer.

    Attributes:
        rule: what is computed, by its name in kernels/optimizer_step.cl.
        numbers: of the rule, of the kernel's types.
        kept: what holds the state; the same objects as long as the state lies where it lay.
        states: makes the buffers of the state, for each kind one a parameter.
        counted: the optimizer's count of steps after it; None if it keeps none.
    """

    rule: str
    numbers: tuple[np.generic, ...]
    kept: Buffers
    states: Callable[[], list[Buffers]]
    counted: int | None = None


def has_netcls_step(optimizer: Any, step: Any) -> bool:
    """Whether an optimizer is one of those that ``next_update`` knows, and ``step`` is netcl's own of its class."""
    code = getattr(step, "__code__", None)
    return type(optimizer) in _UPDATES and code is not None and code is _CODES.get(type(optimizer))


def stepped(optimizer: Any) -> list[Tensor]:
    """The parameters that an optimizer's ``step`` will update."""
    return [param for param in optimizer.params if param.grad is not None and not is_frozen(param)]


def can_update(param: Tensor) -> bool:
    """Whether a parameter is what a step on the device takes: float32, on the device, without a link to a copy of it
    that netcl's step would write."""
    return (
        isinstance(param, Tensor)
        and param.backend == "cl"
        and param.dtype == "float32"
        and model_parameter(param) is param
    )


def next_update(optimizer: Any, params: Sequence[Tensor]) -> Update | None:
    """What an optimizer's next step computes. State that is missing is made; the optimizer does not count the step yet.

    Args:
        optimizer: one that ``has_netcls_step``.
        params: those that ``stepped`` gives, which ``can_update``; at least one.

    Returns:
        None, and nothing has been done, if netcl computes it in another way: Momentum in float64, say, because a
        number is a numpy.float64.
    """
    return _UPDATES[type(optimizer)](optimizer, params)


def count_step(optimizer: Any, update: Update) -> None:
    """The step is being made: an optimizer that counts its steps does."""
    if update.counted is not None:
        optimizer.t = update.counted


# ---------------------------------------------------------------------------------------------- optimizer by optimizer


def _sgd(optimizer: SGD, params: Sequence[Tensor]) -> Update:
    state = optimizer._v_buf
    for param in params:
        if id(param) not in state:
            state[id(param)] = _zeros(param)
    numbers = np.float32(optimizer.lr), np.float32(optimizer.weight_decay)
    if optimizer.momentum == 0.0:
        return Update("sgd", numbers, [], list)
    velocities = [state[id(param)] for param in params]
    return Update("sgd_momentum", (*numbers, np.float32(optimizer.momentum)), velocities, lambda: [velocities])


def _momentum(optimizer: Momentum, params: Sequence[Tensor]) -> Update | None:
    chosen = optimizer.lr, optimizer.weight_decay, optimizer.momentum
    if any(type(x) not in (int, float) for x in chosen) or not _computes_as_numpy(params[0].queue):
        return None  # numpy.float64(0.9) * float32 is float64
    if not isinstance(optimizer.vel, DeviceArrays):
        optimizer.vel = DeviceArrays(optimizer.vel)
    if not all(optimizer.vel.fits(param) for param in params):
        return None
    velocities = [optimizer.vel.buffer_of(param) for param in params]
    numbers = (*map(np.float32, chosen), np.int32(bool(optimizer.nesterov)))
    return Update("momentum", numbers, velocities, lambda: [velocities])


def _computes_as_numpy(queue: cl.CommandQueue) -> bool:
    """Whether a device has the numbers below 2^-126 that numpy has."""
    return bool(queue.device.single_fp_config & cl.device_fp_config.DENORM)


def _adam(optimizer: Adam, params: Sequence[Tensor]) -> Update:
    for param in params:
        if id(param) not in optimizer._m_buf:
            optimizer._m_buf[id(param)], optimizer._v_buf[id(param)] = _zeros(param), _zeros(param)
    return _adams("adam", optimizer, *_moments(optimizer, params))


def _adamw(optimizer: AdamW, params: Sequence[Tensor]) -> Update:
    if steps_as_one(optimizer):
        fused = fused_state(optimizer)
        if fused is None or fused["signature"] != tuple([(id(param), param.size) for param in params]):
            for attribute, names in _KERNELS_OF_STEP.items():
                vars(optimizer).setdefault(attribute, _BuiltWhenUsed(names))
            optimizer._fused_state = fused = optimizer._build_fused_state(list(params))
        optimizer._flush_pending_moments()
        kept = [fused["m_flat"], fused["v_flat"]]
        return _adams("adamw", optimizer, kept, lambda: [_parts(flat, fused) for flat in kept])
    for param in params:
        optimizer._ensure_moment_buffers(param)
    optimizer._flush_pending_moments()
    return _adams("adamw", optimizer, *_moments(optimizer, params))


class _BuiltWhenUsed:
    """Kernels of AdamW's own step, by contexts' pointers. netcl compiles them with the state, and launches them only
    where it clips, or has gradients in shared memory."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._built: dict[int, Any] = {}

    def __contains__(self, context: int) -> bool:
        return True

    def __getitem__(self, context: int) -> Any:
        if context not in self._built:
            program = cl.Program(cl.Context.from_int_ptr(context), adamw._FUSED_CLIP_ADAM_SRC).build()
            kernels = [cl.Kernel(program, name) for name in self._names]
            self._built[context] = kernels if len(kernels) > 1 else kernels[0]
        return self._built[context]

    get = __getitem__


_KERNELS_OF_STEP = {
    "_fused_clip_adam_kernels": ("reduce_sq_sum_g", "reduce_partial_sq", "clip_adam_flat"),
    "_gather_grad_kernels": ("gather_grad",),
}


def _parts(flat: cl.Buffer, fused: Mapping[str, Any]) -> Buffers:
    return [flat.get_sub_region(offset * 4, size * 4) for _, offset, size in fused["offsets"]]


def _adams(rule: str, optimizer: Adam | AdamW, kept: Buffers, states: Callable[[], list[Buffers]]) -> Update:
    beta1, beta2, t = optimizer.beta1, optimizer.beta2, optimizer.t + 1
    chosen = optimizer.lr, optimizer.weight_decay, beta1, beta2, optimizer.eps, 1.0 - beta1**t, 1.0 - beta2**t
    return Update(rule, (*map(np.float32, chosen),), kept, states, t)


def _moments(optimizer: Adam | AdamW, params: Sequence[Tensor]) -> tuple[Buffers, Callable[[], list[Buffers]]]:
    first = [optimizer._m_buf[id(param)] for param in params]
    second = [optimizer._v_buf[id(param)] for param in params]
    return [*first, *second], lambda: [first, second]


def _zeros(param: Tensor) -> cl.Buffer:
    buffer = cl.Buffer(param.context, cl.mem_flags.READ_WRITE, param.size * 4)
    cl.enqueue_fill_buffer(param.queue, buffer, np.zeros(1, np.float32), 0, param.size * 4)
    return buffer


_UPDATES: dict[type, Callable[[Any, Sequence[Tensor]], Update | None]] = {
    SGD: _sgd, Momentum: _momentum, Adam: _adam, AdamW: _adamw,
}  # fmt: skip


def _code_of_step(cls: type) -> Any:
    """The code of netcl's step; None if somebody has put another one there."""
    code = vars(cls)["step"].__code__
    return code if code.co_filename == sys.modules[cls.__module__].__file__ else None


_CODES = {cls: _code_of_step(cls) for cls in _UPDATES}  # before any patch of clamp's


# ---------------------------------------------------------------------------------------------- arrays on the device


class DeviceArrays(MutableMapping[int, Any]):
    """numpy arrays by id of a parameter, some of which lie on the device until somebody asks for them.

    Momentum keeps its velocities in a dict of arrays. A step on the device keeps them there; whoever reads an item, a
    checkpoint, netcl's own step, gets an array with what is on the device, which the next step takes up from there.
    """

    def __init__(self, arrays: Mapping[int, Any]) -> None:
        self._arrays = dict(arrays)  # of those on the device, only their shapes count
        self._buffers: dict[int, tuple[cl.Buffer, cl.CommandQueue]] = {}

    def fits(self, param: Tensor) -> bool:
        """Whether the state of a parameter is float32 of its shape."""
        array = self._arrays.get(id(param))
        return isinstance(array, np.ndarray) and array.dtype == np.float32 and array.shape == tuple(param.shape)

    def buffer_of(self, param: Tensor) -> cl.Buffer:
        """Where the state of a parameter lies on the device, from now on until it is read."""
        if id(param) not in self._buffers:
            array = np.ascontiguousarray(self._arrays[id(param)])
            flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
            self._buffers[id(param)] = cl.Buffer(param.context, flags, hostbuf=array), param.queue
        return self._buffers[id(param)][0]

    def __getitem__(self, key: int) -> Any:
        if key in self._buffers:
            buffer, queue = self._buffers.pop(key)
            self._arrays[key] = np.empty_like(self._arrays[key])
            transfer.read(queue, self._arrays[key], buffer)
        return self._arrays[key]

    def __setitem__(self, key: int, value: Any) -> None:
        self._buffers.pop(key, None)
        self._arrays[key] = value

    def __delitem__(self, key: int) -> None:
        self._buffers.pop(key, None)
        del self._arrays[key]

    def __contains__(self, key: object) -> bool:  # the inherited one reads the item
        return key in self._arrays

    def __iter__(self) -> Iterator[int]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def copy(self) -> dict[int, Any]:
        """A plain dict with the arrays."""
        return dict(self)

    def __reduce__(self) -> Any:  # copies and pickles are plain dicts
        return dict, (self.copy(),)
