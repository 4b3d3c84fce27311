"""The wheel holds everything: kernels and lists are found, and it trains, from outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

SCRIPT = """
import sys, pathlib
import clamp
from clamp import amp
from clamp.opencl.device import list_devices
assert pathlib.Path(clamp.__file__).is_relative_to(sys.argv[1]), clamp.__file__
import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn.layers import Linear
from netcl.optim import SGD
device = next(d for d in list_devices() if d.platform.name != "Oclgrind")
context = cl.Context([device])
queue = cl.CommandQueue(context)
layer = Linear(queue, 8, 4)
optimizer = SGD(layer.parameters(), lr=1e-3)
x = Tensor.from_host(queue, np.ones((4, 8), np.float32))
with amp.init(loss_scale=256.0) as handle:
    loss = ag.mse_loss(layer(ag.tensor(x)), ag.tensor(Tensor.from_host(queue, np.ones((4, 4), np.float32))))
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert handle.last_step.stepped
print("trained")
"""


def test_the_wheel_trains(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("clamp_amp-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(site)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "trained\n", run.stderr
    names = {file.relative_to(site).as_posix() for file in site.rglob("*") if file.is_file()}
    # an editable install answers for a package that the wheel lacks: so they are compared, too
    modules = {file.relative_to(ROOT).as_posix() for file in (ROOT / "clamp").rglob("*.py")}
    assert modules <= names, modules - names
    data = {"kernels": ("*.cl", "*.clh"), "lists": ("*.toml",), "clamp/report": ("*.html", "*.css", "*.js")}
    for folder, patterns in data.items():
        for source in [file for pattern in patterns for file in (ROOT / folder).glob(pattern)]:
            assert f"clamp/{folder.removeprefix('clamp/')}/{source.name}" in names
    assert "clamp/py.typed" in names
    assert not any(name.startswith(("tests/", "examples/")) for name in names)
