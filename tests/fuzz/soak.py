"""Redistributions in a loop: memory, threads, open files and process groups must not grow.

`python -m tests.fuzz.soak` runs all.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_bridge as xt
import xshard as xs

MOVES = ("n/{a} d -> n d", "n/{a} d -> n d/{a}", "n/{a} d -> n/zigzag({a}) d", "n d | sum({a}) -> n/{a} d")


@dataclass(frozen=True)
class Held:
    """The memory, threads, files and groups of a process."""

    kib: int
    threads: int
    files: int
    groups: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        status = Path("/proc/self/status").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        groups = len(c10d._world.pg_map)
        return cls(kib, threading.active_count(), len(os.listdir("/proc/self/fd")), groups)


def torch_steps(devices: int, shapes: int, meshes: int, seed: int = 0) -> Iterator[Callable[[], None]]:
    """Forward and backward passes without end, over so many shapes and meshes in turn."""
    rng = random.Random(seed)
    sizes = [tuple(s) for s in ((devices,), (devices // 2, 2), (2, devices // 2)) if 0 not in s]
    grids = [
        xs.Mesh({f"a{i}": n, **({f"b{i}": other[0]} if other else {})})
        for i, (n, *other) in zip(range(meshes), itertools.cycle(sizes), strict=False)
    ]
    lengths = [(2 * devices * rng.randint(1, 30), devices * rng.randint(1, 6)) for _ in range(shapes)]
    for i in itertools.count():
        mesh, shape = grids[i % meshes], lengths[i % shapes]
        expression = MOVES[i % len(MOVES)].format(a=mesh.axes[0])
        src = xs.Layout(expression.partition(" ->")[0])
        block = torch.ones(src.local_shape(mesh, shape, 0), requires_grad=True)

        def step(block=block, expression=expression, mesh=mesh) -> None:
            torch.autograd.grad(xt.redistribute(block, expression, mesh).sum(), block)

        yield step


def soak(steps: Iterator[Callable[[], None]], warm: int, n: int) -> tuple[Held, Held]:
    """The process after `warm` steps, and after `n` more."""
    for _ in range(warm):
        next(steps)()
    before = Held.now()
    for _ in range(n):
        next(steps)()
    return before, Held.now()


def alone(devices: int, shapes: int, meshes: int, warm: int, n: int) -> tuple[Held, Held]:
    """On one of so many ranks that send nothing, so that no backend holds anything."""
    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    return soak(torch_steps(devices, shapes, meshes), warm, n)


if __name__ == "__main__":
    before, after = alone(8, shapes=500, meshes=50, warm=20_000, n=200_000)
    print(before, after, f"memory {after.kib / before.kib - 1:+.2%}", sep="\n")
