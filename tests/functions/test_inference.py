"""Inference under AMP: what layers compute from bare tensors and under no_grad is what they compute from nodes."""

from __future__ import annotations

from typing import Any

import netcl.nn as nn
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.distributed.data_parallel import replicate_params
from netcl.ops.bf16_act import bf16_to_host

from clamp import amp
from clamp.bridge import Tensor
from tests.recipes import RECIPES, Made, Recipe, make, values
from tests.reference import HALF_DTYPES, quantize, to_device, to_numpy, ulp

pytestmark = pytest.mark.usefixtures("shut_down")


INFERRING = {name: recipe for name, recipe in RECIPES.items() if recipe.infers}

#: netcl's models that take no bare tensors: they call functions of netcl.autograd on what they are given
_NODES_ONLY = {"resnet.ResNet18", "residual.basic_block"}


def evaluated(recipe: Recipe, queue: cl.CommandQueue, dtype: str) -> Made:
    """The model in eval mode, its inputs in ``dtype``."""
    made = make(recipe, queue, dtype)
    if hasattr(made.model, "eval"):
        made.model.eval()
    return made


def same(actual: Tensor, expected: Tensor, ulps: float = 2.0) -> None:
    """The same dtype, and the same values but for ``ulps`` of the values' largest: sums may run in another order."""
    assert actual.dtype == expected.dtype
    got, want = to_numpy(actual), to_numpy(expected)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=ulps * ulp(np.abs(want).max(), expected.dtype).item())


def params() -> list[Any]:
    """All recipes in float16; in bfloat16, and the big ones, in the full sweep."""
    return [
        pytest.param(dtype, name, marks=[pytest.mark.slow] if recipe.slow or dtype == "bfloat16" else [])
        for dtype in HALF_DTYPES
        for name, recipe in INFERRING.items()
    ]


@pytest.mark.parametrize(("dtype", "name"), params())
def test_tensors_give_what_nodes_give(queue: cl.CommandQueue, dtype: str, name: str) -> None:
    recipe = RECIPES[name]
    with amp.init(dtype=dtype):
        made = evaluated(recipe, queue, dtype)
        recorded = recipe.call(made.model, *made.nodes()).value
        assert recorded.dtype == (dtype if recipe.result == "half" else "float32")
        if name not in _NODES_ONLY:
            same(recipe.call(made.model, *made.tensors).value, recorded)
        with ag.no_grad():
            out = recipe.call(made.model, *made.nodes())
            same(out.value, recorded)
            if name not in _NODES_ONLY:
                same(recipe.call(made.model, *made.tensors).value, recorded)


@pytest.mark.parametrize("name", ["layers.Sequential", "factory.example_mlp_config", "layers.MultiheadAttention"])
def test_fp32_inputs_infer_in_16_bits(queue: cl.CommandQueue, name: str) -> None:
    recipe = RECIPES[name]
    plain = evaluated(recipe, queue, "float32")
    with amp.init():
        made = evaluated(recipe, queue, "float32")
        out = recipe.call(made.model, *made.tensors).value
        assert out.dtype == "float16"
        with amp.autocast(dtype="float32"):
            wide = recipe.call(made.model, *made.tensors).value
    expected = to_numpy(recipe.call(plain.model, *plain.tensors).value)
    np.testing.assert_allclose(to_numpy(wide), expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(to_numpy(out), expected, atol=0.01 * np.abs(expected).max())


def test_a_parameter_is_cast_once_for_many_inferences(
    queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = nn.Linear(queue, 6, 3)
    x = to_device(queue, values(5, 6), "float16")
    with amp.init(verbose=True), ag.no_grad():
        for _ in range(3):
            layer(x)
    assert capsys.readouterr().out.count("Float->Half") == 1


def test_bfloat16_is_read_and_made_as_numbers(queue: cl.CommandQueue) -> None:
    """netcl's to_host gives the 16-bit words: a script that takes their largest for the prediction would be wrong."""
    nans = np.array([0xFFFFFFFF, 0x7FFFFFFF, 0x7F800001], np.uint32).view(np.float32)  # to round these, netcl carries
    numbers = np.array([1.5, -2.0, 0.0, -0.0, np.inf, -np.inf, np.nan, 3.14159, 1e-40, -7e30, *nans], np.float32)
    stored = quantize(numbers, "bfloat16").astype(np.float32)
    words = to_device(queue, numbers, "bfloat16")
    with amp.init(dtype="bfloat16"):
        np.testing.assert_array_equal(words.to_host(), stored)
        np.testing.assert_array_equal(ag.tensor(words).to_host(), stored)
        np.testing.assert_array_equal(bf16_to_host(words), stored)
        for made in (Tensor.from_host(queue, numbers, dtype="bfloat16"), Tensor.from_host(queue, stored, "bfloat16")):
            assert made.dtype == "bfloat16"
            np.testing.assert_array_equal(made.to_host(), stored)
        copies = replicate_params([words], [queue])[0]
        np.testing.assert_array_equal(copies[0].to_host(), stored)
    assert words.to_host().dtype == np.uint16
    np.testing.assert_array_equal(bf16_to_host(words), stored)


def test_a_compiled_forward_pass_owns_what_it_reads(queue: cl.CommandQueue) -> None:
    """Neither a cleared weight cache nor an input of another dtype makes it read something else."""
    recipe = RECIPES["factory.example_mlp_config"]
    made = evaluated(recipe, queue, "float32")
    x, other = (values(5, 6, seed=seed) for seed in (3, 4))
    early = made.model.compile_forward(to_device(queue, x))
    wanted = [to_numpy(made.model(to_device(queue, array))) for array in (x, other)]
    with amp.init() as handle:
        same_values(early(to_device(queue, other, "float16")), wanted[1])
        made.model.invalidate_compiled()
        with ag.no_grad():
            made.model(to_device(queue, x))  # its weights are in the cache
        compiled = made.model.compile_forward(to_device(queue, x))
        handle.clear_cache()
        sizes = ((6, 8), (8, 3), (64,), (128,), (512,), (2048,))
        junk = [Tensor.from_shape(queue, size, dtype="float16", fill=9.0) for size in sizes * 4]
        for array, expected in zip((x, other), wanted, strict=True):
            same_values(compiled(to_device(queue, array)), expected)
            same_values(compiled(to_device(queue, array, "float16")), expected)
        again = made.model.compile_forward(to_device(queue, x, "float16"))
        assert again is not compiled
        same_values(again(to_device(queue, other, "float16")), wanted[1])
        del junk


def same_values(actual: Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(to_numpy(actual), expected, atol=0.01 * np.abs(expected).max())
