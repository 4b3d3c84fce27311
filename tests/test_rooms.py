"""The table of rooms in docs/architecture.md, held against what the modules really import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import netcl

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "clamp"
TABLE = re.findall(r"^\| `clamp/(\w+)(?:/|\.py)` \|", (ROOT / "docs/architecture.md").read_text("utf-8"), re.M)
KNOWS_NETCL = ("bridge", "patching", "recordings")
MEASURES_NETCL = ("cli",)  # beside clamp
EXTRAS = {
    "rich": "cli",
    "matplotlib": "report",
    "jinja2": "report",
    "tensorboardX": "test",
    "pytest": "test",
}  # that packages come with
ABOVE_ALL = ("clamp", "clamp.__main__")  # the package itself, and the program


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in PACKAGE.rglob("*.py")}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def imports_of(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The modules of clamp that a syntax tree imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written out in full"
            if (node.module or "").partition(".")[0] == "clamp":
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    yield name if name in MODULES else str(node.module), node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "clamp":
                    yield alias.name, node


def imports() -> list[tuple[str, str]]:
    return [(name, imported) for name, file in MODULES.items() for imported, _ in imports_of(tree_of(file))]


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_module_is_in_a_room_of_the_table() -> None:
    found = {room(name) for name in MODULES if name not in ABOVE_ALL}
    assert sorted(found) == sorted(TABLE)


def test_each_file_has_a_line_of_its_own() -> None:
    table = (ROOT / "docs/architecture.md").read_text("utf-8").partition("## Every file")[2]
    named = re.findall(r"^\| `([\w/]+)` \| \S", table, re.M)
    heads = {file for file in MODULES.values() if file.name == "__init__.py"}
    small = {file for file in heads if len(file.read_text("utf-8").splitlines()) <= 20}
    names = [str(file.relative_to(PACKAGE)) for file in {*MODULES.values()} - small]
    assert sorted(named) == sorted(name.removesuffix("__init__.py").removesuffix(".py") for name in names)


def test_a_room_imports_only_rooms_above_it() -> None:
    upward = [
        f"{name} imports {imported}"
        for name, imported in imports()
        if name not in ABOVE_ALL and imported != "clamp" and TABLE.index(room(imported)) > TABLE.index(room(name))
    ]
    assert not upward, "\n".join(upward)


def test_no_module_imports_itself_by_a_detour() -> None:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, imported in imports():
        if not name.startswith(f"{imported}."):  # a package may gather what its modules have
            graph[name].add(imported)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_imports_stand_at_the_top() -> None:
    inside = [
        f"{name}, line {node.lineno}"
        for name, path in MODULES.items()
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for _, node in imports_of(function)
    ]
    assert inside == []


def test_what_clamp_imports_comes_with_it_or_with_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {extra: " ".join(names) for extra, names in project["optional-dependencies"].items()}
    imported = {
        name.partition(".")[0]
        for file in MODULES.values()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([str(node.module)] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    found = imported - sys.stdlib_module_names - {"clamp"}
    optional = {name for name in found if not any(line.startswith(name) for line in project["dependencies"])}
    assert optional == set(EXTRAS)
    for name, extra in EXTRAS.items():
        assert name in extras[extra]
    assert "clamp-amp[cli,report]" in extras["examples"]


def names_defined_in(tree: ast.AST) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def attributes_set_in(tree: ast.AST) -> set[str]:
    return {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)}


def attributes_touched_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Attributes of other objects than ``self``, by a dot or by ``getattr`` and its like, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "")[3:] == "attr":
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield str(name.value), node.lineno


def test_netcl_is_imported_only_where_it_is_known() -> None:
    found = {
        name
        for name, file in MODULES.items()
        if name not in ABOVE_ALL and room(name) not in KNOWS_NETCL + MEASURES_NETCL
        if re.search(r"^\s*(from|import) netcl\b", file.read_text("utf-8"), re.M)
    }
    assert not found


def test_netcls_private_parts_are_touched_only_where_it_is_known() -> None:
    sources = [ast.parse(file.read_text("utf-8")) for file in Path(netcl.__file__).parent.rglob("*.py")]
    found = set().union(*(names_defined_in(tree) | attributes_set_in(tree) for tree in sources))
    netcls = {name for name in found if re.match("_[^_]", name)}
    assert {"_frozen", "_fused_state"} <= netcls
    for module, file in MODULES.items():
        if module in ABOVE_ALL or room(module) in KNOWS_NETCL:
            continue
        tree = tree_of(file)
        theirs = netcls - names_defined_in(tree)
        touched = [f"line {line}: {name}" for name, line in attributes_touched_in(tree) if name in theirs]
        assert not touched, f"{module}: {touched}"


def test_one_file_alone_compiles() -> None:
    """OpenCL programs: its cache, its words on a terminal and its count of them hold for every one."""
    compiling = {name for name, file in MODULES.items() if re.search(r"\bcl\.Program\(", file.read_text("utf-8"))}
    assert compiling == {"clamp.opencl.program"}


def test_amp_gathers_names_and_does_nothing_else() -> None:
    docstring, *rest = tree_of(PACKAGE / "amp.py").body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in rest[:-1])
    assert isinstance(rest[-1], ast.Assign)
    assert ast.unparse(rest[-1].targets[0]) == "__all__"
