"""Paths over sub-axes: slice replicas until blocks match, permute whole blocks, gather the rest. If shards
over `x` of 4 become shards over `y` of 2, half of `x` may stand for `y`, so that only the other half is
gathered. Every dim is sharded into the least common multiple of its parts, by free axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, pairwise, permutations

from xshard.cost.model import LOCAL
from xshard.layout.sub_axes import Split, SubAxisMesh
from xshard.search.a_star import Path
from xshard.search.moves import Move, SearchRoute, Space, move_cost
from xshard.search.states import Cut, State

# How many ways to shard dims further are tried from either side; they differ in the links they use.
MAX_WAYS = 16
LEAST_GAIN = 1e-9  # of the seconds: less is rounding

Cuts = tuple[Cut, ...]
Needs = tuple[
    Sequence[int], Sequence[int]
]  # on both sides, the factor by which every dim is sharded further
Moves = tuple[tuple[State, Move], ...]


@dataclass(frozen=True)
class SubAxisPath:
    """A path, its seconds, and the route with the axes that it names."""

    seconds: float
    route: SearchRoute
    moves: Moves

    @property
    def split(self) -> Split:
        """The axes that it splits."""
        mesh = self.route.grid.mesh
        return mesh.split if isinstance(mesh, SubAxisMesh) else ()


def best_sub_axis_path(
    route: SearchRoute, path: Path, memory_limit: int | None
) -> SubAxisPath | None:
    """The cheapest slice, permutation and gathers over sub-axes, if cheaper than `path` on whole axes."""
    sent = [move.kind for _, move in path.moves if move.kind not in LOCAL]
    if len(sent) < 2 and not {"exchange", "permute"} & set(sent):
        return None  # one collective: there is nothing to save
    needs = _needs(route)
    if needs is None or not (_cuts_further(needs) or route.spare):
        return None  # equal parts are permuted without sub-axes
    if route.grid.least_seconds(route.start, route.goal) >= path.seconds:
        return None
    split = tuple(_all_parts(route))
    if not split:
        return None
    finest = _divided(route, split)
    limit = math.inf if memory_limit is None else memory_limit / route.grid.itemsize
    best: SubAxisPath | None = None
    for more, axes in _options(finest, needs):
        best = _cheapest(finest, more, axes, limit, best.seconds if best else path.seconds) or best
    return None if best is None else _in_few_parts(route, best)


def _needs(route: SearchRoute) -> tuple[list[int], list[int]] | None:
    """Factors by which both sides must shard every dim further to match; None if they cannot."""
    endpoints = route.start, route.goal
    if endpoints[0].sums != endpoints[1].sums or not all(map(route.grid.is_regular, endpoints)):
        return None
    parts = [[route.grid.parts(cut) for cut in end.cuts] for end in endpoints]
    common = [math.lcm(*both) for both in zip(*parts, strict=True)]
    if any(n % parts_ for n, parts_ in zip(route.grid.shape, common, strict=True)):
        return None
    needs = [[c // n for c, n in zip(common, have, strict=True)] for have in parts]
    for end, more in zip(endpoints, needs, strict=True):
        if math.prod(more) > route.grid.parts(
            a for a in route.grid.free(end) if a in route.changing
        ):
            return None
    return needs[0], needs[1]


def _cuts_further(needs: Needs) -> bool:
    return any(n > 1 for more in needs for n in more)


def _all_parts(route: SearchRoute) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The axes that may be split: changing axes into prime factors, others at the boundary of nodes."""
    grid = route.grid
    for a in (*route.changing, *route.spare):
        spans = sorted(grid.group((a,)), key=lambda span: -span.stride)
        # A part of a ring is no ring.
        whole = any(grid.fabric.links[span.level].topology == "ring" for span in spans)
        parts = (_primes(span.size) if a in route.changing else (span.size,) for span in spans)
        sizes = tuple(chain.from_iterable(parts))
        if len(sizes) > 1 and not whole:
            yield grid.axes[a], sizes


def _options(route: SearchRoute, needs: Needs) -> Iterator[tuple[Needs, list[int]]]:
    """The needs and the axes to meet them; also with a dim sharded over replicas: less crosses nodes."""
    if _cuts_further(needs):
        yield needs, route.changing
    near = [a for a in route.spare if len(route.grid.levels(a)) == 1]
    parts = route.grid.parts(near)
    cuts = route.goal.cuts
    for d, cut in enumerate(cuts if parts > 1 else ()):
        if route.grid.shape[d] % (route.grid.parts(cut) * needs[1][d] * parts) == 0:
            wider = ([n * parts if e == d else n for e, n in enumerate(more)] for more in needs)
            yield (next(wider), next(wider)), [*route.changing, *near]


def _in_few_parts(route: SearchRoute, path: SubAxisPath) -> SubAxisPath:
    """The same path with sub-axes merged that stay side by side. route: on whole axes."""
    fine = path.route.grid
    passed = [move.after.cuts for _, move in path.moves]
    groups: dict[str, list[list[int]]] = {}  # of every whole axis, the parts that stay side by side
    for number, part in enumerate(fine.axes):
        known = groups.setdefault(fine.mesh.origin(part), [])
        if known and all(_stay_together(known[-1][-1], number, cuts) for cuts in passed):
            known[-1].append(number)
        else:
            known.append([number])
    split = tuple(
        (axis, tuple(map(fine.parts, groups[axis]))) for axis, _ in path.split if groups[axis][1:]
    )
    fewer = _divided(route, split) if split else route
    # The first of the merged sub-axes stands for all; both meshes have the axes in the same order.
    first = {parts[0]: number for number, parts in enumerate(chain.from_iterable(groups.values()))}

    def together(state: State) -> State:
        return State(
            tuple(tuple(first[a] for a in cut if a in first) for cut in state.cuts), state.sums
        )

    moves: list[tuple[State, Move]] = []
    for before, move in path.moves:
        here = together(before)
        after = together(move.after)
        data = move.data
        if move.kind == "slice":
            data = tuple(b[len(a) :] for a, b in zip(here.cuts, after.cuts, strict=True))
        elif move.kind == "all_gather":
            lengths = [len(a) - len(b) for a, b in zip(here.cuts, after.cuts, strict=True)]
            data = lengths.index(max(lengths)), max(lengths)
        moves.append((here, Move(move.kind, data, after)))
    return SubAxisPath(path.seconds, fewer, tuple(moves))


def _stay_together(one: int, other: int, cuts: Cuts) -> bool:
    """Whether two parts shard a dim one after the other, or neither does."""
    cut = next((c for c in cuts if one in c or other in c), None)
    return cut is None or (one, other) in pairwise(cut)


def _divided(route: SearchRoute, split: Split) -> SearchRoute:
    """The route on a mesh with these axes split."""
    grid = route.grid
    mesh = SubAxisMesh(route.grid.mesh, split)
    fine = (mesh.factored(grid.sharding(end)) for end in (route.start, route.goal))
    start, goal = (end.with_layout(end.normal) for end in fine)
    return Space(start, goal, grid.itemsize, grid.profile).route


def _cheapest(
    route: SearchRoute, needs: Needs, axes: list[int], limit: float, below: float
) -> SubAxisPath | None:
    """The cheapest such path over some axes in less than `below` seconds. limit: most elements held."""
    start = route.start
    goal = route.goal
    slices, gathers = (
        list(
            islice(_new_cuts(route, [a for a in route.grid.free(end) if a in axes], more), MAX_WAYS)
        )
        for end, more in zip((start, goal), needs, strict=True)
    )
    best: SubAxisPath | None = None
    for landed in gathers:
        there = State(tuple(map(tuple.__add__, goal.cuts, landed)), goal.sums)
        longer = [d for d, cut in enumerate(landed) if cut]
        orders = [_gathered(there, landed, order) for order in permutations(longer)]
        priced = [_priced(route, moves, limit) for moves in orders]
        last = min(range(len(orders)), key=lambda i: priced[i])
        for sliced in slices:
            here = State(tuple(map(tuple.__add__, start.cuts, sliced)), start.sums)
            if here == there or priced[last] >= below:
                continue
            slicing: Moves = ((start, Move("slice", sliced, here)),) if any(sliced) else ()
            first = (*slicing, (here, Move("permute", (), there)))
            total = _priced(route, first, limit) + priced[last]
            if total < below * (1 - LEAST_GAIN):
                best = SubAxisPath(total, route, (*first, *orders[last]))
                below = total
    return best


def _new_cuts(route: SearchRoute, free: Sequence[int], needs: Sequence[int]) -> Iterator[Cuts]:
    """How free axes may shard every dim into `needs` times as many parts; of equal sub-axes the innermost."""
    if not needs:
        yield ()
        return
    alike: set[tuple[object, ...]] = set()
    for n in range(len(free) + 1):
        for cut in reversed(list(combinations(free, n))):
            if route.grid.parts(cut) != needs[0]:
                continue
            kinds = tuple(
                (route.grid.mesh.origin(route.grid.axes[a]), route.grid.levels(a)) for a in cut
            )
            if kinds in alike:
                continue
            alike.add(kinds)
            for others in _new_cuts(route, [a for a in free if a not in cut], needs[1:]):
                yield (cut, *others)


def _gathered(here: State, cuts: Cuts, order: Sequence[int]) -> Moves:
    """The moves that gather these innermost shards, one dim after the other."""
    moves: list[tuple[State, Move]] = []
    for d in order:
        n = len(cuts[d])
        after = State((*here.cuts[:d], here.cuts[d][:-n], *here.cuts[d + 1 :]), here.sums)
        moves.append((here, Move("all_gather", (d, n), after)))
        here = after
    return tuple(moves)


def _priced(route: SearchRoute, moves: Moves, limit: float) -> float:
    """Seconds of a path; infinite if it holds too much."""
    prices = [move_cost(route.grid, move, state) for state, move in moves]
    return math.inf if any(p.held > limit for p in prices) else sum(p.seconds for p in prices)


def _primes(n: int) -> Iterator[int]:
    """Prime factors, ascending."""
    p = 2
    while n > 1:
        while n % p == 0:
            yield p
            n //= p
        p += 1
