"""Rows of blocks in pictures: as text, by their owners, and as lanes for overlapping dims."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xshard.layout import Sharding
from xshard.layout.block_rows import RowSpan, all_row_spans, boundary_at
from xshard.layout.runs import FILL, Pieces, Run, Runs, merge_adjacent, n_rows, pieces, unrolled
from xshard.notation.overlap import Fold, Overlap, unfolded

# Most blocks drawn along a dim, as a cyclic cut of a long dim has as many blocks as rows; most lanes.
MAX_BLOCKS = 64
MAX_LANES = 16


@dataclass(frozen=True)
class RowGroup:
    """Consecutive rows of a block of an overlapping dim, all with one owner, in local order.

    origin: as in `RowSpan`. owner: the devices that own the rows; none for rows that a boundary fills.
    text: the value or the rows in the place of rows beyond the array; "" inside it.
    """

    rows: int
    origin: str
    owner: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True)
class Lane:
    """The block of some devices along an overlapping dim. start: the position of its first row."""

    devices: tuple[int, ...]
    start: int
    groups: tuple[RowGroup, ...]


def rows_text(runs: Runs, most: int = 6) -> str:
    """Runs in local order as text, at most `most` pieces, as in `1 fill, 0-2, 4-24 step 8`."""
    texts = [text for run in merge_adjacent(runs) for text in _run_texts(run, most)]
    return ", ".join([*texts[:most], *["..."] * (len(texts) > most)]) or "none"


def devices_text(devices: Sequence[int]) -> str:
    """Device numbers as text, with ranges and even steps, as in `0-3`, `0,4` and `0-12 step 4`."""
    steps = set(np.diff(devices).tolist())
    is_even = len(devices) > 2 and len(steps) == 1
    even = (Run(devices[0], 1, len(devices), steps.pop()),) if is_even else ()
    return rows_text(even or tuple(Run(device, 1) for device in devices), most=3).replace(", ", ",")


def rows_in_order(sharding: Sharding, d: int) -> Pieces:
    """The rows of a dim in order, as far as a strip can reach, with their owners along the dim's axes."""

    def drawn(run: Run) -> Run:
        return run._replace(repeats=min(run.repeats, MAX_BLOCKS + 1)) if run.stride > 0 else run

    rows = pieces(tuple(map(drawn, runs)) for runs in sharding.owners(d))
    return rows.take(np.argsort(rows.start, kind="stable"))


def lanes_of(sharding: Sharding, d: int, numbers: NDArray[np.int64]) -> Iterator[Lane]:
    """The block at every index along the axes of an overlapping dim."""
    dim = sharding.layout.dims[d]
    length = sharding.shape[d]
    if dim.overlap is None:
        return
    index = sharding.mesh.indices(dim.axes)
    every = all_row_spans(dim, length, sharding.mesh.sizes_of(dim.axes))
    owners = rows_in_order(sharding, d)
    for number, spans in enumerate(every[:MAX_LANES]):
        owned_runs = list(itertools.islice(_pieces_of(spans, owners), MAX_BLOCKS))
        groups = []
        for (origin, owner), same in itertools.groupby(owned_runs, key=lambda piece: piece[:2]):
            runs = tuple(run for _, _, run in same)
            text = _beyond_text(dim.overlap, origin, runs) if origin in ("before", "after") else ""
            groups.append(
                RowGroup(n_rows(runs), origin, tuple(numbers[index == owner].tolist()), text)
            )
        ahead = itertools.takewhile(lambda group: group.origin == "before", groups)
        before = sum(group.rows for group in ahead)
        inside = (run.start for origin, _, run in owned_runs if origin in ("own", "near"))
        start = -before if before else next(inside, length)
        yield Lane(tuple(numbers[index == number].tolist()), start, tuple(groups))


def _pieces_of(spans: Iterable[RowSpan], owners: Pieces) -> Iterator[tuple[str, int, Run]]:
    """The rows of a block as runs with one owner each, -1 for none: (origin, owner, run)."""
    stops = owners.start + owners.length
    for whole, origin in spans:
        for run in (whole,) if whole.start == FILL else unrolled((whole,)):
            start = run.start
            stop = run.start + run.length
            while start != FILL and start < stop:
                i = int(np.searchsorted(stops, start, side="right"))
                end = min(stop, int(stops[i])) if i < len(stops) else stop
                yield (
                    origin,
                    int(owners.block[i]) if i < len(stops) else -1,
                    Run(start, end - start),
                )
                start = end
            if run.start == FILL:
                yield origin, -1, run


def _beyond_text(overlap: Overlap, origin: str, runs: Runs) -> str:
    """Text for rows beyond an end of the array: the value or the rows (`r15`) in their place, × for none."""
    boundary = boundary_at(unfolded(overlap), origin)
    if runs[0].start == FILL:
        return "×" if isinstance(overlap, Fold) else f"{boundary.value:g}"
    return "-" * (boundary.sign < 0) + "r" + rows_text(runs, most=2).replace(", ", ",")


def _run_texts(run: Run, most: int) -> list[str]:
    if run.start == FILL:
        return [f"{run.length * run.repeats} fill"]
    if run.length == 1 and run.repeats > 1:
        stop = run.start + run.stride * (run.repeats - 1)
        if run.stride == 0:
            return [f"{run.start} x{run.repeats}"]
        return [f"{run.start}-{stop}" + (f" step {run.stride}" if run.stride != 1 else "")]
    ranges = (
        (r.start, r.start + r.length - 1) for r in itertools.islice(unrolled((run,)), most + 1)
    )
    return [f"{a}-{b}" if a < b else f"{a}" for a, b in ranges]
