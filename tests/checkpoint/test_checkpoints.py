"""Saving a run and going on from the file: bit for bit, at other dtypes, and never from a file that is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.batchnorm import BatchNorm2dModule
from netcl.nn.layers import Conv2d, Flatten, Linear, ReLU, Sequential
from netcl.nn.modern import DecoderBlock
from netcl.nn.transformer import PositionalEmbedding
from netcl.optim import SGD, Adam, AdamW, Momentum, RMSProp

from clamp import amp
from clamp.bridge import Parameter, Tensor
from tests.networks import batch, loss_of, mlp, scaled_backward, weights_of

WIDTHS = (8, 16, 4)
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: SGD(params, lr=0.1),
    "SGD with momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Momentum": lambda params: Momentum(params, lr=0.1, nesterov=True),
    "Adam": lambda params: Adam(params, lr=1e-2, weight_decay=0.01),
    "AdamW": lambda params: AdamW(params, lr=1e-2),
    "RMSProp": lambda params: RMSProp(params, lr=1e-2),
    "RMSProp with momentum": lambda params: RMSProp(params, lr=1e-2, momentum=0.9),
}


def train(handle: Any, model: Any, optimizer: Any, steps: range, history: list[float]) -> None:
    """Steps with data of their own each; the loss overflows at step 1, and the learning rate falls."""
    queue = model.parameters()[0].queue
    for step in steps:
        optimizer.lr *= 0.9
        optimizer.zero_grad()
        x, y = batch(queue, 4, WIDTHS[0], WIDTHS[-1], seed=step)
        if step == 1:
            x = Tensor.from_host(queue, np.full(x.shape, np.inf, np.float32))
        loss = loss_of(model, (x, y))
        scaled_backward(handle, loss, optimizer)
        optimizer.step()
        history.append(float(np.asarray(loss.value.to_host(), np.float32).reshape(-1)[0]))


def same_bits(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


# ---------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_resumed_run_goes_on_bit_by_bit(queue: cl.CommandQueue, tmp_path: Path, name: str, dtype: str) -> None:
    file, history, resumed = tmp_path / "run.npz", [], []
    with amp.init(dtype=dtype) as handle:
        model = mlp(queue, *WIDTHS)
        optimizer = OPTIMIZERS[name](model.parameters())
        skipped = range(0, 1) if dtype == "bfloat16" else range(0, 3)  # without loss scaling inf would stay
        train(handle, model, optimizer, skipped, history)
        train(handle, model, optimizer, range(3, 5), history)
        amp.save_checkpoint(file, model, optimizer, history=history, epoch=2)
        scale = amp.state_dict()
        train(handle, model, optimizer, range(5, 8), history)
        expected, expected_scale = weights_of(model), amp.state_dict()
    with amp.init(dtype=dtype) as handle:
        model = mlp(queue, *WIDTHS, seed=9)
        optimizer = OPTIMIZERS[name](model.parameters())
        extra = amp.load_checkpoint(file, model, optimizer)
        assert amp.state_dict() == scale
        assert extra["epoch"] == 2
        resumed += extra["history"]
        train(handle, model, optimizer, range(5, 8), resumed)
        np.testing.assert_array_equal(resumed, history)  # with the nan of the step that was skipped
        assert same_bits(weights_of(model), expected)
        assert amp.state_dict() == expected_scale


@pytest.mark.parametrize("resumed_after_a_step", [False, True])
@pytest.mark.parametrize("with_idle", [False, True])
def test_fused_adamw_goes_on_bit_by_bit(
    queue: cl.CommandQueue, tmp_path: Path, resumed_after_a_step: bool, with_idle: bool
) -> None:
    """netcl fuses from 8 parameters and 16384 elements on; its own load mixes up moments beside an idle parameter."""
    widths = (8, 128, 64, 64, 64, 4)
    file = tmp_path / "run.npz"

    def start(seed: int) -> tuple[Any, Any]:
        model = mlp(queue, *widths, seed=seed)
        idle = [Parameter.from_host(queue, np.ones(3, np.float32))] if with_idle else []
        return model, AdamW([*idle, *model.parameters()], lr=1e-2)

    with amp.init() as handle:
        model, optimizer = start(0)
        train(handle, model, optimizer, range(2, 4), [])
        amp.save_checkpoint(file, model, optimizer)
        train(handle, model, optimizer, range(4, 6), [])
        expected = weights_of(model)
    with amp.init() as handle:
        model, optimizer = start(1)
        if resumed_after_a_step:
            train(handle, model, optimizer, range(1), [])
        amp.load_checkpoint(file, model, optimizer)
        train(handle, model, optimizer, range(4, 6), [])
        assert same_bits(weights_of(model), expected)


@pytest.mark.parametrize("earlier", [False, True], ids=["now", "a file of an earlier version"])
def test_positions_that_attention_has_met_are_no_state(
    queue: cl.CommandQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """A model that has met sequences of other lengths, or none, takes the file."""

    def model_after(*lengths: int) -> Sequential:
        model = Sequential(PositionalEmbedding(16, 8, queue=queue), DecoderBlock(8, 2, queue=queue))
        for length in lengths:
            x = ag.tensor(Tensor.from_host(queue, np.ones((1, length, 8), np.float32)))
            model.layers[1](ag.add(x, model.layers[0](length)))
        return model

    with amp.init():
        saved = model_after(4, 6)
        with monkeypatch.context() as patched:
            if earlier:
                patched.setattr("clamp.bridge.modules._is_private", lambda *_: False)
            amp.save_checkpoint(tmp_path / "run.npz", saved)
        for lengths in ((), (5,)):
            model = model_after(*lengths)
            amp.load_checkpoint(tmp_path / "run.npz", model)
            assert same_bits(weights_of(model), weights_of(saved))


def test_buffers_random_numbers_and_several_models(queue: cl.CommandQueue, tmp_path: Path) -> None:
    """Statistics of a batch norm, numpy's generator that dropout draws from, two models with an optimizer each."""

    def make(seed: int) -> tuple[list[Sequential], list[Any]]:
        np.random.seed(seed)
        front = Sequential(Conv2d(queue, 1, 4, kernel_size=3, pad=1), BatchNorm2dModule(queue, 4), ReLU(), Flatten())
        back = Sequential(Linear(queue, 64, 4))
        return [front, back], [Adam(front.parameters()), Momentum(back.parameters())]

    def go_on(handle: Any, models: list[Sequential], optimizers: list[Any], seeds: range) -> None:
        for seed in seeds:
            images = np.random.default_rng(seed).standard_normal((2, 1, 4, 4)).astype(np.float32)
            for optimizer in optimizers:
                optimizer.zero_grad()
            hidden = ag.dropout(models[0](ag.tensor(Tensor.from_host(queue, images))), p=0.5)
            loss = ag.mean(ag.square(models[1](hidden)))
            scaled_backward(handle, loss, optimizers)
            for optimizer in optimizers:
                optimizer.step()

    file = tmp_path / "run.npz"
    with amp.init() as handle:
        models, optimizers = make(0)
        go_on(handle, models, optimizers, range(2))
        nested = {"a": [1, (2.5, None)], 3: "x"}
        amp.save_checkpoint(file, models, optimizers, numpy=np.random.get_state(), nested=nested)
        go_on(handle, models, optimizers, range(2, 4))
        expected = [tensor.to_host().copy() for model in models for tensor in tensors_of(model)]
        models, optimizers = make(1)
        extra = amp.load_checkpoint(file, models, optimizers)
        assert extra["nested"] == nested
        np.random.set_state(extra["numpy"])
        go_on(handle, models, optimizers, range(2, 4))
        assert same_bits([tensor.to_host() for model in models for tensor in tensors_of(model)], expected)
        assert len(expected) == 8  # weight and bias, gamma and beta, mean and variance; weight and bias


def tensors_of(module: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for layer in module.layers:
        found += [
            value for name, value in vars(layer).items() if isinstance(value, Tensor) and not name.startswith("_")
        ]
    return found


# ---------------------------------------------------------------------------------------------- other dtypes


@pytest.mark.parametrize("saved", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("loaded", ["float16", "bfloat16", "float32"])
def test_a_run_goes_on_in_another_dtype(queue: cl.CommandQueue, tmp_path: Path, saved: str, loaded: str) -> None:
    file = tmp_path / "run.npz"
    with amp.init(dtype=saved) as handle:
        model = mlp(queue, *WIDTHS)
        optimizer = Adam(model.parameters())
        train(handle, model, optimizer, range(2, 4), [])
        amp.save_checkpoint(file, model, optimizer)
        weights, moments = weights_of(model), optimizer.t
    with amp.init(dtype=loaded) as handle:
        model = mlp(queue, *WIDTHS, seed=1)
        optimizer = Adam(model.parameters())
        amp.load_checkpoint(file, model, optimizer)
        assert same_bits(weights_of(model), weights)
        assert optimizer.t == moments
        assert handle.loss_scale == (2.0**16 if loaded == "float16" else 1)
        train(handle, model, optimizer, range(4, 5), [])
        assert handle.last_step.stepped
    amp.load_checkpoint(file, model, optimizer)  # without AMP as well
    assert same_bits(weights_of(model), weights)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masters_are_saved_and_change_hands(queue: cl.CommandQueue, tmp_path: Path, dtype: str) -> None:
    """A run with 16-bit parameters goes on bit by bit; in a float32 model it goes on from the masters."""
    file = tmp_path / "run.npz"
    with amp.init(dtype=dtype) as handle:
        model, optimizer = decorated(queue, dtype, 0)
        train(handle, model, optimizer, range(2, 4), [])
        amp.save_checkpoint(file, model, optimizer)
        masters = [master.to_host().copy() for master in amp.master_params(optimizer)]
        train(handle, model, optimizer, range(4, 6), [])
        expected = [master.to_host().copy() for master in amp.master_params(optimizer)]

        model, optimizer = decorated(queue, dtype, 1)
        amp.load_checkpoint(file, model, optimizer)
        assert same_bits([master.to_host() for master in amp.master_params(optimizer)], masters)
        train(handle, model, optimizer, range(4, 6), [])
        assert same_bits([master.to_host() for master in amp.master_params(optimizer)], expected)

        plain = mlp(queue, *WIDTHS, seed=2)
        other = Adam(plain.parameters())
        amp.load_checkpoint(file, plain, other)
        assert same_bits(weights_of(plain), masters)

        amp.save_checkpoint(file, plain, other)
        model, optimizer = decorated(queue, dtype, 3)
        amp.load_checkpoint(file, model, optimizer)
        assert same_bits([master.to_host() for master in amp.master_params(optimizer)], masters)


def decorated(queue: cl.CommandQueue, dtype: str, seed: int) -> tuple[Any, Any]:
    model = mlp(queue, *WIDTHS, seed=seed)
    optimizer = Adam(model.parameters())
    model, optimizer = amp.decorate(model, optimizer, level="O2", dtype=dtype)
    assert {param.dtype for param in model.parameters()} == {dtype}
    return model, optimizer


# ---------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def run(queue: cl.CommandQueue, tmp_path: Path) -> Any:
    """A checkpoint, and another model and optimizer to load it into: (file, model, optimizer, handle)."""
    with amp.init() as handle:
        model = mlp(queue, *WIDTHS)
        optimizer = Adam(model.parameters())
        train(handle, model, optimizer, range(2, 3), [])
        amp.save_checkpoint(tmp_path / "run.npz", model, optimizer, note="first")
        other = mlp(queue, *WIDTHS, seed=1)
        optimizer = Adam(other.parameters())
        train(handle, other, optimizer, range(3, 4), [])
        yield tmp_path / "run.npz", other, optimizer


def with_arrays(file: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A checkpoint with other arrays."""
    with np.load(file) as arrays:
        saved = dict(arrays)
    change(saved)
    np.savez(file, **saved)
    return file.read_bytes()


def of_a_newer_version(saved: dict[str, Any]) -> None:
    text = saved["clamp.json"].tobytes().replace(b'"version": 2', b'"version": 9')
    saved["clamp.json"] = np.frombuffer(text, np.uint8)


def with_a_flipped_bit(file: Path) -> bytes:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    return bytes(content)


def only(name: str, array: Any) -> Callable[[Path], bytes]:
    return lambda file: with_arrays(file, lambda saved: (saved.clear(), saved.update({name: array})))


#: what a file holds in the place of what was saved, and what is said of it
DAMAGES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "truncated": (lambda file: file.read_bytes()[: file.stat().st_size // 2], "truncated"),
    "empty": (lambda file: b"", "no checkpoint"),
    "foreign": (lambda file: b"PK and some other text", "no checkpoint"),
    "another npz": (only("weight", np.ones(3)), "no checkpoint of clamp"),
    "a picked array": (only("clamp.json", np.array([{"a": 1}], object)), "no checkpoint"),
    "a flipped bit": (with_a_flipped_bit, "damaged|no checkpoint"),
    "a newer version": (lambda file: with_arrays(file, of_a_newer_version), "format version 9"),
    "a missing array": (lambda file: with_arrays(file, lambda saved: saved.pop("2")), "damaged"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_bad_file_is_refused_with_the_state_untouched(run: Any, kind: str) -> None:
    file, model, optimizer = run
    content, message = DAMAGES[kind]
    file.write_bytes(content(file))
    before, t, scale = weights_of(model), optimizer.t, amp.state_dict()
    with pytest.raises(amp.CheckpointError, match=message):
        amp.load_checkpoint(file, model, optimizer)
    assert same_bits(weights_of(model), before)
    assert (optimizer.t, amp.state_dict()) == (t, scale)


def test_what_does_not_fit_is_refused_with_the_state_untouched(run: Any, queue: cl.CommandQueue) -> None:
    file, model, optimizer = run
    wide = mlp(queue, 8, 32, 4)
    for models, optimizers, message in (
        (wide, Adam(wide.parameters()), "has shape"),
        (mlp(queue, 8, 16, 16, 4), optimizer, "not in the file"),
        (model, SGD(model.parameters()), "was Adam, here it is SGD"),
        (model, Adam(model.parameters()[:1]), "had 4 parameters"),
        (model, [], "holds 1 optimizers, 0 were passed"),
        ([model, model], optimizer, "holds 1 models, 2 were passed"),
    ):
        before = weights_of(model)
        with pytest.raises(amp.CheckpointError, match=message):
            amp.load_checkpoint(file, models, optimizers)
        assert same_bits(weights_of(model), before)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        amp.load_checkpoint(file.with_name("other.npz"), model, optimizer)


def test_a_save_that_fails_leaves_the_old_file(run: Any) -> None:
    file, model, optimizer = run
    before = file.read_bytes()
    with pytest.raises(TypeError, match=r"note is of type .*Path.*numbers, texts"):
        amp.save_checkpoint(file, model, optimizer, note=Path("x"))
    assert file.read_bytes() == before
    full = file.parent / "full"
    with pytest.raises(OSError, match="full"):
        amp.save_checkpoint(full / "run.npz", model, optimizer)
    assert sorted(path.name for path in file.parent.iterdir()) == ["run.npz"]


def test_an_optimizer_of_ones_own_needs_a_state_dict(run: Any) -> None:
    """How one that has it is loaded, test_checkpoint_undo tells."""

    class Own:
        def __init__(self, params: list[Tensor]) -> None:
            self.params = params

        def step(self) -> None: ...

    file, model, _ = run
    with pytest.raises(TypeError, match=r"Own is no optimizer of netcl's: give it state_dict"):
        amp.save_checkpoint(file, model, Own(model.parameters()))
