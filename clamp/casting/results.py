"""The hub that every result of an op passes, and every gradient: what ``clamp.debug`` looks at.

Nobody asks at each op whether somebody looks. Without an observer, ``RESULTS.own``, ``.foreign`` and the others are
functions that do what has to be done anyway; with one, others stand in their place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from clamp import bridge
from clamp.bridge import Node, Tensor, TensorLike
from clamp.interrupts import Flag, contextmanager, holding, of_threads, undoing
from clamp.ops.elementwise import elementwise
from clamp.params.penalties import note_result


class Observer:
    """Looks at results: overrides what it wants to be told. Called in the thread that computes, between launches;
    may launch, too.

    Attributes:
        needs_values: whether it reads each result as it is made. Recorded functions run as they are meanwhile: a
            recording has no values yet, and a replay tells of no op.
    """

    needs_values = False

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> Any:
        """An op has computed ``made`` from ``parents``; nodes where a graph is recorded, tensors elsewhere.

        Returns:
            What ``gradients`` is to be given for this op; None: it is not to be told. It must not refer to ``made``,
            whose memory would stay.
        """

    def gradients(
        self, token: Any, grad: Tensor, grads: Sequence[Tensor | None], again: Callable[[Tensor], Any]
    ) -> None:
        """Backward has computed an op's gradients, for each parent one or None, from that of its result.

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


def _foreign(made: TensorLike, parents: Sequence[TensorLike]) -> TensorLike:  # noqa: ARG001  (as who is told)
    return made


def _netcls(made: Any, args: Sequence[Any]) -> Any:  # noqa: ARG001  (as who is told)
    return made


def _backward(run: Callable[..., None], loss: Node, grad: Tensor | None) -> None:
    run(loss, grad)


def _add(add: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
    # netcl has no sum in place of 16-bit gradients that builds everywhere, and one kernel for all threads, of which one
    # would launch it with the arguments of another; and it launches groups of 256, which some devices do not have.
    if bridge.is_floating(first) and bridge.is_floating(second) and first.shape == second.shape:
        return elementwise("add", bridge.canonical_dtype(first.dtype), first, second)
    return add(first, second)


def _nothing(*_: object) -> None:
    pass


_in_backward = of_threads(Flag())  # of netcl's engine, while somebody looks


def forward_again() -> AbstractContextManager[None]:
    """Inside the ``with``, ops are told of in backward, too: whoever looks there computes a forward once more."""
    return holding(_in_backward, "on", False)


def untold() -> AbstractContextManager[None]:
    """Inside the ``with``, what this thread computes is no op of its step: nobody is told of it."""
    return holding(_in_backward, "on", True)


class _Results:
    """The functions that results pass, as they are now.

    Attributes:
        observers: who is told.
        watched: whether there are any, for who passes by all of these.
        needs_values: whether one of them does (`Observer`).
        own: ``own(made, parents)`` returns the result of an op of clamp's.
        foreign: the same of an op of the user's, or of netcl's.
        netcls: ``netcls(made, args)`` returns what a function of netcl's has made of its arguments; its ops have told
            nobody, but for those that are clamp's.
        backward: ``backward(run, loss, grad)`` runs netcl's engine.
        add: ``add(add, first, second)`` adds two gradients of one node, in the first one's dtype; netcl's ``add`` may
            write to the first.
        stepping: ``stepping(params)`` is told before each step, even one that will be skipped.
        stepped: ``stepped(report)`` is told of each step.
    """

    stepping: Callable[[Sequence[Tensor]], None]
    stepped: Callable[[Any], None]

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()
        self._last: Callable[[], Any] = _nothing
        self._exchange()

    def attach(self, observer: Observer) -> None:
        """Tells ``observer`` of every result, in every thread; a second call changes nothing."""
        if observer not in self.observers:
            self.observers += (observer,)
            self._exchange()

    @property
    def key(self) -> Hashable:
        """The observers, weakly held. What was recorded for replay tells those that were there then: it is another
        recording for others."""
        return tuple(map(weakref.ref, self.observers))

    def detach(self, observer: Observer) -> None:
        """``observer`` is told nothing any more."""
        self.observers = tuple(other for other in self.observers if other is not observer)
        self._exchange()

    @contextmanager
    def attached(self, observer: Observer) -> Iterator[None]:
        """``observer`` is told inside the ``with``."""
        with undoing() as undo:
            undo.callback(self.detach, observer)
            self.attach(observer)
            yield

    def _exchange(self) -> None:
        self.watched = bool(self.observers)
        self.needs_values = any(observer.needs_values for observer in self.observers)
        if self.observers:
            self.own, self.foreign, self.netcls = self._own_seen, self._seen, self._netcls_seen
            self.backward, self.add = self._backward_seen, self._add_seen
            self.stepping, self.stepped = self._before_step, self._step_seen
        else:
            self.own, self.foreign, self.netcls = note_result, _foreign, _netcls
            self.backward, self.add, self.stepping, self.stepped = _backward, _add, _nothing, _nothing

    def _own_seen(self, made: TensorLike, parents: Sequence[TensorLike]) -> TensorLike:
        return self._seen(note_result(made, parents), parents)

    def _seen(self, made: TensorLike, parents: Sequence[TensorLike]) -> TensorLike:
        if _in_backward.on or not isinstance(getattr(made, "value", None), Tensor):
            return made  # a step of a gradient; a compiler's node, or nothing that netcl made
        told = []
        for observer in self.observers:
            token = observer.result(made, parents)
            if token is not None:
                told.append((observer, token))
        self._last = weakref.ref(made)
        if isinstance(made, Node):
            made.is_observed = True
            if told and made.grad_fn is not None:
                made.grad_fn = _seen_gradients(made.grad_fn, told)
        return made

    def _netcls_seen(self, made: Any, args: Sequence[Any]) -> Any:
        """Tells of what is new: a function may hand on what it was given, or what another has made."""
        for one in made if isinstance(made, list | tuple) else (made,):
            if isinstance(one, Node) and one.op_name is not None and not hasattr(one, "is_observed"):
                self._seen(one, one.parents)
            elif isinstance(one, Tensor) and self._last() is not one and not any(one is x for x in args):
                self._seen(one, [x for x in args if isinstance(x, Node | Tensor)])
        return made

    def _backward_seen(self, run: Callable[..., None], loss: Node, grad: Tensor | None) -> None:
        with forward_again():
            for node in bridge.in_order(loss):  # those that a user made by hand have passed nowhere
                if not node.parents or hasattr(node, "is_observed"):
                    continue
                if not any(isinstance(x.value, bridge.Freed) for x in (node, *node.parents)):
                    self._seen(node, node.parents)
        with untold():
            run(loss, grad)
        for observer in self.observers:
            observer.backward_ended(loss, grad)

    def _add_seen(self, add: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
        if not bridge.is_floating(first):
            return add(first, second)
        # The same bits, and both stay what they were for whoever looks at them later.
        made = elementwise("add", bridge.canonical_dtype(first.dtype), first, second)
        with forward_again():
            for observer in self.observers:
                observer.added(made, first, second)
        return made

    def _before_step(self, params: Sequence[Tensor]) -> None:
        gradients = [param.grad for param in params if isinstance(param.grad, Tensor)]
        for observer in self.observers:
            observer.stepping(gradients)

    def _step_seen(self, report: Any) -> None:
        for observer in self.observers:
            observer.stepped(report)


def _seen_gradients(run: Callable[[Tensor], Any], told: Sequence[tuple[Observer, Any]]) -> Callable[[Tensor], Any]:
    def run_and_tell(grad: Tensor) -> Any:
        grads = run(grad)
        with forward_again():
            for observer, token in told:
                observer.gradients(token, grad, grads, run)
        return grads

    vars(run_and_tell).update(getattr(run, "__dict__", {}))
    return run_and_tell


RESULTS = _Results()
