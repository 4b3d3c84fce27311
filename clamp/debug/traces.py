"""Traces of a step in files, before and after a change of the code, say, and where two of them part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl

from clamp import bridge
from clamp.casting.results import RESULTS
from clamp.debug.dry_run import NothingSeenError, dry_run
from clamp.debug.float32_reference import Array, error_of, on_host
from clamp.debug.watcher import OpValue, Seen, Watcher
from clamp.debug.words import bad_counts, placed
from clamp.interrupts import replacing
from clamp.ops.statistics import statistics_of

_FORMAT = 1
_HEAD = "trace"  # the array of a .npz file that is no tensor: the JSON text


@dataclass(frozen=True)
class TracedValue(OpValue):
    """One result of an op, or one of its gradients, as it was in a run.

    Attributes:
        function, direction, value, module, line: as of ``ValueAccuracy``.
        dtype, shape: of the tensor.
        checksum: of its bytes; equal ones are equal bit for bit.
        infs, nans: how many elements are inf, and nan.
        smallest, largest: the least and the greatest magnitude that is finite and not 0; 0 without any.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: str
    infs: int
    nans: int
    smallest: float
    largest: float

    @property
    def what(self) -> tuple[str, ...]:
        """Returns what it is, in both runs: a line may have moved."""
        return self.function, self.direction, self.value, self.module

    def __str__(self) -> str:
        magnitudes = f"magnitudes {self.smallest:.4g} to {self.largest:.4g}"
        return ", ".join([f"{self.dtype} {self.shape}", magnitudes, *bad_counts(self.infs, self.nans)])


@dataclass(frozen=True)
class Difference:
    """The first value in which two traces part.

    Attributes:
        first, second: the value in the one and the other; None where only one has it.
        error: the relative error (``ValueAccuracy.own``) of the second by the first; nan where a file has no elements.
        before: how many values before it are the same.
    """

    first: TracedValue | None
    second: TracedValue | None
    error: float
    before: int

    def __str__(self) -> str:
        one = self.first or self.second
        assert one is not None
        line = (self.second or one).line
        head = f"{one.direction} of {placed(one.function, one.module, line)}, {one.value}"
        if self.first is None or self.second is None:
            which = "second" if self.first is None else "first"
            return f"only the {which} trace has: {head}; {self.before} values before it are the same"
        error = "" if np.isnan(self.error) else f"; relative error {self.error:.3g}"
        rows = [f"  first   {self.first}", f"  second  {self.second}"]
        return "\n".join([f"first to differ, after {self.before} values: {head}{error}", *rows])


@dataclass(frozen=True)
class Trace:
    """Results of a run's ops.

    Attributes:
        values: in the order of the run.
        arrays: their elements, by ``"value0"`` and so on, if they are kept.
        about: what else is to be known of it: texts and numbers.
        device: where they were computed; None of one that was read, or is empty.
    """

    values: list[TracedValue]
    arrays: Mapping[str, Array] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    device: cl.Device | None = None

    def write(self, path: Path) -> None:
        """Writes it as .npz, with its elements, or as .json."""
        text = json.dumps({"format": _FORMAT, **self.about, "values": [asdict(value) for value in self.values]})
        with replacing(path, "w" if path.suffix == ".json" else "wb") as file:
            if path.suffix == ".json":
                file.write(text)
            else:
                arrays: dict[str, Any] = {_HEAD: np.array(text), **self.arrays}
                np.savez_compressed(file, **arrays)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Reads what `write` has written.

        Raises:
            ValueError: the file is something else.
            OSError: it cannot be read.
        """
        arrays: dict[str, Array] = {}
        try:
            if path.suffix == ".npz":
                with np.load(path, allow_pickle=False) as file:
                    arrays = {name: file[name] for name in file.files}
                text = str(arrays.pop(_HEAD))
            else:
                text = path.read_text(encoding="utf-8")
            about = json.loads(text)
            if about.pop("format") != _FORMAT:
                raise ValueError("another format")
            values = [TracedValue(**{**value, "shape": tuple(value["shape"])}) for value in about.pop("values")]
            return cls(values, arrays, about)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no trace that amp.debugging.save_trace has written: {error}") from error

    def first_difference(self, other: Trace, rtol: float = 0.0) -> Difference | None:
        """See `first_difference`."""
        for number, (i, j) in enumerate(_aligned(self.values, other.values)):
            left, right = None if i is None else self.values[i], None if j is None else other.values[j]
            if left is None or right is None:
                return Difference(left, right, float("nan"), number)
            if left.checksum != right.checksum:
                first, second = self.arrays.get(f"value{i}"), other.arrays.get(f"value{j}")
                error = float("nan")
                if first is not None and second is not None and first.size == second.size:
                    error = error_of(second, first).relative
                if not error <= rtol or not rtol:
                    return Difference(left, right, error, number)
        return None


def trace_step(step: Callable[[], Any], *, keeps_elements: bool = False) -> Trace:
    """Runs a step, only to be looked at, and returns what each op of it gave; see `save_trace`.

    Raises:
        ValueError: the step ran no op that could be looked at.
        RuntimeError: the step is a recorded one.
    """
    observer = Tracer(keeps_elements=keeps_elements)
    with dry_run(step):
        with RESULTS.attached(observer):
            step()
        trace = observer.trace()
    if not trace.values:
        raise NothingSeenError
    return trace


def save_trace(path: str | Path, step: Callable[[], Any]) -> int:
    """Runs a step and writes what each op gave, forward and backward, to a file for ``first_difference``.

    The step runs as it would, under AMP where it is on; as with ``compare_accuracy`` nothing is trained, and all is put
    back.

    Args:
        path: ``"before.json"``: of each value a checksum, and magnitudes. ``"before.npz"``: all elements as well, so
            that differences can be measured.
        step: a function without arguments that does forward and backward.

    Returns:
        How many values there are.

    Raises:
        ValueError: the path ends in neither, or the step ran no op that could be looked at.
        RuntimeError: the step makes a recording of netcl's own, as with ``compare_accuracy``. Recorded functions and
            graphs run as they are meanwhile.
    """
    path = Path(path)
    if path.suffix not in (".json", ".npz"):
        raise ValueError(f"save_trace writes .json (checksums) or .npz (all elements), got {str(path)!r}")
    trace = trace_step(step, keeps_elements=path.suffix == ".npz")
    trace.write(path)
    return len(trace.values)


def first_difference(first: str | Path, second: str | Path, *, rtol: float = 0.0) -> Difference | None:
    """The first op, in the order of a step, whose value is not the same in two traces of ``save_trace``.

    OpNames are aligned as lines of a text are: by function, layer and what the value is, not by line numbers.

    Args:
        first, second: files.
        rtol: the relative error up to which values are the same, of two ``.npz`` files. 0: bit for bit, and in dtype.

    Returns:
        None if all are the same.

    Raises:
        ValueError: a file is no trace; or ``rtol`` is given, and a file has no elements.
    """
    one, other = Trace.read(Path(first)), Trace.read(Path(second))
    if rtol and not (one.arrays and other.arrays):
        raise ValueError("rtol compares elements, which a .json trace does not have: save both traces as .npz")
    return one.first_difference(other, rtol)


def _aligned(first: Sequence[TracedValue], second: Sequence[TracedValue]) -> Iterator[tuple[int | None, int | None]]:
    """The places of the same value in both, in order; None where only one has it."""
    pairs = SequenceMatcher(None, [x.what for x in first], [x.what for x in second], autojunk=False)
    for tag, i, i_end, j, j_end in pairs.get_opcodes():
        if tag == "equal":
            yield from zip(range(i, i_end), range(j, j_end), strict=True)
        else:
            yield from ((k, None) for k in range(i, i_end))
            yield from ((None, k) for k in range(j, j_end))


class Tracer(Watcher):
    """Keeps a checksum of every value.

    Args:
        keeps_elements: whether their elements are kept, too.
    """

    def __init__(self, *, keeps_elements: bool = False) -> None:
        super().__init__()
        self._keeps_elements = keeps_elements
        self._arrays: dict[str, Array] = {}
        self._device: cl.Device | None = None

    def keep(self, seen: Seen, part: int, tensor: Any) -> None:
        if not bridge.is_floating(tensor):
            return
        self._device = self._device or tensor.queue.device
        dtype = bridge.canonical_dtype(tensor.dtype)
        checksum = blake2b(dtype.encode() + bridge.read_bytes(tensor).tobytes(), digest_size=16).hexdigest()
        elements = on_host(tensor) if self._keeps_elements else None
        if elements is not None:
            self._arrays[f"value{len(self.found)}"] = elements
        (found,) = statistics_of([tensor], histogram=False)
        smallest = found.smallest if found.largest else 0.0
        self.found.append((seen, part, partial(
            TracedValue, dtype=dtype, shape=tuple(tensor.shape), checksum=checksum, infs=found.infs, nans=found.nans,
            smallest=smallest, largest=found.largest,
        )))  # fmt: skip

    def trace(self) -> Trace:
        """All that was seen, with the names that layers have now."""
        return Trace(self.named(), self._arrays, device=self._device)
