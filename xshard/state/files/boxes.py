"""Which boxes of which stored arrays make a device's block, and which of them its block makes.

Decides the slices of both sides, read in one direction and written in the other. Knows no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from numpy.typing import NDArray

from xshard.errors import PlanError
from xshard.layout import Sharding
from xshard.layout.runs import Run, Runs, Segment, common_segments, interval, select, unrolled
from xshard.state.files.checkpoint import Box
from xshard.state.relations import Piece, Side

Rows = tuple[slice, slice]  # of a stored array, and of a block


class BoxPair(NamedTuple):
    """Elements of the stored array `name`: those of `box` there, at the index `at` of the block.

    order: dim i of the part of the block is dim `order[i]` of the box, which has the dim of length 1 that a
    stacked array lacks.
    """

    name: str
    box: Box
    order: tuple[int, ...]
    at: tuple[slice | None, ...]

    def of(self, block: NDArray[Any]) -> NDArray[Any]:
        """What lies at `at` of the block, as it lies in the box; a view."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        shape = [len(range(s.start, s.stop, s.step or 1)) for s in self.box]
        return block[(*self.at, ...)].transpose(back).reshape(shape)


def check_whole(sharding: Sharding) -> None:
    """Raise PlanError for a layout whose blocks are no parts of the array: addends, or rows twice."""
    layout = sharding.layout
    if layout.tagged("sum", "mean", "max", "min") or any(dim.overlap for dim in layout.dims):
        raise PlanError(
            f"'{layout}' is no layout of files, which have every element once",
            hint="redistribute sums, halos and windows to whole blocks first",
        )


def box_pairs(pieces: Iterable[Piece], sharding: Sharding, device: int) -> Iterator[BoxPair]:
    """The pieces that make an array, and a device's block of it -> the parts of the block.

    >>> from xshard import Layout, Mesh
    >>> cut = Sharding(Layout("i o/tp"), Mesh(tp=2), (3, 8))
    >>> pair = next(box_pairs([Piece(Side("w"), Side("w"), (1, 0))], cut, device=1))
    >>> pair.box, pair.at
    ((slice(4, 8, None), slice(0, 3, None)), (slice(0, 3, None), slice(0, 4, None)))
    """
    held = [sharding.held(d, device) for d in range(len(sharding.shape))]
    for src, dst, order in pieces:
        dims: list[list[Rows]] = []
        for i, j in enumerate(order):
            of_src = src.rows if j == src.dim else None
            if dst.adds and i == dst.dim:  # one row of the stored array, which the block has no dim for
                dims.append(list(_rows((Segment(0, 0, 1),), of_src)))
            else:
                d = i - 1 if dst.adds and dst.dim is not None and i > dst.dim else i
                here = dst.rows if i == dst.dim and not dst.adds else interval(0, sharding.shape[d])
                segments = common_segments(here, held[d])
                dims.append(list(_rows(segments, None if src.adds else of_src)))
        for chosen in itertools.product(*dims):
            yield _pair(src, dst, order, chosen)


def _pair(src: Side, dst: Side, order: tuple[int, ...], rows: tuple[Rows, ...]) -> BoxPair:
    there = {j: of_src for j, (of_src, _) in zip(order, rows, strict=True)}
    box = tuple(there[j] for j in sorted(there) if not (src.adds and j == src.dim))
    at = tuple(None if dst.adds and i == dst.dim else of_dst for i, (_, of_dst) in enumerate(rows))
    return BoxPair(src.name, box, order, at)


def _rows(segments: Iterable[Segment], within: Runs | None) -> Iterator[Rows]:
    """Rows of a piece in a block -> those of the stored array in it: `within` are those of the piece."""
    found: list[tuple[int, int, int]] = []
    for at, dst, n in segments:
        for run in unrolled(select(within, Run(at, n)) if within is not None else (Run(at, n),)):
            found.append((run.start, dst, run.length))
            dst += run.length
    i = 0
    while i < len(found):
        (a, b, n), stop = found[i], i + 1
        step = (found[stop][0] - a, found[stop][1] - b) if stop < len(found) else (0, 0)
        if n == 1 and min(step) > 0:  # single rows, evenly apart on both sides, are one slice
            while stop < len(found) and found[stop] == (
                a + (stop - i) * step[0],
                b + (stop - i) * step[1],
                1,
            ):
                stop += 1
        if stop - i > 1:
            last = stop - i - 1
            yield slice(a, a + last * step[0] + 1, step[0]), slice(b, b + last * step[1] + 1, step[1])
        else:
            yield slice(a, a + n), slice(b, b + n)
        i = stop
