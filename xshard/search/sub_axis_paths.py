"""Paths over sub-axes: slice replicas until blocks match, permute whole blocks, gather the rest.

If shards over `x` of 4 become shards over `y` of 2, two blocks under `x` are one block under `y`. Half of `x`
may stand for `y`, so that only the other half is gathered instead of all of `x`. Such a path is constructed,
not searched for: every dim is sharded into the least common multiple of its parts on both sides, by axes that
are free on one side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise, permutations

from xshard.cost.model import LOCAL
from xshard.layout.sub_axes import Split, SubAxisMesh
from xshard.search.a_star import Path
from xshard.search.move_costs import move_cost, step_of
from xshard.search.states import Cut, Move, Space, State
from xshard.steps import Step

# How many ways to shard dims further are tried from either side; they differ in the links they use.
MAX_WAYS = 16
LEAST_GAIN = 1e-9  # of the seconds: less is rounding

Cuts = tuple[Cut, ...]
Needs = tuple[Sequence[int], Sequence[int]]  # on both sides, the factor by which every dim is sharded further
Moves = tuple[tuple[State, Move], ...]


@dataclass(frozen=True)
class SubAxisPath:
    """A path, its seconds, and the space with the axes that it names."""

    seconds: float
    space: Space
    moves: Moves

    @property
    def split(self) -> Split:
        """The axes that it splits."""
        mesh = self.space.start.mesh
        return mesh.split if isinstance(mesh, SubAxisMesh) else ()

    def steps(self) -> tuple[Step, ...]:
        return tuple(step_of(self.space, move, state) for state, move in self.moves)


def best_sub_axis_path(space: Space, path: Path, memory_limit: int | None) -> SubAxisPath | None:
    """The cheapest slice, permutation and gathers over sub-axes, if cheaper than `path` on whole axes."""
    sent = [move.kind for _, move in path.moves if move.kind not in LOCAL]
    if len(sent) < 2 and not {"exchange", "permute"} & set(sent):
        return None  # one collective: there is nothing to save
    needs = _needs(space)
    if needs is None or not (_cuts_further(needs) or _spare_axes(space)):
        return None  # equal parts are permuted without sub-axes
    if _least_seconds(space, needs) >= path.seconds:
        return None
    split = tuple(_all_parts(space))
    if not split:
        return None
    finest = _divided(space, split)
    limit = math.inf if memory_limit is None else memory_limit / space.itemsize
    best: SubAxisPath | None = None
    for more, axes in _options(finest, needs):
        best = _cheapest(finest, more, axes, limit, best.seconds if best else path.seconds) or best
    return None if best is None else _in_few_parts(space, best)


def _changing(space: Space) -> list[int]:
    """The axes with different roles on both sides."""
    old, new = space.roles(space.start_state), space.roles(space.goal_state)
    return [a for a in range(len(space.axes)) if old.get(a) != new.get(a)]


def _needs(space: Space) -> tuple[list[int], list[int]] | None:
    """Factors by which both sides must shard every dim further to match; None if they cannot."""
    endpoints = space.start_state, space.goal_state
    if endpoints[0].sums != endpoints[1].sums or None in (space.start.even_cuts, space.goal.even_cuts):
        return None
    parts = [[math.prod(space.sizes[s] for s in cut) for cut in end.cuts] for end in endpoints]
    common = [math.lcm(*both) for both in zip(*parts, strict=True)]
    if any(n % parts_ for n, parts_ in zip(space.start.shape, common, strict=True)):
        return None
    changing = _changing(space)
    needs = [[c // n for c, n in zip(common, have, strict=True)] for have in parts]
    for end, more in zip(endpoints, needs, strict=True):
        if math.prod(more) > math.prod(space.sizes[a] for a in space.free(end) if a in changing):
            return None
    return needs[0], needs[1]


def _cuts_further(needs: Needs) -> bool:
    return any(n > 1 for more in needs for n in more)


def _least_seconds(space: Space, needs: Needs) -> float:
    """A lower bound for such paths: elements that must arrive, launches and first latencies."""
    start, links, profile = space.start_state, space.fabric.links, space.profile
    least = min(link.latency_s for link in links)
    seconds = profile.launch("permute") + (links[0].latency_s if space.least_crossing(start) else least)
    if any(n > 1 for n in needs[1]) or not _cuts_further(needs):
        seconds += profile.launch("all_gather") + least
    received = space.least_received(start) * space.itemsize
    return seconds + received / max(link.bytes_per_s for link in links)


def _spare_axes(space: Space) -> list[int]:
    """Axes that hold replicas on both sides, on faster links than the slowest that a path must use."""
    start, goal = space.start_state, space.goal_state
    slowest = min(space.levels(a)[0] for a in _changing(space))
    return [a for a in space.free(start) if a in space.free(goal) and space.levels(a)[-1] > slowest]


def _all_parts(space: Space) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The axes that may be split: changing axes into prime factors, others at the boundary of nodes."""
    changing = _changing(space)
    for a in (*changing, *_spare_axes(space)):
        spans = sorted(space.group((a,)), key=lambda span: -span.stride)
        # A part of a ring is no ring.
        whole = any(space.fabric.links[span.level].topology == "ring" for span in spans)
        sizes = tuple(p for span in spans for p in (_primes(span.size) if a in changing else (span.size,)))
        if len(sizes) > 1 and not whole:
            yield space.axes[a], sizes


def _options(space: Space, needs: Needs) -> Iterator[tuple[Needs, list[int]]]:
    """The needs and the axes to meet them; also with a dim sharded over replicas: less crosses nodes."""
    changing = _changing(space)
    if _cuts_further(needs):
        yield needs, changing
    near = [a for a in _spare_axes(space) if a not in changing and len(space.levels(a)) == 1]
    parts = math.prod(space.sizes[a] for a in near)
    cuts = space.goal_state.cuts
    for d, cut in enumerate(cuts if parts > 1 else ()):
        if space.start.shape[d] % (math.prod(space.sizes[s] for s in cut) * needs[1][d] * parts) == 0:
            wider = ([n * parts if e == d else n for e, n in enumerate(more)] for more in needs)
            yield (next(wider), next(wider)), [*changing, *near]


def _in_few_parts(space: Space, path: SubAxisPath) -> SubAxisPath:
    """The same path with sub-axes merged that stay side by side. space: on whole axes."""
    split = tuple(_needed_parts(path.space, path.moves))
    fewer = _divided(space, split) if split else space
    number = {place: a for a, place in enumerate(_places(fewer))}
    # The first of the merged sub-axes stands for all: it begins where they begin.
    first = {a: number[place] for a, place in enumerate(_places(path.space)) if place in number}

    def together(state: State) -> State:
        return State(tuple(tuple(first[a] for a in cut if a in first) for cut in state.cuts), state.sums)

    moves: list[tuple[State, Move]] = []
    for before, move in path.moves:
        here, after = together(before), together(move.after)
        data = move.data
        if move.kind == "slice":
            data = tuple(b[len(a) :] for a, b in zip(here.cuts, after.cuts, strict=True))
        elif move.kind == "all_gather":
            lengths = [len(a) - len(b) for a, b in zip(here.cuts, after.cuts, strict=True)]
            data = lengths.index(max(lengths)), max(lengths)
        moves.append((here, Move(move.kind, data, after)))
    return SubAxisPath(path.seconds, fewer, tuple(moves))


def _places(space: Space) -> list[tuple[str, int]]:
    """For every axis, the whole axis it belongs to, and the number of positions of that axis outside it."""
    mesh, outside = space.start.mesh, Counter[str]()
    places = []
    for axis, size in zip(space.axes, space.sizes, strict=False):
        whole = mesh.origin(axis)
        places.append((whole, outside[whole]))
        outside[whole] = max(outside[whole], 1) * size
    return places


def _needed_parts(space: Space, moves: Moves) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The axes that a path splits, with the sub-axes that are apart somewhere on it."""
    mesh = space.start.mesh
    assert isinstance(mesh, SubAxisMesh)
    passed = [move.after.cuts for _, move in moves]
    for axis, _ in mesh.split:
        numbers = [space.axes.index(part) for part in mesh.sub_axes[axis]]
        sizes = [space.sizes[numbers[0]]]
        for one, other in pairwise(numbers):
            if all(_stay_together(one, other, cuts) for cuts in passed):
                sizes[-1] *= space.sizes[other]
            else:
                sizes.append(space.sizes[other])
        if len(sizes) > 1:
            yield axis, tuple(sizes)


def _stay_together(one: int, other: int, cuts: Cuts) -> bool:
    """Whether two parts shard a dim one after the other, or neither does."""
    cut = next((c for c in cuts if one in c or other in c), None)
    return cut is None or (one, other) in pairwise(cut)


def _divided(space: Space, split: Split) -> Space:
    """The space on a mesh with these axes split."""
    mesh = SubAxisMesh(space.start.mesh, split)
    fine = (mesh.factored(end) for end in (space.start, space.goal))
    start, goal = (end.with_layout(end.normal) for end in fine)
    return Space(start, goal, space.dtype, space.profile)


def _cheapest(
    space: Space, needs: Needs, axes: Sequence[int], limit: float, seconds: float
) -> SubAxisPath | None:
    """The cheapest such path over some axes in less than `seconds`. limit: most elements held."""
    start, goal = space.start_state, space.goal_state
    slices, gathers = (
        list(islice(_new_cuts(space, [a for a in space.free(end) if a in axes], more), MAX_WAYS))
        for end, more in zip((start, goal), needs, strict=True)
    )
    best: SubAxisPath | None = None
    for landed in gathers:
        there = State(tuple(map(tuple.__add__, goal.cuts, landed)), goal.sums)
        longer = [d for d, cut in enumerate(landed) if cut]
        orders = [_gathered(there, landed, order) for order in permutations(longer)]
        priced = [_priced(space, moves, limit) for moves in orders]
        last = min(range(len(orders)), key=lambda i: priced[i])
        for sliced in slices:
            here = State(tuple(map(tuple.__add__, start.cuts, sliced)), start.sums)
            if here == there or priced[last] >= seconds:
                continue
            slicing: Moves = ((start, Move("slice", sliced, here)),) if any(sliced) else ()
            first = (*slicing, (here, Move("permute", (), there)))
            total = _priced(space, first, limit) + priced[last]
            if total < seconds * (1 - LEAST_GAIN):
                best, seconds = SubAxisPath(total, space, (*first, *orders[last])), total
    return best


def _new_cuts(space: Space, free: Sequence[int], needs: Sequence[int]) -> Iterator[Cuts]:
    """How free axes may shard every dim into `needs` times as many parts; of equal sub-axes the innermost."""
    if not needs:
        yield ()
        return
    alike: set[tuple[object, ...]] = set()
    for n in range(len(free) + 1):
        for cut in reversed(list(combinations(free, n))):
            if math.prod(space.sizes[a] for a in cut) != needs[0]:
                continue
            kinds = tuple((space.start.mesh.origin(space.axes[a]), space.levels(a)) for a in cut)
            if kinds in alike:
                continue
            alike.add(kinds)
            for others in _new_cuts(space, [a for a in free if a not in cut], needs[1:]):
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


def _priced(space: Space, moves: Moves, limit: float) -> float:
    """Seconds of a path; infinite if it holds too much."""
    prices = [move_cost(space, move, state) for state, move in moves]
    return math.inf if any(p.held > limit for p in prices) else sum(p.seconds for p in prices)


def _primes(n: int) -> Iterator[int]:
    """Prime factors, ascending."""
    p = 2
    while n > 1:
        while n % p == 0:
            yield p
            n //= p
        p += 1
