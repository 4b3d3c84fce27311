"""Paddle's debugging tools by their names, ``paddle.amp.debugging``; docs/coming-from-paddle.md has the differences."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np

from clamp import bridge, debug
from clamp.bridge import Node, Tensor, TensorLike
from clamp.casting.arguments import tensors_in
from clamp.casting.results import RESULTS, Observer
from clamp.debug.callsite import here
from clamp.debug.checker import Checker, DebugMode, Sampling, device_name, line_of
from clamp.interrupts import undoing, uninterrupted
from clamp.opencl.host_steps import host_step
from clamp.ops.statistics import numerics_of
from clamp.patching.user_functions import decorating

_checker: Checker | None = None
_stats: OperatorStats | None = None


def check_numerics(
    tensor: TensorLike, op_type: str, var_name: str, debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT
) -> tuple[Tensor, Tensor]:
    """Counts nan, inf and zeros of a tensor; prints the checker's line where the mode asks for it. Waits for the
    device.

    Args:
        tensor: node or tensor, float32, float16 or bfloat16.
        op_type, var_name: what the line calls the op that made it, and the tensor.
        debug_mode: what is printed, and whether inf and nan raise.

    Returns:
        ``(stats, values)``, on the tensor's queue: int64 ``[nan, inf, zeros]``, and float32 ``[max, min, mean]``, of
        which the extremes pass over nan.

    Raises:
        FloatingPointError: the tensor has inf or nan, and the mode is ``CHECK_NAN_INF_AND_ABORT``.
        TypeError: it is no such tensor.
        RuntimeError: launches are being recorded.
    """
    value = getattr(tensor, "value", None)
    if not isinstance(value, Tensor):
        raise TypeError(f"check_numerics takes a Node or a Tensor, got {type(tensor).__name__}")
    debug_mode = _mode(debug_mode)
    found, label = numerics_of(value), device_name(value.queue.device)
    line = line_of(label, op_type, var_name, value.dtype, found)
    if debug_mode.wants(value.dtype, found):
        print(line)
    if debug_mode.aborts(found):
        raise FloatingPointError(
            f"{var_name or 'the tensor'} of {op_type or 'an op'} has {found.nans} nan and {found.infs} inf among "
            f"{found.count} elements of {value.dtype} {tuple(value.shape)}"
        )
    stats = np.array([found.nans, found.infs, found.zeros], np.int64)
    values = np.array([found.greatest, found.least, found.mean], np.float32)
    return Tensor.from_host(value.queue, stats, dtype="int64"), Tensor.from_host(value.queue, values)


# ---------------------------------------------------------------------------------------------- the checker


class TensorCheckerConfig:
    """Configuration of ``enable_tensor_checker``.

    Args:
        enable: False: nothing.
        debug_mode: see ``DebugMode``.
        output_dir: folder for the lines, ``worker_cpu.0.log`` for a device; None: they are printed. Logs that are there
            go when the configuration is enabled first. Processes need a folder each.
        checked_op_list: names of functions, ``["matmul_op", "softmax"]``, that are checked; None: all.
        skipped_op_list: those that are not.
        debug_step: the first and the last step that is checked, from 1. What is computed up to an optimizer's
            ``step()``, or to the next ``enable_tensor_checker``, is a step.
        stack_height_limit: 0: the line of the program does not follow the line that tells of inf or nan.
        sampling: in place of the three before it: a ``Sampling``, with modules and every which step, or the path of a
            TOML file that has one.

    Raises:
        ValueError: no function has a name on a list, or a value is not as above.
    """

    def __init__(
        self, enable: bool, debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT,
        output_dir: str | Path | None = None,
        checked_op_list: Sequence[str] | None = None, skipped_op_list: Sequence[str] | None = None,
        debug_step: Sequence[int] | None = None, stack_height_limit: int = 1,
        *, sampling: Sampling | str | Path | None = None,
    ) -> None:  # fmt: skip
        self.enable, self.debug_mode, self.output_dir = enable, _mode(debug_mode), output_dir
        self.checked_op_list, self.skipped_op_list = checked_op_list, skipped_op_list
        self.debug_step, self.stack_height_limit = debug_step, stack_height_limit
        if not isinstance(stack_height_limit, int):
            raise ValueError(f"stack_height_limit must be int, got {stack_height_limit!r}")
        if not isinstance(output_dir, str | os.PathLike | None):
            raise TypeError(f"output_dir is the path of a folder, got {output_dir!r}")
        self._log = None if output_dir is None else _Log(Path(output_dir))
        write = _print if self._log is None else self._log.write
        self._checker = Checker(debug_mode, write, self._sampling(sampling), with_source=stack_height_limit > 0)

    def _sampling(self, given: Sampling | str | Path | None) -> Sampling:
        lists = {"checked_op_list": self.checked_op_list, "skipped_op_list": self.skipped_op_list,
                 "debug_step": self.debug_step}  # fmt: skip
        for name, value in lists.items():
            if not isinstance(value, list | tuple | None):
                raise ValueError(f"{name} must be list or tuple, got {value!r}")
        if given is None:
            # Paddle's count begins with 0.
            steps = self.debug_step and (max(self.debug_step[0], 1), *self.debug_step[1:])
            return Sampling(ops=self.checked_op_list or (), skip_ops=self.skipped_op_list or (), steps=steps)
        if any(value is not None for value in lists.values()):
            raise ValueError(f"sampling was given beside {', '.join(x for x in lists if lists[x] is not None)}")
        return given if isinstance(given, Sampling) else Sampling.read(given)

    def start(self) -> Checker:
        """The checker, at the beginning of a step."""
        if self._log is not None:
            self._log.begin()
        self._checker.end_step()
        self._checker.on = True
        return self._checker


def enable_tensor_checker(checker_config: TensorCheckerConfig) -> None:
    """Turns the checker on: results of ops and their gradients are checked, in every thread, with AMP and without.

    Each op that is checked waits for the device. netcl is patched, as by an AMP region, and stays so.

    Args:
        checker_config: which ops, and what happens to inf and nan; one that is not enabled ends the checks.

    Raises:
        TypeError: it is no configuration.
    """
    global _checker
    if not isinstance(checker_config, TensorCheckerConfig):
        raise TypeError(f"enable_tensor_checker takes a TensorCheckerConfig, got {type(checker_config).__name__}")
    disable_tensor_checker()
    if checker_config.enable:
        debug.session.ensure_patched()
        with uninterrupted():
            _checker = checker_config.start()
            RESULTS.attach(_checker)


def disable_tensor_checker() -> None:
    """Ends the checking. What was computed before and gets its gradients later is not checked then."""
    global _checker
    with uninterrupted():
        if _checker is not None:
            RESULTS.detach(_checker)
            _checker.on = False
            _checker = None


def check_layer_numerics(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``func``, a layer's ``forward``: what it is given, its ops and gradients are checked for inf and nan.

    The decorated method raises FloatingPointError for the first of them, and RuntimeError where its first argument is
    no node or tensor.
    """

    @wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], Node | Tensor):
            given = type(args[0]).__name__ if args else "nothing"
            raise RuntimeError(f"the first input of {type(self).__name__} must be a node or tensor, got {given}")
        debug.session.ensure_patched()
        checker = Checker(DebugMode.CHECK_NAN_INF_AND_ABORT, _print, thread=threading.get_ident())
        with RESULTS.attached(checker):  # the ops inside go on telling it of their gradients
            checker.check_given(f"{type(self).__name__}.input", tensors_in((args, kwargs)))
            return func(self, *args, **kwargs)

    return wrapper


def _mode(mode: Any) -> DebugMode:
    if not isinstance(mode, DebugMode):
        names = ", ".join(f"DebugMode.{known.name}" for known in DebugMode)
        raise ValueError(f"debug_mode must be one of {names}, got {mode!r}")
    return mode


def _print(device: str, line: str) -> None:
    print(line)


class _Log:
    """The files of an ``output_dir``, one a device."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._has_begun = folder, False

    def begin(self) -> None:
        """Removes what an earlier run has left, the first time."""
        if not self._has_begun:
            self._has_begun = True
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in self._folder.glob("worker_*.log"):
                old.unlink()

    def write(self, device: str, line: str) -> None:
        with (self._folder / f"worker_{device.replace(':', '.')}.log").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


# ---------------------------------------------------------------------------------------------- operator statistics

DTYPES = ("float16", "bfloat16", "float32", "other")
_WIDTH = 120


class OperatorStats(Observer):
    """An observer that counts the ops of forward passes, in replays too.

    Attributes:
        calls: by the name of the op and the dtype of its result, one of ``DTYPES``.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> None:
        dtype = bridge.canonical_dtype(made.value.dtype)
        call = here().name_of(getattr(made, "op_name", None) or "op"), dtype if dtype in DTYPES else "other"
        host_step(partial(self.calls.update, (call,)))

    def __str__(self) -> str:
        ops = sorted({op for op, _ in self.calls})
        titles = (f"{f' {kind} Calls ':-^17}" for kind in ("FP16", "BF16", "FP32", "Other"))
        rows = ["".join([f"  {op:<40}", *(f"|  {self.calls[op, dtype]:<17}" for dtype in DTYPES)]) for op in ops]
        return "\n".join(
            [
                f"<{' op list ':-^{_WIDTH}}>",
                " | ".join([f"<{' Op Name ':-^40}", *titles]) + ">",
                *(row.rstrip() for row in rows),
                f"<{f' op count: {len(ops)} ':-^{_WIDTH}}>",
            ]
        )


def enable_operator_stats_collection() -> None:
    """Starts counting the ops of forward passes, by name and dtype. What was counted before is forgotten."""
    global _stats
    if _stats is not None:
        RESULTS.detach(_stats)
    debug.session.ensure_patched()
    with uninterrupted():
        _stats = OperatorStats()
        RESULTS.attach(_stats)


def disable_operator_stats_collection() -> None:
    """Ends the counting, and prints the table; does nothing where nothing is counted."""
    global _stats
    with uninterrupted():
        if _stats is not None:
            RESULTS.detach(_stats)
            print(f"{_stats}\n")
            _stats = None


@decorating
def collect_operator_stats() -> Iterator[None]:
    """Counts the ops inside the ``with``, and prints the table at its end."""
    with undoing() as undo:
        undo.callback(disable_operator_stats_collection)
        enable_operator_stats_collection()
        yield
