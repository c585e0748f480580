"""The best place for a contraction: fewest seconds of moves and of operations, then fewest operations.

Decides in which order places are looked at. Each begins with a bound of its moves; a bound gives way to the
price only where its place would win, so that few moves are ever planned. Places share their moves.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from xshard.contractions.places import MAX_PLACES, Ends, Place
from xshard.contractions.prices import GUESS, PRICE, Leg, Move, Prices
from xshard.search.request import BOTH

MAX_PRICED = 256  # after as many new prices guesses have to do
WAIT = 0.02  # of the work: at every move devices wait for the last of them


class Found(NamedTuple):
    """A place with its operations and the moves that count there.

    legs: of the operands, of the result, and of their gradients, if those count. work: seconds of operations.
    stays: the result stays where it is contracted.
    """

    ends: Ends
    place: Place
    flops: int
    work: float
    legs: tuple[Leg, ...]
    stays: bool

    @property
    def seconds(self) -> float:
        """Of the moves, by all that is known, of the operations, and of waiting."""
        times = [leg.seconds for leg in self.legs if leg.seconds]
        return round(self.work * (1 + WAIT * len(times)) + sum(times), 15)

    @property
    def moves(self) -> tuple[Move, ...]:
        """Of the operands, to the place."""
        return tuple(_move(self.ends, self.place, i, self.stays) for i in range(len(self.ends.operands)))

    @property
    def result(self) -> Move:
        """From the place to where the result is to be."""
        return _move(self.ends, self.place, -1, self.stays)

    def priced(self, prices: Prices) -> float:
        """Seconds, by the prices of all moves."""
        for leg in self.legs:
            while leg.level < PRICE:
                prices.look_closer(leg)
        return self.seconds


def _move(ends: Ends, place: Place, i: int, stays: bool) -> Move:
    """Of operand `i` to a place, -1: of the result from there."""
    at, end = ends.layout(place, i), (*ends.operands, ends.result)[i]
    before, after = (at, at if stays else end.layout) if i < 0 else (end.layout, at)
    return Move(before, after, end.shape)


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
    yield from search.ordered(
        place
        for place in places
        if search.work(flops := ends.flops(place)) < below and (flops_limit is None or flops <= flops_limit)
    )


def found_at(ends: Ends, place: Place, prices: Prices, objective: str, *, stays: bool) -> Found:
    """A given place, with bounds of its seconds. stays: the result stays where it is contracted."""
    return _Search(ends, prices, objective, stays, math.inf, PRICE).found(place)


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
            one = self.found(place)
            if (seconds := one.seconds) < self.below:
                queue.append((seconds, one.flops, self._held(place), n, one))
        heapq.heapify(queue)
        n_priced = 0
        while queue and queue[0][0] < self.below:
            seconds, *rest, one = queue[0]
            if (now := one.seconds) > seconds:
                heapq.heapreplace(queue, (now, *rest, one))
                continue
            level = self.level if n_priced < MAX_PRICED else GUESS
            if unknown := [leg for leg in one.legs if leg.level < level]:
                leg = max(unknown, key=lambda leg: leg.seconds)
                n_priced += self.prices.look_closer(leg) and leg.level == PRICE
            else:
                heapq.heappop(queue)
                yield one

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
        one = self.found(place)
        return one.seconds, one.flops

    def found(self, place: Place) -> Found:
        """A place, with what is known of its moves."""
        ends, legs, duals = self.ends, list[Leg](), list[Leg]()
        for i in self._numbers:
            cuts = ends.cuts_of(place, i)
            # All that the price depends on: forward, copies are as good as replicas, but to addends.
            key: tuple[object, ...] = i, cuts, place.sums, place.busy if i < 0 else None
            legs.append(self._legs.get(key) or self._new_leg(key, place, i))
            if self.objective == BOTH:
                key = i, cuts, place.sums, place.busy, place.copies
                duals.append(self._legs.get(key) or self._new_leg(key, place, i, is_dual=True))
        flops = ends.flops(place)
        return Found(ends, place, flops, self.work(flops), (*legs, *duals), self.stays)

    def work(self, flops: int) -> float:
        """Seconds of all passes."""
        passes = 1 + len(self.ends.operands) if self.objective == BOTH else 1
        return passes * flops / self.prices.profile.flops(self.prices.dtype)

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        """Of the operands; -1 for the result."""
        return (*range(len(self.ends.operands)), -1)

    @cached_property
    def _legs(self) -> dict[tuple[object, ...], Leg]:
        return {}

    def _new_leg(self, key: tuple[object, ...], place: Place, i: int, *, is_dual: bool = False) -> Leg:
        """The move of operand `i` to a place, -1: of the result from there; or that of its gradient."""
        ends = self.ends
        given, at = ends.given[i], ends.used(place, i)
        before, after = (at, at if self.stays else given) if i < 0 else (given, at)
        if is_dual:
            before, after = after.dual, before.dual
        shape = (*ends.operands, ends.result)[i].shape

        def move() -> Move:
            made = _move(ends, place, i, self.stays)
            return made.dual if is_dual else made

        leg = self._legs[key] = Leg(self.prices.least(before, after, shape), move)
        return leg

    def _held(self, place: Place) -> int:
        """Elements of all that is moved, where it is contracted."""
        return sum([math.prod([c.rows for c in self.ends.cuts_of(place, i)]) for i in self._numbers[:-1]])
