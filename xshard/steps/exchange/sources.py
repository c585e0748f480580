"""The sources of rows: which device sends the rows of one dim to which, also over a pole.

All questions are answered dim by dim. An exchange as a whole is the product over its dims.

A dim of latitudes may end at a *pole* of a sphere: beyond it the rows inside come again, mirrored. So a
block has rows inside the array and rows beyond each pole, which are found apart: a *view* is one of these
parts of a block. `source` and `target` are the shardings before and after an exchange, `src` and `dst`
one dim of each (a `DimEnd`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xshard.caches import layout_cache
from xshard.layout import Mesh, Sharding, providers
from xshard.layout.block_rows import all_held_rows
from xshard.layout.mesh import Axes, Coords, Sizes, all_coords
from xshard.layout.pieces import RowPairs, shared_rows
from xshard.layout.providers import STRAIGHT, rows_without
from xshard.layout.runs import (
    AllRuns,
    Intervals,
    Rows,
    Runs,
    Segment,
    as_intervals,
    common_segments,
    count_rows,
    extents,
)
from xshard.layout.validation import rolled_dim
from xshard.notation.overlap import Fold, ends_of
from xshard.notation.parser import Dim
from xshard.notation.row_arrays import Numbers

# The `pole_side` of a dim whose rows all stay on their device; others are STRAIGHT, or beyond a pole.
CARRIED = "carried"
POLE_SIDES = ("before", "after")  # rows beyond the first row of a dim, and beyond the last


class View(NamedTuple):
    """One part of a block, as poles divide it.

    A latitude with a pole at its first row, and a longitude of 8: the view ("before", "straight")
    has shifts (0, 4), since the rows beyond the pole lie on the opposite meridian.

    Attributes:
        pole_sides: For each dim, STRAIGHT, CARRIED, or the pole beyond which its rows lie.
        shifts: For each dim, the number that is added to its rows, modulo its length.
        sign: The factor of the values.
    """

    pole_sides: tuple[str, ...]
    shifts: tuple[int, ...]
    sign: int = 1


class PoleSide(NamedTuple):
    """The rows of a dim inside the array (STRAIGHT), or beyond the pole at one of its ends.

    Beyond a pole another dim may be rolled by half its length, and signs may change.
    """

    name: str
    rolled_dim: int | None = None
    sign: int = 1


@layout_cache(maxsize=8192)
def views(sharding: Sharding, unsplit_dims: tuple[int, ...] = ()) -> tuple[View, ...]:
    """List the views (parts) into which poles divide a block; a block without poles is one view.

    Beyond a pole (as of a latitude) the rows inside come again, mirrored, with another dim rolled
    and perhaps the sign changed. A dim with two poles has 3 pole sides: rows inside the array, and
    rows beyond the pole at either end. A view is one of them for each dim; two such dims have 9.

    Args:
        sharding: The sharding of the block.
        unsplit_dims: Dims that are not divided, since all their rows stay on their device.
    """
    sides_by_dim = []
    for dim_index in range(len(sharding.shape)):
        pole_sides = [PoleSide(STRAIGHT)]
        if dim_index not in unsplit_dims:
            pole_sides += _pole_sides(sharding, dim_index)
        sides_by_dim.append(pole_sides)
    return tuple(
        _view(pole_sides, sharding.shape) for pole_sides in itertools.product(*sides_by_dim)
    )


def _pole_sides(sharding: Sharding, dim_index: int) -> list[PoleSide]:
    """List the ends of a dim beyond which a pole lies: none, or "before" or "after", or both."""
    dims = sharding.layout.dims
    pole_sides = []
    # `ends_of` is empty for a dim without boundaries, so the lengths may differ.
    for name, boundary in zip(POLE_SIDES, ends_of(dims[dim_index].overlap), strict=False):
        if boundary.kind == "pole":
            pole_sides.append(
                PoleSide(name, rolled_dim(dims, dim_index, boundary, sharding.shape), boundary.sign)
            )
    return pole_sides


def _view(pole_sides: tuple[PoleSide, ...], shape: tuple[int, ...]) -> View:
    """Describe the part of a block on these pole sides of its dims: its shifts and its sign.

    Two poles that roll one dim by half its length add up, so that it is not rolled in effect.
    """
    shifts = [0] * len(shape)
    for pole_side in pole_sides:
        if pole_side.rolled_dim is not None:
            length = shape[pole_side.rolled_dim]
            shift = shifts[pole_side.rolled_dim] + length // 2
            shifts[pole_side.rolled_dim] = shift % max(length, 1)  # an empty dim stays as it is
    sign = math.prod(pole_side.sign for pole_side in pole_sides)
    return View(tuple(pole_side.name for pole_side in pole_sides), tuple(shifts), sign)


def carried_dims(source: Sharding, target: Sharding) -> tuple[int, ...]:
    """List the dims with equal shards and overlap in both: all their rows stay on their device."""
    carried = []
    for dim_index, (src, dst) in enumerate(
        zip(source.layout.dims, target.layout.dims, strict=True)
    ):
        if src.overlap is not None and src == dst:
            carried.append(dim_index)
    return tuple(carried)


class DimEnd(NamedTuple):
    """How one dim is sharded at one end of an exchange: before it, or after it.

    If the dim, or another one, ends at a pole of a sphere, it is about one view of the blocks.

    sizes: the sizes of the axes that shard it.
    pole_side: STRAIGHT for rows inside the array, "before" or "after" for rows beyond a pole at its
        first or last row, or CARRIED if all rows stay on their device.
    shift: what another dim's pole adds to its rows.
    """

    dim: Dim
    length: int
    sizes: Sizes
    pole_side: str = STRAIGHT
    shift: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether each block is its shard and nothing else."""
        return self.dim.overlap is None and not self.shift

    @property
    def n_shards(self) -> int:
        """The number of devices along the axes of the dim."""
        return math.prod(self.sizes)

    def held_rows(self) -> AllRuns:
        """Return, for each shard, all rows of its block, with overlaps."""
        return all_held_rows(self.dim, self.length, self.sizes)

    def wanted_rows(self) -> AllRuns:
        """Return, for each shard, the rows that it must receive."""
        return providers.wanted_rows(self.dim, self.length, self.sizes, self.pole_side, self.shift)

    def offered_rows(self) -> tuple[AllRuns, ...]:
        """Return, for each shard, lists of distinct rows that it offers; several in a fold."""
        return providers.offered_rows(self.dim, self.length, self.sizes, self.pole_side, self.shift)

    def distinct_held_rows(self) -> AllRuns:
        """Return, for each shard, the rows that its block has, each once."""
        return providers.distinct_held_rows(self.dim, self.length, self.sizes, self.shift)


def dim_end(
    sharding: Sharding, dim_index: int, pole_side: str = STRAIGHT, shift: int = 0
) -> DimEnd:
    """Return one dim of a sharding on one of its pole sides, with `shift` added to its rows."""
    dim = sharding.layout.dims[dim_index]
    return DimEnd(
        dim, sharding.shape[dim_index], sharding.mesh.sizes_of(dim.axes), pole_side, shift
    )


def view_ends(sharding: Sharding, view: View) -> list[DimEnd]:
    """Describe each dim of a sharding in one view of its blocks."""
    ends_of_dims = []
    for dim_index, (pole_side, shift) in enumerate(zip(view.pole_sides, view.shifts, strict=True)):
        ends_of_dims.append(dim_end(sharding, dim_index, pole_side, shift))
    return ends_of_dims


def dim_ends(
    source: Sharding, target: Sharding, dst_view: View, src_view: View
) -> Iterator[tuple[DimEnd, DimEnd]]:
    """Yield, for each dim, how source and target shard it, as a pair of `DimEnd`.

    "b n/x" -> "b/x n": ("b", "b/x"), then ("n/x", "n"). A dim with a halo or window that is the
    same on both sides is marked: its `pole_side` is CARRIED, since all its rows stay on their devices.

    Args:
        source: The sharding before the exchange.
        target: The sharding after it.
        dst_view: Which part of the receiver's block is filled.
        src_view: Which part of the sender's block fills it.
    """
    carried = carried_dims(source, target)
    ends_of_dims = zip(view_ends(source, src_view), view_ends(target, dst_view), strict=True)
    for dim_index, (src, dst) in enumerate(ends_of_dims):
        # A shift means that a pole of another dim rolls this one by half its length: then its rows
        # do travel, even if its shards stay.
        if dim_index in carried and src.shift == 0 and dst.shift == 0:
            yield src._replace(pole_side=CARRIED), dst._replace(pole_side=CARRIED)
        else:
            yield src, dst


def view_pairs(source: Sharding, target: Sharding) -> Iterator[tuple[View, View]]:
    """Yield each pair of a view of the destination and a view of the source that may supply it."""
    carried = carried_dims(source, target)
    return itertools.product(views(target, carried), views(source, carried))


def n_segment_rows(segments: Sequence[Segment]) -> int:
    """Count the rows of some segments."""
    return sum(segment.length for segment in segments)


class RowRequest(NamedTuple):
    """What a receiver takes of one dim: segments of its own block, and rows that others offer."""

    own_segments: tuple[Segment, ...]
    from_others: Runs


def _request(
    src: DimEnd, dst: DimEnd, src_index: int, dst_index: int, from_providers: bool
) -> RowRequest:
    """Divide the rows of one dim that a receiver wants into those it has and those it lacks.

    A block with a halo that has rows 0 to 4, and wants 0 to 5: own rows 0 to 4, from others row 5.

    Args:
        src: The dim in the source.
        dst: The dim in the target.
        src_index: The receiver's index along the axes of `src`.
        dst_index: The receiver's index along the axes of `dst`.
        from_providers: Each row is taken from the one device that provides it (its owner, as a
            rule), even if the receiver has a copy. A new partial sum requires it, so that each row
            counts once.

    Returns:
        Own rows, as segments (position in the source's block, position in the target's, length), and
        the rows to ask all senders for, by position: FILL is in place of own rows.
    """
    is_fold = isinstance(src.dim.overlap, Fold)
    if src.pole_side != STRAIGHT and not is_fold:
        # Rows beyond a pole are copies: nothing is taken from them.
        return RowRequest(own_segments=(), from_others=())
    wanted_runs = dst.wanted_rows()[dst_index]
    # No own rows: the receiver is asked as a sender like any other, for its own shard too. Without
    # a halo it has nothing else. Under a Fold (whose overlapping rows are addends) what it has
    # beyond its shard are no copies that could be used.
    if src.is_plain or is_fold or from_providers:
        return RowRequest(own_segments=(), from_others=wanted_runs)
    held = src.distinct_held_rows()[src_index]
    return RowRequest(common_segments(held, wanted_runs), rows_without(wanted_runs, held))


class RowSource(NamedTuple):
    """Rows of one dim from one sender, at these coordinates along the axes of the source's dim."""

    coords: Coords
    segments: tuple[Segment, ...]


@layout_cache(maxsize=65536)
def sources(
    src: DimEnd,
    dst: DimEnd,
    src_index: int,
    dst_index: int,
    from_providers: bool,
    sender: int | None,
) -> tuple[RowSource, ...]:
    """Find which rows of one dim a receiver takes from which senders.

    From "n/x" to "n" with 4 rows on x=2, device 0 takes rows 0 and 1 from itself, 2 and 3 from
    device 1: `RowSource((0,), (Segment(0, 0, 2),))`, `RowSource((1,), (Segment(0, 2, 2),))`. A segment
    is (position in the sender's block, position in the receiver's, number of rows).

    Args:
        src: The dim in the source.
        dst: The dim in the target.
        src_index: The receiver's index along the axes of `src`.
        dst_index: The receiver's index along the axes of `dst`.
        from_providers: Each row is taken from the one device that provides it, even if the receiver
            has a copy.
        sender: The only sender of interest, as an index along the axes of `src`; None for all.

    Returns:
        The receiver's own copies first, then the rows of senders in their order. A sender comes
        twice if it has a row twice, each an addend of a sum, as blocks under a Fold may.
    """
    senders = np.arange(src.n_shards) if sender is None else np.array([sender])
    coords = all_coords(src.sizes)  # of each sender
    takes_own = src_index in senders  # the receiver is of interest as a sender too
    row_sources = []
    if dst.pole_side == CARRIED:
        # The dim stays as it is: all rows of the block, with its halo, stay on their device.
        n_rows = count_rows(src.held_rows()[src_index])
        if takes_own and n_rows:
            row_sources.append(RowSource(coords[src_index], (Segment(0, 0, n_rows),)))
        return tuple(row_sources)
    request = _request(src, dst, src_index, dst_index, from_providers)
    if takes_own:
        row_sources.append(RowSource(coords[src_index], request.own_segments))
    offered = src.offered_rows()  # for each sender, lists without a row twice: mostly one
    for sender_index in _senders_in_reach(src, senders, request.from_others):
        for rows in offered[sender_index]:
            row_sources.append(
                RowSource(coords[sender_index], common_segments(rows, request.from_others))
            )
    return tuple(row_source for row_source in row_sources if row_source.segments)


def _senders_in_reach(src: DimEnd, senders: Numbers, rows: Runs) -> list[int]:
    """Select the senders that may have some of the rows, by the first and last row of each.

    Senders 0, 1, 2 with rows 0-3, 4-7, 8-11, and wanted rows 3-5 -> [0, 1]. It is a quick filter: a
    cyclic sender of rows 0, 4, 8 is selected for row 5 too. Only the selected are compared exactly.
    """
    if isinstance(rows, Rows):
        wanted_runs = as_intervals(rows)
    else:
        wanted_runs = extents([(run,) for run in rows])
    offered = _offered_extents(src)[senders]
    begins_in_time = offered[:, None, 0] < wanted_runs[None, :, 1]  # [senders, runs]
    ends_late_enough = wanted_runs[None, :, 0] < offered[:, None, 1]
    is_in_reach = (begins_in_time & ends_late_enough).any(axis=1)
    in_reach: list[int] = senders[is_in_reach].tolist()
    return in_reach


@layout_cache(maxsize=4096)
def _offered_extents(src: DimEnd) -> Intervals:
    """Return, for each shard, the interval from the first row that it offers to the last."""
    offered = []
    for lists in src.offered_rows():
        # A single list stays as it is: it may be an array of rows, which is quicker whole.
        offered.append(lists[0] if len(lists) == 1 else tuple(itertools.chain.from_iterable(lists)))
    return extents(offered)


class Received(NamedTuple):
    """The elements that each device takes, and how many senders: arrays over the mesh."""

    elements: Numbers
    senders: Numbers

    def without(self, part: Received) -> Received:
        """Return what comes from the senders that are not among those of `part`."""
        return Received(self.elements - part.elements, self.senders - part.senders)


def count_sources(
    src: DimEnd, dst: DimEnd, fixed_axes: Axes, mesh: Mesh, from_providers: bool
) -> Received:
    """Count how many rows of a dim each device takes, and from how many senders, by listing them.

    "n/x" -> "n" with 8 rows on x=2, y=3: 8 rows from 2 senders, as arrays of shape [2, 1]. This is
    right for every overlap (halo, window, fold), and slower than the formulas for plain shards.

    Args:
        src: The dim in the source.
        dst: The dim in the target.
        fixed_axes: Axes along which only senders with the receiver's coordinate count.
        mesh: The mesh; the result has its axes, of size 1 where the dim is not sharded.
        from_providers: Each row comes from the one device that provides it, as a new sum requires,
            even if the receiver has a copy.
    """
    sharding_axes = {*src.dim.axes, *dst.dim.axes}
    axes = [axis for axis in mesh.axes if axis in sharding_axes]
    # Only the devices at coordinate 0 of all other axes: along these, all take the same rows.
    receivers = mesh.group(0, axes)
    src_indices = [mesh.index(device, src.dim.axes) for device in receivers]
    dst_indices = [mesh.index(device, dst.dim.axes) for device in receivers]
    row_pairs = _row_pairs(src, dst, src_indices, dst_indices, from_providers)
    row_pairs = _with_fixed_coordinates(row_pairs, src, src_indices, fixed_axes)
    return received_of_pairs(row_pairs, src.n_shards, axes, mesh)


def received_of_pairs(
    row_pairs: RowPairs, n_senders: int, axes: Collection[str], mesh: Mesh
) -> Received:
    """Add up the rows that each receiver takes, and count its senders.

    Receivers 0, 0, 1 along x=2 take 4, 2, 6 rows from senders 0, 1, 1 -> rows [6, 6], senders
    [2, 1]: arrays over the mesh, of size 1 along all axes but x.

    Args:
        row_pairs: The pairs; receivers are numbered row-major along `axes`, in the order of the mesh.
        n_senders: The number of all senders. A sender that comes twice counts once.
        axes: The axes that tell receivers apart.
        mesh: The mesh.
    """
    shape = [mesh.size(axis) if axis in axes else 1 for axis in mesh.axes]
    elements = np.zeros(math.prod(shape), np.int64)
    np.add.at(elements, row_pairs.receivers, row_pairs.rows)  # exact; bincount adds floats
    # A pair is one number: receiver * number of senders + sender.
    distinct_pairs = np.unique(row_pairs.receivers * n_senders + row_pairs.senders)
    senders = np.bincount(distinct_pairs // n_senders, minlength=len(elements))
    return Received(elements.reshape(shape), senders.reshape(shape))


def _row_pairs(
    src: DimEnd,
    dst: DimEnd,
    src_indices: Sequence[int],
    dst_indices: Sequence[int],
    from_providers: bool,
) -> RowPairs:
    """Count how many rows of one dim each receiver takes from each sender.

    "n/x" -> "n" with 4 rows on x=2: receivers 0 0 1 1 take 2 rows each from senders 0 1 0 1. Before
    these comes a pair of each receiver with itself, for the copies that its halo has already: here
    0 rows. Receivers are numbered 0, 1, ... as listed, senders along the axes of `src`.

    Args:
        src: The dim in the source.
        dst: The dim in the target.
        src_indices: The index of each receiver along the axes of `src`.
        dst_indices: The index of each receiver along the axes of `dst`.
        from_providers: Each row is taken from the one device that provides it, even if the receiver
            has a copy.
    """
    receivers = np.arange(len(src_indices))
    if dst.pole_side == CARRIED:  # the dim stays as it is: all rows come from the receiver itself
        held = src.held_rows()
        held_rows = [count_rows(held[sender_index]) for sender_index in src_indices]
        return RowPairs(receivers, np.array(src_indices), np.array(held_rows))

    n_own_rows = []  # of each receiver: how many copies it has itself
    requested = []  # and which rows it takes from others
    for src_index, dst_index in zip(src_indices, dst_indices, strict=True):
        request = _request(src, dst, src_index, dst_index, from_providers)
        n_own_rows.append(n_segment_rows(request.own_segments))
        requested.append(request.from_others)
    from_others = _pairs_with_others(src, requested)
    return RowPairs(
        np.concatenate([receivers, from_others.receivers]),
        np.concatenate([src_indices, from_others.senders]),
        np.concatenate([n_own_rows, from_others.rows]),
    )


def _pairs_with_others(src: DimEnd, requested: Sequence[Runs]) -> RowPairs:
    """Count how many rows each receiver takes from each sender that offers some of them.

    requested: the rows that each receiver takes.
    """
    # A sender that has a row twice (addends of a sum, under a Fold) offers several lists of rows.
    lists: list[Runs] = []
    sender_of_list: list[int] = []
    for sender, offered in enumerate(src.offered_rows()):
        lists += offered
        sender_of_list += [sender] * len(offered)
    shared = shared_rows(lists, requested)  # its senders are numbers of lists
    senders = np.array(sender_of_list, np.int64)[shared.senders]
    return RowPairs(shared.receivers, senders, shared.rows)


def _with_fixed_coordinates(
    row_pairs: RowPairs, src: DimEnd, src_indices: Sequence[int], fixed_axes: Axes
) -> RowPairs:
    """Keep the pairs with rows, of senders at the receiver's coordinates along `fixed_axes`.

    On x=2 with x fixed, receiver x=0 keeps what it takes from sender x=0, not from x=1.

    Args:
        row_pairs: Receivers as places in `src_indices`, senders as indices along the axes of `src`.
        src: The dim in the source.
        src_indices: The index of each receiver along the axes of `src`.
        fixed_axes: Axes along which sender and receiver must have the same coordinate.
    """
    is_kept = row_pairs.rows > 0  # [pairs]
    # Coordinates along each axis of `src.dim`, in its order: one [pairs] per axis.
    receiver_coords = coords_of(np.array(src_indices)[row_pairs.receivers], src.sizes)
    sender_coords = coords_of(row_pairs.senders, src.sizes)
    for axis, receiver_coord, sender_coord in zip(
        src.dim.axes, receiver_coords, sender_coords, strict=True
    ):
        if axis in fixed_axes:
            is_kept &= receiver_coord == sender_coord
    return row_pairs.take(is_kept)


def coords_of(indices: Numbers, sizes: Sizes) -> tuple[Numbers, ...]:
    """Convert row-major indices to coordinates: [5, 6] in sizes (2, 4) -> ([1, 1], [1, 2])."""
    if not sizes:
        return ()
    return np.unravel_index(indices, sizes)
