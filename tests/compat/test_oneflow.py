"""OneFlow's face: a graph's calls give the same bits recorded and replayed as an eager AMP step."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node, Tensor
from clamp.compat.oneflow import GradScaler, Graph, StaticGradScaler
from clamp.compat.paddle import GradScaler as PaddleScaler
from tests.networks import mlp, weights_of
from tests.recipes import RECIPES, Made, Recipe, make
from tests.recordings.test_compiled import BATCHES, OPTIMIZERS, TARGETS, Trainer, assert_same, init, poisoned
from tests.recordings.test_recordings import Train
from tests.reference import HALF_DTYPES, to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")


def trained(queue: cl.CommandQueue, model: Any, graph: Any, batches: list[np.ndarray]) -> list[list[Any]]:
    results = []
    for x, y in zip(batches, TARGETS, strict=True):
        loss = graph(to_device(queue, x), to_device(queue, y))
        results.append([loss, *weights_of(model), graph.loss_scale])
        junk = [Tensor.from_shape(queue, (size,), fill=7.0) for size in (36, 160, 48, 3, 16, 1) * 3]
        del junk
    return [[result[0].to_host(), *result[1:]] for result in results]


def eager(queue: cl.CommandQueue, dtype: str, name: str, batches: list[np.ndarray]) -> list[list[Any]]:
    results = []
    with init(dtype) as handle:
        run = Trainer(queue, handle, name)
        for x, y in zip(batches, TARGETS, strict=True):
            loss = run.step(to_device(queue, x), to_device(queue, y))
            results.append([loss.value.to_host(), *weights_of(run.model), handle.loss_scale])
    return results


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.usefixtures("uncompared")
def test_a_graph_trains_as_eager_amp(queue: cl.CommandQueue, dtype: str, optimizer: str) -> None:
    """Losses, parameters and scale; an overflow in a replay skips that step alone, and the scale grows and falls."""
    batches = poisoned(BATCHES, 5)
    model = mlp(queue, 10, 16, 3)
    graph = Train(model, OPTIMIZERS[optimizer](model.parameters()), GradScaler(growth_interval=3), dtype)
    assert_same(trained(queue, model, graph, batches), eager(queue, dtype, optimizer, batches))
    assert len(graph.builds) == 2


class Infer(Graph):
    """A model's result under AMP, alone and nested, and how often it was recorded."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.builds = 0
        self.model = model
        self.config.enable_amp()

    def build(self, x: Any, factor: float = 1.0) -> Any:
        self.builds += 1
        out = self.model(x)
        return {"out": out, "more": (ag.mul(out, factor), "name")}


@pytest.mark.usefixtures("uncompared")
def test_results_of_calls_are_the_users_to_keep(queue: cl.CommandQueue) -> None:
    """Nested, detached, and not overwritten by the next call; a batch of another size is recorded on its own."""

    model = mlp(queue, 10, 16, 3)
    graph = Infer(model)
    batches = [*BATCHES[:4], *(batch[:5] for batch in BATCHES[:4])]
    with amp.autocast(), ag.no_grad():
        expected = [model(ag.tensor(to_device(queue, batch))).to_host().copy() for batch in batches]
    results = [graph(to_device(queue, batch), 2.0) for batch in batches]
    assert {result["out"].dtype for result in results} == {"float16"}
    assert graph.builds == 4
    for result, want in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result["out"].to_host(), want)
        np.testing.assert_array_equal(result["more"][0].to_host(), want * 2)
        assert result["more"][1] == "name"
    np.testing.assert_array_equal(graph(to_device(queue, BATCHES[0]), 4.0)["more"][0].to_host(), expected[0] * 4)


def test_an_input_among_the_results_is_the_calls_own(queue: cl.CommandQueue) -> None:
    class Same(Graph):
        def build(self, x: Any) -> Any:
            return x, ag.reshape(x, (10, 12))

    graph = Same()
    for batch in BATCHES[:4]:
        same, view = graph(to_device(queue, batch))
        np.testing.assert_array_equal(same.to_host(), batch)
        np.testing.assert_array_equal(view.to_host(), batch.reshape(10, 12))


def test_graphs_work_under_init_and_after_shutdown(queue: cl.CommandQueue) -> None:
    """A graph's own setting wins over the region around it; without one, it is the region's."""

    class Product(Graph):
        def build(self, x: Any) -> Any:
            return ag.matmul_op(x, x)

    x = to_device(queue, np.ones((4, 4)))
    plain, off, narrow = Product(), Product(), Product()
    off.config.enable_amp(False)
    narrow.config.enable_amp(True, dtype="bfloat16")

    def dtypes(times: int = 3) -> list[set[str]]:
        return [{graph(x).dtype for _ in range(times)} for graph in (plain, off, narrow)]

    assert dtypes() == [{"float32"}, {"float32"}, {"bfloat16"}]
    with amp.init():
        assert dtypes() == [{"float16"}, {"float32"}, {"bfloat16"}]
    assert dtypes() == [{"float32"}, {"float32"}, {"bfloat16"}]


@pytest.mark.parametrize("scaler", [StaticGradScaler(256.0), None], ids=["static", "none"])
def test_a_scale_that_stays(queue: cl.CommandQueue, scaler: Any) -> None:
    model = mlp(queue, 10, 16, 3)
    graph = Train(model, OPTIMIZERS["sgd"](model.parameters()), scaler)
    inputs = [to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])]
    losses = [float(graph(*inputs).to_host()[0]) for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert graph.loss_scale == (256.0 if scaler else 1.0)
    before = weights_of(model)
    if scaler:
        graph(to_device(queue, poisoned(BATCHES, 0)[0]), inputs[1])
        assert not graph.last_step.stepped
        assert_same([weights_of(model)], [before])


def test_several_losses_and_optimizers_share_a_step(queue: cl.CommandQueue) -> None:
    """Two backward passes into two optimizers: the replay adds their gradients up, as the first call does."""

    class Two(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(queue, 10, 8), mlp(queue, 8, 3, seed=1)
            self.add_optimizer(OPTIMIZERS["sgd"](self.first.parameters()))
            self.add_optimizer(OPTIMIZERS["adam"](self.second.parameters()))
            self.config.enable_amp(True)
            self.set_grad_scaler(amp.GradScaler(init_scale=2.0**8))

        def build(self, x: Any, y: Any) -> Any:
            hidden = self.first(x)
            ag.mul(ag.sum(ag.square(hidden)), 2.0**-10).backward(retain_graph=True)
            loss = ag.mul(ag.mse_loss(self.second(hidden), y), 2.0**-10)
            loss.backward()
            return loss

    inputs = [to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])]
    recorded, plain = Two(), Two()
    for _ in range(5):
        loss = recorded(*inputs)
        plain._recorded.clear()  # never records
        np.testing.assert_array_equal(loss.to_host(), plain(*inputs).to_host())
    for one, other in zip((recorded.first, recorded.second), (plain.first, plain.second), strict=True):
        assert_same([weights_of(one)], [weights_of(other)])


def test_a_graph_continues_from_its_state(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 10, 16, 3)
    graph = Train(model, OPTIMIZERS["sgd"](model.parameters()), scaler=GradScaler(init_scale=3000, growth_interval=4))
    inputs = [to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])]
    for _ in range(3):
        graph(*inputs)
    state = graph.state_dict()
    assert state["scaler"]["loss_scale"] == 3000
    graph(*inputs)
    assert graph.loss_scale == 6000
    graph.load_state_dict(state)
    assert graph.loss_scale == 3000
    graph(*inputs)
    assert graph.loss_scale == 6000
    with pytest.raises(ValueError, match="has the key 'scaler'"):
        graph.load_state_dict({})


def test_the_scale_stays_above_one(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 10, 16, 3)
    graph = Train(model, OPTIMIZERS["sgd"](model.parameters()), scaler=GradScaler(init_scale=4.0))
    bad = [to_device(queue, poisoned(BATCHES, 0)[0]), to_device(queue, TARGETS[0])]
    assert [(graph(*bad), graph.loss_scale)[1] for _ in range(4)] == [2.0, 1.0, 1.0, 1.0]


def test_bad_use_says_what_to_do(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 10, 16, 3)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    x, y = to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])

    class Forgot(Train):
        def build(self, x: Any, y: Any) -> Any:
            return ag.mse_loss(self.model(x), y)

    class Reads(Train):
        def build(self, x: Any, y: Any) -> Any:
            loss = super().build(x, y)
            return float(loss.value.to_host()[0])

    class Untrained(Infer):
        def build(self, x: Any, factor: float = 1.0) -> Any:
            return ag.sum(self.model(x)).backward()

    with pytest.raises(RuntimeError, match=r"ran no loss.backward"):
        Forgot(model, optimizer)(x, y)
    with pytest.raises(RuntimeError, match=r"Untrained.build ran backward, .* call self.add_optimizer\(optimizer\)"):
        Untrained(model)(x)
    reads = Reads(model, optimizer)
    reads(x, y)
    with pytest.raises(RuntimeError, match="Read it after the recorded part"):
        reads(x, y)
    graph = Train(model, optimizer)
    graph(x, y)
    with pytest.raises(RuntimeError, match="in __init__"):
        graph.set_grad_scaler(GradScaler())
    with pytest.raises(RuntimeError, match="in __init__"):
        graph.add_optimizer(optimizer)
    with pytest.raises(NotImplementedError, match="needs a method build"):
        Graph()(x)
    with pytest.raises(TypeError, match="pass its tensors one by one"):
        graph([x], y)
    with pytest.raises(TypeError, match="takes a GradScaler or a StaticGradScaler"):
        Graph().set_grad_scaler(2.0**16)
    with pytest.raises(TypeError, match=r"of clamp\.amp or .*, got clamp\.compat\.paddle\.GradScaler"):
        Graph().set_grad_scaler(PaddleScaler())
    with pytest.raises(TypeError, match="params"):
        Graph().add_optimizer(model)
    with pytest.raises(ValueError, match="float64"):
        Graph().config.enable_amp(True, dtype="float64")
    with pytest.raises(TypeError, match="enable_amp: mode is 'bfloat16'; pass True or False"):
        Graph().config.enable_amp("bfloat16")
    with pytest.raises(TypeError, match=r"the dict that state_dict\(\) returned, got None"):
        Graph().load_state_dict(None)
    for wrong in ({"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 2.0}, {"growth_interval": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong)).replace("init_scale", "the loss scale")):
            GradScaler(**wrong)
    with pytest.raises(ValueError, match="the loss scale"):
        StaticGradScaler(-1.0)


@pytest.mark.parametrize("around", ["nothing", "init"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_build_is_refused(queue: cl.CommandQueue, name: str, around: str) -> None:
    """It would be made twice."""
    model = mlp(queue, 10, 16, 3)
    optimizer = OPTIMIZERS[name](model.parameters())
    if around == "init":
        amp.init()

    class Steps(Train):
        def build(self, x: Any, y: Any) -> Any:
            loss = super().build(x, y)
            optimizer.step()
            return loss

    before = weights_of(model)
    for of in (Steps, Train):  # it has changed nothing, so that the same goes on without it
        step = of(model, optimizer)
        refuses = pytest.raises(RuntimeError, match=rf"Graph has called {type(optimizer).__name__}\.step\(\)")
        with refuses if of is Steps else nullcontext():
            step(to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0]))
        assert (of is Steps) == all(map(np.array_equal, weights_of(model), before))


@pytest.mark.parametrize("of", ["a model that is trained", "a teacher", "a constant"])
@pytest.mark.parametrize("calls", [1, 4])
def test_backward_that_ends_at_a_graph_says_so(queue: cl.CommandQueue, of: str, calls: int) -> None:
    body, head = mlp(queue, 10, 8), mlp(queue, 8, 3)
    optimizer = SGD([*head.parameters(), *([] if of == "a teacher" else body.parameters())], lr=0.1)

    class Forward(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def build(self, x: Any) -> Any:
            return self.body(x)

    forward, x = Forward(), to_device(queue, BATCHES[0])
    for number in range(calls):
        with ag.no_grad() if of == "a constant" else nullcontext():
            features = forward(x)
        says = of == "a model that is trained" and number == 0
        with pytest.warns(UserWarning, match="Forward returned, which has no graph") if says else nullcontext():
            ag.sum(head(ag.tensor(features))).backward()
        optimizer.zero_grad()


@pytest.mark.parametrize("first", ["add_optimizer", "config", "set_grad_scaler", "loss_scale", "()"])
def test_a_graph_without_its_init_says_so(queue: cl.CommandQueue, first: str) -> None:
    class Forgets(Graph):
        def __init__(self) -> None:
            self.model = mlp(queue, 10, 16, 3)

        def build(self, x: Any) -> Any:
            return self.model(x)

    graph, x = Forgets(), to_device(queue, BATCHES[0])
    given = {"add_optimizer": (SGD(graph.model.parameters()),), "set_grad_scaler": (GradScaler(),)}
    with pytest.raises(AttributeError, match=r"call super\(\)\.__init__\(\) first in Forgets\.__init__"):
        graph(x) if first == "()" else getattr(graph, first)(*given.get(first, ()))
    with pytest.raises(AttributeError, match="'Train' object has no attribute 'modle'"):
        _ = Train(graph.model, SGD(graph.model.parameters())).modle


def test_an_error_inside_a_property_stays_what_it_is(queue: cl.CommandQueue) -> None:
    class Graphs(Train):
        @property
        def width(self) -> Any:
            return self.model.widht

    model = mlp(queue, 10, 16, 3)
    with pytest.raises(AttributeError, match="object has no attribute 'widht'"):
        _ = Graphs(model, SGD(model.parameters())).width


class Recorded(Graph):
    """A recipe's model, trained on the mean square of its output, or only evaluated."""

    def __init__(self, recipe: Recipe, made: Made, trains: bool) -> None:
        super().__init__()
        self.recipe, self.made, self.model = recipe, made, made.model
        self.config.enable_amp(True)
        if trains:
            self.add_optimizer(SGD(made.trained, lr=1e-3))
            self.set_grad_scaler(GradScaler(init_scale=64.0))

    def build(self, *inputs: Any) -> Any:
        given = iter(inputs)
        arguments = [next(given) if isinstance(x, Tensor) else x for x in self.made.tensors]
        arguments = [x.value if isinstance(x, Node) and x.value.dtype == "int32" else x for x in arguments]
        out = self.recipe.call(self.model, *arguments)
        out = out[0] if isinstance(out, list | tuple) else out
        if self._optimizers:
            out = ag.mean(ag.square(out)) if out.value.size > 1 else out
            out.backward()
        return out


@pytest.mark.slow
@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.result != "none"])
def test_every_layer_and_model_of_netcl_replays(queue: cl.CommandQueue, name: str, trains: bool) -> None:
    """Results and trained tensors have the bits of a graph that never records."""
    recipe = RECIPES[name]
    if not (trains or recipe.infers):
        pytest.skip("has no inference")

    def run(records: bool) -> list[np.ndarray]:
        made = make(recipe, queue)
        if not trains and hasattr(made.model, "eval"):
            made.model.eval()
        graph, results = Recorded(recipe, made, trains), []
        np.random.seed(3)
        for _ in range(4):
            if not records:
                graph._recorded.clear()
            results.append(to_numpy(graph(*(x for x in made.tensors if isinstance(x, Tensor)))))
            junk = [Tensor.from_shape(queue, (size,), fill=9.0) for size in (10, 200, 500, 2000) * 8]
            del junk
        return [*results, *map(to_numpy, made.trained)]

    for actual, expected in zip(run(True), run(False), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_graphs_that_threads_build_at_the_same_time_leave_each_others_backward(queue: cl.CommandQueue) -> None:
    """The first to begin ends first; the other's backward comes after that."""
    models = [mlp(queue, 10, 16, 3) for _ in range(2)]
    begun, ended = threading.Event(), threading.Event()
    first, second = (Train(model, SGD(model.parameters(), lr=0.1), GradScaler(), "float16") for model in models)
    of_first, of_second = first.build, second.build

    def begins_first(*inputs: Any) -> Any:
        between.append(thread.submit(second, *data))
        begun.wait()
        return of_first(*inputs)

    def ends_last(*inputs: Any) -> Any:
        begun.set()
        ended.wait()
        return of_second(*inputs)

    between: list[Future[Any]] = []
    data = to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])
    first.build, second.build = begins_first, ends_last  # type: ignore[method-assign]
    before = weights_of(models[0])
    with init("float16"), ThreadPoolExecutor(1) as thread:
        plain = Node.backward
        try:
            first(*data)
        finally:
            ended.set()
        between[0].result()
        for one, other, was in zip(weights_of(models[0]), weights_of(models[1]), before, strict=True):
            assert_same(one, other)
            assert (one != was).any()
        assert Node.backward is plain
