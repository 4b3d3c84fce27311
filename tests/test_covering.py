"""The cases that a run is left with still have all that meets in the whole product, and all that has changed."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clamp.ops.gemm.tiled import GEMM
from tests.covering import covering
from tests.ops import test_matrix_units_ptx
from tests.ops.test_matrix_units_ptx import Given


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


def test_nothing_is_left_of_nothing() -> None:
    assert covering([], 2) == []


def test_a_kernel_that_differs_is_looked_at_anew(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_matrix_units_ptx, "_LOOKED_AT", tmp_path / "looked_at.json")
    monkeypatch.delenv("CLAMP_TEST_SLOW", raising=False)
    monkeypatch.setenv("CLAMP_WRITE_REGISTERS", "1")
    Given(request.node, GEMM, {"SIDE": 16}).passed()
    assert not Given(request.node, GEMM, {"SIDE": 16}).was_looked_at()
    monkeypatch.delenv("CLAMP_WRITE_REGISTERS")
    assert Given(request.node, GEMM, {"SIDE": 16}).was_looked_at()
    assert not Given(request.node, GEMM, {"SIDE": 8}).was_looked_at()
    with monkeypatch.context() as patch:
        patch.setenv("CLAMP_TEST_SLOW", "3")
        assert not Given(request.node, GEMM, {"SIDE": 16}).was_looked_at()
    monkeypatch.setattr(test_matrix_units_ptx, "source", lambda name: f"// another {name}")
    assert not Given(request.node, GEMM, {"SIDE": 16}).was_looked_at()
