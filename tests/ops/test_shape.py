"""Permutations are numpy's transpose, bit for bit, also of what is no number."""

from __future__ import annotations

import dataclasses
import itertools
from math import prod
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl.device import capabilities
from clamp.ops import shape as ops
from clamp.ops.shape import Axis, copy, merged_axes, permute
from tests.ops.plans import plans_of
from tests.ops.test_concat import bits_of, words
from tests.reference import to_device, to_numpy

pytestmark = pytest.mark.kernel


plan = plans_of(ops)


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((5,), (0,)),
        ((1, 1), (1, 0)),
        ((37, 53), (1, 0)),
        ((64, 48), (1, 0)),
        ((100, 3), (1, 0)),
        ((3, 40, 33), (0, 2, 1)),
        ((2, 16, 48), (2, 0, 1)),
        ((2, 9, 3, 20), (0, 2, 1, 3)),  # heads of attention
        ((2, 3, 4, 35), (0, 2, 3, 1)),  # NCHW to NHWC
        ((2, 3, 4, 5), (3, 2, 1, 0)),
        ((2, 3, 2, 3, 2, 3), (5, 1, 3, 0, 2, 4)),
        ((2, 3, 2, 2, 3, 2, 2), (6, 1, 5, 2, 4, 3, 0)),
        ((2, 3, 2, 2, 3, 2, 2), (5, 1, 4, 2, 3, 0, 6)),
        ((2, 1, 3, 1, 4, 1, 2, 1, 2), (8, 7, 6, 5, 4, 3, 2, 1, 0)),
    ],
)
def test_permute_is_numpys_transpose(
    queue: cl.CommandQueue, shape: tuple[int, ...], dims: tuple[int, ...], dtype: str
) -> None:
    x, host = words(queue, shape, dtype)
    result = permute(x, dims)
    assert result.dtype == dtype
    assert result.shape == host.transpose(dims).shape
    np.testing.assert_array_equal(bits_of(result), host.transpose(dims))


@pytest.mark.parametrize("limit", [64, 128, 1024])
def test_a_transposition_keeps_to_the_devices_work_groups(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    device, kernel, groups = capabilities(queue), ops.TRANSPOSE_LOCAL, []
    small = dataclasses.replace(device, is_cpu=False, max_work_group=limit)
    monkeypatch.setattr(ops, "capabilities", lambda queue: small)

    def launched(
        queue: cl.CommandQueue, size: tuple[int, ...], group: tuple[int, ...], *args: Any, **macros: Any
    ) -> None:
        groups.append(prod(group))
        kernel(queue, size, group, *args, **macros)

    monkeypatch.setattr(ops, "TRANSPOSE_LOCAL", launched)
    x, host = words(queue, (37, 53), "float32")
    np.testing.assert_array_equal(bits_of(permute(x, (1, 0))), host.T)
    assert groups == [min(limit, 256)]


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), pytest.param((3, 2, 17, 2, 18), marks=pytest.mark.slow)])
@pytest.mark.usefixtures("plan")
def test_every_order_of_axes(queue: cl.CommandQueue, shape: tuple[int, ...]) -> None:
    x, host = words(queue, shape, "float16" if len(shape) == 4 else "float32")
    for dims in itertools.permutations(range(len(shape))):
        np.testing.assert_array_equal(bits_of(permute(x, dims)), host.transpose(dims))


@pytest.mark.unsimulated
@pytest.mark.slow
@pytest.mark.usefixtures("plan")
def test_a_large_matrix(queue: cl.CommandQueue) -> None:
    x, host = words(queue, (1031, 2053), "float16")
    np.testing.assert_array_equal(bits_of(permute(x, (1, 0))), host.T)


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize("size", [1, 15, 1009, 20_011])
def test_a_copy_has_its_own_buffer(queue: cl.CommandQueue, simulated: bool, size: int) -> None:
    size = min(size, 2000) if simulated else size
    x = to_device(queue, np.random.default_rng(0).standard_normal(size), "float16")
    y = copy(x)
    assert y.buffer is not x.buffer
    np.testing.assert_array_equal(to_numpy(y), to_numpy(x))


def test_empty_tensors(queue: cl.CommandQueue) -> None:
    assert permute(to_device(queue, np.empty((3, 0, 2))), (2, 0, 1)).shape == (2, 3, 0)


def test_neighbouring_axes_merge() -> None:
    assert merged_axes((2, 3, 4), (0, 1, 2)) == (Axis(24, 1, 1),)
    assert merged_axes((2, 3, 4), (2, 0, 1)) == (Axis(4, 1, 6), Axis(6, 4, 1))
    assert merged_axes((1, 1), (1, 0)) == (Axis(1, 1, 1),)
