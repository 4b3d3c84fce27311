"""Device memory: activations take half, nothing piles up; what every byte is held for, now and at the peak."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core import memory
from netcl.core.memory import PersistentBufferPool
from netcl.nn.layers import Conv2d, Flatten, Linear, ReLU, Sequential
from netcl.nn.modern import DecoderBlock
from netcl.optim import SGD, Adam, AdamW

from clamp import amp, bridge
from clamp.bridge import Tensor
from clamp.debug import memory_meter as observed
from clamp.debug.memory_report import MemoryReport, cures
from clamp.debugging import MemoryMeter
from clamp.ops.cast import cast
from clamp.params.parts import KEEPS, MasterInParts
from clamp.params.weight_cache import weight_cache
from tests.faults.training import Case
from tests.networks import batch, loss_of, mlp, step, stepping
from tests.reference import to_device

CASES = [
    Case("mlp", False, "float16", "O1"),
    Case("mlp", False, "bfloat16", "O2"),
    Case("mlp", True, "float16", "O1"),
    Case("cnn", False, "float16", "O1"),
    Case("cnn", True, "bfloat16", "O2"),
    Case("decoder", False, "bfloat16", "O1"),
]


class Training:
    """A network that learns; ``step()`` trains it once."""

    def __init__(self, queue: cl.CommandQueue, case: Case) -> None:
        rng = np.random.default_rng(1)
        shape, outputs = (8, 8), (8, 4)
        if case.network == "mlp":
            self.model: Any = mlp(queue, 8, 16, 4)
        elif case.network == "cnn":
            layers = [Conv2d(queue, 2, 4, 3, pad=1), ReLU(), Conv2d(queue, 4, 4, 3, pad=1), ReLU(), Flatten()]
            self.model, shape = Sequential(*layers, Linear(queue, 4 * 16, 4)), (8, 2, 4, 4)
        else:
            self.model = DecoderBlock(8, 2, hidden=6, queue=queue)
            shape = outputs = (2, 4, 8)
        make = {"mlp": Adam, "cnn": partial(SGD, momentum=0.9), "decoder": AdamW}
        self.optimizer: Any = make[case.network](self.model.parameters(), lr=0.01)
        self.data = tuple(to_device(queue, rng.standard_normal(x).astype(np.float32)) for x in (shape, outputs))
        if case.level == "O2":
            amp.decorate(self.model, self.optimizer, level="O2", dtype=case.dtype)
        self.handle = amp.init(dtype=case.dtype, level=case.level, loss_scale=2.0**10)
        train = stepping(self.handle, self.model, self.optimizer)
        self._train = amp.record(train) if case.recorded else train

    def step(self) -> None:
        self._train(*self.data)


def sizes(tensors: list[Tensor]) -> int:
    """Bytes of tensors, each counted once."""
    return sum(bridge.nbytes(x) for x in {id(x): x for x in tensors}.values())


def taken() -> int:
    """What all pools have made, by their own count, netcl's and those of recordings."""
    pools = bridge.instances_of(PersistentBufferPool)
    return sum(pool.stats.bytes_allocated if pool._use_svm else pool._owned_bytes for pool in pools)


@pytest.fixture
def own_queue(queue: cl.CommandQueue) -> cl.CommandQueue:
    """A queue with pools of its own: what others hold, and what their pools keep free, stays as it is meanwhile."""
    gc.collect()  # what the test before has left is garbage now
    return cl.CommandQueue(queue.context, queue.device)


def more(after: MemoryReport, before: MemoryReport) -> dict[str, int]:
    return {kind: after.now[kind] - before.now[kind] for kind in after.now}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.long
def test_every_byte_is_held_for_something(own_queue: cl.CommandQueue, case: Case) -> None:
    made, start = taken(), amp.init(enabled=False).memory()
    train = Training(own_queue, case)
    try:
        for _ in range(4 if case.recorded else 2):  # what is recorded runs, is recorded, is replayed
            train.step()
        with ag.Tape() as tape:  # a forward that has not been back
            graph = train.model(ag.tensor(train.data[0]))
        gc.collect()
        found, made = more(train.handle.memory(), start), taken() - made
        # What earlier tests have let go of is among what is free, and set aside: only pools know it.
        held = bridge.held_memory() | {where: size for where, (size, _) in bridge.free_memory().items()}
        assert sum(found.values()) == sum(held.values()) - sum(start.now.values())
        trained = list(train.optimizer.params)
        params = list(train.model.parameters())
        assert found["weights"] + found["masters"] == sizes([*params, *trained])
        assert found["masters"] == sizes([x for x in trained if all(x is not y for y in params)])
        assert found["gradients"] == sizes([x.grad for x in (*params, *trained) if x.grad is not None])
        moments = 1 if case.network == "cnn" else 2  # momentum's velocity; Adam's
        assert found["optimizer state"] >= moments * sum(4 * x.size for x in trained)
        assert found["activations"] >= bridge.nbytes(graph.value)
        assert found["copies"] >= sizes([x for x in weight_cache.values if isinstance(x, Tensor)])
        assert (found["recordings"] > 0) == case.recorded
        # All of it together is what pools have made, and what lies outside: parameters, state, inputs and tables.
        outside = [x for x in bridge.instances_of(Tensor) if x.buffer is not None and x.pool_handle is None]
        assert sum(found.values()) - made <= sizes(outside) + found["optimizer state"] + 4096
        del graph, tape
    finally:
        train.handle.shutdown()


@pytest.mark.parametrize("keeps", [keeps for keeps in KEEPS if keeps is not False])
@pytest.mark.long
def test_masters_in_parts_are_counted_as_they_are(own_queue: cl.CommandQueue, keeps: bool | str) -> None:
    """And stay in parts: nothing is put together to be looked at."""
    start = amp.init(enabled=False).memory()
    model = mlp(own_queue, 64, 64, 64)
    model, optimizer = amp.decorate(model, SGD(model.parameters()), dtype="bfloat16", master_weight=keeps)
    with amp.init(dtype="bfloat16", level="O2") as handle:
        data = tuple(to_device(own_queue, np.ones((4, 64), np.float32)) for _ in "xy")
        stepping(handle, model, optimizer)(*data)
        halves = sum(bridge.nbytes(x) for x in model.parameters())
        for found in (handle.memory(), handle.memory(lambda: stepping(handle, model, optimizer)(*data))):
            beside = {True: 2, "remainder": 1, "kahan": 1, "stochastic": 0}[keeps]
            kinds = more(found, start)
            assert (kinds["weights"], kinds["masters"]) == (halves, beside * halves)
            assert [x for x in optimizer.params if isinstance(x, MasterInParts) and x.is_whole] == []


class _Pools:
    """The bytes of pools that are in use, counted beside clamp, and the most."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def taken(self, handle: Any, nbytes: int) -> None:
        self.held += handle.bucket_size
        self.most = max(self.most, self.held)

    def given_back(self, handle: Any) -> None:
        self.held -= handle.bucket_size


@pytest.mark.parametrize("case", [case for case in CASES if not case.recorded], ids=str)
@pytest.mark.long
def test_the_peak_is_the_most_that_pools_had_given_out(own_queue: cl.CommandQueue, case: Case) -> None:
    train, pools = Training(own_queue, case), _Pools()
    try:
        train.step()
        train.optimizer.zero_grad()
        gc.collect()

        def step() -> None:
            pools.most = pools.held
            train.step()

        train.handle.memory(step)  # makes what a scale keeps on its queue, of no pool
        bridge.listen_to_pools(pools)
        before = train.handle.memory()
        found = train.handle.memory(step)
        assert found.peak.held - before.held == pools.most
        assert sum(holder.bytes for holder in found.holders) == found.peak.held
        assert max(moment.held for moment in found.timeline) == found.peak.held
        assert found.peak.bytes["activations"] > 0
        assert found.now == before.now, "the step was put back"
        assert [x for x in train.model.parameters() if x.grad is not None] == []
    finally:
        bridge.stop_listening_to_pools(pools)
        train.handle.shutdown()
    assert not hasattr(PersistentBufferPool.allocate, "__wrapped__")


def test_who_holds_the_peak_is_named_by_op_layer_and_line(queue: cl.CommandQueue) -> None:
    train = Training(queue, CASES[0])
    try:
        found = train.handle.memory(lambda: train.step())
        held = {(x.kind, x.op, x.module) for x in found.holders}
        assert {("activations", "linear_relu", "layers.0"), ("copies", "linear_relu", "layers.0")} <= held
        assert ("weights", "before the step", "") in held
        assert all(x.line.startswith("networks.py:") for x in found.holders if x.op != "before the step")
        said = str(found)
        assert f"the peak is in {found.peak.where}" in said
        assert "activations kept for backward" in said
        for wrong in ("step", train.step()):
            with pytest.raises(TypeError, match="takes a function"):
                train.handle.memory(wrong or 3)
        with pytest.raises(ValueError, match="no op of this step"):
            train.handle.memory(lambda: None)
    finally:
        train.handle.shutdown()


def test_a_handle_that_does_nothing_counts_as_well(queue: cl.CommandQueue) -> None:
    handle = amp.init(enabled=False)
    before = handle.memory(lambda: None)
    kept = to_device(queue, np.ones((1 << 10, 1 << 8), np.float32))
    assert more(handle.memory(), before)["other tensors"] == bridge.nbytes(kept) == 2**20


# ---------------------------------------------------------------------------------------------- where it is short


def allocation(queue: cl.CommandQueue) -> None:
    """More than any device has."""
    bridge.empty(queue, (1 << 42,), "float32")


def netcls_allocation(queue: cl.CommandQueue) -> None:
    Tensor.from_shape(queue, (1 << 42,))


def refused(queue: cl.CommandQueue, kind: type[cl.Error], code: int) -> None:
    """A launch that the driver refuses."""

    def fail(*args: Any) -> None:
        raise kind(cl._cl._ErrorRecord("no", code, "enqueue"))

    x = to_device(queue, np.ones((2, 3), np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cl.Kernel, "__call__", fail)
        cast(x, "bfloat16")


def launch(queue: cl.CommandQueue) -> None:
    """As on devices whose drivers take memory when a kernel first uses it."""
    refused(queue, cl.MemoryError, cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE)


@pytest.mark.parametrize("fails", [allocation, netcls_allocation, launch])
@pytest.mark.long
def test_where_memory_is_short_the_error_says_what_holds_it(
    own_queue: cl.CommandQueue, fails: Callable[[cl.CommandQueue], None]
) -> None:
    train = Training(own_queue, CASES[0])
    try:
        with ag.Tape():
            kept = train.model(ag.tensor(train.data[0]))
            with pytest.raises(amp.OutOfMemoryError) as raised:
                fails(own_queue)
        assert kept.value.dtype == "float16"
    finally:
        train.handle.shutdown()
    error = raised.value
    assert isinstance(error, cl.MemoryError)
    assert isinstance(error, cl.RuntimeError)
    assert isinstance(error.__cause__, cl.Error)
    assert str(error).startswith(str(error.__cause__))
    assert error.code == error.__cause__.code < 0
    for words in ("activations kept for backward", "16-bit copies"):
        assert words in str(error)
    assert "handle.memory(step)" not in str(error)
    assert memory.cl is cl


def test_what_to_switch_on_is_said_where_it_saves_much() -> None:
    kinds = ("activations", "workspaces", "copies", "weights", "gradients", "optimizer state", "free")
    said = " ".join(what for what, _ in cures(dict.fromkeys(kinds, 1000)))
    for words in ("amp.checkpoint(block, x)", "enable_caching=", "amp.optim.Adam8bit", "get_persistent_pool"):
        assert words in said
    assert cures({**dict.fromkeys(kinds, 0), "activations": 1, "gradients": 1000}) == []


def test_other_errors_of_drivers_stay_what_they_are(queue: cl.CommandQueue) -> None:
    with amp.init(), pytest.raises(cl.LogicError) as raised:
        refused(queue, cl.LogicError, cl.status_code.INVALID_KERNEL_ARGS)
    assert type(raised.value) is cl.LogicError


# ---------------------------------------------------------------------------------------------- how much


def test_the_meter_counts_a_buffer_once(queue: cl.CommandQueue) -> None:
    original = Tensor.__init__
    with MemoryMeter() as meter:
        tensor = to_device(queue, [[1.0, 2.0], [3.0, 4.0]])
        shown = ag.reshape(ag.tensor(tensor), (4,))
        assert meter.live == 16
        del tensor, shown
        assert meter.live == 0
        assert meter.peak == 16
    assert Tensor.__init__ is original


@pytest.fixture
def max_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """As in a process in which nobody has asked."""
    gc.collect()  # what tests before have left would go in the middle, and be missed
    for name in ("allocate", "release"):
        monkeypatch.setattr(memory.PersistentBufferPool, name, getattr(memory.PersistentBufferPool, name))
    monkeypatch.setattr(observed, "_pool_peak", bridge.PoolPeak())
    return amp.max_memory


def test_the_most_memory_is_what_was_held_at_a_time_since_the_reset(
    queue: cl.CommandQueue, max_memory: Callable[..., int]
) -> None:
    mib = 1 << 20

    def tensors(count: int) -> list[Tensor]:
        return [bridge.empty(queue, (mib // 4,), "float32") for _ in range(count)]

    with amp.init():
        first = tensors(3)
        assert max_memory(reset=True) >= 3 * mib  # what was taken before anybody asked
        start = max_memory()
        assert start >= 3 * mib
        del first
        assert max_memory(reset=True) == start
        start = max_memory()
        held = tensors(2)
        del held
        gc.collect()
        assert max_memory() - start == 2 * mib
        held = tensors(1)
        assert max_memory() - start == 2 * mib, "less is held than before"
        assert max_memory(reset=True) - start == 2 * mib
        assert max_memory() - start == mib
        del held


def test_a_forward_in_16_bits_holds_less(queue: cl.CommandQueue, max_memory: Callable[..., int]) -> None:
    def most(dtype: str) -> int:
        model, data = mlp(queue, *[256] * 6), batch(queue, 2048, 256, 256)
        with amp.init(dtype=dtype), ag.Tape():
            gc.collect()
            max_memory(reset=True)
            before = max_memory()
            loss_of(model, data)
            return max_memory() - before

    assert 0 < most("float16") < 0.7 * most("float32")


def test_training_leaves_memory_flat(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 16, 32, 8), batch(queue, 8, 16, 8)
    optimizer = SGD(model.parameters(), lr=1e-3)
    with amp.init() as handle, MemoryMeter() as meter:
        for _ in range(3):
            step(handle, model, optimizer, data)
        optimizer.zero_grad()
        early = meter.live
        for _ in range(50):
            step(handle, model, optimizer, data)
        optimizer.zero_grad()
        assert meter.live == early
        assert meter.peak > early
