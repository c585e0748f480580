"""A subarray: given rows of a block along each dim, as one dense array; a view of the block, or a copy.

It consists of boxes: rectangles of the block that torch can read, or write, by one operation. Rows 0:2 and
4:6 are two boxes, rows 0, 2, 4 one with a step; many scattered rows are one box with a list of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xshard.layout.runs import Run, Runs, Segment, as_intervals, count_rows, row_numbers
from xshard.notation.row_arrays import Numbers

# The two blocks of a step: the one before it, which a process sends, and the one after it, which it
# receives. So of a message: BEFORE is the sender's block, AFTER the receiver's.
BEFORE = 0
AFTER = 1

# More intervals than this along one dim are copied by a list of rows, not one by one.
MAX_SLICES = 16

# Rows along some dims, all rows along the others: a slice makes a view, a tensor lists rows.
Index = tuple[tuple[int, slice | Tensor], ...]

Combine = Callable[..., Tensor]  # adds, or takes the larger or the smaller, of two tensors


class Box(NamedTuple):
    """The position of a box: in the subarray, and in the block."""

    subarray_index: Index
    block: Index


class Concatenation(NamedTuple):
    """Boxes of these lengths along a dim, one after the other."""

    dim: int
    lengths: list[int]


@dataclass(frozen=True, eq=False)
class Subarray:
    """A dense array of `shape`: the rows `rows[d]` of a block along each dim d (None: all), box by box."""

    shape: tuple[int, ...]
    rows: tuple[Runs | None, ...]
    boxes: tuple[Box, ...]
    sign: int = 1  # the factor by which it is multiplied when it is put into the block

    @cached_property
    def is_view(self) -> bool:
        """Whether it is one strided view of the block."""
        if len(self.boxes) != 1:
            return False
        return all(isinstance(rows, slice) for _, rows in self.boxes[0].block)

    @cached_property
    def _concatenation(self) -> Concatenation | None:
        """The dim along which the boxes, concatenated, are the subarray; None if there is no one dim."""
        dims: set[int] = set()
        lengths: list[int] = []
        for box in self.boxes:
            for d, rows in box.subarray_index:
                dims.add(d)
                if isinstance(rows, slice):
                    lengths.append(rows.stop - rows.start)
        return Concatenation(dims.pop(), lengths) if len(dims) == 1 else None

    def read(self, block: Tensor) -> Tensor:
        """Return the subarray of a block, as a view where `is_view`."""
        if self.is_view:
            return take(block, self.boxes[0].block)
        return self.copy_of(block)

    def copy_of(self, block: Tensor) -> Tensor:
        """Return the subarray of a block as a new tensor."""
        if self.is_view:
            return take(block, self.boxes[0].block).clone(memory_format=torch.contiguous_format)
        out = block.new_empty(self.shape)
        # A compiler does not record writes to parts of a tensor with symbols for lengths.
        if len(self.boxes) > 1 and is_symbolic(self.shape):
            for box in self.boxes:
                out = scattered(out, box.subarray_index, take(block, box.block), None)
            return out
        self.write(block, out)
        return out

    def write(self, block: Tensor, out: Tensor) -> None:
        """Copy the subarray of a block into a tensor of its shape."""
        for box, view in zip(self.boxes, self.views_of_boxes(out), strict=True):
            view.copy_(take(block, box.block))

    def views_of_boxes(self, values: Tensor) -> Sequence[Tensor]:
        """Split a tensor of the subarray's shape -> a view for every box."""
        if len(self.boxes) == 1:
            return (values,)
        if self._concatenation is not None:
            return values.split_with_sizes(self._concatenation.lengths, self._concatenation.dim)
        return [take(values, box.subarray_index) for box in self.boxes]


class Fill(NamedTuple):
    """Rows of a block that hold a constant, a tensor without dims."""

    rows: Subarray
    value: Tensor

    @property
    def values(self) -> Tensor:
        """The constant in the shape of the rows, without a copy."""
        return self.value.expand(self.rows.shape)


class Span(NamedTuple):
    """The rows of a box along one dim: in the subarray, and in the block. None: all rows."""

    subarray_rows: slice | None
    block: slice | Tensor | None


def subarray(
    block_shape: Sequence[int], rows: Mapping[int, Runs], device: torch.device
) -> Subarray:
    """Describe some rows of a block as one dense array, and as the boxes that it consists of.

    Rows 0:2 and 4:6 along dim 0 of a block [6, 5] -> an array [4, 5] of two boxes: its rows 0:2 are
    rows 0:2 of the block, its rows 2:4 are rows 4:6. No data is touched.

    Args:
        block_shape: The shape of the block.
        rows: For each dim that is cut, its rows in order; all rows of dims that are not in it.
        device: The device of index tensors, which list many scattered rows.
    """
    runs_by_dim: list[Runs | None] = []
    shape = []
    for d, length in enumerate(block_shape):
        runs = rows.get(d)
        if runs is None or runs == (Run(0, length),):
            runs_by_dim.append(None)  # all rows: boxes have no index along this dim
            shape.append(length)
        else:
            runs_by_dim.append(runs)
            shape.append(count_rows(runs))
    # 2 spans along one dim and 3 along another make 6 boxes.
    spans_by_dim = [_spans(runs, device) for runs in runs_by_dim]
    boxes: list[Box] = []
    for spans in itertools.product(*spans_by_dim):  # one per dim
        in_subarray = _index(span.subarray_rows for span in spans)
        boxes.append(Box(in_subarray, _index(span.block for span in spans)))
    return Subarray(tuple(shape), tuple(runs_by_dim), tuple(boxes))


def box_rows(box: Sequence[Sequence[Segment]], end: int) -> dict[int, Runs]:
    """Return the rows of a message's box along each dim, in the sender's block or the receiver's.

    Args:
        box: The segments along each dim: rows of the sender's block that become rows of the
            receiver's.
        end: Whose block: BEFORE, the sender's, or AFTER, the receiver's.
    """
    rows: dict[int, Runs] = {}
    for d, segments in enumerate(box):
        rows[d] = tuple(Run(segment[end], segment.length) for segment in segments)
    return rows


def _index(rows: Iterable[slice | Tensor | None]) -> Index:
    return tuple((d, selected) for d, selected in enumerate(rows) if selected is not None)


def _spans(runs: Runs | None, device: torch.device) -> list[Span]:
    """Return the rows of a block along one dim as few spans: slices, or one tensor of row numbers.

    Rows 0:2, 2:5 -> the slice 0:5. Rows 0, 4, 8 -> the slice 0:9:4. Rows 0:2, 4:7 -> two slices,
    which lie at 0:2 and 2:5 of the subarray. More than `MAX_SLICES` slices -> one tensor that lists
    all rows. None stands for all rows of the dim.
    """
    if runs is None:
        return [Span(None, None)]
    intervals = as_intervals(runs)  # [runs, (start, stop)]
    if len(intervals) == 0:
        return []
    # Intervals that touch are joined: the result begins behind a gap, and ends before one.
    is_gap = intervals[1:, 0] != intervals[:-1, 1]
    starts = intervals[np.append(True, is_gap), 0]
    stops = intervals[np.append(is_gap, True), 1]
    evenly_spaced = _as_slice(starts, stops)
    if evenly_spaced is not None:
        return [Span(None, evenly_spaced)]
    if len(starts) > MAX_SLICES:
        return [Span(None, torch.tensor(row_numbers(runs), device=device))]
    in_subarray = consecutive_slices((stops - starts).tolist())
    in_block = map(slice, starts.tolist(), stops.tolist())
    return [Span(*rows) for rows in zip(in_subarray, in_block, strict=True)]


def _as_slice(starts: Numbers, stops: Numbers) -> slice | None:
    """Return intervals of rows as one slice, which torch reads without a copy; None if they are none.

    One interval 2:5 -> 2:5. Single rows at equal distances, 0, 4, 8 -> 0:9:4.
    """
    if len(starts) == 1:
        return slice(int(starts[0]), int(stops[0]))
    steps = np.diff(starts)
    has_single_rows = (stops - starts == 1).all()
    if has_single_rows and steps[0] > 0 and (steps == steps[0]).all():
        return slice(int(starts[0]), int(stops[-1]), int(steps[0]))
    return None


def consecutive_slices(sizes: Sequence[int]) -> list[slice]:
    """Return the positions of intervals that lie one after the other: sizes (2, 3) -> 0:2, 2:5."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def take(block: Tensor, index: Index) -> Tensor:
    """Return some rows of a block: a view, or a copy where an index lists rows."""
    for d, rows in index:
        if isinstance(rows, Tensor):
            block = block.index_select(d, rows)
        elif rows.step is None:
            # Hot: a narrow costs the host half of what an index costs.
            block = block.narrow(d, rows.start, rows.stop - rows.start)
        else:
            block = block[(slice(None),) * d + (rows,)]
    return block


def write_rows(out: Tensor, index: Index, value: Tensor, combine: Combine | None) -> Tensor:
    """Write a value to some rows of a block, or combine it with them, in place -> the block.

    Args:
        out: The block, which is changed.
        index: The rows along some dims.
        value: The new values.
        combine: Adds them to the present ones, or takes the larger or smaller; None to overwrite.
    """
    # Slices give a view, which can be written to; lists of rows would give a copy.
    slices = tuple((d, rows) for d, rows in index if isinstance(rows, slice))
    lists = tuple((d, rows) for d, rows in index if isinstance(rows, Tensor))
    target = take(out, slices)
    if lists:
        d, rows = lists[0]
        # `index_copy_` overwrites the rows of one list. To combine, or to write to the rows of
        # several, the rows of the first are copied out, changed in the copy, and written back.
        if combine is not None or len(lists) > 1:
            value = write_rows(target.index_select(d, rows), lists[1:], value, combine)
        target.index_copy_(d, rows, value)
    elif combine is not None:
        combine(target, value, out=target)
    else:
        target.copy_(value)
    return out


def without_base(view: Tensor) -> Tensor:
    """Return a tensor on the same memory that autograd does not know as a view; it saves a copy."""
    out = view.new_empty(0)
    return out.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def is_symbolic(shape: Sequence[int]) -> bool:
    """Return whether a length is a symbol. Torch does not record writes to parts of such tensors."""
    return not all(isinstance(length, int) for length in shape)


def scattered(out: Tensor, index: Index, value: Tensor, combine: Combine | None) -> Tensor:
    """Return a new tensor with what `write_rows` writes: the block is left as it is."""
    if not index:
        if combine is None:
            return value
        return combine(out, value)
    # One dim after the other: take the rows along it, change them along the other dims, put them back.
    d, rows = index[0]
    changed_rows = scattered(take(out, index[:1]), index[1:], value, combine)
    if isinstance(rows, Tensor):
        return out.index_copy(d, rows, changed_rows)
    step = 1 if rows.step is None else rows.step
    return torch.slice_scatter(out, changed_rows, d, rows.start, rows.stop, step)
