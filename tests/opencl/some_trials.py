"""What tests/opencl/test_trials.py has tried in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pyopencl as cl

from clamp.opencl.trials import Trial


def _fails(queue: cl.CommandQueue) -> bool:
    raise RuntimeError("clBuildProgram failed")


def _crashes(queue: cl.CommandQueue) -> bool:
    os.abort()


def _never_ends(queue: cl.CommandQueue) -> bool:
    time.sleep(1000)
    return True


def _prints(queue: cl.CommandQueue) -> bool:
    print("a driver's remark")
    return queue.device.max_compute_units > 0


class Some:
    """Trials by name."""

    def __init__(self, *trials: tuple[str, Any], key: str = "") -> None:
        self._trials, self.key = trials, key

    def trials(self) -> Iterator[Trial]:
        yield from self._trials

    def trial_key(self) -> object:
        return self.key


RIGHT = "prints", _prints
WRONG = "is wrong", lambda queue: False
ALL = Some(RIGHT, WRONG, ("fails", _fails), ("crashes", _crashes), ("prints again", _prints))
ENDLESS = Some(RIGHT, ("never ends", _never_ends))
ONE = Some(RIGHT)
