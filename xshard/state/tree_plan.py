"""The plan of a tree: the moves that make each target array, in buckets, with their bytes and messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from xshard.caches import layout_cache
from xshard.cost.bounds import lacking_elements
from xshard.cost.model import Profile
from xshard.errors import PlanError
from xshard.formatting import align_columns, format_bytes
from xshard.layout import Mesh, Sharding, partition
from xshard.layout.runs import (
    Run,
    Runs,
    as_few_runs,
    common_segments,
    count_rows,
    merge_adjacent,
    row_numbers,
)
from xshard.notation.parser import BY, INTERVALS, SIZES, Dim, Shard
from xshard.plans.plan import Plan
from xshard.plans.table import device_ranges
from xshard.plans.transfer import Transfer
from xshard.plans.transfer_pieces import Ints
from xshard.state.parts import NEW, ArrayPart, PartDim
from xshard.steps import Step

ADDED = "_added"  # with its number, the dim of length 1 of an array that is stacked


class PartSharding(NamedTuple):
    """The sharding of a part of an array.

    Attributes:
        whole: The sharding of the array.
        part: Which part.
        sharding: The sharding of the part alone.
        rows: By dim of the part, its rows in each block, by index along the dim's axes; None for a
            dim of which it has all rows, and for a new one.
    """

    whole: Sharding
    part: ArrayPart
    sharding: Sharding
    rows: tuple[tuple[Runs, ...] | None, ...]

    def rows_on(self, device: int, part_dim: int) -> Runs:
        """Return the part's rows along one of its dims, in the device's block of the whole."""
        rows_of_blocks = self.rows[part_dim]
        assert rows_of_blocks is not None
        dim = self.part.dims[part_dim].dim
        return rows_of_blocks[self.whole.dim_device(dim, device)]

    def numpy_index(self, device: int) -> tuple[Any, ...]:
        """Return the numpy index of the device's block of the part in its block of the whole."""
        if self.part.is_whole:
            return ()
        part = self.part
        for i, rows in enumerate(self.rows):
            if rows is not None:
                part = part.with_rows(i, self.rows_on(device, i))
        return part.numpy_index(self.whole.local_shape(device))


@layout_cache(maxsize=65536)
def part_of(whole: Sharding, part: ArrayPart) -> PartSharding:
    """Find how some rows of a sharded array are sharded themselves, as an array of their own.

    Under n/dp, 8 rows on 2 devices are rows 0-3 and 4-7. So the part with rows 2-7 is an array of 6
    rows: device 0 has the part's rows 0-1, at positions 2-3 of its block, and device 1 has the
    part's rows 2-5, at positions 0-3.

    Args:
        whole: The sharding of the array.
        part: All of the array, some rows of some dims, or the array with new dims of length 1.

    Raises:
        PlanError: The rows are of a dim with blocks that overlap.
    """
    if part.is_whole:
        return PartSharding(whole, part, whole, (None,) * len(part.dims))
    sharded_dims = [_part_of_dim(whole, i, part_dim) for i, part_dim in enumerate(part.dims)]
    layout = replace(whole.layout, dims=tuple(dim for dim, _ in sharded_dims))
    sharding = Sharding(layout, whole.mesh, part.part_shape(whole.shape))
    return PartSharding(whole, part, sharding, tuple(rows for _, rows in sharded_dims))


def _part_of_dim(
    array_sharding: Sharding, i: int, part_dim: PartDim
) -> tuple[Dim, tuple[Runs, ...] | None]:
    """Return how dim `i` of a part is sharded, as a dim of its own, and its rows in each block.

    They are None for a new dim, and for all rows.
    """
    dim_index, rows = part_dim
    if dim_index == NEW:
        return Dim(f"{ADDED}{i}"), None
    dim = array_sharding.layout.dims[dim_index]
    if rows is None:
        return dim, None
    if dim.overlap is not None:
        raise PlanError(
            f"'{dim}' has blocks that overlap, a part of it cannot have a layout",
            hint="trim before, widen after",
        )
    part_positions = []  # the part's rows in each block, counted within the part
    block_positions = []  # the same rows, counted within the block
    for owned in array_sharding.owned_by_position(dim_index):
        # A segment is rows of both: where they are in the part, where in the block, how many.
        segments = common_segments(rows, owned)
        part_positions.append(
            merge_adjacent(Run(segment.src, segment.length) for segment in segments)
        )
        rows_in_block = row_numbers(tuple(Run(segment.dst, segment.length) for segment in segments))
        block_positions.append(as_few_runs(rows_in_block))
    sizes = array_sharding.mesh.sizes_of(dim.axes)
    sharded_dim = _sharded_as(dim, tuple(part_positions), sizes, count_rows(rows))
    return sharded_dim, tuple(block_positions)


def _sharded_as(
    dim: Dim, rows_of_block: tuple[Runs, ...], sizes: tuple[int, ...], length: int
) -> Dim:
    """Describe by the simplest notation a dim whose blocks have the given rows.

    Tried in turn: the order of the whole array's shards, plain consecutive blocks, and at last a
    list of the rows of each block.

    Args:
        dim: The dim of the whole array, with its shards.
        rows_of_block: The rows of the part that each block is to hold.
        sizes: The sizes of the dim's axes.
        length: The number of rows of the part.
    """
    if not dim.axes:
        return dim
    same_order = tuple(replace(shard, numbers=()) for shard in dim.shards)
    contiguous = (Shard(dim.axes),)
    for shards in (same_order, contiguous):
        if any(shard.order in (SIZES, INTERVALS, BY) for shard in shards):
            continue  # orders that mean nothing without their numbers
        simple = Dim(dim.name, shards)
        owned = partition.all_owned_rows(simple, length, sizes)
        if tuple(map(merge_adjacent, owned)) == rows_of_block:
            return simple
    interval_bounds = tuple(_bounds(block_runs) for block_runs in rows_of_block)
    return Dim(dim.name, (Shard(dim.axes, INTERVALS, interval_bounds),))


def _bounds(runs: Runs) -> tuple[int, ...]:
    """Return the first row of each run, and the row after its last: (0, 3, 8, 9) for 0-2 and 8."""
    bounds: list[int] = []
    for run in runs:
        bounds += [run.start, run.start + run.length]
    return tuple(bounds)


@layout_cache(maxsize=4096)
def _pairs_of(step: Step, source: Sharding) -> Ints:
    """Return the positions of all senders and receivers of a step on one mesh, and elements.

    Rows of the result: sender, receiver, elements; a column for each pair.
    """
    return np.array(step.pair_traffic(source), np.int64).reshape(-1, 3).T


class SourceArray(NamedTuple):
    """An array at the source."""

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
        """The step of the plan that leads to the other mesh."""
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
    def _sent(self) -> Ints:
        """Of all messages: the numbers of sender and receiver, and bytes. [3, messages]."""
        messages = [np.zeros((3, 0), np.int64)]
        for move in self.moves:
            messages += _messages_of(move.plan)
        return np.concatenate(messages, axis=1)

    @cached_property
    def traffic(self) -> Counter[tuple[int, int]]:
        """Bytes by (sender, receiver), as numbers of devices."""
        traffic: Counter[tuple[int, int]] = Counter()
        for sender, receiver, n_bytes in self._sent.T.tolist():
            traffic[sender, receiver] += n_bytes
        return traffic

    def bytes_by_device(self, *, sent: bool = False) -> Counter[int]:
        """Count the bytes that every device receives, with those that it sends if `sent`."""
        senders, receivers, message_bytes = self._sent
        n_bytes = np.zeros(self._sent[:2].max(initial=-1) + 1, np.int64)
        np.add.at(n_bytes, receivers, message_bytes)
        if sent:
            np.add.at(n_bytes, senders, message_bytes)
        devices = np.flatnonzero(n_bytes)
        return Counter(dict(zip(devices.tolist(), n_bytes[devices].tolist(), strict=True)))

    @property
    def lacking(self) -> Counter[int]:
        """Count the bytes that each device has to receive at least, by the device's number.

        These are the rows that its new blocks have and its old blocks do not, over all arrays.
        """
        n_bytes: Counter[int] = Counter()
        for move in self.moves:
            plan = move.plan
            elements = lacking_elements(*plan._normal_ends, plan.src_devices, plan.dst_devices)
            lacking_bytes = (elements * plan.itemsize).tolist()
            n_bytes.update(dict(zip(plan.dst_devices, lacking_bytes, strict=True)))
        return n_bytes

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The pairs (sender, receiver) of devices of the two meshes."""
        pairs: set[tuple[int, int]] = set()
        for move in self.moves:
            pairs.update(map(tuple, move.transfer.pairs[:2].T.tolist()))
        return {(sender, receiver) for sender, receiver in pairs if sender != receiver}


def _messages_of(plan: Plan) -> Iterator[Ints]:
    """Yield for each step of a plan an array [3, messages]: sender, receiver and bytes of each.

    Messages of a device to itself are left out. Devices have the numbers that both meshes share.
    """
    # A step names devices by their positions on one mesh: here the number at each position. It is
    # the source's mesh up to the transfer, which has the numbers itself, and the destination's then.
    device_numbers = np.array(plan.src_devices)
    for stage in plan.stages:
        if stage.step is plan.transfer:
            senders, receivers, elements = plan.transfer.pairs
            device_numbers = np.array(plan.dst_devices)
        else:
            src_positions, dst_positions, elements = _pairs_of(stage.step, stage.before)
            senders = device_numbers[src_positions]
            receivers = device_numbers[dst_positions]
        is_sent = senders != receivers
        message_bytes = elements[is_sent] * plan.itemsize
        yield np.stack([senders[is_sent], receivers[is_sent], message_bytes])


@dataclass(frozen=True, repr=False)
class TreePlan:
    """The plan of a transfer of a tree to another mesh.

    Attributes:
        src_mesh: The mesh of the sources.
        dst_mesh: The mesh of the targets.
        src_devices: The number of every device of `src_mesh`, in its order.
        dst_devices: The number of every device of `dst_mesh`, in its order.
        sources: The source arrays by name.
        buckets: Target arrays that travel together, in the order of the tree.
        profile: The machine for which it is priced.
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

    @cached_property
    def released(self) -> list[set[str]]:
        """For each bucket, the sources that no later one reads: `names` can make several arrays of one."""
        read_later: set[str] = set()
        released = []  # of the last bucket first
        for bucket in reversed(self.buckets):
            read = {move.name for array in bucket for move in array.moves}
            released.append(read - read_later)
            read_later |= read
        return released[::-1]

    @property
    def bytes_received(self) -> int:
        """Bytes that the busiest device receives."""
        return _max_device_bytes(array.bytes_by_device() for array in self.arrays)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all devices receive."""
        return sum(array.traffic.total() for array in self.arrays)

    @property
    def bytes_lower_bound(self) -> int:
        """Fewest bytes that the busiest device must receive under any plan; new sums are not counted."""
        return _max_device_bytes(array.lacking for array in self.arrays)

    @property
    def messages(self) -> int:
        """Messages between the meshes: one per pair of devices and bucket."""
        n_messages = 0
        for bucket in self.buckets:
            pairs = set[tuple[int, int]]().union(*[array.pairs for array in bucket])
            n_messages += len(pairs)
        return n_messages

    def __repr__(self) -> str:
        return f"TreePlan({len(self.arrays)} arrays, {self.src_mesh!r}, {self.dst_mesh!r})"

    def __str__(self) -> str:
        head = ("", "here", "there", "dtype", "received", "bound", "messages")
        rows = [head, *map(_table_row, self.arrays)]
        devices = f"devices {device_ranges(self.src_devices)} -> {device_ranges(self.dst_devices)}"
        summary = (
            f"{len(self.arrays)} arrays from {self.src_mesh} to {self.dst_mesh}, {devices}: "
            f"moved {format_bytes(self.bytes_moved)}, "
            f"received {format_bytes(self.bytes_received)} by the busiest device "
            f"(the bound is {format_bytes(self.bytes_lower_bound)}), messages {self.messages}, "
            f"buckets {len(self.buckets)}, priced for {self.profile.name}"
        )
        return f"{align_columns(rows)}\n\n{summary}"


def _table_row(array: ArrayPlan) -> tuple[str, ...]:
    """Return the row of an array: layouts, dtypes, bytes of the busiest device, messages."""
    src_layouts = dict.fromkeys(str(move.src.whole.layout) for move in array.moves)
    dtypes = dict.fromkeys([*(move.plan.dtype for move in array.moves), array.dtype])
    return (
        array.name,
        ", ".join(src_layouts),
        str(array.sharding.layout),
        " -> ".join(dtypes),
        format_bytes(_max_device_bytes([array.bytes_by_device()])),
        format_bytes(_max_device_bytes([array.lacking])),
        str(len(array.pairs)),
    )


def _max_device_bytes(bytes_by_device: Iterable[Counter[int]]) -> int:
    """Return the bytes of the busiest device, over all arrays: {0: 4, 1: 2} and {1: 6} -> 8."""
    bytes_of_devices: Counter[int] = Counter()
    for device_bytes in bytes_by_device:
        bytes_of_devices.update(device_bytes)
    return max(bytes_of_devices.values(), default=0)
