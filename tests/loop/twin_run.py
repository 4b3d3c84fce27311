"""Runs of programs (twin.py): what they return, raise and leave."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag

from clamp import amp
from clamp.bridge import Node, Tensor
from clamp.params import masters
from clamp.params.gradient_marks import mark_of
from tests.loop.device import casts
from tests.loop.twin import FOLDERS, INPUTS, OUTPUTS, Program, Turn, Twin

Bits = tuple[Any, ...]  # a tensor's content, to be compared by ==


@dataclass
class Trace:
    """What a program did.

    Attributes:
        turns: what each call returned or raised, and left.
        recordings: of all functions.
    """

    turns: list[Any] = field(default_factory=list)
    recordings: int = 0


def run(queue: cl.CommandQueue, program: Program, folder: Path, recorded: bool) -> Trace:
    """Runs a program from the start."""
    FOLDERS.append(folder)
    folder.mkdir(exist_ok=True, parents=True)
    trace = Trace()
    twin = Twin(queue, program)
    functions: list[Any] = [twin.function(parts) for parts in program.functions]
    functions = [amp.record(function) for function in functions] if recorded else functions
    try:
        np.random.seed(1)
        random.seed(1)
        for turn in program.turns:
            trace.turns.append(_turn(twin, functions, turn))
        if recorded:
            trace.recordings = sum(function.recordings for function in functions)
        if twin.handle is not None:
            for optimizer in twin.optimizers:
                masters.pairs(optimizer)  # state of new parameters, which their first step makes
            amp.save_checkpoint(folder / "end.npz", twin.nets, twin.optimizers)
            with np.load(folder / "end.npz") as arrays:
                trace.turns.append([(name, array.tobytes()) for name, array in sorted(arrays.items())])
    finally:
        FOLDERS.pop()
        amp.shutdown()
    return trace


def _turn(twin: Twin, functions: Sequence[Any], turn: Turn) -> list[Any]:
    rng = np.random.default_rng(turn.seed)
    arrays = [rng.choice([-2.0, -1.0, 1.0, 2.0], (turn.rows, n)).astype(np.float32) for n in (INPUTS, OUTPUTS)]
    if turn.poison is not None:
        arrays[0][0, 1] = turn.poison
    x, y = (Tensor.from_host(twin.queue, array) for array in arrays)
    done = [_outcome(partial(getattr(twin, name), *args, x, y)) for name, *args in turn.before]
    give: dict[str, Any] = {
        "tensors": partial(functions[turn.function], x, y),
        "nodes": partial(functions[turn.function], ag.tensor(x), ag.tensor(y)),
        "arrays": partial(functions[turn.function], *arrays),
        "names": partial(functions[turn.function], y=y, x=x),
    }
    twin.fails = turn.fails
    with casts(twin.handle, turn.region) if twin.handle is not None else nullcontext():
        done.append(_outcome(give[turn.given]))
    _disturb(twin.queue)
    return [*done, state_of(twin)]


def _disturb(queue: cl.CommandQueue) -> None:
    """Writes into memory that nobody holds any more."""
    junk = [Tensor.from_shape(queue, (size,), fill=7.0) for size in (24, 12, 18, 6, 3, 1) * 2]
    del junk


def _outcome(call: Callable[[], Any]) -> Any:
    """What a call returned, or the error that it raised."""
    try:
        return _plain(call())
    except Exception as error:
        return type(error).__name__, str(error).replace(str(FOLDERS[-1]), "")


def _plain(x: Any) -> Any:
    """Results with the bits of tensors in place of them."""
    if isinstance(x, list | tuple):
        return [_plain(item) for item in x]
    if isinstance(x, dict):
        return {key: _plain(item) for key, item in x.items()}
    if isinstance(x, Node):
        x = x.value
    return bits(x) if isinstance(x, Tensor) else repr(x)


def bits(x: Tensor) -> Bits:
    """All that two tensors may differ in, nan compared as it is."""
    return x.dtype, tuple(x.shape), np.array(x.to_host()).tobytes()


def _reports(owner: Any) -> list[Any]:
    return [repr(report) for report in owner.history]


def state_of(twin: Twin) -> list[Any]:
    """All that a call leaves."""
    tensors = {id(x): x for net in twin.nets for x in net.parameters()}
    tensors |= {id(x): x for optimizer in twin.optimizers for x in optimizer.params}
    left: list[Any] = [bits(x) for x in tensors.values()]
    for grad in (x.grad for x in tensors.values()):
        mark = mark_of(grad)
        left.append(None if grad is None else (*bits(grad), mark is None or mark.scale is not None))
    left += [bits(x) for x in twin.average.shadow] + [twin.average.step_count]
    left += [(repr(scaler.state_dict()), _reports(scaler)) for scaler in twin.scalers]
    left += [twin.netcl_scaler.scale]
    if twin.handle is not None:
        left += [twin.handle.loss_scale, amp.state_dict(), _reports(twin.handle)]
    _, key, *others = np.random.get_state()
    return [*left, key.tobytes(), others]
