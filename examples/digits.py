"""Handwritten digits three times from the same seed: netcl's fp32, clamp in float32, and mixed precision.

    python examples/digits.py
    python examples/digits.py --dtype bfloat16 --seeds 3 --plot digits.png

An MLP learns the 1797 digits of 8 x 8 pixels that come with scikit-learn. ``train`` is the example: a netcl
training loop in which two lines, marked below, turn mixed precision on. Its batches are made in images.py; what is
measured of it, and how that is shown, is in comparison.py.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

import numpy as np
import pyopencl as cl
from common import run_main
from comparison import Plan, Run, add_options
from images import CLASSES, Images, accuracy, batches, compare_on
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.nn.layers import Linear, ReLU, Sequential
from netcl.optim import Adam
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from clamp import amp
from clamp.cli import positive
from clamp.cli.devices import add_device_option

# ---------------------------------------------------------------------------------------------- the example


def make_model(queue: cl.CommandQueue) -> Sequential:
    """An MLP for images of 64 pixels."""
    return Sequential(
        Linear(queue, 64, 256),
        ReLU(),
        Linear(queue, 256, 256),
        ReLU(),
        Linear(queue, 256, CLASSES),
    )


def train(queue: cl.CommandQueue, digits: Images, plan: Plan) -> Run:
    """One training run, scored by its test accuracy in percent."""
    np.random.seed(plan.seed)  # netcl draws its weights from numpy's global generator
    model = make_model(queue)
    optimizer = Adam(model.parameters(), lr=1e-3)
    run = Run(steps_per_epoch=len(digits.train_y) // plan.batch)
    data = batches(queue, digits, plan.batch, np.random.default_rng(plan.seed))

    handle = amp.init(**plan.amp_options)  # <- line 1
    try:
        model.train()
        for x, y in islice(data, plan.steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            with ag.Tape() as tape:
                loss = F.cross_entropy(model(ag.tensor(x)), ag.tensor(y))
            with handle.scale_loss(loss, optimizer) as scaled_loss:  # <- line 2
                tape.backward(scaled_loss)
            optimizer.step()
            run.record(loss.value, handle, start)
            plan.on_step(run)

        run.score = accuracy(model, queue, digits)
        run.weights = [str(parameter.dtype) for parameter in model.parameters()]
    finally:
        handle.shutdown()
    return run


# ---------------------------------------------------------------------------------------------- data


def load() -> Images:
    """The digits of scikit-learn, of (n, 64) in [0, 1], the same fifth of every class held back for the test."""
    images, classes = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, classes, test_size=0.2, stratify=classes, random_state=0
    )
    return Images(train_x, train_y, test_x, test_y)


# ---------------------------------------------------------------------------------------------- main


def main() -> None:
    """Trains, prints the table, draws the plot."""
    parser = argparse.ArgumentParser(description="netcl's fp32, clamp in float32 and mixed precision on the digits")
    add_device_option(parser)
    parser.add_argument("--epochs", type=positive, default=20, metavar="N", help="times through the data (20)")
    add_options(parser, batch=64)
    options = parser.parse_args()
    compare_on("Digits", load(), make_model, train, parser, options)


if __name__ == "__main__":
    run_main(main)
