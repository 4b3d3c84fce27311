"""What makes a site of the documents, besides mkdocs.yml: pages of files beside docs/, links that fit, docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: documents of the root, and their pages
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(((?!https?:|#)[^)#]+)(#[^)]*)?\)")

_TOGETHER = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {8,}.*)*)", re.MULTILINE)  # arguments that share a text


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page, whose links are those of the site: what is in the checkout only is named, not linked."""
    folder = ROOT if page.file.src_uri in PAGES.values() else ROOT / "docs"

    def fitting(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({path.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        name = path.relative_to(ROOT).as_posix()
        if name in PAGES:
            return f"[{text}]({PAGES[name]}{anchor})"
        return f"`{name}`" if name.endswith(text) else f"{text} (`{name}`)"

    return _LINK.sub(fitting, markdown)


class Docstrings(griffe.Extension):
    """Docstrings as griffe reads them: ``first, second: ...`` once for each, and no ``::`` before an indented block."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^::$", "", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            obj.docstring.value = _TOGETHER.sub(_each, text)


def _each(found: re.Match[str]) -> str:
    names = [{"args": "*args", "kwargs": "**kwargs"}.get(name, name) for name in found[1].split(", ")]
    return "\n".join(f"    {name}: {found[2]}" for name in names)
