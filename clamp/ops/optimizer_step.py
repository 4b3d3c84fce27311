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
from clamp.opencl.launches import Launch
from clamp.opencl.program import Kernel, Prepared
from clamp.ops.cast import LISTENERS
from clamp.ops.slots import filled, macros_of, open_slots, slots_for, tiles_of

UPDATE = Kernel("optimizer_step.cl", "update")
COPY = Kernel("optimizer_step.cl", "copy")  # of the rule that is none
JOIN = Kernel("optimizer_step.cl", "join")

#: of how many 16-bit tensors a parameter consists, by how it is kept (KEEPS); 0: of one in float32
PARTS = {"copy": 0, "rounded": 0, "stochastic": 1, "kahan": 2, "remainder": 2}

#: rules whose moments are of 8 bits
OF_8_BITS = ("adam_8bit", "adamw_8bit")
#: elements that are quantised together, and bytes of their moments
BLOCK, BLOCK_BYTES = 256, 520

_WITHOUT_GRADIENTS = {"none": COPY, "join": JOIN}
_OTHER_ARGUMENTS_BYTES = 56  # tile table, keys, and numbers of a rule


class Copy(NamedTuple):
    """A 16-bit copy of a parameter that is written with it, or the parts of which it consists."""

    tensor: Tensor  # float16 or bfloat16, of as many elements
    keeps: str = "copy"  # one of ``PARTS``: how the parameter itself is kept
    rest: Tensor | None = None  # where that is in two parts, the other one, of 16-bit words
    key: int = 0  # what chance depends on besides the step and the place of an element, from 0 to 2^32 - 1


class MultiUpdate:
    """The launches that step some tensors by one rule, with what does not change from step to step bound.

    Args:
        rule: a RULE of kernels/optimizer_step.cl.
        numbers: how many it has.
        params: float32, one of them not empty, on one queue; no two share memory. The memory of those that consist of
            parts is not asked for, unless the rule is one without gradients.
        states: for each tensor of state that the rule has, one buffer of as many float32 for each parameter; of a rule
            ``OF_8_BITS``, one buffer of ``moments_bytes`` for each.
        copies: for each parameter its copy, or its parts, or None.
        turns: whether what is kept by chance is rounded so by a rule without gradients as well, not to nearest.

    Attributes:
        has_parts: whether some parameters consist of parts.
        by_chance: whether some are rounded by chance.
    """

    def __init__(
        self, rule: str, numbers: int, params: Sequence[Tensor], states: Sequence[Sequence[Any]],
        copies: Sequence[Copy | None], *, turns: bool = False,
    ) -> None:  # fmt: skip
        self._queue: cl.CommandQueue = params[0].queue
        self._launches: list[tuple[list[int], Launch, bool]] = []  # numbers of parameters, what steps these, and how
        self._has_gradients = rule not in _WITHOUT_GRADIENTS
        self._turns = turns or self._has_gradients
        kinds: dict[tuple[str, str], list[int]] = {}
        for index, (param, copy) in enumerate(zip(params, copies, strict=True)):
            if param.size:
                key = ("f32", "copy") if copy is None else (bridge.STORAGE[copy.tensor.dtype], copy.keeps)
                kinds.setdefault(key, []).append(index)
        parts = {PARTS[keeps] for _, keeps in kinds}
        self.has_parts, self.by_chance = parts != {0}, 1 in parts and self._turns
        for (kind, keeps), of_kind in kinds.items():
            self._bind(rule, numbers, params, states, copies, kind, keeps, of_kind)

    def _bind(
        self, rule: str, numbers: int, params: Sequence[Tensor], states: Sequence[Sequence[Any]],
        copies: Sequence[Copy | None], kind: str, keeps: str, of_kind: list[int],
    ) -> None:  # fmt: skip
        """Binds the launches of those parameters that have copies of one kind, or none."""
        parts = PARTS[keeps]
        by_chance = parts == 1 and self._turns
        of_copies = [copy for i in of_kind if (copy := copies[i]) is not None]
        whole = [params[i].buffer for i in of_kind]
        first: list[list[Any]] = [] if parts and self._has_gradients else [whole]
        last: list[list[Any]] = [[column[i] for i in of_kind] for column in states]
        if of_copies:
            last.append([copy.tensor.buffer for copy in of_copies])
        if parts == 2:
            last.append([copy.rest.buffer for copy in of_copies if copy.rest is not None])
        pointers = len(first) + len(last) + int(self._has_gradients)
        slots = slots_for(self._queue, len(of_kind), pointers, _OTHER_ARGUMENTS_BYTES)
        macros: dict[str, Any] = {
            "RULE": rule,
            "COPY_T": kind,
            "KEEPS": f"kept_{keeps}",
            "DECADES": slots // 10,
            "TURNS": int(self._turns),
        }
        for start in range(0, len(of_kind), slots):
            some = slice(start, start + slots)
            members = of_kind[some]
            tiles = tiles_of(self._queue, tuple([params[index].size for index in members]))
            chance: list[Any] = [self._keys(of_copies[some]), ...] if by_chance else []
            if rule in OF_8_BITS:
                macros["GROUP"] = tiles.grid[1][0]
            launch = _WITHOUT_GRADIENTS.get(rule, UPDATE).bind(
                self._queue, *tiles.grid, tiles.table, *chance, *[...] * numbers,
                *[buffer for column in first for buffer in filled(column[some], slots)],
                *(open_slots(len(members), slots, tiles) if self._has_gradients else ()),
                *[buffer for column in last for buffer in filled(column[some], slots)],
                **macros_of(self._queue), **macros,
            )  # fmt: skip
            self._launches.append((members, launch, by_chance))

    def _keys(self, copies: Sequence[Copy]) -> cl.Buffer:
        keys = np.array([copy.key for copy in copies], np.uint32)
        flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
        return cl.Buffer(self._queue.context, flags, hostbuf=keys)

    def pieces(
        self, numbers: Sequence[np.generic] = (), grads: Sequence[Tensor] = (), turn: int = 0
    ) -> list[Callable[[], None]]:
        """Returns calls that enqueue the step, a launch each, for ``in_turn``.

        Args:
            numbers: of the rule, in the order and of the types of the kernel.
            grads: float32, one for each parameter, of as many elements; none of a rule without gradients.
            turn: another one in each step, from 0 to 2^32 - 1: what chance depends on.
        """
        return [
            partial(
                launch, self._queue, *([np.uint32(turn)] if by_chance else []), *numbers,
                *([grads[index].buffer for index in members] if self._has_gradients else []),
            )
            for members, launch, by_chance in self._launches
        ]  # fmt: skip


def moments_bytes(size: int) -> int:
    """Bytes of the moments of 8 bits of a parameter of so many elements."""
    return -(-size // BLOCK) * BLOCK_BYTES


def mixed(*numbers: int) -> int:
    """32 bits that depend on each bit of some numbers: splitmix64, of one after the other."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 32


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
        RULE="none", COPY_T=bridge.STORAGE[dtype], KEEPS="kept_copy", TURNS=0, DECADES=_CAST_SLOTS // 10,
        **macros_of(queue),
    )  # fmt: skip
    return _casts.keep(key, bound)
