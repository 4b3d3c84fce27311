"""``amp.debugging.bisect``: the few functions, or layers, that must run in float32 for a training run to go well."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, TypeVar

import numpy as np
import wrapt

from clamp import bridge, debug
from clamp.bridge import Module
from clamp.casting.policy_table import CastPolicy, PolicyTable, default_table
from clamp.casting.regions import Region, casting_region, changed_regions, in_region
from clamp.debug.callsite import OpNames
from clamp.debug.dry_run import check_step, same_start
from clamp.interrupts import holding, undoing

T = TypeVar("T")

FOUND, HOLDS_UNDER_AMP, FAILS_IN_FLOAT32 = "found", "holds under AMP", "fails in float32"

_IN_16_BITS = (CastPolicy.HALF, CastPolicy.PROMOTE, CastPolicy.MATCH)


@dataclass(frozen=True)
class Bisection:
    """Functions or layers that must run in float32. ``print`` it: it is the line to paste.

    Attributes:
        by: ``"function"`` or ``"module"``.
        verdict: ``"found"``; ``"holds under AMP"``, nothing has to be in float32; or ``"fails in float32"``, it does
            not help to compute all of them in float32.
        culprits: names of functions, or paths of layers.
        candidates: all that computed in 16 bits.
        runs: how often the training was run.
        rules: what to pass to ``amp.init(modules=)``, where ``by`` is ``"module"`` and paths tell the layers apart: the
            culprits, layers in them that need not follow them, and the rules that there were.
    """

    by: str
    verdict: str
    culprits: tuple[str, ...]
    candidates: tuple[str, ...]
    runs: int
    rules: Mapping[str, str] = field(default_factory=dict)

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that must run in float32, for ``custom_black_list``."""
        return self.culprits if self.by == "function" else ()

    @property
    def modules(self) -> tuple[str, ...]:
        """The layers that must."""
        return self.culprits if self.by == "module" else ()

    def __str__(self) -> str:
        what = "functions" if self.by == "function" else "layers"
        if self.verdict == HOLDS_UNDER_AMP:
            return f"The metric holds under AMP: none of {len(self.candidates)} {what} has to run in float32."
        if self.verdict == FAILS_IN_FLOAT32:
            other = "by='function' switches what no layer calls" if self.by == "module" else "the cause is another one"
            return f"The metric does not hold with all {len(self.candidates)} {what} in float32 either: {other}."
        count = f"# {len(self.culprits)} of {len(self.candidates)} {what}, found in {self.runs} runs"
        if self.by == "function":
            names = ", ".join(f'"{name}"' for name in self.culprits)
            return f"amp.init(custom_black_list=[{names}])  {count}"
        if self.rules:
            rules = ", ".join(f'"{pattern}": "{dtype}"' for pattern, dtype in self.rules.items())
            return f"amp.init(modules={{{rules}}})  {count}"
        return f'with amp.autocast(dtype="float32"):  # around the call of {", ".join(self.culprits)}\n    ...  {count}'

    __repr__ = __str__


def bisect(
    step_fn: Callable[[], Any],
    metric: Callable[[Any], Any] | None = None,
    *,
    by: str = "function",
    tolerance: float = 0.01,
) -> Bisection:
    """Finds the few functions, or layers, that must run in float32 for a metric to hold: none can be left out.

    ::

        print(amp.debugging.bisect(train_100_steps, lambda loss: loss < 0.3))
        # amp.init(custom_black_list=["softmax"])  # 1 of 14 functions, found in 6 runs
        print(amp.debugging.bisect(train_100_steps, lambda loss: loss < 0.3, by="module"))
        # amp.init(modules={"layers.2": "float32"})  # 1 of 9 layers, found in 5 runs

    The training is run once as it is, once with all candidates in float32, and then with halves of them. The last of
    the shortest row of candidates with which the metric holds is needed; it stays in float32, and the rest are searched
    likewise, until what has been found suffices: binary splitting (F. K. Hwang, "A method for detecting all defective
    members in a population by group testing", JASA 67, 1972), for what must be all together as in delta debugging
    (A. Zeller, R. Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28, 2002). For k culprits
    among n that is k * (log2(n) + 1) runs at most, rounded up, besides the first two. Where more float32 can also make
    the metric fail, what is found is enough, but may have more than it takes. Whatever is found has been tried.

    Args:
        step_fn: makes model and optimizer anew, trains for some steps, and returns what the metric looks at. It calls
            ``amp.init`` itself, or runs under the handle or region around. Each run begins with the same random numbers
            of ``np.random`` and ``random``, and the same loss scale.
        metric: says of what ``step_fn`` returned whether it holds, as a bool; or gives a number, which holds if it
            differs from that of float32 by at most ``tolerance`` of it. None: the result is the number. A
            FloatingPointError of ``step_fn``, as of a step whose loss scale is at its floor, is one that does not.
        by: ``"function"`` or ``"module"``.
        tolerance: for a metric that is a number.

    Raises:
        TypeError: ``step_fn`` is no function, or returns nothing; the metric is neither a bool nor a number.
        ValueError: ``by`` is neither; or nothing was computed in 16 bits.
    """
    check_step(step_fn, "amp.debugging.bisect", "trains for some steps")
    if by not in ("function", "module"):
        raise ValueError(f'by must be "function" or "module", got {by!r}')
    regions: type[FunctionRegions] | type[LayerRegions] = FunctionRegions if by == "function" else LayerRegions
    runs = 0

    def run(regions: FunctionRegions | LayerRegions) -> bool | float:
        nonlocal runs
        runs += 1
        with regions.opened(), undoing() as undo:
            undo.callback(gc.collect)  # the model, and the optimizer, which takes a place of the handle's
            undo.callback(_shut_down_other_than, debug.session.active_handle())
            try:
                with same_start(*bridge.in_reach(step_fn)):
                    return _as_metric(step_fn(), metric)
            except FloatingPointError:
                return float("nan") if metric is None else False

    seen = regions()
    debug.session.ensure_patched()
    under_amp = run(seen)
    names = seen.candidates()
    if not names:
        raise ValueError(
            "step_fn computed nothing in 16 bits: call amp.init() in it or before it, or compute in a region of "
            "amp.autocast()" + (", in layers" if by == "module" else "")
        )
    in_float32 = run(regions(names))

    def holds(value: bool | float) -> bool:
        if isinstance(value, bool):
            return value
        return isfinite(value) and abs(value - in_float32) <= tolerance * abs(in_float32)

    verdict, culprits = FOUND, list[str]()
    if not holds(in_float32):
        verdict = FAILS_IN_FLOAT32
    elif holds(under_amp):
        verdict = HOLDS_UNDER_AMP
    else:
        culprits = find_culprits(list(names), lambda these: holds(run(regions(these))))
    rules = seen.rules(culprits) if isinstance(seen, LayerRegions) else {}
    return Bisection(by, verdict, tuple(names[one] for one in culprits), tuple(names.values()), runs, rules)


def find_culprits(candidates: Sequence[T], holds: Callable[[Sequence[T]], bool]) -> list[T]:
    """Candidates with which it holds, and of which none can be left out, where it holds with all and not with none.

    Calls ``holds`` at most ``ceil(log2(n)) + 1`` times for each of them.
    """
    found: list[T] = []
    rest = list(candidates)
    while rest and not (found and holds(found)):
        fails, suffices = 0, len(rest)  # how many of the rest, beside those found
        while suffices - fails > 1:
            middle = (fails + suffices) // 2
            if holds([*found, *rest[:middle]]):
                suffices = middle
            else:
                fails = middle
        found.append(rest[fails])
        rest = rest[:fails]
    return found


def _shut_down_other_than(handle: Any) -> None:
    if debug.session.active_handle() is not handle:
        debug.session.shutdown()


def _as_metric(result: Any, metric: Callable[[Any], Any] | None) -> bool | float:
    nothing = (
        "step_fn returned None, and the metric is formed of what it returns: return the loss of its last step, say"
    )
    if result is None and metric is None:
        raise TypeError(nothing)
    try:
        found = result if metric is None else metric(result)
    except TypeError as error:
        if result is None:
            raise TypeError(nothing) from error
        raise
    if isinstance(found, bool | np.bool_):
        return bool(found)
    value = getattr(found, "value", found)
    host = value.to_host() if hasattr(value, "to_host") else value
    if host is not None:
        with suppress(TypeError, ValueError):
            return float(np.asarray(host, np.float64).reshape(()))
    raise TypeError(
        f"a metric is a bool or a number, got {type(found).__name__}: pass metric=, a function of what step_fn returns"
    )


# ---------------------------------------------------------------------------------------------- parts in float32


def _called_in_16_bits(region: Region) -> Iterable[str]:
    """Full names of the functions that have computed in 16 bits in a region."""
    if region.dtype == "float32":
        return []
    table = default_table()
    return [name for name in region.castings if name in table and region.policy_of(table[name]) in _IN_16_BITS]


class FunctionRegions:
    """Regions in which some functions compute in float32, whatever the region around.

    Args:
        in_float32: their names.
    """

    def __init__(self, in_float32: Iterable[str] = ()) -> None:
        self._in_float32 = tuple(in_float32)
        self._regions: list[Region] = []
        self._tables: dict[PolicyTable, PolicyTable] = {}

    def opened(self) -> AbstractContextManager[None]:
        """Inside the ``with``, they hold."""
        return changed_regions(self._changed)

    def candidates(self) -> dict[str, str]:
        """The functions that have computed in 16 bits, in the order of first calls, each as it is called."""
        names = (name.rpartition(".")[2] for region in self._regions for name in _called_in_16_bits(region))
        return {name: name for name in names}

    def _changed(self, region: Region) -> Region:
        policies = self._tables.get(region.policies) or region.policies.customized((), self._in_float32)
        self._tables[region.policies] = self._tables[policies] = policies
        self._regions.append(replace(region, policies=policies))  # with a list of its own of functions that are called
        return self._regions[-1]


class LayerRegions:
    """Regions that each call of a layer opens: in float32 for some layers, as around for the others.

    So an op is in the region of the innermost layer around it; layers in a layer have their own.

    Args:
        in_float32: names of layers, as ``OpNames.layer`` gives them.
    """

    def __init__(self, in_float32: Iterable[str] = ()) -> None:
        self._ops = OpNames()
        self._in_float32 = frozenset(in_float32)
        self._regions: dict[tuple[str, int], Region] = {}  # by the name of a layer, and the region outside of layers
        self._around: dict[int, Region] = {}  # by the id of a region of a layer, that one
        self._paths: dict[str, str] = {}

    def opened(self) -> AbstractContextManager[None]:
        """Inside the ``with``, they hold."""
        return holding(Module, "__call__", wrapt.FunctionWrapper(vars(Module)["__call__"], self._called))

    def candidates(self) -> dict[str, str]:
        """The layers that have computed in 16 bits, in the order of first calls, with their paths."""
        self._paths = self._ops.paths()
        return {
            name: self._paths[name] for (name, _), region in self._regions.items() if any(_called_in_16_bits(region))
        }

    def rules(self, culprits: Sequence[str]) -> dict[str, str]:
        """The rules for modules with which these candidates, and no others, compute in float32; none where paths do not
        tell them from others."""
        regions = {name: region for (name, _), region in self._regions.items()}
        # The name of a layer stands for a path that it has not: a model's, or that of one in none.
        patterns = {name: "" if path == name else path for name, path in self._paths.items() if name in regions}
        if any(list(patterns.values()).count(patterns[one]) > 1 or " (" in patterns[one] for one in culprits):
            return {}
        found = {path: "float32" for one in culprits for path in patterns[one].split(", ")}  # of several, made one
        inside = tuple([path and f"{path}." for path in found])
        for name, region in regions.items():
            if patterns[name].startswith(inside) and any(_called_in_16_bits(region)):
                found.setdefault(patterns[name], region.dtype)
        before = [rule for region in regions.values() if region.modules is not None for rule in region.modules.rules]
        found = dict(sorted(found.items(), key=lambda one: (-one[0].count("."), one[0] == "")))  # the inner ones first
        return found | {rule.pattern: rule.dtype for rule in before if rule.pattern not in found}

    def _called(self, wrapped: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer = casting_region()
        if outer is None:
            return wrapped(*args, **kwargs)
        with in_region(self._region(module, self._around.get(id(outer), outer))):
            return wrapped(*args, **kwargs)

    def _region(self, module: Any, around: Region) -> Region:
        key = name, _ = self._ops.layer((module,)), id(around)
        if key not in self._regions:
            changes: dict[str, Any] = {"dtype": "float32", "is_wide": True} if name in self._in_float32 else {}
            self._regions[key] = replace(around.inside(module), **changes)
            self._around[id(self._regions[key])] = around
        return self._regions[key]
