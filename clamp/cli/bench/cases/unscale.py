"""The loss scaler's pass over all gradients, and the launches it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import netcl.amp
import numpy as np
import pyopencl as cl
import wrapt

from clamp import bridge
from clamp.bridge import Tensor
from clamp.cli.bench.cases.contenders import Case, Contender, dtypes_of, random_tensor
from clamp.cli.bench.timing import timed
from clamp.scaling.loss_scale import DynamicLossScale

TENSORS = 100


def unscale_cases(queue: cl.CommandQueue, elements: int) -> Iterator[Case]:
    """The scaler's pass over the gradients of 100 parameters of mixed sizes, with its read of the result."""
    sizes = mixed_sizes(elements)
    holders = [_Holder(random_tensor(queue, (size,), "float32")) for size in sizes]
    # Scales of 1: gradients that are unscaled again and again must not shrink to subnormals.
    theirs = netcl.amp.GradScaler(init_scale=1.0)
    netcls = partial(theirs.unscale_grads, holders)
    contenders = [
        Contender("netcl", timed(netcls, queue.finish), is_baseline=True, extra=partial(_count_launches, netcls))
    ]
    for dtype in dtypes_of(queue):
        gradients = [random_tensor(queue, (size,), dtype) for size in sizes]
        # As scale_loss does it: float32 gradients in place, others into new ones.
        wide = gradients if dtype == "float32" else [bridge.empty(queue, (size,), "float32") for size in sizes]
        call = partial(_scaler_pass, DynamicLossScale(1.0), gradients, wide)
        contenders.append(
            Contender(f"clamp {dtype}", timed(call, queue.finish), extra=partial(_count_launches, call))
        )  # fmt: skip
    yield Case("unscale", f"{TENSORS} gradients, {sum(sizes)} elements", "ms", contenders)


def mixed_sizes(elements: int) -> list[int]:
    """Sizes of `TENSORS` gradients that spread as those of a network do: few large, many small."""
    weights = np.random.default_rng(1).pareto(0.8, TENSORS) + 0.01
    weights = np.minimum(weights, np.sort(weights)[-4])  # no single one outweighs the rest
    return [max(1, int(share * elements)) for share in weights / weights.sum()]


@dataclass
class _Holder:
    """What netcl's scaler takes for a parameter."""

    grad: Tensor


def _scaler_pass(scaler: DynamicLossScale, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    scaler.unscale_(sources, targets)
    scaler.update(1, 1)
    return scaler.overflowed(1)


def _count_launches(call: Callable[[], object]) -> dict[str, float]:
    with counted_launches() as launches:
        call()
    return {"launches": float(len(launches))}


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Collects the names of the kernels launched inside the ``with``, as netcl's capture does."""
    names: list[str] = []
    original = cl.Kernel.__call__

    def count(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names.append(instance.function_name)
        return wrapped(*args, **kwargs)

    setattr(cl.Kernel, "__call__", wrapt.FunctionWrapper(original, count))  # noqa: B010  (mypy: a method)
    try:
        yield names
    finally:
        setattr(cl.Kernel, "__call__", original)  # noqa: B010
