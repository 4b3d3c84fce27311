"""unscale_: every gradient times the reciprocal of the scale, exactly; inf and nan found wherever they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.core.device import CPUQueue

from clamp import bridge
from clamp.bridge import Tensor
from clamp.cli.bench.timing import counted_launches
from clamp.opencl.device import capabilities
from clamp.opencl.program import Prepared
from clamp.ops import multi_tensor, slots
from clamp.ops.loss_scale import DeviceState
from clamp.ops.multi_tensor import check_, unscale_
from tests.reference import HALF_DTYPES, STORAGE_DTYPES, quantize, to_device, to_numpy

pytestmark = pytest.mark.kernel

SIZES = [1, 0, 2, 15, 16, 17, 31, 127, 1009, 1023, 1024, 1025, 2048, 4099, 8193]
LARGE_SIZES = [8191, 8192, 65535, 65536, 65537, 200003]  # with 8193, the borders of the tiles of GPUs and CPUs
SCALE = 1000.0  # its reciprocal is not a float32


def make(queue: cl.CommandQueue, sizes: Sequence[int], dtype: str = "float32") -> tuple[list[Any], list[Tensor]]:
    rng = np.random.default_rng(len(sizes))
    arrays = [quantize(rng.standard_normal(size) * 100, dtype) for size in sizes]
    return arrays, [to_device(queue, array, dtype) for array in arrays]


def unscaled(array: Any, scale: float = SCALE) -> Any:
    """What must come out, as float64: a float32 product with the rounded reciprocal."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (array.astype(np.float32) * np.float32(1 / np.float64(np.float32(scale)))).astype(np.float64)


def found_inf(queue: cl.CommandQueue, state: cl.Buffer) -> bool:
    words = np.zeros(8, np.int32)
    cl.enqueue_copy(queue, words, state)
    assert words[1] in (0, 1, 2, 3)
    return bool(words[1])


@pytest.fixture
def state(queue: cl.CommandQueue) -> cl.Buffer:
    return DeviceState(SCALE).buffer(queue)


@pytest.fixture
def launches(queue: cl.CommandQueue) -> Iterator[list[str]]:
    """Names of the kernels launched during the test."""
    with counted_launches() as names:
        yield names


@pytest.mark.parametrize(("dtype", "in_place"), [("float32", True), *((dtype, False) for dtype in STORAGE_DTYPES)])
def test_gradients_are_unscaled_in_place_or_widened_into_their_targets(
    queue: cl.CommandQueue, simulated: bool, state: cl.Buffer, monkeypatch: pytest.MonkeyPatch, dtype: str,
    in_place: bool,
) -> None:  # fmt: skip
    streams = 4 if in_place else 1
    monkeypatch.setattr(slots, "capabilities", lambda queue: replace(capabilities(queue), streams=streams))
    monkeypatch.setattr(multi_tensor, "_plans", Prepared(10))
    arrays, sources = make(queue, SIZES if simulated else SIZES + LARGE_SIZES, dtype)
    targets = sources if in_place else [bridge.empty(queue, source.shape, "float32") for source in sources]
    unscale_(sources, targets, state)
    for array, source, target in zip(arrays, sources, targets, strict=True):
        np.testing.assert_array_equal(to_numpy(target), unscaled(array))
        if not in_place:
            np.testing.assert_array_equal(to_numpy(source), array.astype(np.float64))
    assert not found_inf(queue, state)


def test_dtypes_and_places_may_be_mixed(queue: cl.CommandQueue, state: cl.Buffer) -> None:
    arrays, sources, targets = [], [], []
    for dtype in STORAGE_DTYPES * 2:
        (array,), (source,) = make(queue, [37], dtype)
        in_place = dtype == "float32" and not targets
        arrays.append(array)
        sources.append(source)
        targets.append(source if in_place else bridge.empty(queue, source.shape, "float32"))
    unscale_(sources, targets, state)
    for array, target in zip(arrays, targets, strict=True):
        np.testing.assert_array_equal(to_numpy(target), unscaled(array))


def test_nothing_to_unscale_launches_nothing(queue: cl.CommandQueue, state: cl.Buffer, launches: list[str]) -> None:
    unscale_([], [], state)
    _, empty = make(queue, [0, 0])
    unscale_(empty, empty, state)
    assert launches == []


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_one_bad_element_is_found_anywhere(queue: cl.CommandQueue, dtype: str, bad: float) -> None:
    sizes = [1, 16, 17, 33, 113, 1030]
    for index, size in enumerate(sizes):
        for position in {0, size // 2, size - 1}:
            arrays, _ = make(queue, sizes, dtype)
            arrays[index][position] = bad
            sources = [to_device(queue, array, dtype) for array in arrays]
            targets = [bridge.empty(queue, source.shape, "float32") for source in sources]
            state = DeviceState(SCALE).buffer(queue)
            unscale_(sources, targets, state)
            assert found_inf(queue, state), f"element {position} of {size}"
            # The others are all done, the bad one too.
            for array, target in zip(arrays, targets, strict=True):
                np.testing.assert_array_equal(to_numpy(target), unscaled(array))


@pytest.mark.parametrize(
    ("scale", "value", "overflows"), [(1.0, np.finfo(np.float32).max, False), (2.0**-10, 1e36, True)]
)
def test_overflow_by_unscaling_is_found_and_the_largest_finite_value_is_none(
    queue: cl.CommandQueue, scale: float, value: float, overflows: bool
) -> None:
    state = DeviceState(scale).buffer(queue)
    tensor = to_device(queue, np.full(35, value) * np.resize([1, -1], 35))
    unscale_([tensor], [tensor], state)
    assert found_inf(queue, state) == overflows
    np.testing.assert_array_equal(np.isinf(to_numpy(tensor)), overflows)


def test_the_flag_stays_once_set(queue: cl.CommandQueue, state: cl.Buffer) -> None:
    for values in ([np.nan], [1.0]):
        tensor = to_device(queue, np.array(values))
        unscale_([tensor], [tensor], state)
    assert found_inf(queue, state)


@pytest.mark.parametrize("count", [1, 99, 100, 101, 250])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_a_hundred_tensors_a_launch(
    queue: cl.CommandQueue, simulated: bool, state: cl.Buffer, launches: list[str], count: int, dtype: str
) -> None:
    arrays, sources = make(queue, [1 + index % 5 for index in range(count)], dtype)
    widened = [bridge.empty(queue, source.shape, "float32") for source in sources]
    targets = sources if dtype == "float32" else widened
    unscale_(sources, targets, state)
    # The simulator takes 1024 bytes of arguments, so 60 pairs of tensors.
    width = 60 if simulated and targets is widened else 100
    assert launches == ["unscale"] * -(-count // width)
    for array, target in zip(arrays, targets, strict=True):
        np.testing.assert_array_equal(to_numpy(target), unscaled(array))


def test_shared_storage_is_unscaled_once(queue: cl.CommandQueue, state: cl.Buffer) -> None:
    (array, other), (tensor, second) = make(queue, [12, 5])
    view = bridge.view(tensor, (3, 4))
    pooled = bridge.zeros(queue, (7,), "float32")
    pooled.write(np.full(7, 3.0, np.float32))
    tensors = [tensor, second, view, bridge.view(pooled, (7, 1)), tensor, pooled]
    unscale_(tensors, tensors, state)
    np.testing.assert_array_equal(to_numpy(tensor), unscaled(array))
    np.testing.assert_array_equal(to_numpy(second), unscaled(other))
    np.testing.assert_array_equal(to_numpy(pooled), unscaled(np.full(7, 3.0)))


def test_a_view_as_target_is_in_place(queue: cl.CommandQueue, state: cl.Buffer, launches: list[str]) -> None:
    (array,), (tensor,) = make(queue, [12])
    unscale_([bridge.view(tensor, (4, 3))], [bridge.view(tensor, (4, 3))], state)
    np.testing.assert_array_equal(to_numpy(tensor), unscaled(array))
    assert launches == ["unscale"]


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_one_source_may_have_two_targets(queue: cl.CommandQueue, state: cl.Buffer, dtype: str) -> None:
    (array,), (source,) = make(queue, [21], dtype)
    targets = [bridge.empty(queue, source.shape, "float32") for _ in range(2)]
    unscale_([source, source], targets, state)
    for target in targets:
        np.testing.assert_array_equal(to_numpy(target), unscaled(array))


def refuse(
    error: type[Exception], message: str, sources: list[Tensor], targets: list[Tensor], state: cl.Buffer
) -> None:
    before = [to_numpy(tensor) for tensor in sources + targets]
    with pytest.raises(error, match=message):
        unscale_(sources, targets, state)
    for tensor, values in zip(sources + targets, before, strict=True):
        np.testing.assert_array_equal(to_numpy(tensor), values)


def test_errors_change_nothing(queue: cl.CommandQueue, state: cl.Buffer) -> None:
    _, (a, b, c) = make(queue, [4, 4, 4])
    _, (half,) = make(queue, [4], "float16")
    integers = Tensor.from_host(queue, np.arange(4, dtype=np.int32), dtype="int32")
    refuse(ValueError, "1 sources and 2 targets", [a], [a, b], state)
    refuse(TypeError, r"sources\[1\] is int32", [a, integers], [a, b], state)
    refuse(TypeError, r"targets\[1\] is float16", [a, half], [a, half], state)
    refuse(
        ValueError, r"sources\[1\] has shape \(4,\), its target \(2, 2\)", [a, b], [a, bridge.view(b, (2, 2))], state
    )
    refuse(ValueError, "same target", [a, b], [c, c], state)
    refuse(ValueError, "same target", [c, b], [c, c], state)
    refuse(ValueError, "target of another", [a, b], [b, c], state)
    other = cl.CommandQueue(queue.context, queue.device)
    refuse(ValueError, "different queues", [a, to_device(other, np.ones(4))], [a, b], state)
    assert not found_inf(queue, state)


def test_numpy_backend_is_refused(queue: cl.CommandQueue, state: cl.Buffer) -> None:
    tensor = Tensor.from_host(CPUQueue(), np.ones(3, np.float32))
    refuse(TypeError, "numpy backend", [tensor], [tensor], state)


def test_tile_tables_are_built_once_and_bounded(queue: cl.CommandQueue, state: cl.Buffer) -> None:
    _, tensors = make(queue, [3, 5])
    unscale_(tensors, tensors, state)
    before = slots._tile_table.cache_info()
    unscale_(tensors, tensors, state)
    check_(tensors, state)  # the same tiles, in another kernel
    after = slots._tile_table.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)
    assert after.maxsize is not None


@pytest.mark.parametrize(
    ("values", "found"), [([1.0], 0), ([np.inf], 1), ([-np.inf], 1), ([np.nan], 2), ([np.inf, np.nan], 3)]
)
@pytest.mark.parametrize("place", [0, 5, 64])
def test_inf_and_nan_are_told_apart(queue: cl.CommandQueue, values: list[float], found: int, place: int) -> None:
    array = np.ones(100, np.float32)
    array[place : place + len(values)] = values
    words = np.zeros(8, np.int32)
    for looks in (check_, lambda tensors, state: unscale_(tensors, tensors, state)):
        state = DeviceState(SCALE).buffer(queue)
        looks([to_device(queue, array)], state)
        cl.enqueue_copy(queue, words, state)
        assert words[1] == found


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_another_scale_may_divide(queue: cl.CommandQueue, state: cl.Buffer, dtype: str) -> None:
    other = DeviceState(8.0).buffer(queue)
    source, target = to_device(queue, [16.0, np.inf], dtype), bridge.zeros(queue, (2,), "float32")
    unscale_([source], [target], state, other)
    np.testing.assert_array_equal(target.to_host(), [2.0, np.inf])
    assert found_inf(queue, state)
    assert not found_inf(queue, other)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_check_finds_inf_and_nan_and_changes_nothing(
    queue: cl.CommandQueue, state: cl.Buffer, launches: list[str], value: float
) -> None:
    arrays, tensors = make(queue, SIZES)
    check_(tensors, state)
    assert not found_inf(queue, state)
    assert launches == ["unscale"]
    for index in (0, 8, len(SIZES) - 1):
        flag = DeviceState(SCALE).buffer(queue)
        arrays[index][-1] = value
        sick = to_device(queue, arrays[index])
        check_([*tensors[:index], sick, *tensors[index + 1 :]], flag)
        assert found_inf(queue, flag)
        np.testing.assert_array_equal(to_numpy(sick), arrays[index].astype(np.float64))
    check_([], state)
    with pytest.raises(TypeError, match="int32"):
        check_([Tensor.from_host(queue, np.ones(1, np.int32), dtype="int32")], state)
    assert not found_inf(queue, state)


def test_a_check_of_many_tensors_takes_a_launch_for_a_hundred(
    queue: cl.CommandQueue, state: cl.Buffer, launches: list[str]
) -> None:
    _, tensors = make(queue, [3] * 101)
    check_(tensors, state)
    assert launches.count("unscale") == 2
