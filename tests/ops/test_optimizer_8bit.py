"""Steps with moments of 8 bits against numpy: what codes stand for, the step, and which codes its moments get."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from clamp.ops.optimizer_step import BLOCK, BLOCK_BYTES, MultiUpdate, moments_bytes
from clamp.ops.slots import in_turn
from tests.ops.test_optimizer_step import ADAMS, SIZES, adam, adamw, bits_of, joined, on_device, parts_of, split, typed
from tests.reference import to_numpy

pytestmark = pytest.mark.kernel

Host = npt.NDArray[Any]


def fractions(C: int) -> Host:
    """What the codes from 0 on stand for: 0, the middles of 7 decades of C 2^i cells, and 1."""
    edges = [np.linspace(0.1, 1, C * 2**i + 1) for i in range(7)]
    middles = [10.0 ** (i - 6) * (each[:-1] + each[1:]) / 2 for i, each in enumerate(edges)]
    return np.concatenate([[0.0], *middles, [1.0]])


V_FRACTIONS = fractions(2)
M_FRACTIONS = np.concatenate([-fractions(1)[127:0:-1], fractions(1)])


def moments_of(state: npt.NDArray[np.uint8], size: int) -> tuple[Host, Host, Host, Host]:
    """The moments that bytes stand for, in float64, and the greatest of each element's block."""
    blocks = state.reshape(-1, BLOCK_BYTES)
    greatest = np.ascontiguousarray(blocks[:, :8]).view(np.float32).astype(np.float64)
    of_m, of_v = (np.repeat(greatest[:, k], BLOCK)[:size] for k in (0, 1))
    m = M_FRACTIONS[blocks[:, 8 : 8 + BLOCK].ravel()[:size]] * of_m
    v = V_FRACTIONS[blocks[:, 8 + BLOCK :].ravel()[:size]] * of_v
    return m, v, of_m, of_v


def drawn_state(size: int, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Bytes of any codes, with greatest moments of several magnitudes."""
    state = random.integers(0, 256, moments_bytes(max(1, size)), dtype=np.uint8).reshape(-1, BLOCK_BYTES)
    greatest = (10.0 ** random.uniform(-8, 1, (len(state), 2))).astype(np.float32)
    state[:, :8] = greatest.view(np.uint8)
    return state.ravel()


def test_there_are_as_many_codes_as_8_bits_have() -> None:
    assert (len(M_FRACTIONS), len(V_FRACTIONS)) == (256, 256)
    assert M_FRACTIONS[127] == V_FRACTIONS[0] == 0
    assert (np.diff(M_FRACTIONS) > 0).all()
    assert (np.diff(V_FRACTIONS) > 0).all()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("rule", ["adam", "adamw"])
def test_a_step_is_that_of_what_the_codes_stand_for(queue: cl.CommandQueue, rule: str, fresh: bool) -> None:
    """Of gradients of all magnitudes, 0 and negative ones among them; moments get the nearest codes."""
    random = np.random.default_rng(4)
    params, grads = ([random.standard_normal(n).astype(np.float32) for n in SIZES] for _ in range(2))
    grads = [(g * 10.0 ** random.uniform(-6, 1, g.size)).astype(np.float32) for g in grads]
    for g in grads:
        g[5::17] = 0
    states = [np.zeros(moments_bytes(max(1, n)), np.uint8) if fresh else drawn_state(n, random) for n in SIZES]
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    held = [cl.Buffer(queue.context, flags, hostbuf=state) for state in states]
    stepped = on_device(queue, params)
    launches = MultiUpdate(f"{rule}_8bit", len(ADAMS), stepped, [held], [None] * len(SIZES))
    in_turn(launches.pieces(typed(*ADAMS), on_device(queue, grads)))
    for index, size in enumerate(SIZES):
        if size == 0:
            continue
        m, v, _, _ = moments_of(states[index], size)
        param, grad = params[index].astype(np.float64), grads[index].astype(np.float64)
        want, new_m, new_v = adam(param, grad, m, v) if rule == "adam" else adamw(param, grad, m, v)
        np.testing.assert_allclose(to_numpy(stepped[index]), want, rtol=1e-5, atol=1e-5)
        now = np.empty_like(states[index])
        cl.enqueue_copy(queue, now, held[index])
        got_m, got_v, of_m, of_v = moments_of(now, size)
        for got, new, of, table in ((got_m, new_m, of_m, M_FRACTIONS), (got_v, new_v, of_v, V_FRACTIONS)):
            blocks = np.pad(np.abs(new), (0, -size % BLOCK)).reshape(-1, BLOCK).max(1)
            # 1 - beta2 in float32 is 1.3e-5 of itself away from 0.001.
            np.testing.assert_allclose(of, np.repeat(blocks, BLOCK)[:size], rtol=2e-5)
            share = new / of
            nearest = np.abs(share[:, None] - table).min(1)
            raised = (new > 0) & (got == table[1] * of) if table is V_FRACTIONS else False
            assert ((np.abs(got / of - share) <= nearest + 2e-6) | raised).all()
        assert (got_v[new_v > 0] > 0).all(), "m / sqrt(v) stays within bounds"


def test_an_all_zero_block_stays_zero(queue: cl.CommandQueue) -> None:
    zeros = [np.zeros(300, np.float32)]
    state = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, moments_bytes(300))
    cl.enqueue_copy(queue, state, np.zeros(moments_bytes(300), np.uint8))
    (param,), (grad,) = on_device(queue, zeros), on_device(queue, zeros)
    for _ in range(2):
        in_turn(MultiUpdate("adam_8bit", 7, [param], [[state]], [None]).pieces(typed(*ADAMS), [grad]))
    now = np.empty(moments_bytes(300), np.uint8)
    cl.enqueue_copy(queue, now, state)
    assert not any(x.any() for x in moments_of(now, 300))
    assert not to_numpy(param).any()


@pytest.mark.parametrize("keeps", ["kahan", "remainder"])
def test_parameters_may_consist_of_parts(queue: cl.CommandQueue, keeps: str) -> None:
    random = np.random.default_rng(4)
    hosts, grads = ([random.standard_normal(n).astype(np.float32) for n in SIZES] for _ in range(2))
    stepped, expected = (parts_of(queue, SIZES, "bfloat16", keeps) for _ in range(2))
    split(queue, hosts, stepped)
    params = on_device(queue, joined(queue, stepped))
    for copies in (stepped, [None] * len(SIZES)):
        held = [cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, moments_bytes(max(1, n))) for n in SIZES]
        for buffer in held:
            cl.enqueue_copy(queue, buffer, np.zeros(buffer.size, np.uint8))
        launches = MultiUpdate("adamw_8bit", len(ADAMS), params, [held], copies)
        in_turn(launches.pieces(typed(*ADAMS), on_device(queue, grads)))
    split(queue, [x.to_host() if x.size else np.empty(0, np.float32) for x in params], expected)
    assert bits_of(stepped) == bits_of(expected)
