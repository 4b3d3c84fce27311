"""What becomes of the kernels that memory bounds on GPUs, seen without one (test_matrix_units_ptx.py says how): they
load and store 16 bytes at a time, nothing is on a stack, and registers.json has what they take.

The programs are those that clamp's functions build for such a GPU: they are called, but nothing is launched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Tensor
from clamp.opencl import device
from clamp.opencl.program import Kernel
from clamp.ops import (
    loss,
    loss_elementwise,
    multi_tensor,
    norm_planes,
    norm_rows,
    norm_sets,
    ring_buffers,
)
from clamp.ops import reduce as reduce_module
from clamp.ops import softmax as softmax_module
from clamp.ops import statistics as statistics_module
from clamp.ops.elementwise import ELEMENTWISE, elementwise
from clamp.ops.norm_sets import RELU
from tests.launches import forget_prepared_launches
from tests.ops.test_engines import GPU
from tests.ops.test_gemm_tiled_code import amd_assembly
from tests.ops.test_matrix_units_ptx import REGISTERS, Given, Tools, allow, compiled, output_of, tools
from tests.reference import to_device

__all__ = ["tools"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.once]

H100 = replace(GPU, compute_units=132, compute_capability=(9, 0), exchange="SHUFFLES")
PROCESSORS = ("sm_80", "sm_90")
MOST = REGISTERS // 512  # registers of a work-item, so that two work-groups share a multiprocessor

Built = list[tuple[Kernel, dict[str, Any]]]


def built_by(queue: cl.CommandQueue, compute: Callable[[cl.CommandQueue], object]) -> Built:
    """The kernels that a function launches on a large GPU, each with its macros."""
    built: Built = []

    def on(self: Kernel, queue: cl.CommandQueue, *launched: Any, **macros: Any) -> Callable[..., None]:
        built.append((self, self.macros(launched, macros)))
        return lambda *args: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device._capabilities, queue.device.int_ptr, H100)
        patch.setattr(Kernel, "on", on)
        patch.setattr(Kernel, "bind", on)
        forget_prepared_launches(patch)
        compute(queue)
    return built


def _tensor(queue: cl.CommandQueue, *shape: int, dtype: str = "float16") -> Any:
    return to_device(queue, np.ones(shape), dtype)


def _batch_norm(queue: cl.CommandQueue) -> None:
    x, one = _tensor(queue, 8, 64, 32, 32), _tensor(queue, 64, dtype="float32")
    statistics = one, one
    norm_planes.batch_norm(x, one, one, *statistics, momentum=0.1, eps=1e-5, out_dtype="float16", activation=RELU)
    norm_planes.batch_norm_backward(x, one, one, x, *statistics, eps=1e-5, dx_dtype="float16", activation=RELU)


def _group_norm(queue: cl.CommandQueue) -> None:
    x, one = _tensor(queue, 2, 8, 32, 32, dtype="float32"), _tensor(queue, 8, dtype="float32")
    mean = _tensor(queue, 2, 4, dtype="float32")
    norm_planes.group_norm(x, one, one, 4, eps=1e-5, out_dtype="float32")
    norm_planes.group_norm_backward(
        x, one, x, mean, mean, 4, eps=1e-5, dx_dtype="float32", dgamma_dtype=None, dbeta_dtype=None
    )


def _rows(queue: cl.CommandQueue) -> None:
    for n in (128, 4096):
        x, weight = _tensor(queue, 4, n), _tensor(queue, n, dtype="float32")
        statistics = _tensor(queue, 4, 1, dtype="float32")
        norm_rows.layer_norm(x, weight, weight, eps=1e-5, out_dtype="float16")
        norm_rows.layer_norm_backward(
            x, weight, x, statistics, statistics,
            eps=1e-5, dx_dtype="float16", dgamma_dtype="float32", dbeta_dtype="float32",
        )  # fmt: skip
        softmax_module.softmax(x, out_dtype="float16")
        softmax_module.softmax_backward(x, x, out_dtype="float16")
        reduce_module.reduce_sum(x, 1, out_dtype="float16")
        reduce_module.expand(weight, (4, n), 0, out_dtype="float16")


def _losses(queue: cl.CommandQueue) -> None:
    x, one = _tensor(queue, 4, 1000), _tensor(queue, 1, dtype="float32")
    labels = Tensor.from_host(queue, np.zeros(4, np.int32))
    forward = loss.label_loss(x, labels, -100)
    loss.label_gradient(x, labels, forward, one, "float16")
    loss_elementwise.loss_sum("logit_bce", (x, x))
    loss_elementwise.loss_gradient("logit_bce", (x, x), one, "float16")
    multi_tensor.unscale_([x], [_tensor(queue, 4, 1000, dtype="float32")], one.buffer)


def _statistics(queue: cl.CommandQueue) -> None:
    statistics_module.statistics_of([_tensor(queue, 4, 1000)])


def _numerics(queue: cl.CommandQueue) -> None:
    statistics_module.PendingNumerics([_tensor(queue, 4, 1000)])


def _squares(queue: cl.CommandQueue) -> None:
    ring_buffers.Norms(queue, 1).note(0, [_tensor(queue, 4, 1000)])


def _rows_of_a_table(queue: cl.CommandQueue) -> None:
    elementwise("add", "float16", _tensor(queue, 8, 37), _tensor(queue, 37))


def _gradients_of_gelu(queue: cl.CommandQueue) -> None:
    elementwise("gelu_tanh_grad", "float16", _tensor(queue, 1000), _tensor(queue, 1000))


#: what is called, and kernels that it launches
CASES = [
    (_batch_norm, norm_sets.PLANES_MOMENTS),
    (_batch_norm, norm_sets.PLANES_NORMALIZE),
    (_batch_norm, norm_sets.GRADIENT_SUMS),
    (_batch_norm, norm_sets.PLANES_GRADIENT),
    (_group_norm, norm_sets.PLANES_MOMENTS),
    (_group_norm, norm_sets.PLANES_NORMALIZE),
    (_group_norm, norm_sets.GRADIENT_SUMS),
    (_group_norm, norm_sets.PLANES_GRADIENT),
    (_rows, norm_rows.ROWS_FORWARD),
    (_rows, norm_rows.ROWS_BACKWARD),
    (_rows, softmax_module.SOFTMAX_ROWS),
    (_rows, softmax_module.SOFTMAX_ROWS_BACKWARD),
    (_rows, reduce_module.SUM_ROWS),
    (_rows, reduce_module.EXPAND_COLUMNS),
    (_losses, loss.LABEL_LOSS),
    (_losses, loss.LABEL_GRADIENT),
    (_losses, loss_elementwise.LOSS_SUM),
    (_losses, loss_elementwise.LOSS_GRADIENT),
    (_losses, multi_tensor.UNSCALE),
    (_statistics, statistics_module.STATISTICS),
    (_numerics, statistics_module.NUMERICS),
    (_squares, ring_buffers.SQUARES),
    (_rows_of_a_table, ELEMENTWISE),
    (_gradients_of_gelu, ELEMENTWISE),
]


#: kernels that write a few sums
SUMS = (
    norm_sets.PLANES_MOMENTS, norm_sets.GRADIENT_SUMS, reduce_module.SUM_ROWS, loss.LABEL_LOSS,
    loss_elementwise.LOSS_SUM, statistics_module.STATISTICS, statistics_module.NUMERICS, ring_buffers.SQUARES,
)  # fmt: skip


EACH_CASE = pytest.mark.parametrize(
    ("compute", "kernel"),
    [pytest.param(*case, id=f"{case[0].__name__.strip('_')}-{case[1].name}") for case in CASES],
)


@EACH_CASE
def test_wide_moves_without_a_stack(
    request: pytest.FixtureRequest, queue: cl.CommandQueue, tools: Tools, tmp_path: Path,
    compute: Callable[[cl.CommandQueue], object], kernel: Kernel,
) -> None:  # fmt: skip
    macros = next(macros for built, macros in built_by(queue, compute) if built == kernel)
    words = " ".join(f"{name}={value}" for name, value in sorted(macros.items()))
    given = Given(request.node, kernel, macros)
    if given.was_looked_at():
        return
    for processor in PROCESSORS:
        binary = tmp_path / "kernel.cubin"
        ptx = compiled(tools, tmp_path, kernel, processor, macros)
        said = output_of(tools.ptxas, "-v", "-O3", f"-arch={processor}", "-o", binary, "-e", kernel.name, ptx)
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
        registers = int(re.findall(r"Used (\d+) registers", said)[0])
        code = output_of(tools.cuobjdump, "-sass", "-fun", kernel.name, binary)
        assert registers <= MOST
        allow(f"{kernel.file} {kernel.name}, {words}", processor, registers)
        assert "LDG.E.128" in code
        if kernel not in SUMS:
            assert "STG.E.128" in code
    given.passed()


@EACH_CASE
def test_on_amd(
    request: pytest.FixtureRequest, queue: cl.CommandQueue, tools: Tools, tmp_path: Path,
    compute: Callable[[cl.CommandQueue], object], kernel: Kernel,
) -> None:  # fmt: skip
    if kernel == loss_elementwise.LOSS_GRADIENT:
        pytest.skip("it calls a function of libclc, which keeps an address on the stack")
    macros = next(macros for built, macros in built_by(queue, compute) if built == kernel)
    given = Given(request.node, kernel, macros)
    if given.was_looked_at():
        return
    code = amd_assembly(tools, tmp_path, kernel, "gfx1100", {**macros, "EXCHANGE": "TREE", "ONE_COLUMN": 1})
    assert "global_load_b128" in code
    given.passed()
