"""``amp.record``: a function of tensors, a training step above all, recorded once and replayed."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from clamp import bridge, session
from clamp.bridge import Node, Tensor
from clamp.casting.results import RESULTS
from clamp.interrupts import Flag, among, contextmanager, holding, of_threads
from clamp.opencl.host_steps import is_host_value, recorder
from clamp.params import delivery, gradient_marks, graphs, masters
from clamp.recordings.arguments import PLAIN, Arguments, Key, around, leaves_of
from clamp.recordings.attempt import Attempt, answers_refused, reads_noted
from clamp.recordings.capture import is_free, recording_of
from clamp.recordings.gradients import Entries, Gradients, Known, Tokens
from clamp.recordings.replayable import CannotReplay, Replayable, detached
from clamp.recordings.variants import Variants
from clamp.recordings.watch import Watch
from clamp.recordings.watched_state import is_same
from clamp.scaling.dynamic_scale import settle_before_reading, settle_late
from clamp.scaling.manual import stages
from clamp.scaling.step_report import warn_user

_GENERATORS = {"numpy.random": np.random.get_state.__self__, "random": random.getstate.__self__}  # type: ignore[attr-defined]
_waiting: dict[object, Arguments] = {}  # of calls that would record; the first may: netcl records one thread at a time
_inside = of_threads(Flag())  # a recorded function
_MOST_WAITS = 16  # of a function whose results are kept, with their graphs, and not trained


def record(function: Callable[..., Any]) -> RecordedFunction:
    """A function that is recorded once and replayed: a training step, or a forward pass::

        @amp.record
        def step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(ag.tensor(x)), ag.tensor(y))
            with handle.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            return loss

    The first call with arguments of some shapes and dtypes runs the function, the second one records what it launches,
    and all others replay that: they give the same bits as running it. The loss scale, the skipping of steps, learning
    rates, Adam's step count and what ``dropout`` draws are those current at replay. Where something has changed that
    the function reads (a mode of the model, a variable, a gradient that is there or not), it runs, and is recorded
    anew. Where no replay could be right, it runs as it is, and says why once.

    All else that the function does on the host, ``print`` say, happens in the first two calls, and where a
    replay is tried by running it, only.

    Args:
        function: takes tensors, nodes and numpy arrays in nested tuples, lists and dicts, by position or by name; of
            an array only shape and dtype may be looked at, and it may be given to ``Tensor.from_host``. Any other
            argument is a constant, with a recording for each. It returns tensors and nodes, nested likewise, None,
            and numbers that do not change from call to call.

    Returns:
        A function with the same arguments. What it returns is the caller's to keep, as without recording. Nodes that a
        recorded or replayed call returns have no graph, and a backward through them raises RuntimeError: ``backward``
        belongs into the function. If it runs through what calls returned before one was recorded, none is.

    Raises:
        TypeError: the function cannot be called.
    """
    return RecordedFunction(function)


class RecordedFunction:
    """A function as ``amp.record`` makes it."""

    __wrapped__: Callable[..., Any]
    _kind = Replayable
    _positional, _of_gradients = "args", True  # as Arguments has them
    _detached = staticmethod(detached)

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"amp.record takes a function, got {type(function).__name__}")
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._code = f"{self._name}()"
        self._variants = Variants(self._name, self._code)
        self._lock = threading.RLock()
        self._warned = False
        self._reached = WeakValueDictionary[int, Tensor]()  # by id: what got gradients here, wherever it is kept
        self._given = WeakValueDictionary[int, Node]()  # by one run, with graphs: backward may come yet
        self._waits = 0  # calls that were not recorded for that
        self._bound: tuple[Any, Any] = None, None  # of a method: the recorded function that it is of, and the object
        self._unwatched = frozenset({*vars(self), "_unwatched", "__wrapped__"})
        functools.update_wrapper(self, function)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method of an object: it has recordings of its own, which live as long. One that has no dict to keep them
        in, and a class, is an argument."""
        if instance is None or isinstance(self.__wrapped__, staticmethod) or not hasattr(self.__wrapped__, "__get__"):
            return self
        own = getattr(instance, "__dict__", None)
        if not isinstance(own, dict):
            return MethodType(self, instance)
        key = f"recorded {self._name}"
        while (known := own.get(key)) is not None and known._bound[1] is instance:
            if known._bound[0] is self:
                return known
            key += "'"  # another function has this name: a lambda, say
        bound = RecordedFunction(self.__wrapped__.__get__(instance, owner))
        bound._bound = self, instance
        own[key] = bound
        return bound

    def __reduce__(self) -> Any:
        """A copy of a function is that function, a method's is the method of the copied object."""
        return self._name if isinstance(self.__wrapped__, FunctionType) else (record, (self.__wrapped__,))

    @property
    def recordings(self) -> int:
        """Returns how many there are, each with the memory that its launches use."""
        return self._variants.recordings

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs, records or replays the function; see ``amp.record``."""
        if _inside.on or recorder() is not None:  # it is a part of what records it
            return self.__wrapped__(*args, **kwargs)
        session.ensure_patched()
        settle_late()  # before the lock, which another thread may want that repeats its backward, and is waited for
        settle_before_reading(args, kwargs)
        with self._lock, holding(_inside, "on", True):
            return self._call(Arguments(args, kwargs, self._positional, self._of_gradients))

    def _call(self, call: Arguments) -> Any:
        if RESULTS.needs_values:
            with self._variants.following():
                return self.__wrapped__(*call.args, **call.kwargs)
        scaling = session.active_scaling()
        tokens: Tokens = {} if scaling is None else scaling.guards.tokens()
        key, known = self._key(call, tokens), Known(tokens)
        recorded = None
        if call.trouble:
            self._say(call.trouble)
        else:
            recorded = self._variants.find(key, lambda one: one.misfit(call.tensors, known))
        if recorded is not None and not recorded.is_due:
            return self._replay(call, known, recorded)
        if call.trouble or self._variants.runs_always(key):
            return self.__wrapped__(*call.args, **call.kwargs)
        before = self._variants.may_record(key) if recorded is None else recorded.watch
        if recorded is None and before is not None and self._may_be_trained():
            before = None
        with among(_waiting, call):
            if before is None or not (is_free() and [*_waiting.values()].index(call) == 0):
                return self._run(key, call) if recorded is None else self._replay(call, known, recorded)
            return self._record(key, call, before, known, recorded)

    def _key(self, call: Arguments, tokens: Tokens) -> Key:
        """Returns what a recording depends on besides the state of the host and the content of tensors."""
        host = (bridge.is_grad_enabled(), threading.get_ident(), stages())
        return (*around(), tuple(tokens.values()), RESULTS.key, *host), call.key

    def _roots(self, call: Arguments) -> dict[str, Any]:
        """Returns where what the function may read on the host begins."""
        return {self._name: self.__wrapped__, **call.others}

    def _say(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warn_user(f"{self._code} runs without a recording, correct but slower than a replay: {why}")

    # ------------------------------------------------------------------------------------------ running, recording

    def _run(self, key: Key, call: Arguments) -> Any:
        with self._variants.following(), self._noting_reached():
            result = self.__wrapped__(*call.args, **call.kwargs)
        watch = Watch(self._roots(call))
        self._variants.ran(key, watch)
        watch.returned = _numbers_in(result)
        given = [x for x in leaves_of(result) if isinstance(x, Node) and graphs.is_computed_from_trained(x)]
        for x in given:
            graphs.ask_before_backward(x, self._graph_is_used)
        if not self._given:
            self._given.update((id(x), x) for x in given if not hasattr(x, "last_pass"))
        return result

    def _may_be_trained(self) -> bool:
        """Returns whether results of a run are still held, and no backward has come to them: it may come to those of
        this call as well, as where a function is called twice for one loss. A loop over data lets go of them."""
        are_held = bool(self._given)
        self._waits += are_held
        return are_held and self._waits <= _MOST_WAITS

    def _graph_is_used(self) -> None:
        self._variants.never()
        self._say(
            "backward runs through what it returns, which replays have no graph of. Put backward into the function, or "
            "do without amp.record"
        )

    @contextmanager
    def _noting_reached(self) -> Iterator[None]:
        with delivery.noting_reached() as reached:
            yield
        self._reached.update(reached)

    def _trained(self, call: Arguments, watch: Watch) -> list[Tensor]:
        """The tensors outside of the arguments, and trained ones among these, whose gradients the function may meet or
        leave."""
        stepped = [x for optimizer in watch.optimizers for x in masters.stepped(optimizer)]
        found = [*call.tensors, *watch.tensors, *stepped, *self._reached.values()]
        given = {id(x) for x in call.tensors}
        wanted = (x for x in found if bridge.is_weight(x) or (id(x) in self._reached and id(x) not in given))
        return list({id(x): x for x in wanted if bridge.on_device(x)}.values())

    def _attempt(self, roots: dict[str, Any], before: Watch) -> Attempt:
        return Attempt(Watch({**_GENERATORS, **roots}, generators=True))

    def _change(self, attempt: Attempt) -> str:
        """Returns what the function has changed itself that no replay would; empty if nothing."""
        return attempt.watch.change(libraries=False)

    def _replay(self, call: Arguments, known: Known, recorded: Replayable) -> Any:
        with self._variants.following() if recorded.changes_host else nullcontext():
            return recorded.replay(call, known)

    def _record(self, key: Key, call: Arguments, before: Watch, known: Known, earlier: Replayable | None = None) -> Any:
        """Runs the function and records it, or, if there is an earlier recording that fits, compares it with that."""
        roots = self._roots(call)
        attempt = self._attempt(roots, before) if earlier is None else earlier.attempt_to_compare(before)
        leaves = call.leaves()
        args, kwargs, values = call.for_recording()
        trained = self._trained(call, before) if earlier is None else earlier.trained
        kinds = [known.kind(tensor) for tensor in trained]
        # another thread may be at work on them
        if any(x.grad is not None and delivery.is_trained_by_another_thread(x) for x in trained):
            return self._run(key, call)
        had = {id(tensor) for tensor in call.tensors if tensor.grad is not None}
        entries = Entries(trained, known)
        try:
            with self._variants.following(), self._noting_reached(), gradient_marks.noting_held() as held:
                attempt.begin()
                with answers_refused(attempt), reads_noted(attempt):
                    result = self.__wrapped__(*args, **kwargs)
                if attempt.is_recording:
                    attempt.end()
                changed = self._change(attempt)
        except BaseException:
            attempt.clear()
            raise
        finally:
            exits = [tensor.grad for tensor in trained]
            entries.put_back(trained)
        why = attempt.why or self._obstacle(attempt, changed, call, leaves)
        if earlier is not None:
            why = why or earlier.difference(attempt, call, result, exits, entries)
            attempt.clear()
            if why:
                self._variants.differs(key, earlier, why)
                self._variants.ran(key, Watch(roots))
            return self._detached(result)
        why = why or self._unlike_others(call, trained, had, result, before)
        if not why:
            watch = Watch(roots)
            try:
                gradients = Gradients(trained, kinds, entries, exits, held)
                made = self._kind(attempt, call, values, result, gradients, had, before.tensors, watch)
            except CannotReplay as reason:
                why = str(reason)
            except BaseException:
                attempt.clear()
                raise
        if why:
            attempt.clear()
            self._variants.run_always(key)
            self._say(why)
            return self._detached(result)
        made.changes_host = before.has_followed
        self._variants.add(key, made, before)
        return made.of_recording()

    def _obstacle(self, attempt: Attempt, change: str, call: Arguments, leaves: Sequence[Any]) -> str:
        """Returns why what was recorded cannot be replayed, for what it did; empty if it can."""
        if recording_of(attempt) is None:
            return "AMP was shut down in it"
        if change:
            return (
                f"it changes {change} itself, on the host, where a replay changes nothing. Do that outside of it, pass "
                "what changes as an argument, or return it"
            )
        if stale := attempt.stale_read():
            return (
                f"it reads {stale}, which a step that it makes on the host changes, and a replay would go on with what "
                "was there when it was recorded. Read it outside of it, and pass it as an argument"
            )
        now = call.leaves()
        if len(now) != len(leaves) or any(one is not other for one, other in zip(now, leaves, strict=True)):
            return "it changes its arguments, lists or dicts, and no replay would. Return what it makes"
        return ""

    def _unlike_others(
        self, call: Arguments, trained: Sequence[Tensor], had: AbstractSet[int], result: Any, before: Watch
    ) -> str:
        """Why what was recorded cannot be replayed, for what got gradients and what it returns; empty if it can.

        Args:
            had: ids of arguments that had a gradient before.
        """
        known, given = {id(tensor) for tensor in trained}, {id(tensor) for tensor in call.tensors}
        others = [x for key, x in self._reached.items() if key not in known]
        if any(id(x) in given & had for x in others):
            return "it adds to the gradient that an argument has. Clear that first, or pass another tensor"
        late = any(bridge.is_weight(x) for x in others if id(x) not in given)
        if late:
            return "it trains tensors that are new in each call. Make them outside of it"
        numbers = zip(_numbers_in(result), before.returned, strict=False)
        if any(not is_host_value(now) and not is_same(now, last) for now, last in numbers):
            return "it returns a number that is another one in each call, and would be the same in all replays"
        return ""


def _numbers_in(result: Any) -> tuple[Any, ...]:
    return tuple(x for x in leaves_of(result) if isinstance(x, PLAIN))
