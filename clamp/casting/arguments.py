"""Nested arguments of a call: which tensors are in them, and casting them all; what verbose says of a cast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from clamp import bridge
from clamp.bridge import HALF_DTYPES, DTypeLike, Node, Tensor, TensorLike
from clamp.casting.containers import Conversion
from clamp.casting.operands import cast_node, say_nothing
from clamp.casting.regions import Region, check_dtype


def cast(x: TensorLike, dtype: DTypeLike) -> TensorLike:
    """x in another dtype, differentiable; the very same node if it is that already.

    Args:
        x: node or tensor, float32, float16 or bfloat16.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.

    Raises:
        TypeError: x is no floating node or tensor on an OpenCL device.
        ValueError: unknown dtype.
    """
    dtype = check_dtype(dtype, "dtype")
    value = getattr(x, "value", None)
    if not isinstance(value, bridge.Tensor) or value.dtype not in bridge.STORAGE or not bridge.on_device(value):
        raise TypeError(
            f"cast takes a float32, float16 or bfloat16 Node or Tensor on an OpenCL device, got {type(x).__name__}"
            f"{f' of dtype {value.dtype}' if isinstance(value, bridge.Tensor) else ''}"
        )
    return cast_node(x, dtype)


class CastArguments:
    """The arguments of a call with every floating node and tensor in one dtype, inside nested containers too.

    ``out=`` is a place to write to and is never cast; neither are integers, float64, host arrays. What the call writes
    to a container that it was given a copy of stands in the container itself when the block is left::

        with CastArguments(args, kwargs, "float16", say_nothing, use_cache=True) as (args, kwargs):
            return function(*args, **kwargs)
    """

    __slots__ = ("_cast", "_given")

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: str,
        report: Callable[[str, str], None],
        use_cache: bool,
    ) -> None:
        self._cast = casts_to(dtype, report, use_cache)
        self._given = args, kwargs

    def __enter__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (args, kwargs), cast = self._given, self._cast
        return tuple(map(cast, args)), {name: x if name == "out" else cast(x) for name, x in kwargs.items()}

    def __exit__(self, *error: object) -> None:
        self._cast.give_back()


def casts_to(dtype: str, report: Callable[[str, str], None], use_cache: bool) -> Conversion:
    """Casts every floating node and tensor in nested containers."""

    def cast_one(x: TensorLike) -> TensorLike:
        value = x.value
        castable = isinstance(value, Tensor) and value.dtype in bridge.STORAGE and bridge.on_device(value)
        return cast_node(x, dtype, report, use_cache) if castable else x

    return Conversion(cast_one)


_NONE: dict[str, Any] = {}


def holds_half(args: tuple[Any, ...] | list[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether a 16-bit tensor is among the arguments. On the path of every call: keep it short."""
    for x in args:
        if isinstance(x, Node):
            if getattr(x.value, "dtype", None) in HALF_DTYPES:
                return True
        elif isinstance(x, Tensor):
            if x.dtype in HALF_DTYPES:
                return True
        elif isinstance(x, (list, tuple)) and x and not isinstance(x[0], int) and holds_half(x, _NONE):
            return True
    return bool(kwargs) and holds_half(tuple(kwargs.values()), _NONE)


def reporter(region: Region | None, function: str) -> Callable[[str, str], None]:
    """Returns a function for a real cast to call: it prints a line if there is a region and it is verbose."""
    return partial(_say, function) if region is not None and region.verbose else say_nothing


def _say(function: str, source: str, target: str) -> None:
    kinds = ["Half" if dtype in HALF_DTYPES else "Float" for dtype in (source, target)]
    print(f"{kinds[0]}->{kinds[1]} ({function})")
