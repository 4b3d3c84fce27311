"""Whoever holds a function of netcl's, however early, meets clamp while AMP is active: the function itself stays."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import inspect
import operator
import pickle
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import netcl.cluster.ops
import netcl.distributed
import netcl.evo.ops
import netcl.ssl.losses  # noqa: F401  (modules that nothing else imports)
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd import ops
from netcl.core import transfer
from netcl.nn import loss as tensor_losses
from netcl.nn.layers import Linear, Sequential
from netcl.ops import elementwise
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node, Parameter, Tape, Tensor
from clamp.casting.policy_table import CastPolicy, Entry, default_table
from clamp.casting.regions import casting_in
from clamp.patching import patch, patch_registry, redirect
from clamp.patching.redirect import Redirected
from clamp.patching.wrap import Wrapper, passes_of
from clamp.session import registrations
from tests.reference import quantize, to_device, to_numpy

Function = Callable[..., Any]
METHODS: tuple[Any, ...] = (SGD.step, SGD.zero_grad, Tensor.to_host, Tape.backward, Sequential._try_fuse_layers)
METHODS += (vars(Tensor)["from_host"].__func__,)

LISTED: dict[str, Any] = {
    entry.name: vars(sys.modules[entry.module])[entry.function]
    for entry in default_table()
    if entry.policy is not CastPolicy.NONE and entry.function != "*" and entry.module in sys.modules
}


def codes() -> dict[int, types.CodeType]:
    """The code of every function that a module of netcl's has."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "netcl"]
    functions = [x for module in modules for x in vars(module).values() if isinstance(x, types.FunctionType)]
    return {id(function): function.__code__ for function in [*functions, *METHODS]}


# ------------------------------------------------------------------------------------------------ every way to hold one


@dataclass
class Config:
    activation: Function = ag.relu
    table: dict[str, Function] = field(default_factory=dict)


class Model:
    def __init__(self, function: Function) -> None:
        self.criterion = function

    def in_a_bound_method(self, *args: Any) -> Any:
        return self.criterion(*args)


class Slots:
    __slots__ = ("function",)

    def __init__(self, function: Function) -> None:
        self.function = function


def in_a_local_variable(function: Function) -> Function:
    def main() -> Iterator[Any]:
        criterion = function
        args = yield
        while True:
            args = yield criterion(*args)

    running = main()
    next(running)
    return lambda *args: running.send(args)


def in_a_script(function: Function) -> Function:
    names = {"criterion": function}
    exec("def call(*args): return criterion(*args)", names)
    return names["call"]


def in_another_thread(function: Function) -> Function:
    def call(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args).result()

    return call


HOLDERS: dict[str, Callable[[Function], Function]] = {
    "itself": lambda f: f,
    "an attribute": lambda f: Model(f).in_a_bound_method,
    "a slot": lambda f: Slots(f).function,
    "a class attribute": lambda f: type("Net", (), {"criterion": staticmethod(f)}).criterion,
    "a dict": lambda f: {"f": f}["f"],
    "a nested list": lambda f: [("name", [f])][0][1][0],
    "a dataclass field": lambda f: Config(f).activation,
    "a dataclass default": lambda f: make_dataclass("C", [("f", Any, f)])().f,
    "a default argument": lambda f: lambda *args, held=f: held(*args),
    "a partial": lambda f: functools.partial(f),
    "a partial method's function": lambda f: functools.partialmethod(f).func,
    "a closure": lambda f: lambda *args: f(*args),
    "a local variable": in_a_local_variable,
    "a user's wrapper": lambda f: functools.wraps(f)(lambda *args: f(*args)),
    "a script": in_a_script,
    "a reduction": lambda f: lambda *args: functools.reduce(lambda given, g: g(*given), [f], args),
    "a map": lambda f: lambda *args: next(map(f, *([x] for x in args))) if args else f(),
    "an operator": lambda f: lambda *args: operator.call(f, *args),
    "a pickle": lambda f: pickle.loads(pickle.dumps(f)),
    "a copy": lambda f: copy.deepcopy({"f": copy.copy(f)})["f"],
    "a thread": in_another_thread,
}


def _takes(function: Any) -> int:
    """How many arguments a function needs."""
    return function.__code__.co_argcount - len(function.__defaults__ or ())


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the listed functions whose wrapper a call has reached; nothing is computed."""
    names: list[str] = []
    wrappers: dict[str, Wrapper] = {}

    def wrapper_of(entry: Entry, ours: Any) -> tuple[Wrapper, bool]:
        return wrappers.setdefault(entry.name, lambda *call: names.append(entry.name)), False

    monkeypatch.setattr(patch, "_wrapper_of", wrapper_of)
    monkeypatch.setattr(patch, "WRAPPERS", {})
    monkeypatch.setattr(redirect, "_made", {})
    return names


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_function_that_is_held_before_init_meets_clamp(met: list[str], hold: Callable[[Function], Function]) -> None:
    held = {name: hold(function) for name, function in LISTED.items()}
    before = codes()
    for _ in range(2):  # a second init finds all as the first did
        with amp.init():
            for name, call in held.items():
                met.clear()
                call(*[None] * _takes(LISTED[name]))
                assert [LISTED[found] for found in met] == [LISTED[name]], f"{name} ran netcl's own"
        assert codes() == before
    assert len(held) > 250


def test_netcls_names_stay_the_identical_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_script.py").write_text("from netcl.autograd import *\nfrom netcl.autograd import relu\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "late_script", types.ModuleType("late_script"))
    del sys.modules["late_script"]
    modules = {n: m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "netcl"}
    before = {(n, k): x for n, m in modules.items() for k, x in vars(m).items() if isinstance(x, types.FunctionType)}
    own = codes()
    with amp.init():
        assert [key for key, x in before.items() if vars(modules[key[0]])[key[1]] is not x] == []
        assert importlib.import_module("late_script").relu is ag.relu
        assert {ag.relu: 2.0}[pickle.loads(pickle.dumps(copy.deepcopy(ag.relu)))] == 2.0
        changed = {key for key, code in codes().items() if code is not own[key]}
        assert changed >= {id(function) for function in (*LISTED.values(), *METHODS)}
    assert codes() == own
    assert not hasattr(ag.relu, "__wrapped__")


def test_methods_bound_before_are_clamps(queue: cl.CommandQueue) -> None:
    read, make = to_device(queue, [1.0, 2.5], "bfloat16").to_host, Tensor.from_host
    with amp.init():
        assert make(queue, np.array([1.0, 2.5]), "bfloat16").to_host().tolist() == [1.0, 2.5]
        np.testing.assert_array_equal(read(), np.array([1.0, 2.5], np.float32), strict=True)
    assert read().dtype == np.uint16


class OfAUser:
    def f(self, args: int = 1) -> tuple[Any, int]:
        return self, args


def test_the_object_of_a_method_may_be_given_by_its_name() -> None:
    user = OfAUser()
    amp.register_float_function(OfAUser, "f")
    try:
        for _ in range(2):
            with amp.init():
                assert OfAUser.f(self=user) == (user, 1)
                assert OfAUser.f(args=3, self=user) == (user, 3)
                assert user.f(4) == (user, 4)
    finally:
        registrations.clear()


def test_a_module_that_is_awaited_twice_is_met_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "awaited_module.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    met: list[types.ModuleType] = []
    monkeypatch.setattr(patch_registry, "_listener", [met.append])
    for _ in range(2):
        patch_registry.when_imported("awaited_module")
    assert met == [importlib.import_module("awaited_module")]


def test_signatures_sources_and_places_are_netcls() -> None:
    def described(function: Any) -> tuple[Any, ...]:
        code = function.__code__
        return (
            inspect.signature(function), inspect.getfullargspec(function), function.__doc__, function.__name__,
            function.__qualname__, function.__module__, function.__defaults__, function.__kwdefaults__, code.co_name,
            code.co_qualname, code.co_filename, code.co_firstlineno,
        )  # fmt: skip

    functions = [*LISTED.values(), ag.apply_op, ag.jit_compile, transfer.copy, transfer.write, *METHODS]
    before = list(map(described, functions))
    with amp.init():
        for function, expected in zip(functions, before, strict=True):
            assert described(function) == expected
        assert inspect.getsource(ag.relu).startswith("def relu(")


def test_a_traceback_shows_the_line_of_netcls_function(queue: cl.CommandQueue) -> None:
    with amp.init():
        with pytest.raises(TypeError, match=r"reshape\(\) missing 2 required positional arguments: 'x' and 'shape'"):
            ag.reshape()
        with pytest.raises(ValueError, match="matmul") as caught:
            ag.matmul_op(*(ag.tensor(to_device(queue, np.ones((2, 3)))) for _ in "ab"))
    lines = traceback.format_tb(caught.value.__traceback__)
    assert "in matmul_op\n    def matmul_op(" in lines[1], lines
    assert "^" not in lines[1], "there is no column to point at"


# -------------------------------------------------------------------------------------- numbers, held in a constructor

HELD = {
    name: vars(ag)[name]
    for name in ("mse_loss", "cross_entropy", "hinge_loss", "sum", "l2_normalize", "swish", "dropout")
}


def leaf(queue: cl.CommandQueue, values: Any, dtype: str) -> Any:
    return ag.tensor(to_device(queue, values, dtype), requires_grad=True)


def gradient(made: Any, x: Any, seed: Any = None) -> Any:
    ag.Tape().backward(made, seed)
    return to_numpy(x.value.grad)


def test_a_held_loss_knows_the_loss_scale(queue: cl.CommandQueue) -> None:
    w, x = Parameter.from_host(queue, np.ones((2, 1), np.float32)), to_device(queue, [[1.0, 2.0], [3.0, 4.0]])
    optimizer, target = SGD([w], lr=2.0**-6), to_device(queue, np.zeros((2, 1)))
    with amp.init(loss_scale=2.0**16, custom_black_list=["matmul_op"]) as handle:
        loss = HELD["mse_loss"](ag.matmul_op(ag.tensor(x), ag.tensor(w, requires_grad=True)), ag.tensor(target))
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        expected = 2 * np.array([[1.0, 3.0], [2.0, 4.0]]) @ [[3.0], [7.0]]
        np.testing.assert_allclose(to_numpy(w.grad), expected, rtol=1e-6)
        optimizer.step()
        np.testing.assert_allclose(to_numpy(w), 1 - expected / 64, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("region", ["on", "off"])
def test_held_functions_are_right_in_16_bits(queue: cl.CommandQueue, dtype: str, region: str) -> None:
    values = quantize([[1.5, -2.0, 0.25], [0.5, 3.0, -1.0]], dtype)
    exp = np.exp(values - values.max(1, keepdims=True))
    softmax, sigmoid = exp / exp.sum(1, keepdims=True), 1 / (1 + np.exp(-values))
    onehot = np.eye(3)[[2, 0]]
    margins = np.maximum(0, 1 - (values * onehot).sum(1, keepdims=True) + values) * (1 - onehot)
    tolerance = {"rtol": 0.02, "atol": 0.02}
    with amp.init(dtype=dtype) as handle, handle.disable_casts() if region == "off" else nullcontext():

        def node(array: Any, kind: str = dtype) -> Any:
            return ag.tensor(to_device(queue, array, kind))

        x = leaf(queue, values, dtype)
        loss = HELD["cross_entropy"](x, node(onehot))
        np.testing.assert_allclose(to_numpy(loss.value).item(), -np.log(softmax[onehot > 0]).mean(), **tolerance)
        np.testing.assert_allclose(gradient(loss, x), (softmax - onehot) / 2, **tolerance)
        hinge = HELD["hinge_loss"](node(values), node(onehot))
        np.testing.assert_allclose(to_numpy(hinge.value).item(), margins.sum() / 2, **tolerance)
        x = leaf(queue, values, dtype)
        assert gradient(HELD["sum"](x), x).tolist() == np.ones((2, 3)).tolist()
        x = leaf(queue, values, dtype)
        unit = to_numpy(HELD["l2_normalize"](x).value)
        np.testing.assert_allclose(unit, values / np.linalg.norm(values, axis=1, keepdims=True), **tolerance)
        made = HELD["swish"](x)
        np.testing.assert_allclose(
            gradient(made, x, to_device(queue, np.ones((2, 3)), made.value.dtype)),
            sigmoid + values * sigmoid * (1 - sigmoid), **tolerance,
        )  # fmt: skip
        x = leaf(queue, np.ones(4096), dtype)
        made = HELD["dropout"](x, 0.5)
        kept = to_numpy(made.value)
        assert set(np.unique(kept)) == {0.0, 2.0}
        got = gradient(made, x, to_device(queue, np.ones(4096), made.value.dtype))
        np.testing.assert_array_equal(got, kept)


# ---------------------------------------------------------------------------------------------------- what runs inside


def test_what_netcls_functions_are_made_of_passes_no_wrapper(met: list[str], queue: cl.CommandQueue) -> None:
    """The wrapper around them has done what there is to do; a call of the same function from elsewhere meets it."""
    x = ag.tensor(to_device(queue, [1.0, 2.0]))
    with amp.init(), casting_in(None):
        assert ag.tanh(x) is None
        own = ag.tanh.__wrapped__(x)
        np.testing.assert_allclose(to_numpy(own.value), np.tanh([1.0, 2.0]), rtol=1e-6)
        assert met == ["netcl.autograd.tanh"]
        vars(ops)["tanh_op"](x.value)
    assert met == ["netcl.autograd.tanh", "netcl.ops.elementwise.tanh"]


# ------------------------------------------------------------------------------------------------------- the mechanism


def every_kind(
    first: Any, second: int = 2, /, third: Any = 3, *more: Any, key: Any, word: str = "w", **others: Any
) -> Any:
    return first, second, third, more, key, word, others


def test_every_kind_of_parameter_is_handed_on() -> None:
    seen: list[tuple[Any, ...]] = []

    def wrapper(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append((args, kwargs))
        return wrapped(*args, **kwargs)

    alone = [every_kind(1, key=5), every_kind(1, 2, 3, 4, key=5, word="x", other=6)]
    signature, redirected = inspect.signature(every_kind), Redirected(every_kind, wrapper)
    redirected.put()
    assert [every_kind(1, key=5), every_kind(1, 2, 3, 4, key=5, word="x", other=6)] == alone
    assert inspect.signature(every_kind) == signature
    every_kind.__defaults__ = (7, 8)
    assert every_kind(1, key=5)[:3] == (1, 7, 8)
    every_kind.__defaults__ = (2, 3)
    redirected.undo()
    assert seen == [
        ((1, 2, 3), {"key": 5, "word": "w"}),
        ((1, 2, 3, 4), {"key": 5, "word": "x", "other": 6}),
        ((1, 7, 8), {"key": 5, "word": "w"}),
    ]


@pytest.mark.parametrize("casts", [True, False], ids=["casts", "no casts"])
@pytest.mark.parametrize("how", ["wrapped", "more", "open", "bound"])
def test_what_is_shown_is_the_own_signature_whatever_is_taken(how: str, casts: bool) -> None:
    def step(first: Any, second: int = 2, *, key: str = "k") -> Any:
        return first, second, key

    handed: list[Any] = []

    def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handed[:] = instance, args, kwargs
        return wrapped(*args, **{name: x for name, x in kwargs.items() if name != "mode"}), kwargs.get("mode")

    shown = inspect.signature(step), inspect.getfullargspec(step)
    redirected = Redirected(step, wrapper, how, passes=lambda *args: True)
    redirected.put()
    assert (inspect.signature(step), inspect.getfullargspec(step)) == shown
    with nullcontext() if casts else casting_in(None):
        alone = (1, 2, "x")
        assert step(1, key="x") == (alone if how in ("wrapped", "more") and not casts else (alone, None))
        if how == "wrapped":
            with pytest.raises(TypeError, match="unexpected keyword argument 'mode'"):
                step(1, mode="m")  # type: ignore[call-arg]
        else:
            assert step(1, mode="m", key="x") == (alone, "m")  # type: ignore[call-arg]
        if how == "bound":  # as a method is called, without its defaults
            assert handed == [1, (), {"mode": "m", "key": "x"}]
    redirected.undo()
    assert vars(step) == {}


def test_a_closure_and_the_first_argument_stay() -> None:
    count = 1

    def step(*args: Any, **kwargs: Any) -> Any:
        return count, args, kwargs

    def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert sys._getframe(1).f_locals == {"self": "me", "args": (3,), "kwargs": {}, "count": 2}, (
            "what a debugger shows"
        )
        return instance, wrapped(*args)

    redirected = Redirected(step, wrapper, "bound")
    redirected.put()
    count = 2
    assert step("me", 3) == ("me", (2, ("me", 3), {}))
    redirected.undo()
    assert step("me", 3) == (2, ("me", 3), {})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_16_bit_input_goes_past_the_wrapper(queue: cl.CommandQueue, dtype: str) -> None:
    def function(*args: Any) -> None: ...

    passes = passes_of(function)
    wide, x = to_device(queue, [1.0]), to_device(queue, [1.0], dtype)
    node, param = ag.tensor(x), Parameter.from_host(queue, np.ones(1), "float32" if dtype == "float32" else "float16")
    for found in (x, node, param, [wide, x], ([node], 1)):
        assert passes(wide, (3, 2), None, slice(None), found) == (dtype == "float32")


def test_what_writes_into_an_argument_goes_by_the_wrapper(queue: cl.CommandQueue) -> None:
    def function(x: Any, axis: int, out: Any = None, more: int = 0) -> None: ...

    passes, x = passes_of(function), to_device(queue, [1.0])
    assert passes(x, 1, None, 2)
    assert not passes(x, 1, x, 2)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_redirections_of_one_function_are_undone_in_any_order(first: int) -> None:
    """As where a script that ``python -m clamp run`` runs calls ``amp.shutdown()``."""

    def double(x: int) -> int:
        return 2 * x

    own, all_ = double.__code__, []
    for digit in (1, 2, 3):
        all_.append(Redirected(double, lambda wrapped, _, args, __, digit=digit: 10 * wrapped(*args) + digit))
        all_[-1].put()
    assert double(1) == 2123
    all_.pop(first).undo()
    assert double(1) == int("2" + "123".replace(str(first + 1), ""))
    all_.pop(first - 1 if first else 0).undo()
    all_.pop().undo()
    assert double.__code__ is own
    assert vars(double) == {}


def test_code_that_a_user_gives_a_function_meanwhile_stays() -> None:
    own, mine = tensor_losses.mse_loss.__code__, (lambda pred, target, *args: 7).__code__
    try:
        with amp.init():
            tensor_losses.mse_loss.__code__ = mine
        assert tensor_losses.mse_loss(1, 2) == 7
        with amp.init():
            assert tensor_losses.mse_loss.__code__ is not mine
        assert tensor_losses.mse_loss.__code__ is mine
    finally:
        tensor_losses.mse_loss.__code__ = own


@pytest.mark.parametrize("how", ["wrapped", "open", "bound"])
def test_what_a_user_redirects_lives_no_longer_than_without(how: str) -> None:
    def function(x: Any) -> Any:
        return x

    bindings = redirect.Bindings()
    bindings.redirect(function, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs), how=how)
    bindings.restore()
    reference = weakref.ref(function)
    del function
    gc.collect()
    assert reference() is None


def test_threads_that_call_while_amp_comes_and_goes_never_fail(queue: cl.CommandQueue) -> None:
    x, stop = to_device(queue, [1.0, 2.0]), threading.Event()
    with casting_in(None):
        expected = to_numpy(elementwise.tanh(x)).tolist()

    def work() -> None:
        while not stop.is_set():
            assert to_numpy(elementwise.tanh(x)).tolist() == expected

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(work) for _ in range(2)]
        try:
            for _ in range(30):
                amp.init(dtype="float32").shutdown()
        finally:
            stop.set()
    for each in running:
        each.result()


USES: dict[str, Callable[[SGD], object]] = {
    "a region": lambda optimizer: amp.autocast()(lambda: None)(),
    "Paddle's region": lambda optimizer: amp.auto_cast()(lambda: None)(),
    "decorate": lambda optimizer: amp.decorate(Linear(optimizer.params[0].queue, 2, 2), optimizer, level="O2"),
    "a scaler": lambda optimizer: amp.GradScaler().scale(ag.sum(ag.tensor(optimizer.params[0], requires_grad=True))),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_shutdown_without_a_handle_gives_netcl_back(queue: cl.CommandQueue, use: Callable[[SGD], object]) -> None:
    own, names = codes(), dict(vars(Node))
    use(SGD([Parameter.from_host(queue, np.ones(1, np.float32))]))
    assert codes() != own
    amp.shutdown()
    assert codes() == own
    assert dict(vars(Node)) == names
    with amp.autocast():
        assert codes() != own, "who asks for AMP later gets it"
