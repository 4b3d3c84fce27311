"""A step is made as a whole or not at all wherever a call into OpenCL fails, and called again it is made once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import product
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.optim import SGD, RMSProp

from clamp import amp, bridge
from clamp.bridge import Parameter, Tensor
from clamp.ops.cast import cast
from clamp.params import masters, updates
from tests.ops.test_optimizer_step import IN_PARTS
from tests.params.test_updates import MAKE, Loop, Make
from tests.reference import to_device

# tests/params/test_lost_updates.py has it
pytestmark = pytest.mark.filterwarnings("ignore:in this step:UserWarning")

STEPPED_BY: dict[str, Make] = {
    **{name: MAKE[name] for name in ("sgd", "sgd, momentum", "nesterov", "adam", "adamw")},
    "rmsprop": lambda params: RMSProp(params, lr=0.01),
    "rmsprop, momentum": lambda params: RMSProp(params, lr=0.01, momentum=0.9, weight_decay=0.1),
}
Shapes = Sequence[tuple[int, ...]]
FEW: Shapes = [(3,), (2, 2), (17,), (5,)]
SHAPES: dict[str, Shapes] = {"8 bits": [(3,), (300,)]}
#: who steps, and how parameters or moments are kept
KEPT = [*product(STEPPED_BY, ["float32", "16 bits"]), *product(["adam"], ["8 bits", *IN_PARTS])]


class Fault(cl.RuntimeError):
    """What an injected failure raises."""


@contextmanager
def failing(place: float, times: float) -> Iterator[list[int]]:
    """Inside, calls into OpenCL fail from number ``place`` on, so many of them; yields how many there have been."""
    seen = [0]

    def guarded(wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if place < seen[0] <= place + times:
                raise Fault("out of resources")
            return wrapped(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (cl, "enqueue_copy"),
            (cl, "enqueue_fill_buffer"),
            (cl.Kernel, "__call__"),
            (cl.Buffer, "__init__"),
        ):
            patch.setattr(owner, name, guarded(getattr(owner, name)) if owner is cl else _method(guarded, owner, name))
        yield seen


def _method(guarded: Callable[..., Any], owner: type, name: str) -> Callable[..., Any]:
    own = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return guarded(own)(self, *args, **kwargs)

    return method


def narrow(loop: Loop) -> None:
    """O2: some parameters in float16, some in bfloat16 without precision between steps, some in float32."""
    masters.narrow(loop.params[::3], "float16", [loop.optimizer])
    masters.narrow(loop.params[1::3], "bfloat16", [loop.optimizer], keep_master=False)


def values_of(loop: Loop) -> list[bytes]:
    return [bridge.read_bytes(x).tobytes() for x in (*loop.params, *loop.optimizer.params)]


def state_of(loop: Loop) -> list[Any]:
    """What the optimizer keeps, wherever, but for memory that no step has been made with."""
    kept = vars(loop.optimizer)
    found: list[Any] = [kept.get("t")]
    for name in ("vel", "square_avg", "mom", "_m_buf", "_v_buf"):
        for param in loop.optimizer.params:
            state = (kept.get(name) or {}).get(id(param))
            if isinstance(state, cl.Buffer):
                held = np.empty(param.size, np.float32)
                cl.enqueue_copy(param.queue, held, state)
                state = held
            found.append(None if state is None else state.tobytes())
    moments = loop.optimizer.state_dict()["moments"] if hasattr(loop.optimizer, bridge.MOMENTS_8BIT) else []
    return [*found, *(x.tobytes() for x in moments), bridge.roundings(loop.optimizer)]


def step_with_fault(loop: Loop, place: float, times: float) -> bool:
    """A step in which calls fail, and which is called again if it raised; whether so many calls were made."""
    before = values_of(loop)
    with failing(place, times) as seen:
        try:
            loop.optimizer.step()
            return seen[0] > place
        except Fault:
            pass
    if times == 1:
        assert values_of(loop) == before
    loop.optimizer.step()
    return True


def pair(queue: cl.CommandQueue, make: Make, shapes: Shapes, kind: str) -> tuple[Loop, Loop]:
    make = amp.optim.Adam8bit if kind == "8 bits" else make
    loops = Loop(queue, make, shapes), Loop(queue, make, shapes)
    for each in loops:
        if kind == "16 bits":
            narrow(each)
        if kind in IN_PARTS:
            masters.narrow(each.params[:2], "bfloat16", [each.optimizer], keep_master=kind)
    return loops


def both_step(alone: Loop, loop: Loop, place: float, times: float) -> bool:
    """A step of each, in one of which calls fail; whether so many calls were made. They end up with the same bits."""
    while not (alone.draw(absent=False) & loop.draw(absent=False)):
        pass
    alone.optimizer.step()
    reached = step_with_fault(loop, place, times)
    assert values_of(loop) == values_of(alone)
    assert state_of(loop) == state_of(alone)
    return reached


@pytest.mark.filterwarnings("ignore:The 'dest_offset' argument:DeprecationWarning")  # netcl's
@pytest.mark.parametrize("times", [1, 1000], ids=["once", "for good"])
@pytest.mark.parametrize(("name", "kind"), KEPT)
def test_a_first_step_is_whole_wherever_a_call_fails(
    queue: cl.CommandQueue, name: str, kind: str, times: float
) -> None:
    """Which makes the optimizer's state; so is the next, in which a call fails as well, and one in which none does."""
    place, reached = 0, True
    with amp.init(level="O1"):
        while reached:
            alone, loop = pair(queue, STEPPED_BY[name], SHAPES.get(kind, FEW), kind)
            reached = both_step(alone, loop, place, times) | both_step(alone, loop, place, times)
            assert not both_step(alone, loop, np.inf, 0)
            place += 1
    assert place > 2


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "for good"])
@pytest.mark.parametrize("kind", ["float32", "16 bits"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.long
def test_a_step_of_several_launches_is_whole(queue: cl.CommandQueue, name: str, kind: str, times: float) -> None:
    alone, loop = pair(queue, STEPPED_BY[name], [(2,)] * 120, kind)
    place = 0
    with amp.init(level="O1"):
        both_step(alone, loop, np.inf, 0)
        while both_step(alone, loop, place, times):
            place += 1
    assert place > 2


@pytest.mark.parametrize("step", [("adam", [(2,)] * 120, 1), *((name, FEW, 0) for name in STEPPED_BY)], ids=str)
def test_a_step_that_has_begun_is_made_before_the_next_and_one_that_has_not_is_gone(
    queue: cl.CommandQueue, step: tuple[str, Shapes, int]
) -> None:
    """The gradients of the next one are others."""
    name, shapes, place = step
    alone, loop = (Loop(queue, STEPPED_BY[name], shapes) for _ in range(2))
    with amp.init(level="O1", check_finite=False):
        for fails in (False, True, False):
            while not (alone.draw(absent=False) & loop.draw(absent=False)):
                pass
            if place or not fails:
                alone.optimizer.step()
            with failing(place, 1000 * fails) as seen, pytest.raises(Fault) if fails else nullcontext():
                loop.optimizer.step()
            assert seen[0] > place
    assert values_of(loop) == values_of(alone)
    assert state_of(loop) == state_of(alone)


class Own:
    """An optimizer of the user's."""

    def __init__(self, params: Sequence[Any]) -> None:
        self.params, self.steps = list(params), 0

    def step(self) -> None:
        self.steps += 1
        for param in self.params:
            param.write(param.to_host() - param.grad.to_host())


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "for good"])
def test_a_users_step_is_not_made_again_where_rewriting_parameters_fails(queue: cl.CommandQueue, times: float) -> None:
    """Which has no part in it: its masters hold what it has made of them."""
    optimizer = Own(params := Loop(queue, MAKE["sgd"], FEW).params)
    masters.narrow(params, "float16", [optimizer])
    for param in params:
        param.grad = Tensor.from_host(queue, np.full(param.shape, 0.5, np.float32))
    before = [master.to_host() for master in optimizer.params]
    with amp.init(check_finite=False) as handle:
        handle._scaling.guard(optimizer)
        with failing(np.inf, 0) as seen:
            optimizer.step()
        for master, value in zip(optimizer.params, before, strict=True):
            master.write(value)
        with failing(seen[0] - 2, times), suppress(Fault):
            optimizer.step()
        if times > 1:
            optimizer.step()
    assert optimizer.steps == 2
    for master, model, value in zip(optimizer.params, params, before, strict=True):
        np.testing.assert_array_equal(master.to_host(), value - np.float32(0.5))
        np.testing.assert_array_equal(model.to_host(), (value - np.float32(0.5)).astype(np.float16))


# ---------------------------------------------------------------------------------------------- what a step reads


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["float32", "16 bits"])
@pytest.mark.parametrize("name", [*STEPPED_BY, "own"])
def test_a_gradient_of_16_bits_is_read_as_what_it_is(queue: cl.CommandQueue, name: str, kind: str, dtype: str) -> None:
    """Of elements beyond its end nothing is read: it is half as long as a float32 one."""
    make: Make = {**STEPPED_BY, "own": Own}[name]
    alone, loop = pair(queue, make, FEW, kind)
    with amp.init() as handle:
        for step in range(3):
            for each in (alone, loop):
                handle._scaling.guard(each.optimizer)
                random = np.random.default_rng(step)
                for index, param in enumerate((each.params, each.optimizer.params)[step % 2]):
                    grad = cast(Tensor.from_host(queue, random.standard_normal(param.shape).astype(np.float32)), dtype)
                    param.grad = grad if each is loop and index != 1 else cast(grad, "float32")
                each.optimizer.step()
            assert values_of(loop) == values_of(alone)


@pytest.mark.parametrize("name", STEPPED_BY)
@pytest.mark.parametrize(
    ("grad", "error", "says"),
    [
        (np.zeros(3, np.int32), TypeError, "is int32"),
        (np.zeros(3, np.float64), TypeError, "is float64"),
        (np.zeros(2, np.float32), ValueError, "another number of elements"),
        (None, TypeError, "a gradient is of type list"),
    ],
)
def test_a_gradient_that_no_step_can_read_is_refused_before_any_parameter_moves(
    queue: cl.CommandQueue, name: str, grad: Any, error: type[Exception], says: str
) -> None:
    loop = Loop(queue, STEPPED_BY[name], [(3,), (3,)])
    before = values_of(loop)
    loop.params[0].grad = Tensor.from_host(queue, np.ones(3, np.float32))
    loop.params[1].grad = [0.0] * 3 if grad is None else Tensor.from_host(queue, grad, dtype=str(grad.dtype))
    with amp.init(check_finite=False):
        with pytest.raises(error, match=says):
            loop.optimizer.step()
        assert values_of(loop) == before
        assert vars(loop.optimizer).get("t") in (None, 0)
        loop.params[1].grad = None
        loop.optimizer.step()
    assert values_of(loop)[0] != before[0]


def test_a_gradient_that_numpy_would_broadcast_is_refused_before_any_parameter_moves(queue: cl.CommandQueue) -> None:
    loop = Loop(queue, STEPPED_BY["rmsprop"], [(4,), (4,)])
    before = values_of(loop)
    for param, shape in zip(loop.params, [(4,), (2, 2)], strict=True):
        param.grad = Tensor.from_host(queue, np.ones(shape, np.float32))
    with amp.init(), pytest.raises(ValueError, match="in another shape"):
        loop.optimizer.step()
    assert values_of(loop) == before


def test_what_a_gone_optimizer_left_is_nobody_elses(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers are known by their addresses, which memory that comes again has again."""
    param = Parameter.from_host(queue, np.ones(2, np.float32))
    optimizer, gone = SGD([param], lr=1.0), SGD([param], lr=1.0)
    left = updates._Unfinished(weakref.ref(gone), [], [lambda: pytest.fail("another's launches are made")])
    del gone
    assert left.optimizer() is None
    monkeypatch.setitem(updates._unfinished, id(optimizer), left)
    with amp.init():
        param.grad = to_device(queue, np.ones(2))
        optimizer.step()
    np.testing.assert_array_equal(param.to_host(), 0.0)
