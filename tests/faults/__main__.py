"""``python -m tests.faults``: puts one fault after the other into small trainings, and prints what goes wrong."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator

import pyopencl as cl

import clamp  # noqa: F401  (makes Intel's pip-installed runtime visible)
from clamp.cli.devices import choose_device
from tests.faults.check import check_call, check_event, some_calls, some_events
from tests.faults.training import CASES


def main() -> int:
    """Returns 1 if anything has gone wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--device", default="cpu", help="a part of the device's name, as for python -m clamp bench")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--calls", type=int, default=0, help="how many calls into OpenCL to fail; 0: each in turn, -1: none"
    )
    parser.add_argument("--interrupts", type=int, default=300, help="how many interrupts")
    parser.add_argument(
        "--at", nargs="+", choices=("check", "line", "opcode"), default=["check"],
        help="where interrupts come: where Python looks for signals, or, stricter, at each line or bytecode",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="print each fault before it is put in")
    parser.add_argument("--case", default="", help="only those whose name contains this, such as mlp-eager-float16-O1")
    chosen = parser.parse_args()
    device = choose_device(chosen.device)
    context = cl.Context([device])  # held: Intel's runtime frees one that only its queue refers to
    queue = cl.CommandQueue(context, device)
    began, tried, wrong = time.perf_counter(), 0, 0
    for said in _tries(queue, chosen):
        tried += 1
        if said:
            wrong += 1
            print(said, flush=True)
    print(f"{tried} faults on {device.name}, seed {chosen.seed}: {wrong} wrong, {time.perf_counter() - began:.0f} s")
    return int(wrong > 0)


def _tries(queue: cl.CommandQueue, chosen: argparse.Namespace) -> Iterator[str]:
    cases = [case for case in CASES if chosen.case in str(case)]
    chance = random.Random(chosen.seed)
    for case, number in some_calls(queue, cases, chosen.calls, chance) if chosen.calls >= 0 else ():
        if chosen.verbose:
            print(f"{case}: call {number}", flush=True)
        yield check_call(queue, case, number)
    for case, phase, number, unit in some_events(queue, cases, chosen.interrupts, chance, chosen.at):
        if chosen.verbose:
            print(f"{case}: {phase}, {unit} {number}", flush=True)
        yield check_event(queue, case, phase, number, unit)


if __name__ == "__main__":
    sys.exit(main())
