"""A backward that overflows is run again, from the same graph, at a scale that its gradients bear: no batch is lost."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.core import tensor, transfer
from netcl.nn.batchnorm import BatchNorm2dModule
from netcl.nn.layers import Conv2d, Dropout, ReLU, Sequential
from netcl.ops import tensor_ops
from netcl.ops.elementwise import elementwise_binary
from netcl.optim import SGD, Adam
from netcl.optim.clip import clip_grad_norm

from clamp import amp, session
from clamp.bridge import Node, Parameter, Tensor
from clamp.cli.bench.timing import counted_launches
from clamp.ops.cast import cast_into
from clamp.ops.loss_scale import DeviceState
from clamp.scaling.dynamic_scale import DynamicLossScale, is_anything_late, settle_late
from clamp.scaling.repeats import Repeats
from tests.faults.check import as_python_does
from tests.networks import LR, Task, batch, mlp, scaled_backward, weights_of
from tests.reference import assert_same, to_device

SPIKE = 4.0  # a loss so large overflows at the first scale, 2^16
STEPS = [SPIKE, 1.0, SPIKE, SPIKE, 1.0]  # enough for a run, a recording, a comparison and replays


class Loop:
    """A training, and one step of it.

    Args:
        handle: of AMP, which is on.
    """

    def __init__(self, queue: cl.CommandQueue, handle: amp.AmpHandle) -> None:
        np.random.seed(3)
        self.queue, self.handle = queue, handle
        self.model = self.make(queue)
        self.x, self.y = batch(queue, 16, 8, 4)
        self.half = to_device(queue, [0.5])
        self.optimizers = self.made_optimizers()

    def make(self, queue: cl.CommandQueue) -> Sequential:
        """The model."""
        return mlp(queue, 8, 16, 4)

    def made_optimizers(self) -> list[Any]:
        """Its optimizers."""
        return [Adam(self.model.parameters(), lr=1e-3)]

    def loss(self, size: Any) -> Node:
        """The loss of the batch, so many times."""
        return ag.mul(ag.mse_loss(self.model(ag.tensor(self.x)), ag.tensor(self.y)), ag.tensor(size))

    def step(self, size: Tensor) -> None:
        """One step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.passes(size)
        for optimizer in self.optimizers:
            optimizer.step()

    def passes(self, size: Tensor) -> None:
        """Its scaled passes."""
        scaled_backward(self.handle, self.loss(size), self.optimizers)

    def run(self, sizes: list[float], recorded: bool) -> list[np.ndarray]:
        """Steps with losses so large; the weights after them."""
        step = amp.record(self.step) if recorded else self.step
        for size in sizes:
            step(to_device(self.queue, [size]))
        return weights_of(self.model)


class Taped(Loop):
    """On a tape."""

    def passes(self, size: Tensor) -> None:
        with ag.Tape() as tape:
            loss = self.loss(size)
        with self.handle.scale_loss(loss, self.optimizers) as scaled_loss:
            tape.backward(scaled_loss)


class Accumulated(Loop):
    """Of which later passes add to the first one's gradients."""

    def passes(self, size: Tensor) -> None:
        for _ in range(3):
            super().passes(size)


class Twice(Loop):
    """With two backwards in one pass."""

    def passes(self, size: Tensor) -> None:
        with self.handle.scale_loss(self.loss(size), self.optimizers) as scaled_loss:
            scaled_loss.backward()
            scaled_loss.backward(self.half)


class TwoOptimizers(Loop):
    """With an optimizer for each layer."""

    def made_optimizers(self) -> list[Any]:
        first, _, last = self.model.layers
        return [Adam(first.parameters(), lr=1e-3), SGD(last.parameters(), lr=1e-6)]


class Wrapped(Loop):
    """With a scale for each of two losses."""

    def made_optimizers(self) -> list[Any]:
        return [self.handle.wrap_optimizer(*super().made_optimizers(), num_loss=2)]

    def passes(self, size: Tensor) -> None:
        (optimizer,) = self.optimizers
        for _ in range(2):
            with optimizer.scale_loss(self.loss(size)) as scaled_loss:
                scaled_loss.backward()


class Regularized(Loop):
    """With masks that the repeat must not draw anew, and statistics that it must not move."""

    def make(self, queue: cl.CommandQueue) -> Sequential:
        self.norm = BatchNorm2dModule(queue, 4)
        return Sequential(Conv2d(queue, 1, 4, 3, pad=1), self.norm, ReLU(), Dropout(0.5))

    def loss(self, size: Any) -> Node:
        images = ag.reshape(ag.tensor(self.x), (8, 1, 4, 4))
        return ag.mul(ag.sum(self.model(images)), ag.tensor(size))

    def run(self, sizes: list[float], recorded: bool) -> list[np.ndarray]:
        weights = super().run(sizes, recorded)
        return [*weights, self.norm.running_mean.to_host(), self.norm.running_var.to_host()]


class Checkpointed(Loop):
    """Of which backward computes a block again."""

    def loss(self, size: Any) -> Node:
        first, *others = self.model.layers
        inner = amp.checkpoint(lambda x: Sequential(*others)(x), first(ag.tensor(self.x)))
        return ag.mul(ag.mse_loss(inner, ag.tensor(self.y)), ag.tensor(size))


class Decorated(Loop):
    """With 16-bit parameters, and masters."""

    def made_optimizers(self) -> list[Any]:
        self.model, optimizer = amp.decorate(self.model, *super().made_optimizers(), level="O2")
        return [optimizer]

    def run(self, sizes: list[float], recorded: bool) -> list[np.ndarray]:
        super().run(sizes, recorded)
        return [x.to_host() for x in amp.master_params(self.optimizers[0])]


class Clipped(Loop):
    """With a norm that is taken between the pass and the step."""

    def passes(self, size: Tensor) -> None:
        super().passes(size)
        clip_grad_norm(self.model.parameters(), 0.5)


LOOPS = {
    kind.__name__: kind
    for kind in (Loop, Taped, Accumulated, Twice, TwoOptimizers, Wrapped, Regularized, Checkpointed, Decorated, Clipped)
}


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", LOOPS)
def test_it_is_a_run_that_began_at_that_scale(queue: cl.CommandQueue, name: str, recorded: bool) -> None:
    with amp.init() as handle:
        weights = LOOPS[name](queue, handle).run(STEPS, recorded)
        history, scales = list(handle.history), [scaler.scale for scaler in handle.scalers]
    assert [report.reason for report in history if not report.stepped] == []
    assert [bool(report.repeats) for report in history][:2] == [True, name == "TwoOptimizers"]
    assert 2.0**4 < scales[-1] < 2.0**15
    with amp.init(loss_scale=amp.ScaleRule(initial=scales[-1]), on_overflow="skip") as handle:
        others = LOOPS[name](queue, handle).run(STEPS, recorded)
        assert all(report.stepped for report in handle.history)
    assert_same(weights, others)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", ["Loop", "Taped", "TwoOptimizers", "Regularized", "Decorated", "Clipped"])
def test_one_batch_that_overflows_later_lowers_the_scale_once(
    queue: cl.CommandQueue, name: str, recorded: bool
) -> None:
    sizes, start = [1.0, 1.0, 1.0, 1.0, 1.0, 2.0**8, 1.0, 1.0], amp.ScaleRule(initial=2.0**10)
    with amp.init(loss_scale=start) as handle:
        loop = LOOPS[name](queue, handle)
        weights = loop.run(sizes, recorded)
        history = list(handle.history)[:: len(loop.optimizers)]
    assert all(report.stepped for report in history)
    assert [bool(report.repeats) for report in history] == [number == 5 for number in range(8)]
    assert [report.scale for report in history] == [2.0**10] * 5 + [2.0**9] * 3
    assert history[5].scale_before < 2.0**9
    with amp.init(loss_scale=start) as handle:
        loop = LOOPS[name](queue, handle)
        for size, report in zip(sizes, history, strict=True):
            handle.scalers[0].set_scale(report.scale_before)
            others = loop.run([size], recorded=False)
        assert not any(report.repeats for report in handle.history)
    assert_same(weights, others)


def reads_it(task: Task) -> None:
    """Whoever reads a gradient reads the true one."""
    grad = task.weight.grad
    assert (grad.to_host() == 2.0**20).all()
    assert task.gradient == 2.0**20


def scales_it(task: Task) -> None:
    """A gradient of the user's."""
    task.weight.grad = ag.mul(ag.tensor(task.weight.grad), 0.5).value


def computes_with_it(task: Task) -> None:
    """Without changing it, as for a step by hand, SAM's say: in functions of clamp's, in a container, too."""
    grad = ag.tensor(task.weight.grad)
    assert ag.stack([grad]).value.to_host().max() == 2.0**20


def computes_with_it_in_netcls(task: Task) -> None:
    """In functions of netcl's that clamp has no kernels for."""
    grad = task.weight.grad
    assert elementwise_binary(grad, grad, expression="ADD(v0, v1)").to_host().max() == 2.0**21


def computes_with_it_without_casts(task: Task) -> None:
    """In functions of netcl's that run at once."""
    with session.active_handle().disable_casts():
        assert ag.square(ag.tensor(task.weight.grad)).value.to_host().max() == 2.0**40


def another(grad: Tensor, part: slice = slice(None)) -> Tensor:
    """A tensor of the user's in (a part of) a gradient's memory."""
    buffer, size = grad.buffer, grad.size * 4
    first, last, _ = part.indices(size)
    if isinstance(buffer, cl.SVM):
        buffer = cl.SVM(buffer.mem.reshape(-1).view(np.uint8)[first:last])
    elif (first, last) != (0, size):
        buffer = buffer.get_sub_region(first, last - first)
    return Tensor(buffer, ((last - first) // 4,), "float32", grad.context, grad.queue)


def reads_another_tensor_there(task: Task) -> None:
    """One that shows the same memory, or a part of it."""
    assert (another(task.weight.grad, slice(0, 16)).to_host() == 2.0**20).all()
    assert (tensor.reshape(task.weight.grad, (12,)).to_host() == 2.0**20).all()


def computes_with_another_tensor_there(task: Task) -> None:
    """So that nothing says that it is a gradient."""
    grad = another(task.weight.grad)
    task.weight.grad = tensor.reshape(grad * 0.5, task.weight.shape)


def copies_it_to_the_host(task: Task) -> None:
    """By netcl's function for memory."""
    host, grad = np.empty(task.weight.shape, np.float32), task.weight.grad
    transfer.read(grad.queue, host, grad.buffer)
    assert (host == 2.0**20).all()


def in_another_thread(between: Callable[[Task], None]) -> Callable[[Task], None]:
    """The same, by who has made no pass."""

    def there(task: Task) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(between, task).result()

    there.__name__ = f"{between.__name__}_in_another_thread"
    return there


def copies_it_on_the_device(task: Task) -> None:
    """Into memory of the user's."""
    copy, grad = Tensor.from_shape(task.queue, task.weight.shape), task.weight.grad
    transfer.copy(grad.queue, copy.buffer, grad.buffer, grad.size * 4)
    assert (copy.to_host() == 2.0**20).all()


def clips_it(task: Task) -> None:
    """To half of its norm."""
    clip_grad_norm([task.weight], 2.0**19 * 12**0.5)


def records_a_function_of_it(task: Task) -> None:
    """Which reads it when it is called."""
    double = amp.record(lambda x: ag.mul(ag.tensor(x), 2.0))
    assert (double(task.weight.grad).value.to_host() == 2.0**21).all()


def takes_it_off(task: Task) -> None:
    """And puts there what it makes of it."""
    grad, task.weight.grad = task.weight.grad, None
    task.weight.grad = grad * 0.5


def holds_it_over_zero_grad(task: Task) -> None:
    """The pass is given up, and its gradient used all the same."""
    grad = task.weight.grad
    task.optimizer.zero_grad()
    task.weight.grad = grad * 0.5


def writes_it(task: Task) -> None:
    """By netcl's means."""
    task.weight.grad.write(np.full(task.weight.shape, 3, np.float32))


def writes_it_unseen(task: Task) -> None:
    """By means of which nobody hears."""
    cast_into(to_device(task.queue, np.full(task.weight.shape, 3)), task.weight.grad)


def adds_to_it(task: Task) -> None:
    """Another pass, from a scale that knows of the overflow."""
    task.backward(session.active_handle(), 0.25)


def to_an_overflow(task: Task, handle: amp.AmpHandle, size: float = 2.0**20) -> None:
    """Two steps, and a third pass, which overflows."""
    for _ in range(2):
        task.optimizer.zero_grad()
        task.step(handle, 2.0**-4)
    task.optimizer.zero_grad()
    task.backward(handle, size)


@pytest.mark.parametrize(
    ("between", "moved"),
    [
        (reads_it, 2.0**20),
        (scales_it, 2.0**19),
        (computes_with_it, 2.0**20),
        (computes_with_it_in_netcls, 2.0**20),
        (computes_with_it_without_casts, 2.0**20),
        (reads_another_tensor_there, 2.0**20),
        (computes_with_another_tensor_there, 2.0**19),
        (copies_it_to_the_host, 2.0**20),
        (copies_it_on_the_device, 2.0**20),
        (in_another_thread(reads_it), 2.0**20),
        (in_another_thread(scales_it), 2.0**19),
        (in_another_thread(computes_with_another_tensor_there), 2.0**19),
        (in_another_thread(copies_it_to_the_host), 2.0**20),
        (in_another_thread(copies_it_on_the_device), 2.0**20),
        (clips_it, 2.0**19),
        (in_another_thread(clips_it), 2.0**19),
        (in_another_thread(records_a_function_of_it), 2.0**20),
        (takes_it_off, 2.0**19),
        (holds_it_over_zero_grad, 2.0**19),
        (writes_it, 3),
        (writes_it_unseen, 0),
        (adds_to_it, 2.0**20 + 0.25),
    ],
)
def test_what_is_between_a_pass_and_its_step_counts(
    task: Task, handle: amp.AmpHandle, between: Callable[[Task], None], moved: float
) -> None:
    """What is made of a gradient is made of the one that stays; a step whose gradients have been changed by means that
    nobody hears of, before anybody knew of the overflow, is skipped."""
    to_an_overflow(task, handle)
    before = task.moved
    between(task)
    task.optimizer.step()
    assert handle.last_step.stepped == bool(moved)
    assert task.moved - before == pytest.approx(moved, rel=1e-6)  # of a norm
    assert handle.loss_scale == 2.0**15


@pytest.mark.parametrize("where", ["here", "in another thread"])
def test_shutdown_leaves_no_overflow_that_is_yet_to_be_repeated(task: Task, handle: amp.AmpHandle, where: str) -> None:
    """After it nobody would keep the inf from the weights."""
    if where == "here":
        to_an_overflow(task, handle)
    else:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(to_an_overflow, task, handle).result()
    handle.shutdown()
    assert task.gradient == 2.0**20
    task.optimizer.step()
    assert task.moved == 2.0**20 + 2.0**-3


def test_a_pass_whose_graph_a_step_has_freed_is_not_repeated(task: Task, handle: amp.AmpHandle) -> None:
    """Another optimizer's of its weights, in another thread. It looks at the gradients, and is skipped, too."""
    to_an_overflow(task, handle)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(SGD([task.weight]).step).result()
    task.optimizer.step()
    assert [report.stepped for report in handle.history][2:] == [False, False]
    handle.shutdown()
    assert not is_anything_late()


def test_an_error_at_shutdown_leaves_no_pass_to_be_heard(task: Task, handle: amp.AmpHandle) -> None:
    """Under the next ``init`` the other thread's would be repeated by what has been written to meanwhile."""
    other = Task(task.queue)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(to_an_overflow, other, handle).result()
        to_an_overflow(task, handle)
        with failing_read(1, MemoryError), pytest.raises(MemoryError):
            handle.shutdown()
    assert not is_anything_late()
    with amp.init():
        assert not np.isfinite(other.weight.grad.to_host()).any()


def test_gradients_of_numpy_may_be_beside_those_of_a_pass(task: Task, handle: amp.AmpHandle) -> None:
    """They lie in no memory of the device's that somebody could read."""
    host, one = (Parameter.from_host(None, np.ones(3, np.float32), backend="cpu") for _ in range(2))
    task.optimizer.params.append(host)
    for _ in range(2):
        task.step(handle, 2.0**-4)
        task.optimizer.zero_grad()
    before, host.grad = task.moved, one
    task.backward(handle, 2.0**20)
    reads_it(task)
    task.optimizer.step()
    assert task.moved - before == 2.0**20


def test_a_users_function_casts_the_gradient_that_stays(task: Task, handle: amp.AmpHandle) -> None:
    function = amp.half_function(lambda x: ag.mul(x, 0.5))
    to_an_overflow(task, handle, 4.0)
    assert (function(ag.tensor(task.weight.grad)).value.to_host() == 2.0).all()


@contextmanager
def failing_read(number: int, error: type[BaseException]) -> Iterator[None]:
    """Inside, this read of the scale's state raises an error."""
    reads, read = iter(range(1, 100)), DeviceState.read

    def failing(self: DeviceState) -> Any:
        if next(reads) == number:
            raise error
        return read(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DeviceState, "read", failing)
        yield


@pytest.mark.parametrize(
    "write",
    [
        lambda x, other: x.write(other.to_host()),
        lambda x, other: transfer.copy(x.queue, x.buffer, other.buffer),
        lambda x, other: tensor_ops.narrow(other, 0, 0, 2, out=x),
    ],
)
def test_the_next_batch_may_come_before_the_step(queue: cl.CommandQueue, write: Callable[..., Any]) -> None:
    """In the memory of the last one, which a backward that is run again reads."""
    task, other = Task(queue), to_device(queue, np.full((2, 4), 3), "float16")
    task.x = ag.tensor(to_device(queue, np.ones((2, 4)), "float16"))
    with amp.init() as handle:
        to_an_overflow(task, handle)
        before = task.moved
        write(task.x.value, other)
        task.optimizer.step()
        assert (task.x.value.to_host() == 3).all()
        assert task.moved - before == 2.0**20


@pytest.mark.parametrize("fails", [1, 2, 3, 4])
def test_a_step_that_is_interrupted_in_a_repeat_can_be_called_again(
    task: Task, handle: amp.AmpHandle, fails: int
) -> None:
    to_an_overflow(task, handle)
    moved = task.moved
    with failing_read(fails, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        task.optimizer.step()
    task.optimizer.step()
    assert handle.last_step.stepped
    assert task.moved - moved == 2.0**20


@pytest.mark.parametrize("fails", [1, 2, 3, 4])
def test_whoever_reads_a_gradient_after_a_repeat_that_failed_has_it_repeated(
    task: Task, handle: amp.AmpHandle, fails: int
) -> None:
    to_an_overflow(task, handle)
    with failing_read(fails, MemoryError), pytest.raises(MemoryError):
        task.weight.grad.to_host()
    assert task.gradient == 2.0**20


@pytest.mark.parametrize("big", range(3))
def test_each_pass_of_an_accumulation_is_repeated_by_itself(task: Task, handle: amp.AmpHandle, big: int) -> None:
    sizes = [1.0] * 3
    sizes[big] = 2.0**20
    for size in sizes:
        task.backward(handle, size)
    assert task.gradient == sum(sizes)
    task.optimizer.step()
    assert (handle.last_step.stepped, handle.last_step.repeats > 0) == (True, True)
    assert handle.loss_scale == (2.0**15 if big else 2.0**-4)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis_counts_steps_that_were_repeated(task: Task, hysteresis: int) -> None:
    with amp.init(loss_scale=amp.ScaleRule(initial=64.0, hysteresis=hysteresis)) as handle:
        for number in range(1, 4):
            task.optimizer.zero_grad()
            task.backward(handle, 2.0**12)
            assert task.gradient == 2.0**12
            task.optimizer.step()
            assert handle.last_step.stepped
            assert handle.loss_scale == (64.0 if number < hysteresis else 16.0)


def test_no_scale_below_the_least_is_tried(task: Task) -> None:
    with amp.init(loss_scale=amp.ScaleRule(initial=8.0, min=3.0)) as handle:
        task.step(handle, 40000.0)  # overflows at 4
        assert (handle.last_step.stepped, handle.loss_scale, task.moved) == (True, 3.0, 40000.0)


def test_a_step_after_one_that_was_skipped_is_repeated(task: Task, handle: amp.AmpHandle) -> None:
    for size in (np.inf, 2.0**20):
        task.step(handle, size)
        task.optimizer.zero_grad()
    assert [report.repeats > 0 for report in handle.history] == [report.stepped for report in handle.history]
    assert task.moved == 2.0**20


def test_a_pass_waits_with_its_repeats_where_the_scale_has_proved_itself(task: Task, handle: amp.AmpHandle) -> None:
    late = []
    for size in (1.0, 1.0, 2.0**20, 1.0, 1.0):
        task.backward(handle, size)
        late.append(is_anything_late())
        task.optimizer.step()
        task.optimizer.zero_grad()
    assert late == [False, True, True, False, True]


@pytest.mark.parametrize("load", [False, True])
def test_a_scale_that_is_set_between_pass_and_step_stays(task: Task, handle: amp.AmpHandle, load: bool) -> None:
    state = amp.state_dict()
    to_an_overflow(task, handle)
    before = task.moved
    if load:
        amp.load_state_dict(state)
    else:
        handle.scalers[0].set_scale(2.0**16)
    task.optimizer.step()
    assert not handle.last_step.stepped
    assert (handle.loss_scale, task.moved) == (2.0**16, before)


def test_gradients_of_another_scale_are_there_for_each_repeat(task: Task, handle: amp.AmpHandle) -> None:
    amp.GradScaler(8.0).scale(task.loss()).backward()
    task.step(handle, 2.0**20)
    assert handle.last_step.repeats > 1
    assert task.moved == 2.0**20 + 1


def writes(task: Task, handle: amp.AmpHandle) -> None:
    """Changes a gradient before it is divided."""
    with handle.scale_loss(task.loss(2.0**20), task.optimizer) as scaled_loss:
        scaled_loss.backward()
        task.set_gradient(np.inf)


def clears(task: Task, handle: amp.AmpHandle) -> None:
    """Clears what was there, between the ``with`` and its backward."""
    task.backward(handle)
    with handle.scale_loss(task.loss(2.0**20), task.optimizer) as scaled_loss:
        task.optimizer.zero_grad()
        scaled_loss.backward()


def nests(task: Task, handle: amp.AmpHandle) -> None:
    """A pass inside of another."""
    with handle.scale_loss(task.loss(2.0**20), task.optimizer) as scaled_loss:
        task.backward(handle)
        scaled_loss.backward()


def loses_its_graph(task: Task, handle: amp.AmpHandle) -> None:
    """The tape dies inside of the ``with``."""
    with ag.Tape() as tape:
        loss = task.loss(2.0**20)
    with handle.scale_loss(loss, task.optimizer) as scaled_loss:
        scaled_loss.backward()
        del tape


def is_inf_itself(task: Task, handle: amp.AmpHandle) -> None:
    """A loss that no scale helps."""
    task.backward(handle, np.inf)


def has_gradients_of_no_number(task: Task, handle: amp.AmpHandle) -> None:
    """A loss that is a number, and its gradient is none at any scale."""
    x = ag.tensor(task.weight)
    loss = ag.sum(ag.sqrt(ag.sub(x, x)))
    scaled_backward(handle, loss, task.optimizer)


def is_withheld(task: Task, handle: amp.AmpHandle) -> None:
    """Somebody looks on."""
    handle.explain(lambda: task.backward(handle, 2.0**20))
    task.backward(handle, np.inf)


@pytest.mark.parametrize(
    "passes", [writes, clears, nests, loses_its_graph, is_inf_itself, has_gradients_of_no_number, is_withheld],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_what_cannot_be_repeated_is_skipped_as_ever(
    task: Task, handle: amp.AmpHandle, passes: Callable[..., None]
) -> None:
    passes(task, handle)
    task.optimizer.step()
    assert (handle.last_step.stepped, handle.last_step.repeats) == (False, 0)
    assert handle.last_step.reason
    assert handle.loss_scale == 2.0**15
    assert task.moved == 0
    task.optimizer.zero_grad()
    task.step(handle)
    assert task.moved == 1


@pytest.mark.parametrize("options", [{"on_overflow": "skip"}, {"loss_scale": 2.0**16}], ids=str)
def test_whoever_wants_none_has_none(task: Task, options: dict[str, Any]) -> None:
    with amp.init(**options) as handle:
        task.step(handle, 2.0**20)
        assert (handle.last_step.stepped, handle.last_step.repeats, task.moved) == (False, 0, 0)
    with pytest.raises(ValueError, match='on_overflow must be "repeat" or "skip", got \'retry\''):
        amp.init(on_overflow="retry")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("number", range(1, 5))
def test_an_error_in_a_repeat_leaves_all_as_it_was(
    task: Task, handle: amp.AmpHandle, number: int, error: type[BaseException]
) -> None:
    task.backward(handle)
    before = handle.scalers[0].state_dict()
    with failing_read(number, error), pytest.raises(error):
        task.backward(handle, 2.0**20)
    assert handle.scalers[0].state_dict() == before
    assert task.gradient == 1
    task.step(handle, 2.0**20)
    assert task.gradient == 2.0**20 + 1
    assert handle.last_step.stepped


@pytest.mark.parametrize("size", [1.0, 2.0**20])
@pytest.mark.parametrize("on_overflow", ["repeat", "skip"])
@pytest.mark.parametrize("where", ["unscale_", "update"])
def test_a_pass_that_is_interrupted_while_it_ends_is_undone_with_its_scale_or_ends(
    queue: cl.CommandQueue, where: str, on_overflow: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(queue)
    with amp.init(on_overflow=on_overflow) as handle, as_python_does():
        task.backward(handle)
        before, after, own = handle.scalers[0].state_dict(), [], getattr(DynamicLossScale, where)

        def interrupted(self: DynamicLossScale, *args: Any) -> None:
            own(self, *args)
            after.append(self.state_dict())
            signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patched:
            patched.setattr(DynamicLossScale, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                task.backward(handle, size)
        if (where, on_overflow) == ("update", "skip"):
            assert handle.scalers[0].state_dict() == after[0]
            assert task.gradient != 1
            return
        assert handle.scalers[0].state_dict() == before
        assert task.gradient == 1
        task.step(handle, 1.0)
        assert task.gradient == 2
        assert handle.last_step.stepped
        assert handle.last_step.repeats == 0


def test_only_what_no_scale_mends_is_an_anomaly(task: Task, handle: amp.AmpHandle) -> None:
    with ag.detect_anomaly():
        task.backward(handle, 2.0**20)
        assert task.gradient == 2.0**20
        before = handle.scalers[0].state_dict()
        assert before["loss_scale"] < 2.0**16
        for op in (ag.sqrt, ag.log):  # of 0: the gradient is inf at every scale; so is the second's loss
            with (
                pytest.raises(RuntimeError, match=f"Anomaly detected.*'{op.__name__}'"),
                handle.scale_loss(op(ag.mul(task.loss(), 0.0)), task.optimizer) as scaled_loss,
            ):
                scaled_loss.backward()
            assert handle.scalers[0].state_dict() == before
            assert task.gradient == 2.0**20


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_a_healthy_step_reads_and_launches_what_it_did(
    queue: cl.CommandQueue, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, copy = {}, cl.enqueue_copy
    for on_overflow in ("skip", "repeat"):
        with amp.init(loss_scale=amp.ScaleRule(initial=8.0), on_overflow=on_overflow) as handle:
            loop = Loop(queue, handle)
            step, size, reads = amp.record(loop.step) if recorded else loop.step, to_device(queue, [1.0]), []
            for _ in range(4):
                step(size)
            with monkeypatch.context() as patched, counted_launches() as launches:
                patched.setattr(cl, "enqueue_copy", lambda *args, to=reads, **kw: [to.append(1), copy(*args, **kw)][1])
                step(size)
            counts[on_overflow] = len(reads), launches
    assert counts["skip"] == counts["repeat"]
    assert counts["repeat"][0] == (2 if recorded else 1)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_pass_does_not_wait_for_the_device(task: Task, given_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one after a pass whose gradients were cleared."""
    reads, read = list[DeviceState](), DeviceState.read
    with amp.init(loss_scale=amp.ScaleRule(initial=8.0)) as handle:
        for _ in range(2):
            task.optimizer.zero_grad()
            task.backward(handle)
            task.optimizer.step()
        if given_up:
            task.backward(handle)
        task.optimizer.zero_grad()
        monkeypatch.setattr(DeviceState, "read", lambda self: [reads.append(self), read(self)][1])
        task.backward(handle)
        assert reads == []
        task.optimizer.step()
        assert len(reads) == 1


# ---------------------------------------------------------------------------------------------- several threads


@pytest.mark.parametrize("clean", [0, 2], ids=["at once", "late"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_repeat_leaves_what_another_threads_pass_has_met(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, first: int, clean: int
) -> None:
    """The passes of two threads end one after the other, before either hears what has become of its own."""
    tasks, big, settle = [Task(queue), Task(queue)], 2.0**20, Repeats.settle
    ended, may_go_on = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def settle_when_told(repeats: Repeats, left: Any = None) -> None:
        number = [task.optimizer for task in tasks].index(repeats._guards[0].optimizer)
        ended[number].set()
        may_go_on[number].wait()
        settle(repeats, left)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another, amp.init() as handle:
        threads = (one, another)
        for thread, task in zip(threads, tasks, strict=True):
            for _ in range(clean):
                thread.submit(task.step, handle, 2.0**-4).result()
                thread.submit(task.optimizer.zero_grad).result()
        monkeypatch.setattr(Repeats, "settle", settle_when_told)
        steps = []
        for number, (thread, task) in enumerate(zip(threads, tasks, strict=True)):
            steps.append(thread.submit(task.step, handle, big))
            ended[number].wait()
        for number in (first, 1 - first):
            may_go_on[number].set()
            steps[number].result()
        assert [report.reason for report in handle.history if not report.stepped] == []
        assert handle.loss_scale < 2.0**16
    assert [task.moved for task in tasks] == [big + clean * 2.0**-4] * 2


def test_threads_may_repeat_at_the_same_time(queue: cl.CommandQueue) -> None:
    """Scales that grow with each step make nearly every backward of all of them overflow."""
    big, rounds, tasks = 2.0**4, 20, [Task(queue) for _ in range(3)]

    def train(task: Task) -> None:
        for _ in range(rounds):
            task.optimizer.zero_grad()
            task.step(handle, big)

    with ThreadPoolExecutor(3) as threads, amp.init(loss_scale=amp.ScaleRule(interval=1)) as handle:
        list(threads.map(train, tasks))
        assert [report.reason for report in handle.history if not report.stepped] == []
        assert sum(report.repeats > 0 for report in handle.history) > rounds
    assert [task.moved for task in tasks] == [big * rounds] * 3


def test_a_repeat_knows_the_scale_that_another_threads_pass_has_moved_before_the_end(queue: cl.CommandQueue) -> None:
    """Its gradients are compared with those of a backward at the scale that they were multiplied by."""
    task, other, small = Task(queue), Task(queue), 2.0**-4
    with ThreadPoolExecutor(1) as thread, amp.init(loss_scale=amp.ScaleRule(initial=2.0**17)) as handle:

        def step(size: float) -> None:
            other.optimizer.zero_grad()
            other.step(handle, size)

        task.step(handle, small)
        task.optimizer.zero_grad()
        with handle.scale_loss(task.loss(), task.optimizer) as scaled_loss:
            scaled_loss.backward()  # overflows, at 2^17 alone
            for size in (SPIKE, small):  # the second lets this pass wait with its repeats
                thread.submit(step, size).result()
            assert handle.loss_scale < 2.0**17
        task.optimizer.step()
        assert [report.reason for report in handle.history if not report.stepped] == []
        assert handle.last_step.repeats > 0
    assert task.moved == 1.0 + small


@pytest.mark.parametrize("where", ["inside the with", "in another thread"])
@pytest.mark.parametrize("clean", [0, 2])
def test_a_backward_whose_input_has_been_written_to_after_it_is_not_repeated(
    task: Task, handle: amp.AmpHandle, clean: int, where: str
) -> None:
    """The step is skipped, as without repeats; the next ones are not."""

    def write() -> None:
        transfer.write_tensor(task.x.value, np.full(task.x.shape, 2, np.float32))

    for _ in range(clean):
        task.step(handle, 2.0**-4)
        task.optimizer.zero_grad()
    with handle.scale_loss(task.loss(2.0**20), task.optimizer) as scaled_loss:
        scaled_loss.backward()
        if where == "inside the with":
            write()
    if clean and where == "in another thread":  # at once, the repeats are over by now
        with ThreadPoolExecutor(1) as thread:
            thread.submit(write).result()
    task.optimizer.step()
    is_repeated = not clean and where == "in another thread"
    assert handle.last_step.stepped is is_repeated
    assert task.moved == clean * 2.0**-4 + is_repeated * 2.0**20
    if not is_repeated:
        task.optimizer.zero_grad()
        task.step(handle)
        assert task.moved == clean * 2.0**-4 + 2


def checkpointed(task: Task, block: Callable[[Node], Node], size: float) -> Node:
    """A loss whose backward runs a block of the user's again."""
    product = ag.matmul_op(task.x, ag.tensor(task.weight))
    return ag.mul(ag.sum(amp.checkpoint(block, product)), size / 2)


def test_a_repeat_may_wait_for_a_thread_that_reads_the_scale(task: Task, handle: amp.AmpHandle) -> None:
    with ThreadPoolExecutor(1) as thread:

        def block(x: Node) -> Node:
            assert thread.submit(amp.state_dict).result(timeout=20)
            return ag.mul(x, 1.0)

        with handle.scale_loss(checkpointed(task, block, 2.0**20), task.optimizer) as scaled_loss:
            scaled_loss.backward()
    task.optimizer.step()
    assert handle.last_step.repeats > 0
    assert task.moved == 2.0**20


def test_a_repeat_may_wait_for_a_recorded_function_of_threads_with_repeats(queue: cl.CommandQueue) -> None:
    """The block of one thread's repeat calls a function that another one is in, which has to repeat first."""
    first, second = Task(queue), Task(queue)
    scratch, inside = to_device(queue, np.ones(3)), threading.Event()

    @amp.record
    def function(x: Tensor) -> Node:
        inside.set()
        transfer.write_tensor(scratch, np.ones(3, np.float32))
        return ag.mul(ag.tensor(x), 2.0)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another, amp.init() as handle:
        for _ in range(2):
            one.submit(first.step, handle, 2.0**-4).result()
            one.submit(first.optimizer.zero_grad).result()
        one.submit(first.backward, handle, 2.0**20).result()
        calls = []

        def block(x: Node) -> Node:
            calls.append(None)
            if len(calls) == 3:  # forward, backward, and here a repeat
                one.submit(function, scratch)
                inside.wait(0.5)
                another.submit(function, scratch).result(timeout=20)
            return ag.mul(x, 1.0)

        with handle.scale_loss(checkpointed(second, block, 2.0**20), second.optimizer) as scaled_loss:
            scaled_loss.backward()
        second.optimizer.step()
        one.submit(first.optimizer.step).result()
        assert len(calls) > 3
        assert [report.reason for report in handle.history if not report.stepped] == []
    assert first.moved == 2.0**20 + 2 * 2.0**-4
    assert second.moved == 2.0**20


@pytest.mark.parametrize("clean", [0, 2])
def test_a_repeat_may_wait_for_a_pass_of_another_thread(task: Task, handle: amp.AmpHandle, clean: int) -> None:
    """That one is repeated itself, by the scale that both share: none meets what the other tries."""
    other, calls = Task(task.queue), list[None]()
    for _ in range(clean):
        task.step(handle, 2.0**-4)
        task.optimizer.zero_grad()
    with ThreadPoolExecutor(1) as thread:

        def block(x: Node) -> Node:
            calls.append(None)
            if len(calls) == 3:  # forward, backward, and here a repeat
                thread.submit(other.step, handle, 2.0**22).result(timeout=20)
            return ag.mul(x, 1.0)

        with handle.scale_loss(checkpointed(task, block, 2.0**20), task.optimizer) as scaled_loss:
            scaled_loss.backward()
        task.optimizer.step()
    assert len(calls) > 3
    assert [report.reason for report in handle.history if not report.stepped] == []
    assert (task.moved, other.moved) == (2.0**20 + clean * 2.0**-4, 2.0**22)
    assert handle.loss_scale == 2.0**-6  # 2^21 times this is the largest power of two in float16


def test_a_scale_that_another_thread_sets_during_a_repeat_stays(task: Task, handle: amp.AmpHandle) -> None:
    calls = list[None]()
    with ThreadPoolExecutor(1) as thread:

        def block(x: Node) -> Node:
            calls.append(None)
            if len(calls) == 3:  # forward, backward, and here a repeat
                thread.submit(handle.scalers[0].set_scale, 2.0**10).result(timeout=20)
            return ag.mul(x, 1.0)

        scaled_backward(handle, checkpointed(task, block, 2.0**20), task.optimizer)
    task.optimizer.step()
    assert (handle.loss_scale, task.moved) == (2.0**10, 2.0**20)


def test_passes_of_tasks_that_take_turns_are_repeated(task: Task, handle: amp.AmpHandle) -> None:
    """Neither is inside of the other, and the backward of each is its own pass's."""
    other, size = Task(task.queue), 2.0**20

    async def train(one: Task, turns: int) -> None:
        with handle.scale_loss(one.loss(size), one.optimizer) as scaled_loss:
            await asyncio.sleep(0)
            await asyncio.to_thread(scaled_loss.backward) if one is other else scaled_loss.backward()
            for _ in range(turns):
                await asyncio.sleep(0)
        one.optimizer.step()

    async def tasks() -> None:
        await asyncio.gather(train(task, 1), train(other, 2))

    asyncio.run(tasks())
    assert [report.reason for report in handle.history if not report.stepped] == []
    assert (task.moved, other.moved) == (size, size)


def test_a_pass_may_be_repeated_inside_of_another_tasks(task: Task, handle: amp.AmpHandle) -> None:
    """What it waits for comes there: a write. The other one is repeated, too, when it overflows."""
    other, size, written = Task(task.queue), 2.0**20, to_device(task.queue, [1.0])

    async def open_and_write() -> None:
        with handle.scale_loss(other.loss(size), other.optimizer) as scaled_loss:
            await asyncio.sleep(0)
            assert is_anything_late()
            elementwise_binary(written, written, expression="v0 + v1", out=written)
            assert not is_anything_late()
            scaled_loss.backward()
        other.optimizer.step()

    async def overflow() -> None:
        task.backward(handle, size)
        await asyncio.sleep(0)
        task.optimizer.step()

    async def tasks() -> None:
        await asyncio.gather(open_and_write(), overflow())

    for _ in range(2):  # from then on a pass waits
        task.step(handle, 1.0)
        task.optimizer.zero_grad()
    asyncio.run(tasks())
    assert [report.reason for report in handle.history if not report.stepped] == []
    assert (task.moved, other.moved) == (size + 2, size)


def test_a_step_that_another_thread_makes_than_its_pass_is_repeated(task: Task, handle: amp.AmpHandle) -> None:
    sizes = [2.0**-4, 2.0**-4, 2.0**4, 2.0**-4, 2.0**4]
    with ThreadPoolExecutor(1) as thread:
        for size in sizes:
            thread.submit(task.backward, handle, size).result()
            task.optimizer.step()
            task.optimizer.zero_grad()
    assert [report.repeats > 0 for report in handle.history if report.stepped] == [size > 1 for size in sizes]
    assert task.moved == sum(sizes)


def submitting(
    thread: ThreadPoolExecutor, act: Callable[[], None], calls: list[None], submitted: list[Future[None]]
) -> Callable[[Node], Node]:
    """A block that has another thread act where a repeat runs it, and waits for that a while."""

    def block(x: Node) -> Node:
        calls.append(None)
        if len(calls) == 3:  # forward, backward, and here a repeat
            submitted.append(thread.submit(act))
            wait(submitted, timeout=0.2)
        return ag.mul(x, 1.0)

    return block


def test_a_step_waits_for_the_repeat_that_another_thread_makes(task: Task, handle: amp.AmpHandle) -> None:
    """It would meet the gradients of a scale that is tried, and clear them while the next ones come."""
    calls, steps = list[None](), list[Future[None]]()
    with ThreadPoolExecutor(1) as stepping:

        def step() -> None:
            task.optimizer.step()
            task.optimizer.zero_grad()

        block = submitting(stepping, step, calls, steps)
        for _ in range(2):
            task.backward(handle, 2.0**-4)
            stepping.submit(step).result()
        scaled_backward(handle, checkpointed(task, block, 2.0**20), task.optimizer)
        settle_late()
        steps[0].result()
    assert handle.last_step.stepped
    assert task.moved == 2.0**-3 + 2.0**20
    assert task.weight.grad is None


@pytest.mark.parametrize("clean", [0, 2], ids=["at once", "late"])
@pytest.mark.parametrize("steps", [False, True], ids=["zero_grad", "step"])
def test_gradients_are_cleared_after_the_repeat_that_another_thread_makes(
    queue: cl.CommandQueue, handle: amp.AmpHandle, clean: int, steps: bool
) -> None:
    """Else some would go, and a scale be tried on the others: none is left, and the next step is whole."""
    pair, calls, clears = [Task(queue), Task(queue)], list[None](), list[Future[None]]()
    optimizer = SGD([task.weight for task in pair], lr=LR)
    with ThreadPoolExecutor(1) as clearing:

        def clear() -> None:
            if steps:
                optimizer.step()
            optimizer.zero_grad()

        block = submitting(clearing, clear, calls, clears)

        def loss(size: float) -> Node:
            return ag.add(checkpointed(pair[0], block, size), pair[1].loss(size))

        for _ in range(clean):
            calls[:] = [None] * 9
            scaled_backward(handle, loss(2.0**-4), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        calls.clear()
        scaled_backward(handle, loss(2.0**16), optimizer)
        settle_late()
        clears[0].result()
        assert [task.weight.grad for task in pair] == [None, None]
        moved = clean * 2.0**-4 + steps * 2.0**16
        assert [task.moved for task in pair] == [moved] * 2
        scale = handle.loss_scale
        scaled_backward(handle, loss(2.0**-4), optimizer)
        optimizer.step()
    assert scale == handle.loss_scale == (2.0**15 if clean else 1.0)
    assert [task.moved for task in pair] == [moved + 2.0**-4] * 2
    assert [report.reason for report in handle.history if not report.stepped] == []
    assert [report.repeats > 0 for report in handle.history] == [False] * clean + [True] * steps + [False]
