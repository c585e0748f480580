"""A block as a row of messages: packing them, and assembling a block from them, with at most one copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torch_bridge.lower.subarray import Fill, Index, Subarray, is_symbolic, put, scattered, take
from xshard.layout.runs import Runs, common_segments, interval

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True, eq=False)
class Packing:
    """A block of `shape` as messages in order."""

    shape: tuple[int, ...]
    messages: tuple[Subarray, ...]
    counts: tuple[int, ...] | None = None  # messages per rank; None: one each
    op: str | None = None  # how messages that share rows combine (max, min: all rows or none)
    fills: tuple[Fill, ...] = ()  # constant rows that no message brings, in order

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every message."""
        return [math.prod(m.shape) for m in self.messages]

    @cached_property
    def sizes_by_rank(self) -> list[int]:
        """Elements for, or from, every rank."""
        sizes = iter(self.sizes)
        counts = self.counts or (1,) * len(self.messages)
        return [sum(itertools.islice(sizes, n)) for n in counts]

    @cached_property
    def is_flat(self) -> bool:
        """Whether the messages, one after the other, are the block as it lies in memory."""
        offset = 0
        for m, n in zip(self.messages, self.sizes, strict=True):
            start = _flat_start(m, self.shape)
            if n and (m.sign < 0 or start is None or not _always_equal(start, offset)):
                return False
            offset += n
        return offset == math.prod(self.shape)

    def pack(self, block: Tensor) -> Tensor:
        """The block -> its messages in one flat buffer; the block itself where `is_flat`."""
        if not self.messages:
            return block.new_empty(0)
        if self.is_flat:
            return block.contiguous().view(-1)
        # Of parts in another memory format `cat` and `stack` make a tensor in that format, which is not flat.
        if block.is_contiguous():
            if self._tiles is not None:
                return torch.cat(block.chunk(*self._tiles)).view(-1)
            if self._stacks:
                return torch.stack([m.read(block) for m in self.messages]).view(-1)
            if self._line is not None:
                boxes = (box for m in self.messages for box in m.boxes)
                return torch.cat([take(block, box.block) for box in boxes], self._line).view(-1)
        if is_symbolic(self.shape):
            return torch.cat([m.read(block).reshape(-1) for m in self.messages])
        out = block.new_empty(sum(self.sizes))
        self.write(block, self.split(out))
        return out

    def write(self, block: Tensor, parts: Sequence[Tensor]) -> None:
        """Copy the messages of the block into tensors of their shapes."""
        for m, part in zip(self.messages, parts, strict=True):
            m.write(block, part)

    @cached_property
    def arriving(self) -> tuple[int, ...]:
        """The shape of the tensor that receives the messages: the block's own where `is_flat`."""
        return self.shape if self.is_flat else (sum(self.sizes),)

    def unpack(self, received: Tensor) -> Tensor:
        """All messages, in a tensor of the shape `arriving` -> the block."""
        return received if self.is_flat else self.place(received, self.split(received))

    def split(self, received: Tensor) -> Sequence[Tensor]:
        """All messages in one tensor -> a list, each message in its shape."""
        if self._is_uniform:
            return received.view(len(self.messages), *self.messages[0].shape).unbind()
        parts = zip(received.view(-1).split_with_sizes(self.sizes), self.messages, strict=True)
        return [part.view(m.shape) for part, m in parts]

    def split_each(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """One flat tensor with the messages of each rank -> a list, each message in its shape."""
        if self.counts is not None:
            sizes = iter(self.sizes)
            by_rank = zip(parts, self.counts, strict=True)
            parts = [m for part, n in by_rank for m in part.split([next(sizes) for _ in range(n)])]
        return [part.view(m.shape) for part, m in zip(parts, self.messages, strict=True)]

    def place(self, like: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """The messages -> the block, new and contiguous, like `like`; zeros where no message is put."""
        is_contiguous = like.is_contiguous()  # as in `pack`
        if is_contiguous and self._row is not None:
            return torch.cat([*parts], self._row)
        if self._negates:
            parts = [
                -part if m.sign < 0 else part for part, m in zip(parts, self.messages, strict=True)
            ]
        if is_contiguous and self._joined is not None:
            dim, order = self._joined
            pieces = [
                piece
                for part, m in zip(parts, self.messages, strict=True)
                for piece in m.parts(part)
            ]
            pieces += [self._filling(fill) for fill in self.fills]
            return torch.cat([pieces[i] for i in order], dim)
        out = like.new_empty(self.shape) if self._covers else like.new_zeros(self.shape)
        write = scattered if is_symbolic(self.shape) else put
        for fill in self.fills:
            out = write(out, fill.box, self._filling(fill), None)
        for part, m, met in zip(parts, self.messages, self._met, strict=True):
            for box, piece in zip(m.boxes, m.parts(part), strict=True):
                out = write(out, box.block, piece, _COMBINE[str(self.op)] if met else None)
        return out

    def _filling(self, fill: Fill) -> Tensor:
        shape = [*self.shape]
        shape[fill.dim] = fill.stop - fill.start
        return fill.value.expand(shape)

    @cached_property
    def _row(self) -> int | None:
        """The dim along which the messages, concatenated in order, are the block, if there is one."""
        several = any(len(m.boxes) > 1 for m in self.messages)
        if self._joined is None or self._negates or self.fills or several:
            return None
        dim, order = self._joined
        return dim if order == sorted(order) else None

    @cached_property
    def _negates(self) -> bool:
        return any(m.sign < 0 for m in self.messages)

    @cached_property
    def _is_uniform(self) -> bool:
        return bool(self.messages) and all(m.shape == self.messages[0].shape for m in self.messages)

    @cached_property
    def _stacks(self) -> bool:
        return self._is_uniform and all(m.is_view for m in self.messages)

    @cached_property
    def _tiles(self) -> tuple[int, int] | None:
        """(Number of messages, dim) if the messages are equal parts of the block along a dim."""
        places = [box.block for m in self.messages for box in m.boxes]
        if not self._stacks or any(len(index) != 1 for index in places):
            return None
        (d, _) = places[0][0]
        rows = self.messages[0].shape[d]
        intervals = [_intervals(index, self.shape)[d] for index in places]
        in_turn = [(i * rows, (i + 1) * rows) for i in range(len(places))]
        return (
            (len(places), d)
            if rows and intervals == in_turn and in_turn[-1][1] == self.shape[d]
            else None
        )

    @cached_property
    def _line(self) -> int | None:
        """The dim along which the boxes of all messages, concatenated, are the buffer, if there is one."""
        dims = {d for m in self.messages for box in m.boxes for d, _ in box.block}
        if len(dims) != 1 or any(n != 1 for n in self.shape[: min(dims)]):
            return None
        return dims.pop()

    @cached_property
    def _joined(self) -> tuple[int, list[int]] | None:
        """The dim, and the order of boxes and then fills that, concatenated, are the block; None if none."""
        boxes = [box.block for m in self.messages for box in m.boxes] + [
            fill.box for fill in self.fills
        ]
        spans = [_intervals(index, self.shape) for index in boxes]
        cut = [d for d, n in enumerate(self.shape) if any(s[d] != (0, n) for s in spans)] or [0]
        if not spans or not self.shape or len(cut) > 1:
            return None
        (dim,), offset, order = cut, 0, []
        for start, stop, i in sorted((*span[dim], i) for i, span in enumerate(spans)):
            if start != offset:
                return None
            offset = stop
            order.append(i)
        return (dim, order) if offset == self.shape[dim] else None

    @cached_property
    def _met(self) -> list[bool]:
        """For every message, whether it shares rows with an earlier one."""
        rows = [m.rows for m in self.messages]
        return [any(_meet(r, earlier) for earlier in rows[:i]) for i, r in enumerate(rows)]

    @cached_property
    def _covers(self) -> bool:
        """Whether every element is written before any is added to it, by the rows of one dim."""
        first = [n for n, met in zip(self.sizes, self._met, strict=True) if not met]
        along = [
            (m.rows[f.dim], interval(f.start, f.stop)) for m in self.messages for f in self.fills
        ]
        brought = any(rows is None or common_segments(rows, filled) for rows, filled in along)
        if len({fill.dim for fill in self.fills}) == 1 and not brought:
            rest = math.prod(n for d, n in enumerate(self.shape) if d != self.fills[0].dim)
            first += [(fill.stop - fill.start) * rest for fill in self.fills]
        return sum(first) == math.prod(self.shape)


def _always_equal(a: int, b: int) -> bool:
    """Whether two lengths are equal. A symbol that equals a number now may differ later."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(a == b)


def _meet(a: tuple[Runs | None, ...], b: tuple[Runs | None, ...]) -> bool:
    # None stands for all rows of a dim, which meet any others.
    pairs = zip(a, b, strict=True)
    return a == b or all(x is None or y is None or bool(common_segments(x, y)) for x, y in pairs)


def _intervals(index: Index, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(start, stop) of the rows along every dim; (-1, -1) where they are not one run."""
    intervals = [(0, n) for n in shape]
    for d, rows in index:
        intervals[d] = (-1, -1)
        if isinstance(rows, slice) and rows.step is None:
            intervals[d] = (rows.start, rows.stop)
    return intervals


def _flat_start(m: Subarray, shape: tuple[int, ...]) -> int | None:
    """The start of a message in a contiguous block if it lies there in one piece, else None."""
    if len(m.boxes) != 1:
        return None
    start = 0
    begun = False
    for (first, _), length, whole in zip(
        _intervals(m.boxes[0].block, shape), m.shape, shape, strict=True
    ):
        if first < 0 or (begun and length != whole):
            return None
        begun = begun or length > 1
        start = start * whole + first
    return start
