"""Runs an entry of the conformance table on a device and measures how far it is from the reference."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import widest
from clamp.casting.policy_table import CastPolicy, default_table
from tests.conformance.numeric import Gradient, gradient
from tests.conformance.table import Array, Case, Input, Op
from tests.reference import NUMPY, SPECIAL, quantize, to_device, to_numpy, ulp

_POLICIES = {entry.name: entry.policy for entry in default_table()}

_PURE = ("float32", "half")
_MIXED = ("half+float32", "float32+half")


def policy_of(op: Op) -> CastPolicy:
    """The op's policy on the lists that ship with clamp."""
    return _POLICIES[op.name]


def netcl_function(name: str) -> Callable[..., Any]:
    """The function a user finds under a full name (wrapped, while AMP is active)."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


# ---------------------------------------------------------------------------------------------- arguments


def _walk(structure: Any, leaf: Callable[[Input], Any]) -> Any:
    """The structure with ``leaf`` of each Input in its place."""
    if isinstance(structure, Input):
        return leaf(structure)
    if isinstance(structure, list | tuple):
        return type(structure)(_walk(item, leaf) for item in structure)
    if isinstance(structure, dict):
        return {key: _walk(value, leaf) for key, value in structure.items()}
    return structure


def inputs_of(case: Case) -> list[Input]:
    """The tensor arguments of a call, in order."""
    found: list[Input] = []
    _walk((case.args, case.kwargs), found.append)
    return found


def storages_of(case: Case) -> tuple[str, ...]:
    """How the casting inputs of a call may be stored: all float32, all 16-bit, or turn about."""
    casting = [one for one in inputs_of(case) if not one.secondary]
    return _PURE + _MIXED if len(casting) > 1 else _PURE


def filled(case: Case, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call with these in place of its inputs."""
    remaining = iter(values)
    return _walk((case.args, case.kwargs), lambda _: next(remaining))


@dataclass(frozen=True)
class Arrangement:
    """One call of the table in one mixture of dtypes: what is stored, and what the kernels are to read.

    Attributes:
        dtypes: storage dtype of each input (int32 for indices).
        stored: the inputs' values, rounded to their storage.
        read: the values that the result is a function of: under ``half``, rounded to the AMP dtype as well.
    """

    dtypes: tuple[str, ...]
    stored: tuple[Array, ...]
    read: tuple[Array, ...]


def arrange(op: Op, case: Case, storage: str, amp_dtype: str, special_round: int | None = None) -> Arrangement:
    """Draws the inputs of a call (the same every time) and rounds them to a mixture of dtypes."""
    rng = np.random.default_rng(crc32(f"{op.name}{special_round}".encode()))
    dtypes, stored, read = [], [], []
    turn = 0
    parts = [part.replace("half", amp_dtype) for part in storage.split("+")]
    for one in inputs_of(case):
        values = one.draw(rng)
        if values.dtype.kind == "i":
            dtype = "int32"
        elif one.secondary:
            dtype = "float32"
        else:
            dtype, turn = parts[turn % len(parts)], turn + 1
            if special_round is not None:
                special = SPECIAL.astype(np.float64)
                special = special[~np.isfinite(special) | (np.abs(special) <= op.special_below)]
                values = rng.choice(special, values.shape)
        dtypes.append(dtype)
        stored.append(values if dtype == "int32" else quantize(values, dtype).astype(np.float64))
        is_cast = policy_of(op) is CastPolicy.HALF and not one.secondary and dtype != "int32"
        read.append(quantize(stored[-1], amp_dtype).astype(np.float64) if is_cast else stored[-1])
    return Arrangement(tuple(dtypes), tuple(stored), tuple(read))


def result_dtype(op: Op, case: Case, dtypes: tuple[str, ...], amp_dtype: str) -> str:
    """The dtype that the op's policy promises."""
    casting = [
        dtype for one, dtype in zip(inputs_of(case), dtypes, strict=True) if not one.secondary and dtype != "int32"
    ]
    policy = policy_of(op)
    if policy is CastPolicy.HALF:
        return amp_dtype
    if policy in (CastPolicy.MATCH, CastPolicy.VIEW):
        return casting[0]
    return widest(*casting) if policy is CastPolicy.PROMOTE else "float32"


def nodes_of(queue: cl.CommandQueue, case: Case, arrangement: Arrangement) -> list[Any]:
    """A leaf for each input; indices are bare tensors."""
    leaves = []
    for one, dtype, values in zip(inputs_of(case), arrangement.dtypes, arrangement.stored, strict=True):
        if dtype == "int32":
            leaves.append(Tensor.from_host(queue, np.ascontiguousarray(values), dtype="int32"))
            continue
        tensor = to_device(queue, values, dtype)
        tensor.requires_grad = one.grad
        leaves.append(Node(value=tensor, requires_grad=one.grad))
    return leaves


def outputs(result: Any) -> list[Any]:
    """The results of a function that may return several."""
    return list(result) if isinstance(result, list | tuple) else [result]


# ---------------------------------------------------------------------------------------------- reference


@cache
def _reference(op: Op, case: Case, storage: str, amp_dtype: str, special_round: int | None) -> list[Array]:
    arrangement = arrange(op, case, storage, amp_dtype, special_round)
    args, kwargs = filled(case, list(arrangement.read))
    with np.errstate(all="ignore"):
        return [np.asarray(out, np.float64) for out in outputs(op.reference(*args, **kwargs))]


def reference(op: Op, case: Case, storage: str, amp_dtype: str, special_round: int | None = None) -> list[Array]:
    """The float64 results of a call, computed once for all devices."""
    return _reference(op, case, storage, amp_dtype, special_round)


@cache
def reference_gradient(
    op: Op, case: Case, storage: str, amp_dtype: str, which_output: int, which_input: int, cotangent_dtype: str
) -> Gradient:
    """The gradient of one output with respect to one input, computed once for all devices."""
    values = list(arrange(op, case, storage, amp_dtype).read)
    values[which_input] = at = values[which_input].copy()  # it alone is moved, of arguments that may be one array
    args, kwargs = filled(case, values)

    def f() -> Array:
        return np.asarray(outputs(op.reference(*args, **kwargs))[which_output], np.float64)

    shape = reference(op, case, storage, amp_dtype)[which_output].shape
    with np.errstate(all="ignore"):
        return gradient(f, at, cotangent(shape, cotangent_dtype))


@cache
def cotangent(shape: tuple[int, ...], dtype: str) -> Array:
    """The gradient that is sent into backward: normally distributed, rounded to the result's dtype."""
    return quantize(np.random.default_rng(len(shape)).standard_normal(shape), dtype).astype(np.float64)


# ---------------------------------------------------------------------------------------------- measuring


@dataclass
class Error:
    """How far a tensor is from its reference: the largest excess over the bound, in ulps of its type.

    Attributes:
        ulps: the worst error in ulps, of what the bound for fp32 sums does not cover.
        allowed: how many ulps it may be.
        where: index of the worst element.
    """

    ulps: float
    allowed: float
    where: tuple[int, ...]

    @property
    def passes(self) -> bool:
        """Whether the tensor is as close as promised."""
        return bool(self.ulps <= self.allowed)


def error_of(actual: Tensor, want: Array, slack: Array, allowed: float, relevant: Array | None = None) -> Error:
    """Compares a tensor with float64 values; infinities and NaNs must stand in the same places.

    Args:
        slack: absolute error that does not count.
        relevant: which elements count; None: all.
    """
    got = to_numpy(actual).astype(np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    if got.size == 0:
        return Error(0.0, allowed, ())
    if actual.dtype not in NUMPY:  # integers
        wrong = np.where(got == want, 0.0, np.inf)
        return Error(float(wrong.max()), allowed, _argmax(wrong))
    with np.errstate(all="ignore"):
        rounded = quantize(want, actual.dtype).astype(np.float64)
        same = (got == rounded) | (np.isnan(got) & np.isnan(want))
        largest = float(ml_dtypes.finfo(NUMPY[actual.dtype]).max)
        # One side may be infinite where the other is within rounding of the largest number.
        clipped, wanted = (np.clip(side, -largest, largest) for side in (got, want))
        beyond = np.abs(want) <= largest * 1.01
        excess = np.maximum(np.abs(clipped - wanted) - slack, 0.0) / ulp(wanted, actual.dtype)
        comparable = np.isfinite(got) & np.isfinite(want) | (np.isinf(got) & beyond & (np.sign(got) == np.sign(want)))
        errors = np.where(comparable, excess, np.where(same, 0.0, np.inf))
    if relevant is not None:
        errors = np.where(relevant, errors, 0.0)
    return Error(float(errors.max()), allowed, _argmax(errors))


def _argmax(errors: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(errors.argmax()), errors.shape))


def forward_slack(op: Op, case: Case, arrangement: Arrangement, want: Array) -> Array:
    """The bound for sums in fp32 of the forward result."""
    if op.terms is None:
        return np.zeros(want.shape)
    args, kwargs = filled(case, list(arrangement.read))
    with np.errstate(all="ignore"):
        n, magnitude = op.terms(*args, **kwargs)
    return np.broadcast_to(op.slack * n * 2.0**-24 * np.asarray(magnitude, np.float64), want.shape)


def gradient_slack(op: Op, expected: Gradient) -> Array:
    """The bound for sums in fp32 of a gradient, and the differences' own error."""
    n = max(expected.terms, 1)
    largest = np.abs(expected.value).max(initial=0.0)
    own = op.cancels * 2.0**-24 * largest + 1e-8 * (expected.magnitude + largest) + 1e-9
    return op.slack * n * 2.0**-24 * expected.magnitude + own


def tolerance(dtype: str, ulps16: float, ulps32: float) -> float:
    """The allowed ulps for a dtype."""
    return ulps32 if dtype == "float32" else ulps16


def run_backward(out: Node, dtype: str) -> None:
    """Sends the cotangent into one result."""
    Tape().backward(out, to_device(out.value.queue, cotangent(tuple(out.value.shape), dtype), dtype))


# ---------------------------------------------------------------------------------------------- host reads


@contextmanager
def counted_host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collects reads of device memory inside the ``with``: copies to host arrays, maps, ``Tensor.to_host``."""
    reads: list[str] = []
    copy, to_host, map_buffer = cl.enqueue_copy, Tensor.to_host, cl.enqueue_map_buffer

    def counting_copy(queue: Any, target: Any, source: Any, **kwargs: Any) -> Any:
        if isinstance(target, np.ndarray):
            reads.append(f"copy of {target.nbytes} bytes")
        return copy(queue, target, source, **kwargs)

    def counting_to_host(tensor: Tensor) -> Any:
        reads.append(f"to_host of {tensor.shape}")
        return to_host(tensor)

    def counting_map(*args: Any, **kwargs: Any) -> Any:
        reads.append("map")
        return map_buffer(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cl, "enqueue_copy", counting_copy)
        patch.setattr(cl, "enqueue_map_buffer", counting_map)
        patch.setattr(Tensor, "to_host", counting_to_host)
        yield reads
