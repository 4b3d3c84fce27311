"""Functions of netcl's ``jit_compile`` under AMP: they give what the function gives, and its gradients."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.runtime.cache import cacher

from clamp import amp, recordings
from clamp.bridge import Node, Parameter, Tensor
from tests.reference import to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")

_rng = np.random.default_rng(0)
A, B = (_rng.standard_normal((3, 5)).astype(np.float32) for _ in range(2))
POSITIVE, ROW, SQUARE = np.abs(A) + 0.3, A[:1], A[:, :3]


class Options:
    factor = 3.0


def relu(x: Node) -> Node:
    """A user's own op, which has the name of one of netcl's."""
    return ag.apply_op(lambda value: to_device(value.queue, value.to_host() * 7), lambda grad: [grad], x)


FUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "chain": (lambda a, b: ag.tanh(a * b + 1.0) - ag.sigmoid(b), (A, B)),
    "broadcast": (lambda a, b: a * b, (A, ROW)),
    "a number": (lambda a, factor: a * factor, (A, 3)),
    "clip": (lambda a: ag.clip(a, -1, 1), (A,)),
    "elu": (lambda a: ag.elu(a, alpha=0.5), (A,)),
    "pow": (lambda a: ag.pow(a, 3), (POSITIVE,)),
    "where": (lambda a, b: ag.where(ag.gt(a, 0.0), a, b), (A, B)),
}
AS_IT_IS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add_relu": (lambda a, b: ag.add_relu(a, b), (A, B)),
    "gelu": (lambda a: ag.gelu(a, approximate=False) * 2.0, (A,)),
    "weighted_bce": (lambda a, b, w: ag.weighted_bce(a, b, w) * 2.0, (np.clip(A, 0, 1), np.abs(B) % 1, POSITIVE)),
    "matmul": (lambda a, b: ag.relu(ag.matmul_op(a, b)), (A, B.reshape(5, 3))),
    "inf": (lambda a: ag.minimum(a, float("inf")), (A,)),
    "a number on the left": (lambda a: a * ag.lt(0.2, a), (A,)),
    "a user's op": (lambda a: relu(a) * 2.0, (A,)),
    "another node": (lambda a, more: a * more[0], (A, [B])),
    "a value": (lambda a: a * ag.tensor(a.value), (A,)),
    "a cast": (lambda a: amp.cast(a, "float32") * 2.0, (A,)),
    "the input": (lambda a: a, (A,)),
    "empty": (lambda a: a * 2.0, (A[:0],)),
    "integers": (lambda a, b: ag.where(b, a, 0.5), (A, (B > 0).astype(np.int32))),
}


def _results(queue: cl.CommandQueue, function: Callable[..., Any], given: tuple[Any, ...]) -> list[Any]:
    """The result of a call, and the gradients of what it was given."""
    nodes: list[Node] = []

    def node(x: Any) -> Any:
        if isinstance(x, list):
            return [node(item) for item in x]
        if not isinstance(x, np.ndarray):
            return x
        tensor = Parameter.from_host(queue, x, dtype=str(x.dtype)) if x.size else Tensor.from_shape(queue, x.shape)
        nodes.append(ag.tensor(tensor, requires_grad=x.dtype == np.float32))
        return nodes[-1]

    out = function(*map(node, given))
    if out.value.size:
        ag.sum(out).backward()
    grads = [x.value.grad for x in nodes]
    return [to_numpy(out.value), *(None if grad is None else to_numpy(grad) for grad in grads)]


def _assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert [x is None for x in found] == [x is None for x in wanted]
    for one, other in zip(found, wanted, strict=True):
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [*FUSED, *AS_IT_IS])
def test_a_compiled_function_is_the_function(queue: cl.CommandQueue, name: str) -> None:
    """Where netcl's compiler would compute something else, or nothing, it runs as it is."""
    function, given = (FUSED | AS_IT_IS)[name]
    with amp.init(dtype="float32"):
        wanted = _results(queue, function, given)
        compiled = ag.jit_compile(function)
        for _ in range(3):
            _assert_same(_results(queue, compiled, given), wanted)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[cl.Kernel]:
    """The kernels that are called, one after the other."""
    kernels: list[cl.Kernel] = []
    call = cl.Kernel.__call__
    monkeypatch.setattr(cl.Kernel, "__call__", lambda self, *args: kernels.append(self) or call(self, *args))
    return kernels


def test_what_is_fused_is_one_launch(queue: cl.CommandQueue, launched: list[cl.Kernel]) -> None:
    with amp.init(dtype="float16"), ag.no_grad():
        for name, (function, given) in FUSED.items():
            compiled = ag.jit_compile(function)
            nodes = [ag.tensor(to_device(queue, x)) if isinstance(x, np.ndarray) else x for x in given]
            compiled(*nodes)
            launched.clear()
            compiled(*nodes)
            assert [kernel.function_name for kernel in launched] == ["fused_forward"], name


def test_its_source_is_that_of_every_process(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """netcl finds built programs on disk by their source."""
    sources: list[str] = []
    build = cacher.get_program

    def get_program(context: cl.Context, source: str, *args: Any) -> Any:
        sources.append(source)
        return build(context, source, *args)

    monkeypatch.setattr(cacher, "get_program", get_program)
    a = ag.tensor(to_device(queue, A))
    with amp.init(dtype="float32"):
        for _ in range(2):
            ag.jit_compile(FUSED["chain"][0])(a, a)
    assert sources[:2] == sources[2:]


def test_threads_have_kernels_of_their_own(queue: cl.CommandQueue, launched: list[cl.Kernel]) -> None:
    """A kernel has one list of arguments, which another thread would change before it is launched."""
    a = ag.tensor(to_device(queue, A))
    with amp.init(dtype="float32"):
        compiled = ag.jit_compile(FUSED["chain"][0])
        compiled(a, a)
        thread = threading.Thread(target=lambda: compiled(a, a))
        thread.start()
        thread.join()
    first, second = launched
    assert first is not second


def test_arguments_that_it_does_not_read_get_no_gradient(queue: cl.CommandQueue) -> None:
    """netcl's kernel leaves what was in their gradient's memory."""
    with amp.init(dtype="float32"):
        for function in (lambda a, b: a * 2.0, lambda a, b: b * 2.0):
            _assert_same(_results(queue, ag.jit_compile(function), (A, B)), _results(queue, function, (A, B)))


def test_arguments_by_name_and_of_any_kind_count(queue: cl.CommandQueue) -> None:
    def scaled(a: Node, b: Node | None = None, factor: Any = 1.0, **more: Any) -> Node:
        scale = factor["factor"] if isinstance(factor, dict) else factor
        return a * float(scale) if b is None else a * b * float(scale)

    a, b = (ag.tensor(to_device(queue, x)) for x in (A, B))
    with amp.init(dtype="float32"):
        compiled = ag.jit_compile(scaled)
        options = {"factor": 2.0}
        for named in (
            {"factor": 2.0}, {"factor": 3.0}, {"b": b}, {"factor": 4, "b": b}, {"b": None},
            *({"factor": np.float32(number)} for number in range(5)), {"factor": options}, {"factor": -0.0},
        ):  # fmt: skip
            wanted = scaled(a, **named)
            np.testing.assert_allclose(to_numpy(compiled(a, **named).value), to_numpy(wanted.value), rtol=1e-6)
        options["factor"] = 5.0
        np.testing.assert_allclose(to_numpy(compiled(a, factor=options).value), A * 5, rtol=1e-6)


def test_what_it_reads_outside_is_that_of_the_day(queue: cl.CommandQueue, launched: list[cl.Kernel]) -> None:
    options, weights = Options(), [1.0]
    a = ag.tensor(to_device(queue, A))
    with amp.init(dtype="float32"):
        compiled = ag.jit_compile(lambda a: a * options.factor + weights[0])
        for factor in (3.0, 4.0, 3.0):
            for weights[0] in (1.0, 2.0):
                options.factor = factor
                np.testing.assert_allclose(to_numpy(compiled(a).value), A * factor + weights[0], rtol=1e-6)
    assert launched[:2] == launched[4:]  # a state that comes back has its kernel


def test_what_it_does_itself_is_done_in_each_call(queue: cl.CommandQueue) -> None:
    a, seen = ag.tensor(to_device(queue, A)), []

    def noisy(a: Node) -> Node:
        seen.append(random.random())
        return a * seen[-1]

    with amp.init(dtype="float32"):
        compiled = ag.jit_compile(noisy)
        for _ in range(4):
            out = compiled(a)
            np.testing.assert_allclose(to_numpy(out.value), A * seen[-1], rtol=1e-5)
        assert len(set(seen)) >= 4


def test_one_that_is_another_in_each_call_is_compiled_no_more(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings.compiled, "_MOST_KERNELS", 2)
    a = ag.tensor(to_device(queue, A[:1]))
    with amp.init(dtype="float32"):
        compiled = ag.jit_compile(lambda a, factor: a * factor)
        factors = np.arange(5) + 0.5
        with pytest.warns(UserWarning, match="is compiled anew"):
            found = [to_numpy(compiled(a, factor).value) for factor in factors]
        np.testing.assert_allclose(found, A[:1] * factors[:, None, None], rtol=1e-5)


def test_a_method_is_its_objects(queue: cl.CommandQueue) -> None:
    a = ag.tensor(to_device(queue, A))
    with amp.init(dtype="float32"):

        class Scaled:
            def __init__(self, factor: float) -> None:
                self.factor = factor

            @ag.jit_compile
            def run(self, a: Node) -> Node:
                return a * self.factor

        two, three = Scaled(2.0), Scaled(3.0)
        for _ in range(2):
            for made in (two, three, copy.deepcopy(three)):
                np.testing.assert_allclose(to_numpy(made.run(a).value), A * made.factor, rtol=1e-6)
            three.factor += 1.0


def test_one_that_reads_much_outside_runs_as_it_is(queue: cl.CommandQueue, launched: list[cl.Kernel]) -> None:
    """To look at all that would take longer than its ops, and hold it."""
    a, options = ag.tensor(to_device(queue, A)), [Options() for _ in range(50)]
    held = weakref.ref(options[-1])
    with amp.init(dtype="float32"):
        compiled = ag.jit_compile(lambda a: a * sum(each.factor for each in options))
        for _ in range(2):
            np.testing.assert_allclose(to_numpy(compiled(a).value), A * 150, rtol=1e-6)
        assert "fused_forward" not in [kernel.function_name for kernel in launched]
        options.clear()
        gc.collect()
        assert held() is None


def test_one_in_another_is_fused_with_it(queue: cl.CommandQueue) -> None:
    a = ag.tensor(to_device(queue, A))
    with amp.init(dtype="float32"):
        inner = ag.jit_compile(lambda a: a * 2.0)
        outer = ag.jit_compile(lambda a: inner(a) + 1.0)
        for _ in range(2):
            np.testing.assert_allclose(to_numpy(outer(a).value), A * 2 + 1, rtol=1e-6)


def test_after_shutdown_16_bit_inputs_are_not_misread(queue: cl.CommandQueue) -> None:
    half = A.astype(np.float16)
    x: Tensor = to_device(queue, half, "float16")
    with amp.init():
        compiled = ag.jit_compile(lambda a: ag.relu(a))
        compiled(ag.tensor(x))
    try:
        wanted = to_numpy(ag.relu(ag.tensor(x)).value)
    except cl.Error:  # PoCL builds no kernel of netcl's for them
        with pytest.raises(cl.Error):
            compiled(ag.tensor(x))
    else:
        np.testing.assert_array_equal(to_numpy(compiled(ag.tensor(x)).value), wanted)


@pytest.mark.parametrize("name", ["add_relu", "gelu", "a user's op"])
def test_one_that_was_compiled_before_is_right_as_well(queue: cl.CommandQueue, name: str) -> None:
    function, given = AS_IT_IS[name]
    compiled = ag.jit_compile(function)
    compiled(*(ag.tensor(to_device(queue, x)) for x in given))  # netcl's
    with amp.init(dtype="float32"):
        _assert_same(_results(queue, compiled, given), _results(queue, function, given))
