"""A run as JSON: what it holds, and its way to a file and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypedDict, cast, get_args, get_origin, get_type_hints, is_typeddict

from clamp.interrupts import replacing

VERSION = 1
LOWEST, END = -24, 16  # float16 holds magnitudes from 2^-24, its smallest subnormal, to just below 2^16
BINS = END - LOWEST + 2  # an octave each, between one of what lies below and one of what lies above

_HUGE = 2**63  # from which on a whole number is a mistake, or an attack
_IN_WORDS = {str: "a text", bool: "true or false", int: "a whole number, 0 or more", float: "a number"}

Direction = Literal["forward", "backward"]
TensorKind = Literal["activation", "gradient", "parameter", "parameter gradient"]
Kind = Literal["healthy", "overflow", "not finite", "slow", "unknown"]  # of a verdict


class Device(TypedDict):
    """The names that OpenCL has for it."""

    name: str
    driver: str
    platform: str


class Verdict(TypedDict):
    """The answer, for people: a sentence, what it rests on, and code that cures it. Backticks mark code."""

    headline: str
    details: list[str]
    cure: str | None
    kind: Kind


class Step(TypedDict):
    """A `StepReport`, with the loss and the norm of the unscaled gradients where they are known."""

    step: int
    stepped: bool
    reason: str
    loss: float | None
    scale: float
    scale_before: float
    gradient_norm: float | None
    infs: int
    nans: int
    parameters: list[str]


class Op(TypedDict):
    """The calls of one op at one place: in all so many milliseconds, with so many bytes read and written."""

    op: str
    function: str | None
    policy: str
    direction: Direction
    module: str
    line: str
    inputs: list[str]
    dtype: str
    shape: list[int]
    calls: int
    milliseconds: float | None
    bytes: int
    note: str


class Range(TypedDict):
    """Magnitudes of a tensor as it was stored: of a gradient, multiplied by ``scale``.

    ``octaves`` counts what is neither zero nor inf nor nan: below 2^-24, in [2^-24, 2^-23) and so on to [2^15, 2^16),
    and from 2^16. ``underflow`` and ``overflow`` are fractions of ``count``.
    """

    name: str
    module: str
    kind: TensorKind
    dtype: str
    scale: float
    count: int
    zeros: int
    infs: int
    nans: int
    smallest: float
    largest: float
    octaves: list[int]
    underflow: float
    overflow: float


class LostIn(TypedDict):
    """A step's updates of a layer's 16-bit weights, and how many of them rounding loses."""

    module: str
    dtype: str
    updates: int
    lost: int


class Updates(TypedDict):
    """Of weights without fp32 masters: their updates by layer, those that lose most first, and what to say besides."""

    layers: list[LostIn]
    notes: list[str]


#: bytes by what they are held for; the kinds of ``clamp.debug.memory_meter``
Held = TypedDict(
    "Held",
    {
        "activations": int, "weights": int, "masters": int, "copies": int, "gradients": int, "optimizer state": int,
        "workspaces": int, "other tensors": int, "recordings": int, "rounding": int, "free": int,
    },
)  # fmt: skip


class HeldAt(TypedDict):
    """Memory held when an op of a step took most."""

    op: str
    module: str
    line: str
    bytes: Held


class HeldBy(TypedDict):
    """Memory of one kind held by one op, at the moment of a step when most was held, in so many pieces."""

    kind: str
    op: str
    module: str
    line: str
    bytes: int
    count: int


class Memory(TypedDict):
    """Bytes, and what the same run takes in float32; of one step, what was held in each op, in order."""

    activations: int | None
    weight_copies: int | None
    peak: int | None
    float32_activations: int | None
    float32_peak: int | None
    timeline: list[HeldAt]
    holders: list[HeldBy]


Module = TypedDict("Module", {"path": str, "class": str, "parameters": int})


class Input(TypedDict):
    """Magnitudes of an operand of the first bad op; the smallest is that of what is not zero."""

    name: str
    dtype: str
    smallest: float
    largest: float
    infs: int
    nans: int


class FirstBad(TypedDict):
    """The first op whose result was no longer finite, and the ops before it, the nearest last."""

    op: str
    direction: Direction
    module: str
    line: str
    dtype: str
    what: Literal["inf", "nan"]
    count: int
    inputs: list[Input]
    frames: list[str]


class Run(TypedDict):
    """All that is known of a run; ``date`` is ISO 8601, ``clamp`` the version that wrote it."""

    version: int
    clamp: str
    device: Device
    dtype: str
    level: str
    date: str
    seconds: float
    verdict: Verdict
    steps: list[Step]
    ops: list[Op]
    ranges: list[Range]
    suggested_scale: float | None
    updates: Updates
    memory: Memory
    modules: list[Module]
    first_bad: FirstBad | None


def checked(content: Any) -> Run:
    """The run in ``content``: numbers as Python's own, "nan", "inf" and "-inf" as floats, other keys left out.

    Raises:
        ValueError: it is no run, a newer clamp's, or a value is missing or of another kind. The message names it.
    """
    if not isinstance(content, Mapping) or "version" not in content:
        raise ValueError("not a run of clamp's: there is no key 'version'. handle.report(\"run.json\") writes one")
    if content["version"] != VERSION:
        raise ValueError(
            f"a run of version {content['version']!r}, and this clamp reads version {VERSION}: "
            "make the page with the clamp that wrote it, or a newer one"
        )
    run = cast(Run, _checked(content, Run, "run"))
    for number, found in enumerate(run["ranges"]):
        if len(found["octaves"]) != BINS:
            raise ValueError(f"run.ranges[{number}].octaves has {len(found['octaves'])} counts: write {BINS}")
    return run


def write_run(run: Run, path: str | Path) -> None:
    """Writes a run as JSON.

    Raises:
        ValueError: see `checked`.
        OSError: the file cannot be written.
    """
    # What JSON has no numbers for are Python's constants in the first text, and texts in the second.
    content = json.loads(json.dumps(checked(run)), parse_constant=lambda name: str(float(name)))
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    with replacing(path) as file:
        file.write(text + "\n")


def read_run(path: str | Path) -> Run:
    """Reads a run from JSON.

    Raises:
        ValueError: the file is no run; see `checked`.
        OSError: the file cannot be read.
    """
    try:
        return checked(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:  # of which broken JSON, and other bytes than UTF-8, are kinds
        raise ValueError(f'{path}: {error} (handle.report("run.json", step) writes a run)') from error


def _checked(value: Any, kind: Any, where: str) -> Any:
    """The value as what a type hint says, or a ValueError that says where in the run it is."""
    if is_typeddict(kind):
        if not isinstance(value, Mapping):
            raise _wrong(value, "an object", where)
        missing = [key for key in kind.__annotations__ if key not in value]
        if missing:
            raise ValueError(f"{where} has no key {missing[0]!r}")
        return {key: _checked(value[key], hint, f"{where}.{key}") for key, hint in get_type_hints(kind).items()}
    origin, parameters = get_origin(kind), get_args(kind)
    if origin is list:
        if not isinstance(value, list | tuple):
            raise _wrong(value, "a list", where)
        return [_checked(part, parameters[0], f"{where}[{number}]") for number, part in enumerate(value)]
    if origin is UnionType:
        return None if value is None else _checked(value, parameters[0], where)
    if origin is Literal:
        if value not in parameters:
            raise _wrong(value, f"one of {', '.join(map(repr, parameters))}", where)
        return value
    return _checked_plain(value, kind, where)


def _checked_plain(value: Any, kind: type, where: str) -> Any:
    if kind is str and isinstance(value, str):
        return re.sub("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, bool):
        if kind is bool:
            return value
    elif isinstance(value, Integral):
        whole = int(value)
        if abs(whole) < _HUGE and (kind is float or (kind is int and whole >= 0)):
            return kind(whole)
    elif kind is float and (isinstance(value, Real) or value in ("nan", "inf", "-inf")):
        return float(value)
    raise _wrong(value, _IN_WORDS[kind], where)


def _wrong(value: Any, wanted: str, where: str) -> ValueError:
    shown = repr(value)
    return ValueError(f"{where} is {shown if len(shown) < 60 else shown[:60] + '...'}: write {wanted}")
