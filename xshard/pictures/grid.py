"""A picture of a sharding as data: the blocks of the global array, and the devices that own each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xshard.errors import ShapeError
from xshard.layout import Sharding
from xshard.layout.runs import n_rows, pieces
from xshard.notation.overlap import Fold, Halo, Reads, Window
from xshard.notation.parser import SEGMENTS, Dim
from xshard.pictures.rows import MAX_BLOCKS, Lane, devices_text, first_pieces, lanes_of, rows_in_order

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
    """A drawn dim: its blocks (start, stop) in order, and with an overlap the first of them as lanes.

    hidden: the number of rows after the blocks, which are not drawn.
    """

    dim: Dim
    length: int
    blocks: tuple[tuple[int, int], ...]
    hidden: int = 0
    lanes: tuple[Lane, ...] = ()

    @property
    def n_drawn(self) -> int:
        return max(self.length - self.hidden, 1)

    @property
    def head(self) -> str:
        return f"{self.dim.name} {self.length}" if self.dim.name else ""

    @property
    def texts(self) -> list[str]:
        """The rows of every block, as in `0-3`."""
        return [f"{a}-{b - 1}" if a < b - 1 else f"{a}" if self.dim.name else "" for a, b in self.blocks]


NO_DIM = Strip(Dim(""), 1, ((0, 1),))


@dataclass(frozen=True, eq=False)
class Picture:
    """The blocks of an array and the devices that own them, by number.

    strips: the drawn dims, at most two. cards: the array once for each place along the axes in `roles`; per
    card, a row of owners per block of the first strip and a column per block of the last. roles: how the
    cards along some axes relate, by a tag, `replicas`, or the name of a sharded dim that is not drawn.
    empty: devices without elements. notes: the roles of the mesh axes, in words.
    """

    sharding: Sharding
    strips: tuple[Strip, ...]
    cards: NDArray[np.int64]
    roles: tuple[tuple[str, tuple[str, ...]], ...]
    empty: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def sides(self) -> tuple[Strip, ...]:
        """The strips of rows and of columns."""
        return (NO_DIM, NO_DIM, *self.strips)[-2:]

    @property
    def has_replicas(self) -> bool:
        return any(role == "replicas" for role, _ in self.roles)


def picture(sharding: Sharding, dims: Sequence[str] = (), devices: Sequence[int] = ()) -> Picture:
    """A sharding -> its picture along one or two dims, by default sharded ones first.

    devices: the number of every device of the mesh, in its order; 0, 1, 2, ... by default.
    """
    drawn, mesh = _drawn(sharding, dims), sharding.mesh
    numbers = np.array(devices or range(mesh.n_devices))
    strips = tuple(_strip(sharding, d, numbers) for d in drawn)
    others = set(mesh.long_axes) - {axis for strip in strips for axis in strip.dim.axes}
    every = ((role, tuple(a for a in along if a in others)) for role, along in _roles(sharding))
    roles = tuple((role, along) for role, along in every if along)
    cards = _cards(sharding, drawn, strips, [axis for _, names in roles for axis in names], numbers)
    shapes = (
        [n_rows(sharding.owned(d, i)) for d in range(len(sharding.shape))] for i in range(mesh.n_devices)
    )
    empty = tuple(numbers[[0 in shape for shape in shapes]].tolist())
    return Picture(sharding, strips, cards, roles, empty, _notes(sharding, drawn))


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


def reading(drawn: Picture) -> list[str]:
    """Explanations of the marks in this picture."""
    cut_off = (strip for strip in drawn.strips if strip.hidden)
    marks = [f"only the first {s.n_drawn} of {s.length} rows of {s.dim.name} are drawn" for s in cut_off]
    return marks + [f"empty: d{devices_text(drawn.empty)}"] * bool(drawn.empty)


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


def _strip(sharding: Sharding, d: int, numbers: NDArray[np.int64]) -> Strip:
    """The blocks between all positions where rows of some device begin or end."""
    length, rows = sharding.shape[d], pieces(map(first_pieces, sharding.owners(d)))
    edges = np.unique(np.concatenate([rows.start, rows.start + rows.length, [0, length]]))
    edges = edges[: MAX_BLOCKS + 1].tolist()
    blocks, lanes = tuple(itertools.pairwise(edges)), tuple(lanes_of(sharding, d, numbers))
    return Strip(sharding.layout.dims[d], length, blocks, length - edges[-1], lanes)


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
        rows = rows_in_order(sharding, d)
        first = [start for start, _ in strip.blocks]
        owners.append(rows.block[np.searchsorted(rows.start, first, side="right") - 1])
    cards = np.array([mesh.index(device, axes) for device in every])
    table = np.zeros((max(cards) + 1, *(max(place) + 1 for place in places[-2:])), np.int64)
    table[cards, places[-2], places[-1]] = numbers
    return table[:, owners[-2][:, None], owners[-1]]


def _roles(sharding: Sharding) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Parts of a dim, addends, copies or replicas: devices along the axes of the mesh."""
    layout = sharding.layout
    yield from ((dim.name, dim.axes) for dim in layout.dims)
    yield from layout.tags
    yield "replicas", tuple(a for a in sharding.mesh.long_axes if a not in layout.axes)


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
