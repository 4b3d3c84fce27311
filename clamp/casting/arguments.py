"""Arguments of a call: the tensors in them, in nested containers too, converted or cast; what verbose says of a cast.

Containers become copies of the same type with what is in them converted, and what is written to these comes back.
Looked into are lists, tuples, dicts, deques and what is derived from them, the wrappers of ``collections`` and of
``types``, dataclasses and namespaces; an iterator converts as it goes. (A tensor cannot be in a set.) Whatever has
``parameters()`` is a model, and stays as it is, and so does a container in which nothing is converted.
"""

from __future__ import annotations

import io
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import is_
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import wrapt

from clamp import bridge
from clamp.bridge import HALF_DTYPES, DTypeLike, Node, Tensor, TensorLike
from clamp.casting.operands import cast_node, say_nothing
from clamp.casting.policy_table import check_dtype
from clamp.casting.regions import Caching, Region, current_region

T = TypeVar("T")

_PLAIN = (int, float, complex, str, bytes, type(None), np.ndarray, np.generic, type)
#: What a container of a class of the user's is underneath, and is made and filled as, whatever its class does when one
#: is made or filled. The wrappers of ``collections`` hold a list or dict in an attribute.
_BASES: tuple[type, ...] = (OrderedDict, defaultdict, dict, list, deque, tuple, SimpleNamespace)
_WITH_ATTRIBUTES = (UserDict, UserList)
_BARE = {dict, list, tuple}  # without attributes


def with_items(x: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple as x is one, of other items."""
    return _copied(x, dict(enumerate(items)), _attributes(x))


def mapped(x: Any, convert: Callable[[Any], Any]) -> Any:
    """Nested containers with every node and tensor in them converted; see ``Conversion``."""
    return Conversion(convert)(x)


def tensors_in(x: Any) -> list[Tensor]:
    """Every tensor in nested containers, but for those that iterators have still to give."""
    found: list[Tensor] = []

    def note(item: Any) -> Any:
        if isinstance(item.value, Tensor):
            found.append(item.value)
        return item

    mapped(x, note)
    return found


class Conversion:
    """A conversion of nested containers; after it, ``give_back`` writes to the originals what the copies were given.

    Args:
        convert: makes of a node or tensor what stands for it in the copies; itself where nothing changes.
    """

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert
        # of containers: the original, the copy, and which items and attributes it held then
        self._copies: list[tuple[Any, Any, dict[Any, Any], dict[str, Any]]] = []
        self._iterators: list[_Items] = []
        self._made: dict[int, tuple[Any, Any]] = {}  # id of what was made -> it, what it stands for
        self._known: dict[int, Any] = {}  # id of a container -> what stands for it: a container met twice is one

    def __call__(self, x: Any) -> Any:
        """x with every node and tensor in it converted.

        Raises:
            TypeError: a container in which something is to be converted cannot be copied.
        """
        if isinstance(x, (Node, Tensor)):
            new = self._convert(x)
        elif isinstance(x, _PLAIN) or not _is_container(x):
            return x
        elif id(x) in self._known:
            return self._known[id(x)]
        else:
            self._known[id(x)] = x  # what holds itself stays so
            new = self._known[id(x)] = self._container(x)
        if new is not x:
            self._made[id(new)] = new, x
        return new

    def _container(self, x: Any) -> Any:
        if type(x) not in _BARE and isinstance(x, Iterator):
            self._iterators.append(_Items(x, self._convert))
            return self._iterators[-1]
        before, held = _items(x), _attributes(x)
        items = {key: self(item) for key, item in before.items()}
        attributes = {name: self(value) for name, value in held.items()}
        if _identical(items, before) and _identical(attributes, held):
            return x
        try:
            new = _copied(x, items, attributes)
        except TypeError as error:
            raise TypeError(
                f"the tensors in a {type(x).__name__} are to be cast for a call, and Python cannot copy it ({error}): "
                "pass the tensors by themselves"
            ) from error
        self._copies.append((x, new, items, attributes))
        return new

    def call(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Returns ``function(*args, **kwargs)`` with the arguments converted, but for ``out=``, a place to write to.

        What the function writes to the copy of a container stands in the container itself then.
        """
        given = tuple(map(self, args)), {name: x if name == "out" else self(x) for name, x in kwargs.items()}
        try:
            return function(*given[0], **given[1])
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Writes to the containers that were given what has been written to their copies since."""
        for iterator in self._iterators:
            iterator.give_back()
        for original, new, items, attributes in self._copies:
            now = _items(new)
            if list(now) != list(items) or not _identical(now, items):
                self._write(original, items, now)
            now = _attributes(new)
            for name in attributes.keys() - now.keys():
                object.__delattr__(original, name)
            for name, value in now.items():
                if name not in attributes or attributes[name] is not value:
                    object.__setattr__(original, name, self._given(value))

    def _given(self, x: Any) -> Any:
        """Returns what was given where x stands; x itself, if the call made it."""
        new, original = self._made.get(id(x), (None, None))
        return original if new is x else x

    def _write(self, original: Any, items: dict[Any, Any], now: dict[Any, Any]) -> None:
        if isinstance(original, list | deque):
            original.clear()
            original.extend(map(self._given, now.values()))
            return
        for key in items.keys() - now.keys():
            original.pop(key, None)
        for key, value in now.items():
            if key not in items or items[key] is not value:
                original[key] = self._given(value)
        if [key for key in original if key in now] != list(now):
            in_order = [(key, original.pop(key)) for key in now]
            original.update(in_order)


class _Items(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """An iterator, of whatever type, that converts what it gives. Of that it keeps the last item alone."""

    def __init__(self, iterator: Iterator[Any], convert: Callable[[Any], Any]) -> None:
        super().__init__(iterator)
        self._self_convert = convert
        self._self_last = Conversion(convert)

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        return self._converted(lambda: next(self.__wrapped__))

    def send(self, value: Any) -> Any:
        """As a generator's."""
        return self._converted(lambda: self.__wrapped__.send(value))

    def _converted(self, following: Callable[[], Any]) -> Any:
        self.give_back()
        self._self_last = Conversion(self._self_convert)
        return self._self_last(following())

    def give_back(self) -> None:
        """Writes what the last item was given to what it was made of."""
        self._self_last.give_back()


def _is_container(x: Any) -> bool:
    cls = type(x)
    if cls in _BARE:
        return True
    if isinstance(x, (*_BASES, *_WITH_ATTRIBUTES, MappingProxyType)):
        return not callable(getattr(cls, "parameters", None))
    if hasattr(cls, "__dataclass_fields__"):
        return not callable(getattr(cls, "parameters", None)) and not cls.__module__.startswith("netcl.")
    return isinstance(x, Iterator) and not isinstance(x, io.IOBase)


def _items(x: Any) -> dict[Any, Any]:
    if type(x) is dict:
        return x.copy()
    if isinstance(x, (dict, MappingProxyType)):
        return dict(x.items())
    return dict(enumerate(x)) if isinstance(x, (list, tuple, deque)) else {}


def _attributes(x: Any) -> dict[str, Any]:
    """Returns the attributes of a container of a class of the user's, however it finds those that it lacks."""
    found: dict[str, Any] = {}
    if type(x) in _BARE:
        return found
    with suppress(AttributeError):
        own = object.__getattribute__(x, "__dict__")
        found |= {} if own is x else own  # whose attributes are its items
    for name in (slot for cls in type(x).__mro__ for slot in _slots_of(cls)):
        with suppress(AttributeError):
            found[name] = object.__getattribute__(x, name)
    return found


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _copied(x: Any, items: dict[Any, Any], attributes: dict[str, Any]) -> Any:
    if isinstance(x, MappingProxyType):
        return MappingProxyType(items)
    base: Any = next((base for base in _BASES if isinstance(x, base)), object)
    new = base.__new__(type(x), items.values()) if base is tuple else base.__new__(type(x))
    if isinstance(x, deque):
        deque.__init__(new, items.values(), x.maxlen)
    elif isinstance(x, list):
        list.extend(new, items.values())
    elif isinstance(x, dict):
        if isinstance(x, defaultdict):
            defaultdict.__init__(new, x.default_factory)
        if getattr(x, "__dict__", None) is x:
            object.__setattr__(new, "__dict__", new)
        for key, item in items.items():
            base.__setitem__(new, key, item)
    for name, value in attributes.items():
        object.__setattr__(new, name, value)
    return new


def _identical(xs: dict[Any, Any], ys: dict[Any, Any]) -> bool:
    """Returns whether two dicts of the same keys have the same objects under them."""
    return all(map(is_, xs.values(), ys.values()))


# ---------------------------------------------------------------------------------------------------- casts


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
    if not bridge.is_floating(value):
        raise TypeError(
            f"cast takes a float32, float16 or bfloat16 Node or Tensor on an OpenCL device, got {type(x).__name__}"
            f"{f' of dtype {value.dtype}' if isinstance(value, bridge.Tensor) else ''}"
        )
    region = current_region()  # without one nobody hears of a write to a weight, whose copy would be the old one
    return cast_node(x, dtype, use_cache=region is not None and region.cache_enabled)


def casts_to(dtype: str, report: Callable[[str, str], None] = say_nothing, use_cache: Caching = False) -> Conversion:
    """Casts every floating node and tensor in nested containers; neither integers, float64, nor host arrays."""

    def cast_one(x: TensorLike) -> TensorLike:
        return cast_node(x, dtype, report, use_cache) if bridge.is_floating(x.value) else x

    return Conversion(cast_one)


def casts_in(region: Region | None, dtype: str, function: str) -> Conversion:
    """The casts of a function's arguments in a region, or outside of all."""
    return casts_to(dtype, reporter(region, function), region is None or region.cache_enabled)


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
