"""A user's own wrapper over a netcl function keeps running under AMP, and what it calls inside is clamp's."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
import wrapt
from netcl import autograd as ag
from netcl.autograd import ops
from netcl.nn.layers import Linear

from clamp import amp, session
from clamp.bridge import Node, Parameter
from tests.reference import to_device, to_numpy

CALLS: list[str] = []
_matmul = ag.matmul_op  # a global of this module


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    CALLS.clear()
    before = ag.matmul_op
    yield
    assert _matmul is before, "the original is back in every place"


def in_a_closure(original: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS.append("matmul_op")
        return original(*args, **kwargs)

    return counted


def with_wraps(original: Any) -> Any:
    return functools.wraps(original)(in_a_closure(original))


def in_a_default(original: Any) -> Any:
    def counted(a: Any, b: Any, tape: Any = None, first: Any = original) -> Any:
        CALLS.append("matmul_op")
        return first(a, b, tape=tape)

    return counted


def in_a_keyword(original: Any) -> Any:
    def counted(*args: Any, first: Any = original, **kwargs: Any) -> Any:
        CALLS.append("matmul_op")
        return first(*args, **kwargs)

    return counted


def as_a_global(original: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS.append("matmul_op")
        return _matmul(*args, **kwargs)

    return counted


def in_a_script(original: Any) -> Any:
    names = {"original": original, "calls": CALLS}
    exec("def counted(*args, **kwargs):\n    calls.append('matmul_op')\n    return original(*args, **kwargs)", names)
    return names["counted"]


class Counter:
    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append("matmul_op")
        return self.original(*args, **kwargs)


def by_wrapt(original: Any) -> Any:
    def counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        CALLS.append("matmul_op")
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, counted)


def in_a_partial(original: Any) -> Any:
    return in_a_closure(functools.partial(original, tape=None))


def over_another(original: Any) -> Any:
    return with_wraps(Counter(in_a_default(original)))


def with_a_cast(original: Any) -> Any:
    def counted(a: Node, b: Node, tape: Any = None) -> Any:
        CALLS.append("matmul_op")
        return original(amp.cast(a, "float32"), b, tape=tape)

    return counted


WAYS: list[Callable[[Any], Any]] = [
    in_a_closure, with_wraps, in_a_default, in_a_keyword, as_a_global, in_a_script, Counter, by_wrapt, in_a_partial,
    over_another, with_a_cast,
]  # fmt: skip


def product(queue: cl.CommandQueue, call: Callable[..., Any]) -> Node:
    x = ag.tensor(to_device(queue, np.full((3, 4096), 1.0)))
    return call(x, ag.tensor(Parameter.from_host(queue, np.ones((4096, 2), np.float32)), requires_grad=True))


@pytest.mark.parametrize("wrap", WAYS)
def test_it_runs_and_what_it_calls_is_clamps(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], Any]
) -> None:
    original = ag.matmul_op
    mine = wrap(original)
    monkeypatch.setattr(ag, "matmul_op", mine)
    for _ in range(2):  # a second init finds all in place
        with amp.init():
            assert ag.matmul_op is mine
            CALLS.clear()
            out = product(queue, ag.matmul_op)
            assert set(CALLS) == {"matmul_op"}
            assert out.value.dtype == "float16"
            assert (to_numpy(out.value) == 4096).all()  # netcl's own would stop at 2048, or not build
            ag.sum(out).backward()
            assert to_numpy(out.parents[1].value.grad).tolist() == [[3.0, 3.0]] * 4096
            CALLS.clear()
            Linear(queue, 4, 2)(ag.tensor(to_device(queue, np.ones((3, 4)))))
            assert set(CALLS) == {"matmul_op"}, "netcl's layers call it, too"
        assert ag.matmul_op is mine
        out = product(queue, ag.matmul_op)
        assert out.value.dtype == "float32"
        assert out.grad_fn.__module__.startswith("netcl.")


@pytest.mark.parametrize(
    ("module", "name", "wrap"), [(ops, "matmul_op", with_wraps), (ag, "matmul", in_a_closure)],
    ids=["where netcl defines it", "an alias"],
)  # fmt: skip
def test_one_over_another_name_of_the_function_stays_too(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, wrap: Any
) -> None:
    mine = wrap(ag.matmul_op)
    monkeypatch.setattr(module, name, mine)
    with amp.init():
        assert getattr(module, name) is mine
        assert product(queue, mine).value.dtype == "float16"
        assert product(queue, ag.matmul_op).value.dtype == "float16"
    assert CALLS == ["matmul_op"]


def test_a_function_put_in_netcls_place_runs_in_float32_and_is_spoken_of(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(a: Node, b: Node, tape: Any = None) -> Any:
        return types.SimpleNamespace(dtypes=(a.value.dtype, b.value.dtype))

    kept = ag.matmul_op
    monkeypatch.setattr(ag, "matmul_op", mine)
    with pytest.warns(
        UserWarning, match=r"netcl\.autograd\.matmul_op is a function of tests\.patching\.test_users_wrappers"
    ):
        handle = amp.init()
    with handle:
        x = ag.tensor(to_device(queue, np.ones((2, 2)), "float16"))
        assert ag.matmul_op(x, x).dtypes == ("float32", "float32")
        assert ops.matmul_op(x, x).value.dtype == kept(x, x).value.dtype == "float16", (
            "netcl's own is clamp's all the same"
        )
    assert ag.matmul_op is mine


def test_who_kept_what_stood_in_a_functions_place_has_the_users_own_after_shutdown(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ag, "matmul_op", functools.partial(lambda a, b: (a.value.dtype, b.value.dtype)))
    x = ag.tensor(to_device(queue, np.ones((2, 2)), "float16"))
    with pytest.warns(UserWarning, match="matmul_op is a function of"):
        handle = amp.init()
    with handle:
        kept = ag.matmul_op
        assert kept(x, x) == ("float32", "float32")
    assert kept(x, x) == ("float16", "float16")


def test_a_function_of_netcls_that_is_registered_keeps_its_original_inside(queue: cl.CommandQueue) -> None:
    """The wrapper of a registered function stands in netcl's module when users' wrappers are looked for."""
    amp.register_float_function(ag, "tanh")
    x = Parameter.from_host(queue, np.full((2, 3), 0.5, np.float32))
    try:
        with amp.init():
            assert ag.tanh(ag.tensor(amp.cast(x, "float16"))).value.dtype == "float32"
    finally:
        session.registrations.clear()
