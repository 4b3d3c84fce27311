"""Engines that are used on a device only by the plans that have computed right there (clamp/opencl/trials.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl

import clamp
from clamp import bridge
from clamp.opencl import trials
from clamp.opencl.device import Capabilities, capabilities
from clamp.opencl.program import Kernel, source
from clamp.opencl.trials import Trial
from clamp.ops.gemm.plan import Plan


@dataclass(frozen=True)
class Verified(ABC):
    """An engine that is used only by plans that are verified."""

    NAME: str
    TAKES: str
    IN_WORDS: str  # NAME, TAKES, IN_WORDS: as every engine's
    where: str  # where the engine is found, for the process that tries it: "clamp.ops.gemm.matrix_units:MMA"
    plans: tuple[Plan, ...]  # the ways in which it may cut a problem up, the largest tiles first
    may_work: Callable[[Capabilities], bool]  # whether a device is of a kind that has its instruction
    # 0: by its instruction; 1 and 2: in plain C, for tests on any device (EMULATE of kernels/async_copy.clh)
    emulate: int = field(default=0, kw_only=True)

    def pays(self, problem: Any) -> bool:  # noqa: ARG002  (as every engine's)
        """Wherever it is verified."""
        return True

    @property
    @abstractmethod
    def kernels(self) -> tuple[Kernel, ...]:
        """Its kernels."""

    @abstractmethod
    def cases(self, plan: Plan) -> Iterable[tuple[Any, ...]]:
        """The small problems of a plan's trial."""

    @abstractmethod
    def computes(self, plan: Plan, queue: cl.CommandQueue, *case: Any) -> bool:
        """Returns whether one of them comes out right by a plan."""

    def computes_right(self, plan: Plan, queue: cl.CommandQueue) -> bool:
        """Returns whether all of them do."""
        return all(self.computes(plan, queue, *case) for case in self.cases(plan))

    def verified_plans(self, queue: cl.CommandQueue) -> tuple[Plan, ...]:
        """The plans by which it computes right on the queue's device."""
        verdicts = self.verdicts(queue)
        return tuple(plan for plan in self.plans if verdicts.get(str(plan)) == trials.RIGHT)

    def is_verified(self, queue: cl.CommandQueue) -> bool:
        """Returns whether a plan that takes any operands is."""
        return not all(plan.aligned for plan in self.verified_plans(queue))

    def verdicts(self, queue: cl.CommandQueue, *, anew: bool = False) -> Mapping[str, str]:
        """Returns each plan's verdict on the queue's device; tried where they may work, and once if not ``anew``."""
        return trials.verdicts(queue.device, self.where, anew=anew) if self.may_work(capabilities(queue)) else {}

    def trials(self) -> Iterator[Trial]:
        """One for each plan."""
        for plan in self.plans:
            yield str(plan), partial(self.computes_right, plan)

    def trial_key(self) -> list[str]:
        """Returns what verdicts depend on: the kernels' sources, and who launches them."""
        return [clamp.__version__, source("common.clh"), *(source(kernel.file) for kernel in self.kernels)]


def names_of_verified(engines: Sequence[Verified], queue: cl.CommandQueue) -> frozenset[str]:
    """Names of the engines that are verified on the queue's device. No CPU has a matrix unit."""
    device = capabilities(queue)
    if device.is_cpu:
        return frozenset()
    for engine in engines:  # side by side: to build one's trials takes NVIDIA's compiler up to half a minute
        if engine.may_work(device):
            trials.begin(queue.device, engine.where)
    return frozenset(engine.NAME for engine in engines if engine.is_verified(queue))


@dataclass(frozen=True)
class DeviceMatrix:
    """As much of a tensor as a launch needs; netcl's pools of memory would keep the context of the trial alive."""

    queue: cl.CommandQueue
    buffer: cl.Buffer
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def like(cls, queue: cl.CommandQueue, numbers: npt.NDArray[Any], dtype: str) -> DeviceMatrix:
        """Numbers that the type has, on the device."""
        host = bridge.to_words(np.ascontiguousarray(numbers, np.float32), dtype)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        return cls(queue, cl.Buffer(queue.context, flags, hostbuf=host), dtype, numbers.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def to_host(self) -> npt.NDArray[Any]:
        host = np.empty(self.shape, np.uint32 if self.dtype == "float32" else np.uint16)
        cl.enqueue_copy(self.queue, host, self.buffer)
        return bridge.from_words(host, self.dtype)
