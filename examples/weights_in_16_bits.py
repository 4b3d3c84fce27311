"""Weights that are kept in 16 bits, in each of the ways that ``master_weight`` names, and 8-bit moments.

    python examples/weights_in_16_bits.py
    python examples/weights_in_16_bits.py fashion_mnist
    python examples/weights_in_16_bits.py char_lm --dtype float16 --seeds 1

Nothing but these differs from way to way. Models and data are those of digits.py, fashion_mnist.py and char_lm.py; the
small learning rate, which falls to zero, is what makes most updates smaller than bfloat16 can add to a weight.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import char_lm
import digits
import fashion_mnist
import images
import numpy as np
import pyopencl as cl
from common import describe, open_queue, run_main
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn import functional as F
from netcl.nn.layers import Module
from netcl.optim import Adam

from clamp import amp
from clamp.cli import positive
from clamp.cli.devices import add_device_option

WAYS: dict[str, dict[str, Any]] = {
    "fp32 masters": {"master_weight": True},
    "nearest rounding": {"master_weight": False},
    "remainder": {"master_weight": "remainder"},
    "kahan": {"master_weight": "kahan"},
    "stochastic": {"master_weight": "stochastic"},
    "8-bit moments": {"master_weight": True, "optimizer": amp.optim.Adam8bit},
    "remainder, 8-bit": {"master_weight": "remainder", "optimizer": amp.optim.Adam8bit},
}


@dataclass(frozen=True)
class Job:
    """What is trained."""

    make_model: Callable[[cl.CommandQueue], Module]  # on a queue
    # of inputs and one-hot targets, in the order that a generator draws
    batches: Callable[[cl.CommandQueue, np.random.Generator], Iterator[tuple[Any, Tensor]]]
    score: Callable[[Module, cl.CommandQueue], float]  # what is right of what the model has not seen, in percent
    lr: float  # at the first step
    steps: int  # of a run


def of_images(example: Any, steps: int) -> Job:
    """Digits or clothes, in batches of 64."""
    data = example.load()

    def batches(queue: cl.CommandQueue, order: np.random.Generator) -> Iterator[tuple[Any, Tensor]]:
        return ((ag.tensor(x), y) for x, y in images.batches(queue, data, 64, order))

    return Job(example.make_model, batches, lambda model, queue: images.accuracy(model, queue, data), 1e-4, steps)


def of_text() -> Job:
    """Python's sources, 16 windows at a time; what is scored is the next character."""
    text = char_lm.load()

    def score(model: Module, queue: cl.CommandQueue) -> float:
        held_back = islice(char_lm.batches(queue, text.validation, 16, np.random.default_rng(0)), 32)
        with ag.no_grad():
            right = [
                np.mean(amp.cast(model(codes), "float32").value.to_host().argmax(1) == following.to_host().argmax(1))
                for codes, following in held_back
            ]
        return 100 * float(np.mean(right))

    return Job(char_lm.CharLM, lambda queue, order: char_lm.batches(queue, text.train, 16, order), score, 3e-4, 300)


JOBS = {
    "digits": partial(of_images, digits, 600),
    "fashion_mnist": partial(of_images, fashion_mnist, 500),
    "char_lm": of_text,
}


def train(
    queue: cl.CommandQueue, job: Job, dtype: str, seed: int, *, master_weight: bool | str,
    optimizer: Callable[..., Any] = Adam,
) -> float:  # fmt: skip
    """One training run; returns its score in percent."""
    np.random.seed(seed)  # netcl draws its weights from numpy's global generator
    model = job.make_model(queue)
    model, adam = amp.decorate(
        model, optimizer(model.parameters(), lr=job.lr), dtype=dtype, master_weight=master_weight, rounding_seed=seed
    )
    with amp.init(dtype=dtype, level="O2") as handle:
        model.train()
        for step, (x, y) in enumerate(islice(job.batches(queue, np.random.default_rng(seed)), job.steps)):
            adam.lr = job.lr * (1 - step / job.steps)
            adam.zero_grad()
            loss = F.cross_entropy(model(x), ag.tensor(y))
            with handle.scale_loss(loss, adam) as scaled_loss:
                scaled_loss.backward()
            adam.step()
        return job.score(model, queue)


def main() -> None:
    """Trains each way with each seed, and prints the table."""
    parser = argparse.ArgumentParser(description="weights in 16 bits, with fp32 masters and without")
    parser.add_argument("job", nargs="?", choices=JOBS, default="digits", help="what is trained (digits)")
    add_device_option(parser)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each way (3)")
    options = parser.parse_args()
    queue, job = open_queue(options.device), JOBS[options.job]()
    warnings.filterwarnings("ignore", message="in this step .* loses")  # which is what is shown here
    print(f"{describe(queue)}, {options.job}, {options.dtype}, {job.steps} steps; percent right, by seed, and mean")
    for name, way in WAYS.items():
        found = [train(queue, job, options.dtype, seed, **way) for seed in range(options.seeds)]
        print(f"{name:18}" + "".join(f"{score:8.2f}" for score in found) + f"{np.mean(found):10.2f}", flush=True)


if __name__ == "__main__":
    run_main(main)
