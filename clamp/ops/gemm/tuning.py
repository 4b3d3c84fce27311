"""Fastest plans of matrix units on this device, where `python -m clamp tune` has measured that.

Winners are kept for classes of products, by layout and by extents to the nearest power of two, with all times, in a
file of the user's (``opencl/cache``), for a device, its driver and a version of the kernels. Where none is kept the
rule of `plan.best_plan` holds.

Tuning chooses among plans that are verified on the device, each of which sums in float32 and rounds once: it changes
the order in which a sum is added up, and so a result's last bits, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import log2
from pathlib import Path

import pyopencl as cl

from clamp.opencl import cache, trials
from clamp.opencl.program import release_programs

_GAIN = 0.97  # of the usual plan's time: what is nearer may be chance


@dataclass(frozen=True)
class Tuning:
    """Measured times."""

    winners: dict[str, str] = field(default_factory=dict)  # names of plans by the class of products
    # by the class of products and the name of the plan
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)


_NOTHING = Tuning()
_known: dict[tuple[int, str], Tuning] = {}


def size_class(layout: str, rows: int, columns: int, k: int) -> str:
    """The class of a product, ``"NT 2048x8192x8192"``."""
    return f"{layout} " + "x".join(str(1 << round(log2(extent))) for extent in (rows, columns, max(k, 1)))


def winner_of(seconds: Mapping[str, float], usual: str) -> str:
    """The fastest plan; the usual one, unless that is slower by more than chance."""
    fastest = min(seconds, key=lambda name: seconds[name])
    return usual if usual in seconds and seconds[fastest] > _GAIN * seconds[usual] else fastest


def tuned(device: cl.Device, where: str, trial_key: Callable[[], object]) -> Tuning:
    """Returns what is kept of a unit on a device; nothing, if it was not tuned there.

    Args:
        where: the unit's name, as for its trials.
        trial_key: returns what its trials depend on.
    """
    key = (device.int_ptr, where)
    if key not in _known:
        _known[key] = cache.read(_file(device, where, trial_key), _meaning) or _NOTHING
    return _known[key]


def keep(device: cl.Device, where: str, trial_key: Callable[[], object], tuning: Tuning) -> bool:
    """Keeps what was measured, over what was kept before; False if later processes will not find it."""
    before = tuned(device, where, trial_key)
    tuning = Tuning({**before.winners, **tuning.winners}, {**before.seconds, **tuning.seconds})
    _known[device.int_ptr, where] = tuning
    release_programs()  # launches that were prepared before go by the plan of before
    file = _file(device, where, trial_key)
    cache.write(file, json.dumps(asdict(tuning)).encode())
    return cache.read(file, _meaning) is not None


def _meaning(content: bytes) -> Tuning:
    tuning = Tuning(**json.loads(content))
    names = [*tuning.winners.items(), *((name, plan) for name, by_plan in tuning.seconds.items() for plan in by_plan)]
    times = [time for by_plan in tuning.seconds.values() for time in by_plan.values()]
    if not all(isinstance(name, str) for pair in names for name in pair) or not all(time > 0 for time in times):
        raise ValueError("no names and times")
    return tuning


def _file(device: cl.Device, where: str, trial_key: Callable[[], object]) -> Path | None:
    return cache.file_for([*trials.identity(device), where, trial_key()], ".tuned")
