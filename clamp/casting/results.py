"""The hub that every result of an op passes, and every gradient: what ``clamp.debug`` looks at.

Without an observer a result costs a look at an empty tuple.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.interrupts import Flag, contextmanager, holding, of_threads, undoing
from clamp.ops.elementwise import elementwise
from clamp.params.penalties import note_result

#: gradients of an op, for each parent one or None; and what computes them from that of its result
Gradients: TypeAlias = Sequence[Tensor | None]
GradFn: TypeAlias = Callable[[Tensor], Any]


class Observer:
    """Looks at results: overrides what it wants to be told. Called in the thread that computes, between launches;
    may launch, too.

    Attributes:
        needs_values: whether it reads each result as it is made. Recorded functions run as they are meanwhile: a
            recording has no values yet, and a replay tells of no op.
        thread: whose ops alone it is told of, by its identifier; None: those of all.
    """

    needs_values = False
    thread: int | None = None

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Any:
        """An op has computed ``made`` from ``parents``; nodes where a graph is recorded, tensors elsewhere.

        Returns:
            What ``gradients`` is to be given for this op; None: it is not to be told. It must not refer to ``made``,
            whose memory would stay.
        """

    def gradients(self, token: Any, grad: Tensor, grads: Gradients, again: GradFn) -> None:
        """Backward has computed an op's gradients from that of its result.

        Args:
            again: computes them from another gradient of the result.
        """

    def added(self, made: Tensor, first: Tensor, second: Tensor) -> None:
        """Backward has added two gradients of one result."""

    def backward_ended(self, loss: Node, grad: Tensor | None) -> None:
        """A whole backward from a node is over, which began with ``grad``, or with ones; its gradients have not been
        unscaled."""

    def stepping(self, gradients: Sequence[Tensor]) -> None:
        """An ``optimizer.step()`` begins, or would if it were not skipped: with these gradients."""

    def stepped(self, report: Any) -> None:
        """An ``optimizer.step()`` is over, done or skipped: its ``StepReport``."""


_in_backward = of_threads(Flag())  # of netcl's engine, while somebody looks


def forward_again() -> AbstractContextManager[None]:
    """Inside the ``with``, ops are told of in backward, too: whoever looks there computes a forward once more."""
    return holding(_in_backward, "on", False)


def untold() -> AbstractContextManager[None]:
    """Inside the ``with``, what this thread computes is no op of its step: nobody is told of it."""
    return holding(_in_backward, "on", True)


class _Results:
    """What results pass. Where nobody looks, it does what has to be done anyway.

    Attributes:
        observers: who is told.
    """

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()
        self._last: Callable[[], Any] = lambda: None  # result that was told of last

    def attach(self, observer: Observer) -> None:
        """Tells ``observer`` of every result, in every thread; a second call changes nothing."""
        if observer not in self.observers:
            self.observers += (observer,)

    def detach(self, observer: Observer) -> None:
        """``observer`` is told nothing any more."""
        self.observers = tuple(other for other in self.observers if other is not observer)

    @contextmanager
    def attached(self, observer: Observer) -> Iterator[None]:
        """``observer`` is told inside the ``with``."""
        with undoing() as undo:
            undo.callback(self.detach, observer)
            self.attach(observer)
            yield

    @property
    def key(self) -> Hashable:
        """The observers, weakly held. What was recorded for replay tells those that were there then: it is another
        recording for others."""
        return tuple(map(weakref.ref, self.observers))

    @property
    def needs_values(self) -> bool:
        """Whether one of the observers does (`Observer`)."""
        return any(observer.needs_values for observer in self.observers)

    def _told(self) -> list[Observer]:
        """Returns who is told of what this thread does."""
        thread = threading.get_ident()
        return [observer for observer in self.observers if observer.thread in (None, thread)]

    def own(self, made: TensorLike, parents: Sequence[TensorLike]) -> TensorLike:
        """Returns the result of an op of clamp's."""
        made = note_result(made, parents)
        return self.foreign(made, parents) if self.observers else made

    def foreign(self, made: TensorLike, parents: Sequence[TensorLike]) -> TensorLike:
        """Returns the result of an op of the user's, or of netcl's."""
        if not self.observers or _in_backward.on or not isinstance(getattr(made, "value", None), Tensor):
            return made  # a step of a gradient; a compiler's node, or nothing that netcl made
        told = []
        for observer in self._told():
            token = observer.result(made, parents)
            if token is not None:
                told.append((observer, token))
        self._last = weakref.ref(made)
        if isinstance(made, Node):
            made.is_observed = True
            if told and made.grad_fn is not None:
                made.grad_fn = _seen_gradients(made.grad_fn, told)
        return made

    def netcls(self, made: Any, args: Sequence[Any]) -> Any:
        """Returns what a function of netcl's has made of its arguments; its ops have told nobody, but for those that
        are clamp's. Tells of what is new: a function may hand on what it was given, or what another has made."""
        if not self.observers:
            return made
        for one in made if isinstance(made, list | tuple) else (made,):
            if isinstance(one, Node) and one.op_name is not None and not hasattr(one, "is_observed"):
                self.foreign(one, one.parents)
            elif isinstance(one, Tensor) and self._last() is not one and not any(one is x for x in args):
                self.foreign(one, [x for x in args if isinstance(x, Node | Tensor)])
        return made

    def backward(self, run: Callable[..., None], loss: Node, grad: Tensor | None) -> None:
        """Runs netcl's engine."""
        if not self.observers:
            return run(loss, grad)
        with forward_again():
            for node in bridge.in_order(loss):  # those that a user made by hand have passed nowhere
                if not node.parents or hasattr(node, "is_observed"):
                    continue
                if not any(isinstance(x.value, bridge.Freed) for x in (node, *node.parents)):
                    self.foreign(node, node.parents)
        with untold():
            run(loss, grad)
        for observer in self._told():
            observer.backward_ended(loss, grad)
        return None

    def add(self, add: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
        """Adds two gradients of one node, in the first one's dtype; netcl's ``add`` may write to the first."""
        # netcl has no sum in place of 16-bit gradients that builds everywhere, and one kernel for all threads, of which
        # one would launch it with the arguments of another; and it launches groups of 256, which some devices do not
        # have. Who looks finds both as they were.
        is_ours = bridge.is_floating(first) and bridge.is_floating(second) and first.shape == second.shape
        if not is_ours and not (self.observers and bridge.is_floating(first)):
            return add(first, second)
        made = elementwise("add", bridge.canonical_dtype(first.dtype), first, second)
        if self.observers:
            with forward_again():
                for observer in self._told():
                    observer.added(made, first, second)
        return made

    def stepping(self, params: Sequence[Tensor]) -> None:
        """Tells of a step that begins, even of one that will be skipped."""
        if self.observers:
            gradients = [param.grad for param in params if isinstance(param.grad, Tensor)]
            for observer in self._told():
                observer.stepping(gradients)

    def stepped(self, report: Any) -> None:
        """Tells of a step that is over."""
        for observer in self._told():
            observer.stepped(report)


def _seen_gradients(run: GradFn, told: Sequence[tuple[Observer, Any]]) -> GradFn:
    def run_and_tell(grad: Tensor) -> Any:
        grads = run(grad)
        with forward_again():
            for observer, token in told:
                observer.gradients(token, grad, grads, run)
        return grads

    vars(run_and_tell).update(getattr(run, "__dict__", {}))
    return run_and_tell


RESULTS = _Results()
