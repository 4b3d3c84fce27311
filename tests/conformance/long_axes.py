"""Sums of a million terms: for every function that sums, a call whose sum is so long, and what must come out of it.

Most terms are alike, because then roundings are alike too and do not cancel: a running fp32 sum of a million times 0.1f
is one percent too large, one of random numbers only 1e-5. References are in closed form, in float64: differences of a
million inputs would take a day.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tests.conformance import indexing, loss, pool, reduce
from tests.conformance.table import Array, Reference

N = 1_000_000

#: For each input a float64 array, with the sum of the magnitudes of its terms where these cancel, or None where it is
#: no matter of this case.
Expected = Sequence[Array | tuple[Array, Array] | None]


@dataclass(frozen=True)
class LongCase:
    """One call.

    Attributes:
        name: netcl's function, by its name in ``netcl.autograd``.
        what: what is summed.
        inputs: arguments by position. Of arrays those of int32 become tensors, float32 ones nodes that want a
            gradient, and float64 ones float32 tensors that want none.
        reference: ``reference(incoming gradient, *inputs, **kwargs) -> (result or None, gradients of the first
            inputs)``, all of them float64.
        kwargs: arguments behind the inputs.
        slack: error allowed, in multiples of 1e-5 of the largest element (or sum of magnitudes).
    """

    name: str
    what: str
    inputs: Callable[[], Sequence[Any]]
    reference: Callable[..., tuple[Array | None, Expected]]
    kwargs: dict[str, Any]
    slack: float = 1.0

    def __str__(self) -> str:
        return f"{self.name}-{self.what.replace(' ', '_')}"


def alike(*shape: int) -> Array:
    """0.1, and 0.3 at the end of each row, float32."""
    values = np.full(shape, 0.1, np.float32)
    values[..., -1] = 0.3
    return values


def varied(*shape: int) -> Array:
    """0.7, 0.1 and some 0.33, float32: what has a variance."""
    values = np.full(shape, 0.1, np.float32).reshape(-1)
    values[::2], values[::7] = 0.7, 0.33
    return values.reshape(shape)


def uneven(*shape: int) -> Array:
    """0.2, and 0.9 for every third: a variance, and little in common with ``varied``."""
    values = np.full(shape, 0.2, np.float32).reshape(-1)
    values[::3] = 0.9
    return values.reshape(shape)


def case(
    name: str,
    what: str,
    inputs: Callable[[], Sequence[Any]],
    reference: Callable[..., tuple[Array | None, Expected]],
    slack: float = 1.0,
    **kwargs: Any,
) -> LongCase:
    """A ``LongCase``."""
    return LongCase(name, what, inputs, reference, kwargs, slack)


# ------------------------------------------------------------------------------------------------ references


def result_of(reference: Reference) -> Callable[..., tuple[Array, Expected]]:
    """The result as the table has it; gradients are no matter of the case."""
    return lambda g, *xs, **kwargs: (reference(*xs, **kwargs), ())


def _softmax(g: Array, x: Array, axis: int = -1) -> tuple[Array, Expected]:
    y = reduce.softmax(x, axis)
    return y, (y * (g - (y * g).sum(axis, keepdims=True)),)


def _second_is_broadcast(g: Array, x: Array, b: Array) -> tuple[None, Expected]:
    summed = tuple(range(g.ndim - b.ndim)) + tuple(
        i + g.ndim - b.ndim for i, extent in enumerate(b.shape) if extent == 1
    )
    return None, (None, g.sum(summed).reshape(b.shape))


def _embedding(g: Array, table: Array, index: Array) -> tuple[None, Expected]:
    grad = np.zeros(table.shape)
    np.add.at(grad, index, g)
    return None, (grad,)


def _index_select(g: Array, x: Array, axis: int, index: Array) -> tuple[None, Expected]:
    grad = np.zeros(x.shape)
    np.add.at(np.moveaxis(grad, axis, 0), index, np.moveaxis(g, axis, 0))
    return None, (grad,)


def _normalized(x: Array, axes: Any, eps: float) -> tuple[Array, Array]:
    r = 1 / np.sqrt(x.var(axes, keepdims=True) + eps)
    return (x - x.mean(axes, keepdims=True)) * r, r


def _norm_gradient(h: Array, z: Array, r: Array, axes: Any) -> Array:
    return np.asarray(r * (h - h.mean(axes, keepdims=True) - z * (h * z).mean(axes, keepdims=True)))


def _layer_norm(g: Array, x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, Expected]:
    z, r = _normalized(x, -1, eps)
    dgamma = (g * z).sum(0), np.abs(g * z).sum(0)
    return z * gamma + beta, (_norm_gradient(g * gamma, z, r, -1), dgamma, g.sum(0))


def _rms_norm(g: Array, x: Array, gamma: Array, eps: float) -> tuple[Array, Expected]:
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    h = g * gamma
    dx = r * h - x * r**3 * (h * x).mean(-1, keepdims=True)
    return x * r * gamma, (dx, (g * x * r).sum(0))


def _l2_normalize(g: Array, x: Array) -> tuple[Array, Expected]:
    norm = np.sqrt((x * x).sum(-1, keepdims=True))
    return x / norm, (g / norm - x * (g * x).sum(-1, keepdims=True) / norm**3,)


def _batch_norm(g: Array, x: Array, gamma: Array, beta: Array, *running: None) -> tuple[Array, Expected]:
    axes, channels = (0, 2, 3), (1, -1, 1, 1)
    z, r = _normalized(x, axes, 1e-5)
    dx = _norm_gradient(g * gamma.reshape(channels), z, r, axes)
    dgamma = (g * z).sum(axes), np.abs(g * z).sum(axes)
    return z * gamma.reshape(channels) + beta.reshape(channels), (dx, dgamma, g.sum(axes))


def _group_norm(g: Array, x: Array, gamma: Array, beta: Array, groups: int, eps: float) -> tuple[Array, Expected]:
    sets = (len(x), groups, -1)
    z, r = _normalized(x.reshape(sets), 2, eps)
    h = (g * gamma.reshape(1, -1, 1, 1)).reshape(sets)
    dx, z = _norm_gradient(h, z, r, 2).reshape(x.shape), z.reshape(x.shape)
    y = z * gamma.reshape(1, -1, 1, 1) + beta.reshape(1, -1, 1, 1)
    dgamma = (g * z).sum((0, 2, 3)), np.abs(g * z).sum((0, 2, 3))
    return y, (dx, dgamma, g.sum((0, 2, 3)))


def _cross_entropy(g: Array, x: Array, targets: Array) -> tuple[Array, Expected]:
    weights = targets if targets.ndim == 2 else (np.arange(x.shape[1]) == targets[:, None]).astype(float)
    shifted = x - x.max(1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    dx = g * (np.exp(log_softmax) * weights.sum(1, keepdims=True) - weights) / len(x)
    return np.atleast_1d(-(weights * log_softmax).sum() / len(x)), (dx,)


def _pairwise(g: Array, x: Array, y: Array) -> tuple[Array, Expected]:
    squares = np.stack([((row - y) ** 2).sum(1) for row in x])
    return squares, (np.stack([2 * (g[i][:, None] * (row - y)).sum(0) for i, row in enumerate(x)]),)


def _prelu(g: Array, x: Array, slope: Array) -> tuple[None, Expected]:
    return None, (None, (g * x).sum(tuple(i for i in range(x.ndim) if i != 1)))


def _matmul(g: Array, a: Array, b: Array) -> tuple[Array, Expected]:
    return a @ b, (None, np.swapaxes(a, -1, -2) @ g)


def _linear_relu(g: Array, x: Array, w: Array, b: Array) -> tuple[None, Expected]:
    return None, (None, x.T @ g, g.sum(0))


def _windows(x: Array, g: Array, pad: int) -> Any:
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    h, w = g.shape[2:]
    return {(i, j): x[:, :, i : i + h, j : j + w] for i in range(3) for j in range(3)}


def _conv(g: Array, x: Array, w: Array, b: Array, pad: int = 0, spec: str = "nohw,nchw->oc") -> tuple[None, Expected]:
    grad = np.zeros(w.shape)
    for (i, j), window in _windows(x, g, pad).items():
        grad[:, :, i, j] = np.einsum(spec, g, window).reshape(w.shape[:2])
    return None, (None, grad, g.sum((0, 2, 3)))


_depthwise = partial(_conv, spec="nchw,nchw->c")


def _conv_transpose(g: Array, x: Array, w: Array, b: Array) -> tuple[None, Expected]:
    return None, (None, np.einsum("nchw,nohw->co", x, g)[:, :, None, None], g.sum((0, 2, 3)))


def _upsample(g: Array, x: Array, **kwargs: Any) -> tuple[None, Expected]:
    return None, (g.sum((2, 3), keepdims=True),)


def _grid_sample(g: Array, x: Array, grid: Array, align_corners: bool) -> tuple[None, Expected]:
    grad = np.zeros(x.shape)
    grad[0, 0, 1, 1] = g.sum()  # every place of the grid is the middle of a 3 x 3 image
    return None, (grad,)


def _affine_grid(g: Array, theta: Array, size: tuple[int, ...], align_corners: bool) -> tuple[None, Expected]:
    across = np.linspace(-1, 1, size[3])
    base = np.stack([*np.meshgrid(across, np.linspace(-1, 1, size[2])), np.ones(size[2:])], -1)
    return None, (np.einsum("nhwk,hwj->nkj", g, base),)


# ----------------------------------------------------------------------------------------------------- calls


def _same_row(times: int = N) -> Array:
    return np.zeros(times, np.int32)


def _columns(columns: int, n: int = N) -> list[LongCase]:
    """What sums n rows of so many columns."""
    rows = f"rows of {columns}"
    return [
        case("sum", rows, lambda: [alike(n, columns)], result_of(reduce.sum_), axis=0),
        case("softmax", rows, lambda: [varied(n, columns)], _softmax, axis=0),
        case("bias_add", rows, lambda: [alike(n, columns), alike(columns)], _second_is_broadcast),
        case("embedding", rows, lambda: [alike(3, columns), _same_row(n)], _embedding),
    ]


CASES: list[LongCase] = [
    case("sum", "everything", lambda: [alike(N)], result_of(reduce.sum_)),
    case("mean", "rows", lambda: [alike(2, N)], result_of(reduce.mean), axis=1),
    case("softmax", "the last axis", lambda: [varied(2, N)], _softmax),
    *(long for columns, n in ((3, N), (19, N), (75, N // 4)) for long in _columns(columns, n)),
    case("add", "a broadcast row", lambda: [alike(2, N), alike(2, 1)], _second_is_broadcast),
    case("index_select", "one place", lambda: [alike(2, 3), 1, _same_row()], _index_select),
    case("index_add", "one row", lambda: [alike(3, 20), 0, _same_row(), alike(N, 20)], result_of(indexing.index_add)),
    case("layer_norm", "long rows", lambda: [uneven(2, N), alike(N), alike(N)], _layer_norm, eps=1e-5),
    case("layer_norm", "many rows", lambda: [uneven(N, 5), alike(5), alike(5)], _layer_norm, eps=1e-5),
    case("rms_norm", "long rows", lambda: [alike(2, N), alike(N)], _rms_norm, eps=1e-6),
    case("rms_norm", "many rows", lambda: [alike(N, 5), alike(5)], _rms_norm, eps=1e-6),
    case("l2_normalize", "long rows", lambda: [alike(2, N)], _l2_normalize),
    *(
        case("batch_norm2d", what, lambda s=shape: [uneven(*s), alike(s[1]), alike(s[1]), None, None], _batch_norm)
        for what, shape in {
            "long planes": (1, 2, 1000, 1000),
            "many images": (62500, 9, 4, 4),
            "single elements": (N, 2, 1, 1),
            "single elements of many channels": (N // 4, 35, 1, 1),
        }.items()
    ),
    case("group_norm", "long planes", lambda: [uneven(1, 4, 500, 500), alike(4), alike(4), 1], _group_norm, eps=1e-5),
    case("group_norm", "many channels", lambda: [uneven(1, 62500, 4, 4), alike(62500), alike(62500), 1], _group_norm,
         eps=1e-5),
    case("cross_entropy", "classes", lambda: [varied(2, N), np.array([5, 7], np.int32)], _cross_entropy),
    case("cross_entropy", "rows", lambda: [varied(N, 3), np.arange(N, dtype=np.int32) % 3], _cross_entropy),
    case("cross_entropy_indices", "rows", lambda: [varied(N, 3), np.arange(N, dtype=np.int32) % 3], _cross_entropy),
    case("cross_entropy", "probabilities", lambda: [varied(2, N), alike(2, N).astype(float)], _cross_entropy),
    case("hinge_loss", "classes", lambda: [varied(2, N), np.eye(2, N)], result_of(loss.hinge)),
    case("hinge_loss", "rows", lambda: [varied(N, 3), np.eye(3)[np.arange(N) % 3]], result_of(loss.hinge)),
    *(
        case(name, "everything", lambda: [alike(N), varied(N).astype(float)], result_of(loss.summed(terms)))
        for name, terms in {
            "mse_loss": lambda x, t: (x - t) ** 2,
            "l1_loss": lambda x, t: np.abs(x - t),
            "l2_loss": lambda x, t: (x - t) ** 2,
            "smooth_l1_loss": loss.smooth_l1,
        }.items()
    ),
    case("weighted_smooth_l1_loss", "everything", lambda: [alike(N), varied(N).astype(float), alike(N)],
         result_of(loss.summed(lambda x, t, w: w * loss.smooth_l1(x, t)))),
    case("pairwise_squared_distances", "dimensions", lambda: [alike(2, N), -alike(2, N)], _pairwise),
    case("pairwise_squared_distances", "rows", lambda: [alike(2, 3), -alike(N, 3)], _pairwise),
    case("triplet_loss", "dimensions", lambda: [alike(2, N), -alike(2, N), alike(2, N)],
         result_of(loss.triplet), margin=10.0),
    case("triplet_loss", "rows", lambda: [alike(N, 2), -alike(N, 2), alike(N, 2)],
         result_of(loss.triplet), margin=10.0),
    case("contrastive_loss", "dimensions", lambda: [alike(2, N), -alike(2, N), np.ones(2, np.int32)],
         result_of(loss.contrastive)),
    case("global_avg_pool2d", "planes", lambda: [alike(2, 3, 1000, 1000)], result_of(pool.global_avg_pool2d)),
    case("avg_pool2d", "large windows", lambda: [alike(1, 1, 1002, 1002)],
         result_of(pool.avg_pool2d), kernel_size=1000, stride=2),
    case("prelu", "planes", lambda: [-alike(1, 1, 1000, 1000), alike(1)], _prelu),
    case("prelu", "rows", lambda: [-alike(N, 3), alike(3)], _prelu),
    case("prelu", "many planes", lambda: [-alike(N // 4, 2, 2, 2), alike(2)], _prelu),
    # Products of matrices sum blocks of 256 terms: 4,000 of them make 4 times the error of the others.
    case("matmul_op", "steps", lambda: [alike(4, N), alike(N, 5)], _matmul, 5),
    case("matmul_op", "rows", lambda: [alike(N, 3), alike(3, 4)], _matmul, 5),
    case("bmm", "steps", lambda: [alike(2, 4, N // 4), alike(2, N // 4, 5)], _matmul, 5),
    case("linear_relu", "rows", lambda: [alike(N, 3), alike(3, 4), alike(4)], _linear_relu, 5),
    case("conv2d", "positions", lambda: [alike(1, 2, 1000, 1000), alike(3, 2, 3, 3), alike(3)], _conv, pad=1),
    case("conv2d", "images", lambda: [alike(15625, 2, 8, 8), alike(3, 2, 3, 3), alike(3)], _conv, pad=1),
    case("conv2d", "positions of many channels", lambda: [alike(1, 16, 512, 512), alike(16, 16, 3, 3), alike(16)],
         _conv, pad=1),
    case("depthwise_conv2d", "positions", lambda: [alike(1, 3, 1000, 1000), alike(3, 1, 3, 3), alike(3)],
         _depthwise, pad=1),
    case("depthwise_conv2d", "images", lambda: [alike(15625, 3, 8, 8), alike(3, 1, 3, 3), alike(3)],
         _depthwise, pad=1),
    case("conv_transpose2d", "positions", lambda: [alike(1, 2, 1000, 1000), alike(2, 3, 1, 1), alike(3)],
         _conv_transpose),
    *(case("upsample", mode, lambda: [alike(1, 1, 1, 1)], _upsample, 2, size=(1000, 1000), mode=mode)
      for mode in ("nearest", "bilinear")),
    case("grid_sample", "one pixel", lambda: [alike(1, 1, 3, 3), np.zeros((1, 1000, 1000, 2))], _grid_sample, 2,
         align_corners=True),
    case("affine_grid", "positions", lambda: [np.array([[[1, 0, 0], [0, 1, 0]]], np.float32), (1, 1, 1000, 1000)],
         _affine_grid, 2, align_corners=True),
]  # fmt: skip
