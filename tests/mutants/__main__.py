"""Puts small faults into clamp, one at a time, and looks whether the tests see them::

    python -m tests.mutants --map                                # once, and when tests have changed much: 20 minutes
    python -m tests.mutants --sample 200 --seed 1                # of each room as many
    python -m tests.mutants --sample 20 --rooms kernels/softmax  # or of files
    python -m tests.mutants --map tests/params --rooms params    # a map of less, in less time

A mutant is run, in a copy of the tree, against the tests of an everyday run that pass its line or build its piece of a
kernel, until one fails or the time is over. What is left has survived: a test is missing, or no test can be, and then
``equivalent.toml`` says why. Needs the extra ``mutants``, and ``cpp``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from difflib import SequenceMatcher
from functools import cache
from hashlib import sha256
from importlib.util import cache_from_source
from itertools import zip_longest
from pathlib import Path

from coverage import CoverageData

from tests.mutants.population import Mutant, Places

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clamp-mutants"
TREE, RIGHT = HOME / "tree", HOME / "right"  # where mutants run; its kernels without one
MAPPED = HOME / "mapped"  # the sources as they were when tests were mapped
ROOMS = {
    **{room: (f"clamp/{room}",) for room in ("scaling", "params", "casting", "patching", "recordings")},
    "kernels": ("kernels",),
}
# They take long, or look at the tree itself.
_LEFT_OUT = ("tests/additions", "tests/documents", "tests/mutants", "tests/test_examples.py", "tests/test_wheel.py")
# The tests that are mapped: of kernels, by what they build; of Python, by the lines they pass, which takes longer.
_MAPPED = {True: ("tests/ops", "tests/conformance", "tests/functions"), False: ("tests",)}
_ENVIRONMENT = {**os.environ, "XDG_CACHE_HOME": str(HOME / "cache")}
_PYTEST = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin")
_NEAREST, _MOST = 100, 400  # tests for a mutant: at first, and at most
_AT_ONCE = 0.05  # seconds of a test that builds nothing: all its cases come before what takes longer


def copy_tree() -> None:
    """Makes the copy what the checkout is."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    shutil.rmtree(TREE, ignore_errors=True)
    for name in filter(None, listed.stdout.split("\n")):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)
    for folder in ("kernels", "lists"):  # packages of clamp's
        (TREE / "clamp" / folder).symlink_to(TREE / folder)
    shutil.copytree(TREE / "kernels", RIGHT / "kernels", dirs_exist_ok=True)


def map_tests(kernels: bool, paths: list[str]) -> None:
    """Runs the everyday tests once, or some, and keeps which of them build which kernels, or pass which line."""
    (HOME / "cache").mkdir(mode=0o700, parents=True, exist_ok=True)
    measured = () if kernels else ("-m", "coverage", "run", "--source=clamp", f"--data-file={HOME / 'coverage'}")
    chosen = (*(paths or _MAPPED[kernels]), *(f"--ignore={path}" for path in _LEFT_OUT))
    environment = {**_ENVIRONMENT, "CLAMP_MUTANTS_RECORD": str(_recorded(kernels))}
    subprocess.run([sys.executable, *measured, *_PYTEST, *chosen], cwd=TREE, env=environment)
    if not kernels:
        shutil.rmtree(MAPPED, ignore_errors=True)
        left_out = shutil.ignore_patterns("__pycache__", "kernels", "lists")
        shutil.copytree(TREE / "clamp", MAPPED / "clamp", ignore=left_out)


def _recorded(kernels: bool) -> Path:
    return HOME / ("tests-kernels.json" if kernels else "tests.json")


class Map:
    """Which tests to run for a mutant of a kernel, or of Python."""

    def __init__(self, kernels: bool) -> None:
        recorded = json.loads(_recorded(kernels).read_text())
        self._builds: list[list[str]] = recorded["builds"]
        self._tests: dict[str, tuple[float, list[int]]] = recorded["tests"]
        self._of_build, self._of_function = defaultdict[int, list[str]](list), defaultdict[str, list[str]](list)
        for test, (_, builds) in self._tests.items():
            self._of_function[test.partition("[")[0]].append(test)
            for build in builds:
                self._of_build[build].append(test)
        self._lines = CoverageData(str(HOME / "coverage"))
        self._lines.read()

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that a mutant may fail: those of its room first, and of each function the quickest."""
        is_kernel = mutant.file.startswith("kernels")
        room = "tests/ops/" if is_kernel else f"tests/{mutant.file.split('/')[1]}/"
        found = set(self._building(mutant) if is_kernel else self._passing(mutant, room))
        functions = defaultdict[str, list[str]](list)
        for test in sorted(found, key=lambda test: (is_kernel and "pocl" in test, self._tests[test][0])):
            functions[test.partition("[")[0]].append(test)

        def far(cases: list[str]) -> tuple[bool, float]:
            seconds, builds = self._tests[cases[0]]
            return not cases[0].startswith(room), seconds + len(builds)

        known = {test.partition("::")[0] for test in self._tests}
        new = [path.relative_to(TREE).as_posix() for path in sorted((TREE / room).glob("test_*.py"))]
        ordered = [test for turn in zip_longest(*sorted(functions.values(), key=far)) for test in turn if test]
        ordered.sort(key=lambda test: not test.startswith(room) or far([test])[1] > _AT_ONCE)
        return [*(file for file in new if file not in known and not is_kernel), *ordered]

    def _passing(self, mutant: Mutant, room: str) -> Iterator[str]:
        """The tests that pass its line; of its file, if it runs when that is imported; of its room, if it is new."""
        mapped = self._contexts(mutant.file)
        if not mapped:
            yield from (test for test in self._tests if test.startswith(room))
        line = _line_before(mutant, (MAPPED / mutant.file).read_text() if mapped else "")
        passed = max((at for at in mapped if at <= line), default=0)
        functions = set(mapped.get(passed, ())) - {""} or {each for some in mapped.values() for each in some}
        yield from (test for function in functions for test in self._of_function[function])

    @cache  # noqa: B019  (there is one map)
    def _contexts(self, file: str) -> dict[int, list[str]]:
        return self._lines.contexts_by_lineno(str(TREE / file))

    def _building(self, mutant: Mutant) -> Iterator[str]:
        """The tests that build a kernel of which the preprocessor makes another one."""
        name = mutant.file.partition("/")[2]
        for number, (file, *options) in enumerate(self._builds):
            if name in _included(file) and _right(file, *options) != _preprocessed(TREE, file, *options):
                yield from self._of_build[number]


def _line_before(mutant: Mutant, mapped: str) -> int:
    """Which line the mutant's was when tests were mapped, or the one before it."""
    matcher = SequenceMatcher(None, mapped.splitlines(), mutant.before.splitlines(), autojunk=False)
    kept = [block for block in matcher.get_matching_blocks() if block.size and block.b < mutant.line]
    return max((block.a + min(mutant.line - block.b, block.size) for block in kept), default=1)


@cache
def _included(file: str) -> frozenset[str]:
    """The files that a program is made of."""
    path = ROOT / "kernels" / file
    inner = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE) if path.exists() else []
    return frozenset(("common.clh", file)).union(*map(_included, inner))


def _preprocessed(root: Path, file: str, *options: str) -> bytes:
    folder = root / "kernels"
    flags = ["-P", "-w", "-march=native", "-I", str(folder), "-include", "common.clh"]
    command = ["cpp", *flags, *options, str(folder / file)]
    return sha256(subprocess.run(command, capture_output=True).stdout).digest()


@cache
def _right(file: str, *options: str) -> bytes:
    return _preprocessed(RIGHT, file, *options)


def run(tests: list[str], seconds: float) -> str:
    """What becomes of the tree as it is: "killed by ...", "survived" or "survived so long"."""
    (HOME / "chosen.txt").write_text("\n".join(tests))
    command = [sys.executable, *_PYTEST, "-x", "--tb=no", f"@{HOME / 'chosen.txt'}"]
    environment = {**_ENVIRONMENT, "CLAMP_MUTANTS_SECONDS": str(seconds)}
    with (HOME / "said.txt").open("w+") as log:  # no pipe, which a process that a test has started would hold open
        child = subprocess.Popen(
            command, cwd=TREE, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(30 * seconds)  # the plugin ends it sooner, by the time of processors
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it has started
        child.wait()
        log.seek(0)
        said = log.read()
    if code in (None, -signal.SIGXCPU, -signal.SIGKILL):
        return "killed by its time"
    if missing := set(re.findall(r"^ERROR: not found: \S*?(tests/.*)$", said, re.MULTILINE)):
        return run([test for test in tests if not {test, test.partition("[")[0]} & missing], seconds)
    if code == 0:
        return "survived so long" if "the time is over" in said else "survived"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return f"killed by {failed[1] if failed else said[-300:]}"


def tried(mutant: Mutant, tests_of: Map, seconds: float) -> str:
    """Puts a mutant into the tree, runs it, and takes it out again."""
    path = TREE / mutant.file
    path.write_text(mutant.after)
    try:
        tests = tests_of.tests(mutant)
        result = "nothing builds it here"
        for some in filter(None, (tests[:_NEAREST], tests[_NEAREST:_MOST])):  # most are killed by the nearest
            result = f"{run(some, seconds)} ({len(tests)} tests)"
            if not result.startswith("survived"):
                break
        return result
    finally:
        path.write_text(mutant.before)
        Path(cache_from_source(str(path))).unlink(missing_ok=True)  # two edits of one second may be as long


def sampled(room: str, rng: random.Random) -> Iterator[Mutant]:
    """The mutants of a room, or of files whose names begin so, each place once, in an order that the seed decides."""
    files = [f.relative_to(ROOT).as_posix() for name in ("clamp", "kernels") for f in sorted((ROOT / name).rglob("*"))]
    inside = [f for f in files if f.startswith(ROOMS.get(room, (room,))) and f.endswith((".py", ".cl", ".clh"))]
    mutable = [Places(f, (ROOT / f).read_text()) for f in inside]
    places = [(file, place) for file in mutable for place in file]
    rng.shuffle(places)
    yield from filter(None, (file.mutant(place, rng) for file, place in places))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("::")[0])
    parser.add_argument("--map", nargs="*", help="run the everyday tests, or these, and keep what each of them passes")
    parser.add_argument("--sample", type=int, default=0, help="how many mutants, in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", default=",".join(ROOMS), help="or beginnings of files' names (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="of processors, for each mutant (%(default)s)")
    asked = parser.parse_args()
    copy_tree()
    rooms = asked.rooms.split(",")
    kinds = {room.startswith("kernels") for room in rooms}
    for kernels in () if asked.map is None else sorted(kinds):
        map_tests(kernels, asked.map)
    maps = {kernels: Map(kernels) for kernels in kinds}
    listed = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())["mutants"]
    equivalent = {(each["file"], *each["diff"]) for each in listed}
    for number, room in enumerate(rooms):
        count, results = (asked.sample + number) // len(rooms), Counter[str]()
        for mutant in sampled(room, random.Random(f"{asked.seed} {room}")):
            if results["killed"] + results["survived"] >= count:
                break
            is_known = (mutant.file, *mutant.diff) in equivalent
            what = "equivalent" if is_known else tried(mutant, maps[room.startswith("kernels")], asked.seconds)
            results[what.split()[0] if what.startswith(("killed", "survived")) else what] += 1
            print(f"{mutant.file}:{mutant.line} {what}", *mutant.diff, sep="\n    ", flush=True)
        print(f"{room}, seed {asked.seed}: {dict(results)}", flush=True)


if __name__ == "__main__":
    main()
