"""The plan of a tree: what every array there is made of, which arrays travel together, and what that costs.

Decides what a plan of a tree says of itself, in bytes, messages and as a table. Knows no rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from xshard.cost.bounds import lacking_elements
from xshard.cost.model import Profile
from xshard.formatting import align_columns, format_bytes
from xshard.layout import Mesh, Sharding
from xshard.plans.plan import Plan
from xshard.plans.table import device_ranges
from xshard.plans.transfer import Transfer
from xshard.state.parts import CutPart


class SourceArray(NamedTuple):
    """An array here."""

    sharding: Sharding
    dtype: str


class PartMove(NamedTuple):
    """A part of the array `name` here becomes a part of one there.

    plan: between the parts as arrays of their own, one of its steps a `Transfer`.
    """

    name: str
    src: CutPart
    dst: CutPart
    plan: Plan

    @property
    def transfer(self) -> Transfer:
        assert self.plan.transfer is not None
        return self.plan.transfer


@dataclass(frozen=True)
class ArrayPlan:
    """An array there, and the moves that make it. dtype: there; a move's plan has that which travels."""

    name: str
    sharding: Sharding
    dtype: str
    moves: tuple[PartMove, ...]

    @cached_property
    def traffic(self) -> Counter[tuple[int, int]]:
        """Bytes by (sender, receiver), as numbers of devices."""
        found: Counter[tuple[int, int]] = Counter()
        for plan in (move.plan for move in self.moves):
            devices = [plan.src_devices] * 2
            for stage in plan.stages:
                if stage.step is plan.transfer:
                    devices[1] = plan.dst_devices
                for pair in stage.step.pair_traffic(stage.before):
                    found[devices[0][pair.src], devices[1][pair.dst]] += pair.elements * plan.itemsize
                devices[0] = devices[1]
        return found

    @property
    def busy(self) -> Counter[int]:
        """Bytes that every device sends and receives."""
        found: Counter[int] = Counter()
        for pair, n in self.traffic.items():
            for device in pair:
                found[device] += n
        return found

    @property
    def received(self) -> Counter[int]:
        """Bytes that every device receives."""
        found: Counter[int] = Counter()
        for (_, taker), n in self.traffic.items():
            found[taker] += n
        return found

    @property
    def lacking(self) -> Counter[int]:
        """Bytes that every device has to receive at least."""
        found: Counter[int] = Counter()
        for plan in (move.plan for move in self.moves):
            ends = plan.source, plan.target.in_order(plan.src.names)
            normal = (sharding.with_layout(sharding.normal) for sharding in ends)
            lacking = lacking_elements(*normal, plan.src_devices, plan.dst_devices)
            found.update(dict(zip(plan.dst_devices, (lacking * plan.itemsize).tolist(), strict=True)))
        return found

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """Who sends whom a part of it, from mesh to mesh."""
        return {
            (move.plan.src_devices[m.src], move.plan.dst_devices[m.dst])
            for move in self.moves
            for m in move.transfer.messages
            if not move.transfer.is_kept(m)
        }


@dataclass(frozen=True, repr=False)
class TreePlan:
    """How a tree of arrays gets to another mesh: what every array there is made of, bucket by bucket.

    sources: the arrays here. buckets: arrays that travel together, in the order of the tree there.
    """

    src_mesh: Mesh
    dst_mesh: Mesh
    src_devices: tuple[int, ...]
    dst_devices: tuple[int, ...]
    sources: Mapping[str, SourceArray]
    buckets: tuple[tuple[ArrayPlan, ...], ...]
    profile: Profile

    @property
    def arrays(self) -> tuple[ArrayPlan, ...]:
        """Every array there."""
        return tuple(array for bucket in self.buckets for array in bucket)

    @property
    def bytes_received(self) -> int:
        """Bytes that the busiest device receives."""
        return max(sum((a.received for a in self.arrays), Counter()).values(), default=0)

    @property
    def bytes_sent(self) -> int:
        """Bytes that the busiest device sends."""
        found: Counter[int] = Counter()
        for array in self.arrays:
            for (giver, _), n in array.traffic.items():
                found[giver] += n
        return max(found.values(), default=0)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all devices receive."""
        return sum(array.traffic.total() for array in self.arrays)

    @property
    def bytes_lower_bound(self) -> int:
        """Fewest bytes that the busiest device must receive, whatever the plan; a new sum counts nothing."""
        return max(sum((a.lacking for a in self.arrays), Counter()).values(), default=0)

    @property
    def messages(self) -> int:
        """How often a device of one mesh sends to one of the other: once a bucket."""
        return sum(len(set().union(*(array.pairs for array in bucket))) for bucket in self.buckets)

    def __repr__(self) -> str:
        return f"TreePlan({len(self.arrays)} arrays, {self.src_mesh!r}, {self.dst_mesh!r})"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "here", "there", "dtype", "received", "bound", "messages")]
        for array in self.arrays:
            here = [f"{m.src.whole.layout}" for m in array.moves]
            own = dict.fromkeys((m.plan.dtype for m in array.moves), None) | {array.dtype: None}
            figures = (format_bytes(max(n.values(), default=0)) for n in (array.received, array.lacking))
            rows.append(
                (
                    array.name,
                    ", ".join(dict.fromkeys(here)),
                    str(array.sharding.layout),
                    " -> ".join(own),
                    *figures,
                    str(len(array.pairs)),
                )
            )
        ends = f"{self.src_mesh} to {self.dst_mesh}"
        devices = f"devices {device_ranges(self.src_devices)} -> {device_ranges(self.dst_devices)}"
        total = (
            f"{len(self.arrays)} arrays from {ends}, {devices}: moved {format_bytes(self.bytes_moved)}, "
            f"received {format_bytes(self.bytes_received)} by the busiest device "
            f"(the bound is {format_bytes(self.bytes_lower_bound)}), messages {self.messages}, "
            f"buckets {len(self.buckets)}, priced for {self.profile.name}"
        )
        return f"{align_columns(rows)}\n\n{total}"
