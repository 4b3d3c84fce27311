"""Training loops as programs, which run twice: as they are, and with the functions in them recorded (``amp.record``).

A program is a function, a list of *parts* that is called turn by turn, and what happens between its calls. Each part
is a method of :class:`Twin` that a loop may do inside such a function or outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import netcl.optim.clip
import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.amp import GradScaler as NetclScaler
from netcl.nn.layers import Dropout, Linear, ReLU, Sequential
from netcl.optim import SGD, Adam, AdamW
from netcl.optim.ema import ModelEMA

from clamp import amp, session
from clamp.bridge import Node, Parameter, Tensor
from clamp.compat.paddle import GradScaler as PaddleScaler
from clamp.scaling.dynamic_scale import ScaleRule
from tests.loop.device import casts, fail_below, loss_of

Part = tuple[Any, ...]  # name of a method of Twin's, and its arguments

INPUTS, OUTPUTS = 4, 3
GROWTH = ScaleRule(interval=3)


@dataclass(frozen=True)
class Turn:
    """One call of a program's function.

    Attributes:
        before: what happens before it.
        function: which of the program's functions is called.
        rows: of its batch.
        seed: of its batch.
        poison: what one number of the batch is; None: what it was.
        given: how the batch is given: "tensors", "nodes", "arrays" or "names".
        region: around the call.
        fails: whether parts that may fail do.
    """

    before: tuple[Part, ...] = ()
    function: int = 0
    rows: int = 4
    seed: int = 0
    poison: float | None = None
    given: str = "tensors"
    region: str = "as it is"
    fails: bool = False


@dataclass(frozen=True)
class Program:
    """A loop.

    Attributes:
        handle: arguments of ``amp.init``; None: no AMP.
        functions: the parts of each function.
        turns: in their order.
        half: from which network on parameters have 16 bits, and masters.
        wrapped: whether the last optimizer has a wrapper, with a loss scale for each of two losses.
        master_weight: of those 16-bit parameters.
        in_blocks: whether networks run in ``amp.checkpoint``.
        retains: whether the first backward of a pass says ``retain_graph=True``.
    """

    handle: dict[str, Any] | None
    functions: tuple[tuple[Part, ...], ...]
    turns: tuple[Turn, ...]
    half: int = 3
    wrapped: bool = False
    master_weight: bool | str = True
    in_blocks: bool = False
    retains: bool = False


class Stop(Exception):
    """An error of the user's, in the middle of a step."""


class Twin:
    """One run's networks, optimizers, scalers, and the parts of loops on them."""

    def __init__(self, queue: cl.CommandQueue, program: Program) -> None:
        self.queue, self.in_blocks = queue, program.in_blocks
        self.backward = {"retain_graph": True} if program.retains else {}
        np.random.seed(0)
        shared = Linear(queue, INPUTS, 6)
        self.nets = [
            Sequential(shared, ReLU(), Dropout(0.5), Linear(queue, 6, OUTPUTS)),
            Sequential(shared, Linear(queue, 6, OUTPUTS)),
            Sequential(Linear(queue, INPUTS, OUTPUTS)),
        ]
        self.optimizers = [
            SGD(self.nets[0].parameters(), lr=2.0**-5, momentum=0.5),
            Adam(self.nets[1].parameters(), lr=2.0**-6),
            AdamW(self.nets[2].parameters(), lr=2.0**-6),
        ]
        self.scalers: list[Any] = [
            amp.GradScaler(init_scale=2.0**10, growth_interval=2),
            amp.GradScaler(init_scale=2.0**4, growth_interval=2),
            PaddleScaler(init_loss_scaling=2.0**10, incr_every_n_steps=2, decr_every_n_nan_or_inf=1),
        ]
        self.netcl_scaler = NetclScaler(init_scale=2.0**10, growth_interval=2)
        self.average = ModelEMA(self.nets[0], decay=0.75)
        self.fails = False  # whether a part that may fail does
        self.handle: Any = None
        self.init(program.handle)
        if self.handle is not None and program.half < len(self.nets):
            models, optimizers = self.nets[program.half :], self.optimizers[program.half :]
            amp.decorate(models, optimizers, level="O2", master_weight=program.master_weight)
        if self.handle is not None and program.wrapped:
            self.wrapped: Any = self.handle.wrap_optimizer(self.optimizers[2], num_loss=2)

    # ------------------------------------------------------------------------------------------ inside or outside

    def loss(self, net: int, squares: bool, x: Any, y: Any) -> Node:
        model = partial(amp.checkpoint, self.nets[net]) if self.in_blocks else self.nets[net]
        return loss_of(model, x if isinstance(x, Node) else ag.tensor(x), y, squares)

    def named(self, optimizers: Sequence[int]) -> list[Any]:
        return [self.optimizers[number] for number in optimizers]

    def train(self, net: int, squares: bool, named: Sequence[int], how: str, region: str, x: Any, y: Any) -> Node:
        """A scaled pass for some optimizers."""
        with casts(self.handle, region) if self.handle is not None else nullcontext():
            loss = self.loss(net, squares, x, y)
        if self.handle is None:
            loss.backward()
            return loss
        with self.handle.scale_loss(loss, self.named(named)) as scaled:
            if how == "fail in backward" and self.fails:
                fail_below(loss, Stop("in backward"))
            if how == "tape":
                ag.Tape().backward(scaled, **self.backward)
            else:
                scaled.backward(**self.backward)
            if how == "twice":
                scaled.backward()
            elif how == "clip inside":
                netcl.optim.clip.clip_grad_norm_device(self.nets[net].parameters(), 1.0)
            elif how == "step inside":
                self.optimizers[net].step()
            elif how == "stop inside" and self.fails:
                raise Stop("inside the with")
        return loss

    def nested(self, outer: int, inner: int, early: bool, x: Any, y: Any) -> Node:
        """A scaled pass in another."""
        if self.handle is None:
            return self.plain(outer, True, x, y)
        losses = self.loss(outer, True, x, y), self.loss(inner, False, x, y)
        with self.handle.scale_loss(losses[0], self.optimizers[outer]) as scaled:
            if early:
                scaled.backward()
            with self.handle.scale_loss(losses[1], self.optimizers[inner]) as other:
                other.backward()
            if not early:
                scaled.backward()
        return losses[0]

    def train_wrapped(self, squares: bool, x: Any, y: Any) -> Node:
        """A scaled pass, and perhaps a step, of a wrapped optimizer."""
        loss = self.loss(2, squares, x, y)
        with self.wrapped.scale_loss(loss) as scaled:
            scaled.backward()
        return loss

    def step_wrapped(self, x: Any, y: Any) -> None:
        self.wrapped.step()

    def train_netcl(self, net: int, squares: bool, x: Any, y: Any) -> Node:
        """netcl's own loop."""
        loss = self.loss(net, squares, x, y)
        self.netcl_scaler.scale_loss(loss).backward()
        self.netcl_scaler.step(self.optimizers[net], self.optimizers[net].params)
        return loss

    def plain(self, net: int, squares: bool, x: Any, y: Any) -> Node:
        """A backward without a loss scale."""
        loss = self.loss(net, squares, x, y)
        loss.backward()
        return loss

    def scale(self, number: int, net: int, squares: bool, x: Any, y: Any) -> Node:
        """A backward with a GradScaler's scale."""
        loss = self.loss(net, squares, x, y)
        self.scalers[number].scale(loss).backward()
        return loss

    def unscale(self, number: int, which: int, x: Any, y: Any) -> None:
        self.scalers[number].unscale_(self.optimizers[which])

    def scaler_step(self, number: int, which: int, x: Any, y: Any) -> None:
        self.scalers[number].step(self.optimizers[which])

    def update(self, number: int, x: Any, y: Any) -> None:
        self.scalers[number].update()

    def step(self, which: int, x: Any, y: Any) -> None:
        self.optimizers[which].step()

    def zero_grad(self, which: int, x: Any, y: Any) -> None:
        self.optimizers[which].zero_grad()

    def clip(self, which: int, on_device: bool, x: Any, y: Any) -> Any:
        clip = netcl.optim.clip.clip_grad_norm_device if on_device else netcl.optim.clip.clip_grad_norm
        return clip(self.optimizers[which].params, 1.0)

    def follow(self, x: Any, y: Any) -> None:
        """Moves the average of the weights."""
        self.average.update()

    def infer(self, net: int, x: Any, y: Any) -> Any:
        net = net or 1  # what the first one drops here is netcl's to draw where nothing is cast, from no seed
        with ag.no_grad():
            return {"out": self.nets[net](x if isinstance(x, Node) else ag.tensor(x)), "y": y}

    def validate(self, net: int, x: Any, y: Any) -> Any:
        """Evaluates with the average, in eval mode."""
        self.nets[net].eval()
        with self.average.averaged():
            found = self.infer(net, x, y)["out"]
        self.nets[net].train()
        return found

    def stop(self, x: Any, y: Any) -> None:
        if self.fails:
            raise Stop("in the middle")

    # ------------------------------------------------------------------------------------------ outside only

    def init(self, how: dict[str, Any] | None, *_: Any) -> None:
        """Another handle, or none."""
        amp.shutdown()
        self.handle = None if how is None else amp.init(**how)
        session.ensure_patched()  # as amp.record does: netcl's own defects are mended for both
        for scaler in () if self.handle is None else self.handle.scalers:
            scaler.rule = GROWTH
        self.dropout(0.5)

    def rate(self, which: int, exponent: int, x: Any, y: Any) -> None:
        self.optimizers[which].lr = 2.0**-exponent

    def mode(self, net: int, trains: bool, x: Any, y: Any) -> None:
        (self.nets[net].train if trains else self.nets[net].eval)()

    def freeze(self, net: int, part: int, how: str, x: Any, y: Any) -> None:
        """Freezes a parameter, or thaws it."""
        param = list(self.nets[net].parameters())[part]
        if how == "_frozen":
            param._frozen = not getattr(param, "_frozen", False)
        else:
            param.requires_grad = not param.requires_grad

    def write(self, net: int, part: int, seed: int, x: Any, y: Any) -> None:
        param = list(self.nets[net].parameters())[part]
        param.write(np.random.default_rng(seed).uniform(-1, 1, param.shape).astype(np.float32))

    def put_gradient(self, net: int, part: int, seed: int, x: Any, y: Any) -> None:
        param = list(self.nets[net].parameters())[part]
        array = np.random.default_rng(seed).uniform(-1, 1, param.shape).astype(np.float32)
        param.grad = Tensor.from_host(self.queue, array)

    def write_gradient(self, net: int, part: int, value: float, x: Any, y: Any) -> None:
        grad = list(self.nets[net].parameters())[part].grad
        if grad is not None:
            grad.write(np.full(grad.shape, value, np.float32))

    def clear_one(self, net: int, part: int, x: Any, y: Any) -> None:
        list(self.nets[net].parameters())[part].grad = None

    def replace(self, net: int, seed: int, x: Any, y: Any) -> None:
        """Another last bias, in the network and its optimizer."""
        layer = self.nets[net].layers[-1]
        new = Parameter.from_host(self.queue, np.random.default_rng(seed).uniform(-1, 1, OUTPUTS).astype(np.float32))
        for optimizer in self.optimizers:
            optimizer.params = [new if param is layer.bias else param for param in optimizer.params]
        layer.bias = new

    def dropout(self, p: float, *_: Any) -> None:
        self.nets[0].layers[2].p = 0.0 if self.handle is None else p  # without AMP netcl draws from no seed

    def load_scale(self, scale: float, x: Any, y: Any) -> None:
        if self.handle is not None:
            state = amp.state_dict()
            amp.load_state_dict({key: {**one, "loss_scale": scale} for key, one in state.items()})

    def set_scaler(self, number: int, scale: float, x: Any, y: Any) -> None:
        self.scalers[number].update(scale)

    def save(self, x: Any, y: Any) -> None:
        if self.handle is not None:
            amp.save_checkpoint(self.file(), self.nets, self.optimizers)

    def load(self, x: Any, y: Any) -> None:
        if self.handle is not None and self.file().exists():
            amp.load_checkpoint(self.file(), self.nets, self.optimizers)

    def file(self) -> Path:
        return FOLDERS[-1] / "run.npz"

    # ------------------------------------------------------------------------------------------ running

    def function(self, parts: Sequence[Part]) -> Callable[[Any, Any], Any]:
        """A user's function with these parts."""
        calls = [partial(getattr(self, name), *args) for name, *args in parts]

        def function(x: Any, y: Any) -> Any:
            x, y = (Tensor.from_host(self.queue, z) if isinstance(z, np.ndarray) else z for z in (x, y))
            return [call(x, y) for call in calls]

        return function


FOLDERS: list[Path] = []  # of the runs that are under way: not an attribute of theirs, since these are watched
