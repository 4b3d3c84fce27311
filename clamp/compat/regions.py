"""Regions of a thread that the faces open: one entry for all of them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, TypeVar

from clamp import bridge, session
from clamp.bridge import DTypeLike, Tensor
from clamp.casting.operands import note_numpy_backend
from clamp.casting.policy_table import AMP_DTYPES, check_dtype
from clamp.casting.regions import Caching, check_caching, current_region, in_own_region, region_here
from clamp.interrupts import contextmanager, of_tasks
from clamp.opencl.device import capabilities
from clamp.ops.arguments import yes_or_no
from clamp.patching.user_functions import require_function

F = TypeVar("F", bound=Callable[..., Any])
Self = TypeVar("Self", bound="ThreadRegion")

_OTHER_DTYPES = ("float64", "int8", "int32", "int64", "uint8", "bool")
_opened = of_tasks("opened", tuple[tuple[Any, Any], ...]())  # regions that were entered, each with what holds it open


def take_opened(region: Any) -> Any:
    """Forgets that this thread, or task, has entered a region; returns what holds it open, None if nothing does."""
    opened = _opened.get()
    for index, (one, held) in reversed([*enumerate(opened)]):
        if one is region:  # not the last, where they are left in another order
            _opened.set((*opened[:index], *opened[index + 1 :]))
            return held
    return None


def note_opened(region: Any, held: Any) -> None:
    """This thread, or task, enters a region."""
    _opened.set((*_opened.get(), (region, held)))


class ThreadRegion:
    """A region of the calling thread, or task of asyncio; context manager and decorator. Nests, and may be entered by
    several.

    Without ``amp.init()`` it patches netcl on first entry and leaves AMP off outside the region. The weight cache is
    emptied at the end of the outermost region.

    Args:
        name: how the region is written, for messages.
        changes: fields of ``Region`` that differ from the region around.
    """

    def __init__(self, name: str, **changes: Any) -> None:
        self._name = name
        self._changes = changes
        self._next = threading.local()

    @contextmanager
    def _opened(self: Self) -> Iterator[Self]:
        session.ensure_patched()
        with in_own_region(region_here(**self._changes)):
            yield self

    # As those of `Managed`: a ``with`` asks for both before it calls the first, and holds the opened region alone then.
    # Who calls ``__enter__`` without one has this hold it.

    class _Enter:
        def __get__(self, region: Any, kind: type) -> Any:
            if region is None:
                return lambda region: region.__enter__()
            generator = vars(region._next).pop("to_enter", lambda: None)()
            if generator is not None:
                return generator.__next__
            opened = region._opened()
            note_opened(region, opened)
            return opened.__enter__

    class _Exit:
        def __get__(self, region: Any, kind: type) -> Any:
            if region is None:
                return lambda region, *exception: region.__exit__(*exception)
            if (opened := take_opened(region)) is not None:
                return opened.__exit__
            opened = region._opened()  # from Python 3.14 on a `with` asks for this first
            vars(region._next)["to_enter"] = opened._to_enter
            return opened.__exit__

    __enter__, __exit__ = _Enter(), _Exit()

    def __call__(self, function: F) -> F:
        late = f"outside of the region. Write `with {self._name}:` inside it, around what is to be cast."
        require_function(function, f"@{self._name}", late)

        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]


class autocast(ThreadRegion):
    """A region of this thread in which ops cast, or with ``enabled=False`` do not; context manager and decorator.

    See ``ThreadRegion``.

    Args:
        enabled: whether ops cast inside.
        dtype: the AMP dtype; that of the region around, or float16, if not given.
        cache_enabled: whether 16-bit copies of weights are kept, or ``"last_use"`` (see ``amp.init``); as around, if
            not given.
        device_type: refused; casts follow each tensor's queue.

    Raises:
        ValueError: there is no such dtype, or ``cache_enabled`` is another text. For a dtype that netcl has and AMP has
            not a warning is given, as in PyTorch, and nothing is cast inside.
        TypeError: ``enabled`` is PyTorch's device type, or a function (``@amp.autocast`` without parentheses); or what
            the region decorates is no function, or a generator or coroutine, whose body would run after it.
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        dtype: DTypeLike | None = None,
        cache_enabled: Caching | None = None,
        device_type: None = None,
    ) -> None:
        if bridge.dtype_name(enabled) in AMP_DTYPES:
            raise TypeError(f"amp.autocast takes the dtype by name: amp.autocast(dtype={enabled!r})")
        is_device = isinstance(enabled, str) and enabled.lower() not in ("true", "false")
        refuse_device("autocast", enabled if is_device else device_type)
        changes: dict[str, Any] = {"enabled": switch(enabled, "amp.autocast", "enabled")}
        if dtype is not None:
            other = bridge.dtype_name(dtype)
            if other in _OTHER_DTYPES:
                warnings.warn(
                    f"autocast to {other} is not supported: casts are off inside. Pass one of {', '.join(AMP_DTYPES)}.",
                    UserWarning,
                    stacklevel=2,
                )
                changes["enabled"] = False
            else:
                changes["dtype"] = check_dtype(dtype)
        if cache_enabled is not None:
            changes["cache_enabled"] = check_caching("cache_enabled", cache_enabled)
        super().__init__("amp.autocast()", **changes)


def is_autocast_enabled(device_type: None = None) -> bool:
    """Returns whether ops called here cast.

    Args:
        device_type: refused.

    Raises:
        TypeError: it is given PyTorch's device type.
    """
    refuse_device("is_autocast_enabled", device_type)
    region = current_region()
    return region is not None and region.enabled


def get_autocast_dtype(device_type: None = None) -> str:
    """The AMP dtype of the region around, ``"float16"`` outside any.

    Args:
        device_type: refused.

    Raises:
        TypeError: it is given PyTorch's device type.
    """
    refuse_device("get_autocast_dtype", device_type)
    region = current_region()
    return region.dtype if region is not None else "float16"


def switch(value: Any, region: str, name: str) -> bool:
    """What a region was given where it takes True or False.

    Args:
        region: how the region is written, for the message.

    Raises:
        TypeError: it is a function, or something else that Python would take for True.
    """
    if callable(value):
        raise TypeError(f"{region} got the function {value!r} as its {name}: write @{region}(), with parentheses")
    return yes_or_no(region, name, value)


def refuse_device(call: str, device: Any) -> None:
    """Raises TypeError for PyTorch's device, which says nothing here. None: none was given."""
    if device is not None:
        raise TypeError(
            f"{call} takes no device or device type: casts and scales follow each tensor's queue. Leave {device!r} out."
        )


def warn_if_nothing_is_gained(tensor: Tensor, dtype: str) -> None:
    """Warns, once for a device, where the dtype cannot be stored: nothing becomes smaller or faster there."""
    if not bridge.on_device(tensor):
        note_numpy_backend()
    elif dtype == "float16" and not capabilities(tensor.queue).half_storage:
        _warn_of(tensor.queue.device.name)


@cache
def _warn_of(device: str) -> None:
    warnings.warn(
        f"{device} cannot store float16: mixed precision in float16 gains nothing there. Pass dtype='bfloat16'.",
        UserWarning,
        stacklevel=4,
    )
