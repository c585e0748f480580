"""Runs: lists of rows of one dim, and interval algebra on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.errors import ShapeError

FILL = -1  # start of a run of rows outside the array, which the boundary rule fills


class Run(NamedTuple):
    """`length` consecutive rows, `repeats` times, `stride` apart; a start of FILL is outside the array."""

    start: int
    length: int
    repeats: int = 1
    stride: int = 0


Runs = tuple[Run, ...]
AllRuns = tuple[Runs, ...]  # of every block
Numbers = NDArray[np.int64]
Intervals = NDArray[np.int64]  # (n, 2): start, stop

# Pieces of a block that arrays hold, and those that are listed one by one: each takes a second or so.
MOST_PIECES = 2**24
MOST_LISTED = 2**20
MOST_RUNS = 64  # of a list of rows: more are an array


class Segment(NamedTuple):
    """Rows [src, src+length) of one block are rows [dst, dst+length) of another."""

    src: int
    dst: int
    length: int


class Rows:
    """Many short runs as an array of row numbers: read like a tuple of runs, and equal by content."""

    def __init__(self, rows: Numbers) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Run]:
        return map(Run, *(column.tolist() for column in run_columns(self.rows)))

    def __len__(self) -> int:
        return len(run_columns(self.rows)[0])

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.rows.tobytes())


def n_rows(runs: Iterable[Run]) -> int:
    """Number of rows in the runs."""
    if isinstance(runs, Rows):
        return len(runs.rows)
    return sum(run.length * run.repeats for run in runs)


def as_index(runs: Runs) -> slice | NDArray[np.int64]:
    """Runs of local positions -> numpy index: a slice if they are evenly spaced, else an array."""
    if isinstance(runs, Rows):
        return runs.rows
    if not runs:
        return slice(0, 0)
    if len(runs) == 1 and (runs[0].repeats == 1 or (runs[0].length == 1 and runs[0].stride > 0)):
        run = runs[0]
        step = run.stride if run.repeats > 1 else 1
        return slice(run.start, run.start + step * (max(run.repeats, run.length) - 1) + 1, step)
    return np.concatenate([np.arange(a, b) for a, b in as_intervals(runs)])


def as_intervals(runs: Iterable[Run]) -> Intervals:
    """Runs -> array of intervals (start, stop), in local order; without FILL."""
    intervals = pieces((runs,))
    return np.stack([intervals.start, intervals.start + intervals.length], axis=1)


class Pieces(NamedTuple):
    """Intervals of rows of several blocks: each one's block, local position, first row, number of rows."""

    block: Numbers
    local: Numbers
    start: Numbers
    length: Numbers

    def take(self, which: NDArray[Any]) -> Pieces:
        """Some of them: by their numbers, or by an array of bools."""
        return Pieces(*(column[which] for column in self))


def pieces(blocks: Iterable[Iterable[Run]]) -> Pieces:
    """The intervals of all blocks, in local order; without FILL. Raises ShapeError for too many."""
    return expanded(run_table(blocks))


def run_table(blocks: Iterable[Iterable[Run]]) -> Numbers:
    """Every run of all blocks as (block, local position, start, length, repeats, stride); without FILL."""
    table: list[tuple[int, ...]] = []
    arrays = list[Numbers]()
    for block, runs in enumerate(blocks):
        local = 0
        if isinstance(runs, Rows):
            start, length = run_columns(runs.rows)
            ones = np.ones_like(start)
            local_rows = np.cumsum(length) - length
            columns = ones * block, local_rows, start, length, ones, ones * 0
            arrays.append(np.stack(columns, axis=1)[start != FILL])
            continue
        for run in runs:
            if run.start != FILL and run.length > 0:
                table.append((block, local, *run))
            local += run.length * run.repeats
    listed = np.array(table, np.int64).reshape(-1, 6)
    return np.concatenate([listed, *arrays]) if arrays else listed


def expanded(table: Numbers) -> Pieces:
    """The intervals of a `run_table`. Raises ShapeError for too many."""
    block, local, start, length, repeats, stride = table.T
    check_pieces(int(repeats.sum()))
    which = np.repeat(np.arange(len(table)), repeats)
    i = counted(repeats)
    position = local[which] + length[which] * i
    first = start[which] + stride[which] * i
    return Pieces(block[which], position, first, length[which])


def counted(many: Numbers, first: Numbers | int = 0) -> Numbers:
    """Numbers of items -> `first`, `first` + 1, ... for each, one after the other."""
    return np.arange(int(many.sum())) - np.repeat(np.cumsum(many) - many - first, many)


def check_pieces(n: int, most: int = MOST_PIECES) -> None:
    """Raise ShapeError for a block of more than `most` pieces."""
    if n > most:
        hint = f"at most {most}: deal out more rows together, as in cyclic(x,1024)"
        raise ShapeError(f"rows in {n} separate pieces", hint=hint)


def met(a: Pieces, b: Pieces) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Rows of sorted, distinct `a` that `b` has, in its order: which of `a`, of `b`, first row, stop."""
    first = np.searchsorted(a.start + a.length, b.start, side="right")
    many = np.maximum(np.searchsorted(a.start, b.start + b.length, side="left") - first, 0)
    check_pieces(int(many.sum()))
    in_b = np.repeat(np.arange(len(many)), many)
    in_a = counted(many, first)
    stop = np.minimum((a.start + a.length)[in_a], (b.start + b.length)[in_b])
    return in_a, in_b, np.maximum(a.start[in_a], b.start[in_b]), stop


def row_numbers(runs: Iterable[Run]) -> NDArray[np.int64]:
    """Runs -> array of row numbers; FILL for rows outside the array."""
    if isinstance(runs, Rows):
        return runs.rows
    parts = [
        np.full(length * repeats, FILL)
        if start == FILL
        else (start + stride * np.arange(repeats)[:, None] + np.arange(length)).reshape(-1)
        for start, length, repeats, stride in runs  # few: many are `Rows`
    ]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def extents(blocks: Sequence[Iterable[Run]]) -> Intervals:
    """For every block, the smallest [start, stop) that contains all its rows; an empty one if it has none."""
    outer = (_ends(runs.rows) if isinstance(runs, Rows) else runs for runs in blocks)
    block, _, start, length, repeats, stride = run_table(outer).T
    last = start + stride * (repeats - 1)
    ranges = np.tile(np.array([2**62, 0]), (len(blocks), 1))
    np.minimum.at(ranges[:, 0], block, np.minimum(start, last))
    np.maximum.at(ranges[:, 1], block, np.maximum(start, last) + length)
    return ranges


def _ends(rows: Numbers) -> Runs:
    """All rows from the first to the last as one run."""
    return interval(
        int(rows.min(where=rows != FILL, initial=2**62)), int(rows.max(initial=FILL)) + 1
    )


@lru_cache(maxsize=65536)
def common_segments(src: Runs, dst: Runs) -> tuple[Segment, ...]:
    """The rows that `src` and `dst` share, in the order of `dst`, which may repeat rows; merged."""
    if len(src) == len(dst) == 1 and src[0].repeats == dst[0].repeats == 1:
        start = max(src[0].start, dst[0].start)
        stop = min(src[0].start + src[0].length, dst[0].start + dst[0].length)
        if start >= stop or src[0].start == FILL or dst[0].start == FILL:
            return ()
        return (Segment(start - src[0].start, start - dst[0].start, stop - start),)
    if isinstance(src, Rows) or isinstance(dst, Rows):
        return matched_rows(row_numbers(src), row_numbers(dst))
    if len(src) * len(dst) <= 8 and all(
        run.repeats == 1 and run.start != FILL for run in (*src, *dst)
    ):
        shared = list[tuple[int, int, int]]()
        done = 0  # quicker than arrays
        places = itertools.accumulate((run.length for run in src), initial=0)
        ordered = sorted(
            (run.start, place, run.length) for run, place in zip(src, places, strict=False)
        )
        for run in dst:
            for begin, place, length in ordered:
                start = max(begin, run.start)
                stop = min(begin + length, run.start + run.length)
                if start < stop:
                    shared.append((place + start - begin, done + start - run.start, stop - start))
            done += run.length
        return merged_segments(np.array(shared, np.int64))
    a = pieces((src,))
    b = pieces((dst,))
    a = a.take(np.argsort(a.start, kind="stable"))
    in_a, in_b, first, last = met(a, b)
    here, there = (
        (side.local - side.start)[which] + first for side, which in ((a, in_a), (b, in_b))
    )
    return merged_segments(np.stack([here, there, last - first], axis=1))


def matched_rows(src: Numbers, dst: Numbers) -> tuple[Segment, ...]:
    """`common_segments` of row numbers, `src` distinct."""
    place = np.full(max(src.max(initial=-1), dst.max(initial=-1)) + 2, -1)  # the last one for FILL
    place[src] = np.arange(len(src))
    place[FILL] = -1
    held = np.flatnonzero(place[dst] >= 0)
    return merged_segments(np.stack([place[dst[held]], held, np.ones_like(held)], axis=1))


def merged_segments(rows: NDArray[np.int64]) -> tuple[Segment, ...]:
    """Rows (src, dst, length) of an array -> segments, merged where adjacent."""
    if len(rows) == 0:
        return ()
    stops = rows[:-1, :2] + rows[:-1, 2:]
    heads = np.flatnonzero(np.concatenate([[True], (stops != rows[1:, :2]).any(axis=1)]))
    columns = rows[heads, 0], rows[heads, 1], np.add.reduceat(rows[:, 2], heads)
    return tuple(Segment(*row) for row in np.stack(columns, axis=1).tolist())


def interval(start: int, stop: int) -> Runs:
    """[start, stop) as runs; none if it is empty."""
    return (Run(start, stop - start),) if stop > start else ()


def interval_pairs(part: object) -> list[tuple[int, int]]:
    """(start, stop, start, stop, ...) -> pairs (start, stop)."""
    bounds = part if isinstance(part, tuple) else ()
    return list(zip(bounds[::2], bounds[1::2], strict=False))


def run_columns(rows: Numbers) -> tuple[Numbers, Numbers]:
    """Row numbers and FILL in any order -> the starts and lengths of runs, merged where one goes on."""
    if not len(rows):
        return rows, rows
    goes_on = np.where(rows[:-1] == FILL, rows[1:] == FILL, rows[1:] == rows[:-1] + 1)
    heads = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    return rows[heads], np.diff(np.append(heads, len(rows)))


def as_runs(rows: Numbers) -> Runs:
    """Row numbers in any order -> runs, as an array if they are many."""
    start, length = run_columns(rows)
    if len(start) > MOST_RUNS:
        return Rows(rows)  # type: ignore[return-value]  # which is read like a tuple
    return tuple(map(Run, start.tolist(), length.tolist()))


def merge_adjacent(runs: Iterable[Run]) -> Runs:
    """Merge plain runs that follow one another; repeated runs and fill stay as they are."""
    return tuple(_merged(runs))


def _merged(runs: Iterable[Run]) -> Iterator[Run]:
    last: Run | None = None
    for run in runs:
        if last is None:
            last = run
        elif last.repeats == run.repeats == 1 and FILL != last.start == run.start - last.length:
            last = Run(last.start, last.length + run.length)
        else:
            yield last
            last = run
    if last is not None:
        yield last


def are_equal(a: Runs, b: Runs) -> bool:
    """Whether both are the same rows in the same order, however they are written."""
    if a == b or n_rows(a) != n_rows(b):
        return a == b
    return all(
        x == y for x, y in itertools.zip_longest(*(_merged(unrolled(runs)) for runs in (a, b)))
    )


def unrolled(runs: Runs) -> Iterable[Run]:
    """The same rows as runs without repeats, one after the other."""
    for run in runs:
        for i in range(run.repeats):
            yield Run(run.start + i * run.stride, run.length)


def select(runs: Runs, part: Run) -> Runs:
    """The rows of `runs` at the local positions of one part of a shard."""
    if part.repeats == 1:
        return _slice(runs, part.start, part.start + part.length)
    if len(runs) == 1 and runs[0].repeats == 1:
        return (part._replace(start=runs[0].start + part.start),)
    whole = runs[0] if len(runs) == 1 else Run(0, 1)
    chunk, first = divmod(part.start, whole.length)
    if len(runs) == 1 and not part.stride % whole.length and first + part.length <= whole.length:
        start = whole.start + chunk * whole.stride + first
        step = part.stride // whole.length * whole.stride
        return (part._replace(start=start, stride=step),)
    check_pieces(part.repeats, MOST_LISTED)
    parts = (_slice(runs, p.start, p.start + p.length) for p in unrolled((part,)))
    return tuple(itertools.chain.from_iterable(parts))


def _slice(runs: Runs, start: int, stop: int) -> Runs:
    """The rows of `runs` at local positions [start, stop)."""
    taken: list[Run] = []
    offset = 0
    for run in runs:
        lo = max(start - offset, 0)
        hi = min(stop - offset, run.length * run.repeats)
        offset += run.length * run.repeats
        if lo >= hi:
            continue
        first, head = divmod(lo, run.length)
        last, tail = divmod(hi, run.length)
        if head:  # a part of the first block
            end = run.length if last > first else tail
            taken.append(Run(run.start + first * run.stride + head, end - head))
            first += 1
        if last > first:
            many = last - first
            taken.append(
                Run(run.start + first * run.stride, run.length, many, run.stride if many > 1 else 0)
            )
        if tail and last >= first:
            taken.append(Run(run.start + last * run.stride, tail))
    return tuple(taken)
