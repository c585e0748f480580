"""Boxes of stored arrays and the slices of a device's block that they fill, or that fill them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from numpy.typing import NDArray

from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.runs import Run, Runs, Segment, common_segments, interval, select, unrolled
from xshard.state.files.checkpoint import Box
from xshard.state.relations import PartMapping

Rows = tuple[slice, slice]  # of a stored array, and of a block


class BoxPair(NamedTuple):
    """A box of the stored array `name`, and the slices of the same elements in a block.

    order: dim i of the part of the block is dim `order[i]` of the box; the box has the dim of length 1 that a
    stacked array lacks.
    """

    name: str
    box: Box
    order: tuple[int, ...]
    slices: tuple[slice | None, ...]

    def view(self, block: NDArray[Any]) -> NDArray[Any]:
        """The elements of the block, in the shape of the box."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        shape = [len(range(s.start, s.stop, s.step or 1)) for s in self.box]
        return block[(*self.slices, ...)].transpose(inverse).reshape(shape)


def check_whole(sharding: Sharding) -> None:
    """Raise PlanError for a layout with blocks that are not parts of the array: addends, or rows twice."""
    layout = sharding.layout
    if layout.tagged("sum", "mean", "max", "min") or any(dim.overlap for dim in layout.dims):
        raise PlanError(
            f"'{layout}' cannot be in files, which have every element once",
            hint="redistribute sums, halos and windows to whole blocks first",
        )


def box_pairs(pieces: Iterable[PartMapping], sharding: Sharding, device: int) -> Iterator[BoxPair]:
    """The boxes of a device's block of an array. pieces: the parts that make the array.

    >>> from xshard import Layout, Mesh
    >>> from xshard.state.relations import ArrayPart
    >>> sharded = Sharding(Layout("i o/tp"), Mesh(tp=2), (3, 8))
    >>> pair = next(box_pairs([PartMapping(ArrayPart("w"), ArrayPart("w"), (1, 0))], sharded, device=1))
    >>> pair.box, pair.slices
    ((slice(4, 8, None), slice(0, 3, None)), (slice(0, 3, None), slice(0, 4, None)))
    """
    held = [sharding.held(d, device) for d in range(len(sharding.shape))]
    for src, dst, order in pieces:
        dims: list[list[Rows]] = []
        for i, j in enumerate(order):
            src_rows = src.rows if j == src.dim else None
            if dst.adds and i == dst.dim:  # one row of the stored array, along a dim that the block lacks
                dims.append(list(_rows((Segment(0, 0, 1),), src_rows)))
            else:
                d = i - 1 if dst.adds and dst.dim is not None and i > dst.dim else i
                dst_rows = dst.rows if i == dst.dim and not dst.adds else interval(0, sharding.shape[d])
                segments = common_segments(dst_rows, held[d])
                dims.append(list(_rows(segments, None if src.adds else src_rows)))
        for rows in itertools.product(*dims):
            stored = {j: of_src for j, (of_src, _) in zip(order, rows, strict=True)}
            box = tuple(stored[j] for j in sorted(stored) if not (src.adds and j == src.dim))
            slices = (None if dst.adds and i == dst.dim else of_dst for i, (_, of_dst) in enumerate(rows))
            yield BoxPair(src.name, box, order, tuple(slices))


def _rows(segments: Iterable[Segment], part: Runs | None) -> Iterator[Rows]:
    """Rows of a part in a block, as slices of the stored array and of the block. part: its stored rows."""
    runs: list[tuple[int, int, int]] = []  # start in the stored array, start in the block, length
    for start, dst, n in segments:
        for run in unrolled(select(part, Run(start, n)) if part is not None else (Run(start, n),)):
            runs.append((run.start, dst, run.length))
            dst += run.length
    i = 0
    while i < len(runs):
        (a, b, n), stop = runs[i], i + 1
        step = (runs[stop][0] - a, runs[stop][1] - b) if stop < len(runs) else (0, 0)
        if n == 1 and min(step) > 0:  # single rows, evenly apart on both sides, are one slice
            while stop < len(runs) and runs[stop] == (a + (stop - i) * step[0], b + (stop - i) * step[1], 1):
                stop += 1
        if stop - i > 1:
            last = stop - i - 1
            yield slice(a, a + last * step[0] + 1, step[0]), slice(b, b + last * step[1] + 1, step[1])
        else:
            yield slice(a, a + n), slice(b, b + n)
        i = stop
