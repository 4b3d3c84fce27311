"""The command line: ``python -m clamp bench``, ``doctor``, ``lists``.

A command's module is imported when the command runs: ``doctor`` must work where the packages that the others
need are missing, because it is what a user runs when something is.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence

import pyopencl as cl

import clamp
from clamp.casting.policy import CastPolicy
from clamp.cli.arguments import INTERRUPTED, add_device_option, positive

WORKS = ("gemm", "conv", "bandwidth", "cast", "unscale", "step", "cnn")
_MODULES = {"bench": "clamp.cli.bench.command", "doctor": "clamp.cli.doctor", "lists": "clamp.cli.lists"}
POLICIES = tuple(policy.value for policy in CastPolicy)
EXTRAS = ("rich",)  # packages of the extra "examples" that commands import


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; those of the process if not given.

    Returns:
        The exit status: 0 well, 1 a failed check or no device, 2 arguments that name nothing, 130 Ctrl-C.
    """
    args = _parser().parse_args(argv)
    try:
        command = importlib.import_module(_MODULES[args.command])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        print(f"python -m clamp {args.command} needs {missing}: pip install {missing}", file=sys.stderr)
        return 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # drivers write progress to the logs of netcl's kernels
            status: int = command.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m clamp", description="Automatic mixed precision for netcl.")
    parser.add_argument("--version", action="version", version=f"clamp {clamp.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what clamp finds on this machine, and whether it computes correctly")
    _add_lists(commands.add_parser("lists", help="which netcl function runs in which precision, and why"))
    _add_bench(commands.add_parser("bench", help="time clamp against netcl, numpy and torch, side by side"))
    return parser


def _add_lists(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME",
        help="a function by full or own name (matmul_op), a layer (Conv2d), or a part of names (pool)",
    )  # fmt: skip
    parser.add_argument("--policy", choices=POLICIES, metavar="POLICY", help=f"only {', '.join(POLICIES)}")
    parser.add_argument("--level", choices=("O0", "OD", "O1", "O2"), default="O1", help="level of amp.init (O1)")
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="AMP dtype (float16)"
    )
    add_device_option(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add_device_option(parser)
    parser.add_argument("--json", metavar="FILE", help="write the results; into a folder as <device>-<date>.json")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: minutes, mostly netcl's")
    parser.add_argument("--only", type=_works, default=WORKS, metavar="WORK,...", help=f"some of {','.join(WORKS)}")
    parser.add_argument("--sizes", type=_sizes, metavar="N,...", help="n of the n x n matrices (256,512,1024,2048)")
    parser.add_argument(
        "--elements", type=positive, default=10_000_000, metavar="N", help="elements of cast and unscale (10000000)"
    )
    parser.add_argument(
        "--step", type=_step, default=(9, 1024, 256), metavar="LxWxB",
        help="layers, width and batch size of the training step (9x1024x256)",
    )  # fmt: skip
    parser.add_argument("--cnn", type=positive, default=64, metavar="B", help="batch size of the CNN's step (64)")
    parser.add_argument("--images", type=positive, metavar="N", help="images that convolutions and pools take (32)")
    parser.add_argument("--no-peers", action="store_true", help="leave out numpy and torch")


def _works(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in WORKS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKS)}")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def _step(text: str) -> tuple[int, int, int]:
    numbers = [positive(part) for part in text.split("x")]
    if len(numbers) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}: write LAYERSxWIDTHxBATCH, for example 9x1024x256")
    return numbers[0], numbers[1], numbers[2]
