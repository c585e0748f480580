"""What moves cost, as cheaply as the question allows: a bound from numbers alone, a guess, or a price.

Decides nothing about contractions. A move is between two layouts of one array on one mesh. Its price is the
cost of its plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from xshard import dtypes
from xshard.contractions.places import Cut, Use
from xshard.cost.bounds import least_received
from xshard.cost.model import Profile
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import Dim, Shard
from xshard.plans.plan import Plan, find_plan
from xshard.search.estimate import estimate
from xshard.search.request import Request
from xshard.search.solve import without_copies
from xshard.search.states import Space, State

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
    before: Use
    after: Use
    shape: tuple[int, ...]
    make: Callable[[], Move]
    level: int = BOUND


@dataclass(frozen=True)
class Prices:
    """The prices of moves on one mesh, each found once."""

    mesh: Mesh
    dtype: str
    profile: Profile
    _guesses: dict[tuple[tuple[int, ...], State, State], float] = field(default_factory=dict)
    _spaces: dict[tuple[int, ...], Space] = field(default_factory=dict)
    _cuts: dict[Cut, tuple[int, ...] | None] = field(default_factory=dict)
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

    def look_closer(self, leg: Leg) -> None:
        """Guess what a move costs after its bound, find its price after the guess."""
        if leg.level == BOUND:
            leg.level, leg.seconds = GUESS, max(leg.seconds, self._guess(leg))
        else:
            leg.level, leg.seconds = PRICE, self.plan(leg.make()).cost

    def _guess(self, leg: Leg) -> float:
        start, goal = self._state(leg.before), self._state(leg.after)
        if start is None or goal is None:  # cuts other than the axes' own: a space of the two ends
            move = leg.make()
            ends = [Sharding(layout, self.mesh, leg.shape) for layout in (move.src, move.dst)]
            start_end, goal_end = (without_copies(end.with_layout(end.normal)) for end in ends)
            space = Space(start_end, goal_end, self.dtype, self.profile)
            return estimate(space, space.start_state, space.goal_state)
        key = leg.shape, start, goal
        found = self._guesses.get(key)
        if found is None:
            found = self._guesses[key] = estimate(self._space(leg.shape), start, goal)
        return found

    def _space(self, shape: tuple[int, ...]) -> Space:
        found = self._spaces.get(shape)
        if found is None:
            whole = Sharding(Layout(tuple(Dim(f"d{i}") for i in range(len(shape)))), self.mesh, shape)
            found = self._spaces[shape] = Space(whole, whole, self.dtype, self.profile)
        return found

    def _state(self, use: Use) -> State | None:
        """The state of an array, if all its cuts are the axes' own."""
        cuts = []
        for cut in use.cuts:
            if cut not in self._cuts:
                plain = all(shard == Shard(shard.axes[:1]) for shard in cut.shards)
                self._cuts[cut] = tuple(self._axes.index(s.axes[0]) for s in cut.shards) if plain else None
            if (axes := self._cuts[cut]) is None:
                return None
            cuts.append(axes)
        return State(tuple(cuts), tuple(sorted(map(self._axes.index, use.sums))))

    @cached_property
    def _axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh.axes if self.mesh.size(axis) > 1)

    def _received(self, before: Use, after: Use, elements: int) -> int:
        """Elements that the busiest device must receive, at least."""
        if (before.sums or after.sums) and (ended := before.sums - after.sums):
            kept, n = self._size(after.sums & before.sums), self.mesh.n_devices
            copies = n // self._size(after.sums.union(*(cut.axes for cut in after.cuts)))
            return least_received(elements, n, self._size(ended), copies, kept)
        if after.sums and after.sums - before.sums:
            return 0
        here, there = [cut.rows for cut in before.cuts], [cut.rows for cut in after.cuts]
        return math.prod(there) - math.prod(map(min, here, there))

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
