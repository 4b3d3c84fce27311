"""How often each op ran, by the dtype of its result: Paddle's table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from clamp import bridge
from clamp.bridge import TensorLike
from clamp.casting.results import Observer
from clamp.observe.place import here
from clamp.opencl.recording import host_step

DTYPES = ("float16", "bfloat16", "float32", "other")
_WIDTH = 120


class OperatorStats(Observer):
    """An observer that counts the ops of forward passes, in replays too.

    Attributes:
        calls: by the name of the op and the dtype of its result, one of ``DTYPES``.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def result(self, made: TensorLike, parents: Sequence[TensorLike]) -> None:
        dtype = bridge.canonical_dtype(made.value.dtype)
        call = here().name_of(getattr(made, "op_name", None) or "op"), dtype if dtype in DTYPES else "other"
        host_step(partial(self.calls.update, (call,)))

    def __str__(self) -> str:
        ops = sorted({op for op, _ in self.calls})
        titles = (f"{f' {kind} Calls ':-^17}" for kind in ("FP16", "BF16", "FP32", "Other"))
        rows = ["".join([f"  {op:<40}", *(f"|  {self.calls[op, dtype]:<17}" for dtype in DTYPES)]) for op in ops]
        return "\n".join(
            [
                f"<{' op list ':-^{_WIDTH}}>",
                " | ".join([f"<{' Op Name ':-^40}", *titles]) + ">",
                *(row.rstrip() for row in rows),
                f"<{f' op count: {len(ops)} ':-^{_WIDTH}}>",
            ]
        )
