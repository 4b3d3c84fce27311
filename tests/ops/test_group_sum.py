"""Sums and maxima over a work-group (kernels/group_sum.clh): every way a device has gives every work-item the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.opencl import device
from clamp.opencl.device import GROUP_SUMS, capabilities
from clamp.ops import norm_rows, softmax
from clamp.ops.reduce import reduce_sum
from clamp.ops.reduce_to_shape import sum_axis
from tests.launches import forget_prepared_launches
from tests.reference import to_device, to_numpy

pytestmark = pytest.mark.kernel

HAS_SUB_GROUPS = "cl_intel_subgroups"


def as_gpu(patch: pytest.MonkeyPatch, queue: cl.CommandQueue, exchange: str) -> None:
    """Lets the device pass for a GPU whose work-items exchange values in this way."""
    other = dataclasses.replace(capabilities(queue), is_cpu=False, exchange=exchange)
    patch.setitem(device._capabilities, queue.device.int_ptr, other)
    forget_prepared_launches(patch)


def by_both(queue: cl.CommandQueue, compute: Callable[[], Tensor]) -> list[np.ndarray]:
    """What a function computes with a tree, and with sums of sub-groups where there are any."""
    results = []
    for exchange in ["TREE", "SUB_GROUPS"] if HAS_SUB_GROUPS in queue.device.extensions else ["TREE"]:
        with pytest.MonkeyPatch.context() as patch:
            as_gpu(patch, queue, exchange)
            results.append(to_numpy(compute()))
    return results


def test_ways_that_a_device_offers_are_right(queue: cl.CommandQueue) -> None:
    ways = ["TREE", "SUB_GROUPS"] if HAS_SUB_GROUPS in queue.device.extensions else ["TREE"]
    for exchange in ways:
        for group in (64,):
            assert device._probe(queue, GROUP_SUMS, group, WG=group, EXCHANGE=exchange), exchange


def test_a_gpu_with_sub_groups_uses_them(queue: cl.CommandQueue) -> None:
    offered = HAS_SUB_GROUPS in queue.device.extensions
    is_nvidia = capabilities(queue).compute_capability > (0, 0)  # it has shuffles in place of them
    assert device._exchange(queue) == ("SHUFFLES" if is_nvidia else "SUB_GROUPS" if offered else "TREE")
    if not is_nvidia:
        assert capabilities(queue).exchange == "TREE"  # of work-groups of one, or a simulator


@pytest.mark.parametrize("n", [3, 40, 2000])
def test_sums_of_sub_groups(queue: cl.CommandQueue, n: int) -> None:
    if HAS_SUB_GROUPS not in queue.device.extensions:
        pytest.skip("no sub-groups")
    rows = np.random.default_rng(n).standard_normal((5, n))
    rows[3, n // 2] = -np.inf
    x, one = to_device(queue, rows), to_device(queue, np.ones(n))
    for compute in (
        lambda: reduce_sum(x, 1, out_dtype="float32"),
        lambda: softmax.softmax(x, out_dtype="float32"),
        lambda: norm_rows.rms_norm(x, one, eps=1e-5, out_dtype="float32")[0],
    ):
        got, expected = by_both(queue, compute)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    rows[2, 0] = np.nan
    got, expected = by_both(queue, lambda: softmax.softmax(to_device(queue, rows), out_dtype="float32"))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 70, 5), (2, 300, 1), (1, 513, 64), (4, 33, 130), (2, 5000, 3)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_over_an_axis(queue: cl.CommandQueue, shape: tuple[int, int, int], dtype: str) -> None:
    x = to_device(queue, np.random.default_rng(0).standard_normal(shape), dtype)
    expected = to_numpy(x).astype(np.float64).sum(1).reshape(-1)
    magnitude = np.abs(to_numpy(x)).astype(np.float64).sum(1).reshape(-1)
    for got in (*by_both(queue, lambda: sum_axis(x, *shape, "float32")), to_numpy(sum_axis(x, *shape, "float32"))):
        assert (np.abs(got - expected) <= 2.0**-24 * 12 * magnitude).all()
