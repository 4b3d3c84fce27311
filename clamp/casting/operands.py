"""An op's arguments as its kernels read them, and its result bound into the autograd graph.

A function of clamp is written once, against this interface::

    @implements("netcl.autograd.tanh")
    def tanh(casting, x, tape=None):
        (x,) = casting.operands(x)
        out = ops.tanh(x.value, casting.result_dtype(x))
        return bound(out, {x: lambda grad, dtype: ops.tanh_backward(grad, x.value, out_dtype=dtype)}, "tanh", tape)

and runs under every policy (policies.py): ``Half`` casts the operands, ``Float`` lets the kernel widen them as it
loads, ``Promote`` and ``Match`` read them as they are.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, partial
from math import prod
from typing import Any, Self, TypeAlias

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor, TensorLike
from clamp.casting.regions import LAST_USE, Caching, current_region
from clamp.casting.results import RESULTS
from clamp.ops.cast import cast
from clamp.ops.loss_scale import fitted, taken_off
from clamp.params import delivery, graphs
from clamp.params.updates import changed_since, moment
from clamp.params.weight_cache import Value, weight_cache, weight_cast


class NotOwned(Exception):
    """These arguments are none of clamp's: float64, the numpy backend, a traced value. netcl's own function
    takes over, after any 16-bit input has been widened."""


class Operand:
    """One tensor argument of an op.

    Attributes:
        parent: the node (or bare tensor) that the gradient goes to.
        value: the tensor that the kernels read.
        weight: the parameter whose derived values the weight cache may hold; None if it must not, or is none.
        is_late: whether the value is made when somebody asks for it.
        goes_at_once: whether it goes after the forward where no input's gradient reads it.
    """

    __slots__ = ("parent", "value", "weight")
    is_late = goes_at_once = False

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
    def dtype(self) -> str:
        """Dtype of the value, also of one that is still to be made."""
        return bridge.canonical_dtype(self.value.dtype)

    @property
    def source(self) -> Tensor:
        """The value; in place of one that is still to be made what it is made from, for kernels that round as they
        read."""
        return self.value

    def derived(self, kind: Hashable, make: Callable[[Tensor], Value]) -> Value:
        """Returns a value derived from the weight, such as packed panels: the cached one, or ``make(weight)``."""
        assert self.weight is not None
        return weight_cache.get(self.weight, kind, make)

    def forward_done(self) -> None:
        """Called when the op's result stands and only backward may still read the value."""

    def is_not_read(self) -> None:
        """Called when backward does not read the value, either."""
        self.value = _NOT_READ

    def require_unwritten(self, then: int) -> None:
        """Called before gradient functions, which must not read what was written to, or stepped, since a ``moment``."""
        if is_overwritten(self.value, then):
            self.value = bridge.Overwritten(self.value)
            self.weight = None if self.weight is None else self.value

    def goes(self) -> bool:
        """Returns whether the value, a copy of a weight, is dropped when the backward that runs has read it."""
        return False

    def drop(self) -> None:
        """Called when only another backward may still read the copy."""


_NOT_READ: Any = None


def is_overwritten(value: Any, then: int) -> bool:
    """Returns whether a tensor was written to, or stepped, since a ``moment``."""
    if not isinstance(value, Tensor) or isinstance(value, bridge.WithoutMemory):
        return False
    return changed_since(value, then, surely=True)


class Casting(ABC):
    """A policy at work in calls of one function; here operands as they are."""

    function = "op"  # for errors

    def of(self, function: str) -> Self:
        """This one, which knows the name of its function."""
        self.function = function
        return self

    def operands(self, *xs: Any) -> tuple[Operand, ...]:
        """The arguments as operands, one by one, all on one queue.

        Raises:
            NotOwned: an argument is not clamp's to compute with.
            ValueError: the arguments are on different queues.
        """
        operands = tuple(map(self._operand, xs))
        if len(operands) > 1:
            bridge.require_same_queue(self.function, *[operand.parent.value for operand in operands])
        return operands

    def _operand(self, x: Any) -> Operand:
        return Operand(x, owned_value(x))

    @abstractmethod
    def result_dtype(self, *operands: Operand) -> str:
        """Dtype of the result."""


def owned_value(x: Any) -> Tensor:
    """The tensor of an argument that clamp's kernels can read: fp32, fp16, bf16 or int32, on an OpenCL device.

    Raises:
        NotOwned: it is something else, or no node or tensor.
        TypeError: it is a node in a node.
    """
    value = x.value if isinstance(x, (Node, Tensor)) else None
    if not isinstance(value, Tensor):
        if isinstance(value, Node):
            raise TypeError("a node was given to ag.tensor, which takes tensors: pass the node on as it is")
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
    return Operand(x, owned_value(x))


def float_operands(casting: Casting, *xs: Any) -> tuple[Operand, ...]:
    """The arguments as operands, where all of them are floating.

    Raises:
        NotOwned: one of them is not float32, float16 or bfloat16 on an OpenCL device.
        ValueError: they are on different queues.
    """
    operands = casting.operands(*xs)
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
    """NotOwned where an operand that was given is not floating: netcl's own function judges integers."""
    if any(operand is not None and operand.value.dtype not in bridge.STORAGE for operand in operands):
        raise NotOwned


def require_floats(name: str, **operands: Operand) -> None:
    """TypeError where one of a function's operands is not floating and netcl's own would misread its bytes."""
    for argument, operand in operands.items():
        if operand.value.dtype not in bridge.STORAGE:
            raise TypeError(
                f"{name}: {argument} is {operand.value.dtype}, and must be float32, float16 or bfloat16; "
                "convert it, Tensor.from_host(queue, x.to_host().astype(numpy.float32))"
            )


def widest(*dtypes: str) -> str:
    """The dtype that holds every one of these floating dtypes; integer dtypes do not count."""
    kinds = {bridge.canonical_dtype(dtype) for dtype in dtypes if dtype in bridge.STORAGE}
    return kinds.pop() if len(kinds) == 1 else "float32"


def say_nothing(source: str, target: str) -> None:
    """Says nothing of a cast that nobody asks about."""


def cast_node(
    x: TensorLike, dtype: str, report: Callable[[str, str], None] = say_nothing, use_cache: Caching = False
) -> TensorLike:
    """x in another dtype, by an autograd node whose backward casts the gradient back; x itself if nothing changes."""
    value = x.value
    if bridge.STORAGE[value.dtype] == bridge.STORAGE[dtype]:
        return x
    if use_cache and bridge.is_leaf(x) and bridge.is_weight(value):
        out = weight_cast(value, dtype, report, weakly=use_cache == LAST_USE)
        # A tensor of its own for each node: the engine adds to the gradient it finds on a node's tensor.
        out = bridge.view(out, out.shape)
    else:
        report(value.dtype, dtype)
        out = cast(value, dtype)
    operand = Operand(x, value)
    return bound(out, {operand: lambda grad, dtype: cast(grad, dtype)}, "cast", moves=True)


#: Operand, or several whose gradients are computed together -> function that takes the gradient of the result, in the
#: result's dtype, and the ``grad_dtype`` of each operand (None, if it wants no gradient), and returns the operand's in
#: that, or one for each of several. None: never a gradient.
Gradients: TypeAlias = dict[Operand | tuple[Operand, ...], Callable[..., Any] | None]


def bound(
    out: Tensor,
    gradients: Gradients,
    op_name: str,
    tape: Tape | None = None,
    *,
    first: Callable[[Tensor], Tensor] | None = None,
    moves: bool = False,
    unread: Iterable[Operand] = (),
    besides: Sequence[Operand] = (),
) -> Any:
    """Binds a result into the autograd graph: a Node, or a bare Tensor for bare tensors and under no_grad.

    Args:
        gradients: one entry for each operand. Backward computes those that are wanted, in this order; of gradients
            computed together, those that nobody wants are dropped.
        first: applied to the gradient of ``out``, once, for all of them.
        moves: the gradient functions compute nothing, and take a gradient of any dtype, also of an ``out`` in 16 bits.
            They read no operand's value.
        unread: operands whose values the gradient functions do not read, so that they are not kept for them.
        besides: others whose values they read: indices, labels, a mask, statistics, ``out`` itself.
    """
    operands: list[Operand] = []
    for key in gradients:
        operands += key if isinstance(key, tuple) else (key,)
    late = [operand for operand in operands if operand.is_late]
    for operand in late:
        operand.forward_done()
        if operand.goes_at_once and _are_leaves(operands):  # a first layer's: read for no input's gradient
            operand.drop()
    then = moment()

    def backward(grad: Tensor) -> list[Tensor | None]:
        if moment() != then:
            _require_unwritten((*operands, *besides), then)
        wanted = [operand for operand in operands if bridge.needs_grad(operand.parent)]
        going = late and [operand for operand in late if operand.goes()]
        if going and _are_leaves(wanted):  # as above
            for operand in going:
                operand.drop()
        if first is not None and wanted:
            grad = first(grad)
        found = _found(gradients, wanted, grad)
        for operand in going:
            operand.drop()
        return [found.get(operand) for operand in operands]

    is_fitted = not moves and out.dtype in bridge.HALF_DTYPES
    run: Any = partial(_in_16_bits, backward, str(out.dtype), bridge.is_patched()) if is_fitted else backward
    run.operands = operands
    parents = [operand.parent for operand in operands]
    made = RESULTS.own(bridge.make_node(out, run, parents, op_name, tape), parents)
    for needless in operands if moves else unread:
        needless.is_not_read()
    if prod(out.shape) > graphs.LARGE or prod(parents[0].value.shape) > graphs.LARGE:
        graphs.free_unread_values(parents, bool(RESULTS.observers))
    return made


def _require_unwritten(operands: Iterable[Operand], then: int) -> None:
    for operand in operands:
        operand.require_unwritten(then)


def _in_16_bits(
    backward: Callable[[Tensor], list[Tensor | None]], dtype: str, was_patched: bool, grad: Tensor
) -> list[Tensor | None]:
    """The backward of a 16-bit result. Where layers have scales of their own, the gradient comes in float32, and so do
    those go on that are made of it.

    Raises:
        RuntimeError: netcl's own engine runs it, which was patched in the forward.
    """
    running = delivery.running
    if running.now is None and was_patched and not bridge.is_patched():
        raise RuntimeError(
            "AMP was shut down, by another thread it may be, between a forward in 16 bits and its backward, which is "
            "netcl's own now and would misread 16-bit gradients: compute the loss again, and call shutdown() where no "
            "thread trains any more"
        )
    if not running.layerwise or running.scale is None:
        return backward(grad)
    grad, factor = fitted(grad, bridge.canonical_dtype(dtype), running.scale)
    return [x if x is None else taken_off(x, factor) for x in backward(grad)]


def _found(gradients: Gradients, wanted: list[Operand], grad: Tensor) -> dict[Operand, Tensor | None]:
    """The gradients that are wanted, by their operands."""
    found: dict[Operand, Tensor | None] = {}
    for key, gradient in gradients.items():
        if gradient is None:
            continue
        if not isinstance(key, tuple):
            if key in wanted:
                found[key] = gradient(grad, key.grad_dtype)
        elif any(operand in wanted for operand in key):
            dtypes = [operand.grad_dtype if operand in wanted else None for operand in key]
            together = zip(key, gradient(grad, *dtypes), strict=True)
            found.update((operand, result) for operand, result in together if operand in wanted)
    return found


def _are_leaves(operands: Iterable[Operand]) -> bool:
    return all(bridge.is_leaf(operand.parent) for operand in operands)
