"""The header of a safetensors file: 8 bytes with its length, JSON, and then data without gaps or overlaps.

Source: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xshard import dtypes
from xshard.errors import DtypeError, XshardError
from xshard.signatures import short_repr

LONGEST_BYTES = 100_000_000  # of a header: the limit of the format's own reader
_LENGTH_BYTES = 8  # that hold the length of the header
_ALIGNMENT = 8  # of the data: readers map arrays of any dtype where they lie
# The format's names of dtypes. float16 is F16, uint8 is U8; others do not follow the pattern.
_SHORT = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
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
    """Read and check the header of a safetensors file: its arrays, and where their bytes are.

    A file is 8 bytes with the header's length, the header as JSON, and the data of all arrays.

    Returns:
        The arrays by name, in the order of their bytes, and the texts of `__metadata__`.

    Raises:
        FileError: It is a pickle, is truncated, or its header does not fit its data.
    """
    if path.suffix in _PICKLES:
        hint = "convert it if you trust its author: safetensors.torch.save_file(torch.load(...))"
        raise FileError(f"{path.name} is a pickle, which runs code when it is read", hint=hint)
    check_regular(path)
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        is_too_short = file_bytes < _LENGTH_BYTES
        if is_too_short or header_bytes > min(file_bytes - _LENGTH_BYTES, LONGEST_BYTES):
            sizes = f"a header of {header_bytes} bytes in a file of {file_bytes}"
            if is_too_short:
                sizes = f"{file_bytes} bytes"
            hint = "it is truncated, or of another format: copy or download it again"
            raise FileError(f"{path.name} is not a whole safetensors file: {sizes}", hint=hint)
        text = file.read(header_bytes)
    header = parse_object(text, f"{path.name}: the header is", partial(_items_once, path.name))
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise FileError(f"{path.name}: __metadata__ is not an object of texts")
    return _entries(path, header, _LENGTH_BYTES + header_bytes, file_bytes), metadata


def parse_object(text: str | bytes, subject: str, pairs_hook: Any = None) -> dict[str, Any]:
    """Parse JSON that has to be an object: `{"a": 1}` -> {"a": 1}.

    Raises FileError with the subject of its sentence: "x.safetensors: the header is", "constants:".
    """
    try:
        data = json.loads(text, object_pairs_hook=pairs_hook)
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        raise FileError(f"{subject} not JSON: {error}") from None
    if not isinstance(data, dict):
        raise FileError(f"{subject} not a JSON object")
    return data


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
    """Make the first bytes of a safetensors file: the header's length in 8 bytes, and the header.

    The header is JSON, such as {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, and
    is filled up with spaces to a multiple of 8 bytes, so that the data behind it is aligned.

    Args:
        entries: Shape and dtype by name, in the order of the data.
        metadata: Texts for `__metadata__`.

    Raises:
        FileError: An array has the name of the metadata, or the header is longer than readers accept.
        DtypeError: The format lacks a dtype.
    """
    if _METADATA in entries:
        hint = "safetensors notes texts under that name"
        raise FileError(f"an array is called {_METADATA!r}", hint=hint)
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    start = 0
    for name, (shape, dtype) in entries.items():
        if dtype not in _SHORT:
            hint = f"it has {', '.join(sorted(_SHORT))}"
            raise DtypeError(f"{name}: safetensors has no {dtype}", hint=hint)
        stop = start + dtypes.n_bytes(shape, dtype)
        header[name] = {"dtype": _SHORT[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    n_spaces = -len(text) % _ALIGNMENT  # up to the next multiple
    text += b" " * n_spaces
    if len(text) > LONGEST_BYTES:
        hint = "smaller shards, with fewer arrays each"
        raise FileError(f"a header of {len(text)} bytes", hint=hint)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _items_once(file: str, key_values: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of an object in a header. Raises FileError if it has a key twice."""
    items = dict(key_values)
    if len(items) < len(key_values):
        key, _ = Counter(key for key, _ in key_values).most_common(1)[0]
        raise FileError(f"{file}: the header has {short_repr(key)} twice")
    return items


class Span(NamedTuple):
    """The bytes of an array in the data of a file."""

    start: int
    stop: int
    entry: Entry
    name: str


def _entries(
    path: Path, header: dict[str, Any], data_start: int, file_bytes: int
) -> dict[str, Entry]:
    """Read the arrays of a parsed header, and check that they fill the data of the file exactly.

    Gaps, overlaps and bytes that belong to no array are refused: the format forbids them, since
    they could hide other content.

    Args:
        path: The file, for errors.
        header: The parsed JSON without the metadata; it may hold anything.
        data_start: Where the data begins in the file, behind the header.
        file_bytes: The length of the file.
    """
    spans = []
    for name, entry in header.items():
        try:
            spans.append(_read_span(name, entry, data_start, file_bytes))
        except FileError as error:
            hint = "the header and the data do not fit: copy or download the file again"
            raise FileError(f"{path.name}: {name}: {error.reason}", hint=hint) from None
    spans.sort(key=lambda span: (span.start, span.stop))
    stop = 0
    for span in spans:
        if span.start != stop:
            fault = "overlap" if span.start < stop else "leave a gap"
            raise FileError(
                f"{path.name}: the bytes of {span.name}, from {span.start}, {fault}: others end at {stop}"
            )
        stop = span.stop
    data_bytes = file_bytes - data_start
    if stop != data_bytes:
        raise FileError(f"{path.name}: arrays of {stop} bytes in a file with {data_bytes}")
    return {span.name: span.entry for span in spans}


def _read_span(name: str, entry: Any, data_start: int, file_bytes: int) -> Span:
    """Check one array's entry in a header, and find its place in the file.

    The entry may hold anything, for files come from anywhere. {"dtype": "F32", "shape": [2],
    "data_offsets": [0, 8]} gives bytes 0 to 8 of the data, as float32 of shape (2,). The offsets
    count from `data_start`, where the data begins in the file.
    """
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FileError("an array has dtype, shape and data_offsets, and nothing else")
    short_dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(short_dtype, str) or short_dtype not in _LONG:
        raise FileError(f"unknown dtype {short_repr(short_dtype)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise FileError(f"shape {short_repr(shape)} at {short_repr(offsets)}")
    dtype = _LONG[short_dtype]
    start, stop = offsets
    n_bytes = dtypes.n_bytes(shape, dtype)
    if stop - start != n_bytes or data_start + stop > file_bytes:
        span_text = f"{offsets} of {file_bytes - data_start}"
        raise FileError(f"{n_bytes} bytes of shape {tuple(shape)} at {span_text}")
    return Span(start, stop, Entry(tuple(shape), dtype, data_start + start), name)


def _are_counts(values: Any) -> bool:
    """Return whether this is a list of whole numbers from 0 on; in JSON, true is no number."""
    if not isinstance(values, list):
        return False
    return all(type(n) is int and n >= 0 for n in values)
