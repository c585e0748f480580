"""What moves cost, as cheaply as the question allows: a bound from numbers alone, a guess, or a price.

Decides nothing about contractions. A move is between two layouts of one array on one mesh. Its price is that
of the best of a few paths, which is seldom above the plan's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from xshard import dtypes
from xshard.contractions.places import Use
from xshard.cost.model import Profile
from xshard.layout import Layout, Mesh, Sharding
from xshard.plans.plan import Plan, find_plan
from xshard.search.a_star import Search
from xshard.search.guess import guess
from xshard.search.request import Request
from xshard.search.solve import without_copies
from xshard.search.states import Space

BOUND, GUESS, PRICE = range(3)  # what is known of a move


class Move(NamedTuple):
    """An array of a shape is to go from one layout to another."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]

    @property
    def dual(self) -> Move:
        """The move of the gradient."""
        return Move(self.dst.dual, self.src.dual, self.shape)


@dataclass(eq=False)
class Leg:
    """A move of which more is known the closer it is looked at: its seconds so far, and what makes it."""

    seconds: float
    make: Callable[[], Move]
    level: int = BOUND

    @cached_property
    def move(self) -> Move:
        """The move itself: layouts are made where they are asked for."""
        return self.make()


class _Known(NamedTuple):
    level: int
    seconds: float


@dataclass(frozen=True)
class Prices:
    """The prices of moves on one mesh, each found once."""

    mesh: Mesh
    dtype: str
    profile: Profile
    _known: dict[Move, _Known] = field(default_factory=dict)
    _ends: dict[tuple[Layout, tuple[int, ...]], Sharding] = field(default_factory=dict)
    _sizes: dict[frozenset[str], int] = field(default_factory=dict)

    def plan(self, move: Move) -> Plan:
        """The cheapest plan of a move."""
        devices = range(self.mesh.n_devices)
        ends = move.src, move.dst, self.mesh, self.mesh, devices, devices
        return find_plan(Request(*ends, move.shape, self.dtype, self.profile))

    def least(self, before: Use, after: Use, shape: tuple[int, ...]) -> float:
        """Seconds that a move of an array takes, at least."""
        received = self._received(before, after, math.prod(shape))
        return received * self._second_per_element + self._start if received else 0.0

    def look_closer(self, leg: Leg) -> bool:
        """Guess what a move costs after its bound, find its price after the guess; tells if that was new."""
        move = leg.move
        start, goal = self._end(move.src, move.shape), self._end(move.dst, move.shape)
        key = Move(start.layout, goal.layout, move.shape)  # copies and replicas cost the same
        known = self._known.get(key)
        is_new = known is None or known.level <= leg.level
        if known is None or is_new:
            known = self._known[key] = self._closer(start, goal, leg)
        leg.level, leg.seconds = known
        return is_new

    def _closer(self, start: Sharding, goal: Sharding, leg: Leg) -> _Known:
        if start.layout == goal.layout:
            return _Known(PRICE, 0.0)
        search = Search(Space(start, goal, self.dtype, self.profile), None, directed=True)
        if leg.level == BOUND:
            seconds, is_price = guess(search.space)
            return _Known(PRICE if is_price else GUESS, max(search.least, seconds))
        return _Known(PRICE, search.path().seconds)

    def _end(self, layout: Layout, shape: tuple[int, ...]) -> Sharding:
        """A layout in normal form and without copies."""
        found = self._ends.get((layout, shape))
        if found is None:
            end = Sharding(layout, self.mesh, shape)
            found = self._ends[layout, shape] = without_copies(end.with_layout(end.normal))
        return found

    def _received(self, before: Use, after: Use, elements: int) -> int:
        """Elements that the busiest device must receive, at least."""
        if ended := before.sums - after.sums:
            # Each of n addends but one is sent, and the sum to each of m copies but one.
            kept, n = self._size(after.sums & before.sums), self.mesh.n_devices
            copies = n // self._size(after.sums.union(*(cut.axes for cut in after.cuts)))
            return -(-elements * (self._size(ended) + copies - 2) * kept // n)
        if after.sums - before.sums:
            return 0
        rows = [(cut.rows, old.rows) for old, cut in zip(before.cuts, after.cuts, strict=True)]
        return math.prod([there for there, _ in rows]) - math.prod(map(min, rows))

    def _size(self, axes: frozenset[str]) -> int:
        """The number of devices along some axes."""
        found = self._sizes.get(axes)
        if found is None:
            found = self._sizes[axes] = self.mesh.size(*axes)
        return found

    @cached_property
    def _second_per_element(self) -> float:
        links = self.profile.fabric(self.mesh).links
        return dtypes.itemsize(self.dtype) / max((link.bytes_per_s for link in links), default=1.0)

    @cached_property
    def _start(self) -> float:
        """Seconds before the first byte of any move comes."""
        links = self.profile.fabric(self.mesh).links
        launch = min((s for _, s in self.profile.launch_s), default=0.0)
        return launch + min((link.latency_s for link in links), default=0.0)
