"""Every kind of state that a recorded function may read on the host, changed between calls: recorded and as a graph."""

from __future__ import annotations

import configparser
import copy
import csv
import ctypes
import datetime
import functools
import gc
import io
import itertools
import os
import queue as queues
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
import warnings
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from os import environ, getenv
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.layers import ReLU
from netcl.optim import SGD
from netcl.optim.lr_plateau import CosineAnnealingLR, ReduceLROnPlateau

from clamp import amp, session
from clamp.bridge import Node, Parameter, Tensor
from clamp.recordings.watch import Watch
from tests.recordings.test_compiled import in_threads
from tests.reference import to_device

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
Case = tuple[Callable[[], float], Callable[[float], Any]]  # what the function reads, and what sets it
HARD_TANH = ag.hard_tanh
factor = 1.0
surroundings = _environ = environ
FACTORS: dict[str, list[float]] = {}
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


class Settings:
    k = 1.0

    def itself(self) -> Any:
        return self


def attribute(x: Any, name: str = "k") -> Case:
    """Reads and sets an attribute."""
    setattr(x, name, 1.0)
    return lambda: getattr(x, name), partial(setattr, x, name)


@case
def of_a_function() -> Case:
    def helper() -> float:
        return helper.k  # type: ignore[attr-defined,no-any-return]

    helper.k = 1.0  # type: ignore[attr-defined]
    return helper, partial(setattr, helper, "k")


@case
def of_a_recorded_function() -> Case:
    step = amp.record(abs)
    return (lambda: step.k), attribute(step)[1]


#: attributes of what is made anew for each case
CASES |= {
    "of_an_object": lambda: attribute(Settings()),
    "of_an_array": lambda: attribute(np.zeros(3).view(type("MyArray", (np.ndarray,), {}))),
    "of_a_threads_own": lambda: attribute(threading.local()),
    "of_a_threads_own_of_a_class": lambda: attribute(type("Own", (threading.local,), {})()),
    "of_a_namespace": lambda: attribute(types.SimpleNamespace()),
    "of_a_partial": lambda: attribute(partial(abs)),
}


def derived(base: type) -> Callable[[], Case]:
    kind = type(f"My{base.__name__}", (base,), {})
    return lambda: attribute(kind())


CASES |= {f"of_a_{base.__name__}": derived(base) for base in (dict, list, set, tuple, float, int, str)}


@case
def of_a_class_that_a_list_has() -> Case:
    class Layers(list[Any]):
        k = 1.0

    layers = Layers()
    return (lambda: layers.k), partial(setattr, Layers, "k")


@case
def of_a_class() -> Case:
    kind = type("Kind", (), {"k": 1.0, "read": lambda self: self.k})
    return kind().read, partial(setattr, kind, "k")


@case
def of_a_closure() -> Case:
    k = 1.0

    def change(value: float) -> None:
        nonlocal k
        k = value

    return (lambda: k), change


@case
def of_a_context_variable() -> Case:
    variable = ContextVar("variable", default=1.0)
    return variable.get, variable.set


@case
def of_an_optimizer() -> Case:
    optimizer = SGD([], lr=1.0)
    return (lambda: optimizer.lr), partial(setattr, optimizer, "lr")


@case
def of_a_function_made_by_exec() -> Case:
    scope: dict[str, Any] = {"factor": 1.0}
    exec("def read(): return factor", scope)
    return scope["read"], partial(scope.__setitem__, "factor")


@case
def in_the_environment() -> Case:
    os.environ["CLAMP_FACTOR"] = "1.0"
    return (lambda: float(os.environ["CLAMP_FACTOR"])), lambda value: os.environ.update(CLAMP_FACTOR=str(value))


@case
def in_place_of_a_function_of_netcls() -> Case:
    ag.hard_tanh = HARD_TANH
    read = lambda: 1.0 if ag.hard_tanh is HARD_TANH else ag.hard_tanh(None)  # noqa: E731
    return read, lambda value: setattr(ag, "hard_tanh", lambda _: value)


@case
def in_an_array() -> Case:
    weights = np.ones(3)
    return (lambda: float(weights.sum())), partial(weights.__setitem__, 0)


@case
def in_a_list_in_a_dict_of_this_module() -> Case:
    FACTORS["x"] = [1.0]
    return (lambda: FACTORS["x"][0]), partial(FACTORS["x"].__setitem__, 0)


@case
def of_a_function_that_is_replaced() -> Case:
    settings = Settings()
    settings.k = lambda: 1.0  # type: ignore[assignment]
    return (lambda: settings.k()), lambda value: setattr(settings, "k", lambda: value)  # type: ignore[operator]


@case
def of_slots() -> Case:
    class Slotted:
        __slots__ = ("__k", "k")

        def read(self) -> float:
            return self.__k

        def set(self, value: float) -> None:
            self.__k = value

    x = Slotted()
    x.set(1.0)
    return x.read, x.set


def given_to_a_partial(bind: Callable[..., Callable[[], float]]) -> Callable[[], Case]:
    def case_of() -> Case:
        settings = Settings()
        return bind(settings), attribute(settings)[1]

    return case_of


CASES["of_what_a_partial_is_given"] = given_to_a_partial(lambda x: partial(lambda given: given.k, given=x))
CASES["of_what_a_partial_is_given_by_place"] = given_to_a_partial(lambda x: partial(lambda given: given.k, x))


@case
def of_an_object_without_attributes_of_its_own() -> Case:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    return attribute(Odd())


@case
def of_a_scheduler_that_anneals() -> Case:
    plan = CosineAnnealingLR(max_lr=1.0, T_max=10)
    return plan.get_lr, lambda _: plan.step()


@case
def of_a_scheduler_that_waits() -> Case:
    plan = ReduceLROnPlateau(1.0, factor=0.5, patience=1)
    return (lambda: plan.current_lr), lambda _: (plan.step(1.0), plan.step(2.0))


@case
def of_a_module() -> Case:
    module = types.ModuleType("settings_of_a_test")
    sys.modules[module.__name__] = module
    module.k = 1.0  # type: ignore[attr-defined]

    def read() -> float:
        import settings_of_a_test  # type: ignore[import-not-found]

        return settings_of_a_test.k  # type: ignore[no-any-return]

    return read, partial(setattr, module, "k")


@case
def from_a_module() -> Case:
    def read() -> float:
        from settings_of_a_test import k  # type: ignore[import-not-found]

        return k  # type: ignore[no-any-return]

    return read, of_a_module()[1]


def of_this_module() -> Callable[[float], None]:
    globals()["factor"] = 1.0
    return partial(globals().__setitem__, "factor")


CASES |= {
    "of_a_module_by_name": lambda: ((lambda: sys.modules["settings_of_a_test"].k), of_a_module()[1]),
    "of_globals": lambda: ((lambda: globals()["factor"]), of_this_module()),
    "of_globals_by_a_name_that_is_computed": lambda: ((lambda: globals()["fac" + chr(116) + "or"]), of_this_module()),
    "of_an_expression": lambda: ((lambda: eval("factor * 1.0")), of_this_module()),
}


def behind(make: Callable[[Any], Any], look: Callable[[Any], Any]) -> Callable[[], Case]:
    def weak() -> Case:
        settings = Settings()
        reference = make(settings)
        kept = [settings]

        def change(value: float) -> None:
            if value < 1.5:
                kept[0].k = value
            else:
                kept.clear()

        return (lambda: look(reference)), change

    return weak


CASES["behind_a_weak_reference"] = behind(weakref.ref, lambda ref: getattr(ref(), "k", 5.0))
CASES["in_a_weak_dict"] = behind(
    lambda x: weakref.WeakValueDictionary({"settings": x}), lambda known: getattr(known.get("settings"), "k", 5.0)
)
CASES["among_weak_keys"] = behind(
    lambda x: weakref.WeakKeyDictionary({x: None}), lambda known: getattr(next(iter(known), None), "k", 5.0)
)


def held_in(make: Callable[[Settings], Callable[[], Settings]]) -> Callable[[], Case]:
    """Of an object that only a function leads to, whose first call may have made it."""

    def case_of() -> Case:
        get = make(Settings())
        return (lambda: get().k), attribute(get())[1]

    return case_of


def in_an_array_of_objects(x: Settings) -> Callable[[], Settings]:
    objects = np.array([[None, x]], dtype=object)
    return lambda: objects[0, 1]  # type: ignore[no-any-return]


CASES["in_an_array_of_objects"] = held_in(in_an_array_of_objects)
CASES["kept_by_a_cache"] = held_in(lambda x: functools.cache(lambda: copy.copy(x)))
CASES["kept_by_a_bounded_cache"] = held_in(lambda x: functools.lru_cache(lambda: copy.copy(x)))


def in_a_cached_dict(cached: Callable[..., Any]) -> Callable[[], Case]:
    def case_of() -> Case:
        config = cached(lambda: {"k": 1.0})
        return (lambda: config()["k"]), partial(config().__setitem__, "k")

    return case_of


CASES["in_a_dict_kept_by_a_cache"] = in_a_cached_dict(functools.cache)
CASES["in_a_dict_kept_by_a_bounded_cache"] = in_a_cached_dict(functools.lru_cache)


@case
def returned_by_a_cache_that_is_cleared() -> Case:
    settings = Settings()
    cached = functools.cache(lambda: settings.k)
    settings.k = 1.0

    def change(value: float) -> None:
        cached.cache_clear()
        settings.k = value
        cached()
        settings.k = 1.0

    return cached, change


@case
def of_a_context() -> Case:
    variable, context = ContextVar("variable", default=1.0), copy_context()
    return (lambda: context.get(variable, 1.0)), lambda value: context.run(variable.set, value)


CASES["of_a_finalizer"] = behind(lambda x: weakref.finalize(x, int), lambda end: 1.0 if end.alive else 5.0)


@case
def behind_a_weak_proxy() -> Case:
    settings = Settings()
    proxy = weakref.proxy(settings)
    return (lambda: proxy.k), attribute(settings)[1]


def of_the_class_behind(make: Callable[[Any], Any], look: Callable[[Any], Any]) -> Callable[[], Case]:
    def weak() -> Case:
        kind = type("Kind", (Settings,), {})
        kept = kind()
        reference = make(kept)
        return (lambda: look(reference).k), lambda value, kept=kept: setattr(type(kept), "k", value)

    return weak


CASES["of_the_class_behind_a_weak_reference"] = of_the_class_behind(weakref.ref, lambda ref: ref())
CASES["of_the_class_behind_a_weak_proxy"] = of_the_class_behind(weakref.proxy, lambda proxy: proxy)
CASES["of_the_class_behind_a_weak_method"] = of_the_class_behind(
    lambda x: weakref.WeakMethod(x.itself), lambda method: method()()
)


@case
def of_the_function_behind_a_weak_method() -> Case:
    settings = Settings()
    method = types.MethodType(lambda _: settings.k, Settings())
    weak, (_, change) = weakref.WeakMethod(method), attribute(settings)
    return (lambda: weak()()), lambda value, held=(method.__func__, method.__self__): change(value)  # type: ignore[misc]


def held_by(hold: Callable[[Any], Callable[[], Any]]) -> Callable[[], Case]:
    """Of a module that no variable of the function's is."""

    def case_of() -> Case:
        module = types.ModuleType("settings_of_a_test")
        get = hold(module)
        return (lambda: get().k), attribute(module)[1]

    return case_of


CASES["of_a_module_that_an_object_has"] = held_by(lambda x: partial(getattr, types.SimpleNamespace(config=x), "config"))
CASES["of_a_module_in_a_list"] = held_by(lambda x: partial([x].__getitem__, 0))
CASES["of_a_module_that_is_a_default"] = held_by(lambda x: lambda given=x: given)


@case
def of_a_module_by_a_name_that_is_computed() -> Case:
    _, change = of_a_module()
    module, name = sys.modules["settings_of_a_test"], chr(107)
    return (lambda: getattr(module, name)), change


@case
def of_a_module_that_answers_itself() -> Case:
    module, kept = types.ModuleType("settings_of_a_test"), {"k": 1.0}
    module.__getattr__ = lambda name: kept[name]  # type: ignore[method-assign,assignment]
    return (lambda: module.k), partial(kept.__setitem__, "k")


@case
def in_the_environment_by_getenv() -> Case:
    return (lambda: float(os.getenv("CLAMP_FACTOR", ""))), in_the_environment()[1]


@case
def of_what_makes_the_items_of_a_dict() -> Case:
    made: defaultdict[str, float] = defaultdict(lambda: 1.0)
    return (lambda: made["k"] + 0.0 * made.pop("k")), lambda value: setattr(made, "default_factory", lambda: value)


@case
def of_a_read_only_dict() -> Case:
    kept = {"k": 1.0}
    proxy = types.MappingProxyType(kept)
    return (lambda: proxy["k"]), partial(kept.__setitem__, "k")


@case
def of_the_values_of_a_dict() -> Case:
    layers = {"first": Settings()}
    values = layers.values()
    return (lambda: sum(x.k for x in values)), attribute(layers["first"])[1]


@case
def of_a_function_that_numpy_calls() -> Case:
    settings = Settings()
    function = np.frompyfunc(lambda x: x * settings.k, 1, 1)
    return (lambda: float(function(1.0))), attribute(settings)[1]


@case
def in_a_mask() -> Case:
    x = np.ma.array([1.0, 4.0, 9.0], mask=[False, True, True])
    return (lambda: float(x.mean())), lambda value: setattr(x, "mask", [False, False, value < 1.5])


def in_a_buffer(make: Callable[[], Any]) -> Callable[[], Case]:
    def case_of() -> Case:
        x = make()
        return (lambda: float(x[0])), lambda value: x.__setitem__(0, int(10 * value))

    return case_of


CASES["in_bytes"] = in_a_buffer(lambda: bytearray(b"123"))
CASES["in_an_array_of_pythons"] = in_a_buffer(lambda: array("d", [1.0, 2.0]))
CASES["in_a_view_of_bytes"] = in_a_buffer(lambda: memoryview(bytearray(b"123")))
CASES["in_memory_of_c"] = in_a_buffer(lambda: (ctypes.c_int * 2)(1, 2))


@case
def in_a_number_of_c() -> Case:
    number = ctypes.c_double(1.0)
    return (lambda: number.value), partial(setattr, number, "value")


@case
def of_a_metaclass() -> Case:
    meta = type("Meta", (type,), {"k": 1.0})
    kind: Any = meta("Kind", (), {})
    return (lambda: kind.k), partial(setattr, meta, "k")


@case
def of_the_base_of_a_class() -> Case:
    base = type("Base", (), {"k": 1.0})
    kind: Any = type("Kind", (base,), {})
    return (lambda: kind.k), partial(setattr, base, "k")


@case
def of_another_base() -> Case:
    kind: Any = type("Kind", (type("Base", (), {"k": 1.0}),), {})
    return (lambda: kind.k), lambda value: setattr(kind, "__bases__", (type("Base", (), {"k": value}),))


@case
def of_defaults_that_are_replaced() -> Case:
    def read(*, k: float = 1.0) -> float:
        return k

    return read, lambda value: setattr(read, "__kwdefaults__", {"k": value})


@case
def in_the_order_of_a_dict() -> Case:
    order = OrderedDict(first=1.0, second=1.3, third=1.7)
    return (lambda: next(iter(order.values()))), lambda _: order.move_to_end(next(iter(order)))


@case
def of_a_name_that_comes_later() -> Case:
    globals().pop("sum", None)
    return (lambda: float(sum([1.0]))), lambda value: globals().__setitem__("sum", lambda _: value)


CASES |= {
    f"in_a_long_{name}": held_in(make)
    for name, make in {
        "list": lambda x: partial([x, *[0] * 5000].__getitem__, 0),
        "tuple": lambda x: partial(((x,) * 5000).__getitem__, 0),
        "dict": lambda x: partial({**dict.fromkeys(range(5000)), "k": x}.__getitem__, "k"),
        "array": lambda x: partial(np.full(5000, x, object).__getitem__, 0),
    }.items()
}


def of_a_generator(begin: Callable[[Settings], Any]) -> Callable[[], Case]:
    """That stands in the same place after each call, with the same objects."""

    def case_of() -> Case:
        settings = Settings()
        generator = begin(settings)
        generator.send(None)
        return partial(generator.send, None), attribute(settings)[1]

    return case_of


def asked_again(x: Settings) -> Iterator[float]:
    while True:
        yield x.k


@types.coroutine
def awaited_again(x: Settings) -> Iterator[float]:
    yield from asked_again(x)


async def awaits(x: Settings) -> None:
    await awaited_again(x)


CASES |= {
    f"of_a_{name}": of_a_generator(begin) for name, begin in {"generator": asked_again, "coroutine": awaits}.items()
}


@pytest.mark.parametrize("what", ["attribute", "another tensor"])
@pytest.mark.parametrize("how", ["record", "graph"])
def test_attributes_of_parameters_are_seen(queue: cl.CommandQueue, how: str, what: str) -> None:
    x = to_device(queue, X)

    def made() -> Any:
        weight: Any = Parameter.from_host(queue, X)
        if what == "attribute":
            weight.factor = 1.0
            return (lambda: weight.factor), partial(setattr, weight, "factor")
        settings = Settings()
        settings.k = weight
        return (lambda: settings.k), lambda value: setattr(settings, "k", to_device(queue, X + value))

    for one, other in zip(run(made(), x, how), run(made(), x, "eager"), strict=True):
        np.testing.assert_array_equal(one, other)


ASKED: dict[str, Callable[[], Callable[[], float]]] = {
    "the clock": lambda: time.perf_counter,
    "the date": lambda: lambda: datetime.datetime.now().timestamp(),
    "a file": lambda: iter_of(io.StringIO("1 2 3 4 5 6 7 8 9")),
    "a path": lambda: lambda: float(len(Path(__file__).read_text())),
    "whether a file is there": lambda: lambda: float(os.path.exists(__file__)),
    "a line": lambda: of_lines(lambda lines: next(iter(lines))),
    "a table": lambda: of_lines(lambda lines: next(csv.reader(lines))),
    "numpy's text": lambda: lambda: float(np.loadtxt(__file__, str, max_rows=1, usecols=0).size),
    "mapped memory": lambda: lambda: float(np.memmap(__file__, np.uint8, "r")[0]),
    "settings": lambda: lambda: float(len(configparser.ConfigParser().read(os.devnull))),
    "a part of a file": lambda: lambda: read_at(__file__),
    "another process": lambda: lambda: float(subprocess.check_output(["echo", "2"])),
    "the system's chance": lambda: random.SystemRandom().random,
    "a unique name": lambda: lambda: float(uuid.uuid4().int % 9),
    "a file of numpy's": lambda: lambda: float(np.fromfile(__file__, np.uint8)[0]),
    "a queue": lambda: filled(queues.Queue()).get,
    "the last of a queue": lambda: filled(queues.LifoQueue()).get,
    "a simple queue": lambda: filled(queues.SimpleQueue()).get,
}


def of_lines(read: Callable[[Any], Any]) -> Callable[[], float]:
    def ask() -> float:
        with open(__file__) as lines:
            return float(len(read(lines)))

    return ask


def read_at(file: str) -> float:
    number = os.open(file, os.O_RDONLY)
    try:
        return float(len(os.pread(number, 3, 0)))
    finally:
        os.close(number)


def iter_of(file: io.StringIO) -> Callable[[], float]:
    return lambda: float(file.read(2))


def filled(numbers: Any) -> Any:
    for number in range(1, 12):
        numbers.put(float(number))
    return numbers


def run(case: Case, x: Tensor, how: str) -> list[np.ndarray[Any, Any]]:
    read, change = case

    def step(x: Node) -> Node:
        factor: Any = read()
        return ag.mul(x, ag.tensor(factor) if isinstance(factor, Tensor) else float(factor))

    class Graph(amp.Graph):
        def build(self, x: Node) -> Node:
            return step(x)

    wanted = {"eager": step, "record": amp.record(step), "graph": Graph()}[how]
    got = []
    for number in range(10):
        if number in (3, 7):  # after replays, if it is replayed
            change(1.0 + number / 10)
        made = wanted(Node(value=x))  # type: ignore[operator]
        got.append((made if isinstance(made, Tensor) else made.value).to_host().copy())
    return got


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    amp.init(dtype="float32")
    yield
    ag.hard_tanh = HARD_TANH
    globals().pop("sum", None)
    amp.shutdown()
    session.forget_patches()
    sys.modules.pop("settings_of_a_test", None)


@pytest.mark.parametrize("how", ["record", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_state_is_that_of_the_day(queue: cl.CommandQueue, name: str, how: str) -> None:
    x = to_device(queue, X)
    want = run(CASES[name](), x, "eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* runs without a recording", UserWarning)
        got = run(CASES[name](), x, how)
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"call {number}")


def test_what_python_asks_while_it_collects_garbage_is_no_part_of_it(queue: cl.CommandQueue) -> None:
    class Timed:
        def __del__(self) -> None:
            time.monotonic()

    def step(x: Node) -> Node:
        del [Timed()][:]
        gc.collect()
        return ag.mul(x, 2.0)

    def told(phase: str, info: object) -> None:
        time.perf_counter()

    gc.callbacks.append(told)
    try:
        recorded = amp.record(step)
        for _ in range(4):
            np.testing.assert_array_equal(recorded(Node(value=to_device(queue, X))).value.to_host(), 2 * X)
    finally:
        gc.callbacks.remove(told)


@pytest.mark.parametrize("name", ASKED)
def test_what_gives_another_answer_each_time_is_refused(queue: cl.CommandQueue, name: str) -> None:
    """A function that asks runs as it is, and says why; a graph, which records in its second call, raises there."""
    ask = ASKED[name]()
    x, seen = to_device(queue, X), []
    recorded = amp.record(partial(lambda ask, x: ag.mul(x, ask()), lambda: seen.append(ask()) or seen[-1]))
    with pytest.warns(UserWarning, match="runs without a recording"):
        got = [recorded(Node(value=x)).value.to_host() for _ in range(4)]
    assert len(seen) == 4
    for one, factor in zip(got, seen, strict=True):
        np.testing.assert_array_equal(one, X * np.float32(factor))

    class Graph(amp.Graph):
        def build(self, x: Node) -> Node:
            return ag.mul(x, ask())

    graph = Graph()
    graph(x)
    with pytest.raises(RuntimeError, match=r"\(\) was called .* pass the answer"):
        graph(x)


#: an installed package's: whether there is a file to write over decides nothing of the step's
PLOTTER: dict[str, Any] = {"__name__": "pytest.plots", "os": os}
exec("def save(folder): return os.path.exists(folder)", PLOTTER)

#: how a function may write
WRITES: dict[str, Callable[[Path], Any]] = {
    "a folder": lambda folder: folder.mkdir(exist_ok=True),
    "folders": lambda folder: (folder / "a" / "b").mkdir(parents=True, exist_ok=True),
    "a folder by os": lambda folder: os.makedirs(folder, exist_ok=True),
    "an empty file": lambda folder: (folder / "empty").touch(),
    "a text": lambda folder: (folder.resolve() / "text").write_text("loss"),
    "a line": lambda folder: print("loss", file=(folder / "lines").open("a"), flush=True),
    "a copy": lambda folder: shutil.copy(__file__, folder),
    "a passing file": lambda folder: tempfile.TemporaryFile(dir=folder).close(),
    "an array": lambda folder: np.save(folder / "array.npy", X),
    "arrays": lambda folder: np.savez(folder / "arrays.npz", x=X),
    "an array's text": lambda folder: np.savetxt(folder / "array.txt", X),
    "a plot": lambda folder: PLOTTER["save"](folder),
}


@pytest.mark.parametrize("name", [*WRITES, "a log"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_writes_is_recorded(queue: cl.CommandQueue, tmp_path: Path, name: str) -> None:
    with (tmp_path / "log").open("w") as log:
        write = partial(WRITES[name], tmp_path) if name in WRITES else lambda: log.writelines("loss")
        recorded, x = amp.record(lambda x: (write(), ag.mul(x, 2.0))[1]), to_device(queue, X)
        for _ in range(5):
            recorded(Node(value=x))
        assert recorded.recordings == 1


#: what reads one variable of the environment, and what may read any
BY_NAME: dict[str, Callable[[], Any]] = {
    "getenv": lambda: os.getenv("CLAMP_FACTOR"),
    "a default": lambda: getenv("CLAMP_FACTOR", "1.0"),
    "environ": lambda: os.environ["CLAMP_FACTOR"],
    "get": lambda: environ.get("CLAMP_FACTOR"),
    "inside": lambda: [os.environ.get("CLAMP_FACTOR", X) for _ in range(2)],
}
BY_ANY: dict[str, Callable[[], Any]] = {
    "a sum": lambda: os.getenv("CLAMP_" + str(factor)) or os.getenv("CLAMP_FACTOR"),
    "a copy": lambda: (dict(os.environ), os.environ["CLAMP_FACTOR"]),
    "another name": lambda: (os.getenv("CLAMP_FACTOR"), surroundings["CLAMP_FACTOR"]),
    "a name that ends alike": lambda: _environ["CLAMP_FACTOR"],
    "a text": lambda: (getattr(os, "environ").copy(), os.getenv("CLAMP_FACTOR")),  # noqa: B009
}


@pytest.mark.parametrize("name", [*BY_NAME, *BY_ANY])
def test_of_the_environment_what_is_read_counts(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("CLAMP_FACTOR", "1.0")
    watch = Watch({"read": {**BY_NAME, **BY_ANY}[name]})
    monkeypatch.setenv("CLAMP_OTHER", "1.0")
    assert watch.holds() is (name in BY_NAME)
    monkeypatch.setenv("CLAMP_FACTOR", "2.0")
    assert not watch.holds()


@pytest.mark.parametrize(("count", "is_seen"), [(1, True), (1000, False)])
def test_objects_of_a_long_container_are_looked_into_if_they_are_few(count: int, is_seen: bool) -> None:
    """Of many none is held either, which may leave the container while its length stays."""
    content: list[Any] = [*[0.0] * 5000, *[Settings() for _ in range(count)]]
    watch = Watch({"step": lambda: content})
    content[-1].k = 2.0
    assert watch.holds() is not is_seen
    kept = weakref.ref(content[-1])
    content[-1] = 0.0
    assert kept() is None or is_seen


# ------------------------------------------------------------------------------- what changes while it is looked at


def growing(kind: type) -> Callable[[], Any]:
    """A container in a closure, and what adds to it."""
    adds = {list: "append", set: "add", deque: "append", dict: "setdefault"}

    def make() -> tuple[Callable[[], Any], Callable[[int], Any]]:
        content = kind()
        return (lambda: content), getattr(content, adds[kind])  # type: ignore[index]

    return make


def gaining(make: Callable[[], Any], read: Callable[[Any], Any]) -> Callable[[], Any]:
    """An object, how it is read, and what gives it one more attribute."""

    def made() -> tuple[Callable[[], Any], Callable[[int], Any]]:
        x = make()
        return (lambda: read(x)), lambda number: setattr(x, f"k{number}", number)

    return made


def growing_class() -> Any:
    cls = type("Kind", (), {"k": 1.0, "read": lambda self: self.k})
    return cls().read, lambda number: setattr(cls, f"k{number}", number)


def growing_globals() -> Any:
    scope: dict[str, Any] = {"__name__": "of_a_test", "k": 1.0}
    exec("def read(): return globals()[chr(107)]", scope)
    return scope["read"], lambda number: scope.setdefault(f"k{number}", number)


GROWING: dict[str, Callable[[], Any]] = {kind.__name__: growing(kind) for kind in (list, set, dict, deque)}
GROWING |= {
    "object": gaining(Settings, lambda x: x.k),
    "class": growing_class,
    "function": gaining(lambda: lambda: None, lambda function: function()),
    "layer": gaining(ReLU, lambda layer: layer),
    "globals": growing_globals,
    "argument": growing(dict),
}


@contextmanager
def adding(add: Callable[[int], Any], every: int) -> Iterator[None]:
    """Inside the ``with``, each so many lines of Python add one number, up to 2,000: as another thread may."""
    lines, outer = itertools.count(1), sys.gettrace()

    def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
        line = next(lines)
        if line % every == 0 and line < 2000 * every:
            add(line)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)


@pytest.mark.parametrize("every", [7, 40])
@pytest.mark.parametrize("name", GROWING)
def test_what_is_added_while_the_state_is_looked_at_ends_no_call(queue: cl.CommandQueue, name: str, every: int) -> None:
    read, add = GROWING[name]()
    x = to_device(queue, X)

    def step(x: Node, more: Any = None) -> Node:
        read()
        return ag.mul(x, 2.0)

    recorded = amp.record(step)
    more = (read(),) if name == "argument" else ()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* runs without a recording", UserWarning)
        for _ in range(4):
            with adding(add, every):
                made = recorded(Node(value=x), *more)
            np.testing.assert_array_equal(made.value.to_host(), 2 * X)


# ---------------------------------------------------------------------------------------------- what no watch sees


def twice(x: Node) -> Node:
    return ag.mul(x, 2.0)


def thrice(x: Node) -> Node:
    return ag.mul(x, 3.0)


def first_of(calls: tuple[Node, Node], hidden: Any) -> Node:
    """One of two that are both computed."""
    return calls[0] if hidden[0] == 1.0 else calls[1]


#: what a function computes by a number, two weights and an input that no watch sees
UNSEEN: dict[str, Callable[[Node, Any], Node]] = {
    "scaled": lambda x, hidden: ag.mul(x, hidden[0]),
    "longer": lambda x, hidden: twice(x) if hidden[0] == 1.0 else thrice(twice(x)),
    "shorter": lambda x, hidden: thrice(twice(x)) if hidden[0] == 1.0 else twice(x),
    "another op": lambda x, hidden: ag.relu(x) if hidden[0] == 1.0 else ag.tanh(x),
    "another weight": lambda x, hidden: ag.mul(x, ag.tensor(hidden[1] if hidden[0] == 1.0 else hidden[2])),
    "another of its own": lambda x, hidden: ag.mul(first_of((twice(x), thrice(x)), hidden), 4.0),
    "another result": lambda x, hidden: first_of((twice(x), thrice(x)), hidden),
    "another input": lambda x, hidden: ag.add(x, x) if hidden[0] == 1.0 else ag.add(x, Node(value=hidden[3])),
}


@pytest.mark.parametrize("how", ["record", "graph"])
@pytest.mark.parametrize("build", UNSEEN.values(), ids=UNSEEN)
def test_what_no_watch_sees_is_found_named_and_recorded_anew(queue: cl.CommandQueue, build: Any, how: str) -> None:
    """It is run in place of the 2nd, 4th, 8th ... replay, and is right from there on; the second time for good."""
    weights = [Parameter.from_host(queue, X + shift) for shift in (1, 2)]
    hidden = [1.0, *weights, to_device(queue, X + 3), *[None] * 5000]  # too long to be looked into
    x = to_device(queue, X)
    call: Any = (
        amp.record(lambda x: build(x, hidden))
        if how == "record"
        else type("Graph", (amp.Graph,), {"build": lambda self, x: build(x, hidden)})()
    )

    def want() -> Any:
        return build(Node(value=x), hidden).value.to_host()

    def got() -> Any:
        made = call(Node(value=x))
        return (made if isinstance(made, Tensor) else made.value).to_host()

    with ag.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 + 3):  # run, recorded, replayed, compared, replayed
            np.testing.assert_array_equal(got(), want())
        for value, then, calls in ((2.0, "It is recorded again", 2), (1.0, "It is not recorded any more", 4)):
            hidden[0] = value
            said = f"(?s)up to {calls} calls have replayed: .*(launch|returns).*{then}"
            with pytest.warns(UserWarning, match=said):
                got_then = [got() for _ in range(8)]
            np.testing.assert_array_equal(got_then[-1], want())
        for value in (3.0, 1.0, 4.0):
            hidden[0] = value
            np.testing.assert_array_equal(got(), want())


def test_a_thread_with_the_number_of_one_that_has_ended_has_its_own() -> None:
    """Recordings are of a thread, by its number, which systems give again."""
    own, watches = threading.local(), list[Watch]()

    def work(factor: float) -> None:
        own.factor = factor
        watches.append(Watch({"step": lambda x: x * own.factor}))
        assert watches[-1].holds()

    in_threads(partial(work, 1.0))
    for factor in (1.0, 3.0):
        own.factor = factor
        assert watches[0].holds() == (factor == 1.0)


# ---------------------------------------------------------------------------------------------- what has changed


class Slotted:
    __slots__ = ("a",)


#: what changes of what a function reads, and how that is called
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a variable around it": (lambda s: s.set_factor(3.0), "factor"),
    "an attribute of its own": (lambda s: setattr(s.step, "k", 2), "step.k"),
    "one more": (lambda s: setattr(s.step, "more", 1), "attributes of step"),
    "its defaults": (lambda s: setattr(s.step, "__defaults__", (2,)), "step's code"),
    "an object's attribute": (lambda s: setattr(s.held, "a", 2), "held.a"),
    "one more of an object's": (lambda s: setattr(s.held, "b", 2), "held.(more or fewer)"),
    "a slot": (lambda s: setattr(s.slotted, "a", 2), "slotted.a"),
    "a class": (lambda s: setattr(s.held, "__class__", type("Other", (type(s.held),), {})), "the class of held"),
    "an item": (lambda s: s.table.update(a=2), "table['a']"),
    "one more item": (lambda s: s.table.update(b=2), "table['(more or fewer)']"),
    "a place": (lambda s: s.places.__setitem__(1, 5), "places[1]"),
    "one more place": (lambda s: s.places.append(5), "len(places)"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_called_as_its_user_would(what: str) -> None:
    factor, held, slotted, table, places = 2.0, type("Held", (), {})(), Slotted(), {"a": 1}, [1, 2]
    held.a = slotted.a = 1

    def step(x: float, power: int = 1) -> float:
        product: float = x * factor * held.a * slotted.a * table["a"] * places[0]
        return product

    def set_factor(number: float) -> None:
        nonlocal factor
        factor = number

    step.k = 1  # type: ignore[attr-defined]
    watch = Watch({"step": step})
    assert watch.holds()
    assert not watch.change()
    change, name = CHANGES[what]
    change(types.SimpleNamespace(**locals()))
    assert watch.change() == name
