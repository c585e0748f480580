"""The rows that a block holds under a halo or window, and where they come from, on one dim."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xshard.errors import ShapeError
from xshard.layout.mesh import row_major
from xshard.layout.partition import (
    Ints,
    Sizes,
    all_owned_rows,
    cut_nested,
    for_every_block,
    misfit,
    owned_rows,
)
from xshard.layout.runs import FILL, Run, Runs, as_runs, n_rows, row_numbers, unrolled
from xshard.notation.overlap import Boundary, Fold, Halo, Reads, Window, unfolded
from xshard.notation.parser import SIZES, Dim, Shard


class RowSpan(NamedTuple):
    """Rows of a block: its `own`, from `near` another device, or `before` or `after` the array."""

    run: Run
    origin: str


def held_rows(dim: Dim, length: int, sizes: Ints, coords: Ints) -> Runs:
    """Global rows of the device's block: the rows that it owns, widened by the dim's overlap."""
    if dim.overlap is None:
        return owned_rows(dim, length, sizes, coords)
    if isinstance(overlap := unfolded(dim.overlap), Reads):
        own = row_numbers(owned_rows(dim, length, sizes, coords))
        return as_runs(np.concatenate([own, overlap.rows.map.part(row_major(sizes, coords))]))
    return tuple(span.run for span in row_spans(dim, length, sizes, coords))


def row_spans(dim: Dim, length: int, sizes: Ints, coords: Ints) -> tuple[RowSpan, ...]:
    """The rows of `held_rows` with their origins, in local order."""
    mine = owned_rows(dim, length, sizes, coords)
    if dim.overlap is None:
        return tuple(RowSpan(run, "own") for run in mine)
    overlap = unfolded(dim.overlap)
    if isinstance(overlap, Reads):
        near = as_runs(overlap.rows.map.part(row_major(sizes, coords)))
        return tuple(
            RowSpan(run, origin) for runs, origin in ((mine, "own"), (near, "near")) for run in runs
        )
    if isinstance(overlap, Halo):
        intervals = _halo_intervals(dim, overlap, length, sizes, coords)
    else:
        before = overlap.padding[0]
        width = overlap.d * (overlap.k - 1) + 1
        intervals = [
            (r.start * overlap.s - before, (r.start + r.length - 1) * overlap.s - before + width)
            for r in unrolled(window_outputs(dim, overlap, length, sizes, coords))
        ]
    own = sorted(unrolled(mine))
    spans = (
        _spans_between(start, stop, own, length, overlap)
        for start, stop in intervals
        if start < stop
    )
    return tuple(itertools.chain.from_iterable(spans))


all_held_rows = for_every_block(held_rows)
all_row_spans = for_every_block(row_spans)


def window_outputs(dim: Dim, window: Window, length: int, sizes: Ints, coords: Ints) -> Runs:
    """The outputs of a window op over `length` rows that the device computes."""
    n = window.output_length(length)
    rule = window.out or ("aligned" if any(s.order == SIZES for s in dim.shards) else "")
    if rule != "aligned":
        shards = (Shard(dim.axes, "balanced"),) if rule == "balanced" else dim.shards
        return cut_nested(n, shards, sizes, coords)
    runs = []
    for run in unrolled(owned_rows(dim, length, sizes, coords)):
        first = -(-run.start // window.s)
        stop = -(-(run.start + run.length) // window.s)
        if run.start + run.length == length:
            stop = n  # the last owner also computes the outputs that start beyond the array
        if first < min(stop, n):
            runs.append(Run(first, min(stop, n) - first))
    return tuple(runs)


def output_dim(dim: Dim, length: int, sizes: Sizes) -> tuple[Dim, int]:
    """A dim under a window -> the sharded dim of its outputs, their number; ShapeError if none fits."""
    window = unfolded(dim.overlap) if dim.overlap is not None else None
    if not isinstance(window, Window):
        raise ShapeError(f"'{dim}' is not a window", hint="as in h/sp:window(k=3,p=1)")
    n = window.output_length(length)
    coords = itertools.product(*map(range, sizes))
    every = [tuple(window_outputs(dim, window, length, sizes, c)) for c in coords]
    lengths = tuple(map(n_rows, every))
    candidates = [dim.shards, (Shard(dim.axes, "balanced"),), (Shard(dim.axes, SIZES, lengths),)]
    for shards in candidates[:1] if not dim.axes else candidates:
        plain = Dim(dim.name, shards)
        if misfit(plain, n, sizes) is None and all_owned_rows(plain, n, sizes) == tuple(every):
            return plain, n
    reason = f"no layout can express how the {n} outputs of '{dim}' are cut"
    raise ShapeError(reason, hint="without out= they are cut like the dim")


def block_fills(
    dim: Dim, length: int, sizes: Sizes, index: int
) -> tuple[tuple[int, int, float], ...]:
    """Local rows outside the array: (start, stop, value that fills them)."""
    if dim.overlap is None or isinstance(dim.overlap, Fold | Reads):
        return ()  # contributions to rows outside the array are dropped
    overlap = unfolded(dim.overlap)
    fills = []
    start = 0
    for run, origin in all_row_spans(dim, length, sizes)[index]:
        n = run.length * run.repeats
        if run.start == FILL:
            fills.append((start, start + n, float(boundary_at(overlap, origin).value)))
        start += n
    return tuple(fills)


def meaning(dim: Dim, length: int, sizes: Sizes, coords: Sequence[int]) -> tuple[Runs, object]:
    """The rows of a block, and the boundaries of those from beyond: dims with equal ones mean the same."""
    rows = held_rows(dim, length, sizes, coords)
    if dim.overlap is None or isinstance(unfolded(dim.overlap), Reads):
        return rows, []
    spans = (
        s
        for s in row_spans(dim, length, sizes, coords)
        if s.run.start == FILL or is_flipped(s, dim)
    )
    return rows, [(span.run, boundary_at(unfolded(dim.overlap), span.origin)) for span in spans]


def boundary_at(overlap: Halo | Window | Reads, origin: str) -> Boundary:
    """The boundary at the end of the array that rows with this origin come from."""
    assert not isinstance(overlap, Reads)
    return overlap.before if origin == "before" else overlap.after


def is_flipped(span: RowSpan, dim: Dim) -> bool:
    """True if the rows come from the far side of a pole."""
    if dim.overlap is None or span.origin not in ("before", "after"):
        return False
    return span.run.stride < 0 and boundary_at(unfolded(dim.overlap), span.origin).kind == "pole"


def _halo_intervals(
    dim: Dim, halo: Halo, length: int, sizes: Ints, coords: Ints
) -> list[tuple[int, int]]:
    part = row_major(sizes, coords)
    lo, hi = halo.widths(part)
    if isinstance(halo.lo, int) and isinstance(halo.hi, int):
        owned = unrolled(owned_rows(dim, length, sizes, coords))
        return [(r.start - lo, r.start + r.length + hi) for r in owned]
    # With a width per part even an empty part has a position: after the parts before it.
    every = all_owned_rows(replace(dim, overlap=None), length, tuple(sizes))
    *earlier, mine = map(n_rows, every[: part + 1])
    return [(sum(earlier) - lo, sum(earlier) + mine + hi)]


def _spans_between(
    start: int, stop: int, own: Sequence[Run], length: int, overlap: Halo | Window
) -> Iterator[RowSpan]:
    """The rows [start, stop) by origin; beyond the ends of the array the boundaries decide."""
    yield from (RowSpan(r, "before") for r in _beyond(start, min(stop, 0), length, overlap.before))
    start_here = max(start, 0)
    end = min(stop, length)
    i = bisect_right(own, start_here, key=lambda run: run.start + run.length)
    while i < len(own) and own[i].start < end:
        first = max(own[i].start, start_here)
        last = min(own[i].start + own[i].length, end)
        if start_here < first:
            yield RowSpan(Run(start_here, first - start_here), "near")
        yield RowSpan(Run(first, last - first), "own")
        start_here = last
        i = i + 1
    if start_here < end:
        yield RowSpan(Run(start_here, end - start_here), "near")
    yield from (
        RowSpan(r, "after") for r in _beyond(max(start, length), stop, length, overlap.after)
    )


def _beyond(start: int, stop: int, length: int, boundary: Boundary) -> Iterable[Run]:
    """The rows that stand for positions [start, stop), which lie all before or all after the array."""
    n = stop - start
    if n <= 0 or boundary.kind == "none":
        return ()
    # `reflect` does not repeat the edge row; across a pole lie the nearest rows again, in reverse order.
    periods = {"periodic": length, "reflect": max(2 * (length - 1), 1), "pole": 2 * length}
    if boundary.kind in periods:
        return _walked(start, stop, length, periods[boundary.kind])
    if boundary.kind == "edge":
        return (Run(0 if start < 0 else length - 1, 1, n),)
    return (Run(FILL, n),)


def _walked(start: int, stop: int, length: int, period: int) -> list[Run]:
    """Rows start..stop of a walk up the array; if period > length, it comes back down."""
    runs: list[Run] = []
    if period == length:  # it goes around
        first = min(stop - start, length - start % length)
        around, last = divmod(stop - start - first, length)
        runs = [Run(start % length, first), Run(0, length, around), Run(0, last)]
        return [run for run in runs if run.length and run.repeats]
    while start < stop:
        position = start % period
        if position < length:
            n = min(stop - start, length - position)
            runs.append(Run(position, n))
        else:
            n = min(stop - start, period - position)
            # One below the last climbed row for `reflect` (period 2L-2), that row itself for `pole` (2L).
            runs.append(Run(period - position - (period == 2 * length), 1, n, -1))
        start += n
    return runs
