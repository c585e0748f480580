"""AllGather and Slice, which are dual: shards become replicas, replicas become shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from xshard.layout import Sharding
from xshard.notation.parser import Shard
from xshard.steps.base import (
    Block,
    Blocks,
    DimCut,
    Step,
    axes_of,
    check_even,
    even_parts,
    freed,
    lands_in_place,
    own_part,
    put_rows,
    shards_text,
    take_free,
    take_rows,
    with_inner,
    without_inner,
)
from xshard.steps.traffic import Hop, LinkSpans, PairTraffic, Traffic, pairs_in_groups, rings, slowest_first


@dataclass(frozen=True)
class AllGather(Step):
    """Every device of a group gets the group's blocks, concatenated along `dim`.

    shards: the innermost shards of `dim`, which are removed; their axes form the group.
    copies: the axes that hold copies afterwards; the others hold replicas.
    """

    kind: ClassVar[str] = "all_gather"
    dim: str
    shards: tuple[Shard, ...]
    copies: tuple[str, ...] = ()

    def after(self, before: Sharding) -> Sharding:
        check_even(before, self.dim, self.shards)
        layout = without_inner(before.layout, self.dim, self.shards)
        return before.with_layout(freed(layout, axes_of(self.shards), self.copies))

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        group = slowest_first(before.mesh, axes_of(self.shards), spans)
        return gather_traffic(before.max_local_size, group, lands_in_place(before, self.dim, self.shards))

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        return pairs_in_groups(before.mesh, axes_of(self.shards), before.max_local_size)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        after, at = self.after(before), before.dim_index(self.dim)
        parts = even_parts(before, self.dim, self.shards)
        results = []
        for device in range(before.mesh.n_devices):
            out = np.empty(after.local_shape(device), blocks[device].dtype)
            for part, member in zip(parts, before.mesh.group(device, axes_of(self.shards)), strict=True):
                put_rows(out, at, part, blocks[member])
            results.append(out)
        return results

    def __str__(self) -> str:
        return f"all_gather {self.dim}/{shards_text(self.shards)}"


def gather_traffic(block: int, group: LinkSpans, in_place: bool) -> Traffic:
    """Traffic of an all-gather of `block` elements: the slowest link first, while blocks are small."""
    whole, hops = block, []
    for span in rings(group):
        n = span.size
        hops.append(Hop(span.axis, (n - 1) * whole, n - 1, span.level))
        whole *= n
    return Traffic(whole - block, 0 if in_place else whole, tuple(hops))


@dataclass(frozen=True)
class Slice(Step):
    """Every device keeps its own part of some dims: one local copy, no communication.

    cuts: (dim, its new innermost shards), over axes that hold replicas or copies before.
    """

    kind: ClassVar[str] = "slice"
    cuts: tuple[DimCut, ...]

    def after(self, before: Sharding) -> Sharding:
        layout = before.layout
        for dim, shards in self.cuts:
            layout = with_inner(take_free(layout, axes_of(shards)), dim, shards)
        return before.with_layout(layout)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        results = []
        for device, block in enumerate(blocks):
            for dim, shards in self.cuts:
                block = take_rows(block, before.dim_index(dim), own_part(before, dim, shards, device))
            results.append(block)
        return results

    def __str__(self) -> str:
        return "slice " + " ".join(f"{dim}/{shards_text(shards)}" for dim, shards in self.cuts)
