"""The steps of netcl's SGD, Momentum, Adam and AdamW, which update all parameters, and the 16-bit copies of those that
are masters, in one launch for 100 of them.

The bits are those of netcl's own step, and so is the state, which stays where netcl keeps it: ``state_dict``,
checkpoints, schedulers, and netcl's step after AMP has ended, find what they would find. What is not as these launches
need it (a class derived from netcl's, parameters that share memory, gradients of another dtype) is stepped by netcl.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops.optimizer_step import Copy, MultiUpdate
from clamp.params import masters


class _Prepared:
    """An optimizer's launches, for as long as parameters, state and copies are the same objects.

    Attributes:
        places: what ``_places_of`` the parameters gave.
        key: rule, state and copies.
        written: the ids of the parameters' buffers.
    """

    def __init__(self, update: bridge.Update, params: Sequence[Tensor], copies: Sequence[Copy | None]) -> None:
        self.places, self.key = _places_of(params), _key_of(update, copies)
        self.written = frozenset([id(param.buffer) for param in params])
        self._held = list(params), [param.buffer for param in params], update.kept, copies  # so that ids stay unique
        self.launches = MultiUpdate(update.rule, params, update.states(), copies)


_prepared: weakref.WeakKeyDictionary[Any, _Prepared] = weakref.WeakKeyDictionary()


def step(own: Callable[..., Any], optimizer: Any, *args: Any) -> Any:
    """Steps an optimizer.

    Args:
        own: netcl's step of its class.
        args: of the step: with any, AdamW's ``max_norm``, it is left to netcl.
    """
    params = bridge.stepped(optimizer)
    prepared = _prepared.get(optimizer)
    if args or not _fit(params, prepared):
        return own(*args)
    update = bridge.begin_update(optimizer, params)
    if update is None:
        return own(*args)
    copies = masters.copies_of(params)
    if prepared is None or prepared.places != _places_of(params) or prepared.key != _key_of(update, copies):
        prepared = _prepared[optimizer] = _Prepared(update, params, copies)
    prepared.launches.run(update.numbers, [param.grad for param in params])
    masters.were_rewritten([param for param, copy in zip(params, copies, strict=True) if copy is not None])
    return None


def _places_of(params: Sequence[Tensor]) -> list[int]:
    return [id(x) for param in params for x in (param, param.buffer, param.queue)]


def _key_of(update: bridge.Update, copies: Sequence[Copy | None]) -> list[Any]:
    written = [copy and (id(copy.tensor), id(copy.tensor.buffer), copy.tensor.dtype, copy.rounds) for copy in copies]
    return [update.rule, *map(id, update.kept), *written]


def _fit(params: Sequence[Tensor], prepared: _Prepared | None) -> bool:
    """Whether these parameters and their gradients are what the launches take."""
    if not params:
        return False
    if prepared is None or prepared.places != _places_of(params):
        if not (all(map(bridge.can_update, params)) and all(param.queue is params[0].queue for param in params)):
            return False
        if not _are_apart([param.buffer for param in params]):
            return False
        written = frozenset([id(param.buffer) for param in params])
    else:
        written = prepared.written
    return all(_is_gradient(param.grad, param, written) for param in params)


def _is_gradient(grad: Any, param: Tensor, written: frozenset[int]) -> bool:
    return (
        isinstance(grad, Tensor)
        and grad.dtype == "float32"
        and grad.buffer is not None
        and id(grad.buffer) not in written
        and (grad.shape == param.shape or grad.size == param.size)
    )


def _are_apart(storages: Sequence[Any]) -> bool:
    """Whether no two of these share memory: netcl's step would update it twice, one after the other."""
    spans: dict[int, list[tuple[int, int]]] = {}
    try:
        for storage in storages:
            whole, begin = _place(storage)
            spans.setdefault(whole, []).append((begin, begin + storage.size))
    except cl.LogicError:  # Intel's runtime does not name the whole any more once its owner has let go of it
        return False
    ordered = [sorted(of_whole) for of_whole in spans.values()]
    return all(end <= begin for of_whole in ordered for (_, end), (begin, _) in pairwise(of_whole))


def _place(storage: Any) -> tuple[int, int]:
    """The memory that storage is a part of, and where that begins; shared virtual memory is one."""
    if isinstance(storage, cl.SVM):
        return 0, storage.svm_ptr
    whole: Any = storage.get_info(cl.mem_info.ASSOCIATED_MEMOBJECT) or storage
    return whole.int_ptr, storage.offset
