"""Covering arrays: few cases of a product in which any two (or three) of its values still meet.

Faults of software take one value, or two that meet, rarely more (Kuhn, Wallace, Gallo: "Software fault interactions
and implications for software testing", IEEE TSE 30, 2004): most of a product of many parameters adds nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def covering(cases: Sequence[Mapping[str, Hashable]], strength: int) -> list[int]:
    """Numbers of cases, in order, in which all values (parameter, value) meet that meet in any case.

    Greedy: those that bring most that is new come first, so the result is not the smallest there is.

    Args:
        cases: value of each parameter.
        strength: how many values meet: 1 for each value once, 2 for all pairs.
    """
    meetings = [_meetings(case, strength) for case in cases]
    chosen: set[int] = set()
    covered: set[tuple[tuple[str, Hashable], ...]] = set()
    for least in range(max(map(len, meetings), default=0), 0, -1):
        for number, met in enumerate(meetings):
            if number not in chosen and len(met - covered) >= least:
                chosen.add(number)
                covered |= met
    return sorted(chosen)


def _meetings(case: Mapping[str, Hashable], strength: int) -> set[tuple[tuple[str, Hashable], ...]]:
    values = sorted(case.items())
    return set(combinations(values, min(strength, len(values))))
