"""Capabilities of OpenCL devices, and where to find devices.

Nothing here believes an extension string: NVIDIA's driver computes in half without listing ``cl_khr_fp16``,
and other drivers list what they cannot compile. A capability is what a probe kernel compiled and computed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyopencl as cl

from clamp.interrupts import replacing
from clamp.opencl import amx
from clamp.opencl.host_steps import unrecorded
from clamp.opencl.processor import host_cpu_flags, host_cpu_vendor
from clamp.opencl.program import Kernel, KernelBuildError

HALF_STORAGE = Kernel("probe.cl", "half_storage")
DOT_BF16 = Kernel("probe.cl", "dot_bf16")
GROUP_SUMS = Kernel("probe.cl", "group_sums")

_GROUP = 64  # work-items of a group that sums

_DPAS = "cl_intel_subgroup_matrix_multiply_accumulate"

SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")
_INTEL_ICD = "zz-clamp-intel-cpu.icd"  # ocl-icd lists platforms by file name: drivers already there stay first

NO_DEVICE = """no OpenCL device found. Any one of these gives you one:
  pip install intel-opencl-rt intel-cmplr-lib-rt
                               Intel's CPU runtime (Linux, x86-64), found by clamp without further setup
  apt install pocl-opencl-icd  PoCL, a CPU driver for every architecture (Debian, Ubuntu)
  the driver of your GPU       NVIDIA: part of the driver; AMD: rocm-opencl; Intel: intel-opencl-icd
If a driver is installed, check that OCL_ICD_VENDORS, when set, names a folder with its .icd file."""


class NoDeviceError(RuntimeError):
    """No OpenCL platform offers a device; the message names the ways to get one."""

    def __init__(self) -> None:
        super().__init__(NO_DEVICE)


def intel_cpu_runtime() -> Path | None:
    """Library of Intel's CPU runtime, if pip installed it into this environment (extra ``cpu``)."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    library = Path(sysconfig.get_path("data")) / "lib" / "libintelocl.so"
    return library if library.exists() else None


def make_cpu_runtime_visible() -> None:
    """Lets the OpenCL loader find Intel's pip-installed CPU runtime beside every driver of the system.

    Must run before the first platform query of the process, because the loader looks once: when this module is
    imported. The wheel's own ``.icd`` file holds a path that does not exist, so a folder of our own repeats the
    system's ``.icd`` files and adds a right one. Does nothing without that runtime, or when the user has set
    ``OCL_ICD_VENDORS``.
    """
    library = intel_cpu_runtime()
    if library is None or "OCL_ICD_VENDORS" in os.environ:
        return
    vendors = dict[str, bytes]()  # paths, whose bytes need not be those of a text
    for path in sorted(SYSTEM_VENDORS.glob("*.icd")):
        with suppress(OSError):  # a link that a removed driver has left: the loader passes over it, too
            vendors[path.name] = path.read_bytes()
    if any(os.path.basename(content.strip()) == os.fsencode(library.name) for content in vendors.values()):
        return
    vendors[_INTEL_ICD] = os.fsencode(library) + b"\n"
    os.environ["OCL_ICD_VENDORS"] = str(_write_vendors(vendors))


def _write_vendors(vendors: dict[str, bytes]) -> Path:
    """A folder in the user's cache with these ``.icd`` files; the same files give the same folder."""
    digest = hashlib.sha256(repr(sorted(vendors.items())).encode()).hexdigest()[:16]
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache_home / "clamp" / f"vendors-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written to
        folder = Path(tempfile.mkdtemp(prefix="clamp-vendors-"))
    for name, content in vendors.items():
        file = folder / name
        if not file.exists() or file.read_bytes() != content:
            with replacing(file, "wb") as opened:  # a process starting beside this one never reads half a file
                opened.write(content)
    return folder


make_cpu_runtime_visible()  # whichever of clamp's modules is imported first: before it asks pyopencl for platforms


def list_devices() -> list[cl.Device]:
    """Every OpenCL device of every platform.

    Raises:
        NoDeviceError: there is none.
    """
    try:
        devices = [device for plat in cl.get_platforms() for device in plat.get_devices()]
    except cl.LogicError:  # the loader's way of saying that no platform is there
        devices = []
    if not devices:
        raise NoDeviceError
    return devices


def require_usable(queue: cl.CommandQueue) -> None:
    """Raises for a queue on which nothing could be computed right.

    Raises:
        RuntimeError: its context is gone: Intel's runtime frees one that only its queue refers to. (From the first
            tensor on netcl's memory pool keeps it.)
        RuntimeError: this process was forked, and the device does nothing in it: see ``require_answer``.
        ValueError: it may run its commands in another order than they were given, or its context has another device,
            unlike its own, that is in use.
    """
    try:
        _ = queue.context
    except cl.LogicError as error:
        raise RuntimeError(
            "this queue's OpenCL context is gone: the driver (Intel's, for one) frees a context that only its queue "
            "refers to. Keep it in a variable for as long as the queue is used: context = cl.Context([device]); "
            "queue = cl.CommandQueue(context)"
        ) from error
    if not is_in_order(queue):
        raise ValueError(
            "this queue was made with OUT_OF_ORDER_EXEC_MODE_ENABLE: a launch may run before the one whose result it "
            "reads, and neither netcl nor clamp waits for it, so results would be wrong, or nan, now and then. Make it "
            "without: queue = cl.CommandQueue(context)"
        )
    require_answer(queue)
    if queue.context.num_devices > 1:
        _require_alike(queue)


#: contexts of several devices, kept as netcl's memory pool keeps them, and what kind the first device in use of each is
_in_context: dict[int, tuple[cl.Context, Any]] = {}


def _require_alike(queue: cl.CommandQueue) -> None:
    """Raises ValueError for a device of another kind than the first in use of its context: programs and plans are kept
    by contexts, and would be those of the other."""
    here = _kind_of(queue.device)
    _, first = _in_context.setdefault(queue.context.int_ptr, (queue.context, here))
    if here != first:
        raise ValueError(
            f"this queue's context has unlike devices, and another one than {queue.device.name} is in use in it "
            "already: make a context for each device, context = cl.Context([device])"
        )


def _kind_of(device: cl.Device) -> tuple[Any, ...]:
    return device.name, device.type, device.max_work_group_size, device.local_mem_size


_is_forked = False
#: contexts of a forked process in which a device has done something
_answering: dict[int, cl.Context] = {}
_PATIENCE = 10.0  # seconds: a launch on a device at work elsewhere


def _note_fork() -> None:
    global _is_forked
    _is_forked = True
    _answering.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def require_answer(queue: cl.CommandQueue) -> None:
    """Raises where a device does nothing for a context, as it may in a forked process, and nowhere else; asks it once.

    PoCL's threads are the parent's, from when that asked for platforms: what is launched here waits for ever.

    Raises:
        RuntimeError: a copy has not ended within ten seconds.
    """
    if not _is_forked or (context := queue.context).int_ptr in _answering:
        return
    # In a thread, which may wait for ever; Intel's runtime does the work where somebody waits for it.
    asking = threading.Thread(target=_ask, args=(context, queue.device), daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    if asking.is_alive():
        raise RuntimeError(
            f"{queue.device.platform.name} does nothing in this process, which was forked when its parent had asked "
            "for OpenCL's platforms already (amp.init() does): the driver's threads stayed there. Start processes with "
            'multiprocessing.get_context("spawn"), or fork before anything asks for a device'
        )
    _answering[context.int_ptr] = context


def _ask(context: cl.Context, device: cl.Device) -> None:
    with suppress(cl.Error):  # an answer, too, which whoever uses the device hears as well
        apart = cl.CommandQueue(context, device)  # waits for nothing that the parent has enqueued
        cl.enqueue_copy(apart, bytearray(4), cl.Buffer(context, cl.mem_flags.READ_WRITE, 4))


def is_in_order(queue: cl.CommandQueue) -> bool:
    """Returns whether a queue runs its commands in the order in which they were given, as netcl's launches need it."""
    return not queue.properties & cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE


class Probe:
    """A capability that is found out when somebody asks for it, so that no process compiles what it has no use for.

    Args:
        find: finds it out.
    """

    def __init__(self, find: Callable[[], bool]) -> None:
        self._find = cache(find)

    def __bool__(self) -> bool:
        return self._find()


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of one device, as probed."""

    is_cpu: bool  # kernels that block for caches and vector registers pay off here, local memory does not
    compute_units: int  # how many work-groups run at once
    half_storage: bool  # float16 loads and stores (``vload_half``, ``vstore_half_rte``) compile and round right
    max_parameter_bytes: int  # bytes of kernel arguments a launch can take
    local_memory_bytes: int  # local memory of a work-group
    max_work_group: int  # work-items of a work-group
    float_vector_width: int  # floats in a vector register (16 with AVX-512); 1 where there are none
    dot_bf16: bool | Probe  # the processor's dot product of bfloat16 (AVX512_BF16) compiles and computes right
    # where there is one, it is faster than multiplying floats. AMD's processors run it at the rate of a float's
    # multiply-add, on twice the elements (1.7 to 2 times as fast on a Zen 5, 1.5 to 2 times on a Zen 4). Intel's run
    # it at half that rate: 187 against 281 and 153 against 245 GFLOP/s were measured on two Xeons, one of which hid
    # its matrix units (AMX). The vendor tells, not a timing, because results must not depend on what else the machine
    # was doing.
    fast_dot_bf16: bool
    # streams of addresses by which a work-item of a CPU goes through memory: STREAMS of kernels/slots.clh. Four give
    # Intel's processors 1.2 to 1.4 times the bytes of one (two cores of a Xeon), and a Zen 5 of AMD's 0.5 to 0.8 times.
    streams: int = 1
    # the processor's matrix unit (AMX) multiplies bfloat16, and float16 in two parts, right, in this process
    amx: bool | Probe = False
    amx_fp16: bool | Probe = False  # it multiplies float16 as it is
    # NVIDIA's number (major, minor) for what instructions its GPU has; (0, 0) of other devices
    compute_capability: tuple[int, int] = (0, 0)
    gfx: tuple[int, int] = (0, 0)  # the same of AMD's GPUs, (11, 0) of a gfx1100; (0, 0) of other devices
    dpas: bool = False  # whether an Intel GPU lists its matrix instruction
    exchange: str = "TREE"  # how work-items of a group bring their sums together: EXCHANGE of kernels/group_sum.clh

    @property
    def instructions(self) -> str:
        """Instructions that a GPU has, in its maker's words; nothing of devices that do not say."""
        if self.compute_capability != (0, 0):
            return "compute capability {}.{}".format(*self.compute_capability)
        if self.gfx != (0, 0):
            return "gfx {}.{}".format(*self.gfx)
        return _DPAS if self.dpas else ""


_capabilities: dict[int, Capabilities] = {}


def capabilities(queue: cl.CommandQueue) -> Capabilities:
    """Capabilities of the queue's device; probed once per device."""
    try:  # several times for each launch
        return _capabilities[queue.device.int_ptr]
    except KeyError:
        pass
    with unrecorded():
        found = _capabilities[queue.device.int_ptr] = _probed(queue)
    return found


def _probed(queue: cl.CommandQueue) -> Capabilities:
    device = queue.device
    # A CPU device may call itself a GPU as well (Oclgrind claims every type); it is one of ours only
    # if it is nothing but a CPU.
    is_cpu = device.type & ~cl.device_type.DEFAULT == cl.device_type.CPU
    if is_cpu:
        amx.begin_trials(device)  # beside the probe's build
    # An instruction that the processor lacks would end the process: ask before trying.
    has_dot_bf16 = is_cpu and "avx512_bf16" in host_cpu_flags()
    return Capabilities(
        is_cpu=is_cpu,
        compute_units=device.max_compute_units,
        half_storage=_probe(queue, HALF_STORAGE),
        max_parameter_bytes=device.max_parameter_size,
        local_memory_bytes=device.local_mem_size,
        max_work_group=device.max_work_group_size,
        float_vector_width=device.native_vector_width_float,
        dot_bf16=has_dot_bf16 and Probe(partial(_has_dot_bf16, device)),
        fast_dot_bf16=has_dot_bf16 and host_cpu_vendor() == "AuthenticAMD",
        streams=4 if is_cpu and host_cpu_vendor() == "GenuineIntel" else 1,
        amx=is_cpu and _has_amx(device, "bfloat16"),
        amx_fp16=is_cpu and _has_amx(device, "float16"),
        compute_capability=_compute_capability(device),
        gfx=_gfx(device),
        dpas=_DPAS in device.extensions.split(),
        exchange="TREE" if is_cpu else _exchange(queue),
    )


def _has_dot_bf16(device: cl.Device) -> bool:
    """Returns whether the dot product compiles and computes right; in a context of its own, for nobody's queue is at
    hand."""
    context = cl.Context([device])
    with unrecorded():
        return _probe(cl.CommandQueue(context, device), DOT_BF16)


def _has_amx(device: cl.Device, dtype: str) -> bool | Probe:
    return amx.is_listed(dtype) and Probe(lambda: not amx.why_not(device, dtype))


def _exchange(queue: cl.CommandQueue) -> str:
    """The first way to sum over a work-group, of those that the device's name for itself suggests, that is right."""
    offered = {"cl_khr_subgroups", "cl_intel_subgroups"} & set(queue.device.extensions.split())
    suggested = {"SHUFFLES": _compute_capability(queue.device) != (0, 0), "SUB_GROUPS": bool(offered)}
    ways = (name for name, is_suggested in suggested.items() if is_suggested)
    return next((way for way in ways if _probe(queue, GROUP_SUMS, _GROUP, WG=_GROUP, EXCHANGE=way)), "TREE")


def _compute_capability(device: cl.Device) -> tuple[int, int]:
    """The answer of a device to cl_nv_device_attribute_query; it says nothing of what its compiler takes."""
    if "cl_nv_device_attribute_query" not in device.extensions.split():
        return 0, 0
    try:
        return device.compute_capability_major_nv, device.compute_capability_minor_nv
    except cl.Error:
        return 0, 0


def _gfx(device: cl.Device) -> tuple[int, int]:
    """The version in an AMD device's name, "gfx1100" or "gfx90a:sramecc+"; the last digit tells no instructions."""
    name = re.match(r"gfx(\d+)([0-9a-f])[0-9a-f]\b", device.name)
    return (int(name[1]), int(name[2], 16)) if name and "AMD" in device.platform.name else (0, 0)


def _probe(queue: cl.CommandQueue, kernel: Kernel, group: int = 1, **macros: object) -> bool:
    """Returns whether a kernel of ``probe.cl`` compiles here and sets its flag to 1, in a work-group of so many
    work-items."""
    flag = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 4)
    cl.enqueue_fill_buffer(queue, flag, b"\0\0\0\0", 0, 4)
    scratch = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 4096)
    try:
        kernel(queue, (group,), (group,), scratch, flag, **{f"PROBE_{kernel.name.upper()}": 1}, **macros)
    except (KernelBuildError, cl.Error):
        return False
    result = bytearray(4)
    cl.enqueue_copy(queue, result, flag)
    return int.from_bytes(result, sys.byteorder) == 1


def _is_opencl(queue: Any) -> bool:
    """Returns whether it is no queue of netcl's numpy backend."""
    if isinstance(queue, str | cl.Device | cl.Context):
        raise TypeError(f"pass the queue that the tensors are on, pyopencl.CommandQueue(context), got {queue!r}")
    return hasattr(queue, "device")


def is_float16_supported(queue: cl.CommandQueue) -> bool:
    """Returns whether clamp can store float16 on the queue's device. It needs no ``cl_khr_fp16``.

    Raises:
        TypeError: it is a device, a context or a text.
    """
    return _is_opencl(queue) and capabilities(queue).half_storage


supports_fp16 = is_float16_supported


def is_bfloat16_supported(queue: cl.CommandQueue) -> bool:
    """Returns whether clamp can store bfloat16 on the queue's device: on any OpenCL device.

    Raises:
        TypeError: it is a device, a context or a text.
    """
    return _is_opencl(queue)


def get_amp_supported_dtype(queue: cl.CommandQueue) -> list[str]:
    """The 16-bit AMP dtypes of the queue's device.

    Raises:
        TypeError: it is a device, a context or a text.
    """
    supported = {"float16": is_float16_supported, "bfloat16": is_bfloat16_supported}
    return [dtype for dtype, is_supported in supported.items() if is_supported(queue)]
