"""The loss scales: one interface, and a state machine on the device that a short Python model predicts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from netcl.core.device import CPUQueue
from netcl.core.memory import get_persistent_pool
from netcl.runtime.capture import KernelCapture

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl import program
from clamp.ops import slots
from clamp.ops.loss_scale import DeviceState, ScaleState, scale_lock
from clamp.scaling.backward_pass import unscale_all
from clamp.scaling.dynamic_scale import DynamicLossScale, ScaleRule, make_loss_scale, settle_late, settle_later
from clamp.scaling.loss_scale import LossScale, NoLossScale
from tests.reference import HALF_DTYPES, STORAGE_DTYPES, quantize, to_device, to_numpy

pytestmark = pytest.mark.kernel

A, B = 1, 2  # two optimizers


@dataclass
class Model:
    """What DynamicLossScale's docstring says, in Python."""

    scale: np.float32
    rule: ScaleRule
    growth_tracker: int = 0
    overflow: int = 0
    bad_steps: int = 0

    def update(self, found_inf: bool, mask: int, fresh: int) -> None:
        self.overflow &= ~fresh
        if found_inf:
            first = not self.overflow & mask
            self.overflow |= mask
            self.growth_tracker = 0
            if first:
                self._back_off()
        elif fresh == mask:
            self._grow()

    def _back_off(self) -> None:
        self.bad_steps += 1
        if self.bad_steps == self.rule.hysteresis:
            self.bad_steps = 0
            lower = self.scale * np.float32(self.rule.backoff)
            self.scale = max(lower, np.float32(self.rule.min))

    def _grow(self) -> None:
        self.bad_steps = 0
        self.growth_tracker += 1
        if self.growth_tracker == self.rule.interval:
            self.growth_tracker = 0
            with np.errstate(over="ignore"):
                higher = self.scale * np.float32(self.rule.growth)
            if np.isfinite(higher):
                self.scale = min(higher, np.float32(self.rule.max))

    def state(self) -> ScaleState:
        return ScaleState(float(self.scale), self.growth_tracker, self.overflow, self.bad_steps)


@pytest.fixture
def gradients(queue: cl.CommandQueue) -> Callable[[bool], Tensor]:
    """A gradient without, and one with an inf."""
    clean, bad = to_device(queue, [1.0, 2.0]), to_device(queue, [1.0, np.inf])
    return lambda overflow: bad if overflow else clean


def run_pass(scale: LossScale, grad: Tensor, mask: int = A, fresh: int | None = None) -> None:
    """Backward has left a gradient; unscale it elsewhere, so that it can be used again."""
    scale.unscale_([grad], [bridge.empty(grad.queue, grad.shape, "float32")])
    scale.update(mask, mask if fresh is None else fresh)


PASSES = st.lists(
    st.tuples(st.booleans(), st.sampled_from([A, B, A | B]), st.integers(0, 3)).map(
        lambda drawn: (drawn[0], drawn[1], drawn[1] & drawn[2])
    ),
    max_size=25,
)
#: a step of several passes, in which the scale falls once, and which a clean one does not save; and the next step
ONCE_A_STEP = [(False, A, A), (True, A, 0), (True, A, 0), (False, A, 0), (False, A, A)]
RULES = st.builds(
    ScaleRule,
    growth=st.sampled_from([2.0, 1.5, 3.1]),
    backoff=st.sampled_from([0.5, 0.3]),
    interval=st.integers(1, 3),
    hysteresis=st.integers(1, 3),
    min=st.sampled_from([2.0**-14, 100.0]),
    max=st.sampled_from([2.0**24, 1000.0, 3.4e38]),
)


@pytest.mark.simulated_elsewhere
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(passes=ONCE_A_STEP, rule=ScaleRule(), start=512.0, fused=True)
@given(passes=PASSES, rule=RULES, start=st.sampled_from([100.0, 512.0, 1000.0]), fused=st.booleans())
def test_the_state_machine_is_the_model(
    gradients: Callable[[bool], Tensor], simulated: bool, passes: Any, rule: ScaleRule, start: float, fused: bool
) -> None:
    scale, model = DynamicLossScale(start, rule), Model(np.float32(start), rule)
    for overflow, mask, fresh in passes[:2] if simulated else passes:
        grad = gradients(overflow)
        target = bridge.empty(grad.queue, grad.shape, "float32")
        scale.unscale_([grad], [target])
        if not overflow:
            expected = np.array([1, 2], np.float32) * np.float32(1 / np.float64(model.scale))
            np.testing.assert_array_equal(target.to_host(), expected)
        if fused:
            scale.update(mask, fresh)
        else:
            scale.assign(mask, fresh)
            scale.adjust()
        model.update(overflow, mask, fresh)
        assert scale.read() == model.state()
        for optimizers in (A, B, A | B):
            assert scale.overflowed(optimizers) == bool(model.overflow & optimizers)


def test_defaults(gradients: Callable[[bool], Tensor]) -> None:
    scale = DynamicLossScale()
    assert (scale.scale, scale.growth_tracker, scale.floor) == (2.0**16, 0, 2.0**-14)
    assert scale.rule == ScaleRule(2.0**16, 2.0, 0.5, 2000, 2.0**-14, 2.0**24, 1)
    run_pass(scale, gradients(False))
    assert (scale.scale, scale.growth_tracker) == (2.0**16, 1)
    run_pass(scale, gradients(True))
    assert (scale.scale, scale.growth_tracker) == (2.0**15, 0)


FLOAT32_MAX = float(np.finfo(np.float32).max)

#: start, rule, passes (X: one that overflows), scale and growth tracker after each
EXAMPLES: dict[str, tuple[float, ScaleRule, str, list[tuple[float, int]]]] = {
    "up to the maximum": (
        8.0, ScaleRule(interval=3, max=24.0), ".........",
        [(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (24, 0), (24, 1), (24, 2), (24, 0)],
    ),
    "never to infinity": (
        2.0**126, ScaleRule(interval=1, max=FLOAT32_MAX), "..", [(2.0**127, 0)] * 2
    ),
    "down to the floor": (8.0, ScaleRule(min=3.0), "XXX", [(4, 0), (3, 0), (3, 0)]),
    "overflows in a row": (
        64.0, ScaleRule(hysteresis=2), "X.XXX", [(64, 0), (64, 1), (64, 0), (32, 0), (32, 0)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_scale_moves_by_its_rule(gradients: Callable[[bool], Tensor], name: str) -> None:
    start, rule, passes, expected = EXAMPLES[name]
    scale, seen = DynamicLossScale(start, rule), []
    for each in passes:
        run_pass(scale, gradients(each == "X"))
        assert scale.overflowed(A) == (each == "X")  # the step is skipped, whether the scale falls or not
        seen.append((scale.scale, scale.growth_tracker))
    assert seen == expected
    assert scale.floor == rule.min


@pytest.mark.parametrize("reached", [A, 1 << 31])  # the highest bit is an optimizer too
def test_an_overflow_is_of_the_optimizers_that_it_reached(gradients: Callable[[bool], Tensor], reached: int) -> None:
    scale = DynamicLossScale()
    run_pass(scale, gradients(True), reached)
    run_pass(scale, gradients(False), B)
    assert scale.overflowed(reached)
    assert scale.overflowed(reached | B)
    assert not scale.overflowed(~reached & 0xFFFFFFFF)


def test_recorded_passes_leave_the_scale_until_it_is_adjusted(gradients: Callable[[bool], Tensor]) -> None:
    scale = DynamicLossScale()
    for overflow, optimizer in ((True, A), (False, B)):
        scale.unscale_([gradients(overflow)], [bridge.empty(gradients(False).queue, (2,), "float32")])
        scale.assign(optimizer, optimizer)
        assert (scale.scale, scale.overflowed(A), scale.overflowed(B)) == (2.0**16, True, False)
    scale.adjust()
    assert (scale.scale, scale.growth_tracker) == (2.0**15, 0)
    scale.adjust()  # nothing was assigned since
    assert (scale.scale, scale.growth_tracker) == (2.0**15, 0)


def test_the_rule_may_be_replaced(gradients: Callable[[bool], Tensor]) -> None:
    scale = DynamicLossScale(8.0)
    scale.rule = replace(scale.rule, interval=1, growth=4.0)
    run_pass(scale, gradients(False))
    assert scale.scale == 32.0
    scale.rule = replace(scale.rule, max=16.0)
    run_pass(scale, gradients(False))
    assert scale.scale == 32.0  # a lower limit stops it and does not make it jump
    scale.rule = replace(scale.rule, max=64.0, min=50.0)
    run_pass(scale, gradients(True))
    assert scale.scale == 32.0


def test_the_reciprocal_is_correctly_rounded(queue: cl.CommandQueue, simulated: bool) -> None:
    rng = np.random.default_rng(0)
    scale = DynamicLossScale(1.0, ScaleRule(min=2.0**-100, max=2.0**100))
    state = scale._state.buffer(queue)
    words = np.zeros(8, np.float32)
    for value in (2.0 ** rng.uniform(-20, 20, 20 if simulated else 500)).astype(np.float32):
        scale.set_scale(float(value))
        scale.adjust()  # the device computes it anew
        cl.enqueue_copy(queue, words, state)
        assert words[0] == np.float32(1 / np.float64(value))


# -------------------------------------------------------------------------------------- losses and gradients


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize(
    "make_scale", [DynamicLossScale, lambda: LossScale(1000.0), NoLossScale], ids=["dynamic", "static", "none"]
)
def test_losses_are_scaled_in_float32(queue: cl.CommandQueue, make_scale: Callable[[], LossScale], dtype: str) -> None:
    scale = make_scale()
    for shape in ((1,), (1, 1), (3, 7)):
        loss = quantize(np.random.default_rng(0).standard_normal(shape), dtype)
        scaled = scale.scale_loss(to_device(queue, loss, dtype))
        assert (scaled.dtype, scaled.shape) == ("float32", shape)
        np.testing.assert_array_equal(scaled.to_host(), loss.astype(np.float32) * np.float32(scale.scale))


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_gradients_of_the_product_are_scaled_in_the_losss_dtype(queue: cl.CommandQueue, dtype: str) -> None:
    grad = to_device(queue, [0.1])
    scaled = LossScale(1000.0).applied().multiply(grad, dtype)
    assert scaled.dtype == dtype
    np.testing.assert_array_equal(to_numpy(scaled), quantize(np.float32(0.1) * np.float32(1000), dtype).astype(float))
    np.testing.assert_array_equal(
        to_numpy(NoLossScale().applied().multiply(grad, dtype)), quantize(np.float32([0.1]), dtype).astype(float)
    )


def test_other_dtypes_are_refused(queue: cl.CommandQueue) -> None:
    integers = Tensor.from_host(queue, np.arange(3, dtype=np.int32), dtype="int32")
    for scale in (DynamicLossScale(), LossScale(2.0), NoLossScale()):
        with pytest.raises(TypeError, match="int32"):
            scale.scale_loss(integers)


def test_a_scale_stays_on_its_queue(queue: cl.CommandQueue) -> None:
    scale = DynamicLossScale()
    scale.scale_loss(to_device(queue, [1.0]))
    other = to_device(cl.CommandQueue(queue.context, queue.device), [1.0])
    with pytest.raises(ValueError, match="another queue"):
        scale.scale_loss(other)
    with pytest.raises(ValueError, match="another queue"):
        scale.unscale_([other], [other])
    with pytest.raises(TypeError, match="numpy backend"):
        DynamicLossScale().scale_loss(Tensor.from_host(CPUQueue(), np.ones(1, np.float32)))


# ------------------------------------------------------------------------------------------- static and none


def test_a_static_scale_stays_and_notices_overflows(gradients: Callable[[bool], Tensor]) -> None:
    scale = LossScale(128)
    for overflow in (False, True, True, False):
        run_pass(scale, gradients(overflow))
        assert scale.overflowed(A) == overflow
        assert scale.scale == scale.floor == 128.0
    assert not scale.is_dynamic
    assert DynamicLossScale().is_dynamic


def test_no_scale_leaves_gradients_alone(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = NoLossScale()
    grad, loss = to_device(queue, [1.0, np.inf]), to_device(queue, [1.0])
    monkeypatch.delattr(cl.Kernel, "__call__")  # no work on the device
    assert scale.scale_loss(loss) is loss
    assert scale.applied().multiply(loss, "float32") is loss
    scale.unscale_([grad], [grad])
    scale.assign(A, A)
    scale.adjust()
    scale.update(A, A)
    assert not scale.overflowed(A)
    assert (scale.scale, scale.floor, scale.growth_tracker, scale.is_dynamic) == (1.0, 1.0, 0, False)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_no_scale_still_widens_for_master_weights(queue: cl.CommandQueue, dtype: str) -> None:
    source = to_device(queue, [1.5, np.inf], dtype)
    target, untouched = bridge.zeros(queue, (2,), "float32"), to_device(queue, [np.nan])
    NoLossScale().unscale_([untouched, source], [untouched, target])
    np.testing.assert_array_equal(target.to_host(), [1.5, np.inf])


def test_auto_is_dynamic_for_float16_only() -> None:
    assert isinstance(make_loss_scale("auto", "float16"), DynamicLossScale)
    assert isinstance(make_loss_scale("auto", "bfloat16"), NoLossScale)
    assert isinstance(make_loss_scale("auto", "float32"), NoLossScale)
    assert isinstance(make_loss_scale("dynamic", "bfloat16"), DynamicLossScale)
    static = make_loss_scale(128, "float16")
    assert type(static) is LossScale
    assert static.scale == 128.0


# ------------------------------------------------------------------------------------------------ state dicts


@pytest.mark.simulated_elsewhere
def test_a_restored_scale_goes_on_identically(gradients: Callable[[bool], Tensor], simulated: bool) -> None:
    rule = ScaleRule(interval=3, hysteresis=2)
    rng = np.random.default_rng(0)
    original = DynamicLossScale(rule=rule)
    for _ in range(4 if simulated else 12):
        run_pass(original, gradients(bool(rng.random() < 0.3)), A, fresh=int(rng.integers(2)))
        state = original.state_dict()
        fresh, used = DynamicLossScale(rule=rule), DynamicLossScale(64.0, rule)
        run_pass(used, gradients(True))
        for restored in (fresh, used):
            restored.load_state_dict(state)
            assert restored.read() == original.read()
            run_pass(restored, gradients(True), A, fresh=0)
    for overflow in (True, False, False, False):
        fresh.load_state_dict(original.state_dict())
        for scale in (original, fresh):
            run_pass(scale, gradients(overflow))
        assert fresh.read() == original.read()


@pytest.mark.parametrize("more", [{"overflow": 2**32 - 1, "bad_steps": 1}, {}], ids=["clamp's", "apex's"])
def test_a_state_dict_keeps_the_overflow_of_every_optimizer(more: dict[str, int]) -> None:
    scale, state = DynamicLossScale(), {"loss_scale": 1024.0, "unskipped": 7, **more}
    scale.load_state_dict(state)
    assert scale.state_dict() == {"overflow": 0, "bad_steps": 0, **state}


def test_a_gradient_that_two_parameters_have_is_divided_once(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two divisions in one launch may meet: both read what neither has written. So what is launched is looked at, too.
    divided: list[Tensor] = []
    unscale = DynamicLossScale.unscale_

    def noted(scale: DynamicLossScale, sources: list[Tensor], *rest: Any) -> None:
        divided.extend(sources)
        unscale(scale, sources, *rest)

    monkeypatch.setattr(DynamicLossScale, "unscale_", noted)
    grad = to_device(queue, np.full(3, 1024.0))
    unscale_all([grad, grad], DynamicLossScale(1024.0), frozenset())
    assert divided == [grad]
    np.testing.assert_array_equal(grad.to_host(), np.ones(3))


@pytest.mark.parametrize("scale", [DynamicLossScale(), LossScale(2.0), NoLossScale()], ids=type)
@pytest.mark.parametrize(
    "change",
    [
        {"loss_scale": 0.0},
        {"loss_scale": float("nan")},
        {"loss_scale": float("inf")},
        {"loss_scale": "many"},
        {"unskipped": -1},
        {"unskipped": 1.5},
        {"unskipped": 2**31},
        {"overflow": 2**32},
        {"bad_steps": None},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_malformed_state_dict_changes_nothing(scale: LossScale, change: dict[str, Any]) -> None:
    before = scale.state_dict()
    with pytest.raises(ValueError, match=next(iter(change))):
        scale.load_state_dict({"loss_scale": 1.0, "unskipped": 0, **change})
    with pytest.raises(ValueError, match="unskipped"):
        scale.load_state_dict({"loss_scale": 1.0})
    with pytest.raises(RuntimeError, match="empty"):
        scale.load_state_dict({})
    assert scale.state_dict() == before


def test_a_scale_beyond_the_limits_is_not_loaded() -> None:
    scale = DynamicLossScale()
    with pytest.raises(ValueError, match="max"):
        scale.load_state_dict({"loss_scale": 2.0**25, "unskipped": 0})
    assert scale.scale == 2.0**16


# --------------------------------------------------------------------------------------- overflows met elsewhere


@pytest.mark.parametrize("how", ["check", "note"])
def test_an_overflow_met_after_unscaling_or_elsewhere_counts(
    queue: cl.CommandQueue, gradients: Callable[[bool], Tensor], how: str
) -> None:
    scale = DynamicLossScale()
    grad = gradients(False)
    scale.unscale_([grad], [grad])
    scale.assign(A, A)
    scale.check_([grad])
    scale.assign(A, 0)
    assert not scale.overflowed(A)
    if how == "check":
        scale.check_([to_device(queue, [np.nan])])
    else:
        scale.note_overflow()
    scale.assign(A, 0)
    scale.adjust()
    assert scale.overflowed(A)
    assert scale.scale == 2.0**15
    off = NoLossScale()
    off.check_([to_device(queue, [np.nan])])
    off.note_overflow()
    assert not off.overflowed(A)


def test_whether_it_was_a_nan_is_known_until_the_next_step(queue: cl.CommandQueue) -> None:
    scale = DynamicLossScale()
    nan, inf = (to_device(queue, [value]) for value in (np.nan, np.inf))
    for grad, fresh, nans in ((nan, A, A), (inf, 0, A), (inf, A, 0), (nan, 0, A)):
        run_pass(scale, grad, A, fresh)
        assert (scale.overflowed(A), scale.read().nans) == (True, nans)
    scale.load_state_dict(scale.state_dict())  # which does not say it
    assert (scale.overflowed(A), scale.read().nans) == (True, 0)


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("how", ["set_scale", "rewind"])
def test_a_scale_that_was_set_is_not_moved_by_what_came_before(
    gradients: Callable[[bool], Tensor], how: str, overflow: bool
) -> None:
    scale = DynamicLossScale()
    grad = gradients(overflow)
    scale.unscale_([grad], [grad])
    scale.assign(A, A)
    if how == "rewind":
        scale.rewind(scale.read()._replace(scale=4.0), A)
    else:
        scale.set_scale(4.0)
    before = scale.read()
    scale.adjust()
    assert scale.read() == before
    assert before.scale == 4.0


def test_what_is_to_be_heard_later_is_heard_once_and_in_order() -> None:
    heard: list[int] = []
    for number in range(3):
        settle_later(partial(heard.append, number))
    for _ in range(2):
        settle_late()
        assert heard == [0, 1, 2]


# ------------------------------------------------------------------------------------------------- validation


def test_set_scale_sets_the_scale_only(gradients: Callable[[bool], Tensor]) -> None:
    scale = DynamicLossScale()
    scale.set_scale(1024.0)  # before the device is known
    run_pass(scale, gradients(False))
    assert (scale.scale, scale.growth_tracker) == (1024.0, 1)
    scale.set_scale(3.0)
    assert (scale.scale, scale.growth_tracker) == (3.0, 1)
    for value in (0.0, -1.0, float("nan"), float("inf"), 2.0**25, 1e39, 1e-50, "x", None):
        with pytest.raises(ValueError, match="scale"):
            scale.set_scale(value)  # type: ignore[arg-type]
    assert scale.scale == 3.0
    with pytest.raises(ValueError, match="off"):
        NoLossScale().set_scale(2.0)
    NoLossScale().set_scale(1.0)


@pytest.mark.parametrize(
    "rule",
    [
        {"growth": 1.0},
        {"growth": 1 + 1e-12},  # 1 as a float32
        {"growth": float("inf")},
        {"backoff": 1.0},
        {"backoff": 0.0},
        {"backoff": -0.5},
        {"interval": 0},
        {"interval": 2.5},
        {"interval": 2**31},
        {"hysteresis": 0},
        {"min": 0.0},
        {"min": float("nan")},
        {"min": 2.0**25},
        {"max": float("inf")},
        {"max": "high"},
    ],
    ids=str,
)
def test_a_bad_rule_says_what_was_passed(rule: dict[str, Any]) -> None:
    (name, value), *_ = rule.items()
    with pytest.raises(ValueError, match=name) as caught:
        ScaleRule(**rule)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e39, "2", True])
def test_bad_scales_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="scale"):
        make_loss_scale(value, "float16")


def test_choices_are_named() -> None:
    with pytest.raises(ValueError, match="'auto', 'dynamic', a ScaleRule or a finite positive number, not 'sometimes'"):
        make_loss_scale("sometimes", "float16")
    with pytest.raises(ValueError, match="'float16', 'bfloat16' or 'float32', not 'half'"):
        make_loss_scale("auto", "half")
    with pytest.raises(ValueError, match="min"):
        DynamicLossScale(2.0**-15)


@pytest.mark.parametrize("scale", [DynamicLossScale(), LossScale(2.0), NoLossScale()], ids=type)
def test_bad_masks_are_refused(scale: LossScale) -> None:
    for mask, fresh in ((0, 0), (-1, 0), (1 << 32, 0), (A, B), (A, A | B)):
        for end_pass in (scale.assign, scale.update):
            with pytest.raises(ValueError, match="mask"):
                end_pass(mask, fresh)


# ------------------------------------------------------------------------------------- cost, and captured graphs


@pytest.mark.simulated_elsewhere
def test_nothing_is_compiled_or_allocated_as_the_scale_changes(
    queue: cl.CommandQueue, gradients: Callable[[bool], Tensor], simulated: bool
) -> None:
    scale, loss = DynamicLossScale(rule=ScaleRule(interval=1)), to_device(queue, [1.0])

    def iteration(overflow: bool) -> None:
        scale.applied().multiply(scale.scale_loss(loss), "float32")
        run_pass(scale, gradients(overflow))
        scale.overflowed(A)

    for _ in range(3):
        iteration(False)
    pool = get_persistent_pool(queue)

    def counts() -> tuple[int, ...]:
        return len(program._programs), pool.stats.bytes_allocated, slots._tile_table.cache_info().currsize

    before = counts()
    for index in range(4 if simulated else 50):
        iteration(index % 3 == 0)
    assert counts() == before


def test_a_captured_pass_replays_with_the_live_scale(
    queue: cl.CommandQueue, gradients: Callable[[bool], Tensor]
) -> None:
    scale, loss = DynamicLossScale(rule=ScaleRule(interval=2)), to_device(queue, [3.0])
    grad, target = to_device(queue, [1.0, 2.0]), bridge.empty(queue, (2,), "float32")
    model = Model(np.float32(2.0**16), scale.rule)
    scale.scale_loss(loss)
    capture = KernelCapture()
    capture.begin()
    try:
        scaled = scale.scale_loss(loss)
        scale.unscale_([grad], [target])
        scale.update(A, A)
    finally:
        capture.end()
    assert capture.num_launches == 3
    model.update(False, A, A)
    for overflow in (False, True, True, False, False, False):
        used = float(model.scale)
        grad.write(np.float32([1.0, np.inf if overflow else 2.0]))
        capture.replay()
        model.update(overflow, A, A)
        assert scale.read() == model.state()
        assert scaled.to_host() == 3 * used
        assert target.to_host()[0] == 1 / used


@pytest.mark.parametrize("move", [lambda scale: scale.set_scale(8.0), lambda scale: scale.update(A, A)])
def test_no_scale_moves_while_another_thread_unscales(
    queue: cl.CommandQueue, move: Callable[[LossScale], None]
) -> None:
    """A pass may divide by any scale: that of another ``loss_id``, say."""
    scale = DynamicLossScale(rule=ScaleRule(interval=1))
    scale.scale_loss(to_device(queue, [1.0]))
    thread = threading.Thread(target=move, args=(scale,))
    with scale_lock:
        thread.start()
        thread.join(0.2)
        assert scale.read().scale == 2.0**16
    thread.join()
    assert scale.read().scale != 2.0**16


def test_threads_that_come_to_a_queue_at_once_have_one_copy(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, scale, own = cl.CommandQueue(queue.context), DynamicLossScale(), LossScale._elsewhere
    scale.on(queue)
    both = threading.Barrier(2)

    def elsewhere(one: LossScale) -> LossScale:
        with suppress(threading.BrokenBarrierError):  # the other one waits for this one
            both.wait(timeout=0.5)
        return own(one)

    monkeypatch.setattr(LossScale, "_elsewhere", elsewhere)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(scale.on, [other] * 2)
    assert first is second


def test_what_a_thread_reads_before_a_pass_ends_is_not_kept_for_what_it_met(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the end has been announced, and before that is launched."""
    scale = DynamicLossScale()

    def about_to_move(state: DeviceState) -> None:
        reader = threading.Thread(target=scale.read)
        reader.start()
        reader.join(timeout=20)  # it waits for nobody
        assert not reader.is_alive()

    scale.scale_loss(to_device(queue, [1.0]))
    scale.unscale_([to_device(queue, [np.inf])], [bridge.empty(queue, (1,), "float32")])
    monkeypatch.setattr(DeviceState, "_about_to_move", about_to_move)
    scale.update(A, A)
    assert scale.verdict().overflow == A
