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

from xshard.layout.runs import Run, Runs, Segment, as_intervals, n_rows

# More intervals than this along one dim are copied by a list of rows, not one by one.
MAX_SLICES = 16

# Rows along some dims, all rows along the others: a slice makes a view, a tensor lists rows.
Index = tuple[tuple[int, slice | Tensor], ...]


class Box(NamedTuple):
    """The position of one piece of a subarray: in the subarray, and in the block."""

    own: Index
    block: Index


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
        return len(self.boxes) == 1 and all(
            isinstance(rows, slice) for _, rows in self.boxes[0].block
        )

    @cached_property
    def line(self) -> tuple[int, list[int]] | None:
        """(Dim, lengths) if boxes of these lengths, concatenated along the dim, are the subarray."""
        dims = {d for box in self.boxes for d, _ in box.own}
        if len(dims) != 1:
            return None
        spans = [rows for box in self.boxes for _, rows in box.own if isinstance(rows, slice)]
        return dims.pop(), [rows.stop - rows.start for rows in spans]

    def read(self, block: Tensor) -> Tensor:
        """The subarray of a block, as a view where `is_view`."""
        return take(block, self.boxes[0].block) if self.is_view else self.copied(block)

    def copied(self, block: Tensor) -> Tensor:
        """The subarray of a block, as a new tensor."""
        if self.is_view:
            return take(block, self.boxes[0].block).clone(memory_format=torch.contiguous_format)
        out = block.new_empty(self.shape)
        if len(self.boxes) > 1 and is_symbolic(self.shape):
            for box in self.boxes:
                out = scattered(out, box.own, take(block, box.block), None)
            return out
        self.write(block, out)
        return out

    def write(self, block: Tensor, out: Tensor) -> None:
        """Copy the subarray of a block into a tensor of its shape."""
        for box, part in zip(self.boxes, self.parts(out), strict=True):
            part.copy_(take(block, box.block))

    def parts(self, values: Tensor) -> Sequence[Tensor]:
        """A tensor of its shape -> a view for every box."""
        if len(self.boxes) == 1:
            return (values,)
        if self.line is not None:
            return values.split_with_sizes(self.line[1], self.line[0])
        return [take(values, box.own) for box in self.boxes]


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


def subarray(
    block_shape: Sequence[int], rows: Mapping[int, Runs], device: torch.device
) -> Subarray:
    """The rows `rows[d]` of a block along each dim d, in order. device: where lists of rows are."""
    runs = tuple(
        None if rows.get(d) == (Run(0, n),) else rows.get(d) for d, n in enumerate(block_shape)
    )
    boxes = itertools.product(*(_spans(r, device) for r in runs))
    shape = tuple(n if r is None else n_rows(r) for r, n in zip(runs, block_shape, strict=True))
    pairs = ((_index(own for own, _ in box), _index(rows for _, rows in box)) for box in boxes)
    return Subarray(shape, runs, tuple(Box(own, block) for own, block in pairs))


def box_rows(box: Sequence[Sequence[Segment]], end: int) -> dict[int, Runs]:
    """The rows along each dim of a message's box, in the sender's (0) or the receiver's (1) block."""
    return {d: tuple(Run(s[end], s.length) for s in segments) for d, segments in enumerate(box)}


def _index(rows: Iterable[slice | Tensor | None]) -> Index:
    return tuple((d, selected) for d, selected in enumerate(rows) if selected is not None)


def _spans(
    runs: Runs | None, device: torch.device
) -> list[tuple[slice | None, slice | Tensor | None]]:
    """Rows of a block, in order -> pairs (rows of the subarray, rows of the block); None: all rows."""
    if runs is None:
        return [(None, None)]
    intervals = as_intervals(runs)
    if len(intervals) == 0:
        return []
    heads = np.flatnonzero(np.concatenate([[True], intervals[1:, 0] != intervals[:-1, 1]]))
    starts = intervals[heads, 0]
    stops = intervals[np.append(heads[1:], len(intervals)) - 1, 1]
    lengths = stops - starts
    steps = np.diff(starts)
    if len(starts) > 1 and (lengths == 1).all() and (steps == steps[0]).all() and steps[0] > 0:
        return [(None, slice(int(starts[0]), int(stops[-1]), int(steps[0])))]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if len(starts) > MAX_SLICES:
        listed = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return [(None, torch.tensor(listed, device=device))]
    if len(starts) == 1:
        return [(None, slice(int(starts[0]), int(stops[0])))]
    bounds = zip(*(x.tolist() for x in (offsets[:-1], offsets[1:], starts, stops)), strict=True)
    return [(slice(a, b), slice(start, stop)) for a, b, start, stop in bounds]


def take(block: Tensor, index: Index) -> Tensor:
    """The rows of a block: a view, or a copy where an index lists rows."""
    for d, rows in index:
        if isinstance(rows, Tensor):
            block = block.index_select(d, rows)
        elif rows.step is None:  # a narrow costs the host half of what an index costs
            block = block.narrow(d, rows.start, rows.stop - rows.start)
        else:
            block = block[(slice(None),) * d + (rows,)]
    return block


def put(out: Tensor, index: Index, value: Tensor, combine: Callable[..., Tensor] | None) -> Tensor:
    """Write a value to some rows of a block, or combine it with them -> the block."""
    target = take(out, tuple((d, rows) for d, rows in index if isinstance(rows, slice)))
    lists = [(d, rows) for d, rows in index if isinstance(rows, Tensor)]
    if not lists:
        target.copy_(value) if combine is None else combine(target, value, out=target)
    elif combine is None and len(lists) == 1:
        target.index_copy_(*lists[0], value)
    else:
        (d, rows), *left = lists
        target.index_copy_(d, rows, put(target.index_select(d, rows), tuple(left), value, combine))
    return out


def is_symbolic(shape: Sequence[int]) -> bool:
    """Whether a length is a symbol. Torch does not record writes to parts of such tensors."""
    return not all(isinstance(n, int) for n in shape)


def scattered(
    out: Tensor, index: Index, value: Tensor, combine: Callable[..., Tensor] | None
) -> Tensor:
    """As `put`, but into a new tensor: the block is left as it is."""
    if not index:
        return value if combine is None else combine(out, value)
    (d, rows), *rest = index
    inner = scattered(take(out, ((d, rows),)), tuple(rest), value, combine)
    if isinstance(rows, Tensor):
        return out.index_copy(d, rows, inner)
    return torch.slice_scatter(out, inner, d, rows.start, rows.stop, rows.step or 1)
