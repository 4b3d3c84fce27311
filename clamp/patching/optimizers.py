"""Optimizers under AMP: the guard over ``step``, and 16-bit parameters, whose masters the optimizer steps.

What netcl's own functions do not know of masters is met here, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from functools import partial
from typing import Any

import numpy as np
from netcl.optim import clip

from clamp import bridge
from clamp.bridge import HALF_DTYPES, Tensor
from clamp.casting.arguments import tensors_in
from clamp.opencl.host_steps import host_step, host_value, recorder
from clamp.ops.ring_buffers import Norms
from clamp.params import gradient_marks, masters, updates
from clamp.patching.patch_registry import meets, meets_in_optimizers
from clamp.patching.tensors import in_place
from clamp.patching.wrap import Wrapper
from clamp.scaling.dynamic_scale import settle_before_reading, settle_late
from clamp.scaling.manual import begin_anew


def guarded(step: Wrapper) -> Wrapper:
    """``optimizer.step`` under ``step``, its guard, which every replay makes anew, with what clamp has a version of.

    That is of those that update all parameters in one launch (params/updates.py); and ``AdamW.step(max_norm=)``, which
    clips gradients of any size, of models of any size: netcl forgets it where it steps one parameter at a time.
    """

    def call(wrapped: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run() -> Any:
            own: Any = partial(_with_wide_gradients, wrapped, optimizer)
            if bridge.is_netcls_step(wrapped):
                own = updates.OptimizerStep(wrapped, optimizer)
            if (wrapped.__module__, wrapped.__qualname__) in _ADAMWS and (args or kwargs):
                own = partial(_clipped, own, optimizer)
            return step(own, optimizer, args, kwargs)

        return masters.step_anew(optimizer, run)

    return call


_ADAMWS = {("netcl.optim.adamw", "AdamW.step"), ("clamp.params.optim", "AdamW8bit.step")}


def _with_wide_gradients(own: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    masters.widen_gradients(getattr(optimizer, "params", ()))
    return own(*args, **kwargs)


def _clipped(own: Any, optimizer: Any, max_norm: float | None = None) -> Any:
    if max_norm is not None and max_norm > 0:
        clip.clip_grad_norm_device(optimizer.params, max_norm)  # clamp's, while patches are installed
    return own()


@meets_in_optimizers("zero_grad")
def zero_grad(wrapped: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """An optimizer's ``zero_grad``, which knows the masters' gradients only: the models' go as well."""
    host_step(partial(begin_anew, optimizer))  # before: they are still there for a repeat, and who holds one has it
    result = wrapped(*args, **kwargs)
    for master, model in _masters_among(getattr(optimizer, "params", ())):
        if master.grad is None:
            masters.share_gradient(master, model, None)
    return result


@meets_in_optimizers("state_dict")
def state_dict(wrapped: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """An optimizer's ``state_dict``, which knows no state of parameters added later, and does not count roundings."""
    if hasattr(optimizer, "params"):
        masters.pairs(optimizer)
    state, count = wrapped(*args, **kwargs), bridge.roundings(optimizer)
    return {**state, _ROUNDINGS: count} if count else state


@meets_in_optimizers("load_state_dict")
def load_state_dict(wrapped: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """An optimizer's ``load_state_dict``, which takes back what ``state_dict`` gives.

    Raises:
        ValueError: as ``bridge.require_moments_fit``.
    """
    if hasattr(optimizer, "params"):
        masters.pairs(optimizer)
    state = next(iter((*args, *kwargs.values())), None)
    bridge.require_moments_fit(optimizer, state)
    result = wrapped(*args, **kwargs)
    count = state.get(_ROUNDINGS, 0) if isinstance(state, Mapping) else 0
    if count != bridge.roundings(optimizer):
        setattr(optimizer, bridge.ROUNDINGS, int(count))
    return result


_ROUNDINGS = "roundings"  # in a state_dict; of the steps in which parameters were rounded by chance


@meets("netcl.amp.master_param")
def master_param(wrapped: Any, instance: None, /, param: Tensor) -> Tensor:
    """netcl's ``master_param``, which its optimizers call: one master for each parameter, for bfloat16 too."""
    if param.dtype in HALF_DTYPES and bridge.on_device(param):
        return masters.master_for(param)
    return wrapped(param)


_averaging = threading.RLock()


@meets("netcl.optim.ema.ModelEMA.update")
def update_average(wrapped: Any, instance: Any, /) -> Any:
    """netcl's running average of parameters, whose decay depends on how often it was updated: each replay does that."""
    return host_step(partial(in_masters, wrapped, instance))


@meets(
    "netcl.optim.ema.ModelEMA.copy_to_model",
    "netcl.optim.ema.ModelEMA.restore",
    "netcl.optim.ema._clone",
    "netcl.ssl.heads.MomentumEncoder.sync",
    "netcl.ssl.heads.MomentumEncoder.update",
    "netcl.evo.genome.inherit_weights",
    "netcl.evo.population._write_param",
    "netcl.evo.population.flatten_module",
    "netcl.evo.population.ParamLayout.from_module",
    "netcl.evo.population.Population.load_into",
    "netcl.evo.population.Population.store_from",
    "netcl.io.checkpoint._copy_array_to_tensor",
    "netcl.io.checkpoint.save_params",
    "netcl.io.checkpoint.load_params",
    "netcl.io.interop.model_state_dict",
    "netcl.io.interop.load_into_model",
    "netcl.io.onnx_export._to_host",
    "netcl.nn.init.constant",
    "netcl.nn.init.kaiming_uniform",
    "netcl.nn.init.normal",
    "netcl.nn.init.xavier_uniform",
)
def in_masters(wrapped: Any, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A function of netcl's that fills, copies, averages or saves parameters: of 16-bit ones it reads and writes the
    masters. (Most would copy four bytes for each element, whatever its dtype, or refuse.) Threads take turns: netcl's
    kernel of averages is one for all of them, and one would launch it with the arguments of another."""
    args, kwargs = tuple(map(_listed, args)), {name: _listed(x) for name, x in kwargs.items()}
    params = tensors_in((args, kwargs))
    for x in (*args, *kwargs.values()):
        params += x.parameters() if hasattr(x, "parameters") else []
    for name in ("_params", "_online_params", "_target_params"):
        params += getattr(instance, name, ())
    with _averaging, masters.showing_masters(params, load=True):
        return wrapped(*args, **kwargs)


def _listed(x: Any) -> Any:
    """A list of what an iterator, or the values of a dict, would give; anything else as it is."""
    return list(x) if isinstance(x, Iterator | ValuesView) else x


# ---------------------------------------------------------------------------------------------------- clipping


@meets("netcl.optim.clip.clip_grad_norm", "netcl.optim.clip.clip_grad_norm_device")
def clip_gradients(wrapped: Any, instance: None, /, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
    """netcl's clipping by norm: refused while gradients are multiplied by the loss scale, and so their norm.

    Raises:
        RuntimeError: a gradient is scaled.
    """
    params = list({id(param): param for param in params}.values())
    host_step(settle_late)
    settle_before_reading([param.grad for param in params if param.grad is not None], {})  # another thread's
    gradient_marks.require_ready(
        params,
        f"{wrapped.__name__}()",
        "the norm would be that many times too large. Clip after `with handle.scale_loss(...)`, after "
        "scaler.unscale_(optimizer) or after scaler.unscale_grads(params), before the step.",
    )
    for master, model in _masters_among(params):
        masters.gather(master, model)  # a backward without `with handle.scale_loss(...)` leaves it on the parameter
    gradient_marks.give_each_its_own(params)

    def clip() -> Any:
        return in_place(partial(_clip, wrapped), instance, (params, *args), kwargs)

    if recorder() is None or wrapped.__name__ != "clip_grad_norm":
        return clip()
    # It reads the norm to the host, so that every replay clips anew.
    return host_value(gradient_marks.on_gradients(params, clip), "The norm that clip_grad_norm returned")


def _masters_among(params: Iterable[Tensor]) -> list[masters.Pair]:
    pairs = [(param, bridge.model_parameter(param)) for param in params]
    return [(master, model) for master, model in pairs if model is not master]


def _clip(wrapped: Any, params: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """netcl's clipping, by a norm whose square need not fit into float32; what clamp's kernels do not take is netcl's
    own."""
    (longest, *more) = [*args, *kwargs.values()] or [None]
    for master, model in _masters_among(params):
        bridge.freeze_like(master, model)  # it may have been thawed since its optimizer's last step
    grads = [param.grad for param in params if param.grad is not None and not bridge.is_frozen(param)]
    grads = [grad for grad in grads if grad.size]
    is_ours = all(bridge.on_device(x) and x.dtype == "float32" and x.queue == grads[0].queue for x in grads)
    if not grads or not is_ours or more or not isinstance(longest, int | float | np.number):
        return wrapped(params, *args, **kwargs)
    norms = Norms.of(grads)
    if wrapped.__name__ == "clip_grad_norm_device":
        return norms.clip(grads, float(longest))
    (norm,) = norms.read()
    if not norm <= longest:
        norms.clip(grads, float(longest))
    return norm
