"""Gradients as a backward pass delivers them: marked, and those of other scales kept apart from it.

A backward adds to the gradients that are there. Those of other scales are taken off before it. Inside of `with
handle.scale_loss(...)` they wait for its end, where this pass's gradients have been divided; elsewhere they are added
after backward, each multiplied or divided so that the sum has one scale. So no gradient is ever divided by a scale that
is not its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from clamp import bridge
from clamp.bridge import Node, Parameter, Tensor
from clamp.interrupts import contextmanager, holding, of_tasks, of_threads
from clamp.opencl.host_steps import host_step, noting_launches, recorder
from clamp.ops.cast import cast
from clamp.ops.loss_scale import AppliedScale
from clamp.params import masters
from clamp.params.gradient_marks import (
    PLAIN,
    PLAIN_HALF,
    Mark,
    added,
    adding_to,
    has_lost_bits,
    mark_of,
    note_restorable,
    restore,
    set_mark,
    snapshot,
)
from clamp.params.writes import writes

Repeat: TypeAlias = Callable[[], object]  # does once more what was done


@dataclass(slots=True)
class Slot:
    """A parameter, or an input whose gradient the user wants.

    Attributes:
        master: what the optimizer steps.
        model: what backward gives a gradient to.
        before: the gradient when the pass began.
        earlier: what a backward of this pass found there, to be added to this pass's at the end.
    """

    master: Tensor
    model: Tensor
    before: Tensor | None
    earlier: Tensor | None = None

    @property
    def reached(self) -> Tensor | None:
        """The gradient that has come meanwhile."""
        return self.model.grad if self.model.grad is not self.before else None


class _BackwardRun(NamedTuple):
    """A backward of the pass: see ``PassGradients.ran``.

    Attributes:
        gave: the gradients that it has left to what it reached.
        since: when that was, on the clock of ``clamp.params.writes``.
    """

    reached: Sequence[Tensor]
    before: Mapping[int, Tensor]
    root: Node | None
    again: Repeat | None
    launches: Sequence[Repeat]
    gave: Sequence[Tensor]
    since: int


def is_input(leaf: Tensor) -> bool:
    """Returns whether a leaf is no parameter, as far as is known, and wants a gradient all the same: for the user's
    eyes."""
    return not isinstance(leaf, Parameter) and leaf.requires_grad and not bridge.is_linked(leaf)


class PassGradients:
    """The gradients that the backwards of one scaled pass deliver to some optimizers' parameters.

    What is there when a backward of the pass begins waits until the pass ends, so that no gradient is ever divided by
    a scale twice. What a user clears before (``zero_grad`` inside the ``with``) is gone.

    Args:
        optimizers: those of the pass.
        of_all: whether the gradients of all else that the pass has reached are divided, too.

    Attributes:
        refused: the loss, from which backward must not run until the end of the pass; None without.
        stepped: how many of the ``slots`` are of parameters of the optimizers, which come first.
        came: the gradients that were there at the end.
    """

    def __init__(self, optimizers: Sequence[object], of_all: bool = False) -> None:
        self.optimizers, self.of_all = optimizers, of_all
        slots: dict[int, Slot] = {}
        for optimizer in optimizers:
            for master, model in masters.pairs(optimizer):
                if id(master) not in slots:
                    if model is not master:
                        masters.gather(master, model)
                    slots[id(master)] = Slot(master, model, master.grad)
        self.slots = list(slots.values())
        note_restorable(slot.before for slot in self.slots)
        self.stepped = len(self.slots)
        self._by_model = {id(slot.model): slot for slot in self.slots}
        self._ran: list[_BackwardRun] = []
        self.refused: Node | None = None
        self.came: Sequence[Tensor | None] | None = None
        self.waits = False  # whether this is around some point
        self._is_alone = not waiting()  # no pass is inside of another
        for outer in waiting():
            outer._is_alone = False

    def may_overflow(self) -> bool:
        """Returns whether what overflows in it now would be run again at a lower scale."""
        return False

    def keep(self, leaf: Tensor, grad: Tensor) -> bool:
        """Takes what was on a leaf before backward; False if the leaf is none of the pass's."""
        slot = self._slot_of(leaf, grad)
        if slot is None:
            return False
        slot.earlier = grad if slot.earlier is None else added(slot.earlier, grad)
        return True

    def ran(
        self, reached: Sequence[Tensor], before: Mapping[int, Tensor], root: Node, again: Repeat,
        launches: Sequence[Repeat],
    ) -> None:  # fmt: skip
        """A backward has given these leaves gradients.

        Args:
            before: what some of them had before, by id of the leaf.
            root: from which it ran.
            again: runs it once more.
            launches: does so in the recording that it ran in, if it did, for as long as there is that.
        """
        gave = [leaf.grad for leaf in reached]
        self._ran.append(_BackwardRun(reached, before, root, again, launches, gave, writes.now))

    def backwards(self, recorded: bool) -> list[Repeat]:
        """Calls that run its backwards once more, after ``put_back``; none where gradients are not what they gave (the
        user has cleared or changed some, or passes are inside of each other) or a graph is gone.

        Args:
            recorded: whether the pass ends in the recording in which it began, which has not been given up since.
        """
        expected = {id(slot.model): slot.before for slot in self.slots}
        for run in self._ran:
            if any(id(x) in expected and expected[id(x)] is not run.before.get(id(x)) for x in run.reached):
                return []
            expected.update((id(x), grad) for x, grad in zip(run.reached, run.gave, strict=True))
        came = zip(self.slots, self.came or (), strict=True)
        as_given = self._is_alone and all(expected[id(slot.model)] is grad for slot, grad in came)
        written = any(writes.since(grad.buffer, run.since) for run in self._ran for grad in run.gave)
        nodes = (node for run in self._ran if run.root is not None for node in bridge.graph(run.root))
        # cut with its tape, or freed after another optimizer's step
        gone = any(x.requires_grad and not x.parents and (x.grad_fn or x.op_name) is not None for x in nodes)
        if not as_given or written or gone:
            return []
        calls = [run.launches[0] if recorded and run.launches else run.again for run in self._ran]
        return [call for call in calls if call is not None]

    def forget_graphs(self) -> None:
        """Lets go of what ``backwards`` needs, and ``put_back`` does not."""
        self._ran = [run._replace(root=None, again=None, launches=(), gave=()) for run in self._ran]

    def put_back(self) -> None:
        """Gives all that this pass has reached, and the parameters, the gradients they had before it."""
        for run in reversed(self._ran):
            for leaf in run.reached:
                leaf.grad = run.before.get(id(leaf))
        for slot in self.slots:
            masters.share_gradient(slot.master, slot.model, slot.before)

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, and masters."""
        return [tensor for slot in self.slots for tensor in (slot.master, slot.model)]

    @property
    def others(self) -> list[Tensor]:
        """Tensors that are trained, and have got a gradient that stays multiplied: no optimizer named has them."""
        if self.of_all:
            return []
        known = self._by_model
        found = [leaf for run in self._ran for leaf in run.reached if id(leaf) not in known]
        return [leaf for leaf in found if bridge.is_trained(leaf) and not bridge.is_frozen(leaf)]

    def note_came(self) -> None:
        """The backwards of the pass are over."""
        for run in self._ran:
            for leaf in run.reached:
                if id(leaf) not in self._by_model:
                    self._slot_of(leaf, run.before.get(id(leaf)))
        self.came = [slot.model.grad for slot in self.slots]

    def _slot_of(self, leaf: Tensor, before: Tensor | None) -> Slot | None:
        """An input is divided like a parameter from the first time on, and so is, in a pass that divides all, what no
        optimizer of it has. What another optimizer has stays as it is, for a pass that names that one."""
        slot = self._by_model.get(id(leaf))
        if slot is None and (self.of_all or is_input(leaf)):
            slot = self._by_model[id(leaf)] = Slot(leaf, leaf, before)
            self.slots.append(slot)
        return slot


class _Pass:
    """A backward pass that is under way. An op of the user's may run another one in its own backward.

    Attributes:
        within: the scaled pass that it is a part of; None without.
        around: the backward pass whose op runs this one; None without. Whatever runs that again runs this.
        met: its leaves, and all that passes inside of it have given a gradient to, by id, with what they had before.
        given: the gradient that the user's op has been given whose backward runs; None where none does.
        root: from which it runs.
        aside: gradients of other scales that its leaves, and others that passes inside of it have reached, had before.
        late: gradients of passes inside of it to leaves to which it had given one already. The engine, which adds to
            what it holds itself, would forget them.
    """

    def __init__(self, leaves: Sequence[Any], root: Node) -> None:
        self.root = root
        self.within = next(reversed(waiting()), None)
        self.around = running.now if running.now is not None and running.now.within is self.within else None
        self.met: dict[int, tuple[Any, Tensor | None]] = {id(x): (x, getattr(x, "grad", None)) for x in leaves}
        self._leaves = len(leaves)
        self.given: Tensor | None = None
        self.aside: list[tuple[Any, Tensor]] = []
        self.late: list[tuple[Any, Tensor]] = []

    def is_arounds(self, leaf: Any) -> bool:
        """Returns whether what a leaf had before it has of the pass around this one, or of another inside of that."""
        return self.around is not None and id(leaf) in self.around.met

    def has_run(self, reached: Sequence[Any], again: Repeat, launches: Sequence[Repeat]) -> None:
        """Tells of what has got gradients, its own leaves and others, who is to know; see ``PassGradients.ran``.

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
            self.within.ran([leaf for leaf, _ in met.values()], before, self.root, again, launches)


class _Running(threading.local):
    """The backward pass that runs in this thread.

    Attributes:
        scale: what it multiplies by.
        layerwise: whether each layer has a scale of its own besides: gradients are handed on from op to op in float32,
            and fitted into 16 bits by each op that computes in 16 bits.
        is_last: whether no other will run through its graph when its weights have moved: whether 16-bit copies of
            weights go once they are read.
        reached: tensors that passes have given a gradient to, by id, if asked for.
        now: what is known of it; None where none runs.
    """

    scale: AppliedScale | None = None
    layerwise = False
    is_last: Callable[[], bool] = bool
    reached: dict[int, Tensor] | None = None
    now: _Pass | None = None


running = of_threads(_Running())
_waiting = of_tasks("waiting", tuple[weakref.ref[PassGradients], ...]())  # a task may live on, with what it began in


def waiting() -> Sequence[PassGradients]:
    """The scaled passes around this point, which have begun and not ended, the innermost last."""
    passes = _waiting.get()
    if not passes:
        return ()
    return [one for ref in passes if (one := ref()) is not None and one.waits]  # another thread may have ended one


@contextmanager
def waiting_in(scaled_pass: PassGradients) -> Iterator[None]:
    """Inside the ``with``, gradients of other scales wait for the end of this thread's scaled pass."""
    try:
        try:
            scaled_pass.waits = True
            _waiting.set(tuple(map(weakref.ref, (*waiting(), scaled_pass))))
            yield
        finally:
            scaled_pass.waits = False
            _waiting.set(tuple(map(weakref.ref, waiting())))
    finally:  # once more: an interrupt may be raised in the middle of it
        scaled_pass.waits = False
        _waiting.set(tuple(map(weakref.ref, waiting())))


@contextmanager
def noting_reached() -> Iterator[dict[int, Tensor]]:
    """Inside the ``with``, collects the tensors that this thread's backward passes give gradients to, by id."""
    reached = dict[int, Tensor]()
    with holding(running, "reached", reached):
        yield reached


def is_trained_by_another_thread(tensor: Tensor) -> bool:
    """Returns whether another thread, which is alive, was the last to give a tensor a gradient, which may be gone."""
    by = getattr(tensor, "_given_by", None)
    here = by in (None, threading.get_ident())
    return not here and any(thread.ident == by for thread in threading.enumerate())


def giving(grad: Tensor) -> AbstractContextManager[None]:
    """Around the backward of an op of the user's, which is given this gradient."""
    return nullcontext() if running.now is None else holding(running.now, "given", grad)


def goes_on(seed: Tensor | None, leaves: Iterable[Any]) -> bool:
    """Returns whether a backward hands on what the pass around it has given to an op of the user's: it begins with a
    gradient, or from a loss that has that one, or another of that pass, among its leaves."""
    now = running.now
    if now is None or seed is not None:
        return seed is not None
    grads = {id(now.given), *(id(vars(node).get("grad")) for node in bridge.graph(now.root))}
    return any(id(leaf) in grads for leaf in leaves)


def gradient_dtype(dtype: str) -> str:
    """The dtype in which this thread's backward pass hands on a gradient that is of this one as a rule."""
    return "float32" if running.layerwise else dtype


def narrow_for_others(nodes: Iterable[Node]) -> None:
    """Lets ops that are not clamp's, where layers have scales of their own, have the gradients that they know: those of
    16-bit results in 16 bits, multiplied by the loss scale alone. What they return is widened."""
    for node in [x for x in nodes if x.grad_fn is not None and not getattr(x, "is_clamps", False)]:
        values = [node.value, *(parent.value for parent in node.parents)]
        if any(value.dtype in bridge.HALF_DTYPES and bridge.on_device(value) for value in values):
            node.grad_fn = partial(_narrowed, node.grad_fn, str(node.value.dtype))
        node.is_clamps = True


def _narrowed(run: Callable[[Any], Any], dtype: str, grad: Any) -> Any:
    if not running.layerwise:
        return run(grad)
    grad = cast(grad, dtype) if dtype in bridge.HALF_DTYPES else grad
    with giving(grad):
        found = run(grad)
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
    this = _Pass(leaves, root)
    before = [(leaf, grad) for leaf, grad in this.met.values() if grad is not None]
    arounds = [(leaf, grad) for leaf, grad in before if this.is_arounds(leaf)]
    this.aside = [(x, grad) for x, grad in before if not this.is_arounds(x) and not _adds_up(mark_of(grad), mark)]
    outer = running.scale, running.layerwise, running.is_last, running.now
    try:
        running.scale, running.layerwise, running.is_last, running.now = scale, layerwise, is_last, this
        for leaf, _ in (*arounds, *this.aside):
            leaf.grad = None
        if layerwise:
            narrow_for_others(bridge.graph(root))
        launches = noting_launches(run)
        if before:
            adding_to(before)
        reached = _mark_all(leaves, {id(leaf): grad for leaf, grad in before}, mark)
        this.has_run(reached, again, launches)
        for leaf, grad in arounds:
            if leaf.grad is not None and this.around is not None:
                this.around.late.append((leaf, leaf.grad))
            leaf.grad = grad
        for leaf, grad in this.aside:
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
    elif this.around is not None:  # which may fail yet
        this.around.aside.append((leaf, grad))
    elif running.scale is None or not any(x.keep(leaf, grad) for x in reversed(waiting())):
        leaf.grad = added(grad, leaf.grad, leaf.grad.dtype)


def _adds_up(earlier: Mark | None, new: Mark) -> bool:
    """Returns whether the engine may add a new gradient to an earlier one as they are.

    A user's is taken for the true one inside a scaled pass, as in PyTorch for scaled by the same scale elsewhere.
    """
    if earlier is None:
        return new.scale is None or not waiting()
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
