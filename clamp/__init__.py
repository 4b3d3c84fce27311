"""clamp: automatic mixed precision for netcl.

from clamp import amp
handle = amp.init()
...
with handle.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""

from clamp.opencl.device import make_cpu_runtime_visible

make_cpu_runtime_visible()  # before anything asks pyopencl for platforms

__version__ = "0.1.0"
