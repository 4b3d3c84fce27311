"""A run as one page, which holds all that it needs: open it anywhere, mail it, keep it."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from string import Template

from clamp.debug.page.findings import facts, first_bad, verdict
from clamp.debug.page.markup import joined, tag
from clamp.debug.page.memory import memory
from clamp.debug.page.modules import modules
from clamp.debug.page.ops import ops
from clamp.debug.page.ranges import ranges
from clamp.debug.page.schema import Run, checked
from clamp.debug.page.timeline import timeline


def page_of(run: Run) -> str:
    """The page as HTML. It asks for nothing from anywhere, and its policy forbids it to.

    Raises:
        ValueError: see `clamp.debug.page.schema.checked`.
        ModuleNotFoundError: matplotlib, which draws the pictures, is not installed.
    """
    run = checked(run)
    script = _text("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_text("page.html")).substitute(
        title=joined([run["verdict"]["headline"].replace("`", "")]),
        style=_text("page.css"),
        script=script,
        script_hash=f"sha256-{digest}",
        verdict=verdict(run["verdict"]),
        facts=facts(run),
        first_bad=first_bad(run["first_bad"]),
        first_bad_link=tag("a", "First bad op", href="#first-bad") if run["first_bad"] else "",
        modules=modules(run["modules"], run["ops"], run["first_bad"]),
        timeline=timeline(run["steps"]),
        ranges=ranges(run["ranges"], run["suggested_scale"], run["first_bad"]),
        ops=ops(run["ops"], run["first_bad"]),
        memory=memory(run["memory"], run["dtype"]),
        version=tag("span", f"clamp {run['clamp']}"),
    )


def write_page(run: Run, path: str | Path) -> None:
    """Writes the page of a run.

    Raises:
        ValueError, ModuleNotFoundError: see `page_of`.
        OSError: the file cannot be written.
    """
    Path(path).write_text(page_of(run), encoding="utf-8")


def _text(name: str) -> str:
    return (files("clamp.debug.page") / name).read_text(encoding="utf-8")
