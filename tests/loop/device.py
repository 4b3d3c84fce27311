"""The networks and optimizers of the model (model.py) on a device, and the losses that train them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.nn import functional as F
from netcl.nn.layers import Linear, Sequential
from netcl.optim import SGD, Adam

from clamp import amp, bridge
from clamp.bridge import Node, Parameter, Tensor
from clamp.ops.loss_scale import DeviceState
from tests.loop.model import SQUARES, Array, Loss, Optimizer, Param

_KERNELS: dict[type, dict[str, Any]] = {}  # netcl's optimizers build theirs anew for each object


class Interrupted(KeyboardInterrupt):
    """A user's Ctrl-C, which nobody else's can be taken for."""


class Careful(SGD):
    """SGD whose next step a user may interrupt before it has done anything."""

    interrupt = False

    def step(self) -> None:
        if self.interrupt:
            self.interrupt = False
            raise Interrupted
        super().step()


class Real:
    """What the model's objects are on the device."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.queue = queue
        self.params: dict[Param, Parameter] = {}
        self.nets: list[Sequential] = []
        self.optimizers: dict[Optimizer, Any] = {}

    def parameter(self, param: Param) -> Parameter:
        """The parameter of the model's, made at the first call."""
        if param not in self.params:
            self.params[param] = Parameter.from_host(self.queue, param.value.astype(np.float32))
        return self.params[param]

    def add_net(self, layers: Sequence[tuple[Param, Param]]) -> None:
        made = []
        for weight, bias in layers:
            layer = Linear(self.queue, *weight.value.shape)
            layer.weight, layer.bias = self.parameter(weight), self.parameter(bias)
            made.append(layer)
        self.nets.append(Sequential(*made))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        params = [self.parameter(param) for param in optimizer.params]
        if optimizer.is_adam:
            made: Any = Adam(params, lr=optimizer.lr)
        else:
            made = Careful(params, lr=optimizer.lr, momentum=optimizer.momentum)
        kept = _KERNELS.setdefault(type(made), {name: {} for name in vars(made) if bridge.is_kernel_store(name)})
        vars(made).update(kept)
        self.optimizers[optimizer] = made

    def replace(self, old: Param, new: Param) -> None:
        """Puts another Parameter in the place of one, in networks and optimizers, as a user would."""
        before, after = self.params.pop(old), self.parameter(new)
        for net in self.nets:
            for layer in net.layers:
                layer.weight = after if layer.weight is before else layer.weight
                layer.bias = after if layer.bias is before else layer.bias
        for made in self.optimizers.values():
            for index, param in enumerate(made.params):
                if param is before:
                    made.params[index] = after

    def tensor(self, array: Array) -> Tensor:
        return Tensor.from_host(self.queue, array.astype(np.float32))

    def spoil(self, param: Parameter) -> None:
        """Writes an inf into the gradient that a parameter has."""
        content = np.array(param.grad.to_host(), np.float32)
        content.reshape(-1)[0] = np.inf
        param.grad.write(content)

    def value(self, param: Param) -> Array:
        return self.params[param].to_host().astype(np.float64)

    def grad(self, param: Param) -> Array | None:
        grad = self.params[param].grad
        return None if grad is None else np.array(grad.to_host(), np.float64)

    # ------------------------------------------------------------------------------------------ losses

    def loss(self, loss: Loss, *, in_block: bool = False) -> Node:
        """A loss, computed as the code around it says; with ``in_block`` its network runs in ``amp.checkpoint``."""
        net = partial(amp.checkpoint, self.nets[loss.net]) if in_block else self.nets[loss.net]
        return loss_of(net, ag.tensor(self.tensor(loss.x)), self.tensor(loss.y), loss.squares)


def loss_of(net: Any, x: Node, y: Tensor | Node, squares: bool) -> Node:
    """A sum of squares, or of the outputs times numbers."""
    y = y if isinstance(y, Node) else ag.tensor(y)
    return F.mse_loss(net(x), y) * SQUARES if squares else ag.sum(ag.mul(net(x), y))


def casts(handle: Any, how: str) -> Any:
    """A region around a forward pass, by name."""
    regions: dict[str, Callable[[], Any]] = {
        "as it is": nullcontext,
        "checkpoint": nullcontext,
        "disable_casts": handle.disable_casts,
        "autocast off": lambda: amp.autocast(enabled=False),
        "bfloat16": lambda: amp.autocast(dtype="bfloat16"),
        "float16": lambda: amp.autocast(dtype="float16"),
    }
    return regions[how]()


def fail_below(loss: Node, error: BaseException) -> None:
    """Lets the backward of a loss fail when it has given gradients to the last layer, and to no other."""
    nodes = [node for node in bridge.graph(loss) if node.grad_fn is not None and _hidden(node)]

    def fail(grad: Tensor) -> list[Tensor | None]:
        raise error

    for node in nodes:
        node.grad_fn = fail


def _hidden(node: Node) -> bool:
    """Whether only leaves stand below a node: it is the first product of its network."""
    return all(bridge.is_leaf(parent) for parent in node.parents)


@contextmanager
def interrupted_read() -> Iterator[None]:
    """Inside the ``with``, a wait for a loss scale on the device is interrupted."""
    read = DeviceState.read

    def interrupt(self: DeviceState) -> Any:
        raise Interrupted

    DeviceState.read = interrupt  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceState.read = read  # type: ignore[method-assign]


def step_graph(net: Any, optimizers: Sequence[Any], squares: bool, scale: float) -> Any:
    """A training step of one network as an ``amp.Graph``, at a scale that grows after every second clean step."""

    class Train(amp.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            for optimizer in optimizers:
                self.add_optimizer(optimizer)
            self.set_grad_scaler(amp.GradScaler(init_scale=scale, growth_interval=2))

        def build(self, x: Node, y: Node) -> Node:
            loss = loss_of(self.net, x, y, squares)
            loss.backward()
            return loss

    return Train()
