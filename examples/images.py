"""What the examples that name images have in common: batches, accuracy, and what is compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyopencl as cl
from common import check_batch, describe, open_queue
from comparison import AmpOptions, Plan, Run, Task, show, step_memory
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn import functional as F
from netcl.nn.layers import Module

from clamp import amp

CLASSES = 10


@dataclass(frozen=True)
class Images:
    """Images, float32 of (n, ...), and their classes, integers of (n,)."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def on_device(queue: cl.CommandQueue, images: Images, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
    """Images to train on, by their numbers, and their classes as one-hot rows.

    netcl's fp32 takes classes as one-hot rows; its version for indices hangs on PoCL.
    """
    one_hot = np.eye(CLASSES, dtype=np.float32)[images.train_y[chosen]]
    return Tensor.from_host(queue, images.train_x[chosen]), Tensor.from_host(queue, one_hot)


def shuffled(images: Images, batch: int, order: np.random.Generator) -> Iterator[np.ndarray]:
    """Numbers of the images of each batch, epoch after epoch."""
    while True:
        numbers = order.permutation(len(images.train_y))
        yield from (numbers[first : first + batch] for first in range(0, len(numbers) - batch + 1, batch))


def batches(
    queue: cl.CommandQueue, images: Images, batch: int, order: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches on the device, epoch after epoch."""
    return (on_device(queue, images, chosen) for chosen in shuffled(images, batch, order))


def accuracy(model: Module, queue: cl.CommandQueue, images: Images) -> float:
    """Percentage of the test images that the model names right; without gradients, 500 at a time."""
    model.eval()
    right = 0
    with ag.no_grad():
        for first in range(0, len(images.test_y), 500):
            x = Tensor.from_host(queue, images.test_x[first : first + 500])
            logits = amp.cast(model(ag.tensor(x)), "float32").value.to_host()
            right += int((logits.argmax(axis=1) == images.test_y[first : first + 500]).sum())
    return 100 * right / len(images.test_y)


def compare_on(
    name: str,
    images: Images,
    make_model: Callable[[cl.CommandQueue], Module],
    train: Callable[[cl.CommandQueue, Images, Plan], Run],
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
) -> None:
    """Trains in three ways, prints the table, draws the plot."""
    check_batch(parser, options.batch, len(images.train_y))
    queue = open_queue(options.device)

    def memory(amp_options: AmpOptions) -> tuple[int, int]:
        model = make_model(queue)
        x, y = on_device(queue, images, np.arange(options.batch))
        return step_memory(model, lambda: F.cross_entropy(model(ag.tensor(x)), ag.tensor(y)), amp_options)

    task = Task(
        title=f"{name}: epochs {options.epochs}, batch {options.batch}, seeds {options.seeds}",
        score="test\naccuracy",
        show_score="{:.2f} %".format,
        steps=options.epochs * (len(images.train_y) // options.batch),
        train=partial(train, queue, images),
        memory=memory,
    )
    show(task, options, describe(queue))
