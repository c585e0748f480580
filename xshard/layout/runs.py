"""Runs: lists of rows of one dim, and interval algebra on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.notation.overlap import Width

FILL = -1  # start of a run of rows outside the array, which the boundary rule fills


class Run(NamedTuple):
    """`length` consecutive rows, `repeats` times, `stride` apart; a start of FILL is outside the array."""

    start: int
    length: int
    repeats: int = 1
    stride: int = 0


Runs = tuple[Run, ...]
Intervals = NDArray[np.int64]  # (n, 2): start, stop


class Segment(NamedTuple):
    """Rows [src, src+length) of one block are rows [dst, dst+length) of another."""

    src: int
    dst: int
    length: int


def n_rows(runs: Iterable[Run]) -> int:
    """Number of rows in the runs."""
    return sum(run.length * run.repeats for run in runs)


def as_index(runs: Runs) -> slice | NDArray[np.int64]:
    """Runs of local positions -> numpy index: a slice if they are evenly spaced, else an array."""
    if not runs:
        return slice(0, 0)
    if len(runs) == 1 and (runs[0].repeats == 1 or (runs[0].length == 1 and runs[0].stride > 0)):
        run = runs[0]
        step = run.stride if run.repeats > 1 else 1
        return slice(run.start, run.start + step * (max(run.repeats, run.length) - 1) + 1, step)
    return np.concatenate([np.arange(a, b) for a, b in as_intervals(runs)])


def as_intervals(runs: Iterable[Run]) -> Intervals:
    """Runs -> array of intervals (start, stop), in local order; without FILL."""
    parts = [
        np.stack([starts, starts + run.length], axis=1)
        for run in runs
        if run.start != FILL and run.length > 0
        for starts in [run.start + run.stride * np.arange(run.repeats, dtype=np.int64)]
    ]
    return np.concatenate(parts) if parts else np.zeros((0, 2), np.int64)


def row_numbers(runs: Iterable[Run]) -> NDArray[np.int64]:
    """Runs -> array of row numbers; FILL for rows outside the array."""
    parts = [
        np.full(r.length * r.repeats, FILL)
        if r.start == FILL
        else (r.start + r.stride * np.arange(r.repeats)[:, None] + np.arange(r.length)).ravel()
        for r in runs
    ]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


@lru_cache(maxsize=4096)
def extents(blocks: tuple[Runs, ...]) -> Intervals:
    """For every block, the smallest [start, stop) that contains all its rows; [0, 0) if it has none."""
    ranges = np.zeros((len(blocks), 2), np.int64)
    for i, runs in enumerate(blocks):
        spans = [
            (start, start + run.length)
            for run in runs
            if run.start != FILL and run.length and run.repeats
            for start in (run.start, run.start + run.stride * (run.repeats - 1))
        ]
        if spans:
            ranges[i] = min(a for a, _ in spans), max(b for _, b in spans)
    return ranges


@lru_cache(maxsize=65536)
def common_segments(src: Runs, dst: Runs) -> tuple[Segment, ...]:
    """The rows that `src` and `dst` share, in the order of `dst`, which may repeat rows; merged."""
    if len(src) == len(dst) == 1 and src[0].repeats == dst[0].repeats == 1:
        start = max(src[0].start, dst[0].start)
        stop = min(src[0].start + src[0].length, dst[0].start + dst[0].length)
        if start >= stop or src[0].start == FILL or dst[0].start == FILL:
            return ()
        return (Segment(start - src[0].start, start - dst[0].start, stop - start),)
    a, a_at = as_intervals(src), _positions(src)
    b, b_at = as_intervals(dst), _positions(dst)
    by_start = np.argsort(a[:, 0], kind="stable")
    a, a_at = a[by_start], a_at[by_start]
    first = np.searchsorted(a[:, 1], b[:, 0], side="right")
    last = np.searchsorted(a[:, 0], b[:, 1], side="left")
    many = np.maximum(last - first, 0)
    which_b = np.repeat(np.arange(len(b)), many)
    which_a = np.arange(int(many.sum())) - np.repeat(np.cumsum(many) - many - first, many)
    start = np.maximum(a[which_a, 0], b[which_b, 0])
    stop = np.minimum(a[which_a, 1], b[which_b, 1])
    rows = np.stack(
        [a_at[which_a] + start - a[which_a, 0], b_at[which_b] + start - b[which_b, 0], stop - start], axis=1
    )
    return merged_segments(rows[rows[:, 2] > 0])


def merged_segments(rows: NDArray[np.int64]) -> tuple[Segment, ...]:
    """Rows (src, dst, length) of an array -> segments, merged where adjacent."""
    if len(rows) == 0:
        return ()
    stops = rows[:-1, :2] + rows[:-1, 2:]
    joins = np.concatenate([[True], (stops != rows[1:, :2]).any(axis=1)])
    heads = np.flatnonzero(joins)
    lengths = np.add.reduceat(rows[:, 2], heads)
    return tuple(
        Segment(int(s), int(d), int(n))
        for s, d, n in zip(rows[heads, 0], rows[heads, 1], lengths, strict=True)
    )


def _positions(runs: Runs) -> NDArray[np.int64]:
    """Local position of every interval that `as_intervals(runs)` lists."""
    start, parts = 0, []
    for run in runs:
        if run.start != FILL and run.length > 0:
            parts.append(start + run.length * np.arange(run.repeats, dtype=np.int64))
        start += run.length * run.repeats
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def interval(start: int, stop: int) -> Runs:
    """[start, stop) as runs; none if it is empty."""
    return (Run(start, stop - start),) if stop > start else ()


def interval_pairs(part: Width) -> list[tuple[int, int]]:
    """(start, stop, start, stop, ...) -> pairs (start, stop)."""
    bounds = part if isinstance(part, tuple) else ()
    return list(zip(bounds[::2], bounds[1::2], strict=False))


def merge_adjacent(runs: Iterable[Run]) -> Runs:
    """Merge plain runs that follow one another; repeated runs and fill stay as they are."""
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else Run(FILL, 0)
        plain = last.repeats == run.repeats == 1 and FILL not in (last.start, run.start)
        if plain and last.start + last.length == run.start:
            merged[-1] = Run(last.start, last.length + run.length)
        else:
            merged.append(run)
    return tuple(merged)


def unrolled(runs: Runs) -> Iterable[Run]:
    """The same rows as runs without repeats."""
    for run in runs:
        for i in range(run.repeats):
            yield Run(run.start + i * run.stride, run.length)


def select(runs: Runs, part: Run) -> Runs:
    """The rows of `runs` at the local positions of one part of a shard."""
    if part.repeats == 1:
        return _slice(runs, part.start, part.start + part.length)
    if len(runs) == 1 and runs[0].repeats == 1:
        return (part._replace(start=runs[0].start + part.start),)
    if len(runs) == 1 and runs[0].length == part.length == 1:
        step = runs[0].stride
        return (Run(runs[0].start + part.start * step, 1, part.repeats, part.stride * step),)
    return tuple(
        itertools.chain.from_iterable(_slice(runs, p.start, p.start + p.length) for p in unrolled((part,)))
    )


def _slice(runs: Runs, start: int, stop: int) -> Runs:
    """The rows of `runs` at local positions [start, stop)."""
    taken: list[Run] = []
    offset = 0
    for run in runs:
        lo, hi = max(start - offset, 0), min(stop - offset, run.length * run.repeats)
        offset += run.length * run.repeats
        if lo >= hi:
            continue
        if run.repeats == 1:
            taken.append(Run(run.start + lo, hi - lo))
            continue
        first, head = divmod(lo, run.length)
        last, tail = divmod(hi, run.length)
        if head:  # a part of the first block
            end = run.length if last > first else tail
            taken.append(Run(run.start + first * run.stride + head, end - head))
            first += 1
        if last > first:
            many = last - first
            taken.append(Run(run.start + first * run.stride, run.length, many, run.stride if many > 1 else 0))
        if tail and last >= first:
            taken.append(Run(run.start + last * run.stride, tail))
    return tuple(taken)
