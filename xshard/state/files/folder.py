"""`open_checkpoint`: a safetensors file, or a folder of them, as a checkpoint.

Decides which files of a folder count, what index and metadata say, and which places are refused. Files
are mapped into memory: what is read is copied once, by whoever uses it, and costs no memory of its own.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import weakref
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard import dtypes
from xshard.arguments import shown
from xshard.errors import XshardError, with_path
from xshard.layout import Layout, Mesh
from xshard.state.files.checkpoint import Box, Checkpoint
from xshard.state.files.formats import opened_by_its_system
from xshard.state.files.header import Entry, FileError, check_regular, read_header
from xshard.state.text import names_from_json

INDEX = "model.safetensors.index.json"
OURS = re.compile(r"model-[0-9a-f]{8}-\d+-of-\d+\.safetensors")  # what a save calls its files
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
KEY = "xshard"  # of what is ours, in the metadata of files and of the index


class Mapped(NamedTuple):
    """An array in a file that is mapped into memory, and open as long. start: of its bytes in the file."""

    shape: tuple[int, ...]
    dtype: str
    whole: NDArray[Any]
    file: int
    start: int
    place: str

    def read(self, box: Box, out: NDArray[Any]) -> None:
        at: Any = (*box, ...)
        part = self.whole[at]
        start = self.start + part.ctypes.data - self.whole.ctypes.data
        if not (part.flags.c_contiguous and out.flags.c_contiguous):
            self._check_end(self.start + self.whole.nbytes)
            out[...] = part  # many small reads would take two to eight times as long
            return
        # To be given the pages of the file takes as long as to copy them, and one piece does without.
        left = out.reshape(-1).view(np.uint8)
        while left.size:
            n = os.preadv(self.file, [left.data], start)
            self._check_end(start + (not n))
            left, start = left[n:], start + n

    def _check_end(self, end: int) -> None:
        """Raise FileError where the file is shorter by now: to look at a page behind its end would kill."""
        if (size := os.fstat(self.file).st_size) < end:
            raise FileError(f"{self.place} ends at byte {size}, and did not when it was opened")


def open_checkpoint(path: str | Path, *, links: bool = False) -> Checkpoint:
    """A safetensors file, or a folder of them with or without an index -> its arrays; no data is read yet.

    Folders of torch's DCP and of orbax, too, which are read by their own libraries.
    links: whether files may be symlinks to elsewhere, as in the cache of Hugging Face's hub.
    Raises FileError, with the file and the array, for what is not right: pickles, files that are truncated
    or whose header lies, an index that names other arrays, or files outside of the folder.
    """
    path = Path(path)
    if (others := opened_by_its_system(path)) is not None:
        return others
    try:
        if path.is_dir():
            found, index = _shards(path)
        else:
            found, index = [path], None
        arrays: dict[str, Mapped] = {}
        places: dict[str, str] = {}
        said: list[Any] = []
        for file in found:
            if not links and path.is_dir() and not file.resolve().is_relative_to(path.resolve()):
                raise FileError(
                    f"{file.name} is a link out of the folder, to {file.resolve()}",
                    hint="links=True allows that, where whoever made the folder is trusted",
                )
            entries, metadata = read_header(file)
            for name, array in _mapped(file, entries).items():
                if name in arrays:
                    raise FileError(f"{name} is in {places[name]} and in {file.name}")
                arrays[name], places[name] = array, file.name
            said.append(_json(metadata.get(KEY, "{}"), file.name))
    except OSError as error:
        raise FileError(f"{error.filename or path}: {error.strerror}") from error
    if index is not None:
        _check_index(index, places)
        said.append(index.get("metadata", {}).get(KEY, {}))
    try:
        return Checkpoint(arrays, places=places, **_told(said, arrays))
    except XshardError as error:
        raise with_path(error, str(path)) from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise FileError(f"{path}: malformed metadata: {error}") from None


def verify(checkpoint: Checkpoint, part: int = 0, of: int = 1) -> int:
    """Compare the arrays with the checksums that were written with them; return how many boxes have one.

    part, of: every of-th box alone, from this one. Raises FileError for the first that differs.
    """
    boxes = [(name, *each) for name, sums in checkpoint.sums.items() for each in sums]
    for name, box, expected in boxes[part::of]:
        found = checksum(checkpoint.read(name, box))
        if found != expected:
            raise FileError(
                f"{checkpoint.places.get(name, '')}: {name}: wrong checksum {found:08x}, not {expected:08x}",
                hint="the file was changed after it was saved: copy or download it again",
            )
    return len(boxes)


def checksum(array: NDArray[Any]) -> int:
    """CRC-32 of the bytes of an array in the order of its rows.

    It finds accidents, not malice: at 6 GB/s, where SHA-256 has 1.8 and BLAKE2b 1.2.
    """
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_index(path: Path) -> dict[str, Any]:
    """The index of a folder, with a `weight_map` of array names to plain file names. Raises FileError."""
    check_regular(path)
    index = _json(path.read_text(errors="replace"), path.name)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise FileError(f"{path.name} has no weight_map of texts", hint="the index maps arrays to files")
    for name, file in files.items():
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise FileError(
                f"{path.name}: {name}: {shown(file)} is no safetensors file of this folder",
                hint="the index has names of files beside it, without a folder",
            )
    if not isinstance(index.get("metadata", {}), dict):
        raise FileError(f"{path.name}: metadata is no object")
    return index


def _shards(folder: Path) -> tuple[list[Path], dict[str, Any] | None]:
    """The files of a folder that count, and its index."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise FileError(f"{folder} has {len(indexes)} indexes: {', '.join(p.name for p in indexes)}")
    if indexes:
        index = read_index(indexes[0])
        return [folder / file for file in dict.fromkeys(index["weight_map"].values())], index
    found = sorted(folder.glob("*.safetensors"))
    _check_complete(folder, [file.name for file in found])
    if not found:
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise FileError(
            f"no safetensors files in {folder}: it has {there}",
            hint="pickles (.bin, .pt) run code when read: convert them where their author is trusted; "
            "a folder of DCP has .metadata, one of orbax _METADATA",
        )
    return found, None


def _check_complete(folder: Path, names: list[str]) -> None:
    """Raise FileError for files that count themselves, where some are missing or have lost their index."""
    sets = [match.group(1, 3) for name in names if (match := _NUMBERED.fullmatch(name)) is not None]
    for start, total in sets:
        if sets.count((start, total)) != int(total) or OURS.fullmatch(f"{start}-1-of-{total}.safetensors"):
            raise FileError(
                f"{folder} has {sets.count((start, total))} files {start}-...-of-{total}, and no index",
                hint="a save that did not end, or a copy without all files and their index",
            )


def _mapped(path: Path, entries: Mapping[str, Entry]) -> dict[str, Mapped]:
    found = {}
    file, memory = map_file(path)
    for name, (shape, dtype, start) in entries.items():
        try:
            whole = np.ndarray(shape, dtypes.carrier(dtype), memory, start)
            found[name] = Mapped(shape, dtype, whole, file, start, path.name)
        except (ValueError, OverflowError) as error:
            raise FileError(f"{path.name}: {name}: no array has shape {shape}: {error}") from None
    return found


def map_file(path: Path) -> tuple[int, mmap.mmap]:
    """A file, open as long as its map, which costs no memory of its own."""
    file = os.open(path, os.O_RDONLY)
    memory = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    weakref.finalize(memory, os.close, file)
    return file, memory


def _check_index(index: Mapping[str, Any], places: Mapping[str, str]) -> None:
    said = index["weight_map"]
    for name in (*said, *places):
        if said.get(name) != places.get(name):
            raise FileError(f"{name} is in {places.get(name)}, and the index says {said.get(name)}")


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: no JSON: {error}") from None
    if not isinstance(found, dict):
        raise FileError(f"{where}: no JSON object")
    return found


def _told(said: Iterable[Mapping[str, Any]], arrays: Mapping[str, Mapped]) -> dict[str, Any]:
    """The metadata of all files and the index -> what it says of the arrays there are."""
    layouts: dict[str, Layout] = {}
    found: dict[str, Any] = {"layouts": layouts, "sums": {}}
    for each in said:
        layouts |= {name: Layout.parse(text) for name, text in each.get("layouts", {}).items()}
        if each.get("mesh") is not None:
            found["mesh"] = Mesh.parse(each["mesh"])
        if each.get("names") is not None:
            found["names"] = names_from_json(each["names"])
        found["constants"] = found.get("constants", {}) | _json(each.get("constants", "{}"), "constants")
        for name, sums in each.get("sums", {}).items():
            found["sums"][name] = [(_box(box, arrays[name].shape), int(crc)) for box, crc in sums]
    return found


def _box(ends: list[list[int]], shape: tuple[int, ...]) -> Box:
    if any(not 0 <= a < b <= n or step < 1 for (a, b, step), n in zip(ends, shape, strict=True)):
        raise FileError(f"a checksum of {ends} in shape {shape}")
    return tuple(slice(a, b, step) for a, b, step in ends)
