"""The two lines train: dtypes, gradients, accumulation, several losses, inference."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import amp as netcl_amp
from netcl import autograd as ag
from netcl.core.device import CPUQueue
from netcl.nn.layers import Conv2d, Flatten, Linear, ReLU, Sequential
from netcl.nn.modern import DecoderBlock
from netcl.optim import SGD, Adam

from clamp import amp
from clamp.bridge import Node, Parameter, Tape, Tensor, graph
from clamp.casting.operands import note_numpy_backend
from clamp.ops.attention import amx as attention_amx
from clamp.ops.conv import amx as conv_amx
from clamp.ops.gemm import amx as gemm_amx
from tests.launches import forget_prepared_launches
from tests.networks import LOSS_FACTOR, UsersSGD, batch, loss_of, mlp, scaled_backward, step, weights_of
from tests.reference import assert_same, quantize, to_device, to_numpy
from tests.sweep import sweep

pytestmark = pytest.mark.usefixtures("shut_down")


def gradients(params: list[Tensor]) -> list[np.ndarray]:
    return [param.grad.to_host().astype(np.float64) for param in params]


def reference_gradients(model: object, data: tuple[Tensor, Tensor], dtype: str) -> list[np.ndarray]:
    """float64 gradients of an MLP's loss, from weights and activations rounded to ``dtype``.

    The activations are rounded too because a ReLU's input near zero changes sign in the rounding.
    """

    def rounded(array: np.ndarray) -> np.ndarray:
        return quantize(array, dtype).astype(np.float64)

    params = [param.to_host() for param in model.parameters()]
    x, y = (tensor.to_host() for tensor in data)
    weights, biases = [rounded(weight) for weight in params[::2]], params[1::2]
    activations = [rounded(x)]
    for index, (w, b) in enumerate(zip(weights, biases, strict=True)):
        out = activations[-1] @ w + b
        activations.append(rounded(np.maximum(out, 0) if index < len(weights) - 1 else out))
    grad = 2 * LOSS_FACTOR * (activations[-1] - y)
    result: list[np.ndarray] = []
    for index in reversed(range(len(weights))):
        result = [activations[index].T @ grad, grad.sum(0), *result]
        grad = (grad @ weights[index].T) * (activations[index] > 0)
    return result


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 5e-3), ("bfloat16", 4e-2), ("float32", 1e-5)])
def test_gradients_are_those_of_the_network(queue: cl.CommandQueue, dtype: str, tolerance: float) -> None:
    model, data = mlp(queue, 31, 64, 17, 5), batch(queue, 23, 31, 5)
    optimizer = SGD(model.parameters(), lr=1e-3)
    expected = reference_gradients(model, data, dtype)
    handle = amp.init(dtype=dtype)
    scaled_backward(handle, loss_of(model, data), optimizer)
    for param, want in zip(model.parameters(), expected, strict=True):
        assert param.dtype == "float32"
        assert param.grad.dtype == "float32"
        error = np.abs(param.grad.to_host() - want).max() / np.abs(want).max()
        assert error < tolerance


def test_activations_are_16_bit_and_parameters_stay_fp32(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 16, 32, 32, 8), batch(queue, 8, 16, 8)
    amp.init()
    loss = loss_of(model, data)
    assert loss.value.dtype == "float32"
    computed = [node for node in graph(loss) if node.parents and node is not loss]
    assert computed
    # the network is in half, the loss (mse_loss, mul) in fp32
    assert sorted(node.value.dtype for node in computed) == ["float16"] * 4 + ["float32"]
    assert {param.dtype for param in model.parameters()} == {"float32"}
    assert not any(node.op_name == "cast" for node in graph(loss)), "weights and inputs need no cast node"


def test_the_tape_and_the_node_give_the_same_gradients(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 16, 32, 8), batch(queue, 8, 16, 8)
    optimizer = SGD(model.parameters())
    handle = amp.init()
    with ag.Tape() as tape:
        loss = loss_of(model, data)
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        tape.backward(scaled_loss)
    by_tape = gradients(model.parameters())
    optimizer.zero_grad()
    scaled_backward(handle, loss_of(model, data), optimizer)
    assert_same(by_tape, gradients(model.parameters()))


ON_LOSSES: dict[str, Callable[[Node], Node]] = {
    "times": lambda loss: loss * 2.0**-7,
    "over": lambda loss: loss / 128.0,
    "weighted": lambda loss: loss * 2.0**-8 + loss * 2.0**-8,
    "mean": lambda loss: ag.mean(ag.stack([loss, loss], axis=0)) * 2.0**-7,
    "chosen": lambda loss: ag.maximum(ag.relu(loss), 0.0) * 2.0**-7,
}


@pytest.mark.parametrize("name", ON_LOSSES)
@pytest.mark.parametrize("size", [2.0**23, 1.0])  # float16 ends below 2^16, and 2^16 is the first loss scale
def test_arithmetic_on_losses_is_not_in_16_bits_at_o2(queue: cl.CommandQueue, name: str, size: float) -> None:
    model, data = mlp(queue, 16, 32, 1), batch(queue, 64, 16, 1)
    optimizer = SGD(model.parameters())
    amp.decorate(model, optimizer)
    with amp.init(level="O2") as handle:
        loss = ag.mean(ag.square(model(ag.tensor(data[0])))) * 0.0 + size
        scaled_backward(handle, ON_LOSSES[name](loss), optimizer)
        optimizer.step()
    got = ON_LOSSES[name](loss).value
    assert got.dtype == "float32"
    assert got.to_host()[0] == size / 128
    assert (handle.last_step.stepped, handle.last_step.repeats) == (True, 0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_the_user_lists_as_half_is_in_16_bits_on_losses_too(
    queue: cl.CommandQueue, level: str, tmp_path: Path
) -> None:
    loss, lists = ag.tensor(to_device(queue, np.ones(1))), tmp_path / "mine.toml"
    lists.write_text('[half]\n"netcl.autograd.mul" = "It was measured."\n')
    for options in ({"custom_white_list": ["mul"]}, {"lists": lists}):
        with amp.init(level=level, **options):
            assert ag.mul(loss, loss).value.dtype == "float16"
            assert ag.add(loss, loss).value.dtype == "float32"


def test_nothing_to_stack_is_named_at_o2(queue: cl.CommandQueue) -> None:
    with amp.init(level="O2"), pytest.raises(ValueError, match="stack needs at least one tensor"):
        ag.stack([])


def test_training_is_repeatable_bit_for_bit(queue: cl.CommandQueue) -> None:
    data = batch(queue, 32, 16, 8)

    def run() -> list[np.ndarray]:
        model = mlp(queue, 16, 64, 8)
        optimizer = Adam(model.parameters(), lr=1e-2)
        with amp.init() as handle:
            for _ in range(10):
                step(handle, model, optimizer, data)
        return weights_of(model)

    assert_same(run(), run())


_TRAININGS = product(["convolutions", "decoder block"], ["float16", "bfloat16"])


@pytest.mark.parametrize(("kind", "dtype"), sweep(_TRAININGS, lambda n: n in (0, 3)))
def test_the_matrix_unit_trains_to_the_bits_of_plain_c(
    amx_queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    queue, of_unit, used = amx_queue, gemm_amx.unit_of, []

    def run() -> list[np.ndarray]:
        np.random.seed(0)
        if kind == "decoder block":
            model, shapes = DecoderBlock(96, 2, queue=queue), ((2, 70, 96),) * 2
        else:
            layers = Conv2d(queue, 16, 33, 3, pad=1), ReLU(), Conv2d(queue, 33, 16, 3, stride=2, pad=1), Flatten()
            model, shapes = Sequential(*layers, Linear(queue, 480, 200)), ((40, 16, 11, 10), (40, 200))
        rng = np.random.default_rng(1)
        data = tuple(to_device(queue, rng.standard_normal(shape)) for shape in shapes)
        optimizer = Adam(model.parameters(), lr=1e-2)
        with amp.init(dtype=dtype) as handle:
            for _ in range(2):
                step(handle, model, optimizer, data)
        return weights_of(model)

    by_unit = run()
    for module in (gemm_amx, conv_amx):
        monkeypatch.setattr(module, "unit_of", lambda *given: used.append("unit") or of_unit(*given[:2], emulate=True))
    for name in ("forward", "backward"):
        of_attention = getattr(attention_amx, name)
        monkeypatch.setattr(attention_amx, name, partial(of_attention, emulate=True))
    forget_prepared_launches(monkeypatch)
    assert_same(by_unit, run())
    assert used


def test_amp_follows_fp32(queue: cl.CommandQueue) -> None:
    data = batch(queue, 64, 16, 4)

    def losses(dtype: str) -> list[float]:
        model = mlp(queue, 16, 64, 4)
        optimizer = Adam(model.parameters(), lr=3e-3)
        with amp.init(dtype=dtype) as handle:
            return [step(handle, model, optimizer, data) for _ in range(60)]

    fp32 = losses("float32")
    assert fp32[-1] < fp32[0] / 5, "the task can be learned"
    for dtype in ("float16", "bfloat16"):
        np.testing.assert_allclose(losses(dtype), fp32, rtol=0.1)


def test_accumulated_gradients_are_the_sum(queue: cl.CommandQueue) -> None:
    model, first, second = mlp(queue, 16, 32, 8), batch(queue, 8, 16, 8, 1), batch(queue, 8, 16, 8, 2)
    optimizer = SGD(model.parameters())
    handle = amp.init()
    separate = []
    for data in (first, second):
        optimizer.zero_grad()
        scaled_backward(handle, loss_of(model, data), optimizer)
        separate.append(gradients(model.parameters()))
    optimizer.zero_grad()
    for data in (first, second):
        scaled_backward(handle, loss_of(model, data), optimizer)
    for a, b, total in zip(*separate, gradients(model.parameters()), strict=True):
        np.testing.assert_allclose(total, a + b, rtol=1e-6, atol=1e-6)


def test_two_losses_with_their_own_scales(queue: cl.CommandQueue) -> None:
    model, first, second = mlp(queue, 16, 32, 8), batch(queue, 8, 16, 8, 1), batch(queue, 8, 16, 8, 2)
    handle = amp.init()
    optimizer = handle.wrap_optimizer(SGD(model.parameters(), lr=1e-3), num_loss=2)
    with pytest.raises(RuntimeError, match=r"optimizer\.scale_loss"):
        handle.scale_loss(loss_of(model, first), optimizer)
    before = weights_of(model)
    for data in (first, second):
        with optimizer.scale_loss(loss_of(model, data)) as scaled_loss:
            scaled_loss.backward()
    with pytest.raises(RuntimeError, match="num_loss=2"), optimizer.scale_loss(loss_of(model, first)):
        pass
    grads = gradients(model.parameters())
    optimizer.step()
    for old, new, grad in zip(before, weights_of(model), grads, strict=True):
        np.testing.assert_allclose(new, old - 1e-3 * grad, rtol=1e-5, atol=1e-7)
    assert (optimizer.lr, optimizer.loss_scale) == (1e-3, 2.0**16)
    optimizer.lr = 0.5
    assert optimizer.__wrapped__.lr == 0.5


@pytest.mark.parametrize(
    ("wrapped", "passes", "recorded"),
    [(True, 1, False), (True, 2, True), (True, 1, True), (False, 2, False), (False, 1, True)],
)
@pytest.mark.parametrize("met", [1.0, np.inf])
def test_a_step_that_is_given_up_leaves_the_next_one_its_losses_and_is_not_skipped_for_it(
    queue: cl.CommandQueue, met: float, wrapped: bool, passes: int, recorded: bool
) -> None:
    def trained(given_up: bool) -> list[np.ndarray]:
        model, data = mlp(queue, 16, 32, 8), batch(queue, 8, 16, 8)
        left_out = to_device(queue, np.full((8, 16), met)), data[1]
        with amp.init(loss_scale=2.0**8) as handle:
            optimizer = plain = SGD(model.parameters(), lr=1e-3)
            scale_loss = partial(handle.scale_loss, optimizer=plain)
            if wrapped:
                optimizer = handle.wrap_optimizer(plain, num_loss=2)
                scale_loss = optimizer.scale_loss

            def run(x: Tensor, y: Tensor, passes: int) -> None:
                optimizer.zero_grad()
                for _ in range(passes):
                    with scale_loss(loss_of(model, (x, y))) as scaled_loss:
                        scaled_loss.backward()

            run = amp.record(run) if recorded else run
            for _ in range(4):
                if given_up:
                    run(*left_out, passes)
                run(*data, 2)
                optimizer.step()
            return weights_of(model)

    assert_same(trained(given_up=True), trained(given_up=False))


def test_a_step_that_is_looked_at_gives_up_nothing(queue: cl.CommandQueue) -> None:
    """Its zero_grad clears gradients that come back, and so does what was met with them."""
    model, (x, y) = mlp(queue, 16, 32, 8), batch(queue, 8, 16, 8)
    left_out = to_device(queue, np.full((8, 16), np.inf))
    optimizer = SGD(model.parameters(), lr=1e-3)
    with amp.init(loss_scale=2.0**8) as handle:

        def backward(x: Tensor) -> None:
            scaled_backward(handle, loss_of(model, (x, y)), optimizer)

        def train() -> None:
            backward(x)
            optimizer.step()
            optimizer.zero_grad()

        backward(left_out)
        handle.explain(train)
        optimizer.zero_grad()
        train()
        assert handle.last_step.stepped
        backward(left_out)
        handle.explain(train)
        optimizer.step()
        assert not handle.last_step.stepped


def test_an_overflow_of_one_loss_skips_the_step_of_both(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 16, 32, 8), batch(queue, 8, 16, 8)
    too_large = to_device(queue, np.full((8, 16), np.inf)), data[1]
    handle = amp.init()
    optimizer = handle.wrap_optimizer(SGD(model.parameters(), lr=1e-3), num_loss=2)
    before = weights_of(model)
    for given in (too_large, data):
        with optimizer.scale_loss(loss_of(model, given)) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert_same(weights_of(model), before)
    assert [scaler.scale for scaler in handle.scalers[1:]] == [2.0**15, 2.0**16]


def test_two_losses_that_share_a_trunk_count_it_once(queue: cl.CommandQueue) -> None:
    model, (x, y) = mlp(queue, 16, 32, 8), batch(queue, 8, 16, 8)
    optimizer = SGD(model.parameters())
    handle = amp.init(dtype="float32", loss_scale=8.0)
    with ag.Tape() as tape:
        out = model(ag.tensor(x))
        losses = [ag.mse_loss(out, ag.tensor(y)), ag.sum(out)]
    for loss in losses:
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            tape.backward(scaled_loss)
    together = gradients(model.parameters())
    optimizer.zero_grad()
    out = model(ag.tensor(x))
    total = ag.add(ag.mse_loss(out, ag.tensor(y)), ag.sum(out))
    scaled_backward(handle, total, optimizer)
    for a, b in zip(together, gradients(model.parameters()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_parameters_own_node_that_outlives_zero_grad(queue: cl.CommandQueue) -> None:
    weight = Parameter.from_host(queue, np.ones((4, 3), np.float32))
    node = ag.tensor(weight, requires_grad=True)
    x = ag.tensor(to_device(queue, np.ones((2, 4))))
    optimizer = SGD([weight])
    handle = amp.init(loss_scale=1024.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaled_backward(handle, ag.sum(ag.matmul_op(x, node)), optimizer)
        np.testing.assert_array_equal(weight.grad.to_host(), np.full((4, 3), 2.0))


def test_a_16_bit_parameter_trains_through_its_master(queue: cl.CommandQueue) -> None:
    weight = Parameter.from_host(queue, np.ones((4, 3), np.float16), dtype="float16")
    optimizer = SGD([weight], lr=2.0**-6)
    x = ag.tensor(to_device(queue, np.ones((2, 4))))
    handle = amp.init(loss_scale=1024.0)
    for expected in (1 - 2 * 2.0**-6, 1 - 4 * 2.0**-6):
        optimizer.zero_grad()
        loss = ag.sum(ag.matmul_op(x, ag.tensor(weight, requires_grad=True)))
        scaled_backward(handle, loss, optimizer)
        assert optimizer.params[0].grad.dtype == "float32"
        optimizer.step()
        np.testing.assert_array_equal(to_numpy(weight), np.full((4, 3), expected))


def test_backward_of_a_node_without_amp_lines(queue: cl.CommandQueue) -> None:
    amp.init()
    x = Parameter.from_host(queue, np.array([1.0, 2.0], np.float32))
    ag.sum(ag.square(ag.tensor(x, requires_grad=True))).backward()
    np.testing.assert_array_equal(x.grad.to_host(), [2.0, 4.0])


def test_tape_backward_with_retained_gradients(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    amp.init()
    with ag.Tape() as tape:
        loss = loss_of(model, data)
    tape.backward(loss)
    first = gradients(model.parameters())
    for param in model.parameters():
        param.grad = None
    tape.backward(loss)
    assert_same(first, gradients(model.parameters()))
    assert isinstance(tape, Tape)


def test_netcls_numpy_backend_is_left_alone_and_said_so_once() -> None:
    note_numpy_backend.cache_clear()
    host = CPUQueue()
    model = mlp(host, 8, 16, 4)
    x, y = (Tensor.from_host(host, np.ones((4, width), np.float32)) for width in (8, 4))
    optimizer = SGD(model.parameters(), lr=1e-3)
    before = weights_of(model)
    with amp.init() as handle:
        with pytest.warns(UserWarning, match="numpy backend"):
            step(handle, model, optimizer, (x, y))
        step(handle, model, optimizer, (x, y))
    assert not any(np.array_equal(a, b) for a, b in zip(before, weights_of(model), strict=True))


#: a thread and another, in turns: `n` enters a no_grad() and `N` leaves it, `m` and `M` those of the other one; `i` and
#: `s` are init and shutdown, `w` is a whole no_grad() of the one. Whether ops are recorded then in either.
GRAD_MODES: dict[str, tuple[str, bool, bool]] = {
    "one evaluates": ("im", True, False),
    "and is done": ("imM", True, True),
    "both do, and one is done": ("inmN", True, False),
    "and then the other": ("inmNM", True, True),
    "init inside of it": ("ni", False, False),
    "and it ends": ("niN", True, True),
    "and it ends, after another": ("niwN", True, True),
    "init inside of the other's": ("miM", True, True),
    "shutdown inside of it": ("ins", False, False),
    "shutdown inside, and its end": ("insN", True, True),
    "shutdown inside of the other's": ("imsM", True, True),
    "another init after that": ("insNimM", True, True),
}


@pytest.mark.parametrize("name", GRAD_MODES)
def test_no_grad_is_a_threads_own(queue: cl.CommandQueue, name: str) -> None:
    calls, here, there = GRAD_MODES[name]
    x = ag.tensor(Parameter.from_host(queue, np.ones(3, np.float32)))
    modes = ag.no_grad(), ag.no_grad()

    def is_recorded() -> bool:
        own = ag.apply_op(lambda value: value, lambda grad: [grad], x)  # of netcl, beside one of clamp
        assert isinstance(own, Node) == isinstance(ag.relu(x), Node)
        return isinstance(own, Node)

    with ThreadPoolExecutor(1) as pool:
        run: dict[str, Callable[[], Any]] = {
            "n": modes[0].__enter__,
            "N": lambda: modes[0].__exit__(None, None, None),
            "m": lambda: pool.submit(modes[1].__enter__).result(),
            "M": lambda: pool.submit(modes[1].__exit__, None, None, None).result(),
            "w": ag.no_grad()(lambda: None),
            "i": amp.init,
            "s": amp.shutdown,
        }
        try:
            for call in calls:
                run[call]()
            assert (is_recorded(), pool.submit(is_recorded).result()) == (here, there)
        finally:
            amp.shutdown()
            ag.set_grad_enabled(True)


def test_threads_compute_side_by_side(queue: cl.CommandQueue) -> None:
    def work(seed: int) -> np.ndarray:
        x = np.random.default_rng(seed).integers(-4, 4, (16, 16))
        node = ag.tensor(to_device(queue, x))
        return to_numpy(ag.relu(ag.matmul_op(node, node)).value) - np.maximum(x @ x, 0)

    with amp.init(), ThreadPoolExecutor(4) as pool:
        for difference in pool.map(work, range(40)):
            np.testing.assert_array_equal(difference, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_are_added_by_no_kernel_that_threads_share(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """netcl has one for all threads, and would launch it in one with the arguments of another."""
    weight, x = Parameter.from_host(queue, np.ones((4, 4), np.float32)), to_device(queue, np.ones((2, 4)))
    scaler = amp.GradScaler(init_scale=2.0)
    with amp.init(dtype=dtype):
        monkeypatch.setattr("netcl.ops.elementwise._get_binary_kernel", lambda *_: pytest.fail("netcl's"))
        for _ in range(2):
            y = ag.matmul_op(ag.tensor(x), ag.tensor(weight))
            z = ag.add(y, ag.matmul_op(y, ag.tensor(weight)))
            scaler.scale(ag.sum(z)).backward()
    np.testing.assert_array_equal(weight.grad.to_host(), 2.0 * 2 * np.full((4, 4), 2 + 8 + 8.0))


def test_plain_tensors_that_netcl_trains_are_trained(queue: cl.CommandQueue) -> None:
    weight = to_device(queue, np.ones((4, 2)))
    assert not weight.requires_grad
    optimizer = SGD([weight], lr=0.125)
    x = ag.tensor(to_device(queue, np.ones((3, 4))))
    with amp.init(loss_scale=128.0) as handle:
        loss = ag.sum(ag.matmul_op(x, ag.tensor(weight)))
        scaled_backward(handle, loss, optimizer)
        optimizer.step()
    np.testing.assert_array_equal(weight.to_host(), np.full((4, 2), 1 - 0.125 * 3))


def test_plain_tensors_of_a_users_optimizer_are_spoken_of(queue: cl.CommandQueue) -> None:
    weight = to_device(queue, np.ones((4, 2)))
    optimizer = UsersSGD([weight])
    x = ag.tensor(to_device(queue, np.ones((3, 4))))
    with amp.init(loss_scale=128.0) as handle:
        loss = ag.sum(ag.matmul_op(x, ag.tensor(weight)))
        with (
            pytest.warns(UserWarning, match=r"params\[0\]"),
            pytest.raises(RuntimeError, match="nothing that is trained"),
            handle.scale_loss(loss, optimizer),
        ):
            pass
        loss = ag.sum(ag.matmul_op(x, ag.tensor(weight)))
        scaled_backward(handle, loss, optimizer)
    np.testing.assert_array_equal(weight.grad.to_host(), np.full((4, 2), 3.0))


def test_frozen_parameters_and_batches_get_no_gradient(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    optimizer = SGD(model.parameters(), lr=1e-3)
    frozen = model.layers[0].freeze()
    before = weights_of(model)
    with amp.init() as handle:
        step(handle, model, optimizer, data)
    assert [x.grad for x in (frozen.weight, frozen.bias, *data)] == [None] * 4
    changed = [not np.array_equal(a, b) for a, b in zip(before, weights_of(model), strict=True)]
    assert changed == [False, False, True, True]


def test_netcls_own_autocast_hands_out_no_copies_of_weights(queue: cl.CommandQueue) -> None:
    weight = Parameter.from_host(queue, np.ones((4, 2), np.float32))
    with amp.init(), netcl_amp.autocast(device_queue=queue):
        assert ag.tensor(weight).value is weight
