"""AllReduce and ReduceScatter: partial values become values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from xshard.errors import PlanError
from xshard.layout import Layout, Sharding
from xshard.notation.parser import Shard
from xshard.steps.base import (
    Block,
    Blocks,
    Step,
    axes_of,
    check_even,
    even_parts,
    freed,
    lands_in_place,
    reduce_blocks,
    shards_text,
    take_rows,
    with_inner,
    without_tags,
)
from xshard.steps.traffic import Hop, LinkSpans, PairTraffic, Traffic, pairs_in_groups, rings, slowest_first


@dataclass(frozen=True)
class AllReduce(Step):
    """Every device of a group gets the reduction of the group's blocks.

    axes: axes under the tag `op`; they form the group.
    copies: the axes that hold copies afterwards; the others hold replicas.
    """

    kind: ClassVar[str] = "all_reduce"
    axes: tuple[str, ...]
    op: str = "sum"
    copies: tuple[str, ...] = ()

    def after(self, before: Sharding) -> Sharding:
        layout = _reduced_layout(before.layout, self.axes, self.op)
        return before.with_layout(freed(layout, self.axes, self.copies))

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        return all_reduce_traffic(before.max_local_size, slowest_first(before.mesh, self.axes, spans))

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        share = -(-2 * before.max_local_size // before.mesh.size(*self.axes))  # scattered, then gathered
        return pairs_in_groups(before.mesh, self.axes, share)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        mesh = before.mesh
        return [
            reduce_blocks(self.op, [blocks[member] for member in mesh.group(device, self.axes)])
            for device in range(mesh.n_devices)
        ]

    def __str__(self) -> str:
        return f"all_reduce {self.op}({','.join(self.axes)})"


@dataclass(frozen=True)
class ReduceScatter(Step):
    """Every device of a group gets its part of the reduction of the group's blocks.

    shards: the new innermost shards of `dim`, over axes under the tag `op`; they form the group.
    """

    kind: ClassVar[str] = "reduce_scatter"
    dim: str
    shards: tuple[Shard, ...]
    op: str = "sum"

    def after(self, before: Sharding) -> Sharding:
        layout = _reduced_layout(before.layout, axes_of(self.shards), self.op)
        check_even(before, self.dim, self.shards)
        return before.with_layout(with_inner(layout, self.dim, self.shards))

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        group = slowest_first(before.mesh, axes_of(self.shards), spans)
        in_place = lands_in_place(before, self.dim, self.shards)
        return reduce_scatter_traffic(before.max_local_size, group, in_place)

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        return pairs_in_groups(before.mesh, axes_of(self.shards), self.after(before).max_local_size)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        mesh, at, axes = before.mesh, before.dim_index(self.dim), axes_of(self.shards)
        parts = even_parts(before, self.dim, self.shards)
        return [
            reduce_blocks(
                self.op,
                [take_rows(blocks[m], at, parts[mesh.index(device, axes)]) for m in mesh.group(device, axes)],
            )
            for device in range(mesh.n_devices)
        ]

    def __str__(self) -> str:
        return f"reduce_scatter {self.op} -> {self.dim}/{shards_text(self.shards)}"


def all_reduce_traffic(block: int, group: LinkSpans) -> Traffic:
    """Traffic of an all-reduce: reduce-scatter, fastest link first, and all-gather back, by a tree."""
    hops, n = [], 1
    for span in reversed(group):
        size = span.size
        received = -(-2 * (size - 1) * block // (size * n))
        hops.append(Hop(span.axis, received, 2 * math.ceil(math.log2(size)), span.level))
        n *= size
    return Traffic(-(-2 * (n - 1) * block // n), 0, tuple(hops))


def reduce_scatter_traffic(block: int, group: LinkSpans, in_place: bool) -> Traffic:
    """Traffic of a reduce-scatter: the fastest link first, so that the slowest carries small pieces."""
    piece, hops = block, []
    for span in reversed(rings(group)):
        n = span.size
        piece //= n
        hops.append(Hop(span.axis, (n - 1) * piece, n - 1, span.level))
    return Traffic(block - piece, 0 if in_place else block, tuple(hops))


def _reduced_layout(layout: Layout, axes: tuple[str, ...], op: str) -> Layout:
    if not axes or not set(axes) <= set(layout.tagged(op)):
        raise PlanError(f"no {op}({','.join(axes)}) to reduce in '{layout}'")
    return without_tags(layout, axes)
