"""A function of clamp called as the netcl functions are whose place it takes."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

from clamp.casting.operands import NotOwned, Promote
from clamp.casting.owned import OWNED, implements


@pytest.mark.parametrize("name", sorted(OWNED))
def test_parameters_are_netcls(name: str) -> None:
    module, _, function = name.rpartition(".")
    theirs = list(inspect.signature(getattr(import_module(module), function)).parameters)
    assert list(inspect.signature(OWNED[name]).parameters)[1 : len(theirs) + 1] == theirs


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
