"""The Python blocks of the README and of the documents: they run, and do what they say they do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyopencl as cl
import pytest

from clamp import session
from tests.documents.pages import PAGES
from tests.documents.runner import ROOT, is_as_claimed, python_blocks, run
from tests.ranks.test_distributed import launcher, run_ranks  # noqa: F401  (a fixture)

ELSEWHERE = {"docs/netcl-defects.md"}  # runs twice, as netcl and as clamp: test_defects_of_netcl_are_as_documented
MPI = "docs/several-devices.md"


@pytest.fixture
def registrations() -> Iterator[None]:
    """Forgets what a page registers."""
    before = list(session.registrations)
    yield
    session.registrations[:] = before


@pytest.mark.usefixtures("registrations")
@pytest.mark.parametrize("file", PAGES)
@pytest.mark.long
def test_scripts_of_a_document_do_what_they_say(
    queue: cl.CommandQueue, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lists = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/policies.md").read_text(encoding="utf-8"), re.DOTALL)
    Path("mine.toml").write_text("".join(lists), encoding="utf-8")
    check, claims = PAGES[file]
    page = run(file, queue, monkeypatch)
    assert page.claims == claims
    check(page, queue)


def test_every_python_block_of_every_document_is_run() -> None:
    documents = {"README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))}
    assert {file for file in documents if python_blocks(file)} == PAGES.keys() | ELSEWHERE
    for file in documents:
        text = (ROOT / file).read_text(encoding="utf-8")
        fences = re.findall(r"^ *```(\S.*)$", text, re.MULTILINE)
        assert set(fences) <= {"python", "python mpi", "diff", "sh", "text", "toml"}, file
        assert fences.count("python mpi") == (file == MPI), file
        assert fences.count("python") == len(python_blocks(file)), file
        indented = re.findall(r"^    (?:from \S+ import|import|with|for|\w+ = ).*", text, re.MULTILINE)
        in_blocks = "".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
        assert [line for line in indented if line not in in_blocks] == [], file


def test_the_difference_in_the_readme_is_that_of_its_script() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    difference = re.search(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1].splitlines()
    after = [line[1:] for line in difference if not line.startswith("-")]
    script = [line.partition("  #")[0].rstrip() for line in python_blocks("README.md")[0][1].splitlines()]
    first = script.index(after[0])
    assert script[first : first + len(after)] == after


@pytest.mark.slow
def test_script_for_mpi_runs_and_keeps_the_same_bits(launcher: list[str], tmp_path: Path) -> None:  # noqa: F811
    text = (ROOT / MPI).read_text(encoding="utf-8")
    script = tmp_path / "mpi_page.py"
    script.write_text(re.search(r"^```python mpi\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1], encoding="utf-8")
    status, output = run_ranks(launcher, 2, str(script))
    assert status == 0, output
    lines = sorted(line for line in output.splitlines() if line[:2] in ("0 ", "1 "))
    assert len(lines) == 2, output
    assert all("stepped=True" in line for line in lines), output
    assert lines[0].split()[-1] == lines[1].split()[-1], output


@pytest.mark.parametrize(
    ("shown", "claim", "holds"),
    [
        ("32768.0", "32768.0", True),
        ("32768.0", "65536.0", False),
        ("{'a': 1, 'b': 2}", "{'a': 1, ...}", True),
        ("{'a': 2, 'b': 2}", "{'a': 1, ...}", False),
        ("float32", "float32: the masters", True),
        ("float16", "float32: the masters", False),
        ("", "32768.0", False),
    ],
)
def test_a_comment_is_taken_at_its_word(shown: str, claim: str, holds: bool) -> None:
    assert is_as_claimed(shown, claim) == holds
