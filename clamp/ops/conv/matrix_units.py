"""Convolutions and their gradients on a GPU's matrix units (kernels/matrix_conv_kernel.clh): what the engines have in
common. They read images, weights and gradients in place.

As the engines of products (clamp/ops/gemm/matrix_units.py) they are used only by plans that are verified on the device,
and run in plain C (``emulate``) on any device, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.conv.geometry import Correlation, Pair, TapAxis, Window
from clamp.ops.conv.problem import Problem
from clamp.ops.conv.weights import Weights
from clamp.ops.gemm import matrix_units as products
from clamp.ops.gemm.in_tiles import bind_adding
from clamp.ops.gemm.matrix_units import MatrixUnit
from clamp.ops.gemm.plan import Plan, best_plan, cut, slices_of, tiles_of
from clamp.ops.gemm.problem import Epilogue
from clamp.ops.verified import DeviceMatrix, Verified

Array: TypeAlias = npt.NDArray[Any]

_MOST = 2**31 - 2**12  # positions of a batch, and elements of a tap's offset or of the weights: 32 bits in the kernels
_OUTSIDE = -(2**30)  # a tap that reads nothing
_TABLE_END = 256  # of these behind the table, as in kernels/matrix_conv_kernel.clh
_SHARING = 512  # work-items on a compute unit: loads of one work-group go on while another multiplies


@dataclass(frozen=True)
class MatrixConv(Verified):
    """An engine of convolutions by a matrix instruction."""

    unit: MatrixUnit  # the engine of products by that instruction
    conv: Kernel
    weight_grad: Kernel  # conv, weight_grad: the kernels

    @classmethod
    def by(cls, unit: MatrixUnit, name: str, plans: tuple[Plan, ...] = ()) -> MatrixConv:
        """The engine by the instruction of an engine of products.

        Args:
            name: of what is made, in this module.
            plans: in place of those of products.
        """
        file = unit.kernel.file.replace("gemm", "conv")
        return cls(
            NAME=unit.NAME,
            TAKES=unit.TAKES.replace("products", "convolutions"),
            IN_WORDS=unit.IN_WORDS.replace("tiles in local memory", "images read in place"),
            where=f"{__name__}:{name}",
            plans=plans or unit.plans,
            may_work=unit.may_work,
            unit=unit,
            conv=replace(unit.kernel, file=file, name="conv"),
            weight_grad=replace(unit.kernel, file=file, name="weight_grad"),
        )

    def fits(self, problem: Problem) -> bool:
        """Returns whether what is multiplied is of one 16-bit type, the engine is verified, and the kernels can count
        it."""
        first, second = problem.dtypes
        return (
            self.NAME in problem.verified and first == second and first in self.unit.dtypes and _is_countable(problem)
        )

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Its kernels."""
        return self.conv, self.weight_grad

    def cases(self, plan: Plan) -> Iterator[tuple[str, Pair, Window]]:
        """Small convolutions and their gradients, in each type, with a stride and without."""
        for dtype in self.unit.dtypes:
            yield dtype, (9, 8), Window(pad=(1, 1))
            yield dtype, (8, 8), Window((2, 2), (1, 1), groups=2)

    def computes(self, plan: Plan, queue: cl.CommandQueue, *case: Any) -> bool:
        """Returns whether one of them, with its gradients, comes out right by a plan."""
        dtype, image, window = case
        numbers = np.random.default_rng(0)
        n, c, f = 3, 24, plan.rows // 2 + 8
        x = numbers.integers(-1, 2, (n, c * window.groups, *image))
        w = numbers.integers(-1, 2, (f * window.groups, c, 3, 3))
        grad = numbers.integers(-1, 2, (n, f * window.groups, *window.output(image, (3, 3))))
        out, dx, dw = _with_gradients(x, w, grad, window)
        for gradient, expected in (("", out), ("input", dx), ("weights", dw)):
            problem = Problem(gradient, (dtype, dtype), "float32", n, image, w.shape, window, capabilities(queue))
            found: Any = DeviceMatrix.like(queue, np.full(expected.shape, 99), "float32")
            xs, ws, grads = (DeviceMatrix.like(queue, host, dtype) for host in (x, w, grad))
            if gradient == "weights":
                self.bind_weight_gradient(problem, xs, grads, found, plan)(xs, grads, found)
            else:
                weights = Weights(ws, window.groups, gradient == "input")
                source = grads if gradient else xs
                self.bind(problem, source, weights, found, Epilogue("float32"), plan)(source, ws, found, found)
            if not np.array_equal(found.to_host(), expected):
                return False
        return True

    def bind(
        self, problem: Problem, x: Tensor, weights: Weights, out: Tensor, epilogue: Epilogue, plan: Plan | None = None
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        """Convolutions or input gradients of tensors like these; see `clamp.ops.conv.engines.Binds`.

        Args:
            plan: the best of those that are verified if none is given.
        """
        (shapes, (rows, columns)), groups, layout = problem.correlations, weights.groups, _Weights.of(weights)
        if plan is None:
            plans, units = self.verified_plans(x.queue), capabilities(x.queue).compute_units
            positions = problem.images * shapes[0].positions if shapes else 0  # none of an image without rows
            plan = best_plan(plans, weights.rows, positions, groups, units)
        height, width = problem.image if problem.gradient == "input" else problem.size
        # from one image, channel, row and column of positions to the next, in elements of the result
        steps = weights.rows * groups * height * width, height * width, rows * width, columns
        is_empty = x.size == 0
        image = 0 if is_empty else weights.channels  # one without pixels is all padding: sums of nothing
        kernel, macros = self._built(self.conv, x.dtype, plan)
        launches = []
        for number, shape in enumerate(shapes):
            positions, k = problem.images * shape.positions, image * shape.taps
            if positions * weights.rows * groups == 0:
                continue
            group = weights.channels * shape.source[0] * shape.source[1]
            launch = kernel.bind(
                x.queue, (tiles_of(plan, weights.rows, positions) * groups * plan.threads,), (plan.threads,),
                ..., ..., _taps(x.queue.context, shape, weights.channels, layout), ..., ...,
                weights.rows, k, positions, layout.pitch, layout.group, group,
                shape.y.positions, shape.x.positions, shape.y.staged.stride, shape.x.staged.stride, *shape.source,
                groups * group, number // columns * width + number % columns, *steps, *epilogue.flags,
                CONV=1, TABLE=int(layout.by_table), A_ALIGNED=int(k % 8 == 0), **macros, **epilogue.macros,
            )  # fmt: skip
            launches.append(launch)

        def run(x: Tensor, w: Tensor, out: Tensor, bias: Tensor) -> None:
            source = w if is_empty else x
            for launch in launches:
                launch(x.queue, w.buffer, source.buffer, out.buffer, bias.buffer)

        return run

    def bind_weight_gradient(
        self, problem: Problem, x: Tensor, grad: Tensor, out: Tensor, plan: Plan | None = None, slices: int = 1
    ) -> Callable[[Tensor, Tensor, Tensor], None]:
        """Gradients by the weights of tensors like these, likewise; with a plan in so many slices, whose sums are added
        in their order."""
        shape, groups = problem.forward, problem.window.groups
        positions, columns = problem.images * shape.positions, problem.channels * shape.taps
        if plan is None:
            units = capabilities(x.queue).compute_units
            plan = best_plan(self.verified_plans(x.queue), problem.features, columns, groups, units)
            tiles = tiles_of(plan, problem.features, columns) * groups
            slices = slices_of(tiles, positions, units * max(_SHARING // plan.threads, 1))
        each, slices = cut(positions, slices, plan.k)
        sums_dtype = out.dtype if slices == 1 else "float32"
        group = problem.channels * shape.source[0] * shape.source[1]
        kernel, macros = self._built(self.weight_grad, x.dtype, plan)
        launch = kernel.bind(
            x.queue, (tiles_of(plan, problem.features, columns) * groups * slices * plan.threads,), (plan.threads,),
            ..., ..., _taps(x.queue.context, shape, problem.channels, _Weights()), ...,
            problem.features, columns, positions, groups * problem.features * shape.positions, group,
            shape.y.positions, shape.x.positions, shape.y.staged.stride, shape.x.staged.stride, *shape.source,
            groups * group, each, slices,
            WEIGHT_GRAD=1, A_ALIGNED=int(shape.positions % 8 == 0), **macros, **Epilogue(sums_dtype).macros,
        )  # fmt: skip
        add = None
        if slices > 1:
            add = bind_adding(out, problem.features * columns, columns, slices, Epilogue(out.dtype))

        def run(x: Tensor, grad: Tensor, out: Tensor) -> None:
            sums = out if add is None else bridge.empty(out.queue, (slices * out.size,), sums_dtype)
            launch(x.queue, grad.buffer, x.buffer, sums.buffer)
            if add is not None:
                add(out.queue, sums.buffer, out.buffer, out.buffer)

        return run

    def _built(self, kernel: Kernel, dtype: str, plan: Plan) -> tuple[Kernel, dict[str, Any]]:
        """The kernel, and macros that say what it multiplies, and how."""
        how = {"IN_T": bridge.STORAGE[dtype], "FULL": 0, "EMULATE": self.emulate}
        return kernel.in_plain_c if self.emulate else kernel, {**how, **plan.macros, **dict(self.unit.options)}


def _is_countable(problem: Problem) -> bool:
    """Returns whether 32 bits number all positions of a batch, what a tap may be away from one, and the weights."""
    size, image = problem.size, problem.image
    pixels = max(size[0] * size[1], image[0] * image[1])
    largest = max(problem.images * pixels, max(problem.channels, problem.features) * pixels, prod(problem.weights))
    return largest < _MOST


@dataclass(frozen=True)
class _Weights:
    """Layout of weights: element (m, k) of a group at m * pitch + k, or + what the table says for k."""

    by_table: bool = False
    pitch: int = 0
    group: int = 0
    channel: int = 0  # from one channel that is summed over to the next, for the table
    columns: int = 0  # of the kernel

    @classmethod
    def of(cls, weights: Weights) -> _Weights:
        rows, columns = weights.tensor.shape[2:]
        taps = rows * columns
        if not weights.transposed:
            pitch = weights.channels * taps
            return cls(False, pitch, weights.rows * pitch)
        return cls(True, taps, weights.channels * weights.rows * taps, weights.rows * taps, columns)


@lru_cache(maxsize=128)  # of up to some 100 KB
def _taps(context: cl.Context, shape: Correlation, channels: int, layout: _Weights) -> cl.Buffer:
    """The table of a correlation: for each step (channel, tap) where its plane lies, and how many rows and columns from
    a position it reads; steps that read nothing, as many as the widest tile may need; and where each step's weight
    lies."""
    y, x = _reads(shape.y), _reads(shape.x)
    steps = channels * y.size * x.size
    table = np.full((steps + _TABLE_END, 4), (0, _OUTSIDE, _OUTSIDE, 0), np.int32)
    planes, extents = np.arange(channels)[:, None, None], (channels, y.size, x.size)
    parts = planes * shape.source[0] * shape.source[1], y[:, None], x
    table[:steps, :3] = np.stack([np.broadcast_to(part, extents).reshape(-1) for part in parts], axis=1)
    weights = np.zeros(steps + _TABLE_END, np.int32)
    weights[:steps] = (planes * layout.channel + _elements(shape.y)[:, None] * layout.columns + _elements(shape.x)).flat
    content = np.concatenate([table.reshape(-1), weights])
    return cl.Buffer(context, cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR, hostbuf=content)


def _reads(axis: TapAxis) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns where each tap of the first position reads; negative before the source."""
    taps = axis.taps
    return taps.source + np.arange(taps.count) * taps.source_step - axis.staged.pad


def _elements(axis: TapAxis) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The kernel element of each tap."""
    return axis.taps.first + np.arange(axis.taps.count) * axis.taps.step


def _with_gradients(x: Array, w: Array, grad: Array, window: Window) -> tuple[Array, Array, Array]:
    """A 3x3 convolution of integers, and its gradients by both operands, a tap at a time."""
    (ph, pw), (sh, sw), groups = window.pad, window.stride, window.groups
    n, rows, columns = x.shape[0], *grad.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    padded = padded.reshape(n, groups, -1, *padded.shape[2:])
    kernels, slopes = w.reshape(groups, -1, *w.shape[1:]), grad.reshape(n, groups, -1, rows, columns)
    out, dpadded, dw = np.zeros_like(slopes), np.zeros_like(padded), np.zeros_like(kernels)
    for i, j in product(range(3), range(3)):
        window_of_tap = np.s_[:, :, :, i : i + (rows - 1) * sh + 1 : sh, j : j + (columns - 1) * sw + 1 : sw]
        out += np.einsum("gfc,ngcyx->ngfyx", kernels[..., i, j], padded[window_of_tap])
        dpadded[window_of_tap] += np.einsum("gfc,ngfyx->ngcyx", kernels[..., i, j], slopes)
        dw[..., i, j] = np.einsum("ngfyx,ngcyx->gfc", slopes, padded[window_of_tap])
    inside = dpadded[..., ph : ph + x.shape[2], pw : pw + x.shape[3]]
    return out.reshape(grad.shape), inside.reshape(x.shape), dw.reshape(w.shape)


# ------------------------------------------------------------------------------------------- one entry an instruction


# On NVIDIA's GPUs smaller tiles than for products: a table lies in local memory beside them.
_MMA_PLANS = Plan(128, 128, 32, 2, (2, 4)), Plan(64, 64, 32, 3, (2, 2))
_WGMMA_PLANS = Plan(128, 128, 64, 3, (8, 1)), Plan(64, 64, 64, 3, (4, 1))

MMA = MatrixConv.by(products.MMA, "MMA", _MMA_PLANS)
MMA_K8 = MatrixConv.by(products.MMA_K8, "MMA_K8", _MMA_PLANS)
WGMMA = MatrixConv.by(products.WGMMA, "WGMMA", _WGMMA_PLANS)
RDNA3 = MatrixConv.by(products.RDNA3, "RDNA3")
RDNA4 = MatrixConv.by(products.RDNA4, "RDNA4")
DPAS_8 = MatrixConv.by(products.DPAS_8, "DPAS_8")
DPAS_16 = MatrixConv.by(products.DPAS_16, "DPAS_16")

#: in the order in which they are preferred
MATRIX_UNITS = (WGMMA, MMA, MMA_K8, RDNA3, RDNA4, DPAS_8, DPAS_16)

#: of these: `python -m clamp lists` finds kernels among a module's names
KERNELS = tuple(kernel for unit in MATRIX_UNITS for kernel in unit.kernels)
