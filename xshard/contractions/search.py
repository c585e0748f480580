"""The best placements of a contraction: fewest seconds of moves and work, then fewest operations.

Each candidate begins with lower bounds of its moves, which are refined only while it would win. So few moves
are planned, of the thousands that candidates would make.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

from xshard.contractions.placements import (
    MAX_PLACEMENTS,
    RESULT,
    ArrayMove,
    EinsumShardings,
    PlacedArray,
    Placement,
)
from xshard.contractions.prices import ESTIMATE, PRICE, MoveEstimate, Prices
from xshard.search.request import BOTH

FINALISTS = 8  # candidates that are priced, the best by estimates first
SLACK = 1.04  # how much too high an estimate may be: a finalist beyond it is not priced to the end
WAIT = 0.02  # of the work: at every move devices wait for the last of them


T = TypeVar("T")


class Candidate(NamedTuple):
    """A placement of a contraction, with what it is predicted to cost."""

    shardings: EinsumShardings
    placement: Placement
    flops: int
    touched_elements: int  # read and written by the contraction
    work_s: float  # seconds of the contraction, in all passes that count
    estimates: tuple[MoveEstimate, ...]  # of the moves, with gradients' if they count

    @property
    def seconds(self) -> float:
        """Seconds of the work, of the moves as far as they are known, and of waiting."""
        return self._total([move.seconds for move in self.estimates])

    @property
    def lower_bound_s(self) -> float:
        """The same by the lower bounds of all moves."""
        return self._total([move.lower_bound_s for move in self.estimates])

    def _total(self, move_seconds: list[float]) -> float:
        """Add up the work, the moves, and the waiting at each move that sends something."""
        sent = [seconds for seconds in move_seconds if seconds]
        # Rounded, so that sums in another order are ties.
        return round(self.work_s * (1 + WAIT * len(sent)) + sum(sent), 15)

    @property
    def moves(self) -> tuple[ArrayMove, ...]:
        """The moves of the operands, and last of the local result."""
        shardings = self.shardings
        placed_arrays = shardings.placed_arrays(self.placement)
        return tuple([shardings.move(placed, shardings.local(placed)) for placed in placed_arrays])

    def price(self, prices: Prices, below: float = math.inf) -> float:
        """Price all moves, the most expensive first, and return the seconds.

        It stops once the seconds are not below `below`: the candidate loses, whatever the others cost.
        """
        for move in sorted(self.estimates, key=attrgetter("seconds"), reverse=True):
            while move.level < PRICE and self.seconds < below:  # bound -> estimate -> price
                prices.refine(move)
        return self.seconds


class Ranked(NamedTuple):
    """A candidate as searches compare it: equals come by `placement_index`."""

    seconds: float
    flops: int
    touched_elements: int
    placement_index: int
    candidate: Candidate

    @classmethod
    def of(cls, candidate: Candidate, placement_index: int) -> Ranked:
        """Rank a candidate by its seconds as they are known now."""
        flops = candidate.flops
        return cls(candidate.seconds, flops, candidate.touched_elements, placement_index, candidate)


def by_prices(finalists: Iterable[T], rank: Callable[[T, float], tuple[float, ...]]) -> list[T]:
    """Sort finalists by the planner's prices of their moves, which begin as estimates.

    rank: prices all moves of one, but stops once its seconds are not below a limit. Returns the
    seconds, and numbers that decide between equals. The limit is the best so far, and SLACK more,
    for estimates may be too high.
    """
    ranked: list[tuple[tuple[float, ...], T]] = []
    limit = math.inf
    for finalist in finalists:
        # Equal ones keep their order: the new one goes behind them.
        insort(ranked, (rank(finalist, limit), finalist), key=itemgetter(0))
        best_rank, _ = ranked[0]
        limit = SLACK * best_rank[0]
    return [finalist for _, finalist in ranked]


@dataclass(frozen=True)
class CandidateSearch:
    """The search for candidates of fewer seconds than `below`."""

    shardings: EinsumShardings
    prices: Prices
    objective: str
    below: float = math.inf

    def best(self, flops_limit: int | None = None, level: int = PRICE) -> Iterator[Candidate]:
        """Iterate over the ways to shard a contraction, the fewest predicted seconds first.

        flops_limit: operations that no device may exceed, or None. level: `ESTIMATE` sorts by
        estimated seconds of the moves; `PRICE` plans the moves of the first few and
        sorts these by that.
        """
        placements = self.shardings.placements
        # With so many the list was cut off, and may lack the best one: search
        # from good starts instead.
        if len(placements) > MAX_PLACEMENTS:
            placements = self.hill_climb()
        if flops_limit is not None:
            placements = [
                placement
                for placement in placements
                if self.shardings.flops(placement) <= flops_limit
            ]
        candidates = self.by_estimates(placements)
        if level == PRICE:
            # The finalists in the order of their prices, then the others as they come.
            yield from by_prices(itertools.islice(candidates, FINALISTS), self._rank_by_price)
        yield from candidates

    def by_estimates(self, placements: Iterable[Placement]) -> Iterator[Candidate]:
        """Iterate over candidates, the best by estimated seconds first, but estimate few of them.

        All begin in a heap with lower bounds of their seconds, which are cheap. The first of the
        heap gets better estimates of its moves, and is sorted in again. If it is still the first,
        then no other can be better: {A: 3, B: 5} -> A is estimated at 4 -> A is yielded, and B
        never estimated.
        Equal seconds: fewer operations first, then fewer elements.

        placements: what each mesh axis does while blocks are contracted, one for each candidate.
        """
        queue: list[Ranked] = []
        for placement_index, placement in enumerate(placements):
            ranked = Ranked.of(self.candidate(placement), placement_index)
            if ranked.seconds < self.below:
                queue.append(ranked)
        heapq.heapify(queue)
        while queue and queue[0].seconds < self.below:
            best = queue[0]
            candidate = best.candidate
            ranked = Ranked.of(candidate, best.placement_index)
            if ranked.seconds > best.seconds:
                # Its seconds have risen since it was sorted in: here, or with a
                # move that it shares.
                heapq.heapreplace(queue, ranked)
                continue
            bounds = [move for move in candidate.estimates if move.level < ESTIMATE]
            if bounds:
                # Some moves have only lower bounds, so that it may be slower than it looks. The
                # most expensive one is estimated first, since it changes the sum most.
                self.prices.refine(max(bounds, key=attrgetter("seconds")))
            else:  # fully estimated, and all others are at least as slow by their lower bounds
                heapq.heappop(queue)
                yield candidate

    def _rank_by_price(self, candidate: Candidate, below: float) -> tuple[float, int, int]:
        seconds = candidate.price(self.prices, below)
        return seconds, candidate.flops, candidate.touched_elements

    def hill_climb(self) -> list[Placement]:
        """Return the placements reached from the seeds by changes of one axis, while bounds fall."""
        tops = [self._climb(seed) for seed in self.shardings.seeds()]
        return list(dict.fromkeys(tops))  # each once, in order

    def _climb(self, placement: Placement) -> Placement:
        """Follow the best neighbor of a placement as long as it is better."""
        rank = self._rank(placement)
        while True:
            ranked = [
                (self._rank(neighbor), neighbor) for neighbor in self.shardings.neighbors(placement)
            ]
            best_rank, best = min(ranked, key=itemgetter(0))
            if best_rank >= rank:
                return placement
            placement = best
            rank = best_rank

    def _rank(self, placement: Placement) -> tuple[float, int]:
        candidate = self.candidate(placement)
        return candidate.seconds, candidate.flops

    def candidate(self, placement: Placement) -> Candidate:
        """Predict what a contraction costs in a placement: operations, memory traffic, and moves.

        A placement says what each mesh axis does while blocks are contracted. Moves have lower
        bounds of their seconds at first; a move that another candidate has, too, is the same
        object, and may have a better estimate already.
        """
        shardings = self.shardings
        estimates: list[MoveEstimate] = []
        touched_elements = 0
        for placed in shardings.placed_arrays(placement):
            # The largest block of this array on any device.
            block_elements = math.prod([dim.block_rows for dim in placed.dims])
            touched_elements += shardings.accesses[placed.array_index] * block_elements
            estimates += self._moves_of(placed)
        flops = shardings.flops(placement)
        # Each gradient is a contraction of the same size: one for each operand, and the forward pass.
        passes = len(shardings.arrays) if self.objective == BOTH else 1
        work_s = passes * self.prices.profile.work(flops, touched_elements, self.prices.dtype)
        return Candidate(shardings, placement, flops, touched_elements, work_s, tuple(estimates))

    def _moves_of(self, placed: PlacedArray) -> list[MoveEstimate]:
        """Return the redistribution of one array, and the one of its gradient if that counts.

        An operand moves from the sharding that it has to the one in which it is contracted, the result
        from the one that devices compute to the one that the text says. `d f/tp` contracted whole: an
        all-gather, and a reduce-scatter of the gradient. The list has 1 item, or 2 with the
        objective "forward+backward".
        """
        shardings = self.shardings  # hot: called for each array of each placement
        array_index = placed.array_index
        local = shardings.local(placed)
        endpoint = shardings.endpoints[array_index]
        if array_index == RESULT:
            src = local
            dst = local if shardings.stays else endpoint
        else:
            src = endpoint
            dst = local
        shape = shardings.arrays[array_index].shape
        prices = self.prices
        # In most cases the seconds of a move follow from the shardings at both ends. But a mean
        # multiplies by a constant, which they do not show: then the whole move is made for its price.
        scaling = None
        make = None
        make_dual = None
        if shardings.has_means:
            scaling = (array_index, placed.placement.sums)
            make = partial(shardings.move, placed, local)
            make_dual = partial(shardings.dual_move, placed, local)
        forward_move = prices.move((src.dims, src.sums), (dst.dims, dst.sums), shape, scaling, make)
        if self.objective != BOTH:
            return [forward_move]
        # A gradient goes the other way, and along axes where the value is copied, the gradients of
        # the copies are addends: so its partial sums are the value's copies.
        src_end = (src.dims, src.copies)
        dst_end = (dst.dims, dst.copies)
        return [forward_move, prices.move(dst_end, src_end, shape, scaling, make_dual)]
