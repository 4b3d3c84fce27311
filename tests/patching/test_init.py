"""init and shutdown: netcl is patched, and comes back to the identical objects."""

from __future__ import annotations

import gc
import importlib
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import netcl
import netcl.nn
import netcl.optim
import netcl.trainer  # noqa: F401
import numpy as np
import pyopencl as cl
import pytest
from netcl import autograd as ag
from netcl.autograd import matmul_op  # bound before init, as users' scripts do
from netcl.autograd.engine import Node, Tape
from netcl.nn import functional as F
from netcl.optim import SGD, Adam, AdamW, Momentum, RMSProp

from clamp import amp, bridge
from clamp.bridge import Parameter, Tensor
from tests.networks import batch, loss_of, mlp, step
from tests.reference import to_device, to_numpy
from tests.scripts import run_script

pytestmark = pytest.mark.usefixtures("shut_down")

_CLASSES = (Node, Tape, SGD, Adam, AdamW, Momentum, RMSProp)


def snapshot() -> dict[tuple[str, str], object]:
    """Every attribute of every netcl module, of the classes that clamp touches, and of this module."""
    owners: dict[str, object] = {
        name: module
        for name, module in sys.modules.items()
        if isinstance(module, types.ModuleType) and (name.split(".")[0] == "netcl" or name == __name__)
    }
    owners |= {cls.__qualname__: cls for cls in _CLASSES}
    return {(name, key): value for name, owner in owners.items() for key, value in vars(owner).items()}


@pytest.fixture
def used_queue(queue: cl.CommandQueue) -> cl.CommandQueue:
    """A queue of the last backward pass, which netcl's engine keeps in an attribute of its own."""
    with ag.Tape() as tape:
        result = ag.relu(ag.tensor(Parameter.from_host(queue, np.ones(3, np.float32))))
    tape.backward(result)
    return queue


def assert_identical(before: dict[tuple[str, str], object]) -> None:
    after = snapshot()
    assert after.keys() >= before.keys()
    changed = [key for key in before if after[key] is not before[key] and not key[1].startswith("__")]
    # netcl's own caches and counters are containers that change in place; rebinding is what we look for
    assert changed == []
    assert not hasattr(Node, "backward")


def test_disabled_changes_no_attribute() -> None:
    before = snapshot()
    handle = amp.init(enabled=False)
    assert_identical(before)
    assert isinstance(handle, amp.NoOpHandle)
    assert not handle.is_active()
    assert handle.loss_scale == 1.0


def test_a_handle_is_not_turned_off_by_the_way(queue: cl.CommandQueue) -> None:
    with amp.init() as handle:
        with pytest.raises(RuntimeError, match=r"enabled=False\) was called while a handle is active: call amp"):
            amp.init(enabled=False)
        with pytest.raises(RuntimeError, match=r"init\(\) was called while a handle is active: call amp\.shutdown"):
            amp.init()
        assert handle.is_active()
    assert not amp.init(enabled=False).is_active()


def test_disabled_handle_passes_through(queue: cl.CommandQueue) -> None:
    handle = amp.init(enabled=False)
    model, data = mlp(queue, 8, 16, 4), batch(queue, 8, 8, 4)
    optimizer = handle.wrap_optimizer(SGD(model.parameters(), lr=1e-3))
    loss = loss_of(model, data)
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    assert "backward" not in vars(loss)
    optimizer.step()
    loss = loss_of(model, data)
    with optimizer.scale_loss(loss) as scaled, handle.disable_casts():
        Tape().backward(scaled)
    handle.clear_cache()
    handle._clear_cache()
    handle.shutdown()


def test_shutdown_restores_the_identical_objects(used_queue: cl.CommandQueue) -> None:
    before = snapshot()
    original, code = matmul_op, matmul_op.__code__
    handle = amp.init()
    assert ag.matmul is ag.matmul_op is matmul_op is original
    assert matmul_op.__code__ is not code
    model = mlp(used_queue, 8, 16, 4)
    step(handle, model, Adam(model.parameters()), batch(used_queue, 8, 8, 4))
    handle.shutdown()
    assert_identical(before)
    assert matmul_op.__code__ is code
    handle.shutdown()


def test_shutdown_restores_after_an_exception_inside_a_step(used_queue: cl.CommandQueue) -> None:
    before = snapshot()
    model, data = mlp(used_queue, 8, 16, 4), batch(used_queue, 8, 8, 4)
    optimizer = SGD(model.parameters())

    def failing_step(handle: amp.AmpHandle) -> None:
        with handle.scale_loss(loss_of(model, data), optimizer) as scaled:
            scaled.backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), amp.init() as handle:
        failing_step(handle)
    assert_identical(before)


@pytest.mark.slow
def test_a_thousand_inits_leave_memory_flat() -> None:
    def cycle(times: int) -> int:
        for _ in range(times):
            amp.init().shutdown()
        gc.collect()
        return len(gc.get_objects())

    before = snapshot()
    cycle(10)
    first = cycle(90)
    last = cycle(900)
    assert last - first < 500, "objects pile up from one init to the next"
    assert_identical(before)


def test_a_failing_init_leaves_netcl_alone() -> None:
    before = snapshot()
    for arguments in (
        {"dtype": "float8"},
        {"level": "O9"},
        {"loss_scale": "huge"},
        {"loss_scale": -1.0},
        {"custom_white_list": ["no_such_function"]},
        {"custom_white_list": ["softmax"], "custom_black_list": ["softmax"]},
        {"custom_white_list": ["softmax"], "custom_black_list": ["netcl.nn.functional.softmax"]},
        {"lists": "/no/such/file.toml"},
    ):
        with pytest.raises(ValueError, match=r"."):
            amp.init(**arguments)
    assert_identical(before)
    amp.init().shutdown()


def test_a_listed_module_imported_later_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_ops.py").write_text("def double(x):\n    return x\n")
    (tmp_path / "my.toml").write_text('[half]\n"late_ops.double" = "A test."\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    handle = amp.init(lists=tmp_path / "my.toml")
    module = importlib.import_module("late_ops")
    assert hasattr(module.double, "__wrapped__")
    handle.shutdown()
    assert not hasattr(module.double, "__wrapped__")
    del sys.modules["late_ops"]


@pytest.mark.parametrize("module", ["netcl.autograd", "netcl.nn.functional", "netcl.autograd.ops"])
def test_a_list_file_means_a_function_by_any_of_its_names(queue: cl.CommandQueue, tmp_path: Path, module: str) -> None:
    (tmp_path / "my.toml").write_text(f'[half]\n"{module}.softmax" = "A test."\n')
    x = ag.tensor(to_device(queue, [[1.0, 2.0]]))
    with amp.init(lists=tmp_path / "my.toml"):
        assert (ag.softmax(x).value.dtype, F.softmax(x).value.dtype) == ("float16", "float16")


class _Rows:
    """As data of other libraries: its ``shape`` is no tuple."""

    @property
    def shape(self) -> list[int]:
        return [2, 2]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(4.0, dtype=dtype).reshape(2, 2)


def test_a_tensor_of_the_hosts_values_is_as_without_amp(queue: cl.CommandQueue) -> None:
    given = [[1, 2], 3.0, np.arange(6.0).reshape(2, 3).T, np.arange(6, dtype=np.float32)[::-2], _Rows()]

    def made() -> list[Any]:
        tensors = [Tensor.from_host(queue, x, dtype) for x in given for dtype in (None, "half", "int32")]
        return [(x.shape, x.dtype, x.backend, type(x.pool_handle), to_numpy(x).tolist()) for x in tensors]

    without = made()
    amp.init()
    bridge.empty(queue, (1,), "float32")  # the queue that tensors were made on last
    assert made() == without


def test_what_a_user_replaced_meanwhile_is_left_alone() -> None:
    original = ag.relu

    def mine(x: object) -> object:
        return x

    handle = amp.init()
    ag.relu = mine
    handle.shutdown()
    try:
        assert ag.relu is mine
    finally:
        ag.relu = original


def test_importing_clamp_changes_no_netcl_attribute(tmp_path: Path) -> None:
    import subprocess

    script = textwrap.dedent("""
        import sys, netcl, netcl.nn, netcl.optim, netcl.autograd
        modules = {n: m for n, m in sys.modules.items() if n.startswith("netcl")}
        before = {(n, k): id(v) for n, m in modules.items() for k, v in vars(m).items()}
        from clamp import amp
        after = {(n, k): id(v) for n, m in modules.items() for k, v in vars(m).items()}
        assert all(after[key] == value for key, value in before.items())
    """)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_a_script_ends_in_silence_whatever_it_still_holds(queue: cl.CommandQueue, tmp_path: Path) -> None:
    """A tape at the level of a module, say, which dies when modules are cleared already."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import numpy as np
            import pyopencl as cl
            from clamp import amp
            from netcl import autograd as ag
            from netcl.core.tensor import Tensor
            from netcl.nn.layers import Linear
            from netcl.optim import SGD

            context = cl.create_some_context(interactive=False)
            queue = cl.CommandQueue(context)
            model = Linear(queue, 3, 2)
            optimizer = SGD(list(model.parameters()), lr=0.1)
            handle = amp.init(dtype="float16")
            tape = ag.Tape()
            ag.set_current_tape(tape)
            loss = ag.mean(model(ag.tensor(Tensor.from_host(queue, np.ones((4, 3), np.float32)))))
            with handle.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            unused = ag.Tape()
        """),
        "utf-8",
    )
    run_script(queue, str(script))


@pytest.mark.parametrize("begin", [amp.init, lambda: amp.autocast().__enter__()], ids=["init", "autocast"])
def test_what_fails_while_patches_are_put_leaves_netcl_as_it_was(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[], Any]
) -> None:
    codes = ag.relu.__code__, SGD.step, ag.Tape.backward
    with monkeypatch.context() as patch:
        patch.setattr("clamp.patching.redirect.Bindings.show_inside", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            begin()
    assert (ag.relu.__code__, SGD.step, ag.Tape.backward) == codes
    with amp.init():
        assert ag.relu.__code__ is not codes[0]
    assert ag.relu.__code__ is codes[0]
