"""``amp.record``: every call gives what running the function gives, bit for bit, or the function runs, and says why."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial, partialmethod, reduce
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import netcl.optim.clip
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.batchnorm import BatchNorm2dModule
from netcl.nn.layers import Conv2d, Dropout, Flatten, Linear, ReLU, Sequential
from netcl.ops.elementwise import elementwise_binary
from netcl.optim import SGD, Adam, clip_grad_norm
from netcl.optim.ema import ModelEMA

from clamp import amp, session
from clamp.bridge import Node, Parameter, Tensor
from clamp.compat.oneflow import Graph
from clamp.scaling.dynamic_scale import ScaleRule
from tests.networks import batch, loss_of, mlp, scaled_backward, stepping, weights_of
from tests.ops.test_reduce import as_gpu
from tests.recordings.test_compiled import (
    BATCHES,
    OPTIMIZERS,
    TARGETS,
    Trainer,
    assert_same,
    in_threads,
    init,
    poisoned,
)  # fmt: skip
from tests.reference import to_device, to_numpy

Step = Callable[..., Any]  # of a run, and a batch


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with warnings.catch_warnings():
        # a function that is not recorded says so
        for message in (".* runs without a recording", ".* is recorded again", ".* computes something else now"):
            warnings.filterwarnings("error", message, UserWarning)
        for message in (".* not finite before this pass", ".* no optimizer steps"):  # as without recording
            warnings.filterwarnings("ignore", message, UserWarning)
        yield
    amp.shutdown()
    session.forget_patches()


class Run(Trainer):
    """A model, its optimizer and a handle, each time from the same start."""

    def __init__(
        self, queue: cl.CommandQueue, optimizer: Any = "sgd", dtype: str = "float16", model: Any = None
    ) -> None:
        amp.shutdown()
        self.queue = queue
        np.random.seed(3)
        super().__init__(queue, None, optimizer, model)
        self.handle = init(dtype)

    def backward(self, x: Tensor, y: Tensor, loss_of: Callable[..., Any] = loss_of) -> Node:
        """Runs it as it is: gradients that are there add up."""
        loss = loss_of(self.model, (x, y))
        scaled_backward(self.handle, loss, self.optimizer)
        return loss

    def infer(self, x: Tensor) -> Node:
        with ag.no_grad():
            return self.model(ag.tensor(x))

    def state(self) -> list[Any]:
        """All that a step leaves."""
        grads = [None if param.grad is None else param.grad.to_host().copy() for param in self.params]
        reports = [(report.stepped, report.reason, report.scale, report.infs) for report in self.handle.history]
        return [*weights_of(self.model), *grads, self.handle.loss_scale, reports]


def compare(
    queue: cl.CommandQueue, step: Step, calls: int = 9, recordings: int | None = 1,
    batches: list[np.ndarray] = BATCHES, between: Callable[[Run, int], Any] = lambda run, index: None,
    after: Callable[[Run, int], Any] = lambda run, index: None,
    more: Callable[[int], tuple[Any, ...]] = lambda index: (), prepare: Callable[[Run], Any] = lambda run: None,
    **how: Any,
) -> None:  # fmt: skip
    """The same calls of a function as it is, and recorded; ``between`` them something is done.

    Args:
        step: is given the run before the batch.
        after: is called after each, and what it returns is compared, too.
        more: arguments of each call beside its batch.
        prepare: is given the run before the first of them.
    """
    kept = []
    for is_recorded in (False, True):
        run = Run(queue, **how)
        prepare(run)
        call = partial(step, run)
        call = amp.record(call) if is_recorded else call
        seen = []
        np.random.seed(7)
        for index in range(calls):
            between(run, index)
            x = batches[index % 12]
            loss = call(to_device(queue, x), to_device(queue, TARGETS[index % 12][: len(x)]), *more(index))
            done = after(run, index)
            junk = [Tensor.from_shape(queue, (size,), fill=7.0) for size in (36, 160, 48, 3, 16, 1) * 2]
            del junk
            seen.append([None if loss is None else loss.value.to_host().copy(), done, *run.state()])
        kept.append(seen)
        if is_recorded and recordings is not None:
            assert call.recordings == recordings
    assert_same(kept[1], kept[0])


def same_as_eager(play: Callable[[Callable[[Step], Any]], Any]) -> None:
    """What ``play`` returns is the same with ``amp.record`` as with what leaves a function as it is."""
    assert_same(play(amp.record), play(lambda function: function))


# ---------------------------------------------------------------------------------------------- whole steps


def clears_first(
    run: Run, x: Tensor, y: Tensor, loss_of: Callable[..., Any] = loss_of, before_step: Callable[[], Any] = int
) -> Node:
    run.optimizer.zero_grad()
    loss = run.backward(x, y, loss_of)
    before_step()
    run.optimizer.step()
    return loss


def clears_last(run: Run, x: Tensor, y: Tensor) -> Node:
    loss = run.backward(x, y)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def steps_first(run: Run, x: Tensor, y: Tensor) -> Node:
    run.optimizer.step()
    run.optimizer.zero_grad()
    return run.backward(x, y)


@pytest.mark.parametrize("step", [clears_first, clears_last, steps_first])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_step_trains_as_eager(queue: cl.CommandQueue, step: Step, optimizer: str, dtype: str) -> None:
    """With overflows before, in and after the recording; gradients, scale and history as well."""
    batches = poisoned(BATCHES, 1, 5)
    compare(queue, step, 11, batches=batches, optimizer=OPTIMIZERS[optimizer], dtype=dtype)


def test_a_step_replays_where_a_driver_makes_no_copies_of_kernels(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cl.Kernel, "clone", Mock(side_effect=cl.LogicError("clCloneKernel", cl.status_code.INVALID_OPERATION))
    )
    compare(queue, clears_first)


@pytest.mark.parametrize("clip", ["clip_grad_norm", "clip_grad_norm_device"])
def test_clipping_is_that_of_the_day(queue: cl.CommandQueue, clip: str) -> None:
    clip_once(queue)

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        return clears_first(run, x, y, before_step=lambda: getattr(netcl.optim.clip, clip)(run.params, 0.05))

    compare(queue, step, batches=poisoned(BATCHES, 5))


def test_a_pass_in_which_the_recording_is_given_up_is_repeated(queue: cl.CommandQueue) -> None:
    """The launches of its backward are gone, its graph is not."""

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        run.optimizer.zero_grad()
        loss = loss_of(run.model, (x, y))
        with run.handle.scale_loss(loss, run.optimizer) as scaled_loss:
            scaled_loss.backward()
            loss.value.to_host()
        run.optimizer.step()
        return loss

    large = [x * np.float32(3000 if index == 2 else 1) for index, x in enumerate(BATCHES)]
    with pytest.warns(UserWarning, match="runs without a recording"):
        compare(
            queue, step, 5, recordings=0, batches=large, after=lambda run, index: run.handle.last_step.repeats,
            optimizer=lambda params: SGD(params, lr=1e-7),
        )  # fmt: skip


@pytest.mark.parametrize("passes", [1, 2])
def test_what_is_computed_between_a_pass_that_is_repeated_and_the_step_stays(
    queue: cl.CommandQueue, passes: int
) -> None:
    """It has memory of the pass, whose launches are repeated before that. Two passes come in every other call."""

    def keep_the_scale(run: Run) -> None:
        run.handle.scalers[0].rule = ScaleRule()  # it does not move in a call that is not repeated

    def step(run: Run, x: Tensor, y: Tensor, times: int) -> Node:
        run.optimizer.zero_grad()
        for _ in range(times):
            run.backward(x, y)
            doubled = elementwise_binary(x, x, expression="v0 + v1")
        run.optimizer.step()
        return ag.tensor(doubled)

    large = [x * np.float32(1000 if index in (7, 9, 11) else 1) for index, x in enumerate(BATCHES)]
    compare(
        queue, step, 12, recordings=None, batches=large, optimizer=lambda params: SGD(params, lr=1e-6),
        model=lambda queue: mlp(queue, 10, 64, 64, 64, 3), more=lambda index: (passes if index % 2 else 1,),
        prepare=keep_the_scale,
    )  # fmt: skip


def clip_once(queue: cl.CommandQueue) -> None:
    """netcl keeps the kernels of its first clipping, a change on the host, after which a function runs once more."""
    run = Run(queue)
    run.backward(to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0]))
    clip_grad_norm(run.params, 0.05)
    run.handle.shutdown()


def test_a_norm_may_be_returned_and_not_used(queue: cl.CommandQueue) -> None:
    clip_once(queue)

    def norms(record: Callable[[Step], Any]) -> list[Any]:
        run = Run(queue)

        @record
        def step(x: Tensor, y: Tensor) -> Any:
            run.optimizer.zero_grad()
            run.backward(x, y)
            return {"norm": clip_grad_norm(run.params, 0.05), "none": None}

        found = [step(to_device(queue, BATCHES[i]), to_device(queue, TARGETS[i]))["norm"] for i in range(5)]
        assert len(set(found)) == 5
        return found

    same_as_eager(norms)
    run = Run(queue)

    @amp.record
    def uses(x: Tensor, y: Tensor) -> Any:
        run.optimizer.zero_grad()
        loss = run.backward(x, y)
        return loss if clip_grad_norm(run.params, 0.05) > 1e9 else None

    def thrice() -> None:
        for index in range(3):
            uses(to_device(queue, BATCHES[index]), to_device(queue, TARGETS[index]))

    with pytest.warns(UserWarning, match="The norm that clip_grad_norm returned was used"):
        thrice()


@pytest.mark.parametrize("late", [False, True], ids=["python counts", "an argument says"])
def test_gradients_add_up_over_calls(queue: cl.CommandQueue, late: bool) -> None:
    """Three passes a step: the gradients of earlier calls, there or not, are those of the day."""

    def end(run: Run, is_last: bool) -> None:
        if is_last:
            run.optimizer.step()
            run.optimizer.zero_grad()

    def micro(run: Run, x: Tensor, y: Tensor, last: bool) -> Node:
        loss = run.backward(x, y)
        end(run, last)
        return loss

    compare(
        queue, micro, 20, recordings=2 if late else 3, batches=poisoned(BATCHES, 4),
        after=lambda run, index: end(run, late and index % 3 == 2),
        more=lambda index: (index % 3 == 2 and not late,),
    )  # fmt: skip


def test_gradients_that_a_user_keeps_or_changes_are_the_users(queue: cl.CommandQueue) -> None:
    mine: dict[Run, list[Tensor]] = {}

    def after(run: Run, index: int) -> list[Any]:
        kept = mine.setdefault(run, [])
        kept += [param.grad for param in run.params]
        run.params[0].grad = None
        run.params[1].grad.write(np.full(16, index, np.float32))
        return [grad.to_host().copy() for grad in kept]

    compare(queue, clears_first, 8, recordings=None, after=after)


@pytest.mark.parametrize("how", ["written", "by hand", "inf"])
def test_gradients_from_elsewhere_are_met_as_they_are(queue: cl.CommandQueue, how: str) -> None:
    """A gradient that a user has put or written there before a call that adds to it, and steps."""

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        loss = run.backward(x, y)
        run.optimizer.step()
        return loss

    def between(run: Run, index: int) -> None:
        if index % 4 == 3:
            if how == "by hand":
                run.params[0].grad = to_device(queue, np.ones((10, 16), np.float32))
            else:
                run.params[0].grad.write(np.full((10, 16), np.inf if how == "inf" else 2.0, np.float32))
        if index % 4 == 1:
            run.optimizer.zero_grad()

    compare(queue, step, 17, recordings=None, between=between)


@pytest.mark.parametrize("wrapped", [1, 2])
def test_wrapped_optimizers_count_their_losses(queue: cl.CommandQueue, wrapped: int) -> None:
    def wrap(run: Run) -> None:
        run.wrapped = run.handle.wrap_optimizer(run.optimizer, num_loss=wrapped)

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        run.wrapped.zero_grad()
        for _ in range(wrapped):
            loss = loss_of(run.model, (x, y))
            with run.wrapped.scale_loss(loss) as scaled_loss:
                scaled_loss.backward()
        run.wrapped.step()
        return loss

    compare(queue, step, batches=poisoned(BATCHES, 4), prepare=wrap)


def test_averages_of_the_weights_are_recorded(queue: cl.CommandQueue) -> None:
    def average(run: Run) -> None:
        run.average = ModelEMA(run.model, decay=0.9)

    def step(run: Run, x: Tensor, y: Tensor) -> None:
        clears_first(run, x, y)
        run.average.update()

    def after(run: Run, index: int) -> list[Any]:
        return [*(shadow.to_host().copy() for shadow in run.average.shadow), run.average.step_count]

    compare(queue, step, 7, recordings=None, after=after, prepare=average)


# ---------------------------------------------------------------------------------------------- what changes


def test_learning_rates_and_modes_of_the_day(queue: cl.CommandQueue) -> None:
    def model(queue: cl.CommandQueue) -> Any:
        return Sequential(Linear(queue, 10, 16), ReLU(), Dropout(0.5), Linear(queue, 16, 3))

    def between(run: Run, index: int) -> None:
        run.optimizer.lr = 0.05 / (index + 1)
        (run.model.eval if index in (4, 5, 6, 9) else run.model.train)()

    compare(queue, clears_first, 12, recordings=2, model=model, between=between)


def test_batch_norms_statistics_move_in_replays(queue: cl.CommandQueue) -> None:
    def run(record: Callable[[Step], Any]) -> list[Any]:
        np.random.seed(0)
        norm = BatchNorm2dModule(queue=queue, num_features=4)
        model = Sequential(Conv2d(queue, 1, 4, 3, pad=1), norm, Flatten(), Linear(queue, 4 * 36, 3))
        model.train()
        optimizer = SGD(model.parameters(), lr=0.01)
        with amp.init() as handle:
            train = stepping(handle, model, optimizer)
            step = record(lambda x, y: train(Tensor.from_host(queue, x), Tensor.from_host(queue, y)))
            for seed in range(7):
                x = np.random.default_rng(seed).standard_normal((5, 1, 6, 6)).astype(np.float32)
                step(x, TARGETS[seed][:5])
            assert getattr(step, "recordings", 1) == 1
        return [*weights_of(model), norm.running_mean.to_host().copy(), norm.running_var.to_host().copy()]

    same_as_eager(run)


def test_a_ragged_last_batch_has_a_recording_of_its_own(queue: cl.CommandQueue) -> None:
    batches = [batch if index % 3 < 2 else batch[:5] for index, batch in enumerate(BATCHES)]
    compare(queue, clears_last, 12, recordings=2, batches=batches)


@pytest.mark.parametrize("change", ["frozen", "replaced", "written", "another handle", "group", "gradients cleared"])
def test_what_changes_between_calls_is_seen(queue: cl.CommandQueue, change: str) -> None:
    def between(run: Run, index: int) -> None:
        if index != 5:
            return
        if change == "frozen":
            run.params[0]._frozen = True
        elif change == "replaced":
            run.params[0] = run.optimizer.params[0] = run.model.layers[0].weight = Parameter.from_host(
                queue, np.ones((10, 16), np.float32)
            )
        elif change == "written":
            run.params[0].write(np.ones((10, 16), np.float32))
        elif change == "another handle":
            run.handle.shutdown()
            run.handle = amp.init(dtype="bfloat16")
        elif change == "group":
            run.optimizer.params = run.optimizer.params[1:]
        else:
            run.optimizer.zero_grad()

    if change != "group":
        compare(queue, clears_first, 11, recordings=None, between=between)
        return
    with pytest.warns(UserWarning, match="Clear gradients at the beginning"):
        # Nobody clears those of the one that left.
        compare(queue, clears_first, 11, recordings=None, between=between)


def test_a_checkpoint_loaded_between_calls_is_continued(queue: cl.CommandQueue, tmp_path: Any) -> None:
    def between(run: Run, index: int) -> None:
        if index == 3:
            amp.save_checkpoint(tmp_path / "run.npz", run.model, run.optimizer)
        if index == 7:
            amp.load_checkpoint(tmp_path / "run.npz", run.model, run.optimizer)

    compare(queue, clears_last, 11, recordings=None, between=between, optimizer=OPTIMIZERS["adam"])


def test_without_a_handle_and_after_one(queue: cl.CommandQueue) -> None:
    def run(record: Callable[[Step], Any]) -> list[Any]:
        model = mlp(queue, 10, 16, 3)
        optimizer = SGD(model.parameters(), lr=0.01)

        @record
        def step(x: Tensor, y: Tensor) -> Node:
            optimizer.zero_grad()
            loss = loss_of(model, (x, y))
            ag.Tape().backward(loss)
            optimizer.step()
            return loss

        for turn in range(3):
            if turn == 1:
                amp.init(dtype="float32")
            else:
                session.ensure_patched()  # as amp.record does: netcl's own defects are mended for both
            for index in range(4):
                step(to_device(queue, BATCHES[index]), to_device(queue, TARGETS[index]))
            amp.shutdown()
        return weights_of(model)

    amp.shutdown()
    same_as_eager(run)


# ---------------------------------------------------------------------------------------------- arguments, results


def test_arguments_nest_and_arrays_are_brought_to_the_device(queue: cl.CommandQueue) -> None:
    run = Run(queue)

    @amp.record
    def outputs(batch: dict[str, Any], *, factor: float = 1.0) -> Any:
        x, rest = batch["x"], batch["rest"]
        if not isinstance(x, np.ndarray) or x.shape != (12, 10) or x.dtype != np.float32:
            raise TypeError("an array passes for one")
        with ag.no_grad():
            y = ag.mul(run.model(ag.tensor(Tensor.from_host(queue, x))), factor)
            return (y, {"sum": ag.sum(y), "same": rest[0], "doubled": ag.mul(rest[0], 2.0)}), None

    for turn in range(8):
        x, given = BATCHES[turn], to_device(queue, TARGETS[turn])
        factor = 1.0 if turn % 2 else 2.0
        result = outputs({"x": x, "rest": [given]}, factor=factor)
        (y, more), none = result
        with ag.no_grad():
            expected = ag.mul(run.model(ag.tensor(to_device(queue, x))), factor)
        np.testing.assert_array_equal(y.value.to_host(), expected.value.to_host())
        np.testing.assert_array_equal(more["sum"].value.to_host(), ag.sum(expected).value.to_host())
        np.testing.assert_array_equal(more["doubled"].value.to_host(), TARGETS[turn] * 2)
        assert more["same"] is given
        assert none is None
    assert outputs.recordings == 2


def test_results_are_the_users_to_keep(queue: cl.CommandQueue) -> None:
    run = Run(queue)
    step = amp.record(partial(clears_first, run))
    x, y = to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])
    losses = [step(x, y) for _ in range(8)]
    values = [float(loss.value.to_host()[0]) for loss in losses]
    assert len(set(values)) == 8 or values == sorted(values, reverse=True)
    again = Run(queue)
    assert values == [float(clears_first(again, x, y).value.to_host()[0]) for _ in range(8)]
    with pytest.raises(RuntimeError, match="no graph"):
        losses[-1].backward()


def test_methods_and_decorators(queue: cl.CommandQueue) -> None:
    class Trainer:
        def __init__(self, seed: int) -> None:
            self.model = mlp(queue, 10, 16, 3, seed=seed)

        @amp.record
        def infer(self, x: Tensor) -> Tensor:
            """Its output."""
            with ag.no_grad():
                return self.model(ag.tensor(x))

    assert Trainer.infer.__doc__ == "Its output."
    trainers = [Trainer(0), Trainer(1)]
    amp.init()
    for index in range(4):
        x = to_device(queue, BATCHES[index])
        for trainer in trainers:
            expected = Trainer.infer.__wrapped__(trainer, x).value.to_host()
            np.testing.assert_array_equal(trainer.infer(x).value.to_host(), expected)
    assert [trainer.infer.recordings for trainer in trainers] == [1, 1]
    gone = weakref.ref(trainers[0].model)
    del trainers, trainer
    gc.collect()
    assert gone() is None
    with pytest.raises(TypeError, match="takes a function"):
        amp.record(3)  # type: ignore[arg-type]


def test_a_comparison_casts_the_weights_together_that_the_recording_did(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, whose launches are as large as what they cast: two models' weights, asked for after one another."""
    as_gpu(monkeypatch, queue, "TREE")
    models = [mlp(queue, 10, 16, 3, seed=seed) for seed in (0, 1)]

    def output(model: Any, x: Tensor) -> Node:
        with ag.no_grad():
            return model(ag.tensor(x))

    recorded = [amp.record(partial(output, model)) for model in models]
    with amp.init():
        for batch in BATCHES[:4]:
            x = to_device(queue, batch)
            for model, step in zip(models, recorded, strict=True):
                expected = output(model, x).value.to_host()
                np.testing.assert_array_equal(step(x).value.to_host(), expected)
        assert [step.recordings for step in recorded] == [1, 1]


def scaled(x: Tensor, factor: float) -> Node:
    return ag.mul(ag.tensor(x), factor)


class Scales:
    factor = 2.0

    def plain(self, x: Tensor) -> Node:
        return scaled(x, self.factor)

    method = amp.record(plain)
    of_the_class = classmethod(amp.record(lambda cls, x: scaled(x, cls.factor)))
    below, above = amp.record(staticmethod(scaled)), staticmethod(amp.record(scaled))
    given = amp.record(partial(scaled, factor=3.0))
    named = partialmethod(amp.record(lambda self, x, factor: scaled(x, factor * self.factor)), factor=5.0)


class Scaled(Scales):
    factor = 7.0

    @amp.record
    def method(self, x: Tensor) -> Node:
        return ag.add(super().method(x), 100.0)


WAYS = {
    "method": [2.0, 107.0], "of_the_class": [2.0, 7.0], "below": [4.0, 4.0], "above": [4.0, 4.0], "given": [3.0, 3.0],
    "named": [10.0, 35.0],
}  # fmt: skip
if sys.version_info >= (3, 13):  # a partial warns that it will be a method, and is one in 3.14: x is the object then
    del WAYS["given"]


@pytest.mark.parametrize("name", WAYS)
def test_whatever_a_class_makes_of_a_recorded_function_it_is_that(queue: cl.CommandQueue, name: str) -> None:
    x, more = to_device(queue, np.ones(3)), (4.0,) if name in ("below", "above") else ()
    with amp.init(dtype="float32"), ag.no_grad():
        objects = Scales(), Scaled()
        for _ in range(4):
            assert [to_numpy(getattr(each, name)(x, *more).value)[0] for each in objects] == WAYS[name]
        if name == "method":
            assert to_numpy(super(Scaled, objects[1]).method(x).value)[0] == 7.0


def test_functions_of_one_name_have_recordings_each(queue: cl.CommandQueue) -> None:
    class Lambdas:
        one, other = (amp.record(lambda self, x, factor=factor: scaled(x, factor)) for factor in (2.0, 3.0))

    each, x = Lambdas(), to_device(queue, np.ones(3))
    with amp.init(dtype="float32"), ag.no_grad():
        for _ in range(4):
            assert [to_numpy(call(x).value)[0] for call in (each.one, each.other)] == [2.0, 3.0]
    assert (each.one.recordings, each.other.recordings) == (1, 1)


def test_an_object_without_a_dict_has_methods_too(queue: cl.CommandQueue) -> None:
    class Lean:
        __slots__ = ("factor",)

        @amp.record
        def method(self, x: Tensor) -> Node:
            return scaled(x, self.factor)

    lean, x = Lean(), to_device(queue, np.ones(3))
    with amp.init(dtype="float32"), ag.no_grad():
        for factor in (2.0, 2.0, 2.0, 3.0):
            lean.factor = factor
            assert to_numpy(lean.method(x).value)[0] == factor


@amp.record
def doubled(x: Tensor) -> Node:
    return ag.mul(ag.tensor(x), 2.0)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_computes_what_it_is_a_copy_of(queue: cl.CommandQueue, how: Callable[[Any], Any]) -> None:
    class Scales:
        def __init__(self) -> None:
            self.factor = 2.0
            self.recorded = amp.record(self._scaled)

        def _scaled(self, x: Tensor) -> Node:
            return ag.mul(ag.tensor(x), self.factor)

        @amp.record
        def method(self, x: Tensor) -> Node:
            return self._scaled(x)

    class Builds(Graph):
        def build(self, x: Node) -> Node:
            return x

    x = to_device(queue, np.ones(3))
    with amp.init(dtype="float32"), ag.no_grad():
        assert how(doubled) is doubled
        with pytest.raises(TypeError, match="Builds, a Graph, cannot be copied or pickled"):
            how(Builds())
        if how not in (copy.copy, copy.deepcopy):  # a class in a function has no pickle
            return
        first = Scales()
        for _ in range(3):
            first.recorded(x), first.method(x)
        second = how(first)
        second.factor = 5.0
        for _ in range(3):
            found = [to_numpy(call(x).value)[0] for call in (second.recorded, second.method)]
            # A shallow one has what its first was given, a method of that.
            assert found == [5.0 if how is copy.deepcopy else 2.0, 5.0]
            assert [to_numpy(call(x).value)[0] for call in (first.recorded, first.method)] == [2.0, 2.0]


def test_a_recorded_function_in_another_is_a_part_of_it(queue: cl.CommandQueue) -> None:
    records: list[Any] = [amp.record, lambda function: function]

    def forwards(run: Run) -> None:
        run.forward = records.pop()(lambda x, y: loss_of(run.model, (x, y)))

    def step(run: Run, x: Tensor, y: Tensor) -> Node:
        return clears_first(run, x, y, lambda model, data: run.forward(*data))

    compare(queue, step, prepare=forwards)


def test_threads_have_recordings_of_their_own(queue: cl.CommandQueue) -> None:
    infer, x = amp.record(Run(queue).infer), to_device(queue, BATCHES[0])
    expected = infer(x).value.to_host()
    found: list[Any] = []
    together = threading.Barrier(3)  # a thread may get the number of one that has ended, and with it its recordings

    def work() -> None:
        together.wait()
        for _ in range(5):
            found.append(infer(x).value.to_host().copy())

    in_threads(work, work, work)
    assert len(found) == 15
    assert infer.recordings == 3  # this one has run it once
    for one in found:
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize(("owner", "name"), [(cl.Kernel, "__call__"), (cl, "enqueue_nd_range_kernel")])
@pytest.mark.usefixtures("uncompared")
def test_who_watches_launches_sees_all_of_a_replay_and_none_later(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    run, seen = Run(queue), list[Any]()
    step, batch = amp.record(partial(clears_first, run)), [to_device(queue, x) for x in (BATCHES[0], TARGETS[0])]
    original = getattr(owner, name)

    def watcher(*args: Any) -> Any:
        seen.append(args)
        return original(*args)

    def launches_of(call: Callable[..., Any]) -> int:
        seen.clear()
        call(*batch)
        return len(seen)

    for _ in range(3):  # runs, runs with the optimizer's state, is recorded
        step(*batch)
    with monkeypatch.context() as watching:
        watching.setattr(owner, name, watcher)
        first = launches_of(step)  # the first replay prepares its launches
        assert launches_of(step) == first > 5
    assert launches_of(step) == 0
    with monkeypatch.context() as watching:
        watching.setattr(owner, name, watcher)
        assert launches_of(step) == first
    assert step.recordings == 1


def test_two_functions_share_a_model(queue: cl.CommandQueue) -> None:
    records: list[Any] = [amp.record, lambda function: function]

    def evaluates(run: Run) -> None:
        run.evaluate = records.pop()(run.infer)

    def after(run: Run, index: int) -> Any:
        return run.evaluate(to_device(queue, BATCHES[0])).value.to_host().copy()

    compare(queue, clears_first, 8, recordings=None, after=after, prepare=evaluates)


def test_an_exception_leaves_what_it_leaves_without_recording(queue: cl.CommandQueue) -> None:
    """In the recorded call, and in a replay, where only a host step can raise."""
    run = Run(queue)
    step = amp.record(partial(clears_first, run))
    x, y = to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])
    with pytest.raises(ValueError, match="shape"):
        step(x, to_device(queue, TARGETS[0][:5]))
    for _ in range(4):
        step(x, y)
    run.handle.max_skips = run.handle._scaling.guards.max_skips_at_floor = 1
    amp.load_state_dict({key: {**state, "loss_scale": 2.0**-14} for key, state in amp.state_dict().items()})
    with pytest.raises(FloatingPointError, match="steps in a row"):
        step(to_device(queue, poisoned(BATCHES, 0)[0]), y)
    kept = [param.grad for param in run.params]
    values = [grad.to_host().copy() for grad in kept]
    assert not all(np.isfinite(value).all() for value in values)
    run.handle._scaling.guards.max_skips_at_floor = 25
    step(x, y)
    assert_same([grad.to_host() for grad in kept], values)


# ---------------------------------------------------------------------------------------------- what cannot be


def asks_the_handle(run: Run, x: Tensor, y: Tensor) -> Any:
    loss = clears_first(run, x, y)
    return None if run.handle.last_step.stepped else loss


def schedules(run: Run, x: Tensor, y: Tensor) -> Any:
    loss = clears_first(run, x, y)
    run.optimizer.lr *= 0.9
    return loss


#: what a function does beside its step, and what is said of it
CURES: dict[str, tuple[Step, str]] = {
    "reads": (lambda run, x, y: float(clears_first(run, x, y).value.to_host()[0]), "Read it after the recorded part"),
    "uploads": (
        lambda run, x, y: clears_first(run, Tensor.from_host(run.queue, np.ones((12, 10), np.float32)), y),
        "Pass data that changes as an input tensor",
    ),
    "counts": (lambda run, x, y: (run.done.append(1), clears_first(run, x, y))[1], r"changes len\(\S*\.done\) itself"),
    "draws": (
        lambda run, x, y: clears_first(run, ag.mul(x, float(run.generator.random())), y),
        r"changes \S*\.generator itself",
    ),
    "draws globally": (
        lambda run, x, y: clears_first(run, ag.mul(x, float(np.random.rand())), y),
        r"changes numpy\.random itself",
    ),
    "schedules": (schedules, r"changes \S*optimizer\.lr itself"),
    "asks the handle": (asks_the_handle, "handle.last_step"),
    "reports": (lambda run, x, y: (clears_first(run, x, y), object())[1], "returns a object"),
    "times": (lambda run, x, y: (clears_first(run, x, y), time.perf_counter()), r"perf_counter\(\) was called"),
}


@pytest.mark.parametrize("bad", CURES)
def test_what_no_replay_can_do_runs_once_in_each_call_and_says_why(queue: cl.CommandQueue, bad: str) -> None:
    """The call that was being recorded goes on where it is: nothing is done twice."""
    kept = []
    x, y = to_device(queue, BATCHES[0]), to_device(queue, TARGETS[0])
    for recorded in (False, True):
        run = Run(queue)
        np.random.seed(1)
        run.done, run.generator = [], np.random.default_rng(0)
        function = partial(CURES[bad][0], run)
        call = amp.record(function) if recorded else function
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(6):
                call(x, y)
        kept.append(run.state())
        if recorded:
            said = [one for one in said if "runs without a recording" in str(one.message)]
            assert call.recordings == 0
            assert len(said) == 1
            assert said[0].filename == __file__
            with pytest.warns(UserWarning, match=CURES[bad][1]):
                warnings.warn(said[0].message, stacklevel=1)
    assert_same(kept[1], kept[0])


def test_the_content_of_an_array_is_not_looked_at(queue: cl.CommandQueue) -> None:
    run = Run(queue)

    @amp.record
    def normalized(x: np.ndarray) -> Any:
        with ag.no_grad():
            return ag.mul(run.model(ag.tensor(Tensor.from_host(queue, x))), 1 / float(x.max()))

    expected = []
    for index in range(4):
        expected.append(normalized.__wrapped__(BATCHES[index]).value.to_host())
    normalized(BATCHES[0])
    with pytest.warns(UserWarning, match="The content of an array among the arguments was used"):
        got = normalized(BATCHES[1])
    np.testing.assert_array_equal(got.value.to_host(), expected[1])
    np.testing.assert_array_equal(normalized(BATCHES[2]).value.to_host(), expected[2])
    assert normalized.recordings == 0


def test_data_on_the_numpy_backend_and_graphs_from_outside_run(queue: cl.CommandQueue) -> None:
    run = Run(queue)

    @amp.record
    def double(x: Node) -> Any:
        return ag.mul(x, 2.0)

    outer = run.model(ag.tensor(to_device(queue, BATCHES[0])))
    with pytest.warns(UserWarning, match="computed outside"):
        double(outer)


@pytest.mark.parametrize("order", ["in turn", "at random"])
def test_what_is_not_worth_recording_is_recorded_no_more(queue: cl.CommandQueue, order: str) -> None:
    """More batch sizes than recordings are kept: once it is said that the function runs as it is, it does."""
    draw = np.random.default_rng(3)
    sizes = [1 + (number % 60 if order == "in turn" else int(draw.integers(60))) for number in range(400)]
    amp.init(dtype="float32")

    @amp.record
    def double(x: Tensor) -> Node:
        with ag.no_grad():
            return ag.mul(ag.tensor(x), 2.0)

    inputs = {size: to_device(queue, np.full(size, size)) for size in range(1, 61)}
    made = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for size in sizes:
            np.testing.assert_array_equal(double(inputs[size]).value.to_host(), np.full(size, 2 * size))
            made += [double._variants._made] if said else []
    assert ["is recorded again and again" in str(one.message) for one in said] == [True]
    assert "args[0] is another object, or has another shape" in str(said[0].message)
    assert len(made) > 200
    assert made[0] == made[-1] < 100


@pytest.mark.parametrize("calls", [1, 3, 5])
@pytest.mark.parametrize("held", ["alone", "in a dict", "method"])
def test_backward_through_results_is_as_without_recording_or_refused(
    queue: cl.CommandQueue, held: str, calls: int
) -> None:
    """What ran has its graph, and once that is used the function runs as it is; recorded calls have none to give."""
    x, y = batch(queue, 8, 16, 3)

    class Net:
        def __init__(self) -> None:
            self.body, self.head = mlp(queue, 16, 8, seed=1), mlp(queue, 8, 3, seed=2)
            self.optimizer = SGD([*self.body.parameters(), *self.head.parameters()], lr=0.5)

        def features(self, x: Tensor) -> Any:
            found = self.body(ag.tensor(x))
            return {"found": found} if held == "in a dict" else found

        @amp.record
        def recorded(self, x: Tensor) -> Any:
            return self.features(x)

        @property
        def weights(self) -> list[np.ndarray]:
            return weights_of(self.body) + weights_of(self.head)

    def train(net: Net, features: Any, calls: int) -> None:
        for _ in range(calls):
            found = features(x)
        head = net.head(found["found"] if held == "in a dict" else found)
        scaled_backward(handle, ag.mul(ag.mse_loss(head, ag.tensor(y)), 2.0**-6), net.optimizer)
        net.optimizer.step()

    with amp.init(loss_scale=2.0**8) as handle:
        net, eager = Net(), Net()
        recorded = net.recorded if held == "method" else amp.record(net.features)
        if calls > 1:
            before = net.weights
            with pytest.raises(RuntimeError, match=r"the result of a recorded function.* ag\.tensor\(node\.value\)"):
                train(net, recorded, calls)
            assert_same(net.weights, before)
            return
        with pytest.warns(UserWarning, match="runs without a recording.*: backward runs through what it returns"):
            train(net, recorded, 1)
        train(eager, eager.features, 1)
        for calls in (3, 1):
            train(net, recorded, calls)
            train(eager, eager.features, calls)
        assert recorded.recordings == 0
        assert_same(net.weights, eager.weights)


@pytest.mark.parametrize("calls", [2, 5])
def test_several_results_are_trained_by_one_backward(queue: cl.CommandQueue, calls: int) -> None:
    """The real and the fake, the parts of a batch: none of them is recorded as long as the first is held."""
    batches = [batch(queue, 4, 10, 3, seed=seed) for seed in range(calls)]

    def trained(record: Callable[[Step], Any]) -> list[Any]:
        run = Run(queue)
        forward = record(lambda x: run.model(ag.tensor(x)))
        for _ in range(2):
            found = [forward(x) for x, _ in batches]
            losses = [ag.mse_loss(each, ag.tensor(y)) for each, (_, y) in zip(found, batches, strict=True)]
            scaled_backward(run.handle, ag.mul(reduce(ag.add, losses), 2.0**-10), run.optimizer)
            run.optimizer.step()
        return run.state()

    with pytest.warns(UserWarning, match="runs without a recording.*: backward runs through what it returns"):
        same_as_eager(trained)


def test_results_that_are_held_and_not_trained_are_waited_for_a_while(queue: cl.CommandQueue) -> None:
    run, (x, _) = Run(queue), batch(queue, 4, 10, 3)
    forward = amp.record(lambda x: run.model(ag.tensor(x)))
    held = [forward(x) for _ in range(20)]
    assert forward.recordings == 1
    with pytest.raises(RuntimeError, match=r"the loss has no graph.*what a recorded function returned"):
        ag.sum(held[-1]).backward()
    dropping = amp.record(lambda x: run.model(ag.tensor(x)))
    for _ in range(3):
        result = dropping(x)
    assert (dropping.recordings, result.parents) == (1, [])


@pytest.mark.parametrize("features", ["of a user's op", "of trained weights, on a tape of its own"])
def test_results_train_what_they_were_computed_from_or_nothing(queue: cl.CommandQueue, features: str) -> None:
    weight, head = (Parameter.from_host(queue, np.ones((2, 2), np.float32)) for _ in range(2))
    optimizer = SGD([weight, head], lr=0.5)

    @amp.record
    def call(x: Tensor) -> Any:
        if features == "of a user's op":  # netcl gives it a graph, whether anything is trained or not
            return ag.apply_op(lambda t: t, lambda grad: [grad], ag.tensor(x))
        with ag.Tape():
            return ag.matmul_op(ag.tensor(x), ag.tensor(weight))

    def train() -> None:
        scaled_backward(handle, ag.sum(ag.matmul_op(call(x), ag.tensor(head))), optimizer)
        optimizer.step()

    x = to_device(queue, np.ones((2, 2)))
    with amp.init(loss_scale=1.0) as handle:
        if features == "of a user's op":
            for _ in range(4):
                train()
            assert call.recordings == 1
            return
        for _ in range(2):
            with pytest.warns(UserWarning, match="the tape that recorded it is gone"):
                train()
        with pytest.raises(RuntimeError, match="the result of a recorded function"):
            train()


def test_a_kept_result_of_the_first_call_holds_nobody(queue: cl.CommandQueue) -> None:
    class Net:
        def __init__(self) -> None:
            self.model = mlp(queue, 4, 3)

        @amp.record
        def forward(self, x: Tensor) -> Any:
            return self.model(ag.tensor(x))

    with amp.init():
        net = Net()
        net.last = net.forward(to_device(queue, np.ones((2, 4))))  # type: ignore[attr-defined]
        gone = weakref.ref(net)
        del net
        gc.collect()
        assert gone() is None


def test_results_of_recorded_calls_have_no_graph(queue: cl.CommandQueue) -> None:
    weight = Parameter.from_host(queue, np.ones((2, 2), np.float32))

    @amp.record
    def call(x: Tensor) -> Any:
        product = ag.matmul_op(ag.tensor(x), ag.tensor(weight, requires_grad=True))
        return [product, {"again": product, "number": 3, "leaf": ag.tensor(x)}]

    with amp.init():
        for number in range(4):
            product = rest = None
            product, rest = call(to_device(queue, np.ones((2, 2))))
            for node in (product, rest["again"]) if number else ():
                assert not node.parents
                with pytest.raises(RuntimeError, match="graph"):
                    ag.sum(node).backward()
            np.testing.assert_array_equal(to_numpy(product.value), np.full((2, 2), 2.0))
            assert rest["number"] == 3


class Counting(Adam):
    """Keeps a list of its steps."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.steps: list[int] = []

    def step(self) -> None:
        super().step()
        self.steps.append(self.t)


def test_counts_that_replays_raise_themselves_do_not_end_them(queue: cl.CommandQueue) -> None:
    """Those of the average, of a user's optimizer and, since the function names an attribute ``t``, of Adam, with two
    sizes of batches."""
    batches = [batch(queue, rows, 8, 4) for rows in (8, 5)]
    schedule = SimpleNamespace(t=1.0)

    def train(recorded: bool) -> tuple[list[Any], int, int]:
        model = mlp(queue, 8, 16, 4)
        optimizer, average = Counting(model.parameters(), lr=1e-2), ModelEMA(model, decay=0.9)

        def step(x: Tensor, y: Tensor) -> Node:
            optimizer.zero_grad()
            loss = ag.mul(loss_of(model, (x, y)), schedule.t)
            scaled_backward(handle, loss, optimizer)
            optimizer.step()
            average.update()
            return loss

        call = amp.record(step) if recorded else step
        with amp.init(dtype="float32") as handle:
            for number in range(24):
                call(*batches[number % 2])
        made = call._variants._made if recorded else 0
        return [x.to_host() for x in [*model.parameters(), *average.shadow]], made, optimizer.t

    plain, _, count = train(recorded=False)
    replayed, made, counted = train(recorded=True)
    assert_same(plain, replayed)
    assert (made, counted) == (2, count)


READS: dict[str, Callable[[Any, Any], int]] = {
    "t": lambda optimizer, _: optimizer.t,
    "a computed name": lambda optimizer, _: getattr(optimizer, chr(116)),
    "its dict": lambda optimizer, _: vars(optimizer)["t"],
    "a list of its own": lambda optimizer, _: len(optimizer.steps),
    "the count of an average": lambda _, average: average.step_count,
    "a method of an average": lambda _, average: int(2 / average.current_decay()),
}


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_a_count_that_steps_raise_is_never_replayed(queue: cl.CommandQueue, read: Callable[[Any, Any], int]) -> None:
    """The factor is another one in one of ten calls, which is not compared."""
    data = batch(queue, 3, 4, 4)

    def play(record: Callable[[Step], Any]) -> list[Any]:
        model = mlp(queue, 4, 4)
        optimizer, average = Counting(model.parameters()), ModelEMA(model, decay=0.9)

        @record
        def step() -> Node:
            loss = ag.mul(loss_of(model, data), 2.0 if read(optimizer, average) % 10 == 5 else 1.0)
            scaled_backward(handle, loss, optimizer)
            optimizer.step()
            average.update()
            return loss

        with amp.init(dtype="float32") as handle:
            return [step().value.to_host() for _ in range(12)]

    eager = play(lambda step: step)
    with pytest.warns(UserWarning, match="it reads .*, which a step that it makes on the host changes"):
        assert_same(play(amp.record), eager)


def test_a_count_of_a_graphs_optimizer_is_never_replayed(queue: cl.CommandQueue) -> None:
    class Train(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp(queue, 4, 4)
            self.optimizer = Adam(self.model.parameters())
            self.add_optimizer(self.optimizer)

        def build(self, x: Node, y: Node) -> Node:
            loss = ag.mul(loss_of(self.model, (x.value, y.value)), float(self.optimizer.t % 10 != 5))
            loss.backward()
            return loss

    with amp.init(dtype="float32"):
        train, data, losses = Train(), batch(queue, 3, 4, 4), []
        losses.append(train(*data).to_host())
        with pytest.warns(UserWarning, match=r"it reads the graph's optimizers\[0\]\.t, which a step"):
            losses.append(train(*data).to_host())
        losses += [train(*data).to_host() for _ in range(7)]
    assert [number for number, loss in enumerate(losses) if not loss.any()] == [5]


def test_a_list_outside_that_an_optimizer_counts_in_may_be_read(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 4, 4), batch(queue, 3, 4, 4)
    optimizer = Counting(model.parameters())
    count = optimizer.steps

    @amp.record
    def step() -> Node:
        loss = ag.mul(loss_of(model, data), float(len(count) % 10 != 5))
        scaled_backward(handle, loss, optimizer)
        optimizer.step()
        return loss

    said = "it reads .*, which a step that it makes on the host changes"
    with amp.init(dtype="float32") as handle, pytest.warns(UserWarning, match=said):
        losses = [step().value.to_host() for _ in range(9)]
    assert [number for number, loss in enumerate(losses) if not loss.any()] == [5]


def test_the_warning_names_what_keeps_calls_from_replaying(queue: cl.CommandQueue) -> None:
    settings = {"factor": 0.0}
    x = to_device(queue, np.ones((3, 4)))
    amp.init(dtype="float32")

    @amp.record
    def scaled(x: Tensor) -> Node:
        with ag.no_grad():
            return ag.mul(ag.tensor(x), settings["factor"])

    def new_every_second_time() -> None:
        for number in range(80):
            settings["factor"] = float(number // 2)
            scaled(x)

    with pytest.warns(UserWarning, match=r"in each call .*settings\['factor'\] changes\. From now on"):
        new_every_second_time()
