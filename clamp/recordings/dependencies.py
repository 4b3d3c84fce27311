"""Dependencies of a recording: the memory of tensors, and the modules whose code ran.

Kept on the capture, not with what gives its memory back: it leads to modules, and through host steps back to the
capture itself, so that only the garbage collector can tell when nobody needs it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from netcl.runtime.capture import KernelCapture

from clamp import bridge
from clamp.bridge import Address, Seen
from clamp.casting.regions import process_region
from clamp.recordings.memory import Residents
from clamp.recordings.watch import Watch
from clamp.recordings.watched_state import is_same


class ModuleNotes:
    """The modules that run, each with what its attributes were when it first did."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, dict[str, Any]]] = {}

    def noting(self, original: Any, is_on: Callable[[], bool]) -> Callable[..., Any]:
        """A module class's ``forward`` or ``__call__``, which notes the module."""

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_on() and id(module) not in self._before:
                self._before[id(module)] = module, dict(vars(module))
            return original.__get__(module, type(module))(*args, **kwargs)

        return call

    def watch(self, *ignored: str) -> Watch:
        """The modules' settings as they are now.

        What the modules changed themselves since, and what they keep under a private name, does not count.

        Args:
            ignored: attributes that do not count either.
        """

        def hidden(owner: Any, name: str) -> bool:
            if name in ignored or (name.startswith("_") and name != "_training"):
                return True
            _, before = self._before.get(id(owner), (None, {}))
            return name in before and not is_same(vars(owner).get(name), before[name])

        roots: dict[str, Any] = {}
        for module, _ in reversed(self._before.values()):  # the last root is looked at first: parents before children
            kind = type(module).__name__
            roots[kind if kind not in roots else f"{kind} ({len(roots)})"] = module
        return Watch(roots, hidden, lambda x: not bridge.is_module(x) or id(x) in self._before)


class Dependencies:
    """Dependencies of one recording.

    Args:
        capture: the recording has ended.
        before: the living tensors when it began.
        own: addresses of its own memory.
        modules: those that ran.
    """

    def __init__(
        self, capture: KernelCapture, before: Sequence[Seen], own: Collection[Address], modules: ModuleNotes
    ) -> None:
        self.residents = Residents(capture._launches, before, own)
        self._modules = modules
        self._region = process_region()
        self._watch = modules.watch()

    def ignore(self, *names: str) -> None:
        """Lets attributes of modules change that do not matter to this pass."""
        self._watch = self._modules.watch(*names)

    def change(self) -> str:
        """Why the recording cannot be replayed any more, in words; empty if it can, after ``residents.follow()``."""
        if self._region is not None and self._region is not process_region():
            return "AMP has been shut down"
        return self.residents.change() or ("" if self._watch.holds() else f"{self._watch.change()} has changed")


def dependencies_of(capture: KernelCapture) -> Dependencies:
    """Returns what a recording that was made under AMP depends on."""
    found: Dependencies = capture._clamp_dependencies
    return found


def require_fit(capture: KernelCapture) -> None:
    """Raises RuntimeError if a recording does not give what the pass itself gives now."""
    if change := dependencies_of(capture).change():
        raise stale(change)


def stale(why: str) -> RuntimeError:
    """The error for a replay that would not give what the pass itself gives now."""
    return RuntimeError(
        f"a recording was replayed that does not fit any more: {why} since it was made. Record the pass again (netcl's "
        "compiled forward passes: model.invalidate_compiled(), then model.compile_forward(x))"
    )
