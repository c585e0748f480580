"""The messages of an exchange: boxes that devices take; of replicas, one in the receiver's node sends."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.layout import Sharding
from xshard.layout.block_rows import block_fills
from xshard.layout.runs import Run, Segment, as_index
from xshard.steps.exchange.sources import dim_end, dim_ends, sources, view_pairs
from xshard.steps.exchange.traffic import begun_axes, ended_axes, rows_in_common
from xshard.steps.traffic import Hop, Traffic

# Largest mesh for which node-local senders are considered: the choice compares all pairs of devices.
MAX_PAIRED = 512


class BlockHolders(NamedTuple):
    """The distinct blocks of a sharding and the devices that hold them."""

    keys: NDArray[
        np.int64
    ]  # (blocks, dims + 1): the place of every block along every dim, and its addend
    block_of: NDArray[np.int64]  # per device the number of its block
    addends: NDArray[np.int64]  # per device its addend number
    near: NDArray[np.bool_]  # (blocks, devices): True if a device of the same node holds the block


@layout_cache(maxsize=1024)
def block_holders(sharding: Sharding, node_devices: int) -> BlockHolders:
    """The holders of all blocks; blocks with equal shards and addend numbers are one."""
    mesh = sharding.mesh
    layout = sharding.layout
    addends = mesh.indices(layout.tagged("sum", "max", "min"))
    places = np.stack([*(mesh.indices(dim.axes) for dim in layout.dims), addends], axis=1)
    keys, block_of = np.unique(places, axis=0, return_inverse=True)
    block_of = block_of.reshape(-1)
    nodes = np.arange(mesh.n_devices) // node_devices
    held = np.zeros((len(keys), nodes[-1] + 1), bool)
    held[block_of, nodes] = True
    return BlockHolders(keys, block_of, addends, held[:, nodes])


def needed_elements(before: Sharding, after: Sharding, node_devices: int) -> NDArray[np.int64]:
    """(blocks, devices): number of elements of each block of `before` that each device needs for `after`."""
    have = block_holders(before, node_devices)
    elements: NDArray[np.int64] = (have.keys[:, -1:] == have.addends[None]).astype(np.int64)
    for d, dim in enumerate(after.layout.dims):
        shared = rows_in_common(dim_end(before, d), dim_end(after, d))
        elements *= shared[:, after.mesh.indices(dim.axes)][have.keys[:, d]]
    return elements


def node_local_traffic(before: Sharding, after: Sharding, node_devices: int) -> Traffic:
    """Traffic of an exchange with node-local senders: level 0 between nodes, level 1 inside them."""
    elements = needed_elements(before, after, node_devices)
    have = block_holders(before, node_devices)
    wanted = elements.sum(axis=0)
    elements[have.block_of, np.arange(before.mesh.n_devices)] = 0
    arrives = elements.sum(axis=0)
    hops = []
    for level, table in enumerate(
        (np.where(have.near, 0, elements), np.where(have.near, elements, 0))
    ):
        by_device = table.sum(axis=0)
        if received := int(by_device.max()):
            nodes = np.arange(len(by_device)) // node_devices
            slack = received - int(np.bincount(nodes, by_device).max() / node_devices)
            hops.append(
                Hop(before.mesh.axes[0], received, int((table > 0).sum(axis=0).max()), level, slack)
            )
    copied = 2 * int(wanted.max())
    return Traffic(int(arrives.max()), copied, tuple(hops), copied - int((wanted + arrives).max()))


@layout_cache(maxsize=1024)
def node_local_senders(
    before: Sharding, after: Sharding, node_devices: int
) -> dict[tuple[int, int], int]:
    """(block, receiver) -> the holder in the receiver's node with the least to send, if there is one."""
    elements = needed_elements(before, after, node_devices)
    have = block_holders(before, node_devices)
    at_home: dict[tuple[int, int], list[int]] = {}
    for device, block in enumerate(have.block_of.tolist()):
        at_home.setdefault((block, device // node_devices), []).append(device)
    load: Counter[int] = Counter()
    chosen: dict[tuple[int, int], int] = {}
    for receiver in range(before.mesh.n_devices):
        for block in np.flatnonzero(elements[:, receiver]).tolist():
            near = at_home.get((block, receiver // node_devices), [])
            if receiver in near or not near:
                continue
            sender = min(near, key=lambda device: (load[device], device))
            load[sender] += int(elements[block, receiver])
            chosen[block, receiver] = sender
    return chosen


class Message(NamedTuple):
    """The box that `dst` takes from `src`: per dim, matching rows of both blocks. It is a dense sub-array."""

    src: int
    dst: int
    box: tuple[tuple[Segment, ...], ...]
    sign: int = 1  # factor that the receiver applies: rows from beyond a pole may be negated

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(s.length for s in segments) for segments in self.box)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def src_index(self) -> tuple[NDArray[np.int64], ...]:
        """Numpy index of the box in the sender's block."""
        return np.ix_(*(rows_at(segments, 0) for segments in self.box))

    def dst_index(self) -> tuple[NDArray[np.int64], ...]:
        """Numpy index of the box in the receiver's block."""
        return np.ix_(*(rows_at(segments, 1) for segments in self.box))


Messages = tuple[Message, ...]


def messages_to(
    before: Sharding, after: Sharding, device: int, node_devices: int | None = None
) -> Messages:
    """The messages that a device receives (from itself too), by sender; from its node if one there can."""
    plain = _messages_to(before, after, device, None)
    if node_devices is None:
        return plain
    blocks = block_holders(before, node_devices).block_of
    near = node_local_senders(before, after, node_devices)
    chosen = (m._replace(src=near.get((int(blocks[m.src]), device), m.src)) for m in plain)
    return tuple(sorted(chosen, key=lambda m: m.src))


def messages_from(
    before: Sharding, after: Sharding, device: int, node_devices: int | None = None
) -> Messages:
    """The messages that a device sends (to itself too), ordered by receiver."""
    mesh = before.mesh
    ended = ended_axes(before.layout, after.layout)
    moving = [a for a in mesh.axes if a in before.layout.cut_axes or a in ended]
    if node_devices is None:
        by_receiver = (_messages_to(before, after, r, device) for r in mesh.group(device, moving))
    else:
        by_receiver = (messages_to(before, after, r, node_devices) for r in range(mesh.n_devices))
    return tuple(m for messages in by_receiver for m in messages if m.src == device)


def rows_at(segments: tuple[Segment, ...], end: int) -> NDArray[np.int64]:
    """Local rows of the segments in the block of the sender (end 0) or the receiver (end 1)."""
    index = as_index(tuple(Run(segment[end], segment.length) for segment in segments))
    return np.r_[index] if isinstance(index, slice) else index


def fill_boxes(after: Sharding, device: int) -> tuple[tuple[int, int, int, float], ...]:
    """Rows outside the array that a device fills itself: (dim, start, stop, value), in order of writing."""
    fills: list[tuple[int, int, int, float]] = []
    for d, (dim, n) in enumerate(zip(after.layout.dims, after.shape, strict=True)):
        sizes = after.mesh.sizes_of(dim.axes)
        index = after.dim_device(d, device)
        fills += [(d, *fill) for fill in block_fills(dim, n, sizes, index)]
    return tuple(fills)


@layout_cache(maxsize=8192)
def _messages_to(before: Sharding, after: Sharding, device: int, sender: int | None) -> Messages:
    mesh = before.mesh
    src = before.layout
    dst = after.layout
    coords = mesh.coords(device)
    begins = begun_axes(src, dst)
    if any(coords[mesh.position(a)] for a in begins if a not in src.cut_axes):
        return ()  # only the first device along the new sum contributes
    messages = []
    for mine, theirs in view_pairs(before, after):
        per_dim = []
        for d, (a, b) in enumerate(dim_ends(before, after, mine, theirs)):
            indices = before.dim_device(d, device), after.dim_device(d, device)
            places = list(_indices(a.sizes))
            once = any(axis in begins for axis in a.dim.axes)
            offered = sources(
                a, b, *indices, once, None if sender is None else before.dim_device(d, sender)
            )
            fixed = [(i, coords[mesh.position(x)]) for i, x in enumerate(a.dim.axes) if x in begins]
            taken = ((places[s.sender], s.segments) for s in offered)
            per_dim.append(
                [(place, rows) for place, rows in taken if all(place[i] == c for i, c in fixed)]
            )
        for addend in _indices(mesh.sizes_of(ended_axes(src, dst))):
            for combo in itertools.product(*per_dim):
                from_coords = list(coords)
                for axis, c in zip(ended_axes(src, dst), addend, strict=True):
                    from_coords[mesh.position(axis)] = c
                for dim, (place, _) in zip(src.dims, combo, strict=True):
                    for axis, c in zip(dim.axes, place, strict=True):
                        from_coords[mesh.position(axis)] = c
                box = tuple(segments for _, segments in combo)
                messages.append(
                    Message(mesh.device(from_coords), device, box, mine.sign * theirs.sign)
                )
    return tuple(sorted(messages, key=lambda m: m.src))


def _indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))
