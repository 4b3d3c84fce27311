"""Bad input: a clear error that says what was passed, and nothing changed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Tensor
from tests.networks import batch, loss_of, mlp, weights_of
from tests.reference import assert_same, to_device

pytestmark = pytest.mark.usefixtures("handle")


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
    assert_same(weights_of(model), before)


def test_the_optimizer(queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
    model, data = mlp(queue, 8, 4), batch(queue, 4, 8, 4)
    for optimizer, message in (
        (SimpleNamespace(step=lambda: None), "no `params`"),
        (SimpleNamespace(params=[1.0], step=lambda: None), r"params\[0\] is of type float"),
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


@dataclass(frozen=True)
class Given:
    """A tuple that is passed as it is."""

    value: tuple[int, ...]


def _refusals() -> list[Any]:
    """(netcl's function, its arguments, the error, its message): a shape stands for a node of that shape."""
    return [
        ("stack", ([(2, 3), (2, 4)],), ValueError, r"^stack: the tensors must have one shape, got .*\(2, 4\); cat"),
        ("stack", ([(2, 3)], 3), ValueError, r"^stack: axis 3 .* 3 dimensions"),
        ("cat", ([(2, 3), (2, 3)], 4), ValueError, "^cat: axis 4"),
        ("matmul_op", ((2, 3), (4, 5)), ValueError, r"^matmul.*\(2, 3\).*\(4, 5\)"),
        ("matmul_op", ((3,), (3, 5)), ValueError, r"^matmul.*\(3,\)"),
        ("bmm", ((2, 3, 4), (3, 4, 5)), ValueError, r"^bmm.*\(2, 3, 4\)"),
        ("add", ((2, 3), (4, 3)), ValueError, r"^add: the shapes \(2, 3\)"),
        ("mse_loss", ((2, 3), (3, 2)), ValueError, r"^mse_loss: pred has shape \(2, 3\)"),
        ("linear_relu", ((2, 3), (3, 4), (5,)), ValueError, r"^linear_relu: the bias has shape \(5,\).*\(4,\)"),
        ("linear_relu", ((2, 3), (4, 5)), ValueError, r"^linear_relu: .*3 columns against 4 rows"),
        ("sum", ((2, 3, 4), Given((0, 2))), TypeError, r"^sum: axis is \(0, 2\).*one axis after the other"),
        ("mean", ((2, 3, 4), Given((0, 2))), TypeError, r"^mean: axis is \(0, 2\)"),
        ("sum", ((2, 3, 4), 1.5), ValueError, "^sum: axis is 1.5"),
        ("sum", ((2, 3, 4), "x"), TypeError, "^sum: axis is 'x'"),
        ("softmax", ((2, 3), Given((0, 1))), TypeError, r"^softmax: axis is \(0, 1\)"),
        ("softmax", ((2, 3), 7), ValueError, "^softmax: axis 7"),
        ("argmax", ((2, 3), 4), ValueError, "^argmax: axis 4"),
        ("topk", ((2, 3), 9), ValueError, "^topk: k=9"),
        ("topk", ((2, 3), 0), ValueError, "^topk: k=0 out of range"),
        ("index_select", ((2, 3), 5, [0]), ValueError, "^index_select: axis 5"),
        ("gather", ((2, 3), 0, [4]), IndexError, "^gather: index 4 out of range"),
        ("embedding", ((2, 3), [4]), IndexError, "^embedding: index 4 out of range"),
        ("narrow", ((2, 3), 0, 1, 5), ValueError, r"^narrow: slice \[1, 6\)"),
        ("split", ((2, 3), 0), ValueError, "^split: the size of a piece is 0"),
        ("split", ((2, 3), [1, 5]), ValueError, r"^split: split sections \[1, 5\] do not sum to axis size 2"),
        ("chunk", ((2, 3), 0), ValueError, "^chunk: chunks is 0"),
        ("getitem", ((2, 3), Given((0, 0, 0))), IndexError, "^getitem: 3 indices"),
        ("getitem", ((2, 3), True), TypeError, "^getitem: unsupported index type bool"),
        *(
            ("index_select", ((2, 3), 1, mask), TypeError, r"^index_select: .* boolean mask, .* np.flatnonzero\(mask\)")
            for mask in ([True, False, True], np.array([True, False, True]))
        ),
        ("gather", ((2, 3), 0, [0.5]), ValueError, "^gather: indices and class labels must be .* got 0.5"),
        ("gather", ((2, 3), 0, np.array([2**64 - 1])), ValueError, "^gather: .* that int64 holds, got 1844674407"),
        ("embedding", ((2, 3), np.array([0, np.nan])), ValueError, "^embedding: .* whole numbers .* got nan"),
        ("cross_entropy", ((2, 3), np.array([0.5, 1])), ValueError, "^cross_entropy: .* whole numbers .* got 0.5"),
        ("cross_entropy", ((2, 3), np.array([2**32, 1])), IndexError, "^cross_entropy: label 4294967296 is no class"),
        ("cross_entropy_indices", ((2, 3), [0, 1], None), TypeError, "^cross_entropy_indices: ignore_index is None"),
        ("contrastive_loss", ((2, 3), (2, 3), [0.5, 1]), ValueError, "^contrastive_loss: .* whole numbers .* got 0.5"),
        *(
            (name, arguments, TypeError, f"^{name}: {argument} is {value!r}; it must be a number")
            for value in (None, "1", b"1")
            for name, argument, *arguments in (
                ("leaky_relu", "negative_slope", (2, 3), value),
                ("elu", "alpha", (2, 3), value),
                ("clamp", "min_val", (2, 3), value, 1.0),
                ("hard_tanh", "max_val", (2, 3), -1.0, value),
                ("smooth_l1_loss", "beta", (2, 3), (2, 3), value),
                ("weighted_smooth_l1_loss", "beta", (2, 3), (2, 3), (2, 3), value),
                ("hinge_loss", "margin", (2, 3), (2, 3), value),
                ("triplet_loss", "margin", (2, 3), (2, 3), (2, 3), value),
                ("contrastive_loss", "margin", (2, 3), (2, 3), [0, 1], value),
                ("batch_hard_triplet_loss", "margin", (2, 3), [0, 1], value),
                ("info_nce_loss", "temperature", (2, 3), (2, 3), value),
                ("layer_norm", "eps", (2, 3), (3,), (3,), value),
                ("rms_norm", "eps", (2, 3), (3,), value),
                ("l2_normalize", "eps", (2, 3), -1, value),
                ("group_norm", "eps", (2, 3, 1, 1), (3,), (3,), 1, value),
                ("rope", "base", (2, 4), (2,), value),
            )
        ),
        ("clamp", ((2, 3), float("nan"), 1.0), ValueError, "^clamp: the bounds are nan and 1.0; pass an infinity"),
        ("group_norm", ((2, 4, 1, 1), (4,), (4,), 2.5), ValueError, "^group_norm: groups is 2.5"),
        ("affine_grid", ((1, 2, 3), Given((1, 1, 2.5, 3))), ValueError, "^affine_grid: an extent of size is 2.5"),
        ("flash_attention", (*[(1, 1, 2, 4)] * 3, True, "x"), TypeError, "^flash_attention: scale is 'x'"),
        *(
            ("upsample", ((1, 1, 4, 4), *given), error, f"^upsample: {message}")
            for given, error, message in (
                ((4.5,), ValueError, "size is 4.5"),
                (("x",), TypeError, "size is 'x'"),
                (([4],), ValueError, r"size is \[4\]; pass one number, or two"),
                ((None, float("nan")), ValueError, "scale_factor is nan"),
                ((None, "x"), TypeError, "scale_factor is 'x'"),
                ((None, np.ones(3)), ValueError, "scale_factor is array.*pass one number, or two"),
            )
        ),
        ("reshape", ((2, 3), [4, 2]), ValueError, "^reshape: "),
        ("reshape", ((2, 3), 6), TypeError, "^reshape: shape is 6"),
        ("flatten", ((2, 3), [-1, -1]), ValueError, "^flatten: only one"),
        ("permute", ((2, 3), [0, 0]), ValueError, "^permute: dims must be a permutation"),
        ("permute", ((2, 3), None), TypeError, "^permute: dims is None; pass a tuple"),
        ("permute", ((2, 3), [1.5, 0]), ValueError, r"^permute: an axis of dims \(1.5, 0\) is 1.5"),
        ("cat", ((2, 3),), TypeError, "^cat: tensors is of type Node; pass a list"),
        ("stack", (None,), TypeError, "^stack: tensors is of type NoneType; pass a list"),
        ("dropout", ((3,), 0.5, 1.5), ValueError, "^dropout: seed is 1.5"),
        ("masked_fill", ((2, 3), (3,), None), TypeError, "^masked_fill: fill is None"),
        ("conv2d", ((1, 1, 4, 4), (1, 1, 3, 3), None, 1, 0, None, 1, None), TypeError, "^conv2d: groups is None"),
        ("squeeze", ((2, 3), 0), ValueError, "^squeeze: cannot squeeze axis 0 with size 2"),
        ("unsqueeze", ((2, 3), 9), ValueError, "^unsqueeze: axis 9"),
        *(
            (name, ((1, 1, 4, 4), *rest), error, f"^{name}: {message}")
            for name in ("max_pool2d", "avg_pool2d")
            for rest, error, message in (
                ((Given((2, 3)),), TypeError, r"kernel_size is \(2, 3\); it must be a whole number"),
                ((2.5,), ValueError, "kernel_size is 2.5"),
                ((5,), ValueError, "a window of 5 x 5 does not fit"),
                ((2, None), TypeError, "stride is None"),
                ((2, 0), ValueError, "stride is 0"),
                ((2, float("inf")), ValueError, "stride is inf"),
            )
        ),
        *(
            ("dropout", ((3,), p), error, f"^dropout: p is {p!r}; it must be a number")
            for p, error in ((float("nan"), ValueError), (1.5, ValueError), (-0.5, ValueError), ("x", TypeError))
        ),
        ("pad2d", ((1, 1, 4, 4), -1), ValueError, "^pad2d: pad is -1; .* a slice"),
        ("pad2d", ((1, 1, 4, 4), 1.5), ValueError, "^pad2d: pad is 1.5"),
        ("pad2d", ((1, 1, 4, 4), Given((1, 2))), TypeError, r"^pad2d: pad is \(1, 2\)"),
        ("conv2d", ((1, 1, 4, 4), (1, 1, 5, 5)), ValueError, r"^conv2d: .* 5 x 5 .* image .* pad \(0, 0\); "),
        ("conv2d_relu", ((1, 1, 4, 4), (1, 1, 5, 5), (1,)), ValueError, "^conv2d_relu: the kernel"),
        ("conv2d", ((1, 1, 4, 4), (1, 1, 3, 3), None, None), TypeError, "^conv2d: stride is None"),
        ("depthwise_conv2d", ((1, 2, 4, 4), (2, 1, 5, 5)), ValueError, "^depthwise_conv2d: filters of"),
        ("depthwise_conv2d", ((1, 2, 4, 4), (2, 1, 3, 3), None, Given((1, 2))), TypeError,
         r"^depthwise_conv2d: stride is \(1, 2\)"),
        ("bias_add", ((2, 3), (4,)), ValueError, "^bias_add: bias dimension mismatch"),
        ("cross_entropy", ((2, 3), [0, 1, 2]), ValueError, r"^cross_entropy: .*\(2, 3\).*\(3,\); pass 2 labels"),
        ("cross_entropy", ((2, 3), [0, 7]), IndexError, "^cross_entropy: label 7"),
        ("smooth_l1_loss", ((2, 3), (2, 3), float("nan")), ValueError, "^smooth_l1_loss: beta is nan"),
        ("triplet_loss", ((2, 3), (2, 3), (2, 3), 1.0, "cosine"), ValueError,
         "^triplet_loss: distance must be 'squared' or 'euclidean', got 'cosine'"),
        ("info_nce_loss", ((2, 3), (2, 3), 0.0), ValueError, "^info_nce_loss: temperature must be positive"),
        ("flash_attention", ((1, 2, 3), (1, 2, 3), (1, 2, 3)), ValueError, "^flash_attention takes q, k and v of one"),
        ("masked_fill", ((2, 3), (4, 3)), ValueError, "^masked_fill: a mask"),
        *(
            (name, arguments, TypeError, f"^{name}: {argument} is .*; pass True or False")
            for name, argument, *arguments in (
                ("flash_attention", "causal", *[(1, 1, 2, 4)] * 3, (2, 2)),  # a mask
                ("batch_norm2d", "training", (1, 2, 2, 2), *[(2,)] * 4, True, 0.1, 1e-5),  # in PyTorch's order
                ("gelu", "approximate", (2, 3), "none"),
                ("sum", "keepdims", (2, 3), 0, 1.0),
            )
        ),
        ("pow", ((2, 3), "x"), TypeError, "^pow: exponent is 'x'"),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "error", "message"), _refusals())
def test_an_error_names_the_function_called_and_what_was_passed(
    queue: cl.CommandQueue, name: str, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    def passed(value: Any) -> Any:
        if isinstance(value, tuple):
            return ag.tensor(to_device(queue, np.ones(value)))
        if isinstance(value, list) and all(isinstance(item, tuple) for item in value):
            return [passed(item) for item in value]
        return value.value if isinstance(value, Given) else value

    with pytest.raises(error, match=message):
        getattr(ag, name)(*map(passed, arguments))


def test_one_hot_of_a_negative_number_of_classes(queue: cl.CommandQueue) -> None:
    with pytest.raises(ValueError, match=r"^one_hot: num_classes is -2"):
        ag.one_hot(Tensor.from_host(queue, np.zeros(1, np.int32), dtype="int32"), -2)


def test_whole_numbers_and_truths_of_any_type_are_taken(queue: cl.CommandQueue) -> None:
    x = ag.tensor(to_device(queue, np.ones((1, 1, 4, 4))))
    for two in (2, 2.0, np.int64(2), np.float32(2), np.array(2)):
        assert ag.max_pool2d(x, two, two).value.shape == (1, 1, 2, 2)
        assert ag.pad2d(x, two).value.shape == (1, 1, 8, 8)
        assert ag.sum(x, two).value.shape == (1, 1, 4)
        assert ag.upsample(x, two).value.shape == (1, 1, 2, 2)
        assert ag.upsample(x, scale_factor=two).value.shape == (1, 1, 8, 8)
        assert ag.upsample(x, [two, 3]).value.shape == (1, 1, 2, 3)
        assert ag.cross_entropy_indices(ag.tensor(to_device(queue, np.ones((2, 3)))), [2, 1], two).value.to_host() > 1
    for none in (0, 0.0, np.float32(0), np.array([0.0])):
        assert ag.dropout(x, none) is x
    for yes in (True, 1, np.bool_(True), np.int64(1), np.array(True), np.array([1])):
        assert ag.sum(x, 0, yes).value.shape == (1, 1, 4, 4)
    for no in (None, np.int64(0), np.array(False)):
        assert ag.sum(x, 0, no).value.shape == (1, 4, 4)


@pytest.mark.parametrize("ignored", [2**40, -(2**63), 2**31 - 1])
def test_an_ignored_label_may_be_any_whole_number(queue: cl.CommandQueue, ignored: int) -> None:
    logits, host = ag.tensor(to_device(queue, np.eye(3)[:2])), np.array([1, ignored])
    expected = ag.cross_entropy_indices(logits, [1, -100]).value.to_host()
    for labels in (host, Tensor.from_host(queue, host, dtype="int64")):
        loss = ag.cross_entropy_indices(logits, labels, ignored)
        np.testing.assert_array_equal(loss.value.to_host(), expected)
    loss = ag.cross_entropy_indices(logits, [1, 0], 2**40 * ignored)  # which is no label's
    np.testing.assert_array_equal(loss.value.to_host(), ag.cross_entropy_indices(logits, [1, 0]).value.to_host())


def test_cast(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.ones(3))
    with pytest.raises(ValueError, match="float64"):
        amp.cast(x, "float64")
    with pytest.raises(TypeError, match="ndarray"):
        amp.cast(np.ones(3), "float16")
    with pytest.raises(TypeError, match="int32"):
        amp.cast(Tensor.from_host(queue, np.ones(3, np.int32), dtype="int32"), "float16")


@pytest.mark.parametrize("region", [amp.init, amp.autocast, amp.auto_cast])
def test_banned_functions_are_so_until_they_are_allowed_however_amp_is_turned_on(
    queue: cl.CommandQueue, handle: amp.AmpHandle, region: Any
) -> None:
    handle.shutdown()
    p = ag.tensor(to_device(queue, np.full((2, 2), 0.5)))
    with region(), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        ag.binary_cross_entropy(p, p)
    with amp.init(allow_banned=True):
        loss = ag.binary_cross_entropy(amp.cast(p, "float16"), p)
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
        ('[half]\n"netcl.autograd.sofmax" = "x"\n', r"line 2: there is no function 'netcl\.autograd\.sofmax'"),
        ('[half]\n"netcl.nothing.f" = "x"\n', r"line 2: there is no function"),
        ('[half]\n"netcl.nn.layers.Linear.forward" = "x"\n', r"line 2: there is no function .*amp\.register"),
        ('[half]\n"netcl.nn.layers.Linear" = "x"\n', r"line 2: there is no function"),
        ('[half]\n"clamp.amp.nothing" = "x"\n', r"line 2: there is no function"),
        *(
            (f'[half]\n"{one}" = "x"\n[float]\n"{other}" = "y"\n', f"line 4: '{other}' is .* by another name, '{one}'")
            for one, other in permutations(("netcl.autograd.tanh", "netcl.nn.functional.tanh"))
        ),
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
    with pytest.raises(ValueError, match=r"unknown policy 'lukewarm'.*lower_precision_fp"):
        amp.register(ag, "relu", "lukewarm")
