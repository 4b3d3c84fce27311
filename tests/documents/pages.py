"""What each document must have done by its end, besides what the runner looks for on every page."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pyopencl as cl
import pytest

from clamp import amp, session
from clamp.bridge import Node, Tensor
from clamp.cli import main
from clamp.report import read_run
from tests.documents.runner import ROOT, Ran, python_blocks


def readme(page: Ran, queue: cl.CommandQueue) -> None:
    assert "prediction float16" in page.output
    assert float(page.output.split()[1].rstrip(",")) < 0.5  # the loss a row
    assert len(page.steps) == 100
    assert {type(step.optimizer).__name__ for step in page.steps} == {"Adam"}


def checkpoints(page: Ran, queue: cl.CommandQueue) -> None:
    assert len(page.steps) == 7  # one, three more, and the same three again
    history = page["history"]
    assert len(set(history)) == len(history) == 4
    assert history == page["extra"]["history"]


def apex(page: Ran, queue: cl.CommandQueue) -> None:
    optimizers = [step.optimizer for step in page.steps]
    assert optimizers[:3] == [page.steps[0].optimizer] * 3
    assert optimizers[3:] == [page["optimizer_d"], page["optimizer_g"]]
    assert page["optimizer_d"].params[-1] is page["head"].bias


def debugging_accuracy(page: Ran, queue: cl.CommandQueue) -> None:
    assert "No op errs by more than 8 times" in page.output
    assert "first to differ" in page.output
    assert 'amp.init(custom_black_list=["bmm"])' in page.output
    assert page["found"].runs <= 7


def netcl(page: Ran, queue: cl.CommandQueue) -> None:
    assert len(page.steps) == 4 + 1 + 4  # the recipe's, the clipped one, and the Trainer's: eight batches, two a step


def oneflow(page: Ran, queue: cl.CommandQueue) -> None:
    # The graph's twenty calls; then a step as it is, one while it is recorded, and five replays.
    assert len(page.steps) == 20 + 2 + 5
    assert len(set(page["values"])) == 20


def recording(page: Ran, queue: cl.CommandQueue) -> None:
    assert len(page.steps) == 60
    assert len({float(loss.value.to_host()[0]) for loss in page["losses"]}) == 60  # each the caller's to keep


def paddle(page: Ran, queue: cl.CommandQueue) -> None:
    assert [type(step.optimizer).__name__ for step in page.steps] == ["SGD"] * 3 + ["AdamW"] * 3
    with redirect_stdout(StringIO()) as printed, page["debugging"].collect_operator_stats(), amp.auto_cast():
        page["compute_loss"](page["model"])
    text = (ROOT / "docs/coming-from-paddle.md").read_text("utf-8")
    assert f"```text\n{printed.getvalue().strip()}\n```" in text
    sampling = re.search(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    Path("sampling.toml").write_text(sampling, encoding="utf-8")
    assert page["debugging"].Sampling.read("sampling.toml").every == 100
    with Path("compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["infinite"] for row in rows} == {"0"}
    assert sum(bool(row["fp32_dtype"] and row["fp16_dtype"]) for row in rows) >= 10


def pytorch(page: Ran, queue: cl.CommandQueue) -> None:
    assert [step.optimizer for step in page.steps] == [page["optimizer"]] * 3 + [page["first"], page["second"]]
    assert "netcl has no second derivatives" in page.output
    assert np.abs(page["constant"].to_host()).max() > 0
    assert page["blocks"][0].layers[0].weight.grad is not None


def loss_scaling(page: Ran, queue: cl.CommandQueue) -> None:
    # One loss, a repeated one, accumulation, the two optimizers, and the wrapped one.
    one, first, second, wrapped = (page[name] for name in ("optimizer", "first", "second", "wrapped"))
    assert [step.optimizer for step in page.steps] == [one, one, one, first, second, wrapped.__wrapped__]
    assert list(page["state"]) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]


def policies(page: Ran, queue: cl.CommandQueue) -> None:
    from netcl import autograd as ag
    from netcl.nn import functional

    def leaf(shape: tuple[int, ...], dtype: str) -> Node:
        tensor = Tensor.from_host(queue, np.full(shape, 0.5, dtype), dtype=dtype)
        tensor.requires_grad = True
        return ag.tensor(tensor, requires_grad=True)

    half, single = leaf((4, 4), "float16"), leaf((4, 4), "float32")
    with amp.init(lists="mine.toml"):
        assert ag.softmax(single).value.dtype == "float16"
        assert ag.tanh(half).value.dtype == "float32"
        assert functional.gelu(half).value.dtype == "float32"  # registered; it would be float16
        assert page["my_matmul"](single, half).value.dtype == "float16"
        assert page["my_add"](half, single).value.dtype == "float32"
        assert ag.matmul_op(single, single).value.dtype == "float16"
        assert page["in_full_precision"](single).value.dtype == "float32"
        result = page["log_partition"](half)
        assert result.value.dtype == "float32"
        result.backward()
        np.testing.assert_array_equal(half.value.grad.to_host(), np.float16(1 / 16))
        page["model"](ag.tensor(page["x"]))
        assert page["model"].dtypes == ["bfloat16", "float32", "bfloat16", "float32"]  # tanh is on the file's list
    assert session.active_handle() is None


def debugging(page: Ran, queue: cl.CommandQueue) -> None:
    assert "What the model is given holds 1 nan before any op has touched it" in page.output
    assert "in layers.0" in page.output
    for words in ("ops of the run", "as fast as float32|slower than float32"):
        assert re.search(words, page.output), words
    steps = read_run("run.json")["steps"]
    assert len(steps) == 20
    # A healthy run: no other scale is suggested.
    assert f"loss scale: {steps[-1]['scale']:.8g}" in page.output.splitlines()
    assert f"the peak is in {page['found'].peak.where}" in page.output


def weights_in_16_bits(page: Ran, queue: cl.CommandQueue) -> None:
    assert [type(step.optimizer).__name__ for step in page.steps] == ["AdamW"] * 5
    assert page["optimizer"].t == 5
    assert {param.dtype for param in page["model"].parameters()} == {"bfloat16"}


def several_devices(page: Ran, queue: cl.CommandQueue) -> None:
    assert [step.optimizer for step in page.steps] == page["optimizers"]


def reference(page: Ran, queue: cl.CommandQueue) -> None:
    assert len(page.steps) == 1 + 1 + 4  # the loop's, the wrapped one's, and the recorded ones as they run


def zero_lines(page: Ran, queue: cl.CommandQueue) -> None:
    assert [type(step.optimizer).__name__ for step in page.steps] == ["AdamW"] * 20
    Path("train.py").write_text(python_blocks("docs/zero-lines.md")[0][1], encoding="utf-8")
    with redirect_stdout(StringIO()) as printed:
        assert main(["run", "--report", "run.json", "train.py"]) == 0
    assert printed.getvalue().split()[0] == "float16"
    assert [step["stepped"] for step in read_run("run.json")["steps"]] == [True] * 20


def golden(page: Ran, queue: cl.CommandQueue) -> None:
    Path("train.py").write_text(python_blocks("docs/zero-lines.md")[0][1], encoding="utf-8")
    Path("test_step.py").write_text(python_blocks("docs/golden.md")[0][1], encoding="utf-8")
    options = ["-q", "-p", "clamp.pytest_plugin", "-p", "no:cacheprovider", "--rootdir", ".", "test_step.py"]
    options.append("--import-mode=importlib")  # the module of another device is in sys.modules
    with redirect_stdout(StringIO()) as printed:
        assert main(["trace", "-o", "golden/", "train.py"]) == 0
        assert main(["compare", "golden/", "train.py"]) == 0
        assert [pytest.main([*options, *more]) for more in ([], ["--clamp-golden"], [])] == [1, 0, 0]
    assert "values are those of golden/" in printed.getvalue()


#: what is checked at the end of each page, and how many comments on it say what is shown there
PAGES: dict[str, tuple[Callable[[Ran, cl.CommandQueue], None], int]] = {
    "README.md": (readme, 1),
    "docs/16-bit-weights.md": (weights_in_16_bits, 1),
    "docs/checkpoints.md": (checkpoints, 0),
    "docs/coming-from-apex.md": (apex, 2),
    "docs/coming-from-netcl.md": (netcl, 2),
    "docs/coming-from-oneflow.md": (oneflow, 0),
    "docs/debugging-accuracy.md": (debugging_accuracy, 4),
    "docs/recording.md": (recording, 1),
    "docs/coming-from-paddle.md": (paddle, 4),
    "docs/coming-from-pytorch.md": (pytorch, 3),
    "docs/debugging.md": (debugging, 0),
    "docs/golden.md": (golden, 0),
    "docs/loss-scaling.md": (loss_scaling, 8),
    "docs/reference.md": (reference, 12),
    "docs/policies.md": (policies, 5),
    "docs/several-devices.md": (several_devices, 0),
    "docs/zero-lines.md": (zero_lines, 1),
}
