"""Every op of the conformance table, forward and backward, on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag

from clamp import amp
from clamp.bridge import Node, Tape, Tensor
from clamp.casting.policy_table import CastPolicy
from clamp.casting.registry import OWNED
from clamp.cli.lists import reached
from clamp.opencl.program import Kernel
from tests.conformance import long_axes, ops, report
from tests.conformance.long_axes import LongCase
from tests.conformance.runner import (
    arrange,
    counted_host_reads,
    error_of,
    filled,
    forward_slack,
    gradient_slack,
    inputs_of,
    netcl_function,
    nodes_of,
    outputs,
    policy_of,
    reference,
    reference_gradient,
    result_dtype,
    run_backward,
    storages_of,
    tolerance,
)
from tests.conformance.table import Array, Case, Op
from tests.reference import HALF_DTYPES, to_device, to_numpy
from tests.sweep import sweep

_SPECIAL_ROUNDS = 3


@pytest.fixture(scope="module")
def amp_on() -> Iterator[Callable[[str], None]]:
    """Switches AMP on as a user does it, for all tests in a row that ask for one dtype."""
    now = [""]
    with ExitStack() as handle:

        def switch(dtype: str) -> None:
            if dtype != now[0]:
                handle.close()
                now[0] = ""
                handle.enter_context(amp.init(dtype=dtype))
                now[0] = dtype

        yield switch


@pytest.fixture
def amp_dtype(request: pytest.FixtureRequest, amp_on: Callable[[str], None]) -> str:
    # pytest would make a fixture of the module anew for each set of parameters that this is one of.
    dtype: str = request.param
    amp_on(dtype)
    return dtype


def _everyday_mixture(number: int, case: Case) -> tuple[str, str]:
    """The AMP dtype and the mixture that every run has of an op: ops take turns."""
    return ("float16", "half") if number % 2 else ("bfloat16", storages_of(case)[-1])


def _call(number: int, index: int, amp_dtype: str, storage: str) -> Any:
    """A case of an op in a mixture: that of each op's first case always, all others in the slow sweep."""
    op = ops.TABLE[number]
    is_slow = index > 0 or (amp_dtype, storage) != _everyday_mixture(number, op.cases[0])
    name = f"{amp_dtype}-{op.name.removeprefix('netcl.')}-{index}-{storage}"
    return pytest.param(amp_dtype, op, op.cases[index], storage, id=name, marks=[pytest.mark.slow] * is_slow)


def _calls() -> list[Any]:
    """(AMP dtype, op, case, storage): all there are."""
    return [
        _call(number, index, amp_dtype, storage)
        for amp_dtype in HALF_DTYPES
        for number, op in enumerate(ops.TABLE)
        for index, case in enumerate(op.cases)
        for storage in storages_of(case)
    ]


def _calls_in_turn() -> list[Any]:
    """Of these, each case and each mixture of an op, in turn."""
    found = []
    for number, op in enumerate(ops.TABLE):
        dtype, usual = _everyday_mixture(number, op.cases[0])
        dtypes = (dtype, *(other for other in HALF_DTYPES if other != dtype))
        for turn in range(max(len(op.cases), len(storages_of(op.cases[0])))):
            index = turn % len(op.cases)
            storages = storages_of(op.cases[index])
            storage = storages[((storages.index(usual) if usual in storages else 0) + turn) % len(storages)]
            found.append(_call(number, index, dtypes[turn % 2], storage))
    return found


_ARGUMENTS = ("amp_dtype", "op", "case", "storage")
every_call = pytest.mark.parametrize(_ARGUMENTS, _calls(), indirect=["amp_dtype"])
#: where a promise is of no kernel
each_in_turn = pytest.mark.parametrize(_ARGUMENTS, _calls_in_turn(), indirect=["amp_dtype"])


def test_every_op_is_owned_and_listed_once() -> None:
    names = [op.name for op in ops.TABLE]
    assert sorted(set(names)) == sorted(names)
    assert [name for name in names if name not in OWNED] == []


_EVERYWHERE = {"cast.cl", "optimizer_step.cl"}  # arguments and weights are cast, whatever the op


@pytest.fixture
def named_kernels_only(
    queue: cl.CommandQueue, amp_dtype: str, op: Op, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fails where an op launches kernels of a file that ``python -m clamp lists`` does not name."""
    launched = set()

    def noting(ask: Callable[..., Any]) -> Callable[..., Any]:
        def noted(kernel: Kernel, *args: Any, **macros: object) -> Any:
            launched.add(kernel.file)
            return ask(kernel, *args, **macros)

        return noted

    monkeypatch.setattr(Kernel, "on", noting(Kernel.on))
    monkeypatch.setattr(Kernel, "bind", noting(Kernel.bind))
    yield
    assert launched - _EVERYWHERE <= _named_files(op.name)


@cache
def _named_files(name: str) -> set[str]:
    return reached(OWNED[name]).files


@pytest.mark.kernel
@pytest.mark.usefixtures("named_kernels_only")
@every_call
def test_op(
    queue: cl.CommandQueue, amp_dtype: str, op: Op, case: Case, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(case)
    arrangement = arrange(op, case, storage, amp_dtype)
    want = reference(op, case, storage, amp_dtype)
    dtype = result_dtype(op, case, arrangement.dtypes, amp_dtype)
    function = netcl_function(op.name)
    device = queue.device.platform.name

    for which_output in range(len(want)) if op.differentiable else [0]:
        nodes = nodes_of(queue, case, arrangement)
        args, kwargs = filled(case, nodes)
        with counted_host_reads(monkeypatch) as reads:
            results = outputs(function(*args, **kwargs))
            out = results[which_output]
            if op.differentiable:
                cotangent_dtype = out.value.dtype
                assert out.grad_fn is not None
        assert reads == []
        for result, expected in zip(results, want, strict=True):
            value = result.value
            assert value.dtype == dtype or not np.issubdtype(to_numpy(value).dtype, np.floating)
            slack = forward_slack(op, case, arrangement, expected)
            error = error_of(value, expected, slack, tolerance(value.dtype, op.ulps, op.ulps32))
            report.note(op.name, "forward", value.dtype, error.ulps, error.allowed, device)
            assert error.passes, f"{op.name}: {error}"
        if not op.differentiable:
            return
        with counted_host_reads(monkeypatch) as reads:
            run_backward(out, cotangent_dtype)
        assert reads == []
        for index, (one, node) in enumerate(zip(inputs, nodes, strict=True)):
            if not isinstance(node, Node):
                continue
            if not one.grad:
                assert node.grad is None, f"input {index} asked for no gradient"
                continue
            want_grad = reference_gradient(op, case, storage, amp_dtype, which_output, index, cotangent_dtype)
            assert want_grad.smooth.mean() > 0.9, f"input {index} lies on kinks: draw other values"
            assert node.grad.dtype == arrangement.dtypes[index]
            error = error_of(
                node.grad, want_grad.value, gradient_slack(op, want_grad),
                tolerance(node.grad.dtype, op.grad_ulps, op.grad_ulps32), want_grad.smooth,
            )  # fmt: skip
            report.note(op.name, "gradient", node.grad.dtype, error.ulps, error.allowed, device)
            assert error.passes, f"{op.name}, gradient of input {index}: {error}"


#: what netcl's functions of bare tensors do not take; index_add's adds in place
_NOT_TAKEN = {"netcl.ops.softmax.softmax": "dim", "netcl.nn.loss.info_nce_loss": "symmetric"}
_IN_PLACE = "netcl.ops.indexing.index_add"


def namesakes(op: Op) -> list[str]:
    """The op and netcl's functions of bare tensors that are called as it is."""
    names = (op.function, {"matmul_op": "matmul", "sum": "reduce_sum"}.get(op.function))
    return [op.name, *(x for x in OWNED if x != op.name and ".autograd." not in x and x.rpartition(".")[2] in names)]


def assert_bare_tensors_give_the_same_bits(op: Op, case: Case, nodes: list[Any], recorded: list[Any]) -> None:
    """Whichever of the functions that are called alike is given them; some return more than the op does."""
    args, kwargs = filled(case, [getattr(node, "value", node) for node in nodes])
    for name in namesakes(op):
        if name == _IN_PLACE or _NOT_TAKEN.get(name) in kwargs:
            continue
        found = outputs(netcl_function(name)(*args, **kwargs))
        assert len(found) >= len(recorded)
        for one, bare in zip(recorded, found, strict=False):
            assert isinstance(bare, Tensor) or not op.differentiable, name  # comparisons give nodes
            bare, want = getattr(bare, "value", bare), to_numpy(one.value)
            assert bare.dtype == one.value.dtype, name
            if name == "netcl.ops.reduction.reduce_sum" and kwargs.get("keepdims") and kwargs.get("axis") is None:
                want = want.reshape((1,) * len(args[0].shape))  # it keeps axes that autograd's sum of all drops
            np.testing.assert_array_equal(to_numpy(bare), want, name)


@each_in_turn
def test_bare_tensors_and_no_grad_give_the_same_bits(
    queue: cl.CommandQueue, amp_dtype: str, op: Op, case: Case, storage: str
) -> None:
    if not op.repeatable:
        pytest.skip("random")
    nodes = nodes_of(queue, case, arrange(op, case, storage, amp_dtype))
    function = netcl_function(op.name)
    args, kwargs = filled(case, nodes)
    recorded = outputs(function(*args, **kwargs))
    with ag.no_grad():
        unrecorded = outputs(function(*args, **kwargs))
    for one, two in zip(recorded, unrecorded, strict=True):
        assert isinstance(two, Tensor) or not op.differentiable
        assert two.value.dtype == one.value.dtype
        np.testing.assert_array_equal(to_numpy(two.value), to_numpy(one.value))
    assert_bare_tensors_give_the_same_bits(op, case, nodes, recorded)


@each_in_turn
def test_checkpointed_it_gives_the_same_bits(
    queue: cl.CommandQueue, amp_dtype: str, op: Op, case: Case, storage: str
) -> None:
    if not op.differentiable or not op.repeatable:
        pytest.skip("no gradient, or random")
    arrangement, function, found = arrange(op, case, storage, amp_dtype), netcl_function(op.name), []
    for call in (partial(function), partial(amp.checkpoint, function)):
        nodes = nodes_of(queue, case, arrangement)
        args, kwargs = filled(case, nodes)
        results = outputs(call(*args, **kwargs))
        run_backward(results[0], results[0].value.dtype)
        grads = [node.grad for node in nodes if isinstance(node, Node) and node.grad is not None]
        found.append([to_numpy(x) for x in (*(result.value for result in results), *grads)])
        assert (results[0].op_name == "checkpoint") == (len(found) == 2)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(other, one)


def _special_ops() -> list[Any]:
    by_policy = (CastPolicy.MATCH, CastPolicy.VIEW, CastPolicy.PROMOTE)
    return [
        pytest.param(op, id=op.name.removeprefix("netcl."))
        for op in ops.TABLE
        if op.special or (op.special is None and policy_of(op) in by_policy)
    ]


@pytest.mark.parametrize(
    ("amp_dtype", "storage"),
    sweep([("float16", "half"), ("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "half")]),
    indirect=["amp_dtype"],
)
@pytest.mark.parametrize("op", _special_ops())
def test_special_values(queue: cl.CommandQueue, amp_dtype: str, op: Op, storage: str) -> None:
    case = op.cases[0]
    for special_round in range(_SPECIAL_ROUNDS):
        arrangement = arrange(op, case, storage, amp_dtype, special_round)
        args, kwargs = filled(case, nodes_of(queue, case, arrangement))
        results = outputs(netcl_function(op.name)(*args, **kwargs))
        for result, want in zip(results, reference(op, case, storage, amp_dtype, special_round), strict=True):
            slack = np.nan_to_num(forward_slack(op, case, arrangement, want), nan=0.0, posinf=0.0)
            error = error_of(result.value, want, slack, tolerance(result.value.dtype, op.ulps, op.ulps32))
            assert error.passes, f"{op.name}: {error}; inputs {arrangement.stored}"
            if op.exact:
                np.testing.assert_array_equal(np.signbit(to_numpy(result.value)), np.signbit(want))


# ------------------------------------------------------------------------------------------------- other dtypes

_OTHERS = ("float64", "int32", "int64")


@pytest.mark.parametrize("amp_dtype", ["float16"], indirect=True)
@pytest.mark.parametrize("op", [pytest.param(op, id=op.name.removeprefix("netcl.")) for op in ops.TABLE])
def test_other_dtypes_are_read_as_what_they_are_or_refused(queue: cl.CommandQueue, amp_dtype: str, op: Op) -> None:
    """One tensor of them, and all: never is one dtype read as another."""
    case = op.cases[0]
    whole = [
        values if values.dtype.kind == "i" else np.round(3 * values)
        for values in arrange(op, case, "float32", amp_dtype).stored
    ]
    args, kwargs = filled(case, whole)
    with np.errstate(all="ignore"):
        want = [np.asarray(x, float) for x in outputs(op.reference(*args, **kwargs))]
    floating = {place for place, values in enumerate(whole) if values.dtype.kind != "i"}
    together = [({place}, _OTHERS[place % 3]) for place in range(len(whole))] + [(floating, "float64")]
    for name, (places, other) in product(namesakes(op), together):
        given = []
        for place, values in enumerate(whole):
            dtype = other if place in places else "float32" if place in floating else "int32"
            tensor = Tensor.from_host(queue, np.ascontiguousarray(values.astype(dtype)), dtype=dtype)
            given.append(Node(value=tensor) if ".autograd." in name and place in floating else tensor)
        args, kwargs = filled(case, given)
        try:
            results = outputs(netcl_function(name)(*args, **kwargs))
        except (TypeError, ValueError, AttributeError, IndexError, cl.Error):
            continue  # clamp's error, or one of netcl's
        for result, expected in zip(results, want, strict=False):
            got, close = to_numpy(getattr(result, "value", result)), 0.01 * np.abs(expected).max(initial=1)
            np.testing.assert_allclose(got, expected, 0.01, close, err_msg=f"{name}: {other} at {places}")


@pytest.mark.parametrize("amp_dtype", ["float16"], indirect=True)
@pytest.mark.parametrize("op", [pytest.param(op, id=op.name.removeprefix("netcl.")) for op in ops.TABLE])
def test_an_input_on_another_queue_is_refused_by_the_name_that_was_called(
    queue: cl.CommandQueue, amp_dtype: str, op: Op
) -> None:
    other = cl.CommandQueue(queue.context, queue.device)
    for case, name in product(op.cases, namesakes(op)):
        arrangement = arrange(op, case, "half", amp_dtype)
        here, there = (nodes_of(on, case, arrangement) for on in (queue, other))
        if len(here) == 1 or _NOT_TAKEN.get(name) in case.kwargs:
            continue
        for place, active in product(range(len(here)), (True, False)):
            nodes = [*here[:place], there[place], *here[place + 1 :]]
            args, kwargs = filled(case, nodes if ".autograd." in name else [getattr(x, "value", x) for x in nodes])
            asked = f"^{name.split('.')[-1]}: .*different queues.*Tensor.from_host"
            with amp.autocast(active), pytest.raises(ValueError, match=asked):
                netcl_function(name)(*args, **kwargs)


# ---------------------------------------------------------------------------------------- sums of a million terms

_EVERYDAY_LONG = ("softmax-rows_of_19", "index_add-one_row")


def _argument(queue: cl.CommandQueue, value: Any) -> Any:
    """An argument of a long case as the function takes it."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == np.int32:
        return Tensor.from_host(queue, value, dtype="int32")
    tensor = to_device(queue, value)
    if value.dtype == np.float64:
        return tensor
    tensor.requires_grad = True
    return Node(value=tensor)


def _assert_summed_well(actual: Tensor, expected: Array | tuple[Array, Array], slack: float) -> None:
    want, magnitude = expected if isinstance(expected, tuple) else (expected, np.abs(expected))
    got = to_numpy(actual)
    error = float(np.abs(got - want.reshape(got.shape)).max() / magnitude.max())
    assert error <= slack * 1e-5, f"off by {error:.2g} of the largest element"


@pytest.mark.parametrize("amp_dtype", ["float32"], indirect=True)
@pytest.mark.parametrize(
    "long",
    [
        pytest.param(long, id=str(long), marks=[] if str(long) in _EVERYDAY_LONG else [pytest.mark.slow])
        for long in long_axes.CASES
    ],
)
def test_sums_of_a_million_terms_are_as_good_as_short_ones(
    queue: cl.CommandQueue, amp_dtype: str, long: LongCase
) -> None:
    inputs = long.inputs()
    arguments = [_argument(queue, value) for value in inputs]
    with Tape() as tape:
        out = netcl_function(f"netcl.autograd.{long.name}")(*arguments, **long.kwargs)
    incoming = long_axes.varied(*out.value.shape)
    exact = [value.astype(float) if getattr(value, "dtype", None) == np.float32 else value for value in inputs]
    want, gradients = long.reference(incoming.astype(float), *exact, **long.kwargs)
    if want is not None:
        _assert_summed_well(out.value, want, long.slack)
    if not gradients:
        return
    tape.backward(out, to_device(queue, incoming))
    for argument, gradient in zip(arguments, gradients, strict=False):
        if gradient is not None:
            _assert_summed_well(argument.grad, gradient, long.slack)
