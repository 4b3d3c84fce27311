"""What ``amp.init`` returns: the handle, its do-nothing twin, and the wrapper for optimizers with several losses."""

from clamp.handle.active import AmpHandle
from clamp.handle.no_op import NoOpHandle
from clamp.handle.optim_wrapper import OptimWrapper

__all__ = ["AmpHandle", "NoOpHandle", "OptimWrapper"]
