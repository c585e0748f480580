"""A picture of a sharding as data: the blocks of the global array and the devices that hold each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xshard.errors import ShapeError
from xshard.layout import Sharding
from xshard.layout.runs import FILL, Run, Runs, as_intervals, merge_adjacent
from xshard.notation.overlap import Fold, Halo, Window
from xshard.notation.parser import SEGMENTS, Dim

# Most blocks drawn along a dim: a cyclic cut of a long dim has as many blocks as rows.
MAX_BLOCKS = 64

_ORDER_TEXT = {
    "block": "in contiguous chunks",
    "balanced": "in contiguous chunks that differ by at most one row",
    SEGMENTS: "each of its segments in contiguous chunks",
    "zigzag": "zigzag: part i of n holds chunks i and 2n-1-i of 2n",
    "cyclic": "cyclic: part i of n holds every n-th row, or chunk of rows, from i",
    "sizes": "in contiguous chunks of given sizes",
    "intervals": "in given intervals",
}
_OVERLAP_TEXT = {
    Halo: "each block holds rows of its neighbours",
    Window: "each block holds the rows that its outputs read",
    Fold: "rows of neighbours are contributions, added at their owner",
}
_TAG_TEXT = {
    "sum": "every device holds an addend: the array is their sum",
    "mean": "every device holds an addend: the array is their mean",
    "max": "every device holds a candidate: the array is their maximum",
    "min": "every device holds a candidate: the array is their minimum",
    "copy": "every device has a copy of its own, and the gradients of the copies add up",
}


@dataclass(frozen=True)
class Strip:
    """A drawn dim: its blocks (start, stop) in order; hidden: the number of rows after them, not drawn."""

    dim: Dim
    length: int
    blocks: tuple[tuple[int, int], ...]
    hidden: int


@dataclass(frozen=True)
class Cell:
    """A block of the array: devices that own and hold it; guests: devices that hold it only as overlap."""

    owners: tuple[int, ...]
    guests: tuple[int, ...] = ()


Cells = tuple[tuple[Cell, ...], ...]  # a row per block of the first strip, a column per block of the last


@dataclass(frozen=True)
class Picture:
    """The blocks of an array and the devices that hold them."""

    sharding: Sharding
    strips: tuple[Strip, ...]  # the drawn dims, at most two
    cells: Cells
    notes: tuple[str, ...]  # the roles of the mesh axes, in words


def picture(sharding: Sharding, dims: Sequence[str] = ()) -> Picture:
    """A sharding -> its picture along one or two dims, by default the first two that are cut."""
    drawn = tuple(_drawn(sharding, dims))
    strips = tuple(_strip(sharding, d) for d in drawn)
    return Picture(sharding, strips, _picture_cells(sharding, drawn, strips), _notes(sharding, drawn))


def rows_text(runs: Runs, most: int = 6) -> str:
    """Runs in local order as text, at most `most` pieces, as in `1 fill, 0-2, 4-24 step 8`."""
    pieces = [text for run in merge_adjacent(runs) for text in _run_texts(run, most)]
    if len(pieces) > most:
        pieces = [*pieces[:most], "..."]
    return ", ".join(pieces) or "none"


def devices_text(devices: Sequence[int]) -> str:
    """Device numbers as text, with ranges and even steps, as in `0-3`, `0,4` and `0-12 step 4`."""
    steps = set(np.diff(devices).tolist())
    if len(devices) > 2 and len(steps) == 1:
        runs: Runs = (Run(devices[0], 1, len(devices), steps.pop()),)
    else:
        runs = tuple(Run(device, 1) for device in devices)
    return rows_text(runs, most=3).replace(", ", ",")


def title(sharding: Sharding) -> str:
    """Which array lies where."""
    return f"{sharding.layout}   {list(sharding.shape)} on {sharding.mesh}"


def cell_text(cell: Cell) -> str:
    """The devices of a cell, written d0, d1, ... to distinguish them from rows."""
    owners = f"d{devices_text(cell.owners)}" if cell.owners else "."
    return " ".join([owners, *(f"+d{guest}" for guest in cell.guests)])


def labels(drawn: Picture) -> tuple[str, list[str], list[str]]:
    """The corner of the grid with the dims' names and lengths, the heads of its columns, and of its rows."""
    corner = " / ".join(f"{strip.dim.name} {strip.length}" for strip in drawn.strips)
    texts = [[f"{a}-{b - 1}" if a < b - 1 else f"{a}" for a, b in strip.blocks] for strip in drawn.strips]
    [heads], [sides] = texts[-1:] or [[""]], texts[:-1] or [[""]]
    return corner, heads, sides


def reading(drawn: Picture) -> list[str]:
    """Explanations of the marks in this picture."""
    cells = list(itertools.chain.from_iterable(drawn.cells))
    cut = [strip for strip in drawn.strips if strip.hidden]
    marks = [
        f"only the first {s.length - s.hidden} of {s.length} rows of {s.dim.name} are drawn" for s in cut
    ]
    if any(cell.guests for cell in cells):
        marks.append("+d: a device that holds the block too, as overlap")
    if any(not cell.owners for cell in cells):
        marks.append(".: the owner does not hold this block")
    return marks


def _drawn(sharding: Sharding, dims: Sequence[str]) -> Iterable[int]:
    names = sharding.layout.names
    for name in dims:
        if name not in names:
            raise ShapeError(f"no dim {name!r} in '{sharding.layout}'", hint=f"dims are: {', '.join(names)}")
    if len(dims) > 2 or len(set(dims)) < len(dims):
        raise ShapeError(f"a picture has one or two dims, not {', '.join(dims)}")
    if dims:
        return map(names.index, dims)
    cut = [d for d, dim in enumerate(sharding.layout.dims) if dim.axes]
    return (cut or range(len(names))[:1])[:2]


def _strip(sharding: Sharding, d: int) -> Strip:
    """The blocks between all positions where rows of some device begin or end."""
    length = sharding.shape[d]
    everyone = itertools.chain.from_iterable(map(_first, sharding.owners(d) + sharding.holders(d)))
    edges = np.unique(np.append(as_intervals(everyone).ravel(), [0, length]))[: MAX_BLOCKS + 1].tolist()
    blocks = tuple(itertools.pairwise(edges))
    return Strip(sharding.layout.dims[d], length, blocks, length - edges[-1])


def _picture_cells(sharding: Sharding, drawn: tuple[int, ...], strips: tuple[Strip, ...]) -> Cells:
    """Per block of the picture, the devices that own it and the devices that only hold it."""
    everyone = np.ones((sharding.mesh.n_devices, 1), bool)
    # A picture has rows and columns; a missing dim is one block that all devices have.
    owns, holds = [everyone, everyone], [everyone, everyone]
    for d, strip in zip(drawn, strips, strict=True):
        index = [sharding.dim_device(d, device) for device in range(sharding.mesh.n_devices)]
        owns.append(_covered(sharding.owners(d), strip)[index])
        holds.append(_covered(sharding.holders(d), strip)[index])
    own = owns[-2][:, :, None] & owns[-1][:, None, :]
    hold = holds[-2][:, :, None] & holds[-1][:, None, :]
    sets = [own & hold, hold & ~own]
    return tuple(
        tuple(Cell(*(tuple(np.flatnonzero(s[:, i, j]).tolist()) for s in sets)) for j in range(own.shape[2]))
        for i in range(own.shape[1])
    )


def _covered(everyone: Sequence[Runs], strip: Strip) -> NDArray[np.bool_]:
    """(index along the dim's axes, block of the strip) -> True if the runs contain the block."""
    starts = np.array([start for start, _ in strip.blocks], np.int64)
    covered = np.zeros((len(everyone), len(starts) + 1), np.int64)
    for row, runs in zip(covered, everyone, strict=True):
        # +1 where an interval begins, -1 where it ends: the running sum counts open intervals.
        for edge, change in zip(as_intervals(_first(runs)).T, (1, -1), strict=True):
            np.add.at(row, np.searchsorted(starts, edge), change)
    return covered.cumsum(axis=1)[:, :-1] > 0


def _first(runs: Runs) -> Runs:
    """The runs, each as far as a strip can reach: more pieces are not drawn."""
    return tuple(r._replace(repeats=min(r.repeats, MAX_BLOCKS + 1)) if r.stride > 0 else r for r in runs)


def _notes(sharding: Sharding, drawn: tuple[int, ...]) -> tuple[str, ...]:
    layout, mesh = sharding.layout, sharding.mesh
    shards = [(dim.name, shard) for dim in layout.dims for shard in dim.shards]
    cuts = [f"{name} is cut over {' x '.join(s.axes)}, {_ORDER_TEXT[s.order]}" for name, s in shards]
    wide = [dim for dim in layout.dims if dim.overlap is not None]
    overlaps = [f"{d.name} overlaps: {_OVERLAP_TEXT[type(d.overlap)]} ({d.overlap})" for d in wide]
    tags = [f"along {', '.join(axes)} {_TAG_TEXT[kind]}" for kind, axes in layout.tags]
    replicas = [a for a in mesh.axes if a not in layout.axes and mesh.size(a) > 1]
    whole = [f"along {', '.join(replicas)} all devices hold the same values (replicas)"] if replicas else []
    others = [dim.name for d, dim in enumerate(layout.dims) if dim.axes and d not in drawn]
    flat = [f"not drawn: {', '.join(others)}, cut too; devices that share a block here differ there"]
    return (*cuts, *overlaps, *tags, *whole, *(flat if others else ()))


def _run_texts(run: Run, most: int) -> list[str]:
    if run.start == FILL:
        return [f"{run.length * run.repeats} fill"]
    if run.length == 1 and run.repeats > 1:
        stop = run.start + run.stride * (run.repeats - 1)
        if run.stride == 0:
            return [f"{run.start} x{run.repeats}"]
        return [f"{run.start}-{stop}" + (f" step {run.stride}" if run.stride != 1 else "")]
    starts = (run.start + run.stride * i for i in range(run.repeats))
    ranges = ((start, start + run.length - 1) for start in itertools.islice(starts, most + 1))
    return [f"{a}-{b}" if a < b else f"{a}" for a, b in ranges]
