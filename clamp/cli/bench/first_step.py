"""What the first training step of a process takes, where nothing is compiled yet and after another has compiled it.

Each step is a process of its own (`networks.first_step`), because what one has compiled it keeps. Seconds are those
that its processors worked: they hold on a machine that does other work as well. Reading a step's figures is part of it;
starting Python, importing and drawing weights is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyopencl as cl

import clamp
from clamp.cli.bench import networks
from clamp.cli.bench.contenders import Case, Contender
from clamp.cli.bench.timing import Turn
from clamp.opencl import cache_writer

NETWORKS = networks.EXAMPLES


@dataclass
class _Runner:
    """Starts the processes of one contender: a checkout of clamp.

    Attributes:
        checkout: the folder that ``clamp`` is imported from.
        figures: of its last process.
    """

    device: cl.Device
    network: str
    dtype: str
    checkout: Path
    figures: dict[str, float] = field(default_factory=dict)

    def run(self, folder: str, then: str = "leave") -> float:
        """CPU seconds of a process's first step; what drivers and clamp keep, they keep in a folder."""
        kept = {"XDG_CACHE_HOME": folder, "POCL_CACHE_DIR": f"{folder}/pocl", "CLAMP_CACHE_DIR": f"{folder}/clamp"}
        environment = cache_writer.environment()
        path = os.pathsep.join([str(self.checkout), environment["PYTHONPATH"]])
        place = map(str, cache_writer.place_of(self.device))
        # A file, not a module of a package: that package is of the clamp that is measured.
        command = [sys.executable, "-W", "ignore", networks.__file__, self.network, self.dtype, *place, then]
        done = subprocess.run(
            command, env={**environment, **kept, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise RuntimeError(said[-1] if said else f"ended with status {done.returncode}")
        figures = json.loads(done.stdout.splitlines()[-1])
        self.figures = {name: float(figure) for name, figure in figures.items() if name != "seconds"}
        return float(figures["seconds"])

    def last_figures(self) -> dict[str, float]:
        """Programs compiled in the first step and later, and launches of the second."""
        return self.figures

    def cold(self, calls: int) -> list[float]:
        """Nothing is compiled yet."""
        seconds = []
        for _ in range(calls):
            with tempfile.TemporaryDirectory() as folder:
                seconds.append(self.run(folder))
        return seconds

    def second(self, folder: Path) -> Turn:
        """The turns of processes after one that has kept all it compiled."""

        def turn(calls: int) -> list[float]:
            if not folder.is_dir():
                folder.mkdir(0o700, parents=True)
                self.run(str(folder), "keep")
            return [self.run(str(folder)) for _ in range(calls)]

        return turn


def first_step_cases(device: cl.Device, dtype: str, against: Path | None) -> Iterator[Case]:
    """Each network cold, and in a second process.

    Args:
        dtype: of `amp.init`.
        against: another checkout of clamp, to compare with.
    """
    checkouts = {"clamp": Path(clamp.__file__).parents[1]}
    if against is not None:
        checkouts[f"clamp in {against.name}"] = against.resolve()
    with tempfile.TemporaryDirectory() as folder:
        for key, network in NETWORKS.items():
            runners = {name: _Runner(device, key, dtype, checkout) for name, checkout in checkouts.items()}
            turns = {name: (one.cold, one.second(Path(folder, key, name))) for name, one in runners.items()}
            for number, when in enumerate(("cold", "second process")):
                contenders = [
                    Contender(name, turn[number], is_baseline=name != "clamp", extra=runners[name].last_figures)
                    for name, turn in turns.items()
                ]
                yield Case("first-step", f"{network.name}, {dtype}, {when}", "ms", contenders)
