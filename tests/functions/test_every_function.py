"""Every function under every policy: values, gradients, dtypes, bare tensors, who gets a gradient, how it follows the
incoming one.

The calls are the first of each function in the conformance table, and ``MORE``: what users reach through a function
besides, in shapes and arguments of its own. The table's tests call through netcl, under the policy on the lists; users
may put any function under any policy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag

from clamp.bridge import Node, Tape, Tensor
from clamp.casting.operands import NotOwned
from clamp.casting.policies import Float, Match, Promote
from clamp.casting.policy_table import CastPolicy
from clamp.casting.registry import OWNED
from clamp.params.delivery import deliver
from clamp.scaling.loss_scale import LossScale
from tests.conformance import loss, matmul, movement, ops, runner, shape, test_conformance
from tests.conformance.runner import arrange, filled, inputs_of, nodes_of, outputs, policy_of
from tests.conformance.table import Case, Distinct, Normal, Op, Uniform, Values
from tests.functions.operands import half
from tests.reference import HALF_DTYPES, quantize, to_device, to_numpy
from tests.sweep import sweep

_BANNED = loss.elementwise("binary_cross_entropy", loss.bce, Case(Uniform(0.1, 0.9, 5, 7), Uniform(0, 1, 5, 7)))
TABLE = [*ops.TABLE, _BANNED]  # what is banned only until a user gives it a policy
CASTINGS: dict[CastPolicy, Any] = {
    CastPolicy.FLOAT: Float,
    CastPolicy.MATCH: Match,
    CastPolicy.PROMOTE: Promote,
    CastPolicy.HALF: half,
}
#: How inputs are stored, in turn; "all half": also those that are read in their own dtype under every policy.
STORAGES = ("half", "half+float32", "float32+half", "float16+bfloat16", "float32", "all half")
#: in which a gradient has another dtype than the result, and the result than the first operand
_APART = [(CastPolicy.FLOAT, "half"), (CastPolicy.PROMOTE, "half+float32")]

_NUMBERS = (2, -1.5, np.float32(0.75), np.int64(3), np.bool_(True), np.array(0.5))
_KEYS: list[Any] = [
    0, slice(1, 3), (1, 2), (..., 1), (0, ..., slice(1, 3)), np.int64(2), slice(-2, None),
    (slice(1, 3), slice(2, 5), slice(0, 2)), (slice(None), slice(1, 4), 2), (slice(None), slice(None), slice(4, 5)),
]  # fmt: skip
_ROW = [Normal(1, 4, 5), Normal(1, 4, 5), Normal(1, 4, 5)]
_HEADS = (Normal(2, 3, 5, 8), Normal(2, 3, 5, 8), Normal(2, 3, 5, 8))
_NOT_ZERO = Values(1e-10 * (np.arange(5) % 2)[:, None]).fixed().aside()  # though half says so
_REPEATED = Values(np.array([3, 0, -1, 3, 3]))
_IGNORED = np.array([0, -7, -7, 2, -7, -7])

MORE: dict[str, list[Case]] = {
    **dict.fromkeys(
        ("add", "sub", "mul", "maximum", "minimum", "div"),
        [Case(*pair) for number in _NUMBERS for pair in ((Normal(5, 7), number), (number, Uniform(0.3, 3, 5, 7)))]
        + [Case(Normal(4, 1, 3), Uniform(0.3, 3, 5, 1))],
    ),
    "add_relu": [Case(Normal(5, 7), Normal(7)), Case(Normal(4, 1, 3), Normal(5, 1))],
    "where": [Case(_NOT_ZERO, Normal(7), Normal(5, 7))],
    "pow": [Case(Normal(5, 7), 3)],
    "gelu": [Case(Normal(5, 7), True)],
    "leaky_relu": [Case(Normal(5, 7), 0.125)],
    "elu": [Case(Normal(5, 7), 1.5)],
    "hard_tanh": [Case(Normal(5, 7), -0.75, 1.25)],
    "matmul_op": [
        Case(Normal(1, 1), Normal(1, 1)),
        Case(Normal(33, 65), Normal(65, 17)),
        Case(Normal(2, 3, 7), Normal(7, 5)),
        Case(Normal(2, 2, 3, 7), Normal(7, 5)),
        Case(Normal(3, 7), Normal(4, 7, 5)),
        Case(Normal(4, 3, 7), Normal(4, 7, 5)),
        Case(Normal(3, 300), Normal(300, 2)),
    ],
    "bmm": [Case(Normal(2, 3, 5, 7), Normal(2, 3, 7, 4))],
    "linear_relu": [Case(Normal(19, 31), Normal(31, 13), *bias) for bias in ((), (Normal(13).aside(),))],
    "conv2d": [
        Case(Normal(2, 3, 6, 7), Normal(4, 3, 3, 3), stride=2, pad=1),
        *(Case(Normal(1, 4, 5, 6), Normal(6, 2, 3, 2), *bias, pad=2, dilation=2, groups=2)
          for bias in ((), (Normal(6).aside(),))),
    ],
    "conv2d_relu": [Case(Normal(2, 3, 6, 7), Normal(4, 3, 3, 3), Normal(4).aside(), stride=2, pad=1)],
    "conv_transpose2d": [Case(Normal(2, 4, 4, 5), Normal(4, 3, 3, 3), Normal(3).aside(), stride=2, pad=1)],
    "depthwise_conv2d": [Case(Normal(2, 3, 6, 9), Normal(3, 1, 3, 3), Normal(3).aside(), 2, 1)],
    "flash_attention": [Case(*_HEADS), Case(*_HEADS, causal=False, scale=0.7)],
    "rope": [Case(Normal(2, 3, 5, 8), Values(np.array([0, 3, 17, 100_000, 2])), base=500.0)],
    "masked_fill": [Case(Normal(2, 3, 5, 8), Values(np.arange(40).reshape(5, 8) % 3 // 2), -1e4)],
    "sum": (_SUMS := [
        Case(Normal(3, 5, 4), axis=axis, keepdims=keep) for axis in (None, 0, 1, -1) for keep in (False, True)
    ]),
    "mean": _SUMS,
    "softmax": [Case(Normal(3, 5, 4, scale=3), axis=0), Case(Normal(3, 5, 4), axis=-1, dim=0)],
    "layer_norm": [Case(Normal(3, 4, 5, 3), Normal(3).aside(), Normal(3).aside(), eps=0.5)],
    "group_norm": [Case(Normal(3, 4, 5, 3), Normal(4).aside(), Normal(4).aside(), 2, 0.5)],
    "rms_norm": [Case(Normal(3, 4, 5, 3), Normal(3).aside(), eps=0.5)],
    "l2_normalize": [Case(Normal(4, 3, 5), dim=dim, eps=0.5) for dim in (0, 1, -1)],
    "max_pool2d": [Case(Distinct(1, 3, 6, 8), 3, 1)],
    "avg_pool2d": [Case(Normal(2, 3, 6, 8), 3, 2)],
    "global_avg_pool2d": [Case(Normal(2, 3, 6, 8))],
    "pad2d": [Case(Normal(2, 3, 6, 8), pad=2, mode="reflect"), Case(Normal(2, 3, 6, 8), pad=0)],
    "cross_entropy_indices": [Case(Normal(6, 5), _IGNORED, ignore_index=-7)],
    "smooth_l1_loss": [Case(Normal(6, 5), Normal(6, 5), beta=0.5)],
    "cat": [Case([Normal(4, n, 5) for n in (1, 2, 3, 2)], 1)],
    "stack": [Case(_ROW, axis) for axis in (0, 1, -1)],
    "getitem": [Case(Normal(4, 6, 5), key) for key in _KEYS],
    "split": [Case(Normal(4, 6, 5), 4, 1), Case(Normal(4, 6, 5), [1, 5], axis=1)],
    "chunk": [Case(Normal(4, 6, 5), pieces, 1) for pieces in (4, 9)],
    "reshape": [Case(Normal(2, 3, 1, 4), (4, 6)), Case(Normal(2, 3, 1, 4), [-1, 2])],
    "flatten": [Case(Normal(2, 3, 1, 4), (24,)), Case(Normal(2, 3, 1, 4), (2, -1))],
    "permute": [Case(Normal(2, 3, 4), dims) for dims in ((0, 2, 1), [1, 0, 2])],
    "unsqueeze": [Case(Normal(2, 3, 1, 4), axis) for axis in (1, -1)],
    "squeeze": [Case(Normal(2, 3, 1, 4)), Case(Normal(2, 3, 1, 4), -2)],
    "index_select": (_SELECTIONS := [Case(Normal(4, 6, 5), axis, _REPEATED) for axis in (0, 1, -1)]),
    "gather": _SELECTIONS,
    "index_add": [Case(Normal(4, 6, 5), 1, Values(np.array([5, -1, 0])), Normal(4, 3, 5))],
    "grid_sample": [Case(Normal(2, 3, 4, 5), Uniform(-1.3, 1.3, 2, 3, 6, 2).aside())],
}  # fmt: skip

#: (op, case, number of the case): the first is the conformance table's
CALLS = [(op, case, number) for op in TABLE for number, case in enumerate([op.cases[0], *MORE.get(op.function, ())])]


def _first(part: int) -> pytest.MarkDecorator:
    """Every op; an everyday run deals them out among four tests."""
    ops_in_turn = sweep(TABLE, lambda number: number % 4 == part)
    return pytest.mark.parametrize("op", ops_in_turn, ids=lambda op: op.name.removeprefix("netcl."))


#: in float32 under every policy
_FLOAT32 = {op.name for op in loss.OPS} - {
    "netcl.autograd.binary_cross_entropy_with_logits", "netcl.autograd.pairwise_squared_distances"
}  # fmt: skip
_MOVES = {op.function for op in (*shape.OPS, *movement.OPS)} | {"index_select", "gather", "embedding", "where"}
_ATTENTION = [op for op in TABLE if op.function == "flash_attention"]
_REFUSALS: list[tuple[list[Op], type[Exception]]] = [
    ([*loss.OPS, _BANNED, *_ATTENTION], TypeError), (matmul.OPS, ValueError)
]  # fmt: skip
_COMPARISONS = {"lt", "le", "gt", "ge"}
_VIEWS = {op.name for op in shape.OPS}
_AS_IN_THE_TABLE = {"grid_sample", "rotate_2d_grid", "info_nce_loss", "softmax"}
#: Backward reads the result, which may have been rounded to 16 bits: tests of these look closer.
_KEEPS_ITS_RESULT = {"sqrt", "softmax"}


def _calls() -> list[Any]:
    """(op, case, policy, AMP dtype, storage): each call under one policy always, each function under those that tell
    dtypes apart; under all in the slow sweep."""
    found = []
    for number, (op, case, index) in enumerate(CALLS):
        policies = [CastPolicy.MATCH] if op.name in _VIEWS else list(CASTINGS)
        turns = 2 if index else len(STORAGES)
        apart = [] if index or op.name in _VIEWS else _APART
        pairs = [
            (policies[(number + turn) % len(policies)], STORAGES[(number // 3 + turn) % 6]) for turn in range(turns)
        ]
        for turn, (policy, storage) in enumerate(dict.fromkeys((*pairs, *apart))):
            dtype = (*HALF_DTYPES, "float32")[(number // 4 + turn) % 3]
            marks = [] if turn == 0 or (policy, storage) in apart else [pytest.mark.slow]
            name = f"{op.name.removeprefix('netcl.')}-{index}-{policy.value}-{dtype}-{storage}"
            found.append(pytest.param(op, case, policy, dtype, storage, id=name, marks=marks))
    return found


def _bounds(op: Op, policy: CastPolicy) -> Op:
    """Closer than the table's, which hold for the largest sums."""
    if op.function in _KEEPS_ITS_RESULT and policy is not CastPolicy.FLOAT:
        return replace(op, cancels=2.0**17)
    if op.function == "softmax":  # y (g - sum of y g): a difference whose terms are about the largest gradient
        return replace(op, cancels=32.0)  # half of what norms, of the same form, are given
    if op.function in _AS_IN_THE_TABLE:
        return replace(op)  # results are kept by entry, under one policy
    ulps, grad_ulps = (0.51 if allowed == 1.0 else allowed for allowed in (op.ulps, op.grad_ulps))  # rounded once
    return replace(
        op, ulps=ulps, grad_ulps=grad_ulps, ulps32=min(op.ulps32, 4.0), grad_ulps32=min(op.grad_ulps32, 16.0),
        slack=op.slack / 4,
    )  # fmt: skip


@pytest.mark.parametrize(("op", "case", "policy", "amp_dtype", "storage"), _calls())
def test_values_and_gradients_under_every_policy(
    queue: cl.CommandQueue, op: Op, case: Case, policy: CastPolicy, amp_dtype: str, storage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    casting = half(amp_dtype) if policy is CastPolicy.HALF else CASTINGS[policy]()
    monkeypatch.setattr(runner, "policy_of", lambda _: policy)
    monkeypatch.setattr(test_conformance, "netcl_function", lambda name: partial(OWNED[name], casting))
    if op.name in _FLOAT32:
        monkeypatch.setattr(test_conformance, "result_dtype", lambda *_: "float32")
    if storage == "all half" or op.function == "bias_add":  # a bias is cast here as x is
        case = Case(*runner._walk(case.args, _cast), **runner._walk(case.kwargs, _cast))
    storage = storage.removeprefix("all ")
    test_conformance.test_op(queue, amp_dtype, _bounds(op, policy), case, storage, monkeypatch)
    if op.repeatable:
        nodes = nodes_of(queue, case, arrange(op, case, storage, amp_dtype))
        args, kwargs = filled(case, nodes)
        recorded = outputs(OWNED[op.name](casting, *args, **kwargs))
        with suppress(NotOwned):  # where it is netcl that is called
            test_conformance.assert_bare_tensors_give_the_same_bits(op, case, nodes, recorded)


def _cast(one: Any) -> Any:
    return replace(one, secondary=False)


def _widest(op: Op) -> Case:
    """The case with the most inputs that want a gradient."""
    return max(op.cases, key=lambda case: sum(one.grad for one in inputs_of(case)))


def _called(queue: cl.CommandQueue, op: Op, casting: Any, storage: str) -> tuple[list[Any], Callable[[], list[Any]]]:
    """Leaves for a call of an op, and what calls it with whatever then stands in that list."""
    case = _widest(op)
    nodes = nodes_of(queue, case, arrange(op, case, storage, "float16"))

    def call() -> list[Any]:
        args, kwargs = filled(case, nodes)
        return outputs(OWNED[op.name](casting, *args, **kwargs))

    return nodes, call


def _send(out: Node, scale: float = 1.0) -> None:
    """A gradient that is finite in every storage type, also scaled by 2^16."""
    grad = np.random.default_rng(0).uniform(-(2.0**-3), 2.0**-3, out.value.shape)
    Tape().backward(
        out, to_device(out.value.queue, quantize(grad, out.value.dtype).astype(float) * scale, out.value.dtype)
    )


@_first(0)
@pytest.mark.parametrize("policy", ["own", pytest.param("float", marks=pytest.mark.slow)])
def test_a_scaled_loss_has_scaled_gradients(queue: cl.CommandQueue, op: Op, policy: str) -> None:
    """To the bit in float32; in 16 bits as close as they are."""
    casting = CASTINGS[policy_of(op)]() if policy == "own" and policy_of(op) in CASTINGS else Float()
    found = []
    for scale in (1.0, 2.0**-10, 2.0**6, 2.0**16):
        nodes, call = _called(queue, op, casting, "float32")
        out = call()[0]
        if not op.differentiable:
            return
        _send(out, scale)
        leaves = [node for node in nodes if isinstance(node, Node) and node.grad is not None]
        found.append([to_numpy(leaf.grad) / scale for leaf in leaves])
    off = 0.0 if out.value.dtype == "float32" else 2e-3
    for gradients in found[1:]:
        for scaled, plain in zip(gradients, found[0], strict=True):
            np.testing.assert_allclose(scaled, plain, rtol=off, atol=off * np.abs(plain).max())


@_first(3)
@pytest.mark.parametrize("storage", ["half", pytest.param("float32", marks=pytest.mark.slow)])
def test_layers_with_scales_of_their_own_have_the_same_gradients(queue: cl.CommandQueue, op: Op, storage: str) -> None:
    """Near what they are in 16 bits, in float32, and the same to the bit however small or large what comes is."""
    scale, plain, found = LossScale(2.0**16).applied(), [], []
    for factor in (1.0, 1.0, 2.0**-50, 2.0**50):
        nodes, call = _called(queue, op, CASTINGS.get(policy_of(op), Match)(), storage)
        out = call()[0]
        if not op.differentiable:
            return
        leaves = [node.value for node in nodes if isinstance(node, Node)]
        if not plain:
            _send(out)
            plain = [None if leaf.grad is None else to_numpy(leaf.grad) for leaf in leaves]
            continue
        grad = np.random.default_rng(0).uniform(-(2.0**-3), 2.0**-3, out.value.shape)
        send = partial(Tape().backward, out, to_device(queue, quantize(grad, out.value.dtype).astype(float) * factor))
        deliver(send, leaves, scale, False, True, out, lambda: None)
        assert {leaf.grad.dtype for leaf in leaves if leaf.grad is not None} <= {"float32"}
        found.append([None if leaf.grad is None else to_numpy(leaf.grad).astype(float) / factor for leaf in leaves])
    for one, other in zip(plain, found[0], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(other, one, rtol=2e-3, atol=2e-3 * np.abs(one).max(initial=0.0))
    for gradients in found[1:]:
        for one, other in zip(gradients, found[0], strict=True):
            np.testing.assert_array_equal(one, other)


@_first(1)
def test_only_who_needs_a_gradient_gets_one(queue: cl.CommandQueue, op: Op) -> None:
    """Beside leaves that need none, and bare tensors. Where nobody does, and for bare tensors, nothing is recorded."""
    casting = CASTINGS.get(policy_of(op), Match)()
    wanting = [number for number, one in enumerate(inputs_of(_widest(op))) if one.grad and op.differentiable]
    for wanted in [*wanting, None]:
        nodes, call = _called(queue, op, casting, "half")
        leaves = list(nodes)
        for number, node in enumerate(nodes):
            if number != wanted and isinstance(node, Node):
                node.requires_grad = node.value.requires_grad = False
                nodes[number] = node.value if number % 2 else node
        out = call()[0]
        if wanted is None:
            assert getattr(out, "grad_fn", None) is None
        else:
            _send(out)
        assert [number for number, leaf in enumerate(leaves) if getattr(leaf, "grad", None) is not None] == (
            [] if wanted is None else [wanted]
        )
    nodes, call = _called(queue, op, casting, "half")
    with ag.no_grad():
        unrecorded = call()
    nodes[:] = [getattr(node, "value", node) for node in nodes]
    for out in [*unrecorded, *call()]:
        assert isinstance(out, Tensor) or op.function in _COMPARISONS


@_first(2)
def test_what_is_not_clamps_is_left_to_netcl(queue: cl.CommandQueue, op: Op) -> None:
    """Losses, attention and products refuse integers themselves; what only moves elements takes them."""
    dtypes = ("float64",) if op.function in _MOVES else ("float64", "int32")
    for dtype in dtypes:
        refusal = (
            NotOwned
            if dtype == "float64"
            else next((error for refusing, error in _REFUSALS if op in refusing), NotOwned)
        )
        nodes, call = _called(queue, op, CASTINGS.get(policy_of(op), Match)(), "float32")
        nodes[0] = Node(value=Tensor.from_host(queue, to_numpy(nodes[0].value).astype(dtype), dtype=dtype))
        with pytest.raises(refusal, match=None if refusal is NotOwned else "int32"):
            call()


@pytest.mark.parametrize("function", ["add", "sub", "mul", "div", "pow", "maximum", "minimum"])
def test_numbers_alone_are_left_to_netcl(function: str) -> None:
    with pytest.raises(NotOwned):
        OWNED[f"netcl.autograd.{function}"](Match(), 1.0, 2.0)
