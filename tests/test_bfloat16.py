"""``dtype="bfloat16"``: the same API, and no loss scaling, because bfloat16 has the range of float32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node
from tests.networks import batch, loss_of, mlp, scaled_backward, step
from tests.reference import to_device, to_numpy


@pytest.fixture
def handle() -> Iterator[amp.AmpHandle]:
    with amp.init(dtype="bfloat16") as handle:
        yield handle


def test_auto_turns_loss_scaling_off_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with amp.init(dtype="bfloat16") as handle:
        assert handle.loss_scale == 1.0
        assert not handle.scalers[0].is_dynamic
    assert capsys.readouterr() == ("", "")


def test_gradients_are_right_without_scaling_where_float16_needs_it(queue: cl.CommandQueue) -> None:
    """Gradients of 2^-30 vanish in float16 and not in bfloat16."""

    def gradient(dtype: str) -> np.ndarray:
        weight = to_device(queue, np.ones((2, 2)))
        weight.requires_grad = True
        with amp.init(dtype=dtype, loss_scale=1.0 if dtype == "float16" else "auto") as handle:
            hidden = ag.matmul(ag.tensor(to_device(queue, np.ones((2, 2)))), ag.tensor(weight, requires_grad=True))
            loss = ag.mul(ag.sum(hidden), 2.0**-30)
            scaled_backward(handle, loss, SGD([weight], lr=1.0))
        return to_numpy(weight.grad)

    assert gradient("bfloat16").tolist() == [[2.0**-29] * 2] * 2
    assert gradient("float16").tolist() == [[0.0] * 2] * 2


@pytest.mark.parametrize("loss_scale", ["dynamic", 2.0**10])
def test_scaling_can_be_had_all_the_same_and_changes_nothing(queue: cl.CommandQueue, loss_scale: str | float) -> None:
    """Powers of two change no bit of a bfloat16."""

    def losses(loss_scale: str | float, scale: float) -> list[float]:
        model, data = mlp(queue, 8, 16, 4), batch(queue, 8, 8, 4)
        with amp.init(dtype="bfloat16", loss_scale=loss_scale) as handle:
            found = [step(handle, model, SGD(model.parameters(), lr=0.1), data) for _ in range(5)]
            assert handle.loss_scale == scale
        return found

    scaled = losses(loss_scale, 2.0**16 if loss_scale == "dynamic" else 2.0**10)
    assert scaled == losses("auto", 1.0)
    assert scaled[-1] < scaled[0]


def test_every_api_speaks_bfloat16(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    @amp.half_function
    def seen(x: Node) -> str:
        return x.value.dtype

    x = ag.tensor(to_device(queue, np.ones((2, 2))))
    assert ag.matmul(x, x).value.dtype == "bfloat16"
    assert seen(x) == "bfloat16"
    assert amp.get_autocast_dtype() == "bfloat16"
    assert amp.cast(x, "bfloat16").value.dtype == "bfloat16"
    half = amp.cast(x, "float16")
    assert ag.add(half, amp.cast(x, "bfloat16")).value.dtype == "float32"  # neither holds the other
    with handle.disable_casts():
        assert ag.matmul(x, x).value.dtype == "float32"


def test_an_overflow_of_float16_is_none(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 8, 8, 4)
    optimizer = SGD(model.parameters(), lr=1e-12)
    scaled_backward(handle, ag.mul(loss_of(model, data), 2.0**40), optimizer)
    grads = [to_numpy(param.grad) for param in model.parameters()]
    assert max(np.abs(grad).max() for grad in grads) > 65504
    assert all(np.isfinite(grad).all() for grad in grads)
    optimizer.step()
    assert handle.last_step.stepped


def test_what_is_read_are_numbers_not_words(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    values = np.array([[1.0, -2.5], [0.0, 3.0]], np.float32)
    for x in (
        to_device(queue, values, "bfloat16"),
        amp.cast(to_device(queue, values), "bfloat16"),
    ):  # two kinds of memory
        later, event = x.to_host_async()
        if event is not None:
            event.wait()
        for read in (x.to_host(), later):
            assert read.dtype == np.float32
            np.testing.assert_array_equal(read, values)
