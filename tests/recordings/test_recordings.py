"""A graph knows what its recordings depend on: every call gives what running ``build`` gives, whatever has changed."""

from __future__ import annotations

import cmath
import enum
import gc
import math
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any

import netcl.ops.elementwise
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd import engine
from netcl.core.tensor import reshape
from netcl.nn.batchnorm import BatchNorm2dModule
from netcl.nn.layers import Dropout, LeakyReLU, Linear, Module
from netcl.ops import elementwise
from netcl.optim import SGD, AdamW
from netcl.runtime.capture import CapturedKernelLaunch

from clamp import amp, session
from clamp.bridge import Node, Parameter, Tensor, device_memory
from clamp.recordings import comparison
from clamp.recordings.code_names import imported
from clamp.recordings.memory import keepers
from clamp.recordings.replayable import Replayable
from clamp.recordings.variants import MOST_KEYS, MOST_RECORDINGS
from tests.networks import LOSS_FACTOR, mlp, weights_of
from tests.recordings.test_compiled import BATCHES, TARGETS, assert_same, other_weight, played, poisoned, wide
from tests.reference import to_device

pytestmark = pytest.mark.usefixtures("shut_down")


def x_of(queue: cl.CommandQueue, index: int = 0) -> Tensor:
    return to_device(queue, BATCHES[index])


class Clamps(amp.Graph):
    """A graph of clamp's kernels, which are built once for all constants (netcl's once for each)."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        self.config.enable_amp(True, dtype=dtype)


class Infer(Clamps):
    """A model's output; counts its builds where no recording looks."""

    def __init__(self, model: Any, dtype: str = "float32") -> None:
        super().__init__(dtype)
        self.model = model
        self.builds: list[int] = []

    def build(self, x: Any) -> Any:
        self.builds.append(1)
        return self.model(x)


class Times(Clamps):
    """Its input times a number: of its own, or one that is given."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.builds: list[Any] = []

    def build(self, x: Any, factor: Any = None) -> Any:
        self.builds.append(factor)
        return ag.mul(x, self.factor if factor is None else float(factor))


def graph_of(
    build: Callable[..., Any], optimizer: Any = None, scaler: Any = None, dtype: str | None = None, **attributes: Any
) -> Any:
    """A graph whose ``build`` is this function of it and its inputs, under AMP if a dtype is given."""
    graph: Any = type("Made", (amp.Graph,), {"build": build})()
    vars(graph).update(attributes)
    if dtype is not None:
        graph.config.enable_amp(True, dtype=dtype)
    if optimizer is not None:
        graph.add_optimizer(optimizer)
    if scaler is not None:
        graph.set_grad_scaler(scaler)
    return graph


def recorded(graph: Any, *inputs: Any) -> Any:
    """A graph after enough calls to replay."""
    for _ in range(3):
        graph(*inputs)
    assert graph._recorded.recordings == 1
    return graph


def assert_as_fresh(graph: Any, *inputs: Any) -> None:
    """The next calls give what a graph gives that has recorded nothing; the last of them replays."""
    results = [graph(*inputs).to_host() for _ in range(3)]
    kept = graph._recorder
    graph._recorder = type(kept)(graph)
    expected = graph(*inputs).to_host()
    graph._recorder = kept
    for result in results:
        np.testing.assert_array_equal(result, expected)


class Train(Clamps):
    def __init__(self, model: Any, optimizer: Any, scaler: Any = None, dtype: str = "float16") -> None:
        super().__init__(dtype)
        self.builds: list[int] = []
        self.model = model
        self.add_optimizer(optimizer)
        if scaler is not None:
            self.set_grad_scaler(scaler)

    def build(self, x: Any, y: Any) -> Any:
        self.builds.append(1)
        loss = ag.mul(ag.mse_loss(self.model(x), y), LOSS_FACTOR)
        loss.backward()
        return loss


# ---------------------------------------------------------------------------------------------- memory that moves


@pytest.mark.parametrize("names", [1, 300])
def test_a_relative_import_is_found_in_a_function_of_any_size(names: int) -> None:
    lines = [f"    a{n}" for n in range(names)]
    code = compile("\n".join(["def f():", *lines, "    from ..ops import cast"]), "", "exec").co_consts[0]
    assert sys.modules["clamp.ops"] in imported(code, {"__package__": "clamp.casting"})


def _closing_over(value: Any, default: Any = 0) -> Callable[..., Any]:
    return lambda x=default: (x, value)


class Kind(enum.Enum):
    ONE = 1
    OTHER = 2


#: What launches or decisions of the host were made with, then and now, and whether they decide the same.
DECIDED_BY: list[tuple[Any, Any, bool]] = [
    (1, 1, True), (1, 2, False), (1, 1.0, False), (0.0, -0.0, False), (float("nan"), float("nan"), True),
    (True, 1, False), ("a", "b", False), (np.float32(1), np.float32(1), True), (np.float32(1), np.float32(2), False),
    ((1, 2), (1, 2), True), ((1, 2), (1, 3), False), ((1, 2), (1, 2, 3), False), ((1, 2, 3), (1, 2), False),
    ((), (1,), False), ([1], (1,), False), ([[1, (2,)]], [[1, (2,)]], True), ([[1, (2,)]], [[1, (3,)]], False),
    ({"a": 1}, {"a": 1}, True), ({"a": 1}, {"a": 2}, False), ({"a": 1}, {"a": 1, "b": 2}, False),
    (partial(max, 1), partial(max, 1), True), (partial(max, 1), partial(max, 2), False),
    (partial(max, key=1), partial(max, key=2), False),
    (_closing_over(1), _closing_over(1), True), (_closing_over(1), _closing_over(2), False),
    (_closing_over(1, 2), _closing_over(1, 3), False), (_closing_over(1), max, False),
    ({"a": 1}, {"b": 1}, False), ({1: 2}, {3: 2}, True), (partial(max, key=1), partial(max, default=1), False),
    # Functions of C are told apart by their names, and by what they are bound to; some are made anew for each use.
    (max, min, False), (math.sin, math.cos, False), (math.sqrt, cmath.sqrt, False), (np.add, np.multiply, False),
    (np.sum, np.prod, False), (str.upper, str.lower, False), (int.__add__, int.__sub__, False),
    ((1).__add__, (1).__add__, True), ((1).__add__, (2).__add__, False), ("a".join, "a".join, True),
    ("a".join, "b".join, False), ("a".join, "a".split, False), ([1].count, [1].count, True),
    ([1].count, [2].count, False), (itemgetter(1), itemgetter(1), True), (itemgetter(1), itemgetter(2), False),
    (attrgetter("a"), attrgetter("b"), False), (partial(map, max), partial(map, min), False),
    (_closing_over(max), _closing_over(min), False),
    # So are classes, modules and members of enumerations.
    (int, float, False), (dict, SGD, False), (math, cmath, False), (Kind.ONE, Kind.ONE, True),
    (Kind.ONE, Kind.OTHER, False), (dict.fromkeys, OrderedDict.fromkeys, False),
]  # fmt: skip


@pytest.mark.parametrize(("then", "now", "same"), DECIDED_BY)
def test_what_decides_the_same_is_alike(then: Any, now: Any, same: bool) -> None:
    assert bool(comparison._alike(then, now)) == same
    assert bool(comparison._alike(now, then)) == same


HOST = "a decision of the host"
OTHER_LAUNCHES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"kernel": min}, f"{HOST}, where {HOST} was recorded"),
    ({"args": (1, 2)}, f"{HOST} with 2 arguments, where 1 were recorded"),
    ({"queue": "another"}, f"{HOST} on another queue than it was recorded on"),
    ({"global_size": (16,)}, f"{HOST} of size (16,), where (8,) was recorded"),
    ({"local_size": (2,)}, f"{HOST} in groups of (2,), where (4,) was recorded"),
    ({"local_size": None}, f"{HOST} in groups of None, where (4,) was recorded"),
]


@pytest.mark.parametrize(("changes", "words"), OTHER_LAUNCHES)
def test_it_is_told_what_another_launch_is(changes: dict[str, Any], words: str) -> None:
    launch = {"kernel": max, "queue": "one", "global_size": (8,), "local_size": (4,), "args": (1,)}
    then, now = CapturedKernelLaunch(**launch), CapturedKernelLaunch(**{**launch, **changes})
    assert comparison._differs(then, now) == words


@pytest.mark.filterwarnings("ignore:.*runs without a recording|.*computes something else now:UserWarning")
def test_a_kernel_that_is_built_in_each_call_may_be_compared(queue: cl.CommandQueue) -> None:
    """On Intel's runtime nobody can ask it for its program, once that is held no more."""
    source = "__kernel void twice(__global float *x) { x[get_global_id(0)] *= 2.0f; }"

    @amp.record
    def doubled(x: Tensor) -> Node:
        out = ag.mul(ag.tensor(x), 1.0)
        cl.Program(queue.context, source).build().twice(queue, (4,), None, out.value.buffer)
        return out

    with amp.init(dtype="float32"):
        for number in range(8):
            out = doubled(to_device(queue, np.full(4, number)))
            np.testing.assert_array_equal(out.value.to_host(), np.full(4, 2 * number))


@pytest.mark.parametrize(
    ("places", "same"),
    [
        ([("A", "X"), ("B", "Y"), ("A", "X")], True),
        ([("A", "X"), ("A", "Y")], False),  # one has become two
        ([("A", "X"), ("B", "X")], False),  # two have become one
        ([(1, 1)], True), ([(1, 2)], False), ([(1, "X")], False), ([("A", 1)], False),
        ([("known", "known")], True), ([("known", "X")], False), ([("A", "known")], False),
    ],
)  # fmt: skip
def test_memory_that_nobody_knows_stands_for_other_memory_one_by_one(places: list[tuple[Any, Any]], same: bool) -> None:
    pairs: dict[Any, Any] = {}
    assert all(comparison._is_same_place(then, now, {"known"}, pairs) for then, now in places) == same


def test_which_calls_are_run_and_compared() -> None:
    """The first one only where it may have been recorded with what an iterator gave."""
    recorded: Any = Replayable.__new__(Replayable)
    for unknown in ([], ["a tensor"]):
        recorded.plan, due = SimpleNamespace(unknown_tensors=unknown), []
        for recorded.calls in range(1, 3002):
            due += [recorded.calls] * recorded.is_due
        assert due == [1] * len(unknown) + [2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1024, 2000, 2048, 3000]


@pytest.mark.parametrize("skipped", [0, 1, 3], ids=["never", "unrecorded call", "until a replay"])
@pytest.mark.usefixtures("uncompared")
def test_a_graph_trains_what_fused_adamw_has_moved(queue: cl.CommandQueue, skipped: int) -> None:
    """The first steps overflow, so the first real one comes before, in or after the recording."""
    batches = poisoned(BATCHES[:8], *range(skipped))

    def run(records: bool) -> list[list[Any]]:
        model = wide(queue)
        graph = Train(model, AdamW(model.parameters(), lr=0.01), amp.GradScaler(init_scale=2.0**12))
        found = []
        for x, y in zip(batches, TARGETS, strict=False):
            if not records:
                graph._recorded.clear()
            loss = graph(to_device(queue, x), to_device(queue, y))
            found.append([loss.to_host().copy(), *weights_of(model), graph.loss_scale])
        assert (len(graph.builds) < len(batches)) == records
        return found

    results = run(True)
    assert (results[-1][1] != results[skipped][1]).any()
    assert_same(results, run(False))


def test_an_eval_graph_recorded_before_training_returns_todays_results(queue: cl.CommandQueue) -> None:
    model = wide(queue)
    infer = recorded(Infer(model), x_of(queue))
    train = Train(model, AdamW(model.parameters(), lr=0.01), amp.GradScaler(init_scale=2.0**10))
    for x, y in zip(BATCHES[:4], TARGETS, strict=False):
        before = infer(x_of(queue)).to_host()
        train(to_device(queue, x), to_device(queue, y))
        assert (infer(x_of(queue)).to_host() != before).any()
    assert_as_fresh(infer, x_of(queue))


@pytest.mark.parametrize("set_aside", [False, True], ids=["seen", "set aside by gc.freeze"])
@pytest.mark.usefixtures("uncompared")
@pytest.mark.long
def test_memory_that_only_moved_is_rebound_without_recording_anew(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, set_aside: bool
) -> None:
    layer = Linear(queue, 10, 3)
    view = Tensor(layer.weight.buffer, layer.weight.shape, "float32", queue.context, queue)
    if set_aside:
        gc.freeze()
        monkeypatch.setattr(device_memory, "_count_set_aside", gc.get_freeze_count)
    graph = recorded(Infer(layer), x_of(queue))
    view.of = view  # which only the garbage collector finds
    del view
    first, expected = layer.weight.buffer, graph(x_of(queue)).to_host()
    other = np.random.default_rng(3).standard_normal((10, 3)).astype(np.float32)
    layer.weight.buffer = Parameter.from_host(queue, other).buffer
    result = graph(x_of(queue)).to_host()
    assert len(graph.builds) == 2
    np.testing.assert_allclose(result, BATCHES[0] @ other + layer.bias.to_host(), rtol=1e-4, atol=1e-4)
    one, two = layer.weight.buffer, Parameter.from_host(queue, other + 1).buffer
    for buffer in (two, one, two):  # and again
        layer.weight.buffer = buffer
        result = graph(x_of(queue)).to_host()
    np.testing.assert_allclose(result, BATCHES[0] @ (other + 1) + layer.bias.to_host(), rtol=1e-4, atol=1e-4)
    layer.weight.buffer = first
    np.testing.assert_array_equal(graph(x_of(queue)).to_host(), expected)
    assert len(graph.builds) == 2
    if set_aside:
        gc.freeze()  # as it was


def test_tensors_that_shared_memory_and_part_are_recorded_anew(queue: cl.CommandQueue) -> None:
    """No launch says which of the two it read."""
    weight = to_device(queue, np.full((12, 10), 2.0))
    view = Tensor(weight.buffer, weight.shape, weight.dtype, weight.context, queue)

    both = graph_of(lambda self, x: ag.add(ag.mul(x, ag.tensor(weight)), ag.tensor(view)), dtype="float32")
    graph = recorded(both, x_of(queue))
    view.buffer = to_device(queue, np.full((12, 10), 5.0)).buffer
    np.testing.assert_array_equal(graph(x_of(queue)).to_host(), BATCHES[0] * 2 + 5)
    assert_as_fresh(graph, x_of(queue))


# ---------------------------------------------------------------------------------------------- what Python decides by


def _other_shape(queue: cl.CommandQueue, model: Any) -> None:
    first, last = model.layers[0], model.layers[-1]
    first.weight, first.bias = (Parameter.from_host(queue, x) for x in (np.ones((10, 4)), np.ones(4)))
    last.weight = Parameter.from_host(queue, np.ones((4, 3)))


CHANGES: dict[str, Callable[[cl.CommandQueue, Any], None]] = {
    "weight": other_weight,
    "layer": lambda queue, model: model.layers.__setitem__(-1, Linear(queue, 16, 5)),
    "shape": _other_shape,
    "bias": lambda queue, model: setattr(model.layers[0], "bias", None),
    "layers": lambda queue, model: model.layers.pop(1),
    "slope": lambda queue, model: setattr(model.layers[1], "negative_slope", 0.5),
    "load": lambda queue, model: model.load_state_dict(mlp(queue, 10, 16, 3, seed=9).state_dict()),
    "decorate": lambda queue, model: amp.decorate(model, level="O2"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_seen(queue: cl.CommandQueue, change: str) -> None:
    model = mlp(queue, 10, 16, 3)
    model.layers[1] = LeakyReLU(0.01)
    infer = recorded(Infer(model), x_of(queue))
    before = infer(x_of(queue)).to_host()
    CHANGES[change](queue, model)
    after = infer(x_of(queue)).to_host()
    assert after.shape != before.shape or (after != before).any()
    assert_as_fresh(infer, x_of(queue))


class Nested(Module):
    """Modules where ``train`` and ``eval`` of the outermost do not reach: in lists of dicts, deep inside."""

    def __init__(self) -> None:
        self.parts = [{"a": (Dropout(0.5),)}]
        self.training = True

    def forward(self, x: Any) -> Any:
        return self.parts[0]["a"][0](x)


@pytest.mark.parametrize("where", ["list", "dict", "tuple", "module in a module"])
def test_modes_and_settings_are_seen_wherever_a_module_is_kept(queue: cl.CommandQueue, where: str) -> None:
    dropout = Dropout(0.5)
    nested = Nested()
    nested.parts[0]["a"] = (dropout,)
    kept = {"list": [dropout], "dict": {"x": dropout}, "tuple": ((dropout,),), "module in a module": nested}[where]

    def build(self: Any, x: Any) -> Any:
        return nested(x) if where == "module in a module" else dropout(x)

    graph = recorded(graph_of(build, dtype="float32", kept=kept), x_of(queue))
    assert (graph(x_of(queue)).to_host() == 0).any()
    dropout.training = False
    np.testing.assert_array_equal(graph(x_of(queue)).to_host(), BATCHES[0])
    dropout.training = True
    assert (graph(x_of(queue)).to_host() == 0).any()
    dropout.p = 0.0
    for _ in range(3):
        np.testing.assert_array_equal(graph(x_of(queue)).to_host(), BATCHES[0])


@pytest.mark.usefixtures("uncompared")
def test_modes_that_come_back_find_their_recording(queue: cl.CommandQueue) -> None:
    """Counters of the model's own do not stand in the way."""

    class Counts(Nested):
        calls = 0
        total = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            Counts.total += 1
            return super().forward(x)

    model = Counts()
    graph = Infer(model)
    for _ in range(4):
        for mode in (True, False):
            model.parts[0]["a"][0].training = mode
            for _ in range(3):
                graph(x_of(queue))
    assert len(graph.builds) == 4
    assert graph._recorded.recordings == 2


@pytest.mark.parametrize("how", ["no AMP", "off", "float32", "float16"])
@pytest.mark.usefixtures("uncompared")
def test_every_replay_drops_out_anew_whatever_the_region(queue: cl.CommandQueue, how: str) -> None:
    graph = Infer(Dropout(0.5))
    graph.config.amp = None if how == "no AMP" else how != "off"
    graph.config.dtype = how if how.startswith("float") else "float16"
    recorded(graph, x_of(queue))
    masks = {(graph(x_of(queue)).to_host() == 0).tobytes() for _ in range(4)}
    assert len(masks) == 4
    assert len(graph.builds) == 2


DROPS: dict[str, Callable[[Node], Any]] = {
    "layer": Dropout(0.5),
    "of a node": lambda x: ag.dropout(x, 0.5),
    "of a tensor": lambda x: elementwise.dropout(x.value, 0.5),
    "of a tensor, looked up late": lambda x: netcl.ops.elementwise.dropout(x.value, p=0.5),
}


@pytest.mark.parametrize("how", ["record", "Graph", "capture", "graph"])
@pytest.mark.parametrize("kind", DROPS)
@pytest.mark.parametrize("dtype", ["off", "float16"])
def test_what_replays_drop_out_is_what_eager_runs_draw(queue: cl.CommandQueue, kind: str, dtype: str, how: str) -> None:
    drop, x = DROPS[kind], to_device(queue, np.ones(64))

    def captured() -> Callable[[Node], Any]:
        play = played(how, lambda x: drop(Node(value=x)))
        drop(Node(value=x))  # builds the kernel
        return lambda node: play(node.value)

    def draws(call: Callable[[Node], Any]) -> list[Any]:
        np.random.seed(7)
        return [(out if isinstance(out := call(Node(value=x)), Tensor) else out.value).to_host() for _ in range(5)]

    ways = {"record": lambda: amp.record(drop), "Graph": lambda: graph_of(lambda self, x: drop(x))}
    with amp.init(), amp.autocast(enabled=dtype != "off"):
        want = draws(drop)
        got = draws(ways.get(how, captured)())
    assert len({one.tobytes() for one in want}) == len({one.tobytes() for one in got}) == 5
    for one, other in zip(got, want, strict=True) if dtype != "off" else ():  # netcl's own draws elsewhere
        np.testing.assert_array_equal(one, other)


def test_settings_of_a_batch_norm_are_seen(queue: cl.CommandQueue) -> None:
    norm = BatchNorm2dModule(queue, 3)
    x = to_device(queue, np.random.default_rng(0).standard_normal((2, 3, 4, 4)))
    graph = recorded(Infer(norm), x)
    norm.momentum = 1.0
    norm.running_mean.write(np.zeros(3))
    graph(x)
    np.testing.assert_allclose(norm.running_mean.to_host(), x.to_host().mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
    before = graph(x).to_host()
    norm.eps = 3.0
    assert (graph(x).to_host() != before).all()
    norm.eval()
    norm.running_mean = to_device(queue, np.full(3, 7.0))
    assert_as_fresh(graph, x)


def outside(x: Any) -> Any:
    return ag.mul(x, 4.0)


@pytest.mark.parametrize("how", ["requires_grad", "freeze", "mark alone"])
def test_parameters_frozen_and_thawed_after_the_recording_are_seen(queue: cl.CommandQueue, how: str) -> None:
    model = mlp(queue, 10, 16, 3)
    first = model.layers[0]

    def freeze(on: bool) -> None:
        if how == "freeze":
            first.freeze() if on else first.unfreeze()
        elif how == "mark alone":
            first.weight._frozen = on
        else:
            first.weight.requires_grad = not on

    freeze(True)
    graph = Train(model, SGD(model.parameters(), lr=0.05))
    inputs = x_of(queue), to_device(queue, TARGETS[0])
    recorded(graph, *inputs)
    frozen = first.weight.to_host()
    freeze(False)
    graph(*inputs)
    assert (first.weight.to_host() != frozen).any()
    for _ in range(3):
        graph(*inputs)
    freeze(True)
    frozen = first.weight.to_host()
    for _ in range(3):
        graph(*inputs)
        np.testing.assert_array_equal(first.weight.to_host(), frozen)
        assert first.weight.grad is None


def test_parameters_that_join_and_leave_an_optimizer_are_seen(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 10, 16, 3)
    params = list(model.parameters())
    optimizer = SGD(params, lr=0.05)
    graph = Train(model, optimizer)
    inputs = x_of(queue), to_device(queue, TARGETS[0])
    recorded(graph, *inputs)
    for kept in (params[:2], params[2:], params):
        optimizer.params = list(kept)
        for _ in range(4):
            before = weights_of(model)
            graph(*inputs)
            moved = [(new != old).any() for new, old in zip(weights_of(model), before, strict=True)]
            assert moved == [any(p is q for q in kept) for p in params]


def test_regions_lists_and_grad_mode_around_the_call_are_seen(queue: cl.CommandQueue) -> None:
    graph = graph_of(lambda self, x: ag.matmul_op(x, ag.permute(x, (1, 0))))

    def dtype() -> str:
        return {graph(x_of(queue)).dtype for _ in range(3)}.pop()

    assert dtype() == "float32"
    for how, expected in (({}, "float16"), ({"dtype": "bfloat16"}, "bfloat16"), ({"level": "O0"}, "float32")):
        with amp.init(**how) as handle:
            assert dtype() == expected
            with handle.disable_casts():
                assert dtype() == "float32"
    with amp.init(custom_black_list=["matmul_op"]):
        assert dtype() == "float32"
    with amp.init():
        assert dtype() == "float16"
        with ag.no_grad():
            assert dtype() == "float16"


def test_functions_that_a_user_registers_are_seen(queue: cl.CommandQueue) -> None:
    graph = graph_of(lambda self, x: outside(x))
    with amp.autocast():
        assert {graph(x_of(queue)).dtype for _ in range(3)} == {"float32"}
    try:
        amp.register_half_function(sys.modules[__name__], "outside")
        with amp.autocast():
            assert {graph(x_of(queue)).dtype for _ in range(3)} == {"float16"}
    finally:
        session.registrations.clear()
        session.forget_patches()


def test_a_graph_in_a_graph_is_recorded_with_it(queue: cl.CommandQueue) -> None:
    inner = Infer(mlp(queue, 10, 16, 3))

    graph = recorded(graph_of(lambda self, x: ag.mul(ag.tensor(inner(x)), 2.0)), x_of(queue))
    for index in range(3):
        np.testing.assert_array_equal(graph(x_of(queue, index)).to_host(), inner(x_of(queue, index)).to_host() * 2)
    inner.model.layers[0].weight.write(np.ones((10, 16)))
    inner.model.layers[0].bias = None
    np.testing.assert_array_equal(graph(x_of(queue)).to_host(), inner(x_of(queue)).to_host() * 2)


# ---------------------------------------------------------------------------------------------- inputs


@pytest.mark.usefixtures("uncompared")
def test_inputs_that_were_one_tensor_and_part_are_seen(queue: cl.CommandQueue) -> None:
    """The other way round as well, and views on one buffer."""
    x, y = x_of(queue), x_of(queue, 1)
    view = Tensor(x.buffer, x.shape, x.dtype, x.context, queue)

    def affine(self: Any, x: Any, y: Any) -> Any:
        self.builds.append(1)
        return ag.add(ag.mul(x, 2.0), y)

    for first in ((x, x), (x, view), (x, y)):
        graph = recorded(graph_of(affine, builds=[]), *first)
        for a, b in ((x, y), (y, x), (y, y), (x, view), (x, x), (x, y)):
            for _ in range(3):
                np.testing.assert_array_equal(graph(a, b).to_host(), a.to_host() * 2 + b.to_host())
        assert len(graph.builds) == 4  # one recording for inputs that share memory, one for others


@pytest.mark.parametrize("what", ["parameter", "view of a parameter", "statistics"])
def test_an_input_in_the_memory_of_the_model_is_not_taken_for_it(queue: cl.CommandQueue, what: str) -> None:
    """Later inputs do not become the model's parameters."""
    weight = Parameter.from_host(queue, np.ones((12, 10), np.float32))
    weight.requires_grad = False
    if what == "statistics":
        weight = to_device(queue, np.ones((12, 10)))
    model = SimpleNamespace(weight=weight)
    given = weight
    if what == "view of a parameter":
        given = Tensor(weight.buffer, weight.shape, weight.dtype, weight.context, queue)

    uses = graph_of(lambda self, x: ag.add(ag.mul(ag.tensor(self.model.weight), 10.0), x), model=model)
    graph = recorded(uses, given)
    for index in range(3):
        np.testing.assert_array_equal(graph(x_of(queue, index)).to_host(), BATCHES[index] + 10)
    weight.write(np.full((12, 10), 2.0))
    np.testing.assert_array_equal(graph(given).to_host(), np.full((12, 10), 22.0))
    np.testing.assert_array_equal(graph(x_of(queue)).to_host(), BATCHES[0] + 20)
    model.weight = to_device(queue, np.full((12, 10), 3.0))
    for _ in range(3):
        np.testing.assert_array_equal(graph(x_of(queue)).to_host(), BATCHES[0] + 30)


def test_constants_are_told_apart_by_type_and_value(queue: cl.CommandQueue) -> None:
    def build(self: Any, x: Any, constant: Any) -> Any:
        self.seen.append(constant)
        return ag.mul(x, float(type(constant).__name__ == "float") + 2.0)

    graph = graph_of(build, seen=[])
    kinds = [1, True, 1.0, np.float32(1), 0.0, -0.0, float("nan"), (1, 2), (1.0, 2), None, "1"]
    for constant in kinds:
        for _ in range(3):
            result = graph(x_of(queue), float("nan") if constant != constant else constant).to_host()
            np.testing.assert_array_equal(result, BATCHES[0] * (3 if isinstance(constant, float) else 2))
    assert list(map(repr, graph.seen)) == [repr(x) for x in kinds for _ in range(2)]  # no third build


def test_settings_that_differ_in_the_sign_of_zero_are_two(queue: cl.CommandQueue) -> None:
    graph = Times()
    graph.factor = 0.0
    recorded(graph, x_of(queue))
    for factor in (-0.0, 0.0):
        graph.factor = factor
        result = graph(x_of(queue)).to_host()
        np.testing.assert_array_equal(np.signbit(result), np.signbit(BATCHES[0]) ^ np.signbit(factor))


def test_a_list_that_build_makes_longer_is_looked_into_all_the_same(queue: cl.CommandQueue) -> None:
    def build(self: Any, x: Any) -> Any:
        self.numbers.append(0.0)
        return ag.mul(x, self.numbers[0])

    graph = recorded(graph_of(build, numbers=[1.0]), x_of(queue))
    for factor in (2.0, 1.0, 3.0):
        graph.numbers[0] = factor
        for _ in range(3):
            np.testing.assert_array_equal(graph(x_of(queue)).to_host(), BATCHES[0] * np.float32(factor))


def test_a_constant_that_is_an_object_is_looked_into(queue: cl.CommandQueue) -> None:
    settings = type("Settings", (), {"factor": 2.0})()
    graph = recorded(graph_of(lambda self, x, settings: ag.mul(x, settings.factor)), x_of(queue), settings)
    settings.factor = 3.0
    for _ in range(3):
        np.testing.assert_array_equal(graph(x_of(queue), settings).to_host(), BATCHES[0] * 3)


def test_a_constant_that_changes_in_every_call_runs_with_one_warning_and_bounded_memory(
    queue: cl.CommandQueue,
) -> None:
    graph, x = Times(), x_of(queue)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3 * MOST_KEYS):
            graph(x, float(number))
    assert [str(w.message)[:33] for w in said if w.category is UserWarning] == ["Times is recorded again and again"]
    assert "inputs[1]" in next(str(w.message) for w in said if w.category is UserWarning)
    assert len(graph._recorded) == MOST_KEYS
    for number in range(2 * MOST_RECORDINGS):
        for _ in range(2):
            np.testing.assert_array_equal(graph(x, float(number)).to_host(), BATCHES[0] * np.float32(number))
    assert graph._recorded.recordings <= MOST_RECORDINGS


# ---------------------------------------------------------------------------------------------- what no replay can do


def test_a_tensor_that_build_reads_and_replaces_is_never_the_old_one(queue: cl.CommandQueue) -> None:
    """A state carried from call to call in an attribute: the graph runs build each time, and says so once."""

    def build(self: Any, x: Any) -> Any:
        self.state = ag.add(ag.tensor(self.state), x).value
        return self.state

    graph = graph_of(build, state=to_device(queue, np.zeros((12, 10))))
    graph(x_of(queue))
    with pytest.warns(UserWarning, match="puts a new tensor in place of one that it reads"):
        graph(x_of(queue))
    for count in range(3, 7):
        np.testing.assert_allclose(graph(x_of(queue)).to_host(), BATCHES[0] * count, rtol=1e-5)


def test_an_input_that_is_trained_keeps_its_own_gradient(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 10, 16, 3)
    graph = Train(model, SGD(model.parameters(), lr=1e-30))
    y = to_device(queue, TARGETS[0])
    grads = []
    for index in (0, 0, 0, 1, 1, 2):
        x = x_of(queue, index)
        x.requires_grad = True
        graph(x, y)
        grads.append(x.grad.to_host())
    np.testing.assert_array_equal(grads[0], grads[2])
    np.testing.assert_array_equal(grads[3], grads[4])
    assert (grads[2] != grads[3]).any()

    def new_each_time() -> None:
        for index in range(12):
            x = x_of(queue, index)
            x.requires_grad = True
            graph(x, y)
            assert x.grad is not None

    with pytest.warns(UserWarning, match="is recorded again and again"):
        new_each_time()
    assert graph._recorded.recordings <= 4


@pytest.mark.usefixtures("uncompared")
def test_a_trained_input_in_the_memory_of_another_gets_its_own_gradient(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 10, 16, 3)
    graph, y = Train(model, SGD(model.parameters(), lr=1e-30)), to_device(queue, TARGETS[0])
    x = x_of(queue)
    view = Tensor(x.buffer, x.shape, x.dtype, x.context, queue)
    x.requires_grad = view.requires_grad = True
    for _ in range(3):
        x.grad = None
        graph(x, y)
    assert len(graph.builds) == 2
    expected, x.grad = x.grad.to_host(), None
    graph(view, y)
    assert x.grad is None
    np.testing.assert_array_equal(view.grad.to_host(), expected)


@pytest.mark.usefixtures("uncompared")
def test_what_becomes_of_an_earlier_input_does_not_matter(queue: cl.CommandQueue) -> None:
    graph, x = Infer(mlp(queue, 10, 16, 3)), x_of(queue)
    recorded(graph, x)
    x.requires_grad = True
    x.buffer = x_of(queue, 1).buffer
    graph(x_of(queue))
    assert len(graph.builds) == 2


def test_a_training_graph_under_no_grad_says_so_whatever_was_recorded(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 10, 16, 3)
    graph = Train(model, SGD(model.parameters(), lr=0.01))
    inputs = x_of(queue), to_device(queue, TARGETS[0])
    recorded(graph, *inputs)
    with ag.no_grad(), pytest.raises((TypeError, AttributeError)):
        graph(*inputs)
    graph(*inputs)
    assert graph.last_step is not None
    assert graph.last_step.stepped


def test_recordings_die_with_their_graph(queue: cl.CommandQueue) -> None:
    gc.collect()
    before = len(keepers)
    graph = recorded(Infer(mlp(queue, 10, 16, 3)), x_of(queue))
    assert len(keepers) == before + 1
    del graph
    gc.collect()
    assert len(keepers) == before


# ---------------------------------------------------------------------------------------------- the scale


def test_a_grad_scaler_and_its_graph_have_one_scale(queue: cl.CommandQueue) -> None:
    """Shown, saved, loaded and set on either, between replays too; the growth tracker goes along."""
    scaler = amp.GradScaler(init_scale=2.0**10, growth_interval=4)
    model = mlp(queue, 10, 16, 3)
    graph = Train(model, SGD(model.parameters(), lr=0.01), scaler)
    good = x_of(queue), to_device(queue, TARGETS[0])
    bad = to_device(queue, poisoned(BATCHES, 0)[0]), good[1]
    for inputs, scale in ((good, 10), (good, 10), (good, 10), (good, 11), (bad, 10), (good, 10)):
        graph(*inputs)
        assert scaler.get_scale() == graph.loss_scale == 2.0**scale
    state = scaler.state_dict()
    assert state["_growth_tracker"] == 1
    assert graph.state_dict()["scaler"]["unskipped"] == 1
    scaler.update(512.0)
    graph(*good)
    assert graph.loss_scale == 512.0
    scaler.load_state_dict(state)
    assert graph.loss_scale == 2.0**10
    graph.load_state_dict({"scaler": {"loss_scale": 64.0, "unskipped": 3}})
    assert scaler.get_scale() == 64.0
    graph(*good)
    assert scaler.get_scale() == 128.0
    other = amp.GradScaler(enabled=False)
    plain = Train(model, SGD(model.parameters(), lr=0.01), other)
    plain(*good)
    assert plain.loss_scale == 1.0


def test_a_scaler_of_a_graph_steps_an_optimizer_outside_as_well(queue: cl.CommandQueue) -> None:
    """An overflow of the one is none of the other's."""
    scaler = amp.GradScaler(init_scale=2.0**10)
    models = [mlp(queue, 10, 16, 3, seed=seed) for seed in range(2)]
    inside, besides = (SGD(model.parameters(), lr=0.01) for model in models)
    graph = Train(models[0], inside, scaler)
    inputs = to_device(queue, poisoned(BATCHES, 0)[0]), to_device(queue, TARGETS[0])
    for _ in range(3):
        besides.zero_grad()
        with amp.autocast():
            loss = ag.mul(ag.mse_loss(models[1](ag.tensor(x_of(queue))), ag.tensor(inputs[1])), LOSS_FACTOR)
        scaler.scale(loss).backward()
        scaler.unscale_(besides)
        before, theirs = (weights_of(model) for model in models)
        graph(*inputs)
        scaler.step(besides)
        scaler.update()
        assert_same([weights_of(models[0])], [before])
        assert all((new != old).any() for new, old in zip(weights_of(models[1]), theirs, strict=True))


# ---------------------------------------------------------------------------------------------- many recordings


def test_a_setting_that_changes_now_and_then_is_recorded_each_time(queue: cl.CommandQueue) -> None:
    graph, x = Times(), x_of(queue)
    for number in range(12):
        graph.factor = float(number)
        for _ in range(3):
            np.testing.assert_array_equal(graph(x).to_host(), BATCHES[0] * np.float32(number))
    assert graph._recorded.recordings > 0


@pytest.mark.usefixtures("uncompared")
def test_the_kind_that_was_used_last_is_remembered(queue: cl.CommandQueue) -> None:
    graph, x = Times(), x_of(queue)
    for factor in range(MOST_KEYS + 1):
        for _ in range(3):
            np.testing.assert_array_equal(graph(x, factor).to_host(), BATCHES[0] * np.float32(factor))
    assert graph.builds == [factor for factor in range(MOST_KEYS + 1) for _ in range(2)]
    assert len(graph._recorded) == MOST_KEYS


def test_a_parameter_that_a_replay_does_not_reach_is_not_stepped(queue: cl.CommandQueue) -> None:
    models = [mlp(queue, 10, 3, seed=seed) for seed in range(2)]

    optimizer = SGD([param for model in models for param in model.parameters()], lr=0.01)

    def build(self: Any, x: Any, y: Any, which: int) -> Any:
        loss = ag.mul(ag.mse_loss(self.models[which](x), y), LOSS_FACTOR)
        loss.backward()
        return loss

    graph, x, y = graph_of(build, optimizer, models=models), x_of(queue), to_device(queue, TARGETS[0])
    for which in (0, 0, 1, 1, 0, 1, 0, 1):
        before = [weights_of(model) for model in models]
        graph(x, y, which)
        after = [weights_of(model) for model in models]
        assert_same([after[1 - which]], [before[1 - which]])
        assert all((new != old).any() for new, old in zip(after[which], before[which], strict=True))
    assert graph._recorded.recordings == 2


def test_gradients_of_what_the_graph_does_not_step_add_up(queue: cl.CommandQueue) -> None:
    """Another optimizer's parameter, an input that is trained: calls add to their gradients, and so do replays."""
    weight, extra = (Parameter.from_host(queue, np.ones(shape, np.float32)) for shape in ((4, 3), (4,)))
    optimizer = SGD([weight], lr=1e-30)

    def build(self: Any, x: Any) -> Any:
        loss = ag.sum(ag.matmul_op(ag.add(x, ag.tensor(extra)), ag.tensor(weight)))
        loss.backward()
        return loss

    train, x = graph_of(build, optimizer, dtype="float32"), to_device(queue, np.ones((2, 4)))
    x.requires_grad = True
    for cleared in (True, False, True):
        if cleared:
            x.grad = extra.grad = None
            total = 0
        for _ in range(4):
            train(x)
            total += 1
            np.testing.assert_array_equal(x.grad.to_host(), np.full((2, 4), 3.0 * total))
            np.testing.assert_array_equal(extra.grad.to_host(), np.full(4, 6.0 * total))
    kept = extra.grad
    train(x)
    np.testing.assert_array_equal(kept.to_host(), np.full(4, 6.0 * total))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_gradient_of_an_input_is_no_later_calls(queue: cl.CommandQueue, scaled: bool) -> None:
    """netcl's add leaves one on every leaf. A replay leaves none on the input of the call that was recorded; and an
    input may come back with one of another loss scale."""
    shift = Parameter.from_host(queue, np.ones(10, np.float32))

    scaler = amp.GradScaler(init_scale=2.0**4, growth_interval=1) if scaled else None

    def build(self: Any, x: Any) -> Any:
        loss = ag.sum(ag.square(ag.add(x, ag.tensor(shift))))
        loss.backward()
        return loss

    graph, xs = graph_of(build, SGD([shift], lr=1e-3), scaler), [x_of(queue, index) for index in range(3)]
    kept: list[Any] = [None] * 3
    for turn in range(12):
        for x, grad in zip(xs, kept, strict=True):
            np.testing.assert_array_equal(None if x.grad is None else x.grad.to_host(), grad)
        graph(xs[turn % 3])
        kept[turn % 3] = None if xs[turn % 3].grad is None else xs[turn % 3].grad.to_host()
    assert all(grad is not None for grad in kept)
    assert graph._recorded.recordings == 1


def test_no_gradient_is_taken_for_one_that_was_freed(queue: cl.CommandQueue) -> None:
    """netcl's engine adds in place where it knows whose a gradient is. If it knew them by ids, the same pass would
    launch otherwise from call to call, and a recording would be found to differ from it."""
    amp.init()
    made = set()
    for _ in range(50):
        tensor = Tensor.from_shape(queue, (3,), fill=0.0)
        key = engine._gradient_storage_key(tensor)
        assert engine._gradient_storage_key(reshape(tensor, (1, 3))) == engine._gradient_storage_key(tensor) == key
        made.add(key)
        del tensor
    assert len(made) == 50
