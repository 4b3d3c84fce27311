"""Losses of metric learning under autograd: netcl's values, gradients that follow the incoming one, no host reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import netcl.autograd as ag
import numpy as np
import pyopencl as cl
import pytest

from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import Casting
from clamp.casting.policies import Float
from clamp.functions import metric_loss as F
from tests.functions.operands import leaf
from tests.reference import assert_close, to_device, to_numpy

RNG = np.random.default_rng(0)
FIRST, SECOND, THIRD = (RNG.standard_normal((9, 6)) * 0.5 for _ in range(3))
CLASSES = np.array([0, 2, 1, 0, 0, 1, 2, 1, 3])
ALIKE = np.array([1, 0, 0, 1, 0, 1, 1, 0, 0])
EPS = 2.0**-24


class Loss:
    """A call: clamp's function, netcl's own, the embeddings, what follows them, keywords."""

    def __init__(self, name: str, embeddings: tuple[np.ndarray, ...], *rest: Any, **kwargs: Any) -> None:
        self.function: Callable[..., Any] = getattr(F, name)
        self.netcls: Callable[..., Any] = getattr(ag, name)
        self.embeddings, self.rest, self.kwargs = embeddings, rest, kwargs
        self.label = f"{name}-{'-'.join(map(str, kwargs.values()))}"


LOSSES = [
    Loss("triplet_loss", (FIRST, SECOND, THIRD), margin=0.5),
    Loss("triplet_loss", (FIRST, SECOND, THIRD), distance="euclidean", reduction="sum"),
    Loss("contrastive_loss", (FIRST, SECOND), ALIKE, margin=2.0),
    Loss("contrastive_loss", (FIRST, SECOND), ALIKE, margin=1.5, reduction="sum"),
    Loss("batch_hard_triplet_loss", (FIRST,), CLASSES),
    Loss("batch_hard_triplet_loss", (FIRST,), CLASSES, distance="euclidean", reduction="sum"),
    Loss("batch_all_triplet_loss", (FIRST,), CLASSES),
    Loss("batch_all_triplet_loss", (FIRST,), CLASSES, distance="euclidean", reduction="sum"),
    Loss("info_nce_loss", (FIRST, SECOND), temperature=0.2),
    Loss("info_nce_loss", (FIRST, SECOND), temperature=0.5, normalize=False, reduction="sum", symmetric=True),
    Loss("pairwise_squared_distances", (FIRST, SECOND)),
    Loss("pairwise_squared_distances", (FIRST,)),
]
losses = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.label)


def leaves(queue: cl.CommandQueue, loss: Loss, *dtypes: str) -> list[Node]:
    """The embeddings, in these dtypes in turn."""
    return [leaf(queue, x, dtypes[i % len(dtypes)]) for i, x in enumerate(loss.embeddings)]


def backward(loss: Any, tape: Tape, seed: float) -> Any:
    tape.backward(loss, to_device(loss.value.queue, np.full(loss.value.shape, seed)))
    return loss


def run(loss: Loss, nodes: list[Node], seed: float = 1.0, casting: Casting | None = None, **kwargs: Any) -> Node:
    tape = Tape()
    out = loss.function(casting or Float(), *nodes, *loss.rest, **loss.kwargs, **kwargs, tape=tape)
    return backward(out, tape, seed)


@losses
def test_in_fp32_as_netcl(queue: cl.CommandQueue, loss: Loss) -> None:
    # netcl's numpy backend: its l2 norm, and with it InfoNCE, crashes on PoCL.
    on_host = {"dtype": "float32", "backend": "cpu"}
    own = [Node(value=Tensor.from_host(None, x.astype(np.float32), **on_host)) for x in loss.embeddings]
    clamps, tape = leaves(queue, loss, "float32"), Tape()
    expected = loss.netcls(*own, *loss.rest, **loss.kwargs, tape=tape)
    tape.backward(expected, Tensor.from_host(None, np.full(expected.value.shape, 2, np.float32), **on_host))
    result = run(loss, clamps, 2.0)
    assert_close(result.value, to_numpy(expected.value), ulps=8, slack=64 * EPS)
    for mine, netcls in zip(clamps, own, strict=True):
        # netcl's gradient of contrastive_loss divides by d + 1e-8 in place of d.
        assert_close(mine.grad, to_numpy(netcls.grad), slack=256 * EPS * np.abs(to_numpy(netcls.grad)).max())


@pytest.mark.parametrize("kind", ["list", "int64 array", "large int64 array", "float tensor", "int64 tensor", "node"])
def test_labels_of_any_kind(queue: cl.CommandQueue, kind: str) -> None:
    labels: Any = {
        "list": lambda: CLASSES.tolist(),
        "int64 array": lambda: CLASSES,
        "large int64 array": lambda: CLASSES + 2**40,
        "float tensor": lambda: Tensor.from_host(queue, CLASSES.astype(np.float32)),
        "int64 tensor": lambda: Tensor.from_host(queue, CLASSES + 2**40, dtype="int64"),
        "node": lambda: Node(value=Tensor.from_host(queue, CLASSES.astype(np.int32), dtype="int32")),
    }[kind]()
    x = to_device(queue, FIRST)
    for function in (F.batch_hard_triplet_loss, F.batch_all_triplet_loss):
        expected = function(Float(), x, CLASSES)
        np.testing.assert_array_equal(to_numpy(function(Float(), x, labels)), to_numpy(expected))


def test_distances_within_one_matrix_count_both_of_its_roles(queue: cl.CommandQueue) -> None:
    x, one, two = leaf(queue, FIRST), leaf(queue, FIRST), leaf(queue, FIRST)
    for args in ((x,), (one, two)):
        tape = Tape()
        backward(F.pairwise_squared_distances(Float(), *args, tape=tape), tape, 1.0)
    assert_close(x.grad, to_numpy(one.grad) + to_numpy(two.grad), slack=64 * EPS)


def test_netcls_labels_go_through_the_host_and_its_gradient_too(queue: cl.CommandQueue) -> None:
    """Why these are owned: every one of netcl's reads its inputs, or its incoming gradient, on the host."""
    reads: list[Tensor] = []
    own = Tensor.to_host
    x = leaf(queue, FIRST)
    tape = Tape()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to_host", lambda self: reads.append(self) or own(self))
        tape.backward(ag.batch_all_triplet_loss(x, CLASSES, tape=tape))
    assert reads
