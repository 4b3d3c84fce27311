"""The mark of a gradient, which says what it is multiplied by: set where it is made, looked at wherever it is used.

Backward leaves a mark on each gradient that it delivers:

    mark           made by                                          an optimizer may use it
    none           the user, who put it on the parameter            yes; unscaling takes it for scaled
    plain          a backward without a loss scale                  yes, when it is known to be finite
    scaled         one from a scaled loss, by a certain scale       no: unscale it first
    unscaled       dividing by that scale                           yes: it has been checked
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from clamp import bridge
from clamp.bridge import Tensor
from clamp.interrupts import contextmanager, holding, of_threads
from clamp.opencl.host_steps import host_step, refuse
from clamp.ops import transfer
from clamp.ops.elementwise import elementwise
from clamp.ops.loss_scale import AppliedScale
from clamp.params.writes import writes


@dataclass(frozen=True)
class Mark:
    """Knowledge of a gradient.

    Attributes:
        scale: what it is multiplied by; None if it is the true one.
        is_checked: an inf or nan in it has been noted, and skips the next step of those who heard of it.
        heard: the guards' tokens (``StepGuard.token``) of those optimizers. Another optimizer that has the parameter
            too, and one that has answered with a skipped step already, look at the gradient again. ``FINITE`` in
            their place: that it is finite is known to everybody.
        since: when it was checked, on the clock of ``clamp.params.writes``: what is written into it later is unchecked.
        lost_bits: it came through float16 without a scale, where small numbers become zero.
    """

    scale: AppliedScale | None = None
    is_checked: bool = False
    lost_bits: bool = False
    heard: frozenset[object] = frozenset()
    since: int = 0


PLAIN = Mark()
PLAIN_HALF = Mark(lost_bits=True)
FINITE = object()

#: a tensor, its gradient, the gradient's mark, and what a master and its parameter had in common last
Held: TypeAlias = tuple[Tensor, Tensor, Mark | None, Tensor | None]


def mark_of(grad: Any) -> Mark | None:
    """A gradient's mark; None if there is no gradient or a user has made it."""
    mark: Mark | None = getattr(grad, "_loss_scaling", None)
    return mark


def set_mark(grad: Tensor, mark: Mark | None) -> None:
    """Marks a gradient; None takes a mark off."""
    if mark is not None:
        grad._loss_scaling = mark
    elif hasattr(grad, "_loss_scaling"):
        del grad._loss_scaling


def last_shared(master: Tensor) -> Tensor | None:
    """The gradient that a master and its 16-bit parameter had in common last; None if it is gone."""
    reference = getattr(master, "_shared", None)
    return None if reference is None else reference()


def note_shared(master: Tensor, grad: Tensor | None) -> None:
    """Notes the gradient that a master and its 16-bit parameter have in common."""
    if grad is not None or hasattr(master, "_shared"):
        master._shared = None if grad is None else weakref.ref(grad)


def scale_of(grad: Any) -> AppliedScale | None:
    """Returns the scale that a gradient is multiplied by; None if there is none, as far as is known."""
    return (mark_of(grad) or PLAIN).scale


def is_unscaled(grad: Any) -> bool:
    """Returns whether a gradient has been divided by its loss scale already, and checked."""
    return (mark_of(grad) or PLAIN).is_checked


def is_plain(grad: Any) -> bool:
    """Returns whether a backward without a loss scale has made a gradient, which nobody has looked at."""
    mark = mark_of(grad)
    return mark is not None and mark.scale is None and not mark.is_checked


def mark_checked(grads: Iterable[Tensor]) -> None:
    """These gradients are known to be finite. A user's stays without a mark: it may be written again."""
    mark = checked(frozenset((FINITE,)))
    for grad in grads:
        if mark_of(grad) is not None:
            set_mark(grad, mark)


def checked(heard: frozenset[object]) -> Mark:
    """The mark of true gradients that have been looked at just now, of which these have heard."""
    return Mark(is_checked=True, heard=heard, since=writes.now)


def lost_bits(params: Iterable[Any]) -> bool:
    """Returns whether a parameter's gradient came through float16 from a loss that was not scaled."""
    return any(has_lost_bits(getattr(bridge.model_parameter(param), "grad", None)) for param in params)


def noted_elsewhere(params: Iterable[Any]) -> list[Tensor]:
    """Gradients in which an inf or nan has been noted, if there is one, for others than who asks."""
    grads = [getattr(param, "grad", None) for param in params]
    return [grad for grad in grads if is_unscaled(grad) and FINITE not in _heard(grad)]


def note_not_finite(grad: Tensor, skip: object) -> None:
    """Notes on a gradient that it has made a step be skipped.

    Args:
        skip: stands for that step.
    """
    grad._not_finite = skip, writes.now


def adding_to(before: Sequence[tuple[Any, Tensor]]) -> None:
    """Notes that a backward has added to gradients of leaves, in each replay as well."""

    def note() -> None:
        for leaf, grad in before:  # which have made a step be skipped, and were not written to since
            skip, since = getattr(grad, "_not_finite", None) or (None, 0)
            if skip is not None and not writes.since(grad.buffer, since):
                leaf._kept = skip

    host_step(note)
    if _thread.held is not None:
        _thread.held.met.extend(grad for _, grad in before)
    note_restorable(grad for _, grad in before)


def take_over(grad: Tensor, other: Tensor) -> None:
    """Lets a gradient have made the step be skipped that another object for it has made be skipped, and no other."""
    noted = getattr(other, "_not_finite", None)
    if noted is not getattr(grad, "_not_finite", None):
        grad._not_finite = noted


def was_kept(leaf: Tensor, skip: object) -> bool:
    """Returns whether a backward has added to a gradient of a leaf's that had made this step be skipped."""
    return getattr(leaf, "_kept", None) is skip


def is_known_to(token: object, grad: Any) -> bool:
    """Returns whether there is no gradient, or an optimizer's next step will be skipped if there is an inf or nan in
    it."""
    if grad is None:
        return True
    heard = _heard(grad)
    return token in heard or FINITE in heard


def _heard(grad: Tensor) -> frozenset[object]:
    """Returns who knows, or will hear, whether a gradient is finite as it is now."""
    mark = mark_now(grad)
    return mark.heard if mark is not None and mark.is_checked else frozenset()


@dataclass
class HeldByReplays:
    """State that host steps go back to in every replay.

    Attributes:
        tensors: those whose gradients they look at, by id.
        grads: ids of the gradients that they may put there again.
        met: gradients that a backward added to, or that replays make.
    """

    tensors: dict[int, Tensor] = field(default_factory=dict)
    grads: set[int] = field(default_factory=set)
    met: list[Tensor] = field(default_factory=list)

    def forget_skips(self) -> None:
        """In a replay each of these gradients is another one, which has made no step be skipped."""
        for grad in self.met:
            vars(grad).pop("_not_finite", None)


class _ReplayState(threading.local):
    held: HeldByReplays | None = None  # if asked for


_thread = of_threads(_ReplayState())


@contextmanager
def noting_held() -> Iterator[HeldByReplays]:
    """Inside the ``with``, collects what this thread's host steps will go back to."""
    held = HeldByReplays()
    with holding(_thread, "held", held):
        yield held


def note_restorable(grads: Iterable[Tensor | None]) -> None:
    """Notes gradients that this thread's host steps, or an error in a replay, may put in their places again."""
    if _thread.held is not None:
        _thread.held.grads.update(map(id, grads))


def has_lost_bits(grad: Any) -> bool:
    """Returns whether a gradient came through float16 from a loss that was not scaled."""
    return (mark_of(grad) or PLAIN).lost_bits


def added(first: Tensor, second: Tensor, dtype: str = "float32") -> Tensor:
    """The sum of two gradients of whatever scales, with its mark.

    It has the scale of the second one, or of the first if the second has none. A user's counts as of that scale.
    """
    ours, theirs = mark_of(first), mark_of(second)
    scale = scale_of(second) or scale_of(first)
    if scale is not None:
        if scale_of(first) not in (None, scale):
            refuse(
                "A gradient was added to one of another loss scale",
                "Clear gradients at the beginning of the recorded part: optimizer.zero_grad().",
            )
        first, second = at_scale(first, scale), at_scale(second, scale)
        mark: Mark | None = Mark(scale)
    elif ours is None and theirs is None:
        mark = None
    elif known := _heard_by_both(_heard(first), _heard(second)):
        mark = checked(known)
    else:
        mark = PLAIN_HALF if has_lost_bits(first) or has_lost_bits(second) else PLAIN
    total = elementwise("add", bridge.canonical_dtype(dtype), first, second)
    set_mark(total, mark)
    return total


def _heard_by_both(first: frozenset[object], second: frozenset[object]) -> frozenset[object]:
    if FINITE in first:
        return second
    return first if FINITE in second else first & second


def at_scale(grad: Tensor, scale: AppliedScale) -> Tensor:
    """A gradient multiplied by ``scale`` in place of what it is multiplied by."""
    mark = mark_of(grad)
    if mark is None or mark.scale is scale:
        return grad
    return scale.multiply(grad if mark.scale is None else mark.scale.divide(grad), "float32")


def give_each_its_own(params: Iterable[Any]) -> None:
    """Copies gradients that several parameters share: what scales each in place would scale them several times."""
    seen = set[int]()
    for param in params:
        grad = getattr(param, "grad", None)
        if bridge.is_floating(grad):
            if id(grad.buffer) in seen:
                param.grad = copied(grad)
            seen.add(id(param.grad.buffer))


def copied(grad: Tensor) -> Tensor:
    """A copy of a gradient, with its mark."""
    copy = bridge.empty(grad.queue, grad.shape, bridge.canonical_dtype(grad.dtype))
    transfer.copy(grad.queue, copy.buffer, grad.buffer, bridge.nbytes(grad))
    set_mark(copy, mark_of(grad))
    return copy


def snapshot(tensors: Iterable[Any]) -> list[Held]:
    """The gradients that tensors have now, with their marks."""
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    grads = [(tensor, getattr(tensor, "grad", None)) for tensor in tensors]
    found = [(tensor, grad, mark_now(grad), last_shared(tensor)) for tensor, grad in grads if grad is not None]
    if _thread.held is not None:
        _thread.held.tensors.update((id(tensor), tensor) for tensor in tensors)
    note_restorable(grad for _, own, _, shared in found for grad in (own, shared))
    return found


def mark_now(grad: Tensor) -> Mark | None:
    """A gradient's mark. Of one that was written to since it was checked, nobody has heard."""
    mark = mark_of(grad)
    if mark is None or not mark.is_checked or writes.now <= mark.since or not writes.since(grad.buffer, mark.since):
        return mark
    return replace(mark, heard=frozenset())


def restore(held: Iterable[Held], renewed: Mapping[object, object] = MappingProxyType({})) -> None:
    """Gives tensors these gradients again: a replay has written them anew, with the loss scale as it is now.

    Args:
        renewed: tokens of guards as they are now, by those in the marks.
    """
    now: dict[int, Mark] = {}  # by ids of marks, which gradients of one pass have in common
    for tensor, grad, mark, shared in held:
        tensor.grad = grad
        note_shared(tensor, shared)
        if mark is not None:
            if (known := now.get(id(mark))) is None:
                known = now[id(mark)] = _renewed(mark, renewed)
            grad._loss_scaling = known


def _renewed(mark: Mark, tokens: Mapping[object, object]) -> Mark:
    if mark.is_checked:  # what was finite then need not be now
        return checked(frozenset([tokens.get(token, token) for token in mark.heard - {FINITE}]))
    return mark if mark.scale is None else Mark(mark.scale.now())


def on_gradients(tensors: Iterable[Any], run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` as a host step of a recording: on the gradients that tensors have here, in every replay.

    A gradient that an earlier host step has put there is the one, with what is known of it in this replay.
    """
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    held = snapshot(tensors)
    bare = [tensor for tensor in tensors if getattr(tensor, "grad", None) is None]

    def call() -> Any:
        restore([x for x in held if x[0].grad is not x[1] or x[2] is None or not x[2].heard])
        for tensor in bare:
            tensor.grad = None
        return run()

    return call


def require_ready(params: Iterable[Any], call: str, remedy: str) -> None:
    """Raises where a parameter's gradient must not be read yet, or not here.

    Args:
        call: what must not see such gradients, for the message.
        remedy: what to do where one is scaled, for the message.

    Raises:
        RuntimeError: it is still multiplied by a loss scale.
        ValueError: a user has put one there that is on another queue, whose launches nobody here waits for.
    """
    for index, param in enumerate(params):
        model = bridge.model_parameter(param)
        for tensor in (param,) if model is param else (param, model):
            grad = getattr(tensor, "grad", None)
            if grad is None:
                continue
            if scale_of(grad) is not None:
                raise RuntimeError(
                    f"{call} was called while gradients are still multiplied by the loss scale (parameter {index}, of "
                    f"shape {tuple(param.shape)}): {remedy}"
                )
            queue = getattr(grad, "queue", None)
            if queue is not None and queue is not tensor.queue and bridge.on_device(tensor):
                bridge.require_same_queue(f"{call}, parameter {index} and its gradient", tensor, grad)
