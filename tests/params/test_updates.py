"""netcl's optimizers under AMP: all parameters in one launch, with the bits of netcl's own step and its state."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core import transfer
from netcl.core.device import CPUQueue
from netcl.core.parameter import Parameter
from netcl.optim import SGD, Adam, AdamW, Momentum
from netcl.optim.clip import clip_grad_norm_device

from clamp import amp, bridge
from clamp.bridge import Tensor
from clamp.cli.bench.timing import counted_launches
from clamp.opencl.device import capabilities
from clamp.ops.loss_scale import DeviceState
from clamp.params import masters
from tests.networks import batch, mlp, step
from tests.reference import to_device

Host = npt.NDArray[Any]
Make = Callable[[Sequence[Tensor]], Any]

SIZES = [(1,), (2, 1), (7,), (16,), (127,), (31, 33), (4099,)]
FUSED_SIZES = [*SIZES, (128, 128)]  # enough for AdamW to step them as one

MAKE: dict[str, Make] = {
    "sgd": lambda params: SGD(params, lr=0.037),
    "sgd, decay": lambda params: SGD(params, lr=0.037, weight_decay=0.013),
    "sgd, momentum": lambda params: SGD(params, lr=0.037, momentum=0.91),
    "sgd, momentum and decay": lambda params: SGD(params, lr=0.037, momentum=0.91, weight_decay=0.013),
    "momentum": lambda params: Momentum(params, lr=0.037, momentum=0.91),
    "momentum, decay": lambda params: Momentum(params, lr=0.037, momentum=0.91, weight_decay=0.013),
    "nesterov": lambda params: Momentum(params, lr=1, momentum=0.91, nesterov=True, weight_decay=0.013),
    "adam": lambda params: Adam(params, lr=0.0037),
    "adam, decay": lambda params: Adam(params, lr=0.0037, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.013),
    "adamw": lambda params: AdamW(params, lr=0.0037),
    "adamw, no decay": lambda params: AdamW(params, lr=0.0037, weight_decay=0.0),
}


class Loop:
    """Parameters, an optimizer, and gradients drawn for it step by step: the same ones for the same seed."""

    def __init__(self, queue: cl.CommandQueue, make: Make, shapes: Sequence[tuple[int, ...]] = SIZES) -> None:
        self._random = np.random.default_rng(0)
        self._queue = queue
        values = [self._random.standard_normal(shape).astype(np.float32) for shape in shapes]
        self.params = [Parameter.from_host(queue, value) for value in values]
        self.optimizer = make(self.params)

    @property
    def on_cpu(self) -> bool:
        """Where netcl's own kernels divide as IEEE 754 says. GPUs do if they are asked to, as clamp's kernels ask."""
        return capabilities(self._queue).is_cpu

    def draw(self, *, absent: bool = True) -> bool:
        """Gives gradients of all magnitudes, some of them none, and freezes another parameter; whether all of those
        that will be stepped by are finite."""
        finite = True
        for index, param in enumerate(self.params):
            grad = self._random.standard_normal(param.shape) * 10.0 ** self._random.integers(-12, 6)
            is_absent, is_frozen, is_bad = self._random.random(3) < (0.1, 0.05, 0.01)
            if is_bad:
                grad.flat[grad.size // 2] = (np.inf, np.nan)[index % 2]
            param.requires_grad = not (is_frozen and absent)
            param.grad = None if is_absent and absent else to_device(self._queue, grad)
            finite &= not is_bad or param.grad is None
        self.optimizer.lr *= 0.999
        return finite

    def state(self) -> list[Host]:
        """The parameters' values, and all of the optimizer's state, by its bits."""
        held = [param.to_host() for param in self.params]
        state = [] if not hasattr(self.optimizer, "state_dict") else list(self.optimizer.state_dict().values())
        for name in ("vel", "m", "v"):
            state += [vars(self.optimizer).get(name, {}).get(id(param), np.zeros(0)) for param in self.params]
        for name in () if hasattr(self.optimizer, "state_dict") else ("_m_buf", "_v_buf"):
            for param in self.params:
                if id(param) in vars(self.optimizer).get(name, {}):
                    held.append(np.empty(param.size, np.float32))
                    cl.enqueue_copy(self._queue, held[-1], vars(self.optimizer)[name][id(param)])
        return [*held, *(np.asarray(x, np.float32) for value in state for x in leaves(value))]


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def assert_same_bits(loop: Loop, other: Loop) -> None:
    for one, expected in zip(loop.state(), other.state(), strict=True):
        if loop.on_cpu:
            np.testing.assert_array_equal(one.view(np.uint32), expected.view(np.uint32))
        else:
            np.testing.assert_array_max_ulp(one, expected, 16)


_NETCLS = pytest.mark.filterwarnings("ignore:The 'dest_offset' argument:DeprecationWarning")  # of its fused AdamW


@contextmanager
def steps_counted() -> Iterator[list[str]]:
    """The launches of steps inside, but for the search for inf and nan."""
    with counted_launches() as names:
        yield names
    names[:] = [name for name in names if name != "unscale"]


def compare(
    queue: cl.CommandQueue, make: Make, steps: int, shapes: Sequence[tuple[int, ...]], ahead: int = 0, **options: Any
) -> None:
    """Trains with netcl alone, and under AMP at several levels, one after the other; between them both optimizers are
    so many steps ahead, of which they know by their count alone."""
    alone, loop = Loop(queue, make, shapes), Loop(queue, make, shapes)
    skipped = 0
    for part in range(8):
        with amp.init(level=("O0", "O1", "O2", "OD")[part % 4]) as handle, steps_counted() as names:
            for _ in range(steps // 8):
                finite = loop.draw(**options)
                loop.optimizer.step()
                skipped += not finite
                assert handle.history[-1].stepped == (finite and bool(bridge.stepped(loop.optimizer)))
        assert names.count("update") <= steps // 8
        assert not set(names) & {"sgd_update", "adam_update", "adamw"}
        for _ in range(steps // 8):
            if alone.draw(**options):
                alone.optimizer.step()
        assert_same_bits(loop, alone)
        for optimizer in (loop.optimizer, alone.optimizer):
            if hasattr(optimizer, "t"):
                optimizer.t += ahead
    assert skipped


#: in the sweep, two hundred steps that are made, and those between them, which Adam's corrections count
STEPS = pytest.mark.parametrize(("steps", "ahead"), [(40, 0), pytest.param(200, 115, marks=pytest.mark.slow)])


@pytest.mark.long
@STEPS
@pytest.mark.parametrize("name", MAKE)
def test_steps_have_the_bits_of_netcls(queue: cl.CommandQueue, name: str, steps: int, ahead: int) -> None:
    compare(queue, MAKE[name], steps, SIZES, ahead=ahead)


@_NETCLS
@STEPS
@pytest.mark.parametrize("name", ["adamw", "adamw, no decay"])
def test_adamw_steps_many_parameters_with_the_bits_of_its_own_fused_step(
    queue: cl.CommandQueue, name: str, steps: int, ahead: int
) -> None:
    compare(queue, MAKE[name], steps, FUSED_SIZES, ahead=ahead, absent=False)


@pytest.mark.parametrize("name", MAKE)
def test_ten_parameters_take_one_launch(queue: cl.CommandQueue, name: str) -> None:
    loop = Loop(queue, MAKE[name], [(5, 7)] * 10)
    with amp.init():
        for _ in range(3):
            while not loop.draw(absent=False):
                pass
            with steps_counted() as names:
                loop.optimizer.step()
            assert names == ["update"]


def test_what_a_step_computes_is_found_out_before_the_device_is_waited_for(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a step that is not made then counts for nothing."""
    model = mlp(queue, 8, 6, 4)
    data, optimizer = batch(queue, 5, 8, 4), Adam(model.parameters(), lr=0.01)
    order: list[str] = []
    next_update, read = bridge.next_update, DeviceState.read
    monkeypatch.setattr(bridge, "next_update", lambda *args: order.append("found") or next_update(*args))
    monkeypatch.setattr(DeviceState, "read", lambda self: order.append("waited") or read(self))
    with amp.init() as handle:
        step(handle, model, optimizer, data)
        order.clear()
        step(handle, model, optimizer, data)
        assert order == ["found", "waited"]
        step(handle, model, optimizer, (to_device(queue, np.full((5, 8), np.inf)), data[1]))
        assert order == ["found", "waited"] * 2
        assert [report.stepped for report in handle.history] == [True, True, False]
    assert optimizer.t == 2


# ---------------------------------------------------------------------------------------------- whose step it is


class Halved(Adam):  # type: ignore[misc]
    """An optimizer of the user's, which does something else around netcl's step."""

    def step(self) -> None:
        self.lr /= 2
        super().step()


class Renamed(SGD):  # type: ignore[misc]
    """An optimizer of the user's with netcl's step."""


@pytest.mark.parametrize("make", [Halved, Renamed], ids=lambda make: make.__name__)
def test_optimizers_of_the_users_run_as_themselves(queue: cl.CommandQueue, make: Make) -> None:
    assert "update" not in own(queue, lambda loop: None, make, absent=True)


def test_a_step_that_stands_on_the_optimizer_runs_as_it_is(queue: cl.CommandQueue) -> None:
    loop = Loop(queue, MAKE["adam"])
    called = []
    loop.optimizer.step = lambda: called.append(1)
    with amp.init() as handle:
        loss = ag.sum(ag.tensor(loop.params[0], requires_grad=True))
        with handle.scale_loss(loss, loop.optimizer) as scaled_loss, steps_counted() as names:
            scaled_loss.backward()
        loop.optimizer.step()
    assert called == [1]
    assert "update" not in names


def own(
    queue: cl.CommandQueue, change: Callable[[Loop], object], make: Make = MAKE["momentum"], absent: bool = False
) -> list[str]:
    """Compares, with something changed that clamp's launches do not take; returns the launches under AMP."""
    alone, loop = Loop(queue, make), Loop(queue, make)
    names: list[str] = []
    for each in (alone, loop):
        change(each)
    for _ in range(4):
        if alone.draw(absent=absent):
            alone.optimizer.step()
        with amp.init(), steps_counted() as launched:
            loop.draw(absent=absent)
            loop.optimizer.step()
        names += launched
    assert_same_bits(loop, alone)
    return names


def in_one_memory(loop: Loop) -> None:
    first, second = loop.params[4], loop.params[3]
    second.buffer = first.buffer.get_sub_region(0, second.size * 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda loop: setattr(loop.optimizer, "momentum", np.float64(0.9)),  # which times float32 is float64
        lambda loop: loop.optimizer.params.append(loop.params[3]),
        in_one_memory,
    ],
    ids=["momentum is a number of numpy's", "a parameter is there twice", "parameters are in one memory"],
)
def test_what_no_launch_can_step_at_once_netcl_steps(queue: cl.CommandQueue, change: Callable[[Loop], Any]) -> None:
    assert own(queue, change) == []


def test_a_gradient_that_is_another_parameter_is_read_before_that_is_written(queue: cl.CommandQueue) -> None:
    values = np.arange(1.0, 9.0)
    first, second = (Parameter.from_host(queue, values.astype(np.float32)) for _ in range(2))
    optimizer = SGD([first, second], lr=1.0)
    first.grad, second.grad = to_device(queue, np.ones(8)), first
    with amp.init(), steps_counted() as names:
        optimizer.step()
    assert names == ["sgd_update", "sgd_update"]
    np.testing.assert_array_equal(second.to_host(), values - (values - 1))


def test_the_numpy_backend_steps_by_itself() -> None:
    queue = CPUQueue()
    param = Parameter.from_host(queue, np.ones(3, np.float32))
    param.grad = Tensor.from_host(queue, np.ones(3, np.float32))
    with amp.init():
        Adam([param], lr=0.5).step()
    np.testing.assert_allclose(param.to_host(), 0.5, rtol=1e-6)


@pytest.mark.parametrize("magnitude", [1.0, 1e20])
@pytest.mark.parametrize("sizes", [SIZES, FUSED_SIZES], ids=["one by one", "as one"])
def test_adamw_with_a_norm_clips_and_steps(queue: cl.CommandQueue, sizes: list[Any], magnitude: float) -> None:
    alone, loop = Loop(queue, MAKE["adamw"], sizes), Loop(queue, MAKE["adamw"], sizes)
    with amp.init():
        for index in range(6):
            norm = (1.0, None, 0.0)[index % 3]
            for each in (alone, loop):
                each.draw(absent=False)
                for param in each.params:
                    param.grad = to_device(queue, param.grad.to_host() * magnitude)
            if norm:
                clip_grad_norm_device(alone.params, norm)
            alone.optimizer.step()
            loop.optimizer.step(max_norm=norm)
    assert_same_bits(loop, alone)


@_NETCLS
def test_adamw_with_a_norm_steps_as_netcls_fused_kernel(queue: cl.CommandQueue) -> None:
    alone, loop = Loop(queue, MAKE["adamw"], FUSED_SIZES), Loop(queue, MAKE["adamw"], FUSED_SIZES)
    for each in (alone, loop):
        for param in each.params:
            param.grad = to_device(queue, np.random.default_rng(0).standard_normal(param.shape))
    alone.optimizer.step(max_norm=1.0)
    with amp.init():
        loop.optimizer.step(max_norm=1.0)
    for ours, netcls in zip(loop.state(), alone.state(), strict=True):
        np.testing.assert_allclose(ours, netcls, rtol=1e-4, atol=1e-7)


@_NETCLS
@pytest.mark.parametrize("norm", [None, 1.0])
def test_adamws_own_kernel_that_clips_is_not_compiled(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, norm: float | None
) -> None:
    compiled = []
    build = cl.Program.build

    def noting(program: cl.Program, *args: Any, **kwargs: Any) -> Any:
        built = build(program, *args, **kwargs)
        compiled.extend(str(program.get_info(cl.program_info.KERNEL_NAMES)).split(";"))
        return built

    loop = Loop(queue, MAKE["adamw"], FUSED_SIZES)
    monkeypatch.setattr(cl.Program, "build", noting)
    loop.draw(absent=False)
    with amp.init():
        loop.optimizer.step(*([] if norm is None else [norm]))
    queue.finish()  # PoCL compiles what is launched, while the program is there
    assert "clip_adam_flat" not in compiled
    loop.optimizer.step(max_norm=1.0)
    queue.finish()
    assert "clip_adam_flat" in compiled


# ---------------------------------------------------------------------------------------------- whose state it is


@_NETCLS
@pytest.mark.parametrize("as_one", [False, pytest.param(True, id="as one")])
@pytest.mark.parametrize("name", MAKE)
def test_the_state_is_netcls_in_every_step(queue: cl.CommandQueue, name: str, as_one: bool) -> None:
    """netcl and clamp step by turns, and what is saved in between is loaded into a new optimizer of the parameters;
    of so many that netcl's AdamW has the state of all in one buffer, too."""
    alone, loop = (Loop(queue, MAKE[name], FUSED_SIZES if as_one else SIZES) for _ in range(2))
    for index in range(9):
        if alone.draw(absent=not as_one):
            alone.optimizer.step()
        finite = loop.draw(absent=not as_one)
        if index % 2:
            with amp.init():
                loop.optimizer.step()
        elif finite:
            loop.optimizer.step()
        if index == 4 and hasattr(loop.optimizer, "load_state_dict"):
            for each in (alone, loop):
                state, lr = each.optimizer.state_dict(), each.optimizer.lr
                each.optimizer = MAKE[name](each.params)
                each.optimizer.load_state_dict(state)
                each.optimizer.lr = lr
    assert_same_bits(loop, alone)


@_NETCLS
@pytest.mark.parametrize("absent", [(0,), (1,), (0, 1)], ids=["under AMP", "after", "both"])
def test_adamws_moments_are_their_parameters_where_one_has_no_gradient(
    queue: cl.CommandQueue, absent: Sequence[int]
) -> None:
    """And where another has come to the parameters since. netcl's fused step loads moments for those that it steps."""
    alone, loop = (Loop(queue, MAKE["adamw"], [*FUSED_SIZES, (5,), (3,)]) for _ in range(2))
    alone.optimizer._fused_enabled = False
    for each in (alone, loop):
        new = each.optimizer.params.pop()
        for moments in (each.optimizer.m, each.optimizer.v) if each is loop and 0 not in absent else ():
            del moments[id(new)]  # which netcl's fused step alone can do without
        with amp.init():
            _step_without(each, is_absent=0 in absent)
        each.optimizer.params.append(new)
        _step_without(each, is_absent=1 in absent)
    for one, expected in zip(loop.params, alone.params, strict=True):
        np.testing.assert_array_max_ulp(one.to_host(), expected.to_host(), 0 if loop.on_cpu else 16)


@_NETCLS
@pytest.mark.parametrize("inside", [True, False], ids=["under AMP", "after"])
def test_adamws_fused_step_goes_on_with_what_was_loaded(queue: cl.CommandQueue, inside: bool) -> None:
    alone, loop = (Loop(queue, MAKE["adamw"], FUSED_SIZES) for _ in range(2))
    alone.optimizer._fused_enabled = False
    for each in (alone, loop):
        with amp.init():
            _step_without(each, is_absent=False)
            state = each.optimizer.state_dict()
            _step_without(each, is_absent=False)
            if inside:
                each.optimizer.load_state_dict(state)
        if not inside:
            each.optimizer.load_state_dict(state)
        _step_without(each, is_absent=False)
    assert_same_bits(loop, alone)


@_NETCLS
def test_a_copy_of_adamw_steps_after_amp(queue: cl.CommandQueue) -> None:
    alone, loop = (Loop(queue, MAKE["adamw"], FUSED_SIZES) for _ in range(2))
    alone.optimizer._fused_enabled = False
    for each in (alone, loop):
        with amp.init():
            _step_without(each, is_absent=False)
        original, each.optimizer = each.optimizer, copy.copy(each.optimizer)
        _step_without(each, is_absent=False)
        assert original.params is each.optimizer.params
    assert_same_bits(loop, alone)


@pytest.mark.parametrize("sizes", [SIZES, FUSED_SIZES], ids=["one by one", "as one"])
def test_adamw_loads_no_moments_of_other_sizes(queue: cl.CommandQueue, sizes: list[Any]) -> None:
    loop = Loop(queue, MAKE["adamw"], sizes)
    with amp.init():
        _step_without(loop, is_absent=False)
        before, state = loop.state(), loop.optimizer.state_dict()
        with pytest.raises(ValueError, match=r"moments\[0\] are of shape .* in the same order"):
            loop.optimizer.load_state_dict({**state, "moments": state["moments"][::-1]})
        for one, expected in zip(loop.state(), before, strict=True):
            np.testing.assert_array_equal(one, expected)


def _step_without(loop: Loop, *, is_absent: bool) -> None:
    for _ in range(3):
        while not loop.draw(absent=False):
            pass
        if is_absent:
            loop.params[0].grad = None
        loop.optimizer.step()


def _born_again(queue: cl.CommandQueue, gone: set[int]) -> Parameter:
    """A parameter with an id that was another's, if Python gives one soon: every free place is tried in turn."""
    places = []
    for _ in range(10_000):
        places.append(Parameter.__new__(Parameter))
        if id(places[-1]) in gone:
            break
    vars(places[-1]).update(vars(Parameter.from_host(queue, np.ones(3, np.float32))))
    return places[-1]


@pytest.mark.parametrize("name", ["sgd, momentum", "nesterov", "adam", "adamw"])
def test_a_new_parameter_has_none_of_the_state_of_one_that_is_gone(queue: cl.CommandQueue, name: str) -> None:
    """netcl keeps state by id, and ids come again."""
    first = Parameter.from_host(queue, np.ones(3, np.float32))
    first.grad = to_device(queue, np.ones(3))
    optimizer = MAKE[name]([first])
    gone: set[int] = set()
    came_again = 0
    with amp.init():
        for _ in range(10):
            param, alone = _born_again(queue, gone), Parameter.from_host(queue, np.ones(3, np.float32))
            came_again += id(param) in gone
            gone.add(id(param))
            for new in (param, alone):
                new.grad = to_device(queue, np.full(3, 0.5))
            fresh = MAKE[name]([alone])
            if hasattr(fresh, "t"):
                fresh.t = optimizer.t
            optimizer.params = [first, param]
            optimizer.step()
            fresh.step()
            np.testing.assert_array_equal(param.to_host(), alone.to_host())
            optimizer.params = [first]
            optimizer.step()
            del param, alone, fresh, new
        by_parameter = [x for x in vars(optimizer).values() if isinstance(x, MutableMapping) and id(first) in x]
    assert came_again, "no id came again"
    assert by_parameter
    assert all(len(x) <= 4 for x in by_parameter), "what is gone piles up"


def _left_alone(queue: cl.CommandQueue, name: str) -> tuple[Any, set[int]]:
    """An optimizer of one parameter, which it has stepped, and the ids of others that were in it."""
    last, *others = [Parameter.from_host(queue, np.ones(3, np.float32)) for _ in range(100)]
    optimizer = MAKE[name]([last, *others])
    for optimizer.params in ([last, *others], [last]):
        last.grad = to_device(queue, np.ones(3))
        optimizer.step()
    return optimizer, {*map(id, others)}


@pytest.mark.parametrize("name", ["sgd, momentum", "nesterov", "adam", "adamw"])
def test_a_master_with_the_id_of_one_that_is_gone_has_its_parameters_state(queue: cl.CommandQueue, name: str) -> None:
    with amp.init():
        optimizer, gone = _left_alone(queue, name)
        gc.collect()
        (last,), master = optimizer.params, _born_again(queue, gone)
        assert id(master) in gone, "no id came again"
        before = [x[id(last)] for x in vars(optimizer).values() if isinstance(x, MutableMapping) and id(last) in x]
        bridge.replace_parameter(optimizer, 0, master)
    after = [x[id(master)] for x in vars(optimizer).values() if isinstance(x, MutableMapping) and id(master) in x]
    assert before
    assert len(after) == len(before)
    assert all(map(is_, after, before))


class Equal(Adam):  # type: ignore[misc]
    """An optimizer of the user's that is compared, and so has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.lr == other.lr


def test_an_optimizer_without_a_hash_steps(queue: cl.CommandQueue) -> None:
    loop, alone = Loop(queue, Equal), Loop(queue, Adam)
    with amp.init():
        for each in (loop, alone):
            while not each.draw(absent=False):
                pass
            each.optimizer.step()
    assert_same_bits(loop, alone)


@pytest.mark.parametrize("name", ["sgd, momentum", "nesterov", "adam", "adamw"])
def test_a_parameter_that_comes_back_has_its_state(queue: cl.CommandQueue, name: str) -> None:
    found = []
    for leaves in (False, True):
        params = [Parameter.from_host(queue, np.ones(3, np.float32)) for _ in range(2)]
        optimizer = MAKE[name](params)
        with amp.init():
            for number in range(6):
                params[0].grad = to_device(queue, np.ones(3))
                params[1].grad = None if number in (2, 3) else to_device(queue, np.full(3, 0.5))
                optimizer.params = params[:1] if leaves and number in (2, 3) else params
                optimizer.step()
        found.append([param.to_host() for param in params])
    np.testing.assert_array_equal(*found)


@pytest.fixture
def stepped(queue: cl.CommandQueue) -> Iterator[Loop]:
    """A loop of momentum that has made two steps under AMP, which is on."""
    loop = Loop(queue, MAKE["momentum"])
    with amp.init():
        for _ in range(2):
            loop.draw(absent=False)
            loop.optimizer.step()
        yield loop


def test_momentums_velocities_are_arrays_to_whoever_reads_them(queue: cl.CommandQueue, stepped: Loop) -> None:
    """Whoever reads a copy takes nothing away."""
    vel, expected = stepped.optimizer.vel, Loop(queue, MAKE["momentum"])
    for _ in range(2):
        if expected.draw(absent=False):
            expected.optimizer.step()
    wanted = list(expected.optimizer.vel.values())
    assert all(velocity.any() for velocity in wanted)
    for read in (
        copy.copy(vel), copy.deepcopy(vel), pickle.loads(pickle.dumps(vel)), dict(vel), {**vel}, vel.copy(), vel,
    ):  # fmt: skip
        assert list(read) == [id(param) for param in stepped.params]
        for velocity, want in zip(read.values(), wanted, strict=True):
            np.testing.assert_array_equal(velocity, want)


def test_momentums_velocities_are_saved_by_whoever_saves_them(stepped: Loop, tmp_path: Path) -> None:
    amp.save_checkpoint(tmp_path / "run.npz", [], [], vel=stepped.optimizer.vel)
    loaded = amp.load_checkpoint(tmp_path / "run.npz", [], [])["vel"]
    for saved, velocity in zip(loaded.values(), stepped.optimizer.vel.values(), strict=True):
        np.testing.assert_array_equal(saved, velocity)


def test_momentums_velocities_stay_on_the_device(stepped: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "read", None)
    monkeypatch.setattr(cl, "Buffer", None)
    with steps_counted() as names:
        stepped.optimizer.step()
    assert names == ["update"]


def test_what_a_user_writes_into_momentums_velocities_counts(queue: cl.CommandQueue) -> None:
    param = Parameter.from_host(queue, np.zeros(3, np.float32))
    optimizer = Momentum([param], lr=1.0, momentum=0.5)
    with amp.init():
        for change in (
            lambda: None,
            lambda: optimizer.vel[id(param)].fill(8.0),
            lambda: optimizer.vel.update({id(param): np.full(3, 16.0, np.float32)}),
        ):
            change()
            param.grad = to_device(queue, np.ones(3))
            optimizer.step()
    np.testing.assert_array_equal(optimizer.vel[id(param)], 9.0)
    np.testing.assert_array_equal(param.to_host(), -(1.0 + 5.0 + 9.0))
    del optimizer.vel[id(param)]
    assert len(optimizer.vel) == 0


# ---------------------------------------------------------------------------------------------- 16-bit parameters


@pytest.mark.filterwarnings("ignore:in this step:UserWarning")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("keep_master", [True, False])
@pytest.mark.parametrize("name", ["sgd, momentum", "nesterov", "adam, decay", "adamw"])
def test_parameters_of_16_bits_are_written_with_their_masters(
    queue: cl.CommandQueue, name: str, keep_master: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not capabilities(queue).is_cpu and name.startswith("adam"):
        pytest.skip("a GPU, on which netcl's own kernels divide otherwise")

    def trained(*, together: bool) -> list[Host]:
        model = mlp(queue, 8, 33, 5, 4)
        optimizer = MAKE[name](model.parameters())
        with amp.init(dtype=dtype, level="O2", loss_scale=64.0) as handle:
            masters.narrow(model.parameters(), dtype, [optimizer], keep_master=keep_master)
            for index in range(5):
                step(handle, model, optimizer, batch(queue, 16, 8, 4, seed=index))
                with steps_counted() as names:
                    optimizer.step()
                is_measured = not keep_master and index in (0, 1, 3)  # what rounding loses, in the 2nd, 4th, 8th step
                assert not together or (names == ["update"]) != is_measured
        return [bridge.read_bytes(x) for x in [*model.parameters(), *optimizer.params]]

    found = trained(together=True)
    monkeypatch.setattr(bridge, "has_rule", lambda *_: False)
    for one, expected in zip(found, trained(together=False), strict=True):
        np.testing.assert_array_equal(one, expected)
