"""Two processes with four devices each save and load together, and fail together."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jax_bridge.helpers import device_mesh, host, joined
from xshard import Layout, Mesh, Sharding
from xshard.state.files import FileError, open_checkpoint, saving, verify

MESH = Mesh(a=2, b=2, c=2)
TREE = {
    "w": np.arange(16 * 12, dtype=np.float32).reshape(16, 12),
    "z": np.arange(32, dtype=np.int32),
    "b": np.arange(5, dtype=np.float32),
}
SAVED = {"w": "o/(a,b) i/c", "z": "s/zigzag(b)", "b": "n"}
LOADED = {"w": "o/c i/a", "z": "s/(c,a)", "b": "n"}


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., list[Any]]]:
    with joined([host(4)] * 2) as both:
        yield lambda function, *arguments: both(f"{__name__}.{function.__name__}", *arguments)


def save_here(folder: Path, _timeout_s: float) -> None:
    import jax_bridge as xj

    xj.save(TREE, folder, SAVED, device_mesh(MESH))


def load_here(folder: Path, _timeout_s: float) -> tuple[int, bool]:
    """The bytes that this process read, and whether its blocks are those of the whole arrays."""
    import jax_bridge as xj

    checkpoint = open_checkpoint(folder)
    blocks = [
        (TREE[name][shard.index], shard.data)
        for name, x in xj.load(checkpoint, LOADED, device_mesh(MESH)).items()
        for shard in x.addressable_shards
    ]
    return checkpoint.bytes_read, len(blocks) == 12 and all(np.array_equal(*pair) for pair in blocks)


def fail_here(folder: Path, process: int, function: str, _timeout_s: float) -> str:
    """What this process says where the disk of one fails."""
    import jax

    import jax_bridge as xj

    module: Any = saving if function == "_reserve" else os
    original = getattr(module, function)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if jax.process_index() == process:
        setattr(module, function, full)
    try:
        xj.save({name: x + 1 for name, x in TREE.items()}, folder, SAVED, device_mesh(MESH))
    except FileError as error:
        return str(error)
    finally:
        setattr(module, function, original)
    return ""


def load_what_one_lacks(folder: Path, _timeout_s: float) -> str:
    import jax

    import jax_bridge as xj

    try:
        xj.load(folder if jax.process_index() else folder / "none", LOADED, device_mesh(MESH))
    except FileError as error:
        return str(error)
    return ""


def test_both_save_and_load(ask: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Each reads what its own devices need, once."""
    ask(save_here, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert verify(checkpoint) > 0
    for name, x in TREE.items():
        np.testing.assert_array_equal(checkpoint.read(name), x)
    assert ask(load_here, tmp_path) == [(bytes_of(process), True) for process in (0, 1)]


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
    said = ask(fail_here, tmp_path, process, function)
    assert "No space left on device" in said[process] and said[process].startswith(str(tmp_path))
    assert said[1 - process].startswith(f"process {process} failed: {tmp_path}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    one, other = ask(load_what_one_lacks, tmp_path)
    assert one == f"{tmp_path}/none: No such file or directory"
    assert other == f"process 0 failed: {one}"
