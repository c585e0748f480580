"""AllReduce: a sum, max or min ends in full blocks.

The adjoint of a sum to copies is an all-reduce too; that of a sum to replicas is a retag.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from xshard.layout import Sharding
from xshard.layout.partition import ceil_div
from xshard.steps import base
from xshard.steps.base import Block, Blocks, Step
from xshard.steps.traffic import (
    Hop,
    LinkSpans,
    PairTraffic,
    Traffic,
    pairs_in_groups,
    ring_rounds,
    slowest_first,
)


@dataclass(frozen=True)
class AllReduce(Step):
    """Every device of a group gets the reduction of the group's blocks: "n d | sum(x)" -> "n d".

    axes: axes under the tag `op`; they form the group.
    copies: the axes that hold copies afterwards; the others hold replicas.
    """

    kind: ClassVar[str] = "all_reduce"
    axes: tuple[str, ...]
    op: str = "sum"
    copies: tuple[str, ...] = ()

    def after(self, source: Sharding) -> Sharding:
        layout = base.end_reduction(source.layout, self.axes, self.op)
        return source.with_layout(base.with_replicas_and_copies(layout, self.axes, self.copies))

    def traffic(self, source: Sharding, spans: LinkSpans = ()) -> Traffic:
        group = slowest_first(source.mesh, self.axes, spans)
        return all_reduce_traffic(source.max_local_size, group)

    def pair_traffic(self, source: Sharding) -> tuple[PairTraffic, ...]:
        # Each member sends each other one a share to reduce, then the reduced share.
        elements = ceil_div(2 * source.max_local_size, source.mesh.size(*self.axes))
        return pairs_in_groups(source.mesh, self.axes, elements)

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        results = []
        for device in range(source.mesh.n_devices):
            members = source.mesh.group(device, self.axes)
            addends = [blocks[member] for member in members]
            results.append(base.reduce_blocks(self.op, addends))
        return results

    def __str__(self) -> str:
        return f"all_reduce {self.op}({','.join(self.axes)})"


def all_reduce_traffic(block_elements: int, group: LinkSpans) -> Traffic:
    """Count what one device receives in an all-reduce, in one hop for each speed of links.

    It is a reduce-scatter, fastest links first, and an all-gather back, so that the slowest links
    carry the smallest shares. 8 elements on 2 nodes of 4: inside a node a device receives 6 in the
    reduce-scatter and 6 in the all-gather, and has a share of 2 in between. Of that share it
    receives 1 and 1 between nodes. Messages are counted as in trees: 2 log2(n) among n devices.

    Args:
        block_elements: Elements of each device's block.
        group: The spans (parts of mesh axes over links of one speed) of the axes, the slowest
            first.
    """
    hops = []
    n_shares = 1  # among how many devices the block is shared by the faster links so far
    for span in reversed(group):
        hops.append(
            Hop(
                axis=span.axis,
                received=_received_of(block_elements, n_shares, span.size),
                messages=2 * math.ceil(math.log2(span.size)),
                level=span.level,
            )
        )
        n_shares *= span.size
    return Traffic(
        received=_received_of(block_elements, n_shares=1, n_devices=n_shares),
        hops=tuple(hops),
        ring_rounds=2 * ring_rounds(group),
    )


def _received_of(block_elements: int, n_shares: int, n_devices: int) -> int:
    """Count what a device receives if 1 / `n_shares` of its block is reduced among `n_devices`.

    It is that share but for the device's own part of it, (n - 1) / n, in the reduce-scatter, and as
    much in the all-gather. A whole block of 8 among 4 devices: 6 + 6 = 12.
    """
    return ceil_div(2 * (n_devices - 1) * block_elements, n_devices * n_shares)
