"""A rank is killed amid `xt.transfer` or `xt.save`: others have all of it, or an error and what they had."""

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
from torch_bridge.state import files, leaves, transfer
from xshard import Mesh, XshardError
from xshard.state.files import open_checkpoint, saving, verify

assert PRELOADED  # the server of forks has torch_bridge already

RANKS, SENDERS, TAKERS = range(3), (0, 1), (1, 2)
ROOM = tuple(str(module.__file__) for module in (transfer, lowered))
FILES = tuple(str(module.__file__) for module in (files, leaves, saving))
KILLED = 4
ROWS = 8


def _rank(work: Any, rank: int, n: int, folder: Path, line: int | None, said: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=n)
    c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)  # of ranks that wait for a dead one
    said.send(work(rank, folder, line))
    os._exit(0)  # the others may be gone


def _transferred(rank: int, folder: Path, line: int | None) -> tuple[str, list[str]]:
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
    return error, lines


def _saved(rank: int, folder: Path, line: int | None) -> tuple[str, list[str]]:
    """Of two versions that a half each is in a rank, the second."""
    error = ""
    old, new = ({f"w{i}": torch.full((2, 3), version) for i in range(2)} for version in (1.0, 2.0))
    xt.save(old, folder / "saved", {"**": "o/dp i"}, Mesh(dp=2), shard_bytes=30)
    with killed_before(line, FILES) as lines:
        try:
            xt.save(new, folder / "saved", {"**": "o/dp i"}, Mesh(dp=2), shard_bytes=30)
        except XshardError as raised:
            error = type(raised).__name__
    return error, lines


def _world(
    work: Any, ranks_of: range, folder: Path, killed: int | None = None, line: int | None = None
) -> Any:
    """Start ranks, one of which is killed -> what waits for them and returns what each said."""
    context, ranks = multiprocessing.get_context("forkserver"), []
    folder.mkdir()
    for rank in ranks_of:
        own = line if rank == killed else None
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(work, rank, len(ranks_of), folder, own, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))

    def said() -> list[tuple[str, list[str]] | None]:
        for process, _ in ranks:
            process.join()
        wanted = [-signal.SIGKILL if rank == killed else 0 for rank in ranks_of]
        assert [process.exitcode for process, _ in ranks] == wanted
        return [None if rank == killed else pipe.recv() for rank, (_, pipe) in enumerate(ranks)]

    return said


def test_the_others_have_all_of_it_or_an_error(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = [len(ran) for _, ran in _world(_transferred, RANKS, tmp_path / "whole")()]
    kills = [(i % len(RANKS), rng.randrange(lines[i % len(RANKS)])) for i in range(KILLED)]
    worlds = [_world(_transferred, RANKS, tmp_path / str(i), *kill) for i, kill in enumerate(kills)]
    assert all(len([said for said in world() if said]) == 2 for world in worlds)


def test_of_two_that_save_one_is_killed(tmp_path: Path) -> None:
    """The old checkpoint is whole, or the new one; the other rank has an error, or all of it."""
    rng, two = random.Random(1), range(2)
    lines = [ran for _, ran in _world(_saved, two, tmp_path / "whole")()]
    decisive = [(0, i) for i, function in enumerate(lines[0]) if function == "commit"]
    kills = [*rng.sample(decisive, 2), *((rank, rng.randrange(len(lines[rank]))) for rank in two)]
    worlds = [_world(_saved, two, tmp_path / str(i), *kill) for i, kill in enumerate(kills)]
    for i, (world, (killed, _)) in enumerate(zip(worlds, kills, strict=True)):
        error, _ = world()[1 - killed]
        with open_checkpoint(tmp_path / str(i) / "saved") as checkpoint:
            assert verify(checkpoint) == 4
            (version,) = {float(x) for name in checkpoint for x in checkpoint.read(name).ravel()}
        assert version == 2 or error
