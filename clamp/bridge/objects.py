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

    Nobody asks for all objects: among them are tuples that other threads are making just now, and Python raises
    SystemError there if somebody else holds one. What refers to a class is its instances, and little besides.
    """
    if _count_set_aside():
        gc.unfreeze()
    # Not isinstance: it asks x.__class__, and proxies run code of their own at that.
    return [x for x in gc.get_referrers(*_with_subclasses(kind)) if issubclass(type(x), kind)]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))
