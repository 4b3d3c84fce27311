"""Device memory: activations take half, and nothing piles up from step to step."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core import memory
from netcl.optim import SGD

from clamp import amp, bridge
from clamp.bridge import Tensor
from clamp.debug import memory_meter as observed
from clamp.debugging import MemoryMeter
from tests.networks import batch, loss_of, mlp, step
from tests.reference import to_device


def activations(queue: cl.CommandQueue) -> int:
    """Bytes live at the end of the forward of 9 x Linear + ReLU, batch 256."""
    model, data = mlp(queue, *[64] * 10), batch(queue, 256, 64, 64)
    with MemoryMeter() as meter:
        with ag.Tape() as tape:
            loss = loss_of(model, data)
        result = meter.activations
    assert meter.peak >= result
    del tape, loss
    return result


def test_activations_of_an_mlp_take_little_more_than_half(queue: cl.CommandQueue) -> None:
    fp32 = activations(queue)
    assert fp32 >= 10 * 256 * 64 * 4
    for dtype in ("float16", "bfloat16"):
        with amp.init(dtype=dtype):
            assert 10 * 256 * 64 * 2 <= activations(queue) <= 0.55 * fp32


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
