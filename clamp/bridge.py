"""The one module that knows netcl's internals: tensors, nodes, tapes, optimizers, writes.

A new netcl release is met here. The rest of clamp speaks in the names below.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeAlias

import numpy as np
import pyopencl as cl
from netcl.autograd import compiler, engine, no_grad
from netcl.autograd import ops as recorded_ops
from netcl.autograd.engine import Node, Tape
from netcl.autograd.graph import CompiledGraph
from netcl.core import transfer
from netcl.core.parameter import Parameter
from netcl.core.tensor import Tensor
from netcl.core.tensor import reshape as _reshape
from netcl.nn.batchnorm import BatchNorm2dModule as BatchNorm2d
from netcl.nn.layers import Module
from netcl.nn.state import invalidate_derived
from netcl.ops.bf16_act import from_bf16_host, to_bf16_host
from netcl.optim import adamw
from netcl.optim._utils import is_frozen_param as is_frozen

__all__ = [
    "BatchNorm2d",
    "CompiledGraph",
    "Node",
    "Parameter",
    "Tape",
    "Tensor",
    "TensorLike",
    "compiler",
    "invalidate_derived",
    "is_frozen",
    "no_grad",
    "recorded_ops",
]

TensorLike: TypeAlias = Node | Tensor

#: a dtype as users write it; `dtype_name` reads it
DTypeLike: TypeAlias = str | type | np.dtype[Any]

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
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "float64": 8, "int64": 8}


def canonical_dtype(dtype: str) -> str:
    """netcl's dtype without its aliases: ``"half"`` -> ``"float16"``."""
    return _CANONICAL.get(dtype, dtype)


def dtype_name(dtype: object) -> object:
    """netcl's name of a dtype as users write it: ``np.float16``, ``np.dtype("float16")``, ``"half"``, ``"fp16"``.

    What is no dtype comes back as it is, for the caller to refuse.
    """
    if isinstance(dtype, str):
        return canonical_dtype(_SHORT.get(dtype, dtype))
    if isinstance(dtype, type | np.dtype):
        try:
            return np.dtype(dtype).name
        except TypeError:  # a class that numpy knows nothing of
            return dtype
    return dtype


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements (its pooled buffer may be larger)."""
    return tensor.size * _ITEMSIZE[canonical_dtype(tensor.dtype)]


# ---------------------------------------------------------------------------------------------- tensors


_from_shape = Tensor.from_shape  # netcl's own: a user's goes through clamp/patching/engine.py


def empty(queue: cl.CommandQueue, shape: Sequence[int], dtype: str) -> Tensor:
    """A device tensor with undefined content, from netcl's pool."""
    return _from_shape(queue, shape, dtype=dtype)


def zeros(queue: cl.CommandQueue, shape: Sequence[int], dtype: str) -> Tensor:
    """A device tensor of zeros, from netcl's pool."""
    return _from_shape(queue, shape, dtype=dtype, fill=0.0)


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


def read_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A tensor's elements on the host, as they are stored."""
    host = np.empty(nbytes(tensor), np.uint8)
    if not on_device(tensor):
        host[:] = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)
    elif host.size:
        transfer.read(tensor.queue, host, tensor.buffer)
    return host


def write_bytes(tensor: Tensor, host: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Overwrites a tensor with bytes that ``read_bytes`` returned for one of its shape and dtype. Waits for the device.

    Raises:
        ValueError: the number of bytes differs.
    """
    if host.size != nbytes(tensor):
        raise ValueError(f"{host.size} bytes for a {tensor.dtype} tensor of shape {tuple(tensor.shape)}")
    if not on_device(tensor):
        tensor.array[...] = host.view(tensor.array.dtype).reshape(tensor.array.shape)
    elif host.size:
        transfer.write(tensor.queue, tensor.buffer, np.ascontiguousarray(host))


def rounded_to_bfloat16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 numbers rounded to bfloat16, still as float32."""
    return from_bf16_host(to_bf16_host(array))


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
    return held and not has_frozen_mark(tensor)


def has_frozen_mark(tensor: Tensor) -> bool:
    """Whether netcl's mark is on a tensor that is not to be trained, whatever its ``requires_grad`` says."""
    return bool(getattr(tensor, "_frozen", False))


def freeze_like(master: Tensor, model: Tensor) -> None:
    """Puts netcl's mark on a master, or takes it off, as its 16-bit parameter is frozen or not."""
    master._frozen = is_frozen(model)


def mark_trained(tensor: Tensor) -> None:
    """Leaves the link that netcl's optimizers leave, on a tensor that an optimizer of the user's holds."""
    tensor._model_param = tensor


def needs_grad(x: TensorLike) -> bool:
    """Whether backward must deliver a gradient to x: a computed node, or a leaf that requires one."""
    if not isinstance(x, Node):
        return is_trained(x)
    return x.grad_fn is not None or x.requires_grad or (isinstance(x.value, Tensor) and is_trained(x.value))


def is_cut(node: Node) -> bool:
    """Whether a node was computed by a recorded op whose tape is gone: netcl cuts a tape's graph when it dies.

    One that was computed from nothing that is trained looks alike, unless its ``requires_grad`` tells.
    """
    return is_leaf(node) and node.op_name is not None


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


# ---------------------------------------------------------------------------------------------- modules


def is_module(x: Any) -> bool:
    """Whether x is a netcl layer or model."""
    return isinstance(x, Module)


def module_classes() -> Iterator[type]:
    """The classes of all layers and models that are defined, netcl's and the user's."""
    stack, seen = [Module], set()
    while stack:
        cls = stack.pop()
        if cls not in seen:
            seen.add(cls)
            stack += cls.__subclasses__()
            yield cls


def module_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a model, each once, with their names: ``("layers.0.weight", tensor)``.

    Buffers are the public tensors that netcl's ``state_dict`` saves, such as the statistics of a batch norm.
    """
    return _tensors_below(module, "", set())


def _tensors_below(x: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(x, Tensor | Module | list | tuple | dict) or id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        *_, last = name.split(".")
        if is_weight(x) or not last.startswith("_"):
            yield name, x
        return
    parts: Any = vars(x) if isinstance(x, Module) else x
    hidden = getattr(x, "_non_persistent_buffers_set", None) or ()
    for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
        if key not in hidden:
            yield from _tensors_below(part, f"{name}.{key}" if name else str(key), seen)


# --------------------------------------------------------------------------------------------- optimizers


def is_optimizer(x: Any) -> bool:
    """Whether x steps parameters: it has a list of them, and a ``step()``."""
    return (
        not is_module(x) and isinstance(getattr(x, "params", None), list | tuple) and callable(getattr(x, "step", None))
    )


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


def link_master(master: Tensor, model: Tensor) -> None:
    """Makes an fp32 tensor the master of a 16-bit parameter, with the link that netcl's optimizers know."""
    model._master = master
    master._model_param = model
    if not isinstance(model, Parameter):
        mark_trained(model)


def master_of(model: Tensor) -> Tensor | None:
    """The fp32 master of a 16-bit parameter, None if it has none."""
    return getattr(model, "_master", None)


def gradient_dtype(tensor: Tensor) -> str:
    """Dtype of a tensor's gradient: its own, unless ``set_gradient_dtype`` chose another."""
    return getattr(tensor, "_gradient_dtype", None) or str(tensor.dtype)


def set_gradient_dtype(tensor: Tensor, dtype: str | None) -> None:
    """Lets backward deliver a parameter's gradient in another dtype than the parameter's; None: in its own again."""
    tensor._gradient_dtype = dtype


def give_storage(tensor: Tensor, source: Tensor) -> None:
    """Puts another tensor's storage and dtype under ``tensor``; ``source`` must not be used any more."""
    tensor.wait()
    vars(tensor).update(buffer=source.buffer, dtype=source.dtype, pool_handle=source.pool_handle)
    source.pool_handle = None


def take_storage(tensor: Tensor) -> Tensor:
    """A new tensor that owns the storage of ``tensor``, which needs another one then."""
    tensor.wait()
    taken = Tensor(
        buffer=tensor.buffer,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        context=tensor.context,
        queue=tensor.queue,
        pool_handle=tensor.pool_handle,
        persistent=tensor.persistent,
        host_ref=tensor.host_ref,
        backend=tensor._backend,
    )
    vars(tensor).update(pool_handle=None, host_ref=None)
    return taken


@contextmanager
def showing(tensor: Tensor, other: Tensor) -> Iterator[None]:
    """Inside the ``with``, ``tensor`` reads from and writes to another one's storage, in its dtype."""
    before = tensor.buffer, tensor.dtype
    tensor.buffer, tensor.dtype = other.buffer, other.dtype
    try:
        yield
    finally:
        tensor.buffer, tensor.dtype = before


@contextmanager
def without_write_back(masters: Sequence[Tensor]) -> Iterator[None]:
    """Inside the ``with``, netcl's optimizers do not know what model parameters these are the masters of.

    Their own way back from the master is missing (Momentum), goes through the host, or takes bfloat16 for float16.
    """
    models = [master._model_param for master in masters]
    for master in masters:
        master._model_param = master
    try:
        yield
    finally:
        for master, model in zip(masters, models, strict=True):
            master._model_param = model


#: where netcl's optimizers keep arrays and buffers, by id of the parameter
_HOST_STATE = ("velocity", "vel", "m", "v", "square_avg", "mom")
_DEVICE_STATE = ("_v_buf", "_m_buf")


def is_kernel_store(name: str) -> bool:
    """Whether an attribute of netcl's optimizers holds compiled kernels, which are no state."""
    return name.endswith(("_kernel", "_kernels"))


def is_state_by_parameter(name: str, value: Any, parameters: Container[int]) -> bool:
    """Whether an attribute of an optimizer of netcl's is a dict by ``id`` of the parameter.

    Args:
        parameters: the ids of the optimizer's parameters. The dict may have more: of such as have left it.
    """
    if not isinstance(value, dict):
        return False
    known = name in _HOST_STATE or name in _DEVICE_STATE
    return known or any(key in parameters for key in value) or any(isinstance(x, cl.Buffer) for x in value.values())


def fused_size(size: int) -> int:
    """How many elements a parameter of ``size`` takes in the buffers of fused AdamW."""
    return adamw._aligned_size(size, adamw._SUBBUF_ALIGN_FLOATS)


def steps_as_one(adamw: Any) -> bool:
    """Whether netcl's AdamW will step with its fused kernel, which alone of its two knows ``max_norm``."""
    params = [param for param in adamw.params if not is_frozen(param) and param.grad is not None]
    return (
        adamw._fused_enabled
        and len(params) >= adamw._fused_min_params
        and sum(param.size for param in params) >= adamw._fused_min_elems
        and params[0].context is not None
        and all(param.context == params[0].context for param in params)
    )


#: what AdamW's moments are kept in besides: of parameters that are stepped as one, and loaded for the next step
MOMENTS_APART = ("_fused_state", "_pending_moments")


def fused_state(optimizer: Any) -> dict[str, Any] | None:
    """The moments of parameters that AdamW steps as one; None if it steps none so."""
    return getattr(optimizer, "_fused_state", None)


def build_fused_state(optimizer: Any, params: Sequence[Tensor]) -> dict[str, Any]:
    """A new fused state of AdamW's. It gives the parameters other buffers, with the values that they have."""
    built: dict[str, Any] = optimizer._build_fused_state(list(params))
    return built


def pending_moments(optimizer: Any) -> list[Any] | None:
    """Moments that AdamW has loaded and will place at its next step, in the order of the parameters."""
    return getattr(optimizer, "_pending_moments", None)


def set_moments(optimizer: Any, pending: Any, make_fused: Callable[[], dict[str, Any] | None]) -> None:
    """Gives an optimizer that keeps moments apart other ones."""
    if hasattr(optimizer, "_pending_moments"):
        optimizer._pending_moments = pending
    if hasattr(optimizer, "_fused_state"):
        optimizer._fused_state = make_fused()


def set_host_scale(scaler: Any, scale: float) -> None:
    """Sets the scale of a ``GradScaler`` of netcl's."""
    scaler._scale = scale


def is_netcl_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer is netcl's, or derived from one of netcl's."""
    return any(cls.__module__.startswith("netcl.optim.") for cls in type(optimizer).__mro__)


def replace_parameter(optimizer: Any, index: int, new: Tensor) -> None:
    """Lets an optimizer step another tensor in place of ``params[index]``, with the state it has for that one.

    netcl's optimizers keep state in dicts by ``id`` of the parameter; fused AdamW in one buffer, with offsets.
    """
    old = optimizer.params[index]
    if not isinstance(optimizer.params, list):
        optimizer.params = list(optimizer.params)
    optimizer.params[index] = new
    for state in _state_dicts(optimizer):
        if id(old) in state:
            state[id(new)] = state.pop(id(old))
    fused = fused_state(optimizer)
    if fused is not None:
        fused["offsets"] = [(new if p is old else p, offset, size) for p, offset, size in fused["offsets"]]
        fused["signature"] = tuple((id(p), size) for p, _, size in fused["offsets"])


def add_missing_state(optimizer: Any) -> None:
    """Gives parameters that were added to ``optimizer.params`` the state of new ones.

    netcl's optimizers make it at construction only, and fused AdamW forgets all moments when it meets another list of
    parameters (one more or less, frozen, or in another order): it goes on parameter by parameter instead, with the
    moments that it has.
    """
    params = optimizer.params
    ids = {id(param) for param in params}
    for name in _HOST_STATE:
        state = vars(optimizer).get(name)
        if isinstance(state, dict) and not ids <= state.keys():
            for param in params:
                if id(param) not in state:
                    state[id(param)] = np.zeros(param.shape, np.float32)
    fused = fused_state(optimizer)
    if fused is not None and [id(param) for param, _, _ in fused["offsets"]] != _stepped_ids(params):
        for param, offset, size in fused["offsets"]:
            optimizer._m_buf[id(param)] = fused["m_flat"].get_sub_region(offset * 4, size * 4)
            optimizer._v_buf[id(param)] = fused["v_flat"].get_sub_region(offset * 4, size * 4)
        optimizer._fused_state, optimizer._fused_enabled = None, False


def _stepped_ids(params: Sequence[Tensor]) -> list[int]:
    return [id(param) for param in params if not is_frozen(param) and not is_frozen(model_parameter(param))]


def _state_dicts(optimizer: Any) -> list[dict[int, Any]]:
    return [value for value in vars(optimizer).values() if isinstance(value, dict)]


def merge_leaves(leaves: Sequence[Node], nodes: Iterable[Node]) -> dict[int, Node]:
    """One node for each tensor among the leaves of a graph: the first.

    The engine adds up gradients by node, and prefers what it finds on a node to what is on its tensor: of two nodes of
    one parameter, each visited in turn, one would lose what came to the other.

    Args:
        leaves: the leaf nodes.
        nodes: all nodes with parents; those that have one of several leaves get the first in its place.

    Returns:
        For the ids of the leaves that were replaced, what stands for them.
    """
    first: dict[int, Node] = {}
    replaced = {
        id(leaf): kept
        for leaf in leaves
        if not has_frozen_mark(leaf) and (kept := first.setdefault(id(leaf.value), leaf)) is not leaf
    }
    if replaced:
        for node in nodes:
            if any(id(parent) in replaced for parent in node.parents):
                node.parents = [replaced.get(id(parent), parent) for parent in node.parents]
    return replaced


def parameter_names(params: Sequence[Tensor]) -> list[str]:
    """Names of tensors by their place in the model, ``"layers.2.weight"``; ``"params[2]"`` for one in no module.

    Looks through all objects of the process: for messages.
    """
    wanted = {id(model_parameter(param)) for param in params}
    names: dict[int, str] = {}
    for module in gc.get_objects():
        if issubclass(type(module), Module):
            for name, tensor in module_tensors(module):
                # The module that holds the others has the longest names.
                if id(tensor) in wanted and name.count(".") >= names.get(id(tensor), "").count("."):
                    names[id(tensor)] = name
    return [names.get(id(model_parameter(param)), f"params[{index}]") for index, param in enumerate(params)]


def is_grad_enabled() -> bool:
    """Whether ops are recorded for backward here."""
    return bool(engine.is_grad_enabled())


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
