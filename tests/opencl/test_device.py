"""Finding a device: Intel's pip-installed runtime beside the system's drivers, or an error that says what to do."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core.device import CPUQueue

from clamp import amp
from clamp.bridge import Tensor
from clamp.opencl import device
from clamp.opencl.device import NoDeviceError, capabilities, list_devices, make_cpu_runtime_visible
from clamp.opencl.program import Kernel
from tests.mutants import write_wrong
from tests.scripts import run_script

_DRIVER = b"/opt/caf\xe9/libdriver.so\n"  # a path, of bytes that are no UTF-8


@pytest.fixture
def vendors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with one driver and Intel's runtime from pip."""
    folder = tmp_path / "system"
    folder.mkdir()
    (folder / "driver.icd").write_bytes(_DRIVER)
    (folder / "removed.icd").symlink_to("/opt/removed/driver.icd")
    monkeypatch.setattr(device, "SYSTEM_VENDORS", folder)
    monkeypatch.setattr(device, "intel_cpu_runtime", lambda: Path("/env/lib/libintelocl.so"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OCL_ICD_VENDORS", raising=False)
    return folder


def test_intels_runtime_joins_the_drivers_that_are_there(vendors: Path) -> None:
    make_cpu_runtime_visible()
    folder = Path(os.environ["OCL_ICD_VENDORS"])
    contents = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert contents.pop("driver.icd") == _DRIVER
    assert list(contents.values()) == [b"/env/lib/libintelocl.so\n"]
    assert sorted([*contents, "driver.icd"])[0] == "driver.icd", "the system's own drivers stay first"


def test_the_users_own_setting_is_left_alone(vendors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCL_ICD_VENDORS", "/my/vendors")
    make_cpu_runtime_visible()
    assert os.environ["OCL_ICD_VENDORS"] == "/my/vendors"


def test_nothing_to_add(vendors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (vendors / "intel.icd").write_text("/opt/intel/libintelocl.so")
    make_cpu_runtime_visible()
    assert "OCL_ICD_VENDORS" not in os.environ, "the system knows Intel's runtime itself"
    (vendors / "intel.icd").unlink()
    monkeypatch.setattr(device, "intel_cpu_runtime", lambda: None)
    make_cpu_runtime_visible()
    assert "OCL_ICD_VENDORS" not in os.environ


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(
    vendors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make_cpu_runtime_visible()
    assert (Path(os.environ["OCL_ICD_VENDORS"]) / "driver.icd").exists()


def test_no_device_names_the_ways_to_get_one(tmp_path: Path) -> None:
    script = "from clamp import amp; amp.init()"
    environment = {**os.environ, "OCL_ICD_VENDORS": str(tmp_path), "PYOPENCL_HOME": str(tmp_path)}
    # a driver that pip put beside pyopencl would still be found, so platforms are asked for through clamp alone
    script = f"import pyopencl as cl; cl.get_platforms = lambda: []; {script}"
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    for way in ("pip install intel-opencl-rt", "pocl-opencl-icd", "OCL_ICD_VENDORS", "GPU"):
        assert way in run.stderr
    assert issubclass(NoDeviceError, RuntimeError)


def test_capabilities_are_probed_once(queue: cl.CommandQueue) -> None:
    found = capabilities(queue)
    assert found is capabilities(queue)
    assert found.half_storage
    assert found.compute_units >= 1
    assert queue.device in list_devices()
    if queue.device.platform.name == "Intel(R) OpenCL":  # whose compiler knows the instruction
        assert bool(found.dot_bf16) == ("avx512_bf16" in device.host_cpu_flags()), "it is there, and nobody uses it"


@pytest.mark.parametrize(("vendor", "is_fast"), [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)])
@pytest.mark.parametrize("works", [True, False])
def test_the_dot_product_of_bfloat16_is_tried_and_fast_by_vendor(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, vendor: str, is_fast: bool, works: bool
) -> None:
    monkeypatch.setattr(device, "host_cpu_vendor", lambda: vendor)
    monkeypatch.setattr(device, "host_cpu_flags", lambda: frozenset({"avx512_bf16"}))
    tried: list[str] = []

    def probe(queue: cl.CommandQueue, kernel: Kernel, group: int = 1, **macros: object) -> bool:
        tried.append(kernel.name)
        return works

    monkeypatch.setattr(device, "_probe", probe)
    found = device._probed(queue)
    assert "dot_bf16" not in tried, "nobody has asked for it"
    for _ in range(2):
        assert bool(found.dot_bf16) == (found.is_cpu and works)
    assert tried.count("dot_bf16") == found.is_cpu
    assert found.fast_dot_bf16 == (found.is_cpu and is_fast)
    assert found.streams == (4 if found.is_cpu and vendor == "GenuineIntel" else 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('"4*" #i "(%[a_step])"', '"(%[a_step])"', id="a row of a panel"),
        pytest.param('"(%[row8],%[a_row],2)"', '"(%[row8],%[a_row])"', id="a row of a tile"),
        pytest.param('LINE("addq %[row0], " FRAME_A)', "", id="the next rows of a tile"),
        pytest.param('LINE("addq " FRAME_TO_NEXT_STEP ", %[row4]")', "", id="the next step of a tile"),
        pytest.param('"imulq $" #HEIGHT', '"imulq $8"', id="the height of a tile's rows"),
    ],
)
@pytest.mark.once
def test_a_dot_product_of_wrong_numbers_is_not_used(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    if not capabilities(queue).dot_bf16:
        pytest.skip("no bfloat16 dot product here")
    write_wrong(monkeypatch, device.DOT_BF16.file, old, new)
    assert not device._has_dot_bf16(queue.device)


def test_an_instruction_that_the_processor_lacks_is_not_tried(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(device, "host_cpu_flags", frozenset)
    monkeypatch.setattr(device, "_probe", lambda queue, kernel: not tried.append(kernel.name))
    assert not device._probed(queue).dot_bf16
    assert tried == ["half_storage"]


def test_compute_capability_is_what_the_driver_answers(queue: cl.CommandQueue) -> None:
    is_nvidia = "NVIDIA" in queue.device.platform.name
    assert (capabilities(queue).compute_capability > (0, 0)) == is_nvidia
    asked = {"extensions": "cl_khr_icd cl_nv_device_attribute_query", "compute_capability_major_nv": 9}
    assert device._compute_capability(SimpleNamespace(**asked, compute_capability_minor_nv=0)) == (9, 0)
    assert device._compute_capability(SimpleNamespace(extensions="cl_khr_icd")) == (0, 0)


def test_a_driver_that_lists_the_question_and_refuses_it_has_no_compute_capability() -> None:
    refusing = mock.Mock(extensions="cl_nv_device_attribute_query")
    type(refusing).compute_capability_major_nv = mock.PropertyMock(side_effect=cl.LogicError("INVALID_VALUE"))
    assert device._compute_capability(refusing) == (0, 0)


@pytest.mark.parametrize(
    ("name", "platform", "number", "words"),
    [
        ("gfx1100", "AMD Accelerated Parallel Processing", (11, 0), "gfx 11.0"),
        ("gfx1151", "AMD Accelerated Parallel Processing", (11, 5), "gfx 11.5"),
        ("gfx90a:sramecc+:xnack-", "AMD Accelerated Parallel Processing", (9, 0), "gfx 9.0"),
        ("gfx1100", "Portable Computing Language", (0, 0), ""),
        ("AMD EPYC 9B14", "AMD Accelerated Parallel Processing", (0, 0), ""),
    ],
)
def test_the_name_of_an_amd_gpu_tells_its_instructions(
    queue: cl.CommandQueue, name: str, platform: str, number: tuple[int, int], words: str
) -> None:
    found = device._gfx(SimpleNamespace(name=name, platform=SimpleNamespace(name=platform)))
    assert found == number
    assert replace(capabilities(queue), gfx=found).instructions == words


def test_16_bit_storage_needs_no_extension(queue: cl.CommandQueue) -> None:
    assert amp.is_float16_supported(queue)
    assert amp.supports_fp16(queue)
    assert amp.is_bfloat16_supported(queue)
    assert amp.get_amp_supported_dtype(queue) == ["float16", "bfloat16"]
    assert not amp.is_float16_supported(CPUQueue())
    assert not amp.is_bfloat16_supported(CPUQueue())


def test_a_context_that_is_gone_is_named(queue: cl.CommandQueue) -> None:
    gone = mock.Mock(spec=cl.CommandQueue)
    type(gone).context = mock.PropertyMock(side_effect=cl.LogicError("clRetainContext failed: INVALID_CONTEXT"))
    for make, given in ((Tensor.from_host, np.ones(3, np.float32)), (Tensor.from_shape, (3,))):
        with amp.init(), pytest.raises(RuntimeError, match=r"context is gone.*context = cl\.Context"):
            make(gone, given)


OUT_OF_ORDER = cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
FIRST_MEETINGS: dict[str, Callable[[cl.CommandQueue, Tensor], Any]] = {
    "from_host": lambda queue, x: Tensor.from_host(queue, np.ones(3, np.float32)),
    "from_shape": lambda queue, x: Tensor.from_shape(queue, (3,)),
    "an op": lambda queue, x: ag.mul(x, 2.0),
    "an op of nodes": lambda queue, x: ag.sum(ag.relu(ag.tensor(x))),
    "a cast": lambda queue, x: amp.cast(x, "float16"),
    "a scaled loss": lambda queue, x: amp.GradScaler().scale(ag.tensor(x)),
}


@pytest.mark.parametrize("has_handle", [True, False])
def test_a_queue_that_runs_out_of_order_is_refused(queue: cl.CommandQueue, has_handle: bool) -> None:
    if not queue.device.queue_properties & OUT_OF_ORDER:
        pytest.skip("the driver makes no such queues")
    other = cl.CommandQueue(queue.context, queue.device, properties=OUT_OF_ORDER)
    before = Tensor.from_host(other, np.ones(1, np.float32))  # netcl's own, without AMP
    with amp.init() if has_handle else amp.autocast():
        for meet in FIRST_MEETINGS.values():
            with pytest.raises(ValueError, match=r"OUT_OF_ORDER.*queue = cl\.CommandQueue\(context\)"):
                meet(other, before)
            assert ag.mul(Tensor.from_host(queue, np.ones(1, np.float32)), 2.0).to_host() == 2


def test_unlike_devices_of_one_context_are_refused(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        parts = queue.device.create_sub_devices([cl.device_partition_property.EQUALLY, 1])
        context = cl.Context(parts)
    except cl.Error:
        pytest.skip("the driver divides no device")
    if len(context.devices) < 2:
        pytest.skip("the driver makes no context of two parts of a device")
    first, second, *_ = (cl.CommandQueue(context, part) for part in parts)
    x = np.ones(3, np.float32)
    before = Tensor.from_host(second, x)  # netcl's own, without AMP
    with amp.init():
        for each in (first, second, first):
            assert (ag.mul(Tensor.from_host(each, x), 2.0).to_host() == 2).all()
        known = device._kind_of(first.device)
        monkeypatch.setattr(device, "_kind_of", lambda one: known if one == first.device else ("a GPU", *known[1:]))
        for meet in FIRST_MEETINGS.values():
            assert (ag.mul(Tensor.from_host(first, x), 2.0).to_host() == 2).all()
            with pytest.raises(ValueError, match=r"unlike devices.*make a context for each device"):
                meet(second, before)


def test_a_queue_that_lost_its_context_says_so_or_works(queue: cl.CommandQueue) -> None:
    """In a process of its own: what a driver does with a context that it has freed is its own affair."""
    script = """if True:
        import sys
        import clamp, numpy as np, pyopencl as cl
        from clamp import amp
        from netcl.core.tensor import Tensor
        device = next(device for platform in cl.get_platforms() if platform.name == sys.argv[1]
                      for device in platform.get_devices())
        queue = cl.CommandQueue(cl.Context([device]), device)
        amp.init()
        print(Tensor.from_host(queue, np.ones(3, np.float32)).to_host())
    """
    name = queue.device.platform.name
    done = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True)
    if "Intel" in name:
        assert "RuntimeError: this queue's OpenCL context is gone" in done.stderr
    else:
        assert "[1. 1. 1.]" in done.stdout


#: what a process does first that was forked when its parent was at work
FORKED = """if True:
    import os, signal, sys
    import numpy as np, pyopencl as cl
    from clamp import amp
    from clamp.opencl import device
    from netcl import autograd as ag
    from netcl.core.tensor import Tensor
    from netcl.nn.layers import Linear
    from netcl.optim import SGD

    device._PATIENCE = 2.0
    context = cl.create_some_context(interactive=False)
    queue = cl.CommandQueue(context)
    handle = amp.init()
    numbers = np.arange(8, dtype=np.float32).reshape(2, 4)
    x, layer = Tensor.from_host(queue, numbers), Linear(queue, 4, 3)
    optimizer = SGD(layer.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        with handle.scale_loss(ag.sum(layer(ag.tensor(x))), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    def elsewhere():
        context = cl.Context(queue.context.devices)
        Linear(cl.CommandQueue(context), 4, 3)

    step()
    first = {
        "reads a tensor": lambda: np.array_equal(x.to_host(), numbers),
        "makes a tensor": lambda: np.array_equal(Tensor.from_host(queue, numbers).to_host(), numbers),
        "makes a layer in a new context": elsewhere,
        "prints the handle": lambda: "1 step" in str(handle),
        "trains": lambda: (step(), queue.finish())[1],
    }
    pids = {}
    for name, run in first.items():
        pid = os.fork()
        if pid:
            pids[name] = pid
            continue
        signal.alarm(60)  # it hangs
        try:
            os._exit(0 if run() in (None, True) else 3)
        except RuntimeError as error:
            os._exit(0 if "does nothing in this process, which was forked" in str(error) else 4)
        except BaseException:
            os._exit(5)
    ends = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in pids.items()}
    step()
    print(ends)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_forked_process_computes_or_says_why_not(queue: cl.CommandQueue) -> None:
    """PoCL's threads stay with the parent: a child would wait for them for ever."""
    assert set(ast.literal_eval(run_script(queue, "-c", FORKED)).values()) == {0}


def test_a_device_that_answers_with_an_error_is_left_to_who_uses_it(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_answering", {})
    monkeypatch.setattr(device, "_is_forked", True)
    monkeypatch.setattr(cl, "enqueue_copy", Mock(side_effect=cl.LogicError("the context is the parent's")))
    device.require_answer(queue)  # and no traceback out of a thread, which pytest would raise
