"""Precision by module: which rule decides about a module, and that what is computed in it follows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
import wrapt
from netcl import autograd as ag
from netcl.nn.batchnorm import BatchNorm2dModule
from netcl.nn.layers import Conv2d, Flatten, Linear, Module, ReLU, Sequential, Tanh
from netcl.optim import SGD

from clamp import amp
from clamp.bridge import Node, Tensor
from clamp.casting.module_rules import ModuleRule, rule_for
from clamp.casting.policy_table import PolicyError
from clamp.params.weight_cache import weight_cache
from tests.networks import LOSS_FACTOR, batch, loss_of, mlp, scaled_backward, stepping, weights_of
from tests.reference import assert_same, to_device, to_numpy

pytestmark = pytest.mark.usefixtures("shut_down")

MIXED = {"head.*": "float32", "layers.[0-1]": "bfloat16"}


class Net(Module):
    """Layers, one after the other, that note in which dtypes they return."""

    def __init__(self, queue: cl.CommandQueue, seed: int = 0) -> None:
        np.random.seed(seed)
        self.layers = [Linear(queue, 6, 8), Tanh(), Linear(queue, 8, 8)]
        self.head = Head(queue)
        self.seen: list[str] = []
        self.notes = True

    def forward(self, x: Any) -> Any:
        seen = []
        for layer in (*self.layers, self.head):
            x = layer(x)
            seen.append(getattr(x, "value", x).dtype)
        if self.notes:
            self.seen = seen
        return x


class Head(Module):
    """A layer with an op of its own; ``around`` is entered around the layer in it."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        self.inner = Linear(queue, 8, 4)
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, x: Any) -> Any:
        with self.around():
            return self.inner(ag.gelu(x) if isinstance(x, Node) else x)


def dtypes(net: Net) -> list[str]:
    x = np.random.default_rng(1).standard_normal((5, 6))
    net(ag.tensor(to_device(net.layers[0].weight.queue, x)))
    return net.seen


# ---------------------------------------------------------------------------------------------- which rule


@pytest.mark.parametrize(
    ("pattern", "has", "has_not"),
    [
        ("head", ["head", "head.fc"], ["header", "decoder.head", ""]),
        ("head.*", ["head", "head.fc", "head.fc.inner"], ["header", "decoder.head"]),
        (
            "layers.[0-3].*",
            ["layers.0", "layers.3", "layers.1.norm"],
            ["layers", "layers.4", "layers.10", "layers.10.a"],
        ),
        ("layers.1.*", ["layers.1", "layers.1.norm"], ["layers.10", "layersx1.norm"]),  # a regex has all of them
        ("*.norm", ["layers.0.norm", "norm.norm", "layers.0.norm.scale"], ["norm", "layers.0"]),
        ("*", ["", "head", "layers.0.norm"], []),
        ("", ["", "head"], []),
        ("Head", ["Head"], ["head"]),
        # qwix's rules, whose regexes are for the whole path, with / in it: '.*', 'embedder', r'layers_\d+/mlp',
        # '.*attn.*' and '.*mlp.*'
        ("embedder", ["embedder"], ["decoder.embedder", "embedder2"]),
        ("layers.[0-9]*.mlp", ["layers.0.mlp", "layers.12.mlp"], ["layers.x.mlp", "layers.0.attn"]),
        ("*attn*", ["layers.0.attn", "layers.0.attn.q_proj", "self_attn"], ["layers.0.mlp"]),
        ("*_proj", ["layers.0.attn.q_proj", "q_proj"], ["layers.0.attn", "q_proj2"]),
    ],
)
def test_patterns_are_for_whole_paths(pattern: str, has: list[str], has_not: list[str]) -> None:
    rule = ModuleRule(pattern, "float32")
    assert [path for path in (*has, *has_not) if rule.matches(path)] == has


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["layers.0.norm", "layers.*"], {"layers.0.norm": 0, "layers.0": 1, "layers.0.norm.scale": 0, "head": None}),
        (["layers.*", "layers.0.norm"], {"layers.0.norm": 0, "layers.0": 0}),  # the first, not the longest
        (["layers.0", "layers.0.norm"], {"layers.0.norm": 0, "layers.0.fc": 0, "layers.1": None}),
        (["*.norm", "encoder"], {"encoder.a.norm": 0, "encoder.a": 1, "decoder.norm": 0, "decoder.a": None, "": None}),
        (["embedder", "layers.*.mlp"], {"embedder": 0, "layers.3.mlp": 1, "layers.3.mlp.up": 1, "layers.3.attn": None}),
        (["head", "*"], {"head.fc": 0, "head": 0, "": 1, "header": 1}),
    ],
)
def test_the_first_rule_decides(patterns: list[str], expected: dict[str, int | None]) -> None:
    rules = [ModuleRule(pattern, "bfloat16") for pattern in patterns]
    found = {path: rule_for(rules, path) for path in expected}
    assert found == {path: None if index is None else rules[index] for path, index in expected.items()}


# ---------------------------------------------------------------------------------------------- in which dtype


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["float16"] * 4),
        ({"modules": MIXED}, ["bfloat16", "bfloat16", "float16", "float32"]),
        ({"modules": {"layers.1": "float32"}}, ["float16", "float32", "float16", "float16"]),  # match, and yet float32
        ({"modules": {"*": "bfloat16", "head": "float32"}}, ["bfloat16"] * 4),
        ({"modules": {"head": "float32", "*": "bfloat16"}}, ["bfloat16"] * 3 + ["float32"]),
        ({"modules": {"head.inner": np.float32, "*": "bf16"}}, ["bfloat16"] * 3 + ["float32"]),
        ({"modules": MIXED, "dtype": "float32"}, ["bfloat16", "bfloat16", "float32", "float32"]),
        ({"modules": MIXED, "level": "O2"}, ["bfloat16", "bfloat16", "float16", "float32"]),
        # pytorch#117832: an operator of one's choice in float32
        ({"custom_black_list": ["tanh"]}, ["float16", "float32", "float16", "float16"]),
        ({"modules": MIXED, "custom_black_list": ["tanh"]}, ["bfloat16", "float32", "float16", "float32"]),
        ({"modules": {"layers.0": "float32"}, "custom_white_list": ["exp"]}, ["float32", "float32"] + ["float16"] * 2),
        ({"modules": {"head": "float32"}, "level": "O0"}, ["float32"] * 4),
    ],
)  # fmt: skip
def test_modules_compute_in_their_rules_dtypes(
    queue: cl.CommandQueue, options: dict[str, Any], expected: list[str]
) -> None:
    net = Net(queue)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a rule that decides about nothing
        amp.init(**options)
        assert dtypes(net) == expected
        net(to_device(queue, np.ones((5, 6))))  # bare tensors
        if "layers.1" not in options.get("modules", {}):
            assert [net.seen[0], *net.seen[2:]] == [expected[0], *expected[2:]]


@pytest.mark.parametrize(
    ("enter", "outside", "inside"),
    [
        (lambda handle: amp.autocast(dtype="float16"), "bfloat16", "float16"),
        (lambda handle: amp.autocast(dtype="float32"), "bfloat16", "float32"),
        (lambda handle: amp.autocast(enabled=False), "float32", "float32"),
        (lambda handle: handle.disable_casts(), "float32", "float32"),
    ],
)
@pytest.mark.parametrize("pattern", ["head.*", "*", "head"])
def test_a_region_of_the_users_inside_of_a_module_wins(
    queue: cl.CommandQueue, pattern: str, enter: Callable[[Any], Any], outside: str, inside: str
) -> None:
    net = Net(queue)
    x = ag.tensor(to_device(queue, np.ones((2, 8))))
    with amp.init(modules={pattern: "bfloat16"}) as handle:
        assert net.head(x).value.dtype == "bfloat16"
        with enter(handle):
            assert net.head(x).value.dtype == outside
        net.head.around = lambda: enter(handle)
        assert net.head(x).value.dtype == inside
        net.head.around = nullcontext
        assert net.head(x).value.dtype == "bfloat16"
    with amp.init(modules={pattern: "float32"}):
        net.head.around = lambda: amp.autocast(dtype="float16")  # out of float32, too
        assert net.head(x).value.dtype == "float16"


def test_a_shared_layer_has_the_rule_of_its_first_path(queue: cl.CommandQueue) -> None:
    class Twice(Module):
        def __init__(self) -> None:
            self.encoder = Head(queue)
            self.decoder = Head(queue)
            self.decoder.inner = self.encoder.inner

        def forward(self, x: Any) -> list[str]:
            return [self.encoder(x).value.dtype, self.decoder(x).value.dtype]

    net, x = Twice(), ag.tensor(to_device(queue, np.ones((2, 8))))
    with amp.init(modules={"encoder": "bfloat16", "decoder": "float32"}):
        assert net(x) == ["bfloat16", "bfloat16"]
    with amp.init(modules={"decoder.inner": "float32"}), pytest.warns(UserWarning, match=r"near: encoder\.inner"):
        assert net(x) == ["float16", "float16"]


def test_layers_that_netcl_computes_at_once_are_apart_where_rules_are(queue: cl.CommandQueue) -> None:
    model = Sequential(Linear(queue, 6, 8), ReLU(), Linear(queue, 8, 8), ReLU())
    x = ag.tensor(to_device(queue, np.ones((2, 6))))
    for train in (True, False):
        model.train(train)
        with amp.init(modules={"layers.3": "float32"}, debug="summary") as handle:
            assert model(x).value.dtype == "float32"
            assert {row.module for row in handle.summary().rows} >= {"layers.1", "layers.3"}
        with amp.init(modules={"*": "bfloat16"}, debug="summary") as handle:
            assert model(x).value.dtype == "bfloat16"
            apart = {row.module for row in handle.summary().rows} & {"layers.1", "layers.3"}
            assert apart == (set() if train else {"layers.1", "layers.3"})  # out of training netcl does not


def test_classes_with_a_call_of_their_own_are_met(queue: cl.CommandQueue) -> None:
    def made() -> Any:
        class Own(Module):
            def __init__(self) -> None:
                self.weight = Linear(queue, 6, 4).weight

            def __call__(self, x: Any) -> Any:
                return ag.matmul_op(x, ag.tensor(self.weight))

        return Own()

    before, x = made(), ag.tensor(to_device(queue, np.ones((2, 6))))
    calls = Module.__call__.__code__, type(before).__call__.__code__, BatchNorm2dModule.__call__.__code__
    with amp.init(modules={"*": "bfloat16"}):
        after = made()
        assert calls[0] is not Module.__call__.__code__
        for own in (before, after, made()):
            assert own(x).value.dtype == "bfloat16"
    assert calls == (Module.__call__.__code__, type(before).__call__.__code__, BatchNorm2dModule.__call__.__code__)
    assert "__init_subclass__" not in vars(Module)
    assert after(x).value.dtype == "float32"


def test_a_wrapper_of_the_users_over_calls_keeps_running(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def counted(wrapped: Any, module: Any, args: Any, kwargs: Any) -> Any:
        called.append(type(module).__name__)
        return wrapped(*args, **kwargs)

    wrapper = wrapt.FunctionWrapper(Module.__call__, counted)
    monkeypatch.setattr(Module, "__call__", wrapper)
    net = Net(queue)
    with amp.init(modules=MIXED):
        assert dtypes(net) == ["bfloat16", "bfloat16", "float16", "float32"]
    assert called == ["Net", "Linear", "Tanh", "Linear", "Head", "Linear"]
    assert vars(Module)["__call__"] is wrapper


def test_layers_that_move_are_followed(queue: cl.CommandQueue) -> None:
    model, x = mlp(queue, 6, 6, 6), ag.tensor(to_device(queue, np.ones((2, 6))))
    with amp.init(modules={"layers.0": "bfloat16", "body.layers.2": "float32"}) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, last = model.layers[0], model.layers[2]
        assert [first(x).value.dtype, last(x).value.dtype] == ["bfloat16", "float16"]
        assert model(x).value.dtype == "float16"
        model.layers.reverse()
        model.train(False)  # netcl has kept what it has made of them
        model(x)
        assert [first(x).value.dtype, last(x).value.dtype] == ["float16", "bfloat16"]

        class Whole(Module):
            def __init__(self) -> None:
                self.body = model

            def forward(self, x: Any) -> Any:
                return self.body(x)

        whole = Whole()
        assert whole(x).value.dtype == "float32"  # first is body.layers.2 now
        assert handle.summary().rules["body.layers.2: float32"] == ["body.layers.2"]


# ---------------------------------------------------------------------------------------------- training


def gradients(queue: cl.CommandQueue, forward: Callable[[Net, Any], Any] | None = None, **options: Any) -> list[Any]:
    """Gradients of a step of a net, of a loss of a known size, in float32, and the loss."""
    net = Net(queue)
    optimizer = SGD(net.parameters(), lr=0.1)
    x, y = batch(queue, 16, 6, 4)
    with amp.init(**options) as handle:
        if options.get("level") == "O2":
            amp.decorate(net, optimizer)
        out = net(ag.tensor(x)) if forward is None else forward(net, ag.tensor(x))
        loss = ag.mul(ag.mse_loss(out, ag.tensor(y)), LOSS_FACTOR)
        scaled_backward(handle, loss, optimizer)
        assert {param.grad.dtype for param in net.parameters()} == {"float32"}
        assert handle.loss_scale == options.get("loss_scale", 65536.0)
        return [*(to_numpy(param.grad) for param in net.parameters()), to_numpy(loss.value)]


@pytest.mark.parametrize(("level", "loss_scale"), [("O1", 1.0), ("O1", 65536.0), ("O2", 4096.0)])
@pytest.mark.parametrize("rules", [MIXED, {"layers.*": "bfloat16"}, {"head": "bfloat16"}], ids=str)
def test_gradients_of_several_dtypes_under_one_scale(
    queue: cl.CommandQueue, rules: dict[str, str], level: str, loss_scale: float
) -> None:
    expected = gradients(queue, dtype="float32", loss_scale=loss_scale)
    mixed = gradients(queue, modules=rules, loss_scale=loss_scale, level=level)
    for found, right in zip(mixed, expected, strict=True):
        assert np.abs(found - right).max() <= 0.03 * np.abs(right).max() + 1e-7
        assert np.abs(found - right).max() > 0  # something is in 16 bits


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({"dtype": "bfloat16"}, False),
        ({"dtype": "bfloat16", "modules": {"head": "float16"}}, True),
        ({"dtype": "float32", "modules": {"head": "float16"}}, True),
        ({"dtype": "float32", "modules": {"head": "bfloat16"}}, False),
        ({"modules": {"*": "bfloat16"}}, True),  # what is outside of modules is in float16 still
    ],
)
def test_losses_are_scaled_where_something_is_in_float16(options: dict[str, Any], scales: bool) -> None:
    handle = amp.init(**options)
    assert handle.loss_scale == (65536.0 if scales else 1.0)


def test_a_step_on_unscaled_gradients_of_a_part_in_float16_warns(queue: cl.CommandQueue) -> None:
    model, data = mlp(queue, 6, 6, 4), batch(queue, 8, 6, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    for dtype in ("bfloat16", "float16"):
        with amp.init(dtype="bfloat16", modules={"layers.2": dtype}):
            optimizer.zero_grad()
            loss_of(model, data).backward()
            with pytest.warns(UserWarning, match="not scaled") if dtype == "float16" else nullcontext():
                optimizer.step()


def test_a_weight_read_in_two_dtypes_has_a_copy_in_each(queue: cl.CommandQueue) -> None:
    class Tied(Module):
        def __init__(self) -> None:
            self.one, self.two = Linear(queue, 8, 8, bias=False), Linear(queue, 8, 8, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Any) -> list[Any]:
            return [self.one(x), self.two(x), self.one(x), self.two(x)]

    net, x = Tied(), ag.tensor(to_device(queue, np.ones((1, 8))))
    net.one.weight.write(np.full((8, 8), 0.125 * (1 + 2.0**-9), np.float32))  # 0.125 in bfloat16
    optimizer = SGD([net.one.weight], lr=0.1)
    with amp.init(modules={"two": "bfloat16"}, loss_scale=4.0) as handle:
        outs = net(x)
        assert [(out.value.dtype, float(to_numpy(out.value)[0, 0])) for out in outs] == [
            ("float16", 1 + 2.0**-9), ("bfloat16", 1.0)
        ] * 2  # fmt: skip
        copies = [value for value in weight_cache.values if isinstance(value, Tensor)]
        assert sorted(copy.dtype for copy in copies) == ["bfloat16", "float16"]
        loss = ag.add(ag.sum(ag.add(outs[0], outs[2])), ag.sum(ag.add(outs[1], outs[3])))
        scaled_backward(handle, loss, optimizer)
    np.testing.assert_array_equal(to_numpy(net.one.weight.grad), 4.0)  # of all four


def trained(queue: cl.CommandQueue, recorded: bool = False, **options: Any) -> list[np.ndarray[Any, Any]]:
    net = Net(queue)
    net.notes = False
    optimizer = SGD(net.parameters(), lr=0.5)
    x, y = batch(queue, 16, 6, 4)
    with amp.init(**options) as handle:
        train = stepping(handle, net, optimizer)  # type: ignore[arg-type]
        step: Any = amp.record(train) if recorded else train
        for _ in range(6):
            step(x, y)
        assert not recorded or step.recordings == 1
        assert not handle.history[-1].reason
        return weights_of(net)  # type: ignore[arg-type]


@pytest.mark.usefixtures("uncompared")
def test_recorded_steps_have_the_same_bits(queue: cl.CommandQueue) -> None:
    expected = trained(queue, modules=MIXED)
    assert_same(trained(queue, recorded=True, modules=MIXED), expected)
    assert any((one != other).any() for one, other in zip(trained(queue), expected, strict=True))


def test_a_recording_of_one_rule_is_none_of_another(queue: cl.CommandQueue) -> None:
    act = amp.record(lambda x: ag.gelu(x))
    x = to_device(queue, np.ones((2, 8)), "float16")

    class Act(Module):
        def forward(self, x: Any) -> Any:
            return act(x)

    class Two(Module):
        def __init__(self) -> None:
            self.a, self.b = Act(), Act()

        def forward(self, x: Any) -> list[str]:
            with amp.autocast(dtype="float32"):
                return [self.b(x).value.dtype, self.a(x).value.dtype]

    with amp.init(modules={"a": "float32"}):
        assert [Two()(ag.tensor(x)) for _ in range(4)] == [["float16", "float32"]] * 4


def test_what_is_computed_again_follows_the_same_rules(queue: cl.CommandQueue) -> None:
    def forward(net: Net, x: Any) -> Any:
        for layer in net.layers:
            x = amp.checkpoint(layer, x)
        return amp.checkpoint(lambda x: net.head(x), x)

    assert_same(gradients(queue, forward, modules=MIXED), gradients(queue, modules=MIXED))


# ---------------------------------------------------------------------------------------------- 16-bit parameters


def convolutional(queue: cl.CommandQueue) -> Sequential:
    np.random.seed(0)
    norm = BatchNorm2dModule(queue, 4)
    return Sequential(Conv2d(queue, 1, 4, 3, pad=1), norm, ReLU(), Flatten(), Linear(queue, 64, 4))


@pytest.mark.parametrize("at", ["init", "decorate"])
@pytest.mark.parametrize(
    ("rules", "conv", "norm", "linear"),
    [
        ({}, "float16", "float32", "float16"),
        ({"layers.4": "bfloat16"}, "float16", "float32", "bfloat16"),
        ({"layers.[0-2]": "bfloat16", "*": "float32"}, "bfloat16", "float32", "float32"),
        ({"layers.1": "bfloat16"}, "float16", "bfloat16", "float16"),
        ({"layers.1": "float32", "layers.*": "bfloat16"}, "bfloat16", "float32", "bfloat16"),
    ],
    ids=str,
)
@pytest.mark.long
def test_o2_gives_parameters_their_rules_dtypes(
    queue: cl.CommandQueue, rules: dict[str, str], conv: str, norm: str, linear: str, at: str
) -> None:
    model = convolutional(queue)
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = amp.init(level="O2", modules=rules) if at == "init" else None
    if handle is None:
        amp.decorate(model, optimizer, modules=rules)
        handle = amp.init(level="O2", modules=rules)
    else:
        amp.decorate(model, optimizer)
    dtypes = {name: [param.dtype for param in model.layers[place].parameters()] for name, place in PLACES.items()}
    assert dtypes == {"conv": [conv] * 2, "norm": [norm] * 2, "linear": [linear] * 2}
    assert model.layers[1].running_mean.dtype == "float32"
    x, y = to_device(queue, np.random.standard_normal((8, 1, 4, 4))), to_device(queue, np.ones((8, 4)))
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = ag.mul(ag.mse_loss(model(ag.tensor(x)), ag.tensor(y)), LOSS_FACTOR)
        scaled_backward(handle, loss, optimizer)
        optimizer.step()
        losses.append(float(to_numpy(loss.value)[0]))
    assert losses[-1] < losses[0]
    assert handle.last_step is not None
    assert handle.last_step.stepped


PLACES = {"conv": 0, "norm": 1, "linear": 4}


def test_what_became_16_bit_cannot_be_float32_by_a_rule(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 4, 4, 4)
    amp.decorate(model, modules={"layers.2": "bfloat16"})
    with pytest.raises(
        ValueError, match=r"a parameter of Linear, .* was made bfloat16 earlier and cannot become float32"
    ):
        amp.decorate(model, modules={"layers.2": "float32"})


# ---------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("modules", "kind", "says"),
    [
        (["head"], TypeError, r"modules takes a dict of patterns and dtypes, such as .*, got \['head'\]"),
        ("head", TypeError, "got 'head'"),
        ({1: "float32"}, TypeError, "a pattern is a text, for the paths of modules, got 1"),
        (
            {"head": "float64"},
            ValueError,
            r"unknown dtype for modules\['head'\] 'float64': pass one of float16, bfloat16",
        ),
        ({"head": None}, ValueError, r"unknown dtype for modules\['head'\] None"),
    ],
)
def test_what_is_no_rule_is_refused(modules: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        amp.init(modules=modules)
    with pytest.raises(kind, match=says):
        amp.decorate([], modules=modules)
    assert not amp.init(enabled=False, modules=modules).is_active()


def test_16_bits_are_refused_where_all_is_float32() -> None:
    with pytest.raises(ValueError, match=r'level "O0" computes everything in float32, .* says head: bfloat16'):
        amp.init(level="O0", modules={"head": "bfloat16"})


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"haed": "float32"}, r"no module has a path that 'haed' matches \(near: head\)\.$"),
        ({"layers.7": "float32"}, r"near: layers\.\d, layers\.\d, layers\.\d"),
        ({"zzz": "float32"}, r"there are head, head\.inner, layers\.0, layers\.1, layers\.2\)"),
        ({"*": "float32", "head": "bfloat16"}, r"'head' decides about no module: '\*', which stands before it, matches "
         r"'head' first\. Write 'head' before it"),
        ({"a": "float32", "b": "float32"}, "no module has a path that 'a' .*; no module has a path that 'b'"),
    ],
)  # fmt: skip
def test_a_rule_for_no_module_is_warned_of_once(queue: cl.CommandQueue, rules: dict[str, str], says: str) -> None:
    net = Net(queue)
    net.more = Linear(queue, 4, 4)  # of more than five paths, five are named
    with amp.init(modules=rules), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            dtypes(net)
    (warning,) = [one for one in caught if "modules" in str(one.message)]
    assert warning.filename == __file__
    with pytest.warns(UserWarning, match=says):
        warnings.warn_explicit(warning.message, warning.category, warning.filename, 1)


def test_a_rule_is_judged_when_a_call_has_ended_well(queue: cl.CommandQueue) -> None:
    class Lazy(Module):
        fails = True

        def forward(self, x: Any) -> Any:
            if self.fails:
                raise KeyError("the data of a first batch")
            self.late = Linear(queue, 6, 4)
            return self.late(x)

    net, x = Lazy(), ag.tensor(to_device(queue, np.ones((2, 6))))
    for pattern, warns in (("late", False), ("later", True)):
        net.fails = True
        with amp.init(modules={pattern: "float32"}):
            with pytest.raises(KeyError):
                net(x)
            net.fails = False
            with pytest.warns(UserWarning, match="near: late") if warns else nullcontext():
                assert net(x).value.dtype == ("float16" if warns else "float32")


def test_rules_for_another_model_are_not_warned_of(queue: cl.CommandQueue) -> None:
    net, other = Net(queue), mlp(queue, 6, 6)
    with amp.init(modules={"head": "float32"}):
        other(ag.tensor(to_device(queue, np.ones((2, 6)))))
    assert net.seen == []


LIST = """
[float]
"netcl.autograd.tanh" = "Its output is compared."

[modules]
"layers.2" = "bfloat16"
"layers.*" = "float32"
"""


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(LIST)
    return path


def test_a_list_file_has_rules_too(queue: cl.CommandQueue, lists: Path) -> None:
    with amp.init(lists=lists):
        assert dtypes(Net(queue)) == ["float32", "float32", "bfloat16", "float16"]
    with amp.init(lists=lists, modules={"layers.0": "float16"}):  # those of the call come first
        assert dtypes(Net(queue)) == ["float16", "float32", "bfloat16", "float16"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[modules]\n"head" = "double"', r"line 2: 'head' needs a dtype, one of float16, .*; got 'double'"),
        ('[modules]\nhead = 32', r"line 2: 'head' needs a dtype, .* got 32"),
        ('modules = "float32"', "line 1: modules must be a table of patterns and dtypes"),
    ],
)  # fmt: skip
def test_a_malformed_rule_of_a_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=says):
        amp.init(lists=path)


def test_bfloat16_is_no_error_of_an_op(queue: cl.CommandQueue) -> None:
    net = mlp(queue, 16, 32, 32, 8)
    with amp.init(modules={"layers.2": "bfloat16"}) as handle:
        data = batch(queue, 16, 16, 8)
        times = []
        for tolerance in (8.0, 0.1):  # from where on the rounding of its inputs is counted as well
            found = amp.debugging.compare_accuracy(net, data, loss=ag.mse_loss, loss_scale=1.0, tolerance=tolerance)
            products = [one for one in found.values if (one.module, one.function) == ("layers.2", "matmul_op")]
            assert "bfloat16" in {one.dtype for one in products}
            assert max(one.times for one in products) < 3
            times += [one.times for one in products if one.value == "gradient of input 0"]
        assert times[1] < times[0]
        ranges = handle.ranges(lambda: loss_of(net, data).backward())
        stored = {row.name: row.dtype for row in ranges.rows if row.kind == "parameter" and "weight" in row.name}
    assert stored == {"layers.0.weight": "float16", "layers.2.weight": "bfloat16", "layers.4.weight": "float16"}


def test_the_rule_that_decided_is_shown(queue: cl.CommandQueue, tmp_path: Path) -> None:
    net = Net(queue)
    optimizer = SGD(net.parameters(), lr=0.1)
    with amp.init(modules=MIXED, debug="summary") as handle:
        train = stepping(handle, net, optimizer)  # type: ignore[arg-type]
        train(*batch(queue, 16, 6, 4))
        summary = handle.summary()
        assert summary.rules == {
            "head.*: float32": ["head", "head.inner"],
            "layers.[0-1]: bfloat16": ["layers.0", "layers.1"],
        }
        decided = {(row.module, row.name): row.decided for row in summary.rows if row.direction == "forward"}
        assert decided["head", "gelu"] == "float (head.*: float32)"
        assert decided["layers.0", "matmul_op"] == "half (layers.[0-1]: bfloat16)"
        assert decided["layers.2", "matmul_op"] == "half"
        assert "by module, head.*: float32: head, head.inner\n" in str(summary)
        handle.report(tmp_path / "run.html")
        page = (tmp_path / "run.html").read_text()
        assert "level O1; head.*: float32; layers.[0-1]: bfloat16" in page
        assert "<td>half (layers.[0-1]: bfloat16)</td>" in page
    with amp.init(modules={"head.*": "bfloat16"}, debug="attribution", loss_scale=2.0**30) as handle:
        stepping(handle, net, optimizer)(*batch(queue, 16, 6, 4))  # type: ignore[arg-type]
        explained = str(handle.explain())
        assert "backward of cast, for matmul_op in head.inner (Linear), policy half (head.*: bfloat16)\n" in explained
        assert 'modules={"head.*": "bfloat16"}' in explained  # in the cure, which loses nothing else
