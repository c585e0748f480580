"""A picture of a sharding as data: the blocks of the global array, and the devices that own each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xshard.errors import ShapeError
from xshard.layout import Sharding
from xshard.layout.block_rows import RowSpan, all_row_spans, boundary_at
from xshard.layout.runs import FILL, Pieces, Run, Runs, merge_adjacent, n_rows, pieces, unrolled
from xshard.notation.overlap import Fold, Halo, Overlap, Reads, Window, unfolded
from xshard.notation.parser import SEGMENTS, Dim

# Most blocks drawn along a dim, as a cyclic cut of a long dim has as many blocks as rows; most lanes.
MAX_BLOCKS, MAX_LANES = 64, 16

_ORDER_TEXT = {
    "block": "in contiguous chunks",
    "balanced": "in contiguous chunks that differ by at most one row",
    SEGMENTS: "each of its segments in contiguous chunks",
    "zigzag": "zigzag: part i of n holds chunks i and 2n-1-i of 2n",
    "cyclic": "cyclic: part i of n holds every n-th row, or chunk of rows, from i",
    "sizes": "in contiguous chunks of given sizes",
    "intervals": "in given intervals",
    "by": "each row to the part that a map gives",
}
_OVERLAP_TEXT = {
    Halo: "each block holds rows of its neighbours",
    Window: "each block holds the rows that its outputs read",
    Reads: "each block holds the rows that a map lists for it",
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


@dataclass(frozen=True, eq=False)
class Picture:
    """The blocks of an array and the devices that own them, by number.

    strips: the drawn dims, at most two. cards: the array once for each place along the axes in `roles`; per
    card, a row of owners per block of the first strip and a column per block of the last. roles: how the
    cards along some axes relate, by a tag, `replicas`, or the name of a sharded dim that is not drawn.
    lanes: per strip, the first blocks with their overlaps, if it has some. empty: devices without elements.
    """

    sharding: Sharding
    strips: tuple[Strip, ...]
    cards: NDArray[np.int64]
    roles: tuple[tuple[str, tuple[str, ...]], ...]
    lanes: tuple[tuple[Lane, ...], ...]
    empty: tuple[int, ...]
    notes: tuple[str, ...]  # the roles of the mesh axes, in words

    @property
    def has_replicas(self) -> bool:
        return any(role == "replicas" for role, _ in self.roles)


def picture(sharding: Sharding, dims: Sequence[str] = (), devices: Sequence[int] = ()) -> Picture:
    """A sharding -> its picture along one or two dims, by default sharded ones first.

    devices: the number of every device of the mesh, in its order; 0, 1, 2, ... by default.
    """
    drawn, mesh = _drawn(sharding, dims), sharding.mesh
    numbers = np.array(devices or range(mesh.n_devices))
    strips = tuple(_strip(sharding, d) for d in drawn)
    others = set(mesh.long_axes) - {axis for d in drawn for axis in sharding.layout.dims[d].axes}
    every = ((role, tuple(a for a in along if a in others)) for role, along in _roles(sharding))
    roles = tuple((role, along) for role, along in every if along)
    return Picture(
        sharding,
        strips,
        _cards(sharding, drawn, strips, [axis for _, names in roles for axis in names], numbers),
        roles,
        tuple(tuple(_lanes(sharding, d, numbers)) for d in drawn),
        tuple(numbers[[not all(_owned_shape(sharding, i)) for i in range(mesh.n_devices)]].tolist()),
        _notes(sharding, drawn),
    )


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


def roles_text(drawn: Picture) -> str:
    """The relation of the cards to each other, as in `sum over tp, replicas over dp`; "" for one card."""
    return ", ".join(f"{role} over {' x '.join(axes)}" for role, axes in drawn.roles)


def cell_text(drawn: Picture, i: int, j: int) -> str:
    """The devices of a cell, as in `d0`, and `sum d0-3` if they do not hold replicas."""
    roles = "".join(f"{role} " for role, _ in drawn.roles if role != "replicas")
    return f"{roles}d{devices_text(sorted(drawn.cards[:, i, j].tolist()))}"


def labels(drawn: Picture) -> tuple[str, list[str], list[str]]:
    """The corner of the grid with the dims' names and lengths, the heads of its columns, and of its rows."""
    corner = " / ".join(f"{strip.dim.name} {strip.length}" for strip in drawn.strips)
    texts = [[f"{a}-{b - 1}" if a < b - 1 else f"{a}" for a, b in strip.blocks] for strip in drawn.strips]
    [heads], [sides] = texts[-1:] or [[""]], texts[:-1] or [[""]]
    return corner, heads, sides


def reading(drawn: Picture) -> list[str]:
    """Explanations of the marks in this picture."""
    marks = [
        f"only the first {s.length - s.hidden} of {s.length} rows of {s.dim.name} are drawn"
        for s in drawn.strips
        if s.hidden
    ]
    return marks + ([f"empty: d{devices_text(drawn.empty)}"] if drawn.empty else [])


def _drawn(sharding: Sharding, dims: Sequence[str]) -> tuple[int, ...]:
    names = sharding.layout.names
    for name in dims:
        if name not in names:
            raise ShapeError(f"no dim {name!r} in '{sharding.layout}'", hint=f"dims are: {', '.join(names)}")
    if len(dims) > 2 or len(set(dims)) < len(dims):
        raise ShapeError(f"a picture has one or two dims, not {', '.join(dims)}")
    if dims:
        return tuple(map(names.index, dims))
    cut = [d for d, dim in enumerate(sharding.layout.dims) if dim.axes]
    whole = [d for d in reversed(range(len(names))) if d not in cut]
    return tuple(sorted((*cut, *whole)[:2]))


def _strip(sharding: Sharding, d: int) -> Strip:
    """The blocks between all positions where rows of some device begin or end."""
    length, found = sharding.shape[d], pieces(map(_first, sharding.owners(d)))
    edges = np.unique(np.concatenate([found.start, found.start + found.length, [0, length]]))
    edges = edges[: MAX_BLOCKS + 1].tolist()
    blocks = tuple(itertools.pairwise(edges))
    return Strip(sharding.layout.dims[d], length, blocks, length - edges[-1])


def _cards(
    sharding: Sharding,
    drawn: Sequence[int],
    strips: Sequence[Strip],
    axes: Sequence[str],
    numbers: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Per place along the axes, the device that owns each block of the picture."""
    mesh, every = sharding.mesh, range(sharding.mesh.n_devices)
    # A picture has rows and columns; a missing dim is one block that all devices have.
    places, owners = [np.zeros(len(every), np.int64)] * 2, [np.zeros(1, np.int64)] * 2
    for d, strip in zip(drawn, strips, strict=True):
        places.append(np.array([sharding.dim_device(d, device) for device in every]))
        found = _by_rows(sharding, d)
        rows = [start for start, _ in strip.blocks]
        owners.append(found.block[np.searchsorted(found.start, rows, side="right") - 1])
    cards = np.array([mesh.index(device, axes) for device in every])
    table = np.zeros((max(cards) + 1, *(max(place) + 1 for place in places[-2:])), np.int64)
    table[cards, places[-2], places[-1]] = numbers
    return table[:, owners[-2][:, None], owners[-1]]


def _by_rows(sharding: Sharding, d: int) -> Pieces:
    """The rows of a dim in their order, with the index along the dim's axes of their owners."""
    found = pieces(map(_first, sharding.owners(d)))
    return found.take(np.argsort(found.start, kind="stable"))


def _first(runs: Runs) -> Runs:
    """The runs, each as far as a strip can reach: more pieces are not drawn."""
    return tuple(r._replace(repeats=min(r.repeats, MAX_BLOCKS + 1)) if r.stride > 0 else r for r in runs)


def _lanes(sharding: Sharding, d: int, numbers: NDArray[np.int64]) -> Iterator[Lane]:
    """The block at every index along the axes of an overlapping dim."""
    dim, length = sharding.layout.dims[d], sharding.shape[d]
    if dim.overlap is None:
        return
    index = np.array([sharding.dim_device(d, i) for i in range(len(numbers))])
    every, owners = all_row_spans(dim, length, sharding.mesh.sizes_of(dim.axes)), _by_rows(sharding, d)
    for number, spans in enumerate(every[:MAX_LANES]):
        found = list(itertools.islice(_pieces_of(spans, owners), MAX_BLOCKS))
        groups = []
        for (origin, owner), same in itertools.groupby(found, key=lambda piece: piece[:2]):
            runs = tuple(run for _, _, run in same)
            devices = tuple(numbers[index == owner].tolist())
            text = _beyond_text(dim.overlap, origin, runs) if origin in ("before", "after") else ""
            groups.append(RowGroup(n_rows(runs), origin, devices, text))
        ahead = itertools.takewhile(lambda group: group.origin == "before", groups)
        before = sum(group.rows for group in ahead)
        inside = (run.start for origin, _, run in found if origin in ("own", "near"))
        start = -before if before else next(inside, length)
        yield Lane(tuple(numbers[index == number].tolist()), start, tuple(groups))


def _pieces_of(spans: Iterable[RowSpan], owners: Pieces) -> Iterator[tuple[str, int, Run]]:
    """The rows of a block as runs with one owner each, -1 for none: (origin, owner, run)."""
    stops = owners.start + owners.length
    for whole, origin in spans:
        for run in (whole,) if whole.start == FILL else unrolled((whole,)):
            start, stop = run.start, run.start + run.length
            while start != FILL and start < stop:
                i = int(np.searchsorted(stops, start, side="right"))
                end = min(stop, int(stops[i])) if i < len(stops) else stop
                yield origin, int(owners.block[i]) if i < len(stops) else -1, Run(start, end - start)
                start = end
            if run.start == FILL:
                yield origin, -1, run


def _beyond_text(overlap: Overlap, origin: str, runs: Runs) -> str:
    """Text for rows beyond an end of the array: the value or the rows in their place, or × for none."""
    boundary = boundary_at(unfolded(overlap), origin)
    if runs[0].start == FILL:
        return "×" if isinstance(overlap, Fold) else f"{boundary.value:g}"
    return "-" * (boundary.sign < 0) + rows_text(runs, most=2).replace(", ", ",")


def _roles(sharding: Sharding) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Parts of a dim, addends, copies or replicas: devices along the axes of the mesh."""
    layout = sharding.layout
    yield from ((dim.name, dim.axes) for dim in layout.dims)
    yield from layout.tags
    yield "replicas", tuple(a for a in sharding.mesh.long_axes if a not in layout.axes)


def _owned_shape(sharding: Sharding, device: int) -> tuple[int, ...]:
    return tuple(n_rows(sharding.owned(d, device)) for d in range(len(sharding.shape)))


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
