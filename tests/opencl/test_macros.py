"""Kernels whose macros are missing, or have values that they do not know, do not compile; the numbers are Python's."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pyopencl as cl
import pytest

from clamp.opencl.program import Kernel, KernelBuildError

#: Of files: what chooses their kernels, and the macros that these cannot do without. A file that is not here has all
#: its kernels in one program, of the macros in its head; storage types are f32 and numbers 1.
_REQUIRED = """
attention_blocked.cl ATTENTION_FORWARD LANES=32 ROWS=8 KEYS=128 Q_T=f16 K_T=f16 V_T=f16 Y_T=f16
attention_blocked.cl ATTENTION_BACKWARD LANES=32 ROWS=8 KEYS=128 Q_T=f16 K_T=f16 V_T=f16 G_T=f16 DQ_T=f16 DV_T=f16
attention_decode.cl WG=1 KEYS=256 Q_T=f32 K_T=f32 V_T=f32 Y_T=f32
attention_mma.cl ATTENTION_FORWARD EMULATE ROWS=32 COLUMNS=32 WIDTH=48 ALIGNED=1 IN_T=f16 Y_T=f32
attention_mma.cl DELTA ATTENTION_BACKWARD_Q EMULATE ROWS=32 COLUMNS=16 WIDTH=48 ALIGNED=1 IN_T=f16 DQ_T=f32
attention_mma.cl ATTENTION_BACKWARD_KV EMULATE ROWS=32 COLUMNS=16 WIDTH=48 ALIGNED=1 IN_T=f16 DK_T=f32 DV_T=f32
attention_tiled.cl ATTENTION_FORWARD SIDE=16 PER_ITEM=4 STEP=16 Q_T=f16 K_T=f16 Y_T=f16
attention_tiled.cl ATTENTION_BACKWARD_Q ATTENTION_BACKWARD_KV SIDE=16 PER_ITEM=4 STEP=16 Q_T=f16 K_T=f16 DQ_T=f16 \
    DK_T=f16
cast.cl X_T=f16 Y_T=f32
concat.cl PARTS=1 JOIN=1 VECTORS=1 INDEX=uint FROM_T=f32 TO_T=f32
conv_dot_bf16.cl KC=512 OUT_T=f32 BIAS_T=f32
conv_dot_bf16_grad.cl WEIGHT_GRAD WEIGHT_GRAD_FINISH STEPS=512 OUT_T=f32
conv_mma.cl CONV EMULATE TILE_M=32 TILE_N=64 TILE_K=32 STAGES=3 WARPS_M=1 WARPS_N=2 IN_T=f16 OUT_T=f32 BIAS_T=f32 \
 TABLE=1 A_ALIGNED=1 FULL=0
conv_mma.cl WEIGHT_GRAD EMULATE TILE_M=32 TILE_N=64 TILE_K=32 STAGES=3 WARPS_M=1 WARPS_N=2 IN_T=f16 OUT_T=f32 \
 BIAS_T=f32 A_ALIGNED=1 FULL=0
conv_wgmma.cl CONV EMULATE TILE_M=64 TILE_N=64 TILE_K=64 STAGES=3 WARPS_M=4 WARPS_N=1 IN_T=f16 OUT_T=f32 BIAS_T=f32 \
 TABLE=1 A_ALIGNED=1 FULL=0
conv_dpas.cl CONV EMULATE SUB_GROUP=16 TILE_M=32 TILE_N=64 TILE_K=32 STAGES=3 WARPS_M=1 WARPS_N=2 IN_T=f16 OUT_T=f32 \
 BIAS_T=f32 TABLE=1 A_ALIGNED=1 FULL=0
conv_wmma.cl CONV EMULATE RDNA=3 TILE_M=32 TILE_N=64 TILE_K=32 STAGES=3 WARPS_M=1 WARPS_N=2 IN_T=f16 OUT_T=f32 \
 BIAS_T=f32 TABLE=1 A_ALIGNED=1 FULL=0
conv_packed.cl CONV WEIGHT_GRAD WEIGHT_GRAD_FINISH KC=512 X_T=f32 MR=6 NR=16 SHORT=4 OUT_T=f32 BIAS_T=f32 G_T=f32 JC=512
conv_stage.cl STAGE_ELEMENTS INTERLEAVE_ELEMENTS INDEX=uint X_T=f32 Y_T=f32
conv_tiled.cl CONV WEIGHT_GRAD INDEX=uint X_T=f32 SIDE=16 PER_ITEM=4 TILE_K=16 OUT_T=f32 BIAS_T=f32 G_T=f32
conv_weights.cl SRC_T=f32 WIDTH=6 SHORT=4 KC=512 PAIRS=0
conv_winograd.cl WINOGRAD X_T=f16 MR=6 SHORT=4 NR=16 KC=128 ROW_PANELS=4 PIECES=4 OUT_T=f16 BIAS_T=f32
conv_winograd.cl TRANSFORM_WEIGHTS SRC_T=f32 MR=6 SHORT=4
conv_winograd_strided.cl WINOGRAD GRADIENT=0 X_T=f16 MR=6 NR=16 SHORT=4 KC=128 ROW_PANELS=4 PIECES=4 OUT_T=f16
depthwise_backward.cl GRADIENT_TILES SHIFT=1 INPUT_GRADIENT=1 WEIGHT_GRADIENT=1 X_T=f32 G_T=f32 W_T=f32 STRIDE=2
depthwise_backward.cl INPUT_GRADIENT_ELEMENTS WEIGHT_GRADIENT_ELEMENTS X_T=f32 G_T=f32 W_T=f32 DX_T=f32 WG=1
depthwise_columns_backward.cl KERNEL=3 PAD=1 INPUT_GRADIENT=1 WEIGHT_GRADIENT=1 X_T=f32 G_T=f32 W_T=f32 DX_T=f32
depthwise_columns_forward.cl KERNEL=3 PAD=1 X_T=f32 W_T=f32 B_T=f32 Y_T=f32 BIAS=1
depthwise_forward.cl FORWARD_TILES FORWARD_ELEMENTS X_T=f32 W_T=f32 B_T=f32 Y_T=f32 BIAS=1 STRIDE=2
distances.cl ALL_PAIRS GATHER TILE=4 WIDE=4 X_T=f32 Y_T=f32 D_T=f32 S_T=f32 DX_T=f32
distances.cl TRIPLET CONTRASTIVE PARTNERS WG=1 X_T=f32 Y_T=f32 Z_T=f32 G_T=f32 DX_T=f32 LABEL_T=i32
elementwise.cl OP=op_add ARITY=2 PARAMETERS=0 X0_T=f32 X0_STEP=1 X1_T=f32 X1_STEP=1 Y_T=f32 STRIDED=0
elementwise.cl OP=op_add ARITY=2 PARAMETERS=0 X0_T=f32 X1_T=f32 Y_T=f32 STRIDED=1 INDEX=uint
gemm_amx.cl IN_T=f16 PARTS=2 DOT_F16=0 EMULATE=1 SUM_STEPS=32 BLOCK_A=8
gemm_direct.cl MR=6 NR=16 KC=256 ROWS=48 COLUMNS=64 SRC_T=f32
gemm_dot_bf16.cl SUM_STEPS=32 BLOCK_A=8
gemm_mma.cl EMULATE TILE_M=32 TILE_N=64 TILE_K=32 STAGES=3 WARPS_M=1 WARPS_N=2 IN_T=f16 OUT_T=f32 BIAS_T=f32 \
 A_K_MAJOR=1 B_K_MAJOR=1 A_ALIGNED=1 B_ALIGNED=1 FULL=0
gemm_pack.cl SRC_T=f32 STEP_SPAN=128
gemm_packed.cl MR=6 NR=16 KC=256
gemm_slices.cl OUT_T=f32 BIAS_T=f32
gemm_wgmma.cl EMULATE TILE_M=64 TILE_N=64 TILE_K=64 STAGES=3 WARPS_M=4 WARPS_N=1 IN_T=f16 OUT_T=f32 BIAS_T=f32 \
 A_K_MAJOR=1 B_K_MAJOR=1 A_ALIGNED=1 B_ALIGNED=1 FULL=0
gemm_dpas.cl EMULATE SUB_GROUP=8 TILE_M=32 TILE_N=64 TILE_K=32 STAGES=3 WARPS_M=1 WARPS_N=2 IN_T=f16 OUT_T=f32 \
 BIAS_T=f32 A_K_MAJOR=1 B_K_MAJOR=1 A_ALIGNED=1 B_ALIGNED=1 FULL=0
gemm_wmma.cl EMULATE RDNA=3 TILE_M=32 TILE_N=64 TILE_K=32 STAGES=3 WARPS_M=1 WARPS_N=2 IN_T=f16 OUT_T=f32 \
 BIAS_T=f32 A_K_MAJOR=1 B_K_MAJOR=1 A_ALIGNED=1 B_ALIGNED=1 FULL=0
gemm_tiled.cl A_T=f32 B_T=f32 SIDE=8 PER_ITEM=4 TILE_K=16 OUT_T=f32 BIAS_T=f32 A_K_MAJOR=1 B_K_MAJOR=0 A_ALIGNED=1 \
 B_ALIGNED=0
grid.cl GRID_SAMPLE GRID_SAMPLE_BACKWARD_INPUT SPAN X_T=f32 Y_T=f32 GRID_T=f32 BORDER=0 G_T=f32
grid.cl AFFINE_GRID AFFINE_GRID_BACKWARD ROTATION ROTATION_BACKWARD X_T=f32 Y_T=f32 G_T=f32
indexing.cl PICK VECTORS=1 SINGLES=0 INDEX=uint X_T=f32 Y_T=f32
indexing.cl ADD ADD_LISTED ADD_SORTED SORT TILE=8 LANES=8 COLUMNS=32 X_T=f32 Y_T=f32 IN_PLACE=0
indexing.cl ONE_HOT TO_INDEX X_T=f32 Y_T=f32
info_nce.cl ROW_LOSS COLUMN_LOSS SLOPES WG=1 G_T=f32
layer_scale.cl X_T=f32 WG=1
loss.cl LABELS PROBABILITIES HINGE WG=1 X_T=f32 T_T=f32 LABEL_T=i32
loss_elementwise.cl LOSS_SUM LOSS_TERMS WG=1 KIND=mse WEIGHTS=0 X_T=f32 T_T=f32 W_T=f32 V_T=f32 Y_T=f32
loss_scale.cl X_T Y_T=f32
multi_tensor.cl X_T=f32 DECADES=2 IN_PLACE=1 ONLY_CHECK=0
norm_planes_backward.cl PLANES_BACKWARD TRAINING=1 GROUPS=0 X_T=f32 G_T=f32 SCALE_T=f32 SHIFT_T=f32 DX_T=f32
norm_planes_forward.cl PLANES_FORWARD BATCH_MERGE X_T=f32 SCALE_T=f32 SHIFT_T=f32 Y_T=f32 RUNNING=1 RUNNING_T=f32
norm_planes_phases.cl PLANES_MOMENTS PLANES_NORMALIZE GRADIENT_SUMS PLANES_GRADIENT WG=64 PARTS=1 RUNNING=1 DX=1 \
 TRAINING=1 GROUPS=1 X_T=f32 G_T=f32 SCALE_T=f32 SHIFT_T=f32 Y_T=f32 DX_T=f32 RUNNING_T=f32
norm_rows.cl ROWS_FORWARD ROWS_BACKWARD KIND=UNIT WG=1 X_T=f32 Y_T=f32 SCALE_T=f32 SHIFT_T=f32 PARAMETERS=1 G_T=f32
numerics.cl X_T=f32 DECADES=2 WG=1
optimizer_step.cl RULE=adam COPY_T=f16 DECADES=2
pad.cl X_T Y_T=f32 REFLECT=0
permute.cl MOVE_ROWS TRANSPOSE TRANSPOSE_LOCAL WORD=uint RANK=0
pool_2x2.cl AVG_POOL_2X2 AVG_POOL_2X2_BACKWARD X_T=f32
pool_elements.cl POOL_ELEMENTS MAX_POOL_ARGMAX POOL_ELEMENTS_BACKWARD MAX=1 INDEX=uint X_T=f32 Y_T=f32 G_T=f32 DX_T=f32
pool_rows.cl POOL_ROWS MAX_POOL_TILES_BACKWARD AVG_POOL_ROWS_BACKWARD MAX=1 X_T=f32 Y_T=f32 G_T=f32 DX_T=f32
probe.cl
reduce.cl SUM_ROWS SUM_COLUMNS EXPAND_ROWS EXPAND_COLUMNS X_T=f32 Y_T=f32
rope.cl SPAN=16 BLOCKS=4 X_T=f32 Y_T=f32 P_T=i32
softmax.cl SOFTMAX_KEPT_ROWS SOFTMAX_COLUMNS_BACKWARD KEPT=4096 ONE_COLUMN=1 X_T=f32 Y_T=f32 G_T=f32 DX_T=f32
softmax.cl SOFTMAX_ROWS SOFTMAX_ROWS_BACKWARD WG=1 X_T=f32 Y_T=f32 G_T=f32 DX_T=f32
squares.cl X_T=f32 DECADES=2 WG=1
statistics.cl X_T=f32 DECADES=2 BINS=3878 FIRST_BIN=0 WG=1
topk.cl ARGMAX_ROWS ARGMAX_COLUMNS TOPK TOPK_HEAP TOPK_SELECT WG=1 X_T=f32 NAN_KEY=INT_MAX WORD=uint
transfer.cl FILL WORD=uchar SPAN=1024
triplets.cl HARDEST ALL ACTIVE CLASSES WG=1 LABEL_T=i64
upsample.cl UPSAMPLE_FORWARD UPSAMPLE_BACKWARD X_T=f32 Y_T=f32 STRIP=256 BILINEAR=0 DOUBLE=0
"""

#: Values that a kernel is not written for, each by itself.
_UNKNOWN = """
attention_blocked.cl ROWS=6 LANES=8 KEYS=100
attention_decode.cl WG=3
attention_mma.cl ROWS=24 COLUMNS=24 WIDTH=24 WIDTH=144
attention_tiled.cl PER_ITEM=3
conv_packed.cl MR=7 NR=48
conv_winograd.cl PIECES=3
depthwise_forward.cl STRIDE=3
elementwise.cl ARITY=4 PARAMETERS=3
gemm_amx.cl PARTS=3 DOT_F16=2
gemm_direct.cl MR=8 NR=48 ROWS=20
gemm_mma.cl TILE_K=24 TILE_M=24 STAGES=1 WARPS_N=8 EMULATE=3
gemm_packed.cl MR=8 NR=48
gemm_tiled.cl SIDE=6 PER_ITEM=6 TILE_K=12
gemm_wgmma.cl TILE_K=32 STAGES=2 WARPS_M=2
gemm_dpas.cl SUB_GROUP=32
gemm_wmma.cl RDNA=2
grid.cl SPAN=4
optimizer_step.cl RULE=lion
permute.cl RANK=6
softmax.cl KEPT=100
"""


def _rows(table: str) -> list[tuple[str, dict[str, str]]]:
    """Files and macros of a table; a macro without a value is 1."""
    rows = [line.split() for line in table.strip().splitlines()]
    return [(file, {name: value or "1" for name, _, value in (x.partition("=") for x in rest)}) for file, *rest in rows]


def _from_head(file: str, text: str) -> str:
    """The row of a kernel file that the table does not have: sections, and the macros of its head without default."""
    listed = re.findall(r"^//   ((?:[A-Z][A-Z0-9_]*,? ?)+)  +(.*)", text, re.MULTILINE)
    names = [
        name for names, meaning in listed if "default" not in meaning for name in re.split(r"[, ]+", names.strip())
    ]
    sections = [name for name in re.findall(r"^#ifdef (\w+)", text, re.MULTILINE) if name not in names]
    return " ".join([file, *sections, *(f"{name}={'f32' if name.endswith('_T') else 1}" for name in names)])


def _rows_of_others() -> list[str]:
    """Rows of the files that the table does not have."""
    texts = {path.name: path.read_text() for path in files("clamp.kernels").iterdir() if path.name.endswith(".cl")}
    inside = {row.split()[0] for row in _REQUIRED.strip().splitlines()}
    assert inside < texts.keys()
    return [_from_head(file, texts[file]) for file in sorted(texts.keys() - inside)]


def _complaints(queue: cl.CommandQueue, file: str, macros: dict[str, str]) -> str:
    """The compiler's log of a program that must not compile; empty if it does."""
    try:
        Kernel(file, "none").on(queue, **macros)
    except KernelBuildError as error:
        return str(error).partition("does not compile")[2].partition("(options:")[0]
    except cl.LogicError:  # it compiled, and has no kernel of that name
        pass
    return ""


@pytest.mark.slow
def test_the_head_of_a_simple_kernel_has_all_that_it_needs(queue: cl.CommandQueue) -> None:
    for row in _rows_of_others():
        ((file, macros),) = _rows(row)
        log = _complaints(queue, file, macros)
        assert log == "", f"{row} does not compile; if its head is complete, give it a row in the table: {log}"


@pytest.mark.slow
def test_a_missing_macro_is_named(queue: cl.CommandQueue) -> None:
    if queue.device.platform.name == "Portable Computing Language":
        pytest.skip("PoCL lets #if take a macro that is missing for 0 (kernels/common.clh)")
    unnamed = []
    for row in _REQUIRED.strip().splitlines() + _rows_of_others():
        ((file, macros),) = _rows(row)
        for name in re.findall(r"(\w+)=", row):
            log = _complaints(queue, file, {key: value for key, value in macros.items() if key != name})
            if not re.search(rf"(?<![A-Z0-9]){name}\b", log):
                unnamed.append(f"{file} without {name}: {log or 'compiles'}")
    assert unnamed == []


@pytest.mark.long
def test_unknown_values_do_not_compile(queue: cl.CommandQueue) -> None:
    known = dict(reversed(_rows(_REQUIRED)))
    for file, *values in map(str.split, _UNKNOWN.strip().splitlines()):
        for name, _, value in (each.partition("=") for each in values):
            log = _complaints(queue, file, {**known[file], name: value})
            assert re.search(rf"\b{name}\b|_{value}\b", log), f"{file} with {name}={value}: {log or 'compiles'}"


def test_a_number_that_is_said_to_be_a_kernels_is_its_number() -> None:
    """What a kernel keeps in private memory has the size that Python goes by, which shows on no small problem."""
    said = re.compile(r"^([\w, ]+) = ([\d, ]+)  # .*\bas (?:\w+ )?in (?:kernels/)?(\w+\.clh?)$", re.MULTILINE)
    found = [x for path in Path(__file__).parents[2].glob("clamp/ops/**/*.py") for x in said.findall(path.read_text())]
    assert len(found) >= 9
    for names, values, file in found:
        text = (files("clamp.kernels") / file).read_text()
        for name, value in zip(names.split(", "), values.split(", "), strict=True):
            assert re.search(rf"^#define {name.removeprefix('_')} {value}\b", text, re.MULTILINE), f"{file}: {name}"
