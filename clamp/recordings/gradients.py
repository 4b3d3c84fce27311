"""Gradients around a recorded function: those that it finds, and those that it leaves.

A function may add to gradients that are there, step by them, clear them and leave others. In a recording each that
is there when it begins is another object for the same memory, an *entry*. A replay lays what is there then under it:
what the launches do in place they do to that, and what the function leaves as it was is left.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Address, Tensor, address_of
from clamp.params import gradient_marks
from clamp.params.gradient_marks import FINITE, Mark, mark_of, set_mark

Tokens = Mapping[object, int]  # the guards of steps to come: what marks call them, and the bit of their optimizer


@dataclass(slots=True)
class GradientEntry:
    """A gradient that is there when the function begins."""

    found: Tensor  # what is there
    alias: Tensor  # what the function meets in its place
    mark: Mark | None  # what the alias was marked with


class Known:
    """Knowledge of gradients, as far as it counts here. Those of one pass have one mark, which is looked at once.

    Args:
        tokens: of the guards: only these have heard of a gradient; others look at it again.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        # By ids of marks: each, what is left of it, and what a recording depends on in that.
        self._marks: dict[int, tuple[Mark | None, Mark | None, Hashable]] = {}

    def mark(self, grad: Tensor) -> Mark | None:
        """A gradient's mark."""
        return self._look_up(grad)[1]

    def kind(self, tensor: Tensor) -> Hashable:
        """Returns what a recording depends on in the gradient that a tensor has: is there one, and what is known of
        it?"""
        grad = tensor.grad
        return None if grad is None else (grad.dtype, self._look_up(grad)[2])

    def _look_up(self, grad: Tensor) -> tuple[Mark | None, Mark | None, Hashable]:
        mark = gradient_marks.mark_now(grad)
        found = self._marks.get(id(mark))
        if found is None:
            found = self._marks[id(mark)] = mark, *self._look_at(mark)
        return found

    def _look_at(self, mark: Mark | None) -> tuple[Mark | None, Hashable]:
        if mark is None:
            return None, "made by hand"
        heard = mark.heard & {FINITE, *self._tokens}
        if heard != mark.heard:
            mark = Mark(mark.scale, mark.is_checked, mark.lost_bits, heard, mark.since)
        bits = frozenset([self._tokens.get(token, -1) for token in heard])
        return mark, (mark.scale is not None, mark.is_checked, mark.lost_bits, bits)


class Entries:
    """The gradients that tensors have when a function begins, with aliases in their places.

    Args:
        tensors: each once.
        aliases: by id of the tensor, where they are made already.
    """

    def __init__(self, tensors: Iterable[Tensor], known: Known, aliases: Mapping[int, Tensor] | None = None) -> None:
        self._by_tensor: dict[int, GradientEntry] = {}
        self.by_alias: dict[int, GradientEntry] = {}  # by ids of aliases, which tensors may share
        shared: dict[int, Tensor] = {}
        for tensor in tensors:
            if tensor.grad is None:
                continue
            found, mark = tensor.grad, known.mark(tensor.grad)
            made = shared.get(id(found)) if aliases is None else aliases[id(tensor)]
            alias = shared[id(found)] = made or bridge.alias(found)
            alias.buffer = found.buffer
            set_mark(alias, mark)
            gradient_marks.take_over(alias, found)
            self._by_tensor[id(tensor)] = self.by_alias[id(alias)] = GradientEntry(found, alias, mark)
            tensor.grad = alias
            if gradient_marks.last_shared(tensor) is found:
                gradient_marks.note_shared(tensor, alias)

    @property
    def aliases(self) -> dict[int, Tensor]:
        """The aliases by ids of tensors."""
        return {key: entry.alias for key, entry in self._by_tensor.items()}

    def found(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns what is there for these tensors, which have entries."""
        return [self._by_tensor[id(tensor)].found for tensor in tensors]

    def put_back(self, tensors: Iterable[Tensor]) -> None:
        """Gives tensors that have an alias what it stands for, with what is known of it now."""
        for tensor in tensors if self.by_alias else ():
            shared = self.by_alias.get(id(gradient_marks.last_shared(tensor)))
            if shared is not None:
                gradient_marks.note_shared(tensor, shared.found)
            entry = self.by_alias.get(id(tensor.grad))
            if entry is not None:
                if mark_of(entry.alias) is not entry.mark:
                    set_mark(entry.found, mark_of(entry.alias))
                gradient_marks.take_over(entry.found, entry.alias)
                tensor.grad = entry.found


class Gradients:
    """Changes of one call to gradients.

    Args:
        trained: the tensors whose gradients it may have met or left.
        kinds: of these when it began.
        entries: of them when it began; they have been put back.
        exits: the gradients that they had when it ended, aliases among them.
        held: what its host steps go back to.
    """

    def __init__(
        self, trained: Sequence[Tensor], kinds: Sequence[Hashable], entries: Entries,
        exits: Sequence[Tensor | None], held: gradient_marks.HeldByReplays,
    ) -> None:  # fmt: skip
        self.trained, self.aliases = trained, entries.aliases
        self._kinds, self._exits, self.held = kinds, exits, held

    def change(self, known: Known) -> str:
        """Returns what of the gradients that are there is not as it was when it began; empty if it is all as it was."""
        for tensor, kind in zip(self.trained, self._kinds, strict=True):
            if (tensor.grad is not None or kind is not None) and known.kind(tensor) != kind:
                return f"the gradient of a parameter of shape {tuple(tensor.shape)} is there or not, or of another kind"
        return ""

    def touched(self, read: AbstractSet[Address]) -> list[tuple[Tensor, Tensor | None]]:
        """The tensors to whose gradients it did something, with those that they had then. Others may be another
        thread's.

        Args:
            read: the memory that its launches use.
        """

        def is_touched(tensor: Tensor, grad: Tensor | None) -> bool:
            alias = self.aliases.get(id(tensor))
            used = alias is not None and address_of(alias.buffer) in read
            return used or grad is not alias or id(tensor) in self.held.tensors

        return [(x, grad) for x, grad in zip(self.trained, self._exits, strict=True) if is_touched(x, grad)]

    def met(self, touched: Iterable[Tensor], read: AbstractSet[Address]) -> list[Tensor]:
        """Returns those of the tensors it touched with whose gradients it began. Others it just lets go of, if there
        are."""
        kept = {*self.held.grads, *map(id, self._exits)}
        found = [(x, self.aliases[id(x)]) for x in touched if id(x) in self.aliases]
        return [x for x, alias in found if id(alias) in kept or address_of(alias.buffer) in read]
