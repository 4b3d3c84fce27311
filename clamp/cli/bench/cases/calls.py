"""Calls of netcl's functions where casts are off: what AMP costs a part of a program that it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag

from clamp import amp
from clamp.bridge import Tensor
from clamp.cli.bench.cases.contenders import Case, Contender
from clamp.cli.bench.timing import Turn, timed

_CALLS = 200  # timed as one
_FUNCTIONS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "reshape": lambda x: (x, (2, 8)),
    "unsqueeze": lambda x: (x, 0),
    "getitem": lambda x: (x, (slice(None), 2)),
    "relu": lambda x: (x,),
    "add": lambda x: (x, x),
    "sum": lambda x: (x,),
    "matmul_op": lambda x: (x, x),
}


def call_cases(queue: cl.CommandQueue) -> Iterator[Case]:
    """Functions of netcl's on 16 elements, as they are and inside ``disable_casts()``."""
    x = ag.tensor(Tensor.from_host(queue, np.ones((4, 4), np.float32)), requires_grad=True)
    for name, arguments in _FUNCTIONS.items():
        alone = _turn(queue, name, arguments(x))
        contenders = [
            Contender("netcl", alone, is_baseline=True),
            Contender("disable_casts()", _without_casts(alone)),
        ]
        yield Case("calls", f"{_CALLS} of {name}", "ms", contenders)


def _turn(queue: cl.CommandQueue, name: str, args: tuple[Any, ...]) -> Turn:
    def turn(calls: int) -> list[float]:
        function = getattr(ag, name)  # what stands there now

        def many() -> None:
            for _ in range(_CALLS):
                function(*args)

        return timed(many, queue.finish)(calls)

    return turn


def _without_casts(turn: Turn) -> Turn:
    def without_casts(calls: int) -> list[float]:
        with amp.init() as handle, handle.disable_casts():
            return turn(calls)

    return without_casts
