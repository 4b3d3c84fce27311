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

Whatever a rank does next with the others begins with a header, an exception included, so that none waits for one that
has failed (clamp/ranks/rendezvous.py). Headers tell as well whether the ranks still train the same parameters
(clamp/ranks/parameters.py). This module imports no MPI: the communicator, mpi4py's, brings it along.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from clamp import bridge
from clamp.bridge import Tensor
from clamp.interrupts import contextmanager
from clamp.opencl.host_steps import refuse
from clamp.ops.concat import Part, assemble, split
from clamp.params.weight_cache import weight_cache
from clamp.ranks.parameters import RankParameters, digest, shapes_of
from clamp.ranks.rendezvous import Kind, Meeting, RankError

__all__ = ["RankError", "Ranks"]

Array: TypeAlias = npt.NDArray[Any]

REDUCE_DTYPES = ("float32", "float16", "bfloat16")


#: The part of an mpi4py communicator that is used.
_USED = ("rank", "size", "Dup", "Abort", "Bcast", "Alltoall", "Allgather", "Iallgather", "Ibarrier")


class Ranks:
    """The ranks that train one model together, from ``handle.distribute`` until ``handle.shutdown``.

    Args:
        comm: mpi4py's communicator; a duplicate of it is used.
        reduce_dtype: in which dtype gradients travel; float32 if None.

    Raises:
        TypeError: comm is no communicator of mpi4py's.
        ValueError: unknown ``reduce_dtype``.
    """

    def __init__(self, comm: Any, reduce_dtype: bridge.DTypeLike | None = None) -> None:
        if not all(hasattr(comm, name) for name in _USED):
            raise TypeError(
                f"distribute takes a communicator of mpi4py's, got {type(comm).__name__}: "
                "`from mpi4py import MPI`, then MPI.COMM_WORLD (pip install mpi4py)"
            )
        name = "float32" if reduce_dtype is None else bridge.dtype_name(reduce_dtype)
        if not isinstance(name, str) or name not in REDUCE_DTYPES:
            raise ValueError(f"unknown reduce_dtype {reduce_dtype!r}: pass one of {', '.join(REDUCE_DTYPES)}")
        self.reduce_dtype = name
        self._comm = comm.Dup()
        self._meeting = Meeting(self._comm)
        self._parameters = RankParameters(self._comm)
        self._warned = False

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return int(self._comm.rank)

    @property
    def size(self) -> int:
        """Returns how many processes train together."""
        return int(self._comm.size)

    # ------------------------------------------------------------------------------------------ parameters

    def broadcast(self, *roots: Any) -> None:
        """Copies rank 0's values, bit for bit, to all ranks. Call it on every rank, before training.

        Args:
            roots: models (parameters and buffers), optimizers (what their ``step()`` updates), tensors, or lists;
                fp32 masters go with their 16-bit parameters.

        Raises:
            TypeError: one of these is none of that.
            RankError: the ranks passed tensors of different shapes or dtypes.
        """
        tensors = list({id(tensor): tensor for root in roots for tensor in _tensors_of(root)}.values())
        ends = np.cumsum([bridge.nbytes(tensor) for tensor in tensors], dtype=np.int64)
        message = np.empty(ends[-1] if tensors else 0, np.uint8)
        parts = list(zip(tensors, np.split(message, ends), strict=False))  # behind the last end there is nothing
        if self.rank == 0:
            for tensor, part in parts:
                part[...] = bridge.read_bytes(tensor)
        with self._meeting.whole():
            self._meeting.exchange(Kind.BROADCAST, layout=digest(shapes_of(tensors)))
            self._parameters.name(roots)
            self._comm.Bcast(message, root=0)
        if self.rank != 0:
            for tensor, part in parts:
                bridge.write_bytes(tensor, part)
            weight_cache.clear()

    # ------------------------------------------------------------------------------------------ one pass

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A scaled backward pass on this rank, from the first check of its arguments to its last message.

        Whatever is raised inside is told to the others, who raise a RankError that names this rank; all of them may
        catch it and go on with the next pass. Passes may nest.

        Raises:
            RankError: the ranks have parted.
            RuntimeError: launches are being recorded, and a replay would meet nobody; or ``average`` was not called.
        """
        begun = self._meeting.begin_pass()
        try:
            refuse("An average of gradients over ranks began", "Run such a step eagerly: a replay would meet nobody.")
            yield
            if self._meeting.is_open(begun):
                raise RuntimeError(
                    "a pass ended on this rank without averaging its gradients, for which the other ranks wait"
                )
        except BaseException as error:
            self._meeting.failed(error, begun)
            raise

    @contextmanager
    def checks(self) -> Iterator[None]:
        """Around what is checked before ``one_pass``: an error there takes the place of the pass that the others do."""
        try:
            yield
        except BaseException as error:
            with suppress(RankError):  # they have parted: nobody waits
                self._meeting.failed(error, self._meeting.begin_pass())
            raise

    def average(
        self, params: Sequence[Tensor], gradients: Sequence[Tensor | None], scale: float | None
    ) -> list[Tensor | None]:
        """The mean over all ranks of each gradient, which is still multiplied by the loss scale.

        A gradient that only some ranks have counts as zeros on the others; one that nobody has is None. A rank that
        has none at all is warned of once.

        Args:
            params: the parameters, one a gradient, the same on all ranks.
            gradients: float32, float16 or bfloat16.
            scale: that loss scale, the same on all ranks; None where losses are not scaled.

        Returns:
            New float32 tensors, the same bits on all ranks.

        Raises:
            RankError: another rank has failed or left, or parameters, their shapes, which of them are frozen, or loss
                scales differ.
            RuntimeError: no rank has any gradient.
            ValueError: float16 cannot be reduced in, because no loss scaling would notice an overflow.
        """
        if self.reduce_dtype == "float16" and scale is None:
            raise ValueError(
                "gradients cannot be reduced in float16 without loss scaling, which would notice that one overflows: "
                'pass reduce_dtype="bfloat16" to distribute, or loss_scale="dynamic" to amp.init'
            )
        present: Array = np.array([gradient is not None for gradient in gradients], np.bool_)
        # All that can go wrong on one rank alone comes before the header.
        mine = self._collect(params, gradients)
        averages = np.empty_like(mine)
        with self._meeting.whole():
            present = self._exchange(params, mine, averages, present, 1.0 if scale is None else scale)
        return self._hand_out(params, averages, present)

    def _exchange(self, params: Sequence[Tensor], mine: Array, averages: Array, present: Array, scale: float) -> Array:
        """The messages of a pass, into ``averages``; returns which gradients any rank has."""
        headers = self._meeting.exchange(
            Kind.PASS, present=digest(present.tobytes()), scale=scale, **self._parameters.header(params)
        )
        self._parameters.require_alike(params, headers)
        if (headers["present"] != headers["present"][0]).any():
            everyones = np.empty((self.size, len(present)), np.bool_)
            self._comm.Allgather(present, everyones)
            self._warn_of_idle(everyones)
            present = np.any(everyones, axis=0)
        if not present.any():
            raise RuntimeError(
                "no backward has reached a parameter on any rank: inside `with handle.scale_loss(loss, optimizer) as "
                "scaled_loss` run scaled_loss.backward(), or tape.backward(scaled_loss). A loss whose tape is gone, "
                "that was computed under no_grad or only from frozen parameters, reaches none."
            )
        theirs = np.empty_like(mine)
        self._comm.Alltoall(mine, theirs)
        self._comm.Allgather(_mean(theirs.reshape(self.size, -1), self.reduce_dtype), averages)
        return present

    def _warn_of_idle(self, present: Array) -> None:
        """Says once, on all ranks, that one has no gradient at all. It may be meant: a rank may be out of rows."""
        idle = np.flatnonzero(~present.any(axis=1))
        if idle.size and not self._warned:
            self._warned = True
            warnings.warn(
                f"rank {', '.join(map(str, idle))} had no gradient in this pass: no backward reached a parameter. "
                f"It counts as zeros in the mean over {self.size} ranks. If it has no rows, weigh the other ranks' "
                "losses: rows * ranks.size / global_rows. This is said once.",
                UserWarning,
                stacklevel=2,
            )

    def leave(self) -> None:
        """This rank has ended its training; waits for the others to say the same.

        Raises:
            RankError: another rank is still training, and no exception is on its way.
        """
        self._meeting.leave()

    def _collect(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Array:
        """All gradients in one host array, as many elements for every rank."""
        *begins, total = accumulate((param.size for param in params), initial=0)
        parts = [
            Part(begin, param.size, None if gradient is None else bridge.view(gradient, (param.size,)))
            for begin, param, gradient in zip(begins, params, gradients, strict=True)
        ]
        padded = -(-total // self.size) * self.size
        if padded == 0:
            return np.empty(0, bridge.to_words(np.empty(0, np.float32), self.reduce_dtype).dtype)
        together = assemble(params[0].queue, (padded,), 0, parts, self.reduce_dtype)
        words = np.uint16 if self.reduce_dtype in bridge.HALF_DTYPES else np.uint32
        return bridge.read_bytes(together).view(words)

    def _hand_out(self, params: Sequence[Tensor], averages: Array, present: Array) -> list[Tensor | None]:
        together = bridge.empty(params[0].queue, averages.shape, self.reduce_dtype)
        bridge.write_bytes(together, averages.view(np.uint8))
        begins = accumulate((param.size for param in params), initial=0)
        gradients = [
            bridge.empty(param.queue, param.shape, "float32") if is_there else None
            for param, is_there in zip(params, present, strict=True)
        ]
        chosen = [(begin, target) for begin, target in zip(begins, gradients, strict=False) if target is not None]
        places = [(begin, target.size) for begin, target in chosen]
        outs = [bridge.view(target, (target.size,)) for _, target in chosen]
        split(together, 0, places, out_dtypes=["float32"] * len(chosen), outs=outs)
        return gradients


def _mean(shares: Array, dtype: str) -> Array:
    """The mean of the rows in float32, added in their order, as words of ``dtype``."""
    with np.errstate(over="ignore", invalid="ignore"):  # inf and nan are for the loss scale to find
        total = bridge.from_words(shares[0], dtype).copy()
        for share in shares[1:]:
            total += bridge.from_words(share, dtype)
        total /= np.float32(len(shares))
        return bridge.to_words(total, dtype)


def _tensors_of(root: Any) -> Iterator[Tensor]:
    """The tensors of a model, an optimizer, a list of these, or a tensor itself, and the masters of 16-bit ones."""
    if isinstance(root, Tensor):
        model = bridge.model_parameter(root)
        yield model
        master = root if root is not model else bridge.master_of(model)
        if master is not None:  # after its parameter: what is written to last is what the other is made from
            yield master
    elif isinstance(root, list | tuple):
        for part in root:
            yield from _tensors_of(part)
    elif hasattr(root, "params") and hasattr(root, "step"):
        yield from _tensors_of(bridge.optimizer_parameters(root))
    elif isinstance(root, bridge.Module):
        for _, tensor in bridge.module_tensors(root):
            yield from _tensors_of(tensor)
    else:
        raise TypeError(f"broadcast takes models, optimizers and tensors, got {type(root).__name__}")
