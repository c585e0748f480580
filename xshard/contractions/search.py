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
from xshard.contractions.prices import PRICE, Move, Prices
from xshard.search.request import BOTH

# After as many new prices the places whose moves are all priced come first, the best of them first.
MAX_PRICED = 64


@dataclass(frozen=True)
class Found:
    """A place with the moves to it and from it to the result, its operations, and the seconds of all.

    counted: the moves whose seconds count, with those of gradients if they do. work: seconds of operations.
    """

    place: Place
    moves: tuple[Move, ...]
    result: Move
    flops: int
    counted: tuple[Move, ...]
    work: float
    seconds: float = 0.0

    def least(self, prices: Prices) -> float:
        """Seconds, at least."""
        return round(self.work + sum(map(prices.least, self.counted)), 15)

    def priced(self, prices: Prices) -> float:
        """Seconds, by the prices of all moves."""
        for move in self.counted:
            while prices.least(move) and prices.level(move) < PRICE:
                prices.look_closer(move)
        return self.least(prices)


def best_places(
    ends: Ends,
    prices: Prices,
    objective: str,
    *,
    stays: bool = False,
    flops_limit: int | None = None,
    below: float = math.inf,
    level: int = PRICE,
) -> Iterator[Found]:
    """Places, the best first.

    stays: the result may stay where it is contracted. flops_limit: operations of the forward pass that no
    device may exceed. below: only places of fewer seconds. level: what has to be known of their moves.
    """
    search = _Search(ends, prices, objective, stays, below, level)
    places = list(itertools.islice(ends.places(), MAX_PLACES + 1))
    if len(places) > MAX_PLACES:
        places = search.climbed()
    yield from search.ordered(p for p in places if flops_limit is None or ends.flops(p) <= flops_limit)


def found_at(ends: Ends, place: Place, prices: Prices, objective: str, *, stays: bool) -> Found:
    """A given place, with bounds of its seconds. stays: the result stays where it is contracted."""
    found = _Search(ends, prices, objective, stays, math.inf, PRICE)._found(place)
    return replace(found, seconds=found.least(prices))


@dataclass(frozen=True)
class _Search:
    ends: Ends
    prices: Prices
    objective: str
    stays: bool
    below: float
    level: int

    def ordered(self, places: Iterable[Place]) -> Iterator[Found]:
        """Places by their seconds, then their operations, then what is held there; the best first."""
        queue: list[Any] = []
        for n, place in enumerate(places):
            one = self._found(place)
            queue.append((one.least(self.prices), one.flops, self._held(one), n, one))
        heapq.heapify(queue)
        n_priced, later = 0, list[Any]()
        while queue and queue[0][0] < self.below:
            seconds, *rest, one = queue[0]
            if (now := one.least(self.prices)) > seconds:
                heapq.heapreplace(queue, (now, *rest, one))
                continue
            if unknown := self._unknown(one):
                n_priced += self.prices.look_closer(max(unknown, key=self.prices.least)) == PRICE
            else:
                heapq.heappop(queue)
                yield replace(one, seconds=seconds)
            if n_priced == MAX_PRICED:
                n_priced += 1
                known = [entry for entry in queue if not self._unknown(entry[-1])] or queue[:1]
                later = [entry for entry in queue if entry not in known]
                queue = known
                heapq.heapify(queue)
            if not queue and later:
                queue, later, n_priced = later, [], 0
                heapq.heapify(queue)

    def _unknown(self, one: Found) -> list[Move]:
        """The moves of which too little is known."""
        return [move for move in one.counted if self.prices.level(move) < self.level]

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
        one = self._found(place)
        return one.least(self.prices), one.flops

    def _found(self, place: Place) -> Found:
        ends = self.ends
        moves = tuple(Move(o.layout, ends.used(place, i), o.shape) for i, o in enumerate(ends.operands))
        local = ends.local(place)
        result = Move(local, local if self.stays else ends.result.layout, ends.result.shape)
        flops, counted, passes = ends.flops(place), (*moves, result), 1
        if self.objective == BOTH:
            counted, passes = (*counted, *(move.dual for move in counted)), 1 + len(moves)
        work = passes * flops / self.prices.profile.flops(self.prices.dtype)
        return Found(place, moves, result, flops, counted, work)

    def _held(self, one: Found) -> int:
        """Elements of all that is moved, where it is contracted."""
        return sum(self.prices.elements(move.dst, move.shape) for move in one.moves)
