"""An op computed once more, in float32, from the very numbers that it was given: what it would have been without AMP.

What differs from it is the op's own error, whatever errors its inputs have brought along.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor, TensorLike
from clamp.casting.arguments import mapped
from clamp.casting.policy import default_table
from clamp.casting.regions import Region, casting_in, current_region, no_casts
from clamp.functions.activations import LAST_SEED
from clamp.observe.identity import INSERTED
from clamp.observe.place import call_here
from clamp.ops.cast import cast, cast_into
from clamp.patching.wrap import netcl_wrapper, owned_wrapper, user_wrapper

_SEED = 2  # where dropout takes its seed


class Twins:
    """The float32 counterparts of results, made as an observer is told of these.

    A function is called again with the arguments that it has got, copied, widened and cut from the graph, so that it
    may write into them, and so that its graph ends there.
    """

    def __init__(self) -> None:
        self._open: list[tuple[FrameType, Iterator[TensorLike]]] = []  # calls that have not ended, innermost last
        self._calling: FrameType | None = None
        self._found: list[TensorLike] = []

    def takes(self, made: TensorLike) -> bool:
        """Whether a result is that of a counterpart being computed: of nobody's interest."""
        if self._calling is None:
            return False
        call = call_here()
        if call is not None and call.f_back is self._calling and getattr(made, "op_name", None) not in INSERTED:
            self._found.append(made)
        return True

    def of_result(self) -> TensorLike | None:
        """The counterpart of what has been made just now; None if the function cannot be called again."""
        call = call_here()
        self._open = [(frame, rest) for frame, rest in self._open if _is_running(frame)]
        if call is None:
            return None
        for frame, rest in self._open:
            if frame is call:
                return next(rest, None)
        results = iter(self._compute(call))
        self._open.append((call, results))
        return next(results, None)

    def _compute(self, call: FrameType) -> list[TensorLike]:
        """All that a call gives in float32, in its order."""
        names = call.f_locals
        entry = names.get("entry")
        if entry is not None and entry.in_place:
            return []
        if entry is None:
            wrapper = user_wrapper(names["name"], names["policy"])
        elif "function" in names:
            wrapper = owned_wrapper(entry, names["function"])
        else:
            wrapper = netcl_wrapper(entry, names["listed"])
        args, kwargs = mapped(names["args"], _copy), mapped(names["kwargs"], _copy)
        args = tuple(None if isinstance(x, Tape) else x for x in args)
        kwargs = {name: None if isinstance(x, Tape) else x for name, x in kwargs.items()}
        if entry is not None and entry.function == "dropout" and len(args) <= _SEED and kwargs.get("seed") is None:
            kwargs["seed"] = LAST_SEED.value
        region = current_region() or Region(True, "float32", default_table())
        self._calling, self._found = sys._getframe(), []
        try:
            with bridge.off_tape(), casting_in(region.in_float32):
                wrapper(names["wrapped"], names["instance"], args, kwargs)
        except Exception:  # a user's kernels, which read 16 bits only: their op has no counterpart
            return []
        finally:
            self._calling = None
        return self._found

    def gradients_of(self, twin: TensorLike | None, grad: Tensor) -> list[Tensor | None]:
        """What a counterpart gives for the gradient that its op was given; nothing if it has no graph."""
        if not isinstance(twin, Node) or twin.grad_fn is None:
            return []
        self._calling = sys._getframe()
        try:
            with no_casts():
                return list(twin.grad_fn(cast(grad, "float32")))
        finally:
            self._calling = None


def _is_running(frame: FrameType) -> bool:
    around: FrameType | None = sys._getframe(1)
    while around is not None and around is not frame:
        around = around.f_back
    return around is frame


def _copy(x: TensorLike) -> TensorLike:
    """A leaf with the same numbers, in float32 if they are floating."""
    value = x.value
    if not isinstance(value, Tensor) or not bridge.on_device(value) or value.dtype not in bridge.STORAGE:
        return x
    copy = bridge.empty(value.queue, value.shape, "float32")
    cast_into(value, copy)
    copy.requires_grad = bridge.needs_grad(x)
    return Node(value=copy, requires_grad=copy.requires_grad) if isinstance(x, Node) else copy
