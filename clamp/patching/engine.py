"""What netcl's engine needs under AMP: seeds and sums of 16-bit gradients, backward without casts, a net under
ops nobody patched, and word of every write to a parameter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import wrapt
from netcl.ops.bf16_act import from_bf16_host, to_bf16_host

from clamp import bridge
from clamp.bridge import HALF_DTYPES, Node, Tape, Tensor
from clamp.casting.arguments import reporter
from clamp.casting.containers import tensors_in
from clamp.casting.operands import cast_node
from clamp.casting.policy_table import CastPolicy, Entry
from clamp.casting.regions import called_in, current_region, thread_casts_off
from clamp.casting.results import RESULTS
from clamp.functions import recompute
from clamp.opencl.device import require_usable
from clamp.opencl.host_steps import host_value, recorder
from clamp.ops.arguments import saturated
from clamp.ops.cast import cast, cast_into
from clamp.ops.ring_buffers import Norms
from clamp.params import gradient_marks, gradient_penalties, masters
from clamp.params.weight_cache import weights
from clamp.params.writes import unnoted
from clamp.patching import custom
from clamp.patching.meets import meets, replaces
from clamp.patching.wrap import Installed, Wrapper, netcl_wrapper, written, written_places
from clamp.scaling.scaled_loss import SCALE_OP, is_scaled, require_graph, scaler_of
from clamp.scaling.step_report import is_called_by_user, warn_user

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]

_FLOAT16 = ("float16", "half")


@meets("netcl.autograd.engine.ones_like")
def ones_like(wrapped: Any, instance: None, /, t: Tensor) -> Tensor:
    """The engine's seed gradient, for 16-bit losses as well."""
    if t.dtype not in bridge.STORAGE or not bridge.on_device(t):
        return wrapped(t)
    return cast(bridge.ones(t.queue, t.shape), t.dtype)


@meets("netcl.autograd.engine.add_inplace", "netcl.autograd.engine.add_out_of_place")
def add_gradients(wrapped: Any, instance: None, first: Tensor, second: Tensor, /) -> Tensor:
    """The engine's sum of two gradients of one node, in the first one's dtype."""
    return RESULTS.add(wrapped, first, second)


_serials = itertools.count()


@replaces("netcl.autograd.engine._gradient_storage_key")
def gradient_storage_key(own: Any, tensor: Tensor) -> tuple[Any, ...]:
    """What the engine knows a gradient by, to see whether it may add to it in place.

    netcl takes the id of the tensor, which a later one of the same pass may have again, so that the same pass adds in
    place or not as Python's memory has it; a recording would be compared with one of other launches.
    """
    if not bridge.on_device(tensor):
        return own(tensor)
    while (base := getattr(tensor, "_base", None)) is not None:
        tensor = base
    known = vars(tensor)
    if "_serial" not in known:
        known["_serial"] = next(_serials)
    return "cl", known["_serial"]


@meets("netcl.autograd.engine.Tape.backward")
def tape_backward(
    wrapped: Any, instance: Tape, /, loss: Node, grad: Tensor | None = None, *, create_graph: bool = False
) -> None:
    """Backward with all casts off, from a graph without gradients of an earlier backward.

    The engine adds to ``Node.grad`` whatever it finds there: what an earlier backward left in a shared part of
    the graph would be propagated a second time, and a parameter's node that outlives ``zero_grad`` (which clears
    only ``Tensor.grad``) would bring its old gradient back.

    Raises:
        NotImplementedError: the loss was made from a gradient.
        RuntimeError: the loss has lost its graph, or the gradients would be of several scales. Nothing was changed.
    """
    gradient_penalties.refuse(create_graph)
    computed, leaves, scaled, in_half = [], [], [], False
    for node in bridge.graph(loss):  # of every node of every step: short
        node.grad = None
        if node.parents:
            node.value.grad = None
            computed.append(node)
            in_half = in_half or node.value.dtype in _FLOAT16
            if node.op_name == SCALE_OP:
                scaled.append(node)
            elif node.op_name == recompute.OP and isinstance(node.grad_fn, recompute.Backward):
                node.grad_fn.segment.begin()
                in_half = in_half or node.grad_fn.segment.in_half
        else:
            leaves.append(node)
    for start in (loss, *(unscaled for node in scaled for unscaled in node.parents)):
        if start.requires_grad and bridge.is_cut(start):
            require_graph(start)
    gradient_penalties.refuse_in(computed, leaves)
    scaler = scaler_of(loss, [node for node in scaled if is_scaled(node)])
    replaced = bridge.merge_leaves(leaves, computed)
    values = list({id(leaf.value): leaf.value for leaf in leaves}.values())
    scale = None if scaler is None else scaler.applied()
    called_in(None, gradient_marks.deliver, partial(RESULTS.backward, wrapped, loss, grad), values, scale, in_half)
    for leaf in leaves if replaced else ():
        leaf.grad = leaf.value.grad


@replaces("netcl.autograd.engine.Node.backward")
def node_backward(
    self: Node, grad: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False
) -> None:
    """Runs backward from this node, as ``Tape().backward(node)`` does; only leaves keep their gradients.

    Args:
        grad: gradient of this node, of its shape; ones if not given.
        retain_graph: has no effect: netcl keeps a graph as long as its nodes live.
        create_graph: refused, netcl has no second derivatives.

    Raises:
        NotImplementedError: ``create_graph``, or the loss was made from a gradient.
        RuntimeError: the node has no graph, or its gradients would be of several loss scales.
    """
    gradient_penalties.refuse(create_graph)
    require_graph(self)
    Tape(retain_grads=False).backward(self, grad)


@meets("netcl.autograd.engine.apply_op")
def apply_op(wrapped: Any, instance: None, forward: Any, backward: Any, /, *nodes: Any, **kwargs: Any) -> Any:
    """The net under every recorded op that is neither clamp's nor wrapped: its 16-bit inputs are widened.

    Inside a function that a user declared half, the user's kernels do read 16 bits; there nothing is widened. A
    forward function may name the dtype that it wants its inputs in (clamp/patching/custom.py).
    """
    name = kwargs["op_name"] = kwargs.get("op_name") or _name_of(forward)
    dtype = custom.input_dtype(forward) if Installed.now else None
    if dtype is None and (thread_casts_off() or not Installed.now or not any(_is_half(node) for node in nodes)):
        return RESULTS.foreign(wrapped(forward, custom.bound(backward, forward, nodes), *nodes, **kwargs), nodes)
    region = current_region()
    report, use_cache = reporter(region, name), region is None or region.cache_enabled
    cast_one = partial(cast_node, dtype=dtype or "float32", report=report, use_cache=use_cache)
    widened = [cast_one(x) if _is_half(x) or (dtype and _is_floating(x)) else x for x in nodes]
    swaps = [(node, wide) for node, wide in zip(nodes, widened, strict=True) if node is not wide]
    backward = custom.bound(backward, forward, widened)
    if backward is not None:
        backward = _reading_widened(backward, swaps)
    return RESULTS.foreign(wrapped(forward, backward, *widened, **kwargs), widened)


def _name_of(forward: Any) -> str:
    """The function that a forward is defined in, or else its own name; netcl means to find the caller's, and cannot."""
    name = getattr(forward, "__qualname__", type(forward).__qualname__)
    name = name.partition(".<locals>")[0].rpartition(".")[2]
    return "apply_op" if name == "<lambda>" else str(name)


def _reading_widened(
    backward: Callable[[Tensor], list[Tensor | None]], swaps: list[tuple[Any, Any]]
) -> Callable[[Tensor], list[Tensor | None]]:
    """``backward`` with what it closes over, nodes and bare tensors, showing widened values while it runs."""

    def with_swapped_values(grad: Tensor) -> list[Tensor | None]:
        kept = [(x, _shown(x)) for x, _ in swaps]
        try:
            for x, wide in swaps:
                _show(x, wide.value)
            return backward(grad)
        finally:
            for x, before in kept:
                vars(x).update(before)

    return with_swapped_values


def _show(x: Any, value: Tensor) -> None:
    """Lets a node or tensor show another tensor's content."""
    vars(x).update({name: value if name == "value" else getattr(value, name) for name in _shown(x)})


def _shown(x: Any) -> dict[str, Any]:
    """What of a node or tensor ``_show`` changes, as it is."""
    return {name: vars(x)[name] for name in (("value",) if isinstance(x, Node) else ("buffer", "dtype"))}


def _is_floating(x: Any) -> bool:
    value = getattr(x, "value", None)
    return isinstance(value, Tensor) and value.dtype in bridge.STORAGE and bridge.on_device(value)


def _is_half(x: Any) -> bool:
    return getattr(getattr(x, "value", None), "dtype", None) in HALF_DTYPES


@replaces("netcl.autograd.bf16_ops.upcast_args")
def upcast_args(own: Any, args: Arguments, tape: Tape | None, grad_fn: Any) -> Any:
    """netcl's float32 copies of bfloat16 inputs, which it looks for at each of its ops: in less than half the time."""
    for x in args:
        if isinstance(x, Node) and getattr(x.value, "dtype", None) == "bfloat16":
            return own(args, tape, grad_fn)
    return args, grad_fn


@replaces("netcl.amp.maybe_cast_tensor")
def keep_tensor(own: Any, tensor: Tensor) -> Tensor:
    """In place of netcl's own autocast, which would hand out 16-bit copies that no gradient reaches: clamp's ops cast
    what they read."""
    return tensor


@meets("netcl.core.tensor.Tensor.to_host")
def to_host(wrapped: Any, instance: Tensor, /) -> Any:
    """A tensor's values on the host; of bfloat16 as float32, not netcl's 16-bit words.

    A script that computes with what it reads, an accuracy say, would take the words for numbers.
    """
    _warn_of_scaled(instance, "read")
    host = wrapped()
    return from_bf16_host(host) if instance.dtype == "bfloat16" and host.dtype == np.uint16 else host


@meets("netcl.core.tensor.Tensor.to_host_async")
def to_host_async(wrapped: Any, instance: Tensor, /) -> Any:
    """A tensor's values on the host, when they have come."""
    _warn_of_scaled(instance, "read")
    return wrapped()


@meets("netcl.core.transfer.write_tensor")
def write_tensor(wrapped: Any, instance: None, /, tensor: Tensor, data: Any) -> None:
    """Writes values of the host into a tensor, as ``Tensor.write`` does."""
    _warn_of_scaled(tensor, "written")
    wrapped(tensor, data)


def _warn_of_scaled(tensor: Tensor, what: str) -> None:
    """Says once for a loss scale that gradients are not the true ones yet, to a user who reads one to the host, or
    writes it from there."""
    scale = gradient_marks.scale_of(tensor)
    if scale is None or not gradient_marks.is_in_pass():  # who scales by hand knows
        return
    if not scale.state.is_told_of and is_called_by_user():
        scale.state.is_told_of = True
        warn_user(
            f"a gradient was {what} on the host while it is still multiplied by the loss scale, as its norm is, and as "
            "bounds on it would have to be: do that after `with handle.scale_loss(...)`, before the step"
        )


@meets("netcl.core.tensor.Tensor.from_host")
def from_host(
    wrapped: Any, instance: None, /, queue: Any, data: Any, dtype: str | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """A tensor of host values; to bfloat16 numbers are rounded, where netcl would cut them to integer words."""
    if isinstance(queue, cl.CommandQueue):
        require_usable(queue)
    if dtype == "bfloat16" and np.asarray(data).dtype != np.uint16:
        data = to_bf16_host(np.asarray(data).astype(np.float32))
    return wrapped(queue, data, dtype, *args, **kwargs)


@meets("netcl.core.tensor.Tensor.from_shape")
def from_shape(
    wrapped: Any, instance: None, /, queue: Any, shape: Any, dtype: str = "float32", pool: Any = None,
    backend: str | None = None, fill: Any = None,
) -> Tensor:  # fmt: skip
    """A new tensor filled with a number: a finite one stays finite, and in bfloat16 it is the number, not a word."""
    if isinstance(queue, cl.CommandQueue):
        require_usable(queue)
        if wrapped.__self__ is Tensor and pool is backend is fill is None and dtype in bridge.ITEMSIZE:
            return bridge.empty(queue, shape, dtype)
    if fill is not None and dtype in bridge.STORAGE and not isinstance(fill, np.uint16):
        fill = saturated(fill, dtype)
        fill = int(to_bf16_host(np.array([fill], np.float32))[0]) if dtype == "bfloat16" else fill
    return wrapped(queue, shape, dtype, pool, backend, fill)


@meets("netcl.ops.bf16_act.bf16_to_host")
def bf16_to_host(wrapped: Any, instance: None, /, t: Tensor) -> Any:
    """netcl's way to read bfloat16 as float32, which is what ``to_host`` gives already."""
    return t.to_host()


@meets("netcl.core.transfer.write", "netcl.core.transfer.copy", "netcl.core.transfer.fill")
def transfer_write(wrapped: Any, instance: None, /, queue: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
    """netcl's copies and fills: what was derived from their destination is stale."""
    try:
        return wrapped(queue, dst, *args, **kwargs)
    finally:
        masters.written(dst)


_COMPILED = Entry("netcl.autograd.jit_compile", CastPolicy.FLOAT, "netcl compiles kernels of float.")


@meets("netcl.autograd.compiler.jit_compile")
def jit_compile(wrapped: Any, instance: None, /, *args: Any, **kwargs: Any) -> Any:
    """netcl's compiler makes kernels that read every input as float: what it compiles gets 16-bit inputs widened."""
    return wrapt.FunctionWrapper(wrapped(*args, **kwargs), netcl_wrapper(_COMPILED, listed=False))


@replaces("netcl.autograd.compiler._COMPILER_CACHE")
class FloatKernels(dict[Any, Any]):
    """netcl's cache of compiled kernels, which refuses to be asked about 16-bit inputs.

    A function compiled before ``init`` is a closure that no patch reaches, and would read and write 16-bit
    buffers as float, beyond their ends. But it looks up its kernels here first, by shapes and dtypes.
    """

    def __init__(self, kernels: dict[Any, Any]) -> None:
        super().__init__()
        self._kernels = kernels

    def __contains__(self, key: object) -> bool:
        if Installed.now and _names_half(key):
            raise TypeError(
                "a function compiled by jit_compile before amp.init() got a 16-bit input, and its kernels read float: "
                'compile it after amp.init(), or pass amp.cast(x, "float32")'
            )
        return key in self._kernels

    def __getitem__(self, key: Any) -> Any:
        return self._kernels[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._kernels[key] = value


def _names_half(key: object) -> bool:
    if isinstance(key, tuple):
        return any(_names_half(part) for part in key)
    return isinstance(key, str) and key in HALF_DTYPES


# ---------------------------------------------------------------------------------------------- writes in place


def noting_writes(function: Any, wrapper: Wrapper) -> Wrapper:
    """``wrapper``, and for functions that write into an argument: what was derived from that one is stale after."""
    places = written_places(function)
    if not places:
        return wrapper

    def call(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
        targets = written(places, args, kwargs)
        try:
            return wrapper(wrapped, instance, args, kwargs)
        finally:
            for target in targets:
                if target is not None:
                    masters.written(getattr(target, "buffer", None))

    return call


def in_place(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
    """A netcl function that writes, in fp32, into tensors that it is given, or into their gradients.

    While it runs its 16-bit tensors show widened content; after, they hold the result in their own dtype.
    """
    args = tuple(list(x) if isinstance(x, Iterator) else x for x in args)
    given = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
    if not Installed.now or not given:
        return wrapped(*args, **kwargs)
    given |= {id(tensor.grad): tensor.grad for tensor in list(given.values()) if tensor.grad is not None}
    narrow = [tensor for tensor in given.values() if _is_half(tensor) and bridge.on_device(tensor)]
    widened = [cast(tensor, "float32") for tensor in narrow]
    kept = [_shown(tensor) for tensor in narrow]
    try:
        for tensor, wide in zip(narrow, widened, strict=True):
            _show(tensor, wide)
        return called_in(None, wrapped, *args, **kwargs)
    finally:
        for tensor, before, wide in zip(narrow, kept, widened, strict=True):
            wide.buffer = tensor.buffer
            vars(tensor).update(before)
            cast_into(wide, tensor)
        for tensor in given.values() if len(weights) else ():
            weights.drop_buffer(tensor.buffer)


@meets("netcl.optim.clip.clip_grad_norm", "netcl.optim.clip.clip_grad_norm_device")
def clip_gradients(wrapped: Any, instance: None, /, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
    """netcl's clipping by norm: refused while gradients are multiplied by the loss scale, and so their norm.

    Raises:
        RuntimeError: a gradient is scaled.
    """
    params = list({id(param): param for param in params}.values())
    if Installed.now:
        gradient_marks.require_unscaled(
            params,
            f"{wrapped.__name__}()",
            "the norm would be that many times too large. Clip after `with handle.scale_loss(...)`, after "
            "scaler.unscale_(optimizer) or after scaler.unscale_grads(params), before the step.",
        )
        gradient_marks.give_each_its_own(params)

    def clip() -> Any:
        with unnoted():
            return in_place(partial(_clip, wrapped) if Installed.now else wrapped, instance, (params, *args), kwargs)

    if recorder() is None or wrapped.__name__ != "clip_grad_norm":
        return clip()
    # It reads the norm to the host, so that every replay clips anew.
    return host_value(gradient_marks.on_gradients(params, clip), "The norm that clip_grad_norm returned")


def _clip(wrapped: Any, params: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """netcl's clipping, by a norm whose square need not fit into float32; what clamp's kernels do not take is netcl's
    own."""
    (longest, *more) = [*args, *kwargs.values()] or [None]
    grads = [param.grad for param in params if param.grad is not None and not bridge.is_frozen(param)]
    grads = [grad for grad in grads if grad.size]
    is_ours = all(bridge.on_device(x) and x.dtype == "float32" and x.queue == grads[0].queue for x in grads)
    if not grads or not is_ours or more or not isinstance(longest, int | float | np.number):
        return wrapped(params, *args, **kwargs)
    norms = Norms.of(grads)
    if wrapped.__name__ == "clip_grad_norm_device":
        return norms.clip(grads, float(longest))
    (norm,) = norms.read()
    if not norm <= longest and norm != 0:
        norms.clip(grads, float(longest))
    return norm


def as_it_is(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Changes nothing."""
    return wrapped(*args, **kwargs)
