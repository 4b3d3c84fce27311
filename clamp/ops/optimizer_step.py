"""An optimizer's step over all of its parameters in one launch for 100 tensors, and casts of many.

kernels/optimizer_step.cl has the rules: those of netcl's optimizers, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel, Launch, Prepared
from clamp.ops.cast import LISTENERS
from clamp.ops.launch import pieces_for
from clamp.ops.slots import filled, open_slots, slots_for, tiles_of

UPDATE = Kernel("optimizer_step.cl", "update")
COPY = Kernel("optimizer_step.cl", "copy")  # of the rule that is none

_OTHER_ARGUMENTS_BYTES = 40  # tile table, and numbers of a rule


class Copy(NamedTuple):
    """A 16-bit copy of a parameter that is written with it.

    Attributes:
        tensor: float16 or bfloat16, of as many elements.
        rounds: whether the parameter becomes what the copy holds.
    """

    tensor: Tensor
    rounds: bool = False


class MultiUpdate:
    """The launches that step some tensors by one rule, with what does not change from step to step bound.

    Args:
        rule: a RULE of kernels/optimizer_step.cl.
        numbers: how many it has.
        params: float32, one of them not empty, on one queue; no two share memory.
        states: for each tensor of state that the rule has, one buffer of as many float32 for each parameter.
        copies: for each parameter its copy, or None.
    """

    def __init__(
        self, rule: str, numbers: int, params: Sequence[Tensor], states: Sequence[Sequence[Any]],
        copies: Sequence[Copy | None],
    ) -> None:  # fmt: skip
        self._queue: cl.CommandQueue = params[0].queue
        self._launches: list[tuple[list[int], Launch]] = []  # numbers of parameters, and what steps these
        kinds: dict[tuple[str, bool], list[int]] = {}
        for index, (param, copy) in enumerate(zip(params, copies, strict=True)):
            if param.size:
                key = ("f32", False) if copy is None else (bridge.STORAGE[copy.tensor.dtype], copy.rounds)
                kinds.setdefault(key, []).append(index)
        written = [copy and copy.tensor.buffer for copy in copies]
        for (kind, rounds), of_kind in kinds.items():
            columns = list(states) if kind == "f32" else [*states, written]
            slots = slots_for(self._queue, len(of_kind), 2 + len(columns), _OTHER_ARGUMENTS_BYTES)
            macros = {"RULE": rule, "COPY_T": kind, "ROUNDED": int(rounds), "DECADES": slots // 10}
            for start in range(0, len(of_kind), slots):
                members = of_kind[start : start + slots]
                tiles = tiles_of(self._queue, tuple([params[index].size for index in members]))
                slotted = filled(members, slots)
                launch = UPDATE.bind(
                    self._queue, *tiles.grid, tiles.table, *[...] * numbers,
                    *[params[index].buffer for index in slotted], *open_slots(len(members), slots, tiles),
                    *[column[index] for column in columns for index in slotted],
                    PIECES=pieces_for(self._queue), **macros,
                )  # fmt: skip
                self._launches.append((members, launch))

    def pieces(self, numbers: Sequence[np.generic], grads: Sequence[Tensor]) -> list[Callable[[], None]]:
        """Returns calls that enqueue the step, a launch each, for ``in_turn``.

        Args:
            numbers: of the rule, in the order and of the types of the kernel.
            grads: float32, one for each parameter, of as many elements.
        """
        return [
            partial(launch, self._queue, *numbers, *[grads[index].buffer for index in members])
            for members, launch in self._launches
        ]


_CAST_SLOTS = 10
_casts = Prepared(1024)


def cast_all(tensors: Sequence[Tensor], dtype: str) -> list[Tensor]:
    """float32 tensors as ``dtype``, with the bits of ``cast``, in one launch for 10 of them.

    The number of a launch is always the same: the kernel for few is that for many, and not built later.

    Args:
        tensors: any shapes, on one queue.
        dtype: ``"float16"`` or ``"bfloat16"``.
    """
    copies = [bridge.empty(x.queue, x.shape, dtype) for x in tensors]
    pairs = [(x, y) for x, y in zip(tensors, copies, strict=True) if 0 not in x.shape]
    for start in range(0, len(pairs), _CAST_SLOTS):
        some = pairs[start : start + _CAST_SLOTS]
        queue = some[0][0].queue
        key = (queue.context.int_ptr, dtype, *[tuple(x.shape) for x, _ in some])
        launch = _casts.known.get(key) or _bind_casts(key, queue, dtype, [x.size for x, _ in some])
        launch(queue, *[x.buffer for x, _ in some], *[y.buffer for _, y in some])
    for listener in LISTENERS:
        for x, y in pairs:
            listener(x, y)
    return copies


def _bind_casts(key: tuple[Any, ...], queue: cl.CommandQueue, dtype: str, sizes: Sequence[int]) -> Launch:
    tiles = tiles_of(queue, tuple(sizes))
    slots = open_slots(len(sizes), _CAST_SLOTS, tiles)
    bound = COPY.bind(
        queue, *tiles.grid, tiles.table, *slots, *slots,
        RULE="none", COPY_T=bridge.STORAGE[dtype], ROUNDED=0, DECADES=_CAST_SLOTS // 10, PIECES=pieces_for(queue),
    )  # fmt: skip
    _casts.keep(key, bound)
    return bound
