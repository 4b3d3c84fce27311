"""Policies at work on functions of clamp's and of the user's: one class a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from clamp import bridge
from clamp.bridge import TensorLike
from clamp.casting.arguments import reporter, tensors_in
from clamp.casting.operands import (
    Casting,
    InputOperand,
    LastUseOperand,
    Operand,
    WeightOperand,
    cast_node,
    owned_value,
    widest,
)  # fmt: skip
from clamp.casting.policy_table import CastPolicy
from clamp.casting.regions import LAST_USE, Caching, Region
from clamp.ops.cast import cast


class Policy(ABC):
    """A policy: an object of it is a `Casting`, at work in calls of one function; here operands as they are.

    Attributes:
        in_words: how a function of clamp's runs, for `python -m clamp lists`.
    """

    in_words: str

    @classmethod
    def at_work(cls, region: Region, function: str) -> Casting:
        """Returns the policy at work in a function of clamp's, in a region."""
        return cls()

    @classmethod
    @abstractmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The dtype a user's function gets its floating arguments in; None: as they are."""

    @classmethod
    def keywords(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments a user's function gets."""
        return kwargs

    def operands(self, *xs: TensorLike) -> tuple[Operand, ...]:
        """The arguments as operands, one by one; see `Casting`."""
        operands = tuple(map(self._operand, xs))
        if len(operands) > 1:
            bridge.require_same_queue("op", *[operand.parent.value for operand in operands])
        return operands

    @abstractmethod
    def result_dtype(self, *operands: Operand) -> str:
        """Dtype of the result."""

    def _operand(self, x: TensorLike) -> Operand:
        return Operand(x, owned_value(x))


class Float(Policy):
    """fp32 result; the kernels widen 16-bit operands as they load them."""

    in_words = "in float32"

    @classmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return "float32"

    def result_dtype(self, *operands: Operand) -> str:
        return "float32"


class FloatSetDtype(Float):
    """As Float, but an output dtype that the caller passes to a user's function is respected."""

    @classmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return "float32" if kwargs.get("dtype") is None else None


class FloatAppendDtype(Float):
    """As Float, but a user's function is told so by the argument ``dtype=``."""

    @classmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return None

    @classmethod
    def keywords(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"dtype": "float32", **kwargs}


class Promote(Policy):
    """The widest of the operands' dtypes; float16 and bfloat16 together give float32."""

    in_words = "in the widest input's dtype"

    @classmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        found = [value.dtype for value in tensors_in((args, kwargs)) if value.dtype in bridge.STORAGE]
        return widest(*found) if found else None

    def result_dtype(self, *operands: Operand) -> str:
        return widest(*(operand.value.dtype for operand in operands))


class Match(Policy):
    """The first operand's dtype."""

    in_words = "in its input's dtype"

    @classmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return None

    def result_dtype(self, *operands: Operand) -> str:
        return bridge.canonical_dtype(operands[0].value.dtype)


class Half(Policy):
    """Operands in the AMP dtype, result in the AMP dtype.

    A leaf keeps its own node as the parent, so its gradient is written in its own dtype, straight from the
    kernels' fp32 accumulators; a parameter's 16-bit copy comes from the weight cache. Anything computed is cast
    by an autograd node.
    """

    in_words = "in {dtype}"

    @classmethod
    def at_work(cls, region: Region, function: str) -> Casting:
        return cls(region.dtype, reporter(region, function), region.cache_enabled)

    @classmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return region.dtype

    def __init__(self, dtype: str, report: Callable[[str, str], None], use_cache: Caching) -> None:
        self.dtype = dtype
        self._storage = bridge.STORAGE[dtype]
        self._report = report
        self._use_cache = use_cache

    def result_dtype(self, *operands: Operand) -> str:
        return self.dtype

    def _operand(self, x: TensorLike) -> Operand:
        value = owned_value(x)
        storage = bridge.STORAGE.get(value.dtype)
        if storage is None:
            return Operand(x, value)
        weight = value if self._use_cache and bridge.is_leaf(x) and bridge.is_weight(value) else None
        if storage == self._storage:
            return Operand(x, value, weight)
        if not bridge.is_leaf(x):
            node = cast_node(x, self.dtype, self._report)
            return Operand(node, node.value)
        if weight is not None:
            kind = LastUseOperand if self._use_cache == LAST_USE else WeightOperand
            return kind(x, self.dtype, self._report)
        self._report(value.dtype, self.dtype)
        if bridge.is_weight(value):
            return Operand(x, cast(value, self.dtype))
        return Operand(x, cast(value, self.dtype)) if bridge.needs_grad(x) else InputOperand(x, self.dtype)


POLICIES: dict[CastPolicy, type[Policy]] = {
    CastPolicy.HALF: Half,
    CastPolicy.FLOAT: Float,
    CastPolicy.FLOAT_SET_DTYPE: FloatSetDtype,
    CastPolicy.FLOAT_APPEND_DTYPE: FloatAppendDtype,
    CastPolicy.PROMOTE: Promote,
    CastPolicy.MATCH: Match,
    CastPolicy.VIEW: Match,
    CastPolicy.BANNED: Float,  # where it is allowed
    CastPolicy.NONE: Match,
}
