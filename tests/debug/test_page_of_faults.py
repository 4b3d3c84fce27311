"""The page of a run alone names the cause of a fault, and its cure cures: seven planted faults, eager and recorded."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Tensor
from clamp.report import page_of, read_run
from tests.debug import faults
from tests.debug.faults import FAULTS, Fault, Training, line_of, optimize
from tests.reference import to_device

pytestmark = pytest.mark.usefixtures("shut_down")

BATCHES = 16
RATE = 30.0


#: beside those of a model, a learning rate that is too high: whichever op met it first is named
PLANTED = FAULTS | {
    "rate": Fault("", "", "", "", "", ("because the learning rate, 30, is too high",), "optimizer.lr = ")
}


class Loop:
    """A training with a fault, over sixteen batches."""

    def __init__(self, queue: cl.CommandQueue, fault: str, *, spoilt: bool = True) -> None:
        self.training = Training(queue, fault if fault in ("weight", "forward", "backward", "custom") else "none")
        random = np.random.default_rng(2)
        batches = [random.standard_normal((4, 8)).astype(np.float32) for _ in range(BATCHES)]
        targets = [100.0 * random.standard_normal((4, 4)) for _ in range(BATCHES)]
        if fault == "batch" and spoilt:
            batches[5][2, 5] = np.nan
        self.batches = [(to_device(queue, x), to_device(queue, y)) for x, y in zip(batches, targets, strict=True)]
        self.optimizer = self.training.optimizer
        if fault in ("forward", "custom"):
            self.optimizer.lr = 1e-20  # a loss of so large numbers has steep slopes
        if fault == "rate":
            self.optimizer = SGD(self.training.model.parameters(), lr=RATE)

    def one_step(self, handle: Any) -> Callable[[Tensor, Tensor], None]:
        training, optimizer = self.training, self.optimizer  # not self, which leads to the batches

        def step(x: Tensor, y: Tensor) -> None:
            optimize(handle, optimizer, training.loss(x, y))

        return step

    def run(self, handle: Any, recorded: bool, steps: int = BATCHES) -> list[bool]:
        step = self.one_step(handle)
        step = amp.record(step) if recorded else step
        done = []
        for number in range(steps):
            step(*self.batches[number % BATCHES])
            done.append(handle.last_step.stepped)
        return done


def code_of(cure: str) -> str:
    return cure.partition("  # ")[0]


def apply(fault: str, cure: str, queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[bool]:
    """The steps of a run in which what the page says has been done."""
    names: dict[str, Any] = {"amp": amp, "np": np}
    if fault in ("scale", "forward", "custom"):
        exec(code_of(cure), names)
        return Loop(queue, fault).run(names["handle"], False, 40)[20:]
    if fault == "batch":
        loop = Loop(queue, fault)
        for x, y in list(loop.batches):
            try:
                exec(code_of(cure), {"np": np, "x": x.to_host()})
            except AssertionError:
                loop.batches.remove((x, y))
        assert len(loop.batches) == BATCHES - 1
        return loop.run(amp.init(loss_scale=8.0), False, BATCHES - 1)
    loop = Loop(queue, fault)
    if fault == "rate":
        exec(code_of(cure), {"optimizer": loop.optimizer})
    elif fault == "weight":
        sound = Loop(queue, "none")
        amp.save_checkpoint(folder / "before.safetensors", sound.training.model)
        model = loop.training.model
        exec(code_of(cure).replace("...", str(folder / "before.safetensors")), {"amp": amp, "model": model})
    elif fault == "backward":
        original = faults.ag.sqrt

        def instead(x: Any) -> Any:
            return original(faults.ag.add(x, float(re.findall(r"[\d.e-]+", code_of(cure).rpartition("add(")[2])[0])))

        monkeypatch.setattr(faults.ag, "sqrt", instead)
    return loop.run(amp.init(loss_scale=8.0), False)


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.long
def test_the_page_names_cause_op_and_line_and_its_cure_cures(
    queue: cl.CommandQueue, fault: str, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, loop, scale = PLANTED[fault], Loop(queue, fault), 2.0**22 if fault == "scale" else 8.0
    handle = amp.init(debug=("attribution", "summary"), loss_scale=scale)
    done = loop.run(handle, recorded)
    assert not all(done)
    assert fault != "batch" or done == [number != 5 for number in range(BATCHES)]
    handle.report(tmp_path / "run.json")
    handle.shutdown()
    run = read_run(tmp_path / "run.json")
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page_of(run))))
    found = run["first_bad"]
    assert all(words.format(scale=scale) in text for words in planted.words), text
    assert run["verdict"]["kind"] in ("overflow", "not finite")
    assert run["verdict"]["cure"].startswith(planted.cure), run["verdict"]
    assert found["line"].startswith("faults.py:")
    assert found["op"] in text
    if fault in FAULTS:
        named = found["op"], found["module"], found["line"]
        assert named == (planted.function, planted.module, f"faults.py:{line_of(fault)}")
    cured = apply(fault, run["verdict"]["cure"], queue, monkeypatch, tmp_path)
    assert all(cured), cured
