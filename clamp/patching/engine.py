"""What netcl's engine needs under AMP: seeds and sums of 16-bit gradients, backward without casts, a net under
ops nobody patched, and word of every write to a parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import wrapt

from clamp import bridge
from clamp.autocast import current_region, no_casts, thread_casts_off
from clamp.bridge import HALF_DTYPES, Node, Tape, Tensor
from clamp.cache import weights
from clamp.functions.casting import cast_node
from clamp.ops.cast import cast
from clamp.ops.elementwise import elementwise
from clamp.patching.wrap import Installed, Wrapper, netcl_wrapper, reporter
from clamp.policy import CastPolicy, Entry

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def ones_like(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Tensor:
    """The engine's seed gradient, for 16-bit losses as well."""
    tensor = args[0]
    if tensor.dtype not in HALF_DTYPES:
        return wrapped(*args, **kwargs)
    return cast(Tensor.from_shape(tensor.queue, tensor.shape, dtype="float32", fill=1.0), tensor.dtype)


def add_gradients(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Tensor:
    """The engine's sum of two gradients of one node, in the first one's dtype.

    Out of place where a 16-bit gradient takes part: netcl has no such kernel that builds everywhere.
    """
    first, second = args
    if first.dtype not in HALF_DTYPES and second.dtype not in HALF_DTYPES:
        return wrapped(first, second)
    return elementwise("add", bridge.canonical_dtype(first.dtype), first, second)


def tape_backward(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> None:
    """Backward with all casts off, from a graph without gradients of an earlier backward.

    The engine adds to ``Node.grad`` whatever it finds there: what an earlier backward left in a shared part of
    the graph would be propagated a second time, and a parameter's node that outlives ``zero_grad`` (which clears
    only ``Tensor.grad``) would bring its old gradient back.
    """
    root = args[0] if args else kwargs["loss"]
    for node in bridge.graph(root):
        if node.parents:
            node.grad = None
            node.value.grad = None
        elif node.grad is not None and getattr(node.value, "grad", None) is None:
            node.grad = None
    with no_casts():
        wrapped(*args, **kwargs)


def node_backward(self: Node, grad: Tensor | None = None) -> None:
    """Runs backward from this node, as ``Tape().backward(node)`` does; only leaves keep their gradients.

    Args:
        grad: gradient of this node, of its shape; ones if not given.
    """
    Tape(retain_grads=False).backward(self, grad)


def apply_op(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
    """The net under every recorded op that is neither clamp's nor wrapped: its 16-bit inputs are widened.

    Inside a function that a user declared half, the user's kernels do read 16 bits; there nothing is widened.
    """
    nodes = args[2:]
    if thread_casts_off() or not Installed.now or not any(_is_half(node) for node in nodes):
        return wrapped(*args, **kwargs)
    forward, backward = args[:2]
    region = current_region()
    name = str(kwargs.get("op_name") or getattr(forward, "__name__", "op"))
    report, use_cache = reporter(region, name), region is None or region.cache_enabled
    widened = [cast_node(node, "float32", report, use_cache) if _is_half(node) else node for node in nodes]
    swaps = [(node, wide) for node, wide in zip(nodes, widened, strict=True) if node is not wide]
    if backward is not None:
        backward = _reading_widened(backward, swaps)
    return wrapped(forward, backward, *widened, **kwargs)


def _reading_widened(
    backward: Callable[[Tensor], list[Tensor | None]], swaps: list[tuple[Any, Any]]
) -> Callable[[Tensor], list[Tensor | None]]:
    """``backward`` with what it closes over, nodes and bare tensors, showing widened values while it runs."""

    def with_swapped_values(grad: Tensor) -> list[Tensor | None]:
        kept = [_show(x, wide.value) for x, wide in swaps]
        try:
            return backward(grad)
        finally:
            for (x, _), before in zip(swaps, kept, strict=True):
                vars(x).update(before)

    return with_swapped_values


def _show(x: Any, value: Tensor) -> dict[str, Any]:
    """Lets a node or tensor show another tensor's content; returns the attributes it had."""
    names = ("value",) if isinstance(x, Node) else ("buffer", "dtype")
    before = {name: vars(x)[name] for name in names}
    vars(x).update({name: value if name == "value" else getattr(value, name) for name in names})
    return before


def _is_half(x: Any) -> bool:
    return getattr(getattr(x, "value", None), "dtype", None) in HALF_DTYPES


def keep_tensor(tensor: Tensor) -> Tensor:
    """In place of netcl's own autocast, which would hand out 16-bit copies of weights without a link to them."""
    return tensor


def transfer_write(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
    """netcl's copies and fills, ``f(queue, destination, ...)``: what was derived from the destination is stale."""
    destination = args[1] if len(args) > 1 else kwargs.get("dst")
    try:
        return wrapped(*args, **kwargs)
    finally:
        if len(weights):
            weights.drop_buffer(destination)


_COMPILED = Entry("netcl.autograd.jit_compile", CastPolicy.FLOAT, "netcl compiles kernels of float.")


def jit_compile(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
    """netcl's compiler makes kernels that read every input as float: what it compiles gets 16-bit inputs widened."""
    return wrapt.FunctionWrapper(wrapped(*args, **kwargs), netcl_wrapper(_COMPILED))


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

_WRITTEN = ("out", "dst")


def writes(function: Any) -> bool:
    """Whether a function can write into a tensor that it is given: it has a parameter ``out`` or ``dst``."""
    return inspect.isfunction(function) and any(name in inspect.signature(function).parameters for name in _WRITTEN)


def noting_writes(function: Any, wrapper: Wrapper) -> Wrapper:
    """``wrapper``, and for functions that write into an argument: what was derived from that one is stale after.

    A function whose 16-bit arguments would be widened must not be given a 16-bit one to write to: it would write
    to the widened copy.
    """
    if not writes(function):
        return wrapper
    parameters = list(inspect.signature(function).parameters)
    places = [(name, parameters.index(name)) for name in _WRITTEN if name in parameters]

    def call(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
        written = [args[place] if len(args) > place else kwargs.get(name) for name, place in places]
        if Installed.now and wrapper is not as_it_is and any(_is_half(target) for target in written):
            raise TypeError(
                f"{function.__name__} was given a 16-bit tensor to write to, and clamp has no kernel that does: "
                f"pass a float32 tensor, or call it without {' or '.join(name for name, _ in places)}"
            )
        try:
            return wrapper(wrapped, instance, args, kwargs)
        finally:
            for target in written:
                if target is not None and len(weights):
                    weights.drop_buffer(getattr(target, "buffer", None))

    return call


def as_it_is(wrapped: Any, instance: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Changes nothing."""
    return wrapped(*args, **kwargs)
