"""A save on the disk: a folder of its own until all is written, and the index last.

Decides how processes write into the same files at once. A killed save leaves the old checkpoint, and a
folder that the next save removes. Knows no framework: blocks are numpy arrays.
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
from xshard.state.files.saving import Saving, Shard

_UNFINISHED = ".saving-"
_reserve = getattr(os, "posix_fallocate", lambda file, at, n: os.ftruncate(file, n))  # macOS has none
Sums = dict[str, list[list[Any]]]  # by array: [[start, stop, step] per dim, checksum] of every box


def save_blocks(
    saving: Saving,
    path: Path,
    block_of: Callable[[str, int, str], NDArray[Any]],
    together: Callable[[Callable[[], Any]], list[Any]] = lambda work: [work()],
    process: int = 0,
    leads: bool = True,
    progress: Callable[[int], object] = lambda n_bytes: None,
) -> None:
    """A save from its beginning to its end; all its processes call this, and the first of them leads.

    block_of, progress: as in `write`. together: does something in all processes -> what it returns in each of
    them, and raises in all where it does in one. By default one process does it all.
    """
    with ExitStack() as stack:

        def begun() -> str:
            _locked(path, stack)
            return begin(saving, path)

        token = together(lambda: begun() if leads else None)[0]
        try:
            found = together(lambda: write(saving, path, token, process, block_of, progress))
            sums = {name: [box for each in found for box in each.get(name, ())] for name in saving.made}
            together(lambda: commit(saving, path, token, sums) if leads else None)
        except BaseException:
            if leads:
                abort(path, token)
            raise


def begin(saving: Saving, path: Path) -> str:
    """Make room for a save in a folder, which is made if there is none -> the token of the save.

    One process does, before all write. It removes what killed saves left. Raises FileError, and leaves
    nothing, where there is no room, or a file that others would read in place of the index.
    """
    with _disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        for other in (path / "model.safetensors", *path.glob("*.safetensors.index.json")):
            if other.exists() and other.name != INDEX:
                raise FileError(
                    f"{path} has a {other.name}, which others read and not {INDEX}",
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
    """Write what is one process's to write -> the checksums of that.

    block_of: name, device, dtype -> the block under the carrier of that dtype. progress: is called with the
    bytes that were written.
    """
    sums: Sums = {}
    block_of = functools.lru_cache(1)(block_of)  # one block is here at a time
    shards = {name: shard for shard in saving.shards for name in shard.starts}
    with _disk_errors(path), ExitStack() as stack:

        @functools.cache
        def opened(shard: str) -> int:
            file = (path / f"{_UNFINISHED}{token}" / shard).open("r+b", buffering=0)
            stack.callback(os.fsync, stack.enter_context(file).fileno())
            return file.fileno()

        for name, device, pairs in saving.writes(process):
            for pair in pairs:
                made, shard = saving.made[pair.name], shards[pair.name]
                block = block_of(name, device, made.dtype)
                found = np.ascontiguousarray(pair.of(block))
                _put(opened(shard.name), shard.starts[pair.name], found, pair.box, made.shape)
                ends = [[*s.indices(n)] for s, n in zip(pair.box, made.shape, strict=True)]
                sums.setdefault(pair.name, []).append([ends, checksum(found)])
                progress(found.nbytes)
    return sums


def commit(saving: Saving, path: Path, token: str, sums: Mapping[str, Any]) -> None:
    """Make what all processes wrote the checkpoint of the folder, in one step: a new name for the index."""
    folder = path / f"{_UNFINISHED}{token}"
    with _disk_errors(path):
        old = _files(path)
        weight_map = {name: _final(shard, token) for shard in saving.shards for name in shard.starts}
        total = sum(shard.n_bytes - len(shard.header) for shard in saving.shards)
        ours = {**saving.metadata, "sums": sums}
        with (folder / INDEX).open("w") as file:
            metadata = {"total_size": total, KEY: ours}
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
    """Remove what a save has written, unless it is the checkpoint of the folder by now."""
    shutil.rmtree(path / f"{_UNFINISHED}{token}", ignore_errors=True)
    for file in set(path.glob(f"model-{token}-*")) - {path / name for name in _files(path)}:
        file.unlink(missing_ok=True)


def _locked(path: Path, stack: ExitStack) -> None:
    """Make a folder if there is none, and lock it: another save would take this one's files for leftovers."""
    with _disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        stack.callback(os.close, folder := os.open(path, os.O_RDONLY))
    with suppress(OSError):  # of a file system without locks
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except BlockingIOError:
            hint = "one save at a time into a folder; this one has changed nothing"
            raise FileError(f"{path}: another save into it is at work", hint=hint) from None


def _put(file: int, start: int, array: NDArray[Any], box: Box, shape: tuple[int, ...]) -> None:
    """Write a box of an array of `shape`, whose bytes begin at `start`: a stretch of the file at a time."""
    rows = [s.indices(n) for s, n in zip(box, shape, strict=True)]
    inner = len(shape)  # the dims from here on are whole, and the one before may be a part without steps
    while inner and rows[inner - 1] == (0, shape[inner - 1], 1):
        inner -= 1
    outer = inner - 1 if inner and rows[inner - 1][2] == 1 else inner
    offsets = np.full((), start, np.int64)
    for d, (first, stop, step) in enumerate(rows[:inner]):
        at = np.arange(first, stop, step) if d < outer else first
        offsets = np.add.outer(offsets, np.multiply(at, array.itemsize * math.prod(shape[d + 1 :])))
    data = array.reshape(-1).view(np.uint8).data
    n = len(data) // max(offsets.size, 1)
    for i, offset in enumerate(offsets.ravel().tolist()):
        written = 0
        while written < n:
            written += os.pwrite(file, data[i * n + written : (i + 1) * n], offset + written)


def _final(shard: Shard, token: str) -> str:
    return f"model-{token}-{shard.name}"


def _files(path: Path) -> set[str]:
    """The files of the checkpoint that is in a folder."""
    index = path / INDEX
    return set(read_index(index)["weight_map"].values()) if index.exists() else set()


def _sweep(path: Path, keep: set[str]) -> None:
    """Remove what killed saves left."""
    for each in path.iterdir():
        if each.name.startswith(_UNFINISHED):
            shutil.rmtree(each, ignore_errors=True)
        elif OURS.fullmatch(each.name) and each.name not in keep:
            each.unlink()


def _sync(folder: Path) -> None:
    """What the folder's files are called is on the disk."""
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
