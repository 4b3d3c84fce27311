"""Loops that users write around and inside a recorded function, each as without recording; found by random ones."""

from __future__ import annotations

import dis
import gc
import itertools
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.amp import GradScaler as NetclScaler
from netcl.ops.elementwise import elementwise_binary
from netcl.optim import SGD, Adam, clip_grad_norm

from clamp import amp, session
from clamp.bridge import Node, Parameter, Tensor
from clamp.compat.paddle import GradScaler as PaddleScaler
from clamp.recordings import attempt as attempts
from clamp.recordings import capture, memory
from tests.networks import loss_of, mlp, stepping, weights_of
from tests.recordings.test_compiled import BATCHES, TARGETS, in_threads, poisoned
from tests.recordings.test_record import Run, Step, assert_same, clean, clears_first, compare, same_as_eager
from tests.reference import to_device

__all__ = ["clean"]  # the fixture, for every test here

Scaled = Callable[[Any, Run, Node], None]


# ---------------------------------------------------------------------------------------------- scalers


def as_pytorch(scaler: Any, run: Run, loss: Node) -> None:
    scaler.scale(loss).backward()
    scaler.unscale_(run.optimizer)
    clip_grad_norm(run.params, 0.05)
    scaler.step(run.optimizer)
    scaler.update()


def as_paddle(scaler: Any, run: Run, loss: Node) -> None:
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.minimize(run.optimizer, scaled)


def as_netcl(scaler: Any, run: Run, loss: Node) -> None:
    scaler.scale_loss(loss).backward()
    scaler.step(run.optimizer, run.params)


SCALERS: dict[str, tuple[Callable[[], Any], Scaled]] = {
    "pytorch": (lambda: amp.GradScaler(init_scale=2.0**16, growth_interval=2), as_pytorch),
    "paddle": (lambda: PaddleScaler(incr_every_n_steps=2, decr_every_n_nan_or_inf=1), as_paddle),
    "static": (lambda: PaddleScaler(init_loss_scaling=2.0**10, use_dynamic_loss_scaling=False), as_paddle),
    "netcl": (lambda: NetclScaler(init_scale=2.0**16, growth_interval=2), as_netcl),
}


@pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])
@pytest.mark.parametrize("kind", SCALERS)
def test_a_scaler_in_it_is_that_of_the_day(queue: cl.CommandQueue, kind: str, masters: bool) -> None:
    """Its scale, whether it skips and what it counts, with an overflow before, in and after the recording."""
    scalers = []
    make, loop = SCALERS[kind]

    def prepare(run: Run) -> None:
        scalers.append(make())
        run.scaler = scalers[-1]
        if masters:
            amp.decorate(run.model, run.optimizer, level="O2")

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        run.optimizer.zero_grad()
        loss = loss_of(run.model, (x, y))
        loop(run.scaler, run, loss)
        return loss

    compare(
        queue, step, 11, recordings=None, batches=poisoned(BATCHES, 1, 6), optimizer=lambda params: Adam(params),
        prepare=prepare,
    )  # fmt: skip
    first, second = ((getattr(x, "scale", None), repr(x)) if kind == "netcl" else repr(x.state_dict()) for x in scalers)
    assert_same(first, second)
    if kind != "netcl":
        assert_same(*([repr(report) for report in scaler.history] for scaler in scalers))


@pytest.mark.parametrize("scaled_by", ["the handle", "a scaler"])
def test_an_evaluation_after_a_step_reads_the_weights_of_the_day(queue: cl.CommandQueue, scaled_by: str) -> None:
    """Where the recorded step was skipped, too, which leaves copies of weights that an evaluation before it made."""

    def prepare(run: Run) -> None:
        run.fixed, run.scaler = to_device(queue, BATCHES[0]), amp.GradScaler(init_scale=2.0**6)

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        run.optimizer.zero_grad()
        if scaled_by == "the handle":
            run.backward(x, y)
        else:
            run.scaler.scale(loss_of(run.model, (x, y))).backward()
            run.scaler.unscale_(run.optimizer)
        run.infer(run.fixed)
        if scaled_by == "the handle":
            run.optimizer.step()
        else:
            run.scaler.step(run.optimizer)
        after = run.infer(run.fixed)
        if scaled_by == "a scaler":
            run.scaler.update()
        return ag.tensor(getattr(after, "value", after))

    compare(queue, step, 12, batches=poisoned(BATCHES, 1, 6), prepare=prepare)


@pytest.mark.parametrize("late", ["unscale_", "step"])
def test_a_scaler_goes_on_outside(queue: cl.CommandQueue, late: str) -> None:
    """What it does after the recorded part meets gradients as that has left them."""

    def prepare(run: Run) -> None:
        run.scaler = amp.GradScaler(init_scale=2.0**16, growth_interval=2)

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        run.optimizer.zero_grad()
        loss = loss_of(run.model, (x, y))
        run.scaler.scale(loss).backward()
        if late == "step":
            run.scaler.unscale_(run.optimizer)
        return loss

    def after(run: Run, index: int) -> float:
        run.scaler.step(run.optimizer)
        run.scaler.update()
        return run.scaler.get_scale()  # type: ignore[no-any-return]

    compare(
        queue, step, 12, batches=poisoned(BATCHES, 1, 6), after=after, optimizer=lambda params: Adam(params),
        prepare=prepare,
    )  # fmt: skip


def test_a_pass_that_overflows_is_repeated_where_the_step_is_outside(queue: cl.CommandQueue) -> None:
    """At the end of its replay, which alone knows its inputs: the step, or another replay, comes later."""

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        run.optimizer.zero_grad()
        return run.backward(x, y)

    repeats: list[int] = []

    def between(run: Run, index: int) -> None:
        if index:
            run.optimizer.step()
            repeats.append(run.handle.history[-1].repeats)

    batches = [batch * (3000 if index in (7, 10) else 1) for index, batch in enumerate(BATCHES)]
    compare(queue, step, 12, None, batches, between, optimizer=lambda params: SGD(params, lr=1e-6))
    assert [repeats[index] > 0 for index in (6, 7, 9, 10)] == [False, True, False, True]


@pytest.mark.parametrize("outside", ["unscale_", "nothing"])
def test_what_a_scaler_has_done_outside_decides_what_a_recorded_step_does(queue: cl.CommandQueue, outside: str) -> None:
    """A user's own gradients, of which only the scaler knows whether they are to be divided."""

    def play(record: Callable[[Step], Any]) -> list[Any]:
        weight = Parameter.from_host(queue, np.arange(4, dtype=np.float32))
        optimizer, scaler = SGD([weight], lr=1.0), amp.GradScaler(init_scale=4.0)
        scaler.scale(ag.sum(ag.tensor(weight)))
        call, seen = record(partial(scaler.step, optimizer)), []
        for index in range(9):
            weight.grad = to_device(queue, np.full(4, 8.0))
            if index in (4, 7) and outside == "unscale_":
                scaler.unscale_(optimizer)
                weight.grad = to_device(queue, np.full(4, 8.0))
            call()
            scaler.update()
            seen.append(weight.to_host().copy())
        assert getattr(call, "recordings", True)
        return seen

    same_as_eager(play)


# ---------------------------------------------------------------------------------------------- gradients


def in_16_bits(run: Any, **how: Any) -> None:
    amp.decorate(run.model, run.optimizer, level="O2", **how)
    run.params = run.model.parameters()


@pytest.mark.parametrize("clears", ["now and then", "after each step"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("master_weight", [True, "remainder"])
def test_gradients_of_16_bit_parameters_add_up_over_calls_until_they_are_cleared(
    queue: cl.CommandQueue, clears: str, scaled: bool, master_weight: bool | str
) -> None:
    """A master and its parameter have one gradient, which is not added to itself; what replays deliver is the same
    tensor each time, and was shared with a master before it was cleared."""

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        loss = run.backward(x, y) if scaled else loss_of(run.model, (x, y))
        if not scaled:
            loss.backward()
        run.optimizer.step()
        if clears == "after each step":
            run.optimizer.zero_grad()
        return loss

    def between(run: Run, index: int) -> None:
        if index % 4 == 0:
            run.optimizer.zero_grad()

    prepare = partial(in_16_bits, master_weight=master_weight)
    recordings = 1 if clears == "after each step" else None
    how = {"dtype": "bfloat16"}  # whose gradients need no scale
    compare(queue, step, 13, recordings=recordings, between=between, prepare=prepare, **how)


@pytest.mark.parametrize("master_weight", [True, False])
@pytest.mark.filterwarnings("ignore:in this step:UserWarning")
def test_two_optimizers_step_what_backward_left_in_16_bits(queue: cl.CommandQueue, master_weight: bool) -> None:
    """The first one widens the gradients, those of this replay, for both."""

    def prepare(run: Run) -> None:
        run.both = [run.optimizer, SGD(run.params[2:], lr=0.01)]
        amp.decorate(run.model, run.both, level="O2", master_weight=master_weight)
        run.params = run.model.parameters()

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        run.optimizer.zero_grad()
        loss = loss_of(run.model, (x, y))
        loss.backward()
        for each in run.both:
            each.step()
        return loss

    compare(queue, step, dtype="bfloat16", prepare=prepare)


@pytest.mark.parametrize("master_weight", [True, "remainder", "kahan"])
def test_masters_that_it_reads_are_those_of_the_day(queue: cl.CommandQueue, master_weight: bool | str) -> None:
    """For a moving average. Those in 16-bit parts have memory or none, which no replay would know: it just runs. That
    there are such of another model's does not matter."""
    other = SimpleNamespace(model=mlp(queue, 3, 2))
    other.optimizer = SGD(other.model.parameters(), lr=0.1)
    in_16_bits(other, master_weight="remainder")
    assert all(np.isfinite(master.to_host()).all() for master in amp.master_params(other.optimizer))

    def prepare(run: Run) -> None:
        in_16_bits(run, master_weight=master_weight)
        run.averages = [to_device(queue, np.zeros(param.shape)) for param in run.params]

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        loss = clears_first(run, x, y)
        for average, master in zip(run.averages, amp.master_params(run.optimizer), strict=True):
            elementwise_binary(average, master, expression="0.9f * v0 + 0.1f * v1", out=average)
        return loss

    with nullcontext() if master_weight is True else pytest.warns(UserWarning, match="kept in 16-bit parts was asked"):
        compare(
            queue, step, recordings=int(master_weight is True), prepare=prepare, dtype="bfloat16",
            after=lambda run, index: [average.to_host() for average in run.averages],
        )  # fmt: skip


@pytest.mark.parametrize("found", [False, True], ids=["made in it", "found and cleared"])
@pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])
def test_an_error_in_a_replay_leaves_the_gradients_of_before(
    queue: cl.CommandQueue, masters: bool, found: bool
) -> None:
    """A step inside the ``with`` raises unless it is skipped: the pass is given up, and gradients are put back. A
    master and its parameter have one, which the next step takes once."""

    def play(record: Callable[[Step], Any]) -> list[Any]:
        run = Run(queue)
        if masters:
            amp.decorate(run.model, run.optimizer, level="O2")

        @record
        def step(x: Tensor, y: Tensor) -> Node:
            if not found:
                run.backward(x, y)
            with run.handle.scale_loss(loss := loss_of(run.model, (x, y)), run.optimizer) as scaled_loss:
                for param in run.model.parameters() if found else ():
                    param.grad = None
                scaled_loss.backward()
                run.optimizer.step()
            return loss

        seen = []
        for index, batch in enumerate(poisoned(BATCHES, 0, 1, 2, 3)[:7]):  # the 5th is compared, others replayed
            x, y = to_device(queue, batch), to_device(queue, TARGETS[index])
            if found:
                run.backward(x, y)
            with pytest.raises(RuntimeError, match="by the loss scale") if index > 3 else nullcontext():
                step(x, y)
            seen.append(run.state())
            if index > 3:
                run.optimizer.step()
                seen.append(run.state())
            run.optimizer.zero_grad()
        assert getattr(step, "recordings", 1) == 1
        return seen

    same_as_eager(play)


def test_arguments_get_the_gradients_that_netcl_gives_them(queue: cl.CommandQueue) -> None:
    """netcl's own functions give one to every leaf, where nothing is cast."""

    def play(record: Callable[[Step], Any]) -> list[Any]:
        run = Run(queue)
        run.handle.shutdown()
        session.ensure_patched()

        @record
        def step(x: Tensor, y: Tensor) -> Node:
            run.optimizer.zero_grad()
            loss = loss_of(run.model, (x, y))
            loss.backward()
            run.optimizer.step()
            return loss

        seen = []
        for x, y in zip(BATCHES[:6], TARGETS[:6], strict=True):
            data = to_device(queue, x), to_device(queue, y)
            step(*data)
            seen.append([None if one.grad is None else one.grad.to_host().copy() for one in data])
        assert getattr(step, "recordings", 1) == 1
        return seen

    same_as_eager(play)


def test_losses_of_one_scaler_add_up_with_true_gradients(queue: cl.CommandQueue) -> None:
    """Gradients that are divided already are multiplied anew in each replay."""

    def prepare(run: Run) -> None:
        run.scaler = amp.GradScaler(init_scale=2.0**8, growth_interval=2)

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        loss = loss_of(run.model, (x, y))
        run.scaler.scale(loss).backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        return loss

    compare(queue, step, 11, recordings=None, prepare=prepare)


# ---------------------------------------------------------------------------------------------- data


def unseen(data: list[Any]) -> Iterator[Any]:
    """An iterator that shows nothing of where it is."""
    waiting = np.empty(1, object)
    waiting[0] = list(reversed(data))
    while True:
        yield waiting[0].pop()


ITERATORS: dict[str, Callable[[list[Any]], Iterator[Any]]] = {
    "list": iter,
    "generator": lambda data: (one for one in data),
    "zip": lambda data: zip(*zip(*data, strict=True), strict=True),
    "map": lambda data: map(tuple, data),
    "cycle": itertools.cycle,
    "unseen": unseen,
}


@pytest.mark.parametrize("graph", [False, True], ids=["record", "Graph"])
@pytest.mark.parametrize("kind", ITERATORS)
def test_what_takes_its_batches_from_an_iterator_runs(queue: cl.CommandQueue, kind: str, graph: bool) -> None:
    """A replay would take none, and train on the recorded one for ever."""
    data = [(to_device(queue, x), to_device(queue, y)) for x, y in zip(BATCHES, TARGETS, strict=True)]

    def play(record: Callable[[Step], Any]) -> list[Any]:
        run, batches = Run(queue), ITERATORS[kind](data)

        @record
        def step() -> Any:
            x, y = next(batches)
            with ag.no_grad():
                return loss_of(run.model, (x, y)).value

        return [step().to_host().copy() for _ in range(9)]

    with pytest.warns(UserWarning, match="it changes|reads other tensors"):
        got = play(_graph_of if graph else amp.record)
    assert_same(got, play(lambda function: function))


def _graph_of(step: Callable[[], Tensor]) -> amp.Graph:
    class Evaluate(amp.Graph):
        def build(self) -> Tensor:
            return step()

    return Evaluate()


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.count(1).__next__,
        lambda: itertools.cycle([1.0, 2.0, 3.0]).__next__,
        lambda: itertools.accumulate(range(1, 9)).__next__,
        lambda: random.Random(1).random,
        lambda: [5.0, 4.0, 3.0, 2.0, 1.0].pop,
    ],
    ids=["count", "cycle", "accumulate", "random", "pop"],
)
def test_numbers_from_what_does_not_show_its_place_are_those_of_the_day(
    queue: cl.CommandQueue, make: Callable[[], Callable[[], Any]]
) -> None:
    x = to_device(queue, np.ones(4))

    def play(record: Callable[[Step], Any]) -> list[float]:
        source = SimpleNamespace(draw=make())
        step = record(lambda x: ag.mul(ag.tensor(x), float(source.draw())).value)
        return [float(step(x).to_host()[0]) for _ in range(5)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it runs as it is, and says so
        same_as_eager(play)


def test_a_batch_of_a_generator_is_let_go(queue: cl.CommandQueue) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def batches() -> Iterator[Tensor]:
        for index in range(6):
            batch = to_device(queue, np.full(4, index))
            alive.append(weakref.ref(batch))
            yield batch

    source = batches()
    call = amp.record(lambda x, source=source: ag.mul(ag.tensor(x), 2.0).value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for batch in source:
            call(batch)
            del batch
    gc.collect()
    assert sum(ref() is not None for ref in alive[:-1]) <= 1  # what the recording has of its own may stay


def test_a_generator_that_nobody_holds_any_more_ends_no_recording(queue: cl.CommandQueue) -> None:
    """Python closes it wherever that is found out."""

    def step(x: Tensor) -> Tensor:
        gc.collect()
        return ag.mul(ag.tensor(x), 2.0).value

    recorded, x = amp.record(step), to_device(queue, np.ones(4))
    for _ in range(5):
        generator = (one for one in (1, 2))
        cycle: list[Any] = [generator, next(generator)]
        cycle.append(cycle)
        del generator, cycle
        np.testing.assert_array_equal(recorded(x).to_host(), np.full(4, 2.0))
    assert recorded.recordings == 1


def test_a_generator_of_before_is_told_from_one_that_ended_where_it_is_now() -> None:
    """Python makes the frames of generators when somebody looks at them, one where another has been."""

    def settings() -> Iterator[float]:
        yield 1.0

    places = {(x.opname, x.arg): x.offset for x in dis.get_instructions(settings)}
    yields = next(place for (name, _), place in places.items() if name == "YIELD_VALUE")
    frame: Any = SimpleNamespace(f_code=settings.__code__, f_globals=globals())
    attempt, begun = Mock(), dict[int, bool]()
    for event, frame.f_lasti, given_up in (
        ("call", places["RESUME", 0], 0), ("return", yields, 0),
        ("call", places["RESUME", 1], 0), ("return", max(places.values()), 0),
        ("call", places["RESUME", 1], 0), ("return", yields, 1),
    ):  # fmt: skip
        attempts._look(attempt, begun, frame, event, None)
        assert attempt.give_up.call_count == given_up


def test_a_tensor_that_only_a_library_knows_may_be_read(queue: cl.CommandQueue) -> None:
    """The call after the recording is compared with it."""
    run = Run(queue)
    constants = [to_device(queue, TARGETS[0]), *[None] * 5000]  # too long to be looked into

    @amp.record
    def shifted(x: Tensor) -> Any:
        with ag.no_grad():
            return ag.add(run.model(ag.tensor(x)), ag.tensor(constants[0]))

    for turn in range(6):
        got = shifted(to_device(queue, BATCHES[turn]))
        assert shifted.recordings == (turn >= 1)
        np.testing.assert_array_equal(
            got.value.to_host(), shifted.__wrapped__(to_device(queue, BATCHES[turn])).value.to_host()
        )


def test_arrays_may_be_returned_as_the_tensors_that_they_became(queue: cl.CommandQueue) -> None:
    @amp.record
    def bring(x: np.ndarray[Any, Any]) -> Any:
        tensor = Tensor.from_host(queue, x)
        return tensor, ag.mul(ag.tensor(tensor), 2.0)

    results = [bring(x) for x in BATCHES[:5]]
    for x, (tensor, doubled) in zip(BATCHES, results, strict=False):
        np.testing.assert_array_equal(tensor.to_host(), x)
        np.testing.assert_array_equal(doubled.value.to_host(), 2 * x)
    assert bring.recordings == 1


GIVEN: dict[str, Callable[[cl.CommandQueue, Any], Any]] = {
    "tensor": to_device,
    "node": lambda queue, x: ag.tensor(to_device(queue, x)),
    "array": lambda queue, x: x.copy(),
}


@pytest.mark.parametrize("container", [list, dict])
@pytest.mark.parametrize("kind", GIVEN)
def test_an_argument_that_is_returned_is_the_calls_own(queue: cl.CommandQueue, kind: str, container: type) -> None:
    """Also where the caller has put another one into the container that it was recorded with."""

    @amp.record
    def pick(xs: Any) -> Any:
        x = Tensor.from_host(queue, xs[0]) if kind == "array" else xs[0]
        return xs[0], ag.mul(x if kind == "node" else ag.tensor(x), 2.0)

    xs: Any = {0: None, 1: None} if container is dict else [None, None]
    for turn in range(10):
        xs[0], xs[1] = (GIVEN[kind](queue, BATCHES[place]) for place in (0, 1))
        xs[0], xs[1] = xs[turn % 2], xs[1 - turn % 2]
        got, doubled = pick(xs)
        assert got is xs[0], f"call {turn}"
        np.testing.assert_array_equal(doubled.value.to_host(), 2 * BATCHES[turn % 2], err_msg=f"call {turn}")
    assert pick.recordings == 1


@pytest.mark.parametrize("params", [list, tuple, lambda params: [1.0]], ids=["list", "tuple", "numbers"])
def test_a_training_with_params_and_a_step_is_no_optimizer(
    queue: cl.CommandQueue, params: Callable[[list[Parameter]], Any]
) -> None:
    """What it holds stays the parameters, and is not stepped; what it reads, beside them, is seen."""
    trainings = []

    class Training:
        def __init__(self, run: Run) -> None:
            amp.decorate(run.model, run.optimizer, level="O2")
            self.run, self.factor, self.params = run, 1.0, params(run.params)

        def step(self, x: Tensor, y: Tensor) -> Node:
            self.run.optimizer.zero_grad()
            loss = self.run.backward(x, y, lambda *given: ag.mul(loss_of(*given), self.factor))
            self.run.optimizer.step()
            return loss

    def prepare(run: Run) -> None:
        training = Training(run)
        trainings.append((training, training.params, [*training.params]))

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        return trainings[-1][0].step(x, y)

    def between(run: Run, index: int) -> None:
        trainings[-1][0].factor = 1.0 if index < 5 else 0.5

    compare(queue, step, recordings=2, between=between, prepare=prepare)
    for training, held, items in trainings:
        assert training.params is held
        assert all(one is other for one, other in zip(held, items, strict=True))


# ---------------------------------------------------------------------------------------------- threads


def test_threads_train_with_functions_of_their_own(queue: cl.CommandQueue) -> None:
    """Each reaches its own model; all share the handle."""

    def play(record: Callable[[Step], Any]) -> list[Any]:
        amp.shutdown()
        handle = amp.init(loss_scale=2.0**10)
        models = [mlp(queue, 10, 16, 3, seed=seed) for seed in range(3)]
        losses: list[list[Any]] = [[] for _ in models]
        pairs = zip(models, losses, strict=True)
        in_threads(*(partial(_train, queue, handle, model, seen, record) for model, seen in pairs))
        return [losses, [weights_of(model) for model in models]]

    same_as_eager(play)


def _train(queue: cl.CommandQueue, handle: Any, model: Any, losses: list[Any], record: Callable[[Step], Any]) -> None:
    call = record(stepping(handle, model, SGD(list(model.parameters()), lr=0.05)))
    for index in range(16):
        data = to_device(queue, BATCHES[index % 12]), to_device(queue, TARGETS[index % 12])
        losses.append(call(*data).value.to_host().copy())


def test_launches_of_other_threads_are_not_recorded(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a recording begins and when it ends netcl takes those of all threads."""
    run, calls = Run(queue), 0
    counter = to_device(queue, np.zeros(4))
    look = capture.living_tensors

    def count() -> None:
        elementwise_binary(counter, counter, expression="ADD(v0, 1.0f)", out=counter)

    def looking() -> Any:
        nonlocal calls
        calls += 1
        in_threads(count)
        return look()

    monkeypatch.setattr(capture, "living_tensors", looking)
    monkeypatch.setattr(memory, "living_tensors", looking)

    call = amp.record(run.infer)
    for x in BATCHES[:5]:
        call(to_device(queue, x))
    assert call.recordings == 1
    assert calls == 2
    np.testing.assert_array_equal(counter.to_host(), np.full(4, 2.0))


def test_copies_of_weights_that_another_thread_makes_are_not_recorded(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that evaluates the model while its step is recorded: a replay would go on with its copies."""
    look = capture.living_tensors

    def play(record: Callable[[Step], Any]) -> list[Any]:
        amp.shutdown()
        handle, model, losses = amp.init(loss_scale=2.0**10), mlp(queue, 10, 16, 3), list[Any]()

        def evaluate() -> None:
            with ag.no_grad():
                model(ag.tensor(to_device(queue, BATCHES[0])))

        def looking() -> Any:
            in_threads(evaluate)
            return look()

        monkeypatch.setattr(capture, "living_tensors", looking)
        _train(queue, handle, model, losses, record)
        return [losses, weights_of(model)]

    same_as_eager(play)


def test_a_function_leaves_other_models_their_gradients(queue: cl.CommandQueue) -> None:
    """One that it reaches, and does nothing to, may be another thread's."""
    run = Run(queue)
    others = [mlp(queue, 10, 16, 3, seed=1)]

    @amp.record
    def call(x: Tensor, y: Tensor) -> Node:
        len(others)  # it reaches them
        return clears_first(run, x, y)

    loss_of(others[0], (to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0]))).backward()
    grads = [param.grad for param in others[0].parameters()]
    for index in range(5):
        call(to_device(queue, BATCHES[index]), to_device(queue, TARGETS[index]))
        assert all(param.grad is grad for param, grad in zip(others[0].parameters(), grads, strict=True))


def test_a_function_is_recorded_where_threads_that_have_ended_left_gradients(queue: cl.CommandQueue) -> None:
    handle, model = amp.init(loss_scale=2.0**10), mlp(queue, 10, 16, 3)
    call = amp.record(stepping(handle, model, SGD(list(model.parameters()), lr=0.05)))
    for x, y in zip(BATCHES[:4], TARGETS[:4], strict=True):
        data = to_device(queue, x), to_device(queue, y)
        in_threads(lambda data=data: loss_of(model, data).backward())  # type: ignore[misc]
        call(*data)
    assert call.recordings == 1


def test_looking_for_tensors_does_not_disturb_threads(queue: cl.CommandQueue) -> None:
    """Python raises SystemError in a thread that makes a tuple which somebody else holds already."""
    errors: list[BaseException] = []
    ends = threading.Event()

    def make() -> None:
        while not ends.is_set():
            try:
                tuple(number for number in range(50))
            except SystemError as error:
                errors.append(error)

    kept, found = to_device(queue, np.zeros(3)), list[bool]()

    def look() -> None:
        try:
            found.extend(any(ref() is kept for ref, _ in memory.living_tensors()) for _ in range(30))
        finally:
            ends.set()

    in_threads(make, make, look)
    assert found == [True] * 30
    assert not errors
