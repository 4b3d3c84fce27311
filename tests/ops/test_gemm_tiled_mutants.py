"""The tests of the tiled engine can tell right from wrong: of its kernel one piece is replaced, and the product must
differ, or the simulator must see what it does to memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyopencl as cl
import pytest

from clamp.opencl.device import list_devices
from clamp.opencl.program import Kernel
from clamp.ops.engine import always
from clamp.ops.gemm import engines, tiled
from clamp.ops.gemm.tiled import PLANS, SquarePlan
from tests.ops.gemm_reference import check, random
from tests.ops.test_matrix_units_mutants import mutant_of

pytestmark = [pytest.mark.kernel, pytest.mark.once]

_FOURS, _EIGHTS = PLANS[3], PLANS[1]  # what a work-item has: 4 x 4, and twice as many fours


@dataclass(frozen=True)
class Case:
    """A product that a mutant must get wrong: shapes of op(a) and op(b), and how it is computed."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    transpose_a: bool = False
    transpose_b: bool = False
    plan: SquarePlan = _FOURS
    slices: int = 1
    with_bias: bool = False
    dtype: str = "float16"

    def check(self, queue: cl.CommandQueue, patch: pytest.MonkeyPatch, kernel: Kernel | None = None) -> None:
        """Compares the product with numpy's, computed by another kernel than the engine's if there is one."""
        patch.setattr(tiled, "GEMM", kernel or tiled.GEMM)
        run = partial(tiled.compute, plan=self.plan, slices=self.slices)
        engine = SimpleNamespace(NAME="planned", fits=always, pays=always, pack=tiled.pack, run=run)
        patch.setattr(engines, "ENGINES", (engine,))
        bias = (random(self.b[-1]), "float32") if self.with_bias else None
        transposes = {"transpose_a": self.transpose_a, "transpose_b": self.transpose_b}
        types = self.dtype, self.dtype, "float16"
        check(queue, random(*self.a), random(*self.b, seed=1), types, bias=bias, relu=self.with_bias, **transposes)


_PLAIN = Case((40, 88), (88, 40))
_ROWS = Case((40, 88), (88, 40), transpose_b=True)  # both along k, in pieces of 16 bytes; some tiles are not whole
_COLUMNS = Case((40, 88), (88, 40), transpose_a=True)  # neither along k
_FLOATS = Case((40, 88), (88, 40), transpose_b=True, dtype="float32")
_ELEMENTS = Case((33, 37), (37, 35), transpose_b=True)
_WIDE = Case((72, 40), (40, 72), plan=_EIGHTS)
_SLICES = Case((24, 64), (64, 40), slices=2)
_BATCH = Case((2, 16, 24), (2, 24, 40), transpose_a=True)
_BIAS = Case((16, 24), (24, 72), with_bias=True)
_THREE_TILES = Case((40, 8), (8, 24))
_BRAINS = Case((16, 24), (24, 40), dtype="bfloat16")

#: What is wrong, the piece of source and what replaces it, and a product that shows it.
MUTANTS = [
    ("turned quads are read where they were not put",
     "four * SIDE + quad_at(layout, k, place)", "four * SIDE + place", _FLOATS),
    ("turned quads are put where they are not read",
     "tile + quad_at(layout, place.y, place.x / 4)", "tile + place.x / 4", _ELEMENTS),
    ("the second fours are the first", "k * QUADS + four * SIDE", "k * QUADS", _WIDE),
    ("a piece is put down as a row", "row[(place.y + e) * TILE]", "row[place.y * TILE + e]", _ROWS),
    ("the second four of a piece lie on the first", "(place.x + e) / 4] =", "place.x / 4] =", _COLUMNS),
    ("the halves of a word are swapped", "words[e / 2] >> e % 2 * 16", "words[e / 2] >> (1 - e % 2) * 16", _PLAIN),
    ("a word is taken for two halves", "if (layout.bits == 32) return as_float(words[e]);", "", _FLOATS),
    ("brains are taken for halves", "IS_HALF_bf16 false", "IS_HALF_bf16 true", _BRAINS),
    ("the next fetch is the first one again", "place_of(layout, i * THREADS);", "place_of(layout, 0);", _ROWS),
    ("what lies beyond k is read", "&& (int)place.y < source.steps", "", _BATCH),
    ("the stage that is written is multiplied", "a_tiles[(step - 1) % 2]", "a_tiles[step % 2]", _ROWS),
    ("the last step is not multiplied", "step <= steps; step++", "step < steps; step++", _ROWS),
    ("B moves on as A does", "source.from += b_bytes", "source.from += a_bytes", _PLAIN),
    ("B's matrices lie as A's do", "B + batch * b_batch", "B + batch * a_batch", _BATCH),
    ("a slice begins where it does not", "matrix % slices * slice,", "matrix % slices * TILE_K,", _SLICES),
    ("every band is as high as the first", "first + within % height", "first + within % BAND", _THREE_TILES),
    ("the bias is the tile's first", "BIAS(n + j)", "BIAS(n0 + j)", _BIAS),
    ("the second four columns are stored on the first", "n0 + (four_n * SIDE + x) * 4", "n0 + x * 4", _WIDE),
    ("negative numbers stay", "b[j], relu_1)", "b[j], as_float)", _BIAS),
]  # fmt: skip

EVERYDAY = 8  # the first of them; the sweep has all

#: What need not change a number: what is wrong, the piece of source and what replaces it, and what the simulator says.
SEEN_BY_THE_SIMULATOR = [
    ("nothing", "", "", ""),
    ("there is no barrier", "barrier(CLK_LOCAL_MEM_FENCE);", "", "race"),
    ("there is one stage", "put(a_tiles[step % 2]", "put(a_tiles[(step + 1) % 2]", "race"),
    ("rows beyond the matrix are read", "(int)place.x < source.rows &&", "", "Invalid read"),
]


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        pytest.param(*mutant[1:], id=mutant[0], marks=[] if number < EVERYDAY else pytest.mark.slow)
        for number, mutant in enumerate(MUTANTS)
    ],
)
def test_a_mutant_computes_something_else(
    queue: cl.CommandQueue, simulated: bool, monkeypatch: pytest.MonkeyPatch, old: str, new: str, case: Case
) -> None:
    if simulated:
        pytest.skip("what is wrong shows on any device, and some of it is an access out of bounds")
    case.check(queue, monkeypatch)
    mutant = mutant_of(monkeypatch, tiled.GEMM.file, old, new)
    with pytest.raises(AssertionError, match="values of float16 differ"):
        case.check(queue, monkeypatch, mutant)


@pytest.mark.parametrize(
    ("old", "new", "seen"), [pytest.param(*mutant[1:], id=mutant[0]) for mutant in SEEN_BY_THE_SIMULATOR]
)
def test_the_simulator_sees(simulated: bool, tmp_path: Path, old: str, new: str, seen: str) -> None:
    """In a process of its own: Oclgrind ceases to report after so many races, and other tests would go without."""
    if not simulated:
        pytest.skip("only the simulator looks at memory")
    log = tmp_path / "oclgrind.log"
    environment = {**os.environ, "OCLGRIND_LOG": str(log)}
    script = f"from {__name__} import compute_on_the_simulator as compute; compute({old!r}, {new!r})"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, cwd=Path(__file__).parents[2])
    text = log.read_text()
    assert seen in text
    assert bool(text) == bool(seen)


def compute_on_the_simulator(old: str, new: str) -> None:
    """A product with a piece of the source replaced, whatever comes out: the log says what the simulator saw."""
    device = next(device for device in list_devices() if device.platform.name == "Oclgrind")
    context = cl.Context([device])
    with pytest.MonkeyPatch.context() as patch, suppress(AssertionError):
        mutant = mutant_of(patch, tiled.GEMM.file, old, new) if old else None
        Case((1, 64), (64, 16)).check(cl.CommandQueue(context), patch, mutant)
