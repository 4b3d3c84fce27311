"""wide_range, once it has been added: a product that float16 cannot hold, a user's function, a training."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyopencl as cl
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node, Parameter
from clamp.casting.policy_table import read_list
from clamp.cli.lists import runs_as
from tests.networks import learns, mlp
from tests.reference import to_device, to_numpy

LIST = """
[wide_range]
"netcl.autograd.matmul_op" = "Its products leave float16's range."
"""


def dtype_of(x: Node) -> str:
    """A function of a user's."""
    return str(x.value.dtype)


def check_numbers(queue: cl.CommandQueue) -> None:
    """A product beyond 65504 and its gradient, and what a registered function gets."""
    weight = Parameter.from_host(queue, np.full((2, 3), 256.0, np.float32))
    x = ag.tensor(to_device(queue, np.full((4, 2), 192.0), "float16"))
    amp.register(sys.modules[__name__], "dtype_of", "wide_range")
    with amp.init(lists="mine.toml") as handle:
        y = ag.matmul_op(x, ag.tensor(weight, requires_grad=True))
        with handle.scale_loss(ag.sum(y), SGD([weight])) as scaled_loss:
            scaled_loss.backward()
        assert dtype_of(x) == "bfloat16"
    assert (y.value.dtype, weight.grad.dtype) == ("bfloat16", "float32")
    np.testing.assert_array_equal(to_numpy(y.value), np.full((4, 3), 2 * 192.0 * 256))
    np.testing.assert_array_equal(to_numpy(weight.grad), np.full((2, 3), 4 * 192.0))


if __name__ == "__main__":
    context = cl.create_some_context(interactive=False)
    Path("mine.toml").write_text(LIST, encoding="utf-8")
    queue = cl.CommandQueue(context)
    check_numbers(queue)
    assert learns(queue, mlp(queue, 8, 16, 4), lists="mine.toml")
    (entry,) = read_list("mine.toml")
    print(f"{entry.name} runs as {runs_as(entry, 'float16')}")
