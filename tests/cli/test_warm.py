"""``python -m clamp warm``: what it compiles later processes need not compile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyopencl as cl
import pytest

from clamp.cli import main, warm
from clamp.opencl import amx, cache

#: how scripts begin, given a device
HEAD = """
import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.core.tensor import Tensor

from clamp import amp
from clamp.cli.devices import choose_device

context = cl.Context([choose_device({device!r})])
queue = cl.CommandQueue(context)
x = ag.tensor(Tensor.from_host(queue, np.ones((2, 5), np.float32)))
"""

TRAINING = """
from netcl.nn.layers import Linear
from netcl.optim import SGD

model = Linear(queue, 5, 3)
optimizer = SGD(model.parameters(), lr=1e-3)
handle = amp.init(loss_scale=1.0)
y = ag.tensor(Tensor.from_host(queue, np.ones((2, 3), np.float32)))
for step in range(10**9):
    with ag.Tape() as tape:
        loss = ag.mse_loss(model(x), y)
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        tape.backward(scaled_loss)
    optimizer.step()
"""

INFERENCE = """
with amp.autocast(dtype="bfloat16"):
    ag.exp(x)
"""


@pytest.fixture
def device(queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a device whose programs are kept, in an empty folder."""
    if cache.file_of(queue.context, "", []) is None:
        pytest.skip("programs of this platform are not kept")
    monkeypatch.setenv("CLAMP_CACHE_DIR", str(tmp_path / "kept"))
    return str(queue.device.platform.name)


Warm = Callable[..., int]


@pytest.fixture
def warmed(device: str, tmp_path: Path) -> Warm:
    """The exit status of ``python -m clamp warm`` for a script that begins with HEAD."""

    def run(text: str, *options: str) -> int:
        script = tmp_path / "script.py"
        script.write_text(HEAD.format(device=device) + text)
        return main(["warm", "--device", device, "--model", str(script), *options])

    return run


@pytest.mark.slow
def test_a_script_is_run_until_its_second_step(
    warmed: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert warmed(TRAINING) == 0
    kept = {file.name for file in (tmp_path / "kept").glob("*.program")}
    said = capsys.readouterr().out.splitlines()
    # A process that tries a matrix unit keeps what it has compiled there, too.
    others = (0, 1) if amx.is_listed("bfloat16") else (0,)
    assert len(kept) - int(said[-1].split()[0]) in others
    assert "programs compiled" in said[-1]
    assert warmed(TRAINING) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to compile: all is there already"
    assert {file.name for file in (tmp_path / "kept").glob("*.program")} == kept


@pytest.mark.slow
def test_the_list_shows_what_programs_take_and_keeps_none(
    warmed: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert warmed(TRAINING, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split() for line in lines if ".cl " in line]
    seconds = [float(line[0]) for line in listed]
    assert seconds == sorted(seconds, reverse=True)
    assert "multi_tensor.cl" in {line[2] for line in listed}
    assert lines[-1].startswith(f"{len(listed)} programs compiled")
    assert not list((tmp_path / "kept").glob("*.program"))


def test_a_script_that_makes_no_step_has_its_programs_compiled(warmed: Warm, tmp_path: Path) -> None:
    assert warmed(INFERENCE) == 0
    assert list((tmp_path / "kept").glob("*.program"))


def test_what_it_has_begun_ends_with_it(device: str, tmp_path: Path) -> None:
    script, began = tmp_path / "endless.py", tmp_path / "began"
    os.mkfifo(began)
    script.write_text(f"import time\nopen({str(began)!r}, 'w').close()\ntime.sleep(600)")
    command = [sys.executable, "-m", "clamp", "warm", "--device", device, "--model", str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            began.read_text()  # waits
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=100)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, error.split()[-1]) == (130, "interrupted")


@pytest.mark.parametrize("folder", ["off", "file/programs"])
def test_what_no_later_process_finds_is_said(
    warmed: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLAMP_CACHE_DIR", folder if folder == "off" else str(tmp_path / folder))
    ran = tmp_path / "ran"
    assert warmed(f"open({str(ran)!r}, 'w')\n{INFERENCE}") == 1
    assert "not kept for later processes: CLAMP_CACHE_DIR is off, or cannot be written to" in capsys.readouterr().err
    assert not ran.exists(), "before anything is compiled"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ValueError('no data here')", "ValueError: no data here"),
        (
            "import netcl",
            "it has computed nothing under AMP: warm compiles for scripts that turn it on, by amp.init() say",
        ),
    ],
)
def test_a_script_that_fails_is_reported(
    warmed: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    assert warmed(text) == 1
    said = capsys.readouterr().err.splitlines()  # on a machine that is busy also that it takes long
    assert [line for line in said if not line.startswith("clamp: compiling")] == [f"{tmp_path / 'script.py'}: {says}"]


@pytest.mark.slow
@pytest.mark.parametrize("model", warm.NETWORKS)
def test_networks(device: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "--device", device, "--model", model]) == 0
    assert main(["warm", "--device", device, "--model", model]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to compile: all is there already"
    assert len(os.listdir(tmp_path / "kept")) > 10
