"""Attention, its gradients and decoding against numpy's float64, with both plans on every device."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops import attention as package
from clamp.ops.attention import attention, attention_backward, attention_decode, problem, tiled
from clamp.ops.attention.matrix_units import MMA
from tests.reference import HALF_DTYPES, assert_close, assert_same, quantize, to_device, to_numpy
from tests.sweep import sweep

pytestmark = pytest.mark.kernel

EPS = 2.0**-24
SHAPES = [(1, 1, 1, 1), (2, 3, 37, 7), (1, 2, 64, 64), (1, 1, 131, 33), (2, 1, 65, 130)]
SMALL = [(1, 1, 1, 1), (1, 1, 35, 5)]  # for the simulator
#: by how much of itself a weight is rounded
_ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "two parts": 2.0**-16}


@pytest.fixture(autouse=True)
def small_work_groups(queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulator tiles of 32, so that few positions already fill several."""
    if simulated:
        small = dataclasses.replace(capabilities(queue), max_work_group=64)
        monkeypatch.setattr(problem, "capabilities", lambda queue: small)


@pytest.fixture(params=["own plan", "other plan", "narrow registers"])
def plan(
    request: pytest.FixtureRequest, queue: cl.CommandQueue, small_work_groups: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The device's own kind of plan, the other, and that of a CPU with 16 registers of 8 floats."""
    own = problem.capabilities(queue)
    is_cpu = request.param == "narrow registers" or own.is_cpu is (request.param == "own plan")
    width = 8 if request.param == "narrow registers" else 16
    chosen = dataclasses.replace(own, is_cpu=is_cpu, float_vector_width=width)
    for module in (problem, package):
        monkeypatch.setattr(module, "capabilities", lambda queue: chosen)
    return str(request.param)


class Reference:
    """Attention in float64, with the sums of magnitudes that bound the rounding errors of fp32 arithmetic."""

    def __init__(self, q: Any, k: Any, v: Any, causal: bool, scale: float) -> None:
        self.q, self.k, self.v, self.scale = q, k, v, scale
        length = q.shape[2]
        seen = np.tri(length, dtype=bool) if causal else np.ones((length, k.shape[2]), bool)
        scores = np.where(seen, q @ _t(k) * scale, -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        self.p = weights / total
        self.out = self.p @ v
        self.lse = (top + np.log(total))[..., 0]
        # An exponential's relative error is its argument's absolute error.
        magnitude = np.abs(scale) * (np.abs(q) @ _t(np.abs(k))).max()
        self.rel = EPS * (16 + length + q.shape[3] * (1 + magnitude))
        self.out_slack = self.rel * (self.p @ np.abs(v))
        self.lse_slack = EPS * (16 + length + 2 * q.shape[3] * magnitude)

    def gradients(self, g: Any) -> list[tuple[Any, Any]]:
        """(gradient, slack) of q, k and v."""
        slopes = g @ _t(self.v)
        ds = self.p * (slopes - (self.p * slopes).sum(-1, keepdims=True)) * self.scale
        size = np.abs(g) @ _t(np.abs(self.v))
        ds_size = self.p * (size + (self.p * size).sum(-1, keepdims=True)) * abs(self.scale)
        return [
            (ds @ self.k, self.rel * (ds_size @ np.abs(self.k))),
            (_t(ds) @ self.q, self.rel * (_t(ds_size) @ np.abs(self.q))),
            (_t(self.p) @ g, self.rel * (_t(self.p) @ np.abs(g))),
        ]


def _t(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)


def rounded(dtype: str) -> type[Reference]:
    """Attention in float64, whose slacks allow for weights, and slopes of scores, that are rounded to a type."""

    class Rounded(Reference):
        def __init__(self, q: Any, k: Any, v: Any, causal: bool, scale: float) -> None:
            super().__init__(*(x.astype(np.float64) for x in (q, k, v)), causal, scale)  # type: ignore[call-arg]
            self.out_slack = self.out_slack + _ULP[dtype] * (self.p @ np.abs(self.v))

        def gradients(self, g: Any) -> list[tuple[Any, Any]]:
            slopes = g @ _t(self.v)
            ds = np.abs(self.p * (slopes - (self.p * slopes).sum(-1, keepdims=True)) * self.scale)
            rounding = (ds @ np.abs(self.k), _t(ds) @ np.abs(self.q), _t(self.p) @ np.abs(g))
            found = super().gradients(g.astype(np.float64))
            return [(x, slack + _ULP[dtype] * more) for (x, slack), more in zip(found, rounding, strict=True)]

    return Rounded


def normal(queue: cl.CommandQueue, seed: int, shape: tuple[int, ...], *dtypes: str) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [to_device(queue, rng.standard_normal(shape), dtype) for dtype in dtypes]


def computed(
    tensors: list[Tensor], causal: bool = False, scale: float | None = None, out_dtype: str = "float32",
    grad_dtypes: tuple[str, str, str] = ("float32",) * 3,
) -> list[Tensor]:  # fmt: skip
    """Result, logarithms of the sums, and the gradients of q, k and v for a gradient of the result."""
    q, k, v, g = tensors
    out, lse = attention(q, k, v, causal, scale, out_dtype=out_dtype)
    return [out, lse, *attention_backward(q, k, v, lse, g, causal, scale, out_dtypes=grad_dtypes)]


def check(
    tensors: list[Tensor], causal: bool, scale: float | None, out_dtype: str, grad_dtypes: tuple[str, str, str],
    reference: type[Reference] | None = None,
) -> None:  # fmt: skip
    q, k, v, g = tensors
    if reference is None:  # NVIDIA's matrix units round weights and slopes
        reference = rounded(q.dtype) if q.dtype in HALF_DTYPES and MMA.verified_plans(q.queue) else Reference
    out, lse, *grads = computed(tensors, causal, scale, out_dtype, grad_dtypes)
    used = q.shape[3] ** -0.5 if scale is None else scale
    expected = reference(to_numpy(q), to_numpy(k), to_numpy(v), causal, used)
    assert_close(out, expected.out, slack=expected.out_slack)
    assert_close(lse, expected.lse, slack=expected.lse_slack)
    for grad, (want, slack) in zip(grads, expected.gradients(to_numpy(g)), strict=True):
        assert_close(grad, want, slack=slack)


@pytest.mark.parametrize("causal", [False, True])
def test_shapes(queue: cl.CommandQueue, simulated: bool, plan: str, causal: bool) -> None:
    for seed, shape in enumerate(SMALL if simulated else SHAPES):
        check(normal(queue, seed, shape, *["float16"] * 4), causal, None, "float16", ("float32",) * 3)


@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
@pytest.mark.parametrize(
    ("dtypes", "out", "grads"),
    sweep(
        [
            (("float16", "float32", "bfloat16", "float32"), "float32", ("float16", "float32", "bfloat16")),
            (("float32", "float32", "float32", "float32"), "float32", ("float32", "float32", "float32")),
            (("bfloat16", "bfloat16", "bfloat16", "bfloat16"), "bfloat16", ("bfloat16", "float32", "bfloat16")),
        ]
    ),
)
def test_storage_types(
    queue: cl.CommandQueue, plan: str, dtypes: tuple[str, ...], out: str, grads: tuple[str, str, str]
) -> None:
    check(normal(queue, 3, (1, 1, 18, 5), *dtypes), True, -0.3, out, grads)


@pytest.mark.unsimulated  # work-items share heads on CPU devices
def test_many_heads_share_work_items(queue: cl.CommandQueue) -> None:
    check(normal(queue, 4, (3, 50, 3, 4), *["float32"] * 4), True, None, "float32", ("float32",) * 3)


@pytest.mark.unsimulated
@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "width"),
    # each side of the tiles' edges in both, at small and large extents of the other
    [(1, 300), (2, 1), (8, 64), (9, 2), (31, 31), (32, 97), (33, 3), (33, 128), (127, 5), (128, 32), (129, 16),
     (129, 48), (257, 1), (257, 33), (31, 256), (1, 1)],
)  # fmt: skip
def test_every_shape(queue: cl.CommandQueue, plan: str, length: int, width: int) -> None:
    for causal in (False, True):
        tensors = normal(queue, length, (1, 2, length, width), *["float32"] * 4)
        check(tensors, causal, None, "float32", ("float32",) * 3)


@pytest.mark.simulated_elsewhere
def test_the_same_input_gives_the_same_bits(queue: cl.CommandQueue, simulated: bool, plan: str) -> None:
    tensors = normal(queue, 5, (1, 1, 20 if simulated else 200, 8), *["float16"] * 4)
    assert_same(*(map(to_numpy, computed(tensors, True, out_dtype="float16")) for _ in range(2)))


@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.simulated_elsewhere
def test_large_scores(queue: cl.CommandQueue, plan: str, dtype: str) -> None:
    # Scores of +-65504 times 1, 2 and -1: the weights are exactly 0 and 1, or halves where two scores are equal.
    q, k, v = np.full((1, 1, 4, 1), 65504.0), np.array([1.0, 2.0, -1.0, 2.0]), np.array([3.0, 5.0, 7.0, 9.0])
    tensors = [to_device(queue, x.reshape(1, 1, 4, 1), dtype) for x in (q, k, v, v)]
    out, lse, *grads = computed(tensors, True, 1.0, dtype)
    np.testing.assert_array_equal(to_numpy(out).ravel(), [3, 5, 5, 7])
    np.testing.assert_allclose(to_numpy(lse).ravel(), [65504, 131008, 131008, 131008 + np.log(2)], rtol=1e-7)
    assert all(np.isfinite(to_numpy(grad)).all() for grad in grads)


@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
@pytest.mark.simulated_elsewhere
def test_rows_of_nothing_but_minus_infinity_and_nans(queue: cl.CommandQueue, plan: str) -> None:
    check_rows_of_nothing_but_minus_infinity_and_nans(queue, "float16")


def check_rows_of_nothing_but_minus_infinity_and_nans(queue: cl.CommandQueue, dtype: str) -> None:
    q = np.ones((1, 5, 3, 2))
    k = np.ones((1, 5, 3, 2))
    v = np.arange(30, dtype=float).reshape(1, 5, 3, 2)
    k[0, 0] = -np.inf  # no key counts
    k[0, 1, 1] = -np.inf  # one does not
    k[0, 2, 1] = np.nan
    q[0, 3, 1] = np.nan
    k[0, 4, 2] = np.inf
    tensors = [to_device(queue, x, dtype) for x in (q, k, v)]
    out, lse = (to_numpy(x) for x in attention(*tensors, False, None, out_dtype="float32"))
    np.testing.assert_array_equal(out[0, 0], 0)
    np.testing.assert_array_equal(lse[0, 0], -np.inf)
    np.testing.assert_allclose(out[0, 1], np.broadcast_to((v[0, 1, 0] + v[0, 1, 2]) / 2, (3, 2)), rtol=1e-6)
    assert np.isnan(out[0, 2]).all()
    np.testing.assert_array_equal(np.isnan(out[0, 3]), [[False] * 2, [True] * 2, [False] * 2])
    assert np.isnan(out[0, 4]).all()
    # Under a causal mask what comes later does not count, whatever it is.
    out, _ = attention(*tensors, True, None, out_dtype="float32")
    np.testing.assert_array_equal(np.isnan(to_numpy(out)[0, 2:, :, 0]), [[0, 1, 1], [0, 1, 0], [0, 0, 1]])


@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
@pytest.mark.simulated_elsewhere
def test_a_query_without_keys_has_no_gradient(queue: cl.CommandQueue, plan: str) -> None:
    check_a_query_without_keys(queue, "float32")


def check_a_query_without_keys(queue: cl.CommandQueue, dtype: str) -> None:
    q, v, g = normal(queue, 6, (1, 1, 3, 2), *[dtype] * 3)
    k = to_device(queue, np.full((1, 1, 3, 2), -1e38), dtype)
    q = to_device(queue, np.abs(to_numpy(q)) * 1e2 + 1e2, dtype)
    out, _, *grads = computed([q, k, v, g], True, 1.0)
    for each in (out, *grads):
        np.testing.assert_array_equal(to_numpy(each), 0)


def test_empty(queue: cl.CommandQueue) -> None:
    for shape in ((0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)):
        found = computed(normal(queue, 0, shape, *["float16"] * 4), True, out_dtype="float16")
        assert [x.shape for x in found] == [shape, shape[:3], *[shape] * 3]


@pytest.mark.once
def test_more_heads_than_a_second_direction_takes(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's devices launch at most 65,535 work-groups in each direction but the first."""
    sizes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for name in ("FORWARD", "BACKWARD_Q", "BACKWARD_KV"):
        monkeypatch.setattr(tiled, name, lambda queue, *launch, **macros: sizes.append(launch[:2]))
    q, k, v, g = normal(queue, 0, (1, 1, 1, 4), *["float32"] * 4)
    many = dataclasses.replace(problem.problem_of(q, k, v, False, 1.0), heads=70_000)
    tiled.forward(many, q, k, v, q, k)
    tiled.backward(many, q, k, v, k, g, (q, k, v))
    groups = [[all_ // own for all_, own in zip(*launch, strict=True)] for launch in sizes]
    assert len(groups) == 3
    assert all(np.prod(each) >= 70_000 and max(each[1:]) < 65_536 for each in groups)


@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
@pytest.mark.parametrize(
    ("width", "dtype", "cache"), [(7, "float32", "float32"), (64, "float16", "float32"), (130, "bfloat16", "bfloat16")]
)
def test_decode(queue: cl.CommandQueue, simulated: bool, plan: str, width: int, dtype: str, cache: str) -> None:
    rng = np.random.default_rng(7)
    capacity = 70 if simulated else 600
    held = quantize(rng.standard_normal((2, 1, 3, capacity, width)), cache).astype(np.float64)
    for length in (0, 1, 17, capacity - 1):
        # What lies beyond the length may be anything.
        stored = np.where(np.arange(capacity)[:, None] < length, held, np.nan)
        k, v = (to_device(queue, x, cache) for x in stored)
        q = to_device(queue, rng.standard_normal((1, 3, 1, width)), dtype)
        out = attention_decode(q, k, v, length, None, out_dtype=dtype)
        if length == 0:
            np.testing.assert_array_equal(to_numpy(out), 0)
            continue
        expected = Reference(to_numpy(q), held[0, :, :, :length], held[1, :, :, :length], False, width**-0.5)
        assert_close(out, expected.out, slack=expected.out_slack * (1 + capacity / 16))
