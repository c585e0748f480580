"""Where a contraction may be computed: what every mesh axis does while all devices contract their blocks.

Decides which places are tried. An axis cuts a dim, inside or outside of the axes that cut it already; or
holds the addends of an operand that brings them; or copies, where the result is to hold them; or it is idle:
devices along it hold replicas and repeat each other's work. Knows no price.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from xshard.layout import Layout, Sharding
from xshard.layout.partition import block_length
from xshard.notation.parser import Dim, Shard
from xshard.steps.base import axes_of

MAX_PLACES = 5000  # where there are more, the best is looked for from what the ends do, a change at a time

Cut = tuple[Shard, ...]


@dataclass(frozen=True)
class Place:
    """What the axes do: the cuts of every dim, in the order of `Ends.lengths`; the rest are idle.

    sums: axes with the operand whose addends they hold. copies: axes along which all operands are copies.
    """

    cuts: tuple[Cut, ...]
    sums: tuple[tuple[str, int], ...] = ()
    copies: tuple[str, ...] = ()

    @cached_property
    def busy(self) -> tuple[str, ...]:
        """The axes that are not idle."""
        cut = (axis for shards in self.cuts for axis in axes_of(shards))
        return (*cut, *(axis for axis, _ in self.sums), *self.copies)


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
    def _shards(self) -> dict[str, tuple[Shard, ...]]:
        """The cuts that a dim may have: as an end cuts it, else one axis each, in contiguous blocks."""
        found: dict[str, dict[Shard, None]] = {name: {} for name in self.lengths}
        for end in (*self.operands, self.result):
            for dim in end.normal.dims:
                found[dim.name] |= dict.fromkeys(dim.shards)
        for shards in found.values():
            odd = {a for s in shards for a in s.axes if s.order != "block" or len(s.axes) > 1}
            shards |= dict.fromkeys(Shard((a,)) for a in self.axes if a not in odd)
        return {name: tuple(shards) for name, shards in found.items()}

    def places(self) -> Iterator[Place]:
        """All places, each once."""
        yield from self._placed(Place(((),) * len(self.lengths)), self.axes)

    def _placed(self, place: Place, left: Sequence[str]) -> Iterator[Place]:
        if not left:
            yield place
            return
        for found in self.with_axis(place, left[0], left):
            busy = found.busy
            yield from self._placed(found, [a for a in left[1:] if a not in busy])

    def with_axis(self, place: Place, axis: str, free: Sequence[str]) -> Iterator[Place]:
        """A place in which an axis is idle, and those in which it does anything else, with free axes only."""
        yield place
        for d, (name, length) in enumerate(self.lengths.items()):
            for shard in self._shards[name]:
                if axis not in shard.axes or not set(shard.axes) <= set(free):
                    continue
                for at in range(len(place.cuts[d]) + 1):
                    cut = (*place.cuts[d][:at], shard, *place.cuts[d][at:])
                    if self.result.mesh.size(*axes_of(cut)) <= length or cut in self._named:
                        yield replace(place, cuts=(*place.cuts[:d], cut, *place.cuts[d + 1 :]))
        for i, operand in enumerate(self.operands):
            if axis in operand.layout.tagged("sum", "mean"):
                yield replace(place, sums=(*place.sums, (axis, i)))
        if axis in self.result.layout.tagged("copy"):
            yield replace(place, copies=(*place.copies, axis))

    def neighbours(self, place: Place) -> Iterator[Place]:
        """The places in which one axis, with those that are cut by it in one, does something else."""
        for axis in self.axes:
            cuts = tuple(tuple(s for s in cut if axis not in s.axes) for cut in place.cuts)
            sums = tuple(pair for pair in place.sums if pair[0] != axis)
            rest = Place(cuts, sums, tuple(a for a in place.copies if a != axis))
            busy = rest.busy
            yield from self.with_axis(rest, axis, [a for a in self.axes if a not in busy])

    def seeds(self) -> Iterator[Place]:
        """The places where one of the ends already is, and the one in which all are idle."""
        idle = Place(((),) * len(self.lengths))
        yield idle
        for end in (*self.operands, self.result):
            cuts = {dim.name: dim.shards for dim in end.normal.dims}
            yield replace(idle, cuts=tuple(cuts.get(name, ()) for name in self.lengths))

    @cached_property
    def _named(self) -> set[Cut]:
        """Cuts of whole dims that an end has: they are possible, however short the dim is."""
        return {dim.shards for end in (*self.operands, self.result) for dim in end.normal.dims}

    def used(self, place: Place, i: int) -> Layout:
        """The layout under which operand `i` is used there."""
        cuts = tuple(place.cuts[d] for d in self._positions[i])
        sums = frozenset(axis for axis, owner in place.sums if owner == i)
        copies = frozenset(place.busy).difference(sums, *map(axes_of, cuts))
        key = i, cuts, sums, copies
        if key not in self._layouts:
            given = self.operands[i].layout
            kinds = {axis: kind for kind, axes in given.tags for axis in axes}
            tags = [("copy", tuple(copies)), *((kinds[axis], (axis,)) for axis in sums)]
            self._layouts[key] = Layout(tuple(map(Dim, given.names, cuts)), tuple(tags))
        return self._layouts[key]

    def local(self, place: Place) -> Layout:
        """The layout of what devices get there."""
        kept = self._positions[-1]
        cuts = tuple(place.cuts[d] for d in kept)
        summed = frozenset(a for d, cut in enumerate(place.cuts) if d not in kept for a in axes_of(cut))
        key = -1, cuts, summed, frozenset((*place.sums, *place.copies))
        if key not in self._layouts:
            tags = [{a: kind for kind, axes in o.layout.tags for a in axes} for o in self.operands]
            sums = [("sum", tuple(summed)), *((tags[owner][axis], (axis,)) for axis, owner in place.sums)]
            dims = tuple(map(Dim, self.result.layout.names, cuts))
            self._layouts[key] = Layout(dims, (*sums, ("copy", place.copies)))
        return self._layouts[key]

    @cached_property
    def _positions(self) -> list[list[int]]:
        """Where the dims of every operand, and then of the result, are among all dims."""
        names = list(self.lengths)
        return [[names.index(name) for name in end.layout.names] for end in (*self.operands, self.result)]

    @cached_property
    def _layouts(self) -> dict[tuple[object, ...], Layout]:
        return {}  # places share them

    def flops(self, place: Place) -> int:
        """Floating point operations of the busiest device: a product per element, and an addition in sums."""
        n = 1 if len(self.result.shape) == len(self.lengths) else 2
        for length, cut in zip(self.lengths.values(), place.cuts, strict=True):
            rows = self._rows.get((length, cut))
            if rows is None:
                sizes = self.result.mesh.sizes_of(axes_of(cut))
                rows = self._rows[length, cut] = block_length(Dim("", cut), length, sizes)[0]
            n *= rows
        return n

    @cached_property
    def _rows(self) -> dict[tuple[int, Cut], int]:
        return {}
