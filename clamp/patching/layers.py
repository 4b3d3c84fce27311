"""netcl's layers that compute something else than what they were built for; under AMP they do what they say.

docs/netcl-defects.md has each with a minimal example.
"""

from __future__ import annotations

from typing import Any

from netcl.nn import layers
from netcl.ops import elementwise

from clamp.bridge import Node
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
