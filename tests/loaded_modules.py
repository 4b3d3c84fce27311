"""Modules in which nobody has a function of netcl's: AMP need not look through them at every start of a test's.

A process of all tests has some 1,600 modules, most of them of Python and of packages that know nothing of netcl: to go
through their names took half the time of a short training loop.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import ItemsView
from types import ModuleType, SimpleNamespace

import pytest

from clamp.patching import bindings

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SEARCHED = ("netcl", "clamp")


def pass_strangers_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has AMP search no installed module that is there now, but netcl's; those of tests, and later ones, it does."""
    modules = _OfNetclsUsers({name: module for name, module in sys.modules.items() if _is_stranger(name, module)})
    monkeypatch.setattr(bindings, "sys", SimpleNamespace(modules=modules))


class _OfNetclsUsers:
    """``sys.modules`` as AMP sees it, less some modules while they stand there."""

    def __init__(self, strangers: dict[str, ModuleType]) -> None:
        self._strangers = strangers

    def items(self) -> ItemsView[str, ModuleType]:
        strangers = self._strangers
        return {name: module for name, module in sys.modules.items() if strangers.get(name) is not module}.items()


def _is_stranger(name: str, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    return file.startswith(_INSTALLED) and name.partition(".")[0] not in _SEARCHED
