"""An op's arguments as its kernels read them, and its result bound into the autograd graph.

A function of clamp is written once, against this interface::

    @implements("netcl.autograd.tanh")
    def tanh(casting, x, tape=None):
        (x,) = casting.operands(x)
        out = ops.tanh(x.value, casting.result_dtype(x))
        return bound(out, {x: lambda grad: ops.tanh_backward(grad, x.value, out_dtype=x.grad_dtype)}, "tanh", tape)

and runs under every policy (policies.py): ``Half`` casts the operands, ``Float`` lets the kernel widen them as it
loads, ``Promote`` and ``Match`` read them as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable
from functools import cache, partial
from math import prod
from typing import Any, Protocol, TypeAlias

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor, TensorLike
from clamp.casting.regions import LAST_USE, Caching, current_region
from clamp.casting.results import RESULTS
from clamp.ops.cast import cast
from clamp.ops.loss_scale import fitted, taken_off
from clamp.params import delivery, graphs
from clamp.params.updates import changed_since, moment
from clamp.params.weight_cache import Value, weight_cast, weights


class NotOwned(Exception):
    """These arguments are none of clamp's: float64, the numpy backend, a traced value. netcl's own function
    takes over, after any 16-bit input has been widened."""


class Operand:
    """One tensor argument of an op.

    Attributes:
        parent: the node (or bare tensor) that the gradient goes to.
        value: the tensor that the kernels read.
        weight: the parameter whose derived values the weight cache may hold; None if it must not, or is none.
    """

    __slots__ = ("parent", "value", "weight")

    def __init__(self, parent: TensorLike, value: Tensor, weight: Tensor | None = None) -> None:
        self.parent = parent
        self.value = value
        self.weight = weight

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(self.parent.value.shape)

    @property
    def grad_dtype(self) -> str:
        """Dtype of the parent's gradient: that of the parent's own value, unless a 16-bit parameter wants fp32, or
        layers have scales of their own."""
        return delivery.gradient_dtype(bridge.gradient_dtype(self.parent.value))

    @property
    def needs_grad(self) -> bool:
        """Returns whether backward must compute a gradient for the parent."""
        return bridge.needs_grad(self.parent)

    @property
    def wanted_dtype(self) -> str | None:
        """``grad_dtype``, or None if no gradient is wanted: for ops that compute several gradients together."""
        return self.grad_dtype if self.needs_grad else None

    @property
    def dtype(self) -> str:
        """Dtype of the value, also of one that is still to be made."""
        return bridge.canonical_dtype(self.value.dtype)

    @property
    def source(self) -> Tensor:
        """The value; in place of one that is still to be made what it is made from, for kernels that round as they
        read."""
        return self.value

    def derived(self, kind: Hashable, make: Callable[[Tensor], Value]) -> Value:
        """What is derived from the weight, packed panels say: the kept one, or ``make(weight)``."""
        assert self.weight is not None
        return weights.get(self.weight, kind, make)

    def forward_done(self) -> None:
        """Called when the op's result stands and only backward may still read the value."""

    def is_not_read(self) -> None:
        """Called when backward does not read the value, either."""
        self.value = _NOT_READ


_NOT_READ: Any = None


class _LateOperand(Operand):
    """A tensor read in another dtype, most often float32 in 16 bits: the copy is made when somebody asks for it."""

    __slots__ = ("_dtype", "_value")

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
        return bridge.value_of(self.parent) if self._value is None else self._value

    def is_not_read(self) -> None:
        """Its copies go by rules of their own."""


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
    backward through the op after all makes it again from the parameter, which must be what it was.
    """

    __slots__ = ("_made", "_report")
    _weakly = False  # whether the copy is kept only as long as somebody holds it

    def __init__(self, parent: TensorLike, dtype: str, report: Callable[[str, str], None]) -> None:
        super().__init__(parent, dtype)
        self.weight: Tensor = bridge.value_of(parent)
        self._report = report
        self._made = moment()

    @property
    def value(self) -> Tensor:
        if self._value is None:
            self._require_unwritten()
            self._value = weight_cast(self.weight, self._dtype, self._report, weakly=self._weakly)
        return self._value

    @property
    def source(self) -> Tensor:
        # A weight times itself: the copy that the operand on the left has just made.
        if self._value is None:
            self._value = weights.known(self.weight, ("cast", self._dtype))
        return super().source

    def was_made(self, copy: Tensor) -> None:
        """The copy has been made elsewhere."""
        self._report("float32", self._dtype)
        self._value = copy
        weights.put(self.weight, ("cast", self._dtype), copy, weakly=self._weakly)

    def goes(self) -> bool:
        """Returns whether the copy is dropped when the backward that runs has read it."""
        return self._value is not None and bridge.nbytes(self._value) > _LARGE and delivery.is_last()

    def drop(self) -> None:
        """Called when only another backward may still read the value."""
        if self._value is not None:
            weights.loosen(self.weight, ("cast", self._dtype), self._value)
            self._value = None

    def _require_unwritten(self) -> None:
        if changed_since(self.weight, self._made):
            raise RuntimeError(
                f"backward runs a second time through an op of a parameter of shape {self.shape} whose 16-bit copy was "
                "dropped after the first, and the parameter was written to since: run both backwards before the step, "
                "or write loss.backward(retain_graph=True) or tape.backward(loss, retain_graph=True) at the first one; "
                'with enable_caching="last_use", pass enable_caching=True as well'
            )


class LastUseOperand(WeightOperand):
    """As a `WeightOperand`, in a region that keeps no copy for longer than some op is to read it, nor what is made of
    it: whatever backward has read it is the last."""

    __slots__ = ("_derived",)
    _weakly = True

    def __init__(self, parent: TensorLike, dtype: str, report: Callable[[str, str], None]) -> None:
        super().__init__(parent, dtype, report)
        self._derived: dict[Hashable, Any] = {}

    def derived(self, kind: Hashable, make: Callable[[Tensor], Value]) -> Value:
        value = self._derived[kind] = weights.get(self.weight, kind, make, weakly=True)
        return value

    def goes(self) -> bool:
        return True

    def drop(self) -> None:
        super().drop()
        self._derived.clear()


class Casting(Protocol):
    """A policy at work in one call of one function."""

    def operands(self, *xs: TensorLike) -> tuple[Operand, ...]:
        """The arguments as operands, all on one queue.

        Raises:
            NotOwned: an argument is not clamp's to compute with.
            ValueError: the arguments are on different queues.
        """

    def result_dtype(self, *operands: Operand) -> str:
        """Dtype of the result."""


def owned_value(x: TensorLike) -> Tensor:
    """The tensor of an argument that clamp's kernels can read: fp32, fp16, bf16 or int32, on an OpenCL device.

    Raises:
        NotOwned: it is something else.
    """
    value = bridge.value_of(x)
    if not isinstance(value, Tensor):
        raise NotOwned
    if not bridge.on_device(value):
        if current_region() is not None:  # somebody asked for AMP here
            note_numpy_backend()
        raise NotOwned
    if value.dtype not in bridge.STORAGE and value.dtype not in ("int32", "int"):
        raise NotOwned
    return value


@cache
def note_numpy_backend() -> None:
    """Says, once in a process, that netcl's numpy backend is left alone."""
    warnings.warn(
        "AMP leaves netcl's numpy backend (device 'cpu') alone: it computes in fp32 on the host, without OpenCL "
        "kernels. For mixed precision on a CPU use an OpenCL driver; `python -m clamp doctor` shows what is there.",
        UserWarning,
        stacklevel=6,
    )


def as_is(x: Any) -> Operand:
    """A secondary input (bias, slope, scale of a norm, indices): read in its own dtype under every policy.

    Raises:
        NotOwned: it is no tensor of clamp's.
    """
    node = as_node(x)
    return Operand(node, owned_value(node))


def float_operands(casting: Casting, *xs: Any) -> tuple[Operand, ...]:
    """The arguments as operands, where all of them are floating.

    Raises:
        NotOwned: one of them is not float32, float16 or bfloat16 on an OpenCL device.
        ValueError: they are on different queues.
    """
    operands = casting.operands(*map(as_node, xs))
    require_floating(*operands)
    return operands


def floats_as_is(*xs: Any) -> tuple[Operand, ...]:
    """Secondary inputs (see ``as_is``), where all of them are floating.

    Raises:
        NotOwned: one of them is not float32, float16 or bfloat16 on an OpenCL device.
    """
    operands = tuple(map(as_is, xs))
    require_floating(*operands)
    return operands


def require_floating(*operands: Operand | None) -> None:
    """Raises NotOwned where an operand that was given is not floating: netcl's own function judges integers."""
    if any(operand is not None and operand.value.dtype not in bridge.STORAGE for operand in operands):
        raise NotOwned


def widest(*dtypes: str) -> str:
    """The dtype that holds every one of these floating dtypes; integer dtypes do not count."""
    kinds = {bridge.canonical_dtype(dtype) for dtype in dtypes if dtype in bridge.STORAGE}
    return kinds.pop() if len(kinds) == 1 else "float32"


def cached_cast(tensor: Tensor, dtype: str, report: Callable[[str, str], None], use_cache: Caching) -> Tensor:
    """A parameter's value in another dtype, made once for as long as the parameter is not written."""

    if use_cache:
        return weight_cast(tensor, dtype, report, weakly=use_cache == LAST_USE)
    report(tensor.dtype, dtype)
    return cast(tensor, dtype)


def say_nothing(source: str, target: str) -> None:
    """Says nothing of a cast that nobody asks about."""


def cast_node(
    x: TensorLike, dtype: str, report: Callable[[str, str], None] = say_nothing, use_cache: Caching = True
) -> TensorLike:
    """x in another dtype, by an autograd node whose backward casts the gradient back; x itself if nothing changes."""
    value = bridge.value_of(x)
    if bridge.STORAGE[value.dtype] == bridge.STORAGE[dtype]:
        return x
    if bridge.is_leaf(x) and bridge.is_weight(value):
        # A tensor of its own for each node: the engine adds to the gradient it finds on a node's tensor.
        out = cached_cast(value, dtype, report, use_cache)
        out = bridge.view(out, out.shape)
    else:
        report(value.dtype, dtype)
        out = cast(value, dtype)
    operand = Operand(x, value)
    return bound(out, {operand: lambda grad: cast(grad, operand.grad_dtype)}, "cast", moves=True)


#: Operand, or several whose gradients are computed together -> function that takes the gradient of the result, in the
#: result's dtype, and returns the operand's in its ``grad_dtype``, or one for each of several. None: never a gradient.
Gradients: TypeAlias = dict[Operand | tuple[Operand, ...], Callable[[Tensor], Any] | None]


def bound(
    out: Tensor,
    gradients: Gradients,
    op_name: str,
    tape: Tape | None = None,
    *,
    first: Callable[[Tensor], Tensor] | None = None,
    moves: bool = False,
    unread: Iterable[Operand] = (),
) -> Any:
    """Binds a result into the autograd graph: a Node, or a bare Tensor for bare tensors and under no_grad.

    Args:
        gradients: one entry for each operand. Backward computes those that are wanted, in this order; of gradients
            computed together, those that nobody wants are dropped.
        first: applied to the gradient of ``out``, once, for all of them.
        moves: the gradient functions compute nothing, and take a gradient of any dtype, also of an ``out`` in 16 bits.
            They read no operand's value.
        unread: operands whose values the gradient functions do not read, so that they are not kept for them.
    """
    operands: list[Operand] = []
    for key in gradients:
        operands += key if isinstance(key, tuple) else (key,)
    late = [operand for operand in operands if isinstance(operand, _LateOperand)]
    for operand in late:
        operand.forward_done()
        if type(operand) is LastUseOperand and _are_leaves(operands):  # a first layer's: read for no input's gradient
            operand.drop()
    copies = [operand for operand in late if isinstance(operand, WeightOperand)] if late else []

    def backward(grad: Tensor) -> list[Tensor | None]:
        wanted = [operand for operand in operands if bridge.needs_grad(operand.parent)]
        going = copies and [operand for operand in copies if operand.goes()]
        if going and _are_leaves(wanted):  # as above
            _drop(going)
        if first is not None and wanted:
            grad = first(grad)
        found = _found(gradients, wanted, grad)
        if going:
            _drop(going)
        return [found.get(operand) for operand in operands]

    is_fitted = not moves and out.dtype in bridge.HALF_DTYPES
    run: Any = partial(_in_16_bits, backward, str(out.dtype)) if is_fitted else backward
    run.operands = operands
    parents = [operand.parent for operand in operands]
    made = RESULTS.own(bridge.make_node(out, run, parents, op_name, tape), parents)
    for needless in operands if moves else unread:
        needless.is_not_read()
    if prod(out.shape) > graphs.LARGE or prod(parents[0].value.shape) > graphs.LARGE:
        graphs.let_values_go(parents, RESULTS.watched)
    return made


def _in_16_bits(backward: Callable[[Tensor], list[Tensor | None]], dtype: str, grad: Tensor) -> list[Tensor | None]:
    """The backward of a 16-bit result. Where layers have scales of their own, the gradient comes in float32, and so do
    those go on that are made of it."""
    scale = delivery.layer_scaling()
    if scale is None:
        return backward(grad)
    grad, factor = fitted(grad, bridge.canonical_dtype(dtype), scale)
    return [x if x is None else taken_off(x, factor) for x in backward(grad)]


def _found(gradients: Gradients, wanted: list[Operand], grad: Tensor) -> dict[Operand, Tensor | None]:
    """The gradients that are wanted, by their operands."""
    found: dict[Operand, Tensor | None] = {}
    for key, gradient in gradients.items():
        if gradient is None:
            continue
        if not isinstance(key, tuple):
            if key in wanted:
                found[key] = gradient(grad)
        elif any(operand in wanted for operand in key):
            together = zip(key, gradient(grad), strict=True)
            found.update((operand, result) for operand, result in together if operand in wanted)
    return found


def _are_leaves(operands: Iterable[Operand]) -> bool:
    return all(bridge.is_leaf(operand.parent) for operand in operands)


def _drop(operands: Iterable[WeightOperand]) -> None:
    for operand in operands:
        operand.drop()


def as_node(x: Any) -> TensorLike:
    """x if it is a node or tensor.

    Raises:
        NotOwned: it is neither.
    """
    if isinstance(x, Node | Tensor):
        return x
    raise NotOwned
