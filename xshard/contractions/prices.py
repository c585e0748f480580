"""What moves cost, as cheaply as the question allows: a bound from numbers alone, a guess, or a price.

Decides nothing about contractions. A move is between two layouts of one array on one mesh. Its price is that
of the best of a few paths, which is seldom above the plan's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from xshard import dtypes
from xshard.cost.model import Profile
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.partition import block_length
from xshard.plans.plan import Plan, find_plan
from xshard.search.a_star import Search
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
    _blocks: dict[tuple[Layout, tuple[int, ...]], tuple[int, ...]] = field(default_factory=dict)

    def plan(self, move: Move) -> Plan:
        """The cheapest plan of a move."""
        devices = range(self.mesh.n_devices)
        ends = move.src, move.dst, self.mesh, self.mesh, devices, devices
        return find_plan(Request(*ends, move.shape, self.dtype, self.profile))

    def least(self, move: Move) -> float:
        """Seconds that a move takes, by all that is known: its bound, the guess, or the price."""
        found = self._known.get(move)
        if found is None:
            received = 0 if move.src == move.dst else self._received(move)
            seconds = received * self._second_per_element + self._start if received else 0.0
            found = self._known[move] = _Known(BOUND, seconds)
        return found.seconds

    def level(self, move: Move) -> int:
        """What is known of a move: BOUND, GUESS or PRICE."""
        return self._known[move].level

    def look_closer(self, move: Move) -> int:
        """Guess what a move costs after its bound, find its price after the guess; returns its new level."""
        start, goal = self._end(move.src, move.shape), self._end(move.dst, move.shape)
        key = Move(start.layout, goal.layout, move.shape)  # copies and replicas cost the same
        if self._known.get(key, _Known(BOUND, 0.0)).level <= self._known[move].level:
            self._known[key] = self._closer(start, goal, self._known[move])
        self._known[move] = self._known[key]
        return self._known[move].level

    def _closer(self, start: Sharding, goal: Sharding, known: _Known) -> _Known:
        if start.layout == goal.layout:
            return _Known(PRICE, 0.0)
        search = Search(Space(start, goal, self.dtype, self.profile), None, directed=True)
        if known.level == BOUND:
            return _Known(GUESS, max(known.seconds, search.guess()))
        return _Known(PRICE, search.path().seconds)

    def _end(self, layout: Layout, shape: tuple[int, ...]) -> Sharding:
        """A layout in normal form and without copies."""
        found = self._ends.get((layout, shape))
        if found is None:
            end = Sharding(layout, self.mesh, shape)
            found = self._ends[layout, shape] = without_copies(end.with_layout(end.normal))
        return found

    def elements(self, layout: Layout, shape: tuple[int, ...]) -> int:
        """Of the largest block."""
        return math.prod(self._block(layout, shape))

    def _block(self, layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the largest block."""
        found = self._blocks.get((layout, shape))
        if found is None:
            pairs = zip(layout.dims, shape, strict=True)
            found = tuple(block_length(dim, n, self.mesh.sizes_of(dim.axes))[0] for dim, n in pairs)
            self._blocks[layout, shape] = found
        return found

    def _received(self, move: Move) -> int:
        """Elements that the busiest device must receive, at least."""
        src, dst, shape = move
        old, new = src.tagged("sum", "mean"), dst.tagged("sum", "mean")
        mesh, ended = self.mesh, [a for a in old if a not in new]
        if ended:
            # Each of n addends but one is sent, and the sum to each of m copies but one.
            kept = mesh.size(*(a for a in new if a in old))
            cut = [a for dim in dst.dims for a in dim.axes]
            copies = mesh.n_devices // mesh.size(*cut, *new)
            total = math.prod(shape) * (mesh.size(*ended) + copies - 2) * kept
            return -(-total // mesh.n_devices)
        if any(a not in old for a in new):
            return 0
        before, after = self._block(src, shape), self._block(dst, shape)
        return math.prod(after) - math.prod(map(min, before, after))

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
