"""``python -m clamp doctor``: what clamp finds on this machine, whether it computes right there, and what AMP gains."""

from __future__ import annotations

import os
import platform
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyopencl as cl
from netcl.core.device import manager

import clamp
from clamp import amp, bridge
from clamp.bridge import Tensor
from clamp.cli.bench.timing import Effort, interleave, timed
from clamp.cli.devices import choose_device, describe, is_simulator
from clamp.opencl import amx, cache_writer
from clamp.opencl.device import NoDeviceError, capabilities, intel_cpu_runtime, is_in_order, list_devices
from clamp.opencl.trials import RIGHT
from clamp.ops import attention
from clamp.ops.cast import cast
from clamp.ops.conv import engines as convolutions
from clamp.ops.elementwise import elementwise
from clamp.ops.gemm import gemm
from clamp.ops.gemm.engines import MATRIX_UNITS, usual
from clamp.ops.gemm.matrix_units import MatrixUnit
from clamp.ops.gemm.plan import Plan
from clamp.ops.gemm.problem import Epilogue, operand_a, operand_b

_TIMED = 4096  # rows, columns and k of a product on matrix units
_M, _N, _K = 33, 17, 40  # no multiples of a tile: the edges are checked, too
_PRECISIONS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # steps at 1
_SECONDS = 2.0  # that all devices may take together to see what is gained, but for building kernels
_SIDE = {True: 512, False: 4096}  # of matrices, on CPUs and elsewhere
_ELEMENTS = {True: 1 << 21, False: 1 << 25}

Gains = Mapping[str, tuple[float, float]]  # by dtype: how many times as fast as float32 are products, and sums


def run(args: Namespace) -> int:
    """Runs the command; see `clamp.cli`."""
    names = ("netcl", "pyopencl", "numpy")
    print(f"clamp {clamp.__version__}, python {platform.python_version()}, ", end="")
    print(", ".join(f"{name} {version(name)}" for name in names))
    print(f"OCL_ICD_VENDORS  {_vendors()}")
    try:
        devices = list_devices()
        chosen = devices if args.device is None else [choose_device(args.device)]
    except NoDeviceError as error:
        print(f"\n{error}")
        return 1
    default = manager.default()
    failures = 0
    for index, device in enumerate(devices):
        if device not in chosen:
            continue
        is_default = default is not None and default.queue.device == device
        print(f"\n{index}: {describe(device)}{'  (what netcl picks)' if is_default else ''}")
        for label, text in _facts(device):
            print(f"  {label:<16} {text}")
        problem = self_check(device)
        failures += bool(problem)
        print(f"  {'self-check':<16} {f'FAILED: {problem}' if problem else 'ok: products and casts agree with numpy'}")
    count = f"{len(chosen)} device{'s' * (len(chosen) != 1)}"
    print(f"\n{count}, {f'{failures} failed' if failures else 'all well'}")
    for device in chosen:
        print(sentence(device, _SECONDS / len(chosen)))
    return 1 if failures else 0


def _vendors() -> str:
    """Returns where the OpenCL loader looks for drivers, and who told it so."""
    folder = os.environ.get("OCL_ICD_VENDORS")
    if folder is None:
        note = "" if intel_cpu_runtime() is None else " (Intel's CPU runtime is registered there)"
        return f"not set: drivers of the system{note}"
    path = Path(folder)
    by_clamp = f"{path.parent.name}/{path.name}".startswith("clamp/vendors-") or path.name.startswith("clamp-vendors-")
    return f"{folder} (set by {'clamp, which adds the pip-installed CPU runtime' if by_clamp else 'you'})"


def _facts(device: cl.Device) -> Iterator[tuple[str, str]]:
    yield "driver", f"{device.driver_version.strip()}, {device.platform.version.strip()}"
    if is_simulator(device):
        yield "note", "a simulator: right, but slow"
    try:
        context = cl.Context([device])
        queue = cl.CommandQueue(context, device)
        found = capabilities(queue)
        dtypes = ", ".join(amp.get_amp_supported_dtype(queue))
        kernels = ", ".join(f"{dtype} {usual(queue, dtype).NAME}" for dtype in _PRECISIONS)
        matrix_units = list(_matrix_units(queue))
    except Exception as error:  # a driver in any state must not keep doctor from the next one
        yield "unusable", f"{type(error).__name__}: {error}"
        return
    yield "kind", f"{'CPU' if found.is_cpu else 'GPU or other'}, {found.compute_units} compute units"
    yield "AMP dtypes", dtypes
    yield "half storage", "yes" if found.half_storage else "no: kernels that load and store float16 fail here"
    yield "cl_khr_fp16", "listed" if "cl_khr_fp16" in device.extensions else "not listed (clamp does not need it)"
    yield "GEMM kernel", kernels
    yield from matrix_units
    if found.is_cpu and amx.is_listed("bfloat16"):
        missing = amx.why_not(device, "bfloat16", anew=True)
        yield "AMX", f"NOT used: {missing}" if missing else "right"
    yield "vector width", f"{found.float_vector_width} floats"
    yield "work-group", f"up to {found.max_work_group} work-items, {found.local_memory_bytes // 1024} KiB local memory"
    yield "context", _fate_of_a_context(device)
    yield "queue", _order(device)
    yield "arguments", f"up to {found.max_parameter_bytes} bytes a launch"
    yield "extensions", device.extensions.strip()


def _order(device: cl.Device) -> str:
    """Returns which queues of a device can be used, and whether netcl's own is one of them."""
    default = manager.default()
    if default is not None and default.queue.device == device and not is_in_order(default.queue):
        return "netcl's own runs OUT OF ORDER, which gives wrong results: pass queues made by cl.CommandQueue(context)"
    offers = device.queue_properties & cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
    return f"in order{'; one made with OUT_OF_ORDER_EXEC_MODE_ENABLE is refused' if offers else ''}"


def _fate_of_a_context(device: cl.Device) -> str:
    """Returns whether a queue keeps its context alive, tried in a process of its own: a driver may do more than
    refuse."""
    command = cache_writer.command(__name__, "drop_a_context", cache_writer.place_of(device))
    _, error = cache_writer.outcome(command, cache_writer.environment())
    if not error:
        return "kept alive by its queues"
    return f"NOT kept alive by its queues: hold on to it in a variable of your own ({error.rpartition(': ')[2]})"


def drop_a_context() -> None:
    """Uses a queue whose context nobody else holds."""
    device = cache_writer.device_at(cache_writer.given())
    queue = cl.CommandQueue(cl.Context([device]), device)
    cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 4)


def _matrix_units(queue: cl.CommandQueue) -> Iterator[tuple[str, str]]:
    """Returns what became of the engines that must be verified, on a GPU that says what instructions it has."""
    found = capabilities(queue)
    if not found.instructions:
        return
    yield "matrix units", found.instructions
    kinds = {"": MATRIX_UNITS, " conv": convolutions.MATRIX_UNITS, " attention": attention.MATRIX_UNITS}
    elsewhere = [unit.NAME for unit in MATRIX_UNITS if not unit.may_work(found)]
    if elsewhere:
        yield "  of others", ", ".join(elsewhere)
    for kind, unit in ((kind, unit) for kind, units in kinds.items() for unit in units if unit.may_work(found)):
        verdicts = unit.verdicts(queue, anew=True)
        used = "and used" if unit.is_verified(queue) else "but NOT used without the others"
        for plan in unit.plans:
            verdict = verdicts.get(str(plan), "could not be tried")
            words = f"right, {used}" if verdict == RIGHT else f"NOT used: {verdict}"
            if verdict == RIGHT and isinstance(unit, MatrixUnit):
                words = f"right, {_tflops(queue, unit, plan):.3g} TFLOP/s"
            yield f"  {unit.NAME}{kind}", f"{plan}: {words}"


def _tflops(queue: cl.CommandQueue, unit: MatrixUnit, plan: Plan) -> float:
    """Multiply-adds of a large product in float16, as two operations each: the fastest of a few, a launch included."""
    a, b, c = (bridge.zeros(queue, (_TIMED, _TIMED), "float16") for _ in range(3))
    product = partial(unit.compute, operand_a(a, False), operand_b(b, False), c, Epilogue("float16"), plan)
    return 2 * _TIMED**3 / min(timed(product, queue.finish)(3)) / 1e12


def self_check(device: cl.Device) -> str:
    """Compares one small product and the casts of each dtype with numpy; returns what is wrong, or nothing."""
    try:
        context = cl.Context([device])
        queue = cl.CommandQueue(context, device)
        return next(filter(None, (_check_dtype(queue, *of_dtype) for of_dtype in _PRECISIONS.items())), "")
    except Exception as error:  # as above
        return f"{type(error).__name__}: {error}"


def _check_dtype(queue: cl.CommandQueue, dtype: str, epsilon: float) -> str:
    rng = np.random.default_rng(0)
    tensors, values = [], []
    for shape in ((_M, _K), (_K, _N)):
        host = rng.standard_normal(shape, dtype=np.float32)
        tensor = cast(Tensor.from_host(queue, host), dtype)
        value = cast(tensor, "float32").to_host()
        if not np.all(np.abs(value - host) <= epsilon / 2 * np.abs(host)):
            return f"a cast to {dtype} and back is off by up to {np.max(np.abs(value - host)):g}"
        tensors.append(tensor)
        values.append(value.astype(np.float64))
    product = cast(gemm(*tensors, out_dtype=dtype), "float32").to_host()
    exact = values[0] @ values[1]
    # rounding of the result, and of the sums in float32
    allowed = epsilon * np.abs(exact) + _K * 2.0**-24 * (np.abs(values[0]) @ np.abs(values[1]))
    error = np.abs(product - exact)
    return "" if np.all(error <= allowed) else f"a product in {dtype} is off by up to {error.max():g}"


# ---------------------------------------------------------------------------------------------- what AMP gains


def gains_of(device: cl.Device, seconds: float) -> Gains:
    """Returns how many times as fast as in float32 16 bits are on a device, in so many seconds, about.

    Raises:
        RuntimeError: a kernel failed there.
    """
    context = cl.Context([device])
    queue = cl.CommandQueue(context, device)
    is_cpu = capabilities(queue).is_cpu
    host = np.random.default_rng(0).standard_normal(_ELEMENTS[is_cpu], dtype=np.float32)
    side = _SIDE[is_cpu]
    calls = {}
    for dtype in _PRECISIONS:
        x, matrix = (
            cast(Tensor.from_host(queue, values), dtype) for values in (host, host[: side**2].reshape(side, side))
        )
        calls["product", dtype] = partial(gemm, matrix, matrix, out_dtype=dtype)
        calls["sum", dtype] = partial(elementwise, "add", dtype, x, x)
    each = seconds / len(calls) / 2  # the other half is for warming up, and for the first calls
    turns = {f"{work} {dtype}": timed(call, queue.finish) for (work, dtype), call in calls.items()}
    race = interleave(turns, Effort(rounds=4, seconds=each, least=1, most=12, patience=each))
    for name, why in race.failures.items():
        raise RuntimeError(f"a {name.replace(' ', ' in ')} failed: {why}")
    best = {name: min(taken) for name, taken in race.seconds.items()}

    def gain(work: str, dtype: str) -> float:
        return best[f"{work} float32"] / best[f"{work} {dtype}"]

    return {dtype: (gain("product", dtype), gain("sum", dtype)) for dtype in list(_PRECISIONS)[1:]}


def sentence(device: cl.Device, seconds: float) -> str:
    """Returns what AMP gains on a device, or why that is not known."""
    if is_simulator(device):
        return f"{describe(device)}: a simulator, on which nothing is gained."
    try:
        return in_words(describe(device), gains_of(device, seconds))
    except Exception as error:  # a driver in any state must not keep doctor from the next one
        return f"{describe(device)}: what AMP gains could not be measured: {error}"


def in_words(name: str, gains: Gains) -> str:
    """The sentence about a device of this name."""
    parts = [
        f"{dtype} multiplies matrices {product:.2f}x and adds {add:.2f}x as fast as float32"
        for dtype, (product, add) in gains.items()
    ]
    fastest = max(number for pair in gains.values() for number in pair)
    gained = "time and memory" if fastest >= 1.1 else "memory, and no time"
    return f"{name}: AMP gains {gained}: {', '.join(parts)}; activations take half the bytes in both."
