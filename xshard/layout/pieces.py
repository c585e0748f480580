"""Rows of many blocks at once, as intervals: cut, compared and counted, however long a dim is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from xshard.layout import runs
from xshard.layout.runs import (
    FILL,
    Pieces,
    Rows,
    Run,
    Runs,
    as_runs,
    counted,
    expanded,
    pieces,
    row_numbers,
)
from xshard.notation.maps import Numbers, unique_rows

MOST_COUNTED = 2**18  # pieces that are counted one by one


def joined(*tables: Pieces) -> Pieces:
    """Pieces after pieces."""
    return Pieces(*map(np.concatenate, zip(*tables, strict=True)))


def at_edges(table: Pieces) -> tuple[Pieces, Numbers, Numbers]:
    """The pieces, cut wherever one of them begins or ends: the parts, the interval and the piece of each."""
    stop = table.start + table.length
    edges = unique_rows(np.concatenate([table.start, stop]))
    first = np.searchsorted(edges, table.start)
    many = np.searchsorted(edges, stop) - first
    runs.check_pieces(int(many.sum()))
    which = np.repeat(np.arange(len(many)), many)
    interval = counted(many, first)
    start = edges[interval]
    length = np.diff(edges)[interval]
    parts = Pieces(table.block[which], (table.local - table.start)[which] + start, start, length)
    return parts, interval, which


def firsts(table: Pieces, *, alone: bool) -> Pieces:
    """Every row where it comes first: in each block alone, or in any."""
    parts, interval, _ = at_edges(table)
    place = interval + parts.block * len(interval) if alone else interval
    return parts.take(np.sort(np.unique(place, return_index=True)[1]))


def without(table: Pieces, others: Pieces) -> Pieces:
    """The pieces without the rows that are also in `others`."""
    parts, interval, which = at_edges(joined(others, table))
    mine = which >= len(others.start)
    return parts.take(mine & ~np.isin(interval, interval[~mine]))


def layers(table: Pieces) -> list[Pieces]:
    """The pieces of one block as lists of distinct rows: in the n-th, every row that comes n times."""
    parts, interval, _ = at_edges(table)
    _, many = np.unique(interval, return_counts=True)
    nth = np.empty_like(interval)
    nth[np.argsort(interval, kind="stable")] = counted(many)
    return [parts.take(nth == n) for n in range(int(many.max(initial=0)))]


def filled(table: Pieces, lengths: Sequence[int]) -> tuple[Runs, ...]:
    """The pieces as the runs of every block, of so many rows; FILL elsewhere."""
    if (
        any(lengths) and runs.MOST_RUNS < len(table.local) >= sum(lengths) // 128
    ):  # many short pieces: arrays
        edges = np.cumsum([0, *lengths])
        numbers = np.full(edges[-1], FILL)
        numbers[counted(table.length, table.local + edges[table.block])] = counted(
            table.length, table.start
        )
        return tuple(as_runs(numbers[a:b]) for a, b in itertools.pairwise(edges))
    blocks: list[list[Run]] = [[] for _ in lengths]
    filled_to = [0] * len(lengths)
    for block, local, start, length in _merged(table):
        if local > filled_to[block]:
            blocks[block].append(Run(FILL, local - filled_to[block]))
        blocks[block].append(Run(start, length))
        filled_to[block] = local + length
    for rows, end, n in zip(blocks, filled_to, lengths, strict=True):
        if n > end:
            rows.append(Run(FILL, n - end))
    return tuple(map(tuple, blocks))


def ascending(table: Pieces, n: int) -> tuple[Runs, ...]:
    """The pieces as the runs of `n` blocks, in the order of rows, which are distinct."""
    table = table.take(np.lexsort((table.start, table.block)))
    rows = np.zeros(n, np.int64)
    np.add.at(rows, table.block, table.length)  # exact, as bincount's floats are not
    local = np.cumsum(table.length) - table.length - (np.cumsum(rows) - rows)[table.block]
    return filled(table._replace(local=local), rows.tolist())


def distinct(blocks: Sequence[Runs]) -> tuple[Runs, ...]:
    """The rows of every block, each once, in their order; without FILL."""
    if any(isinstance(runs, Rows) for runs in blocks):
        return tuple(as_runs(unique_rows(rows[rows != FILL])) for rows in map(row_numbers, blocks))
    return ascending(firsts(pieces(blocks), alone=True), len(blocks))


def _merged(table: Pieces) -> Iterable[list[int]]:
    """Pieces by block and position, merged where both the positions and the rows go on."""
    table = table.take(np.lexsort((table.local, table.block)))
    block, local, start, length = table
    goes_on = (
        (np.diff(block) == 0) & (np.diff(local) == length[:-1]) & (np.diff(start) == length[:-1])
    )
    heads = (
        np.flatnonzero(np.concatenate([[True], ~goes_on])) if len(local) else np.zeros(0, np.int64)
    )
    table = table.take(heads)._replace(
        length=np.add.reduceat(length, heads) if len(local) else length
    )
    return np.stack(table, axis=1).tolist()  # type: ignore[no-any-return]


def shared_rows(src: Sequence[Runs], dst: Sequence[Runs]) -> tuple[Numbers, Numbers, Numbers]:
    """Blocks with rows in common: which of `dst`, of `src`, and how many rows, as often as both have them."""
    if any(isinstance(each, Rows) for each in (*src, *dst)):
        shared = _shared_by_table(list(map(row_numbers, src)), list(map(row_numbers, dst)))
        if shared is not None:
            return shared
    tables = runs.run_table(src), runs.run_table(dst)
    if sum(int(table[:, 4].sum()) for table in tables) <= MOST_COUNTED:
        a, b = map(expanded, tables)
        times: Any = np.ones(len(b.start), np.int64)
    else:  # a period of long cyclic cuts
        (a, _), (b, times) = _one_period(*tables)
    parts, interval, which = at_edges(joined(a, b))
    mine = which < len(a.start)
    there = np.flatnonzero(mine)[np.argsort(interval[mine], kind="stable")]
    here = np.flatnonzero(~mine)
    asked = interval[~mine]
    first = np.searchsorted(interval[there], asked, side="left")
    many = np.searchsorted(interval[there], asked, side="right") - first
    runs.check_pieces(int(many.sum()))
    of_a = there[counted(many, first)]
    of_b = np.repeat(here, many)
    pairs, same = np.unique(parts.block[of_b] * len(src) + parts.block[of_a], return_inverse=True)
    rows = np.zeros(len(pairs), np.int64)
    np.add.at(rows, same.reshape(-1), parts.length[of_b] * times[which[of_b] - len(a.start)])
    return pairs // max(len(src), 1), pairs % max(len(src), 1), rows


def _shared_by_table(
    src: list[Numbers], dst: list[Numbers]
) -> tuple[Numbers, Numbers, Numbers] | None:
    """`shared_rows`, if one side has each row in one block, once; else None."""
    length = max(rows.max(initial=FILL) for rows in (*src, *dst)) + 1
    for once, other in ((src, dst), (dst, src)):
        block_of = np.full(length + 1, -1)  # the last one for FILL
        for block, rows in enumerate(once):
            block_of[rows] = block
        block_of[FILL] = -1
        if np.count_nonzero(block_of >= 0) < sum(np.count_nonzero(rows != FILL) for rows in once):
            continue
        counts = np.array(
            [np.bincount(block_of[rows] + 1, minlength=len(once) + 1)[1:] for rows in other]
        )
        counts = counts if once is src else counts.T
        takers, givers = np.nonzero(counts)
        return takers, givers, counts[takers, givers]
    return None


def _one_period(*tables: Numbers) -> list[tuple[Pieces, Numbers]]:
    """The pieces in one period of each stretch of rows in which all runs repeat, and how often it comes."""
    tables = tuple(map(_ascending_runs, tables))
    _, _, start, _, repeats, stride = np.concatenate(tables).T
    period = min(math.lcm(*np.unique(stride[repeats > 1]).tolist()), 2**62)  # longer than any dim
    edges = np.unique(np.concatenate([start, *map(_ends, tables)]))
    lo = edges[:-1]
    hi = edges[1:]
    times = np.maximum((hi - lo) // period, 1)
    # The period, and the rows after the last whole one.
    starts = np.stack([lo, lo + times * period])
    stops = np.stack([np.minimum(lo + period, hi), hi])
    kept = np.flatnonzero((stops > starts).T)
    starts, stops, often = (
        x.T.reshape(-1)[kept] for x in (starts, stops, np.stack([times, times * 0 + 1]))
    )
    windows = Pieces(kept, kept, starts, stops - starts)
    return [_inside(table, windows, often) for table in tables]


def _inside(table: Numbers, windows: Pieces, often: Numbers) -> tuple[Pieces, Numbers]:
    """The pieces of runs inside windows, and how often each window counts."""
    block, local, start, length, repeats, stride = table.T
    window, run, lo, hi = runs.met(windows, Pieces(block, local, start, _ends(table) - start))
    step = np.maximum(stride, 1)[run]
    first = np.clip((lo - start[run] - length[run]) // step + 1, 0, repeats[run])
    many = np.clip(-((start[run] - hi) // step), first, repeats[run]) - first
    runs.check_pieces(int(many.sum()))
    pair = np.repeat(np.arange(len(many)), many)
    i = counted(many, first)
    of = run[pair]
    begin = start[run[pair]] + i * step[pair]
    end = np.minimum(begin + length[of], hi[pair])
    begin = np.maximum(begin, lo[pair])
    return Pieces(block[of], local[of], begin, end - begin), often[window[pair]]


def _ends(table: Numbers) -> Numbers:
    """The row after each run, or after its last period."""
    _, _, start, length, repeats, stride = table.T
    stops: Numbers = start + np.where(repeats > 1, stride * repeats, length)
    return stops


def _ascending_runs(table: Numbers) -> Numbers:
    """Runs that go down or stay where they are, as runs of one interval."""
    odd = (table[:, 4] > 1) & (table[:, 5] < table[:, 3])
    intervals = expanded(table[odd])
    ones = np.ones_like(intervals.local)
    return np.concatenate([table[~odd], np.stack([*intervals, ones, 0 * ones], axis=1)])
