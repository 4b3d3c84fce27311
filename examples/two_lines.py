"""The shortest before and after: a netcl training script in fp32, and the same script with the two lines.

    python examples/two_lines.py

Both fit a small network to a sine, from the same weights. Compare ``before`` with ``after``: the lines that
differ are marked. The losses agree; the loss scale that ``after`` ends with was found along the way.
"""

from __future__ import annotations

import argparse

import numpy as np
import pyopencl as cl
from common import describe, open_queue, run_main
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn import functional as F
from netcl.nn.layers import Linear, Sequential, Tanh
from netcl.optim import Adam

from clamp import amp
from clamp.cli.devices import add_device_option

STEPS = 200


def before(queue: cl.CommandQueue, x: np.ndarray, y: np.ndarray) -> float:
    """netcl, fp32. Returns the last loss, a sum over the batch."""
    model = Sequential(Linear(queue, 1, 64), Tanh(), Linear(queue, 64, 64), Tanh(), Linear(queue, 64, 1))
    optimizer = Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with ag.Tape() as tape:
            prediction = model(ag.tensor(Tensor.from_host(queue, x)))
            loss = F.mse_loss(prediction, ag.tensor(Tensor.from_host(queue, y)))
        tape.backward(loss)
        optimizer.step()
    return float(loss.value.to_host()[0])


def after(queue: cl.CommandQueue, x: np.ndarray, y: np.ndarray) -> float:
    """The same in mixed precision."""
    handle = amp.init()  # <- line 1
    model = Sequential(Linear(queue, 1, 64), Tanh(), Linear(queue, 64, 64), Tanh(), Linear(queue, 64, 1))
    optimizer = Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with ag.Tape() as tape:
            prediction = model(ag.tensor(Tensor.from_host(queue, x)))
            loss = F.mse_loss(prediction, ag.tensor(Tensor.from_host(queue, y)))
        with handle.scale_loss(loss, optimizer) as scaled_loss:  # <- line 2
            tape.backward(scaled_loss)
        optimizer.step()
    print(f"dtype of the prediction: {prediction.value.dtype}; loss scale: {handle.loss_scale:g}")
    handle.shutdown()  # only because this process goes on: netcl is as it was before line 1
    return float(loss.value.to_host()[0])


def main() -> None:
    """Trains both and compares."""
    parser = argparse.ArgumentParser(description="a netcl script before and after the two lines")
    add_device_option(parser)
    queue = open_queue(parser.parse_args().device)
    print(f"Device: {describe(queue)}")

    x = np.linspace(-np.pi, np.pi, 256, dtype=np.float32).reshape(-1, 1)
    y = np.sin(x)
    for name, train in (("before, fp32", before), ("after, float16", after)):
        np.random.seed(0)  # netcl draws its weights from numpy's global generator
        print(f"{name}: loss {train(queue, x, y) / len(x):.6f} per sample")


if __name__ == "__main__":
    run_main(main)
