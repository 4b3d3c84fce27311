"""Ctrl-C, or an error, in what a scaler, a graph or ``decorate`` does as a whole: it is done, and noted, or can be done
again."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import Mock

import netcl.amp
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core import memory
from netcl.optim import SGD, Adam

from clamp import amp, bridge, session
from clamp.compat import apex, paddle
from clamp.compat import netcl as compat
from clamp.compat.oneflow import Graph
from clamp.params import masters, updates
from clamp.scaling.dynamic_scale import DynamicLossScale
from clamp.scaling.loss_scale import LossScale
from tests.faults import inject
from tests.faults.check import as_python_does
from tests.faults.inject import Events
from tests.networks import LR, Task, mlp, weights_of
from tests.reference import to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")


@contextmanager
def _interrupted_after(owner: Any, name: str) -> Iterator[None]:
    """Inside the ``with``, which it ends, Ctrl-C comes once, when a function of clamp's has run."""
    own, signals = getattr(owner, name), iter([signal.SIGINT])

    def run(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        for number in signals:  # not from a call around it, too: the second would not wait
            signal.raise_signal(number)
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, run)
        with as_python_does(), pytest.raises(KeyboardInterrupt):
            yield


def _no_memory() -> None:
    raise MemoryError


@pytest.fixture
def task(queue: cl.CommandQueue) -> Task:
    return Task(queue)


def _backward(task: Task, scale: Callable[[Any], Any]) -> None:
    task.optimizer.zero_grad()
    scale(task.loss()).backward()


def test_an_update_is_made_once(task: Task) -> None:
    scaler = amp.GradScaler(init_scale=64.0)
    _backward(task, scaler.scale)
    scaler.step(task.optimizer)
    with _interrupted_after(DynamicLossScale, "adjust"):
        scaler.update()
    _backward(task, scaler.scale)
    scaler.step(task.optimizer)
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == 2
    assert task.moved == 2


@pytest.mark.parametrize("make", [amp.GradScaler, paddle.GradScaler], ids=["pytorch", "paddle"])
def test_a_step_is_known_to_be_made(task: Task, make: Callable[[], Any]) -> None:
    scaler = make()
    _backward(task, scaler.scale)
    with _interrupted_after(updates, "make"):
        scaler.step(task.optimizer)
    assert task.moved == 1
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(task.optimizer)


def test_paddles_scale_that_stays_needs_no_update(task: Task) -> None:
    scaler = paddle.GradScaler(use_dynamic_loss_scaling=False)
    for moved in (1, 2):
        _backward(task, scaler.scale)
        with _interrupted_after(updates, "make"):
            scaler.step(task.optimizer)
        assert task.moved == moved


def test_what_paddle_minimizes_is_counted(task: Task) -> None:
    scaler = paddle.GradScaler()
    _backward(task, scaler.scale)
    with _interrupted_after(updates, "make"):
        scaler.minimize(task.optimizer)
    assert task.moved == 1
    assert scaler.state_dict()["incr_count"] == 1


def test_a_step_of_netcls_scaler_is_counted(task: Task) -> None:
    with amp.init():
        scaler = netcl.amp.GradScaler()
        _backward(task, scaler.scale_loss)
        with _interrupted_after(updates, "make"):
            scaler.step(task.optimizer, task.optimizer.params)
        assert task.moved == 1
        assert scaler._growth_tracker == 1


def test_netcls_scaler_divides_once(task: Task) -> None:
    with amp.init():
        scaler = netcl.amp.GradScaler()
        _backward(task, scaler.scale_loss)
        with _interrupted_after(LossScale, "unscale_"):
            scaler.unscale_grads(task.optimizer.params)
        assert not scaler.unscale_grads(task.optimizer.params)
        assert task.gradient == 1


def test_a_scaler_of_netcls_takes_what_is_known_of_it_along(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever Ctrl-C comes, in its end as well: the next one may have its id."""
    monkeypatch.setattr(inject, "_FOLDERS", (*inject._FOLDERS, weakref.__file__))
    monkeypatch.setattr("sys.unraisablehook", lambda raised: None)  # Python tells of what it swallows
    place, where = 0, ""
    with amp.init():
        while where is not None:
            events = Events(("known", place))
            with suppress(KeyboardInterrupt), as_python_does(), events.counted():
                scaler: Any = netcl.amp.GradScaler()
                events.phase = "known"
                compat._scale_of(scaler, task.queue)
                del scaler
            events.phase, where, place = "", events.where, place + 1
            scaler = None
            assert not compat._known, where
    assert place > 10


class Halves(Graph):
    """A model, of which each half has an optimizer."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        super().__init__()
        self.model = mlp(queue, 4, 4, 4)
        for layer in (self.model.layers[0], self.model.layers[2]):
            self.add_optimizer(SGD(layer.parameters(), lr=LR))
        self.set_grad_scaler(amp.GradScaler(init_scale=2.0**8))
        self.x = to_device(queue, np.ones((2, 4), np.float32))

    def build(self, x: Any) -> Any:
        loss = ag.sum(self.model(x))
        loss.backward()
        return loss


def test_all_optimizers_of_a_graph_step(queue: cl.CommandQueue) -> None:
    graph = Halves(queue)
    before = weights_of(graph.model)
    with _interrupted_after(updates, "make"):
        graph(graph.x)
    assert all((was != now).any() for was, now in zip(before, weights_of(graph.model), strict=True))


def test_an_error_in_a_graph_that_is_recorded_is_raised_as_itself(queue: cl.CommandQueue) -> None:
    graph = Halves(queue)
    graph(graph.x)
    before = weights_of(graph.model)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LossScale, "unscale_", Mock(side_effect=MemoryError("no more")))
        with pytest.raises(MemoryError, match="no more"):
            graph(graph.x)
    assert all((was == now).all() for was, now in zip(before, weights_of(graph.model), strict=True))
    graph(graph.x)
    assert all((was != now).any() for was, now in zip(before, weights_of(graph.model), strict=True))


def test_a_parameter_that_there_is_no_memory_for_in_16_bits_is_as_it_was(queue: cl.CommandQueue) -> None:
    param = bridge.empty(queue, (64,), "float32")
    param.write(value := np.arange(64, dtype=np.float32))
    handle = param.pool_handle
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(masters, "cast", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            masters.narrow([param], "float16")
    assert handle is not None
    assert param.pool_handle is handle, "its memory stays its own"
    np.testing.assert_array_equal(param.to_host(), value)


def test_a_saving_leaves_parameters_as_they_were(queue: cl.CommandQueue) -> None:
    """Wherever Ctrl-C comes at its end, and while its traceback holds the frames."""
    model, count, met = amp.decorate(mlp(queue, 4, 4)), 0, 0
    for place in (None, *range(60)):
        events = Events(None if place is None else ("save", count - 1 - place))
        try:
            with as_python_does(), events.counted():
                events.phase = "save"
                model.state_dict()
                events.phase = ""
        except KeyboardInterrupt:
            events.phase = ""
            assert {param.dtype for param in model.parameters()} == {"float16"}, events.where
        count, met = count or events.counts["save"], met + (events.where is not None)
    assert met > 30, "the first passes places that others do not, and a collection may pass some, too"


def test_parameters_follow_their_masters_where_another_fails_to(queue: cl.CommandQueue) -> None:
    model, other = (amp.decorate(mlp(queue, 4, 4, 4, seed=seed)) for seed in (1, 2))
    state, own, fails = other.state_dict(), masters.write_back, iter([True])

    def write_back(*given: Any) -> None:
        if next(fails, False):
            raise MemoryError
        own(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(masters, "write_back", write_back)
        with pytest.raises(MemoryError):
            model.load_state_dict(state)
    behind = [
        param
        for param in model.parameters()
        if (to_numpy(param) != to_numpy(bridge.master_of(param)).astype(np.float16)).any()
    ]
    assert len(behind) == 1


@pytest.mark.parametrize("move", [lambda x, _: bridge.take_storage(x), lambda x, other: bridge.give_storage(other, x)])
def test_memory_has_one_owner_at_a_time(queue: cl.CommandQueue, move: Callable[[Any, Any], Any]) -> None:
    """It is given back once, and not while it is a tensor's, wherever Ctrl-C comes."""
    place, where, back = 0, "", list[Any]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory.PersistentBufferPool, "release", lambda pool, handle: back.append(handle))
        while where is not None:
            tensor, other = (bridge.empty(queue, (size,), "float32") for size in (64, 8))
            events, handle = Events(("move", place), "line"), tensor.pool_handle
            with suppress(KeyboardInterrupt), as_python_does(), events.counted():
                events.phase = "move"
                move(tensor, other)
            events.phase, where, place = "", events.where, place + 1
            assert not (tensor.pool_handle is handle and any(x is handle for x in back)), where
            del tensor
            assert sum(x is handle for x in back) <= 1, where
    assert place > 3


@pytest.mark.parametrize("name", ["cast_calls", "to_16_bit"])
def test_what_initialize_has_begun_it_goes_on_with(task: Task, name: str) -> None:
    """A second call gives what one gives that nothing has ended."""

    class Model:
        def parameters(self) -> list[Any]:
            return [task.weight]

    model = Model()
    task.weight.write(value := np.full(task.weight.shape, 1 + 2**-20, np.float32))
    with pytest.MonkeyPatch.context() as patched:
        own = getattr(apex, name)
        patched.setattr(apex, name, Mock(side_effect=lambda *given, **more: (own(*given, **more), _no_memory())))
        with pytest.raises(MemoryError):
            amp.initialize(model, task.optimizer, opt_level="O2", verbosity=0)
    assert session.active_handle() is None
    amp.initialize(model, task.optimizer, opt_level="O2", verbosity=0)
    assert task.weight.dtype == "float16"
    np.testing.assert_array_equal(task.optimizer.params[0].to_host(), value)


def test_initialize_ends_no_handle_of_another_thread(task: Task) -> None:
    """One that has begun since it looked for one, say."""
    handles, own = [], apex.given_to

    def meanwhile(*given: Any) -> dict[str, Any]:
        handles.append(amp.init(loss_scale=8.0))
        return own(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(apex, "given_to", meanwhile)
        with pytest.raises(RuntimeError, match="a handle is active"):
            amp.initialize(mlp(task.queue, 4, 4), task.optimizer, verbosity=0)
    assert handles[0].is_active()
    task.step(handles[0])
    assert handles[0].last_step.stepped


def test_a_master_has_the_moments_of_its_parameter(task: Task) -> None:
    """Wherever Ctrl-C comes while an optimizer of a float32 parameter meets the master that this has got since."""
    place, where = 0, ""
    while where is not None:
        param = bridge.Parameter.from_host(task.queue, np.ones((4, 3), np.float32))
        optimizer = Adam([param])
        optimizer.m[id(param)][...] = value = 0.5
        masters.narrow([param], "float16")
        events = Events(("pairs", place))
        with suppress(KeyboardInterrupt), as_python_does(), events.counted():
            events.phase = "pairs"
            masters.pairs(optimizer)
        events.phase, where, place = "", events.where, place + 1
        ((master, _),) = masters.pairs(optimizer)
        assert master is not param
        assert (optimizer.m[id(master)] == value).all(), where
    assert place > 20


def test_a_parameter_keeps_its_bits_in_a_master(task: Task) -> None:
    task.weight.write(value := np.full(task.weight.shape, 1 + 2**-20, np.float32))
    with _interrupted_after(bridge, "give_storage"):
        masters.narrow([task.weight], "float16", [task.optimizer])
    masters.narrow([task.weight], "float16", [task.optimizer])
    np.testing.assert_array_equal(task.optimizer.params[0].to_host(), value)
