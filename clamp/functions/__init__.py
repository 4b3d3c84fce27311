"""An op's forward and backward, bound into netcl's autograd: one file a family, mirroring ``ops/``.

A function here takes netcl's arguments behind a ``Casting``, which decides what the kernels read and in which
dtype the result is stored (``clamp.casting``). Importing a family registers it in ``OWNED``, by the full name of the
netcl function whose place it takes; importing this package imports all of them.

Tensors are float32, float16 or bfloat16, in any mixture, where nothing else is said. What does not fit (shapes, an
axis, tensors on two queues) raises ValueError; what must be floating and is not, in a loss, TypeError. NotOwned leaves
the call to netcl: arguments that are none of clamp's, an ``out`` to write to.
"""

from importlib import import_module
from pkgutil import iter_modules

from clamp.casting.registry import OWNED

__all__ = ["OWNED"]

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")
