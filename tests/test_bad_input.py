"""Bad input: a clear error that says what was passed, and nothing changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Tensor
from tests.networks import batch, loss_of, mlp, weights_of
from tests.reference import to_device


@pytest.fixture(autouse=True)
def handle() -> Iterator[amp.AmpHandle]:
    with amp.init() as handle:
        yield handle


def test_the_loss(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    model, (x, y) = mlp(queue, 8, 4), batch(queue, 4, 8, 4)
    optimizer = SGD(model.parameters())
    before = weights_of(model)
    rows = model(ag.tensor(x))
    integers = ag.tensor(Tensor.from_host(queue, np.zeros(1, np.int32), dtype="int32"))
    with ag.no_grad():
        bare = loss_of(model, (x, y))
    for loss, error, message in (
        (rows, ValueError, r"one element, got shape \(4, 4\)"),
        (integers, TypeError, "int32"),
        (bare, TypeError, "no_grad"),
        (3.0, TypeError, "float"),
    ):
        with pytest.raises(error, match=message), handle.scale_loss(loss, optimizer):
            pass
    assert handle.loss_scale == 2.0**16
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(new, old)


def test_the_optimizer(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    model, data = mlp(queue, 8, 4), batch(queue, 4, 8, 4)
    for optimizer, message in (
        (SimpleNamespace(step=lambda: None), "no `params`"),
        (SimpleNamespace(params=[1.0], step=lambda: None), r"params\[0\] is a float"),
        (SimpleNamespace(params=model.parameters()), r"no method step"),
    ):
        with pytest.raises(TypeError, match=message), handle.scale_loss(loss_of(model, data), optimizer):
            pass
        with pytest.raises(TypeError, match=message):
            handle.wrap_optimizer(optimizer)
    with pytest.raises(ValueError, match="empty list"):
        handle.scale_loss(loss_of(model, data), [])
    with pytest.raises(ValueError, match="num_loss"):
        handle.wrap_optimizer(SGD(model.parameters()), num_loss=0)


def test_after_shutdown(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    model, data = mlp(queue, 8, 4), batch(queue, 4, 8, 4)
    loss, optimizer = loss_of(model, data), SGD(model.parameters())
    handle.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        handle.scale_loss(loss, optimizer)


def test_mixed_queues(queue: cl.CommandQueue) -> None:
    other = cl.CommandQueue(queue.context, queue.device)
    a, b = ag.tensor(to_device(queue, np.ones((4, 4)))), ag.tensor(to_device(other, np.ones((4, 4))))
    for function in (ag.matmul_op, ag.add, ag.mse_loss, ag.bmm):
        with pytest.raises(ValueError, match="different queues"):
            function(a, b)


def test_shapes(queue: cl.CommandQueue) -> None:
    def node(*shape: int) -> object:
        return ag.tensor(to_device(queue, np.ones(shape)))

    for function, shapes in (
        (ag.matmul_op, ((2, 3), (4, 5))),
        (ag.matmul_op, ((3,), (3, 5))),
        (ag.bmm, ((2, 3, 4), (3, 4, 5))),
        (ag.linear_relu, ((2, 3), (4, 5))),
        (ag.add, ((2, 3), (4, 3))),
        (ag.mse_loss, ((2, 3), (3, 2))),
        (ag.bias_add, ((2, 3), (4,))),
    ):
        with pytest.raises(ValueError, match=r"\d"):
            function(*(node(*shape) for shape in shapes))


def test_cast(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.ones(3))
    with pytest.raises(ValueError, match="float64"):
        amp.cast(x, "float64")
    with pytest.raises(TypeError, match="ndarray"):
        amp.cast(np.ones(3), "float16")
    with pytest.raises(TypeError, match="int32"):
        amp.cast(Tensor.from_host(queue, np.ones(3, np.int32), dtype="int32"), "float16")


def test_banned(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    p, t = (ag.tensor(to_device(queue, np.full((2, 2), 0.5))) for _ in range(2))
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        ag.binary_cross_entropy(p, t)
    handle.shutdown()
    with amp.init(allow_banned=True):
        loss = ag.binary_cross_entropy(amp.cast(p, "float16"), t)
        assert loss.value.dtype == "float32"
        np.testing.assert_allclose(loss.value.to_host(), np.full((2, 2), np.log(2)), rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[half]\n"m.f" = "ok"\n\n[lukewarm]\n"m.g" = "x"\n', r"line 4: unknown policy \[lukewarm\]"),
        ('[half]\n"m.f" = 3\n', r"line 2: 'm\.f' needs its reason"),
        ('[half]\n"f" = "x"\n', r"line 2: 'f' is no full name"),
        ('[half]\n"m.f" = "x"\n[float]\n"m.f" = "y"\n', r"'m\.f' is already listed as half"),
        ("[half\n", r"line 1"),
        ("half = 1\n", r"line 1: half must be a table"),
    ],
)
def test_a_malformed_list_file(handle: amp.AmpHandle, tmp_path: Path, text: str, message: str) -> None:
    handle.shutdown()
    file = tmp_path / "lists.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        amp.init(lists=file)
    assert str(file) in str(error.value)


def test_registration(handle: amp.AmpHandle) -> None:
    with pytest.raises(RuntimeError, match="before"):
        amp.register_half_function(ag, "relu")
    handle.shutdown()
    with pytest.raises(ValueError, match=r"No function named nothing in module netcl\.autograd"):
        amp.register_float_function(ag, "nothing")
    with pytest.raises(ValueError, match="unknown policy"):
        amp.register(ag, "relu", "lukewarm")
