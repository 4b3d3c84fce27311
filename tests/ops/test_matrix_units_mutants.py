"""The tests of matrix units can tell right from wrong: of a kernel one piece is replaced, and the product must differ.

A missing barrier need not change a number. The simulator sees it all the same, as a data race.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyopencl as cl
import pytest

from clamp.opencl import program
from clamp.opencl.device import list_devices
from clamp.opencl.program import Kernel
from clamp.ops.engine import always
from clamp.ops.gemm import engines
from clamp.ops.gemm.dpas import DPAS_8, DPAS_16
from clamp.ops.gemm.matrix_units import MatrixUnit
from clamp.ops.gemm.mma import MMA
from clamp.ops.gemm.plan import Plan
from clamp.ops.gemm.wgmma import WGMMA
from clamp.ops.gemm.wmma import RDNA3, RDNA4
from tests.ops.gemm_reference import check, random

pytestmark = [pytest.mark.kernel, pytest.mark.once]

AT_ONCE, LATE = 1, 2  # when copies to local memory arrive (kernels/async_copy.clh)
_ONE_WARP = Plan(32, 32, 16, 2, (1, 1))
_TWO_WARPS = Plan(32, 64, 32, 3, (1, 2))


@dataclass(frozen=True)
class Case:
    """A product that a mutant must get wrong: shapes of op(a) and op(b), and how it is computed."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    transpose_a: bool = False
    transpose_b: bool = False
    plan: Plan = _ONE_WARP
    slices: int = 1
    copies: int = AT_ONCE
    with_bias: bool = False
    unit: MatrixUnit = MMA

    def check(self, queue: cl.CommandQueue, patch: pytest.MonkeyPatch, kernel: Kernel | None = None) -> None:
        """Compares the product with numpy's, computed by another kernel than the unit's if there is one."""
        unit = replace(self.unit, kernel=kernel or self.unit.kernel)
        run = partial(unit.compute, plan=self.plan, slices=self.slices, emulate=self.copies)
        engine = SimpleNamespace(NAME="emulated", fits=always, pays=always, pack=unit.pack, run=run)
        patch.setattr(engines, "ENGINES", (engine,))
        bias = (random(self.b[-1]), "float32") if self.with_bias else None
        transposes = {"transpose_a": self.transpose_a, "transpose_b": self.transpose_b}
        check(queue, random(*self.a), random(*self.b, seed=1), bias=bias, **transposes)


_ROWS = Case((40, 88), (88, 40), transpose_b=True)  # both along k, in pieces of 16 bytes; some tiles are not whole
_COLUMNS = Case((40, 88), (88, 40), transpose_a=True)  # neither along k
_ELEMENTS = Case((33, 37), (37, 35), transpose_b=True)
_WIDE = Case((40, 200), (200, 72), plan=_TWO_WARPS)
_LATE = Case((40, 200), (200, 72), plan=_TWO_WARPS, copies=LATE)
_SLICES = Case((24, 64), (64, 40), slices=2)
_BATCH = Case((2, 16, 24), (2, 24, 40), transpose_a=True)
_BIAS = Case((16, 24), (24, 72), with_bias=True)
_THREE_TILES = Case((72, 8), (8, 40))
_GROUP, _TWO_GROUPS = Plan(64, 64, 64, 3, (4, 1)), Plan(128, 128, 64, 3, (8, 1))
_HOPPER = Case((72, 200), (200, 72), transpose_b=True, plan=_GROUP, unit=WGMMA)  # both along k
_HOPPER_ACROSS = Case((136, 72), (72, 136), transpose_a=True, plan=_TWO_GROUPS, unit=WGMMA)  # neither
_HOPPER_LATE = Case((64, 400), (400, 64), plan=_GROUP, unit=WGMMA)  # its instructions are late where copies are not
_RDNA3 = Case((40, 88), (88, 40), unit=RDNA3)  # one operand along k, one across
_RDNA4 = Case((40, 88), (88, 40), unit=RDNA4)
_RDNA_ACROSS = Case((40, 88), (88, 40), transpose_a=True, unit=RDNA3)
_INTEL_8 = Case((40, 88), (88, 40), plan=replace(_ONE_WARP, lanes=8), unit=DPAS_8)
_INTEL_8_ACROSS = replace(_INTEL_8, transpose_a=True)
_INTEL_16 = Case((40, 88), (88, 40), plan=replace(_ONE_WARP, lanes=16), unit=DPAS_16)

#: What is wrong, the piece of source and what replaces it, and a product that shows it.
MUTANTS = [
    ("the copy does not swizzle",
     "copy_async(copies, tile + piece.place,", "copy_async(copies, tile + piece.line * pieces + piece.element / 8,",
     _ROWS),
    ("elements are copied without swizzling",
     "copy_elements(tile + piece.place,", "copy_elements(tile + piece.line * pieces + piece.element / 8,", _ELEMENTS),
    ("ldmatrix fetches the same k twice", "b.line + line, b.piece + piece", "b.line + line, b.piece", _ROWS),
    ("the matrices of a block are in the other order", "is_a == k_major", "is_a != k_major", _ROWS),
    ("columns are taken for rows", "is_a == k_major, !k_major", "is_a == k_major, k_major", _COLUMNS),
    ("the halves of a block of B are swapped", "b[j / 2], j % 2", "b[j / 2], 1 - j % 2", _ROWS),
    ("the next stage is read",
     "sums, STAGE_OF(step), STAGE_OF(step) +", "sums, STAGE_OF(step + 1), STAGE_OF(step + 1) +", _WIDE),
    ("copies are waited for a step late",
     "COPIES_WAIT(&copies, AHEAD - 1)", "COPIES_WAIT(&copies, AHEAD)", _LATE),
    ("copies go to the stage that is read",
     "< steps) BEGIN_STAGE(next, STAGE_OF(next))", "< steps) BEGIN_STAGE(next, STAGE_OF(step))", _WIDE),
    ("B begins a piece early in its stage",
     "STAGE_OF(step) + A_PIECES, warp", "STAGE_OF(step) + A_PIECES - 1, warp", _ROWS),
    ("lines are an element longer than k",
     "clamp(matrix.length - column,", "clamp(matrix.length + 1 - column,", _ELEMENTS),
    ("there is a line more than k", "row < matrix.lines", "row <= matrix.lines", _BATCH),
    ("a slice begins where it does not", "matrix % slices * slice,", "matrix % slices * TILE_K,", _SLICES),
    ("every band is as high as the first", "first + within % height", "first + within % BAND", _THREE_TILES),
    ("warps take rows for columns", "m0 + warp / WARPS_N * WARP_M", "m0 + warp % WARPS_N * WARP_M", _WIDE),
    ("the lower rows of a block are stored twice", "upper[0] = (float2)(sums[0], sums[1])",
     "upper[0] = (float2)(sums[2], sums[3])", _ROWS),
    ("blocks are stored over one another", "m + i * 16, M", "m + i * 8, M", _ROWS),
    ("B moves on as A does", "B + batch * b_batch", "B + batch * a_batch", _BATCH),
    ("the bias is the tile's first", "LOAD(BIAS_T, bias, columns.first + e)", "LOAD(BIAS_T, bias, n + e)", _BIAS),
    ("descriptors lead to the next 8 rows too early", "#define EIGHT_LINES (8 *", "#define EIGHT_LINES (7 *", _HOPPER),
    ("descriptors lead to the wrong block", "1 : TILE_K * LINE_BYTES / 16", "1 : LINE_BYTES / 16", _HOPPER_ACROSS),
    ("wgmma is not told of the swizzle", "place ^ (place / LINE_BYTES % 8) * 16", "place", _HOPPER),
    ("the second 16 of k are the first", "? 16 * 2 :", "? 16 :", _HOPPER),
    ("the second 16 lines of k are the first", ": 16 * LINE_BYTES)", ": 8 * LINE_BYTES)", _HOPPER_ACROSS),
    ("both warp groups take the first rows", "return warp / 4 * 64 *", "return warp / 8 * 64 *", _HOPPER_ACROSS),
    ("the blocks of a tile lie over one another", "block * lines * pieces + place_of", "place_of", _HOPPER_ACROSS),
    ("a stage is overwritten while wgmma reads it", "#define UNFINISHED 1", "#define UNFINISHED 0", _HOPPER_LATE),
    ("the last step is never added",
     "if (steps->a_tile) multiply_tiles(sums, steps->a_tile", "if (0) multiply_tiles(sums, steps->a_tile",
     _HOPPER_LATE),
    ("the upper half of a wave holds no copy",
     "(uint8)(eight_of_k(b, lane % 16, 0)", "(uint8)(eight_of_k(b, lane / 2, 0)", _RDNA3),
    ("the second 8 of k are the first", "eight_of_k(b, lane % 16, 8)", "eight_of_k(b, lane % 16, 0)", _RDNA3),
    ("both halves of a wave hold the first 8 of k", "lane % 16, lane / 16 * 8)", "lane % 16, 0)", _RDNA4),
    ("sums of RDNA 3 are taken for RDNA 4's", "RDNA == 3 ? (e) * 2", "RDNA == 4 ? (e) * 2", _RDNA3),
    ("sums of RDNA 4 are taken for RDNA 3's", "RDNA == 3 ? (e) * 2", "RDNA == 4 ? (e) * 2", _RDNA4),
    ("8 lines are read an element late", "[element % 8]", "[(element + 1) % 8]", _RDNA_ACROSS),
    ("one line is read for 8", "piece_at(b, i, element)", "piece_at(b, 0, element)", _RDNA_ACROSS),
    ("the first copy lands everywhere", "= copies->pieces[i]", "= copies->pieces[0]", _RDNA3),
    ("a block of sums is as wide as another maker's", "slab + j * SUM_COLUMNS", "slab + j * 8", _RDNA4),
    ("the lower rows of A are the upper", "eight_of_rows(b, 8, lane)", "eight_of_rows(b, 0, lane)", _INTEL_16),
    ("lanes have a column of B for a row", "eight_of_k(b, lane, 0)", "eight_of_rows(b, 0, lane)", _INTEL_16),
    ("sums lie a row further down", "#define ROW_OF_SUM(e, lane) (e)", "#define ROW_OF_SUM(e, lane) ((e + 1) % 16)",
     _INTEL_16),
    ("sums lie a column further on",
     "#define COLUMN_OF_SUM(lane) (lane)", "#define COLUMN_OF_SUM(lane) ((lane + 1) % 8)", _INTEL_8),
    ("a pair has one step twice", "eight_of_rows(b, row, k + 1)", "eight_of_rows(b, row, k)", _INTEL_8_ACROSS),
    ("a lane has the pair of another", "[k % 8 / 2]", "[k % 4 / 2]", _INTEL_8),
    ("all pairs are of a row", "piece_at(b, i, k)", "piece_at(b, 0, k)", _INTEL_8),
]  # fmt: skip

SIMULATED = (Case((32, 48), (48, 32)), Case((64, 128), (128, 64), plan=_GROUP, unit=WGMMA))

#: Where a barrier is missing, and the source around it.
BARRIERS = [
    ("nowhere", "", ""),
    ("of a step", "        barrier(CLK_LOCAL_MEM_FENCE);     ", ""),
    ("before the slabs", "all are here.\n    barrier(CLK_LOCAL_MEM_FENCE);", "all are here."),
    ("between writing a slab and reading it", "WARP_BARRIER();\n            store_slab", "store_slab"),
    ("between reading a slab and writing it", "WARP_BARRIER(); // the slab is read", "// the slab is read"),
]


def mutant_of(patch: pytest.MonkeyPatch, file: str, old: str, new: str, kernel: str = "gemm") -> Kernel:
    """A kernel with one piece of its source replaced."""
    source = program.source
    text = source(file)
    assert text.count(old) == 1, old
    name = f"{file} with {new}"  # programs are kept by their file's name
    patch.setattr(program, "source", lambda file: text.replace(old, new) if file == name else source(file))
    return Kernel(name, kernel)


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        pytest.param(*rest, case, id=what, marks=[] if case.unit in (MMA, WGMMA) else pytest.mark.slow)
        for what, *rest, case in MUTANTS
    ],
)
def test_a_mutant_computes_something_else(
    queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch, old: str, new: str, case: Case
) -> None:
    if simulated:
        pytest.skip("what is wrong shows on any device, and some of it is an access out of bounds")
    case.check(queue, monkeypatch)
    mutant = mutant_of(monkeypatch, case.unit.kernel.file, old, new)
    with pytest.raises(AssertionError, match="values of float16 differ"):
        case.check(queue, monkeypatch, mutant)


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        pytest.param(number, *barrier[1:], id=f"{case.unit.NAME}, {barrier[0]}")
        for number, case in enumerate(SIMULATED)
        for barrier in BARRIERS[: -1 if case.unit is WGMMA else None]  # whose warps fill a slab once
    ],
)
def test_a_missing_barrier_is_a_data_race(simulated: bool, tmp_path: Path, number: int, old: str, new: str) -> None:
    """In a process of its own: Oclgrind ceases to report after so many races, and other tests would go without."""
    if not simulated:
        pytest.skip("only the simulator sees races")
    log = tmp_path / "oclgrind.log"
    environment = {**os.environ, "OCLGRIND_LOG": str(log)}
    script = f"from {__name__} import compute_on_the_simulator as compute; compute({number}, {old!r}, {new!r})"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, cwd=Path(__file__).parents[2])
    assert ("race" in log.read_text()) == bool(old)


def compute_on_the_simulator(number: int, old: str, new: str) -> None:
    """A product with a piece of the source replaced, whatever comes out: the log says what the simulator saw."""
    case = SIMULATED[number]
    device = next(device for device in list_devices() if device.platform.name == "Oclgrind")
    context = cl.Context([device])
    with pytest.MonkeyPatch.context() as patch, suppress(AssertionError):
        mutant = mutant_of(patch, case.unit.kernel.file, old, new) if old else None
        case.check(cl.CommandQueue(context), patch, mutant)
