"""Who looks at a step op by op, and at the values themselves, while it runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.results import Observer
from clamp.debug.callsite import Place
from clamp.debug.identity import Op, Ops
from clamp.opencl.host_steps import recorder

Key: TypeAlias = tuple[Op, int, int]  # an op, which of its values, and in which of its backward passes

RESULT = -1  # where a gradient has its number, which is that of the parent that it is of


@dataclass(eq=False)
class Seen:
    """An op that has been seen, as the token of its backward.

    Attributes:
        op, place: which it is, and where it was called.
        trained: by the number of a gradient, the parameter that it is of.
    """

    op: Op
    place: Place
    trained: dict[int, Tensor] = field(default_factory=dict)


class Watcher(Observer):
    """An observer of a step in the thread that made it, which looks at its values.

    Attributes:
        ops: names them.
    """

    def __init__(self) -> None:
        self.ops = Ops()
        self._thread = threading.get_ident()
        self._times = Counter[tuple[Op, int]]()

    def is_mine(self) -> bool:
        """Whether what is told of here belongs to the step.

        Raises:
            RuntimeError: it is being recorded.
        """
        if threading.get_ident() != self._thread:
            return False
        if recorder() is not None:
            raise RuntimeError(
                "the step is being recorded, and ops in a recording have no values yet: pass the function that "
                "amp.record was given, or call the graph's build()"
            )
        return True

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Seen | None:
        known = self.ops.of(made) if self.is_mine() else None
        if known is None:
            return None
        seen = Seen(*known, trained_parents(made))
        self.keep(seen, RESULT, made.value)
        return seen

    def gradients(
        self, token: Any, grad: Tensor, grads: Sequence[Tensor | None], again: Callable[[Tensor], Any]
    ) -> None:
        for part, one in enumerate(grads):
            self.keep(token, part, one)

    def keep(self, seen: Seen, part: int, tensor: Any) -> None:
        """Called with every result and gradient of the step; ``part`` as in `Key`. A gradient may be None."""

    def key(self, seen: Seen, part: int) -> Key:
        """What this value is in every run; to be asked once for each."""
        self._times[seen.op, part] += 1
        return seen.op, part, self._times[seen.op, part]


def trained_parents(made: TensorLike) -> dict[int, Tensor]:
    """The parameters among what a result was made of, by the numbers of their gradients."""
    parents = made.parents if isinstance(made, Node) else []
    return {part: parent.value for part, parent in enumerate(parents) if getattr(parent.value, "requires_grad", False)}


class Names:
    """What layers, and gradients of parameters, are called after a run.

    Args:
        ops: of the run.
        seen: what was seen in it.
    """

    def __init__(self, ops: Ops, seen: Iterable[Seen]) -> None:
        self.paths = ops.paths()
        trained = {id(x): x for one in seen for x in one.trained.values()}
        self._parameters = dict(zip(trained, bridge.parameter_names(list(trained.values())), strict=True))

    def layer(self, op: Op) -> str:
        """Path of the layer that an op is in; empty if it is in none."""
        return self.paths.get(op.layer, "")

    def value(self, seen: Seen | None, part: int) -> str:
        """``"result"``, ``"gradient of layers.0.weight"``, ``"gradient of input 0"``."""
        if part == RESULT or seen is None:
            return "result"
        name = self._parameters.get(id(seen.trained.get(part)), "")
        return f"gradient of {name if name and not name.startswith('params[') else f'input {part}'}"
