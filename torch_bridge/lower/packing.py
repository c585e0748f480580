"""A block as a row of messages: packing them, and assembling a block from them, with at most one copy.

A message is a `Subarray`: any rows of the block, in one rectangle of it or in several, its boxes. A fill is a
box of constant values that no rank sends, such as the rows of a halo beyond the end of the array.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from torch_bridge.lower.subarray import (
    Fill,
    Index,
    Subarray,
    is_symbolic,
    scattered,
    take,
    write_rows,
)
from xshard.layout.runs import Runs, common_segments

# How a message combines with rows that an earlier one has put into the block.
COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

_SHORT_FLOATS = (torch.bfloat16, torch.float16)


class Interval(NamedTuple):
    """Rows [start, stop) of one dim."""

    start: int
    stop: int


_SCATTERED = Interval(-1, -1)  # rows that are not one interval


class Concatenation(NamedTuple):
    """The dim and the order in which boxes, concatenated, are the block."""

    dim: int
    order: list[int]


@dataclass(frozen=True, eq=False)
class Packing:
    """A block of `shape` as messages in order.

    The cached properties decide once, from shapes alone, which of torch's operations packs or assembles the
    block with the fewest copies; the methods, called for every block, only look at their answers.
    """

    shape: tuple[int, ...]
    messages: tuple[Subarray, ...]
    counts: tuple[int, ...] | None = None  # messages per rank; None: one each
    op: str | None = None  # how messages that share rows combine (max, min: all rows or none)
    fills: tuple[Fill, ...] = ()  # constant rows that no message brings, in order
    rounds_once: bool = False  # sums of short floats are added in float32

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every message."""
        return [math.prod(message.shape) for message in self.messages]

    @cached_property
    def sizes_by_rank(self) -> list[int]:
        """Elements for, or from, every rank."""
        if not self.counts:
            return self.sizes
        sizes = iter(self.sizes)
        return [sum(itertools.islice(sizes, count)) for count in self.counts]

    @cached_property
    def is_flat(self) -> bool:
        """Whether the messages, one after the other, are the block as it lies in memory."""
        offset = 0
        for message, size in zip(self.messages, self.sizes, strict=True):
            start = _start_in_memory(message, self.shape)
            is_next = start is not None and message.sign > 0 and _is_always_equal(start, offset)
            if size and not is_next:
                return False
            offset += size
        return offset == math.prod(self.shape)

    # Hot: packing and assembling run for every cached collective.

    def pack(self, block: Tensor) -> Tensor:
        """Put the messages of a block one after the other into a contiguous tensor to send.

        A block [4, 6] with its column halves as messages -> [8, 3]: the left half, then the right.
        Messages that lie like this in the block already (`is_flat`) are the block. The shape is
        for compilers, which find a product beside a collective only if no view is between them.
        """
        if not self.messages:
            return block.new_empty(0)
        if self.is_flat:
            return block.contiguous()
        # Three ways that launch one kernel, the quickest first. They need a contiguous block: of
        # messages in another memory format (channels last) `cat` and `stack` make a tensor in that
        # format, which cannot be viewed as flat.
        if block.is_contiguous():
            if self._can_stack and self._plain_dim is not None:
                # Equal messages, in order: one call in C is quicker than a slice for each of them.
                chunks = block.chunk(len(self.messages), self._plain_dim)
                return torch.cat(chunks)
            if self._can_stack:
                return torch.stack([message.read(block) for message in self.messages])
            if self._buffer_dim is not None:
                boxes = [take(block, index) for index in self._boxes]
                return torch.cat(boxes, self._buffer_dim)
        if is_symbolic(self.shape):
            # A compiler does not record writes to views of a tensor.
            return torch.cat([message.read(block).reshape(-1) for message in self.messages])
        # Else one copy of each message into the buffer.
        out = block.new_empty(sum(self.sizes))
        self.write(block, self.split(out))
        return out

    def write(self, block: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the messages of the block into tensors of their shapes."""
        for message, tensor in zip(self.messages, tensors, strict=True):
            message.write(block, tensor)

    @cached_property
    def arriving(self) -> tuple[int, ...]:
        """The shape of the tensor that receives the messages: the block's own where `is_flat`."""
        return self.shape if self.is_flat else (sum(self.sizes),)

    def unpack(self, received: Tensor) -> Tensor:
        """Assemble the block of all messages, which arrived in one tensor of the shape `arriving`."""
        return received if self.is_flat else self.place(received, self.split(received))

    def split(self, received: Tensor) -> Sequence[Tensor]:
        """Split one tensor with all messages -> each message in its shape."""
        if self._is_uniform and self.messages[0].shape:
            # One view and one split cost the host less than a view of each message.
            n_rows, *others = self.messages[0].shape
            n_rows_of_each = [n_rows] * len(self.messages)
            return received.view(sum(n_rows_of_each), *others).split_with_sizes(n_rows_of_each)
        flat_messages = received.view(-1).split_with_sizes(self.sizes)
        return self._in_their_shapes(flat_messages)

    def split_each(self, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        """Split one flat tensor per rank with the messages of that rank -> each message in its shape."""
        if self.counts is None:
            return self._in_their_shapes(buffers)
        sizes = iter(self.sizes)
        flat_messages: list[Tensor] = []
        for buffer, count in zip(buffers, self.counts, strict=True):
            sizes_of_rank = list(itertools.islice(sizes, count))
            if count == 1:  # most often: the buffer is the message
                flat_messages.append(buffer)
            elif count:
                flat_messages.extend(buffer.split_with_sizes(sizes_of_rank))
        return self._in_their_shapes(flat_messages)

    def _in_their_shapes(self, flat_messages: Sequence[Tensor]) -> list[Tensor]:
        return [
            flat.view(message.shape)
            for flat, message in zip(flat_messages, self.messages, strict=True)
        ]

    def place(self, like: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Assemble a new contiguous block of messages; rows without a message get zeros.

        The way back from `pack`: left half [4, 3] and right half [4, 3] -> [4, 6].

        Args:
            like: A tensor with the device and dtype of the block. The messages may be views of it.
            tensors: The messages, in order, each in its shape.
        """
        # Views of a tensor that is not contiguous (channels last) make `cat` return such a one.
        can_concatenate = like.is_contiguous() and self._concatenation is not None
        if can_concatenate and self._plain_dim is not None:
            return torch.cat(list(tensors), self._plain_dim)
        if self._has_negative:
            tensors = self._with_signs(tensors)
        if can_concatenate:
            return self._concatenate(tensors)
        if self.rounds_once and like.dtype in _SHORT_FLOATS:
            return self._place_in_float32(like, tensors)
        return self._place_one_by_one(like, tensors)

    def _with_signs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Negate the messages whose sign is -1.

        On a sphere, rows from beyond a pole may change sign, as components of vectors do.
        """
        return [
            -tensor if message.sign < 0 else tensor
            for tensor, message in zip(tensors, self.messages, strict=True)
        ]

    def _place_in_float32(self, like: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Assemble a block of bfloat16 or float16 whose sums are rounded once, at their end.

        A compiler that fuses the additions does not round between them either.
        """
        wide_tensors = [tensor.float() for tensor in tensors]
        wide_like = like.new_empty(0, dtype=torch.float32)
        return self._place_one_by_one(wide_like, wide_tensors).to(like.dtype)

    def _concatenate(self, tensors: Sequence[Tensor]) -> Tensor:
        """Assemble the block of messages and fills by one `cat`, which writes each element once."""
        assert self._concatenation is not None
        tensors_and_fills = [*tensors, *(fill.values for fill in self.fills)]
        box_values: list[Tensor] = []
        for rows, values in zip(self._subarrays, tensors_and_fills, strict=True):
            box_values.extend(rows.views_of_boxes(values))
        dim, order = self._concatenation
        return torch.cat([box_values[i] for i in order], dim)

    def _place_one_by_one(self, like: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Write fills and messages into a new block; combine messages that share rows.

        Two messages for row 0 under "sum": the second is added to the first. Fills come first,
        because messages may overwrite their rows.
        """
        if self._is_fold and all(map(Tensor.is_contiguous, tensors)):
            return reduce(COMBINE[str(self.op)], tensors)
        out = like.new_empty(self.shape) if self._is_covered else like.new_zeros(self.shape)
        write = scattered if is_symbolic(self.shape) else write_rows
        for fill in self.fills:
            for box in fill.rows.boxes:  # one, or none
                out = write(out, box.block, fill.values, None)
        for i, (message, tensor) in enumerate(zip(self.messages, tensors, strict=True)):
            # Rows to which an earlier message has written are combined with it. Others hold zeros,
            # fills or uninitialised memory: they are overwritten.
            combine = COMBINE[str(self.op)] if self._shares_rows[i] else None
            for box, box_values in zip(message.boxes, message.views_of_boxes(tensor), strict=True):
                out = write(out, box.block, box_values, combine)
        return out

    @cached_property
    def _plain_dim(self) -> int | None:
        """The dim along which the messages, concatenated as they are, are the block, if there is one."""
        if self._concatenation is None or self._has_negative or self.fills:
            return None
        # A message in several boxes never passes: boxes that touch are one, and others leave rows
        # between them, which another message brings.
        dim, order = self._concatenation
        if order != sorted(order):
            return None
        return dim

    @cached_property
    def _subarrays(self) -> list[Subarray]:
        """The rows of all messages, then of all fills."""
        return [*self.messages, *(fill.rows for fill in self.fills)]

    @cached_property
    def _boxes(self) -> list[Index]:
        """The positions in the block of all boxes: those of each message in order, then of each fill."""
        boxes: list[Index] = []
        for rows in self._subarrays:
            boxes.extend(box.block for box in rows.boxes)
        return boxes

    @cached_property
    def _has_negative(self) -> bool:
        return any(message.sign < 0 for message in self.messages)

    @cached_property
    def _is_uniform(self) -> bool:
        """Whether all messages have one shape."""
        if not self.messages:
            return False
        return all(message.shape == self.messages[0].shape for message in self.messages)

    @cached_property
    def _can_stack(self) -> bool:
        """Whether the messages are views of one shape, so that one `stack` copies them all."""
        return self._is_uniform and all(message.is_view for message in self.messages)

    @cached_property
    def _buffer_dim(self) -> int | None:
        """The dim along which the boxes of all messages, concatenated, are the buffer, if there is one."""
        dims: set[int] = set()
        for index in self._boxes:
            dims.update(d for d, _ in index)
        if len(dims) != 1 or self.fills:
            return None
        dim = dims.pop()
        # Only dims of length 1 before it: else rows of different messages would alternate in memory.
        if any(length != 1 for length in self.shape[:dim]):
            return None
        return dim

    @cached_property
    def _concatenation(self) -> Concatenation | None:
        """How one `torch.cat` makes the block of its boxes; None if it cannot.

        It cannot if boxes overlap, leave gaps or are cut along several dims. A block [6, 4] of a
        message with rows 2:6 (box 0) and a fill of rows 0:2 (box 1) -> `cat` along dim 0 in order
        [1, 0].
        """
        if not self._boxes or not self.shape:
            return None
        intervals = [_intervals(index, self.shape) for index in self._boxes]  # [boxes][dims]
        # Along all dims but one, each box has to be as long as the block.
        cut_dims = _cut_dims(intervals, self.shape)
        if len(cut_dims) > 1:
            return None
        dim = cut_dims[0] if cut_dims else 0
        rows = [of_box[dim] for of_box in intervals]
        # By start, then by stop: an empty box comes before the one that begins at its row.
        order = sorted(range(len(rows)), key=rows.__getitem__)
        starts = [rows[i].start for i in order]
        stops = [rows[i].stop for i in order]
        # No gap and no overlap: each box begins where the one before it ends.
        if [*starts, self.shape[dim]] != [0, *stops]:
            return None
        return Concatenation(dim, order)

    @cached_property
    def _shares_rows(self) -> list[bool]:
        """Whether each message shares rows with an earlier one, and each fill with any other rows."""
        shares: list[bool] = []
        for i, subarray in enumerate(self._subarrays):
            earlier_rows = [earlier.rows for earlier in self._subarrays[:i]]
            shares.append(any(_have_common_rows(subarray.rows, rows) for rows in earlier_rows))
        return shares

    @cached_property
    def _is_fold(self) -> bool:
        """Whether the block is the reduction of several messages, each of which has all of its rows."""
        has_all_rows = all(rows is None for message in self.messages for rows in message.rows)
        return self.op is not None and len(self.messages) > 1 and has_all_rows and not self.fills

    @cached_property
    def _is_covered(self) -> bool:
        """Whether every element of the block is overwritten, so that it may begin uninitialised.

        Found by counting the elements that are written, each once. A block of 6 rows: a message of
        rows 0:4 and a fill of rows 4:6 write 4 + 2. A message that shares rows with earlier ones is
        added to them, and does not count.
        """
        written = 0
        for subarray, shares in zip(self._subarrays, self._shares_rows, strict=True):
            if not shares:
                written += math.prod(subarray.shape)
        return written == math.prod(self.shape)


def _is_always_equal(a: int, b: int) -> bool:
    """Return whether two lengths are equal. A symbol that equals a number now may differ later."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    # Imported here because it imports sympy, which is slow.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def _have_common_rows(rows_a: Sequence[Runs | None], rows_b: Sequence[Runs | None]) -> bool:
    """Return whether two subarrays of a block, given by their rows along each dim, share elements."""
    if rows_a == rows_b:
        return True
    for runs_a, runs_b in zip(rows_a, rows_b, strict=True):
        # None stands for all rows of a dim, which meet any others.
        if runs_a is None or runs_b is None:
            continue
        if not common_segments(runs_a, runs_b):
            return False
    return True


def _intervals(index: Index, shape: tuple[int, ...]) -> list[Interval]:
    """Return the rows along every dim as an interval; `_SCATTERED` where they are none."""
    intervals = [Interval(0, length) for length in shape]
    for d, rows in index:
        if isinstance(rows, slice) and rows.step is None:
            intervals[d] = Interval(rows.start, rows.stop)
        else:
            intervals[d] = _SCATTERED
    return intervals


def _cut_dims(intervals: Sequence[Sequence[Interval]], shape: tuple[int, ...]) -> list[int]:
    """Return the dims along which some box, given by its interval along each dim, has not all rows."""
    cut_dims: list[int] = []
    for d, length in enumerate(shape):
        if any(of_box[d] != (0, length) for of_box in intervals):
            cut_dims.append(d)
    return cut_dims


def _start_in_memory(message: Subarray, shape: tuple[int, ...]) -> int | None:
    """Return the element at which a message begins in a contiguous block; None if it lies scattered.

    In a 6 x 5 block rows 2:4 begin at element 10. Columns 2:4 lie in six runs of memory -> None.
    """
    if len(message.boxes) != 1:
        return None
    start = 0
    # After the first dim with several rows, memory is contiguous only with all rows of each later dim.
    must_span_dim = False
    intervals = _intervals(message.boxes[0].block, shape)
    for rows, length, dim_length in zip(intervals, message.shape, shape, strict=True):
        if rows == _SCATTERED or (must_span_dim and length != dim_length):
            return None
        if length > 1:
            must_span_dim = True
        # The index of an element, row by row: element (i, j) of a 6 x 5 block is i * 5 + j.
        start = start * dim_length + rows.start
    return start
