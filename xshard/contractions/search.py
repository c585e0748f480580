"""The best placements of a contraction: fewest seconds of moves and work, then fewest operations.
Each candidate begins with bounds of its moves, refined only while it would win; few moves are planned.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from xshard.contractions.placements import MAX_PLACEMENTS, ArrayMove, EinsumShardings, Placement
from xshard.contractions.prices import ESTIMATE, PRICE, MoveEstimate, Prices
from xshard.search.request import BOTH

FINALISTS = 8  # candidates that are priced, the best by estimates first
SLACK = 1.04  # how much too high an estimate may be
WAIT = 0.02  # of the work: at every move devices wait for the last of them


class Candidate(NamedTuple):
    """A placement with its cost: elements touched, seconds of work, the moves, with gradients' if counted."""

    shardings: EinsumShardings
    placement: Placement
    flops: int
    touched: int
    work: float
    estimates: tuple[MoveEstimate, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the moves as far as they are known, of the work, and of waiting."""
        return self.total()

    def total(self, seconds: Callable[[MoveEstimate], float] = attrgetter("seconds")) -> float:
        times = list(filter(None, map(seconds, self.estimates)))
        return round(self.work * (1 + WAIT * len(times)) + sum(times), 15)

    @property
    def moves(self) -> tuple[ArrayMove, ...]:
        """The moves of the operands, and last of the local result."""
        call = self.shardings
        placement = self.placement
        return tuple(
            call.move(p[0], call.local(*p), placement.sums) for p in call.places(placement)
        )

    def priced(self, prices: Prices, below: float = math.inf) -> float:
        """Seconds by the prices of all moves, the most expensive first; of fewer once it is not below."""
        for estimate in sorted(self.estimates, key=lambda estimate: -estimate.seconds):
            while estimate.level < PRICE and self.seconds < below:
                prices.refine(estimate)
        return self.seconds


@dataclass(frozen=True)
class CandidateSearch:
    """The search for candidates of fewer seconds than `below`."""

    shardings: EinsumShardings
    prices: Prices
    objective: str
    below: float = math.inf

    def best(self, flops_limit: int | None = None, level: int = PRICE) -> Iterator[Candidate]:
        """Candidates within the operations that no device may exceed, the best first, known to `level`."""
        placements = self.shardings.placements
        if len(placements) > MAX_PLACEMENTS:
            placements = self.hill_climb()
        if flops_limit is not None:
            placements = [p for p in placements if self.shardings.flops(p) <= flops_limit]
        candidates = self.by_estimates(placements)
        yield from (self.by_prices(candidates) if level == PRICE else candidates)

    def by_estimates(self, placements: Iterable[Placement]) -> Iterator[Candidate]:
        """Candidates by their seconds, then their operations, then the elements touched; the best first."""
        queue: list[Any] = []
        for n, placement in enumerate(placements):
            candidate = self.candidate(placement)
            if (seconds := candidate.seconds) < self.below:
                queue.append((seconds, candidate.flops, candidate.touched, n, candidate))
        heapq.heapify(queue)
        while queue and queue[0][0] < self.below:
            seconds, *rest, candidate = queue[0]
            if (now := candidate.seconds) > seconds:
                heapq.heapreplace(queue, (now, *rest, candidate))
            elif bounds := [e for e in candidate.estimates if e.level < ESTIMATE]:
                self.prices.refine(max(bounds, key=lambda estimate: estimate.seconds))
            else:
                heapq.heappop(queue)
                yield candidate

    def by_prices(self, candidates: Iterator[Candidate]) -> Iterator[Candidate]:
        """The finalists in the order of their prices, then the other candidates as they come."""
        finalists: list[Any] = []
        for n, candidate in enumerate(itertools.islice(candidates, FINALISTS)):
            least = finalists[0][0] if finalists else math.inf
            seconds = candidate.priced(self.prices, SLACK * least)
            insort(finalists, (seconds, candidate.flops, candidate.touched, n, candidate))
        yield from (candidate for *_, candidate in finalists)
        yield from candidates

    def hill_climb(self) -> list[Placement]:
        """The placements reached from the seeds by changes of one axis, while the bounds fall."""
        tops = []
        for placement in self.shardings.seeds():
            least = self._rank(placement)
            while True:
                pairs = ((self._rank(p), p) for p in self.shardings.neighbors(placement))
                rank, neighbor = min(pairs, key=lambda pair: pair[0])
                if rank >= least:
                    break
                placement = neighbor
                least = rank
            tops.append(placement)
        return list(dict.fromkeys(tops))

    def _rank(self, placement: Placement) -> tuple[float, int]:
        candidate = self.candidate(placement)
        return candidate.seconds, candidate.flops

    def candidate(self, placement: Placement) -> Candidate:
        """The candidate of a placement, with the estimates as far as they are known."""
        shardings = self.shardings
        estimates = tuple[MoveEstimate, ...]()
        touched = 0
        for place in shardings.places(placement):
            elements, moves = self._array(*place)
            touched = touched + elements
            estimates = estimates + moves
        flops = shardings.flops(placement)
        passes = len(shardings.arrays) if self.objective == BOTH else 1
        work = passes * self.prices.profile.work(flops, touched, self.prices.dtype)
        return Candidate(shardings, placement, flops, touched, work, estimates)

    def _array(self, i: int, *place: Any) -> tuple[int, tuple[MoveEstimate, ...]]:
        """Elements touched, and the moves, of operand `i` and its gradient, or of the result, -1."""
        shardings, (dims, sums, *_) = self.shardings, place
        local = shardings.local(i, *place)
        endpoint = shardings.endpoints[i]
        before, after = (
            (local, local if shardings.stays else endpoint) if i < 0 else (endpoint, local)
        )
        # Only a move that may scale depends on more than both ends, and is made to be priced.
        move = partial(shardings.move, i, local, sums) if shardings.has_means else None
        array = shardings.arrays[i].shape, (i, sums) if move else None
        moves = [self.prices.move(before[:2], after[:2], *array, move)]
        if self.objective == BOTH:  # copies are the sums of gradients
            back = move and (lambda: move().dual)
            moves.append(self.prices.move(after[::2], before[::2], *array, back))
        return shardings.accesses[i] * math.prod([dim.rows for dim in dims]), tuple(moves)
