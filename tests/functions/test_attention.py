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
from clamp.casting.policies import Match, Promote
from clamp.casting.registry import OWNED
from clamp.functions import arithmetic, attention
from tests.functions import operands
from tests.functions.operands import half
from tests.reference import STORAGE_DTYPES, assert_close, assert_same, integers, to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")

SHAPE = (2, 3, 5, 8)


def leaf(queue: cl.CommandQueue, seed: int, dtype: str) -> Node:
    return operands.leaf(queue, np.random.default_rng(seed).standard_normal(SHAPE), dtype)


# ------------------------------------------------------------------------------------------------ attention


def test_bare_tensors(queue: cl.CommandQueue) -> None:
    leaves = [leaf(queue, seed, "float16") for seed in range(3)]
    q, k, v = (x.value for x in leaves)
    recorded = OWNED["netcl.autograd.flash_attention"](half(), *leaves, causal=False, scale=0.5)
    out, lse = attention.flash_attention(half(), q, k, v, causal=False, scale=0.5)
    g = to_device(queue, np.random.default_rng(5).standard_normal(SHAPE), "float16")
    grads = attention.tensor_flash_attention_backward(half(), q, k, v, out, lse, g, causal=False, scale=0.5)
    assert_same(map(to_numpy, (out, *grads)), map(to_numpy, (recorded.value, *recorded.grad_fn(g))))
    assert {x.dtype for x in (out, *grads)} == {"float16"}
    # The last query of a causal attention is what decoding computes.
    out, _ = attention.flash_attention(Match(), q, k, v)
    last = to_device(queue, to_numpy(q)[:, :, -1:], "float16")
    assert_close(attention.flash_attention_decode(half(), last, k, v, 5), to_numpy(out)[:, :, -1:], ulps=1)


# ------------------------------------------------------------------------------------------ rotary positions


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_rope_is_turned_back(queue: cl.CommandQueue, dtype: str) -> None:
    x, places = leaf(queue, 0, dtype).value, integers(queue, [0, 3, 17, 100_000, 2])
    back = attention.rope(Match(), attention.rope(Match(), x, places, base=500.0), places, 500.0, inverse=True)
    assert back.dtype == dtype
    np.testing.assert_allclose(to_numpy(back), to_numpy(x), atol=3e-2 if dtype == "bfloat16" else 4e-3)


# ------------------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_masked_fill(queue: cl.CommandQueue, dtype: str) -> None:
    x = leaf(queue, 0, dtype)
    mask = np.random.default_rng(2).random((5, 8)) < 0.5
    bare = arithmetic.masked_fill(Promote(), x.value, to_device(queue, mask, "float16"), -1e4)
    assert_close(bare, np.where(mask, -1e4, to_numpy(x.value)))
    grad = arithmetic.tensor_masked_fill_backward(Promote(), x.value, integers(queue, mask))
    np.testing.assert_array_equal(to_numpy(grad), np.where(mask, 0, to_numpy(x.value)))


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


@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_what_netcl_computes(queue: cl.CommandQueue, name: str) -> None:
    """In float32; tests of all models compare 16 bits with that."""
    plain, plain_grads = trained(queue, name)
    with amp.init(dtype="float32"):
        out, grads = trained(queue, name)
    close(out, plain, 1e-5)
    if name == "DecoderBlock":  # netcl's gradient of swish is wrong; differences of the loss check clamp's
        return
    # A key's bias shifts all scores of a query alike: its gradient is nothing but rounding.
    largest = max(np.abs(grad).max() for grad in plain_grads)
    for got, want in zip(grads, plain_grads, strict=True):
        assert np.abs(got - want).max() <= 4e-5 * max(np.abs(want).max(), 0.1 * largest)


def test_a_bare_query_beside_nodes_keeps_their_graph(queue: cl.CommandQueue) -> None:
    module, query = build("MultiheadAttention", queue), data(queue)
    with amp.init(dtype="float32"):
        with Tape() as tape:
            out = module.forward(query, *(key := [ag.tensor(data(queue), requires_grad=True) for _ in range(2)]))
            loss = ag.mean(ag.square(out))
        tape.backward(loss)
    assert all(to_numpy(node.grad).any() for node in key)


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
    """A prompt, then one token at a time, gives what the whole sequence gives at once, also if they come in 16 bits."""
    x = to_numpy(data(queue))
    module = build(name, queue)
    plain = to_numpy(apply(module, data(queue)))
    for stored in {"float32", dtype}:
        with amp.init(dtype=dtype), ag.no_grad():
            cache = KVCache(1, B, 2, E // 2, T, queue)
            pieces = []
            for begin, end in ((0, 3), *((i, i + 1) for i in range(3, T))):
                pieces.append(module.forward(to_device(queue, x[:, begin:end], stored), cache=cache))
                cache.advance(end - begin)
        assert {piece.dtype for piece in pieces} <= {stored, dtype}
        close(np.concatenate(list(map(to_numpy, pieces)), 1), plain, tolerance)


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
