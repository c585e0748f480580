"""Which boxes of stored arrays fill the block of a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.runs import Run, Runs, Segment, common_segments, interval, select, unrolled
from xshard.state.files.checkpoint import Box
from xshard.state.relations import PartMapping


class BoxPair(NamedTuple):
    """The same elements in a stored array and in a block.

    Attributes:
        name: The stored array.
        box: The elements in the stored array.
        order: Dim i of the part of the block is dim `order[i]` of the box, with the dim of length 1 of a
            stacked array.
        slices: The elements in the block; None for a dim that the block lacks.
    """

    name: str
    box: Box
    order: tuple[int, ...]
    slices: tuple[slice | None, ...]

    def view(self, block: NDArray[Any]) -> NDArray[Any]:
        """Return the elements of the block, in the shape of the box."""
        shape = [len(range(s.start, s.stop, s.step or 1)) for s in self.box]
        return block[(*self.slices, ...)].transpose(np.argsort(self.order)).reshape(shape)


class SlicePair(NamedTuple):
    """The same rows in a stored array and in a block."""

    stored: slice
    block: slice


class RowPair(NamedTuple):
    """Consecutive rows: where they begin in the stored array and in the block, and how many."""

    stored: int
    block: int
    length: int


def check_whole(sharding: Sharding) -> None:
    """Raise PlanError for a layout with blocks that are not parts of the array: addends, or rows twice."""
    layout = sharding.layout
    if layout.tagged("sum", "mean", "max", "min") or any(dim.overlap for dim in layout.dims):
        hint = "redistribute sums, halos and windows to whole blocks first"
        raise PlanError(f"'{layout}' cannot be in files, which have every element once", hint=hint)


def box_pairs(pieces: Iterable[PartMapping], sharding: Sharding, device: int) -> Iterator[BoxPair]:
    """Yield the boxes of stored arrays that fill a device's block.

    Args:
        pieces: The parts of stored arrays that make the array, without a gap.
        sharding: The array's sharding.
        device: A position in its mesh.
    """
    block_rows = [sharding.held(d, device) for d in range(len(sharding.shape))]
    for piece in pieces:
        rows_by_dim = [
            list(_dim_slices(piece, i, block_rows, sharding)) for i in range(len(piece.order))
        ]
        for rows in itertools.product(*rows_by_dim):
            yield _box_pair(piece, rows)


def _box_pair(piece: PartMapping, rows: tuple[SlicePair, ...]) -> BoxPair:
    """Put together one slice of every dim of a piece."""
    src, dst, order = piece
    stored = {j: pair.stored for j, pair in zip(order, rows, strict=True)}
    if src.adds and src.dim is not None:
        del stored[src.dim]  # the stored array lacks this dim
    slices: list[slice | None] = [pair.block for pair in rows]
    if dst.adds and dst.dim is not None:
        slices[dst.dim] = None  # the block lacks this dim
    return BoxPair(src.name, tuple(stored[j] for j in sorted(stored)), order, tuple(slices))


def _dim_slices(
    piece: PartMapping, i: int, block_rows: list[Runs], sharding: Sharding
) -> Iterator[SlicePair]:
    """Yield the rows of one dim of a piece in a block.

    Args:
        piece: A part of a stored array that is a part of the array.
        i: The dim, in the order of the array.
        block_rows: By dim of the array, the rows that the block holds.
        sharding: The array's sharding.
    """
    src, dst, order = piece
    j = order[i]  # the dim in the stored array
    stored_rows = src.rows if j == src.dim else None
    if dst.adds and i == dst.dim:  # one row of the stored array, along a dim that the block lacks
        return _paired_slices((Segment(0, 0, 1),), stored_rows)
    # Dims behind the one that is added are one place further to the front in the array.
    d = i - 1 if dst.adds and dst.dim is not None and i > dst.dim else i
    is_cut = i == dst.dim and not dst.adds
    part_rows = dst.rows if is_cut else interval(0, sharding.shape[d])
    segments = common_segments(part_rows, block_rows[d])
    # A dim that the stored array lacks has the one row 0.
    return _paired_slices(segments, None if src.adds else stored_rows)


def _paired_slices(segments: Iterable[Segment], stored_rows: Runs | None) -> Iterator[SlicePair]:
    """Write rows as few slices of the stored array and of the block.

    Args:
        segments: Consecutive rows of a part, and where they are in the block.
        stored_rows: The rows of the part in the stored array; None: they are equal.
    """
    pairs = _row_pairs(segments, stored_rows)
    i = 0
    while i < len(pairs):
        n = _evenly_apart(pairs, i)
        first = pairs[i]
        if n > 1:
            last = pairs[i + n - 1]
            second = pairs[i + 1]
            yield SlicePair(
                slice(first.stored, last.stored + 1, second.stored - first.stored),
                slice(first.block, last.block + 1, second.block - first.block),
            )
        else:
            yield SlicePair(
                slice(first.stored, first.stored + first.length),
                slice(first.block, first.block + first.length),
            )
        i += n


def _row_pairs(segments: Iterable[Segment], stored_rows: Runs | None) -> list[RowPair]:
    """List runs of rows that are consecutive in the stored array and in the block."""
    pairs = []
    for part_start, block_start, length in segments:
        run = Run(part_start, length)
        runs = (run,) if stored_rows is None else select(stored_rows, run)
        for stored_run in unrolled(runs):
            pairs.append(RowPair(stored_run.start, block_start, stored_run.length))
            block_start += stored_run.length
    return pairs


def _evenly_apart(pairs: list[RowPair], first: int) -> int:
    """Count the single rows from `first` on that are evenly apart on both sides; 1 for longer runs."""
    start = pairs[first]
    if start.length != 1 or first + 1 == len(pairs):
        return 1
    stored_step = pairs[first + 1].stored - start.stored
    block_step = pairs[first + 1].block - start.block
    if min(stored_step, block_step) <= 0:
        return 1
    n = 1
    while first + n < len(pairs):
        expected = RowPair(start.stored + n * stored_step, start.block + n * block_step, 1)
        if pairs[first + n] != expected:
            break
        n += 1
    return n
