"""A dense part of a block, and the positions of its elements in the block: a view, or copied pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xshard.layout.runs import Run, Runs, Segment, as_intervals, count_rows

# More intervals than this along one dim are copied by a list of rows, not one by one.
MAX_SLICES = 16

# Rows along some dims, all rows along the others: a slice makes a view, a tensor lists rows.
Index = tuple[tuple[int, slice | Tensor], ...]

Combine = Callable[..., Tensor]  # adds, or takes the larger or the smaller, of two tensors


class Box(NamedTuple):
    """The position of one piece of a subarray: in the subarray, and in the block."""

    subarray_index: Index
    block: Index


class Concatenation(NamedTuple):
    """Pieces of these lengths along a dim, one after the other."""

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
            dims.update(d for d, _ in box.subarray_index)
            for _, rows in box.subarray_index:
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
        for box, part in zip(self.boxes, self.views_of_boxes(out), strict=True):
            part.copy_(take(block, box.block))

    def views_of_boxes(self, values: Tensor) -> Sequence[Tensor]:
        """Split a tensor of the subarray's shape -> a view for every box."""
        if len(self.boxes) == 1:
            return (values,)
        if self._concatenation is not None:
            return values.split_with_sizes(self._concatenation.lengths, self._concatenation.dim)
        return [take(values, box.subarray_index) for box in self.boxes]


class Fill(NamedTuple):
    """Rows [start, stop) of a dim of a block that hold a constant, a tensor without dims."""

    dim: int
    start: int
    stop: int
    value: Tensor

    @property
    def box(self) -> Index:
        """Its position in a block."""
        return ((self.dim, slice(self.start, self.stop)),)


class Span(NamedTuple):
    """Rows along one dim: in the subarray and in the block; None: all rows."""

    subarray_rows: slice | None
    block: slice | Tensor | None


def subarray(
    block_shape: Sequence[int], rows: Mapping[int, Runs], device: torch.device
) -> Subarray:
    """Describe some rows of a block as one dense array, and as the pieces that make it.

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
        if runs == (Run(0, length),):
            runs = None  # all rows: then boxes have no index along this dim, and stay whole
        runs_by_dim.append(runs)
        shape.append(length if runs is None else count_rows(runs))
    # A box has one piece of rows along each dim: 2 pieces along one dim and 3 along another make 6
    # boxes.
    spans_by_dim = [_spans(runs, device) for runs in runs_by_dim]
    boxes = [
        Box(_index(span.subarray_rows for span in spans), _index(span.block for span in spans))
        for spans in itertools.product(*spans_by_dim)
    ]
    return Subarray(tuple(shape), tuple(runs_by_dim), tuple(boxes))


def box_rows(box: Sequence[Sequence[Segment]], end: int) -> dict[int, Runs]:
    """Return the rows along each dim of a message's box, in the sender's (0) or the receiver's (1) block."""
    return {
        d: tuple(Run(segment[end], segment.length) for segment in segments)
        for d, segments in enumerate(box)
    }


def _index(rows: Iterable[slice | Tensor | None]) -> Index:
    return tuple((d, selected) for d, selected in enumerate(rows) if selected is not None)


def _spans(runs: Runs | None, device: torch.device) -> list[Span]:
    """Return the rows of a block along one dim as few pieces: slices, or one tensor of row numbers.

    Rows 0:2, 2:5 -> the slice 0:5. Rows 0, 4, 8 -> the slice 0:9:4. Rows 0:2, 4:7 -> two slices,
    which lie at 0:2 and 2:5 of the result. More than `MAX_SLICES` pieces -> one tensor that lists
    all rows. None stands for all rows of the dim.
    """
    if runs is None:
        return [Span(None, None)]
    intervals = as_intervals(runs)  # [runs, (start, stop)]
    if len(intervals) == 0:
        return []
    # Join intervals that touch. The head of a joined interval is its first part: the part before it
    # does not end where it begins.
    is_head = np.concatenate([[True], intervals[1:, 0] != intervals[:-1, 1]])
    heads = np.flatnonzero(is_head)
    starts = intervals[heads, 0]
    stops = intervals[np.append(heads[1:], len(intervals)) - 1, 1]
    lengths = stops - starts
    if len(starts) == 1:
        return [Span(None, slice(int(starts[0]), int(stops[0])))]

    # Single rows at equal distances are one slice with a step, which torch reads without a copy.
    steps = np.diff(starts)
    if (lengths == 1).all() and (steps == steps[0]).all() and steps[0] > 0:
        return [Span(None, slice(int(starts[0]), int(stops[-1]), int(steps[0])))]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if len(starts) > MAX_SLICES:
        # The i-th row of all is row `start + i - offset` of the block, where `start` is the begin
        # of its piece, and `offset` the number of rows in the pieces before.
        listed = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return [Span(None, torch.tensor(listed, device=device))]
    return [
        Span(slice(int(offsets[i]), int(offsets[i + 1])), slice(int(starts[i]), int(stops[i])))
        for i in range(len(starts))
    ]


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
        value: What is written there.
        combine: Adds it to what is there, or takes the larger or smaller; None to overwrite.
    """
    # Indexing by slices gives a view, which can be written to; indexing by lists of rows gives a
    # copy.
    target = take(out, tuple((d, rows) for d, rows in index if isinstance(rows, slice)))
    lists = [(d, rows) for d, rows in index if isinstance(rows, Tensor)]
    if not lists:
        if combine is None:
            target.copy_(value)
        else:
            combine(target, value, out=target)
        return out

    d, rows = lists[0]
    if combine is not None or len(lists) > 1:
        # So the rows of the first list are copied out, changed in the copy (by the other lists, or
        # by `combine`), and written back below.
        value = write_rows(target.index_select(d, rows), tuple(lists[1:]), value, combine)
    target.index_copy_(d, rows, value)
    return out


def is_symbolic(shape: Sequence[int]) -> bool:
    """Return whether a length is a symbol. Torch does not record writes to parts of such tensors."""
    return not all(isinstance(length, int) for length in shape)


def scattered(out: Tensor, index: Index, value: Tensor, combine: Combine | None) -> Tensor:
    """Return a new tensor with what `write_rows` writes: the block is left as it is."""
    if not index:
        if combine is None:
            return value
        return combine(out, value)
    # From outside to inside: take the rows, change them along the other dims, and put them back.
    d, rows = index[0]
    inner = scattered(take(out, index[:1]), index[1:], value, combine)
    if isinstance(rows, Tensor):
        return out.index_copy(d, rows, inner)
    step = 1 if rows.step is None else rows.step
    return torch.slice_scatter(out, inner, d, rows.start, rows.stop, step)
