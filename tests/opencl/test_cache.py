"""Programs that are kept on disk for the next process."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyopencl as cl
import pytest

from clamp.opencl import cache, cache_writer, program
from clamp.opencl.device import capabilities
from clamp.ops.cast import cast
from tests.faults import inject
from tests.faults.check import as_python_does
from tests.faults.inject import Events
from tests.reference import to_device, to_numpy

_CONTEXTS: list[cl.Context] = []  # Intel's runtime frees a context that only its queue refers to


@pytest.fixture
def folder(queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for programs of the device under test."""
    capabilities(queue)  # builds programs of its own
    monkeypatch.setenv("CLAMP_CACHE_DIR", str(tmp_path / "programs"))
    if cache.file_of(queue.context, "", []) is None:
        pytest.skip("programs of this platform are not kept")
    return tmp_path / "programs"


def _halves(queue: cl.CommandQueue) -> None:
    """Casts in a context that has no programs yet, as a new process has none."""
    _CONTEXTS.append(cl.Context([queue.device]))
    x = to_device(cl.CommandQueue(_CONTEXTS[-1]), np.arange(5.0))
    with cache_writer.at_once():
        assert to_numpy(cast(x, "float16")).tolist() == [0, 1, 2, 3, 4]


@pytest.fixture
def file(queue: cl.CommandQueue, folder: Path) -> Path:
    """The file of a program that was built just now."""
    _halves(queue)
    (file,) = folder.glob("*")
    return file


def _refuse_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "store", lambda *_: pytest.fail("a program that was kept was built again"))


def test_a_kept_program_is_not_built_again(queue: cl.CommandQueue, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_to_build(monkeypatch)
    _halves(queue)


def test_folder_and_file_are_the_users_alone(file: Path) -> None:
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file.parent, file)] == [0o700, 0o600]


#: what may have become of a file
HARM: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "changed": lambda file: file.write_bytes(file.read_bytes().replace(b"ulong", b"float")),
    "others can write to it": lambda file: file.chmod(0o666),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_harmed_file_is_written_anew(queue: cl.CommandQueue, file: Path, harm: Callable[[Path], object]) -> None:
    harm(file)
    assert cache.load(file) is None
    _halves(queue)
    assert cache.load(file) is not None


def _say(file: Path, content: bytes) -> None:
    """Writes what clamp would take for its own."""
    file.write_bytes(cache._digest(file, content) + b"\n" + content)


def _content(signatures: object, binary: bytes, size: int | None = None) -> bytes:
    return json.dumps([len(binary) if size is None else size, signatures]).encode() + b"\n" + binary


#: what another version, or a program that errs, may have written: signatures and binary -> content
OTHER_CONTENTS: dict[str, Callable[[dict[str, list[str]], bytes], bytes]] = {
    "nothing": lambda known, binary: b"",
    "no JSON": lambda known, binary: b"half_storage\n" + binary,
    "no text": lambda known, binary: b"\xff\xfe\n" + binary,
    "a list": lambda known, binary: b"[]\n" + binary,
    "null": lambda known, binary: b"null\n" + binary,
    "without the size": lambda known, binary: json.dumps(known).encode() + b"\n" + binary,
    "a list of kernels": lambda known, binary: _content(list(known), binary),
    "no kernels": lambda known, binary: _content({}, binary),
    "another kernel": lambda known, binary: _content({"other": next(iter(known.values()))}, binary),
    "one more": lambda known, binary: _content({**known, "other": []}, binary),
    "fewer arguments": lambda known, binary: _content({k: types[1:] for k, types in known.items()}, binary),
    "no arguments": lambda known, binary: _content({k: [] for k in known}, binary),
    "unknown types": lambda known, binary: _content({k: ["int9"] * len(types) for k, types in known.items()}, binary),
    "numbers for types": lambda known, binary: _content({k: [1] * len(types) for k, types in known.items()}, binary),
    "half a binary": lambda known, binary: _content(known, binary[: len(binary) // 2], len(binary)),
    "no binary": lambda known, binary: _content(known, b"", len(binary)),
    "a binary that the driver refuses": lambda known, binary: _content({k: [] for k in known}, b"no binary"),
}


@pytest.mark.long
def test_other_content_with_a_right_check_sum_is_written_anew(queue: cl.CommandQueue, file: Path) -> None:
    kept = cache.load(file)
    assert kept is not None
    for name, made in OTHER_CONTENTS.items():
        _say(file, made(kept.signatures, kept.binary))
        _halves(queue)
        known = cache.load(file)
        assert known is not None, name
        assert known.signatures == kept.signatures, name


def test_what_is_no_file_of_the_users_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe would wait for whoever writes into it, a link leads elsewhere."""
    good, file = tmp_path / "good.x", tmp_path / "file.x"
    opened: list[object] = []
    monkeypatch.setattr(os, "open", lambda *args, **more: opened.append(args) or pytest.fail("was opened"))
    made = {
        "pipe": os.mkfifo,
        "folder": os.mkdir,
        "link": lambda path: (good.write_bytes(b""), os.symlink(good, path)),
        "nothing": lambda path: None,
    }
    for make in made.values():
        make(file)
        assert cache.read(file, bytes) is None
        if file.is_dir():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
    assert opened == []


def test_a_pipe_that_comes_between_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, pipe = tmp_path / "file.x", tmp_path / "pipe.x"
    file.write_bytes(b"")
    os.mkfifo(pipe)
    there = os.lstat(file)
    monkeypatch.setattr(os, "lstat", lambda _: there)
    assert cache.read(pipe, bytes) is None


def test_files_of_another_format_are_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAMP_CACHE_DIR", str(tmp_path / "cache"))
    now = cache.file_for("key", ".x")
    monkeypatch.setattr(cache, "_FORMAT", cache._FORMAT + 1)
    assert now != cache.file_for("key", ".x")


def test_a_program_under_the_name_of_another_is_not_loaded(queue: cl.CommandQueue, file: Path) -> None:
    renamed = file.with_name("0" * len(file.stem) + file.suffix)
    file.rename(renamed)
    assert cache.load(renamed) is None


def test_a_folder_that_others_can_write_to_is_left_alone(queue: cl.CommandQueue, folder: Path) -> None:
    folder.chmod(0o777)
    _halves(queue)
    assert list(folder.iterdir()) == []


def test_nothing_is_kept_where_that_is_off_or_impossible(
    queue: cl.CommandQueue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for named in ("off", __file__, f"{__file__}/programs"):
        monkeypatch.setenv("CLAMP_CACHE_DIR", named)
        _halves(queue)
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_no_error(queue: cl.CommandQueue, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("no space left on device")))
    _halves(queue)
    assert list(folder.iterdir()) == []


def test_without_a_folder_named_it_is_the_users_cache(
    queue: cl.CommandQueue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLAMP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    kept = cache.file_of(queue.context, "", [])
    assert kept is not None
    assert kept.parent == folder / "clamp" / "programs"


def test_the_name_depends_on_source_options_and_what_drivers_are_told(
    queue: cl.CommandQueue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: tuple[tuple[str, list[str]], ...] = (("a", []), ("b", []), ("a", ["-DB"]), ("a", ["-DB=1"]))
    names = [cache.file_of(queue.context, *each) for each in programs]
    told = {"PYOPENCL_BUILD_OPTIONS": "-cl-fast-relaxed-math", "CL_CONFIG_CPU_TARGET_ARCH": "core-avx2"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
        names.append(cache.file_of(queue.context, "a", []))
    assert len(set(names)) == 6


def test_signatures_are_the_same_from_disk(queue: cl.CommandQueue, file: Path) -> None:
    known = cache.load(file)
    assert known is not None
    built = program.Kernel("cast.cl", "cast")._built(_CONTEXTS[-1], {"X_T": "f32", "Y_T": "f16", "PIECES": 0})
    assert known.signatures == built.signatures == {"cast": ["float*", "half*", "ulong", "uint"]}


def test_ctrl_c_while_a_file_is_kept_goes_on_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes, in Python's own modules too."""
    monkeypatch.setattr(inject, "_FOLDERS", (*inject._FOLDERS, tempfile.__file__))
    file = tmp_path / "kept"
    cache.write(file, b"before")
    for place in range(1000):
        events = Events(("write", place))
        with suppress(KeyboardInterrupt), as_python_does(), events.counted():
            events.phase = "write"
            cache.write(file, b"after")
        events.phase = ""
        assert list(tmp_path.iterdir()) == [file], events.where
        assert cache.read(file, bytes) in (b"before", b"after"), events.where
        if events.where is None:
            break
        cache.write(file, b"before")
    assert place > 10, "it was interrupted"
