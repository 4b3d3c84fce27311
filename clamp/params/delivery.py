"""Gradients as a backward pass delivers them: marked, and those of other scales kept apart from it.

A backward adds to the gradients that are there. Those of other scales are taken off before it. Inside of `with
handle.scale_loss(...)` they wait for its end, where this pass's gradients have been divided; elsewhere they are added
after backward, each multiplied or divided so that the sum has one scale. So no gradient is ever divided by a scale that
is not its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from clamp import bridge
from clamp.bridge import Node, Tensor
from clamp.interrupts import among, contextmanager, holding, of_threads
from clamp.opencl.host_steps import host_step, noting_launches, recorder
from clamp.ops.cast import cast
from clamp.ops.loss_scale import AppliedScale
from clamp.params.gradient_marks import (
    PLAIN,
    PLAIN_HALF,
    Mark,
    added,
    adding_to,
    has_lost_bits,
    mark_of,
    restore,
    set_mark,
    snapshot,
)


class Waiting(Protocol):
    """Keeps gradients of other scales until a scaled pass ends.

    Attributes:
        refused: the loss, from which backward must not run until then; None without.
    """

    refused: Node | None

    def may_overflow(self) -> bool:
        """Returns whether what overflows in it now would be run again at a lower scale."""

    def keep(self, leaf: Tensor, grad: Tensor) -> bool:
        """Takes what was on a leaf before backward; False if the leaf is none of the pass's."""

    def ran(
        self, reached: Sequence[Tensor], before: Mapping[int, Tensor], root: Node, again: Callable[[], object],
        launches: Sequence[Callable[[], object]],
    ) -> None:  # fmt: skip
        """A backward has given these leaves gradients.

        Args:
            before: what some of them had before, by id of the leaf.
            root: from which it ran.
            again: runs it once more.
            launches: does so in the recording that it ran in, if it did, for as long as there is that.
        """


class _Pass:
    """A backward pass that is under way. An op of the user's may run another one in its own backward.

    Attributes:
        within: the scaled pass that it is a part of; None without.
        around: the backward pass whose op runs this one; None without. Whatever runs that again runs this.
        met: its leaves, and all that passes inside of it have given a gradient to, by id, with what they had before.
        late: gradients of passes inside of it to leaves to which it had given one already. The engine, which adds to
            what it holds itself, would forget them.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.within = next(reversed(running.waiting.values()), None)
        self.around = running.now if running.now is not None and running.now.within is self.within else None
        self.met: dict[int, tuple[Any, Tensor | None]] = {id(x): (x, getattr(x, "grad", None)) for x in leaves}
        self._leaves = len(leaves)
        self.late: list[tuple[Any, Tensor]] = []

    def is_arounds(self, leaf: Any) -> bool:
        """Returns whether what a leaf had before it has of the pass around this one, or of another inside of that."""
        return self.around is not None and id(leaf) in self.around.met

    def has_run(
        self, reached: Sequence[Any], root: Node, again: Callable[[], object], launches: Sequence[Callable[[], object]]
    ) -> None:
        """Tells of what has got gradients, its own leaves and others, who is to know; see :class:`Waiting`.

        Args:
            reached: those of its own leaves that have.
        """
        for leaf, grad in self.late:
            leaf.grad = added(leaf.grad, grad, leaf.grad.dtype)
        met = {key: self.met[key] for key in (*map(id, reached), *list(self.met)[self._leaves :])}
        if self.around is not None:
            self.around.met.update((key, x) for key, x in met.items() if key not in self.around.met)
        elif self.within is not None:
            before = {key: grad for key, (_, grad) in self.met.items() if grad is not None}
            self.within.ran([leaf for leaf, _ in met.values()], before, root, again, launches)


class _Running(threading.local):
    """The backward pass that runs in this thread.

    Attributes:
        scale: what it multiplies by.
        layerwise: whether each layer has a scale of its own besides: gradients are handed on from op to op in float32,
            and fitted into 16 bits by each op that computes in 16 bits.
        is_last: whether no other will run through its graph when its weights have moved: whether 16-bit copies of
            weights go once they are read.
        waiting: the scaled passes around this point, which have begun and not ended, the innermost last.
        reached: tensors that passes have given a gradient to, by id, if asked for.
        now: what is known of it; None where none runs.
    """

    scale: AppliedScale | None = None
    layerwise = False
    is_last: Callable[[], bool] = bool
    reached: dict[int, Tensor] | None = None
    now: _Pass | None = None

    def __init__(self) -> None:
        self.waiting: dict[object, Waiting] = {}


running = of_threads(_Running())


def waiting_in(scaled_pass: Waiting) -> AbstractContextManager[None]:
    """Inside the ``with``, gradients of other scales wait for the end of this thread's scaled pass."""
    return among(running.waiting, scaled_pass)


@contextmanager
def noting_reached() -> Iterator[dict[int, Tensor]]:
    """Inside the ``with``, collects the tensors that this thread's backward passes give gradients to, by id."""
    reached = dict[int, Tensor]()
    with holding(running, "reached", reached):
        yield reached


def is_another_threads(tensor: Tensor) -> bool:
    """Returns whether another thread, which is alive, has given a tensor the gradient that it has."""
    by = getattr(tensor, "_given_by", None)
    here = tensor.grad is None or by in (None, threading.get_ident())
    return not here and any(thread.ident == by for thread in threading.enumerate())


def gradient_dtype(dtype: str) -> str:
    """The dtype in which this thread's backward pass hands on a gradient that is of this one as a rule."""
    return "float32" if running.layerwise else dtype


def narrow_for_others(nodes: Iterable[Node]) -> None:
    """Lets ops that are not clamp's, where layers have scales of their own, have the gradients that they know: those of
    16-bit results in 16 bits, multiplied by the loss scale alone. What they return is widened."""
    for node in bridge.foreign_nodes(nodes):
        values = [node.value, *(parent.value for parent in node.parents)]
        if any(value.dtype in bridge.HALF_DTYPES and bridge.on_device(value) for value in values):
            node.grad_fn = partial(_narrowed, node.grad_fn, str(node.value.dtype))
        node.is_clamps = True


def _narrowed(run: Callable[[Any], Any], dtype: str, grad: Any) -> Any:
    if not running.layerwise:
        return run(grad)
    found = run(cast(grad, dtype) if dtype in bridge.HALF_DTYPES else grad)
    return [cast(x, "float32") if getattr(x, "dtype", None) in bridge.HALF_DTYPES else x for x in found]


def deliver(
    run: Callable[[], object], leaves: Sequence[Any], scale: AppliedScale | None, in_half: bool, layerwise: bool,
    root: Node, again: Callable[[], object], is_last: Callable[[], bool] = bool,
) -> list[Any]:  # fmt: skip
    """Runs a backward pass, and marks the gradients that it gives to the leaves of its graph; returns those leaves.

    An exception leaves all of them with the gradients from before.

    Args:
        run: runs the pass.
        leaves: values of the leaf nodes, each once.
        scale: what the pass multiplies by; None if nothing.
        in_half: whether float16 numbers take part in it.
        layerwise: whether each layer has a scale of its own besides.
        root: from which it runs.
        again: does once more, later, all that this call is a part of.
        is_last: as of ``running``.
    """
    mark = Mark(scale) if scale is not None else PLAIN_HALF if in_half else PLAIN
    this = _Pass(leaves)
    before = [(leaf, grad) for leaf, grad in this.met.values() if grad is not None]
    aside = [(leaf, grad) for leaf, grad in before if this.is_arounds(leaf) or not _adds_up(mark_of(grad), mark)]
    outer = running.scale, running.layerwise, running.is_last, running.now
    try:
        running.scale, running.layerwise, running.is_last, running.now = scale, layerwise, is_last, this
        for leaf, _ in aside:
            leaf.grad = None
        if layerwise:
            narrow_for_others(bridge.graph(root))
        launches = noting_launches(run)
        if before:
            adding_to(before)
        reached = _mark_all(leaves, {id(leaf): grad for leaf, grad in before}, mark)
        this.has_run(reached, root, again, launches)
        for leaf, grad in aside:
            _add_what_was_aside(this, leaf, grad)
    except BaseException:
        for leaf, had in this.met.values():
            leaf.grad = had
        raise
    finally:
        running.scale, running.layerwise, running.is_last, running.now = outer
    if recorder() is not None:
        host_step(partial(restore, snapshot(leaves)))
    return reached


def _add_what_was_aside(this: _Pass, leaf: Any, grad: Tensor) -> None:
    if leaf.grad is None:
        leaf.grad = grad
    elif this.around is not None and this.is_arounds(leaf):
        this.around.late.append((leaf, leaf.grad))
        leaf.grad = grad
    elif running.scale is None or not any(x.keep(leaf, grad) for x in reversed(running.waiting.values())):
        leaf.grad = added(grad, leaf.grad, leaf.grad.dtype)


def _adds_up(earlier: Mark | None, new: Mark) -> bool:
    """Returns whether the engine may add a new gradient to an earlier one as they are.

    A user's is taken for the true one inside a scaled pass, as in PyTorch for scaled by the same scale elsewhere.
    """
    if earlier is None:
        return new.scale is None or not running.waiting
    return earlier.scale is new.scale


def _mark_all(leaves: Iterable[Any], earlier: Mapping[int, Tensor], mark: Mark) -> list[Any]:
    """Marks the gradients that have come; the leaves that have got one."""
    reached, here = [], threading.get_ident()
    for leaf in leaves:
        grad, last = getattr(leaf, "grad", None), earlier.get(id(leaf))
        if grad is not None and grad is not last:
            had_lost = mark is PLAIN and last is not None and has_lost_bits(last)
            set_mark(grad, PLAIN_HALF if had_lost else mark)
            leaf._given_by = here
            reached.append(leaf)
    if running.reached is not None:
        running.reached.update((id(leaf), leaf) for leaf in reached)
    return reached
