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
from clamp.debug.checker import Checker, DebugMode, Sampling, counts_in_words, device_name, line_of
from clamp.interrupts import undoing, uninterrupted
from clamp.opencl.host_steps import host_step
from clamp.ops.arguments import yes_or_no
from clamp.ops.statistics import numerics_of
from clamp.patching.user_functions import decorating

_on: dict[type[Observer], Observer] = {}  # the checker, and the one that counts, while they are on


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
        counts = counts_in_words(found, value.dtype, value.shape)
        raise FloatingPointError(f"{var_name or 'the tensor'} of {op_type or 'an op'} has {counts}")
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
        self.enable = yes_or_no("TensorCheckerConfig", "enable", enable)
        self.debug_mode, self.output_dir = _mode(debug_mode), output_dir
        self.checked_op_list, self.skipped_op_list = checked_op_list, skipped_op_list
        self.debug_step, self.stack_height_limit = debug_step, stack_height_limit
        if not isinstance(stack_height_limit, int):
            raise ValueError(f"stack_height_limit must be int, got {stack_height_limit!r}")
        if not isinstance(output_dir, str | os.PathLike | None):
            raise TypeError(f"output_dir is the path of a folder, got {output_dir!r}")
        self._has_begun = False
        self._checker = Checker(debug_mode, self._write, self._sampling(sampling), with_source=stack_height_limit > 0)

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
        """The checker, at the beginning of a step; the first time, the logs of an earlier run go."""
        if self.output_dir is not None and not self._has_begun:
            Path(self.output_dir).mkdir(parents=True, exist_ok=True)
            for old in Path(self.output_dir).glob("worker_*.log"):
                old.unlink()
        self._has_begun = True
        self._checker.end_step()
        self._checker.on = True
        return self._checker

    def _write(self, device: str, line: str) -> None:
        if self.output_dir is None:
            print(line)
            return
        log = Path(self.output_dir) / f"worker_{device.replace(':', '.')}.log"
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def _switch(kind: type[Observer], other: Observer | None = None) -> Observer | None:
    """Ends the observer of a kind that is on, which is returned, and turns another one on, if it is given."""
    with uninterrupted():
        before = _on.pop(kind, None)
        if before is not None:
            RESULTS.detach(before)
        if other is not None:
            _on[kind] = other
            RESULTS.attach(other)
    return before


def enable_tensor_checker(checker_config: TensorCheckerConfig) -> None:
    """Turns the checker on: results of ops and their gradients are checked, in every thread, with AMP and without.

    Each op that is checked waits for the device. netcl is patched, as by an AMP region, and stays so.

    Args:
        checker_config: which ops, and what happens to inf and nan; one that is not enabled ends the checks.

    Raises:
        TypeError: it is no configuration.
    """
    if not isinstance(checker_config, TensorCheckerConfig):
        raise TypeError(f"enable_tensor_checker takes a TensorCheckerConfig, got {type(checker_config).__name__}")
    disable_tensor_checker()
    if checker_config.enable:
        debug.session.ensure_patched()
        with uninterrupted():
            _switch(Checker, checker_config.start())


def disable_tensor_checker() -> None:
    """Ends the checking. What was computed before and gets its gradients later is not checked then."""
    with uninterrupted():
        before = _switch(Checker)
        if isinstance(before, Checker):
            before.on = False


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
        checker = Checker(DebugMode.CHECK_NAN_INF_AND_ABORT, thread=threading.get_ident())
        with RESULTS.attached(checker):  # the ops inside go on telling it of their gradients
            checker.check_given(f"{type(self).__name__}.input", tensors_in((args, kwargs)))
            return func(self, *args, **kwargs)

    return wrapper


def _mode(mode: Any) -> DebugMode:
    if not isinstance(mode, DebugMode):
        names = ", ".join(f"DebugMode.{known.name}" for known in DebugMode)
        raise ValueError(f"debug_mode must be one of {names}, got {mode!r}")
    return mode


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
    debug.session.ensure_patched()
    _switch(OperatorStats, OperatorStats())


def disable_operator_stats_collection() -> None:
    """Ends the counting, and prints the table; does nothing where nothing is counted."""
    with uninterrupted():
        stats = _switch(OperatorStats)
        if stats is not None:
            print(f"{stats}\n")


@decorating
def collect_operator_stats() -> Iterator[None]:
    """Counts the ops inside the ``with``, and prints the table at its end."""
    with undoing() as undo:
        undo.callback(disable_operator_stats_collection)
        enable_operator_stats_collection()
        yield
