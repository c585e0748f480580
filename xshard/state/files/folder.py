"""`open_checkpoint`: a safetensors file, or a folder of them, mapped into memory as a checkpoint."""

from __future__ import annotations

import json
import mmap
import os
import pkgutil
import re
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard import arguments, dtypes
from xshard.errors import XshardError, with_path
from xshard.layout import Layout, Mesh
from xshard.notation.maps import maps_in
from xshard.state.files.checkpoint import Box, Checkpoint
from xshard.state.files.header import Entry, FileError, check_folder, check_regular, read_header
from xshard.state.names import names_from_json

INDEX = "model.safetensors.index.json"
OURS = re.compile(r"model-[0-9a-f]{8}-\d+-of-\d+\.safetensors")  # files of a save
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
KEY = "xshard"  # of xshard's own metadata, in files and in the index
# Other systems: a file in each of their folders -> the extra that installs the reader, and the reader.
_SYSTEMS = {
    ".metadata": ("torch", "torch_bridge.state.dcp:open_dcp"),
    "_METADATA": ("orbax", "jax_bridge.state.orbax:open_orbax"),
    "_CHECKPOINT_METADATA": ("orbax", "jax_bridge.state.orbax:open_orbax"),
}


class Mapped(NamedTuple):
    """An array in a file that is mapped into memory. start: the offset of its bytes in the file."""

    shape: tuple[int, ...]
    dtype: str
    whole: NDArray[Any]
    file: int
    start: int
    place: str

    def read(self, box: Box, out: NDArray[Any]) -> None:
        index: Any = (*box, ...)
        part = self.whole[index]
        start = self.start + part.ctypes.data - self.whole.ctypes.data
        if not (part.flags.c_contiguous and out.flags.c_contiguous):
            self._check_end(self.start + self.whole.nbytes)
            out[...] = part  # many small reads would take two to eight times as long
            return
        # Mapping the pages of a file takes as long as copying them; one contiguous read avoids it.
        left = out.reshape(-1).view(np.uint8)
        while left.size:
            n = os.preadv(self.file, [left.data], start)
            self._check_end(start + (not n))
            left = left[n:]
            start = start + n

    def _check_end(self, end: int) -> None:
        """Raise FileError if the file has become shorter: reading a page behind its end kills the process."""
        if (size := os.fstat(self.file).st_size) < end:
            raise FileError(f"{self.place} ends at byte {size}, and did not when it was opened")


def open_checkpoint(path: str | Path, *, links: bool = False) -> Checkpoint:
    """Open a safetensors file, or a folder of them with or without an index; no data is read yet.

    Folders of torch's DCP and of orbax are read by their own libraries.
    links: allow files that are symlinks out of the folder, as in the cache of Hugging Face's hub.
    Raises FileError, with the file and the array, for pickles, truncated files, headers that do not fit the
    data, an index that names other arrays, and files outside of the folder.
    """
    path = Path(path)
    system = next((system for name, system in _SYSTEMS.items() if (path / name).exists()), None)
    try:
        if system is not None:
            check_folder(path)
            opened: Checkpoint = pkgutil.resolve_name(system[1])(path)
            return opened
        files, index = _shards(path) if path.is_dir() else ([path], None)
        arrays: dict[str, Mapped] = {}
        places: dict[str, str] = {}
        notes: list[Any] = []
        for file in files:
            if not links and path.is_dir() and not file.resolve().is_relative_to(path.resolve()):
                hint = "links=True allows that, if you trust the author of the folder"
                raise FileError(
                    f"{file.name} is a link out of the folder, to {file.resolve()}", hint=hint
                )
            entries, metadata = read_header(file)
            mapped = _mapped(file, entries)
            if twice := [name for name in mapped if name in arrays]:
                raise FileError(f"{twice[0]} is in {places[twice[0]]} and in {file.name}")
            arrays |= mapped
            places |= dict.fromkeys(mapped, file.name)
            notes.append(_json(metadata.get(KEY, "{}"), file.name))
    except XshardError:
        raise
    except ImportError as error:
        extra = system[0] if system else error.name
        raise FileError(
            f"{path} needs {extra}: {error}", hint=f"pip install 'xshard[{extra}]'"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:  # of links in a loop, of a name with a NUL
        place = getattr(error, "filename", None)
        why = getattr(error, "strerror", None)
        raise FileError(f"{place or path}: {why or error}") from error
    if index is not None:
        weight_map = index["weight_map"]
        for name in (*weight_map, *places):
            if weight_map.get(name) != places.get(name):
                raise FileError(
                    f"{name} is in {places.get(name)}, and the index says {weight_map.get(name)}"
                )
        notes.append(index.get("metadata", {}).get(KEY, {}))
    try:
        return Checkpoint(arrays, places=places, **_noted(notes, arrays))
    except XshardError as error:
        raise with_path(error, str(path)) from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise FileError(f"{path}: malformed metadata: {error}") from None


def verify(checkpoint: Checkpoint, part: int = 0, of: int = 1) -> int:
    """Compare the arrays with their saved checksums -> the number of boxes with a checksum.

    part, of: only every of-th box, from this one. Raises FileError for the first that differs.
    """
    boxes = [(name, *each) for name, sums in checkpoint.sums.items() for each in sums]
    for name, box, expected in boxes[part::of]:
        actual = checksum(checkpoint.read(name, box))
        if actual != expected:
            place = f"{checkpoint.places.get(name, '')}: {name}"
            hint = "the file was changed after it was saved: copy or download it again"
            raise FileError(f"{place}: wrong checksum {actual:08x}, not {expected:08x}", hint=hint)
    return len(boxes)


def checksum(array: NDArray[Any]) -> int:
    """CRC-32 of an array's rows: it detects accidents, not attacks, at 6 GB/s (SHA-256: 1.8)."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_index(path: Path) -> dict[str, Any]:
    """The index of a folder, with a `weight_map` of array names to plain file names. Raises FileError."""
    check_regular(path)
    index = _json(path.read_text(errors="replace"), path.name)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise FileError(
            f"{path.name}: weight_map must map texts to texts", hint="arrays to their files"
        )
    for name, file in files.items():
        if (
            os.path.basename(file) != file
            or set("\\\0") & set(file)
            or not file.endswith(".safetensors")
        ):
            reason = f"{path.name}: {name}: {arguments.shown(file)} is not a safetensors file of this folder"
            raise FileError(reason, hint="the index has names of files beside it, without a folder")
    if not isinstance(index.get("metadata", {}), dict):
        raise FileError(f"{path.name}: metadata is not an object")
    return index


def _shards(folder: Path) -> tuple[list[Path], dict[str, Any] | None]:
    """The files of the checkpoint in a folder, and its index."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise FileError(
            f"{folder} has {len(indexes)} indexes: {', '.join(p.name for p in indexes)}"
        )
    if indexes:
        index = read_index(indexes[0])
        return [folder / file for file in dict.fromkeys(index["weight_map"].values())], index
    files = sorted(folder.glob("*.safetensors"))
    _check_complete(folder, [file.name for file in files])
    if not files:
        content = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        hint = "pickles (.bin, .pt) run code when read: convert them if you trust their author; "
        hint += "a folder of DCP has .metadata, one of orbax _METADATA"
        raise FileError(f"no safetensors files in {folder}: it has {content}", hint=hint)
    return files, None


def _check_complete(folder: Path, names: list[str]) -> None:
    """Raise FileError if some of the numbered files, or their index, are missing."""
    matches = filter(None, map(_NUMBERED.fullmatch, names))
    for (start, total), n in Counter(match.group(1, 3) for match in matches).items():
        if n != int(total) or OURS.fullmatch(f"{start}-1-of-{total}.safetensors"):
            hint = "a save that did not end, or a copy without all files and their index"
            raise FileError(
                f"{folder} has {n} files {start}-...-of-{total}, and no index", hint=hint
            )


def _mapped(path: Path, entries: Mapping[str, Entry]) -> dict[str, Mapped]:
    arrays, (file, memory) = {}, map_file(path)
    for name, (shape, dtype, start) in entries.items():
        try:
            whole = np.ndarray(shape, dtypes.carrier(dtype), memory, start)
            arrays[name] = Mapped(shape, dtype, whole, file, start, path.name)
        except (ValueError, OverflowError) as error:
            raise FileError(f"{path.name}: {name}: no array has shape {shape}: {error}") from None
    return arrays


def map_file(path: Path) -> tuple[int, mmap.mmap]:
    """A file and its memory map; the file is open as long as the map."""
    file = os.open(path, os.O_RDONLY)
    memory = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    weakref.finalize(memory, os.close, file)
    return file, memory


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise FileError(f"{where}: not a JSON object")
    return data


def _noted(notes: Iterable[Mapping[str, Any]], arrays: Mapping[str, Mapped]) -> dict[str, Any]:
    """The metadata of all files and of the index -> fields of a checkpoint."""
    layouts: dict[str, Layout] = {}
    fields: dict[str, Any] = {"layouts": layouts, "sums": {}, "constants": {}}
    for note in notes:
        _maps = maps_in(note)  # which the layouts name
        layouts |= {name: Layout.parse(text) for name, text in note.get("layouts", {}).items()}
        if note.get("mesh") is not None:
            fields["mesh"] = Mesh.parse(note["mesh"])
        if note.get("names") is not None:
            fields["names"] = names_from_json(note["names"])
        fields["constants"] |= _json(note.get("constants", "{}"), "constants")
        for name, sums in note.get("sums", {}).items():
            fields["sums"][name] = [
                (_box(rows, arrays[name].shape), int(crc)) for rows, crc in sums
            ]
    return fields


def _box(rows: list[list[int]], shape: tuple[int, ...]) -> Box:
    if any(not 0 <= a < b <= n or step < 1 for (a, b, step), n in zip(rows, shape, strict=True)):
        raise FileError(f"a checksum of {rows} in shape {shape}")
    return tuple(slice(a, b, step) for a, b, step in rows)
