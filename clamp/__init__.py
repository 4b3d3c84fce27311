"""clamp: automatic mixed precision for netcl.

from clamp import amp
handle = amp.init()
...
with handle.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""

from pathlib import Path

if not Path(__file__).with_name("kernels").exists():
    __path__.append(str(Path(__file__).parents[1]))  # a checkout, in which kernels and lists lie beside the package

import clamp.opencl.device  # noqa: F401  (makes Intel's CPU runtime visible, before anything asks for platforms)

__version__ = "0.1.0"
