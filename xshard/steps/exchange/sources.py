"""The sources of rows: parts of a block beyond poles, and which device sends the rows of a dim to which."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xshard.caches import layout_cache
from xshard.layout import Mesh, Sharding
from xshard.layout.block_rows import all_held_rows
from xshard.layout.pieces import shared_rows
from xshard.layout.providers import STRAIGHT, lacking, offered_rows, rows_at_hand, wanted_rows
from xshard.layout.runs import (
    Intervals,
    Rows,
    Runs,
    Segment,
    as_intervals,
    common_segments,
    extents,
    n_rows,
)
from xshard.layout.validation import rolled_dim
from xshard.notation.overlap import Fold, ends_of
from xshard.notation.parser import Dim


class View(NamedTuple):
    """A part of a block: per dim its side and the number added to its rows; and the factor of its values."""

    sides: tuple[str, ...]
    shifts: tuple[int, ...]
    sign: int = 1


@layout_cache(maxsize=8192)
def views(sharding: Sharding, carried: tuple[int, ...] = ()) -> tuple[View, ...]:
    """All views of a block, one if no dim has a pole; `carried` dims are not split into sides."""
    dims = sharding.layout.dims
    shape = sharding.shape
    poles: dict[
        tuple[int, str], tuple[int | None, int]
    ] = {}  # (dim, end) -> dim that is rolled, sign
    for d, dim in enumerate(dims):
        for end, rule in zip(("before", "after"), ends_of(dim.overlap), strict=False):
            if rule.kind == "pole" and d not in carried:
                poles[d, end] = rolled_dim(dims, d, rule, shape), rule.sign
    every = range(len(dims))
    options = [
        (STRAIGHT, *(end for end in ("before", "after") if (d, end) in poles)) for d in every
    ]
    result = []
    for sides in itertools.product(*options):
        shifts = [0] * len(dims)
        sign = 1
        for d, side in enumerate(sides):
            if side != STRAIGHT:
                rolled, factor = poles[d, side]
                if rolled is not None:
                    shifts[rolled] = (shifts[rolled] + shape[rolled] // 2) % max(shape[rolled], 1)
                sign *= factor
        result.append(View(sides, tuple(shifts), sign))
    return tuple(result)


def carried_dims(before: Sharding, after: Sharding) -> tuple[int, ...]:
    """Dims with the same overlap before and after: all their rows stay on their device."""
    dims = zip(before.layout.dims, after.layout.dims, strict=True)
    return tuple(d for d, (a, b) in enumerate(dims) if a.overlap is not None and a == b)


CARRIED = "carried"  # side of a dim with rows that all stay on their device


class DimEnd(NamedTuple):
    """A dim before or after a move, the sizes of its axes, and its rows: on a side of a pole, shifted."""

    dim: Dim
    length: int
    sizes: tuple[int, ...]
    side: str = STRAIGHT
    shift: int = 0

    @property
    def is_plain(self) -> bool:
        return self.dim.overlap is None and not self.shift


def dim_end(sharding: Sharding, d: int, *view: Any) -> DimEnd:
    """One dim of a sharding. view: its side and shift."""
    dim = sharding.layout.dims[d]
    return DimEnd(dim, sharding.shape[d], sharding.mesh.sizes_of(dim.axes), *view)


class Source(NamedTuple):
    """Rows that a receiver takes from one sender; sender: its index along the axes of the source's dim."""

    sender: int
    segments: tuple[Segment, ...]


@layout_cache(maxsize=65536)
def sources(
    src: DimEnd, dst: DimEnd, me: int, at: int, once: bool, sender: int | None
) -> tuple[Source, ...]:
    """The rows that one device takes, by sender (each, or one); once: from their providers, even its own."""
    senders = np.arange(math.prod(src.sizes)) if sender is None else np.array([sender])
    if dst.side == CARRIED:
        n = n_rows(all_held_rows(*src[:3])[me])
        return (Source(me, (Segment(0, 0, n),)),) if n and me in senders else ()
    own, rows = _asked(src, dst, me, at, once)
    taken = [Source(me, own)] if me in senders else []
    lists = offered_rows(*src)
    wanted = as_intervals(rows) if isinstance(rows, Rows) else extents([(run,) for run in rows])
    offered = _offered_extents(src)[senders]
    meets = (offered[:, None, 0] < wanted[None, :, 1]) & (wanted[None, :, 0] < offered[:, None, 1])
    for i in senders[meets.any(axis=1)].tolist():  # only these are compared run by run
        taken += [Source(i, common_segments(runs, rows)) for runs in lists[i]]
    return tuple(source for source in taken if source.segments)


def _asked(
    src: DimEnd, dst: DimEnd, me: int, at: int, once: bool
) -> tuple[tuple[Segment, ...], Runs]:
    """Runs that a device takes from its own block, and the rows that it takes from others that offer them."""
    rows = wanted_rows(*dst)[at]
    if src.is_plain or isinstance(src.dim.overlap, Fold):
        return (), rows
    if src.side != STRAIGHT:
        return (), ()  # rows beyond a pole are copies of rows inside the array
    if once:
        return (), rows
    own = rows_at_hand(*src[:3], src.shift)[me]
    return common_segments(own, rows), lacking(rows, own)


@layout_cache(maxsize=4096)
def _offered_extents(src: DimEnd) -> Intervals:
    lists = offered_rows(*src)
    return extents([each[0] if len(each) == 1 else tuple(itertools.chain(*each)) for each in lists])


class Received(NamedTuple):
    """Arrays over the mesh: the elements that each device takes, and the number of their senders."""

    elements: NDArray[np.int64]
    senders: NDArray[np.int64]


def count_sources(
    src: DimEnd, dst: DimEnd, fixed: tuple[str, ...], mesh: Mesh, once: bool
) -> Received:
    """How many rows each device takes from senders with its coordinates along `fixed`, and from how many."""
    axes = [a for a in mesh.axes if a in src.dim.axes or a in dst.dim.axes]
    devices = mesh.group(0, axes)
    me, at = ([mesh.index(device, end.dim.axes) for device in devices] for end in (src, dst))
    lists: tuple[tuple[Runs, ...], ...] = ()
    blocks: list[Runs] = [()] * len(devices)
    if dst.side == CARRIED:
        held = all_held_rows(*src[:3])
        mine = [n_rows(held[i]) for i in me]
    else:
        asked = [_asked(src, dst, *places, once) for places in zip(me, at, strict=True)]
        mine = [sum(s.length for s in own) for own, _ in asked]
        blocks = [rows for _, rows in asked]
        lists = offered_rows(*src)
    takers, givers, rows = shared_rows([runs for each in lists for runs in each], blocks)
    owners = np.array([i for i, each in enumerate(lists) for _ in each], np.int64)
    takers = np.concatenate([np.arange(len(devices)), takers])
    givers = np.concatenate([me, owners[givers]])
    rows = np.concatenate([mine, rows])
    agree = rows > 0
    here, there = (coords_of(indices, src.sizes) for indices in (np.array(me)[takers], givers))
    for axis, ours, theirs in zip(src.dim.axes, here, there, strict=True):
        agree &= (axis not in fixed) | (ours == theirs)
    # A sender that gives several layers of a fold is one sender.
    pairs = np.unique(takers[agree] * math.prod(src.sizes) + givers[agree]) // math.prod(src.sizes)
    elements, senders = np.zeros((2, len(devices)), np.int64)
    np.add.at(elements, takers[agree], rows[agree])
    np.add.at(senders, pairs, 1)
    # Arrays over the axes of both dims, which broadcast over the mesh.
    shape = [n if a in axes else 1 for a, n in zip(mesh.axes, mesh.sizes, strict=True)]
    return Received(elements.reshape(shape), senders.reshape(shape))


def coords_of(indices: NDArray[np.int64], sizes: tuple[int, ...]) -> tuple[NDArray[np.int64], ...]:
    """Indices along some axes, row-major -> the coordinate along each."""
    return np.unravel_index(indices, sizes) if sizes else ()


def dim_ends(
    before: Sharding, after: Sharding, mine: View, theirs: View
) -> Iterator[tuple[DimEnd, DimEnd]]:
    """Per dim, its source and its destination in one pair of views."""
    stay = carried_dims(before, after)
    for d, shifts in enumerate(zip(theirs.shifts, mine.shifts, strict=True)):
        sides = (
            (CARRIED, CARRIED)
            if d in stay and not any(shifts)
            else (theirs.sides[d], mine.sides[d])
        )
        yield dim_end(before, d, sides[0], shifts[0]), dim_end(after, d, sides[1], shifts[1])


def view_pairs(before: Sharding, after: Sharding) -> Iterator[tuple[View, View]]:
    """Pairs (view of the destination, view of the source that may supply it)."""
    stay = carried_dims(before, after)
    return itertools.product(views(after, stay), views(before, stay))
