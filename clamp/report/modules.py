"""The modules of a model as a tree, with the first bad op lit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from clamp.report.markup import Markup, tag
from clamp.report.run import FirstBad, Module, Op

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
    own = _words(node, calls, bad if is_bad else None)
    if not node.children:
        return tag("li", own, class_="bad" if is_bad else None)
    is_above = bad is not None and any(one.path == bad["module"] for one in node.walk())
    inside = tag("ul", *(_item(child, calls, bad, is_small) for child in node.children.values()))
    branch = tag("details", tag("summary", own), inside, open=is_small or is_above)
    return tag("li", branch, class_="bad" if is_bad else None)


def _words(node: _Node, calls: Counter[str], bad: FirstBad | None) -> Markup:
    parts: list[str] = [tag("b", node.path.rpartition(".")[2] or "model")]
    if node.module is not None:
        count = node.module["parameters"]
        parts += [" ", tag("span", node.module["class"], class_="class")]
        if count:
            parts += [" ", tag("small", f"{count:,} parameters")]
    if bad is not None:
        parts += [" ", tag("strong", f"first {bad['what']}: {bad['op']}, {bad['direction']}", class_="lit")]
    if ops := calls[node.path]:
        words = f"{ops} op{'s' * (ops > 1)}"
        label = f"Show the {words} of {node.path or 'no module'} in the table"
        parts += [" ", tag("a", words, href="#ops", data_module=node.path, aria_label=label)]
    return tag("span", *parts)
