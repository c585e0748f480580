"""The cheapest plan of a contraction: its place, the places of its gradients, and the order of its pairs.

Decides which gradients get a place of their own, and which orders of pairs are weighed: all of them up to
four operands, then the one that numpy finds for whole arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from xshard.contractions.expression import Contraction, contraction
from xshard.contractions.places import Ends
from xshard.contractions.plan import ContractionPlan, Part
from xshard.contractions.prices import Prices
from xshard.contractions.search import Found, best_places
from xshard.cost.model import Profile
from xshard.errors import PlanError
from xshard.formatting import format_bytes
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.parser import Dim
from xshard.search.request import BOTH, FORWARD

ALL_ORDERS = 4  # operands up to which every order of pairs is weighed
WIDTH = 4  # places of a pair that are followed up, the best first

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
    for parts in _ways(request):
        ends = request.contraction, request.mesh, request.shapes, request.dtype
        made = ContractionPlan(*ends, parts, request.profile, None, request.objective)
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


def _ways(request: ContractionRequest) -> Iterator[tuple[Part, ...]]:
    """The parts of a plan, the cheapest first."""
    ends, prices = request.ends, Prices(request.mesh, request.dtype, request.profile)
    if len(ends.operands) <= 2:
        for found in best_places(ends, prices, request.objective, flops_limit=request.flops_limit):
            yield (_part(tuple(range(len(ends.operands))), ends, found, prices, request.objective),)
        return
    ways = [way for order in _orders(ends) for way in _in_pairs(ends, order, prices, request.objective)]
    for _, parts in sorted(ways, key=lambda way: way[0]):
        if request.flops_limit is None or sum(part.flops for part in parts) <= request.flops_limit:
            yield parts


def _in_pairs(
    ends: Ends, order: Order, prices: Prices, objective: str
) -> list[tuple[float, tuple[Part, ...]]]:
    """The best ways to contract pair by pair in this order, with their seconds."""
    ways: list[tuple[float, tuple[Sharding, ...], tuple[Part, ...]]] = [(0.0, ends.operands, ())]
    for takes in order:
        longer = []
        for seconds, left, parts in ways:
            rest = tuple(one for i, one in enumerate(left) if i not in takes)
            taken, is_last = tuple(left[i] for i in takes), not rest
            pair = Ends(taken, ends.result if is_last else _whole(taken, (*rest, ends.result)))
            found = best_places(pair, prices, objective, stays=not is_last)
            for one in itertools.islice(found, 1 if is_last else WIDTH):
                part = _part(takes, pair, one, prices, objective)
                longer.append((seconds + one.seconds, (*rest, part.result.target), (*parts, part)))
        ways = sorted(longer, key=lambda way: way[0])[:WIDTH]
    return [(seconds, parts) for seconds, _, parts in ways]


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
        yield tuple(map(tuple, np.einsum_path(*given, kept, optimize="greedy")[0][1:]))
        return
    pairs = [list(itertools.combinations(range(left), 2)) for left in range(n, 1, -1)]
    yield from itertools.product(*pairs)


def _part(takes: tuple[int, ...], ends: Ends, found: Found, prices: Prices, objective: str) -> Part:
    gradients = _gradients(ends, found, prices) if objective == BOTH else (None,) * len(takes)
    return Part(takes, tuple(map(prices.plan, found.moves)), prices.plan(found.result), gradients)


def _gradients(ends: Ends, found: Found, prices: Prices) -> tuple[ContractionPlan | None, ...]:
    """For every operand its gradient in a place of its own, if that makes all gradients together cheaper."""
    work = found.flops / prices.profile.flops(prices.dtype)
    pulled = prices.plan(found.result.dual).cost
    shared = [prices.plan(move.dual).cost + work for move in found.moves]
    own = [_own_gradient(ends, found, i, prices, cost + pulled) for i, cost in enumerate(shared)]

    def cost(is_own: tuple[bool, ...]) -> float:
        apart = sum(plan.forward_cost for plan, alone in zip(own, is_own, strict=True) if plan and alone)
        together = sum(c for c, alone in zip(shared, is_own, strict=True) if not alone)
        return apart + together + (0.0 if all(is_own) else pulled)

    choices = itertools.product(*((False, True) if plan else (False,) for plan in own))
    best = min(choices, key=lambda is_own: round(cost(is_own), 15))  # the first: all in one place
    return tuple(plan if alone else None for plan, alone in zip(own, best, strict=True))


def _own_gradient(ends: Ends, found: Found, i: int, prices: Prices, below: float) -> ContractionPlan | None:
    """The gradient of operand `i` as a contraction of its own, if it takes fewer seconds than `below`."""
    work = found.flops / prices.profile.flops(prices.dtype)
    operand, cotangent = ends.operands[i], ends.result.with_layout(found.result.dst.dual)
    rest = [j for j in range(len(ends.operands)) if j != i]
    known = {name for end in (cotangent, *(ends.operands[j] for j in rest)) for name in end.layout.names}
    # A mean has the dual of a sum: its scale would be lost, which moves carry.
    has_scale = any(end.layout.tagged("mean") for end in (operand, ends.result))
    if below <= work or has_scale or not set(operand.layout.names) <= known:
        return None
    # The other operands are still where they were given, and where they were used.
    places = [dict.fromkeys((found.moves[j].src, found.moves[j].dst)) for j in rest]
    best: ContractionPlan | None = None
    for layouts in itertools.product(*places):
        others = tuple(ends.operands[j].with_layout(layout) for j, layout in zip(rest, layouts, strict=True))
        own = Ends((cotangent, *others), operand.with_layout(operand.layout.dual))
        one = next(best_places(own, prices, FORWARD, below=below), None)
        if one is None:
            continue
        below = one.seconds
        text = f"{', '.join(str(end.layout) for end in own.operands)} -> {own.result.layout}"
        part = _part(tuple(range(len(own.operands))), own, one, prices, FORWARD)
        shapes = tuple(end.shape for end in own.operands)
        given = contraction(text), ends.result.mesh, shapes, prices.dtype
        best = ContractionPlan(*given, (part,), prices.profile, None, FORWARD)
    return best
