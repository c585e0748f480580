"""Two processes with four devices each save and load together, and fail together."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xshard import Layout, Mesh, Sharding
from xshard.runtimes.backends import BACKENDS, QUICK_XLA_FLAGS
from xshard.runtimes.processes import Process
from xshard.state.files import FileError, open_checkpoint, saving, verify

TIMEOUT_S = 400.0  # without any progress
TREE = {
    "w": np.arange(16 * 12, dtype=np.float32).reshape(16, 12),
    "z": np.arange(32, dtype=np.int32),
    "b": np.arange(5, dtype=np.float32),
}
SAVED = {"w": "o/(a,b) i/c", "z": "s/zigzag(b)", "b": "n"}
LOADED = {"w": "o/c i/a", "z": "s/(c,a)", "b": "n"}


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Process]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {"PJRT_NPROC": "16", "XLA_FLAGS": f"{QUICK_XLA_FLAGS} {os.environ['XLA_FLAGS']}"}
    started = [Process(BACKENDS["jax"].environment(4) | settings) for _ in range(2)]
    try:
        with ThreadPoolExecutor(2) as threads:
            join = "jax_bridge.testing.worker.join"
            asked = [
                threads.submit(p.ask, join, address, 2, i, timeout_s=TIMEOUT_S) for i, p in enumerate(started)
            ]
            for each in asked:
                each.result()
        yield started
    finally:
        for process in started:
            process.end()


def ask(processes: list[Process], function: str, *arguments: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(p.ask, f"{__name__}.{function}", *arguments, timeout_s=TIMEOUT_S)
            for p in processes
        ]
        return [each.result() for each in asked]


def mesh() -> Any:
    import jax

    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def save_here(folder: Path, _timeout_s: float) -> None:
    import jax_bridge as xj

    xj.save(TREE, folder, SAVED, mesh())


def load_here(folder: Path, _timeout_s: float) -> tuple[int, bool]:
    """The bytes that this process read, and whether its blocks are those of the whole arrays."""
    import jax_bridge as xj

    checkpoint = open_checkpoint(folder)
    blocks = [
        (TREE[name][shard.index], shard.data)
        for name, x in xj.load(checkpoint, LOADED, mesh()).items()
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
        xj.save({name: x + 1 for name, x in TREE.items()}, folder, SAVED, mesh())
    except FileError as error:
        return str(error)
    finally:
        setattr(module, function, original)
    return ""


def load_what_one_lacks(folder: Path, _timeout_s: float) -> str:
    import jax

    import jax_bridge as xj

    try:
        xj.load(folder if jax.process_index() else folder / "none", LOADED, mesh())
    except FileError as error:
        return str(error)
    return ""


def test_both_save_and_load(processes: list[Process], tmp_path: Path) -> None:
    """Each reads what its own devices need, once."""
    ask(processes, "save_here", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert verify(checkpoint) > 0
    for name, x in TREE.items():
        np.testing.assert_array_equal(checkpoint.read(name), x)
    read = ask(processes, "load_here", tmp_path)
    assert [right for _, right in read] == [True, True]
    assert [n for n, _ in read] == [bytes_of(process) for process in (0, 1)]


def bytes_of(process: int) -> int:
    """Devices 4 * process to 4 * process + 3 are those with this index along a."""
    w = Sharding(Layout.parse(LOADED["w"]), Mesh(a=2, b=2, c=2), (16, 12))
    blocks = {(w.held(0, d), w.held(1, d)) for d in range(4 * process, 4 * process + 4)}
    return len(blocks) * w.max_local_size * 4 + 2 * 8 * 4 + 5 * 4


@pytest.mark.parametrize(("process", "function"), [(0, "_reserve"), (1, "pwrite"), (0, "fsync")])
def test_both_fail_where_one_does(
    process: int, function: str, processes: list[Process], tmp_path: Path
) -> None:
    ask(processes, "save_here", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    said = ask(processes, "fail_here", tmp_path, process, function)
    assert "No space left on device" in said[process] and said[process].startswith(str(tmp_path))
    assert said[1 - process].startswith(f"process {process} failed: {tmp_path}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    one, other = ask(processes, "load_what_one_lacks", tmp_path)
    assert one == f"{tmp_path}/none: No such file or directory"
    assert other == f"process 0 failed: {one}"
