"""What AMP gains in a step, in one plain sentence, and why, from what a trial has measured."""

from __future__ import annotations

from dataclasses import dataclass

from clamp.debug.gain import NO_DIFFERENCE, Trial
from clamp.debug.page.tables import duration

_SMALL = 100e-6  # seconds a launch, of which most is the launching
_IDLE = 0.5  # of a step's time, in which the device does not compute


@dataclass(frozen=True)
class Verdict:
    """The answer, for people.

    Attributes:
        sentence: it.
        details: what it rests on.
        cure: what to write, as code; empty if there is nothing to change.
        is_slower: whether the step takes longer than in float32.
    """

    sentence: str
    details: tuple[str, ...]
    cure: str
    is_slower: bool


def judge(trial: Trial) -> Verdict:
    """The verdict of a trial."""
    if trial.dtype == "float32":
        nothing = "AMP computes in float32 here, so that there is nothing to gain, and nothing to lose."
        return Verdict(nothing, (), "", False)
    times_as_fast, keeps = trial.plain.seconds / trial.amp.seconds, _kept(trial)
    less = f"{trial.dtype} keeps {keeps:.2f} of float32's activation memory" if keeps < 1 - NO_DIFFERENCE else ""
    because = f", because {' and '.join(reasons)}" if (reasons := _reasons(trial)) else ""
    if times_as_fast >= 1 + NO_DIFFERENCE:
        memory = f" and keeps {keeps:.2f} of its activation memory" if less else ""
        sentence = f"{trial.dtype} is {times_as_fast:.2f}x as fast as float32 here{memory}."
    elif times_as_fast > 1 - NO_DIFFERENCE:
        memory = f"; {less}" if less else ""
        sentence = f"no gain in time here: as fast as float32{because}{memory}."
    else:
        memory = f"; {less}" if less else ""
        gain = "no gain in time here" if less else "no gain here"
        sentence = f"{gain}: {1 / times_as_fast:.2f}x slower than float32{because}{memory}."
    return Verdict(sentence, tuple(_details(trial)), _cure(trial), times_as_fast <= 1 - NO_DIFFERENCE)


def notes(trial: Trial) -> dict[tuple[str, ...], str]:
    """What to say of ops that are not worth their 16 bits, by the keys of their rows: of those that were slower in each
    pass than in float32 in any."""
    plain = {row.key: row for row in trial.plain.rows}
    found = {}
    for row in trial.amp.rows:
        other = plain.get(row.key)
        if row.policy != "half" or row.seconds is None or other is None or not other.seconds:
            continue
        if row.seconds > 1.1 * other.slowest and row.seconds - other.slowest > 0.01 * trial.amp.op_seconds:
            found[row.key] = f"{row.seconds / other.seconds:.2f}x slower than in float32"
    return found


def _kept(trial: Trial) -> float:
    return trial.amp.activations / trial.plain.activations if trial.plain.activations else 1.0


def _reasons(trial: Trial) -> list[str]:
    """Why 16 bits do not make the step faster."""
    reasons = []
    total = trial.amp.op_seconds
    if total and trial.amp.cast_seconds >= 0.05 * total:
        reasons.append(f"casts take {trial.amp.cast_seconds / total:.0%} of the step")
    ratio = _half_ratio(trial)
    if ratio is not None and ratio <= 1 - NO_DIFFERENCE:
        reasons.append(f"the functions in half take {1 / ratio:.2f}x as long in {trial.dtype} on this device")
    elif ratio is not None and ratio < 1 + NO_DIFFERENCE:
        reasons.append("the functions in half are as fast in float32 on this device")
    if _is_small(trial):
        each = trial.amp.seconds / trial.amp.launches * 1e6
        reasons.append(f"a step is bound by its {trial.amp.launches} launches, of {each:.0f} us each")
    return reasons


def _half_ratio(trial: Trial) -> float | None:
    """How much faster the functions in half are in 16 bits, without their casts; None if there are none."""
    plain = {row.key: row.seconds or 0.0 for row in trial.plain.rows}
    pairs = [
        (row.seconds or 0.0, plain[row.key]) for row in trial.amp.rows if row.policy == "half" and row.key in plain
    ]
    took = sum(amp for amp, _ in pairs) - trial.amp.cast_seconds
    return sum(there for _, there in pairs) / took if took > 0 else None


def _is_small(trial: Trial) -> bool:
    """Whether launches, and Python between them, bound a step: the device waits for most of it."""
    if not trial.amp.launches:
        return False
    waits = not trial.alone and trial.amp.op_seconds < _IDLE * trial.amp.seconds
    return waits or trial.amp.seconds / trial.amp.launches < _SMALL


def _details(trial: Trial) -> list[str]:
    of = "The least (the machine has other things to do, too)" if trial.busy else "Medians"
    details = [
        f"{of} of {trial.rounds} rounds, turn about: {duration(trial.amp.seconds)} in {trial.dtype}, "
        f"{duration(trial.plain.seconds)} in clamp's float32, for forward, backward and division by the loss scale. "
        "The optimizer's step comes to both, and takes the same in both."
    ]
    if _is_small(trial):
        each = 1e6 * trial.amp.seconds / trial.amp.launches
        details.append(
            f"Bound by launches: {trial.amp.launches} of {each:.0f} us each, most of which is Python and the driver. "
            "@amp.record above the function that makes a step replays them without."
        )
    if trial.plain.computes_in_16_bit:
        details.append(
            "In the float32 rounds, too, a part is computed in 16 bits: of parameters or inputs that are so."
        )
    if trial.with_black_list is not None:
        pays = "pays" if trial.black_list_pays else "does not pay"
        details.append(
            f"In float32 these take less time, by themselves: {', '.join(trial.black_list)}. To put them on the black "
            f"list {pays}: then a step takes {duration(trial.with_black_list)}."
        )
    return details


def _cure(trial: Trial) -> str:
    if trial.black_list_pays:
        return trial.init_call.in_float32(trial.black_list)
    if _is_small(trial):
        return "@amp.record  # above the function that makes a step: one launch after the other, without Python between"
    if trial.plain.seconds > (1 + NO_DIFFERENCE) * trial.amp.seconds:
        return ""
    if trial.plain.seconds < (1 - NO_DIFFERENCE) * trial.amp.seconds and _kept(trial) > 1 - NO_DIFFERENCE:
        return f"{trial.init_call.changed(dtype='float32')}  # clamp's kernels, and nothing is cast"
    return ""
