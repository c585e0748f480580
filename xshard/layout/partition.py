"""The rows that each device owns: how a dim is sharded, in every order, without overlaps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from xshard.caches import layout_cache
from xshard.layout.mesh import row_major
from xshard.layout.runs import (
    Rows,
    Run,
    Runs,
    as_runs,
    count_rows,
    interval,
    interval_pairs,
    row_numbers,
    rows_at_positions,
)
from xshard.notation.maps import NamedMap, Owners
from xshard.notation.parser import BY, INTERVALS, SEGMENTS, SIZES, Dim, Shard
from xshard.notation.row_arrays import Numbers

Sizes = tuple[int, ...]
Ints = Sequence[int]  # a size, or a coordinate, per axis
R = TypeVar("R")


# ---- one shard


def cut_by_shard(length: int, shard: Shard, n_parts: int, index: int) -> Runs:
    """Return the rows that one of `n_parts` devices owns if `length` rows are sharded over them.

    Part 0 of 8 rows over 2 parts: rows 0 1 2 3 in the plain order, 0 2 4 6 cyclic, 0 1 6 7 zigzag.
    Rows come in the order in which the device stores them.

    Args:
        length: The number of rows that are cut.
        shard: One sharding of a dim, as `zigzag(cp)`: the order in which parts take rows, with
            numbers such as sizes. Its mesh axes do not matter here.
        n_parts: The number of parts, the product of the sizes of the axes.
        index: Which of the parts, from 0.
    """
    order = shard.order
    if n_parts == 1:
        # All rows as one interval, whatever the order: as several, a halo would widen each of them.
        return interval(0, length)
    if order == SIZES:
        sizes = whole_numbers_of(shard)
        start = sum(sizes[:index])
        return interval(start, start + sizes[index])
    if order == INTERVALS:  # listed for each part
        return _listed_intervals(shard, index)
    if order == BY:  # a map, as an array, says which part has each row
        return as_runs(map_of(shard).part(index))
    if order == "balanced":
        return _balanced_part(length, n_parts, index)
    if order == "zigzag":
        return _rows_by_segment(length, shard, n_parts, index, _zigzag)
    if order == SEGMENTS:
        return _rows_by_segment(length, shard, n_parts, index, _chunk)
    if order == "cyclic":
        group_rows = whole_numbers_of(shard)[0] if shard.numbers else 1  # single rows
        return _cyclic(length, group_rows, n_parts, index)
    return _chunk(length, n_parts, index)  # "block", the plain order


def ceil_div(amount: int, n_parts: int) -> int:
    """Divide, rounded up: 10 among 4 -> 3, where `//` gives 2."""
    return -(-amount // n_parts)


def _chunk(length: int, n_parts: int, index: int) -> tuple[Run, ...]:
    """Return part `index` of `n_parts` contiguous ones: 10 rows over 4 -> 3, 3, 3, 1 rows.

    These are the parts that `torch.chunk` makes.
    """
    chunk = ceil_div(length, n_parts)
    return interval(min(index * chunk, length), min((index + 1) * chunk, length))


def _balanced_part(length: int, n_parts: int, index: int) -> tuple[Run, ...]:
    """Return part `index` of contiguous ones of nearly one size: 10 rows over 4 -> 3, 3, 2, 2."""
    min_rows, n_longer = divmod(length, n_parts)  # the first parts have a row more
    start = index * min_rows + min(index, n_longer)
    stop = start + min_rows
    if index < n_longer:
        stop += 1
    return interval(start, stop)


def _zigzag(length: int, n_parts: int, index: int) -> tuple[Run, ...]:
    """Return chunks `index` and `2n - 1 - index` of the 2n chunks of a document.

    8 rows over 2 parts, part 0 -> rows 0 1 and 6 7: under a causal mask, all parts have equal work.
    """
    from_front = _chunk(length, 2 * n_parts, index)
    from_back = _chunk(length, 2 * n_parts, 2 * n_parts - 1 - index)
    return from_front + from_back


def _cyclic(length: int, group_rows: int, n_parts: int, index: int) -> tuple[Run, ...]:
    """Return every n-th group of rows, from group `index`; the last group may be shorter.

    10 rows in groups of 2 over 2 parts, part 1 -> rows 2 3, 6 7.
    """
    first = index * group_rows
    stride = n_parts * group_rows
    starts_of_full_groups = range(first, length - group_rows + 1, stride)
    n_full_groups = len(starts_of_full_groups)
    tail_start = first + n_full_groups * stride
    tail = interval(tail_start, min(length, tail_start + group_rows))
    if n_full_groups < 2:  # one group is an interval, which has no stride
        return interval(first, first + n_full_groups * group_rows) + tail
    full_groups = Run(first, length=group_rows, repeats=n_full_groups, stride=stride)
    return (full_groups, *tail)


def _listed_intervals(shard: Shard, index: int) -> tuple[Run, ...]:
    """Return the intervals that a shard lists for one part."""
    runs: list[Run] = []
    for start, stop in interval_pairs(shard.numbers[index]):
        runs.extend(interval(start, stop))
    return tuple(runs)


def _rows_by_segment(
    length: int,
    shard: Shard,
    n_parts: int,
    index: int,
    cut_segment: Callable[[int, int, int], tuple[Run, ...]],
) -> tuple[Run, ...]:
    """Return a part's rows if each segment, such as a packed document, is sharded by itself.

    Segments of 4 and 2 rows over 2 parts, each cut in halves: part 0 has rows 0 1 of the first and
    row 4 of the second.

    Args:
        length: The rows of all segments.
        shard: The sharding, which lists the lengths of segments; without a list all rows are one.
        n_parts: The number of parts.
        index: Which of the parts, from 0.
        cut_segment: Called with the length of a segment, `n_parts` and `index`; returns the rows of
            the part, counted from the beginning of the segment.
    """
    segment_lengths = whole_numbers_of(shard)
    if not segment_lengths:
        segment_lengths = [length]
    runs = []
    segment_start = 0
    for segment_length in segment_lengths:
        for run in cut_segment(segment_length, n_parts, index):
            runs.append(run._replace(start=segment_start + run.start))
        segment_start += segment_length
    return tuple(runs)


def whole_numbers_of(shard: Shard) -> list[int]:
    """List the plain numbers of a shard: sizes of parts, lengths of documents, rows of a group."""
    return [width for width in shard.numbers if isinstance(width, int)]


def map_of(shard: Shard) -> Owners:
    """Return the map of a shard in the order `by`."""
    named_map = shard.numbers[0]
    assert isinstance(named_map, NamedMap)
    owners: Owners = named_map.map
    return owners


def rows_in_numbers(shard: Shard) -> int | None:
    """Add up the rows that sizes, intervals, documents or a map list; None without such numbers."""
    if not shard.numbers or shard.order == "cyclic":  # whose number is the rows of a group
        return None
    if shard.order == BY:
        return len(map_of(shard).rows)
    if shard.order == INTERVALS:
        intervals = _all_interval_pairs(shard)
        return sum(stop - start for start, stop in intervals)
    return sum(whole_numbers_of(shard))


def _all_interval_pairs(shard: Shard) -> list[tuple[int, int]]:
    """List the (start, stop) of the intervals of all parts."""
    return list(chain.from_iterable(map(interval_pairs, shard.numbers)))


def rotated(axes: tuple[str, ...], n_parts: int, part_rows: int, n_steps: int = 1) -> Shard:
    """Shard rows in the order after each part has sent its rows to the part `n_steps` further on.

    3 parts of 2 rows -> `intervals(axis,[4,6],[0,2],[2,4])`
    """
    starts = [(part_index - n_steps) % n_parts * part_rows for part_index in range(n_parts)]
    return Shard(axes, INTERVALS, tuple((start, start + part_rows) for start in starts))


# ---- all shards of a dim


def cut_by_shards(length: int, shards: Sequence[Shard], sizes: Ints, coords: Ints) -> Runs:
    """Return the rows that one device owns of a dim that is sharded several times.

    Each shard cuts the block that those before it have left. 8 rows under "n/x/y" with x=2, y=2:
    the device at x=1, y=0 has rows 4 to 7 after the first, and owns rows 4 and 5 after the second.

    Args:
        length: The number of rows.
        shards: The shards of the dim, outermost first; each is over one mesh axis or several.
        sizes: The size of each axis of all shards, in their order.
        coords: The device's coordinate along each of these axes.
    """
    block_rows: Runs = interval(0, length)  # the rows of the block that the shards so far have left
    first_axis = 0  # where the axes of the next shard begin in `sizes` and `coords`
    for shard in shards:
        axes = slice(first_axis, first_axis + len(shard.axes))
        first_axis = axes.stop
        n_parts = math.prod(sizes[axes])
        index = row_major(sizes[axes], coords[axes])
        positions = cut_by_shard(count_rows(block_rows), shard, n_parts, index)
        block_rows = _rows_at(length, block_rows, positions)
    return block_rows


def _rows_at(length: int, block_rows: Runs, positions: Runs) -> Runs:
    """Translate positions in a block into rows of the array.

    A block of rows 4 to 7 at positions 0 and 2 -> rows 4 and 6.

    Args:
        length: The rows of the array.
        block_rows: The rows of the block.
        positions: Which rows of the block, counted from its first.
    """
    if block_rows == interval(0, length):
        return positions  # all rows: a position is its row
    # `Rows` are listed one by one, as an array.
    if isinstance(block_rows, Rows) or isinstance(positions, Rows):
        row_array = row_numbers(block_rows)
        position_numbers = row_numbers(positions)
        # A map for another length may name positions beyond the block. They are left out here, so
        # that no lookup fails, and `find_misfit` reports them.
        return as_runs(row_array[position_numbers[position_numbers < len(row_array)]])
    selected: list[Run] = []
    for run in positions:
        selected.extend(rows_at_positions(block_rows, run))
    return tuple(selected)


def shards_with_parts(dim: Dim, sizes: Ints) -> list[tuple[Shard, int]]:
    """Pair every shard of a dim with the number of its parts: `n/x/(y,z)` on 2, 3, 4 -> 2 and 12.

    `sizes` has the size of each axis of the dim.
    """
    shard_parts = []
    first_axis = 0
    for shard in dim.shards:
        stop_axis = first_axis + len(shard.axes)
        shard_parts.append((shard, math.prod(sizes[first_axis:stop_axis])))
        first_axis = stop_axis
    return shard_parts


def owned_rows(dim: Dim, length: int, sizes: Ints, coords: Ints) -> Runs:
    """Return the rows of a dim that the device at `coords` owns, in local order.

    The sizes and coordinates are those of `dim.axes`, in their order.
    """
    return cut_by_shards(length, dim.shards, sizes, coords)


@layout_cache(maxsize=4096)
def all_owned_rows(dim: Dim, length: int, sizes: Sizes) -> tuple[Runs, ...]:
    """List the rows of every block of a dim, one entry per block, row-major along its axes.

    8 rows under "n/x/y" with x=2, y=2 -> rows 0-1, 2-3, 4-5, 6-7, for (x, y) = (0, 0), (0, 1),
    (1, 0), (1, 1). Found by recursion: the blocks of "n/x", 0-3 and 4-7, are each cut by y. Results
    are cached, so that many dims share the work on their outer shards.

    Args:
        dim: The dim, with its shards. Overlaps do not matter: no device owns rows of its halo.
        length: Its number of rows.
        sizes: The size of each axis of the dim, in the order of its shards.
    """
    if not dim.shards:
        return (interval(0, length),)
    shard = dim.shards[-1]
    n_inner_axes = len(shard.axes)
    outer_dim = Dim("", dim.shards[:-1])  # without its name, so that dims of any name share it
    outer_blocks = all_owned_rows(outer_dim, length, sizes[:-n_inner_axes])
    n_parts = math.prod(sizes[-n_inner_axes:])

    # Blocks of equal length are cut at the same positions: each length is cut only once.
    positions_by_length: dict[int, list[Runs]] = {}
    inner_blocks = []
    for outer_rows in outer_blocks:
        outer_length = count_rows(outer_rows)
        if outer_length not in positions_by_length:
            positions_by_length[outer_length] = [
                cut_by_shard(outer_length, shard, n_parts, i) for i in range(n_parts)
            ]
        for positions in positions_by_length[outer_length]:
            inner_blocks.append(_rows_at(length, outer_rows, positions))
    return tuple(inner_blocks)


@layout_cache(maxsize=4096)
def owner_of_rows(dim: Dim, length: int, sizes: Sizes) -> Numbers:
    """Return, for each row of a dim, the number of the block that owns it: an array `[length]`.

    4 rows under "n/x" with x=2 -> 0 0 1 1
    """
    owners = np.zeros(length, np.int64)
    for block, rows in enumerate(all_owned_rows(dim, length, sizes)):
        owners[row_numbers(rows)] = block
    return owners


# ---- lengths of blocks


class BlockLength(NamedTuple):
    """The rows of the longest block of a dim, and whether all blocks have as many."""

    longest: int
    is_even: bool


@layout_cache(maxsize=65536)
def block_length(dim: Dim, length: int, sizes: tuple[int, ...]) -> BlockLength:
    """Return the most rows that any device owns, and whether all own equally many.

    10 rows under "n/x" with x=4 -> `BlockLength(3, False)`. Planning calls this very often: lengths
    follow from formulas where they can, and the rows of all devices are listed only where they must.
    """
    longest = length  # of the longest block after the shards so far
    is_even = True
    for shard, n_parts in shards_with_parts(dim, sizes):
        is_uneven_zigzag = shard.order == "zigzag" and longest % (2 * n_parts) != 0
        if shard.numbers or is_uneven_zigzag:
            # Listed sizes, or a zigzag that does not divide the rows: no formula is simple. Find the
            # set of all lengths of blocks, of all shards of the dim at once.
            different_lengths = block_lengths(dim, length, sizes)
            return BlockLength(max(different_lengths), is_even=len(different_lengths) == 1)
        is_even = is_even and longest % n_parts == 0
        # If parts differ, the first is the longest.
        longest = ceil_div(longest, n_parts)
    return BlockLength(longest, is_even)


@layout_cache(maxsize=4096)
def block_lengths(dim: Dim, length: int, sizes: Sizes) -> frozenset[int]:
    """Return the different numbers of rows that devices own: 10 rows over 4 -> {3, 1}.

    How a block is cut depends on its length alone, so that no rows are listed.
    """
    lengths = {length}
    for shard, n_parts in shards_with_parts(dim, sizes):
        inner_lengths: set[int] = set()
        for rows in lengths:
            for index in range(n_parts):
                inner_lengths.add(count_rows(cut_by_shard(rows, shard, n_parts, index)))
        lengths = inner_lengths
    return frozenset(lengths)


# ---- numbers that do not fit


def find_misfit(dim: Dim, length: int, sizes: Ints) -> str | None:
    """Say why the sizes, intervals or maps written in a dim do not fit its rows; None if they do.

    They have to fit every block that the shards before them leave. `n/x/sizes(y,3,1)` with x=2
    needs blocks of 4 rows, so 8 rows fit, and 10 do not: "... adds up to 4 rows, not 5".

    Args:
        dim: The dim, with its shards.
        length: Its number of rows.
        sizes: The size of each axis of the dim, in the order of its shards.
    """
    for i, (shard, n_parts) in enumerate(shards_with_parts(dim, sizes)):
        if not shard.numbers or shard.order == "cyclic":  # groups of rows fit any length
            continue
        reason = _wrong_number_of_parts(shard, n_parts)
        if reason is not None:
            return reason
        outer_dim = Dim(dim.name, dim.shards[:i])  # cut by the shards before this one only
        for rows in block_lengths(outer_dim, length, tuple(sizes[: len(outer_dim.axes)])):
            reason = _wrong_rows(shard, n_parts, rows)
            if reason is not None:
                return reason
    return None


def _wrong_number_of_parts(shard: Shard, n_parts: int) -> str | None:
    """Say why the numbers of a shard are not for `n_parts` parts; None if they are."""
    if shard.order in (SIZES, INTERVALS) and len(shard.numbers) != n_parts:
        return f"{len(shard.numbers)} {shard.order} for {n_parts} parts"
    if shard.order == BY and map_of(shard).parts != n_parts:
        return f"'{shard.numbers[0]}' has {map_of(shard).parts} parts, the mesh has {n_parts}"
    return None


def _wrong_rows(shard: Shard, n_parts: int, rows: int) -> str | None:
    """Say why the numbers of a shard do not cut a block of `rows` rows; None if they do."""
    if shard.order == INTERVALS:
        return _wrong_intervals(shard, n_parts, rows)
    if shard.order == BY and n_parts == 1 and (np.diff(map_of(shard).rows) != 1).any():
        return f"'{shard}' has one part, which must hold its rows in order"
    listed_rows = rows_in_numbers(shard)
    if listed_rows != rows:
        return f"'{shard}' adds up to {listed_rows} rows, not {rows}"
    return None


def _wrong_intervals(shard: Shard, n_parts: int, rows: int) -> str | None:
    """Check that the intervals listed for all parts hold each of `rows` rows exactly once.

    0-3 and 3-4 fit 4 rows; 0-2 and 3-4 leave out row 2. Returns the reason for an error, or None if
    they fit. The order is free, but with one part it must ascend: `cut_by_shard` takes a single
    part as all rows in order.
    """
    intervals = _all_interval_pairs(shard)
    ascending = sorted(intervals)
    # Each interval begins where the one before it ends, from row 0 to the last.
    starts = [start for start, _ in ascending]
    stops = [stop for _, stop in ascending]
    if [*starts, rows] != [0, *stops] or stops != sorted(stops):
        return f"'{shard}' does not hold each of the {rows} rows once"
    if n_parts == 1 and intervals != ascending:
        return f"'{shard}' has one part, which must hold its rows in order"
    return None
