"""Optimizers, the state that netcl's keep, and netcl's ``GradScaler``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from inspect import signature
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl
from netcl.amp import GradScaler
from netcl.core import transfer
from netcl.optim import AdamW, adamw

from clamp.bridge.modules import Module
from clamp.bridge.objects import in_reach, own_attributes
from clamp.bridge.tensors import Tensor


def is_optimizer(x: Any) -> bool:
    """Returns whether x steps parameters: it has a list of them, and a ``step()`` that needs no argument, as the
    ``step(x, y)`` of a class for a whole training does."""
    own, kind = own_attributes(x), type(x)  # and no word from a __getattr__ of the user's
    step, given = (own["step"], ()) if "step" in own else (getattr(kind, "step", None), (x,))
    if isinstance(x, Module) or not callable(step) or not _runs_with(step, *given):
        return False
    params = own["params"] if "params" in own else getattr(kind, "params", None)
    return isinstance(params, property) or (
        isinstance(params, list | tuple) and all(isinstance(param, Tensor) for param in params)
    )


def _runs_with(function: Callable[..., Any], *args: Any) -> bool:
    """Returns whether a function can be called with these arguments and no more."""
    try:
        signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # one of C has none
        return True
    return True


def is_netcl_optimizer(optimizer: Any) -> bool:
    """Returns whether an optimizer is netcl's, or derived from one of netcl's."""
    return any(cls.__module__.startswith("netcl.optim.") for cls in type(optimizer).__mro__)


def optimizer_parameters(optimizer: Any) -> list[Tensor]:
    """The tensors that ``optimizer.step()`` updates.

    Raises:
        TypeError: the optimizer has no ``params``, or they are not tensors.
    """
    params = getattr(optimizer, "params", None)
    if params is None:
        raise TypeError(
            f"{type(optimizer).__name__} has no `params`: clamp needs the list of tensors that its step() updates. "
            "Pass a netcl optimizer, or give yours an attribute `params`."
        )
    params = list(params)
    for index, param in enumerate(params):
        if not isinstance(param, Tensor):
            raise TypeError(
                f"{type(optimizer).__name__}.params[{index}] is of type {type(param).__name__}, not a netcl Tensor"
            )
    return params


#: where netcl's optimizers keep arrays and buffers, by id of the parameter
HOST_STATE = ("velocity", "vel", "m", "v", "square_avg", "mom")
_DEVICE_STATE = ("_v_buf", "_m_buf")


def is_kernel_store(name: str) -> bool:
    """Returns whether an attribute of netcl's optimizers holds compiled kernels, which are no state."""
    return name.endswith(("_kernel", "_kernels"))


def is_state_by_parameter(name: str, value: Any, parameters: Container[int]) -> bool:
    """Returns whether an attribute of an optimizer of netcl's is a mapping by ``id`` of the parameter.

    Args:
        parameters: the ids of the optimizer's parameters. The dict may have more: of such as have left it.
    """
    if not isinstance(value, MutableMapping):
        return False
    known = name in HOST_STATE or name in _DEVICE_STATE
    return known or any(key in parameters for key in value) or any(isinstance(x, cl.Buffer) for x in value.values())


def replace_parameter(optimizer: Any, index: int, new: Tensor) -> None:
    """Lets an optimizer step another tensor in place of ``params[index]``, with the state it has for that one.

    What cuts this off leaves the old tensor in ``params``, or the new one with all of its state.
    """
    take_apart(optimizer)
    old = optimizer.params[index]
    if not isinstance(optimizer.params, list):
        optimizer.params = list(optimizer.params)
    forget_dead_parameters(optimizer, new)  # which may have the id of one of them
    by_id = [state for state in vars(optimizer).values() if isinstance(state, MutableMapping) and id(old) in state]
    for state in by_id:
        state[id(new)] = state[id(old)]
    optimizer.params[index] = new
    forget_dead_parameters(optimizer)
    if not any(param is old for param in optimizer.params):
        for state in by_id:
            del state[id(old)]


class _Met(NamedTuple):
    """The parameters of an optimizer as it was looked at last, held so that ids are theirs, and all that it has had."""

    optimizer: weakref.ref[Any]
    last: list[Tensor]
    had: dict[int, weakref.ref[Tensor]]  # by id


_met: dict[int, _Met] = {}  # by id: a user's optimizer may have no hash


def forget_dead_parameters(optimizer: Any, *coming: Tensor) -> None:
    """Drops the state of parameters that have left an optimizer and are gone, before others are ``coming``.

    netcl keeps state by ``id`` of the parameter: one that is new may have the id of one that is gone, and would go on
    with its moments. Those of parameters that may come back stay.
    """
    params, key = [*optimizer.params, *coming], id(optimizer)
    met = _met.get(key)
    if met is None or met.optimizer() is not optimizer:
        met = _met[key] = _Met(weakref.ref(optimizer, lambda _: _met.pop(key, None)), [], {})
    if len(params) == len(met.last) and all(map(is_, params, met.last)):
        return
    for gone in [known for known, param in met.had.items() if param() is None]:
        del met.had[gone]
        for name, state in vars(optimizer).items():
            if isinstance(state, MutableMapping) and gone in state and not is_kernel_store(name):
                del state[gone]
    met.had.update((id(param), weakref.ref(param)) for param in params)
    met.last[:] = params


def add_missing_state(optimizer: Any) -> None:
    """Gives parameters that were added to ``optimizer.params`` the state of new ones, which netcl's optimizers make at
    construction only."""
    take_apart(optimizer)
    forget_dead_parameters(optimizer)
    params = optimizer.params
    ids = {id(param) for param in params}
    kept = vars(optimizer)
    for name in kept.keys() & HOST_STATE:
        state = kept[name]
        is_state = type(state) is dict or isinstance(state, MutableMapping)  # dict: told without asking an ABC
        if is_state and not ids <= state.keys():
            for param in params:
                if id(param) not in state:
                    state[id(param)] = np.zeros(param.shape, np.float32)


def take_apart(optimizer: Any) -> None:
    """Lets AdamW have each parameter's moments in buffers of their own; other optimizers have no others.

    netcl's fused step has those of all parameters in one buffer, and begins with zeros in a new one where it is of
    others than the last, frozen or without a gradient.
    """
    fused = optimizer._fused_state if isinstance(optimizer, AdamW) else None
    if fused is not None:
        for param, offset, size in fused["offsets"]:
            optimizer._m_buf[id(param)] = fused["m_flat"].get_sub_region(offset * 4, size * 4)
            optimizer._v_buf[id(param)] = fused["v_flat"].get_sub_region(offset * 4, size * 4)
        set_moments(optimizer, None)


def pending_moments(optimizer: Any) -> list[Any] | None:
    """Moments that AdamW has loaded and will place at its next step, in the order of the parameters."""
    return getattr(optimizer, "_pending_moments", None)


def require_moments_fit(optimizer: Any, state: Any) -> None:
    """Raises ValueError where the moments that AdamW is to load are not of its parameters' sizes: netcl copies what
    there is, and leaves the rest."""
    is_netcls = isinstance(optimizer, AdamW) and not hasattr(optimizer, MOMENTS_8BIT)
    moments = state.get("moments") if is_netcls and isinstance(state, Mapping) else None
    for index, (param, pair) in enumerate(zip(optimizer.params if moments else (), moments or (), strict=False)):
        if other := [np.shape(moment) for moment in pair if np.size(moment) != param.size]:
            raise ValueError(
                f"the state's moments[{index}] are of shape {other[0]}, and their parameter is of shape "
                f"{tuple(param.shape)}: load the state of an AdamW of the same parameters, in the same order"
            )


def set_moments(optimizer: Any, loaded: Any) -> None:
    """Lets AdamW's next step, netcl's fused one too, and after AMP as well, begin with moments that it has loaded, or
    with those that it has in buffers; other optimizers need not be told."""
    if isinstance(optimizer, AdamW):
        optimizer._fused_state, optimizer._pending_moments = None, loaded
        for kernels in ("_fused_clip_adam_kernels", "_gather_grad_kernels"):
            vars(optimizer).setdefault(kernels, {})  # a copy of the optimizer looks here, too
        optimizer._build_fused_state = partial(_fused_of, weakref.ref(optimizer))


def _fused_of(adamw: weakref.ref[Any], params: Sequence[Tensor]) -> dict[str, Any]:
    """The state of netcl's fused step for these parameters, with the moments that they have: netcl's own has zeros."""
    optimizer: Any = adamw()
    take_apart(optimizer)
    fused: dict[str, Any] = type(optimizer)._build_fused_state(optimizer, params)
    for kind in ("m", "v"):
        placed, host, flat = vars(optimizer)[f"_{kind}_buf"], vars(optimizer)[kind], fused[f"{kind}_flat"]
        for param, offset, size in fused["offsets"]:
            if id(param) in placed:
                transfer.copy(param.queue, flat, placed[id(param)], size * 4, dst_offset=offset * 4)
            elif id(param) in host:
                transfer.write(param.queue, flat, np.ascontiguousarray(host[id(param)], "f"), dst_offset=offset * 4)
    return fused


def fused_size(size: int) -> int:
    """Returns the number of elements that a parameter of ``size`` takes in the buffers of netcl's fused step."""
    return adamw._aligned_size(size, adamw._SUBBUF_ALIGN_FLOATS)


#: what AdamW's moments are kept in besides: of parameters that netcl steps as one, and loaded for the next step
MOMENTS_APART = ("_fused_state", "_pending_moments", "_build_fused_state")


#: where an optimizer of clamp's own keeps moments of 8 bits, by id of the parameter
MOMENTS_8BIT = "_moments_8bit"
#: where an optimizer counts the steps in which parameters were rounded by chance, once there was one
ROUNDINGS = "_roundings"


def roundings(optimizer: Any) -> int:
    """Returns how many steps of an optimizer have rounded parameters by chance."""
    return int(getattr(optimizer, ROUNDINGS, 0))


def forward_and_backward(trainer: Any, *args: Any, **kwargs: Any) -> None:
    """One batch of a ``Trainer`` of netcl's, without its step; arguments as of its ``_forward``."""
    trainer._forward_backward(*args, **kwargs)


def host_scalers_among(reached: Iterable[Any]) -> list[Any]:
    """The ``GradScaler``s of netcl's among objects of any kind."""
    return [x for x in reached if issubclass(type(x), GradScaler)]


def optimizers_among(reached: Iterable[Any]) -> list[Any]:
    """The optimizers among objects of any kind; runs no code of theirs."""
    return [
        x
        for x in reached
        if callable(getattr(type(x), "step", None)) and isinstance(own_attributes(x).get("params"), list | tuple)
    ]


def optimizers_in_reach() -> list[Any]:
    """The optimizers that the variables of a running program lead to."""
    return [x for x in in_reach() if is_optimizer(x)]


def set_host_scale(scaler: Any, scale: float) -> None:
    """Sets the scale of a ``GradScaler`` of netcl's."""
    scaler._scale = scale
