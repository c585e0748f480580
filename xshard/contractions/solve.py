"""The cheapest plan of a contraction: its place, and the order of its pairs.

Decides which orders of pairs are weighed: all of them up to
four operands, then the one that numpy finds for whole arrays.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from xshard.contractions.expression import Contraction
from xshard.contractions.places import Ends, Place
from xshard.contractions.plan import ContractionPlan, Part
from xshard.contractions.prices import GUESS, Prices
from xshard.contractions.ring import ALWAYS, NEVER, rings
from xshard.contractions.search import SLACK, Found, best_places, found_at
from xshard.cost.model import Profile
from xshard.errors import PlanError
from xshard.formatting import format_bytes
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import Dim
from xshard.search.request import BOTH, FORWARD

ALL_ORDERS = 4  # operands up to which every order of pairs is weighed
RING_SHARE = 0.9  # of its seconds in turn, at most, that a part in rounds has to take: predictions err
WIDTH = 8  # places of a pair that are followed up, the best first

# Which of the operands that are left every part takes; its result goes behind them.
Order = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ContractionRequest:
    """What a plan of a contraction is asked for, as one value that planning is cached by."""

    contraction: Contraction
    mesh: Mesh
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    profile: Profile
    memory_limit: int | None
    flops_limit: int | None
    objective: str
    overlap: str = NEVER

    @property
    def ends(self) -> Ends:
        """The operands and the result."""
        pairs = zip(self.contraction.operands, self.shapes, strict=True)
        operands = tuple(Sharding(layout, self.mesh, shape) for layout, shape in pairs)
        lengths = {n: k for o in operands for n, k in zip(o.layout.names, o.shape, strict=True)}
        result = self.contraction.result
        return Ends(operands, Sharding(result, self.mesh, tuple(lengths[name] for name in result.names)))


@lru_cache(maxsize=4096)
def find_contraction(request: ContractionRequest) -> ContractionPlan:
    """The cheapest plan. Raises PlanError where none keeps to the limits."""
    limit, least = request.memory_limit, None
    for made in _Solver(request).plans():
        if limit is None or made.peak_bytes <= limit:
            return replace(made, memory_limit=limit)
        least = made.peak_bytes if least is None else min(least, made.peak_bytes)
    if least is None:
        raise PlanError(
            f"every way takes more than {request.flops_limit} operations", hint="raise flops_limit="
        )
    raise PlanError(
        f"no plan stays within {format_bytes(limit or 0)} per device",
        hint=f"the least of those weighed is {format_bytes(least)} ({least} bytes)",
    )


class _Step(NamedTuple):
    """One contraction of a way: which of the operands left it takes, what they are, and where."""

    takes: tuple[int, ...]
    ends: Ends
    found: Found


class _Way(NamedTuple):
    """Contractions one after the other, what is left, and the seconds and operations of what is done."""

    seconds: float
    flops: int
    left: tuple[Sharding, ...]
    steps: tuple[_Step, ...]

    def then(self, takes: tuple[int, ...], ends: Ends, found: Found) -> _Way:
        """With one more; what it gives goes behind the operands that are left."""
        rest = tuple(one for i, one in enumerate(self.left) if i not in takes)
        result = ends.result.with_layout(found.result.dst)
        total = self.seconds + found.seconds, self.flops + found.flops
        return _Way(*total, (*rest, result), (*self.steps, _Step(takes, ends, found)))

    def priced(self, prices: Prices, below: float) -> float:
        """Seconds by the prices of all moves; of fewer moves once it is not below."""
        for step in sorted(self.steps, key=lambda step: -step.found.seconds):
            others = sum(other.found.seconds for other in self.steps if other is not step)
            step.found.priced(prices, below - others)
        return sum(step.found.seconds for step in self.steps)


class _Solver:
    """The plans for one request, the cheapest first."""

    def __init__(self, request: ContractionRequest) -> None:
        self.request, self.ends = request, request.ends
        self.prices = Prices(request.mesh, request.dtype, request.profile)
        self.best: list[float] = []  # seconds of whole ways pair by pair

    def plans(self) -> Iterator[ContractionPlan]:
        """Plans, the cheapest first."""
        if len(self.ends.operands) > 2:
            yield from map(self._plan, self._in_pairs())
            return
        none, takes = _Way(0.0, 0, self.ends.operands, ()), tuple(range(len(self.ends.operands)))
        plans = (self._plan(none.then(takes, self.ends, found)) for found in self._places(self.ends))
        if self.request.objective == BOTH and (first := next(plans, None)):
            # Places are ranked with waiting, plans by their cost: the place of the forward pass may be best.
            found = next(self._places(self.ends, objective=FORWARD))
            yield min(first, self._plan(none.then(takes, self.ends, found)), key=lambda plan: plan.cost)
        yield from plans

    def _places(self, ends: Ends, *, objective: str | None = None, **options: Any) -> Iterator[Found]:
        options = {"flops_limit": self.request.flops_limit, **options}
        return best_places(ends, self.prices, objective or self.request.objective, **options)

    def _in_pairs(self) -> list[_Way]:
        """The best ways to contract pair by pair: found by bounds of their moves, ranked by prices."""
        together = next(self._places(self.ends, flops_limit=None, level=GUESS)).place
        ways = [way for order in _orders(self.ends) for way in self._in_order(order, together)]
        if self.request.flops_limit is not None:
            ways = [way for way in ways if way.flops <= self.request.flops_limit]
        finalists: list[tuple[float, int, _Way]] = []
        for n, way in enumerate(sorted(ways, key=lambda way: way.seconds)[:WIDTH]):
            least = finalists[0][0] if finalists else math.inf
            insort(finalists, (way.priced(self.prices, SLACK * least), n, way))
        return [way for *_, way in finalists]

    def _in_order(self, order: Order, together: Place) -> Iterator[_Way]:
        """The best ways in one order, and the way on which all pairs are contracted in one place."""
        ways = [_Way(0.0, 0, self.ends.operands, ())]
        one_place, numbers = ways[0], list(range(len(self.ends.operands)))
        for takes in order:
            longer = [way for known in ways for way in self._longer(known, takes, order)]
            ways = sorted(longer, key=lambda way: way.seconds)[:WIDTH]
            pair = self._pair(one_place, takes)
            place = _narrowed(self.ends, together, pair, [numbers[i] for i in takes])
            numbers = [n for i, n in enumerate(numbers) if i not in takes] + [-1]
            found = found_at(pair, place, self.prices, self.request.objective, stays=len(one_place.left) > 2)
            one_place = one_place.then(takes, pair, found)
        yield from (*ways, one_place)

    def _longer(self, way: _Way, takes: tuple[int, ...], order: Order) -> Iterator[_Way]:
        """A way with one more contraction, in each of its best places."""
        pair, is_last = self._pair(way, takes), len(way.left) == len(takes)
        limit = self.request.flops_limit
        if limit is not None:
            limit -= way.flops + sum(self._even_flops(order)[len(way.steps) + 1 :])
        # A whole way has to be among the best of all orders.
        most = self.best[WIDTH - 1] if len(self.best) >= WIDTH else math.inf
        below = most - way.seconds if is_last else math.inf
        places = self._places(pair, stays=not is_last, flops_limit=limit, level=GUESS, below=below)
        for found in itertools.islice(places, 1 if is_last else WIDTH):
            longer = way.then(takes, pair, found)
            if is_last:
                insort(self.best, longer.seconds)
            yield longer

    def _even_flops(self, order: Order) -> list[int]:
        """Of the contractions in an order, if no device repeats the work of another: there are no fewer."""
        lengths, left, found = self.ends.lengths, [set(o.layout.names) for o in self.ends.operands], []
        for takes in order:
            rest = [names for i, names in enumerate(left) if i not in takes]
            names = set().union(*(left[i] for i in takes))
            kept = names & set(self.ends.result.layout.names).union(*rest)
            flops = (2 if names - kept else 1) * math.prod(lengths[name] for name in names)
            found.append(flops // self.request.mesh.n_devices)
            left = [*rest, kept]
        return found

    def _pair(self, way: _Way, takes: tuple[int, ...]) -> Ends:
        """Some of the operands that are left, and what they are contracted to."""
        rest = tuple(one for i, one in enumerate(way.left) if i not in takes)
        taken = tuple(way.left[i] for i in takes)
        return Ends(taken, _whole(taken, (*rest, self.ends.result)) if rest else self.ends.result)

    def _plan(self, way: _Way) -> ContractionPlan:
        r = self.request
        parts = tuple(map(self._part, way.steps))
        return ContractionPlan(r.contraction, r.mesh, r.shapes, r.dtype, parts, r.profile, None, r.objective)

    def _part(self, step: _Step) -> Part:
        moves, result = tuple(map(self.prices.plan, step.found.moves)), self.prices.plan(step.found.result)
        return self._in_rounds(Part(step.takes, moves, result))

    def _in_rounds(self, part: Part) -> Part:
        """The part in the ring in which it takes the fewest seconds, if that is wanted."""
        if self.request.overlap == NEVER:
            return part
        ways = (replace(part, ring=ring) for ring in rings(part))
        best = min(ways, key=lambda way: way.seconds, default=part)
        gains = best.seconds < RING_SHARE * part.seconds
        return best if gains or self.request.overlap == ALWAYS else part


def _narrowed(ends: Ends, place: Place, pair: Ends, numbers: Sequence[int]) -> Place:
    """What the axes do in a place of all operands, seen by two of them: those that cut no dim hold copies.

    numbers: which of the operands the two are; -1 for what a pair before them gives.
    """
    cuts = dict(zip(ends.lengths, place.cuts, strict=True))
    mine = tuple(cuts[name] for name in pair.lengths)
    busy = [axis for axis in ends.axes if axis in place.busy.difference(*(cut.axes for cut in mine))]
    sums = tuple(
        (axis, i)
        for i, (n, operand) in enumerate(zip(numbers, pair.operands, strict=True))
        for axis in operand.layout.tagged("sum", "mean")
        if axis in busy and (n < 0 or (axis, n) in place.sums)
    )
    held = {axis for axis, _ in sums}
    return Place.of(mine, sums, tuple(axis for axis in busy if axis not in held))


def _whole(operands: Sequence[Sharding], others: Sequence[Sharding]) -> Sharding:
    """The result of a pair, uncut: the dims that others have."""
    wanted = {name for other in others for name in other.layout.names}
    dims = {n: k for o in operands for n, k in zip(o.layout.names, o.shape, strict=True) if n in wanted}
    return Sharding(Layout(tuple(map(Dim, dims))), operands[0].mesh, tuple(dims.values()))


def _orders(ends: Ends) -> Iterator[Order]:
    """Orders in which to contract pairs."""
    n = len(ends.operands)
    if n > ALL_ORDERS:
        letters = {name: i for i, name in enumerate(ends.lengths)}
        given: list[Any] = []
        for o in ends.operands:
            given += [np.broadcast_to(np.float32(0), o.shape), [letters[name] for name in o.layout.names]]
        kept = [letters[name] for name in ends.result.layout.names]
        path = np.einsum_path(*given, kept, optimize="greedy")[0][1:]
        # Where pairs save no operations, numpy takes all that are left at once.
        each = ([takes] if len(takes) == 2 else [(0, 1)] * (len(takes) - 1) for takes in path)
        yield tuple(map(tuple, itertools.chain.from_iterable(each)))
        return
    pairs = [list(itertools.combinations(range(left), 2)) for left in range(n, 1, -1)]
    yield from itertools.product(*pairs)
