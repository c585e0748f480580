"""The cheapest plan of a contraction: its placement and, of three or more operands, the order of pairs."""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from xshard.caches import layout_cache
from xshard.contractions.expression import Contraction
from xshard.contractions.placements import Axes, EinsumShardings, Placement, dim_lengths, operations
from xshard.contractions.plan import ContractionPlan, Part
from xshard.contractions.prices import ESTIMATE, Prices
from xshard.contractions.ring import ALWAYS, NEVER, rings
from xshard.contractions.search import SLACK, Candidate, CandidateSearch
from xshard.cost.model import Profile, too_large
from xshard.errors import PlanError
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import Dim
from xshard.plans.kept import kept
from xshard.search.request import BOTH, FORWARD

ALL_ORDERS = 4  # most operands for which every order of pairs is weighed
RING_SHARE = 0.9  # most of its seconds in turn that a part in rounds may take: predictions err
WIDTH = 8  # candidates of a pair that are followed up, the best first

# The indices of the operands that every part takes, among those left; its result goes behind the others.
Takes = tuple[int, ...]
Order = tuple[Takes, ...]


@dataclass(frozen=True)
class ContractionRequest:
    """All that a plan of a contraction depends on, as the key of a cache."""

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
    def shardings(self) -> EinsumShardings:
        """The operands and the result on the mesh."""
        layouts = self.contraction.operands
        result = self.contraction.result
        lengths = dim_lengths(layouts, self.shapes)
        shapes = *self.shapes, tuple(lengths[name] for name in result.names)
        *operands, y = (
            Sharding(x, self.mesh, n) for x, n in zip((*layouts, result), shapes, strict=True)
        )
        return EinsumShardings(tuple(operands), y)


@layout_cache(maxsize=4096)
def find_contraction(request: ContractionRequest) -> ContractionPlan:
    """The cheapest plan, kept by an earlier run or searched for. Raises PlanError if none fits the limits."""
    return kept(request, ContractionPlan.from_json, lambda: _search(request))


def _search(request: ContractionRequest) -> ContractionPlan:
    limit = request.memory_limit
    least = None
    for plan in _Solver(request).plans():
        if limit is None or plan.peak_bytes <= limit:
            return replace(plan, memory_limit=limit)
        least = plan.peak_bytes if least is None else min(least, plan.peak_bytes)
    if least is None:
        what = f"every way takes more than {request.flops_limit} operations"
        raise PlanError(what, hint="raise flops_limit=")
    raise too_large(limit, least)


class ContractionPath(NamedTuple):
    """Contractions one after the other, their seconds and operations, and the operands left at the end."""

    seconds: float
    flops: int
    left: tuple[Sharding, ...]
    steps: tuple[tuple[Takes, Candidate], ...]  # indices of operands among those left

    def then(self, takes: Takes, candidate: Candidate) -> ContractionPath:
        """The path with one more contraction; its result goes behind the operands that are left."""
        rest = tuple(operand for i, operand in enumerate(self.left) if i not in takes)
        result = candidate.shardings.result.with_layout(candidate.moves[-1].dst)
        total = self.seconds + candidate.seconds, self.flops + candidate.flops
        return ContractionPath(*total, (*rest, result), (*self.steps, (takes, candidate)))

    def priced(self, prices: Prices, below: float) -> float:
        """Seconds by the prices of all moves; of fewer moves once it is not below."""
        candidates = [candidate for _, candidate in self.steps]
        for candidate in sorted(candidates, key=lambda candidate: -candidate.seconds):
            others = sum(other.seconds for other in candidates if other is not candidate)
            candidate.priced(prices, below - others)
        return sum(candidate.seconds for candidate in candidates)


class _Solver:
    """The plans for one request, the cheapest first."""

    def __init__(self, request: ContractionRequest) -> None:
        self.request = request
        self.shardings = request.shardings
        self.prices = Prices(request.mesh, request.dtype, request.profile)
        self.start = ContractionPath(0.0, 0, self.shardings.operands, ())
        self.best: list[float] = []  # seconds of complete paths

    def plans(self) -> Iterator[ContractionPlan]:
        """Plans, the cheapest first."""
        if len(self.shardings.operands) > 2:
            yield from map(self._plan, self._paths())
            return
        limit = self.request.flops_limit
        objective = self.request.objective
        every = CandidateSearch(self.shardings, self.prices, objective)
        candidates = every.best(limit)
        if objective == BOTH and (first := next(candidates, None)):
            # Candidates are ranked with waiting, plans without, so the forward pass' best may cost less.
            other = next(CandidateSearch(self.shardings, self.prices, FORWARD).best(limit))
            both = first, every.candidate(other.placement)
            candidates = itertools.chain([min(both, key=self._cost)], candidates)
        yield from map(self._plan, map(self._at_once, candidates))

    def _cost(self, candidate: Candidate) -> float:
        """Seconds by prices, in rounds if they may be."""
        candidate.priced(self.prices)
        if self.request.overlap != NEVER:
            return self._plan(self._at_once(candidate)).cost
        return round(candidate.work + sum([move.seconds for move in candidate.estimates]), 15)

    def _at_once(self, candidate: Candidate) -> ContractionPath:
        """The path of one contraction of all operands."""
        return self.start.then(tuple(range(len(self.start.left))), candidate)

    def _paths(self) -> list[ContractionPath]:
        """The best paths pair by pair: searched by estimates of their moves, ranked by prices."""
        limit = self.request.flops_limit
        search = CandidateSearch(self.shardings, self.prices, self.request.objective)
        at_once = next(search.best(level=ESTIMATE)).placement
        paths = [
            path for order in _orders(self.shardings) for path in self._paths_in(order, at_once)
        ]
        paths = [path for path in paths if limit is None or path.flops <= limit]
        finalists: list[tuple[float, int, ContractionPath]] = []
        for n, path in enumerate(sorted(paths, key=lambda path: path.seconds)[:WIDTH]):
            least = finalists[0][0] if finalists else math.inf
            insort(finalists, (path.priced(self.prices, SLACK * least), n, path))
        return [path for *_, path in finalists]

    def _paths_in(self, order: Order, at_once: Placement) -> Iterator[ContractionPath]:
        """The best paths in one order, and the path on which every pair has the placement `at_once`."""
        paths = [self.start]
        in_one_placement = self.start
        numbers = list(range(len(self.shardings.operands)))
        for takes in order:
            longer = [path for shorter in paths for path in self._extended(shorter, takes, order)]
            paths = sorted(longer, key=lambda path: path.seconds)[:WIDTH]
            pair = self._pair(in_one_placement, takes)
            placement = restrict_to_pair(self.shardings, at_once, pair, [numbers[i] for i in takes])
            numbers = [n for i, n in enumerate(numbers) if i not in takes] + [-1]
            candidate = CandidateSearch(pair, self.prices, self.request.objective).candidate(
                placement
            )
            # Prices decide about it, not estimates.
            seconds = in_one_placement.seconds + candidate.total(attrgetter("least"))
            in_one_placement = in_one_placement.then(takes, candidate)._replace(seconds=seconds)
        yield from (*paths, in_one_placement)

    def _extended(
        self, path: ContractionPath, takes: Takes, order: Order
    ) -> Iterator[ContractionPath]:
        """A path with one more contraction, in each of its best placements."""
        pair = self._pair(path, takes)
        is_last = len(path.left) == len(takes)
        limit = self.request.flops_limit
        if limit is not None:
            limit -= path.flops + sum(self._least_flops(order)[len(path.steps) + 1 :])
        # A complete path has to be among the best of all orders.
        below = (self.best[WIDTH - 1] if len(self.best) >= WIDTH else math.inf) - path.seconds
        if below <= 0:
            return
        search = CandidateSearch(pair, self.prices, self.request.objective, below)
        for candidate in itertools.islice(search.best(limit, ESTIMATE), 1 if is_last else WIDTH):
            longer = path.then(takes, candidate)
            if is_last:
                insort(self.best, longer.seconds)
            yield longer

    def _least_flops(self, order: Order) -> list[int]:
        """The operations of each contraction in an order, if no device repeats the work of another."""
        lengths = self.shardings.lengths
        flops = []
        left = [set(operand.layout.names) for operand in self.shardings.operands]
        for takes in order:
            rest = [names for i, names in enumerate(left) if i not in takes]
            names = set().union(*(left[i] for i in takes))
            kept = names & set(self.shardings.result.layout.names).union(*rest)
            total = operations((lengths[n] for n in names), len(takes), has_sum=names > kept)
            flops.append(total // self.request.mesh.n_devices)
            left = [*rest, kept]
        return flops

    def _pair(self, path: ContractionPath, takes: Takes) -> EinsumShardings:
        """Two of the operands that are left, and their result: unsharded if others are left."""
        operands = tuple(path.left[i] for i in takes)
        rest = [operand for i, operand in enumerate(path.left) if i not in takes]
        if not rest:
            return EinsumShardings(operands, self.shardings.result, self.shardings.dim_shardings)
        kept = {name for other in (*rest, self.shardings.result) for name in other.layout.names}
        lengths = dim_lengths((x.layout for x in operands), (x.shape for x in operands))
        dims = {name: n for name, n in lengths.items() if name in kept}
        result = Sharding(Layout(tuple(map(Dim, dims))), self.request.mesh, tuple(dims.values()))
        return EinsumShardings(operands, result, self.shardings.dim_shardings, stays=True)

    def _plan(self, path: ContractionPath) -> ContractionPlan:
        r = self.request
        parts = tuple(itertools.starmap(self._part, path.steps))
        return ContractionPlan(
            r.contraction, r.mesh, r.shapes, r.dtype, parts, r.profile, None, r.objective
        )

    def _part(self, takes: Takes, candidate: Candidate) -> Part:
        """The part, in the ring in which it takes the fewest seconds if that is wanted."""
        *moves, result = map(self.prices.plan, candidate.moves)
        part = Part(takes, tuple(moves), result)
        overlap = self.request.overlap
        if overlap == NEVER:
            return part
        in_rounds = (replace(part, ring=ring) for ring in rings(part))
        best = min(in_rounds, key=lambda part: part.seconds, default=part)
        return best if overlap == ALWAYS or best.seconds < RING_SHARE * part.seconds else part


def restrict_to_pair(
    shardings: EinsumShardings, placement: Placement, pair: EinsumShardings, numbers: Sequence[int]
) -> Placement:
    """A placement of all as two operands, `numbers`, see it; -1 is the result of an earlier pair."""
    all_dims = dict(zip(shardings.lengths, placement.dims, strict=True))
    dims = tuple(all_dims[name] for name in pair.lengths)
    sharding = Axes().union(*(dim.axes for dim in dims))
    busy = [axis for axis in shardings.axes if axis in placement.busy - sharding]
    sums = tuple(
        (axis, i)
        for i, (n, operand) in enumerate(zip(numbers, pair.operands, strict=True))
        for axis in operand.layout.tagged("sum", "mean")
        if axis in busy and (n < 0 or (axis, n) in placement.sums)
    )
    held = {axis for axis, _ in sums}
    return Placement.of(dims, sums, tuple(axis for axis in busy if axis not in held))


def _orders(shardings: EinsumShardings) -> Iterator[Order]:
    """Orders in which to contract pairs."""
    n = len(shardings.operands)
    if n <= ALL_ORDERS:
        pairs = [list(itertools.combinations(range(left), 2)) for left in range(n, 1, -1)]
        yield from itertools.product(*pairs)
        return
    numbers = {name: i for i, name in enumerate(shardings.lengths)}
    arguments: list[Any] = []
    for operand in shardings.operands:
        dims = [numbers[name] for name in operand.layout.names]
        arguments += [np.broadcast_to(np.float32(0), operand.shape), dims]
    result = [numbers[name] for name in shardings.result.layout.names]
    path = np.einsum_path(*arguments, result, optimize="greedy")[0][1:]
    # If pairs save no operations, numpy takes all that are left at once.
    each = ([takes] if len(takes) == 2 else [(0, 1)] * (len(takes) - 1) for takes in path)
    yield tuple(map(tuple, itertools.chain.from_iterable(each)))
