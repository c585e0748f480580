"""The rows that a block holds under a halo or window, and where they come from, on one dim.

A device *owns* the rows that the shards of the dim give it, each row on one device. It *holds* these
and the rows that the overlap adds: its halo, or what its window reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xshard.caches import layout_cache
from xshard.errors import ShapeError
from xshard.layout.mesh import all_coords, row_major
from xshard.layout.partition import (
    Ints,
    Sizes,
    all_owned_rows,
    ceil_div,
    cut_by_shards,
    find_misfit,
    owned_rows,
)
from xshard.layout.runs import FILL, Run, Runs, as_runs, count_rows, row_numbers, unroll
from xshard.notation.overlap import Boundary, Fold, Halo, Reads, Window, unfolded
from xshard.notation.parser import SIZES, Dim, Shard
from xshard.notation.row_arrays import Numbers


class RowSpan(NamedTuple):
    """Rows of a block that a device gets from one source.

    Attributes:
        run: The rows in the array; its start is FILL for rows that a boundary fills.
        origin: "own" for rows that the device owns, "near" for rows of other devices, "before"
            or "after" for copies and fills beyond that end of the array.
    """

    run: Run
    origin: str


def held_rows(dim: Dim, length: int, sizes: Ints, coords: Ints) -> Runs:
    """Return the rows of a device's block: those that it owns, widened by the dim's overlap.

    `h/sp:halo(1,1)`, 6 rows on 2 devices, device 0 -> rows FILL 0 1 2 3
    """
    if dim.overlap is None:
        return owned_rows(dim, length, sizes, coords)
    overlap = unfolded(dim.overlap)
    if isinstance(overlap, Reads):
        owned = row_numbers(owned_rows(dim, length, sizes, coords))
        return as_runs(np.concatenate([owned, _rows_read(overlap, sizes, coords)]))
    return tuple(span.run for span in row_spans(dim, length, sizes, coords))


def row_spans(dim: Dim, length: int, sizes: Ints, coords: Ints) -> tuple[RowSpan, ...]:
    """List the rows of a device's block in local order, each with where it comes from.

    6 rows on 2 devices with a halo of 1 row on each side, `h/sp:halo(1,1)`: device 0 holds a row of
    padding, FILL, from "before" the array, its "own" rows 0 1 2, and row 3 of the device "near" it.
    What lies beyond the last row comes from "after" the array.
    """
    return _spans_of_block(dim, length, sizes, coords, owned_rows(dim, length, sizes, coords))


@layout_cache(maxsize=4096)
def all_row_spans(dim: Dim, length: int, sizes: Sizes) -> tuple[tuple[RowSpan, ...], ...]:
    """List `row_spans` of every block of a dim, row-major along its axes."""
    owned_blocks = all_owned_rows(dim, length, sizes)
    blocks = zip(all_coords(sizes), owned_blocks, strict=True)
    return tuple(_spans_of_block(dim, length, sizes, coords, owned) for coords, owned in blocks)


@layout_cache(maxsize=4096)
def all_held_rows(dim: Dim, length: int, sizes: Sizes) -> tuple[Runs, ...]:
    """List `held_rows` of every block of a dim, row-major along its axes.

    Read off the spans, which plans of overlapping dims ask for as well.
    """
    if dim.overlap is None:
        return all_owned_rows(dim, length, sizes)
    if isinstance(unfolded(dim.overlap), Reads):
        return tuple(held_rows(dim, length, sizes, coords) for coords in all_coords(sizes))
    blocks = []
    for spans in all_row_spans(dim, length, sizes):
        blocks.append(tuple(span.run for span in spans))
    return tuple(blocks)


def _spans_of_block(
    dim: Dim, length: int, sizes: Ints, coords: Ints, owned: Runs
) -> tuple[RowSpan, ...]:
    """List the rows of a device's block in local order, and where it gets them from.

    Owned rows 0-3 of 8 with a halo of 1 -> FILL from "before" the array, 0-3 its "own", 4 from
    "near", another device.

    Args:
        dim: The dim, with its overlap.
        length: Its number of rows.
        sizes: The size of each axis of the dim.
        coords: The device's coordinate along each of them.
        owned: The rows that the device owns.
    """
    if dim.overlap is None:
        return _spans_from("own", owned)
    overlap = unfolded(dim.overlap)
    if isinstance(overlap, Reads):
        # The layout lists the rows that each device reads from others: they come after its own.
        rows_read = as_runs(_rows_read(overlap, sizes, coords))
        return _spans_from("own", owned) + _spans_from("near", rows_read)

    if isinstance(overlap, Halo):
        intervals = _halo_intervals(dim, overlap, length, sizes, coords, owned)
    else:
        intervals = _window_intervals(dim, overlap, length, sizes, coords)
    owned_intervals = sorted(unroll(owned))  # for the search by bisection
    spans: list[RowSpan] = []
    for start, stop in intervals:
        if start < stop:  # a negative halo may leave no rows
            spans.extend(_spans_between(start, stop, owned_intervals, length, overlap))
    return tuple(spans)


def _spans_from(origin: str, runs: Iterable[Run]) -> tuple[RowSpan, ...]:
    """Return runs of rows of one origin as spans."""
    return tuple(RowSpan(run, origin) for run in runs)


def _rows_read(reads: Reads, sizes: Ints, coords: Ints) -> Numbers:
    """Return the rows that a map lists for one device, beyond its own."""
    rows: Numbers = reads.rows.map.part(row_major(sizes, coords))
    return rows


# ---- outputs of a window


def window_outputs(dim: Dim, window: Window, length: int, sizes: Ints, coords: Ints) -> Runs:
    """Return which outputs of a convolution or pooling one device computes.

    A kernel of 3 over 8 rows on 2 devices, `h/sp:window(k=3)`, has 6 outputs: device 0 computes 0
    to 2, device 1 computes 3 to 5.

    Args:
        dim: The dim with the window.
        window: The kernel, stride and padding. Its `out` says how outputs are sharded: "" as the
            rows are, "balanced" as evenly as possible, "aligned" where their first rows are.
        length: The rows of the dim.
        sizes: The size of each axis of the dim.
        coords: The device's coordinate along each of them.
    """
    n_outputs = window.output_length(length)
    sharded_as = window.out
    if sharded_as == "" and any(shard.order == SIZES for shard in dim.shards):
        sharded_as = "aligned"  # listed sizes add up to the rows, and not to the outputs
    if sharded_as == "balanced":
        return cut_by_shards(n_outputs, (Shard(dim.axes, "balanced"),), sizes, coords)
    if sharded_as != "aligned":
        return cut_by_shards(n_outputs, dim.shards, sizes, coords)

    # "aligned": output i is computed on the device that owns row i * stride. Rows 4 to 7 with a
    # stride of 3 -> output 2 (row 6).
    runs = []
    for run in unroll(owned_rows(dim, length, sizes, coords)):
        run_stop = _stop_of(run)
        first = ceil_div(run.start, window.s)
        stop = min(ceil_div(run_stop, window.s), n_outputs)
        if run_stop == length:
            stop = n_outputs  # the last owner also computes outputs that start beyond the array
        if first < stop:
            runs.append(Run(first, stop - first))
    return tuple(runs)


def output_dim(dim: Dim, length: int, sizes: Sizes) -> tuple[Dim, int]:
    """Find how the outputs of a convolution or pooling are sharded, and how many there are.

    A kernel of 3 over 8 rows on 2 devices, `h/sp:window(k=3)` -> `h/sp`, 6. A few candidates are
    tried; the first under which every device owns just the outputs that it computes is returned.

    Raises:
        ShapeError: The dim has no window, or no layout can say how the outputs are cut.
    """
    window = None if dim.overlap is None else unfolded(dim.overlap)
    if not isinstance(window, Window):
        raise ShapeError(f"'{dim}' is not a window", hint="as in h/sp:window(k=3,p=1)")
    n_outputs = window.output_length(length)
    outputs = []  # which outputs every device computes
    for coords in all_coords(sizes):
        outputs.append(window_outputs(dim, window, length, sizes, coords))
    for shards in _shards_of_outputs(dim, outputs):
        candidate = Dim(dim.name, shards)
        if find_misfit(candidate, n_outputs, sizes) is not None:
            continue  # its sizes or intervals do not add up to the number of outputs
        if all_owned_rows(candidate, n_outputs, sizes) == tuple(outputs):
            return candidate, n_outputs
    reason = f"no layout can express how the {n_outputs} outputs of '{dim}' are cut"
    raise ShapeError(reason, hint="without out= they are cut like the dim")


def _shards_of_outputs(dim: Dim, outputs: Sequence[Runs]) -> list[tuple[Shard, ...]]:
    """List the ways in which a layout may say how outputs are cut, the simplest first."""
    if not dim.axes:
        return [dim.shards]
    balanced = Shard(dim.axes, "balanced")
    listed = Shard(dim.axes, SIZES, tuple(map(count_rows, outputs)))
    return [dim.shards, (balanced,), (listed,)]


# ---- boundaries


class Padding(NamedTuple):
    """Local positions [start, stop) of a block that lie outside the array, and their value."""

    start: int
    stop: int
    value: float


def block_fills(dim: Dim, length: int, sizes: Sizes, block_index: int) -> tuple[Padding, ...]:
    """List the padding of a block, as its boundaries say.

    A halo of 1 row of zeros around the first 3 rows of the array: position 0 lies before the array
    -> `Padding(0, 1, 0.0)`. `block_index` is the number of the block.
    """
    # A Fold adds overlapping rows up, and drops those outside the array. Reads are rows of the
    # array. Neither has padding.
    if dim.overlap is None or isinstance(dim.overlap, Fold | Reads):
        return ()
    overlap = unfolded(dim.overlap)
    fills = []
    position = 0  # in the block
    for run, origin in all_row_spans(dim, length, sizes)[block_index]:
        stop = position + run.length * run.repeats
        if run.start == FILL:
            value = float(boundary_at(overlap, origin).value)
            fills.append(Padding(position, stop, value))
        position = stop
    return tuple(fills)


class ChangedRows(NamedTuple):
    """Rows of a block that a boundary fills with a value, or may negate beyond a pole.

    Attributes:
        run: The rows in the array; its start is FILL for rows that are filled.
        boundary: The boundary, which has the value or the sign.
    """

    run: Run
    boundary: Boundary


class BlockContents(NamedTuple):
    """What a device's block has along one dim.

    Two layouts of a dim give a device the same block if it has equal contents under both. With a
    row of zeros beyond the edge, or a row of ones, `rows` are the same: FILL, 0, 1, 2. Only
    `changed_rows` tell them apart.

    Attributes:
        rows: The rows of the block.
        changed_rows: Those among them that a boundary fills or may negate.
    """

    rows: Runs
    changed_rows: list[ChangedRows]


def block_contents(dim: Dim, length: int, sizes: Sizes, coords: Sequence[int]) -> BlockContents:
    """Describe what a device's block contains, so that two layouts of a dim can be compared."""
    rows = held_rows(dim, length, sizes, coords)
    if dim.overlap is None:
        return BlockContents(rows, [])
    overlap = unfolded(dim.overlap)
    if isinstance(overlap, Reads):  # a list of rows of the array: none is beyond its ends
        return BlockContents(rows, [])
    changed_rows = []
    for span in row_spans(dim, length, sizes, coords):
        is_filled = span.run.start == FILL  # with the boundary's value, such as 0
        # Vectors change their sign beyond a pole, if the boundary says so.
        is_beyond_pole = is_flipped(span, dim)
        if is_filled or is_beyond_pole:
            changed_rows.append(ChangedRows(span.run, boundary_at(overlap, span.origin)))
    return BlockContents(rows, changed_rows)


def boundary_at(overlap: Halo | Window | Reads, origin: str) -> Boundary:
    """Return the boundary at the end of the array that rows with this origin come from."""
    assert not isinstance(overlap, Reads)
    return overlap.before if origin == "before" else overlap.after


def is_flipped(span: RowSpan, dim: Dim) -> bool:
    """Return whether the rows come from the far side of a pole, where rows go down."""
    if dim.overlap is None or span.origin not in ("before", "after"):
        return False
    boundary = boundary_at(unfolded(dim.overlap), span.origin)
    return span.run.stride < 0 and boundary.kind == "pole"


# ---- rows of a widened block


def _window_intervals(
    dim: Dim, window: Window, length: int, sizes: Ints, coords: Ints
) -> list[tuple[int, int]]:
    """List the row intervals (start, stop) that a device's outputs of a convolution read.

    With a kernel of 3 and stride 2, outputs 1 and 2 read rows 2 to 4 and 4 to 6 -> (2, 7). Both
    ends may lie outside the array.
    """
    intervals = []
    for outputs in unroll(window_outputs(dim, window, length, sizes, coords)):
        intervals.append(window.rows_read(outputs.start, _stop_of(outputs)))
    return intervals


def _halo_intervals(
    dim: Dim, halo: Halo, length: int, sizes: Ints, coords: Ints, owned: Runs
) -> list[tuple[int, int]]:
    """List the row intervals (start, stop) that a device owns, each widened by its halo.

    Rows 4 to 7 with a halo of 1 row before and 2 after -> (3, 10). If the device owns several
    intervals, as under a cyclic order, each has its halo.
    """
    part_index = row_major(sizes, coords)
    if isinstance(halo.lo, int) and isinstance(halo.hi, int):  # one width for all devices
        intervals = [(run.start, _stop_of(run)) for run in unroll(owned)]
    else:
        # A list of widths, one per device: then each device owns one interval, perhaps without rows.
        intervals = [_interval_of_part(dim, length, sizes, part_index)]
    rows_before, rows_after = halo.widths(part_index)
    return [(start - rows_before, stop + rows_after) for start, stop in intervals]


def _interval_of_part(dim: Dim, length: int, sizes: Ints, part_index: int) -> tuple[int, int]:
    """Return the rows [start, stop) of a contiguous part of a dim.

    They are counted from the rows of the parts before it, since a part without rows has a place
    too: 2 rows over 3 parts -> (0, 1), (1, 2), (2, 2).
    """
    blocks = all_owned_rows(dim, length, tuple(sizes))
    start = sum(map(count_rows, blocks[:part_index]))
    return start, start + count_rows(blocks[part_index])


def _spans_between(
    start: int, stop: int, owned: Sequence[Run], length: int, overlap: Halo | Window
) -> Iterator[RowSpan]:
    """Yield the rows [start, stop) in order, split by where a device gets them from.

    Rows [-1, 5) of 8, of which the device owns 0 to 3: -1 is "before" the array, where the boundary
    says what stands for it; 0 to 3 are its "own"; 4 is "near", on another device. Rows beyond the
    last one of the array would be "after".

    Args:
        start: The first position; negative if it lies before the array.
        stop: The position after the last; above `length` if that lies after the array.
        owned: The intervals that the device owns, in ascending order.
        length: The rows of the array.
        overlap: The overlap, with the boundaries at both ends of the array.
    """
    yield from _spans_from("before", _rows_beyond(start, min(stop, 0), length, overlap.before))
    yield from _spans_inside(max(start, 0), min(stop, length), owned)
    rows_after = _rows_beyond(max(start, length), stop, length, overlap.after)
    yield from _spans_from("after", rows_after)


def _spans_inside(start: int, stop: int, owned: Sequence[Run]) -> Iterator[RowSpan]:
    """Yield the rows [start, stop) inside the array, by turns "near" and the device's "own"."""
    row = start
    i = bisect_right(owned, row, key=_stop_of)
    while i < len(owned) and owned[i].start < stop:
        own_start = max(owned[i].start, row)
        own_stop = min(_stop_of(owned[i]), stop)
        if row < own_start:
            yield RowSpan(Run(row, own_start - row), "near")
        yield RowSpan(Run(own_start, own_stop - own_start), "own")
        row = own_stop
        i += 1
    if row < stop:
        yield RowSpan(Run(row, stop - row), "near")


def _stop_of(run: Run) -> int:
    """Return the row after an interval."""
    return run.start + run.length


def _rows_beyond(start: int, stop: int, length: int, boundary: Boundary) -> Sequence[Run]:
    """Return the rows that stand for positions outside the array, as the boundary says.

    Positions -2 and -1 of an array of 4 rows: 2 3 if periodic, 2 1 if reflected, 1 0 beyond a pole,
    0 0 if the edge is repeated, FILL FILL for a constant, and nothing if there is no boundary.
    """
    n_rows = stop - start
    if n_rows <= 0 or boundary.kind == "none":
        return ()
    if boundary.kind == "periodic":
        return _walk_around(start, n_rows, length)
    if boundary.kind == "reflect":
        # The edge row is not repeated: 2 1 [0 1 2 3] 2 1.
        return _walk_up_and_down(start, stop, length, first_row_down=length - 2)
    if boundary.kind == "pole":
        # Across a pole lie the nearest rows again, in reverse order: 1 0 [0 1 2 3] 3 2.
        return _walk_up_and_down(start, stop, length, first_row_down=length - 1)
    if boundary.kind == "edge":
        edge_row = 0 if start < 0 else length - 1  # positions lie all on one side
        return (Run(edge_row, length=1, repeats=n_rows),)
    return (Run(FILL, n_rows),)


def _walk_around(start: int, count: int, length: int) -> Sequence[Run]:
    """Return `count` rows of a walk that begins again at row 0 after the last one.

    From position -1 of 4 rows, 3 rows -> 3 0 1
    """
    first_row = start % length
    rows_to_end = min(count, length - first_row)
    turns, n_last = divmod(count - rows_to_end, length)
    # Whole turns are one run, however often the walk goes around.
    runs = (
        Run(first_row, rows_to_end),
        Run(start=0, length=length, repeats=turns),
        Run(start=0, length=n_last),
    )
    return [run for run in runs if run.length and run.repeats]


def _walk_up_and_down(start: int, stop: int, length: int, first_row_down: int) -> Sequence[Run]:
    """Mirror an array at both ends, again and again, and return the rows at [start, stop).

    An array of 4 rows goes on as 0 1 2 3 3 2 1 0 0 1 ... if the end rows are repeated, and as
    0 1 2 3 2 1 0 1 ... if not. Position 0 is row 0; negative positions count back from there: -2
    and -1 are 1 0, or 2 1.

    Args:
        start: The first position.
        stop: The position after the last.
        length: The rows of the array.
        first_row_down: The first row on the way down: the last row of the array if end rows are
            repeated (3 above), else the row before it (2).
    """
    # The walk down stops as far from the first row as it began from the last one: 3 2 1 0, or 2 1.
    last_row_down = length - 1 - first_row_down
    n_down = first_row_down - last_row_down + 1
    if n_down <= 0:  # 1 or 2 rows without their end rows repeated: there is no way down
        return _walk_around(start, stop - start, length)
    period = length + n_down  # up and down once
    runs = []
    position = start
    while position < stop:
        phase = position % period  # how far along the way up and down
        if phase < length:  # on the way up
            count = min(stop - position, length - phase)
            runs.append(Run(phase, count))
        else:
            # On the way down: `count` single rows, each one below the last (stride -1).
            count = min(stop - position, period - phase)
            first_row = first_row_down - (phase - length)
            runs.append(Run(first_row, length=1, repeats=count, stride=-1))
        position += count
    return runs
