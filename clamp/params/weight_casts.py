"""The 16-bit copies of weights: made together, ten a launch, for all that a forward asks for.

The weight cache is empty when an iteration begins, and a forward asks for its weights one after the other. The first
brings those along that followed it when it was the first before; a weight that is new, or was passed over last time, is
cast by itself and comes along from then on. A copy that nobody asks for is forgotten with the others.

Copies always get new storage: a graph of an earlier iteration holds the old ones for a backward that may still come.
They are made in the forward, and not by the optimizer's step, which has the new values at hand: whoever writes
parameters between step and forward, be it by means that clamp does not see, finds no copy there that would go stale.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

from clamp.bridge import Tensor
from clamp.ops.cast import cast
from clamp.ops.optimizer_step import cast_all
from clamp.params.weight_cache import weights

_Asked: TypeAlias = list[weakref.ref[Tensor]]  # weights of an iteration, in the order in which they were asked for

_MOST = 64  # weights that were the first to be asked for


class _Thread(threading.local):
    def __init__(self) -> None:
        self.iterations: dict[str, tuple[int, _Asked]] = {}  # this one, by dtype, and how often the cache was cleared


_thread = _Thread()
_followers: dict[tuple[int, str], _Asked] = {}  # by id of the weight that was asked for first, and dtype


def weight_cast(weight: Tensor, dtype: str, report: Callable[[str, str], None]) -> Tensor:
    """A weight's value in another dtype, made once for as long as the weight is not written.

    Args:
        report: called with the two dtypes at the first use of a copy.
    """

    def make(source: Tensor) -> Tensor:
        report(source.dtype, dtype)
        return _copy_of(source, dtype) if source.dtype == "float32" else cast(source, dtype)

    return weights.get(weight, ("cast", dtype), make)


def _copy_of(weight: Tensor, dtype: str) -> Tensor:
    clears, asked = _thread.iterations.get(dtype, (-1, []))
    together: Sequence[Tensor] = []
    if clears != weights.clears:
        together, asked = _followers_of(weight, dtype), []
        _thread.iterations[dtype] = weights.clears, asked
        _followers[id(weight), dtype] = asked
    asked.append(weakref.ref(weight))
    copy = weights.take(weight, ("brought along", dtype))
    if copy is None:
        copy, *others = cast_all([weight, *together], dtype)
        for follower, other in zip(together, others, strict=True):
            weights.put(follower, ("brought along", dtype), other)
    return copy


def _followers_of(first: Tensor, dtype: str) -> list[Tensor]:
    """The weights that were asked for when this one was the first, but for itself."""
    queue, known = first.queue, _followers.get((id(first), dtype), [])
    if not known or known[0]() is not first:  # another tensor had its id
        if len(_followers) >= _MOST:
            _followers.clear()
        return []
    living = {id(weight): weight for ref in known[1:] if (weight := ref()) is not None and weight is not first}
    return [weight for weight in living.values() if weight.dtype == "float32" and weight.queue is queue]
