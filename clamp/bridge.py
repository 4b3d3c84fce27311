"""The one module that knows netcl's internals: tensors, nodes, tapes, optimizers, writes.

A new netcl release is met here. The rest of clamp speaks in the names below.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, TypeAlias

import pyopencl as cl
from netcl.autograd import compiler, engine
from netcl.autograd import ops as recorded_ops
from netcl.autograd.engine import Node, Tape
from netcl.core.parameter import Parameter
from netcl.core.tensor import Tensor
from netcl.core.tensor import reshape as _reshape

__all__ = ["Node", "Parameter", "Tape", "Tensor", "TensorLike", "compiler", "recorded_ops"]

TensorLike: TypeAlias = Node | Tensor

#: netcl's names for a storage type -> the name kernels use (common.clh).
STORAGE = {
    "float32": "f32",
    "float": "f32",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
}
HALF_DTYPES = frozenset({"float16", "half", "bfloat16"})
_CANONICAL = {"float": "float32", "half": "float16", "double": "float64", "int": "int32"}
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "float64": 8, "int64": 8}


def canonical_dtype(dtype: str) -> str:
    """netcl's dtype without its aliases: ``"half"`` -> ``"float16"``."""
    return _CANONICAL.get(dtype, dtype)


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements (its pooled buffer may be larger)."""
    return tensor.size * _ITEMSIZE[canonical_dtype(tensor.dtype)]


# ---------------------------------------------------------------------------------------------- tensors


def empty(queue: cl.CommandQueue, shape: Sequence[int], dtype: str) -> Tensor:
    """A device tensor with undefined content, from netcl's pool."""
    return Tensor.from_shape(queue, shape, dtype=dtype)


def zeros(queue: cl.CommandQueue, shape: Sequence[int], dtype: str) -> Tensor:
    """A device tensor of zeros, from netcl's pool."""
    return Tensor.from_shape(queue, shape, dtype=dtype, fill=0.0)


def view(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The same buffer under another shape of as many elements.

    Raises:
        ValueError: the number of elements differs.
    """
    shape = tuple(int(extent) for extent in shape)
    if prod(shape) != tensor.size:
        raise ValueError(
            f"cannot view a tensor of shape {tensor.shape} as {shape}: {tensor.size} elements against {prod(shape)}"
        )
    return _reshape(tensor, shape)


def on_device(tensor: Tensor) -> bool:
    """Whether the tensor lives on an OpenCL device (netcl's "cpu" backend computes in numpy)."""
    return bool(tensor.backend == "cl")


def require_same_queue(name: str, *tensors: Tensor) -> cl.CommandQueue:
    """The one queue all tensors live on.

    Raises:
        ValueError: they live on different queues or devices.
    """
    queue = tensors[0].queue
    for tensor in tensors[1:]:
        if tensor.queue is not queue and tensor.queue != queue:
            raise ValueError(
                f"{name}: the tensors are on different queues or devices "
                f"({_place(tensors[0])} and {_place(tensor)}); copy them to one queue first"
            )
    return queue


def _place(tensor: Tensor) -> str:
    device = getattr(tensor.queue, "device", None)
    return f"{device.name}, queue {tensor.queue.int_ptr:#x}" if device is not None else "numpy backend"


# ---------------------------------------------------------------------------------------------- autograd


def value_of(x: TensorLike) -> Any:
    """The tensor of a node, or the tensor itself. (netcl's tracer puts its own objects into nodes.)"""
    return x.value


def is_leaf(x: TensorLike) -> bool:
    """Whether x was not computed by a recorded op: a bare tensor, a parameter's node, an input's node."""
    return not isinstance(x, Node) or (x.grad_fn is None and not x.parents)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor lives from one iteration to the next: a parameter, or a leaf that is trained."""
    return isinstance(tensor, Parameter) or is_trained(tensor)


def is_trained(tensor: Tensor) -> bool:
    """Whether a leaf wants a gradient: it requires one, or an optimizer holds it.

    netcl's engine gives a gradient to every leaf, and netcl's own ResNet trains plain tensors that never said that
    they require one. Its optimizers leave a link on every tensor they are given.
    """
    if tensor.requires_grad:
        return True
    held = not isinstance(tensor, Parameter) and "_model_param" in vars(tensor)
    return held and not getattr(tensor, "_frozen", False)


def mark_trained(tensor: Tensor) -> None:
    """Leaves the link that netcl's optimizers leave, on a tensor that an optimizer of the user's holds."""
    tensor._model_param = tensor


def needs_grad(x: TensorLike) -> bool:
    """Whether backward must deliver a gradient to x: a computed node, or a leaf that requires one."""
    if not isinstance(x, Node):
        return is_trained(x)
    return x.grad_fn is not None or x.requires_grad or (isinstance(x.value, Tensor) and is_trained(x.value))


def make_node(
    value: Tensor,
    backward: Callable[[Tensor], list[Tensor | None]],
    parents: Sequence[TensorLike],
    op_name: str,
    tape: Tape | None = None,
) -> TensorLike:
    """Records a computed value, as netcl's ``apply_op`` would.

    ``backward`` takes the gradient of value and returns one gradient (or None) for each of ``parents``.
    Where nothing needs a gradient the node is a plain leaf, so no backward runs for input batches. Without
    grad mode, or when every parent is a bare tensor, the value itself is returned, as netcl does.
    """
    nodes = [parent for parent in parents if isinstance(parent, Node)]
    if not nodes or not engine.is_grad_enabled():
        return value
    if len(nodes) != len(parents):
        backward = _only_for_nodes(backward, [isinstance(parent, Node) for parent in parents])
    if not any(needs_grad(node) for node in nodes):
        return Node(value=value, op_name=op_name)
    node = Node(value=value, grad_fn=backward, parents=nodes, requires_grad=True, op_name=op_name)
    if engine._detect_anomaly:
        node.creation_trace = traceback.format_stack()
    tape = tape or engine.get_current_tape()
    if tape is not None:
        tape.record(node)
    return node


def _only_for_nodes(
    backward: Callable[[Tensor], list[Tensor | None]], is_node: list[bool]
) -> Callable[[Tensor], list[Tensor | None]]:
    """netcl pairs gradients with parent nodes; bare tensors among the inputs have no place in that list."""

    def node_gradients(grad: Tensor) -> list[Tensor | None]:
        return [g for g, keep in zip(backward(grad), is_node, strict=True) if keep]

    return node_gradients


# --------------------------------------------------------------------------------------------- optimizers


def optimizer_parameters(optimizer: Any) -> list[Tensor]:
    """The tensors that ``optimizer.step()`` updates.

    Raises:
        TypeError: the optimizer has no ``params``, or they are not tensors.
    """
    params = getattr(optimizer, "params", None)
    if params is None:
        raise TypeError(
            f"{type(optimizer).__name__} has no `params`: clamp needs the list of tensors that its step() updates. "
            "Pass a netcl optimizer, or give yours an attribute `params`."
        )
    params = list(params)
    for index, param in enumerate(params):
        if not isinstance(param, Tensor):
            raise TypeError(
                f"{type(optimizer).__name__}.params[{index}] is a {type(param).__name__}, not a netcl Tensor"
            )
    return params


def model_parameter(param: Tensor) -> Tensor:
    """The tensor that the model reads and backward gives a gradient to; for an fp32 parameter, itself.

    For a 16-bit parameter netcl's optimizers update an fp32 master instead and keep a link to the model's.
    """
    return getattr(param, "_model_param", param)


def graph(root: Node) -> Iterator[Node]:
    """Every node below root, root included, in no particular order."""
    seen = {id(root)}
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        for parent in node.parents:
            if id(parent) not in seen:
                seen.add(id(parent))
                stack.append(parent)
