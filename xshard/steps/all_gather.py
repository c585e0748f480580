"""AllGather and its dual Slice: blocks are concatenated, or each device keeps its part.

The adjoint of a gather to replicas is a slice; to copies, whose cotangents add up, a
reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.notation.parser import Shard
from xshard.steps import base
from xshard.steps.base import Block, Blocks, DimCut, Step, axes_of, even_parts, put_rows, take_rows
from xshard.steps.traffic import (
    Hop,
    LinkSpans,
    PairTraffic,
    Traffic,
    pairs_in_groups,
    ring_rounds,
    rings,
    slowest_first,
)


@dataclass(frozen=True)
class AllGather(Step):
    """Every device of a group gets the group's blocks, concatenated along `dim`: "n/x d" -> "n d".

    shards: the innermost shards of `dim`, which are removed; their axes form the group.
    copies: the axes that hold copies afterwards; the others hold replicas.
    """

    kind: ClassVar[str] = "all_gather"
    dim: str
    shards: tuple[Shard, ...]
    copies: tuple[str, ...] = ()

    def after(self, source: Sharding) -> Sharding:
        base.check_even(source, self.dim, self.shards)  # a collective sends pieces of one size
        layout = base.without_inner(source.layout, self.dim, self.shards)
        return source.with_layout(
            base.with_replicas_and_copies(layout, axes_of(self.shards), self.copies)
        )

    def traffic(self, source: Sharding, spans: LinkSpans = ()) -> Traffic:
        group = slowest_first(source.mesh, axes_of(self.shards), spans)
        in_place = base.lands_in_place(source, self.dim, self.shards)
        return gather_traffic(source.max_local_size, group, in_place)

    def pair_traffic(self, source: Sharding) -> tuple[PairTraffic, ...]:
        return pairs_in_groups(source.mesh, axes_of(self.shards), source.max_local_size)

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        """Put the block of each member of the group where its shard lies in the larger block."""
        target = self.after(source)
        dim = source.dim_index(self.dim)
        rows_of_members = even_parts(source, self.dim, self.shards)
        results = []
        for device in range(source.mesh.n_devices):
            # `empty`: the parts of all members together are the whole block.
            out = np.empty(target.local_shape(device), blocks[device].dtype)
            members = source.mesh.group(device, axes_of(self.shards))
            for member_rows, member in zip(rows_of_members, members, strict=True):
                put_rows(out, dim, member_rows, blocks[member])
            results.append(out)
        return results

    def __str__(self) -> str:
        return f"all_gather {self.dim}/{base.shards_text(self.shards)}"


def gather_traffic(block_elements: int, group: LinkSpans, in_place: bool) -> Traffic:
    """Count what one device receives in an all-gather, in one hop for each speed of links.

    The slowest links come first, while blocks are small. Blocks of 3 elements on 2 nodes of 4: the
    hop between nodes brings 1 x 3 elements, the hop inside brings 3 x 6, and 24 are there at last.

    Args:
        block_elements: Elements of each device's block before.
        group: The spans (parts of mesh axes over links of one speed) of the axes, the slowest
            first.
        in_place: Whether the result is just the blocks one after the other, with nothing to copy.
    """
    gathered = block_elements
    hops = []
    for span in rings(group):
        n_others = span.size - 1
        hops.append(
            Hop(
                axis=span.axis,
                received=n_others * gathered,
                messages=n_others,
                level=span.level,
            )
        )
        gathered *= span.size
    return Traffic(
        received=gathered - block_elements,
        copied=0 if in_place else gathered,
        hops=tuple(hops),
        ring_rounds=ring_rounds(group),
    )


@dataclass(frozen=True)
class Slice(Step):
    """Every device keeps its own part of some dims, a local copy: "n d" -> "n/x d".

    cuts: (dim, its new innermost shards), over axes that hold replicas or copies before.
    """

    kind: ClassVar[str] = "slice"
    cuts: tuple[DimCut, ...]

    def after(self, source: Sharding) -> Sharding:
        layout = source.layout
        if len(dict(self.cuts)) < len(self.cuts):
            raise PlanError(f"'{self}' cuts a dim twice: one cut may have several shards")
        for dim, shards in self.cuts:
            layout = base.take_free(layout, axes_of(shards))
            layout = base.with_inner(layout, dim, shards)
        return source.with_layout(layout)

    def run(self, blocks: Blocks, source: Sharding) -> list[Block]:
        results = []
        for device, block in enumerate(blocks):
            for dim, shards in self.cuts:
                member_rows = base.rows_of_own_part(source, dim, shards, device)
                block = take_rows(block, source.dim_index(dim), member_rows)
            results.append(block)
        return results

    def __str__(self) -> str:
        cuts = [f"{dim}/{base.shards_text(shards)}" for dim, shards in self.cuts]
        return "slice " + " ".join(cuts)
