"""Everything public in the installed netcl is on a list, and the wrappers stand wherever users find its functions."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import netcl
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.cluster import ops as cluster
from netcl.distributed import collectives
from netcl.nn import functional
from netcl.nn.layers import Module
from netcl.optim import clip

from clamp import amp
from clamp.bridge import Node, Parameter, Tensor
from clamp.bridge.netcl_functions import is_redirecting
from clamp.casting.policy_table import CastPolicy, PolicyTable, default_table, parse_list
from clamp.casting.registry import OWNED
from clamp.patching import patch
from clamp.patching.patch_registry import netcl_modules
from tests.reference import quantize, to_device, to_numpy


@cache
def modules() -> dict[str, types.ModuleType]:
    """Every module of the installed netcl, imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in netcl_modules():
            importlib.import_module(name)
    return {name: sys.modules[name] for name in netcl_modules()}


@cache
def public() -> dict[str, Any]:
    """Every public function and class that a module of netcl defines, by full name.

    Layers are left out: they compute through functions, and tests/test_models.py runs each of them.
    """
    found: dict[str, Any] = {}
    for module_name, module in modules().items():
        for name, x in vars(module).items():
            is_ours = getattr(x, "__module__", None) == module_name and not name.startswith("_")
            if is_ours and (inspect.isfunction(x) or (inspect.isclass(x) and not issubclass(x, Module))):
                found[f"{module_name}.{name}"] = x
    return found


def resolve(full_name: str) -> Any:
    """What a full name stands for; None if netcl has nothing of that name."""
    module_name, _, name = full_name.rpartition(".")
    if module_name in modules():
        return modules()[module_name] if name == "*" else vars(modules()[module_name]).get(name)
    owner = resolve(module_name) if module_name else None
    return vars(owner).get(name) if inspect.isclass(owner) else None


def decided(table: PolicyTable) -> set[int]:
    """Ids of all functions that a list names, under whichever of their names."""
    return {id(resolve(name)) for name in (*(entry.name for entry in table), *table.calls)}


def undecided(table: PolicyTable) -> list[str]:
    listed = decided(table)
    return [name for name, x in public().items() if id(x) not in listed and f"{name.rpartition('.')[0]}.*" not in table]


def test_everything_public_is_on_a_list() -> None:
    missing = undecided(default_table())
    assert not missing, f"decide on a policy, or on [none] with a reason, in lists/ for: {missing}"


def test_a_function_that_a_newer_netcl_brings_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def new(x: Tensor) -> Tensor:
        return x

    new.__module__ = "netcl.ops.softmax"
    monkeypatch.setitem(public(), "netcl.ops.softmax.new", new)
    assert undecided(default_table()) == ["netcl.ops.softmax.new"]


def test_everything_listed_is_there() -> None:
    table = default_table()
    names = [*(entry.name for entry in table), *table.calls, *table.calls.values()]
    gone = [name for name in names if resolve(name) is None]
    assert not gone, f"this release of netcl has nothing of these names: {gone}"


def test_nothing_is_listed_twice() -> None:
    counts = Counter(
        entry.name
        for file in files("clamp.lists").iterdir()
        if file.name.endswith(".toml") and file.name not in ("calls.toml", "defects.toml")
        for entry in parse_list(file.read_text(encoding="utf-8"), file.name)
    )
    assert counts.most_common(1)[0][1] == 1, counts.most_common(3)
    policies: dict[int, CastPolicy] = {}
    for entry in default_table():
        if entry.function != "*":
            first = policies.setdefault(id(resolve(entry.name)), entry.policy)
            assert first is entry.policy, f"{entry.name} is another name of a function listed as {first.value}"


def test_a_star_leaves_functions_as_they_are_or_widens_their_inputs() -> None:
    for entry in default_table():
        assert entry.function != "*" or entry.policy in (CastPolicy.NONE, CastPolicy.FLOAT), entry.name


#: methods of tensors and nodes that compute nothing
_NO_OPERATORS = {
    "__init__", "__repr__", "__eq__", "__del__", "from_host", "from_shape", "to_host", "to_host_async", "write",
    "wait", "_clear_pending", "__replace__",
}  # fmt: skip


@pytest.mark.parametrize("cls", [Tensor, Node, Parameter])
def test_every_operator_calls_a_listed_function(cls: type) -> None:
    full = f"{cls.__module__}.{cls.__qualname__}"
    calls = default_table().calls
    methods = {name for name, x in vars(cls).items() if inspect.isroutine(x) and name not in _NO_OPERATORS}
    assert methods == {name.removeprefix(f"{full}.") for name in calls if name.startswith(f"{full}.")}


def test_what_only_calls_a_listed_function_does_call_it() -> None:
    calls = default_table().calls
    for name, target in calls.items():
        caller, called = resolve(name), resolve(target)
        aliases = {alias for alias, x in vars(ag).items() if x is called} | {target.rpartition(".")[2]}
        assert aliases & set(caller.__code__.co_names), f"{name} does not call {target}"


# ------------------------------------------------------------------------------------------ the wrappers


@pytest.fixture
def active() -> Iterator[None]:
    modules()
    with amp.init():
        yield


def wrapped_functions() -> list[tuple[str, Callable[..., Any]]]:
    """Listed functions that clamp must meet, as netcl defines them."""
    entries = [x for x in default_table() if x.policy is not CastPolicy.NONE and x.function != "*"]
    return [(entry.name, resolve(entry.name)) for entry in entries]


def test_every_listed_function_is_redirected() -> None:
    functions = wrapped_functions()
    with amp.init():
        bare = [name for name, function in functions if not is_redirected(function)]
        assert not bare[:20], f"these still run netcl's own: {bare[:20]}"
    left = [name for name, function in functions if is_redirected(function)]
    assert not left[:20], f"shutdown left these: {left[:20]}"
    assert len(functions) > 250


def test_what_only_calls_a_listed_function_is_left_alone(queue: cl.CommandQueue, active: None) -> None:
    """A wrapper there would widen the inputs before the listed function sees them."""
    assert not [name for name in default_table().calls if is_redirected(resolve(name))]
    x = ag.tensor(to_device(queue, np.ones((2, 2)), "bfloat16"))
    assert [functional.silu(x).value.dtype, functional.softmax(x).value.dtype] == ["bfloat16", "float32"]


def is_redirected(x: Any) -> bool:
    return is_redirecting(x.__code__)


def test_operators_run_under_the_policy_of_what_they_call(queue: cl.CommandQueue, active: None) -> None:
    a, b = to_device(queue, np.full((4, 4), 3.0), "float16"), to_device(queue, np.full((4, 4), 2.0), "float16")
    wide = to_device(queue, np.full((4, 4), 2.0))
    for x, y, z in ((a, b, wide), (ag.tensor(a), ag.tensor(b), ag.tensor(wide))):
        got = [x + y, x - y, x * y, x / y, 1 + x, 1 - x, 2 * x, 6 / x, -x, x @ y]
        assert [out.value.dtype for out in got] == ["float16"] * len(got)
        assert [to_numpy(out.value)[0, 0] for out in got] == [5, 1, 6, 1.5, 4, -2, 6, 2, -3, 24]
        assert [(x + z).value.dtype, (z - x).value.dtype, (z @ z).value.dtype] == ["float32", "float32", "float16"]
        assert to_numpy((z - x).value)[0, 0] == -1
    node = ag.tensor(a)
    assert [(node**2).value.dtype, (node < ag.tensor(b)).value.dtype] == ["float32", "float16"]
    assert node[0].value.dtype == ("float16" if "netcl.autograd.getitem" in OWNED else "float32")


# --------------------------------------------------------------------------- what no list names, and what comes late


def test_a_function_that_no_list_names_gets_widened_inputs(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def new(x: Tensor, others: list[Tensor] | None = None) -> Tensor:
        seen.extend(t.dtype for t in (x, *(others or ())))
        return x

    module = modules()["netcl.ops.softmax"]
    new.__module__ = module.__name__
    monkeypatch.setattr(module, "new", new, raising=False)
    x = to_device(queue, np.ones(3), "bfloat16")
    with amp.init():
        assert module.new(x, others=[x]).dtype == "float32"
        assert module.new(x=x).dtype == "float32"
        module.new(to_device(queue, np.ones(3)), others=[x])
    assert seen == ["float32"] * 5
    assert module.new is new


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("conv2d_optimized.conv2d_implicit_gemm", [(2, 3, 8, 8), (4, 3, 3, 3)]),
        ("conv2d_pointwise.conv2d_pointwise", [(2, 3, 8, 8), (4, 3, 1, 1)]),
        ("conv2d_planner.conv2d_backward_planned", [(2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 6, 6)]),
        ("conv2d_dilated.conv2d_dilated", [(2, 3, 8, 8), (4, 3, 3, 3)]),
        ("winograd_fused.conv2d_winograd_fused", [(2, 3, 8, 8), (4, 3, 3, 3)]),
        ("matmul_optimized.matmul_optimized", [(16, 8), (8, 16)]),
    ],
)
def test_kernels_behind_a_function_get_float32(queue: cl.CommandQueue, dtype: str, name: str, shapes: Any) -> None:
    module, function = name.split(".")
    call = vars(modules()[f"netcl.ops.{module}"])[function]
    values = [quantize(np.random.default_rng(i).standard_normal(shape), dtype) for i, shape in enumerate(shapes)]
    with amp.init(dtype=dtype):
        found, expected = (call(*(to_device(queue, x, of) for x in values)) for of in (dtype, "float32"))
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        if other is not None:
            np.testing.assert_array_equal(one.to_host(), other.to_host())


def test_what_takes_float16_only_is_given_it(queue: cl.CommandQueue) -> None:
    x = to_device(queue, np.array([[0.0, 0.0]]), "float16")
    with amp.init():
        y = modules()["netcl.ops.softmax_fp16"].softmax_fp16_safe(x)
        assert y.dtype == "float16"
        np.testing.assert_array_equal(y.to_host(), [[0.5, 0.5]])


def test_a_module_of_netcls_that_is_imported_later_is_met(
    queue: cl.CommandQueue, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that no list knows, in a package of netcl's, imported after init."""
    name = "netcl.ops.of_a_newer_release"
    (tmp_path / "of_a_newer_release.py").write_text(
        "from netcl.core.tensor import Tensor\n"
        "from netcl.ops.softmax import softmax\n"
        "def new(x):\n    return x.dtype\n"
        "def exponential(x: Tensor):\n    return softmax(x)\n"
    )
    monkeypatch.setattr(netcl.ops, "__path__", [*netcl.ops.__path__, str(tmp_path)])
    known = netcl_modules()
    monkeypatch.setattr(patch, "netcl_modules", lambda: [*known, name])
    x = to_device(queue, np.ones(3), "float16")
    try:
        with amp.init():
            late = importlib.import_module(name)
            assert late.new(x) == "float32"
            assert late.softmax(x).dtype == "float32", "clamp's"
        assert late.new(x) == "float16"
        assert not is_redirected(late.softmax)
        assert not is_redirected(late.new)
    finally:
        sys.modules.pop(name, None)
        vars(netcl.ops).pop("of_a_newer_release", None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_functions_that_write_in_place_reach_16_bit_tensors(queue: cl.CommandQueue, dtype: str) -> None:
    with amp.init():
        x = to_device(queue, np.full(8, 3.0), dtype)
        assert cluster.scale_(x, 0.5) is x
        np.testing.assert_array_equal(to_numpy(x), np.full(8, 1.5))
        pair = [to_device(queue, np.full(8, value), dtype) for value in (1.0, 3.0)]
        collectives.all_reduce(pair, op="mean")
        assert [to_numpy(t).tolist() for t in pair] == [[2.0] * 8] * 2
        for function in (clip.clip_grad_norm, clip.clip_grad_norm_device):
            param = Parameter.from_host(queue, np.zeros(4, np.float32))
            param.grad = to_device(queue, np.full(4, 8.0), dtype)
            function(iter([param]), 4.0)
            assert param.grad.dtype == dtype
            np.testing.assert_array_equal(to_numpy(param.grad), np.full(4, 2.0))
