"""The steps of netcl's optimizers: what they compute for each parameter, and where they keep their state."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyopencl as cl
from netcl.core import transfer
from netcl.optim import SGD, Momentum, RMSProp
from netcl.optim import Adam as Adam
from netcl.optim import AdamW as AdamW
from netcl.optim import clip as clip

from clamp.bridge.masters import is_in_parts, model_parameter
from clamp.bridge.optimizers import HOST_STATE, set_moments, take_apart
from clamp.bridge.tensors import Tensor, canonical_dtype, is_frozen

Buffers: TypeAlias = list[Any]
Piece: TypeAlias = Callable[[], Any]


@dataclass(frozen=True)
class Update:
    """The next step of an optimizer."""

    rule: str  # what is computed, by its name in kernels/optimizer_step.cl
    numbers: tuple[np.generic, ...]  # of the rule, of the kernel's types
    states: list[Buffers]  # of each kind one a parameter; the same objects as long as the state lies where it lay
    counted: int | None = None  # the optimizer's count of steps after it; None if it keeps none


def is_netcls_step(step: Any) -> bool:
    """Returns whether ``step`` is that of one of netcl's optimizers, bound to one or to an optimizer derived from
    it."""
    return id(getattr(step, "__code__", None)) in _STEPS


def has_rule(optimizer: Any) -> bool:
    """Returns whether ``next_update`` knows what an optimizer computes: not RMSProp, nor a class derived from
    netcl's."""
    return type(optimizer) in _UPDATES


def stepped(optimizer: Any) -> list[Tensor]:
    """The parameters that an optimizer's ``step`` will update."""
    return [param for param in optimizer.params if param.grad is not None and not is_frozen(param)]


def can_update(param: Tensor) -> bool:
    """Returns whether a parameter is what a step on the device takes: float32, on the device, without a link to a copy
    of it that netcl's step would write."""
    return (
        isinstance(param, Tensor)
        and param.backend == "cl"
        and param.dtype == "float32"
        and model_parameter(param) is param
    )


def require_readable_gradient(optimizer: Any, param: Tensor) -> None:
    """Raises where netcl's step could not read a parameter's gradient, or would read beyond its end.

    Raises:
        TypeError: it is no tensor, or of another dtype than the step's.
        ValueError: it has another number of elements, another shape where numpy steps, or is not on the parameter's
            device.
    """
    grad, name = param.grad, f"{type(optimizer).__name__}.step()"
    if not isinstance(grad, Tensor):
        raise TypeError(f"{name}: a gradient is of type {type(grad).__name__}: set param.grad to a netcl Tensor")
    if param.backend != "cl":
        if param.array is None or grad.array is None:
            raise ValueError(f"{name}: a parameter on netcl's numpy backend, or its gradient, has no array")
        return
    reads_memory = isinstance(optimizer, SGD | Adam | AdamW)  # the others compute in numpy, parameter by parameter
    for what, dtype in (("parameter", param.dtype), ("gradient", grad.dtype)):
        if canonical_dtype(dtype) not in ("float32", None if reads_memory else canonical_dtype(param.dtype)):
            raise TypeError(
                f"{name}: the {what} of shape {tuple(param.shape)} is {dtype}, and netcl's optimizers step in float32: "
                "cast it, Tensor.from_host(queue, x.to_host().astype(numpy.float32))"
            )
    wrong = "" if grad.size == param.size else "another number of elements"
    if reads_memory and grad.buffer is None:
        wrong = "no storage on its device"
    elif not (wrong or reads_memory) and tuple(grad.shape) != tuple(param.shape):
        wrong = "as many elements in another shape, which numpy would broadcast"
    if wrong:
        raise ValueError(
            f"{name}: the gradient of shape {tuple(grad.shape)} of a parameter of shape {tuple(param.shape)} has "
            f"{wrong}"
        )


def next_update(optimizer: Any, params: Sequence[Tensor]) -> Update | None:
    """Returns the next step of an optimizer. State that is missing is made; the optimizer does not count the step yet.

    Args:
        optimizer: one that ``has_rule``.
        params: those that ``stepped`` gives, which ``can_update``; at least one.

    Returns:
        None, and nothing has been done, if netcl computes it in another way: Momentum in float64, say, because a
        number is a numpy.float64.
    """
    return _UPDATES[type(optimizer)](optimizer, params)


# ---------------------------------------------------------------------------------------------- optimizer by optimizer


def _sgd(optimizer: SGD, params: Sequence[Tensor]) -> Update:
    state = optimizer._v_buf
    for param in params:
        if id(param) not in state:
            state[id(param)] = _zeros(param)
    numbers = np.float32(optimizer.lr), np.float32(optimizer.weight_decay)
    if optimizer.momentum == 0.0:
        return Update("sgd", numbers, [])
    velocities = [state[id(param)] for param in params]
    return Update("sgd_momentum", (*numbers, np.float32(optimizer.momentum)), [velocities])


def _momentum(optimizer: Momentum, params: Sequence[Tensor]) -> Update | None:
    chosen = optimizer.lr, optimizer.weight_decay, optimizer.momentum
    # Not every device has the numbers below 2^-126 that numpy has.
    has_them = params[0].queue.device.single_fp_config & cl.device_fp_config.DENORM
    if any(type(x) not in (int, float) for x in chosen) or not has_them:
        return None  # numpy.float64(0.9) * float32 is float64
    if not isinstance(optimizer.vel, DeviceArrays):
        optimizer.vel = DeviceArrays(optimizer.vel)
    velocities = [optimizer.vel.buffer_of(param) for param in params]
    if any(velocity is None for velocity in velocities):
        return None
    numbers = (*map(np.float32, chosen), np.int32(bool(optimizer.nesterov)))
    return Update("momentum", numbers, [velocities])


def _adam(optimizer: Adam, params: Sequence[Tensor]) -> Update:
    for param in params:
        if id(param) not in optimizer._m_buf or id(param) not in optimizer._v_buf:
            optimizer._m_buf[id(param)], optimizer._v_buf[id(param)] = _zeros(param), _zeros(param)
    return adams("adam", optimizer, _moments(optimizer, params))


def _adamw(optimizer: AdamW, params: Sequence[Tensor]) -> Update:
    _make_moments(optimizer, params)
    return adams("adamw", optimizer, _moments(optimizer, params))


def _make_moments(optimizer: AdamW, params: Sequence[Tensor]) -> None:
    """Makes what AdamW keeps of parameters on the device, both of a parameter's or none, from what it has of them."""
    take_apart(optimizer)
    # netcl's fused step would give masters memory, and does not write their parameters; where it is not of all, it
    # saves the moments of no others
    optimizer._fused_enabled = (
        optimizer._fused_enabled
        and not any(map(is_in_parts, params))
        and len(stepped(optimizer)) == len(optimizer.params)
    )
    for param in params:
        key = id(param)
        if not (key in optimizer._m_buf and key in optimizer._v_buf):
            optimizer._m_buf[key], optimizer._v_buf[key] = (placed(param, x[key]) for x in (optimizer.m, optimizer.v))
    loaded = optimizer._pending_moments
    try:
        optimizer._flush_pending_moments()
        set_moments(optimizer, None)
    except BaseException:
        optimizer._pending_moments = loaded  # netcl loses those that cannot be placed
        raise


def adams(rule: str, optimizer: Adam | AdamW, states: list[Buffers]) -> Update:
    """The next step of Adam or AdamW, by a rule that has their numbers."""
    beta1, beta2, t = optimizer.beta1, optimizer.beta2, optimizer.t + 1
    chosen = optimizer.lr, optimizer.weight_decay, beta1, beta2, optimizer.eps, 1.0 - beta1**t, 1.0 - beta2**t
    return Update(rule, (*map(np.float32, chosen),), states, t)


def _moments(optimizer: Adam | AdamW, params: Sequence[Tensor]) -> list[Buffers]:
    return [[held[id(param)] for param in params] for held in (optimizer._m_buf, optimizer._v_buf)]


def placed(param: Tensor, array: Any, dtype: Any = np.float32) -> cl.Buffer:
    """A new buffer with an array of an optimizer's state, on the device of the parameter that it is for."""
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    return cl.Buffer(param.context, flags, hostbuf=np.ascontiguousarray(array, dtype))


def copied(param: Tensor, state: cl.Buffer) -> cl.Buffer:
    """A new buffer with what one of an optimizer's state holds of a parameter."""
    made = cl.Buffer(param.context, cl.mem_flags.READ_WRITE, state.size)
    cl.enqueue_copy(param.queue, made, state, byte_count=state.size)
    return made


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


_STEPS = {id(code): code for cls in (*_UPDATES, RMSProp) if (code := _code_of_step(cls))}  # before any patch of clamp's


def add_rule(cls: type, update: Callable[[Any, Sequence[Tensor]], Update | None]) -> None:
    """Lets ``next_update`` know what an optimizer of clamp's own computes, as launches of clamp's alone do."""
    _UPDATES[cls] = update
    code = vars(cls)["step"].__code__
    _STEPS[id(code)] = code


# ---------------------------------------------------------------------------------------------- steps of netcl's own


def own_pieces(
    own: Callable[[], Any], optimizer: Any, params: Sequence[Tensor]
) -> list[tuple[Sequence[Tensor], Piece]]:
    """netcl's own step in pieces, each with the parameters that it steps: it does, or leaves everything as it was. The
    last one counts the step. State that is missing is made.

    Args:
        own: the step.
        params: those that ``stepped`` gives.
    """
    kept = vars(optimizer)
    if not isinstance(kept.get("params"), list):
        return [(params, partial(_all_or_nothing, own, optimizer, params))]
    if isinstance(optimizer, AdamW):
        _make_moments(optimizer, [param for param in params if param.backend == "cl"])
    pieces: list[tuple[Sequence[Tensor], Piece]] = [
        ([param], partial(_step_one, own, optimizer, param)) for param in params
    ]
    return [*pieces, ([], partial(setattr, optimizer, "t", kept["t"] + 1))] if "t" in kept else pieces


def _step_one(own: Callable[[], Any], optimizer: Any, param: Tensor) -> None:
    """The step of a single parameter, which the optimizer does not count."""
    kept = vars(optimizer)
    before = {name: kept[name] for name in ("params", "t", "_fused_enabled") if name in kept}
    kept["params"] = [param]
    if "_fused_enabled" in before:
        kept["_fused_enabled"] = False  # that of all of them is another computation
    try:
        _all_or_nothing(own, optimizer, (param,))
    finally:
        kept.update(before)


def _all_or_nothing(own: Callable[[], Any], optimizer: Any, params: Sequence[Tensor]) -> None:
    """Calls a step that writes to the device last; what it has changed on the host before an error is put back."""
    kept = vars(optimizer)
    numbers = {name: kept[name] for name in ("t", "_pending_moments") if name in kept}
    states = [state for name, state in kept.items() if name in HOST_STATE and isinstance(state, MutableMapping)]
    arrays = [(state, id(param), state[id(param)]) for state in states for param in params if id(param) in state]
    try:
        own()
    except BaseException:
        kept.update(numbers)
        for state, key, array in arrays:
            state[key] = array
        raise


# ---------------------------------------------------------------------------------------------- arrays on the device


class DeviceArrays(UserDict[int, Any]):
    """numpy arrays by id of a parameter, some of which lie on the device until somebody asks for them.

    Momentum keeps its velocities in a dict of arrays. A step on the device keeps them there; whoever reads an item, a
    checkpoint, netcl's own step, gets an array with what is on the device, which the next step takes up from there.
    """

    def buffer_of(self, param: Tensor) -> cl.Buffer | None:
        """Returns where the state of a parameter lies on the device, from now on until it is read; None if that is not
        float32 of its shape."""
        kept = self.data.get(id(param))
        if isinstance(kept, np.ndarray) and kept.dtype == np.float32:
            kept = self.data[id(param)] = _OnDevice(placed(param, kept), param.queue, kept.shape)
        return kept.buffer if isinstance(kept, _OnDevice) and kept.shape == tuple(param.shape) else None

    def __getitem__(self, key: int) -> Any:
        kept = self.data[key]
        if isinstance(kept, _OnDevice):
            array = np.empty(kept.shape, np.float32)
            transfer.read(kept.queue, array, kept.buffer)
            kept = self.data[key] = array
        return kept

    def copy(self) -> dict[int, Any]:  # type: ignore[override]
        """A plain dict with the arrays."""
        return dict(self)

    __copy__ = copy  # type: ignore[assignment]

    def __reduce__(self) -> Any:  # of deep copies and pickles, too
        return dict, (self.copy(),)


@dataclass(frozen=True)
class _OnDevice:
    buffer: cl.Buffer
    queue: cl.CommandQueue
    shape: tuple[int, ...]
