"""An op's forward and backward, bound into netcl's autograd: one file a family, mirroring ``ops/``.

A function here takes netcl's arguments behind a ``Casting`` (``clamp.casting``). Importing a family registers it in
``OWNED``, by the full name of the netcl function whose place it takes; importing this package imports all of them.

Where nothing else is said, tensors are float32, float16 or bfloat16, in any mixture; each may need a gradient, which
has its shape and dtype; and what does not fit (shapes, an axis, an option that netcl does not have, tensors on two
queues) raises ValueError; integers that netcl would misread, TypeError. NotOwned leaves the call to netcl:
arguments that are none of clamp's, an ``out``. What is for netcl's functions of bare tensors is as its namesake.
"""

from importlib import import_module
from pkgutil import iter_modules

from clamp.casting.registry import OWNED

__all__ = ["OWNED"]

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")
