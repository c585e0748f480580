"""A block as a row of messages: packing them, and putting them together to a block.

Decides how elements are copied between a block and a flat buffer: not at all where the
messages lie in the block one after the other, else every element once. Knows rows of local
blocks, no layouts and no processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xshard.ownership import Run, Runs, common, intervals, size

# More intervals than this along one dim are copied by a list of rows, not one by one.
MAX_SLICES = 16

# Which rows along every dim: a slice makes a view, a tensor lists them.
Index = tuple[slice | Tensor, ...]

_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Box(NamedTuple):
    """Where a part of a message stands: in the message, and in the block."""

    message: tuple[slice, ...]
    block: Index


@dataclass(frozen=True, eq=False)
class Message:
    """A dense array of `shape`: the rows `rows[d]` of a block along each dim d, box by box.

    sign: what it is multiplied by when it is put into the block.
    """

    shape: tuple[int, ...]
    rows: tuple[Runs, ...]
    boxes: tuple[Box, ...]
    sign: int = 1

    @cached_property
    def is_view(self) -> bool:
        """The block holds it as one strided view."""
        return len(self.boxes) == 1 and all(isinstance(i, slice) for i in self.boxes[0].block)

    def read(self, block: Tensor) -> Tensor:
        """The message, as a view of the block where it is one."""
        return block[self.boxes[0].block] if self.is_view else self.copied(block)

    def copied(self, block: Tensor) -> Tensor:
        """The message as a new tensor."""
        out = block.new_empty(self.shape)
        self.write(block, out)
        return out

    def write(self, block: Tensor, out: Tensor) -> None:
        """Copy the message into a tensor of its shape."""
        for box in self.boxes:
            out[box.message].copy_(_take(block, box.block))


class Fill(NamedTuple):
    """Rows [start, stop) of a dim of a block that hold a constant, a tensor without dims."""

    dim: int
    start: int
    stop: int
    value: Tensor

    def slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Where it stands in a block."""
        whole = (slice(0, n) for n in shape)
        return tuple(slice(self.start, self.stop) if d == self.dim else all_ for d, all_ in enumerate(whole))


def message(block_shape: Sequence[int], rows: Mapping[int, Runs], device: torch.device) -> Message:
    """The rows `rows[d]` of a block along each dim d, in their order; all rows along dims not named.

    device: where lists of rows are kept.
    """
    runs = tuple(rows.get(d, (Run(0, n),)) for d, n in enumerate(block_shape))
    boxes = itertools.product(*(_spans(r, device) for r in runs))
    return Message(
        tuple(map(size, runs)),
        runs,
        tuple(Box(tuple(m for m, _ in b), tuple(r for _, r in b)) for b in boxes),
    )


@dataclass(frozen=True, eq=False)
class Packing:
    """A block of `shape` as messages, in the order in which they are sent or received.

    op: how messages that share rows combine: sum, max or min. For max and min they share all or none.
    fills: what no message brings, written in this order.
    """

    shape: tuple[int, ...]
    messages: tuple[Message, ...]
    op: str | None = None
    fills: tuple[Fill, ...] = ()

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every message."""
        return [math.prod(m.shape) for m in self.messages]

    @cached_property
    def is_flat(self) -> bool:
        """The messages, one after the other, are the block as it lies in memory."""
        at = 0
        for m, n in zip(self.messages, self.sizes, strict=True):
            if n and (m.sign < 0 or _flat_start(m, self.shape) != at):
                return False
            at += n
        return at == math.prod(self.shape)

    def pack(self, block: Tensor) -> Tensor:
        """The block -> its messages in one flat buffer: the block itself where it is that already."""
        if self.is_flat:
            return block.contiguous().view(-1)
        if self._stacks:
            return torch.stack([m.read(block) for m in self.messages]).view(-1)
        out = block.new_empty(sum(self.sizes))
        for m, part in zip(self.messages, out.split(self.sizes), strict=True):
            m.write(block, part.view(m.shape))
        return out

    @cached_property
    def arriving(self) -> tuple[int, ...]:
        """The shape in which to receive the messages: the block's own where nothing is left to do."""
        return self.shape if self.is_flat else (sum(self.sizes),)

    def unpack(self, received: Tensor) -> Tensor:
        """All messages, in a tensor of the shape `arriving` -> the block."""
        return received if self.is_flat else self.place(received, self.split(received))

    def split(self, received: Tensor) -> list[Tensor]:
        """All messages one after the other -> every one in its shape."""
        parts = zip(received.view(-1).split(self.sizes), self.messages, strict=True)
        return [part.view(m.shape) for part, m in parts]

    def place(self, like: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Every message -> the block, a new tensor of the dtype of `like`; zeros where nothing is put."""
        parts = [-part if m.sign < 0 else part for part, m in zip(parts, self.messages, strict=True)]
        if self._joined is not None:
            dim, order = self._joined
            return torch.cat([parts[i][rows] if i >= 0 else self._filling(-1 - i) for i, rows in order], dim)
        out = like.new_empty(self.shape) if self._covers else like.new_zeros(self.shape)
        for fill in self.fills:
            out[fill.slices(self.shape)] = fill.value
        for part, m, met in zip(parts, self.messages, self._met, strict=True):
            for box in m.boxes:
                _put(out, box.block, part[box.message], _COMBINE[str(self.op)] if met else None)
        return out

    def _filling(self, i: int) -> Tensor:
        fill = self.fills[i]
        return fill.value.expand([index.stop - index.start for index in fill.slices(self.shape)])

    @cached_property
    def _stacks(self) -> bool:
        return len({m.shape for m in self.messages}) == 1 and all(m.is_view for m in self.messages)

    @cached_property
    def _joined(self) -> tuple[int, list[tuple[int, tuple[slice, ...]]]] | None:
        """The dim along which boxes, side by side in this order, are the block; fills count from -1 down."""
        boxes = [(i, box) for i, m in enumerate(self.messages) for box in m.boxes]
        boxes += [(-1 - i, Box((), fill.slices(self.shape))) for i, fill in enumerate(self.fills)]
        spans = [[_interval(i) for i in box.block] for _, box in boxes]
        cut = [d for d, n in enumerate(self.shape) if any(s[d] != (0, n) for s in spans)] or [0]
        if not boxes or not self.shape or len(cut) > 1:
            return None
        dim, at, order = cut[0], 0, []
        for span, (i, box) in sorted(zip((s[cut[0]] for s in spans), boxes, strict=True), key=lambda x: x[0]):
            if span[0] != at:
                return None
            at = span[1]
            order.append((i, box.message))
        return (dim, order) if at == self.shape[dim] else None

    @cached_property
    def _met(self) -> list[bool]:
        """Which messages bring rows that an earlier one brought."""
        rows = [m.rows for m in self.messages]
        return [any(_meet(r, earlier) for earlier in rows[:i]) for i, r in enumerate(rows)]

    @cached_property
    def _covers(self) -> bool:
        """Every element is written before anything is added to it. Fills of two dims are not counted."""
        first = [n for n, met in zip(self.sizes, self._met, strict=True) if not met]
        if len({fill.dim for fill in self.fills}) == 1:
            slabs = ([index.stop - index.start for index in f.slices(self.shape)] for f in self.fills)
            first += map(math.prod, slabs)
        return sum(first) == math.prod(self.shape)


def _meet(a: tuple[Runs, ...], b: tuple[Runs, ...]) -> bool:
    return a == b or all(bool(common(x, y)) for x, y in zip(a, b, strict=True))


def _spans(runs: Runs, device: torch.device) -> list[tuple[slice, slice | Tensor]]:
    """Rows of a block, in order -> stretches of the message and the rows of the block they are."""
    ends = intervals(runs)
    if len(ends) == 0:
        return []
    heads = np.flatnonzero(np.concatenate([[True], ends[1:, 0] != ends[:-1, 1]]))
    starts, stops = ends[heads, 0], ends[np.append(heads[1:], len(ends)) - 1, 1]
    lengths, steps = stops - starts, np.diff(starts)
    if len(starts) > 1 and (lengths == 1).all() and (steps == steps[0]).all() and steps[0] > 0:
        return [(slice(0, len(starts)), slice(int(starts[0]), int(stops[-1]), int(steps[0])))]
    at = np.concatenate([[0], np.cumsum(lengths)])
    if len(starts) > MAX_SLICES:
        listed = np.repeat(starts - at[:-1], lengths) + np.arange(at[-1])
        return [(slice(0, int(at[-1])), torch.from_numpy(listed).to(device))]
    return [
        (slice(int(a), int(b)), slice(int(start), int(stop)))
        for a, b, start, stop in zip(at[:-1], at[1:], starts, stops, strict=True)
    ]


def _interval(rows: slice | Tensor) -> tuple[int, int]:
    """The ends of an unbroken stretch of rows; of any other, ends that meet nothing."""
    if isinstance(rows, slice) and rows.step is None:
        return rows.start, rows.stop
    return -1, -1


def _flat_start(m: Message, shape: tuple[int, ...]) -> int | None:
    """Where a message begins in a contiguous block, if it lies there in one stretch."""
    if len(m.boxes) != 1:
        return None
    start, begun = 0, False
    for rows, length, whole in zip(m.boxes[0].block, m.shape, shape, strict=True):
        first = _interval(rows)[0]
        if first < 0 or (begun and length != whole):
            return None
        begun = begun or length > 1
        start = start * whole + first
    return start


def _take(block: Tensor, index: Index) -> Tensor:
    """The rows of a block: a view, or a copy where an index lists rows."""
    found = block[tuple(i if isinstance(i, slice) else slice(None) for i in index)]
    for d, rows in enumerate(index):
        if isinstance(rows, Tensor):
            found = found.index_select(d, rows)
    return found


def _put(out: Tensor, index: Index, value: Tensor, combine: Callable[..., Tensor] | None) -> None:
    """Write or combine a value into the rows of a block."""
    found = out[tuple(i if isinstance(i, slice) else slice(None) for i in index)]
    lists = [(d, rows) for d, rows in enumerate(index) if isinstance(rows, Tensor)]
    if not lists:
        found.copy_(value) if combine is None else combine(found, value, out=found)
        return
    d, rows = lists[0]
    inner = found.index_select(d, rows)
    left = (i if isinstance(i, Tensor) and k != d else slice(None) for k, i in enumerate(index))
    _put(inner, tuple(left), value, combine)
    found.index_copy_(d, rows, inner)
