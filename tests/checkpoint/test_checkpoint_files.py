"""Files that somebody made by hand, or to do harm: refused by name, or read in no more memory than they have bytes."""

from __future__ import annotations

import copy
import io
import json
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from netcl.io import onnx_export
from netcl.io.checkpoint import load_params, save_params
from netcl.io.interop import export_model, load_into_model

from clamp import amp, bridge, checkpoint
from tests.checkpoint.test_checkpoints import OPTIMIZERS, WIDTHS, same_bits, train
from tests.networks import mlp, weights_of
from tests.reference import HALF_DTYPES, to_numpy


@pytest.fixture
def run(queue: cl.CommandQueue, tmp_path: Path) -> Any:
    """A checkpoint, and the model and optimizer that it is of."""
    model = mlp(queue, *WIDTHS)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    amp.save_checkpoint(tmp_path / "run.npz", model, optimizer, note="first")
    return tmp_path / "run.npz", model, optimizer


def rewritten(file: Path, change: Callable[[Any, dict[str, Any]], Any], compressed: bool = False) -> None:
    """Writes a checkpoint with another text and other arrays."""
    with np.load(file) as arrays:
        saved = dict(arrays)
    text = json.loads(saved.pop("clamp.json").tobytes())
    text = change(text, saved) or text
    save = np.savez_compressed if compressed else np.savez
    save(file, **{**saved, "clamp.json": np.frombuffer(json.dumps(text).encode(), np.uint8)})


def claiming(shape: tuple[int, ...]) -> bytes:
    """An array that is said to be of a shape, and has ten bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<u4", "fortran_order": False, "shape": shape})
    return header.getvalue() + bytes(10)


def put(file: Path, name: str, content: bytes, **how: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name that is there already
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(name, content, **how)


MB = 1 << 20


def test_what_the_text_does_not_name_is_not_read(run: Any) -> None:
    file, model, optimizer = run
    size = file.stat().st_size
    for name in ("bomb.npy", "bomb"):
        put(file, name, bytes(64 * MB), compress_type=zipfile.ZIP_DEFLATED)
    assert file.stat().st_size < size + MB
    tracemalloc.start()
    assert amp.load_checkpoint(file, model, optimizer) == {"note": "first"}
    assert tracemalloc.get_traced_memory()[1] < 4 * MB
    tracemalloc.stop()


BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "an array that is compressed": (
        lambda file: rewritten(file, lambda text, arrays: arrays.update({"2": np.zeros(16 * MB)}), compressed=True),
        "compressed",
    ),
    "a text that is compressed": (
        lambda file: rewritten(file, lambda text, arrays: {**text, "more": "0" * 64 * MB}, compressed=True),
        "compressed",
    ),
    "a shape of 4 TB": (lambda file: put(file, "2.npy", claiming((1 << 40,))), "array 2 of shape .* has 10"),
    "a shape beyond all": (lambda file: put(file, "2.npy", claiming((1 << 62, 1 << 62))), "array 2 of shape .* has 10"),
    "a shape below zero": (lambda file: put(file, "2.npy", claiming((-1, 10))), "array 2"),
    "no array": (lambda file: put(file, "2.npy", b"text"), "no checkpoint"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_what_would_take_more_memory_than_the_file_is_refused(run: Any, kind: str) -> None:
    file, model, optimizer = run
    BOMBS[kind][0](file)
    before = weights_of(model)
    tracemalloc.start()
    with pytest.raises(amp.CheckpointError, match=BOMBS[kind][1]) as error:
        amp.load_checkpoint(file, model, optimizer)
    assert str(file) in str(error.value)
    assert tracemalloc.get_traced_memory()[1] < 4 * MB
    tracemalloc.stop()
    assert same_bits(weights_of(model), before)


@pytest.mark.parametrize("byte", [b"'", b"\\", b"\0"])
def test_a_header_whose_brackets_or_quotes_stay_open_is_damage(tmp_path: Path, byte: bytes) -> None:
    """Of an array too long for its check sum to be compared before its header is read."""
    path = tmp_path / "run.npz"
    checkpoint.file.write(path, {"weight": {"array": "0"}}, {"0": np.zeros(5000, np.float32)})
    content = path.read_bytes()
    at = content.rindex(b"{'descr'")
    for place in (at, at + 2):
        path.write_bytes(content[:place] + byte + content[place + 1 :])
        with pytest.raises(amp.CheckpointError, match="damaged"):
            checkpoint.file.read(path)


def places_in(text: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON text: the list or dict, and the index or key."""
    found, waiting = [], [text]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict | list):
            found += [(part, key) for key in (part if isinstance(part, dict) else range(len(part)))]
            waiting += part.values() if isinstance(part, dict) else part
    return found


JUNK: tuple[Any, ...] = (None, True, -1, 10**400, 1.5, "", "0", "x", [], {}, [[]], {"array": "0"}, {"dict": [[[], 1]]})
OTHER_ARRAYS: tuple[Any, ...] = (
    np.zeros(()), np.zeros(0), np.zeros((3, 5), np.uint32), np.ones(16, np.uint8), np.ones(4, "U3"), np.ones(4, bool),
    np.ones((8, 16), np.complex64), np.array(["a"], object),
)  # fmt: skip


def as_it_was(model: Any, optimizer: Any) -> Any:
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float | str | None)}
    return [x.tolist() for x in weights_of(model)], plain, amp.state_dict()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Momentum"])
def test_a_file_made_by_hand_loads_or_is_refused_by_name(queue: cl.CommandQueue, tmp_path: Path, name: str) -> None:
    """A place of the text, or an array, is something else: 60 times at random."""
    file, rng = tmp_path / "run.npz", np.random.default_rng(0)
    with amp.init() as handle:
        model = mlp(queue, *WIDTHS)
        optimizer = OPTIMIZERS[name](model.parameters())
        train(handle, model, optimizer, range(2, 3), [])
        amp.save_checkpoint(file, model, optimizer, note=("first", 1, np.arange(3)))
        good = file.read_bytes()
        with np.load(file) as arrays:
            saved = dict(arrays)
        content = json.loads(saved.pop("clamp.json").tobytes())
        refused = 0
        for _ in range(60):
            text, other = copy.deepcopy(content), dict(saved)
            if rng.random() < 0.2:
                number = str(rng.choice(list(other)))
                other[number] = OTHER_ARRAYS[rng.integers(len(OTHER_ARRAYS))]
                what = f"{number}: {other[number]!r}"
            else:
                places = places_in(text)
                part, key = places[rng.integers(len(places))]
                part[key] = JUNK[rng.integers(len(JUNK))]
                what = f"{key}: {part[key]!r:.50}"
            np.savez(file, **{**other, "clamp.json": np.frombuffer(json.dumps(text).encode(), np.uint8)})
            before = as_it_was(model, optimizer)
            try:
                amp.load_checkpoint(file, model, optimizer)
            except amp.CheckpointError as error:
                refused += 1
                said = str(error)
            except Exception as error:
                raise AssertionError(what) from error
            else:
                said = ""
            assert not said or (str(file) in said and as_it_was(model, optimizer) == before), what
            file.write_bytes(good)
            amp.load_checkpoint(file, model, optimizer)
        assert refused > 25
        train(handle, model, optimizer, range(1), [])


@pytest.mark.usefixtures("shut_down")
@pytest.mark.parametrize("kind", ["npz", "npz of a dict's", "npz of iterators", "pt"])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_netcls_own_files_hold_16_bit_parameters(queue: cl.CommandQueue, tmp_path: Path, dtype: str, kind: str) -> None:
    """Master and parameter have what was saved, the master; netcl would write twice the bytes."""
    first, second = (amp.decorate(mlp(queue, 4, 8, seed=seed), dtype=dtype) for seed in (0, 1))
    file = tmp_path / f"run.{kind[:3].strip()}"
    listed: Callable[[Any], Any] = {
        "npz of a dict's": lambda x: dict(enumerate(x)).values(), "npz of iterators": iter
    }.get(kind, list)  # fmt: skip
    if kind.startswith("npz"):
        save_params(listed(first.parameters()), file)
        load_params(queue, listed(second.parameters()), file)
    else:
        export_model(first, file)
        load_into_model(second, file)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        np.testing.assert_array_equal(to_numpy(other), to_numpy(one))
        np.testing.assert_array_equal(to_numpy(bridge.master_of(other)), to_numpy(bridge.master_of(one)))
        np.testing.assert_array_equal(onnx_export._to_host(one), to_numpy(bridge.master_of(one)))
