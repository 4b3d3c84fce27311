"""The state that a load is about to change, kept so that a load that fails changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import numpy as np

from clamp import bridge
from clamp.bridge import Tensor
from clamp.interrupts import uninterrupted


class Undo:
    """Puts tensors and optimizers back. All that is to be changed is kept before the first change.

    Kept are the bits and the buffer of tensors, and of optimizers the attributes, with all arrays, tensors and
    containers in them: each is put back in place, so that whoever else holds one sees it as it was.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}  # by id; holding them keeps the ids their own
        self._narrow: list[Callable[[], Any]] = []  # 16-bit tensors: writing one rounds its master, which comes after
        self._rest: list[Callable[[], Any]] = []
        self._own: list[tuple[Any, Any]] = []  # optimizers of the user's that began to load, with their state before

    def keep_state(self, items: Iterable[Any]) -> None:
        """These tensors, or the attributes of these optimizers, are about to be written or replaced."""
        for item in items:
            self._keep(item if isinstance(item, Tensor) else getattr(item, "__dict__", None))

    def keep(self, put_back: Callable[[], Any]) -> None:
        """Notes how to put back a state that is about to be changed."""
        self._rest.append(put_back)

    def load_own(self, optimizer: Any, state: Any) -> None:
        """Calls the ``load_state_dict`` of a user's optimizer, whose state may lie where no attribute leads."""
        self._own.append((optimizer, _state_of(optimizer)))
        optimizer.load_state_dict(state)

    def put_back(self, error: BaseException) -> None:
        """Undoes everything, whatever happens meanwhile; what could not be undone is noted on ``error``."""
        problems = []
        own = [partial(optimizer.load_state_dict, state) for optimizer, state in self._own if state is not None]
        with uninterrupted():
            for step in (*reversed(own), *self._narrow, *self._rest):
                try:
                    step()
                except BaseException as problem:  # a second Ctrl-C, say: the others are to be put back all the same
                    problems.append(f"{type(problem).__name__}: {problem}")
        if problems:
            error.add_note(
                "While the state from before the load was put back, this was raised as well, and what is not an "
                f"attribute of an optimizer may be lost: {'; '.join(problems)}"
            )

    def _keep(self, x: Any) -> None:
        if id(x) in self._kept:
            return
        self._kept[id(x)] = x
        if isinstance(x, Tensor):
            steps = self._narrow if x.dtype in bridge.HALF_DTYPES else self._rest
            steps.append(partial(_restore_tensor, x, x.buffer, bridge.read_bytes(x)))
        elif isinstance(x, np.ndarray) and x.flags.writeable:
            self._rest.append(partial(np.copyto, x, x.copy()))
        elif isinstance(x, MutableMapping):
            self._rest.append(partial(_restore_mapping, x, dict(x)))
            self._keep_all(x.values())
        elif isinstance(x, list):
            self._rest.append(partial(x.__setitem__, slice(None), list(x)))
            self._keep_all(x)
        elif isinstance(x, tuple):
            self._keep_all(x)
        elif bridge.is_netcl_optimizer(x):  # the one inside an optimizer of the user's
            self.keep_state([x])

    def _keep_all(self, items: Iterable[Any]) -> None:
        for item in items:
            self._keep(item)


def _state_of(optimizer: Any) -> Any:
    """A user's optimizer's state, None where it has no way to tell: its attributes are kept in any case."""
    try:
        return copy.deepcopy(optimizer.state_dict())
    except Exception:
        return None


def _restore_tensor(tensor: Tensor, buffer: Any, bits: Any) -> None:
    tensor.buffer = buffer  # it may have been given another one
    bridge.write_bytes(tensor, bits)


def _restore_mapping(x: MutableMapping[Any, Any], items: Mapping[Any, Any]) -> None:
    x.clear()
    x.update(items)
