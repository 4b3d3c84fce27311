"""A function of clamp called as the netcl functions are whose place it takes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import import_module
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag

from clamp import amp
from clamp.bridge import Tensor
from clamp.casting.operands import NotOwned
from clamp.casting.policies import Promote
from clamp.casting.registry import OWNED, implements


def test_parameters_are_netcls() -> None:
    for name in OWNED:
        module, _, function = name.rpartition(".")
        theirs, (_, *ours) = (
            [(p.name, p.default) for p in inspect.signature(f).parameters.values()]
            for f in (getattr(import_module(module), function), OWNED[name])
        )
        assert ours[: len(theirs)] == theirs, name


def test_names_are_those_by_which_functions_are_found() -> None:
    assert [name for name, function in OWNED.items() if "<locals>" in function.__qualname__] == []


def test_what_bare_tensors_take_is_none_of_autograds(queue: cl.CommandQueue) -> None:
    """An ``out`` that a function of nodes took would be written without a gradient."""
    tensor = Tensor.from_host(queue, np.ones((2, 2, 4, 4), np.float32))
    node, at = ag.tensor(tensor), Tensor.from_host(queue, np.arange(4, dtype=np.int32), dtype="int32")
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (ag.narrow, (node, 0, 0, 2), {"out": tensor}),
        (ag.index_select, (node, 2, at), {"out": tensor}),
        (ag.cat, ([node],), {"out": tensor}),
        (ag.conv2d, (node, node), {"fuse_relu": True}),
        (ag.rope, (node, at), {"inverse": True}),
    ]
    for function, args, kwargs in calls:
        (name,) = kwargs
        with amp.init(), pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            function(*args, **kwargs)


@pytest.fixture
def softmax(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What takes the place of ``netcl.ops.softmax.softmax(x, out, pool, axis)``, and returns what it was given."""
    monkeypatch.setitem(OWNED, "netcl.ops.softmax.softmax", None)

    def function(casting: Any, x: Any, axis: int = -1, dim: int | None = None, tape: Any = None) -> Any:
        return x, axis

    assert implements("netcl.ops.softmax.softmax")(function) is function
    return OWNED["netcl.ops.softmax.softmax"]


def test_arguments_in_another_order_are_passed_by_name(softmax: Any) -> None:
    assert softmax(Promote(), "x") == ("x", -1)
    assert softmax(Promote(), "x", None, "a pool", 2) == softmax(Promote(), axis=2, x="x") == ("x", 2)


def test_calls_that_are_none_of_clamps_are_left_to_netcl(softmax: Any) -> None:
    for args, kwargs in ((("x", "out"), {}), (("x",), {"out": "out"}), (("x",), {"x": "x"}), (("x",) * 5, {})):
        with pytest.raises(NotOwned):
            softmax(Promote(), *args, **kwargs)
    with pytest.raises(TypeError):
        softmax(Promote(), "x", other=1)


def test_wrappers_that_were_there_before_clamp_hide_no_arguments() -> None:
    """A timer without functools.wraps over each of netcl's functions shows ``(*args, **kwargs)``."""
    script = """
import importlib, inspect, json, sys
from netcl.nn import functional

def timed(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

for name in json.loads(sys.argv[1]):
    module, _, attribute = name.rpartition(".")
    module = importlib.import_module(module)
    setattr(module, attribute, timed(getattr(module, attribute)))
from clamp.functions import OWNED
print(json.dumps({name: str(inspect.signature(function)) for name, function in OWNED.items()}))
"""
    run = subprocess.run(
        [sys.executable, "-c", script, json.dumps(list(OWNED))], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == {name: str(inspect.signature(function)) for name, function in OWNED.items()}
