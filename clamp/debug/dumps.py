"""Two runs compared by what the tensor checker has written of them, as Paddle's ``compare_accuracy`` does."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

from clamp.debug.accuracy import Accuracy, compare_step
from clamp.debug.ranges import FLOAT16
from clamp.interrupts import replacing

_TOLERANCE = 1e-2  # of a gradient's extremes, relative and absolute
_NUMBER = r"[-+.\w]+"
_LINE = re.compile(
    r"\[device=[^,\]]*, op=(?P<op_type>[^,\]]*), tensor=(?P<tensor_name>[^,\]]*), dtype=(?P<dtype>\w+)\], "
    r"numel=(?P<numel>\d+), num_nan=(?P<num_nan>\d+), num_inf=(?P<num_inf>\d+), num_zero=(?P<num_zero>\d+), "
    rf"max=(?P<max_value>{_NUMBER}), min=(?P<min_value>{_NUMBER}), mean=(?P<mean_value>{_NUMBER})"
)
_OF_BOTH = ("op_type", "tensor_name", "numel")  # by which lines of two runs belong together
_OF_ONE = ("dtype", "max_value", "min_value", "mean_value", "num_zero", "num_inf", "num_nan")
_RATIOS = ("max_value", "min_value", "mean_value")
COLUMNS = [
    "worker", *_OF_BOTH, "infinite", *(f"fp32_{name}" for name in _OF_ONE),
    *(f"fp16_{name}" for name in _OF_ONE), *(f"fp16_div_fp32_{name}" for name in _RATIOS),
]  # fmt: skip


Dumped: TypeAlias = dict[str, Any]  # a line of a log, by the names of its columns


def _logs(first: Path, second: Path) -> list[tuple[Path, Path]]:
    """The logs of two folders that belong together: by their names, or one and one."""
    logs = [sorted(folder.glob("worker_*")) for folder in (first, second)]
    for folder, found in zip((first, second), logs, strict=True):
        if not found:
            raise FileNotFoundError(
                f"{folder} has no log worker_*: run with TensorCheckerConfig(enable=True, "
                f"debug_mode=DebugMode.CHECK_ALL, output_dir={str(folder)!r})"
            )
    names = [[log.name for log in found] for found in logs]
    if names[0] != names[1] and (len(logs[0]), len(logs[1])) != (1, 1):
        raise ValueError(f"the logs of the two runs are not of the same devices: {names[0]} and {names[1]}")
    return list(zip(*logs, strict=True))


def _read(log: Path) -> dict[tuple[Any, int], Dumped]:
    """The lines of a run by what they are of: the n-th tensor of an op, a name and a size."""
    found: dict[tuple[Any, int], Dumped] = {}
    count = Counter[Any]()
    for number, line in enumerate(log.read_text(encoding="utf-8").splitlines(), 1):
        if "[PRECISION]" not in line:
            continue
        match = _LINE.search(line)
        if match is None:
            raise ValueError(f"{log}:{number} is not as the tensor checker writes: {line!r}")
        dumped = {name: float(text) if name in _RATIOS else int(text) if name.startswith("num") else text
                  for name, text in match.groupdict().items()}  # fmt: skip
        tensor = tuple(dumped[name] for name in _OF_BOTH)
        found[tensor, count[tensor]] = dumped
        count[tensor] += 1
    return found


def _row(worker: str, fp32: Dumped | None, fp16: Dumped | None, loss_scale: float) -> dict[str, Any]:
    known = fp16 or fp32
    assert known is not None
    row = {"worker": worker, "infinite": int(_is_infinite(fp32, fp16, loss_scale))}
    row |= {name: known[name] for name in _OF_BOTH}
    for kind, one in (("fp32", fp32), ("fp16", fp16)):
        row |= {f"{kind}_{name}": "" if one is None else one[name] for name in _OF_ONE}
    if fp32 is not None and fp16 is not None:
        row |= {f"fp16_div_fp32_{name}": fp16[name] / fp32[name] if fp32[name] else "" for name in _RATIOS}
    return row


def _is_infinite(fp32: Dumped | None, fp16: Dumped | None, loss_scale: float) -> bool:
    """Returns whether float16 has no room for a tensor, or its gradient is another one than float32's times the loss
    scale."""
    is_gradient = fp32 is not None and "GRAD" in fp32["tensor_name"]
    scale = loss_scale if is_gradient else 1.0
    wide = [] if fp32 is None else [scale * fp32["max_value"], scale * fp32["min_value"]]
    narrow = [] if fp16 is None else [fp16["max_value"], fp16["min_value"]]
    is_bad = fp16 is not None and fp16["num_inf"] + fp16["num_nan"]
    if is_bad or not all(abs(x) <= FLOAT16.largest for x in wide + narrow):
        return True
    if not is_gradient or fp16 is None:
        return False
    return any(abs(x - y) > _TOLERANCE * (1 + abs(y)) for x, y in zip(narrow, wide, strict=True))


# ---------------------------------------------------------------------------------------------- by what it is given


def compare_dumped(
    dump_path: str | Path,
    another_dump_path: str | Path,
    output_filename: str | Path,
    loss_scale: float = 1,
    dump_all_tensors: bool = False,
) -> None:
    """A table of what the tensor checker has written of two runs, side by side: Paddle's.

    A row for each tensor of an op, in the order of the second run, then those that only the first one has. ``infinite``
    is 1 where float16 has no room for it, or where a gradient's extremes are not those of the first run times the loss
    scale, within 1 %. Prints the names of these ops.

    Args:
        dump_path: ``output_dir`` of a run in float32, with ``DebugMode.CHECK_ALL``.
        another_dump_path: that of the run to compare, in 16 bits.
        output_filename: CSV file to write, ``"compare.csv"``.
        loss_scale: what the second run's losses were multiplied by.
        dump_all_tensors: as in Paddle, only False.

    Raises:
        FileNotFoundError: a folder has no log.
        ValueError: the logs are of other devices, a line is none of the checker's, or the output is no CSV file.
        NotImplementedError: ``dump_all_tensors``.
    """
    if dump_all_tensors:
        raise NotImplementedError("dump_all_tensors=True: the checker writes what tensors are like, not their elements")
    if Path(output_filename).suffix != ".csv":
        raise ValueError(
            f"output_filename must end in .csv, which every spreadsheet opens, got {str(output_filename)!r}"
        )
    rows, infinite = [], list[str]()
    for fp32_log, fp16_log in _logs(Path(dump_path), Path(another_dump_path)):
        first, second = _read(fp32_log), _read(fp16_log)
        for tensor in {**second, **first}:  # in the second run's order; what only the first one has comes last
            row = _row(fp16_log.name, first.get(tensor), second.get(tensor), loss_scale)
            rows.append(row)
            if row["infinite"] and row["op_type"] not in infinite:
                infinite.append(row["op_type"])
    with replacing(output_filename) as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print(f"-- OP Types produce infinite outputs: {infinite}")
    print(f"-- Write to {output_filename}")


def compare_accuracy(*args: Any, **kwargs: Any) -> Accuracy | None:
    """Compares a step in float32 and under AMP, op by op, given a model or a step (`compare_step`); given the folders
    of two runs, these, as Paddle's does (`compare_dumped`).

    ::

        print(amp.debugging.compare_accuracy(model, (x, y), loss=F.cross_entropy))
        amp.debugging.compare_accuracy("float32", "float16", "compare.csv")

    Raises:
        TypeError, ValueError, RuntimeError, FileNotFoundError, NotImplementedError: as those two.
    """
    if "dump_path" in kwargs or (args and isinstance(args[0], str | Path)):
        compare_dumped(*args, **kwargs)
        return None
    if len(args) > 2:  # model and batch
        raise TypeError(
            f"compare_accuracy takes the folders of two runs, got {type(args[0]).__name__}; or a model and a batch, "
            "and all else by name"
        )
    return compare_step(*args, **kwargs)
