"""Rows of many blocks at once, as intervals: cut, compared and counted, however long a dim is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.layout import runs
from xshard.layout.runs import (
    FILL,
    IntervalTable,
    Rows,
    Run,
    Runs,
    RunTable,
    as_runs,
    interval_table,
    row_numbers,
    unroll_table,
)
from xshard.layout.runs import (
    concatenate_tables as concatenate_tables,
)
from xshard.notation.row_arrays import Numbers, count_up, group_heads, unique_rows

MAX_COUNTED = 2**18  # intervals that are counted one by one; of more, one period is counted
LONGEST_PERIOD = 2**62  # longer than any dim, and the largest that int64 holds safely
LONG_INTERVAL_ROWS = 128  # intervals that are longer than this on average are kept as runs


class CutIntervals(NamedTuple):
    """Intervals of rows that are cut into fragments wherever one of them begins or ends.

    Attributes:
        fragments: The intervals after the cuts. Two fragments share all their rows or none.
        cell_index: Which rows each fragment has, as a number: equal for fragments with equal rows.
        interval_index: Which of the intervals each fragment comes from.
    """

    fragments: IntervalTable
    cell_index: Numbers
    interval_index: Numbers


class RowPairs(NamedTuple):
    """Pairs of blocks with rows in common, as columns of a table: one entry per pair.

    Attributes:
        receivers: The block that wants the rows.
        senders: The block that has them.
        rows: How many rows they share; a row counts as often as both have it.
    """

    receivers: Numbers
    senders: Numbers
    rows: Numbers

    def take(self, index: NDArray[np.bool_]) -> RowPairs:
        """Return some of the pairs."""
        return RowPairs._make(column[index] for column in self)


def cut_at_edges(table: IntervalTable) -> CutIntervals:
    """Cut row intervals at each other's ends, so that any two fragments are equal or disjoint.

    [0, 4) and [2, 6) have edges 0, 2, 4, 6, and so the cells [0, 2), [2, 4), [4, 6). The first
    interval becomes the fragments [0, 2), [2, 4), the second [2, 4), [4, 6). The result holds these
    four, the index of the cell of each (0 1 1 2), and the index of its interval (0 0 1 1).
    """
    stop = table.start + table.length
    edges = unique_rows(np.concatenate([table.start, stop]))  # ascending
    # Cell i lies between edges i and i + 1. Each interval is `n_cells` cells, one after another.
    first_cell = np.searchsorted(edges, table.start)
    n_cells = np.searchsorted(edges, stop) - first_cell  # [intervals]
    runs.check_pieces(int(n_cells.sum()))
    interval_index = np.repeat(np.arange(len(n_cells)), n_cells)  # [fragments], as all below
    cell_index = count_up(n_cells, first_cell)
    uncut = table.take(interval_index)  # the interval of each fragment
    start = edges[cell_index]
    local = uncut.local + start - uncut.start
    lengths = np.diff(edges)[cell_index]
    fragments = uncut._replace(local=local, start=start, length=lengths)
    return CutIntervals(fragments, cell_index, interval_index)


def first_occurrences(table: IntervalTable, *, per_block: bool) -> IntervalTable:
    """Keep every row where it comes first: in each block if `per_block`, else in any block.

    Rows 0-3 of block 0 and 2-5 of block 1 -> 0-3 of block 0 and 4-5 of block 1.
    """
    cut = cut_at_edges(table)
    # `np.unique` returns the first index of each key: fragments are in the order of the intervals.
    distinct_key = cut.cell_index
    if per_block:
        distinct_key = distinct_key + cut.fragments.block * len(cut.cell_index)
    _, first_index = np.unique(distinct_key, return_index=True)
    return cut.fragments.take(np.sort(first_index))


def rows_outside(table: IntervalTable, excluded: IntervalTable) -> IntervalTable:
    """Return the intervals without the rows that are also in `excluded`: 0-5 without 2-3 -> 0-1, 4-5."""
    # Cut together: then two fragments share all rows or none, and are compared by their cells.
    cut = cut_at_edges(concatenate_tables(excluded, table))
    is_of_table = cut.interval_index >= len(excluded.start)
    is_excluded = np.isin(cut.cell_index, cut.cell_index[~is_of_table])
    return cut.fragments.take(is_of_table & ~is_excluded)


def layers(table: IntervalTable) -> list[IntervalTable]:
    """Split the intervals of one block into lists of distinct rows.

    The first list has every row once, the second every row that comes twice or more, and so on: 0-3
    and 2-5 -> 0-1, 2-3, 4-5, and then 2-3.
    """
    cut = cut_at_edges(table)
    _, counts = np.unique(cut.cell_index, return_counts=True)
    n_before = np.empty_like(cut.cell_index)  # [fragments]: how often these rows have come before
    n_before[np.argsort(cut.cell_index, kind="stable")] = count_up(counts)
    return [
        cut.fragments.take(n_before == layer_index)
        for layer_index in range(int(counts.max(initial=0)))
    ]


def fill_blocks(table: IntervalTable, lengths: Sequence[int]) -> tuple[Runs, ...]:
    """Turn intervals into the runs of every block, which has `lengths` rows; FILL between them.

    Rows 4-5 at position 1 of a block of 4 -> FILL 4 5 FILL.
    """
    n_intervals = len(table.local)
    are_many = n_intervals > runs.MAX_RUNS
    are_short = n_intervals >= sum(lengths) // LONG_INTERVAL_ROWS
    if any(lengths) and are_many and are_short:
        return _fill_by_rows(table, lengths)
    return _fill_by_runs(table, lengths)


def _fill_by_rows(table: IntervalTable, lengths: Sequence[int]) -> tuple[Runs, ...]:
    """Do the work of `fill_blocks` for many short intervals: by one array of row numbers."""
    # All blocks in one array, so that numpy loops over intervals and not Python.
    block_starts = np.cumsum([0, *lengths])  # where each block begins in it
    rows = np.full(block_starts[-1], FILL)
    positions = count_up(table.length, table.local + block_starts[table.block])
    rows[positions] = count_up(table.length, table.start)
    return tuple(as_runs(rows[start:stop]) for start, stop in itertools.pairwise(block_starts))


def _fill_by_runs(table: IntervalTable, lengths: Sequence[int]) -> tuple[Runs, ...]:
    """Do the work of `fill_blocks` for few or long intervals: run by run."""
    block_runs: list[list[Run]] = [[] for _ in lengths]
    filled_to = [0] * len(lengths)  # the local position up to which each block has runs
    for block, local, start, length in _merge_continuing(table):
        if local > filled_to[block]:
            block_runs[block].append(Run(FILL, local - filled_to[block]))
        block_runs[block].append(Run(start, length))
        filled_to[block] = local + length
    for block, length in enumerate(lengths):
        if length > filled_to[block]:
            block_runs[block].append(Run(FILL, length - filled_to[block]))
    return tuple(map(tuple, block_runs))


def _merge_continuing(table: IntervalTable) -> list[list[int]]:
    """List (block, local, start, length) by block and position, merged where rows continue."""
    if not len(table.local):
        return []
    table = table.take(np.lexsort((table.local, table.block)))
    length = table.length[:-1]
    is_same_block = np.diff(table.block) == 0
    continues = is_same_block & (np.diff(table.local) == length) & (np.diff(table.start) == length)
    heads = group_heads(continues)
    merged = table.take(heads)._replace(length=np.add.reduceat(table.length, heads))
    rows: list[list[int]] = np.stack(merged, axis=1).tolist()
    return rows


def runs_by_row(table: IntervalTable, n_blocks: int) -> tuple[Runs, ...]:
    """Turn intervals of distinct rows into the runs of every block, in ascending order of rows.

    The intervals get new local positions: each begins where the one before it in its block ends.
    """
    table = table.take(np.lexsort((table.start, table.block)))  # by block, then by row
    block_rows = np.zeros(n_blocks, np.int64)
    np.add.at(block_rows, table.block, table.length)  # exact; bincount adds floats
    rows_before_piece = np.cumsum(table.length) - table.length
    rows_before_block = np.cumsum(block_rows) - block_rows
    local = rows_before_piece - rows_before_block[table.block]
    return fill_blocks(table._replace(local=local), block_rows.tolist())


def distinct_rows(blocks: Sequence[Runs]) -> tuple[Runs, ...]:
    """List the rows of every block, each once, in ascending order; without FILL."""
    if not any(isinstance(block, Rows) for block in blocks):
        return runs_by_row(first_occurrences(interval_table(blocks), per_block=True), len(blocks))
    distinct_blocks = []
    for block in blocks:
        rows = row_numbers(block)
        distinct_blocks.append(as_runs(unique_rows(rows[rows != FILL])))
    return tuple(distinct_blocks)


# ---- rows that blocks share


def shared_rows(src: Sequence[Runs], dst: Sequence[Runs]) -> RowPairs:
    """Count the rows that each block of `dst` has in common with each block of `src`.

    src blocks of rows 0-3 and 4-7, dst blocks of rows 0-5 and 6-7 -> receivers 0 0 1, senders
    0 1 1, rows 4 2 2: block 0 of `dst` shares 4 rows with block 0 of `src` and 2 rows with block 1;
    block 1 of `dst` shares 2 rows with block 1 of `src`. Pairs without common rows are left out.
    All three ways below count the same; they differ in time and memory.
    """
    if any(isinstance(block, Rows) for block in (*src, *dst)):
        # Some rows are listed one by one (`Rows`), and not as intervals. A lookup table by row is
        # quickest, but has one block for each row: None if both sides have some row twice.
        shared = _shared_by_table(list(map(row_numbers, src)), list(map(row_numbers, dst)))
        if shared is not None:
            return shared
    src_runs = runs.run_table(src)
    dst_runs = runs.run_table(dst)
    n_intervals = int(src_runs.repeats.sum() + dst_runs.repeats.sum())
    if n_intervals <= MAX_COUNTED:
        dst_intervals = unroll_table(dst_runs)
        times = np.ones_like(dst_intervals.start)  # each piece counts once
        return _shared_by_intervals(unroll_table(src_runs), dst_intervals, times, len(src))
    # Too many intervals to list, as of a long cyclic sharding. But their pattern repeats: list those
    # in one period (a window of rows), and count each as often as the period comes.
    src_runs = _ascending_runs(src_runs)
    dst_runs = _ascending_runs(dst_runs)
    windows, window_times = _windows_of_one_period(concatenate_tables(src_runs, dst_runs))
    src_intervals = _cut_to_windows(src_runs, windows).intervals
    dst_cut = _cut_to_windows(dst_runs, windows)
    dst_times = window_times[dst_cut.window_index]
    return _shared_by_intervals(src_intervals, dst_cut.intervals, dst_times, len(src))


def _shared_by_intervals(
    src: IntervalTable, dst: IntervalTable, dst_times: Numbers, n_src_blocks: int
) -> RowPairs:
    """Count the rows that each pair of a source and a destination block share, from row intervals.

    src blocks of rows 0-3 and 4-7, dst blocks of rows 0-5 and 6-7 -> receivers 0 0 1, senders
    0 1 1, rows 4 2 2: one entry for each pair of blocks with common rows.

    Args:
        src: The row intervals of the source blocks.
        dst: The row intervals of the destination blocks.
        dst_times: `[intervals of dst]`, how often each counts: more than once where one interval
            stands for a pattern that repeats.
        n_src_blocks: The number of blocks of `src`.
    """
    # Cut all intervals at each other's ends: two fragments then share all rows or none, and share all
    # exactly if they have the same cell.
    fragments, cell_index, interval_index = cut_at_edges(concatenate_tables(src, dst))
    n_src_intervals = len(src.start)  # these come first in the joined table
    src_fragments = np.flatnonzero(interval_index < n_src_intervals)  # indices of fragments
    dst_fragments = np.flatnonzero(interval_index >= n_src_intervals)
    src_positions, dst_positions = _equal_pairs(
        cell_index[src_fragments], cell_index[dst_fragments]
    )
    # For each pair of a source and a destination fragment with the same rows, their indices.
    src_match = src_fragments[src_positions]  # [matches]
    dst_match = dst_fragments[dst_positions]  # [matches]
    times = dst_times[interval_index[dst_match] - n_src_intervals]
    rows = fragments.length[dst_match] * times

    # Add up rows by pair of blocks. A pair is one number: dst block * n_src_blocks + src block.
    block_pair = fragments.block[dst_match] * n_src_blocks + fragments.block[src_match]  # [matches]
    distinct_pairs, pair_index = np.unique(block_pair, return_inverse=True)
    total_rows = np.zeros(len(distinct_pairs), np.int64)
    np.add.at(total_rows, pair_index.reshape(-1), rows)  # exact; bincount adds floats
    divisor = max(n_src_blocks, 1)  # avoids 0 / 0: without blocks there are no pairs
    return RowPairs(distinct_pairs // divisor, distinct_pairs % divisor, total_rows)


def _equal_pairs(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
    """Find all pairs of equal numbers in two lists, as their positions in each, in the order of `b`.

    5 7 and 7 5 7 -> positions 1 0 1 in `a`, 0 1 2 in `b`.
    """
    order = np.argsort(a, kind="stable")
    ascending = a[order]
    # Equal numbers are neighbours: `counts` of them from position `first_equal`.
    first_equal = np.searchsorted(ascending, b, side="left")
    counts = np.searchsorted(ascending, b, side="right") - first_equal
    runs.check_pieces(int(counts.sum()))
    return order[count_up(counts, first_equal)], np.repeat(np.arange(len(b)), counts)


def _shared_by_table(src: list[Numbers], dst: list[Numbers]) -> RowPairs | None:
    """Do the work of `shared_rows` by a table of rows; None if both sides have a row twice."""
    n_rows = max(rows.max(initial=FILL) for rows in (*src, *dst)) + 1
    src_block = _block_of_row(src, n_rows)
    if src_block is not None:
        counts = _count_blocks(dst, src_block, len(src))  # [dst blocks, src blocks]
    else:
        dst_block = _block_of_row(dst, n_rows)
        if dst_block is None:
            return None
        counts = _count_blocks(src, dst_block, len(dst)).T
    receivers, senders = np.nonzero(counts)
    return RowPairs(receivers, senders, counts[receivers, senders])


def _block_of_row(blocks: list[Numbers], n_rows: int) -> Numbers | None:
    """Return the block of each of `n_rows` rows, -1 for none; None if a row comes twice."""
    block_of_row = np.full(n_rows + 1, -1)  # the entry at the end is that of FILL, -1
    for block, rows in enumerate(blocks):
        block_of_row[rows] = block
    block_of_row[FILL] = -1
    n_distinct = np.count_nonzero(block_of_row >= 0)
    n_all = sum(np.count_nonzero(rows != FILL) for rows in blocks)
    return block_of_row if n_distinct == n_all else None


def _count_blocks(readers: list[Numbers], block_of_row: Numbers, n_blocks: int) -> Numbers:
    """Count the rows that each reader has of each block, `[readers, blocks]`."""
    counts = []
    for rows in readers:
        # Rows of no block have -1: they are counted at 0, and that count is left out.
        counts.append(np.bincount(block_of_row[rows] + 1, minlength=n_blocks + 1)[1:])
    return np.array(counts)


def _windows_of_one_period(table: RunTable) -> tuple[IntervalTable, Numbers]:
    """Choose intervals of rows (windows) that show each pattern of repeated runs one time.

    A cyclic sharding of 10^9 rows has up to 10^9 intervals, but its pattern repeats. "Every 2nd
    row" and "every 3rd row" of 96 rows repeat after 6 rows, the least common multiple: the window
    [0, 6) shows all, and counts 16 times.

    Returns:
        The windows, in ascending order, and how often each counts, `[windows]`.
    """
    strides = np.unique(table.stride[table.repeats > 1]).tolist()
    period = min(math.lcm(*strides), LONGEST_PERIOD)
    # Where a run begins or ends, the pattern changes. Between neighbouring edges, in the stretch of
    # rows [low, high), it stays the same.
    edges = np.unique(np.concatenate([table.start, _period_ends(table)]))
    low = edges[:-1]  # [stretches]
    high = edges[1:]
    n_periods = np.maximum((high - low) // period, 1)
    # Each stretch has two windows, one after the other: its first period, which counts for all
    # whole periods, and the rows after the last whole one, which count once.
    starts = np.column_stack([low, low + n_periods * period]).ravel()  # [2 * stretches]
    stops = np.column_stack([np.minimum(low + period, high), high]).ravel()
    times = np.column_stack([n_periods, np.ones_like(n_periods)]).ravel()
    has_rows = np.flatnonzero(stops > starts)  # numbers of windows
    lengths = stops[has_rows] - starts[has_rows]
    windows = IntervalTable(
        # A window is no part of a block: these two have its number, and are not read.
        block=has_rows,
        local=has_rows,
        start=starts[has_rows],
        length=lengths,
    )
    return windows, times[has_rows]


class _CutToWindows(NamedTuple):
    """Row intervals inside windows of rows, and the index of the window that each one is in."""

    intervals: IntervalTable
    window_index: Numbers


def _cut_to_windows(table: RunTable, windows: IntervalTable) -> _CutToWindows:
    """List the row intervals of repeated runs inside some windows, cut at the windows' ends.

    A run of 2 rows that is repeated every 4 (0 1, 4 5, 8 9, ...), in the window [1, 6) -> [1, 2)
    and [4, 6). Repetitions outside of the windows are never listed, however many there are. The
    intervals have the local position of their run, not their own: only blocks and rows are counted.

    Args:
        table: Runs whose repetitions ascend: each begins after the one before it has ended.
        windows: Intervals of rows, in ascending order and disjoint.
    """
    # Each run as one interval, from its first row to the end of its last period: where it meets the
    # windows is found without listing its repetitions.
    stretch = _period_ends(table) - table.start
    stretches = IntervalTable(table.block, table.local, start=table.start, length=stretch)
    # For each pair of a window and a run that meet: the index of both, and the rows [low, high) that
    # the window cuts out of the run.
    window_of_pair, run_index, low, high = runs.intersections(windows, stretches)  # [pairs]
    run_of_pair = table.take(run_index)
    first_repeat, n_repeats = _repeats_within(run_of_pair, low, high)  # [pairs]
    runs.check_pieces(int(n_repeats.sum()))

    # One entry for each of these repetitions: the index of its pair, and its rows, cut.
    pair_index = np.repeat(np.arange(len(n_repeats)), n_repeats)  # [intervals]
    offset = count_up(n_repeats, first_repeat) * run_of_pair.stride[pair_index]
    repeat_start = run_of_pair.start[pair_index] + offset
    cut_start = np.maximum(repeat_start, low[pair_index])
    cut_stop = np.minimum(repeat_start + run_of_pair.length[pair_index], high[pair_index])
    intervals = IntervalTable(
        block=run_of_pair.block[pair_index],
        local=run_of_pair.local[pair_index],
        start=cut_start,
        length=cut_stop - cut_start,
    )
    return _CutToWindows(intervals, window_of_pair[pair_index])


def _repeats_within(table: RunTable, low: Numbers, high: Numbers) -> tuple[Numbers, Numbers]:
    """Find which repetitions of each run have rows in [low, high): the first of them, and how many.

    2 rows repeated every 4 (0 1, 4 5, 8 9, ...) have rows in [1, 6) in 2 repetitions, from the one
    with the number 0.
    """
    stride = np.maximum(table.stride, 1)  # the stride of a single interval is 0
    # Those that end at `low` or before.
    n_ended = (low - table.start - table.length) // stride + 1
    # Those that begin before `high`: (high - start) / stride, rounded up.
    n_begun = -((table.start - high) // stride)
    first_repeat = np.clip(n_ended, 0, table.repeats)
    stop_repeat = np.clip(n_begun, first_repeat, table.repeats)
    return first_repeat, stop_repeat - first_repeat


def _period_ends(table: RunTable) -> Numbers:
    """Return the row after each run, or after its last whole period if it repeats."""
    periods = table.stride * table.repeats
    stops: Numbers = table.start + np.where(table.repeats > 1, periods, table.length)
    return stops


def _ascending_runs(table: RunTable) -> RunTable:
    """Turn runs that go down or stay where they are into runs of one interval each."""
    is_descending = (table.repeats > 1) & (table.stride < table.length)
    intervals = unroll_table(table.take(is_descending))
    once = np.ones_like(intervals.local)
    listed = RunTable._make((*intervals, once, np.zeros_like(once)))
    return concatenate_tables(table.take(~is_descending), listed)
