"""The messages of an exchange: who sends which box of elements to whom.

Of the replicas of a block, one in the receiver's node sends, if the exchange is asked for that.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.layout import Sharding
from xshard.layout.block_rows import block_fills
from xshard.layout.mesh import Axes, Coords, all_coords
from xshard.layout.runs import Run, Segment, as_index
from xshard.notation.row_arrays import Numbers
from xshard.steps.exchange.sources import (
    DimEnd,
    RowSource,
    dim_end,
    dim_ends,
    n_segment_rows,
    sources,
    view_pairs,
)
from xshard.steps.exchange.traffic import begun_axes, busiest_traffic, ended_axes, rows_in_common
from xshard.steps.traffic import Hop, Traffic

# Largest mesh for which node-local senders are considered: the choice compares all pairs of
# devices.
MAX_PAIRED = 512


class BlockHolders(NamedTuple):
    """The distinct blocks of a sharding and the devices that hold them."""

    keys: Numbers  # [blocks, dims + 1]: index along each dim, and the index of the addend
    block_of_device: Numbers  # [devices]: the index of each device's block
    addend_of_device: Numbers  # [devices]: the index of each device's addend
    # [blocks, devices]: whether a device of the same node holds the block.
    is_on_same_node: NDArray[np.bool_]


@layout_cache(maxsize=1024)
def block_holders(sharding: Sharding, node_devices: int) -> BlockHolders:
    """Find the distinct blocks of a sharding, number them, and list who holds each.

    Replicas are one block: "n/x" on x=2, y=3 has blocks 0 and 1, and devices 0 to 5 hold blocks
    0 0 0 1 1 1. Different addends of a partial sum are different blocks. A node is `node_devices`
    consecutive devices.
    """
    mesh = sharding.mesh
    # For each device: its index along the axes of each dim, and along the axes of partial sums.
    dim_indices = [mesh.indices(dim.axes) for dim in sharding.layout.dims]
    addends = mesh.indices(sharding.layout.tagged("sum", "max", "min"))
    # Devices with equal lines in this table hold the same block.
    device_keys = np.stack([*dim_indices, addends], axis=1)  # [devices, dims + 1]
    keys, block_of_device = np.unique(device_keys, axis=0, return_inverse=True)
    block_of_device = block_of_device.reshape(-1)  # numpy 2.0 returns a column
    node_of = np.arange(mesh.n_devices) // node_devices  # [devices]
    is_in_node = np.zeros((len(keys), node_of[-1] + 1), bool)  # [blocks, nodes]
    is_in_node[block_of_device, node_of] = True
    return BlockHolders(
        keys,
        block_of_device,
        addend_of_device=addends,
        # For each block and device, whether a device of the same node holds the block.
        is_on_same_node=is_in_node[:, node_of],
    )


def needed_elements(source: Sharding, target: Sharding, node_devices: int) -> Numbers:
    """Count the elements of each block of `source` that each device needs: [blocks, devices]."""
    holders = block_holders(source, node_devices)
    # A device takes only addends of its own index.
    has_same_addend = holders.keys[:, -1:] == holders.addend_of_device[None]
    elements: Numbers = has_same_addend.astype(np.int64)  # [blocks, devices]
    for dim_index, dim in enumerate(target.layout.dims):
        shared = rows_in_common(dim_end(source, dim_index), dim_end(target, dim_index))
        by_device = shared[:, target.mesh.indices(dim.axes)]  # [shards of the source, devices]
        elements *= by_device[holders.keys[:, dim_index]]
    return elements


def node_local_traffic(source: Sharding, target: Sharding, node_devices: int) -> Traffic:
    """Count what the busiest device receives if replicas in its own node send in place of others.

    Each device takes from others what it lacks: from its own node if any device there holds the
    block, else from another node. A node is `node_devices` consecutive devices. The result has a
    hop for the links between nodes (level 0) and one for those inside (level 1), if they are used.
    """
    elements = needed_elements(source, target, node_devices)  # [blocks, devices]: a fresh array
    holders = block_holders(source, node_devices)
    wanted_by_device = elements.sum(axis=0)  # [devices]
    # Set what a device takes from its own block to 0: the rest has to be sent.
    elements[holders.block_of_device, np.arange(source.mesh.n_devices)] = 0

    between_nodes = np.where(holders.is_on_same_node, 0, elements)  # [blocks, devices]
    inside_nodes = elements - between_nodes
    hops = []
    for level, level_elements in enumerate((between_nodes, inside_nodes)):
        if level_elements.any():
            hops.append(_node_hop(source.mesh.axes[0], level, level_elements, node_devices))
    return busiest_traffic(wanted_by_device, elements.sum(axis=0), hops)


def _node_hop(axis: str, level: int, elements: Numbers, node_devices: int) -> Hop:
    """Sum up what goes over the links between nodes, or over those inside nodes.

    The result, a `Hop`, has the elements that the busiest device receives, the most messages that
    any device receives, and how far the average over the busiest node is below the busiest device.

    Args:
        axis: Any axis of the mesh, which names the hop: nodes have no axis of their own.
        level: 0 between nodes, 1 inside.
        elements: What each device takes of each block over these links, `[blocks, devices]`.
        node_devices: The number of devices in a node.
    """
    by_device = elements.sum(axis=0)
    received = int(by_device.max())
    messages = int((elements > 0).sum(axis=0).max())  # one for each block that a device lacks
    # Devices of a node may share a port, whose load is their average.
    node_of = np.arange(len(by_device)) // node_devices
    busiest_node = np.bincount(node_of, by_device).max()
    mean_of_busiest_node = int(busiest_node / node_devices)
    return Hop(
        axis=axis,
        received=received,
        messages=messages,
        level=level,
        mean_shortfall=received - mean_of_busiest_node,
    )


@layout_cache(maxsize=1024)
def node_local_senders(
    source: Sharding, target: Sharding, node_devices: int
) -> dict[tuple[int, int], int]:
    """Choose which device sends a block to a receiver if several in the receiver's node hold it.

    It is the one with the least to send so far. If devices 0 and 1 both hold a block that 2 and 3
    of the same node want, 0 sends to 2, and 1 sends to 3. Receivers choose in the order of their
    numbers. Every process computes the choice for all, so that sender and receiver agree.

    Returns:
        (block, receiver) -> sender. A pair is left out if the receiver needs nothing of the block,
        holds it itself, or nobody in its node does.
    """
    elements = needed_elements(source, target, node_devices)
    block_of_device = block_holders(source, node_devices).block_of_device
    holders_in_node: dict[tuple[int, int], list[int]] = {}  # (block, node) -> its holders there
    for device, block in enumerate(block_of_device.tolist()):
        holders_in_node.setdefault((block, device // node_devices), []).append(device)

    elements_sent: Counter[int] = Counter()  # elements that each device has to send so far
    sender_of = {}
    for receiver in range(source.mesh.n_devices):
        for block in np.flatnonzero(elements[:, receiver]).tolist():
            candidates = holders_in_node.get((block, receiver // node_devices), [])
            # Nobody in the node has the block, or the receiver has it itself.
            if not candidates or receiver in candidates:
                continue
            # The number of the device breaks ties: every process has to choose the same sender.
            sender = min(candidates, key=lambda device: (elements_sent[device], device))
            elements_sent[sender] += int(elements[block, receiver])
            sender_of[block, receiver] = sender
    return sender_of


class Message(NamedTuple):
    """The box that `dst` takes from `src`: per dim, matching rows of both blocks.

    The box is a dense sub-array: each row of one dim with each row of the others.
    """

    src: int
    dst: int
    box: tuple[tuple[Segment, ...], ...]
    sign: int = 1  # factor that the receiver applies: rows from beyond a pole may be negated

    @property
    def shape(self) -> tuple[int, ...]:
        """The rows of the box, for each dim."""
        return tuple(map(n_segment_rows, self.box))

    @property
    def size(self) -> int:
        """The elements of the box."""
        return math.prod(self.shape)

    def src_index(self) -> tuple[Numbers, ...]:
        """Return the numpy index of the box in the sender's block."""
        return np.ix_(*(rows_at(segments, end=0) for segments in self.box))

    def dst_index(self) -> tuple[Numbers, ...]:
        """Return the numpy index of the box in the receiver's block."""
        return np.ix_(*(rows_at(segments, end=1) for segments in self.box))


Messages = tuple[Message, ...]


def rows_at(segments: tuple[Segment, ...], end: int) -> Numbers:
    """Return the local rows of segments in the block of the sender (end 0) or receiver (end 1)."""
    index = as_index(tuple(Run(segment[end], segment.length) for segment in segments))
    return np.r_[index] if isinstance(index, slice) else index


def messages_to(
    source: Sharding, target: Sharding, device: int, node_devices: int | None = None
) -> Messages:
    """List the messages that a device receives in an exchange, in the order of senders.

    A message says which box of the sender's block goes where in the receiver's. What the device
    already has is a message from itself. From "n/x" to "n" with x=2 device 0 receives its own rows,
    then those of device 1. With `node_devices`, the number of devices of a node, replicas in the
    receiver's node send in place of devices farther away; None if nodes do not matter.
    """
    messages = _messages_to(source, target, device, None)
    if node_devices is None:
        return messages
    block_of_device = block_holders(source, node_devices).block_of_device
    senders = node_local_senders(source, target, node_devices)
    moved_messages = []
    for message in messages:
        # Without a replica in the node the sender stays. The box stays in any case: it has the same
        # rows in every replica.
        block = int(block_of_device[message.src])
        sender = senders.get((block, device), message.src)
        moved_messages.append(message._replace(src=sender))
    return tuple(sorted(moved_messages, key=lambda message: message.src))


def messages_from(
    source: Sharding, target: Sharding, device: int, node_devices: int | None = None
) -> Messages:
    """List the messages that a device sends, its own rows among them, by receiver."""
    sent: list[Message] = []
    if node_devices is None:
        # Only devices that differ from it along these axes receive from it.
        axes = (*source.layout.sharding_axes, *ended_axes(source.layout, target.layout))
        for receiver in sorted(source.mesh.group(device, axes)):
            sent += _messages_to(source, target, receiver, device)
    else:
        for receiver in range(source.mesh.n_devices):
            sent += messages_to(source, target, receiver, node_devices)
    return tuple(message for message in sent if message.src == device)


class BoundaryFill(NamedTuple):
    """Local rows [start, stop) of one dim of a block that lie outside the array, and their value."""

    dim: int
    start: int
    stop: int
    value: float


def boundary_fills(target: Sharding, device: int) -> tuple[BoundaryFill, ...]:
    """List the rows outside the array that a device fills itself, in order of writing."""
    fills = []
    for dim_index, (dim, length) in enumerate(zip(target.layout.dims, target.shape, strict=True)):
        sizes = target.mesh.sizes_of(dim.axes)
        for padding in block_fills(dim, length, sizes, target.dim_device(dim_index, device)):
            fills.append(BoundaryFill(dim_index, padding.start, padding.stop, padding.value))
    return tuple(fills)


def fill_boundaries(block: NDArray[Any], sharding: Sharding, device: int) -> None:
    """Write the values of boundaries into a device's block, where it has rows outside the array."""
    for dim_index, start, stop, value in boundary_fills(sharding, device):
        rows = (slice(None),) * dim_index + (slice(start, stop),)
        block[rows] = value


@layout_cache(maxsize=8192)
def _messages_to(source: Sharding, target: Sharding, device: int, sender: int | None) -> Messages:
    """List the boxes that a device receives in an exchange, in the order of senders.

    Who has the wanted rows is found dim by dim; a box takes one answer for each dim, and all
    combinations are listed. From "n/x d/y" to "n d" on x=2, y=2: rows from 2 devices along x,
    columns from 2 along y -> 4 boxes. They are repeated for each addend of a partial sum that ends.
    If the array ends at a pole of a sphere, rows beyond it are mirrored copies of others: then they
    are repeated for each view of the two blocks, inside the array or beyond a pole.

    sender: list only the messages of this device, and perhaps of others with the same coordinates
        along the axes that shard dims (replicas, other addends); None: of all devices.
    """
    # Hot: each rank of a large mesh asks this of all others; `sender` keeps the product below
    # small.
    receiver = _Receiver(source, target, device, sender)
    if not receiver.takes_any:
        return ()
    messages = []
    for dst_view, src_view in view_pairs(source, target):
        sources_by_dim = []
        for dim_index, (src, dst) in enumerate(dim_ends(source, target, dst_view, src_view)):
            sources_by_dim.append(receiver.dim_sources(dim_index, src, dst))
        sign = dst_view.sign * src_view.sign  # -1 if values change their sign beyond a pole
        # No combination, and no message, if some dim has no source.
        for addend in all_coords(source.mesh.sizes_of(receiver.ended_sums)):
            for box_sources in itertools.product(*sources_by_dim):
                messages.append(receiver.message(addend, box_sources, sign))
    return tuple(sorted(messages, key=lambda message: message.src))


@dataclass(frozen=True)
class _Receiver:
    """One device of an exchange, as the receiver of its messages.

    sender: a device; only senders that have its shard of every dim count. None: all do.
    """

    source: Sharding
    target: Sharding
    device: int
    sender: int | None

    @cached_property
    def coords(self) -> Coords:
        """The coordinates of the receiver in the mesh."""
        return self.source.mesh.coords(self.device)

    @cached_property
    def new_sums(self) -> Axes:
        """The axes along which a sum begins."""
        return begun_axes(self.source.layout, self.target.layout)

    @cached_property
    def ended_sums(self) -> Axes:
        """The axes along which a sum ends: their addends all arrive."""
        return ended_axes(self.source.layout, self.target.layout)

    @property
    def takes_any(self) -> bool:
        """Whether the receiver is the first along each new sum.

        Of replicas, only the first contributes: the others receive nothing, and hold zeros.
        """
        replicated = [
            axis for axis in self.new_sums if axis not in self.source.layout.sharding_axes
        ]
        return self.source.mesh.index(self.device, replicated) == 0

    def dim_sources(self, dim_index: int, src: DimEnd, dst: DimEnd) -> list[RowSource]:
        """Find which rows of one dim the receiver takes from which senders.

        "n/x" -> "n" with 4 rows on x=2: rows 0-1 from x=0 and rows 2-3 from x=1. A sender is given
        by its coordinates along the source's axes of the dim. Where partial sums begin along
        such an axis, a device takes only its own shard: the addends are to have it once.

        Args:
            dim_index: The index of the dim.
            src: The dim in the source.
            dst: The dim in the target.
        """
        src_index = self.source.dim_device(dim_index, self.device)
        dst_index = self.target.dim_device(dim_index, self.device)
        sender = None if self.sender is None else self.source.dim_device(dim_index, self.sender)
        # In a new sum each row counts once: it is taken from its one provider, never from a copy.
        begins_sum = not set(src.dim.axes).isdisjoint(self.new_sums)
        # `sources` is cached by its positional arguments, so it gets no keywords.
        row_sources = sources(src, dst, src_index, dst_index, begins_sum, sender)
        return [
            row_source for row_source in row_sources if self._contributes(src, row_source.coords)
        ]

    def _contributes(self, src: DimEnd, coords: Coords) -> bool:
        """Check that a sender shares the receiver's coordinates along the axes of a new sum."""
        mesh = self.source.mesh
        for axis, coordinate in zip(src.dim.axes, coords, strict=True):
            if axis in self.new_sums and coordinate != self.coords[mesh.position(axis)]:
                return False
        return True

    def message(self, addend: Coords, box_sources: tuple[RowSource, ...], sign: int) -> Message:
        """Make one message: find the sending device, and the box of rows of all dims.

        Along the axes of sums that end, the sender has the coordinates `addend`; along the axes that
        shard dims, those in `box_sources`; and along all other axes the receiver's own.

        Args:
            addend: The sender's coordinates along the axes with sums that end.
            box_sources: For each dim, the rows, and the sender's coordinates along its axes.
            sign: A factor of the values: see `Message`.
        """
        mesh = self.source.mesh
        # The receiver's coordinates, to be replaced along the axes where the sender is elsewhere.
        coords = list(self.coords)
        for axis, coordinate in zip(self.ended_sums, addend, strict=True):
            coords[mesh.position(axis)] = coordinate
        for dim, row_source in zip(self.source.layout.dims, box_sources, strict=True):
            for axis, coordinate in zip(dim.axes, row_source.coords, strict=True):
                coords[mesh.position(axis)] = coordinate
        box = tuple(row_source.segments for row_source in box_sources)
        return Message(mesh.device(coords), self.device, box, sign)
