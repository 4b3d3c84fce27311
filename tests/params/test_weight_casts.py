"""16-bit copies of weights: one launch for those that a forward asks for, and never another value than the weight's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node, Parameter, Tensor
from clamp.cli.bench.timing import counted_launches
from clamp.opencl.device import capabilities
from clamp.opencl.program import built_programs
from clamp.params import weight_cache as weight_cache_module
from clamp.params.weight_cache import weight_cache
from tests.networks import LOSS_FACTOR, batch, mlp, scaled_backward, step
from tests.reference import quantize, to_device, to_numpy
from tests.scaling.test_overflow import OPTIMIZERS


def parameters(queue: cl.CommandQueue, count: int) -> list[Parameter]:
    """Weights of batched products, which are cast whatever their size."""
    return [Parameter.from_host(queue, np.full((1, 4, 4), index + 1, np.float32)) for index in range(count)]


def products(queue: cl.CommandQueue, params: list[Parameter]) -> list[float]:
    """The first number of ones times each of the weights."""
    x = ag.tensor(to_device(queue, np.ones((1, 1, 4))))
    with ag.no_grad():
        results = [ag.bmm(x, ag.tensor(param, requires_grad=True)) for param in params]
    return [float(to_numpy(result)[0, 0, 0]) for result in results]


def launched_casts(queue: cl.CommandQueue, params: list[Parameter]) -> int:
    """Launches that cast weights, in an iteration that reads these in this order."""
    weight_cache.clear()
    with counted_launches() as names:
        found = products(queue, params)
    assert found == [4.0 * (index + 1) for index in map(value_of, params)]
    return names.count("copy")


def value_of(param: Parameter) -> int:
    return int(param.to_host()[0, 0, 0]) - 1


def test_weights_that_follow_one_another_are_cast_together(queue: cl.CommandQueue) -> None:
    params = parameters(queue, 13)
    with amp.init():
        assert [launched_casts(queue, params[:10]) for _ in range(3)] == [10, 1, 1]
        built = built_programs()
        assert [launched_casts(queue, params) for _ in range(3)] == [1 + 3, 2, 2]
        assert built_programs() == built
        assert [launched_casts(queue, params[2:]) for _ in range(2)] == [11, 2]


def test_few_weights_are_remembered_that_came_first(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache_module, "_MOST", 2)
    params = parameters(queue, 4)
    with amp.init():
        for param in params:
            launched_casts(queue, [param])
            assert len(weight_cache_module._followers) <= 2


def test_a_weight_that_is_passed_over_does_not_come_along_again(queue: cl.CommandQueue) -> None:
    params = parameters(queue, 4)
    with amp.init():
        launched_casts(queue, params)
        assert launched_casts(queue, params[:2]) == 1
        held = weight_cache.nbytes
        assert launched_casts(queue, params[:2]) == 1
        assert weight_cache.nbytes == held - 2 * 32
        assert launched_casts(queue, params) == 3


@pytest.mark.parametrize("again", [True, False], ids=["its address comes again", "it is there"])
def test_only_what_followed_this_weight_comes_along(queue: cl.CommandQueue, again: bool) -> None:
    first, second = params = parameters(queue, 2)
    with amp.init():
        launched_casts(queue, params)
        launched_casts(queue, params)
        assert weight_cache.nbytes == 2 * 32  # a copy that came along is kept once
        if again:
            gone = weakref.ref(parameters(queue, 1)[0])
            assert gone() is None
            weight_cache_module._followers[id(first), "float16"] = [gone, weakref.ref(second)]
        launched_casts(queue, [first])
        assert weight_cache.nbytes == (1 if again else 2) * 32


def test_a_weight_that_changes_after_it_came_along_is_cast_anew(queue: cl.CommandQueue) -> None:
    params = parameters(queue, 3)
    with amp.init():
        launched_casts(queue, params)
        weight_cache.clear()
        assert products(queue, params[:1]) == [4.0]
        params[1].write(np.full((1, 4, 4), 8.0, np.float32))
        other = to_device(queue, np.full((1, 4, 4), 16.0))
        params[2].buffer = other.buffer
        assert products(queue, params[1:]) == [32.0, 64.0]


def test_weights_may_be_gone_or_elsewhere_by_the_next_iteration(queue: cl.CommandQueue) -> None:
    params = parameters(queue, 4)
    with amp.init():
        launched_casts(queue, params)
        del params[1]
        params[1].queue = other = cl.CommandQueue(queue.context)
        assert launched_casts(queue, [params[0], params[2]]) == 1
        other.finish()


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 2), (2, 0, 1)])
def test_a_queue_reads_no_copy_that_another_one_has_yet_to_make(queue: cl.CommandQueue, order: tuple[int, ...]) -> None:
    """Of weights that follow each other on several queues, in one thread, while the first queue is held up."""
    queues = [queue, cl.CommandQueue(queue.context), cl.CommandQueue(queue.context)]
    params = [Parameter.from_host(each, np.ones((1, 4, 4), np.float32)) for each in queues]
    with amp.init():
        for turn in range(3):
            for param in params:
                param.write(np.full((1, 4, 4), 2.0**turn, np.float32))
            weight_cache.clear()
            first = queues[order[0]]
            gate = cl.UserEvent(queue.context)
            cl.enqueue_barrier(first, wait_for=[gate] if turn else [])
            found = [(queues[k], ag.bmm(to_device(queues[k], np.ones((1, 1, 4)), "float16"), params[k])) for k in order]
            read = [out.value.to_host() for on, out in found if on is not first or not turn]
            gate.set_status(cl.command_execution_status.COMPLETE)
            first.finish()
            np.testing.assert_array_equal(read, np.full((len(read), 1, 1, 4), 4.0 * 2.0**turn))


@pytest.mark.parametrize(("product", "leading"), [("matmul_op", ()), ("bmm", (1,))])
def test_a_graph_of_an_earlier_iteration_keeps_its_values(
    queue: cl.CommandQueue, product: str, leading: tuple[int, ...]
) -> None:
    """The gradient for x is the weight that forward has read, whatever came after."""
    first, second = (Parameter.from_host(queue, np.full((*leading, 4, 4), 1 + index, np.float32)) for index in range(2))

    def output(x: Tensor) -> Node:
        multiply = getattr(ag, product)
        return ag.sum(multiply(multiply(ag.tensor(x, requires_grad=True), first), second))

    with amp.init():
        x = to_device(queue, np.ones((*leading, 1, 4)), "float16")
        for _ in range(2):
            weight_cache.clear()
            earlier = output(x)
        for param in (first, second):
            param.write(np.zeros((*leading, 4, 4), np.float32))
        weight_cache.clear()
        output(to_device(queue, np.ones((*leading, 1, 4)), "float16"))
        earlier.backward()
    np.testing.assert_array_equal(to_numpy(x.grad), 4.0 * 4.0 * 1 * 2)


def test_a_small_product_makes_the_copy_that_others_read(queue: cl.CommandQueue) -> None:
    """One cast on a GPU, none on a CPU device; the second product, and backward, find the copy."""
    param = Parameter.from_host(queue, np.full((4, 4), 1 + 2.0**-12, np.float32))
    x = ag.tensor(to_device(queue, np.ones((2, 4)), "float16"), requires_grad=True)
    with amp.init():
        weight_cache.clear()
        with counted_launches() as names:
            results = [ag.matmul_op(x, ag.tensor(param, requires_grad=True)) for _ in range(2)]
            held = weight_cache.known(param, ("cast", "float16"))
            ag.sum(results[0]).backward()
        assert names.count("copy") == (0 if capabilities(queue).is_cpu else 1)
        assert weight_cache.known(param, ("cast", "float16")) is held
    np.testing.assert_array_equal(to_numpy(held), 1.0)
    np.testing.assert_array_equal(to_numpy(results[1].value), 4.0)
    np.testing.assert_array_equal(to_numpy(x.value.grad), 4.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_trains_on_the_weights_of_the_day(queue: cl.CommandQueue, name: str, dtype: str) -> None:
    model = mlp(queue, 8, 33, 5, 4)
    optimizer = OPTIMIZERS[name](model.parameters())
    with amp.init(dtype=dtype, loss_scale=64.0) as handle:
        for index in range(4):
            step(handle, model, optimizer, batch(queue, 16, 8, 4, seed=index))
            x = to_device(queue, np.eye(8))
            with counted_launches() as names, ag.no_grad():
                y = model.layers[0](ag.tensor(x))
            weight, bias = (p.to_host().astype(np.float64) for p in model.parameters()[:2])
            wanted = quantize(weight, dtype).astype(np.float64) + bias
            np.testing.assert_array_equal(to_numpy(y), quantize(wanted.astype(np.float32), dtype).astype(np.float64))
            assert names.count("copy") == (0 if capabilities(queue).is_cpu else 1)


def test_a_cast_is_reported_where_a_copy_is_used(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    params = parameters(queue, 3)
    with amp.init(verbose=True):
        for _ in range(2):
            weight_cache.clear()
            products(queue, params)
            capsys.readouterr()
        weight_cache.clear()
        products(queue, params[:2])
        lines: list[Any] = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "bmm" in line].count("Float->Half (bmm)") >= 2


# ---------------------------------------------------------------------------------------------- dropped


def noting(node: Node, seen: list[int]) -> Node:
    """The node again, which notes how many bytes are kept when its gradient comes."""

    def note(grad: Tensor) -> list[Tensor]:
        seen.append(weight_cache.nbytes)
        return [grad]

    return Node(node.value, note, [node])


@pytest.mark.parametrize("rows", [4, 300], ids=["by a product", "by a cast"])  # that makes the copies
@pytest.mark.parametrize("spelled", ["init", "autocast"])
def test_copies_go_as_soon_as_backward_has_read_them(queue: cl.CommandQueue, spelled: str, rows: int) -> None:
    """Those of a first layer with the forward; none is made twice. Two layers share a weight."""
    first, shared, last = (Parameter.from_host(queue, np.eye(64, dtype=np.float32)) for _ in range(3))
    x = ag.tensor(to_device(queue, np.ones((rows, 64))))
    chain = [first, shared, shared, last]
    copy, seen = 64 * 64 * 2, list[int]()
    # Of a scale that does not move no backward is run again.
    handle = amp.init(enable_caching="last_use" if spelled == "init" else True, loss_scale=1.0)
    with handle, amp.autocast(cache_enabled="last_use" if spelled == "autocast" else None), counted_launches() as names:
        made = x
        for weight in chain:
            made = noting(ag.matmul_op(made, ag.tensor(weight)), seen)
        loss = ag.sum(made)
        assert weight_cache.nbytes == 2 * copy
        scaled_backward(handle, loss, SGD([first, shared, last], lr=0.5))
    assert seen == [2 * copy, copy, copy, 0]
    assert names.count("copy") <= 3


WIDE = 256  # of weights whose copies are worth to be looked after


@pytest.mark.parametrize(
    ("case", "stays"),
    [
        ("plain", False), ("accumulated", False), ("checkpointed", False), ("first step", True), ("retained", True),
        ("of two optimizers", True), ("another loss", True), ("small", True),
    ],
)  # fmt: skip
def test_copies_go_where_no_other_backward_can_follow(queue: cl.CommandQueue, case: str, stays: bool) -> None:
    """With the default: of a graph of weights that one optimizer steps, of which nothing else was made."""
    width = 64 if case == "small" else WIDE
    model = mlp(queue, *[width] * 4)
    params = model.parameters()
    optimizers = [SGD(params, lr=0.5)] if case != "of two optimizers" else [SGD(params[:2]), SGD(params[2:])]
    x, y = batch(queue, 300, width, width)
    seen: list[int] = []

    def error(made: Node) -> Node:
        return ag.mul(ag.mse_loss(made, ag.tensor(y)), LOSS_FACTOR)

    with amp.init(loss_scale=16.0) as handle:
        for _ in range(1 if case == "first step" else 2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for _ in range(2 if case == "accumulated" else 1):
                seen.clear()
                made = ag.tensor(x)
                for layer in model.layers:
                    # run again in backward, it makes something else of what its function holds
                    held = partial(lambda layer, held, x: layer(ag.add(x, held)), layer, made)
                    made = noting(amp.checkpoint(held, made) if case == "checkpointed" else layer(made), seen)
                other = ag.sum(made) if case == "another loss" else None
                with handle.scale_loss(error(made), optimizers) as scaled_loss:
                    scaled_loss.backward(retain_graph=case == "retained")
            for optimizer in optimizers:
                optimizer.step()
            del other, made
    copies = [kept // (2 * width * width) for kept in seen]
    assert copies[0] == 3
    assert (copies[-1] == 3) is stays, copies
    assert stays or copies == sorted(copies, reverse=True)


@pytest.mark.parametrize("on", [lambda: amp.init(enable_caching="last"), lambda: amp.autocast(cache_enabled="always")])
def test_a_word_that_is_none_is_refused(on: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"^(enable_caching|cache_enabled) must be True, False or 'last_use', got '"):
        on()
