"""The file of a checkpoint: numpy's .npz without pickled objects, so that loading one from elsewhere cannot run code.

Arrays lie in it as they were on the device, bit for bit; everything else, and what each array is, stands in one JSON
text:

    clamp.json     {"format": "clamp checkpoint", "version": 2, "models": [...], "optimizers": [...], "amp": ..., ...}
    0, 1, 2 ...    the arrays that the text refers to as {"array": "0", "dtype": "bfloat16"}

Version 1 did not name the parameters of optimizers (optimizers.py reads both).

A file is written beside its place and moved there. What is read of it is what its text refers to, and takes no more
memory than the file has bytes: nothing in it is compressed.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from clamp import bridge
from clamp.bridge import Tensor
from clamp.interrupts import contextmanager, replacing

Array: TypeAlias = npt.NDArray[Any]
Json: TypeAlias = Any

_FORMAT = "clamp checkpoint"
_VERSION = 2
_READABLE = (1, 2)
_TEXT = "clamp.json"
_DEEPEST = 50  # deepest nesting of containers; what contains itself would never end


#: what comes of reading damaged files; of zipfile, which takes a flipped bit for a cipher, RuntimeError
_OF_DAMAGE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, RuntimeError, SyntaxError,
    struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class CheckpointError(ValueError):
    """A file is no checkpoint of clamp's, is damaged, or does not fit what it is loaded into. Nothing was changed."""


def differences(found: Mapping[str, Sequence[str]]) -> str:
    """For messages: ``"2 not in the file: a, b; 1 not in the model: c"``, the first names of each."""
    return "; ".join(f"{len(names)} {what}: {', '.join(names[:5])}" for what, names in found.items() if names)


def write(path: Path, content: Mapping[str, Json], arrays: Mapping[str, Array]) -> None:
    """Writes a checkpoint; the file that was there before stays whole until the new one is.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **content}).encode()
    with replacing(path, "wb") as file:
        np.savez(file, **{_TEXT: np.frombuffer(text, np.uint8), **arrays})  # type: ignore[arg-type]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """The content of a checkpoint, and the arrays that it refers to.

    Raises:
        CheckpointError: the file is no checkpoint, is damaged, or of another version; the message names the array.
        FileNotFoundError: there is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            size = path.stat().st_size
            text = _array(archive, _TEXT, size) if f"{_TEXT}.npy" in archive.namelist() else None
            content = _content(path, text)
            arrays = {}
            for name in _references(content):
                arrays[name] = _array(archive, name, size)
                size -= arrays[name].nbytes
    except (CheckpointError, TimeoutError):
        raise
    except (*_OF_DAMAGE, OSError) as error:
        raise CheckpointError(f"{path} is no checkpoint, is truncated or damaged: {error}") from error
    return content, arrays


def _content(path: Path, text: Array | None) -> dict[str, Any]:
    try:
        content = json.loads(text.tobytes()) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of clamp's (amp.save_checkpoint writes them)")
    if content.get("version") not in _READABLE:
        raise CheckpointError(
            f"{path} has format version {content.get('version')!r}, this clamp reads versions up to {_VERSION}: "
            "load it with the clamp that wrote it, or a newer one"
        )
    return content


def _references(content: Json) -> Iterator[str]:
    """The names of all arrays that a text refers to, each once."""
    found: dict[str, None] = {}
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and isinstance(part.get("array"), str):
            found[part["array"]] = None
        elif isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part
    return iter(found)


def _array(archive: zipfile.ZipFile, name: str, most: int) -> Array:
    """An array of a file, of not more than so many bytes. What it says of its size is compared before it is read.

    Raises:
        ValueError: it is missing, compressed, too large, or no array of numbers. (Other errors say that it is damaged.)
    """
    try:
        entry = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise ValueError(f"array {name} is missing") from None
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"array {name} is compressed, and clamp compresses none")
    if entry.file_size > most:
        raise ValueError(f"array {name} has {entry.file_size} bytes, and the file no more than {most} for it")
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, in_columns, dtype = read_header[version](file)
        if dtype.kind not in "biufc":
            raise ValueError(f"array {name} is of {dtype}, and not of numbers")
        size, left = math.prod(shape) * dtype.itemsize, entry.file_size - file.tell()
        if size != left:
            raise ValueError(f"array {name} of shape {shape} and {dtype} takes {size} bytes, and has {left}")
        data = bytearray(size)
        file.readinto(data)  # type: ignore[attr-defined]
        file.read(1)  # at the end the check sum is compared
        return np.frombuffer(data, dtype).reshape(shape, order="F" if in_columns else "C")


@contextmanager
def reading(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Makes errors raised inside say that this part of a file is damaged, unless it speaks of the file itself, or is
    none of its: an error of the device, memory that is short, a warning that the caller has made an error, the caller's
    own error, from the handler of a signal, say."""
    try:
        yield
    except (CheckpointError, cl.Error):
        raise
    except _OF_DAMAGE as error:
        raise CheckpointError(f"{path} is damaged: {what}: {type(error).__name__}: {error}") from error


class Encoder:
    """Turns values into JSON, and collects their arrays. A tensor that is met twice is one array."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self._tensors: dict[int, tuple[Tensor, Json]] = {}  # with the tensor, so that its id stays its own

    def parameter(self, tensor: Tensor, master: Tensor | None) -> Json:
        """A model's tensor, and the fp32 master that it may have."""
        return {"value": self.tensor(tensor), "master": None if master is None else self.tensor(master)}

    def array(self, array: Array, dtype: str) -> Json:
        name = str(len(self.arrays))
        self.arrays[name] = array
        return {"array": name, "dtype": dtype}

    def tensor(self, tensor: Tensor) -> Json:
        """A tensor's bits."""
        if id(tensor) not in self._tensors:
            dtype = bridge.canonical_dtype(tensor.dtype)
            words = np.dtype(f"u{bridge.nbytes(tensor) // tensor.size}") if tensor.size else np.dtype(np.uint8)
            bits = bridge.read_bytes(tensor).view(words).reshape(tuple(tensor.shape))
            self._tensors[id(tensor)] = tensor, self.array(bits, dtype)
        return self._tensors[id(tensor)][1]

    def value(self, value: Any, where: str, depth: int = 0) -> Json:
        """Numbers, texts, None, numpy arrays, and dicts, lists and tuples of these.

        Raises:
            TypeError: it is something else, or contains itself.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        is_masked = isinstance(value, np.ma.MaskedArray)  # it would lose its mask
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc" and not is_masked:
            return self.array(np.asarray(value), "number" if isinstance(value, np.generic) else "numpy")
        if depth == _DEEPEST:
            raise TypeError(f"{where[:80]}... is nested more than {_DEEPEST} deep, or contains itself")
        if isinstance(value, list):
            return [self.value(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"tuple": [self.value(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]}
        if isinstance(value, dict | bridge.DeviceArrays):
            # Pairs, because JSON's keys are texts.
            pairs = [
                [self.value(key, f"{where}'s key", depth + 1), self.value(item, f"{where}[{key!r}]", depth + 1)]
                for key, item in value.items()
            ]
            return {"dict": pairs}
        raise TypeError(
            f"{where} is of type {type(value).__name__}, which a checkpoint cannot hold: pass numbers, texts, None, "
            "numpy arrays, or dicts, lists and tuples of these (of an object, vars(x) or its state_dict())"
        )


class Decoder:
    """Turns what ``Encoder`` made back into values."""

    def __init__(self, arrays: dict[str, Array], path: str | os.PathLike[str]) -> None:
        self._arrays = arrays
        self.path = path

    def array(self, reference: Json) -> Array:
        return self._arrays[reference["array"]]

    def value(self, value: Json) -> Any:
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "tuple" in value:
            return tuple(self.value(item) for item in value["tuple"])
        if "dict" in value:
            return {self.value(key): self.value(item) for key, item in value["dict"]}
        array = self.array(value)
        return array[()] if value["dtype"] == "number" else array

    def bits_for(self, reference: Json, tensor: Tensor, what: str) -> npt.NDArray[np.uint8]:
        """A saved tensor's bytes in the dtype of the tensor that it is for; floats are converted.

        Raises:
            CheckpointError: shapes differ, or one is of integers.
        """
        words, saved, wanted = self.array(reference), reference["dtype"], bridge.canonical_dtype(tensor.dtype)
        if words.size and words.dtype != f"u{bridge.ITEMSIZE[saved]}":
            raise CheckpointError(f"{self.path}: {what} is {saved}, in words of {words.dtype}")
        if words.shape != tuple(tensor.shape):
            raise CheckpointError(f"{self.path}: {what} has shape {words.shape}, here it is {tuple(tensor.shape)}")
        if saved != wanted:
            if saved not in bridge.STORAGE or wanted not in bridge.STORAGE:
                raise CheckpointError(f"{self.path}: {what} is {saved}, here it is {wanted}")
            words = bridge.to_words(np.ascontiguousarray(bridge.from_words(words, saved)), wanted)
        return np.ascontiguousarray(words).reshape(-1).view(np.uint8)
