"""``python -m clamp trace`` and ``compare``: what each op of a script's first steps gives, to the bit, now and later.

There is a file for each device: bits are the same on one device with one driver.
"""

from __future__ import annotations

import os
import random
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from clamp.casting.results import RESULTS
from clamp.cli import CommandError
from clamp.cli.devices import describe, slug
from clamp.cli.run import EnoughError, require_script, run_script, scaling, turn_on
from clamp.debug.traces import Trace, Tracer


def run(args: Namespace) -> int:
    """Runs ``trace``; see `clamp.cli`."""
    require_script(args)
    if args.output is None and len(args.given) > 1 and args.given[0] in ("-o", "--output"):  # behind the script's name
        args.output, args.given = Path(args.given[1]), args.given[2:]
    if args.output is None:
        raise CommandError("python -m clamp trace needs a folder: -o FOLDER", 2)
    folder: Path = args.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write into {folder}: {error}") from error
    status, trace = _traced(args, args.dtype, args.steps)
    if trace is None or trace.device is None:
        return status
    file = folder / f"{slug(trace.device)}.json"
    trace.write(file)
    print(f"written: {file}, {len(trace.values)} values")
    return 0


def compare(args: Namespace) -> int:
    """Runs ``compare``; see `clamp.cli`."""
    require_script(args)
    folder: Path = args.output
    try:
        known = {file.stem: Trace.read(file) for file in sorted(folder.glob("*.json"))}
        settings = {(trace.about["dtype"], trace.about["steps"]) for trace in known.values()}
    except (ValueError, KeyError) as error:
        raise CommandError(f"{folder} has a file that `python -m clamp trace` did not write: {error}", 2) from error
    if len(settings) != 1:
        what = "traces of several dtypes or numbers of steps" if settings else "no trace"
        raise CommandError(f"{folder} has {what}: write them with `python -m clamp trace -o {folder} ...`", 2)
    status, trace = _traced(args, *settings.pop())
    if trace is None or trace.device is None:
        return status
    name, before = slug(trace.device), known.get(slug(trace.device))
    if before is None:
        raise CommandError(
            f"{folder} has no trace of {describe(trace.device)}, {name}.json, but of {', '.join(known)}: bits are the "
            "same on one device only. Write one by `python -m clamp trace`"
        )
    difference = before.first_difference(trace)
    if difference is None:
        print(f"{len(trace.values)} values are those of {folder / name}.json")
        return 0
    print(difference)
    if before.about["driver"] != trace.about["driver"]:
        print(f"the driver was {before.about['driver']} then, and is {trace.about['driver']} now")
    return 1


def _traced(args: Namespace, dtype: str, steps: int) -> tuple[int, Trace | None]:
    """Runs a script until some steps are done: its exit status, and what its ops gave, if it got there, or well to its
    end."""
    random.seed(0)
    np.random.seed(0)
    tracer = _FirstSteps(steps)
    handle = turn_on(dtype)
    status, process = 0, os.getpid()
    try:
        with scaling(handle), RESULTS.attached(tracer):
            status = run_script(args.script, args.given, is_module=args.is_module)
    except EnoughError:
        pass
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        handle.shutdown()
    if status or os.getpid() != process:  # the script has forked one, which has come to its end
        return status, None
    trace = tracer.done or tracer.trace()
    if tracer.done is None:
        print(f"the script ended after {steps - tracer.left} of {steps} steps", file=sys.stderr)
    if trace.device is None:
        print("no op of this script was seen: it computes nothing on an OpenCL device", file=sys.stderr)
        return 1, None
    about = {"dtype": dtype, "steps": steps, "driver": trace.device.driver_version.strip()}
    return 0, replace(trace, about=about)


class _FirstSteps(Tracer):
    """Keeps what the ops of some steps give, and ends the script then."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps
        self.done: Trace | None = None

    def stepped(self, report: Any) -> None:  # noqa: ARG002  (an observer's)
        self.left -= 1
        if not self.left:
            self.done = self.trace()
            raise EnoughError
