"""The plan of a tree: the moves that make each target array, in buckets, with their bytes and messages."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.cost.bounds import lacking_elements
from xshard.cost.model import Profile
from xshard.errors import PlanError
from xshard.formatting import align_columns, format_bytes
from xshard.layout import Mesh, Sharding, partition
from xshard.layout.runs import Run, Runs, common_segments, merge_adjacent, n_rows
from xshard.notation.parser import BY, INTERVALS, SIZES, Dim, Shard
from xshard.plans.plan import Plan
from xshard.plans.table import device_ranges
from xshard.plans.transfer import Transfer
from xshard.state.relations import ArrayPart
from xshard.steps import Step

ADDED = "_added"  # the dim of length 1 of an array that is stacked


@dataclass(frozen=True)
class PartSharding:
    """The sharding of a part of an array. rows: its rows in a block, by index along the axes of its dim."""

    whole: Sharding
    part: ArrayPart
    sharding: Sharding
    rows: tuple[Runs, ...] = ()

    def numpy_index(self, device: int) -> tuple[Any, ...]:
        """The numpy index of the device's block of the part in its block of the whole."""
        if not self.rows:
            return self.part.numpy_index
        assert self.part.dim is not None
        return self.part._replace(
            rows=self.rows[self.whole.dim_device(self.part.dim, device)]
        ).numpy_index


@layout_cache(maxsize=65536)
def part_of(whole: Sharding, part: ArrayPart) -> PartSharding:
    """The sharding of a part. Raises PlanError for rows of a dim with blocks that overlap."""
    d = part.dim
    dims = whole.layout.dims
    shape = part.part_shape(whole.shape)
    if d is None:
        return PartSharding(whole, part, whole)
    if part.adds:
        layout = replace(whole.layout, dims=(*dims[:d], Dim(ADDED), *dims[d:]))
        return PartSharding(whole, part, Sharding(layout, whole.mesh, shape))
    if dims[d].overlap is not None:
        hint = "trim before, widen after"
        raise PlanError(
            f"'{dims[d]}' has blocks that overlap, a part of it cannot have a layout", hint=hint
        )
    # Rows in both, with their start in the part and in the block.
    segments = [common_segments(part.rows, rows) for rows in whole.owners(d)]
    held = tuple(merge_adjacent(Run(s.src, s.length) for s in some) for some in segments)
    in_block = tuple(_as_one_run([Run(s.dst, s.length) for s in some]) for some in segments)
    dim = _sharded_as(dims[d], held, whole.mesh.sizes_of(dims[d].axes), n_rows(part.rows))
    layout = replace(whole.layout, dims=(*dims[:d], dim, *dims[d + 1 :]))
    return PartSharding(whole, part, Sharding(layout, whole.mesh, shape), in_block)


def _sharded_as(dim: Dim, held: tuple[Runs, ...], sizes: tuple[int, ...], length: int) -> Dim:
    """The dim with the simplest shards that give every device these rows."""
    axes = dim.axes
    for shards in (tuple(replace(shard, numbers=()) for shard in dim.shards), (Shard(axes),)):
        if any(shard.order in (SIZES, INTERVALS, BY) for shard in shards) or not axes:
            continue
        plain = Dim(dim.name, shards)
        if tuple(map(merge_adjacent, partition.all_owned_rows(plain, length, sizes))) == held:
            return plain
    bounds = ([(run.start, run.start + run.length) for run in runs] for runs in held)
    numbers = tuple(tuple(itertools.chain(*pairs)) for pairs in bounds)
    return Dim(dim.name, (Shard(axes, INTERVALS, numbers),)) if axes else dim


def _as_one_run(runs: Sequence[Run]) -> Runs:
    """Runs of one length at one stride as one run, which an index reaches without a copy."""
    starts = [run.start for run in runs]
    lengths = {run.length for run in runs}
    strides = {b - a for a, b in itertools.pairwise(starts)}
    if len(lengths) == len(strides) == 1 and min(strides) > 0:
        return (Run(starts[0], lengths.pop(), len(runs), strides.pop()),)
    return merge_adjacent(runs)


@layout_cache(maxsize=4096)
def _pairs_of(step: Step, before: Sharding) -> NDArray[np.int64]:
    """Of a step on one mesh: the positions of all senders and receivers, and elements."""
    return np.array(step.pair_traffic(before), np.int64).reshape(-1, 3).T


class SourceArray(NamedTuple):
    sharding: Sharding
    dtype: str


class PartMove(NamedTuple):
    """The move of a part of the source array `name`, by a plan with a `Transfer` between the two parts."""

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
    def _sent(self) -> NDArray[np.int64]:
        """Of all messages: the numbers of sender and receiver, and bytes."""
        messages = [np.zeros((3, 0), np.int64)]
        for plan in (move.plan for move in self.moves):
            devices = np.array(plan.src_devices)
            for stage in plan.stages:
                if stage.step is plan.transfer:
                    sender, receiver, elements = plan.transfer.pairs
                    devices = np.array(plan.dst_devices)
                else:
                    src, dst, elements = _pairs_of(stage.step, stage.before)
                    sender = devices[src]
                    receiver = devices[dst]
                some = sender != receiver
                messages.append(
                    np.stack([sender[some], receiver[some], elements[some] * plan.itemsize])
                )
        return np.concatenate(messages, axis=1)

    @cached_property
    def traffic(self) -> Counter[tuple[int, int]]:
        """Bytes by (sender, receiver), as numbers of devices."""
        traffic: Counter[tuple[int, int]] = Counter()
        for sender, receiver, n in self._sent.T.tolist():
            traffic[sender, receiver] += n
        return traffic

    def bytes_by_device(self, *, sent: bool = False) -> Counter[int]:
        """Bytes that every device receives, and those that it sends if they are `sent` too."""
        n_bytes = np.zeros(self._sent[:2].max(initial=-1) + 1, np.int64)
        for end in (0, 1) if sent else (1,):
            np.add.at(n_bytes, self._sent[end], self._sent[2])
        return Counter({int(device): int(n_bytes[device]) for device in np.flatnonzero(n_bytes)})

    @property
    def lacking(self) -> Counter[int]:
        """Bytes that every device has to receive at least."""
        n_bytes: Counter[int] = Counter()
        for plan in (move.plan for move in self.moves):
            shardings = plan.source, plan.target.in_order(plan.src.names)
            normal = (sharding.with_layout(sharding.normal) for sharding in shardings)
            lacking = lacking_elements(*normal, plan.src_devices, plan.dst_devices)
            n_bytes.update(
                dict(zip(plan.dst_devices, (lacking * plan.itemsize).tolist(), strict=True))
            )
        return n_bytes

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The pairs (sender, receiver) of devices of the two meshes."""
        pairs = (pair for move in self.moves for pair in move.transfer.pairs[:2].T.tolist())
        return {(sender, receiver) for sender, receiver in pairs if sender != receiver}


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
        return _most(array.bytes_by_device() for array in self.arrays)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all devices receive."""
        return sum(array.traffic.total() for array in self.arrays)

    @property
    def bytes_lower_bound(self) -> int:
        """Fewest bytes that the busiest device must receive under any plan; new sums are not counted."""
        return _most(array.lacking for array in self.arrays)

    @property
    def messages(self) -> int:
        """Messages between the meshes: one per pair of devices and bucket."""
        return sum(len(set().union(*(array.pairs for array in bucket))) for bucket in self.buckets)

    def __repr__(self) -> str:
        return f"TreePlan({len(self.arrays)} arrays, {self.src_mesh!r}, {self.dst_mesh!r})"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("", "here", "there", "dtype", "received", "bound", "messages")
        ]
        for array in self.arrays:
            layouts = dict.fromkeys(str(move.src.whole.layout) for move in array.moves)
            dtypes = dict.fromkeys((*(move.plan.dtype for move in array.moves), array.dtype))
            largest = (max(n.values(), default=0) for n in (array.bytes_by_device(), array.lacking))
            texts = ", ".join(layouts), str(array.sharding.layout), " -> ".join(dtypes)
            rows.append((array.name, *texts, *map(format_bytes, largest), str(len(array.pairs))))
        devices = f"devices {device_ranges(self.src_devices)} -> {device_ranges(self.dst_devices)}"
        total = (
            f"{len(self.arrays)} arrays from {self.src_mesh} to {self.dst_mesh}, {devices}: "
            f"moved {format_bytes(self.bytes_moved)}, "
            f"received {format_bytes(self.bytes_received)} by the busiest device "
            f"(the bound is {format_bytes(self.bytes_lower_bound)}), messages {self.messages}, "
            f"buckets {len(self.buckets)}, priced for {self.profile.name}"
        )
        return f"{align_columns(rows)}\n\n{total}"


def _most(bytes_by_device: Iterable[Counter[int]]) -> int:
    """The bytes of the device that has most in all."""
    total: Counter[int] = Counter()
    for each in bytes_by_device:
        total.update(each)
    return max(total.values(), default=0)
