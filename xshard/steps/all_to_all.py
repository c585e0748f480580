"""AllToAll: axes move from one dim to another. Its adjoint, an all-to-all too, moves them back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.notation.parser import Shard
from xshard.steps import base
from xshard.steps.base import Block, Blocks, Step, axes_of, even_parts, put_rows, take_rows
from xshard.steps.traffic import (
    Hop,
    LinkSpans,
    PairTraffic,
    Traffic,
    pairs_in_groups,
    slowest_first,
)


@dataclass(frozen=True)
class AllToAll(Step):
    """Every device sends each member of its group that member's part of `dst_dim`.

    Axes move from one dim to another, as in "s/x c" -> "s c/x".

    src_shards: the innermost shards of `src_dim`, which are removed; their axes form the group.
    dst_shards: the new innermost shards of `dst_dim`, over the same axes, in any order.
    """

    kind: ClassVar[str] = "all_to_all"
    src_dim: str
    src_shards: tuple[Shard, ...]
    dst_dim: str
    dst_shards: tuple[Shard, ...]

    def after(self, source: Sharding) -> Sharding:
        has_same_axes = sorted(axes_of(self.src_shards)) == sorted(axes_of(self.dst_shards))
        if self.src_dim == self.dst_dim or not has_same_axes:
            raise PlanError(f"'{self}' does not move the same axes between two dims")
        base.check_even(source, self.src_dim, self.src_shards)
        base.check_even(source, self.dst_dim, self.dst_shards)
        layout = base.without_inner(source.layout, self.src_dim, self.src_shards)
        return source.with_layout(base.with_inner(layout, self.dst_dim, self.dst_shards))

    def traffic(self, source: Sharding, spans: LinkSpans = ()) -> Traffic:
        group = slowest_first(source.mesh, axes_of(self.src_shards), spans)
        return all_to_all_traffic(source.max_local_size, group)

    def pair_traffic(self, source: Sharding) -> tuple[PairTraffic, ...]:
        axes = axes_of(self.src_shards)
        return pairs_in_groups(source.mesh, axes, source.max_local_size // source.mesh.size(*axes))

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        """Run the all-to-all in numpy: one block per device in, one per device out.

        From each member of its group a device takes its own part of `dst_dim`, and puts it where
        that member's shard of `src_dim` lies. "s/x c" -> "s c/x" on x=2, [2, 4] -> [4, 2]: device 1
        takes columns 2-3 of both members, those of device 0 as rows 0-1, its own as rows 2-3.
        """
        mesh = source.mesh
        target = self.after(source)
        src_dim = source.dim_index(self.src_dim)
        dst_dim = source.dim_index(self.dst_dim)
        src_rows_of_members = even_parts(source, self.src_dim, self.src_shards)
        dst_rows_of_members = even_parts(source, self.dst_dim, self.dst_shards)
        results = []
        for device in range(mesh.n_devices):
            out = np.empty(target.local_shape(device), blocks[device].dtype)
            own_rows = dst_rows_of_members[mesh.index(device, axes_of(self.dst_shards))]
            members = mesh.group(device, axes_of(self.src_shards))
            for src_rows, member in zip(src_rows_of_members, members, strict=True):
                chunk = take_rows(blocks[member], dst_dim, own_rows)
                put_rows(out, src_dim, src_rows, chunk)
            results.append(out)
        return results

    def __str__(self) -> str:
        src = base.shards_text(self.src_shards)
        dst = base.shards_text(self.dst_shards)
        return f"all_to_all {self.src_dim}/{src} -> {self.dst_dim}/{dst}"


def all_to_all_traffic(block_elements: int, group: LinkSpans) -> Traffic:
    """Count what one device receives in an all-to-all, in one hop for each speed of links.

    Each of n devices sends 1/n of its block to each other device. 16 elements on 2 nodes of 4: pieces
    of 2 elements from 4 devices of the other node, and from 3 in its own. `group` has the spans (parts
    of mesh axes over links of one speed), the slowest first.
    """
    n_devices = math.prod(span.size for span in group)
    chunk_elements = block_elements // n_devices
    hops = []
    n_sharing = n_devices  # devices at the same position on all slower spans: 8, 4, 1 above
    for span in group:
        n_same_span = n_sharing // span.size  # those at the same position on this span too
        n_peers = n_sharing - n_same_span
        hops.append(
            Hop(
                axis=span.axis,
                received=n_peers * chunk_elements,
                messages=n_peers,
                level=span.level,
            )
        )
        n_sharing = n_same_span
    return Traffic(
        received=block_elements - chunk_elements,
        # Pieces are packed before they are sent, and unpacked from where they arrive.
        copied=2 * block_elements,
        hops=tuple(hops),
    )
