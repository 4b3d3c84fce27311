"""netcl's compiled passes: launches recorded once and replayed on other inputs' buffers.

``ForwardCompiler`` compiles a forward pass, ``CompiledGraph`` a training step or a part of one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from netcl.autograd.graph import CompiledGraph
from netcl.runtime.capture import KernelCapture

from clamp import bridge
from clamp.bridge import Tensor
from clamp.interrupts import With
from clamp.ops.cast import cast
from clamp.params import gradient_marks
from clamp.params.weight_cache import weight_cache
from clamp.patching.patch_registry import meets
from clamp.recordings.arguments import around
from clamp.recordings.capture import drop_if_running, recording_of, running_of
from clamp.recordings.memory import dependencies_of
from clamp.recordings.replay import ReplayPlan
from clamp.recordings.watched_state import is_same

_MODES = ("training", "_training")

# ---------------------------------------------------------------------------------------------- forward passes

# What was recorded is kept on netcl's own objects: a plan may lead back to what holds it, through a host step, and a
# weak dictionary would then keep both for ever.


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
    x, dtype = new_input, getattr(instance, "_clamp_dtype", "float32")  # netcl's own are of float32
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
