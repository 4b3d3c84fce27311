"""Each op's results and gradients checked as they are made, after Paddle's tensor checker: a line for each that its
mode asks for, and an error where inf or nan must end the program.

Paddle's lines (``paddle/fluid/framework/details/nan_inf_utils``) are read again by ``clamp.debug.dumps``.
"""

from __future__ import annotations

import enum
import linecache
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor, TensorLike
from clamp.casting.operands import note_numpy_backend
from clamp.casting.results import Observer
from clamp.debug.callsite import NOWHERE, Place, here
from clamp.debug.sampling import SUM, Sampler, Sampling
from clamp.opencl.device import list_devices
from clamp.opencl.host_steps import host_step
from clamp.ops.statistics import Numerics, PendingNumerics, is_measurable

#: Paddle's names of dtypes
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

Write = Callable[[str, str], None]


class DebugMode(enum.Enum):
    """What is said of a tensor, and whether it ends the program. Paddle's names and values."""

    CHECK_NAN_INF_AND_ABORT = 0  #: a line for each tensor with inf or nan, and FloatingPointError
    CHECK_NAN_INF = 1  #: a line for each tensor with inf or nan
    CHECK_ALL_FOR_OVERFLOW = 2  #: also for float32 tensors with numbers that float16 does not hold
    CHECK_ALL = 3  #: a line for every tensor

    def wants(self, dtype: str, found: Numerics) -> bool:
        """Returns whether a tensor is worth a line."""
        if self is DebugMode.CHECK_ALL or not found.is_finite:
            return True
        return self is DebugMode.CHECK_ALL_FOR_OVERFLOW and dtype == "float32" and bool(found.beyond or found.below)

    def aborts(self, found: Numerics) -> bool:
        """Returns whether a tensor ends the program."""
        return self is DebugMode.CHECK_NAN_INF_AND_ABORT and not found.is_finite


class Checker(Observer):
    """An observer that reads every result when it is made, in replays too.

    Args:
        mode: what is said.
        write: called with the name of a device and a line.
        sampling: which ops are checked.
        with_source: whether the line of the program follows one that tells of inf or nan.
        thread: whose ops alone are checked, by its identifier; None: all.
    """

    def __init__(
        self, mode: DebugMode, write: Write, sampling: Sampling | None = None, *, with_source: bool = True,
        thread: int | None = None,
    ) -> None:  # fmt: skip
        self.on = True
        self._mode, self._write, self._with_source, self._thread = mode, write, with_source, thread
        self._sampler = Sampler(sampling)

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Checked | None:
        if not (self.on and self._thread in (None, threading.get_ident()) and self._sampler.looks()):
            return None
        op, place = getattr(made, "op_name", None) or "op", here()
        if not self._sampler.takes(op, place):
            return None
        checked = Checked(place.name_of(op), place)
        self._check(checked, [made.value])
        return checked

    def gradients(
        self, token: Checked, grad: Tensor, grads: Sequence[Tensor | None], again: Callable[[Tensor], Any]
    ) -> None:
        if self.on:
            self._check(Checked(f"{token.name}_grad", token.place, True), [x for x in grads if x is not None])

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        if self.on and self._sampler.looks() and self._sampler.takes(SUM, NOWHERE):
            self._check(Checked(SUM, NOWHERE, True), [made])

    def stepped(self, report: Any) -> None:
        self.end_step()

    def end_step(self) -> None:
        """What is computed next belongs to another step, if anything was computed in this one."""
        self._sampler.end_step()

    def check_given(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Checks what no op has made."""
        self._check(Checked(name, here()), tensors)

    def _check(self, checked: Checked, made: Sequence[Any]) -> None:
        tensors = [x for x in made if is_measurable(x) and x.size]
        if any(isinstance(x, Tensor) and not bridge.on_device(x) for x in made):
            note_numpy_backend()
        if tensors:
            kinds = [(x.queue.device, bridge.canonical_dtype(x.dtype), tuple(x.shape)) for x in tensors]
            # Launched among the others, and so in replays, too; read at once, before something writes to it.
            host_step(partial(self._tell, checked, kinds, PendingNumerics(tensors)))

    def _tell(
        self, checked: Checked, kinds: Sequence[tuple[cl.Device, str, tuple[int, ...]]], pending: PendingNumerics
    ) -> None:
        if not (self.on and self._sampler.looks()):
            return
        for (device, dtype, shape), found in zip(kinds, pending.read(), strict=True):
            if not self._mode.wants(dtype, found):
                continue
            paths = self._sampler.paths.of(checked.place.modules[0]) if checked.place.modules else ("",)
            name = "+".join(paths) + ("@GRAD" if checked.is_gradient else "")
            label = device_name(device)
            self._write(label, line_of(label, checked.name, name, dtype, found, checked.place.short_line))
            if self._with_source and not found.is_finite and checked.source:
                self._write(label, f"    {checked.place.short_line}: {checked.source}")
            if self._mode.aborts(found):
                raise FloatingPointError(checked.error(paths, dtype, shape, found))


class Checked:
    """An op that is checked, forward or backward.

    Attributes:
        name: of it, ``"matmul_op"``, or ``"matmul_op_grad"``.
        place: where its forward is called.
        is_gradient: whether it is its backward.
    """

    def __init__(self, name: str, place: Place, is_gradient: bool = False) -> None:
        self.name, self.place, self.is_gradient = name, place, is_gradient

    @property
    def source(self) -> str:
        """The line of the program; empty if there is none."""
        return linecache.getline(self.place.file, self.place.line).strip() if self.place.file else ""

    def error(self, paths: Sequence[str], dtype: str, shape: tuple[int, ...], found: Numerics) -> str:
        """Returns what a user reads whose program this ends."""
        where = f" in {', '.join(paths)}" if any(paths) else ""
        if self.place.modules:
            where += f" ({type(self.place.modules[0]).__name__})"
        at = f", at {self.place.short_line}: {self.source}" if self.source else ""
        return (
            f"{self.name}{where} gave {found.nans} nan and {found.infs} inf among {found.count} elements of {dtype} "
            f"{shape}{at}"
        )


def line_of(device: str, op: str, tensor: str, dtype: str, found: Numerics, at: str = "") -> str:
    """Returns what Paddle prints of a tensor, how much of it float16 does not hold, and the line of the program."""
    error = "" if found.is_finite else "[ERROR] "
    lost = f", num_over_fp16={found.beyond}, num_under_fp16={found.below}" if dtype == "float32" else ""
    return (
        f"[PRECISION] {error}in [device={device}, op={op}, tensor={tensor}, dtype={SHORT[dtype]}], "
        f"numel={found.count}, num_nan={found.nans}, num_inf={found.infs}, num_zero={found.zeros}, "
        f"max={found.greatest:.6e}, min={found.least:.6e}, mean={found.mean:.6e}{lost}{f', at={at}' if at else ''}"
    )


@cache
def device_name(device: cl.Device) -> str:
    """A device as Paddle would write it, ``"gpu:0"``: its kind, and its place among all devices."""
    kind = "cpu" if device.type & cl.device_type.CPU else "gpu"
    return f"{kind}:{list_devices().index(device)}"
