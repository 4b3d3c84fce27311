"""What netcl would find out about a device by running kernels on it."""

from __future__ import annotations

import pyopencl as cl
import pytest
from netcl.core import capabilities as netcls

from clamp import amp
from clamp.opencl.device import capabilities


@pytest.fixture
def unknown(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """netcl has not looked at the queue's device yet; what it knew is there again after the test."""
    monkeypatch.setattr(netcls, "_CAPS_CACHE", {})


def test_netcl_knows_of_a_device_under_amp_what_it_knows_without(queue: cl.CommandQueue, unknown: None) -> None:
    alone = netcls.get_device_capabilities(queue)
    netcls.invalidate_capabilities(queue)
    with amp.init():
        assert netcls.get_device_capabilities(queue) == alone
    assert alone.inter_kernel_sync != "finish", "what netcl says where its look fails"


def test_nothing_is_compiled_to_look_at_a_processor(
    queue: cl.CommandQueue, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    build = cl.Program.build
    monkeypatch.setattr(
        cl.Program, "build", lambda self, *args, **kwargs: built.append(1) or build(self, *args, **kwargs)
    )
    with amp.init():
        netcls.get_device_capabilities(queue)
    assert bool(built) is not capabilities(queue).is_cpu
