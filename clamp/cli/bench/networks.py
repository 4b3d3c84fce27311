"""The networks whose training steps are timed, and what trains them: netcl's layers, tape and optimizers.

Run as a program, by steps.py, it trains one of them for the first time and says what that took. What is measured
may be another checkout: of clamp this file uses what every version has.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyopencl as cl
from netcl import autograd as ag
from netcl import optim
from netcl.nn import functional as F
from netcl.nn.containers import Embedding
from netcl.nn.factory import build_sequential, fast_bn_cnn_config
from netcl.nn.layers import Linear, Module
from netcl.nn.modern import DecoderBlock, RMSNorm
from netcl.nn.resnet import ResNet18

import clamp
from clamp import amp
from clamp.bridge import Node, Tape, Tensor

CLASSES = 10
CHARACTERS = 96

Host: TypeAlias = npt.NDArray[Any]
Layer: TypeAlias = dict[str, Any]  # as netcl's build_sequential takes it: {"type": "Linear", "args": {...}}


def _linear(taken: int, given: int) -> Layer:
    return {"type": "Linear", "args": {"in_features": taken, "out_features": given}}


def _conv(taken: int, given: int) -> list[Layer]:
    """3x3, as large as its input, with what follows it."""
    conv = {"in_channels": taken, "out_channels": given, "kernel_size": 3, "pad": 1}
    return [{"type": "Conv2d", "args": conv}, {"type": "BatchNorm2d", "args": {"num_features": given}}, _RELU]


_RELU: Layer = {"type": "ReLU"}
_POOL: Layer = {"type": "MaxPool2d", "args": {"kernel_size": 2, "stride": 2}}
_FLATTEN: Layer = {"type": "Flatten"}


def _normal(random: np.random.Generator, shape: Sequence[int]) -> Host:
    return random.standard_normal(shape, dtype=np.float32)


def _characters(random: np.random.Generator, shape: Sequence[int]) -> Host:
    return random.integers(0, CHARACTERS, shape).astype(np.int32)


def _pixels(random: np.random.Generator, shape: Sequence[int]) -> Host:
    return random.random(shape, dtype=np.float32)


class _CharLm(Module):  # type: ignore[misc]
    """The language model of examples/char_lm.py."""

    WIDTH = 128

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.embedding = Embedding(CHARACTERS, self.WIDTH, queue=queue, init_std=0.02)
        self.blocks = [DecoderBlock(self.WIDTH, 4, queue=queue) for _ in range(2)]
        self.norm = RMSNorm(self.WIDTH, queue=queue)
        self.head = Linear(queue, self.WIDTH, CHARACTERS)

    def forward(self, codes: Node) -> Any:
        x = ag.reshape(self.embedding(codes.value), (*codes.value.shape, self.WIDTH))
        for block in self.blocks:
            x = block(x)
        return self.head(ag.reshape(self.norm(x), (-1, self.WIDTH)))

    def parameters(self) -> list[Tensor]:
        layers = [self.embedding, *self.blocks, self.norm, self.head]
        return [parameter for layer in layers for parameter in layer.parameters()]


#: Layers that are whole networks: ``build_sequential`` knows none of them.
_WHOLE: dict[str, Callable[..., Any]] = {"CharLm": _CharLm, "DecoderBlock": DecoderBlock, "ResNet18": ResNet18}


@dataclass(frozen=True, eq=False)
class Network:
    """A network, the data that it takes, and how it learns."""

    name: str  # for tables
    work: str  # kind of work, for tables and for peers
    batch: int  # rows of a batch
    shape: tuple[int, ...]  # of a row
    layers: Sequence[Layer]  # from which peers build the same
    outputs: tuple[int, ...] = (CLASSES,)  # that a row leads to; the last are classes if the loss is a cross entropy
    loss: str = "cross_entropy"  # of ``netcl.nn.functional``: ``"cross_entropy"`` of one-hot rows, or ``"mse_loss"``
    optimizer: str = "SGD"
    lr: float = 1e-2  # optimizer, lr: of ``netcl.optim``
    draw: Callable[[np.random.Generator, Sequence[int]], Host] = _normal  # draws inputs

    def __str__(self) -> str:
        return f"{self.name}, batch {self.batch}"

    def model(self, queue: cl.CommandQueue) -> Any:
        """The layers, with weights drawn from numpy's global generator."""
        whole = _WHOLE.get(self.layers[0]["type"])
        if whole is not None:
            return whole(queue=queue, **self.layers[0].get("args", {}))
        return build_sequential(queue, list(self.layers))

    def data(self, batch: int, random: np.random.Generator) -> tuple[Host, Host]:
        """Returns what the model takes, and what the loss compares its output with."""
        x = self.draw(random, (batch, *self.shape))
        if self.loss == "mse_loss":
            return x, _normal(random, (batch, *self.outputs))
        *rows, classes = batch, *self.outputs
        return x, np.eye(classes, dtype=np.float32)[random.integers(0, classes, math.prod(rows))]


def mlp(layers: int, width: int, batch: int, work: str = "step", *, relu: bool = True) -> Network:
    """A stack of ``Linear(width) + ReLU`` with a squared error. Without ReLU it is the network of Paddle's guide to
    mixed precision, of 9 x Linear(8192) and batch 2048."""
    stack = [layer for _ in range(layers) for layer in (_linear(width, width), *([_RELU] if relu else []))]
    return Network(
        f"{layers} x Linear({width}){'+ReLU' if relu else ''}", work, batch, (width,), stack[:-1] if relu else stack,
        outputs=(width,), loss="mse_loss",
        lr=1e-3 / (batch * width),  # with which the loss stays finite: netcl's mse_loss sums, this is 1e-3 on the mean
    )  # fmt: skip


def cnn(batch: int) -> Network:
    """netcl's ``fast_bn_cnn_config`` with a cross entropy, without its dropout.

    (Dropout would make the variants' losses differ, and the config's other layers are what is timed.)
    """
    layers = [layer for layer in fast_bn_cnn_config() if layer["type"] != "Dropout"]
    return Network("fast_bn_cnn_config, 3x32x32", "cnn", batch, (3, 32, 32), layers)


def resnet(channels: int, batch: int) -> Network:
    """netcl's ResNet-18 with a cross entropy."""
    layer = {"type": "ResNet18", "args": {"num_classes": CLASSES, "base_channels": channels}}
    return Network(f"ResNet-18 of {channels} channels, 3x32x32", "resnet", batch, (3, 32, 32), [layer])


def decoder(batch: int, length: int, width: int) -> Network:
    """A decoder block of four heads with a squared error."""
    hidden = -(-8 * width // (3 * 64)) * 64  # of the gated MLP, as netcl chooses it
    layer = {"type": "DecoderBlock", "args": {"dim": width, "n_head": 4, "hidden": hidden}}
    lr = 1e-3 / (batch * length * width)
    shape = (length, width)
    return Network(f"decoder block {length} x {width}", "decoder", batch, shape, [layer], shape, loss="mse_loss", lr=lr)


def char_lm(batch: int, length: int) -> Network:
    """The language model of examples/char_lm.py: a batch is of texts, and every character of them has a target."""
    return Network(
        "char_lm decoder", "char_lm", batch, (length,), [{"type": "CharLm"}], (length, CHARACTERS),
        optimizer="AdamW", lr=3e-3, draw=_characters,
    )  # fmt: skip


#: Those of README and of examples/, small as they are there: what a user's first step meets.
README_MLP = Network(
    "README's MLP", "readme", 256, (64,), [_linear(64, 128), _RELU, _linear(128, 1)],
    outputs=(1,), loss="mse_loss", optimizer="Adam", lr=1e-3,
)  # fmt: skip
MLP = Network(
    "digits MLP", "digits", 64, (64,), [_linear(64, 256), _RELU, _linear(256, 256), _RELU, _linear(256, CLASSES)],
    optimizer="Adam", lr=1e-3, draw=_pixels,
)  # fmt: skip
CNN = Network(
    "Fashion-MNIST CNN", "fashion", 64, (1, 28, 28),
    [*_conv(1, 32), _POOL, *_conv(32, 64), _POOL, _FLATTEN, _linear(64 * 7 * 7, CLASSES)],
    optimizer="Adam", lr=1e-3,
)  # fmt: skip
LM = char_lm(16, 128)

EXAMPLES = {"mlp": MLP, "cnn": CNN, "lm": LM}  # by the names that options give them


class Trainer:
    """Trains a network on a queue, by the loop of the examples, its ``model`` with its ``optimizer``."""

    def __init__(self, queue: cl.CommandQueue, network: Network) -> None:
        np.random.seed(0)  # netcl's initializers draw from it
        self._queue, self._network = queue, network
        self._random = np.random.default_rng(0)
        self.model = network.model(queue)
        self.model.train()
        self.optimizer = getattr(optim, network.optimizer)(self.model.parameters(), lr=network.lr)

    def batch(self, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets, drawn anew."""
        drawn = self._network.data(rows or self._network.batch, self._random)
        x, y = (Tensor.from_host(self._queue, host) for host in drawn)
        return x, y

    def step(self, handle: Any, rows: int | None = None) -> Tensor:
        """One step, whose loss is returned; ``handle`` is what `amp.init` returned, None for netcl alone."""
        value: Tensor = self.train(handle, *self.batch(rows)).value
        return value

    def train(self, handle: Any, x: Tensor, y: Tensor, *, of_loss: bool = False) -> Node:
        """One step on a batch, by ``tape.backward(loss)`` or by ``loss.backward()``."""
        self.optimizer.zero_grad()
        tape, loss = self.forward(x, y, taped=not of_loss)
        with nullcontext(loss) if handle is None else handle.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward() if tape is None else tape.backward(scaled_loss)
        self.optimizer.step()
        return loss

    def forward(self, x: Tensor, y: Tensor, *, taped: bool = True) -> tuple[Tape | None, Node]:
        """The loss of a batch, with the tape that it is on."""
        with ag.Tape() if taped else nullcontext() as tape:
            loss: Node = getattr(F, self._network.loss)(self.model(ag.tensor(x)), ag.tensor(y))
        return tape, loss


def first_step() -> None:
    """The program: ``PYTHONPATH=CHECKOUT python networks.py mlp float16 PLATFORM DEVICE leave|keep``.

    It prints the seconds that this process's processors worked during the first step, what was compiled in it and in
    the steps after it, and the launches of a step.
    """
    name, dtype, platform, number, then = sys.argv[1:]
    clamp.__path__.append(str(Path(clamp.__file__).parents[1]))  # where kernels and lists lie: not all versions do so
    device = cl.get_platforms()[int(platform)].get_devices()[int(number)]
    context = cl.Context([device])
    queue = cl.CommandQueue(context, device)
    builds, launches = _counted(cl.Program, "build"), _counted(cl.Kernel, "__call__")
    network = EXAMPLES[name]
    trainer = Trainer(queue, network)
    queue.finish()

    began, built = time.process_time(), len(builds)
    handle = amp.init(dtype=dtype)
    trainer.step(handle).to_host()
    seconds, first = time.process_time() - began, len(builds) - built
    enqueued = len(launches)
    trainer.step(handle).to_host()
    enqueued = len(launches) - enqueued
    trainer.step(handle, network.batch - 3).to_host()
    if then == "keep":
        for module in ("cache_writer", "keeper"):  # by the names that it had; an older clamp keeps programs at once
            with suppress(ModuleNotFoundError):
                for process in import_module(f"clamp.opencl.{module}").keep_in_background():
                    process.wait()
    later = len(builds) - built - first
    print(json.dumps({"seconds": seconds, "programs": first, "later": later, "launches": enqueued}))
    sys.stdout.flush()
    os._exit(0)  # without the processes that would keep what was compiled


def _counted(owner: Any, name: str) -> list[str]:
    """A list that grows with each call of a function of pyopencl's."""
    calls: list[str] = []
    original = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    setattr(owner, name, count)
    return calls


if __name__ == "__main__":
    first_step()
