"""One recorded call of a function, and what replays give the user."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from clamp import bridge
from clamp.bridge import Node, Tensor, address_of
from clamp.casting import arguments
from clamp.opencl.host_steps import HostValue, is_host_value, value_now
from clamp.params import gradient_marks
from clamp.params.gradient_marks import mark_of, set_mark
from clamp.params.graphs import ENDED, is_computed_from_trained
from clamp.params.weight_cache import weight_cache
from clamp.recordings.arguments import PLAIN, Arguments, leaves_of, mapped
from clamp.recordings.attempt import Attempt
from clamp.recordings.capture import recording_of
from clamp.recordings.comparison import allocation_of, difference
from clamp.recordings.gradients import Entries, Gradients, Known
from clamp.recordings.memory import dependencies_of
from clamp.recordings.replay import ReplayPlan
from clamp.recordings.watch import Watch


class CannotReplay(Exception):
    """A recording cannot be replayed; the message says why."""


def without_graph(node: Node) -> Node:
    """A node of the same value: backward runs inside a recorded function, or not at all."""
    return Node(value=node.value, op_name=ENDED if is_computed_from_trained(node) else node.op_name)


def detached(result: Any) -> Any:
    """Nested results with nodes that have no graph."""

    def convert(x: Any) -> Any:
        if not isinstance(x, Node):
            return value_now(x)
        return x if bridge.is_leaf(x) and not is_computed_from_trained(x) else without_graph(x)

    return mapped(result, convert)


@dataclass
class Made:
    """A tensor that the function made and leaves, as a result or a gradient: in each replay in memory of its own."""

    tensor: Tensor  # what was recorded; host steps find it here
    size: int  # bytes that launches use where it lies; 0 if it lies past every pool, as what netcl's own matmul makes
    first: Tensor | None = None  # what lies in the same memory, if that is another tensor

    def taken(self) -> Tensor:
        """A tensor with what the recording wrote, which no replay changes."""
        return bridge.take_storage(self.tensor) if self.size else gradient_marks.copied(self.tensor)


class Replayable:
    """A recorded call.

    Args:
        attempt: it has ended, and was not given up.
        values: what stood for its arrays.
        had: ids of arguments that had a gradient before.
        state: tensors that it knows.

    Raises:
        CannotReplay: it reads or returns what no replay has.
    """

    _mapped = staticmethod(mapped)

    def __init__(
        self, attempt: Attempt, call: Arguments, values: Sequence[HostValue], result: Any, gradients: Gradients,
        had: AbstractSet[int], state: Iterable[Tensor], watch: Watch,
    ) -> None:  # fmt: skip
        recording = recording_of(attempt)
        assert recording is not None
        self._recording, self._call = recording, call
        self._values = values  # held so that their ids stay theirs
        self._array = {id(value): index for index, value in enumerate(values)}
        self._uploads = [(self._array[id(x.given)], x) for x in attempt.uploads]
        self._others = (*call.tensors, *(upload.tensor for upload in attempt.uploads))  # given, or made of its arrays
        self._others_memory = dependencies_of(attempt).before | {address_of(x.buffer) for x in self._others}
        self._state = {id(x): x for x in state}
        self._made: dict[int, Made] = {}
        self._gradients, self._aliases = gradients, gradients.aliases
        self._exits = gradients.touched(recording.addresses)
        self._touched = [tensor for tensor, _ in self._exits]
        self._met = gradients.met(self._touched, recording.addresses)
        self._outcome = self._outcome_of(attempt, call, result, [grad for _, grad in self._exits], self._aliases)
        self._note_results(result)
        self._note_gradients(had)
        self._note_inputs()
        # Replays write these where they are told; of what they write elsewhere, there is a copy after each.
        self._moving = [made for made in self._made.values() if made.first is None and made.size]
        self._staying = [made for made in self._made.values() if made.first is not None or not made.size]
        gradients.held.met += [made.tensor for made in self._made.values() if made.size]
        given = [*(call.tensors[index] for index in self._inputs), *(self._aliases[id(x)] for x in self._entered)]
        moving = [*(upload.tensor for _, upload in self._uploads), *(made.tensor for made in self._moving)]
        self.plan, self.watch = ReplayPlan(attempt, given, self._state.values(), moving), watch
        self.calls = 0  # that it could be replayed for
        # whether it changes what is watched, in steps on the host: the optimizer's count of steps, if that is read
        self.changes_host = False

    def attempt_to_compare(self, before: Watch) -> Attempt:
        """Returns what records the same call once more, to be compared with this."""
        return Attempt(before, self._recording.together)

    def _note_results(self, result: Any) -> None:
        self._result = self._mapped(result, self._kept)
        passed = {id(x) for x in (*self._call.passed, *self._call.tensors)}
        leaves = list(leaves_of(self._result))
        self._gives_back = any(id(x) in passed for x in (*leaves, *[x.value for x in leaves if isinstance(x, Node)]))

    def _note_gradients(self, had: AbstractSet[int]) -> None:
        """Notes the gradients that it leaves to tensors: to arguments that are not trained, to those that are, and to
        all others."""
        tensors, known = self._call.tensors, {id(tensor) for tensor in self._gradients.trained}
        self._untrained = [index for index, x in enumerate(tensors) if id(x) not in known]
        others = {index: tensors[index].grad for index in self._untrained}
        self._given = {index: grad for index, grad in others.items() if self._is_made(grad)}
        self._cleared = [index for index, grad in others.items() if grad is None and id(tensors[index]) in had]
        for grad in [*filter(self._is_made, (grad for _, grad in self._exits)), *self._given.values()]:
            self._note_made(grad)
        lasts = [(x, gradient_marks.last_shared(x)) for x, grad in self._exits if grad is None]
        self._unshared = [(x, last) for x, last in lasts if last is None or self._is_made(last)]

    def _note_inputs(self) -> None:
        """The arguments that launches read, and the gradients that they add to."""
        read = self._recording.addresses
        self._inputs = [index for index, x in enumerate(self._call.tensors) if address_of(x.buffer) in read]
        self._entered = [x for x in self._met if address_of(self._aliases[id(x)].buffer) in read]
        if any(gradient_marks.scale_of(self._aliases[id(x)]) is not None for x in self._entered):
            raise CannotReplay(
                "it adds to gradients that are still multiplied by an earlier loss scale. Clear them first, "
                "optimizer.zero_grad(), or run the passes that add up in one call"
            )

    def of_recording(self) -> Any:
        """Returns what the recorded call itself returns; gradients are given to their tensors."""
        owned = {key: made.taken() for key, made in self._made.items()}
        self._leave(self._call, owned, ())
        return self._results(self._call, owned)

    # ------------------------------------------------------------------------------------------ comparing

    @property
    def trained(self) -> Sequence[Tensor]:
        """The tensors whose gradients it may have met or left."""
        return self._gradients.trained

    def difference(
        self, attempt: Attempt, call: Arguments, result: Any, exits: Sequence[Tensor | None], entries: Entries
    ) -> str:
        """Returns what a call that was run did differently from this recording, in words; empty if nothing.

        Args:
            attempt: it has ended, and was not given up.
            exits: the gradients of ``trained`` when it ended.
            entries: of these when it began.
        """
        if len(attempt.uploads) != len(self._uploads):
            return "it brings other arrays to the device"
        given = [*(call.tensors[index] for index in self._inputs), *entries.found(self._entered)]
        why = difference(self.plan, attempt, given, [upload.tensor for upload in attempt.uploads])
        unknown = self.plan.unknown_tensors
        if unknown and (why or any(tensor() is None for tensor in unknown)):
            return f"it reads other tensors than before, from an iterator say{why and f': {why}'}"
        by_tensor = {id(tensor): grad for tensor, grad in zip(self.trained, exits, strict=True)}
        left = [by_tensor[id(tensor)] for tensor in self._touched]
        if not why and self._outcome_of(attempt, call, result, left, entries.aliases) != self._outcome:
            why = "it returns other things, or leaves other gradients"
        return why

    def _outcome_of(
        self,
        attempt: Attempt,
        call: Arguments,
        result: Any,
        left: Sequence[Tensor | None],
        aliases: Mapping[int, Tensor],
    ) -> Any:
        """Returns what a call returns and leaves, in words that are the same whenever it does the same."""
        owners = {id(alias): owner for owner, alias in aliases.items()}
        allocation = allocation_of(attempt)
        leaves, tensors = [id(x) for x in call.leaves()], [id(x) for x in call.tensors]

        def name(x: Any) -> Any:
            if id(x) in leaves:
                return "given", leaves.index(id(x))
            value = x.value if isinstance(x, Node) else x
            if not isinstance(value, Tensor):
                return "anew" if is_host_value(x) else (type(x), repr(x)) if isinstance(x, PLAIN) else type(x)
            if id(value) in tensors:
                return "given", tensors.index(id(value))
            owner = owners.get(id(value))  # of a gradient that was there before
            made = None if owner is not None else allocation(value.buffer)
            return type(x), made, owner, id(value) if bridge.is_weight(value) else None

        return self._mapped(result, name), [name(x) for x in left]

    # ------------------------------------------------------------------------------------------ replays

    @property
    def is_due(self) -> bool:
        """Returns whether this call is to be run and compared (comparison.py): the 2nd, 4th, 8th, ... and every
        1,000th; the first, too, where launches read tensors of which nobody knows where the code has them from."""
        if self.calls == 1:
            return bool(self.plan.unknown_tensors)
        return self.calls & (self.calls - 1) == 0 or self.calls % 1000 == 0

    def misfit(self, inputs: Sequence[Tensor], known: Known) -> str:
        """Returns why a call with these tensors, and the gradients that are there, cannot replay it; empty if it
        can."""
        if change := self._gradients.change(known) or self._change():
            return change
        return self.plan.misfit([*[inputs[index] for index in self._inputs], *[x.grad for x in self._entered]])

    def _change(self) -> str:
        return "" if self.watch.holds() else f"{self.watch.change()} changes"

    def replay(self, call: Arguments, known: Known) -> Any:
        """Does what the function does, and returns what it returns."""
        uploaded = {id(upload.tensor): upload.again(call.arrays[index]) for index, upload in self._uploads}
        fresh = {id(made.tensor): bridge.empty_like(made.tensor, made.size) for made in self._moving}
        for made in self._made.values():
            if made.size:
                made.tensor.buffer = fresh[id(made.first or made.tensor)].buffer
        others = [self._call.tensors[index] for index in self._untrained]
        theirs = [x.grad for x in others]
        self._gradients.held.forget_skips()
        entries = Entries(self._met, known, self._aliases)
        given = [*[call.tensors[index] for index in self._inputs], *entries.found(self._entered)]
        try:
            self.plan.launch(given, [*uploaded.values(), *fresh.values()])
        except BaseException:
            self._leave_as_is(entries)
            raise
        finally:
            for x, grad in zip(others, theirs, strict=True):  # the recorded call's, to which host steps give this one's
                x.grad = grad
        for made in self._staying:
            fresh[id(made.tensor)] = gradient_marks.copied(made.tensor)
        self._leave(call, fresh, entries.by_alias)
        entries.put_back(self._touched)
        weight_cache.clear()
        return self._results(call, {**uploaded, **fresh})

    def _leave(self, call: Arguments, made: dict[int, Tensor], found: Container[int]) -> None:
        """Gives tensors the gradients that they have after the function."""
        for index in self._cleared:
            call.tensors[index].grad = None
        for index, grad in self._given.items():
            call.tensors[index].grad = made[id(grad)]
            set_mark(made[id(grad)], mark_of(grad))
        for tensor, grad in self._exits:
            if (now := made.get(id(grad))) is not None:
                tensor.grad = now
                set_mark(now, mark_of(grad))
                gradient_marks.take_over(now, grad)
                if gradient_marks.last_shared(tensor) is grad:
                    gradient_marks.note_shared(tensor, now)
            elif grad is None or id(grad) in found or id(grad) in self._state:
                tensor.grad = grad
        for tensor, last in self._unshared:  # host steps have noted what this replay's next one would take for it
            gradient_marks.note_shared(tensor, made.get(id(last)))

    def _leave_as_is(self, entries: Entries) -> None:
        """After an error: gradients stay as far as they are, in memory of the user's."""
        entries.put_back(self._touched)
        for tensor in self._touched:
            grad = tensor.grad
            if self._is_made(grad):
                tensor.grad = gradient_marks.copied(grad)
                if gradient_marks.last_shared(tensor) is grad:
                    gradient_marks.note_shared(tensor, tensor.grad)

    def _is_made(self, x: Tensor | None) -> bool:
        """Returns whether a tensor is one that the function made."""
        if x is None or id(x) in self._made or self._recording.size_of(x.buffer) is not None:
            return x is not None
        where = address_of(x.buffer)
        return where in self._recording.addresses and where not in self._others_memory

    # ------------------------------------------------------------------------------------------ results

    def _kept(self, x: Any) -> Any:
        """A leaf of the results as it is kept: what ``_results`` finds another for in each call."""
        if any(x is leaf for leaf in self._call.leaves()):
            return x
        value = x.value if isinstance(x, Node) else x
        whole = bridge.base_of(value) if isinstance(value, Tensor) and not self._is_made(value) else None
        if isinstance(x, Node) and whole is not None and (whole.shape, whole.dtype) == (value.shape, value.dtype):
            x.value = value = whole  # what a user's op handed back, which has a view of it
        if isinstance(value, Tensor) and self._is_made(value):
            self._note_made(value)
        elif isinstance(value, Tensor):
            if id(value) not in self._state and all(value is not other for other in self._others):
                raise CannotReplay("it returns another view of memory that it did not write: return a copy of it")
        elif not (is_host_value(x) or isinstance(x, PLAIN)):
            raise CannotReplay(
                f"it returns a {type(x).__name__} that it made on the host, which no replay makes. Return tensors, "
                "and make the rest from them after the call"
            )
        return without_graph(x) if isinstance(x, Node) else x

    def _note_made(self, tensor: Tensor) -> None:
        if id(tensor) not in self._made:
            where, size = address_of(tensor.buffer), self._recording.size_of(tensor.buffer)
            others = [x.tensor for x in self._made.values() if address_of(x.tensor.buffer) == where]
            self._made[id(tensor)] = Made(tensor, size or 0, others[0] if others else None)

    def _results(self, call: Arguments, made: dict[int, Tensor]) -> Any:
        given: dict[int, Any] = {}
        tensors: dict[int, Tensor] = {}
        if self._gives_back:
            given = {id(old): now for old, now in zip(self._call.passed, call.passed, strict=True)}
            tensors = {id(old): now for old, now in zip(self._call.tensors, call.tensors, strict=True)}

        def now(x: Any) -> Any:
            if isinstance(x, Node | Tensor) and id(x) in given:
                return given[id(x)]
            if isinstance(x, Tensor) or (isinstance(x, Node) and isinstance(x.value, Tensor)):
                value = made.get(id(x.value), tensors.get(id(x.value), x.value))
                return Node(value=value, op_name=x.op_name) if isinstance(x, Node) else value
            return call.arrays[self._array[id(x)]] if id(x) in self._array else value_now(x)

        return self._mapped(self._result, now)


class InPlace(Replayable):
    """A recorded call whose replays write where it wrote: of results there is a copy after each, in whatever containers
    they are, and gradients stay where they are, for the next replay to write over them. Nothing has a gradient when a
    replay begins.

    Raises:
        ValueError: no launch reads one of the tensors that it was given.
    """

    _mapped = staticmethod(arguments.mapped)

    def _note_results(self, result: Any) -> None:
        def kept(x: Node | Tensor) -> Tensor:
            self._made[id(x.value)] = Made(x.value, 0)
            return x.value

        self._result, self._gives_back = self._mapped(result, kept), False

    def _note_made(self, tensor: Tensor) -> None: ...

    def _note_inputs(self) -> None:
        self._inputs, self._entered = list(range(len(self._call.tensors))), []

    def misfit(self, inputs: Sequence[Tensor], known: Known) -> str:
        return self._change() or self.plan.misfit(inputs)  # it finds no gradients

    def _leave(self, call: Arguments, made: dict[int, Tensor], found: Container[int]) -> None:
        for tensor, grad in self._exits:
            tensor.grad = grad
        for index, grad in self._given.items():
            if call.tensors[index] is self._call.tensors[index]:
                call.tensors[index].grad = grad

    def _leave_as_is(self, entries: Entries) -> None: ...
