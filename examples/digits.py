"""Handwritten digits three times from the same seed: netcl's fp32, clamp in float32, and mixed precision.

    python examples/digits.py
    python examples/digits.py --dtype bfloat16 --seeds 3 --plot digits.png

An MLP learns the 1797 digits of 8 x 8 pixels that come with scikit-learn. ``train`` is the example: a netcl
training loop in which two lines, marked below, turn mixed precision on. What is measured of it, and how it is
shown, is in comparison.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyopencl as cl
from common import check_batch, describe, open_queue, run_main
from comparison import OnStep, Run, Task, add_options, show, step_memory
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn import functional as F
from netcl.nn.layers import Linear, Module, ReLU, Sequential
from netcl.optim import Adam
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from clamp import amp
from clamp.cli.arguments import add_device_option, positive

CLASSES = 10


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


def train(
    queue: cl.CommandQueue,
    digits: Digits,
    amp_options: dict[str, Any],
    seed: int = 0,
    steps: int = 440,
    batch: int = 64,
    on_step: OnStep = lambda run: None,
) -> Run:
    """One training run, scored by its test accuracy in percent.

    Args:
        amp_options: what ``amp.init`` is given.
        seed: of the weights and of the order of the images.
        on_step: called with the run so far after every step.
    """
    np.random.seed(seed)  # netcl draws its weights from numpy's global generator
    model = make_model(queue)
    optimizer = Adam(model.parameters(), lr=1e-3)
    run = Run(steps_per_epoch=len(digits.train_y) // batch)
    order = np.random.default_rng(seed)

    handle = amp.init(**amp_options)  # <- line 1
    try:
        model.train()
        for x, y in islice(batches(queue, digits, batch, order), steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            with ag.Tape() as tape:
                loss = F.cross_entropy(model(ag.tensor(x)), ag.tensor(y))
            with handle.scale_loss(loss, optimizer) as scaled_loss:  # <- line 2
                tape.backward(scaled_loss)
            optimizer.step()
            run.record(loss.value, handle, start)
            on_step(run)

        run.score = 100 * accuracy(model, queue, digits)
        run.weights = [str(parameter.dtype) for parameter in model.parameters()]
    finally:
        handle.shutdown()
    return run


def accuracy(model: Module, queue: cl.CommandQueue, digits: Digits) -> float:
    """Share of the test images that the model names right."""
    model.eval()
    with ag.no_grad():
        logits = amp.cast(model(ag.tensor(Tensor.from_host(queue, digits.test_x))), "float32")
    return float((logits.value.to_host().argmax(axis=1) == digits.test_y).mean())


# ---------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Digits:
    """The images, float32 of (n, 64) in [0, 1], and their classes, of (n,)."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load() -> Digits:
    """The digits of scikit-learn, the same fifth of every class held back for the test."""
    images, classes = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, classes, test_size=0.2, stratify=classes, random_state=0
    )
    return Digits(train_x, train_y, test_x, test_y)


def batches(
    queue: cl.CommandQueue, digits: Digits, batch: int, order: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches on the device, epoch after epoch: images of (batch, 64), one-hot classes of (batch, 10).

    netcl's fp32 takes classes as one-hot rows; its version for indices hangs on PoCL.
    """
    one_hot = np.eye(CLASSES, dtype=np.float32)
    while True:
        shuffled = order.permutation(len(digits.train_y))
        for first in range(0, len(shuffled) - batch + 1, batch):
            chosen = shuffled[first : first + batch]
            x = Tensor.from_host(queue, digits.train_x[chosen])
            y = Tensor.from_host(queue, one_hot[digits.train_y[chosen]])
            yield x, y


# ---------------------------------------------------------------------------------------------- main


def memory(queue: cl.CommandQueue, digits: Digits, batch: int, amp_options: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the activations and at the peak, of one training step."""
    model = make_model(queue)
    x, y = next(batches(queue, digits, batch, np.random.default_rng(0)))
    return step_memory(model, lambda: F.cross_entropy(model(ag.tensor(x)), ag.tensor(y)), amp_options)


def make_task(queue: cl.CommandQueue, digits: Digits, options: argparse.Namespace) -> Task:
    """What is run in three ways."""
    return Task(
        title=f"Digits: epochs {options.epochs}, batch {options.batch}, seeds {options.seeds}",
        score="test\naccuracy",
        show_score="{:.2f} %".format,
        steps=options.epochs * (len(digits.train_y) // options.batch),
        train=lambda amp_options, seed, steps, on_step: train(
            queue, digits, amp_options, seed, steps, options.batch, on_step
        ),
        memory=partial(memory, queue, digits, options.batch),
    )


def main() -> None:
    """Trains, prints the table, draws the plot."""
    parser = argparse.ArgumentParser(description="netcl's fp32, clamp in float32 and mixed precision on the digits")
    add_device_option(parser)
    parser.add_argument("--epochs", type=positive, default=20, metavar="N", help="times through the data (20)")
    add_options(parser, batch=64)
    options = parser.parse_args()
    digits = load()
    check_batch(parser, options.batch, len(digits.train_y))
    queue = open_queue(options.device)
    show(make_task(queue, digits, options), options, describe(queue))


if __name__ == "__main__":
    run_main(main)
