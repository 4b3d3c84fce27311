"""Clipping by norm: of gradients of every magnitude, however many, on the host and on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.core.parameter import Parameter
from netcl.optim import clip

from clamp import amp
from clamp.cli.bench.timing import counted_launches
from tests.reference import to_device

CLIPS = [clip.clip_grad_norm, clip.clip_grad_norm_device]
SIZES = [1, 15, 16, 17, 3000]


def parameters(queue: cl.CommandQueue, magnitudes: list[float], sizes: list[int], dtype: str = "float32") -> list[Any]:
    """Parameters whose gradients have elements of these magnitudes, one after the other."""
    random, params = np.random.default_rng(0), []
    for index, size in enumerate(sizes):
        params.append(Parameter.from_host(queue, np.zeros(size, np.float32)))
        grad = random.uniform(0.5, 1.0, size) * random.choice([-1.0, 1.0], size)
        params[-1].grad = to_device(queue, grad * magnitudes[index % len(magnitudes)], dtype)
    return params


@pytest.mark.parametrize("part", [0.25, 4.0], ids=["clipped", "short enough"])
@pytest.mark.parametrize(
    "magnitudes",
    [[1e-37], [1e-30], [1e-16], [1.0], [1e11], [1e20], [3e38], [1e20, 1e-20], [1e20, 1.0], [1e-3, 1e-30], [1e15, 1.0]],
)
@pytest.mark.parametrize("function", CLIPS, ids=lambda function: function.__name__)
def test_gradients_of_every_magnitude_are_clipped(
    queue: cl.CommandQueue, function: Any, magnitudes: list[float], part: float
) -> None:
    params = parameters(queue, magnitudes, SIZES)
    before = [param.grad.to_host().astype(np.float64) for param in params]
    norm = np.sqrt(sum((grad**2).sum() for grad in before))
    longest = min(part * norm, 3e38)
    with amp.init():
        result = getattr(clip, function.__name__)(params, longest)
    for param, grad in zip(params, before, strict=True):
        np.testing.assert_allclose(param.grad.to_host(), grad * min(1.0, longest / norm), rtol=1e-5, atol=1e-44)
    if function is CLIPS[0]:
        assert isinstance(result, np.float64)
        np.testing.assert_allclose(result, norm, rtol=1e-5)
    elif 1e-35 < norm**2 < 1e38:
        np.testing.assert_allclose(result.to_host(), [norm**2], rtol=1e-5)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("function", CLIPS, ids=lambda function: function.__name__)
def test_what_is_not_finite_does_not_become_finite(queue: cl.CommandQueue, function: Any, value: float) -> None:
    params = parameters(queue, [1.0], [3, 4])
    params[0].grad = to_device(queue, [1.0, value, 2.0])
    with amp.init():
        getattr(clip, function.__name__)(params, 1.0)
    assert not np.isfinite(params[0].grad.to_host()[1])


@pytest.mark.parametrize("what", ["frozen", "without a gradient"])
@pytest.mark.parametrize("function", CLIPS, ids=lambda function: function.__name__)
def test_what_does_not_move_counts_in_no_norm(queue: cl.CommandQueue, function: Any, what: str) -> None:
    params = parameters(queue, [1.0], [3, 4, 5])
    if what == "frozen":
        params[1].requires_grad, params[1]._frozen = False, True
    elif what == "without a gradient":
        params[1].grad = None
    moving = [params[0], params[2]]
    before = [None if param.grad is None else param.grad.to_host().astype(np.float64) for param in params]
    norm = np.sqrt((before[0] ** 2).sum() + (before[2] ** 2).sum())  # type: ignore[operator]
    with amp.init():
        getattr(clip, function.__name__)(params, norm / 2)
    for param, grad in zip(moving, before[::2], strict=True):
        np.testing.assert_allclose(param.grad.to_host(), grad / 2, rtol=1e-5)  # type: ignore[operator]
    if what == "frozen":
        np.testing.assert_array_equal(params[1].grad.to_host(), before[1])


@pytest.mark.parametrize("count", [1, 100, 101])
def test_a_launch_clips_a_hundred_gradients(queue: cl.CommandQueue, count: int) -> None:
    params = parameters(queue, [1.0], [3] * count)
    with amp.init(), counted_launches() as names:
        assert clip.clip_grad_norm(params, 0.5) > 0.5
    launches = -(-count // 100)
    assert names == ["squares"] * launches + ["total"] + ["clip"] * launches


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_16_bits_are_clipped_in_float32(queue: cl.CommandQueue, dtype: str) -> None:
    params = parameters(queue, [1e4], SIZES, dtype)
    with amp.init():
        norm = clip.clip_grad_norm(params, 1.0)
        total = np.sqrt(sum((param.grad.to_host().astype(np.float64) ** 2).sum() for param in params))
    assert norm > 1e5
    np.testing.assert_allclose(total, 1.0, rtol=1e-2)
