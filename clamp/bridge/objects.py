"""Objects that nobody handed to clamp: found among all that the process has."""

from __future__ import annotations

import gc
from typing import TypeVar

T = TypeVar("T")

_count_set_aside = gc.get_freeze_count


def living(kind: type[T]) -> list[T]:
    """All instances of a class. Takes milliseconds: it looks at every object there is.

    What ``gc.freeze()`` has set aside shows in no list of objects, so it is brought back first, as ``gc.unfreeze()``
    does: later collections take as long as they did before the freeze. Freezing again would set aside what is young
    now, too, and its memory would never be freed.
    """
    if _count_set_aside():
        gc.unfreeze()
    # Not isinstance: it asks x.__class__, and proxies run code of their own at that.
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]
