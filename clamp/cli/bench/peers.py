"""Peers, numpy and torch, each kept in a child process and timed there on request.

They get their own process because BLAS libraries read their settings when they load, and because their idle threads
must not spin in the process that times OpenCL. It is asked over a pipe, on which it sleeps in between: it sends its
label, version and works first, and then the seconds of each call that it is asked for, or why there are none.
"""

from __future__ import annotations

import importlib
import pickle
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import lru_cache, partial
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from clamp.cli.bench.networks import Layer, Network
from clamp.cli.bench.timing import Contender, Turn, settle, timed
from clamp.interrupts import contextmanager
from clamp.opencl import cache_writer
from clamp.opencl.processor import host_cpu_flags

Call = Callable[[], object]

KINDS = ("numpy", "torch")
_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}


class PeerError(RuntimeError):
    """A peer failed, or its process ended."""


class PeerProcess:
    """One peer's process, from ``with`` to the end of it.

    Args:
        kind: ``"numpy"`` or ``"torch"``.
        gpu: whether it is to compute on the GPU, if it can.
    """

    label: str  # its name in tables
    version: str  # its version, and settings that matter
    works: dict[str, list[str]]  # dtypes by kind of work

    def __init__(self, kind: str, threads: int, gpu: bool) -> None:
        settings = blas_settings(threads)
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                cache_writer.command(__name__, "serve", [kind, threads, gpu, theirs.fileno()]),
                env={**cache_writer.environment(), **settings},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        try:
            self.label, version, self.works = self._answer()
        except BaseException:
            self.__exit__()
            raise
        # numpy's OpenBLAS is the only one that reads it.
        core = settings.get("OPENBLAS_CORETYPE") if kind == "numpy" else None
        self.version = version + (f", OPENBLAS_CORETYPE={core}" if core else "")

    def turn(self, *work: Any) -> Turn:
        """A turn that has the peer time this work, ``("gemm", "float32", "NN", 1024)``.

        Raises (in the turn):
            PeerError: the peer cannot do it, or is gone.
        """
        described = pickle.dumps(work)

        def turn(calls: int) -> list[float]:
            settle()  # the device's threads are to leave the cores to the peer
            try:
                self._pipe.send((described, calls))
            except OSError as error:
                raise PeerError(f"the process has ended: {error}") from error
            answer = self._answer()
            if isinstance(answer, str):
                raise PeerError(answer)
            return answer

        return turn

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise PeerError(f"the process has ended with status {self._process.wait()}") from None

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()  # the child's loop ends
        self._process.wait()


@contextmanager
def installed_peers(threads: int, gpu: bool) -> Iterator[tuple[list[PeerProcess], dict[str, str]]]:
    """The processes of those peers that are installed, and by kind the reasons why others did not start."""
    peers: list[PeerProcess] = []
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        for kind in KINDS:
            if find_spec(kind) is None:
                continue
            try:
                peers.append(stack.enter_context(PeerProcess(kind, threads, gpu)))
            except PeerError as error:  # an installation that is broken, for instance
                failures[kind] = str(error)
        yield peers, failures


def peer_contenders(peers: Sequence[PeerProcess], work: str, *args: Any, amount: float = 0.0) -> list[Contender]:
    """Every peer in every dtype that it does this work in."""
    return [
        Contender(f"{peer.label} {dtype}", peer.turn(work, dtype, *args), amount, is_baseline=True)
        for peer in peers
        for dtype in peer.works.get(work, [])
    ]


def blas_settings(threads: int) -> dict[str, str]:
    """Environment in which a BLAS library uses as many threads as the device, and the best kernels for this CPU.

    OpenBLAS does not know every CPU with AVX-512 and then falls back to kernels of half the speed; comparing with
    those would flatter clamp. A setting in the environment is therefore overridden.
    """
    settings = {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if host_cpu_flags() >= _AVX512:
        settings["OPENBLAS_CORETYPE"] = "SKYLAKEX"
    return settings


# ---------------------------------------------------------------------------------------------- in the child


class NumpyPeer:
    """numpy's matrix product: whichever BLAS numpy was built with. Label, version and works are as of its process."""

    def __init__(self) -> None:
        config: Any = np.show_config(mode="dicts")
        blas = config["Build Dependencies"]["blas"]
        self.label = "OpenBLAS" if "openblas" in blas["name"] else blas["name"]
        self.version = f"{blas['name']} {blas['version']}, numpy {np.__version__}"
        self.works = {"gemm": ["float32"]}

    def prepare(self, work: str, dtype: str, layout: str, n: int) -> Call:
        """A call that does the work once."""
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
        left, right = _laid(a, layout[0]), _laid(b, layout[1])
        out = np.empty((n, n), np.float32)
        return lambda: np.matmul(left, right, out=out)

    def finish(self) -> None:
        """Waits until the work is done."""


def _laid(matrix: Any, flag: str) -> Any:
    """Returns a matrix as a letter of a layout says."""
    return matrix.T if flag == "T" else matrix


class TorchPeer:
    """torch's products and training steps, on the CPU or, where there is a GPU for it, with CUDA. As numpy's."""

    def __init__(self, threads: int, gpu: bool) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        self._device = "cuda" if gpu and self._torch.cuda.is_available() else "cpu"
        self.label = "torch"
        self.version = f"{self._torch.__version__} ({self._device})"
        # float16 on a CPU has no fast kernels in torch and would take most of the run's time.
        dtypes = ["float32", "bfloat16", *(["float16"] if self._device == "cuda" else [])]
        self.works = dict.fromkeys(("gemm", "conv", "attention", "step", "guide", "cnn", "decoder", "resnet"), dtypes)
        self.works |= {"readme": ["float32"], "digits": ["float32"]}

    def prepare(self, work: str, dtype: str, *args: Any) -> Call:
        kernels: dict[str, Callable[..., Call]]
        kernels = {"gemm": self._gemm, "conv": self._conv, "attention": self._attention}
        make: Callable[..., Call] = kernels.get(work, self._train)  # a network's step, whatever its work is called
        return make(getattr(self._torch, dtype), *args)

    def finish(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def _gemm(self, dtype: Any, layout: str, n: int) -> Call:
        torch = self._torch
        a, b = (torch.randn(n, n, device=self._device).to(dtype) for _ in range(2))
        left, right = _laid(a, layout[0]), _laid(b, layout[1])
        out = torch.empty(n, n, dtype=dtype, device=self._device)
        return lambda: torch.matmul(left, right, out=out)

    def _conv(self, dtype: Any, direction: str, numbers: tuple[int, ...]) -> Call:
        n, c, h, w, features, kernel, stride, pad = numbers
        torch = self._torch
        x = self._laid_out(torch.randn(n, c, h, w, device=self._device).to(dtype))
        weight = self._laid_out(torch.randn(features, c, kernel, kernel, device=self._device).to(dtype))
        out = torch.nn.functional.conv2d(x, weight, stride=stride, padding=pad)
        window = ([0], [stride] * 2, [pad] * 2, [1] * 2, False, [0] * 2, 1)

        def backward(wants_x: bool, wants_weight: bool) -> object:
            mask = [wants_x, wants_weight, False]
            return torch.ops.aten.convolution_backward(out, x, weight, *window, mask)

        def forward() -> object:
            return torch.nn.functional.conv2d(x, weight, stride=stride, padding=pad)

        calls: dict[str, Call] = {
            "forward": forward,
            "input-gradient": lambda: backward(True, False),
            "weight-gradient": lambda: backward(False, True),
            "forward+backward": lambda: (forward(), backward(True, True)),
        }
        return calls[direction]

    def _laid_out(self, x: Any) -> Any:
        """Images, weights or a model as torch's convolutions are fastest with: channels of a position together."""
        return x.to(memory_format=self._torch.channels_last)

    def _attention(self, dtype: Any, direction: str, shape: tuple[int, ...]) -> Call:
        torch = self._torch
        q, k, v = (torch.randn(shape, device=self._device).to(dtype).requires_grad_() for _ in range(3))
        gradient = torch.randn(shape, device=self._device).to(dtype)

        def forward() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return forward if direction == "forward" else lambda: torch.autograd.grad(forward(), (q, k, v), gradient)

    def _train(self, dtype: Any, network: Network) -> Call:
        """A training step of a network."""
        torch, device = self._torch, self._device
        model = self._laid_out(sequential(torch.nn, network.layers).to(device))
        x = torch.randn(network.batch, *network.shape, device=device)
        x = self._laid_out(x) if x.dim() == 4 else x
        loss_of = getattr(torch.nn.functional, network.loss)
        if network.loss == "cross_entropy":
            y = torch.randint(0, network.outputs[-1], (len(x),), device=device)
        else:
            y = torch.randn_like(model(x))
        optimizer = getattr(torch.optim, network.optimizer)(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

        def step() -> float:
            optimizer.zero_grad(set_to_none=True)
            with nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype=dtype):
                loss = loss_of(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return float(loss.item())

        return step


def sequential(nn: Any, layers: Sequence[Layer]) -> Any:
    """In torch what netcl's ``build_sequential`` makes of a list of layers."""
    own: dict[str, Callable[..., Any]] = {"ResNet18": partial(resnet18, nn), "DecoderBlock": partial(decoder_block, nn)}
    made = []
    for layer in layers:
        args = {"padding" if name == "pad" else name: value for name, value in layer.get("args", {}).items()}
        made.append((own.get(layer["type"]) or getattr(nn, layer["type"]))(**args))
    return nn.Sequential(*made)


def decoder_block(nn: Any, dim: int, n_head: int, hidden: int) -> Any:
    """Builds torch's counterpart of netcl's DecoderBlock: rotary attention with normalized queries and keys, and a
    gated MLP."""
    torch: Any = importlib.import_module("torch")
    F = torch.nn.functional
    size = dim // n_head

    def rotated(x: Any) -> Any:
        angles = torch.outer(torch.arange(x.shape[-2]), 10000.0 ** (-torch.arange(0, size, 2) / size))
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    class DecoderBlock(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(width) for width in (dim, dim, size, size))
            self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
            self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(hidden, dim, bias=False)

        def forward(self, x: Any) -> Any:
            before_attention, before_mlp, of_queries, of_keys = self.norms
            heads = self.qkv(before_attention(x)).unflatten(-1, (3, n_head, size)).transpose(1, 3)
            q, k, v = heads.unbind(2)
            q, k = rotated(of_queries(q)).to(v), rotated(of_keys(k)).to(v)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(attended.transpose(1, 2).flatten(2))
            h = before_mlp(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    return DecoderBlock()


def resnet18(nn: Any, num_classes: int, base_channels: int) -> Any:
    """Builds torch's counterpart of netcl's ResNet18: a stem of 3x3, four stages of two blocks, a bias in every
    convolution."""

    def conv(taken: int, given: int, kernel: int, stride: int) -> Any:
        return nn.Sequential(nn.Conv2d(taken, given, kernel, stride, kernel // 2), nn.BatchNorm2d(given))

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, taken: int, given: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(conv(taken, given, 3, stride), nn.ReLU(), conv(given, given, 3, 1))
            self.past = nn.Identity() if taken == given else conv(taken, given, 1, stride)

        def forward(self, x: Any) -> Any:
            return (self.body(x) + self.past(x)).relu()

    stages, taken = [conv(3, base_channels, 3, 1), nn.ReLU()], base_channels
    for stage in range(4):
        given = base_channels * 2**stage
        stages += [Block(taken, given, 1 if taken == given else 2), Block(given, given, 1)]
        taken = given
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(taken, num_classes))


def serve() -> None:
    """Runs the child process: answers until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the parent; its end of the pipe ends this process
    kind, threads, gpu, descriptor = cache_writer.given()
    makers: dict[str, Callable[[], NumpyPeer | TorchPeer]]
    makers = {"numpy": NumpyPeer, "torch": partial(TorchPeer, threads, gpu)}
    peer = makers[kind]()
    pipe = Connection(descriptor)

    @lru_cache(maxsize=4)  # of a case's contenders, not of those before it
    def prepared(described: bytes) -> Call:
        call = peer.prepare(*pickle.loads(described))
        call()
        return call

    with suppress(EOFError, ConnectionError):  # closed; or, at ^C, closed before an answer was sent, or read
        pipe.send((peer.label, peer.version, peer.works))
        while True:
            described, calls = pipe.recv()
            try:
                answer: list[float] | str = timed(prepared(described), peer.finish)(calls)
            except Exception as error:  # reported to the parent, which leaves this contender out
                answer = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            else:
                settle()
            pipe.send(answer)
