"""Two kinds of plan: how a device is launched on, and how one of the other kind would be."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pyopencl as cl
import pytest

from clamp.opencl.device import capabilities

#: plans, and storage types of two operands, or of operand and result: every type, plan and mixture is among them
PLANS_AND_DTYPES = [
    ("own plan", "float32", "float32"),
    ("own plan", "float16", "float32"),
    ("own plan", "bfloat16", "float16"),
    ("other plan", "float16", "bfloat16"),
]


def plans_of(*modules: ModuleType) -> Any:
    """The fixture ``plan``: the device's own kind of plan, and the other: a CPU's work as a GPU has it, or vice versa.

    Args:
        modules: those that ask what the device is.
    """

    @pytest.fixture(params=["own plan", "other plan"])
    def plan(request: pytest.FixtureRequest, queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
        own = capabilities(queue)
        if request.param == "other plan":
            other = dataclasses.replace(own, is_cpu=not own.is_cpu)
            for module in modules:
                monkeypatch.setattr(module, "capabilities", lambda queue: other)

    return plan
