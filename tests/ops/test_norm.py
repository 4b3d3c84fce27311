"""Norms and their backwards against numpy's float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp.opencl.device import capabilities
from clamp.ops import launch, norm_planes, norm_rows, norm_sets
from clamp.ops.norm_sets import IDENTITY, RELU, Activation, Sets
from tests.conformance.norm import normalized, of_channels
from tests.ops.plans import plans_of
from tests.reference import assert_close, to_device, to_numpy
from tests.sweep import sweep

pytestmark = pytest.mark.kernel

Array = npt.NDArray[np.float64]
EPS = 2.0**-24
LEAKY = Activation(2, 0.125)

#: (plan, storage of x, of the incoming gradient, of results, of gamma and beta)
MIXTURES = [
    ("own plan", "float32", "float32", "float32", "float32"),
    ("own plan", "float16", "float16", "float16", "float32"),
    ("own plan", "bfloat16", "float32", "float32", "bfloat16"),
    ("other plan", "float16", "float32", "bfloat16", "float32"),
]


plan = plans_of(launch, norm_sets, norm_rows)


def in_parts(monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    """Cuts channels into parts of so many elements, as is done with few long ones."""
    monkeypatch.setattr(norm_planes, "parts_of", lambda queue, sums, n, wide=1: (-(-n // span), span))

    def plan_of(queue: cl.CommandQueue, sets: Sets) -> norm_sets.Plan:
        blocks = -(-span // 16)
        return norm_sets.Plan(sets.sets, 32, -(-sets.blocks // blocks), blocks, launch.group_macros(queue, 32))

    monkeypatch.setattr(norm_sets, "plan_of", plan_of)


def norm_gradient(x: Array, h: Array, axis: int | tuple[int, ...], eps: float, center: bool = True) -> Array:
    """x's gradient, h being that of the normalized values."""
    mean = x.mean(axis, keepdims=True) if center else 0.0
    r = 1 / np.sqrt(((x - mean) ** 2).mean(axis, keepdims=True) + eps)
    z = (x - mean) * r
    return r * (h - (h.mean(axis, keepdims=True) if center else 0) - z * (h * z).mean(axis, keepdims=True))


def slack_of(n: int, *terms: Array) -> float:
    """The bound for sums of n elements, for the largest terms there are."""
    return (16 + n) * EPS * sum(float(np.abs(term).max(initial=0)) for term in terms)


class Batch:
    """A batch norm's tensors on the device, and their values."""

    def __init__(self, queue: cl.CommandQueue, shape: tuple[int, ...], dtypes: tuple[str, ...], mean: float = 1.0):
        rng = np.random.default_rng(sum(shape))
        x_dtype, grad_dtype, _, parameter_dtype = dtypes
        self.x = to_device(queue, mean + rng.standard_normal(shape), x_dtype)
        self.grad = to_device(queue, rng.standard_normal(shape), grad_dtype)
        self.gamma, self.beta = (to_device(queue, rng.standard_normal(shape[1]), parameter_dtype) for _ in range(2))
        self.running_mean = to_device(queue, rng.standard_normal(shape[1]))
        self.running_var = to_device(queue, rng.uniform(1, 2, shape[1]))

    def affine(self) -> tuple[Array, Array]:
        return of_channels(to_numpy(self.gamma)), of_channels(to_numpy(self.beta))


def activated(y: Array, activation: Activation, grad: Array | None = None) -> Array:
    """The activation of y, or its gradient there."""
    factor = {0: 1.0, 1: 0.0, 2: activation.slope}[activation.kind]
    return np.where(y > 0, 1.0, factor) * (y if grad is None else grad)


@pytest.mark.parametrize(
    ("plan", "x", "grad", "out", "parameter", "cut"),
    sweep(((*mixture, cut) for mixture in MIXTURES for cut in (False, True)), lambda number: number % 3 == 0),
    indirect=["plan"],
)
@pytest.mark.parametrize(
    ("shape", "activation"),
    [((2, 3, 5, 7), RELU), ((3, 2, 4, 8), LEAKY), ((1, 1, 1, 1), IDENTITY), ((5, 4, 1, 1), RELU), ((2, 1, 3, 7), RELU)],
)  # fmt: skip
def test_batch_norm(
    queue: cl.CommandQueue, plan: None, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], cut: bool,
    x: str, grad: str, out: str, parameter: str, activation: Activation,
) -> None:  # fmt: skip
    if cut:
        in_parts(monkeypatch, 16)
    data = Batch(queue, shape, (x, grad, out, parameter))
    running = [to_numpy(data.running_mean), to_numpy(data.running_var)]
    values, (gamma, beta), axes, n = to_numpy(data.x), data.affine(), (0, 2, 3), data.x.size // shape[1]
    y, mean, var = norm_planes.batch_norm(
        data.x, data.gamma, data.beta, data.running_mean, data.running_var,
        momentum=0.25, eps=1e-3, out_dtype=out, activation=activation,
    )  # fmt: skip
    pre = normalized(values, axes, 1e-3) * gamma + beta
    r = 1 / np.sqrt(values.var(axes, keepdims=True) + 1e-3)
    assert_close(mean, values.mean(axes), slack=slack_of(n, values))
    assert_close(var, values.var(axes), slack=slack_of(n, values.var(axes)))
    assert_close(data.running_mean, 0.75 * running[0] + 0.25 * values.mean(axes), slack=slack_of(n, values))
    assert_close(data.running_var, 0.75 * running[1] + 0.25 * values.var(axes), slack=slack_of(n, running[1]))
    assert_close(y, activated(pre, activation), slack=slack_of(n, values * r * gamma, beta))

    dx, dgamma, dbeta = norm_planes.batch_norm_backward(
        data.x, data.gamma, data.beta, data.grad, mean, var, eps=1e-3, dx_dtype=x, activation=activation
    )
    g = activated(pre, activation, to_numpy(data.grad))
    z = normalized(values, axes, 1e-3)
    assert_close(dx, norm_gradient(values, g * gamma, axes, 1e-3), slack=2 * slack_of(n, r * g * gamma * (1 + z * z)))
    assert_close(dgamma, (g * z).sum(axes), slack=slack_of(n, values * r * g) * n)
    assert_close(dbeta, g.sum(axes), slack=slack_of(n, g) * n)


@pytest.mark.parametrize(("plan", "x", "grad", "out", "parameter"), MIXTURES[2:], indirect=["plan"])
def test_batch_norm_with_given_statistics(
    queue: cl.CommandQueue, plan: None, x: str, grad: str, out: str, parameter: str
) -> None:
    data = Batch(queue, (3, 2, 3, 7), (x, grad, out, parameter))
    given = data.running_mean, data.running_var
    values, (gamma, beta) = to_numpy(data.x), data.affine()
    r = 1 / np.sqrt(of_channels(to_numpy(data.running_var)) + 1e-3)
    z = (values - of_channels(to_numpy(data.running_mean))) * r
    y = norm_planes.batch_norm_inference(
        data.x, data.gamma, data.beta, *given, eps=1e-3, out_dtype=out, activation=LEAKY
    )
    assert_close(y, activated(z * gamma + beta, LEAKY), slack=slack_of(1, z * gamma, beta))
    g = activated(z * gamma + beta, LEAKY, to_numpy(data.grad))
    for parameters in (True, False):
        dx, dgamma, dbeta = norm_planes.batch_norm_backward(
            data.x, data.gamma, data.beta, data.grad, *given,
            eps=1e-3, dx_dtype=x, training=False, parameters=parameters, activation=LEAKY,
        )  # fmt: skip
        assert_close(dx, g * gamma * r, slack=slack_of(1, g * gamma * r))
        if parameters:
            assert_close(dgamma, (g * z).sum((0, 2, 3)), slack=slack_of(63, g * z) * 63)
            assert_close(dbeta, g.sum((0, 2, 3)), slack=slack_of(63, g) * 63)
        else:
            assert dgamma is None
            assert dbeta is None


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
def test_small_deviations_around_a_large_mean(
    queue: cl.CommandQueue, plan: None, monkeypatch: pytest.MonkeyPatch, simulated: bool, cut: bool
) -> None:
    shape = (3, 2, 9, 13) if simulated else (4, 2, 60, 80)
    if cut:
        in_parts(monkeypatch, 64 if simulated else 4096)
    rng = np.random.default_rng(5)
    values = 1000 + 0.1 * rng.standard_normal(shape)
    values[0, :, 0] = 0.0  # and a border far from it
    for x in (to_device(queue, values), to_device(queue, values[1:])):
        one = to_device(queue, np.ones(2))
        y, mean, var = norm_planes.batch_norm(x, one, one, None, None, momentum=0.1, eps=1e-5, out_dtype="float32")
        stored, axes = to_numpy(x), (0, 2, 3)
        np.testing.assert_allclose(to_numpy(mean), stored.mean(axes), rtol=2.0**-22)
        deviation = np.sqrt(stored.var(axes, keepdims=True))
        rounded = EPS * 1000 / deviation  # the mean's own rounding, in deviations
        assert (np.abs(to_numpy(var) / stored.var(axes) - 1) <= 1e-5 + rounded.reshape(-1) / 4).all()
        z = normalized(stored, axes, 1e-5)
        assert_close(y, z + 1, slack=4 * rounded + 0.6e-5 * np.abs(z))  # half the variance's error


@pytest.mark.unsimulated  # a million elements
@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
def test_a_mean_that_drifts_by_less_than_it_rounds(queue: cl.CommandQueue, plan: None) -> None:
    x = to_device(queue, (1000 + np.linspace(0, 0.02, 2**20)).reshape(1, 1, 1024, 1024))
    one = to_device(queue, np.ones(1))
    _, mean, _ = norm_planes.batch_norm(x, one, one, None, None, momentum=0.1, eps=1e-5, out_dtype="float32")
    np.testing.assert_allclose(to_numpy(mean), to_numpy(x).mean(), rtol=2.0**-22)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
def test_a_batch_that_is_not_finite_leaves_the_running_statistics(
    queue: cl.CommandQueue, plan: None, monkeypatch: pytest.MonkeyPatch, bad: float, cut: bool
) -> None:
    if cut:
        in_parts(monkeypatch, 16)
    data = Batch(queue, (2, 3, 4, 5), ("float16", "float32", "float32", "float32"))
    values = to_numpy(data.x)
    values[1, 1, 2, 3] = bad
    before = data.running_mean.to_host().tobytes(), data.running_var.to_host().tobytes()
    y, _, _ = norm_planes.batch_norm(
        to_device(queue, values, "float16"), data.gamma, data.beta, data.running_mean, data.running_var,
        momentum=0.1, eps=1e-5, out_dtype="float16",
    )  # fmt: skip
    assert (data.running_mean.to_host().tobytes(), data.running_var.to_host().tobytes()) == before
    assert np.isnan(to_numpy(y)[:, 1]).all()
    assert np.isfinite(to_numpy(y)[:, [0, 2]]).all()


def test_running_statistics_in_half(queue: cl.CommandQueue) -> None:
    data = Batch(queue, (2, 3, 4, 5), ("float16", "float32", "float32", "float32"))
    running = [to_device(queue, np.ones(3), "float16") for _ in range(2)]
    norm_planes.batch_norm(data.x, data.gamma, data.beta, *running, momentum=0.5, eps=1e-5, out_dtype="float16")
    assert_close(running[0], 0.5 + 0.5 * to_numpy(data.x).mean((0, 2, 3)), slack=64 * EPS)
    assert_close(running[1], 0.5 + 0.5 * to_numpy(data.x).var((0, 2, 3)), slack=64 * EPS)


@pytest.mark.parametrize(("plan", "x", "grad", "out", "parameter"), MIXTURES, indirect=["plan"])
@pytest.mark.parametrize(("shape", "groups"), [((2, 6, 3, 7), 3), ((3, 4, 1, 1), 2), ((1, 5, 4, 8), 1)])
def test_group_norm(
    queue: cl.CommandQueue, plan: None, shape: tuple[int, ...], groups: int,
    x: str, grad: str, out: str, parameter: str,
) -> None:  # fmt: skip
    data = Batch(queue, shape, (x, grad, out, parameter))
    rows = (shape[0], groups, -1)
    values, (gamma, beta) = to_numpy(data.x), data.affine()
    n = values[0].size // groups
    y, mean, var = norm_planes.group_norm(data.x, data.gamma, data.beta, groups, eps=1e-3, out_dtype=out)
    z = normalized(values.reshape(rows), -1, 1e-3).reshape(shape)
    r = 1 / np.sqrt(values.reshape(rows).var(-1) + 1e-3)
    assert_close(mean, values.reshape(rows).mean(-1), slack=slack_of(n, values))
    assert_close(var, values.reshape(rows).var(-1), slack=slack_of(n, values.reshape(rows).var(-1)))
    assert_close(y, z * gamma + beta, slack=slack_of(n, values * r.max() * gamma, beta))

    g = to_numpy(data.grad)
    dx, dgamma, dbeta = norm_planes.group_norm_backward(
        data.x, data.gamma, data.grad, mean, var, groups,
        eps=1e-3, dx_dtype=x, dgamma_dtype=parameter, dbeta_dtype=parameter,
    )  # fmt: skip
    expected = norm_gradient(values.reshape(rows), (g * gamma).reshape(rows), -1, 1e-3).reshape(shape)
    assert_close(dx, expected, slack=2 * slack_of(n, r.max() * g * gamma * (1 + z * z)))
    assert_close(dgamma, (g * z).sum((0, 2, 3)), slack=slack_of(n, values * r.max() * g) * n)
    assert_close(dbeta, g.sum((0, 2, 3)), slack=slack_of(n, g) * n)


@pytest.mark.parametrize(("plan", "x", "grad", "out", "parameter"), MIXTURES, indirect=["plan"])
@pytest.mark.parametrize("shape", [(2, 3, 5), (9, 33), (1,), (3, 1), (2, 64)])
def test_norms_of_the_last_axis(
    queue: cl.CommandQueue, plan: None, shape: tuple[int, ...], x: str, grad: str, out: str, parameter: str
) -> None:
    rng, n = np.random.default_rng(3), shape[-1]
    tensor, grad_tensor = (
        to_device(queue, 1 + rng.standard_normal(shape), x),
        to_device(queue, rng.standard_normal(shape), grad),
    )
    gamma, beta = (to_device(queue, rng.standard_normal(n), parameter) for _ in range(2))
    values, g, scale, shift = (to_numpy(t) for t in (tensor, grad_tensor, gamma, beta))
    lead, h = tuple(range(len(shape) - 1)), to_numpy(grad_tensor) * to_numpy(gamma)
    rows = values.size // n

    y, mean, var = norm_rows.layer_norm(tensor, gamma, beta, eps=1e-3, out_dtype=out)
    z, r = normalized(values, -1, 1e-3), 1 / np.sqrt(values.var(-1, keepdims=True) + 1e-3)
    assert mean.shape == var.shape == (*shape[:-1], 1)
    assert_close(y, z * scale + shift, slack=slack_of(n, values * r * scale, shift))
    dx, dgamma, dbeta = norm_rows.layer_norm_backward(
        tensor, gamma, grad_tensor, mean, var,
        eps=1e-3, dx_dtype=x, dgamma_dtype=parameter, dbeta_dtype=parameter,
    )  # fmt: skip
    assert_close(dx, norm_gradient(values, h, -1, 1e-3), slack=2 * slack_of(n, r * h * (1 + z * z)))
    assert_close(dgamma, (g * z).sum(lead), slack=slack_of(n, values * r * g) * rows)
    assert_close(dbeta, g.sum(lead), slack=slack_of(rows, g) * rows)

    y, inverse = norm_rows.rms_norm(tensor, gamma, eps=1e-3, out_dtype=out)
    r = 1 / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-3)
    assert_close(y, values * r * scale, slack=slack_of(n, values * r * scale))
    dx, dgamma = norm_rows.rms_norm_backward(tensor, gamma, grad_tensor, inverse, dx_dtype=x, dgamma_dtype=parameter)
    expected = norm_gradient(values, h, -1, 1e-3, center=False)
    assert_close(dx, expected, slack=2 * slack_of(n, r * h * (1 + (values * r) ** 2)))
    assert_close(dgamma, (g * values * r).sum(lead), slack=slack_of(n, values * r * g) * rows)

    y, norm = norm_rows.l2_normalize(tensor, eps=0.5, out_dtype=out)
    length = np.linalg.norm(values, axis=-1, keepdims=True)
    r = 1 / (length + 0.5)
    assert_close(y, values * r, slack=slack_of(n, values * r))
    dx = norm_rows.l2_normalize_backward(tensor, grad_tensor, norm, eps=0.5, dx_dtype=x)
    projection = (g * values).sum(-1, keepdims=True)
    assert_close(dx, g * r - values * projection * r * r / length, slack=2 * slack_of(n, g * r) * n)


@pytest.mark.unsimulated
@pytest.mark.parametrize("n", [4096 + 33, 3 * 4096])
def test_rows_of_several_pieces(queue: cl.CommandQueue, n: int) -> None:
    """Whose sums are of one sign, so that a piece that is missing shows."""
    values = np.random.default_rng(5).standard_normal((2, n)).astype(np.float32) + 1
    tensor, gamma, beta = to_device(queue, values), to_device(queue, np.ones(n)), to_device(queue, np.zeros(n))
    dtypes = {"dx_dtype": "float32", "dgamma_dtype": "float32"}
    y, mean, var = norm_rows.layer_norm(tensor, gamma, beta, eps=1e-3, out_dtype="float32")
    near: Any = {"rtol": 1e-3, "atol": 1e-3}
    np.testing.assert_allclose(to_numpy(y), normalized(values, -1, 1e-3), **near)
    dx, _, _ = norm_rows.layer_norm_backward(
        tensor, gamma, tensor, mean, var, eps=1e-3, dbeta_dtype="float32", **dtypes
    )
    np.testing.assert_allclose(to_numpy(dx), norm_gradient(values, values, -1, 1e-3), **near)
    y, inverse = norm_rows.rms_norm(tensor, gamma, eps=1e-3, out_dtype="float32")
    np.testing.assert_allclose(to_numpy(y), values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-3), **near)
    dx, _ = norm_rows.rms_norm_backward(tensor, gamma, tensor, inverse, **dtypes)
    np.testing.assert_allclose(to_numpy(dx), norm_gradient(values, values, -1, 1e-3, center=False), **near)
    y, norm = norm_rows.l2_normalize(tensor, eps=0.5, out_dtype="float32")
    length = np.linalg.norm(values, axis=-1, keepdims=True)
    np.testing.assert_allclose(to_numpy(y), values / (length + 0.5), **near)
    dx = norm_rows.l2_normalize_backward(tensor, tensor, norm, eps=0.5, dx_dtype="float32")
    np.testing.assert_allclose(to_numpy(dx) * n, 0.5 * n * values / (length + 0.5) ** 2, **near)


@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("power", [-100, 64, 124])
def test_rows_whose_squares_are_no_float32(queue: cl.CommandQueue, plan: None, power: int, dtype: str) -> None:
    """The norm of ``x * 2^k`` is that of x, and its gradient that of x times ``2^-k``."""
    rng = np.random.default_rng(7)
    x = to_numpy(to_device(queue, 1 + rng.standard_normal((5, 37)), dtype)).astype(np.float64)
    gamma, beta, grad = (to_device(queue, rng.standard_normal(shape)) for shape in (37, 37, x.shape))
    dtypes = {"dx_dtype": "float32", "dgamma_dtype": "float32"}

    def results(scale: float) -> list[Array]:
        tensor = to_device(queue, x * scale, dtype)
        y, mean, var = norm_rows.layer_norm(tensor, gamma, beta, eps=0.0, out_dtype="float32")
        layer = norm_rows.layer_norm_backward(tensor, gamma, grad, mean, var, eps=0.0, dbeta_dtype=None, **dtypes)
        rms, inverse = norm_rows.rms_norm(tensor, gamma, eps=0.0, out_dtype="float32")
        of_rms = norm_rows.rms_norm_backward(tensor, gamma, grad, inverse, **dtypes)
        unit, norm = norm_rows.l2_normalize(tensor, eps=0.0, out_dtype="float32")
        of_unit = norm_rows.l2_normalize_backward(tensor, grad, norm, eps=0.0, dx_dtype="float32")
        same = [to_numpy(tensor) for tensor in (y, layer[1], rms, of_rms[1], unit) if tensor is not None]
        return [*same, *(scale * to_numpy(dx).astype(np.float64) for dx in (layer[0], of_rms[0], of_unit))]

    lost = 2.0 ** (power - 126)  # of a gradient, by its subnormal numbers
    for one, other in zip(results(2.0**power), results(1.0), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 + 2 * lost)


@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
def test_rows_of_one_large_number_become_beta_with_the_smallest_eps(queue: cl.CommandQueue, plan: None) -> None:
    """Their variance of 0 does not say how large they are."""
    x, ones = to_device(queue, np.full((3, 1024), 2.0**20)), to_device(queue, np.ones(1024))
    y, mean, var = norm_rows.layer_norm(x, ones, ones, eps=1e-30, out_dtype="float32")
    dtypes = {"dx_dtype": "float32", "dgamma_dtype": "float32", "dbeta_dtype": None}
    dx, dgamma, _ = norm_rows.layer_norm_backward(x, ones, x, mean, var, eps=1e-30, **dtypes)
    assert (to_numpy(y) == 1).all()
    assert not to_numpy(dx).any()
    assert not to_numpy(dgamma).any()


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("plan", ["own plan", "other plan"], indirect=True)
def test_a_variance_beyond_float32_shows(
    queue: cl.CommandQueue, plan: None, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """Divided by an infinite deviation, results would be beta and gradients 0: finite, and wrong."""
    if cut:
        in_parts(monkeypatch, 16)
    data = Batch(queue, (2, 4, 4, 5), ("float32",) * 4)
    host = to_numpy(data.x).copy()
    host[:, 1] *= 1e20
    x, f32 = to_device(queue, host), "float32"
    y, *kept = norm_planes.batch_norm(x, data.gamma, data.beta, None, None, momentum=0.1, eps=1e-5, out_dtype=f32)
    batch = norm_planes.batch_norm_backward(x, data.gamma, data.beta, data.grad, *kept, eps=1e-5, dx_dtype=f32)
    z, *kept = norm_planes.group_norm(x, data.gamma, data.beta, 2, eps=1e-5, out_dtype=f32)
    dtypes = {"dx_dtype": f32, "dgamma_dtype": f32, "dbeta_dtype": f32}
    group = norm_planes.group_norm_backward(x, data.gamma, data.grad, *kept, 2, eps=1e-5, **dtypes)
    for results, bad in (((y, batch[0], batch[1]), [1]), ((z, group[0], group[1]), [0, 1])):
        for result in results:
            assert result is not None
            found = to_numpy(result) if len(result.shape) == 1 else to_numpy(result).swapaxes(0, 1).reshape(4, -1)
            for channel in range(4):
                assert np.isnan(found[channel]).all() == (channel in bad)


def test_a_row_of_zeros_has_a_gradient(queue: cl.CommandQueue) -> None:
    zeros, ones = to_device(queue, np.zeros((2, 3)), "float16"), to_device(queue, np.ones((2, 3)))
    y, norm = norm_rows.l2_normalize(zeros, eps=0.25, out_dtype="float32")
    assert_close(y, np.zeros((2, 3)))
    dx = norm_rows.l2_normalize_backward(zeros, ones, norm, eps=0.25, dx_dtype="float16")
    assert_close(dx, np.full((2, 3), 4.0))


def test_only_some_gradients(queue: cl.CommandQueue) -> None:
    data = Batch(queue, (2, 3, 4, 5), ("float16", "float32", "float32", "float32"))
    args = (data.x, data.gamma, data.beta, data.grad, data.running_mean, data.running_var)
    full = norm_planes.batch_norm_backward(*args, eps=1e-3, dx_dtype="float16")
    dx, dgamma, dbeta = norm_planes.batch_norm_backward(*args, eps=1e-3, dx_dtype=None)
    assert dx is None
    np.testing.assert_allclose(to_numpy(dgamma), to_numpy(full[1]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(to_numpy(dbeta), to_numpy(full[2]), rtol=1e-5, atol=1e-5)
    dx, dgamma, _ = norm_planes.batch_norm_backward(*args, eps=1e-3, dx_dtype="float16", parameters=False)
    np.testing.assert_array_equal(to_numpy(dx), to_numpy(full[0]))
    assert dgamma is None


def test_empty_tensors(queue: cl.CommandQueue) -> None:
    data = Batch(queue, (0, 3, 4, 5), ("float16", "float32", "float32", "float32"))
    running = to_numpy(data.running_mean)
    y, mean, var = norm_planes.batch_norm(
        data.x, data.gamma, data.beta, data.running_mean, data.running_var,
        momentum=0.1, eps=1e-5, out_dtype="float16",
    )  # fmt: skip
    assert y.shape == (0, 3, 4, 5)
    np.testing.assert_array_equal(to_numpy(data.running_mean), running)
    dx, dgamma, _ = norm_planes.batch_norm_backward(
        data.x, data.gamma, data.beta, data.grad, mean, var, eps=1e-5, dx_dtype="float16"
    )
    assert dx is not None
    assert dx.shape == y.shape
    np.testing.assert_array_equal(to_numpy(dgamma), np.zeros(3))
    y, mean, var = norm_planes.group_norm(data.x, data.gamma, data.beta, 3, eps=1e-5, out_dtype="float32")
    _, dgamma, _ = norm_planes.group_norm_backward(
        data.x, data.gamma, data.grad, mean, var, 3,
        eps=1e-5, dx_dtype="float16", dgamma_dtype="float32", dbeta_dtype=None,
    )  # fmt: skip
    np.testing.assert_array_equal(to_numpy(dgamma), np.zeros(3))
    rows = to_device(queue, np.empty((0, 5)))
    y, mean, var = norm_rows.layer_norm(rows, to_device(queue, np.ones(5)), rows, eps=1e-5, out_dtype="float32")
    assert y.shape == (0, 5)
    _, dgamma, dbeta = norm_rows.layer_norm_backward(
        rows, to_device(queue, np.ones(5)), y, mean, var,
        eps=1e-5, dx_dtype="float32", dgamma_dtype="float16", dbeta_dtype=None,
    )  # fmt: skip
    np.testing.assert_array_equal(to_numpy(dgamma), np.zeros(5))
    assert dbeta is None


def test_few_channels_fill_a_large_gpu(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    large = dataclasses.replace(capabilities(queue), is_cpu=False, compute_units=132, max_work_group=1024)
    monkeypatch.setattr(norm_sets, "capabilities", lambda queue: large)
    for channels, hw in ((1, 2**20), (64, 32 * 32), (264, 14 * 14), (2048, 7 * 7)):
        sets = Sets(channels, 128, hw, 1, channels, channels)
        plan = norm_sets.plan_of(queue, sets)
        assert (plan.parts - 1) * plan.span < sets.blocks <= plan.parts * plan.span
        assert channels * plan.parts * plan.group >= 128 * large.compute_units or channels == 1
        assert plan.group * 2 <= plan.span or plan.parts == 1
