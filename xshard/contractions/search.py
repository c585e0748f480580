"""The best place for a contraction: fewest seconds of moves and of operations, then fewest operations.

Decides in which order places are looked at. Each begins with a bound of its moves; a bound gives way to a
guess only where its place would win, and a guess to the price for a few finalists, so that few moves are ever
planned. Places share their moves.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from xshard.contractions.places import MAX_PLACES, Ends, Place, Use
from xshard.contractions.prices import GUESS, PRICE, Leg, Move, Prices
from xshard.search.request import BOTH

FINALISTS = 8  # places that are priced, the best by guesses first
SLACK = 1.04  # how much too dear a guess may be
WAIT = 0.02  # of the work: at every move devices wait for the last of them


class Found(NamedTuple):
    """A place with its operations and the moves that count there.

    touched: elements that memory reads and writes for the local contraction. work: seconds of all that count.
    legs: of the operands, of the result, and of their gradients, if those count. stays: the result stays
    where it is contracted.
    """

    ends: Ends
    place: Place
    flops: int
    touched: int
    work: float
    legs: tuple[Leg, ...]
    stays: bool

    @property
    def seconds(self) -> float:
        """Of the moves, by all that is known, of the work, and of waiting."""
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

    def priced(self, prices: Prices, below: float = math.inf) -> float:
        """Seconds by the prices of all moves, the dearest first; of fewer moves once it is not below."""
        for leg in sorted(self.legs, key=lambda leg: -leg.seconds):
            while leg.level < PRICE and self.seconds < below:
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
    search = _Search(ends, prices, objective, stays, below)
    places = list(itertools.islice(ends.places(), MAX_PLACES + 1))
    if len(places) > MAX_PLACES:
        places = search.climbed()
    found = search.ordered(p for p in places if flops_limit is None or ends.flops(p) <= flops_limit)
    yield from (search.ranked(found) if level == PRICE else found)


def found_at(ends: Ends, place: Place, prices: Prices, objective: str, *, stays: bool) -> Found:
    """A given place, with bounds of its seconds. stays: the result stays where it is contracted."""
    return _Search(ends, prices, objective, stays, math.inf).found(place)


@dataclass(frozen=True)
class _Search:
    ends: Ends
    prices: Prices
    objective: str
    stays: bool
    below: float

    def ordered(self, places: Iterable[Place]) -> Iterator[Found]:
        """Places by their seconds, then their operations, then what is touched there; the best first."""
        queue: list[Any] = []
        for n, place in enumerate(places):
            one = self.found(place)
            if (seconds := one.seconds) < self.below:
                queue.append((seconds, one.flops, one.touched, n, one))
        heapq.heapify(queue)
        while queue and queue[0][0] < self.below:
            seconds, *rest, one = queue[0]
            if (now := one.seconds) > seconds:
                heapq.heapreplace(queue, (now, *rest, one))
                continue
            if unknown := [leg for leg in one.legs if leg.level < GUESS]:
                self.prices.look_closer(max(unknown, key=lambda leg: leg.seconds))
            else:
                heapq.heappop(queue)
                yield one

    def ranked(self, guessed: Iterator[Found]) -> Iterator[Found]:
        """Places in the order of guesses, but the first of them in that of their prices."""
        finalists: list[Any] = []
        for n, one in enumerate(itertools.islice(guessed, FINALISTS)):
            least = finalists[0][0] if finalists else math.inf
            seconds = one.priced(self.prices, SLACK * least)
            insort(finalists, (seconds, one.flops, one.touched, n, one))
        yield from (one for *_, one in finalists)
        yield from guessed

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
        ends, legs, touched = self.ends, list[Leg](), 0
        for i in self._numbers:
            cuts = ends.cuts_of(place, i)
            touched += ends.accesses[i] * math.prod([cut.rows for cut in cuts])
            key: tuple[object, ...] = i, cuts, place.sums
            if i < 0 or self.objective == BOTH:
                key = *key, place.busy, place.copies
            legs += self._legs.get(key) or self._new_legs(key, place, i)
        flops = ends.flops(place)
        passes = 1 + len(ends.operands) if self.objective == BOTH else 1
        work = passes * self.prices.profile.work(flops, touched, self.prices.dtype)
        return Found(ends, place, flops, touched, work, tuple(legs), self.stays)

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        """Of the operands; -1 for the result."""
        return (*range(len(self.ends.operands)), -1)

    @cached_property
    def _legs(self) -> dict[tuple[object, ...], tuple[Leg, ...]]:
        """By what their prices depend on."""
        return {}

    def _new_legs(self, key: tuple[object, ...], place: Place, i: int) -> tuple[Leg, ...]:
        """The move of operand `i` to a place, -1: of the result from there; and that of its gradient."""
        ends = self.ends
        given, at = ends.given[i], ends.used(place, i)
        before, after = (at, at if self.stays else given) if i < 0 else (given, at)
        shape = (*ends.operands, ends.result)[i].shape

        def leg(before: Use, after: Use, make: Callable[[], Move]) -> Leg:
            return Leg(self.prices.least(before, after, shape), before, after, shape, make)

        move = partial(_move, ends, place, i, self.stays)  # does not hold on to `self`, which keeps the legs

        # Forward, an operand's copies are as good as its replicas.
        forward = key if i < 0 else key[:3]
        found = self._legs.get(forward, ())[:1] or (leg(before, after, move),)
        self._legs[forward] = found
        if self.objective == BOTH:
            found = *found, leg(after.dual, before.dual, lambda: move().dual)
            self._legs[key] = found
        return found
