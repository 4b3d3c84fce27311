"""The recordings of one graph: which of them a call may replay, and how many are kept.

A pass is recorded for a *key* (the shapes it is given, the region around it) and for a state of the host
(``watch.py``). Its first run in a state is not recorded: kernels are built in it, tables made. The second is, if
the state is still the same; all others replay that, for as long as the state stays or comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from clamp.bridge import address_of
from clamp.recordings.arguments import Key, what_differs
from clamp.recordings.replayable import Replayable
from clamp.recordings.watch import Watch
from clamp.scaling.step_guard import are_steps_withheld
from clamp.scaling.step_report import warn_user

MOST_KEYS = 32  # remembered; the one that was not used for longest goes first
MOST_RECORDINGS = 32  # kept, each with the memory that its launches use
_PER_KEY = 4  # of them: a model trained and evaluated, with a part frozen and without
_PATIENCE = 32  # calls in a row of which each was the first of its kind
_UNREPAID = 48  # recordings after which each must have been replayed three times: one takes as long as several calls
_RETRIES = 8  # recordings in a row of one kind that no call could use


@dataclass
class _Kind:
    """The calls of one key."""

    ran: Watch | None = None  # the state after the last run
    kept: list[Replayable] = field(default_factory=list)
    unused: int = 0  # recordings since the last replay
    why: str = ""  # what kept the last call from replaying
    never: bool = False  # runs as it is, always


class Variants:
    """Recordings of one graph.

    Args:
        name: of the graph, for warnings.
        code: what runs, in the words of the user.
    """

    def __init__(self, name: str, code: str) -> None:
        self._name, self._code = name, code
        self._kinds: OrderedDict[Key, _Kind] = OrderedDict()
        self._newest: _Kind | None = None  # the last of them: keys are slow to look up
        self._new_states = self._made = self._replays = 0
        self._stopped = False  # nothing is recorded any more; what has been is replayed
        self._warned = self._differed = self._never = False
        self._of_dry_runs: list[Replayable] = []  # made where steps were only looked at, and dropped after that

    def __len__(self) -> int:
        return len(self._kinds)

    def clear(self) -> None:
        """Forgets everything, and gives the memory back."""
        self._kinds.clear()
        self._newest = None

    @property
    def recordings(self) -> int:
        """Returns how many there are."""
        return sum(len(kind.kept) for kind in self._kinds.values())

    def find(self, key: Key, misfit: Callable[[Replayable], str]) -> Replayable | None:
        """A recording that gives what running the pass gives now; None if there is none.

        Args:
            misfit: returns why a recording does not; empty if it does.
        """
        if self._never and self._kinds:
            self.clear()
        if self._of_dry_runs and not are_steps_withheld():
            for other in self._kinds.values():
                other.kept = [x for x in other.kept if x not in self._of_dry_runs]
            self._of_dry_runs = []
        kind = self._kinds.get(key)
        if kind is None:
            return None
        self._make_newest(key, kind)
        for recorded in reversed(kind.kept):
            kind.why = misfit(recorded)
            if not kind.why:
                kind.unused = self._new_states = 0
                recorded.calls += 1
                self._replays += 1
                return recorded
        return None

    def may_record(self, key: Key) -> Watch | None:
        """The state in which the pass has run before, if that is the state now; otherwise None."""
        kind = self._kinds.get(key)
        if self._stopped or self.runs_always(key):
            return None
        if kind is not None and kind.ran is not None and kind.ran.holds():
            return kind.ran
        self._new_states += 1
        if self._new_states >= _PATIENCE:
            ran = None if kind is None else kind.ran
            self._stop(self._difference(key) if ran is None else f"{ran.change()} changes")
        return None

    def ran(self, key: Key, watch: Watch) -> None:
        """The pass has run, and was not recorded."""
        self._kind(key).ran = watch

    def add(self, key: Key, recorded: Replayable, before: Watch) -> None:
        """The pass has been recorded.

        Args:
            before: the state before it.
        """
        if self._never:  # a backward meanwhile
            return
        kind = self._kind(key)
        self._made += 1
        if self._made >= _UNREPAID and self._replays < 3 * self._made:
            self._stop(kind.why or self._difference(key))
        kind.ran = recorded.watch
        still, used = {id(tensor) for tensor in recorded.watch.tensors}, recorded.plan.dependencies.places
        # The next run would read the tensor that is there after this one.
        if any(address_of(x.buffer) in used for x in before.tensors if id(x) not in still):
            self.run_always(key, f"{self._code} puts a new tensor in place of one that it reads, and a replay cannot")
        elif kind.unused >= _RETRIES:
            self.run_always(key, kind.why)
        else:
            kind.unused += 1
            if are_steps_withheld():
                self._of_dry_runs.append(recorded)
            kind.kept = [*kind.kept[1 - _PER_KEY :], recorded]
        for kind in list(self._kinds.values()):
            while kind.kept and self.recordings > MOST_RECORDINGS:
                kind.kept.pop(0)

    def differs(self, key: Key, recorded: Replayable, why: str) -> None:
        """The pass, run in place of a replay, did something else than that would have. It is recorded anew, and after
        the second time nothing is any more.

        Args:
            why: what was different.
        """
        kind = self._kind(key)
        kind.kept = [x for x in kind.kept if x is not recorded]
        self._never = self._differed
        self._differed = True
        warn_user(
            f"{self._name} computes something else now than its recording, which up to {recorded.calls // 2} calls "
            f"have replayed: {why}. {self._code} reads something that has changed, and that replays cannot notice. "
            f"{'It is not recorded any more' if self._never else 'It is recorded again'}: pass what changes as an "
            "argument."
        )

    def runs_always(self, key: Key) -> bool:
        """Returns whether calls of this key run as they are, for good."""
        kind = self._kinds.get(key, _Kind())
        return self._never or kind.never or (self._stopped and not kind.kept)

    def run_always(self, key: Key, why: str | None = None) -> None:
        """Calls of this key cannot be recorded: they run as they are from now on.

        Args:
            why: what is warned of, unless the caller does that.
        """
        kind = self._kind(key)
        kind.kept.clear()
        kind.never = True
        if why is not None:
            self._warn(why)

    def never(self) -> None:
        """No call is recorded or replayed any more. What there is goes with the next: another thread may be in one."""
        self._never = True

    def following(self) -> AbstractContextManager[None]:
        """Around a run of the pass: what it changes itself is no change for any recording."""
        watches = {id(x): x for kind in self._kinds.values() for x in (kind.ran, *(r.watch for r in kind.kept)) if x}
        return Watch.following(watches.values())

    def _kind(self, key: Key) -> _Kind:
        kind = self._kinds.setdefault(key, _Kind())
        self._make_newest(key, kind)
        while len(self._kinds) > MOST_KEYS:
            self._kinds.popitem(last=False)
        return kind

    def _make_newest(self, key: Key, kind: _Kind) -> None:
        if kind is not self._newest:
            self._kinds.move_to_end(key)
            self._newest = kind

    def _stop(self, why: str) -> None:
        self._stopped = True
        self._warn(why)

    def _difference(self, key: Key) -> str:
        last = next((other for other in reversed(self._kinds) if other != key), None)
        return "" if last is None else what_differs(last, key)

    def _warn(self, why: str) -> None:
        if self._warned:
            return
        self._warned = True
        warn_user(
            f"{self._name} is recorded again and again, but not replayed: in each call {why or 'its inputs change'}. "
            f"From now on {self._code} runs without a recording: correct, but slower. Pass what changes as a tensor, "
            f"and keep what {self._code} does not need out of it."
        )
