"""What becomes of built programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl import program
from clamp.ops.cast import cast
from clamp.ops.elementwise import elementwise
from tests.reference import integers, to_device, to_numpy


def test_released_programs_are_built_again(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.arange(5.0))
    before = to_numpy(cast(x, "float16"))
    elementwise("sqrt", "float32", x)
    held = program.built_programs()
    program.release_programs()
    assert held > 1
    assert program.built_programs() == 0
    assert [prepared.known for prepared in program._prepared if prepared.known] == [], "whose kernels hold programs"
    np.testing.assert_array_equal(to_numpy(cast(x, "float16")), before)
    assert program.built_programs() == 1


def test_a_kernel_that_is_declared_twice_is_compiled_once(queue: cl.CommandQueue) -> None:
    macros = {"X_T": "f32", "Y_T": "f16", "PIECES": 0}
    kernel = program.Kernel("cast.cl", "cast").on(queue, **macros)
    assert program.Kernel("cast.cl", "cast").on(queue, **macros) is kernel


def test_options_of_one_compiler_are_left_out_where_a_kernel_is_plain_c(queue: cl.CommandQueue) -> None:
    macros = {"Y_T": "f16", "PIECES": 0}
    kernel = program.Kernel("cast.cl", "cast", options=("-DX_T=f32",))
    assert kernel.on(queue, **macros).function_name == "cast"
    with pytest.raises(program.KernelBuildError, match="X_T"):
        kernel.in_plain_c.on(queue, **macros)


def test_a_kernel_may_call_what_the_short_header_lacks(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    text = Path(__file__).with_name("rotated.cl").read_text()
    original = program.source
    monkeypatch.setattr(program, "source", lambda name: text if name == "rotated.cl" else original(name))
    x = integers(queue, [-0x7FFFFFFF])  # bits 0 and 31
    program.Kernel("rotated.cl", "rotated")(queue, (1,), (1,), x)
    assert to_numpy(x)[0] == 3
    is_shortened = program._SHORTENED in queue.device.platform.version
    assert [str(warning.message) for warning in recwarn] == is_shortened * [
        "rotated.cl is slow to compile: it calls what kernels/builtins.clh does not declare"
    ]
