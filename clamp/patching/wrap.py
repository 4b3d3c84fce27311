"""One policy -> one wrapper, in wrapt's form ``wrapper(wrapped, instance, args, kwargs)``.

Three kinds of function are wrapped:

* clamp has kernels for it (``OWNED``): clamp's function runs in place of netcl's, under the policy's casting;
* netcl's own, without a kernel of clamp's: its 16-bit inputs are widened and it runs in fp32, forward and
  backward, because netcl's 16-bit kernels are wrong or missing;
* the user's: its arguments are cast as the policy says, and it runs as it is.

And calls of modules, where rules say in which dtypes these compute.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any

import numpy as np
import pyopencl as cl

from clamp.bridge import HALF_DTYPES, STORAGE, Node, Parameter, Tensor, canonical_dtype, on_device
from clamp.casting.arguments import casts_in, holds_half, tensors_in
from clamp.casting.operands import Casting, NotOwned
from clamp.casting.policies import POLICIES, HalfButNumbers, Promote
from clamp.casting.policy_table import CastPolicy, Entry, netcl_defects, netcl_misreads
from clamp.casting.regions import Region, called_in, casting_region, current_region, in_region
from clamp.casting.registry import Function
from clamp.casting.results import RESULTS
from clamp.functions.recompute import is_checkpointed
from clamp.opencl.host_steps import recorder
from clamp.ops.arguments import shown
from clamp.params import delivery, gradient_marks
from clamp.scaling.dynamic_scale import is_anything_late, settle_before_reading
from clamp.scaling.step_report import is_called_by_user, warn_user

Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


class Installed:
    """Says whether the patches are in place."""

    now = False


def _before_reading(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a function reads its arguments, which may be gradients."""
    settle_before_reading(args, kwargs)
    if delivery.waiting() and delivery.running.now is None:  # else it hands on what comes to its own backward
        warn_of_scaled(tensors_in((args, kwargs)), f"read by {name}")


def warn_of_scaled(tensors: Iterable[Tensor], how: str) -> None:
    """Says once for a loss scale that a gradient among these is not the true one yet, inside of a scaled pass: who
    scales by hand knows."""
    for scale in filter(None, map(gradient_marks.scale_of, tensors)):
        if not scale.state.is_told_of and scale.state.seen != 1 and is_called_by_user():
            scale.state.is_told_of = True
            warn_user(
                f"a gradient was {how} while it is still multiplied by the loss scale, so that its values, its norm "
                "and what is computed from it are that many times too large: do that after "
                "`with handle.scale_loss(...)`, before the step"
            )


#: A recording of netcl's own would drop out the same in every replay, and a forward that is run again something else:
#: clamp's draws anew there, and drops out the same here.
_DRAWS = frozenset({"netcl.autograd.dropout", "netcl.ops.elementwise.dropout"})


def passes_without_casts(entry: Entry) -> bool:
    """Returns whether a function that clamp has kernels for runs netcl's where casts are off and no input is 16-bit."""
    return entry.name not in netcl_defects() and entry.name not in _DRAWS


def owned_wrapper(entry: Entry, function: Function) -> Wrapper:
    """Wrapper for a netcl function that clamp has kernels for."""
    always, draws = entry.name in netcl_defects(), entry.name in _DRAWS
    as_given = Promote().of(entry.function)

    def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _before_reading(entry.function, args, kwargs)
        region = casting_region()
        if region is None:
            # No casts here, but a 16-bit input must still not reach netcl's kernels, nor any a function of netcl's
            # that is wrong: a loss that the user keeps in float32 has to train as well.
            ours = always or (draws and (recorder() is not None or is_checkpointed()))
            if not ours and not holds_half(args, kwargs):
                return RESULTS.netcls(wrapped(*args, **kwargs), args)
            casting: Casting = as_given
        else:
            casting = region.castings.get(entry.name) or _add_casting(region, entry)
        try:
            return function(casting, *args, **kwargs)
        except NotOwned:
            _refuse_misread(entry, wrapped, args, kwargs)
            return _run_widened(entry, wrapped, args, kwargs)
        except Exception as error:
            _explain(entry, args, kwargs, error)
            raise

    return call


_READ_ON_HOST = frozenset({"angles_rad", "idx", "labels"})  # by netcl, in any dtype


def _refuse_misread(entry: Entry, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises TypeError where netcl's function, which a call is left to, would take a tensor's bytes for numbers of
    another dtype: its kernels have the dtype of one tensor for all of them, and some have float32 whatever they get."""
    tensors = [x.value if isinstance(x, Node) else x for x in (*args, *kwargs.values())]
    if all(not isinstance(x, Tensor) or x.dtype in STORAGE for x in tensors):
        return  # before the signature is made, which takes long
    names = [*islice(inspect.signature(function).parameters, len(args)), *kwargs]
    dtypes = {
        name: "float32" if x.dtype in STORAGE else canonical_dtype(x.dtype)
        for name, x in zip(names, tensors, strict=False)
        if isinstance(x, Tensor) and name not in _READ_ON_HOST and on_device(x)
    }
    foreign = [(name, dtype) for name, dtype in dtypes.items() if dtype != "float32"]
    if foreign and (len(set(dtypes.values())) > 1 or entry.name in netcl_misreads()):
        name, dtype = foreign[0]
        raise TypeError(
            f"{entry.function}: {name} is {dtype}, which netcl's kernel would misread: pass a float32, float16 or "
            "bfloat16 tensor (indices, labels, positions, masks: int32 or int64)"
        )


def netcl_wrapper(entry: Entry, listed: bool = True) -> Wrapper:
    """Wrapper for a netcl function that clamp has no kernels for: 16-bit inputs are widened to fp32.

    Args:
        listed: whether a list names the function. One in fp32 by a list is so throughout: it calls no function in half.
    """

    def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _before_reading(entry.function, args, kwargs)
        region = casting_region()
        policy = None if region is None else _policy_in(region, entry)
        if holds_half(args, kwargs):
            return _run_widened(entry, wrapped, args, kwargs)
        if region is not None and listed and policy is CastPolicy.FLOAT:
            return _run(entry, partial(called_in, region.in_float32, wrapped), args, kwargs)
        return _run(entry, wrapped, args, kwargs)

    return call


_PLAIN = frozenset((int, float, bool, str, type(None), slice, np.ndarray))


def passes_of(function: FunctionType) -> Callable[..., bool]:
    """Returns a function that says of the arguments of a call where casts are off, all by position, that netcl's own
    function may run at once: no argument is 16-bit or may be a gradient of a pass that is yet to be repeated, none is
    written, and nobody is told of results."""
    places = [place for _, place in written_places(function)]
    if not places:
        return _passes

    def passes(*args: Any) -> bool:
        for place in places:
            if args[place] is not None:
                return False
        return _passes(*args)

    return passes


def _passes(*args: Any) -> bool:
    if RESULTS.observers or is_anything_late():
        return False
    for x in args:  # of every call inside disable_casts(): short
        value = x.value if type(x) is Node else x
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.dtype != "float32" and value.dtype in HALF_DTYPES:
                return False
        elif kind is tuple and value and type(value[0]) is int:
            pass  # a shape
        elif kind not in _PLAIN and holds_half((x,), {}):
            return False
    return True


def user_wrapper(name: str, policy: CastPolicy) -> Wrapper:
    """Wrapper for a user's function: its arguments are cast, nested calls inside it cast nothing more."""

    def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = casting_region()
        if region is None:
            return wrapped(*args, **kwargs)
        if policy is CastPolicy.BANNED and not region.allow_banned:
            raise RuntimeError(f"{name} is registered as banned under AMP")
        kwargs = POLICIES[policy].keywords(kwargs)
        target = POLICIES[policy].target(region, args, kwargs)
        if target is None:
            return called_in(None, wrapped, *args, **kwargs)
        _before_reading(name, args, kwargs)
        refuse_half_targets(wrapped, args, kwargs)
        return casts_in(region, target, name).call(partial(called_in, None, wrapped), args, kwargs)

    return call


def _add_casting(region: Region, entry: Entry) -> Casting:
    """The casting of a function in a region, made once."""
    policy = _policy_in(region, entry)
    kind = POLICIES[policy]
    if policy is CastPolicy.HALF and region.policies.entry_like(entry).by_level:
        kind = HalfButNumbers
    casting = region.castings[entry.name] = kind.at_work(region, entry.function).of(entry.function)
    return casting


def _policy_in(region: Region, entry: Entry) -> CastPolicy:
    """The policy of a listed function in a region; RuntimeError where it is banned there."""
    policy = region.policy_of(entry)
    if policy is CastPolicy.BANNED and not region.allow_banned:
        raise RuntimeError(
            f"{entry.function} is banned under AMP: {entry.reason} "
            f"amp.init(allow_banned=True) runs it in fp32 all the same."
        )
    return policy


def _run_widened(entry: Entry, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """netcl's own function in fp32. What it is made of runs on clamp's kernels, without netcl's defects."""
    refuse_half_targets(wrapped, args, kwargs)
    casting = casting_region()
    in_float32 = None if casting is None else casting.in_float32
    run = partial(called_in, in_float32, wrapped)
    casts = casts_in(current_region(), "float32", entry.function)
    return casts.call(lambda *xs, **named: _run(entry, run, xs, named), args, kwargs)


def _run(entry: Entry, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """netcl's own function. Its errors name the call, its results are told of."""
    try:
        return RESULTS.netcls(wrapped(*args, **kwargs), args)
    except Exception as error:
        _explain(entry, args, kwargs, error)
        raise


def _explain(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
    """Notes on an error that does not name the function, one of numpy's or a driver's, by which call it came.

    Raises:
        TypeError: an argument of the call lacks what tensors have.
    """
    given = [*args, *kwargs.values()]
    given += [x for xs in given if isinstance(xs, list | tuple) for x in xs]
    if isinstance(error, AttributeError | _NodeOfArrayError) and any(x is error.obj for x in given):
        _refuse_no_tensor(entry, error)
    for x in given:
        if isinstance(x, Node) and isinstance(x.value, np.ndarray):
            raise _NodeOfArrayError(entry, x.value) from error
    if entry.function in str(error):
        return
    while args and args[-1] is None:  # a default, which AMP passes by position
        args = args[:-1]
    call = [*map(_in_words, args), *(f"{name}={_in_words(x)}" for name, x in kwargs.items() if x is not None)]
    error.add_note(f"This came of the call {entry.function}({', '.join(call)})")
    values = [x.value for x in given if isinstance(x, Node | Tensor)]
    device = next((x.queue.device for x in values if isinstance(x, Tensor) and on_device(x)), None)
    if device is not None and getattr(error, "code", None) in _GROUP_TOO_LARGE:
        error.add_note(
            f"whose kernel takes more work-items to a group than {device.name} has room for "
            f"({device.max_work_group_size} at most, fewer for some kernels)"
        )


_GROUP_TOO_LARGE = cl.status_code.INVALID_WORK_GROUP_SIZE, cl.status_code.INVALID_WORK_ITEM_SIZE


class _NodeOfArrayError(TypeError):
    """A node of a numpy array, which the user has made, or netcl, of an array that it was given."""

    def __init__(self, entry: Entry, array: np.ndarray[Any, Any]) -> None:
        self.obj = array
        super().__init__(
            f"{entry.function} was given a node of a numpy array, and nodes are of tensors: pass "
            "ag.tensor(Tensor.from_host(queue, array))"
        )


def _in_words(x: Any) -> str:
    value = x.value if isinstance(x, Node) else x
    if isinstance(value, Tensor):
        return f"{type(x).__name__.lower()} of {value.dtype} {tuple(value.shape)}"
    if isinstance(x, list | tuple) and any(isinstance(one, Node | Tensor) for one in x):
        return f"[{', '.join(map(_in_words, x))}]"
    return f"array of {x.dtype} {x.shape}" if isinstance(x, np.ndarray) else reprlib.repr(x)


def _refuse_no_tensor(entry: Entry, error: AttributeError | _NodeOfArrayError) -> None:
    """Raises TypeError for what lacks something that tensors have."""
    for kind, words, wanted in _MISTAKEN:
        if isinstance(error.obj, kind):
            raise TypeError(f"{entry.function} was given {words} where it takes a {wanted}") from error
    raise TypeError(f"{entry.function} was given {shown(error.obj)} where it takes a node or a tensor") from error


_MISTAKEN: tuple[tuple[type, str, str], ...] = (
    (np.ndarray, "a numpy array", "node or a tensor: pass ag.tensor(Tensor.from_host(queue, array))"),
    (Node, "a node", "tensor: pass its .value"),
    (Tensor, "a tensor", "node: pass ag.tensor(x)"),
)


# ---------------------------------------------------------------------------------------------- modules


def in_module(wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module's call, in the region of the rule that decides about it. Where casts are off no rule turns them on."""
    region = casting_region()
    if region is None or (rules := region.modules) is None:
        return wrapped(*args, **kwargs)
    inner = region.inside(module)
    is_first, rules.is_judged = not rules.is_judged, True  # of its calls: by its end a model has all layers
    try:
        with nullcontext() if inner is region else in_region(inner):
            result = wrapped(*args, **kwargs)
    except BaseException:
        rules.is_judged = not is_first  # not all layers may have been made
        raise
    if is_first and (idle := rules.idle()):
        warn_user(f"amp.init(modules=...): {idle}.")
    return result


# ---------------------------------------------------------------------------------------------- writes in place

_WRITTEN = ("out", "dst")


def written(places: Iterable[tuple[str, int]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call that a function writes into, by its ``written_places``; None for those not given."""
    return [args[place] if len(args) > place else kwargs.get(name) for name, place in places]


def written_places(function: Any) -> list[tuple[str, int]]:
    """The parameters of a function that it writes into: their names, and their places among the positional ones."""
    if not isinstance(function, FunctionType):
        return []
    if "__wrapped__" in vars(function):  # a user's decorator over a function that it calls
        parameters = tuple(inspect.signature(function).parameters)
    else:
        code = function.__code__
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [(name, parameters.index(name)) for name in _WRITTEN if name in parameters]


def refuse_half_targets(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises TypeError where a function whose 16-bit arguments are about to be cast was given one to write to.

    It would write to the copy.
    """
    places = written_places(function)
    if any(map(is_half, written(places, args, kwargs))):
        names = " or ".join(name for name, _ in places)
        raise TypeError(
            f"{function.__name__} was given a 16-bit tensor to write to, and clamp has no kernel that does: "
            f"pass a float32 tensor, or call it without {names}"
        )


def is_half(x: Any) -> bool:
    """Returns whether x is a node or tensor of 16 bits."""
    return getattr(getattr(x, "value", None), "dtype", None) in HALF_DTYPES
