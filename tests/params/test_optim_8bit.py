"""``amp.optim``: Adam and AdamW with moments of 8 bits, as users have them."""

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
from tests.networks import batch, loss_of, mlp, step, stepping, weights_of
from tests.params.test_updates import Loop
from tests.params.test_whole_steps import Fault, failing, values_of
from tests.reference import assert_same, to_device
from tests.scaling.test_overflow import plant

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


@pytest.mark.parametrize("how", ["checkpoint", "state_dict"])
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_goes_on_bit_by_bit(queue: cl.CommandQueue, tmp_path: Path, name: str, how: str) -> None:
    ended = []
    for resumes in (False, True):
        model = mlp(queue, *WIDTHS)
        optimizer = KINDS[name][0](model.parameters(), lr=1e-2)
        with amp.init(dtype="bfloat16") as handle:
            if resumes:
                trained(handle, model, optimizer, range(1))
            else:
                trained(handle, model, optimizer, range(3))
                amp.save_checkpoint(tmp_path / "run.npz", model, optimizer)
                state = model.state_dict(), optimizer.state_dict()
            if resumes and how == "checkpoint":
                amp.load_checkpoint(tmp_path / "run.npz", model, optimizer)
            elif resumes:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            trained(handle, model, optimizer, range(3, 6))
        ended.append(([x.tobytes() for x in weights_of(model)], moments(optimizer), optimizer.t))
    assert ended[0] == ended[1]


def test_a_state_of_another_size_is_refused(queue: cl.CommandQueue, tmp_path: Path) -> None:
    model, other = mlp(queue, *WIDTHS), mlp(queue, 8, 64, 64, 4)
    optimizer = amp.optim.Adam8bit(model.parameters())
    before = moments(optimizer)
    with pytest.raises(ValueError, match=r"the state has 6 moments of \d+ bytes, these 4 parameters have"):
        optimizer.load_state_dict(amp.optim.Adam8bit(other.parameters()).state_dict())
    amp.save_checkpoint(tmp_path / "run.npz", model, Adam(model.parameters()))
    with pytest.raises(amp.CheckpointError, match="was Adam, here it is Adam8bit"):
        amp.load_checkpoint(tmp_path / "run.npz", model, optimizer)
    assert moments(optimizer) == before


@pytest.mark.parametrize("name", KINDS)
def test_a_skipped_step_leaves_everything(queue: cl.CommandQueue, name: str) -> None:
    model = mlp(queue, *WIDTHS)
    optimizer = KINDS[name][0](model.parameters(), lr=1e-2)
    with amp.init(loss_scale=64.0) as handle:
        trained(handle, model, optimizer, range(2))
        kept = weights_of(model), moments(optimizer), optimizer.t
        optimizer.zero_grad()
        with handle.scale_loss(loss_of(model, batch(queue, 16, 8, 4)), optimizer) as scaled_loss:
            scaled_loss.backward()
            plant(model.parameters()[2])
        optimizer.step()
        assert not handle.last_step.stepped
        assert_same(weights_of(model), kept[0])
        assert (moments(optimizer), optimizer.t) == kept[1:]


def test_replays_are_as_steps_that_run(queue: cl.CommandQueue) -> None:
    ended = []
    for recorded in (False, True):
        model = mlp(queue, *WIDTHS)
        optimizer = amp.optim.AdamW8bit(model.parameters(), lr=1e-2)
        with amp.init(dtype="bfloat16") as handle:
            train = stepping(handle, model, optimizer)
            train = amp.record(train) if recorded else train
            for index in range(5):
                train(*batch(queue, 16, WIDTHS[0], WIDTHS[-1], seed=index))
            assert not recorded or train.recordings == 1
        ended.append(([x.tobytes() for x in weights_of(model)], moments(optimizer)))
    assert ended[0] == ended[1]


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


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "for good"])
def test_a_step_is_whole_wherever_a_call_fails(queue: cl.CommandQueue, times: float) -> None:
    place, reached = 0, True
    with amp.init(level="O1"):
        while reached:
            alone, loop = (Loop(queue, amp.optim.Adam8bit, [(3,), (300,)]) for _ in range(2))
            for _ in range(2):
                while not (alone.draw(absent=False) & loop.draw(absent=False)):
                    pass
                alone.optimizer.step()
                with failing(place, times) as seen:
                    try:
                        loop.optimizer.step()
                    except Fault:
                        failed = True
                    else:
                        failed = False
                if failed:
                    loop.optimizer.step()
                reached = seen[0] > place
                assert values_of(loop) == values_of(alone)
                assert moments(loop.optimizer) == moments(alone.optimizer)
                assert loop.optimizer.t == alone.optimizer.t
            place += 1
    assert place > 2


class Derived(amp.optim.Adam8bit):
    """A class that clamp knows nothing of."""


def test_what_cannot_be_stepped_is_refused(queue: cl.CommandQueue) -> None:
    with pytest.raises(TypeError, match="netcl's numpy backend has none"):
        amp.optim.Adam8bit([Parameter.from_host(CPUQueue(), np.ones(3, np.float32))])
    weight = Parameter.from_host(queue, np.ones(3, np.float32))
    for active in (True, False):
        for kind, grad, error, says in (
            (amp.optim.Adam8bit, to_device(queue, np.ones(4)), ValueError, "another number of elements"),
            (Derived, to_device(queue, np.ones(3)), TypeError, "of a class derived from"),
        ):
            optimizer = kind([weight])
            with amp.init(enabled=active):
                weight.grad = grad
                with pytest.raises(error, match=says):
                    optimizer.step()
    np.testing.assert_array_equal(weight.to_host(), np.ones(3))
