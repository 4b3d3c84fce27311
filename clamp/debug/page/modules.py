"""The modules of a model as a tree, with the first bad op lit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from clamp.debug.page.markup import Markup, tag
from clamp.debug.page.schema import FirstBad, Module, Op

_OPEN = 60  # modules up to which all branches are open


@dataclass
class _Node:
    """A module, or a list of modules that is none itself."""

    path: str
    module: Module | None = None
    children: dict[str, _Node] = field(default_factory=dict)

    def walk(self) -> Iterator[_Node]:
        yield self
        for child in self.children.values():
            yield from child.walk()


def modules(found: Sequence[Module], ops: Sequence[Op], bad: FirstBad | None) -> Markup:
    """Nested lists; a module's ops are a link that filters the table of ops (page.js)."""
    if not found:
        return tag("p", "The modules are not known.", class_="empty")
    root = _tree(found)
    calls = Counter(op["module"] for op in ops)
    tops = [root] if root.module else list(root.children.values())
    is_small = len(found) <= _OPEN
    return tag("ul", *(_item(node, calls, bad, is_small) for node in tops), class_="tree", tabindex=0)


def _tree(found: Sequence[Module]) -> _Node:
    root = _Node("")
    for module in found:
        node = root
        parts = module["path"].split(".") if module["path"] else []
        for depth, part in enumerate(parts, 1):
            node = node.children.setdefault(part, _Node(".".join(parts[:depth])))
        node.module = module
    return root


def _item(node: _Node, calls: Counter[str], bad: FirstBad | None, is_small: bool) -> Markup:
    is_bad = bad is not None and bad["module"] == node.path
    own, link = _words(node, bad if is_bad else None), _link(node.path, calls[node.path])
    if not node.children:
        return tag("li", own, link, class_="bad" if is_bad else None)
    is_above = bad is not None and any(one.path == bad["module"] for one in node.walk())
    inside = tag("ul", *(_item(child, calls, bad, is_small) for child in node.children.values()))
    branch = tag("details", tag("summary", own), link, inside, open=is_small or is_above)
    return tag("li", branch, class_="bad" if is_bad else None)


def _words(node: _Node, bad: FirstBad | None) -> Markup:
    parts: list[str] = [tag("b", node.path.rpartition(".")[2] or "model")]
    if node.module is not None:
        count = node.module["parameters"]
        parts += [" ", tag("span", node.module["class"], class_="class")]
        if count:
            parts += [" ", tag("small", f"{count:,} parameters")]
    if bad is not None:
        parts += [" ", tag("strong", f"first {bad['what']}: {bad['op']}, {bad['direction']}", class_="lit")]
    return tag("span", *parts)


def _link(path: str, ops: int) -> Markup:
    """To a module's ops in their table; not part of a branch's summary, whose only action is to fold it."""
    if not ops:
        return Markup("")
    words = f"{ops} op{'s' * (ops > 1)}"
    return tag("a", words, href="#ops", data_module=path, aria_label=f"{words} of {path or 'no module'}, in the table")
