"""The header of a safetensors file: 8 bytes with its length, JSON, and then data without gaps or overlaps.
Source: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xshard import arguments, dtypes
from xshard.errors import DtypeError, XshardError

LONGEST_BYTES = 100_000_000  # of a header, as of other readers
_SHORT = {
    "bool": "BOOL", "bfloat16": "BF16", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0", **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}  # fmt: skip
_LONG = {short: name for name, short in _SHORT.items()}
_METADATA = "__metadata__"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class FileError(XshardError):
    """A malformed file, or one that cannot be read or written."""


class Entry(NamedTuple):
    """An array in a file, and the offset of its bytes."""

    shape: tuple[int, ...]
    dtype: str
    start: int


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The arrays of a safetensors file by name, in the order of their bytes, and its `__metadata__`."""
    if path.suffix in _PICKLES:
        hint = "convert it if you trust its author: safetensors.torch.save_file(torch.load(...))"
        raise FileError(f"{path.name} is a pickle, which runs code when it is read", hint=hint)
    check_regular(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_BYTES):
            sizes = (
                f"a header of {length} bytes in a file of {size}" if size >= 8 else f"{size} bytes"
            )
            hint = "it is truncated, or of another format: copy or download it again"
            raise FileError(f"{path.name} is not a whole safetensors file: {sizes}", hint=hint)
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except FileError as error:
        raise FileError(f"{path.name}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path.name}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FileError(f"{path.name}: the header is not a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise FileError(f"{path.name}: __metadata__ is not an object of texts")
    return _entries(path, header, 8 + length, size), metadata


def check_regular(path: Path) -> None:
    """Raise FileError for a folder, and for a pipe, which a reader would wait for."""
    if path.exists() and not path.is_file():
        raise FileError(f"{path.name} is not a file")


def check_folder(folder: str | Path) -> None:
    """Raise FileError for a pipe anywhere in a folder."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            check_folder(entry.path)
        elif not (entry.is_file() or entry.is_dir()):
            check_regular(Path(entry.path))


def write_header(
    entries: Mapping[str, tuple[Sequence[int], str]], metadata: Mapping[str, str]
) -> bytes:
    """The first bytes of a file with these shapes and dtypes, in the order of the data, 8 bytes aligned."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    start = 0
    if _METADATA in entries:
        raise FileError(
            f"an array is called {_METADATA!r}", hint="safetensors notes texts under that name"
        )
    for name, (shape, dtype) in entries.items():
        if dtype not in _SHORT:
            hint = f"it has {', '.join(sorted(_SHORT))}"
            raise DtypeError(f"{name}: safetensors has no {dtype}", hint=hint)
        stop = start + dtypes.n_bytes(shape, dtype)
        header[name] = {"dtype": _SHORT[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_BYTES:
        raise FileError(
            f"a header of {len(text)} bytes", hint="smaller shards, with fewer arrays each"
        )
    return len(text).to_bytes(8, "little") + text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise FileError(f"the header has {arguments.shown(twice)} twice")
    return items


def _entries(path: Path, header: dict[str, Any], data: int, size: int) -> dict[str, Entry]:
    """The arrays of a header; their bytes are all data of the file, which begins at `data`."""
    spans = []
    for name, entry in header.items():
        try:
            spans.append((*_entry(entry, data, size), name))
        except FileError as error:
            hint = "the header and the data do not fit: copy or download the file again"
            raise FileError(f"{path.name}: {name}: {error.reason}", hint=hint) from None
    last = 0
    for start, stop, _, name in sorted(spans, key=lambda span: span[:2]):
        if start != last:
            fault = "overlap" if start < last else "leave a gap"
            raise FileError(
                f"{path.name}: the bytes of {name}, from {start}, {fault}: others end at {last}"
            )
        last = stop
    if last != size - data:
        raise FileError(f"{path.name}: arrays of {last} bytes in a file with {size - data}")
    return {name: entry for _, _, entry, name in sorted(spans, key=lambda span: span[:2])}


def _entry(entry: Any, data: int, size: int) -> tuple[int, int, Entry]:
    """The first and last offset of an array's bytes in the data, and the array."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FileError("an array has dtype, shape and data_offsets, and nothing else")
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _LONG:
        raise FileError(f"unknown dtype {arguments.shown(dtype)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise FileError(f"shape {arguments.shown(shape)} at {arguments.shown(offsets)}")
    start, stop = offsets
    n = dtypes.n_bytes(shape, _LONG[dtype])
    if stop - start != n or data + stop > size:
        raise FileError(f"{n} bytes of shape {tuple(shape)} at {offsets} of {size - data}")
    return start, stop, Entry(tuple(shape), _LONG[dtype], data + start)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)
