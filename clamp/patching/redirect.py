"""Functions that run something else for whoever holds them.

A function is held wherever a program likes, and long before AMP is there: ``self.criterion = ag.mse_loss``, a table of
activations, a default argument, a partial, ``step = optimizer.step``. So nothing is put in its place. Its code is
exchanged for one that takes the same arguments and hands them to a wrapper; the function stays the object that it was,
with its name and signature, under whatever names it has. What the wrapper calls is a copy, which has netcl's own code.

wrapt's wrappers stand only where this cannot be done: on what a class has of another, on what is no plain function of
Python's, and where a user decorates. `Bindings` notes what of either was done, and undoes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import wrapt
from netcl.autograd import bf16_ops, ops, shape_ops

from clamp.bridge.netcl_functions import REDIRECTED, is_netcls, is_redirecting, own_copy
from clamp.casting.regions import around_here
from clamp.patching import tensors
from clamp.patching.wrap import Installed, Wrapper, passes_of

_POSITIONAL, _KEYWORDS = 4, 8  # inspect.CO_VARARGS, CO_VARKEYWORDS


class Redirected:
    """A function that runs something else in place of its own code, between ``put`` and ``undo``.

    Args:
        function: a plain Python function.
        wrapper: in wrapt's form, called with a function that has the function's own code.
        how: what the wrapper gets. ``"wrapped"``: all arguments that can be passed by position are, those that have
            their default, too; ``"more"``: so, and any keywords that the own code does not take; ``"open"``: the
            arguments as they were passed; ``"bound"``: so, less the first, the object that the function is bound to;
            ``"plain"``: it is called as the function is, after its own code. What is shown is always the own signature.
        passes: asked with all arguments where casts are off, ahead of the wrapper: whether to run the own code at once.
            For ``"wrapped"`` and ``"more"``.
        scope: the global names that the own code sees; the function's if not given.
    """

    def __init__(
        self,
        function: FunctionType,
        wrapper: Callable[..., Any],
        how: str = "wrapped",
        *,
        passes: Callable[..., bool] | None = None,
        scope: dict[str, Any] | None = None,
    ) -> None:
        self.function = function
        self.code = function.__code__
        self._own = own_copy(function, scope)
        # What the function stands for where nothing is to come between: its own code, or a plain wrapper.
        self.runs = partial(wrapper, self._own) if how == "plain" else self._own
        own = _shape(self.code)
        names, shape = _parameters(self.code, how)
        # What is shown of a function, where its code tells no more what it takes.
        shown = shape == own or hasattr(function, "__wrapped__") or hasattr(function, "__signature__")
        self._shown: dict[str, Any] = {} if shown else {"__signature__": inspect.signature(self._own)}
        self._shown["__wrapped__"] = self._own
        self._ours = _calling(
            self.code,
            names,
            _template(shape, len(self.code.co_freevars), how, passes is not None),
            {
                "<own>": self._own,
                "<wrapper>": wrapper,
                "<passes>": passes,
                "<around>": around_here,
                "<method>": MethodType,
            },
        )

    def put(self) -> None:
        """Redirects the function."""
        for name, value in self._shown.items():
            vars(self.function).setdefault(name, value)  # a user's decorated one names what it decorates
        if is_redirecting(self.code):
            _on_top.append(self)
        self.function.__code__ = self._ours

    def undo(self) -> None:
        """Gives the function its own code back, unless somebody has given it another one meanwhile; where that is one
        of these, put on top of it, that one has the own code to go back to."""
        above = next((x for x in _on_top if x.function is self.function and x.code is self._ours), None)
        if above is not None:
            above.code = above._own.__code__ = self.code
        if self.function.__code__ is self._ours:
            self.function.__code__ = self.code
        if self in _on_top:
            _on_top.remove(self)
        for name, value in self._shown.items():
            if vars(self.function).get(name) is value:
                delattr(self.function, name)


_on_top: list[Redirected] = []  # those in place of functions that were redirected already

Shape: TypeAlias = tuple[int, int, int, bool, bool]


def _shape(code: CodeType) -> Shape:
    """Counts a function's arguments: by position only, in all but by name only, by name only; and whether any."""
    return (
        code.co_posonlyargcount, code.co_argcount, code.co_kwonlyargcount,
        bool(code.co_flags & _POSITIONAL), bool(code.co_flags & _KEYWORDS),
    )  # fmt: skip


def _parameters(code: CodeType, how: str) -> tuple[tuple[str, ...], Shape]:
    """The names of the parameters that stand for a function's own, and their shape."""
    only, positional, keywords, rest, named = _shape(code)
    if how == "open":
        return ("args", "kwargs"), (0, 0, 0, True, True)
    if how == "bound":  # what a class calls by its name may name the object, too
        first = code.co_varnames[0] if positional else "self"
        return (first, "args", "kwargs"), (int(only > 0 or not positional), 1, 0, True, True)
    names = code.co_varnames[: positional + keywords + rest + named]
    more = how == "more"
    return (*names, *["kwargs"][: more and not named]), (only, positional, keywords, rest, named or more)


@cache
def _template(shape: Shape, closed: int, how: str, passes: bool) -> CodeType:
    """Code of a function with parameters 0, 1, ... of a shape, in one line.

    What it calls are constants, strings in angle brackets that stand for it until ``_calling`` puts it there.
    """
    only, positional, keywords, more, named = shape
    names = [f"_{index}" for index in range(positional + keywords + more + named)]
    given, by_name, rest = names[:positional], names[positional:][:keywords], names[positional + keywords :]
    items, extra = [*given, *(f"*{name}" for name in rest[:more])], [f"**{name}" for name in rest[more:]]
    parameters = [*given[:only], *["/"][: bool(only)], *given[only:]]
    parameters += items[positional:] or ["*"][: bool(by_name)]
    parameters += [*by_name, *extra]
    passed = ", ".join([*items, *(f"{name}={name}" for name in by_name), *extra])

    def call(what: str, arguments: str) -> str:
        return f"('<{what}>' if 1 else 0)({arguments})"  # Python warns of a call of a bare constant

    if how == "plain":
        result = call("wrapper", f"'<own>', {passed}")
    else:
        own = "'<own>', None"
        if how == "bound":
            first, *items = items
            own = call("method", f"'<own>', {first}") + f", {first}"
        keyed = ", ".join([*(f"'{name}': {name}" for name in by_name), *extra])
        result = call("wrapper", f"{own}, ({''.join(f'{item}, ' for item in items)}), {{{keyed}}}")
    if passes and how in ("wrapped", "more"):
        none_more = "".join(f"not {name} and " for name in rest[more:])
        at_once = f"'<around>'.get().casts_off and {none_more}{call('passes', ', '.join([*items, *by_name]))}"
        result = f"{call('own', passed)} if {at_once} else {result}"
    # The variables of the closure are named after the return, not used: who looks at the frame has to find them.
    free = [f"free_{index}" for index in range(closed)]
    body = "; ".join([f"return {result}", *free])
    text = f"def make({', '.join(free)}):\n def call({', '.join(parameters)}): {body}"
    return _code_in(_code_in(compile(text, "<redirected>", "exec", dont_inherit=True)))


def _code_in(code: CodeType) -> CodeType:
    return next(constant for constant in code.co_consts if isinstance(constant, CodeType))


def _calling(original: CodeType, names: tuple[str, ...], template: CodeType, constants: dict[str, Any]) -> CodeType:
    """The template with constants and names of parameters, in the place of its own code for tracebacks.

    All of it is on the function's first line, at no column: 0xE8 begins an entry of eight instructions without any.
    """
    names = names[: template.co_nlocals]
    constants |= {f"_{index}": name for index, name in enumerate(names)}

    def put(constant: Any) -> Any:
        if isinstance(constant, tuple):
            return tuple(map(put, constant))
        return constants.get(constant, constant) if isinstance(constant, str) else constant

    units = len(template.co_code) // 2
    return template.replace(
        co_varnames=names,
        co_consts=(*map(put, template.co_consts), REDIRECTED),
        co_freevars=original.co_freevars,
        co_filename=original.co_filename,
        co_firstlineno=original.co_firstlineno,
        co_linetable=b"".join(bytes([0xE8 + min(8, units - start) - 1, 0]) for start in range(0, units, 8)),
        co_name=original.co_name,
        co_qualname=original.co_qualname,
    )


# ---------------------------------------------------------------------------------------------- changes, noted


_MISSING = object()

#: The names of netcl's modules of differentiable functions, and those that these functions see while they run under
#: their wrappers. What reaches their inside has passed a wrapper: what they have imported from other modules is netcl's
#: own there, so that nothing is cast twice, and no call pays twice.
_INSIDE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (vars(module), dict(vars(module))) for module in (ops, shape_ops, bf16_ops)
]

#: redirections of netcl's functions, by function and wrapper: both live as long as the process
_made: dict[tuple[FunctionType, Any], Redirected] = {}


class Bindings:
    """Bindings that are in place while patches are."""

    def __init__(self) -> None:
        self._redirected: dict[int, Redirected] = {}  # by id of the function
        self._undo: list[tuple[Any, str, Any, Any]] = []  # owner, name, what stood there, what we put there

    def __contains__(self, function: object) -> bool:
        """Returns whether a function is redirected."""
        return id(function) in self._redirected

    def redirect(
        self, function: FunctionType, wrapper: Callable[..., Any], how: str = "", passes: bool = False,
        lasts: bool = True,
    ) -> None:  # fmt: skip
        """Lets a function run a wrapper, whoever holds it; under a second name, or a second time, nothing is done.

        Args:
            how: as for `Redirected`; by default ``"wrapped"`` for netcl's functions, and ``"open"`` for a user's, which
                may be cast by its arguments.
            passes: whether the wrapper just calls the function where casts are off, no argument is 16-bit, none is
                written and nobody is told of results.
            lasts: whether the wrapper lives as long as the process: not one that a handle has.
        """
        if function in self:
            return
        how = how or ("wrapped" if is_netcls(function) else "open")
        made = _made.get((function, wrapper))
        if made is None or made.code is not function.__code__:
            noting = tensors.noting_writes(function, wrapper) if how in ("wrapped", "more", "open") else wrapper
            scope = next((seen for names, seen in _INSIDE if names is function.__globals__), None)
            made = Redirected(function, noting, how, passes=passes_of(function) if passes else None, scope=scope)
            if lasts and is_netcls(function):  # a user's function goes when it likes
                _made[function, wrapper] = made
        self._redirected[id(function)] = made  # first: an interrupt after it is undone
        made.put()

    def show_inside(self) -> None:
        """Fills in what netcl's recorded functions see: as their modules stand now, after all is redirected."""
        for names, seen in _INSIDE:
            for name, x in list(names.items()):
                made = self._redirected.get(id(x))
                is_defined_here = type(x) is FunctionType and x.__globals__ is names
                if made is None and is_defined_here:  # a helper, which calls what it calls from inside
                    known: Any = seen.get(name)
                    is_copy = getattr(known, "__globals__", None) is seen and known.__code__ is x.__code__
                    x = known if is_copy else own_copy(x, seen)
                elif made is not None and not is_defined_here:
                    x = made.runs
                seen[name] = x

    def wrap(self, owner: Any, name: str, wrapper: Wrapper, how: str = "", passes: bool = False) -> None:
        """Wraps what has a name: a plain function of a module, and a method that its class defines, for whoever holds
        it; anything else under this name, once."""
        is_module = isinstance(owner, ModuleType)
        stands = getattr(owner, name) if is_module else wrapt.resolve_path(owner, name)[2]
        function = stands.__func__ if type(stands) is classmethod else stands
        own_name = f"{getattr(owner, '__qualname__', '')}.{name}"
        if type(function) is FunctionType and (is_module or function.__qualname__ == own_name):
            self.redirect(function, wrapper, how if is_module else "bound", passes)
        elif not any(ours is stands for _, _, _, ours in self._undo):
            # One that somebody keeps after shutdown passes straight through.
            self.set(owner, name, wrapt.FunctionWrapper(stands, wrapper, enabled=lambda: Installed.now))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets one attribute."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Gives every function its code and every name its object; what a user replaced meanwhile is left alone."""
        for redirected in reversed(self._redirected.values()):
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
