"""Which boxes of stored arrays fill the block of a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.runs import (
    Run,
    Runs,
    Segment,
    common_segments,
    interval,
    rows_at_positions,
    unroll,
)
from xshard.state.files.checkpoint import Box
from xshard.state.parts import NEW, PartMapping


class CommonBox(NamedTuple):
    """Elements that a stored array and a block have in common, and where they lie in both.

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
        shape = [
            len(range(box_slice.start, box_slice.stop, box_slice.step or 1))
            for box_slice in self.box
        ]
        box_of_block = block[(*self.slices, ...)]
        return box_of_block.transpose(np.argsort(self.order)).reshape(shape)


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


def common_boxes(
    mappings: Iterable[PartMapping], sharding: Sharding, device: int
) -> Iterator[CommonBox]:
    """Find which slices of stored arrays fill which slices of one device's block.

    A stored array of 8 rows, of which the device holds rows 4-7: one box, stored rows 4-7, which are
    rows 0-3 of the block. An array that is joined from stored q, k and v has boxes of each of them.
    If a dim needs several slices, there is a box for each combination.

    Args:
        mappings: The parts of stored arrays that make up the whole array. Together they leave no gap.
        sharding: The array's sharding.
        device: A position in its mesh.
    """
    ndim = len(sharding.shape)
    block_rows = [sharding.held(dim_index, device) for dim_index in range(ndim)]
    for mapping in mappings:
        for slices in itertools.product(*_slices_by_dim(mapping, block_rows, sharding.shape)):
            yield _common_box(mapping, slices)


def _common_box(mapping: PartMapping, slice_pairs: tuple[SlicePair, ...]) -> CommonBox:
    """Make a box of one slice of every dim of a mapping."""
    stored_slices = {}  # by dim of the stored array
    block_slices: list[slice | None] = []
    for link, slices in zip(mapping.links, slice_pairs, strict=True):
        # None: the block lacks this dim.
        block_slices.append(None if link.dst.dim == NEW else slices.block)
        if link.src.dim != NEW:
            stored_slices[link.src.dim] = slices.stored
    box = tuple(stored_slices[dim] for dim in sorted(stored_slices))
    return CommonBox(mapping.src.name, box, mapping.order, tuple(block_slices))


def _slices_by_dim(
    mapping: PartMapping, block_rows: list[Runs], shape: tuple[int, ...]
) -> list[list[SlicePair]]:
    """List, for each dim of a mapping, which slices of the stored array fill which of the block.

    A device's block holds rows 4-7 of an array, of which the stored array makes up rows 0-5: stored
    rows 4-5 go to rows 0-1 of the block.

    Args:
        mapping: A part of a stored array (`src`) and the part of the array that it makes up (`dst`).
        block_rows: By dim of the array, the rows that the block holds.
        shape: The shape of the array.
    """
    slices_by_dim = []
    for stored_dim, block_dim in mapping.links:
        held_rows: Runs
        array_rows: Runs
        if block_dim.dim == NEW:
            # The array [n] is one row of a stored stack [experts, n]: it, and its block, get the dim
            # that they lack, with length 1.
            held_rows = interval(0, 1)
            array_rows = held_rows
        else:
            held_rows = block_rows[block_dim.dim]
            all_rows = interval(0, shape[block_dim.dim])
            array_rows = all_rows if block_dim.rows is None else block_dim.rows
        segments = common_segments(array_rows, held_rows)
        slices_by_dim.append(list(_paired_slices(segments, stored_dim.rows)))
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
    row_pairs = _row_pairs(segments, stored_rows)
    first_pair = 0
    while first_pair < len(row_pairs):
        stop_pair = first_pair + _count_evenly_apart(row_pairs, first_pair)
        yield _slice_pair(row_pairs[first_pair:stop_pair])
        first_pair = stop_pair


def _slice_pair(row_pairs: list[RowPair]) -> SlicePair:
    """Write one pair of consecutive rows, or several pairs of single rows with steps, as slices."""
    first_pair = row_pairs[0]
    last_pair = row_pairs[-1]
    stored_step = None
    block_step = None
    if len(row_pairs) > 1:
        stored_step = row_pairs[1].stored - first_pair.stored
        block_step = row_pairs[1].block - first_pair.block
    stored = slice(first_pair.stored, last_pair.stored + last_pair.length, stored_step)
    return SlicePair(
        stored, slice(first_pair.block, last_pair.block + last_pair.length, block_step)
    )


def _row_pairs(segments: Iterable[Segment], stored_rows: Runs | None) -> list[RowPair]:
    """List runs of rows that are consecutive in the stored array and in the block."""
    row_pairs = []
    for segment in segments:
        positions = Run(segment.src, segment.length)
        stored_runs = (
            (positions,) if stored_rows is None else rows_at_positions(stored_rows, positions)
        )
        block_row = segment.dst
        for stored_run in unroll(stored_runs):
            row_pairs.append(
                RowPair(stored=stored_run.start, block=block_row, length=stored_run.length)
            )
            block_row += stored_run.length
    return row_pairs


def _count_evenly_apart(row_pairs: list[RowPair], first_index: int) -> int:
    """Count how many pairs, from number `first_index` on, one slice with a step can stand for.

    Single rows 0, 2, 4, 7 of the stored array that fill rows 0, 1, 2, 3 of a block: 3 pairs, since
    7 breaks the step of 2. A pair of several consecutive rows stands alone: 1.
    """
    first_pair = row_pairs[first_index]
    if first_pair.length != 1 or first_index + 1 == len(row_pairs):
        return 1
    stored_step = row_pairs[first_index + 1].stored - first_pair.stored
    block_step = row_pairs[first_index + 1].block - first_pair.block
    # A slice with a step of 0 is an error, and one with a negative step would need other bounds.
    if min(stored_step, block_step) <= 0:
        return 1
    n_pairs = 1
    while first_index + n_pairs < len(row_pairs):
        expected = RowPair(
            stored=first_pair.stored + n_pairs * stored_step,
            block=first_pair.block + n_pairs * block_step,
            length=1,
        )
        if row_pairs[first_index + n_pairs] != expected:
            break
        n_pairs += 1
    return n_pairs
