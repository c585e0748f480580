"""The best place for a contraction: fewest seconds of moves and of operations, then fewest operations.

Decides in which order places are looked at. Each begins with a bound of its moves; a bound gives way to the
price only where its place would win, so that few moves are ever planned. Places share the prices of moves.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from xshard.contractions.places import MAX_PLACES, Ends, Place
from xshard.contractions.prices import Move, Prices
from xshard.search.request import BOTH


@dataclass(frozen=True)
class Found:
    """A place with the moves to it and from it to the result, its operations, and the seconds of all."""

    place: Place
    moves: tuple[Move, ...]
    result: Move
    flops: int
    seconds: float


def best_places(
    ends: Ends,
    prices: Prices,
    objective: str,
    *,
    stays: bool = False,
    flops_limit: int | None = None,
    below: float = math.inf,
) -> Iterator[Found]:
    """Places, the best first.

    stays: the result may stay where it is contracted. flops_limit: operations of the forward pass that no
    device may exceed. below: only places of fewer seconds.
    """
    search = _Search(ends, prices, objective, stays, below)
    places = list(itertools.islice(ends.places(), MAX_PLACES + 1))
    if len(places) > MAX_PLACES:
        places = search.climbed()
    yield from search.ordered(p for p in places if flops_limit is None or ends.flops(p) <= flops_limit)


@dataclass(frozen=True)
class _Candidate:
    found: Found
    priced: tuple[Move, ...]  # with the gradients' moves, if they count
    work: float  # seconds of operations

    def least(self, prices: Prices) -> float:
        """Seconds, at least."""
        return round(self.work + sum(map(prices.least, self.priced)), 15)


@dataclass(frozen=True)
class _Search:
    ends: Ends
    prices: Prices
    objective: str
    stays: bool
    below: float

    def ordered(self, places: Iterable[Place]) -> Iterator[Found]:
        """Places by their seconds, then their operations, then what is held there; the best first."""
        queue: list[Any] = []
        for n, place in enumerate(places):
            one = self._candidate(place)
            queue.append((one.least(self.prices), one.found.flops, self._held(one), n, one))
        heapq.heapify(queue)
        while queue and queue[0][0] < self.below:
            seconds, *rest, one = queue[0]
            if (now := one.least(self.prices)) > seconds:
                heapq.heapreplace(queue, (now, *rest, one))
                continue
            unknown = [move for move in one.priced if not self.prices.is_known(move)]
            if unknown:
                self.prices.plan(max(unknown, key=self.prices.least))
                continue
            heapq.heappop(queue)
            yield replace(one.found, seconds=seconds)

    def climbed(self) -> list[Place]:
        """Places reached from those of the ends by changes of one axis, each for the better by the bounds."""
        found = []
        for place in self.ends.seeds():
            least = self._rank(place)
            while True:
                rank, other = min(
                    ((self._rank(p), p) for p in self.ends.neighbours(place)), key=lambda pair: pair[0]
                )
                if rank >= least:
                    break
                place, least = other, rank
            found.append(place)
        return list(dict.fromkeys(found))

    def _rank(self, place: Place) -> tuple[float, int]:
        one = self._candidate(place)
        return one.least(self.prices), one.found.flops

    def _candidate(self, place: Place) -> _Candidate:
        ends = self.ends
        moves = tuple(Move(o.layout, ends.used(place, i), o.shape) for i, o in enumerate(ends.operands))
        local = ends.local(place)
        result = Move(local, local if self.stays else ends.result.layout, ends.result.shape)
        flops, priced = ends.flops(place), (*moves, result)
        passes = 1
        if self.objective == BOTH:
            priced, passes = (*priced, *(move.dual for move in priced)), 1 + len(moves)
        work = passes * flops / self.prices.profile.flops(self.prices.dtype)
        return _Candidate(Found(place, moves, result, flops, 0.0), priced, work)

    def _held(self, one: _Candidate) -> int:
        """Elements of all that is moved, where it is contracted."""
        return sum(self.prices.elements(move.dst, move.shape) for move in one.found.moves)
