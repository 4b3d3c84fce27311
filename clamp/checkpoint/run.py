"""A training run in one file: parameters, optimizer states, loss scales, and what else the caller wants to keep.

Models are saved by the names of their tensors, optimizers by the names of their parameters and by their attributes
(optimizers.py; file.py has the file). A file is read and checked as a whole before anything is
changed, and what is changed is put back if the rest fails (undo.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import wrapt

from clamp import bridge, session
from clamp.bridge import Tensor
from clamp.checkpoint.file import CheckpointError, Decoder, Encoder, Json, differences, read, reading, write
from clamp.checkpoint.optimizers import Names, Write, parameter_writes, state_of, writes_to
from clamp.checkpoint.undo import Undo
from clamp.params import masters
from clamp.params.weight_cache import weight_cache
from clamp.scaling.loss_scale import NoLossScale

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------- saving


def save_checkpoint(path: str | os.PathLike[str], models: Any, optimizers: Any = (), **extra: Any) -> None:
    """Writes a training run to one file, from which it goes on bit by bit: call it after ``optimizer.step()``.

    Args:
        path: of the file; one that is there is replaced, at once and as a whole.
        models: a netcl module, an object with ``parameters()``, a list or dict of tensors, or a list of these; a
            dict of modules is one model, whose names begin with its keys. Parameters, fp32 masters and buffers are
            saved.
        optimizers: one or a list. Of netcl's all state and hyperparameters are saved, by their attributes and the names
            of the parameters in the models; another one needs ``state_dict()`` and ``load_state_dict()``.
        extra: numbers, texts, numpy arrays, and dicts, lists and tuples of these: history, epoch,
            ``np.random.get_state()`` (dropout draws from it), ``vars(scheduler)``.

    The loss scales of the active handle are saved too. Half-accumulated gradients are not.

    Raises:
        TypeError: something cannot be saved; the message names it.
        OSError: the file cannot be written; what was there stays.
    """
    handle = session.active_handle()
    scalers = handle.scalers if handle is not None else []
    off = [f"loss_scaler{index}" for index, scaler in enumerate(scalers) if isinstance(scaler, NoLossScale)]
    amp_state = {"scales": session.state_dict(), "off": off} if scalers else None
    writer = Encoder()
    named, stepped = [dict(_named(model)) for model in _listed(models, "models")], _optimizers(optimizers)
    # netcl's optimizers know a master that they made, its parameter does not.
    made = {id(bridge.model_parameter(p)): p for o in stepped for p in bridge.optimizer_parameters(o)}
    content = {
        "models": [
            {name: writer.parameter(tensor, _master(tensor, made)) for name, tensor in tensors.items()}
            for tensors in named
        ],
        "optimizers": [state_of(optimizer, _names(named), writer) for optimizer in stepped],
        "amp": writer.value(amp_state, "amp") if amp_state is not None else None,
        "extra": {name: writer.value(value, name) for name, value in extra.items()},
    }
    write(Path(path), content, writer.arrays)


def _master(tensor: Tensor, made: Mapping[int, Tensor]) -> Tensor | None:
    stepped = made.get(id(tensor), tensor)
    return bridge.master_of(tensor) or (None if stepped is tensor else stepped)


# ---------------------------------------------------------------------------------------------- loading


def load_checkpoint(path: str | os.PathLike[str], models: Any, optimizers: Any = ()) -> dict[str, Any]:
    """Goes on where ``save_checkpoint`` left off, in the file ``path``. Pass the same models and optimizers, in order.

    An optimizer's parameters may come in another order: their state is found by their names in the models. Whatever
    fails, an optimizer's own ``load_state_dict`` or an interrupt included, is undone.

    A run may go on at another level or dtype: 16-bit parameters take the values of float32 ones and the other way
    round, through their masters where there are any. Loss scales are restored if AMP is active; where the saved run
    had no loss scaling (bfloat16, float32), a dynamic scale starts from its beginning.

    Returns:
        The ``extra`` of ``save_checkpoint``.

    Raises:
        CheckpointError: the file is no checkpoint, is damaged or truncated, or does not fit. Nothing was changed.
        FileNotFoundError: there is no such file.
        TypeError: what was passed is no model, or no optimizer.
    """
    content, arrays = read(Path(path))
    decoder, undo = Decoder(arrays, path), Undo()
    loaded, stepped = _listed(models, "models"), _optimizers(optimizers)
    named = [dict(_named(model)) for model in loaded]
    for optimizer in stepped:
        masters.pairs(optimizer)  # masters are made before the values that they are to get arrive
    with reading(path, "its text"):
        extra = {}
        for name, value in content["extra"].items():
            with reading(path, name):
                extra[name] = decoder.value(value)
        writes = [*_model_writes(named, content, decoder)]
        for number, optimizer, state in _with_saved(stepped, content, "optimizers", decoder):
            where = f"optimizer {number}"
            with reading(path, where):
                writes += writes_to(optimizer, state, _names(named), decoder, undo, where)
        with reading(path, "loss scales"):
            amp_state = decoder.value(content["amp"])
            if amp_state and session.active_handle():
                states = _scales_for(path, amp_state)
                restore = session.require_handle()._scaling.restore
                undo.keep(partial(restore, session.state_dict()))
                writes.append(([], partial(_restore_scales, path, restore, states)))
    undo.keep_state(tensor for tensors, _ in writes for tensor in tensors)
    undo.keep_state(stepped)
    try:
        for _, write_now in writes:
            write_now()
    except BaseException as error:
        undo.put_back(error)
        raise
    finally:
        weight_cache.clear()
        for model in loaded:
            bridge.invalidate_derived(model)
    return extra


def _restore_scales(path: Any, restore: Callable[[Any], object], states: Any) -> None:
    with reading(path, "loss scales"):
        restore(states)


def _scales_for(path: str | os.PathLike[str], state: Mapping[str, Any]) -> dict[str, Any]:
    now, saved = session.state_dict(), state["scales"]
    if now.keys() != saved.keys():
        raise CheckpointError(
            f"{path}: the checkpoint has {', '.join(sorted(saved))}, this handle has {', '.join(now)}: "
            f"wrap the same optimizers with the same num_loss before loading"
        )
    return {name: now[name] if name in state["off"] else s for name, s in saved.items()}


def _with_saved(passed: Sequence[T], content: Json, what: str, decoder: Decoder) -> Iterator[tuple[int, T, Json]]:
    """The models or optimizers that were passed, by their numbers, each with what was saved of it."""
    saved = content[what]
    if len(saved) != len(passed):
        raise CheckpointError(f"{decoder.path} holds {len(saved)} {what}, {len(passed)} were passed")
    return zip(count(), passed, saved)


def _model_writes(models: Sequence[Mapping[str, Tensor]], content: Json, decoder: Decoder) -> Iterator[Write]:
    for number, named, state in _with_saved(models, content, "models", decoder):
        missing = sorted(named.keys() - state.keys())
        unknown = sorted(name for name in state.keys() - named.keys() if _POSITIONS not in name)
        if missing or unknown:
            raise CheckpointError(
                f"{decoder.path}: model {number} differs from the saved one: "
                + differences({"tensors not in the file": missing, "tensors not in the model": unknown})
            )
        for name, tensor in named.items():
            with reading(decoder.path, name):
                yield from [*parameter_writes(tensor, state[name], decoder, name)]


# ---------------------------------------------------------------------------------------------- what is saved


_POSITIONS = "._pos_cache."  # of tokens, which attention makes as it needs them: earlier versions saved those, too


def _listed(x: Any, what: str) -> list[Any]:
    """One thing or a list of them as a list; a list of tensors is one model."""
    if x is None:
        return []
    if isinstance(x, list | tuple) and not (what == "models" and all(isinstance(item, Tensor) for item in x)):
        return list(x)
    return [x]


def _optimizers(x: Any) -> list[Any]:
    """The optimizers themselves, where ``handle.wrap_optimizer`` has put something around them."""
    return [item.__wrapped__ if isinstance(item, wrapt.ObjectProxy) else item for item in _listed(x, "optimizers")]


def _names(models: Sequence[Mapping[str, Tensor]]) -> Names:
    """Returns what each tensor is called in the first of the models that it is in."""
    names: dict[int, tuple[int, str]] = {}
    for number, named in enumerate(models):
        for name, tensor in named.items():
            names.setdefault(id(tensor), (number, name))
    return names


def _named(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model with their names: a netcl module's, a dict's, a list's, or those of ``parameters()``."""
    if isinstance(model, bridge.Module | list | tuple | dict):
        yield from bridge.module_tensors(model)
    elif callable(getattr(model, "parameters", None)):
        yield from bridge.module_tensors(list(model.parameters()))
    else:
        raise TypeError(
            f"a checkpoint holds netcl modules, objects with parameters(), and lists or dicts of tensors, not a "
            f"{type(model).__name__}"
        )
