"""PyTorch's way of saying it: ``amp.autocast``, ``custom_fwd`` and ``custom_bwd``, policies by PyTorch's names."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.amp import autocast as netcl_autocast
from netcl.amp import is_autocast_enabled
from netcl.autograd import apply_op
from netcl.autograd.engine import is_grad_enabled
from netcl.ops.matmul import matmul as tensor_matmul
from netcl.optim import SGD

from clamp import amp, session
from clamp.bridge import Node, Tensor
from clamp.params.weight_cache import weight_cache
from tests.networks import batch, loss_of, mlp
from tests.reference import assert_same, to_device, to_numpy

DTYPES = ("float16", "bfloat16")


pytestmark = pytest.mark.usefixtures("shut_down")


@pytest.fixture
def x(queue: cl.CommandQueue) -> Node:
    return ag.tensor(to_device(queue, np.arange(16).reshape(4, 4) / 16))


def product(x: Node) -> str:
    """The dtype of a matrix product here."""
    return ag.matmul(x, x).value.dtype


# ---------------------------------------------------------------------------------------------- autocast


#: What opens a region in which ops cast, and one in which they do not, by face. netcl's is one of clamp's under a
#: handle only, and casts to that one's dtype.
REGIONS: dict[str, tuple[Callable[[str], Any], Callable[[], Any]]] = {
    "pytorch": (lambda dtype: amp.autocast(dtype=dtype), lambda: amp.autocast(enabled=False)),
    "paddle": (lambda dtype: amp.auto_cast(dtype=dtype), lambda: amp.auto_cast(enable=False)),
    "netcl": (lambda dtype: netcl_autocast(), lambda: netcl_autocast(enabled=False)),
    "apex": (lambda dtype: amp.autocast(dtype=dtype), lambda: session.active_handle().disable_casts()),  # type: ignore[union-attr]
}
DOORS = [*itertools.product(["pytorch", "paddle"], [False, True]), ("netcl", True), ("apex", True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("face", "under_a_handle"), DOORS)
def test_regions_nest_and_restore(x: Node, face: str, under_a_handle: bool, dtype: str) -> None:
    """Also where they end with an error. They are of one thread."""
    casts, island = REGIONS[face]
    if under_a_handle:
        amp.init(dtype=dtype)
    else:
        session.ensure_patched()

    def here() -> tuple[str, bool]:
        assert amp.is_autocast_enabled() == is_autocast_enabled()
        return product(x), amp.is_autocast_enabled()

    outside = here()
    assert outside == ((dtype, True) if under_a_handle else ("float32", False))
    with casts(dtype):
        assert (here(), amp.get_autocast_dtype()) == ((dtype, True), dtype)
        with island():
            assert here() == ("float32", False)
            with casts(dtype):
                assert here() == (dtype, True)
            for error in (ValueError, KeyboardInterrupt):
                with pytest.raises(error), casts(dtype), island():
                    raise error
            assert here() == ("float32", False)
            seen: list[Any] = []
            thread = threading.Thread(target=lambda: seen.append(here()))
            thread.start()
            thread.join()
            assert seen == [outside]
        assert here() == (dtype, True)
    assert here() == outside


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_region_has_the_dtype_of_the_one_around_or_its_own(x: Node, dtype: str) -> None:
    other = "bfloat16" if dtype == "float16" else "float16"
    with amp.autocast(dtype=dtype), amp.autocast(enabled=False):
        with amp.autocast():
            assert (product(x), amp.get_autocast_dtype()) == (dtype, dtype)
        with amp.autocast(dtype=other):
            assert (product(x), amp.get_autocast_dtype()) == (other, other)


def test_an_island_takes_half_inputs_without_casting_them(x: Node) -> None:
    with amp.autocast():
        half = ag.matmul(x, x)
        with amp.autocast(enabled=False):
            assert ag.matmul(half, half).value.dtype == "float16"
            assert ag.matmul(amp.cast(half, "float32"), x).value.dtype == "float32"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("face", ["pytorch", "paddle"])
def test_as_a_decorator_also_recursively(x: Node, face: str, dtype: str) -> None:
    @REGIONS[face][0](dtype)
    def forward(depth: int) -> list[str]:
        """The docstring."""
        return [product(x), *(forward(depth - 1) if depth else [])]

    assert forward(2) == [dtype] * 3
    with REGIONS[face][1]():
        assert forward(1) == [dtype] * 2
    assert forward.__doc__ == "The docstring."
    assert product(x) == "float32"


@pytest.mark.parametrize(
    ("name", "decorate"),
    [
        ("half_function", amp.half_function),
        ("float_function", amp.float_function),
        ("promote_function", amp.promote_function),
        ("custom_fwd", amp.custom_fwd),
        ("custom_fwd", amp.custom_fwd(cast_inputs="float32")),
        ("custom_bwd", amp.custom_bwd),
        ("custom_bwd", amp.custom_bwd()),
        ("amp.autocast()", amp.autocast()),
        ("amp.auto_cast()", amp.auto_cast()),
    ],
)
@pytest.mark.parametrize("what", [5, "float32", [len]])
def test_a_decorator_of_what_is_no_function_raises(name: str, decorate: Any, what: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"@{name} decorates a function, got {what!r}")):
        decorate(what)


def _products(x: Node) -> Iterator[str]:
    yield product(x)


async def _later(x: Node) -> str:
    return product(x)


async def _products_later(x: Node) -> AsyncIterator[str]:
    yield product(x)


class _Late:
    def __call__(self, x: Node) -> Iterator[str]:
        yield product(x)


LATE = [_products, _later, _products_later, partial(_products), staticmethod(_products), _Late(), _Late().__call__]


@pytest.mark.parametrize("late", LATE)
def test_what_runs_after_its_call_cannot_be_decorated(late: Any) -> None:
    decorators = [amp.autocast(), amp.auto_cast(), amp.half_function, amp.float_function, amp.promote_function]
    contexts = [amp.init().disable_casts(), amp.NoOpHandle().disable_casts(), amp.debugging.collect_operator_stats()]
    for decorate in (*decorators, *contexts, amp.custom_fwd, amp.custom_bwd):
        with pytest.raises(TypeError, match=r"cannot decorate .*: the body of a generator or coroutine"):
            decorate(late)  # type: ignore[operator]


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "under autocast"])
def test_a_decorated_function_is_inside_of_a_with_of_its_own(inner: bool) -> None:
    """Its casts are those around its call, not those around its decorator."""
    handle = amp.init()

    @handle.disable_casts()  # type: ignore[operator]
    def of_a_call(depth: int) -> list[tuple[bool, str]]:
        here = amp.is_autocast_enabled(), amp.get_autocast_dtype()
        return [here, *(of_a_call(depth - 1) if depth else ())]

    with amp.autocast(dtype="bfloat16") if inner else nullcontext():
        assert of_a_call(2) == [(False, "bfloat16" if inner else "float16")] * 3
        assert amp.is_autocast_enabled()
    assert amp.NoOpHandle().disable_casts()(lambda: 3)() == 3  # type: ignore[operator]


@pytest.mark.parametrize("name", ["_products", "_later", "_products_later"])
def test_what_runs_after_its_call_cannot_be_registered(name: str) -> None:
    for register in (amp.register_half_function, amp.register_float_function, amp.register_promote_function):
        with pytest.raises(TypeError, match=rf"{name} cannot be registered: the body of a generator or coroutine"):
            register(sys.modules[__name__], name)


@pytest.mark.parametrize("region", [amp.autocast, amp.auto_cast])
def test_autocast_without_parentheses_raises(region: Any) -> None:
    with pytest.raises(TypeError, match=rf"write @amp.{region.__name__}\(\), with parentheses"):
        region(_products)
    with pytest.raises(TypeError, match=r"autocast takes no device|enable is 'O1'; pass True or False"):
        region("O1")


def test_class_methods_can_be_decorated(x: Node) -> None:
    class Layer:
        @amp.half_function
        @classmethod
        def dtype_of(cls, y: Node) -> str:
            return f"{cls.__name__} {y.value.dtype}"

    with amp.autocast():
        assert Layer.dtype_of(x) == "Layer float16"


def test_one_object_can_be_entered_again(x: Node) -> None:
    region = amp.autocast()
    for _ in range(2):
        with region, region:
            assert product(x) == "float16"
        assert product(x) == "float32"


def test_it_is_of_one_thread(x: Node) -> None:
    seen: dict[str, str] = {}
    inside, looked = threading.Event(), threading.Event()
    region = amp.autocast()

    def other() -> None:
        inside.wait()
        seen["without"] = product(x)
        with region:  # of the same object, meanwhile entered by the other thread
            seen["within"] = product(x)
        seen["after"] = product(x)
        looked.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    with region:
        inside.set()
        assert looked.wait(60), f"it waits for {session.lock}"
        assert product(x) == "float16"
    thread.join()
    assert seen == {"without": "float32", "within": "float16", "after": "float32"}


@pytest.mark.parametrize("first", [*REGIONS, "no_grad"])
@pytest.mark.parametrize("second", [*REGIONS, "no_grad"])
def test_tasks_that_take_turns_are_inside_of_their_own_regions_alone(x: Node, first: str, second: str) -> None:
    """Also where the first one is left while the second one is open."""

    def opened(name: str, number: int) -> tuple[Any, tuple[str, bool]]:
        if name == "no_grad":
            return ag.no_grad(), ("bfloat16", False)
        casts, island = REGIONS[name]
        return (casts("bfloat16"), ("bfloat16", True)) if number else (island(), ("float32", True))

    async def task(name: str, number: int) -> None:
        assert here() == outside
        region, inside = opened(name, number)
        with region:
            for _ in range(2 + number):
                assert here() == inside
                await asyncio.sleep(0)
            assert here() == inside
            assert await asyncio.to_thread(here) == inside
        assert here() == outside

    async def tasks() -> None:
        await asyncio.gather(task(first, 0), task(second, 1))

    def here() -> tuple[str, bool]:
        return product(x), is_grad_enabled()

    with amp.init(dtype="bfloat16"):
        outside = here()
        asyncio.run(tasks())
        assert here() == outside == ("bfloat16", True)


@pytest.mark.parametrize("make", [amp.autocast, netcl_autocast])
def test_tasks_may_enter_one_region_in_turns(x: Node, make: Callable[..., Any]) -> None:
    """By hand, or by an ExitStack; each leaves what it has entered itself."""

    async def task(turns: int) -> None:
        with ExitStack() as stack:
            stack.enter_context(region)
            for _ in range(turns):
                await asyncio.sleep(0)
            assert product(x) == "float32"
        await asyncio.sleep(0)
        assert product(x) == "float16"

    async def tasks() -> None:
        await asyncio.gather(task(2), task(4))

    with amp.init():
        region = make(enabled=False)
        asyncio.run(tasks())


def test_the_weight_cache_lives_until_the_outermost_region_ends(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    with amp.autocast():
        with amp.autocast():
            loss_of(model, data)
        assert len(weight_cache) == 2
    assert len(weight_cache) == 0
    with amp.autocast(cache_enabled=False):
        loss_of(model, data)
        assert len(weight_cache) == 0
        with amp.autocast():
            loss_of(model, data)
            assert len(weight_cache) == 0  # as around
        with amp.autocast(cache_enabled=True):
            loss_of(model, data)
            assert len(weight_cache) == 2


def test_the_weight_cache_is_dropped_by_a_step_inside_the_region(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
    optimizer = SGD(model.parameters(), lr=1.0)
    with amp.autocast():
        before = loss_of(model, data)
        before.backward()
        with pytest.warns(UserWarning, match="not scaled"):
            optimizer.step()
        after = loss_of(model, data)
    assert to_numpy(after.value)[0] != to_numpy(before.value)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward_in", ["no region", "an island", "another dtype"])
def test_backward_keeps_the_choices_of_forward(queue: cl.CommandQueue, dtype: str, backward_in: str) -> None:
    def gradients(region: Any) -> list[Any]:
        model, data = mlp(queue, 8, 16, 4), batch(queue, 4, 8, 4)
        with amp.autocast(dtype=dtype):
            loss = loss_of(model, data)
            if region is None:
                loss.backward()
        if region is not None:
            with region:
                loss.backward()
        return [param.grad.to_host() for param in model.parameters()]

    regions = {
        "no region": amp.autocast(enabled=False),  # the same as none, where AMP is not active
        "an island": amp.autocast(enabled=False),
        "another dtype": amp.autocast(dtype="bfloat16" if dtype == "float16" else "float16"),
    }
    assert_same(gradients(regions[backward_in]), gradients(None))


def test_an_unsupported_dtype_warns_and_disables(x: Node) -> None:
    with pytest.warns(UserWarning, match="autocast to float64 is not supported"):
        region = amp.autocast(dtype="float64")
    with region:
        assert not amp.is_autocast_enabled()
        assert product(x) == "float32"


# ---------------------------------------------------------------------------------------------- custom functions


class Square:
    """A user's op from two functions, which note what they see."""

    def __init__(self, cast_inputs: str | None) -> None:
        self.seen: list[Any] = []

        @amp.custom_fwd(cast_inputs=cast_inputs)
        def forward(x: Tensor) -> Tensor:
            self.seen += [x.dtype, tensor_matmul(x, x).dtype]
            return to_device(x.queue, to_numpy(x) ** 2, x.dtype)

        @amp.custom_bwd
        def backward(grad: Tensor) -> list[Tensor]:
            self.seen.append(tensor_matmul(grad, grad).dtype)
            return [to_device(grad.queue, to_numpy(grad) * 2 * to_numpy(self.x.value))]

        self.forward, self.backward = forward, backward

    def __call__(self, x: Node) -> Node:
        self.x = x
        return apply_op(self.forward, self.backward, x)


#: what the inputs are, the region around forward, what they are cast to, and the dtypes of input and products. Where
#: inputs are cast nothing inside is, in backward either; else both run in the region, and outside of any in none.
CUSTOM = [
    *((given, {"dtype": dtype}, cast_inputs, [cast_inputs] * 3)
      for given in ("float32", "float16", "bfloat16") for dtype in DTYPES for cast_inputs in ("float32", dtype)),
    *(("float32", {"dtype": dtype}, None, ["float32", dtype, dtype]) for dtype in DTYPES),
    *(("float32", {"enabled": False}, cast_inputs, ["float32"] * 3) for cast_inputs in (None, "float32", "float16")),
]  # fmt: skip


@pytest.mark.parametrize(("given", "region", "cast_inputs", "seen"), CUSTOM)
def test_custom_fwd_casts_its_inputs_and_nothing_inside_or_is_in_the_region_around_it(
    queue: cl.CommandQueue, given: str, region: dict[str, Any], cast_inputs: str | None, seen: list[str]
) -> None:
    leaf = to_device(queue, np.arange(1, 5).reshape(2, 2), given)
    leaf.requires_grad = True
    op = Square(cast_inputs)
    with amp.autocast(**region):
        y = op(ag.tensor(leaf, requires_grad=True))
        loss = ag.sum(y)
    loss.backward()
    assert y.value.dtype == seen[0]
    assert op.seen == seen
    assert leaf.grad.dtype == given
    assert to_numpy(leaf.grad).tolist() == [[2, 4], [6, 8]]


def test_custom_fwd_on_a_function_of_nodes(queue: cl.CommandQueue) -> None:
    """The other place for the decorator: around all of an op, keyword and nested arguments included."""
    seen: list[Any] = []

    @amp.custom_fwd(cast_inputs="float32")
    def scaled_product(pair: tuple[Node, Node], *, bias: Node, count: int) -> Node:
        seen.extend([pair[0].value.dtype, bias.value.dtype, count])
        return ag.add(ag.matmul(*pair), bias)

    leaf = to_device(queue, np.ones((2, 2)), "float16")
    leaf.requires_grad = True
    with amp.autocast():
        x = ag.tensor(leaf, requires_grad=True)
        y = scaled_product((x, x), bias=x, count=3)
    assert seen == ["float32", "float32", 3]
    assert y.value.dtype == "float32"
    ag.sum(y).backward()
    assert leaf.grad.dtype == "float16"
    assert to_numpy(leaf.grad).tolist() == [[5, 5], [5, 5]]


def test_bare_decorators_keep_names(queue: cl.CommandQueue) -> None:
    @amp.custom_fwd
    def forward(x: Tensor) -> Tensor:
        return x

    @amp.custom_bwd()
    def backward(grad: Tensor) -> list[Tensor]:
        return [grad]

    assert (forward.__name__, backward.__name__) == ("forward", "backward")
    x = to_device(queue, [1.0])
    assert forward(x) is x
    assert backward(x) == [x]
    with pytest.raises(ValueError, match="float8"):
        amp.custom_fwd(cast_inputs="float8")


# ---------------------------------------------------------------------------------------------- policies by name


@pytest.mark.parametrize(
    ("policy", "seen"),
    [
        ("lower_precision_fp", ["float16", "float16", None]),
        ("fp32", ["float32", "float32", None]),
        ("fp32_set_opt_dtype", ["float32", "float32", None]),
        ("fp32_append_dtype", ["float16", "float32", "float32"]),
        ("promote", ["float32", "float32", None]),
    ],
)
@pytest.mark.parametrize("by_member", [False, True])
def test_every_policy_of_pytorchs_can_be_registered(
    queue: cl.CommandQueue, policy: str, seen: list[Any], by_member: bool
) -> None:
    module = types.ModuleType("users_module")
    module.function = lambda x, y, dtype=None: [x.value.dtype, y.value.dtype, dtype]
    amp.register(module, "function", amp.CastPolicy[policy.upper()] if by_member else policy)
    half, wide = ag.tensor(to_device(queue, [1.0], "float16")), ag.tensor(to_device(queue, [1.0]))
    with amp.init():
        assert module.function(half, wide) == seen
        if policy == "fp32_set_opt_dtype":  # a dtype that the caller passes is respected, and nothing cast
            assert module.function(half, wide, dtype="float16") == ["float16", "float32", "float16"]
        if policy == "fp32_append_dtype":  # none is appended to one that the caller passes
            assert module.function(half, wide, dtype="float16") == ["float16", "float32", "float16"]
    assert module.function(half, wide) == ["float16", "float32", None]


def test_a_registration_between_two_regions_counts(queue: cl.CommandQueue) -> None:
    module = types.ModuleType("users_module")
    module.function = lambda x: x.value.dtype
    x = ag.tensor(to_device(queue, [1.0]))
    with amp.autocast():
        assert module.function(x) == "float32"
    amp.register(module, "function", "lower_precision_fp")
    assert module.function(x) == "float32"
    with amp.autocast():
        assert module.function(x) == "float16"
