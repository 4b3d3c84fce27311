"""OneFlow's face: ``Graph``, its ``nn.Graph`` (scalers.py has its ``GradScaler`` and ``StaticGradScaler``).

A graph is ``amp.record`` of its ``build``; docs/coming-from-oneflow.md has every difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

from clamp import bridge, session
from clamp.bridge import DTypeLike, Node, Tape, Tensor
from clamp.casting.arguments import mapped
from clamp.casting.policy_table import check_dtype
from clamp.casting.regions import current_region, in_region, region_here
from clamp.compat import pytorch
from clamp.compat.scalers import GradScaler, StaticGradScaler
from clamp.debug.explain import Attribution, Explanation
from clamp.interrupts import among, contextmanager, holding, of_threads, uninterrupted
from clamp.opencl.host_steps import host_step, recorder
from clamp.ops.arguments import yes_or_no
from clamp.params import gradient_marks, graphs, masters
from clamp.params.gradient_marks import copied
from clamp.params.weight_cache import weight_cache
from clamp.recordings.arguments import Arguments, Key, leaves_of
from clamp.recordings.attempt import Attempt
from clamp.recordings.function import RecordedFunction
from clamp.recordings.gradients import Known
from clamp.recordings.replayable import InPlace, Replayable
from clamp.recordings.variants import Variants
from clamp.recordings.watch import Watch
from clamp.scaling.backward_pass import restoring
from clamp.scaling.loss_scale import LossScale, NoLossScale, require_state
from clamp.scaling.passes import scaled_pass
from clamp.scaling.scaled_loss import as_pass, check_loss, require_graph
from clamp.scaling.step_guard import StepGuard, StepGuards
from clamp.scaling.step_report import History, StepReport, warn_user

__all__ = ["GradScaler", "Graph", "StaticGradScaler"]


class GraphConfig:
    """Settings of a graph, ``graph.config``."""

    def __init__(self) -> None:
        self.amp: bool | None = None  # None: as it is around the call
        self.dtype = "float16"

    def enable_amp(self, mode: bool = True, *, dtype: DTypeLike = "float16") -> None:
        """Turns mixed precision on or off inside the graph, whatever holds around it.

        Args:
            dtype: ``"float16"``, ``"bfloat16"``, or ``"float32"``: clamp's kernels without casting.

        Raises:
            TypeError: ``mode`` is a text.
            ValueError: unknown dtype.
        """
        self.amp, self.dtype = yes_or_no("enable_amp", "mode", mode), check_dtype(dtype)


class Graph:
    """A training step, or a forward pass, that is recorded once and replayed: OneFlow's ``nn.Graph``::

        class Train(amp.Graph):
            def __init__(self):
                super().__init__()
                self.model = model
                self.add_optimizer(optimizer)
                self.config.enable_amp(True)
                self.set_grad_scaler(amp.GradScaler(init_scale=3000, growth_interval=1000))

            def build(self, x, y):
                loss = ag.cross_entropy(self.model(x), y)
                loss.backward()
                return loss

        train = Train()
        for x, y in batches:
            loss = train(x, y)

    ``build`` is given a node for every tensor. ``backward`` in it scales the loss and unscales the gradients; the
    optimizers step at its end, unless a gradient is inf or nan, and have no gradients at its beginning. Without
    optimizers it runs without gradients, and a backward that comes to what it returned says so.

    The first call with tensors of some shapes and dtypes runs ``build`` as it is, the second one records what it
    launches, and all others replay that: they give the same bits as running it. The loss scale, the skipping of
    steps, learning rates and what ``dropout`` draws are those current at replay. Everything else that ``build`` does on
    the host happens in the first two calls, and where a replay is tried by running it: it must not read tensors to the
    host or make them from host data.
    """

    def __init__(self) -> None:
        earlier = set(vars(self))
        self.config = GraphConfig()
        self._optimizers: list[Any] = []
        self._guards = StepGuards()
        self._own_scale: LossScale = NoLossScale()
        self._grad_scaler: pytorch.GradScaler | None = None  # whose scale it is, if somebody else has it too
        self._recorder = _RecordedBuild(self)
        self._attribution = Attribution(lambda: self._guards.reports.history)
        self._passes, self._has_warned = 0, False
        # What a recording does not depend on, or asks for as it is now.
        self._unwatched = frozenset(vars(self)) - earlier | {"_unwatched"}

    def build(self, *inputs: Any) -> Any:
        """Returns what the graph computes; override it."""
        raise NotImplementedError(f"{type(self).__name__} needs a method build(self, ...): what the graph computes")

    def __getattr__(self, name: str) -> Any:
        own = type(self).__name__
        if "_recorder" not in vars(self):
            raise AttributeError(f"{own}.{name} is not there yet: call super().__init__() first in {own}.__init__")
        return object.__getattribute__(self, name)  # raises what was raised before: in a property, its own error

    def __reduce_ex__(self, *given: Any) -> NoReturn:
        own = type(self).__name__
        raise TypeError(
            f"{own}, a Graph, cannot be copied or pickled: its recordings are for its own model. Make another {own}; "
            "save the model, the optimizers and the graph's state_dict()"
        )

    # ------------------------------------------------------------------------------------------ setting up

    def add_optimizer(self, optimizer: Any) -> None:
        """An optimizer that steps at the end of every call.

        Raises:
            TypeError: it has no ``params`` or no ``step``.
            RuntimeError: the graph has run already.
        """
        self._require_not_run("add_optimizer")
        self._guards.of(optimizer)
        self._optimizers.append(optimizer)

    def set_grad_scaler(self, grad_scaler: GradScaler | StaticGradScaler | pytorch.GradScaler) -> None:
        """Sets the scaler by which ``backward`` scales the loss; without one it does not.

        PyTorch's ``amp.GradScaler`` and the graph have one scale: the scaler shows it, saves and loads it. It falls
        as that scaler lets it, below 1 too; the graph updates it, so ``update()`` is not to be called.

        Raises:
            TypeError: it is no scaler.
            RuntimeError: the graph has run already.
        """
        self._require_not_run("set_grad_scaler")
        if isinstance(grad_scaler, pytorch.GradScaler):
            self._own_scale = NoLossScale()
            self._grad_scaler = grad_scaler if grad_scaler.is_enabled() else None
        elif isinstance(grad_scaler, GradScaler | StaticGradScaler):
            self._own_scale, self._grad_scaler = grad_scaler.make(), None
        else:
            given = f"{type(grad_scaler).__module__}.{type(grad_scaler).__name__}"
            raise TypeError(
                "set_grad_scaler takes a GradScaler or a StaticGradScaler, of clamp.amp or clamp.compat.oneflow, got "
                f"{given.removeprefix('builtins.')}"
            )
        self._guards = StepGuards() if self._grad_scaler is None else self._grad_scaler._scaling.guards
        for optimizer in self._optimizers:
            self._guards.of(optimizer)

    @property
    def _scaler(self) -> LossScale:
        """The loss scale; of a ``GradScaler`` that is given to the graph, the one that it has for the graph's queue."""
        params = (param for optimizer in self._optimizers for param in optimizer.params if bridge.on_device(param))
        first = next(params, None)
        if self._grad_scaler is None or first is None:
            return self._own_scale
        return self._grad_scaler._scaling.scale_on(first.queue)

    def _require_not_run(self, call: str) -> None:
        if self._recorded:
            raise RuntimeError(f"{call} was called after the graph has run: call it in __init__")

    @property
    def loss_scale(self) -> float:
        """The current loss scale; reads a few bytes from the device."""
        return self._scaler.scale

    @property
    def last_step(self) -> StepReport | None:
        """Returns what the last call's optimizer step did; None before the first."""
        return self.history[-1] if self.history else None

    @property
    def history(self) -> History:
        """Returns what the last 1000 steps did, the newest last."""
        return self._guards.reports.history

    def state_dict(self) -> dict[str, Any]:
        """The loss scale; parameters and optimizers are yours to save."""
        return {"scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a ``state_dict``.

        Raises:
            TypeError: it is no dict.
            ValueError: it is malformed.
        """
        require_state(state, "state_dict()")
        if set(state) != {"scaler"}:
            raise ValueError(f"a graph's state dict has the key 'scaler', not {sorted(state)}")
        self._scaler.load_state_dict(state["scaler"])

    # ------------------------------------------------------------------------------------------ running

    def __call__(self, *inputs: Any) -> Any:
        """Runs, records or replays ``build``.

        Args:
            inputs: tensors (or nodes of them) on OpenCL devices; anything else is a constant of the graph, which is
                recorded anew for another one.

        Returns:
            What ``build`` returns, with tensors in place of nodes, each in memory of its own.

        Raises:
            RuntimeError: ``build`` runs no ``backward`` for an optimizer to step by, steps one itself, or does what no
                replay can.
            ValueError: ``build`` computes nothing from one of the tensors.
        """
        session.ensure_patched()
        inputs = _given(inputs)
        for x in inputs:
            _require_input(x)
        with self._in_region():
            if recorder() is not None:  # inside another graph, which records this one with it
                return self._recorder.__wrapped__(*inputs)
            outputs = self._recorder(*inputs)
            if not self._optimizers and bridge.is_grad_enabled():
                for x in leaves_of(outputs):
                    if isinstance(x, Tensor):
                        graphs.ask_before_backward(x, self._is_constant)
            self._attribution.look_after_skips(lambda: self._run(inputs), "graph.explain()")
        weight_cache.clear()
        return outputs

    def _is_constant(self) -> None:
        """Backward has come to what the graph gave, and ends there."""
        if not self._has_warned and any(map(graphs.has_optimizer, Watch({"self": self}).tensors)):
            self._has_warned = True
            own = type(self).__name__
            warn_user(
                f"backward has come to what {own} returned, which has no graph: without an optimizer {own} runs under "
                "no_grad, and what it computes with is not trained. Put loss and backward into build and give it the "
                "optimizer, add_optimizer(optimizer), or train the model without a Graph; what is meant as a constant "
                "is computed under `with ag.no_grad()`"
            )

    def explain(self, *inputs: Any) -> Explanation:
        """Why a step was skipped: runs ``build`` once more with these inputs, only to look at it, at the loss scale of
        the last skipped step; see ``AmpHandle.explain``. Without inputs, what is known already: after ten skips in a
        row the graph has looked by itself.
        """
        if not inputs:
            return self._attribution.explain()
        given = _given(inputs)
        with self._in_region():
            return self._attribution.explain(lambda: self._run(given))

    @property
    def _recorded(self) -> Variants:
        return self._recorder._variants

    def _in_region(self) -> AbstractContextManager[Any]:
        amp, dtype = self.config.amp, self.config.dtype
        region = current_region() if amp is None else region_here(enabled=amp, dtype=dtype)
        return nullcontext() if region is None else in_region(region)

    def _run(self, inputs: Sequence[Any]) -> Any:
        self._zero_grad()
        nodes = [Node(value=x) if isinstance(x, Tensor) else x for x in inputs]
        if not self._optimizers:
            try:
                with bridge.no_grad():
                    return self.build(*nodes)
            except AttributeError as error:
                if error.name != "backward" or not isinstance(error.obj, Tensor):
                    raise
                own = type(self).__name__
                raise RuntimeError(
                    f"{own}.build ran backward, and without an optimizer {own} runs under no_grad: call "
                    "self.add_optimizer(optimizer) in __init__"
                ) from error
        self._passes = 0
        stepped_later = [*masters.building.optimizers, *self._optimizers]
        with _backward_is(self._backward), holding(masters.building, "optimizers", stepped_later):
            outputs = self.build(*nodes)
        if not self._passes:
            raise RuntimeError(
                f"{type(self).__name__}.build ran no loss.backward(), and there is an optimizer to step: call it "
                "on the loss (tape.backward(loss) would not scale it)"
            )
        pairs = [pair for optimizer in self._optimizers for pair in masters.with_true_gradients(optimizer)]
        host_step(partial(self._step, restoring([x for pair in pairs for x in pair], self._all_guards())))
        return outputs

    def _backward(self, loss: Node, grad: Tensor | None = None, **how: bool | None) -> None:
        """``loss.backward()``, scaled: what ``handle.scale_loss`` does. ``how`` it is else runs, as everywhere."""
        if grad is not None:
            raise ValueError("loss.backward(grad) cannot be scaled in a graph: multiply the loss instead")
        check_loss(loss)
        require_graph(loss)
        with as_pass(scaled_pass)(loss, self._scaler, self._optimizers, self._all_guards()) as scaled_loss:
            Tape(retain_grads=False).backward(scaled_loss, **how)
        self._passes += 1

    def _all_guards(self) -> list[StepGuard]:
        return [self._guards.of(optimizer) for optimizer in self._optimizers]

    def _step(self, restore: Callable[[], None]) -> None:
        restore()
        with uninterrupted():  # nor between two optimizers' steps
            for optimizer in self._optimizers:
                self._guards.of(optimizer).step(optimizer.step)

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


class _RecordedBuild(RecordedFunction):
    """A graph's ``build``, as ``amp.record`` would have it but for three things. What no replay could do raises; what
    else it does on the host, in the calls in which it runs, is its own affair. Results and gradients are in the
    recording's memory. And gradients of what the graph does not step are added to what is there."""

    _kind = InPlace
    _positional, _of_gradients = "inputs", False
    _detached = staticmethod(lambda result: result)  # there is no node in it

    def __init__(self, graph: Graph) -> None:
        def build(*inputs: Any) -> Any:
            """Gives tensors. One may be an input, or a view of one: the next call's is another."""
            given = [x.buffer for x in inputs if isinstance(x, Tensor)]
            return mapped(
                graph._run(inputs), lambda x: copied(x.value) if any(x.value.buffer is b for b in given) else x.value
            )

        super().__init__(build)
        self._graph = graph
        name = type(graph).__name__
        self._code = f"{name}.build()"
        self._variants = Variants(name, "build()")

    def _roots(self, call: Arguments) -> dict[str, Any]:
        return {"self": self._graph, "the graph's optimizers": self._graph._optimizers, **call.others}

    def _attempt(self, roots: dict[str, Any], before: Watch) -> Attempt:
        return Attempt(before, raises=True)

    def _change(self, attempt: Attempt) -> str:
        return ""

    def _unlike_others(self, *call: Any) -> str:
        return ""

    def _replay(self, call: Arguments, known: Known, recorded: Replayable) -> Any:
        with self._adding([*recorded.trained, *call.tensors]):
            self._graph._zero_grad()  # of parameters, too, that this recording gives no gradient
            return super()._replay(call, known, recorded)

    def _record(self, key: Key, call: Arguments, before: Watch, known: Known, earlier: Replayable | None = None) -> Any:
        trained = self._trained(call, before) if earlier is None else earlier.trained
        with self._adding([*trained, *call.tensors]):
            self._graph._zero_grad()
            return super()._record(key, call, before, known, earlier)

    @contextmanager
    def _adding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Around a recording, and each replay: what it gives to tensors that are trained, but by none of the graph's
        optimizers, is added to what they have. A recording would add what was there when it was made, every time."""
        own = {id(x) for optimizer in self._graph._optimizers for pair in masters.pairs(optimizer) for x in pair}
        before = [(x, x.grad) for x in {id(x): x for x in tensors if id(x) not in own}.values()]
        try:
            for x, _ in before:
                x.grad = None
            yield
        except BaseException:
            for x, earlier in before:
                x.grad = earlier
            raise
        for x, earlier in before:
            if x.grad is None:
                x.grad = earlier
            else:  # in memory of its own: the next replay overwrites this one's
                x.grad = copied(x.grad) if earlier is None else gradient_marks.added(earlier, x.grad, x.grad.dtype)


def _given(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([x.value if isinstance(x, Node) else x for x in inputs])


def _require_input(x: Any) -> None:
    """Raises TypeError for what is neither a tensor on a device nor a constant."""
    if isinstance(x, Tensor):
        if not bridge.on_device(x):
            raise TypeError(
                "a Graph takes tensors on an OpenCL device, not on netcl's numpy backend: call build() there"
            )
    elif isinstance(x, tuple | frozenset):
        for item in x:
            _require_input(item)
    elif not isinstance(x, Hashable):
        raise TypeError(f"a Graph takes tensors and constants, got {type(x).__name__}: pass its tensors one by one")


class _GraphBuild(threading.local):
    backward: Callable[..., None] | None = None  # in place of ``Node.backward``, in a graph's build


_thread = of_threads(_GraphBuild())
#: Threads' builds that are under way: the first sets ``Node.backward``, the last back.
_building: dict[object, None] = {}
_lock = threading.RLock()
_plain: list[Callable[..., None]] = []  # what it was; at most one


@contextmanager
def _backward_is(run: Callable[..., None]) -> Iterator[None]:
    """Inside the ``with``, this thread's ``loss.backward()`` is ``run(loss)``."""
    try:
        with among(_building, None), holding(_thread, "backward", run):
            with _lock, uninterrupted():
                if not _plain:
                    _plain.append(Node.backward)
                    Node.backward = _this_threads(Node.backward)
            yield
    finally:
        with _lock, uninterrupted():
            if not _building and _plain:
                Node.backward = _plain.pop()


def _this_threads(plain: Callable[..., None]) -> Callable[..., None]:
    def backward(self: Node, *args: Any, **kwargs: Any) -> None:
        (_thread.backward or plain)(self, *args, **kwargs)

    return backward
