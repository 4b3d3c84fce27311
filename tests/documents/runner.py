"""Runs the Python blocks of a document, one after another in one module, and watches what they do.

Three things are watched on every page. What stands in a comment behind a ``print`` or a bare expression is taken at its
word: it must be what is shown there. Every step that an optimizer takes must have had a gradient for each parameter,
and must have moved it. And a page must leave no patches behind.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import netcl.optim
import numpy as np
import pyopencl as cl
import pytest

from clamp import session
from clamp.opencl.host_steps import recorder

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Momentum", "RMSProp")


@dataclass
class Step:
    """One step that an optimizer really took, with numbers of its parameters."""

    optimizer: Any
    absent: list[int]  # that had no gradient
    unmoved: list[int]  # that had one, not zero, and kept every bit
    zero: list[int]  # whose gradient was zero everywhere


@dataclass
class Ran:
    """What a page did."""

    names: dict[str, Any]  # the module's at the end of the page
    shown: dict[int, list[str]] = field(default_factory=dict)  # what each line printed or showed, in order
    steps: list[Step] = field(default_factory=list)  # that were taken; a skipped one never reaches an optimizer
    claims: int = 0  # comments that were compared with what was shown

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    @property
    def output(self) -> str:
        """All that was printed, a line each."""
        return "\n".join(text for texts in self.shown.values() for text in texts)


def python_blocks(file: str) -> list[tuple[int, str]]:
    """The Python blocks of a document, each with the number of its first line."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)) + 1, found[1]) for found in _BLOCK.finditer(text)]


def run(file: str, queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Runs a page on the device under test, and checks what holds on every page.

    Raises:
        AssertionError: a comment is not what is shown, a step trained nothing, or patches are left.
    """
    np.random.seed(0)
    page = ModuleType("document")
    ran = Ran(vars(page))
    monkeypatch.setitem(sys.modules, "document", page)  # clamp rebinds names in modules
    monkeypatch.setattr(cl, "create_some_context", lambda interactive=False: queue.context)
    _watch_optimizers(monkeypatch, ran.steps)
    claims: dict[int, str] = {}

    def show(*values: Any, sep: str = " ") -> None:
        line = sys._getframe(1).f_lineno
        ran.shown.setdefault(line, []).append(sep.join(map(str, values)))

    vars(page).update(print=show, _show=lambda value: show_repr(ran, value))
    try:
        for line, source in python_blocks(file):
            code, found = _compiled(file, line, source)
            claims |= found
            exec(code, vars(page))
        assert session.active_handle() is None, f"{file} does not shut down"
    finally:
        session.shutdown()
    for line, claim in claims.items():
        shown = ran.shown.get(line)
        assert shown, f"{file}:{line} shows nothing, and says {claim!r}"
        assert is_as_claimed(shown[-1], claim), f"{file}:{line} shows {shown[-1]!r}, and says {claim!r}"
    ran.claims = len(claims)
    for number, step in enumerate(ran.steps):
        assert not step.absent, f"{file}, step {number}: parameters {step.absent} have no gradient"
        assert not step.unmoved, f"{file}, step {number}: parameters {step.unmoved} did not move"
        assert len(step.zero) < len(step.optimizer.params), f"{file}, step {number}: all gradients are zero"
    return ran


def show_repr(ran: Ran, value: Any) -> None:
    """What an interactive session would show of a bare expression."""
    ran.shown.setdefault(sys._getframe(2).f_lineno, []).append(repr(value))


def is_as_claimed(shown: str, claim: str) -> bool:
    """Whether a comment says what was shown: word for word but for ``...``, and what follows a colon explains it."""
    pattern = r".*".join(re.escape(part.strip()) for part in claim.split("..."))
    explained = re.match(r"(.+?): \D", claim)
    return re.fullmatch(pattern, shown, re.DOTALL) is not None or (explained is not None and explained[1] == shown)


def _compiled(file: str, line: int, source: str) -> tuple[CodeType, dict[int, str]]:
    """A block with the line numbers of its page, and the comments in it that claim something, by line."""
    padded = "\n" * (line - 1) + source
    tree = ast.parse(padded, file)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(padded).readline)
        if token.type == tokenize.COMMENT and token.line.strip() != token.string
    }
    claims: dict[int, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr):
            continue
        is_print = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", None) == "print"
        if not is_print and not isinstance(node.value, ast.Call | ast.Constant):
            shown = ast.Call(ast.Name("_show", ast.Load()), [node.value], [])
            node.value = ast.copy_location(shown, node.value)
        elif not is_print:
            continue
        if node.lineno in comments:
            claims[node.lineno] = comments[node.lineno]
    return compile(ast.fix_missing_locations(tree), file, "exec"), claims


def _watch_optimizers(monkeypatch: pytest.MonkeyPatch, steps: list[Step]) -> None:
    for name in _OPTIMIZERS:
        optimizer = getattr(netcl.optim, name)
        monkeypatch.setattr(optimizer, "step", _watched(optimizer.step, steps))


def _watched(step: Callable[..., Any], steps: list[Step]) -> Callable[..., Any]:
    """An optimizer's own ``step`` that notes what it did. clamp's guard stands in front of it."""

    @wraps(step)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder() is not None:  # nothing is read while launches are recorded
            return step(self, *args, **kwargs)
        before = [param.to_host().copy() for param in self.params]
        grads = [None if param.grad is None else np.array(param.grad.to_host()) for param in self.params]
        result = step(self, *args, **kwargs)
        moved = [not np.array_equal(old, param.to_host()) for old, param in zip(before, self.params, strict=True)]
        of = range(len(grads))
        zero = [n for n in of if grads[n] is not None and not grads[n].any()]
        absent = [n for n in of if grads[n] is None]
        unmoved = [n for n in of if not moved[n] and n not in absent and n not in zero]
        steps.append(Step(self, absent, unmoved, zero))
        return result

    return watched
