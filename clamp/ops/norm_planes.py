"""Batch norm and group norm of NCHW tensors, forward and backward (kernels/norm_planes.cl has the formulas)."""

from __future__ import annotations

from dataclasses import dataclass

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.device import capabilities
from clamp.ops.cast import cast, launch
from clamp.ops.reduce import RowPlan, parts_of, plan_rows, reduce_sum
from clamp.program import get_kernel

_FILE = "norm_planes.cl"
_MERGE_GROUP = 256  # work-items that merge the channels' statistics on a GPU
_WIDTH = 8  # channels that a CPU's work-item reads side by side, at most
_RUN = 1024  # elements that are worth a run of their own


@dataclass(frozen=True)
class Activation:
    """What follows a batch norm in the same kernel.

    Attributes:
        kind: the kernels' number for it: 0 nothing, 1 relu, 2 leaky relu.
        slope: leaky relu's factor for negative values.
    """

    kind: int = 0
    slope: float = 0.0


IDENTITY = Activation()
RELU = Activation(1)


@dataclass(frozen=True)
class _Sets:
    """How planes make sets that are normalized together; the names are those of norm_planes.cl."""

    sets: int
    planes: int
    hw: int
    first: int
    step: int
    channels: int

    @property
    def elements(self) -> int:
        """Elements of a set."""
        return self.planes * self.hw

    @property
    def geometry(self) -> tuple[int, int, int, int, int]:
        """The arguments that every kernel of sets takes."""
        return self.sets, self.planes, self.hw, self.first, self.step


def _batch_sets(x: Tensor) -> _Sets:
    n, c, h, w = x.shape
    return _Sets(sets=c, planes=n, hw=h * w, first=1, step=c, channels=c)


def _group_sets(x: Tensor, groups: int) -> _Sets:
    n, c, h, w = x.shape
    return _Sets(sets=n * groups, planes=c // groups, hw=h * w, first=c // groups, step=1, channels=c)


def _types(**tensors: Tensor | str) -> dict[str, str]:
    """Storage types as macros: ``_types(X=x)`` is ``{"X_T": "f16"}``."""
    return {
        f"{name}_T": bridge.STORAGE[tensor if isinstance(tensor, str) else tensor.dtype]
        for name, tensor in tensors.items()
    }


def _plan_planes(queue: cl.CommandQueue, sets: _Sets) -> RowPlan:
    """Work-groups for a pass over all planes, in the order of memory."""
    return plan_rows(queue, sets.sets * sets.planes, sets.hw)


def _plan_sets(queue: cl.CommandQueue, sets: _Sets) -> tuple[RowPlan, int]:
    """Work-groups for whole sets, and how many neighbouring sets one may read side by side.

    On a CPU small planes are taken several at a time, as long as every core has work.
    """
    plan = plan_rows(queue, sets.sets, sets.elements)
    device = capabilities(queue)
    if not device.is_cpu or sets.step == 1:
        return plan, 1
    wanted = min(_WIDTH, -(-_RUN // sets.hw), sets.sets // (4 * device.compute_units))
    each = max(plan.each, wanted)
    return RowPlan(plan.group, each, -(-sets.sets // each)), _WIDTH


# -------------------------------------------------------------------------------------------- batch norm


def batch_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    momentum: float,
    eps: float,
    out_dtype: str,
    activation: Activation = IDENTITY,
) -> tuple[Tensor, Tensor, Tensor]:
    """``act((x - mean) / sqrt(var + eps) * gamma + beta)`` with each channel's statistics of this batch.

    The running statistics become ``(1 - momentum) * running + momentum * batch`` (with the biased variance, as
    netcl has it) in place, without a word to the host; a batch with a mean or variance that is not finite in any
    channel leaves all of them as they are.

    Args:
        x: (N, C, H, W), float32, float16 or bfloat16.
        gamma, beta: C elements each, any storage type.
        running_mean, running_var: C elements each, of one storage type; None to keep none.
        out_dtype: dtype of the result.

    Returns:
        The result, and the batch's fp32 mean and biased variance, of shape (C,).
    """
    sets = _batch_sets(x)
    y = bridge.empty(x.queue, x.shape, out_dtype)
    if x.size == 0:
        return y, bridge.zeros(x.queue, (sets.sets,), "float32"), bridge.zeros(x.queue, (sets.sets,), "float32")
    mean, var = (bridge.empty(x.queue, (sets.sets,), "float32") for _ in range(2))
    parts, span = parts_of(x.queue, sets.sets, sets.elements)
    if parts == 1:
        _forward(x, gamma, beta, y, mean, var, sets, eps, activation)
        if running_mean is not None and running_var is not None:
            _merge(mean, var, mean, var, running_mean, running_var, sets, span, parts, momentum)
        return y, mean, var
    partial_mean, partial_var = (bridge.empty(x.queue, (sets.sets * parts,), "float32") for _ in range(2))
    plan = plan_rows(x.queue, sets.sets * parts, span)
    kernel = get_kernel(
        x.queue, _FILE, "planes_statistics", "pppqqqqqquu", PLANES_STATISTICS=1, WG=plan.group, **_types(X=x)
    )
    kernel(
        x.queue, plan.global_size, plan.local_size,
        x.buffer, partial_mean.buffer, partial_var.buffer, *sets.geometry, span, parts, plan.each,
    )  # fmt: skip
    _merge(partial_mean, partial_var, mean, var, running_mean, running_var, sets, span, parts, momentum)
    _apply(x, gamma, beta, y, mean, var, sets, eps, activation)
    return y, mean, var


def batch_norm_inference(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    eps: float,
    out_dtype: str,
    activation: Activation = IDENTITY,
) -> Tensor:
    """``act((x - mean) / sqrt(var + eps) * gamma + beta)`` with given statistics. Arguments as of ``batch_norm``."""
    y = bridge.empty(x.queue, x.shape, out_dtype)
    if x.size:
        mean, var = cast(mean, "float32"), cast(var, "float32")
        _apply(x, gamma, beta, y, mean, var, _batch_sets(x), eps, activation)
    return y


def batch_norm_backward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    grad: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    eps: float,
    dx_dtype: str | None,
    training: bool = True,
    parameters: bool = True,
    activation: Activation = IDENTITY,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``batch_norm``, or of ``batch_norm_inference`` if not ``training``.

    Args:
        beta: read only to find where the activation was negative.
        grad: gradient of the result, of x's shape, any storage type.
        mean, var: the statistics that forward used, fp32.
        dx_dtype: dtype of x's gradient; None if it is not wanted.
        parameters: whether the gradients of gamma and beta are wanted.

    Returns:
        Gradients of x, gamma and beta; the latter two in their parameters' dtypes.

    Raises:
        ValueError: the gradient has another shape than x.
    """
    _require_gradient_of(x, grad)
    sets = _batch_sets(x)
    dx = None if dx_dtype is None else bridge.empty(x.queue, x.shape, dx_dtype)
    if x.size == 0:
        dgamma, dbeta = (bridge.zeros(p.queue, p.shape, p.dtype) if parameters else None for p in (gamma, beta))
        return dx, dgamma, dbeta
    inputs = (x, grad, gamma, beta, mean, var)
    if not parameters and not training:
        if dx is not None:
            _backward_apply(inputs, mean, dx, sets, eps, False, activation)  # the sums are not read
        return dx, None, None
    dgamma, dbeta = (bridge.empty(p.queue, p.shape, p.dtype) for p in (gamma, beta))
    parts, span = parts_of(x.queue, sets.sets, sets.elements)
    if dx is not None and parts == 1:
        _backward(inputs, dx, dgamma, dbeta, sets, eps, training, activation)
    else:
        sums = _backward_sums(inputs, dgamma, dbeta, sets, parts, span, eps, activation)
        if dx is not None:
            _backward_apply(inputs, sums, dx, sets, eps, training, activation)
    return dx, dgamma if parameters else None, dbeta if parameters else None


def _require_gradient_of(x: Tensor, grad: Tensor) -> None:
    if tuple(grad.shape) != tuple(x.shape):
        raise ValueError(f"norm: gradient of shape {tuple(grad.shape)} for a result of shape {tuple(x.shape)}")


def _forward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    y: Tensor,
    mean: Tensor,
    var: Tensor,
    sets: _Sets,
    eps: float,
    activation: Activation,
) -> None:
    """Statistics and result, a set at a time."""
    plan, width = _plan_sets(x.queue, sets)
    kernel = get_kernel(
        x.queue, _FILE, "planes_forward", "ppppppqqqqqquff",
        PLANES_FORWARD=1, WG=plan.group, WIDTH=width, ACT=activation.kind, **_types(X=x, SCALE=gamma, SHIFT=beta, Y=y),
    )  # fmt: skip
    kernel(
        x.queue, plan.global_size, plan.local_size,
        x.buffer, gamma.buffer, beta.buffer, y.buffer, mean.buffer, var.buffer,
        *sets.geometry, sets.channels, plan.each, eps, activation.slope,
    )  # fmt: skip


def _merge(
    partial_mean: Tensor,
    partial_var: Tensor,
    mean: Tensor,
    var: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    sets: _Sets,
    span: int,
    parts: int,
    momentum: float,
) -> None:
    """The parts' statistics into mean and var, and into the running statistics if there are any."""
    queue, device = mean.queue, capabilities(mean.queue)
    group = 1 if device.is_cpu else min(_MERGE_GROUP, device.max_work_group)
    running = running_mean is not None and running_var is not None
    moved = (running_mean, running_var) if running_mean is not None and running_var is not None else (mean, var)
    kernel = get_kernel(
        queue, _FILE, "batch_merge", "ppppppqqquf",
        BATCH_MERGE=1, WG=group, RUNNING=int(running), **_types(RUNNING=moved[0]),
    )  # fmt: skip
    kernel(
        queue, (group,), (group,),
        partial_mean.buffer, partial_var.buffer, mean.buffer, var.buffer, moved[0].buffer, moved[1].buffer,
        sets.sets, sets.elements, span, parts, momentum,
    )  # fmt: skip


def _apply(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    y: Tensor,
    mean: Tensor,
    var: Tensor,
    sets: _Sets,
    eps: float,
    activation: Activation,
) -> None:
    """The result from given statistics."""
    plan = _plan_planes(x.queue, sets)
    kernel = get_kernel(
        x.queue, _FILE, "planes_apply", "ppppppqqquff",
        PLANES_APPLY=1, WG=plan.group, ACT=activation.kind, **_types(X=x, SCALE=gamma, SHIFT=beta, Y=y),
    )  # fmt: skip
    kernel(
        x.queue, plan.global_size, plan.local_size,
        x.buffer, gamma.buffer, beta.buffer, y.buffer, mean.buffer, var.buffer,
        sets.sets * sets.planes, sets.hw, sets.channels, plan.each, eps, activation.slope,
    )  # fmt: skip


#: x, incoming gradient, gamma, beta, mean, variance
_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _input_types(inputs: _Inputs) -> dict[str, str]:
    x, grad, gamma, beta, _, _ = inputs
    return _types(X=x, G=grad, SCALE=gamma, SHIFT=beta)


def _backward(
    inputs: _Inputs,
    dx: Tensor,
    dgamma: Tensor,
    dbeta: Tensor,
    sets: _Sets,
    eps: float,
    training: bool,
    activation: Activation,
    groups: bool = False,
) -> None:
    """All gradients, a set at a time."""
    queue = dx.queue
    plan, width = _plan_sets(queue, sets)
    kernel = get_kernel(
        queue, _FILE, "planes_backward", "pppppppppqqqqqquff",
        PLANES_BACKWARD=1, WG=plan.group, WIDTH=width, ACT=activation.kind, TRAINING=int(training),
        GROUPS=int(groups), **_input_types(inputs), **_types(DX=dx),
    )  # fmt: skip
    kernel(
        queue, plan.global_size, plan.local_size,
        *(tensor.buffer for tensor in inputs), dx.buffer, dgamma.buffer, dbeta.buffer,
        *sets.geometry, sets.channels, plan.each, eps, activation.slope,
    )  # fmt: skip


def _backward_sums(
    inputs: _Inputs,
    dgamma: Tensor,
    dbeta: Tensor,
    sets: _Sets,
    parts: int,
    span: int,
    eps: float,
    activation: Activation,
) -> Tensor:
    """The gradients of gamma and beta; both in fp32 as well, side by side for each channel."""
    queue, var = dgamma.queue, inputs[-1]
    partial_gd, partial_g = (bridge.empty(queue, (sets.sets * parts,), "float32") for _ in range(2))
    plan = plan_rows(queue, sets.sets * parts, span)
    kernel = get_kernel(
        queue, _FILE, "planes_backward_sums", "ppppppppqqqqqquuff",
        PLANES_BACKWARD_SUMS=1, WG=plan.group, ACT=activation.kind, **_input_types(inputs),
    )  # fmt: skip
    kernel(
        queue, plan.global_size, plan.local_size,
        *(tensor.buffer for tensor in inputs), partial_gd.buffer, partial_g.buffer,
        *sets.geometry, span, parts, plan.each, eps, activation.slope,
    )  # fmt: skip
    sums = bridge.empty(queue, (sets.sets, 2), "float32")
    kernel = get_kernel(
        queue, _FILE, "batch_backward_merge", "ppppppquf", BATCH_BACKWARD_MERGE=1, **_types(SCALE=dgamma, SHIFT=dbeta)
    )
    kernel(
        queue, *launch(queue, sets.sets),
        partial_gd.buffer, partial_g.buffer, var.buffer, sums.buffer, dgamma.buffer, dbeta.buffer,
        sets.sets, parts, eps,
    )  # fmt: skip
    return sums


def _backward_apply(
    inputs: _Inputs, sums: Tensor, dx: Tensor, sets: _Sets, eps: float, training: bool, activation: Activation
) -> None:
    """x's gradient from the sums."""
    queue = dx.queue
    plan = _plan_planes(queue, sets)
    kernel = get_kernel(
        queue, _FILE, "planes_backward_apply", "ppppppppqqqufff",
        PLANES_BACKWARD_APPLY=1, WG=plan.group, ACT=activation.kind, TRAINING=int(training),
        **_input_types(inputs), **_types(DX=dx),
    )  # fmt: skip
    kernel(
        queue, plan.global_size, plan.local_size,
        *(tensor.buffer for tensor in inputs), sums.buffer, dx.buffer,
        sets.sets * sets.planes, sets.hw, sets.channels, plan.each, sets.elements, eps, activation.slope,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------- group norm


def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, *, eps: float, out_dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` with the statistics of each sample's group of channels.

    Args:
        x: (N, C, H, W), float32, float16 or bfloat16; ``groups`` divides C.
        gamma, beta: C elements each, any storage type.

    Returns:
        The result, and the fp32 mean and biased variance, of shape (N, groups).
    """
    sets = _group_sets(x, groups)
    y = bridge.empty(x.queue, x.shape, out_dtype)
    mean, var = (bridge.empty(x.queue, (x.shape[0], groups), "float32") for _ in range(2))
    if x.size:
        _forward(x, gamma, beta, y, mean, var, sets, eps, IDENTITY)
    return y, mean, var


def group_norm_backward(
    x: Tensor,
    gamma: Tensor,
    grad: Tensor,
    mean: Tensor,
    var: Tensor,
    groups: int,
    *,
    eps: float,
    dx_dtype: str,
    dgamma_dtype: str | None,
    dbeta_dtype: str | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``group_norm``: of x, and of gamma and beta (shape (C,)) unless their dtype is None.

    Raises:
        ValueError: the gradient has another shape than x.
    """
    _require_gradient_of(x, grad)
    sets = _group_sets(x, groups)
    dx = bridge.empty(x.queue, x.shape, dx_dtype)
    make = bridge.empty if x.size else bridge.zeros
    plane_gamma, plane_beta = (make(x.queue, tuple(x.shape[:2]), "float32") for _ in range(2))
    if x.size:
        inputs = (x, grad, gamma, gamma, mean, var)
        _backward(inputs, dx, plane_gamma, plane_beta, sets, eps, True, IDENTITY, groups=True)
    dgamma, dbeta = (
        None if dtype is None else reduce_sum(total, 0, out_dtype=dtype)
        for total, dtype in ((plane_gamma, dgamma_dtype), (plane_beta, dbeta_dtype))
    )
    return dx, dgamma, dbeta
