"""The messages of an exchange: the box that every device takes from every other, and fills."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.layout import Sharding
from xshard.layout.block_rows import block_fills
from xshard.layout.runs import Run, Segment, as_index
from xshard.steps.exchange.node_senders import block_holders, node_local_senders
from xshard.steps.exchange.sources import dim_ends, sources, view_pairs
from xshard.steps.exchange.traffic import begun_axes, cut_axes, ended_axes


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
        """numpy index of the box in the sender's block."""
        return np.ix_(*(rows_at(segments, 0) for segments in self.box))

    def dst_index(self) -> tuple[NDArray[np.int64], ...]:
        """numpy index of the box in the receiver's block."""
        return np.ix_(*(rows_at(segments, 1) for segments in self.box))


def messages_to(
    before: Sharding, after: Sharding, device: int, node_devices: int | None = None
) -> tuple[Message, ...]:
    """The messages that a device receives (from itself too), by sender; from its node if one there can."""
    plain = _messages_to(before, after, device)
    if node_devices is None:
        return plain
    blocks = block_holders(before, node_devices).block_of
    near = node_local_senders(before, after, node_devices)
    chosen = (m._replace(src=near.get((int(blocks[m.src]), device), m.src)) for m in plain)
    return tuple(sorted(chosen, key=lambda m: m.src))


def messages_from(
    before: Sharding, after: Sharding, device: int, node_devices: int | None = None
) -> tuple[Message, ...]:
    """The messages that a device sends (to itself too), ordered by receiver."""
    mesh, ended = before.mesh, ended_axes(before.layout, after.layout)
    moving = [a for a in mesh.axes if a in cut_axes(before.layout) or a in ended]
    receivers = mesh.group(device, moving if node_devices is None else mesh.axes)
    messages = (m for r in receivers for m in messages_to(before, after, r, node_devices))
    return tuple(m for m in messages if m.src == device)


def rows_at(segments: tuple[Segment, ...], end: int) -> NDArray[np.int64]:
    """Local rows of the segments in the block of the sender (end 0) or the receiver (end 1)."""
    index = as_index(tuple(Run(segment[end], segment.length) for segment in segments))
    return np.r_[index] if isinstance(index, slice) else index


def fill_boxes(after: Sharding, device: int) -> tuple[tuple[int, int, int, float], ...]:
    """Rows outside the array that a device fills itself: (dim, start, stop, value), in order of writing."""
    mesh = after.mesh
    return tuple(
        (d, *fill)
        for d, (dim, n) in enumerate(zip(after.layout.dims, after.shape, strict=True))
        for fill in block_fills(dim, n, mesh.sizes_of(dim.axes), after.dim_device(d, device))
    )


@lru_cache(maxsize=8192)
def _messages_to(before: Sharding, after: Sharding, device: int) -> tuple[Message, ...]:
    mesh, src, dst = before.mesh, before.layout, after.layout
    coords = mesh.coords(device)
    begins = begun_axes(src, dst)
    cut = cut_axes(src)
    if any(coords[mesh.position(a)] for a in begins if a not in cut):
        return ()  # only the first device along the new sum contributes
    messages = []
    for mine, theirs in view_pairs(before, after):
        per_dim = []
        for d, (a, b) in enumerate(dim_ends(before, after, mine, theirs)):
            sizes = mesh.sizes_of(a.dim.axes)
            indices = before.dim_device(d, device), after.dim_device(d, device)
            places, once = list(_indices(sizes)), any(axis in begins for axis in a.dim.axes)
            per_dim.append(
                [
                    (places[s.sender], s.segments)
                    for s in sources(a, b, before.shape[d], sizes, mesh.sizes_of(b.dim.axes), *indices, once)
                    if all(
                        coords[mesh.position(axis)] == c
                        for axis, c in zip(a.dim.axes, places[s.sender], strict=True)
                        if axis in begins
                    )
                ]
            )
        for addend in _indices(mesh.sizes_of(ended_axes(src, dst))):
            for combo in itertools.product(*per_dim):
                sender = list(coords)
                for axis, c in zip(ended_axes(src, dst), addend, strict=True):
                    sender[mesh.position(axis)] = c
                for dim, (place, _) in zip(src.dims, combo, strict=True):
                    for axis, c in zip(dim.axes, place, strict=True):
                        sender[mesh.position(axis)] = c
                box = tuple(segments for _, segments in combo)
                messages.append(Message(mesh.device(sender), device, box, mine.sign * theirs.sign))
    return tuple(sorted(messages, key=lambda m: m.src))


def _indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))
