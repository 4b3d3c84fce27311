"""AMP starts quicker in tests than elsewhere, and does the same."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from netcl import autograd as ag

from clamp import amp
from clamp.patching import bindings


def test_modules_of_tests_and_later_ones_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = dict(bindings.sys.modules.items())
    assert {__name__, "netcl.autograd.ops", "clamp"} <= searched.keys()
    assert "numpy" not in searched
    late = ModuleType("late")
    late.__file__ = pytest.__file__
    late.relu = ag.relu
    monkeypatch.setitem(sys.modules, "late", late)
    original = late.relu
    with amp.init(dtype="float16"):
        assert late.relu is ag.relu is not original
    assert late.relu is original


def test_what_is_not_searched_has_nothing_of_netcls() -> None:
    searched = bindings.sys.modules.items()
    strangers = [module for name, module in list(sys.modules.items()) if (name, module) not in searched]
    ours = {id(value) for name, module in searched if name.startswith("netcl") for value in _functions(module)}
    assert len(strangers) > 100
    assert [module.__name__ for module in strangers if ours & {id(value) for value in _functions(module)}] == []


def _functions(module: object) -> list[object]:
    """Functions and classes that a module of netcl's defines, among what some module has."""
    return [
        value for value in vars(module).values() if str(getattr(value, "__module__", "")).partition(".")[0] == "netcl"
    ]
