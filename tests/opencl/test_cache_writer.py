"""Programs whose binaries are costly are kept by processes beside this one."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyopencl as cl
import pytest

from clamp.opencl import cache, cache_writer, program

MACROS: dict[str, object] = {"X_T": "f32", "Y_T": "f16", "VARIANT": 64, "PIECES": 0}


@pytest.fixture
def context(queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cl.Context:
    """One of a device whose programs are costly to keep, with an empty folder for them, and nothing that waits."""
    if not cache.are_costly(queue.context):
        pytest.skip("programs of this platform are kept at once, or not at all")
    monkeypatch.setenv("CLAMP_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CLAMP_CACHE_LATER")
    monkeypatch.setattr(cache_writer, "_waiting", {})
    monkeypatch.setattr(cache_writer, "_SECONDS", 3600.0)
    context = cl.Context([queue.device])
    yield context
    if cache_writer._timer is not None:
        cache_writer._timer.cancel()


def test_another_process_keeps_what_this_one_has_built(
    context: cl.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = program.build(context, "cast.cl", MACROS)
    assert list(tmp_path.iterdir()) == []
    (process,) = cache_writer.keep_in_background()
    assert process.wait() == 0
    (file,) = tmp_path.iterdir()
    kept = cache.load(file)
    assert kept is not None
    assert kept.signatures == built.signatures
    assert cache_writer.keep_in_background() == [], "it waits no more"

    monkeypatch.setattr(cache_writer, "keep_later", lambda *_: pytest.fail("built again"))
    program.build(context, "cast.cl", MACROS)


def test_it_begins_some_time_after_the_last_build(context: cl.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_writer, "_SECONDS", 0.01)
    begun = threading.Event()
    monkeypatch.setattr(cache_writer, "_keep_and_wait", begun.set)
    program.build(context, "cast.cl", MACROS)
    assert begun.wait(60)


def test_many_are_dealt_to_several_processes(context: cl.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], **options: Any) -> None:
        assert options["stdout"] == subprocess.DEVNULL, "who reads this process's output must not wait for that one"
        commands.append(command)

    monkeypatch.setattr(cache_writer, "_MOST", 2)
    monkeypatch.setattr(subprocess, "Popen", start)
    for span in range(5):
        assert cache_writer.keep_later(context, "cast.cl", {**MACROS, "VARIANT": span})
    cache_writer.keep_in_background()
    assert [command[-1].count("VARIANT") for command in commands] == [2, 2, 1]


def test_it_can_be_switched_off(context: cl.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAMP_CACHE_LATER", "off")
    program.build(context, "cast.cl", MACROS)
    assert cache_writer.keep_in_background() == []
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_process_leaves_it_to_another(context: cl.Context, tmp_path: Path) -> None:
    """And says nothing of it: Python warns of processes that nobody waits for."""
    script = f"""
import subprocess
import pyopencl as cl
from clamp.opencl import cache_writer, program
subprocess.Popen = lambda *_, original=subprocess.Popen, **options: original(["true"], **options)
context = cl.Context([cache_writer.device_at({list(cache_writer.place_of(context.devices[0]))})])
program.build(context, "cast.cl", {MACROS})
assert cache_writer._waiting
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_process_without_a_python_to_start_keeps_nothing(
    context: cl.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    program.build(context, "cast.cl", MACROS)
    assert cache_writer.keep_in_background() == []
