"""A language model of Python's own source text, three times from the same seed: fp32 beside mixed precision.

    python examples/char_lm.py
    python examples/char_lm.py --dtype bfloat16 --seeds 3 --plot char_lm.png

netcl's DecoderBlock (rotary attention, RMS norm, SwiGLU) learns the standard library's sources, character by character.
``train`` is the example: a netcl training loop in which two lines, marked below, turn mixed precision on. netcl's own
run is stopped after a few steps, which is enough for its time (``--netcl-steps all`` lets it go on). Its loss goes
another way than the others': the gradient of swish, which is in SwiGLU, is wrong in netcl (docs/netcl-defects.md), so
what AMP is to be compared with is clamp's float32.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyopencl as cl
from common import check_batch, describe, open_queue, run_main
from comparison import Plan, Run, Task, add_options, show, step_memory
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn import functional as F
from netcl.nn.containers import Embedding
from netcl.nn.layers import Linear, Module
from netcl.nn.modern import DecoderBlock, RMSNorm
from netcl.optim import AdamW

from clamp import amp
from clamp.cli import positive
from clamp.cli.devices import add_device_option

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))  # any other becomes a space
CONTEXT = 128
WIDTH, HEADS, BLOCKS = 128, 4, 2
LEARNING_RATE = 3e-3
CURVE = 25  # steps that one point of the loss curve is the mean of
VALIDATION_BATCHES = 8


# ---------------------------------------------------------------------------------------------- the example


class CharLM(Module):
    """Character codes of (batch, context) in, logits of (batch * context, characters) out."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.embedding = Embedding(len(CHARACTERS), WIDTH, queue=queue, init_std=0.02)
        self.blocks = [DecoderBlock(WIDTH, HEADS, queue=queue) for _ in range(BLOCKS)]
        self.norm = RMSNorm(WIDTH, queue=queue)
        self.head = Linear(queue, WIDTH, len(CHARACTERS))

    def forward(self, codes: Tensor) -> Any:
        """Logits of the character that follows each one."""
        x = ag.reshape(self.embedding(codes), (*codes.shape, WIDTH))
        for block in self.blocks:
            x = block(x)
        return self.head(ag.reshape(self.norm(x), (-1, WIDTH)))

    def parameters(self) -> list[Tensor]:
        """All weights."""
        layers = [self.embedding, *self.blocks, self.norm, self.head]
        return [parameter for layer in layers for parameter in layer.parameters()]


def train(queue: cl.CommandQueue, text: Text, plan: Plan) -> Run:
    """One training run, scored by its loss on text it has not seen, in nats per character."""
    np.random.seed(plan.seed)  # netcl draws its weights from numpy's global generator
    model = CharLM(queue)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    run = Run(steps_per_epoch=CURVE)
    data = batches(queue, text.train, plan.batch, np.random.default_rng(plan.seed))

    handle = amp.init(**plan.amp_options)  # <- line 1
    try:
        for step, (codes, following) in enumerate(islice(data, plan.steps)):
            start = time.perf_counter()
            optimizer.lr = LEARNING_RATE * min(1, (step + 1) / 20) * plan.left(step)
            optimizer.zero_grad()
            with ag.Tape() as tape:
                loss = F.cross_entropy(model(codes), ag.tensor(following))
            with handle.scale_loss(loss, optimizer) as scaled_loss:  # <- line 2
                tape.backward(scaled_loss)
            optimizer.step()
            run.record(loss.value, handle, start)
            plan.on_step(run)

        if plan.is_whole:
            run.score = validation_loss(model, queue, text, plan.batch)
        run.weights = [str(parameter.dtype) for parameter in model.parameters()]
    finally:
        handle.shutdown()
    return run


def validation_loss(model: CharLM, queue: cl.CommandQueue, text: Text, batch: int) -> float:
    """Mean loss on text that was held back, without gradients."""
    held_back = islice(batches(queue, text.validation, batch, np.random.default_rng(0)), VALIDATION_BATCHES)
    with ag.no_grad():
        losses = [F.cross_entropy(model(codes), ag.tensor(following)) for codes, following in held_back]
    return fmean(float(loss.value.to_host()[0]) for loss in losses)


# ---------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Text:
    """Codes of characters, int32: indices into ``CHARACTERS``."""

    train: np.ndarray
    validation: np.ndarray


def load() -> Text:
    """The modules of Python's standard library, one after the other; every tenth is held back."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code_of = np.full(0x110000, CHARACTERS.index(" "), np.int32)
    code_of[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))

    def codes(part: list[Path]) -> np.ndarray:
        text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in part)
        return code_of[np.frombuffer(text.encode("utf-32-le"), np.uint32)]

    return Text(codes([f for i, f in enumerate(files) if i % 10]), codes(files[::10]))


def batches(
    queue: cl.CommandQueue, codes: np.ndarray, batch: int, order: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches on the device: codes of (batch, context), and one-hot rows of the characters that follow each.

    netcl's fp32 takes classes as one-hot rows; its version for indices hangs on PoCL.
    """
    one_hot = np.eye(len(CHARACTERS), dtype=np.float32)
    while True:
        first = order.integers(0, len(codes) - CONTEXT - 1, batch)
        windows = codes[first[:, None] + np.arange(CONTEXT + 1)]
        inputs = Tensor.from_host(queue, np.ascontiguousarray(windows[:, :-1]), dtype="int32")
        yield inputs, Tensor.from_host(queue, one_hot[windows[:, 1:].ravel()])


# ---------------------------------------------------------------------------------------------- main


def memory(queue: cl.CommandQueue, text: Text, batch: int, amp_options: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the activations and at the peak, of one training step."""
    model = CharLM(queue)
    codes, following = next(batches(queue, text.train, batch, np.random.default_rng(0)))
    return step_memory(model, lambda: F.cross_entropy(model(codes), ag.tensor(following)), amp_options)


def make_task(queue: cl.CommandQueue, text: Text, options: argparse.Namespace) -> Task:
    """What is run in three ways."""
    return Task(
        title=f"Python's standard library: steps {options.steps}, batch {options.batch}, seeds {options.seeds}",
        score="validation\nloss",
        show_score="{:.4f}".format,
        steps=options.steps,
        train=partial(train, queue, text),
        memory=partial(memory, queue, text, options.batch),
        epoch=f"{CURVE} steps",
        note="netcl's own loss goes another way: its gradient of swish, which every block has, is wrong "
        "(docs/netcl-defects.md).",
    )


def main() -> None:
    """Trains, prints the table, draws the plot."""
    parser = argparse.ArgumentParser(description="fp32 and mixed precision of a decoder on Python's own sources")
    add_device_option(parser)
    parser.add_argument("--steps", type=positive, default=400, metavar="N", help="of the training (400)")
    add_options(parser, batch=16, netcl_steps=10)
    options = parser.parse_args()
    text = load()
    check_batch(parser, options.batch, len(text.train) // CONTEXT)
    queue = open_queue(options.device)
    show(make_task(queue, text, options), options, describe(queue))


if __name__ == "__main__":
    run_main(main)
