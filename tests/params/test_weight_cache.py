"""The weight cache: one cast per parameter until the parameter changes, however it changes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core import transfer
from netcl.core.tensor import reshape
from netcl.core.transfer import write_tensor
from netcl.nn.layers import Linear
from netcl.ops import elementwise
from netcl.ops.indexing import as_index_tensor, index_add
from netcl.optim import SGD, Adam, AdamW, Momentum, RMSProp
from netcl.optim.ema import ModelEMA

from clamp import amp
from clamp.bridge import Parameter, Tensor
from clamp.casting import policies
from clamp.opencl.device import capabilities
from clamp.params import weight_cache as weight_cache_module
from clamp.params.weight_cache import WeightCache, weight_cache
from tests.networks import scaled_backward
from tests.reference import to_device, to_numpy


def test_a_value_is_made_once_and_dies_with_its_tensor(queue: cl.CommandQueue) -> None:
    cache, tensor, made = WeightCache(), Parameter.from_host(queue, np.ones(3, np.float32)), []

    def make(source: object) -> str:
        made.append(1)
        return "value"

    assert cache.get(tensor, "kind", make) == cache.get(tensor, "kind", make) == "value"
    assert made == [1]
    cache.get(tensor, "other kind", make)
    assert made == [1, 1]
    cache.drop(tensor)
    cache.get(tensor, "kind", make)
    assert made == [1, 1, 1]
    tensor.buffer = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 12)
    cache.get(tensor, "kind", make)
    assert made == [1, 1, 1, 1]
    del tensor
    gc.collect()
    assert len(cache) == 0


def output(weight: Parameter) -> float:
    x = ag.tensor(to_device(weight.queue, np.ones((1, 4))))
    with ag.no_grad():
        return float(to_numpy(ag.matmul_op(x, ag.tensor(weight, requires_grad=True)))[0, 0])


def _take_buffer(param: Parameter, other: Tensor) -> None:
    param.buffer, param.of = other.buffer, other  # whose memory another tensor gets, where pools keep it


def _layer_of(weight: Parameter) -> Linear:
    layer = Linear(weight.queue, 4, 4, bias=False)
    layer.weight = weight
    return layer


WRITES: dict[str, Callable[[Parameter], object]] = {
    "Tensor.write": lambda p: p.write(np.full((4, 4), 2.0, np.float32)),
    "write_tensor": lambda p: write_tensor(p, np.full((4, 4), 2.0, np.float32)),
    "transfer.fill": lambda p: transfer.fill(p.queue, p.buffer, np.float32(2.0), 0, 64),
    "transfer.copy": lambda p: transfer.copy(p.queue, p.buffer, to_device(p.queue, np.full((4, 4), 2.0)).buffer, 64),
    "transfer.copy by keyword": lambda p: transfer.copy(
        p.queue, dst=p.buffer, src=to_device(p.queue, np.full((4, 4), 2.0)).buffer, byte_count=64
    ),
    "load_state_dict": lambda p: _layer_of(p).load_state_dict({"weight": np.full((4, 4), 2.0, np.float32)}),
    "out=": lambda p: elementwise.elementwise_scalar(p, 2.0, "MUL", out=p),
    "elementwise_binary": lambda p: elementwise.elementwise_binary(p, p, "ADD(v0, v1)", out=p),
    "index_add": lambda p: index_add(p, 0, as_index_tensor([0, 1, 2, 3], p.queue), to_device(p.queue, np.ones((4, 4)))),
    "a replaced buffer": lambda p: _take_buffer(p, to_device(p.queue, np.full((4, 4), 2.0))),
}


def test_tensors_may_die_while_a_write_looks_for_its_entries(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking compares buffers, which allocates, which may collect garbage, and entries end with their tensors."""
    values = WeightCache()
    tensors = [Parameter.from_host(queue, np.ones(3, np.float32)) for _ in range(4)]
    for tensor in tensors:
        values.get(tensor, "kind", lambda _: "value")
    compare = weight_cache_module._shares_memory

    def compare_as_others_die(ours: object, written: object) -> bool:
        del tensors[1:-1]
        gc.collect()
        return compare(ours, written)

    monkeypatch.setattr(weight_cache_module, "_shares_memory", compare_as_others_die)
    del tensor
    values.drop_buffer(tensors[0].buffer)
    assert len(values) == 1
    assert values.get(tensors[-1], "kind", lambda _: "made anew") == "value"


@pytest.fixture
def weight(queue: cl.CommandQueue) -> Parameter:
    return Parameter.from_host(queue, np.ones((4, 4), np.float32))


@pytest.mark.parametrize("write", WRITES)
def test_a_write_ends_the_entry(weight: Parameter, handle: amp.AmpHandle, write: str) -> None:
    assert output(weight) == 4.0
    assert len(weight_cache) == 1
    WRITES[write](weight)
    assert output(weight) == 8.0


def test_a_write_to_a_part_or_to_the_whole_ends_the_others_entry(queue: cl.CommandQueue) -> None:
    whole = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 1 << 14)
    parts = [whole.get_sub_region(start, 1 << 12) for start in (0, 1 << 13)]
    elsewhere = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 1 << 12)
    for held, written, ends in ((parts[0], whole, True), (whole, parts[1], True), (whole, elsewhere, False)):
        values = WeightCache()
        tensor = Parameter(held, (4, 4), "float32", queue.context, queue)
        values.get(tensor, "kind", lambda _: "value")
        values.drop_buffer(written)
        assert len(values) == (not ends)


@pytest.mark.parametrize("make", [SGD, Adam, AdamW, Momentum, RMSProp])
def test_an_optimizer_step_ends_the_entry(
    queue: cl.CommandQueue, weight: Parameter, handle: amp.AmpHandle, make: Callable[..., object]
) -> None:
    optimizer = make([weight], lr=0.5)
    weight.grad = to_device(queue, np.ones((4, 4)))
    assert output(weight) == 4.0
    optimizer.step()  # type: ignore[attr-defined]
    expected = float(weight.to_host().astype(np.float16).astype(np.float64)[:, 0].sum())
    assert output(weight) == pytest.approx(expected, rel=1e-3)
    assert expected != 4.0


def test_clear_cache_is_for_kernels_of_the_users_own(
    queue: cl.CommandQueue, weight: Parameter, handle: amp.AmpHandle
) -> None:
    output(weight)
    cl.enqueue_copy(queue, weight.buffer, np.full(16, 2.0, np.float32))
    assert output(weight) == 4.0, "a raw write is invisible"
    handle.clear_cache()
    assert output(weight) == 8.0


def test_a_step_after_an_evaluation_reads_what_was_written_unseen(
    queue: cl.CommandQueue, handle: amp.AmpHandle
) -> None:
    x = ag.tensor(to_device(queue, np.ones((1, 4))))
    params = [Parameter.from_host(queue, np.ones((4, 4), np.float32)) for _ in range(2)]
    for weight in params:
        output(weight)
        cl.enqueue_copy(queue, weight.buffer, np.full(16, 2.0, np.float32))
    for _ in range(2):
        for weight in params:
            assert to_numpy(ag.matmul_op(x, ag.tensor(weight, requires_grad=True)).value)[0, 0] == 8.0
    assert len(weight_cache) == 2, "copies of a step are kept"
    assert output(params[0]) == 8.0
    assert len(weight_cache) == 2, "an evaluation uses them"


def test_regions_and_scale_loss_empty_it(queue: cl.CommandQueue, weight: Parameter, handle: amp.AmpHandle) -> None:
    with amp.autocast():
        with amp.autocast():
            output(weight)
        assert len(weight_cache) == 1
    assert len(weight_cache) == 0
    x = ag.tensor(to_device(queue, np.ones((1, 4))))
    loss = ag.sum(ag.matmul_op(x, ag.tensor(weight, requires_grad=True)))
    scaled_backward(handle, loss, SGD([weight]))
    assert len(weight_cache) == 0


def test_caching_can_be_turned_off(weight: Parameter) -> None:
    with amp.init(enable_caching=False):
        output(weight)
        assert len(weight_cache) == 0


def test_eval_then_train_gives_the_weight_its_gradient(queue: cl.CommandQueue, weight: Parameter) -> None:
    x = ag.tensor(to_device(queue, np.ones((1, 4))))
    with amp.init(loss_scale=1024.0) as handle:
        output(weight)
        loss = ag.sum(ag.matmul_op(x, ag.tensor(weight, requires_grad=True)))
        scaled_backward(handle, loss, SGD([weight]))
    np.testing.assert_array_equal(weight.grad.to_host(), np.ones((4, 4)))


def test_what_pays_off_only_in_a_loop_is_kept_from_the_second_use(queue: cl.CommandQueue) -> None:
    cache, tensor, made = WeightCache(), Parameter.from_host(queue, np.ones(3, np.float32)), []

    def packed() -> object:
        def make(_: object) -> object:
            return made.append(1) or "value"

        return cache.get(tensor, "panels", make) if cache.asked_before(tensor, "panels") else make(tensor)

    for _ in range(4):
        assert packed() == "value"
    assert len(made) == 2
    cache.clear()
    packed()
    assert len(made) == 3


def test_a_weight_in_a_loop_is_packed_once_and_again_after_a_write(weight: Parameter, handle: amp.AmpHandle) -> None:
    assert [output(weight) for _ in range(4)] == [4.0] * 4
    weight.write(np.full((4, 4), 2.0, np.float32))
    assert [output(weight) for _ in range(4)] == [8.0] * 4


def test_a_value_that_is_kept_weakly_goes_with_whoever_holds_it(queue: cl.CommandQueue) -> None:
    cache, tensor = WeightCache(), Parameter.from_host(queue, np.ones(3, np.float32))
    copy = cache.get(tensor, "copy", lambda _: to_device(queue, np.ones(3), "float16"), weakly=True)
    assert cache.known(tensor, "copy") is copy
    del copy
    assert cache.known(tensor, "copy") is None


def test_the_bytes_of_all_that_is_kept_are_counted(queue: cl.CommandQueue) -> None:
    cache, tensor = WeightCache(), Parameter.from_host(queue, np.ones(3, np.float32))
    cache.get(tensor, "copy", lambda _: to_device(queue, np.ones(3), "float16"))
    cache.get(tensor, "panels", lambda _: SimpleNamespace(nbytes=100))
    cache.get(tensor, "verdict", lambda _: True)
    assert cache.nbytes == 6 + 100


def test_averaged_weights_are_read_and_left_again(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    layer = Linear(queue, 4, 4, bias=False)
    layer.weight.write(np.ones((4, 4), np.float32))
    average = ModelEMA(layer, decay=0.5)
    layer.weight.write(np.full((4, 4), 3.0, np.float32))
    average.update()
    assert output(layer.weight) == 12.0
    with average.averaged():
        inside = float(layer.weight.to_host()[0].sum())
        assert inside != 12.0
        assert output(layer.weight) == pytest.approx(inside, rel=1e-3)
    assert output(layer.weight) == 12.0


def test_a_step_ends_what_was_derived_from_views(
    queue: cl.CommandQueue, weight: Parameter, handle: amp.AmpHandle
) -> None:
    shown = reshape(weight, (4, 4))
    optimizer = SGD([weight], lr=1.0)
    assert output(shown) == 4.0
    weight.grad = to_device(queue, np.full((4, 4), -1.0))
    optimizer.step()
    assert output(shown) == 8.0


def test_a_region_without_cache_casts_anew_for_users(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    weight = Parameter.from_host(queue, np.ones(16, np.float32))

    @amp.half_function
    def first(x: object) -> float:
        return float(to_numpy(x.value)[0])  # type: ignore[attr-defined]

    with amp.autocast(cache_enabled=False):
        for value, cast in ((1.0, lambda x: x), (2.0, lambda x: amp.cast(x, "float16"))):
            cl.enqueue_copy(queue, weight.buffer, np.full(16, value, np.float32))
            assert first(cast(ag.tensor(weight))) == value
            cl.enqueue_copy(queue, weight.buffer, np.full(16, value + 8, np.float32))
            assert first(cast(ag.tensor(weight))) == value + 8


def test_a_cast_where_nobody_hears_of_a_step_is_of_the_weight_after_it(queue: cl.CommandQueue) -> None:
    weight = Parameter.from_host(queue, np.ones(16, np.float32))
    weight.grad = to_device(queue, np.ones(16))
    for value in (1.0, 0.0):
        np.testing.assert_array_equal(to_numpy(amp.cast(ag.tensor(weight), "float16").value), value)
        SGD([weight], lr=1.0).step()


#: Ways to read a float32 tensor that is no weight in 16 bits, or the other way round.
READ: dict[str, Callable[[Any], Any]] = {
    "a tensor cast": lambda x: amp.cast(x, "float16"),
    "a leaf cast": lambda x: amp.cast(ag.tensor(x), "float16").value,
    "a leaf that is trained": lambda x: amp.cast(ag.tensor(x, requires_grad=True), "float16").value,
    "an argument": lambda x: amp.half_function(lambda node: node.value)(ag.tensor(x)),
    "an argument beside a float32 one": lambda x: amp.float_function(lambda x: x)(amp.cast(x, "bfloat16")),
    "an op": lambda x: ag.matmul_op(ag.tensor(x), ag.tensor(Parameter.from_host(x.queue, np.eye(4, dtype="f")))).value,
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_what_is_no_weight_is_read_anew_at_every_use(
    queue: cl.CommandQueue, handle: amp.AmpHandle, read: Callable[[Any], Any]
) -> None:
    """By a kernel of the user's, which tells nobody, a batch gets other numbers in the same memory."""
    x = to_device(queue, np.ones((1, 4)))
    for value in (1.0, 2.0, 3.0):
        cl.enqueue_copy(queue, x.buffer, np.full((1, 4), value, np.float32))
        np.testing.assert_array_equal(to_numpy(read(x)), np.full((1, 4), value))
    assert not any(weight_cache.known(x, ("cast", dtype)) for dtype in ("float16", "bfloat16", "float32"))


@pytest.mark.parametrize("shape", [(8, 2), [8, 2]])
def test_another_shape_ends_the_entry(queue: cl.CommandQueue, handle: amp.AmpHandle, shape: Any) -> None:
    values = np.arange(16, dtype=np.float32)
    weight = Parameter.from_host(queue, values.reshape(4, 4))
    for rows in (4, 8):
        for _ in range(3):  # with panels that are kept from the second use on
            x = ag.tensor(to_device(queue, np.ones((1, rows))))
            out = ag.matmul_op(x, ag.tensor(weight, requires_grad=True))
            np.testing.assert_array_equal(to_numpy(out.value)[0], values.reshape(rows, -1).sum(0))
        weight.shape = shape


def test_another_dtype_ends_the_entry(queue: cl.CommandQueue) -> None:
    cache, weight = WeightCache(), Parameter.from_host(queue, np.ones(4, np.float32))
    assert cache.get(weight, "kind", lambda p: p.dtype) == "float32"
    weight.dtype = "float16"
    assert cache.get(weight, "kind", lambda p: p.dtype) == "float16"
    assert cache.get(weight, "kind", lambda p: "made anew") == "float16"
    assert len(cache) == 1


#: what another thread does to a weight between the launch that makes a copy of it and the moment when that is kept
OVERTAKING: dict[str, Callable[[Parameter], object]] = {
    "a step": lambda weight: SGD([weight], lr=0.5).step(),
    "a write": lambda weight: write_tensor(weight, np.full((4, 4), 0.5, np.float32)),
    "a write to its buffer": lambda weight: elementwise.elementwise_binary(
        weight, weight, expression="MUL(v0, 0.5f)", out=weight
    ),
}


@pytest.mark.parametrize("name", OVERTAKING)
def test_a_copy_that_another_threads_write_has_overtaken_is_not_kept(
    queue: cl.CommandQueue, weight: Parameter, handle: amp.AmpHandle, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    weight.grad = to_device(queue, np.ones((4, 4)))
    own = policies.WeightOperand.was_made

    def overtaken(operand: Any, copy: Any) -> None:
        monkeypatch.setattr(policies.WeightOperand, "was_made", own)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(OVERTAKING[name], weight).result()
        own(operand, copy)

    monkeypatch.setattr(policies.WeightOperand, "was_made", overtaken)
    assert output(weight) == 4.0
    assert output(weight) == (2.0 if capabilities(queue).is_cpu else 4.0)  # a GPU casts ahead
