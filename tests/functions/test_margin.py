"""netcl's angular margins, self-supervised losses and ready-made network under AMP: made of functions that clamp has
and of kernels of netcl's own, which must be given float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Linear
from netcl.nn.margin import MarginHead, apply_margin
from netcl.nn.modules import Sequential
from netcl.ssl import losses, views
from netcl.ssl.heads import MomentumEncoder

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from tests.functions.operands import leaf
from tests.reference import HALF_DTYPES, to_device, to_numpy

MARGIN, SCALE = 0.4, 16.0
CLASSES = np.array([0, 3, 1, 2, 3], np.int32)
#: how far a result may be off after a product of matrices in this dtype, relative to the largest element
ROUGH = {"float16": 4e-3, "bfloat16": 3e-2}


def backward(queue: cl.CommandQueue, out: Node) -> np.ndarray[Any, Any]:
    """Sends a gradient into a result; returns it."""
    grad = to_device(queue, np.random.default_rng(1).standard_normal(out.value.shape), out.value.dtype)
    Tape().backward(out, grad)
    return to_numpy(grad)


def margined(cosine: np.ndarray[Any, Any], mode: str, margin: float) -> tuple[Any, Any]:
    """The margin of the cosines (ArcFace: Deng et al. 2019, CosFace: Wang et al. 2018, SphereFace: Liu et al. 2017),
    and its derivative. ArcFace here away from angles above pi - margin, where netcl switches to a line."""
    angle = np.arccos(cosine)
    if mode == "cosface":
        return cosine - margin, np.ones_like(cosine)
    if mode == "sphereface":
        return np.cos(margin * angle), margin * np.sin(margin * angle) / np.sin(angle)
    return np.cos(angle + margin), np.sin(angle + margin) / np.sin(angle)


@pytest.mark.parametrize("mode", ["arcface", "cosface", "sphereface"])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_apply_margin_reads_halves(queue: cl.CommandQueue, dtype: str, mode: str) -> None:
    host = np.random.default_rng(0).uniform(-0.8, 0.9, (5, 4))
    rows = np.arange(5)
    with amp.init(dtype=dtype, loss_scale=1.0):
        cosine = leaf(queue, host, dtype)
        labels = Tensor.from_host(queue, CLASSES, dtype="int32")
        out = apply_margin(cosine, labels, MARGIN, SCALE, mode)
        grad = backward(queue, out)
        values = to_numpy(cosine.value)
        expected, slope = SCALE * values, np.full(values.shape, SCALE)
        value, derivative = margined(values[rows, CLASSES], mode, MARGIN)
        expected[rows, CLASSES], slope[rows, CLASSES] = SCALE * value, SCALE * derivative
        np.testing.assert_allclose(to_numpy(out.value), expected, rtol=1e-5, atol=1e-5)
        assert cosine.value.grad.dtype == dtype
        np.testing.assert_allclose(to_numpy(cosine.value.grad), grad * slope, rtol=ROUGH[dtype])
        with ag.no_grad():
            for argument in (cosine, cosine.value):
                result = apply_margin(argument, labels, MARGIN, SCALE, mode)
                np.testing.assert_allclose(to_numpy(result.value), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sub_centers", [1, 3])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_a_margin_head_trains_and_infers(queue: cl.CommandQueue, dtype: str, sub_centers: int) -> None:
    host = np.random.default_rng(2).standard_normal((5, 6))
    with amp.init(dtype=dtype, loss_scale=1.0):
        head = MarginHead(6, 4, MARGIN, SCALE, "cosface", sub_centers, queue=queue)
        embedding = leaf(queue, host)
        labels = Tensor.from_host(queue, CLASSES, dtype="int32")
        weight = to_numpy(head.weight).reshape(4, sub_centers, 6)
        unit = host / np.linalg.norm(host, axis=1, keepdims=True)
        each = np.einsum("nd,ckd->nck", unit, weight / np.linalg.norm(weight, axis=2, keepdims=True))
        cosine = each.max(2)
        expected = SCALE * (cosine - MARGIN * (np.arange(4) == CLASSES[:, None]))
        out = head(embedding, labels)
        grad = backward(queue, out) * SCALE
        np.testing.assert_allclose(to_numpy(out.value), expected, atol=SCALE * ROUGH[dtype])
        # d cos / d weight, for the centre that won: the embedding, less its part along the weight.
        won = each == cosine[..., None]
        along = np.einsum("nc,nck,nd->ckd", grad, won, unit)
        length = np.linalg.norm(weight, axis=2, keepdims=True)
        direction = weight / length
        along -= direction * (along * direction).sum(2, keepdims=True)
        assert head.weight.grad.dtype == "float32"
        got = to_numpy(head.weight.grad).reshape(weight.shape)
        np.testing.assert_allclose(got, along / length, atol=ROUGH[dtype] * np.abs(along).max())
        assert embedding.value.grad.dtype == "float32"
        with ag.no_grad():
            logits = head.eval()(embedding, labels)
        np.testing.assert_allclose(to_numpy(logits.value), SCALE * cosine, atol=SCALE * ROUGH[dtype])
        loss = head.train().loss(embedding, labels)
        exps = np.exp(expected - expected.max(1, keepdims=True))
        log_p = np.log(exps / exps.sum(1, keepdims=True))
        want = -log_p[np.arange(5), CLASSES].mean()
        assert to_numpy(loss.value).item() == pytest.approx(want, rel=2 * ROUGH[dtype])


LOSSES: dict[str, Callable[..., Any]] = {
    "nt_xent": lambda a, b, c: losses.nt_xent(a, b),
    "info_nce": lambda a, b, c: losses.info_nce(a, b, c),
    "byol_loss": lambda a, b, c: losses.byol_loss(a, b),
    "dino_loss": lambda a, b, c: losses.dino_loss(a, b, np.zeros(6)),
    "barlow_twins_loss": lambda a, b, c: losses.barlow_twins_loss(a, b),
    "vicreg_loss": lambda a, b, c: losses.vicreg_loss(a, b),
    "swav_loss": lambda a, b, c: losses.swav_loss(a, b),
    "dec_kl_loss": lambda a, b, c: losses.dec_kl_loss(ag.softmax(a), ag.softmax(b)),
}


def value_and_gradient(
    queue: cl.CommandQueue, loss: Callable[..., Any], host: list[np.ndarray[Any, Any]], dtype: str
) -> tuple[float, np.ndarray[Any, Any]]:
    """A loss of embeddings that are stored in the AMP dtype, and the gradient of the first of them."""
    with amp.init(dtype=dtype, loss_scale=1.0):
        embeddings = [leaf(queue, values, dtype) for values in host]
        made = loss(*embeddings)
        Tape().backward(made)
        gradient = embeddings[0].value.grad
        assert gradient.dtype == dtype
        return to_numpy(made.value).item(), to_numpy(gradient)


@pytest.mark.parametrize("name", LOSSES)
def test_self_supervised_losses_train_on_halves(queue: cl.CommandQueue, name: str) -> None:
    """On 16-bit embeddings each agrees with itself on the same values in float32."""
    rng = np.random.default_rng(3)
    host = [rng.standard_normal((5, 6)) for _ in range(3)]
    for dtype in HALF_DTYPES:
        rounded = [to_numpy(to_device(queue, values, dtype)) for values in host]
        value, gradient = value_and_gradient(queue, LOSSES[name], rounded, "float32")
        half_value, half_gradient = value_and_gradient(queue, LOSSES[name], rounded, dtype)
        assert half_value == pytest.approx(value, rel=ROUGH[dtype])
        np.testing.assert_allclose(half_gradient, gradient, atol=ROUGH[dtype] * np.abs(gradient).max())


@pytest.mark.parametrize("name", ["dino_loss", "swav_loss"])
def test_what_a_widened_function_calls_runs_on_clamps_kernels(queue: cl.CommandQueue, name: str) -> None:
    """netcl's gradient of a sum multiplies fresh memory by zero, which leaves the NaNs that it held."""
    rng = np.random.default_rng(3)
    with amp.init(loss_scale=1.0):
        embeddings = [leaf(queue, rng.standard_normal((5, 6)), "float16") for _ in range(3)]
        loss = LOSSES[name](*embeddings)
        left_behind = [Tensor.from_shape(queue, (5, 6), dtype="float32", fill=float("nan")) for _ in range(64)]
        del left_behind
        Tape().backward(loss)
        assert np.isfinite(to_numpy(embeddings[0].value.grad)).all()


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_a_loss_of_netcls_in_fp32_is_so_throughout(queue: cl.CommandQueue, storage: str) -> None:
    """The covariances of large embeddings are sums beyond half's range until they are divided."""
    rng = np.random.default_rng(7)
    host = [np.float16(40 * rng.standard_normal((64, 4))).astype(np.float64) for _ in range(2)]
    with amp.init(loss_scale=1.0):
        first, second = (leaf(queue, values, storage) for values in host)
        loss = losses.vicreg_loss(first, second, sim_coeff=0.0, std_coeff=0.0)
    covariances = [np.cov(values, rowvar=False) for values in host]
    expected = sum((np.square(c).sum() - np.square(np.diag(c)).sum()) / 4 for c in covariances) / 2
    assert to_numpy(loss.value).item() == pytest.approx(expected, rel=1e-5)


LARGE: dict[str, Callable[..., Any]] = {
    "nt_xent": lambda a, b, c: losses.nt_xent(a, b, temperature=1e4, normalize=False),
    "info_nce": lambda a, b, c: losses.info_nce(a, b, c, temperature=1e4, normalize=False),
    "barlow_twins_loss": lambda a, b, c: losses.barlow_twins_loss(a, b),
    "vicreg_loss": lambda a, b, c: losses.vicreg_loss(a, b),
}


@pytest.mark.parametrize("name", LARGE)
def test_products_of_a_loss_may_be_beyond_half(queue: cl.CommandQueue, name: str) -> None:
    """What they are divided by comes after them."""
    rng = np.random.default_rng(7)
    host = [np.float16(200 * rng.standard_normal((40, 8))).astype(np.float32) for _ in range(3)]
    value, gradient = value_and_gradient(queue, LARGE[name], host, "float32")
    half_value, half_gradient = value_and_gradient(queue, LARGE[name], host, "float16")
    assert half_value == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(half_gradient, gradient, atol=2e-3 * np.abs(gradient).max() + 2.0**-24)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_augmentations_read_halves(queue: cl.CommandQueue, dtype: str) -> None:
    image = to_device(queue, np.random.default_rng(4).uniform(0, 1, (2, 3, 5, 7)), dtype)
    wide = to_device(queue, to_numpy(image))
    names = ("random_resized_crop", "random_grayscale", "gaussian_blur", "solarize", "random_flip", "color_jitter")
    with amp.init(dtype=dtype, loss_scale=1.0):
        for name in names:
            found, expected = (getattr(views, name)(x, rng=np.random.default_rng(5)) for x in (image, wide))
            np.testing.assert_array_equal(to_numpy(found), to_numpy(expected), err_msg=name)
        pipeline = views.AugmentationPipeline(solarize_p=0.5)
        np.testing.assert_array_equal(to_numpy(pipeline(image)), to_numpy(pipeline.reset()(wide)))


def test_a_momentum_encoder_follows(queue: cl.CommandQueue) -> None:
    """Its update writes to weights whose 16-bit copies are cached."""
    x = to_device(queue, np.ones((2, 3)))
    with amp.init(loss_scale=1.0):
        online, target = (Sequential(Linear(queue, 3, 4)) for _ in range(2))
        encoder = MomentumEncoder(online, target, momentum=0.5)
        with ag.no_grad():
            before = to_numpy(encoder(x))
            np.testing.assert_array_equal(before, to_numpy(online(x)))
            for parameter in online.parameters():
                parameter.write(np.ones(parameter.shape, np.float32))
            encoder.update()
            np.testing.assert_allclose(to_numpy(encoder(x)), (before + 4) / 2, rtol=5e-3)
