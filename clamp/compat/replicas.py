"""netcl's training on several queues, ``netcl.distributed``, while a handle is active: losses are scaled there too."""

from __future__ import annotations

from functools import partial
from typing import Any

from clamp import session
from clamp.params.writes import unnoted
from clamp.patching import collectives
from clamp.patching.collectives import ScaledTape, keep_equal
from clamp.patching.meets import meets


@meets("netcl.distributed.data_parallel.sync_grads")
def sync_grads(wrapped: Any, instance: None, /, param_replicas: Any) -> None:
    """The mean of gradients over replicas, after which an overflow of one counts for all."""
    handle = session.active_handle()
    if handle is None:
        collectives.sync_grads(wrapped, param_replicas)
        return
    with unnoted():
        collectives.sync_grads(wrapped, param_replicas)
    handle.share_overflows(param_replicas)


@meets("netcl.distributed.trainer.data_parallel_step")
def data_parallel_step(
    wrapped: Any, instance: None, /, forward_fn: Any, params_replicas: Any, optimizers: Any, batch: Any, **hooks: Any
) -> Any:
    """A step on every replica, with scaled losses: netcl's calls ``forward_fn`` once for each replica, in order, and
    then ``tape.backward`` with what that returned."""
    handle = session.active_handle()
    if handle is None:
        return wrapped(forward_fn, params_replicas, optimizers, batch, **hooks)
    order = iter(optimizers)

    def forward(*inputs: Any) -> tuple[Any, ScaledTape]:
        loss, tape = forward_fn(*inputs)
        return loss, ScaledTape(tape, partial(handle.scale_loss_for, next(order)))

    result = wrapped(forward, params_replicas, optimizers, batch, **hooks)
    keep_equal(params_replicas)
    return result
