"""Functions of netcl's ``jit_compile`` under AMP: they are the functions, and give their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag

from clamp import amp
from clamp.bridge import Node, Parameter, Tensor
from tests.reference import to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")

_rng = np.random.default_rng(0)
A, B = (_rng.standard_normal((3, 5)).astype(np.float32) for _ in range(2))


def relu(x: Node) -> Node:
    """A user's own op, which has the name of one of netcl's."""
    return ag.apply_op(lambda value: to_device(value.queue, value.to_host() * 7), lambda grad: [grad], x)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "chain": (lambda a, b: ag.tanh(a * b + 1.0) - ag.sigmoid(b), (A, B)),
    "16 bits": (lambda a, b: ag.add(ag.mul(a, b), 1.0), (A.astype(np.float16), B.astype(np.float16))),
    "a number": (lambda a, factor: a * factor, (A, 3)),
    "an argument that is not read": (lambda a, b: b * 2.0, (A, B)),
    "add_relu": (lambda a, b: ag.add_relu(a, b), (A, B)),
    "gelu": (lambda a: ag.gelu(a, approximate=False) * 2.0, (A,)),
    "softplus": (lambda a: ag.softplus(a * 100.0), (A,)),
    "nan": (lambda a: ag.relu(ag.maximum(a, 1.0)), (np.where(A > 1, np.float32("nan"), A),)),
    "a user's op": (lambda a: relu(a) * 2.0, (A,)),
}


def _results(queue: cl.CommandQueue, function: Callable[..., Any], given: tuple[Any, ...]) -> list[Any]:
    """The result of a call, and the gradients of what it was given."""
    arrays = [isinstance(x, np.ndarray) for x in given]
    nodes = [
        ag.tensor(Parameter.from_host(queue, x, dtype=str(x.dtype)), requires_grad=True) if is_array else x
        for x, is_array in zip(given, arrays, strict=True)
    ]
    out = function(*nodes)
    ag.sum(out).backward()
    grads = [node.value.grad for node, is_array in zip(nodes, arrays, strict=True) if is_array]
    return [to_numpy(out.value), *(None if grad is None else to_numpy(grad) for grad in grads)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_is_the_function(queue: cl.CommandQueue, name: str) -> None:
    function, given = FUNCTIONS[name]
    with amp.init(dtype="float32"):
        wanted, compiled = _results(queue, function, given), ag.jit_compile(function)
        for _ in range(2):
            for found, expected in zip(_results(queue, compiled, given), wanted, strict=True):
                np.testing.assert_array_equal(found, expected)


def double(a: Node) -> Node:
    return ag.mul(a, 2.0)


@pytest.mark.parametrize("has_run", [False, True])
def test_one_that_was_compiled_before_is_refused(queue: cl.CommandQueue, has_run: bool) -> None:
    compiled, a = ag.jit_compile(double), ag.tensor(to_device(queue, A))
    if has_run:
        compiled(a)
    with (
        amp.init(),
        pytest.raises(RuntimeError, match=r"^double was compiled by jit_compile before .* compile it after"),
    ):
        compiled(a)
    np.testing.assert_array_equal(np.asarray(compiled(a).value.to_host()), A * 2)


@pytest.mark.parametrize("has_run", [False, True])
def test_one_that_computes_by_numpy_is_left_alone(queue: cl.CommandQueue, has_run: bool) -> None:
    compiled, a = ag.jit_compile(double), ag.tensor(Tensor.from_host(queue, A, dtype="float32", backend="cpu"))
    if has_run:
        compiled(a)
    with amp.init():
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(compiled(a).value.array), A * 2)


def test_arguments_by_name_and_what_it_reads_outside_count(queue: cl.CommandQueue) -> None:
    weights = [1.0]

    class Scaled:
        factor = 2.0

        def plain(self, a: Node, by: float = 1.0) -> Node:
            return a * (self.factor * by * weights[0])

    with amp.init(dtype="float32"):
        made, a = Scaled(), ag.tensor(to_device(queue, A))
        compiled = ag.jit_compile(Scaled.plain)
        for weights[0], made.factor, by in ((1.0, 2.0, 1.0), (3.0, 2.0, 1.0), (3.0, 5.0, 0.5)):
            found = compiled(made, a, by=by)
            np.testing.assert_allclose(to_numpy(found.value), A * weights[0] * made.factor * by, rtol=1e-6)


def test_it_is_recorded_by_the_tape_that_it_is_given(queue: cl.CommandQueue) -> None:
    with amp.init(dtype="float32"):
        compiled, tape = ag.jit_compile(lambda a: a * 2.0), ag.Tape()
        a = ag.tensor(to_device(queue, A), requires_grad=True)
        out = compiled(a, tape=tape)
        assert tape.nodes[-1] is out
