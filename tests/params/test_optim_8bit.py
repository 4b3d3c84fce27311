"""``amp.optim``: Adam and AdamW with moments of 8 bits, as users have them.

tests/params/test_parts.py skips, resumes and records their steps, test_whole_steps.py has calls fail in them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core.device import CPUQueue
from netcl.optim import Adam, AdamW

from clamp import amp, bridge
from clamp.bridge import Parameter
from tests.networks import batch, loss_of, mlp, step, weights_of
from tests.reference import to_device

pytestmark = pytest.mark.usefixtures("shut_down")

KINDS = {"Adam8bit": (amp.optim.Adam8bit, Adam), "AdamW8bit": (amp.optim.AdamW8bit, AdamW)}
WIDTHS = (8, 64, 4)


def moments(optimizer: Any) -> list[bytes]:
    return [x.tobytes() for x in optimizer.state_dict()["moments"]]


def trained(handle: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
    queue = model.parameters()[0].queue
    return [step(handle, model, optimizer, batch(queue, 16, WIDTHS[0], WIDTHS[-1], seed=i % 2)) for i in steps]


@pytest.mark.parametrize("name", KINDS)
def test_signatures_are_netcls(name: str) -> None:
    ours, theirs = (list(inspect.signature(kind).parameters.values()) for kind in KINDS[name])
    assert [(x.name, x.default) for x in ours] == [(x.name, x.default) for x in theirs]
    ours, theirs = (list(inspect.signature(kind.step).parameters) for kind in KINDS[name])
    assert ours == theirs


@pytest.mark.parametrize("how", ["amp", "O2", "without"])
@pytest.mark.parametrize("name", KINDS)
def test_it_trains_as_netcls_does(queue: cl.CommandQueue, name: str, how: str) -> None:
    """The first step is the same, later ones nearly so; the moments take two bytes an element."""
    found = []
    for kind in KINDS[name]:
        model = mlp(queue, *WIDTHS)
        optimizer = kind(model.parameters(), lr=1e-2)
        if how == "O2":
            amp.decorate(model, optimizer, dtype="bfloat16", master_weight="remainder")
        if how == "without":
            losses = []
            for index in range(30):
                optimizer.zero_grad()
                with ag.Tape() as tape:
                    loss = loss_of(model, batch(queue, 16, WIDTHS[0], WIDTHS[-1], seed=index % 2))
                tape.backward(loss)
                optimizer.step()
                losses.append(float(loss.value.to_host()[0]))
        else:
            with amp.init(dtype="bfloat16", level="O2" if how == "O2" else "O1") as handle:
                losses = trained(handle, model, optimizer, range(30))
        found.append(losses)
        if kind is KINDS[name][0]:
            held = getattr(optimizer, bridge.MOMENTS_8BIT).values()
            assert sum(x.size for x in held) <= 2.1 * sum(x.size for x in optimizer.params) + 4 * 520
            assert optimizer.m is optimizer.v is None
            assert not optimizer._m_buf
    np.testing.assert_allclose(found[0][:2], found[1][:2], rtol=1e-2)
    assert found[0][-1] < 0.7 * found[0][0]
    np.testing.assert_allclose(found[0][-1], found[1][-1], rtol=0.3)


def test_a_state_of_another_size_is_refused(queue: cl.CommandQueue, tmp_path: Path) -> None:
    model, other = mlp(queue, *WIDTHS), mlp(queue, 8, 64, 64, 4)
    optimizer = amp.optim.Adam8bit(model.parameters())
    before = moments(optimizer)
    with pytest.raises(ValueError, match=r"the state has 6 moments of \d+ bytes, these 4 parameters have"):
        optimizer.load_state_dict(amp.optim.Adam8bit(other.parameters()).state_dict())
    with pytest.raises(TypeError, match=r"takes the dict that state_dict\(\) returned, got None"):
        optimizer.load_state_dict(None)
    amp.save_checkpoint(tmp_path / "run.npz", model, Adam(model.parameters()))
    with pytest.raises(amp.CheckpointError, match="was Adam, here it is Adam8bit"):
        amp.load_checkpoint(tmp_path / "run.npz", model, optimizer)
    assert moments(optimizer) == before


def test_clipping_by_step_is_clipping_before_it(queue: cl.CommandQueue) -> None:
    for active in (True, False):
        ended = []
        for clips in (True, False):
            model = mlp(queue, *WIDTHS)
            optimizer = amp.optim.AdamW8bit(model.parameters(), lr=1e-2, eps=1.0)
            with amp.init(dtype="bfloat16", enabled=active):
                for param in model.parameters():
                    param.grad = to_device(queue, np.ones(param.shape))
                bridge.clip.clip_grad_norm_device(optimizer.params, 1e9 if clips else 0.5)
                optimizer.step(max_norm=0.5) if clips else optimizer.step()
            ended.append([x.tobytes() for x in weights_of(model)])
        assert ended[0] == ended[1]


class Derived(amp.optim.Adam8bit):
    """A class that clamp knows nothing of."""


def test_what_cannot_be_stepped_is_refused(queue: cl.CommandQueue) -> None:
    with pytest.raises(TypeError, match="netcl's numpy backend has none"):
        amp.optim.Adam8bit([Parameter.from_host(CPUQueue(), np.ones(3, np.float32))])
    weight = Parameter.from_host(queue, np.ones(3, np.float32))
    for active in (True, False):
        for kind, grad, error, says in (
            (amp.optim.Adam8bit, to_device(queue, np.ones(4)), ValueError, "another number of elements"),
            (Derived, to_device(queue, np.ones(3)), TypeError, "its class is derived from"),
        ):
            optimizer = kind([weight])
            with amp.init(enabled=active):
                weight.grad = grad
                with pytest.raises(error, match=says):
                    optimizer.step()
    np.testing.assert_array_equal(weight.to_host(), np.ones(3))
