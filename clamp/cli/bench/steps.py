"""What is timed of what is mostly Python's: steps of small networks, calls that AMP leaves alone, and the first step of
a process."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag

import clamp
from clamp import amp
from clamp.bridge import Tensor
from clamp.cli.bench import networks
from clamp.cli.bench.networks import MLP, README_MLP
from clamp.cli.bench.peers import PeerProcess, peer_contenders
from clamp.cli.bench.timing import Case, Contender, Turn, dtypes_of, timed
from clamp.cli.bench.training import Variant
from clamp.opencl import cache_writer

NETWORKS = networks.EXAMPLES  # whose first steps are timed
_SCALE = 1024.0  # from which no step of small networks is skipped
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


# ---------------------------------------------------------------------------------------------- small ones


def small_cases(queue: cl.CommandQueue, peers: Sequence[PeerProcess]) -> Iterator[Case]:
    """README's network and that of the digits, eager and recorded: their time is mostly the host's."""
    halves = dtypes_of(queue)[1:]
    for network in (README_MLP, MLP):
        # The loop of the examples on one batch, as that of peers: until the device has finished, and no loss is read.
        variants = [
            Variant(queue, network, dtype, is_recorded=is_recorded, reads_loss=False, options={"loss_scale": scale})
            for is_recorded, dtypes in ((False, (None, "float32", *halves)), (True, halves))
            for dtype in dtypes
            for scale in [_SCALE if dtype == "float16" else 1.0]
        ]
        contenders = [
            Contender(x.name, x.turn, is_baseline=x.dtype not in halves, extra=dict if x.is_recorded else x.launches)
            for x in variants
        ]
        yield Case("small", str(network), "ms", contenders + peer_contenders(peers, network.work, network))


# ---------------------------------------------------------------------------------------------- calls


def call_cases(queue: cl.CommandQueue) -> Iterator[Case]:
    """Functions of netcl's on 16 elements, as they are and inside ``disable_casts()``, which AMP leaves alone."""
    x = ag.tensor(Tensor.from_host(queue, np.ones((4, 4), np.float32)), requires_grad=True)
    for name, arguments in _FUNCTIONS.items():
        alone = timed(partial(_many, name, arguments(x)), queue.finish)
        contenders = [
            Contender("netcl", alone, is_baseline=True),
            Contender("disable_casts()", partial(_without_casts, alone)),
        ]
        yield Case("calls", f"{_CALLS} of {name}", "ms", contenders)


def _many(name: str, args: tuple[Any, ...]) -> None:
    function = getattr(ag, name)  # what stands there now
    for _ in range(_CALLS):
        function(*args)


def _without_casts(turn: Turn, calls: int) -> list[float]:
    with amp.init() as handle, handle.disable_casts():
        return turn(calls)


# ---------------------------------------------------------------------------------------------- first ones

# Each is that of a process of its own (`networks.first_step`), because what one has compiled it keeps. Seconds are
# those that its processors worked: they hold on a machine that does other work as well. Reading a step's figures is
# part of it; starting Python, importing and drawing weights is not.


def _first_step(
    device: cl.Device, network: str, dtype: str, checkout: Path, folder: str, then: str = "leave"
) -> dict[str, float]:
    """Figures of a process that imports ``clamp`` from a checkout: CPU seconds of its first step, programs compiled in
    it and later, and launches of the second. What drivers and clamp keep, they keep in a folder."""
    kept = {"XDG_CACHE_HOME": folder, "POCL_CACHE_DIR": f"{folder}/pocl", "CLAMP_CACHE_DIR": f"{folder}/clamp"}
    environment = cache_writer.environment()
    path = os.pathsep.join([str(checkout), environment["PYTHONPATH"]])
    place = map(str, cache_writer.place_of(device))
    # A file, not a module of a package: that package is of the clamp that is measured.
    command = [sys.executable, "-W", "ignore", networks.__file__, network, dtype, *place, then]
    printed, failure = cache_writer.outcome(command, {**environment, **kept, "PYTHONPATH": path})
    if failure:
        raise RuntimeError(failure)
    return {name: float(figure) for name, figure in json.loads(printed[-1]).items()}


def _processes(name: str, run: Callable[..., dict[str, float]], kept: Path | None) -> Contender:
    """Processes for which nothing is compiled yet; or, with a folder, after one that has kept all it compiled there."""
    figures: dict[str, float] = {}  # of the last one

    def turn(calls: int) -> list[float]:
        if kept is not None and not kept.is_dir():
            kept.mkdir(0o700, parents=True)
            run(str(kept), "keep")
        seconds = []
        for _ in range(calls):
            with tempfile.TemporaryDirectory() as empty:
                figures.update(run(str(kept or empty)))
            seconds.append(figures.pop("seconds"))
        return seconds

    return Contender(name, turn, is_baseline=name != "clamp", extra=lambda: figures)


def first_step_cases(queue: cl.CommandQueue, against: Path | None) -> Iterator[Case]:
    """Each network's first step cold, where nothing is compiled, and in a second process, after one has compiled it;
    beside those of another checkout of clamp, if there is one to compare with."""
    checkouts = {"clamp": Path(clamp.__file__).parents[1]}
    if against is not None:
        checkouts[f"clamp in {against.resolve().name}"] = against.resolve()
    dtype = dtypes_of(queue)[1]
    with tempfile.TemporaryDirectory() as folder:
        for key, network in NETWORKS.items():
            runs = {name: partial(_first_step, queue.device, key, dtype, of) for name, of in checkouts.items()}
            for when in ("cold", "second process"):
                kept = {name: None if when == "cold" else Path(folder, key, name) for name in runs}
                contenders = [_processes(name, run, kept[name]) for name, run in runs.items()]
                yield Case("first-step", f"{network.name}, {dtype}, {when}", "ms", contenders)
