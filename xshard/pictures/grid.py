"""A picture of a sharding as data: the blocks of the global array, and the devices that own each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xshard.errors import ShapeError
from xshard.layout import Sharding
from xshard.layout.runs import n_rows
from xshard.notation.overlap import Fold, Halo, Reads, Window
from xshard.notation.parser import SEGMENTS, Dim
from xshard.pictures.rows import MAX_BLOCKS, Lane, devices_text, lanes_of, rows_in_order

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
    """A drawn dim: its blocks (start, stop) in order, their owners along the dim's axes, and its lanes.

    The blocks end before `length` if there are too many; lanes: the first blocks with their overlaps.
    """

    dim: Dim
    length: int
    blocks: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    lanes: tuple[Lane, ...] = ()

    @property
    def n_drawn(self) -> int:
        """Rows in the blocks, and 1 for an empty dim."""
        return self.blocks[-1][1] if self.blocks else 1

    @property
    def head(self) -> str:
        return f"{self.dim.name} {self.length}" if self.dim.name else ""

    @property
    def texts(self) -> list[str]:
        """The rows of every block, as in `0-3`."""
        return [
            f"{a}-{b - 1}" if a < b - 1 else f"{a}" if self.dim.name else "" for a, b in self.blocks
        ]


NO_DIM = Strip(Dim(""), 1, ((0, 1),), (0,))  # rows or columns of an array of fewer dims


@dataclass(frozen=True, eq=False)
class Picture:
    """The blocks of an array and the devices that own them, by number.

    sides: the strips of rows and columns. cards: the array once for each place along the axes in `roles`, as
    the owners of its blocks in rows and columns. roles: how the cards along some axes relate, by a tag,
    `replicas`, or the name of a sharded dim that is not drawn. empty: devices without elements. notes: the
    roles of the mesh axes, in words.
    """

    sharding: Sharding
    sides: tuple[Strip, Strip]
    cards: NDArray[np.int64]
    roles: tuple[tuple[str, tuple[str, ...]], ...]
    empty: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def strips(self) -> tuple[Strip, ...]:
        """The drawn dims, at most two."""
        return tuple(side for side in self.sides if side.dim.name)

    @property
    def has_replicas(self) -> bool:
        return any(role == "replicas" for role, _ in self.roles)


def picture(sharding: Sharding, dims: Sequence[str] = (), devices: Sequence[int] = ()) -> Picture:
    """A sharding -> its picture along one or two dims, by default sharded ones first.

    devices: the number of every device of the mesh, in its order; 0, 1, 2, ... by default.
    """
    drawn = _drawn(sharding, dims)
    layout = sharding.layout
    mesh = sharding.mesh
    numbers = np.array(devices or range(mesh.n_devices))
    *_, down, across = (NO_DIM, NO_DIM, *(_strip(sharding, d, numbers) for d in drawn))
    others = set(mesh.long_axes).difference(down.dim.axes, across.dim.axes)
    replicas = "replicas", tuple(axis for axis in mesh.long_axes if axis not in layout.axes)
    every = *((dim.name, dim.axes) for dim in layout.dims), *layout.tags, replicas
    named = ((role, tuple(axis for axis in axes if axis in others)) for role, axes in every)
    roles = tuple((role, axes) for role, axes in named if axes)
    along = tuple(axis for _, axes in roles for axis in axes), down.dim.axes, across.dim.axes
    table = np.zeros([mesh.size(*axes) for axes in along], np.int64)  # card, row, column
    table[tuple(map(mesh.indices, along))] = numbers
    rows, columns = (np.array(side.owners, np.int64) for side in (down, across))
    dims_of = range(len(sharding.shape))
    is_empty = [
        not all(n_rows(sharding.owned(d, i)) for d in dims_of) for i in range(mesh.n_devices)
    ]
    cards = table[:, rows[:, None], columns]
    empty = tuple(numbers[is_empty].tolist())
    return Picture(sharding, (down, across), cards, roles, empty, _notes(sharding, drawn))


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
    cut_off = (strip for strip in drawn.strips if strip.n_drawn < strip.length)
    marks = [
        f"only the first {s.n_drawn} of {s.length} rows of {s.dim.name} are drawn" for s in cut_off
    ]
    return marks + [f"empty: d{devices_text(drawn.empty)}"] * bool(drawn.empty)


def _drawn(sharding: Sharding, dims: Sequence[str]) -> tuple[int, ...]:
    names = sharding.layout.names
    for name in dims:
        if name not in names:
            raise ShapeError(
                f"no dim {name!r} in '{sharding.layout}'", hint=f"dims are: {', '.join(names)}"
            )
    if len(dims) > 2 or len(set(dims)) < len(dims):
        raise ShapeError(f"a picture has one or two dims, not {', '.join(dims)}")
    if dims:
        return tuple(map(names.index, dims))
    cut = [d for d, dim in enumerate(sharding.layout.dims) if dim.axes]
    whole = [d for d in reversed(range(len(names))) if d not in cut]
    return tuple(sorted((*cut, *whole)[:2]))


def _strip(sharding: Sharding, d: int, numbers: NDArray[np.int64]) -> Strip:
    """The blocks between all positions where rows of some device begin or end."""
    length = sharding.shape[d]
    rows = rows_in_order(sharding, d)
    edges = np.unique(np.concatenate([rows.start, rows.start + rows.length, [0, length]]))[
        : MAX_BLOCKS + 1
    ]
    owners = rows.block[np.searchsorted(rows.start, edges[:-1], side="right") - 1]
    blocks = tuple(itertools.pairwise(edges.tolist()))
    lanes = tuple(lanes_of(sharding, d, numbers))
    return Strip(sharding.layout.dims[d], length, blocks, tuple(owners.tolist()), lanes)


def _notes(sharding: Sharding, drawn: tuple[int, ...]) -> tuple[str, ...]:
    layout = sharding.layout
    mesh = sharding.mesh
    shards = [(dim.name, shard) for dim in layout.dims for shard in dim.shards]
    cuts = [
        f"{name} is cut over {' x '.join(s.axes)}, {_ORDER_TEXT[s.order]}" for name, s in shards
    ]
    wide = [dim for dim in layout.dims if dim.overlap is not None]
    overlaps = [f"{d.name} overlaps: {_OVERLAP_TEXT[type(d.overlap)]} ({d.overlap})" for d in wide]
    tags = [f"along {', '.join(axes)} {_TAG_TEXT[kind]}" for kind, axes in layout.tags]
    replicas = [a for a in mesh.long_axes if a not in layout.axes]
    whole = (
        [f"along {', '.join(replicas)} all devices hold the same values (replicas)"]
        if replicas
        else []
    )
    others = [dim.name for d, dim in enumerate(layout.dims) if dim.axes and d not in drawn]
    flat = [
        f"not drawn: {', '.join(others)}, cut too; devices that share a block here differ there"
    ]
    return (*cuts, *overlaps, *tags, *whole, *(flat if others else ()))
