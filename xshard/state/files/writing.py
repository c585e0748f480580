"""A save on the disk: files are in a folder of their own until all are written, and the index comes last.

Processes write into the same files at once. A killed save leaves the old checkpoint, and a folder that the
next save removes. Blocks are numpy arrays.
"""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xshard.state.files.checkpoint import Box
from xshard.state.files.folder import INDEX, KEY, OURS, checksum, read_index
from xshard.state.files.header import FileError
from xshard.state.files.saving import Saving, ShardFile

_UNFINISHED = ".saving-"
_reserve = getattr(os, "posix_fallocate", lambda file, at, n: os.ftruncate(file, n))  # macOS has none
Sums = dict[str, list[list[Any]]]  # by array: [[start, stop, step] per dim, checksum] of every box


def save_blocks(
    saving: Saving,
    path: Path,
    block_of: Callable[[str, int, str], NDArray[Any]],
    all_or_none: Callable[[Callable[[], Any]], list[Any]] = lambda work: [work()],
    process: int = 0,
    leads: bool = True,
    progress: Callable[[int], object] = lambda n_bytes: None,
) -> None:
    """Save from begin to commit; all processes call this, and the first of them leads.

    block_of, progress: as in `write`. all_or_none: does work in all processes -> the result of each; raises
    in all if one fails. By default one process saves everything.
    """
    with ExitStack() as stack:

        def begun() -> str:
            _locked(path, stack)
            return begin(saving, path)

        token = all_or_none(lambda: begun() if leads else None)[0]
        try:
            written = all_or_none(lambda: write(saving, path, token, process, block_of, progress))
            sums = {name: [box for part in written for box in part.get(name, ())] for name in saving.arrays}
            all_or_none(lambda: commit(saving, path, token, sums) if leads else None)
        except BaseException:
            if leads:
                abort(path, token)
            raise


def begin(saving: Saving, path: Path) -> str:
    """Reserve the files of a save in a folder, which is made if there is none -> the token of the save.

    One process calls this before all write. It removes leftovers of killed saves. Raises FileError, and
    leaves nothing, if the disk is full, or if there is a file that others would read instead of the index.
    """
    with _disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        for other in (path / "model.safetensors", *path.glob("*.safetensors.index.json")):
            if other.exists() and other.name != INDEX:
                raise FileError(
                    f"{path} has a {other.name}, which others would read instead of {INDEX}",
                    hint="remove it, or save to a folder of its own",
                )
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
    saving: Saving,
    path: Path,
    token: str,
    process: int,
    block_of: Callable[[str, int, str], NDArray[Any]],
    progress: Callable[[int], object] = lambda n_bytes: None,
) -> Sums:
    """Write the blocks of one process -> their checksums.

    block_of: name, device, dtype -> the block as the carrier of that dtype. progress: called with the bytes
    of each box.
    """
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
                array, shard = saving.arrays[pair.name], shards[pair.name]
                block = block_of(name, device, array.dtype)
                values = np.ascontiguousarray(pair.view(block))
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
        weight_map = {name: _final(shard, token) for shard in saving.shards for name in shard.starts}
        total = sum(shard.n_bytes - len(shard.header) for shard in saving.shards)
        notes = {**saving.metadata, "sums": sums}
        with (folder / INDEX).open("w") as file:
            metadata = {"total_size": total, KEY: notes}
            json.dump({"metadata": metadata, "weight_map": weight_map}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        for shard in saving.shards:
            (folder / shard.name).rename(path / _final(shard, token))
        _sync(path)
        (folder / INDEX).rename(path / INDEX)
    with _disk_errors(path, "the new checkpoint is in its place, and might not outlast a power failure"):
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
        offsets = np.add.outer(offsets, np.multiply(indices, array.itemsize * math.prod(shape[d + 1 :])))
    data = array.reshape(-1).view(np.uint8).data
    n = len(data) // max(offsets.size, 1)
    for i, offset in enumerate(offsets.ravel().tolist()):
        written = 0
        while written < n:
            written += os.pwrite(file, data[i * n + written : (i + 1) * n], offset + written)


def _final(shard: ShardFile, token: str) -> str:
    return f"model-{token}-{shard.name}"


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
def _disk_errors(
    path: Path, hint: str = "nothing was changed: the checkpoint that was there is whole"
) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"{error.filename or path}: {error.strerror}", hint=hint) from error
