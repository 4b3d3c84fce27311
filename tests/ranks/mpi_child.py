"""What a rank does in the tests of tests/ranks/test_distributed.py, which start it with mpirun:
``-m tests.ranks.mpi_child``, which does all that must end well, or with names of what is to be done.

Every check is an assertion on every rank; a rank that fails one ends the job.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from mpi4py import MPI
from netcl.optim import SGD
from netcl.trainer import Trainer

from clamp import amp
from clamp.bridge import Tensor
from clamp.opencl.device import list_devices
from clamp.ranks import rendezvous
from tests.networks import batch, loss_of, mlp, scaled_backward, weights_of

warnings.simplefilter("ignore", cl.CompilerWarning)
COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
WIDTHS = (8, 16, 4)
ROWS = 8  # of the global batch
MODES: dict[str, Callable[[cl.CommandQueue], None]] = {}
ENDING: set[str] = set()  # modes in which the job ends with an error


def mode(run: Callable[[cl.CommandQueue], None]) -> Callable[[cl.CommandQueue], None]:
    MODES[run.__name__] = run
    return run


def ending(run: Callable[[cl.CommandQueue], None]) -> Callable[[cl.CommandQueue], None]:
    ENDING.add(run.__name__)
    return mode(run)


def open_queue() -> cl.CommandQueue:
    devices = [device for device in list_devices() if device.platform.name != "Oclgrind"]
    wanted = os.environ.get("CLAMP_MPI_PLATFORM", devices[0].platform.name)
    device = next(device for device in devices if device.platform.name == wanted)
    open_queue.context = cl.Context([device])  # type: ignore[attr-defined]
    return cl.CommandQueue(open_queue.context, device)  # type: ignore[attr-defined]


@contextmanager
def training(
    queue: cl.CommandQueue, seed: int = 0, reduce_dtype: str | None = None, momentum: float = 0.0, **options: Any
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """A handle, its ranks, a model and its optimizer; ``options`` of ``amp.init``."""
    with amp.init(**options) as handle:
        model = mlp(queue, *WIDTHS, seed=seed)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum)
        yield handle, handle.distribute(COMM, reduce_dtype=reduce_dtype), model, optimizer


def part(queue: cl.CommandQueue, seed: int, rank: int = RANK, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """A rank's rows of a global batch."""
    whole = batch(queue, ROWS, WIDTHS[0], WIDTHS[-1], seed=seed)
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    x, y = (Tensor.from_host(queue, np.ascontiguousarray(tensor.to_host()[rows])) for tensor in whole)
    return x, y


def mean_loss(model: Any, data: tuple[Tensor, Tensor]) -> Any:
    """netcl's mse_loss sums: divided by its rows, so that the mean over ranks is that over the global batch."""
    return loss_of(model, data) * (1.0 / data[0].shape[0])


def backward(handle: Any, optimizer: Any, model: Any, data: tuple[Tensor, Tensor]) -> None:
    scaled_backward(handle, mean_loss(model, data), optimizer)


def gradients(model: Any) -> list[np.ndarray]:
    return [param.grad.to_host().copy() for param in model.parameters()]


def same_everywhere(arrays: list[np.ndarray]) -> bool:
    digest = hashlib.blake2b(b"".join(array.tobytes() for array in arrays)).digest()
    return len(set(COMM.allgather(digest))) == 1


def single_process(queue: cl.CommandQueue, dtype: str, steps: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients of the first step and the weights after the last, of one process with the whole batches."""
    model = mlp(queue, *WIDTHS)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with amp.init(dtype=dtype) as handle:
        first = []
        for step in range(steps):
            optimizer.zero_grad()
            backward(handle, optimizer, model, part(queue, step, 0, 1))
            first = first or gradients(model)
            optimizer.step()
        return first, weights_of(model)


@mode
def equals_single_process(queue: cl.CommandQueue) -> None:
    """Gradients differ by the order of fp32 sums over the rows, and by the rounding of 16-bit messages."""
    for dtype, reduce_dtype, unit in (
        ("float16", None, 2.0**-24),
        ("float16", "float16", 2.0**-11),
        ("float16", "bfloat16", 2.0**-8),
        ("bfloat16", "bfloat16", 2.0**-8),
        ("float32", None, 2.0**-24),
    ):
        expected, expected_weights = single_process(queue, dtype, 4)
        with training(queue, RANK, reduce_dtype, 0.9, dtype=dtype) as (handle, ranks, model, optimizer):
            assert (ranks.rank, ranks.size) == (RANK, SIZE)
            ranks.broadcast(model)
            for step in range(4):
                optimizer.zero_grad()
                data = part(queue, step)
                backward(handle, optimizer, model, data)
                if step == 0:
                    for got, want in zip(gradients(model), expected, strict=True):
                        # A rank's gradient is at most the sum of its rows' magnitudes; 16 covers what that is here.
                        bound = 16 * ROWS * unit * np.abs(want).max()
                        assert np.abs(got - want).max() <= bound, (dtype, reduce_dtype, np.abs(got - want).max(), bound)
                    assert same_everywhere(gradients(model))
                optimizer.step()
                assert handle.last_step.stepped
            got_weights = weights_of(model)
            assert same_everywhere(got_weights)
            for got, want in zip(got_weights, expected_weights, strict=True):
                assert np.abs(got - want).max() <= 64 * ROWS * unit * np.abs(want).max()


@mode
def broadcasts_masters(queue: cl.CommandQueue) -> None:
    """Masters of 16-bit parameters, however they are kept."""
    for keep in (True, "remainder", "kahan", "stochastic"):
        for what in ("model", "optimizer"):
            with training(queue, RANK, None, 0.9, dtype="bfloat16", level="O2") as (handle, ranks, model, optimizer):
                amp.decorate(model, optimizer, level="O2", dtype="bfloat16", master_weight=keep)
                before = [master.to_host() for master in amp.master_params(optimizer)]
                ranks.broadcast(model if what == "model" else optimizer)
                after = [master.to_host() for master in amp.master_params(optimizer)]
                assert RANK or all(map(np.array_equal, before, after)), (keep, what)
                assert same_everywhere(after), (keep, what)
                backward(handle, optimizer, model, part(queue, 0))
                optimizer.step()
                assert same_everywhere(weights_of(model)), (keep, what)


@mode
def overflow_on_one_rank(queue: cl.CommandQueue) -> None:
    """Every rank skips the same step, no bit of parameters or momentum moves, and the scales stay equal."""
    for reduce_dtype in (None, "float16"):
        with training(queue, 0, reduce_dtype, 0.9) as (handle, _, model, optimizer):
            for step in range(4):
                optimizer.zero_grad()
                before = weights_of(model)
                x, y = part(queue, step)
                if step == 1 and RANK == SIZE - 1:
                    x = Tensor.from_host(queue, np.full(x.shape, np.inf if reduce_dtype is None else 6e4, np.float32))
                backward(handle, optimizer, model, (x, y))
                optimizer.step()
                assert handle.last_step.stepped == (step != 1)
                unchanged = all(np.array_equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
                assert unchanged == (step == 1)
                assert COMM.allgather(handle.loss_scale) == [2.0**16 if step == 0 else 2.0**15] * SIZE
            assert same_everywhere(weights_of(model))


@mode
def repeats_together(queue: cl.CommandQueue) -> None:
    """A loss that overflows on one rank is repeated on all, at one scale; no batch is lost."""
    for reduce_dtype in (None, "float16"):
        weights, start = [], 2.0**16
        for repeats in (True, False):
            rule = amp.ScaleRule(initial=start)
            with training(queue, 0, reduce_dtype, 0.9, loss_scale=rule) as (handle, _, model, optimizer):
                optimizer.lr = 1e-7
                for step in range(4):
                    optimizer.zero_grad()
                    x, y = part(queue, step)
                    loss = mean_loss(model, (x, y)) * (2.0**12 if step == 0 and RANK == SIZE - 1 else 1.0)
                    scaled_backward(handle, loss, optimizer)
                    optimizer.step()
                    assert handle.last_step.stepped, handle.last_step
                    assert bool(handle.last_step.repeats) == (step == 0 and repeats)
                start = handle.loss_scale
                assert COMM.allgather(start) == [start] * SIZE
                assert start < 2.0**14
            weights.append(weights_of(model))
            assert same_everywhere(weights[-1])
        for got, want in zip(*weights, strict=True):
            assert np.array_equal(got, want)


@mode
def accumulates_and_wraps(queue: cl.CommandQueue) -> None:
    """Two passes a step add up to the mean over both global batches; through wrap_optimizer, and with num_loss."""
    for wrap in (False, True):
        with training(queue) as (handle, _, model, optimizer):
            scaling = handle.wrap_optimizer(optimizer, num_loss=2) if wrap else None
            separate = []
            for seed in (0, 1):
                data = part(queue, seed)
                manager = scaling.scale_loss(mean_loss(model, data)) if wrap else None
                if manager is None:
                    backward(handle, optimizer, model, data)
                else:
                    with manager as scaled_loss:
                        scaled_loss.backward()
                separate.append(gradients(model))
            assert same_everywhere(separate[-1])
            optimizer.step()
            assert same_everywhere(weights_of(model))
        reference = mlp(queue, *WIDTHS)
        with amp.init() as handle:
            other = SGD(reference.parameters(), lr=0.1)
            for seed in (0, 1):
                backward(handle, other, reference, part(queue, seed, 0, 1))
            for got, want in zip(separate[-1], gradients(reference), strict=True):
                assert np.abs(got - want).max() <= 32 * ROWS * 2.0**-24 * np.abs(want).max()


@mode
def gradient_on_one_rank_only(queue: cl.CommandQueue) -> None:
    """A parameter that only rank 0's loss reaches counts as zeros elsewhere; one that nobody reaches stays None."""
    used, spare, unused = (mlp(queue, *WIDTHS, seed=seed) for seed in range(3))
    optimizer = SGD([p for model in (used, spare, unused) for p in model.parameters()], lr=0.1)
    with amp.init() as handle:
        handle.distribute(COMM)
        data = part(queue, 0)
        loss = mean_loss(used, data)
        if RANK == 0:
            loss = loss + mean_loss(spare, data)
        scaled_backward(handle, loss, optimizer)
        averaged = gradients(spare)
        assert same_everywhere(averaged)
        assert all(param.grad is None for param in unused.parameters())
        assert max(float(np.abs(grad).max()) for grad in averaged) > 0


@mode
def refuses_a_step_without_averages(queue: cl.CommandQueue) -> None:
    refused = pytest.raises(ValueError, match='reduce_dtype="bfloat16"')
    with training(queue, 0, "float16", dtype="bfloat16") as (handle, _, model, optimizer), refused:
        backward(handle, optimizer, model, part(queue, 0))
    with training(queue) as (_, _, model, optimizer):
        optimizer.step()  # there is nothing to average
        mean_loss(model, part(queue, 0)).backward()
        with pytest.raises(RuntimeError, match="this rank alone"):
            optimizer.step()
        before = weights_of(model)
        for steps in (by_a_scaler, by_netcls_trainer, by_a_graph):
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="this rank alone"):
                steps(queue, model, optimizer)
        assert all(map(np.array_equal, before, weights_of(model)))


def by_a_scaler(queue: cl.CommandQueue, model: Any, optimizer: Any) -> None:
    scaler = amp.GradScaler(init_scale=2.0**4)
    scaler.scale(mean_loss(model, part(queue, 0))).backward()
    scaler.step(optimizer)


def by_netcls_trainer(queue: cl.CommandQueue, model: Any, optimizer: Any) -> None:
    x, _ = part(queue, 0)
    Trainer(model, optimizer, queue, mixed_precision=True).fit([(x, np.zeros(x.shape[0], np.int64))])


def by_a_graph(queue: cl.CommandQueue, model: Any, optimizer: Any) -> None:
    class Step(amp.Graph):
        def build(self, x: Any, y: Any) -> Any:
            loss = mean_loss(model, (x.value, y.value))
            loss.backward()
            return loss

    graph = Step()
    graph.add_optimizer(optimizer)
    graph(*part(queue, 0))


# ---------------------------------------------------------------------------------------------- jobs that must end


def train_until(queue: cl.CommandQueue, event: Callable[[int, str], None], broadcast: bool = True) -> None:
    """Trains without an end in sight; ``event(step, place)`` is called outside and inside ``scale_loss``."""
    with training(queue, RANK) as (handle, ranks, model, optimizer):
        optimizer.lr = 0.01
        if broadcast:
            ranks.broadcast(model)
        for step in range(1000):
            event(step, "outside")
            optimizer.zero_grad()
            with handle.scale_loss(mean_loss(model, part(queue, 0)), optimizer) as scaled_loss:
                scaled_loss.backward()
                event(step, "inside")
            optimizer.step()


def at(place: str, act: Callable[[], None]) -> Callable[[int, str], None]:
    def event(step: int, where: str) -> None:
        if RANK == 1 and step == 2 and where == place:
            act()

    return event


def wait_briefly() -> None:
    """For others that never hear, or that end without a word: nothing comes of waiting for them."""
    rendezvous._PATIENCE, rendezvous._LAST_WORDS = 2.0, 0.5


def fail() -> None:
    raise ValueError("no such image")


@ending
def raises_inside(queue: cl.CommandQueue) -> None:
    train_until(queue, at("inside", fail))


@ending
def raises_outside(queue: cl.CommandQueue) -> None:
    train_until(queue, at("outside", fail))


@ending
def exits(queue: cl.CommandQueue) -> None:
    wait_briefly()
    train_until(queue, at("outside", lambda: sys.exit(3)))


@ending
def dies(queue: cl.CommandQueue) -> None:
    train_until(queue, at("outside", lambda: os.kill(os.getpid(), signal.SIGKILL)))


@ending
def waits_elsewhere(queue: cl.CommandQueue) -> None:
    """Rank 1 fails while the others wait for it in a message of their own."""
    wait_briefly()

    def event(step: int, where: str) -> None:
        if step == 2 and where == "outside":
            if RANK == 1:
                fail()
            COMM.barrier()

    train_until(queue, event)


@ending
def does_fewer_passes(queue: cl.CommandQueue) -> None:
    class Done(Exception):
        pass

    def done() -> None:
        raise Done

    wait_briefly()
    try:
        train_until(queue, at("outside", done))
    except Done:
        print("rank 1 has seen all of its data")


@ending
def differs_in_its_weights(queue: cl.CommandQueue) -> None:
    train_until(queue, lambda step, where: None, broadcast=False)


@ending
def differs_in_its_scale(queue: cl.CommandQueue) -> None:
    def event(step: int, where: str) -> None:
        if RANK == 1 and step == 2 and where == "outside":
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 0}})

    train_until(queue, event)


def main() -> None:
    """Runs the modes that the command names; without names those of its own file that end well."""
    for name in sys.argv[1:] or [x for x in MODES if MODES[x].__module__ == "__main__" and x not in ENDING]:
        MODES[name](open_queue())
    if RANK == 0:
        print("all well")


if __name__ == "__main__":
    main()
