"""A gradient carries the scale that made it: whoever unscales, adds, clips or steps gets right numbers, or an error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd.engine import apply_op
from netcl.optim import SGD, Adam, clip

from clamp import amp
from clamp.bridge import Parameter, Tensor
from clamp.ops.loss_scale import AppliedScale
from clamp.params import gradient_marks, masters
from clamp.params.writes import writes
from clamp.scaling.dynamic_scale import DynamicLossScale, ScaleRule
from clamp.scaling.loss_scale import LossScale, NoLossScale
from tests.compat.test_scalers import FACES
from tests.networks import LR, Task, scaled_backward
from tests.reference import to_device

pytestmark = pytest.mark.usefixtures("shut_down")

SCALE = 8.0


@pytest.fixture
def handle() -> amp.AmpHandle:
    return amp.init(loss_scale=SCALE)  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------- inside the with


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_backward_of_the_loss_itself_is_refused_on_the_spot(task: Task, dtype: str) -> None:
    handle = amp.init(dtype=dtype, loss_scale=SCALE)
    task.set_gradient(5.0)
    for run in (lambda loss: loss.backward(), lambda loss: ag.Tape().backward(loss)):
        loss = task.loss()
        with pytest.raises(RuntimeError, match="from the loss itself"), handle.scale_loss(loss, task.optimizer):  # noqa: PT012
            run(loss)
            pytest.fail("the error comes at the call")
        assert task.gradient == 5.0
    task.backward(handle)
    assert task.gradient == 6.0


def test_where_nothing_is_scaled_the_loss_itself_will_do(task: Task) -> None:
    handle = amp.init(dtype="bfloat16")
    loss = task.loss()
    with handle.scale_loss(loss, task.optimizer):
        loss.backward()
    task.optimizer.step()
    assert task.moved == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_pass_that_delivers_nothing_raises_and_changes_nothing(task: Task, dtype: str) -> None:
    handle = amp.init(dtype=dtype)
    other = Task(task.queue)
    task.set_gradient(5.0)
    state = amp.state_dict()
    with pytest.raises(RuntimeError, match="no gradient has reached"), handle.scale_loss(task.loss(), task.optimizer):
        pass
    with (
        pytest.raises(RuntimeError, match="no gradient has reached"),
        handle.scale_loss(other.loss(), task.optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    assert task.gradient == 5.0
    assert amp.state_dict() == state
    assert handle.last_step is None


def test_gradients_of_another_loss_alone_are_refused(task: Task, handle: amp.AmpHandle) -> None:
    with pytest.raises(RuntimeError, match="not scaled"), handle.scale_loss(task.loss(), task.optimizer):
        task.loss(3.0).backward()
    assert task.weight.grad is None


def test_a_loss_without_a_graph_is_refused_at_once(task: Task, handle: amp.AmpHandle) -> None:
    def of_a_dead_tape() -> Any:
        with ag.Tape():
            return task.loss()

    data = ag.tensor(to_device(task.queue, [1.0]))
    constant = r"nothing that is trained .*\)"
    for loss, words in (
        (of_a_dead_tape(), "tape"), (ag.sum(data), f"{constant}, or the tape"), (data, f"{constant}$")
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=words), handle.scale_loss(loss, task.optimizer):
            pytest.fail("the error comes at the beginning")
        with pytest.raises(RuntimeError, match=words):
            loss.backward()
    with pytest.raises(RuntimeError, match="tape"):
        amp.GradScaler().scale(of_a_dead_tape())


@pytest.mark.parametrize("inner_first", [False, True])
def test_nested_passes_add_up(task: Task, inner_first: bool) -> None:
    handle = amp.init(loss_scale=256.0)
    with handle.scale_loss(task.loss(1.0), task.optimizer) as first:
        if not inner_first:
            first.backward()
        scaled_backward(handle, task.loss(2.0), task.optimizer)
        if inner_first:
            first.backward()
    assert task.gradient == 3.0
    task.optimizer.step()
    assert task.moved == 3


@pytest.mark.parametrize("together", [False, True])
def test_nested_passes_of_two_scales_add_up(task: Task, together: bool) -> None:
    handle = amp.init()
    optimizer = handle.wrap_optimizer(task.optimizer, num_loss=2)
    handle.scalers[1].set_scale(256.0)
    handle.scalers[2].set_scale(16.0)
    with optimizer.scale_loss(task.loss(1.0)) as first:
        if not together:
            first.backward()
        with optimizer.scale_loss(task.loss(2.0)) as second:
            second.backward()
            if together:
                first.backward()
    assert task.gradient == 3.0
    optimizer.step()
    assert task.moved == 3


def test_a_sum_of_scaled_losses_is_one_backward(task: Task, handle: amp.AmpHandle) -> None:
    with (
        handle.scale_loss(task.loss(1.0), task.optimizer) as first,
        handle.scale_loss(task.loss(2.0), task.optimizer) as second,
    ):
        ag.add(first, second).backward()
    assert task.gradient == 3.0


def test_mixed_losses_are_refused(task: Task, handle: amp.AmpHandle) -> None:
    scaler, other = amp.GradScaler(4.0), amp.GradScaler(2.0)
    with pytest.raises(RuntimeError, match="a part is not"):
        ag.add(scaler.scale(task.loss()), task.loss()).backward()
    with pytest.raises(RuntimeError, match="different loss scales"):
        ag.add(scaler.scale(task.loss()), other.scale(task.loss())).backward()
    with pytest.raises(RuntimeError, match="twice"):
        scaler.scale(scaler.scale(task.loss())).backward()
    with pytest.raises(RuntimeError, match="different loss scales"):
        scaler.scale(other.scale(task.loss())).backward()
    assert task.weight.grad is None


def test_zero_grad_inside_the_with_counts(task: Task, handle: amp.AmpHandle) -> None:
    for clear in (task.optimizer.zero_grad, lambda: setattr(task.weight, "grad", None)):
        task.backward(handle, 5.0)
        with handle.scale_loss(task.loss(2.0), task.optimizer) as scaled_loss:
            clear()
            scaled_loss.backward()
        assert task.gradient == 2.0
    with pytest.raises(KeyError), handle.scale_loss(task.loss(), task.optimizer):  # noqa: PT012
        task.optimizer.zero_grad()
        raise KeyError
    assert task.gradient == 2.0, "an exception leaves the gradients as they were"


def test_what_is_cleared_inside_the_with_and_not_reached_again_is_gone(task: Task, handle: amp.AmpHandle) -> None:
    other = Task(task.queue)
    optimizer = SGD([task.weight, other.weight], lr=LR)
    for each in (task, other):
        each.set_gradient(3.0)
    with handle.scale_loss(task.loss(), optimizer) as scaled_loss:
        optimizer.zero_grad()
        scaled_loss.backward()
    assert task.gradient == 1.0
    assert other.weight.grad is None


def test_plain_gradients_before_within_and_after_add_up(task: Task) -> None:
    handle = amp.init(dtype="float32", loss_scale=SCALE)
    task.loss(1.0).backward()
    with handle.scale_loss(task.loss(2.0), task.optimizer) as scaled_loss:
        task.loss(4.0).backward()
        scaled_loss.backward()
        task.loss(8.0).backward()
    task.loss(16.0).backward()
    assert task.gradient == 31.0
    task.optimizer.step()
    assert task.moved == 31


@pytest.mark.parametrize("before", [None, 5.0])
@pytest.mark.parametrize("fails_first", [True, False])
def test_an_exception_in_backward_leaves_every_gradient(
    task: Task, handle: amp.AmpHandle, fails_first: bool, before: float | None
) -> None:
    other = Parameter.from_host(task.queue, np.ones(3, np.float32))
    if before is not None:
        task.set_gradient(before)

    def fail(grad: Tensor) -> list[Tensor]:
        raise KeyboardInterrupt

    def half_way() -> Any:
        of = ag.tensor(other if before is None else task.weight)
        parts = ag.sum(ag.apply_op(lambda x: to_device(task.queue, x.to_host()), fail, of)), task.loss()
        return ag.add(*(parts if fails_first else reversed(parts)))

    with pytest.raises(KeyboardInterrupt):
        half_way().backward()
    with pytest.raises(KeyboardInterrupt), handle.scale_loss(half_way(), task.optimizer) as scaled_loss:
        scaled_loss.backward()
    assert other.grad is None
    assert task.weight.grad is None if before is None else task.gradient == before
    task.backward(handle)
    assert task.gradient == 1.0 + (before or 0.0)


# ---------------------------------------------------------------------------------------------- several models


def test_a_generators_leftover_is_divided_by_its_own_scale(queue: cl.CommandQueue) -> None:
    """A GAN with both zero_grad at the start, and ``fake`` not detached."""
    handle = amp.init(loss_scale=2.0**10)
    generator, critic = Task(queue, (4, 4)), Task(queue, (4, 3))

    def fake() -> Any:
        return ag.matmul_op(generator.x, ag.tensor(generator.weight))

    def judged(x: Any, size: float) -> Any:
        return ag.mul(ag.sum(ag.matmul_op(x, ag.tensor(critic.weight))), size)

    made = fake()
    scaled_backward(handle, judged(made, 1 / 8), critic.optimizer)
    leftover = generator.weight.grad
    assert gradient_marks.scale_of(leftover) is not None
    with pytest.raises(RuntimeError, match="still multiplied by the loss scale"):
        generator.optimizer.step()
    with pytest.raises(RuntimeError, match="still multiplied by the loss scale"):
        clip.clip_grad_norm([generator.weight], 1.0)
    critic.optimizer.step()
    critic.weight.write(np.ones((4, 3), np.float32))
    scaled_backward(handle, judged(fake(), 1 / 4), generator.optimizer)
    assert generator.gradient == 2 * 3 / 8 + 2 * 3 / 4
    generator.optimizer.step()
    assert handle.last_step.stepped


def test_a_leftover_that_is_not_reached_again_is_unscaled(queue: cl.CommandQueue) -> None:
    handle = amp.init(loss_scale=SCALE)
    first, second = Task(queue), Task(queue)
    both = SGD([first.weight, second.weight], lr=LR)
    scaled_backward(handle, ag.add(first.loss(3.0), second.loss()), second.optimizer)
    assert first.gradient == 3.0 * SCALE
    scaled_backward(handle, second.loss(), both)
    assert (first.gradient, second.gradient) == (3.0, 2.0)


def test_two_nodes_of_one_parameter_share_its_gradient(task: Task, handle: amp.AmpHandle) -> None:
    kept = ag.tensor(task.weight)

    def regularised() -> Any:
        penalty = ag.mul(ag.sum(ag.mul(kept, kept)), 0.5)  # gradient: the weight
        return ag.add(ag.add(task.loss(2.0), penalty), ag.mul(ag.sum(kept), 4.0))

    for _ in range(2):
        task.optimizer.zero_grad()
        scaled_backward(handle, regularised(), task.optimizer)
        assert task.gradient == 2 + 1 + 4
    assert kept.grad is not None


def test_two_nodes_of_one_parameter_inside_disabled_casts(task: Task, handle: amp.AmpHandle) -> None:
    kept = ag.tensor(task.weight)
    with handle.disable_casts():
        loss = ag.add(ag.add(ag.sum(ag.mul(kept, 3.0)), task.loss(2.0)), ag.sum(kept))
    loss.backward()
    assert task.gradient == 3 + 2 + 1


def test_all_that_waits_for_a_pass_is_added_at_its_end(task: Task, handle: amp.AmpHandle) -> None:
    task.set_gradient(1.0)
    with handle.scale_loss(task.loss(2.0), task.optimizer) as outer:
        outer.backward()
        task.backward(handle, 4.0)
        outer.backward()
    assert task.gradient == 1 + 2 + 4 + 2


def test_a_scaled_loss_and_a_constant_are_one_loss(task: Task, handle: amp.AmpHandle) -> None:
    constant = ag.tensor(to_device(task.queue, np.float32(3.0)))
    with handle.scale_loss(task.loss(), task.optimizer) as scaled_loss:
        ag.add(scaled_loss, constant).backward()
    assert task.gradient == 1.0


def test_a_pass_given_up_while_it_is_unscaled_counts_for_nothing(
    task: Task, handle: amp.AmpHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.set_gradient(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(gradient_marks, "added", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            task.backward(handle, np.inf)
    assert task.gradient == 1.0
    task.step(handle)
    assert handle.last_step.stepped
    assert task.moved == 2


# ---------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("name", ["clip_grad_norm", "clip_grad_norm_device"])
def test_a_gradient_that_two_parameters_share_is_clipped_once(queue: cl.CommandQueue, name: str) -> None:
    first, second = (Parameter.from_host(queue, np.zeros(2, np.float32)) for _ in range(2))
    optimizer = SGD([first, second], lr=LR)
    handle = amp.init(loss_scale=SCALE)
    scaled_backward(handle, ag.sum(ag.add(ag.tensor(first), ag.tensor(second))), optimizer)
    assert first.grad is second.grad
    np.testing.assert_array_equal(first.grad.to_host(), np.ones(2))  # divided once
    getattr(clip, name)([first, second, first], 1.0)  # the norm of four ones is 2
    for param in (first, second):
        np.testing.assert_allclose(param.grad.to_host(), 0.5, rtol=1e-6)
    scaler = amp.GradScaler(SCALE)  # which takes gradients that nothing is known of for scaled ones
    scaler.scale(ag.sum(ag.tensor(second)))
    scaler.step(optimizer)
    for param in (first, second):
        np.testing.assert_allclose(param.to_host(), -0.5 * LR, rtol=1e-6)


@pytest.mark.parametrize("name", ["clip_grad_norm", "clip_grad_norm_device"])
def test_clipping_scaled_gradients_is_refused_where_casts_are_off_too(
    task: Task, handle: amp.AmpHandle, name: str
) -> None:
    with handle.scale_loss(task.loss(), task.optimizer) as scaled_loss:
        scaled_loss.backward()
        with handle.disable_casts(), pytest.raises(RuntimeError, match=name):
            getattr(clip, name)([task.weight], 1.0)


# ---------------------------------------------------------------------------------------------- changing hands


@pytest.fixture
def fp32() -> amp.AmpHandle:
    """AMP without casts: what is wrong here is wrong by a scale, not by rounding."""
    return amp.init(dtype="float32")  # type: ignore[return-value]


@pytest.mark.parametrize("face", FACES)
def test_an_unscaled_backward_is_not_divided(task: Task, fp32: amp.AmpHandle, face: str) -> None:
    scaler = FACES[face](scale=SCALE)
    scaler.scale(task.loss())  # it has scaled something
    task.loss().backward()
    with pytest.warns(UserWarning, match="not divided by the loss scale"):  # PyTorch, Paddle and netcl divide it
        scaler.step(task.optimizer)
    assert task.moved == 1


def test_unscaled_float16_gradients_are_used_with_a_warning(task: Task) -> None:
    scaler = amp.GradScaler(SCALE)
    for number in range(2):
        task.optimizer.zero_grad()
        with amp.autocast():
            scaler.scale(task.loss())
            task.loss().backward()
        if number == 0:
            with pytest.warns(UserWarning, match="not scaled"):
                scaler.step(task.optimizer)
        else:
            scaler.step(task.optimizer)
        scaler.update()
    assert task.moved == 2


def test_gradscalers_gradients_then_scale_loss(task: Task, fp32: amp.AmpHandle) -> None:
    handle, scaler = fp32, amp.GradScaler(SCALE)
    scaler.scale(task.loss()).backward()
    task.backward(handle)
    assert task.gradient == 2.0
    task.optimizer.step()
    assert task.moved == 2


def test_two_gradscalers_on_one_gradient(task: Task, fp32: amp.AmpHandle) -> None:
    first, second = amp.GradScaler(8.0), amp.GradScaler(32.0)
    first.scale(task.loss()).backward()
    second.scale(task.loss()).backward()
    with pytest.raises(RuntimeError, match="another scaler"):
        first.step(task.optimizer)
    second.step(task.optimizer)
    assert task.moved == 2


@pytest.mark.parametrize("stepper", FACES)
def test_scaled_by_one_and_stepped_by_another_raises(task: Task, fp32: amp.AmpHandle, stepper: str) -> None:
    amp.GradScaler(8.0).scale(task.loss()).backward()
    other = FACES[stepper](scale=16.0)
    other.scale(task.loss())
    with pytest.raises(RuntimeError, match="another scaler"):
        other.step(task.optimizer)
    assert (task.moved, task.gradient) == (0, 8.0)


def test_accumulated_across_an_update_that_grew_the_scale(task: Task, fp32: amp.AmpHandle) -> None:
    scaler, other = amp.GradScaler(8.0, growth_interval=1), Task(task.queue)
    scaler.scale(task.loss()).backward()
    scaler.scale(other.loss()).backward()
    scaler.step(other.optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0
    scaler.scale(task.loss()).backward()
    scaler.step(task.optimizer)
    assert task.moved == 2


@pytest.mark.parametrize("change", [*FACES, "load_state_dict"])
@pytest.mark.parametrize("unit", [16.0, 2.0])
def test_a_scale_that_changes_between_backward_and_step(
    task: Task, fp32: amp.AmpHandle, change: str, unit: float
) -> None:
    scaler = FACES[change if change in FACES else "pytorch"](scale=8.0)
    for _ in range(2):  # of the new scale, added to the old one's
        scaler.scale(task.loss()).backward()
        if change == "load_state_dict":
            scaler.one.load_state_dict({**scaler.one.state_dict(), "scale": unit})
        else:
            scaler.set_scale(unit)
    scaler.step(task.optimizer)
    assert task.moved == 2


def test_the_handles_scale_may_be_loaded_between_passes(task: Task) -> None:
    handle = amp.init()
    with handle.scale_loss(task.loss(), task.optimizer) as scaled_loss:
        scaled_loss.backward()
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}})
    assert task.gradient == 1.0


def test_a_users_gradient_is_legal(task: Task, handle: amp.AmpHandle) -> None:
    task.set_gradient(3.0)
    task.optimizer.step()
    assert task.moved == 3
    task.backward(handle, 2.0)
    assert task.gradient == 5.0, "inside scale_loss it is the true one"
    scaler = amp.GradScaler(SCALE)
    scaler.scale(task.loss())
    task.set_gradient(3.0 * SCALE)
    scaler.step(task.optimizer)
    assert task.moved == 6, "a GradScaler divides it, as PyTorch's does"


def test_a_scale_that_moves_while_backward_runs_is_not_this_passes(queue: cl.CommandQueue) -> None:
    """A node above the scaled loss, or another thread, may set it: the gradient is what its mark says."""
    weight = Parameter.from_host(queue, np.ones(2, np.float32))
    optimizer = SGD([weight], lr=0.5)
    with amp.init(loss_scale=64.0) as handle:
        (scaler,) = handle.scalers

        def moves(grad: Tensor) -> list[Tensor]:
            scaler.set_scale(scaler.scale * 4)
            return [grad]

        for expected in (1.0, 2.0):
            with handle.scale_loss(ag.sum(ag.tensor(weight, requires_grad=True)), optimizer) as scaled_loss:
                apply_op(lambda x: x, moves, scaled_loss).backward()
            np.testing.assert_array_equal(weight.grad.to_host(), np.full(2, expected))


#: What may be known of a gradient, and who has heard of it where it was checked.
KNOWN: dict[str, gradient_marks.Mark | None] = {
    "a user's": None,
    "plain": gradient_marks.PLAIN,
    "through float16": gradient_marks.PLAIN_HALF,
}
HEARD = {
    "checked": frozenset({"a guard"}),
    "checked for two": frozenset({"a guard", "another"}),
    "finite": frozenset({gradient_marks.FINITE}),
}


def mark_named(name: str, scale: AppliedScale) -> gradient_marks.Mark | None:
    """Made now: what was checked is known as long as nothing has been written there since."""
    if name in HEARD:
        return gradient_marks.checked(HEARD[name])
    return gradient_marks.Mark(scale) if name == "scaled" else KNOWN[name]


@pytest.mark.parametrize("first", [*KNOWN, *HEARD, "scaled"])
@pytest.mark.parametrize("second", [*KNOWN, *HEARD, "scaled"])
def test_a_sum_is_known_of_as_far_as_both_are(queue: cl.CommandQueue, first: str, second: str) -> None:
    scale = LossScale(4.0).applied()
    grads = [to_device(queue, np.full(2, value)) for value in (8.0, 16.0)]
    for grad, name in zip(grads, (first, second), strict=True):
        gradient_marks.set_mark(grad, mark_named(name, scale))
    total = gradient_marks.added(*grads)
    mark = gradient_marks.mark_of(total)
    if "scaled" in (first, second):  # a user's counts as of that scale
        assert mark is not None
        assert mark.scale is scale
        times = [1 if name in ("a user's", "scaled") else 4 for name in (first, second)]
        np.testing.assert_array_equal(total.to_host(), np.full(2, 8.0 * times[0] + 16.0 * times[1]))
        return
    np.testing.assert_array_equal(total.to_host(), np.full(2, 24.0))
    if first == second == "a user's":
        assert mark is None
        return
    assert mark is not None
    assert mark.scale is None
    if first in HEARD and second in HEARD:
        heard = HEARD[second] if first == "finite" else HEARD[first] if second == "finite" else {"a guard"}
        assert mark.is_checked
        assert mark.heard == (HEARD[first] if first == second else heard)
    else:
        assert not mark.is_checked
        assert mark.lost_bits == ("through float16" in (first, second))


def test_bits_that_a_gradient_lost_are_lost_in_a_sum_with_it(task: Task) -> None:
    handle = amp.init()
    task.loss().backward()
    with handle.disable_casts():
        task.loss().backward()
    with pytest.warns(UserWarning, match="not scaled"):
        task.optimizer.step()
    assert task.moved == 2


def test_bits_are_lost_wherever_in_the_graph_float16_is(task: Task) -> None:
    x = ag.tensor(to_device(task.queue, np.ones((2, 4))))
    amp.init()
    doubled = ag.mul(ag.tensor(task.weight), 2.0)
    product = ag.matmul_op(x, doubled)
    loss = ag.sum(ag.add(product, ag.tensor(to_device(task.queue, np.ones((2, 3))))))
    assert [node.value.dtype for node in (doubled, product, loss)] == ["float32", "float16", "float32"]
    loss.backward()
    with pytest.warns(UserWarning, match="not scaled"):
        task.optimizer.step()


def test_a_checked_gradient_does_not_answer_for_what_is_added_to_it(task: Task, handle: amp.AmpHandle) -> None:
    with handle.disable_casts():
        ag.mul(task.loss(2e38), 4.0).backward()
    task.step(handle)
    assert not handle.last_step.stepped
    assert task.moved == 0


def test_what_is_not_scaled_is_looked_at_all_the_same(task: Task, fp32: amp.AmpHandle) -> None:
    scaler = amp.GradScaler(SCALE)
    scaler.scale(task.loss())
    task.loss(np.inf).backward()
    with pytest.warns(UserWarning, match="not scaled"):
        scaler.step(task.optimizer)
    assert task.moved == 0
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


def test_a_users_gradient_is_looked_at_at_every_step(task: Task, fp32: amp.AmpHandle) -> None:
    task.set_gradient(1.0)
    task.optimizer.step()
    task.weight.grad.write(np.full((4, 3), np.nan, np.float32))
    task.optimizer.step()
    assert not fp32.last_step.stepped
    assert task.moved == 1


def test_a_users_gradient_stays_the_users_after_a_step(task: Task, fp32: amp.AmpHandle) -> None:
    """A GradScaler takes what nobody but the user knows of for scaled, before the step and after."""
    task.set_gradient(SCALE)
    task.optimizer.step()
    assert task.moved == SCALE
    scaler = amp.GradScaler(SCALE)
    scaler.scale(task.loss())
    scaler.step(task.optimizer)
    assert task.moved == SCALE + 1


def test_a_bad_gradient_that_stays_is_skipped_again(task: Task, fp32: amp.AmpHandle) -> None:
    task.loss(np.inf).backward()
    for _ in range(2):
        task.optimizer.step()
        assert not fp32.last_step.stepped
    assert task.moved == 0


# ---------------------------------------------------------------------------------------------- the state itself


def test_a_scale_that_moves_is_kept_for_whoever_holds_it(queue: cl.CommandQueue) -> None:
    scale = DynamicLossScale(8.0, ScaleRule(interval=1))
    x = to_device(queue, [1.0, 3.0])
    scale.scale_loss(x)
    first = scale.applied()
    assert scale.applied() is first, "one object for as long as the scale stays"
    scale.update(1, 1)
    second = scale.applied()
    scale.set_scale(3.0)
    third = scale.applied()
    for applied, expected in ((first, 8.0), (second, 16.0), (third, 3.0)):
        assert scale.made(applied)
        np.testing.assert_array_equal(applied.multiply(x, "float32").to_host(), [expected, 3 * expected])
        np.testing.assert_allclose(applied.divide(x).to_host() * expected, [1, 3], rtol=1e-6)
        assert not LossScale(8.0).made(applied)
    assert not scale.overflowed(1)
    one = NoLossScale().applied()
    assert one.multiply(x, "float32") is x
    assert one.divide(x) is x


def test_what_is_divided_to_be_added_elsewhere_is_no_overflow_of_its_scaler(task: Task, fp32: amp.AmpHandle) -> None:
    """Of the scaler that takes the sum over it is one."""
    first, second = amp.GradScaler(8.0), amp.GradScaler(32.0)
    other = Task(task.queue)
    first.scale(task.loss(np.inf)).backward()
    first.scale(other.loss()).backward()
    second.scale(task.loss()).backward()
    first.step(other.optimizer)
    first.update()
    second.step(task.optimizer)
    second.update()
    assert (other.moved, task.moved) == (1, 0)
    assert (first.get_scale(), second.get_scale()) == (8.0, 16.0)


@pytest.mark.parametrize("narrow", [False, True])
def test_nothing_is_copied_when_nobody_holds_the_old_scale(
    task: Task, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = amp.init()
    if narrow:
        masters.narrow([task.weight], "float16", [task.optimizer])
    copies: list[AppliedScale] = []
    keep = AppliedScale.keep
    monkeypatch.setattr(AppliedScale, "keep", lambda self, queue: [copies.append(self), keep(self, queue)][1])
    for _ in range(3):
        task.optimizer.zero_grad()
        task.step(handle)
    assert copies == []


def test_threads_with_a_model_each_do_not_mix_up_their_overflows(queue: cl.CommandQueue) -> None:
    """One queue, one handle, one scale: one thread's gradients overflow, the other's do not."""
    handle = amp.init(dtype="float32", loss_scale="dynamic")
    tasks = [Task(queue), Task(queue)]
    for task in tasks:
        task.step(handle)
        task.weight.write(np.ones((4, 3), np.float32))
    rounds, stepped = 30, {0: [], 1: []}
    barrier = threading.Barrier(2)

    def train(number: int) -> None:
        task = tasks[number]
        for index in range(rounds):
            barrier.wait()
            task.optimizer.zero_grad()
            overflows = number == 1 and index % 2 == 0
            task.step(handle, np.inf if overflows else 1.0)
            stepped[number].append(handle._scaling.guard(task.optimizer).last.stepped)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    assert stepped[0] == [True] * rounds
    assert stepped[1] == [index % 2 == 1 for index in range(rounds)]
    assert (tasks[0].moved, tasks[1].moved) == (rounds, rounds // 2)


# ---------------------------------------------------------------------------------------------- losses of gradients


@pytest.mark.parametrize("shape", [(1,), (4,)])
def test_first_order_maml_is_no_penalty(queue: cl.CommandQueue, shape: tuple[int, ...]) -> None:
    """A step by hand makes fast weights from gradients; their gradient is taken for that of the slow ones."""
    slow = Parameter.from_host(queue, np.full(shape, 2.0, np.float32))
    x = ag.tensor(to_device(queue, np.ones((3, *shape))))
    amp.init(dtype="float32")

    def loss(weight: Any) -> Any:
        return ag.sum(ag.mul(ag.mul(x, weight), weight))

    optimizer = Adam([slow])
    loss(ag.tensor(slow)).backward()
    fast = ag.sub(slow, ag.mul(slow.grad, 0.125))
    assert isinstance(fast, Tensor)
    for node in (ag.tensor(fast, requires_grad=True), fast):
        loss(node)
    node = ag.tensor(fast, requires_grad=True)
    loss(node).backward()
    np.testing.assert_allclose(node.grad.to_host(), 6 * (2 - 12 * 0.125), rtol=1e-6)
    slow.grad = node.grad
    optimizer.step()


# ---------------------------------------------------------------------------------------------- in replays

THEN, NOW, BY_ANOTHER = object(), object(), object()
#: What was known of a gradient when it was recorded, and who hears of an inf or nan in it in a replay.
IN_REPLAYS: list[tuple[Any, set[object]]] = [
    (gradient_marks.checked(frozenset((THEN,))), {NOW}),
    (gradient_marks.checked(frozenset((THEN, BY_ANOTHER))), {NOW, BY_ANOTHER}),
    (gradient_marks.checked(frozenset((gradient_marks.FINITE,))), set()),
    (gradient_marks.checked(frozenset((gradient_marks.FINITE, THEN))), {NOW}),
    (gradient_marks.PLAIN, set()),
    (None, set()),
]


@pytest.mark.parametrize(("mark", "hears"), IN_REPLAYS)
def test_a_replay_knows_of_a_gradient_what_is_known_now(queue: cl.CommandQueue, mark: Any, hears: set[object]) -> None:
    """That it was finite when it was recorded says nothing of what the replay has written there."""
    another, param = (Parameter.from_host(queue, np.ones(2, np.float32)) for _ in "12")
    another.grad = to_device(queue, np.ones(2))  # of which nothing is known
    param.grad = grad = to_device(queue, np.ones(2))
    mark = None if mark is None else replace(mark, since=writes.now)  # there may have been other memory there
    gradient_marks.set_mark(grad, mark)
    held = gradient_marks.snapshot([another, param])
    param.grad = None
    gradient_marks.set_mark(grad, None)
    gradient_marks.restore(held, {THEN: NOW})
    assert param.grad is grad
    assert {token for token in (THEN, NOW, BY_ANOTHER) if gradient_marks.is_known_to(token, grad)} == hears
    assert (gradient_marks.mark_of(grad) is None) == (mark is None)


def test_a_replay_multiplies_by_the_scale_of_the_day(queue: cl.CommandQueue) -> None:
    param, scale = Parameter.from_host(queue, np.ones(2, np.float32)), LossScale(4.0)
    param.grad = grad = scale.scale_loss(to_device(queue, np.ones(2)))
    gradient_marks.set_mark(grad, gradient_marks.Mark(scale.applied()))
    held = gradient_marks.snapshot([param])
    scale.set_scale(16.0)
    gradient_marks.restore(held)
    found = gradient_marks.scale_of(grad)
    assert found is not None
    np.testing.assert_array_equal(found.multiply(to_device(queue, np.ones(2)), "float32").to_host(), 16.0)


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_gradient_of_another_queue_is_refused(queue: cl.CommandQueue, kind: type) -> None:
    param = Parameter.from_host(queue, np.ones((2, 2), np.float32))
    optimizer, other = kind([param], lr=1.0), cl.CommandQueue(queue.context, queue.device)
    with amp.init():
        param.grad = to_device(other, np.ones((2, 2)))
        with pytest.raises(
            ValueError, match=rf"^{kind.__name__}\.step\(\), parameter 0 and its gradient: .*different queues"
        ):
            optimizer.step()
        with pytest.raises(ValueError, match=r"^clip_grad_norm\(\), parameter 0 and its gradient: .*different queues"):
            clip.clip_grad_norm([param], 1.0)
        np.testing.assert_array_equal(param.to_host(), np.ones((2, 2)))
        param.grad = to_device(queue, np.ones((2, 2)))
        optimizer.step()
        assert not (param.to_host() == 1).any()
