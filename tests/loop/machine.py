"""Random training loops: what the model (model.py) says must happen, and what happens on a device, side by side.

Three tiny networks: the second one's first layer has the first one's weight; two optimizers have parameters in common;
Adam has the third network. After every rule all parameters and gradients are compared, and what nobody was to write
must have kept every bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from clamp import amp, session
from tests.loop.device import Real, casts
from tests.loop.model import Array, Loss, Optimizer, Param, Passed, Scale, backward, deliver

DTYPES = ("float16", "float16", "bfloat16", "float32")
RAISES = (RuntimeError, ValueError, TypeError)

numbers = st.integers(0, 9)  # seeds of batches
bools = st.booleans()
networks = st.integers(0, 2)
poisons = st.sampled_from((None, None, None, None, np.inf, np.nan))
regions = st.sampled_from(("as it is",) * 4 + ("disable_casts", "autocast off", "bfloat16", "float16", "checkpoint"))
Spec = tuple[int, bool, int, float | None, str]  # network, squares, batch, poison, region
specs = st.tuples(networks, bools, numbers, poisons, regions)


def quarters(seed: int, *shape: int) -> Array:
    """Multiples of 1/4 up to 1, none of them zero."""
    rng = np.random.default_rng(seed)
    return rng.choice([-4, -3, -2, -1, 1, 2, 3, 4], shape) / 4.0


class Loop(RuleBasedStateMachine):
    """What all rules need: the two sides, how they are made, and how they are compared."""

    queue: cl.CommandQueue  # set by the test

    def __init__(self) -> None:
        super().__init__()
        self.quiet = warnings.catch_warnings()
        self.quiet.__enter__()
        warnings.simplefilter("ignore", UserWarning)  # a warning is a right answer; tests of their own look for it
        self.real = Real(self.queue)
        self.seed = 0
        self.make_networks()
        self.held: dict[Param, Array | None] = {}  # gradients on the device, when they were last compared
        self.written: dict[Param, Array] = {}  # parameters that this rule wrote, with their slack
        self.regraded: set[Param] = set()  # those whose gradient it changed
        self.handle: Any = None
        self.start("float16", None)

    def make_networks(self) -> None:
        def param(name: str, *shape: int) -> Param:
            self.seed += 1
            return Param(name, quarters(self.seed, *shape))

        shared = param("shared", 3, 4)
        self.layers = [
            [(shared, param("a1.bias", 4)), (param("a2", 4, 3), param("a2.bias", 3))],
            [(shared, param("b1.bias", 4)), (param("b2", 4, 3), param("b2.bias", 3))],
            [(param("c", 3, 3), param("c.bias", 3))],
        ]
        of = [[p for layer in net for p in layer] for net in self.layers]
        self.optimizers = [
            Optimizer("a", of[0], lr=2.0**-6),
            Optimizer("b", of[1], lr=2.0**-7, momentum=0.5),  # steps the shared weight too
            Optimizer("c", of[2], lr=2.0**-6, is_adam=True),
        ]
        for net in self.layers:
            self.real.add_net(net)
        for optimizer in self.optimizers:
            self.real.add_optimizer(optimizer)

    def start(self, dtype: str, loss_scale: float | None, wrapped: bool = False) -> None:
        """A handle, in the model and in clamp.

        Args:
            loss_scale: None: what is usual for the dtype, with a first scale that keeps float16 exact.
            wrapped: whether the first optimizer gets two losses of its own (the handle's scale_loss is off then).
        """
        self.handle = amp.init(dtype=dtype, **({} if loss_scale is None else {"loss_scale": loss_scale}))
        self.dtype = dtype
        moves = loss_scale is None and dtype == "float16"
        self.scale = Scale(2.0**6 if moves else loss_scale or 1.0, moves, exists=moves or loss_scale is not None)
        self.own_scales = [self.scale]
        self.wrapped: Any = None
        self.losses_of_wrapped = 0
        for optimizer in self.optimizers:
            optimizer.pending = set()
        if wrapped:
            self.wrapped = self.handle.wrap_optimizer(self.real.optimizers[self.optimizers[0]], num_loss=2)
            self.own_scales += [Scale(self.scale.scale, moves, self.scale.exists) for _ in range(2)]
        if moves:
            self.load_scales([(2.0**6, 1998) for _ in self.own_scales])

    def load_scales(self, states: Iterable[tuple[float, int]]) -> None:
        """Sets the handle's scales, and how many clean steps they have seen of the 2000 after which they grow."""
        state = amp.state_dict()
        for (scale, tracker), own, saved in zip(states, self.own_scales, state.values(), strict=True):
            saved.update(loss_scale=scale, unskipped=tracker)
            own.scale, own.tracker = scale, tracker
        amp.load_state_dict(state)

    @initialize(keeps=st.sampled_from((None, None, None, True, "remainder", "stochastic", "kahan")))
    def masters(self, keeps: bool | str | None) -> None:
        """The last network in 16 bits, kept from step to step in one of these ways, or in float32."""
        if keeps is not None:
            amp.decorate(self.real.nets[2:], [*self.real.optimizers.values()][2:], level="O2", master_weight=keeps)
            for param in self.optimizers[2].params:
                param.ulp = 2.0**-9

    def dtype_of(self, net: int, dtype: str) -> str:
        """By what a loss of a network is rounded."""
        return "float16" if dtype == "float32" and self.layers[net][-1][0].ulp else dtype

    def teardown(self) -> None:
        session.shutdown()
        session.forget_patches()
        self.quiet.__exit__(None, None, None)

    # ------------------------------------------------------------------------------------------ losses

    def make_loss(self, net: int, squares: bool, seed: int, poison: float | None, region: str) -> tuple[Loss, Any]:
        """A loss in the model and on the device; the values are compared."""
        self.keep_in_range()
        dtype = region if region in DTYPES else self.dtype
        loss = Loss(net, squares, *self.batch(net, seed, poison), self.dtype_of(net, dtype))
        with casts(self.handle, region):
            node = self.real.loss(loss, in_block=region == "checkpoint")
        value, slack, _ = backward(self.layers[net], loss)
        shown = float(node.value.to_host()[0])
        if np.isfinite(value):
            assert abs(shown - value) <= slack, f"the loss is {shown} and must be {value}"
        else:
            assert not np.isfinite(shown)
        return loss, node

    def batch(self, net: int, seed: int, poison: float | None) -> tuple[Array, Array]:
        """Two rows of inputs, and of targets or factors."""
        rng = np.random.default_rng(seed)
        x = rng.choice([-2.0, -1.0, 1.0, 2.0], (2, 3))
        if poison is not None:
            x[0, seed % 3] = poison
        return x, rng.choice([-2.0, -1.0, 1.0, 2.0], (2, self.layers[net][-1][1].value.size))

    def gradients(self, loss: Loss) -> Passed:
        """What the model says that backward gives."""
        return backward(self.layers[loss.net], loss)[2]

    def add(self, passed: Passed, by: Scale | None = None) -> None:
        """The model's side of a backward."""
        deliver(passed, by, by.scale if by is not None else 1.0)
        self.regraded |= set(passed)

    def keep_in_range(self) -> None:
        """Writes parameters and scales anew that have left the range in which float16 neither overflows nor rounds
        coarsely."""
        for param in self.all_params():
            if np.abs(param.value).max() > 2:
                self.write(param)
        if self.scale.moves and any(not 2.0**2 <= scale.scale <= 2.0**7 for scale in self.own_scales):
            self.load_scales([(2.0**6, scale.tracker) for scale in self.own_scales])

    def write(self, param: Param) -> None:
        self.seed += 1
        param.value = quarters(self.seed, *param.value.shape)
        self.real.params[param].write(param.value.astype(np.float32))
        self.written[param] = np.zeros_like(param.value)

    # ------------------------------------------------------------------------------------------ comparing

    def all_params(self) -> list[Param]:
        return list(dict.fromkeys(p for net in self.layers for layer in net for p in layer))

    @invariant()
    def everything_is_as_it_must_be(self) -> None:
        for param in self.all_params():
            self.compare_value(param, self.real.value(param))
            if param.frozen == "requires_grad":  # some functions give it a gradient, some do not; no step reads it
                param.grad = self.real.params[param].grad = None
            self.compare_grad(param, self.real.grad(param))
        self.written, self.regraded = {}, set()
        assert [scaler.scale for scaler in self.handle.scalers] == [scale.scale for scale in self.own_scales]

    def compare_value(self, param: Param, value: Array) -> None:
        assert np.isfinite(value).all(), f"{param.name} is not finite: {value}"
        if param in self.written:
            off = np.abs(value - param.value)
            assert (off <= self.written[param]).all(), f"{param.name} is\n{value}, and must be\n{param.value}"
            param.value = value  # roundings must not add up
        else:
            assert np.array_equal(value, param.value), f"{param.name} was written: {value}, and was {param.value}"

    def compare_grad(self, param: Param, held: Array | None) -> None:
        before = self.held.get(param)
        self.held[param] = held
        if param.grad is None or held is None:
            assert param.grad is held is None, f"{param.name} has the gradient {held}, not {param.grad}"
            return
        if param.grad.bad:
            assert not np.isfinite(held).all(), f"the inf or nan in {param.name}'s gradient is gone: {held}"
            return
        factor = param.grad.at
        off = np.abs(held / factor - param.grad.value)
        assert (off <= param.grad.slack).all(), (
            f"the gradient of {param.name} is\n{held}, and must be {factor} times\n{param.grad.value}"
        )
        if param not in self.regraded:
            assert before is not None
            assert np.array_equal(held, before), f"the gradient of {param.name} was written"

    # ------------------------------------------------------------------------------------------ errors

    def raises(self, errors: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> None:
        """The call must raise one of these, and say something."""
        with pytest.raises(errors) as raised:
            call()
        ours = isinstance(raised.value, KeyboardInterrupt | ZeroDivisionError)
        assert ours or len(str(raised.value)) > 40, repr(raised.value)

    def in_with(self, manager: AbstractContextManager[Any], body: Callable[[Any], None]) -> None:
        with manager as scaled:
            body(scaled)
