"""AllToAll: a sharding moves from one dim to another. Its adjoint is the same move back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.notation.parser import Shard
from xshard.steps.base import (
    Block,
    Blocks,
    Step,
    axes_of,
    check_even,
    even_parts,
    put_rows,
    shards_text,
    take_rows,
    with_inner,
    without_inner,
)
from xshard.steps.traffic import Hop, LinkSpans, PairTraffic, Traffic, pairs_in_groups, slowest_first


@dataclass(frozen=True)
class AllToAll(Step):
    """Every device sends each member of its group that member's part of `dst_dim`.

    src_shards: the innermost shards of `src_dim`, which are removed; their axes form the group.
    dst_shards: the new innermost shards of `dst_dim`, over the same axes, in any order.
    """

    kind: ClassVar[str] = "all_to_all"
    src_dim: str
    src_shards: tuple[Shard, ...]
    dst_dim: str
    dst_shards: tuple[Shard, ...]

    def after(self, before: Sharding) -> Sharding:
        if self.src_dim == self.dst_dim or sorted(axes_of(self.src_shards)) != sorted(
            axes_of(self.dst_shards)
        ):
            raise PlanError(f"'{self}' does not move the same axes between two dims")
        check_even(before, self.src_dim, self.src_shards)
        check_even(before, self.dst_dim, self.dst_shards)
        layout = without_inner(before.layout, self.src_dim, self.src_shards)
        return before.with_layout(with_inner(layout, self.dst_dim, self.dst_shards))

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        group = slowest_first(before.mesh, axes_of(self.src_shards), spans)
        return all_to_all_traffic(before.max_local_size, group)

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        axes = axes_of(self.src_shards)
        return pairs_in_groups(before.mesh, axes, before.max_local_size // before.mesh.size(*axes))

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        mesh, after = before.mesh, self.after(before)
        src, dst = before.dim_index(self.src_dim), before.dim_index(self.dst_dim)
        src_parts = even_parts(before, self.src_dim, self.src_shards)
        dst_parts = even_parts(before, self.dst_dim, self.dst_shards)
        results = []
        for device in range(mesh.n_devices):
            out = np.empty(after.local_shape(device), blocks[device].dtype)
            mine = dst_parts[mesh.index(device, axes_of(self.dst_shards))]
            for part, member in zip(src_parts, mesh.group(device, axes_of(self.src_shards)), strict=True):
                put_rows(out, src, part, take_rows(blocks[member], dst, mine))
            results.append(out)
        return results

    def __str__(self) -> str:
        src, dst = shards_text(self.src_shards), shards_text(self.dst_shards)
        return f"all_to_all {self.src_dim}/{src} -> {self.dst_dim}/{dst}"


def all_to_all_traffic(block: int, group: LinkSpans) -> Traffic:
    """Traffic of an all-to-all of blocks of `block` elements; each span carries what differs along it."""
    left = math.prod(span.size for span in group)
    piece, hops = block // left, []
    for span in group:
        peers = left - left // span.size
        hops.append(Hop(span.axis, peers * piece, peers, span.level))
        left //= span.size
    return Traffic(block - piece, 2 * block, tuple(hops))
