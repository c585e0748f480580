"""The rows that each device owns: how a dim is sharded, in every order, without overlaps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from xshard.layout.mesh import row_major
from xshard.layout.runs import (
    Rows,
    Run,
    Runs,
    as_runs,
    interval,
    interval_pairs,
    n_rows,
    row_numbers,
    select,
)
from xshard.notation.maps import NamedMap, Numbers, Owners
from xshard.notation.parser import BY, INTERVALS, SEGMENTS, SIZES, Dim, Shard

Sizes = tuple[int, ...]
Ints = Sequence[int]  # a size, or a coordinate, per axis
R = TypeVar("R")


def cut(length: int, shard: Shard, n: int, index: int) -> Runs:
    """Positions of `range(length)` in part `index` of `n`, in local order."""
    order = shard.order
    numbers = shard.numbers
    if n == 1:  # one part is one interval in every order, so that an overlap widens it only once
        return interval(0, length)
    if order == SIZES:
        stops = [0, *itertools.accumulate(n for n in numbers if isinstance(n, int))]
        return interval(stops[index], stops[index + 1])
    if order == INTERVALS:
        return tuple(itertools.chain(*(interval(a, b) for a, b in interval_pairs(numbers[index]))))
    if order == BY:
        return as_runs(map_of(shard).part(index))
    if order == "balanced":
        each, longer = divmod(length, n)
        start = index * each + min(index, longer)
        return interval(start, start + each + (index < longer))
    if order in ("zigzag", SEGMENTS):
        pieces = [d for d in numbers if isinstance(d, int)] or [length]
        return tuple(
            run._replace(start=start + run.start)
            for start, piece in zip(itertools.accumulate(pieces, initial=0), pieces, strict=False)
            for run in (_zigzag if order == "zigzag" else _chunk)(piece, n, index)
        )
    if order == "cyclic":
        return _cyclic(length, int(numbers[0]) if numbers else 1, n, index)  # type: ignore[arg-type]
    return _chunk(length, n, index)


def cut_nested(length: int, shards: Sequence[Shard], sizes: Ints, coords: Ints) -> Runs:
    """Positions of `range(length)` that one device keeps after all shards; a size and a coord per axis."""
    runs = interval(0, length)
    first = 0
    for shard in shards:
        own = slice(first, first + len(shard.axes))
        n = math.prod(sizes[own])
        index = row_major(sizes[own], coords[own])
        first = own.stop
        runs = _inner(length, runs, cut(n_rows(runs), shard, n, index))
    return runs


def _inner(length: int, runs: Runs, parts: Runs) -> Runs:
    """The rows at some positions of a block of `range(length)`."""
    if runs == interval(0, length):
        return parts
    if isinstance(runs, Rows) or isinstance(parts, Rows):
        numbers = row_numbers(runs)
        part_rows = row_numbers(parts)
        return as_runs(numbers[part_rows[part_rows < len(numbers)]])  # `misfit` reports rows beyond
    return tuple(itertools.chain.from_iterable(select(runs, part) for part in parts))


def rows_in_numbers(shard: Shard) -> int | None:
    """The number of rows that sizes, intervals or documents add up to; None without such numbers."""
    if not shard.numbers or shard.order == "cyclic":
        return None
    if shard.order == BY:
        return len(map_of(shard).rows)
    return sum(
        n if isinstance(n, int) else sum(b - a for a, b in interval_pairs(n)) for n in shard.numbers
    )


def map_of(shard: Shard) -> Owners:
    """The map of a `by`."""
    assert isinstance(shard.numbers[0], NamedMap)
    owners: Owners = shard.numbers[0].map
    return owners


def _parts(dim: Dim, sizes: Ints) -> Iterator[tuple[Shard, int]]:
    """Every shard of a dim with the number of its parts; sizes: per axis of `dim.axes`."""
    left = iter(sizes)
    return ((shard, math.prod(itertools.islice(left, len(shard.axes)))) for shard in dim.shards)


def misfit(dim: Dim, length: int, sizes: Ints) -> tuple[Shard, str] | None:
    """The first shard with numbers that do not fit its rows, with the reason; None if all fit."""
    for i, (shard, n) in enumerate(_parts(dim, sizes)):
        outer = Dim(dim.name, dim.shards[:i])
        if not shard.numbers or shard.order == "cyclic":
            continue
        if shard.order in (SIZES, INTERVALS) and len(shard.numbers) != n:
            return shard, f"{len(shard.numbers)} {shard.order} for {n} parts"
        if shard.order == BY and map_of(shard).parts != n:
            return shard, f"'{shard.numbers[0]}' has {map_of(shard).parts} parts, the mesh has {n}"
        for rows in block_lengths(outer, length, tuple(sizes[: len(outer.axes)])):
            if shard.order == INTERVALS:
                pairs = [p for part in shard.numbers for p in interval_pairs(part)]
                covered = sorted(pairs)
                bounds = [0, *(b for _, b in covered)]
                if [*(a for a, _ in covered), rows] != bounds or any(a > b for a, b in covered):
                    return shard, f"'{shard}' does not hold each of the {rows} rows once"
                if n == 1 and pairs != covered:
                    return shard, f"'{shard}' has one part, which must hold its rows in order"
            elif shard.order == BY and n == 1 and (np.diff(map_of(shard).rows) != 1).any():
                return shard, f"'{shard}' has one part, which must hold its rows in order"
            elif (total := rows_in_numbers(shard)) != rows:
                return shard, f"'{shard}' adds up to {total} rows, not {rows}"
    return None


def rotated(axes: tuple[str, ...], n: int, rows: int, by: int = 1) -> Shard:
    """How `n * rows` rows are sharded after every part has sent its rows to the part `by` further on."""
    starts = ((part - by) % n * rows for part in range(n))
    return Shard(axes, INTERVALS, tuple((start, start + rows) for start in starts))


def owned_rows(dim: Dim, length: int, sizes: Ints, coords: Ints) -> Runs:
    """Global rows that the device at `coords` owns, in local order; sizes, coords: per axis of `dim.axes`."""
    return cut_nested(length, dim.shards, sizes, coords)


def everywhere(
    rows: Callable[[Dim, int, Sizes, Sizes], R],
) -> Callable[[Dim, int, Sizes], tuple[R, ...]]:
    """A function of one device's rows -> for every index along the dim's axes, row-major, cached."""

    @lru_cache(maxsize=4096)
    def all_rows(dim: Dim, length: int, sizes: Sizes) -> tuple[R, ...]:
        return tuple(rows(dim, length, sizes, c) for c in itertools.product(*map(range, sizes)))

    return all_rows


@lru_cache(maxsize=4096)
def all_owned_rows(dim: Dim, length: int, sizes: Sizes) -> tuple[Runs, ...]:
    """`owned_rows` for every index along the dim's axes, row-major."""
    if not dim.shards:
        return (interval(0, length),)
    *outer, shard = dim.shards
    outer_sizes = sizes[: -len(shard.axes)]
    inner_sizes = sizes[-len(shard.axes) :]
    blocks = all_owned_rows(Dim("", tuple(outer)), length, outer_sizes)
    n = math.prod(inner_sizes)
    parts = {rows: [cut(rows, shard, n, i) for i in range(n)] for rows in {*map(n_rows, blocks)}}
    return tuple(_inner(length, runs, part) for runs in blocks for part in parts[n_rows(runs)])


@lru_cache(maxsize=4096)
def owner_of_rows(dim: Dim, length: int, sizes: Sizes) -> Numbers:
    """The number of the block that owns each row of a dim."""
    blocks = [np.arange(length)]
    for shard, n in _parts(dim, sizes):
        blocks = [
            rows[row_numbers(cut(len(rows), shard, n, i))] for rows in blocks for i in range(n)
        ]
    owners = np.zeros(length, np.int64)
    for block, rows in enumerate(blocks):
        owners[rows] = block
    return owners


@lru_cache(maxsize=65536)
def block_length(dim: Dim, length: int, sizes: tuple[int, ...]) -> tuple[int, bool]:
    """The most rows that any device owns, and whether all own equally many; lists devices only if needed."""
    left = length
    even = True
    for shard, n in _parts(dim, sizes):
        if shard.numbers or (shard.order == "zigzag" and left % (2 * n)):
            lengths = block_lengths(dim, length, sizes)
            return max(lengths), len(lengths) == 1
        left, even = -(-left // n), even and left % n == 0
    return left, even


@lru_cache(maxsize=4096)
def block_lengths(dim: Dim, length: int, sizes: Sizes) -> frozenset[int]:
    """How many rows devices own; a block's parts depend on its length alone, so no rows are listed."""
    lengths = {length}
    for shard, n in _parts(dim, sizes):
        lengths = {n_rows(cut(rows, shard, n, i)) for rows in lengths for i in range(n)}
    return frozenset(lengths)


def _zigzag(length: int, n: int, index: int) -> Runs:
    """Chunks `index` and `2n - 1 - index` of the 2n chunks of a document."""
    return _chunk(length, 2 * n, index) + _chunk(length, 2 * n, 2 * n - 1 - index)


def _cyclic(length: int, rows: int, n: int, index: int) -> Runs:
    """Every n-th group of `rows` rows, from group `index`; the last group may be shorter."""
    whole = len(range(index * rows, length - rows + 1, n * rows))
    rest = index * rows + whole * n * rows
    tail = interval(rest, min(length, rest + rows))
    if whole < 2:
        return (*interval(index * rows, index * rows + whole * rows), *tail)
    return (Run(index * rows, rows, whole, n * rows), *tail)


def _chunk(length: int, n: int, index: int) -> Runs:
    """Part `index` of `n` contiguous ones, as torch.chunk makes them."""
    chunk = -(-length // n)
    return interval(min(index * chunk, length), min((index + 1) * chunk, length))
