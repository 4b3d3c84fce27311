"""A scale for each layer: nets whose gradients no one scale fits train in float16 as in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd.engine import apply_op
from netcl.nn.layers import Linear, Module, Tanh
from netcl.optim import SGD
from netcl.optim.clip import clip_grad_norm

from clamp import amp
from clamp.bridge import Node, Tensor, module_tensors
from clamp.cli.bench.timing import counted_launches
from clamp.ops.cast import cast
from clamp.ops.elementwise import elementwise
from tests.networks import scaled_backward
from tests.reference import assert_same, to_device

pytestmark = pytest.mark.usefixtures("shut_down")

LAYERWISE = amp.ScaleRule(layerwise=True)
FULL = {"dtype": "float32", "loss_scale": 1.0}
WIDTH = 16


class Net(Module):
    """Two heads over one trunk, with a layer that both have; losses as far apart as is said.

    Where gradients meet, in the trunk, in the layer that is shared, in the residual sum, in slices and behind what
    joins them, those of the large head are so much larger that the others vanish in their rounding, as in float32. In
    the small head gradients grow by 2^12 and shrink again on their way.
    """

    def __init__(self, queue: cl.CommandQueue, apart: float) -> None:
        np.random.seed(0)
        self.apart = apart
        self.trunk = [Linear(queue, 8, WIDTH), Tanh()]
        self.residual = Linear(queue, WIDTH, WIDTH)
        self.shared = Linear(queue, WIDTH, WIDTH)
        self.large = [Tanh(), Linear(queue, WIDTH, 4)]
        self.small = [Linear(queue, WIDTH, WIDTH), Tanh(), Linear(queue, WIDTH, 4)]

    def forward(self, x: Any) -> tuple[Node, Node]:
        for layer in self.trunk:
            x = layer(x)
        x = x + ag.tanh(self.residual(x))
        x = ag.cat([x[:, :4], x[:, 4:]], 1)
        large = small = self.shared(x)
        for layer in self.large:
            large = layer(large)
        small = ag.l2_normalize(self.shared(ag.tanh(small)) * 2.0**-12)
        for layer in self.small:
            small = layer(small)
        return large, small

    def loss(self, x: Tensor, y: Tensor) -> Node:
        large, small = self(ag.tensor(x))
        target = ag.tensor(y)
        high, low = self.apart**0.5, self.apart**-0.5
        return ag.mse_loss(large, target) * high + ag.mse_loss(small, target) * low


class Training:
    """Steps of such a net.

    Args:
        optimizers: how many; of two the second has the small head, with a rate for its gradients.
    """

    def __init__(
        self, queue: cl.CommandQueue, handle: Any, apart: float = 2.0**40, level: str = "O1", optimizers: int = 2,
        passes: int = 1, clips: bool = False,
    ) -> None:  # fmt: skip
        self.handle, self.net, self.passes, self.clips = handle, Net(queue, apart), passes, clips
        params = dict(module_tensors(self.net))
        small = [param for name, param in params.items() if name.startswith("small")]
        others = [param for name, param in params.items() if not name.startswith("small")]
        if optimizers == 2:
            self.optimizers = [SGD(others, lr=1e-4 * apart**-0.5), SGD(small, lr=1e-4 * apart**0.5)]
        else:
            self.optimizers = [SGD([*others, *small], lr=1e-4 * apart**-0.5)]
        if level == "O2":
            self.net, self.optimizers = amp.decorate(self.net, self.optimizers, level="O2")
        rng = np.random.default_rng(1)
        self.data = [
            [to_device(queue, rng.standard_normal((32, width))) for width in (8, 4) * passes] for _ in range(4)
        ]
        self.gradients: list[list[np.ndarray]] = []

    def step(self, *data: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for at in range(self.passes):
            scaled_backward(self.handle, self.net.loss(*data[2 * at : 2 * at + 2]), self.optimizers)
        if self.clips:
            for optimizer in self.optimizers:
                clip_grad_norm(optimizer.params, 2.0**-30)
        for optimizer in self.optimizers:
            optimizer.step()

    def run(self, recorded: bool = False) -> Training:
        step = amp.record(self.step) if recorded else self.step
        for data in self.data:
            step(*data)
            self.gradients.append([param.grad.to_host() for x in self.optimizers for param in x.params])
        return self

    @property
    def weights(self) -> list[np.ndarray]:
        return [param.to_host() for optimizer in self.optimizers for param in optimizer.params]


def furthest(ours: Any, theirs: Any) -> float:
    """The largest error of any array, in that array's largest element."""
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("apart", [2.0**20, 2.0**40])
def test_layers_far_apart_train_as_in_float32(
    queue: cl.CommandQueue, level: str, recorded: bool, optimizers: int, passes: int, clips: bool, apart: float
) -> None:
    options: dict[str, Any] = {"apart": apart, "optimizers": optimizers, "passes": passes, "clips": clips}
    with amp.init(**FULL) as handle:
        full = Training(queue, handle, **options).run()
    with amp.init(level=level, loss_scale=LAYERWISE) as handle:
        ours = Training(queue, handle, level=level, **options).run(recorded)
        assert handle.loss_scale == 2.0**16
        assert [(report.stepped, report.repeats) for report in handle.history] == [(True, 0)] * 4 * optimizers
    assert all(grad.dtype == np.float32 for grads in ours.gradients for grad in grads)
    for found, expected in zip(ours.gradients, full.gradients, strict=True):
        assert furthest(found, expected) < 0.01
    assert furthest(ours.weights, full.weights) < 1e-3
    if recorded:
        with amp.init(level=level, loss_scale=LAYERWISE) as handle:
            eager = Training(queue, handle, level=level, **options).run()
        assert_same([*ours.weights, *ours.gradients[-1]], [*eager.weights, *eager.gradients[-1]])


def test_ops_that_compute_in_16_bits_get_gradients_in_16_bits(queue: cl.CommandQueue) -> None:
    """Each is fitted once; nothing is launched for it without the option."""
    np.random.seed(0)
    layers = [Linear(queue, 8, 8) for _ in range(3)]
    optimizer = SGD([param for layer in layers for param in layer.parameters()], lr=1e-9)
    x, fits = to_device(queue, np.ones((4, 8))), []
    for options in ({"loss_scale": LAYERWISE}, {}, {"loss_scale": LAYERWISE, "dtype": "float32"}):
        with amp.init(**options) as handle:
            hidden = ag.tensor(x)
            for layer in layers:
                hidden = ag.tanh(layer(hidden))  # a product, a bias, tanh
            with handle.scale_loss(ag.sum(hidden) * 2.0**-4, optimizer) as scaled_loss, counted_launches() as names:
                scaled_loss.backward()
            fits.append((names.count("largest"), names.count("fit")))
    assert fits == [(9, 9), (0, 0), (0, 0)]


def test_one_scale_does_not_do(queue: cl.CommandQueue) -> None:
    """What the others' bounds are worth."""
    found = []
    for options in (FULL, {}):
        with amp.init(**options) as handle:
            found.append(Training(queue, handle).run().gradients[-1])
    assert furthest(*reversed(found)) > 0.5


# ---------------------------------------------------------------------------------------------- ops of others


def checkpointed(x: Node) -> Node:
    return amp.checkpoint(ag.tanh, x)


def two_results(x: Node) -> Node:
    first, second = amp.checkpoint(lambda x: (ag.tanh(x), ag.square(x)), x)
    return first + second


def doubled(dtype: str, factor: float = 2.0) -> Callable[[Node], Node]:
    """An op of the user's, whose gradient is ``factor`` and comes in this dtype."""

    def forward(x: Tensor) -> Tensor:
        return elementwise("mul", x.dtype, x, 2.0)

    def backward(grad: Tensor) -> list[Tensor | None]:
        assert grad.dtype == dtype
        return [elementwise("mul", grad.dtype, grad, factor)]

    return amp.half_function(lambda x: apply_op(forward, backward, x))


def by_hand(dtype: str) -> Callable[[Node], Node]:
    """A node of the user's, whose gradient comes in this dtype."""

    def backward(grad: Tensor) -> list[Tensor | None]:
        assert grad.dtype == dtype
        return [elementwise("mul", grad.dtype, grad, 2.0)]

    return lambda x: Node(
        value=elementwise("mul", x.value.dtype, x.value, 2.0), grad_fn=backward, parents=[x], requires_grad=True
    )


def doubled_again(dtype: str) -> Callable[[Node], Node]:
    """The op, in a forward that is run again."""
    run = doubled(dtype)
    return lambda x: amp.checkpoint(run, x)


@pytest.mark.parametrize(
    "make",
    [lambda _: checkpointed, lambda _: two_results, doubled, by_hand, doubled_again],
    ids=["checkpoint", "two results", "apply_op", "a node", "apply_op, checkpointed"],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_ops_of_others_have_the_gradients_that_they_know(
    queue: cl.CommandQueue, make: Callable[[str], Callable[[Node], Node]], recorded: bool
) -> None:
    """Those of 16-bit results come in 16 bits, at the loss scale; what others get beside it is as it is without."""
    grads = []
    for options in (FULL, {"loss_scale": LAYERWISE}, {"loss_scale": LAYERWISE}):
        run = make("float32" if options is FULL else "float16")
        np.random.seed(0)
        layer, x = Linear(queue, 8, 8), np.random.default_rng(0).standard_normal((4, 8))
        optimizer = SGD(layer.parameters(), lr=1e-9)
        with amp.init(**options) as handle:

            def step(
                x: Tensor, layer: Any = layer, run: Any = run, optimizer: Any = optimizer, handle: Any = handle
            ) -> None:
                optimizer.zero_grad()
                hidden = layer(ag.tensor(x))
                loss = ag.sum(run(hidden)) * 2.0**-4
                for one in (hidden, run(hidden)):  # one that 16 bits do not hold, between two of the op's
                    loss = loss + ag.sum(one) * (2.0**4 if one is hidden else 2.0**-4)
                scaled_backward(handle, loss, optimizer)
                optimizer.step()

            call = amp.record(step) if recorded else step
            for _ in range(3):
                call(to_device(queue, x))
            grads.append([param.grad.to_host() for param in layer.parameters()])
            assert [(report.stepped, report.repeats) for report in handle.history] == [(True, 0)] * 3
    assert furthest(grads[1], grads[0]) < 0.01
    assert_same(grads[1], grads[2])


def test_what_overflows_inside_of_an_op_lowers_the_scale(queue: cl.CommandQueue) -> None:
    """An op of the user's that does not bear the loss scale; the others' gradients are made as small as it needs."""
    np.random.seed(0)
    layer, x = Linear(queue, 8, 8), to_device(queue, np.ones((4, 8)))
    optimizer, run = SGD(layer.parameters(), lr=1e-9), doubled("float16", 2.0**6)
    with amp.init(loss_scale=LAYERWISE) as handle:
        scaled_backward(handle, ag.sum(run(layer(ag.tensor(x)))), optimizer)
        optimizer.step()
        assert (handle.last_step.stepped, handle.last_step.repeats > 0) == (True, True)
        assert handle.loss_scale == 2.0**9
    np.testing.assert_array_equal(layer.bias.grad.to_host(), np.full(8, 4 * 2.0**6, np.float32))


@pytest.mark.filterwarnings("ignore:the loss given to scale_loss:UserWarning")
def test_a_gradient_of_an_input_is_in_float32(queue: cl.CommandQueue) -> None:
    x = cast(to_device(queue, np.ones((4, 8))), "float16")
    x.requires_grad = True
    layer = Linear(queue, 8, 8)
    optimizer = SGD(layer.parameters(), lr=1e-9)
    with amp.init(loss_scale=LAYERWISE) as handle:
        loss = ag.sum(layer(ag.tensor(x, requires_grad=True))) * 2.0**-40
        scaled_backward(handle, loss, optimizer)
        assert x.grad.dtype == "float32"
        expected = layer.weight.to_host().astype(np.float16).astype(np.float32).sum(1) * 2.0**-40
        np.testing.assert_allclose(x.grad.to_host(), np.broadcast_to(expected, (4, 8)), rtol=1e-3, atol=2.0**-50)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_option_is_a_bool(value: Any) -> None:
    with pytest.raises(ValueError, match="layerwise must be True or False"):
        amp.ScaleRule(layerwise=value)
