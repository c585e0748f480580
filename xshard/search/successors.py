"""The moves worth trying from a state: all on small meshes, on large ones towards the goal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations, combinations_with_replacement, pairwise, permutations, product

from xshard.search.states import Cut, Move, Space, State

# Up to this many axes, dims and devices the step set is complete: the proof of optimality covers it.
COMPLETE_AXES, COMPLETE_DIMS, COMPLETE_DEVICES = 3, 3, 64
MAX_PERMUTES = 8  # rearrangements by permutation tried from one state of a large space


class Moves:
    """The moves of one space, generated in a fixed order."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.goal = space.goal_state
        named = [s for end in (space.start, space.goal) for s in space.state(end.layout).cuts]
        start = space.start_state
        self.pinned = tuple(map(_shared, start.cuts, self.goal.cuts))
        self.usable = self._usable(start)
        dims = len(space.start.shape)
        small = len(self.usable) <= COMPLETE_AXES and dims <= COMPLETE_DIMS
        small = small and math.prod(space.sizes[a] for a in self.usable) <= COMPLETE_DEVICES
        plain = (space.is_plain(cut) and space.is_even(i % dims, cut) for i, cut in enumerate(named))
        self.complete = small and all(plain)
        self._known: dict[State, tuple[Move, ...]] = {}
        self._cuts_by_sums: dict[tuple[int, ...], tuple[tuple[Cut, ...], ...]] = {}

    def _usable(self, start: State) -> tuple[int, ...]:
        """The axes that steps may use: axes that change, and replicas that can take shares for them."""
        space, goal = self.space, self.goal
        old, new = space.roles(start), space.roles(goal)
        changing = [a for a in {**old, **new} if old.get(a) != new.get(a)]
        changing += [a for a in range(len(space.axes)) if (a in start.sums) != (a in goal.sums)]
        slowest = min((space.levels(a)[0] for a in changing), default=0)
        spare = set(space.free(start)) & set(space.free(goal))
        reduces = any(a not in goal.sums for a in start.sums)
        spare_axes = [a for a in spare if reduces or space.levels(a)[-1] > slowest]
        return tuple(sorted({*changing, *spare_axes}))

    def _free(self, state: State) -> tuple[int, ...]:
        return tuple(a for a in self.space.free(state) if a in self.usable)

    def collectives(self, state: State) -> Iterable[Move]:
        """Every move worth trying from a state, exchanges left out."""
        if self.complete:
            return self._collectives(state)  # asked once
        if (known := self._known.get(state)) is None:
            known = self._known[state] = tuple(self._collectives(state))
        return known

    def _collectives(self, state: State) -> Iterator[Move]:
        yield from self._reductions(state)
        yield from self._slices(state)
        yield from self._all_to_alls(state)
        yield from self._gathers(state)
        yield from self._into_sums(state)
        yield from self._permutes(state)

    def _gathers(self, state: State) -> Iterator[Move]:
        for d, cut in enumerate(state.cuts):
            for n in range(1, len(cut) + 1 - self._kept(d, cut)):
                if self._evenly(d, cut[:-n], cut[-n:]):
                    yield Move("all_gather", (d, n), self._with(state, d, cut[:-n]))

    def _slices(self, state: State) -> Iterator[Move]:
        free = self._free(state)
        if not free or not state.cuts:  # a scalar has no dims to shard
            return
        new_cuts = self._all_new_cuts if self.complete else self._some_new_cuts
        for new in dict.fromkeys(new_cuts(state, free)):
            axes = [a for cut in new for a in self.space.axes_in(cut)]
            if axes and len(set(axes)) == len(axes) and set(axes) <= set(free) and self._may_cut(state, new):
                yield Move("slice", new, State(tuple(map(tuple.__add__, state.cuts, new)), state.sums))

    def _may_cut(self, state: State, new: tuple[Cut, ...]) -> bool:
        """Whether new shards are the goal's, or even; other shards are a detour."""
        return all(
            not more or more == self._wanted(d, cut)[: len(more)] or self._evenly(d, cut, more)
            for d, (cut, more) in enumerate(zip(state.cuts, new, strict=True))
        )

    def _all_new_cuts(self, state: State, free: tuple[int, ...]) -> Iterator[tuple[Cut, ...]]:
        """Shards that slices may add to every dim: the goal's first, then any free axes in any order."""
        wanted = [self._wanted(d, cut) for d, cut in enumerate(state.cuts)]
        yield from product(*([w[:n] for n in range(len(w), -1, -1)] for w in wanted))
        for n in range(1, len(free) + 1):
            splits = list(combinations_with_replacement(range(n + 1), len(wanted) - 1))
            for order, inner in product(permutations(free, n), splits):
                yield tuple(order[a:b] for a, b in pairwise((0, *inner, n)))

    def _some_new_cuts(self, state: State, free: tuple[int, ...]) -> Iterator[tuple[Cut, ...]]:
        """All shards of the goal at once; else one dim at a time."""
        yield tuple(self._wanted(d, cut) for d, cut in enumerate(state.cuts))
        for d, cut in enumerate(state.cuts):
            for new in self._new_cuts(d, cut, free):
                yield tuple(new if e == d else () for e in range(len(state.cuts)))

    def _new_cuts(self, d: int, cut: Cut, free: tuple[int, ...]) -> Iterator[Cut]:
        wanted = self._wanted(d, cut)
        for n in range(len(wanted), 0, -1):
            yield wanted[:n]
        for s in self.goal.cuts[d]:  # out of order: a permutation puts it right later
            yield (s,)
        for a in free:  # a replica's share, so that a slow link carries it once
            if a not in self.space.axes_in(s for cut in self.goal.cuts for s in cut):
                yield (a,)

    def _all_to_alls(self, state: State) -> Iterator[Move]:
        for d, cut in enumerate(state.cuts):
            for n in range(1, len(cut) + 1 - self._kept(d, cut)):
                moving = cut[-n:]
                if not self._evenly(d, cut[:-n], moving):
                    continue
                for e, other in enumerate(state.cuts):
                    if e == d:
                        continue
                    for new in dict.fromkeys(self._arrivals(d, e, other, moving)):
                        if self._evenly(e, other, new):
                            after = self._with(self._with(state, d, cut[:-n]), e, other + new)
                            yield Move("all_to_all", (d, n, e, new), after)

    def _arrivals(self, d: int, e: int, other: Cut, moving: Cut) -> Iterator[Cut]:
        """How axes taken from dim `d` may shard dim `e`."""
        axes = sorted(self.space.axes_in(moving))
        wanted = self._wanted(e, other)
        for k in range(1, len(wanted) + 1):
            if sorted(self.space.axes_in(wanted[:k])) == axes:
                yield wanted[:k]
        if self.complete:
            yield from permutations(moving)
        elif self.space.is_plain(moving):
            # To the goal's dim; or out of the way of a gather, to come back later.
            goals = self.goal.cuts[e], self.goal.cuts[d]
            if any(set(axes) <= set(self.space.axes_in(cut)) for cut in goals):
                yield moving

    def _reductions(self, state: State) -> Iterator[Move]:
        ending = tuple(a for a in state.sums if a not in self.goal.sums)
        for axes in self._subsets(ending):
            after = State(state.cuts, tuple(a for a in state.sums if a not in axes))
            yield Move("all_reduce", (axes,), after)
            for d, cut in enumerate(state.cuts):
                wanted = self._wanted(d, cut)
                fits = [wanted[:k] for k in range(1, len(wanted) + 1)]
                orders = permutations(axes) if self.complete else (axes,)
                for new in dict.fromkeys([*fits, *orders]):
                    if sorted(self.space.axes_in(new)) == sorted(axes) and self._evenly(d, cut, new):
                        yield Move("reduce_scatter", (d, new), self._with(after, d, cut + new))

    def _into_sums(self, state: State) -> Iterator[Move]:
        begins = [a for a in self.goal.sums if a not in state.sums]
        for d, cut in enumerate(state.cuts):
            for n in range(1, len(cut) + 1):
                axes = self.space.axes_in(cut[-n:])
                if set(axes) <= set(begins):
                    sums = tuple(sorted((*state.sums, *axes)))
                    yield Move("embed", (d, n), self._with(State(state.cuts, sums), d, cut[:-n]))
        free = self._free(state)
        for axes in self._subsets(tuple(a for a in begins if a in free)):
            yield Move("mask", (axes,), State(state.cuts, tuple(sorted((*state.sums, *axes)))))

    def _permutes(self, state: State) -> Iterator[Move]:
        """Rearrangements that keep the length of every block: the goal itself, else others."""
        space, n_found = self.space, 0
        lengths = [space.length(d, cut)[0] for d, cut in enumerate(state.cuts)]
        if state.sums == self.goal.sums and lengths == [
            space.length(d, cut)[0] for d, cut in enumerate(self.goal.cuts)
        ]:
            yield Move("permute", (), self.goal)
        if not space.is_regular(state):
            return
        usable = tuple(a for a in self.usable if a not in state.sums)
        parts = [self._parts(cut[len(pin) :]) for cut, pin in zip(state.cuts, self.pinned, strict=True)]
        for cuts in self._arrangements(0, usable, parts):
            if cuts not in (state.cuts, self.goal.cuts):
                yield Move("permute", (), State(cuts, state.sums))
                n_found += 1
                if n_found == MAX_PERMUTES and not self.complete:
                    return

    def exchanges(self, state: State) -> Iterator[Move]:
        """Exchanges to states from which the goal is near: collectives do the rest."""
        if self.complete:
            ending = tuple(a for a in state.sums if a not in self.goal.sums)
            begins = tuple(a for a in self.goal.sums if a not in state.sums)
            kept = tuple(a for a in state.sums if a in self.goal.sums)
            for stay in ((), *self._subsets(ending)):
                for new in ((), *self._subsets(begins)):
                    sums = tuple(sorted((*kept, *stay, *new)))
                    for cuts in self._all_cuts(sums):
                        yield Move("exchange", (), State(cuts, sums))
            return
        free = self._free(self.goal)
        for axes in self._subsets(free):
            for d, cut in enumerate(self.goal.cuts):
                if self._evenly(d, cut, axes):
                    yield Move("exchange", (), self._with(self.goal, d, cut + axes))

    def _all_cuts(self, sums: tuple[int, ...]) -> tuple[tuple[Cut, ...], ...]:
        """Every way to shard the dims evenly by axes that hold no addends."""
        if (known := self._cuts_by_sums.get(sums)) is None:
            known = self._cuts_by_sums[sums] = tuple(self._new_all_cuts(sums))
        return known

    def _new_all_cuts(self, sums: tuple[int, ...]) -> Iterator[tuple[Cut, ...]]:
        usable = [a for a in self.usable if a not in sums]
        dims = range(len(self.space.start.shape))
        for places in product((-1, *dims), repeat=len(usable)):
            chosen = [tuple(a for a, p in zip(usable, places, strict=True) if p == d) for d in dims]
            orders = (permutations(axes) for axes in chosen)
            for tails in product(*orders):
                cuts = tuple(pin + tail for pin, tail in zip(self.pinned, tails, strict=True))
                if all(self.space.is_even(d, cut) for d, cut in enumerate(cuts)):
                    yield cuts

    def _arrangements(self, d: int, usable: tuple[int, ...], parts: list[int]) -> Iterator[tuple[Cut, ...]]:
        """Ways to shard the dims from `d` on into as many parts as now, the goal's leading shards first."""
        if d == len(parts):
            yield ()
            return
        for cut in dict.fromkeys(self._rearranged(d, usable, parts[d])):
            left = tuple(a for a in usable if a not in cut)
            for others in self._arrangements(d + 1, left, parts):
                yield (self.pinned[d] + cut, *others)

    def _rearranged(self, d: int, usable: tuple[int, ...], parts: int) -> Iterator[Cut]:
        if self.complete:
            for n in range(len(usable) + 1):
                yield from (cut for cut in permutations(usable, n) if self._parts(cut) == parts)
            return
        goal = self.goal.cuts[d][len(self.pinned[d]) :]
        for n in range(len(goal), -1, -1):
            lead = goal[:n]
            if not self.space.is_plain(lead) or not set(lead) <= set(usable) or parts % self._parts(lead):
                continue
            rest = [a for a in usable if a not in lead]
            for k in range(len(rest) + 1):
                # The order of axes that the goal does not have there does not matter.
                yield from (lead + c for c in combinations(rest, k) if self._parts(lead + c) == parts)

    def _subsets(self, axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """All of the axes first, then fewer; on large spaces all of them and each alone."""
        for n in range(len(axes), 0, -1):
            if self.complete or n in (1, len(axes)):
                yield from combinations(axes, n)

    def _parts(self, cut: Cut) -> int:
        return math.prod([self.space.sizes[s] for s in cut])

    def _wanted(self, d: int, cut: Cut) -> Cut:
        """The goal's shards of a dim that come after `cut`, if those lead up to them."""
        goal = self.goal.cuts[d]
        return goal[len(cut) :] if goal[: len(cut)] == cut else ()

    def _kept(self, d: int, cut: Cut) -> int:
        """Number of leading shards of a dim that stay: the pinned; on large spaces, all of the goal's."""
        return len(self.pinned[d] if self.complete else _shared(cut, self.goal.cuts[d]))

    def _evenly(self, d: int, outer: Cut, inner: Cut) -> bool:
        """Whether `inner` shards every block of a dim under `outer` into equal parts."""
        return self.space.is_even(d, outer) and self.space.is_even(d, outer + inner)

    @staticmethod
    def _with(state: State, d: int, cut: Cut) -> State:
        return State((*state.cuts[:d], cut, *state.cuts[d + 1 :]), state.sums)


def _shared(a: Cut, b: Cut) -> Cut:
    """The leading shards that both have."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]
