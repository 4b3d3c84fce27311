"""Where inf and nan came from: back from the gradients that a step could not use, to what first gave one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from clamp.debug.identity import INSERTED
from clamp.debug.step_graph import BACKWARD, Frame, Trace, Value


@dataclass(frozen=True)
class Origin:
    """What first was not finite, and mattered.

    Attributes:
        frame: the op that gave it, or that first read it.
        leaf: what was not finite before any op: a parameter, an input; None if the op made it.
    """

    frame: Frame
    leaf: Value | None = None


def find_origin(trace: Trace) -> Origin | None:
    """The earliest op from which inf or nan has come to a gradient of what is trained, or to the loss.

    What goes nowhere, the -inf of a mask that softmax makes zeros of, is nobody's fault. None if all is finite.
    """
    found = list(_origins(_ends(trace), {id(frame): index for index, frame in enumerate(trace.frames)}))
    return min(found, key=lambda one: one[0], default=(0, None))[1]


def _ends(trace: Trace) -> list[Frame]:
    """The ops that gave what is bad at the end: gradients of leaves, or else the results that no op has read."""
    leaves = [
        frame
        for frame in trace.frames
        if frame.direction == BACKWARD
        and not frame.is_finite
        and any(parent.made_by is None for parent in frame.parents)
    ]
    if leaves:
        return leaves
    read = {id(value) for frame in trace.frames for value in frame.inputs}
    # Where there is a backward, what it did not come from, a metric, trains nothing.
    trained = {id(frame.forward) for frame in trace.frames if frame.forward is not None}
    return [
        frame
        for frame in trace.frames
        if not frame.is_finite
        and not any(id(value) in read for value in frame.outputs)
        and (not trained or frame.direction == BACKWARD or id(frame) in trained)
    ]


def _origins(ends: Iterable[Frame], places: dict[int, int]) -> Iterator[tuple[int, Origin]]:
    """Every origin that the ends lead back to, with its place among the frames."""
    seen = set[int]()
    stack = list(ends)
    while stack:
        frame = stack.pop()
        if id(frame) in seen:
            continue
        seen.add(id(frame))
        place = places.get(id(frame), 0)
        bad = [value for value in frame.inputs if not value.is_finite]
        makers = [value.made_by for value in bad if value.made_by is not None]
        # The gradient of an op whose result was bad already is no news.
        if frame.direction == BACKWARD and not bad and frame.forward is not None and not frame.forward.is_finite:
            makers = [frame.forward]
        stack += makers
        yield from ((place, Origin(frame, value)) for value in bad if value.made_by is None)
        if not bad and not makers:
            yield place, Origin(frame)


_DIVIDING = frozenset({"div", "rsqrt", "pow"})  # which make 0 of an inf, and a number of what it stands for


def find_divided(trace: Trace) -> tuple[Frame, Frame] | None:
    """The first op whose float16 result is not finite, as what it read is, and the one that has made finite numbers of
    it by dividing; None if there are none."""
    for frame in trace.frames:
        bad = [value for value in frame.inputs if not value.is_finite]
        if frame.direction == BACKWARD or frame.function not in _DIVIDING or not bad or not frame.is_finite:
            continue
        maker = bad[-1].made_by
        while maker is not None and maker.op in INSERTED and not maker.inputs[0].is_finite:
            maker = maker.inputs[0].made_by
        if maker is not None and all(value.is_finite for value in maker.inputs) and not maker.is_finite:
            return maker, frame
    return None


def frames_before(trace: Trace, frame: Frame, count: int) -> list[Frame]:
    """The frames before one, the nearest last."""
    index = next(index for index, other in enumerate(trace.frames) if other is frame)
    return trace.frames[max(0, index - count) : index]
