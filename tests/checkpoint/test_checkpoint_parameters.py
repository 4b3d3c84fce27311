"""Whose state is whose: parameters that leave an optimizer, stand in another order, or in no model at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.nn.layers import Sequential
from netcl.optim import SGD, Adam, AdamW

from clamp import amp
from clamp.bridge import Parameter, Tensor
from tests.checkpoint.test_checkpoints import OPTIMIZERS, same_bits
from tests.networks import batch, loss_of, mlp, scaled_backward, weights_of

# said once a pass of parameters that were taken out of every optimizer, as they are here

SQUARE = (8, 8, 8, 8, 8)  # all weights of one shape, all biases of another


def fused(params: Any) -> AdamW:
    """AdamW that steps small parameters as one, too."""
    optimizer = AdamW(params, lr=1e-2)
    optimizer._fused_min_elems, optimizer._fused_min_params = 0, 2
    return optimizer


EVERY = {**OPTIMIZERS, "fused AdamW": fused}


def train(handle: Any, model: Any, optimizers: Any, steps: range, left_out: bool = False) -> None:
    """Trains, and expects to be told that no optimizer has what is left out, which a handle says once."""
    if left_out:
        with pytest.warns(UserWarning, match=r"that no optimizer steps: layers\.\d\."):
            train(handle, model, optimizers, steps)
        return
    listed = optimizers if isinstance(optimizers, list) else [optimizers]
    for step in steps:
        model_grads_off(model)
        loss = loss_of(model, batch(model.parameters()[0].queue, 4, SQUARE[0], SQUARE[-1], seed=step))
        scaled_backward(handle, loss, listed)
        for optimizer in listed:
            optimizer.step()
            assert handle._scaling.guard(optimizer).last.stepped


def model_grads_off(model: Any) -> None:
    for param in model.parameters():
        param.grad = None
        if (master := getattr(param, "_master", None)) is not None:
            master.grad = None


def moved(before: list[np.ndarray], after: list[np.ndarray]) -> list[bool]:
    return [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]


# ---------------------------------------------------------------------------------------------- fewer, or others


def shuffled(params: list[Tensor]) -> list[Tensor]:
    return [params[index] for index in np.random.default_rng(5).permutation(len(params))]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("how", ["some have left", "and a step was made without them", "in another order"])
def test_a_run_goes_on_bit_by_bit_with_the_parameters_that_are_left(
    queue: cl.CommandQueue, tmp_path: Path, name: str, how: str
) -> None:
    """State follows their names."""
    file, left = tmp_path / "run.npz", slice(None) if how == "in another order" else slice(2, 5)
    with amp.init() as handle:
        model = mlp(queue, *SQUARE)
        optimizer = EVERY[name](model.parameters())
        train(handle, model, optimizer, range(2))
        optimizer.params = optimizer.params[left]
        if how == "and a step was made without them":
            train(handle, model, optimizer, range(2, 3), left_out=True)
        amp.save_checkpoint(file, model, optimizer)
        train(handle, model, optimizer, range(3, 5), left_out=how == "some have left")
        expected = weights_of(model)

        model = mlp(queue, *SQUARE, seed=1)
        given = model.parameters()[left]
        optimizer = EVERY[name](shuffled(given) if how == "in another order" else given)
        amp.load_checkpoint(file, model, optimizer)
        before = weights_of(model)
        train(handle, model, optimizer, range(3, 5))
        assert same_bits(weights_of(model), expected)
        assert moved(before, expected) == [how == "in another order" or index in (2, 3, 4) for index in range(8)]


@pytest.mark.parametrize("name", EVERY)
def test_parameters_that_come_while_others_go_start_with_a_state(queue: cl.CommandQueue, name: str) -> None:
    """As many as before, so that counting does not tell."""
    with amp.init() as handle:
        model = mlp(queue, *SQUARE)
        params = model.parameters()
        optimizer = EVERY[name](params[:4])
        train(handle, model, optimizer, range(2), left_out=True)
        optimizer.params = params[4:]
        before = weights_of(model)
        train(handle, model, optimizer, range(2, 4))
        assert moved(before, weights_of(model)) == [False] * 4 + [True] * 4


#: which parameters have a gradient, step by step
COME_AND_GO = {
    "one less": [range(9), range(1, 9), range(9)],
    "the last one less": [range(9), range(8), range(8)],
    "one more": [range(8), range(9), range(9)],
    "in turns": [[k for k in range(9) if k != left] for left in range(4)],
    "too few": [range(9), range(1), range(9)],
    "too few at first": [range(1), range(9), range(9)],
}


@pytest.mark.filterwarnings("ignore:The 'dest_offset' argument:DeprecationWarning")  # of netcl's fused step
@pytest.mark.parametrize("is_derived", [False, True], ids=["AdamW", "derived"])
@pytest.mark.parametrize("loaded", [None, 1, 2])
@pytest.mark.parametrize("change", ["leaves", "another order", "frozen", *COME_AND_GO])
def test_fused_adamw_keeps_its_moments_when_its_parameters_change(
    queue: cl.CommandQueue, change: str, loaded: int | None, is_derived: bool
) -> None:
    """netcl builds the fused state anew, with zeros, as soon as the list differs, and loads others' moments into it."""

    class Derived(AdamW):  # type: ignore[misc]  # netcl has no types
        """Its steps are netcl's own."""

    draw = np.random.default_rng(0)
    steps = COME_AND_GO.get(change, [range(9)] * 3)
    grads = [draw.standard_normal((9, 5), dtype=np.float32) for _ in steps]
    ends = []
    with amp.init():
        for size in (0, 10**9):  # from which on netcl steps as one
            params = [Parameter.from_host(queue, np.zeros(5, np.float32)) for _ in range(9)]
            optimizer = (Derived if is_derived else AdamW)(params, lr=1e-2)
            optimizer._fused_min_elems = size
            for number, (present, step) in enumerate(zip(steps, grads, strict=True)):
                optimizer.zero_grad()
                for k in present:
                    params[k].grad = Tensor.from_host(queue, step[k])
                if number == 1 and change == "leaves":
                    optimizer.params = params[1:]
                elif number == 1 and change == "frozen":
                    params[0]._frozen = True
                elif number == 1 and change == "another order":
                    optimizer.params = params[::-1]
                if number == loaded:
                    state, optimizer = optimizer.state_dict(), type(optimizer)(optimizer.params, lr=1e-2)
                    optimizer._fused_min_elems = size
                    optimizer.load_state_dict(state)
                optimizer.step()
            ends.append([param.to_host() for param in params])
    np.testing.assert_allclose(*ends, rtol=1e-6, atol=1e-8)


def test_moments_that_nobody_can_place_are_refused(queue: cl.CommandQueue, tmp_path: Path) -> None:
    model = mlp(queue, *SQUARE)
    optimizer = AdamW(model.parameters())
    optimizer.load_state_dict(AdamW(model.parameters()).state_dict())
    optimizer.params = optimizer.params[:2]
    with pytest.raises(TypeError, match="moments of 8 parameters, and has 2 parameters by now"):
        amp.save_checkpoint(tmp_path / "run.npz", model, optimizer)


# ---------------------------------------------------------------------------------------------- another order


@pytest.mark.parametrize("saved", ["O1", "O2"])
@pytest.mark.parametrize("loaded", ["O1", "O2"])
def test_masters_and_state_change_hands_in_another_order(
    queue: cl.CommandQueue, tmp_path: Path, saved: str, loaded: str
) -> None:
    """Of 16-bit parameters into float32 ones and the other way round; the masters' every bit arrives."""
    file = tmp_path / "run.npz"

    def start(level: str, order: Callable[[Any], Any], seed: int) -> tuple[Sequential, Adam]:
        model = mlp(queue, *SQUARE, seed=seed)
        optimizer = Adam(order(model.parameters()), lr=1e-2)
        return amp.decorate(model, optimizer, level=level) if level == "O2" else (model, optimizer)

    def state(model: Any, optimizer: Any) -> list[np.ndarray]:
        masters = {id(getattr(m, "_model_param", m)): m for m in optimizer.params}
        found = []
        for param in model.parameters():
            master = masters[id(param)]
            found.append(master.to_host().copy())
            moments = np.empty(param.size, np.float32)
            cl.enqueue_copy(queue, moments, optimizer._m_buf[id(master)])
            found.append(moments)
        return found

    with amp.init() as handle:
        model, optimizer = start(saved, list, 0)
        train(handle, model, optimizer, range(2))
        amp.save_checkpoint(file, model, optimizer)
        expected = state(model, optimizer)
        model, optimizer = start(loaded, shuffled, 1)
        train(handle, model, optimizer, range(2, 3))
        amp.load_checkpoint(file, model, optimizer)
        assert same_bits(state(model, optimizer), expected)
        train(handle, model, optimizer, range(3, 4))  # and it goes on
    if saved == "O2":  # a float32 model without AMP
        model = mlp(queue, *SQUARE, seed=2)
        optimizer = Adam(shuffled(model.parameters()), lr=1e-2)
        amp.load_checkpoint(file, model, optimizer)
        assert same_bits(state(model, optimizer), expected)


def test_optimizers_that_share_parameters_of_two_models_keep_a_state_each(
    queue: cl.CommandQueue, tmp_path: Path
) -> None:
    """Two models of the same shapes, and three optimizers over parts of both."""
    file = tmp_path / "run.npz"

    def start(seed: int, order: Callable[[Any], Any]) -> tuple[list[Sequential], Sequential, list[Any]]:
        models = [mlp(queue, 8, 8, 8, seed=seed), mlp(queue, 8, 8, 8, seed=seed + 10)]
        first, second = (model.parameters() for model in models)
        optimizers = [Adam(order([*first, *second])), SGD(order([*second]), lr=0.1, momentum=0.9), fused(order(first))]
        return models, Sequential(*models[0].layers, *models[1].layers), optimizers

    with amp.init() as handle:
        models, whole, optimizers = start(0, list)
        train(handle, whole, optimizers, range(2))
        amp.save_checkpoint(file, models, optimizers)
        train(handle, whole, optimizers, range(2, 4))
        expected = weights_of(whole)
        models, whole, optimizers = start(1, shuffled)
        amp.load_checkpoint(file, models, optimizers)
        train(handle, whole, optimizers, range(2, 4))
        assert same_bits(weights_of(whole), expected)

        models, _, optimizers = start(2, list)
        before = [weights for model in models for weights in weights_of(model)]
        with pytest.raises(CheckpointError, match=r"optimizer 0, Adam, had 8 parameters, here it has 4: 4 not in the"):
            amp.load_checkpoint(file, models, [Adam(models[0].parameters()), *optimizers[1:]])
        # The generator's optimizer in place of the discriminator's: shapes and classes are the same.
        pair = [SGD(model.parameters(), momentum=0.9) for model in models]
        amp.save_checkpoint(file, models, pair)
        with pytest.raises(CheckpointError, match=r"layers\.0\.weight.*not in the file: layers\.0\.weight of model 1"):
            amp.load_checkpoint(file, models, pair[::-1])
        assert same_bits([weights for model in models for weights in weights_of(model)], before)


CheckpointError = amp.CheckpointError


def test_a_dict_of_models_tells_them_apart_by_its_keys(queue: cl.CommandQueue, tmp_path: Path) -> None:
    file = tmp_path / "run.npz"
    models = {"g": mlp(queue, 8, 8, seed=0), "d": mlp(queue, 8, 8, seed=1)}
    amp.save_checkpoint(file, models)
    others = {"d": mlp(queue, 8, 8, seed=2), "g": mlp(queue, 8, 8, seed=3)}
    amp.load_checkpoint(file, others)
    for name, model in models.items():
        assert same_bits(weights_of(others[name]), weights_of(model))


def test_parameters_of_no_model_are_saved_and_matched_by_their_order(queue: cl.CommandQueue, tmp_path: Path) -> None:
    """A temperature beside the model, say: its value comes back as well as its momentum."""
    file = tmp_path / "run.npz"

    def start(seed: int) -> tuple[Any, list[Tensor], SGD]:
        rng = np.random.default_rng(seed)
        model = mlp(queue, 8, 8, seed=seed)
        lone = [Parameter.from_host(queue, rng.standard_normal((8, 8)).astype(np.float32)) for _ in range(2)]
        order = [lone[0], *model.parameters(), lone[1]] if seed == 0 else [*model.parameters(), *lone]
        optimizer = SGD(order, lr=0.1, momentum=0.9)
        for number, param in enumerate([*model.parameters(), *lone]):
            param.grad = Tensor.from_host(queue, np.full(param.shape, number + seed, np.float32))
        return model, lone, optimizer

    def velocities(model: Any, lone: list[Tensor], optimizer: SGD) -> list[np.ndarray]:
        by_id = dict(zip(map(id, optimizer.params), optimizer.state_dict()["velocity"], strict=True))
        return [by_id[id(param)] for param in [*model.parameters(), *lone]]

    model, lone, optimizer = start(0)
    optimizer.step()
    amp.save_checkpoint(file, model, optimizer)
    expected = [param.to_host().copy() for param in lone], velocities(model, lone, optimizer)
    model, lone, optimizer = start(1)
    amp.load_checkpoint(file, model, optimizer)
    assert same_bits([param.to_host() for param in lone], expected[0])
    assert same_bits(velocities(model, lone, optimizer), expected[1])
    narrow = SGD([*model.parameters(), lone[0], Parameter.from_host(queue, np.zeros(3, np.float32))])
    with pytest.raises(CheckpointError, match=r"in no model of optimizer 0, SGD, had shape \(8, 8\), here it is \(3,"):
        amp.load_checkpoint(file, model, narrow)


# ---------------------------------------------------------------------------------------------- what cannot follow


class Own:
    """An optimizer that keeps its state in a list, in the order of its parameters."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.seen = list(range(len(params)))

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Listed(SGD):
    """One of netcl's with a list that has an item for each parameter."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params)
        self.rates = [0.1 * index for index in range(len(params))]


class Rated(SGD):
    """One of netcl's with a number for each parameter."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params)
        self.rates = {id(param): 0.1 * index for index, param in enumerate(params)}


def test_numbers_of_ones_own_by_parameter_follow_the_names(queue: cl.CommandQueue, tmp_path: Path) -> None:
    file = tmp_path / "run.npz"
    model = mlp(queue, 8, 8, 8)
    optimizer = Rated(model.parameters())
    optimizer.params = optimizer.params[1:]
    amp.save_checkpoint(file, model, optimizer)
    other = Rated(model.parameters()[:0:-1])
    amp.load_checkpoint(file, model, other)
    assert other.rates == {id(param): 0.1 * index for index, param in enumerate(model.parameters()) if index}
    optimizer.rates[id(optimizer.params[0])] = queue
    with pytest.raises(TypeError, match=r"Rated\.rates is of type CommandQueue"):
        amp.save_checkpoint(file, model, optimizer)


@pytest.mark.parametrize("kind", [Own, Listed])
def test_a_state_that_only_its_optimizer_understands_wants_the_same_order(
    queue: cl.CommandQueue, tmp_path: Path, kind: Any
) -> None:
    file = tmp_path / "run.npz"
    model = mlp(queue, 8, 8, 8)
    amp.save_checkpoint(file, model, kind(model.parameters()))
    amp.load_checkpoint(file, model, kind(model.parameters()))
    before = weights_of(model)
    with pytest.raises(CheckpointError, match=r"another order here.*params\[3, 2, 1, 0\].*in the order that it had"):
        amp.load_checkpoint(file, model, kind(model.parameters()[::-1]))
    assert same_bits(weights_of(model), before)


def test_the_optimizer_inside_a_wrapper_is_what_is_saved(queue: cl.CommandQueue, tmp_path: Path) -> None:
    file = tmp_path / "run.npz"
    with amp.init() as handle:
        model = mlp(queue, *SQUARE)
        optimizer = handle.wrap_optimizer(Adam(model.parameters()))
        amp.save_checkpoint(file, model, optimizer)
        optimizer.t = 7
        amp.load_checkpoint(file, model, optimizer)
        assert optimizer.t == 0


# ---------------------------------------------------------------------------------------------- files of version 1

OLD = Path(__file__).parent / "files"  # written by the clamp that wrote version 1, on PoCL


@pytest.mark.parametrize(("name", "widths"), [("adam", (8, 16, 4)), ("fused-adamw", (8, 8, 8, 8, 4))])
def test_files_of_version_1_load(queue: cl.CommandQueue, name: str, widths: tuple[int, ...]) -> None:
    with amp.init() as handle:
        model = mlp(queue, *widths, seed=1)
        optimizer = (Adam if name == "adam" else AdamW)(model.parameters())
        extra = amp.load_checkpoint(OLD / f"version-1-{name}.npz", model, optimizer)
        assert same_bits(weights_of(model), extra["weights"])
        assert optimizer.t == extra["t"] == 2
        if name == "adam":
            moments = [np.empty(param.size, np.float32) for param in optimizer.params]
            for moment, param in zip(moments, optimizer.params, strict=True):
                cl.enqueue_copy(queue, moment, optimizer._m_buf[id(param)])
        else:
            moments = [first.reshape(-1) for first, _ in optimizer.state_dict()["moments"]]
        assert same_bits(moments, [first.reshape(-1) for first, _ in extra["moments"]])
        assert handle.loss_scale == 2.0**16


def test_masters_of_version_1_load_into_a_float32_model(queue: cl.CommandQueue) -> None:
    """One of them is that of a parameter in no model."""
    file = OLD / "version-1-masters.npz"
    with amp.init():
        for level in ("O1", "O2"):
            model = mlp(queue, 8, 16, 4, seed=1)
            lone = Parameter.from_host(queue, np.zeros(5, np.float32))
            optimizer = Adam([*model.parameters(), lone])
            if level == "O2":
                model, optimizer = amp.decorate(model, optimizer, level="O2")
            extra = amp.load_checkpoint(file, model, optimizer)
            assert same_bits([master.to_host() for master in amp.master_params(optimizer)], extra["masters"])


def test_a_file_of_version_1_says_so_where_its_order_is_in_doubt(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 8, 8, 8, 8, 4, seed=1)
    params = model.parameters()
    params[0], params[2] = params[2], params[0]
    with pytest.warns(UserWarning, match="older clamp, which did not name parameters"):
        amp.load_checkpoint(OLD / "version-1-fused-adamw.npz", model, AdamW(params))
