"""Device memory: activations take half, and nothing piles up from step to step."""

from __future__ import annotations

import pyopencl as cl
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Tensor
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
    with MemoryMeter() as meter:
        tensor = to_device(queue, [[1.0, 2.0], [3.0, 4.0]])
        shown = ag.reshape(ag.tensor(tensor), (4,))
        assert meter.live == 16
        del tensor, shown
        assert meter.live == 0
        assert meter.peak == 16
    assert Tensor.__init__ is meter._original


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
