"""`python -m tests.fuzz.soak`: redistributions in a loop; memory, threads, files and groups must not grow."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_bridge as xt
import xshard as xs

MOVES = (
    "n/{a} d -> n d",
    "n/{a} d -> n d/{a}",
    "n/{a} d -> n/zigzag({a}) d",
    "n d | sum({a}) -> n/{a} d",
)
DEVICES = 8
SHAPES = 500
MESHES = 50
WARM = 20_000
STEPS = 200_000


def held() -> dict[str, int]:
    """What this process has of each."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    files = len(os.listdir("/proc/self/fd"))
    groups = len(c10d._world.pg_map)
    return {"KiB": kib, "threads": threading.active_count(), "files": files, "groups": groups}


def steps() -> Iterator[None]:
    """Forward and backward passes without end, over so many shapes and meshes in turn."""
    rng = random.Random(0)
    sizes = itertools.cycle([(DEVICES,), (DEVICES // 2, 2), (2, DEVICES // 2)])
    named = (
        [(f"{name}{i}", n) for name, n in zip("ab", next(sizes), strict=False)]
        for i in range(MESHES)
    )
    meshes = [xs.Mesh(dict(axes)) for axes in named]
    shapes = [
        (2 * DEVICES * rng.randint(1, 30), DEVICES * rng.randint(1, 6)) for _ in range(SHAPES)
    ]
    for i in itertools.count():
        mesh = meshes[i % MESHES]
        shape = shapes[i % SHAPES]
        expression = MOVES[i % len(MOVES)].format(a=mesh.axes[0])
        src = xs.Layout(expression.partition(" ->")[0])
        block = torch.ones(src.local_shape(mesh, shape, 0), requires_grad=True)
        torch.autograd.grad(xt.redistribute(block, expression, mesh).sum(), block)
        yield


if __name__ == "__main__":
    # One of the ranks, which send nothing, so that no backend holds anything.
    dist.init_process_group("fake", rank=0, world_size=DEVICES, store=FakeStore())
    running = steps()
    for n in (WARM, STEPS):
        for _ in itertools.islice(running, n):
            pass
        print(held(), flush=True)
