"""What each policy does to a function of clamp's and to one of the user's: one class a policy."""

from __future__ import annotations

from typing import Any

from clamp import bridge
from clamp.casting.arguments import reporter
from clamp.casting.containers import tensors_in
from clamp.casting.operands import Casting, Float, Half, Match, Promote, widest
from clamp.casting.policy import CastPolicy
from clamp.casting.regions import Region


class Meaning:
    """Computed in float32."""

    in_words = "in float32"

    def casting(self, region: Region, function: str) -> Casting:
        """How a function of clamp's reads its operands, and which dtype it returns."""
        return Float()

    def target(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The dtype a user's function gets its floating arguments in; None: as they are."""
        return "float32"

    def keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments a user's function gets."""
        return kwargs


class _Half(Meaning):
    in_words = "in {dtype}"

    def casting(self, region: Region, function: str) -> Casting:
        return Half(region.dtype, reporter(region, function), region.cache_enabled)

    def target(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return region.dtype


class _FloatSetDtype(Meaning):
    def target(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return "float32" if kwargs.get("dtype") is None else None


class _FloatAppendDtype(Meaning):
    def target(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return None

    def keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"dtype": "float32", **kwargs}


class _Promote(Meaning):
    in_words = "in the widest input's dtype"

    def casting(self, region: Region, function: str) -> Casting:
        return Promote()

    def target(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        found = [value.dtype for value in tensors_in((args, kwargs)) if value.dtype in bridge.STORAGE]
        return widest(*found) if found else None


class _AsGiven(Meaning):
    in_words = "in its input's dtype"

    def casting(self, region: Region, function: str) -> Casting:
        return Match()

    def target(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return None


MEANINGS: dict[CastPolicy, Meaning] = {
    CastPolicy.HALF: _Half(),
    CastPolicy.FLOAT: Meaning(),
    CastPolicy.FLOAT_SET_DTYPE: _FloatSetDtype(),
    CastPolicy.FLOAT_APPEND_DTYPE: _FloatAppendDtype(),
    CastPolicy.PROMOTE: _Promote(),
    CastPolicy.MATCH: _AsGiven(),
    CastPolicy.VIEW: _AsGiven(),
    CastPolicy.BANNED: Meaning(),  # where it is allowed
    CastPolicy.NONE: _AsGiven(),
}
