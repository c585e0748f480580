"""ReduceScatter: a sum, max or min ends in shards.

Its dual is the all-gather to copies, of which it is the adjoint for a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from xshard.layout import Sharding
from xshard.notation.parser import Shard
from xshard.steps import base
from xshard.steps.all_gather import gather_traffic
from xshard.steps.base import Block, Blocks, Step, axes_of, even_parts, take_rows
from xshard.steps.traffic import LinkSpans, PairTraffic, Traffic, pairs_in_groups, slowest_first


@dataclass(frozen=True)
class ReduceScatter(Step):
    """Every device of a group gets its part of the group's reduction: "n d | sum(x)" -> "n/x d".

    shards: the new innermost shards of `dim`, over axes under the tag `op`; they form the group.
    """

    kind: ClassVar[str] = "reduce_scatter"
    dim: str
    shards: tuple[Shard, ...]
    op: str = "sum"

    def after(self, source: Sharding) -> Sharding:
        layout = base.end_reduction(source.layout, axes_of(self.shards), self.op)
        base.check_even(source, self.dim, self.shards)
        return source.with_layout(base.with_inner(layout, self.dim, self.shards))

    def traffic(self, source: Sharding, spans: LinkSpans = ()) -> Traffic:
        group = slowest_first(source.mesh, axes_of(self.shards), spans)
        in_place = base.lands_in_place(source, self.dim, self.shards)
        return reduce_scatter_traffic(source.max_local_size, group, in_place)

    def pair_traffic(self, source: Sharding) -> tuple[PairTraffic, ...]:
        return pairs_in_groups(source.mesh, axes_of(self.shards), self.after(source).max_local_size)

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        """Reduce, over the members of each device's group, the part that the device keeps."""
        mesh = source.mesh
        dim = source.dim_index(self.dim)
        axes = axes_of(self.shards)
        rows_of_members = even_parts(source, self.dim, self.shards)
        results = []
        for device in range(mesh.n_devices):
            own_rows = rows_of_members[mesh.index(device, axes)]
            members = mesh.group(device, axes)
            addends = [take_rows(blocks[member], dim, own_rows) for member in members]
            results.append(base.reduce_blocks(self.op, addends))
        return results

    def __str__(self) -> str:
        return f"reduce_scatter {self.op} -> {self.dim}/{base.shards_text(self.shards)}"


def reduce_scatter_traffic(block_elements: int, group: LinkSpans, in_place: bool) -> Traffic:
    """Count the traffic of a reduce-scatter.

    It is a gather of its results backwards, fastest links first.

    Args:
        block_elements: Elements of each block before.
        group: The spans of the group's axes, the slowest first.
        in_place: The parts lie one after the other in memory, and need no packing.
    """
    n_parts = math.prod(span.size for span in group)
    gather = gather_traffic(block_elements // n_parts, group, in_place)
    copied = 0 if in_place else block_elements
    return gather._replace(copied=copied, hops=gather.hops[::-1])
