"""``python -m clamp trace`` and ``compare``, and ``clamp_golden``: one changed bit of one op is found and named."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyopencl as cl
import pytest

from clamp import bridge
from clamp.cli import main
from clamp.cli.devices import slug
from clamp.functions import arithmetic as bound_elementwise
from clamp.ops.elementwise import elementwise
from tests.scripts import run_here

pytestmark = pytest.mark.usefixtures("shut_down")

STEP = """
import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn import functional as F
from netcl.nn.layers import Linear, Sequential, Tanh
from netcl.optim import Adam

queue = cl.CommandQueue(cl.create_some_context(interactive=False))

def make():
    return Sequential(Linear(queue, 8, 16), Tanh(), Linear(queue, 16, 2))

def loss_of(model):
    x = Tensor.from_host(queue, np.random.standard_normal((4, 8)).astype(np.float32))
    y = Tensor.from_host(queue, np.ones((4, 2), np.float32))
    return F.mse_loss(model(ag.tensor(x)), ag.tensor(y))
"""
SCRIPT = (
    STEP
    + """
model = make()
optimizer = Adam(model.parameters())
while True:
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
TEST = (
    STEP
    + """
import pytest
from clamp import amp

@pytest.mark.parametrize("dtype", ["float16"])
def test_step(clamp_golden, dtype):
    np.random.seed(0)
    model = make()
    with amp.init(dtype=dtype):
        for _ in range(2):
            clamp_golden(lambda: loss_of(model).backward())
"""
)


def one_ulp_off(name: str) -> Callable[..., Any]:
    """clamp's elementwise kernels, with the last bit of one result of one function changed."""

    def call(op: str, out_dtype: str, *values: Any, **options: Any) -> Any:
        out = elementwise(op, out_dtype, *values, **options)
        if op == name:
            found = bridge.read_bytes(out).copy()
            found[0] ^= 1
            bridge.write_bytes(out, found)
        return out

    return call


@pytest.fixture
def folder(queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scripts of the device under test run in this process."""
    run_here(queue, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("op", "found"),
    [("tanh", "forward of tanh in layers.1 (train.py:18), result"),
     ("tanh_grad", "backward of tanh in layers.1 (train.py:18), gradient of input 0")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_ulp_of_a_kernel_is_found_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, op: str, found: str
) -> None:
    assert main(["trace", "--dtype", dtype, "-o", "golden", "train.py"]) == 0
    assert main(["compare", "golden", "train.py"]) == 0
    assert "values are those of golden" in capsys.readouterr().out
    monkeypatch.setattr(bound_elementwise, "elementwise", one_ulp_off(op))
    assert main(["compare", "golden", "train.py"]) == 1
    assert found in capsys.readouterr().out


def test_other_devices_settings_and_scripts_are_told(
    folder: Path, queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    golden, file = folder / "golden", folder / "golden" / f"{slug(queue.device)}.json"

    def says(message: str, status: int, *command: str) -> None:
        assert main([*command]) == status
        said = "".join(capsys.readouterr())
        assert re.search(message, said), said

    says("golden has no trace", 2, "compare", "golden", "train.py")
    says("there is no script", 2, "compare", "golden", "nowhere.py")
    says("needs a folder: -o FOLDER", 2, "trace", "train.py", "-x")
    (folder / "idle.py").write_text("x = 1", encoding="utf-8")
    says("no op of this script was seen", 1, "trace", "-o", "golden", "idle.py")
    (folder / "fails.py").write_text("raise ValueError('mine')", encoding="utf-8")
    says("ValueError: mine", 1, "trace", "-o", "golden", "fails.py")
    assert not list(golden.iterdir())

    says(r"written: golden/.*\.json, \d+ values", 0, "trace", "--steps", "1", "-o", "golden", "train.py")
    written = json.loads(file.read_text(encoding="utf-8"))
    assert (written["dtype"], written["steps"]) == ("float16", 1)
    file.rename(golden / "another.json")
    says("golden has no trace of .*, but of another", 1, "compare", "golden", "train.py")
    (folder / "ends.py").write_text(SCRIPT.replace("while True:", "for _ in range(2):"), encoding="utf-8")
    says("the script ended after 2 of 9 steps", 0, "trace", "--steps", "9", "-o", "golden", "ends.py")
    says("written", 0, "trace", "train.py", "-o", "golden")
    says("traces of several dtypes or numbers of steps", 2, "compare", "golden", "train.py")
    (golden / "another.json").write_text("{}", encoding="utf-8")
    says("that `python -m clamp trace` did not write", 2, "compare", "golden", "train.py")
    (golden / "another.json").unlink()

    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "driver": "an older one"}), encoding="utf-8")
    (folder / "train.py").write_text(SCRIPT.replace("16, 2)", "16, 2, bias=False)"), encoding="utf-8")
    says(
        r"(?s)first to differ, after 0 values: .*\nthe driver was an older one then", 1, "compare", "golden", "train.py"
    )


def test_the_fixture_holds_steps_against_files(
    folder: Path, queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "test_it.py").write_text(TEST, encoding="utf-8")

    def tests(*options: str) -> tuple[int, str]:
        base = ["-q", "-s", "-p", "clamp.pytest_plugin", "-p", "no:cacheprovider", "--rootdir", ".", "test_it.py"]
        status = pytest.main([*base, *options])
        sys.modules.pop("test_it", None)
        return int(status), capsys.readouterr().out

    status, said = tests()
    assert status == 1
    assert "write it by pytest --clamp-golden" in said
    assert tests("--clamp-golden")[0] == 0
    name = slug(queue.device)
    files = [f"test_step-float16-2.{name}.json", f"test_step-float16.{name}.json"]
    assert sorted(file.name for file in (folder / "golden").iterdir()) == files
    assert tests()[0] == 0
    monkeypatch.setattr(bound_elementwise, "elementwise", one_ulp_off("tanh"))
    status, said = tests()
    assert status == 1
    assert "forward of tanh in layers.1 (test_it.py:18), result" in said
