"""Work-groups that run at once have scratch memory of their own: sums that shared it would mostly come out right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.ops.indexing import topk
from tests.ops import conv_reference, gemm_reference, test_attention
from tests.ops.gemm_reference import random
from tests.poison import Poison
from tests.reference import to_device

pytestmark = pytest.mark.kernel

_UNWRITTEN = -1  # the word that tests fill memory with


class Watched:
    """What is allocated, and how many work-groups each launch that is given it has."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._poison = Poison()
        self._made: list[Tensor] = []
        self._launches: list[tuple[int, Sequence[Any]]] = []
        call = cl.Kernel.__call__

        def allocate(queue: cl.CommandQueue, shape: Sequence[int], dtype: str) -> Tensor:
            self._made.append(self._poison.empty(queue, shape, dtype))
            return self._made[-1]

        def launch(
            kernel: cl.Kernel, queue: cl.CommandQueue, groups: Any, local: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._launches.append((prod(groups) // prod(local), args))
            return call(kernel, queue, groups, local, *args, **kwargs)

        patch.setattr(bridge, "empty", allocate)
        patch.setattr(cl.Kernel, "__call__", launch)

    def scratch(self) -> dict[int, np.ndarray]:
        """Number of work-groups -> what one launch alone has been given, flat words of 32 bits."""
        found = {}
        for tensor in self._made:
            users = [groups for groups, args in self._launches if any(arg is tensor.buffer for arg in args)]
            if len(users) == 1 and len(tensor.shape) == 1 and tensor.dtype in ("float32", "int32"):
                found[users[0]] = np.ascontiguousarray(tensor.to_host()).view(np.int32)
        return found


def _gemm(engine: str, k: int, dtype: str) -> Callable[[cl.CommandQueue], Any]:
    types = dtype, dtype, "float32"
    return lambda queue: gemm_reference.check(queue, random(3, 13, k), random(3, k, 70, seed=1), types, engine=engine)


def _conv(engine: str) -> Callable[[cl.CommandQueue], Any]:
    case = conv_reference.Case(4, 32, 64, (16, 16), (3, 3), pad=(1, 1))
    return lambda queue: conv_reference.check(queue, case, engine)


def _attention(queue: cl.CommandQueue) -> None:
    tensors = test_attention.normal(queue, 1, (1, 1, 131, 33), *["float16"] * 4)
    test_attention.check(tensors, True, None, "float16", ("float16",) * 3)


@pytest.mark.parametrize(
    ("compute", "needs_dot"),
    [
        pytest.param(_gemm("packed", 600, "float16"), False, id="gemm packed"),
        pytest.param(_gemm("dot_bf16", 4200, "bfloat16"), True, id="gemm dot_bf16"),
        pytest.param(_conv("packed"), False, id="conv packed"),
        pytest.param(_conv("winograd"), False, id="conv winograd"),
        pytest.param(_conv("dot_bf16"), True, id="conv dot_bf16"),
        pytest.param(_attention, False, id="attention"),
        pytest.param(lambda queue: topk(to_device(queue, random(40, 50)), 7), False, id="topk"),
    ],
)
def test_each_work_group_writes_its_part(
    queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch, compute: Any, needs_dot: bool
) -> None:
    if simulated or not capabilities(queue).is_cpu or (needs_dot and not capabilities(queue).dot_bf16):
        pytest.skip("the simulator sees races; GPUs take other kernels")
    watched = Watched(monkeypatch)
    compute(queue)
    scratch = watched.scratch()
    assert scratch
    for groups, words in scratch.items():
        assert groups > 1
        for number, part in enumerate(np.array_split(words, groups)):
            assert (part != _UNWRITTEN).any(), f"work-group {number} of {groups} has written no scratch memory"
