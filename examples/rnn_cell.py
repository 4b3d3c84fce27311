"""A hand-written LSTM cell in a loop over time steps: every weight is cast once per iteration, not once per step.

    python examples/rnn_cell.py

netcl has no recurrent layers, so the cell is made of netcl's ops. It learns the adding problem: of a sequence of
random numbers two are marked, and the answer is their sum. ``verbose=True`` prints a line for every cast; the
script counts the lines of one iteration, with the weight cache and without, then trains.

The gates are split in 16 bits (``chunk``: one copy forward, and one that gathers the gradients of all four), so that a
hidden state goes into its product as it is. What is cast are the inputs, once each, and the weights.
"""

from __future__ import annotations

import argparse
import io
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout

import numpy as np
import pyopencl as cl
from common import describe, open_queue, run_main
from netcl import autograd as ag
from netcl.autograd.engine import Node
from netcl.core.parameter import Parameter
from netcl.core.tensor import Tensor
from netcl.nn import functional as F
from netcl.optim import Adam

from clamp import amp
from clamp.cli import positive
from clamp.cli.devices import add_device_option

TIME_STEPS, BATCH, HIDDEN = 8, 64, 32


class LSTM:
    """An LSTM over inputs of (batch, 2) per time step, and a linear read-out of its last hidden state."""

    def __init__(self, queue: cl.CommandQueue, seed: int = 0) -> None:
        random = np.random.default_rng(seed)

        def parameter(*shape: int) -> Parameter:
            bound = 1 / np.sqrt(HIDDEN)
            return Parameter.from_host(queue, random.uniform(-bound, bound, shape).astype(np.float32))

        self.input_weight = parameter(2, 4 * HIDDEN)
        self.hidden_weight = parameter(HIDDEN, 4 * HIDDEN)
        self.bias = parameter(4 * HIDDEN)
        self.out_weight = parameter(HIDDEN, 1)
        self.params = [self.input_weight, self.hidden_weight, self.bias, self.out_weight]

    def cell(self, x: Node, state: tuple[Node, Node] | None) -> tuple[Node, Node]:
        """One time step: the hidden state and the cell state after it. Before the first both are zero."""
        gates = ag.bias_add(ag.matmul_op(x, weight(self.input_weight)), weight(self.bias))
        if state is not None:
            gates = gates + ag.matmul_op(state[0], weight(self.hidden_weight))
        entry, forget, output, candidate = ag.chunk(gates, 4, axis=1)
        memory = ag.sigmoid(entry) * ag.tanh(candidate)
        if state is not None:
            memory = memory + ag.sigmoid(forget) * state[1]
        return ag.sigmoid(output) * ag.tanh(memory), memory

    def __call__(self, sequence: list[Node]) -> Node:
        """The answer for every sequence of the batch, (batch, 1)."""
        state = None
        for x in sequence:
            state = self.cell(x, state)
        return ag.matmul_op(state[0], weight(self.out_weight))


def weight(parameter: Parameter) -> Node:
    """A parameter as netcl's layers hand it to an op."""
    return ag.tensor(parameter, requires_grad=True)


def adding_problem(queue: cl.CommandQueue, random: np.random.Generator) -> tuple[list[Node], Node]:
    """A batch: per time step the numbers and their marks, (batch, 2); and the sums of the marked, (batch, 1)."""
    numbers = random.uniform(-1, 1, (BATCH, TIME_STEPS)).astype(np.float32)
    marks = np.zeros_like(numbers)
    for row in marks:
        row[random.choice(TIME_STEPS, 2, replace=False)] = 1
    steps = [np.stack([numbers[:, t], marks[:, t]], axis=1) for t in range(TIME_STEPS)]
    answer = (numbers * marks).sum(axis=1, keepdims=True)
    return [ag.tensor(Tensor.from_host(queue, step)) for step in steps], ag.tensor(Tensor.from_host(queue, answer))


def casts_of(iteration: Callable[[], float]) -> Counter[str]:
    """The casts that one iteration made, by the line that verbose printed."""
    with redirect_stdout(io.StringIO()) as printed:
        iteration()
    return Counter(line for line in printed.getvalue().splitlines() if "->" in line)


def trainer(queue: cl.CommandQueue, handle: amp.AmpHandle) -> tuple[LSTM, Callable[[], float]]:
    """A fresh model, and the function that trains it by one iteration and returns the loss per sequence."""
    model = LSTM(queue)
    optimizer = Adam(model.params, lr=1e-2)
    random = np.random.default_rng(1)

    def iteration() -> float:
        sequence, answer = adding_problem(queue, random)
        optimizer.zero_grad()
        with ag.Tape() as tape:
            loss = F.mse_loss(model(sequence), answer)
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            tape.backward(scaled_loss)
        optimizer.step()
        return float(loss.value.to_host()[0]) / BATCH

    return model, iteration


def count_casts(queue: cl.CommandQueue, enable_caching: bool) -> Counter[str]:
    """The casts of a model's first iteration."""
    with amp.init(enable_caching=enable_caching, verbose=True) as handle:
        _, iteration = trainer(queue, handle)
        return casts_of(iteration)


def report_casts(queue: cl.CommandQueue) -> None:
    """Prints how often the weights of the matrix products were cast, with the cache and without."""
    matmul = "Float->Half (matmul_op)"
    cached, uncached = count_casts(queue, enable_caching=True), count_casts(queue, enable_caching=False)
    print("Casts of one iteration: " + ", ".join(f"{count} {line}" for line, count in cached.items()))
    products = TIME_STEPS + (TIME_STEPS - 1) + 1  # inputs, hidden states, read-out
    saved = uncached[matmul] - cached[matmul]
    print(f"{products} matrix products with 3 weights: {products - saved} casts of weights,")
    print(f"with enable_caching=False {saved} more.")


def main() -> None:
    """Counts casts, then trains."""
    parser = argparse.ArgumentParser(description="an LSTM cell in a loop, under AMP")
    add_device_option(parser)
    parser.add_argument("--iterations", type=positive, default=120, metavar="N", help="of the training (120)")
    options = parser.parse_args()
    queue = open_queue(options.device)
    print(f"Device: {describe(queue)}")
    report_casts(queue)

    with amp.init() as handle:
        model, iteration = trainer(queue, handle)
        losses = [iteration() for _ in range(options.iterations)]
        dtypes = {parameter.grad.dtype for parameter in model.params}
        print(f"Gradients of the weights: {', '.join(sorted(dtypes))}; loss scale: {handle.loss_scale:g}")
    shown = sorted({*range(0, len(losses), max(1, len(losses) // 5)), len(losses) - 1})
    print("Loss: " + "  ".join(f"{losses[index]:.4f}" for index in shown))


if __name__ == "__main__":
    run_main(main)
