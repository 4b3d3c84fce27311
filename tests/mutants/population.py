"""Where a file can be mutated: by cosmic-ray's operators and two more in Python, by textual rules in kernels."""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

Place: TypeAlias = tuple[int, int]


class _RemoveStatement:
    """A call whose result nobody takes, an assignment to an attribute or an item, a raise: not done."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Place, Place]]:
        if node.type == "simple_stmt":
            first = node.children[0]
            is_call = first.type == "atom_expr" and first.children[-1].type == "trailer"
            assigns = first.type == "expr_stmt" and (first.children[0].type == "atom_expr" or first.children[1] != "=")
            assigns = assigns and first.children[1].type != "annassign"
            if is_call or assigns or first.type in ("del_stmt", "raise_stmt"):
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children[0] = parso.parse(node.children[0].get_first_leaf().prefix + "pass")
        return node


class _RemoveKeyword:
    """A keyword argument of a call: not passed."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Place, Place]]:
        if node.type == "arglist":
            for given in node.children:
                if given.type == "argument" and given.children[1] == "=":
                    yield given.start_pos, given.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        start = list(self.mutation_positions(node))[index][0]
        place = [child.start_pos for child in node.children].index(start)
        del node.children[place : place + 2]  # with its comma
        return node


_CORE = {
    "ReplaceBinaryOperator_": "Add_Sub Sub_Add Mul_Div Mul_Add Div_Mul FloorDiv_Mul Mod_FloorDiv BitAnd_BitOr",
    "ReplaceComparisonOperator_": "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Is_IsNot IsNot_Is",
    "ReplaceUnaryOperator_": "USub_UAdd Delete_USub Delete_Not",
    "Replace": "TrueWithFalse FalseWithTrue AndWithOr OrWithAnd BreakWithContinue ContinueWithBreak",
    "": "AddNot ExceptionReplacer NumberReplacer RemoveDecorator ZeroIterationForLoop",
}  # fmt: skip
_OPERATORS: list[Any] = [get_operator(f"core/{kind}{name}")() for kind in _CORE for name in _CORE[kind].split()]
_OPERATORS += [_RemoveStatement(), _RemoveKeyword()]

#: Of OpenCL C: what stands in a line, and what is put there.
_EDITS = [
    (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "),
    (r" && ", " || "), (r" \|\| ", " && "), (r" \+ 1\b", ""), (r" - 1\b", ""),
    (r" \+ ", " - "), (r" - ", " + "), (r" \+= ", " = "), (r" % ", " / "), (r" / ", " * "), (r" \* ", " + "),
    (r"-INFINITY", "0.0f"), (r"\b(f?)min\(", r"\1max("), (r"\b(f?)max\(", r"\1min("),
    (r"\bif \(", "if (1 || "), (r"\bif \(", "if (0 && "),  # a guard, or a mask of what lies beyond the end
    (r"^ *barrier\(.*?\);", ""), (r"^( *)[a-z]\w*\(.*\);$", r"\1;"),
    (r"^( *)(?!const )[\w.>\[\]-]+ ([-+*/|]?=) .*;$", r"\1;"),  # an assignment that declares nothing
]  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A file with a fault: what it says in the place of what it said."""

    file: str
    line: int
    before: str
    after: str

    @property
    def diff(self) -> list[str]:
        """The lines that differ, with ``-`` and ``+`` before them."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), n=0, lineterm="")
        return [" ".join(line.split()) for line in list(lines)[2:] if line[0] in "-+" and line[1:].strip()]


class Places:
    """Where a file can be mutated, and how. It is mutated when a place has been chosen."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self._text = file, text
        self._makers = defaultdict[Place, list[Callable[[], str | None]]](list)
        for place, maker in _of_python(text) if file.endswith(".py") else _of_kernel(text):
            self._makers[place].append(maker)

    def __iter__(self) -> Iterator[Place]:
        return iter(sorted(self._makers))

    def mutant(self, place: Place, rng: random.Random) -> Mutant | None:
        """One of the mutants of a place; None if it is the same program, or none."""
        with suppress(SyntaxError, AttributeError):  # cosmic-ray replaces no `cl.Error` and no `*ERRORS` in an except
            after = rng.choice(self._makers[place])()
            is_python = self.file.endswith(".py")
            if after is not None and not (is_python and ast.dump(ast.parse(after)) == ast.dump(ast.parse(self._text))):
                return Mutant(self.file, place[0], self._text, after)
        return None


def _of_python(text: str) -> Iterator[tuple[Place, Callable[[], str | None]]]:
    silent = list(_annotations(text))
    nodes = list(ast_nodes(get_ast(text)))
    for operator in _OPERATORS:
        starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for number, start in enumerate(starts):
            if not any(first <= start < last for first, last in silent):
                yield start, partial(mutate_code, text, operator, number)


def _annotations(text: str) -> Iterator[tuple[Any, Any]]:
    """From where to where annotations stand, which nothing evaluates, variables of types and overloads, which only mypy
    reads, ``strict=`` of zip, which nothing that is right comes to, and ``slots=`` of a dataclass, for memory."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg in ("strict", "slots"):
            yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "TypeVar":
            yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        if isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list):
            yield (node.decorator_list[0].lineno, 0), (node.end_lineno, node.end_col_offset)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(part, ast.expr):
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def _of_kernel(text: str) -> Iterator[tuple[Place, Callable[[], str | None]]]:
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        code = line.partition("//")[0].rstrip()
        if re.search(r"PREFETCH|FETCH_AHEAD|\bahead_", code):  # from where memory is fetched early: no number's concern
            continue
        if code.startswith("#") and not code.startswith("#define"):
            continue
        for pattern, new in _EDITS:
            for match in re.finditer(pattern, code):
                edited = code[: match.start()] + match.expand(new) + code[match.end() :]
                yield (number, match.start()), partial("\n".join, [*lines[: number - 1], edited, *lines[number:]])
