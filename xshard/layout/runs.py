"""Rows of one dim of an array: lists of rows as runs, and the algebra of intervals on them.

A *run* is consecutive rows that may repeat at a fixed distance: `Run(1, 2, 3, 10)` is the rows 1 2,
11 12, 21 22. The rows of a device's block are a few runs in the order in which the block has them. A
*position* counts in the block, from 0; a *row* counts in the array.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.errors import ShapeError
from xshard.notation.row_arrays import Numbers, count_up, group_heads

FILL = -1  # start of a run of rows outside the array, which the boundary rule fills

# Limits on the pieces of one block: those that arrays hold, and those that Python lists one by
# one. At either limit a plan takes a second or so.
MAX_PIECES = 2**24
MAX_LISTED = 2**20
MAX_RUNS = 64  # in a tuple of runs: a list of rows with more runs becomes `Rows`
MAX_RUN_PAIRS = 8  # compared one by one in Python, which is quicker than arrays up to here
BEYOND_ALL_ROWS = 2**62  # no dim is as long


class Run(NamedTuple):
    """`length` consecutive rows, `repeats` times, `stride` apart.

    Attributes:
        start: The first row, or FILL for rows outside the array.
        length: The number of consecutive rows.
        repeats: How often these rows come, each time `stride` further on.
        stride: The distance from one repetition to the next; negative if the rows go down.

    Examples:
        `Run(1, 2, 3, 10)` is the rows 1, 2, 11, 12, 21, 22.
    """

    start: int
    length: int
    repeats: int = 1
    stride: int = 0


class Rows:
    """A long list of rows as one array of row numbers, which is read like a tuple of runs.

    Tuples of thousands of runs are slow to hash and to compare. Two `Rows` are equal if their
    row numbers are; a `Rows` never equals a tuple.

    Attributes:
        rows: The row numbers in local order, `[rows]`; FILL for rows outside the array.
    """

    def __init__(self, rows: Numbers) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Run]:
        starts, lengths = run_columns(self.rows)
        return map(Run, starts.tolist(), lengths.tolist())

    def __len__(self) -> int:
        starts, _ = run_columns(self.rows)
        return len(starts)

    def __getitem__(self, index: int) -> Run:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.rows.tobytes())


Runs = tuple[Run, ...] | Rows  # the rows of one block, in local order
AllRuns = tuple[Runs, ...]  # of every block
Intervals = NDArray[np.int64]  # [intervals, 2]: start, stop


class Segment(NamedTuple):
    """Rows [src, src + length) of one block are rows [dst, dst + length) of another."""

    src: int
    dst: int
    length: int


class IntervalTable(NamedTuple):
    """Intervals of rows of several blocks, as columns of a table: one entry per interval.

    Attributes:
        block: The number of the block that has the interval.
        local: The position of its first row in the block.
        start: Its first row in the array.
        length: Its number of rows.
    """

    block: Numbers
    local: Numbers
    start: Numbers
    length: Numbers

    def take(self, index: NDArray[Any]) -> IntervalTable:
        """Return some of the intervals, by their numbers or by an array of bools."""
        return IntervalTable._make(column[index] for column in self)


class RunTable(NamedTuple):
    """Runs of rows of several blocks, as columns of a table: one entry per run.

    Attributes:
        block: The number of the block that has the run.
        local: The position of its first row in the block.
        start: Its first row in the array.
        length: Its number of consecutive rows.
        repeats: How often they come.
        stride: How much further on each time.
    """

    block: Numbers
    local: Numbers
    start: Numbers
    length: Numbers
    repeats: Numbers
    stride: Numbers

    def take(self, index: NDArray[Any]) -> RunTable:
        """Return some of the runs, by their numbers or by an array of bools."""
        return RunTable._make(column[index] for column in self)


Table = TypeVar("Table", IntervalTable, RunTable)


class Overlaps(NamedTuple):
    """Rows that intervals of two tables share: one entry per pair of intervals that meet.

    Attributes:
        in_a: The number of the interval in the first table.
        in_b: The number of the interval in the second table.
        start: The first row in both.
        stop: The row after the last one in both.
    """

    in_a: Numbers
    in_b: Numbers
    start: Numbers
    stop: Numbers


# ---- runs as numbers, slices and intervals


def count_rows(runs: Iterable[Run]) -> int:
    """Count the rows in the runs."""
    if isinstance(runs, Rows):
        return len(runs.rows)
    return sum(run.length * run.repeats for run in runs)


def interval(start: int, stop: int) -> tuple[Run, ...]:
    """Return the rows [start, stop) as runs: one run, or none if it is empty."""
    if stop <= start:
        return ()
    return (Run(start, stop - start),)


def interval_pairs(bounds: object) -> list[tuple[int, int]]:
    """Pair up bounds: (start, stop, start, stop, ...) -> [(start, stop), (start, stop), ...].

    Anything but a tuple, such as the number of another order, has no bounds: [].
    """
    if not isinstance(bounds, tuple):
        return []
    return list(zip(bounds[::2], bounds[1::2], strict=False))


def as_index(runs: Runs) -> slice | Numbers:
    """Turn local positions into an index of numpy: a slice if evenly spaced, else an array."""
    if isinstance(runs, Rows):
        return runs.rows
    if not runs:
        return slice(0, 0)
    if len(runs) == 1:
        run = runs[0]
        if run.repeats == 1:
            return slice(run.start, run.start + run.length, 1)
        if run.length == 1 and run.stride > 0:
            last_row = run.start + run.stride * (run.repeats - 1)
            return slice(run.start, last_row + 1, run.stride)
    return row_numbers(runs)


def as_intervals(runs: Iterable[Run]) -> Intervals:
    """List the intervals (start, stop) of runs in local order, `[intervals, 2]`; without FILL."""
    intervals = interval_table((runs,))
    return np.stack([intervals.start, intervals.start + intervals.length], axis=1)


def row_numbers(runs: Iterable[Run]) -> Numbers:
    """List every row number of runs, `[rows]`; FILL for rows outside the array."""
    if isinstance(runs, Rows):
        return runs.rows
    rows_of_runs = [np.zeros(0, np.int64)]  # numpy concatenates no empty list
    for start, length, repeats, stride in runs:  # few runs: many are `Rows`
        if start == FILL:
            rows_of_runs.append(np.full(length * repeats, FILL))
        else:
            repeat_starts = start + stride * np.arange(repeats)
            rows_of_runs.append((repeat_starts[:, None] + np.arange(length)).reshape(-1))
    return np.concatenate(rows_of_runs)


def as_runs(rows: Numbers) -> Runs:
    """Turn row numbers, in any order, into runs: a tuple of them, or `Rows` if they are many."""
    starts, run_lengths = run_columns(rows)
    if len(starts) > MAX_RUNS:
        return Rows(rows)
    return tuple(map(Run, starts.tolist(), run_lengths.tolist()))


def as_few_runs(rows: Numbers) -> Runs:
    """Turn ascending row numbers into one repeating run if they are evenly apart, else `as_runs`.

    0 1 10 11 20 21 -> (Run(0, 2, 3, 10),), which numpy can index by a slice where runs have 1 row.
    """
    starts, run_lengths = run_columns(rows)
    distinct_distances = np.unique(np.diff(starts)).tolist()
    distinct_lengths = np.unique(run_lengths).tolist()
    if len(distinct_distances) == len(distinct_lengths) == 1 and distinct_distances[0] > 0:
        run = Run(
            start=int(starts[0]),
            length=distinct_lengths[0],
            repeats=len(starts),
            stride=distinct_distances[0],
        )
        return (run,)
    return as_runs(rows)


def run_columns(rows: Numbers) -> tuple[Numbers, Numbers]:
    """Find the starts and lengths of consecutive rows: 3 4 5 0 1 -> starts 3 0, lengths 3 2.

    Neighbouring FILLs are one run.
    """
    if not len(rows):
        return rows, rows
    previous = rows[:-1]
    following = rows[1:]
    # FILL is -1, which row 0 does not continue.
    continues = np.where(previous == FILL, following == FILL, following == previous + 1)
    heads = group_heads(continues)
    return rows[heads], np.diff(np.append(heads, len(rows)))


def extents(blocks: Sequence[Iterable[Run]]) -> Intervals:
    """Find the smallest interval [start, stop) around the rows of each block, `[blocks, 2]`.

    Rows 0 1 6 7 -> [0, 8). A block without rows has an empty one, whose start is above its stop.
    """
    table = run_table(blocks)
    # A stride may be negative: then the last repeat of a run has its lowest row.
    last_repeat_start = table.start + table.stride * (table.repeats - 1)
    # Begin with empty intervals, which any row widens.
    bounds = np.tile(np.array([BEYOND_ALL_ROWS, 0]), (len(blocks), 1))
    # `ufunc.at` and not an assignment: a block has several runs, and each has to count.
    np.minimum.at(bounds[:, 0], table.block, np.minimum(table.start, last_repeat_start))
    stops = np.maximum(table.start, last_repeat_start) + table.length
    np.maximum.at(bounds[:, 1], table.block, stops)
    return bounds


# ---- runs of many blocks as tables


def interval_table(blocks: Iterable[Iterable[Run]]) -> IntervalTable:
    """List the intervals of all blocks in local order; without FILL.

    Raises:
        ShapeError: They are more than MAX_PIECES.
    """
    return unroll_table(run_table(blocks))


def run_table(blocks: Iterable[Iterable[Run]]) -> RunTable:
    """Put the runs of all blocks into one table, with columns as arrays.

    Block 0 with rows 0-3 and block 1 with rows 4-5 and 8-9 -> three runs:

        block 0, local 0, start 0, length 4, repeats 1, stride 0
        block 1, local 0, start 4, length 2, repeats 1, stride 0
        block 1, local 2, start 8, length 2, repeats 1, stride 0

    `local` is the position of the run in its block, `start` its first row in the array. Runs of
    FILL (padding, which is no row of the array) are not listed, but take up positions.
    """
    entries = []
    tables = []  # of blocks whose rows are listed one by one, as an array
    for block, runs in enumerate(blocks):
        if isinstance(runs, Rows):
            tables.append(_run_table_of_rows(block, runs))
            continue
        position = 0
        for run in runs:
            if run.start != FILL and run.length > 0:
                entries.append((block, position, *run))  # in the order of columns
            position += run.length * run.repeats
    table = RunTable._make(np.array(entries, np.int64).reshape(-1, 6).T)
    return concatenate_tables(table, *tables) if tables else table


def _run_table_of_rows(block: int, runs: Rows) -> RunTable:
    """Return the `run_table` of one block whose rows are an array."""
    start, length = run_columns(runs.rows)
    table = RunTable(
        block=np.full_like(start, block),
        local=np.cumsum(length) - length,
        start=start,
        length=length,
        repeats=np.ones_like(start),
        stride=np.zeros_like(start),
    )
    return table.take(start != FILL)


def concatenate_tables(*tables: Table) -> Table:
    """Put the entries of several tables one after the other."""
    return type(tables[0])._make(map(np.concatenate, zip(*tables, strict=True)))


def unroll_table(table: RunTable) -> IntervalTable:
    """Unroll runs: list every repetition as an interval of its own.

    A run of 2 rows from row 1, repeated 3 times at a distance of 10 -> rows [1, 3), [11, 13),
    [21, 23) at positions 0, 2, 4 of the block.

    Raises:
        ShapeError: There are more than MAX_PIECES intervals.
    """
    check_pieces(int(table.repeats.sum()))  # first, since the arrays below might take gigabytes
    # For each interval, the run that it is from, and which repetition of it.
    run_of_interval = table.take(np.repeat(np.arange(len(table.repeats)), table.repeats))
    repetition = count_up(table.repeats)
    return IntervalTable(
        block=run_of_interval.block,
        local=run_of_interval.local + run_of_interval.length * repetition,
        start=run_of_interval.start + run_of_interval.stride * repetition,
        length=run_of_interval.length,
    )


def check_pieces(count: int, max_pieces: int = MAX_PIECES) -> None:
    """Raise ShapeError for a block of more than `max_pieces` pieces."""
    if count > max_pieces:
        hint = f"at most {max_pieces}: deal out more rows together, as in cyclic(x,1024)"
        raise ShapeError(f"rows in {count} separate pieces", hint=hint)


def intersections(a: IntervalTable, b: IntervalTable) -> Overlaps:
    """Intersect two lists of row intervals: find each pair that overlaps, and the rows they share.

    `a` = [0, 4) and [4, 8), `b` = [2, 6) -> two pairs: interval 0 of `a` and 0 of `b` share the rows
    [2, 4), interval 1 of `a` and 0 of `b` share [4, 6).

    Args:
        a: Intervals in ascending order, of which no two have a row in common.
        b: Intervals in any order.

    Returns:
        Four columns `[pairs]`, in the order of `b`: here in_a 0 1, in_b 0 0, start 2 4, stop 4 6.

    Raises:
        ShapeError: More than MAX_PIECES pairs overlap.
    """
    a_stop = a.start + a.length
    b_stop = b.start + b.length
    # `a` is sorted, so the intervals of `a` that overlap one interval of `b` are neighbours, from the
    # first that ends after the interval of `b` begins, to the last that begins before it ends.
    # Bisection finds both for all intervals of `b`, `[b]`.
    first = np.searchsorted(a_stop, b.start, side="right")
    behind_last = np.searchsorted(a.start, b_stop, side="left")
    counts = np.maximum(behind_last - first, 0)
    check_pieces(int(counts.sum()))
    in_b = np.repeat(np.arange(len(counts)), counts)  # [pairs]
    in_a = count_up(counts, first)  # for each interval of `b`: first, first + 1, ...
    start = np.maximum(a.start[in_a], b.start[in_b])
    stop = np.minimum(a_stop[in_a], b_stop[in_b])
    return Overlaps(in_a, in_b, start, stop)


# ---- rows that two blocks share


@layout_cache(maxsize=65536)
def common_segments(src: Runs, dst: Runs) -> tuple[Segment, ...]:
    """Find what to copy from one block to another: the rows that both hold, by local position.

    Rows 0-3 and rows 2-5 -> `(Segment(src=2, dst=0, length=2),)`: the rows at positions 2 and 3 of
    the first block are those at positions 0 and 1 of the second. Segments come in the order of
    `dst`, neighbours merged into one. The rows of `src` are distinct; `dst` may have a row twice.
    """
    # All four find the same, each as quick as the form of the rows allows: `Rows` are an array of row
    # numbers; other rows are runs, intervals that may be repeated.
    if isinstance(src, Rows) or isinstance(dst, Rows):
        return match_rows(row_numbers(src), row_numbers(dst))
    if len(src) == len(dst) == 1 and src[0].repeats == dst[0].repeats == 1:
        return _segment_of_intervals(src[0], dst[0])
    if len(src) * len(dst) <= MAX_RUN_PAIRS and _are_intervals(src) and _are_intervals(dst):
        return _segments_of_few(src, dst)
    return _segments_of_many(src, dst)


def _are_intervals(runs: Iterable[Run]) -> bool:
    """Return whether all runs are rows of the array without repetitions."""
    return all(run.repeats == 1 and run.start != FILL for run in runs)


def _segment_of_intervals(src: Run, dst: Run) -> tuple[Segment, ...]:
    """Return `common_segments` of two blocks of one interval each."""
    start = max(src.start, dst.start)
    stop = min(src.start + src.length, dst.start + dst.length)
    if start >= stop or src.start == FILL or dst.start == FILL:
        return ()
    return (Segment(src=start - src.start, dst=start - dst.start, length=stop - start),)


def _segments_of_few(src: Iterable[Run], dst: Iterable[Run]) -> tuple[Segment, ...]:
    """Find the rows that two blocks share, by comparing each pair of their intervals.

    Rows 0-3 and rows 2-5 -> `(Segment(src=2, dst=0, length=2),)`: positions 2 and 3 of the first
    block are positions 0 and 1 of the second. The runs are single intervals, without repetitions.
    """
    src_runs = []  # (first row, position in the block, length)
    n_src_rows = 0  # in the runs so far
    for run in src:
        src_runs.append((run.start, n_src_rows, run.length))
        n_src_rows += run.length
    src_runs.sort()  # by ascending rows: then the segments in a run of `dst` come in its order

    shared = []  # (position in `src`, position in `dst`, length)
    dst_position = 0
    for run in dst:
        run_stop = run.start + run.length
        for src_start, src_position, src_length in src_runs:
            start = max(src_start, run.start)
            stop = min(src_start + src_length, run_stop)
            if start < stop:
                in_src = src_position + start - src_start
                in_dst = dst_position + start - run.start
                shared.append((in_src, in_dst, stop - start))
        dst_position += run.length
    return merge_segments(np.array(shared, np.int64))


def _segments_of_many(src: Runs, dst: Runs) -> tuple[Segment, ...]:
    """Return `common_segments` of any runs, by tables of their intervals."""
    src_intervals = interval_table((src,))
    src_intervals = src_intervals.take(np.argsort(src_intervals.start, kind="stable"))
    dst_intervals = interval_table((dst,))
    shared = intersections(src_intervals, dst_intervals)
    # A row's position in its block is the row plus this offset of its interval.
    src_offset = src_intervals.local - src_intervals.start
    dst_offset = dst_intervals.local - dst_intervals.start
    in_src = src_offset[shared.in_a] + shared.start
    in_dst = dst_offset[shared.in_b] + shared.start
    return merge_segments(np.stack([in_src, in_dst, shared.stop - shared.start], axis=1))


def match_rows(src: Numbers, dst: Numbers) -> tuple[Segment, ...]:
    """Return `common_segments` of row numbers in arrays, `[rows]`; those of `src` are distinct."""
    n_rows = max(src.max(initial=-1), dst.max(initial=-1)) + 1
    # A table of the position in `src` of each row, -1 for none: quicker than a sort, and no longer
    # than the dim. Its entry at the end is that of FILL, which is -1: FILL in `src` writes there,
    # and FILL in `dst` reads there. It is set to "none" again.
    src_position = np.full(n_rows + 1, -1)  # [rows + 1]
    src_position[src] = np.arange(len(src))
    src_position[FILL] = -1
    in_dst = np.flatnonzero(src_position[dst] >= 0)
    in_src = src_position[dst[in_dst]]
    return merge_segments(np.stack([in_src, in_dst, np.ones_like(in_dst)], axis=1))


def merge_segments(table: Numbers) -> tuple[Segment, ...]:
    """Turn a table `[entries, 3]` of (src, dst, length) into segments; merge those that continue.

    (0, 4, 2) and (2, 6, 1) -> one segment (0, 4, 3)
    """
    if len(table) == 0:
        return ()
    starts = table[:, :2]  # in `src` and in `dst`
    stops = starts + table[:, 2:]
    heads = group_heads((stops[:-1] == starts[1:]).all(axis=1))
    merged = table[heads]
    merged[:, 2] = np.add.reduceat(table[:, 2], heads)
    return tuple(map(Segment._make, merged.tolist()))


# ---- runs merged, compared and selected


def merge_adjacent(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Merge intervals that follow one another: rows 0-3 and 4-7 -> rows 0-7.

    Repeated runs and FILL stay as they are.
    """
    return tuple(_iterate_merged(runs))


def _iterate_merged(runs: Iterable[Run]) -> Iterator[Run]:
    """Yield what `merge_adjacent` returns."""
    pending: Run | None = None
    for run in runs:
        if pending is None:
            pending = run
        elif _continues(pending, run):
            pending = Run(pending.start, pending.length + run.length)
        else:
            yield pending
            pending = run
    if pending is not None:
        yield pending


def _continues(earlier: Run, later: Run) -> bool:
    """Return whether `later` is an interval that begins where the interval `earlier` ends."""
    if earlier.start == FILL or earlier.repeats > 1 or later.repeats > 1:
        return False
    return later.start == earlier.start + earlier.length


def are_equal(a: Runs, b: Runs) -> bool:
    """Return whether both are the same rows in the same order.

    Run(0, 4) equals Run(0, 1, 4, 1), and Run(0, 2) with Run(2, 2).
    """
    if a == b:
        return True
    if count_rows(a) != count_rows(b):  # usual, and quicker than the comparison below
        return False
    run_pairs = itertools.zip_longest(_iterate_merged(unroll(a)), _iterate_merged(unroll(b)))
    return all(run_of_a == run_of_b for run_of_a, run_of_b in run_pairs)


def unroll(runs: Runs) -> Iterator[Run]:
    """Yield the same rows as runs without repetitions."""
    for run in runs:
        for i in range(run.repeats):
            yield Run(run.start + i * run.stride, run.length)


def rows_at_positions(runs: Runs, positions: Run) -> tuple[Run, ...]:
    """Translate local positions in a block into the rows of the array that lie there.

    The block of rows 10-17, `Run(10, 8)`, at positions 1 and 2, `Run(1, 2)` -> rows 11 and 12,
    `(Run(11, 2),)`. Positions that repeat, such as every second one, give one repeating run where
    possible, so that a million repetitions cost no more than 2.

    Raises:
        ShapeError: There are more than MAX_LISTED repetitions that are not one run.
    """
    if positions.repeats == 1:
        return _slice(runs, positions.start, positions.start + positions.length)
    if len(runs) == 1:
        selected_run = _select_repeating(runs[0], positions)
        if selected_run is not None:
            return (selected_run,)
    # Each repetition is translated by itself.
    check_pieces(positions.repeats, MAX_LISTED)
    selected: list[Run] = []
    for repetition in unroll((positions,)):
        selected.extend(_slice(runs, repetition.start, repetition.start + repetition.length))
    return tuple(selected)


def _select_repeating(block: Run, positions: Run) -> Run | None:
    """Translate positions that repeat in a block of one run; None if they are not one run again.

    The block 0 1, 10 11, 20 21, 30 31 is groups of 2 rows. Positions 1 and 5 are the second row of
    every other group: rows 1 and 21, one run. Positions 0 and 3 are the first row of a group and
    the second of another: None.
    """
    if block.repeats == 1:  # consecutive rows
        return positions._replace(start=block.start + positions.start)
    group_index, offset_in_group = divmod(positions.start, block.length)
    group_stride, rows_apart = divmod(positions.stride, block.length)
    reaches_over_group = offset_in_group + positions.length > block.length
    if rows_apart or reaches_over_group:
        return None  # at another position of each group, or not inside one group
    start = block.start + group_index * block.stride + offset_in_group
    return positions._replace(start=start, stride=group_stride * block.stride)


def _slice(runs: Runs, start: int, stop: int) -> tuple[Run, ...]:
    """Return the rows of a block at local positions [start, stop)."""
    selected = []
    run_position = 0
    for run in runs:
        rows_of_run = run.length * run.repeats
        first_in_run = max(start - run_position, 0)
        stop_in_run = min(stop - run_position, rows_of_run)
        run_position += rows_of_run
        if first_in_run < stop_in_run:
            selected.extend(_slice_of_run(run, first_in_run, stop_in_run))
    return tuple(selected)


def _slice_of_run(run: Run, start: int, stop: int) -> list[Run]:
    """Take the rows of one repeated range at local positions [start, stop), where start < stop.

    The rows 0 1 2, 10 11 12, 20 21 22 are a run of 3 groups. At positions [1, 8) are 1 2, then
    10 11 12, then 20 21: the end of one group, whole groups (as one run), the beginning of another.
    """
    first_group, n_skipped = divmod(start, run.length)  # rows of that group before `start`
    last_group, n_in_last_group = divmod(stop, run.length)  # rows of that group before `stop`
    first_row = run.start + first_group * run.stride
    if first_group == last_group:
        return [Run(first_row + n_skipped, n_in_last_group - n_skipped)]
    selected = []
    full_group = first_group
    if n_skipped:
        selected.append(Run(first_row + n_skipped, run.length - n_skipped))
        full_group += 1
    n_full_groups = last_group - full_group
    if n_full_groups:
        full_start = run.start + full_group * run.stride
        stride = run.stride if n_full_groups > 1 else 0  # so that equal rows compare equal
        full_groups = Run(full_start, length=run.length, repeats=n_full_groups, stride=stride)
        selected.append(full_groups)
    if n_in_last_group:
        selected.append(Run(run.start + last_group * run.stride, n_in_last_group))
    return selected
