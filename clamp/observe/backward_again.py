"""Backward run once more, over ops whose forward is held."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clamp import bridge
from clamp.bridge import Tensor
from clamp.observe.frames import BACKWARD, Frame, Value
from clamp.observe.place import NOWHERE
from clamp.ops.elementwise import elementwise
from clamp.scaling.scaled_loss import SCALE_OP


def gradients_of(forward: Sequence[Frame], loss: Value, scale: float) -> list[Frame]:
    """The ops of a backward, run now; what they leave behind is in these frames alone.

    Args:
        forward: ops with ``again``, each after those whose results it read, and with what ``again`` gives gradients for
            in ``parents``.
        loss: where backward begins, with a gradient of ones.
        scale: the loss scale that held; the one on the device has moved on.
    """
    frames: list[Frame] = []
    grads: dict[int, Value] = {}
    assert loss.tensor is not None
    grads[id(loss)] = Value.of(_filled(loss.tensor, 1.0))
    for frame in reversed(forward):
        grad = grads.get(id(frame.outputs[0]))
        if frame.again is None or grad is None or grad.tensor is None:
            continue
        found = [_filled(grad.tensor, scale)] if frame.op == SCALE_OP else frame.again(grad.tensor)
        backward = Frame(frame.op, BACKWARD, frame.place, [grad], [], frame.inputs, frame, again=frame.again)
        frames.append(backward)
        for parent, tensor in zip(frame.parents, found, strict=True):
            if tensor is None:
                continue
            given = grad if tensor is grad.tensor else Value.of(tensor, backward)
            backward.outputs.append(given)
            earlier = grads.get(id(parent))
            grads[id(parent)] = given if earlier is None else _added(earlier, given, frames)
    return frames


def _filled(like: Tensor, number: float) -> Tensor:
    wide = bridge.empty(like.queue, like.shape, "float32")
    bridge.write_bytes(wide, np.full(like.size, number, np.float32).view(np.uint8))
    return wide


def _added(first: Value, second: Value, frames: list[Frame]) -> Value:
    assert first.tensor is not None
    assert second.tensor is not None
    frame = Frame("sum of gradients", BACKWARD, NOWHERE, [first, second], [])
    made = Value.of(elementwise("add", first.dtype, first.tensor, second.tensor), frame)
    frame.outputs.append(made)
    frames.append(frame)
    return made
