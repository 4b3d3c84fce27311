"""Everything that a training loop needs is compiled in its first step: no later one waits for a compiler."""

from __future__ import annotations

from typing import Any

import pyopencl as cl
import pytest

from clamp import amp
from clamp.cli.bench.networks import CNN, LM, MLP, README_MLP, Network, Trainer
from clamp.opencl import program


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("network", [README_MLP, MLP, CNN, LM], ids=str)
def test_nothing_is_compiled_after_the_first_step(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, network: Network, dtype: str
) -> None:
    builds: list[str] = []
    original = program.build

    def build(context: cl.Context, file: str, *args: Any) -> program.Built:
        builds.append(f"{file} {args}")
        return original(context, file, *args)

    monkeypatch.setattr(program, "build", build)
    program.release_programs()
    trainer = Trainer(queue, network)
    with amp.init(dtype=dtype) as handle:
        trainer.step(handle)
        while not handle.last_step.stepped:  # the first scale is a guess, and a step that is skipped updates nothing
            trainer.step(handle)
        assert builds != []
        builds.clear()
        for rows in (network.batch, network.batch - 3, network.batch + 1):
            trainer.step(handle, rows)
            assert builds == [], f"a batch of {rows}"
