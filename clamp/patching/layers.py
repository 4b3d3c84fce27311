"""netcl's layers that compute something else than what they were built for; under AMP they do what they say.

docs/netcl-defects.md has each with a minimal example.
"""

from __future__ import annotations

from typing import Any

from netcl import autograd as ag
from netcl import ops
from netcl.core import tensor as tensors
from netcl.nn import layers
from netcl.ops import elementwise

from clamp.bridge import Node, TensorLike
from clamp.functions.recompute import is_recomputing
from clamp.patching.meets import meets


@meets("netcl.nn.layers._FusedConvReLUTrain.forward")
def fused_conv_relu(wrapped: Any, instance: Any, /, x: Any) -> Any:
    """Convolution and relu fused by a Sequential that trains: netcl's drops dilation and groups."""
    conv = instance.conv
    if conv.dilation == 1 and conv.groups == 1:
        return wrapped(x)
    return layers.ReLU()(conv(x))


@meets("netcl.nn.containers.GELU.forward")
def gelu(wrapped: Any, instance: Any, /, x: Any) -> Any:
    """GELU of a bare tensor: netcl's always takes the approximation by tanh."""
    if isinstance(x, Node):
        return wrapped(x)
    return elementwise.gelu(x, approximate=instance.approximate)


@meets("netcl.nn.batchnorm._compute_stats_device")
def batch_statistics(
    wrapped: Any, instance: None, /, x: Any, running_mean: Any = None, running_var: Any = None, *args: Any, **more: Any
) -> Any:
    """Statistics of a batch, with which running ones move; they have, where a checkpointed forward is run again."""
    if is_recomputing():
        running_mean = running_var = None
    return wrapped(x, running_mean, running_var, *args, **more)


# ---------------------------------------------------------------------------------------------- attention
# Scores are stored in 16 bits, and netcl's layers multiply them by 1 / sqrt(d) only then: 131072, to be 32768, would be
# infinite. The scale goes onto the queries first, as it does in flash_attention.


@meets("netcl.nn.layers.MultiheadAttention.forward")
def multihead_attention(wrapped: Any, instance: Any, /, query: TensorLike, key: TensorLike, value: TensorLike) -> Any:
    """Attention of bare tensors or nodes of shape (batch, sequence, features)."""
    on = ag if isinstance(query, Node) else ops
    reshape = ag.reshape if on is ag else tensors.reshape
    batch, sequence, features = query.value.shape
    scale = 1.0 / instance.head_dim**0.5

    def heads(x: Any) -> Any:
        return on.permute(reshape(x, (batch, sequence, instance.num_heads, instance.head_dim)), (0, 2, 1, 3))

    q, k, v = heads(instance.q_proj(query)), heads(instance.k_proj(key)), heads(instance.v_proj(value))
    weights = on.softmax(on.bmm(q * scale, on.permute(k, (0, 1, 3, 2))))
    out = on.permute(on.bmm(weights, v), (0, 2, 1, 3))
    return instance.out_proj(reshape(out, (batch, sequence, features)))


@meets("netcl.nn.transformer.CausalSelfAttention.forward")
def self_attention(wrapped: Any, instance: Any, /, x: TensorLike) -> Any:
    """Attention of a node or bare tensor of shape (batch, sequence, features) to itself, with dropout and a mask."""
    node = x if isinstance(x, Node) else ag.tensor(x)
    batch, sequence, features = node.value.shape
    drops = instance.dropout > 0.0 and instance.training

    def heads(x: Any) -> Any:
        return ag.permute(ag.reshape(x, (batch, sequence, instance.num_heads, instance.head_dim)), (0, 2, 1, 3))

    q, k, v = map(heads, ag.chunk(instance.qkv(node), 3, axis=-1))
    scores = ag.bmm(ag.mul(q, 1.0 / instance.head_dim**0.5), ag.permute(k, (0, 1, 3, 2)))
    if instance.causal:
        scores = ag.masked_fill(scores, instance._mask(sequence), -1e9)
    weights = ag.softmax(scores)
    if drops:
        weights = ag.dropout(weights, p=instance.dropout)
    out = instance.out_proj(ag.reshape(ag.permute(ag.bmm(weights, v), (0, 2, 1, 3)), (batch, sequence, features)))
    if drops:
        out = ag.dropout(out, p=instance.dropout)
    return out if isinstance(x, Node) else out.value
