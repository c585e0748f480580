"""Permute: whole blocks change devices. Its adjoint is the inverse permutation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from xshard.caches import layout_cache
from xshard.errors import PlanError
from xshard.layout import Layout, Sharding
from xshard.steps.base import REDUCERS, Block, Blocks, Step, without_tags
from xshard.steps.traffic import Hop, LinkSpans, PairTraffic, Traffic, slowest_first


@dataclass(frozen=True)
class Permute(Step):
    """Every device gets the whole block of one device, so that layout `to` results."""

    kind: ClassVar[str] = "permute"
    to: Layout

    def after(self, before: Sharding) -> Sharding:
        after = before.with_layout(self.to)
        sums, sums_after = (
            without_tags(s.layout, s.layout.tagged("copy")).tags for s in (before, after)
        )
        if sums != sums_after:
            raise PlanError(f"a permutation keeps sums: '{before.layout}' -> '{self.to}'")
        if before.even_cuts is None or after.even_cuts is None:
            senders(before, after)  # raises where blocks differ
        elif before.max_local_shape != after.max_local_shape:
            raise PlanError(
                f"no permutation of blocks leads from '{before.layout}' to '{after.layout}'"
            )
        return after

    def traffic(self, before: Sharding, spans: LinkSpans = ()) -> Traffic:
        moved = [a for a in before.mesh.axes if before.layout.role(a) != self.to.role(a)]
        return permute_traffic(before.max_local_size, slowest_first(before.mesh, moved, spans))

    def pair_traffic(self, before: Sharding) -> tuple[PairTraffic, ...]:
        block = before.max_local_size
        pairs = enumerate(senders(before, before.with_layout(self.to)))
        return tuple(PairTraffic(src, dst, block) for dst, src in pairs if src != dst)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        return [blocks[s].copy() for s in senders(before, before.with_layout(self.to))]

    def __str__(self) -> str:
        return "permute"


def permute_traffic(block: int, moved: LinkSpans) -> Traffic:
    """Traffic of a permutation over `moved`, the axes with another role afterwards."""
    if not moved:
        return Traffic()
    axis = moved[0].axis
    level = moved[0].level
    far, near = (
        math.prod(s.size for s in moved if (s.level == level) == is_far) for is_far in (True, False)
    )
    return Traffic(block, 0, (Hop(axis, block, 1, level, 0 if near % far else block // far),))


@layout_cache(maxsize=1024)
def senders(before: Sharding, after: Sharding) -> tuple[int, ...]:
    """For every device, the sender of its block along axes that change roles; PlanError if blocks differ."""
    mesh = before.mesh
    still = [a for a in mesh.axes if before.layout.role(a) == after.layout.role(a)]
    holders: dict[tuple[object, ...], list[int]] = defaultdict(list)
    receivers: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for device, (held, wanted) in enumerate(
        zip(block_keys(before), block_keys(after), strict=True)
    ):
        here = mesh.index(device, still)
        holders[here, *held].append(device)
        receivers[here, *wanted].append(device)
    result = [-1] * mesh.n_devices
    for key, takers in receivers.items():
        givers = holders.get(key, [])
        if len(givers) != len(takers):
            raise PlanError(
                f"no permutation of blocks leads from '{before.layout}' to '{after.layout}'"
            )
        stay = set(takers) & set(givers)
        movers = zip(
            (t for t in takers if t not in stay), (g for g in givers if g not in stay), strict=True
        )
        for taker, giver in [*((d, d) for d in stay), *movers]:
            result[taker] = giver
    return tuple(result)


def block_keys(sharding: Sharding) -> Iterator[tuple[object, ...]]:
    """Keys of every device's block: its number among the addends of a sum, and its rows along every dim."""
    mesh = sharding.mesh
    partial = sorted(sharding.layout.tagged(*REDUCERS), key=mesh.position)
    holders = [sharding.holders(d) for d in range(len(sharding.shape))]
    for device in range(mesh.n_devices):
        rows = (blocks[sharding.dim_device(d, device)] for d, blocks in enumerate(holders))
        yield mesh.index(device, partial), *rows
