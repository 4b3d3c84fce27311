"""Watches what the code of a recorded pass reads on the host: modules and their settings, values, functions' variables.

A replay runs no Python, so whatever Python decided by, it decided when the pass was recorded. A :class:`Watch` is a
photograph of that, taken by walking from some roots (a graph, a model) through attributes, containers, closures and
the global names that functions use. Tensors are leaves here, told apart by identity; what they hold is read by the
launches, and whether they have moved is known by ``memory.py``.
"""

from __future__ import annotations

import gc
import io
import os
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from contextvars import Context, ContextVar
from functools import partial
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np
import wrapt

from clamp import bridge
from clamp.bridge import Node, Tensor
from clamp.interrupts import contextmanager
from clamp.recordings.code_names import (
    CodeNames,
    global_names,
    has_settings,
    imported,
    is_library,
    is_of_library,
    names_in,
    names_of_module,
    variables_of_environment,
)
from clamp.recordings.watched_state import (
    BUFFERS,
    CACHED,
    GENERATORS,
    PLAIN,
    VIEWS,
    Values,
    WatchedPart,
    behind,
    bytes_of,
    drawn,
    objects_among,
    position,
)

_ITEMS = (list, tuple, set, frozenset, deque)
_METHODS = (BuiltinMethodType, MethodWrapperType, MethodType, staticmethod, classmethod, property, partial)
_LONGEST = 4096  # items of a container, or bytes of an array, that are looked at one by one
_FEW = 16  # objects in a container of more items that are looked into: they are before each call
_ABOUT_CODE = frozenset(
    {"__annotations__", "__dataclass_fields__", "__dataclass_params__", "__signature__", "_abc_impl"}
)
_OF_TENSORS = frozenset(Tensor.__init__.__code__.co_names) | {"_backend"}
_OF_NODES = frozenset(Node.__init__.__code__.co_names)


class Watch:
    """The host's state that a pass was computed from, as it is now.

    Args:
        roots: where to begin, by the name that messages use. Objects here are looked into, whatever their class.
        hidden: whether an object's attribute of this name does not count. Those that an object gets later do not
            either, then. If not given, all count but those that an object names in ``_unwatched``.
        inside: whether an object is looked into, if it is no root.
        generators: whether random generators and iterators are looked at, which all that is drawn from them changes.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        hidden: Callable[[Any, str], bool] | None = None,
        inside: Callable[[Any], bool] = lambda x: True,
        generators: bool = False,
    ) -> None:
        self.tensors: list[Tensor] = []  # that were met
        self.optimizers: list[Any] = []  # that were met
        self.returned: tuple[Any, ...] = ()  # numbers, by the run that it was looked at after
        self.has_followed = False  # something that a pass has changed itself
        self.stepped: dict[int, tuple[Any, str]] = {}  # optimizers, averages: what such steps change
        self._settings: list[tuple[Any, str, AbstractSet[str]]] = []  # of which only those count that the code names
        self._names = CodeNames()
        self._generators = generators
        self._parts: list[WatchedPart] = []
        self._hidden, self._inside = hidden, inside
        self._known: dict[int, Any] = {}  # what was looked at, held so that ids stay unique
        self._known_modules: set[tuple[str, CodeType]] = set()
        self._stack = [(x, name, True) for name, x in roots.items()]
        self._walk()
        done = 0
        while done < len(self._settings):  # what they hold may lead to more
            found, done = self._settings[done:], len(self._settings)
            used = self._names.used()
            for x, name, not_settings in found:
                # Attributes that the code names: what it reads may decide, and what it writes would stay.
                own, names = bridge.own_attributes(x), used - not_settings
                is_named = names.__contains__
                if self._generators and id(x) in self.stepped:  # of what steps change, the code may compute the names
                    is_named = frozenset(own).difference(not_settings).__contains__
                self._variables(own, [*filter(is_named, list(own))], name)
            self._walk()

    def holds(self) -> bool:
        """Returns whether everything is as it was."""
        return all(map(WatchedPart.agrees, self._parts))

    def change(self, libraries: bool = True) -> str:
        """Returns what has changed first, as a user would write it; empty if nothing has.

        Args:
            libraries: whether what a library's code keeps for itself counts.
        """
        parts = (part for part in self._parts if libraries or not part.is_library)
        return next((part.first_change() for part in parts if not part.agrees()), "")

    @staticmethod
    @contextmanager
    def following(watches: Iterable[Watch], moved: dict[str, WatchedPart] | None = None) -> Iterator[None]:
        """Around a pass, or a part of one: what it changes itself, a counter, a table that it makes, is no change, and
        is added to ``moved``."""
        before = [(watch, part, part.flags()) for watch in watches for part in watch._parts]
        yield
        for watch, part, agreed in before:
            followed = dict.fromkeys(part.follow(agreed), part)
            watch.has_followed |= bool(followed)
            if moved is not None:
                moved.update(followed)

    # ------------------------------------------------------------------------------------------ the walk

    def _walk(self) -> None:
        while self._stack:
            self._look_at(*self._stack.pop())

    def _look_at(self, x: Any, name: str, root: bool = False) -> None:
        kind = type(x)  # not isinstance: a proxy may answer for something that it would have to import first
        if x is None or id(x) in self._known or (issubclass(kind, PLAIN) and is_library(kind)):
            return
        self._known[id(x)] = x
        if issubclass(kind, Tensor):
            self.tensors.append(x)
            self._settings.append((x, name, _OF_TENSORS))
        elif issubclass(kind, Node):
            self._add(lambda: (x.value,), lambda *_: f"{name}.value")
            self._settings.append((x, name, _OF_NODES))
        elif issubclass(kind, (dict, *_ITEMS, np.ndarray, *PLAIN)):
            self._content(x, kind, name)
            if not is_library(kind):
                self._object(x, kind, name)
        else:
            if not issubclass(kind, wrapt.ObjectProxy):
                self._look_at_code(x, kind, name, root)
            elif hasattr(x, "_self_losses"):
                self._note(lambda: (x._self_losses,), lambda *_: f"the number of losses that {name} has scaled", True)
            if issubclass(kind, wrapt.ObjectProxy) or "__wrapped__" in bridge.own_attributes(x):
                self._push(x.__wrapped__, name)  # a function under a policy, or recorded; a wrapped optimizer

    def _content(self, x: Any, kind: type, name: str) -> None:
        """Containers, arrays, and what is derived from them."""
        if issubclass(kind, dict):
            self._mapping(lambda: x, lambda key: f"{name}[{key!r}]")
            if issubclass(kind, defaultdict):
                self._add(lambda: (x.default_factory,), lambda *_: f"{name}.default_factory")
        elif issubclass(kind, _ITEMS):
            self._items(x, name)
        elif issubclass(kind, np.ndarray):
            self._array(x, name)
            self._push(bridge.own_attributes(x) or None, name)  # a masked one's mask

    def _look_at_code(self, x: Any, kind: type, name: str, root: bool) -> None:  # noqa: C901  (a case for each kind)
        """Functions, classes and objects."""
        if self._generators and issubclass(kind, GENERATORS):
            self._note(lambda: (drawn(x),), lambda *_: name, is_random=True)
        elif self._generators and is_library(kind) and hasattr(kind, "__next__"):
            self._note(lambda: position(x), lambda *_: name)
            # what zip, map or enumerate go through; not what a file has yet to write
            for part in () if issubclass(kind, io.IOBase) else gc.get_referents(x):
                self._push(part, name)
        elif issubclass(kind, FunctionType):
            if root or not is_library(x):
                self._names.found(x)
                self._function(x, name)
            elif x is os.getenv:
                self._push(os.environ, "os.environ")
        elif issubclass(kind, CACHED) and not is_library(x.__wrapped__):
            for part in gc.get_referents(x):  # its dict has results, or places, with the results beside them
                if type(part) is dict and part is not vars(x):
                    self._kept_by_cache(part, f"what {name} returned")
                else:
                    self._push(part, f"what {name} returned")
            self._push(x.__wrapped__, name)
        elif issubclass(kind, _METHODS):
            for part in ("__self__", "__func__", "fget", "func", "args", "keywords"):
                self._push(getattr(x, part, None), name)
            self._push(bridge.own_attributes(x) or None, name)
        elif issubclass(kind, ContextVar):
            self._add(lambda: (x.get(None),), lambda *_: name)
        elif issubclass(kind, Context):
            self._add(lambda: (*x.values(),), lambda *_: name)
        elif issubclass(kind, threading.local):  # what this thread has of it: a new one may have an ended one's number
            self._mapping(partial(threading.local.__getattribute__, x, "__dict__"), lambda key: f"{name}.{key}")
            self._push(kind, name)
        elif issubclass(kind, weakref.finalize):
            self._note(lambda: (x.alive,), lambda *_: f"{name}.alive")
        elif issubclass(kind, (weakref.ReferenceType, *weakref.ProxyTypes)):
            self._through(x, name)
        elif issubclass(kind, type):
            if not is_library(x):
                self._names.found_class(x)
                self._mapping(partial(vars, x), lambda key: f"{x.__qualname__}.{key}")
                self._add(lambda: (*x.__mro__, type(x)), lambda *_: f"the bases of {x.__qualname__}")
        elif bridge.is_optimizer(x):  # its settings and its state are the step's, which every replay makes anew
            self._add(lambda: tuple(x.params), lambda *_: f"{name}.params")
            self.optimizers.append(x)
            self.stepped[id(x)] = x, name
            self._settings.append((x, name, {"params"}))
        elif issubclass(kind, ModuleType):  # that an object or an argument holds
            if not is_of_library(x.__name__):
                self._settings.append((x, name, frozenset()))
        elif issubclass(kind, CellType):
            self._add(lambda: (bridge.content_of(x),), lambda *_: name)
        elif issubclass(kind, VIEWS):
            for part in gc.get_referents(x):
                self._push(part, name)
        elif issubclass(kind, BUFFERS):
            self._note(lambda: (bytes_of(x, _LONGEST),), lambda *_: name)
        elif root or (has_settings(x) and self._inside(x)):
            self._object(x, kind, name)

    def _kept_by_cache(self, kept: dict[Any, Any], name: str) -> None:
        self._mapping(lambda: kept, lambda _: name, is_library=True)

    def _through(self, weak: Any, name: str) -> None:
        """Watches what a weak reference leads to, without holding it: its attributes are held, not the object."""
        x = behind(weak)
        self._note(lambda: (behind(weak) is None,), lambda *_: f"what {name} refers to")
        if isinstance(x, MethodType):
            self._push(x.__func__, name)
            x = x.__self__
        if issubclass(type(x), FunctionType | type):
            self._push(x, name)
        elif x is not None and not isinstance(x, Tensor | Node):
            is_proxy = type(x) in weakref.ProxyTypes
            self._attributes(x, x.__dict__ if is_proxy else bridge.own_attributes(x), name)
            for cls in (x.__class__ if is_proxy else type(x)).__mro__:
                self._push(cls, name)

    def _object(self, x: Any, kind: type, name: str) -> None:
        if kind.__module__ == "netcl.optim.ema":  # its update is a step on the host, too
            self.stepped[id(x)] = x, name
        slots = bridge.slots_of(kind)
        if not (slots or bridge.own_attributes(x) or not is_library(kind)):
            return
        self._note(lambda: (type(x),), lambda *_: f"the class of {name}")
        self._attributes(x, bridge.own_attributes(x), name)
        if slots:
            self._mapping(lambda: bridge.values_in(x, slots), lambda key: f"{name}.{key}")
        for cls in kind.__mro__:
            self._push(cls, name)

    def _attributes(self, x: Any, own: dict[str, Any], name: str) -> None:
        """Watches an object's dict."""
        if not (own or type(x).__dictoffset__):
            return
        if self._hidden is None:
            unwatched: frozenset[str] = own.get("_unwatched", bridge.MADE_FROM_LAYERS)
            is_layer = is_library(type(x)) and isinstance(x, bridge.Module)
            self._mapping(lambda: own, lambda key: f"{name}.{key}", unwatched, is_layer)
            return
        keys = [key for key in list(own) if not self._hidden(x, key)]  # one that comes later has decided nothing
        self._variables(own, keys, name)

    def _variables(
        self, own: Mapping[str, Any], keys: Sequence[str], name: str, read_by: CodeType | None = None
    ) -> None:
        """These of an object's attributes, or of a module's."""
        if keys:
            self._add(lambda: (*map(own.get, keys),), lambda _, index: f"{name}.{keys[index]}", read_by)

    def _function(self, function: FunctionType, name: str) -> None:
        """Watches what a function finds outside: the variables around it, the globals that it names, its defaults, its
        own."""
        cells, scope, own = function.__closure__ or (), function.__globals__, vars(function)
        names = global_names(function.__code__, scope)
        known = (*function.__code__.co_freevars, *names, *[f"{name}'s code"] * 3)
        kept = (*known, *[f"{name}.{key}" for key in list(own)])

        def read() -> Values:
            found = (*map(bridge.content_of, cells), *map(scope.get, names))
            return (*found, function.__defaults__, function.__kwdefaults__, function.__code__, *own.values())

        def label(values: Values, index: int) -> str:
            return kept[index] if len(values) == len(kept) else f"attributes of {name}"

        self._add(read, label, function.__code__)
        for module in imported(function.__code__, scope):
            self._module_variables(module, function.__code__)

    def _module_variables(self, module: ModuleType, code: CodeType) -> None:
        """Watches what a function may read from a module: its variables that the function names; of a library's, dicts,
        as ``os.environ`` is one, and functions, in whose place the user may put others."""
        if (module.__name__, code) in self._known_modules:
            return
        self._known_modules.add((module.__name__, code))
        own = vars(module)
        if is_of_library(module.__name__):
            named = (name for name in names_in(code).attributes | names_in(code).texts if name in own)
            names = [name for name in named if issubclass(type(own[name]), MutableMapping | FunctionType)]
        else:
            names = names_of_module(code, own)
        self._variables(own, names, module.__name__, code)

    def _environment(self, code: CodeType, name: str) -> None:
        """Watches the variables of the environment that a function reads; all, where it reads them by another name."""
        names = variables_of_environment(code) if name.rpartition(".")[2] in ("environ", "getenv") else None
        if names:
            self._variables(os.environ, sorted(names), "os.environ")
        else:
            self._push(os.environ, "os.environ")

    def _array(self, x: np.ndarray, name: str) -> None:
        if x.dtype == object and x.size > _LONGEST:
            self._long(lambda: x.size, lambda: np.ndarray.ravel(x), name)
        elif x.dtype == object:
            self._add(lambda: (*np.ndarray.ravel(x),), lambda _, index: f"{name}[{index}]")
        elif x.nbytes <= _LONGEST and not x.dtype.hasobject:
            self._note(lambda: (np.ndarray.tobytes(x), x.dtype, x.shape), lambda *_: name)

    def _long(self, length: Callable[[], int], items: Callable[[], Iterable[Any]], name: str) -> None:
        """Counts a container that has too many items to be compared, and looks into its objects if they are few."""
        self._note(lambda: (length(),), lambda *_: name)
        for x in objects_among(items(), _FEW):
            self._push(x, f"an item of {name}")

    def _items(self, x: Any, name: str) -> None:
        # whose methods no class of the user's replaces
        base: Any = next(base for base in _ITEMS if isinstance(x, base))
        if base.__len__(x) > _LONGEST:
            self._long(partial(base.__len__, x), partial(base.copy if hasattr(base, "copy") else tuple, x), name)
            return

        def read() -> Values:  # of a set, to which a thread or a collection may add meanwhile, a copy's
            return (*base.__iter__(set.copy(x) if base is set else x),)

        if base not in (tuple, frozenset):
            self._add(read, lambda values, index: f"{name}[{index}]" if values else f"len({name})")
            return
        for index, item in enumerate(read()):
            self._push(item, f"{name}[{index}]")

    def _mapping(
        self,
        content: Callable[[], Mapping[Any, Any]],
        label: Callable[[Any], str],
        hidden: frozenset[str] = frozenset(),
        is_library: bool = False,
    ) -> None:
        x = content()
        # whose methods no class of the user's replaces
        base: Any = next((base for base in (OrderedDict, dict) if isinstance(x, base)), type(x))
        if base.__len__(x) > _LONGEST:
            self._long(lambda: base.__len__(content()), lambda: [*base.values(x)], label("..."))
            return

        def read() -> Values:
            x = content()
            return (*base.keys(x), *base.values(x))

        def shown() -> Values:
            kept = dict(content())
            for key in hidden:
                kept.pop(key, None)
            return (*kept, *kept.values())

        seen = self._note(
            shown if hidden else read,
            lambda values, index: (
                label(values[index % (len(values) // 2)]) if len(values) > 1 else label("(more or fewer)")
            ),
            is_library,
        )
        count = len(seen) // 2
        for key, value in zip(seen[:count], seen[count:], strict=False):  # odd if it was changed between the two
            if issubclass(type(key), str) and key in _ABOUT_CODE:
                continue
            self._push(value, label(key))
            if not issubclass(type(key), str):
                self._push(key, f"a key of {label('...')}")

    def _add(
        self, read: Callable[[], Values], label: Callable[[Values, int], str], read_by: CodeType | None = None
    ) -> None:
        """Notes a place, and has looked into what is there; into a module for what the code that reads it names."""
        for index, value in enumerate(seen := self._note(read, label)):
            if read_by is not None and isinstance(value, ModuleType):
                self._module_variables(value, read_by)
            elif read_by is not None and (value is os.environ or value is os.getenv):
                self._environment(read_by, label(seen, index))
            else:
                self._push(value, label(seen, index))

    def _note(
        self, read: Callable[[], Values], label: Callable[[Values, int], str], is_library: bool = False,
        is_random: bool = False,
    ) -> Values:  # fmt: skip
        """Notes a place; what is there now. What is pushed is to come from this: another thread, a trace or a
        collection may change the place meanwhile, and what is seen and what is looked into would be two states."""
        self._parts.append(WatchedPart(read, label, read(), is_library, is_random))
        return self._parts[-1].seen

    def _push(self, x: Any, name: str) -> None:
        self._stack.append((x, name, False))
