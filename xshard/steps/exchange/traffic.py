"""The traffic of an exchange between any shardings, over links of several speeds.

Even contiguous shards have a closed form (`even_traffic.py`). All others are counted per device, as
products over dims of small arrays over the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.layout import factored
from xshard.layout.mesh import Axes
from xshard.layout.partition import all_owned_rows, owner_of_rows
from xshard.layout.pieces import RowPairs, shared_rows
from xshard.layout.sub_axes import SubAxisMesh
from xshard.notation.row_arrays import Numbers
from xshard.steps.base import axes_with_new_role
from xshard.steps.exchange.even_traffic import LinkCuts, digit_traffic
from xshard.steps.exchange.sources import (
    DimEnd,
    Received,
    coords_of,
    count_sources,
    dim_ends,
    received_of_pairs,
    view_pairs,
)
from xshard.steps.traffic import Hop, LinkSpan, LinkSpans, Traffic, slowest_first

MAX_COMPARED = 2**20  # rows of a dim, times its blocks, that are compared one by one
MAX_COUNTED = 2**62  # elements of all devices together that 64-bit integers count safely


def exchange_traffic(source: Sharding, target: Sharding, spans: LinkSpans) -> Traffic:
    """Count the traffic of an exchange.

    Senders differ from their receiver only along axes that shard the source, and along sums that end.
    """
    traffic = even_traffic(source, target, spans)
    if traffic is None:
        traffic = counted_traffic(source, target, spans)
    return traffic


def counted_traffic(source: Sharding, target: Sharding, spans: LinkSpans) -> Traffic:
    """Count the traffic of an exchange per device: for shards that are uneven or do not divide each other."""
    mesh, factors, levels = span_axes(source.mesh, spans)
    if mesh.axes != source.mesh.axes:
        source = Sharding(factored(source.layout, factors), mesh, source.shape)
        target = Sharding(factored(target.layout, factors), mesh, target.shape)
    received = partial(received_from, source, target)
    return traffic_by_level(received, mesh, moving_axes(source, target), levels)


class SpanLevel(NamedTuple):
    """The links of one speed.

    level: 0 for the slowest.
    axes: each sub-axis that they span -> the whole axis.
    """

    level: int
    axes: dict[str, str]


def traffic_by_level(
    count_received: Callable[[Axes], Received],
    mesh: Mesh,
    moving: Sequence[str],
    levels: Sequence[SpanLevel],
) -> Traffic:
    """Split what devices receive in an exchange by the speed (level) of the links it comes over.

    With 2 nodes of 4, a device takes 70 elements from all senders, 30 of them from senders in its
    node, and 10 of these from itself: 40 come over the links between nodes, 20 over those inside.
    The result has one hop for each level that is used, with the numbers of the busiest device.

    Args:
        count_received: A function of some axes that counts what each device takes from the senders
            at its own coordinates along them. `count_received(())` counts all senders; with the axes
            between nodes, those in the device's own node.
        mesh: A mesh each of whose axes runs over links of one speed.
        moving: The axes along which a sender and its receiver may differ.
        levels: The axes by the speed of their links, the slowest first.
    """
    wanted_by_device = count_received(())
    # What is not counted yet: all from senders at the receiver's coordinates along the axes of
    # slower links, as 70, 30, 10 in the example.
    remaining = wanted_by_device
    shared_axes: Axes = ()
    # Over the links of all levels so far.
    received_so_far = np.zeros_like(wanted_by_device.elements)
    hops = []
    for level in levels:
        shared_axes = (*shared_axes, *level.axes)
        from_nearer = count_received(shared_axes)  # over faster links, or the device's own
        received = remaining.without(from_nearer)
        received_so_far = received_so_far + received.elements
        if received.elements.any():
            # The hop is named after the longest axis, by the alphabet if two are as long.
            _, longest = max((mesh.size(axis), axis) for axis in moving if axis in level.axes)
            # All other axes are of faster links: along them are the devices of one node, say.
            nearer_dims = tuple(i for i, axis in enumerate(mesh.axes) if axis not in shared_axes)
            hops.append(_level_hop(received, level.level, level.axes[longest], nearer_dims))
        remaining = from_nearer
    return busiest_traffic(wanted_by_device.elements, received_so_far, hops)


def busiest_traffic(wanted_by_device: Numbers, received: Numbers, hops: Sequence[Hop]) -> Traffic:
    """Return the demands of an exchange, from the elements that each device wants and receives.

    A device that wants 8 elements and receives 6 has 2 itself.
    """
    # Each element is packed by its sender and unpacked by its receiver: two copies. A runtime that
    # puts a device's own rows into place directly copies these once, and saves `saved` copies.
    copied = 2 * int(wanted_by_device.max())
    saved = copied - int((wanted_by_device + received).max())
    return Traffic(
        received=int(received.max()),
        copied=copied,
        hops=tuple(hops),
        saved_copies=saved,
    )


def _level_hop(received: Received, level: int, axis: str, nearer_dims: tuple[int, ...]) -> Hop:
    """Sum up what devices receive over links of one speed, as a `Hop`.

    The hop has the elements and messages of the busiest device, and `mean_shortfall`: by how much
    the average device of a group receives less. A group is the devices that faster links connect,
    such as a node. Groups (6, 2) and (4, 4) -> 6 elements, and a shortfall of 2.

    Args:
        received: The elements and senders of every device, as arrays over the mesh.
        level: The speed of the links, 0 for the slowest.
        axis: The longest axis along them, which names the hop.
        nearer_dims: The dims of the arrays along which the devices of a group differ.
    """
    elements = received.elements
    busiest = elements.max()
    group_size = math.prod(elements.shape[i] for i in nearer_dims)
    # The devices of a group may share a port, whose load is their average: take the busiest group.
    busiest_mean = elements.sum(axis=nearer_dims).max() / group_size
    return Hop(
        axis=axis,
        received=int(busiest),
        messages=int(received.senders.max()),
        level=level,
        mean_shortfall=int(busiest - busiest_mean),
    )


class SpanAxes(NamedTuple):
    """A mesh with the spans of links as axes, the spans of each axis, and the spans by speed.

    Axis x of 8 devices in nodes of 4 -> a mesh x_0=2, x_1=4, {"x": ("x_0", "x_1")}, and the levels
    (0, {"x_0": "x"}) and (1, {"x_1": "x"}).
    """

    mesh: Mesh
    factors: Mapping[str, Axes]
    levels: tuple[SpanLevel, ...]


@lru_cache(maxsize=256)
def span_axes(mesh: Mesh, spans: LinkSpans) -> SpanAxes:
    """Split the axes of a mesh so that each new axis runs over links of one speed.

    Axis x of 8 devices over 2 nodes of 4 has two spans (parts over links of one speed): 2 positions
    between nodes, and 4 inside. So the new mesh has axes x_0=2 and x_1=4. An axis with one span
    stays as it is.

    Args:
        mesh: The mesh.
        spans: The spans of its axes.

    Returns:
        The new mesh, the new axes of each old one, and the new axes by the speed of their links.
    """
    spans = slowest_first(mesh, mesh.axes, spans)
    spans_of_axis = spans_by_axis(mesh, spans)
    split = []  # (axis, sizes of its sub-axes)
    for axis, axis_spans in spans_of_axis.items():
        if len(axis_spans) > 1:
            split.append((axis, tuple(span.size for span in axis_spans)))
    fine_mesh = SubAxisMesh(mesh, tuple(split))

    # Sub-axes and the spans of an axis are both in order, the outermost first.
    sub_axis_of: dict[LinkSpan, str] = {}
    for axis, axis_spans in spans_of_axis.items():
        sub_axis_of.update(zip(axis_spans, fine_mesh.sub_axes[axis], strict=True))
    levels = []
    # `spans` is sorted by level, as `groupby` needs.
    for level, level_spans in groupby(spans, key=lambda span: span.level):
        levels.append(SpanLevel(level, {sub_axis_of[span]: span.axis for span in level_spans}))
    return SpanAxes(fine_mesh if split else mesh, fine_mesh.sub_axes, tuple(levels))


def spans_by_axis(mesh: Mesh, spans: LinkSpans) -> dict[str, LinkSpans]:
    """Map each axis to its spans, the outermost first."""
    # Spans are given by speed; along an axis, the one with the longest strides is outermost.
    outer_first = sorted(slowest_first(mesh, mesh.axes, spans), key=lambda span: -span.stride)
    result = {}
    for axis in mesh.axes:
        result[axis] = tuple(span for span in outer_first if span.axis == axis)
    return result


def moving_axes(source: Sharding, target: Sharding) -> Axes:
    """List the axes along which a sender and its receiver may differ.

    They change their role, or shard a dim that a pole rolls.
    """
    moving = set(axes_with_new_role(source, target.layout))
    for views in view_pairs(source, target):
        for view in views:
            for dim_index, shift in enumerate(view.shifts):
                if shift:
                    moving.update(
                        source.layout.dims[dim_index].axes, target.layout.dims[dim_index].axes
                    )
    return tuple(axis for axis in source.mesh.axes if axis in moving)


def ended_axes(src: Layout, dst: Layout) -> Axes:
    """List the axes with a sum, max or min that ends between the layouts."""
    ended = []
    for tag in ("sum", "max", "min"):
        target_axes = dst.tagged(tag)
        ended += [axis for axis in src.tagged(tag) if axis not in target_axes]
    return tuple(ended)


def begun_axes(src: Layout, dst: Layout) -> Axes:
    """List the axes along which a sum begins between the layouts."""
    return tuple(axis for axis in dst.tagged("sum") if axis not in src.tagged("sum"))


def even_traffic(source: Sharding, target: Sharding, spans: LinkSpans) -> Traffic | None:
    """Return the traffic of an exchange between even contiguous shards; None for other shards."""
    src = link_cuts(source, spans)
    dst = link_cuts(target, spans)
    if src is None or dst is None or begun_axes(source.layout, target.layout):
        return None
    axis_spans = spans_by_axis(source.mesh, spans)
    addends: list[LinkSpan] = []
    for axis in ended_axes(source.layout, target.layout):
        addends += axis_spans[axis]
    return digit_traffic(source.shape, src, dst, addends)


def link_cuts(sharding: Sharding, spans: LinkSpans) -> LinkCuts | None:
    """List, for each dim, the parts of mesh axes that shard it, each over links of one speed.

    "n/x" with x=8 over 2 nodes of 4 -> for n the span of 2 nodes, then that of 4 devices: outermost
    first. None if any shard is uneven or not contiguous.
    """
    if not sharding.has_even_cuts:
        return None
    spans_of_axis = spans_by_axis(sharding.mesh, spans)
    cuts = []
    for dim in sharding.layout.dims:
        cuts.append(tuple(chain.from_iterable(spans_of_axis[axis] for axis in dim.axes)))
    return tuple(cuts)


@layout_cache(maxsize=4096)
def received_from(source: Sharding, target: Sharding, shared_axes: Axes) -> Received:
    """Count what each device takes in an exchange, from all senders or from the nearer ones.

    "n/x" -> "n" with 8 rows on x=2: 8 elements from 2 senders; with `shared_axes` ("x",) 4 elements
    from 1 sender, the device itself. For each device the count is a product: of the rows in each
    dim, and of the addends of partial sums that end.

    Args:
        source: The sharding before the exchange.
        target: The sharding after it.
        shared_axes: The axes along which only senders with the receiver's coordinate count.

    Returns:
        Elements and senders, as arrays over the mesh; of size 1 along axes where all are equal.
    """
    mesh = source.mesh
    new_sum_axes = begun_axes(source.layout, target.layout)
    # "n | sum(x)" -> "n" on x=2: a device adds up 2 addends, its own and that of the other one.
    ended_sum_axes = set(ended_axes(source.layout, target.layout))
    n_addends = mesh.size(*(ended_sum_axes - set(shared_axes)))
    # One number, the same for all devices, as an array that broadcasts over the mesh.
    one_for_all = (1,) * len(mesh.axes)
    addends = np.full(one_for_all, n_addends, _dtype_of_counts(source, target, n_addends))

    # Blocks are one view, or several if the array ends at poles of a sphere: then counts add up.
    elements = np.zeros_like(addends)
    senders = np.zeros_like(addends)
    for ends_of_dims in _all_dim_ends(source, target):
        view_received = _received_in_view(ends_of_dims, addends, mesh, new_sum_axes, shared_axes)
        elements = elements + view_received.elements
        senders = senders + view_received.senders
    # "n" -> "n | sum(x)": of replicas one is the addend that has the values, on the first device along
    # the axis. The others are zeros, and these devices take nothing. ("n/x" -> "n | sum(x)": each
    # device has its own rows, and zeros elsewhere; the rows have been counted above.)
    for axis in new_sum_axes:
        if axis not in source.layout.sharding_axes:
            is_first = _is_first_along(mesh, axis)
            elements = elements * is_first
            senders = senders * is_first
    return Received(elements, senders)


def _dtype_of_counts(source: Sharding, target: Sharding, n_addends: int) -> Any:
    """Return int64, or object for Python's integers if the elements of all devices might not fit."""
    largest_block = max(source.max_local_size, target.max_local_size)
    most_elements = largest_block * source.mesh.n_devices * n_addends
    return np.int64 if most_elements < MAX_COUNTED else object


def _received_in_view(
    ends_of_dims: Sequence[tuple[DimEnd, DimEnd]],
    addends: NDArray[Any],
    mesh: Mesh,
    new_sum_axes: Axes,
    shared_axes: Axes,
) -> Received:
    """Count what devices take in an exchange: multiply the rows of all dims, and the addends.

    4 rows from 2 senders in one dim, 3 rows from 1 sender in the other, and 2 addends -> 24
    elements from 4 senders. If poles of a sphere divide blocks, it is for one view of them.

    Args:
        ends_of_dims: Each dim in source and target.
        addends: How many addends each element of a partial sum that ends has, each from another
            device; 1 without such a sum. An array with one number, of as many dims as the mesh.
        mesh: The mesh; the result is an array over its axes.
        new_sum_axes: Axes along which a sum begins.
        shared_axes: Axes along which only senders with the receiver's coordinate count.
    """
    elements = addends
    senders = addends
    for src, dst in ends_of_dims:
        # Where a partial sum begins along an axis that sharded the dim, each device takes only its
        # own shard as its addend: sender and receiver have the same coordinate there. A copy of a
        # row would count twice in the sum, so rows come from their one provider.
        begins_sum = not set(src.dim.axes).isdisjoint(new_sum_axes)
        fixed_axes = tuple(
            axis for axis in src.dim.axes if axis in new_sum_axes or axis in shared_axes
        )
        # Positional: a call with keywords would be another entry of the cache.
        of_dim = received_of_dim(src, dst, fixed_axes, mesh, begins_sum)
        elements = elements * of_dim.elements
        senders = senders * of_dim.senders
    return Received(elements, senders)


def _is_first_along(mesh: Mesh, axis: str) -> Numbers:
    """Make an array over the mesh with 1 for the first device along an axis, and 0 for the others.

    Of the replicas along a new sum, only the first contributes.
    """
    ones = np.eye(1, mesh.size(axis), dtype=np.int64)
    return ones.reshape([-1 if mesh_axis == axis else 1 for mesh_axis in mesh.axes])


@layout_cache(maxsize=64)
def _all_dim_ends(
    source: Sharding, target: Sharding
) -> tuple[tuple[tuple[DimEnd, DimEnd], ...], ...]:
    """List the `dim_ends` of each pair of views: for each dim, how source and target shard it."""
    result = []
    for dst_view, src_view in view_pairs(source, target):
        result.append(tuple(dim_ends(source, target, dst_view, src_view)))
    return tuple(result)


@layout_cache(maxsize=16384)
def received_of_dim(
    src: DimEnd, dst: DimEnd, fixed_axes: Axes, mesh: Mesh, from_providers: bool
) -> Received:
    """Count how many rows of one dim each device takes in an exchange, and from how many senders.

    "n/x" -> "n" with 8 rows on x=2, y=3: 8 rows from 2 senders on all devices. With x in `fixed_axes`, 4
    rows from 1 sender: those that the device has itself.

    Args:
        src: The dim in the source.
        dst: The dim in the target.
        fixed_axes: Axes along which only senders with the receiver's coordinate count.
        mesh: The mesh; the result has its axes, of size 1 where the count is the same.
        from_providers: Each row is taken from the one device that provides it, even if the receiver
            has a copy in its halo. A new partial sum requires it, so that each row counts once.

    Returns:
        Rows and senders, as arrays over the mesh.
    """
    if not (src.is_plain and dst.is_plain):
        return count_sources(src, dst, fixed_axes, mesh, from_providers)
    # Receivers are shards of the target, senders shards of the source. Without overlaps a row is in
    # one shard of the source: its only sender.
    row_pairs = shared_rows_of(src, dst)
    is_taken = row_pairs.rows > 0  # [pairs]
    # The receiver's coordinate in each pair, by the axes that tell receivers apart: [pairs] each.
    coords = dict(zip(dst.dim.axes, coords_of(row_pairs.receivers, dst.sizes), strict=True))
    for axis, sender_coord in zip(
        src.dim.axes, coords_of(row_pairs.senders, src.sizes), strict=True
    ):
        if axis in fixed_axes and axis in coords:
            is_taken &= sender_coord == coords[axis]
        elif axis in fixed_axes:
            # The axis does not shard the target's dim: receivers with all its coordinates want the
            # same rows. Each takes those of the sender at its own coordinate.
            coords[axis] = sender_coord
    receivers = np.zeros_like(row_pairs.rows)  # numbered row-major along these axes
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        if axis in coords:
            receivers = receivers * size + coords[axis]
    taken_pairs = row_pairs._replace(receivers=receivers).take(is_taken)
    return received_of_pairs(taken_pairs, src.n_shards, coords, mesh)


@layout_cache(maxsize=16384)
def shared_rows_of(src: DimEnd, dst: DimEnd) -> RowPairs:
    """Count the rows that each shard of a dim in the source shares with each one in the target.

    8 rows, "n/x" -> "n/y" with x=2, y=4: receivers (0, 1, 2, 3), senders (0, 0, 1, 1), 2 rows each.
    A short dim is compared row by row, a long one by ranges of rows, which takes less memory.
    """
    if src.length * max(src.n_shards, dst.n_shards) > MAX_COMPARED:
        src_rows = all_owned_rows(src.dim, src.length, src.sizes)
        dst_rows = all_owned_rows(dst.dim, dst.length, dst.sizes)
        return shared_rows(src_rows, dst_rows)
    sender_of_row = owner_of_rows(src.dim, src.length, src.sizes)
    receiver_of_row = owner_of_rows(dst.dim, dst.length, dst.sizes)
    # Each row gives a pair, written as one number: receiver * number of senders + sender.
    rows_of_pair = np.bincount(receiver_of_row * src.n_shards + sender_of_row)
    pair_indices = np.flatnonzero(rows_of_pair)
    return RowPairs(
        pair_indices // src.n_shards, pair_indices % src.n_shards, rows_of_pair[pair_indices]
    )


@layout_cache(maxsize=4096)
def rows_in_common(src: DimEnd, dst: DimEnd) -> Numbers:
    """Tabulate how many rows each shard of `src` shares with each of `dst`: [src, dst]."""
    row_pairs = shared_rows_of(src, dst)
    table = np.zeros((src.n_shards, dst.n_shards), np.int64)
    table[row_pairs.senders, row_pairs.receivers] = row_pairs.rows
    return table
