"""Policies at work on functions of clamp's and of the user's: one class a policy."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import prod
from typing import Any

from clamp import bridge
from clamp.bridge import Tensor, TensorLike
from clamp.casting.arguments import reporter, tensors_in
from clamp.casting.operands import Casting, Operand, cast_node, is_overwritten, owned_value, widest
from clamp.casting.policy_table import CastPolicy
from clamp.casting.regions import LAST_USE, Caching, Region
from clamp.ops.cast import cast
from clamp.params import delivery
from clamp.params.updates import changed_since, moment
from clamp.params.weight_cache import Value, weight_cache, weight_cast


class Policy(Casting):
    """A policy: an object of it is at work in calls of one function.

    Attributes:
        in_words: how a function of clamp's runs, for `python -m clamp lists`.
    """

    in_words: str

    @classmethod
    def at_work(cls, region: Region, function: str) -> Casting:
        """Returns the policy at work in a function of clamp's, in a region."""
        return cls()

    @classmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The dtype a user's function gets its floating arguments in; None: as they are."""
        return None

    @classmethod
    def keywords(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments a user's function gets."""
        return kwargs


class Float(Policy):
    """fp32 result; the kernels widen 16-bit operands as they load them."""

    in_words = "in float32"

    @classmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return "float32"

    def result_dtype(self, *operands: Operand) -> str:
        return "float32"


class FloatSetDtype(Float):
    """Like Float, but an output dtype that the caller passes to a user's function is respected."""

    @classmethod
    def target(cls, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return "float32" if kwargs.get("dtype") is None else None


class FloatAppendDtype(Float):
    """Like Float, but a user's function is told so by the argument ``dtype=``."""

    target = Policy.target

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

    def result_dtype(self, *operands: Operand) -> str:
        return bridge.canonical_dtype(operands[0].value.dtype)


# ---------------------------------------------------------------------------------------------- read in 16 bits


class _LateOperand(Operand):
    """A tensor read in another dtype, most often float32 in 16 bits: the copy is made when somebody asks for it."""

    __slots__ = ("_dtype", "_value")
    is_late = True

    def __init__(self, parent: TensorLike, dtype: str) -> None:
        self.parent = parent
        self.weight = None
        self._dtype = dtype
        self._value: Tensor | None = None

    @property
    def dtype(self) -> str:
        return self._dtype

    @property
    def source(self) -> Tensor:
        return self.parent.value if self._value is None else self._value

    def is_not_read(self) -> None:
        """Its copies go by rules of their own."""

    def require_unwritten(self, then: int) -> None:
        if self._value is None and is_overwritten(self.parent.value, then):
            self._value = bridge.Overwritten(self.parent.value, dtype=self._dtype)


_SMALL_COPY = 1 << 14  # bytes


class InputOperand(_LateOperand):
    """A float32 input that needs no gradient, read in 16 bits.

    The user holds the float32 input anyway; keeping its 16-bit copy for backward as well would add to the
    activation memory. The copy is dropped after forward and made again if backward asks for it; a small one, which
    costs less than a launch, stays.
    """

    __slots__ = ()

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._value = cast(self.parent.value, self._dtype)
        return self._value

    def forward_done(self) -> None:
        if self._value is not None and bridge.nbytes(self._value) > _SMALL_COPY:
            self._value = None


_LARGE = 1 << 16  # bytes of a copy that it is worth to look for another backward for


class WeightOperand(_LateOperand):
    """A float32 parameter whose 16-bit copy is not there yet: a product that reads the parameter itself makes it.

    Backward, and who reads the parameter later in the iteration, find the copy: what the parameter was in the forward.
    It goes when a backward that no other will follow has read it (`is_last`), unless other ops have yet to. Another
    backward through the op after all makes it again from the parameter, which must be what it was. In a region that
    keeps no copy for longer than some op is to read it, nor what is made of it, whatever backward has read it is the
    last.
    """

    __slots__ = ("_derived", "_losses", "_made", "_report", "goes_at_once")

    def __init__(self, parent: TensorLike, dtype: str, report: Callable[[str, str], None], last_use: bool) -> None:
        super().__init__(parent, dtype)
        self.weight: Tensor = parent.value
        self.goes_at_once = last_use  # and is kept only as long as somebody holds it
        self._derived: dict[Hashable, Any] = {}
        self._report = report
        self._made = moment()
        self._losses = weight_cache.losses

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._require_unwritten()
            self._value = weight_cast(self.weight, self._dtype, self._report, weakly=self.goes_at_once)
        return self._value

    @property
    def source(self) -> Tensor:
        # A weight times itself: the copy that the operand on the left has just made.
        if self._value is None:
            self._value = weight_cache.known(self.weight, ("cast", self._dtype))
        if self._value is None:
            self._require_unwritten()
        return super().source

    def require_unwritten(self, then: int) -> None:
        """Whoever asks for the copy once more is told."""

    def was_made(self, copy: Tensor) -> None:
        """The copy has been made elsewhere."""
        self._report("float32", self._dtype)
        self._value = copy
        weight_cache.put(self.weight, ("cast", self._dtype), copy, weakly=self.goes_at_once, losses=self._losses)

    def derived(self, kind: Hashable, make: Callable[[Tensor], Value]) -> Value:
        if not self.goes_at_once:
            return super().derived(kind, make)
        value = self._derived[kind] = weight_cache.get(self.weight, kind, make, weakly=True)
        return value

    def goes(self) -> bool:
        is_large = self._value is not None and bridge.nbytes(self._value) > _LARGE
        return self.goes_at_once or (is_large and delivery.running.is_last())

    def drop(self) -> None:
        if self._value is not None:
            weight_cache.loosen(self.weight, ("cast", self._dtype), self._value)
            self._value = None
        self._derived.clear()

    def _require_unwritten(self) -> None:
        if changed_since(self.weight, self._made):
            raise RuntimeError(
                f"backward runs a second time through an op of a parameter of shape {self.shape} whose 16-bit copy was "
                "dropped after the first, and the parameter was written to since: run both backwards before the step, "
                "or write loss.backward(retain_graph=True) or tape.backward(loss, retain_graph=True) at the first one; "
                'with enable_caching="last_use", pass enable_caching=True as well'
            )


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

    def _operand(self, x: Any) -> Operand:
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
            return WeightOperand(x, self.dtype, self._report, self._use_cache == LAST_USE)
        self._report(value.dtype, self.dtype)
        if bridge.is_weight(value):
            return Operand(x, cast(value, self.dtype))
        return Operand(x, cast(value, self.dtype)) if bridge.needs_grad(x) else InputOperand(x, self.dtype)


class HalfButNumbers(Half):
    """As Half, but tensors of one element are read as they are, as Promote does: level O2 of what the lists promote or
    match.

    A loss is such a number. Divided by the rows of the batch, weighted, or added to another one in float16 it would be
    inf beyond 65504, at any loss scale, or 0; and in backward so would the loss scale be, which is 2^16 at first.
    """

    def operands(self, *xs: Any) -> tuple[Operand, ...]:
        if not xs or any(prod(owned_value(x).shape) != 1 for x in xs):
            return super().operands(*xs)
        operands = tuple(Operand(x, x.value) for x in xs)
        bridge.require_same_queue(self.function, *[operand.value for operand in operands])
        return operands

    def result_dtype(self, *operands: Operand) -> str:
        is_number = all(prod(operand.shape) == 1 for operand in operands)
        return widest(*(operand.dtype for operand in operands)) if is_number else self.dtype


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
