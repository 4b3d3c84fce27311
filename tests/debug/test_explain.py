"""Why a step was skipped: the right op, module and line, for every fault, however the step runs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Linear, Module, Sequential
from netcl.optim import SGD, Adam
from netcl.trainer.trainer import Trainer

from clamp import amp, bridge
from clamp.bridge import BatchNorm2d, Node, Tensor
from clamp.casting.results import RESULTS
from clamp.cli.bench.timing import counted_launches
from clamp.debug.explain import SKIPS_EXPLAINED, Explanation
from clamp.ops.elementwise import elementwise
from tests.debug.faults import FAULTS, WAYS, Train, Training, explained, line_of, optimize
from tests.faults.inject import Calls, Failure
from tests.networks import Task, batch, mlp, scaled_backward, step, weights_of
from tests.reference import to_device
from tests.scaling.test_shared import parameter

pytestmark = pytest.mark.usefixtures("shut_down")


def scale_for(fault: str) -> float:
    """At which a sound step is done."""
    return 2.0**24 if fault == "scale" else 8.0


def check(found: Explanation, fault: str) -> None:
    expected = FAULTS[fault]
    assert found.kind == expected.kind, found
    assert (found.first.function, found.first.direction) == (expected.function, expected.direction), found
    assert found.first.module == expected.module, found
    assert found.first.place.file.endswith("faults.py")
    assert found.first.place.line == line_of(fault), found
    assert not found.report.stepped
    text = str(found)
    assert text.startswith(f"step {found.report.step} was skipped: ")
    assert all(words.format(scale=scale_for(fault)) in text for words in expected.words), text
    assert f"faults.py:{line_of(fault)}: {expected.code}" in text
    assert "\ncure: " in text
    assert len(text.splitlines()) < 50


def run(queue: cl.CommandQueue, fault: str, way: str) -> Explanation:
    return explained(Training(queue, fault).step, way, loss_scale=scale_for(fault))[1]


def recorded(queue: cl.CommandQueue, fault: str) -> Explanation:
    training = Training(queue, fault)
    handle = amp.init(debug="attribution", loss_scale=scale_for(fault))
    replayed = amp.record(training.step(handle))
    for _ in range(4):
        replayed()
    assert replayed.recordings == 1
    return handle.explain()


def graph(queue: cl.CommandQueue, fault: str, *, armed: bool = True) -> Explanation:
    training = Training(queue, fault)
    handle = amp.init(debug="attribution" if armed else None)
    train = Train(training, amp.StaticGradScaler(scale_for(fault)))
    for _ in range(4):
        train(*training.data)
    return handle.explain() if armed else train.explain(*training.data)


RUNS: dict[str, Callable[[cl.CommandQueue, str], Explanation]] = {
    **{way: partial(run, way=way) for way in WAYS},
    "recorded": recorded,
    "graph": graph,
    "graph, run again": partial(graph, armed=False),
}


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_op_the_line_and_the_cause_are_named(queue: cl.CommandQueue, fault: str, how: str) -> None:
    check(RUNS[how](queue, fault), fault)


def test_a_mask_of_minus_inf_is_not_blamed(queue: cl.CommandQueue) -> None:
    training = Training(queue, "forward")
    handle = amp.init(debug="attribution", loss_scale=8.0)
    mask = to_device(queue, np.array([[0.0, -np.inf]] * 4, np.float32))
    x, y = training.data
    masked = ag.sum(ag.softmax(ag.add(ag.matmul_op(ag.tensor(x), ag.tensor(to_device(queue, np.ones((8, 2))))), mask)))
    loss = ag.add(training.loss(x, y), masked)
    optimize(handle, training.optimizer, loss)
    check(handle.explain(), "forward")


# ---------------------------------------------------------------------------------------------- without a trace


def test_a_healthy_step_launches_nothing_more_when_armed(queue: cl.CommandQueue) -> None:
    def launches(**options: Any) -> tuple[list[str], list[np.ndarray]]:
        model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
        optimizer = Adam(model.parameters(), lr=1e-2)
        with amp.init(**options) as handle:
            for _ in range(2):
                step(handle, model, optimizer, data)
            with counted_launches() as names:
                step(handle, model, optimizer, data)
        return names, weights_of(model)

    plain, armed = launches(), launches(debug="attribution")
    assert plain[0] == armed[0]
    assert all(np.array_equal(a, b) for a, b in zip(plain[1], armed[1], strict=True))


def test_nobody_observes_when_nothing_is_armed(queue: cl.CommandQueue) -> None:
    handle = amp.init(debug="attribution")
    assert RESULTS.observers
    handle.shutdown()
    assert not RESULTS.observers
    with amp.init():
        assert not RESULTS.observers


@pytest.mark.parametrize("steps", [0, 1], ids=["before the first step", "between two"])
def test_a_pass_that_is_looked_at_is_none_of_the_next_step(queue: cl.CommandQueue, steps: int) -> None:
    """Neither does the scale grow later, nor is a backward that was run again there counted to that step."""
    runs = []
    for is_looked_at in (False, True):
        task, handle = Task(queue), amp.init(loss_scale=amp.ScaleRule(initial=2.0**4, interval=2))
        for number in range(4):
            if is_looked_at and number == steps:
                handle.explain(partial(task.step, handle, 2.0**16))  # whose backward is run again
            task.step(handle)
            task.optimizer.zero_grad()
        runs.append((list(handle.history), amp.state_dict()))
        handle.shutdown()
    assert runs[1] == runs[0]


@pytest.mark.long
def test_a_call_that_fails_in_a_step_that_is_looked_at_changes_nothing(queue: cl.CommandQueue) -> None:
    norm = BatchNorm2d(queue, 2)
    optimizer = SGD(norm.parameters(), lr=0.1)
    x = to_device(queue, np.random.default_rng(0).standard_normal((2, 2, 2, 2)))
    handle = amp.init()

    def run() -> None:
        optimizer.zero_grad()
        loss = ag.mean(ag.tanh(norm(ag.tensor(x))))
        scaled_backward(handle, loss, optimizer)
        optimizer.step()

    def everything() -> Any:
        bits = {name: bridge.read_bytes(tensor).tobytes() for name, tensor in bridge.module_tensors(norm)}
        return bits, [param.grad for param in norm.parameters()], amp.state_dict()

    run()
    handle.explain(run)
    before = everything()
    for number in range(200):
        calls = Calls(number)
        calls.phase = "looked at"
        with suppress(Failure), calls.counted():
            handle.explain(run)
        assert everything() == before, f"call {number}, {calls.failed}"
        if calls.failed is None:
            break
    assert 20 < number < 199


@pytest.mark.parametrize("thread", ["this", "another"])
@pytest.mark.parametrize("look", ["explain", "ranges", "memory"])
def test_a_pass_that_waits_for_its_repeats_is_repeated_though_a_step_is_looked_at(
    queue: cl.CommandQueue, look: str, thread: str
) -> None:
    task, other, size = Task(queue), Task(queue), 2.0**4
    with ThreadPoolExecutor(1) as pool, amp.init() as handle:

        def call(function: Callable[..., object], *args: Any) -> None:
            pool.submit(function, *args).result() if thread == "another" else function(*args)

        for _ in range(2):
            call(other.step, handle, 2.0**-4)
            call(other.optimizer.zero_grad)
        call(other.backward, handle, size)
        getattr(handle, look)(partial(task.step, handle, 2.0**-4))
        call(other.optimizer.step)
        assert handle.last_step.repeats > 0
    assert (task.moved, other.moved) == (0, size + 2.0**-3)


@pytest.mark.parametrize("size", [0.5, 2.0**40], ids=["finite", "overflowing"])
@pytest.mark.parametrize("look", ["explain", "ranges", "memory"])
def test_what_another_thread_trains_while_a_step_is_looked_at_stays(
    queue: cl.CommandQueue, look: str, size: float
) -> None:
    """Its gradients, its pass, and what that has met."""
    task, other = Task(queue), Task(queue)
    with ThreadPoolExecutor(1) as thread, amp.init(on_overflow="skip") as handle:
        thread.submit(other.step, handle).result()

        def step() -> None:
            thread.submit(other.optimizer.zero_grad).result()
            thread.submit(other.backward, handle, size).result()
            task.step(handle)

        getattr(handle, look)(step)
        thread.submit(other.optimizer.step).result()
        assert handle.last_step.stepped is (size == 0.5)
    assert (task.moved, other.moved) == (0, 1.5 if size == 0.5 else 1)


@pytest.mark.parametrize("debug", ["attribution", None])
def test_another_thread_has_steps_of_its_own(queue: cl.CommandQueue, debug: str | None) -> None:
    training, sound = Training(queue, "forward"), Training(queue, "none")
    handle = amp.init(debug=debug, loss_scale=8.0)
    step = training.step(handle)
    step()

    def beside() -> None:
        other = threading.Thread(target=sound.step(handle))
        other.start()
        other.join()

    def step_beside() -> None:
        training.optimizer.zero_grad()
        loss = training.loss()
        beside()
        scaled_backward(handle, loss, training.optimizer)
        beside()
        training.optimizer.step()

    step_beside()
    found = handle.explain() if debug else handle.explain(step_beside)
    assert found.kind == "forward", found
    assert found.first.module == "layers.1"


def test_a_step_that_is_looked_at_is_no_part_of_the_run(queue: cl.CommandQueue) -> None:
    handle = amp.init(debug=("attribution", "summary"), loss_scale=8.0)
    bad, training = Training(queue, "batch"), Training(queue, "forward")
    training.step(handle)()
    calls = sum(row.calls for row in handle.summary().rows)
    assert handle.explain(bad.step(handle)).kind == "input"
    assert sum(row.calls for row in handle.summary().rows) == calls
    training.step(handle)()
    check(handle.explain(), "forward")


def test_two_optimizers_that_skip_are_told_the_same(queue: cl.CommandQueue) -> None:
    training = Training(queue, "forward")
    params = training.model.parameters()
    first, second = SGD(params[:2], lr=1e-4), SGD(params[2:], lr=1e-4)
    handle = amp.init(debug="attribution", loss_scale=8.0)
    scaled_backward(handle, training.loss(), [first, second])
    for optimizer in (first, second):
        optimizer.step()
        check(handle.explain(), "forward")


def test_a_scale_that_was_too_high_is_the_one_of_the_step(queue: cl.CommandQueue) -> None:
    training = Training(queue, "none")
    handle = amp.init(on_overflow="skip")
    handle.scalers[0].set_scale(2.0**24)
    step = training.step(handle)
    step()
    found = handle.explain(step)
    assert (found.kind, found.cure) == ("scale", "")
    assert f"The loss scale of {2**24} was too high" in found.why


def test_an_explanation_of_an_earlier_step_is_not_shown_for_a_later_one(queue: cl.CommandQueue) -> None:
    training, bad, sound = (Training(queue, fault) for fault in ("forward", "batch", "none"))
    handle = amp.init(loss_scale=8.0)
    bad.step(handle)()
    assert handle.explain(bad.step(handle)).kind == "input"
    assert handle.explain().kind == "input"
    sound.step(handle)()
    assert handle.explain().kind == "input"
    training.step(handle)()
    assert handle.explain().kind == "unseen"


def test_a_metric_that_nobody_trains_on_is_not_blamed(queue: cl.CommandQueue) -> None:
    training = Training(queue, "none")
    handle = amp.init(debug="attribution", loss_scale=8.0)
    loss = training.loss()
    ag.log(ag.mul(loss, 0.0))  # -inf
    scaled_backward(handle, loss, training.optimizer)
    param = training.model.parameters()[0]
    param.grad = to_device(queue, np.full(param.shape, np.nan))
    training.optimizer.step()
    assert handle.explain().kind == "finite"


def test_an_error_in_a_step_that_is_looked_at_is_the_users(queue: cl.CommandQueue) -> None:
    training = Training(queue, "forward")
    handle = amp.init()
    training.step(handle)()
    state = amp.state_dict()

    def fails() -> None:
        training.step(handle)()
        raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        handle.explain(fails)
    assert amp.state_dict() == state
    assert not RESULTS.observers


# ---------------------------------------------------------------------------------------------- on its own


def test_a_graph_looks_by_itself_after_many_skips(queue: cl.CommandQueue) -> None:
    training = Training(queue, "forward")
    train = Train(training, amp.GradScaler())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        for _ in range(SKIPS_EXPLAINED + 3):
            train(*training.data)
    told = [str(one.message) for one in said if "steps in a row were skipped" in str(one.message)]
    assert len(told) == 1
    assert "matmul_op" in told[0]
    check(train.explain(), "forward")


class NotFinite(Module):
    """A layer whose forward is finite, and whose gradient is not, at any scale."""

    def forward(self, x: Node) -> Node:
        return ag.add(x, ag.sqrt(ag.mul(x, 0.0)))

    __call__ = forward


@pytest.mark.parametrize("mixed_precision", [True, False])
def test_a_trainer_looks_by_itself_after_many_skips(queue: cl.CommandQueue, mixed_precision: bool) -> None:
    model = Sequential(Linear(queue, 8, 16), NotFinite(), Linear(queue, 16, 4))
    data = [(np.random.default_rng(0).standard_normal((4, 8), np.float32), np.arange(4))] * (SKIPS_EXPLAINED + 2)
    handle = amp.init()
    trainer = Trainer(model, SGD(model.parameters(), lr=0.1), queue, mixed_precision=mixed_precision)
    with pytest.warns(UserWarning, match="10 steps in a row were skipped. The gradient of sqrt has"):
        trainer.fit(data)
    found = handle.explain()
    assert (found.kind, found.first.function, found.first.module) == ("backward", "sqrt", "layers.1")
    assert len(handle.history) == len(data)


def test_without_a_look_the_way_to_one_is_told(queue: cl.CommandQueue) -> None:
    training = Training(queue, "forward")
    handle = amp.init()
    assert str(handle.explain()).strip() == "why: No step has been skipped."
    training.step(handle)()
    found = handle.explain()
    assert found.kind == "unseen"
    assert found.report == handle.last_step
    assert "handle.explain(step)" in str(found)


@pytest.mark.parametrize(("share", "kind"), [(0.25, "forward"), (1e-8, "unseen")])
def test_earlier_passes_are_held_as_far_as_memory_goes(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, share: float, kind: str
) -> None:
    monkeypatch.setattr("clamp.debug.step_recorder._SHARE", share)
    training, sound = Training(queue, "forward"), Training(queue, "none")
    handle = amp.init(debug="attribution", loss_scale=8.0)
    for one in (training, sound):
        scaled_backward(handle, one.loss(), [training.optimizer, sound.optimizer])
    training.optimizer.step()
    assert handle.explain().kind == kind


@pytest.mark.parametrize("every", range(1, 9))
def test_what_an_op_gave_that_is_held_no_more_is_no_input(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr("clamp.debug.step_recorder._SHARE", 1e-9)
    monkeypatch.setattr("clamp.debug.step_recorder._OFTEN", every)
    assert explained(Training(queue, "forward").step, "armed", loss_scale=8.0)[1].kind == "unseen"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_more_than_may_be_held_is_explained_alike(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    whole = str(run(queue, fault, "run again"))
    amp.shutdown()
    monkeypatch.setattr("clamp.debug.step_recorder._SHARE", 0.0)
    assert str(run(queue, fault, "run again")) == whole


# ---------------------------------------------------------------------------------------------- what is no step


@pytest.mark.parametrize("call", ["explain", "summary", "ranges"])
def test_what_is_no_step_is_refused(call: str) -> None:
    with amp.init() as handle, pytest.raises(TypeError) as error:
        getattr(handle, call)(0.5)
    assert f"{call} takes a function that does what one step of the loop does, got 0.5" in str(error.value)
    assert f"{call}(step), not what it returns" in str(error.value)
    with amp.init() as handle, pytest.raises(ValueError, match="no op of this step was seen"):
        getattr(handle, call)(lambda: None)


@pytest.mark.parametrize("call", ["explain", "summary", "ranges", "memory", "debugging.explain"])
def test_a_step_is_looked_at_where_amp_is_off_as_well(queue: cl.CommandQueue, call: str) -> None:
    param, calls = parameter(queue), []
    with amp.init() as handle:
        pass

    def of_a_loop() -> None:
        ag.sum(ag.tensor(param)).backward()  # netcl's own nodes have none
        calls.append(param.grad)

    getattr(handle, call, amp.debugging.explain)(of_a_loop)
    assert calls
    assert None not in calls
    assert param.grad is None


# ---------------------------------------------------------------------------------------------- other beginnings

#: gradients that a backward begins with, and what is said of them
SEEDS: dict[str, tuple[float, str]] = {
    "too large at this scale": (1e6, "scale"),
    "too large at any": (1e30, "backward"),
    "not finite": (np.nan, "input"),
}


@pytest.mark.parametrize("way", ["armed", "recorded", "run again"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_backward_is_explained_from_the_gradient_that_it_began_with(
    queue: cl.CommandQueue, seed: str, way: str
) -> None:
    number, kind = SEEDS[seed]
    training = Training(queue, "none")
    handle = amp.init(debug=None if way == "run again" else "attribution", loss_scale=8.0)

    def step(grad: Tensor) -> None:
        training.optimizer.zero_grad()
        with handle.scale_loss(training.loss(), training.optimizer) as scaled_loss:
            scaled_loss.backward(grad)
        training.optimizer.step()

    run = amp.record(step) if way == "recorded" else step
    one, bad = (to_device(queue, np.array([x], np.float32)) for x in (1.0, number))
    for _ in range(4):
        run(one)
    run(bad)
    assert not handle.last_step.stepped
    found = handle.explain(lambda: step(bad)) if way == "run again" else handle.explain()
    assert found.kind == kind, found
    assert found.first.direction == "backward"


# ---------------------------------------------------------------------------------------------- other ends


@pytest.mark.parametrize("recorded", [False, True])
def test_a_loss_that_is_nan_over_finite_gradients_is_told(queue: cl.CommandQueue, recorded: bool) -> None:
    training = Training(queue, "none")
    handle = amp.init(debug="attribution", loss_scale=8.0)

    def step(shift: float) -> None:
        loss = training.loss()
        loss = ag.add(loss, ag.log(ag.add(ag.mul(loss, 0.0), shift)))  # its gradient at -1 is finite
        optimize(handle, training.optimizer, loss)

    run = amp.record(step) if recorded else step
    for _ in range(4):
        run(1.0)
    assert handle.explain().why == "No step has been skipped."
    for _ in range(4):
        run(-1.0)
    found = handle.explain()
    assert (found.kind, found.first.function) == ("forward", "log"), found
    assert str(found).startswith("step 8 was done, at a loss scale of 8")
    run(1.0)
    assert handle.explain().why == "No step has been skipped."


def unnamed(x: Node) -> Node:
    """A function on a kernel of the user's, in float32, that is beyond it, and is registered nowhere."""

    def compute(x: Tensor) -> Tensor:
        return elementwise("mul", x.dtype, x, 3e38)

    def gradient(dy: Tensor) -> list[Tensor]:
        return [dy]

    return ag.apply_op(compute, gradient, x)


@pytest.mark.parametrize("armed", [True, False])
def test_an_op_without_a_name_has_that_of_its_function(queue: cl.CommandQueue, armed: bool) -> None:
    training = Training(queue, "none")
    handle = amp.init(debug="attribution" if armed else None, loss_scale=8.0)

    def step() -> None:
        loss = ag.sum(unnamed(ag.add(training.model(ag.tensor(training.data[0])), 10.0)))
        optimize(handle, training.optimizer, loss)

    step()
    found = handle.explain() if armed else handle.explain(step)
    assert (found.kind, found.first.function) == ("forward", "unnamed"), found


@pytest.mark.parametrize("way", WAYS)
def test_a_node_that_is_made_by_hand_is_blamed(queue: cl.CommandQueue, way: str) -> None:
    """Nobody hears of it before backward comes to it, which is after what has read it."""
    training = Training(queue, "none")

    def step(handle: Any) -> Callable[[], None]:
        def run() -> None:
            h = ag.add(training.model(ag.tensor(training.data[0])), 10.0)
            made = Node(
                value=elementwise("mul", "float32", h.value, 3e38), parents=[h], grad_fn=lambda grad: [grad],
                requires_grad=True, op_name="by hand",
            )  # fmt: skip
            optimize(handle, training.optimizer, ag.sum(ag.mul(made, made)))

        return run

    _, found = explained(step, way, loss_scale=8.0)
    assert (found.kind, found.first.function, found.first.direction) == ("forward", "by hand", "forward"), found
