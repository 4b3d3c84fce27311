"""What becomes of built programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl import program
from clamp.opencl.launches import Launch
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


def test_a_kernel_that_is_declared_with_tensors_asks_them_for_their_types(queue: cl.CommandQueue) -> None:
    """A kernel declared otherwise, with the same types, is another one: its macros have other names."""
    kernel, swapped = (program.Kernel("cast.cl", "cast", tensors) for tensors in ("X Y", "Y X"))
    x, y = to_device(queue, np.full(3, 1.5)), to_device(queue, np.zeros(3), "float16")
    assert kernel.on(queue, "float32", "float16", PIECES=0) is not swapped.on(queue, "float32", "float16", PIECES=0)
    kernel(queue, (1,), (1,), x, y, 3, 3, PIECES=0)
    assert to_numpy(y).tolist() == [1.5] * 3


def bound_cast(queue: cl.CommandQueue, *sizes: int) -> list[Launch]:
    kernel = program.Kernel("cast.cl", "cast")
    macros = {"X_T": "f32", "Y_T": "f16", "PIECES": 0}
    return [kernel.bind(queue, (1,), (1,), ..., ..., size, size, **macros) for size in sizes]


def test_bound_launches_keep_what_they_were_bound_to(queue: cl.CommandQueue) -> None:
    """Turn about, with other buffers each time; one must not see the other's numbers."""
    three, five = bound_cast(queue, 3, 5)
    for number in (1.0, 2.0):
        x = to_device(queue, np.full(5, number))
        y, z = (to_device(queue, np.zeros(5), "float16") for _ in range(2))
        three(queue, x.buffer, y.buffer)
        five(queue, x.buffer, z.buffer)
        assert to_numpy(y).tolist() == [number] * 3 + [0.0] * 2
        assert to_numpy(z).tolist() == [number] * 5


def test_whoever_watches_launches_sees_all_arguments_of_bound_ones(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bound,) = bound_cast(queue, 2)
    x, y = to_device(queue, np.ones(2)), to_device(queue, np.zeros(2), "float16")
    call, seen = cl.Kernel.__call__, []

    def watched(kernel: cl.Kernel, *args: object) -> object:
        seen.append((kernel.function_name, *args))
        return call(kernel, *args)

    monkeypatch.setattr(cl.Kernel, "__call__", watched)
    bound(queue, x.buffer, y.buffer)
    assert seen == [("cast", queue, (1,), (1,), x.buffer, y.buffer, 2, 2)]
    assert to_numpy(y).tolist() == [1.0, 1.0]


def test_a_call_is_repeated_with_its_own_arguments_whatever_its_kernel_does_meanwhile(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = program.Kernel("cast.cl", "cast").on(queue, X_T="f32", Y_T="f16", PIECES=0)
    x, y, z = (to_device(queue, np.full(5, value), dtype) for value, dtype in ((1, "float32"), *[(0, "float16")] * 2))
    three, whole = (Launch.like(kernel, (1,), (1,), (x.buffer, y.buffer, n, n), [1]) for n in (3, 5))
    other = to_device(queue, np.full(5, 2.0))
    kernel(queue, (1,), (1,), other.buffer, y.buffer, 2, 2)
    three(queue, z.buffer)
    assert to_numpy(z).tolist() == [1.0] * 3 + [0.0] * 2
    assert to_numpy(y).tolist() == [2.0] * 2 + [0.0] * 3
    seen: list[object] = []
    monkeypatch.setattr(cl.Kernel, "__call__", lambda *call: seen.extend(call))
    whole(queue, z.buffer)
    assert seen == [kernel, queue, (1,), (1,), x.buffer, z.buffer, 5, 5]


def test_a_bound_launch_takes_as_many_buffers_as_it_left_open(queue: cl.CommandQueue) -> None:
    (bound,) = bound_cast(queue, 2)
    buffer = to_device(queue, np.ones(2)).buffer
    for given in ([], [buffer], [buffer] * 3):
        with pytest.raises(TypeError, match=f"leaves 2 open, got {len(given)}"):
            bound(queue, *given)


def test_a_kernel_may_call_what_the_short_header_lacks(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    text = Path(__file__).with_name("rotated.cl").read_text()
    original = program.source
    monkeypatch.setattr(program, "source", lambda name: text if name == "rotated.cl" else original(name))
    x = integers(queue, [-0x7FFFFFFF])  # bits 0 and 31
    recwarn.clear()  # of netcl's kernels, which it may have built just now
    program.Kernel("rotated.cl", "rotated")(queue, (1,), (1,), x)
    assert to_numpy(x)[0] == 3
    is_shortened = program._SHORTENED in queue.device.platform.version
    assert [str(warning.message) for warning in recwarn] == is_shortened * [
        "rotated.cl is slow to compile: it calls what kernels/builtins.clh does not declare"
    ]
