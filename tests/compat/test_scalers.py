"""The loss scalers of three faces, PyTorch's, Paddle's and netcl's, as one table of transitions: which calls move the
scale to where, and which are refused; and steps of a network with each."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import Mock

import netcl.amp
import numpy as np
import pyopencl as cl
import pytest
from netcl import optim
from netcl.optim import SGD, AdamW, clip_grad_norm, clip_grad_norm_device

from clamp import amp, session
from clamp.compat import paddle
from clamp.scaling.step_guard import steps_withheld
from tests.conformance.runner import counted_host_reads
from tests.networks import batch, loss_of, mlp, weights_of
from tests.reference import assert_same
from tests.scaling.test_overflow import plant
from tests.scaling.test_shared import parameter, summed

pytestmark = pytest.mark.usefixtures("shut_down")


class Pytorch:
    """PyTorch's names: of arguments, of the state's keys, of getters and setters with the setters' arguments."""

    scaler = amp.GradScaler
    region: Callable[[], Any] = amp.autocast
    arguments: ClassVar = {
        "scale": "init_scale",
        "up": "growth_factor",
        "down": "backoff_factor",
        "every": "growth_interval",
    }
    enabled = "enabled"
    keys = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    tracker = "_growth_tracker"
    setters: ClassVar = {"up": "new_factor", "down": "new_factor", "every": "new_interval"}

    def __init__(self, **settings: Any) -> None:
        self.one = self.scaler(**{self.arguments[name]: value for name, value in settings.items()})

    def scale_of(self) -> float:
        return self.one.get_scale()

    def set_scale(self, scale: float) -> None:
        self.one.update(scale)

    def scale(self, loss: Any) -> Any:
        return self.one.scale(loss)

    def unscale(self, optimizer: Any) -> None:
        self.one.unscale_(optimizer)

    def step(self, optimizer: Any) -> None:
        self.one.step(optimizer)


class Paddle(Pytorch):
    scaler = paddle.GradScaler
    region = amp.auto_cast
    arguments: ClassVar = {
        "scale": "init_loss_scaling", "up": "incr_ratio", "down": "decr_ratio", "every": "incr_every_n_steps",
        "bad": "decr_every_n_nan_or_inf", "dynamic": "use_dynamic_loss_scaling",
    }  # fmt: skip
    enabled = "enable"
    keys = (
        "scale", "incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_count",
        "decr_count", "use_dynamic_loss_scaling",
    )  # fmt: skip
    tracker = "incr_count"
    setters: ClassVar = {name: f"new_{argument}" for name, argument in arguments.items() if name != "dynamic"}

    def scale_of(self) -> float:
        return self.one.get_loss_scaling()

    def set_scale(self, scale: float) -> None:
        self.one.set_init_loss_scaling(scale)


class Netcl(Pytorch):
    scaler = netcl.amp.GradScaler
    region = netcl.amp.autocast

    def scale_of(self) -> float:
        return self.one.scale  # type: ignore[return-value]

    def set_scale(self, scale: float) -> None:
        self.one._scale = scale

    def scale(self, loss: Any) -> Any:
        return self.one.scale_loss(loss)

    def unscale(self, optimizer: Any) -> None:
        self.one.unscale_grads(optimizer.params)

    def step(self, optimizer: Any) -> None:
        self.one.step(optimizer, optimizer.params)


FACES: dict[str, type[Pytorch]] = {"pytorch": Pytorch, "paddle": Paddle, "netcl": Netcl}
OURS = ["pytorch", "paddle"]
TURNS = {".": "bsU", "X": "bxsU"}  # a clean step, and one whose gradient has an inf


class Run:
    """Calls, a letter each, with a scaler, one parameter and its optimizer.

    ``b`` backward from the scaled loss, after zero_grad; ``a`` another one; ``p`` from the loss itself; ``x`` ``m``
    ``n`` an inf, -inf or nan comes into the gradient; ``z`` zero_grad, ``w`` where steps are only looked at; ``u``
    unscale; ``s`` step; ``U`` update; ``l`` its own state is loaded.
    """

    def __init__(self, queue: cl.CommandQueue, face: str, **settings: Any) -> None:
        self.param = parameter(queue)
        self.optimizer = SGD([self.param], lr=2.0**-10)
        self.scaler = FACES[face](**settings)
        self.bad, self.backwards = False, 0

    def calls(self, letters: str) -> list[float]:
        """Makes these calls, in turns; returns the scale after each turn."""
        return [[self._call(letter) for letter in TURNS.get(turn, turn)] and self.scaler.scale_of()
                for turn in letters.split()]  # fmt: skip

    def _call(self, letter: str) -> None:
        if letter in "bpz":
            self.optimizer.zero_grad()
            self.bad, self.backwards = False, 0
        if letter in "bap":
            self.backwards += 1
            loss = summed(self.param)
            (loss if letter == "p" else self.scaler.scale(loss)).backward()
        elif letter in "xmn":
            plant(self.param, {"x": np.inf, "m": -np.inf, "n": np.nan}[letter])
            self.bad = True
        elif letter == "w":
            with steps_withheld():
                self.optimizer.zero_grad()
        elif letter == "u":
            self.scaler.unscale(self.optimizer)
        elif letter == "U":
            self.scaler.one.update()
        elif letter == "l":
            self.scaler.one.load_state_dict(self.scaler.one.state_dict())
        elif letter == "s":
            before = self.param.to_host().copy()
            self.scaler.step(self.optimizer)
            true = 0 if self.bad else self.backwards  # the gradient; it steps where that is finite
            np.testing.assert_array_equal(self.param.to_host(), before - 2.0**-10 * true)


@pytest.fixture(params=["autocast alone", "under a handle"])
def under(request: pytest.FixtureRequest) -> str:
    if request.param == "under a handle":
        amp.init()
    session.ensure_patched()  # as autocast does
    return request.param


#: each face with each of what may be around it; netcl's own is one of clamp's under a handle only
DOORS = [*itertools.product(OURS, ["autocast alone", "under a handle"]), ("netcl", "under a handle")]


@pytest.fixture(params=DOORS, ids=" ".join)
def door(request: pytest.FixtureRequest) -> str:
    """A face, as `under` has it."""
    face, around = request.param
    if around == "under a handle":
        amp.init()
    session.ensure_patched()
    return face


# ---------------------------------------------------------------------------------------------- transitions

#: faces, settings, calls, the scale after each turn
SCALES: dict[str, tuple[str, dict[str, Any], str, list[float]]] = {
    "it halves, and grows": ("pytorch paddle netcl", {"every": 2}, "X X . . .", [2.0**e for e in (15, 14, 14, 15, 15)]),
    "nan": ("pytorch paddle netcl", {}, "bnsU", [2.0**15]),
    "it is update that moves it": ("pytorch paddle", {}, "bns U .", [2.0**16, 2.0**15, 2.0**15]),
    "other factors": ("pytorch paddle netcl", {"up": 4.0, "down": 0.25, "every": 1}, ". X", [2.0**18, 2.0**16]),
    "it stays finite": (
        "pytorch paddle", {"scale": 2.0**126, "every": 2}, ". . . . . .", [2.0**126, *[2.0**127] * 5]
    ),
    "unscaled only": ("pytorch paddle", {}, "bxuU .", [2.0**15] * 2),
    "unscaled, and begun anew": ("pytorch paddle", {}, "bub sU bub usU X", [2.0**16] * 4 + [2.0**15]),
    "unscaled with an inf, and begun anew": ("pytorch paddle", {}, "bxub usU X", [2.0**15, 2.0**15, 2.0**14]),
    "bad batches are left out, update too": (
        "pytorch paddle", {}, "bxu bxu bxu z .", [2.0**16, 2.0**15, 2.0**14, 2.0**13, 2.0**13]
    ),
    "bad batches are left out, and updated": (
        "pytorch paddle", {"every": 2}, "bxuzU bxuzU . .", [2.0**15, 2.0**14, 2.0**14, 2.0**15]
    ),
    "bad batches are left out, and the scale is to stay": (
        "paddle", {"scale": 8.0, "dynamic": False}, "bxu bxu busU", [8.0, 8.0, 8.0]
    ),
    "a bad batch is left out by a step that is only looked at": (
        "pytorch paddle", {}, "bxu w U", [2.0**16, 2.0**16, 2.0**15]
    ),
    "a state is loaded before the update": (
        "pytorch paddle", {"every": 1}, "bslU bulsU .", [2.0**16, 2.0**17, 2.0**18]
    ),
    "inf after unscaling": ("pytorch paddle netcl", {}, "buxsU", [2.0**15]),
    "-inf after unscaling": ("pytorch paddle netcl", {}, "bumsU", [2.0**15]),
    "nan after unscaling": ("pytorch paddle netcl", {}, "bunsU", [2.0**15]),
    "several bad steps in a row": (
        "paddle", {"scale": 1024.0, "bad": 2, "down": 0.25}, "X . X X", [1024.0, 1024.0, 1024.0, 256.0]
    ),
    "not below one": (
        "paddle", {"scale": 2.0, "every": 3, "up": 4.0}, ". . . X X X X X", [2.0, 2.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    ),
    "from below one": (
        "paddle", {"scale": 0.25, "every": 1, "down": 0.75}, ". . . X X", [0.5, 1.0, 2.0, 1.5, 1.125]
    ),
    "one that stays": ("paddle", {"scale": 128.0, "every": 1, "dynamic": False}, "X . X", [128.0] * 3),
    "one that stays, not updated": (
        "paddle", {"scale": 128.0, "every": 1, "dynamic": False}, "bs bxus bus bs", [128.0] * 4
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "face"), [(name, face) for name, row in SCALES.items() for face in row[0].split()])
def test_calls_move_the_scale(queue: cl.CommandQueue, under: str, name: str, face: str) -> None:
    if face == "netcl" and under != "under a handle":
        amp.init()  # netcl's own scaler without
    _, settings, calls, scales = SCALES[name]
    run = Run(queue, face, **settings)
    assert run.calls(calls) == scales
    if face in OURS:
        clean = len(list(itertools.takewhile(lambda turn: turn == ".", reversed(calls.split()))))
        assert run.scaler.one.state_dict()[run.scaler.tracker] == clean % settings.get("every", 2000)


#: faces, calls, the gradient after them: each backward's is 1, and divided once, in place
GRADIENTS: dict[str, tuple[str, str, list[float]]] = {
    "unscaled": ("pytorch paddle netcl", "bu", [1.0, 1.0]),
    "stepped": ("pytorch paddle netcl", "bs", [1.0, 1.0]),
    "unscaled and stepped": ("pytorch paddle netcl", "bus", [1.0, 1.0]),
    "unscaled beside an inf": ("pytorch paddle netcl", "bxu", [1.0, np.inf]),
    "of two backwards": ("pytorch paddle netcl", "bau", [2.0, 2.0]),
    "unscaled too early": ("netcl", "buau", [2.0, 2.0]),
    "unscaled too early, then updated": ("pytorch paddle", "buaUus", [2.0, 2.0]),
}


@pytest.mark.parametrize(("name", "face"), [(name, face) for name, row in GRADIENTS.items() for face in row[0].split()])
def test_a_gradient_is_divided_once(queue: cl.CommandQueue, name: str, face: str) -> None:
    amp.init()
    _, calls, expected = GRADIENTS[name]
    run = Run(queue, face)
    run.calls(calls[0])
    grad = run.param.grad
    assert grad.dtype == "float32"
    run.calls(calls[1:])
    np.testing.assert_array_equal(run.param.grad.to_host(), expected)
    assert run.param.grad is grad or "a" in calls


#: calls of which the last raises, what it says, calls that are right after it
REFUSED: dict[str, tuple[str, str, str]] = {
    "unscale twice": ("buu", r"unscale_\(\) has already been called .* last update\(\)\. Call update\(\) .*", "s Ubu"),
    "unscale after step": ("bsu", r"unscale_\(\) is being called after step\(\)", "U ."),
    "step twice": ("bss", r"step\(\) has already been called since the last update", "U ."),
    "unscale before scale": ("pu", r"^unscale_\(\) was called before any loss was scaled", "bu"),
    "step before scale": ("ps", r"^step\(\) was called before any loss was scaled", "."),
    "unscale before anything": ("u", r"^unscale_\(\) was called before any loss was scaled", "bu"),
    "step before anything": ("s", r"^step\(\) was called before any loss was scaled", "bu"),
    "step after another backward": ("buas", "run every backward before it", "Uus"),
    "step without gradients": ("bzs", "none of its parameters has a gradient", "U!"),
    "update before anything": ("U", "no inf checks were recorded prior to update", "."),
    "update without a step": ("bU", "no inf checks were recorded prior to update", "sU"),
}


@pytest.mark.parametrize("face", OURS)
@pytest.mark.parametrize("name", REFUSED)
def test_calls_out_of_order_are_refused(queue: cl.CommandQueue, under: str, name: str, face: str) -> None:
    calls, message, then = REFUSED[name]
    run = Run(queue, face)
    if len(calls) > 1:
        run.calls(calls[:-1])
    with pytest.raises(RuntimeError, match=message):
        run.calls(calls[-1])
    if then == "U!":  # there is nothing to update by
        with pytest.raises(RuntimeError, match="no inf checks were recorded prior to update"):
            run.calls("U")
    else:
        run.calls(then)


# ---------------------------------------------------------------------------------------------- settings and state


@pytest.mark.parametrize("face", OURS)
def test_settings_can_be_read_and_set(queue: cl.CommandQueue, face: str) -> None:
    """By the arguments' names, too; they hold from the next update on."""
    run = Run(queue, face, every=2000)
    run.calls("b")
    one = run.scaler.one
    assert tuple(one.state_dict().values())[1:4] == (2.0, 0.5, 2000)
    values = {"up": 4.0, "down": 0.25, "every": 1, "bad": 1, "scale": 2.0**10}
    for name, argument in run.scaler.setters.items():
        public = run.scaler.arguments[name]
        getattr(one, f"set_{public}")(**{argument: values[name]})
        assert getattr(one, f"get_{public}")() == values[name]
        getattr(one, f"set_{public}")(values[name])
        with pytest.raises(TypeError):
            getattr(one, f"set_{public}")(other=1.0)
    start = run.scaler.scale_of()
    assert run.calls("bsU X") == [4 * start, start]


#: where the scale begins and an overflow takes it: below the floor of 2^-14 that somebody has set, and Paddle's of 1
FLOORS = {"pytorch": (2.0**-20, 2.0**-21), "paddle": (1.0, 1.0)}
CHANGES = {"up": 4.0, "down": 0.5, "every": 7, "bad": 1, "scale": None, "state": None}


@pytest.mark.parametrize("met", [False, True], ids=["before the first loss", "after it"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("face", OURS)
def test_a_setter_leaves_the_floor_of_the_scale_where_it_was(
    queue: cl.CommandQueue, face: str, change: str, met: bool
) -> None:
    start, expected = FLOORS[face]
    run = Run(queue, face, scale=start)
    if met:
        run.scaler.scale(summed(run.param))
    if change == "state":
        run.scaler.one.load_state_dict(run.scaler.one.state_dict())
    elif change in run.scaler.setters:
        getattr(run.scaler.one, f"set_{run.scaler.arguments[change]}")(CHANGES[change] or start)
    elif change == "scale":
        run.scaler.one.update(start)
    assert run.calls("X") == [expected]


BAD: list[tuple[str, Any]] = [
    *(("scale", value) for value in (0.0, -1.0, np.inf, np.nan, 1e39, True)),
    ("up", 1.0), ("up", "2"), ("down", 1.0), ("down", 0.0), ("every", 0), ("every", True),
]  # fmt: skip


@pytest.mark.parametrize("face", OURS)
@pytest.mark.parametrize(("name", "value"), BAD)
def test_settings_that_make_no_sense_are_refused(name: str, value: Any, face: str) -> None:
    names = FACES[face]
    given = {names.arguments[name]: value}
    with pytest.raises(ValueError, match="must be"):
        names.scaler(**given)
    off = names.scaler(**given, **{names.enabled: False})  # a script that switches AMP off may leave them in
    public = names.arguments[name]
    if name in names.setters:
        assert getattr(off, f"get_{public}")() is value
        with pytest.raises(ValueError, match=r"."):
            getattr(names.scaler(), f"set_{public}")(value)
        getattr(off, f"set_{public}")("anything")
    state = pickle.loads(pickle.dumps(off)).state_dict()
    assert (getattr(off, "get_scale" if face == "pytorch" else "get_loss_scaling")(), state) == (1.0, {})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("face", OURS)
def test_a_copy_goes_on_by_itself_from_the_start_of_an_iteration(
    queue: cl.CommandQueue, face: str, copied: Callable[[Any], Any]
) -> None:
    names, settings = FACES[face], {"scale": 2.0**10, "every": 7}
    run, new = Run(queue, face, **settings), names(**settings).one
    run.calls("b s")
    with pytest.raises(RuntimeError, match="can be copied or pickled at the start of an iteration"):
        copied(run.scaler.one)
    run.scaler.one.update()
    another, saved = copied(run.scaler.one), run.scaler.one.state_dict()
    run.scaler.set_scale(2.0**3)
    assert another.state_dict() == saved == {**new.state_dict(), names.tracker: 1}
    getters = [name for name in dir(new) if name.startswith("get_")]
    assert [getattr(another, name)() for name in getters] == [getattr(new, name)() for name in getters]


@pytest.mark.parametrize("face", OURS)
def test_disabled_it_passes_through(queue: cl.CommandQueue, face: str) -> None:
    names = FACES[face]
    run = Run(queue, face)
    run.scaler.one = off = names.scaler(**{**dict.fromkeys(names.arguments.values(), 3j), names.enabled: False})
    loss = summed(run.param)
    assert off.scale(loss) is loss
    assert run.calls("b u u s s U U .") == [1.0] * 8
    if face == "pytorch":
        off.update(3.0)
        off.update(True)
        assert off.scale("anything") == "anything"
    else:
        before = run.param.to_host()
        off.minimize(run.optimizer, loss)
        assert not np.array_equal(run.param.to_host(), before)
    off.load_state_dict({})
    assert off.state_dict() == {}
    assert not (off.is_enabled if face == "pytorch" else off.is_enable)()


@pytest.mark.parametrize("face", OURS)
def test_a_state_continues_identically(queue: cl.CommandQueue, under: str, face: str) -> None:
    settings = {"scale": 2.0**10, "up": 3.0, "down": 0.25, "every": 2, **({"bad": 2} if face == "paddle" else {})}
    run, other = Run(queue, face, **settings), Run(queue, face)
    run.calls(". X .")
    assert run.scaler.one.state_dict()[run.scaler.tracker] == 1
    run.calls("X")
    state = run.scaler.one.state_dict()
    assert tuple(state) == run.scaler.keys
    assert (state[run.scaler.tracker], state.get("decr_count", 1)) == (0, 1)
    other.scaler.one.load_state_dict(state)
    assert other.scaler.one.state_dict() == state
    for turn in [".", "X", "X", ".", "."]:
        assert other.calls(turn) == run.calls(turn)
        assert other.scaler.one.state_dict() == run.scaler.one.state_dict()


@pytest.mark.parametrize("how", ["init", "set", "load"])
def test_an_overflow_below_one_makes_paddles_scale_one(queue: cl.CommandQueue, how: str) -> None:
    run = Run(queue, "paddle", scale=0.3 if how == "init" else 4.0, every=2, bad=2)
    if how == "set":
        run.calls(".")
        run.scaler.set_scale(0.3)
    elif how == "load":
        run.scaler.one.load_state_dict(Run(queue, "paddle", scale=0.3, every=2, bad=2).scaler.one.state_dict())
        assert run.scaler.one.get_init_loss_scaling() == np.float32(0.3)
    assert run.calls("X . X X X X . .") == [np.float32(0.3)] * 3 + [1.0] * 4 + [2.0]


def test_what_static_steps_met_does_not_move_a_scale_that_is_dynamic_later(queue: cl.CommandQueue) -> None:
    run = Run(queue, "paddle", scale=128.0, dynamic=False)
    assert run.calls("X") == [128.0]
    run.calls("bu")
    with pytest.raises(RuntimeError, match="already been called"):
        run.calls("u")
    run.calls("s")
    run.scaler.one.load_state_dict({**run.scaler.one.state_dict(), "use_dynamic_loss_scaling": True})
    assert run.calls(".") == [128.0]


@pytest.mark.parametrize("face", OURS)
@pytest.mark.parametrize(
    ("name", "value"), [("scale", 0.0), ("scale", True), ("scale", "x"), ("up", 1.0), ("tracker", -1)]
)
def test_a_wrong_state_is_refused_and_changes_nothing(name: str, value: Any, face: str) -> None:
    names = FACES[face]
    scaler = names.scaler()
    state = scaler.state_dict()
    key = {"scale": "scale", "up": names.arguments["up"], "tracker": names.tracker}[name]
    with pytest.raises(ValueError, match=r"."):
        scaler.load_state_dict({**state, "scale": 2.0, key: value})
    with pytest.raises(ValueError, match="missing"):
        scaler.load_state_dict({"scale": 1.0})
    with pytest.raises(RuntimeError, match="state dict is empty"):
        scaler.load_state_dict({})
    assert scaler.state_dict() == state


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("face", OURS)
def test_a_bad_batch_of_either_optimizer_that_is_left_out_lowers_the_scale(
    queue: cl.CommandQueue, under: str, face: str, bad: int
) -> None:
    params, scaler, scales = [parameter(queue), parameter(queue)], FACES[face](), []
    optimizers = [SGD([param], lr=1e-3) for param in params]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for param in params:
            scaler.scale(summed(param)).backward()
        plant(params[bad])
        for optimizer in optimizers:
            scaler.unscale(optimizer)
        scales.append(scaler.scale_of())
    assert scales == [2.0**16, 2.0**15, 2.0**14]


# ---------------------------------------------------------------------------------------------- steps of a network


class Steps:
    """A network, its optimizer, and a face with its scaler."""

    def __init__(self, queue: cl.CommandQueue, face: str, make: Callable[..., Any] = SGD, lr: float = 0.1) -> None:
        self.model, self.data = mlp(queue, 8, 16, 4), batch(queue, 8, 8, 4)
        self.params = self.model.parameters()
        self.optimizer, self.face = make(self.params, lr=lr), FACES[face]()
        self.scaler = self.face.one

    def backward(self) -> list[np.ndarray]:
        """The gradients of the scaled loss."""
        self.optimizer.zero_grad()
        with type(self.face).region():
            loss = loss_of(self.model, self.data)
        self.face.scale(loss).backward()
        return self.gradients()

    def gradients(self) -> list[np.ndarray]:
        return [param.grad.to_host().copy() for param in self.params]

    def finish(self) -> None:
        if type(self.face) is not Netcl:  # whose says whether any is inf, and reads it
            self.face.unscale(self.optimizer)
        self.face.step(self.optimizer)
        self.scaler.update()


def test_a_step_reads_32_bytes_and_compiles_nothing(
    queue: cl.CommandQueue, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a new scale, too."""
    steps = Steps(queue, door)
    steps.backward()
    steps.finish()
    steps.face.set_scale(2.0**12)
    steps.backward()
    monkeypatch.setattr(cl, "Program", Mock(side_effect=AssertionError("compiled a program")))
    with counted_host_reads(monkeypatch) as reads:
        steps.finish()
    assert reads == ["copy of 32 bytes"]


@pytest.mark.parametrize("clip", [clip_grad_norm, clip_grad_norm_device, optim.clip_grad_norm])
def test_gradients_are_clipped_once_they_are_unscaled(queue: cl.CommandQueue, door: str, clip: Any) -> None:
    """By their true norm. What is scaled still is neither clipped nor stepped on."""
    steps = Steps(queue, door, AdamW, lr=1e-3)
    scaled, before = steps.backward(), weights_of(steps.model)
    with pytest.raises(RuntimeError, match=r"still multiplied by the loss scale .*scaler\.unscale_"):
        clip(iter(steps.params), 1.0)
    for options in ({}, {"max_norm": 1.0}):
        with pytest.raises(RuntimeError, match=r"still multiplied by the loss scale .*scaler\.step"):
            steps.optimizer.step(**options)
    assert_same(steps.gradients(), scaled)
    assert_same(weights_of(steps.model), before)
    steps.face.unscale(steps.optimizer)
    true = [grad.astype(np.float64) / 2**16 for grad in scaled]
    norm = np.sqrt(sum((grad**2).sum() for grad in true))
    clip(steps.params, norm / 2)
    for param, grad in zip(steps.params, true, strict=True):
        np.testing.assert_allclose(param.grad.to_host(), grad / 2, rtol=1e-5, atol=1e-8)
    steps.face.step(steps.optimizer)
    assert not np.array_equal(weights_of(steps.model)[0], before[0])
