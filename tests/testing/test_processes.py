"""The processes of the kit start once, load what they need alone, and listen to their caller alone."""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from xshard.runtimes.backends import host_devices
from xshard.runtimes.processes import FunctionError, Process
from xshard.testing.pickling import packed
from xshard.testing.plugin import _ask

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0  # a few seconds, as a rule
CALL = "torch_bridge.testing.worker.call_packed"

reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def _on_devices(function: Callable[..., Any], *args: Any) -> Any:
    return _ask("jax", function, *args)


def test_a_comparison_of_torch_functions_needs_no_jax(tmp_path: Path) -> None:
    """Neither here, where no framework is imported, nor in the process that forks ranks."""
    code = """
import sys
import numpy as np
import xshard.testing.plugin
from xshard.testing import EquivalenceError, assert_mesh_invariant
assert not {"torch", "jax", "hypothesis", "cloudpickle"} & set(sys.modules)
def mean(x):
    return x.mean()
given = {"args": [np.arange(4.0)], "layouts": (["n/tp"], "()"), "mesh": "tp=2"}
assert_mesh_invariant(abs, **given | {"layouts": (["n/tp"], "n/tp")})
try:
    assert_mesh_invariant(mean, **given)
except EquivalenceError as error:
    assert "likely cause" in str(error)
else:
    raise SystemExit("a mean of each block is no mean")
assert "torch" not in sys.modules
"""
    (tmp_path / "jax.py").write_text("raise ImportError('JAX is forbidden here')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, timeout=TIMEOUT_S, env=environment
    )


def test_an_answer_that_nobody_waited_for_is_not_taken_for_another() -> None:
    """As after Ctrl-C in a notebook."""

    def slow():
        import time

        time.sleep(600)
        return "old"

    def interrupt(*_):
        raise KeyboardInterrupt

    def interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        _on_devices(slow)

    before = signal.signal(signal.SIGALRM, interrupt)
    _on_devices(len, "ready")
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert _on_devices(len, "new") == 3


def test_jax_keeps_its_devices() -> None:
    def count():
        import os

        import jax

        return os.getpid(), jax.device_count(), jax.default_backend()

    first = _on_devices(count)
    second = _on_devices(count)
    assert first == second
    assert first[1:] == (host_devices(), "cpu")


def _addresses() -> list[str]:
    """The addresses at which this process waits for connections of others, as the system sees it."""
    sockets = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed
            sockets.add(os.readlink(file))
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            is_waiting = state == "0A" or table.startswith("udp")
            if is_waiting and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])
                network = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(str(ipaddress.ip_address(network)))
    return found


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """The process that forks ranks, told to listen where others are, its temporary files in a folder."""
    outside = [name for _, name in socket.if_nameindex() if not name.startswith("lo")]
    folder = tmp_path_factory.mktemp("temporary")
    started = Process({"GLOO_SOCKET_IFNAME": (*outside, "lo")[0], "TMPDIR": str(folder)})
    yield started
    started.end()


def _rank() -> tuple[list[str], list[int]]:
    """The addresses of a rank, and what others may do with its temporary files and its standard error."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(2))
    files = [*Path(tempfile.gettempdir()).glob(f"{tempfile.template}*")]
    modes = [*(file.lstat().st_mode for file in files), os.fstat(2).st_mode]
    return _addresses(), [mode & 0o077 for mode in modes]


@reads_proc
def test_ranks_are_closed_to_others(process: Process) -> None:
    for where, others in process.ask(CALL, 2, packed(_rank), timeout_s=120.0):
        assert where and all(each == "127.0.0.1" for each in where)
        assert len(others) > 1 and not any(others)


class _Planted:
    """A pickle that writes a file when it is read."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path(self.file),)


def _plants(file: str) -> None:
    """Another's pickle in the file where torch looks for the error of a rank that has ended."""
    errors = multiprocessing.current_process()._args[-1]  # type: ignore[attr-defined]
    Path(errors).write_bytes(pickle.dumps(_Planted(file)))
    os._exit(1)


@reads_proc
def test_no_pickle_is_read_that_a_rank_did_not_send(process: Process, tmp_path: Path) -> None:
    with pytest.raises(FunctionError, match="rank 0 of 1 failed"):
        process.ask(CALL, 1, packed(_plants, str(tmp_path / "read")), timeout_s=120.0)
    assert not (tmp_path / "read").exists()


@reads_proc
def test_jax_listens_nowhere() -> None:
    assert _on_devices(_addresses) == []
