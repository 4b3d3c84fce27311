"""A dtype may be written as netcl, numpy or PyTorch write it, wherever clamp takes one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag

from clamp import amp
from clamp.bridge import Parameter, Tensor
from clamp.ranks.mpi import Ranks
from tests.networks import mlp

WRITTEN = {
    "float16": ("float16", "half", "fp16", np.float16, np.dtype("float16")),
    "bfloat16": ("bfloat16", "bf16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)),
    "float32": ("float32", "float", "fp32", np.float32, np.dtype(np.float32)),
}
WAYS = [pytest.param(name, dtype, id=f"{name}-{dtype!r}") for name, ways in WRITTEN.items() for dtype in ways]
NO_DTYPES = ("float64", "fp8", "int32", np.int32, np.float64, float, None, 16, object, [np.float16])


@pytest.mark.parametrize(("name", "dtype"), WAYS)
def test_init_autocast_and_cast_take_it(queue: cl.CommandQueue, name: str, dtype: Any) -> None:
    x = Tensor.from_host(queue, np.ones((2, 2), np.float32))
    with amp.init(dtype=dtype):
        assert amp.get_autocast_dtype() == name
        assert ag.matmul_op(ag.tensor(x), ag.tensor(x)).value.dtype == name
    with amp.autocast(dtype=dtype):
        assert amp.get_autocast_dtype() == name
    assert amp.cast(x, dtype).value.dtype == name


@pytest.mark.parametrize(("name", "dtype"), WAYS)
def test_the_other_faces_take_it(queue: cl.CommandQueue, name: str, dtype: Any) -> None:
    with amp.auto_cast(dtype=dtype):
        assert amp.get_autocast_dtype() == name
    model = mlp(queue, 4, 4)
    amp.decorate(model, level="O2", dtype=dtype, save_dtype=dtype)
    assert {param.dtype for param in model.parameters()} == {name}
    model = mlp(queue, 4, 4)
    amp.initialize(model, opt_level="O2", cast_model_type=dtype, cast_model_outputs=dtype, dtype=dtype, verbosity=0)
    assert {param.dtype for param in model.parameters()} == {name}
    assert model(Tensor.from_host(queue, np.ones((2, 4), np.float32))).value.dtype == name
    amp.shutdown()
    graph = amp.Graph()
    graph.config.enable_amp(dtype=dtype)
    assert graph.config.dtype == name
    with amp.init():
        seen = amp.custom_fwd(lambda x: x.value.dtype, cast_inputs=dtype)
        assert seen(Parameter.from_host(queue, np.ones(2, np.float32))) == name


@pytest.mark.parametrize("dtype", NO_DTYPES, ids=repr)
def test_what_is_no_dtype_of_clamps_is_refused(queue: cl.CommandQueue, dtype: Any) -> None:
    x = Tensor.from_host(queue, np.ones(2, np.float32))
    for call in (
        lambda: amp.init(dtype=dtype),
        lambda: amp.cast(x, dtype),
        lambda: amp.auto_cast(dtype=dtype),
        lambda: amp.decorate([], dtype=dtype),
        lambda: amp.initialize([], dtype=dtype),
    ):
        with pytest.raises(ValueError, match=r"unknown .*dtype .*: pass one of float16, bfloat16, float32"):
            call()


def test_gradients_travel_between_ranks_in_it() -> None:
    calls = ("Abort", "Bcast", "Alltoall", "Allgather", "Iallgather", "Ibarrier")
    meet = mock.Mock(side_effect=InterruptedError("the ranks are about to meet"))
    comm = SimpleNamespace(rank=0, size=2, Dup=meet, **dict.fromkeys(calls, mock.Mock()))
    for dtype in (None, np.float16, "bf16", "float"):
        with pytest.raises(InterruptedError):
            Ranks(comm, dtype)
    for dtype in (np.float64, "fp8", 16):
        with pytest.raises(ValueError, match="unknown reduce_dtype"):
            Ranks(comm, dtype)
