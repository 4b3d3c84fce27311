"""netcl's compiled graphs under AMP: a replay gives what running the step again gives, bit for bit, or refuses."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd.forward_compiler import ForwardCompiler
from netcl.autograd.graph import CompiledGraph
from netcl.core import transfer
from netcl.nn.layers import Dropout, LeakyReLU, Sequential
from netcl.ops.elementwise import elementwise_scalar
from netcl.optim import SGD, Adam, AdamW
from netcl.runtime.capture import KernelCapture

from clamp import amp, bridge
from clamp.bridge import Parameter, Tensor
from clamp.ops.gemm import gemm
from clamp.recordings import memory
from clamp.scaling.dynamic_scale import ScaleRule
from tests.networks import loss_of, mlp, scaled_backward, weights_of
from tests.reference import HALF_DTYPES, to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: Adam(params, lr=0.01),
    "adamw": lambda params: AdamW(params, lr=0.01),
}

BATCHES = [np.random.default_rng(seed).standard_normal((12, 10)).astype(np.float32) for seed in range(12)]
TARGETS = [np.random.default_rng(seed + 50).standard_normal((12, 3)).astype(np.float32) for seed in range(12)]


def init(dtype: str = "float16") -> Any:
    handle = amp.init(dtype=dtype, loss_scale="dynamic")
    handle.scalers[0].rule = ScaleRule(interval=3)
    return handle


class Trainer:
    """One training run, whose step is the same code whether it is recorded or not."""

    def __init__(
        self, queue: cl.CommandQueue, handle: Any, optimizer: str | Callable[..., Any], model: Any = None
    ) -> None:
        self.handle = handle
        self.model = mlp(queue, 10, 16, 3) if model is None else model(queue)
        self.params = list(self.model.parameters())
        self.optimizer = (OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer)(self.params)

    def backward(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, (x, y))
        scaled_backward(self.handle, loss, self.optimizer)
        return loss

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = self.backward(x, y)
        self.optimizer.step()
        return loss

    def result(self, loss: Any) -> list[Any]:
        stepped, steps = self.handle.last_step.stepped, getattr(self.optimizer, "t", None)
        return [loss.value.to_host().copy(), *weights_of(self.model), stepped, steps, self.handle.loss_scale]

    def change_settings(self, step: int) -> None:
        """As schedules do from step to step."""
        self.optimizer.lr = (0.05, 0.01, 0.02)[step % 3]
        if hasattr(self.optimizer, "momentum"):
            self.optimizer.momentum = (0.9, 0.0)[step % 2]


def wide(queue: cl.CommandQueue) -> Sequential:
    """Enough parameters for fused AdamW, which moves them into one buffer at its first real step."""
    return mlp(queue, 10, 96, 96, 96, 3)


def poisoned(batches: list[np.ndarray], *where: int) -> list[np.ndarray]:
    batches = [batch.copy() for batch in batches]
    for index in where:
        batches[index][3, 4] = np.inf
    return batches


def eager(queue: cl.CommandQueue, dtype: str, optimizer: str, batches: list[np.ndarray]) -> list[list[Any]]:
    with init(dtype) as handle:
        run, found = Trainer(queue, handle, optimizer), []
        for step, (x, y) in enumerate(zip(batches, TARGETS, strict=True)):
            run.change_settings(step)
            found.append(run.result(run.step(to_device(queue, x), to_device(queue, y))))
        return found


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Raises AssertionError where nested results differ, and says at which index."""
    assert type(one) is type(other)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for index, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_same(x, y, f"{where}[{index}]")
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, err_msg=where)
    else:
        assert one == other, where


@pytest.mark.parametrize("data", ["in new tensors", "written into the recorded ones"])
@pytest.mark.parametrize("whole", [False, True], ids=["backward", "whole step"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_a_replayed_step_is_the_eager_step(
    queue: cl.CommandQueue, dtype: str, optimizer: str, whole: bool, data: str
) -> None:
    """Parameters, loss, scale and the optimizer's count, at the settings of the day, with an overflow on the way: only
    that step is skipped."""
    batches = poisoned(BATCHES, 5)
    expected = eager(queue, dtype, optimizer, batches)
    assert np.isfinite(np.concatenate([array.ravel() for array in expected[-1][1:-3]])).all()
    assert [step[-1] for step in expected[3:8]] == [2.0**17, 2.0**17, 2.0**16, 2.0**16, 2.0**16]
    assert [step[-3] for step in expected[3:8]] == [True, True, False, True, True]
    assert_same([expected[5][1:-3]], [expected[4][1:-3]])
    with init(dtype) as handle:
        run = Trainer(queue, handle, optimizer)
        play = played("graph", run.step if whole else run.backward, run.params)
        actual, inputs = [], list[Tensor]()
        for step, (x, y) in enumerate(zip(batches, TARGETS, strict=True)):
            run.change_settings(step)
            if inputs and data == "written into the recorded ones":
                for tensor, new in zip(inputs, (x, y), strict=True):
                    tensor.write(new)
            else:
                inputs = [to_device(queue, x), to_device(queue, y)]
            loss = play(*inputs)
            if not whole:
                run.optimizer.step()
            assert all(param.grad is not None for param in run.params)
            actual.append(run.result(loss))
            junk = [Tensor.from_shape(queue, (size,), fill=7.0) for size in (36, 160, 48, 3, 16, 1) * 3]
            del junk
    assert_same(actual, expected)


def in_threads(*works: Callable[[], Any]) -> None:
    """Makes calls in a thread each, all at once."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def record(graph: CompiledGraph, step: Callable[..., Any], *inputs: Tensor) -> Any:
    with graph:
        result = step(*inputs)
    graph.compile(list(inputs))
    return result


def played(how: str, step: Callable[..., Any], params: Sequence[Tensor] = ()) -> Callable[..., Any]:
    """A step as it is ("eager"), or recorded in its first call, by a "graph" or a "capture", and replayed in others,
    which return what the first did."""
    graph, capture, made = CompiledGraph(list(params)), KernelCapture(), list[Any]()

    def call(*inputs: Tensor) -> Any:
        if made:
            graph.replay(list(inputs)) if how == "graph" else capture.replay()
        elif how == "graph":
            made.append(record(graph, step, *inputs))
        else:
            capture.begin()
            made.append(step(*inputs))
            capture.end()
        return made[0]

    return step if how == "eager" else call


def test_bare_captures_and_two_graphs_side_by_side(queue: cl.CommandQueue) -> None:
    """A KernelCapture holds a whole step, host decisions included; netcl's one list for all graphs mixes nothing up."""
    x, y = to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])
    with init() as handle:
        run = Trainer(queue, handle, "sgd")
        expected = [run.result(run.step(x, y)) for _ in range(6)]
    with init() as handle:
        run = Trainer(queue, handle, "sgd")
        play = played("capture", run.step)
        assert_same([run.result(play(x, y)) for _ in range(6)], expected)
        capture = KernelCapture()
        capture.begin()
        run.step(x, y)
        capture.end()
        pointer = x.buffer.int_ptr
        capture.replay_with_new_buffers({pointer: to_device(queue, BATCHES[1]).buffer})
        with pytest.raises(ValueError, match="no recorded launch has a buffer"):
            capture.replay_with_new_buffers({1: x.buffer})
        with pytest.raises(TypeError, match="ignores `rebind`"):
            capture.replay({0: x.buffer})
        capture.clear()
        with pytest.raises(RuntimeError, match="before capture is finalized"):
            capture.replay()
    with init() as handle:
        runs = [Trainer(queue, handle, name) for name in ("sgd", "adam")]
        graphs = [CompiledGraph(run.params) for run in runs]
        losses = [record(graph, run.step, x, y) for graph, run in zip(graphs, runs, strict=True)]
        for _ in range(5):
            for graph in graphs:
                graph.replay([x, y])
        np.testing.assert_array_equal(losses[0].value.to_host(), expected[5][0])


#: the ways to replay a bare capture
REPLAYS: dict[str, Callable[[KernelCapture], Any]] = {
    "replay": lambda capture: capture.replay(),
    "new buffers": lambda capture: capture.replay_with_new_buffers({}),
}


@pytest.mark.parametrize("replay", REPLAYS.values(), ids=REPLAYS)
def test_a_graph_follows_memory_that_a_replay_of_its_capture_has_followed(
    queue: cl.CommandQueue, replay: Callable[[KernelCapture], Any]
) -> None:
    with init():
        weight = Parameter.from_host(queue, np.ones((4, 4), np.float32))
        x, graph = to_device(queue, np.ones((1, 4))), CompiledGraph([weight])
        out = record(graph, lambda x: ag.matmul_op(ag.tensor(x), ag.tensor(weight, requires_grad=True)), x)
        graph.replay([x])
        other = Parameter.from_host(queue, np.full((4, 4), 10.0, np.float32))
        weight.buffer = other.buffer
        replay(graph.capture)
        np.testing.assert_array_equal(to_numpy(out.value), np.full((1, 4), 40.0))
        x.write(np.full((1, 4), 2.0, np.float32))
        graph.replay([x])
        np.testing.assert_array_equal(to_numpy(out.value), np.full((1, 4), 80.0))


@pytest.mark.parametrize("replay", REPLAYS.values(), ids=REPLAYS)
def test_a_replay_ends_what_was_derived_from_the_memory_that_it_writes(
    queue: cl.CommandQueue, replay: Callable[[KernelCapture], Any]
) -> None:
    with init():
        weight = Parameter.from_host(queue, np.ones((4, 4), np.float32))
        x = ag.tensor(to_device(queue, np.ones((1, 4))))

        def output() -> float:
            with ag.no_grad():
                return float(to_numpy(ag.matmul_op(x, ag.tensor(weight, requires_grad=True)))[0, 0])

        capture = KernelCapture()
        capture.begin()
        elementwise_scalar(weight, 2.0, "MUL", out=weight)
        capture.end()
        assert output() == 8.0
        replay(capture)
        assert output() == 16.0


def test_fills_and_copies_are_replayed(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.arange(300))
    sums = Tensor.from_shape(queue, (300,), fill=0.0)
    part = to_device(queue, np.zeros(300))
    with amp.init():
        capture = KernelCapture()
        capture.begin()
        transfer.fill(queue, part.buffer, np.float32(2.0), 40, 400)
        transfer.fill(queue, sums.buffer, np.uint16(0), 0, 6)
        transfer.copy(queue, part.buffer, x.buffer, 80, src_offset=40, dst_offset=0)
        transfer.copy(queue, sums.buffer, part.buffer, 1199)
        zeros = Tensor.from_shape(queue, (5,), dtype="float16", fill=3.0)
        capture.end()
        x.write(np.arange(300) + 1000.0)
        for tensor in (part, sums):
            tensor.write(np.full(300, 5.0))
        zeros.write(np.zeros(5))
        capture.replay()
    expected = np.full(300, 5.0, np.float32)
    expected[10:110] = 2
    expected[:20] = np.arange(10, 30) + 1000.0
    np.testing.assert_array_equal(part.to_host(), expected)
    np.testing.assert_array_equal(sums.to_host()[:299], expected[:299])
    np.testing.assert_array_equal(zeros.to_host(), np.full(5, 3.0))


def test_memory_that_a_recording_reads_is_given_to_nobody_until_it_is_gone(queue: cl.CommandQueue) -> None:
    """Neither its own buffers nor those of tensors that its user has dropped since."""
    context = cl.Context([queue.device])  # whose pool is this test's alone
    queue = cl.CommandQueue(context)
    pool = Tensor.from_shape(queue, (64,)).pool_handle.pool
    pool.clear()  # of what other tests have left: all that is free is asked for below
    others = memory.keepers.copy()  # recordings of theirs that there still are
    with amp.init():
        held = [amp.cast(to_device(queue, np.full(200, 3.0)), "float16")]
        where = bridge.address_of(held[0].buffer)
        x = to_device(queue, np.ones(200))
        graph = CompiledGraph([])
        out = record(graph, lambda x: ag.mul(ag.tensor(x), ag.tensor(held[0])), x)
        held.clear()
        junk = [Tensor.from_shape(queue, (size,), fill=9.0) for size in (50, 100, 200) * 20]
        graph.replay([to_device(queue, np.full(200, 2.0))])
        np.testing.assert_array_equal(out.value.to_host(), np.full(200, 6.0))
        for tensor in junk:
            np.testing.assert_array_equal(tensor.to_host(), np.full(tensor.shape, 9.0))
        cached = pool.stats.bytes_cached
        del graph, out
        gc.collect()
        assert pool.stats.bytes_cached > cached
        assert memory.keepers == others
        assert ("release" in vars(pool)) == bool(others)
        free = [Tensor.from_shape(queue, (200,), dtype="float16") for _ in range(pool.stats.bytes_cached // 400 + 1)]
        assert where in {bridge.address_of(tensor.buffer) for tensor in free}


def test_recordings_made_one_after_the_other_take_the_same_memory(queue: cl.CommandQueue) -> None:
    context = cl.Context([queue.device])  # whose pool is this test's alone
    queue = cl.CommandQueue(context)
    pool = Tensor.from_shape(queue, (64,)).pool_handle.pool
    held = []
    with amp.init():
        for _ in range(6):
            graph = CompiledGraph([])
            out = record(graph, lambda x: ag.mul(ag.relu(ag.tensor(x)), 3.0), to_device(queue, np.ones(70_001)))
            graph.replay([to_device(queue, np.full(70_001, 2.0))])
            np.testing.assert_array_equal(out.value.to_host(), np.full(70_001, 6.0))
            del graph, out
            gc.collect()
            held.append((pool.stats.bytes_cached, pool._owned_bytes))
    assert held[0][0] > 2 * 4 * 70_001
    assert held[1:] == held[1:2] * 5


def test_memory_that_was_handed_over_is_given_out_once(queue: cl.CommandQueue) -> None:
    """Whoever asks: netcl's pool, or what is left of a recording's, which results outlive."""
    main = Tensor.from_shape(queue, (64,)).pool_handle.pool
    own = memory.Pool(main, lambda address: None)
    for handle in [own.allocate(123_456) for _ in range(3)]:
        own.release(handle)
    own.close()
    given = [pool.allocate(123_456) for _ in range(4) for pool in (main, own)]
    assert len({bridge.address_of(handle.buffer) for handle in given}) == len(given)
    for handle in given:
        handle.pool.release(handle)
    again = [main.allocate(123_456) for _ in given]
    assert len({bridge.address_of(handle.buffer) for handle in (*given, *again)}) == len(given)


def test_memory_that_a_tensor_has_moved_to_is_given_to_nobody_either(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.ones(200))
    with amp.init():
        held, other = (amp.cast(to_device(queue, np.full(200, number)), "float16") for number in (3.0, 4.0))
        known = [held]
        del held
        graph = CompiledGraph([])
        out = record(graph, lambda x: ag.mul(ag.tensor(x), ag.tensor(known[0])), x)
        bridge.give_storage(known[0], other)
        graph.replay([x])
        known.clear()
        del other
        junk = [Tensor.from_shape(queue, (size,), fill=9.0) for size in (50, 100, 200) * 20]
        graph.replay([x])
        np.testing.assert_array_equal(out.value.to_host(), np.full(200, 4.0))
        for tensor in junk:
            np.testing.assert_array_equal(tensor.to_host(), np.full(tensor.shape, 9.0))


def test_a_replay_does_not_free_memory_under_launches(queue: cl.CommandQueue) -> None:
    """OpenCL keeps buffers as long as launches want them, and frees shared virtual memory under them."""
    x, large = to_device(queue, np.ones(200)), to_device(queue, np.ones((1500, 1500)))
    with amp.init():
        factor, other = (amp.cast(to_device(queue, np.ones(200)), "float16") for _ in range(2))
        if not isinstance(factor.buffer, cl.SVM):
            pytest.skip("netcl takes buffers on this device")
        graph, known = CompiledGraph([]), [factor]
        record(graph, lambda x: ag.mul(ag.tensor(x), ag.tensor(known[0])), x)
        launched: list[cl.Event] = []
        at_the_end: list[int] = []
        weakref.finalize(factor.pool_handle._arr, lambda: at_the_end.append(launched[0].command_execution_status))
        gemm(large, large, out_dtype="float32")
        launched.append(cl.enqueue_marker(queue))
        vars(factor).update(buffer=other.buffer, pool_handle=other.pool_handle)  # the recording alone has the old
        other.pool_handle = None  # one of the two gives it back
        graph.replay([x])
    assert at_the_end == [cl.command_execution_status.COMPLETE]


def test_what_no_replay_can_do_raises(queue: cl.CommandQueue) -> None:
    x, y = to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])
    plain_copy, plain_read, plain_call = cl.enqueue_copy, vars(Tensor)["to_host"], cl.Kernel.__call__
    with init() as handle:
        recorded_read = vars(Tensor)["to_host"]
        run = Trainer(queue, handle, "sgd")

        def reading(x: Tensor, y: Tensor) -> None:
            float(run.backward(x, y).value.to_host()[0])

        def uploading(x: Tensor, y: Tensor) -> None:
            run.backward(Tensor.from_host(queue, BATCHES[1]), y)

        def asking_the_scale(x: Tensor, y: Tensor) -> None:
            run.backward(x, y)
            handle.loss_scale  # noqa: B018

        for step, advice in (
            (reading, "Read it after the recorded part"),
            (uploading, "Pass data that changes as an input tensor"),
            (asking_the_scale, "Read it after the recorded part"),
        ):
            graph = CompiledGraph(run.params)
            run.optimizer.zero_grad()
            with pytest.raises(RuntimeError, match=advice), graph:
                step(x, y)
            assert (cl.enqueue_copy, vars(Tensor)["to_host"]) == (plain_copy, recorded_read)
            assert cl.Kernel.__call__ is plain_call
        with pytest.raises(RuntimeError, match="have gradients already"), CompiledGraph(run.params):
            pass
        run.optimizer.zero_grad()
        graph = CompiledGraph(run.params)
        with pytest.raises(RuntimeError, match="has not been recorded"):
            graph.compile([x])
        with pytest.raises(RuntimeError, match="under way already"), graph, CompiledGraph([]):
            pass
        run.optimizer.zero_grad()
        graph = CompiledGraph(run.params)
        with graph:
            run.step(x, y)
        with pytest.raises(RuntimeError, match="call compile"):
            graph.replay([x, y])
        with pytest.raises(ValueError, match="read by no recorded launch"):
            graph.compile([x, to_device(queue, TARGETS[0])])
        graph.compile([x, y])
        for wrong in ([x], [x, x], [amp.cast(x, "float16"), y]):
            with pytest.raises(ValueError, match=r"recording has 2 inputs|was recorded as float32"):
                graph.replay(wrong)
        with pytest.raises(RuntimeError, match="Replay it outside"), CompiledGraph([]):
            graph.replay([x, y])
        graph.replay([x, y])
    assert vars(Tensor)["to_host"] is plain_read
    with pytest.raises(RuntimeError, match="shut down: record it again"):
        graph.replay([x, y])


def test_shutdown_in_a_recording_leaves_netcl_as_it_was(queue: cl.CommandQueue) -> None:
    owners = [cl, cl.Kernel, KernelCapture, CompiledGraph]
    before = [dict(vars(owner)) for owner in owners]
    handle = amp.init()
    with CompiledGraph([]):
        assert [dict(vars(owner)) for owner in owners] != before
        handle.shutdown()
    assert [dict(vars(owner)) for owner in owners] == before


def test_a_graph_of_netcls_own_refuses_16_bit_inputs(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.ones(8))
    graph = CompiledGraph([])
    with graph:
        out = ag.mul(ag.tensor(x), ag.tensor(x))
    graph.compile([x])
    with amp.init():
        with pytest.raises(TypeError, match="recorded before amp"):
            graph.replay([amp.cast(x, "float16")])
        graph.replay([to_device(queue, np.full(8, 3.0))])
    np.testing.assert_array_equal(out.value.to_host(), np.full(8, 9.0))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_a_compiled_forward_pass_takes_a_computed_sample(queue: cl.CommandQueue, dtype: str) -> None:
    """Its memory is SVM, which netcl's replay does not find again: it returned the sample's result."""
    with amp.init(dtype=dtype), ag.no_grad():
        model = mlp(queue, 10, 16, 3)
        sample, other = (amp.cast(to_device(queue, batch), dtype) for batch in BATCHES[:2])
        expected = model(other).to_host().copy()
        compiled = model.compile_forward(sample)
        np.testing.assert_array_equal(compiled(other).to_host(), expected)
        with pytest.raises(ValueError, match="was recorded as"):
            compiled(to_device(queue, BATCHES[0][:5]))


def test_an_optimizer_with_masters_steps_in_replays(queue: cl.CommandQueue) -> None:
    """16-bit parameters: every replay unscales into the masters and writes the parameters back."""

    def weights(how: str) -> np.ndarray:
        with init() as handle:
            weight = Parameter.from_host(
                queue, np.linspace(-1, 1, 48, dtype=np.float16).reshape(16, 3), dtype="float16"
            )
            optimizer = AdamW([weight], lr=0.01)
            x = to_device(queue, np.linspace(-1, 1, 192).reshape(12, 16))

            def step(x: Tensor) -> None:
                optimizer.zero_grad()
                loss = ag.mean(ag.square(ag.matmul_op(ag.tensor(x), ag.tensor(weight, requires_grad=True))))
                scaled_backward(handle, loss, optimizer)
                optimizer.step()

            play = played(how, step)
            for _ in range(5):
                play(x)
            return weight.to_host().copy()

    eagerly = weights("eager")
    assert (eagerly != np.linspace(-1, 1, 48, dtype=np.float16).reshape(16, 3)).any()
    np.testing.assert_array_equal(weights("graph"), eagerly)


def test_a_pytorch_scaler_steps_after_replays(queue: cl.CommandQueue) -> None:
    """Each replay's gradients are scaled anew, and said to be: the scaler divides them again."""

    def weights(how: str) -> list[Any]:
        run = Trainer(queue, None, "adam")
        scaler = amp.GradScaler(init_scale=1024.0, growth_interval=2)

        def backward(x: Tensor, y: Tensor) -> None:
            run.optimizer.zero_grad()
            with amp.autocast():
                loss = loss_of(run.model, (x, y))
            scaler.scale(loss).backward()

        inputs = [to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])]
        backward(*inputs)
        run.optimizer.zero_grad()
        play = played(how, backward, run.params)
        for _ in range(4):
            play(*inputs)
            scaler.step(run.optimizer)
            scaler.update()
        assert scaler.get_scale() == 4096.0

        def whole(x: Tensor, y: Tensor) -> None:
            backward(x, y)
            scaler.step(run.optimizer)
            scaler.update()

        play = played(how, whole, run.params)
        for _ in range(4):
            run.optimizer.zero_grad()
            play(*inputs)
        assert scaler.get_scale() == 16384.0
        return weights_of(run.model)

    assert_same(weights("graph"), weights("eager"))
    amp.init().shutdown()  # takes autocast's patches away


# ---------------------------------------------------------------------------------------------- what has changed since


@pytest.mark.parametrize("kind", ["graph", "graph around the step", "capture"])
def test_recordings_follow_parameters_that_an_optimizer_moves(queue: cl.CommandQueue, kind: str) -> None:
    """Fused AdamW does at its first real step, which comes late when the first steps overflow."""
    batches = poisoned(BATCHES[:7], 0, 1)

    def run(how: str) -> list[list[Any]]:
        with init() as handle:
            run = Trainer(queue, handle, "adamw", wide)
            x, y = to_device(queue, batches[0]), to_device(queue, TARGETS[0])
            whole = kind != "graph"
            play = played(how, run.step if whole else run.backward, run.params)
            found = []
            for batch in batches:
                x.write(batch)
                loss = play(x, y)
                if not whole:
                    run.optimizer.step()
                found.append(run.result(loss))
            return found

    results = run(kind.partition(" ")[0])
    assert (results[-1][1] != results[2][1]).any()
    assert_same(results, run("eager"))


def other_weight(queue: cl.CommandQueue, model: Any) -> None:
    model.layers[0].weight = Parameter.from_host(queue, model.layers[0].weight.to_host() * 2)


MODEL_CHANGES: dict[str, tuple[Callable[[cl.CommandQueue, Any], None], str]] = {
    "weight": (other_weight, r"weight has changed"),
    "layer": (lambda queue, model: model.layers.__setitem__(2, Dropout(0.1)), r"layers\[2\] has changed"),
    "mode": (lambda queue, model: setattr(model.layers[1], "training", False), r"training has changed"),
    "setting": (lambda queue, model: setattr(model.layers[1], "p", 0.25), r"\.p has changed"),
    "frozen": (
        lambda queue, model: model.layers[0].freeze(),
        r"requires_grad of a parameter of shape \((10, 16|16,)\)",
    ),
    "decorated": (lambda queue, model: amp.decorate(model, level="O2"), r"dtype of a parameter|class of"),
}


@pytest.mark.parametrize("change", MODEL_CHANGES)
def test_a_graph_of_netcls_refuses_a_model_that_has_changed(queue: cl.CommandQueue, change: str) -> None:
    """It says what has, and that it must be recorded again; nothing is launched, no gradient touched."""
    apply, message = MODEL_CHANGES[change]
    with init() as handle:
        run = Trainer(queue, handle, "sgd")
        run.model = Sequential(run.model.layers[0], Dropout(0.5), *run.model.layers[1:])
        graph = CompiledGraph(run.params)
        inputs = [to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])]
        record(graph, run.backward, *inputs)
        run.optimizer.step()
        graph.replay(inputs)
        run.optimizer.zero_grad()
        apply(queue, run.model)
        with pytest.raises(RuntimeError, match=f"{message}.* Record the pass again"):
            graph.replay(inputs)
        assert all(param.grad is None for param in run.params)


def test_a_counter_of_the_models_own_does_not_part_it_from_its_recording(queue: cl.CommandQueue) -> None:
    class Counts(Sequential):
        def forward(self, x: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            self._kept = [self.calls]
            return super().forward(x)

    with init() as handle:
        run = Trainer(queue, handle, "sgd")
        run.model = Counts(*run.model.layers)
        run.model(ag.tensor(to_device(queue, BATCHES[0])))
        graph = CompiledGraph(run.params)
        inputs = [to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])]
        record(graph, run.step, *inputs)
        run.model(ag.tensor(to_device(queue, BATCHES[1])))
        run.model.best = 0.5  # what was not there when it was recorded decided nothing
        graph.replay(inputs)
        assert handle.last_step.stepped


def test_a_graph_of_netcls_refuses_inputs_that_do_not_share_memory_as_they_did(queue: cl.CommandQueue) -> None:
    x, y = to_device(queue, BATCHES[0]), to_device(queue, BATCHES[1])
    weight = Parameter.from_host(queue, BATCHES[2])

    def together(x: Tensor, y: Tensor) -> Any:
        return ag.add(ag.mul(ag.tensor(x), 2.0), ag.tensor(y))

    def with_weight(x: Tensor) -> Any:
        return ag.add(ag.mul(ag.tensor(x), 2.0), ag.tensor(weight))

    with init("float32"):
        graph = CompiledGraph([])
        out = record(graph, together, x, x)
        graph.replay([y, y])
        np.testing.assert_array_equal(out.value.to_host(), BATCHES[1] * 3)
        with pytest.raises(RuntimeError, match="share memory, and these do not"):
            graph.replay([x, y])
        graph = CompiledGraph([])
        out = record(graph, together, x, y)
        graph.replay([y, y])
        np.testing.assert_array_equal(out.value.to_host(), BATCHES[1] * 3)
        graph = CompiledGraph([])
        view = Tensor(weight.buffer, weight.shape, weight.dtype, weight.context, queue)
        out = record(graph, with_weight, view)
        graph.replay([weight])
        np.testing.assert_array_equal(out.value.to_host(), BATCHES[2] * 3)
        with pytest.raises(RuntimeError, match=r"inputs\[0\] was recorded in the memory of"):
            graph.replay([x])


@pytest.mark.parametrize("change", ["weight", "moved", "setting", "mode", "trained"])
def test_a_compiled_forward_pass_gives_todays_result_or_refuses(queue: cl.CommandQueue, change: str) -> None:
    x = to_device(queue, BATCHES[0])
    with amp.init(dtype="float32"), ag.no_grad():
        model = mlp(queue, 10, 16, 3)
        model.layers[1] = LeakyReLU(0.01)
        compiled = model.compile_forward(x)
        first = model.layers[0]
        if change in ("weight", "setting"):
            if change == "weight":
                first.weight = Parameter.from_host(queue, first.weight.to_host() * 2)
            else:
                model.layers[1].negative_slope = 0.5
            with pytest.raises(RuntimeError, match=r"has changed since it was made.*invalidate_compiled"):
                compiled(x)
            compiled = model.compile_forward(x)  # not the old one
        elif change == "moved":
            first.weight.buffer = Parameter.from_host(queue, first.weight.to_host() * 2).buffer
        elif change == "mode":
            model.train()
        else:
            first.weight.write(first.weight.to_host() * 2)
        model.eval()
        np.testing.assert_array_equal(compiled(x).to_host(), model(x).to_host())


def test_a_recording_of_one_init_is_none_of_the_next(queue: cl.CommandQueue) -> None:
    """Its dtype and its lists were the other's."""
    x = to_device(queue, BATCHES[0])
    model = mlp(queue, 10, 16, 3)
    with amp.init():
        graph = CompiledGraph([])
        record(graph, lambda x: model(ag.tensor(x)), x)
        compiled = model.compile_forward(x)
        graph.replay([x])
    with amp.init(dtype="bfloat16"):
        with pytest.raises(RuntimeError, match="AMP has been shut down since it was made"):
            graph.replay([x])
        with pytest.raises(RuntimeError, match="AMP has been shut down since it was made"):
            compiled(x)
        assert model.compile_forward(x)(x).dtype == "bfloat16"


def test_a_compiled_forward_pass_is_of_its_model_and_region(queue: cl.CommandQueue) -> None:
    """netcl's compiler knows its passes by the shape of their input alone."""
    x = to_device(queue, BATCHES[0])
    one, other = mlp(queue, 10, 16, 3), mlp(queue, 10, 8, 3)
    compiler, found = ForwardCompiler(), list[Any]()
    with ag.no_grad():
        before = compiler.compile(one, x)
        with amp.init():
            first = compiler.compile(one, x)
            assert first is not before
            assert first is compiler.compile(one, x)
            np.testing.assert_array_equal(to_numpy(first(x)), to_numpy(one(x)))
            np.testing.assert_array_equal(to_numpy(compiler.compile(other, x)(x)), to_numpy(other(x)))
            assert compiler.compile(one, x)(x).dtype == "float16"
            for _ in range(2):
                with amp.autocast(dtype="bfloat16"):
                    found.append(compiler.compile(one, x))
            assert found[0] is found[1]
            assert found[0](x).dtype == "bfloat16"
            with amp.autocast(enabled=False):
                np.testing.assert_array_equal(to_numpy(compiler.compile(one, x)(x)), to_numpy(one(x)))


@pytest.mark.parametrize("kind", ["function", "object"])
def test_a_compiled_function_sees_what_it_reads(queue: cl.CommandQueue, kind: str) -> None:
    x, model = to_device(queue, BATCHES[0]), mlp(queue, 10, 16, 3)

    class Scaled:
        def __init__(self) -> None:
            self.factor, self.calls = 1.0, 0

        def __call__(self, x: Tensor) -> Any:
            self.calls += 1
            return ag.mul(model(ag.tensor(x)), self.factor)

    scaled = Scaled()

    def function(x: Tensor) -> Any:
        return ag.mul(model(ag.tensor(x)), scaled.factor)

    run: Any = scaled if kind == "object" else function
    with amp.init(), ag.no_grad():
        compiler = ForwardCompiler()
        compiled = compiler.compile(run, x)
        np.testing.assert_array_equal(to_numpy(run(x)), to_numpy(compiled(x)))
        scaled.factor = 3.0
        with pytest.raises(RuntimeError, match="factor has changed since it was made"):
            compiled(x)
        np.testing.assert_array_equal(to_numpy(compiler.compile(run, x)(x)), to_numpy(run(x)))


@pytest.mark.parametrize("kind", ["forward", "graph", *REPLAYS])
def test_what_was_recorded_under_amp_is_refused_after_it(queue: cl.CommandQueue, kind: str) -> None:
    """Its memory, and the 16-bit copies of weights in it, are of the recording's day."""
    x, model = to_device(queue, BATCHES[0]), mlp(queue, 10, 16, 3)
    capture, graph, compiler = KernelCapture(), CompiledGraph([]), ForwardCompiler()
    with amp.init(), ag.no_grad():
        compiled = compiler.compile(model, x)
        record(graph, model, x)
        capture.begin()
        model(x)
        capture.end()
    replays: dict[str, Callable[[], Any]] = {
        "forward": lambda: compiled(x),
        "graph": lambda: graph.replay([x]),
        **{name: partial(replay, capture) for name, replay in REPLAYS.items()},
    }
    with pytest.raises(RuntimeError, match="recorded under AMP, which is shut down"):
        replays[kind]()
    compiler.invalidate()
    with ag.no_grad():
        np.testing.assert_array_equal(to_numpy(compiler.compile(model, x)(x)), to_numpy(model(x)))


@pytest.mark.parametrize("whole", [False, True], ids=["backward", "whole step"])
def test_a_bare_capture_repeats_a_pass_on_the_memory_of_the_replay(queue: cl.CommandQueue, whole: bool) -> None:
    """Where it overflows, at the first loss scales."""

    def losses(record_it: bool) -> list[Any]:
        with amp.init() as handle:
            run = Trainer(queue, handle, "sgd")
            x, y = to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])
            step = run.step if whole else run.backward
            capture, found = KernelCapture(), []
            if record_it:
                run.optimizer.zero_grad()
                capture.begin()
            loss = step(x, y)
            if record_it:
                capture.end()
            where = bridge.address_of(x.buffer)
            for number, batch in enumerate(BATCHES[1:4]):
                y.write(TARGETS[0] * 10.0 ** (number + 2))
                given = to_device(queue, batch)
                if record_it:
                    capture.replay_with_new_buffers({where[1]: given.buffer})
                else:
                    loss = step(given, y)
                grads = [param.grad.to_host() for param in run.params]
                if not whole:
                    run.optimizer.step()
                found.append([*grads, *run.result(loss)])
            assert re.search(r"[2-9] repeated", repr(handle))
            return found

    assert_same(losses(True), losses(False))


@pytest.mark.parametrize("how", REPLAYS)
def test_a_bare_capture_replays_where_a_graph_does(queue: cl.CommandQueue, how: str) -> None:
    """Not in another recording, which would keep what is decided anew in each replay; nor in another thread."""
    x, drop = to_device(queue, np.ones(64)), Dropout(0.5)
    capture, outer, said = KernelCapture(), KernelCapture(), []

    def replay() -> None:
        try:
            REPLAYS[how](capture)
        except RuntimeError as error:
            said.append(str(error))

    with init():
        capture.begin()
        drop(ag.tensor(x))
        capture.end()
        replay()
        assert not said
        outer.begin()
        replay()
        outer.end()
        in_threads(replay)
    assert [text.partition(":")[0].partition(",")[0] for text in said] == [
        "A recording was replayed while launches are being recorded",
        "a recording replays in the thread that made it",
    ]
