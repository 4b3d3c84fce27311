"""An op's forward and backward, bound into netcl's autograd: one file a family, mirroring ``ops/``.

A function here takes netcl's arguments behind a ``Casting``, which decides what the kernels read and in which
dtype the result is stored (``clamp.casting``). Importing a family registers it in ``OWNED``, by the full name of the
netcl function whose place it takes.
"""

from clamp.casting.owned import OWNED
from clamp.functions import (
    activations,
    arithmetic,
    attention,
    conv,
    depthwise,
    elementwise,
    indexing,
    joining,
    loss,
    loss_tensors,
    loss_weighted,
    masking,
    matmul,
    metric_loss,
    norm,
    norm_tensors,
    pool,
    prelu,
    reduce,
    shape,
    slicing,
    spatial,
    tensor_level,
)

__all__ = [
    "OWNED",
    "activations",
    "arithmetic",
    "attention",
    "conv",
    "depthwise",
    "elementwise",
    "indexing",
    "joining",
    "loss",
    "loss_tensors",
    "loss_weighted",
    "masking",
    "matmul",
    "metric_loss",
    "norm",
    "norm_tensors",
    "pool",
    "prelu",
    "reduce",
    "shape",
    "slicing",
    "spatial",
    "tensor_level",
]
