"""``python -m clamp tune``: measures the plans of a device's matrix units and keeps the fastest (ops/gemm/tuning).

Results do not depend on it but for the order in which sums are added up. Times are the device's own, from profiling
events: a launch's cost is the same for every plan.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from statistics import median

import pyopencl as cl
from rich.console import Console

from clamp import bridge
from clamp.bridge import Tensor
from clamp.cli import INTERRUPTED, NOT_KEPT
from clamp.cli.bench.report import json_file, write_json
from clamp.cli.bench.timing import QUICK, interleave, random_tensor
from clamp.cli.console import make_console, print_fitting, table_of
from clamp.cli.devices import choose_device, describe, slug
from clamp.debug.profiler import Profiler
from clamp.opencl import trials
from clamp.ops.gemm import engines, tuning
from clamp.ops.gemm.matrix_units import MatrixUnit
from clamp.ops.gemm.plan import Plan
from clamp.ops.gemm.problem import Epilogue, operand_a, operand_b
from clamp.ops.gemm.tuning import Tuning

SHAPES = (
    *((n, n, n) for n in (512, 1024, 2048, 4096, 8192)),
    (2048, 8192, 8192),  # a wide layer, and the gradient of its weights
    (8192, 8192, 2048),
)
LAYOUTS = ("NN", "NT", "TN")  # forward, and the two of backward

Shape = tuple[int, ...]
Show = Callable[[str], None]


def run(args: Namespace) -> int:
    """Runs the command; see `clamp.cli`."""
    device = choose_device(args.device)
    context = cl.Context([device])  # held here: Intel's runtime frees a context that only its queue refers to
    queue = cl.CommandQueue(context, device, properties=cl.command_queue_properties.PROFILING_ENABLE)
    unit = next((unit for unit in engines.MATRIX_UNITS if unit.verified_plans(queue)), None)
    if unit is None:
        print(f"{describe(device)}: there is nothing to tune: no matrix units that compute right here")
        return 0
    file = json_file(args.json, f"tune-{slug(device)}.json") if args.json else None
    console = make_console()
    for name, verdict in unit.candidates.verdicts(queue, anew=True).items():
        if verdict != trials.RIGHT:
            console.print(f"{name} is left out: {verdict}", highlight=False, soft_wrap=True)
    found, status = Tuning(), 0
    try:
        measure(queue, unit, args.shapes or SHAPES, found, lambda what: console.print(f"measuring {what}"))
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: what is not in the table was not measured[/]")
        status = INTERRUPTED
    is_kept = tuning.keep(device, unit.where, unit.trial_key, found)
    print_tuning(console, found, f"{unit.NAME} on {describe(device)}, TFLOP/s")
    if not is_kept:
        console.print(f"[yellow]{NOT_KEPT}[/]")
    if file is not None:
        write_json(file, {"unit": unit.NAME, **asdict(found)})
    return status


def measure(queue: cl.CommandQueue, unit: MatrixUnit, shapes: Sequence[Shape], found: Tuning, show: Show) -> None:
    """Times every verified plan, turn about, on products of (M, N, K) in float16, in each layout, into found."""
    plans = list(unit.measurable_plans(queue))
    for m, n, k in shapes:
        for layout in LAYOUTS:
            name = tuning.size_class(layout, m, n, k)
            show(f"{layout} {m}x{n}x{k}")
            with suppress(cl.MemoryError, MemoryError):  # a device that has no room for the largest
                seconds, usual = _seconds(queue, unit, plans, layout, (m, n, k))
                if seconds:
                    found.seconds[name] = seconds
                    found.winners[name] = tuning.winner_of(seconds, usual)


def _seconds(
    queue: cl.CommandQueue, unit: MatrixUnit, plans: Sequence[Plan], layout: str, shape: Shape
) -> tuple[dict[str, float], str]:
    """Seconds by each plan's name, and the name of the plan that runs untuned."""
    m, n, k = shape
    flip_a, flip_b = (side == "T" for side in layout)
    a = operand_a(random_tensor(queue, (k, m) if flip_a else (m, k), "float16"), flip_a)
    b = operand_b(random_tensor(queue, (n, k) if flip_b else (k, n), "float16", 1), flip_b)
    c: Tensor = bridge.empty(queue, (m, n), "float16")

    def turn(plan: Plan, calls: int) -> list[float]:
        times, slices = [], unit.slices(plan, a, b, c)
        for _ in range(calls):
            with Profiler() as profiler:
                unit.compute(a, b, c, Epilogue("float16"), plan, slices)
            queue.finish()
            times.append(sum(profiler.seconds))
        return times

    race = interleave({str(plan): partial(turn, plan) for plan in plans}, QUICK)
    if race.interrupted:
        raise KeyboardInterrupt
    return {name: median(seconds) for name, seconds in race.seconds.items()}, str(unit.usual_plan(a, b, c))


def print_tuning(console: Console, found: Tuning, title: str) -> None:
    """A row for each class of products, a column for each plan; the winner in bold."""
    plans = list(dict.fromkeys(name for seconds in found.seconds.values() for name in seconds))
    table = table_of(["products"], plans, title, caption="bold: what runs from now on")
    for products, seconds in found.seconds.items():
        flops = 2e-12 * math.prod(map(int, products.split()[1].split("x")))
        figures = {name: f"{flops / seconds[name]:.3g}" if seconds.get(name) else "" for name in plans}
        winner = found.winners[products]
        table.add_row(products, *(f"[bold]{x}[/]" if name == winner else x for name, x in figures.items()))
    print_fitting(console, table)
