"""Recurrent networks that users write from netcl's ops: cells in loops over time, over sequences of unequal lengths.

netcl has no recurrent layers. Each weight is cast once an iteration, however long the loop, and its gradient is a sum
over time steps in fp32. References are the same networks in numpy's float64, and central differences of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Parameter, Tensor
from tests.conformance.numeric import gradient
from tests.networks import LOSS_FACTOR, scaled_backward
from tests.reference import HALF_DTYPES, to_device, to_numpy

STEPS, ROWS, INPUTS, HIDDEN = 4, 3, 2, 3
LENGTHS = (4, 2, 3)  # of the rows
GATES = {"elman": 1, "gru": 3, "lstm": 4}
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}  # of the largest value: a few ulp of storage

#: the functions that the cells are written in, of netcl (looked up at each call: init does not search containers) ...
NETCL = SimpleNamespace(
    matmul=lambda x, y: ag.matmul_op(x, y), bias_add=lambda x, b: ag.bias_add(x, b), add=lambda x, y: ag.add(x, y),
    sub=lambda x, y: ag.sub(x, y), mul=lambda x, y: ag.mul(x, y), sigmoid=lambda x: ag.sigmoid(x),
    tanh=lambda x: ag.tanh(x), chunk=lambda x, n: ag.chunk(x, n, axis=1), cat=lambda xs, axis: ag.cat(xs, axis=axis),
    narrow=lambda x, start, length: ag.narrow(x, 1, start, length),
    select=lambda x, rows: ag.index_select(x, 0, Tensor.from_host(x.value.queue, np.asarray(rows, np.int32))),
)  # fmt: skip
#: ... and of numpy
NUMPY = SimpleNamespace(
    matmul=np.matmul, bias_add=np.add, add=np.add, sub=np.subtract, mul=np.multiply, tanh=np.tanh,
    sigmoid=lambda x: 1 / (1 + np.exp(-x)), chunk=lambda x, n: np.split(x, n, axis=1),
    cat=lambda xs, axis: np.concatenate(xs, axis), narrow=lambda x, start, length: x[:, start : start + length],
    select=lambda x, rows: x[np.asarray(rows)],
)  # fmt: skip

State = tuple[Any, ...]
Cell = Callable[[Any, Any, State, Sequence[Any]], State]


# ---------------------------------------------------------------------------------------------- cells


def elman(f: Any, x: Any, state: State, weights: Sequence[Any]) -> State:
    w, u, b = weights
    return (f.tanh(f.bias_add(f.add(f.matmul(x, w), f.matmul(state[0], u)), b)),)


def lstm(f: Any, x: Any, state: State, weights: Sequence[Any]) -> State:
    w, u, b = weights
    gates = f.bias_add(f.add(f.matmul(x, w), f.matmul(state[0], u)), b)
    entry, forget, output, candidate = f.chunk(gates, 4)
    memory = f.add(f.mul(f.sigmoid(entry), f.tanh(candidate)), f.mul(f.sigmoid(forget), state[1]))
    return f.mul(f.sigmoid(output), f.tanh(memory)), memory


def gru(f: Any, x: Any, state: State, weights: Sequence[Any]) -> State:
    w, u, b = weights
    (h,) = state
    fed, kept = f.bias_add(f.matmul(x, w), b), f.matmul(h, u)
    reset = f.sigmoid(f.add(f.narrow(fed, 0, HIDDEN), f.narrow(kept, 0, HIDDEN)))
    update = f.sigmoid(f.add(f.narrow(fed, HIDDEN, HIDDEN), f.narrow(kept, HIDDEN, HIDDEN)))
    new = f.tanh(f.add(f.narrow(fed, 2 * HIDDEN, HIDDEN), f.mul(reset, f.narrow(kept, 2 * HIDDEN, HIDDEN))))
    return (f.add(new, f.mul(update, f.sub(h, new))),)


CELLS: dict[str, Cell] = {"elman": elman, "lstm": lstm, "gru": gru}


def unroll(
    f: Any, cell: str, inputs: Sequence[Any], zero: Any, weights: Sequence[Any], masks: Sequence[Any]
) -> list[Any]:
    """Outputs of every time step. Where a row's mask is 0 its sequence has ended (or not begun): its state stays."""
    state: State = (zero, zero) if cell == "lstm" else (zero,)
    outputs = []
    for x, mask in zip(inputs, masks, strict=True):
        new = CELLS[cell](f, x, state, weights)
        state = tuple(f.add(old, f.mul(f.sub(now, old), mask)) for now, old in zip(new, state, strict=True))
        outputs.append(state[0])
    return outputs


def network(f: Any, cell: str, inputs: Sequence[Any], zero: Any, weights: Sequence[Any], masks: Sequence[Any]) -> Any:
    """Two layers, the first in both directions; the last valid output of every row, by index_select; (ROWS, HIDDEN)."""
    ahead = unroll(f, cell, inputs, zero, weights[0:3], masks)
    back = unroll(f, cell, inputs[::-1], zero, weights[3:6], masks[::-1])[::-1]
    both = [f.cat([first, second], 1) for first, second in zip(ahead, back, strict=True)]
    outputs = f.cat(unroll(f, cell, both, zero, weights[6:9], masks), 0)
    return f.select(outputs, [(length - 1) * ROWS + row for row, length in enumerate(LENGTHS)])


def arrays(cell: str) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Inputs of every step, masks, weights and the target; all of them numbers that float16 and bfloat16 hold."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(-8, 9, shape) / 8

    wide = GATES[cell] * HIDDEN
    weights = []
    for inputs in (INPUTS, INPUTS, 2 * HIDDEN):
        weights += [draw(inputs, wide), draw(HIDDEN, wide), draw(wide)]
    masks = [np.array([[float(step < length)] for length in LENGTHS]) for step in range(STEPS)]
    return [draw(ROWS, INPUTS) for _ in range(STEPS)], masks, weights, draw(ROWS, HIDDEN)


def reference(cell: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Output and gradients of the sum of squared errors, in float64."""
    inputs, masks, weights, target = arrays(cell)
    zero = np.zeros((ROWS, HIDDEN))

    def loss() -> np.ndarray:
        return np.square(network(NUMPY, cell, inputs, zero, weights, masks) - target).sum(keepdims=True)

    gradients = [gradient(loss, weight, np.ones(1)).value for weight in weights]
    return network(NUMPY, cell, inputs, zero, weights, masks), gradients


class Net:
    """The network on a device."""

    def __init__(self, queue: cl.CommandQueue, cell: str) -> None:
        inputs, masks, weights, target = arrays(cell)
        self.cell = cell
        self.params = [Parameter.from_host(queue, weight.astype(np.float32)) for weight in weights]
        self.inputs, self.masks = ([to_device(queue, array) for array in part] for part in (inputs, masks))
        self.target, self.zero = to_device(queue, target), to_device(queue, np.zeros((ROWS, HIDDEN)))

    def __call__(self) -> Any:
        weights = [ag.tensor(param, requires_grad=True) for param in self.params]
        inputs, masks = ([ag.tensor(tensor) for tensor in part] for part in (self.inputs, self.masks))
        return network(NETCL, self.cell, inputs, ag.tensor(self.zero), weights, masks)

    def loss(self) -> Any:
        squares = ag.mse_loss(amp.cast(self(), "float32"), ag.tensor(self.target))
        return ag.mul(squares, LOSS_FACTOR)


@pytest.fixture(scope="module", params=list(CELLS))
def expected(request: pytest.FixtureRequest) -> Iterator[tuple[str, np.ndarray, list[np.ndarray]]]:
    """A cell, its output and gradients in float64."""
    return (request.param, *reference(request.param))  # type: ignore[return-value]


def assert_near(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, float(np.abs(want).max())))


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", ["float32", *HALF_DTYPES])
def test_outputs_and_gradients_are_those_of_float64(queue: cl.CommandQueue, expected: Any, dtype: str) -> None:
    """Bidirectional, stacked, with masks: training and no_grad."""
    cell, output, gradients = expected
    with amp.init(dtype=dtype) as handle:
        net = Net(queue, cell)
        optimizer = SGD(net.params, lr=1e-3 / LOSS_FACTOR)
        with ag.no_grad():
            assert_near(to_numpy(net().value), output, 4 * TOLERANCE[dtype])
        loss = net.loss()
        scaled_backward(handle, loss, optimizer)
        for param, want in zip(net.params, gradients, strict=True):
            assert param.grad.dtype == "float32"
            assert_near(to_numpy(param.grad) / LOSS_FACTOR, want, 8 * TOLERANCE[dtype])
        before = [param.to_host() for param in net.params]
        optimizer.step()
        assert handle.last_step.stepped
        assert not any(np.array_equal(a, b.to_host()) for a, b in zip(before, net.params, strict=True))
        after = to_numpy(net().value)
        handle.clear_cache()
        np.testing.assert_array_equal(after, to_numpy(net().value))  # no cast of a weight was stale


def test_training_learns_and_skips_an_overflow(queue: cl.CommandQueue) -> None:
    with amp.init() as handle:
        net = Net(queue, "gru")
        optimizer = SGD(net.params, lr=0.02 / LOSS_FACTOR)
        losses, stepped = [], []
        for step in range(6):
            if step == 2:
                kept, net.inputs[1] = net.inputs[1], to_device(queue, np.full((ROWS, INPUTS), np.nan))
            optimizer.zero_grad()
            loss = net.loss()
            scaled_backward(handle, loss, optimizer)
            optimizer.step()
            if step == 2:
                net.inputs[1] = kept
            losses.append(float(loss.value.to_host()[0]))
            stepped.append(handle.last_step.stepped)
        assert stepped == [True, True, False, True, True, True]
        assert losses[-1] < losses[3] < losses[1] < losses[0]


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_gradients_add_up_in_fp32_over_time(queue: cl.CommandQueue, dtype: str) -> None:
    """A sum that 16 bits cannot hold: 2048 and then a hundred times 1/2, each lost if added to 2048 in half."""
    with amp.init(dtype=dtype, loss_scale=1.0) as handle:
        weight = Parameter.from_host(queue, np.ones((1, 1), np.float32))
        optimizer = SGD([weight], lr=0.1)
        inputs = [ag.tensor(to_device(queue, [[value]], dtype)) for value in [2048.0, *[0.5] * 100]]
        total = None
        for x in inputs:
            y = amp.cast(ag.matmul_op(x, ag.tensor(weight, requires_grad=True)), "float32")
            total = y if total is None else total + y
        scaled_backward(handle, total, optimizer)
        assert weight.grad.dtype == "float32"
        assert float(weight.grad.to_host()[0, 0]) == 2048 + 50


# ---------------------------------------------------------------------------------------------- casts


@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("train", [True, False])
def test_each_weight_is_cast_once_an_iteration(
    queue: cl.CommandQueue, cell: str, train: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 6 weights in 2 * 3 * STEPS products 6 are cast, again after each step; without the cache all of them."""

    def casts(enable_caching: bool, iterations: int) -> list[int]:
        with amp.init(enable_caching=enable_caching, verbose=True) as handle:
            net = Net(queue, cell)
            optimizer = SGD(net.params, lr=0.1)
            # What is not a weight is cast here, so that the products' casts are those of weights.
            net.inputs = [amp.cast(x, "float16") for x in net.inputs]
            net.zero = amp.cast(net.zero, "float16")
            net.masks = [amp.cast(mask, "float16") for mask in net.masks]
            counts = []
            for _ in range(iterations):
                capsys.readouterr()
                if train:
                    scaled_backward(handle, net.loss(), optimizer)
                    optimizer.step()
                else:
                    with ag.no_grad():
                        net()
                    handle.clear_cache()
                counts.append(capsys.readouterr().out.splitlines().count("Float->Half (matmul_op)"))
            return counts

    assert casts(True, 3) == [6, 6, 6]
    assert casts(False, 1) == [2 * 3 * STEPS]


# ---------------------------------------------------------------------------------------------- packed sequences


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_packed_sequences_equal_masked_ones(queue: cl.CommandQueue, dtype: str) -> None:
    """Rows sorted by length; each step computes only those that still run (narrow), the others wait (cat)."""
    rng = np.random.default_rng(1)
    lengths = (4, 3, 2)
    x, w, u, b = (
        rng.integers(-8, 9, shape) / 8 for shape in ((STEPS, ROWS, INPUTS), (INPUTS, HIDDEN), (HIDDEN, HIDDEN), HIDDEN)
    )
    results = []
    for packed in (True, False):
        with amp.init(dtype=dtype) as handle:
            params = [Parameter.from_host(queue, weight.astype(np.float32)) for weight in (w, u, b)]
            optimizer = SGD(params, lr=0.1)
            weights = [ag.tensor(param, requires_grad=True) for param in params]
            h = ag.tensor(to_device(queue, np.zeros((ROWS, HIDDEN))))
            for step in range(STEPS):
                running = sum(length > step for length in lengths)
                if packed:
                    inputs = ag.tensor(to_device(queue, x[step, :running]))
                    (new,) = elman(NETCL, inputs, (ag.narrow(h, 0, 0, running),), weights)
                    waiting = [ag.narrow(h, 0, running, ROWS - running)] if running < ROWS else []
                    h = ag.cat([new, *waiting], axis=0)
                else:
                    mask = ag.tensor(to_device(queue, [[float(row < running)] for row in range(ROWS)]))
                    (new,) = elman(NETCL, ag.tensor(to_device(queue, x[step])), (h,), weights)
                    h = ag.add(h, ag.mul(ag.sub(new, h), mask))
            loss = ag.mse_loss(amp.cast(h, "float32"), ag.tensor(to_device(queue, np.ones((ROWS, HIDDEN)))))
            scaled_backward(handle, loss, optimizer)
            results.append([to_numpy(h.value), *(to_numpy(param.grad) for param in params)])
    for first, second in zip(*results, strict=True):
        assert_near(first, second, 8 * TOLERANCE[dtype])
