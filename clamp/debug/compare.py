"""``compare_accuracy``: by what it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clamp.debug.accuracy import Accuracy, compare_step
from clamp.debug.dumps import compare_dumps


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
    compare_dumps(dump_path, another_dump_path, output_filename, loss_scale)


def compare_accuracy(*args: Any, **kwargs: Any) -> Accuracy | None:
    """Of a model or a step: the same step in float32 and under AMP, op by op (`compare_step`). Of the folders of two
    runs: Paddle's (`compare_dumped`).

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
            f"compare_accuracy takes the folders of two runs, got a {type(args[0]).__name__}; or a model and a batch, "
            "and all else by name"
        )
    return compare_step(*args, **kwargs)
