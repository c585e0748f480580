"""The plan of a tree: the moves that make each target array, in buckets, with their bytes and messages."""

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
from xshard.state.parts import PartSharding


class SourceArray(NamedTuple):
    """An array of the source tree."""

    sharding: Sharding
    dtype: str


class PartMove(NamedTuple):
    """The move of a part of the source array `name` to a part of a target array.

    plan: between the parts as arrays of their own; one of its steps is a `Transfer`.
    """

    name: str
    src: PartSharding
    dst: PartSharding
    plan: Plan

    @property
    def transfer(self) -> Transfer:
        assert self.plan.transfer is not None
        return self.plan.transfer


@dataclass(frozen=True)
class ArrayPlan:
    """A target array, and the moves that make it. Each move's plan has the dtype that travels."""

    name: str
    sharding: Sharding
    dtype: str
    moves: tuple[PartMove, ...]

    @cached_property
    def traffic(self) -> Counter[tuple[int, int]]:
        """Bytes by (sender, receiver), as numbers of devices."""
        traffic: Counter[tuple[int, int]] = Counter()
        for plan in (move.plan for move in self.moves):
            devices = [plan.src_devices] * 2
            for stage in plan.stages:
                if stage.step is plan.transfer:
                    devices[1] = plan.dst_devices
                for pair in stage.step.pair_traffic(stage.before):
                    traffic[devices[0][pair.src], devices[1][pair.dst]] += pair.elements * plan.itemsize
                devices[0] = devices[1]
        return traffic

    @property
    def sent_and_received(self) -> Counter[int]:
        """Bytes that every device sends and receives."""
        n_bytes: Counter[int] = Counter()
        for pair, n in self.traffic.items():
            for device in pair:
                n_bytes[device] += n
        return n_bytes

    @property
    def received(self) -> Counter[int]:
        """Bytes that every device receives."""
        n_bytes: Counter[int] = Counter()
        for (_, receiver), n in self.traffic.items():
            n_bytes[receiver] += n
        return n_bytes

    @property
    def lacking(self) -> Counter[int]:
        """Bytes that every device has to receive at least."""
        n_bytes: Counter[int] = Counter()
        for plan in (move.plan for move in self.moves):
            shardings = plan.source, plan.target.in_order(plan.src.names)
            normal = (sharding.with_layout(sharding.normal) for sharding in shardings)
            lacking = lacking_elements(*normal, plan.src_devices, plan.dst_devices)
            n_bytes.update(dict(zip(plan.dst_devices, (lacking * plan.itemsize).tolist(), strict=True)))
        return n_bytes

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The pairs (sender, receiver) of devices of the two meshes."""
        return {
            (move.plan.src_devices[m.src], move.plan.dst_devices[m.dst])
            for move in self.moves
            for m in move.transfer.messages
            if not move.transfer.is_kept(m)
        }


@dataclass(frozen=True, repr=False)
class TreePlan:
    """The plan of a transfer of a tree to another mesh.

    sources: the source arrays. buckets: target arrays that travel together, in the order of the tree.
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
        """All target arrays."""
        return tuple(array for bucket in self.buckets for array in bucket)

    @property
    def bytes_received(self) -> int:
        """Bytes that the busiest device receives."""
        return max(sum((a.received for a in self.arrays), Counter()).values(), default=0)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all devices receive."""
        return sum(array.traffic.total() for array in self.arrays)

    @property
    def bytes_lower_bound(self) -> int:
        """Fewest bytes that the busiest device must receive under any plan; new sums are not counted."""
        return max(sum((a.lacking for a in self.arrays), Counter()).values(), default=0)

    @property
    def messages(self) -> int:
        """Messages between the meshes: one per pair of devices and bucket."""
        return sum(len(set().union(*(array.pairs for array in bucket))) for bucket in self.buckets)

    def __repr__(self) -> str:
        return f"TreePlan({len(self.arrays)} arrays, {self.src_mesh!r}, {self.dst_mesh!r})"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "here", "there", "dtype", "received", "bound", "messages")]
        for array in self.arrays:
            layouts = dict.fromkeys(str(move.src.whole.layout) for move in array.moves)
            dtypes = dict.fromkeys((*(move.plan.dtype for move in array.moves), array.dtype))
            figures = (format_bytes(max(n.values(), default=0)) for n in (array.received, array.lacking))
            texts = ", ".join(layouts), str(array.sharding.layout), " -> ".join(dtypes)
            rows.append((array.name, *texts, *figures, str(len(array.pairs))))
        devices = f"devices {device_ranges(self.src_devices)} -> {device_ranges(self.dst_devices)}"
        total = (
            f"{len(self.arrays)} arrays from {self.src_mesh} to {self.dst_mesh}, {devices}: "
            f"moved {format_bytes(self.bytes_moved)}, "
            f"received {format_bytes(self.bytes_received)} by the busiest device "
            f"(the bound is {format_bytes(self.bytes_lower_bound)}), messages {self.messages}, "
            f"buckets {len(self.buckets)}, priced for {self.profile.name}"
        )
        return f"{align_columns(rows)}\n\n{total}"
