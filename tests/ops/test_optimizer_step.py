"""A step over many parameters in one launch: each rule against float64, copies against `cast`, any number and size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp import bridge
from clamp.bridge import Tensor
from clamp.cli.bench.timing import counted_launches
from clamp.opencl.device import capabilities
from clamp.opencl.program import Prepared
from clamp.ops import optimizer_step, slots
from clamp.ops.cast import cast
from clamp.ops.optimizer_step import PARTS, Copy, MultiUpdate, cast_all, mixed
from clamp.ops.slots import in_turn, slots_for
from tests.reference import HALF_DTYPES, SPECIAL, quantize, to_device, to_numpy, ulp

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
def test_a_launch_takes_up_to_a_hundred_tensors(queue: cl.CommandQueue, count: int) -> None:
    params = on_device(queue, [np.full(1 + index % 3, index, np.float32) for index in range(count)])
    launches = MultiUpdate("sgd", 2, params, [], [None] * count)
    with counted_launches() as names:
        in_turn(launches.pieces(typed(1.0, 0.0), params))
    assert names == ["update"] * -(-count // slots_for(queue, 100, 2, 40))
    assert all(not to_numpy(param).any() for param in params)  # p - 1 * p


# -------------- 16-bit parameters without float32 masters: how they are split, put together and stepped, against numpy.


IN_PARTS = [keeps for keeps, count in PARTS.items() if count]

#: special values; either side of where binades, ties and subnormal numbers of each dtype begin; all magnitudes
_EDGES = np.array(
    [2.0**-14, 2.0**-15, 2.0**-17, 2.0**-24, 2.0**-25, 1.0, 1 + 2.0**-11, 1 + 2.0**-8, 65504.0], np.float32
)
_NEAR = [np.nextafter(_EDGES, np.float32(0)), _EDGES, np.nextafter(_EDGES, np.float32(np.inf))]
_RANDOM = np.random.default_rng(5)
VALUES = np.concatenate([
    SPECIAL, *_NEAR, *(-near for near in _NEAR),
    (_RANDOM.standard_normal(700) * 10.0 ** _RANDOM.uniform(-9, 4, 700)).astype(np.float32),
    np.array([3.4e38, -3.4e38, 1e-40, 1e-44], np.float32),
])  # fmt: skip


def parts_of(queue: cl.CommandQueue, sizes: list[int], dtype: str, keeps: str) -> list[Copy]:
    """Parts of parameters of these sizes, with nothing in them yet."""
    two = PARTS[keeps] == 2
    return [
        Copy(to_device(queue, np.ones(n), dtype), keeps, to_device(queue, np.ones(n), "bfloat16") if two else None, i)
        for i, n in enumerate(sizes)
    ]


def split(queue: cl.CommandQueue, hosts: list[Host], parts: list[Copy]) -> None:
    in_turn(MultiUpdate("none", 0, on_device(queue, hosts), [], parts).pieces())


def joined(queue: cl.CommandQueue, parts: list[Copy]) -> list[Host]:
    whole = on_device(queue, [np.zeros(x.tensor.size, np.float32) for x in parts])
    in_turn(MultiUpdate("join", 0, whole, [], parts).pieces())
    return [x.to_host() if x.size else np.empty(0, np.float32) for x in whole]


def bits_of(parts: list[Copy]) -> list[bytes]:
    return [bridge.read_bytes(x).tobytes() for part in parts for x in (part.tensor, part.rest) if x is not None]


def held(values: Host, dtype: str, keeps: str) -> tuple[Host, Host]:
    """What parts hold of float32 values, in float64, and by how much that may be wrong."""
    exact, near = values.astype(np.float64), quantize(values, dtype).astype(np.float64)
    with np.errstate(invalid="ignore"):
        over = np.where(np.isfinite(near), np.abs(exact - near), 0)
    if keeps == "stochastic":
        return near, np.zeros_like(exact)
    if keeps == "kahan":
        return np.where(np.isinf(near), near, exact), 2.0**-8 * over + 2.0**-24 * np.abs(exact) + 2.0**-133
    if dtype == "bfloat16":
        return exact, np.zeros_like(exact)
    # A multiple of 2^-40 always is one where float32 has no finer numbers.
    return np.where(np.isinf(near), near, np.round(exact * 2.0**40) / 2.0**40), np.where(
        np.abs(exact) < 2.0**-17, 2.0**-40, 0
    )


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("keeps", IN_PARTS)
def test_parts_hold_what_they_say_and_are_the_same_again(queue: cl.CommandQueue, keeps: str, dtype: str) -> None:
    hosts = [VALUES, *drawn(SIZES, 1)[0]]
    parts = parts_of(queue, [host.size for host in hosts], dtype, keeps)
    split(queue, hosts, parts)
    whole, bits = joined(queue, parts), bits_of(parts)
    for host, got, part in zip(hosts, whole, parts, strict=True):
        want, allowed = held(host, dtype, keeps)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        with np.errstate(invalid="ignore"):
            assert (same | (np.abs(got - want) <= allowed)).all()
            # The parameter itself is a nearest number; of a tie, either.
            error = np.abs(to_numpy(part.tensor) - got.astype(np.float64))
            is_near = (error <= ulp(got, dtype) / 2) | ~np.isfinite(to_numpy(part.tensor))
        assert is_near.all()
        finite = np.isfinite(got)
        np.testing.assert_array_equal(np.signbit(got[finite & (got != 0)]), np.signbit(host[finite & (got != 0)]))
    split(queue, whole, parts)
    assert bits_of(parts) == bits, "what is put together and split again has the same parts"


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("keeps", ["kahan", "remainder"])
@pytest.mark.parametrize("rule", ["sgd", "nesterov", "adamw"])
def test_a_step_is_that_of_float32_on_what_the_parts_hold(
    queue: cl.CommandQueue, rule: str, keeps: str, dtype: str
) -> None:
    name, _, rows, numbers = RULES[rule]
    hosts = drawn(SIZES, 2 + rows)
    stepped, expected = (parts_of(queue, SIZES, dtype, keeps) for _ in range(2))
    split(queue, hosts[0], stepped)
    states: list[Any] = []
    for params, copies in ((joined(queue, stepped), [None] * len(SIZES)), (hosts[0], stepped)):
        tensors, grads, *state = (on_device(queue, row) for row in (params, *hosts[1:]))
        buffers = [[x.buffer for x in row] for row in state]
        launches = MultiUpdate(name, len(numbers), tensors, buffers, copies)
        in_turn(launches.pieces(typed(*numbers), grads))
        states.append([to_numpy(x) for row in state for x in row])
        if copies[0] is None:
            split(queue, [x.to_host() if x.size else np.empty(0, np.float32) for x in tensors], expected)
    assert bits_of(stepped) == bits_of(expected)
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


def chance_of(size: int, key: int, turn: int) -> npt.NDArray[np.uint32]:
    """The random bits of a step, as the kernel draws them."""
    x = np.arange(size, dtype=np.uint32) + np.uint32(key)
    x ^= x >> np.uint32(17)
    x *= np.uint32(0xED5AD4BB)
    x ^= x >> np.uint32(11)
    x ^= np.uint32(turn)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    return np.asarray(x ^ (x >> np.uint32(14)))


def rounded_by_chance(values: Host, dtype: str, random: npt.NDArray[np.uint32]) -> Host:
    """Each value as one of its two neighbours, as the bits say; to nearest where that would be inf."""
    size = ulp(values, dtype)
    ulps = np.abs(values.astype(np.float64)) / size
    below, bits = np.floor(ulps), 16 if dtype == "bfloat16" else 24
    chance = (random >> np.uint32(32 - bits)) / 2.0**bits
    # bfloat16 carries: up where the fraction and the bits come to 1. float16 compares.
    up = chance + (ulps - below) >= 1 if dtype == "bfloat16" else chance < ulps - below
    result = np.copysign((below + up) * size, values)
    largest = float(np.finfo(np.float16).max) if dtype == "float16" else 3.3895313892515355e38
    return np.where(np.abs(result) <= largest, result, quantize(values, dtype).astype(np.float64))


def stepped_by_chance(queue: cl.CommandQueue, values: Host, dtype: str, key: int, turn: int) -> Host:
    """float32 values as steps round them to: from 0, by a gradient of their negatives."""
    parts = [Copy(to_device(queue, np.zeros(values.size), dtype), "stochastic", None, key)]
    launches = MultiUpdate("sgd", 2, on_device(queue, [values]), [], parts)
    in_turn(launches.pieces(typed(1.0, 0.0), on_device(queue, [-values]), turn))
    return to_numpy(parts[0].tensor)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("key", "turn"), [(0, 0), (mixed(3, 4), mixed(17))])
def test_chance_depends_on_key_turn_and_place_alone(queue: cl.CommandQueue, key: int, turn: int, dtype: str) -> None:
    nans = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF] * 13, np.uint32).view(np.float32)  # NVIDIA's has all bits
    values = np.concatenate([VALUES[np.abs(np.nan_to_num(VALUES, posinf=0, neginf=0)) > 1e-37], nans])
    values = values.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = rounded_by_chance(values, dtype, chance_of(values.size, key, turn))
    got = stepped_by_chance(queue, values, dtype, key, turn)
    np.testing.assert_array_equal(got, np.where(np.isfinite(values), expected, values))


def test_random_bits_are_uniform() -> None:
    """Each four neighbouring bits, of elements of a step and of steps of an element; others are drawn for others."""
    size = 1 << 16
    of_elements = chance_of(size, mixed(0, 1), mixed(1))
    of_steps = np.array([chance_of(1, mixed(0, 1), mixed(turn))[0] for turn in range(size)])
    for random in (of_elements, of_steps):
        for shift in range(0, 32, 4):
            counts = np.bincount((random >> np.uint32(shift)) & np.uint32(15), minlength=16)
            assert ((counts - size / 16) ** 2 / (size / 16)).sum() < 37.7  # chi-square of 15, exceeded once in 1000
    for other in (chance_of(size, mixed(0, 2), mixed(1)), chance_of(size, mixed(0, 1), mixed(2))):
        assert abs(np.corrcoef(of_elements.astype(float), other.astype(float))[0, 1]) < 5 / np.sqrt(size)


#: as shares of the way from one number to the next
_SHARES = (0.032, 0.25, 0.5, 0.9)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("base", [1.0, -0.75, 0.0])
def test_the_mean_of_many_roundings_is_the_number(queue: cl.CommandQueue, base: float, dtype: str) -> None:
    """0.0: of numbers below the smallest that is not subnormal in float16."""
    count = 100_000 if queue.device.platform.name != "Oclgrind" else 1000
    for share in _SHARES:
        unit = 2.0**-24 if base == 0 else float(ulp(np.array([base]), dtype)[0])
        value = np.float32((base + np.copysign(share, base) * unit) if base else (5 + share) * unit)
        unit = float(ulp(np.array([value]), dtype)[0])
        got = stepped_by_chance(queue, np.full(count, value, np.float32), dtype, mixed(0, 0), mixed(1))
        assert set(got) <= {np.floor(value / unit) * unit, np.ceil(value / unit) * unit}
        error = abs(got.mean() - float(value))
        assert error <= 5 * unit * np.sqrt(share * (1 - share) / count) + 2.0**-24 * abs(value)
        if count == 100_000:
            assert error < 3e-5
