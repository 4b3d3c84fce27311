"""Digits with weights that are kept in 16 bits, in each of the ways that ``master_weight`` names, and 8-bit moments.

    python examples/weights_in_16_bits.py
    python examples/weights_in_16_bits.py --dtype float16 --seeds 1

Nothing but these differs from way to way: the MLP and the data are those of digits.py, and its small learning rate
is what makes most updates smaller than bfloat16 can add to a weight.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pyopencl as cl
from common import describe, open_queue, run_main
from digits import load, make_model
from images import Images, accuracy, batches
from netcl import autograd as ag
from netcl.nn import functional as F
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


def train(
    queue: cl.CommandQueue, digits: Images, dtype: str, steps: int, seed: int, *, master_weight: bool | str,
    optimizer: Callable[..., Any] = Adam,
) -> float:  # fmt: skip
    """One training run; returns its test accuracy in percent."""
    np.random.seed(seed)  # netcl draws its weights from numpy's global generator
    model = make_model(queue)
    model, adam = amp.decorate(
        model, optimizer(model.parameters(), lr=1e-4), dtype=dtype, master_weight=master_weight, rounding_seed=seed
    )
    with amp.init(dtype=dtype, level="O2") as handle:
        model.train()
        for x, y in islice(batches(queue, digits, 64, np.random.default_rng(seed)), steps):
            adam.zero_grad()
            loss = F.cross_entropy(model(ag.tensor(x)), ag.tensor(y))
            with handle.scale_loss(loss, adam) as scaled_loss:
                scaled_loss.backward()
            adam.step()
        return accuracy(model, queue, digits)


def main() -> None:
    """Trains each way with each seed, and prints the table."""
    parser = argparse.ArgumentParser(description="weights in 16 bits, with fp32 masters and without, on the digits")
    add_device_option(parser)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--steps", type=positive, default=1500, metavar="N", help="of a run (1500)")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each way (3)")
    options = parser.parse_args()
    queue, digits = open_queue(options.device), load()
    warnings.filterwarnings("ignore", message="in this first step .* loses")  # which is what is shown here
    print(f"{describe(queue)}, {options.dtype}, {options.steps} steps; test accuracy in percent, by seed, and mean")
    for name, way in WAYS.items():
        found = [train(queue, digits, options.dtype, options.steps, seed, **way) for seed in range(options.seeds)]
        print(f"{name:18}" + "".join(f"{score:8.2f}" for score in found) + f"{np.mean(found):10.2f}", flush=True)


if __name__ == "__main__":
    run_main(main)
