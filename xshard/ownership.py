"""Which global rows each device holds: interval algebra on one dim.

Decides how a cut divides a length (torch.chunk's ceil rule, zigzag, cyclic, balanced, given
sizes) and how cuts nest. Everything else (what an overlap adds, local shapes, what must move,
bounds, pictures) is computed from the runs made here. Knows no tags and no whole layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.notation import INTERVALS, SIZES, Dim, Shard
from xshard.overlap import Width

FILL = -1  # start of a run of rows that lie outside the array and are filled by the boundary rule


class Run(NamedTuple):
    """`length` consecutive rows, `repeats` times, with starts `stride` apart.

    A plain interval has repeats 1, a mirrored boundary stride -1, a repeated edge row stride 0. A
    cyclic shard is one run, however long the dim is. A start of FILL marks rows outside the array.
    """

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


def size(runs: Iterable[Run]) -> int:
    """Number of rows in the runs."""
    return sum(run.length * run.repeats for run in runs)


def cut(length: int, shard: Shard, n: int, index: int) -> Runs:
    """Positions of `range(length)` that part `index` of `n` holds, in its order.

    >>> cut(8, Shard(("cp",), "zigzag"), 2, 0)
    (Run(start=0, length=2, repeats=1, stride=0), Run(start=6, length=2, repeats=1, stride=0))
    """
    order, numbers = shard.order, shard.numbers
    if n == 1:  # one part is the whole in every order, and one interval: an overlap widens it once
        return _interval(0, length)
    if order == SIZES:
        ends = [0, *itertools.accumulate(n for n in numbers if isinstance(n, int))]
        return _interval(ends[index], ends[index + 1])
    if order == INTERVALS:
        return tuple(itertools.chain(*(_interval(a, b) for a, b in _pairs(numbers[index]))))
    if order == "balanced":
        each, longer = divmod(length, n)
        start = index * each + min(index, longer)
        return _interval(start, start + each + (index < longer))
    if order == "zigzag":
        documents = [d for d in numbers if isinstance(d, int)] or [length]
        starts = itertools.accumulate(documents, initial=0)
        return tuple(
            itertools.chain(*(_zigzag(s, d, n, index) for s, d in zip(starts, documents, strict=False)))
        )
    if order == "cyclic":
        return _cyclic(length, int(numbers[0]) if numbers else 1, n, index)  # type: ignore[arg-type]
    return _chunk(length, -(-length // n), index)


def cut_nested(length: int, shards: Sequence[Shard], sizes: Sequence[int], coords: Sequence[int]) -> Runs:
    """Positions of `range(length)` that remain after every cut in turn.

    sizes, coords: one number per axis, in the order the shards name them.
    """
    runs = _interval(0, length)
    at = 0
    for shard in shards:
        n, index = 1, 0
        for size_, coord in zip(sizes[at : at + len(shard.axes)], coords[at:], strict=False):
            n, index = n * size_, index * size_ + coord
        at += len(shard.axes)
        parts = cut(size(runs), shard, n, index)
        runs = tuple(itertools.chain.from_iterable(_select(runs, part) for part in parts))
    return runs


def misfit(dim: Dim, length: int, sizes: Sequence[int]) -> tuple[Shard, str] | None:
    """The first cut whose numbers do not fit what it cuts, and why."""
    at = 0
    for i, shard in enumerate(dim.shards):
        outer = Dim(dim.name, dim.shards[:i])
        n, at = math.prod(sizes[at : at + len(shard.axes)]), at + len(shard.axes)
        if not shard.numbers or shard.order == "cyclic":
            continue
        if shard.order != "zigzag" and len(shard.numbers) != n:
            return shard, f"{len(shard.numbers)} {shard.order} for {n} parts"
        for rows in {size(runs) for runs in owners(outer, length, tuple(sizes[: len(outer.axes)]))}:
            if shard.order == INTERVALS:
                found = [p for part in shard.numbers for p in _pairs(part)]
                covered = sorted(found)
                ends = [0, *(b for _, b in covered)]
                if [a for a, _ in covered] != ends[:-1] or ends[-1] != rows or any(a > b for a, b in covered):
                    return shard, f"'{shard}' does not hold each of {rows} rows once"
                if n == 1 and found != covered:
                    return shard, f"'{shard}': one part holds its rows in order"
            elif (total := sum(k for k in shard.numbers if isinstance(k, int))) != rows:
                return shard, f"'{shard}' adds up to {total} rows, not {rows}"
    return None


def owned(dim: Dim, length: int, sizes: Sequence[int], coords: Sequence[int]) -> Runs:
    """Global rows of a dim of `length` that the device at `coords` owns, in its local order.

    sizes, coords: one number per axis of `dim.axes`.
    """
    return cut_nested(length, dim.shards, sizes, coords)


@lru_cache(maxsize=65536)
def block_length(dim: Dim, length: int, sizes: tuple[int, ...]) -> tuple[int, bool]:
    """The most rows that one device owns, and whether all own as many; without looking at devices
    where every cut divides.

    >>> block_length(Dim("n", (Shard(("a",)), Shard(("b",), "zigzag"))), 24, (3, 2))
    (4, True)
    """
    left, at = length, 0
    even: bool | None = True  # None where the blocks have to be looked at
    for shard in dim.shards:
        n = math.prod(sizes[at : at + len(shard.axes)])
        at += len(shard.axes)
        if shard.numbers or (shard.order == "zigzag" and left % (2 * n)):
            even = None
            break
        even = even and left % n == 0
        left = -(-left // n)
    if even is not None:
        return left, even
    lengths = set(map(size, owners(dim, length, sizes)))
    return max(lengths), len(lengths) == 1


@lru_cache(maxsize=4096)
def owners(dim: Dim, length: int, sizes: tuple[int, ...]) -> tuple[Runs, ...]:
    """`owned` for every index along the dim's axes, row-major."""
    return tuple(owned(dim, length, sizes, c) for c in itertools.product(*map(range, sizes)))


def rows(runs: Runs) -> slice | NDArray[np.int64]:
    """Runs of local positions as a numpy index: a slice where they are one interval."""
    if not runs:
        return slice(0, 0)
    if len(runs) == 1 and (runs[0].repeats == 1 or (runs[0].length == 1 and runs[0].stride > 0)):
        run = runs[0]
        step = run.stride if run.repeats > 1 else 1
        return slice(run.start, run.start + step * (max(run.repeats, run.length) - 1) + 1, step)
    return np.concatenate([np.arange(a, b) for a, b in intervals(runs)])


def intervals(runs: Iterable[Run]) -> Intervals:
    """Runs -> every interval as a row (start, stop), in local order; FILL rows left out."""
    parts = [
        np.stack([starts, starts + run.length], axis=1)
        for run in runs
        if run.start != FILL and run.length > 0
        for starts in [run.start + run.stride * np.arange(run.repeats, dtype=np.int64)]
    ]
    return np.concatenate(parts) if parts else np.zeros((0, 2), np.int64)


def numbers(runs: Iterable[Run]) -> NDArray[np.int64]:
    """Runs, written out; FILL for rows outside the array."""
    parts = [
        np.full(r.length * r.repeats, FILL)
        if r.start == FILL
        else (r.start + r.stride * np.arange(r.repeats)[:, None] + np.arange(r.length)).ravel()
        for r in runs
    ]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


@lru_cache(maxsize=4096)
def extents(blocks: tuple[Runs, ...]) -> Intervals:
    """For every block, the smallest [start, stop) that all its rows lie in; [0, 0) where it has none."""
    found = np.zeros((len(blocks), 2), np.int64)
    for at, runs in enumerate(blocks):
        ends = [
            (start, start + run.length)
            for run in runs
            if run.start != FILL and run.length and run.repeats
            for start in (run.start, run.start + run.stride * (run.repeats - 1))
        ]
        if ends:
            found[at] = min(a for a, _ in ends), max(b for _, b in ends)
    return found


@lru_cache(maxsize=65536)
def common(src: Runs, dst: Runs) -> tuple[Segment, ...]:
    """Where rows of `dst` stand in `src`: segments in the order of `dst`, merged where adjacent.

    Rows of `src` must be distinct; rows of `dst` may repeat (a wrapped halo).
    """
    if len(src) == len(dst) == 1 and src[0].repeats == dst[0].repeats == 1:
        start = max(src[0].start, dst[0].start)
        stop = min(src[0].start + src[0].length, dst[0].start + dst[0].length)
        if start >= stop or src[0].start == FILL or dst[0].start == FILL:
            return ()
        return (Segment(start - src[0].start, start - dst[0].start, stop - start),)
    a, a_at = intervals(src), _positions(src)
    b, b_at = intervals(dst), _positions(dst)
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
    return _merged(rows[rows[:, 2] > 0])


def _merged(rows: NDArray[np.int64]) -> tuple[Segment, ...]:
    if len(rows) == 0:
        return ()
    ends = rows[:-1, :2] + rows[:-1, 2:]
    joins = np.concatenate([[True], (ends != rows[1:, :2]).any(axis=1)])
    heads = np.flatnonzero(joins)
    lengths = np.add.reduceat(rows[:, 2], heads)
    return tuple(
        Segment(int(s), int(d), int(n))
        for s, d, n in zip(rows[heads, 0], rows[heads, 1], lengths, strict=True)
    )


def _positions(runs: Runs) -> NDArray[np.int64]:
    """Local position of every interval that `intervals(runs)` lists."""
    at, parts = 0, []
    for run in runs:
        if run.start != FILL and run.length > 0:
            parts.append(at + run.length * np.arange(run.repeats, dtype=np.int64))
        at += run.length * run.repeats
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _interval(start: int, stop: int) -> Runs:
    return (Run(start, stop - start),) if stop > start else ()


def _pairs(part: Width) -> list[tuple[int, int]]:
    """(start, stop, start, stop, ...) two by two."""
    ends = part if isinstance(part, tuple) else ()
    return list(zip(ends[::2], ends[1::2], strict=False))


def _zigzag(start: int, length: int, n: int, index: int) -> Runs:
    """Chunks `index` and `2n - 1 - index` of 2n of a document."""
    chunk = -(-length // (2 * n))
    both = _chunk(length, chunk, index) + _chunk(length, chunk, 2 * n - 1 - index)
    return tuple(run._replace(start=start + run.start) for run in both)


def _cyclic(length: int, rows: int, n: int, index: int) -> Runs:
    """Every n-th stretch of so many rows; the last may be shorter."""
    whole = len(range(index * rows, length - rows + 1, n * rows))
    rest = index * rows + whole * n * rows
    tail = _interval(rest, min(length, rest + rows))
    if whole < 2:
        return (*_interval(index * rows, index * rows + whole * rows), *tail)
    return (Run(index * rows, rows, whole, n * rows), *tail)


def _chunk(length: int, chunk: int, index: int) -> Runs:
    return _interval(min(index * chunk, length), min((index + 1) * chunk, length))


def flat(runs: Runs) -> Iterable[Run]:
    """Runs with every repeat a run of its own."""
    for run in runs:
        for i in range(run.repeats):
            yield Run(run.start + i * run.stride, run.length)


def _select(runs: Runs, part: Run) -> Runs:
    """The rows of `runs` at the local positions of one part of a cut."""
    if part.repeats == 1:
        return _slice(runs, part.start, part.start + part.length)
    if len(runs) == 1 and runs[0].repeats == 1:
        return (part._replace(start=runs[0].start + part.start),)
    if len(runs) == 1 and runs[0].length == part.length == 1:
        step = runs[0].stride
        return (Run(runs[0].start + part.start * step, 1, part.repeats, part.stride * step),)
    return tuple(
        itertools.chain.from_iterable(_slice(runs, p.start, p.start + p.length) for p in flat((part,)))
    )


def _slice(runs: Runs, start: int, stop: int) -> Runs:
    """The rows of `runs` at local positions [start, stop)."""
    taken: list[Run] = []
    at = 0
    for run in runs:
        lo, hi = max(start - at, 0), min(stop - at, run.length * run.repeats)
        at += run.length * run.repeats
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
