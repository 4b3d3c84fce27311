"""``python -m clamp run``: a script of netcl's as it is, trained in mixed precision; and ``report``, the page of a run
that was written.

Each backward of the script's runs in a ``scale_loss`` of its own, as if the two lines stood there. What the script has
afterwards are the true gradients, as it expects them, of whatever the loss reaches.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import threading
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from io import open_code
from pathlib import Path
from types import ModuleType
from typing import Any

from netcl.optim import SGD, Adam, AdamW, Momentum, RMSProp

from clamp import amp, bridge, session
from clamp.bridge import Node, Tape, Tensor
from clamp.cli import INTERRUPTED, CommandError
from clamp.handle import AmpHandle
from clamp.interrupts import contextmanager
from clamp.patching.redirect import Bindings
from clamp.report import read_run, write_page
from clamp.scaling.scaled_loss import is_scaled, require_graph

_NEEDED_BY_PAGES = ("jinja2", "matplotlib")
_TWO_LINES = """\
    from clamp import amp
    handle = amp.init()
    ...
    with handle.scale_loss(loss, optimizer) as scaled_loss:  # optimizer: has params, a list, and step()
        tape.backward(scaled_loss)"""
_NO_FRAMES_OF = {__file__, runpy.run_module.__code__.co_filename}  # in a traceback of the script's


def run(args: Namespace) -> int:
    """Runs the command; see `clamp.cli`."""
    require_script(args)
    if args.report is not None:
        _require_writable(args.report)
    handle = turn_on(args.dtype, debug="summary" if args.report else None)
    status, failed, process = 0, 0, os.getpid()
    try:
        with scaling(handle):
            try:
                status = run_script(args.script, args.given, is_module=args.is_module)
            finally:
                _wait_for_threads()
    finally:
        try:
            if os.getpid() == process:  # not where a process ends that the script has forked
                failed = _sum_up(handle, args.report)
        finally:
            handle.shutdown()
    return status or failed


def report(args: Namespace) -> int:
    """Runs ``report``; see `clamp.cli`."""
    try:
        found = read_run(args.run)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read a run: {error}", 2) from error
    page = args.output or args.run.with_suffix(".html")
    try:
        write_page(found, page)
    except ModuleNotFoundError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"cannot write the page: {error}") from error
    print(f"written: {page}")
    return 0


def require_script(args: Namespace) -> None:
    """Raises CommandError, with python's exit status, where there is none."""
    if not args.is_module and not Path(args.script).is_file():
        raise CommandError(f"there is no script {args.script}", 2)
    package = args.script.partition(".")[0]
    if args.is_module and (not package or find_spec(package) is None):
        raise CommandError(f"there is no module {args.script}")


def turn_on(dtype: str, debug: str | None = None) -> AmpHandle:
    """AMP for a script that does not turn it on itself."""
    amp.init(dtype=dtype, debug=debug)
    handle = session.require_handle()
    handle._way_out = "`python -m clamp` has turned AMP on. A script that does so itself needs only python"
    return handle


def _require_writable(report: Path) -> None:
    """Raises CommandError where it is known that a report cannot be written, before hours of training."""
    if not report.parent.is_dir():
        raise CommandError(f"cannot write {report}: there is no folder {report.parent}")
    if report.is_dir() or not os.access(report if report.exists() else report.parent, os.W_OK):
        raise CommandError(f"cannot write {report}: {'it is a folder' if report.is_dir() else 'not permitted'}")
    for name in _NEEDED_BY_PAGES:
        if report.suffix != ".json" and find_spec(name) is None:
            raise CommandError(f"--report needs {name}: pip install {name}, or write JSON, run.json")


def _sum_up(handle: AmpHandle, report: Path | None) -> int:
    """Prints what the run did, where it is not taken for what the script prints, and writes the report."""
    if not handle.is_active():
        lost = "there is no summary of the run" if report is None else f"{report} is not written"
        _say(f"the script has called amp.shutdown(): from there on it ran as by python alone, and {lost}")
        return int(report is not None)
    _say(handle.summary().of_run)
    if report is None:
        return 0
    try:
        handle.report(report)
    except OSError as error:
        _say(f"cannot write {report}: {error}")
        return 1
    _say(f"written: {report}")
    return 0


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # who listened has left, or the script has closed it
        print(text, file=sys.stderr)


# ---------------------------------------------------------------------------------------------- the script


class EnoughError(BaseException):
    """Ends a user's script: nothing of it may catch this."""


def run_script(script: str, given: Sequence[str], *, is_module: bool) -> int:
    """Runs a script, or a module, as python would; ``SystemExit`` is the caller's."""
    sys.argv = [script, *given]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            run_file(script)
    except (SystemExit, EnoughError):
        raise
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _NO_FRAMES_OF:
            frames = frames.tb_next
        if frames is None and isinstance(error, ImportError):  # a package has no such module
            raise CommandError(str(error)) from None
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def run_file(script: str) -> None:
    """Runs a file as ``__main__``, which it stays, as python does; ``sys.argv`` is the caller's.

    (``runpy`` would have one path be ``__file__`` and ``sys.argv[0]``, which is as it was given.)
    """
    path = os.path.abspath(script)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    main = sys.modules["__main__"] = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins)
    with open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _wait_for_threads() -> None:
    """Waits, as python does at its end, for threads that are no daemons."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


# ---------------------------------------------------------------------------------------------- its passes


@contextmanager
def scaling(handle: AmpHandle) -> Iterator[None]:
    """Inside the ``with``, every backward is one of a scaled loss."""
    passes, bindings = _Passes(handle), Bindings()
    handle._scaling.divides_all = True
    try:
        bindings.wrap(Tape, "backward", lambda wrapped, _, args, kwargs: passes.backward(wrapped, *args, **kwargs))
        for kind in (SGD, Momentum, Adam, AdamW, RMSProp):
            bindings.wrap(kind, "__init__", passes.note_optimizer)
        yield
    finally:
        bindings.restore()


class _Passes:
    """The scaled passes of a script that names no optimizers.

    A pass is told of those that have a parameter which its loss reaches; of several that have the same, of the one that
    has stepped last. One that keeps gradients of an earlier pass while others step (a generator's while a discriminator
    is trained) is left out: the scale would wait for its step. Who is left out looks at its gradients itself when it
    steps.
    """

    def __init__(self, handle: AmpHandle) -> None:
        self._handle, self._scaling = handle, handle._scaling
        self._made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id: some have no hash
        self._steps_at_pass: dict[int, int] = {}  # of each optimizer's last pass, by id

    def note_optimizer(self, wrapped: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Around the ``__init__`` of an optimizer of netcl's."""
        self._note(optimizer)
        return wrapped(*args, **kwargs)

    def _note(self, optimizer: Any) -> None:
        self._steps_at_pass.pop(id(optimizer), None)
        self._made[id(optimizer)] = optimizer

    def backward(self, run: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        """``Tape.backward``, from the loss times its scale; one that somebody has scaled already is not scaled again.

        Raises:
            RuntimeError: no optimizer is known that has what the loss reaches, and gradients need a scale.
        """
        if not self._handle.is_active() or not isinstance(loss, Node) or not bridge.on_device(loss.value):
            return run(loss, *args, **kwargs)
        nodes = bridge.graph(loss)
        if any(map(is_scaled, nodes)):
            return run(loss, *args, **kwargs)
        optimizers = self._optimizers([x.value for x in nodes if bridge.is_leaf(x) and bridge.needs_grad(x)])
        if not optimizers and not self._handle.scalers[0].scales:
            return run(loss, *args, **kwargs)
        if not optimizers:
            require_graph(loss)
            raise RuntimeError(
                "no optimizer has a parameter that this loss reaches, so that `python -m clamp run` cannot tell whose "
                "step an overflow must skip. Make the optimizer before the first backward; or write the two lines, and "
                f"run the script with python alone:\n{_TWO_LINES}"
            )
        with self._handle.scale_loss(loss, optimizers) as scaled_loss:
            return run(scaled_loss, *args, **kwargs)

    def _optimizers(self, leaves: Sequence[Tensor]) -> list[Any]:
        """The optimizers that a pass is told of which reaches these."""
        found = self._holders({id(leaf): leaf for leaf in leaves})
        holders = [(optimizer, self._scaling.guard(optimizer), reached) for optimizer, reached in found]
        steps = {id(x): 0 if guard.last is None else guard.last.step for x, guard, _ in holders}
        last = max(steps.values(), default=0)
        ready = [x for x in holders if not x[1].pending or self._steps_at_pass.get(id(x[0]), 0) >= last] or holders
        named, covered = [], set[int]()
        for optimizer, _, reached in sorted(ready, key=lambda x: -steps[id(x[0])]):
            if not reached <= covered:
                named.append(optimizer)
                covered |= reached
                self._steps_at_pass[id(optimizer)] = self._scaling.guards.reports.steps
        return named

    def _holders(self, leaves: Mapping[int, Tensor]) -> list[tuple[Any, set[int]]]:
        """The optimizers that have any of these, each with the ids of those, in the order of their making."""
        holders, known = [], set[int]()
        for optimizer in list(self._made.values()):
            params = getattr(optimizer, "params", ())
            known.add(id(optimizer))
            holders.append((optimizer, leaves.keys() & {id(bridge.model_parameter(param)) for param in params}))
        held = set().union(*(reached for _, reached in holders))
        if any(id(x) not in held and (not held or isinstance(x, bridge.Parameter)) for x in leaves.values()):
            others = [  # each time anew: nobody says when one of a class of the user's is made
                x for x in (*self._scaling.guards.optimizers, *bridge.optimizers_in_reach()) if id(x) not in known
            ]
            for optimizer in others:
                self._note(optimizer)
            if others:
                return self._holders(leaves)
        return [holder for holder in holders if holder[1]]
