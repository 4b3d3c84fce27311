"""The tests of attention on matrix units can tell right from wrong: of a kernel one piece is replaced, and the numbers
must differ; a missing barrier the simulator sees as a data race."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyopencl as cl
import pytest

from clamp.opencl import program
from clamp.opencl.device import list_devices
from clamp.opencl.program import Kernel
from clamp.ops import attention as ops
from clamp.ops.attention import mma
from tests.ops.test_attention import normal
from tests.ops.test_attention_matrix_units import AT_ONCE, LATE, ONE_WARP, Emulated, check_half

pytestmark = [pytest.mark.kernel, pytest.mark.once]

_KERNELS = ("FORWARD", "DELTA", "BACKWARD_Q", "BACKWARD_KV")


@dataclass(frozen=True)
class Case:
    """Attention that a mutant must get wrong."""

    shape: tuple[int, int, int, int] = (1, 2, 71, 24)
    causal: bool = False
    copies: int = AT_ONCE

    def check(self, queue: cl.CommandQueue, patch: pytest.MonkeyPatch) -> None:
        """Compares attention and its gradients with numpy's."""
        patch.setattr(ops, "ENGINES", (Emulated(emulate=self.copies),))
        check_half(queue, self.shape, "float16", self.causal)


_ANY = Case()
_CAUSAL = Case(causal=True)
_LATE = Case(copies=LATE)
_ELEMENTS = Case((1, 2, 63, 21))  # the last step lacks one row

#: What is wrong, the piece of source and what replaces it, and attention that shows it.
MUTANTS = [
    ("values lie where keys do", "*const others1 = others0 + OTHER_PIECES", "*const others1 = others0", _ANY),
    ("stages overlap", "% 2 * (2 * OTHER_PIECES)", "% 2 * OTHER_PIECES", _ANY),
    ("the next tiles go to the stage that is read",
     "LOAD_ROWS(STAGE_OF(step), x0", "LOAD_ROWS(STAGE_OF(step + 1), x0", _ANY),
    ("copies are waited for a step late", "COPIES_WAIT(&copies, 0)", "COPIES_WAIT(&copies, 1)", _LATE),
    ("what is copied lies unswizzled",
     "copy_async(copies, tile + piece.place,", "copy_async(copies, tile + piece.line * pieces + piece.element / 8,",
     _ANY),
    ("a key does not see its own query", "((column) < (row))", "((column) <= (row))", _CAUSAL),
    ("a query sees the next key", "((row) < (column))", "((row) + 1 < (column))", _CAUSAL),
    ("there is a row more than T", "c >= T ||", "c > T ||", _ELEMENTS),
    ("a step that lacks one row is taken for whole",
     "edge = column0 + COLUMNS > (int)T ", "edge = column0 + COLUMNS > (int)T + 1 ", _ELEMENTS),
    ("no step is on the diagonal", "&& first < column0 + COLUMNS)", "&& first + ROWS < column0 + COLUMNS)", _CAUSAL),
    ("keys see queries from the next step on", "causal ? first : 0", "causal ? first + COLUMNS : 0", _CAUSAL),
    ("every warp has the first's rows", "block_at(tile, LINE, warp * 16, d,", "block_at(tile, LINE, 0, d,", _ANY),
    ("the second product does not transpose",
     "j * 8, k, false, false)", "j * 8, k, true, false)", _ANY),
    ("upper columns are the lower ones", "mma(sums[j + 1], a, b, 1, lane)", "mma(sums[j + 1], a, b, 0, lane)", _ANY),
    ("the registers of an operand are in the other order",
     "PAIR(left[2], left[3]), PAIR(right[0], right[1])", "PAIR(right[0], right[1]), PAIR(left[2], left[3])", _ANY),
    ("the halves of a register are swapped", "CAT(pair_, IN_T)(lower, upper)", "CAT(pair_, IN_T)(upper, lower)", _ANY),
    ("the lower rows have the upper ones' factor", "sums[j][e] *= factor[e / 2]", "sums[j][e] *= factor[0]", _ANY),
    ("results keep the scale of an earlier maximum", "scale_rows(result, WIDTH / 8, rescale);", "", _ANY),
    ("totals keep the scale of an earlier maximum", "total[h] * rescale[h] + added[h]", "total[h] + added[h]", _ANY),
    ("gradients keep the unit of an earlier step", "scale_rows(sums, WIDTH / 8, rescale);", "", _ANY),
    ("columns take rows' logarithms", "shift[j][e % 2]", "shift[j][e / 2]", _ANY),
    ("the gradient of keys is of the result's", "slopes, others0, exchange, lane);\n    }\n    const float lower",
     "slopes, others1, exchange, lane);\n    }\n    const float lower", _ANY),
]  # fmt: skip


def mutate(patch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Gives the engine kernels with one piece of their source replaced."""
    source, file = program.source, mma.FORWARD.file
    text = source(file)
    assert text.count(old) == 1, old
    name = " ".join(f"{file} with {new} for {old}".split())  # programs are kept by their file's name, of one line
    patch.setattr(program, "source", lambda file: text.replace(old, new) if file == name else source(file))
    for kernel in _KERNELS:
        patch.setattr(mma, kernel, Kernel(name, getattr(mma, kernel).name))


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "case"), [pytest.param(*mutant[1:], id=mutant[0]) for mutant in MUTANTS])
def test_a_mutant_computes_something_else(
    queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch, old: str, new: str, case: Case
) -> None:
    if simulated:
        pytest.skip("what is wrong shows on any device, and some of it is an access out of bounds")
    case.check(queue, monkeypatch)
    mutate(monkeypatch, old, new)
    with pytest.raises(AssertionError, match="values of float32 differ"):
        case.check(queue, monkeypatch)


def test_a_missing_barrier_is_a_data_race(simulated: bool, tmp_path: Path) -> None:
    """In a process of its own: Oclgrind ceases to report after so many races, and other tests would go without."""
    if not simulated:
        pytest.skip("only the simulator sees races")
    log = tmp_path / "oclgrind.log"
    environment = {**os.environ, "OCLGRIND_LOG": str(log)}
    script = f"from {__name__} import compute_without_a_barrier as compute; compute()"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, cwd=Path(__file__).parents[2])
    assert "race" in log.read_text()


def compute_without_a_barrier() -> None:
    """Attention on the simulator, whatever comes out: the log says what was seen."""
    device = next(device for device in list_devices() if device.platform.name == "Oclgrind")
    context = cl.Context([device])
    tensors = normal(cl.CommandQueue(context), 0, (1, 1, 33, 5), *["float16"] * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "ENGINES", (Emulated(ONE_WARP, AT_ONCE),))
        mutate(patch, "barrier(CLK_LOCAL_MEM_FENCE);" + " " * 60, "")  # that of a step
        ops.attention(*tensors, False, None, out_dtype="float16")
