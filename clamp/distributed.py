"""Training on several processes and machines: the gradients of all ranks of an MPI communicator are averaged.

Every backward pass ends in three messages, whatever the number of parameters. With ranks 0, 1, 2:

    header                 [0] [1] [2]  ->  [0 1 2] everywhere    is everybody well, and at the same point?
    scaled gradients       0: a0 b0 c0      0: a0 a1 a2           each rank gets its share of every gradient,
    (all to all)           1: a1 b1 c1  ->  1: b0 b1 b2           adds in float32, in the order of the ranks,
                           2: a2 b2 c2      2: c0 c1 c2           and divides by the number of ranks
    averages (all gather)  0: A, 1: B, 2: C  ->  A B C everywhere

An average is computed in one place and then copied, so that all ranks have the same bits, whatever they are made of.
An inf or nan of one rank is in everybody's average: found-inf needs no message of its own, all ranks skip the same
steps, and their loss scales move alike. MPI has no 16-bit floats; here they are just words that travel, added in
float32, so that a sum over ranks neither overflows nor loses bits in half.

MPI libraries take host memory (few are built to take OpenCL's), so that gradients pass through the host here, and
only here: collected on the device into one buffer, read once, written once.

A rank that fails must not leave the others waiting. Whatever a rank does next with the others begins with a header,
an exception included, so that they always find each other, and learn what happened. This module imports no MPI: the
communicator, mpi4py's, brings it along.
"""

from __future__ import annotations

import atexit
import hashlib
import sys
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from clamp import bridge
from clamp.bridge import Tensor
from clamp.cache import weights
from clamp.ops.concat import Part, assemble, split
from clamp.ops.words import from_words, to_words
from clamp.recording import recorder
from clamp.scaler import LossScale, NoLossScale

Array: TypeAlias = npt.NDArray[Any]

REDUCE_DTYPES = ("float32", "float16", "bfloat16")
_PATIENCE = 10.0  # seconds in which a rank with an error must be heard by the others
_LAST_PATIENCE = 30.0  # seconds more when the process ends


class RankError(RuntimeError):
    """The ranks cannot go on together: one has failed or left, or they disagree."""


@runtime_checkable
class Communicator(Protocol):
    """What is used of an mpi4py communicator."""

    rank: int
    size: int

    def Dup(self) -> Any: ...
    def Abort(self, errorcode: int = 0) -> Any: ...
    def Bcast(self, buf: Any, root: int = 0) -> None: ...
    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None: ...
    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None: ...
    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Any: ...


class _Kind(IntEnum):
    """What a rank is about to do with the others."""

    PASS = 1
    FAILED = 2
    BROADCAST = 3
    LEFT = 4


_DOES = {
    _Kind.PASS: "ends a backward pass",
    _Kind.FAILED: "has failed",
    _Kind.BROADCAST: "broadcasts parameters",
    _Kind.LEFT: "has ended its training (shutdown, or the end of the script)",
}

_HEADER = np.dtype(
    [
        ("kind", np.uint8),
        ("passes", np.uint64),  # begun so far
        ("layout", np.uint64),  # digest of the shapes
        ("present", np.uint64),  # digest of which gradients there are
        ("parameters", np.uint64),  # digest of the parameters' bits, at an optimizer's first pass; else 0
        ("scale", np.float64),
        ("text", "S400"),
    ]
)


class Ranks:
    """The ranks that train one model together, from ``handle.distribute`` until ``handle.shutdown``.

    Args:
        comm: mpi4py's communicator; a duplicate of it is used.
        reduce_dtype: in which dtype gradients travel; float32 if None.

    Raises:
        TypeError: comm is no communicator of mpi4py's.
        ValueError: unknown ``reduce_dtype``.
    """

    def __init__(self, comm: Any, reduce_dtype: str | None = None) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(
                f"distribute takes a communicator of mpi4py's, got {type(comm).__name__}: "
                '`from mpi4py import MPI`, then MPI.COMM_WORLD (pip install "clamp-amp[mpi]")'
            )
        if reduce_dtype is not None and reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(f"unknown reduce_dtype {reduce_dtype!r}: pass one of {', '.join(REDUCE_DTYPES)}")
        self.reduce_dtype = reduce_dtype or "float32"
        self._comm = comm.Dup()
        self._passes = 0
        self._met = True  # whether this pass's header has been exchanged
        self._parted: str = ""  # why the ranks cannot go on together
        self._unheard: Any = None  # an exchange that the others have not joined
        self._checked: set[int] = set()  # parameters known to be equal
        self._hook = sys.excepthook
        self._our_hook = self._excepthook
        sys.excepthook = self._our_hook
        atexit.register(self._at_exit)

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return int(self._comm.rank)

    @property
    def size(self) -> int:
        """How many processes train together."""
        return int(self._comm.size)

    # ------------------------------------------------------------------------------------------ parameters

    def broadcast(self, *roots: Any) -> None:
        """Copies rank 0's values, bit for bit, to all ranks. Call it on every rank, before training.

        Args:
            roots: models (parameters and buffers), optimizers (what their ``step()`` updates), tensors, or lists.

        Raises:
            TypeError: one of these is none of that.
            RankError: the ranks passed tensors of different shapes or dtypes.
        """
        tensors = list({id(tensor): tensor for root in roots for tensor in _tensors_of(root)}.values())
        sizes = [bridge.nbytes(tensor) for tensor in tensors]
        message = np.empty(sum(sizes), np.uint8)
        places = np.cumsum([0, *sizes])
        if self.rank == 0:
            for tensor, begin, end in zip(tensors, places, places[1:], strict=False):
                message[begin:end] = bridge.read_bytes(tensor)
        self._meet(_Kind.BROADCAST, layout=_digest(_shapes(tensors)))
        self._comm.Bcast(message, root=0)
        if self.rank != 0:
            for tensor, begin, end in zip(tensors, places, places[1:], strict=False):
                bridge.write_bytes(tensor, message[begin:end])
            weights.clear()

    # ------------------------------------------------------------------------------------------ one pass

    def begin_pass(self) -> None:
        """A backward pass begins on this rank.

        Raises:
            RankError: the ranks have parted.
            RuntimeError: launches are being recorded, and a replay would meet nobody.
        """
        if recorder() is not None:
            raise RuntimeError("a recorded step cannot average gradients over ranks: run it eagerly")
        self._require_together()
        self._passes += 1
        self._met = False

    def average(
        self, params: Sequence[Tensor], gradients: Sequence[Tensor | None], scaler: LossScale
    ) -> list[Tensor | None]:
        """The mean over all ranks of each gradient, which is still multiplied by the loss scale.

        A gradient that only some ranks have counts as zeros on the others; one that nobody has is None.

        Args:
            params: the parameters, one a gradient, the same on all ranks.
            gradients: float32, float16 or bfloat16.
            scaler: its scale must be the same on all ranks.

        Returns:
            New float32 tensors, the same bits on all ranks.

        Raises:
            RankError: another rank has failed or left, or parameters, shapes or loss scales differ.
            ValueError: float16 cannot be reduced in, because no loss scaling would notice an overflow.
        """
        if self.reduce_dtype == "float16" and isinstance(scaler, NoLossScale):
            raise ValueError(
                "gradients cannot be reduced in float16 without loss scaling, which would notice that one overflows: "
                'pass reduce_dtype="bfloat16" to distribute, or loss_scale="dynamic" to amp.init'
            )
        present: Array = np.array([gradient is not None for gradient in gradients], np.bool_)
        # All that can go wrong on one rank alone comes before the header.
        mine = self._collect(params, gradients)
        theirs, averages = np.empty_like(mine), np.empty_like(mine)
        headers = self._meet(
            _Kind.PASS,
            layout=_digest(_shapes(params)),
            present=_digest(present.tobytes()),
            parameters=self._parameters_to_check(params),
            scale=scaler.scale,
        )
        self._checked.update(id(param) for param in params)
        if (headers["present"] != headers["present"][0]).any():
            everyones = np.empty((self.size, len(present)), np.bool_)
            self._comm.Allgather(present, everyones)
            present = np.any(everyones, axis=0)
        self._comm.Alltoall(mine, theirs)
        self._comm.Allgather(_mean(theirs.reshape(self.size, -1), self.reduce_dtype), averages)
        return self._hand_out(params, averages, present)

    def failed(self, error: BaseException) -> None:
        """Tells the others that this pass ends in an error here; they raise a RankError."""
        if self._met or self._parted:
            return
        with suppress(RankError):  # all that matters here is that they have heard
            self._meet(_Kind.FAILED, text=_name(error), patience=_PATIENCE)

    def _collect(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Array:
        """All gradients in one host array, as many elements for every rank."""
        parts, total = [], 0
        for param, gradient in zip(params, gradients, strict=True):
            flat = None if gradient is None else bridge.view(gradient, (param.size,))
            parts.append(Part(total, param.size, flat))
            total += param.size
        padded = -(-total // self.size) * self.size
        if padded == 0:
            return np.empty(0, to_words(np.empty(0, np.float32), self.reduce_dtype).dtype)
        together = assemble(params[0].queue, (padded,), 0, parts, self.reduce_dtype)
        words = np.uint16 if self.reduce_dtype in bridge.HALF_DTYPES else np.uint32
        return bridge.read_bytes(together).view(words)

    def _hand_out(self, params: Sequence[Tensor], averages: Array, present: Array) -> list[Tensor | None]:
        if not present.any():
            return [None] * len(params)
        together = bridge.empty(params[0].queue, averages.shape, self.reduce_dtype)
        bridge.write_bytes(together, averages.view(np.uint8))
        begins = np.cumsum([0, *(param.size for param in params)])
        chosen = [index for index in range(len(params)) if present[index]]
        gradients: list[Tensor | None] = [None] * len(params)
        targets = {index: bridge.empty(params[index].queue, params[index].shape, "float32") for index in chosen}
        split(
            together,
            0,
            [(int(begins[index]), params[index].size) for index in chosen],
            out_dtypes=["float32"] * len(chosen),
            outs=[bridge.view(target, (target.size,)) for target in targets.values()],
        )
        for index, target in targets.items():
            gradients[index] = target
        return gradients

    def _parameters_to_check(self, params: Sequence[Tensor]) -> int:
        if all(id(param) in self._checked for param in params):
            return 0
        digest = hashlib.blake2b(digest_size=8)
        for param in params:
            digest.update(bridge.read_bytes(param).tobytes())
        return int.from_bytes(digest.digest(), "little") | 1

    # ------------------------------------------------------------------------------------------ meeting

    def _meet(self, kind: _Kind, patience: float | None = None, text: str = "", **fields: Any) -> Array:
        """Exchanges headers; returns everybody's.

        Args:
            patience: seconds to wait for the others; without end if None.

        Raises:
            RankError: the others do something else, or did not come in time.
        """
        self._require_together()
        mine = np.zeros(1, _HEADER)
        mine["kind"], mine["passes"] = kind, self._passes
        mine["text"] = text.encode("utf-8", "replace")[: _HEADER["text"].itemsize]
        for name, value in fields.items():
            mine[name] = value
        headers = np.zeros(self.size, _HEADER)
        request = self._comm.Iallgather(mine.view(np.uint8), headers.view(np.uint8))
        if patience is None:
            request.Wait()
        elif not _done(request, patience):
            self._unheard = request, mine, headers
            self._parted = f"the other ranks did not hear for {patience:g} s that this rank {_DOES[kind]}"
            raise RankError(self._parted)
        self._met = True
        self._check(kind, headers)
        return headers

    def _check(self, kind: _Kind, headers: Array) -> None:
        failed = [rank for rank in range(self.size) if headers["kind"][rank] == _Kind.FAILED]
        if failed and (headers["passes"] == headers["passes"][0]).all() and not (headers["kind"] == _Kind.LEFT).any():
            # Everybody ends the same pass with an error; whoever catches it may go on.
            raise RankError("; ".join(f"rank {rank} failed: {_text(headers, rank)}" for rank in failed))
        if failed or (headers["kind"] != kind).any() or (headers["passes"] != headers["passes"][0]).any():
            self._parted = "; ".join(
                f"rank {rank} {_DOES[_Kind(int(header['kind']))]} after {int(header['passes'])} passes"
                f"{_text(headers, rank) and f' because of {_text(headers, rank)}'}"
                for rank, header in enumerate(headers)
            )
            raise RankError(f"the ranks do different things: {self._parted}. All must do the same number of passes.")
        if kind is _Kind.PASS or kind is _Kind.BROADCAST:
            _check_alike("layout", headers, "the tensors' number or shapes differ: build the same model on every rank")
        if kind is _Kind.PASS:
            _check_alike(
                "parameters",
                headers,
                "the parameters differ: call ranks.broadcast(model) after `ranks = handle.distribute(comm)` and before "
                "the first pass, or give every rank the same seed",
            )
            _check_alike("scale", headers, "the loss scales differ: load the same amp.state_dict() on every rank")

    def _require_together(self) -> None:
        if self._parted:
            raise RankError(f"the ranks have parted: {self._parted}")

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
            self._meet(
                _Kind.LEFT, patience=None if error is None else _PATIENCE, text="" if error is None else _name(error)
            )
        except RankError:
            if error is None:
                raise
            return
        self._parted = "the training has ended on all of them"
        if error is None:
            self._take_hooks_off()

    def _take_hooks_off(self) -> None:
        atexit.unregister(self._at_exit)
        if sys.excepthook is self._our_hook:
            sys.excepthook = self._hook

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        """An exception ends this process: without an end to the whole job the others would wait for it for ever."""
        self._hook(kind, error, trace)
        if self.size > 1:
            sys.stdout.flush()
            sys.stderr.write(f"clamp: rank {self.rank} ends with an error, and the job with it\n")
            sys.stderr.flush()
            self._comm.Abort(1)

    def _at_exit(self) -> None:
        try:
            self.leave()
        except RankError as error:
            sys.stderr.write(f"clamp: rank {self.rank}: {error}\n")
        if self._unheard is not None and not _done(self._unheard[0], _LAST_PATIENCE):
            sys.stderr.write(f"clamp: rank {self.rank}: {self._parted}; the job is ended\n")
            sys.stderr.flush()
            self._comm.Abort(1)


def _done(request: Any, seconds: float) -> bool:
    """Whether an exchange completes in time."""
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


def _mean(shares: Array, dtype: str) -> Array:
    """The mean of the rows in float32, added in their order, as words of ``dtype``."""
    with np.errstate(over="ignore", invalid="ignore"):  # inf and nan are for the loss scale to find
        total = from_words(shares[0], dtype).copy()
        for share in shares[1:]:
            total += from_words(share, dtype)
        total /= np.float32(len(shares))
        return to_words(total, dtype)


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _shapes(tensors: Iterable[Tensor]) -> bytes:
    return repr([(tuple(tensor.shape), bridge.canonical_dtype(tensor.dtype)) for tensor in tensors]).encode()


def _tensors_of(root: Any) -> Iterator[Tensor]:
    """The tensors of a model, an optimizer, a list of these, or a tensor itself."""
    if isinstance(root, Tensor):
        yield root
    elif isinstance(root, list | tuple):
        for part in root:
            yield from _tensors_of(part)
    elif hasattr(root, "params") and hasattr(root, "step"):
        for param in bridge.optimizer_parameters(root):
            yield param
            yield bridge.model_parameter(param)
    elif bridge.is_module(root):
        for _, tensor in bridge.module_tensors(root):
            yield tensor
    else:
        raise TypeError(f"broadcast takes models, optimizers and tensors, got {type(root).__name__}")
