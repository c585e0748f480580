"""A save: its plan, which is equal in all processes, and its files on the disk. Every element is written
once; processes write into the same files at once. The files are in a folder of their own until all are
written, and the index comes last: a killed save leaves the old checkpoint, and a folder that the next save
removes.
"""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import secrets
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard import arguments, dtypes, trees
from xshard.errors import XshardError, located
from xshard.layout import Sharding
from xshard.notation.maps import with_values
from xshard.state.files.checkpoint import Box, BoxPair, box_pairs, check_whole
from xshard.state.files.folder import INDEX, KEY, OURS, checksum, read_index
from xshard.state.files.header import FileError, write_header
from xshard.state.names import SAME, Names, names_to_json
from xshard.state.relations import PartMapping, TargetArray

BlockOf = Callable[[str, int, str], NDArray[Any]]  # name, device, dtype -> carrier of the block
Report = Callable[[int], object]  # called with the bytes of each box
Sums = dict[str, list[list[Any]]]  # by array: [[start, stop, step] per dim, checksum] of every box
_UNFINISHED = ".saving-"
_UNCHANGED = "nothing was changed: the checkpoint that was there is whole"
_reserve = getattr(
    os, "posix_fallocate", lambda file, at, n: os.ftruncate(file, n)
)  # macOS has none


class Source(NamedTuple):
    """An array of the program: its sharding, its dtype, and the process of every device of its mesh."""

    sharding: Sharding
    dtype: str
    processes: Sequence[int]


class ShardFile(NamedTuple):
    """A file: its name, its header, and the offset of every array's bytes."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    n_bytes: int


@dataclass(frozen=True, eq=False)
class Saving:
    """The plan of a save. sources: the arrays of the program. arrays: the stored arrays."""

    sources: Mapping[str, Source]
    arrays: Mapping[str, TargetArray]
    shards: tuple[ShardFile, ...]
    metadata: Mapping[str, Any]
    _owned: Mapping[int, list[tuple[str, int]]] = field(repr=False)

    def writes(self, process: int) -> Iterator[tuple[str, int, tuple[BoxPair, ...]]]:
        """The blocks that one process writes: name, device, and the boxes of stored arrays that they fill."""
        for name, device in self._owned.get(process, ()):
            yield (
                name,
                device,
                tuple(box_pairs(self._pieces[name], self.sources[name].sharding, device)),
            )

    @cached_property
    def _pieces(self) -> dict[str, list[PartMapping]]:
        """The parts of every source in stored arrays."""
        pieces: dict[str, list[PartMapping]] = {name: [] for name in self.sources}
        for piece in (piece for array in self.arrays.values() for piece in array.pieces):
            pieces[piece.src.name].append(piece.inverse)
        return pieces

    @cached_property
    def digest(self) -> str:
        """A checksum of the plan, equal on processes that plan the same save."""
        content = [*((s.name, s.header) for s in self.shards), self.metadata, self._owned]
        return f"{zlib.crc32(repr(content).encode()):08x}"


def plan_save(
    sources: Mapping[str, Source],
    names: Names | None = None,
    *,
    shard_bytes: int | str | None = "5GiB",
    constants: Mapping[str, Any] | None = None,
) -> Saving:
    """Plan a save. shard_bytes: the most bytes of a file, unless one array is larger. constants: the other
    leaves, as JSON. Raises PlanError for sums and halos, DtypeError for dtypes that safetensors lacks.
    """
    for name, source in sources.items():
        with located(name):
            check_whole(source.sharding)
    shapes = {name: source.sharding.shape for name, source in sources.items()}
    arrays = (names or SAME).resolve(shapes, {n: s.dtype for n, s in sources.items()})
    meshes = {
        str(source.sharding.mesh) for source in sources.values() if source.sharding.layout.axes
    }
    mesh = min(meshes) if len(meshes) == 1 else None
    common = {"mesh": mesh, "names": None if names is None else names_to_json(names)}
    sizes = {name: dtypes.n_bytes(array.shape, array.dtype) for name, array in arrays.items()}
    in_files = trees.groups(
        list(sizes.values()), arguments.limit_of(shard_bytes, "shard_bytes")
    ) or [[]]
    files: list[ShardFile] = []
    for i, numbers in enumerate(in_files, 1):
        group = [list(sizes)[n] for n in numbers]
        group.sort(
            key=lambda name: -dtypes.itemsize(arrays[name].dtype)
        )  # so that every array is aligned
        layouts = {
            name: text for name in group if mesh and (text := _layout(arrays[name], sources))
        }
        noted = with_values(
            {key: note for key, note in {**common, "layouts": layouts}.items() if note}
        )
        entries = {name: arrays[name][:2] for name in group}
        header = write_header(entries, {"format": "pt", KEY: json.dumps(noted)})
        *starts, size = accumulate((sizes[name] for name in group), initial=len(header))
        offsets = dict(zip(group, starts, strict=True))
        files.append(ShardFile(f"{i:05}-of-{len(in_files):05}.safetensors", header, offsets, size))
    try:
        text = json.dumps(dict(constants or {}))  # in the JSON of the index, which has no infinity
    except TypeError as error:
        raise XshardError(
            f"constants: {error}", hint="numbers and texts, in lists and dicts"
        ) from None
    return Saving(dict(sources), arrays, tuple(files), {"constants": text}, _owners(sources))


def _owners(sources: Mapping[str, Source]) -> dict[int, list[tuple[str, int]]]:
    """The blocks that each process writes: a block goes to the holder with the fewest bytes so far."""
    owned: dict[int, list[tuple[str, int]]] = {}
    written = Counter[int]()
    for name, (sharding, dtype, processes) in sources.items():
        mesh = sharding.mesh
        for holders in mesh.groups([a for a in mesh.axes if a not in sharding.layout.cut_axes]):
            device = min(holders, key=lambda d: written[processes[d]])
            owned.setdefault(processes[device], []).append((name, device))
            written[processes[device]] += dtypes.n_bytes(sharding.local_shape(device), dtype)
    return owned


def _layout(array: TargetArray, sources: Mapping[str, Source]) -> str | None:
    """The layout of a stored array that is one sharded source with its dims in some order, else None."""
    src, dst, order = array.pieces[0]
    if len(array.pieces) > 1 or src.dim is not None or dst.dim is not None:
        return None
    layout = sources[src.name].sharding.layout
    return str(layout.in_order([layout.names[i] for i in order])) if layout.axes else None


def save_blocks(
    saving: Saving,
    path: Path,
    block_of: BlockOf,
    all_or_none: Callable[[Callable[[], Any]], list[Any]] = lambda work: [work()],
    process: int = 0,
    leads: bool = True,
    progress: Report = lambda n_bytes: None,
) -> None:
    """Save from begin to commit; all processes call this, and the first leads. all_or_none: does work in all
    processes -> the result of each; raises in all if one fails.
    """
    with ExitStack() as stack:

        def begun() -> str:
            _locked(path, stack)
            return begin(saving, path)

        token = all_or_none(lambda: begun() if leads else None)[0]
        try:
            written = all_or_none(lambda: write(saving, path, token, process, block_of, progress))
            sums = {
                name: [box for part in written for box in part.get(name, ())]
                for name in saving.arrays
            }
            all_or_none(lambda: commit(saving, path, token, sums) if leads else None)
        except BaseException:
            if leads:
                abort(path, token)
            raise


def begin(saving: Saving, path: Path) -> str:
    """Remove leftovers of killed saves, and reserve the files of a save in a folder -> its token. Raises
    FileError, and leaves nothing: for a full disk, and a file that others would read for the index.
    """
    with _disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        for other in (path / "model.safetensors", *path.glob("*.safetensors.index.json")):
            if other.exists() and other.name != INDEX:
                reason = f"{path} has a {other.name}, which others would read instead of {INDEX}"
                raise FileError(reason, hint="remove it, or save to a folder of its own")
        _sweep(path, _files(path))
        token = secrets.token_hex(4)
        folder = path / f"{_UNFINISHED}{token}"
        try:
            folder.mkdir()
            for shard in saving.shards:
                with (folder / shard.name).open("wb") as file:
                    _reserve(file.fileno(), 0, shard.n_bytes)
                    file.write(shard.header)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return token


def write(
    saving: Saving, path: Path, token: str, process: int, block_of: BlockOf, progress: Report
) -> Sums:
    """Write the blocks of a process -> checksums."""
    sums: Sums = {}
    block_of = functools.lru_cache(1)(block_of)  # one block at a time
    shards = {name: shard for shard in saving.shards for name in shard.starts}
    with _disk_errors(path), ExitStack() as stack:

        @functools.cache
        def opened(shard: str) -> int:
            file = (path / f"{_UNFINISHED}{token}" / shard).open("r+b", buffering=0)
            stack.callback(os.fsync, stack.enter_context(file).fileno())
            return file.fileno()

        for name, device, pairs in saving.writes(process):
            for pair in pairs:
                array = saving.arrays[pair.name]
                shard = shards[pair.name]
                values = np.ascontiguousarray(pair.view(block_of(name, device, array.dtype)))
                _put(opened(shard.name), shard.starts[pair.name], values, pair.box, array.shape)
                rows = [[*s.indices(n)] for s, n in zip(pair.box, array.shape, strict=True)]
                sums.setdefault(pair.name, []).append([rows, checksum(values)])
                progress(values.nbytes)
    return sums


def commit(saving: Saving, path: Path, token: str, sums: Mapping[str, Any]) -> None:
    """Make the written files the checkpoint of the folder, in one step: the index gets its name."""
    folder = path / f"{_UNFINISHED}{token}"
    with _disk_errors(path):
        old = _files(path)
        final = {shard.name: f"model-{token}-{shard.name}" for shard in saving.shards}
        weight_map = {name: final[shard.name] for shard in saving.shards for name in shard.starts}
        total = sum(shard.n_bytes - len(shard.header) for shard in saving.shards)
        metadata = {"total_size": total, KEY: {**saving.metadata, "sums": sums}}
        with (folder / INDEX).open("w") as file:
            json.dump({"metadata": metadata, "weight_map": weight_map}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        for shard in saving.shards:
            (folder / shard.name).rename(path / final[shard.name])
        _sync(path)
        (folder / INDEX).rename(path / INDEX)
    with _disk_errors(
        path, "the new checkpoint is in its place, and might not outlast a power failure"
    ):
        _sync(path)
        for name in old - set(weight_map.values()):
            (path / name).unlink(missing_ok=True)
        _sweep(path, set(weight_map.values()))


def abort(path: Path, token: str) -> None:
    """Remove the files of a save, unless it is the checkpoint of the folder by now."""
    shutil.rmtree(path / f"{_UNFINISHED}{token}", ignore_errors=True)
    for file in set(path.glob(f"model-{token}-*")) - {path / name for name in _files(path)}:
        file.unlink(missing_ok=True)


def _locked(path: Path, stack: ExitStack) -> None:
    """Make and lock a folder: another save would remove the files of this one as leftovers."""
    with _disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        stack.callback(os.close, folder := os.open(path, os.O_RDONLY))
    with suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except BlockingIOError:
            hint = "one save at a time into a folder; this one has changed nothing"
            raise FileError(f"{path}: another save is writing into it", hint=hint) from None


def _put(file: int, start: int, array: NDArray[Any], box: Box, shape: tuple[int, ...]) -> None:
    """Write a box of an array of `shape` whose bytes begin at `start`, a contiguous range at a time."""
    rows = [s.indices(n) for s, n in zip(box, shape, strict=True)]
    inner = len(shape)  # dims from here on are whole; the one before may be a part without steps
    while inner and rows[inner - 1] == (0, shape[inner - 1], 1):
        inner -= 1
    outer = inner - 1 if inner and rows[inner - 1][2] == 1 else inner
    offsets = np.full((), start, np.int64)
    for d, (first, stop, step) in enumerate(rows[:inner]):
        indices = np.arange(first, stop, step) if d < outer else first
        offsets = np.add.outer(
            offsets, np.multiply(indices, array.itemsize * math.prod(shape[d + 1 :]))
        )
    data = array.reshape(-1).view(np.uint8).data
    n = len(data) // max(offsets.size, 1)
    for i, offset in enumerate(offsets.ravel().tolist()):
        left = data[i * n : (i + 1) * n]
        while left:
            done = os.pwrite(file, left, offset)
            left = left[done:]
            offset = offset + done


def _files(path: Path) -> set[str]:
    """The files of the checkpoint in a folder."""
    index = path / INDEX
    return set(read_index(index)["weight_map"].values()) if index.exists() else set()


def _sweep(path: Path, keep: set[str]) -> None:
    """Remove leftovers of killed saves."""
    for file in path.iterdir():
        if file.name.startswith(_UNFINISHED):
            shutil.rmtree(file, ignore_errors=True)
        elif OURS.fullmatch(file.name) and file.name not in keep:
            file.unlink()


def _sync(folder: Path) -> None:
    """Write the names of the folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(path: Path, hint: str = _UNCHANGED) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"{error.filename or path}: {error.strerror}", hint=hint) from error
