"""Several optimizers, queues and holders of one gradient: whom a verdict on it binds, and what a pass leaves behind."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core.parameter import Parameter
from netcl.optim import SGD, Adam

from clamp import amp
from clamp.bridge import Tensor
from clamp.ops.loss_scale import DeviceState
from clamp.params import delivery, gradient_marks
from clamp.patching.collectives import share_overflows
from clamp.scaling.backward_pass import BackwardPass
from clamp.scaling.dynamic_scale import ScaleRule
from clamp.scaling.loss_scale import LossScale
from clamp.scaling.scaled_loss import scaled_node
from clamp.scaling.step_guard import StepGuard, StepGuards
from tests.networks import Task
from tests.reference import HALF_DTYPES, to_device
from tests.scaling.test_overflow import plant

pytestmark = pytest.mark.usefixtures("shut_down")


def parameter(queue: cl.CommandQueue, *values: float) -> Parameter:
    return Parameter.from_host(queue, np.array(values or (1.0, 2.0), np.float32))


def summed(*params: Tensor) -> Any:
    """A loss that is linear in parameters: each one's gradient is 1."""
    total = ag.sum(ag.tensor(params[0], requires_grad=True))
    for param in params[1:]:
        total = ag.add(total, ag.sum(ag.tensor(param, requires_grad=True)))
    return total


def scaled(handle: Any, loss: Any, named: Any, *, bad: Tensor | None = None) -> None:
    with handle.scale_loss(loss, named) as scaled_loss:
        scaled_loss.backward()
        if bad is not None:
            plant(bad)


# ---------------------------------------------------------------------------------------------- several optimizers


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "kept"])
@pytest.mark.parametrize("order", ["a a", "a b", "b a"])
def test_an_overflow_skips_only_steps_on_what_overflowed(
    queue: cl.CommandQueue, order: str, clears: bool, dtype: str
) -> None:
    """``a`` and ``b`` share a parameter. The pass that overflows names the first of the order; where gradients are
    cleared after it, the other's step, on a pass of its own, is sound."""
    param = parameter(queue)
    optimizers = {"a": SGD([param], lr=1.0), "b": SGD([param], lr=1.0)}
    handle = amp.init(dtype=dtype)
    for optimizer in optimizers.values():
        handle._scaling.guard(optimizer)
    first, second = (optimizers[name] for name in order.split())
    scaled(handle, summed(param), first, bad=param)
    if clears:
        param.grad = None
    scaled(handle, summed(param), second)
    second.step()
    expected = clears and (first is not second or dtype == "bfloat16")
    assert handle.last_step.stepped == expected
    np.testing.assert_array_equal(param.to_host(), [0.0, 1.0] if expected else [1.0, 2.0])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_who_was_not_named_looks_at_the_gradient_itself(queue: cl.CommandQueue, dtype: str) -> None:
    param = parameter(queue)
    first, second = SGD([param], lr=1.0), SGD([param], lr=1.0)
    handle = amp.init(dtype=dtype)
    for bad in (param, None):
        param.grad = None
        scaled(handle, summed(param), first, bad=bad)
        second.step()
        assert handle.last_step.stepped == (bad is None)


# ---------------------------------------------------------------------------------------------- who else is reached


def _plain(queue: cl.CommandQueue) -> Tensor:
    return to_device(queue, np.ones(2))


LEAVES: dict[str, Callable[[cl.CommandQueue], Tensor]] = {"parameter": parameter, "tensor": _plain}


@pytest.mark.parametrize("before", ["none", "plain", "user's"])
@pytest.mark.parametrize("kind", LEAVES)
@pytest.mark.parametrize("fails", ["after backward", "in another backward", "nothing reached"])
def test_an_error_leaves_every_gradient_as_it_was(queue: cl.CommandQueue, kind: str, before: str, fails: str) -> None:
    """Those of tensors, too, that the optimizers that are named do not have."""
    named, other = parameter(queue), LEAVES[kind](queue)
    other.requires_grad = True
    optimizer, theirs = SGD([named]), SGD([other])
    handle = amp.init(loss_scale=256.0)
    if before == "plain":
        summed(other).backward()
    elif before == "user's":
        other.grad = to_device(queue, np.full(2, 5.0))
    kept, state = other.grad, amp.state_dict()
    reached = [other] if fails == "nothing reached" else [named, other]
    loss = summed(*reached)

    def run() -> None:
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            assert other.grad is not kept
            if fails == "in another backward":
                scaled_loss.backward()
            if fails != "nothing reached":
                raise ZeroDivisionError

    with pytest.raises((ZeroDivisionError, RuntimeError)):
        run()
    assert named.grad is None
    assert other.grad is kept
    assert theirs.params[0] is other
    assert amp.state_dict() == state
    assert amp.is_autocast_enabled()
    scaled(handle, summed(named, other), [optimizer, theirs])
    value = {"none": 1.0, "plain": 2.0, "user's": 6.0}[before]
    np.testing.assert_array_equal(other.grad.to_host(), np.full(2, value, np.float32))
    optimizer.step()
    assert handle.last_step.stepped


@pytest.mark.parametrize("held", ["by nobody", "by a netcl optimizer", "frozen", "data"])
@pytest.mark.parametrize("kind", LEAVES)
def test_a_pass_says_once_that_it_reaches_what_no_optimizer_has(queue: cl.CommandQueue, kind: str, held: str) -> None:
    named, other = parameter(queue), LEAVES[kind](queue)
    other.requires_grad = held not in ("frozen", "data")
    others = [Adam([other])] if held == "by a netcl optimizer" else []
    optimizer = SGD([named])
    handle = amp.init()
    reached = [named] if held == "data" else [named, other]
    told = pytest.warns(UserWarning, match=r"that no optimizer steps: a tensor of shape \(2,\)\.")
    with told if held == "by nobody" else nullcontext():
        scaled(handle, summed(*reached), optimizer)
    scaled(handle, summed(*reached), optimizer)
    assert len(others) == (held == "by a netcl optimizer")


def _one_pass(handle: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    scaled(handle, loss(), optimizer)


def _two_passes(handle: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    scaled(handle, loss(), optimizer)
    scaled(handle, loss(), optimizer)


def _two_backwards(handle: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    with handle.scale_loss(loss(), optimizer) as scaled_loss:
        scaled_loss.backward()
        scaled_loss.backward()


def _after_a_backward_of_its_own(handle: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    loss().backward()
    optimizer.params[0].grad = None
    scaled(handle, loss(), optimizer)


def _an_overflow(handle: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    scaled(handle, ag.mul(loss(), 2.0**9), optimizer)


def _inside_another(handle: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
    with handle.scale_loss(loss(), optimizer) as outer:
        scaled(handle, loss(), optimizer)
        outer.backward()


_LOOKED_AT: dict[str, tuple[Callable[[Any, Any, Callable[[], Any]], None], float]] = {  # and how often x counts in it
    "one pass": (_one_pass, 1),
    "two passes": (_two_passes, 2),
    "two backwards": (_two_backwards, 2),
    "after a backward of its own": (_after_a_backward_of_its_own, 2),
    "an overflow": (_an_overflow, 2**9),
    "inside another": (_inside_another, 2),
}


@pytest.mark.parametrize("way", _LOOKED_AT)
@pytest.mark.parametrize("stored", ["float32", "float16"])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.filterwarnings("ignore:.*no optimizer steps", "ignore:.*a loss that was not scaled")
def test_the_gradient_of_an_input_is_the_true_one_after_a_pass(
    queue: cl.CommandQueue, dtype: str, stored: str, way: str
) -> None:
    """As attacks on models and maps of what they look at read it; what has none is no input."""
    weight, x = parameter(queue, 3.0, 3.0), to_device(queue, np.ones(2), stored)
    x.requires_grad = True
    optimizer = SGD([weight], lr=1.0)
    handle = amp.init(dtype=dtype, loss_scale=ScaleRule(initial=1024.0) if dtype == "float16" else "auto")

    def loss() -> Any:
        return ag.sum(amp.cast(ag.mul(ag.tensor(x, requires_grad=True), ag.tensor(weight)), dtype))

    run, counts = _LOOKED_AT[way]
    run(handle, optimizer, loss)
    np.testing.assert_array_equal(x.grad.to_host().astype(np.float32), 3 * counts)
    optimizer.step()
    assert handle.last_step.stepped
    assert handle.last_step.repeats == 0 or way == "an overflow"


@pytest.mark.parametrize("known", ["by a pass", "by a plain step", "by a word"])
def test_who_comes_where_another_was_is_not_taken_for_it(queue: cl.CommandQueue, known: str) -> None:
    """Optimizers and tensors are known by their addresses, which memory that comes again has again."""
    named, other = parameter(queue), _plain(queue)
    other.requires_grad = True
    optimizer, gone = SGD([named], lr=1.0), SGD([parameter(queue)])
    handle = amp.init()
    guards, left = handle._scaling.guards, weakref.ref(gone)
    guard = StepGuard(gone, guards)
    guard.mask = 2 * (known == "by a pass")
    del gone
    assert left() is guard.optimizer is None
    if known == "by a word":
        handle._scaling._unnamed[id(other)] = left
        with pytest.warns(UserWarning, match=r"that no optimizer steps: a tensor of shape \(2,\)\."):
            scaled(handle, summed(named, other), optimizer)
        return
    guards._by_id[id(optimizer)] = guard
    if known == "by a pass":
        scaled(handle, summed(named), optimizer)
    else:
        named.grad = to_device(queue, np.ones(2))
    optimizer.step()
    assert handle.last_step.stepped
    np.testing.assert_array_equal(named.to_host(), [0.0, 1.0])
    assert guards._by_id[id(optimizer)].optimizer is optimizer


def test_optimizers_of_threads_that_come_together_have_a_bit_each(queue: cl.CommandQueue) -> None:
    """One bit for two would let the one's next pass forget that the other's has overflowed."""
    optimizers, interval = [SGD([parameter(queue)]) for _ in range(16)], sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(16) as threads:
            for _ in range(100):
                guards, start = StepGuards(), threading.Barrier(16)
                given = threads.map(lambda x, start=start, of=guards.of: (start.wait(), of(x))[1], optimizers)
                found = list(given)
                assert len({guard.mask for guard in found}) == 16
                assert found == [guards.of(optimizer) for optimizer in optimizers]
    finally:
        sys.setswitchinterval(interval)


# ---------------------------------------------------------------------------------------------- a verdict's holders


@pytest.mark.parametrize("finite", ["first", "second"])
@pytest.mark.parametrize("stepped", ["named", "other"])
def test_a_sum_is_finite_only_if_both_parts_are(queue: cl.CommandQueue, finite: str, stepped: str) -> None:
    """One gradient was finite when a step looked at it, which everybody knows; of the other one, the optimizer that its
    pass named has heard, and nobody else."""
    param = parameter(queue)
    named, other = SGD([param], lr=1.0), SGD([param], lr=1.0)
    handle = amp.init(loss_scale=1.0)
    handle._scaling.guard(other)

    def good() -> None:
        kept, param.grad = param.grad, to_device(queue, np.zeros(2))
        gradient_marks.set_mark(param.grad, gradient_marks.PLAIN)
        other.step()
        assert handle.last_step.stepped
        param.grad = param.grad if kept is None else gradient_marks.added(kept, param.grad)

    def bad() -> None:
        scaled(handle, summed(param), named, bad=param)

    for come in (good, bad) if finite == "first" else (bad, good):
        come()
    before = param.to_host()
    {"named": named, "other": other}[stepped].step()
    assert not handle.last_step.stepped
    np.testing.assert_array_equal(param.to_host(), before)


@pytest.mark.parametrize("how", ["the gradient itself", "a copy of it"])
@pytest.mark.parametrize("bad", [True, False])
def test_who_holds_anothers_gradient_does_not_go_by_anothers_verdict(
    queue: cl.CommandQueue, bad: bool, how: str
) -> None:
    mine, theirs = parameter(queue), parameter(queue)
    named, other = SGD([mine], lr=1.0), SGD([theirs], lr=1.0)
    handle = amp.init(loss_scale=1.0)
    scaled(handle, summed(mine), named, bad=mine if bad else None)
    theirs.grad = mine.grad if how == "the gradient itself" else gradient_marks.copied(mine.grad)
    for optimizer in (other, named):
        optimizer.step()
        assert handle.last_step.stepped != bad


@pytest.mark.parametrize("before", ["plain", "user's"])
@pytest.mark.parametrize("steps", ["inside", "after"])
def test_a_pass_inside_of_another_ends_with_what_was_there_before(
    queue: cl.CommandQueue, before: str, steps: str
) -> None:
    """Whoever steps then, inside of the outer one, steps by all of it."""
    param = parameter(queue)
    first, second = SGD([param], lr=1.0), SGD([param], lr=1.0)
    handle = amp.init(loss_scale=256.0)
    if before == "plain":
        summed(param).backward()
    else:
        param.grad = to_device(queue, np.ones(2))
    with handle.scale_loss(summed(param), first) as outer:
        scaled(handle, summed(param), second)
        np.testing.assert_array_equal(param.grad.to_host(), [2.0, 2.0])
        if steps == "inside":
            second.step()
            param.grad = None
        outer.backward()
    first.step()
    np.testing.assert_array_equal(param.to_host(), np.array([1.0, 2.0]) - 3.0)


# ---------------------------------------------------------------------------------------------- several queues


def states(handle: Any, optimizers: list[Any]) -> list[Any]:
    """The state of the loss scale on the queue of each optimizer's parameters."""
    return [next(iter(handle._scaling.guard(optimizer).pending)).read() for optimizer in optimizers]


CHANGES: dict[str, Callable[[Any], object]] = {
    "rule": lambda scaler: setattr(scaler, "rule", ScaleRule(interval=2, growth=8.0)),
    "set_scale": lambda scaler: scaler.set_scale(2.0**9),
    "load_state_dict": lambda scaler: scaler.load_state_dict({"loss_scale": 2.0**7, "unskipped": 1999}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_a_scale_reaches_every_queue(queues: list[cl.CommandQueue], change: str) -> None:
    params = [parameter(queue) for queue in queues]
    optimizers = [SGD([param], lr=1.0) for param in params]
    handle = amp.init()
    seen: list[list[float]] = []
    for index in range(4):
        if index == 1:
            CHANGES[change](handle.scalers[0])
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = None
            scaled(handle, summed(param), optimizer)
        seen.append([state.scale for state in states(handle, optimizers)])
        for optimizer in optimizers:
            optimizer.step()
    assert all(first == second for first, second in seen)
    assert seen[0] != seen[-1]


@pytest.mark.parametrize("bad", [[0], [1], [0, 1], []])
def test_replicas_go_on_with_one_scale_after_an_overflow_of_any(queues: list[cl.CommandQueue], bad: list[int]) -> None:
    params = [parameter(queue) for queue in queues]
    optimizers = [SGD([param], lr=1.0) for param in params]
    handle = amp.init()
    for index in range(4):
        for number, (param, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            param.grad = None
            scaled(handle, summed(param), optimizer, bad=param if index == 3 and number in bad else None)
        if index == 3:
            share_overflows(handle._scaling.guards, [[param] for param in params])
            one, other = states(handle, optimizers)
            assert one.scale == other.scale == (2.0**15 if bad else 2.0**16)
            assert not bad or one.growth_tracker == other.growth_tracker == one.bad_steps == other.bad_steps == 0
        for optimizer in optimizers:
            optimizer.step()
            assert handle.last_step.stepped == (index < 3 or not bad)


def test_replicas_grow_in_the_same_step(queues: list[cl.CommandQueue]) -> None:
    """Though the second one's scale is made when the first has had a clean pass."""
    params = [parameter(queue) for queue in queues]
    optimizers = [SGD([param], lr=1.0) for param in params]
    handle, seen = amp.init(loss_scale=amp.ScaleRule(interval=3)), []
    for _ in range(4):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = None
            scaled(handle, summed(param), optimizer)
        share_overflows(handle._scaling.guards, [[param] for param in params])
        seen.append([(state.scale, state.growth_tracker) for state in states(handle, optimizers)])
        for optimizer in optimizers:
            optimizer.step()
    assert seen == [[(scale, count)] * 2 for scale, count in ((2.0**16, 1), (2.0**16, 2), (2.0**17, 0), (2.0**17, 1))]


def test_no_replica_on_several_queues_repeats_its_backward(queues: list[cl.CommandQueue]) -> None:
    """The copies of the scale would move apart."""
    tasks = [Task(queue) for queue in queues]
    handle = amp.init()
    for sizes in [(1.0, 1.0), (1.0, 1.0), (2.0**20, 1.0), (1.0, 1.0)]:
        for task, size in zip(tasks, sizes, strict=True):
            task.optimizer.zero_grad()
            task.backward(handle, size)
        share_overflows(handle._scaling.guards, [[task.weight] for task in tasks])
        one, other = states(handle, [task.optimizer for task in tasks])
        assert one.scale == other.scale
        for task in tasks:
            task.optimizer.step()
    assert [task.moved for task in tasks] == [3.0, 3.0]
    assert handle.loss_scale == 2.0**15


MET = {"nothing": 1.0, "inf": np.inf, "nan": np.nan}


@pytest.mark.parametrize("others", MET)
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_replicas_that_skip_together_leave_other_optimizers_their_own(
    queues: list[cl.CommandQueue], bad: str, others: str
) -> None:
    """What an optimizer that has no replica has met on one of the queues stays: whether it was anything, and what."""
    params = [parameter(queue) for queue in queues]
    other = parameter(queues[1])
    optimizers = [SGD([param], lr=1.0) for param in (*params, other)]
    handle = amp.init(on_overflow="skip")
    for param, optimizer, value in zip((*params, other), optimizers, (MET[bad], 1.0, MET[others]), strict=True):
        with handle.scale_loss(summed(param), optimizer) as scaled_loss:
            scaled_loss.backward()
            plant(param, value)
    share_overflows(handle._scaling.guards, [[param] for param in params])
    other.grad = None  # so that the scale alone knows
    for optimizer in optimizers:
        optimizer.step()
    first, second, third = handle.history
    assert [first.stepped, second.stepped] == [False, False]
    assert third.reason == {
        "nothing": "no parameter had a gradient",
        **{kind: f"{kind} in the gradients of a backward pass, which are gone" for kind in ("inf", "nan")},
    }[others]  # fmt: skip


@pytest.mark.parametrize("handled", [True, False], ids=["under a handle", "alone"])
@pytest.mark.parametrize("together", [True, False], ids=["one optimizer", "one a queue"])
@pytest.mark.parametrize("planted", ["before unscale_", "after unscale_", "before step"])
@pytest.mark.parametrize(
    ("sick", "exponent"), [([None] * 4, 10), ([0] * 4, 4), ([1] * 4, 4), ([None, 1, 0, 1, None, None], 6)]
)
def test_a_scaler_of_several_queues_grows_and_falls_on_all(
    queues: list[cl.CommandQueue], sick: list[int | None], exponent: int, planted: str, together: bool, handled: bool
) -> None:
    params = [parameter(queue) for queue in queues]
    optimizers = [SGD(params, lr=1.0)] if together else [SGD([param], lr=1.0) for param in params]
    scaler = amp.GradScaler(init_scale=2.0**8, growth_interval=2)
    if handled:
        amp.init()
    for which in sick:
        before = [param.to_host() for param in params]
        for param in params:
            param.grad = None
        for loss in scaler.scale([summed(param) for param in params]):
            loss.backward()
        for when in ("before unscale_", "after unscale_", "before step"):
            if which is not None and when == planted:
                plant(params[which])
            for optimizer in optimizers if when == "before unscale_" and planted != "before step" else ():
                scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        moved = [not np.array_equal(param.to_host(), old) for param, old in zip(params, before, strict=True)]
        assert moved == [which is None or not (together or which == number) for number in range(2)]
    assert scaler.get_scale() == 2.0**exponent
    assert [scaler.scale(to_device(queue, [1.0])).to_host() for queue in queues] == [scaler.get_scale()] * 2


@pytest.mark.parametrize("sick", [False, True])
@pytest.mark.parametrize("reached", [(0,), (1,), (0, 1)])
def test_a_scale_moves_by_whichever_queues_are_reached(
    queues: list[cl.CommandQueue], reached: tuple[int, ...], sick: bool
) -> None:
    params = [parameter(queue) for queue in queues]
    scaler, optimizer = amp.GradScaler(init_scale=2.0**8, growth_interval=2), SGD(params)
    for _ in range(4):
        optimizer.zero_grad()
        losses = scaler.scale([summed(param) for param in params])
        for index in reached:
            losses[index].backward()
        if sick:
            plant(params[reached[-1]])
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0 ** (4 if sick else 10)


# ---------------------------------------------------------------------------------------------- several ranks


class Ranks:
    """Other ranks, whose passes reach what this one's does not."""

    def __init__(self, theirs: list[Tensor | None]) -> None:
        self._theirs = theirs

    def average(self, params: Any, gradients: Any, scale: float) -> list[Tensor | None]:
        """The mean over this rank and one that has no gradient where this one has, and ``theirs`` elsewhere."""
        return [
            to_device(theirs.queue, theirs.to_host() * scale) if theirs is not None else ours
            for theirs, ours in zip(self._theirs, gradients, strict=True)
        ]


@pytest.mark.parametrize("earlier", ["none", "of a pass", "plain", "user's"])
@pytest.mark.parametrize("reached", [(0,), (1,), (0, 1)])
def test_what_a_rank_had_is_added_to_what_other_ranks_have_found(
    queue: cl.CommandQueue, earlier: str, reached: tuple[int, ...]
) -> None:
    params = [parameter(queue), parameter(queue)]
    optimizer = SGD(params)
    handle = amp.init(loss_scale=64.0)
    if earlier == "of a pass":
        scaled(handle, summed(*params), optimizer)
    elif earlier == "plain":
        summed(*params).backward()
    for param in params if earlier == "user's" else ():
        param.grad = to_device(queue, np.ones(2))
    scaler, guard = handle.scalers[0], handle._scaling.guard(optimizer)
    theirs = [None if index in reached else to_device(queue, np.full(2, 7.0)) for index in range(2)]
    loss = summed(*[params[index] for index in reached])
    run = BackwardPass(loss.value, scaler, [optimizer], [guard], Ranks(theirs))
    with delivery.waiting_in(run):
        scaled_node(loss, scaler).backward()
    run.average()
    run.unscale()
    run.end()
    before = 0.0 if earlier == "none" else 1.0
    for index, param in enumerate(params):
        np.testing.assert_array_equal(param.grad.to_host(), np.full(2, before + (1.0 if index in reached else 7.0)))


# ---------------------------------------------------------------------------------------------- a pass that fails


def _fail(*args: Any) -> None:
    raise ZeroDivisionError


class Train(amp.Graph):
    """Steps a parameter by the input, its gradient."""

    def __init__(self, param: Tensor, optimizer: Any) -> None:
        super().__init__()
        self.param = param
        self.add_optimizer(optimizer)
        self.set_grad_scaler(amp.StaticGradScaler(1.0))

    def build(self, x: Any) -> Any:
        loss = ag.sum(ag.mul(ag.tensor(self.param, requires_grad=True), x))
        loss.backward()
        return loss


@pytest.mark.parametrize("fails", ["a handle's verdict", "a graph's verdict", "the check"])
def test_an_inf_that_a_failed_call_has_met_skips_no_later_step(
    queue: cl.CommandQueue, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    param = parameter(queue)
    optimizer = SGD([param], lr=1.0)
    teller: Any = Train(param, optimizer) if fails == "a graph's verdict" else amp.init(loss_scale=1.0)

    def step(value: float) -> None:
        if fails == "a graph's verdict":
            teller(to_device(queue, [value, 1.0]))
            return
        param.grad = to_device(queue, [value, 1.0]) if fails == "the check" else None
        if fails == "a handle's verdict":
            scaled(teller, summed(param), optimizer, bad=None if value == 1.0 else param)
        optimizer.step()

    with monkeypatch.context() as patch:
        patch.setattr(*(DeviceState, "take_found") if fails == "the check" else (LossScale, "update"), _fail)
        with pytest.raises(ZeroDivisionError):
            step(np.inf)
    step(1.0)
    assert teller.last_step.stepped
