"""`open_checkpoint`: a safetensors file, or a folder of them, mapped into memory as a checkpoint.

A save may replace a folder's files at any time: readers see the old checkpoint or the new one.
"""

from __future__ import annotations

import mmap
import os
import pkgutil
import re
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard import dtypes
from xshard.errors import XshardError, with_path
from xshard.layout import Layout, Mesh
from xshard.notation.maps import maps_in
from xshard.signatures import short_repr
from xshard.state.files.checkpoint import Box, Checkpoint
from xshard.state.files.header import (
    Entry,
    FileError,
    check_folder,
    check_regular,
    parse_object,
    read_header,
)
from xshard.state.names import names_from_json

CheckpointLike = str | Path | Checkpoint  # its file or folder, or itself
INDEX = "model.safetensors.index.json"
OURS = re.compile(r"model-[0-9a-f]{8}-\d+-of-\d+\.safetensors")  # files of a save
MAX_TRIES = 50  # to read a folder whose files saves replace meanwhile
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
AllOrNone = Callable[[Callable[[], Any]], list[Any]]  # see `open_on_all`
KEY = "xshard"  # of xshard's own metadata, in files and in the index


class System(NamedTuple):
    """Another system's checkpoints: the extra that installs its reader, and where the reader is."""

    extra: str
    reader: str


_ORBAX = System("orbax", "jax_bridge.state.orbax:open_orbax")
# A file in each of their folders -> the system. Readers are named by text: this package imports no bridge.
_SYSTEMS = {
    ".metadata": System("torch", "torch_bridge.state.dcp:open_dcp"),
    "_METADATA": _ORBAX,
    "_CHECKPOINT_METADATA": _ORBAX,
}


class Mapped(NamedTuple):
    """An array in a file that is mapped into memory.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype.
        mapped: The array in the memory map.
        file: The file's descriptor.
        start: The offset of its bytes in the file.
        file_name: The file's name, for errors.
    """

    shape: tuple[int, ...]
    dtype: str
    mapped: NDArray[Any]
    file: int
    start: int
    file_name: str

    def read(self, box: Box, out: NDArray[Any]) -> None:
        """Read a region of the array, as slices of its first dims, from the file into `out`."""
        index: Any = (*box, ...)
        region = self.mapped[index]
        if not (region.flags.c_contiguous and out.flags.c_contiguous):
            self._check_end(self.start + self.mapped.nbytes)
            # Copy from the mapped file: many small reads would take two to eight times as long. A
            # file that has become shorter is refused first, since its missing pages end the
            # process.
            out[...] = region
            return
        # Mapping the pages of a file takes as long as copying them; one contiguous read avoids it.
        offset = self.start + region.ctypes.data - self.mapped.ctypes.data
        remaining = out.reshape(-1).view(np.uint8)
        while remaining.size:
            n_read = os.preadv(self.file, [remaining.data], offset)
            if n_read == 0:  # the file has ended: this raises
                self._check_end(offset + 1)
            remaining = remaining[n_read:]
            offset += n_read

    def _check_end(self, end: int) -> None:
        """Raise FileError if the file has become shorter: reading a page behind its end kills the process."""
        size = os.fstat(self.file).st_size
        if size < end:
            raise FileError(f"{self.file_name} ends at byte {size}, and did not when it was opened")


def open_checkpoint(path: str | Path, *, links: bool = False) -> Checkpoint:
    """Open a checkpoint: a safetensors file, or a folder of them. Only the headers are read yet.

    Folders of torch's DCP and of orbax are read by their own libraries.

    Args:
        path: The file or folder.
        links: Allow files that are symlinks out of the folder, such as in the cache of Hugging Face's hub.

    Returns:
        The checkpoint: a mapping of names to arrays that are read when you ask for them.

    Raises:
        FileError: With the file and the array: it is a pickle, is truncated, has a header that does not fit
            the data, an index that names other arrays, or files outside of the folder.
    """
    path = Path(path)
    system = _system_of(path)
    try:
        if system is not None:
            check_folder(path)
            opened: Checkpoint = pkgutil.resolve_name(system.reader)(path)
            return opened
        contents = _read_headers(path, links)
    except XshardError:
        raise
    except ImportError as error:
        extra = system.extra if system else error.name
        hint = f"pip install 'xshard[{extra}]'"
        raise FileError(f"{path} needs {extra}: {error}", hint=hint) from None
    # RuntimeError is raised for links in a loop, ValueError for a path with a NUL in it.
    except (OSError, RuntimeError, ValueError) as error:
        place = getattr(error, "filename", None) or path
        why = getattr(error, "strerror", None) or error
        raise FileError(f"{place}: {why}") from error
    try:
        return _checkpoint_of(contents)
    except XshardError as error:
        raise with_path(error, str(path)) from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise FileError(f"{path}: malformed metadata: {error}") from None


def _system_of(path: Path) -> System | None:
    """Return the other system that wrote a folder, if one did."""
    for name, system in _SYSTEMS.items():
        if (path / name).exists():
            return system
    return None


def open_on_all(path: CheckpointLike, all_or_none: AllOrNone) -> Checkpoint:
    """Open a checkpoint in several processes: the same one in all, also while a save replaces it.

    Args:
        path: As for `open_checkpoint`, or what it returned in each process.
        all_or_none: Calls a function in all processes -> the results of all; raises in all if one
            fails.

    Raises:
        FileError: As `open_checkpoint` does, or processes have opened different checkpoints.
    """
    opened: list[Checkpoint] = []

    def open_here() -> int:
        """Open the checkpoint, and return a checksum of its files' names: no two saves have the same."""
        opened[:] = [path if isinstance(path, Checkpoint) else open_checkpoint(path)]
        return zlib.crc32(repr(opened[0].places).encode())

    for _ in range(MAX_TRIES):
        if len(set(all_or_none(open_here))) == 1:
            return opened[0]
    raise FileError(
        "processes have opened different checkpoints", hint="open it again after the save"
    )


class Contents(NamedTuple):
    """What the headers of all files of a checkpoint say.

    Attributes:
        arrays: The arrays by name.
        notes: xshard's own metadata, of every file and then of the index.
    """

    arrays: dict[str, Mapped]
    notes: list[Any]

    def add(self, file: Path) -> None:
        """Read the header of one more file."""
        entries, metadata = read_header(file)
        mapped = _map_arrays(file, entries)
        for name in mapped:
            if name in self.arrays:
                raise FileError(f"{name} is in {self.arrays[name].file_name} and in {file.name}")
        self.arrays.update(mapped)
        self.notes.append(parse_object(metadata.get(KEY, "{}"), f"{file.name}:"))


def _read_headers(path: Path, links: bool, most_tries: int = MAX_TRIES) -> Contents:
    """Read the headers of a safetensors file, or of all such files of a folder; no data is read.

    A folder's index has to name the same arrays in the same files. `links` allows files that are
    links out of the folder.
    """
    files, index = _files_of(path)
    contents = Contents({}, [])
    try:
        for file in files:
            if not links and not file.resolve().is_relative_to(path.resolve()):
                hint = "links=True allows that, if you trust the author of the folder"
                reason = f"{file.name} is a link out of the folder, to {file.resolve()}"
                raise FileError(reason, hint=hint)
            contents.add(file)
    except (FileNotFoundError, FileError):
        # A save replaces the index, and then removes the files that the old one names.
        if most_tries == 1 or _files_of(path)[0] == files:
            raise
        return _read_headers(path, links, most_tries - 1)
    if index is not None:
        _check_index(index["weight_map"], contents.arrays)
        contents.notes.append(index.get("metadata", {}).get(KEY, {}))
    return contents


def _check_index(weight_map: Mapping[str, str], arrays: Mapping[str, Mapped]) -> None:
    """Raise FileError unless the files have exactly the arrays that the index names."""
    file_of_array = {name: array.file_name for name, array in arrays.items()}
    for name in (*weight_map, *file_of_array):
        if weight_map.get(name) != file_of_array.get(name):
            raise FileError(
                f"{name} is in {file_of_array.get(name)}, and the index says {weight_map.get(name)}"
            )


def verify(checkpoint: Checkpoint, part: int = 0, of: int = 1) -> int:
    """Compare the stored values with the checksums that were saved beside them.

    A checksum is of a box: the rows, columns, ... of an array that one process wrote. Several
    processes can share the work: number 1 of 4 passes `part=1, of=4`, and checks boxes 1, 5, 9, ...

    Args:
        checkpoint: The checkpoint.
        part: The number of this share of the work: 0, 1, ... up to `of` - 1.
        of: In how many shares the work is divided.

    Returns:
        The number of boxes with a checksum, in all shares.

    Raises:
        FileError: For the first box that differs.
    """
    boxes = [(name, *box) for name, boxes in checkpoint.sums.items() for box in boxes]
    for name, box, expected in boxes[part::of]:
        actual = checksum(checkpoint.read(name, box))
        if actual != expected:
            array_text = f"{checkpoint.places.get(name, '')}: {name}"
            hint = "the file was changed after it was saved: copy or download it again"
            raise FileError(
                f"{array_text}: wrong checksum {actual:08x}, not {expected:08x}", hint=hint
            )
    return len(boxes)


def checksum(array: NDArray[Any]) -> int:
    """Compute the CRC-32 of an array's rows: it detects accidents, not attacks, at 6 GB/s (SHA-256: 1.8)."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_index(path: Path) -> dict[str, Any]:
    """Read and check the index of a folder of safetensors files, which says where each array is.

    Such as {"weight_map": {"w": "model-1.safetensors"}, "metadata": {...}}. Files have to be beside
    the index, since an index from elsewhere could name any file of this machine.

    Raises:
        FileError: It is malformed, or names a file outside of the folder.
    """
    check_regular(path)
    index = parse_object(path.read_text(errors="replace"), f"{path.name}:")
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise FileError(
            f"{path.name}: weight_map must map texts to texts", hint="arrays to their files"
        )
    for name, file in files.items():
        if not _is_plain_name(file):
            file_text = short_repr(file)
            reason = f"{path.name}: {name}: {file_text} is not a safetensors file of this folder"
            raise FileError(reason, hint="the index has names of files beside it, without a folder")
    if not isinstance(index.get("metadata", {}), dict):
        raise FileError(f"{path.name}: metadata is not an object")
    return index


def _is_plain_name(file: str) -> bool:
    """Return whether text names a safetensors file without a folder, on any system."""
    has_folder = os.path.basename(file) != file or "\\" in file
    return file.endswith(".safetensors") and not has_folder and "\0" not in file


def _files_of(folder: Path) -> tuple[list[Path], dict[str, Any] | None]:
    """Find the safetensors files of a folder: those that its index names, or all without an index.

    A file is its own only one. Returns the files, and the parsed index or None.
    """
    if not folder.is_dir():
        return [folder], None
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        names = ", ".join(path.name for path in indexes)
        raise FileError(f"{folder} has {len(indexes)} indexes: {names}")
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
    n_files: Counter[tuple[str, str]] = Counter()  # by what they have in common: start and total
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            n_files[match[1], match[3]] += 1
    for (start, n_expected), n_present in n_files.items():
        # Our own saves write an index last: without it the save did not end.
        is_ours = OURS.fullmatch(f"{start}-1-of-{n_expected}.safetensors")
        if n_present != int(n_expected) or is_ours:
            hint = "a save that did not end, or a copy without all files and their index"
            reason = f"{folder} has {n_present} files {start}-...-of-{n_expected}, and no index"
            raise FileError(reason, hint=hint)


def _map_arrays(path: Path, entries: Mapping[str, Entry]) -> dict[str, Mapped]:
    """Map a file into memory -> its arrays by name."""
    arrays = {}
    file, memory = map_file(path)
    for name, (shape, dtype, start) in entries.items():
        try:
            mapped = np.ndarray(shape, dtypes.carrier(dtype), memory, start)
        except (ValueError, OverflowError) as error:
            raise FileError(f"{path.name}: {name}: no array has shape {shape}: {error}") from None
        arrays[name] = Mapped(shape, dtype, mapped, file, start, path.name)
    return arrays


def map_file(path: Path) -> tuple[int, mmap.mmap]:
    """Open a file and map it into memory; the file is open as long as the map."""
    file = os.open(path, os.O_RDONLY)
    memory = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    weakref.finalize(memory, os.close, file)
    return file, memory


def _checkpoint_of(contents: Contents) -> Checkpoint:
    """Make a checkpoint of the arrays of files, with what xshard noted in the files' metadata.

    Each file has a note, and the index one: a dict, empty if another program wrote the file. Notes
    have the layouts and checksums ("sums") of arrays by name, constants (values that are no
    arrays), and the mesh and the renaming ("names") of the program that saved.
    """
    layouts = {}
    mesh = None
    names = None
    constants = {}
    sums = {}
    for note in contents.notes:
        # `Layout.parse` finds maps of rows, as in "n/by(x,cells@0123456789abcdef)", among those that
        # are alive in this process. This variable keeps them alive until their layouts do.
        _maps = maps_in(note)
        for name, text in note.get("layouts", {}).items():
            layouts[name] = Layout.parse(text)
        if note.get("mesh") is not None:
            mesh = Mesh.parse(note["mesh"])
        if note.get("names") is not None:
            names = names_from_json(note["names"])
        constants.update(parse_object(note.get("constants", "{}"), "constants:"))
        for name, boxes in note.get("sums", {}).items():
            shape = contents.arrays[name].shape
            sums[name] = [(_read_box(rows, shape), int(crc)) for rows, crc in boxes]
    file_of_array = {name: array.file_name for name, array in contents.arrays.items()}
    return Checkpoint(contents.arrays, layouts, mesh, names, constants, sums, file_of_array)


def _read_box(rows: list[list[int]], shape: tuple[int, ...]) -> Box:
    """Read a box: [start, stop, step] of every dim."""
    for (start, stop, step), length in zip(rows, shape, strict=True):
        if not 0 <= start < stop <= length or step < 1:
            raise FileError(f"a checksum of {rows} in shape {shape}")
    return tuple(slice(start, stop, step) for start, stop, step in rows)
