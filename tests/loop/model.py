"""What must happen in a training loop, in plain numpy and float64.

A gradient is kept as the *true* one, whatever multiplies it on the device, with the factor beside it. So nothing here
ever divides by a scale: whoever asks what the device must hold multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: roundings of a forward and a backward pass, as part of the sum of all terms' sizes
SLACK = {"float32": 2.0**-18, "float16": 2.0**-8, "bfloat16": 2.0**-5}
SQUARES = 2.0**-3  # factor on the sum of squares, which keeps its gradients in the range of the others


@dataclass(eq=False)
class Grad:
    """A gradient.

    Attributes:
        value: the true one.
        slack: how far the device's true one may be off.
        by: the scaler that multiplies what the device holds; None: what it holds is the true one.
        at: the scale it multiplies by.
        by_hand: a user has set it: what has it unscaled, or adds a scaled gradient to it, takes it for scaled.
    """

    value: Array
    slack: Array
    by: object | None = None
    at: float = 1.0
    by_hand: bool = False

    @property
    def bad(self) -> bool:
        """Whether an inf or nan is in it."""
        return not bool(np.isfinite(self.value).all())


@dataclass(eq=False)
class Param:
    """A parameter."""

    name: str
    value: Array
    grad: Grad | None = None
    frozen: str = ""  # "_frozen" or "requires_grad", whichever says so; empty: it is trained
    ulp: float = 0.0  # of one in 16 bits: how far a step may round it, as part of it


Layer = tuple[Param, Param]  # weight (inputs, outputs), bias
Passed = dict[Param, tuple[Array, Array]]  # gradients of one backward, each with its slack


@dataclass(frozen=True)
class Loss:
    """One loss: of which network, on which batch.

    Attributes:
        net: number of the network.
        squares: whether it is a sum of squares, or linear in the network's output.
        x, y: rows of small integers; the input, and the target or the factors of the outputs.
        dtype: what the network computes in.
    """

    net: int
    squares: bool
    x: Array
    y: Array
    dtype: str


def backward(layers: Sequence[Layer], loss: Loss) -> tuple[float, float, Passed]:
    """Value of a loss, the slack of that, and its gradients to the parameters that are trained."""
    with np.errstate(all="ignore"):
        inputs, sizes = [loss.x], [np.abs(loss.x)]
        for weight, bias in layers:
            inputs.append(inputs[-1] @ weight.value + bias.value)
            sizes.append(sizes[-1] @ np.abs(weight.value) + np.abs(bias.value))
        if loss.squares:
            error, size = inputs[-1] - loss.y, sizes[-1] + np.abs(loss.y)
            value, spread = SQUARES * (error**2).sum(), SQUARES * (size**2).sum()
            grad, size = SQUARES * 2 * error, SQUARES * 2 * size
        else:
            value, spread = (inputs[-1] * loss.y).sum(), (sizes[-1] * np.abs(loss.y)).sum()
            grad, size = loss.y, np.abs(loss.y)
        found: Passed = {}
        for (weight, bias), x, x_size in zip(reversed(layers), inputs[-2::-1], sizes[-2::-1], strict=True):
            for param, new, slack in ((weight, x.T @ grad, x_size.T @ size), (bias, grad.sum(0), size.sum(0))):
                if not param.frozen:
                    found[param] = new, SLACK[loss.dtype] * slack
            grad, size = grad @ weight.value.T, size @ np.abs(weight.value).T
    return float(value), float(SLACK[loss.dtype] * spread), found


def deliver(passed: Passed, by: object | None = None, at: float = 1.0) -> None:
    """Adds the gradients of a backward to those that are there. A sum has one scale: that of the last scaled pass."""
    for param, (value, slack) in passed.items():
        if param.grad is None:
            param.grad = Grad(value, slack, by, at)
            continue
        old = unscaled_by_hand(param.grad, at) if by is not None else param.grad
        by_now, at_now = (old.by, old.at) if by is None else (by, at)
        with np.errstate(all="ignore"):
            param.grad = Grad(old.value + value, old.slack + slack + 2.0**-20 * np.abs(old.value), by_now, at_now)


def unscaled_by_hand(grad: Grad, at: float) -> Grad:
    """A user's gradient is taken for multiplied by the scale; any other is as it is."""
    return Grad(grad.value / at, grad.slack / at) if grad.by_hand else grad


def true(grad: Grad) -> Grad:
    """A gradient divided by the scale that made it."""
    with np.errstate(all="ignore"):
        return Grad(grad.value, grad.slack + 2.0**-20 * np.abs(grad.value), by_hand=grad.by_hand and grad.by is None)


class Pass:
    """One ``with handle.scale_loss(...)``: gradients of earlier passes are set aside, and added back after it."""

    def __init__(self, params: Iterable[Param]) -> None:
        self.earlier = {param: param.grad for param in params}
        for param in self.earlier:
            param.grad = None

    def reached(self) -> list[Param]:
        """The parameters of its optimizers that have got a gradient."""
        return [param for param in self.earlier if param.grad is not None]

    def end(self) -> bool:
        """Makes all gradients true; returns whether the pass found an inf or nan."""
        bad = False
        for param, before in self.earlier.items():
            now, param.grad = param.grad, None
            for grad in (before, now):
                if grad is None:
                    continue
                bad = bad or (grad.bad and (grad is now or grad.by is not None))
                if param.grad is None:
                    param.grad = true(grad)
                else:
                    param.grad.by_hand = False
                    deliver({param: (grad.value, true(grad).slack)})
        return bad

    def give_up(self) -> None:
        """An error: all is as before the pass."""
        for param, grad in self.earlier.items():
            param.grad = grad


@dataclass(eq=False)
class Scale:
    """A loss scale by clamp's rule (clamp/scaling/loss_scale.py).

    Attributes:
        moves: False: it stays.
        exists: False: nothing is scaled; an inf or nan is found by the step alone, and forgotten with its gradient.
    """

    scale: float
    moves: bool = True
    exists: bool = True
    tracker: int = 0
    interval: int = 2000
    overflow: set[Optimizer] = field(default_factory=set)

    def passed(self, reached: set[Optimizer], bad: bool) -> None:
        """A scaled pass for these optimizers has ended."""
        if not self.exists:
            return
        fresh = {optimizer for optimizer in reached if self not in optimizer.pending}
        self.overflow -= fresh
        first = bad and not self.overflow & reached
        if bad:
            self.overflow |= reached
        self.adjust(bad, first, fresh == reached)
        for optimizer in reached:
            optimizer.pending.add(self)

    def adjust(self, bad: bool, first: bool = True, counts: bool = True) -> None:
        """Moves the scale."""
        if not self.moves:
            return
        if bad:
            self.tracker = 0
            self.scale *= 0.5 if first else 1.0
        elif counts:
            self.tracker += 1
            if self.tracker == self.interval:
                self.tracker, self.scale = 0, self.scale * 2


@dataclass(eq=False)
class Optimizer:
    """netcl's SGD, with momentum or without, or its Adam."""

    name: str
    params: list[Param]
    lr: float
    momentum: float = 0.0
    is_adam: bool = False
    steps: int = 0
    state: dict[Param, tuple[Array, Array]] = field(default_factory=dict)
    pending: set[Scale] = field(default_factory=set)  # scales with a pass since the last step

    def overflowed(self) -> bool:
        """Whether a pass since the last step overflowed, as far as scales know."""
        return any(self in scale.overflow for scale in self.pending)

    def has_bad(self) -> bool:
        """Whether an inf or nan is in a gradient, be it in one that no step would use."""
        return any(param.grad is not None and param.grad.bad for param in self.params)

    def is_scaled(self) -> bool:
        """Whether a gradient is still multiplied by a scale."""
        return any(param.grad is not None and param.grad.by is not None for param in self.params)

    def step(self) -> dict[Param, Array]:
        """Updates the parameters.

        Returns:
            Those that were written, with how far the device's may be off.
        """
        self.steps += 1
        written = {}
        for param in self.params:
            if param.frozen or param.grad is None:
                continue
            grad, slack = param.grad.value, param.grad.slack
            first, second = self.state.get(param, (np.zeros_like(grad), np.zeros_like(grad)))
            if self.is_adam:
                first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
                root = np.sqrt(second / (1 - 0.999**self.steps))
                change = first / (1 - 0.9**self.steps) / (root + 1e-8)
                # A wrong scale changes what Adam does by little: its moments are compared, and gradients are.
                slack = np.where(np.abs(grad) > 8 * slack, 2.0**-4, 4.0)
            elif self.momentum:
                first = self.momentum * first + grad
                second = self.momentum * second + slack  # how far off the velocity may be
                change, slack = first, second
            else:
                change = grad
            self.state[param] = first, second
            param.value = param.value - self.lr * change
            written[param] = self.lr * slack + 2.0**-20 * (np.abs(param.value) + self.lr * np.abs(change))
            written[param] += param.ulp * (np.abs(param.value) + 2.0**-6)
        return written
