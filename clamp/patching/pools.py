"""A memory pool for each queue.

netcl has one pool for a context. What a tensor of one queue frees while a launch still uses it goes to the next tensor
that asks, on whatever queue: launches of one queue wait for each other, those of two do not. So while AMP is on, the
queue that asked first keeps netcl's pool, and each further one of its context has a pool of its own. These stay, as
netcl's do: tensors go back to them after AMP has ended, and shared virtual memory must not be freed under a launch.
"""

from __future__ import annotations

import threading
from typing import Any

from netcl.core import memory
from netcl.core.memory import PersistentBufferPool

from clamp.patching.meets import meets

_lock = threading.RLock()


@meets("netcl.core.memory.get_persistent_pool")
def of_queue(wrapped: Any, instance: None, /, queue: Any) -> PersistentBufferPool:
    """The pool of a queue."""
    first = wrapped(queue)
    if first.queue == queue:
        return first
    # Beside netcl's, whose keys are positive, so that whoever looks at all pools meets these, too.
    key = -queue.int_ptr
    pool = memory._PERSISTENT_POOLS.get(key)
    if pool is None:
        with _lock:
            pool = memory._PERSISTENT_POOLS.setdefault(key, PersistentBufferPool(queue.context, queue))
    return pool
