"""softsign, once it has been added: its numbers, a training with it, what `lists` says, its row of the table."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import Linear, Module, Sequential
from netcl.optim import SGD

import tests.additions.newer_netcl  # before clamp asks for the arguments of its function
from clamp import amp
from clamp.bridge import Parameter
from clamp.cli import main
from tests.networks import learns
from tests.reference import HALF_DTYPES, assert_close, quantize, ulp


class Softsign(Module):
    """A layer of it."""

    def forward(self, x: Any) -> Any:
        """x / (1 + |x|)."""
        return ag.softsign(x)


def check_numbers(queue: cl.CommandQueue, dtype: str) -> None:
    """Result and gradient of a call under AMP beside those of numpy's float64."""
    host = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 4
    x = Parameter.from_host(queue, host)
    with amp.init(dtype=dtype, loss_scale=256.0) as handle:
        y = ag.softsign(amp.cast(ag.tensor(x, requires_grad=True), dtype))
        with handle.scale_loss(ag.sum(y), SGD([x])) as scaled_loss:
            scaled_loss.backward()
    assert (y.value.dtype, x.grad.dtype) == (dtype, "float32")
    below = 1 + np.abs(quantize(host, dtype).astype(np.float64))
    assert_close(y.value, np.sign(host) * (below - 1) / below)
    assert_close(x.grad, below**-2, slack=ulp(below**-2, dtype))  # it went through the cast


def make_model(queue: cl.CommandQueue) -> Sequential:
    """A network with it."""
    np.random.seed(0)
    return Sequential(Linear(queue, 8, 16), Softsign(), Linear(queue, 16, 4))


if __name__ == "__main__":
    context = cl.create_some_context(interactive=False)
    queue = cl.CommandQueue(context)
    for dtype in HALF_DTYPES:
        check_numbers(queue, dtype)
        assert learns(queue, make_model(queue), dtype=dtype)
    assert main(["lists", "softsign"]) == 0
    tests = ["tests/conformance", "tests/opencl/test_macros.py", "-k", "softsign or simple_kernel"]
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *tests]))
