"""Optimizers in a checkpoint: whose state it is, by the names of the model's parameters, and the state.

Optimizers are saved by their attributes, because netcl's Adam, Momentum and RMSProp have no ``state_dict``::

    {"class": "Adam",
     "params": [{"name": [0, "layers.0.weight"], "shape": [8, 16], "held": None}, ...],   0: the first of the models
     "attributes": {"lr": 0.001, ...},
     "by_parameter": {"m": {"0": moment of params[0], ...}, ...}, "pending": ...}

A parameter that is in none of the models has no name. It is found again by its place among such parameters, and
its value is ``held`` here.
"""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.checkpoint.file import Array, CheckpointError, Decoder, Encoder, Json, differences, reading
from clamp.checkpoint.undo import Undo
from clamp.ops.optimizer_step import moments_bytes

Write: TypeAlias = tuple[Sequence[Tensor], Callable[[], Any]]  # the tensors that a call will write, and the call
Name: TypeAlias = tuple[int, str]  # the number of a model, and the name of a tensor in it
Names: TypeAlias = Mapping[int, Name]  # by id of the tensor

_SAVED_APART = ("params", *bridge.MOMENTS_APART)

#: what an attribute of a type may be in a file: numbers are as good as each other
_LIKE: dict[type, Any] = dict.fromkeys((bool, int, float), bool | int | float | np.number)


# ---------------------------------------------------------------------------------------------- saving


def state_of(optimizer: Any, names: Names, writer: Encoder) -> Json:
    """An optimizer's real state, and the names of the parameters whose it is.

    Raises:
        TypeError: something cannot be saved; the message names it.
    """
    params, kind = bridge.optimizer_parameters(optimizer), type(optimizer).__name__
    bridge.take_apart(optimizer)
    state: dict[str, Json] = {"class": kind, "params": [_parameter(param, names, writer) for param in params]}
    if not bridge.is_netcl_optimizer(optimizer):
        if not callable(getattr(optimizer, "state_dict", None)) or not callable(
            getattr(optimizer, "load_state_dict", None)
        ):
            raise TypeError(f"{kind} is no optimizer of netcl's: give it state_dict() and load_state_dict()")
        return state | {"own": writer.value(optimizer.state_dict(), f"{kind}.state_dict()")}
    positions = {id(param): index for index, param in enumerate(params)}
    attributes: dict[str, Json] = {}
    by_parameter: dict[str, dict[str, Json]] = {}
    for name, value in vars(optimizer).items():
        if name in _SAVED_APART or bridge.is_kernel_store(name):
            continue
        if bridge.is_state_by_parameter(name, value, positions):
            # A parameter that has left the optimizer leaves its state behind: only that of those there is saved.
            by_parameter[name] = {
                str(positions[key]): _moment(item, params[positions[key]], name, kind, writer)
                for key, item in value.items()
                if key in positions
            }
        else:
            attributes[name] = writer.value(value, f"{kind}.{name}")
    return state | {
        "attributes": attributes,
        "by_parameter": by_parameter,
        "pending": _pending(optimizer, params, writer),
    }


def _parameter(param: Tensor, names: Names, writer: Encoder) -> Json:
    model = bridge.model_parameter(param)
    name = names.get(id(model))
    master = bridge.master_of(model) if param is model else param
    return {
        "name": None if name is None else list(name),
        "shape": list(param.shape),
        "held": writer.parameter(model, master) if name is None else None,
    }


def _moment(value: Any, param: Tensor, name: str, kind: str, writer: Encoder) -> Json:
    where = f"{kind}.{name}"
    if isinstance(value, np.ndarray):
        return {**writer.array(value, "numpy"), "place": "host"}
    if not isinstance(value, cl.Buffer):
        return {"value": writer.value(value, where), "place": "value"}
    if name == bridge.MOMENTS_8BIT:
        return {**writer.array(_buffer_to_host(value, param.queue, value.size, np.uint8), "numpy"), "place": "bytes"}
    if value.size != param.size * 4:
        raise TypeError(f"{where} holds a buffer of {value.size} bytes for a parameter of {param.size} elements")
    return {**writer.array(_buffer_to_host(value, param.queue, param.size), "float32"), "place": "device"}


def _buffer_to_host(buffer: cl.Buffer, queue: cl.CommandQueue, size: int, dtype: type = np.float32) -> Array:
    host: Array = np.empty(size, dtype)
    if size:
        cl.enqueue_copy(queue, host, buffer)
    return host


def _pending(optimizer: Any, params: Sequence[Tensor], writer: Encoder) -> Json:
    """Moments that AdamW has loaded and will place at its next step: a list in the order of the parameters."""
    pending = bridge.pending_moments(optimizer)
    if pending is None:
        return None
    if len(pending) != len(params):
        raise TypeError(
            f"{type(optimizer).__name__} has loaded the moments of {len(pending)} parameters, and has {len(params)} "
            "parameters by now: nobody knows whose they are. Change params before load_state_dict(), or after a step()"
        )
    return writer.value([tuple(pair) for pair in pending], "moments")


# ---------------------------------------------------------------------------------------------- whose state it is


def writes_to(optimizer: Any, state: Json, names: Names, decoder: Decoder, undo: Undo, where: str) -> Iterator[Write]:
    """The writes by which an optimizer gets its state back.

    Everything is decoded and checked here; the writes only assign, except for what ``load_state_dict`` of an optimizer
    of the user's does.

    Args:
        names: of the parameters of the models that are loaded into.
        undo: is told which optimizers of the user's have begun to load.
        where: which optimizer this is, for messages.

    Raises:
        CheckpointError: the state does not fit.
    """
    params, kind = bridge.optimizer_parameters(optimizer), type(optimizer).__name__
    if state["class"] != kind:
        raise CheckpointError(f"{decoder.path}: {where} was {state['class']}, here it is {kind}")
    named = "params" in state
    saved = state["params"] if named else _unnamed(state)
    here = [names.get(id(bridge.model_parameter(param))) for param in params]
    order = _matched(
        [None if entry["name"] is None else (int(entry["name"][0]), str(entry["name"][1])) for entry in saved],
        here if named else [None] * len(params),
        f"{decoder.path}: {where}, {kind},",
    )
    for entry, index in zip(saved, order, strict=True):
        if entry["shape"] != list(params[index].shape):
            raise CheckpointError(
                f"{decoder.path}: {_called(here[index])} of {where}, {kind}, had shape {tuple(entry['shape'])}, here "
                f"it is {tuple(params[index].shape)}"
            )
    if not named:
        _warn_of_order(here, params, names, f"{decoder.path}: {where}, {kind},")
    for entry, index in zip(saved, order, strict=True):
        if entry["held"] is not None:
            yield from parameter_writes(bridge.model_parameter(params[index]), entry["held"], decoder, where)
    if "own" in state:
        _require_order(order, f"{decoder.path}: {where}, {kind}, keeps its state itself, and its parameters")
        yield [], partial(undo.load_own, optimizer, decoder.value(state["own"]))
    else:
        yield [], _netcl_write(optimizer, params, state, order, decoder, where)


def parameter_writes(tensor: Tensor, saved: Json, decoder: Decoder, what: str) -> Iterator[Write]:
    """The writes that give a model's tensor, and the master it may have, what ``Encoder.parameter`` saved.

    Raises:
        CheckpointError: shapes differ, or one is of integers.
    """
    value, precise = saved["value"], saved["master"] or saved["value"]
    same = value["dtype"] == bridge.canonical_dtype(tensor.dtype)
    yield [tensor], partial(bridge.write_bytes, tensor, decoder.bits_for(value if same else precise, tensor, what))
    master = bridge.master_of(tensor)
    if master is not None:
        yield [master], partial(bridge.write_bytes, master, decoder.bits_for(precise, master, what))


def _unnamed(state: Json) -> list[Json]:
    """The parameters of a file of version 1, which says nothing but their shapes, and the values of some masters."""
    return [
        {"name": None, "shape": shape, "held": None if master is None else {"value": master, "master": master}}
        for shape, master in zip(state["shapes"], state["masters"], strict=True)
    ]


def _matched(saved: Sequence[Name | None], here: Sequence[Name | None], where: str) -> list[int]:
    """Returns where each saved parameter is now: by its name, and those without one in their order."""
    places: defaultdict[Name | None, deque[int]] = defaultdict(deque)
    for index, name in enumerate(here):
        places[name].append(index)
    order, gone = [], []
    for name in saved:
        if places[name]:
            order.append(places[name].popleft())
        else:
            gone.append(name)
    new = [name for name, indexes in places.items() for _ in indexes]
    if gone or new:
        raise CheckpointError(
            f"{where} had {len(saved)} parameters, here it has {len(here)}: "
            + differences(
                {
                    "not in the optimizer any more": [_called(name) for name in gone],
                    "not in the file": [_called(name) for name in new],
                }
            )
            + ". Build it from the parameters that it had, and pass models and optimizers in the order of the save"
        )
    return order


def _called(name: Name | None) -> str:
    if name is None:
        return "one that is in no model"
    return name[1] if name[0] == 0 else f"{name[1]} of model {name[0]}"


def _require_order(order: Sequence[int], what: str) -> None:
    if list(order) != list(range(len(order))):
        raise CheckpointError(
            f"{what} are in another order here, where item 0, 1, ... of what was saved belongs to params{list(order)}: "
            "build the optimizer from them in the order that it had"
        )


def _warn_of_order(here: Sequence[Name | None], params: Sequence[Tensor], names: Names, where: str) -> None:
    """A file without names is read in the order of the parameters: said where that is not the usual one."""
    places = {name: place for place, name in enumerate(names.values())}
    order = [places[name] for name in here if name is not None]
    if order != sorted(order) and len({tuple(param.shape) for param in params}) < len(params):
        warnings.warn(
            f"{where} was saved by an older clamp, which did not name parameters: their state is taken in the order "
            "that they have here, which is not the model's. If it was another one then, parameters of one shape have "
            "each other's state now.",
            UserWarning,
            stacklevel=5,  # who calls amp.load_checkpoint
        )


# ---------------------------------------------------------------------------------------------- netcl's state


def _netcl_write(
    optimizer: Any, params: Sequence[Tensor], state: Json, order: Sequence[int], decoder: Decoder, where: str
) -> Callable[[], None]:
    """Returns what gives one of netcl's optimizers its state; ``order`` says where each saved parameter is now."""
    where = f"{decoder.path}: {where}, {type(optimizer).__name__},"
    attributes = {name: decoder.value(value) for name, value in state["attributes"].items()}
    by_parameter = {
        name: {
            order[int(index)]: (decoder.value(x["value"] if x["place"] == "value" else x), x["place"])
            for index, x in items.items()
        }
        for name, items in state["by_parameter"].items()
    }
    _check_attributes(optimizer, attributes, by_parameter.keys(), order, where)
    fused = _fused_moments(state.get("fused"), [params[index].size for index in order], decoder)
    for index, moments in fused.items():
        for name, moment in zip(("_m_buf", "_v_buf"), moments, strict=True):
            by_parameter[name][order[index]] = moment, "device"
    arrays = [
        (name, index, value)
        for name, items in by_parameter.items()
        for index, (value, place) in items.items()
        if place != "value"
    ]
    pending = decoder.value(state["pending"])
    if pending is not None:
        pending = [pair for _, pair in sorted(zip(order, pending, strict=True), key=lambda placed: placed[0])]
        for index, (first, second) in enumerate(pending):
            arrays += [("fused moment", index, np.asarray(moment, np.float32)) for moment in (first, second)]
    _check_sizes(params, arrays, where)

    def apply() -> None:
        with reading(decoder.path, where):
            vars(optimizer).pop(bridge.ROUNDINGS, None)  # a run that has rounded nothing by chance has none
            vars(optimizer).update(attributes)
            for name, items in by_parameter.items():
                moments = {id(params[index]): _placed(params[index], *items[index]) for index in sorted(items)}
                setattr(optimizer, name, moments)
            bridge.set_moments(optimizer, pending)

    return apply


def _check_attributes(
    optimizer: Any, attributes: Mapping[str, Any], by_parameter: Collection[str], order: Sequence[int], where: str
) -> None:
    unknown = sorted((attributes.keys() | set(by_parameter)) - vars(optimizer).keys() - {bridge.ROUNDINGS})
    if unknown:
        raise CheckpointError(f"{where} has no {', '.join(unknown)} here")
    for name, value in attributes.items():
        now = getattr(optimizer, name, None)
        if None not in (now, value) and not isinstance(value, _LIKE.get(type(now), type(now))):
            raise CheckpointError(f"{where} {name} is {value!r:.80}, here it is {now!r:.80}")
        if isinstance(value, list) and len(value) == len(order):
            _require_order(order, f"{where} has one item of {name} for each parameter, and they")


def _check_sizes(params: Sequence[Tensor], arrays: Iterable[tuple[str, int, Any]], where: str) -> None:
    for name, index, value in arrays:
        in_8_bits, size = name == bridge.MOMENTS_8BIT, params[index].size
        if value.dtype.kind != "u" if in_8_bits else value.dtype.kind != "f":
            raise CheckpointError(f"{where} {name} of parameter {index} is of {value.dtype}")
        wanted = moments_bytes(max(1, size)) if in_8_bits else size
        if value.size != wanted:
            raise CheckpointError(f"{where} {name} of parameter {index} has {value.size} elements instead of {wanted}")


def _fused_moments(saved: Json, sizes: Sequence[int], decoder: Decoder) -> dict[int, list[Array]]:
    """The moments that an earlier clamp had together, by the parameters' numbers when they were saved, as ``sizes``."""
    if saved is None:
        return {}
    if "m_flat" not in saved:
        return {int(index): [decoder.array(first), decoder.array(second)] for index, (first, second) in saved.items()}
    # Version 1 has them as netcl does: in one array, each at a multiple of its alignment.
    flat = [decoder.array(saved[name]) for name in ("m_flat", "v_flat")]
    moments, at = {}, 0
    for index in saved["parameters"]:
        moments[int(index)] = [array[at : at + sizes[index]] for array in flat]
        at += bridge.fused_size(sizes[index])
    return moments


def _placed(param: Tensor, value: Any, place: str) -> Any:
    if place == "value":
        return value
    if place == "host":
        return value.copy()
    return bridge.placed(param, value, np.uint8 if place == "bytes" else np.float32)
