"""Faults of netcl's, and detours, put right while AMP is on.

docs/netcl-defects.md has the layers, each with a minimal example.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from operator import is_
from types import SimpleNamespace
from typing import Any

import pyopencl as cl
from netcl import autograd as ag
from netcl.core.memory import PersistentBufferPool
from netcl.nn import layers
from netcl.ops import elementwise

from clamp import bridge
from clamp.bridge import Node, Tape, TensorLike
from clamp.casting.regions import casting_region
from clamp.opencl.device import capabilities
from clamp.opencl.shortage import explain_shortage
from clamp.patching.patch_registry import BEFORE_REMOVAL, meets, replaces

# --------------------------------------------------------------------------------------------------------------- layers


class _Fused(list[Any]):
    """The layers that a Sequential calls, some of them fused; ``made_of`` has its own."""

    made_of: list[Any]


_MADE_BY = {"_try_fuse_layers": "_fused_layers", "_try_fuse_layers_train": "_fused_train_layers"}


@meets("netcl.nn.layers.Sequential._try_fuse_layers", "netcl.nn.layers.Sequential._try_fuse_layers_train")
def fused_layers(wrapped: Any, instance: Any, /) -> Any:
    """The layers that a Sequential calls: netcl's goes on with those that it fused once, whatever has been put in their
    place. They are its own where rules for modules make a difference between them."""
    own, name = instance.layers, _MADE_BY[wrapped.__name__]
    region = casting_region()
    if region is not None and region.modules is not None:
        rules = {region.modules.rule_of(layer) for layer in own if isinstance(layer, bridge.Module)}
        if len(rules) > 1:
            return own
    known = getattr(instance, name)
    if type(known) is _Fused and len(own) == len(known.made_of) and all(map(is_, own, known.made_of)):
        return known
    # Not in the Sequential's own attributes, where another thread may be at it.
    made = _Fused(wrapped.__func__(SimpleNamespace(layers=own, **dict.fromkeys(bridge.MADE_FROM_LAYERS))))
    made.made_of = [*own]
    setattr(instance, name, made)
    return made


@meets("netcl.nn.layers._FusedConvReLUTrain.forward")
def fused_conv_relu(wrapped: Any, instance: Any, /, x: Any) -> Any:
    """Convolution and relu fused by a Sequential that trains: netcl's drops dilation and groups."""
    conv = instance.conv
    if conv.dilation == 1 and conv.groups == 1:
        return wrapped(x)
    return layers.ReLU()(conv(x))


@meets("netcl.nn.layers._FusedConvReLU.forward", "netcl.nn.layers._FusedConvBNReLU.forward")
def fused_by_optimize_model(wrapped: Any, instance: Any, /, x: Any) -> Any:
    """Layers that ``runtime.graph_fusion.optimize_model`` has put in one, which saves no launch: netcl's drops dilation
    and groups, batch norm, and the graph."""
    x = instance.conv(x)
    return layers.ReLU()(instance.bn(x) if isinstance(instance, layers._FusedConvBNReLU) else x)


@meets("netcl.nn.containers.GELU.forward")
def gelu(wrapped: Any, instance: Any, /, x: Any) -> Any:
    """GELU of a bare tensor: netcl's always takes the approximation by tanh."""
    if isinstance(x, Node):
        return wrapped(x)
    return elementwise.gelu(x, approximate=instance.approximate)


# Attention.
# Scores are stored in 16 bits, and netcl's layers multiply them by 1 / sqrt(d) only then: 131072, to be 32768, would be
# infinite. The scale goes onto the queries first, as it does in flash_attention.


@meets("netcl.nn.layers.MultiheadAttention.forward")
def multihead_attention(wrapped: Any, instance: Any, /, query: TensorLike, key: TensorLike, value: TensorLike) -> Any:
    """Attention of bare tensors or nodes of shape (batch, sequence, features)."""
    is_bare = not any(isinstance(x, Node) for x in (query, key, value))
    with ag.no_grad() if is_bare else nullcontext():
        q, k, v = (x if isinstance(x, Node) else ag.tensor(x) for x in (query, key, value))
        out = instance.out_proj(_attended(instance, instance.q_proj(q), instance.k_proj(k), instance.v_proj(v)))
    return out.value if is_bare else out


def _attended(
    layer: Any, q: Node, k: Node, v: Node, mask: Any = None, drop: Callable[[Node], Node] = lambda x: x
) -> Node:
    """Attention of queries to keys and values, all nodes of shape (batch, sequence, features), by a layer's heads."""
    batch, sequence, features = q.value.shape

    def heads(x: Node) -> Any:
        return ag.permute(ag.reshape(x, (batch, sequence, layer.num_heads, layer.head_dim)), (0, 2, 1, 3))

    scores = ag.bmm(ag.mul(heads(q), 1.0 / layer.head_dim**0.5), ag.permute(heads(k), (0, 1, 3, 2)))
    if mask is not None:
        scores = ag.masked_fill(scores, mask, -1e9)
    out = ag.bmm(drop(ag.softmax(scores)), heads(v))
    return ag.reshape(ag.permute(out, (0, 2, 1, 3)), (batch, sequence, features))


@meets("netcl.nn.transformer.CausalSelfAttention.forward")
def self_attention(wrapped: Any, instance: Any, /, x: TensorLike) -> Any:
    """Attention of a node or bare tensor of shape (batch, sequence, features) to itself, with dropout and a mask."""
    node = x if isinstance(x, Node) else ag.tensor(x)
    drops = instance.dropout > 0.0 and instance.training

    def drop(x: Node) -> Node:
        return ag.dropout(x, p=instance.dropout) if drops else x

    q, k, v = ag.chunk(instance.qkv(node), 3, axis=-1)
    mask = instance._mask(node.value.shape[1]) if instance.causal else None
    out = drop(instance.out_proj(_attended(instance, q, k, v, mask, drop)))
    return out if isinstance(x, Node) else out.value


# ------------------------------------------------------------------------------------------- gradients, by thread
# netcl's mode is one for all threads: the `no_grad()` of one that evaluates would cut the graph of another that trains,
# in the middle of it, and of two that overlap the last to end would leave gradients off.


@replaces("netcl.autograd.engine.is_grad_enabled")
def is_grad_enabled(own: Any) -> bool:
    """Returns whether ops are recorded for backward in this thread."""
    return bridge.is_grad_enabled()


@replaces("netcl.autograd.engine.set_grad_enabled")
def set_grad_enabled(own: Any, mode: bool) -> None:
    """Sets whether ops are recorded for backward in this thread, as ``no_grad`` does."""
    bridge.set_thread_grad_enabled(mode)


BEFORE_REMOVAL.append(bridge.end_thread_grad_modes)

# -------------------------------------------------------------------------------------------------------------- memory


@meets("netcl.core.memory.get_persistent_pool")
def of_queue(wrapped: Any, instance: None, /, queue: Any) -> PersistentBufferPool:
    """The pool of a queue: netcl's own tensors, too, go to and come from that of theirs while AMP is on."""
    return bridge.pool_of(queue, wrapped)


BEFORE_REMOVAL.append(bridge.keep_as_netcl)


@replaces("netcl.core.memory.cl")
class _Allocating:
    """pyopencl as netcl's pools see it: where memory is short, the error says what holds it."""

    def __init__(self, own: Any) -> None:
        self._cl = own
        self.SVM = own.SVM  # of every tensor: at hand

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cl, name)

    def Buffer(self, *args: Any, **kwargs: Any) -> Any:
        return self._allocate(self._cl.Buffer, *args, **kwargs)

    def fsvm_empty(self, context: cl.Context, shape: int, dtype: Any) -> Any:
        """Shared virtual memory, in an array, where a pool has none that is free."""
        bridge.free_in_turn(context)
        return self._allocate(self._cl.fsvm_empty, context, shape, dtype)

    def _allocate(self, allocate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return allocate(*args, **kwargs)
        except cl.Error as error:
            explain_shortage(error, "allocating for a tensor")
            raise


# -------------------------------------------------------------- what is known of a device without running kernels on it


@meets("netcl.core.capabilities._probe_min_sync")
def min_sync(wrapped: Any, instance: None, /, context: cl.Context, queue: cl.CommandQueue, max_wg: int) -> str:
    """Returns whether a kernel sees what the one before it wrote. netcl compiles two kernels for that, at the first
    backward of each process, a twentieth of a cold first step. A processor's cores see what other cores wrote."""
    if capabilities(queue).is_cpu:
        return "none"
    return str(wrapped(context, queue, max_wg))


# ---------------------------------------------------------------------------------- netcl's compiler


@meets("netcl.autograd.compiler.jit_compile")
def jit_compile(wrapped: Any, instance: None, /, fn: Callable[..., Any]) -> Any:
    """A function to be fused runs as it is, op by op: netcl's kernels read 16-bit inputs as float, compute some ops
    wrong, and know neither arguments by name nor what the function reads outside."""

    @functools.wraps(fn)
    def run(*args: Any, tape: Tape | None = None, **kwargs: Any) -> Any:
        if tape is None:
            return fn(*args, **kwargs)
        named = {"tape": tape} if "tape" in inspect.signature(fn).parameters else {}
        with bridge.on_tape(tape):
            return fn(*args, **named, **kwargs)

    return run


@replaces("netcl.autograd.compiler._COMPILER_CACHE")
class Refused(dict[Any, Any]):
    """What functions that netcl compiled before ``init``, closures that no patch reaches, find in place of their
    kernels, which read 16-bit values as float, beyond the ends of their memory, and compute some ops wrong. Those that
    compute by numpy are left alone."""

    def __contains__(self, key: Any) -> bool:
        if key[1] == "cpu":
            return super().__contains__(key)
        raise RuntimeError(
            f"{getattr(key[0], '__qualname__', repr(key[0]))} was compiled by jit_compile before amp.init(), and what "
            "it became would misread 16-bit values under AMP: compile it after amp.init(), or call the function itself"
        )
