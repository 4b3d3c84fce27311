"""Puts the wrappers over netcl, wherever its functions are bound, and takes them off again.

netcl's modules bind each other's functions at import (``from netcl.ops.matmul import matmul``), and so do
users' scripts. A function is therefore replaced under every name that any loaded module has for it. Closures,
partials and containers are not searched, but for those of a wrapper that a user has put over one of netcl's functions
(user_wrappers.py). Everything done is recorded and undone in reverse.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import netcl
import wrapt

from clamp.bridge import Node, compiler, recorded_ops
from clamp.casting.policy import CastPolicy, Entry, PolicyTable
from clamp.functions import OWNED
from clamp.params import masters
from clamp.patching import collectives, engine, layers, pools, user_wrappers
from clamp.patching.max_norm import clipping
from clamp.patching.recordings import capture, compiled, replay
from clamp.patching.redirect import Redirected
from clamp.patching.user_wrappers import Place, is_users
from clamp.patching.wrap import Installed, Wrapper, netcl_wrapper, owned_wrapper, user_wrapper, writes

_MISSING = object()


@dataclass(frozen=True)
class Registration:
    """A user's function to be cast: ``name`` in ``owner`` (a module or class)."""

    owner: Any
    name: str
    policy: CastPolicy

    @property
    def full_name(self) -> str:
        """``module.name`` or ``module.Class.name``."""
        owner = self.owner
        prefix = owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        return f"{prefix}.{self.name}"


#: netcl functions and methods that are met whatever the lists say
_ENGINE: dict[str, Wrapper] = {
    "netcl.autograd.engine.apply_op": engine.apply_op,
    "netcl.autograd.engine.ones_like": engine.ones_like,
    "netcl.autograd.engine.add_inplace": engine.add_gradients,
    "netcl.autograd.engine.add_out_of_place": engine.add_gradients,
    "netcl.autograd.engine.Tape.backward": engine.tape_backward,
    "netcl.autograd.compiler.jit_compile": engine.jit_compile,
    "netcl.autograd.forward_compiler.ForwardCompiler.compile": compiled.compile_forward,
    "netcl.autograd.forward_compiler.CompiledForward.__call__": compiled.replay_forward,
    "netcl.autograd.graph.CompiledGraph.__enter__": compiled.enter_graph,
    "netcl.autograd.graph.CompiledGraph.__exit__": compiled.exit_graph,
    "netcl.autograd.graph.CompiledGraph.compile": compiled.compile_graph,
    "netcl.autograd.graph.CompiledGraph.replay": compiled.replay_graph,
    "netcl.runtime.capture.KernelCapture.begin": capture.begin,
    "netcl.runtime.capture.KernelCapture.end": capture.end,
    "netcl.runtime.capture.KernelCapture.clear": capture.clear,
    "netcl.runtime.capture.KernelCapture.replay": replay.replay,
    "netcl.runtime.capture.KernelCapture.replay_with_new_buffers": replay.replay_with_new_buffers,
    "netcl.nn.layers._FusedConvReLUTrain.forward": layers.fused_conv_relu,
    "netcl.nn.containers.GELU.forward": layers.gelu,
    "netcl.core.memory.get_persistent_pool": pools.of_queue,
    "netcl.core.tensor.Tensor.to_host": engine.to_host,
    "netcl.core.tensor.Tensor.from_host": engine.from_host,
    "netcl.core.tensor.Tensor.from_shape": engine.from_shape,
    "netcl.ops.bf16_act.bf16_to_host": engine.bf16_to_host,
    "netcl.core.transfer.write": engine.transfer_write,
    "netcl.core.transfer.copy": engine.transfer_write,
    "netcl.core.transfer.fill": engine.transfer_write,
    "netcl.distributed.collectives.all_reduce": collectives.all_reduce,
    "netcl.distributed.collectives.all_reduce_p2p": collectives.all_reduce,
    "netcl.distributed.collectives.broadcast": collectives.broadcast,
    "netcl.amp.master_param": masters.master_param,
    "netcl.optim.ema.ModelEMA.update": masters.in_fp32,
    "netcl.optim.ema.ModelEMA.copy_to_model": masters.in_fp32,
    "netcl.optim.ema.ModelEMA.restore": masters.in_fp32,
    "netcl.optim.ema._clone": masters.in_fp32,
    "netcl.optim.clip.clip_grad_norm": engine.clip_gradients,
    "netcl.optim.clip.clip_grad_norm_device": engine.clip_gradients,
}

#: functions and methods of netcl's that the faces of ``clamp.compat`` answer for
_FACES: dict[str, Wrapper] = {}


def answers_for(*names: str) -> Callable[[Wrapper], Wrapper]:
    """Registers a wrapper for functions and methods of netcl's, by full name, for as long as patches are installed."""

    def register(wrapper: Wrapper) -> Wrapper:
        _FACES.update(dict.fromkeys(names, wrapper))
        return wrapper

    return register


#: where netcl keeps its differentiable functions
_RECORDED_MODULES = ("netcl.autograd.ops", "netcl.autograd.shape_ops", "netcl.autograd.bf16_ops")

_OPTIMIZERS = tuple(
    f"netcl.optim.{module}.{name}"
    for module, name in (
        ("sgd", "SGD"),
        ("momentum", "Momentum"),
        ("adam", "Adam"),
        ("adamw", "AdamW"),
        ("rmsprop", "RMSProp"),
    )
)


#: methods of optimizers that are met besides ``step``
_OPTIMIZER_METHODS: dict[str, Wrapper] = {
    "zero_grad": masters.zero_grad,
    "state_dict": masters.with_new_parameters,
    "load_state_dict": masters.with_new_parameters,
}


class _OwnStep(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """The guarded ``step`` of one optimizer."""


class Patches:
    """The wrappers of one ``init``, from ``install`` to ``remove``.

    Args:
        policies: which function runs in which precision.
        registrations: the user's functions to cast.
        step: wrapper of every optimizer's ``step``.
        functions: wrappers of more netcl functions, by full name.
    """

    def __init__(
        self,
        policies: PolicyTable,
        registrations: Iterable[Registration],
        step: Wrapper,
        functions: Mapping[str, Wrapper] | None = None,
    ) -> None:
        self._policies = policies
        self._functions = {"netcl.distributed.data_parallel.sync_grads": collectives.sync_grads, **(functions or {})}
        self._registrations = list(registrations)
        self._step = clipping(step)
        self._wrappers: dict[int, tuple[Any, Any]] = {}  # id of the original -> (original, wrapper)
        self._undo: list[tuple[Any, str, Any, Any]] = []  # owner, name, what stood there, what we put there
        self._filled: list[tuple[Place, Any]] = []  # inside wrappers of the user's, and what we put there
        self._methods: dict[tuple[type, str], Any] = {}  # what stands for methods of optimizers
        self._redirected: dict[int, Redirected] = {}  # functions ``step``, by id

    # ------------------------------------------------------------------------------------------ install

    def install(self) -> None:
        """Wraps everything; on an error nothing stays wrapped."""
        try:
            for name, wrapper in (_ENGINE | self._functions).items():
                self._wrap_attribute(*_resolve(name), wrapper)
            self._wrap_faces(sys.modules)
            for name in _OPTIMIZERS:
                self.wrap_step(_resolve(name)[2])
            self._wrap_listed()
            self._wrap_unlisted(list(sys.modules.values()))
            for registration in self._registrations:
                if registration.full_name not in self._policies:
                    wrapper = user_wrapper(registration.name, registration.policy)
                    self._wrap_registered(registration, wrapper)
            self._fill_users_wrappers()
            self._rebind({key: wrapper for key, (_, wrapper) in self._wrappers.items()})
            self._set(Node, "backward", engine.node_backward)
            self._set(recorded_ops, "maybe_cast_tensor", engine.keep_tensor)
            self._set(compiler, "_COMPILER_CACHE", engine.FloatKernels(compiler._COMPILER_CACHE))
            Installed.now = True
            _set_active(self)
        except BaseException:
            self.remove()
            raise

    def _wrap_faces(self, modules: Iterable[str]) -> None:
        for name, wrapper in _FACES.items():
            if any(name.startswith(f"{module}.") and module != "netcl" for module in modules):
                self._wrap_attribute(*_resolve(name), wrapper)

    def _wrap_listed(self) -> None:
        for entry in self._policies:
            if entry.module in sys.modules:
                self._wrap_entry(entry)
        for name in {entry.module for entry in self._policies} | set(_netcl_modules()):
            if name not in sys.modules:
                _when_imported(name)

    def _wrap_unlisted(self, modules: Iterable[types.ModuleType]) -> None:
        """Functions that no list names, those of a newer netcl: 16-bit tensors among their inputs are widened."""
        none = {id(_function_of(entry)) for entry in self._policies if entry.policy is CastPolicy.NONE}
        for module in modules:
            name = getattr(module, "__name__", "")
            if not name.startswith("netcl.") or f"{name}.*" in self._policies:
                continue
            for function_name, function in list(vars(module).items()):
                entry = Entry(f"{name}.{function_name}", CastPolicy.FLOAT, "on no list")
                if entry.name in self._policies.calls:
                    continue  # what it hands over to is wrapped, and must see the inputs as they are
                if is_users(function) and user_wrappers.original_in(function) is not None:
                    continue  # a wrapper of the user's: what it calls inside is met
                if id(function) not in none and _is_own_function(function, module):
                    self._wrapper_of(function, netcl_wrapper(entry, listed=False))

    def _wrap_entry(self, entry: Entry) -> None:
        original = _function_of(entry)
        if original is None or (entry.policy is CastPolicy.NONE and not writes(original)):
            return  # "*", or a function that this release of netcl does not have
        if is_users(original) and entry.name.startswith("netcl.") and entry.policy is not CastPolicy.NONE:
            inside = user_wrappers.original_in(original, entry.function)
            if inside is None:
                user_wrappers.warn_of(original, entry.name)
                self._wrapper_of(original, netcl_wrapper(entry))
            original = inside or user_wrappers.defined_behind(entry)
            if original is None:
                return
        wrapper: Wrapper
        if entry.policy is CastPolicy.NONE:
            wrapper = engine.as_it_is
        elif entry.in_place:
            wrapper = engine.in_place
        elif entry.name in OWNED:
            wrapper = owned_wrapper(entry, OWNED[entry.name])
        elif entry.name.startswith("netcl."):
            wrapper = netcl_wrapper(entry)
        else:
            wrapper = user_wrapper(entry.function, entry.policy)
        self._wrapper_of(original, wrapper)

    def _fill_users_wrappers(self) -> None:
        """Puts clamp's functions into the wrappers of the user's that stand under names of netcl's."""
        ours = {id(wrapper) for _, wrapper in self._wrappers.values()}  # a registered function's stands there already
        for place in user_wrappers.places(x for x in _users_in_netcl() if id(x) not in ours):
            if id(place.value) in self._wrappers:
                wrapper = self._wrappers[id(place.value)][1]
                self._filled.append((place, wrapper))
                place.put(wrapper)

    def _wrap_registered(self, registration: Registration, wrapper: Wrapper) -> None:
        owner = registration.owner
        if isinstance(owner, types.ModuleType):
            # Set here, not only by _rebind: a module need not be in sys.modules.
            self._set(owner, registration.name, self._wrapper_of(getattr(owner, registration.name), wrapper))
        else:
            self._wrap_attribute(*wrapt.resolve_path(owner, registration.name), wrapper)

    def _wrapper_of(self, original: Any, wrapper: Wrapper) -> Any:
        """The wrapper object of a function; a function with two names keeps the first entry's."""
        if id(original) not in self._wrappers:
            wrapper = engine.noting_writes(original, wrapper)
            self._wrappers[id(original)] = (original, wrapt.FunctionWrapper(original, wrapper))
        return self._wrappers[id(original)][1]

    def _wrap_attribute(self, owner: Any, name: str, original: Any, wrapper: Wrapper) -> None:
        if isinstance(owner, types.ModuleType):
            self._wrapper_of(original, wrapper)
        else:
            self._set(owner, name, wrapt.FunctionWrapper(original, wrapper))

    def wrap_step(self, optimizer_class: type) -> None:
        """Puts the step guard over ``step`` of the class that defines it for this optimizer class.

        ``zero_grad`` gets to know the gradients of 16-bit parameters, ``state_dict`` the parameters added meanwhile.
        """
        for name, wrapper in _OPTIMIZER_METHODS.items():
            owner = next((cls for cls in optimizer_class.__mro__ if name in vars(cls)), None)
            if owner is not None:
                self._wrap_method(owner, name, wrapper)
        owner = next((cls for cls in optimizer_class.__mro__ if "step" in vars(cls)), None)
        if owner is None:
            return
        step, guarded = vars(owner)["step"], capture.as_host_step(self._step)
        if not isinstance(step, types.FunctionType):
            self._wrap_method(owner, "step", guarded)
        elif id(step) not in self._redirected:
            self._redirected[id(step)] = Redirected(step, guarded)

    def _wrap_method(self, owner: type, name: str, wrapper: Wrapper) -> None:
        method = vars(owner)[name]
        if method is not self._methods.get((owner, name)):
            self._methods[owner, name] = wrapt.FunctionWrapper(method, wrapper)
            self._set(owner, name, self._methods[owner, name])

    def wrap_own_step(self, optimizer: Any) -> None:
        """Puts the step guard over a ``step`` that stands on the optimizer itself and hides that of its class."""
        step = getattr(optimizer, "__dict__", {}).get("step")
        if step is None or isinstance(step, _OwnStep):
            return
        guarded = capture.as_host_step(self._step)
        reference = weakref.ref(optimizer)

        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return guarded(wrapped, reference(), args, kwargs) if Installed.now else wrapped(*args, **kwargs)

        self._set(optimizer, "step", _OwnStep(step, call))

    def module_imported(self, module: types.ModuleType) -> None:
        """A module of netcl's, or one named in a list, has just been imported: wrap what is listed of it."""
        before = set(self._wrappers)
        self._wrap_faces([module.__name__])
        for entry in self._policies:
            if entry.module == module.__name__:
                self._wrap_entry(entry)
        self._wrap_unlisted([module])
        if new := self._wrappers.keys() - before:
            self._rebind({key: self._wrappers[key][1] for key in new})

    # ------------------------------------------------------------------------------------------ rebinding

    def _rebind(self, replacements: dict[int, Any]) -> None:
        """Replaces objects, by id, under every name that a loaded module has for them.

        The modules that define netcl's recorded functions keep what they imported themselves: whatever reaches
        the inside of one of these functions has passed its wrapper, and need not pay for a second one.
        """
        for module in _searched_modules():
            only_own = module.__name__ in _RECORDED_MODULES
            for name, value in list(vars(module).items()):
                replacement = replacements.get(id(value))
                if replacement is not None and not (only_own and value.__module__ != module.__name__):
                    self._set(module, name, replacement)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)

    def remove(self) -> None:
        """Restores every name to the identical object it had; what a user replaced meanwhile is left alone."""
        capture.abandon()
        Installed.now = False
        _set_active(None)
        for redirected in self._redirected.values():
            redirected.undo()
        self._redirected.clear()
        for owner, name, original, ours in reversed(self._undo):
            if vars(owner).get(name, _MISSING) is not ours:
                continue
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._undo.clear()
        for place, ours in reversed(self._filled):
            if place.get() is ours:
                place.put(place.value)
        self._filled.clear()
        # Modules imported since install have bound the wrappers themselves.
        originals = {id(wrapper): original for original, wrapper in self._wrappers.values()}
        for module in _searched_modules():
            for name, value in list(vars(module).items()):
                if id(value) in originals:
                    setattr(module, name, originals[id(value)])
        self._wrappers.clear()


def _function_of(entry: Entry) -> Any:
    """The function an entry names, as it stands now; None if it is not there."""
    return getattr(sys.modules.get(entry.module), entry.function, None)


def _users_in_netcl() -> list[Any]:
    """What stands in netcl's modules and is not netcl's."""
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "netcl"]
    return [value for module in modules for value in list(vars(module).values()) if is_users(value)]


def _is_own_function(function: Any, module: types.ModuleType) -> bool:
    """Whether a module's attribute is a public function that the module itself defines."""
    return inspect.isfunction(function) and function.__module__ == module.__name__ and function.__name__[0] != "_"


def _resolve(full_name: str) -> tuple[Any, str, Any]:
    """Owner, name and object of ``package.module.function`` or ``package.module.Class.method``."""
    module_name, _, path = full_name.rpartition(".")
    while True:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            module_name, _, head = module_name.rpartition(".")
            path = f"{head}.{path}"
            continue
        # netcl.ops.matmul, the module, is hidden behind netcl.ops.matmul, the function.
        owner, name, original = wrapt.resolve_path(sys.modules[module.__name__], path)
        return owner, name, original


def _netcl_modules() -> list[str]:
    """Names of all modules of the installed netcl, loaded or not."""
    folder = Path(netcl.__file__).parent
    paths = (path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py"))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def _searched_modules() -> list[types.ModuleType]:
    """Loaded modules in which names are rebound: all but clamp's own, which must keep netcl's originals."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and not name.startswith("clamp.") and name != "clamp"
    ]


# ---------------------------------------------------------------------------------------------- late imports

_active: weakref.ref[Patches] | None = None
_hooked: set[str] = set()


def _set_active(patches: Patches | None) -> None:
    """Tells the post-import hooks which patches are in place."""
    global _active
    _active = None if patches is None else weakref.ref(patches)


def _when_imported(module: str) -> None:
    """Meets a module when it is imported. wrapt's hooks cannot be taken off, so there is one for each name."""
    if module in _hooked:
        return
    _hooked.add(module)
    wrapt.register_post_import_hook(_imported, module)


def _imported(module: types.ModuleType) -> None:
    _hooked.discard(module.__name__)  # wrapt drops a hook that it has called
    patches = _active() if _active is not None else None
    if patches is not None:
        patches.module_imported(module)
