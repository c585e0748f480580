"""AllGather with its dual Slice, AllToAll, and AllReduce and ReduceScatter; the planner finds adjoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import numpy as np

from xshard.errors import PlanError
from xshard.layout import Layout, Sharding
from xshard.notation.parser import Shard
from xshard.steps import base
from xshard.steps.base import Block, Blocks, DimCut, Step, axes_of, even_parts, put_rows, take_rows
from xshard.steps.traffic import (
    Hop,
    LinkSpans,
    PairTraffic,
    Traffic,
    pairs_in_groups,
    rings,
    slowest_first,
)


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
        base.check_even(before, self.dim, self.shards)
        layout = base.without_inner(before.layout, self.dim, self.shards)
        return before.with_layout(base.freed(layout, axes_of(self.shards), self.copies))

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        group = slowest_first(before.mesh, axes_of(self.shards), spans)
        in_place = base.lands_in_place(before, self.dim, self.shards)
        return gather_traffic(before.max_local_size, group, in_place)

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        return pairs_in_groups(before.mesh, axes_of(self.shards), before.max_local_size)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        after = self.after(before)
        at = before.dim_index(self.dim)
        parts = even_parts(before, self.dim, self.shards)
        results = []
        for device in range(before.mesh.n_devices):
            out = np.empty(after.local_shape(device), blocks[device].dtype)
            for part, member in zip(
                parts, before.mesh.group(device, axes_of(self.shards)), strict=True
            ):
                put_rows(out, at, part, blocks[member])
            results.append(out)
        return results

    def __str__(self) -> str:
        return f"all_gather {self.dim}/{base.shards_text(self.shards)}"


def gather_traffic(block: int, group: LinkSpans, in_place: bool) -> Traffic:
    """Traffic of an all-gather of `block` elements: the slowest link first, while blocks are small."""
    whole = block
    hops = []
    for span in rings(group):
        n = span.size
        hops.append(Hop(span.axis, (n - 1) * whole, n - 1, span.level))
        whole *= n
    return Traffic(whole - block, 0 if in_place else whole, tuple(hops), rounds=_rounds(group))


def _rounds(group: LinkSpans) -> int:
    """The rounds of a gather in which the devices of each level pass on what they have, in one ring."""
    return sum(
        math.prod(s.size for s in near) - 1 for _, near in groupby(group, key=lambda s: s.level)
    )


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
            layout = base.with_inner(base.take_free(layout, axes_of(shards)), dim, shards)
        return before.with_layout(layout)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        results = []
        for device, block in enumerate(blocks):
            for dim, shards in self.cuts:
                block = take_rows(
                    block, before.dim_index(dim), base.own_part(before, dim, shards, device)
                )
            results.append(block)
        return results

    def __str__(self) -> str:
        return "slice " + " ".join(f"{dim}/{base.shards_text(shards)}" for dim, shards in self.cuts)


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
        leaves, arrives = (sorted(axes_of(shards)) for shards in (self.src_shards, self.dst_shards))
        if self.src_dim == self.dst_dim or leaves != arrives:
            raise PlanError(f"'{self}' does not move the same axes between two dims")
        base.check_even(before, self.src_dim, self.src_shards)
        base.check_even(before, self.dst_dim, self.dst_shards)
        layout = base.without_inner(before.layout, self.src_dim, self.src_shards)
        return before.with_layout(base.with_inner(layout, self.dst_dim, self.dst_shards))

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        group = slowest_first(before.mesh, axes_of(self.src_shards), spans)
        return all_to_all_traffic(before.max_local_size, group)

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        axes = axes_of(self.src_shards)
        return pairs_in_groups(before.mesh, axes, before.max_local_size // before.mesh.size(*axes))

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        mesh = before.mesh
        after = self.after(before)
        src = before.dim_index(self.src_dim)
        dst = before.dim_index(self.dst_dim)
        src_parts = even_parts(before, self.src_dim, self.src_shards)
        dst_parts = even_parts(before, self.dst_dim, self.dst_shards)
        results = []
        for device in range(mesh.n_devices):
            out = np.empty(after.local_shape(device), blocks[device].dtype)
            mine = dst_parts[mesh.index(device, axes_of(self.dst_shards))]
            for part, member in zip(
                src_parts, mesh.group(device, axes_of(self.src_shards)), strict=True
            ):
                put_rows(out, src, part, take_rows(blocks[member], dst, mine))
            results.append(out)
        return results

    def __str__(self) -> str:
        src = base.shards_text(self.src_shards)
        dst = base.shards_text(self.dst_shards)
        return f"all_to_all {self.src_dim}/{src} -> {self.dst_dim}/{dst}"


def all_to_all_traffic(block: int, group: LinkSpans) -> Traffic:
    """Traffic of an all-to-all of blocks of `block` elements; each span carries what differs along it."""
    left = math.prod(span.size for span in group)
    piece = block // left
    hops = []
    for span in group:
        peers = left - left // span.size
        hops.append(Hop(span.axis, peers * piece, peers, span.level))
        left //= span.size
    return Traffic(block - piece, 2 * block, tuple(hops))


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
        return before.with_layout(base.freed(layout, self.axes, self.copies))

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        return all_reduce_traffic(
            before.max_local_size, slowest_first(before.mesh, self.axes, spans)
        )

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        share = -(
            -2 * before.max_local_size // before.mesh.size(*self.axes)
        )  # scattered, then gathered
        return pairs_in_groups(before.mesh, self.axes, share)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        mesh = before.mesh
        groups = (mesh.group(device, self.axes) for device in range(mesh.n_devices))
        return [
            base.reduce_blocks(self.op, [blocks[member] for member in group]) for group in groups
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
        base.check_even(before, self.dim, self.shards)
        return before.with_layout(base.with_inner(layout, self.dim, self.shards))

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        group = slowest_first(before.mesh, axes_of(self.shards), spans)
        in_place = base.lands_in_place(before, self.dim, self.shards)
        return reduce_scatter_traffic(before.max_local_size, group, in_place)

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        return pairs_in_groups(before.mesh, axes_of(self.shards), self.after(before).max_local_size)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        mesh = before.mesh
        d = before.dim_index(self.dim)
        axes = axes_of(self.shards)
        parts = even_parts(before, self.dim, self.shards)
        results = []
        for device in range(mesh.n_devices):
            part = parts[mesh.index(device, axes)]
            addends = [take_rows(blocks[member], d, part) for member in mesh.group(device, axes)]
            results.append(base.reduce_blocks(self.op, addends))
        return results

    def __str__(self) -> str:
        return f"reduce_scatter {self.op} -> {self.dim}/{base.shards_text(self.shards)}"


def all_reduce_traffic(block: int, group: LinkSpans) -> Traffic:
    """Traffic of an all-reduce: reduce-scatter, fastest link first, and all-gather back, by a tree."""
    hops = []
    n = 1
    for span in reversed(group):
        size = span.size
        received = -(-2 * (size - 1) * block // (size * n))
        hops.append(Hop(span.axis, received, 2 * math.ceil(math.log2(size)), span.level))
        n *= size
    return Traffic(-(-2 * (n - 1) * block // n), 0, tuple(hops), rounds=2 * _rounds(group))


def reduce_scatter_traffic(block: int, group: LinkSpans, in_place: bool) -> Traffic:
    """Traffic of a reduce-scatter: a gather backwards, so that the slowest link carries small pieces."""
    back = gather_traffic(block // math.prod(span.size for span in group), group, in_place)
    return back._replace(copied=0 if in_place else block, hops=back.hops[::-1])


def _reduced_layout(layout: Layout, axes: tuple[str, ...], op: str) -> Layout:
    if not axes or not set(axes) <= set(layout.tagged(op)):
        raise PlanError(f"no {op}({','.join(axes)}) to reduce in '{layout}'")
    return base.without_tags(layout, axes)
