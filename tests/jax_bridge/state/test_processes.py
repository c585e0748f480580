"""Two processes with four devices each save and load together, and fail together."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import jax_bridge as xj
from tests.jax_bridge.helpers import device_mesh, host, joined
from tests.state import checkpoints
from xshard import Layout, Mesh, Sharding
from xshard.state import files
from xshard.state.files import FileError, open_checkpoint, saving, verify

MESH = Mesh(a=2, b=2, c=2)
TREE = {"w": np.arange(192, dtype=np.float32).reshape(16, 12), "z": np.arange(32, dtype=np.int32)}
TREE |= {"b": np.arange(5, dtype=np.float32)}
SAVED = {"w": "o/(a,b) i/c", "z": "s/zigzag(b)", "b": "n"}
LOADED = {"w": "o/c i/a", "z": "s/(c,a)", "b": "n"}


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., list[Any]]]:
    with joined([host(4)] * 2) as both:
        yield lambda function, *arguments: both(f"{__name__}.{function.__name__}", *arguments)


def save_here(folder: Path, _timeout_s: float) -> None:
    xj.save(TREE, folder, SAVED, device_mesh(MESH))


def load_here(folder: Path, _timeout_s: float) -> tuple[int, bool]:
    """The bytes that this process read, and whether its blocks are those of the whole arrays."""
    checkpoint = open_checkpoint(folder)
    blocks = [
        (TREE[name][shard.index], shard.data)
        for name, x in xj.load(checkpoint, LOADED, device_mesh(MESH)).items()
        for shard in x.addressable_shards
    ]
    return checkpoint.bytes_read, len(blocks) == 12 and all(
        np.array_equal(*pair) for pair in blocks
    )


def fail_here(folder: Path, process: int, function: str, _timeout_s: float) -> tuple[str, str]:
    """What this process says where the disk of one fails, and where the first looks into no folder."""
    index = jax.process_index()
    module = saving if function == "_reserve" else os
    full = {"side_effect": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}
    how = full if index == process else {"wraps": getattr(module, function)}
    with mock.patch.object(module, function, **how), pytest.raises(FileError) as failed:
        xj.save({name: x + 1 for name, x in TREE.items()}, folder, SAVED, device_mesh(MESH))
    with pytest.raises(FileError) as lacked:
        xj.load(folder if index else folder / "none", LOADED, device_mesh(MESH))
    return str(failed.value), str(lacked.value)


def test_each_process_has_its_part_of_a_checkpoint(
    ask: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Each reads what its own devices need, once."""
    ask(save_here, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert verify(checkpoint) > 0
    for name, x in TREE.items():
        np.testing.assert_array_equal(checkpoint.read(name), x)
    assert ask(load_here, tmp_path) == [(bytes_of(process), True) for process in (0, 1)]


def beside_a_save_here(folder: Path, _timeout_s: float) -> bool:
    """Process 0 opens the old checkpoint, process 1 the new one: whether the blocks are the new ones."""
    original = files.folder.open_checkpoint
    is_open = folder.with_suffix(".open")
    is_first = [True]

    def opening(path: Path) -> files.Checkpoint:
        if not is_first:
            return original(path)
        is_first.clear()
        opened = original(path)
        if jax.process_index() == 0:
            is_open.touch()
            return opened
        while not is_open.exists():
            time.sleep(0.01)
        checkpoints.save(folder, {name: np.asarray(x) + 1 for name, x in TREE.items()})
        return original(path)

    with mock.patch.object(files.folder, "open_checkpoint", opening):
        found = xj.load(folder, LOADED, device_mesh(MESH))
    return all(
        np.array_equal(TREE[name][shard.index] + 1, shard.data)
        for name, x in found.items()
        for shard in x.addressable_shards
    )


def test_a_load_beside_a_save_is_of_one_checkpoint(
    ask: Callable[..., list[Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    ask(save_here, folder)
    assert ask(beside_a_save_here, folder) == [True, True]


def bytes_of(process: int) -> int:
    """Devices 4 * process to 4 * process + 3 are those with this index along a."""
    w = Sharding(Layout.parse(LOADED["w"]), MESH, (16, 12))
    blocks = {(w.held(0, d), w.held(1, d)) for d in range(4 * process, 4 * process + 4)}
    return len(blocks) * w.max_local_size * 4 + 2 * 8 * 4 + 5 * 4


@pytest.mark.parametrize(("process", "function"), [(0, "_reserve"), (1, "pwrite"), (0, "fsync")])
def test_both_fail_where_one_does(
    process: int, function: str, ask: Callable[..., list[Any]], tmp_path: Path
) -> None:
    ask(save_here, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    said, (one, other) = zip(*ask(fail_here, tmp_path, process, function), strict=True)
    assert "No space left on device" in said[process] and said[process].startswith(str(tmp_path))
    assert said[1 - process].startswith(f"process {process} failed: {tmp_path}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert one == f"{tmp_path}/none: No such file or directory"
    assert other == f"process 0 failed: {one}"
