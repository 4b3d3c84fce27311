"""The sentence about what AMP gains, of given times: nothing here is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clamp.debug.gain import Side, Trial, slower_functions
from clamp.debug.op_counter import OpRow
from clamp.debug.summary import judge, notes


def row(name: str, seconds: float, dtype: str = "float16", policy: str = "half", direction: str = "forward") -> OpRow:
    function = f"netcl.autograd.{name}"
    return OpRow(
        name, direction, function, policy, "layers.0", "train.py:3", (dtype,), dtype, (4, 4), 1, 64, seconds
    )  # fmt: skip


def side(seconds: float, *rows: OpRow, casts: float = 0.0, activations: int = 100, launches: int = 10) -> Side:
    return Side(seconds, list(rows), [], casts, 0.0, launches, activations, 0, 2 * activations)


FAST = Trial(
    "float16",
    side(1.0, row("matmul_op", 0.7), activations=52),
    side(1.42, row("matmul_op", 1.1, "float32")),
    rounds=9,
    alone=False,
)
SLOW = Trial(
    "float16",
    side(1.05, row("matmul_op", 0.9), row("softmax", 0.1, "float32", "float"), casts=0.11),
    side(1.0, row("matmul_op", 0.79, "float32"), row("softmax", 0.1, "float32", "float")),
    rounds=9,
    alone=True,
)


def test_what_is_faster_and_smaller_says_by_how_much() -> None:
    verdict = judge(FAST)
    assert verdict.sentence == "float16 is 1.42x as fast as float32 here and keeps 0.52 of its activation memory."
    assert not verdict.is_slower
    assert verdict.cure == ""


def test_what_is_faster_only_says_nothing_of_memory() -> None:
    assert judge(replace(FAST, amp=replace(FAST.amp, activations=98))).sentence == (
        "float16 is 1.42x as fast as float32 here."
    )


def test_what_is_slower_says_why() -> None:
    verdict = judge(replace(SLOW, amp=replace(SLOW.amp, seconds=1.06)))
    assert verdict.sentence == (
        "no gain here: 1.06x slower than float32, because casts take 11% of the step and the functions in half are as "
        "fast in float32 on this device."
    )
    assert verdict.is_slower
    assert verdict.cure.startswith('handle = amp.init(dtype="float32")')


def test_what_is_slower_and_smaller_says_both() -> None:
    verdict = judge(replace(SLOW, amp=replace(SLOW.amp, seconds=1.06, activations=50)))
    assert verdict.sentence.startswith("no gain in time here: 1.06x slower than float32, because casts take 11%")
    assert verdict.sentence.endswith("; float16 keeps 0.50 of float32's activation memory.")
    assert verdict.is_slower
    assert verdict.cure == ""


def test_small_differences_are_none() -> None:
    for seconds in (0.97, 1.0, 1.04):
        assert judge(replace(SLOW, amp=replace(SLOW.amp, seconds=seconds))).sentence.startswith(
            "no gain in time here: as fast as float32, because "
        )


def test_functions_that_are_slower_in_16_bits_are_a_reason() -> None:
    slower = replace(SLOW, amp=side(1.2, row("matmul_op", 1.0)), plain=side(1.0, row("matmul_op", 0.8, "float32")))
    assert "the functions in half take 1.25x as long in float16 on this device" in judge(slower).sentence


def test_launches_that_dominate_are_a_reason_and_have_a_cure() -> None:
    small = replace(SLOW, amp=side(0.0011, launches=20), plain=side(0.001, launches=20))
    verdict = judge(small)
    assert "a step is bound by its 20 launches, of 55 us each" in verdict.sentence
    assert verdict.cure.startswith("@amp.record")


@pytest.mark.parametrize("times_as_fast", [0.8, 1.0, 2.0])
@pytest.mark.parametrize(("busy", "is_bound"), [(0.3, True), (0.9, False)])
def test_a_step_that_the_device_waits_in_is_told_of_records(times_as_fast: float, busy: float, is_bound: bool) -> None:
    amp = side(0.01, row("softmax", 0.01 * busy, policy="float"), launches=20)
    verdict = judge(Trial("float16", amp, side(0.01 * times_as_fast), rounds=3, alone=False))
    assert any(line.startswith("Bound by launches: 20 of 500 us each") for line in verdict.details) == is_bound
    assert verdict.cure.startswith("@amp.record") == is_bound


def test_a_black_list_is_the_cure_only_if_it_pays() -> None:
    listed = replace(SLOW, black_list=("matmul_op",), with_black_list=0.9, black_list_pays=True)
    assert judge(listed).cure == 'handle = amp.init(custom_black_list=["matmul_op"])'
    assert "matmul_op. To put them on the black list pays: then a step takes 900 ms." in judge(listed).details[-1]
    idle = replace(listed, with_black_list=1.04, black_list_pays=False)
    assert "black_list" not in judge(idle).cure
    assert "does not pay" in judge(idle).details[-1]


def test_there_is_nothing_to_gain_in_float32() -> None:
    assert judge(replace(SLOW, dtype="float32")).sentence.startswith("AMP computes in float32 here")


def test_a_busy_machine_is_told_of() -> None:
    assert judge(FAST).details[0].startswith("Medians of 9 rounds, turn about: 1 s in float16, 1.42 s in ")
    assert (
        judge(replace(FAST, busy=True)).details[0].startswith("The least (the machine has other things to do, too) of")
    )


def test_16_bits_in_the_float32_rounds_are_told() -> None:
    assert not any("In the float32 rounds, too" in line for line in judge(FAST).details)
    mixed = replace(FAST, plain=side(1.0, row("gelu", 0.5)))
    assert any("In the float32 rounds, too" in line for line in judge(mixed).details)


@pytest.mark.parametrize(("took", "note"), [(0.5, "2.50x slower than in float32"), (0.21, None), (0.1, None)])
def test_ops_that_are_not_worth_it_are_marked(took: float, note: str | None) -> None:
    one = row("matmul_op", took, direction="backward")
    there = row("matmul_op", 0.2, "float32", direction="backward")
    trial = Trial("float16", side(1.0, one, row("softmax", 0.4, policy="float")), side(1.0, there), 3, False)
    assert notes(trial).get(one.key) == note
    assert slower_functions(trial.amp, trial.plain) == (["matmul_op"] if note else [])


def test_what_one_pass_shows_and_another_does_not_is_no_difference() -> None:
    one = row("matmul_op", 0.5)
    there = replace(row("matmul_op", 0.05, "float32"), most=0.6)
    trial = Trial("float16", side(1.0, one), side(1.0, there), 3, False)
    assert notes(trial) == {}
    assert slower_functions(trial.amp, trial.plain) == []
