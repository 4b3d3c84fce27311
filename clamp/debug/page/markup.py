"""HTML that is escaped where it is made: plain text becomes part of it only by way of `tag`."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


_VOID = ("input",)  # elements that end where they begin

Attribute = str | int | float | bool | None


def tag(name: str, /, *inside: str, **attributes: Attribute) -> Markup:
    """An element. Of what is inside, all that is not `Markup` is escaped.

    Args:
        name: ``"td"``.
        inside: its content, in order.
        attributes: ``class_="number"``, ``aria_label="..."``; True for one without a value, None or False for none.
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    return Markup(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{joined(inside)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """One piece of HTML of several; what is not `Markup` is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def prose(text: str) -> Markup:
    """A sentence in which backticks mark code."""
    parts = re.split("`([^`]*)`", text)
    return joined(tag("code", part) if number % 2 else part for number, part in enumerate(parts))


def _attribute(key: str, value: str | int | float | bool) -> str:
    name = key.rstrip("_").replace("_", "-")
    if isinstance(value, bool):
        return f" {name}" if value else ""
    return f' {name}="{html.escape(str(value))}"'
