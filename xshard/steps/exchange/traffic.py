"""The traffic of an exchange between any shardings, over links of several speeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import factored
from xshard.layout.partition import all_owned_rows, owner_of_rows
from xshard.layout.pieces import shared_rows
from xshard.layout.sub_axes import SubAxisMesh
from xshard.steps.exchange.even_traffic import LinkCuts, digit_traffic
from xshard.steps.exchange.sources import (
    DimEnd,
    Received,
    coords_of,
    count_sources,
    dim_ends,
    view_pairs,
)
from xshard.steps.traffic import Hop, LinkSpans, Traffic, slowest_first

MOST_COMPARED = 2**20  # rows of a dim, times its blocks, that are compared one by one

Axes = tuple[str, ...]
Levels = list[tuple[int, dict[str, str]]]


def exchange_traffic(before: Sharding, after: Sharding, spans: LinkSpans) -> Traffic:
    """Traffic of an exchange with senders that differ from the receiver only along shards and ended sums."""
    even = even_traffic(before, after, spans)
    return counted_traffic(before, after, spans) if even is None else even


def counted_traffic(before: Sharding, after: Sharding, spans: LinkSpans) -> Traffic:
    """The same traffic, counted per device: for shards that are uneven or do not divide each other."""
    mesh, factors, levels = span_axes(before.mesh, spans)
    if mesh.axes != before.mesh.axes:
        before, after = (
            Sharding(factored(s.layout, factors), mesh, s.shape) for s in (before, after)
        )
    return traffic_by_level(
        partial(received_from, before, after), mesh, moving_axes(before, after), levels
    )


def traffic_by_level(
    received_from: Callable[[Axes], Received], mesh: Mesh, may_differ: Sequence[str], levels: Levels
) -> Traffic:
    """The traffic of an exchange by what devices take from senders that share coordinates along some axes."""
    farther = wanted = received_from(())
    hops = list[Hop]()
    agree = Axes()
    total = np.zeros_like(wanted.elements)
    for level, axes in levels:
        # Over this level a device receives what it takes from senders that share its coordinates on
        # slower levels, less what it takes from those that share them on this level too.
        agree = (*agree, *axes)
        nearer = received_from(agree)
        received = farther.elements - nearer.elements
        messages = farther.senders - nearer.senders
        total = total + received
        if received.any():
            longest = max((mesh.size(a), a) for a in may_differ if a in axes)[1]
            nearer_axes = tuple(i for i, axis in enumerate(mesh.axes) if axis not in agree)
            most = received.max()
            n = math.prod(received.shape[i] for i in nearer_axes)
            slack = int(most - received.sum(axis=nearer_axes).max() / n)
            hops.append(Hop(axes[longest], int(most), int(messages.max()), level, slack))
        farther = nearer
    # Every box is packed by its sender and unpacked by its receiver.
    copied = 2 * int(wanted.elements.max())
    return Traffic(
        int(total.max()), copied, tuple(hops), copied - int((wanted.elements + total).max())
    )


class SpanAxes(NamedTuple):
    """A mesh with spans as axes, the spans of every axis, and per level, the name of a span -> its axis."""

    mesh: Mesh
    factors: Mapping[str, Axes]
    levels: Levels


@lru_cache(maxsize=256)
def span_axes(mesh: Mesh, spans: LinkSpans) -> SpanAxes:
    """A mesh that has the spans as axes: itself if spans are whole axes."""
    spans = slowest_first(mesh, mesh.axes, spans)
    parts = spans_by_axis(mesh, spans)
    split = tuple(
        (axis, tuple(span.size for span in own)) for axis, own in parts.items() if len(own) > 1
    )
    fine = SubAxisMesh(mesh, split)
    names = {
        s: name
        for axis, own in parts.items()
        for s, name in zip(own, fine.sub_axes[axis], strict=True)
    }
    groups = groupby(spans, key=lambda span: span.level)
    levels = [(level, {names[span]: span.axis for span in group}) for level, group in groups]
    return SpanAxes(fine if split else mesh, fine.sub_axes, levels)


def moving_axes(before: Sharding, after: Sharding) -> tuple[str, ...]:
    """Axes along which a sender and its receiver may differ."""
    src = before.layout
    dst = after.layout
    parts = [view for pair in view_pairs(before, after) for view in pair]
    turned = {d for view in parts for d, shift in enumerate(view.shifts) if shift}
    rolled = {axis for d in turned for axis in (*src.dims[d].axes, *dst.dims[d].axes)}
    return tuple(a for a in before.mesh.axes if src.role(a) != dst.role(a) or a in rolled)


def ended_axes(src: Layout, dst: Layout) -> tuple[str, ...]:
    """Axes with a sum, max or min that ends between the layouts."""
    return tuple(
        a for kind in ("sum", "max", "min") for a in src.tagged(kind) if a not in dst.tagged(kind)
    )


def begun_axes(src: Layout, dst: Layout) -> tuple[str, ...]:
    """Axes along which a sum begins between the layouts."""
    return tuple(a for a in dst.tagged("sum") if a not in src.tagged("sum"))


def even_traffic(before: Sharding, after: Sharding, spans: LinkSpans) -> Traffic | None:
    """Traffic of an exchange between even contiguous shards, in closed form; None for other shards."""
    src = link_cuts(before, spans)
    dst = link_cuts(after, spans)
    if src is None or dst is None or begun_axes(before.layout, after.layout):
        return None
    by_axis = spans_by_axis(before.mesh, spans)
    addends = [span for a in ended_axes(before.layout, after.layout) for span in by_axis[a]]
    return digit_traffic(before.shape, src, dst, addends)


def link_cuts(sharding: Sharding, spans: LinkSpans) -> LinkCuts | None:
    """Per dim, the spans that shard it, outermost first; None unless all shards are contiguous and even."""
    if sharding.even_cuts is None:
        return None
    by_axis = spans_by_axis(sharding.mesh, spans)
    return tuple(
        tuple(span for axis, _ in cut for span in by_axis[axis]) for cut in sharding.even_cuts
    )


def spans_by_axis(mesh: Mesh, spans: LinkSpans) -> dict[str, LinkSpans]:
    """Every axis -> its spans, the outermost first."""
    outer_first = sorted(slowest_first(mesh, mesh.axes, spans), key=lambda span: -span.stride)
    return {a: tuple(span for span in outer_first if span.axis == a) for a in mesh.axes}


@layout_cache(maxsize=4096)
def received_from(before: Sharding, after: Sharding, agree: tuple[str, ...]) -> Received:
    """What every device takes from senders that share its coordinates along the axes `agree`."""
    mesh = before.mesh
    src = before.layout
    dst = after.layout
    begins = begun_axes(src, dst)
    addends = mesh.size(*(a for a in ended_axes(src, dst) if a not in agree))
    # The elements of all devices together have to fit into 64 bits, or are numbers of Python.
    most = max(before.max_local_size, after.max_local_size) * mesh.n_devices * addends
    kind: Any = np.int64 if most < 2**62 else object
    elements, senders = np.zeros((2, *(1,) * len(mesh.axes)), kind)
    for pairs in _all_dim_ends(before, after):
        boxes = parts = np.full((1,) * len(mesh.axes), addends, kind)
        for a, b in pairs:
            fixed = tuple(axis for axis in a.dim.axes if axis in begins or axis in agree)
            once = any(axis in begins for axis in a.dim.axes)
            dim_elements, dim_senders = received_of_dim(a, b, fixed, mesh, once)
            boxes = boxes * dim_elements
            parts = parts * dim_senders
        elements = elements + boxes
        senders = senders + parts
    for axis in begins:
        if axis not in src.cut_axes:
            # Only the first device along a new sum receives.
            first = np.eye(1, mesh.size(axis), dtype=np.int64)
            first = first.reshape([-1 if a == axis else 1 for a in mesh.axes])
            elements = elements * first
            senders = senders * first
    return Received(elements, senders)


@layout_cache(maxsize=64)
def _all_dim_ends(
    before: Sharding, after: Sharding
) -> tuple[tuple[tuple[DimEnd, DimEnd], ...], ...]:
    """For every pair of views, the source and the destination of every dim."""
    return tuple(tuple(dim_ends(before, after, *views)) for views in view_pairs(before, after))


@layout_cache(maxsize=16384)
def received_of_dim(a: DimEnd, b: DimEnd, fixed: Axes, mesh: Mesh, once: bool) -> Received:
    """The factor of one dim in `received_from`: arrays over its axes, shaped to broadcast over the mesh."""
    if not (a.is_plain and b.is_plain):
        return count_sources(a, b, fixed, mesh, once)
    receivers, givers, rows = shared_rows_of(a, b)
    theirs, mine = (
        dict(zip(end.dim.axes, coords_of(indices, end.sizes), strict=True))
        for end, indices in ((a, givers), (b, receivers))
    )
    theirs = {axis: cell for axis, cell in theirs.items() if axis in fixed}
    # Along fixed axes the sender has the receiver's index.
    agree = np.all(
        [cell == mine.get(axis, cell) for axis, cell in theirs.items()] or [rows > 0], axis=0
    )
    along = theirs | mine
    shape = [n if axis in along else 1 for axis, n in zip(mesh.axes, mesh.sizes, strict=True)]
    cell = np.zeros_like(rows[agree])
    for axis, n in zip(mesh.axes, shape, strict=True):
        if axis in along:
            cell = cell * n + along[axis][agree]
    elements = np.zeros(math.prod(shape), np.int64)
    senders = np.bincount(cell, minlength=math.prod(shape))
    np.add.at(elements, cell, rows[agree])
    return Received(elements.reshape(shape), senders.reshape(shape))


@layout_cache(maxsize=16384)
def shared_rows_of(src: DimEnd, dst: DimEnd) -> tuple[NDArray[np.int64], ...]:
    """`shared_rows` of the blocks of a dim under two shardings; of a short dim row by row."""
    if src.length * max(math.prod(end.sizes) for end in (src, dst)) > MOST_COMPARED:
        return shared_rows(*(all_owned_rows(*end[:3]) for end in (src, dst)))
    givers, takers = (owner_of_rows(*end[:3]) for end in (src, dst))
    parts = math.prod(src.sizes)
    rows = np.bincount(takers * parts + givers)
    pairs = np.flatnonzero(rows)
    return pairs // parts, pairs % parts, rows[pairs]


@layout_cache(maxsize=4096)
def rows_in_common(src: DimEnd, dst: DimEnd) -> NDArray[np.int64]:
    """Rows that every owner under `src` (first index) shares with every owner under `dst`."""
    receivers, givers, rows = shared_rows_of(src, dst)
    table = np.zeros((math.prod(src.sizes), math.prod(dst.sizes)), np.int64)
    table[givers, receivers] = rows
    return table
