"""The cases that a run is left with still have all that meets in the whole product."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.covering import covering


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), strength=st.integers(1, 3))
def test_values_that_meet_in_the_product_meet_in_the_array(sizes: list[int], strength: int) -> None:
    names = "abcd"[: len(sizes)]
    cases = [dict(zip(names, values, strict=True)) for values in product(*map(range, sizes))]
    chosen = [cases[number] for number in covering(cases, strength)]
    for together in combinations(names, min(strength, len(names))):
        assert {tuple(case[name] for name in together) for case in chosen} == set(
            product(*(range(sizes[names.index(name)]) for name in together))
        )


@pytest.mark.parametrize(("strength", "most"), [(1, 7), (2, 60), (3, 400)])
def test_most_of_a_large_product_is_left_out(strength: int, most: int) -> None:
    cases = [dict(enumerate(map(str, values))) for values in product(range(5), range(7), range(4), range(6), range(2))]
    assert len(covering([{str(name): value for name, value in case.items()} for case in cases], strength)) <= most


def test_a_parameter_apart_meets_each_value_and_doubles_nothing() -> None:
    sizes = (range(3), range(3), range(3), ("one", "other"))
    cases = [dict(zip("abcd", values, strict=True)) for values in product(*sizes)]
    chosen = [cases[number] for number in covering(cases, 3, apart="d")]
    assert {(case["a"], case["b"], case["c"]) for case in chosen} == set(product(range(3), repeat=3))
    for name in "abc":
        assert {(case[name], case["d"]) for case in chosen} == set(product(range(3), ("one", "other")))
    assert len(chosen) <= 27 + 6


def test_a_parameter_apart_that_is_alone_keeps_its_values() -> None:
    assert covering([{"d": "one"}, {"d": "other"}], 3, apart="d") == [0, 1]


def test_nothing_is_left_of_nothing() -> None:
    assert covering([], 2) == []
