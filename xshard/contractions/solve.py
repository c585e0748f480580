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
from xshard.contractions.placements import (
    RESULT,
    Axes,
    EinsumShardings,
    Placement,
    dim_lengths,
    operations,
)
from xshard.contractions.plan import ContractionPlan, Part, remaining
from xshard.contractions.prices import ESTIMATE, Prices
from xshard.contractions.ring import ALWAYS, NEVER, rings
from xshard.contractions.search import Candidate, CandidateSearch, by_prices
from xshard.cost.model import Profile, too_large
from xshard.errors import PlanError
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import Dim
from xshard.plans.disk_cache import read_or_make
from xshard.search.request import BOTH, FORWARD
from xshard.search.states import common, without

ALL_ORDERS = 4  # up to so many operands every order of pairs is weighed: 18 orders
# A ring has to take less than this share of the seconds without it, since predictions err.
RING_SHARE = 0.9
WIDTH = 8  # candidates of a pair that are followed up, the best first

# A contraction takes operands out of a list of those that remain, by their indices in this list, and
# puts its result at the end: of operands a b c, (0, 1) leaves c ab.
OperandIndices = tuple[int, ...]
Order = tuple[OperandIndices, ...]


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
        arrays = zip(layouts, self.shapes, strict=True)
        operands = tuple(Sharding(layout, self.mesh, shape) for layout, shape in arrays)
        result_shape = tuple(lengths[name] for name in result.names)
        return EinsumShardings(operands, Sharding(result, self.mesh, result_shape))


@layout_cache(maxsize=4096)
def find_contraction(request: ContractionRequest) -> ContractionPlan:
    """Return the cheapest plan: one that an earlier run has kept, or one that is searched for.

    Raises PlanError if none fits the limits.
    """
    return read_or_make(request, ContractionPlan.from_json, lambda: _search(request))


def _search(request: ContractionRequest) -> ContractionPlan:
    """Return the cheapest plan that stays within the memory limit.

    Raises PlanError, with the least memory that any plan takes, if there is none.
    """
    limit = request.memory_limit
    peaks_bytes: list[int] = []
    for plan in _Solver(request).plans():
        if limit is None or plan.peak_bytes <= limit:
            return replace(plan, memory_limit=limit)
        peaks_bytes.append(plan.peak_bytes)
    if not peaks_bytes:  # no plan at all: `flops_limit` ruled all of them out
        reason = f"every way takes more than {request.flops_limit} operations"
        raise PlanError(reason, hint="raise flops_limit=")
    # The error says how much memory the user would have to allow.
    raise too_large(limit, min(peaks_bytes))


class PathStep(NamedTuple):
    """One contraction of a path: the indices of its operands among the remaining ones, and its placement."""

    operand_indices: OperandIndices
    candidate: Candidate


class ContractionPath(NamedTuple):
    """Contractions one after the other: their seconds and operations, and the operands that remain."""

    seconds: float
    flops: int
    remaining: tuple[Sharding, ...]
    steps: tuple[PathStep, ...]

    def with_step(self, operand_indices: OperandIndices, candidate: Candidate) -> ContractionPath:
        """Return the path with one more contraction; its result goes behind the remaining operands."""
        # The next contraction starts from where this one leaves its result.
        result = candidate.shardings.result.with_layout(candidate.moves[-1].dst)
        return ContractionPath(
            seconds=self.seconds + candidate.seconds,
            flops=self.flops + candidate.flops,
            remaining=(*remaining(self.remaining, operand_indices), result),
            steps=(*self.steps, PathStep(operand_indices, candidate)),
        )

    def price(self, prices: Prices, below: float) -> float:
        """Price all moves, the slowest contraction first, and return the seconds.

        It stops once the seconds are not below `below`: then other paths are better.
        """
        candidates = [step.candidate for step in self.steps]
        for candidate in sorted(candidates, key=attrgetter("seconds"), reverse=True):
            # Prices only raise seconds: the others take at least what is known of them.
            other_seconds = sum(other.seconds for other in candidates if other is not candidate)
            candidate.price(prices, below - other_seconds)
        return sum(candidate.seconds for candidate in candidates)


class _Solver:
    """The plans for one request, the cheapest first."""

    def __init__(self, request: ContractionRequest) -> None:
        self.request = request
        self.shardings = request.shardings
        self.prices = Prices(request.mesh, request.dtype, request.profile)
        self.start = ContractionPath(
            seconds=0.0, flops=0, remaining=self.shardings.operands, steps=()
        )
        self.best: list[float] = []  # seconds of complete paths, in order

    def plans(self) -> Iterator[ContractionPlan]:
        """Iterate over plans, the cheapest first."""
        if len(self.shardings.operands) > 2:
            yield from map(self._plan, self._paths_of_pairs())
            return
        for candidate in self._candidates_at_once():
            yield self._plan(self._as_single_contraction(candidate))

    def _candidates_at_once(self) -> Iterator[Candidate]:
        """Iterate over the ways to contract all operands (one or two) at once, the best first."""
        limit = self.request.flops_limit
        search = self._search_in(self.shardings)
        candidates = search.best(limit)
        if self.request.objective != BOTH:
            return candidates
        best_candidate = next(candidates, None)
        if best_candidate is None:
            return candidates  # all exceed the limit
        # The search adds some seconds to each move, in which devices wait for each other, and the
        # cost of a plan has none. So the placement that is best for the forward pass alone may cost
        # less as a plan, also with its backward pass: the cheaper of both comes first. The other
        # one follows, since it may take less memory.
        forward_search = CandidateSearch(self.shardings, self.prices, FORWARD)
        forward_placement = next(forward_search.best(limit)).placement
        best_two = sorted(
            [best_candidate, search.candidate(forward_placement)], key=self._plan_seconds
        )
        return itertools.chain(best_two, candidates)

    def _search_in(self, shardings: EinsumShardings, below: float = math.inf) -> CandidateSearch:
        return CandidateSearch(shardings, self.prices, self.request.objective, below)

    def _plan_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of the plan of a candidate, in rounds if it may be."""
        candidate.price(self.prices)
        if self.request.overlap != NEVER:
            return self._plan(self._as_single_contraction(candidate)).cost
        # The same without making a plan, and rounded as candidates' seconds are.
        return round(candidate.work_s + sum(move.seconds for move in candidate.estimates), 15)

    def _as_single_contraction(self, candidate: Candidate) -> ContractionPath:
        """Return the path of one contraction of all operands."""
        return self.start.with_step(tuple(range(len(self.start.remaining))), candidate)

    def _paths_of_pairs(self) -> list[ContractionPath]:
        """Return the best ways to contract three or more operands pair by pair, the fastest first.

        `a b, b c, c d -> a d` may contract the first two operands and then the third, or the last
        two first, and so on; each pair may be sharded in many ways (its placement). All orders are
        searched by estimates of the seconds of moves, and only the best few paths get exact prices.
        """
        limit = self.request.flops_limit
        # In each order, one more path is tried: the best placement of all operands, as if they were
        # contracted at once, for every pair.
        at_once = next(self._search_in(self.shardings).best(level=ESTIMATE)).placement
        paths = []
        for order in _orders(self.shardings):
            for path in (*self._paths_in(order), self._path_in_placement(order, at_once)):
                if limit is None or path.flops <= limit:
                    paths.append(path)
        paths.sort(key=attrgetter("seconds"))
        return by_prices(paths[:WIDTH], self._rank_by_price)

    def _rank_by_price(self, path: ContractionPath, below: float) -> tuple[float]:
        return (path.price(self.prices, below),)

    def _paths_in(self, order: Order) -> list[ContractionPath]:
        """Return the best paths in one order: a beam search, `WIDTH` paths wide."""
        paths = [self.start]
        min_flops = self._min_flops(order)
        for n_contracted, operand_indices in enumerate(order):
            flops_to_follow = sum(min_flops[n_contracted + 1 :])
            extended_paths: list[ContractionPath] = []
            for path in paths:
                extended_paths += self._extend_path(path, operand_indices, flops_to_follow)
            paths = sorted(extended_paths, key=attrgetter("seconds"))[:WIDTH]
        return paths

    def _path_in_placement(self, order: Order, placement: Placement) -> ContractionPath:
        """Return the path on which every pair is sharded as was best for all operands at once.

        A pair's best placement may be a bad start for the next pair. On this path a pair's result
        is already sharded as the next pair needs it, so that nothing moves between pairs.

        order: the indices of each pair among the remaining operands. placement: of all operands at
        once.
        """
        path = self.start
        # For each remaining operand its index among all operands, or RESULT, -1, for that of a pair.
        # After operands 0 and 1 of three are contracted: [2, -1].
        original_indices = list(range(len(self.shardings.operands)))
        for operand_indices in order:
            pair = self._pair(path, operand_indices)
            pair_indices = [original_indices[i] for i in operand_indices]
            pair_placement = restrict_to_pair(self.shardings, placement, pair, pair_indices)
            candidate = self._search_in(pair).candidate(pair_placement)
            # Lower bounds of its seconds, instead of estimates: that puts it among the few paths
            # whose exact prices are compared.
            seconds = path.seconds + candidate.lower_bound_s
            path = path.with_step(operand_indices, candidate)._replace(seconds=seconds)
            original_indices = [*remaining(original_indices, operand_indices), RESULT]
        return path

    def _extend_path(
        self, path: ContractionPath, operand_indices: OperandIndices, flops_to_follow: int
    ) -> list[ContractionPath]:
        """Return the path with one more pair contracted, in each of the best ways to shard the pair.

        If no pair follows, the seconds of the result are added to `self.best`, so that later calls
        can leave out what takes longer.

        operand_indices: of the pair among the remaining operands. flops_to_follow: what the pairs
        after it take at least, and which is kept free for them.
        """
        flops_limit = self.request.flops_limit
        if flops_limit is not None:
            flops_limit -= path.flops + flops_to_follow
        below = math.inf
        # Only the `WIDTH` fastest complete paths are priced in the end: what is slower than all of
        # `WIDTH` known ones is not looked at.
        if len(self.best) >= WIDTH:
            below = self.best[WIDTH - 1] - path.seconds
        if below <= 0:
            return []
        candidates = self._search_in(self._pair(path, operand_indices), below).best(
            flops_limit, ESTIMATE
        )
        if len(path.remaining) > len(operand_indices):
            best_candidates = itertools.islice(candidates, WIDTH)
            return [path.with_step(operand_indices, candidate) for candidate in best_candidates]
        best_end = next(candidates, None)  # no other end of this path can win
        if best_end is None:
            return []
        complete = path.with_step(operand_indices, best_end)
        insort(self.best, complete.seconds)
        return [complete]

    def _min_flops(self, order: Order) -> list[int]:
        """Return a lower bound of the operations on each device, for each pair of an order.

        The bound is the operations of the pair over the number of devices, as if the work were
        shared equally. `a b, b c -> a c` of 8, 4 and 2 on 4 devices: 2 * 8 * 4 * 2 / 4 = 32.
        """
        lengths = self.shardings.lengths
        result_names = set(self.shardings.result.layout.names)
        flops = []
        remaining_names = [set(operand.layout.names) for operand in self.shardings.operands]
        for operand_indices in order:
            other_names = remaining(remaining_names, operand_indices)
            pair_names = set[str]().union(*[remaining_names[i] for i in operand_indices])
            # A dim is summed as soon as neither another operand nor the result has it.
            kept_names = pair_names & result_names.union(*other_names)
            pair_lengths = [lengths[name] for name in pair_names]
            pair_flops = operations(
                pair_lengths, len(operand_indices), has_sum=pair_names != kept_names
            )
            flops.append(pair_flops // self.request.mesh.n_devices)
            remaining_names = [*other_names, kept_names]
        return flops

    def _pair(self, path: ContractionPath, operand_indices: OperandIndices) -> EinsumShardings:
        """Describe the contraction of a pair of the remaining operands: its operands and its result.

        The last pair gives the result that the request wants. The result of an earlier pair keeps
        the dims that other operands or the result need, and is not moved: `a b, b c, c d -> a d`,
        first pair: `a b, b c -> a c`.

        operand_indices: of the pair among the operands that remain on `path`.
        """
        operands = tuple(path.remaining[i] for i in operand_indices)
        other_operands = remaining(path.remaining, operand_indices)
        pair = replace(self.shardings, operands=operands)
        if not other_operands:
            return pair
        needed_names = set[str]().union(
            *[array.layout.names for array in (*other_operands, self.shardings.result)]
        )
        dims = {name: length for name, length in pair.lengths.items() if name in needed_names}
        # Unsharded and without tags: it is not moved, so that its layout does not matter.
        layout = Layout(tuple(map(Dim, dims)))
        result = Sharding(layout, self.request.mesh, tuple(dims.values()))
        return replace(pair, result=result, stays=True)

    def _plan(self, path: ContractionPath) -> ContractionPlan:
        """Return the plan of a path, not checked against the memory limit."""
        request = self.request
        return ContractionPlan(
            contraction=request.contraction,
            mesh=request.mesh,
            shapes=request.shapes,
            dtype=request.dtype,
            parts=tuple([self._part(step.operand_indices, step.candidate) for step in path.steps]),
            profile=request.profile,
            memory_limit=None,  # a plan over the limit would raise: `_search` looks at it
            objective=request.objective,
        )

    def _part(self, operand_indices: OperandIndices, candidate: Candidate) -> Part:
        """Build one local contraction of a plan, with the plans of its moves.

        `overlap` of the request says whether one move, a gather or a reduce-scatter, becomes a
        ring, in which blocks go from device to device while others are contracted: "never";
        "always", if the moves allow it; "auto", if that is predicted to be clearly faster.

        operand_indices: of its operands among the remaining ones.
        """
        *moves, result = map(self.prices.plan, candidate.moves)
        part = Part(operand_indices, tuple(moves), result)
        overlap = self.request.overlap
        if overlap == NEVER:
            return part
        ring_parts = [replace(part, ring=ring) for ring in rings(part)]
        if not ring_parts:
            return part
        fastest = min(ring_parts, key=attrgetter("seconds"))
        # A margin, since the many small products of a ring may be slower than predicted.
        is_faster = fastest.seconds < RING_SHARE * part.seconds
        return fastest if is_faster or overlap == ALWAYS else part


def restrict_to_pair(
    shardings: EinsumShardings,
    placement: Placement,
    pair: EinsumShardings,
    original_indices: Sequence[int],
) -> Placement:
    """Restrict a placement of all operands of a contraction to a pair of them.

    A placement is what every mesh axis does while blocks are contracted: shard a dim, hold partial
    sums of one operand, or hold copies. Of `a b, b c, c d -> a d` with tp on d, the pair `a b, b c`
    has copies along tp.

    Args:
        shardings: All operands, and the result.
        placement: Of all operands.
        pair: Two operands, and their result.
        original_indices: Of the pair's operands among all; RESULT for that of an earlier pair.
    """
    all_dims = dict(zip(shardings.lengths, placement.dims, strict=True))
    dims = tuple(all_dims[name] for name in pair.lengths)
    sharding_axes = Axes().union(*[dim.axes for dim in dims])
    # Axes that shard no dim of the pair, but do something in the whole contraction: they hold
    # partial sums or copies here. In mesh order, so that results do not depend on a set's order.
    nonsharding_axes = common(shardings.axes, placement.active_axes - sharding_axes)
    operand_of_sum: dict[str, int] = {}  # by axis, the index in the pair
    for i, (original_index, operand) in enumerate(
        zip(original_indices, pair.operands, strict=True)
    ):
        for axis in operand.layout.tagged("sum", "mean"):
            # An operand's sums are reduced before, unless the placement keeps them.
            is_kept = original_index == RESULT or (axis, original_index) in placement.sums
            if axis in nonsharding_axes and is_kept:
                operand_of_sum[axis] = i
    copies = without(nonsharding_axes, operand_of_sum)
    return Placement.of(dims, tuple(operand_of_sum.items()), copies)


def _orders(shardings: EinsumShardings) -> Iterator[Order]:
    """Iterate over orders in which to contract pairs: all of them, or numpy's greedy one."""
    n_operands = len(shardings.operands)
    if n_operands > ALL_ORDERS:
        yield _greedy_order(shardings)
        return
    choices_per_step = [
        itertools.combinations(range(n_remaining), 2) for n_remaining in range(n_operands, 1, -1)
    ]
    yield from itertools.product(*choices_per_step)


def _greedy_order(shardings: EinsumShardings) -> Order:
    """Ask numpy's greedy algorithm in which order to contract pairs of operands.

    Returns for each pair its indices among the remaining operands; the result of each pair goes to
    their end: ((0, 1), (0, 1)) contracts operands 0 and 1, then operand 2 and their result.
    """
    index_of_name = {name: index for index, name in enumerate(shardings.lengths)}
    arguments: list[Any] = []
    for operand in shardings.operands:
        # A zero, broadcast, takes no memory: numpy looks at shapes only.
        arguments.append(np.broadcast_to(np.float32(0), operand.shape))
        arguments.append([index_of_name[name] for name in operand.layout.names])
    arguments.append([index_of_name[name] for name in shardings.result.layout.names])
    _, *path = np.einsum_path(*arguments, optimize="greedy")[0]  # begins with its own name
    order: list[OperandIndices] = []
    for operand_indices in path:
        # numpy puts a pair's result at the end, as this module does. If pairs save no operations, it
        # contracts all remaining operands at once: then any order of pairs will do.
        if len(operand_indices) == 2:
            order.append(tuple(operand_indices))
        else:
            order += [(0, 1)] * (len(operand_indices) - 1)
    return tuple(order)
