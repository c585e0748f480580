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
from xshard.state.parts import NEW, PartMapping


class BoxPair(NamedTuple):
    """The same elements in a stored array and in a block.

    Attributes:
        name: The stored array.
        box: The elements in the stored array.
        order: Dim i of the part of the block is dim `order[i]` of the box, with the dims of length 1 of
            stacked arrays.
        slices: The elements in the block; None for a dim that the block lacks.
    """

    name: str
    box: Box
    order: tuple[int, ...]
    slices: tuple[slice | None, ...]

    def view(self, block: NDArray[Any]) -> NDArray[Any]:
        """Return the elements of the block, in the shape of the box."""
        shape = [len(range(s.start, s.stop, s.step or 1)) for s in self.box]
        part = block[(*self.slices, ...)]
        return part.transpose(np.argsort(self.order)).reshape(shape)


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
    """Find which slices of stored arrays fill which slices of one device's block.

    A stored array of 8 rows, of which the device holds rows 4-7: one pair, of stored rows 4-7 and
    rows 0-3 of the block. An array that is joined from stored q, k and v has pairs for each of
    them. If a dim needs several slices, there is a pair for each combination.

    Args:
        pieces: The parts of stored arrays that make up the whole array. Together they leave no gap.
        sharding: The array's sharding.
        device: A position in its mesh.
    """
    block_rows = [sharding.held(d, device) for d in range(len(sharding.shape))]  # for each dim
    for piece in pieces:
        for slices in itertools.product(*_slices_by_dim(piece, block_rows, sharding.shape)):
            yield _box_pair(piece, slices)


def _box_pair(piece: PartMapping, slice_pairs: tuple[SlicePair, ...]) -> BoxPair:
    """Put together one slice of every dim of a piece."""
    stored = {}  # by dim of the stored array
    slices: list[slice | None] = []
    for link, pair in zip(piece.links, slice_pairs, strict=True):
        slices.append(None if link.dst.dim == NEW else pair.block)  # None: the block lacks this dim
        if link.src.dim != NEW:
            stored[link.src.dim] = pair.stored
    box = tuple(stored[dim] for dim in sorted(stored))
    return BoxPair(piece.src.name, box, piece.order, tuple(slices))


def _slices_by_dim(
    piece: PartMapping, block_rows: list[Runs], shape: tuple[int, ...]
) -> list[list[SlicePair]]:
    """List, for each dim of a piece, which slices of the stored array fill which of the block.

    A device's block holds rows 4-7 of an array. The piece is a stored array that makes up rows 0-5
    of it: stored rows 4-5 go to rows 0-1 of the block.

    Args:
        piece: A part of a stored array (`src`) and the part of the array that it makes up (`dst`).
        block_rows: By dim of the array, the rows that the block holds.
        shape: The shape of the array.
    """
    slices_by_dim = []
    for stored, own in piece.links:
        # The array [n] may be one row of a stored stack [experts, n]: it, and its block, get the dim
        # that they lack, with length 1.
        held: Runs = interval(0, 1)
        piece_rows: Runs = held
        if own.dim != NEW:
            held = block_rows[own.dim]
            piece_rows = interval(0, shape[own.dim]) if own.rows is None else own.rows
        segments = common_segments(piece_rows, held)
        slices_by_dim.append(list(_paired_slices(segments, stored.rows)))
    return slices_by_dim


def _paired_slices(segments: Iterable[Segment], stored_rows: Runs | None) -> Iterator[SlicePair]:
    """Write matching rows as slices, as few as possible: of the stored array, and of the block.

    Stored rows 0, 2 and 4 that fill rows 0, 1 and 2 of a block are one pair: slice(0, 5, 2) and
    slice(0, 3, 1).

    Args:
        segments: Consecutive rows of a part, and where they are in the block.
        stored_rows: The rows of the part in the stored array. None: they have the same numbers
            there.
    """
    # Runs of rows that are consecutive on both sides. Single rows at even distances share a slice.
    pairs = _row_pairs(segments, stored_rows)
    first = 0
    while first < len(pairs):
        stop = first + _evenly_apart(pairs, first)
        yield _slice_pair(pairs[first:stop])
        first = stop


def _slice_pair(pairs: list[RowPair]) -> SlicePair:
    """Write one pair of consecutive rows, or several pairs of single rows with steps, as slices."""
    first = pairs[0]
    last = pairs[-1]
    stored_step = None
    block_step = None
    if len(pairs) > 1:
        stored_step = pairs[1].stored - first.stored
        block_step = pairs[1].block - first.block
    stored = slice(first.stored, last.stored + last.length, stored_step)
    return SlicePair(stored, slice(first.block, last.block + last.length, block_step))


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
    """Count how many pairs, from number `first` on, one slice with a step can stand for.

    Single rows 0, 2, 4, 7 of the stored array that fill rows 0, 1, 2, 3 of a block: 3 pairs, since
    7 breaks the step of 2. A pair of several consecutive rows stands alone: 1.
    """
    start = pairs[first]
    if start.length != 1 or first + 1 == len(pairs):
        return 1
    stored_step = pairs[first + 1].stored - start.stored
    block_step = pairs[first + 1].block - start.block
    # A slice with a step of 0 is an error, and one with a negative step would need other bounds.
    if min(stored_step, block_step) <= 0:
        return 1
    n = 1
    while first + n < len(pairs):
        expected = RowPair(start.stored + n * stored_step, start.block + n * block_step, 1)
        if pairs[first + n] != expected:
            break
        n += 1
    return n
