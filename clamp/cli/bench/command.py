"""``python -m clamp bench``: clamp beside netcl, numpy and torch, timed turn about in one run."""

from __future__ import annotations

import importlib.util
import os
import platform
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import pyopencl as cl
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

import clamp
from clamp.cli import INTERRUPTED, USUAL_WORKS, CommandError
from clamp.cli.bench import networks
from clamp.cli.bench.bandwidth import bandwidth_cases, cast_cases, unscale_cases
from clamp.cli.bench.networks import Network
from clamp.cli.bench.peers import PeerProcess, installed_peers
from clamp.cli.bench.products import attention_cases, conv_cases, gemm_cases
from clamp.cli.bench.report import (
    RATIOS,
    Row,
    json_file,
    memory_rows,
    print_rows,
    rows_of,
    write_json,
)
from clamp.cli.bench.steps import call_cases, first_step_cases, small_cases
from clamp.cli.bench.timeline import content_of, plot, print_timeline, timeline_of
from clamp.cli.bench.timing import NORMAL, QUICK, Case, Effort, interleave
from clamp.cli.bench.training import checkpoint_case, memory_of, step_case, step_variants
from clamp.cli.console import make_console
from clamp.cli.devices import choose_device, describe, slug
from clamp.opencl.device import capabilities
from clamp.opencl.processor import host_cpu_flags

SIZES = (256, 512, 1024, 2048)
QUICK_SIZES = (256, 1024)
IMAGES, QUICK_IMAGES = 32, 4
_BUSY = 0.3  # load per core


def run(args: Namespace) -> int:
    """Runs the command; see `clamp.cli`."""
    device = choose_device(args.device)
    began = datetime.now(UTC)
    file = json_file(args.json, f"{slug(device)}-{began.date()}.json") if args.json else None
    if args.against is not None and "first-step" not in args.only:
        raise CommandError("--against compares first steps: give --first-step too", 2)
    # Its processes would find this clamp where that one is not, and compare it with itself.
    if args.against is not None and not (args.against / "clamp" / "__init__.py").is_file():
        raise CommandError(f"--against takes a checkout of clamp, and there is no clamp in {args.against}", 2)
    if args.plot and not args.timeline:
        raise CommandError("--plot draws a timeline: give --timeline too", 2)
    console = make_console()
    if args.timeline:
        only = ("step",) if args.only == USUAL_WORKS else args.only
        _show_timeline(args, device, networks_of(args, only), file, console)
        return 0
    context = cl.Context([device])  # held here: Intel's runtime frees a context that only its queue refers to
    queue = cl.CommandQueue(context, device)
    bench = Bench(queue, args, QUICK if args.quick else NORMAL, began, file)
    status = 0
    try:
        bench.run(console)
    except KeyboardInterrupt:
        bench.notes.append("interrupted: what is not in the tables was not measured")
        status = INTERRUPTED
    head = bench.head()
    _print_head(console, head)
    print_rows(console, bench.rows)
    for note in bench.notes:
        console.print(f"[yellow]{note}[/]", highlight=False)
    if file is not None:
        bench.write()
        console.print(f"written: {file}", highlight=False, soft_wrap=True)
    return status


@dataclass
class Bench:
    """One run of the benchmark."""

    queue: cl.CommandQueue  # the device under test
    args: Namespace  # the command's arguments
    effort: Effort  # how long to measure
    began: datetime  # when
    file: Path | None = None  # where results are written, or None
    rows: list[Row] = field(default_factory=list)  # what was measured
    notes: list[str] = field(default_factory=list)  # who failed, and why
    peers: dict[str, str] = field(default_factory=dict)  # the peers that took part
    _load: float | None = None

    def run(self, console: Console) -> None:
        """Measures everything that was asked for."""
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        with ExitStack() as stack:
            peers = self._start_peers(stack)
            # Drawn between turns only: a thread that redraws would take time from what is timed.
            progress = stack.enter_context(Progress(*columns, console=console, auto_refresh=False, transient=True))
            task = progress.add_task("")
            for case in self._cases(peers):
                if self.args.no_netcl:
                    case = replace(case, contenders=[one for one in case.contenders if one.name.split()[0] != "netcl"])
                what = f"{case.work} {case.name}"

                def show(name: str, what: str = what) -> None:
                    progress.update(task, description=f"{what}: {name}", refresh=True)

                race = interleave({one.name: one.turn for one in case.contenders}, self.effort, show)
                self.rows += rows_of(case, race)
                self.notes += [f"{what}: {name} failed: {reason}" for name, reason in race.failures.items()]
                self.write()
                if race.interrupted:
                    raise KeyboardInterrupt

    def write(self) -> None:
        """Writes what was measured so far, after each case: a run may be cut off."""
        if self.file is not None:
            write_json(self.file, {**self.head(), "ratios": RATIOS, "rows": [asdict(row) for row in self.rows]})

    def _start_peers(self, stack: ExitStack) -> list[PeerProcess]:
        if self.args.no_peers:
            return []
        on_gpu = not capabilities(self.queue).is_cpu
        peers, failures = stack.enter_context(installed_peers(self._threads(), on_gpu))
        self.notes += [f"{kind} did not start: {reason}" for kind, reason in failures.items()]
        self.peers = {peer.label: peer.version for peer in peers}
        return peers

    def _threads(self) -> int:
        """Threads for peers: as many as the device has cores, or all there are beside a GPU."""
        device = capabilities(self.queue)
        return device.compute_units if device.is_cpu else os.cpu_count() or 1

    def _cases(self, peers: Sequence[PeerProcess]) -> Iterator[Case]:
        args, queue = self.args, self.queue
        sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
        images = args.images or (QUICK_IMAGES if args.quick else IMAGES)
        cases_of: dict[str, Callable[[], Iterator[Case]]] = {
            "gemm": lambda: gemm_cases(queue, sizes, args.layouts, peers),
            "conv": lambda: conv_cases(queue, args.convs, images, peers),
            "attention": lambda: attention_cases(queue, args.attention, peers),
            "bandwidth": lambda: bandwidth_cases(queue, images),
            "cast": lambda: cast_cases(queue, args.elements),
            "unscale": lambda: unscale_cases(queue, args.elements),
            "first-step": lambda: first_step_cases(queue, args.against),
            "small": lambda: chain(small_cases(queue, peers), call_cases(queue)),
        }
        for work in (work for work in cases_of if work in args.only):
            yield from cases_of[work]()
        for network in memory_networks(args) if "memory" in args.only else ():
            self.rows += memory_of(self.queue, network, with_netcl=not args.no_netcl)
            self.write()
            yield checkpoint_case(self.queue, network)
        for network in networks_of(args, args.only):
            variants = list(step_variants(self.queue, network, ("O1", "O2") if network.work == "guide" else (None,)))
            yield step_case(variants, network, peers)
            # Here the step's rows stand: a generator goes on when its consumer asks for the next case.
            finished = {row.contender for row in self.rows if row.work == network.work}
            eager = (x for x in variants if x.name in finished and not x.is_recorded)
            self.rows += memory_rows(str(network), {x.name: x.memory() for x in eager})

    def head(self) -> dict[str, Any]:
        """Returns what one must know to read the figures: device, versions, settings."""
        device = self.queue.device
        return {
            "date": self.began.isoformat(timespec="seconds"),
            "device": {
                "name": device.name.strip(),
                "platform": device.platform.name.strip(),
                "platform_version": device.platform.version.strip(),
                "driver": device.driver_version.strip(),
                "compute_units": device.max_compute_units,
                "compute_capability": capabilities(self.queue).compute_capability,
                "local_memory_bytes": device.local_mem_size,
                "global_memory_bytes": device.global_mem_size,
                "clock_mhz": device.max_clock_frequency,
                "c_version": device.opencl_c_version.strip(),
                "extensions": device.extensions.split(),
                "description": describe(device),
            },
            "machine": {
                "system": platform.platform(),
                "cpus": os.cpu_count(),
                "cpu_flags": sorted(x for x in host_cpu_flags() if x.startswith(("avx", "f16c", "amx", "asimd"))),
                "load_before": self._load,
            },
            "versions": {
                "clamp": clamp.__version__,
                "python": platform.python_version(),
                **{name: version(name) for name in ("netcl", "pyopencl", "numpy")},
            },
            "peers": {"threads": self._threads(), **self.peers},
            "environment": {name: os.environ.get(name) for name in ("POCL_AFFINITY", "OPENBLAS_NUM_THREADS")},
            "quick": self.args.quick,
            "notes": self.notes,
        }


def networks_of(args: Namespace, works: Sequence[str]) -> list[Network]:
    """The networks among the works, in the sizes asked for."""
    layers, width, batch = args.step
    guide = networks.mlp(layers, width, batch, "guide", relu=False)
    known = [networks.mlp(layers, width, batch), networks.cnn(args.cnn), networks.decoder(*args.decoder), guide]
    known.append(networks.resnet(*args.resnet))
    return [network for network in known if network.work in works]


def memory_networks(args: Namespace) -> list[Network]:
    """Returns the networks whose memory is measured, in the sizes asked for, with optimizers that keep moments."""
    of_adam = [replace(x, optimizer="Adam") for x in (networks.mlp(*args.step), networks.cnn(args.cnn))]
    return [*of_adam, networks.char_lm(*args.decoder[:2])]


def _print_head(console: Console, head: dict[str, Any]) -> None:
    device, versions = head["device"], head["versions"]
    lines = [
        f"{device['description']}, {device['compute_units']} compute units",
        f"{device['platform_version']}, driver {device['driver']}",
        ", ".join(f"{name} {number}" for name, number in versions.items()),
        *(f"{name}: {text}" for name, text in head["peers"].items()),
        head["date"],
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    load, cpus = head["machine"]["load_before"], head["machine"]["cpus"]
    if load is not None and cpus and load > _BUSY * cpus:
        console.print(f"[yellow]other programs kept the machine busy (load {load:.1f}): do not trust these figures[/]")


def _show_timeline(
    args: Namespace, device: cl.Device, found: list[Network], file: Path | None, console: Console
) -> None:
    """Records, prints, draws and writes what was asked for."""
    if len(found) != 1:
        raise CommandError("--timeline is of one network: give --only step, cnn, decoder, guide or resnet", 2)
    if args.plot and not Path(args.plot).absolute().parent.is_dir():
        raise CommandError(f"cannot draw {args.plot}: there is no such folder", 2)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install matplotlib")
    timeline = timeline_of(device, found[0], args.timeline)
    title = f"{found[0]}, {args.timeline}, on {device.name.strip()}"
    print_timeline(console, timeline, title)
    if args.plot:
        plot(timeline, title, Path(args.plot))
        console.print(f"drawn: {args.plot}", highlight=False, soft_wrap=True)
    if file is not None:
        head = {"network": str(found[0]), "what": args.timeline, "device": device.name.strip()}
        write_json(file, {**head, **content_of(timeline)})
        console.print(f"written: {file}", highlight=False, soft_wrap=True)
