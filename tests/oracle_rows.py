"""Which rows a device has, listed one by one: the part of `oracle.py` that knows one dim.

Simple, so that a reader can check it: numpy pads what lies beyond the ends of an array.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from xshard import Mesh
from xshard.notation.overlap import Reads, Window, unfolded
from xshard.notation.parser import Dim, Shard

Rows = list[int]

PAD_MODES = {"periodic": "wrap", "reflect": "reflect", "edge": "edge", "pole": "symmetric"}
OUTSIDE = -1  # the number of a row, or of an element, that a boundary fills


def cut(length: int, shard: Shard, n: int, index: int) -> list[Rows]:
    """Part `index` of `n` of the rows 0, 1, ...: lists of consecutive rows, each with its own neighbours."""
    order = shard.order
    rows = list(range(length))
    if n == 1:
        return [rows]
    if order == "sizes":
        return [np.split(rows, np.cumsum(shard.numbers)[:-1])[index].tolist()]
    if order == "intervals":
        part = shard.numbers[index]
        return [rows[a:b] for a, b in zip(part[::2], part[1::2], strict=True)]
    if order == "by":
        mine, (named,) = list[Rows](), shard.numbers
        for row in named.map.part(index).tolist():
            if mine and mine[-1][-1] == row - 1:
                mine[-1].append(row)
            else:
                mine.append([row])
        return mine
    if order == "cyclic":
        together = shard.numbers[0] if shard.numbers else 1
        return [rows[i : i + together] for i in range(index * together, length, n * together)]
    if order == "balanced":
        return [np.array_split(rows, n)[index].tolist()]
    found = []
    for piece in (
        np.split(rows, np.cumsum(shard.numbers, dtype=int)[:-1]) if shard.numbers else [rows]
    ):
        chunk = -(-len(piece) // (2 * n if order == "zigzag" else n))
        chunks = (index, 2 * n - 1 - index) if order == "zigzag" else (index,)
        found += [list(map(int, piece[i * chunk :][:chunk])) for i in chunks]
    return found


def pieces(dim: Dim, length: int, mesh: Mesh, device: int) -> list[Rows]:
    """The rows of a dim that a device owns, in local order: lists of consecutive rows."""
    mine = [
        list(range(length // max(dim.unit, 1)))
    ]  # units, as shards of a composed dim count them
    for shard in dim.shards:
        rows = [(at, row) for at, piece in enumerate(mine) for row in piece]
        mine = []
        for part in cut(len(rows), shard, mesh.size(*shard.axes), mesh.index(device, shard.axes)):
            groups = itertools.groupby((rows[i] for i in part), key=lambda pair: pair[0])
            mine += [[row for _, row in group] for _, group in groups]
    unit = dim.unit
    return [[r for u in piece for r in range(u * unit, u * unit + unit)] for piece in mine if piece]


def owned_rows(dim: Dim, length: int, mesh: Mesh, device: int) -> Rows:
    """Global rows of a dim that a device owns, in local order."""
    return [row for piece in pieces(dim, length, mesh, device) for row in piece]


def outputs(dim: Dim, length: int, mesh: Mesh, device: int) -> list[Rows]:
    """The outputs of a window op that a device computes."""
    window = unfolded(dim.overlap)
    n = max(0, (length + sum(window.padding) - window.d * (window.k - 1) - 1) // window.s + 1)
    rule = window.out or ("aligned" if any(shard.order == "sizes" for shard in dim.shards) else "")
    if rule == "balanced":
        return pieces(Dim(dim.name, (Shard(dim.axes, "balanced"),)), n, mesh, device)
    if rule == "aligned":  # the last owner also has those that start beyond the array
        return [
            [o for o in range(n) if piece[0] <= min(o * window.s, length - 1) <= piece[-1]]
            for piece in pieces(dim, length, mesh, device)
        ]
    return pieces(dim, n, mesh, device)


def positions(dim: Dim, length: int, mesh: Mesh, device: int) -> Iterator[int]:
    """The positions of a block's rows in the array, or beyond its ends."""
    overlap = None if dim.overlap is None else unfolded(dim.overlap)
    if isinstance(overlap, Window):
        first = -overlap.padding[0]
        wide = overlap.d * (overlap.k - 1) + 1
        for made in filter(None, outputs(dim, length, mesh, device)):
            yield from range(overlap.s * made[0] + first, overlap.s * made[-1] + first + wide)
        return
    mine = pieces(dim, length, mesh, device)
    if overlap is None:
        yield from itertools.chain(*mine)
        return
    if isinstance(overlap, Reads):
        yield from itertools.chain(
            *mine, overlap.rows.map.part(mesh.index(device, dim.axes)).tolist()
        )
        return
    lo, hi = overlap.widths(at := mesh.index(device, dim.axes))
    if isinstance(overlap.lo, tuple) or isinstance(
        overlap.hi, tuple
    ):  # an empty part has a place too
        group = mesh.group(device, dim.axes)[: at + 1]
        *before, own = (len(owned_rows(dim, length, mesh, each)) for each in group)
        yield from range(sum(before) - lo, sum(before) + own + hi)
        return
    for piece in mine:
        yield from range(piece[0] - lo, piece[-1] + 1 + hi)


class Places(NamedTuple):
    """The rows of a block along one dim: their numbers, what fills those outside, and beyond which pole."""

    row: np.ndarray
    fill: np.ndarray
    pole: np.ndarray  # "before" or "after", empty for rows that come from beyond neither

    @classmethod
    def of(cls, found: list[tuple[int, float, str]]) -> Places:
        columns = list(zip(*found, strict=True)) or [(), (), ()]
        return cls(
            np.array(columns[0], int), np.array(columns[1], float), np.array(columns[2], str)
        )


@lru_cache(maxsize=4096)
def places(dim: Dim, length: int, mesh: Mesh, device: int) -> Places:
    """What stands in a device's block along a dim; of a fold, what its rows are contributions to."""
    overlap = None if dim.overlap is None else unfolded(dim.overlap)
    found = []
    for at in positions(dim, length, mesh, device):
        if 0 <= at < length:
            found.append((at, 0.0, ""))
            continue
        end = "before" if at < 0 else "after"
        boundary = getattr(overlap, end)
        if boundary.kind in PAD_MODES:
            wide = max(-at, at - length + 1)
            row = np.pad(np.arange(length), wide, PAD_MODES[boundary.kind])[at + wide]
            found.append(
                (int(row), 0.0, end if boundary.kind == "pole" and at // length % 2 else "")
            )
        elif boundary.kind != "none":
            found.append((OUTSIDE, boundary.value, ""))
    return Places.of(found)


def held_rows(dim: Dim, length: int, mesh: Mesh, device: int) -> list[int | None]:
    """Global rows of a device's block, with its overlap; None for rows outside the array."""
    return [
        None if row == OUTSIDE else row for row in places(dim, length, mesh, device).row.tolist()
    ]
