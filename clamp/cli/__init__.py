"""The command line: ``python -m clamp bench``, ``compare``, ``doctor``, ``lists``, ``report``, ``run``, ``trace``,
``tune``, ``warm``.

A command's module is imported when the command runs: ``doctor`` must work where the packages that the others
need are missing, because it is what a user runs when something is.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import pyopencl as cl

import clamp
from clamp.casting.policy_table import CastPolicy
from clamp.cli.devices import Option, UnknownDeviceError, device_option
from clamp.opencl.device import NoDeviceError

T = TypeVar("T")

NOT_KEPT = "not kept for later processes: CLAMP_CACHE_DIR is off, or cannot be written to"
INTERRUPTED = 130  # the exit status after Ctrl-C, as shells have it
USUAL_WORKS = ("gemm", "conv", "attention", "bandwidth", "cast", "unscale", "step", "cnn")
SMALL_WORKS = ("first-step", "small")  # mostly Python's
# guide and resnet: minutes of netcl on a CPU
WORKS = (*USUAL_WORKS, "decoder", "guide", "resnet", "memory", *SMALL_WORKS)
EXTRAS = ("rich",)  # packages of the extra "cli" that commands import


class CommandError(Exception):
    """Raised where a command cannot do what was asked; `main` prints its text. ``status``: the command's exit
    status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; those of the process if not given.

    Returns:
        The exit status: 0 well, 1 a failed check or no device, 2 arguments that name nothing, 130 Ctrl-C.
    """
    args = arguments(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # drivers write progress to the logs of netcl's kernels
            try:
                status = _function_of(args.command)(args)
            except (CommandError, NoDeviceError, UnknownDeviceError) as error:
                print(error, file=sys.stderr)
                status = getattr(error, "status", 1)
            if not getattr(sys.stdout, "closed", True):  # by a user's script
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # who reads has what it wants: `doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or python complains when it flushes at its end
        return 1
    return status


def _function_of(command: str) -> Callable[[argparse.Namespace], int]:
    """Imports a command's function.

    Raises:
        CommandError: a package is missing that the command needs.
    """
    try:
        function: Callable[[argparse.Namespace], int] = resolve_name(_COMMANDS[command][0])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        raise CommandError(f"python -m clamp {command} needs {missing}: pip install {missing}") from error
    return function


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command, read as `main` reads them."""
    parser = argparse.ArgumentParser(prog="python -m clamp", description="Automatic mixed precision for netcl.")
    parser.add_argument("--version", action="version", version=f"clamp {clamp.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, what, options) in _COMMANDS.items():
        command = commands.add_parser(name, help=what)
        for names, how in options:
            command.add_argument(*names, **how)
    args = parser.parse_args(argv)
    if getattr(args, "works", None):
        args.only = tuple(args.works)
    return args


# ---------------------------------------------------------------------------------------------- what options read


def positive(text: str) -> int:
    """An integer of at least 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return number


def _each(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Returns what reads several of something, with commas."""
    return lambda text: tuple(map(read, text.split(",")))


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    """Returns what reads a name of ``known``."""

    def read(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return name

    return read


def _numbers(form: str) -> Callable[[str], tuple[int, ...]]:
    """Returns what reads as many numbers as a form has, ``"LxWxB"``, say."""

    def read(text: str) -> tuple[int, ...]:
        numbers = tuple(positive(part) for part in text.split("x"))
        if len(numbers) != form.count("x") + 1:
            raise argparse.ArgumentTypeError(f"{text!r}: write {form.count('x') + 1} numbers, {form}")
        return numbers

    return read


# ---------------------------------------------------------------------------------------------- the commands


def _option(*names: str, **how: Any) -> Option:
    return names, how


_LAYOUTS = ("NN", "NT", "TN", "TT")
_TIMELINES = ("netcl", "float32", "float16", "bfloat16", "float16-O2", "bfloat16-O2")
_POLICIES = tuple(policy.value for policy in CastPolicy)
_DTYPE = _option("--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="AMP dtype (float16)")
_SCRIPT = (
    _option("-m", dest="is_module", action="store_true", help="SCRIPT is a module, as after python -m"),
    _option("script", metavar="SCRIPT", help="a script that uses netcl; see docs/zero-lines.md"),
    _option("given", nargs=argparse.REMAINDER, metavar="...", help="its arguments"),
)
_BENCH = (
    device_option(),
    _option("--json", metavar="FILE", help="write the results; in a folder, as <device>-<date>.json"),
    _option("--quick", action="store_true", help="fewer sizes and rounds: minutes, mostly netcl's"),
    _option("--only", type=_each(_one_of(WORKS)), default=USUAL_WORKS, metavar="WORK,...",
            help=f"some of {','.join(WORKS)} ({','.join(USUAL_WORKS)})"),
    _option("--first-step", action="append_const", dest="works", const="first-step",
            help="time the first steps of processes, in CPU time, and nothing else"),
    _option("--small", action="append_const", dest="works", const="small",
            help="time the steps of small networks, and calls inside disable_casts(), and nothing else"),
    _option("--memory", action="append_const", dest="works", const="memory",
            help="measure the memory of training loops and the time that checkpointing takes, and nothing else"),
    _option("--against", type=Path, metavar="CHECKOUT",
            help="compare first steps with those of another checkout of clamp"),
    _option("--sizes", type=_each(positive), metavar="N,...", help="n of the n x n matrices (256,512,1024,2048)"),
    _option("--layouts", type=_each(_one_of(_LAYOUTS)), default=_LAYOUTS[:3], metavar="XX,...",
            help="layouts of the two matrices of a product, T: transposed (NN,NT,TN)"),
    _option("--convs", choices=("few", "resnet18", "one"), default="few",
            help="which convolutions (few of a ResNet's)"),
    _option("--attention", type=_numbers("BxHxTxD"), default=(2, 8, 512, 64), metavar="BxHxTxD",
            help="batch, heads, length and width of attention (2x8x512x64)"),
    _option("--elements", type=positive, default=10_000_000, metavar="N",
            help="elements of cast and unscale (10000000)"),
    _option("--step", type=_numbers("LxWxB"), default=(9, 1024, 256), metavar="LxWxB",
            help="layers, width and batch size of the training steps step and guide (9x1024x256)"),
    _option("--cnn", type=positive, default=64, metavar="B", help="batch size of the CNN's step (64)"),
    _option("--resnet", type=_numbers("CxB"), default=(64, 128), metavar="CxB",
            help="first channels and batch size of ResNet-18's step (64x128)"),
    _option("--decoder", type=_numbers("BxTxD"), default=(8, 256, 256), metavar="BxTxD",
            help="batch, length and width of a decoder block's step (8x256x256)"),
    _option("--images", type=positive, metavar="N", help="images that convolutions and pools take (32)"),
    _option("--timeline", nargs="?", const="float16", choices=_TIMELINES, metavar="WHAT",
            help="instead of timing, show what the device did in one step (of --only's network, or step): "
            f"{', '.join(_TIMELINES)} (float16)"),
    _option("--plot", metavar="FILE", help="draw the timeline"),
    _option("--no-peers", action="store_true", help="leave out numpy and torch"),
    _option("--no-netcl", action="store_true", help="leave out netcl, which tunes itself for minutes"),
)  # fmt: skip

#: Each command's function, what it is for, and its options.
_COMMANDS: dict[str, tuple[str, str, Sequence[Option]]] = {
    "doctor": ("clamp.cli.doctor:run", "what clamp finds on this machine, and whether it computes correctly",
               (device_option("all of them"),)),
    "lists": ("clamp.cli.lists:run", "which netcl function runs in which precision, and why", (
        _option("name", nargs="?", metavar="NAME",
                help="a function by full or short name (matmul_op), a layer (Conv2d), a part of names (pool), or, with "
                "the rules of a list file, the path of a module (layers.2.norm)"),
        _option("--lists", type=Path, metavar="FILE", help="a list file, as for amp.init(lists=)"),
        _option("--policy", choices=_POLICIES, metavar="POLICY", help=f"only {', '.join(_POLICIES)}"),
        _option("--level", choices=("O0", "OD", "O1", "O2"), default="O1", help="level of amp.init (O1)"),
        _DTYPE,
        device_option(),
    )),
    "bench": ("clamp.cli.bench.command:run", "time clamp against netcl, numpy and torch, side by side", _BENCH),
    "tune": ("clamp.cli.tune:run", "measure the fastest plans of a GPU's matrix units, and keep them", (
        device_option(),
        _option("--json", metavar="FILE", help="write all times; in a folder, as tune-<device>.json"),
        _option("--shapes", type=_each(_numbers("MxNxK")), metavar="MxNxK,...",
                help="products to measure (512x512x512 to 8192x8192x8192, and two of a wide layer)"),
    )),
    "report": ("clamp.cli.run:report", "make a page of a run, to open in any browser", (
        _option("run", type=Path, metavar="RUN.json", help="what clamp wrote of a run"),
        _option("-o", "--output", type=Path, metavar="FILE", help="where the page goes (RUN.html)"),
    )),
    "run": ("clamp.cli.run:run", "run a training script in mixed precision, unchanged", (
        _DTYPE,
        _option("--report", type=Path, metavar="FILE", help="write the run as a page, or as JSON (.json)"),
        *_SCRIPT,
    )),
    "trace": ("clamp.cli.trace:run", "write a trace of a script's first steps: checksums of each op", (
        _DTYPE,
        _option("--steps", type=positive, default=2, metavar="N", help="optimizer steps to trace (2)"),
        _option("-o", "--output", type=Path, metavar="FOLDER", help="where the trace of this device goes"),
        *_SCRIPT,
    )),
    "compare": ("clamp.cli.trace:compare", "compare a script's first steps with a trace, bit for bit", (
        _option("output", type=Path, metavar="FOLDER", help="what python -m clamp trace has written"),
        *_SCRIPT,
    )),
    "warm": ("clamp.cli.warm:run", "compile kernels before training, for container images and CI", (
        device_option(),
        _option("--model", nargs="+", default=["mlp", "cnn", "lm"], metavar="MODEL",
                help="mlp, cnn, lm (all three), or a script that turns AMP on, run until its second step is done"),
        _option("--list", action="store_true",
                help="compile everything again, keep nothing, and print the time of each program"),
    )),
}  # fmt: skip
