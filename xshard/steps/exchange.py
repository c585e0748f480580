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
from xshard.layout import Layout
from xshard.mesh import Mesh
from xshard.ownership import Run, Segment, common, rows
from xshard.sharding import Sharding
from xshard.steps.base import REDUCERS, Block, Blocks, Step, Traffic


class Message(NamedTuple):
    """One box that device `dst` takes from device `src`: for every dim, matching rows of both blocks.

    A box is the outer product of its dims' segments, so a message is one dense sub-array.
    """

    src: int
    dst: int
    box: tuple[tuple[Segment, ...], ...]

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

    Sums that end are added at the receiver in the order of the senders; an element of a new
    sum is contributed by its first holder alone.
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

    def traffic(self, before: Sharding) -> Traffic:
        after = before.with_layout(self.to)
        need, own, messages = volumes(before, after)
        received = int((need - own).max())
        axes = tuple(a for a in before.mesh.axes if before.layout.role(a) != after.layout.role(a))
        # Every box, a device's own too, is packed at one end and unpacked at the other.
        return Traffic(axes, received, int(messages.max()) if received else 0, 2 * int(need.max()))

    def run(self, blocks: Blocks, before: Sharding) -> list[Block]:
        after = before.with_layout(self.to)
        op = self.op(before)
        results = []
        for device in range(before.mesh.n_devices):
            out = np.zeros(after.local_shape(device), blocks[device].dtype)
            written = np.zeros(out.shape, bool)
            for message in messages_to(before, after, device):
                box, index = blocks[message.src][message.src_index()], message.dst_index()
                out[index] = np.where(written[index], REDUCERS[op](out[index], box), box) if op else box
                written[index] = True
            results.append(out)
        return results

    def op(self, before: Sharding) -> str | None:
        """How boxes that meet at one place combine: the reduction that ends here, if one does."""
        for kind, axes in before.layout.tags:
            if kind != "copy" and not set(axes) <= set(self.to.tagged(kind)):
                return kind
        return None

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
    moving = [
        a for a in mesh.axes if a in _cut_axes(before.layout) or a in ended(before.layout, after.layout)
    ]
    receivers = mesh.group(device, moving)
    return tuple(m for r in receivers for m in messages_to(before, after, r) if m.src == device)


def ended(src: Layout, dst: Layout) -> tuple[str, ...]:
    """Axes whose sum, max or min ends between the layouts."""
    kinds = ("sum", "max", "min")
    return tuple(a for a in src.tagged(*kinds) if a not in dst.tagged(*kinds))


def begun(src: Layout, dst: Layout) -> tuple[str, ...]:
    """Axes along which a sum begins between the layouts."""
    return tuple(a for a in dst.tagged("sum") if a not in src.tagged("sum"))


def rows_at(segments: tuple[Segment, ...], end: int) -> NDArray[np.int64]:
    """Local rows of the segments in the sender's (0) or the receiver's (1) block."""
    index = rows(tuple(Run(segment[end], segment.length) for segment in segments))
    return np.r_[index] if isinstance(index, slice) else index


@lru_cache(maxsize=8192)
def _messages_to(before: Sharding, after: Sharding, device: int) -> tuple[Message, ...]:
    mesh, src, dst = before.mesh, before.layout, after.layout
    coords = mesh.coords(device)
    begins = begun(src, dst)
    cut = _cut_axes(src)
    if any(coords[mesh.position(a)] for a in begins if a not in cut):
        return ()  # the first device along the new sum contributes, this one adds nothing
    per_dim = []
    for d, dim in enumerate(src.dims):
        mine = after.held(d, device)
        choices = []
        for at, theirs in zip(_indices(mesh.sizes_of(dim.axes)), before.owners(d), strict=True):
            if any(coords[mesh.position(a)] != c for a, c in zip(dim.axes, at, strict=True) if a in begins):
                continue
            segments = common(theirs, mine)
            if segments:
                choices.append((at, segments))
        per_dim.append(choices)
    ends = ended(src, dst)
    found = []
    for addend in _indices(mesh.sizes_of(ends)):
        for combo in itertools.product(*per_dim):
            sender = list(coords)
            for axis, c in zip(ends, addend, strict=True):
                sender[mesh.position(axis)] = c
            for dim, (at, _) in zip(src.dims, combo, strict=True):
                for axis, c in zip(dim.axes, at, strict=True):
                    sender[mesh.position(axis)] = c
            found.append(Message(mesh.device(sender), device, tuple(segments for _, segments in combo)))
    return tuple(sorted(found, key=lambda m: m.src))


def _indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))


def _cut_axes(layout: Layout) -> tuple[str, ...]:
    return tuple(a for dim in layout.dims for a in dim.axes)


def volumes(
    before: Sharding, after: Sharding
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """For every device (an array over the mesh): elements needed, of them held already, senders."""
    mesh, src, dst = before.mesh, before.layout, after.layout
    begins, ends = begun(src, dst), ended(src, dst)
    many = mesh.size(*ends)
    need = np.full(mesh.sizes, many, np.int64)
    own = np.ones(mesh.sizes, np.int64)
    senders = np.full(mesh.sizes, many, np.int64)
    for d in range(len(before.shape)):
        axes = tuple(dict.fromkeys((*src.dims[d].axes, *dst.dims[d].axes)))
        tables = _dim_volumes(
            before.owners(d), after.holders(d), src.dims[d].axes, dst.dims[d].axes, begins, mesh
        )
        for total, table in zip((need, own, senders), tables, strict=True):
            total *= _spread(table, axes, mesh)
    for axis in begins:
        if axis not in _cut_axes(src):
            first = np.zeros(mesh.size(axis), np.int64)
            first[0] = 1
            for total in (need, own, senders):
                total *= _spread(first, (axis,), mesh)
    return need, own, senders - (own > 0)


@lru_cache(maxsize=4096)
def _dim_volumes(
    src_rows: tuple[tuple[Run, ...], ...],
    dst_rows: tuple[tuple[Run, ...], ...],
    src_axes: tuple[str, ...],
    dst_axes: tuple[str, ...],
    begins: tuple[str, ...],
    mesh: Mesh,
) -> tuple[NDArray[np.int64], ...]:
    """One dim's share of `volumes`, as tables over the union of the axes that cut it."""
    axes = tuple(dict.fromkeys((*src_axes, *dst_axes)))
    sizes = mesh.sizes_of(axes)
    rows_in_common = np.array([[sum(s.length for s in common(a, b)) for a in src_rows] for b in dst_rows])
    need, own, senders = (np.zeros(sizes, np.int64) for _ in range(3))
    src_at, dst_at = [axes.index(a) for a in src_axes], [axes.index(a) for a in dst_axes]
    fixed = [(i, axes.index(a)) for i, a in enumerate(src_axes) if a in begins]
    src_indices = list(_indices(mesh.sizes_of(src_axes)))
    for at in _indices(sizes):
        b = int(np.ravel_multi_index([at[i] for i in dst_at], mesh.sizes_of(dst_axes))) if dst_axes else 0
        a = int(np.ravel_multi_index([at[i] for i in src_at], mesh.sizes_of(src_axes))) if src_axes else 0
        takes = [k for k, index in enumerate(src_indices) if all(index[i] == at[j] for i, j in fixed)]
        need[at] = rows_in_common[b, takes].sum()
        senders[at] = np.count_nonzero(rows_in_common[b, takes])
        own[at] = rows_in_common[b, a]
    return need, own, senders


def _spread(table: NDArray[np.int64], axes: tuple[str, ...], mesh: Mesh) -> NDArray[np.int64]:
    """A table over some axes, shaped to broadcast over the whole mesh."""
    order = sorted(range(len(axes)), key=lambda i: mesh.position(axes[i]))
    shape = [mesh.size(a) if a in axes else 1 for a in mesh.axes]
    return np.transpose(np.reshape(table, mesh.sizes_of(axes)), order).reshape(shape)
