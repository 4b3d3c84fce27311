"""From a run that AMP skips step after step to the line that is to blame, and its cure.

    python examples/debug_overflow.py

The model compares features with prototypes. Their products are beyond 65504, the largest number of float16, and so
inf: no loss scale helps. ``handle.explain(step)`` runs one step more, only to look at it, and names the line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import pyopencl as cl
from common import describe, open_queue, run_main
from netcl import autograd as ag
from netcl.autograd import Node
from netcl.core.tensor import Tensor
from netcl.nn import functional as F
from netcl.nn.layers import Linear, Module, ReLU, Sequential
from netcl.optim import Adam

from clamp import amp
from clamp.cli.devices import add_device_option

CLASSES, ROWS = 8, 256


class Classifier(Module):
    """Scores of each class: products of a row's features with the prototype of the class."""

    def __init__(self, queue: cl.CommandQueue, prototypes: np.ndarray) -> None:
        self.features = Sequential(Linear(queue, 32, 64), ReLU(), Linear(queue, 64, 64))
        self.prototypes = Tensor.from_host(queue, prototypes)

    def forward(self, x: Node) -> Node:
        features = ag.mul(self.features(x), 100.0)
        return ag.matmul_op(features, ag.tensor(self.prototypes))

    __call__ = forward


class CuredClassifier(Classifier):
    """The same with the cure around the line that the explanation names."""

    def forward(self, x: Node) -> Node:
        features = ag.mul(self.features(x), 100.0)
        with amp.autocast(dtype="float32"):
            return ag.matmul_op(features, ag.tensor(self.prototypes))

    __call__ = forward


def make_step(handle: amp.AmpHandle, queue: cl.CommandQueue, kind: type[Classifier]) -> Callable[[], float]:
    """One step of training, which returns the loss, for a model and data that are the same each time."""
    np.random.seed(0)  # netcl draws its weights from numpy's global generator
    random = np.random.default_rng(0)
    model = kind(queue, 100 * random.standard_normal((64, CLASSES), dtype=np.float32))
    optimizer = Adam(model.parameters(), lr=1e-3)
    centers, labels = random.standard_normal((CLASSES, 32), dtype=np.float32), np.arange(ROWS) % CLASSES
    x = Tensor.from_host(queue, centers[labels] + 0.1 * random.standard_normal((ROWS, 32), dtype=np.float32))
    y = Tensor.from_host(queue, np.eye(CLASSES, dtype=np.float32)[labels])

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ag.tensor(x)), ag.tensor(y))
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return float(loss.value.to_host()[0])

    return step


def main() -> None:
    """The broken run, what is wrong with it, and the cured one."""
    parser = argparse.ArgumentParser(description="from skipped steps to the line that is to blame")
    add_device_option(parser)
    queue = open_queue(parser.parse_args().device)
    print(f"Device: {describe(queue)}\n\n1. The run: 20 steps")
    with amp.init() as handle:
        step = make_step(handle, queue, Classifier)
        losses = [step() for _ in range(20)]
        print(f"losses {losses[0]:g} ... {losses[-1]:g}\n{handle}\n\n2. print(handle.explain(step))")
        print(handle.explain(step))
    print("\n3. The cure, and 20 steps with it")
    with amp.init() as handle:
        step = make_step(handle, queue, CuredClassifier)
        losses = [step() for _ in range(20)]
        print(f"losses {losses[0]:g} ... {losses[-1]:g}\n{handle}")


if __name__ == "__main__":
    run_main(main)
