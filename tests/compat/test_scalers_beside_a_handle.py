"""A loop with a ``GradScaler`` while a handle is active: the handle tells of its steps as well."""

from __future__ import annotations

import itertools
import signal
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.optim import SGD

from clamp import amp, bridge
from clamp.casting.results import RESULTS, Observer
from clamp.compat.paddle import GradScaler as PaddleScaler
from clamp.scaling.manual import ManualScaling
from tests.compat.test_scalers import FACES, under
from tests.debug.faults import Training
from tests.reference import to_device
from tests.scaling.test_overflow import plant
from tests.scaling.test_shared import parameter, summed

__all__ = ["under"]  # a fixture
pytestmark = pytest.mark.usefixtures("shut_down")

TOO_HIGH = 2.0**24


def pytorch_step(training: Training, scaler: Any) -> None:
    training.optimizer.zero_grad()
    with amp.autocast():
        loss = training.loss(*training.data)
    scaler.scale(loss).backward()
    scaler.step(training.optimizer)
    scaler.update()


def make(kind: str, scale: float) -> Any:
    return amp.GradScaler(init_scale=scale) if kind == "pytorch" else PaddleScaler(init_loss_scaling=scale)


@pytest.mark.parametrize("kind", ["pytorch", "paddle"])
def test_skips_are_in_the_history_of_the_handle(queue: cl.CommandQueue, kind: str) -> None:
    handle = amp.init()
    training, scaler = Training(queue, "none"), make(kind, TOO_HIGH)
    for _ in range(20):
        pytorch_step(training, scaler)
    ours, theirs = list(handle.history), list(scaler.history)
    assert [report.stepped for report in ours] == [report.stepped for report in theirs]
    assert {report.stepped for report in ours} == {True, False}
    assert ours == theirs
    for before, after in itertools.pairwise(ours):
        assert after.scale_before == before.scale
    assert ours[0].scale_before == TOO_HIGH
    assert ours[0].scale == TOO_HIGH / 2
    assert handle.loss_scale == ours[-1].scale
    assert "20 steps" in repr(handle)


@pytest.mark.parametrize("kind", ["pytorch", "paddle"])
def test_the_scale_after_a_step_is_told_once_it_is_updated(queue: cl.CommandQueue, kind: str) -> None:
    training, scaler = Training(queue, "none"), make(kind, TOO_HIGH)
    pytorch_step(training, scaler)
    assert [(report.scale_before, report.scale) for report in scaler.history] == [(TOO_HIGH, TOO_HIGH / 2)]


@pytest.mark.parametrize("kind", ["pytorch", "paddle", "static"])
@pytest.mark.usefixtures("under")
def test_a_scale_that_is_set_later_is_not_told_of_earlier_steps(queue: cl.CommandQueue, kind: str) -> None:
    training, first, set_later = Training(queue, "none"), 2.0**4, 2.0**5
    scaler = (
        PaddleScaler(init_loss_scaling=first, use_dynamic_loss_scaling=False) if kind == "static" else make(kind, first)
    )
    set_scale = scaler.update if kind == "pytorch" else scaler.set_init_loss_scaling
    for before, after in ((first, first), (set_later, set_later)):
        pytorch_step(training, scaler)
        told = scaler.history[-1]
        assert (told.scale_before, told.scale) == (before, after)
        set_scale(set_later)  # type: ignore[call-arg]
        assert scaler.history[-1] == told


@pytest.mark.parametrize("how", ["written", "replaced", "cleared"])
@pytest.mark.parametrize("kind", ["pytorch", "paddle"])
@pytest.mark.usefixtures("under")
def test_what_was_inf_when_it_was_unscaled_skips_the_step(queue: cl.CommandQueue, kind: str, how: str) -> None:
    """As in PyTorch: the verdict is that of unscale_, whatever is made of the gradient after it."""
    training, scaler = Training(queue, "none"), make(kind, 2.0**4)
    scaler.scale(training.loss(*training.data)).backward()
    param = training.optimizer.params[0]
    plant(param)
    scaler.unscale_(training.optimizer)
    zeros = np.zeros(param.shape, np.float32)
    if how == "written":
        param.grad.write(zeros)
    else:
        param.grad = to_device(queue, zeros) if how == "replaced" else None
    before = param.to_host()
    scaler.step(training.optimizer)
    scaler.update()
    assert not scaler.history[-1].stepped
    assert scaler.history[-1].scale == 2.0**3
    np.testing.assert_array_equal(param.to_host(), before)


def test_each_step_is_told_once(queue: cl.CommandQueue) -> None:
    class Steps(Observer):
        def __init__(self) -> None:
            self.reports: list[Any] = []

        def stepped(self, report: Any) -> None:
            self.reports.append(report)

    amp.init()
    training, scaler, steps = Training(queue, "none"), amp.GradScaler(init_scale=TOO_HIGH), Steps()
    with RESULTS.attached(steps):
        for _ in range(20):
            pytorch_step(training, scaler)
    assert [report.step for report in steps.reports] == list(range(1, 21))


@pytest.mark.parametrize("armed", [True, False])
def test_a_skip_is_explained_with_the_scale_that_came(queue: cl.CommandQueue, armed: bool) -> None:
    handle = amp.init(debug="attribution" if armed else None)
    training, scaler = Training(queue, "none"), amp.GradScaler(init_scale=TOO_HIGH)
    pytorch_step(training, scaler)
    found = handle.explain() if armed else handle.explain(lambda: pytorch_step(training, scaler))
    assert found.kind == "scale", found
    assert f"loss scale {TOO_HIGH:.8g} -> {TOO_HIGH / 2:.8g}" in str(found).splitlines()[0]
    assert found.report == handle.last_step == scaler.history[-1]


def test_a_recorded_step_is_told_as_well(queue: cl.CommandQueue) -> None:
    handle = amp.init()
    training, scaler = Training(queue, "none"), amp.GradScaler(init_scale=TOO_HIGH)
    recorded = amp.record(lambda: pytorch_step(training, scaler))
    for _ in range(8):
        recorded()
    assert recorded.recordings == 1
    assert list(handle.history) == list(scaler.history)
    assert len(handle.history) == 8
    assert [report.scale for report in handle.history][:3] == [TOO_HIGH / 2, TOO_HIGH / 4, TOO_HIGH / 8]


def test_a_recorded_step_is_told_of_a_scale_that_is_set(queue: cl.CommandQueue) -> None:
    """Of Paddle's that stays: what a replay forgets is kept where it was kept when it was recorded, or it is not."""
    training, scaler = Training(queue, "none"), PaddleScaler(init_loss_scaling=2.0, use_dynamic_loss_scaling=False)
    recorded = amp.record(lambda: pytorch_step(training, scaler))
    for scale in (2.0, 4.0, 8.0):
        scaler.set_init_loss_scaling(scale)
        for _ in range(6):
            recorded()
    assert recorded.recordings == 1
    assert [report.scale for report in scaler.history] == [2.0] * 6 + [4.0] * 6 + [8.0] * 6


def test_gradients_are_cleared_while_a_scaler_is_made(queue: cl.CommandQueue) -> None:
    """By another thread, say; or after a Ctrl-C in its making, for as long as somebody holds what was made."""
    optimizer = SGD([], lr=1.0)
    with amp.init():
        unfinished = ManualScaling.__new__(ManualScaling)
        optimizer.zero_grad()
        assert unfinished in bridge.living(ManualScaling)


def test_two_optimizers_have_the_scale_that_their_gradients_had(queue: cl.CommandQueue) -> None:
    handle = amp.init(debug="attribution", on_overflow="skip")
    handle.scalers[0].set_scale(TOO_HIGH)
    training = Training(queue, "none")
    params = training.model.parameters()
    optimizers = SGD(params[:2], lr=1e-4), SGD(params[2:], lr=1e-4)
    with handle.scale_loss(training.loss(*training.data), optimizers) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        assert handle.last_step is not None
        assert (handle.last_step.scale_before, handle.last_step.scale) == (TOO_HIGH, TOO_HIGH / 2)
        found = handle.explain()
        assert found.kind == "scale", found
        assert f"The loss scale of {TOO_HIGH:.8g} was too high" in found.why


class Hanging(SGD):
    """An optimizer whose step never ends, so that a user presses Ctrl-C twice."""

    waited = 0

    def step(self) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            self.waited += 1


@pytest.mark.parametrize("call", [*FACES, "paddle's minimize"])
def test_the_second_ctrl_c_ends_a_step_that_hangs(
    queue: cl.CommandQueue, call: str, request: pytest.FixtureRequest
) -> None:
    # netcl's own handler ends the process
    request.addfinalizer(
        partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    amp.init()
    param, scaler = parameter(queue), FACES[call.split("'")[0]]()
    optimizer, scaled = Hanging([param], lr=0.1), scaler.scale(summed(param))
    scaled.backward()
    with pytest.raises(KeyboardInterrupt):
        scaler.one.minimize(optimizer, scaled) if "minimize" in call else scaler.step(optimizer)
    assert optimizer.waited == 1
