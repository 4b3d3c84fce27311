"""netcl's memory and probes: what one queue frees is not handed to another queue, of clamp's tensors and, while AMP is
on, of netcl's; and what netcl would find out about a device by running kernels on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyopencl as cl
import pytest
from netcl.core import capabilities as netcls
from netcl.core import memory
from netcl.core.tensor import Tensor

from clamp import amp, bridge
from clamp.opencl.device import capabilities
from clamp.recordings.capture import address_of

SHAPE = (3, 1001)
DIFFER = {"buffer", "pool_handle", "shape", "_backend"}  # between two tensors of a kind
_CONTEXTS: list[cl.Context] = []  # Intel's runtime frees a context that only its queues refer to


def freed_address(queue: cl.CommandQueue) -> Any:
    """Where a tensor of this queue lay that is gone."""
    tensor = Tensor.from_shape(queue, SHAPE)
    return address_of(tensor.buffer)


@pytest.fixture
def queues(queue: cl.CommandQueue) -> list[cl.CommandQueue]:
    """Two queues of one context that no test has used."""
    context = cl.Context([queue.device])
    _CONTEXTS.append(context)
    return [cl.CommandQueue(context, queue.device) for _ in range(2)]


def test_a_tensor_of_clamp_s_has_all_that_netcl_s_constructor_gives(queue: cl.CommandQueue) -> None:
    netcls = vars(Tensor.from_shape(queue, SHAPE, dtype="float16"))
    made = bridge.empty(queue, SHAPE, "float16")
    for tensor in (made, bridge.view(made, SHAPE[::-1])):
        ours = vars(tensor)
        assert [name for name in netcls if name not in ours] == []
        assert {name: value for name, value in ours.items() if name in netcls and name not in DIFFER} == {
            name: value for name, value in netcls.items() if name not in DIFFER
        }


def test_each_queue_takes_from_its_own_pool_and_gives_back_to_it(queues: list[cl.CommandQueue]) -> None:
    with amp.init():
        for one, other in (queues, queues[::-1]):
            freed = freed_address(one)
            assert freed_address(other) != freed
            assert freed_address(one) == freed


@pytest.mark.parametrize("make", [bridge.empty, bridge.zeros])
def test_clamp_s_own_tensors_keep_to_their_queue_s_pool_without_amp(
    queues: list[cl.CommandQueue], make: Callable[..., Tensor]
) -> None:
    memory.get_persistent_pool(queues[0])
    for one, other in (queues, queues[::-1]):
        freed = address_of(make(one, SHAPE, "float32").buffer)
        assert address_of(make(other, SHAPE, "float32").buffer) != freed
        assert address_of(make(one, SHAPE, "float32").buffer) == freed


def test_the_queue_that_asked_first_keeps_netcls_pool(queues: list[cl.CommandQueue]) -> None:
    own = memory.get_persistent_pool(queues[0])
    with amp.init():
        assert memory.get_persistent_pool(queues[0]) is own
        further = memory.get_persistent_pool(queues[1])
        assert further is not own
        assert further.queue == queues[1]
        assert memory.get_persistent_pool(queue=queues[1]) is further


def test_afterwards_netcls_one_pool_is_back_and_tensors_live_on(queues: list[cl.CommandQueue]) -> None:
    Tensor.from_shape(queues[0], SHAPE)
    with amp.init():
        tensor = Tensor.from_shape(queues[1], SHAPE, fill=3.0)
    assert memory.get_persistent_pool(queues[1]) is memory.get_persistent_pool(queues[0])
    assert freed_address(queues[1]) == freed_address(queues[0])
    assert (tensor.to_host() == 3.0).all()


def test_memory_that_does_not_come_back_is_freed_in_its_turn(queues: list[cl.CommandQueue]) -> None:
    # The end of a tensor gives shared virtual memory back, unless Ctrl-C is raised in it: then launches still use it.
    queue = queues[0]
    bridge.empty(queue, (1,), "float32")
    pool, held = memory.get_persistent_pool(queue), queue.reference_count
    tensors = [bridge.empty(queue, (size,), "float32") for size in (3_001, 30_001)]
    new = [tensor for tensor in tensors if isinstance(tensor.buffer, cl.SVM)]
    assert len(new) == (len(tensors) if pool._use_svm else 0)
    assert queue.reference_count == held + len(new), "each holds the queue in whose order it is freed"


def test_more_tensors_of_one_size_than_netcls_pool_keeps_take_memory_once(queues: list[cl.CommandQueue]) -> None:
    pool = memory.get_persistent_pool(queues[0])
    kept = pool.max_buffers_per_bucket
    taken = []
    with amp.init():
        for _ in range(5):  # as in a training without a wait for the whole queue, for which netcl's waits
            held = [bridge.empty(queues[0], SHAPE, "float32") for _ in range(kept + 30)]
            del held
            taken.append((pool.stats.misses, bridge.free_bytes()))
    assert taken[2:] == taken[2:3] * 3
    assert pool.max_buffers_per_bucket == kept


# -------------------------------------------------------------------------------------------------------------- probes


@pytest.fixture
def unknown(queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """netcl has not looked at the queue's device yet; what it knew is there again after the test."""
    monkeypatch.setattr(netcls, "_CAPS_CACHE", {})


def test_netcl_knows_of_a_device_under_amp_what_it_knows_without(queue: cl.CommandQueue, unknown: None) -> None:
    alone = netcls.get_device_capabilities(queue)
    netcls.invalidate_capabilities(queue)
    with amp.init():
        assert netcls.get_device_capabilities(queue) == alone
    assert alone.inter_kernel_sync != "finish", "what netcl says where its look fails"


def test_nothing_is_compiled_to_look_at_a_processor(
    queue: cl.CommandQueue, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    build = cl.Program.build
    monkeypatch.setattr(
        cl.Program, "build", lambda self, *args, **kwargs: built.append(1) or build(self, *args, **kwargs)
    )
    with amp.init():
        netcls.get_device_capabilities(queue)
    assert bool(built) is not capabilities(queue).is_cpu
