"""Attention, rotary positions and masks under autograd against float64, and the modules of netcl made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Module, MultiheadAttention, TransformerEncoderLayer
from netcl.nn.modern import DecoderBlock, KVCache, RotaryAttention
from netcl.nn.transformer import CausalSelfAttention, TransformerBlock

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import Casting, NotOwned
from clamp.casting.policies import Match, Promote
from clamp.casting.registry import OWNED
from clamp.functions import arithmetic, attention
from tests.functions.operands import half
from tests.reference import STORAGE_DTYPES, assert_close, integers, to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")

EPS = 2.0**-24
SHAPE = (2, 3, 5, 8)


def leaf(queue: cl.CommandQueue, seed: int, dtype: str = "float32", requires_grad: bool = True) -> Node:
    tensor = to_device(queue, np.random.default_rng(seed).standard_normal(SHAPE), dtype)
    tensor.requires_grad = requires_grad
    return Node(value=tensor)


def swapped(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, causal: bool, scale: float) -> list[Any]:
    """The result and the gradients of q, k and v."""
    scores = q @ swapped(k) * scale
    if causal:
        scores = np.where(np.tri(q.shape[2], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    slopes = g @ swapped(v)
    ds = weights * (slopes - (weights * slopes).sum(-1, keepdims=True)) * scale
    return [weights @ v, ds @ k, swapped(ds) @ q, swapped(weights) @ g]


# ------------------------------------------------------------------------------------------------ attention


@pytest.mark.parametrize(("causal", "scale"), [(True, None), (False, 0.7)])
@pytest.mark.parametrize(
    ("casting", "dtypes", "result", "read"),
    [
        (half(), ("float32", "float32", "float32"), "float16", "float16"),
        (half("bfloat16"), ("bfloat16", "float32", "float16"), "bfloat16", "bfloat16"),
        (Promote(), ("float16", "float32", "float16"), "float32", None),
        (Match(), ("float32", "float32", "float32"), "float32", None),
    ],
)
def test_attention(
    queue: cl.CommandQueue, casting: Casting, dtypes: tuple[str, ...], result: str, read: str | None, causal: bool,
    scale: float | None,
) -> None:  # fmt: skip
    leaves = [leaf(queue, seed, dtype) for seed, dtype in enumerate(dtypes)]
    tape = Tape()
    out = OWNED["netcl.autograd.flash_attention"](casting, *leaves, causal=causal, scale=scale, tape=tape)
    g = to_device(queue, np.random.default_rng(9).standard_normal(SHAPE), result)
    tape.backward(out, g)
    values = [to_numpy(x.value if read is None else to_device(queue, to_numpy(x.value), read)) for x in leaves]
    want, *grads = reference(*values, to_numpy(g), causal, 8**-0.5 if scale is None else scale)  # type: ignore[call-arg]
    assert out.value.dtype == result
    assert_close(out.value, want, slack=256 * EPS)
    for x, grad, dtype in zip(leaves, grads, dtypes, strict=True):
        assert x.grad.dtype == dtype
        assert_close(x.grad, grad, slack=1024 * EPS)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**6])
def test_scaled_gradients(queue: cl.CommandQueue, scale: float) -> None:
    results = []
    for factor in (1.0, scale):
        leaves = [leaf(queue, seed) for seed in range(3)]
        tape = Tape()
        out = OWNED["netcl.autograd.flash_attention"](half("bfloat16"), *leaves, tape=tape)
        tape.backward(out, to_device(queue, factor * np.random.default_rng(3).standard_normal(SHAPE), "bfloat16"))
        results.append([to_numpy(x.grad) / factor for x in leaves])
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_no_gradient_for_inputs_that_need_none(queue: cl.CommandQueue) -> None:
    q, k, v = (leaf(queue, seed, "float16", requires_grad=seed == 1) for seed in range(3))
    tape = Tape()
    out = OWNED["netcl.autograd.flash_attention"](half(), q, k, v, tape=tape)
    tape.backward(out, to_device(queue, np.ones(SHAPE), "float16"))
    assert (q.grad, v.grad) == (None, None)
    assert k.grad is not None
    inputs = [leaf(queue, seed, requires_grad=False) for seed in range(3)]
    assert OWNED["netcl.autograd.flash_attention"](half(), *inputs).grad_fn is None
    assert attention.rope(Match(), inputs[0], integers(queue, range(5))).grad_fn is None
    assert arithmetic.masked_fill(Promote(), inputs[0], to_device(queue, np.ones(8))).grad_fn is None


def test_bare_tensors(queue: cl.CommandQueue) -> None:
    q, k, v = (leaf(queue, seed, "float16").value for seed in range(3))
    assert isinstance(OWNED["netcl.autograd.flash_attention"](half(), q, k, v), Tensor)
    out, lse = attention.flash_attention(half(), q, k, v, causal=False, scale=0.5)
    g = to_device(queue, np.random.default_rng(5).standard_normal(SHAPE), "float16")
    grads = attention.tensor_flash_attention_backward(half(), q, k, v, out, lse, g, causal=False, scale=0.5)
    want = reference(*(to_numpy(x) for x in (q, k, v, g)), False, 0.5)  # type: ignore[call-arg]
    for got, expected in zip((out, *grads), want, strict=True):
        assert got.dtype == "float16"
        assert_close(got, expected, slack=1024 * EPS)
    # The last query of a causal attention is what decoding computes.
    out, _ = attention.flash_attention(Match(), q, k, v)
    last = to_device(queue, to_numpy(q)[:, :, -1:], "float16")
    assert_close(attention.flash_attention_decode(half(), last, k, v, 5), to_numpy(out)[:, :, -1:], ulps=1)


def test_what_attention_does_not_take(queue: cl.CommandQueue) -> None:
    q = leaf(queue, 0)
    with pytest.raises(ValueError, match="one shape"):
        OWNED["netcl.autograd.flash_attention"](half(), q, q, to_device(queue, np.ones((2, 3, 4, 8))))
    with pytest.raises(NotOwned):
        OWNED["netcl.autograd.flash_attention"](half(), q, q, Tensor.from_host(queue, np.ones(SHAPE), dtype="float64"))
    with pytest.raises(NotOwned):
        OWNED["netcl.autograd.flash_attention"](half(), q, q, integers(queue, np.ones(SHAPE)))


# ------------------------------------------------------------------------------------------ rotary positions


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_rope(queue: cl.CommandQueue, dtype: str) -> None:
    x = leaf(queue, 0, dtype)
    places = np.array([0, 3, 17, 100_000, 2])
    theta = (500.0 ** (-np.arange(4) / 4)).astype(np.float32)
    turns = np.exp(1j * (places.astype(np.float32)[:, None] * theta).astype(np.float64))
    tape = Tape()
    out = attention.rope(Match(), x, integers(queue, places), base=500.0, tape=tape)
    g = to_device(queue, np.random.default_rng(1).standard_normal(SHAPE), dtype)
    tape.backward(out, g)
    for got, source, factor in ((out.value, x.value, turns), (x.grad, g, turns.conj())):
        want = to_numpy(source).view(np.complex128) * factor
        assert got.dtype == dtype
        assert_close(got, want.view(np.float64), slack=8 * EPS)
    back = attention.rope(Match(), out.value, integers(queue, places), 500.0, inverse=True)
    assert back.dtype == dtype
    np.testing.assert_allclose(to_numpy(back), to_numpy(x.value), atol=3e-2 if dtype == "bfloat16" else 4e-3)


# ------------------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_masked_fill(queue: cl.CommandQueue, dtype: str) -> None:
    x = leaf(queue, 0, dtype)
    mask = np.random.default_rng(2).random((5, 8)) < 0.5
    tape = Tape()
    out = arithmetic.masked_fill(Promote(), x, to_device(queue, mask), -1e4, tape=tape)
    g = to_device(queue, np.random.default_rng(1).standard_normal(SHAPE), dtype)
    tape.backward(out, g)
    assert out.value.dtype == dtype
    assert_close(out.value, np.where(mask, -1e4, to_numpy(x.value)))
    np.testing.assert_array_equal(to_numpy(x.grad), np.where(mask, 0, to_numpy(g)))
    bare = arithmetic.masked_fill(Promote(), x.value, to_device(queue, mask, "float16"), -1e4)
    np.testing.assert_array_equal(to_numpy(bare), to_numpy(out.value))
    grad = arithmetic.tensor_masked_fill_backward(Promote(), g, integers(queue, mask))
    np.testing.assert_array_equal(to_numpy(grad), to_numpy(x.grad))
    with pytest.raises(NotOwned):
        OWNED["netcl.ops.lm_ops.masked_fill"](Promote(), x.value, x.value, out=g)


# ---------------------------------------------------------------------------------------------------- modules

B, T, E = 2, 7, 16

MODULES: dict[str, Callable[[cl.CommandQueue], Module]] = {
    "MultiheadAttention": lambda queue: MultiheadAttention(E, 2, queue=queue),
    "TransformerEncoderLayer": lambda queue: TransformerEncoderLayer(E, 2, 24, queue=queue),
    "CausalSelfAttention": lambda queue: CausalSelfAttention(E, 2, queue=queue),
    "TransformerBlock": lambda queue: TransformerBlock(E, 2, queue=queue),
    "RotaryAttention": lambda queue: RotaryAttention(E, 2, queue=queue),
    "DecoderBlock": lambda queue: DecoderBlock(E, 2, hidden=24, queue=queue),
}


def build(name: str, queue: cl.CommandQueue) -> Module:
    np.random.seed(0)
    return MODULES[name](queue)


def parameters_of(module: Module) -> list[Tensor]:
    """A module's parameters, also where netcl's ``parameters()`` does not list those of the layers inside."""
    found = [x for x in vars(module).values() if isinstance(x, Tensor)]
    return found + [x for part in vars(module).values() if isinstance(part, Module) for x in parameters_of(part)]


def apply(module: Module, x: Any) -> Any:
    return module.forward(x, x, x) if isinstance(module, MultiheadAttention) else module.forward(x)


def data(queue: cl.CommandQueue) -> Tensor:
    return to_device(queue, np.random.default_rng(1).standard_normal((B, T, E)))


def trained(queue: cl.CommandQueue, name: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Result of a module and gradients of its parameters, for one loss."""
    module = build(name, queue)
    tape = Tape()
    with tape:
        out = apply(module, ag.tensor(data(queue)))
        loss = ag.mean(ag.square(out))
    tape.backward(loss)
    return to_numpy(out.value), [to_numpy(x.grad) for x in parameters_of(module)]


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 4e-3), ("bfloat16", 3e-2), ("float32", 1e-5)])
@pytest.mark.parametrize("name", MODULES)
def test_modules_train_and_infer(queue: cl.CommandQueue, name: str, dtype: str, tolerance: float) -> None:
    plain, plain_grads = trained(queue, name)
    if name == "DecoderBlock":  # netcl's gradient of swish is wrong; the next test checks clamp's float32
        with amp.init(dtype="float32"):
            _, plain_grads = trained(queue, name)
    with amp.init(dtype=dtype):
        out, grads = trained(queue, name)
        module = build(name, queue)
        with ag.no_grad():
            inferred = apply(module, ag.tensor(data(queue)))
        bare = apply(module, data(queue))
    close(out, plain, tolerance)
    # A key's bias shifts all scores of a query alike: its gradient is nothing but rounding.
    largest = max(np.abs(grad).max() for grad in plain_grads)
    for got, want in zip(grads, plain_grads, strict=True):
        assert np.abs(got - want).max() <= 4 * tolerance * max(np.abs(want).max(), 0.1 * largest)
    for other in (inferred, bare):
        assert not isinstance(other, Node)
        close(to_numpy(other), out, tolerance)


#: with one head
WITHOUT_BIAS: dict[str, Callable[[cl.CommandQueue], Any]] = {
    "MultiheadAttention": lambda queue: MultiheadAttention(E, 1, bias=False, queue=queue),
    "CausalSelfAttention": lambda queue: CausalSelfAttention(E, 1, bias=False, queue=queue),
    "CausalSelfAttention, no mask": lambda queue: CausalSelfAttention(E, 1, causal=False, bias=False, queue=queue),
    "RotaryAttention": lambda queue: RotaryAttention(E, 1, qk_norm=False, queue=queue),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("form", ["node", "bare", "no_grad"])
@pytest.mark.parametrize("name", WITHOUT_BIAS)
def test_scores_beyond_float16_before_they_are_scaled(
    queue: cl.CommandQueue, name: str, form: str, dtype: str, level: str
) -> None:
    """q k^T is 160,000 where a token meets itself and 0 elsewhere: every token attends to itself alone."""
    module = WITHOUT_BIAS[name](queue)
    large, one = 400 * np.eye(E, dtype=np.float32), np.eye(E, dtype=np.float32)
    weights = {"q_proj": large, "k_proj": large, "v_proj": one, "qkv": np.hstack([large, large, one])}
    for part in {"q_proj", "k_proj", "v_proj", "qkv", "out_proj", "proj"} & vars(module).keys():
        getattr(module, part).weight.write(weights.get(part, one))
    x = np.eye(T, E)[None].astype(np.float32)
    with amp.init(dtype=dtype, level=level), Tape() as tape:
        if form == "no_grad":
            with ag.no_grad():
                out = apply(module, to_device(queue, x))
        else:
            out = apply(module, to_device(queue, x) if form == "bare" else ag.tensor(to_device(queue, x)))
        if form == "node":
            tape.backward(ag.sum(out))
            assert all(np.isfinite(to_numpy(parameter.grad)).all() for parameter in parameters_of(module))
    if name == "RotaryAttention":  # a token is turned by its place, and is no longer at right angles to the others
        assert np.isfinite(to_numpy(out.value)).all()
    else:
        np.testing.assert_allclose(to_numpy(out.value), x)


def test_gradients_of_a_decoder_block_against_differences_of_its_loss(queue: cl.CommandQueue) -> None:
    with amp.init(dtype="float32"):
        _, grads = trained(queue, "DecoderBlock")
    rng = np.random.default_rng(4)
    directions = [rng.standard_normal(grad.shape) for grad in grads]
    losses = []
    for step in (0.003, -0.003):
        module = build("DecoderBlock", queue)
        for parameter, direction in zip(parameters_of(module), directions, strict=True):
            parameter.write((to_numpy(parameter) + step * direction).astype(np.float32))
        losses.append((to_numpy(apply(module, data(queue))) ** 2).mean())
    slope = sum((grad * direction).sum() for grad, direction in zip(grads, directions, strict=True))
    np.testing.assert_allclose(slope, (losses[0] - losses[1]) / 0.006, rtol=2e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 4e-3), ("bfloat16", 3e-2), ("float32", 1e-5)])
@pytest.mark.parametrize("name", ["RotaryAttention", "DecoderBlock"])
def test_incremental_decoding(queue: cl.CommandQueue, name: str, dtype: str, tolerance: float) -> None:
    """A prompt, then one token at a time, gives what the whole sequence gives at once."""
    x = to_numpy(data(queue))
    module = build(name, queue)
    plain = to_numpy(apply(module, data(queue)))
    with amp.init(dtype=dtype), ag.no_grad():
        cache = KVCache(1, B, 2, E // 2, T, queue)
        pieces = []
        for begin, end in ((0, 3), *((i, i + 1) for i in range(3, T))):
            part = to_device(queue, x[:, begin:end])
            pieces.append(to_numpy(module.forward(part, cache=cache)))
            cache.advance(end - begin)
    close(np.concatenate(pieces, 1), plain, tolerance)


def test_causal_attention_drops_weights_and_results_in_training_only(queue: cl.CommandQueue) -> None:
    def run(p: float, training: bool) -> np.ndarray:
        np.random.seed(0)
        module = CausalSelfAttention(E, 2, dropout=p, queue=queue)
        module.training = training
        with amp.init():
            return to_numpy(module.forward(data(queue)))

    whole = run(0.0, True)
    np.testing.assert_array_equal(run(0.5, False), whole)
    dropped = run(0.5, True)
    kept = dropped != 0
    assert 0.2 < kept.mean() < 0.8, "results are dropped"
    assert not np.allclose(dropped[kept], 2 * whole[kept], rtol=1e-2), "and weights before them"
