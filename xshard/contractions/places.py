"""Where a contraction may be computed: what every mesh axis does while all devices contract their blocks.

Decides which places are tried. An axis cuts a dim, inside or outside of the axes that cut it already; or
holds the addends of an operand that brings them; or copies, where the result is to hold them; or it is idle:
devices along it hold replicas and repeat each other's work. Knows no price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from xshard.contractions.memory import accesses
from xshard.layout import Layout, Sharding
from xshard.layout.partition import block_length, misfit
from xshard.notation.parser import Dim, Shard
from xshard.steps.base import axes_of

MAX_PLACES = 5000  # where there are more, the best is looked for from what the ends do, a change at a time

Axes = frozenset[str]


@dataclass(frozen=True, eq=False)
class Cut:
    """How a dim of some length is cut, outermost first; rows: of the longest block. fits: whether it can be.

    One object for every way to cut a dim, so that places are compared and looked up by identity.
    """

    shards: tuple[Shard, ...]
    axes: Axes
    rows: int
    fits: bool


class Place(NamedTuple):
    """What the axes do: the cuts of every dim, in the order of `Ends.lengths`; those not busy are idle.

    sums: axes with the operand whose addends they hold. copies: axes along which all operands are copies.
    """

    cuts: tuple[Cut, ...]
    sums: tuple[tuple[str, int], ...]
    copies: tuple[str, ...]
    busy: Axes

    @property
    def fits(self) -> bool:
        """Whether every dim is as long as its cuts say, if they say it."""
        return all(cut.fits for cut in self.cuts)

    @classmethod
    def of(
        cls, cuts: tuple[Cut, ...], sums: tuple[tuple[str, int], ...] = (), copies: tuple[str, ...] = ()
    ) -> Place:
        """With the axes that are not idle."""
        return cls(cuts, sums, copies, Axes(copies).union((a for a, _ in sums), *(cut.axes for cut in cuts)))


class Use(NamedTuple):
    """How an array lies on the mesh: the cuts of its dims, the axes that hold its addends and its copies."""

    cuts: tuple[Cut, ...]
    sums: Axes
    copies: Axes

    @property
    def dual(self) -> Use:
        """Of the gradient."""
        return Use(self.cuts, self.copies, self.sums)


@dataclass(frozen=True)
class Ends:
    """The operands where they are, the result where it is to be: all that places are made from."""

    operands: tuple[Sharding, ...]
    result: Sharding

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Of every dim, in the order of the operands."""
        return {
            name: length
            for operand in self.operands
            for name, length in zip(operand.layout.names, operand.shape, strict=True)
        }

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device."""
        mesh = self.result.mesh
        return tuple(a for a in mesh.axes if mesh.size(a) > 1)

    @cached_property
    def _shards(self) -> tuple[tuple[Shard, ...], ...]:
        """The cuts that a dim may have: as an end cuts it, else one axis each, in contiguous blocks."""
        found: dict[str, dict[Shard, None]] = {name: {} for name in self.lengths}
        for end in (*self.operands, self.result):
            for dim in end.normal.dims:
                found[dim.name] |= dict.fromkeys(dim.shards)
        for shards in found.values():
            odd = {a for s in shards for a in s.axes if s.order != "block" or len(s.axes) > 1}
            shards |= dict.fromkeys(Shard((a,)) for a in self.axes if a not in odd)
        return tuple(map(tuple, found.values()))

    def places(self) -> Iterator[Place]:
        """All places, each once."""
        yield from self._placed(self.idle, Axes(self.axes))

    @cached_property
    def idle(self) -> Place:
        """Where every device contracts all."""
        return Place.of(tuple(self.cut(d, ()) for d in range(len(self.lengths))))

    def _placed(self, place: Place, free: Axes) -> Iterator[Place]:
        axis = next((a for a in self.axes if a in free), None)
        if axis is None:
            if place.fits:
                yield place
            return
        for found in self._with_axis(place, axis, free):
            yield from self._placed(found, free - found.busy - {axis})

    def _with_axis(self, place: Place, axis: str, free: Axes) -> Iterator[Place]:
        """A place in which an axis is idle, and those in which it does anything else, with free axes only."""
        yield place
        cuts, sums, copies, busy = place
        for d, cut in enumerate(cuts):
            for more, axes in self._longer(d, cut, axis):
                if axes <= free:
                    yield Place((*cuts[:d], more, *cuts[d + 1 :]), sums, copies, busy | axes)
        for i, operand in enumerate(self.operands):
            if axis in operand.layout.tagged("sum", "mean"):
                yield Place(cuts, (*sums, (axis, i)), copies, busy | {axis})
        if axis in self.result.layout.tagged("copy"):
            yield Place(cuts, sums, (*copies, axis), busy | {axis})

    def _longer(self, d: int, cut: Cut, axis: str) -> list[tuple[Cut, Axes]]:
        """The ways to cut a dim once more by an axis, each with the axes that it needs."""
        found = self._known_longer.get((d, cut, axis))
        if found is None:
            mesh, found = self.result.mesh, list[tuple[Cut, Axes]]()
            self._known_longer[d, cut, axis] = found
            for shard in self._shards[d]:
                for at in range(len(cut.shards) + 1) if axis in shard.axes else ():
                    shards = (*cut.shards[:at], shard, *cut.shards[at:])
                    if shards in self._named or mesh.size(*axes_of(shards)) <= self._all_lengths[d]:
                        found.append((self.cut(d, shards), Axes(shard.axes)))
        return found

    @cached_property
    def _known_longer(self) -> dict[tuple[int, Cut, str], list[tuple[Cut, Axes]]]:
        return {}

    def cut(self, d: int, shards: tuple[Shard, ...]) -> Cut:
        """A way to cut dim `d`."""
        found = self._cuts.get((d, shards))
        if found is None:
            dim, length = Dim("", shards), self._all_lengths[d]
            sizes = self.result.mesh.sizes_of(dim.axes)
            rows, fits = block_length(dim, length, sizes)[0], misfit(dim, length, sizes) is None
            found = self._cuts[d, shards] = Cut(shards, Axes(dim.axes).intersection(self.axes), rows, fits)
        return found

    @cached_property
    def _cuts(self) -> dict[tuple[int, tuple[Shard, ...]], Cut]:
        return {}

    @cached_property
    def _all_lengths(self) -> tuple[int, ...]:
        return tuple(self.lengths.values())

    def neighbours(self, place: Place) -> Iterator[Place]:
        """The places in which one axis, with those that are cut by it in one, does something else."""
        for axis in self.axes:
            cuts = tuple(
                self.cut(d, tuple(s for s in cut.shards if axis not in s.axes)) if axis in cut.axes else cut
                for d, cut in enumerate(place.cuts)
            )
            sums = tuple(pair for pair in place.sums if pair[0] != axis)
            rest = Place.of(cuts, sums, tuple(a for a in place.copies if a != axis))
            found = self._with_axis(rest, axis, Axes(self.axes) - rest.busy)
            yield from (other for other in found if other.fits)

    def seeds(self) -> Iterator[Place]:
        """The place in which all are idle, and those where one of the ends already is."""
        yield self.idle
        for end in (*self.operands, self.result):
            shards = {dim.name: dim.shards for dim in end.normal.dims}
            yield Place.of(tuple(self.cut(d, shards.get(name, ())) for d, name in enumerate(self.lengths)))

    @cached_property
    def _named(self) -> set[tuple[Shard, ...]]:
        """Cuts of whole dims that an end has: they are possible, however short the dim is."""
        return {dim.shards for end in (*self.operands, self.result) for dim in end.normal.dims}

    @cached_property
    def given(self) -> tuple[Use, ...]:
        """How the operands are given, and how the result is wanted."""
        found = []
        for positions, end in zip(self._positions, (*self.operands, self.result), strict=True):
            cuts = (self.cut(d, dim.shards) for d, dim in zip(positions, end.normal.dims, strict=True))
            sums, copies = end.layout.tagged("sum", "mean"), end.layout.tagged("copy")
            found.append(
                Use(tuple(cuts), Axes(sums).intersection(self.axes), Axes(copies).intersection(self.axes))
            )
        return tuple(found)

    def cuts_of(self, place: Place, i: int) -> tuple[Cut, ...]:
        """The cuts of operand `i` there, -1: of the result."""
        return tuple([place.cuts[d] for d in self._positions[i]])

    def used(self, place: Place, i: int) -> Use:
        """How operand `i` is used there, -1: what devices get."""
        cuts, copies = self.cuts_of(place, i), Axes(place.copies)
        others = place.busy.difference(*(cut.axes for cut in cuts))
        if i < 0:
            return Use(cuts, others - copies, copies)
        sums = Axes(axis for axis, owner in place.sums if owner == i)
        return Use(cuts, sums, others - sums)

    def layout(self, place: Place, i: int) -> Layout:
        """The layout under which operand `i` is used there, -1: of what devices get."""
        cuts, sums, copies = self.used(place, i)
        kinds = {axis: self._kind(axis, owner) for axis, owner in place.sums}
        tags = [("copy", tuple(copies)), *((kinds.get(axis, "sum"), (axis,)) for axis in sums)]
        names = (*self.operands, self.result)[i].layout.names
        return Layout(
            tuple(Dim(name, cut.shards) for name, cut in zip(names, cuts, strict=True)), tuple(tags)
        )

    def _kind(self, axis: str, owner: int) -> str:
        return next(kind for kind, axes in self.operands[owner].layout.tags if axis in axes)

    @cached_property
    def _positions(self) -> list[list[int]]:
        """Where the dims of every operand, and then of the result, are among all dims."""
        names = list(self.lengths)
        return [[names.index(name) for name in end.layout.names] for end in (*self.operands, self.result)]

    @cached_property
    def accesses(self) -> tuple[int, ...]:
        """How often each operand, and what devices get, is read or written."""
        return accesses([end.layout.names for end in (*self.operands, self.result)])

    def flops(self, place: Place) -> int:
        """Floating point operations of the busiest device: products of operands, and additions in sums."""
        n = len(self.operands) > 1, len(self.result.shape) < len(self.lengths)
        return sum(n) * math.prod([cut.rows for cut in place.cuts])
