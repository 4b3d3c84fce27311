"""Kernels written wrong by hand, in ways that no rule finds: of a kernel one piece is replaced, and a problem must
come out wrong.

A missing barrier need not change a number. The simulator sees it all the same, as a data race.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyopencl as cl
import pytest

from clamp.opencl.device import list_devices
from clamp.ops import attention
from clamp.ops.attention import matrix_units as attention_units
from clamp.ops.gemm import tiled
from clamp.ops.gemm.matrix_units import DPAS_8, DPAS_16, MMA, RDNA3, RDNA4, WGMMA
from clamp.ops.gemm.plan import Plan
from tests.mutants import write_wrong
from tests.ops import conv_reference, test_attention_matrix_units, test_conv_matrix_units
from tests.ops.gemm_reference import by_plan, check, random
from tests.ops.test_attention import normal
from tests.ops.test_attention_matrix_units import AT_ONCE, LATE, ONE_WARP, SMALL

pytestmark = [pytest.mark.kernel, pytest.mark.once]

_ONE_WARP = Plan(32, 32, 16, 2, (1, 1))
_TWO_WARPS = Plan(32, 64, 32, 3, (1, 2))


@dataclass(frozen=True)
class Product:
    """Shapes of op(a) and op(b), and how they are multiplied: ``by`` a matrix unit, or the tiled engine."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    transpose_a: bool = False
    transpose_b: bool = False
    plan: Any = _ONE_WARP
    slices: int = 1
    copies: int = AT_ONCE
    with_bias: bool = False
    dtype: str = "float16"
    by: Any = MMA

    @property
    def file(self) -> str:
        return str(tiled.GEMM.file if self.by is tiled else self.by.kernel.file)

    def check(self, queue: cl.CommandQueue, patch: pytest.MonkeyPatch) -> None:
        by_plan(patch, self.by if self.by is tiled else replace(self.by, emulate=self.copies), self.plan, self.slices)
        bias = (random(self.b[-1]), "float32") if self.with_bias else None
        transposes = {"transpose_a": self.transpose_a, "transpose_b": self.transpose_b}
        types = self.dtype, self.dtype, "float16"
        relu = self.with_bias and self.by is tiled
        check(queue, random(*self.a), random(*self.b, seed=1), types, bias=bias, relu=relu, **transposes)


@dataclass(frozen=True)
class Attention:
    """Attention and its gradients on NVIDIA's matrix units, in emulation."""

    shape: tuple[int, int, int, int] = (1, 2, 71, 24)
    causal: bool = False
    copies: int = AT_ONCE
    forward_only: bool = False
    file: str = attention_units.FORWARD.file

    def check(self, queue: cl.CommandQueue, patch: pytest.MonkeyPatch) -> None:
        plan = ONE_WARP if self.forward_only else SMALL
        test_attention_matrix_units.by_plan(patch, plan, self.copies)
        if self.forward_only:
            attention.attention(*normal(queue, 0, self.shape, *["float16"] * 3), False, None, out_dtype="float16")
        else:
            test_attention_matrix_units.check_half(queue, self.shape, "float16", self.causal)


@dataclass(frozen=True)
class Convolution:
    """A convolution and its gradients, likewise."""

    case: conv_reference.Case
    file: str = "conv_mma.cl"

    def check(self, queue: cl.CommandQueue, patch: pytest.MonkeyPatch) -> None:
        engine = test_conv_matrix_units.by_plan(patch, test_conv_matrix_units.UNITS["mma"], 2, AT_ONCE)
        conv_reference.check(queue, self.case, engine, with_bias=False)


_ROWS = Product((40, 88), (88, 40), transpose_b=True)  # both along k, in pieces of 16 bytes; some tiles are not whole
_COLUMNS = Product((40, 88), (88, 40), transpose_a=True)  # neither along k
_ELEMENTS = Product((33, 37), (37, 35), transpose_b=True)
_WIDE = Product((40, 200), (200, 72), plan=_TWO_WARPS)
_LATE = Product((40, 200), (200, 72), plan=_TWO_WARPS, copies=LATE)
_SLICES = Product((24, 64), (64, 40), slices=2)
_BATCH = Product((2, 16, 24), (2, 24, 40), transpose_a=True)
_BIAS = Product((16, 24), (24, 72), with_bias=True)
_THREE_TILES = Product((72, 8), (8, 40))
_GROUP, _TWO_GROUPS = Plan(64, 64, 64, 3, (4, 1)), Plan(128, 128, 64, 3, (8, 1))
_HOPPER = Product((72, 200), (200, 72), transpose_b=True, plan=_GROUP, by=WGMMA)  # both along k
_HOPPER_ACROSS = Product((136, 72), (72, 136), transpose_a=True, plan=_TWO_GROUPS, by=WGMMA)  # neither
_HOPPER_LATE = Product((64, 400), (400, 64), plan=_GROUP, by=WGMMA)  # its instructions are late where copies are not
_RDNA3 = Product((40, 88), (88, 40), by=RDNA3)  # one operand along k, one across
_RDNA4 = Product((40, 88), (88, 40), by=RDNA4)
_RDNA_ACROSS = Product((40, 88), (88, 40), transpose_a=True, by=RDNA3)
_INTEL_8 = Product((40, 88), (88, 40), plan=replace(_ONE_WARP, lanes=8), by=DPAS_8)
_INTEL_8_ACROSS = replace(_INTEL_8, transpose_a=True)
_INTEL_16 = Product((40, 88), (88, 40), plan=replace(_ONE_WARP, lanes=16), by=DPAS_16)
_TILED = Product((40, 88), (88, 40), plan=tiled.PLANS[3], by=tiled)
_TILED_ROWS = replace(_TILED, transpose_b=True)  # both along k, in pieces of 16 bytes; some tiles are not whole
_TILED_COLUMNS = replace(_TILED, transpose_a=True)  # neither along k
_TILED_FLOATS = replace(_TILED, transpose_b=True, dtype="float32")
_TILED_ELEMENTS = replace(_TILED, a=(33, 37), b=(37, 35), transpose_b=True)
_TILED_WIDE = replace(_TILED, a=(72, 40), b=(40, 72), plan=tiled.PLANS[1])
_TILED_SLICES = replace(_TILED, a=(24, 64), b=(64, 40), slices=2)
_TILED_BATCH = replace(_TILED, a=(2, 16, 24), b=(2, 24, 40), transpose_a=True)
_TILED_BIAS = replace(_TILED, a=(16, 24), b=(24, 72), with_bias=True)
_TILED_THREE = replace(_TILED, a=(40, 8), b=(8, 24))
_TILED_BRAINS = replace(_TILED, a=(16, 24), b=(24, 40), dtype="bfloat16")
_ATTEND = Attention()
_CAUSAL = Attention(causal=True)
_ATTEND_LATE = Attention(copies=LATE)
_ATTEND_63 = Attention((1, 2, 63, 21))  # the last step lacks one row
_CONV = Convolution(conv_reference.Case(2, 3, 5, (5, 7), (3, 3), pad=(1, 1)))
_STRIDED = Convolution(conv_reference.Case(2, 3, 5, (7, 9), (3, 3), (2, 2), (1, 1), groups=2))

#: What is wrong, the piece of source and what replaces it, and a problem that shows it.
MUTANTS = [
    ("turned quads are read where they were not put",
     "four * SIDE + quad_at(layout, k, place)", "four * SIDE + place", _TILED_FLOATS),
    ("turned quads are put where they are not read",
     "tile + quad_at(layout, place.y, place.x / 4)", "tile + place.x / 4", _TILED_ELEMENTS),
    ("the second fours are the first", "k * QUADS + four * SIDE", "k * QUADS", _TILED_WIDE),
    ("a piece is put down as a row", "row[(place.y + e) * TILE]", "row[place.y * TILE + e]", _TILED_ROWS),
    ("the second four of a piece lie on the first", "(place.x + e) / 4] =", "place.x / 4] =", _TILED_COLUMNS),
    ("the halves of a word are swapped", "words[e / 2] >> e % 2 * 16", "words[e / 2] >> (1 - e % 2) * 16", _TILED),
    ("a word is taken for two halves", "if (layout.bits == 32) return as_float(words[e]);", "", _TILED_FLOATS),
    ("brains are taken for halves", "IS_HALF_bf16 false", "IS_HALF_bf16 true", _TILED_BRAINS),
    ("the next fetch is the first one again", "place_of(layout, i * THREADS);", "place_of(layout, 0);", _TILED_ROWS),
    ("what lies beyond k is read", "&& (int)place.y < source.steps", "", _TILED_BATCH),
    ("the stage that is written is multiplied", "a_tiles[(step - 1) % 2]", "a_tiles[step % 2]", _TILED_ROWS),
    ("the last step is not multiplied", "step <= steps; step++", "step < steps; step++", _TILED_ROWS),
    ("B moves on as A does", "source.from += b_bytes", "source.from += a_bytes", _TILED),
    ("B's matrices lie as A's do", "B + batch * b_batch", "B + batch * a_batch", _TILED_BATCH),
    ("a slice begins where it does not", "matrix % slices * slice,", "matrix % slices * TILE_K,", _TILED_SLICES),
    ("every band is as high as the first", "first + within % height", "first + within % BAND", _TILED_THREE),
    ("the bias is the tile's first", "BIAS(n + j)", "BIAS(n0 + j)", _TILED_BIAS),
    ("the second four columns are stored on the first", "n0 + (four_n * SIDE + x) * 4", "n0 + x * 4", _TILED_WIDE),
    ("negative numbers stay", "b[j], relu_1)", "b[j], as_float)", _TILED_BIAS),
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
    ("columns wrap a position late", "if (++p.q == g.columns)", "if (++p.q == g.columns + 1)", _CONV),
    ("images are not changed", "            p.n++;", "            ;", _CONV),
    ("the row above is not the edge", "row >= 0 && row <", "row <", _CONV),
    ("the column behind is not the edge", "column < (int)g.width", "column <= (int)g.width", _CONV),
    ("columns begin a stride late", "column = p.q * g.stride_x", "column = (p.q + 1) * g.stride_x", _CONV),
    ("weights lie where k says", "weights[row + at[e]]", "weights[row + k + e]", _STRIDED),
    ("what is fetched is stored unswizzled",
     "(stage)[A_PIECES + piece_of(i, TILE_K, B_LINE, THREADS).place]",
     "(stage)[A_PIECES + get_local_id(0) + i * THREADS]", _CONV),
    ("groups share an image", "    image += group * image_group;\n    const matrix_t", "    const matrix_t", _STRIDED),
    ("results of a remainder lie together", "(m + row) * t.plane + p.r * t.row + p.q * t.column;", "0;", _STRIDED),
    ("every slice begins with the first", "begin = matrix % slices * slice, end", "begin = 0, end", _STRIDED),
    ("values lie where keys do", "*const others1 = others0 + OTHER_PIECES", "*const others1 = others0", _ATTEND),
    ("stages overlap", "% 2 * (2 * OTHER_PIECES)", "% 2 * OTHER_PIECES", _ATTEND),
    ("the next tiles go to the stage that is read",
     "LOAD_ROWS(STAGE_OF(step), x0", "LOAD_ROWS(STAGE_OF(step + 1), x0", _ATTEND),
    ("copies are waited for a step late", "COPIES_WAIT(&copies, 0)", "COPIES_WAIT(&copies, 1)", _ATTEND_LATE),
    ("what is copied lies unswizzled",
     "copy_async(copies, tile + piece.place,", "copy_async(copies, tile + piece.line * pieces + piece.element / 8,",
     _ATTEND),
    ("a key does not see its own query", "((column) < (row))", "((column) <= (row))", _CAUSAL),
    ("a query sees the next key", "((row) < (column))", "((row) + 1 < (column))", _CAUSAL),
    ("there is a row more than T", "c >= T ||", "c > T ||", _ATTEND_63),
    ("a step that lacks one row is taken for whole",
     "edge = column0 + COLUMNS > (int)T ", "edge = column0 + COLUMNS > (int)T + 1 ", _ATTEND_63),
    ("no step is on the diagonal", "&& first < column0 + COLUMNS)", "&& first + ROWS < column0 + COLUMNS)", _CAUSAL),
    ("keys see queries from the next step on", "causal ? first : 0", "causal ? first + COLUMNS : 0", _CAUSAL),
    ("every warp has the first's rows", "block_at(tile, LINE, warp * 16, d,", "block_at(tile, LINE, 0, d,", _ATTEND),
    ("the second product does not transpose",
     "j * 8, k, false, false)", "j * 8, k, true, false)", _ATTEND),
    ("upper columns are the lower ones", "mma(sums[j + 1], a, b, 1, lane)", "mma(sums[j + 1], a, b, 0, lane)", _ATTEND),
    ("the registers of an operand are in the other order",
     "PAIR(left[2], left[3]), PAIR(right[0], right[1])", "PAIR(right[0], right[1]), PAIR(left[2], left[3])", _ATTEND),
    ("the halves of a register are swapped",
     "CAT(pair_, IN_T)(lower, upper)", "CAT(pair_, IN_T)(upper, lower)", _ATTEND),
    ("the lower rows have the upper ones' factor", "sums[j][e] *= factor[e / 2]", "sums[j][e] *= factor[0]", _ATTEND),
    ("results keep the scale of an earlier maximum", "scale_rows(result, WIDTH / 8, rescale);", "", _ATTEND),
    ("totals keep the scale of an earlier maximum", "total[h] * rescale[h] + added[h]", "total[h] + added[h]", _ATTEND),
    ("gradients keep the unit of an earlier step", "scale_rows(sums, WIDTH / 8, rescale);", "", _ATTEND),
    ("columns take rows' logarithms", "shift[j][e % 2]", "shift[j][e / 2]", _ATTEND),
    ("the gradient of keys is of the result's", "slopes, others0, exchange, lane);\n    }\n    const float lower",
     "slopes, others1, exchange, lane);\n    }\n    const float lower", _ATTEND),
]  # fmt: skip

#: In every run; the sweep has all.
_OFTEN = {*MUTANTS[:8], *(mutant for mutant in MUTANTS if getattr(mutant[-1], "by", None) in (MMA, WGMMA))}
_OFTEN.update(mutant for mutant in MUTANTS if isinstance(mutant[-1], Convolution))

_BARRIER = "barrier(CLK_LOCAL_MEM_FENCE);"
_TILES = replace(_TILED, a=(1, 64), b=(64, 16))
_WARP, _GROUP_OF_WARPS = Product((32, 48), (48, 32)), Product((64, 128), (128, 64), plan=_GROUP, by=WGMMA)

#: What need not change a number: where, the piece of source and what replaces it, and what the simulator says.
SEEN_BY_THE_SIMULATOR = [
    ("nothing", "", "", _TILES, ""),
    ("there is no barrier", _BARRIER, "", _TILES, "race"),
    ("there is one stage", "put(a_tiles[step % 2]", "put(a_tiles[(step + 1) % 2]", _TILES, "race"),
    ("rows beyond the matrix are read", "(int)place.x < source.rows &&", "", _TILES, "Invalid read"),
    *(
        (f"no barrier {where}, {case.by.NAME}", old, new, case, "race" if old else "")
        for case in (_WARP, _GROUP_OF_WARPS)
        for where, old, new in [
            ("is missing", "", ""),
            ("of a step", f"        {_BARRIER}     ", ""),
            ("before the slabs", f"all are here.\n    {_BARRIER}", "all are here."),
            ("between writing a slab and reading it", "WARP_BARRIER();\n            store_slab", "store_slab"),
            ("between reading a slab and writing it", "WARP_BARRIER(); // the slab is read", "// the slab is read"),
        ][: -1 if case.by is WGMMA else None]  # whose warps fill a slab once
    ),
    ("no barrier of a step, attention", _BARRIER + " " * 60, "",
     Attention((1, 1, 33, 5), forward_only=True), "race"),
]  # fmt: skip


@pytest.mark.unsimulated  # what is wrong shows on any device, and some of it is an access out of bounds
@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [pytest.param(*mutant[1:], id=mutant[0], marks=[] if mutant in _OFTEN else pytest.mark.slow) for mutant in MUTANTS],
)
@pytest.mark.long
def test_a_mutant_computes_something_else(
    queue: cl.CommandQueue, monkeypatch: pytest.MonkeyPatch, old: str, new: str, problem: Any
) -> None:
    problem.check(queue, monkeypatch)
    write_wrong(monkeypatch, problem.file, old, new)
    with pytest.raises(AssertionError, match=r"values of float(16|32) differ"):
        problem.check(queue, monkeypatch)


@pytest.mark.parametrize(
    ("number", "seen"),
    [pytest.param(number, each[-1], id=each[0]) for number, each in enumerate(SEEN_BY_THE_SIMULATOR)],
)
def test_the_simulator_sees(simulated: bool, tmp_path: Path, number: int, seen: str) -> None:
    """In a process of its own: Oclgrind ceases to report after so many races, and other tests would go without."""
    if not simulated:
        pytest.skip("only the simulator looks at memory")
    log = tmp_path / "oclgrind.log"
    environment = {**os.environ, "OCLGRIND_LOG": str(log)}
    script = f"from {__name__} import compute_on_the_simulator as compute; compute({number})"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, cwd=Path(__file__).parents[2])
    text = log.read_text()
    assert seen in text
    assert bool(text) == bool(seen)


def compute_on_the_simulator(number: int) -> None:
    """A problem with a piece of the source replaced, whatever comes out: the log says what the simulator saw."""
    _, old, new, problem, _ = SEEN_BY_THE_SIMULATOR[number]
    device = next(device for device in list_devices() if device.platform.name == "Oclgrind")
    context = cl.Context([device])
    with pytest.MonkeyPatch.context() as patch, suppress(AssertionError):
        if old:
            write_wrong(patch, problem.file, old, new)
        problem.check(cl.CommandQueue(context), patch)
