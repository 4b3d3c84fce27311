"""``amp.checkpoint``: gradients, results, statistics and random numbers have the bits that they have without it."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.batchnorm import BatchNorm2dModule
from netcl.nn.layers import Conv2d, Dropout, Linear, ReLU, Sequential
from netcl.nn.transformer import TransformerBlock
from netcl.optim import SGD, Adam

from clamp import amp, bridge
from clamp.bridge import Node, Parameter, Tape, Tensor
from clamp.cli.bench.timing import counted_launches
from clamp.functions import recompute
from clamp.params.weight_cache import weight_cache
from tests.networks import batch, scaled_backward
from tests.reference import assert_same, to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")

Checkpoint = Callable[..., Any]  # amp.checkpoint, or what just calls
Forward = Callable[[Checkpoint, Node], Node]
WIDTH = 8


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of ``amp.checkpoint``."""
    return function(*args, **kwargs)


def _blocks(queue: cl.CommandQueue) -> tuple[list[Any], Forward]:
    blocks = [Sequential(Linear(queue, WIDTH, WIDTH), ReLU(), Dropout(0.3), Linear(queue, WIDTH, WIDTH)) for _ in "123"]

    def forward(checkpoint: Checkpoint, x: Node) -> Node:
        for block in blocks:
            x = checkpoint(block, x)
        return x

    return blocks, forward


def _nested(queue: cl.CommandQueue) -> tuple[list[Any], Forward]:
    blocks, inner = _blocks(queue)
    last = Linear(queue, WIDTH, WIDTH)

    def outer(checkpoint: Checkpoint, x: Node) -> Node:
        return ag.dropout(last(inner(checkpoint, ag.dropout(x, 0.2))), 0.4)

    return [*blocks, last], lambda checkpoint, x: checkpoint(outer, checkpoint, x)


def _transformer(queue: cl.CommandQueue) -> tuple[list[Any], Forward]:
    block = TransformerBlock(WIDTH, 2, dropout=0.2, queue=queue)
    return [block], lambda checkpoint, x: checkpoint(lambda y: block(ag.reshape(y, (1, -1, WIDTH))), x)


def _images(queue: cl.CommandQueue) -> tuple[list[Any], Forward]:
    layers = [Conv2d(queue, 1, 4, 3, pad=1), BatchNorm2dModule(queue, 4), ReLU(), Conv2d(queue, 4, 4, 3, pad=1)]
    model = Sequential(*layers, BatchNorm2dModule(queue, 4))
    return [model], lambda checkpoint, x: checkpoint(model, ag.reshape(x, (-1, 1, 2, WIDTH // 2)))


def _containers(queue: cl.CommandQueue) -> tuple[list[Any], Forward]:
    """Two results that are used, one that is not, one that is what was passed, and things that are no tensors."""
    first, second = Linear(queue, WIDTH, WIDTH), Linear(queue, WIDTH, 3)

    def parts(given: dict[str, Node], factor: float) -> dict[str, Any]:
        x = given["x"]
        return {"wide": first(x), "rest": [second(x), (ag.mul(first(x), factor), "text")], "same": x, "none": None}

    def forward(checkpoint: Checkpoint, x: Node) -> Node:
        found = checkpoint(parts, {"x": x}, factor=2.0)
        if found["same"] is not x or found["rest"][1][1] != "text" or found["none"] is not None:
            raise ValueError("other results")  # no assert: pytest's own code would be looked through by a recording
        return ag.add(ag.sum(found["wide"]), ag.sum(found["rest"][0]))

    return [first, second], forward


def _from_outside(queue: cl.CommandQueue) -> tuple[list[Any], Forward]:
    """Reads a computed node and a parameter that it is not passed; both are used outside as well."""
    shared, other = Linear(queue, WIDTH, WIDTH), Linear(queue, WIDTH, WIDTH)

    def forward(checkpoint: Checkpoint, x: Node) -> Node:
        hidden = ag.relu(shared(x))
        y = checkpoint(lambda z: ag.mul(other(shared(z)), hidden), hidden)
        return ag.add(other(y), ag.mul(hidden, y))

    return [shared, other], forward


def _random(queue: cl.CommandQueue) -> tuple[list[Any], Forward]:
    """Draws numbers of its own between those of dropout."""
    layer = Linear(queue, WIDTH, WIDTH)

    def noisy(x: Node) -> Node:
        y = ag.dropout(ag.mul(layer(x), float(np.random.uniform(1, 2))), 0.5)
        return ag.dropout(ag.mul(y, random.uniform(1, 2) + np.random.uniform()), 0.25)

    return [layer], lambda checkpoint, x: checkpoint(noisy, x)


def _regions(queue: cl.CommandQueue) -> tuple[list[Any], Forward]:
    """Regions of several dtypes around a checkpoint and in it."""
    layer = Linear(queue, WIDTH, WIDTH)

    def inside(x: Node) -> Node:
        with amp.autocast(dtype="bfloat16"):
            x = layer(x)
        with amp.autocast(enabled=False):
            return ag.softmax(layer(amp.cast(x, "float32")))

    def forward(checkpoint: Checkpoint, x: Node) -> Node:
        with amp.autocast(dtype="float32"):
            x = checkpoint(layer, x)
        return ag.mul(checkpoint(inside, x), checkpoint(layer, x))

    return [layer], forward


PROGRAMS = {
    "blocks": _blocks,
    "nested": _nested,
    "transformer": _transformer,
    "images": _images,
    "containers": _containers,
    "from outside": _from_outside,
    "random": _random,
    "regions": _regions,
}


def _tensors(modules: list[Any]) -> list[Tensor]:
    return [tensor for module in modules for _, tensor in bridge.module_tensors(module)]


def _trained(
    queue: cl.CommandQueue, name: str, checkpoint: Checkpoint, handle: Any, around: AbstractContextManager[Any],
    wrap: Callable[[Any], Any] = lambda step: step, every: int = 1,
) -> list[Any]:  # fmt: skip
    """Gradients and results of three passes, all tensors after them, and the next random numbers.

    Args:
        wrap: makes of a step what is called.
        every: passes for an optimizer's step.
    """
    np.random.seed(3)
    random.seed(4)
    modules, forward = PROGRAMS[name](queue)
    params = [tensor for tensor in _tensors(modules) if bridge.is_weight(tensor)]
    optimizer, found = SGD(params, lr=0.05), list[Any]()

    def run(x: Tensor) -> Tensor:
        node = Node(x, requires_grad=True)
        out = forward(checkpoint, node)
        loss = ag.mul(ag.sum(ag.mul(out, out)), 0.01)
        scaled_backward(handle, loss, optimizer)
        return out.value

    run = wrap(run)
    with around:
        for index in range(3):
            x = batch(queue, 5, WIDTH, 1, seed=index)[0]
            found.append(run(x).to_host())
            found.extend(param.grad.to_host() for param in params)
            if index % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()
    return [*found, *(tensor.to_host() for tensor in _tensors(modules)), np.random.bytes(8), random.random()]


#: what gets several gradients, some of them inside: these are added up in another order
ADDED_UP = ("from outside", "regions")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_has_the_bits_that_it_has_without(queue: cl.CommandQueue, name: str, dtype: str) -> None:
    handle = amp.init(dtype=dtype, loss_scale=64.0)
    plain = _trained(queue, name, plainly, handle, nullcontext())
    found = _trained(queue, name, amp.checkpoint, handle, nullcontext())
    if name not in ADDED_UP:
        assert_same(found, plain)
        return
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]
    for one, other in zip(found[:-2], plain[:-2], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=32 * unit * np.abs(other).max())


@pytest.mark.parametrize("name", ["blocks", "images", "containers"])
@pytest.mark.parametrize("mode", ["O2", "casts off", "recorded", "accumulated"])
def test_in_every_mode(queue: cl.CommandQueue, name: str, mode: str) -> None:
    handle = amp.init(level="O2" if mode == "O2" else "O1", loss_scale=64.0)
    around = handle.disable_casts if mode == "casts off" else nullcontext

    def run(checkpoint: Checkpoint) -> list[Any]:
        wrap: Any = amp.record if mode == "recorded" else lambda step: step
        return _trained(queue, name, checkpoint, handle, around(), wrap, 1 + (mode == "accumulated"))

    if mode == "casts off" and name == "blocks":  # netcl's dropout draws from nowhere, and clamp's stands in for it
        first, second = run(amp.checkpoint), run(amp.checkpoint)
        assert_same(second, first)
    else:
        assert_same(run(amp.checkpoint), run(plainly))


@pytest.mark.parametrize("is_active", [True, False], ids=["AMP", "no AMP"])
def test_dropout_drops_the_same_in_backward(queue: cl.CommandQueue, is_active: bool) -> None:
    if is_active:
        amp.init()
    x = Node(to_device(queue, np.ones(1000)), requires_grad=True)
    y = amp.checkpoint(lambda z: ag.dropout(ag.dropout(z, 0.3), 0.3), x)
    Tape().backward(ag.sum(y))
    np.testing.assert_array_equal(x.grad.to_host(), y.value.to_host())
    assert 300 < np.count_nonzero(x.grad.to_host()) < 700


def test_statistics_of_netcls_own_batch_norm_move_once(queue: cl.CommandQueue) -> None:
    x, moved = to_device(queue, np.arange(32).reshape(2, 4, 2, 2)), []
    for checkpoint in (plainly, amp.checkpoint):
        layer = BatchNorm2dModule(queue, 4)
        Tape().backward(ag.sum(checkpoint(layer, Node(x, requires_grad=True))))
        moved.append(layer.running_mean.to_host())
    assert_same([moved[1]], [moved[0]])


@pytest.mark.parametrize("spelling", ["no tape", "tape around", "tape passed", "tape passed as an argument"])
def test_whatever_records(queue: cl.CommandQueue, spelling: str) -> None:
    """What a segment computed is on no tape, with the tape's backward and with the node's."""
    amp.init(loss_scale=1.0)
    x, w = (Node(to_device(queue, np.eye(4) + 1), requires_grad=True) for _ in "12")

    def product(y: Node, tape: Tape | None = None) -> Node:
        return ag.relu(ag.matmul_op(y, w, tape=tape), tape=tape)

    tape = Tape()
    with tape if spelling == "tape around" else nullcontext():
        given = {"tape passed": {"tape": tape}}.get(spelling, {})
        more = (tape,) if spelling == "tape passed as an argument" else ()
        y = amp.checkpoint(product, x, *more, **given)
    assert len(tape.nodes) == (spelling != "no tape")
    tape.backward(ag.sum(y))
    np.testing.assert_array_equal(x.grad.to_host(), np.full((4, 4), 5.0))
    np.testing.assert_array_equal(w.grad.to_host(), np.full((4, 4), 5.0))
    assert len(tape.nodes) == (spelling != "no tape")


def test_a_graph_that_is_kept_gives_its_gradients_twice(queue: cl.CommandQueue) -> None:
    handle = amp.init(loss_scale=8.0)
    modules, forward = _containers(queue)
    params = [tensor for tensor in _tensors(modules) if bridge.is_weight(tensor)]
    optimizer = SGD(params, lr=0.1)
    loss = ag.sum(forward(amp.checkpoint, Node(batch(queue, 3, WIDTH, 1)[0], requires_grad=True)))
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        scaled_backward(handle, loss, optimizer)
        found.append([param.grad.to_host() for param in params])
    assert_same(found[1], found[0])


def test_each_of_several_results_has_its_own_gradients(queue: cl.CommandQueue) -> None:
    """Whichever of them a backward comes to, and after one that ended in the middle."""
    amp.init(loss_scale=1.0)
    x = Node(to_device(queue, [1.0, 2.0]), requires_grad=True)
    first, second = amp.checkpoint(lambda y: (ag.mul(y, 2.0), ag.mul(y, 3.0)), x)

    def fails(grad: Tensor) -> list[Tensor]:
        raise ArithmeticError

    def gradient(*losses: Node) -> list[float]:
        x.grad = x.value.grad = None
        total = losses[0] if len(losses) == 1 else ag.add(*losses)
        Tape().backward(ag.sum(total))
        return [float(value) for value in x.grad.to_host()]

    assert gradient(first) == [2.0, 2.0]
    assert gradient(second) == [3.0, 3.0]
    assert gradient(second, first) == [5.0, 5.0]
    broken = bridge.make_node(second.value, fails, [x], "fails")
    with pytest.raises(ArithmeticError):
        gradient(ag.add(broken, ag.mul(first, 0.5)), second)
    assert gradient(second) == [3.0, 3.0]


def test_what_needs_no_gradient_is_just_computed(queue: cl.CommandQueue) -> None:
    amp.init()
    x = to_device(queue, np.ones((2, 2)))
    calls = []

    def double(y: Any) -> Any:
        calls.append(y)
        return ag.mul(y, 2.0)

    with ag.no_grad():
        assert isinstance(amp.checkpoint(double, Node(x, requires_grad=True)), Tensor)
    plain = amp.checkpoint(double, Node(x))
    assert plain.grad_fn is None
    assert amp.checkpoint(lambda: 3) == 3
    y = amp.checkpoint(double, Node(x, requires_grad=True))
    assert len(calls) == 3
    with ag.no_grad():
        Tape().backward(y)
    assert len(calls) == 4


@pytest.mark.parametrize("spelling", ["alone", "with what was returned"])
@pytest.mark.parametrize("how", ["list", "attribute", "object", "iterator"])
def test_what_is_kept_and_not_returned_raises(queue: cl.CommandQueue, how: str, spelling: str) -> None:
    """A loss of balance, say, that a layer puts aside: without its graph its weights would not be trained."""
    amp.init(loss_scale=1.0)
    x, kept = Node(to_device(queue, [1.0, 2.0]), requires_grad=True), list[Node]()

    class Layer:
        penalty: Node

        def __call__(self, y: Node) -> Any:
            self.penalty = ag.mul(y, 2.0)
            if how == "list":
                kept.append(self.penalty)
            out = ag.mul(self.penalty, 3.0)
            return {"object": (out, self), "iterator": (out, iter([self.penalty]))}.get(how, (out,))

    layer = Layer()
    out, *rest = amp.checkpoint(layer, x)
    penalty = {"list": lambda: kept[0], "object": lambda: rest[0].penalty, "iterator": lambda: next(rest[0])}
    aside = penalty.get(how, lambda: layer.penalty)()
    assert to_numpy(aside.value).tolist() == [2.0, 4.0]
    loss = ag.sum(aside if spelling == "alone" else ag.add(aside, out))
    x.value.grad = before = to_device(queue, [7.0, 7.0])
    with pytest.raises(RuntimeError, match=r"a node of shape \(2,\) .* did not return.*Return it with the other"):
        Tape().backward(loss)
    assert x.value.grad is before
    Tape().backward(ag.sum(out))
    assert x.value.grad.to_host().tolist() == [13.0, 13.0]


def test_activations_are_not_kept(queue: cl.CommandQueue) -> None:
    amp.init()
    layers = [Sequential(*(ReLU() for _ in range(8))) for _ in range(4)]
    peaks = []
    for checkpoint in (plainly, amp.checkpoint):
        gc.collect()
        amp.max_memory(reset=True)
        held = amp.max_memory()  # what other tests have not let go of
        x = Node(to_device(queue, np.ones((256, 1024))), requires_grad=True)
        y = ag.mul(x, 1.0)
        for layer in layers:
            y = checkpoint(layer, y)
        Tape().backward(ag.sum(y))
        peaks.append(amp.max_memory() - held)
        del x, y
    assert peaks[1] < 0.6 * peaks[0]


def test_what_a_function_computes_besides_its_result_may_differ_in_backward(queue: cl.CommandQueue) -> None:
    known: list[Any] = []

    def block(x: Node) -> Node:
        if not known:  # a table, and a number to print: at the first call
            known.extend([ag.exp(Node(to_device(queue, [1.0, 2.0]))), ag.mean(ag.square(x)).value.to_host()])
        return ag.mul(ag.mul(x, x), known[0])

    with amp.init():
        x = Node(to_device(queue, [1.0, 2.0]), requires_grad=True)
        Tape().backward(ag.sum(amp.checkpoint(block, x)))
    np.testing.assert_allclose(to_numpy(x.value.grad), 2 * np.array([1.0, 2.0]) * np.exp([1.0, 2.0]), rtol=1e-3)


#: what a function of x and a weight computes first, and again, and what is said of that
CHANGING: dict[str, tuple[Callable[[Node, Node], Any], Callable[[Node, Node], Any], str]] = {
    "shape": (lambda x, w: ag.mul(x, 2.0), lambda x, w: ag.sum(x),
              r"returns float\d\d of shape \(1,\) in place of float\d\d of shape \(2,\)"),
    "dtype": (lambda x, w: amp.cast(ag.mul(x, 2.0), "float16"), lambda x, w: amp.cast(ag.mul(x, 2.0), "bfloat16"),
              r"returns bfloat16 of shape \(2,\) in place of float16 of shape \(2,\)"),
    "number": (lambda x, w: [ag.mul(x, 2.0)], lambda x, w: [ag.mul(x, 2.0), ag.mul(x, 3.0)],
               "returns .*, .* in place of"),
    "tensors": (lambda x, w: ag.mul(x, 2.0), lambda x, w: ag.mul(x, w), "reads other tensors that need a gradient"),
    "op": (lambda x, w: ag.mul(ag.relu(x), 2.0), lambda x, w: ag.mul(ag.tanh(x), 2.0),
           "computes tanh in place of relu"),
    "fewer ops": (lambda x, w: ag.mul(ag.relu(x), 2.0), lambda x, w: ag.mul(x, 2.0),
                  "computes nothing in place of relu"),
    "dropout": (lambda x, w: ag.dropout(x, 0.5), lambda x, w: ag.dropout(ag.dropout(x, 0.5), 0.5),
                "draws more random numbers"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGING)
def test_a_function_that_computes_something_else_in_backward_raises(queue: cl.CommandQueue, what: str) -> None:
    amp.init()
    x, weight = (Node(to_device(queue, [1.0, 2.0]), requires_grad=True) for _ in "12")
    *computed, message = CHANGING[what]
    calls = iter(computed)
    y = amp.checkpoint(lambda x: next(calls)(x, weight), x)  # type: ignore[operator]
    y = y[0] if isinstance(y, list) else y
    np.random.seed(5)
    with pytest.raises(RuntimeError, match=f"run again in backward, {message}.*compute the same whenever"):
        Tape().backward(ag.sum(y))
    after = np.random.bytes(4)
    np.random.seed(5)
    assert np.random.bytes(4) == after, "random numbers go on as if nothing had been run"
    z = Node(to_device(queue, [1.0, 2.0]), requires_grad=True)
    Tape().backward(ag.sum(amp.checkpoint(lambda x: ag.mul(x, 3.0), z)))
    assert z.grad.to_host().tolist() == [3.0, 3.0]


@pytest.mark.parametrize("how", ["step", "netcl's step", "write", "write to the batch", "master's step"])
def test_weights_that_change_before_backward_raise(queue: cl.CommandQueue, how: str) -> None:
    level = "O2" if how == "master's step" else "O1"
    handle = amp.init(level=level, loss_scale=1.0, enabled=how != "netcl's step")
    layer, other = Linear(queue, WIDTH, 4), Linear(queue, WIDTH, 4)
    optimizer, others = Adam(layer.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    x = Node(batch(queue, 3, WIDTH, 1)[0])
    for changes in (False, True):
        y = ag.sum(amp.checkpoint(layer, x))
        for param in (*layer.parameters(), *other.parameters()):
            param.grad = to_device(queue, np.ones(param.shape))
        others.step()
        if changes and how.startswith("write"):
            written = x.value if how == "write to the batch" else layer.weight
            written.write(np.ones(written.shape, np.float32))
        elif changes:
            optimizer.step()
        for param in layer.parameters():
            param.grad = None
        if changes:
            with pytest.raises(RuntimeError, match="was written to between its forward and backward"):
                Tape().backward(y)
        else:
            Tape().backward(y)
    assert handle is not None


async def _later(x: Node) -> AsyncIterator[Node]:
    yield x


def _one_by_one(x: Node) -> Iterator[Node]:
    yield x


@pytest.mark.parametrize("function", [5, None, "layer", _later, _one_by_one])
def test_what_is_no_function_raises(queue: cl.CommandQueue, function: Any) -> None:
    with pytest.raises(TypeError, match=r"amp\.checkpoint takes a function and its arguments"):
        amp.checkpoint(function, Node(to_device(queue, [1.0])))


def test_an_error_inside_leaves_everything_as_it_was(queue: cl.CommandQueue) -> None:
    amp.init(loss_scale=1.0)
    w = Parameter.from_host(queue, np.ones((2, 2), np.float32))
    x, calls = Node(to_device(queue, np.eye(2)), requires_grad=True), []

    def fails(at: int) -> Callable[[Node], Node]:
        def function(y: Node) -> Node:
            calls.append(y)
            if len(calls) == at:
                raise ArithmeticError
            return ag.relu(ag.matmul_op(y, Node(w)))

        return function

    tape = Tape()
    with tape, pytest.raises(ArithmeticError):
        amp.checkpoint(fails(1), x)
    with tape:
        y = ag.sum(amp.checkpoint(fails(3), x))
    w.grad = before = to_device(queue, np.full((2, 2), 7.0))
    with pytest.raises(ArithmeticError):
        tape.backward(y)
    assert w.grad is before
    tape.backward(y)
    np.testing.assert_array_equal(w.grad.to_host(), np.full((2, 2), 8.0))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_no_more_is_kept_of_weights_than_without(queue: cl.CommandQueue, layer: str, level: str) -> None:
    """A forward that is run again is no second use, for which packed panels would be kept."""
    kept = {}
    for checkpoint in (plainly, amp.checkpoint):
        shape = (256, 256) if layer == "linear" else (2, 16, 16, 16)
        layers = [Linear(queue, 256, 256) if layer == "linear" else Conv2d(queue, 16, 16, 3, pad=1) for _ in "12"]
        model = Sequential(layers[0], ReLU(), layers[1])
        optimizer = SGD(model.parameters(), lr=0.01)
        amp.decorate(model, optimizer, level=level, dtype="bfloat16")
        model.train()
        x = to_device(queue, np.random.default_rng(0).standard_normal(shape))
        with amp.init(dtype="bfloat16", level=level) as handle:
            loss = ag.sum(checkpoint(model, ag.tensor(x)))
            with handle.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
                kept[checkpoint] = weight_cache.nbytes
    assert kept[amp.checkpoint] == kept[plainly]


def test_what_is_computed_again_goes_as_backward_uses_it(queue: cl.CommandQueue) -> None:
    """Of the values of a long block those stay that are still to be read, which the last is not, and what the user
    holds."""
    made: list[weakref.ref[Tensor]] = []
    held: list[Node] = []
    alive: list[int] = []

    def noting(node: Node) -> Node:
        def note(grad: Tensor) -> list[Tensor]:
            alive.append(sum(ref() is not None for ref in made))
            return [grad]

        made.append(weakref.ref(node.value))
        noted: Node = bridge.make_node(node.value, note, [node], "noting", None)
        return noted

    def block(x: Node) -> Node:
        made.clear()
        for index in range(5):
            x = noting(ag.sigmoid(x))
            if index == 1:
                held[:] = [x]
        return x

    x = Node(to_device(queue, np.ones((4, 8))), requires_grad=True)
    with amp.init():
        ag.sum(amp.checkpoint(block, x)).backward()
        with pytest.raises(RuntimeError, match="did not return, but stored"):
            held[0].backward()
    assert alive == [4, 3, 2, 2, 1]
    sigmoid = 1 / (1 + np.exp(-1 / (1 + np.exp(-1.0))))
    np.testing.assert_allclose(to_numpy(held[0].value), sigmoid, rtol=1e-3)


def drawn(queue: cl.CommandQueue, *shape: int) -> list[Node]:
    """Leaves: images, and a weight for their rows."""
    draw = np.random.default_rng(3)
    return [Node(to_device(queue, draw.standard_normal(of)), requires_grad=True) for of in (shape, (WIDTH, WIDTH))]


#: what ends a block: a function of images and a weight, and how many launches its result takes that no gradient reads
ENDS: dict[str, tuple[Callable[[Node, Node], Node], int]] = {
    "residual sum": (lambda x, w: ag.add(x, ag.matmul_op(ag.tanh(x), w)), 2),
    "product of rows": (lambda x, w: ag.reshape(ag.matmul_op(ag.reshape(ag.tanh(x), (-1, WIDTH)), w), (-1, WIDTH)), 1),
    "pool": (lambda x, w: ag.max_pool2d(ag.matmul_op(x, w), 2, 2), 1),
    "relu": (lambda x, w: ag.relu(ag.mul(ag.matmul_op(x, w), 2.0)), 0),
    "tanh": (lambda x, w: ag.tanh(ag.matmul_op(x, w)), 1),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_no_gradient_reads_is_computed_again_only_if_asked_for(queue: cl.CommandQueue, name: str) -> None:
    end, launches = ENDS[name]
    x, w = drawn(queue, 2, 3, WIDTH, WIDTH)
    seen: list[Any] = []
    counts, gradients = [], []

    def block(y: Node, reads: bool) -> Node:
        made = end(y, w)
        if reads:
            seen.append(made.value.to_host())
        return made

    with amp.init(loss_scale=1.0):
        for checkpoint, reads in ((plainly, False), (amp.checkpoint, False), (amp.checkpoint, True)):
            for _ in "12":  # the first time, more may be made
                x.value.grad = w.value.grad = None
                loss = ag.mean(checkpoint(block, ag.mul(x, 1.5), reads))
                with counted_launches() as counted:
                    Tape().backward(loss)
            counts.append(len(counted))
            gradients.append([node.value.grad.to_host() for node in (x, w)])
    assert counts[2] - counts[1] == launches
    for found in gradients[1:]:
        for grad, expected in zip(found, gradients[0], strict=True):
            np.testing.assert_array_equal(grad, expected)
    assert len(seen) == 4
    np.testing.assert_array_equal(seen[3], seen[2])


def _attention(x: Node, w: Node) -> tuple[Node, Node]:
    q, k, v = (ag.tanh(ag.reshape(ag.matmul_op(ag.mul(x, each), w), (2, 2, 32, WIDTH))) for each in (1.0, 0.5, 2.0))
    out = ag.flash_attention(q, k, v)
    return ag.matmul_op(ag.reshape(out, x.value.shape), w), out


def _batch_norm(x: Node, w: Node) -> tuple[Node, Node]:
    scales = [to_device(x.value.queue, np.full(8, scale)) for scale in (1.5, 0.25, 0.0, 1.0)]
    out = ag.batch_norm2d(ag.tanh(ag.matmul_op(x, w)), *map(Node, scales[:2]), *scales[2:])
    return ag.tanh(out), out


@pytest.mark.parametrize(
    ("block", "how"), [(_attention, "no room"), (_attention, "written to"), (_batch_norm, "no room")]
)
def test_what_is_small_for_its_time_is_not_computed_again(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, block: Callable[[Node, Node], tuple[Node, Node]], how: str
) -> None:
    """Attention, and the statistics of batch norm: unless they are large beside the block, or written to."""
    x, w = drawn(queue, 4, 8, 4, WIDTH)
    gradients, launched = [], []
    with amp.init(dtype="bfloat16", loss_scale=1.0):
        for checkpoint, is_lost in ((plainly, False), (amp.checkpoint, False), (amp.checkpoint, True)):
            if is_lost and how == "no room":
                monkeypatch.setattr(recompute, "_ROOM", 1 << 40)
            x.value.grad = w.value.grad = None
            seen: list[Tensor] = []

            def run(y: Node, seen: list[Tensor] = seen) -> Node:
                result, inner = block(y, w)
                seen.append(inner.value)
                return result

            loss = ag.mean(checkpoint(run, ag.mul(x, 1.5)))
            if is_lost and how == "written to":
                seen[0].write(np.zeros(seen[0].shape, np.float32))
            with counted_launches() as counted:
                Tape().backward(loss)
            launched.append(sorted(counted))
            gradients.append([node.value.grad.to_host() for node in (x, w)])
    assert launched[1] != launched[2]
    assert len(launched[1]) <= len(launched[2]) - (block is _attention)
    for found in gradients[1:]:
        assert_same(found, gradients[0])


@pytest.mark.parametrize("place", ["last", "in the middle", "two of them"])
def test_nodes_made_by_hand_are_computed_again(queue: cl.CommandQueue, place: str) -> None:
    """Without an op's help: what they were made from goes, as of any other."""
    x, w = (Node(to_device(queue, np.eye(4) + each), requires_grad=True) for each in (0.25, 0.5))
    seen: list[weakref.ref[Tensor]] = []

    def doubled(node: Node) -> Node:
        value = ag.mul(Node(node.value), 2.0).value
        return Node(value=value, grad_fn=lambda grad: [ag.mul(Node(grad), 2.0).value], parents=[node])

    def block(y: Node) -> Node:
        hidden = ag.tanh(ag.matmul_op(y, w))
        seen.append(weakref.ref(hidden.value))
        made = doubled(hidden)
        return {"last": made, "in the middle": ag.tanh(made)}.get(place) or doubled(made)

    gradients = []
    with amp.init(loss_scale=1.0):
        for checkpoint in (plainly, amp.checkpoint):
            x.value.grad = w.value.grad = None
            result = checkpoint(block, x)
            assert (seen[-1]() is None) == (checkpoint is amp.checkpoint)
            Tape().backward(ag.sum(ag.mul(result, result)))
            gradients.append([node.value.grad.to_host() for node in (x, w)])
            del result
    assert len(seen) == 3
    assert_same(*gradients)


def test_what_is_kept_of_a_block_that_runs_again_is_of_then(queue: cl.CommandQueue) -> None:
    """Also what no gradient reads, if its input is overwritten before somebody looks."""
    x, kept = Node(to_device(queue, np.ones((4, 8))), requires_grad=True), list[Node]()

    def block(y: Node) -> Node:
        kept.append(ag.mul(y, 2.0))
        kept.append(ag.add(kept[-1], 1.0))
        return kept[-1]

    with amp.init(loss_scale=1.0):
        ag.sum(amp.checkpoint(block, x)).backward()
        x.value.write(np.full((4, 8), 5.0, np.float32))
        found = [float(node.value.to_host()[0, 0]) for node in kept]
    assert found == [2.0, 3.0, 2.0, 3.0]
