"""The handle, which ``amp.init`` returns, and its counterpart that does nothing."""

from clamp.handle.active import AmpHandle
from clamp.handle.no_op import NoOpHandle

__all__ = ["AmpHandle", "NoOpHandle"]
