"""Norms: over channels of a batch, groups of channels, and the last axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.conformance.table import Array, Case, Input, Normal, Op, Uniform


def normalized(x: Array, axis: int | tuple[int, ...], eps: float) -> Array:
    """x less its mean over some axes, over its deviation."""
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + eps)


def of_channels(parameter: Array) -> Array:
    """A parameter of C elements against (N, C, H, W)."""
    return parameter.reshape(1, -1, 1, 1)


def batch_norm2d(
    x: Array, gamma: Array, beta: Array, running_mean: Array, running_var: Array, momentum: float = 0.1,
    eps: float = 1e-5, training: bool = True, negative_slope: float = 1.0,
) -> Array:  # fmt: skip
    """netcl's, followed by leaky_relu."""
    gamma, beta = of_channels(gamma), of_channels(beta)
    if training:
        y = normalized(x, (0, 2, 3), eps) * gamma + beta
    else:
        y = (x - of_channels(running_mean)) / np.sqrt(of_channels(running_var) + eps) * gamma + beta
    return np.where(y > 0, y, negative_slope * y)


def layer_norm(x: Array, gamma: Array, beta: Array, eps: float = 1e-5) -> Array:
    """Over the last axis, or as many as gamma has."""
    return normalized(x, tuple(range(-gamma.ndim, 0)), eps) * gamma + beta


def group_norm(x: Array, gamma: Array, beta: Array, groups: int, eps: float = 1e-5) -> Array:
    """netcl's."""
    y = normalized(x.reshape(x.shape[0], groups, -1), -1, eps).reshape(x.shape)
    return y * of_channels(gamma) + of_channels(beta)


def rms_norm(x: Array, gamma: Array, eps: float = 1e-6) -> Array:
    """netcl's: over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gamma


def l2_normalize(x: Array, dim: int = -1, eps: float = 1e-8) -> Array:
    """netcl's."""
    return x / (np.linalg.norm(x, axis=dim, keepdims=True) + eps)


def parameters(*shape: int) -> tuple[Input, Input]:
    """gamma and beta."""
    return Normal(*shape).aside(), Normal(*shape).aside()


def running(channels: int) -> tuple[Input, Input]:
    """Running mean and variance."""
    return Normal(channels).fixed().aside(), Uniform(0.5, 2.0, channels).fixed().aside()


def batch_case(*shape: int, **kwargs: float) -> Case:
    """A batch norm of an activation that is not centred."""
    channels = shape[1]
    return Case(Normal(*shape, mean=1.0), *parameters(channels), *running(channels), **kwargs)


def terms_of(size: int, reference: Callable[..., Array]) -> Callable[..., tuple[int, Array]]:
    """What a norm sums: the magnitudes of its terms are those of the largest result, and once more for the mean."""
    return lambda *args, **kwargs: (size, np.abs(reference(*args, **kwargs)).max() + 1.0)


# Squares of numbers beyond 1e18 overflow in fp32.
_BATCH = [
    batch_case(3, 4, 3, 5),
    batch_case(3, 4, 3, 5, training=False),
    batch_case(2, 3, 5, 7, eps=1e-2, momentum=0.3),
    batch_case(1, 2, 4, 5),
    batch_case(5, 1, 1, 1),
]

batch_norm2d_leaky_relu = partial(batch_norm2d, negative_slope=0.01)

OPS = [
    Op("netcl.autograd.batch_norm2d", batch_norm2d, _BATCH,
       terms=terms_of(64, batch_norm2d), cancels=64, special_below=1e18),
    Op("netcl.autograd.batch_norm2d_relu", partial(batch_norm2d, negative_slope=0.0), _BATCH,
       terms=terms_of(64, batch_norm2d), cancels=64, special_below=1e18),
    Op("netcl.autograd.batch_norm2d_leaky_relu", batch_norm2d_leaky_relu,
       [*_BATCH, batch_case(3, 4, 3, 5, negative_slope=0.2)],
       terms=terms_of(64, batch_norm2d_leaky_relu), cancels=64, special_below=1e18),
    Op("netcl.autograd.layer_norm", layer_norm, [
        Case(Normal(5, 19, mean=1.0), *parameters(19)),
        Case(Normal(2, 3, 7), *parameters(7), eps=1e-3),
        Case(Normal(4, 2, 3, mean=1.0), *parameters(2, 3)),
    ], terms=terms_of(19, layer_norm), cancels=64),
    Op("netcl.autograd.group_norm", group_norm, [
        Case(Normal(2, 6, 3, 3, mean=1.0), *parameters(6), 2),
        Case(Normal(2, 4, 3, 2), *parameters(4), groups=4, eps=1e-3),
        Case(Normal(3, 3, 2, 3), *parameters(3), groups=1),
    ], terms=terms_of(27, group_norm), cancels=64),
    Op("netcl.autograd.rms_norm", rms_norm, [
        Case(Normal(5, 19), Normal(19).aside()),
        Case(Normal(2, 3, 7), Normal(7).aside(), eps=1e-2),
    ], terms=terms_of(19, rms_norm), cancels=64),
    Op("netcl.autograd.l2_normalize", l2_normalize, [
        Case(Normal(5, 19)),
        Case(Normal(4, 3, 5), dim=1, eps=0.5),
        Case(Normal(4, 3), dim=0),
    ], terms=terms_of(19, l2_normalize), cancels=64),
]  # fmt: skip
