"""A save: its plan, which is equal in all processes, and its files on the disk.

Every element is written once; processes write into the same files at once. The files are in a folder of
their own until all are written, and the index comes last: a killed save leaves the old checkpoint, and a
folder that the next save removes.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard import arguments, dtypes, trees
from xshard.errors import XshardError, located
from xshard.layout import Sharding
from xshard.layout.sub_axes import root_of
from xshard.notation.maps import with_values
from xshard.signatures import Bytes
from xshard.state.files.boxes import CommonBox, check_whole, common_boxes
from xshard.state.files.checkpoint import Box
from xshard.state.files.folder import INDEX, KEY, OURS, AllOrNone, checksum, read_index
from xshard.state.files.header import FileError, write_header
from xshard.state.files.runs import remove_old
from xshard.state.names import SAME, Names, names_to_json
from xshard.state.parts import PartMapping, TargetArray

BlockOf = Callable[[str, int, str], NDArray[Any]]  # name, device, dtype -> carrier of the block
Report = Callable[[int], object]  # called with the bytes of each box
Sums = dict[str, list[list[Any]]]  # by array: [[start, stop, step] per dim, checksum] of every box
# The errors of saves that have failed beside the program, by their tokens, until somebody is told.
untold: dict[str, FileError] = {}
_UNFINISHED = ".saving-"  # folders of saves that have not ended begin so
_UNCHANGED = "nothing was changed: the checkpoint that was there is whole"
_NONE = "no checkpoint was there, and none is now"


def _truncate(file: int, offset: int, n_bytes: int) -> None:
    """Set a file's size where `posix_fallocate` is missing: on macOS."""
    os.ftruncate(file, n_bytes)


_reserve = getattr(os, "posix_fallocate", _truncate)


class Source(NamedTuple):
    """An array of the program: its sharding, its dtype, and the process of every device of its mesh."""

    sharding: Sharding
    dtype: str
    processes: Sequence[int]


class ShardFile(NamedTuple):
    """A file: its name, its header, the offset of every array's bytes, and its size."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    n_bytes: int


class SourceBlock(NamedTuple):
    """A block of an array of the program: the array's name, and a device that holds it."""

    name: str
    device: int


class SharedBlock(NamedTuple):
    """A block that several devices hold: one of this process, and the first of them all."""

    name: str
    device: int
    first_device: int


class BlockWrite(NamedTuple):
    """A block to write: the source, the device, and the boxes of stored arrays that the block fills."""

    name: str
    device: int
    boxes: tuple[CommonBox, ...]


@dataclass(frozen=True, eq=False)
class Saving:
    """The plan of a save.

    Attributes:
        sources: The arrays of the program.
        arrays: The stored arrays.
        shards: The files.
        metadata: xshard's own metadata, for the index.
    """

    sources: Mapping[str, Source]
    arrays: Mapping[str, TargetArray]
    shards: tuple[ShardFile, ...]
    metadata: Mapping[str, Any]
    _owned: Mapping[int, list[SourceBlock]] = field(repr=False)  # as `_assign_blocks` returns

    def writes(self, process: int) -> Iterator[BlockWrite]:
        """Yield the blocks that one process writes."""
        for name, device in self._owned.get(process, ()):
            boxes = common_boxes(self._mappings[name], self.sources[name].sharding, device)
            yield BlockWrite(name, device, tuple(boxes))

    def shared_blocks(self, process: int) -> Iterator[SharedBlock]:
        """Yield the blocks of one process that others have, too, as the layouts say."""
        for name, (sharding, _, processes) in self.sources.items():
            for holders in sharding.mesh.groups(_replica_axes(sharding)):
                own_devices = [device for device in holders if processes[device] == process]
                if own_devices and len({processes[device] for device in holders}) > 1:
                    yield SharedBlock(name, device=own_devices[0], first_device=holders[0])

    @cached_property
    def _mappings(self) -> dict[str, list[PartMapping]]:
        """The parts of every source in stored arrays."""
        mappings_by_source: dict[str, list[PartMapping]] = {name: [] for name in self.sources}
        for array in self.arrays.values():
            for mapping in array.pieces:
                mappings_by_source[mapping.src.name].append(mapping.inverse)
        return mappings_by_source

    @cached_property
    def digest(self) -> str:
        """A checksum of the plan, equal on processes that plan the same save."""
        headers = [(shard.name, shard.header) for shard in self.shards]
        content = [*headers, self.metadata, self._owned]
        return f"{zlib.crc32(repr(content).encode()):08x}"


def plan_save(
    sources: Mapping[str, Source],
    names: Names | None = None,
    *,
    shard_bytes: Bytes = "5GiB",
    constants: Mapping[str, Any] | None = None,
) -> Saving:
    """Plan a save as safetensors files: which arrays are in which file, and who writes which block.

    Files are divided by size, as in 00001-of-00002.safetensors. Each block is written by one of
    the processes that hold it, straight to its place in the file. Nothing is written yet.

    Args:
        sources: The arrays of the program by name.
        names: Maps their names to stored names. None: they are the same.
        shard_bytes: The most bytes of a file, unless one array is larger. None: one file.
        constants: The leaves that are no arrays, as JSON.

    Raises:
        PlanError: A block is not a part of its array: sums and halos.
        DtypeError: safetensors lacks a dtype.
        XshardError: A constant has no form in JSON.
    """
    for name, source in sources.items():
        with located(name):
            check_whole(source.sharding)
    shapes = {name: source.sharding.shape for name, source in sources.items()}
    source_dtypes = {name: source.dtype for name, source in sources.items()}
    arrays = (names or SAME).resolve(shapes, source_dtypes)
    groups = _group_arrays(arrays, arguments.limit_of(shard_bytes, "shard_bytes"))
    files = _plan_files(groups, sources, names)
    metadata = {"constants": _constants_to_json(constants or {})}
    return Saving(dict(sources), arrays, files, metadata, _assign_blocks(sources))


def _plan_files(
    groups: Sequence[Mapping[str, TargetArray]], sources: Mapping[str, Source], names: Names | None
) -> tuple[ShardFile, ...]:
    """Plan a file for each group of arrays; each notes the mesh, the layouts of its arrays, and `names`."""
    mesh = _common_mesh(sources)
    noted_names = None if names is None else names_to_json(names)
    files = []
    for file_number, group in enumerate(groups, 1):
        # Layouts name axes of the mesh: without one mesh of all arrays they would say nothing.
        layouts = {} if mesh is None else _layouts(group, sources)
        note = {"mesh": mesh, "names": noted_names, "layouts": layouts}
        files.append(_plan_file(f"{file_number:05}-of-{len(groups):05}.safetensors", group, note))
    return tuple(files)


def _constants_to_json(constants: Mapping[str, Any]) -> str:
    """Return the leaves that are no arrays as text.

    As text inside the JSON of the index, because JSON itself has no infinity.
    """
    try:
        return json.dumps(dict(constants))
    except TypeError as error:
        hint = "numbers and texts, in lists and dicts"
        raise XshardError(f"constants: {error}", hint=hint) from None


def _group_arrays(
    arrays: Mapping[str, TargetArray], limit_bytes: int | None
) -> list[dict[str, TargetArray]]:
    """Divide the arrays into files of at most `limit_bytes`, in the order of their names as given.

    Returns one dict of arrays for each file, in the order in which their data stands in the file.
    An array that is larger than the limit has a file of its own. Without arrays, there is one empty
    file.
    """
    names = list(arrays)
    sizes = [dtypes.n_bytes(array.shape, array.dtype) for array in arrays.values()]
    files = []
    # A tree without arrays has one file, too: it holds the metadata.
    for group in trees.group_by_bytes(sizes, limit_bytes) or [[]]:
        group_names = [names[i] for i in group]
        # The largest elements first, so that every array is aligned. The sort is stable.
        group_names.sort(key=lambda name: -dtypes.itemsize(arrays[name].dtype))
        files.append({name: arrays[name] for name in group_names})
    return files


def _common_mesh(sources: Mapping[str, Source]) -> str | None:
    """Return the mesh of all arrays that are sharded, as text; None if there are several, or none."""
    meshes = {
        str(root_of(source.sharding.mesh))
        for source in sources.values()
        if source.sharding.layout.axes
    }
    if len(meshes) != 1:
        return None
    return meshes.pop()


def _plan_file(name: str, arrays: Mapping[str, TargetArray], note: Mapping[str, Any]) -> ShardFile:
    """Plan one file: the offsets of its arrays, and its header with a note of ours."""
    noted = with_values({key: value for key, value in note.items() if value})
    entries = {array_name: (array.shape, array.dtype) for array_name, array in arrays.items()}
    header = write_header(entries, {"format": "pt", KEY: json.dumps(noted)})
    starts = {}
    offset = len(header)
    for array_name, array in arrays.items():
        starts[array_name] = offset
        offset += dtypes.n_bytes(array.shape, array.dtype)
    return ShardFile(name, header, starts, offset)


def _assign_blocks(sources: Mapping[str, Source]) -> dict[int, list[SourceBlock]]:
    """Decide which process writes each block, so that all write about as many bytes.

    Devices along axes that shard nothing hold the same block. Of their processes, the one with the
    fewest bytes so far writes it. Arrays a and b, whole on two processes -> {0: [("a", 0)],
    1: [("b", 1)]}.

    Returns:
        The blocks that each process writes, by process.
    """
    assigned: dict[int, list[SourceBlock]] = {}
    written_bytes = Counter[int]()
    for name, (sharding, dtype, processes) in sources.items():
        for holders in sharding.mesh.groups(_replica_axes(sharding)):
            device = min(holders, key=lambda holder: written_bytes[processes[holder]])
            process = processes[device]
            assigned.setdefault(process, []).append(SourceBlock(name, device))
            written_bytes[process] += dtypes.n_bytes(sharding.local_shape(device), dtype)
    return assigned


def _replica_axes(sharding: Sharding) -> list[str]:
    """Return the axes along which devices have the same block."""
    return [axis for axis in sharding.mesh.axes if axis not in sharding.layout.sharding_axes]


def differing_replicas(task: SaveTask) -> list[str]:
    """Compare blocks that several processes have, of which one will be written, by their checksums.

    All processes call this, before anything is written.

    Returns:
        The sources whose replicas differ, equal in all processes.
    """

    def sums_here() -> list[tuple[str, int, int]]:
        """Return (source, first device with the block, checksum) for each shared block."""
        sums = []
        for shared in task.plan.shared_blocks(task.writers.own):
            dtype = task.plan.sources[shared.name].dtype
            block = task.block_of(shared.name, shared.device, dtype)
            sums.append((shared.name, shared.first_device, checksum(block)))
        return sums

    first_sums: dict[tuple[str, int], int] = {}
    differing: dict[str, None] = {}  # a set with an order
    for sums in task.all_or_none(sums_here):
        for name, first_device, block_sum in sums:
            if first_sums.setdefault((name, first_device), block_sum) != block_sum:
                differing[name] = None
    return list(differing)


def _layouts(arrays: Mapping[str, TargetArray], sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the layouts of the stored arrays that are one sharded source, its dims in some order."""
    layouts = {}
    for name, array in arrays.items():
        src, dst, order = array.pieces[0]
        if len(array.pieces) > 1 or not (src.is_whole and dst.is_whole):
            continue  # joined, split or stacked: no layout of a source is its layout
        sharding = sources[src.name].sharding
        layout = sharding.layout
        # The mesh that is noted has no sub-axes, along which devices share units.
        if layout.axes and sharding.mesh == root_of(sharding.mesh):
            layouts[name] = str(layout.in_order([layout.names[i] for i in order]))
    return layouts


def _do_alone(function: Callable[[], Any]) -> list[Any]:
    """Do the work of the one process that there is: the default of `all_or_none`."""
    return [function()]


class Writers(NamedTuple):
    """The processes of a save: all of them, and this one, which leads if it is the first."""

    processes: Sequence[int]
    own: int

    @property
    def leads(self) -> bool:
        """Whether this process begins and commits: it alone makes and renames files."""
        return self.own == self.processes[0]


class SaveTask(NamedTuple):
    """What one process does in a save.

    Attributes:
        plan: The plan, equal in all processes.
        path: The folder.
        block_of: Gives a block: name, device, dtype -> a numpy array, with a dtype that numpy lacks
            (bfloat16) in the dtype that carries its bits.
        all_or_none: Calls a function in all processes -> the results of all; raises in all if one
            fails. Default: this process is the only one.
        writers: The processes.
        keep: How many checkpoints of the run stay; None for all.
    """

    plan: Saving
    path: Path
    block_of: BlockOf
    all_or_none: AllOrNone = _do_alone
    writers: Writers = Writers(processes=(0,), own=0)
    keep: int | None = None


def _say_nothing(n_bytes: int) -> None:
    """Report no progress."""


def save_blocks(task: SaveTask, progress: Report = _say_nothing) -> None:
    """Save a checkpoint: reserve the files, write all blocks, then put the new files in place.

    All processes call this, and each writes its own blocks. If any process fails, all raise, the new
    files are removed, and the folder's old checkpoint stays as it was.

    Args:
        task: What this process does.
        progress: Called with the bytes of each box that is written.

    Raises:
        FileError: The disk is full, or another save writes into the folder.
    """
    with ExitStack() as stack, begun(task, stack) as token:
        written = task.all_or_none(lambda: write(task, token, progress))
        sums = merge_sums(task.plan, written)
        task.all_or_none(lambda: commit(task, token, sums))


@contextmanager
def begun(task: SaveTask, stack: ExitStack) -> Iterator[str]:
    """Begin a save in all processes, and yield its token; an error in the `with` block aborts it.

    The folder is locked until the stack ends.
    """
    # Results are in the order of processes, the leader's first: only it has a token.
    token = task.all_or_none(lambda: _begin_locked(task, stack))[0]
    try:
        yield token
    except BaseException:  # also if a user interrupts: no new files are left behind
        abort(task, token)
        raise


def _begin_locked(task: SaveTask, stack: ExitStack) -> str | None:
    """Lock the folder until the stack ends and make the files, as the leader; return the token.

    Raises the error of an earlier save that has failed beside the program, if nobody has waited for it.
    """
    if untold:
        _, error = untold.popitem()
        raise error
    if not task.writers.leads:
        return None
    _lock_folder(task.path, stack)
    return begin(task.plan, task.path)


def merge_sums(saving: Saving, written: Sequence[Sums]) -> Sums:
    """Put the checksums of all processes together, by array."""
    merged: Sums = {}
    for name in saving.arrays:
        merged[name] = []
        for sums in written:
            merged[name] += sums.get(name, [])
    return merged


def begin(saving: Saving, path: Path) -> str:
    """Begin a save: make its files in a hidden subfolder, with their headers and full lengths.

    Leftovers of saves that were killed are removed first.

    Returns:
        A token, which names the files of this save.

    Raises:
        FileError: The disk is full, or the folder has a file that others would read instead of the
            index. Nothing is left behind.
    """
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        for other_file in (path / "model.safetensors", *path.glob("*.safetensors.index.json")):
            if other_file.exists() and other_file.name != INDEX:
                reason = (
                    f"{path} has a {other_file.name}, which others would read instead of {INDEX}"
                )
                raise FileError(reason, hint="remove it, or save to a folder of its own")
        _remove_leftovers(path, _files_of_checkpoint(path))
        token = secrets.token_hex(4)
        folder = unfinished(path, token)
        try:
            folder.mkdir()
            for shard in saving.shards:
                with (folder / shard.name).open("wb") as file:
                    # All bytes at once: a full disk is found out before anything is written.
                    _reserve(file.fileno(), 0, shard.n_bytes)
                    file.write(shard.header)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return token


def unfinished(path: Path, token: str) -> Path:
    """Return the folder of the files of a save that has not ended."""
    return path / f"{_UNFINISHED}{token}"


def write(task: SaveTask, token: str, progress: Report = _say_nothing) -> Sums:
    """Write all blocks of one process into the files that `begin` has made.

    A block of a fused qkv weight may belong to three stored arrays, q, k and v. Each part of it is
    a box of one stored array: rows 0-3 and all columns, say.

    Args:
        task: What this process does.
        token: What `begin` returned.
        progress: Called with the bytes of each box that is written.

    Returns:
        By stored name, the rows of each box as [start, stop, step] for every dim, and its checksum.
    """
    sums: Sums = {}
    # Several boxes in turn come from one block: keep the last one, and no more in memory.
    block_of = functools.lru_cache(1)(task.block_of)
    shard_of = {name: shard for shard in task.plan.shards for name in shard.starts}
    with disk_errors(task.path), ExitStack() as stack:
        # A file is opened once, when its first box comes: a process may write to few of many files.
        @functools.cache
        def open_shard(name: str) -> int:
            """Open a file, which is synced and closed when all blocks are written -> its descriptor."""
            file = unfinished(task.path, token) / name
            descriptor = stack.enter_context(file.open("r+b", buffering=0)).fileno()
            stack.callback(os.fsync, descriptor)
            return descriptor

        for name, device, boxes in task.plan.writes(task.writers.own):
            for common_box in boxes:
                stored_name = common_box.name
                box = common_box.box
                stored = task.plan.arrays[stored_name]
                shard = shard_of[stored_name]
                block = block_of(name, device, stored.dtype)
                # In the order of the stored dims.
                values = np.ascontiguousarray(common_box.view(block))
                file = open_shard(shard.name)
                _write_box(file, shard.starts[stored_name], values, box, stored.shape)
                rows = _rows_of_box(box, stored.shape)
                sums.setdefault(stored_name, []).append([rows, checksum(values)])
                progress(values.nbytes)
    return sums


def _rows_of_box(box: Box, shape: Sequence[int]) -> list[list[int]]:
    """Return the rows of a box as JSON has them, [start, stop, step] for every dim."""
    return [list(rows.indices(length)) for rows, length in zip(box, shape, strict=True)]


def commit(task: SaveTask, token: str, sums: Mapping[str, Any]) -> None:
    """Replace the folder's checkpoint by the new files, so that readers see either old or new.

    The files get names that no older save has. Then the index, which says what the checkpoint is,
    is renamed over the old one, in one step of the file system. At last the old files are removed, and
    old checkpoints of the run. `sums` holds the checksums of all processes, by stored name.

    Only the leader does this; in other processes it does nothing.
    """
    path = task.path
    if not task.writers.leads:
        return
    shards = task.plan.shards
    folder = unfinished(path, token)
    final_names = {shard.name: f"model-{token}-{shard.name}" for shard in shards}
    file_of_array = {name: final_names[shard.name] for shard in shards for name in shard.starts}
    new_files = set(file_of_array.values())
    with disk_errors(path):
        old_files = _files_of_checkpoint(path)
        _write_index(folder / INDEX, task.plan, file_of_array, sums)
        for name, final_name in final_names.items():
            (folder / name).rename(path / final_name)
        _sync(path)  # the files' names are on the disk before the index that needs them
        (folder / INDEX).rename(path / INDEX)
    committed = "the new checkpoint is in its place, and might not outlast a power failure"
    with disk_errors(path, committed):
        _sync(path)
        for name in old_files - new_files:
            (path / name).unlink(missing_ok=True)
        _remove_leftovers(path, new_files)
    remove_old(path, task.keep)


def _write_index(
    path: Path, saving: Saving, file_of_array: Mapping[str, str], sums: Mapping[str, Any]
) -> None:
    """Write the index of a checkpoint, in the form of Hugging Face, and wait until the disk has it."""
    total_bytes = sum(shard.n_bytes - len(shard.header) for shard in saving.shards)
    metadata = {"total_size": total_bytes, KEY: {**saving.metadata, "sums": sums}}
    with path.open("w") as file:
        json.dump({"metadata": metadata, "weight_map": file_of_array}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def abort(task: SaveTask, token: str) -> None:
    """Remove the files of a save, as the leader, unless it is the checkpoint of the folder by now."""
    path = task.path
    if not task.writers.leads:
        return
    shutil.rmtree(unfinished(path, token), ignore_errors=True)
    committed = {path / name for name in _files_of_checkpoint(path)}
    for file in set(path.glob(f"model-{token}-*")) - committed:
        file.unlink(missing_ok=True)


def _lock_folder(path: Path, stack: ExitStack) -> None:
    """Make and lock a folder: another save would remove the files of this one as leftovers."""
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock(path, stack)
        except BlockingIOError:
            hint = "one save at a time into a folder; this one has changed nothing"
            raise FileError(f"{path}: another save is writing into it", hint=hint) from None


def lock(path: Path, stack: ExitStack, flags: int = os.O_RDONLY) -> bool:
    """Lock a file or a folder until the stack or the process ends.

    flags: as of `os.open`. Returns False on a file system without locks. Raises BlockingIOError if
    another one has locked it.
    """
    file = os.open(path, flags)
    stack.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    # Closing would not do: a process that was forked meanwhile, as a loader's, has the file open, too.
    stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
    return True


def is_free(path: Path) -> bool:
    """Return whether nobody has locked a file; it may be gone. False on a file system without locks."""
    try:
        with ExitStack() as stack:
            return lock(path, stack)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True


def _write_box(
    file: int, start: int, array: NDArray[Any], box: Box, shape: tuple[int, ...]
) -> None:
    """Write a region of an array to its place in a file, one contiguous range of bytes at a time.

    Rows 1-2 of an array [4, 6] are one range; columns 0-2 of it are four, one in each row.

    Args:
        file: The file's descriptor.
        start: Where the whole array's bytes begin in the file.
        array: The values of the region, C-contiguous.
        box: The region, as a slice of each dim.
        shape: The shape of the whole array.
    """
    offsets = start + array.itemsize * _range_starts(box, shape)  # of each range in the file
    data = array.reshape(-1).view(np.uint8).data
    range_bytes = len(data) // max(offsets.size, 1)  # all ranges are equally long
    for i, offset in enumerate(offsets.tolist()):
        remaining = data[i * range_bytes : (i + 1) * range_bytes]
        while remaining:
            n_written = os.pwrite(file, remaining, offset)  # may be fewer bytes than asked for
            remaining = remaining[n_written:]
            offset += n_written


def _range_starts(box: Box, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Find where each contiguous range of a region begins, in elements of the row-major array.

    For shape (4, 6), rows 1-2 are one range that begins at element 6; columns 0-2 are four ranges,
    from 0, 6, 12 and 18. All ranges of a region are equally long. `box` has a slice for each dim.
    """
    bounds = [rows.indices(length) for rows, length in zip(box, shape, strict=True)]
    # Dims behind the last one that is cut are whole: their elements are contiguous.
    last_cut = len(shape) - 1
    while last_cut >= 0 and bounds[last_cut] == (0, shape[last_cut], 1):
        last_cut -= 1
    starts = np.zeros((), np.int64)  # of the dims so far: one entry for each of their rows
    for dim_index, (first, stop, step) in enumerate(bounds[: last_cut + 1]):
        rows = np.arange(first, stop, step)
        if dim_index == last_cut and step == 1:
            rows = rows[:1]  # its rows are contiguous too: the first one is enough
        starts = np.add.outer(starts, rows * math.prod(shape[dim_index + 1 :]))
    return starts.ravel()


def _files_of_checkpoint(path: Path) -> set[str]:
    """Return the files of the checkpoint in a folder; none if it has no index."""
    index = path / INDEX
    if not index.exists():
        return set()
    return set(read_index(index)["weight_map"].values())


def _remove_leftovers(path: Path, keep: set[str]) -> None:
    """Remove what killed saves have left in a folder, and no file in `keep`."""
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
def disk_errors(path: Path, hint: str = "") -> Iterator[None]:
    """Turn errors of the disk into FileError, which says what state the folder is in."""
    try:
        yield
    except OSError as error:
        if not hint:
            hint = _UNCHANGED if os.path.exists(path / INDEX) else _NONE
        raise FileError(f"{error.filename or path}: {error.strerror}", hint=hint) from error
