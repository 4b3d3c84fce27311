"""The process in which a peer, numpy or torch, is timed: started and driven by `clamp.cli.bench.peers`.

Peers get their own process because BLAS libraries read their settings when they load, and because their idle
threads must not spin in the process that times OpenCL. It answers lines on standard input with lines on
standard output, and sleeps on the pipe in between::

    <- {"label": "OpenBLAS", "version": "...", "works": {"gemm": ["float32"]}}
    -> run gemm float32 NN 1024 5          five calls, timed
    <- ok 0.0051 0.0049 0.0050 0.0049 0.0052
    -> run gemm float64 NN 1024 5
    <- error KeyError: 'float64'
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from clamp.cli.bench.timing import settle, timed

Call = Callable[[], object]


class NumpyPeer:
    """numpy's matrix product: whichever BLAS numpy was built with.

    Attributes:
        label: what the tables call it.
        version: its version.
        works: dtypes that it is timed in, by kind of work.
    """

    def __init__(self) -> None:
        config: Any = np.show_config(mode="dicts")
        blas = config["Build Dependencies"]["blas"]
        self.label = "OpenBLAS" if "openblas" in blas["name"] else blas["name"]
        self.version = f"{blas['name']} {blas['version']}, numpy {np.__version__}"
        self.works = {"gemm": ["float32"]}

    def prepare(self, work: str, dtype: str, *args: str) -> Call:
        """A call that does the work once."""
        layout, n = args[0], int(args[1])
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
        left, right = (matrix.T if flag == "T" else matrix for matrix, flag in zip((a, b), layout, strict=True))
        out = np.empty((n, n), np.float32)
        return lambda: np.matmul(left, right, out=out)

    def finish(self) -> None:
        """Waits until the work is done."""


class TorchPeer:
    """torch's matrix product and training step, on the CPU or, where ``device`` says so, with CUDA. As numpy's."""

    def __init__(self, threads: int, device: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        self._device = "cuda" if device == "gpu" and self._torch.cuda.is_available() else "cpu"
        self.label = "torch"
        self.version = f"{self._torch.__version__} ({self._device})"
        # float16 on a CPU has no fast kernels in torch and would take most of the run's time.
        dtypes = ["float32", "bfloat16", *(["float16"] if self._device == "cuda" else [])]
        self.works = dict.fromkeys(("gemm", "conv", "attention", "step", "guide", "cnn", "resnet"), dtypes)
        self.works |= {"readme": ["float32"], "digits": ["float32"]}

    def prepare(self, work: str, dtype: str, *args: str) -> Call:
        makers: dict[str, Callable[..., Call]] = {
            "gemm": self._gemm, "conv": self._conv, "attention": self._attention, "step": self._mlp_step,
            "guide": self._mlp_step, "cnn": self._cnn_step, "resnet": self._resnet_step,
            "readme": self._readme_step, "digits": self._digits_step,
        }  # fmt: skip
        return makers[work](getattr(self._torch, dtype), *args)

    def finish(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def _gemm(self, dtype: Any, layout: str, size: str) -> Call:
        n, torch = int(size), self._torch
        a, b = (torch.randn(n, n, device=self._device).to(dtype) for _ in range(2))
        left, right = (matrix.T if flag == "T" else matrix for matrix, flag in zip((a, b), layout, strict=True))
        out = torch.empty(n, n, dtype=dtype, device=self._device)
        return lambda: torch.matmul(left, right, out=out)

    def _conv(self, dtype: Any, direction: str, *numbers: str) -> Call:
        n, c, h, w, features, kernel, stride, pad = map(int, numbers)
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

    def _attention(self, dtype: Any, direction: str, *numbers: str) -> Call:
        torch = self._torch
        shape = tuple(map(int, numbers))
        q, k, v = (torch.randn(shape, device=self._device).to(dtype).requires_grad_() for _ in range(3))
        gradient = torch.randn(shape, device=self._device).to(dtype)

        def forward() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return forward if direction == "forward" else lambda: torch.autograd.grad(forward(), (q, k, v), gradient)

    def _mlp_step(self, dtype: Any, layers: str, width: str, batch: str, relu: str = "") -> Call:
        torch, wide = self._torch, int(width)
        modules = [torch.nn.Linear(wide, wide) for _ in range(int(layers))]
        if relu:
            modules = [module for layer in modules for module in (layer, torch.nn.ReLU())][:-1]
        x, y = (torch.randn(int(batch), wide, device=self._device) for _ in range(2))
        return self._step(torch.nn.Sequential(*modules), x, lambda out: ((out.float() - y) ** 2).mean(), dtype)

    def _cnn_step(self, dtype: Any, batch: str) -> Call:
        nn = self._torch.nn
        stages = [
            *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 8 * 8, 10)),
        ]
        return self._classifier_step(nn.Sequential(*stages), dtype, int(batch))

    def _resnet_step(self, dtype: Any, channels: str, batch: str) -> Call:
        return self._classifier_step(resnet18(self._torch.nn, int(channels)), dtype, int(batch))

    def _classifier_step(self, model: Any, dtype: Any, batch: int) -> Call:
        torch = self._torch
        x = self._laid_out(torch.randn(batch, 3, 32, 32, device=self._device))
        classes = torch.randint(0, 10, (batch,), device=self._device)
        loss_of = torch.nn.functional.cross_entropy
        return self._step(self._laid_out(model), x, lambda out: loss_of(out.float(), classes), dtype)

    def _readme_step(self, dtype: Any, batch: str) -> Call:
        nn, y = self._torch.nn, self._torch.randn(int(batch), 1, device=self._device)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
        x = self._torch.randn(int(batch), 64, device=self._device)
        return self._step(model, x, lambda out: ((out - y) ** 2).mean(), dtype, "Adam")

    def _digits_step(self, dtype: Any, batch: str) -> Call:
        torch, nn = self._torch, self._torch.nn
        layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
        x = torch.rand(int(batch), 64, device=self._device)
        classes = torch.randint(0, 10, (int(batch),), device=self._device)
        return self._step(
            nn.Sequential(*layers), x, lambda out: nn.functional.cross_entropy(out, classes), dtype, "Adam"
        )

    def _step(self, model: Any, x: Any, loss_of: Callable[[Any], Any], dtype: Any, optimizer_name: str = "SGD") -> Call:
        torch, device = self._torch, self._device
        model.to(device)
        optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

        def step() -> float:
            optimizer.zero_grad(set_to_none=True)
            with nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype=dtype):
                loss = loss_of(model(x))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return float(loss.item())

        return step


def resnet18(nn: Any, channels: int) -> Any:
    """As netcl's ResNet18 is: a stem of 3x3, four stages of two blocks, a bias in every convolution."""

    def conv(taken: int, given: int, kernel: int, stride: int) -> Any:
        return nn.Sequential(nn.Conv2d(taken, given, kernel, stride, kernel // 2), nn.BatchNorm2d(given))

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, taken: int, given: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(conv(taken, given, 3, stride), nn.ReLU(), conv(given, given, 3, 1))
            self.past = nn.Identity() if taken == given else conv(taken, given, 1, stride)

        def forward(self, x: Any) -> Any:
            return (self.body(x) + self.past(x)).relu()

    stages, taken = [conv(3, channels, 3, 1), nn.ReLU()], channels
    for stage in range(4):
        given = channels * 2**stage
        stages += [Block(taken, given, 1 if taken == given else 2), Block(given, given, 1)]
        taken = given
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(taken, 10))


def serve(peer: NumpyPeer | TorchPeer) -> None:
    """Answers lines until standard input ends."""

    @lru_cache(maxsize=4)  # of a case's contenders, not of those before it
    def prepared(*work: str) -> Call:
        call = peer.prepare(*work)
        call()
        return call

    for line in sys.stdin:
        _, *work, calls = line.split()
        try:
            seconds = timed(prepared(*work), peer.finish)(int(calls))
        except Exception as error:  # reported to the parent, which leaves this contender out
            _say(f"error {type(error).__name__}: {error}".split("\n", 1)[0])
        else:
            settle()
            _say("ok " + " ".join(f"{value:.9f}" for value in seconds))


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """``python -m clamp.cli.bench.peer_child numpy|torch THREADS cpu|gpu``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the parent; its end of the pipe ends this process
    kind, threads, device = sys.argv[1:]
    peer = NumpyPeer() if kind == "numpy" else TorchPeer(int(threads), device)
    _say(json.dumps({"label": peer.label, "version": peer.version, "works": peer.works}))
    serve(peer)


if __name__ == "__main__":
    main()
