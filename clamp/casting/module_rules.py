"""Rules of a user's for modules: in which dtype each computes, by its path in its model."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

from clamp import bridge
from clamp.casting.policy_table import MODULES, check_dtype, read_list, text_of


@dataclass(frozen=True)
class ModuleRule:
    """The AMP dtype of some modules: of those whose paths a pattern matches, and of what is in them.

    Attributes:
        pattern: of ``fnmatch``, for the whole path of a module in its model, ``"layers.2.norm"``; ``*`` matches dots,
            too. One that ends in ``.*`` is for the module before it as well.
        dtype: ``"float16"``, ``"bfloat16"``, or ``"float32"``: everything float, as at level O0.
    """

    pattern: str
    dtype: str

    def matches(self, path: str) -> bool:
        """Returns whether the rule is for the module of this path: its pattern matches that, or that of one around."""
        found = fnmatchcase(path, self.pattern) or fnmatchcase(path, self.pattern.removesuffix(".*"))
        return found or (path != "" and self.matches(path.rpartition(".")[0]))

    def names(self, path: str) -> bool:
        """Returns whether it is for this module by name, and not by a wildcard for what happens to be there."""
        return fnmatchcase(path, self.pattern) and path.rpartition(".")[2] == self.pattern.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.pattern}: {self.dtype}"


def module_rules(modules: Mapping[str, bridge.DTypeLike] | None) -> tuple[ModuleRule, ...]:
    """The rules of a mapping from patterns to dtypes; none of None.

    Raises:
        TypeError: it is no mapping, or a pattern no text.
        ValueError: a dtype is none of AMP's.
    """
    if modules is None:
        return ()
    takes = 'modules takes a dict of patterns and dtypes, such as {"head.*": "float32"}'
    if not isinstance(modules, Mapping):
        raise TypeError(f"{takes}, got {modules!r}")
    for pattern in modules:
        if not isinstance(pattern, str):
            raise TypeError(f"{takes}; a pattern is a text, for the paths of modules, got {pattern!r}")
    return tuple(
        ModuleRule(pattern, check_dtype(dtype, f"dtype for modules[{pattern!r}]")) for pattern, dtype in modules.items()
    )


def rule_for(rules: Iterable[ModuleRule], path: str) -> ModuleRule | None:
    """The rule that decides about the module of a path: the first that is for it."""
    return next((rule for rule in rules if rule.matches(path)), None)


def rules_for(
    modules: Mapping[str, bridge.DTypeLike] | None, lists: str | Path | None, level: str
) -> tuple[ModuleRule, ...]:
    """The rules for modules of an ``init``: those of its argument, then those of a list file's table ``modules``.

    Raises:
        ValueError: an unknown dtype, a 16-bit one at level O0, or a file that cannot be read or is malformed.
        TypeError: ``modules`` is no mapping of texts, or ``lists`` no path.
    """
    rules = module_rules(modules)
    if lists is not None:
        read_list(lists)  # raises where something is wrong with it
        rules += module_rules(tomllib.loads(text_of(lists)).get(MODULES))
    if level == "O0" and (in_half := [rule for rule in rules if rule.dtype != "float32"]):
        raise ValueError(
            f'level "O0" computes everything in float32, and a rule for modules says {in_half[0]}: pass level="O1" and '
            'dtype="float32", and the rest is in float32'
        )
    return rules


class ModuleRules:
    """Rules for modules at work: finds out which one decides about a module, by its path.

    Args:
        rules: in their order, of which the first that matches counts.

    Attributes:
        rule_at: returns the rule that decides about the module of a path.
        is_judged: whether users have been told of rules that decide about no module, or are about to be.
    """

    def __init__(self, rules: Sequence[ModuleRule]) -> None:
        self.rules = tuple(rules)
        self._paths = bridge.ModulePaths()
        self.rule_at = cache(partial(rule_for, self.rules))
        self.is_judged = False

    def __str__(self) -> str:
        return ", ".join(map(str, self.rules))

    def rule_of(self, module: Any) -> ModuleRule | None:
        """The rule that decides about a module; None: the region around it holds in it."""
        self._paths.follow(module)
        return self.rule_at(self._paths.of(module)[0])  # of several that are computed at once: they have the same

    def names(self, module: Any) -> bool:
        """Returns whether the rule of a module names it: its pattern ends in the module's own name."""
        rule = self.rule_of(module)
        return rule is not None and rule.names(self._paths.of(module)[0])

    def decided(self) -> dict[ModuleRule, list[str]]:
        """The paths of the modules that have been met, by the rules that decide about them."""
        return self._by_rule(self._paths.known)

    def idle(self) -> str:
        """Returns the warning about rules that match no module; empty if there are none."""
        known = self._paths.known
        if all(self._by_rule(known).values()):
            return ""
        known |= set(bridge.module_names(bridge.modules_met()))  # those of other models, too
        return "; ".join(self._why_idle(rule, known) for rule, paths in self._by_rule(known).items() if not paths)

    def _by_rule(self, known: set[str]) -> dict[ModuleRule, list[str]]:
        found: dict[ModuleRule, list[str]] = {rule: [] for rule in self.rules}
        for path in sorted(known):
            if (rule := self.rule_at(path)) is not None:
                found[rule].append(path)
        return found

    def _why_idle(self, rule: ModuleRule, known: set[str]) -> str:
        matched = sorted(filter(rule.matches, known))
        if matched:
            first = self.rule_at(matched[0])
            assert first is not None
            return (
                f"{rule.pattern!r} decides about no module: {first.pattern!r}, which stands before it, matches "
                f"{matched[0]!r} first. Write {rule.pattern!r} before it"
            )
        paths = sorted(path for path in known if path)
        near = get_close_matches(rule.pattern.removesuffix(".*"), paths, n=3, cutoff=0.5)
        which = f"near: {', '.join(near)}" if near else f"there are {', '.join(paths[:5])}" if paths else "none has one"
        return f"no module has a path that {rule.pattern!r} matches ({which})"
