"""Where AMP is on: what a point of a thread finds around it, however regions were entered and left."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from clamp import amp
from clamp.bridge import Parameter
from clamp.casting.policy_table import default_table
from clamp.casting.regions import (
    Region,
    called_in,
    casting_in,
    casting_region,
    changed_regions,
    current_region,
    in_own_region,
    in_region,
    region_here,
)
from clamp.params.weight_cache import weight_cache

BRAIN = Region(enabled=True, dtype="bfloat16", policies=default_table())
OFF = Region(enabled=False, dtype="float16", policies=default_table())


pytestmark = pytest.mark.usefixtures("shut_down")


def here() -> str | None:
    """In which dtype ops cast here; None: they do not."""
    region = casting_region()
    return None if region is None else region.dtype


def elsewhere() -> str | None:
    """The same in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(here).result()


def within(region: Region, ask: Callable[[], str | None] = here) -> str | None:
    with in_region(region):
        return ask()


def test_outside_of_all_nothing_casts_is_said_or_allowed() -> None:
    found = vars(region_here())
    expected = {
        "enabled": False, "dtype": "float16", "policies": default_table(), "cache_enabled": True, "allow_banned": False,
        "verbose": False, "level": "O1",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert current_region() is None
    with amp.autocast():
        around = region_here()
    assert (around.cache_enabled, around.allow_banned, around.verbose) == (True, False, False)


#: Where somebody asks: before, while regions are changed, and after.
PLACES: dict[str, tuple[Callable[[], str | None], str | None]] = {
    "the process": (here, "float16"),
    "another thread": (elsewhere, "float16"),
    "a region": (lambda: within(BRAIN), "bfloat16"),
    "a function with a region": (lambda: called_in(BRAIN, here), "bfloat16"),
    "a region without casts": (lambda: within(OFF), None),
    "another thread, from a region": (lambda: within(BRAIN, elsewhere), "float16"),
}


@pytest.mark.parametrize("place", PLACES)
def test_changed_regions_are_changed_wherever_somebody_asks(place: str) -> None:
    ask, before = PLACES[place]
    with amp.init():
        for error in (None, ValueError):
            assert ask() == before
            with suppress(ValueError), changed_regions(lambda region: region.in_float32 if region.enabled else region):
                assert ask() == (None if before is None else "float32")
                with pytest.raises(RuntimeError, match="being compared or bisected"), changed_regions(lambda x: x):
                    pass
                assert ask() == (None if before is None else "float32")
                if error is not None:
                    raise error
        assert ask() == before


def test_regions_around_and_inits_inside_are_changed_too() -> None:
    with in_region(BRAIN):
        with changed_regions(lambda region: region.in_float32):
            assert here() == within(BRAIN) == "float32"
            assert elsewhere() is None
        assert here() == "bfloat16"
    with changed_regions(lambda region: region.in_float32):
        handle = amp.init()
        assert here() == "float32"
    assert here() == "float16"
    handle.shutdown()
    assert here() is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0)])
def test_regions_may_be_left_in_any_order(order: tuple[int, ...]) -> None:
    """As generators leave theirs. What is inside of one that is left is left with it."""
    regions = [in_region(BRAIN), casting_in(None), in_own_region(OFF)]
    seen = ["bfloat16", None, None]
    for region, dtype in zip(regions, seen, strict=True):
        region.__enter__()
        assert here() == dtype
    alive = 3
    for index in order:
        regions[index].__exit__(None, None, None)
        alive = min(alive, index)
        assert here() == (seen[alive - 1] if alive else None)
        assert (current_region() is None) == (alive == 0)


def test_within_an_op_nothing_casts_but_what_is_told_to() -> None:
    with amp.init(), casting_in(None):
        assert here() is None
        assert within(BRAIN) is None
        assert current_region() is not None
        assert called_in(BRAIN, here) == "bfloat16"
        assert here() is None
        with casting_in(BRAIN):
            assert here() == "bfloat16"
            assert called_in(None, here) is None


def test_the_end_of_a_threads_outermost_region_alone_empties_the_weight_cache(queue: cl.CommandQueue) -> None:
    weight = Parameter.from_host(queue, np.ones(2, np.float32))

    def is_known() -> bool:
        return weight_cache.known(weight, "value") is not None

    with ExitStack() as outer:
        outer.enter_context(in_own_region(BRAIN))
        weight_cache.put(weight, "value", weight)
        for region in (in_own_region(OFF), in_region(BRAIN), casting_in(None)):
            with region:
                pass
            assert is_known()
        with pytest.raises(ValueError, match="mine"), in_own_region(BRAIN):
            raise ValueError("mine")
        assert is_known()
    assert not is_known()
    weight_cache.put(weight, "value", weight)
    with in_region(BRAIN):
        pass
    assert is_known()
    with changed_regions(lambda region: region):
        pass
    assert not is_known()


def test_what_runs_in_float32_may_call_what_is_banned() -> None:
    """A function of netcl's that is computed in float32 knows nothing of bans."""

    def at(region: Region) -> tuple[Any, ...]:
        return region.enabled, region.dtype, region.allow_banned, region.cache_enabled, region.policies

    assert at(BRAIN.in_float32) == (True, "float32", True, True, BRAIN.policies)
