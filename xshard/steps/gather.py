"""AllGather and Slice: a cut becomes replicas by communication, replicas become a cut for free.

Duals: the adjoint of an all-gather into replicas is a slice, and the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from xshard.notation import Shard
from xshard.sharding import Sharding
from xshard.steps.base import (
    Block,
    Blocks,
    Hop,
    Levels,
    Step,
    Traffic,
    axes_of,
    check_even,
    even_parts,
    freed,
    lands_in_place,
    names,
    place,
    slow_first,
    take,
    take_free,
    with_inner,
    without_inner,
)


@dataclass(frozen=True)
class AllGather(Step):
    """Every device of a group gets the group's blocks, put together along `dim`.

    shards: the innermost cuts of `dim`, which go; their axes form the group.
    copies: those of the axes that hold copies afterwards; the others hold replicas.
    """

    kind: ClassVar[str] = "all_gather"
    dim: str
    shards: tuple[Shard, ...]
    copies: tuple[str, ...] = ()

    def after(self, before: Sharding) -> Sharding:
        check_even(before, self.dim, self.shards)
        layout = without_inner(before.layout, self.dim, self.shards)
        return before.with_layout(freed(layout, axes_of(self.shards), self.copies))

    def traffic(self, before: Sharding, levels: Levels = ()) -> Traffic:
        group = slow_first(before.mesh, axes_of(self.shards), levels)
        return gather_traffic(before.max_local_size, group, lands_in_place(before, self.dim, self.shards))

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        after, at = self.after(before), before.dim_index(self.dim)
        parts = even_parts(before, self.dim, self.shards)
        results = []
        for device in range(before.mesh.n_devices):
            out = np.empty(after.local_shape(device), blocks[device].dtype)
            for part, member in zip(parts, before.mesh.group(device, axes_of(self.shards)), strict=True):
                place(out, at, part, blocks[member])
            results.append(out)
        return results

    def __str__(self) -> str:
        return f"all_gather {self.dim}/{names(self.shards)}"


def gather_traffic(block: int, group: Sequence[tuple[str, int]], in_place: bool) -> Traffic:
    """Traffic of an all-gather of blocks of `block` elements over axes (name, size), slowest first.

    The slowest link comes first, while blocks are small.
    """
    whole, hops = block, []
    for axis, n in group:
        hops.append(Hop(axis, (n - 1) * whole, n - 1))
        whole *= n
    return Traffic(whole - block, 0 if in_place else whole, tuple(hops))


@dataclass(frozen=True)
class Slice(Step):
    """Every device keeps its own part of `dim`; nothing is sent.

    shards: the new innermost cuts of `dim`, over axes that held replicas or copies.
    """

    kind: ClassVar[str] = "slice"
    dim: str
    shards: tuple[Shard, ...]

    def after(self, before: Sharding) -> Sharding:
        layout = take_free(before.layout, axes_of(self.shards))
        return before.with_layout(with_inner(layout, self.dim, self.shards))

    def traffic(self, before: Sharding, levels: Levels = ()) -> Traffic:
        return Traffic(copied=self.after(before).max_local_size)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        at, axes = before.dim_index(self.dim), axes_of(self.shards)
        return [
            take(block, at, before.parts(at, self.shards, device)[before.mesh.index(device, axes)])
            for device, block in enumerate(blocks)
        ]

    def __str__(self) -> str:
        return f"slice {self.dim}/{names(self.shards)}"
