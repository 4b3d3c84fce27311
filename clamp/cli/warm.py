"""``python -m clamp warm``: compiles what training steps need, so that no process of the user's has to.

Each network trains two steps, with a full and a ragged batch, in each dtype, in processes of their own, as many at a
time as there are cores. What they compile is kept on disk (opencl/cache).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import pyopencl as cl
import wrapt

from clamp import amp
from clamp.cli import NOT_KEPT, CommandError
from clamp.cli.bench.networks import EXAMPLES as NETWORKS
from clamp.cli.bench.networks import Network, Trainer
from clamp.cli.devices import choose_device, describe
from clamp.cli.run import EnoughError, run_file
from clamp.interrupts import contextmanager, holding
from clamp.opencl import cache, cache_writer, program
from clamp.opencl.cache_writer import Place
from clamp.opencl.program import Built
from clamp.opencl.progress import PROGRESS
from clamp.scaling.step_report import Reports, StepReport

_STEPS = 2
_WIDTH = 60  # of macros in the list


@dataclass(frozen=True)
class Job:
    """Work of one process that compiles: a network or a script, the dtype of `amp.init` (of a network), and a
    device."""

    model: str
    dtype: str | None
    place: Place

    def __str__(self) -> str:
        return self.model if self.dtype is None else f"{self.model} in {self.dtype}"


@dataclass(frozen=True)
class Cost:
    """Cost of compiling a program: seconds of a processor's time, of which some to have its binary made and kept."""

    file: str
    macros: dict[str, Any]
    seconds: float


def run(args: Namespace) -> int:
    """Runs the command; see `clamp.cli`."""
    device = choose_device(args.device)
    unknown = [model for model in args.model if model not in NETWORKS and not Path(model).is_file()]
    if unknown:
        raise CommandError(f"{unknown[0]} is none of {', '.join(NETWORKS)}, and no script", 2)
    if not args.list and not cache.keeps():
        raise CommandError(f"what is compiled would be {NOT_KEPT}")
    environment = cache_writer.environment()
    with ExitStack() as stack:
        if args.list:  # to see what everything takes: in folders of the user's much is kept
            empty = stack.enter_context(tempfile.TemporaryDirectory())
            environment |= {"CLAMP_CACHE_DIR": f"{empty}/clamp", "POCL_CACHE_DIR": f"{empty}/pocl"}
        with cache_writer.at_once(), _costs() as probes:
            jobs = jobs_on(device, args.model)
        print(f"{describe(device)}: compiling for {', '.join(map(str, jobs))}")
        began = perf_counter()
        under_way = set[subprocess.Popen[str]]()
        with ThreadPoolExecutor(os.cpu_count()) as pool, PROGRESS.busy(f"compiling for {len(jobs)} networks"):
            try:
                outcomes = list(pool.map(lambda job: _in_child(job, environment, under_way), jobs))
            except BaseException:  # a signal that this process alone gets; the others would go on for minutes
                pool.shutdown(wait=False, cancel_futures=True)
                for process in under_way.copy():
                    process.terminate()
                raise
    for job, (_, failure) in zip(jobs, outcomes, strict=True):
        if failure:
            print(f"{job}: {failure}", file=sys.stderr)
    found = [*([] if args.list else probes), *chain.from_iterable(costs for costs, _ in outcomes)]
    costs = {(cost.file, *cost.macros.items()): cost for cost in found}
    if args.list:
        for cost in sorted(costs.values(), key=lambda cost: -cost.seconds):
            macros = " ".join(f"{name}={value}" for name, value in cost.macros.items())
            print(f"{cost.seconds:7.2f} s  {cost.file:25} {textwrap.shorten(macros, _WIDTH, placeholder=' ...')}")
        print(f"{sum(cost.seconds for cost in costs.values()):7.2f} s  in all, of one core")
    taken = perf_counter() - began
    print(f"{len(costs)} programs compiled in {taken:.1f} s" if costs else "nothing to compile: all is there already")
    return int(any(failure for _, failure in outcomes))


def jobs_on(device: cl.Device, models: list[str]) -> list[Job]:
    """The processes to start: one for each network and each of the device's 16-bit types, one for each script."""
    context = cl.Context([device])
    dtypes = amp.get_amp_supported_dtype(cl.CommandQueue(context, device))
    place = cache_writer.place_of(device)
    return [Job(model, dtype, place) for model in models for dtype in (dtypes if model in NETWORKS else (None,))]


def _in_child(job: Job, environment: dict[str, str], under_way: set[subprocess.Popen[str]]) -> tuple[list[Cost], str]:
    """Returns what a process has compiled, and what went wrong."""
    command = cache_writer.command(__name__, "compile_given", [job.model, job.dtype, job.place])
    printed, failure = cache_writer.outcome(command, environment, under_way)
    return [Cost(**json.loads(line)) for line in printed if line.startswith("{")], failure


def compile_given() -> None:
    """Runs the job that this process was given, and prints each program that it compiled."""
    model, dtype, place = cache_writer.given()
    with cache_writer.at_once(), _costs() as costs:
        if model in NETWORKS:
            _train(NETWORKS[model], dtype, cache_writer.device_at(place))
        else:
            _run_script(model)
    for cost in costs:
        print("\n" + json.dumps(vars(cost)))


def _train(network: Network, dtype: str, device: cl.Device) -> None:
    context = cl.Context([device])
    trainer = Trainer(cl.CommandQueue(context, device), network)
    with amp.init(dtype=dtype) as handle:
        for batch in (network.batch, network.batch - 3):
            trainer.step(handle, batch).to_host()


def _run_script(script: str) -> None:
    """Runs a user's script until some steps are done, if it makes any."""

    def add(wrapped: Any, reports: Reports, args: Any, kwargs: Any) -> StepReport:
        added: StepReport = wrapped(*args, **kwargs)
        if reports.steps == _STEPS:
            raise EnoughError
        return added

    wrapt.wrap_function_wrapper(Reports, "add", add)
    sys.argv = [script]
    with suppress(EnoughError):
        run_file(script)
        if not program.built_programs():
            sys.exit("it has computed nothing under AMP: warm compiles for scripts that turn it on, by amp.init() say")


@contextmanager
def _costs() -> Iterator[list[Cost]]:
    """Collects what programs take that are compiled meanwhile, not those that are loaded."""
    costs: list[Cost] = []
    original = program.build

    def build(context: cl.Context, file: str, macros: dict[str, object], *more: Any) -> Built:
        began = process_time()
        built = original(context, file, macros, *more)
        if not built.was_kept:
            costs.append(Cost(file, macros, process_time() - began))
        return built

    with holding(program, "build", build):
        yield costs
