"""A rank is killed amid `xt.transfer`: the others have the whole tree or an error, and what they sent."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

import torch_bridge as xt
from tests.torch_bridge.helpers import PRELOADED
from tests.torch_bridge.state.test_kills import killed_before
from torch_bridge.lower import transfer as lowered
from torch_bridge.state import carry, transfer
from xshard import Mesh, XshardError

assert PRELOADED  # the server of forks has torch_bridge already

RANKS, SENDERS, TAKERS = range(3), (0, 1), (1, 2)
ROOM = tuple(str(module.__file__) for module in (transfer, carry, lowered))
KILLED = 6
ROWS = 8


def _rank(rank: int, folder: Path, line: int | None, said: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=len(RANKS))
    c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)  # of ranks that wait for a dead one
    there = DeviceMesh("cpu", torch.tensor(TAKERS), mesh_dim_names=("tp",))
    whole = {f"w{i}": torch.arange(ROWS * 6.0).view(ROWS, 6) + i for i in range(2)}
    tree = {name: x.chunk(2)[rank].clone() for name, x in whole.items()} if rank in SENDERS else None
    found, error = None, ""
    options: dict[str, Any] = {"src_mesh": Mesh(dp=2), "dst_mesh": there, "bucket_bytes": 64}
    with killed_before(line, ROOM) as lines:
        try:
            found = xt.transfer(tree, {"**": "o/dp i -> o i/tp"}, **options)
        except XshardError as raised:
            error = type(raised).__name__
    for name, x in whole.items():
        assert tree is None or torch.equal(tree[name], x.chunk(2)[rank])
        assert error or rank not in TAKERS or torch.equal(found[name], x.chunk(2, 1)[TAKERS.index(rank)])
    said.send((error, len(lines)))
    os._exit(0)  # the others may be gone


def _world(folder: Path, killed: int | None = None, line: int | None = None) -> Any:
    """Start three ranks, one of which is killed -> what waits for them and returns what each said."""
    context, ranks = multiprocessing.get_context("forkserver"), []
    folder.mkdir()
    for rank in RANKS:
        own = line if rank == killed else None
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, folder, own, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))

    def said() -> list[tuple[str, int] | None]:
        for process, _ in ranks:
            process.join()
        wanted = [-signal.SIGKILL if rank == killed else 0 for rank in RANKS]
        assert [process.exitcode for process, _ in ranks] == wanted
        return [None if rank == killed else pipe.recv() for rank, (_, pipe) in enumerate(ranks)]

    return said


def test_the_others_have_all_of_it_or_an_error(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = [n for _, n in _world(tmp_path / "whole")()]
    worlds = [
        _world(tmp_path / str(i), i % len(RANKS), rng.randrange(lines[i % len(RANKS)])) for i in range(KILLED)
    ]
    assert all(len([said for said in world() if said]) == 2 for world in worlds)
