"""The processes of the kit: no one else can talk to them, and nothing of others is unpickled."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.listening import addresses
from xshard.runtimes.backends import kit_process
from xshard.runtimes.processes import FunctionError, Process
from xshard.testing.pickling import packed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CALL = "torch_bridge.testing.worker.call_packed"


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
    return addresses(), [each & 0o077 for each in (*(f.lstat().st_mode for f in files), os.fstat(2).st_mode)]


def test_ranks_listen_on_the_loopback_and_their_files_are_their_owners(process: Process) -> None:
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


def test_no_pickle_is_read_that_a_rank_did_not_send(process: Process, tmp_path: Path) -> None:
    with pytest.raises(FunctionError, match="rank 0 of 1 failed"):
        process.ask(CALL, 1, packed(_plants, str(tmp_path / "read")), timeout_s=120.0)
    assert not (tmp_path / "read").exists()


def test_jax_listens_nowhere() -> None:
    where = kit_process("jax").ask(
        "jax_bridge.testing.worker.call_packed", packed(addresses), timeout_s=300.0
    )
    assert where == []
