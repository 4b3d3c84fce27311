"""A step over many parameters in one launch: each rule against float64, copies against `cast`, any number and size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Prepared
from clamp.ops import optimizer_step, slots
from clamp.ops.cast import cast
from clamp.ops.optimizer_step import Copy, MultiUpdate, cast_all
from clamp.ops.slots import in_turn, slots_for
from tests.reference import HALF_DTYPES, SPECIAL, to_device, to_numpy

pytestmark = pytest.mark.kernel

Host = npt.NDArray[Any]

SIZES = [1, 0, 2, 15, 16, 17, 127, 1009, 1023, 1025, 2063]
LR, DECAY, MOMENTUM, BETA1, BETA2, EPS = 0.0625, 0.013, 0.9, 0.9, 0.999, 1e-8
CORRECTIONS = 1 - BETA1**3, 1 - BETA2**3


def sgd(p: Host, g: Host) -> tuple[Host, ...]:
    return (p - LR * (g + DECAY * p),)


def sgd_momentum(p: Host, g: Host, velocity: Host) -> tuple[Host, ...]:
    velocity = MOMENTUM * velocity + g + DECAY * p
    return p - LR * velocity, velocity


def nesterov(p: Host, g: Host, velocity: Host) -> tuple[Host, ...]:
    g = g + DECAY * p
    velocity = MOMENTUM * velocity + g
    return p - LR * (g + MOMENTUM * velocity), velocity


def adam(p: Host, g: Host, first: Host, second: Host) -> tuple[Host, ...]:
    return adams(p, g + DECAY * p, first, second)


def adamw(p: Host, g: Host, first: Host, second: Host) -> tuple[Host, ...]:
    return adams(p - LR * DECAY * p, g, first, second)


def adams(p: Host, g: Host, first: Host, second: Host) -> tuple[Host, ...]:
    first, second = BETA1 * first + (1 - BETA1) * g, BETA2 * second + (1 - BETA2) * g * g
    update = first / CORRECTIONS[0] / (np.sqrt(second / CORRECTIONS[1]) + EPS)
    return p - LR * update, first, second


ADAMS = (LR, DECAY, BETA1, BETA2, EPS, *CORRECTIONS)
#: rule, reference, how many tensors of state, numbers
RULES: dict[str, tuple[str, Callable[..., tuple[Host, ...]], int, tuple[float, ...]]] = {
    "sgd": ("sgd", sgd, 0, (LR, DECAY)),
    "sgd with momentum": ("sgd_momentum", sgd_momentum, 1, (LR, DECAY, MOMENTUM)),
    "momentum": ("momentum", sgd_momentum, 1, (LR, DECAY, MOMENTUM, 0)),
    "nesterov": ("momentum", nesterov, 1, (LR, DECAY, MOMENTUM, 1)),
    "adam": ("adam", adam, 2, ADAMS),
    "adamw": ("adamw", adamw, 2, ADAMS),
}


def drawn(sizes: list[int], rows: int) -> list[list[Host]]:
    """As many arrays of each size as there are rows, by row; those of the last are not negative."""
    rng = np.random.default_rng(0)
    arrays = [[rng.standard_normal(size).astype(np.float32) for size in sizes] for _ in range(rows)]
    return [*arrays[:-1], [np.abs(array) for array in arrays[-1]]]


def typed(*numbers: float) -> list[np.generic]:
    return [np.int32(number) if isinstance(number, int) else np.float32(number) for number in numbers]


def on_device(queue: cl.CommandQueue, arrays: list[Host]) -> list[Tensor]:
    return [to_device(queue, array) for array in arrays]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_computes_what_it_says(queue: cl.CommandQueue, rule: str) -> None:
    name, reference, rows, numbers = RULES[rule]
    hosts = drawn(SIZES, 2 + rows)
    params, grads, *state = (on_device(queue, row) for row in hosts)
    states = [[x.buffer for x in row] for row in state]
    in_turn(MultiUpdate(name, len(numbers), params, states, [None] * len(SIZES)).pieces(typed(*numbers), grads))
    for index in range(len(SIZES)):
        want = reference(*(row[index].astype(np.float64) for row in hosts))
        for tensor, expected in zip((row[index] for row in (params, *state)), want, strict=True):
            np.testing.assert_allclose(to_numpy(tensor), expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(to_numpy(grads[index]), hosts[1][index])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_copies_have_the_bits_of_a_cast(queue: cl.CommandQueue, dtype: str) -> None:
    """Of mixed parameters, some of which have a copy of either dtype; the others are as without copies."""
    other = HALF_DTYPES[dtype == HALF_DTYPES[0]]
    hosts = drawn(SIZES, 2)
    params, grads = (on_device(queue, row) for row in hosts)
    plain = on_device(queue, hosts[0])
    dtypes = [(dtype, None, other)[index % 3] for index in range(len(SIZES))]
    copies = [
        kind and Copy(to_device(queue, np.ones(size), kind), ("copy", "rounded")[size % 2 == 0])
        for kind, size in zip(dtypes, SIZES, strict=True)
    ]
    in_turn(MultiUpdate("sgd", 2, plain, [], [None] * len(SIZES)).pieces(typed(LR, DECAY), grads))
    in_turn(MultiUpdate("sgd", 2, params, [], copies).pieces(typed(LR, DECAY), grads))
    for param, same, copy in zip(params, plain, copies, strict=True):
        if copy is not None:
            np.testing.assert_array_equal(to_numpy(copy.tensor), to_numpy(cast(same, str(copy.tensor.dtype))))
        expected = copy.tensor if copy is not None and copy.keeps == "rounded" else same
        np.testing.assert_array_equal(to_numpy(param), to_numpy(expected))


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_many_tensors_are_cast_as_one_is(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, dtype: str, streams: int
) -> None:
    monkeypatch.setattr(slots, "capabilities", lambda queue: replace(capabilities(queue), streams=streams))
    monkeypatch.setattr(optimizer_step, "_casts", Prepared(10))
    tensors = on_device(queue, [SPECIAL, *drawn(SIZES, 1)[0], np.tile(SPECIAL, 50)])
    copies = cast_all(tensors, dtype)
    assert [(x.shape, x.dtype) for x in copies] == [(x.shape, dtype) for x in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        np.testing.assert_array_equal(to_numpy(copy), to_numpy(cast(tensor, dtype)))


def test_nothing_is_cast_without_elements(queue: cl.CommandQueue) -> None:
    assert cast_all([], "float16") == []
    (empty,) = cast_all([Tensor.from_shape(queue, (0, 3))], "float16")
    assert empty.shape == (0, 3)


@pytest.mark.parametrize("count", [9, 10, 11, 100, 101, 230])
def test_a_launch_takes_up_to_a_hundred_tensors(
    queue: cl.CommandQueue, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = on_device(queue, [np.full(1 + index % 3, index, np.float32) for index in range(count)])
    launches = MultiUpdate("sgd", 2, params, [], [None] * count)
    call, names = cl.Kernel.__call__, []

    def counted(kernel: cl.Kernel, *args: Any, **kwargs: Any) -> Any:
        names.append(kernel.function_name)
        return call(kernel, *args, **kwargs)

    monkeypatch.setattr(cl.Kernel, "__call__", counted)
    in_turn(launches.pieces(typed(1.0, 0.0), params))
    assert names == ["update"] * -(-count // slots_for(queue, 100, 2, 40))
    monkeypatch.undo()
    assert all(not to_numpy(param).any() for param in params)  # p - 1 * p
