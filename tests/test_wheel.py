"""The wheel holds everything: kernels and lists are found, and it trains, from outside the checkout. Two are alike."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from build import ProjectBuilder
from build.env import DefaultIsolatedEnv
from packaging.requirements import Requirement

import clamp

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


LOOKS = """
import clamp, pathlib
from importlib.resources import files
from clamp import amp
print(pathlib.Path(clamp.__file__).resolve().parents[1], clamp.__version__, callable(amp.init))
print(all(files(f"clamp.{name}").joinpath("__init__.py").is_file() for name in ("kernels", "lists")))
"""


def looked(where: Path, *paths: Path, python: str = sys.executable) -> list[str]:
    """What a script in a folder finds, with these paths as an installation adds them: after all others."""
    where.joinpath("script.py").write_text(f"import sys; sys.path += {[str(path) for path in paths]}\n{LOOKS}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([python, "script.py"], cwd=where, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_a_checkout_named_clamp_beside_the_script(tmp_path: Path) -> None:
    """Python takes the folder for a package without a file, unless a path leads to the package itself."""
    (tmp_path / "clamp").symlink_to(ROOT)
    assert looked(tmp_path, ROOT) == [f"{ROOT} {clamp.__version__} True", "True"]


@pytest.mark.slow
def test_an_editable_install_of_a_checkout_named_clamp_beside_the_script(tmp_path: Path) -> None:
    checkout = tmp_path / "clamp"
    checkout.mkdir()
    for name in ("clamp", "kernels", "lists", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "-e", str(checkout)]
    subprocess.run(install, check=True, capture_output=True)
    dependencies = Path(sysconfig.get_path("purelib"))
    assert looked(tmp_path, dependencies, python=python) == [f"{checkout} {clamp.__version__} True", "True"]


def test_the_cpu_runtime_is_visible_without_the_packages_own_file(tmp_path: Path) -> None:
    """As where a folder named clamp hides it."""
    script = (
        "import sys, types, os\n"
        "from clamp.opencl import device; library = device.intel_cpu_runtime()\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'clamp']: del sys.modules[name]\n"
        "os.environ.pop('OCL_ICD_VENDORS', None)\n"
        "hidden = sys.modules['clamp'] = types.ModuleType('clamp')\n"
        f"hidden.__path__ = {[str(ROOT / 'clamp'), str(ROOT)]}\n"
        "from clamp import amp\n"
        "assert library is None or 'OCL_ICD_VENDORS' in os.environ\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OCL_ICD_VENDORS"}
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders, each with the source archive and the wheel, of the checkout and of what its source archive holds."""
    folder = tmp_path_factory.mktemp("archives")
    of_checkout, of_copy = folder / "checkout", folder / "copy"
    with DefaultIsolatedEnv() as environment:
        environment.install(ProjectBuilder.from_isolated_env(environment, ROOT).build_system_requires)
        _build(environment, ROOT, of_checkout)
        with tarfile.open(next(of_checkout.glob("*.tar.gz"))) as archive:
            archive.extractall(folder / "tree", filter="data")
        (tree,) = (folder / "tree").iterdir()
        (tree / "PKG-INFO").unlink()
        for file in tree.rglob("*"):  # another user's, of another day
            os.utime(file, (1.1e9, 1.1e9))
            file.chmod(0o700 if file.is_dir() or file.stat().st_mode & 0o100 else 0o600)
        _build(environment, tree, of_copy)
    return of_checkout, of_copy


def _build(environment: DefaultIsolatedEnv, tree: Path, folder: Path) -> None:
    builder = ProjectBuilder.from_isolated_env(environment, tree)
    for kind in ("sdist", "wheel"):
        builder.build(kind, folder)


@pytest.mark.slow
def test_archives_are_the_same_bytes_wherever_they_are_built(archives: tuple[Path, Path]) -> None:
    of_checkout, of_copy = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in archives)
    version = f"clamp_amp-{clamp.__version__}"
    assert of_checkout.keys() == of_copy.keys() == {f"{version}.tar.gz", f"{version}-py3-none-any.whl"}
    assert [name for name in of_checkout if of_checkout[name] != of_copy[name]] == []


@pytest.mark.slow
def test_the_wheel_trains(archives: tuple[Path, Path], tmp_path: Path) -> None:
    (wheel,) = archives[0].glob("clamp_amp-*.whl")
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
    data = {"kernels": ("*.cl", "*.clh"), "lists": ("*.toml",), "clamp/debug/page": ("*.html", "*.css", "*.js")}
    for folder, patterns in data.items():
        for source in [file for pattern in patterns for file in (ROOT / folder).glob(pattern)]:
            assert f"clamp/{folder.removeprefix('clamp/')}/{source.name}" in names
    assert "clamp/py.typed" in names
    assert not any(name.startswith(("tests/", "examples/")) for name in names)
    metadata = site / f"clamp_amp-{clamp.__version__}.dist-info"
    bill = json.loads((metadata / "sboms/clamp-amp.cdx.json").read_text("utf-8"))
    needed = [
        Requirement(line)
        for line in Parser().parsestr((metadata / "METADATA").read_text("utf-8")).get_all("Requires-Dist")
    ]
    listed = {component["name"]: component["versionRange"] for component in bill["components"]}
    assert listed.keys() == {requirement.name for requirement in needed if requirement.marker is None}
    assert listed["netcl"] == "vers:pypi/>=0.4.4|<0.5"
