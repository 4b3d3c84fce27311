"""Rendezvous of the ranks of a training: whatever a rank does next with the others begins with a header.

    header    [0] [1] [2]  ->  [0 1 2] everywhere    is everybody well, and at the same point?

A rank that fails must not leave the others waiting: an exception, the end of the training and the end of the process
are announced by headers, too, so that all learn what happened.
"""

from __future__ import annotations

import atexit
import sys
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from clamp.interrupts import contextmanager, uninterrupted

Array: TypeAlias = npt.NDArray[Any]

_PATIENCE = 10.0  # seconds for the others to hear of a rank's error
_LAST_PATIENCE = 30.0  # further seconds at the end of the process
_LAST_WORDS = 5.0  # seconds for the others to end with an error, too


class RankError(RuntimeError):
    """The ranks cannot go on together: one has failed or left, or they disagree."""


class Kind(IntEnum):
    """Next act of a rank with the others."""

    PASS = 1
    FAILED = 2
    BROADCAST = 3
    LEFT = 4


_DOES = {
    Kind.PASS: "ends a backward pass",
    Kind.FAILED: "has failed",
    Kind.BROADCAST: "broadcasts parameters",
    Kind.LEFT: "has ended its training (shutdown, or the end of the script)",
}

_HEADER = np.dtype(
    [
        ("kind", np.uint8),
        ("passes", np.uint64),  # begun so far
        ("layout", np.uint64),  # digest of the shapes
        ("names", np.uint64),  # digest of the parameters' names; 0 where they are not known
        ("trained", np.uint64),  # digest of which parameters are frozen, and which require a gradient
        ("present", np.uint64),  # digest of which gradients there are
        ("compared", np.uint64),  # how often these parameters have been compared
        ("parameters", np.uint64),  # digest of the bits of those whose turn it is
        ("device", np.uint64),  # digest of what computes
        ("scale", np.float64),
        ("text", "S400"),
    ]
)


@dataclass
class _Message:
    """Headers on their way: MPI writes into the arrays until the request is done."""

    request: Any
    kind: Kind
    mine: Array
    headers: Array
    waited: bool = False


class Meeting:
    """The meetings of one rank with the others, from the first to ``leave``.

    Args:
        comm: an mpi4py communicator that nobody else uses.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._ending = comm.Dup()  # on which nothing but the last call of a rank is waited for
        self._passes = 0
        self._open: list[object] = []  # what stands for passes whose header has not been exchanged, the innermost last
        self._parted: str = ""  # why the ranks cannot go on together
        self._unheard: _Message | None = None  # a header that the others have not answered yet
        self._hook = sys.excepthook
        self._our_hook = self._excepthook
        sys.excepthook = self._our_hook
        atexit.register(self._at_exit)

    def begin_pass(self) -> object:
        """A backward pass begins on this rank; it ends with a header. Passes may nest. Returns what stands for it.

        Raises:
            RankError: the ranks have parted.
        """
        self._require_together()
        self._passes += 1
        self._open.append(object())
        return self._open[-1]

    def is_open(self, begun: object) -> bool:
        """Returns whether this pass's header has not been exchanged yet."""
        return any(one is begun for one in self._open)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around a header and the messages that follow it, for which the others wait: Ctrl-C comes after the last one.
        A second one, which does not wait, ends the job: nothing else would reach them."""
        with uninterrupted():
            try:
                yield
            except Exception:  # an error, of which ``one_pass`` tells the others
                raise
            except BaseException:
                self._abort("was interrupted in the middle of a message that the others wait for; the job is ended")
                raise

    def _abort(self, why: str) -> None:
        sys.stderr.write(f"clamp: rank {self._comm.rank} {why}\n")
        sys.stderr.flush()
        self._comm.Abort(1)

    def exchange(self, kind: Kind, patience: float | None = None, text: str = "", **fields: Any) -> Array:
        """Exchanges headers; returns everybody's.

        Args:
            patience: seconds to wait for the others; without end if None.

        Raises:
            RankError: the others do something else, or did not come in time.
        """
        self._require_together()
        if self._unheard is not None:  # an earlier pass's error: the others are on their way to it
            with suppress(RankError):
                self._hear(patience)
            self._require_together()
        mine = np.zeros(1, _HEADER)
        mine["kind"], mine["passes"] = kind, self._passes
        mine["text"] = text.encode("utf-8", "replace")[: _HEADER["text"].itemsize]
        for name, value in fields.items():
            mine[name] = value
        headers = np.zeros(self._comm.size, _HEADER)
        if kind in (Kind.PASS, Kind.FAILED) and self._open:
            self._open.pop()
        request = self._comm.Iallgather(mine.view(np.uint8), headers.view(np.uint8))
        self._unheard = _Message(request, kind, mine, headers)
        return self._hear(patience)

    def _hear(self, patience: float | None) -> Array:
        """Waits for the others' headers, and looks at them. Those of a failed pass may come later."""
        message = self._unheard
        assert message is not None
        if patience is None:
            message.request.Wait()
        elif not _done(message.request, patience):
            why = f"the other ranks did not hear for {patience:g} s that this rank {_DOES[message.kind]}"
            if message.kind is not Kind.FAILED or message.waited:
                self._parted = why
            message.waited = True
            raise RankError(why)
        self._unheard = None
        self._check(message.kind, message.headers)
        return message.headers

    def failed(self, error: BaseException, begun: object) -> None:
        """Tells the others that a pass ends in an error here, if its header is not behind it; they raise a RankError.

        Where they are still busy with that pass they will hear of it when they end it, and this rank goes on.
        """
        if not self._parted and self.is_open(begun):
            with suppress(RankError):  # all that matters here is that they have heard, or will hear
                self.exchange(Kind.FAILED, text=_name(error), patience=_PATIENCE)

    def _check(self, kind: Kind, headers: Array) -> None:
        failed = [rank for rank in range(self._comm.size) if headers["kind"][rank] == Kind.FAILED]
        if failed and (headers["passes"] == headers["passes"][0]).all() and not (headers["kind"] == Kind.LEFT).any():
            # Everybody ends the same pass with an error; whoever catches it may go on.
            raise RankError("; ".join(f"rank {rank} failed: {_text(headers, rank)}" for rank in failed))
        if failed or (headers["kind"] != kind).any() or (headers["passes"] != headers["passes"][0]).any():
            self._parted = "; ".join(
                f"rank {rank} {_DOES[Kind(int(header['kind']))]} after {int(header['passes'])} passes"
                f"{_text(headers, rank) and f' because of {_text(headers, rank)}'}"
                for rank, header in enumerate(headers)
            )
            raise RankError(f"the ranks do different things: {self._parted}. All must do the same number of passes.")
        if kind is Kind.PASS or kind is Kind.BROADCAST:
            _check_alike("layout", headers, "the tensors' number or shapes differ: build the same model on every rank")
        if kind is Kind.PASS:
            if headers["names"].all():
                _check_alike("names", headers, "parameters stand in another order: build the optimizers alike")
            _check_alike("scale", headers, "the loss scales differ: load the same amp.state_dict() on every rank")

    def _require_together(self) -> None:
        if self._parted:
            raise RankError(f"the ranks no longer do the same passes: {self._parted}")

    # ------------------------------------------------------------------------------------------ end

    def leave(self) -> None:
        """This rank has ended its training; waits for the others to say the same.

        While an exception is on its way it waits for a few seconds only: the exception is what must get out.

        Raises:
            RankError: another rank is still training, and no exception is on its way.
        """
        if self._parted:
            return
        error = sys.exc_info()[1]
        try:
            self.exchange(
                Kind.LEFT, patience=None if error is None else _PATIENCE, text="" if error is None else _name(error)
            )
        except RankError:
            if error is None:
                raise
            return
        self._parted = "the training has ended on all of them"
        if error is None:
            atexit.unregister(self._at_exit)
            if sys.excepthook is self._our_hook:
                sys.excepthook = self._hook

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        """An exception ends this process: without an end to the whole job the others would wait for it for ever."""
        self._hook(kind, error, trace)
        if self._comm.size > 1:
            sys.stdout.flush()
            sys.stderr.write(f"clamp: rank {self._comm.rank} ends with an error, and the job with it\n")
            sys.stderr.flush()
            try:  # whoever calls Abort first silences the others, one of which may be about to say why
                _done(self._ending.Ibarrier(), _LAST_WORDS)
            finally:  # after Ctrl-C as well
                self._comm.Abort(1)

    def _at_exit(self) -> None:
        try:
            self.leave()
        except RankError as error:
            sys.stderr.write(f"clamp: rank {self._comm.rank}: {error}\n")
        if self._unheard is not None and not _done(self._unheard.request, _LAST_PATIENCE):
            self._abort(f"goes: {self._parted}; the job is ended")


def _done(request: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _check_alike(field: str, headers: Array, advice: str) -> None:
    values = headers[field]
    if (values != values[0]).any():
        differs = int(np.flatnonzero(values != values[0])[0])
        shown = f" ({values[0]:g} and {values[differs]:g})" if field == "scale" else ""
        raise RankError(f"rank 0 and rank {differs}{shown}: {advice}")


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _text(headers: Array, rank: int) -> str:
    return bytes(headers["text"][rank]).decode("utf-8", "replace")
