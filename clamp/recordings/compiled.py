"""netcl's compiled passes: launches recorded once and replayed on other inputs' buffers; and its fused functions.

``ForwardCompiler`` compiles a forward pass, ``CompiledGraph`` a training step or a part of one, ``jit_compile`` a chain
of ops element by element into one kernel.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from netcl.autograd.compiler import TraceNode, get_primitive, get_tracing_context
from netcl.autograd.engine import get_current_tape, set_current_tape
from netcl.autograd.graph import CompiledGraph
from netcl.runtime.capture import KernelCapture

from clamp import bridge
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.policy_table import CastPolicy, Entry
from clamp.interrupts import With, holding
from clamp.ops.cast import cast
from clamp.params import gradient_marks
from clamp.params.weight_cache import weight_cache
from clamp.patching.patch_registry import meets
from clamp.patching.wrap import netcl_wrapper
from clamp.recordings.arguments import around, constant_of
from clamp.recordings.capture import drop_if_running, recording_of, running_of
from clamp.recordings.memory import dependencies_of
from clamp.recordings.replay import ReplayPlan
from clamp.recordings.watch import Watch
from clamp.recordings.watched_state import SHARED_GENERATORS, is_same
from clamp.scaling.step_report import warn_user

_MODES = ("training", "_training")

# ---------------------------------------------------------------------------------------------- forward passes

# What was recorded is kept on netcl's own objects: a plan may lead back to what holds it, through a host step, and a
# weak dictionary would then keep both for ever.


def _dtype_of(compiled: Any) -> str:
    """Dtype of the input that a pass was recorded with; for one recorded without clamp, netcl's float32."""
    return getattr(compiled, "_clamp_dtype", "float32")


@meets("netcl.autograd.forward_compiler.ForwardCompiler.compile")
def compile_forward(wrapped: Any, instance: Any, /, model: Any, sample_input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Records a forward pass. netcl knows passes by the shape of their input alone: one of another model, dtype or
    region, or made without clamp, is not handed out again, nor one whose model has changed."""
    plans, key = instance._cache, tuple(sample_input.shape)
    dtype = bridge.canonical_dtype(sample_input.dtype)
    asked = (dtype, around())
    if key in plans:
        plan = plans[key]
        is_it = getattr(plan, "_clamp_asked", None) == asked and is_same(plan._clamp_model, model)
        if not is_it or dependencies_of(plan._capture).change():
            del plans[key]
    before = dict(bridge.own_attributes(model))
    compiled = wrapped(model, sample_input, *args, **kwargs)
    if not hasattr(compiled, "_clamp_plan"):
        # It is a pass in eval mode, whatever the model is used for besides.
        dependencies_of(compiled._capture).of_model(model, before, *_MODES)
        compiled._clamp_dtype, compiled._clamp_model, compiled._clamp_asked = dtype, model, asked
        compiled._clamp_plan = ReplayPlan(compiled._capture, [sample_input])
    return compiled


@meets("netcl.autograd.forward_compiler.CompiledForward.__call__")
def replay_forward(wrapped: Any, instance: Any, /, new_input: Tensor) -> Any:
    """Replays on an input in the dtype that was recorded; another one's buffer would be misread.

    Raises:
        RuntimeError: the model has changed since: a layer's weight is another tensor, or a setting has another value.
        ValueError: the input is not like the one recorded.
    """
    x, dtype = new_input, _dtype_of(instance)
    x = cast(x, dtype) if x.dtype in bridge.STORAGE and dtype in bridge.STORAGE else x
    if not hasattr(instance, "_clamp_plan"):
        return wrapped(x)
    instance._clamp_plan.check([x])
    instance._clamp_plan.launch([x])
    return instance.output_tensor


# ---------------------------------------------------------------------------------------------- training steps


@meets("netcl.autograd.graph.CompiledGraph.__enter__")
def enter_graph(wrapped: Any, instance: CompiledGraph, /) -> CompiledGraph:
    """Begins to record a step, into a list of launches of the graph's own: netcl has one for all graphs.

    Raises:
        RuntimeError: a parameter has a gradient, which every replay would add again.
    """
    if not instance.is_compiled:
        left = [index for index, param in enumerate(instance.params) if param.grad is not None]
        if left:
            raise RuntimeError(
                f"params{left} have gradients already, and a replay would add to what is in their memory then: "
                "call optimizer.zero_grad() before the graph is recorded"
            )
        instance.capture = KernelCapture()
        weakref.finalize(instance, drop_if_running, instance.capture).atexit = False
    entered = wrapped()
    if (recording := running_of(instance.capture)) is not None:
        recording.begun_by = With.here(bridge.NETCLS_FOLDER)
    return entered


@meets("netcl.autograd.graph.CompiledGraph.__exit__")
def exit_graph(wrapped: Any, instance: CompiledGraph, /, *exception: Any) -> bool:
    """Ends the recording and remembers its gradients.

    netcl's own list of them is emptied: its ``replay`` would zero four bytes for every element of them.
    """
    compiled = instance.is_compiled
    try:
        result = wrapped(*exception)
    except BaseException:  # an interrupt
        instance.capture.clear()
        raise
    if instance.is_compiled and not compiled and recording_of(instance.capture) is not None:
        instance._clamp_gradients = gradient_marks.snapshot(instance.params)
        instance.grad_tensors = {}
    return result


@meets("netcl.autograd.graph.CompiledGraph.compile")
def compile_graph(wrapped: Any, instance: CompiledGraph, /, inputs: Iterable[Tensor]) -> None:
    """Prepares a recorded step for replays with other inputs.

    Raises:
        RuntimeError: nothing has been recorded.
        ValueError: an input that no launch reads.
    """
    inputs = list(inputs)
    if not instance.is_compiled:
        raise RuntimeError("the graph has not been recorded: run the step inside `with graph:` before compile()")
    if recording_of(instance.capture) is None:
        wrapped(inputs)
        return
    instance._clamp_plan = ReplayPlan(instance.capture, inputs)
    instance._replay_steps = instance.capture._launches  # which netcl's own `replay` goes through after a shutdown


@meets("netcl.autograd.graph.CompiledGraph.replay")
def replay_graph(wrapped: Any, instance: CompiledGraph, /, new_inputs: Iterable[Tensor]) -> None:
    """Replays a step on other inputs, and leaves its gradients on the parameters.

    Raises:
        RuntimeError: the graph has not been recorded or not compiled, or what the recording depends on has changed.
        TypeError: a 16-bit input for a graph that was recorded without clamp: its kernels read float.
        ValueError: the inputs are not like those recorded.
    """
    inputs = list(new_inputs)
    if hasattr(instance, "_clamp_plan"):
        instance._clamp_plan.check(inputs)
        gradient_marks.restore(instance._clamp_gradients)
        instance._clamp_plan.launch(inputs)
        gradient_marks.restore(instance._clamp_gradients)
        weight_cache.clear()
        return
    if instance.is_compiled and not hasattr(instance, "_replay_steps"):
        raise RuntimeError("call compile(inputs) with the recorded input tensors before replay()")
    if any(x.dtype in bridge.HALF_DTYPES for x in inputs):
        raise TypeError(
            "a graph recorded before amp.init() got a 16-bit input, and its kernels read float: record it after "
            'amp.init(), or pass amp.cast(x, "float32")'
        )
    wrapped(inputs)


# ---------------------------------------------------------------------------------------------- fused functions

_COMPILED = Entry("netcl.autograd.jit_compile", CastPolicy.FLOAT, "netcl compiles kernels of float.")
_MOST_KERNELS = 32  # of one function
_MOST_PLACES = 24  # that are looked at before each call: of more (a model's settings), it takes longer than its ops
_LARGEST = float(np.finfo(np.float32).max)
_ATTRIBUTES = {
    "pow": {"exponent"},
    "elu": {"alpha"},
    "clamp": {"min_val", "max_val"},
    "hardtanh": {"min_val", "max_val"},
}


@meets("netcl.autograd.compiler.jit_compile")
def jit_compile(wrapped: Any, instance: None, /, fn: Callable[..., Any]) -> Any:
    """netcl's compiler makes kernels that read every input as float: what it compiles gets 16-bit inputs widened."""
    fused = FusedFunction(wrapped, fn)

    @functools.wraps(fn)
    def compiled(*args: Any, **kwargs: Any) -> Any:  # a function, as netcl's is: it may be a method, and copied
        return widening(fused, None, args, kwargs)

    widening = netcl_wrapper(_COMPILED, listed=False)
    return compiled


class _Fused(NamedTuple):
    """The kernels for calls of one kind."""

    watch: Watch  # what the function read on the host
    run: Callable[..., Any]  # of netcl's compiler
    read: list[int]  # which nodes among the arguments it reads


class FusedFunction:
    """A function that netcl's compiler fuses, or that runs as it is where that would compute something else.

    netcl traces a function once for the shapes of its arguments. It leaves out arguments by name, takes other objects
    for what they were, and what the function reads outside for constants, and gives a gradient of whatever is in the
    memory to an argument that the function does not read. So it is given here what was traced, of the nodes that are
    read alone, for each state of the host anew.

    Args:
        compile_function: netcl's ``jit_compile``.
        function: of nodes and constants.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, compile_function: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._compile = compile_function
        self._kinds: dict[Hashable, list[_Fused]] = {}  # for each state of the host that there was
        self._kernels = 0
        self._runs_as_is = False
        functools.update_wrapper(self, function)

    def __call__(self, /, *args: Any, tape: Tape | None = None, **kwargs: Any) -> Any:
        """Runs the function, fused if it can be.

        Args:
            tape: where its op, or ops, are recorded.
        """
        nodes: list[Node] = []
        key = None if self._runs_as_is else _key_of(args, kwargs, nodes)
        if key is None:
            return self._as_is(args, kwargs, tape)
        for fused in self._kinds.get(key, ()):
            if fused.watch.holds():
                break
        else:
            made = self._fuse(args, kwargs)
            if made is None:
                result = self._as_is(args, kwargs, tape)
                self._runs_as_is = True  # unless it has raised
                return result
            self._kinds.setdefault(key, []).append(made)
            fused = made
        return fused.run(*[nodes[index] for index in fused.read], tape=tape)

    def _fuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Fused | None:
        """The kernels for calls like this one; None if it cannot be fused."""
        if self._kernels == _MOST_KERNELS:
            name = getattr(self, "__qualname__", "it")
            warn_user(
                f"jit_compile: {name} is compiled anew for call after call. It runs as it is instead, which is right "
                "and slower: pass what changes from call to call as a node"
            )
            return None
        objects = {f"args[{index}]": x for index, x in enumerate(args)} | kwargs
        roots = {"it": self.__wrapped__, **{name: x for name, x in objects.items() if not isinstance(x, Node)}}
        before, inputs = Watch({**SHARED_GENERATORS, **roots}, generators=True), list[TraceNode]()

        def stand_in(x: Any) -> Any:
            if not isinstance(x, Node):
                return x
            inputs.append(TraceNode("input", [], tuple(x.value.shape), x.value.dtype))
            return Node(value=inputs[-1], requires_grad=x.requires_grad)

        try:
            with holding(get_tracing_context(), "active", True):
                traced = self.__wrapped__(*map(stand_in, args), **{name: stand_in(x) for name, x in kwargs.items()})
        except Exception:  # code that asks for more than a shape: it meets it again as it is
            return None
        read, watch = _inputs_of(traced, inputs), Watch(roots)
        if read is None or watch.places > _MOST_PLACES or before.change(libraries=False):
            return None
        self._kernels += 1
        return _Fused(watch, self._compile(lambda *_, **__: traced), read)

    def _as_is(self, args: tuple[Any, ...], kwargs: dict[str, Any], tape: Tape | None) -> Any:
        if tape is None:
            return self.__wrapped__(*args, **kwargs)
        outer = get_current_tape()
        try:
            set_current_tape(tape)
            named = {"tape": tape} if "tape" in inspect.signature(self.__wrapped__).parameters else {}
            return self.__wrapped__(*args, **kwargs, **named)
        finally:
            set_current_tape(outer)


def _key_of(args: tuple[Any, ...], kwargs: dict[str, Any], nodes: list[Node]) -> Hashable | None:
    """Returns what kernels for a call depend on in its arguments, and adds their nodes to ``nodes``.

    None if these are not what kernels of netcl's compiler read: some float32, on one queue. (A node that is being
    traced has no tensor: the function is called in another one, and is fused with that.)
    """
    parts: list[Hashable] = [threading.get_ident(), *kwargs]  # a kernel has one thread's arguments
    for x in (*args, *kwargs.values()) if kwargs else args:  # of every call: short
        if not isinstance(x, Node):
            parts.append(constant_of(x))
            continue
        value = x.value
        if not isinstance(value, Tensor) or value.dtype != "float32" or 0 in value.shape:
            return None
        nodes.append(x)
        parts.append((Node, value.shape))
    value = nodes[0].value if nodes else None
    if value is None or not bridge.on_device(value) or any(x.value.queue is not value.queue for x in nodes[1:]):
        return None
    return tuple(parts)


def _inputs_of(traced: Any, inputs: Sequence[TraceNode]) -> list[int] | None:
    """Numbers what of the inputs a traced result is computed from for netcl's compiler, and returns which these are;
    None where its kernels would not compute that."""
    if not isinstance(traced, Node) or not isinstance(traced.value, TraceNode) or traced.value in inputs:
        return None
    known: dict[int, TraceNode] = {}
    left = [traced.value]
    while left:
        op = left.pop()
        if id(op) not in known:
            op.name = f"node_{len(known)}"  # netcl's, by its id, makes another source each time: none is found on disk
            known[id(op)] = op
            if not (op.op_name == "input" or _is_fusible(op)):
                return None
            left += op.inputs
    read = [index for index, x in enumerate(inputs) if id(x) in known]
    for place, index in enumerate(read):
        inputs[index].attrs["index"] = place
    return read


def _is_fusible(op: TraceNode) -> bool:
    """Returns whether netcl's compiler computes what an op does; its numbers are made such as OpenCL C reads."""
    try:
        arity = get_primitive(op.op_name).arity
    except ValueError:
        return False
    needed = {"scalar"} if "_scalar" in op.op_name else _ATTRIBUTES.get(op.op_name, set())
    for name in needed:
        number = op.attrs.get(name)
        if not isinstance(number, int | float) or not abs(number) <= _LARGEST:
            return False
        op.attrs[name] = float(number)
    return arity in (None, len(op.inputs)) and all(isinstance(x, TraceNode) for x in op.inputs)
