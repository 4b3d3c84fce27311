"""What means nothing as an argument of a public function is refused by clamp, in words, or taken: it never ends in an
error of Python's from somewhere inside."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.nn.containers import GELU
from netcl.optim import SGD
from netcl.optim.ema import ModelEMA

import clamp
from clamp import amp, session
from clamp.bridge import Node, Tensor
from clamp.casting.policy_table import CastPolicy, Entry
from clamp.compat.paddle import AmpScaler as PaddleAmpScaler
from clamp.compat.paddle import GradScaler as PaddleScaler
from clamp.compat.scalers import GradScaler as OneFlowScaler
from clamp.patching.wrap import netcl_wrapper
from tests.networks import mlp
from tests.reference import to_device

JUNK: tuple[Any, ...] = (
    3, -1, 1.5, float("nan"), "x", b"x", None, True, object(), [], [3], ["x"], {}, {"x": 3}, len, SGD, np.float16,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("shut_down")


def parts(queue: cl.CommandQueue) -> tuple[Any, Any]:
    model = mlp(queue, 4, 4)
    return model, SGD(model.parameters())


def keywords(function: Callable[..., Any], *names: str, **given: Any) -> list[Callable[[Any], Any]]:
    return [lambda junk, name=name: function(**given, **{name: junk}) for name in names]


def calls(queue: cl.CommandQueue, handle: Any, folder: Path) -> dict[str, list[Callable[[Any], Any]]]:
    """Functions by name, with a handle or before there is one: calls with junk in the place of one argument."""
    model, optimizer = parts(queue)
    x = ag.tensor(to_device(queue, np.ones(1)), requires_grad=True)
    scaler = amp.GradScaler()
    if handle is None:
        lists = ("custom_white_list", "custom_black_list")
        return {
            "init": keywords(amp.init, "dtype", "level", "loss_scale", *lists, "lists", "debug"),
            "initialize": [
                lambda junk: amp.initialize(junk, verbosity=0),
                lambda junk: amp.initialize(model, junk, verbosity=0),
                *keywords(
                    lambda **given: amp.initialize(mlp(queue, 4, 4), verbosity=0, **given),
                    "opt_level", "loss_scale", "num_losses", "min_loss_scale", "max_loss_scale", "dtype",
                    "cast_model_type", "keep_batchnorm_fp32", "master_weights", "cast_model_outputs",
                    "rounding_seed",
                ),
            ],
            "autocast": keywords(amp.autocast, "enabled", "dtype", "device_type"),
            "is_autocast_enabled": [amp.is_autocast_enabled, amp.get_autocast_dtype],
            "auto_cast": keywords(amp.auto_cast, "enable", "level", "dtype", "use_promote", *lists),
            "decorate": [
                lambda junk: amp.decorate(junk),
                lambda junk: amp.decorate(model, junk),
                *keywords(
                    lambda **given: amp.decorate(mlp(queue, 4, 4), **given),
                    "level", "dtype", "master_weight", "save_dtype", "excluded_layers", "rounding_seed",
                ),
            ],
            "GradScaler": keywords(
                amp.GradScaler, "init_scale", "growth_factor", "backoff_factor", "growth_interval", "device"
            ),
            "paddle's GradScaler": keywords(PaddleScaler, *signature(PaddleScaler).parameters),
            "OneFlow's GradScalers": [
                amp.StaticGradScaler, *keywords(OneFlowScaler, *signature(OneFlowScaler).parameters)
            ],
            "TensorCheckerConfig": keywords(
                partial(amp.debugging.TensorCheckerConfig, True), "debug_mode", "output_dir", "sampling"
            ),
            "custom_fwd": [amp.custom_fwd, *keywords(amp.custom_fwd, "cast_inputs", "device_type")],
            "custom_bwd": [amp.custom_bwd, *keywords(amp.custom_bwd, "device_type")],
            "half_function": [amp.half_function],
            "register_half_function": [
                lambda junk: amp.register_half_function(junk, "relu"),
                lambda junk: amp.register_half_function(ag, junk),
            ],
            "register": [lambda junk: amp.register(ag, "relu", junk)],
        }  # fmt: skip
    return {
        "load_state_dict": [amp.load_state_dict, lambda junk: amp.load_state_dict({"loss_scaler0": junk})],
        "scaler.load_state_dict": [
            scaler.load_state_dict,
            *keywords(
                lambda **given: scaler.load_state_dict({**scaler.state_dict(), **given}),
                "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker",
            ),
        ],
        "paddle's load_state_dict": keywords(
            lambda **given: PaddleScaler().load_state_dict({**PaddleScaler().state_dict(), **given}),
            *PaddleScaler().state_dict(),
        ),
        "paddle's GradScaler": [
            lambda junk, name=name: getattr(PaddleScaler(), name)(junk)
            for name in dir(PaddleScaler)
            if name.startswith("set_") or name in ("scale", "unscale_", "step", "load_state_dict")
        ],
        "setters": [
            lambda junk, name=name: getattr(amp.GradScaler(), name)(junk)
            for name in dir(amp.GradScaler)
            if name.startswith("set_")
        ],
        "handle.scalers": [handle.scalers[0].load_state_dict],
        "scale_loss": [
            lambda junk: handle.scale_loss(junk, optimizer).__enter__(),
            lambda junk: handle.scale_loss(x, junk).__enter__(),
            lambda junk: handle.scale_loss(x, optimizer, junk).__enter__(),
            lambda junk: amp.scale_loss(junk, optimizer).__enter__(),
        ],
        "wrap_optimizer": [handle.wrap_optimizer, lambda junk: handle.wrap_optimizer(optimizer, junk)],
        "GradScaler": [
            lambda junk: amp.GradScaler().scale(junk),
            lambda junk: amp.GradScaler().unscale_(junk),
            lambda junk: amp.GradScaler().step(junk),
            lambda junk: amp.GradScaler().update(junk),
            *keywords(lambda **given: amp.GradScaler(**given), "enabled"),
        ],
        "cast": [lambda junk: amp.cast(junk, "float16"), lambda junk: amp.cast(x, junk)],
        "master_params": [lambda junk: list(amp.master_params(junk))],
        "save_checkpoint": [
            lambda junk: amp.save_checkpoint(folder / "a.npz", junk),
            lambda junk: amp.save_checkpoint(folder / "a.npz", model, junk),
        ],
        "record": [amp.record],
        "of a step": [
            lambda junk, of=of: None if callable(junk) else of(junk)
            for of in (handle.explain, handle.summary, handle.ranges)
        ],
        "distribute": [handle.distribute],
    }  # fmt: skip


def is_of_clamp(error: BaseException) -> bool:
    """Whether an error was raised by a line of clamp's that says so, with a text of its own."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    folder = str(Path(clamp.__file__).parent)
    lines = [
        linecache.getline(last.filename, number).strip()
        for number in range(last.lineno or 1, (last.end_lineno or 1) + 1)
    ]
    return last.filename.startswith(folder) and lines[0].startswith("raise ")


@pytest.mark.parametrize("active", [False, True], ids=["before init", "active"])
def test_junk_is_refused_in_words_or_taken(queue: cl.CommandQueue, tmp_path: Path, active: bool) -> None:
    bare: list[str] = []
    handle = amp.init() if active else None
    node = ag.tensor(to_device(queue, np.ones(2)), requires_grad=True)
    for name, each in calls(queue, handle, tmp_path).items():
        for number, call in enumerate(each):
            for junk in (*JUNK, node, node.value):
                try:
                    call(junk)
                except Exception as error:
                    if not is_of_clamp(error):
                        bare.append(f"{name}, {number}: {junk!r:.20}: {type(error).__name__}: {error}")
                if not active:
                    amp.shutdown()
    assert not bare, "\n".join(bare)


def test_what_was_refused_says_what_to_pass(queue: cl.CommandQueue) -> None:
    model, _ = parts(queue)
    said: dict[str, Callable[[], Any]] = {
        r"autocast takes no device or device type: .*'cuda'": lambda: amp.autocast(device_type="cuda"),
        r"autocast takes no device or device type: .*'cpu'": lambda: amp.autocast("cpu"),
        r"amp.autocast: enabled is 'False'; pass True or False": lambda: amp.autocast("False"),
        r"amp.auto_cast: enable is 'False'": lambda: amp.auto_cast("False"),
        r"amp.init: enabled is 'False'": lambda: amp.init(enabled="False"),
        r"amp.init: check_finite is 'no'": lambda: amp.init(check_finite="no"),
        r"amp.init: allow_banned is 'no'": lambda: amp.init(allow_banned="no"),
        r"amp.init: verbose is 'no'": lambda: amp.init(verbose="no"),
        r"amp.initialize: enabled is 'False'": lambda: amp.initialize(model, enabled="False"),
        r"amp.GradScaler: enabled is 'False'": lambda: amp.GradScaler(enabled="False"),
        r"AmpScaler: enable is 1024.0": lambda: PaddleAmpScaler(1024.0),
        r"use_dynamic_loss_scaling is 'False'": lambda: PaddleScaler(use_dynamic_loss_scaling="False"),
        r"load_state_dict: use_dynamic_loss_scaling is 'no'": lambda: PaddleScaler().load_state_dict(
            {**PaddleScaler().state_dict(), "use_dynamic_loss_scaling": "no"}
        ),
        r"incr_ratio must be above 1, not 1.0": lambda: PaddleScaler(incr_ratio=1.0),
        r"decr_every_n_nan_or_inf must be a number, not True": lambda: PaddleScaler(decr_every_n_nan_or_inf=True),
        r"decr_count must be an integer from 0 .* not -1": lambda: PaddleScaler().load_state_dict(
            {**PaddleScaler().state_dict(), "decr_count": -1}
        ),
        r"_growth_tracker must be an integer from 0 .* not -1": lambda: amp.GradScaler().load_state_dict(
            {**amp.GradScaler().state_dict(), "_growth_tracker": -1}
        ),
        r"amp.auto_cast: use_promote is 'no'; pass True or False": lambda: amp.auto_cast(use_promote="no"),
        r"amp.initialize: rounding_seed is 'x'": lambda: amp.initialize(
            model, SGD(model.parameters()), opt_level="O2", rounding_seed="x", verbosity=0
        ),
        r"the loss scale 65536.0 is not between min .* and max 8.0": lambda: amp.init(
            loss_scale=amp.ScaleRule(max=8.0)
        ),
        r"loss_scale must be 'auto', .* not None": lambda: amp.init(loss_scale=None),
        r"loss_scale must be 'auto', .* not 0": lambda: amp.init(loss_scale=0),
        r"loss_scale must be 'auto', .* not {'initial'": lambda: amp.init(loss_scale={"initial": 1024.0}),
        "float8": lambda: amp.autocast(dtype="float8"),
        r"GradScaler takes no device or device type: .*'cuda'": lambda: amp.GradScaler(device="cuda"),
        r"GradScaler takes no device or device type: .*'cpu'": lambda: amp.GradScaler("cpu"),
        r"is_autocast_enabled takes no device or device type: .*'cuda'": lambda: amp.is_autocast_enabled("cuda"),
        r"get_autocast_dtype takes no device or device type: .*'cuda'": lambda: amp.get_autocast_dtype("cuda"),
        r"custom_fwd takes no device": lambda: amp.custom_fwd(device_type="cuda", cast_inputs="float16"),
        r"custom_white_list takes a list of names, not one: pass \['relu'\]": lambda: amp.init(
            custom_white_list="relu"
        ),
        r"custom_black_list takes a list of names, not one": lambda: amp.auto_cast(custom_black_list="relu"),
        r"custom_white_list takes names of functions, .* got 3": lambda: amp.init(custom_white_list=[3]),
        r"lists takes the path of a list file, got 3": lambda: amp.init(lists=3),
        r"pass the queue .* got 'cuda'": lambda: amp.is_float16_supported("cuda"),
        r"pass the queue .* got <pyopencl.Device": lambda: amp.is_bfloat16_supported(queue.device),
        r"pass the queue .* got <pyopencl.Context": lambda: amp.get_amp_supported_dtype(queue.context),
        r"amp.max_memory: reset is 'no'": lambda: amp.max_memory(reset="no"),
        r"mse_loss: target is int32, .* convert it, Tensor.from_host": lambda: amp.autocast()(ag.mse_loss)(
            to_device(queue, np.ones(4)), Tensor.from_host(queue, np.ones(4, np.int32), dtype="int32")
        ),
        r"compare_accuracy: tolerance is 'x'": lambda: amp.debugging.compare_accuracy(len, tolerance="x"),
        r"TensorCheckerConfig: enable is 'no'": lambda: amp.debugging.TensorCheckerConfig("no"),
        r"debug must be None, .* got 3": lambda: amp.init(debug=3),
        r"pass the module or class that has the function": lambda: amp.register_half_function(None, "relu"),
        r"master_weight is True or False, or one of .*, got 3": lambda: amp.decorate(model, master_weight=3),
        r"an iterable of them, not \[\], which has none": lambda: amp.GradScaler().scale([]),
        r"load_state_dict takes the dict that .* returned, got 3": lambda: amp.GradScaler().load_state_dict(3),
        r"got the class SGD: make one of it": lambda: amp.decorate(model, SGD),
        r"amp.init: enabled is 'bfloat16'; pass True or False": lambda: amp.init("bfloat16"),
        r"amp.initialize: enabled is 'O2'": lambda: amp.initialize(model, None, "O2"),
        r"amp.autocast\(dtype='bfloat16'\)": lambda: amp.autocast("bfloat16"),
        r"min_loss_scale 600.0 is above max_loss_scale 512.0": lambda: amp.initialize(
            model, min_loss_scale=600.0, max_loss_scale=512.0, verbosity=0
        ),
    }
    for message, call in said.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert session.active_handle() is None


def test_an_error_shows_a_node_without_its_graph(queue: cl.CommandQueue) -> None:
    node = ag.tensor(to_device(queue, np.ones((2, 3), np.float32)), requires_grad=True)
    for _ in range(12):  # netcl's repr of a node doubles each time
        node = ag.add(node, ag.relu(node))
    handle = amp.init()
    calls_with_it = [
        lambda: handle.explain(node), lambda: amp.checkpoint(node), lambda: amp.half_function(node),
        lambda: ag.permute(node, node), lambda: ag.clamp(node, min_val=[node], max_val=1.0),
        lambda: handle.scalers[0].set_scale(node), lambda: amp.load_state_dict(node),
    ]  # fmt: skip
    for call in calls_with_it:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert len(str(caught.value)) < 400
        assert "Node of shape (2, 3), float32" in str(caught.value)
    handle.shutdown()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pass_without_its_with_says_so(queue: cl.CommandQueue, enabled: bool) -> None:
    model, optimizer = parts(queue)
    handle = amp.init(enabled=enabled)
    loss = ag.sum(model(ag.tensor(to_device(queue, np.ones((1, 4))))))
    passes = [lambda: handle.scale_loss(loss, optimizer), lambda: amp.scale_loss(loss, optimizer)]
    wrapped = handle.wrap_optimizer(optimizer)
    for begin in (*passes[: 1 if enabled else 2], lambda: wrapped.scale_loss(loss)):
        if enabled and begin is passes[0]:
            continue  # after wrap_optimizer
        with pytest.raises(AttributeError, match="has no 'backward': it is for a `with`"):
            begin().backward()
    amp.shutdown()
    with amp.init(enabled=enabled) as handle:
        with pytest.raises(AttributeError, match="has no 'backward': it is for a `with`"):
            handle.scale_loss(loss, optimizer).backward()
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    assert optimizer.params[0].grad is not None


OFF: dict[str, Callable[[Any, Any], Any]] = {
    "GradScaler": lambda loss, optimizer: amp.GradScaler(enabled=False).scale(loss),
    "GradScaler, in a list": lambda loss, optimizer: amp.GradScaler(enabled=False).scale([loss])[0],
    "paddle's GradScaler": lambda loss, optimizer: PaddleScaler(enable=False).scale(loss),
    "NoOpHandle": lambda loss, optimizer: amp.init(enabled=False).scale_loss(loss, optimizer).__enter__(),
    "initialize": lambda loss, optimizer: [
        amp.initialize([], enabled=False), amp.scale_loss(loss, optimizer).__enter__()
    ][1],
}  # fmt: skip


@pytest.mark.parametrize("name", OFF)
def test_what_amp_that_is_off_gives_back_has_a_backward(queue: cl.CommandQueue, name: str) -> None:
    """In a process that has patched nothing, in which netcl's nodes have none."""
    session.forget_patches()
    assert not hasattr(Node, "backward")
    model, optimizer = parts(queue)
    loss = ag.sum(model(ag.tensor(to_device(queue, np.ones((1, 4))))))
    assert OFF[name](loss, optimizer) is loss
    OFF[name](loss, optimizer).backward()
    assert optimizer.params[0].grad.to_host().any()
    assert not hasattr(Node, "backward")


def test_the_handle_that_does_nothing_has_every_public_name() -> None:
    off = amp.init(enabled=False)
    with amp.init() as on:
        names = {name for name in dir(on) if not name.startswith("_")}
    missing = names - set(dir(off))
    assert not missing
    for name in ("explain", "summary", "ranges"):
        assert str(getattr(off, name)(lambda: None))
    assert list(off.scalers) == []


def test_the_documents_name_every_public_name_of_the_handle() -> None:
    root = Path(clamp.__file__).parents[1]
    text = "".join(file.read_text("utf-8") for file in (root / "README.md", *sorted((root / "docs").glob("*.md"))))
    unnamed = [name for name in dir(amp.AmpHandle) if name[0] != "_" and not re.search(rf"handle\.{name}\b", text)]
    assert not unnamed


_TAKE_TENSORS: dict[str, Callable[[Any, Any], Any]] = {  # of x (2, 2) and of what stands where a tensor does
    "mul": ag.mul,
    "mul, on the left": lambda x, junk: ag.mul(junk, x),
    "operator, on the left": lambda x, junk: junk * x,
    "comparison, on the left": lambda x, junk: junk >= x,
    "maximum": ag.maximum,
    "matmul_op": ag.matmul_op,
    "relu": lambda x, junk: ag.relu(junk),
    "dropout": lambda x, junk: ag.dropout(junk, p=0.5),
    "reshape": lambda x, junk: ag.reshape(junk, (4,)),
    "mse_loss": ag.mse_loss,
    "binary_cross_entropy_with_logits": ag.binary_cross_entropy_with_logits,
    "layer_norm": lambda x, junk: ag.layer_norm(x, junk, junk),
    "masked_fill": ag.masked_fill,
    "where": lambda x, junk: ag.where(junk, x, x),
}


@pytest.mark.parametrize("name", _TAKE_TENSORS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_no_tensor_is_named_where_one_belongs(queue: cl.CommandQueue, name: str, dtype: str) -> None:
    with amp.init(dtype=dtype):
        x = amp.cast(ag.tensor(to_device(queue, np.ones((2, 2)))), dtype)
        with pytest.raises(TypeError, match=r"given a numpy array where .* ag\.tensor\(Tensor\.from_host\(queue"):
            _TAKE_TENSORS[name](x, np.ones((2, 2), np.float32))
        for junk in (None, "x", [1.0, 2.0]):
            with pytest.raises(TypeError, match=f"given {re.escape(repr(junk))} where it takes a node or a tensor"):
                _TAKE_TENSORS[name](x, junk)


def test_an_array_left_of_a_bare_tensor_is_refused(queue: cl.CommandQueue) -> None:
    array = np.full((2, 2), 3.0, np.float32)
    with amp.init():
        x = to_device(queue, np.ones((2, 2)))
        for operator in (np.multiply, np.subtract, np.greater_equal):
            with pytest.raises(
                TypeError, match=r"given a numpy array .* is a tensor: pass Tensor\.from_host\(queue, array"
            ):
                operator(array, x)
        np.testing.assert_array_equal((array.max() * x).to_host(), array)
        np.testing.assert_array_equal(np.add(x, x).to_host(), np.full((2, 2), 2.0))
        with pytest.raises(TypeError, match="would ask whether the whole tensor is true"):
            np.sign(x)
    assert not hasattr(Tensor, "__array_ufunc__")


@pytest.mark.parametrize("function", [np.maximum, np.fmin, np.logical_and], ids=lambda x: x.__name__)
def test_numpys_functions_that_ask_for_truth_are_refused(queue: cl.CommandQueue, function: Any) -> None:
    """They would give one of the two as it is, whatever its elements are."""
    with amp.init():
        x = ag.tensor(to_device(queue, np.array([-1.0, 3.0])), requires_grad=True)
        for given in ((x, 0.0), (0.0, x), (x, x)):
            with pytest.raises(TypeError, match=f"numpy.{function.__name__} would ask whether the whole node is true"):
                function(*given)
        np.testing.assert_array_equal((np.float32(2) > x).value.to_host(), [1, 0])


def test_a_step_that_is_given_the_loss_says_where_it_goes(queue: cl.CommandQueue) -> None:
    model, optimizer = parts(queue)
    with amp.init() as handle:
        loss = ag.sum(model(ag.tensor(to_device(queue, np.ones((1, 4))))))
        with handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        for call in (lambda: optimizer.step(loss), lambda: optimizer.step(loss=loss)):
            with pytest.raises(TypeError, match=r"SGD\.step\(\) takes no arguments, got <Node .*: the loss goes to"):
                call()
        optimizer.step()
        assert handle.last_step.stepped


def test_a_node_of_an_array_is_told(queue: cl.CommandQueue) -> None:
    """netcl's ``ag.tensor`` takes an array as it is, and says nothing."""
    model, _ = parts(queue)
    with amp.init():
        node = ag.tensor(np.ones((3, 4), np.float32))
        right = ag.tensor(to_device(queue, np.ones(1)))
        for call in (model, ag.relu, ag.sum, lambda x: x * 2.0, lambda x: ag.mse_loss(right, x)):
            with pytest.raises(TypeError, match=r"given a node of .* pass ag\.tensor\(Tensor\.from_host\(queue, array"):
                call(node)


@pytest.mark.parametrize("function", [np.mean, np.sum, np.max, np.std, np.linalg.norm, np.isclose, np.stack, np.copy])
def test_numpys_functions_of_arrays_take_no_node(queue: cl.CommandQueue, function: Any) -> None:
    """To them it is an array of one object, whose mean is that object."""
    x = ag.tensor(to_device(queue, np.array([-1.0, 3.0])))
    more = {np.isclose: (1.0,)}.get(function, ())
    with amp.init():
        for each, what in ((x, "node: .*node.value"), (x.value, "tensor: read its numbers first, tensor")):
            message = rf"numpy.{function.__name__} takes arrays, and was given a {what}\.to_host\(\)"
            with pytest.raises(TypeError, match=message):
                function([each] if function is np.stack else each, *more)
            assert (np.shape(each), np.ndim(each), np.size(each), np.size(a=each, axis=0)) == ((2,), 1, 2, 2)
        with pytest.raises(TypeError, match=r"numpy.clip takes .* use netcl's own function, ag.clip, or"):
            np.clip(x, 0.0, 1.0)


def test_a_comparison_is_neither_true_nor_false(queue: cl.CommandQueue) -> None:
    """``if loss < best`` would hold whatever they are."""
    with amp.init():
        x = ag.tensor(to_device(queue, np.array([-1.0, 3.0])), requires_grad=True)
        for compare in (lambda: x < 1.0, lambda: x >= x, lambda: x > 2.0, lambda: ag.le(x.value, 1.0)):
            with pytest.raises(TypeError, match="neither true nor false"):
                assert compare()
        with pytest.raises(TypeError, match="neither true nor false"):
            max(x, x * 2.0)
        np.testing.assert_array_equal(ag.where(x < 1.0, x, 0.0).value.to_host(), [-1.0, 0.0])
        assert x


def test_nodes_as_indices_are_shown_without_their_graphs(queue: cl.CommandQueue) -> None:
    x = ag.tensor(to_device(queue, np.ones((2, 3))), requires_grad=True)
    with amp.init(), pytest.raises(TypeError, match=r"\[<Node of shape \(2, 3\), float32>.* whole numbers"):
        ag.index_select(x, 0, [x, x])


@pytest.mark.parametrize("name", ["index_select", "gather", "index_add"])
@pytest.mark.parametrize("junk", ["x", b"x", None, ["x"], [[1, 2], [3]], {}], ids=repr)
def test_indices_that_are_no_numbers_are_named(queue: cl.CommandQueue, name: str, junk: Any) -> None:
    with amp.init():
        x = ag.tensor(to_device(queue, np.ones((2, 2))))
        with pytest.raises(TypeError, match=rf"^{name} was given {re.escape(repr(junk))} where it takes whole numbers"):
            getattr(ag, name)(x, 0, junk, *([x] if name == "index_add" else []))


def test_an_error_from_elsewhere_comes_with_the_call(queue: cl.CommandQueue) -> None:
    with amp.init():
        x = ag.tensor(to_device(queue, np.ones((2, 2))))
        integers = ag.tensor(Tensor.from_shape(queue, (3,), dtype="int32"))
        with pytest.raises(ValueError, match="unsupported dtype int32") as of_a_tensor:
            ag.relu(integers)
        with pytest.raises(ValueError, match="expected 4, got 2") as of_a_number:
            ag.conv_transpose2d(x, np.float32(3))
    assert of_a_tensor.value.__notes__ == ["This came of the call relu(node of int32 (3,))"]
    assert of_a_number.value.__notes__[0].startswith("This came of the call conv_transpose2d(node of float32 (2, 2), ")


def test_a_work_group_that_the_device_has_no_room_for_is_explained(queue: cl.CommandQueue) -> None:
    class TooLargeError(cl.LogicError):  # type: ignore[misc]
        code = cl.status_code.INVALID_WORK_GROUP_SIZE

    def launch(x: Any) -> None:
        raise TooLargeError("clEnqueueNDRangeKernel failed: INVALID_WORK_GROUP_SIZE")

    x = to_device(queue, np.ones((2, 2)))
    entry = Entry("netcl.ops.sort", CastPolicy.FLOAT, "netcl's own.")
    with amp.init(), pytest.raises(TooLargeError) as raised:
        netcl_wrapper(entry)(launch, None, (x,), {})
    called, limit = raised.value.__notes__
    assert called == "This came of the call sort(tensor of float32 (2, 2))"
    assert f"({queue.device.max_work_group_size} at most" in limit


@pytest.mark.parametrize("name", ["add", "matmul_op", "mse_loss", "cat"])
def test_a_node_in_a_node_is_named(queue: cl.CommandQueue, name: str) -> None:
    with amp.init():
        node = ag.tensor(to_device(queue, np.ones((2, 2))))
        twice = ag.tensor(node)
        with pytest.raises(TypeError, match=r"a node was given to ag\.tensor, which takes tensors"):
            ag.cat([node, twice], 0) if name == "cat" else getattr(ag, name)(node, twice)


@pytest.mark.parametrize("name", ["mul", "relu", "sum"])
def test_a_gradient_that_does_not_belong_to_the_result_is_refused(queue: cl.CommandQueue, name: str) -> None:
    with amp.init():
        x = ag.tensor(to_device(queue, np.ones((3, 1))), requires_grad=True)
        out = {"mul": lambda: ag.mul(x, 2.0), "relu": lambda: ag.relu(x), "sum": lambda: ag.sum(x, 1)}[name]()
        for shape in ((3, 3), (1,), (1, 3), (2, 3)):
            with pytest.raises(ValueError, match=rf"^backward: .* shape {re.escape(str(shape))} for a result"):
                ag.Tape().backward(out, to_device(queue, np.ones(shape)))
        for grad in (np.ones((3, 1)), 1.0, x):
            with pytest.raises(TypeError, match=r"^backward begins with a gradient that is a tensor, .* its \.value"):
                out.backward(grad)
        elsewhere = to_device(cl.CommandQueue(queue.context, queue.device), np.ones(out.value.shape))
        with pytest.raises(ValueError, match=r"^backward: the tensors are on different queues"):
            out.backward(elsewhere)
        assert x.grad is None
        loss = ag.sum(x)
        loss.backward(to_device(queue, [[4.0]]))
        np.testing.assert_array_equal(x.grad.to_host(), np.full((3, 1), 4.0))
        one = ag.tensor(to_device(queue, [[2.0]]), requires_grad=True)
        ag.mul(one, 3.0).backward(to_device(queue, [4.0]))
        np.testing.assert_array_equal(one.grad.to_host(), [[12.0]])


@pytest.mark.parametrize("loss", [None, 1.0, "a tensor"])
def test_a_backward_from_what_is_no_node_says_so(queue: cl.CommandQueue, loss: Any) -> None:
    with amp.init(), pytest.raises(TypeError, match=r"from the node of a loss, .* under no_grad, or from bare tensors"):
        ag.Tape().backward(to_device(queue, np.ones(1)) if loss == "a tensor" else loss)


def test_arguments_that_netcl_does_not_take_are_refused_in_its_words(queue: cl.CommandQueue) -> None:
    model = mlp(queue, 4, 4)
    average = ModelEMA(model)
    calls: dict[str, Callable[[], Any]] = {
        "update": lambda: average.update(model),
        "from_host": lambda: Tensor.from_host(queue),
        "Sequential": lambda: model(1, 2),
        "backward": lambda: ag.Tape().backward(),
        "forward": lambda: GELU().forward(),
    }

    def message(call: Callable[[], Any]) -> str:
        with pytest.raises(TypeError, match="positional argument") as said:
            call()
        return str(said.value)

    netcls = {name: message(call) for name, call in calls.items()}
    amp.init()
    assert {name: message(call) for name, call in calls.items()} == netcls
