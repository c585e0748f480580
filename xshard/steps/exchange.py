"""Exchange: every device sends every other exactly the boxes it lacks. The general step.

It realises any pair of layouts in one round at the fewest bytes received, adding where a sum
ends; structured collectives win where latency or hardware support does. Its adjoint is the
exchange between the dual layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.errors import PlanError
from xshard.held import fills
from xshard.layout import Layout
from xshard.overlap import Fold
from xshard.ownership import Run, Segment, rows
from xshard.sharding import Sharding
from xshard.steps.base import REDUCERS, Block, Blocks, Lanes, Step, Traffic
from xshard.steps.nearby import holders, nearby_senders, nearby_traffic
from xshard.steps.reach import begun, cut_axes, ended, exchange_traffic
from xshard.steps.sources import sides, sources, view_pairs


class Message(NamedTuple):
    """One box that device `dst` takes from device `src`: for every dim, matching rows of both blocks.

    A box is the outer product of its dims' segments, so a message is one dense sub-array.
    """

    src: int
    dst: int
    box: tuple[tuple[Segment, ...], ...]
    sign: int = 1  # what the receiver multiplies it by: rows from beyond a pole may be negated

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


@dataclass(frozen=True)
class Exchange(Step):
    """Every device gets the block of layout `to` from whoever holds its parts.

    Sums that end, and contributions to a fold, are added at the receiver in the order of the
    senders; an element of a new sum or fold is contributed by its first holder alone.

    node_devices: consecutive devices that are a node, where a replica in the receiver's node
    is to be the sender; for exchanges that neither end nor begin a sum, of blocks that do not overlap.
    """

    kind: ClassVar[str] = "exchange"
    to: Layout
    node_devices: int | None = None

    def __post_init__(self) -> None:
        if self.node_devices is not None and self.node_devices < 1:
            raise PlanError(f"{self.node_devices} devices are no node", hint="a node has 1 device or more")

    def after(self, before: Sharding) -> Sharding:
        after = before.with_layout(self.to)
        if self.node_devices is not None and (ended(before.layout, self.to) or begun(before.layout, self.to)):
            raise PlanError(f"no near senders where a sum ends or begins: '{before.layout}' -> '{self.to}'")
        if self.node_devices is not None and any(d.overlap for d in (*before.layout.dims, *self.to.dims)):
            raise PlanError(f"no near senders where blocks overlap: '{before.layout}' -> '{self.to}'")
        kinds = {kind for kind, _ in before.layout.tags if kind != "copy"}
        new = set(after.layout.tagged("max", "min")) - set(before.layout.tagged("max", "min"))
        if new or not {kind for kind, _ in after.layout.tags if kind not in ("copy", "sum")} <= kinds:
            raise PlanError(f"'{before.layout}' holds no max or min to keep in '{self.to}'")
        return after

    def traffic(self, before: Sharding, lanes: Lanes = ()) -> Traffic:
        after = before.with_layout(self.to)
        if self.node_devices is not None:
            return nearby_traffic(before, after, self.node_devices)
        return exchange_traffic(before, after, lanes)

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        after = before.with_layout(self.to)
        op = self.op(before)
        results = []
        for device in range(before.mesh.n_devices):
            out = np.zeros(after.local_shape(device), blocks[device].dtype)
            for d, start, stop, value in filled(after, device):
                out[(slice(None),) * d + (slice(start, stop),)] = value
            written = np.zeros(out.shape, bool)
            for message in messages_to(before, after, device, self.node_devices):
                box, index = blocks[message.src][message.src_index()], message.dst_index()
                box = box if message.sign > 0 else -box
                out[index] = np.where(written[index], REDUCERS[op](out[index], box), box) if op else box
                written[index] = True
            results.append(out)
        return results

    def op(self, before: Sharding) -> str | None:
        """How boxes that meet at one place combine: the reduction that ends here, if one does."""
        for kind, axes in before.layout.tags:
            if kind != "copy" and not set(axes) <= set(self.to.tagged(kind)):
                return kind
        return "sum" if any(isinstance(dim.overlap, Fold) for dim in before.layout.dims) else None

    def __str__(self) -> str:
        return "exchange"


def messages_to(
    before: Sharding, after: Sharding, device: int, node_devices: int | None = None
) -> tuple[Message, ...]:
    """What a device takes from every sender (itself included), senders in order.

    A sender differs from the receiver only along axes that cut the source or whose sum ends, so
    replicas share the work and a device that holds a row already takes it from itself. With
    `node_devices` a replica in the receiver's node stands in for one that is elsewhere.
    """
    plain = _messages_to(before, after, device)
    if node_devices is None:
        return plain
    blocks = holders(before, node_devices).block_of
    near = nearby_senders(before, after, node_devices)
    chosen = (m._replace(src=near.get((int(blocks[m.src]), device), m.src)) for m in plain)
    return tuple(sorted(chosen, key=lambda m: m.src))


def messages_from(
    before: Sharding, after: Sharding, device: int, node_devices: int | None = None
) -> tuple[Message, ...]:
    """What a device sends to every receiver (itself included), receivers in order."""
    mesh, ends = before.mesh, ended(before.layout, after.layout)
    moving = [a for a in mesh.axes if a in cut_axes(before.layout) or a in ends]
    receivers = mesh.group(device, moving if node_devices is None else mesh.axes)
    found = (m for r in receivers for m in messages_to(before, after, r, node_devices))
    return tuple(m for m in found if m.src == device)


def rows_at(segments: tuple[Segment, ...], end: int) -> NDArray[np.int64]:
    """Local rows of the segments in the sender's (0) or the receiver's (1) block."""
    index = rows(tuple(Run(segment[end], segment.length) for segment in segments))
    return np.r_[index] if isinstance(index, slice) else index


def filled(after: Sharding, device: int) -> tuple[tuple[int, int, int, float], ...]:
    """Rows outside the array, which a device fills: (dim, start, stop, value), written in this order."""
    found: list[tuple[int, int, int, float]] = []
    for d, dim in enumerate(after.layout.dims):
        sizes = after.mesh.sizes_of(dim.axes)
        found += [(d, *fill) for fill in fills(dim, after.shape[d], sizes, after.dim_device(d, device))]
    return tuple(found)


@lru_cache(maxsize=8192)
def _messages_to(before: Sharding, after: Sharding, device: int) -> tuple[Message, ...]:
    mesh, src, dst = before.mesh, before.layout, after.layout
    coords = mesh.coords(device)
    begins = begun(src, dst)
    cut = cut_axes(src)
    if any(coords[mesh.position(a)] for a in begins if a not in cut):
        return ()  # the first device along the new sum contributes, this one adds nothing
    found = []
    for mine, theirs in view_pairs(before, after):
        per_dim = []
        for d, (a, b) in enumerate(sides(before, after, mine, theirs)):
            sizes = mesh.sizes_of(a.dim.axes)
            at = before.dim_device(d, device), after.dim_device(d, device)
            places, once = list(_indices(sizes)), any(axis in begins for axis in a.dim.axes)
            per_dim.append(
                [
                    (places[s.sender], s.segments)
                    for s in sources(a, b, before.shape[d], sizes, mesh.sizes_of(b.dim.axes), *at, once)
                    if all(
                        coords[mesh.position(axis)] == c
                        for axis, c in zip(a.dim.axes, places[s.sender], strict=True)
                        if axis in begins
                    )
                ]
            )
        for addend in _indices(mesh.sizes_of(ended(src, dst))):
            for combo in itertools.product(*per_dim):
                sender = list(coords)
                for axis, c in zip(ended(src, dst), addend, strict=True):
                    sender[mesh.position(axis)] = c
                for dim, (place, _) in zip(src.dims, combo, strict=True):
                    for axis, c in zip(dim.axes, place, strict=True):
                        sender[mesh.position(axis)] = c
                box = tuple(segments for _, segments in combo)
                found.append(Message(mesh.device(sender), device, box, mine.sign * theirs.sign))
    return tuple(sorted(found, key=lambda m: m.src))


def _indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))
