"""``python -m clamp run``: a script of netcl's as it is trains as with the two lines, to the bit, or is refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp import amp, session
from clamp.bridge import Tape
from clamp.bridge.netcl_functions import is_redirecting
from clamp.cli import main
from clamp.cli import run as command
from clamp.handle import NoOpHandle
from clamp.report import read_run
from clamp.scaling.step_report import StepReport
from tests.scripts import ROOT, run_here, run_script

pytestmark = pytest.mark.usefixtures("shut_down")

HEAD = """
import sys
import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl import nn
from netcl.core.tensor import Tensor
from netcl.nn import functional as F
from netcl.nn.layers import Conv2d, Linear, ReLU, Sequential
from netcl.optim import SGD, Adam, AdamW, Momentum, RMSProp, ModelEMA, WarmupCosine, clip_grad_norm

context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context)
np.random.seed(0)
random = np.random.default_rng(0)
model = Sequential(Linear(queue, 8, 16), ReLU(), Linear(queue, 16, 2))

def on_device(*shape, scale=1.0):
    return ag.tensor(Tensor.from_host(queue, (scale * random.standard_normal(shape)).astype(np.float32)))

def loss_of(scale=1.0):
    return F.mse_loss(model(on_device(4, 8, scale=scale)), on_device(4, 2))
"""

TAIL = """
np.savez(sys.argv[1], *[param.to_host() for param in model.parameters()])
"""

#: An optimizer of a class of the user's.
PLAIN = """
        class Plain:
            def __init__(self, params):
                self.params = list(params)

            def step(self):
                for param in self.params:
                    param.write(param.to_host() - np.float32(1e-3) * param.grad.to_host())
"""

#: training loops of users, without clamp; ``#`` names the optimizers that the two lines would
LOOPS = {
    "plain": """
        optimizer = Adam(model.parameters(), lr=1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            with ag.Tape() as tape:
                loss = loss_of()
            tape.backward(loss)  # optimizer
            optimizer.step()
        """,
    "from the loss": """
        optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(4):
            loss = loss_of()
            loss.backward()  # optimizer
            optimizer.step()
            optimizer.zero_grad()
        """,
    "accumulated": """
        optimizer = Adam(model.parameters(), lr=1e-3)
        for batch in range(9):
            tape = ag.Tape()
            ag.set_current_tape(tape)
            loss = loss_of()
            tape.backward(loss)  # optimizer
            if batch % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        ag.set_current_tape(None)
        """,
    "overflows": """
        optimizer = AdamW(model.parameters(), lr=1e-3)
        for scale in (1e4, 1.0, np.inf, 1.0, 1e3):
            optimizer.zero_grad()
            loss = loss_of(scale)
            loss.backward()  # optimizer
            optimizer.step()
        """,
    "clipped, with a schedule": """
        optimizer, schedule = AdamW(model.parameters(), lr=1e-3), WarmupCosine(1e-3, 6, 2)
        for epoch in range(1, 5):
            with ag.Tape() as tape:
                loss = loss_of()
            tape.backward(loss)  # optimizer
            print(clip_grad_norm(model.parameters(), 0.5))
            optimizer.lr = schedule.lr(epoch)
            optimizer.step()
            optimizer.zero_grad()
        """,
    "gradients read and changed": """
        optimizer = SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(30.0)
            loss.backward()  # optimizer
            for param in model.parameters():
                noise = 0.1 * random.standard_normal(param.shape)
                param.grad.write((param.grad.to_host() + noise).astype(np.float32))
            optimizer.step()
        """,
    "evaluated, with averages": """
        optimizer, average = Adam(model.parameters(), lr=1e-3), ModelEMA(model, decay=0.9)
        for _ in range(4):
            model.train()
            loss = loss_of()
            loss.backward()  # optimizer
            optimizer.step()
            optimizer.zero_grad()
            average.update()
            model.eval()
            with ag.no_grad():
                print(F.mse_loss(model(on_device(4, 8)), on_device(4, 2)).value.to_host())
        average.copy_to_model()
        """,
    "two optimizers, one loss": """
        first, second = Adam(model.layers[0].parameters(), lr=1e-3), Momentum(model.layers[2].parameters(), lr=1e-4)
        for _ in range(4):
            loss = loss_of()
            loss.backward()  # [first, second]
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        """,
    "adversaries": """
        critic = Sequential(Linear(queue, 2, 8), ReLU(), Linear(queue, 8, 1))
        first, second = Adam(model.parameters(), lr=1e-3), Adam(critic.parameters(), lr=1e-3)
        for _ in range(3):
            for _ in range(2):
                second.zero_grad()
                loss = ag.sum(critic(ag.tensor(model(on_device(4, 8)).value))) - ag.sum(critic(on_device(4, 2)))
                loss.backward()  # second
                second.step()
            first.zero_grad()
            loss = ag.sum(critic(model(on_device(4, 8))))
            loss.backward()  # [first, second]
            first.step()
        """,
    "a part that waits": """
        first, second = SGD(model.layers[0].parameters(), lr=1e-6), SGD(model.layers[2].parameters(), lr=1e-6)
        for scale in (1.0, np.nan, 1e3, 1e4, 1.0):
            second.zero_grad()
            loss = loss_of(scale)
            loss.backward()  # second
            second.step()
            first.zero_grad()
        loss = loss_of(10.0)
        loss.backward()  # [first, second]
        first.step()
        """,
    "two losses, one graph": """
        optimizer = Adam(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            out = model(on_device(4, 8))
            loss, other = ag.sum(ag.square(out)), F.mse_loss(out, on_device(4, 2))
            loss.backward()  # optimizer
            other.backward()  # optimizer
            optimizer.step()
        """,
    "a head, fine-tuned": """
        for param in model.layers[0].parameters():
            param.requires_grad = False
        optimizer = Adam(model.layers[2].parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()  # optimizer
            optimizer.step()
        """,
    "an optimizer of the user's": PLAIN
    + """
        optimizer = Plain(model.parameters())
        for scale in (1.0, np.nan, 30.0):
            for param in model.parameters():
                param.grad = None
            loss = loss_of(scale)
            loss.backward()  # optimizer
            optimizer.step()
        """,
    "phases": """
        optimizers = [kind(model.parameters(), lr=1e-3) for kind in (SGD, Adam)]
        batches = (np.nan, 1.0, 3.0), (1.0, np.nan, 3.0), (1.0, 3.0, np.nan)
        for optimizer, scales in zip((*optimizers, RMSProp(model.parameters(), lr=1e-3)), batches):
            for scale in scales:
                loss = loss_of(scale)
                loss.backward()  # optimizer
                optimizer.step()
                optimizer.zero_grad()
        """,
    "embeddings": """
        optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        for epoch in range(2):
            for _ in range(2):
                optimizer.zero_grad()
                with ag.Tape() as tape:
                    anchor, positive, negative = (ag.l2_normalize(model(on_device(4, 8))) for _ in range(3))
                    loss = nn.TripletMarginLoss(0.5)(anchor, positive, negative)
                    loss = loss + nn.InfoNCELoss(0.2)(anchor, positive) * 0.1
                tape.backward(loss)  # optimizer
                clip_grad_norm(optimizer.params, 1.0)
                optimizer.step()
            optimizer.lr *= 0.5
        """,
    "detector": """
        model = Sequential(Conv2d(queue, 2, 4, 3, pad=1), ReLU(), Conv2d(queue, 4, 2, 3, pad=1))
        optimizer = AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            with ag.Tape() as tape:
                out = model(on_device(2, 2, 8, 8))
                heat, offset = ag.chunk(out, 2, axis=1)
                mask = ag.tensor(Tensor.from_host(queue, (random.random((2, 1, 8, 8)) > 0.9).astype(np.float32)))
                loss = ag.mean(F.binary_cross_entropy_with_logits(heat, mask))
                loss = loss + F.smooth_l1_loss(offset * mask, mask * 0.3) * 0.5
            tape.backward(loss)  # optimizer
            optimizer.step(max_norm=1.0)
        """,
    "a graph of netcl's": """
        from netcl.autograd.graph import CompiledGraph
        optimizer, graph = Adam(model.parameters(), lr=1e-3), CompiledGraph(model.parameters())
        for _ in range(4):
            inputs = [on_device(4, 8).value, on_device(4, 2).value]
            if graph.is_compiled:
                graph.replay(inputs)
                continue
            with graph:
                optimizer.zero_grad()
                loss = F.mse_loss(model(ag.tensor(inputs[0])), ag.tensor(inputs[1]))
                loss.backward()  # optimizer
                optimizer.step()
            graph.compile(inputs)
        """,
    "netcl's scaler": """
        from netcl.amp import GradScaler
        optimizer, scaler = Adam(model.parameters(), lr=1e-3), GradScaler()
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale_loss(loss_of() * 2**-6).backward()
            scaler.step(optimizer, model.parameters())
            scaler.update()
        """,
    "netcl's trainer": """
        from netcl.trainer import Trainer
        optimizer = Adam(model.parameters(), lr=1e-3)
        trainer = Trainer(model, optimizer, queue, accumulation_steps=2)
        batches = [(random.standard_normal((4, 8)).astype(np.float32), np.arange(4) % 2) for _ in range(4)]
        trainer.fit(batches, epochs=1)
        """,
}


@dataclass
class Outcome:
    """What a script has left."""

    weights: list[np.ndarray]
    steps: list[tuple[bool, str]]
    scale: float


class Scripts:
    """Scripts on the device under test, in this process."""

    def __init__(self, queue: cl.CommandQueue, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        run_here(queue, patch)
        self.history: list[StepReport] = []
        self.scale = 1.0
        own = command._sum_up

        def sum_up(handle: Any, report: Path | None) -> int:
            self._note(handle)
            return own(handle, report)

        patch.setattr(command, "_sum_up", sum_up)

    def run(self, source: str, *options: str, given: tuple[str, ...] = ()) -> int:
        """The exit status of ``python -m clamp run``."""
        script = self.folder / "train.py"
        script.write_text(source, encoding="utf-8")
        return main(["run", *options, str(script), *given])

    def with_no_line(self, loop: str, dtype: str) -> Outcome:
        result = str(self.folder / "result.npz")
        assert self.run(HEAD + textwrap.dedent(loop) + TAIL, "--dtype", dtype, given=(result,)) == 0
        return self._outcome(result)

    def with_two_lines(self, loop: str, dtype: str) -> Outcome:
        changed = re.sub(
            r"^( *)(tape|\w+)\.backward\((\w*)\)  # (.+)$",
            lambda found: (
                f"{found[1]}with handle.scale_loss({found[3] or found[2]}, {found[4]}) as scaled_loss:\n"
                f"{found[1]}    {'tape.backward(scaled_loss)' if found[3] else 'scaled_loss.backward()'}"
            ),
            textwrap.dedent(loop),
            flags=re.M,
        )
        assert (changed != textwrap.dedent(loop)) == ("#" in loop)
        result = str(self.folder / "result.npz")
        self.patch.setattr(sys, "argv", ["train.py", result])
        scope = vars(ModuleType("__main__"))
        exec(HEAD + f"from clamp import amp\nhandle = amp.init(dtype={dtype!r})\n" + changed + TAIL, scope)
        self._note(scope["handle"])
        scope["handle"].shutdown()
        return self._outcome(result)

    def _note(self, handle: Any) -> None:
        self.history, self.scale = list(handle.history), handle.loss_scale

    def _outcome(self, file: str) -> Outcome:
        with np.load(file) as arrays:
            steps = [(report.stepped, report.reason) for report in self.history]
            return Outcome(list(arrays.values()), steps, self.scale)


@pytest.fixture
def scripts(queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return Scripts(queue, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("loop", "dtype"),
    [*((loop, "float16") for loop in LOOPS), ("plain", "bfloat16"), ("overflows", "bfloat16"), ("plain", "float32")],
)
@pytest.mark.long
def test_a_script_trains_as_with_the_two_lines(scripts: Scripts, loop: str, dtype: str) -> None:
    ours, lines = scripts.with_no_line(LOOPS[loop], dtype), scripts.with_two_lines(LOOPS[loop], dtype)
    assert (ours.steps, ours.scale) == (lines.steps, lines.scale)
    assert any(stepped for stepped, _ in ours.steps)
    for one, other in zip(ours.weights, lines.weights, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


# ---------------------------------------------------------------------------------------------- gradients


def test_all_that_a_loss_reaches_has_its_true_gradient(scripts: Scripts) -> None:
    """A part that no optimizer has, whose gradients add up, and an input, as attacks on models use it."""
    loop = """
        optimizer = SGD(model.layers[2].parameters(), lr=1e-30)
        x = Tensor.from_host(queue, random.standard_normal((4, 8)).astype(np.float32))
        x.requires_grad = True
        y = on_device(4, 2)
        first = model.layers[0].weight
        for factor, times in ((1, 1), (2, 3), (500, 503)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(ag.tensor(x, requires_grad=True)), y) * float(factor)
            loss.backward()
            clip_grad_norm(model.parameters(), 1e30)
            optimizer.step()
            found = first.grad.to_host()
            if factor == 1:
                np.savez(sys.argv[1], found, x.grad.to_host())
                once = found
            np.testing.assert_allclose(found, times * once, rtol=1e-3, atol=1e-3 * times)
        """
    grads = {}
    for dtype in ("float16", "float32"):
        result = scripts.folder / f"{dtype}.npz"
        source = HEAD + textwrap.dedent(loop)
        assert scripts.run(source, "--dtype", dtype, given=(str(result),)) == 0
        with np.load(result) as arrays:
            grads[dtype] = list(arrays.values())
        assert [report.stepped for report in scripts.history] == [True] * 3
    for half, full in zip(grads["float16"], grads["float32"], strict=True):
        np.testing.assert_allclose(half, full, rtol=0.02, atol=0.02 * np.abs(full).max())


# ---------------------------------------------------------------------------------------------- what is refused


def script_of(loop: str) -> str:
    return HEAD + textwrap.dedent(loop)


MAKES = "optimizer = Adam(model.parameters())"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["loss_of().backward()"], r"no optimizer has a parameter .* write the two lines.*handle = amp.init\(\)"),
        (["loss_of().backward()", MAKES], "Make the optimizer before the first backward"),
        (["from clamp import amp", 'amp.init(dtype="bfloat16")'],
         r"`python -m clamp` has turned AMP on\. A script that does so itself needs only python"),
        (["from clamp import amp", "amp.init(enabled=False)"],
         r"amp\.init\(enabled=False\) was called while .* `python -m clamp` has turned AMP on\."),
        ([MAKES, "model(on_device(4, 8)).backward()"], r"the loss must have one element, got shape \(4, 2\)"),
        ([MAKES, "(on_device(1) * 2.0).backward()"], "depends on nothing that is trained"),
        ([MAKES, "optimizer.step(lambda: loss_of().backward())"], "with handle.scale_loss"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    scripts: Scripts, capsys: pytest.CaptureFixture[str], lines: list[str], message: str
) -> None:
    assert scripts.run(HEAD + "\n".join(lines)) == 1
    said = capsys.readouterr().err
    assert re.search(message, said, re.DOTALL), said
    assert not any(report.stepped for report in scripts.history)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_optimizer_of_a_class_of_ones_own_may_be_made_later(scripts: Scripts, dtype: str) -> None:
    """After backward has reached its parameters, for which no optimizer was there: an overflow skips its steps."""
    loop = (
        PLAIN
        + """
        optimizers = [SGD(model.layers[2].parameters(), lr=1e-3)]
        for scale in (1.0, 1.0, np.nan, 1.0):
            for param in model.parameters():
                param.grad = None
            loss = loss_of(scale)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            if len(optimizers) == 1:
                optimizers.append(Plain(model.layers[0].parameters()))
        assert all(np.isfinite(param.to_host()).all() for param in model.parameters())
        """
    )
    assert scripts.run(script_of(loop), "--dtype", dtype) == 0
    assert [report.stepped for report in scripts.history] == [True] * 3 + [False] * 2 + [True] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_by_hand_need_no_scale(scripts: Scripts, dtype: str) -> None:
    loop = """
        before = [param.to_host() for param in model.parameters()]
        loss_of().backward()
        for param in model.parameters():
            param.write(param.to_host() - np.float32(1e-2) * param.grad.to_host())
        assert all((old != param.to_host()).any() for old, param in zip(before, model.parameters()))
        """
    assert scripts.run(script_of(loop), "--dtype", dtype) == 0


# ---------------------------------------------------------------------------------------------- as python runs it

PROBE = '''"""A script."""
import pickle, sys
from dataclasses import dataclass
import beside

@dataclass
class Point:
    x: int = 1

def main(how):
    if how == "raises":
        raise ValueError("mine")
    if how == "is interrupted":
        raise KeyboardInterrupt
    if how.startswith("exits"):
        sys.exit({"exits": None, "exits 3": 3, "exits in words": "words"}[how])

print(sys.argv, __file__, __name__, __doc__, __package__, type(__loader__), bool(__spec__ or __builtins__.len))
print(sys.path[0] == beside.FOLDER, sys.modules["__main__"].Point is Point, beside.__file__)
print(pickle.loads(pickle.dumps(Point(2))))
if __name__ == "__main__":
    main(sys.argv[1])
'''


@pytest.mark.parametrize("options", [(), ("-m",)], ids=["file", "module"])
@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("ends", 0), ("exits", 0), ("exits 3", 3), ("exits in words", 1), ("raises", 1),
        ("is interrupted", 130), ("does not compile", 1),
    ],
)  # fmt: skip
def test_a_script_runs_as_by_python(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...],
    how: str, status: int,
) -> None:  # fmt: skip
    folder = scripts.folder
    (folder / "beside.py").write_text(f"FOLDER = {str(folder)!r}\n", encoding="utf-8")
    (folder / "probe.py").write_text("def x(:\n" if how == "does not compile" else PROBE, encoding="utf-8")
    monkeypatch.chdir(folder)
    if options:
        sys.path.insert(0, str(folder))  # where python -m has its folder
    given = ["probe" if options else "probe.py", how, "--dtype", "x", "-m"]
    expected = subprocess.run([sys.executable, *options, *given], capture_output=True, text=True, check=False)
    try:
        found: Any = main(["run", *options, *given])
    except SystemExit as error:
        found = error.code or 0
    finally:
        sys.modules.pop("beside", None)
    shown = capsys.readouterr()
    if isinstance(found, str):  # which python shows
        shown, found = shown._replace(err=f"{found}\n{shown.err}"), 1
    assert found == status, shown.err
    assert expected.returncode in (status, -2)
    assert shown.out == expected.stdout
    assert "AMP float16: 0 steps" in shown.err
    if not options:
        assert [line for line in expected.stderr.splitlines() if line not in shown.err.splitlines()] == []
        assert "clamp" not in shown.err.partition("AMP float16")[0]


def test_a_process_of_its_own(queue: cl.CommandQueue, tmp_path: Path) -> None:
    """All of netcl is met, its scaler as well, and threads that outlive the script's last line are waited for."""
    loop = """
        import threading, time
        from netcl.amp import GradScaler
        GradScaler().scale_loss(loss_of())
        optimizer = Adam(model.parameters())
        def train():
            time.sleep(0.2)
            loss = loss_of()
            loss.backward()
            optimizer.step()
            print(model(on_device(4, 8)).value.dtype)
        threading.Thread(target=train).start()
        """
    (tmp_path / "train.py").write_text(script_of(loop), encoding="utf-8")
    report = tmp_path / "run.json"
    said = run_script(queue, "-m", "clamp", "run", "--report", str(report), "train.py", folder=tmp_path)
    assert said.split() == ["float16"]
    run = read_run(report)
    assert len(run["steps"]) == 1
    assert any("linear" in op["op"] for op in run["ops"])


def test_a_reader_that_has_left_is_no_error_of_clamps(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text("print('enough')", encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "clamp", "run", "says.py"]
    with open(writer, "wb") as pipe:
        ended = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": ""}, stdout=pipe, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
    assert (ended.returncode, "BrokenPipe" in ended.stderr, "0 steps" in ended.stderr) == (1, False, True)


def test_what_is_terminated_does_not_end_as_if_it_were_done(queue: cl.CommandQueue, tmp_path: Path) -> None:
    loop = """
        import os, signal, time
        on_device(4, 8)  # from the first tensor on netcl has a handler
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        """
    (tmp_path / "killed.py").write_text(script_of(loop), encoding="utf-8")
    command = [sys.executable, "-m", "clamp", "run", "killed.py"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_script_may_close_what_it_prints_to(scripts: Scripts, monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    monkeypatch.setattr(sys, closed, (scripts.folder / "said").open("w", encoding="utf-8"))
    assert scripts.run(f"import sys; sys.{closed}.close()", "--report", str(scripts.folder / "run.json")) == 0
    assert read_run(scripts.folder / "run.json")["steps"] == []
    assert session.active_handle() is None


def test_a_module_that_a_package_lacks_has_no_traceback(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (scripts.folder / "nested").mkdir()
    monkeypatch.syspath_prepend(scripts.folder)
    for name in ("nested", "nested.missing"):
        assert main(["run", "-m", name]) == 1
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert f"No module named {name}" in said


def test_a_script_that_turns_amp_off_is_told_what_it_lacks(
    scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    off = "from clamp import amp; amp.shutdown()"
    assert scripts.run(off) == 0
    assert "amp.shutdown(): from there on it ran as by python alone" in capsys.readouterr().err
    assert scripts.run(off, "--report", str(scripts.folder / "run.json")) == 1
    assert "run.json is not written" in capsys.readouterr().err
    assert not is_redirecting(Tape.backward.__code__)


def test_only_the_process_that_began_sums_up(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS, encoding="utf-8")
    for arguments in (["run", "--report", "run.json"], ["trace", "-o", "traces"]):
        command = [sys.executable, "-m", "clamp", *arguments, "forks.py"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.stdout.splitlines()[:1] == ["a child ended with 0"], ended.stderr
        assert ended.stderr.count("AMP float16") == (arguments[0] == "run")
        assert ended.stderr.count("no op of this script was seen") == (arguments[0] == "trace")


FORKS = """
import os, sys
child = os.fork()
if not child:
    sys.exit(0)
print("a child ended with", os.waitpid(child, 0)[1])
"""


# ---------------------------------------------------------------------------------------------- examples

EXAMPLE = """
import sys
import numpy as np
import pyopencl as cl
from {module} import *
from clamp import amp

queue = cl.CommandQueue(cl.create_some_context(interactive=False))
np.random.seed(0)
{start}
np.save(sys.argv[1], np.float64({half}))
"""

IMAGES = """
from comparison import Plan
numbers = np.random.default_rng(0)
x, y = numbers.random((64, 64), np.float32), numbers.integers(0, 10, 64)
data = Images(x, y, x, y)
"""
SEQUENCES = """
def losses(options):
    with amp.init(**options) as handle:
        _, iteration = trainer(queue, handle)
        return [iteration() for _ in range(3)]
"""
SINE = """
import two_lines
two_lines.STEPS = 5
x = np.linspace(-3, 3, 16, dtype=np.float32).reshape(-1, 1)
"""
OFF = '{"enabled": False}'

#: what an example needs, netcl's half of it, and the half with the two lines; each gives losses
HALVES = {
    "two_lines": (SINE, "before(queue, x, np.sin(x))", "after(queue, x, np.sin(x))"),
    "digits": (IMAGES, f"train(queue, data, Plan({OFF}, 3, 16)).losses", "train(queue, data, Plan({}, 3, 16)).losses"),
    "rnn_cell": (SEQUENCES, f"losses({OFF})", "losses({})"),
}


@pytest.mark.parametrize("module", HALVES)
def test_netcls_half_of_an_example_trains_as_the_other(scripts: Scripts, module: str) -> None:
    start, netcls, lines = HALVES[module]
    init = amp.init  # netcl's half is one without clamp
    scripts.patch.setattr(amp, "init", lambda enabled=True, **options: init(**options) if enabled else NoOpHandle())
    sys.path.insert(1, str(ROOT / "examples"))
    ours, theirs = scripts.folder / "ours.npy", scripts.folder / "theirs.npy"
    assert scripts.run(EXAMPLE.format(module=module, start=start, half=netcls), given=(str(ours),)) == 0
    scripts.patch.setattr(sys, "argv", ["", str(theirs)])
    exec(EXAMPLE.format(module=module, start=start, half=lines), vars(ModuleType("__main__")))
    np.testing.assert_array_equal(np.load(ours), np.load(theirs))
