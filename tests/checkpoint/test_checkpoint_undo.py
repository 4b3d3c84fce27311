"""A load that fails in the middle, or a save, leaves everything as it was."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.optim import Adam, Momentum

from clamp import amp, bridge
from clamp.bridge import Tensor
from clamp.scaling.dynamic_scale import DynamicLossScale
from clamp.scaling.passes import PassScaling
from tests.checkpoint.test_checkpoint_parameters import SQUARE, fused, same_bits, train
from tests.networks import mlp, weights_of


class Failing:
    """An optimizer of a user's whose ``load_state_dict`` changes its state, in place too, and then fails."""

    error: BaseException | None = None

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.inner = Momentum(params, lr=0.1)
        self.velocity = [np.full(param.shape, 1.0) for param in params]
        self.seen = {"steps": 0}

    def step(self) -> None:
        self.inner.step()
        self.seen["steps"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self.velocity, "seen": self.seen, "lr": self.inner.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, loaded in zip(self.velocity, state["velocity"], strict=True):
            mine[...] = loaded
        self.seen.update(state["seen"])
        self.inner.lr = state["lr"]
        if self.error is not None:
            raise self.error


def everything(model: Any, optimizer: Any) -> list[np.ndarray]:
    """All bits that a load could change."""
    params = [*model.parameters(), *optimizer.params]
    found = [bridge.read_bytes(param) for param in params]
    for value in vars(optimizer).values():
        if isinstance(value, dict):
            found += [x for x in value.values() if isinstance(x, np.ndarray)]
    return [array.copy() for array in found]


@pytest.mark.parametrize("error", [RuntimeError("no such key"), KeyboardInterrupt()])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_load_state_dict_that_raises_changes_nothing(
    queue: cl.CommandQueue, tmp_path: Path, error: BaseException, level: str
) -> None:
    file = tmp_path / "run.npz"
    with amp.init(level=level) as handle:
        models = [mlp(queue, *SQUARE, seed=seed) for seed in range(2)]
        optimizers: list[Any] = [Adam(models[0].parameters()), Failing(models[1].parameters())]
        if level == "O2":
            models[0], optimizers[0] = amp.decorate(models[0], optimizers[0], level="O2")
        train(handle, models[0], optimizers[0], range(2))
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**8, "unskipped": 3}})
        optimizers[1].seen["steps"], optimizers[1].inner.lr = 5, 0.5
        optimizers[1].velocity[0][...] = 7
        amp.save_checkpoint(file, models, optimizers)

        train(handle, models[0], optimizers[0], range(2, 4))
        train(handle, models[1], optimizers[1].inner, range(2))
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**12, "unskipped": 1}})
        own = optimizers[1]
        own.seen, own.inner.lr = {"steps": 1}, 0.25
        own.velocity[0][...] = 3
        seen, velocity = own.seen, own.velocity[0]
        before = [everything(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        t, scales, rate = optimizers[0].t, amp.state_dict(), optimizers[0].lr
        own.error = error
        with pytest.raises(type(error)) as raised:
            amp.load_checkpoint(file, models, optimizers)
        assert raised.value is error
        after = [everything(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        for old, new in zip(before, after, strict=True):
            assert same_bits(old, new)
        assert (optimizers[0].t, optimizers[0].lr, amp.state_dict()) == (t, rate, scales)
        assert own.seen is seen
        assert seen == {"steps": 1}
        assert own.inner.lr == 0.25
        assert own.velocity[0] is velocity
        assert (velocity == 3).all()

        own.error = None
        amp.load_checkpoint(file, models, optimizers)
        assert own.seen == {"steps": 5}
        assert own.inner.lr == 0.5
        assert (own.velocity[0] == 7).all()
        assert handle.loss_scale == 2.0**8


def test_state_that_no_attribute_leads_to_is_put_back_by_its_optimizer(queue: cl.CommandQueue, tmp_path: Path) -> None:
    hidden = {"steps": 1}

    class Slotted:
        __slots__ = ("__weakref__", "params")

        def step(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return hidden

        def load_state_dict(self, state: dict[str, Any]) -> None:
            hidden["steps"] = state["steps"]
            if hidden["steps"] == 1:
                raise RuntimeError("one is not enough")

    model, file = mlp(queue, 8, 8), tmp_path / "run.npz"
    optimizer = Slotted()
    optimizer.params = model.parameters()
    amp.save_checkpoint(file, model, optimizer)
    hidden["steps"] = 2
    with pytest.raises(RuntimeError, match="one is not enough"):
        amp.load_checkpoint(file, model, optimizer)
    assert hidden["steps"] == 2


@pytest.mark.parametrize("make", [Adam, fused])
def test_an_interrupt_or_a_failing_device_at_any_write_changes_nothing(
    queue: cl.CommandQueue, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model's parameters, the optimizer's state or the scales; afterwards training goes on bit by bit. Nor is
    the file said to be damaged."""
    file = tmp_path / "run.npz"
    with amp.init() as handle:
        model = mlp(queue, *SQUARE)
        optimizer = make(model.parameters())
        train(handle, model, optimizer, range(1))
        amp.save_checkpoint(file, model, optimizer)
        train(handle, model, optimizer, range(1, 3))
        expected = weights_of(model)
        train(handle, model, optimizer, range(3, 5))
        end = weights_of(model)

        model = mlp(queue, *SQUARE)
        optimizer = make(model.parameters())
        train(handle, model, optimizer, range(3))
        assert same_bits(weights_of(model), expected)
        places = [(bridge, "write_bytes", at) for at in range(len(optimizer.params))]
        places += [(DynamicLossScale, "load_state_dict", 0), (PassScaling, "restore", 0)]
        scales = amp.state_dict()
        errors = [KeyboardInterrupt, cl.RuntimeError, MemoryError, TimeIsUpError, TimeoutError]
        for (owner, name, at), error in itertools.product(places, errors):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted(getattr(owner, name), at, error))
                with pytest.raises(error):
                    amp.load_checkpoint(file, model, optimizer)
            assert same_bits(weights_of(model), expected)
            assert (optimizer.t, amp.state_dict()) == (3, scales)
        train(handle, model, optimizer, range(3, 5))
        assert same_bits(weights_of(model), end)


class TimeIsUpError(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("error", [MemoryError, TimeIsUpError, TimeoutError])
def test_what_has_nothing_to_do_with_the_file_is_not_taken_for_damage(
    queue: cl.CommandQueue, tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = mlp(queue, *SQUARE), tmp_path / "run.npz"
    amp.save_checkpoint(file, model)
    monkeypatch.setattr(np, "frombuffer", interrupted(np.frombuffer, 1, error))
    with pytest.raises(error):
        amp.load_checkpoint(file, model)


def interrupted(call: Any, at: int, error: type[BaseException]) -> Any:
    """The call, which does its work and then raises an error, the ``at``-th time only."""
    calls = iter(range(1_000_000))

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if next(calls) == at:
            raise error
        return result

    return interrupt


@pytest.mark.parametrize(("saved", "now"), [(1, 2), (2, 1)])
def test_other_scales_than_the_handles_change_nothing(
    queue: cl.CommandQueue, tmp_path: Path, saved: int, now: int
) -> None:
    file = tmp_path / "run.npz"
    model = mlp(queue, *SQUARE)
    optimizer = Adam(model.parameters())
    with amp.init() as handle:
        amp.save_checkpoint(file, model, handle.wrap_optimizer(optimizer, num_loss=saved))
    with amp.init() as handle:
        wrapped = handle.wrap_optimizer(optimizer, num_loss=now)
        optimizer.t = 5
        model.parameters()[0].write(np.zeros((8, 8), np.float32))
        has = [", ".join(f"loss_scaler{index}" for index in range(count + 1)) for count in (saved, now)]
        scales = f"the checkpoint has {has[0]}, this handle has {has[1]}: wrap the same optimizers"
        with pytest.raises(ValueError, match=scales):
            amp.load_checkpoint(file, model, wrapped)
        assert optimizer.t == 5
        assert not model.parameters()[0].to_host().any()


def test_what_is_no_model_is_not_called_a_damaged_file(queue: cl.CommandQueue, tmp_path: Path) -> None:
    model, file = mlp(queue, *SQUARE), tmp_path / "run.npz"
    amp.save_checkpoint(file, model)
    with pytest.raises(TypeError, match="not a str"):
        amp.load_checkpoint(file, ["model"])


# ---------------------------------------------------------------------------------------------- saving


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(
    queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = mlp(queue, *SQUARE), tmp_path / "run.npz"
    amp.save_checkpoint(file, model)
    before = file.read_bytes()

    def full(*args: Any, **kwargs: Any) -> None:
        args[0].write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match=r"No space left on device: .*run\.npz") as raised:
        amp.save_checkpoint(file, model)
    assert raised.value.errno == errno.ENOSPC
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.npz"]


def test_what_could_not_be_read_back_is_not_saved(queue: cl.CommandQueue, tmp_path: Path) -> None:
    model, file = mlp(queue, *SQUARE), tmp_path / "run.npz"
    own: list[Any] = []
    own.append(own)
    deep: Any = 1
    for _ in range(40):
        deep = {"x": deep}
    amp.save_checkpoint(file, model, deep=deep)
    assert amp.load_checkpoint(file, model)["deep"] == deep
    before = file.read_bytes()
    with pytest.raises(TypeError, match="contains itself"):
        amp.save_checkpoint(file, model, own=own)
    with pytest.raises(TypeError, match="mask is of type MaskedArray"):
        amp.save_checkpoint(file, model, mask=np.ma.masked_array([1, 2], [True, False]))
    assert file.read_bytes() == before
