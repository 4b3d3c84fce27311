"""What a function of the user's, or a model, is given in containers: of which type, and what it writes to them."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn.layers import Linear, Module

from clamp import amp
from tests.reference import to_device


class Batch(dict):  # type: ignore[type-arg]
    """Derived from dict, with an attribute, and items that read as attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.notes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Bunch(dict):  # type: ignore[type-arg]
    """Whose attributes are its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Named(list):  # type: ignore[type-arg]
    """Derived from list, made of more than its items."""

    def __init__(self, name: str, items: Any = ()) -> None:
        super().__init__(items)
        self.name = name


class Point(tuple):  # type: ignore[type-arg]
    """Derived from tuple, made of two numbers."""

    def __new__(cls, x: Any, y: Any) -> Point:
        return super().__new__(cls, (x, y))


@dataclass
class Data:
    x: Any
    h: Any = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    more: dict[str, Any]


@dataclass(slots=True)
class Slotted:
    x: Any
    h: Any = 1


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """A dict whose items are its fields as well."""

    x: Any = None

    def __post_init__(self) -> None:
        self["x"] = self.x


Pair = namedtuple("Pair", "x rest")


class Kind(NamedTuple):
    """A container with a tensor in it: how it is made, where the tensor is, how a value is written, and read again."""

    make: Callable[[Any], Any]
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    written: Callable[[Any], Any]


def item(key: Any) -> Callable[[Any], Any]:
    return lambda c: c[key]


def put_item(key: Any) -> Callable[[Any, Any], None]:
    return lambda c, value: c.__setitem__(key, value)


def put_attribute(name: str) -> Callable[[Any, Any], None]:
    return lambda c, value: setattr(c, name, value)


def by_key(make: Callable[[Any], Any]) -> Kind:
    return Kind(make, item("x"), put_item("h"), item("h"))


def by_place(make: Callable[[Any], Any]) -> Kind:
    return Kind(make, item(0), lambda c, value: c.append(value), item(-1))


MUTABLE: dict[str, Kind] = {
    "dict": by_key(lambda x: {"x": x}),
    "OrderedDict": by_key(lambda x: OrderedDict(x=x)),
    "defaultdict": by_key(lambda x: defaultdict(list, x=x)),
    "Counter": by_key(lambda x: Counter(x=x)),
    "UserDict": by_key(lambda x: UserDict(x=x)),
    "derived dict": by_key(lambda x: Batch(x=x)),
    "bunch": by_key(lambda x: Bunch(x=x)),
    "bunch, by attribute": Kind(lambda x: Bunch(x=x), attrgetter("x"), put_attribute("h"), item("h")),
    "attribute of a derived dict": Kind(
        lambda x: Batch(x=x), attrgetter("x"), put_attribute("h"), lambda c: vars(c)["h"]
    ),
    "default of a defaultdict": Kind(
        lambda x: defaultdict(list, x=x), item("x"), lambda c, value: c["h"].append(value), lambda c: c["h"][0]
    ),
    "list": by_place(lambda x: [x]),
    "deque": by_place(lambda x: deque([x], maxlen=3)),
    "UserList": by_place(lambda x: UserList([x])),
    "derived list": by_place(lambda x: Named("n", [x])),
    "attribute of a derived list": Kind(lambda x: Named("n", [x]), item(0), put_attribute("name"), attrgetter("name")),
    "list, an item replaced": Kind(lambda x: [x, 0], item(0), put_item(1), item(1)),
    "list, an item put first": Kind(lambda x: [x], item(0), lambda c, value: c.insert(0, value), item(0)),
    "dataclass": Kind(lambda x: Data(x), attrgetter("x"), put_attribute("h"), attrgetter("h")),
    "dict in a dataclass": Kind(
        lambda x: Data(0, more={"x": x}), lambda c: c.more["x"], lambda c, v: c.more.update(h=v), lambda c: c.more["h"]
    ),
    "dict in a frozen dataclass": Kind(
        lambda x: Frozen(x, {"x": x}), lambda c: c.more["x"], lambda c, v: c.more.update(h=v), lambda c: c.more["h"]
    ),
    "dict that is a dataclass": Kind(lambda x: Output(x), attrgetter("x"), put_item("h"), item("h")),
    "SimpleNamespace": Kind(lambda x: SimpleNamespace(x=x), attrgetter("x"), put_attribute("h"), attrgetter("h")),
    "list in a tuple": Kind(lambda x: (0, [x]), lambda c: c[1][0], lambda c, v: c[1].append(v), lambda c: c[1][-1]),
    "dict in a namedtuple": Kind(
        lambda x: Pair(x, {"x": x}), lambda c: c.rest["x"], lambda c, v: c.rest.update(h=v), lambda c: c.rest["h"]
    ),
    "list in a dict in a list": Kind(
        lambda x: [{"l": [x]}], lambda c: c[0]["l"][0], lambda c, v: c[0]["l"].append(v), lambda c: c[0]["l"][-1]
    ),
    "behind a proxy": Kind(
        lambda x: MappingProxyType({"l": [x]}), lambda c: c["l"][0], lambda c, v: c["l"].append(v), lambda c: c["l"][-1]
    ),
}
IMMUTABLE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda x: (x, 1), item(0)),
    "namedtuple": (lambda x: Pair(x, 1), lambda c: c.x),
    "derived tuple": (lambda x: Point(x, 1), item(0)),
    "frozen dataclass": (lambda x: Frozen(x, {}), lambda c: c.x),
    "mapping proxy": (lambda x: MappingProxyType({"x": x}), item("x")),
}
KINDS = {name: (kind.make, kind.get) for name, kind in MUTABLE.items()} | IMMUTABLE
ITERATORS: dict[str, Callable[[list[Any]], Iterator[Any]]] = {
    "list iterator": iter,
    "generator": lambda items: (x for x in items),
    "chain": lambda items: chain(items[:1], items[1:]),
    "zip": lambda items: (x for (x,) in zip(items, strict=True)),
}


class Net(Module):
    """Calls the function that it is called with."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.linear = Linear(queue, 2, 2)

    def parameters(self) -> list[Any]:
        return self.linear.parameters()

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Door(NamedTuple):
    """A way for a function to be given cast arguments: the dtype that they had, and have then."""

    before: str
    inside: str
    open: Callable[[cl.CommandQueue], Callable[..., Any]]  # gives what calls a function with cast arguments


def of_level(level: str) -> Callable[[cl.CommandQueue], Callable[..., Any]]:
    return lambda queue: amp.initialize(Net(queue), opt_level=level)


def decorated(decorator: Callable[..., Any]) -> Callable[[cl.CommandQueue], Callable[..., Any]]:
    return lambda queue: lambda function, *args: decorator(function)(*args)


def promoted(queue: cl.CommandQueue) -> Callable[..., Any]:
    """Beside a float32 tensor."""
    wide = ones(queue)
    return lambda function, *args: amp.promote_function(lambda wide, *args: function(*args))(wide, *args)


DOORS: dict[str, Door] = {
    "half_function": Door("float32", "float16", decorated(amp.half_function)),
    "float_function": Door("float16", "float32", decorated(amp.float_function)),
    "promote_function": Door("float16", "float32", promoted),
    "custom_fwd": Door("float32", "float16", decorated(partial(amp.custom_fwd, cast_inputs="float16"))),
    "O0": Door("float16", "float32", of_level("O0")),
    "O2": Door("float32", "float16", of_level("O2")),
    "O3": Door("float32", "float16", of_level("O3")),
}


def ones(queue: cl.CommandQueue, dtype: str = "float32") -> Tensor:
    return to_device(queue, np.ones(2), dtype)


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    if not request.param.startswith("O"):
        amp.init()
    yield DOORS[request.param]
    amp.shutdown()


def test_what_is_written_comes_back(queue: cl.CommandQueue, door: Door) -> None:
    call = door.open(queue)
    for name, (make, get, put, written) in MUTABLE.items():
        made, seen = make(x := ones(queue, door.before)), []

        def use(c: Any, get: Any = get, put: Any = put, seen: Any = seen) -> None:
            seen.append((type(c), get(c).dtype))
            put(c, 3.0)

        call(use, made)
        assert seen == [(type(made), door.inside)], name
        assert written(made) == 3.0, name
        assert x.dtype == door.before, name
        if "first" not in name:
            assert get(made) is x, name


def test_containers_keep_their_type_and_those_without_casts_are_the_same(queue: cl.CommandQueue, door: Door) -> None:
    call = door.open(queue)
    for name, (make, get) in KINDS.items():
        seen: list[Any] = []
        made, inside, plain = make(ones(queue, door.before)), make(ones(queue, door.inside)), make(1.0)
        for container in (made, inside, plain):
            call(seen.append, container)
        assert type(seen[0]) is type(made), name
        assert get(seen[0]).dtype == door.inside, name
        assert get(made).dtype == door.before, name
        assert seen[1] is inside, name
        assert seen[2] is plain, name


@pytest.mark.parametrize("door", ["O0", "O2", "O3"], indirect=True)
def test_results_keep_their_type(queue: cl.CommandQueue, door: Door) -> None:
    model = door.open(queue)
    for name, (make, get) in KINDS.items():
        for dtype in ("float16", "float32"):
            made = make(ones(queue, dtype))
            got = model(lambda made=made: made)
            assert type(got) is type(made), name
            assert get(got).dtype == "float32", name
            assert get(made).dtype == dtype, name
            assert (got is made) == (dtype == "float32"), name


def test_iterators_cast_as_they_go(queue: cl.CommandQueue, door: Door) -> None:
    call = door.open(queue)
    for name, make in ITERATORS.items():
        first, second = {"x": ones(queue, door.before)}, {"x": ones(queue, door.before)}
        iterator = make([first, second, 5, ones(queue, door.before)])
        seen: list[Any] = []

        def use(it: Any, iterator: Any = iterator, seen: Any = seen) -> None:
            assert isinstance(it, type(iterator))
            for batch in it:
                seen.append(batch["x"].dtype if isinstance(batch, dict) else batch)
                if isinstance(batch, int):
                    break
                batch["h"] = len(seen)

        call(use, iterator)
        assert seen == [door.inside, door.inside, 5], name
        assert (first["h"], second["h"]) == (1, 2), name
        assert next(iterator).dtype == door.before, name  # what was not asked for is still there


#: What a call takes away: how, and whether it is there.
REMOVED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], bool]]] = {
    "dict": (lambda x: {"x": x, "h": 1}, lambda c: c.pop("h"), lambda c: "h" in c),
    "the tensor of a dict": (lambda x: {"x": x, "h": 1}, lambda c: c.pop("x"), lambda c: "x" in c),
    "UserDict": (lambda x: UserDict(x=x, h=1), lambda c: c.pop("h"), lambda c: "h" in c),
    "derived dict": (lambda x: Batch(x=x, h=1), lambda c: c.pop("h"), lambda c: "h" in c),
    "attribute of a derived dict": (lambda x: Batch(x=x), lambda c: delattr(c, "notes"), lambda c: "notes" in vars(c)),
    "bunch": (lambda x: Bunch(x=x, h=1), lambda c: delattr(c, "h"), lambda c: "h" in c),
    "list": (lambda x: [x, 1], lambda c: c.remove(1), lambda c: 1 in c[-1:]),
    "deque": (lambda x: deque([1, x]), lambda c: c.popleft(), lambda c: len(c) == 2),
    "attribute of a list": (lambda x: Named("n", [x]), lambda c: delattr(c, "name"), lambda c: hasattr(c, "name")),
    "dataclass": (lambda x: Data(x, h=1), lambda c: delattr(c, "more"), lambda c: "more" in vars(c)),
    "the tensor of a dataclass": (lambda x: Data(x), lambda c: delattr(c, "x"), lambda c: "x" in vars(c)),
    "slots": (lambda x: Slotted(x), lambda c: delattr(c, "h"), lambda c: hasattr(c, "h")),
    "SimpleNamespace": (lambda x: SimpleNamespace(x=x, h=1), lambda c: delattr(c, "h"), lambda c: "h" in vars(c)),
}  # fmt: skip


@pytest.mark.parametrize("door", ["half_function", "O2"], indirect=True)
def test_what_a_call_removes_is_gone(queue: cl.CommandQueue, door: Door) -> None:
    call = door.open(queue)
    for name, (make, remove, is_there) in REMOVED.items():
        made = make(ones(queue, door.before))
        assert is_there(made), name
        call(remove, made)
        assert not is_there(made), name


def test_removed_moved_and_nested_writes_come_back(queue: cl.CommandQueue) -> None:
    x, y = ones(queue), ones(queue)
    cache: Any = OrderedDict(x=x, y=y, old=1)
    rows: list[Any] = [x, y, 7]

    @amp.half_function
    def use(cache: Any, rows: Any, again: Any) -> None:
        assert again is rows
        assert again[0].dtype == "float16"
        del cache["old"]
        cache["same"] = cache["x"]
        cache["rows"] = rows
        cache.move_to_end("x")
        cache.setdefault("list", []).append(2)
        rows.reverse()
        rows.pop()

    with amp.init():
        use(cache, rows, rows)
    assert list(cache) == ["y", "same", "rows", "x", "list"]
    assert cache["x"] is cache["same"] is x
    assert cache["y"] is y
    assert cache["rows"] is rows
    assert cache["list"] == [2]
    assert rows[0] == 7
    assert rows[1] is y
    assert len(rows) == 2


def test_a_container_in_itself_is_cast_once(queue: cl.CommandQueue, door: Door) -> None:
    call = door.open(queue)
    for name, make in {"list": lambda x: [x], "dict": lambda x: {0: x}, "deque": lambda x: deque([x])}.items():
        made = make(ones(queue, door.before))
        if isinstance(made, dict):
            made["itself"] = made
        else:
            made.append(made)
        seen: list[Any] = []
        call(lambda c, seen=seen: seen.append(c[0].dtype), made)
        assert seen == [door.inside], name
        assert made[0].dtype == door.before, name  # type: ignore[index]


def test_copies_hold_as_much_and_are_still_iterators(queue: cl.CommandQueue, tmp_path: Path) -> None:
    """What a container is besides its items: a bound, a default, a place in a file, what is sent to a generator."""
    given: list[Any] = []

    def batches() -> Iterator[Any]:
        while True:
            given.append((yield {"x": ones(queue)}))

    @amp.half_function
    def use(full: Any, default: Any, lines: Any, generator: Any, iterator: Any) -> None:
        full.append(2)
        assert (full.maxlen, full[-1], len(full)) == (3, 2, 3)
        assert default["missing"] == []
        assert lines is file
        assert next(lines) == "a\n"
        next(generator)
        sent = generator.send("next")
        assert sent["x"].dtype == "float16"
        sent["h"] = 1
        next(iterator)["h"] = 2

    (tmp_path / "lines").write_text("a\nb\n")
    first, last = {"x": ones(queue)}, {"x": ones(queue)}
    full, generator = deque([1, first["x"], 1], maxlen=3), batches()
    with open(tmp_path / "lines") as file, amp.init():
        use(full, defaultdict(list, x=first["x"]), file, generator, iter([last]))
        assert next(file) == "b\n"
    assert list(full) == [first["x"], 1, 2]
    assert given == ["next"]
    assert last["h"] == 2, "written to what an iterator gave last"


def test_what_was_written_comes_back_from_a_call_that_raises(queue: cl.CommandQueue) -> None:
    cache = {"x": ones(queue)}

    @amp.half_function
    def use(cache: Any) -> None:
        cache["h"] = 1
        raise KeyError("mine")

    with amp.init(), pytest.raises(KeyError, match="mine"):
        use(cache)
    assert cache["h"] == 1


def test_models_in_containers_and_containers_that_are_models_stay_as_they_are(queue: cl.CommandQueue) -> None:
    class Layers(list):  # type: ignore[type-arg]
        def parameters(self) -> list[Any]:
            return [p for layer in self for p in layer.parameters()]

    @dataclass
    class Model:
        weight: Tensor

        def parameters(self) -> list[Any]:
            return [self.weight]

    given: tuple[Any, ...] = (Layers([Linear(queue, 2, 2)]), Model(ones(queue)), [Linear(queue, 2, 2)])
    with amp.init():
        got = amp.half_function(lambda *models: models)(*given)
    assert all(x is y for x, y in zip(got, given, strict=True))


def test_a_container_that_cannot_be_copied_is_named(queue: cl.CommandQueue) -> None:
    @dataclass
    class Stubborn(Exception):
        x: Any

    with amp.init():
        assert amp.half_function(lambda c: c.x)(Stubborn(1)) == 1
        with pytest.raises(
            TypeError, match=r"tensors in a Stubborn .* cannot copy it .*: pass the tensors by themselves"
        ):
            amp.half_function(lambda c: c)(Stubborn(ones(queue)))


def test_gradients_flow_through_containers(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.ones(2))
    x.requires_grad = True
    node = ag.tensor(x, requires_grad=True)
    with amp.init():
        ag.sum(amp.half_function(lambda data: ag.mul(data.x, 3.0))(Data(node))).backward()
    np.testing.assert_array_equal(x.grad.to_host(), [3, 3])
    assert x.grad.dtype == "float32"
