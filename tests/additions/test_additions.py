"""docs/architecture.md, "To add ...": each addition is made in a copy of the tree, takes as many files as the page
says, and works there as if it had always been in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyopencl as cl
import pytest

from tests.scripts import ROOT, run_script

ADDITIONS = Path(__file__).parent
FOLDERS = ("clamp", "kernels", "lists", "tests")


def files_of(root: Path) -> dict[str, bytes]:
    """The files of a tree that belong to the project."""
    found = [file for folder in FOLDERS for file in (root / folder).rglob("*") if "__pycache__" not in file.parts]
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in found if file.is_file()}


class Tree:
    """A copy of this tree, to add something to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in FOLDERS:  # without what other test processes may be writing
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        for folder in ("kernels", "lists"):  # they are packages of clamp's
            (root / "clamp" / folder).symlink_to(root / folder)
        self._before = files_of(root)

    def add(self, folder: str) -> None:
        """Adds the new files of an addition."""
        shutil.copytree(ADDITIONS / folder, self.root, dirs_exist_ok=True)

    def insert(self, file: str, before: str, text: str) -> None:
        """Adds text to a file, before the one place where it says something else."""
        path = self.root / file
        there = path.read_text(encoding="utf-8")
        assert there.count(before) == 1, f"{before!r} stands {there.count(before)} times in {file}"
        path.write_text(there.replace(before, text + before), encoding="utf-8")

    def touched(self) -> set[str]:
        """The files that are new, or others than they were."""
        return {name for name, content in files_of(self.root).items() if self._before.get(name) != content}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The device under test as CLAMP_TEST_DEVICES names it."""
    return str(request.node.callspec.params["queue"])


def add_op(tree: Tree) -> None:
    """softsign: four new files, and its line in a list."""
    tree.add("op")
    tree.insert("lists/autograd.toml", '"netcl.autograd.tanh"', '"netcl.autograd.softsign" = "Bounded."\n')


def add_policy(tree: Tree) -> None:
    """wide_range: its name, and what it means."""
    name = '    WIDE_RANGE = "wide_range"  #: inputs used in bfloat16, fp32 accumulation, output in bfloat16\n'
    at_work = """\
class WideRange(Half):
    in_words = "in bfloat16"

    @classmethod
    def at_work(cls, region: Region, function: str) -> Casting:
        return cls("bfloat16", reporter(region, function), region.cache_enabled)

    @classmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return "bfloat16"


"""
    tree.insert("clamp/casting/policy_table.py", '    NONE = "none"', name)
    tree.insert("clamp/casting/policies.py", "POLICIES:", at_work)
    tree.insert("clamp/casting/policies.py", "    CastPolicy.NONE:", "    CastPolicy.WIDE_RANGE: WideRange,\n")


def add_engine(tree: Tree) -> None:
    """plain, a GEMM: two new files, and its place in the list of engines, before all others."""
    tree.add("engine")
    tree.insert("clamp/ops/gemm/engines.py", "tiled\n", "plain, ")  # imported
    tree.insert("clamp/ops/gemm/engines.py", "amx, dot_bf16, direct, packed,", "plain, ")


@pytest.mark.parametrize(
    ("kind", "add", "touched", "shown"),
    [
        (
            "op",
            add_op,
            "kernels/softsign.cl clamp/ops/softsign.py clamp/functions/softsign.py lists/autograd.toml "
            "tests/conformance/softsign.py",
            [
                "policy match reason Bounded. runs as clamp in its input's dtype",
                "kernels softsign.cl (clamp.functions.softsign.softsign)",
                " passed, ",  # its row of the conformance table, and the macros in its kernel's head
            ],
        ),
        (
            "policy",
            add_policy,
            "clamp/casting/policy_table.py clamp/casting/policies.py",
            ["netcl.autograd.matmul_op runs as clamp in bfloat16"],
        ),
        (
            "engine",
            add_engine,
            "kernels/gemm_plain.cl clamp/ops/gemm/plain.py clamp/ops/gemm/engines.py",
            [
                "gemm_plain.cl",
                "products of float16: plain kernel, an element at a time",
                "float16 plain,",
                "ok: products and casts agree with numpy",
                " passed, ",  # the macros in its kernel's head
            ],
        ),
    ],
    ids=["op", "policy", "engine"],
)
@pytest.mark.long
def test_an_addition_takes_so_many_files_and_is_used(
    queue: cl.CommandQueue,
    device: str,
    tree: Tree,
    kind: str,
    add: Callable[[Tree], None],
    touched: str,
    shown: list[str],
) -> None:
    add(tree)
    assert tree.touched() == set(touched.split())
    module = f"tests.additions.use_{kind}"
    output = run_script(queue, "-m", module, folder=tree.root, CLAMP_TEST_DEVICES=device, CLAMP_TEST_SLOW="1")
    output = " ".join(output.replace("│", " ").split())  # lines of a table
    assert [text for text in shown if text not in output] == []
