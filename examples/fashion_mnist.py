"""Fashion-MNIST with a convolutional network, three times from the same seed: fp32 beside mixed precision.

    sudo apt install dataset-fashion-mnist
    python examples/fashion_mnist.py
    python examples/fashion_mnist.py --data DIR --seeds 3 --netcl-steps all --plot fashion.png

Convolutions, batch norm and max pooling learn 60,000 images of 28 x 28 pixels of ten kinds of clothes (Xiao, Rasul,
Vollgraf: Fashion-MNIST, 2017). ``train`` is the example: a netcl training loop in which two lines, marked below, turn
mixed precision on. netcl's own run is stopped after a few steps, which is enough for its time and its loss: it would
take the better part of an hour on a CPU (``--netcl-steps all`` lets it).
"""

from __future__ import annotations

import argparse
import gzip
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pyopencl as cl
from common import run_main
from comparison import Plan, Run, add_options
from images import CLASSES, Images, accuracy, batches, compare_on
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.nn.batchnorm import BatchNorm2dModule as BatchNorm2d
from netcl.nn.layers import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from netcl.optim import Adam

from clamp import amp
from clamp.cli import positive
from clamp.cli.devices import add_device_option

SIDE = 28
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where the package dataset-fashion-mnist puts its files
LEARNING_RATE = 2e-3


# ---------------------------------------------------------------------------------------------- the example


def make_model(queue: cl.CommandQueue) -> Sequential:
    """Two stages of convolution, batch norm and pooling for images of (1, 28, 28), and a classifier."""
    return Sequential(
        Conv2d(queue, 1, 32, 3, pad=1),
        BatchNorm2d(queue=queue, num_features=32),
        ReLU(),
        MaxPool2d(2, 2),
        Conv2d(queue, 32, 64, 3, pad=1),
        BatchNorm2d(queue=queue, num_features=64),
        ReLU(),
        MaxPool2d(2, 2),
        Flatten(),
        Linear(queue, 64 * 7 * 7, CLASSES),
    )


def train(queue: cl.CommandQueue, images: Images, plan: Plan) -> Run:
    """One training run, scored by its test accuracy in percent."""
    np.random.seed(plan.seed)  # netcl draws its weights from numpy's global generator
    model = make_model(queue)
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE)
    run = Run(steps_per_epoch=len(images.train_y) // plan.batch)
    data = batches(queue, images, plan.batch, np.random.default_rng(plan.seed))

    handle = amp.init(**plan.amp_options)  # <- line 1
    try:
        model.train()
        for step, (x, y) in enumerate(islice(data, plan.steps)):
            start = time.perf_counter()
            optimizer.lr = LEARNING_RATE * plan.left(step)
            optimizer.zero_grad()
            with ag.Tape() as tape:
                loss = F.cross_entropy(model(ag.tensor(x)), ag.tensor(y))
            with handle.scale_loss(loss, optimizer) as scaled_loss:  # <- line 2
                tape.backward(scaled_loss)
            optimizer.step()
            run.record(loss.value, handle, start)
            plan.on_step(run)

        if plan.is_whole:
            run.score = accuracy(model, queue, images)
        run.weights = [str(parameter.dtype) for parameter in model.parameters()]
    finally:
        handle.shutdown()
    return run


# ---------------------------------------------------------------------------------------------- data


def load(folder: Path = DEBIAN) -> Images:
    """The data set's four files: images of (n, 1, 28, 28) with mean 0 and deviation 1.

    Raises:
        SystemExit: they are not there, or are not whole; the message says where to get them.
    """
    try:
        train_x, test_x = (read_idx(folder / f"{part}-images-idx3-ubyte.gz") for part in ("train", "t10k"))
        train_y, test_y = (read_idx(folder / f"{part}-labels-idx1-ubyte.gz") for part in ("train", "t10k"))
    except (OSError, EOFError, ValueError) as error:
        raise SystemExit(
            f"{folder} has not the files of Fashion-MNIST ({error}). They are Debian's package dataset-fashion-mnist "
            "(sudo apt install dataset-fashion-mnist); or give the folder of the four .gz files with --data."
        ) from error
    mean, deviation = train_x.mean(), train_x.std()

    def normal(pixels: np.ndarray) -> np.ndarray:
        return ((pixels - mean) / deviation).astype(np.float32).reshape(-1, 1, SIDE, SIDE)

    return Images(normal(train_x), train_y, normal(test_x), test_y)


def read_idx(file: Path) -> np.ndarray:
    """An array of bytes in the IDX format: two zeros, 8 for bytes, the number of axes, then each extent in 4 bytes."""
    data = gzip.decompress(file.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{file} is no IDX file of bytes: it begins with {data[:3]!r}")
    axes = data[3]
    shape = np.frombuffer(data, ">u4", count=axes, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape.astype(int))


# ---------------------------------------------------------------------------------------------- main


def main() -> None:
    """Trains, prints the table, draws the plot."""
    parser = argparse.ArgumentParser(description="fp32 and mixed precision of a convolutional network on Fashion-MNIST")
    add_device_option(parser)
    parser.add_argument("--epochs", type=positive, default=1, metavar="N", help="times through the data (1)")
    add_options(parser, batch=64, netcl_steps=10)
    parser.add_argument("--data", type=Path, default=DEBIAN, metavar="DIR", help=f"default: {DEBIAN}")
    options = parser.parse_args()
    compare_on("Fashion-MNIST", load(options.data), make_model, train, parser, options)


if __name__ == "__main__":
    run_main(main)
