"""16-bit parameters and their fp32 masters.

The model's parameter (the *model*) is 16-bit: forward reads it without a cast. The tensor in ``optimizer.params`` (the
*master*) is float32: ``step()`` updates it, and the model is rewritten from it on the device. netcl makes such masters
too, for float16 parameters, but never gives them a gradient. Some masters have no memory of their own (parts.py).

After every scaled pass, and before every step, a model and its master hold one and the same float32 gradient, so that
clipping finds it on either, and a gradient cleared or replaced on either counts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from clamp import bridge
from clamp.bridge import HALF_DTYPES, Tensor
from clamp.interrupts import contextmanager, of_threads, undoing, uninterrupted
from clamp.opencl.host_steps import host_step, recorder
from clamp.ops.cast import cast, cast_into
from clamp.ops.optimizer_step import PARTS, Copy, mixed
from clamp.params import gradient_marks, lost_updates
from clamp.params.parts import KEEPS, MasterInParts, make_whole, put_in_parts
from clamp.params.weight_cache import weight_cache
from clamp.params.writes import writes

Pair: TypeAlias = tuple[Tensor, Tensor]  # what the optimizer steps, what the model reads; one tensor if fp32


# ---------------------------------------------------------------------------------------------- making them


def narrow(
    params: Sequence[Tensor],
    dtype: str | Sequence[str],
    optimizers: Sequence[Any] = (),
    *,
    keep_master: bool | str = True,
    gradient_dtype: str | None = None,
    seed: int = 0,
) -> None:
    """Turns float32 parameters into 16-bit ones in place; their old storage becomes the masters'.

    Parameters that are 16-bit already keep their masters (and get one if they have none), and take the dtype and the
    settings given here: of the other 16-bit dtype they become anew from the masters. Those of another dtype, and
    those on netcl's numpy backend, are left alone.

    Args:
        params: the model's parameters.
        dtype: ``"float16"`` or ``"bfloat16"``; or that of each.
        optimizers: built before, they step the masters from now on, with the state that they have.
        keep_master: how parameters are kept from step to step, one of ``KEEPS``. False keeps no precision: the master
            is rounded to ``dtype`` after each step.
        gradient_dtype: dtype of the parameters' gradients from backward. If not given, their own; or of those that are
            kept in 16-bit parts float32, in which steps read them, so that a 16-bit one never lies beside it.
        seed: of what ``"stochastic"`` rounds by, together with a parameter's place among these.
    """
    dtypes = [dtype] * len(params) if isinstance(dtype, str) else dtype
    for place, (param, wanted) in enumerate(zip(params, dtypes, strict=True)):
        now = bridge.canonical_dtype(param.dtype)
        if now not in ("float32", *HALF_DTYPES) or not bridge.on_device(param):
            continue
        with uninterrupted():  # until the master, which alone has the parameter's value, is known to it
            # The cast comes before any storage is taken: where there is no memory for it, the parameter is as it was.
            if now == "float32":
                narrowed = cast(param, wanted)
                master = bridge.take_storage(param)
                master.requires_grad = param.requires_grad
                share_gradient(master, param, param.grad)
                bridge.give_storage(param, narrowed)
            else:
                master = master_for(param)
                if now != wanted:
                    narrowed = cast(master, wanted)
                    bridge.take_storage(param)  # a part of some masters
                    bridge.give_storage(param, narrowed)
            _link(master, param, KEEPS[keep_master], mixed(seed, place))
            bridge.set_gradient_dtype(param, gradient_dtype or ("float32" if PARTS[KEEPS[keep_master]] else None))
            weight_cache.drop(param)
            for optimizer in optimizers:
                for index, stepped in enumerate(optimizer.params):
                    if stepped is param:
                        bridge.replace_parameter(optimizer, index, master)


def master_for(model: Tensor) -> Tensor:
    """The master of a 16-bit parameter; made from its value if there is none yet."""
    master = bridge.master_of(model)
    if master is None:
        master = cast(model, "float32")
        master.requires_grad = model.requires_grad
        _link(master, model)
    return master


def is_rounded(master: Tensor) -> bool:
    """Returns whether a master holds no more than its 16-bit parameter from one step to the next."""
    parts: Copy | None = getattr(master, "parts", None)
    return parts is not None and parts.keeps == "rounded"


def require_kept(given: object, name: str) -> bool | str:
    """Returns how parameters are kept from step to step, one of ``KEEPS``; with fp32 masters if nothing was given.

    Args:
        name: of what was given, for the message.

    Raises:
        TypeError: it is neither a switch nor a text.
        ValueError: an unknown text.
    """
    if given is None or isinstance(given, bool):
        return given is not False
    if isinstance(given, str) and given in KEEPS:
        return given
    names = ", ".join(repr(x) for x in KEEPS if isinstance(x, str))
    error = ValueError if isinstance(given, str) else TypeError
    raise error(f"{name} is True or False, or one of {names}, got {given!r}")


def require_steppable(optimizers: Iterable[Any], keeps: bool | str) -> None:
    """Raises where an optimizer cannot step parameters that are kept so.

    Raises:
        TypeError: its steps are not made in one launch over all parameters, and these are to be in parts.
    """
    for optimizer in optimizers if PARTS[KEEPS[keeps]] else ():
        if not bridge.has_rule(optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} cannot step 16-bit parameters with master_weight={keeps!r}: netcl's own "
                "SGD, Momentum, Adam and AdamW can, classes derived from them cannot. Use one of these, or fp32 "
                "masters: master_weight=True"
            )


#: 16-bit parameters with a master, by id of their storage
_models: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def _link(master: Tensor, model: Tensor, keeps: str = "copy", key: int = 0) -> None:
    bridge.link_master(master, model)
    _models[id(model.buffer)] = model
    lost_updates.watch(master, keeps == "rounded")
    if PARTS[keeps]:
        put_in_parts(master, model, keeps, key)
        return
    make_whole(master)
    master.parts = Copy(model, keeps)
    if keeps == "rounded":
        cast_into(model, master)


# ---------------------------------------------------------------------------------------------- optimizers


def pairs(optimizer: Any) -> list[Pair]:
    """The tensors that ``optimizer.step()`` updates, each with the tensor that the model reads.

    What a user has added to ``params`` meanwhile is taken in: 16-bit parameters are replaced by their masters,
    and an optimizer of netcl's gets state for new parameters.

    Raises:
        TypeError: the optimizer has no ``params``, or they are not tensors.
    """
    owned = bridge.is_netcl_optimizer(optimizer)
    found: list[Pair] = []
    for index, param in enumerate(bridge.optimizer_parameters(optimizer)):
        model = bridge.model_parameter(param)
        if model.dtype not in HALF_DTYPES:
            found.append((param, model))
            continue
        master = bridge.master_of(model)
        if master is None and model is not param:  # netcl made this master before clamp was there
            _link(param, model)
            master = param
        elif master is None and owned and bridge.on_device(param):
            master = master_for(param)
        if master is not None and master is not param:
            bridge.replace_parameter(optimizer, index, master)
        # Without one an optimizer of the user's steps 16-bit tensors itself.
        found.append((param, param) if master is None else (master, bridge.model_parameter(master)))
    if owned:
        bridge.add_missing_state(optimizer)
    return found


def stepped(optimizer: Any) -> list[Tensor]:
    """The tensors of `pairs`, of what nobody has handed to clamp: what is not netcl's is left as it is, since it may be
    no optimizer, for all that it has ``params`` and a ``step()``."""
    if bridge.is_netcl_optimizer(optimizer):
        return [tensor for pair in pairs(optimizer) for tensor in pair]
    params = [param for param in optimizer.params if isinstance(param, Tensor)]
    models = [bridge.model_parameter(param) for param in params]
    return [*params, *models, *(master for model in models if (master := bridge.master_of(model)) is not None)]


def master_params(optimizer: Any) -> list[Tensor]:
    """The fp32 tensors that ``optimizer.step()`` updates: the parameters, or the masters of 16-bit ones. These have the
    gradients of theirs in float32, also after a backward of a loss that was not scaled, which ``optimizer.params`` get
    in the step; where they are multiplied by a loss scale they come at the end of ``with handle.scale_loss(...)``.

    Raises:
        TypeError: the optimizer has no ``params``.
    """
    return [master for master, _ in with_true_gradients(optimizer)]


def with_true_gradients(optimizer: Any) -> list[Pair]:
    """``pairs``, each with one float32 gradient for both, unless it is multiplied by a loss scale."""
    found = pairs(optimizer)
    for master, model in found:
        if model is not master and gradient_marks.scale_of(model.grad) is None:
            gather(master, model)
    return found


def split(optimizer: Any) -> list[Pair]:
    """The masters of an optimizer, each with its 16-bit parameter; none of an object without ``params``."""
    if not hasattr(optimizer, "params"):
        return []
    return [(master, model) for master, model in pairs(optimizer) if model is not master]


def step_anew(optimizer: Any, run: Callable[[], Any], more: Iterable[Tensor] = ()) -> Any:
    """Runs what steps an optimizer; in a recording a host step: every replay makes it anew, with the learning rate, the
    step count and the overflow of the day, on the gradients that the optimizer's parameters had here.

    Args:
        more: tensors that are no parameters of the optimizer, and whose gradients it reads as well.

    Raises:
        RuntimeError: a graph steps it, and its ``build`` is not done.
    """
    if building.optimizers and any(optimizer is x for x in building.optimizers):
        raise RuntimeError(
            f"build of a Graph has called {type(optimizer).__name__}.step(), and the graph steps its optimizers itself "
            "when build is done, so that they would step twice: leave it out"
        )
    if recorder() is None:
        return run()
    # In the step a gradient would be made anew each time, and the next one goes back to this one.
    found = with_true_gradients(optimizer) if hasattr(optimizer, "params") else []
    params = [tensor for pair in found for tensor in pair]
    try:
        return host_step(gradient_marks.on_gradients([*params, *more], run))
    finally:
        weight_cache.clear()  # one that was skipped now, after which copies of weights stay, may move these in a replay


class _Building(threading.local):
    optimizers: Sequence[Any] = ()  # of the graphs whose build is running in this thread


building = of_threads(_Building())


def gathered(optimizer: Any, found: list[Pair] | None = None) -> list[Pair]:
    """Gives masters the gradients for their optimizer's ``step``. Returns what ``split`` does, which is taken from
    ``found`` if it was asked already."""
    found = split(optimizer) if found is None else found
    gradient_marks.require_ready(
        getattr(optimizer, "params", ()),
        f"{type(optimizer).__name__}.step()",
        "leave `with handle.scale_loss(...)` first, or call scaler.step(optimizer). A parameter that another "
        "optimizer's loss reaches as well gets its gradient too: clear it with zero_grad() before your own backward, "
        "or name both optimizers in scale_loss(loss, [first, second]).",
    )
    for master, model in found:
        gather(master, model)
    return found


def stepping(found: Sequence[Pair], run: Callable[[], Any]) -> Any:
    """Runs an optimizer's own ``step``, which writes masters: ``rewriting`` after it brings parameters up to them.

    Args:
        found: what ``gathered`` returned.
    """
    if not found:
        return run()
    for master, model in found:
        bridge.freeze_like(master, model)
    _behind.update(id(master) for master, _ in found)
    with bridge.without_write_back([master for master, _ in found]):
        return run()


#: while their optimizer steps, ids of masters whose 16-bit parameters have not been rewritten yet
_behind: set[int] = set()


def copies_of(stepped: Sequence[Tensor]) -> list[Copy | None]:
    """For each parameter that is being stepped: the 16-bit one that whoever steps it is to write as well. None where
    there is none, or the step is to be measured before it is rounded."""
    if not _behind:
        return [None] * len(stepped)
    return [param.parts if id(param) in _behind and not lost_updates.is_expected(param) else None for param in stepped]


def were_rewritten(stepped: Iterable[Tensor]) -> None:
    """Whoever steps these parameters writes the 16-bit ones as well, as ``copies_of`` and ``rewriting`` say."""
    if _behind:
        _behind.difference_update(map(id, stepped))


def rewriting(stepped: Sequence[Tensor], optimizer: Any) -> list[Callable[[], None]]:
    """Returns calls that rewrite the 16-bit parameters of these, whatever the optimizer's ``step`` made of them, unless
    others do. Of a master that is stepped several times (an optimizer was given tied weights twice) after each time."""
    if not _behind:
        return []
    turn = bridge.roundings(optimizer) + 1
    found = [
        (master, master.parts.tensor)
        for master in stepped
        if id(master) in _behind and master.grad is not None and not bridge.has_frozen_mark(master)
    ]
    calls: list[Callable[[], None]] = [partial(write_back, master, model, turn) for master, model in found]
    if measured := [pair for pair in found if lost_updates.is_expected(pair[0])]:
        calls.insert(0, partial(lost_updates.measure, measured))
    if any(isinstance(master, MasterInParts) and master.parts.keeps == "stochastic" for master, _ in found):
        calls.append(partial(setattr, optimizer, bridge.ROUNDINGS, turn))
    return calls


def write_back(master: Tensor, model: Tensor, turn: int | None = None) -> None:
    """Rewrites a 16-bit parameter from its master.

    Args:
        turn: as of ``MasterInParts.split``.
    """
    if isinstance(master, MasterInParts):
        master.split(turn)
        return
    cast_into(master, model)
    if is_rounded(master):
        cast_into(model, master)


def written(buffer: Any) -> None:
    """A user has written into this storage: what was derived from it, or known of it, is stale, and a master follows
    its parameter, or the parameter its master."""
    writes.note(buffer)
    weight_cache.drop_buffer(buffer)
    if not _models:
        return
    model = _models.get(id(buffer))
    if model is not None and model.buffer is buffer and model.dtype in HALF_DTYPES:
        cast_into(model, master_for(model))
        return
    for model in list(_models.values()):
        master = bridge.master_of(model)
        if model.dtype not in HALF_DTYPES or id(master) in _behind:  # it shows its master, or is rewritten later
            continue
        if master is None or buffer is None:
            continue
        if buffer is not (master.memory if isinstance(master, MasterInParts) else master.buffer):
            continue
        if isinstance(master, MasterInParts) and master.parts.keeps != "remainder":  # which loses nothing
            cast_into(master, model)  # what it holds counts, in full, until its next step
        else:
            write_back(master, model)
        writes.note(model.buffer)
        weight_cache.drop(model)
        return


# ---------------------------------------------------------------------------------------------- gradients


def gather(master: Tensor, model: Tensor) -> None:
    """One float32 gradient for both: what backward left on the model, or what a user put on either."""
    ours, theirs, last = master.grad, model.grad, gradient_marks.last_shared(master)
    if ours is theirs or theirs is last:
        grad = ours
    elif ours is last or ours is None:
        grad = theirs
    else:
        grad = ours if theirs is None else gradient_marks.added(ours, theirs)
    if grad is not None and grad.dtype in HALF_DTYPES:
        grad = widened(grad)
    share_gradient(master, model, grad)


def widen_gradients(params: Iterable[Tensor]) -> bool:
    """Gives float32 parameters 16-bit gradients in float32, as their optimizer's step reads them; whether there were
    any. A user's own may be of any dtype: ``p.grad = ag.matmul_op(...).value``."""
    found = [
        param
        for param in params
        if getattr(param.grad, "dtype", None) in HALF_DTYPES and param.dtype == "float32" and bridge.on_device(param)
    ]
    wide = {id(param.grad): widened(param.grad) for param in found}
    for param in found:
        param.grad = wide[id(param.grad)]
    return bool(found)


def widened(grad: Tensor) -> Tensor:
    """A 16-bit gradient in float32, with its mark."""
    wide = cast(grad, "float32")
    gradient_marks.set_mark(wide, gradient_marks.mark_of(grad))
    return wide


def share_gradient(master: Tensor, model: Tensor, grad: Tensor | None) -> None:
    """Gives a master and its parameter one gradient; they may be the same tensor."""
    master.grad = model.grad = grad
    if model is not master:
        gradient_marks.note_shared(master, grad)


# ---------------------------------------------------------------------------------------------- saving


@contextmanager
def showing_masters(params: Iterable[Tensor], *, load: bool = False) -> Iterator[None]:
    """Inside the ``with``, 16-bit parameters are float32: their masters', or widened copies where there is none.

    Args:
        load: whether what is written to them inside stays, in master and model.
    """
    narrow = [param for param in params if param.dtype in HALF_DTYPES and bridge.on_device(param)]
    wide = [bridge.master_of(param) or cast(param, "float32") for param in narrow]
    with undoing() as undo:
        for param, master in zip(narrow, wide, strict=True) if load else ():  # each, where that of another fails
            undo.callback(weight_cache.drop, param)
            undo.callback(write_back, master, param)
        for param, master in zip(narrow, wide, strict=True):
            undo.enter_context(bridge.showing(param, master))
        yield
