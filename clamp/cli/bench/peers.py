"""Peers, numpy and torch, each kept in a child process and timed there on request (`clamp.cli.bench.peer_child`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from clamp.cli.bench.timing import Turn, settle
from clamp.opencl.processor import host_cpu_flags

KINDS = ("numpy", "torch")
_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}


class PeerError(RuntimeError):
    """A peer failed, or its process ended."""


@dataclass(frozen=True)
class PeerInfo:
    """What a peer says of itself.

    Attributes:
        label: its name in tables.
        version: its version, and settings that matter.
        works: dtypes by kind of work.
    """

    label: str
    version: str
    works: dict[str, list[str]]


class PeerProcess:
    """One peer's process, from ``with`` to the end of it.

    Args:
        kind: ``"numpy"`` or ``"torch"``.
        threads: threads that it may compute with.
        gpu: whether it is to compute on the GPU, if it can.
    """

    def __init__(self, kind: str, threads: int, gpu: bool) -> None:
        self._settings = blas_settings(threads)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "clamp.cli.bench.peer_child", kind, str(threads), "gpu" if gpu else "cpu"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._settings},
        )
        try:
            hello = json.loads(self._answer())
        except ValueError as error:
            self._stop()
            raise PeerError(f"it did not introduce itself: {error}") from error
        except BaseException:
            self._stop()
            raise
        # numpy's OpenBLAS is the only one that reads it.
        core = self._settings.get("OPENBLAS_CORETYPE") if kind == "numpy" else None
        version = hello["version"] + (f", OPENBLAS_CORETYPE={core}" if core else "")
        self.info = PeerInfo(hello["label"], version, hello["works"])

    def turn(self, *work: str) -> Turn:
        """A turn that has the peer time this work, ``("gemm", "float32", "NN", "1024")``.

        Raises (in the turn):
            PeerError: the peer cannot do it, or is gone.
        """

        def turn(calls: int) -> list[float]:
            settle()  # the device's threads are to leave the cores to the peer
            try:
                self._pipe_in.write(f"run {' '.join(work)} {calls}\n")
                self._pipe_in.flush()
            except OSError as error:
                raise PeerError(f"the process has ended: {error}") from error
            status, _, rest = self._answer().partition(" ")
            if status != "ok":
                raise PeerError(rest)
            return [float(value) for value in rest.split()]

        return turn

    @property
    def _pipe_in(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the process has ended with status {self._process.wait()}")
        return line.strip()

    def _stop(self) -> None:
        self._process.__exit__(None, None, None)  # closes the pipes: the child's loop ends

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()


@contextmanager
def installed_peers(threads: int, gpu: bool) -> Iterator[tuple[list[PeerProcess], dict[str, str]]]:
    """The processes of those peers that are installed, and by kind the reasons why others did not start."""
    peers: list[PeerProcess] = []
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        for kind in KINDS:
            if importlib.util.find_spec(kind) is None:
                continue
            try:
                peers.append(stack.enter_context(PeerProcess(kind, threads, gpu)))
            except PeerError as error:  # an installation that is broken, for instance
                failures[kind] = str(error)
        yield peers, failures


def blas_settings(threads: int) -> dict[str, str]:
    """Environment in which a BLAS library uses as many threads as the device, and the best kernels for this CPU.

    OpenBLAS does not know every CPU with AVX-512 and then falls back to kernels of half the speed; comparing with
    those would flatter clamp. A setting in the environment is therefore overridden.
    """
    settings = {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if host_cpu_flags() >= _AVX512:
        settings["OPENBLAS_CORETYPE"] = "SKYLAKEX"
    return settings
