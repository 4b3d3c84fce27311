"""netcl.distributed under AMP: several queues, on one device or several, in one process.

netcl's collectives read tensors to the host, which queues of different devices have in common, and write float32 back
into whatever lies there; that of its sums on one device races between queues, forgets to divide for a mean, and hands
out undefined memory for a single tensor. These write each tensor in its own dtype, and add in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import wrapt

from clamp import bridge
from clamp.bridge import Tensor
from clamp.ops.concat import Part, assemble, split
from clamp.params import masters
from clamp.params.gradient_marks import scale_of
from clamp.patching.patch_registry import meets
from clamp.scaling.step_guard import StepGuards

Array: TypeAlias = npt.NDArray[Any]

_OPERATIONS = ("sum", "mean")


@meets("netcl.distributed.collectives.all_reduce", "netcl.distributed.collectives.all_reduce_p2p")
def all_reduce(wrapped: Any, instance: None, /, tensors: Sequence[Any], op: str = "sum", *overlap: bool) -> Any:
    """The sum or mean, in every tensor."""
    if not tensors or not all(map(bridge.is_floating, tensors)):
        return wrapped(tensors, op, *overlap)
    _require_alike(tensors, "all_reduce")
    if op.lower() not in _OPERATIONS:
        raise ValueError(f"unsupported all_reduce op {op}: pass one of {', '.join(_OPERATIONS)}")
    with _showing_masters(tensors):
        total = _sum(_numbers(tensor) for tensor in tensors)
        if op.lower() == "mean":
            total = total / np.float32(len(tensors))
        for tensor in tensors:
            _write_numbers(tensor, total)
    return tensors


@meets("netcl.distributed.collectives.broadcast")
def broadcast(wrapped: Any, instance: None, /, tensor: Any, root: int = 0) -> Any:
    """One tensor's values in all of a list, each in its own dtype."""
    if not isinstance(tensor, list) or not all(map(bridge.is_floating, tensor)):
        return wrapped(tensor, root)
    _require_alike(tensor, "broadcast")
    with _showing_masters(tensor):
        numbers = _numbers(tensor[root])
        for index, target in enumerate(tensor):
            if index != root % len(tensor):
                _write_numbers(target, numbers)
    return tensor


def _showing_masters(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Inside the ``with``, 16-bit parameters among these are their masters; gradients stay as they are."""
    return masters.showing_masters([x for x in tensors if bridge.master_of(x) is not None], load=True)


def _write_numbers(tensor: Tensor, numbers: Array) -> None:
    bridge.write_bytes(tensor, bridge.to_words(numbers, bridge.canonical_dtype(tensor.dtype)).view(np.uint8))


def sync_grads(own: Callable[..., None], param_replicas: Sequence[Sequence[Tensor]]) -> None:
    """Each gradient becomes the mean over the replicas, the same bits in all.

    One read and one write a replica, however many parameters there are.

    Args:
        own: netcl's function, for gradients that clamp has no kernels for.

    Raises:
        ValueError: the replicas differ in their parameters, or a gradient is missing.
        RuntimeError: a gradient is multiplied by a loss scale on some replicas only.
    """
    gradients = _gradients(param_replicas)
    if not gradients or not all(bridge.is_floating(gradient) for replica in gradients for gradient in replica):
        own(param_replicas)
        return
    total = _sum(_read_all(replica) for replica in gradients)
    total /= np.float32(len(gradients))
    for replica in gradients:
        _write_all(replica, total)


def _require_alike(tensors: Sequence[Tensor], name: str) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{name}: the tensors have different shapes: {shapes}")


def _gradients(param_replicas: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The gradients of all replicas; none where there is nothing to average."""
    if len(param_replicas) <= 1:
        return []
    shapes = [[tuple(param.shape) for param in replica] for replica in param_replicas]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"sync_grads: the replicas have different parameters: shapes {shapes}")
    for number, replica in enumerate(param_replicas):
        for index, param in enumerate(replica):
            if param.grad is None:
                raise ValueError(
                    f"sync_grads expects grad populated: parameter {index} of replica {number} has none. Run backward "
                    "on every replica first; leave parameters that are not trained out of the lists."
                )
    for index, params in enumerate(zip(*param_replicas, strict=True)):
        if len({scale_of(param.grad) is None for param in params}) > 1:
            raise RuntimeError(
                f"sync_grads: the gradient of parameter {index} is multiplied by a loss scale on some replicas and not "
                "on others, so that they cannot be averaged: end every `with handle.scale_loss(...)` first"
            )
    return [[param.grad for param in replica] for replica in param_replicas if replica]


def _sum(terms: Iterable[Array]) -> Array:
    """In float32, in the order given."""
    with np.errstate(over="ignore", invalid="ignore"):  # inf and nan are for the loss scale to find
        iterator = iter(terms)
        total = next(iterator).copy()
        for term in iterator:
            total += term
        return total


def _numbers(tensor: Tensor) -> npt.NDArray[np.float32]:
    """A tensor's elements on the host, as a line of float32."""
    dtype = bridge.canonical_dtype(tensor.dtype)
    words = np.uint16 if dtype in bridge.HALF_DTYPES else np.uint32
    return bridge.from_words(bridge.read_bytes(tensor).view(words), dtype)


def _read_all(tensors: Sequence[Tensor]) -> Array:
    parts, total = [], 0
    for tensor in tensors:
        parts.append(Part(total, tensor.size, bridge.view(tensor, (tensor.size,))))
        total += tensor.size
    return _numbers(assemble(tensors[0].queue, (total,), 0, parts, "float32"))


def _write_all(tensors: Sequence[Tensor], numbers: Array) -> None:
    together = bridge.empty(tensors[0].queue, numbers.shape, "float32")
    bridge.write_bytes(together, numbers.view(np.uint8))
    ends = np.cumsum([tensor.size for tensor in tensors])
    split(
        together,
        0,
        [(int(end) - tensor.size, tensor.size) for end, tensor in zip(ends, tensors, strict=True)],
        out_dtypes=[bridge.canonical_dtype(tensor.dtype) for tensor in tensors],
        outs=[bridge.view(tensor, (tensor.size,)) for tensor in tensors],
    )
    together.queue.finish()  # other queues of the context may get the memory that is freed here


# ---------------------------------------------------------------------------------------------- replicas


class ScaledTape(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A tape whose backward runs from the scaled loss.

    Args:
        scale: ``with scale(loss) as scaled_loss`` scales, and unscales the gradients at its end.
    """

    def __init__(self, tape: Any, scale: Callable[[Any], AbstractContextManager[Any]]) -> None:
        super().__init__(tape)
        self._self_scale = scale

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Runs ``Tape.backward``."""
        with self._self_scale(loss) as scaled_loss:
            self.__wrapped__.backward(scaled_loss, *args, **kwargs)


def share_overflows(guards: StepGuards, param_replicas: Iterable[Sequence[Tensor]]) -> None:
    """An overflow of one replica, whose gradients are part of a mean now, becomes that of all, so that they skip the
    same step and go on with one scale.

    Args:
        param_replicas: the parameters of one model's replicas, each on its own queue, after as many passes.
    """
    stepping = [guard for guard in map(guards.stepping, param_replicas) if guard is not None]
    for scalers in zip(*(guard.pending for guard in stepping), strict=False):
        states = [scaler.read() for scaler in scalers]
        bad = [state for guard, state in zip(stepping, states, strict=True) if state.overflow & guard.mask]
        # A copy of the scale that was made after the first replica's pass has counted one clean step more.
        differ = len({(state.scale, state.growth_tracker) for state in states}) > 1
        for guard, scaler in zip(stepping, scalers, strict=True) if bad or differ else ():
            scaler.follow(*((bad[0], guard.mask) if bad else (min(states), 0)))


def keep_equal(param_replicas: Sequence[Sequence[Tensor]]) -> None:
    """Copies the first replica's parameters to replicas on other devices, which round a step differently."""
    if not param_replicas or not all(bridge.on_device(param) for params in param_replicas for param in params):
        return
    first = param_replicas[0]
    for params in param_replicas[1:]:
        for param, source in zip(params, first, strict=True):
            if param.queue.device != source.queue.device:
                for target, origin in zip(_values(param), _values(source), strict=True):
                    bridge.write_bytes(target, bridge.read_bytes(origin))


def _values(param: Tensor) -> list[Tensor]:
    """A parameter, and its master if it has one."""
    other = bridge.master_of(param) or bridge.model_parameter(param)
    return [param] if other is param else [param, other]
