"""The engine plain, once it has been added: its numbers, a training with it, what `lists` and `doctor` say."""

from __future__ import annotations

import sys

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD

import clamp.cli.doctor
from clamp import amp
from clamp.bridge import Parameter
from clamp.cli import main
from clamp.ops.gemm import gemm
from tests.networks import learns, mlp
from tests.reference import assert_close, to_device, to_numpy


def check_numbers(queue: cl.CommandQueue) -> None:
    """A product and its gradients beside those of numpy's float64; and what the engine does not take."""
    rng = np.random.default_rng(0)
    a, b = (Parameter.from_host(queue, rng.standard_normal(shape, np.float32)) for shape in ((5, 7), (7, 3)))
    with amp.init(loss_scale=256.0) as handle:
        y = ag.matmul_op(ag.tensor(a, requires_grad=True), ag.tensor(b, requires_grad=True))
        with handle.scale_loss(ag.sum(y), SGD([a, b])) as scaled_loss:
            scaled_loss.backward()
    left, right = (to_numpy(x).astype(np.float16).astype(np.float64) for x in (a, b))
    slack = 7 * 2.0**-24 * (np.abs(left) @ np.abs(right))
    assert_close(y.value, left @ right, slack=slack)
    assert_close(a.grad, np.ones((5, 3)) @ right.T, slack=1e-5)
    assert_close(b.grad, left.T @ np.ones((5, 3)), slack=1e-5)
    narrow = [to_device(queue, x, "float16") for x in (left, right)]
    assert_close(gemm(*narrow, out_dtype="float32", engine="plain"), left @ right, slack=slack)
    with pytest.raises(ValueError, match="it takes float16 by float16"):
        gemm(a, b, out_dtype="float32", engine="plain")


if __name__ == "__main__":
    context = cl.create_some_context(interactive=False)
    queue = cl.CommandQueue(context)
    check_numbers(queue)
    assert learns(queue, mlp(queue, 8, 16, 4))
    assert main(["lists", "matmul_op", "--device", context.devices[0].name]) == 0
    clamp.cli.doctor.list_devices = lambda: context.devices  # type: ignore[return-value]
    assert main(["doctor"]) == 0
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/opencl/test_macros.py", "-k", "simple_kernel"]))
