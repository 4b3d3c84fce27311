"""A run as it might have been: a small language model whose attention outgrows float16 after two hundred steps.

``python -m tests.debug.sample run.json`` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from clamp.debug.layer_ranges import LayerRange
from clamp.debug.page.schema import HeldAt, Module, Op, Range, TensorKind
from clamp.report import Run, checked, write_run
from clamp.scaling.step_report import StepReport
from tests.ops.test_statistics import expected

MATMUL = "netcl.autograd.matmul_op"
BROKEN = "blocks.2.attention"
LAST = 216  # step, and the tenth in a row that is skipped
SCALE = 4096.0


def range_of(
    rng: np.random.Generator, name: str, kind: TensorKind, centre: float, width: float, count: int, dtype: str,
    zeros: float = 0.0,
) -> Range:  # fmt: skip
    """The range of as many numbers, whose log2-magnitudes are normally distributed."""
    values = np.exp2(rng.normal(centre, width, count)) * rng.choice([-1.0, 1.0], count)
    values[rng.random(count) < zeros] = 0.0
    scale = SCALE if "gradient" in kind else 1.0
    module = name.removesuffix(".weight").removesuffix(".bias")
    return LayerRange(name, module, kind, dtype, scale, expected(values.astype(np.float32))).as_json()


def modules() -> list[Module]:
    """The model's tree."""
    found = [("", "CharLM", 861_440), ("embedding", "Embedding", 12_416)]
    for block in range(4):
        path = f"blocks.{block}"
        found += [
            (path, "Block", 198_272),
            (f"{path}.norm1", "LayerNorm", 256),
            (f"{path}.attention", "MultiHeadAttention", 66_048),
            (f"{path}.norm2", "LayerNorm", 256),
            (f"{path}.mlp", "Sequential", 131_712),
            (f"{path}.mlp.0", "Linear", 66_048),
            (f"{path}.mlp.1", "GELU", 0),
            (f"{path}.mlp.2", "Linear", 65_664),
        ]
    found += [("norm", "LayerNorm", 256), ("head", "Linear", 12_513)]
    return [{"path": path, "class": name, "parameters": count} for path, name, count in found]


def steps() -> Iterator[dict[str, Any]]:
    """Two skips at the start, while the scale is sought, and ten at the end."""
    rng = np.random.default_rng(17)
    scale = 65536.0
    for number in range(1, LAST + 1):
        searching, broken = number in (1, 2), number > LAST - 10
        is_bad, before = searching or broken, scale
        scale /= 2 if is_bad else 4 if number == 130 else 1
        names = ("head.weight",) if searching else ("blocks.2.attention.qkv", "blocks.1.mlp.2.weight")
        what = f"{'inf in 96' if searching else 'nan in 264192'} elements of the gradients of {', '.join(names)}"
        report = StepReport(
            not is_bad, what if is_bad else "", scale, scale_before=before, step=number, infs=96 * searching,
            nans=264192 * broken, parameters=names if is_bad else (),
        )  # fmt: skip
        fall = 1.1 + 3.3 * np.exp(-number / 40)
        loss = np.nan if broken else fall * rng.normal(1, 0.02)
        norm = np.nan if broken else np.inf
        if not is_bad:
            norm = 0.4 * fall * np.exp(rng.normal(0, 0.15)) * 1.012**number
        yield {**asdict(report), "loss": loss, "gradient_norm": norm}


def _op(name: str, policy: str, module: str, line: int, shape: list[int], milliseconds: float, **more: object) -> Op:
    dtype = "float32" if policy == "float" else "float16"
    return {
        "op": name,
        "function": f"netcl.autograd.{name}",
        "policy": policy,
        "direction": "forward",
        "module": module,
        "line": f"char_lm.py:{line}",
        "inputs": ["float16", "float32"] if policy == "half" else [dtype],
        "dtype": dtype,
        "shape": shape,
        "calls": LAST,
        "milliseconds": milliseconds * LAST,
        "bytes": int(np.prod(shape)) * (4 if dtype == "float32" else 2) * LAST,
        "note": "",
        **more,
    }  # type: ignore[return-value]


def ops() -> Iterator[Op]:
    """Those of every block, forward and backward."""
    for path in [module["path"] for module in modules()]:
        own: list[Op] = []
        if path.endswith("attention"):
            own = [
                _op("matmul_op", "half", path, 71, [32, 128, 384], 0.42),
                _op("matmul_op", "half", path, 74, [32, 4, 128, 128], 0.31),
                _op("softmax", "float", path, 75, [32, 4, 128, 128], 0.55),
                _op("matmul_op", "half", path, 76, [32, 4, 128, 32], 0.29),
            ]
        elif path.endswith(("mlp.0", "mlp.2", "head")):
            own = [_op("matmul_op", "half", path, 58, [32, 128, 97 if path == "head" else 512], 0.61)]
            own.append(_op("add", "promote", path, 58, own[0]["shape"], 0.05))
        elif path.endswith("mlp.1"):
            own = [_op("gelu", "match", path, 59, [32, 128, 512], 0.11)]
        elif "norm" in path:
            note = "not worth it: the casts around it take longer than it gains"
            own = [_op("layer_norm", "float", path, 52, [32, 128, 128], 0.16, note=note if "2.norm1" in path else "")]
        elif path == "embedding":
            own = [_op("embedding", "match", path, 91, [32, 128, 128], 0.04)]
        yield from own
        for op in reversed(own):
            taken = op["milliseconds"]
            yield {**op, "direction": "backward", "milliseconds": None if taken is None else 1.9 * taken}
    yield _op("cross_entropy", "float", "", 112, [1], 0.09)
    yield _op("cast", "", "", 112, [861_440], 0.21, function=None, inputs=["float32"], note="weights, once a step")


def before_the_bad_one() -> list[Op]:
    """The forward ops before the second product of the broken attention."""
    forward = [op for op in ops() if op["direction"] == "forward"]
    first = next(number for number, op in enumerate(forward) if op["module"] == BROKEN)
    return forward[first - 20 : first + 1]


def ranges() -> Iterator[Range]:
    """Activations and gradients of what has weights; those of the attention grow from block to block."""
    rng = np.random.default_rng(17)
    names = ["embedding"]
    names += [f"blocks.{block}.{part}" for block in range(4) for part in ("norm1", "attention", "mlp.0", "mlp.2")]
    for place, name in enumerate([*names, "norm", "head"]):
        attention = name.endswith("attention")
        depth = int(name[7]) if "blocks" in name else 0
        centre = {0: 5.6, 1: 7.6, 2: 12.8, 3: 6.2}[depth] if attention else -0.5 + 0.1 * place
        yield range_of(rng, name, "activation", centre, 1.6 if attention else 1.5, 40_000, "float16", 0.02)
        yield range_of(rng, name, "gradient", -13.5 - 0.32 * (18 - place), 2.4, 40_000, "float16", 0.05)
        yield range_of(rng, f"{name}.weight", "parameter", -4.6, 1.3, 16_000, "float32")
        yield range_of(rng, f"{name}.weight", "parameter gradient", -3 - 0.1 * (18 - place), 1.6, 16_000, "float32")


def moments() -> Iterator[HeldAt]:
    """Memory by ops: forward fills it with activations, backward takes them for gradients and workspaces."""
    forward, backward = ([op for op in ops() if op["direction"] == one] for one in ("forward", "backward"))
    for step, op in enumerate([*forward, *backward[::-1]]):
        depth = min(step, len(forward) + len(backward) - step)
        is_forward = step < len(forward)
        yield {
            "op": op["op"] if is_forward else f"{op['op']} backward", "module": op["module"], "line": op["line"],
            "bytes": {
                "activations": 421_000 * depth, "weights": 3_445_760, "masters": 0, "copies": 17_000 * min(step, 49),
                "gradients": 0 if is_forward else 35_000 * (step - len(forward)), "optimizer state": 6_891_520,
                "workspaces": 120_000 * (step % 7), "other tensors": 524_288, "recordings": 0, "rounding": 90_000,
                "free": 2**21,
            },
        }  # fmt: skip


def sample_run() -> Run:
    """The whole run; the same one every time."""
    return checked({
        "version": 1,
        "clamp": "0.1.0",
        "device": {
            "name": "Intel(R) Xeon(R) Processor", "driver": "2026.0", "platform": "Intel(R) OpenCL"
        },
        "dtype": "float16",
        "level": "O1",
        "date": "2026-11-24T06:20:11+00:00",
        "seconds": 14.2,
        "verdict": {
            "headline": "`matmul_op` in `blocks.2.attention` overflows float16 in the forward",
            "details": [
                "Steps 207 to 216 were skipped: nan in the gradients of 2 parameters. The loss scale fell to 8, and "
                "no scale can help: the loss itself is nan.",
                "The first inf is in the scores of the attention, called at `char_lm.py:74`: 893 elements. Its "
                "operands reach 451 and 398, so that sums of 32 products pass 65504, the largest float16.",
                "`blocks.1.attention` is next: it reaches 28,044, less than a factor of 3 below.",
            ],
            "cure": f'handle = amp.init(custom_black_list=["{MATMUL}"])',
            "kind": "overflow",
        },
        "steps": list(steps()),
        "ops": list(ops()),
        "ranges": list(ranges()),
        "suggested_scale": 2.0**19,
        "updates": {
            "layers": [
                {"module": "blocks.2.attention", "dtype": "bfloat16", "updates": 65_536, "lost": 26_870},
                {"module": "head", "dtype": "bfloat16", "updates": 8_320, "lost": 0},
            ],
            "notes": ["Adam's eps, 1e-08, is below float16's smallest number"],
        },
        "memory": {
            "activations": 41_300_000,
            "weight_copies": 1_722_880,
            "peak": 88_400_000,
            "float32_activations": 79_900_000,
            "float32_peak": 148_100_000,
            "timeline": list(moments()),
            "holders": [
                {"kind": "activations", "op": "matmul_op", "module": BROKEN, "line": "char_lm.py:74", "bytes": 2**20,
                 "count": 3},
                {"kind": "weights", "op": "before the step", "module": "", "line": "", "bytes": 3_445_760, "count": 31},
            ],
        },
        "modules": modules(),
        "first_bad": {
            "op": "matmul_op",
            "direction": "forward",
            "module": BROKEN,
            "line": "char_lm.py:74",
            "dtype": "float16",
            "what": "inf",
            "count": 893,
            "inputs": [
                {"name": "a", "dtype": "float16", "smallest": 2.1e-4, "largest": 451.2, "infs": 0, "nans": 0},
                {"name": "b", "dtype": "float16", "smallest": 3.6e-4, "largest": 398.0, "infs": 0, "nans": 0},
            ],
            "frames": [
                f"forward   {op['op']:<11} {op['module'] or 'model':<20} {op['dtype']}  {op['line']}"
                for op in before_the_bad_one()
            ],
        },
    })  # fmt: skip


def short_run() -> Run:
    """Some ops and ranges of the sample: each kind of row, and not many of a kind."""
    run = sample_run()
    return {
        **run,
        "ops": [op for op in run["ops"] if op["module"] in (BROKEN, "blocks.2.norm1", "")],
        "ranges": [one for one in run["ranges"] if one["module"] in (BROKEN, "embedding")],
    }


def empty_run() -> Run:
    """A run of which nothing is known."""
    unknown = {**dict.fromkeys(sample_run()["memory"]), "timeline": [], "holders": []}
    return {
        **sample_run(),
        "verdict": {"headline": "Nothing was recorded", "details": [], "cure": None, "kind": "unknown"},
        "steps": [], "ops": [], "ranges": [], "modules": [],
        "suggested_scale": None, "updates": {"layers": [], "notes": []}, "memory": unknown, "first_bad": None,
    }  # type: ignore[typeddict-item]  # fmt: skip


def large_run() -> Run:
    """A thousand steps, half of them skipped, and three hundred ops and ranges of as many modules."""
    run = sample_run()
    steps = [{**run["steps"][number % LAST], "step": number + 1} for number in range(1000)]
    reason = "inf in 123456 elements and nan in 12 elements of the gradients of a.b.weight, c.d.weight, e and 97 more"
    for step in steps[::2]:
        step |= {"stepped": False, "reason": reason}
    names = [f"encoder.layers.{number}.feed_forward" for number in range(300)]
    return {
        **run,
        "steps": steps,
        "ops": [{**run["ops"][number % 98], "module": name} for number, name in enumerate(names)],
        "memory": {**run["memory"], "timeline": run["memory"]["timeline"] * 10},
        "ranges": [{**one, "module": name} for name in names for one in run["ranges"][:4]],
        "modules": [{"path": name, "class": "Linear", "parameters": 1_000_000} for name in names],
    }  # type: ignore[typeddict-item]  # fmt: skip


def hostile_run(run: Run) -> Run:
    """A run in which every text that may be any text is full of what HTML, SVG, TeX and templates read."""
    chosen = {"version", "kind", "direction", "what"}
    html = """<script>alert("1")</script></style></title><img src=x onerror=alert(1)>' & """
    text = html + "$verdict $\\frac{ ${x} #010101 ` \u5c42 \U0001f525"

    def soiled(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {name: soiled(part, name) for name, part in value.items()}
        if isinstance(value, list):
            return [soiled(part, key) for part in value]
        return f"{value}{text}" if isinstance(value, str) and key not in chosen else value

    return soiled(run)  # type: ignore[return-value]


if __name__ == "__main__":
    write_run(sample_run(), sys.argv[1])
