"""16-bit parameters without fp32 masters, as users have them: trained, skipped, saved, resumed, recorded, refused.
Moments of 8 bits are skipped, resumed and recorded with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.optim import SGD, Adam, AdamW, Momentum, RMSProp, clip_grad_norm, clip_grad_norm_device

from clamp import amp, bridge
from clamp.bridge import Parameter, Tensor
from clamp.params import masters
from clamp.params.parts import MasterInParts
from tests.networks import batch, loss_of, mlp, step, stepping
from tests.ops.test_optimizer_step import IN_PARTS
from tests.reference import HALF_DTYPES, NUMPY, to_device, to_numpy
from tests.scaling import test_overflow
from tests.scaling.test_overflow import optimizer_state, plant

pytestmark = [
    pytest.mark.usefixtures("shut_down"),
    pytest.mark.filterwarnings("ignore:in this step:UserWarning"),  # tests/params/test_lost_updates.py has it
]

WIDTHS = (8, 128, 128, 8, 4)  # as many and large parameters as AdamW takes together
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Momentum": lambda params: Momentum(params, lr=0.05, nesterov=True),
    "Adam": lambda params: Adam(params, lr=1e-3),
    "AdamW": lambda params: AdamW(params, lr=1e-3),
}
MASTERS = test_overflow.OPTIMIZERS  # netcl's, whose parameters have float32 masters here
EIGHT_BIT: dict[str, Callable[[Any], Any]] = {  # whose parameters are in float32 here
    "Adam8bit": lambda params: amp.optim.Adam8bit(params, lr=1e-2),
    "AdamW8bit": lambda params: amp.optim.AdamW8bit(params, lr=1e-2),
}


def made(
    queue: cl.CommandQueue, name: str, keeps: bool | str | None, dtype: str = "bfloat16", built: str = "before"
) -> Any:
    """A model of 16-bit parameters, and an optimizer built before they became so, or after."""
    model = mlp(queue, *WIDTHS)
    if name in EIGHT_BIT:
        return model, EIGHT_BIT[name](model.parameters())
    if name in MASTERS:
        return amp.decorate(model, MASTERS[name](model.parameters()), dtype=dtype, master_weight=keeps)
    if built == "after":
        amp.decorate(model, dtype=dtype, master_weight=keeps)
        return model, OPTIMIZERS[name](model.parameters())
    return amp.decorate(model, OPTIMIZERS[name](model.parameters()), dtype=dtype, master_weight=keeps)


def bits_of(model: Any, optimizer: Any = None) -> list[bytes]:
    """Parameters, and what is kept besides; of an optimizer with moments of 8 bits these, too."""
    found = [bridge.master_of(param) for param in model.parameters()]
    rests = [master.parts.rest if isinstance(master, MasterInParts) else master for master in found]
    moments = optimizer.state_dict()["moments"] if hasattr(optimizer, bridge.MOMENTS_8BIT) else []
    kept = (bridge.read_bytes(x) for x in (*model.parameters(), *rests) if x is not None)
    return [x.tobytes() for x in (*kept, *moments)]


def level(keeps: bool | str | None) -> str:
    return "O2" if keeps else "O1"


def have_no_memory(optimizer: Any) -> bool:
    """Whether no master of the optimizer has memory of its own."""
    return all(isinstance(x, MasterInParts) and not x.is_whole for x in optimizer.params)


def trained(handle: Any, model: Any, optimizer: Any, steps: range) -> None:
    queue = model.parameters()[0].queue
    for index in steps:
        step(handle, model, optimizer, batch(queue, 16, WIDTHS[0], WIDTHS[-1], seed=index))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("keeps", [True, False, *IN_PARTS])
def test_small_steps_add_up(
    queue: cl.CommandQueue, keeps: bool | str, dtype: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 steps of 2.5e-4 from 1, which bfloat16 loses and float16 doubles; also by a step that a user has wrapped."""
    size, moved, own = 1000, np.float32(1), SGD.step
    if wrapped:
        monkeypatch.setattr(SGD, "step", lambda self: own(self))
    for _ in range(200):
        moved = np.float32(moved - np.float32(2.5e-4))
    weight = Parameter.from_host(queue, np.ones(size, np.float32))
    optimizer = SGD([weight], lr=2.5e-4)
    amp.init(dtype=dtype)
    masters.narrow([weight], dtype, [optimizer], keep_master=keeps)
    grad = to_device(queue, np.ones(size))
    for _ in range(200):
        weight.grad = grad
        optimizer.step()
    assert keeps in (True, False) or have_no_memory(optimizer)
    assert bridge.roundings(optimizer) == (200 if keeps == "stochastic" else 0)
    got, master = to_numpy(weight), amp.master_params(optimizer)[0].to_host()
    unit = float(np.spacing(np.array(0.95, NUMPY[dtype])))
    if keeps is False:
        assert abs(got - 0.95).min() > 0.04
    elif keeps == "stochastic":
        # A rounding has a variance of p (1 - p) of its unit at most, and each of the steps makes one.
        spread = 2 * unit * np.sqrt(200 * 0.25)
        assert abs(got.mean() - 0.95) < 5 * spread / np.sqrt(size)
        assert (abs(got - 0.95) < 5 * spread).all()
    else:
        assert (abs(got - 0.95) <= unit).all()
        assert keeps == "kahan" or (master == moved).all()


def test_equal_parameters_are_rounded_by_other_chances(queue: cl.CommandQueue) -> None:
    weights = [Parameter.from_host(queue, np.ones(1000, np.float32)) for _ in range(2)]
    optimizer = SGD(weights, lr=2.5e-4)
    amp.init(dtype="bfloat16")
    masters.narrow(weights, "bfloat16", [optimizer], keep_master="stochastic")
    for weight in weights:
        weight.grad = to_device(queue, np.ones(1000))
    optimizer.step()
    one, other = map(to_numpy, weights)
    assert set(one) == set(other)
    assert (one != other).any()


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_remainders_are_the_masters(queue: cl.CommandQueue, name: str, dtype: str, built: str) -> None:
    """The same values after the same gradients: bit for bit, in float16 to 2^-40."""
    values = []
    for keeps in (True, "remainder"):
        model, optimizer = made(queue, name, keeps, dtype, built)
        with amp.init(dtype=dtype, level="O2", loss_scale=64.0):
            for index in range(4):
                random = np.random.default_rng(index)
                for param in model.parameters():
                    param.grad = to_device(queue, random.standard_normal(param.shape))
                if index == 1:
                    clip_grad_norm(model.parameters(), 1e-2)
                if index == 2 and name == "AdamW":
                    optimizer.step(max_norm=1e-2)
                else:
                    optimizer.step()
            assert keeps is True or have_no_memory(optimizer)
            values.append([master.to_host() for master in amp.master_params(optimizer)])
    for one, other in zip(*values, strict=True):
        exact = np.ones(one.shape, bool) if dtype == "bfloat16" else np.abs(one) > 1e-4
        np.testing.assert_array_equal(one[exact], other[exact])
        np.testing.assert_allclose(one, other, rtol=0, atol=4 * 2.0**-40)


@pytest.mark.parametrize(
    ("name", "keeps"),
    [*product(["Momentum", "AdamW"], IN_PARTS), *product(MASTERS, [True]), *product(EIGHT_BIT, [None])],
)
def test_a_skipped_step_leaves_everything(queue: cl.CommandQueue, name: str, keeps: bool | str | None) -> None:
    model, optimizer = made(queue, name, keeps, "float16")
    with amp.init(level=level(keeps), loss_scale=64.0) as handle:
        trained(handle, model, optimizer, range(2))
        kept = bits_of(model, optimizer), optimizer_state(optimizer, queue), bridge.roundings(optimizer)
        assert kept[2] == (2 if keeps == "stochastic" else 0)
        data = batch(queue, 16, WIDTHS[0], WIDTHS[-1])
        optimizer.zero_grad()
        with handle.scale_loss(loss_of(model, data), optimizer) as scaled_loss:
            scaled_loss.backward()
            plant(model.parameters()[2])
        optimizer.step()
        assert not handle.last_step.stepped
        assert bits_of(model, optimizer) == kept[0]
        assert bridge.roundings(optimizer) == kept[2]
        optimizer.zero_grad()
        now = optimizer_state(optimizer, queue)
        assert {k: v for k, v in now.items() if k != "params"} == {k: v for k, v in kept[1].items() if k != "params"}


@pytest.mark.parametrize("how", ["checkpoint", "state_dict"])
@pytest.mark.parametrize(("name", "keeps"), [*product(["SGD", "AdamW"], IN_PARTS), *product(EIGHT_BIT, [None])])
@pytest.mark.parametrize("done", [0, 3])
def test_a_resumed_run_goes_on_bit_by_bit(
    queue: cl.CommandQueue, tmp_path: Path, name: str, keeps: str | None, how: str, done: int
) -> None:
    """In an optimizer that has made other steps meanwhile, more or fewer."""
    ended = []
    for resumes in (False, True):
        model, optimizer = made(queue, name, keeps)
        with amp.init(dtype="bfloat16", level=level(keeps)) as handle:
            if not resumes:
                trained(handle, model, optimizer, range(done))
                amp.save_checkpoint(tmp_path / "run.npz", model, optimizer)
                state = model.state_dict(), optimizer.state_dict()
            elif how == "checkpoint":
                trained(handle, model, optimizer, range(8, 10))
                amp.load_checkpoint(tmp_path / "run.npz", model, optimizer)
            else:
                trained(handle, model, optimizer, range(8, 10))
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            trained(handle, model, optimizer, range(done, done + 3))
            assert keeps is None or have_no_memory(optimizer)
            ended.append((bits_of(model, optimizer), bridge.roundings(optimizer), getattr(optimizer, "t", None)))
    assert ended[0] == ended[1]


@pytest.mark.filterwarnings("ignore:Kernel 'netcl_copy_u32'")
@pytest.mark.parametrize("keeps", IN_PARTS)
def test_a_checkpoint_goes_on_with_masters_and_without(queue: cl.CommandQueue, tmp_path: Path, keeps: str) -> None:
    for saved, loaded in ((keeps, True), (True, keeps)):
        model, optimizer = made(queue, "AdamW", saved)
        with amp.init(dtype="bfloat16", level="O2") as handle:
            trained(handle, model, optimizer, range(2))
            amp.save_checkpoint(tmp_path / "run.npz", model, optimizer)
            values = [x.to_host() for x in amp.master_params(optimizer)]
        model, optimizer = made(queue, "AdamW", loaded)
        with amp.init(dtype="bfloat16", level="O2") as handle:
            amp.load_checkpoint(tmp_path / "run.npz", model, optimizer)
            for one, other in zip(amp.master_params(optimizer), values, strict=True):
                np.testing.assert_array_equal(one.to_host(), other)
            trained(handle, model, optimizer, range(2, 3))
            assert loaded is True or have_no_memory(optimizer)


@pytest.mark.parametrize(("name", "keeps"), [*product(["SGD", "Adam"], IN_PARTS), ("AdamW8bit", None)])
def test_replays_are_as_steps_that_run(queue: cl.CommandQueue, name: str, keeps: str | None) -> None:
    """Chance, too, is another one in each replay."""
    ended = []
    for recorded in (False, True):
        model, optimizer = made(queue, name, keeps)
        with amp.init(dtype="bfloat16", level=level(keeps)) as handle:
            train = stepping(handle, model, optimizer)
            train = amp.record(train) if recorded else train
            for index in range(5):
                train(*batch(queue, 16, WIDTHS[0], WIDTHS[-1], seed=index))
            assert not recorded or train.recordings == 1
            assert keeps is None or have_no_memory(optimizer)
            ended.append(bits_of(model, optimizer))
    assert ended[0] == ended[1]


@pytest.mark.parametrize("keeps", IN_PARTS)
def test_reading_a_master_changes_nothing_and_writing_it_counts(queue: cl.CommandQueue, keeps: str) -> None:
    ended = []
    for reads in (False, True):
        model, optimizer = made(queue, "Adam", keeps)
        with amp.init(dtype="bfloat16", level="O2") as handle:
            for index in range(4):
                trained(handle, model, optimizer, range(index, index + 1))
                if reads:
                    [master.to_host() for master in amp.master_params(optimizer)]
                    model.state_dict()
            ended.append(bits_of(model))
            weight, master = model.parameters()[0], amp.master_params(optimizer)[0]
            weight.write(np.full(weight.shape, 2.0, np.float32))
            np.testing.assert_array_equal(master.to_host(), np.full(weight.shape, 2.0))
            master.write(np.full(weight.shape, 4.0, np.float32))
            optimizer.zero_grad()
            weight.grad = to_device(queue, np.zeros(weight.shape))
            optimizer.step()
            assert (abs(to_numpy(weight) - 4) < 0.1).all()
    assert ended[0] == ended[1]


@pytest.mark.filterwarnings("ignore:Kernel 'netcl_copy_u32'")  # as the next
@pytest.mark.filterwarnings("ignore:The 'dest_offset' argument:DeprecationWarning")  # netcl's
@pytest.mark.parametrize("clip", [clip_grad_norm, clip_grad_norm_device])
@pytest.mark.parametrize("keeps", IN_PARTS)
def test_clipping_asks_for_no_masters_memory(queue: cl.CommandQueue, keeps: str, clip: Callable[..., Any]) -> None:
    model, optimizer = made(queue, "SGD", keeps)
    with amp.init(dtype="bfloat16"):
        loss_of(model, batch(queue, 16, WIDTHS[0], WIDTHS[-1])).backward()
        optimizer.step()
        clip(optimizer.params, 0.5)
        assert have_no_memory(optimizer)


@pytest.mark.parametrize("keeps", IN_PARTS)
@pytest.mark.parametrize("name", ["Momentum", "AdamW"])
def test_netcl_goes_on_after_amp(queue: cl.CommandQueue, name: str, keeps: str) -> None:
    """With the masters' values: its own steps know float32 alone."""
    model, optimizer = made(queue, name, keeps)
    with amp.init(dtype="bfloat16", level="O2") as handle:
        trained(handle, model, optimizer, range(2))
        before = [master.to_host() for master in amp.master_params(optimizer)]
    for param in optimizer.params:
        param.grad = to_device(queue, np.ones(param.shape))
    optimizer.step()
    for master, old in zip(optimizer.params, before, strict=True):
        change = np.abs(master.to_host() - old)
        assert change.max() < 1
        assert change.min() > 0


class OwnSGD(SGD):
    """A class derived from netcl's, whose steps clamp does not know."""


@pytest.mark.parametrize("keeps", IN_PARTS)
@pytest.mark.parametrize(
    "make", [lambda params: RMSProp(params), lambda params: OwnSGD(params)], ids=["RMSProp", "own"]
)
def test_other_optimizers_refuse(queue: cl.CommandQueue, make: Any, keeps: str) -> None:
    weight = Parameter.from_host(queue, np.ones((4, 3), np.float32))
    model = mlp(queue, 4, 4)
    message = f"{type(make([weight])).__name__} cannot step 16-bit parameters with master_weight='{keeps}'.*Adam"
    with pytest.raises(TypeError, match=message):
        amp.decorate(model, make(model.parameters()), dtype="bfloat16", master_weight=keeps)
    with pytest.raises(TypeError, match=message):
        amp.initialize(model, make(model.parameters()), opt_level="O2", master_weights=keeps, verbosity=0)
    assert {param.dtype for param in model.parameters()} == {"float32"}
    amp.init(dtype="bfloat16")
    masters.narrow([weight], "bfloat16", keep_master=keeps)
    optimizer = make([weight])
    weight.grad = to_device(queue, np.ones((4, 3)))
    with pytest.raises(TypeError, match=message):
        optimizer.step()
    np.testing.assert_array_equal(to_numpy(weight), np.ones((4, 3)))


@pytest.mark.parametrize("keeps", IN_PARTS)
def test_a_step_that_only_netcl_could_make_raises(queue: cl.CommandQueue, keeps: str) -> None:
    model, optimizer = made(queue, "Momentum", keeps)
    with amp.init(dtype="bfloat16", level="O2") as handle:
        optimizer.lr = np.float64(0.1)
        before = bits_of(model)
        with pytest.raises(TypeError, match=r"pass the optimizer Python's numbers \(float\(lr\)"):
            trained(handle, model, optimizer, range(1))
        assert bits_of(model) == before


@pytest.mark.parametrize("keeps", [*IN_PARTS, "8-bit moments"])
def test_a_tied_weight_that_was_given_twice_is_named(queue: cl.CommandQueue, keeps: str) -> None:
    model = mlp(queue, 4, 4, 4)
    model.layers[2].weight = model.layers[0].weight
    if keeps in IN_PARTS:
        amp.decorate(model, dtype="bfloat16", master_weight=keeps)
    make = Adam if keeps in IN_PARTS else amp.optim.Adam8bit
    message = r"given layers\.0\.weight \(params\[0, 2\]\) more than once.* Give each parameter once: (list.*)"
    with amp.init(dtype="bfloat16") as handle:
        with pytest.raises(TypeError, match=message) as refused:
            step(handle, model, make(model.parameters()), batch(queue, 16, 4, 4))
        found = re.search(message, str(refused.value))
        assert found is not None
        step(handle, model, make(eval(found[1])), batch(queue, 16, 4, 4))
        assert handle.history[-1].stepped


@pytest.mark.parametrize("first", [True, False, *IN_PARTS])
@pytest.mark.parametrize("then", [True, *IN_PARTS])
def test_how_parameters_are_kept_may_change(queue: cl.CommandQueue, first: bool | str, then: bool | str) -> None:
    """The values stay, to what the parameter is rounded to at least, in the other dtype, too."""
    weight = Parameter.from_host(queue, np.linspace(0.5, 2, 12, dtype=np.float32).reshape(4, 3))
    optimizer = Adam([weight], lr=1e-3)
    amp.init(dtype="bfloat16")
    values = [weight.to_host()]
    for keeps, dtype in ((first, "bfloat16"), (then, "bfloat16"), (then, "float16"), (True, "float16")):
        masters.narrow([weight], dtype, [optimizer], keep_master=keeps)
        values.append(amp.master_params(optimizer)[0].to_host())
        assert (abs(values[-1] - values[-2]) <= 2.0**-8 * abs(values[-2])).all()
        if keeps in (True, "remainder"):
            np.testing.assert_array_equal(values[-1], values[-2])
        weight.grad = to_device(queue, np.zeros((4, 3)))
        optimizer.step()
        np.testing.assert_array_equal(amp.master_params(optimizer)[0].to_host(), values[-1])
        optimizer.step()
        assert keeps in (True, False) or have_no_memory(optimizer)  # what it had while it was read is gone
    assert isinstance(weight, Tensor)
