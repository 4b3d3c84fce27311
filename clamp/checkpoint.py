"""A training run in one file: parameters, optimizer states, loss scales, and what else the caller wants to keep.

Optimizers are saved by their attributes, models by the names of their tensors (checkpoint_file.py has the file). A file
is read and checked as a whole before anything is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyopencl as cl

from clamp import bridge, masters
from clamp.bridge import Tensor
from clamp.cache import weights
from clamp.checkpoint_file import Array, CheckpointError, Decoder, Encoder, Json, read, write

Write: TypeAlias = Callable[[], Any]


# ---------------------------------------------------------------------------------------------- saving


def save(
    path: str | os.PathLike[str],
    models: Any,
    optimizers: Any,
    amp_state: Mapping[str, Any] | None,
    extra: Mapping[str, Any],
) -> None:
    """Writes a checkpoint; the file that was there before stays whole until the new one is.

    Raises:
        TypeError: something cannot be saved; the message names it.
        OSError: the file cannot be written.
    """
    writer = Encoder()
    content = {
        "models": [
            {name: writer.parameter(tensor) for name, tensor in _named(model)} for model in _listed(models, "models")
        ],
        "optimizers": [_optimizer_state(optimizer, writer) for optimizer in _listed(optimizers, "optimizers")],
        "amp": writer.value(dict(amp_state), "amp") if amp_state is not None else None,
        "extra": {name: writer.value(value, name) for name, value in extra.items()},
    }
    write(Path(path), content, writer.arrays)


# ---------------------------------------------------------------------------------------------- optimizers


def _optimizer_state(optimizer: Any, writer: Encoder) -> Json:
    """An optimizer's real state, by its attributes: netcl's Adam, Momentum and RMSProp have no ``state_dict``."""
    params = bridge.optimizer_parameters(optimizer)
    state: dict[str, Json] = {
        "class": type(optimizer).__name__,
        "shapes": [list(param.shape) for param in params],
        "masters": [writer.master(param) if bridge.model_parameter(param) is not param else None for param in params],
    }
    if not bridge.is_netcl_optimizer(optimizer):
        if not callable(getattr(optimizer, "state_dict", None)) or not callable(
            getattr(optimizer, "load_state_dict", None)
        ):
            raise TypeError(
                f"{type(optimizer).__name__} is no optimizer of netcl's: give it state_dict() and load_state_dict()"
            )
        return {**state, "own": writer.value(optimizer.state_dict(), f"{type(optimizer).__name__}.state_dict()")}
    numbers = {id(param): str(index) for index, param in enumerate(params)}
    attributes: dict[str, Json] = {}
    by_parameter: dict[str, dict[str, Json]] = {}
    for name, value in vars(optimizer).items():
        if name in ("params", "_fused_state", "_pending_moments") or bridge.is_kernel_store(name):
            continue
        if isinstance(value, dict) and all(key in numbers for key in value):
            by_parameter[name] = {
                numbers[key]: _moment(item, params[int(numbers[key])], writer) for key, item in value.items()
            }
        else:
            attributes[name] = writer.value(value, f"{type(optimizer).__name__}.{name}")
    state |= {"attributes": attributes, "by_parameter": by_parameter}
    pending = getattr(optimizer, "_pending_moments", None)
    state["pending"] = None if pending is None else writer.value([tuple(pair) for pair in pending], "moments")
    fused = getattr(optimizer, "_fused_state", None)
    if fused is not None:
        flat = {name: _buffer_to_host(fused[name], params[0].queue, fused["total"]) for name in ("m_flat", "v_flat")}
        state["fused"] = {
            "parameters": [int(numbers[id(param)]) for param, _, _ in fused["offsets"]],
            "total": fused["total"],
            **{name: writer.array(array, "float32") for name, array in flat.items()},
        }
    return state


def _moment(value: Any, param: Tensor, writer: Encoder) -> Json:
    if isinstance(value, np.ndarray):
        return {**writer.array(value, "numpy"), "place": "host"}
    return {**writer.array(_buffer_to_host(value, param.queue, param.size), "float32"), "place": "device"}


def _buffer_to_host(buffer: cl.Buffer, queue: cl.CommandQueue, size: int) -> Array:
    host = np.empty(size, np.float32)
    if size:
        cl.enqueue_copy(queue, host, buffer)
    return host


# ---------------------------------------------------------------------------------------------- loading


def load(
    path: str | os.PathLike[str],
    models: Any,
    optimizers: Any,
    load_amp: Callable[[Mapping[str, Any]], None] | None,
) -> dict[str, Any]:
    """Restores what ``save`` wrote, or changes nothing.

    Args:
        load_amp: restores the loss scales or raises, before anything else is changed; None leaves them alone.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: the file is no checkpoint, is damaged, or does not fit.
        FileNotFoundError: there is no such file.
    """
    content, arrays = read(Path(path))
    decoder = Decoder(arrays, path)
    try:
        extra = {name: decoder.value(value) for name, value in content["extra"].items()}
        writes = [*_model_writes(_listed(models, "models"), content, decoder)]
        writes += [*_optimizer_writes(_listed(optimizers, "optimizers"), content, decoder)]
        amp_state = decoder.value(content["amp"])
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if amp_state and load_amp is not None:
        load_amp(amp_state)
    for apply in writes:
        apply()
    weights.clear()
    for model in _listed(models, "models"):
        if bridge.is_module(model):
            bridge.invalidate_derived(model)
    return extra


def _model_writes(models: Sequence[Any], content: Json, decoder: Decoder) -> Iterator[Write]:
    saved = content["models"]
    if len(saved) != len(models):
        raise CheckpointError(f"{decoder.path} holds {len(saved)} models, {len(models)} were passed")
    for number, (model, state) in enumerate(zip(models, saved, strict=True)):
        named = dict(_named(model))
        missing, unknown = sorted(named.keys() - state.keys()), sorted(state.keys() - named.keys())
        if missing or unknown:
            raise CheckpointError(
                f"{decoder.path}: model {number} differs from the saved one: "
                + "; ".join(
                    f"{len(names)} tensors {where}: {', '.join(names[:5])}"
                    for names, where in ((missing, "not in the file"), (unknown, "not in the model"))
                    if names
                )
            )
        for name, tensor in named.items():
            value, precise = state[name]["value"], state[name]["master"] or state[name]["value"]
            same = value["dtype"] == bridge.canonical_dtype(tensor.dtype)
            yield partial(bridge.write_bytes, tensor, decoder.bits_for(value if same else precise, tensor, name))
            master = bridge.master_of(tensor)
            if master is not None:
                yield partial(bridge.write_bytes, master, decoder.bits_for(precise, master, name))


def _optimizer_writes(optimizers: Sequence[Any], content: Json, decoder: Decoder) -> Iterator[Write]:
    saved = content["optimizers"]
    if len(saved) != len(optimizers):
        raise CheckpointError(f"{decoder.path} holds {len(saved)} optimizers, {len(optimizers)} were passed")
    for number, (optimizer, state) in enumerate(zip(optimizers, saved, strict=True)):
        params = [master for master, _ in masters.pairs(optimizer)]
        name, shapes = type(optimizer).__name__, [list(param.shape) for param in params]
        if state["class"] != name:
            raise CheckpointError(f"{decoder.path}: optimizer {number} was {state['class']}, here it is {name}")
        if state["shapes"] != shapes:
            raise CheckpointError(
                f"{decoder.path}: {name} had {len(state['shapes'])} parameters of shapes {state['shapes']}, here it "
                f"has {len(shapes)} of shapes {shapes}"
            )
        for index, (param, reference) in enumerate(zip(params, state["masters"], strict=True)):
            if reference is not None:  # a master whose parameter is in none of the models
                yield partial(bridge.write_bytes, param, decoder.bits_for(reference, param, f"{name}.params[{index}]"))
        if "own" in state:
            yield partial(optimizer.load_state_dict, decoder.value(state["own"]))
        else:
            yield _netcl_write(optimizer, params, state, decoder)


def _netcl_write(optimizer: Any, params: Sequence[Tensor], state: Json, decoder: Decoder) -> Write:
    """Everything is decoded and checked here; the function returned only assigns."""
    attributes = {name: decoder.value(value) for name, value in state["attributes"].items()}
    by_parameter = {
        name: {int(index): (decoder.array(item), item["place"]) for index, item in items.items()}
        for name, items in state["by_parameter"].items()
    }
    unknown = sorted((attributes.keys() | by_parameter.keys()) - vars(optimizer).keys())
    if unknown:
        raise CheckpointError(f"{decoder.path}: {type(optimizer).__name__} has no {', '.join(unknown)} here")
    for name, items in by_parameter.items():
        for index, (array, _) in items.items():
            if array.size != params[index].size:
                raise CheckpointError(
                    f"{decoder.path}: {name} of parameter {index} has {array.size} elements instead of "
                    f"{params[index].size}"
                )
    pending = decoder.value(state["pending"])
    fused = state.get("fused")
    flat = {} if fused is None else {name: decoder.array(fused[name]) for name in ("m_flat", "v_flat")}

    def apply() -> None:
        vars(optimizer).update(attributes)
        for name, items in by_parameter.items():
            setattr(
                optimizer, name, {id(params[index]): _placed(params[index], *item) for index, item in items.items()}
            )
        if hasattr(optimizer, "_pending_moments"):
            optimizer._pending_moments = pending
        if hasattr(optimizer, "_fused_state"):
            built = None
            if fused is not None:  # while the old state, in which the parameters may lie, is still there
                built = optimizer._build_fused_state([params[index] for index in fused["parameters"]])
                for name, array in flat.items():
                    cl.enqueue_copy(params[0].queue, built[name], array)
            optimizer._fused_state = built

    return apply


def _placed(param: Tensor, array: Array, place: str) -> Any:
    if place == "host":
        return array.copy()
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    return cl.Buffer(param.context, flags, hostbuf=np.ascontiguousarray(array, np.float32).reshape(-1))


# ---------------------------------------------------------------------------------------------- what is saved


def _listed(x: Any, what: str) -> list[Any]:
    """One thing or a list of them as a list; a list of tensors is one model."""
    if x is None:
        return []
    if isinstance(x, list | tuple) and not (what == "models" and all(isinstance(item, Tensor) for item in x)):
        return list(x)
    return [x]


def _named(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model with their names: a netcl module's, a dict's, a list's, or those of ``parameters()``.

    Raises:
        TypeError: it is none of these.
    """
    if bridge.is_module(model) or isinstance(model, list | tuple | dict):
        yield from bridge.module_tensors(model)
    elif callable(getattr(model, "parameters", None)):
        yield from bridge.module_tensors(list(model.parameters()))
    else:
        raise TypeError(
            f"a checkpoint holds netcl modules, objects with parameters(), and lists or dicts of tensors, not a "
            f"{type(model).__name__}"
        )
