"""The command line: ``python -m clamp bench``, ``compare``, ``doctor``, ``lists``, ``report``, ``run``, ``trace``,
``tune``, ``warm``.

A command's module is imported when the command runs: ``doctor`` must work where the packages that the others
need are missing, because it is what a user runs when something is.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pyopencl as cl

import clamp
from clamp.casting.policy_table import CastPolicy
from clamp.cli.devices import UnknownDeviceError, add_device_option
from clamp.opencl.device import NoDeviceError

INTERRUPTED = 130  # the exit status after Ctrl-C, as shells have it
USUAL_WORKS = ("gemm", "conv", "attention", "bandwidth", "cast", "unscale", "step", "cnn")
SMALL_WORKS = ("first-step", "small")  # mostly Python's
WORKS = (
    *USUAL_WORKS,
    "decoder",
    "guide",
    "resnet",
    "memory",
    *SMALL_WORKS,
)  # guide and resnet: minutes of netcl on a CPU
LAYOUTS = ("NN", "NT", "TN", "TT")
CONVS = ("few", "resnet18", "one")
_MODULES = {
    "bench": "clamp.cli.bench.command",
    "compare": "clamp.cli.trace",
    "doctor": "clamp.cli.doctor",
    "lists": "clamp.cli.lists",
    "report": "clamp.cli.report",
    "run": "clamp.cli.run",
    "trace": "clamp.cli.trace",
    "tune": "clamp.cli.tune",
    "warm": "clamp.cli.warm",
}
TIMELINES = ("netcl", "float32", "float16", "bfloat16", "float16-O2", "bfloat16-O2")
POLICIES = tuple(policy.value for policy in CastPolicy)
EXTRAS = ("rich",)  # packages of the extra "cli" that commands import


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; those of the process if not given.

    Returns:
        The exit status: 0 well, 1 a failed check or no device, 2 arguments that name nothing, 130 Ctrl-C.
    """
    args = arguments(argv)
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
    except NoDeviceError as error:
        print(error, file=sys.stderr)
        return 1
    except UnknownDeviceError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command, read as `main` reads them."""
    args = _parser().parse_args(argv)
    if getattr(args, "works", None):
        args.only = tuple(args.works)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m clamp", description="Automatic mixed precision for netcl.")
    parser.add_argument("--version", action="version", version=f"clamp {clamp.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="what clamp finds on this machine, and whether it computes correctly")
    add_device_option(doctor, default="all of them")
    _add_lists(commands.add_parser("lists", help="which netcl function runs in which precision, and why"))
    _add_bench(commands.add_parser("bench", help="time clamp against netcl, numpy and torch, side by side"))
    _add_tune(commands.add_parser("tune", help="measure how a GPU's matrix units multiply fastest, and keep it"))
    _add_report(commands.add_parser("report", help="make a page of a run, to open in any browser"))
    _add_run(commands.add_parser("run", help="train a script of netcl's in mixed precision, as it is"))
    _add_trace(commands.add_parser("trace", help="write what each op of a script's first steps gives, to compare with"))
    _add_compare(
        commands.add_parser("compare", help="say which op of a script's first steps gives other bits than then")
    )
    _add_warm(commands.add_parser("warm", help="compile what training steps need before they do: for images and CI"))
    return parser


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN.json", help="what clamp wrote of a run")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the page goes (RUN.html)")


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_dtype(parser)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the run as a page, or as JSON (.json)")
    _add_script(parser)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    _add_dtype(parser)
    parser.add_argument("--steps", type=positive, default=2, metavar="N", help="of optimizers, after which it ends (2)")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="where the trace of this device goes")
    _add_script(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=Path, metavar="FOLDER", help="what python -m clamp trace has written")
    _add_script(parser)


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module, as after python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a script of netcl's, as it is; see docs/zero-lines.md")
    parser.add_argument("given", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="AMP dtype (float16)"
    )


def _add_warm(parser: argparse.ArgumentParser) -> None:
    add_device_option(parser)
    parser.add_argument(
        "--model", nargs="+", default=["mlp", "cnn", "lm"], metavar="MODEL",
        help="mlp, cnn, lm (all three), or a training script, which is run until its second step is done",
    )  # fmt: skip
    parser.add_argument(
        "--list", action="store_true", help="compile everything anew, keep nothing, and print what each program takes"
    )


def _add_tune(parser: argparse.ArgumentParser) -> None:
    add_device_option(parser)
    parser.add_argument("--json", metavar="FILE", help="write all times")
    parser.add_argument(
        "--shapes", type=_shapes, metavar="MxNxK,...",
        help="products to measure (512x512x512 to 8192x8192x8192, and two of a wide layer)",
    )  # fmt: skip


def _add_lists(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME",
        help="a function by full or own name (matmul_op), a layer (Conv2d), a part of names (pool), or, with the "
        "rules of a list file, the path of a module (layers.2.norm)",
    )  # fmt: skip
    parser.add_argument("--lists", type=Path, metavar="FILE", help="a list file, as for amp.init(lists=)")
    parser.add_argument("--policy", choices=POLICIES, metavar="POLICY", help=f"only {', '.join(POLICIES)}")
    parser.add_argument("--level", choices=("O0", "OD", "O1", "O2"), default="O1", help="level of amp.init (O1)")
    _add_dtype(parser)
    add_device_option(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add_device_option(parser)
    parser.add_argument("--json", metavar="FILE", help="write the results; into a folder as <device>-<date>.json")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: minutes, mostly netcl's")
    parser.add_argument(
        "--only", type=_some_of(WORKS), default=USUAL_WORKS, metavar="WORK,...",
        help=f"some of {','.join(WORKS)} ({','.join(USUAL_WORKS)})",
    )  # fmt: skip
    for work, what in (
        ("first-step", "first steps of processes, in CPU time"),
        ("small", "steps of small networks, and calls inside disable_casts()"),
    ):
        parser.add_argument(
            f"--{work}", action="append_const", dest="works", const=work, help=f"time the {what}, and nothing else"
        )
    parser.add_argument(
        "--memory", action="append_const", dest="works", const="memory",
        help="measure the memory of training loops and the time that checkpointing takes, and nothing else",
    )  # fmt: skip
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="compare first steps with those of another checkout of clamp"
    )
    parser.add_argument("--sizes", type=_sizes, metavar="N,...", help="n of the n x n matrices (256,512,1024,2048)")
    parser.add_argument(
        "--layouts", type=_some_of(LAYOUTS), default=LAYOUTS[:3], metavar="XX,...",
        help="how the two matrices of a product lie, T is transposed (NN,NT,TN)",
    )  # fmt: skip
    parser.add_argument("--convs", choices=CONVS, default="few", help="which convolutions (few of a ResNet's)")
    parser.add_argument(
        "--attention", type=_numbers("BxHxTxD"), default=(2, 8, 512, 64), metavar="BxHxTxD",
        help="batch, heads, length and width of attention (2x8x512x64)",
    )  # fmt: skip
    parser.add_argument(
        "--elements", type=positive, default=10_000_000, metavar="N", help="elements of cast and unscale (10000000)"
    )
    parser.add_argument(
        "--step", type=_numbers("LxWxB"), default=(9, 1024, 256), metavar="LxWxB",
        help="layers, width and batch size of the training steps step and guide (9x1024x256)",
    )  # fmt: skip
    parser.add_argument("--cnn", type=positive, default=64, metavar="B", help="batch size of the CNN's step (64)")
    parser.add_argument(
        "--resnet", type=_numbers("CxB"), default=(64, 128), metavar="CxB",
        help="first channels and batch size of ResNet-18's step (64x128)",
    )  # fmt: skip
    parser.add_argument(
        "--decoder", type=_numbers("BxTxD"), default=(8, 256, 256), metavar="BxTxD",
        help="batch, length and width of a decoder block's step (8x256x256)",
    )  # fmt: skip
    parser.add_argument("--images", type=positive, metavar="N", help="images that convolutions and pools take (32)")
    parser.add_argument(
        "--timeline", nargs="?", const="float16", choices=TIMELINES, metavar="WHAT",
        help=f"instead of timing, show what the device did in one step (of --only's network, or step): "
        f"{', '.join(TIMELINES)} (float16)",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE", help="draw the timeline")
    parser.add_argument("--no-peers", action="store_true", help="leave out numpy and torch")
    parser.add_argument("--no-netcl", action="store_true", help="leave out netcl, which tunes itself for minutes")


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
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return number


def _some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns what reads names of ``known``, with commas."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return read


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def _shapes(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_numbers("MxNxK")(part) for part in text.split(","))


def _numbers(form: str) -> Callable[[str], tuple[int, ...]]:
    """Returns what reads as many numbers as a form has, ``"LxWxB"``, say."""

    def read(text: str) -> tuple[int, ...]:
        numbers = tuple(positive(part) for part in text.split("x"))
        if len(numbers) != form.count("x") + 1:
            raise argparse.ArgumentTypeError(f"{text!r}: write {form.count('x') + 1} numbers, {form}")
        return numbers

    return read
