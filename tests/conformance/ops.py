"""The conformance table: the entries of all families, which are the modules of this folder that hold ``OPS``."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import tests.conformance as package
from tests.conformance.table import Op

FAMILIES = [
    module
    for info in iter_modules(package.__path__)
    if not info.name.startswith("test_") and info.name != "ops"
    and hasattr(module := import_module(f"{package.__name__}.{info.name}"), "OPS")
]  # fmt: skip

TABLE: list[Op] = [op for family in FAMILIES for op in family.OPS]
