"""Loops of all kinds hold one step: what a pass and its optimizers' steps are done with is let go, what a program still
needs is not, and a backward over what is gone says which word keeps it."""

from __future__ import annotations

import contextvars
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.optim import SGD, Adam

from clamp import amp, bridge
from clamp.bridge import Node, Tensor
from clamp.casting import policies
from clamp.params import graphs
from tests.networks import LOSS_FACTOR, UsersSGD, batch, loss_of, mlp, scaled_backward, weights_of
from tests.reference import to_device

pytestmark = pytest.mark.usefixtures("shut_down")

ROWS, WIDTH = 64, 32
STEPS = 3
_SGD = partial(SGD, lr=0.5)
WORD = re.escape("loss.backward(retain_graph=True) or tape.backward(loss, retain_graph=True)")


class Setting:
    """Two models, one after the other or side by side, with their optimizers, a third one without, and a batch; what
    it trains is told by ``numbers``."""

    def __init__(self, queue: cl.CommandQueue, optimizer: Callable[..., Any] = _SGD, **amp_options: Any) -> None:
        self.queue = queue
        self.handle = amp.init(**{"loss_scale": 16.0, **amp_options})
        self.first, self.second, self.third = (mlp(queue, WIDTH, WIDTH, WIDTH, seed=seed) for seed in range(3))
        self.one, self.other = optimizer(self.first.parameters()), optimizer(self.second.parameters())
        self.both = optimizer([*self.first.parameters(), *self.second.parameters()])
        self.x, self.y = batch(queue, ROWS, WIDTH, WIDTH)
        self.seen: list[float] = []

    def error(self, made: Node) -> Node:
        return ag.mul(ag.mse_loss(made, ag.tensor(self.y)), LOSS_FACTOR)

    def hidden(self) -> Node:
        made: Node = self.first(ag.tensor(self.x))
        return made

    def forward(self) -> tuple[Node, Node]:
        made = self.hidden()
        return made, self.error(made)

    def backward(self, loss: Node, optimizer: Any, **word: Any) -> None:
        with self.handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(**word)

    def on_tape(self, loss: Node, optimizer: Any, **word: Any) -> None:
        with self.handle.scale_loss(loss, optimizer) as scaled_loss:
            ag.Tape().backward(scaled_loss, **word)

    def clear(self) -> None:
        self.both.zero_grad()
        for param in self.third.parameters():
            param.grad = None

    def numbers(self) -> list[Any]:
        weights = weights_of(self.first) + weights_of(self.second)
        return [*(weight.tobytes() for weight in weights), *self.seen]


Loop = Callable[[Setting], Any]

# ---------------------------------------------------------------------------------------------- loops that run


def plain(s: Setting) -> None:
    for _ in range(STEPS):
        s.clear()
        made, loss = s.forward()
        s.backward(loss, s.one)
        s.one.step()
        s.seen += [float(loss.value.to_host()[0]), float(made.value.to_host().sum())]  # values stay


def second_backward_before_the_step(s: Setting) -> None:
    for _ in range(STEPS):
        s.clear()
        _, loss = s.forward()
        s.backward(loss, s.one)
        s.backward(loss, s.one)
        s.one.step()


def gan(s: Setting, critic_first: bool = True) -> None:
    for _ in range(STEPS):
        fake = s.hidden()
        for optimizer in (s.other, s.one) if critic_first else (s.one, s.other):
            optimizer.zero_grad()
            s.backward(s.error(s.second(fake)), optimizer)
            for other in (s.one, s.other):
                if other is not optimizer:
                    other.zero_grad()
            optimizer.step()


def gan_generator_first(s: Setting) -> None:
    gan(s, critic_first=False)


def graph_of_another_optimizer(s: Setting) -> None:
    """Two losses of one trunk, the second made before the first one's step and run after it."""
    for _ in range(STEPS):
        s.clear()
        hidden, loss = s.forward()
        late = s.error(s.second(hidden))
        s.backward(loss, s.one)
        s.one.step()
        s.clear()
        s.backward(late, s.other)
        s.one.zero_grad()
        s.other.step()


def two_losses_of_which_one_runs_again(s: Setting) -> None:
    """What both were computed from is the second's, for which one of two optimizers has stepped."""
    for _ in range(STEPS):
        s.clear()
        hidden, loss = s.forward()
        late = s.error(s.second(hidden))
        s.backward(loss, s.one)
        s.backward(late, [s.one, s.other])
        s.one.step()
        s.backward(late, [s.one, s.other])
        s.other.step()


def one_optimizer_for_two_losses_in_turn(s: Setting) -> None:
    for _ in range(STEPS):
        s.clear()
        hidden, loss = s.forward()
        late = ag.mul(ag.sum(ag.mul(hidden, hidden)), LOSS_FACTOR)
        for each in (loss, late):
            s.clear()
            s.backward(each, s.one)
            s.one.step()


def accumulation(s: Setting) -> None:
    for _ in range(STEPS):
        s.clear()
        losses = [s.forward()[1] for _ in range(3)]
        for loss in losses:
            s.backward(loss, s.one)
        s.one.step()
        s.seen += [float(loss.value.to_host()[0]) for loss in losses]


def checkpointed(s: Setting) -> None:
    for _ in range(STEPS):
        s.clear()
        loss = s.error(amp.checkpoint(s.second, amp.checkpoint(s.first, ag.tensor(s.x))))
        s.backward(loss, s.both)
        s.backward(loss, s.both)
        s.both.step()


def recorded(s: Setting) -> None:
    @amp.record
    def train(x: Tensor, y: Tensor) -> Node:
        s.one.zero_grad()
        loss = loss_of(s.first, (x, y))
        s.backward(loss, s.one)
        s.one.step()
        return loss

    for _ in range(STEPS + 2):
        s.seen.append(float(train(s.x, s.y).value.to_host()[0]))


def truncated_by_values(s: Setting) -> None:
    state = s.x
    for _ in range(STEPS):
        s.clear()
        hidden = s.first(ag.add(ag.tensor(state), ag.tensor(s.x)))
        s.backward(s.error(hidden), s.one)
        s.one.step()
        state = hidden.value


def truncated_by_tapes(s: Setting) -> None:
    """netcl cuts the graph of a tape that dies: the state that is carried over is a leaf then."""
    hidden: Any = ag.tensor(s.x)
    for _ in range(STEPS):
        s.clear()
        with ag.Tape() as tape:
            hidden = s.first(ag.add(hidden, ag.tensor(s.x)))
            loss = s.error(hidden)
        with s.handle.scale_loss(loss, s.one) as scaled_loss:
            tape.backward(scaled_loss)
        s.one.step()
        del tape


def line_search(s: Setting) -> None:
    """Weights are moved by hand along one gradient, whose graph is asked again."""
    for _ in range(STEPS):
        s.clear()
        _, loss = s.forward()
        for _ in range(2):
            loss.backward()
            for param in s.first.parameters():
                param.write(param.to_host() - 0.25 * param.grad.to_host())
            s.seen.append(float(s.forward()[1].value.to_host()[0]))


def summed_for_logging(s: Setting) -> None:
    total: Any = None
    for _ in range(STEPS):
        s.clear()
        _, loss = s.forward()
        s.backward(loss, s.one)
        total = loss if total is None else ag.add(total, loss)
        s.one.step()
    s.seen.append(float(total.value.to_host()[0]))


def retained(s: Setting) -> None:
    for backward in (s.backward, s.on_tape):
        s.clear()
        _, loss = s.forward()
        backward(loss, s.one, retain_graph=True)
        s.one.step()
        backward(loss, s.one)
        s.one.step()


def frozen_later(s: Setting) -> None:
    """One of two optimizers steps every other time."""
    for step in range(STEPS):
        hidden = s.hidden()
        s.backward(s.error(s.second(hidden)), [s.one, s.other])
        s.one.step()
        if step % 2:
            s.other.step()
            s.clear()


RUN = (
    plain, second_backward_before_the_step, gan, gan_generator_first, graph_of_another_optimizer,
    two_losses_of_which_one_runs_again, one_optimizer_for_two_losses_in_turn, accumulation, checkpointed, recorded,
    truncated_by_values, truncated_by_tapes, line_search, summed_for_logging, retained, frozen_later,
)  # fmt: skip

MOVED = (
    gan_generator_first, graph_of_another_optimizer, two_losses_of_which_one_runs_again,
    one_optimizer_for_two_losses_in_turn, line_search, retained,
)  # fmt: skip


STEPPED = [
    *product(RUN, [_SGD]), *product((plain, gan, gan_generator_first, graph_of_another_optimizer), [UsersSGD])
]  # fmt: skip


@pytest.mark.parametrize("run", STEPPED, ids=lambda run: f"{run[0].__name__}-{getattr(run[1], '__name__', 'SGD')}")
def test_a_loop_runs_as_where_graphs_are_kept(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, run: tuple[Loop, Callable[..., Any]]
) -> None:
    """Optimizers of the users count from their first step on: what they hold is looked for."""
    (loop, optimizer), numbers = run, []
    for kept in (False, True):
        with monkeypatch.context() as patch:
            if kept:
                patch.setattr(graphs, "stepped", lambda params, optimizer: None)
            setting = Setting(queue, optimizer)
            loop(setting)
            assert loop is line_search or setting.handle.history[-1].stepped
            numbers.append(setting.numbers())
            setting.handle.shutdown()
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("loop", RUN)
@pytest.mark.parametrize("caching", [True, "last_use"])
def test_copies_of_weights_that_go_after_their_last_use_change_no_bit(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, caching: bool | str, loop: Loop
) -> None:
    """With the default they stay where another backward may come."""
    numbers = []
    for goes in (False, True):
        monkeypatch.setattr(policies, "_LARGE", 0 if goes else 1 << 60)
        setting = Setting(queue, enable_caching=caching if goes and loop not in MOVED else True)
        loop(setting)
        numbers.append(setting.numbers())
        setting.handle.shutdown()
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("loop", MOVED)
def test_no_graph_is_run_twice_whose_copies_are_gone_and_weights_have_moved(queue: cl.CommandQueue, loop: Loop) -> None:
    with pytest.raises(RuntimeError, match=r"the parameter was written to since.*pass enable_caching=True"):
        loop(Setting(queue, enable_caching="last_use"))


def test_what_is_asked_of_a_pass_holds_when_it_is_repeated(queue: cl.CommandQueue) -> None:
    setting = Setting(queue, loss_scale=amp.ScaleRule(initial=2.0**24))
    retained(setting)
    assert setting.handle.history[0].repeats > 0


# ---------------------------------------------------------------------------------------------- loops that raise


def again(s: Setting) -> Iterator[Node]:
    _, loss = s.forward()
    yield loss
    yield loss


def from_what_is_held(s: Setting) -> Iterator[Node]:
    made, loss = s.forward()
    yield loss
    yield ag.sum(made)


def with_a_state(s: Setting) -> Iterator[Node]:
    hidden = s.hidden()
    yield s.error(hidden)
    hidden = s.first(hidden)
    yield s.error(hidden)


def beside_its_value(s: Setting) -> Iterator[Node]:
    hidden = s.hidden()
    yield s.error(hidden)
    yield s.error(ag.add(ag.tensor(hidden.value), hidden))


@pytest.mark.filterwarnings("ignore:gradients of a loss that was not scaled:UserWarning")
@pytest.mark.parametrize("skipped", [False, True], ids=["stepped", "skipped"])
@pytest.mark.parametrize("spelling", ["node", "tape", "plain"])
@pytest.mark.parametrize("losses", [again, from_what_is_held, with_a_state, beside_its_value])
def test_a_backward_over_what_is_gone_says_the_word(
    queue: cl.CommandQueue, losses: Callable[[Setting], Iterator[Node]], spelling: str, skipped: bool
) -> None:
    setting = Setting(queue)
    runs: dict[str, Callable[[Any, Any], None]] = {
        "node": setting.backward, "tape": setting.on_tape, "plain": lambda loss, _: loss.backward()
    }  # fmt: skip
    run = runs[spelling]
    made = losses(setting)
    run(next(made), setting.one)
    if skipped:
        grad = setting.first.parameters()[0].grad
        grad.write(np.full(grad.shape, np.inf, np.float32))
    setting.one.step()
    assert setting.handle.last_step.stepped is not skipped
    before = setting.first.parameters()[0].grad
    later = next(made)
    with pytest.raises(RuntimeError, match=rf"graph has been freed.*{WORD}"):
        run(later, setting.one)
    assert setting.first.parameters()[0].grad is before


# ---------------------------------------------------------------------------------------------- memory


def logged(s: Setting, keep: list[Any]) -> None:
    made, loss = s.forward()
    keep += [made, loss]
    s.backward(loss, s.one)
    s.one.step()
    keep.append(ag.softmax(made))


def on_a_tape(s: Setting, keep: list[Any]) -> None:
    with ag.Tape() as tape:
        made, loss = s.forward()
    keep += [made, loss]
    with s.handle.scale_loss(loss, s.one) as scaled_loss:
        tape.backward(scaled_loss)
    s.one.step()


def by_a_grad_scaler(s: Setting, keep: list[Any]) -> None:
    scaler = amp.GradScaler(init_scale=16.0)
    made, loss = s.forward()
    keep += [made, loss]
    scaler.scale(loss).backward()
    scaler.step(s.one)
    scaler.update()


def without_a_scale(s: Setting, keep: list[Any]) -> None:
    made, loss = s.forward()
    keep += [made, loss]
    loss.backward()
    s.one.step()


def skipped(s: Setting, keep: list[Any]) -> None:
    made, loss = s.forward()
    keep += [made, loss]
    s.backward(loss, s.one)
    grad = s.first.parameters()[0].grad
    grad.write(np.full(grad.shape, np.inf, np.float32))
    s.one.step()
    assert not s.handle.last_step.stepped


def accumulated(s: Setting, keep: list[Any]) -> None:
    for _ in range(2):
        made, loss = s.forward()
        keep += [made, loss]
        s.backward(loss, s.one)
    s.one.step()


def of_two_optimizers(s: Setting, keep: list[Any]) -> None:
    made = s.hidden()
    loss = s.error(s.second(made))
    keep += [made, loss]
    s.backward(loss, [s.one, s.other])
    s.one.step()
    s.other.step()


def of_two_losses(s: Setting, keep: list[Any]) -> None:
    """PyTorch's idiom: the last backward through a graph says nothing."""
    made, loss = s.forward()
    late = ag.mul(ag.sum(ag.mul(made, made)), LOSS_FACTOR)
    keep += [made, late]
    s.backward(loss, s.one, retain_graph=True)
    s.backward(late, s.one)
    s.one.step()


def fine_tuned(s: Setting, keep: list[Any]) -> None:
    """What is below has gradients, and no optimizer."""
    made = s.third(ag.tensor(s.x))
    loss = s.error(s.second(made))
    keep += [made, loss]
    s.backward(loss, s.other)
    s.other.step()


def of_a_trained_input(s: Setting, keep: list[Any]) -> None:
    x = Node(to_device(s.queue, s.x.to_host()), requires_grad=True)
    made = s.first(x)
    loss = s.error(made)
    keep += [made, loss]
    s.backward(loss, s.one)
    s.one.step()


HOLD = (
    logged, on_a_tape, by_a_grad_scaler, without_a_scale, skipped, accumulated, of_two_optimizers, of_two_losses,
    fine_tuned, of_a_trained_input,
)  # fmt: skip


def _nbytes(node: Node) -> int:
    grad = vars(node).get("grad")
    return bridge.nbytes(node.value) + (0 if grad is None else bridge.nbytes(grad))


@pytest.mark.filterwarnings("ignore:.*(no optimizer steps|loss that was not scaled):UserWarning")
@pytest.mark.parametrize("step", HOLD)
def test_a_loop_that_holds_its_nodes_takes_what_one_takes_that_does_not(
    queue: cl.CommandQueue, step: Callable[[Setting, list[Any]], None]
) -> None:
    peaks = []
    for held in (False, False, True):  # the first time something more is made that stays
        setting = Setting(queue, partial(Adam, lr=1e-3))
        last: list[Any] = []
        gc.collect()
        amp.max_memory(reset=True)
        before = amp.max_memory()
        for number in range(STEPS + 1):
            if number == STEPS:
                values = sum(map(_nbytes, last))
                amp.max_memory(reset=True)
            setting.clear()
            now = list[Any]()
            step(setting, now)
            last = now if held else []
        peaks.append(amp.max_memory() - before - values)
        del last, now
        setting.handle.shutdown()
    assert 0 < peaks[2] <= peaks[1]


@pytest.mark.parametrize("explicit", [False, True])
def test_a_tape_keeps_gradients_of_computed_nodes_if_told_so(queue: cl.CommandQueue, explicit: bool) -> None:
    setting = Setting(queue)
    with ag.Tape(retain_grads=True) if explicit else ag.Tape() as tape:
        made, loss = setting.forward()
    tape.backward(loss)
    assert loss.grad is not None
    if explicit:
        assert made.grad.shape == made.shape
    else:
        with pytest.warns(UserWarning, match=re.escape("ag.Tape(retain_grads=True)")):
            assert made.grad is None
        assert "grad=None" in repr(made)  # without a word
    setting.handle.shutdown()
    assert Node(setting.x).grad is None


def test_nodes_and_tensors_of_a_step_have_their_attributes_in_no_dict(queue: cl.CommandQueue) -> None:
    s = Setting(queue)
    for _ in range(2):
        s.one.zero_grad()
        with ag.Tape() as tape:
            loss = loss_of(s.first, (s.x, s.y))
        with s.handle.scale_loss(loss, s.one) as scaled:
            tape.backward(scaled)
        values = [node.value for node in tape.nodes]
        params = s.first.parameters()
        looked_at = [*tape.nodes, *values, *params, *(param.grad for param in params)]
        s.one.step()
    assert not [x for x in looked_at if any(isinstance(part, dict) for part in gc.get_referents(x))]


def test_a_retained_graph_is_not_over_at_the_step(queue: cl.CommandQueue) -> None:
    s = Setting(queue)
    for is_stepped in (False, True):
        loss = loss_of(s.first, (s.x, s.y))
        nodes = bridge.graph(loss)
        of_step = [node for node in nodes if node.parents], [node.value for node in nodes if not node.parents]
        assert [graphs.is_over_at_step(*of_step, retained) for retained in (False, True)] == [is_stepped, False]
        scaled_backward(s.handle, loss, s.one)
        s.one.step()


def test_a_task_that_was_begun_in_a_pass_holds_nothing_of_it(queue: cl.CommandQueue) -> None:
    setting = Setting(queue)
    _, loss = setting.forward()
    with setting.handle.scale_loss(loss, setting.one) as scaled_loss:
        context = contextvars.copy_context()  # as asyncio makes one for a task, which may live on
        scaled_loss.backward()
    setting.one.step()
    grads = [weakref.ref(param.grad) for param in setting.one.params]
    setting.one.zero_grad()
    for param in setting.one.params:
        param.grad = None
    gc.collect()
    assert not any(grad() for grad in grads), context
