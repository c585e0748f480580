"""Exchange: every device sends every other exactly the boxes it lacks. The general step.

It realises any pair of layouts in one round at the fewest bytes received, adding where a sum
ends; structured collectives win where latency or hardware support does. Its adjoint is the
exchange between the dual layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.errors import PlanError
from xshard.held import fills
from xshard.layout import Layout
from xshard.mesh import Mesh
from xshard.overlap import Fold
from xshard.ownership import Run, Runs, Segment, common, owners, rows
from xshard.sharding import Cuts, Sharding
from xshard.steps.base import REDUCERS, Block, Blocks, Hop, Levels, Step, Traffic, slow_first
from xshard.steps.sources import CARRIED, Side, counts, sources
from xshard.steps.views import View, carried, views

# Up to this many devices an exchange over several kinds of links is priced by looking at each.
MAX_TABLED = 4096


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
    """

    kind: ClassVar[str] = "exchange"
    to: Layout

    def after(self, before: Sharding) -> Sharding:
        after = before.with_layout(self.to)
        kinds = {kind for kind, _ in before.layout.tags if kind != "copy"}
        new = set(after.layout.tagged("max", "min")) - set(before.layout.tagged("max", "min"))
        if new or not {kind for kind, _ in after.layout.tags if kind not in ("copy", "sum")} <= kinds:
            raise PlanError(f"'{before.layout}' holds no max or min to keep in '{self.to}'")
        return after

    def traffic(self, before: Sharding, levels: Levels = ()) -> Traffic:
        after = before.with_layout(self.to)
        even = _even_traffic_between(before, after)
        if even is not None and len(levels) < 2:
            return even
        if even is not None and before.mesh.n_devices > MAX_TABLED:
            # Too many devices to look at: priced as if all crossed the slowest link that any of it may cross.
            slowest = slow_first(before.mesh, moving(before, after), levels)[:1]
            return replace(even, hops=tuple(h._replace(axis=a) for h in even.hops for a, _ in slowest))
        reached = reach(before, after, ())
        most = int(reached.elements.max())
        hops: list[Hop] = []
        agree: tuple[str, ...] = ()
        total = np.zeros_like(reached.elements)
        for level in levels or (before.mesh.axes,):
            # What a device gets at this level: all it can reach with the slower levels' coordinates
            # its own, less what it can reach with this level's too.
            agree = (*agree, *level)
            nearer = reach(before, after, agree)
            received, messages = reached.elements - nearer.elements, reached.senders - nearer.senders
            total = total + received
            if received.any():
                longest = max((before.mesh.size(a), a) for a in moving(before, after) if a in level)[1]
                hops.append(Hop(longest, int(received.max()), int(messages.max())))
            reached = nearer
        # Every box, a device's own too, is packed at one end and unpacked at the other.
        return Traffic(int(total.max()), 2 * most, tuple(hops))

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        after = before.with_layout(self.to)
        op = self.op(before)
        results = []
        for device in range(before.mesh.n_devices):
            out = np.zeros(after.local_shape(device), blocks[device].dtype)
            for d, start, stop, value in filled(after, device):
                out[(slice(None),) * d + (slice(start, stop),)] = value
            written = np.zeros(out.shape, bool)
            for message in messages_to(before, after, device):
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


def messages_to(before: Sharding, after: Sharding, device: int) -> tuple[Message, ...]:
    """What a device takes from every sender (itself included), senders in order of their boxes.

    A sender differs from the receiver only along axes that cut the source or whose sum ends, so
    replicas share the work and a device that holds a row already takes it from itself.
    """
    return _messages_to(before, after, device)


def messages_from(before: Sharding, after: Sharding, device: int) -> tuple[Message, ...]:
    """What a device sends to every receiver (itself included), receivers in order."""
    mesh = before.mesh
    far = [a for a in mesh.axes if a in _cut_axes(before.layout) or a in ended(before.layout, after.layout)]
    receivers = mesh.group(device, far)
    return tuple(m for r in receivers for m in messages_to(before, after, r) if m.src == device)


def moving(before: Sharding, after: Sharding) -> tuple[str, ...]:
    """Axes along which a sender and its receiver may differ."""
    src, dst = before.layout, after.layout
    turned = {d for pair in _views(before, after) for v in pair for d, shift in enumerate(v.shifts) if shift}
    rolled = {axis for d in turned for axis in (*src.dims[d].axes, *dst.dims[d].axes)}
    return tuple(a for a in before.mesh.axes if src.role(a) != dst.role(a) or a in rolled)


def ended(src: Layout, dst: Layout) -> tuple[str, ...]:
    """Axes whose sum, max or min ends between the layouts."""
    kinds = ("sum", "max", "min")
    return tuple(a for kind in kinds for a in src.tagged(kind) if a not in dst.tagged(kind))


def begun(src: Layout, dst: Layout) -> tuple[str, ...]:
    """Axes along which a sum begins between the layouts."""
    return tuple(a for a in dst.tagged("sum") if a not in src.tagged("sum"))


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
    cut = _cut_axes(src)
    if any(coords[mesh.position(a)] for a in begins if a not in cut):
        return ()  # the first device along the new sum contributes, this one adds nothing
    found = []
    for mine, theirs in _views(before, after):
        per_dim = []
        for d, (a, b) in enumerate(_sides(before, after, mine, theirs)):
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


def _sides(before: Sharding, after: Sharding, mine: View, theirs: View) -> Iterator[tuple[Side, Side]]:
    """For every dim, its source and destination as one pair of views has them."""
    stay = carried(before, after)
    for d, (a, b) in enumerate(zip(before.layout.dims, after.layout.dims, strict=True)):
        shifts = theirs.shifts[d], mine.shifts[d]
        if d in stay and not any(shifts):
            yield Side(a, CARRIED), Side(b, CARRIED)
        else:
            yield Side(a, theirs.sides[d], shifts[0]), Side(b, mine.sides[d], shifts[1])


def _views(before: Sharding, after: Sharding) -> Iterator[tuple[View, View]]:
    """The parts of a destination with those of the source that each may come from."""
    stay = carried(before, after)
    return itertools.product(views(after, stay), views(before, stay))


def _indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))


def _cut_axes(layout: Layout) -> tuple[str, ...]:
    return tuple(a for dim in layout.dims for a in dim.axes)


def even_traffic(
    shape: Sequence[int], src: Cuts, dst: Cuts, addends: Sequence[tuple[str, int]]
) -> Traffic | None:
    """Traffic of an exchange between even contiguous cuts over one kind of link, without looking at devices.

    addends: the axes (name, size) whose sum ends. None where the two cuts of a dim do not divide
    each other: then devices differ and have to be looked at.
    """
    many = math.prod(n for _, n in addends)
    need, own, senders = many, 1, many
    moving = [(n, axis) for axis, n in addends]
    for length, a, b in zip(shape, src, dst, strict=True):
        shared = 0
        while shared < min(len(a), len(b)) and a[shared] == b[shared]:
            shared += 1
        there, here = (math.prod(n for _, n in cut[shared:]) for cut in (a, b))
        moving += [(n, axis) for axis, n in (*a[shared:], *b[shared:])]
        parts = math.prod(n for _, n in b[:shared])
        need *= length // (parts * here)
        if there > 1 and here > 1:
            # Different axes cut on: some device has the first part of the one and the last of the other.
            if there % here and here % there:
                return None
            own = 0
        own *= length // (parts * max(there, here))
        senders *= max(1, there // here)
    received = need - own
    if not received:
        return Traffic(0, 2 * need)
    return Traffic(received, 2 * need, (Hop(max(moving)[1], received, senders - (own > 0)),))


def _even_traffic_between(before: Sharding, after: Sharding) -> Traffic | None:
    src, dst = before.even_cuts, after.even_cuts
    if src is None or dst is None or begun(before.layout, after.layout):
        return None
    addends = [(a, before.mesh.size(a)) for a in ended(before.layout, after.layout)]
    return even_traffic(before.shape, src, dst, addends)


class Reach(NamedTuple):
    """Arrays over the mesh: the elements that a device takes from some senders, and how many these are."""

    elements: NDArray[np.int64]
    senders: NDArray[np.int64]


@lru_cache(maxsize=4096)
def reach(before: Sharding, after: Sharding, agree: tuple[str, ...]) -> Reach:
    """What every device takes from the senders that share its coordinates along `agree`.

    No axis: from all senders, itself included. All axes: from itself.
    """
    mesh, src, dst = before.mesh, before.layout, after.layout
    begins = begun(src, dst)
    addends = mesh.size(*(a for a in ended(src, dst) if a not in agree))
    elements, senders = np.zeros((2, *(1,) * len(mesh.axes)), np.int64)
    for mine, theirs in _views(before, after):
        boxes = parts = np.full((1,) * len(mesh.axes), addends, np.int64)
        for (a, b), length in zip(_sides(before, after, mine, theirs), before.shape, strict=True):
            fixed = tuple(axis for axis in a.dim.axes if axis in begins or axis in agree)
            once = any(axis in begins for axis in a.dim.axes)
            dim_elements, dim_senders = _dim_reach(a, b, length, fixed, mesh, once)
            boxes, parts = boxes * dim_elements, parts * dim_senders
        elements, senders = elements + boxes, senders + parts
    for axis in begins:
        if axis not in _cut_axes(src):
            first = _spread(np.eye(1, mesh.size(axis), dtype=np.int64)[0], (axis,), mesh)
            elements, senders = elements * first, senders * first
    return Reach(elements, senders)


@lru_cache(maxsize=16384)
def _dim_reach(
    a: Side, b: Side, length: int, fixed: tuple[str, ...], mesh: Mesh, once: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One dim's share of `reach`, as arrays over the axes that cut it, shaped to broadcast over the mesh."""
    if not (a.is_plain and b.is_plain):
        return counts(a, b, length, fixed, mesh, once)
    src, dst = a.dim, b.dim
    src_sizes, dst_sizes = mesh.sizes_of(src.axes), mesh.sizes_of(dst.axes)
    shared = _rows_in_common(owners(src, length, src_sizes), owners(dst, length, dst_sizes))
    # Over (destination indices, source indices); the fixed axes of the source are the receiver's own.
    shared = shared.reshape((*dst_sizes, *src_sizes))
    over = tuple(len(dst_sizes) + i for i, a in enumerate(src.axes) if a not in fixed)
    left = [mesh.position(a) for a in (*dst.axes, *(a for a in src.axes if a in fixed))]
    shape = [n if i in left else 1 for i, n in enumerate(mesh.sizes)]
    # An axis on both sides is read on its diagonal: receiver and sender share it.
    elements, senders = (
        np.einsum(table, left, sorted(set(left))).reshape(shape)
        for table in (shared.sum(axis=over), (shared > 0).sum(axis=over))
    )
    return elements, senders


def _rows_in_common(src: tuple[Runs, ...], dst: tuple[Runs, ...]) -> NDArray[np.int64]:
    """How many rows every block of `dst` (first index) shares with every block of `src`."""
    if all(len(runs) == 1 and runs[0].repeats == 1 and runs[0].start >= 0 for runs in (*src, *dst)):
        a, b = (np.array([(r.start, r.start + r.length) for (r,) in side]) for side in (src, dst))
        ends: NDArray[np.int64] = np.minimum(b[:, None, 1], a[None, :, 1])
        shared: NDArray[np.int64] = np.maximum(ends - np.maximum(b[:, None, 0], a[None, :, 0]), 0)
        return shared
    return np.array([[sum(s.length for s in common(a, b)) for a in src] for b in dst])


def _spread(table: NDArray[np.int64], axes: tuple[str, ...], mesh: Mesh) -> NDArray[np.int64]:
    """A table over some axes, shaped to broadcast over the whole mesh."""
    order = sorted(range(len(axes)), key=lambda i: mesh.position(axes[i]))
    shape = [mesh.size(a) if a in axes else 1 for a in mesh.axes]
    return np.transpose(np.reshape(table, mesh.sizes_of(axes)), order).reshape(shape)
