"""An op computed once more, in float32, from the very numbers that it was given: what it would have been without AMP.

What differs from it is the op's own error, whatever errors its inputs have brought along.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor, TensorLike
from clamp.casting.arguments import mapped
from clamp.casting.policy_table import default_table
from clamp.casting.regions import Region, called_in, casting_in, current_region
from clamp.casting.results import forward_again
from clamp.debug.callsite import call_here
from clamp.debug.errors import with_digits_of
from clamp.debug.identity import INSERTED
from clamp.functions.activations import LAST_SEED
from clamp.ops.cast import cast, cast_into
from clamp.patching.wrap import netcl_wrapper, owned_wrapper, user_wrapper

_SEED = 2  # where dropout takes its seed


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function, which can be made again.

    Attributes:
        run: calls it, behind its wrapper.
        args, kwargs: what it has got.
        region: the one around it, in float32.
    """

    run: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    region: Region

    def copied(self, copy: Callable[[TensorLike], TensorLike] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What ``run`` is to be given, inside ``casting_in(call.region)``: ``args`` and ``kwargs`` with their tensors
        copied, by default to float32."""
        return mapped(self.args, copy or copy_of), mapped(self.kwargs, copy or copy_of)


@dataclass(frozen=True, eq=False)
class Twin:
    """The float32 counterpart of a result.

    Attributes:
        made: it.
        call: made it.
        number: of the results of the call, which.
    """

    made: TensorLike
    call: Call
    number: int


class Twins:
    """The float32 counterparts of results, made as an observer is told of these.

    A function is called again with the arguments that it has got, copied, widened and cut from the graph, so that it
    may write into them, and so that its graph ends there.
    """

    def __init__(self) -> None:
        self._open: list[tuple[FrameType, Iterator[Twin]]] = []  # calls that have not ended, innermost last
        self._calling: FrameType | None = None
        self._found: list[TensorLike] = []

    def takes(self, made: TensorLike) -> bool:
        """Whether a result is that of a counterpart being computed: of nobody's interest."""
        if self._calling is None:
            return False
        frame = call_here()
        is_its_own = frame is not None and frame.f_back is self._calling
        if is_its_own and getattr(made, "op_name", None) not in INSERTED:
            self._found.append(made)
        return True

    def of_result(self) -> Twin | None:
        """The counterpart of what has been made just now; None if the function cannot be called again."""
        frame = call_here()
        self._open = [(one, rest) for one, rest in self._open if _is_running(one)]
        if frame is None:
            return None
        for one, rest in self._open:
            if one is frame:
                return next(rest, None)
        call = call_of(frame.f_locals)
        made = self._compute(call, copy_of) if call is not None else []
        twins = iter([Twin(one, call, number) for number, one in enumerate(made)] if call is not None else [])
        self._open.append((frame, twins))
        return next(twins, None)

    def of_rounded(self, twin: Twin, dtype: str) -> TensorLike | None:
        """What would be a result's counterpart, had the function's float32 arguments as few digits as a dtype has."""
        made = self._compute(twin.call, partial(copy_of, dtype=dtype))
        return made[twin.number] if len(made) > twin.number else None

    def gradients_of(self, made: TensorLike, grad: Tensor) -> list[Tensor | None]:
        """What a counterpart gives for the gradient that its op was given; nothing if it has no graph."""
        if not isinstance(made, Node) or made.grad_fn is None:
            return []
        self._calling = sys._getframe()
        try:
            return list(called_in(None, made.grad_fn, cast(grad, "float32")))
        finally:
            self._calling = None

    def _compute(self, call: Call, copy: Callable[[TensorLike], TensorLike]) -> list[TensorLike]:
        """All that a call gives in float32, in its order; nothing if it cannot be made."""
        self._calling, self._found = sys._getframe(), []
        try:
            with bridge.off_tape(), forward_again(), casting_in(call.region):
                call.run(*call.copied(copy))
        except Exception:  # a user's kernels, which read 16 bits only: their op has no counterpart
            return []
        finally:
            self._calling = None
        return self._found


def call_now() -> Call | None:
    """The call of a function on a list around this point, which makes what an observer is told of; None if it cannot
    be made again."""
    frame = call_here()
    return None if frame is None else call_of(frame.f_locals)


def call_of(names: Mapping[str, Any]) -> Call | None:
    """The call that a wrapper's variables are of; None of a function that writes into its arguments."""
    entry, args, kwargs = names.get("entry"), names["args"], names["kwargs"]
    if entry is None:
        wrapper = user_wrapper(names["name"], names["policy"])
    elif entry.in_place:
        return None
    else:
        wrapper = (
            owned_wrapper(entry, names["function"]) if "function" in names else netcl_wrapper(entry, names["listed"])
        )
    args = tuple(None if isinstance(x, Tape) else x for x in args)
    kwargs = {name: None if isinstance(x, Tape) else x for name, x in kwargs.items()}
    if entry is not None and entry.function == "dropout" and args[_SEED] is None:
        args = (*args[:_SEED], LAST_SEED.value, *args[_SEED + 1 :])
    region = current_region() or Region(True, "float32", default_table())
    return Call(partial(wrapper, names["wrapped"], names["instance"]), args, kwargs, region.in_float32)


def _is_running(frame: FrameType) -> bool:
    around: FrameType | None = sys._getframe(1)
    while around is not None and around is not frame:
        around = around.f_back
    return around is frame


def copy_of(x: TensorLike, dtype: str = "float32") -> TensorLike:
    """A leaf with the same numbers, in float32 if they are floating; those of float32 with the digits of ``dtype``."""
    value = x.value
    if not isinstance(value, Tensor) or not bridge.on_device(value) or value.dtype not in bridge.STORAGE:
        return x
    copy = bridge.empty(value.queue, value.shape, "float32")
    cast_into(value, copy)
    if dtype != "float32" and value.dtype not in bridge.HALF_DTYPES:
        bridge.write_bytes(copy, with_digits_of(dtype, copy.to_host()).reshape(-1).view(np.uint8))
    copy.requires_grad = bridge.needs_grad(x)
    return Node(value=copy, requires_grad=copy.requires_grad) if isinstance(x, Node) else copy
